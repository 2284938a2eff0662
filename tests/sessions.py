"""What the tests of sessions share: the memory kinds they run over, runtimes small enough to meet every edge, and a
cold run to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacppshim import Model
from llamacppshim.runtime import Runtime
from llamacppshim.session import Session

N_UBATCH = 32
N_CTX = 512
# What other pieces, or cells that lie elsewhere, may change in a logit of these models (they range over 40): up to 0.07
# was seen, depending on the CPU. A wrong cell changes several.
TOLERANCE = 0.25

#: Each memory kind and cache layout: a tiny model, and what its configuration adds.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("tiny-llama", {}),
    "spm": ("tiny-spm", {}),
    "q8_0": ("tiny-llama", {"type_k": "q8_0", "type_v": "q8_0"}),
    "q4_0": ("tiny-llama", {"type_k": "q4_0", "type_v": "q4_0"}),
    "streams": ("tiny-llama", {"n_seq_max": 3, "n_ctx": 3 * N_CTX}),
    "unified": ("tiny-llama", {"n_seq_max": 3, "kv_unified": True, "n_ctx": 3 * N_CTX}),
    "swa": ("tiny-swa", {}),
    "swa-streams": ("tiny-swa", {"n_seq_max": 3, "n_ctx": 3 * N_CTX}),
    "swa-unified": ("tiny-swa", {"n_seq_max": 3, "kv_unified": True, "n_ctx": 3 * N_CTX}),
    "swa-full": ("tiny-swa", {"swa_full": True}),
    "recurrent": ("tiny-mamba", {}),
    "recurrent-3": ("tiny-mamba", {"n_seq_max": 3, "n_ctx": 3 * N_CTX}),
    "hybrid": ("tiny-hybrid", {}),
    "hybrid-3": ("tiny-hybrid", {"n_seq_max": 3, "n_ctx": 3 * N_CTX}),
    "hybrid-unified": ("tiny-hybrid", {"n_seq_max": 3, "kv_unified": True, "n_ctx": 3 * N_CTX}),
}
CUT = {kind for kind, (name, values) in KINDS.items() if name in ("tiny-llama", "tiny-spm") or "swa_full" in values}
UNIFIED = {kind for kind, (_, values) in KINDS.items() if values.get("kv_unified")}
SEVERAL = [kind for kind, (_, values) in KINDS.items() if values.get("n_seq_max") == 3]

# For a child: an alarm raises where SIGINT would, at any moment within ``longest`` seconds; how often it did.
ALARM = """
    import random
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    random.seed(1)
    def interrupted(work, seconds, longest=2e-3):
        done = time.monotonic() + seconds
        n = 0
        while time.monotonic() < done:
            try:
                # Again and again: Python drops what is raised in a weak reference's callback.
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, longest), 0.05)
                while True:
                    work()
            except KeyboardInterrupt:
                n += 1
            finally:
                while True:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        break
                    except KeyboardInterrupt:
                        pass
        return n
"""


def open_runtime(models: Mapping[str, Path | Model], kind: str, **values: Any) -> Runtime:
    name, own = KINDS[kind]
    small = {"n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, "n_threads": 1, "checkpoint_every": 64}
    return Runtime.open(models[name], **{**small, **own, **values})


def some_tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Ordinary tokens of every tiny vocabulary."""
    draw = random.Random(seed)
    return np.array([draw.randrange(300, 20_000) for _ in range(n)], dtype=np.int32)


def last_row(session: Session) -> NDArray[np.float32]:
    """The logits after everything the session holds."""
    session.holding.settle("decode")
    with session.runtime.turns.lock:
        return session.sequence.row().copy()


def cold_row(runtime: Runtime, prefix: Sequence[int], suffix: Sequence[int]) -> NDArray[np.float32]:
    with runtime.session() as session:
        session.ensure_prefix(prefix)
        session.prefill_suffix(suffix)
        return last_row(session)


def cold_tokens(runtime: Runtime, prefix: Sequence[int], suffix: Sequence[int], n: int) -> tuple[int, ...]:
    with runtime.session() as session:
        session.ensure_prefix(prefix)
        session.prefill_suffix(suffix)
        return session.collect(max_tokens=n, ignore_eos=True).tokens


def cold_row_of(model: Model, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits after these tokens, in a context of their own."""
    with Runtime.open(model, n_ctx=2 * N_CTX, n_ubatch=N_UBATCH, n_batch=N_UBATCH, n_threads=1) as runtime:
        return cold_row(runtime, tokens, [])
