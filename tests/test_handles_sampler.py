"""The sampler handle: what it chooses, from a context and from a row, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamacppshim import (
    Context,
    GrammarError,
    InternalError,
    InvalidArgumentError,
    LlamaCppShimError,
    Model,
    OutOfRangeError,
    Sampler,
    _native,
    argmax,
    json_schema_to_grammar,
)


@pytest.fixture
def row(model: Model) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, 4, model.n_vocab).astype(np.float32)


def draws(sampler: Sampler, row: NDArray[np.float32], n: int = 400) -> list[int]:
    return [sampler.sample_row(row) for _ in range(n)]


def test_the_default_is_the_most_likely_token(model: Model, context: Context, row: NDArray[np.float32]) -> None:
    context.decode([1, 2, 3], logits="all")
    rows = context.logits([0, 1, 2])
    with Sampler(model) as sampler:
        assert [sampler.sample(context, i) for i in range(3)] == rows.argmax(axis=1).tolist()
        assert sampler.sample(context) == sampler.sample(context, -1) == rows[2].argmax()
        assert sampler.sample_row(row) == row.argmax()
        assert sampler.sample_row(context.logits_view()) == rows[2].argmax()
        assert sampler.sample_row(row.astype(np.float64)) == row.argmax()
        assert sampler.sample_row(row.tolist()) == row.argmax()
        assert sampler.seed == 0


def test_a_seed_decides_the_draws_and_reset_begins_anew(model: Model, row: NDArray[np.float32]) -> None:
    with Sampler(model, temperature=1.5, seed=7) as a, Sampler(model, temperature=1.5, seed=7) as b:
        first = draws(a, row, 50)
        assert len(set(first)) > 5
        assert draws(b, row, 50) == first
        assert draws(a, row, 50) != first
        a.reset()
        assert draws(a, row, 50) == first
        assert a.seed == 7
    with Sampler(model, temperature=1.5) as drawn, Sampler(model, temperature=1.5) as other:
        first = draws(drawn, row, 50)
        assert draws(other, row, 50) != first
        with Sampler(model, temperature=1.5, seed=drawn.seed) as same:
            assert draws(same, row, 50) == first


def test_a_clone_goes_on_as_the_original_would(model: Model, row: NDArray[np.float32]) -> None:
    with Sampler(model, temperature=1.2, seed=3, penalty_repeat=1.4, penalty_last_n=64) as sampler:
        draws(sampler, row, 20)
        clone = sampler.clone()
        rest = draws(sampler, row, 30)
    assert draws(clone, row, 30) == rest  # the original is closed by now
    clone.close()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 5}, 5),
        ({"top_k": 1}, 1),
        ({"min_p": 0.999}, 1),
        ({"top_p": 1e-6}, 1),
        ({"typical_p": 1e-6}, 1),
        ({"top_n_sigma": 0.0001}, 1),
        ({"top_k": 3, "min_p": 0.0, "top_p": 1.0}, 3),
    ],
)
def test_a_cut_keeps_the_most_likely(model: Model, row: NDArray[np.float32], params: dict[str, Any], kept: int) -> None:
    """Oracle: numpy's order of the row. At a high temperature every kept token turns up."""
    best = set(np.argsort(row)[::-1][:kept].tolist())
    with Sampler(model, temperature=8.0, seed=1, **params) as sampler:
        found = set(draws(sampler, row))
    if "typical_p" in params:
        assert len(found) == 1
    else:
        assert found == best


def test_draws_follow_the_softmax(model: Model) -> None:
    """Oracle: the softmax itself; with 4,000 draws four standard deviations are under 0.032."""
    row = np.full(model.n_vocab, -np.inf, np.float32)
    row[[10, 20, 30]] = [2.0, 1.0, 0.0]
    temperature = 0.7
    expected = np.exp(row[[10, 20, 30]] / temperature)
    expected /= expected.sum()
    with Sampler(model, temperature=temperature, seed=11) as sampler:
        counts = np.bincount(draws(sampler, row, 4000), minlength=31)[[10, 20, 30]] / 4000
    np.testing.assert_allclose(counts, expected, atol=0.032)


