"""Are the settings that `llamacppshim profile init` measures on this machine faster than upstream's defaults?

Tokens a second of decode behind 3,000 resident tokens, and of their prefill; ratio to the baseline, round by round:
median with its 95% interval.
Baseline: what llama.cpp's library sets by itself (4 threads, flash attention wherever there is a kernel, ubatch 512).
"tools" is what its programs set: as many threads as physical cores. A fresh process a side and round.
Check: every side goes on "The opposite of hot is" with "cold".
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BASELINE = "library"
SENTENCE = "The opposite of hot is"


def tuned(model: str) -> dict[str, Any]:
    from llamacppshim import Model
    from llamacppshim.tuning import tune

    with Model(model) as loaded:
        found = tune(loaded)
    names = ("n_threads", "n_threads_batch", "flash_attn", "n_ubatch")
    return {name: getattr(found, name) for name in names}


def timed(model: str, n_tokens: int, n_gen: int, settings: dict[str, Any]) -> dict[str, Any]:
    from llamacppshim import Runtime

    with Runtime.open(model, n_ctx=n_tokens + 512, **settings) as runtime, runtime.session() as session:
        text = f"{SENTENCE} cold. "
        n = len(runtime.tokenizer.plain((text * 100).encode(), False)) / 100
        began = time.perf_counter()
        status = session.ensure_prefix(text * round(n_tokens / n) + SENTENCE)
        prefill = status.prefilled_tokens / (time.perf_counter() - began)
        answer = session.collect(max_tokens=1)
        began = time.perf_counter()
        rest = session.collect(max_tokens=n_gen, ignore_eos=True)
        decode = len(rest.tokens) / (time.perf_counter() - began)
    assert answer.text.strip() == "cold", answer.text
    return {"prefill": prefill, "decode": decode}


def physical_cores() -> int:
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return max(1, len({file.read_text() for file in siblings}))


def main() -> None:
    import _run
    import peers
    import speed

    parser = argparse.ArgumentParser(description="Measured settings against upstream's defaults.")
    parser.add_argument("--models", nargs="+", choices=speed.MODELS, default=speed.MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n-tokens", type=int, default=3000)
    parser.add_argument("--n-gen", type=int, default=48)
    parser.add_argument("--others-max", type=float, default=_run.OTHERS_MAX, help="cores that others may use")
    chosen = parser.parse_args()
    environment = {"PYTHONPATH": str(peers.SHIM[peers.DEFAULT_THREADS])}

    def worker(question: str, **values: Any) -> tuple[dict[str, Any], _run.Ran]:
        ran = _run.run([sys.executable, str(HERE), question, json.dumps(values)], environment)
        return json.loads(ran.out), ran

    upstream = {"flash_attn": "on", "n_ubatch": 512}
    for name in chosen.models:
        model = str(_run.model(name))
        settings = {
            "profile": worker("tuned", model=model)[0],
            BASELINE: {**upstream, "n_threads": 4, "n_threads_batch": 4},
            "tools": {**upstream, "n_threads": physical_cores(), "n_threads_batch": physical_cores()},
        }
        work = {"n_tokens": chosen.n_tokens, "n_gen": chosen.n_gen}
        sides = {
            side: functools.partial(worker, "timed", model=model, settings=values, **work)
            for side, values in settings.items()
        }
        measured = _run.in_turn(sides, chosen.rounds, others_max=chosen.others_max)
        for side, values in settings.items():
            for quantity in ("prefill", "decode"):
                columns = measured.rate(side, BASELINE, quantity)
                _run.emit(bench="profile_settings", model=name, **columns, settings=values, **work)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("tuned", "timed"):
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        main()
