"""OpenMP or ggml's own threads, and how long should idle threads spin?

Tokens a second of prefill and decode; ratio to ggml's threads at poll 50, its default, round by round: median with its
95% interval. With the machine idle, and with one core kept busy by another process.
Baseline: this tree built with LLAMACPPSHIM_OPENMP=OFF, poll 50. llama-bench shows what the same threads do as upstream
has them, without third_party/spin_yield.h. A fresh process a side and round.
Check: every side goes on "The opposite of hot is" with the same tokens, "cold" among them.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import _run
import _worker
import peers
import speed

BASELINE = "poll 50"
POLLS = (0, 10, 50, 100)


def measure(threads: str, **arguments: Any) -> tuple[_run.Numbers, _run.Ran]:
    return speed.package(functools.partial(_run.ours, threads=threads), **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenMP against ggml's own threads.")
    parser.add_argument("--models", nargs="+", choices=speed.MODELS, default=speed.MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--n-prompt", type=int, default=256)
    parser.add_argument("--n-gen", type=int, default=64)
    parser.add_argument("--polls", nargs="+", type=int, default=POLLS)
    parser.add_argument("--busy", nargs="+", type=int, choices=(0, 1), default=(0, 1), help="cores kept busy")
    parser.add_argument("--others-max", type=float, default=_run.OTHERS_MAX, help="cores that others may use")
    chosen = parser.parse_args()
    polls = sorted({50, *chosen.polls})
    for name in chosen.models:
        work = {"n_prompt": chosen.n_prompt, "n_gen": chosen.n_gen, "repetitions": chosen.repetitions}
        arguments = {"model": str(_run.model(name)), **speed.parameters(chosen.n_threads)}
        answers = [
            _run.ours("speed", threads, n_prompt=0, n_gen=0, repetitions=0, **arguments)[0] for threads in peers.THREADS
        ]
        assert _worker.ANSWER in answers[0]["text"], f"{name}: {answers[0]['text']!r}"
        assert answers[0]["answer"] == answers[1]["answer"], f"{name}: {answers[1]['text']!r}"
        arguments |= {"check": False, **work}
        sides = {f"poll {poll}": functools.partial(measure, "pool", poll=poll, **arguments) for poll in polls}
        sides["openmp"] = functools.partial(measure, "openmp", **arguments)
        for threads in peers.THREADS:
            if peers.LLAMA_BENCH[threads].exists():
                sides[f"llama-bench {threads}"] = functools.partial(
                    speed.llama_bench, _run.model(name), **work, n_threads=chosen.n_threads, threads=threads
                )
        for busy in chosen.busy:
            with _run.one_busy_core(busy == 1) as spinner:
                measured = _run.in_turn(sides, chosen.rounds, spinner, chosen.others_max)
            for side in sides:
                for quantity in ("prefill", "decode"):
                    columns = measured.rate(side, BASELINE, quantity)
                    common = {"model": name, "busy_cores": busy, "n_threads": chosen.n_threads, **work}
                    _run.emit(bench="threads", **common, **columns)


if __name__ == "__main__":
    main()
