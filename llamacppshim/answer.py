"""Owns what a decode gives: chunks of text that never split a character, stop texts, log-probabilities. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cancelled", "context_full"]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and the natural logarithm of its probability before any sampler."""

    token: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A step of an answer.

    ``text`` may be empty while the bytes of a character, or the beginning of a stop text, are incomplete. The last
    chunk has a ``finish_reason``, and may have no token.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None  # of `decode_many`: why this session ended, where it failed

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. Times count from the call, what was left to prefill included; ``ttft_ms`` to the first token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    ttft_ms: float = 0.0
    seconds: float = 0.0
    error: BaseException | None = None


def completion_of(chunks: Iterable[tuple[Chunk, float]], began: float) -> Completion:
    """Of chunks and the times at which they came."""
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    reason: FinishReason = "cancelled"
    error: BaseException | None = None
    first: float | None = None
    ended = began
    for chunk, ended in chunks:
        if first is None and chunk.tokens:
            first = ended
        texts.append(chunk.text)
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or reason
        error = chunk.error or error
    return Completion(
        text="".join(texts),
        tokens=tuple(tokens),
        finish_reason=reason,
        logprobs=tuple(logprobs),
        ttft_ms=((ended if first is None else first) - began) * 1e3,
        seconds=ended - began,
        error=error,
    )


class TextStream:
    """Bytes in, text out: whole characters only, and nothing of a stop text or behind it.

    ``said``: the end of what `release` gave away although a stop text might begin with it. Where the answer goes on and
    the stop text comes to its end, that ends it; what was said of it stays said.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.said = ""
        self.stopped = False

    def feed(self, piece: bytes, *, final: bool = False) -> str:
        """What can be said now. `stopped` is set where a stop text is complete."""
        self._held += self._decoder.decode(piece, final)
        text, n_said = self.said + self._held, len(self.said)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held, self.said = "", ""
            return text[n_said : max(n_said, min(found))]
        n_held = 0 if final else min(self._n_of_stop(text), len(self._held))
        said = self._held[: len(self._held) - n_held]
        self._held = self._held[len(said) :]
        if said:  # nothing that was released before it can begin a stop text any more, but for the end of it
            n = self._n_of_stop(text[: len(text) - len(self._held)])
            self.said = text[len(text) - len(self._held) - n : len(text) - len(self._held)] if n > 0 else ""
        return said

    def release(self) -> str:
        """What was held back for a stop text that did not come. An incomplete character waits on."""
        said, self._held = self._held, ""
        self.said += said
        return said

    def pending(self) -> bytes:
        """What was taken in and not said: held back text, and the bytes of an incomplete character."""
        return self._held.encode() + self._decoder.getstate()[0]

    def resume(self, pending: bytes, said: str = "") -> None:
        """As the stream whose `pending` and `said` these were."""
        self._held = self._decoder.decode(pending)
        self.said = said

    def _n_of_stop(self, text: str) -> int:
        """Length of the longest end of a text that begins a stop text."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stop):
                return n
        return 0


def logprobs_of(row: NDArray[np.float32], token: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probabilities from raw logits: of the token, and of the n_top most likely, falling."""
    wide = row.astype(np.float64)
    highest = float(wide.max())
    norm = highest + float(np.log(np.exp(wide - highest).sum()))
    n_top = min(n_top, len(wide))
    top: list[tuple[int, float]] = []
    if n_top > 0:
        ids = np.argpartition(-wide, n_top - 1)[:n_top]
        ids = ids[np.lexsort((ids, -wide[ids]))]
        top = [(int(i), float(wide[i]) - norm) for i in ids]
    return float(wide[token]) - norm, top
