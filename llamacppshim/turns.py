"""Owns whose turn it is at a context: one thread at a time, and no thread again and again while others wait. Pure.

The lock is Python's own and is always taken by ``with turns.lock``: an interrupt cannot come between taking it and the
block that lets it go. A lock written in Python could be left taken for good by a Ctrl-C.
"""

from __future__ import annotations

import threading
import time

PAUSE_S = 0.0002  # enough for a waiting thread to wake up and take the lock
FORGOTTEN_S = 10.0  # a wait that was interrupted is no wait


class Turns:
    """A lock, and who waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        self._last = 0

    def ask(self) -> None:
        """Before taking the lock for a piece of work: gives way where others wait and this thread had the last turn."""
        me, now = threading.get_ident(), time.monotonic()
        if self._last == me and any(
            thread != me and now - since < FORGOTTEN_S for thread, since in list(self._waiting.items())
        ):
            time.sleep(PAUSE_S)
        self._waiting[me] = now

    def taken(self) -> None:
        """It is this thread's turn."""
        me = threading.get_ident()
        self._waiting.pop(me, None)
        self._last = me
