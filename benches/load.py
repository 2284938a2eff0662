"""What do importing the package and loading a model cost, in time and in memory?

Seconds, from a warm page cache; MiB resident (rss), of these not from files (anon), and at most (peak): median of the
rounds, each in a fresh process. first_token_s: from the path to the first decoded token (model, smallest context, one
decode).
Baseline: llama-bench's own process for one generated token (its "load time" and its peak); llama-cpp-python's import,
its low-level load, and its Llama for open_s and first_token_s.
Check: the processes decode a token; speed.py holds the answers together.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _run
import peers
import speed

MIB = 1 << 20
Side = Callable[[], tuple[_run.Numbers, _run.Ran]]


def flat(found: dict[str, Any]) -> _run.Numbers:
    """Times as they are; memory as name.kind, in MiB."""
    numbers: _run.Numbers = {}
    for name, value in found.items():
        if isinstance(value, dict):
            numbers |= {f"{name}.{kind}": n_bytes / MIB for kind, n_bytes in value.items()}
        else:
            numbers[name] = value
    return numbers


def package(
    side: Callable[..., tuple[dict[str, Any], _run.Ran]], question: str, **arguments: Any
) -> tuple[_run.Numbers, _run.Ran]:
    found, ran = side(question, **arguments)
    return flat(found), ran


def llama_bench(path: Path, n_threads: int) -> tuple[_run.Numbers, _run.Ran]:
    options = ["-p", "0", "-n", "1", "-r", "1", "--no-warmup", "-t", str(n_threads), "-fa", "0", "-v"]
    _, ran = _run.llama_bench(path, *options)
    found = re.search(r"load time\s*=\s*([0-9.]+) ms", ran.err)
    assert found is not None, "llama-bench does not tell its load time"
    return {"first_token_s": float(found[1]) / 1000, "decoded.peak": ran.peak_bytes / MIB}, ran


def report(name: str, measured: _run.Measured, quantities: list[str]) -> None:
    ours, *others = measured.values
    for quantity in quantities:
        row = {ours: round(measured.median(ours, quantity), 4)}
        for peer in others:
            if quantity in measured.values[peer]:
                row[peer] = round(measured.median(peer, quantity), 4)
                row |= {f"{key} to {peer}": value for key, value in measured.ratio(ours, peer, quantity).items()}
        unit = "s" if quantity.endswith("_s") else "MiB"
        _run.emit(bench="load", model=name, quantity=quantity, unit=unit, **row, **measured.conditions())


def main() -> None:
    parser = argparse.ArgumentParser(description="Import, load and first token, in time and memory.")
    parser.add_argument("--models", nargs="+", choices=speed.MODELS, default=speed.MODELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--others-max", type=float, default=_run.OTHERS_MAX, help="cores that others may use")
    chosen = parser.parse_args()
    for name in chosen.models:
        path = _run.model(name)
        loads: dict[str, Side] = {"llamacppshim": functools.partial(package, _run.ours, "load", model=str(path))}
        arguments = {"model": str(path), "n_ctx": 256, **speed.parameters(chosen.n_threads)}
        firsts: dict[str, Side] = {"llamacppshim": functools.partial(package, _run.ours, "first_token", **arguments)}
        if peers.LLAMA_BENCH[peers.DEFAULT_THREADS].exists():
            firsts["llama-bench"] = functools.partial(llama_bench, path, chosen.n_threads)
        if peers.PYTHON.exists():
            theirs = functools.partial(package, _run.llama_cpp_python)
            loads["llama-cpp-python"] = functools.partial(theirs, "load", model=str(path))
            firsts["llama-cpp-python"] = functools.partial(theirs, "first_token", **arguments)
        measured = _run.in_turn(loads, chosen.rounds, others_max=chosen.others_max)
        report(name, measured, ["import_s", "imported.rss", "load_s", "loaded.rss", "loaded.anon"])
        measured = _run.in_turn(firsts, chosen.rounds, others_max=chosen.others_max)
        report(name, measured, ["open_s", "first_token_s", "decoded.rss", "decoded.anon", "decoded.peak"])


if __name__ == "__main__":
    main()
