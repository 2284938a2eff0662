"""What does Python cost a decoded token?

Microseconds a token: a loop of decode (one token) and greedy sample through the handles, less the same loop in C over
lcs.h. On a model so small that its own time is small and steady; one thread. Median of the rounds' differences, each
with a fresh process a side. Less than 30.
Baseline: loop/loop.c, on the same build of the library.
Check: both loops choose the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import _run
import peers

sys.path.insert(0, str(peers.ROOT / "tests"))
import tiny

N_VOCAB = 256
N_THREADS = 1


def write_model(path: Path) -> None:
    """One layer and 256 tokens without texts: a decode of some tens of microseconds."""
    file = tiny.File(path, "llama", seed=7)
    file.writer.add_name("tiniest")
    file.writer.add_tokenizer_model("none")
    file.keys(block_count=1, context_length=4096, embedding_length=tiny.N_EMBD_HEAD, feed_forward_length=tiny.N_FF)
    file.keys(attention__head_count=1, attention__head_count_kv=1, rope__dimension_count=tiny.N_EMBD_HEAD)
    file.keys(attention__layer_norm_rms_epsilon=1e-5, vocab_size=N_VOCAB)
    file.embedding(N_VOCAB, tiny.N_EMBD_HEAD)
    file.vector("output_norm.weight", 12.0, tiny.N_EMBD_HEAD)
    file.vector("blk.0.attn_norm.weight", 1.0, tiny.N_EMBD_HEAD)
    tiny.attention(file, "blk.0", tiny.N_EMBD_HEAD)
    file.vector("blk.0.ffn_norm.weight", 1.0, tiny.N_EMBD_HEAD)
    tiny.feed_forward(file, "blk.0", tiny.N_EMBD_HEAD)
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Python's cost a decoded token.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--n-tokens", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=20, help="of the loop, in each process")
    parser.add_argument("--threads", choices=peers.THREADS, default=peers.DEFAULT_THREADS)
    parser.add_argument("--others-max", type=float, default=_run.OTHERS_MAX, help="cores that others may use")
    chosen = parser.parse_args()
    path = peers.PEERS / "tiniest.gguf"
    write_model(path)
    tokens: dict[str, list[int]] = {}

    def python() -> tuple[_run.Numbers, _run.Ran]:
        found, ran = _run.ours(
            "loop",
            chosen.threads,
            model=str(path),
            n_tokens=chosen.n_tokens,
            n_rounds=chosen.repetitions,
            n_threads=N_THREADS,
        )
        tokens["python"] = found["tokens"]
        return {"ns": statistics.median(found["ns"])}, ran

    def c() -> tuple[_run.Numbers, _run.Ran]:
        numbers = chosen.n_tokens, chosen.repetitions, N_THREADS
        ran = _run.run([str(peers.LOOP[chosen.threads]), str(path), *map(str, numbers)])
        times, chosen_tokens = ran.out.splitlines()
        tokens["c"] = [int(token) for token in chosen_tokens.split()]
        return {"ns": statistics.median(float(time) for time in times.split())}, ran

    measured = _run.in_turn({"python": python, "c": c}, chosen.rounds, others_max=chosen.others_max)
    assert tokens["python"] == tokens["c"]
    both = zip(measured.values["python"]["ns"], measured.values["c"]["ns"], strict=True)
    costs = sorted((mine - bare) / 1000 for mine, bare in both)
    low, high = _run.median_interval(len(costs))
    _run.emit(
        bench="python_cost",
        cost_us=round(statistics.median(costs), 2),
        cost_low_us=round(costs[low], 2),
        cost_high_us=round(costs[high], 2),
        python_us=round(measured.median("python", "ns") / 1000, 2),
        c_us=round(measured.median("c", "ns") / 1000, 2),
        threads=chosen.threads,
        **measured.conditions(),
    )


if __name__ == "__main__":
    main()
