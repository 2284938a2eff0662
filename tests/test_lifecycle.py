"""The life of handles, each promise in a process of its own: closing, threads, fork, pickle, cycles, exit."""

from __future__ import annotations

import sys

import pytest
from conftest import RunChild

# One of each handle, and a call that only an open one can answer.
MAKE_ALL = """
def make_all():
    model = Model(TINY["tiny-llama"])
    context = Context(model, n_ctx=256, n_threads=1)
    context.decode([1, 2, 3])
    batch = Batch()
    batch.add(4, 3, 0, True)
    return {
        "model": model,
        "context": context,
        "sampler": Sampler(model, temperature=0.5, seed=1),
        "adapter": Adapter(model, TINY["tiny-lora"]),
        "template": ChatTemplate(model),
        "batch": batch,
    }

USES = {
    "model": [
        lambda m: m.tokenize("x", add_special=False, parse_special=False), lambda m: m.detokenize([1]),
        lambda m: m.token_piece(1), lambda m: m.token_text(1), lambda m: m.is_eog(1), lambda m: m.is_control(1),
        lambda m: m.n_vocab, lambda m: m.metadata, lambda m: m.digest, lambda m: m.bos, lambda m: m.path,
        lambda m: m.chat_template, lambda m: m.memory_kind, lambda m: m.__enter__(), lambda m: Context(m, n_ctx=256),
        lambda m: Sampler(m), lambda m: ChatTemplate(m), lambda m: Adapter(m, TINY["tiny-lora"]),
    ],
    "context": [
        lambda c: c.decode([1]), lambda c: c.decode_batch(Batch([1], [0], [0])), lambda c: c.cancel(),
        lambda c: c.logits(), lambda c: c.logits_view(), lambda c: c.embeddings(), lambda c: c.embeddings_seq(0),
        lambda c: c.clear(), lambda c: c.seq_rm(0), lambda c: c.seq_cp(0, 0), lambda c: c.seq_keep(0),
        lambda c: c.seq_add(0, 0, 1, 0), lambda c: c.seq_pos_min(0), lambda c: c.seq_pos_max(0),
        lambda c: c.state_size(), lambda c: c.state_save(), lambda c: c.state_load(b""),
        lambda c: c.seq_state_size(0), lambda c: c.seq_state_save(0), lambda c: c.seq_state_load(0, b""),
        lambda c: c.set_threads(1), lambda c: c.set_embeddings(False), lambda c: c.set_adapters({}),
        lambda c: c.perf(), lambda c: c.reset_perf(), lambda c: c.memory_use(), lambda c: c.n_ctx,
        lambda c: c.flash_attn, lambda c: c.can_shift, lambda c: c.__enter__(),
    ],
    "sampler": [
        lambda s: s.sample_row(np.zeros(10, np.float32)), lambda s: s.accept(1), lambda s: s.reset(),
        lambda s: s.clone(), lambda s: s.seed, lambda s: s.__enter__(),
    ],
    "adapter": [lambda a: a.metadata, lambda a: a.digest, lambda a: a.path, lambda a: a.__enter__()],
    "template": [
        lambda t: t.render([{"role": "user", "content": "x"}]), lambda t: t.parse("x"), lambda t: t.source,
        lambda t: t.supports_tools, lambda t: t.supports_thinking, lambda t: t.__enter__(),
    ],
    "batch": [lambda b: b.add(1, 0, 0), lambda b: b.clear(), lambda b: len(b), lambda b: b.__enter__()],
}
"""

# A thread that decodes until it is cancelled, and a wait until it is inside.
LONG_DECODE = """
def long_decode(context, results, tokens=20000):
    def body():
        try:
            results.append(context.decode(np.arange(tokens) % 500, logits="none"))
        except LlamaCppShimError as error:
            results.append(error)
    thread = threading.Thread(target=body)
    thread.start()
    while refusal(context.seq_pos_max, 0)[0] != "BusyError":
        assert not results, results
    return thread
"""


def test_closing_twice_is_fine(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        for handle in make_all().values():
            assert not handle.closed
            handle.close()
            handle.close()
            assert handle.closed
            assert "closed" in repr(handle)
        assert set(live_counts().values()) == {0}
        """,
    )


def test_every_use_after_close_is_a_closed_error(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        for handle in handles.values():
            handle.close()
        for name, uses in USES.items():
            for i, use in enumerate(uses):
                assert refusal(use, handles[name])[0] == "ClosedError", (name, i, refusal(use, handles[name]))
        other = Model(TINY["tiny-llama"])
        context = Context(other, n_ctx=256)
        assert refusal(context.set_adapters, {handles["adapter"]: 1.0})[0] == "ClosedError"
        assert refusal(context.decode_batch, handles["batch"])[0] == "ClosedError"
        assert refusal(Sampler(other).sample, handles["context"])[0] == "ClosedError"
        context.decode([1])
        """,
    )


