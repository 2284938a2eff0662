"""The context handle: parameters as resolved, decoding and its statuses, rows, memory operations, state."""

from __future__ import annotations

import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunChild
from numpy.typing import NDArray

from llamacppshim import (
    Adapter,
    Batch,
    BatchTooLargeError,
    Context,
    DecodeAbortedError,
    DecodeAllocError,
    DecodeComputeError,
    DecodeFatalError,
    DecodeResult,
    DecodeStatus,
    InvalidArgumentError,
    InvalidBatchError,
    LlamaCppShimError,
    Model,
    NoKVSlotError,
    OutOfMemoryError,
    OutOfRangeError,
    SnapshotCorruptError,
    SnapshotMismatchError,
    StaleViewError,
    UnsupportedFeatureError,
    _native,
)

N_BATCH = 64
PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(150)]
WITH_MEMORY = ["tiny-llama", "tiny-swa", "tiny-mamba", "tiny-hybrid"]


def make(model: Model, **params: Any) -> Context:
    return Context(model, **{"n_ctx": 1024, "n_batch": N_BATCH, "n_ubatch": N_BATCH, "n_threads": 1, **params})


def last_logits(context: Context, tokens: list[int], seq_id: int = 0) -> NDArray[np.float32]:
    context.decode(tokens, seq_id=seq_id)
    return context.logits().reshape(-1)


# Parameters


def test_the_defaults_are_llama_cpp_s_but_for_the_ones_the_header_names(model: Model) -> None:
    with Context(model) as context:
        assert (context.n_ctx, context.n_ctx_seq, context.n_batch, context.n_ubatch) == (512, 512, 512, 512)
        assert (context.n_seq_max, context.n_stream, context.n_outputs_max) == (1, 1, 32)
        assert (context.type_k, context.type_v, context.flash_attn) == ("f16", "f16", False)
        assert not (context.swa_full or context.kv_unified or context.embeddings_on or context.fatal)
        assert context.n_threads == context.n_threads_batch >= 1
        assert context.memory_kind == "attention"
        assert context.can_shift
        assert context.pooling == "none"
        assert context.n_rs_seq == 0
        assert context.adapters == ()
        assert context.model is model


@pytest.mark.parametrize(
    ("params", "resolved"),
    [
        ({"n_ctx": 0}, {"n_ctx": None}),
        ({"n_ctx": 300}, {"n_ctx": 512, "n_batch": 300}),
        ({"n_ctx": 1024, "n_seq_max": 4}, {"n_ctx_seq": 256, "n_stream": 4, "n_seq_max": 4}),
        ({"n_ctx": 1024, "n_seq_max": 4, "kv_unified": True}, {"n_ctx_seq": 1024, "n_stream": 1, "kv_unified": True}),
        ({"n_batch": 100, "n_ubatch": 1000}, {"n_batch": 100, "n_ubatch": 100}),
        ({"n_outputs_max": 7}, {"n_outputs_max": 7}),
        ({"n_threads": 3}, {"n_threads": 3, "n_threads_batch": 3}),
        ({"n_threads": 1, "n_threads_batch": 2}, {"n_threads": 1, "n_threads_batch": 2}),
        ({"embeddings": True, "n_batch": 128}, {"embeddings_on": True, "n_outputs_max": 128}),
        ({"embeddings": True, "pooling": "mean"}, {"pooling": "mean"}),
        ({"perf": True}, {}),
        ({"rope_scaling": "yarn", "rope_freq_scale": 0.5, "yarn_orig_ctx": 256}, {}),
        ({"attention": "causal", "offload_kqv": False, "op_offload": False, "poll": 0, "n_rs_seq": 0}, {"n_rs_seq": 0}),
        (dict.fromkeys(["n_ctx", "n_batch", "flash_attn", "type_k", "pooling", "swa_full", "poll"]), {"n_ctx": 512}),
    ],
)
def test_parameters_read_back_as_resolved(model: Model, params: dict[str, Any], resolved: dict[str, Any]) -> None:
    with Context(model, **params) as context:
        for name, value in resolved.items():
            assert getattr(context, name) == (model.n_ctx_train if value is None else value), name
        context.decode([1, 2, 3])


