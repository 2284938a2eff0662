"""A store: the longest beginning is found, the budget holds, and neither crashes nor others break it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import RunChild
from sessions import open_runtime, some_tokens
from test_snapshots import a_snapshot

from llamacppshim import Model
from llamacppshim.errors import InvalidArgumentError, SnapshotCorruptError, SnapshotError
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import Identity, hash_tokens
from llamacppshim.snapshot import Snapshot
from llamacppshim.store import BLOCK_TOKENS, SnapshotStore

HERE = Path(__file__).parent


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    return loaded


def holding(tokens: Tokens, *, n_bytes: int = 100, **identity: Any) -> Snapshot:
    """Of these tokens, with a state of so many bytes that nothing will load."""
    made = a_snapshot()
    manifest = msgspec.structs.replace(made.manifest, stable_token_hash=hash_tokens(tokens), **identity)
    contents = msgspec.structs.replace(
        made.contents,
        **{"manifest": manifest, "n_tokens": len(tokens), "n_resident": len(tokens), "n_prefix": len(tokens)},
        **{"n_prompt": len(tokens), "n_vocab": 40_000, "checkpoints": (), "answer": None},
        **{"has_row": False, "whole": -1},
        has_text=False,
    )
    return Snapshot(contents=contents, tokens=tokens.copy(), state=bytes(n_bytes))


def identity_of(snapshot: Snapshot) -> Identity:
    return snapshot.manifest


# Finding.


@pytest.mark.parametrize("n", [1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 1000])
def test_an_entry_is_found_by_a_prompt_that_begins_with_it(tmp_path: Path, n: int) -> None:
    store, made = SnapshotStore(tmp_path), holding(some_tokens(n))
    path = store.put(made)
    assert path is not None and path.parent == tmp_path
    for more in (0, 1, 500):
        prompt = np.concatenate([some_tokens(n), some_tokens(more, seed=1)])
        match = store.find(identity_of(made), prompt)
        assert match is not None and (match.name, match.common) == (path.name, n)
        assert store.load(match.name).digest == made.digest
    other = msgspec.structs.replace(made.manifest, model_digest="0" * 64)
    assert store.find(other, some_tokens(n)) is None
    assert store.find(identity_of(made), some_tokens(n, seed=9)) is None
    assert SnapshotStore(tmp_path).find(identity_of(made), some_tokens(n)) is not None


def test_the_longest_beginning_wins_and_longer_entries_serve_too(tmp_path: Path) -> None:
    store, tokens = SnapshotStore(tmp_path), some_tokens(1000)
    for n in (100, 300, 600):
        store.put(holding(tokens[:n]))
    fork = np.concatenate([tokens[:450], some_tokens(300, seed=4)])
    store.put(holding(fork))
    made = identity_of(holding(tokens))

    def found(prompt: Tokens) -> tuple[int, int]:
        match = store.find(made, prompt)
        assert match is not None
        return match.common, match.n_tokens

    assert found(tokens) == (600, 600)
    assert found(tokens[:599])[0] == 599
    assert found(tokens[:200])[0] == 200
    assert found(fork) == (750, 750)
    assert found(np.concatenate([tokens[:440], some_tokens(9, seed=5)]))[0] == 440
    assert found(np.concatenate([tokens[:310], some_tokens(99, seed=5)]))[0] == 310


# The budget.


def test_the_least_recently_used_go_before_another_is_written(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=1 << 20)
    names = []
    for i in range(12):
        path = store.put(holding(some_tokens(100, seed=i), n_bytes=200_000))
        assert path is not None
        names.append(path.name)
        assert store.n_bytes <= 1 << 20
        os.utime(path, (time.time() - 1000 + i, time.time() - 1000 + i))
        for entry in store.entries():
            if entry.name == path.name:
                entry.used = time.time() - 1000 + i
    assert {entry.name for entry in store.entries()} <= set(names[-5:])
    assert store.evicted >= 7
    assert store.put(holding(some_tokens(100), n_bytes=1 << 20)) is None
    assert len(store) >= 3


def test_a_use_makes_an_entry_younger(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, max_bytes=700_000)
    first, second = (store.put(holding(some_tokens(100, seed=i), n_bytes=200_000)) for i in range(2))
    assert first is not None and second is not None
    for path, age in ((first, 500), (second, 400)):
        os.utime(path, (time.time() - age, time.time() - age))
    store = SnapshotStore(tmp_path, max_bytes=700_000)
    store.load(first.name)
    store.put(holding(some_tokens(100, seed=2), n_bytes=200_000))
    store.put(holding(some_tokens(100, seed=3), n_bytes=200_000))
    names = {entry.name for entry in store.entries()}
    assert second.name not in names


def test_an_entry_over_its_time_goes(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, ttl_s=100)
    old, new = (store.put(holding(some_tokens(100, seed=i))) for i in range(2))
    assert old is not None and new is not None
    os.utime(old, (time.time() - 101, time.time() - 101))
    assert SnapshotStore(tmp_path, ttl_s=200).collect() == 0
    SnapshotStore(tmp_path, ttl_s=100)
    assert [path.name for path in tmp_path.glob("*.lcs")] == [new.name]
    assert [entry.name for entry in store.entries()] == [new.name]
    assert store.remove(new.name) and not store.remove(new.name) and not store.remove("../x")
    assert len(store) == 0


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for values in ({"max_bytes": -1}, {"max_bytes": 1.5}, {"ttl_s": -1}, {"ttl_s": float("nan")}):
        with pytest.raises(InvalidArgumentError):
            SnapshotStore(tmp_path, **values)
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="file"):
        SnapshotStore(tmp_path / "file")


# Damage and others.


def test_foreign_and_damaged_files_are_ignored_and_counted(tmp_path: Path) -> None:
    store, made = SnapshotStore(tmp_path), holding(some_tokens(200))
    path = store.put(made)
    assert path is not None
    good = path.read_bytes()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / (path.name.replace("-200-", "-201-"))).write_bytes(good)  # its name lies
    (tmp_path / f"{'0' * 32}-5-{'0' * 32}.lcs").write_bytes(good[:1000])
    (tmp_path / f"{'1' * 32}-5-{'0' * 32}.lcs").mkdir()
    store = SnapshotStore(tmp_path)
    assert (len(store), store.ignored) == (1, 4)
    damaged = bytearray(good)
    damaged[-1] ^= 1  # of the state: the index does not look there
    path.write_bytes(damaged)
    match = store.find(identity_of(made), some_tokens(200))
    assert match is not None
    with pytest.raises(SnapshotCorruptError):
        store.load(match.name)
    assert store.find(identity_of(made), some_tokens(200)) is None
    path.write_bytes(good)
    os.utime(path, (time.time() + 5, time.time() + 5))
    assert SnapshotStore(tmp_path).find(identity_of(made), some_tokens(200)) is not None
    with pytest.raises(SnapshotError):
        store.load("missing")


def test_a_full_disk_leaves_the_store_intact(tmp_path: Path, run_child: RunChild) -> None:
    store = SnapshotStore(tmp_path / "store")
    made = holding(some_tokens(100), n_bytes=1000)
    store.put(made)
    run_child(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n",
        """
        import resource
        from test_store import holding, identity_of, some_tokens
        store = SnapshotStore("store")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        assert refusal(store.put, holding(some_tokens(100, seed=1), n_bytes=100_000))[0] == "SnapshotError"
        assert len(store) == 1
        made = holding(some_tokens(100), n_bytes=1000)
        assert store.load(store.find(identity_of(made), some_tokens(100)).name).digest == made.digest
        assert not [name for name in os.listdir("store") if name.endswith(".tmp")]
        """,
    )


WRITER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from test_store import *
folder, first = sys.argv[1], int(sys.argv[2])
store = SnapshotStore(folder, max_bytes=4 << 20)
print("ready", flush=True)
for i in range(first, first + 10_000):
    path = store.put(holding(some_tokens(100 + i % 7, seed=i), n_bytes=300_000))
    print(i, path.name, flush=True)
"""


