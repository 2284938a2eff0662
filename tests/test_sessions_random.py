"""Two sessions under random turns, edits, cancels, failures and overflows: each stays what a fresh one is that is given
its tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sessions import N_CTX, TOLERANCE, last_row, open_runtime, some_tokens

from llamacppshim import Model, _native
from llamacppshim.errors import ContextOverflowError, DecodeAbortedError, DecodeError, ManifestMismatchError
from llamacppshim.runtime import Runtime
from llamacppshim.session import Session

WHO = st.integers(0, 1)


class Turns(RuleBasedStateMachine):
    models: ClassVar[dict[str, Model]]
    kind: ClassVar[str]
    config: ClassVar[dict[str, Any]]

    @initialize()
    def open(self) -> None:
        self.runtime: Runtime = open_runtime(self.models, self.kind, **self.config)
        self.fresh: Runtime = open_runtime(self.models, self.kind, **self.config)
        self.sessions: list[Session] = [self.runtime.session(), self.runtime.session()]
        self.prefixes = [some_tokens(100, seed=i) for i in range(2)]

    @rule(who=WHO, place=st.integers(0, 99), n=st.integers(1, 220), edit=st.booleans())
    def change_the_prefix(self, who: int, place: int, n: int, edit: bool) -> None:
        tokens = np.resize(self.prefixes[who], max(n, 1)).astype(np.int32)
        if edit:
            tokens[place % len(tokens)] = 300 + place
        self.prefixes[who] = tokens
        before = self.sessions[who].plan(tokens)
        status = self.sessions[who].ensure_prefix(tokens)
        assert status.plan == before
        if self.config["reuse"] == "token":
            assert status.reused_tokens + status.prefilled_tokens == len(tokens)
        np.testing.assert_array_equal(self.sessions[who].tokens, tokens)

    @rule(who=WHO, n=st.integers(0, 80), append=st.booleans(), seed=st.integers(0, 5))
    def read_a_suffix(self, who: int, n: int, append: bool, seed: int) -> None:
        session, suffix = self.sessions[who], some_tokens(n, seed=10 + seed)
        before = session.tokens
        try:
            session.prefill_suffix(suffix, append=append)
        except (ManifestMismatchError, ContextOverflowError):
            np.testing.assert_array_equal(session.tokens, before)
        else:
            np.testing.assert_array_equal(session.tokens, [*before, *suffix])

    @rule(who=WHO, n=st.integers(1, 40))
    def generate(self, who: int, n: int) -> None:
        session = self.sessions[who]
        before = session.tokens
        if len(before):
            answer = session.collect(max_tokens=n, ignore_eos=True)
            np.testing.assert_array_equal(session.tokens, [*before, *answer.tokens])

    @rule(who=WHO, pieces=st.integers(1, 4), seed=st.integers(0, 5))
    def cancel_a_prefix(self, who: int, pieces: int, seed: int) -> None:
        session, tokens = self.sessions[who], some_tokens(200, seed=20 + seed)
        n_pieces = 0

        def count(done: int, total: int) -> None:
            nonlocal n_pieces
            n_pieces += 1
            if n_pieces == pieces:
                session.cancel()

        try:
            session.ensure_prefix(tokens, progress=count)
        except DecodeAbortedError:
            n = len(session.tokens)
            np.testing.assert_array_equal(session.tokens, tokens[:n])
        session.sequence.stop.cancelled = False

    @rule(who=WHO, status=st.sampled_from([2, -2, -3]), node=st.integers(1, 60), answer=st.booleans())
    def fail_inside_a_graph(self, who: int, status: int, node: int, answer: bool) -> None:
        session = self.sessions[who]
        if len(session.tokens) == 0:
            return
        _native._fault_arm_decode(status, node)
        before = session.tokens
        try:
            if answer:
                session.collect(max_tokens=3, ignore_eos=True)
            else:
                session.prefill_suffix(some_tokens(50, seed=7), append=True)
        except (DecodeError, ManifestMismatchError, ContextOverflowError):
            np.testing.assert_array_equal(session.tokens[: len(before)], before)
        finally:
            _native._fault_arm_decode(0, 0)

    @rule(who=WHO)
    def overflow(self, who: int) -> None:
        session = self.sessions[who]
        before = session.explain()
        with pytest.raises(ContextOverflowError):
            session.ensure_prefix(some_tokens(3 * N_CTX + 1))
        after = session.explain()
        assert (after.resident_tokens, after.prefix_tokens) == (before.resident_tokens, before.prefix_tokens)

    @rule(who=WHO)
    def close_and_begin_anew(self, who: int) -> None:
        self.sessions[who].close()
        self.sessions[who] = self.runtime.session()

    @rule(who=WHO)
    def compare_with_a_fresh_session(self, who: int) -> None:
        session = self.sessions[who]
        tokens = session.tokens
        if not 0 < len(tokens) <= self.runtime.n_ctx_seq:
            return
        row = last_row(session)
        np.testing.assert_array_equal(session.tokens, tokens)
        with self.fresh.session() as cold:
            cold.ensure_prefix(tokens)
            expected = last_row(cold)
        np.testing.assert_allclose(row, expected, atol=TOLERANCE)
        report = session.explain()
        if report.exact == "bitwise" and report.generated_tokens == 0:
            np.testing.assert_array_equal(row, expected)

    def teardown(self) -> None:
        if hasattr(self, "sessions"):
            for who in (0, 1):
                self.compare_with_a_fresh_session(who=who)
            self.runtime.close()
            self.fresh.close()


@pytest.mark.parametrize("reuse", ["token", "bitwise"])
@pytest.mark.parametrize("kind", ["streams", "unified", "swa-streams", "swa-unified", "recurrent-3", "hybrid-3"])
def test_random_turns_leave_what_a_fresh_session_would_hold(loaded: dict[str, Model], kind: str, reuse: str) -> None:
    machine = type("Turns", (Turns,), {"models": loaded, "kind": kind, "config": {"reuse": reuse}})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