def test_a_with_block_closes_its_handle_even_when_it_raises(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        for handle in make_all().values():
            try:
                with handle as same:
                    assert same is handle
                    raise KeyError
            except KeyError:
                assert handle.closed
        """,
    )


def test_a_model_closed_first_serves_its_handles_until_the_last(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        expected = handles["context"].decode([5, 6], logits="all") and handles["context"].logits([0, 1])
        handles["context"].clear()
        handles["context"].decode([1, 2, 3])
        handles["model"].close()
        del handles["model"]
        gc.collect()
        handles["context"].decode([5, 6], logits="all")
        np.testing.assert_array_equal(handles["context"].logits([0, 1]), expected)
        handles["context"].set_adapters({handles["adapter"]: 0.5})
        handles["sampler"].sample(handles["context"])
        handles["template"].render([{"role": "user", "content": "x"}])
        while handles:
            handles.popitem()[1].close()
        assert set(live_counts().values()) == {0}
        """,
    )


def test_a_close_during_a_decode_in_another_thread_is_busy(run_child: RunChild) -> None:
    run_child(
        LONG_DECODE,
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=32768, n_threads=1)
        results = []
        thread = long_decode(context, results)
        assert refusal(context.close)[0] == "BusyError"
        assert not context.closed
        model.close()                          # gives up the handle at once; the context keeps the weights
        context.cancel()
        thread.join()
        assert isinstance(results[0], DecodeAbortedError), results
        context.clear()
        context.decode([1, 2, 3])
        context.close()
        assert set(live_counts().values()) == {0}
        """,
    )


def test_of_four_threads_on_one_context_three_are_told_that_it_is_busy(run_child: RunChild) -> None:
    run_child(
        LONG_DECODE,
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=32768, n_threads=1)
        sampler, results, refused = Sampler(model), [], []
        first = long_decode(context, results)
        calls = [lambda: context.decode([1]), context.logits, context.state_save, lambda: context.seq_rm(0),
                 lambda: context.set_threads(1), lambda: sampler.sample(context), context.close, context.clear]
        def body():
            for call in calls:
                refused.append(refusal(call)[0])
        others = [threading.Thread(target=body) for _ in range(3)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        assert refused == ["BusyError"] * 24, refused
        assert not results
        context.cancel()
        first.join()
        assert isinstance(results[0], DecodeAbortedError)
        sampler.reset()                        # was not left marked as inside
        """,
    )


def test_four_threads_hammering_one_context_leave_it_usable(run_child: RunChild) -> None:
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=256, n_threads=1)
        context.decode([1, 2, 3])
        expected = context.logits()
        stop = time.monotonic() + 3
        counts = {"BusyError": 0, "": 0, "OutOfRangeError": 0}
        def body():
            while time.monotonic() < stop:
                for call in (lambda: context.decode([1]), lambda: context.seq_rm(0), context.logits,
                             lambda: np.asarray(context.logits_view()).sum(), lambda: context.seq_state_size(0)):
                    try:
                        call()
                        name = ""
                    except (BusyError, OutOfRangeError, StaleViewError) as error:
                        name = type(error).__name__
                    counts[name] = counts.get(name, 0) + 1
        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts[""] > 0
        context.clear()
        context.decode([1, 2, 3])
        np.testing.assert_array_equal(context.logits(), expected)
        """
    )


def test_one_model_serves_many_threads_and_may_be_closed_under_them(run_child: RunChild) -> None:
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        text = "the quick brown fox " * 400
        expected = model.tokenize(text, add_special=False, parse_special=False).tolist()
        outcomes = []
        def body():
            for _ in range(1000):
                try:
                    assert model.tokenize(text, add_special=False, parse_special=False).tolist() == expected
                    assert model.detokenize(expected) == text.encode()
                except ClosedError:
                    outcomes.append("closed")
                    return
            outcomes.append("never closed")
        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        model.close()
        for thread in threads:
            thread.join()
        assert outcomes == ["closed"] * 4
        assert set(live_counts().values()) == {0}
        """
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_gets_forked_errors_and_frees_nothing(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        del handles["batch"], USES["batch"]    # plain memory, which a child may use
        view = handles["context"].logits_view()
        expected = handles["context"].logits()
        before = live_counts()
        child = os.fork()
        if child == 0:
            try:
                for name, uses in USES.items():
                    for i, use in enumerate(uses):
                        assert refusal(use, handles[name])[0] == "ForkedError", (name, i, refusal(use, handles[name]))
                assert refusal(lambda: view[0])[0] == "ForkedError"
                assert refusal(np.asarray, view)[0] == "ForkedError"
                for name, handle in handles.items():
                    handle.close()
                    handle.close()
                    assert refusal(USES[name][0], handle)[0] == "ForkedError"
                handles.clear()
                del view
                gc.collect()
                assert live_counts() == before     # nothing was freed
                model = Model(TINY["tiny-llama"])  # and the child can make its own
                context = Context(model, n_ctx=256, n_threads=1)
                context.decode([1, 2, 3])
                np.testing.assert_array_equal(context.logits(), expected)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        np.testing.assert_array_equal(handles["context"].logits(), expected)
        handles["context"].decode([4])
        """,
        stderr=None,
    )


def test_handles_cannot_be_pickled_or_copied(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        handles["view"] = handles["context"].logits_view()
        for handle in handles.values():
            for refuse in (pickle.dumps, copy.copy, copy.deepcopy):
                name, text = refusal(refuse, handle)
                assert name == "TypeError" and type(handle).__name__ in text, (handle, refuse, name, text)
        """,
    )


