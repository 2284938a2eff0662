"""Owns one sequence of a context: what its memory is proven to hold, and how it is brought to hold other tokens.

The ledger here never claims a token that was not computed. What a failed decode leaves is read from its error and from
the memory; what cannot be told is suspect, and replaced by a checkpoint or nothing before it is used again. A sequence
is suspect from before the memory changes until the ledger has followed: an interrupt may come between any two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamacppshim.checkpoints import Checkpoint, Checkpoints
from llamacppshim.errors import (
    InternalError,
    NoKVSlotError,
    OutOfMemoryError,
    SnapshotCorruptError,
    SnapshotError,
)
from llamacppshim.ledger import Ledger, Tokens
from llamacppshim.reuse import Memory, ReusePlan, plan
from llamacppshim.snapshot import Snapshot

if TYPE_CHECKING:
    from llamacppshim.runtime import Runtime

#: Told (tokens read, tokens to read) after each piece of a prefill.
Progress = Callable[[int, int], None]


class Stop:
    """Whether a session's running call should end: it was cancelled, or its time is over."""

    def __init__(self) -> None:
        self.cancelled = False
        self.expires: float | None = None
        self.timeout_s: float | None = None

    def begin(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.expires = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def remaining(self) -> float:
        return 0.0 if self.expires is None else self.expires - time.monotonic()

    @property
    def requested(self) -> bool:
        return self.cancelled or (self.expires is not None and self.remaining <= 0)

    def why(self, n_resident: int) -> str:
        """An error's text; a cancel is seen once."""
        why = "it was cancelled" if self.cancelled else f"timeout_s {self.timeout_s:g} has passed"
        self.cancelled = False
        return f"{why}; {n_resident} tokens are resident"


class Counters:
    """Physical work of one session."""

    __slots__ = (
        "checkpoints_restored",
        "checkpoints_taken",
        "decode_s",
        "decode_tokens",
        "prefill_s",
        "prefill_tokens",
    )

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.prefill_s = 0.0
        self.decode_tokens = 0
        self.decode_s = 0.0
        self.checkpoints_taken = 0
        self.checkpoints_restored = 0


class Cells:
    """Which of a sequence's cells in one pool are those of its relatives too: runs of positions, with an owner each."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, object]] = []  # begin, end, owner

    @property
    def shared(self) -> bool:
        return bool(self._runs)

    def share(self, other: Cells, n: int) -> None:
        """The first n cells are the other's from now on. What neither owned with anyone is theirs together."""
        begin = other._runs[-1][1] if other._runs else 0
        if n > begin:
            other._runs.append((begin, n, object()))
        self._runs = list(other._runs)

    def cut(self, n: int) -> None:
        """What is behind the first n is gone, and what comes there next is the sequence's own."""
        self._runs = [(begin, min(end, n), owner) for begin, end, owner in self._runs if begin < n]

    @staticmethod
    def count(all_cells: Iterable[tuple[int, Cells]]) -> int:
        """Cells of sequences of these lengths, each counted once."""
        total = 0
        shared: dict[object, int] = {}
        for n, cells in all_cells:
            for begin, end, owner in cells._runs:
                own = max(0, min(n, end) - begin)
                shared[owner] = max(shared.get(owner, 0), own)
                total -= own
            total += n
        return total + sum(shared.values())


class ResidentSequence:
    """All methods but `plan` run one at a time: the session sees to that."""

    def __init__(self, runtime: Runtime, seq_id: int) -> None:
        config = runtime.config
        self.runtime = runtime
        self.seq_id = seq_id
        self.ledger = Ledger()
        self.checkpoints = Checkpoints(config.max_checkpoints, config.checkpoint_bytes)
        self.counters = Counters()
        self.stop = Stop()
        self.epoch = runtime.epoch
        self.cells = Cells()
        self.suspect = False
        self._layout = True
        self._lost_masked = False  # a state leaves out what the window no longer shows, even of a full cache
        self._n_grid = 0
        self._whole = -1
        self._n_true: int | None = None  # tokens before the place where some were evicted
        self.evicted_tokens = 0
        self._row_at = -1  # length of the ledger whose last row is at hand
        self.row_index = -1  # of that row in the context
        self._row: NDArray[np.float32] | None = None  # a copy, where the context holds another's row

    def __len__(self) -> int:
        return len(self.ledger)

    # Whole states.

    def save_state(self) -> bytes:
        """Of everything held; empty where nothing is. Under the runtime's turn."""
        return self.runtime.context.seq_state_save(self.seq_id) if len(self.ledger) else b""

    def load_snapshot(self, snapshot: Snapshot) -> None:
        """Into this sequence, which holds nothing. A failure leaves it so."""
        contents = snapshot.contents
        with self.runtime.turns.lock:
            if contents.n_resident:
                context = self.runtime.context
                self.runtime.claim_rows(self)
                self.suspect = True
                try:
                    context.seq_state_load(self.seq_id, snapshot.state)
                    reached = context.seq_pos_max(self.seq_id) + 1
                    if reached != contents.n_resident:
                        raise SnapshotCorruptError(
                            f"its state holds {reached} tokens, not {contents.n_resident}", path=snapshot.path
                        )
                except BaseException:
                    self.drop()
                    raise
            self._clear()
            self.ledger.extend(snapshot.tokens[: contents.n_resident])
            self._lost_masked = self.runtime.model.n_swa > 0
            self._layout = contents.layout and not self._lost_masked
            self._n_grid, self._whole = contents.n_grid, contents.whole
            if snapshot.row is not None:
                self._row, self._row_at = snapshot.row, contents.n_resident
            for one in snapshot.checkpoints:
                if self.checkpoints.make_room(one.position, one.nbytes):
                    self.checkpoints.add(one)
            self.suspect = False

    def copy_from(self, other: ResidentSequence) -> int:
        """Holds what another does, from now on on its own. How many bytes that takes. Under the runtime's turn."""
        context = self.runtime.context
        self.suspect = True
        context.seq_cp(other.seq_id, self.seq_id)
        self.ledger.replace(other.ledger.tokens, keep=0)
        for one in other.checkpoints.taken:
            if self.checkpoints.make_room(one.position, one.nbytes):
                self.checkpoints.add(one)
        self.epoch = other.epoch
        self._layout, self._lost_masked = other._layout, other._lost_masked
        self._n_true, self.evicted_tokens = other._n_true, other.evicted_tokens
        self._n_grid, self._whole = other._n_grid, other._whole
        if other.has_row:
            other.save_row()  # one copy for all that branch here
            self._row, self._row_at = other._row, len(self.ledger)
        self.suspect = other.suspect
        if len(self.ledger) == 0:
            return 0
        if context.n_stream > 1:
            return context.seq_state_size(self.seq_id)
        self.cells.share(other.cells, len(self.ledger))
        return context.seq_state_size(self.seq_id, partial=True) if self.runtime.is_recurrent else 0

    @property
    def layout(self) -> bool:
        """Whether the cells lie where a cold run would have put them."""
        return self._layout and self.runtime.layout_is_own

    @property
    def whole(self) -> int:
        """Where a last, shorter piece that follows the grid ends; -1 where there is none."""
        return self._whole

    @property
    def n_grid(self) -> int:
        """Leading tokens that were read in whole pieces from position 0, as a cold run reads them."""
        return self._n_grid

    @property
    def _windowed(self) -> bool:
        return self.runtime.n_swa > 0 or self._lost_masked

    @property
    def needs_checkpoints(self) -> bool:
        return not self.runtime.can_be_cut or self._lost_masked

    # What the memory holds.

    def facts(self) -> Memory:
        """Under the runtime's turn."""
        runtime = self.runtime
        n_swa = runtime.model.n_swa if self._lost_masked else runtime.n_swa
        lossy = n_swa > 0
        return Memory(
            kind=runtime.memory_kind,
            n_swa=n_swa,
            pos_min=max(0, runtime.context.seq_pos_min(self.seq_id)) if lossy else 0,
            n_ubatch=runtime.n_ubatch,
            n_grid=self._n_grid,
            whole=self._whole,
            keeps_layout=not lossy,
            layout=self.layout,
            suspect=self.suspect,
        )

    def is_exact(self, n_prompt: int) -> bool:
        """Whether the first n_prompt tokens lie there as a cold run of just these would have left them."""
        in_grid = n_prompt == self._whole or (n_prompt <= self._n_grid and n_prompt % self.runtime.n_ubatch == 0)
        return in_grid and self.layout and not self.suspect

    def plan(self, wanted: Tokens, limit: int) -> ReusePlan:
        with self.runtime.turns.lock:
            return self._plan(wanted, limit)

    def _plan(self, wanted: Tokens, limit: int) -> ReusePlan:
        bitwise = self.runtime.config.reuse == "bitwise"
        if self._n_true is not None:
            limit = min(limit, self._n_true)
        positions = self.checkpoints.positions()
        return plan(self.ledger.tokens, wanted, self.facts(), positions, limit=limit, bitwise=bitwise)

    # Bringing it to hold a beginning of other tokens.

    def prepare(self, wanted: Tokens, limit: int) -> ReusePlan:
        """Keeps what may be kept of the wanted tokens, and drops the rest."""
        with self.runtime.turns.lock:
            while True:
                plan = self._plan(wanted, limit)
                if plan.source == "checkpoint" and not self._restore(plan.reuse_tokens):
                    continue  # it is gone now, and an earlier one may serve
                if plan.source == "live" and not self._cut(plan.reuse_tokens):
                    self.suspect = True
                    continue
                if plan.source == "none":
                    self.drop()
                return plan

    def drop(self) -> None:
        """Nothing is held any more. Under the runtime's turn."""
        self.suspect = True
        self.runtime.context.seq_rm(self.seq_id, -1, -1)
        self.forget()

    def forget(self) -> None:
        """The memory is empty."""
        self.suspect = True
        self._clear()
        self.suspect = False

    def _clear(self) -> None:
        self.ledger.truncate(0)
        self.cells = Cells()
        self.checkpoints.clear()
        self._layout = True
        self._lost_masked = False
        self._n_true = None
        self.evicted_tokens = 0
        self._n_grid = 0
        self._whole = -1
        self._drop_row()

    def _cut(self, n: int) -> bool:
        if n < len(self.ledger):
            context = self.runtime.context
            self.suspect = True
            if not context.seq_rm(self.seq_id, n, -1) or context.seq_pos_max(self.seq_id) != n - 1:
                return False
            self._shortened(n)
            self._layout = self._layout and not self._windowed
            self.suspect = False
        return True

    def _restore(self, n: int) -> bool:
        checkpoint = self.checkpoints.at(n)
        assert checkpoint is not None
        context = self.runtime.context
        self.runtime.claim_rows(self)
        self._drop_row()
        self.suspect = True
        try:
            context.seq_state_load(self.seq_id, checkpoint.state, partial=True)
            loaded = context.seq_pos_max(self.seq_id) == n - 1
        except (SnapshotError, NoKVSlotError, OutOfMemoryError, InternalError):
            loaded = False
        if not loaded:
            self.checkpoints.taken.remove(checkpoint)
            return False
        self._shortened(n)
        self._layout = self._layout and not self._windowed
        self.suspect = False
        self.counters.checkpoints_restored += 1
        return True

    def _shortened(self, n: int) -> None:
        n_ubatch = self.runtime.n_ubatch
        if n < len(self.ledger):
            self._drop_row()
        if self._n_true is not None and n <= self._n_true:
            self._n_true = None
            self.evicted_tokens = 0
        self.ledger.truncate(n)
        self.cells.cut(n)
        self.checkpoints.forget_after(n)
        self._n_grid = min(self._n_grid, n // n_ubatch * n_ubatch)
        if n not in (self._whole, self._n_grid):
            self._whole = -1
        elif n == self._n_grid:
            self._whole = n
        at = self.checkpoints.at(n)
        if self._row_at < 0 and at is not None and at.row is not None:
            self._row, self._row_at = at.row, n

    @property
    def can_evict(self) -> bool:
        """Whether positions can be moved: not of a recurrent part, which is said to shift but forgets nothing, and not
        where branches share the cells, whose positions would move too."""
        context = self.runtime.context
        if self.runtime.is_recurrent:
            return False
        return context.can_shift and context.type_k in ("f32", "f16", "bf16") and not self.cells.shared

    def evict(self, begin: int, end: int) -> None:
        """Drops what is held from `begin` to `end`, and moves what follows there. What was computed with the dropped
        tokens in sight stays as it is: from `begin` on, this is no prompt's cells any more."""
        with self.runtime.turns.lock:
            context = self.runtime.context
            self.suspect = True
            context.seq_rm(self.seq_id, begin, end)
            context.seq_add(self.seq_id, end, -1, begin - end)
            rest = self.ledger.tokens[end:].copy()
            had_row = self.has_row
            self.ledger.replace(rest, keep=begin)
            self.checkpoints.forget_after(begin)
            self._n_true = begin if self._n_true is None else min(self._n_true, begin)
            self._lost_masked = self._lost_masked or self.runtime.model.n_swa > 0  # a full cache overwrites it first
            self._layout = False
            self._n_grid = min(self._n_grid, begin // self.runtime.n_ubatch * self.runtime.n_ubatch)
            self._whole = -1
            if had_row:
                self._row_at = len(self.ledger)
            self.evicted_tokens += end - begin
            self.suspect = False

    # Reading.

    def read(
        self,
        wanted: Tokens,
        end: int,
        *,
        n_prompt: int,
        want_row: bool,
        marks: Collection[int] = (),
        progress: Progress | None = None,
    ) -> int:
        """Decodes what lies between what is held and `end`, in pieces; how many tokens that was.

        A failure leaves what is proven. Tokens from `n_prompt` on were generated: bitwise, they are read one by one.
        """
        begin = len(self.ledger)
        while (at := len(self.ledger)) < end:
            until = self._piece_end(at, end, n_prompt, marks)
            self.runtime.decode(self, wanted[at:until], row=want_row and until == end)
            if until in marks:
                self.take_checkpoint()
            if progress is not None:
                progress(until - begin, end - begin)
        return max(0, end - begin)

    def _piece_end(self, at: int, end: int, n_prompt: int, marks: Collection[int]) -> int:
        n_ubatch = self.runtime.n_ubatch
        until = min(end, at + n_ubatch)
        if self.runtime.config.reuse == "bitwise":
            if at >= n_prompt:
                return at + 1
            until = min(n_prompt, end, at - at % n_ubatch + n_ubatch)
        return min((mark for mark in marks if at < mark < until), default=until)

    def take_checkpoint(self) -> None:
        """Of what cannot be cut, and of the last row where it is at hand; within the budget, or not at all."""
        at = len(self.ledger)
        held = self.checkpoints.at(at)
        if at == 0 or self.suspect or (held is not None and (held.row is not None or not self.has_row)):
            return
        with self.runtime.turns.lock:
            context = self.runtime.context
            n_state = context.seq_state_size(self.seq_id, partial=True) if self.needs_checkpoints else 0
            n_row = 4 * self.runtime.model.n_vocab if self.has_row else 0
            if n_state + n_row == 0 or not self.checkpoints.make_room(at, n_state + n_row):
                return
            state = context.seq_state_save(self.seq_id, partial=True) if self.needs_checkpoints else b""
            exact = self._layout and self._n_grid == at
            self.checkpoints.add(Checkpoint(at, state, exact, self.row() if self.has_row else None))
            self.counters.checkpoints_taken += 1

    # What a decode did. Under the runtime's turn.

    def decoded(self, tokens: Tokens, *, row: bool, index: int = -1) -> None:
        """`index`: of the last token's row in the context."""
        self._grown(tokens)
        self._row_at, self.row_index = (len(self.ledger), index) if row else (-1, -1)
        self.suspect = False

    def _grown(self, tokens: Tokens) -> None:
        begin = len(self.ledger)
        self.ledger.extend(tokens)
        end = len(self.ledger)
        n_ubatch = self.runtime.n_ubatch
        if begin == self._n_grid and end <= begin + n_ubatch:
            self._whole = end
            if end == begin + n_ubatch:
                self._n_grid = end
        self._drop_row()

    def failed(self, tokens: Tokens, committed: int | None, *, dirty: bool) -> None:
        """`committed`: how many of the tokens an error says are held; None where only the memory tells. `dirty`: it
        is known that it cannot be told what is left.

        Attention and windows: whole ubatches stay, and the memory says how many. What has a recurrent part says more
        than was computed, so the error must say that nothing went wrong inside.
        """
        context = self.runtime.context
        begin = len(self.ledger)
        self._drop_row()
        self._layout = self._layout and not self._windowed
        self.suspect = True
        if dirty or (committed is None and self.runtime.is_recurrent):
            return
        if committed is None:
            committed = context.seq_pos_max(self.seq_id) + 1 - begin
        if committed > 0:
            self._grown(tokens[:committed])
        n = len(self.ledger)
        reached = context.seq_pos_max(self.seq_id) + 1
        if reached > n and context.seq_rm(self.seq_id, n, -1):
            reached = context.seq_pos_max(self.seq_id) + 1
        if reached == n:
            self.suspect = False
        else:
            self.drop()

    # The last token's logits.

    @property
    def has_row(self) -> bool:
        return self._row_at == len(self.ledger) > 0 and not self.suspect

    @property
    def row_in_context(self) -> bool:
        return self.has_row and self._row is None

    def row(self) -> NDArray[np.float32]:
        """The last token's logits, shape (n_vocab,). Under the runtime's turn; only where has_row."""
        return self.runtime.context.logits((self.row_index,))[0] if self._row is None else self._row

    def save_row(self) -> None:
        """Before the context gives its rows to another. Under the runtime's turn."""
        if self._row_at >= 0 and self._row is None:
            self._row = self.runtime.context.logits((self.row_index,))[0]

    def _drop_row(self) -> None:
        self._row = None
        self._row_at = -1
