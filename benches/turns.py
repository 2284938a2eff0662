"""What does the next turn over a long prefix that has been read cost, against reading it, and elsewhere?

Milliseconds to the first token: of the first turn (cold), and of the next ones, each with another question of 24 tokens
after the same prefix and 16 tokens of answer in between (warm, median). Ratio: cold to warm. Also the tokens that were
prefilled in a warm turn, the milliseconds of `plan()` over 32k resident tokens, and those of `ensure_prefix` in Python
where everything is resident.
Baseline: the cold turn in the same process; llama-cpp-python's Llama.generate; llama-server with cache_prompt.
Check: every warm answer is that of a cold session (ours: asserted; the peers': how many of the answers are the same).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

N_QUESTION, N_ANSWER = 24, 16
HERE = Path(__file__).resolve()

Turn = tuple[float, list[int]]  # seconds to the first token, the answer


def prompts(n_vocab: int, n_prefix: int, n_turns: int) -> tuple[list[int], list[list[int]]]:
    draw = random.Random(0)

    def some(n: int) -> list[int]:
        return [draw.randrange(1000, min(n_vocab, 30_000)) for _ in range(n)]

    return some(n_prefix), [some(N_QUESTION) for _ in range(n_turns)]


# The sides, each in a process of its own.


def ours(model: str, n_prefix: int, n_turns: int, config: dict[str, Any]) -> dict[str, Any]:
    from llamacppshim import Runtime

    turns: list[Turn] = []
    read: list[int] = []
    with Runtime.open(model, **config) as runtime:
        prefix, questions = prompts(runtime.model.n_vocab, n_prefix, n_turns)
        with runtime.session() as session:
            for question in questions:
                before = session.explain().work.prefill_tokens
                began = time.perf_counter()
                session.ensure_prefix(prefix)
                session.prefill_suffix(question)
                answer: list[int] = []
                first = 0.0
                for chunk in session.decode(max_tokens=N_ANSWER, ignore_eos=True):
                    first = first or time.perf_counter() - began
                    answer += chunk.tokens
                turns.append((first, answer))
                read.append(session.explain().work.prefill_tokens - before)
            explanation = str(session.explain())
        with runtime.session() as session:  # the oracle
            session.ensure_prefix(prefix)
            session.prefill_suffix(questions[-1])
            assert list(session.collect(max_tokens=N_ANSWER, ignore_eos=True).tokens) == turns[-1][1], (
                "warm is not cold"
            )
    return {"turns": turns, "read": read, "explanation": explanation}


def python_side(model: str) -> dict[str, Any]:
    """Milliseconds of what does not compute: 32k resident tokens of text."""
    from llamacppshim import Runtime

    with Runtime.open(model, n_ctx=32768 + 256) as runtime, runtime.session() as session:
        line = "The quick brown fox jumps over the lazy dog.\n"
        n_line = len(runtime.model.tokenize(line * 2, add_special=False, parse_special=False)) // 2
        text = line * (32768 // n_line)
        status = session.ensure_prefix(text)

        def best(call: Any) -> float:
            times = []
            for _ in range(50):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            return statistics.median(times) * 1e3

        assert session.ensure_prefix(text).reused_tokens == status.prefix_tokens
        other = text[:-20] + "and that is the end.\n"
        session.plan(other)  # tokenised once
        return {
            "tokens": status.prefix_tokens,
            "plan_ms": best(lambda: session.plan(text)),
            "plan_edited_ms": best(lambda: session.plan(other)),
            "ensure_prefix_ms": best(lambda: session.ensure_prefix(text)),
        }


def llama_cpp_python(model: str, n_prefix: int, n_turns: int, config: dict[str, Any]) -> dict[str, Any]:
    from llama_cpp import Llama

    known = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "swa_full")
    llama = Llama(model, verbose=False, flash_attn=False, **{name: config[name] for name in known if name in config})
    prefix, questions = prompts(llama.n_vocab(), n_prefix, n_turns)
    turns: list[Turn] = []
    for question in questions:
        began, first = time.perf_counter(), 0.0
        answer: list[int] = []
        for token in llama.generate(prefix + question, temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - began
            answer.append(int(token))
            if len(answer) == N_ANSWER:
                break
        turns.append((first, answer))
    return {"turns": turns}


@contextlib.contextmanager
def server(program: Path, model: str, config: dict[str, Any]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    n_threads = str(config["n_threads"])
    options = {"--ctx-size": config["n_ctx"], "--batch-size": config["n_batch"], "--ubatch-size": config["n_ubatch"]}
    command = [str(program), "--model", model, "--host", "127.0.0.1", "--port", str(port), "--parallel", "1"]
    command += ["--threads", n_threads, "--threads-batch", n_threads, "--flash-attn", "off", "--no-warmup"]
    command += [str(word) for pair in options.items() for word in pair] + (
        ["--swa-full"] if config.get("swa_full") else []
    )
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                if process.poll() is not None:
                    raise SystemExit(f"llama-server ended with {process.returncode}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/completion"
        finally:
            process.kill()


def llama_server(
    program: Path, model: str, n_vocab: int, n_prefix: int, n_turns: int, config: dict[str, Any]
) -> dict[str, Any]:
    turns: list[Turn] = []
    prefix, questions = prompts(n_vocab, n_prefix, n_turns)
    with server(program, model, config) as address:
        for question in questions:
            body = {"prompt": prefix + question, "n_predict": N_ANSWER, "temperature": 0, "cache_prompt": True}
            body |= {"stream": True, "return_tokens": True, "ignore_eos": True}
            request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
            began, first = time.perf_counter(), 0.0
            answer: list[int] = []
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if event.get("tokens"):
                            first = first or time.perf_counter() - began
                            answer += event["tokens"]
            turns.append((first, answer[:N_ANSWER]))
    return {"turns": turns}


# The report.


def numbers(turns: Sequence[Sequence[Any]]) -> dict[str, float]:
    cold, warm = turns[0][0], statistics.median(turn[0] for turn in turns[1:])
    return {"cold_ms": round(cold * 1e3, 1), "warm_ms": round(warm * 1e3, 2), "ratio": round(cold / warm, 1)}


def same(a: dict[str, Any], b: dict[str, Any]) -> str:
    pairs = list(zip(a["turns"], b["turns"], strict=True))
    return f"{sum(one[1] == other[1] for one, other in pairs)} of {len(pairs)}"


def main() -> None:
    import _run
    import peers

    parser = argparse.ArgumentParser(description="A warm turn against a cold one, and against peers.")
    parser.add_argument("--n-prefix", type=int, default=4096)
    parser.add_argument("--n-turns", type=int, default=6)
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3", "gemma3-full", "mamba", "hybrid"])
    chosen = parser.parse_args()
    fixtures = peers.ROOT / "build" / "fixtures"
    known: dict[str, tuple[Any, dict[str, Any]]] = {
        "smollm2": (functools.partial(_run.model, "smollm2"), {}),
        "gemma3": (functools.partial(_run.model, "gemma3"), {}),
        "gemma3-full": (functools.partial(_run.model, "gemma3"), {"swa_full": True}),
        "mamba": (lambda: fixtures / "tiny-mamba.gguf", {}),
        "hybrid": (lambda: fixtures / "tiny-hybrid.gguf", {}),
    }
    for name in chosen.models:
        find, own = known[name]
        config = {"n_ctx": chosen.n_prefix + 512, "n_batch": 2048, "n_ubatch": 512, "n_threads": chosen.n_threads}
        config |= {"n_threads_batch": chosen.n_threads, **own}
        arguments = {"model": str(find()), "n_prefix": chosen.n_prefix, "n_turns": chosen.n_turns, "config": config}
        environment = {"PYTHONPATH": str(peers.SHIM[peers.DEFAULT_THREADS])}

        def worker(python: str, side: str, values: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
            ran = _run.run([python, str(HERE), side, json.dumps(values)], environment)
            found: dict[str, Any] = json.loads(ran.out)
            return found

        mine = worker(sys.executable, "ours", arguments, environment)
        row = {**numbers(mine["turns"]), "prefilled_warm": statistics.median(mine["read"][1:])}
        _run.emit(bench="turns", model=name, side="llamacppshim", **row, n_prefix=chosen.n_prefix)
        if peers.PYTHON.exists():
            theirs = worker(str(peers.PYTHON), "llama_cpp_python", arguments, {})
            _run.emit(
                bench="turns", model=name, side="llama-cpp-python", **numbers(theirs["turns"]), same=same(mine, theirs)
            )
        if peers.LLAMA_SERVER.exists():
            n_vocab = 262_144 if "gemma" in name else 40_000
            theirs = llama_server(peers.LLAMA_SERVER, n_vocab=n_vocab, **arguments)
            _run.emit(
                bench="turns", model=name, side="llama-server", **numbers(theirs["turns"]), same=same(mine, theirs)
            )
    found = worker(sys.executable, "python_side", {"model": str(fixtures / "tiny-llama.gguf")}, environment)
    _run.emit(bench="turns", side="llamacppshim", what="no computation", **found)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("ours", "llama_cpp_python", "python_side"):
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        main()
