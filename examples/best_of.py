"""Best of several answers: read the prompt once, branch, let all answer in step, keep the likeliest.

python3 examples/best_of.py "The capital of France is" --n 8
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from llamacppshim import DecodeConfig, Runtime, Session, collect_many
from llamacppshim.models import default_model


@dataclass
class Best:
    """An answer, the mean logarithm of its tokens' probabilities, and the session that goes on from it."""

    session: Session
    text: str
    mean_logprob: float


def best_of(session: Session, n: int, *, max_tokens: int = 32, temperature: float = 0.8, seed: int = 0) -> Best:
    """Of n answers to what the session holds. The caller closes the best one's session; the others are closed here."""
    branches = session.branch(n)
    kept: Session | None = None
    try:
        configs = [
            DecodeConfig(max_tokens=max_tokens, temperature=temperature, seed=seed + i, logprobs=0) for i in range(n)
        ]
        answers = collect_many(branches, configs)
        means = [
            sum(one.logprob for one in answer.logprobs) / len(answer.logprobs) if answer.logprobs else float("-inf")
            for answer in answers
        ]
        best = max(range(n), key=means.__getitem__)
        kept = branches[best]
        return Best(kept, answers[best].text, means[best])
    finally:
        for branch in branches:
            if branch is not kept:
                branch.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="The likeliest of several answers.")
    parser.add_argument("prompt")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--model", default=None, help="a GGUF file; the small default model without")
    chosen = parser.parse_args()
    model = chosen.model or default_model()
    with Runtime.open(model, n_ctx=2048, n_seq_max=chosen.n + 1, kv_unified=True) as runtime:
        session = runtime.session()
        session.ensure_prefix(chosen.prompt)
        best = best_of(session, chosen.n)
        print(f"{best.mean_logprob:.3f} {best.text}")
        print(best.session.explain())


if __name__ == "__main__":
    main()