def test_handles_cannot_be_subclassed_or_made_without_arguments(run_child: RunChild) -> None:
    run_child(
        """
        for cls in (Model, Context, Sampler, Adapter, ChatTemplate, Batch, LogitsView, DecodeResult):
            assert refusal(type, "Sub", (cls,), {})[0] == "TypeError", cls
            if cls is not Batch:
                assert refusal(cls.__new__, cls)[0] == "TypeError", cls
        for cls in (Context, Sampler, Adapter, ChatTemplate):
            assert refusal(cls, None)[0] == "TypeError", cls
            assert refusal(cls, object())[0] == "TypeError", cls
        assert set(live_counts().values()) == {0}
        """
    )


def test_reference_cycles_are_collected(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        class Node:
            pass
        gc.disable()
        for _ in range(3):
            node = Node()
            node.handles = make_all()
            node.view = node.handles["context"].logits_view()
            node.array = np.asarray(node.view)
            node.handles["me"] = node
            del node
        assert live_counts()["contexts"] == 3
        gc.collect()
        assert set(live_counts().values()) == {0}, live_counts()
        """,
    )


def test_handles_can_be_watched_by_weak_references(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        del handles["batch"]
        watched = [weakref.ref(handle) for handle in handles.values()]
        assert all(ref() is not None for ref in watched)
        handles.clear()
        assert [ref() for ref in watched] == [None] * 5
        """,
    )


def test_the_interpreter_exits_silently_with_everything_open(run_child: RunChild) -> None:
    run_child(
        MAKE_ALL,
        """
        handles = make_all()
        view = handles["context"].logits_view()
        array = np.asarray(view)
        handles["me"] = handles
        sys.modules["kept"] = handles
        """,
    )


def test_the_interpreter_exits_silently_while_daemon_threads_decode_and_load(run_child: RunChild) -> None:
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        contexts = [Context(model, n_ctx=32768, n_threads=1) for _ in range(2)]
        def decode(context):
            while True:
                context.decode(np.arange(20000) % 500, logits="none")
        def load():
            while True:
                Model(TINY["tiny-llama"])
        threads = [threading.Thread(target=decode, args=(context,), daemon=True) for context in contexts]
        threads.append(threading.Thread(target=load, daemon=True))
        for thread in threads:
            thread.start()
        while not all(refusal(context.seq_pos_max, 0)[0] == "BusyError" for context in contexts):
            pass
        """,
        timeout=60,
    )


def test_the_interpreter_exits_silently_from_an_exception_in_the_middle(run_child: RunChild) -> None:
    done = run_child(
        MAKE_ALL,
        """
        handles = make_all()
        sys.exit(7)
        """,
        returncode=7,
    )
    assert done.stderr == ""


def test_two_hundred_loads_and_closes_do_not_grow(run_child: RunChild) -> None:
    """Oracle: resident memory after 200 rounds against after 40; one leaked model would be 15 MB a round."""
    run_child(
        """
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        def round():
            model = Model(TINY["tiny-llama"])
            context = Context(model, n_ctx=256, n_threads=1)
            context.decode(model.tokenize("hello", add_special=True, parse_special=False))
            sampler = Sampler(model)
            sampler.sample(context)
            for handle in (context, sampler, model):
                handle.close()
        for i in range(200):
            round()
            if i == 39:
                early = resident()
        late = resident()
        assert late - early < 8 << 20, (early, late)
        assert set(live_counts().values()) == {0}
        """,
        timeout=600,
    )


# Rows of logits without a copy


def test_a_context_closed_under_an_array_of_its_logits_frees_it_with_the_array(run_child: RunChild) -> None:
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=256, n_threads=1)
        context.decode([1, 2, 3])
        expected = context.logits()[0]
        array = np.asarray(context.logits_view())
        second = memoryview(context.logits_view())
        context.close()
        model.close()
        assert live_counts()["contexts"] == 1
        np.testing.assert_array_equal(array, expected)
        del array
        assert live_counts()["contexts"] == 1
        assert second[0] == expected[0]
        second.release()
        assert live_counts()["contexts"] == 0
        assert set(live_counts().values()) == {0}
        """
    )


