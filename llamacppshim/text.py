"""Owns the way from text to tokens: pieces of a prompt tokenised where they stand, each once, and their seams.

The tokens of a joint text are not those of its parts: they may merge across the cut, and some vocabularies put a space
before a text that stands alone. So a part is tokenised together with the end of what is before it, and that end must
come out as it stands there already.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from llamacppshim.errors import ManifestMismatchError
from llamacppshim.ledger import Ledger, Tokens
from llamacppshim.reuse import common_prefix

TAIL_BYTES = 512  # of what is before, tokenised again with what follows
MARGIN_TOKENS = 16  # of these that must come out as before, besides those that change
PIECE_BYTES = 1 << 16
CACHE_BYTES = 64 << 20
JOINED_MAX = 4

_ANCHORS = (b"\n", b"\na", b"\n.")  # for a text that goes on after tokens which stay as they are

# Between a newline and a letter every pre-tokenizer splits, and no piece of a vocabulary reaches over it.
_LINE_START = re.compile(rb"\n(?=[A-Za-z])")


class Vocabulary(Protocol):
    """What is needed of a model."""

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> Tokens: ...
    def detokenize(self, tokens: Tokens) -> bytes: ...
    def token_piece(self, token: int) -> bytes: ...


class Joint(NamedTuple):
    """What a text adds to the tokens before it: so many of them give way, and these follow."""

    n_back: int
    tokens: Tokens


class _Joined(NamedTuple):
    """Texts that were joined, and how far a joint text that begins with the same ones has come with each."""

    texts: list[bytes]
    parse_special: bool
    tokens: Tokens
    starts: list[int]
    ends: list[int]  # after each text; -1: a later one changed tokens before it


class Tokenizer:
    """Tokenises for one model and keeps what it has tokenised. Safe from several threads at once."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, tuple[Tokens, Tokens]] = OrderedDict()
        self._cache_bytes = 0
        self._max_bytes = max_bytes
        self._joined: list[_Joined] = []  # the last ones, newest first
        self.tokenized_bytes = 0  # how much was not found in the cache

    def plain(self, text: bytes, parse_special: bool) -> Tokens:
        """A text on its own, without special tokens around it."""
        self.tokenized_bytes += len(text)
        return self._vocabulary.tokenize(text, add_special=False, parse_special=parse_special)

    def plain_cached(self, text: bytes, parse_special: bool) -> Tokens:
        """As `plain`, and kept."""
        return self._alone_and_both(b"", text, parse_special)[1]

    def segments(self, texts: Sequence[bytes], parse_special: bool) -> tuple[Tokens, list[int]]:
        """The tokens of the joint text, and at which token each of the texts begins.

        Raises
        ------
        ManifestMismatchError  a token reaches over the boundary of two texts
        """
        tokens, starts = self.joined(texts, parse_special)
        for i, start in enumerate(starts):
            if start < 0:
                begin = sum(map(len, texts[:i]))
                raise ManifestMismatchError(
                    f"segments {i - 1} and {i}: a token reaches over their boundary at byte {begin}",
                    field=f"segments[{i}].token_start",
                )
        return tokens, starts

    def joined(self, texts: Sequence[bytes], parse_special: bool) -> tuple[Tokens, list[int]]:
        """The tokens of the joint text, and at which token each of the texts begins; -1: within one."""
        whole = b"".join(texts)
        ledger, starts, ends = self._begun(texts, parse_special)
        end = sum(map(len, texts[: len(starts)]))
        for text in texts[len(starts) :]:
            starts.append(len(ledger))
            begin, end = end, end + len(text)
            for piece_begin, piece_end in _pieces(whole, begin, end):
                joint = self._follow(whole, piece_begin, ledger.tokens, whole[piece_begin:piece_end], parse_special)
                if joint.n_back and piece_begin == begin:
                    starts[-1] = self._boundary(ledger.tokens, joint)
                kept = len(ledger) - joint.n_back
                for i in range(len(ends) - 1, -1, -1):
                    if ends[i] <= kept and ends[i] >= 0:
                        break
                    ends[i] = -1
                ledger.replace(joint.tokens, keep=kept)
            ends.append(len(ledger))
        tokens = ledger.copy()
        if len(whole) <= self._max_bytes // JOINED_MAX:
            with self._lock:
                self._joined.insert(0, _Joined(list(texts), parse_special, tokens, starts.copy(), ends))
                del self._joined[JOINED_MAX:]
        return tokens.copy(), starts

    def _begun(self, texts: Sequence[bytes], parse_special: bool) -> tuple[Ledger, list[int], list[int]]:
        """What is known of the joint text: the tokens of its first texts, where each begins and where each ends.

        How they join depends on nothing that follows, but for the last tokens, which may change with it.
        """
        with self._lock:
            known = [joined for joined in self._joined if joined.parse_special == parse_special]
        best, n = None, 0
        for joined in known:
            same = 0
            for mine, other in zip(texts, joined.texts, strict=False):
                if mine != other:
                    break
                same += 1
            while same > n and joined.ends[same - 1] < 0:
                same -= 1
            if same > n:
                best, n = joined, same
        if best is None:
            return Ledger(), [], []
        return Ledger(best.tokens[: best.ends[n - 1]]), best.starts[:n], best.ends[:n]

    def _boundary(self, tokens: Tokens, joint: Joint) -> int:
        """Where the text before ends in the joint tokens, although its last ones change; -1 within a token.

        Two newlines at the end are one token, but before a letter each is one for itself.
        """
        at = len(tokens) - joint.n_back
        n_bytes = sum(len(self._vocabulary.token_piece(int(token))) for token in tokens[at:])
        for token in joint.tokens:
            if n_bytes <= 0:
                break
            n_bytes -= len(self._vocabulary.token_piece(int(token)))
            at += 1
        return at if n_bytes == 0 else -1

    def follow(self, head: bytes, head_tokens: Tokens, text: bytes, parse_special: bool) -> Joint:
        """The tokens of `text` after `head`, whose own tokens are known."""
        if not text:
            return Joint(0, np.empty(0, dtype=np.int32))
        return self._follow(head, len(head), head_tokens, text, parse_special)

    def after(self, tokens: Tokens, text: bytes, parse_special: bool) -> Tokens:
        """The tokens of `text` after tokens that stay as they are, generated ones for instance: no space of its own,
        and no merge with them."""
        if not text:
            return np.empty(0, dtype=np.int32)
        if not len(tokens):
            return self.plain_cached(text, parse_special)
        tails = [self._vocabulary.detokenize(tokens[-n:]) for n in (16, 4, 1) if len(tokens) >= n]
        # Where a token reaches over every tail, after something that none reaches over.
        for tail in (*tails, *_ANCHORS):
            alone, both = self._alone_and_both(tail, text, parse_special)
            if len(alone) and common_prefix(alone, both) == len(alone):
                return both[len(alone) :]
        return self.plain_cached(text, parse_special)

    def _follow(self, whole: bytes, end: int, head_tokens: Tokens, text: bytes, parse_special: bool) -> Joint:
        """After the first `end` bytes of a text that is not copied for it."""
        n_tail = TAIL_BYTES
        while True:
            begin = _tail_begin(whole, end, n_tail)
            alone, both = self._alone_and_both(whole[begin:end], text, parse_special)
            same = common_prefix(alone, both)
            settled = common_prefix(alone[::-1], head_tokens[::-1])
            # The tail's own tokens have to be those that end the head, and more of them than change.
            if settled >= len(alone) - same + MARGIN_TOKENS or settled == len(alone) == len(head_tokens):
                return Joint(len(alone) - same, both[same:])
            if begin == 0:  # the head was tokenised in another way, with special tokens for instance: it stays as it is
                return Joint(0, self.after(head_tokens, text, parse_special))
            n_tail *= 8

    def _alone_and_both(self, tail: bytes, text: bytes, parse_special: bool) -> tuple[Tokens, Tokens]:
        key = (tail, text, parse_special)
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found
        found = (self.plain(tail, parse_special), self.plain(tail + text, parse_special))
        with self._lock:
            self._cache[key] = found
            self._cache_bytes += _size(key, found)
            while self._cache_bytes > self._max_bytes and len(self._cache) > 1:
                self._cache_bytes -= _size(*self._cache.popitem(last=False))
        return found


_Key = tuple[bytes, bytes, bool]


def _size(key: _Key, found: tuple[Tokens, Tokens]) -> int:
    return len(key[0]) + len(key[1]) + found[0].nbytes + found[1].nbytes


def _tail_begin(text: bytes, end: int, n_bytes: int) -> int:
    """Where at least so many bytes before `end` begin, at the start of a line; 0 where there are no more."""
    if end <= n_bytes:
        return 0
    latest = end - n_bytes
    earliest = max(0, latest - 8 * n_bytes)
    starts = [match.end() for match in _LINE_START.finditer(text, earliest, latest + 1)]
    if starts:
        return starts[-1]
    while latest > 0 and text[latest] & 0xC0 == 0x80:  # not within a character
        latest -= 1
    return latest


def _pieces(text: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Cuts of about PIECE_BYTES, each at the start of a line: what is edited later leaves those before it cached."""
    found = []
    while end - begin > 2 * PIECE_BYTES:
        match = _LINE_START.search(text, begin + PIECE_BYTES, end)
        if match is None or end - match.end() < PIECE_BYTES:
            break
        found.append((begin, match.end()))
        begin = match.end()
    if begin < end:
        found.append((begin, end))
    return found
