"""What do saving, restoring, branching and stepping together cost?

Milliseconds, median of the repetitions: a snapshot of 3,000 tokens in memory and its restore, against one memcpy of
the same bytes into equally fresh memory, in the same run; to disk, against a plain write and fsync of the same bytes;
the prefill of the same tokens. A branch of eight from 4,000 tokens in a unified cache. Tokens a second of four and of
eight sessions in step, against one after the other. A look-up among 10,000 entries of a store.
Baseline: as named. Check: the restored session, the branches and the steps give the tokens of a session alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def some(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 30_000) for _ in range(n)]


def ms(call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 3)


def copied(data: bytes) -> None:
    """Into memory that was never touched: as large an allocation is mapped anew each time."""
    bytearray(data)


def states(model: str, n_tokens: int, n_threads: int, flash_attn: str, repetitions: int) -> dict[str, Any]:
    from llamacppshim import Runtime, Snapshot

    with (
        Runtime.open(model, n_ctx=n_tokens + 64, n_threads=n_threads, n_seq_max=1, flash_attn=flash_attn) as runtime,
        runtime.session() as session,
    ):
        tokens = some(n_tokens)
        began = time.perf_counter()
        session.ensure_prefix(tokens)
        prefill_ms = (time.perf_counter() - began) * 1e3
        saved = session.snapshot()
        expected = session.collect(max_tokens=8, ignore_eos=True).tokens
        session.restore(saved)
        assert session.collect(max_tokens=8, ignore_eos=True).tokens == expected
        session.restore(saved)
        found = {
            "n_tokens": n_tokens,
            "bytes": saved.nbytes,
            "prefill_ms": round(prefill_ms, 1),
            "memcpy_ms": ms(lambda: copied(saved.state), repetitions),
            "snapshot_ms": ms(session.snapshot, repetitions),
            "restore_ms": ms(lambda: session.restore(saved), repetitions),
        }
        with tempfile.TemporaryDirectory() as folder:
            path, data = Path(folder) / "a.lcs", saved.to_bytes()

            def plain() -> None:
                with open(Path(folder) / "b", "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

            found["write_ms"] = ms(plain, repetitions)
            found["save_ms"] = ms(lambda: saved.save(path), repetitions)
            found["load_restore_ms"] = ms(lambda: session.restore(Snapshot.load(path)), repetitions)
        found["snapshot_to_memcpy"] = round(found["snapshot_ms"] / found["memcpy_ms"], 2)
        found["restore_to_memcpy"] = round(found["restore_ms"] / found["memcpy_ms"], 2)
        found["save_to_write"] = round(found["save_ms"] / found["write_ms"], 2)
        found["prefill_to_restore"] = round(prefill_ms / found["restore_ms"])
        return found


def branches(model: str, n_tokens: int, n_threads: int, n_gen: int) -> dict[str, Any]:
    from llamacppshim import Runtime, collect_many

    found: dict[str, Any] = {"n_tokens": n_tokens}
    with (
        Runtime.open(model, n_ctx=n_tokens + 1024, n_threads=n_threads, n_seq_max=9, kv_unified=True) as runtime,
        runtime.session() as parent,
    ):
        parent.ensure_prefix(some(n_tokens))
        before = runtime.context.memory_use()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            children = parent.branch(8)
            times.append(time.perf_counter() - began)
            assert sum(child.explain().work.prefill_tokens for child in children) == 0
            assert sum(child.explain().branch_bytes for child in children) == 0
            for child in children:
                child.close()
        assert runtime.context.memory_use() == before
        found["branch_8_ms"] = round(statistics.median(times) * 1e3, 3)
        questions = [some(16, seed=i) for i in range(8)]
        for n in (4, 8):
            alone, seconds = [], 0.0
            for question in questions[:n]:
                parent.ensure_prefix(some(n_tokens))
                parent.prefill_suffix(question)
                began = time.perf_counter()
                alone.append(parent.collect(max_tokens=n_gen, ignore_eos=True).tokens)
                seconds += time.perf_counter() - began
            parent.ensure_prefix(some(n_tokens))
            children = parent.branch(n)
            for child, question in zip(children, questions, strict=False):
                child.prefill_suffix(question)
            began = time.perf_counter()
            answers = collect_many(children, max_tokens=n_gen, ignore_eos=True)
            together = time.perf_counter() - began
            same = sum(a.tokens == b for a, b in zip(answers, alone, strict=True))
            assert all(a.tokens[0] == b[0] for a, b in zip(answers, alone, strict=True))
            found[f"decode_many_{n}"] = {
                "tokens_per_s": round(n * n_gen / together, 1),
                "one_by_one": round(n * n_gen / seconds, 1),
                "ratio": round(seconds / together, 2),
                "same_answers": f"{same} of {n}",
            }
            for child in children:
                child.close()
    return found


def look_up(n_entries: int) -> dict[str, Any]:
    """Entries of 2,000 tokens: ten workspaces, each read to a hundred lengths and edited ten times."""
    sys.path.insert(0, str(HERE.parent.parent / "tests"))
    import numpy as np
    from test_store import holding

    from llamacppshim import SnapshotStore

    with tempfile.TemporaryDirectory() as folder:
        store = SnapshotStore(folder)
        draw = np.random.default_rng(0)
        prompts = []
        for i in range(n_entries):
            tokens = draw.integers(1000, 30_000, 2000 if i % 100 == 0 else 300, dtype=np.int32)
            made = holding(tokens, n_bytes=8)
            made.save(Path(folder) / f"{store_name(made)}")
            if i % 100 == 0:
                prompts.append(np.concatenate([tokens, draw.integers(1000, 30_000, 2000, dtype=np.int32)]))
        began = time.perf_counter()
        store = SnapshotStore(folder, collect=False)
        assert len(store) == n_entries
        opened = time.perf_counter() - began
        identity = holding(prompts[0][:5]).manifest
        times = []
        for prompt in prompts * 5:
            began = time.perf_counter()
            match = store.find(identity, prompt)
            times.append(time.perf_counter() - began)
            assert match is not None and match.common == 2000
        return {
            "n_entries": n_entries,
            "prompt_tokens": 4000,
            "find_ms": round(statistics.median(times) * 1e3, 3),
            "first_look_s": round(opened, 2),
        }


def store_name(made: Any) -> str:
    from llamacppshim.store import entry_name

    return entry_name(made.manifest, made.tokens)


def main() -> None:
    import _run
    import peers

    parser = argparse.ArgumentParser(description="Saving, restoring, branching, stepping together.")
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--n-gen", type=int, default=32)
    chosen = parser.parse_args()
    environment = {"PYTHONPATH": str(peers.SHIM[peers.DEFAULT_THREADS])}

    def worker(question: str, **values: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            _run.run([sys.executable, str(HERE), question, json.dumps(values)], environment).out
        )
        return found

    common = {"n_threads": chosen.n_threads}
    for name in ("smollm2", "gemma3"):
        for flash_attn in ("off", "on"):
            values = {"model": str(_run.model(name)), "n_tokens": 3000, "repetitions": chosen.repetitions, **common}
            found = worker("states", flash_attn=flash_attn, **values)
            _run.emit(bench="states", model=name, flash_attn=flash_attn, **found)
    for name in ("smollm2", "gemma3"):
        values = {"model": str(_run.model(name)), "n_tokens": 4000, "n_gen": chosen.n_gen, **common}
        _run.emit(bench="branches", model=name, **worker("branches", **values))
    _run.emit(bench="store", **worker("look_up", n_entries=10_000))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("states", "branches", "look_up"):
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        main()
