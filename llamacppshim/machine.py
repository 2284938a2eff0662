"""Owns how much memory a model may take on this machine."""

from __future__ import annotations

import os

from llamacppshim._native import Model, available_memory
from llamacppshim.config import RuntimeConfig
from llamacppshim.errors import ModelLoadError, OutOfMemoryError
from llamacppshim.header import estimate_file
from llamacppshim.memory import TIGHT_SHARE, judge_fit

#: Left to the rest of the process and of the machine, in bytes.
RESERVE_BYTES = 512 << 20


def machine_budget(reserve_bytes: int = RESERVE_BYTES) -> int:
    """Bytes that a model and its contexts may take: what is available, less the reserve.

    On Linux that is free memory (caches that the kernel gives back included) and swap, within the limits of the cgroups
    that the process is in. Elsewhere it is the machine's whole memory: what others use of it is not known.
    """
    available = available_memory()
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, available - reserve_bytes)


def require_room(model: Model, config: RuntimeConfig, budget_bytes: int, *, counted: bool) -> None:
    """Before a context of a loaded model is made; ``counted``: what its weights took is part of the need.

    Raises OutOfMemoryError, with the numbers, where `estimate_memory` says ``none``.
    """
    try:
        _, estimate = estimate_file(model.path, config)
    except (ModelLoadError, OutOfMemoryError):
        return  # no verdict: the file is gone or another, an adapter is, or there is no place for the model's double
    if estimate is None:
        return  # no context for sessions is made of it
    needed = estimate.total_bytes
    if not counted:
        needed -= estimate.weights_loaded + estimate.weights_repacked
    if not judge_fit(needed, budget_bytes):
        raise OutOfMemoryError(
            f"{model.name} with n_ctx {config.n_ctx} needs {needed / 1e6:,.0f} MB, more than {TIGHT_SHARE:.0%} of "
            f"the {budget_bytes / 1e6:,.0f} MB there are: a smaller n_ctx, or type_k and type_v of q8_0, need less",
            needed_bytes=needed,
            available_bytes=budget_bytes,
        )
