"""Owns the decision how much of what is resident may be kept: a pure function of tokens and of facts of the memory.

Memories differ in what a cut to N tokens needs. Attention: nothing. A sliding window: the cells that position N looks
back on, which the window may have lost. Recurrent parts cannot be cut at all. Where a cut is not possible, a checkpoint
(a saved state of that part) at or before N may serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from llamacppshim.ledger import Tokens

Source = Literal["live", "checkpoint", "snapshot", "branch", "none"]
Exact = Literal["bitwise", "token"]
MemoryKind = Literal["attention", "swa", "recurrent", "hybrid", "none"]


class Difference(NamedTuple):
    """Where two token lists part."""

    position: int
    resident: int
    wanted: int


class ReusePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What of the resident tokens is kept for a prompt, and why not more.

    ``exact``: ``bitwise`` where the kept cells are those that a cold run would have computed, bit for bit.
    """

    reuse_tokens: int
    source: Source
    reason: str
    first_difference: Difference | None = None
    exact: Exact = "bitwise"
    seconds: float = 0.0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one sequence's memory.

    n_swa         window in tokens; 0 where every cell is kept
    pos_min       of the cells that can be lost; 0 where none can
    n_ubatch      piece of a cold prefill
    n_grid        leading tokens whose cells are a cold run's, in whole pieces
    whole         where a last, shorter piece that follows these ends; -1 where there is none
    keeps_layout  a cut or a restore leaves the cells where a cold run would have put them
    layout        they are there now
    suspect       a call that failed or was interrupted has left what cannot be told: only a checkpoint, or nothing, can
                  be trusted
    """

    kind: MemoryKind
    n_swa: int
    pos_min: int
    n_ubatch: int
    n_grid: int
    whole: int
    keeps_layout: bool
    layout: bool
    suspect: bool = False

    @property
    def can_be_cut(self) -> bool:
        return self.kind in ("attention", "swa")


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def first_difference(resident: Tokens, wanted: Tokens, common: int) -> Difference | None:
    if common >= min(len(resident), len(wanted)):
        return None
    return Difference(common, int(resident[common]), int(wanted[common]))


def plan(
    resident: Tokens,
    wanted: Tokens,
    memory: Memory,
    checkpoints: Sequence[tuple[int, bool]],
    *,
    limit: int,
    bitwise: bool,
) -> ReusePlan:
    """How many of the wanted tokens need not be read.

    Parameters
    ----------
    resident
        What the memory holds.
    checkpoints
        Positions of the saved states of this sequence, rising, and whether each is a cold run's to the bit. All lie
        within `resident`.
    limit
        Most tokens that may be kept: less than ``len(wanted)`` where the last one's logits are needed and gone.
    bitwise
        Keep only what a cold run would have computed in the same pieces.
    """
    common = common_prefix(resident, wanted)
    difference = first_difference(resident, wanted, common)
    keep = min(common, limit)
    why = _why_not_more(resident, wanted, common, keep, difference)
    if bitwise and not keep == len(wanted) == memory.whole:
        grid = min(keep, memory.n_grid) // memory.n_ubatch * memory.n_ubatch
        if grid < keep:
            why = _and(why, f"bitwise reuse keeps whole pieces of {memory.n_ubatch} that were read as such")
        keep = grid
    everything = keep == len(resident) and not memory.suspect

    if keep == 0:
        reason = why if len(resident) else "nothing is resident"
        return ReusePlan(reuse_tokens=0, source="none", reason=reason, first_difference=difference)
    obstacle = "" if everything else _obstacle(keep, len(resident), memory)
    if not obstacle:
        exact = _exact(memory, keep, moved=keep < len(resident))
        return ReusePlan(reuse_tokens=keep, source="live", reason=why, first_difference=difference, exact=exact)

    why = _and(why, obstacle)
    usable = [position for position, exact in checkpoints if position <= keep and (exact or not bitwise)]
    if not usable:
        return ReusePlan(
            reuse_tokens=0,
            source="none",
            reason=_and(why, f"no checkpoint at or before {keep}"),
            first_difference=difference,
        )
    position = usable[-1]
    is_exact = dict(checkpoints)[position] and memory.keeps_layout
    return ReusePlan(
        reuse_tokens=position,
        source="checkpoint",
        reason=_and(why, f"the nearest checkpoint is at {position}"),
        first_difference=difference,
        exact="bitwise" if is_exact else "token",
    )


def _and(why: str, more: str) -> str:
    return f"{why}; {more}" if why else more


def _why_not_more(resident: Tokens, wanted: Tokens, common: int, keep: int, difference: Difference | None) -> str:
    if keep < common:
        return "the last token is read again for its logits"
    if difference is not None:
        return f"token {difference.position} is {difference.resident}, wanted {difference.wanted}"
    if common == len(wanted):
        return "all that is wanted is resident"
    return f"only {common} tokens are resident"


def _obstacle(keep: int, n_resident: int, memory: Memory) -> str:
    """Why the sequence cannot be cut to `keep` tokens; empty where it can."""
    if memory.suspect:
        return "a call failed or was interrupted inside, and what the memory holds since cannot be told"
    if memory.kind in ("recurrent", "hybrid"):
        return f"a {memory.kind} memory cannot be cut from {n_resident} to {keep}"
    needed = max(0, keep - memory.n_swa + 1)
    if memory.kind == "swa" and memory.n_swa and memory.pos_min > needed:
        return f"the window of {memory.n_swa} needs positions from {needed}, it holds them from {memory.pos_min}"
    return ""


def _exact(memory: Memory, keep: int, *, moved: bool) -> Exact:
    in_grid = keep == memory.whole or (keep <= memory.n_grid and keep % memory.n_ubatch == 0)
    in_place = memory.layout and (memory.keeps_layout or not moved)
    return "bitwise" if in_grid and in_place else "token"
