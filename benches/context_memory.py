"""What does a context on a vocabulary of 262,144 tokens hold before anyone has asked for a row?

MiB in this process that creating the context added (resident, and reserved: virtual), and after one full batch of 512
tokens. Median of the rounds, each in a fresh process.
Baseline: llama-cpp-python's Llama with its default n_batch of 512, and both with n_batch 2048; n_ctx 4096.
Check: both decode the batch; speed.py holds the answers together.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import _run
import load
import peers
import speed


def growth(side: Callable[..., tuple[dict[str, Any], _run.Ran]], **arguments: Any) -> tuple[_run.Numbers, _run.Ran]:
    found, ran = load.package(side, "prefilled", **arguments)
    loaded, _ = load.package(side, "load", model=arguments["model"])
    numbers = {"prefilled.peak": found["prefilled.peak"]}
    for step in ("opened", "prefilled"):
        for kind in ("rss", "virtual"):
            numbers[f"{step}.{kind}"] = found[f"{step}.{kind}"] - loaded[f"loaded.{kind}"]
    return numbers, ran


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a context on a large vocabulary.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    for n_batch in (512, 2048):
        arguments = {"model": str(_run.model("gemma3")), "n_ctx": 4096, "n_prompt": 512}
        arguments |= {**speed.parameters(chosen.n_threads), "n_batch": n_batch}
        sides = {"llamacppshim": functools.partial(growth, _run.ours, **arguments)}
        if peers.PYTHON.exists():
            sides["llama-cpp-python"] = functools.partial(growth, _run.llama_cpp_python, **arguments)
        # Memory does not depend on who else is running.
        measured = _run.in_turn(sides, chosen.rounds, others_max=float("inf"))
        for quantity in measured.values["llamacppshim"]:
            _run.emit(
                bench="context_memory",
                model="gemma3",
                n_batch=n_batch,
                quantity=quantity,
                unit="MiB",
                **{side: round(measured.median(side, quantity), 1) for side in sides},
            )


if __name__ == "__main__":
    main()
