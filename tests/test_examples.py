"""The examples do what they say."""

from __future__ import annotations

import sys

import pytest
from building import ROOT
from sessions import open_runtime, some_tokens

from llamacppshim import Model

sys.path.insert(0, str(ROOT / "examples"))
import best_of


@pytest.mark.parametrize("kind", ["streams", "unified", "swa-streams", "recurrent-3", "hybrid-3"])
def test_the_best_of_several_answers_is_the_likeliest(loaded: dict[str, Model], kind: str) -> None:
    with open_runtime(loaded, kind) as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(60))
        best = best_of.best_of(session, 2, max_tokens=8, temperature=1.5, seed=3)
        assert runtime.n_sessions == 2
        alone = []
        for seed in (3, 4):
            session.ensure_prefix(some_tokens(60))
            answer = session.collect(max_tokens=8, temperature=1.5, seed=seed, logprobs=0)
            alone.append((sum(one.logprob for one in answer.logprobs) / len(answer.logprobs), answer.text))
        assert best.mean_logprob == pytest.approx(max(alone)[0], abs=0.01)
        assert best.text == max(alone)[1]
        assert best.session.explain().work.prefill_tokens == 0
        best.session.close()
        assert session.collect(max_tokens=1).finish_reason in ("length", "stop")


def test_a_failing_answer_leaves_no_session_behind(loaded: dict[str, Model]) -> None:
    with open_runtime(loaded, "streams") as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(60))
        with pytest.raises(ValueError, match="temperature"):
            best_of.best_of(session, 2, temperature=-1.0)
        assert runtime.n_sessions == 1
