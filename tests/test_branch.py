"""Branches cost nothing and are nobody's but their own; many sessions step in shared batches as each would alone."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from sessions import CUT, N_CTX, TOLERANCE, cold_row_of, cold_tokens, last_row, open_runtime, some_tokens

from llamacppshim import Model, _native, collect_many, decode_many, prefill_many
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import (
    ContextOverflowError,
    GrammarError,
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    SessionClosedError,
    SessionUnavailableError,
    UnsupportedFeatureError,
)
from llamacppshim.session import Session

PREFIX = some_tokens(150)
# Nine sequences of every memory kind.
NINE: dict[str, dict[str, Any]] = {
    "attention": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "unified": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "swa": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "swa-unified": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "swa-full": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "recurrent": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "hybrid": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
    "hybrid-unified": {"n_seq_max": 9, "n_ctx": 9 * N_CTX},
}
EVERY_KIND = pytest.mark.parametrize("kind", NINE)


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


def suffix(i: int) -> list[int]:
    return [int(token) for token in some_tokens(5 + 7 * i, seed=30 + i)]


# Branches.


@EVERY_KIND
def test_a_branch_is_a_straight_run_and_reads_nothing(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, **NINE[kind]) as runtime:
        alone = [cold_tokens(runtime, PREFIX, suffix(i), 12) for i in range(4)]
        with runtime.session() as parent:
            parent.ensure_prefix(PREFIX)
            children = parent.branch(3)
            for child in children:
                report = child.explain()
                assert report.work.prefill_tokens == report.work.decode_tokens == 0
                assert (report.resident_tokens, report.prefix_tokens) == (len(PREFIX), len(PREFIX))
                assert report.plan is not None and report.plan.source == "branch"
                assert (report.branch_bytes == 0) == (kind in ("unified", "swa-unified"))
                assert "branched at 150 of 150 tokens" in str(report)
            found = []
            for i, session in enumerate([parent, *children]):
                session.prefill_suffix(suffix(i))
                found.append(session.collect(max_tokens=12, ignore_eos=True).tokens)
            assert found == alone
            parent.ensure_prefix(PREFIX)
            parent.prefill_suffix(suffix(0))
            assert parent.collect(max_tokens=12, ignore_eos=True).tokens == alone[0]
            for child in children:
                child.close()


@EVERY_KIND
def test_branches_are_closed_in_any_order_and_branch_themselves(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, **NINE[kind]) as runtime:
        alone = cold_tokens(runtime, PREFIX, suffix(1), 6)
        for order in itertools.permutations(range(3)):
            parent = runtime.session()
            parent.ensure_prefix(PREFIX)
            (child,) = parent.branch()
            (grandchild,) = child.branch()
            family = [parent, child, grandchild]
            for place in order[:2]:
                family[place].close()
            last = family[order[2]]
            last.prefill_suffix(suffix(1))
            assert last.collect(max_tokens=6, ignore_eos=True).tokens == alone
            last.close()
        assert runtime.n_sessions == 0
        assert runtime.resident_tokens == 0


@pytest.mark.parametrize("kind", ["attention", "recurrent", "hybrid", "swa"])
def test_a_bitwise_branch_gives_the_bits_of_a_cold_run(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, reuse="bitwise", **NINE[kind]) as runtime, runtime.session() as parent:
        parent.ensure_prefix(PREFIX)
        parent.prefill_suffix(suffix(2))
        row = last_row(parent)
        (child,) = parent.branch()
        np.testing.assert_array_equal(last_row(child), row)
        with runtime.session() as cold:
            cold.ensure_prefix(PREFIX)
            cold.prefill_suffix(suffix(2))
            expected = [row_of(cold) for _ in range(6)]
        for session in (child, parent):
            assert session.explain().exact == "bitwise"
            for one in expected:
                np.testing.assert_array_equal(row_of(session), one)
        child.close()


def row_of(session: Session) -> Any:
    """The logits of one more token."""
    session.collect(max_tokens=1, ignore_eos=True)
    return last_row(session)


@EVERY_KIND
def test_a_branch_below_the_tip_where_the_memory_allows_it(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, **NINE[kind]) as runtime, runtime.session() as parent:
        parent.ensure_prefix(PREFIX)
        parent.prefill_suffix(some_tokens(200, seed=3))
        before = parent.collect(max_tokens=3, ignore_eos=True).tokens
        for at in (150, 64):  # of both there is a checkpoint
            (child,) = parent.branch(at=at)
            assert child.explain().resident_tokens == at
            assert child.explain().work.prefill_tokens == 0
            np.testing.assert_array_equal(child.tokens, PREFIX[:at])
            child.ensure_prefix(PREFIX[:at])
            child.prefill_suffix(suffix(1))
            tokens = child.collect(max_tokens=6, ignore_eos=True).tokens
            child.close()
            assert tokens == cold_tokens(runtime, PREFIX[:at], suffix(1), 6)
        if kind in CUT | {"unified"}:
            (child,) = parent.branch(at=99)
            child.close()
        elif kind in ("recurrent", "hybrid"):
            n = runtime.n_sessions
            with pytest.raises(UnsupportedFeatureError, match=r"no branch at 99: .*cannot be cut"):
                parent.branch(at=99)
            assert runtime.n_sessions == n
        for wrong in (-1, 10**6, 1.5, True):
            with pytest.raises(OutOfRangeError):
                parent.branch(at=wrong)
        parent.ensure_prefix(PREFIX)
        parent.prefill_suffix(some_tokens(200, seed=3))
        assert parent.collect(max_tokens=3, ignore_eos=True).tokens == before


@pytest.mark.parametrize("config", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@EVERY_KIND
def test_an_answer_in_hand_goes_on_in_every_branch(models: dict[str, Model], kind: str, config: dict[str, Any]) -> None:
    with open_runtime(models, kind, **NINE[kind]) as runtime, runtime.session() as parent:
        parent.ensure_prefix(PREFIX)
        parent.collect(max_tokens=5, ignore_eos=True, **config)
        children = parent.branch(2)
        rest = [one.collect(max_tokens=10, ignore_eos=True, **config) for one in (*children, parent)]
        assert rest[0].tokens == rest[1].tokens == rest[2].tokens
        assert rest[0].text == rest[2].text
        for child in children:
            child.close()


def test_too_few_sequences_make_no_branch_at_all(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as parent:
        parent.ensure_prefix(PREFIX)
        with pytest.raises(SessionUnavailableError, match="3 sequences are wanted, 2 of n_seq_max 3 are free"):
            parent.branch(3)
        assert runtime.n_sessions == 1
        for wrong in (0, -1, 1.5, None, True):
            with pytest.raises(InvalidArgumentError):
                parent.branch(wrong)  # type: ignore[arg-type]
        children = parent.branch(2)
        assert runtime.n_sessions == 3
        for child in children:
            child.close()


@pytest.mark.parametrize("kind", ["unified", "swa-unified", "hybrid-unified"])
def test_branches_that_share_their_cells_go_on_beyond_the_window(models: dict[str, Model], kind: str) -> None:
    """What branches share of a window is given up when none of them shows it any more, and not before."""
    n = 160
    with open_runtime(models, kind, n_seq_max=4, n_ctx=2 * N_CTX) as runtime:
        with runtime.session() as cold:
            cold.ensure_prefix(PREFIX)
            alone = cold.collect(max_tokens=n, ignore_eos=True).tokens
        with runtime.session() as parent:
            parent.ensure_prefix(PREFIX)
            children = parent.branch(2)
            family = [parent, *children]
            for session in family:
                found = session.collect(max_tokens=n // 2, ignore_eos=True).tokens
                require_same_but_for_ties(runtime, list(PREFIX), found, alone[: n // 2])
            for answer in collect_many(family, max_tokens=n // 2, ignore_eos=True):
                assert len(answer.tokens) == n // 2 and answer.error is None
            assert runtime.resident_tokens == len(PREFIX) + 3 * (n - 1)
            with runtime.session() as other:
                other.ensure_prefix(some_tokens(200, seed=1))
                snapshot = other.snapshot()
                other.close()
                with runtime.session() as restored:
                    restored.restore(snapshot)
                    assert restored.collect(max_tokens=4, ignore_eos=True).finish_reason == "length"
            for child in children:
                child.close()


@pytest.mark.parametrize("kind", ["unified", "swa-unified", "hybrid-unified"])
def test_what_a_branch_reads_after_an_edit_is_its_own(models: dict[str, Model], kind: str) -> None:
    """The numbers of a pool are those it holds to: what is told to fit fits, and what does not changes nothing."""
    whole = some_tokens(400, seed=7)
    with open_runtime(models, kind, n_ctx=1024, n_seq_max=4) as runtime, runtime.session() as parent:
        parent.ensure_prefix(whole[:20])
        parent.prefill_suffix(whole[20:])
        (child,) = parent.branch()
        (other,) = parent.branch(at=20)
        assert len(other.tokens) == 20 and runtime.resident_tokens == 400
        other.close()
        child.ensure_prefix([*whole[:20], *some_tokens(300, seed=8)])
        assert runtime.resident_tokens == 700
        assert child.explain().available_tokens == parent.explain().available_tokens == 1024 - 700
        before = child.tokens.tolist()
        with pytest.raises(ContextOverflowError) as refused:
            child.ensure_prefix([*whole[:20], *some_tokens(625, seed=9)])
        assert refused.value.resident_tokens == 400 and refused.value.additional_tokens in (625, 645)
        assert child.tokens.tolist() == before and child.explain().resident_tokens == 320
        child.prefill_suffix(some_tokens(324 - 60, seed=10))
        assert parent.collect(max_tokens=60, ignore_eos=True).finish_reason == "length"
        child.close()


@pytest.mark.parametrize("kind", ["unified", "swa-unified", "hybrid-unified"])
def test_a_restore_for_which_a_pool_has_no_room_changes_nothing(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, n_ctx=N_CTX, n_seq_max=4) as runtime:
        one, other = runtime.session(), runtime.session()
        one.ensure_prefix(some_tokens(300))
        saved = one.snapshot()
        other.ensure_prefix(some_tokens(100, seed=1))
        for n_free in (2, 0):
            more = [runtime.session() for _ in range(2 - n_free)]
            with pytest.raises(ContextOverflowError) as refused:
                other.restore(saved)
            error = refused.value
            numbers = (error.stage, error.resident_tokens, error.additional_tokens, error.num_ctx)
            assert numbers == ("restore", 300, 300, N_CTX)
            assert len(other.tokens) == 100 and other.ensure_prefix(some_tokens(100, seed=1)).prefilled_tokens == 0
            for session in more:
                session.close()
        one.close()
        other.restore(saved)
        assert len(other.tokens) == 300
        other.close()


def test_a_state_finds_room_among_what_branches_share_of_a_window(models: dict[str, Model]) -> None:
    values = {"n_ctx": 4096, "n_seq_max": 4}
    with open_runtime(models, "swa-unified", **values) as runtime, runtime.session() as cold:
        cold.ensure_prefix(some_tokens(20, seed=3))
        alone = cold.collect(max_tokens=8, ignore_eos=True).tokens
        cold.close()
        one = runtime.session()
        one.ensure_prefix(some_tokens(20, seed=3))
        saved = one.snapshot()
        one.prefill_suffix(some_tokens(380, seed=4))
        family = [one, *one.branch(2)]
        (early,) = one.branch(at=20)  # by its checkpoint
        assert early.collect(max_tokens=8, ignore_eos=True).tokens == alone
        early.close()
        with runtime.restore(saved) as restored:
            assert restored.collect(max_tokens=8, ignore_eos=True).tokens == alone
        for session in family:
            assert session.collect(max_tokens=40, ignore_eos=True).finish_reason == "length"
            session.close()


@pytest.mark.parametrize("kind", ["unified", "swa-unified", "hybrid-unified"])
def test_shared_cells_are_counted_once(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, n_ctx=N_CTX, n_seq_max=4) as runtime, runtime.session() as parent:
        parent.ensure_prefix(some_tokens(300))
        one, other = parent.branch(2)
        assert runtime.resident_tokens == 300
        assert parent.explain().available_tokens == N_CTX - 300
        one.prefill_suffix(some_tokens(50, seed=1))
        other.prefill_suffix(some_tokens(60, seed=2))
        assert runtime.resident_tokens == 410
        (deep,) = one.branch()
        assert runtime.resident_tokens == 410
        parent.close()
        assert runtime.resident_tokens == 410
        with pytest.raises(ContextOverflowError):
            deep.prefill_suffix(some_tokens(N_CTX - 410 + 1, seed=3), append=True)
        for session in (one, deep):
            session.close()
        assert runtime.resident_tokens == 360
        other.close()
        assert runtime.resident_tokens == 0


# Many at once.


def require_same_but_for_ties(
    runtime: Any, prompt: list[int], found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if found == expected:
        return
    n = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    row = cold_row_of(runtime.model, [*prompt, *expected[:n]])
    assert abs(row[found[n]] - row[expected[n]]) < TOLERANCE, (n, row[found[n]], row[expected[n]])
    assert row.max() - row[found[n]] < TOLERANCE


@EVERY_KIND
@pytest.mark.parametrize("reuse", ["token", "bitwise"])
def test_many_sessions_step_as_each_would_alone(models: dict[str, Model], kind: str, reuse: str) -> None:
    with open_runtime(models, kind, reuse=reuse, **NINE[kind]) as runtime:
        alone = [cold_tokens(runtime, PREFIX, suffix(i), 16) for i in range(8)]
        for order in (list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]):
            with runtime.session() as parent:
                parent.ensure_prefix(PREFIX)
                children = parent.branch(8)
                prefill_many({children[i]: suffix(i) for i in order})
                answers = collect_many([children[i] for i in order], max_tokens=16, ignore_eos=True)
                found = {i: answer.tokens for i, answer in zip(order, answers, strict=True)}
                if reuse == "bitwise":
                    assert [found[i] for i in range(8)] == alone
                else:
                    for i in range(8):
                        require_same_but_for_ties(runtime, [*PREFIX, *suffix(i)], found[i], alone[i])
                assert {answer.finish_reason for answer in answers} == {"length"}
                for i, child in enumerate(children):
                    np.testing.assert_array_equal(child.tokens, [*PREFIX, *suffix(i), *found[i]])
                    assert child.explain().work.decode_tokens == 15
                    assert child.explain().work.prefill_tokens == len(suffix(i)) + (22 if reuse == "bitwise" else 0)
                    child.close()


def test_bitwise_steps_give_the_bits_of_a_session_alone(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams", reuse="bitwise") as runtime:
        with runtime.session() as session:
            session.ensure_prefix(PREFIX)
            expected = [row_of(session) for _ in range(5)]
        sessions = [runtime.session() for _ in range(3)]
        for session in sessions:
            session.ensure_prefix(PREFIX)
        for one in expected:
            collect_many(sessions, max_tokens=1, ignore_eos=True)
            for session in sessions:
                np.testing.assert_array_equal(last_row(session), one)
        for session in sessions:
            session.close()


def test_each_session_has_its_own_settings_and_ends_by_itself(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", **NINE["attention"]) as runtime:
        configs = [
            DecodeConfig(max_tokens=3, ignore_eos=True),
            DecodeConfig(max_tokens=9, ignore_eos=True, temperature=1.0, seed=4),
            DecodeConfig(max_tokens=30, grammar='root ::= "yes" | "no"'),
            DecodeConfig(max_tokens=6, ignore_eos=True, logprobs=2),
            DecodeConfig(max_tokens=0),
        ]
        sessions = [runtime.session() for _ in configs]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(50 + i, seed=i))
        alone = []
        for i, config in enumerate(configs):
            with runtime.session() as session:
                session.ensure_prefix(some_tokens(50 + i, seed=i))
                alone.append(session.collect(config))
        steps = list(decode_many(sessions, configs))
        assert [len(step) for step in steps[:3]] == [5, 4, 4]
        assert set(steps[-1]) == {sessions[1]}
        together: list[list[int]] = [[] for _ in sessions]
        for step in steps:
            for i, session in enumerate(sessions):
                if session in step:
                    together[i] += step[session].tokens
        assert [tuple(tokens) for tokens in together] == [answer.tokens for answer in alone]
        assert collect_many([sessions[3]], configs[3])[0].logprobs
        for session in sessions:
            session.close()


def test_a_session_is_cancelled_or_closed_alone(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", **NINE["attention"]) as runtime:
        alone = [cold_tokens(runtime, some_tokens(40, seed=i), [], 20) for i in range(3)]
        sessions = [runtime.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(40, seed=i))
        found: list[list[int]] = [[], [], []]
        reasons: dict[int, Any] = {}
        for n, step in enumerate(decode_many(sessions, max_tokens=20, ignore_eos=True)):
            for i, session in enumerate(sessions):
                if session in step:
                    found[i] += step[session].tokens
                    reasons[i] = step[session].finish_reason or step[session].error
            if n == 5:
                sessions[0].cancel()
                sessions[1].close()
        assert reasons[0] == "cancelled" and isinstance(reasons[1], SessionClosedError) and reasons[2] == "length"
        assert [len(tokens) for tokens in found] == [6, 6, 20]
        assert tuple(found[2]) == alone[2]
        rest = sessions[0].collect(max_tokens=14, ignore_eos=True).tokens
        assert (*found[0], *rest) == alone[0]


def test_a_session_that_moves_on_leaves_the_others(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime:
        sessions = [runtime.session() for _ in range(2)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(40, seed=i))
        steps = decode_many(sessions, max_tokens=10, ignore_eos=True)
        next(steps)
        sessions[0].ensure_prefix(PREFIX)
        first, *rest = list(steps)
        assert first.pop(sessions[0]).finish_reason == "cancelled"
        assert len(rest) == 8 and all(set(step) == {sessions[1]} for step in [first, *rest])
        assert len(sessions[0].tokens) == len(PREFIX)
        for session in sessions:
            session.close()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ({"grammar": 'root ::= "a" [\\x00]'}, GrammarError),
        ({"logit_bias": dict.fromkeys(range(50_259), -np.inf)}, InternalError),
    ],
)
def test_a_session_that_cannot_choose_ends_alone(
    models: dict[str, Model], failing: dict[str, Any], error: type[Exception], order: int
) -> None:
    with open_runtime(models, "streams") as runtime:
        alone = [cold_tokens(runtime, some_tokens(40, seed=i), [], 8) for i in range(2)]
        sessions = [runtime.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(40, seed=i))
        plain = DecodeConfig(max_tokens=8, ignore_eos=True)
        configs = [plain, plain, DecodeConfig(max_tokens=8, **failing)]
        answers = collect_many(sessions[::order], configs[::order])[::order]
        assert [answer.tokens for answer in answers[:2]] == alone
        assert [answer.error for answer in answers[:2]] == [None, None]
        assert isinstance(answers[2].error, error)
        np.testing.assert_array_equal(sessions[2].tokens, [*some_tokens(40, seed=2), *answers[2].tokens])
        for session in sessions:
            session.close()


@pytest.mark.parametrize("kind", ["attention", "unified", "swa", "recurrent", "hybrid"])
@pytest.mark.parametrize("status", [2, -2, -3])
def test_a_failed_batch_is_done_again_one_by_one(models: dict[str, Model], kind: str, status: int) -> None:
    with open_runtime(models, kind, **NINE[kind]) as runtime:
        alone = [cold_tokens(runtime, some_tokens(40, seed=i), [], 10) for i in range(3)]
        sessions = [runtime.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(40, seed=i))
        found: list[list[int]] = [[], [], []]
        for n, step in enumerate(decode_many(sessions, max_tokens=10, ignore_eos=True)):
            for i, session in enumerate(sessions):
                if session in step:
                    assert step[session].error is None
                    found[i] += step[session].tokens
            if n == 4:
                _native._fault_arm_decode(status, 12)
        assert [tuple(tokens) for tokens in found] == alone
        for session in sessions:
            session.close()


def test_full_cells_end_one_session_and_the_others_go_on(models: dict[str, Model]) -> None:
    with open_runtime(models, "unified", n_ctx=256) as runtime:
        sessions = [runtime.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(80, seed=i))
        answers = collect_many(sessions, max_tokens=40, ignore_eos=True)
        errors = [answer for answer in answers if answer.error is not None]
        assert errors and all(isinstance(answer.error, ContextOverflowError) for answer in errors)
        assert all(len(answer.tokens) >= 5 for answer in answers)
        sessions[0].close()
        assert collect_many(sessions[1:], max_tokens=5, ignore_eos=True)[0].finish_reason == "length"
        for session in sessions:
            session.close()


def test_a_long_suffix_holds_the_others_up_by_one_batch_at_most(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", **NINE["attention"]) as runtime:
        quick, slow = runtime.session(), runtime.session()
        quick.ensure_prefix(some_tokens(40))
        slow.ensure_prefix(some_tokens(40, seed=1))
        with slow.entered():
            slow.begin_suffix(some_tokens(300, seed=2), append=False, parse_special=False)
        steps = list(decode_many([quick, slow], max_tokens=30, ignore_eos=True))
        first_of_slow = next(i for i, step in enumerate(steps) if slow in step)
        assert first_of_slow >= 300 // 32 - 1
        assert all(quick in step for step in steps[:30])
        with runtime.session() as alone:
            alone.ensure_prefix(some_tokens(40, seed=1))
            alone.prefill_suffix(some_tokens(300, seed=2))
            expected = alone.collect(max_tokens=30, ignore_eos=True).tokens
        np.testing.assert_array_equal(slow.tokens[340:], expected)
        quick.close()
        slow.close()


def test_a_suffix_that_fails_leaves_its_session_and_the_others_read(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime:
        sessions = [runtime.session() for _ in range(3)]
        for session in sessions:
            session.ensure_prefix(PREFIX)
        with pytest.raises(ContextOverflowError):
            prefill_many({sessions[0]: suffix(0), sessions[1]: some_tokens(N_CTX), sessions[2]: suffix(2)})
        np.testing.assert_array_equal(sessions[1].tokens, PREFIX)
        np.testing.assert_array_equal(sessions[2].tokens, [*PREFIX, *suffix(2)])
        sessions[1].prefill_suffix(suffix(1))
        answers = collect_many(sessions, max_tokens=4, ignore_eos=True)
        for session in sessions:
            session.close()
        assert [answer.tokens for answer in answers] == [cold_tokens(runtime, PREFIX, suffix(i), 4) for i in range(3)]


def test_what_makes_no_sense_is_refused_before_anything_is_read(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime, open_runtime(models, "attention") as other:
        one, foreign = runtime.session(), other.session()
        for session in (one, foreign):
            session.ensure_prefix(PREFIX)
        for wrong, text in (([], "no sessions"), ([one, one], "named twice"), ([one, foreign], "different runtimes")):
            with pytest.raises(InvalidArgumentError, match=text):
                decode_many(wrong)
        with pytest.raises(InvalidArgumentError, match="2 configurations for 1 sessions"):
            decode_many([one], [DecodeConfig(), DecodeConfig()])
        with pytest.raises(InvalidArgumentError, match="no field"):
            decode_many([one], nonsense=1)
        assert len(one.tokens) == len(PREFIX)
        one.close()
        foreign.close()


def test_a_busy_session_is_skipped_with_its_error(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams") as runtime:
        sessions = [runtime.session() for _ in range(2)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(some_tokens(40, seed=i))
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with sessions[0].entered():
                inside.set()
                leave.wait()

        steps = decode_many(sessions, max_tokens=4, ignore_eos=True)
        next(steps)
        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        step = next(steps)
        assert "another thread is inside" in str(step[sessions[0]].error)
        leave.set()
        thread.join()
        assert all(set(step) == {sessions[1]} for step in steps)
        for session in sessions:
            session.close()