def test_an_array_let_go_during_a_decode_lets_the_row_go_afterwards(run_child: RunChild) -> None:
    run_child(
        LONG_DECODE,
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=32768, n_threads=1, n_seq_max=1, n_outputs_max=32)
        context.decode([1, 2, 3])
        array = np.asarray(context.logits_view())
        results = []
        thread = long_decode(context, results)
        del array
        context.cancel()
        thread.join()
        context.clear()
        context.decode([1] * 32, logits="all")     # would be refused while a row is held
        context.close()
        assert live_counts()["contexts"] == 0
        """,
    )


# Ctrl-C

# A shell's background job starts with SIGINT ignored, and so would its children: hence the first line.
INTERRUPTED = """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert threading.current_thread() is threading.main_thread()
        def interrupt_soon(signal_number=signal.SIGINT):
            def body():
                time.sleep(0.3)
                os.kill(os.getpid(), signal_number)
            threading.Thread(target=body, daemon=True).start()
        tokens = np.arange(30000) % 500
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=32768, n_threads=1)
        context.decode([1, 2, 3])
        expected = context.logits()
        context.clear()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_ends_a_long_decode_and_the_context_is_usable(run_child: RunChild) -> None:
    run_child(
        INTERRUPTED,
        """
        handler = signal.getsignal(signal.SIGINT)
        interrupt_soon()
        try:
            context.decode(tokens, logits="none")
            raise SystemExit("was not interrupted")
        except KeyboardInterrupt as error:
            cause = error.__cause__
        assert isinstance(cause, DecodeAbortedError) and cause.status is DecodeStatus.ABORTED
        assert 0 <= cause.committed < len(tokens)
        assert context.seq_pos_max(0) == cause.committed - 1
        assert signal.getsignal(signal.SIGINT) is handler
        context.clear()
        context.decode([1, 2, 3])                 # the cancel is not left behind
        np.testing.assert_array_equal(context.logits(), expected)
        """,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_a_handler_that_does_not_raise_makes_ctrl_c_a_decode_aborted_error(run_child: RunChild) -> None:
    run_child(
        INTERRUPTED,
        """
        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        interrupt_soon()
        assert refusal(context.decode, tokens, logits="none")[0] == "DecodeAbortedError"
        assert seen == [signal.SIGINT]
        context.clear()
        context.decode([1, 2, 3])
        np.testing.assert_array_equal(context.logits(), expected)
        """,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_an_ignored_ctrl_c_does_not_end_a_decode(run_child: RunChild) -> None:
    run_child(
        INTERRUPTED,
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_soon()
        began = time.monotonic()
        while time.monotonic() < began + 0.6:
            context.clear()
            assert context.decode(tokens[:2000], logits="none").committed == 2000
        """,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_signals_between_short_decodes_never_abort_the_next(run_child: RunChild) -> None:
    """A signal that comes as a decode ends must not be kept for the one after."""
    run_child(
        INTERRUPTED,
        """
        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        aborted = decoded = sent = 0
        def storm():
            global sent
            for _ in range(300):
                sent += 1
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.003)
        thread = threading.Thread(target=storm)
        thread.start()
        while thread.is_alive():
            try:
                context.decode([1])
                decoded += 1
            except DecodeAbortedError:
                aborted += 1
            context.seq_rm(0)
        assert decoded > 0 and aborted <= sent
        context.clear()
        context.decode([1, 2, 3])
        np.testing.assert_array_equal(context.logits(), expected)
        """,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_while_another_thread_decodes_is_the_main_thread_s_alone(run_child: RunChild) -> None:
    run_child(
        INTERRUPTED,
        LONG_DECODE,
        """
        results = []
        thread = long_decode(context, results, 2000)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
            raise SystemExit("was not interrupted")
        except KeyboardInterrupt:
            pass
        thread.join()
        assert results[0].committed == 2000
        """,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_ends_a_load(run_child: RunChild) -> None:
    run_child(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        model = None
        def fraction_seen(fraction):
            os.kill(os.getpid(), signal.SIGINT)
        try:
            model = Model(TINY["tiny-llama"], progress=fraction_seen)
        except KeyboardInterrupt:
            pass
        assert model is None
        assert set(live_counts().values()) == {0}
        """
    )
