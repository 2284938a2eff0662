"""Owns what a session remembers of its answers: the tokens as they were generated, by the text that came of them. Pure.

A template gets the text back, and tokenising it again may give other tokens. Equal texts may have come of different
tokens, so each is remembered with the place at which it stood, and found by the one that is nearest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from llamacppshim.ledger import Tokens

MAX_REPLIES = 4096
MAX_TOKENS = 1 << 20


class Replies:
    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], Tokens] = OrderedDict()  # by text and place; oldest first
        self._places: dict[str, set[int]] = {}
        self._n_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, text: str) -> bool:
        return text in self._places

    def __iter__(self) -> Iterator[tuple[str, int, Tokens]]:
        """Text, place and tokens of each, the oldest first."""
        for (text, at), tokens in self._tokens.items():
            yield text, at, tokens

    def remember(self, text: str, at: int, tokens: Tokens) -> None:
        """`at`: the token of a prompt at which they stand."""
        self._forget(text, at)
        self._tokens[text, at] = tokens
        self._places.setdefault(text, set()).add(at)
        self._n_tokens += len(tokens)
        while len(self._tokens) > MAX_REPLIES or (self._n_tokens > MAX_TOKENS and len(self._tokens) > 1):
            self._forget(*next(iter(self._tokens)))

    def find(self, text: str, at: int) -> Tokens | None:
        """The tokens of the reply of this text that stood nearest to a place; None where there was none."""
        places = self._places.get(text)
        return None if places is None else self._tokens[text, min(places, key=lambda place: (abs(place - at), place))]

    def copy(self) -> Replies:
        copy = Replies()
        for text, at, tokens in self:
            copy.remember(text, at, tokens)
        return copy

    def within(self, tokens: Tokens) -> list[tuple[str, int, int]]:
        """Text, begin and end of those that stand in these tokens: where they were remembered, or, where what was there
        before them has changed, nearest to it."""
        data = np.ascontiguousarray(tokens).tobytes()
        found = [(text, _nearest(data, own, at), len(own)) for text, at, own in self]
        return [(text, at, at + n) for text, at, n in found if at >= 0]

    def _forget(self, text: str, at: int) -> None:
        old = self._tokens.pop((text, at), None)
        if old is not None:
            self._n_tokens -= len(old)
            self._places[text].discard(at)
            if not self._places[text]:
                del self._places[text]


def _nearest(data: bytes, own: Tokens, place: int) -> int:
    """Where these tokens stand in the bytes of others, nearest to a place; -1: nowhere."""
    part, size = np.ascontiguousarray(own).tobytes(), own.itemsize
    if data[place * size : place * size + len(part)] == part:
        return place
    best, at = -1, data.find(part)
    while at >= 0:
        if at % size == 0 and (best < 0 or abs(at // size - place) < abs(best - place)):
            best = at // size
        at = data.find(part, at + 1)
    return best
