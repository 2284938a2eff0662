"""What a process may do to sessions: fork, exit, Ctrl-C, copies, and the same again many times. Each in a child."""

from __future__ import annotations

from conftest import RunChild

OPEN = """
    from llamacppshim import Runtime
    def opened(name="tiny-llama", **values):
        return Runtime.open(TINY[name], **{"n_ctx": 1024, "n_ubatch": 32, "n_batch": 32, "n_threads": 1, **values})
    text = "The quick brown fox jumps.\\n" * 10
"""


def test_leaving_everything_open_is_silent(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        runtime = opened(n_seq_max=2)
        session, other = runtime.session(), runtime.session()
        session.ensure_prefix(text)
        chunks = session.decode(max_tokens=50)
        next(chunks)
        """,
    )


def test_a_fork_refuses_and_frees_nothing(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        runtime = opened()
        session = runtime.session()
        session.ensure_prefix(text)
        pid = os.fork()
        if pid == 0:
            assert refusal(session.ensure_prefix, text)[0] == "ForkedError"
            assert refusal(session.decode)[0] == "ForkedError"
            assert refusal(runtime.session)[0] == "ForkedError"
            session.cancel()
            session.close()
            runtime.close()
            del session, runtime
            gc.collect()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert session.collect(max_tokens=5, ignore_eos=True).tokens
        runtime.close()
        """,
    )


def test_a_fork_while_another_thread_has_its_turn_does_not_hang_the_child(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        runtime = opened(n_ctx=8192, n_seq_max=2)
        busy, idle = runtime.session(), runtime.session()
        thread = threading.Thread(target=busy.ensure_prefix, args=(list(range(300, 4000)),))
        thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                ok = refusal(idle.ensure_prefix, text)[0] == "ForkedError" == refusal(idle.plan, text)[0]
                os._exit(0 if ok else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        thread.join()
        runtime.close()
        """,
    )


def test_copies_are_refused(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        with opened() as runtime, runtime.session() as session:
            for one in (runtime, session):
                for call in (copy.copy, copy.deepcopy, pickle.dumps):
                    assert refusal(call, one)[0] == "TypeError"
        """,
    )


def test_ctrl_c_ends_a_prefill_and_the_session_goes_on(run_child: RunChild) -> None:
    for name in ("tiny-llama", "tiny-swa", "tiny-mamba", "tiny-hybrid"):
        run_child(
            OPEN,
            f"name = {name!r}\n",
            """
            tokens = list(range(300, 4300))
            with opened(name, n_ctx=8192, n_ubatch=512, n_batch=512) as runtime, runtime.session() as session:
                session.ensure_prefix(tokens)
                expected = session.collect(max_tokens=6, ignore_eos=True).tokens
                session.ensure_prefix([400])
                for delay in (0.001, 0.01, 0.03, 0.06):
                    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
                    try:
                        timer.start()  # on a busy machine it may be over before this returns
                        session.ensure_prefix(tokens)
                        timer.join()
                        time.sleep(0.01)
                    except KeyboardInterrupt:
                        assert list(session.tokens) == tokens[: len(session.tokens)]
                    timer.join()
                session.ensure_prefix(tokens)
                assert session.collect(max_tokens=6, ignore_eos=True).tokens == expected
            """,
        )


def test_ctrl_c_while_waiting_for_a_turn_leaves_the_turns_intact(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        with opened(n_seq_max=2) as runtime:
            session = runtime.session()
            runtime.turns.lock.acquire()
            seen = []
            def handler(*_):
                seen.append(1)
                if len(seen) == 1:
                    raise KeyboardInterrupt
            signal.signal(signal.SIGINT, handler)
            # Again: Python itself sleeps through one that comes between its last look and the wait for a lock.
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            try:
                session.ensure_prefix(text)
                raise AssertionError
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            runtime.turns.lock.release()
            session.ensure_prefix(text)
            assert session.collect(max_tokens=3, ignore_eos=True).tokens
        """,
    )


def test_many_turns_and_many_sessions_do_not_grow(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for name in ("tiny-llama", "tiny-swa", "tiny-mamba"):
            with opened(name, n_seq_max=2, n_ctx=2048) as runtime:
                def turn(i):
                    with runtime.session() as session:
                        session.ensure_prefix(text)
                        session.prefill_suffix(f"Question {i}?\\n")
                        session.collect(max_tokens=4, temperature=1.0, seed=i)
                        session.ensure_prefix(text + "More.\\n")
                for i in range(60):
                    turn(i)
                gc.collect()
                before = resident()
                for i in range(200):
                    turn(i)
                gc.collect()
                assert resident() - before < 4 << 20, (name, before, resident())
            assert not any(live_counts().values()), live_counts()
        """,
    )