def test_bias_and_penalties_change_the_choice(model: Model, row: NDArray[np.float32]) -> None:
    first, second, third = np.argsort(row)[::-1][:3].tolist()
    with Sampler(model, logit_bias={first: -np.inf}) as sampler:
        assert sampler.sample_row(row) == second
    with Sampler(model, logit_bias=[(first, float("-inf")), (second, -1e9)]) as sampler:
        assert sampler.sample_row(row) == third
    with Sampler(model, logit_bias={5: 1e6}) as sampler:
        assert sampler.sample_row(row) == 5
    with Sampler(model, penalty_present=1e6, penalty_last_n=2) as sampler:
        assert [sampler.sample_row(row) for _ in range(4)] == [first, second, third, first]
    with Sampler(model, penalty_repeat=1e6, penalty_last_n=8) as sampler:
        sampler.accept(first)
        assert sampler.sample_row(row) == second
    with Sampler(model, dry_multiplier=1e6, dry_base=2.0, dry_allowed_length=2, dry_penalty_last_n=64) as sampler:
        for token in (first, second, first, second, first):
            sampler.accept(token)
        flat = row.copy()
        flat[second] = row[first] + 1  # would repeat
        assert sampler.sample_row(flat) == first


@pytest.mark.parametrize("mirostat", [1, 2])
def test_mirostat_draws_repeatably(model: Model, row: NDArray[np.float32], mirostat: int) -> None:
    params: dict[str, Any] = {"mirostat": mirostat, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "temperature": 1}
    params["seed"] = 5
    with Sampler(model, **params) as a, Sampler(model, **params) as b:
        assert draws(a, row, 50) == draws(b, row, 50)


def test_xtc_leaves_out_the_most_likely(model: Model) -> None:
    row = np.full(model.n_vocab, -20, np.float32)
    row[[1, 2, 3]] = [5.0, 4.9, 4.8]
    with Sampler(model, temperature=1.0, seed=2, xtc_probability=1.0, xtc_threshold=0.1) as sampler:
        assert set(draws(sampler, row, 100)) == {3}