@pytest.mark.parametrize("cache", ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"])
def test_flash_attention_is_on_by_default_where_the_cache_is_quantised(model: Model, cache: Any) -> None:
    quantised = "q" in cache
    with make(model, type_k=cache, type_v=cache) as context:
        assert (context.type_k, context.type_v, context.flash_attn) == (cache, cache, quantised)
        context.decode(PROMPT)
    with make(model, type_k=cache) as context:
        assert context.flash_attn == quantised


@pytest.mark.parametrize(("given", "on"), [("on", True), (True, True), ("off", False), (False, False), (None, False)])
def test_flash_attention_is_what_was_asked_for(model: Model, given: Any, on: bool) -> None:
    with make(model, flash_attn=given) as context:
        assert context.flash_attn is on


@pytest.mark.parametrize(
    ("params", "error", "says"),
    [
        ({"n_seq_max": 0}, OutOfRangeError, "n_seq_max 0"),
        ({"n_seq_max": 257}, OutOfRangeError, "n_seq_max 257"),
        ({"n_seq_max": 65}, InvalidArgumentError, "n_seq_max 65"),
        ({"n_batch": 0}, OutOfRangeError, "n_batch 0"),
        ({"n_ubatch": 0}, OutOfRangeError, "n_ubatch 0"),
        ({"n_ctx": -1}, OutOfRangeError, "n_ctx -1"),
        ({"n_ctx": 2**32}, OutOfRangeError, "n_ctx 4294967296"),
        ({"n_ctx": 2**32 - 1}, OutOfRangeError, "n_ctx 4294967295"),
        ({"n_threads": 513}, OutOfRangeError, "n_threads 513"),
        ({"poll": 101}, OutOfRangeError, "poll 101"),
        ({"n_seq_max": 4, "n_outputs_max": 3}, InvalidArgumentError, "n_outputs_max 3"),
        ({"flash_attn": "off", "type_v": "q8_0"}, InvalidArgumentError, "q8_0"),
        ({"flash_attn": "yes"}, InvalidArgumentError, "'yes' is none of: auto on off"),
        ({"flash_attn": 1}, InvalidArgumentError, "auto on off"),
        ({"type_k": "q2_k"}, InvalidArgumentError, "'q2_k'"),
        ({"type_v": 1}, InvalidArgumentError, "type_v 1"),
        ({"pooling": "max"}, InvalidArgumentError, "'max'"),
        ({"attention": "both"}, InvalidArgumentError, "'both'"),
        ({"rope_scaling": ""}, InvalidArgumentError, "rope_scaling ''"),
        ({"rope_freq_base": float("nan")}, InvalidArgumentError, "rope_freq_base nan"),
        ({"rope_freq_scale": float("inf")}, InvalidArgumentError, "rope_freq_scale inf"),
        ({"yarn_beta_fast": 10**400}, InvalidArgumentError, "yarn_beta_fast"),
        ({"n_ctx": "512"}, TypeError, "n_ctx must be an integer, not str"),
        ({"n_ctx": 512.0}, TypeError, "n_ctx must be an integer, not float"),
        ({"rope_freq_base": "1"}, TypeError, "rope_freq_base must be a number, not str"),
        ({"n_cells": 512}, TypeError, "n_cells"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    model: Model, params: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        make(model, **params)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_that_does_not_fit_in_memory_is_refused(model: Model) -> None:
    with pytest.raises(OutOfMemoryError):
        Context(model, n_ctx=2**31 - 256, type_k="f32", type_v="f32", n_seq_max=1)
    with Context(model) as context:
        context.decode([1])


def test_threads_can_be_changed_without_changing_the_answer(model: Model) -> None:
    with make(model) as context:
        expected = last_logits(context, PROMPT)
        context.clear()
        context.set_threads(2)
        assert (context.n_threads, context.n_threads_batch) == (2, 2)
        np.testing.assert_allclose(last_logits(context, PROMPT), expected, atol=1e-3)
        context.set_threads(1, 3)
        assert (context.n_threads, context.n_threads_batch) == (1, 3)
        for wrong in ((513,), (1, 2**31)):
            with pytest.raises(OutOfRangeError):
                context.set_threads(*wrong)
        assert (context.n_threads, context.n_threads_batch) == (1, 3)


# Decode


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("n", [1, N_BATCH - 1, N_BATCH, N_BATCH + 1, 150])
def test_a_prompt_of_any_length_is_cut_into_batches(loaded: dict[str, Model], name: str, n: int) -> None:
    """Oracle: the same tokens, cut by hand at the same places."""
    with make(loaded[name]) as context:
        result = context.decode(PROMPT[:n])
        assert result == DecodeResult(DecodeStatus.OK, n, n, ())
        assert context.seq_pos_max(0) == n - 1
        got = context.logits()
        context.clear()
        for begin in range(0, n, N_BATCH):
            context.decode(PROMPT[begin : min(n, begin + N_BATCH)])
        np.testing.assert_array_equal(got, context.logits())


def test_tokens_come_as_any_sequence_or_array_of_integers(context: Context) -> None:
    expected = last_logits(context, PROMPT[:20])
    numbers = np.array(PROMPT[:20])
    for given in (
        PROMPT[:20],
        tuple(PROMPT[:20]),
        iter(PROMPT[:20]),
        numbers.astype(np.int32),
        numbers.astype(np.int64),
        numbers.astype(np.uint16),
        np.repeat(numbers.astype(np.int32), 2)[::2],
        array.array("i", PROMPT[:20]),
        numbers.astype(np.int32).data,
        list(numbers),
    ):
        context.clear()
        assert context.decode(given).committed == 20
        np.testing.assert_array_equal(context.logits()[0], expected)


@pytest.mark.parametrize(
    "tokens", ["abc", b"abc", bytearray(b"a"), [1.0], ["1"], [None], [[1]], None, 5, np.array([1.0]), np.array([True])]
)
def test_what_is_no_integer_is_a_type_error_and_nothing_changed(context: Context, tokens: Any) -> None:
    expected = last_logits(context, [1, 2, 3])
    with pytest.raises(TypeError):
        context.decode(tokens)
    assert context.seq_pos_max(0) == 2
    np.testing.assert_array_equal(context.logits()[0], expected)


@pytest.mark.parametrize(
    "far", [-1, 50259, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, pytest.param(-(10**5000), id="5,000 digits")]
)
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_changed(context: Context, far: int) -> None:
    expected = last_logits(context, [1, 2, 3])
    for tokens in ([far], [1, far, 2], (1, far)):
        with pytest.raises(OutOfRangeError):
            context.decode(tokens)
    if abs(far) < 2**63:
        with pytest.raises(OutOfRangeError):
            context.decode(np.array([far]))
    assert context.seq_pos_max(0) == 2
    np.testing.assert_array_equal(context.logits()[0], expected)
    context.decode([4])


@pytest.mark.parametrize("seq_id", [-1, 2, 255, 256, 2**31, -(2**63), 2**64])
def test_a_sequence_outside_the_context_is_refused_everywhere(context: Context, seq_id: int) -> None:
    context.decode([1, 2, 3])
    for call in (
        lambda: context.decode([1], seq_id=seq_id),
        lambda: context.decode_batch(Batch([1], [3], [seq_id])),
        lambda: context.seq_rm(seq_id),
        lambda: context.seq_cp(0, seq_id),
        lambda: context.seq_cp(seq_id, 0),
        lambda: context.seq_keep(seq_id),
        lambda: context.seq_add(seq_id, 0, 1, 1),
        lambda: context.seq_pos_min(seq_id),
        lambda: context.seq_pos_max(seq_id),
        lambda: context.seq_state_size(seq_id),
        lambda: context.seq_state_save(seq_id),
        lambda: context.seq_state_load(seq_id, b"x" * 200),
    ):
        with pytest.raises(OutOfRangeError) as caught:
            call()
        assert str(seq_id) in str(caught.value)
    assert context.seq_pos_max(0) == 2
    context.decode([4])


@pytest.mark.parametrize("pos", [0, 2, 4, 2**31 - 2])
def test_a_position_that_does_not_follow_is_an_invalid_batch(context: Context, pos: int) -> None:
    expected = last_logits(context, [1, 2, 3])
    with pytest.raises(InvalidBatchError) as caught:
        context.decode([4], pos=pos)
    error = caught.value
    assert (error.status, error.raw_status, error.committed) == (DecodeStatus.INVALID_BATCH, -1, 0)
    assert error.dirty == frozenset()
    np.testing.assert_array_equal(context.logits()[0], expected)
    context.decode([4], pos=3)
    assert context.seq_pos_max(0) == 3


def test_positions_and_sizes_far_outside_are_out_of_range(context: Context) -> None:
    for pos in (-1, -2, 2**31, 2**64):
        with pytest.raises(OutOfRangeError):
            context.decode([1], pos=pos)
    for wrong in ("0", 0.0):
        with pytest.raises(TypeError):
            context.decode([1], pos=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            context.decode([1], seq_id=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        context.decode([])
    with pytest.raises(TypeError):
        context.decode([1], 0)  # type: ignore[call-arg]


def test_a_full_context_keeps_the_whole_batches_and_says_how_many(model: Model) -> None:
    with make(model, n_ctx=256) as context:
        with pytest.raises(NoKVSlotError) as caught:
            context.decode(list(range(300)))
        error = caught.value
        assert (error.status, error.raw_status, error.committed) == (DecodeStatus.NO_KV_SLOT, 1, 256)
        assert error.dirty == frozenset()
        assert context.seq_pos_max(0) == 255
        with pytest.raises(OutOfRangeError):
            context.logits()
        assert context.seq_rm(0, 100)
        assert context.decode([1, 2]).committed == 2


def test_a_cancel_before_a_decode_ends_the_next_and_only_the_next(context: Context) -> None:
    context.decode([1, 2, 3])
    context.cancel()
    context.cancel()
    with pytest.raises(DecodeAbortedError) as caught:
        context.decode(PROMPT)
    error = caught.value
    assert (error.status, error.raw_status, error.committed, error.dirty) == (DecodeStatus.ABORTED, 2, 0, frozenset())
    assert context.seq_pos_max(0) == 2
    assert context.decode(PROMPT).committed == len(PROMPT)


@pytest.mark.parametrize(
    ("raw", "cls", "fatal"),
    [
        (2, DecodeAbortedError, False),
        (-2, DecodeAllocError, False),
        (-3, DecodeComputeError, False),
        (-77, DecodeFatalError, True),
        (-(2**31), DecodeFatalError, True),
    ],
)
def test_a_failing_graph_is_its_status_with_what_is_left(
    model: Model, raw: int, cls: type[DecodeFatalError], fatal: bool
) -> None:
    with make(model) as context:
        expected = last_logits(context, PROMPT)
        context.clear()
        _native._fault_arm_decode(raw, 50)
        with pytest.raises(cls) as caught:
            context.decode(PROMPT)
        error = caught.value
        assert type(error) is cls
        assert 0 <= error.committed < len(PROMPT)
        assert context.fatal is fatal
        if not fatal:
            assert (int(error.status), error.raw_status, error.dirty) == (raw, raw, frozenset())
            assert context.seq_pos_max(0) == error.committed - 1
            context.clear()
            np.testing.assert_array_equal(last_logits(context, PROMPT), expected)
            return
        assert error.dirty == {0}
        if raw == -77:
            assert (error.status, error.raw_status) == (-77, -77)
        for call in (lambda: context.decode([1]), lambda: context.seq_rm(0), context.state_save, context.logits):
            with pytest.raises(DecodeFatalError) as later:
                call()
            assert str(later.value) in str(error)


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-hybrid"])
def test_an_abort_inside_a_recurrent_memory_makes_its_sequences_dirty(loaded: dict[str, Model], name: str) -> None:
    with make(loaded[name], n_seq_max=2) as context:
        context.decode(PROMPT[:20], seq_id=0)
        context.decode(PROMPT[:20], seq_id=1)
        _native._fault_arm_decode(2, 10)
        with pytest.raises(DecodeAbortedError) as caught:
            context.decode(PROMPT[20:40], seq_id=0)
        assert 0 in caught.value.dirty
        for seq_id in caught.value.dirty:
            assert context.seq_rm(seq_id)
            assert context.seq_pos_max(seq_id) == -1
        context.decode(PROMPT, seq_id=0)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_for_every_failing_step_a_decode_fails_cleanly_or_not_at_all(loaded: dict[str, Model], name: str) -> None:
    with make(loaded[name]) as context:
        expected = last_logits(context, PROMPT)
        for n in range(1, 100):
            context.clear()
            _native._fault_arm(n)
            try:
                context.decode(PROMPT)
            except LlamaCppShimError as error:
                assert isinstance(error, MemoryError)
                assert _native._fault_fired()
            finally:
                fired = _native._fault_fired()
                _native._fault_arm(0)
            context.clear()
            np.testing.assert_array_equal(last_logits(context, PROMPT), expected)
            if not fired:
                break
        assert 1 < n < 99


def test_a_result_is_an_immutable_value() -> None:
    result = DecodeResult(DecodeStatus.OK, 3, 2, [1, 1])
    assert (result.status, result.n_tokens, result.committed, result.dirty) == (DecodeStatus.OK, 3, 2, frozenset({1}))
    assert result == DecodeResult(DecodeStatus.OK, 3, 2, {1})
    assert hash(result) == hash(DecodeResult(DecodeStatus.OK, 3, 2, {1}))
    assert result != DecodeResult(DecodeStatus.OK, 3, 3, {1})
    assert result != (DecodeStatus.OK, 3, 2, {1})
    assert "committed=2" in repr(result)
    with pytest.raises(AttributeError):
        result.committed = 5  # type: ignore[misc]


# Batches of several sequences


def test_a_batch_of_several_sequences_is_each_of_them_alone(model: Model) -> None:
    """Oracle: each sequence decoded alone; within a tolerance, since kernels depend on the number of rows."""
    prompts = {0: PROMPT[:9], 1: PROMPT[9:14], 2: PROMPT[20:40]}
    with make(model, n_seq_max=3) as context:
        expected = {seq_id: last_logits(context, prompt, seq_id) for seq_id, prompt in prompts.items()}
        context.clear()
        batch = Batch()
        rows = {}
        for seq_id, prompt in prompts.items():
            for pos, token in enumerate(prompt):
                batch.add(token, pos, seq_id, logits=pos == len(prompt) - 1)
            rows[seq_id] = len(batch) - 1
        result = context.decode_batch(batch)
        assert result == DecodeResult(DecodeStatus.OK, len(batch), len(batch), ())
        for seq_id, row in rows.items():
            assert context.seq_pos_max(seq_id) == len(prompts[seq_id]) - 1
            np.testing.assert_allclose(context.logits([row])[0], expected[seq_id], atol=0.05)
        batch.clear()
        assert len(batch) == 0
        with pytest.raises(InvalidArgumentError):
            context.decode_batch(batch)
        batch.add(1, 9, 0, True)
        context.decode_batch(batch)


def test_a_token_may_belong_to_several_sequences_of_one_stream(model: Model) -> None:
    batch = Batch([5, 6, 7], [0, 1, 2], [(0, 1), [1, 0], np.array([0, 1])], [False, False, True])
    with make(model, n_seq_max=2, kv_unified=True) as context:
        context.decode_batch(batch)
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (2, 2)
        shared = context.logits()[0]
        context.clear()
        np.testing.assert_allclose(last_logits(context, [5, 6, 7]), shared, atol=0.05)
    with make(model, n_seq_max=2) as context, pytest.raises(UnsupportedFeatureError):
        context.decode_batch(batch)


def test_a_batch_is_never_cut(model: Model) -> None:
    with make(model) as context:
        for n, n_rows in ((N_BATCH + 1, 1), (N_BATCH, 33)):
            batch = Batch(PROMPT[:n], range(n), [0] * n, [i < n_rows for i in range(n)])
            with pytest.raises(BatchTooLargeError) as caught:
                context.decode_batch(batch)
            assert (caught.value.n_tokens, caught.value.n_batch) == (n, N_BATCH)
            assert context.seq_pos_max(0) == -1
        context.decode_batch(Batch(PROMPT[:N_BATCH], range(N_BATCH), [0] * N_BATCH))


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (([1], [1], [0]), None),
        (([1, 2], [0, 0], [0, 0]), InvalidBatchError),
        (([1, 2], [1, 0], [0, 0]), InvalidBatchError),
        (([1, 2], [0, 2], [0, 0]), InvalidBatchError),
        (([1], [-1], [0]), OutOfRangeError),
        (([-1], [0], [0]), OutOfRangeError),
        (([1], [0], [[]]), OutOfRangeError),
        (([1], [0], [[0, 0]]), LlamaCppShimError),
        (([1], [0], [range(3)]), TypeError),
        (([1], [0, 1], [0]), InvalidArgumentError),
        (([1], [0], [0], []), InvalidArgumentError),
        (([2**31], [0], [0]), OutOfRangeError),
        (([1], [2**40], [0]), OutOfRangeError),
        (([1], [0], [2**40]), OutOfRangeError),
        ((["a"], [0], [0]), TypeError),
    ],
)
def test_a_wrong_batch_is_refused_and_nothing_changed(
    model: Model, batch: tuple[Any, ...], error: type[Exception] | None
) -> None:
    with make(model, n_seq_max=2, kv_unified=True) as context:
        if error is None:  # an empty sequence may begin anywhere
            context.decode_batch(Batch(*batch))
            return
        with pytest.raises(error):
            context.decode_batch(Batch(*batch))
        assert context.seq_pos_max(0) == -1
        context.decode([1])


def test_adding_a_wrong_token_leaves_the_batch_as_it_was() -> None:
    batch = Batch()
    batch.add(1, 0, 0)
    wrongs: list[tuple[Any, Any, Any]] = [("x", 0, 0), (1, 2**31, 0), (1, 0, [0, "x"]), (1, 0, 2**31)]
    for wrong in wrongs:
        with pytest.raises((TypeError, OutOfRangeError)):
            batch.add(*wrong)
        assert len(batch) == 1


# Rows


def test_only_the_rows_that_were_asked_for_are_there(context: Context) -> None:
    n = 10
    context.decode(PROMPT[:n], logits="all")
    every = context.logits(range(n))
    assert every.shape == (n, context.model.n_vocab)
    assert every.dtype == np.float32
    np.testing.assert_array_equal(context.logits(np.arange(-n, 0)), every)
    np.testing.assert_array_equal(context.logits([3, 3, -1]), every[[3, 3, 9]])
    assert context.logits([]).shape == (0, context.model.n_vocab)
    mask = [i in (2, 5) for i in range(n)]
    for given in (mask, tuple(mask), np.array(mask), np.array(mask, np.uint8), np.array(mask, np.int64)):
        context.clear()
        context.decode(PROMPT[:n], logits=given)
        np.testing.assert_allclose(context.logits([2, 5]), every[[2, 5]], atol=1e-3)
        for row in (0, 1, 9, -1, 10, -11, 2**31 - 1, 2**31, -(2**64)):
            with pytest.raises(OutOfRangeError):
                context.logits([row])
    context.clear()
    context.decode(PROMPT[:n], logits="none")
    with pytest.raises(OutOfRangeError):
        context.logits()
    context.decode(PROMPT[:n], logits="last")
    context.logits([n - 1])
    with pytest.raises(OutOfRangeError, match="not asked for"):
        context.logits([0])
    for wrong in (3, "1", [1.5], None):
        with pytest.raises(TypeError):
            context.logits(wrong)  # type: ignore[arg-type]


def test_there_are_no_rows_before_the_first_decode(context: Context) -> None:
    with pytest.raises(OutOfRangeError):
        context.logits()
    with pytest.raises(OutOfRangeError):
        context.logits_view()


@pytest.mark.parametrize("wrong", ["first", "", [True], [True] * 4, np.ones((3, 1)), None, np.ones(3, np.float32)])
def test_a_wrong_wish_for_rows_is_refused(context: Context, wrong: Any) -> None:
    with pytest.raises((InvalidArgumentError, TypeError)):
        context.decode([1, 2, 3], logits=wrong)
    assert context.seq_pos_max(0) == -1


def test_rows_of_a_prompt_of_many_batches_are_all_there(model: Model) -> None:
    """Oracle: the same pieces decoded one by one, each with all its rows read at once."""
    with make(model) as context:
        context.decode(PROMPT, logits="all")
        every = context.logits(range(len(PROMPT)))
        context.clear()
        parts = []
        for begin in range(0, len(PROMPT), 32):  # 32 rows are the most of a batch
            part = PROMPT[begin : begin + 32]
            context.decode(part, logits="all")
            parts.append(context.logits(range(len(part))))
        np.testing.assert_array_equal(every, np.concatenate(parts))


def test_logits_are_a_copy_that_later_decodes_leave_alone(context: Context) -> None:
    context.decode([1, 2, 3])
    first = context.logits()
    kept = first.copy()
    context.decode([400])
    np.testing.assert_array_equal(first, kept)
    first[:] = 0
    assert not np.array_equal(context.logits(), first)


def test_a_view_is_the_row_without_a_copy_and_read_only(context: Context) -> None:
    context.decode([1, 2, 3])
    copy = context.logits()[0]
    view: Any = context.logits_view()  # Any: before 3.12 the type system has no buffers
    assert (view.shape, view.dtype, len(view), view.valid) == ((len(copy),), np.float32, len(copy), True)
    shared = np.asarray(view)
    assert np.shares_memory(shared, np.asarray(context.logits_view(2)))
    np.testing.assert_array_equal(shared, copy)
    np.testing.assert_array_equal(np.frombuffer(view, np.float32), copy)
    assert not shared.flags.writeable
    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
        shared[0] = 1
    assert memoryview(view).readonly
    assert (memoryview(view).format, memoryview(view).shape) == ("f", (len(copy),))
    assert (view[0], view[-1]) == (copy[0], copy[-1])
    np.testing.assert_array_equal(view[5:9], copy[5:9])
    with pytest.raises(IndexError):
        view[len(copy)]
    with pytest.raises(TypeError):
        view[0] = 1
    assert int(np.argmax(view)) == int(copy.argmax()) == _native.argmax(view)
    assert np.array(view, copy=True).flags.writeable
    assert np.asarray(view, np.float64).dtype == np.float64
    assert sum(1 for _ in view) == len(copy)


@pytest.mark.parametrize("after", ["decode", "batch", "load", "embeddings", "abort"])
def test_a_view_raises_once_its_row_is_replaced(context: Context, after: str) -> None:
    context.decode([1, 2, 3])
    blob = context.state_save()
    view: Any = context.logits_view()
    if after == "decode":
        context.decode([4])
    elif after == "batch":
        context.decode_batch(Batch([4], [3], [0]))
    elif after == "load":
        context.state_load(blob)
    elif after == "embeddings":
        context.set_embeddings(True)
    else:
        context.cancel()
        with pytest.raises(DecodeAbortedError):
            context.decode([4])
    assert not view.valid
    uses: list[Any] = [lambda: view[0], lambda: np.asarray(view), lambda: memoryview(view), lambda: view[:3]]
    for use in [*uses, lambda: list(view), lambda: np.frombuffer(view, np.float32)]:
        with pytest.raises(StaleViewError):
            use()


def test_a_view_stays_good_through_a_decode_that_was_refused(context: Context) -> None:
    context.decode([1, 2, 3])
    view = context.logits_view()
    first = view[0]
    for refused in ([], [-1], [10**9]):
        with pytest.raises(LlamaCppShimError):
            context.decode(refused)
    with pytest.raises(LlamaCppShimError):
        context.state_load(b"nonsense")
    context.seq_pos_max(0)
    assert view[0] == first


def test_arrays_of_rows_are_safe_through_every_later_call(context: Context) -> None:
    """They may show other values by then, but memory that is theirs to read."""
    context.decode(PROMPT[:40], logits="all")
    arrays = [np.asarray(context.logits_view(row)) for row in range(40)]
    for step in range(20):
        context.decode(PROMPT[: 1 + step], logits="last")
        assert all(np.isfinite(a).all() for a in arrays)
    context.clear()
    del arrays
    context.decode(PROMPT[:32], logits="all")


def test_embeddings_are_one_a_token_or_one_a_sequence(loaded: dict[str, Model]) -> None:
    model = loaded["tiny-llama"]
    with make(model, embeddings=True) as context:
        context.decode(PROMPT[:7])
        every = context.embeddings(range(7))
        assert every.shape == (7, model.n_embd_out)
        assert every.dtype == np.float32
        assert np.isfinite(every).all()
        assert np.ptp(every) > 0
        with pytest.raises(UnsupportedFeatureError):
            context.embeddings_seq(0)
        context.set_embeddings(False)
        assert not context.embeddings_on
        with pytest.raises(UnsupportedFeatureError):
            context.embeddings()
    with make(model, embeddings=True, pooling="mean") as context:
        context.decode(PROMPT[:7])
        np.testing.assert_allclose(context.embeddings_seq(0), every.mean(axis=0), atol=1e-2)
        with pytest.raises(UnsupportedFeatureError):
            context.embeddings()
    with make(loaded["tiny-bert"], embeddings=True, pooling="cls", n_ctx=0) as context:
        context.decode([1, 5, 2])
        assert context.embeddings_seq(0).shape == (loaded["tiny-bert"].n_embd_out,)
        assert context.memory_kind == "none"
        with pytest.raises(UnsupportedFeatureError):
            context.seq_pos_max(0)


def test_a_pooled_prompt_must_fit_one_graph(model: Model) -> None:
    with make(model, embeddings=True, pooling="mean") as context, pytest.raises(BatchTooLargeError) as caught:
        context.decode(PROMPT)
    assert (caught.value.n_tokens, caught.value.n_batch) == (len(PROMPT), N_BATCH)


# Adapters


def test_an_adapter_changes_the_answer_and_its_absence_restores_it(model: Model, tiny_models: dict[str, Path]) -> None:
    with make(model) as context, Adapter(model, tiny_models["tiny-lora"]) as adapter:
        plain = last_logits(context, PROMPT[:20])
        outcomes = []
        every: list[Any] = [{adapter: 1.0}, [(adapter, 1)], {adapter: 0.5}, {adapter: 0.0}, {}, ()]
        for given in every:
            context.clear()
            context.set_adapters(given)
            outcomes.append(last_logits(context, PROMPT[:20]))
        assert context.adapters == ()
        assert not np.allclose(outcomes[0], plain, atol=1e-3)
        np.testing.assert_array_equal(outcomes[0], outcomes[1])
        assert not np.allclose(outcomes[2], outcomes[0], atol=1e-3)
        np.testing.assert_allclose(outcomes[3], plain, atol=1e-3)
        np.testing.assert_array_equal(outcomes[4], plain)
        np.testing.assert_array_equal(outcomes[5], plain)


def test_wrong_adapters_are_refused_and_the_old_ones_stay(
    model: Model, tiny_llama: Path, tiny_models: dict[str, Path]
) -> None:
    with make(model) as context, Adapter(model, tiny_models["tiny-lora"]) as adapter, Model(tiny_llama) as twin:
        context.set_adapters({adapter: 0.5})
        with Adapter(twin, tiny_models["tiny-lora"]) as foreign:
            for wrong, error in (
                ({foreign: 1.0}, InvalidArgumentError),
                ([(adapter, 1.0), (adapter, 1.0)], InvalidArgumentError),
                ({adapter: float("nan")}, InvalidArgumentError),
                ({adapter: "1"}, TypeError),
                ({"a": 1.0}, TypeError),
                ([adapter], TypeError),
                (None, TypeError),
            ):
                with pytest.raises(error):
                    context.set_adapters(wrong)  # type: ignore[arg-type]
        assert context.adapters == ((adapter, 0.5),)


# Memory


def test_a_cut_sequence_goes_on_as_if_the_rest_had_never_been(context: Context) -> None:
    context.decode(PROMPT[:30])
    expected = last_logits(context, [7])
    assert context.seq_rm(0, 30)
    context.decode(PROMPT[50:60])
    assert context.seq_rm(0, 30, -1)
    assert context.seq_pos_max(0) == 29
    np.testing.assert_array_equal(last_logits(context, [7]), expected)


def test_a_recurrent_memory_says_that_it_cannot_be_cut(loaded: dict[str, Model]) -> None:
    for name in ("tiny-mamba", "tiny-hybrid"):
        with make(loaded[name]) as context:
            context.decode(PROMPT[:30])
            assert context.seq_rm(0, 10) is False
            assert context.seq_pos_max(0) == 29
            assert context.seq_rm(0) is True
            assert context.seq_pos_max(0) == -1


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_copied_sequence_goes_on_like_the_original(loaded: dict[str, Model], name: str) -> None:
    with make(loaded[name], n_seq_max=2) as context:
        context.decode(PROMPT[:40], seq_id=0)
        context.seq_cp(0, 1)
        assert (context.seq_pos_min(1), context.seq_pos_max(1)) == (context.seq_pos_min(0), 39)
        expected = last_logits(context, [9, 8], seq_id=0)
        np.testing.assert_array_equal(last_logits(context, [9, 8], seq_id=1), expected)
        context.seq_keep(1)
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (-1, 41)
        context.clear()
        assert context.seq_pos_max(1) == -1


def test_part_of_a_sequence_is_copied_only_within_one_stream(model: Model) -> None:
    with make(model, n_seq_max=2, kv_unified=True) as context:
        context.decode(PROMPT[:20])
        context.seq_cp(0, 1, 0, 10)
        assert context.seq_pos_max(1) == 9
    with make(model, n_seq_max=2) as context:
        context.decode(PROMPT[:20])
        with pytest.raises(UnsupportedFeatureError):
            context.seq_cp(0, 1, 0, 10)
        assert context.seq_pos_max(1) == -1


def test_positions_move_where_the_memory_can_shift(loaded: dict[str, Model]) -> None:
    with make(loaded["tiny-llama"]) as context:
        context.decode(PROMPT[:30])
        assert context.seq_rm(0, 5, 10)
        context.seq_add(0, 10, -1, -5)
        assert context.seq_pos_max(0) == 24
        context.decode([1])
    with make(loaded["tiny-llama"], type_k="q8_0") as context:
        context.decode(PROMPT[:30])
        with pytest.raises(UnsupportedFeatureError):
            context.seq_add(0, 10, -1, -5)
    with make(loaded["tiny-swa"]) as context:
        context.decode(PROMPT[:30])
        assert not context.can_shift
        with pytest.raises(UnsupportedFeatureError):
            context.seq_add(0, 10, -1, -5)
        context.decode([1])


def test_ranges_and_deltas_far_outside_are_refused(context: Context) -> None:
    context.decode([1, 2, 3])
    for far in (2**31, -(2**31) - 1, 2**64):
        for call in (
            lambda far=far: context.seq_rm(0, far),
            lambda far=far: context.seq_rm(0, 0, far),
            lambda far=far: context.seq_cp(0, 1, far, -1),
            lambda far=far: context.seq_add(0, 0, -1, far),
            lambda far=far: context.seq_add(0, far, -1, 1),
        ):
            with pytest.raises(OutOfRangeError):
                call()
    with pytest.raises(OutOfRangeError):
        context.seq_add(0, 0, -1, 2**31 - 1)
    assert context.seq_pos_max(0) == 2
    context.decode([1])


# State


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_restored_sequence_goes_on_as_the_saved_one(loaded: dict[str, Model], name: str) -> None:
    with make(loaded[name], n_seq_max=2) as context:
        context.decode(PROMPT[:70], seq_id=0)
        blob = context.seq_state_save(0)
        assert type(blob) is bytes
        assert len(blob) == context.seq_state_size(0)
        expected = last_logits(context, [3, 4], seq_id=0)
        for holder in (bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)):
            context.seq_state_load(1, holder(blob))
            assert context.seq_pos_max(1) == 69
            np.testing.assert_array_equal(last_logits(context, [3, 4], seq_id=1), expected)
    with make(loaded[name], n_seq_max=2) as other:
        other.seq_state_load(0, blob)
        np.testing.assert_array_equal(last_logits(other, [3, 4], seq_id=0), expected)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_restored_context_goes_on_as_the_saved_one(loaded: dict[str, Model], name: str) -> None:
    with make(loaded[name], n_seq_max=2) as context:
        context.decode(PROMPT[:40], seq_id=0)
        context.decode(PROMPT[40:60], seq_id=1)
        blob = context.state_save()
        assert len(blob) == context.state_size()
        expected = [last_logits(context, [3], seq_id=seq_id) for seq_id in (0, 1)]
        context.state_load(blob)
        with pytest.raises(OutOfRangeError):
            context.logits()
        # A windowed cache is laid out anew by a restore, and the layout decides the order of sums.
        tolerance = 0.01 if name == "tiny-swa" else 0
        for seq_id in (0, 1):
            got = last_logits(context, [3], seq_id=seq_id)
            np.testing.assert_allclose(got, expected[seq_id], atol=tolerance, rtol=0)


def test_a_partial_state_rolls_a_recurrent_memory_back(loaded: dict[str, Model]) -> None:
    """Oracle: the same continuation, taken before the memory went on."""
    with make(loaded["tiny-hybrid"]) as context:
        context.decode(PROMPT[:40])
        blob = context.seq_state_save(0, partial=True)
        assert len(blob) < context.seq_state_size(0)
        full = context.seq_state_save(0)
        expected = last_logits(context, [3, 4])
        context.decode(PROMPT[60:90])
        with pytest.raises(SnapshotMismatchError):
            context.seq_state_load(0, blob)  # it is no full state
        with pytest.raises(SnapshotMismatchError):
            context.seq_state_load(0, full, partial=True)
        context.seq_state_load(0, full)
        np.testing.assert_array_equal(last_logits(context, [3, 4]), expected)


def test_a_damaged_state_is_refused_and_nothing_changed(context: Context) -> None:
    expected = last_logits(context, PROMPT[:20])
    blob = context.seq_state_save(0)
    whole = context.state_save()
    damaged = [b"", b"x", b"\0" * 1000, blob[:-1], blob[1:], blob + b"x", blob[: len(blob) // 2]]
    for at in [*range(0, 160, 7), len(blob) // 2, len(blob) - 1]:
        flipped = bytearray(blob)
        flipped[at] ^= 0x10
        damaged.append(bytes(flipped))
    for bad in damaged:
        with pytest.raises((SnapshotCorruptError, SnapshotMismatchError)):
            context.seq_state_load(1, bad)
        with pytest.raises((SnapshotCorruptError, SnapshotMismatchError)):
            context.state_load(bad)
    with pytest.raises(SnapshotMismatchError) as caught:
        context.state_load(blob)
    assert caught.value.field
    with pytest.raises(SnapshotMismatchError):
        context.seq_state_load(0, whole)
    for wrong in ("text", 5, None, [1, 2]):
        with pytest.raises(TypeError):
            context.state_load(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        context.state_load(np.zeros((64, 64), np.uint8)[:, ::2])
    assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (19, -1)
    np.testing.assert_array_equal(context.logits()[0], expected)
    context.seq_state_load(1, blob)


def test_a_state_of_another_model_or_cache_is_a_mismatch_with_the_field(loaded: dict[str, Model]) -> None:
    with make(loaded["tiny-llama"]) as context:
        context.decode(PROMPT[:20])
        blob = context.seq_state_save(0)
    for name in ("tiny-swa", "tiny-mamba", "tiny-spm"):
        with make(loaded[name]) as other, pytest.raises(SnapshotMismatchError) as caught:
            other.seq_state_load(0, blob)
        assert caught.value.field
        assert caught.value.expected != caught.value.actual
    with make(loaded["tiny-llama"], type_k="q8_0", flash_attn="on") as other, pytest.raises(SnapshotMismatchError):
        other.seq_state_load(0, blob)


def test_a_state_that_does_not_fit_leaves_the_sequence_empty_and_says_so(model: Model) -> None:
    with make(model, n_ctx=1024) as large:
        large.decode([1] * 600)
        blob = large.seq_state_save(0)
    with make(model, n_ctx=256) as small:
        small.decode([1, 2, 3])
        with pytest.raises(LlamaCppShimError) as caught:
            small.seq_state_load(0, blob)
        assert not isinstance(caught.value, SnapshotCorruptError)
        small.clear()
        small.decode([1])


# Counters


def test_perf_counts_what_was_decoded_only_where_it_was_asked_for(model: Model) -> None:
    with make(model, perf=True) as context:
        context.decode(PROMPT)
        context.decode([1])
        context.decode([2])
        perf = context.perf()
        assert (perf["n_prefill"], perf["n_decode"]) == (len(PROMPT), 2)
        assert perf["prefill_ms"] > 0
        assert perf["decode_ms"] > 0
        context.reset_perf()
        assert context.perf()["n_decode"] == 0
    with make(model) as context:
        context.decode(PROMPT)
        assert set(context.perf().values()) == {0}


def test_memory_use_tells_the_weights_the_cache_and_the_rows(model: Model) -> None:
    with make(model, n_ctx=1024) as context:
        context.decode([1])
        use = context.memory_use()
        heads = int(model.metadata["llama.attention.head_count_kv"])
        width = model.n_embd // model.n_head * heads
        assert sum(entry["context"] for entry in use.values()) == 2 * 2 * width * 1024 * model.n_layer
        assert sum(entry["model"] for entry in use.values()) >= model.n_bytes * 0.9
        assert use["output"]["compute"] >= 2 * model.n_vocab * 4 or use["output"]["compute"] >= model.n_vocab * 4


# The GIL


def test_the_gil_is_free_during_a_decode_and_state_copies(run_child: RunChild) -> None:
    """Oracle: a thread that can only count while it has the GIL, and is never given it by a switch request."""
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=8192, n_threads=1)
        sys.setswitchinterval(1000)
        count, stop, started = 0, False, threading.Event()
        def tick():
            global count
            while not stop:
                count += 1
                started.set()
                time.sleep(0.0005)             # long enough for the other to take the GIL
        thread = threading.Thread(target=tick)
        thread.start()
        started.wait()
        for call in (lambda: context.decode(np.arange(4000) % 500, logits="none"), context.state_save,
                     lambda: context.state_load(blob), lambda: Model(TINY["tiny-llama"]).close()):
            before = count
            for _ in range(500):               # a call may be over before the other thread has woken
                result = call()
                if count > before:
                    break
            else:
                raise AssertionError(call)
            blob = result
        stop = True
        thread.join()
        """
    )