def start_writer(folder: Path, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first)], stdout=subprocess.PIPE, text=True, cwd=folder.parent
    )


def test_killed_writers_leave_only_whole_entries(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for round_ in range(8):
        writer = start_writer(folder, 1000 * round_)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.stdout.readline()
        time.sleep(0.004 * round_)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        store = SnapshotStore(folder, max_bytes=4 << 20)
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
        assert store.ignored == 0 and len(store) >= 1
        for entry in store.entries():
            store.load(entry.name)
        assert store.n_bytes <= 4 << 20


def test_two_processes_write_and_evict_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    writers = [start_writer(folder, first) for first in (0, 100_000)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    reader = SnapshotStore(folder, max_bytes=4 << 20)
    loaded = 0
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for entry in reader.entries():
            try:
                reader.load(entry.name)
                loaded += 1
            except SnapshotCorruptError:
                raise
            except SnapshotError as error:
                assert "No such file" in str(error)  # evicted by a writer meanwhile
    last = []
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        lines = writer.communicate()[0].splitlines()
        last.append(lines)
    assert loaded > 10 and all(len(lines) > 5 for lines in last)
    store = SnapshotStore(folder, max_bytes=4 << 20)
    assert store.n_bytes <= 4 << 20 and store.ignored == 0
    for entry in store.entries():
        store.load(entry.name)


# With sessions.


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_a_parked_session_is_found_by_the_next_prefix(models: dict[str, Model], kind: str, tmp_path: Path) -> None:
    prefix, suffix = some_tokens(300), some_tokens(9, seed=1)
    with open_runtime(models, kind, store=tmp_path / "store") as runtime:
        session = runtime.session()
        session.ensure_prefix(prefix)
        session.prefill_suffix(suffix)
        expected = session.collect(max_tokens=10, ignore_eos=True).tokens
        session.close(park=True)
        assert runtime.store is not None and len(runtime.store) == 1
    with open_runtime(models, kind, store=SnapshotStore(tmp_path / "store")) as runtime, runtime.session() as session:
        runtime.speed.tokens_per_s = 1.0  # reading is slow, whatever the machine
        status = session.ensure_prefix(prefix)
        assert status.plan.source == "snapshot"
        assert (status.reused_tokens, status.prefilled_tokens) == (300, 0)
        assert 0 < status.plan.seconds < 60
        assert "restored from" in status.plan.reason and "restored from" in str(session.explain())
        session.prefill_suffix(suffix)
        assert session.collect(max_tokens=10, ignore_eos=True).tokens == expected
        again = session.ensure_prefix(prefix)  # live by now
        assert again.plan.source in ("live", "checkpoint")
        edited = prefix.copy()
        edited[200] += 1
        session.ensure_prefix([500])
        status = session.ensure_prefix(edited)
        assert status.plan.source == "snapshot"
        assert 0 < status.reused_tokens <= 200
        session.prefill_suffix(suffix)
        tokens = session.collect(max_tokens=10, ignore_eos=True).tokens
    with open_runtime(models, kind) as runtime, runtime.session() as cold:
        cold.ensure_prefix(edited)
        cold.prefill_suffix(suffix)
        assert cold.collect(max_tokens=10, ignore_eos=True).tokens == tokens


def test_a_restore_that_would_be_slower_is_not_done(models: dict[str, Model], tmp_path: Path) -> None:
    with open_runtime(models, "attention", store=tmp_path) as runtime:
        session = runtime.session()
        session.ensure_prefix(some_tokens(300))
        session.close(park=True)
        with runtime.session() as session:
            runtime.speed.tokens_per_s, runtime.speed.bytes_per_s = 1e6, 1e3
            assert session.ensure_prefix(some_tokens(300)).plan.source == "none"


def test_a_damaged_entry_is_read_instead(models: dict[str, Model], tmp_path: Path) -> None:
    with open_runtime(models, "attention", store=tmp_path) as runtime:
        session = runtime.session()
        session.ensure_prefix(some_tokens(300))
        expected = session.collect(max_tokens=5, ignore_eos=True).tokens
        session.ensure_prefix(some_tokens(300))
        session.close(park=True)
        (path,) = tmp_path.glob("*.lcs")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        runtime.speed.tokens_per_s = 1.0
        with runtime.session() as session:
            status = session.ensure_prefix(some_tokens(300))
            assert (status.plan.source, status.prefilled_tokens) == ("none", 300)
            assert session.collect(max_tokens=5, ignore_eos=True).tokens == expected
        assert runtime.store is not None and runtime.store.ignored == 1


def test_parking_needs_a_store(models: dict[str, Model], tmp_path: Path) -> None:
    with open_runtime(models, "attention") as runtime, runtime.session() as session:
        session.ensure_prefix(some_tokens(30))
        with pytest.raises(InvalidArgumentError, match="without a store"):
            session.close(park=True)
        assert session.collect(max_tokens=1, ignore_eos=True).tokens
    with open_runtime(models, "attention", store=tmp_path) as runtime:
        runtime.session().close(park=True)
        assert len(SnapshotStore(tmp_path)) == 0


def test_saving_and_branching_do_not_grow(run_child: RunChild) -> None:
    run_child(
        """
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        def files():
            return len(os.listdir("/proc/self/fd"))
        for name in ("tiny-llama", "tiny-swa", "tiny-mamba"):
            with Runtime.open(TINY[name], n_ctx=1024, n_ubatch=32, n_batch=32, n_threads=1, n_seq_max=3) as runtime:
                parent = runtime.session()
                parent.ensure_prefix(list(range(300, 400)))
                def turn(i):
                    one, other = parent.branch(2)
                    one.prefill_suffix([400 + i % 50])
                    one.collect(max_tokens=2, temperature=1.0)
                    one.close()
                    other.close()
                def saved(i):
                    parent.snapshot().save("a.lcs")
                    runtime.restore(Snapshot.load("a.lcs")).close()
                for i in range(100):
                    turn(i)
                    saved(i)
                gc.collect()
                before, opened = resident(), files()
                for i in range(500):
                    turn(i)
                for i in range(200):
                    saved(i)
                gc.collect()
                assert resident() - before < 4 << 20, (name, resident() - before)
                assert files() == opened
        """
    )


def test_a_state_is_found_for_a_context_of_another_size(models: dict[str, Model], tmp_path: Path) -> None:
    prompt = some_tokens(200)
    with open_runtime(models, "attention", store=tmp_path) as runtime, runtime.session() as session:
        session.ensure_prefix(prompt)
        session.park()
    for n_ctx in (1024, 256):
        with open_runtime(models, "attention", store=tmp_path, n_ctx=n_ctx) as runtime, runtime.session() as session:
            runtime.speed.tokens_per_s = 1.0
            status = session.ensure_prefix(prompt)
            assert (status.plan.source, status.prefilled_tokens) == ("snapshot", 0)
    with open_runtime(models, "attention", store=tmp_path, type_k="q8_0", type_v="q8_0") as runtime:
        runtime.speed.tokens_per_s = 1.0
        with runtime.session() as session:
            assert session.ensure_prefix(prompt).plan.source == "none"
