"""Sessions that outgrow their context: the middle goes where that is allowed, and what is left is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sessions import N_CTX, N_UBATCH, TOLERANCE, cold_row_of, last_row, open_runtime, some_tokens

from llamacppshim import Context, Model, Sampler
from llamacppshim.errors import ContextOverflowError, InvalidArgumentError, OutOfRangeError, UnsupportedFeatureError

PREFIX = some_tokens(100)
EVICT: dict[str, Any] = {"on_overflow": "evict", "n_recent": 64}


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


@pytest.mark.parametrize("kind", ["attention", "spm", "streams", "swa-full"])
def test_an_answer_goes_on_beyond_the_context(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, **EVICT) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(some_tokens(50, seed=1))
        answer = session.collect(max_tokens=800, ignore_eos=True)
        assert (answer.finish_reason, len(answer.tokens)) == ("length", 800)
        report = session.explain()
        assert report.exact == "token"
        assert report.evicted_tokens == 950 - len(session.tokens) > 0
        assert f"evicted    {report.evicted_tokens:,} tokens behind the prefix" in str(report)
        assert len(session.tokens) <= N_CTX
        np.testing.assert_array_equal(session.tokens[: len(PREFIX)], PREFIX)
        np.testing.assert_array_equal(session.tokens[-64:], answer.tokens[-64:])


def test_it_is_what_the_handles_do_by_hand(models: dict[str, Model]) -> None:
    """Oracle: the same cuts and moves on a bare context."""
    small = {"n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    suffix = some_tokens(50, seed=1)
    with open_runtime(models, "attention", **EVICT) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(suffix)
        found = session.collect(max_tokens=500, ignore_eos=True).tokens
    tokens: list[int] = []
    with Context(models["tiny-llama"], **small) as context, Sampler(models["tiny-llama"]) as sampler:
        context.decode(PREFIX)
        context.decode(suffix)
        n = len(PREFIX) + len(suffix)
        while len(tokens) < 500:
            tokens.append(sampler.sample(context))
            if n == N_CTX - 1:  # this token fills the last cell, and another is to come
                n_gone = (n - 64 - len(PREFIX)) // 2
                context.seq_rm(0, len(PREFIX), len(PREFIX) + n_gone)
                context.seq_add(0, len(PREFIX) + n_gone, -1, -n_gone)
                n -= n_gone
            context.decode((tokens[-1],))
            n += 1
    assert tuple(tokens) == found


def test_an_appended_turn_makes_room_too(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", **EVICT) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(some_tokens(300, seed=1))
        session.collect(max_tokens=20, ignore_eos=True)
        turn = some_tokens(150, seed=2)
        status = session.prefill_suffix(turn, append=True)
        assert status.resident_tokens <= N_CTX
        np.testing.assert_array_equal(session.tokens[-150:], turn)
        np.testing.assert_array_equal(session.tokens[:100], PREFIX)
        assert session.collect(max_tokens=5, ignore_eos=True).finish_reason == "length"
        before = session.tokens
        with pytest.raises(ContextOverflowError) as caught:  # more than may go
            session.prefill_suffix(some_tokens(N_CTX - 150, seed=3), append=True)
        assert caught.value.stage == "suffix"
        np.testing.assert_array_equal(session.tokens, before)


def test_the_next_prefix_does_not_reuse_what_was_read_with_evicted_tokens(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", **EVICT) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        session.collect(max_tokens=600, ignore_eos=True)
        left = session.tokens
        assert session.explain().evicted_tokens > 0
        # The very tokens that are left: behind the prefix their cells know of others.
        status = session.ensure_prefix(left)
        assert status.reused_tokens == len(PREFIX)
        assert session.explain().evicted_tokens == 0
        row = last_row(session)
        with open_runtime(models, "attention") as fresh, fresh.session() as cold:
            cold.ensure_prefix(left)
            np.testing.assert_allclose(row, last_row(cold), atol=TOLERANCE)


def test_what_was_evicted_is_not_saved_and_comes_back_by_reading(models: dict[str, Model]) -> None:
    with open_runtime(models, "streams", **EVICT) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        session.collect(max_tokens=600, ignore_eos=True)
        with pytest.raises(UnsupportedFeatureError, match="lost its middle"):
            session.snapshot()
        (child,) = session.branch()
        assert child.explain().evicted_tokens == session.explain().evicted_tokens
        assert child.collect(max_tokens=5, ignore_eos=True) and child.ensure_prefix(PREFIX).reused_tokens == 100
        child.close()
        session.ensure_prefix(PREFIX)
        assert session.snapshot().n_tokens == 100


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("attention", {}),  # off by default
        ("swa", EVICT),
        ("recurrent", EVICT),
        ("hybrid", EVICT),
        ("q8_0", EVICT),
        ("attention", {**EVICT, "n_recent": N_CTX}),
        ("attention", {**EVICT, "n_sink": N_CTX}),
    ],
)
def test_where_nothing_may_go_the_context_is_full(models: dict[str, Model], kind: str, values: dict[str, Any]) -> None:
    with open_runtime(models, kind, **values) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        answer = session.collect(max_tokens=800, ignore_eos=True)
        assert answer.finish_reason == "context_full"
        assert len(answer.tokens) == N_CTX - 100 + 1


def test_branches_that_share_cells_are_not_moved(models: dict[str, Model]) -> None:
    with open_runtime(models, "unified", n_ctx=N_CTX, **EVICT) as runtime, runtime.session() as parent:
        parent.ensure_prefix(some_tokens(300))
        (child,) = parent.branch()
        answer = child.collect(max_tokens=400, ignore_eos=True)
        assert answer.finish_reason == "context_full"
        assert child.explain().evicted_tokens == 0
        child.close()
        parent.prefill_suffix(some_tokens(5))
        assert parent.collect(max_tokens=2, ignore_eos=True).tokens


def test_wrong_settings_are_refused(models: dict[str, Model]) -> None:
    for values in ({"on_overflow": "x"}, {"n_sink": -1}, {"n_recent": 0}):
        with pytest.raises((InvalidArgumentError, OutOfRangeError)):
            open_runtime(models, "attention", **values)


def test_a_full_window_cache_says_what_an_eviction_has_cost_it(models: dict[str, Model]) -> None:
    values = {"n_ctx": 256, "on_overflow": "evict"}
    prefix = some_tokens(60)
    with open_runtime(models, "swa-full", **values) as runtime, runtime.session() as session:
        session.ensure_prefix(prefix)
        session.prefill_suffix(some_tokens(40, seed=1))
        answer = session.collect(max_tokens=400, ignore_eos=True)
        assert answer.finish_reason == "length" and session.explain().evicted_tokens > 0
        status = session.ensure_prefix(prefix)
        assert "window" in status.plan.reason and "failed" not in status.plan.reason
        row = last_row(session)
        assert abs(row - cold_row_of(runtime.model, prefix)).max() < TOLERANCE
