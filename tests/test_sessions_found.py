"""What a newcomer and an attacker found, each with the right value."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunChild
from sessions import ALARM, N_CTX, TOLERANCE, last_row, open_runtime, some_tokens

from llamacppshim import (
    ContextManifest,
    DecodeConfig,
    Model,
    Runtime,
    RuntimeConfig,
    Session,
    Snapshot,
    SnapshotStore,
    collect_many,
    decode_many,
    prefill_many,
    read_folder,
)
from llamacppshim.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    GrammarError,
    InvalidArgumentError,
    ManifestMismatchError,
    OutOfRangeError,
    SessionClosedError,
    SnapshotCorruptError,
    SnapshotError,
)

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


def test_a_full_window_in_one_pool_is_lost_to_others_and_known_to_be(models: dict[str, Model]) -> None:
    values = {"n_ctx": 512, "n_seq_max": 3, "kv_unified": True}
    wanted = [*some_tokens(60, seed=2), *some_tokens(3, seed=9)]
    with open_runtime(models, "swa-full", **values) as runtime, runtime.session() as a, runtime.session() as b:
        a.ensure_prefix(some_tokens(40, seed=1))
        b.ensure_prefix(some_tokens(100, seed=2))
        a.ensure_prefix(some_tokens(80, seed=3))
        status = b.ensure_prefix(wanted)
        assert status.plan.source != "live" or status.reused_tokens <= 60
        row = last_row(b)
    with open_runtime(models, "swa-full", **values) as runtime, runtime.session() as cold:
        cold.ensure_prefix(wanted)
        np.testing.assert_allclose(row, last_row(cold), atol=TOLERANCE)


@pytest.mark.parametrize("reuse", ["token", "bitwise"])
def test_adapters_changed_during_a_prefill_are_not_mixed_in(
    models: dict[str, Model], tiny_models: dict[str, Path], reuse: str
) -> None:
    lora, tokens, n = [(tiny_models["tiny-lora"], 4.0)], some_tokens(200), 0
    with open_runtime(models, "streams", reuse=reuse) as runtime, runtime.session() as session:

        def other(done: int, total: int) -> None:
            nonlocal n
            n += 1
            if n == 2:
                runtime.set_adapters(lora)

        with pytest.raises(ManifestMismatchError, match="adapters"):
            session.ensure_prefix(tokens, progress=other)
        assert session.explain().resident_tokens == 64
        runtime.set_adapters([])
        session.ensure_prefix(tokens)
        row = last_row(session)
        answer = session.decode(max_tokens=20, ignore_eos=True)
        next(answer)
        runtime.set_adapters(lora)
        with pytest.raises(ManifestMismatchError, match="adapters"):
            next(answer)
        runtime.set_adapters([])
        assert session.collect(max_tokens=2, ignore_eos=True).tokens
        with runtime.session() as cold:
            cold.ensure_prefix(tokens)
            np.testing.assert_allclose(row, last_row(cold), atol=TOLERANCE)


@pytest.mark.parametrize("seam", ["refuse", "reread"])
def test_a_special_token_of_the_prefix_stays_whatever_the_suffix_is(models: dict[str, Model], seam: str) -> None:
    with open_runtime(models, "attention", seam=seam) as runtime, runtime.session() as session:
        end = runtime.model.token_piece(runtime.model.eos).decode()
        for suffix in (">", ".", "x", end):
            session.ensure_prefix("Hi" + end, parse_special=True)
            prefix = session.tokens
            session.prefill_suffix(suffix)
            np.testing.assert_array_equal(session.tokens[: len(prefix)], prefix)
            assert runtime.model.detokenize(session.tokens).decode() == "Hi" + end + suffix


def test_an_appended_text_gets_no_space_where_it_would_merge(models: dict[str, Model]) -> None:
    with open_runtime(models, "spm") as runtime, runtime.session() as session:
        for first, second in (("foo", "bar"), ("hel", "lo world"), ("1", "2"), ("a", "\nb"), ("x", " y"), ("é", "é")):
            session.ensure_prefix("Hello\n")
            session.prefill_suffix(first)
            session.prefill_suffix(second, append=True)
            assert runtime.model.detokenize(session.tokens).decode().endswith(f"Hello\n{first}{second}")


def test_a_last_token_that_is_read_again_alone_is_not_called_exact(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as session:
        with pytest.raises(DecodeAbortedError):
            session.ensure_prefix(some_tokens(35), progress=lambda done, total: session.cancel())
        assert session.explain().exact == "token"


# Interrupts. In a child: an alarm raises where SIGINT would.


def test_no_interrupt_leaves_a_session_or_a_turn_taken(run_child: RunChild) -> None:
    run_child(
        ALARM,
        """
        import faulthandler
        faulthandler.dump_traceback_later(100, exit=True)
        with Runtime.open(TINY["tiny-llama"], n_ctx=512, n_threads=1, n_seq_max=2) as runtime:
            session = runtime.session()
            session.ensure_prefix("Hello\\n")
            assert interrupted(lambda: session.plan("Hello\\n"), 3) > 100
            def turn():
                session.ensure_prefix("Hello\\n")
                session.collect(max_tokens=3, ignore_eos=True)
            assert interrupted(turn, 5) > 100
            def other():
                with runtime.session() as one:
                    one.ensure_prefix("Hi\\n")
            import warnings
            warnings.simplefilter("ignore", ResourceWarning)
            assert interrupted(other, 3) > 100
            gc.collect()
            with runtime.session() as one:
                one.ensure_prefix("Hi\\n")
            turn()
            session.close()
        """,
        stderr=None,  # what is raised while Python itself runs a finalizer is said there, and ignored
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-swa", "tiny-mamba"])
def test_no_interrupt_leaves_branches_restores_or_chats_taken(run_child: RunChild, name: str) -> None:
    run_child(
        ALARM,
        f"""
        import faulthandler, warnings
        faulthandler.dump_traceback_later(200, exit=True)
        warnings.simplefilter("ignore", ResourceWarning)
        with Runtime.open(TINY["{name}"], n_ctx=1024, n_threads=1, n_seq_max=4, store="store") as runtime:
            session = runtime.session()
            session.ensure_prefix("Hello there\\n")
            saved = session.snapshot()
            expected = session.collect(max_tokens=6, ignore_eos=True).tokens
            def branch():
                session.ensure_prefix("Hello there\\n")
                children = session.branch(2)
                try:
                    prefill_many({{child: "more" for child in children}})
                    collect_many(children, max_tokens=4, ignore_eos=True)
                finally:
                    for child in children:
                        child.close()
            def restore():
                session.restore(saved)
                session.collect(max_tokens=2, ignore_eos=True)
                session.park()
            def chat():
                for _ in session.chat([{{"role": "user", "content": "hi"}}], prompt_format="chatml", max_tokens=3):
                    pass
            for work in (branch, restore, chat):
                assert interrupted(work, 3) > 100
                work()
                session.ensure_prefix("Hello there\\n")
                assert session.collect(max_tokens=6, ignore_eos=True).tokens == expected
                assert len(runtime.session().tokens) == 0
            session.close()
        """,
        stderr=None,  # as above
    )


def test_a_cancel_from_a_signal_handler_does_not_lock_up(run_child: RunChild) -> None:
    run_child(
        """
        import faulthandler, random
        faulthandler.dump_traceback_later(60, exit=True)
        with Runtime.open(TINY["tiny-llama"], n_ctx=512, n_threads=1) as runtime, runtime.session() as session:
            signal.signal(signal.SIGALRM, lambda *_: session.cancel())
            random.seed(1)
            until = time.monotonic() + 4
            while time.monotonic() < until:
                try:
                    if len(session.tokens) in (0, 400):
                        session.ensure_prefix("Hello\\n")
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))
                    for _ in session.decode(max_tokens=1, ignore_eos=True):
                        pass
                except DecodeAbortedError:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )


def test_a_cancel_is_seen_by_one_prefill_of_many_and_then_gone(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("A\n")
        session.cancel()
        with pytest.raises(DecodeAbortedError, match="it was cancelled; 2 tokens are resident"):
            prefill_many({session: "abc"})
        prefill_many({session: "abc"})


def test_a_task_that_is_cancelled_twice_leaves_nothing_behind(models: dict[str, Model]) -> None:
    async def ask(session: Session) -> None:
        async for _ in session.adecode(max_tokens=300, ignore_eos=True):
            pass

    async def main(session: Session) -> None:
        for _ in range(20):
            session.ensure_prefix("Hi\n")
            task = asyncio.create_task(ask(session))
            await asyncio.sleep(0.003)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            session.ensure_prefix("Hi there\n")

    with open_runtime(models, "attention", n_ctx=2048) as runtime, runtime.session() as session:
        asyncio.run(main(session))


# Snapshots and stores.


def test_a_restore_that_does_not_fit_beside_the_session_takes_its_place(
    models: dict[str, Model], tmp_path: Path
) -> None:
    values = {"n_ctx": 256, "n_seq_max": 2, "store": tmp_path}
    with open_runtime(models, "unified", **values) as runtime:
        with runtime.session() as session:
            session.ensure_prefix(some_tokens(150, seed=1))
            saved = session.snapshot()
            expected = session.collect(max_tokens=5, ignore_eos=True).tokens
            session.ensure_prefix(some_tokens(150, seed=2))
            session.restore(saved)
            assert session.collect(max_tokens=5, ignore_eos=True).tokens == expected
            session.park()
            session.ensure_prefix(some_tokens(150, seed=2))
            runtime.speed.tokens_per_s = 1.0
            assert session.ensure_prefix(some_tokens(150, seed=1)).plan.source == "snapshot"
        with runtime.session() as session, runtime.session() as other:
            other.ensure_prefix(some_tokens(150, seed=3))
            with pytest.raises(ContextOverflowError) as caught:
                session.restore(saved)
            assert caught.value.stage == "restore"
            assert other.explain().resident_tokens == 150


def test_forbidden_tokens_and_numpy_numbers_are_saved(models: dict[str, Model]) -> None:
    bias = {5: float("-inf"), np.int64(7): np.float64(1.5)}
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("Hello\n")
        values: dict[str, Any] = {**SAMPLED, "logit_bias": bias, "temperature": np.float64(0.9), "seed": np.uint32(3)}
        session.collect(max_tokens=3, **values)
        saved = Snapshot.from_bytes(session.snapshot().to_bytes())
        expected = session.collect(max_tokens=9, **values).tokens
        session.restore(saved)
        assert session.collect(max_tokens=9, **values).tokens == expected
        with pytest.raises(InvalidArgumentError, match=r"stop\[0\]"):
            session.decode(stop=("\ud800",))
        for name in ("temperature", "timeout_s"):
            with pytest.raises(OutOfRangeError, match=name):
                session.decode(**{name: 10**400})


def test_an_answer_that_is_none_of_its_sampler_is_damage(models: dict[str, Model]) -> None:
    import msgspec

    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("Hello\n")
        session.collect(max_tokens=3, **SAMPLED)
        saved = session.snapshot()
        assert saved.contents.answer is not None
        for change in ({"seed": -1}, {"config": msgspec.structs.replace(saved.contents.answer.config, grammar="(((")}):
            answer = msgspec.structs.replace(saved.contents.answer, **change)
            contents = msgspec.structs.replace(saved.contents, answer=answer)
            values = {name: getattr(saved, name) for name in ("tokens", "state", "text", "row", "checkpoints", "draws")}
            with pytest.raises(SnapshotCorruptError):
                session.restore(Snapshot(contents=contents, **values))
        for token in (-1, session.runtime.model.n_vocab):
            answer = msgspec.structs.replace(saved.contents.answer, late=("x", (token,), False))
            contents = msgspec.structs.replace(saved.contents, answer=answer)
            damaged = Snapshot(contents=contents, **values).to_bytes()
            with pytest.raises(SnapshotCorruptError, match="outside its vocabulary"):
                Snapshot.from_bytes(damaged)


def test_a_store_whose_folder_is_a_file_by_now_says_so(models: dict[str, Model], tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with open_runtime(models, "attention", store=folder) as runtime, runtime.session() as session:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        folder.write_text("")
        assert session.ensure_prefix("Hello\n").plan.source == "none"
        assert runtime.store is not None
        with pytest.raises(SnapshotError):
            runtime.store.entries()
    store = SnapshotStore(tmp_path / "other")
    for name in ("/etc/passwd", "../x", ""):
        with pytest.raises(SnapshotError, match="no entry's name"):
            store.load(name)
    for wrong in (None, "x", b""):
        with pytest.raises(TypeError, match="a Snapshot is needed"):
            store.put(wrong)  # type: ignore[arg-type]


# Answers.


def test_a_refused_setting_leaves_the_answer_in_hand(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as session, runtime.session() as empty:
        session.ensure_prefix("Hello world.\n")
        whole = session.collect(max_tokens=30, **SAMPLED).tokens
        session.ensure_prefix("Hello world.\n")
        first = session.collect(max_tokens=10, **SAMPLED).tokens
        with pytest.raises(GrammarError):
            session.decode(grammar="root ::= (((")
        with pytest.raises(InvalidArgumentError, match="holds no token"):
            decode_many([session, empty], max_tokens=3)
        assert first + session.collect(max_tokens=20, **SAMPLED).tokens == whole
        session.ensure_prefix("Hello world.\n")
        chunks = session.decode(max_tokens=30, **SAMPLED)
        next(chunks)
        with pytest.raises((InvalidArgumentError, OutOfRangeError)):
            session.decode(top_k=-(2**50))
        assert len(list(chunks)) == 29


def test_a_stop_text_across_a_cut_ends_the_answer_where_it_would_have_ended(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("Hello world.\n")
        text = session.collect(max_tokens=6, ignore_eos=True).text
        stop = text[4:8]
        session.ensure_prefix("Hello world.\n")
        whole = session.collect(max_tokens=6, ignore_eos=True, stop=stop)
        assert whole.finish_reason == "stop"
        for n in range(1, len(whole.tokens) + 1):
            session.ensure_prefix("Hello world.\n")
            first = session.collect(max_tokens=n, ignore_eos=True, stop=stop)
            if first.finish_reason == "stop":
                continue
            saved = Snapshot.from_bytes(session.snapshot().to_bytes())
            for restored in (False, True):
                if restored:
                    session.restore(saved)
                rest = session.collect(max_tokens=6, ignore_eos=True, stop=stop)
                assert rest.finish_reason == "stop"
                assert first.tokens + rest.tokens == whole.tokens
                assert (first.text + rest.text).startswith(whole.text)


def test_one_prompt_of_no_kind_leaves_all_as_they_were(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as one, runtime.session() as other:
        for session in (one, other):
            session.ensure_prefix("A\n")
        with pytest.raises(TypeError):
            prefill_many({one: "abc", other: 5})  # type: ignore[dict-item]
        one.prefill_suffix("abc")


def test_a_branch_at_the_prefix_is_a_prefix(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as session:
        session.ensure_prefix("A prefix.\n")
        session.prefill_suffix("suffix")
        (child,) = session.branch(at=session.n_prefix)
        child.prefill_suffix("other")
        child.close()


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_nothing_answers_on_a_prefix_that_was_not_read_to_its_end(models: dict[str, Model], kind: str) -> None:
    prompt = some_tokens(200)
    with open_runtime(models, kind, n_seq_max=3, n_ctx=3 * N_CTX) as runtime, runtime.session() as session:

        def cancel(done: int, total: int) -> None:
            if done == 64:
                session.cancel()

        with pytest.raises(DecodeAbortedError, match=r"^it was cancelled; 64 tokens are resident$"):
            session.ensure_prefix(prompt, progress=cancel)
        (child,) = session.branch()
        calls: list[Callable[[Session], object]] = [
            Session.decode,
            Session.collect,
            lambda one: one.prefill_suffix([5]),
            lambda one: collect_many([one]),
        ]
        for one in (session, child):
            for call in calls:
                with pytest.raises(ManifestMismatchError, match="call ensure_prefix"):
                    call(one)
        child.close()
        assert session.ensure_prefix(prompt).reused_tokens == 64
        assert session.collect(max_tokens=3, ignore_eos=True).tokens

        def cancel_at_once(done: int, total: int) -> None:
            session.cancel()

        with pytest.raises(DecodeAbortedError, match=r"^it was cancelled; 2[0-9][0-9] tokens are resident$"):
            session.prefill_suffix(some_tokens(100, seed=1), append=True, progress=cancel_at_once)
        assert session.collect(max_tokens=3, ignore_eos=True).tokens  # the suffix is as if it had not been begun


def test_an_iterator_whose_session_was_used_otherwise_says_that_it_ends(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as session, runtime.session() as other:
        for one in (session, other):
            one.ensure_prefix("Hello world.\n")
        chunks = session.decode(max_tokens=6, ignore_eos=True)
        next(chunks)
        steps = decode_many([session, other], max_tokens=3, ignore_eos=True)
        assert [chunk.finish_reason for chunk in chunks] == ["cancelled"]
        next(steps)
        session.ensure_prefix("Another.\n")
        assert [step[session].finish_reason for step in steps if session in step] == ["cancelled"]


def test_a_closed_session_says_why(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime:
        session, other = runtime.session(), runtime.session()
        session.close()
        with pytest.raises(SessionClosedError, match="session is closed") as closed:
            session.ensure_prefix("A")
        assert closed.value.reason == "session is closed"
    with pytest.raises(SessionClosedError) as closed:
        other.ensure_prefix("A")
    assert closed.value.reason == str(closed.value) == "its runtime is closed"
    assert SessionClosedError().reason == "session is closed"


def test_a_manifest_is_read_strictly(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("Hello world.\n")
        manifest = session.explain().manifest
    assert manifest is not None
    assert ContextManifest.from_json(manifest.to_json()) == manifest
    for wrong in (b"", b"x", b"{}", b"[]", b"\xff", manifest.to_json().replace(b'"n_ctx"', b'"n_ctxx"')):
        with pytest.raises(InvalidArgumentError, match="not a manifest"):
            ContextManifest.from_json(wrong)


# Runtimes.


def test_a_model_that_is_loaded_says_how(models: dict[str, Model], tiny_models: dict[str, Path]) -> None:
    with (
        Model(tiny_models["tiny-llama"], use_extra_bufts=False, use_mmap=False) as model,
        Runtime.open(model, n_ctx=256) as runtime,
    ):
        assert (runtime.config.use_extra_bufts, runtime.config.use_mmap) == (False, False)
        own = runtime.identity()
    with Runtime.open(models["tiny-llama"], n_ctx=256) as runtime:
        assert runtime.identity().compatible(own) == "runtime_digest"


def test_a_file_that_was_only_touched_is_still_the_same(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_models["tiny-llama"].read_bytes())
    with open_runtime({"tiny-llama": path}, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix("A\n")
        os.utime(path, (1, 1))
        session.prefill_suffix("b")
        assert session.ensure_prefix("A\n").reused_tokens == 2


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), "x", True, 10**400])
def test_a_time_limit_is_a_number_of_seconds(models: dict[str, Model], value: Any) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        with pytest.raises((InvalidArgumentError, OutOfRangeError), match="timeout_s"):
            session.ensure_prefix("A\n", timeout_s=value)
        session.ensure_prefix(some_tokens(100), timeout_s=1e10)
        assert "another thread" not in repr(session)


def test_sessions_of_a_runtime_that_is_being_closed_are_closed(models: dict[str, Model]) -> None:
    for _ in range(10):
        runtime = open_runtime(models, "streams")
        made: list[Session] = []

        def make(runtime: Runtime = runtime, made: list[Session] = made) -> None:
            try:
                for _ in range(3):
                    made.append(runtime.session())
            except RuntimeError:
                pass

        thread = threading.Thread(target=make)
        thread.start()
        runtime.close()
        thread.join()
        for session in made:
            session.close()
        assert repr(runtime) == "<Runtime closed>"


def test_a_close_does_not_wait_for_calls_that_come_after_it(loaded: dict[str, Model]) -> None:
    with open_runtime(loaded, "swa") as runtime:
        session = runtime.session()
        began, n_after = threading.Event(), 0

        def busy() -> None:
            nonlocal n_after
            n = 0
            while True:
                n_after += session._closing
                with contextlib.suppress(DecodeAbortedError):
                    try:
                        session.ensure_prefix(some_tokens(400, seed=n))
                    except SessionClosedError:
                        return
                n += 1
                began.set()

        owner = threading.Thread(target=busy)
        owner.start()
        began.wait()
        session.close()
        owner.join()
        # The call that is inside is cancelled, and perhaps one that came just before; no later one gets in.
        assert n_after <= 2


def test_a_closed_session_is_gone_with_its_last_reference(loaded: dict[str, Model]) -> None:
    with open_runtime(loaded, "attention") as runtime:
        session = runtime.session()
        session.ensure_prefix(some_tokens(20))
        session.close()
        known = weakref.ref(session)
        gc.disable()
        try:
            del session
            assert known() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 1, "top_p": 1, "seed": 3}])
def test_a_number_without_a_point_is_the_same_after_a_file(
    loaded: dict[str, Model], values: dict[str, Any], tmp_path: Path
) -> None:
    with open_runtime(loaded, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(20))
        session.collect(max_tokens=3, ignore_eos=True, **values)
        snapshot = session.snapshot()
        snapshot.save(tmp_path / "a.lcs")
        assert Snapshot.load(tmp_path / "a.lcs").digest == snapshot.digest


def test_a_float_is_a_float_whatever_it_was_given_as() -> None:
    assert type(DecodeConfig(temperature=0, top_p=np.float32(1)).top_p) is float
    assert type(DecodeConfig(temperature=0).temperature) is float
    assert repr(RuntimeConfig(rope_freq_base=10_000).rope_freq_base) == "10000.0"
    assert type(RuntimeConfig(n_ctx=512).n_ctx) is int
    with pytest.raises(InvalidArgumentError):
        DecodeConfig(temperature=True)
    with pytest.raises(OutOfRangeError):
        DecodeConfig(temperature=10**400)


def test_a_file_of_the_system_that_would_be_waited_for_is_not_read(tmp_path: Path) -> None:
    skipped: dict[str, str] = {}
    (tmp_path / "kmsg").symlink_to("/proc/kmsg")
    (tmp_path / "empty").touch()
    assert read_folder(tmp_path, on_skip=skipped.__setitem__) == []
    assert skipped["empty"] == "empty" and "kmsg" in skipped
