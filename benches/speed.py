"""How fast are prefill and decode, against llama-bench and llama-cpp-python on the same pin?

Tokens a second of 512 tokens in one call and of 128 one by one (random ones, as llama-bench takes them), and of 128
greedy ones; ratio of ours to the peer's, round by round: median with its 95% interval. At least 0.98 of llama-bench,
never slower than llama-cpp-python.
Baseline: llama-bench of the same flags; llama-cpp-python's Llama.eval and Llama.generate. The same threads, n_batch and
n_ubatch, no flash attention; a fresh process a side and round.
Check: both packages go on "The opposite of hot is" with the same tokens, "cold" among them; llama-bench reports the
same pin, threads, batches and poll.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import _run
import _worker
import peers

N_BATCH, N_UBATCH = 2048, 512
MODELS = ("smollm2", "gemma3")
POLL = 50  # llama-bench's default


def parameters(n_threads: int) -> dict[str, Any]:
    return {
        "n_batch": N_BATCH,
        "n_ubatch": N_UBATCH,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "flash_attn": False,
    }


def package(
    side: functools.partial[tuple[dict[str, Any], _run.Ran]], **arguments: Any
) -> tuple[_run.Numbers, _run.Ran]:
    found, ran = side("speed", **arguments)
    return {name: found[name] for name in ("prefill", "decode", "generate") if name in found}, ran


def llama_bench(
    path: Path, *, n_prompt: int, n_gen: int, repetitions: int, n_threads: int, threads: str, poll: int = POLL
) -> tuple[_run.Numbers, _run.Ran]:
    options = {"-p": n_prompt, "-n": n_gen, "-r": repetitions, "-t": n_threads, "--poll": poll}
    options |= {"-b": N_BATCH, "-ub": N_UBATCH, "-fa": 0}
    rows, ran = _run.llama_bench(path, *(str(word) for pair in options.items() for word in pair), threads=threads)
    expected = {"n_threads": n_threads, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "flash_attn": 0, "poll": poll}
    found: _run.Numbers = {}
    for row in rows:
        assert {name: int(row[name]) for name in expected} == expected
        samples = sorted(row["samples_ts"])
        found["prefill" if row["n_prompt"] else "decode"] = samples[len(samples) // 2]
    return found, ran


def check_answers(model: str, arguments: dict[str, Any], theirs: bool) -> None:
    short = {**arguments, "n_prompt": 0, "n_gen": 0, "check": True}
    mine, _ = _run.ours("speed", **short)
    assert _worker.ANSWER in mine["text"], f"{model}: {mine['text']!r}"
    if theirs:
        other, _ = _run.llama_cpp_python("speed", **short)
        assert mine["answer"] == other["answer"], f"{model}: {mine['text']!r}, not {other['text']!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill and decode against llama-bench and llama-cpp-python.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=2, help="measured after one that is not, in each process")
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=128)
    parser.add_argument("--threads", choices=peers.THREADS, default=peers.DEFAULT_THREADS)
    parser.add_argument("--others-max", type=float, default=_run.OTHERS_MAX, help="cores that others may use")
    chosen = parser.parse_args()
    has_bench, has_package = peers.LLAMA_BENCH[chosen.threads].exists(), peers.PYTHON.exists()
    for name in chosen.models:
        path = _run.model(name)
        work = {"n_prompt": chosen.n_prompt, "n_gen": chosen.n_gen, "repetitions": chosen.repetitions}
        arguments = {"model": str(path), "check": False, **work, **parameters(chosen.n_threads)}
        check_answers(name, arguments, has_package)
        ours = functools.partial(_run.ours, threads=chosen.threads, poll=POLL)
        sides = {"llamacppshim": functools.partial(package, ours, **arguments)}
        if has_bench:
            sides["llama-bench"] = functools.partial(
                llama_bench, path, **work, n_threads=chosen.n_threads, threads=chosen.threads
            )
        if has_package:
            sides["llama-cpp-python"] = functools.partial(
                package, functools.partial(_run.llama_cpp_python), **arguments
            )
        measured = _run.in_turn(sides, chosen.rounds, others_max=chosen.others_max)
        for peer in list(sides)[1:]:
            for quantity in measured.values[peer]:
                _run.emit(
                    bench="speed",
                    model=name,
                    quantity=quantity,
                    peer=peer,
                    tokens_per_s=round(measured.median("llamacppshim", quantity), 2),
                    peer_tokens_per_s=round(measured.median(peer, quantity), 2),
                    **measured.ratio("llamacppshim", peer, quantity),
                    **work,
                    n_threads=chosen.n_threads,
                    threads=chosen.threads,
                    **measured.conditions(),
                )


if __name__ == "__main__":
    main()
