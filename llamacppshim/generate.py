"""Owns generating in one session: the answer that can be taken up again, and the step from one token to the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from llamacppshim._native import Sampler
from llamacppshim.answer import Chunk, FinishReason, TextStream, TokenLogprob, logprobs_of
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import DecodeAbortedError, LlamaCppShimError
from llamacppshim.snapshot import pairs_of

if TYPE_CHECKING:
    from llamacppshim.session import Session


class Answer:
    """A generation that can be taken up where it was left: tokens from `begin` to `end` are its own."""

    def __init__(self, config: DecodeConfig, sampler: Sampler, begin: int, end: int | None = None) -> None:
        self.config = config
        self.sampler = sampler
        self.stream = TextStream(config.stop)
        self.begin = begin
        self.end = begin if end is None else end
        self.undelivered: Chunk | None = None  # of a call that was left before it could give this to anybody

    def copy(self) -> Answer:
        copy = Answer(self.config, self.sampler.clone(), self.begin, self.end)
        copy.stream.resume(self.stream.pending(), self.stream.said)
        copy.undelivered = self.undelivered
        return copy

    def moved(self, n_pinned: int, n_gone: int) -> None:
        """So many tokens were dropped from behind the pinned ones."""
        self.begin = max(min(self.begin, n_pinned), self.begin - n_gone)
        self.end -= n_gone

    def goes_on_with(self, config: DecodeConfig) -> bool:
        mine, theirs = self.config.sampling(), config.sampling()
        for settings, of in ((mine, self.config), (theirs, config)):
            settings["logit_bias"] = sorted(pairs_of(of))  # a mapping or pairs, in whichever order
        return mine == theirs and self.config.stop == config.stop


class Step:
    """One call of `decode`, token by token. Its methods but `chunks` are for a session that is entered."""

    def __init__(self, session: Session, config: DecodeConfig, answer: Answer | None = None) -> None:
        self.session = session
        self._config = config
        with session.entered():
            self._answer = session.answer_for(config) if answer is None else answer
            session.take_up(self._answer, config)
            self._n_changes = session.n_changes
        self._n_done = 0
        self._expires = None if config.timeout_s is None else time.monotonic() + config.timeout_s

    def chunks(self) -> Iterator[Chunk]:
        while not self.is_overtaken:
            with self.session.entered(self.left_s):
                chunk = self._run()
            yield chunk
            if chunk.is_last:
                return
        yield self.overtaken()

    @property
    def is_overtaken(self) -> bool:
        """Another call has changed what the session holds."""
        return self.session.n_changes != self._n_changes

    @property
    def left_s(self) -> float | None:
        return None if self._expires is None else max(0.0, self._expires - time.monotonic())

    def _run(self) -> Chunk:
        if (chunk := self.ready()) is not None:
            return chunk
        try:
            self.session.holding.settle("decode")
        except DecodeAbortedError:
            return self._cancelled()
        return self.choose()

    def ready(self) -> Chunk | None:
        """The next chunk, where no token is to be chosen for it: one that was left over, or the last."""
        config, session = self._config, self.session
        left, self._answer.undelivered = self._answer.undelivered, None
        if left is not None:
            self._n_done += len(left.tokens)
            reason: FinishReason | None = "stop" if left.finish_reason == "stop" else None
            if reason is None and config.max_tokens is not None and self._n_done >= config.max_tokens:
                reason = "length"
            return msgspec.structs.replace(left, finish_reason=reason)
        if config.max_tokens is not None and self._n_done >= config.max_tokens:
            return self._last("length")
        if len(session.holding.target) >= session.runtime.n_ctx_seq:
            session.make_room(1)  # or the next token is the last
        if session.holding.is_overfull:
            return self._last("context_full")
        if session.sequence.stop.requested or self.left_s == 0.0:
            return self._cancelled()
        return None

    def overtaken(self) -> Chunk:
        """The last chunk, where another call has changed what the session holds. What was held back is gone."""
        return Chunk(text="", finish_reason="cancelled")

    def failed(self, error: LlamaCppShimError) -> Chunk:
        if isinstance(error, DecodeAbortedError):
            return self._cancelled()
        return Chunk(text=self._answer.stream.release(), error=error)

    def choose(self) -> Chunk:
        """The next token, from the last one's logits, which are at hand."""
        session, answer, config = self.session, self._answer, self._config
        held, model, stream = session.sequence, session.runtime.model, answer.stream
        end, answer.end = answer.end, -1  # an answer that is interrupted in here is not taken up again
        with session.runtime.turns.lock:
            if held.row_in_context:
                row = held.row() if config.logprobs is not None else None
                token = answer.sampler.sample(session.runtime.context, held.row_index)
            else:
                row = held.row()
                token = answer.sampler.sample_row(row)
        if model.is_eog(token) and not config.ignore_eos:
            answer.end = end
            return Chunk(text=stream.feed(b"", final=True), finish_reason="stop")
        session.holding.append(token)
        self._n_done += 1
        logprobs: tuple[TokenLogprob, ...] = ()
        if row is not None and config.logprobs is not None:
            logprobs = (self._logprob(row, token, config.logprobs),)
        text = stream.feed(model.token_piece(token, special=token in config.show_special))
        answer.end = end + 1
        reason: FinishReason | None = None
        if stream.stopped:
            reason = "stop"
        elif config.max_tokens is not None and self._n_done >= config.max_tokens:
            reason = "length"
        elif session.holding.is_overfull:
            reason = "context_full"
        if reason is not None and not stream.stopped:
            text += stream.release()
        return Chunk(text=text, tokens=(token,), logprobs=logprobs, finish_reason=reason)

    def _last(self, reason: FinishReason) -> Chunk:
        return Chunk(text=self._answer.stream.release(), finish_reason=reason)

    def _cancelled(self) -> Chunk:
        self.session.sequence.stop.cancelled = False
        return self._last("cancelled")

    def _logprob(self, row: Any, token: int, n_top: int) -> TokenLogprob:
        piece = self.session.runtime.model.token_piece
        own, top = logprobs_of(row, token, n_top)
        return TokenLogprob(token, piece(token), own, tuple(TokenLogprob(one, piece(one), value) for one, value in top))
