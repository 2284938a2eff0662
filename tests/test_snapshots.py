"""Snapshots: what is restored goes on as what was saved; what is not whole, or not ours, is refused before its use."""

from __future__ import annotations

import json
import os
import pickle
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import RunChild
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import CUT, KINDS, N_CTX, N_UBATCH, TOLERANCE, UNIFIED, last_row, open_runtime, some_tokens

from llamacppshim import Model
from llamacppshim.checkpoints import Checkpoint
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import (
    ContextOverflowError,
    ManifestMismatchError,
    SessionUnavailableError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
)
from llamacppshim.manifest import ContextManifest, Identity, hash_bytes, hash_tokens
from llamacppshim.session import Session
from llamacppshim.snapshot import AnswerRecord, Contents, Snapshot

GOLDEN = Path(__file__).with_name("golden")
PREFIX = some_tokens(150)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SAMPLED = {"temperature": 1.0, "seed": 5, "top_k": 40, "penalty_repeat": 1.1, "penalty_last_n": 32}


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


def begun(session: Session, n_suffix: int = 40) -> None:
    session.ensure_prefix(PREFIX)
    session.prefill_suffix(some_tokens(n_suffix, seed=2))


# Going on.


@EVERY_KIND
@pytest.mark.parametrize("config", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n_suffix", [40, 300])
def test_a_restored_session_goes_on_as_the_saved_one(
    models: dict[str, Model], kind: str, config: dict[str, Any], n_suffix: int, tmp_path: Path
) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        begun(session, n_suffix)
        session.collect(max_tokens=7, ignore_eos=True, **config)
        saved = session.snapshot()
        saved.save(tmp_path / "s.lcs")
        expected = session.collect(max_tokens=40, ignore_eos=True, **config).tokens
        tokens = session.tokens
    with open_runtime(models, kind) as runtime:
        work = runtime.restore(Snapshot.load(tmp_path / "s.lcs"))
        report = work.explain()
        assert report.plan is not None
        assert (report.plan.source, report.plan.reuse_tokens) == ("snapshot", len(PREFIX) + n_suffix + 6)
        assert report.work.prefill_tokens == report.work.decode_tokens == 0
        assert work.collect(max_tokens=40, ignore_eos=True, **config).tokens == expected
        np.testing.assert_array_equal(work.tokens, tokens)
        assert work.explain().work.decode_tokens == 40
        work.close()


@EVERY_KIND
def test_a_restored_prompt_needs_no_token_to_be_decoded(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind, reuse="bitwise") as runtime, runtime.session() as session:
        begun(session)
        row = last_row(session)
        saved = Snapshot.from_bytes(session.snapshot().to_bytes())
        answer = session.collect(max_tokens=20, ignore_eos=True).tokens
    with open_runtime(models, kind, reuse="bitwise") as runtime:
        session = runtime.restore(saved)
        np.testing.assert_array_equal(last_row(session), row)
        assert session.explain().work.prefill_tokens == session.explain().work.decode_tokens == 0
        exact = session.explain().exact
        rows = []
        tokens = []
        for chunk in session.decode(max_tokens=20, ignore_eos=True):
            tokens += chunk.tokens
            rows.append(session.explain().resident_tokens)
        assert tuple(tokens) == answer
        assert exact == ("token" if "swa" in kind or kind in UNIFIED else "bitwise")
        # The next turn, from where the prompt was cut.
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(some_tokens(40, seed=2))
        if session.explain().exact == "bitwise":
            np.testing.assert_array_equal(last_row(session), row)
        else:
            np.testing.assert_allclose(last_row(session), row, atol=TOLERANCE)
        session.close()


@EVERY_KIND
def test_checkpoints_travel_along(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        begun(session, 300)
        saved = session.snapshot()
        edited = PREFIX.copy()
        edited[100] += 1
        expected = session.plan(edited)
    with open_runtime(models, kind) as runtime:
        session = runtime.restore(saved)
        plan = session.plan(edited)
        assert plan.first_difference == expected.first_difference
        if kind in CUT - {"swa-full"}:
            assert plan.reuse_tokens == expected.reuse_tokens == 100
        elif kind not in CUT:
            assert plan.reuse_tokens == expected.reuse_tokens == 64
        session.ensure_prefix(edited)
        session.prefill_suffix(some_tokens(9, seed=4))
        tokens = session.collect(max_tokens=10, ignore_eos=True).tokens
        session.close()
        with runtime.session() as cold:
            cold.ensure_prefix(edited)
            cold.prefill_suffix(some_tokens(9, seed=4))
            assert cold.collect(max_tokens=10, ignore_eos=True).tokens == tokens


def test_a_full_window_cache_does_not_trust_what_a_state_leaves_out(models: dict[str, Model]) -> None:
    with open_runtime(models, "swa-full") as runtime:
        with runtime.session() as session:
            session.ensure_prefix(some_tokens(400))
            saved = session.snapshot()
            assert session.plan(some_tokens(400)[:100]).reuse_tokens == 100
            session.restore(saved)
            plan = session.plan(some_tokens(400)[:100])
            assert plan.reuse_tokens < 100
            assert "the window of 32 needs positions from 69" in plan.reason
            session.ensure_prefix(some_tokens(400)[:100])
            tokens = session.collect(max_tokens=10, ignore_eos=True).tokens
        with runtime.session() as cold:
            cold.ensure_prefix(some_tokens(400)[:100])
            assert cold.collect(max_tokens=10, ignore_eos=True).tokens == tokens


@EVERY_KIND
@pytest.mark.parametrize("n", [1, N_UBATCH, N_CTX])
def test_one_token_and_a_full_context_are_kept_too(models: dict[str, Model], kind: str, n: int) -> None:
    with open_runtime(models, kind) as runtime:
        with runtime.session() as session:
            session.ensure_prefix(some_tokens(n))
            saved = Snapshot.from_bytes(session.snapshot().to_bytes())
            expected = session.collect(max_tokens=3, ignore_eos=True)
        session = runtime.restore(saved)
        assert session.collect(max_tokens=3, ignore_eos=True).tokens == expected.tokens
        session.close()


def test_what_was_still_to_be_read_is_still_to_be_read(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention", reuse="bitwise") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)  # its last piece waits
        saved = session.snapshot()
        assert saved.contents.n_resident == 128 and saved.n_tokens == 150
        session.ensure_prefix(some_tokens(10))
        session.restore(saved)
        assert session.explain().pending_tokens == 22
        session.prefill_suffix(some_tokens(5, seed=1))
        row = last_row(session)
        session.ensure_prefix(some_tokens(3))
        session.ensure_prefix(PREFIX)
        session.prefill_suffix(some_tokens(5, seed=1))
        np.testing.assert_array_equal(last_row(session), row)


def test_text_and_segments_come_back_and_the_seam_is_still_watched(models: dict[str, Model]) -> None:
    texts = ["The first part.\n", "The second says hello wor"]
    with open_runtime(models, "spm") as runtime, runtime.session() as session:
        status = session.ensure_prefix(texts)
        saved = Snapshot.from_bytes(session.snapshot().to_bytes())
        session.restore(saved)
        report = session.explain()
        assert report.manifest is not None and len(report.manifest.segments) == 2
        assert report.manifest.digest() == status.manifest_digest
        with pytest.raises(ValueError, match="reaches over the seam"):
            session.prefill_suffix("ld again")
        assert session.ensure_prefix(texts).reused_tokens == status.prefix_tokens


def test_an_incomplete_character_and_a_held_stop_text_come_back(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        grammar = 'root ::= "a日b##c日日 end"'
        whole = session.collect(grammar=grammar, stop="##x", max_tokens=40).text
        for n in range(1, 12):
            session.ensure_prefix(PREFIX)
            text = session.collect(grammar=grammar, stop="##x", max_tokens=n).text
            saved = Snapshot.from_bytes(session.snapshot().to_bytes())
            session.ensure_prefix([400])
            session.restore(saved)
            text += session.collect(grammar=grammar, stop="##x", max_tokens=40).text
            assert text == whole == "a日b##c日日 end"


def test_a_fresh_process_goes_on(models: dict[str, Model], tmp_path: Path, run_child: RunChild) -> None:
    with open_runtime(models, "hybrid") as runtime, runtime.session() as session:
        begun(session)
        session.collect(max_tokens=5, ignore_eos=True, **SAMPLED)
        session.snapshot().save(tmp_path / "s.lcs")
        expected = session.collect(max_tokens=60, ignore_eos=True, **SAMPLED).tokens
    child = run_child(
        f"values = json.loads('{json.dumps(SAMPLED)}')\n",
        f"small = dict(n_batch={N_UBATCH}, n_ubatch={N_UBATCH}, n_threads=1)\n",
        f"""
        with Runtime.open(TINY["tiny-hybrid"], n_ctx={N_CTX}, **small) as runtime:
            session = runtime.restore(Snapshot.load("s.lcs"))
            print(json.dumps(session.collect(max_tokens=60, ignore_eos=True, **values).tokens))
        """,
        stdout=None,
    )
    assert tuple(json.loads(child.stdout)) == expected


# Other contexts, other sequences.


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_a_larger_context_takes_it_and_a_smaller_one_if_it_fits(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        begun(session)
        saved = session.snapshot()
        expected = session.collect(max_tokens=20, ignore_eos=True).tokens
    for n_ctx in (1024, 256):
        with open_runtime(models, kind, n_ctx=n_ctx) as runtime:
            session = runtime.restore(saved)
            assert session.collect(max_tokens=20, ignore_eos=True).tokens == expected
            session.close()
    with open_runtime(models, kind, n_ctx=256) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX[:20])
        with open_runtime(models, kind) as other, other.session() as long:
            long.ensure_prefix(some_tokens(300))
            too_long = long.snapshot()
        with pytest.raises(ContextOverflowError) as caught:
            session.restore(too_long)
        assert (caught.value.stage, caught.value.additional_tokens, caught.value.num_ctx) == ("restore", 300, 256)
        np.testing.assert_array_equal(session.tokens, PREFIX[:20])


@pytest.mark.parametrize("kind", ["streams", "unified", "swa-streams", "swa-unified", "recurrent-3", "hybrid-3"])
def test_another_sequence_takes_it_beside_others(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as one, runtime.session() as other:
        begun(one)
        saved = one.snapshot()
        expected = one.collect(max_tokens=20, ignore_eos=True).tokens
        other.ensure_prefix(some_tokens(90, seed=8))
        tokens = other.collect(max_tokens=5, ignore_eos=True).tokens
        third = runtime.restore(saved)
        assert third.explain().seq_id not in (one.explain().seq_id, other.explain().seq_id)
        assert third.collect(max_tokens=20, ignore_eos=True).tokens == expected
        other.ensure_prefix(some_tokens(90, seed=8))
        assert other.collect(max_tokens=5, ignore_eos=True).tokens == tokens
        third.close()


def test_where_another_sequence_is_free_a_failure_changes_nothing_else_it_is_said(models: dict[str, Model]) -> None:
    for kind, n_free in (("streams", 2), ("attention", 0)):
        with open_runtime(models, kind) as runtime, runtime.session() as session:
            begun(session)
            saved = session.snapshot()
            damaged = bytearray(saved.state)
            damaged[len(damaged) // 2] ^= 1
            names = ("contents", "tokens", "text", "row", "checkpoints", "draws")
            values = {name: getattr(saved, name) for name in names}
            broken = Snapshot(state=bytes(damaged), **values)
            before = session.tokens
            with pytest.raises(SnapshotCorruptError) as caught:
                session.restore(broken)
            if n_free:
                np.testing.assert_array_equal(session.tokens, before)
                assert "emptied" not in str(caught.value)
            else:
                assert len(session.tokens) == 0
                assert "the session was emptied before, since no other sequence is free" in str(caught.value)
            session.restore(saved)
            assert session.collect(max_tokens=2, ignore_eos=True).tokens


def test_a_snapshot_needs_a_prefix_and_a_restore_a_sequence(models: dict[str, Model]) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        with pytest.raises(ManifestMismatchError, match="there is no prefix"):
            session.snapshot()
        session.ensure_prefix(PREFIX)
        saved = session.snapshot()
        with pytest.raises(SessionUnavailableError, match="a sequence is wanted, 0 of n_seq_max 1 are free"):
            runtime.restore(saved)


# Identity.


@pytest.mark.parametrize("field", [name for name in Identity.__struct_fields__ if name != "n_ctx"])
def test_every_field_changed_alone_is_refused_by_name(models: dict[str, Model], field: str) -> None:
    with open_runtime(models, "streams") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        saved = session.snapshot()
        before = session.explain()
        value = getattr(saved.manifest, field)
        changed: Any = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else None
        if isinstance(value, str):
            changed = value + "x"
        elif isinstance(value, tuple):
            changed = (("0" * 64, 1.0),)
        elif isinstance(value, dict):
            changed = {**value, "x": 1}
        manifest = msgspec.structs.replace(saved.manifest, **{field: changed})
        other = Snapshot(
            contents=msgspec.structs.replace(saved.contents, manifest=manifest),
            tokens=saved.tokens,
            state=saved.state,
            row=saved.row,
            checkpoints=saved.checkpoints,
        )
        with pytest.raises(SnapshotMismatchError) as caught:
            session.restore(Snapshot.from_bytes(other.to_bytes()))
        assert (caught.value.field, caught.value.expected, caught.value.actual) == (field, value, changed)
        assert session.explain() == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("attention", "unified")])
def test_a_snapshot_of_another_kind_is_refused(models: dict[str, Model], kind: str) -> None:
    with open_runtime(models, kind) as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        saved = session.snapshot()
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(PREFIX)
        with pytest.raises(SnapshotMismatchError):
            session.restore(saved)
        assert session.ensure_prefix(PREFIX).reused_tokens == len(PREFIX)


# The file.


def a_snapshot() -> Snapshot:
    """Made by hand: small, and every part is there."""
    tokens = np.arange(1, 11, dtype=np.int32)
    row = np.linspace(-1, 1, 16, dtype=np.float32)
    identity = {
        **{"backend_version": "pin+0123456789abcdef", "model_digest": "a" * 64, "tokenizer_digest": "b" * 64},
        **{"template_digest": "c" * 64, "runtime_digest": "d" * 64, "n_ctx": 512, "rope": {"rope_scaling": "model"}},
        **{"type_k": "f16", "type_v": "f16", "flash_attn": False, "swa_full": False, "kv_layout": "one stream"},
        **{"add_bos": True, "block_size": 32},
    }
    manifest = ContextManifest(
        **identity,
        stable_bytes=9,
        total_bytes=9,
        stable_byte_hash=hash_bytes(b"some text"),
        stable_token_hash=hash_tokens(tokens[:4]),
    )
    contents = Contents(
        manifest=manifest,
        **{"n_tokens": 10, "n_resident": 9, "n_prefix": 4, "n_prompt": 6, "n_bos": 1, "n_vocab": 16, "stage": "suffix"},
        **{"n_grid": 0, "whole": 6, "layout": True, "exact": "token", "has_text": True, "has_row": True},
        checkpoints=((4, True, True), (6, False, False)),
        answer=AnswerRecord(config=DecodeConfig(temperature=1.0, stop=("x",)), seed=7, begin=6, pending=b"\xe6"),
    )
    return Snapshot(
        contents=contents,
        tokens=tokens,
        state=bytes(range(256)) * 3,
        text=b"some text",
        row=row,
        checkpoints=(Checkpoint(4, b"four", True, row * 2), Checkpoint(6, b"sixes", False)),
        draws=b"draws",
    )


def same(a: Snapshot, b: Snapshot) -> bool:
    return (
        a.contents == b.contents
        and a.tokens.tolist() == b.tokens.tolist()
        and bytes(a.state) == bytes(b.state)
        and bytes(a.text or b"") == bytes(b.text or b"")
        and bytes(a.draws) == bytes(b.draws)
        and [(one.position, bytes(one.state), one.exact) for one in a.checkpoints]
        == [(one.position, bytes(one.state), one.exact) for one in b.checkpoints]
        and a.digest == b.digest
    )


def test_a_file_holds_the_value_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    made, path = a_snapshot(), tmp_path / "a.lcs"
    made.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == made.to_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["a.lcs"]
    loaded = Snapshot.load(path)
    assert same(loaded, made) and loaded.path == str(path)
    assert same(Snapshot.from_bytes(made.to_bytes()), made)
    assert same(pickle.loads(pickle.dumps(made)), made)
    assert Snapshot.read_contents(path) == made.contents
    np.testing.assert_array_equal(Snapshot.read_tokens(path), made.tokens)
    parts = (made.tokens.tobytes(), b"some text", made.state, bytes(128), b"foursixesdraws")
    assert made.nbytes == sum(map(len, parts))
    with pytest.raises(AttributeError):
        loaded.state = b""  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        loaded.tokens[0] = 5
    steps: list[tuple[int, int]] = []
    made.save(path, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (path.stat().st_size, path.stat().st_size)


def test_a_golden_file_of_version_1_stays_readable() -> None:
    golden = GOLDEN / "snapshot-1.lcs"
    assert same(Snapshot.load(golden), a_snapshot())
    assert golden.read_bytes() == a_snapshot().to_bytes()  # and is what is written


def test_another_version_is_refused_as_such() -> None:
    data = bytearray(a_snapshot().to_bytes())
    data[8] = 2
    with pytest.raises(SnapshotMismatchError) as caught:
        Snapshot.from_bytes(data)
    assert (caught.value.field, caught.value.expected, caught.value.actual) == ("version", 1, 2)


def test_every_byte_counts() -> None:
    data = a_snapshot().to_bytes()
    for at in range(len(data)):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(SnapshotError):
                Snapshot.from_bytes(damaged)
    for n in range(len(data)):
        with pytest.raises(SnapshotError):
            Snapshot.from_bytes(data[:n])
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(data + b"\0")


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 2**32 - 1))
def test_bytes_that_are_no_snapshot_are_refused(data: bytes, n_header: int) -> None:
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(data)
    begin = bytearray(a_snapshot().to_bytes()[:64])
    begin[12:16] = n_header.to_bytes(4, "little")
    with pytest.raises(SnapshotError):
        Snapshot.from_bytes(bytes(begin) + data)


def forged(change: Any) -> bytes:
    """A file whose checksums are right, and whose header was changed."""
    import xxhash

    data = a_snapshot().to_bytes()
    n = int.from_bytes(data[12:16], "little")
    header = json.loads(data[64 : 64 + n])
    change(header)
    encoded = json.dumps(header).encode()
    begin = -(-(64 + len(encoded)) // 64) * 64
    parts = data[-(-(64 + n) // 64) * 64 :]
    size = begin + len(parts)
    head = data[:12] + len(encoded).to_bytes(4, "little") + size.to_bytes(8, "little")
    head += xxhash.xxh3_64_intdigest(encoded).to_bytes(8, "little") + bytes(32)
    return head + encoded + bytes(begin - 64 - len(encoded)) + parts


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["contents"].update(n_tokens=11),
        lambda h: h["contents"].update(n_tokens=-1),
        lambda h: h["contents"].update(n_tokens=2**62),
        lambda h: h["contents"].update(n_prefix=7, n_prompt=6),
        lambda h: h["contents"].update(n_prefix=5),
        lambda h: h["contents"].update(n_resident=11),
        lambda h: h["contents"].update(n_resident=0),
        lambda h: h["contents"].update(n_grid=10),
        lambda h: h["contents"].update(whole=-2),
        lambda h: h["contents"].update(n_vocab=3),
        lambda h: h["contents"].update(n_vocab=0),
        lambda h: h["contents"].update(stage="other"),
        lambda h: h["contents"].update(unknown=1),
        lambda h: h["contents"].update(has_row=False),
        lambda h: h["contents"].update(has_text=False),
        lambda h: h["contents"].update(checkpoints=[[4, True, True], [4, False, False]]),
        lambda h: h["contents"].update(checkpoints=[[4, True, True], [10, False, False]]),
        lambda h: h["contents"].update(checkpoints=[[4, True, True]]),
        lambda h: h["contents"].update(checkpoints=[[4, True, False], [6, False, False]]),
        lambda h: h["contents"]["answer"].update(begin=11),
        lambda h: h["contents"]["answer"]["config"].update(temperature=-1.0),
        lambda h: h["contents"].update(answer=None),
        lambda h: h["contents"]["manifest"].update(n_ctx="x"),
        lambda h: h["parts"].pop(),
        lambda h: h["parts"][1].update(offset=0),
        lambda h: h["parts"][1].update(offset=-64),
        lambda h: h["parts"][1].update(nbytes=-1),
        lambda h: h["parts"][-1].update(nbytes=2**62),
        lambda h: h["parts"][1].update(name="state"),
        lambda h: h["parts"][0].update(name="other"),
        lambda h: h.update(parts=[]),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: Any, tmp_path: Path) -> None:
    assert same(Snapshot.from_bytes(forged(lambda h: None)), Snapshot.from_bytes(forged(lambda h: None)))
    path = tmp_path / "forged.lcs"
    path.write_bytes(forged(change))
    with pytest.raises(SnapshotCorruptError) as caught:
        Snapshot.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_real_state_with_a_bit_flipped_or_cut_is_never_loaded(models: dict[str, Model]) -> None:
    """The file's own checksums aside: the state's envelope refuses it before llama.cpp sees a byte."""
    draw = random.Random(1)
    for kind in ("attention", "swa", "recurrent", "hybrid"):
        with open_runtime(models, kind) as runtime, runtime.session() as session:
            session.ensure_prefix(PREFIX)
            saved = session.snapshot()
            expected = session.collect(max_tokens=4, ignore_eos=True).tokens
            values = {name: getattr(saved, name) for name in ("contents", "tokens", "row", "checkpoints")}
            for _ in range(60):
                damaged = bytearray(saved.state)
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
                for state in (bytes(damaged), saved.state[: draw.randrange(len(damaged))]):
                    with pytest.raises(SnapshotError):
                        session.restore(Snapshot(state=state, **values))
            session.restore(saved)
            assert session.collect(max_tokens=4, ignore_eos=True).tokens == expected


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    made = a_snapshot()
    for path, text in ((tmp_path / "missing.lcs", "No such file"), (tmp_path, "directory")):
        with pytest.raises(SnapshotError, match=text) as caught:
            Snapshot.load(path)
        assert caught.value.path == str(path)
    (tmp_path / "empty.lcs").touch()
    with pytest.raises(SnapshotCorruptError, match="the file is empty"):
        Snapshot.load(tmp_path / "empty.lcs")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotError, match="No such file"):
        made.save(tmp_path / "no folder" / "a.lcs")
    for target in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(SnapshotError, match="not a regular file"):
            made.save(target)
    with pytest.raises(SnapshotError, match="null"):
        made.save("a\0b")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.lcs", "pipe"]


def test_a_pipe_is_no_snapshot_and_does_not_hang(tmp_path: Path, run_child: RunChild) -> None:
    os.mkfifo(tmp_path / "pipe")
    run_child(
        """
        assert refusal(Snapshot.load, "pipe") == ("SnapshotError", "pipe: not a regular file")
        assert refusal(Snapshot.read_contents, "pipe") == ("SnapshotError", "pipe: not a regular file")
        """,
        timeout=20,
    )


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, run_child: RunChild) -> None:
    made = a_snapshot()
    made.save(tmp_path / "a.lcs")
    run_child(
        """
        import resource
        kept = Snapshot.load("a.lcs")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        assert refusal(kept.save, "a.lcs")[0] == "SnapshotError"
        assert refusal(kept.save, "b.lcs")[0] == "SnapshotError"
        assert os.listdir(".") == ["a.lcs"]
        assert Snapshot.load("a.lcs").digest == kept.digest
        """
    )