def test_every_other_field_is_taken(model: Model, row: NDArray[np.float32]) -> None:
    with Sampler(
        model,
        temperature=0.8,
        dynatemp_range=0.3,
        dynatemp_exponent=1.5,
        penalty_freq=0.1,
        min_keep=2,
        dry_multiplier=0.5,
        dry_breakers=["\n", ":"],
        seed=1,
    ) as sampler:
        assert 0 <= sampler.sample_row(row) < model.n_vocab


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"temperature": float("nan")}, InvalidArgumentError),
        ({"temperature": float("inf")}, InvalidArgumentError),
        ({"top_p": 1.5}, InvalidArgumentError),
        ({"top_p": -0.5}, InvalidArgumentError),
        ({"min_p": float("nan")}, InvalidArgumentError),
        ({"mirostat": 3}, LlamaCppShimError),
        ({"penalty_last_n": 2**30}, LlamaCppShimError),
        ({"top_k": 2**31}, OutOfRangeError),
        ({"seed": -1}, OutOfRangeError),
        ({"seed": 2**32}, OutOfRangeError),
        ({"min_keep": -1}, OutOfRangeError),
        ({"logit_bias": {-1: 1.0}}, OutOfRangeError),
        ({"logit_bias": {50259: 1.0}}, OutOfRangeError),
        ({"logit_bias": {2**40: 1.0}}, OutOfRangeError),
        ({"logit_bias": {1: float("nan")}}, InvalidArgumentError),
        ({"temperature": "hot"}, TypeError),
        ({"top_k": 1.5}, TypeError),
        ({"logit_bias": 5}, TypeError),
        ({"dry_breakers": "abc"}, TypeError),
        ({"dry_breakers": ["a\0b"]}, InvalidArgumentError),
        ({"temp": 0.5}, TypeError),
        ({"grammar": "root ::= ("}, GrammarError),
        ({"grammar": "root ::= missing"}, GrammarError),
        ({"grammar": 'other ::= "a"'}, GrammarError),
        ({"grammar": "root ::= root"}, GrammarError),
        ({"grammar": "(" * 100000}, GrammarError),
        ({"grammar": "root ::= " + "(" * 1000 + '"a"' + ")" * 1000}, GrammarError),
        ({"grammar": 'root ::= "a"{3,2}'}, GrammarError),
        ({"grammar": 'root ::= "a"{1000000000}'}, GrammarError),
        ({"grammar": "x" * (2 << 20)}, GrammarError),
        ({"grammar": 'root ::= "a"', "grammar_root": "nope"}, GrammarError),
        ({"grammar": 'root ::= "ab"', "grammar_prefix": "b"}, GrammarError),
        ({"grammar": 'root ::= "ab"', "grammar_prefix": "abc"}, GrammarError),
        ({"grammar": 'root ::= "ab"', "grammar_prefix": "a", "grammar_lazy": True}, InvalidArgumentError),
        ({"grammar": 'root ::= "ab"', "grammar_prefix": "a\0"}, InvalidArgumentError),
        ({"grammar": 'root ::= "a\0"'}, InvalidArgumentError),
        ({"grammar": 'root ::= "\ud800"'}, InvalidArgumentError),
        ({"grammar": 'root ::= "a"', "grammar_lazy": True, "trigger_patterns": ["("]}, GrammarError),
        ({"grammar": 'root ::= "a"', "grammar_lazy": True, "trigger_tokens": [-1]}, OutOfRangeError),
        ({"grammar": 5}, TypeError),
    ],
)
def test_a_wrong_value_is_refused_by_its_error(model: Model, params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Sampler(model, **params)
    assert "\n" not in str(caught.value)


def test_rows_outside_and_rows_of_nothing_are_refused(model: Model, context: Context, row: NDArray[np.float32]) -> None:
    with Sampler(model) as greedy, Sampler(model, temperature=1.0, seed=1) as drawing:
        for sampler in (greedy, drawing):
            with pytest.raises(OutOfRangeError):
                sampler.sample(context)
            for wrong in (row[:-1], row[:0], np.append(row, 0)):
                with pytest.raises(LlamaCppShimError):
                    sampler.sample_row(wrong)
            for spoiled in (np.full_like(row, np.nan), np.full_like(row, -np.inf)):
                with pytest.raises(InternalError):
                    sampler.sample_row(spoiled)
            with pytest.raises(ValueError, match="2 dimensions"):
                sampler.sample_row(row.reshape(1, -1))
            with pytest.raises((TypeError, ValueError)):
                sampler.sample_row("abc")
            for far in (-1, model.n_vocab, 2**31, -(2**64)):
                with pytest.raises(OutOfRangeError):
                    sampler.accept(far)
            assert 0 <= sampler.sample_row(row) < model.n_vocab
        context.decode([1, 2])
        for bad_row in (0, 2, -3, 2**31):
            with pytest.raises(OutOfRangeError):
                greedy.sample(context, bad_row)
        with pytest.raises(TypeError):
            greedy.sample(model)  # type: ignore[arg-type]
        assert greedy.sample(context) == context.logits().argmax()


def test_a_context_of_another_vocabulary_is_refused(loaded: dict[str, Model], context: Context) -> None:
    context.decode([1])
    with Sampler(loaded["tiny-spm"]) as sampler, pytest.raises(OutOfRangeError):
        sampler.sample(context)


# Grammars


def reply(model: Model, sampler: Sampler, seed: int, limit: int = 200) -> bytes:
    """What a sampler makes of random rows, until it ends."""
    random = np.random.default_rng(seed)
    tokens = []
    for _ in range(limit):
        token = sampler.sample_row(random.normal(0, 3, model.n_vocab).astype(np.float32))
        if model.is_eog(token):
            break
        tokens.append(token)
    return model.detokenize(tokens)


def test_a_grammar_holds_whatever_the_logits(model: Model) -> None:
    with Sampler(model, grammar='root ::= ("yes" | "no") " sir"') as sampler:
        for seed in range(10):
            assert reply(model, sampler, seed) in (b"yes sir", b"no sir")
            sampler.reset()


def test_a_refused_token_leaves_the_grammar_as_it_was(model: Model) -> None:
    def token(text: str) -> int:
        return int(model.tokenize(text, add_special=False, parse_special=False)[0])

    with Sampler(model, grammar='root ::= "yes"') as sampler:
        for _ in range(3):
            with pytest.raises(GrammarError):
                sampler.accept(token("no"))
        assert model.eos is not None
        with pytest.raises(GrammarError):
            sampler.accept(model.eos)
        assert reply(model, sampler, 0) == b"yes"


def test_a_grammar_that_allows_nothing_more_is_an_error_not_a_hang(model: Model, row: NDArray[np.float32]) -> None:
    ends = [token for token in range(model.n_vocab) if model.is_eog(token)]
    with Sampler(model, grammar='root ::= "a"', logit_bias=dict.fromkeys(ends, -np.inf)) as sampler:
        assert model.token_piece(sampler.sample_row(row)) == b"a"
        with pytest.raises(LlamaCppShimError):
            sampler.sample_row(row)
        sampler.reset()
        assert model.token_piece(sampler.sample_row(row)) == b"a"


def test_a_lazy_grammar_sleeps_until_its_trigger(model: Model, row: NDArray[np.float32]) -> None:
    trigger = 262
    with Sampler(
        model, grammar='root ::= "yes"', grammar_lazy=True, trigger_tokens=[trigger], logit_bias={trigger: -100}
    ) as sampler:
        assert sampler.sample_row(row) == row.argmax()


def test_a_json_schema_becomes_a_grammar_that_holds(model: Model) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    grammar = json_schema_to_grammar(schema)
    assert json_schema_to_grammar('{"type": "boolean"}') == json_schema_to_grammar({"type": "boolean"})
    with Sampler(model, grammar=grammar) as sampler:
        text = reply(model, sampler, 1).decode()
    assert json.loads(text) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize("schema", ["", "{", "[" * 100000, {"type": "nope"}, {"$ref": "#/nowhere"}, "\ud800"])
def test_a_schema_that_is_none_is_refused(schema: Any) -> None:
    with pytest.raises((GrammarError, InvalidArgumentError)):
        json_schema_to_grammar(schema)


def test_for_every_failing_step_making_a_sampler_fails_cleanly(model: Model) -> None:
    for n in range(1, 100):
        _native._fault_arm(n)
        try:
            Sampler(model, temperature=0.5, top_k=5, grammar='root ::= "a"', logit_bias={1: 1.0}).clone().close()
        except MemoryError:
            assert _native._fault_fired()
        fired = _native._fault_fired()
        _native._fault_arm(0)
        if not fired:
            break
    assert 1 < n < 99


# Argmax


def test_argmax_is_numpy_s_first_largest() -> None:
    random = np.random.default_rng(4)
    for n in [*range(1, 70), 1000, 262144]:
        values = random.integers(-5, 5, n).astype(np.float32)
        assert argmax(values) == values.argmax()
    assert argmax([]) == -1
    assert argmax(np.full(9, np.nan, np.float32)) == -1
    assert argmax(np.array([np.nan, -np.inf, 3, np.nan, 3], np.float32)) == 2
    assert argmax(np.full(5, -np.inf, np.float32)) == 0
    with pytest.raises(InvalidArgumentError):
        argmax(np.zeros((2, 2), np.float32))
    with pytest.raises((TypeError, ValueError)):
        argmax("abc")
