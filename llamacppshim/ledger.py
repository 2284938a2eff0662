"""Owns the list of tokens that a sequence holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacppshim.errors import OutOfRangeError

Tokens = NDArray[np.int32]


def as_tokens(tokens: Any) -> Tokens:
    """One-dimensional int32; OutOfRangeError or TypeError for anything else."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be a sequence of integers, not {array.dtype} of shape {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 2**31 - 1:
        token = low if low < 0 else high
        raise OutOfRangeError(f"token {token} is outside 0..{2**31 - 1}", field="token", actual=token)
    return array.astype(np.int32)


class Ledger:
    """The tokens that one sequence is known to hold, in a buffer that grows."""

    __slots__ = ("_buffer", "n")

    def __init__(self, tokens: Tokens | None = None) -> None:
        self._buffer: Tokens = np.empty(64, dtype=np.int32)
        self.n = 0
        if tokens is not None:
            self.extend(tokens)

    def __len__(self) -> int:
        return self.n

    @property
    def tokens(self) -> Tokens:
        """A view, valid until the next change."""
        return self._buffer[: self.n]

    def copy(self) -> Tokens:
        return self.tokens.copy()

    def extend(self, tokens: Tokens | Sequence[int]) -> None:
        n = self.n + len(tokens)
        if n > len(self._buffer):
            grown: Tokens = np.empty(max(n, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.n] = self.tokens
            self._buffer = grown
        self._buffer[self.n : n] = tokens
        self.n = n

    def append(self, token: int) -> None:
        self.extend((token,))

    def truncate(self, n: int) -> None:
        self.n = min(self.n, n)

    def replace(self, tokens: Tokens | Sequence[int], *, keep: int) -> None:
        """The first `keep` stay, these follow."""
        self.truncate(keep)
        self.extend(tokens)
