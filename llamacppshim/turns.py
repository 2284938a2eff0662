"""Owns whose turn it is at a context: one thread at a time, in the order in which they asked. Pure."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that is fair. `threading.Lock` may go to the thread that has just let go of it, again and again."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C while waiting
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                    raise
            self.__exit__()  # it was our turn already
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
