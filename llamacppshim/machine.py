"""Owns how much memory a model may take on this machine."""

from __future__ import annotations

import os

from llamacppshim._native import available_memory

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
