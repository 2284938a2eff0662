"""Owns what a session is meant to hold, and how its sequence is brought to hold it.

The target is the list of tokens; the sequence knows which of them the memory is proven to hold. Every call brings the
second to the first. So a cancel or a failure loses nothing: what is missing is read when the next token is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from llamacppshim.errors import ContextOverflowError, InvalidArgumentError, NoKVSlotError
from llamacppshim.ledger import Ledger, Tokens
from llamacppshim.reuse import ReusePlan
from llamacppshim.sequence import Progress, ResidentSequence

if TYPE_CHECKING:
    from llamacppshim.runtime import Runtime

Stage = Literal["prefix", "suffix", "decode"]

# A checkpoint this far before the end of a prompt survives a template that rewrites its end. It costs a decode of its
# own, so it is taken only for suffixes that would take longer to read again.
NEAR_END_TOKENS = 4
NEAR_END_WORTH_TOKENS = 32


class Mark(NamedTuple):
    """What a holding is meant to hold, to come back to."""

    tokens: Tokens
    n_prompt: int


class Holding:
    """A target and its sequence. Tokens from `n_prompt` on were generated."""

    def __init__(self, runtime: Runtime, sequence: ResidentSequence) -> None:
        self.runtime = runtime
        self.sequence = sequence
        self.target = Ledger()
        self.n_prompt = 0
        self._follows = True  # what is held begins the target

    # The target.

    def replace(self, tokens: Tokens, *, keep: int = 0) -> None:
        """The first `keep` of the target stay, these follow, and all of it is the prompt."""
        if keep < len(self.target):
            self._follows = False
        self.target.replace(tokens, keep=keep)
        self.n_prompt = len(self.target)

    def append(self, token: int) -> None:
        """A generated one."""
        self.target.append(token)

    def mark(self) -> Mark:
        return Mark(self.target.copy(), self.n_prompt)

    def undo(self, mark: Mark) -> None:
        """What was read meanwhile stays in the memory, and is found again where it is wanted."""
        self.replace(mark.tokens)
        self.n_prompt = mark.n_prompt

    def cut_to_held(self) -> None:
        """Only what is proven is meant to be held."""
        self.replace(self.sequence.ledger.copy())

    # How the two stand.

    @property
    def bitwise(self) -> bool:
        return self.runtime.config.reuse == "bitwise"

    @property
    def is_overfull(self) -> bool:
        """The last token was chosen from a context that was full already, and cannot be read."""
        return len(self.target) > self.runtime.n_ctx_seq

    @property
    def is_settled(self) -> bool:
        """Everything is held, and the last token's logits are at hand."""
        return self._in_step() and len(self.sequence) == len(self.target) and self.sequence.has_row

    @property
    def available_tokens(self) -> int:
        room = max(0, self.runtime.n_ctx_seq - len(self.target))
        return min(self.runtime.available_tokens(self.sequence), room)

    @property
    def is_exact(self) -> bool:
        held = self.sequence
        if len(held) == 0 or not held.is_exact(self.n_prompt):
            return False
        # Without bitwise reuse, a last token whose logits are gone is read again alone.
        return self.bitwise or held.has_row or len(held) < len(self.target) or len(held) > self.n_prompt

    def _in_step(self) -> bool:
        """What is held may be gone on from as it is."""
        held = self.sequence
        if not self._follows:
            n = len(held)
            self._follows = n <= len(self.target) and np.array_equal(held.ledger.tokens, self.target.tokens[:n])
        if not self._follows or held.suspect:
            return False
        return not self.bitwise or len(held) >= self.n_prompt or len(held) == held.n_grid

    # Bringing the sequence to the target.

    def keep(self) -> ReusePlan:
        """Of what is held, all that may be kept of the target; the rest is dropped."""
        plan = self.sequence.prepare(self.target.tokens, len(self.target))
        self._follows = True
        return plan

    def align(self) -> None:
        """What is held begins the target. Reads nothing."""
        if not self._in_step():
            self.keep()

    def lacks(self) -> int:
        """How many tokens have to be read before the next one can be chosen."""
        n = len(self.target)
        if n == 0:
            raise InvalidArgumentError("there is nothing to go on from: the session holds no token", field="prefix")
        self.align()
        if len(self.sequence) == n and not self.sequence.has_row:
            self.sequence.prepare(self.target.tokens, n - 1)
        return n - len(self.sequence)

    def settle(self, stage: Stage, *, marks: Sequence[int] = (), progress: Progress | None = None) -> int:
        """Everything is held, and the last token's logits are at hand. How many tokens were read for it."""
        return self.read(len(self.target), stage, marks=marks, progress=progress) if self.lacks() else 0

    def read(
        self,
        end: int,
        stage: Stage,
        *,
        want_row: bool = True,
        marks: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> int:
        """As `ResidentSequence.read`, counted. A lack of cells is told with the numbers."""
        held = self.sequence
        before, began = len(held), time.perf_counter()
        try:
            return held.read(
                self.target.tokens, end, n_prompt=self.n_prompt, want_row=want_row, marks=marks, progress=progress
            )
        except NoKVSlotError as error:
            raise ContextOverflowError(
                stage=stage,
                resident_tokens=self.runtime.resident_tokens,
                additional_tokens=end - len(held),
                num_ctx=self.runtime.context.n_ctx,
            ) from error
        finally:
            self.count(before, time.perf_counter() - began)

    def count(self, before: int, seconds: float) -> None:
        """Work since the sequence held `before` tokens."""
        counters, n = self.sequence.counters, max(0, len(self.sequence) - before)
        if before >= self.n_prompt:
            counters.decode_tokens += n
            counters.decode_s += seconds
        else:
            counters.prefill_tokens += n
            counters.prefill_s += seconds
            self.runtime.speed.has_read(n, seconds)

    # Room.

    def evict(self, n_pinned: int, n_needed: int) -> int:
        """Makes room for so many more tokens, where the configuration and the memory allow it: how many were dropped
        from behind the pinned ones; 0 where that would not do.

        At least half of what may go goes at once, since moving the rest costs a pass over its cells.
        """
        config, held = self.runtime.config, self.sequence
        if config.on_overflow != "evict" or not self._in_step() or not held.can_evict:
            return 0
        begin = max(n_pinned, config.n_sink)
        n_recent = self.runtime.n_ctx_seq // 4 if config.n_recent is None else config.n_recent
        n_must_go = n_needed - (self.runtime.n_ctx_seq - len(self.target))
        n_may_go = len(held) - n_recent - begin
        if n_may_go < max(n_must_go, 1):
            return 0
        n_gone = max(n_must_go, n_may_go // 2, 1)
        pending = self.target.tokens[len(held) :].copy()
        n_prompt = self.n_prompt if self.n_prompt <= begin else max(begin, self.n_prompt - n_gone)
        held.evict(begin, begin + n_gone)
        self.target.replace(held.ledger.tokens, keep=0)
        self.target.extend(pending)
        self.n_prompt = n_prompt
        return n_gone

    # Where checkpoints are taken on the way.

    def prefix_marks(self, begin: int) -> Sequence[int]:
        """Every so many tokens; bitwise, also at the last whole piece."""
        if not self.sequence.needs_checkpoints:
            return ()
        n, n_ubatch, every = len(self.target), self.runtime.n_ubatch, self.runtime.config.checkpoint_every
        if not self.bitwise:
            return range(begin - begin % every + every, n, every)
        every = max(every // n_ubatch, 1) * n_ubatch
        marks = {*range(begin - begin % every + every, n, every), n - n % n_ubatch}
        return sorted(mark for mark in marks if mark > begin)

    def suffix_marks(self, begin: int) -> Sequence[int]:
        if not self.sequence.needs_checkpoints:
            return ()
        n = len(self.target)
        if self.bitwise:
            return (n - n % self.runtime.n_ubatch,)
        return (n - NEAR_END_TOKENS,) if n - begin >= NEAR_END_WORTH_TOKENS else ()
