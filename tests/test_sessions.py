"""Sessions against cold runs: what is kept, what is read, and that the answer is the same."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sessions import (
    CUT,
    KINDS,
    N_CTX,
    N_UBATCH,
    SEVERAL,
    TOLERANCE,
    UNIFIED,
    cold_row,
    cold_tokens,
    last_row,
    open_runtime,
    some_tokens,
)

from llamacppshim import Context, Model, Segment, Snapshot, assemble_context, collect_many
from llamacppshim.errors import (
    BusyError,
    ClosedError,
    ContextOverflowError,
    DecodeAbortedError,
    DecodeError,
    InvalidArgumentError,
    ManifestMismatchError,
    OutOfRangeError,
    SessionClosedError,
    SessionFatalError,
    SessionUnavailableError,
    TokenMismatchError,
    UnsupportedFeatureError,
)
from llamacppshim.manifest import Identity
from llamacppshim.runtime import Runtime

PREFIX = some_tokens(150)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


# Warm equals cold.


@EVERY_KIND
@pytest.mark.parametrize("n_suffix", [0, 1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 100])
def test_a_warm_answer_is_the_cold_one(models: dict[str, Model], kind: str, n_suffix: int) -> None:
    suffix = some_tokens(n_suffix, seed=2)
    with open_runtime(models, kind) as runtime:
        expected = cold_tokens(runtime, PREFIX, suffix, 32)
        with runtime.session() as session:
            session.ensure_prefix(PREFIX)
            session.prefill_suffix(some_tokens(300, seed=3))  # a window loses cells that the prefix needs
            session.collect(max_tokens=40, ignore_eos=True)
            work = session.explain().work.prefill_tokens
            status = session.ensure_prefix(PREFIX)
            assert status.reused_tokens == len(PREFIX)
            assert status.prefilled_tokens == 0
            assert status.plan.source == ("live" if kind in CUT else "checkpoint")
            after = session.prefill_suffix(suffix)
            assert session.explain().work.prefill_tokens - work == after.prefilled_tokens == n_suffix
            assert session.collect(max_tokens=32, ignore_eos=True).tokens == expected


@EVERY_KIND
@pytest.mark.parametrize("n_prefix", [1, N_UBATCH - 1, N_UBATCH, N_UBATCH + 1, 150])
@pytest.mark.parametrize("n_suffix", [0, 1, N_UBATCH - 1, N_UBATCH + 1])
def test_bitwise_reuse_gives_the_bits_of_a_cold_run(
    models: dict[str, Model], kind: str, n_prefix: int, n_suffix: int
) -> None:
    prefix, suffix = some_tokens(n_prefix), some_tokens(n_suffix, seed=2)
    with open_runtime(models, kind, reuse="bitwise") as runtime:
        expected = cold_row(runtime, prefix, suffix)
        answer = cold_tokens(runtime, prefix, suffix, 8)
        with runtime.session() as session:
            session.ensure_prefix(prefix)
            session.prefill_suffix(some_tokens(300, seed=3))
            session.collect(max_tokens=40, ignore_eos=True)
            plan = session.ensure_prefix(prefix).plan
            session.prefill_suffix(suffix)
            row = last_row(session)
            if session.explain().exact == "bitwise":
                np.testing.assert_array_equal(row, expected)
            else:  # cells that were placed anew, or shared with others
                assert "swa" in kind or "unified" in kind
                np.testing.assert_allclose(row, expected, atol=TOLERANCE)
            assert plan.reuse_tokens % N_UBATCH == 0 or plan.reuse_tokens == n_prefix
            assert session.collect(max_tokens=8, ignore_eos=True).tokens == answer


def test_what_is_called_exact_is_so_for_every_kind_that_can_be(models: dict[str, Model]) -> None:
    exact = {}
    for kind in KINDS:
        with open_runtime(models, kind, reuse="bitwise") as runtime, runtime.session() as session:
            session.ensure_prefix(PREFIX)
            session.prefill_suffix(some_tokens(5, seed=1))
            session.collect(max_tokens=5, ignore_eos=True)
            session.ensure_prefix(PREFIX)
            session.prefill_suffix(some_tokens(5, seed=2))
            exact[kind] = session.explain().exact
    windowed = {"swa", "swa-streams"}
    assert {kind for kind, value in exact.items() if value == "token"} == windowed | UNIFIED


@pytest.mark.parametrize("kind", ["swa", "swa-streams"])
def test_a_window_restored_from_a_checkpoint_gives_the_same_tokens(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, reuse="bitwise") as runtime, runtime.session() as session:
        expected = cold_tokens_in(runtime, 64) if runtime.n_sessions < runtime.config.n_seq_max else None
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(some_tokens(300, seed=3))
        status = session.ensure_prefix(PREFIX)
        assert (status.plan.source, status.plan.exact) == ("checkpoint", "token")
        session.prefill_suffix(some_tokens(9, seed=2))
        tokens = session.collect(max_tokens=64, ignore_eos=True).tokens
        assert len(tokens) == 64
        assert expected is None or tokens == expected


def cold_tokens_in(runtime: Runtime, n: int) -> tuple[int, ...]:
    return cold_tokens(runtime, PREFIX, some_tokens(9, seed=2), n)


# Edits.


@EVERY_KIND
@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 100, 149])
def test_an_edit_reuses_the_head_before_it(models: dict[str, Model], kind: str, place: int) -> None:
    edited = PREFIX.copy()
    edited[place] += 1
    suffix = some_tokens(7, seed=5)
    with open_runtime(models, kind) as runtime:
        expected = cold_tokens(runtime, edited, suffix, 8)
        with runtime.session() as session:
            session.ensure_prefix(PREFIX)
            plan = session.plan(edited)
            status = session.ensure_prefix(edited)
            assert plan == status.plan
            # Without a cut: the nearest checkpoint, of those at 64, 128 and the end. The windowed cache of a fresh
            # prefix still has all its cells.
            head = place if kind in CUT or "swa" in kind else place // 64 * 64
            assert status.reused_tokens == head
            assert status.prefilled_tokens == len(edited) - head
            assert status.plan.first_difference == (place, PREFIX[place], edited[place])
            assert f"token {place} is {PREFIX[place]}, wanted {edited[place]}" in status.plan.reason
            session.prefill_suffix(suffix)
            assert session.collect(max_tokens=8, ignore_eos=True).tokens == expected


def test_a_window_that_has_lost_its_cells_is_explained(models: dict[str, Model]) -> None:
    with open_runtime(models, "swa") as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(450))
        other = some_tokens(450)
        other[100] += 1
        status = session.ensure_prefix(other)
        assert status.plan.source == "checkpoint"
        assert status.reused_tokens == 64
        assert "the window of 32 needs positions from 69, it holds them from" in status.plan.reason
        assert "the nearest checkpoint is at 64" in status.plan.reason
        assert status.plan.reason in str(session.explain())


@EVERY_KIND
def test_without_checkpoints_what_cannot_be_cut_is_read_again(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, max_checkpoints=0) as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(450))
        status = session.ensure_prefix(some_tokens(450)[:100])
        assert status.reused_tokens == (100 if kind in CUT else 0)
        assert status.prefilled_tokens == (0 if kind in CUT else 100)
        assert session.explain().checkpoints == ()


def test_an_assembled_context_is_a_prefix_with_its_kinds(models: dict[str, Model]) -> None:
    segments = [Segment("user_turn", "Hi?"), Segment("pinned_file", "x = 1\n", "b.py"), Segment("system", "Be brief.")]
    assembled = assemble_context(segments)
    with open_runtime(models, "spm") as runtime, runtime.session() as session:
        status = session.ensure_prefix(assembled)
        manifest = session.explain().manifest
        assert manifest is not None
        assert [segment.kind for segment in manifest.segments] == ["system", "pinned_file"]
        assert status.stable_byte_hash == assembled.stable_byte_hash
        filled = assembled.tokenized(lambda texts: runtime.tokenizer.segments(texts, False)).records
        assert [(one.token_start + 1, one.token_end + 1) for one in filled[1:2]] == [
            (segment.token_start, segment.token_end) for segment in manifest.segments[1:]
        ]
        session.prefill_suffix(assembled.volatile_text)
        assert session.ensure_prefix(assemble_context(segments[::-1])).reused_tokens == status.prefix_tokens
        assert session.ensure_prefix(assemble_context([])).prefix_tokens == 1  # BOS alone


def test_segments_are_told_apart_and_keep_their_hashes(models: dict[str, Model]) -> None:
    texts = ["The first part.\n", "The second part.\n", "And a third.\n"]
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        first = session.ensure_prefix(texts)
        before = session.explain().manifest
        assert before is not None
        assert before.stable_bytes == sum(map(len, texts))
        assert first.stable_byte_hash == before.stable_byte_hash
        assert [segment.byte_start for segment in before.segments] == [0, 16, 33]
        assert before.segments[-1].token_end == first.prefix_tokens
        assert first.prefix_tokens == len(
            session.runtime.model.tokenize("".join(texts), add_special=True, parse_special=False)
        )
        second = session.ensure_prefix([texts[0], "Another second part.\n", texts[2]])
        after = session.explain().manifest
        assert after is not None
        assert second.reused_tokens == before.segments[1].token_start
        same = [a.byte_hash == b.byte_hash for a, b in zip(before.segments, after.segments, strict=True)]
        assert same == [True, False, True]
        assert second.manifest_digest != first.manifest_digest
        with pytest.raises(ManifestMismatchError, match="segments 0 and 1: a token reaches over") as caught:
            session.ensure_prefix(["Hello wor", "ld.\n"])
        assert caught.value.field == "segments[1].token_start"
        assert session.explain().manifest == after


# Identity.


@pytest.mark.parametrize("field", Identity.__struct_fields__)
def test_every_field_of_the_identity_changed_alone_is_a_miss_that_names_it(
    models: dict[str, Model], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        first = session.ensure_prefix(PREFIX)
        own = runtime.identity()
        changed = msgspec.structs.replace(own, **{field: another(getattr(own, field))})
        assert own.compatible(changed) == changed.compatible(own) == field
        assert own.compatible(own) is None
        monkeypatch.setattr(runtime, "identity", lambda: changed)
        with pytest.raises(ManifestMismatchError) as caught:
            session.prefill_suffix(some_tokens(3))
        assert caught.value.field == field
        assert field in session.plan(PREFIX).reason
        with pytest.raises(ManifestMismatchError):
            session.decode()
        second = session.ensure_prefix(PREFIX)
        assert (second.reused_tokens, second.dropped_tokens) == (0, len(PREFIX))
        assert second.prefilled_tokens == len(PREFIX)
        assert second.plan.source == "none"
        assert field in second.plan.reason
        assert second.manifest_digest != first.manifest_digest
        third = session.ensure_prefix(PREFIX)
        assert third.reused_tokens == len(PREFIX)


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return (("0" * 64, 1.0),) if isinstance(value, tuple) else {**value, "x": 1}


def test_adapters_change_the_identity_and_the_answer(models: dict[str, Model], tiny_models: dict[str, Path]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        plain = session.collect(max_tokens=20, ignore_eos=True).tokens
        runtime.set_adapters([(tiny_models["tiny-lora"], 2.0)])
        with pytest.raises(ManifestMismatchError, match="adapters"):
            session.decode(max_tokens=1)
        status = session.ensure_prefix(PREFIX)
        assert status.reused_tokens == 0 and "adapters" in status.plan.reason
        assert session.collect(max_tokens=20, ignore_eos=True).tokens != plain
        assert runtime.config.adapters[0].scale == 2.0
        runtime.set_adapters([])
        session.ensure_prefix(PREFIX)
        assert session.collect(max_tokens=20, ignore_eos=True).tokens == plain
        with pytest.raises(OSError, match="missing"):
            runtime.set_adapters(["missing.gguf"])
        assert session.ensure_prefix(PREFIX).reused_tokens == len(PREFIX)


def test_another_file_at_the_same_path_is_noticed(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_models["tiny-llama"].read_bytes())
    with open_runtime({"tiny-llama": path}, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        before = runtime.identity().model_digest
        other = tmp_path / "other.gguf"
        other.write_bytes(tiny_models["tiny-spm"].read_bytes())
        other.replace(path)
        assert runtime.identity().model_digest != before
        status = session.ensure_prefix(PREFIX)
        assert status.reused_tokens == 0
        assert "model_digest" in status.plan.reason
    with open_runtime({"tiny-llama": path}, "attention") as runtime:
        assert runtime.identity().model_digest == runtime.model.digest != before


# The suffix, and the seam.


def test_a_suffix_needs_its_prefix(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        with pytest.raises(ManifestMismatchError, match="call ensure_prefix first"):
            session.prefill_suffix("hello")
        status = session.ensure_prefix("A prefix.\n")
        with pytest.raises(ManifestMismatchError) as caught:
            session.prefill_suffix("hello", manifest_digest="0" * 64)
        assert (caught.value.field, caught.value.actual) == ("manifest_digest", status.manifest_digest)
        first = session.prefill_suffix("hello", manifest_digest=status.manifest_digest)
        assert first.manifest_digest == status.manifest_digest
        with pytest.raises(ManifestMismatchError, match="already has a suffix"):
            session.prefill_suffix("again")
        session.collect(max_tokens=3, ignore_eos=True)
        n = len(session.tokens)
        more = session.prefill_suffix(" and more", append=True)
        assert more.resident_tokens == n + more.suffix_tokens
        assert session.collect(max_tokens=3, ignore_eos=True).tokens
        session.ensure_prefix("A prefix.\n")
        session.collect(max_tokens=1, ignore_eos=True)
        with pytest.raises(ManifestMismatchError, match="already has a suffix"):
            session.prefill_suffix("after an answer")


@pytest.mark.parametrize("kind", ["attention", "spm", "recurrent"])
def test_a_merge_over_the_seam_is_refused_or_read_again(models: dict[str, Model], kind: str) -> None:
    head, tail = "We say hello wor", "ld again"
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        session.ensure_prefix(head)
        before = session.explain()
        with pytest.raises(TokenMismatchError, match="reaches over the seam"):
            session.prefill_suffix(tail)
        assert session.explain() == before
    with open_runtime(models, kind, seam="reread") as runtime, runtime.session() as session:
        whole = runtime.model.tokenize(head + tail, add_special=True, parse_special=False)
        session.ensure_prefix(head)
        status = session.prefill_suffix(tail)
        assert status.reread_tokens >= 1
        np.testing.assert_array_equal(session.tokens, whole)
        assert status.suffix_tokens == len(whole) - status.prefix_tokens
        answer = session.collect(max_tokens=10, ignore_eos=True).tokens
        session.ensure_prefix(whole)
        assert session.collect(max_tokens=10, ignore_eos=True).tokens == answer


def test_there_is_one_bos_and_it_is_first(models: dict[str, Model]) -> None:
    with open_runtime(models, "spm") as runtime, runtime.session() as session:
        model = runtime.model
        bos = model.bos
        text = model.token_piece(bos).decode()
        for prompt, special in (("hi\n", False), (text + "hi\n", True), ("", False)):
            session.ensure_prefix(prompt, parse_special=special)
            assert list(session.tokens).count(bos) == 1 and session.tokens[0] == bos
        session.ensure_prefix(text + "hi\n")  # as text it is no BOS
        assert list(session.tokens).count(bos) == 1 and len(session.tokens) > 3
        session.prefill_suffix("more")
        assert list(session.tokens).count(bos) == 1
        session.ensure_prefix([5, 6, 7])  # tokens are taken as they are
        assert list(session.tokens) == [5, 6, 7]


def test_special_tokens_inside_a_text_stay_text(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        end = runtime.model.eos
        text = "a" + runtime.model.token_piece(end).decode() + "b"
        session.ensure_prefix(text)
        assert end not in session.tokens
        session.ensure_prefix(text, parse_special=True)
        assert end in session.tokens


# The edges of the context.


@EVERY_KIND
def test_a_context_is_filled_to_its_last_cell_and_not_beyond(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        full = some_tokens(N_CTX)
        assert runtime.n_ctx_seq == (3 * N_CTX if kind in UNIFIED else N_CTX)
        full = some_tokens(runtime.n_ctx_seq)
        status = session.ensure_prefix(full)
        assert (status.available_tokens, status.resident_tokens) == (0, len(full))
        with pytest.raises(ContextOverflowError) as caught:
            session.prefill_suffix([400])
        error = caught.value
        assert (error.stage, error.resident_tokens, error.additional_tokens) == ("suffix", len(full), 1)
        assert error.num_ctx == runtime.n_ctx_seq
        row = last_row(session)
        answer = session.collect(ignore_eos=True)
        assert (answer.finish_reason, len(answer.tokens)) == ("context_full", 1)
        assert answer.tokens[0] == row.argmax()
        assert session.collect(ignore_eos=True).finish_reason == "context_full"
        with pytest.raises(ContextOverflowError) as caught:
            session.ensure_prefix([*full, 400])
        error = caught.value
        assert (error.stage, error.resident_tokens, error.additional_tokens) == ("prefix", len(full), 1)
        status = session.ensure_prefix(full[:-1])
        assert status.reused_tokens + status.prefilled_tokens == len(full) - 1
        assert session.collect(max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_a_prefix_longer_than_the_context_changes_nothing(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        before = session.explain()
        long = np.concatenate([PREFIX[:100], some_tokens(N_CTX, seed=9)])
        with pytest.raises(ContextOverflowError) as caught:
            session.ensure_prefix(long)
        error = caught.value
        assert (error.resident_tokens, error.additional_tokens) == (100, N_CTX)
        assert session.explain() == before
        assert session.ensure_prefix(PREFIX).reused_tokens == len(PREFIX)


def test_an_empty_session_has_nothing_to_go_on_from(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        with pytest.raises(InvalidArgumentError, match="holds no token"):
            session.decode()
        assert session.ensure_prefix("").prefix_tokens == 0
        with pytest.raises(InvalidArgumentError, match="holds no token"):
            session.prefill_suffix("")
        session.prefill_suffix("x")
        assert session.collect(max_tokens=1).tokens


@EVERY_KIND
def test_one_token_is_enough(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        session.ensure_prefix([400])
        first = session.collect(max_tokens=5, ignore_eos=True).tokens
        assert session.ensure_prefix([400]).reused_tokens == 1
        assert session.collect(max_tokens=5, ignore_eos=True).tokens == first


# Generating.


def test_chunks_make_the_whole_and_end_with_a_reason(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        chunks = list(session.decode(max_tokens=12, ignore_eos=True))
        assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
        session.ensure_prefix(PREFIX)
        whole = session.collect(max_tokens=12, ignore_eos=True)
        assert whole.tokens == tuple(token for chunk in chunks for token in chunk.tokens)
        assert whole.text == "".join(chunk.text for chunk in chunks)
        assert 0 < whole.ttft_ms <= whole.seconds * 1e3
        assert session.collect(max_tokens=0).tokens == ()
        np.testing.assert_array_equal(session.tokens[len(PREFIX) :], whole.tokens)


@pytest.mark.parametrize(
    "config", [{}, {"temperature": 1.0, "seed": 3, "top_k": 50, "penalty_repeat": 1.1, "penalty_last_n": 64}]
)
@EVERY_KIND
def test_an_answer_in_pieces_is_the_answer(models: dict[str, Model], kind: str, config: dict[str, Any]) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        whole = session.collect(max_tokens=24, ignore_eos=True, **config).tokens
        session.ensure_prefix(PREFIX)
        pieces: list[int] = []
        pieces += session.collect(max_tokens=5, ignore_eos=True, **config).tokens
        for chunk in session.decode(max_tokens=50, ignore_eos=True, **config):
            pieces += chunk.tokens
            if len(pieces) == 11:
                break  # leaving the loop
        pieces += session.collect(max_tokens=13, ignore_eos=True, **config).tokens
        assert tuple(pieces) == whole


def test_an_old_loop_ends_when_the_session_has_moved_on(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        old = session.decode(ignore_eos=True)
        next(old)
        session.ensure_prefix(PREFIX)
        assert [chunk.finish_reason for chunk in old] == ["cancelled"]
        assert len(session.tokens) == len(PREFIX)


def test_a_stop_text_ends_the_answer_and_is_not_in_it(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        plain = session.collect(max_tokens=20, ignore_eos=True)
        stop = plain.text[8:13]
        session.ensure_prefix(PREFIX)
        answer = session.collect(max_tokens=20, ignore_eos=True, stop=stop)
        assert answer.finish_reason == "stop"
        assert answer.text == plain.text[: plain.text.index(stop)]
        assert answer.tokens == plain.tokens[: len(answer.tokens)]


def test_logprobs_are_those_of_the_row(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        row = last_row(session).astype(np.float64)
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        answer = session.collect(max_tokens=3, logprobs=4, ignore_eos=True)
        assert len(answer.logprobs) == len(answer.tokens) == 3
        first = answer.logprobs[0]
        assert first.token == answer.tokens[0] == expected.argmax()
        assert first.logprob == pytest.approx(expected.max())
        assert [one.token for one in first.top] == list(np.argsort(-expected, kind="stable")[:4])
        assert first.piece == runtime.model.token_piece(first.token)
        assert all(one.top[0].token == one.token for one in answer.logprobs)
        assert session.collect(max_tokens=1, logprobs=0, ignore_eos=True).logprobs[0].top == ()


def test_a_grammar_holds_over_pieces(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        grammar = 'root ::= "yes, " [a-z]{3} "."'
        text = session.collect(max_tokens=2, grammar=grammar).text
        answer = session.collect(max_tokens=40, grammar=grammar)
        text += answer.text
        assert answer.finish_reason == "stop"
        assert text.startswith("yes, ") and text.endswith(".") and len(text) == 9


@EVERY_KIND
def test_a_wrong_sampling_value_changes_nothing(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        for values in ({"temperature": -1.0}, {"max_tokens": -1}, {"logit_bias": {10**9: 1.0}}, {"nonsense": 1}):
            with pytest.raises((InvalidArgumentError, OutOfRangeError)):
                session.decode(**values)
        assert session.collect(max_tokens=2, ignore_eos=True).tokens


# Cancelling.


@EVERY_KIND
@pytest.mark.parametrize("reuse", ["token", "bitwise"])
def test_a_prefill_that_is_cancelled_goes_on_as_if_it_had_not_been(
    models: dict[str, Model], kind: str, reuse: str
) -> None:
    prefix, suffix = some_tokens(150), some_tokens(75, seed=4)
    with open_runtime(models, kind, reuse=reuse) as runtime:
        expected = cold_tokens(runtime, prefix, suffix, 8)
        row = cold_row(runtime, prefix, suffix)
        with runtime.session() as session:
            n_cancels = 0

            def cancel_here(done: int, total: int) -> None:
                session.cancel()

            for _ in range(20):
                before = len(session.sequence)
                try:
                    session.ensure_prefix(prefix, progress=cancel_here)
                    break
                except DecodeAbortedError as error:
                    assert "it was cancelled" in str(error)
                    n_cancels += 1
                    held = session.explain().resident_tokens
                    assert held > before
                    np.testing.assert_array_equal(session.tokens, prefix[:held])
                    with pytest.raises(ManifestMismatchError):
                        session.prefill_suffix(suffix)
            assert n_cancels == (4 if reuse == "token" else 3)  # bitwise, the last piece is read with the suffix
            with pytest.raises(DecodeAbortedError):
                session.ensure_prefix(prefix)  # the cancel after the last piece was for this call
            session.ensure_prefix(prefix)
            for _ in range(20):
                try:
                    session.prefill_suffix(suffix, progress=cancel_here)
                    break
                except DecodeAbortedError:
                    n_cancels += 1
                    np.testing.assert_array_equal(session.tokens, prefix)
            assert n_cancels >= 6
            work = session.explain().work
            # Nothing was read twice, but what a memory that cannot be cut has to.
            assert work.prefill_tokens == len(prefix) + len(suffix)
            cancelled = session.collect(max_tokens=8, ignore_eos=True)  # by the cancel after the last piece
            assert (cancelled.finish_reason, cancelled.tokens) == ("cancelled", ())
            if session.explain().exact == "bitwise":
                np.testing.assert_array_equal(last_row(session), row)
            assert session.collect(max_tokens=8, ignore_eos=True).tokens == expected


@EVERY_KIND
@pytest.mark.parametrize("reuse", ["token", "bitwise"])
def test_a_failure_inside_a_graph_loses_nothing(models: dict[str, Model], kind: str, reuse: str) -> None:
    """The graph stops at a node with an injected status: on recurrent memories nothing it touched can be trusted."""
    from llamacppshim import _native

    prefix, suffix = some_tokens(150), some_tokens(40, seed=4)
    with open_runtime(models, kind, reuse=reuse) as runtime:
        expected = cold_tokens(runtime, prefix, suffix, 12)
        with runtime.session() as session:
            for status in (2, -2, -3):
                session.ensure_prefix(prefix[:70])
                _native._fault_arm_decode(status, 40)
                with pytest.raises(DecodeError) as caught:
                    session.ensure_prefix(prefix)
                assert caught.value.raw_status == status
                held = session.explain()
                assert held.state == "open"
                np.testing.assert_array_equal(session.tokens, prefix[: held.resident_tokens])
                session.ensure_prefix(prefix)
                _native._fault_arm_decode(status, 60)
                with pytest.raises(DecodeError):
                    session.prefill_suffix(suffix)
                np.testing.assert_array_equal(session.tokens, prefix)
                session.prefill_suffix(suffix)
                tokens = list(session.collect(max_tokens=4, ignore_eos=True).tokens)
                _native._fault_arm_decode(status, 30)
                try:
                    for chunk in session.decode(max_tokens=8, ignore_eos=True):
                        tokens += chunk.tokens
                except DecodeError as error:
                    assert error.raw_status == status
                tokens += session.collect(max_tokens=12 - len(tokens), ignore_eos=True).tokens
                assert tuple(tokens) == expected


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_failure_in_one_session_is_not_seen_in_another(models: dict[str, Model], kind: str) -> None:
    from llamacppshim import _native

    with open_runtime(models, kind) as runtime:
        expected = cold_tokens(runtime, PREFIX, some_tokens(9, seed=1), 20)
        with runtime.session() as one, runtime.session() as other:
            one.ensure_prefix(PREFIX)
            one.prefill_suffix(some_tokens(9, seed=1))
            tokens = list(one.collect(max_tokens=6, ignore_eos=True).tokens)
            other.ensure_prefix(some_tokens(64, seed=7))
            _native._fault_arm_decode(-3, 50)
            with pytest.raises(DecodeError):
                other.ensure_prefix(some_tokens(200, seed=7))
            tokens += one.collect(max_tokens=14, ignore_eos=True).tokens
            assert tuple(tokens) == expected
            other.ensure_prefix(some_tokens(200, seed=7))
            assert other.collect(max_tokens=2, ignore_eos=True).tokens


def test_a_context_that_is_beyond_repair_is_replaced(models: dict[str, Model]) -> None:
    from llamacppshim import _native

    with open_runtime(models, "streams") as runtime:
        expected = cold_tokens(runtime, PREFIX, some_tokens(9, seed=1), 20)
        with runtime.session() as one, runtime.session() as other:
            one.ensure_prefix(PREFIX)
            one.prefill_suffix(some_tokens(9, seed=1))
            tokens = list(one.collect(max_tokens=6, ignore_eos=True).tokens)
            other.ensure_prefix(PREFIX)
            _native._fault_arm_decode(-77, 50)
            with pytest.raises(DecodeError) as caught:
                other.prefill_suffix(some_tokens(20))
            assert caught.value.raw_status == -77
            for call in (lambda: other.ensure_prefix(PREFIX), lambda: other.prefill_suffix("x"), other.decode):
                with pytest.raises(SessionFatalError) as fatal:
                    call()
                assert fatal.value.cause is caught.value
            report = other.explain()
            assert report.state == "fatal" and report.cause and "fatal" in str(report)
            tokens += one.collect(max_tokens=14, ignore_eos=True).tokens
            assert tuple(tokens) == expected
            with runtime.session() as third, runtime.session() as fourth:  # the sequence was released
                third.ensure_prefix(PREFIX)
                fourth.ensure_prefix(PREFIX)


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_a_cancel_from_another_thread_ends_an_answer(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, n_ctx=4096) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        whole = session.collect(max_tokens=30, ignore_eos=True).tokens
        session.ensure_prefix(PREFIX)
        tokens: list[int] = []
        reasons = []
        for chunk in session.decode(max_tokens=3000, ignore_eos=True):
            tokens += chunk.tokens
            reasons.append(chunk.finish_reason)
            if len(tokens) == 10 and chunk.tokens:
                thread = threading.Thread(target=session.cancel)
                thread.start()
                thread.join()
        assert reasons[-1] == "cancelled" and len(tokens) < 3000
        tokens += session.collect(max_tokens=max(0, 30 - len(tokens)), ignore_eos=True).tokens
        assert tuple(tokens[:30]) == whole


def test_a_deadline_ends_prefills_and_answers(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", n_ctx=8192) as runtime, runtime.session() as session:
        with pytest.raises(DecodeAbortedError, match="timeout_s 0 has passed"):
            session.ensure_prefix(some_tokens(8000), timeout_s=0.0)
        with pytest.raises(DecodeAbortedError, match=r"timeout_s 0\.02 has passed"):
            session.ensure_prefix(some_tokens(8000), timeout_s=0.02)
        session.ensure_prefix(PREFIX)
        began = time.monotonic()
        answer = session.collect(timeout_s=0.05, ignore_eos=True)
        assert answer.finish_reason == "cancelled"
        assert time.monotonic() - began < 10
        assert session.collect(max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_an_asynchronous_answer_and_its_cancelling(models: dict[str, Model]) -> None:
    async def ask(session: Any) -> tuple[int, ...]:
        return tuple(
            [token async for chunk in session.adecode(max_tokens=12, ignore_eos=True) for token in chunk.tokens]
        )

    async def cancelled(session: Any) -> list[Any]:
        chunks: list[Any] = []

        async def run() -> None:
            async for chunk in session.adecode(ignore_eos=True):
                chunks.append(chunk)

        task = asyncio.create_task(run())
        while len(chunks) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return chunks

    with open_runtime(models, "attention", n_ctx=8192) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        whole = session.collect(max_tokens=12, ignore_eos=True).tokens
        session.ensure_prefix(PREFIX)
        assert asyncio.run(ask(session)) == whole
        for rest_of in ("collect", "collect_many", "restore"):
            for _ in range(5):
                session.ensure_prefix(PREFIX)
                chunks = asyncio.run(cancelled(session))
                tokens = [token for chunk in chunks for token in chunk.tokens]
                assert len(tokens) < 8000
                n = max(1, 12 - len(tokens))
                if rest_of == "collect":
                    rest = session.collect(max_tokens=n, ignore_eos=True)
                elif rest_of == "collect_many":
                    (rest,) = collect_many([session], max_tokens=n, ignore_eos=True)
                else:
                    session.restore(Snapshot.from_bytes(session.snapshot().to_bytes()))
                    rest = session.collect(max_tokens=n, ignore_eos=True)
                # What was chosen while the task was cancelled has reached nobody yet: it comes now.
                assert rest.finish_reason == "length" and len(rest.tokens) == n
                assert (*tokens, *rest.tokens)[:12] == whole
                np.testing.assert_array_equal(session.tokens[len(PREFIX) :], [*tokens, *rest.tokens])
                text = runtime.model.detokenize(session.tokens[len(PREFIX) :]).decode("utf-8", "replace")
                assert "".join(chunk.text for chunk in chunks) + rest.text == text


# Several sessions.


@pytest.mark.parametrize("kind", SEVERAL)
def test_sessions_step_by_turns_without_mixing_their_logits(models: dict[str, Model], kind: str) -> None:
    prompts = [some_tokens(40 + 17 * i, seed=i) for i in range(3)]
    with open_runtime(models, kind) as runtime:
        alone = [cold_tokens(runtime, prompt, [], 12) for prompt in prompts]
        sessions = [runtime.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.ensure_prefix(prompt)
        loops = [session.decode(max_tokens=12, ignore_eos=True) for session in sessions]
        found: list[list[int]] = [[], [], []]
        for _ in range(12):
            for i, loop in enumerate(loops):
                found[i] += next(loop).tokens
        assert [tuple(tokens) for tokens in found] == alone
        with pytest.raises(SessionUnavailableError, match="n_seq_max 3"):
            runtime.session()
        for session in sessions:
            session.close()
        with runtime.session() as again:
            assert again.ensure_prefix(prompts[0]).reused_tokens == 0


@pytest.mark.parametrize("kind", SEVERAL)
def test_sessions_of_several_threads_share_the_context(models: dict[str, Model], kind: str) -> None:
    prompts = [some_tokens(60 + i, seed=i) for i in range(3)]
    with open_runtime(models, kind) as runtime:
        alone = [cold_tokens(runtime, prompt, [], 20) for prompt in prompts]
        found: dict[int, tuple[int, ...]] = {}

        def work(i: int) -> None:
            with runtime.session() as session:
                for _ in range(3):
                    session.ensure_prefix(prompts[i])
                    found[i] = session.collect(max_tokens=20, ignore_eos=True).tokens

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(3)] == alone


def test_full_cells_are_one_sessions_error_and_not_the_others(models: dict[str, Model]) -> None:
    with open_runtime(models, "unified", n_ctx=N_CTX) as runtime, runtime.session() as one, runtime.session() as other:
        one.ensure_prefix(some_tokens(400))
        kept = one.collect(max_tokens=4, ignore_eos=True).tokens
        status = other.ensure_prefix(some_tokens(60, seed=5))
        assert status.available_tokens == N_CTX - 60 - 403
        with pytest.raises(ContextOverflowError) as caught:
            other.ensure_prefix(some_tokens(200, seed=5))
        error = caught.value
        assert error.stage == "prefix" and error.num_ctx == N_CTX
        assert error.resident_tokens == 403 + other.explain().resident_tokens
        assert error.resident_tokens + error.additional_tokens > N_CTX
        one.ensure_prefix(some_tokens(400))
        assert one.collect(max_tokens=4, ignore_eos=True).tokens == kept
        one.close()
        assert other.ensure_prefix(some_tokens(200, seed=5)).prefix_tokens == 200


# Life.


def test_one_thread_at_a_time(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", n_ctx=8192) as runtime, runtime.session() as session:
        seen = []

        def inside(done: int, total: int) -> None:
            with pytest.raises(BusyError, match="this thread is inside this session"):
                session.ensure_prefix(PREFIX)
            with pytest.raises(BusyError, match="from inside"):
                session.close()
            seen.append(session.explain().resident_tokens)

        session.ensure_prefix(PREFIX, progress=inside)
        assert seen == [32, 64, 96, 128, 150]


def test_closing_is_final_and_may_come_from_another_thread(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", n_ctx=8192) as runtime:
        session = runtime.session()
        session.ensure_prefix(PREFIX)
        started = threading.Event()
        reasons: list[str | None] = []

        def generate() -> None:
            try:
                for chunk in session.decode(ignore_eos=True):
                    reasons.append(chunk.finish_reason)
                    started.set()
            except SessionClosedError:
                reasons.append("closed")

        thread = threading.Thread(target=generate)
        thread.start()
        started.wait()
        session.close()
        session.close()
        thread.join()
        assert reasons[-1] in ("cancelled", "closed")
        for call in (lambda: session.ensure_prefix(PREFIX), lambda: session.prefill_suffix("x"), session.decode):
            with pytest.raises(SessionClosedError):
                call()
        report = session.explain()
        assert (report.state, report.resident_tokens) == ("closed", 0)
        assert report.work.prefill_tokens == len(PREFIX)
        assert str(report).startswith("session    closed")
    with pytest.raises(ClosedError):
        runtime.session()
    runtime.close()
    assert repr(runtime) == "<Runtime closed>"


def test_a_runtime_closes_its_sessions_and_only_its_own_model(models: dict[str, Model]) -> None:
    runtime = open_runtime(models, "attention")
    session = runtime.session()
    session.ensure_prefix(PREFIX)
    runtime.close()
    assert session.closed and not runtime.model.closed


def test_a_session_that_is_dropped_gives_its_sequence_back(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime:
        session = runtime.session()
        session.ensure_prefix(PREFIX)
        with pytest.warns(ResourceWarning, match="a session was not closed"):
            del session
        with runtime.session() as other:
            assert other.ensure_prefix(PREFIX).reused_tokens == 0


def test_models_that_generate_nothing_are_refused(models: dict[str, Model]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="embeddings, not text"):
        Runtime.open(models["tiny-bert"])


def test_a_prompt_of_no_known_kind_is_refused(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        for prompt in (5, None, 1.5, {"a": 1}, [1.5], ["a", 1], [[1]], np.array([0.5]), np.array([[1]])):
            with pytest.raises(TypeError):
                session.ensure_prefix(prompt)  # type: ignore[arg-type]
        for prompt in ([-1], [2**31], [10**6], np.array([2**40])):
            with pytest.raises((InvalidArgumentError, OutOfRangeError)):
                session.ensure_prefix(prompt)
        with pytest.raises(InvalidArgumentError, match="lone surrogate at index 1"):
            session.ensure_prefix("a\ud800")
        assert len(session.tokens) == len(PREFIX)


# What the bare handles get wrong in silence, and sessions do not.


def test_a_window_cut_below_its_cells_is_wrong_on_the_handles_and_right_in_a_session(models: dict[str, Model]) -> None:
    prompt, suffix = some_tokens(450), some_tokens(9, seed=1)
    small = {"n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    with Context(models["tiny-swa"], **small) as context:
        context.decode(prompt[:100])
        context.decode(suffix)
        right = context.logits()[0]
        context.clear()
        context.decode(prompt)
        assert context.seq_rm(0, 100, -1)  # said to be done
        context.decode(suffix, pos=100)  # said to be fine
        wrong = context.logits()[0]
    assert np.abs(wrong - right).max() > 4 * TOLERANCE
    with open_runtime(models, "swa") as runtime, runtime.session() as session:
        session.ensure_prefix(prompt)
        session.ensure_prefix(prompt[:100])
        session.prefill_suffix(suffix)
        np.testing.assert_allclose(last_row(session), right, atol=TOLERANCE)


def test_a_hybrid_counts_tokens_that_were_never_computed_and_a_session_does_not(models: dict[str, Model]) -> None:
    from llamacppshim import _native

    prompt, suffix = some_tokens(150), some_tokens(9, seed=1)
    small = {"n_ctx": N_CTX, "n_batch": 128, "n_ubatch": N_UBATCH, "n_threads": 1}
    with Context(models["tiny-hybrid"], **small) as context:
        context.decode(prompt)
        context.decode(suffix)
        right = context.logits()[0]
        context.clear()
        context.decode(prompt[:64])
        _native._fault_arm_decode(2, 20)
        with pytest.raises(DecodeAbortedError) as caught:
            context.decode(prompt[64:])
        assert caught.value.dirty == {0}
        reached = context.seq_pos_max(0) + 1
        assert reached > 64 + caught.value.committed  # it counts what was not computed
        context.decode(prompt[reached:], pos=reached)
        context.decode(suffix)
        wrong = context.logits()[0]
    assert np.abs(wrong - right).max() > 4 * TOLERANCE
    with open_runtime(models, "hybrid") as runtime, runtime.session() as session:
        session.ensure_prefix(prompt[:64])
        _native._fault_arm_decode(2, 20)
        with pytest.raises(DecodeAbortedError):
            session.ensure_prefix(prompt)
        assert session.explain().resident_tokens == 64
        assert session.plan(prompt).source == "checkpoint"
        session.ensure_prefix(prompt)
        session.prefill_suffix(suffix)
        np.testing.assert_allclose(last_row(session), right, atol=TOLERANCE)
