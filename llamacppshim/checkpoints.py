"""Owns the checkpoints of a session: which are kept within a count and a number of bytes. Pure: taking and restoring
them is the runtime's.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Checkpoint(msgspec.Struct, frozen=True):
    """A saved state of what cannot be cut, at a position; the last token's logits, where they were at hand."""

    position: int
    state: bytes | memoryview
    exact: bool
    row: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        return len(self.state) + (0 if self.row is None else self.row.nbytes)


class Checkpoints:
    """One session's checkpoints, by position, within a count and a number of bytes."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.taken: list[Checkpoint] = []
        self.evicted = 0
        self.too_large = 0

    def __len__(self) -> int:
        return len(self.taken)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.taken)

    def positions(self) -> list[tuple[int, bool]]:
        """Of those that hold a state, rising, and whether each is a cold run's to the bit."""
        return [(one.position, one.exact) for one in self.taken if one.state]

    def at(self, position: int) -> Checkpoint | None:
        return next((one for one in self.taken if one.position == position), None)

    def make_room(self, position: int, n_bytes: int) -> bool:
        """Evicts until one of so many bytes fits; False where it never does. Replaces what is at the position."""
        if self.max_count == 0 or n_bytes > self.max_bytes:
            self.too_large += self.max_count > 0
            return False
        self.taken = [one for one in self.taken if one.position != position]
        while len(self.taken) >= self.max_count or self.nbytes + n_bytes > self.max_bytes:
            del self.taken[self._least_missed(position)]
            self.evicted += 1
        return True

    def add(self, checkpoint: Checkpoint) -> None:
        """Room was made for it."""
        self.taken.append(checkpoint)
        self.taken.sort(key=lambda one: one.position)

    def forget_after(self, position: int) -> None:
        """Those of tokens that are no longer there."""
        self.taken = [one for one in self.taken if one.position <= position]

    def clear(self) -> None:
        self.taken.clear()

    def _least_missed(self, position: int) -> int:
        """Index of the one whose loss leaves the smallest gap, the one to come counted."""
        places = [one.position for one in self.taken]
        around = sorted({0, position, *places})

        def gap(i: int) -> int:
            before = max((p for p in around if p < places[i]), default=0)
            after = min((p for p in around if p > places[i]), default=places[i] + (1 << 40))
            return after - before

        return min(range(len(places)), key=gap)
