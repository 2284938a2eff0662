"""Owns what sessions tell of themselves: the statuses of their calls, and the report that explains them. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from llamacppshim.manifest import ContextManifest
from llamacppshim.reuse import Exact, ReusePlan


class PrefixStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `ensure_prefix` did. In bitwise reuse the last, partial piece is read with what follows the prefix: those
    tokens count as resident, and neither as reused nor as prefilled."""

    reused_tokens: int
    dropped_tokens: int
    prefilled_tokens: int
    prefix_tokens: int
    resident_tokens: int
    available_tokens: int
    stable_byte_hash: str
    stable_token_hash: str
    manifest_digest: str
    plan: ReusePlan


class SuffixStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `prefill_suffix` did. ``reread_tokens``: of the prefix, because a token reached over the seam."""

    suffix_tokens: int
    prefix_tokens: int
    resident_tokens: int
    available_tokens: int
    prefilled_tokens: int
    reread_tokens: int
    manifest_digest: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were really computed, and the seconds it took; checkpoints taken, restored, evicted, refused."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    checkpoints_taken: int = 0
    checkpoints_restored: int = 0
    checkpoints_evicted: int = 0
    checkpoints_too_large: int = 0


class ContextReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is resident in a session, and why. ``str()`` of it is meant to be read."""

    state: Literal["open", "closed", "fatal"]
    cause: str = ""
    model: str = ""
    memory_kind: str
    reuse: str
    exact: Exact
    seq_id: int | None
    n_ctx: int
    resident_tokens: int
    pending_tokens: int
    available_tokens: int
    prefix_tokens: int
    suffix_tokens: int
    generated_tokens: int
    stable_byte_hash: str = ""
    stable_token_hash: str = ""
    manifest: ContextManifest | None = None
    plan: ReusePlan | None = None
    checkpoints: tuple[int, ...] = ()
    checkpoint_bytes: int = 0
    branch_bytes: int = 0
    evicted_tokens: int = 0
    work: Work

    def __str__(self) -> str:
        lines = [
            f"session    {self.state}" + (f" ({self.cause})" if self.cause else ""),
            f"model      {self.model}, {self.memory_kind} memory, reuse {self.reuse}",
            f"resident   {self.resident_tokens:,} of {self.n_ctx:,} tokens: prefix {self.prefix_tokens:,}, "
            f"suffix {self.suffix_tokens:,}, generated {self.generated_tokens:,}"
            + (f"; {self.pending_tokens:,} more to be read before the next token" if self.pending_tokens else "")
            + f"; room for {self.available_tokens:,}",
            f"exact      {self._exactness}",
        ]
        if self.evicted_tokens:
            lines.append(f"evicted    {self.evicted_tokens:,} tokens behind the prefix")
        if self.plan is not None:
            lines.append(f"reused     {self.plan.reuse_tokens:,} tokens ({self.plan.source}): {self.plan.reason}")
        for segment in self.manifest.segments if self.manifest is not None else ():
            lines.append(
                f"           {segment.token_end - segment.token_start:>7,} tokens  {segment.kind}"
                f"{'' if segment.stable else ' (volatile)'}  {segment.byte_hash[:12]}"
            )
        if self.plan is not None and self.plan.source == "branch":
            cost = f"{self.branch_bytes:,} bytes were copied" if self.branch_bytes else "its cells are shared"
            lines.append(f"branch     {cost}")
        if self.checkpoints:
            places = ", ".join(f"{at:,}" for at in self.checkpoints)
            lines.append(f"checkpoint {places} ({self.checkpoint_bytes:,} bytes)")
        work = self.work
        lines.append(
            f"computed   {work.prefill_tokens:,} tokens in prefills ({work.prefill_s:.2f} s), "
            f"{work.decode_tokens:,} one by one ({work.decode_s:.2f} s); "
            f"checkpoints: {work.checkpoints_taken} taken, {work.checkpoints_restored} restored, "
            f"{work.checkpoints_evicted} evicted, {work.checkpoints_too_large} too large"
        )
        return "\n".join(lines)

    @property
    def _exactness(self) -> str:
        if self.evicted_tokens:
            return "no longer: what is left was read with the evicted tokens in sight"
        if not self.resident_tokens:
            return "nothing is held"
        if self.exact == "bitwise":
            return "bitwise: every logit is a cold run's"
        return "token: the last bits may differ from a cold run's"


class ResidentSession(msgspec.Struct, frozen=True, kw_only=True):
    """One of a manager's sessions. ``changing``: it is being opened or evicted."""

    model: str
    workspace: str
    session_id: str | None
    state: Literal["owned", "idle", "changing"]
    idle_s: float
    resident_tokens: int
    context_bytes: int
    checkpoint_bytes: int


class ManagerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager holds, and what it has done. ``str()`` of it is meant to be read.

    Attributes
    ----------
    resident_bytes
        What counts against ``budget_bytes``: the three that follow.
    checkpoint_bytes
        Held by idle sessions, and set aside for owned ones, up to what theirs may grow to.
    snapshot_bytes
        Set aside for the largest snapshot that parking one of the sessions makes; 0 without a store.
    hits, misses
        Requests that found their session resident; that had to open one.
    restored
        Of the misses: those that went on from what was parked under their key.
    parked, dropped, fatal
        Evictions: kept in the store; not kept; of sessions that were unusable. ``dropped`` counts those that failed to
        be parked too; ``park_failures`` says how many, ``last_failure`` why.
    waits, timeouts
        Requests that had to wait; that gave up.
    """

    budget_bytes: int
    resident_bytes: int
    context_bytes: int
    checkpoint_bytes: int
    snapshot_bytes: int
    models: tuple[str, ...]
    sessions: tuple[ResidentSession, ...]
    hits: int = 0
    misses: int = 0
    restored: int = 0
    parked: int = 0
    dropped: int = 0
    fatal: int = 0
    park_failures: int = 0
    last_failure: str = ""
    waits: int = 0
    timeouts: int = 0

    def __str__(self) -> str:
        lines = [
            f"budget     {self.resident_bytes:,} of {self.budget_bytes:,} bytes: contexts {self.context_bytes:,}, "
            f"checkpoints {self.checkpoint_bytes:,}, a snapshot {self.snapshot_bytes:,}",
            f"requests   {self.hits:,} found their session, {self.misses:,} opened one, {self.restored:,} of them from "
            f"the store; {self.waits:,} waited, {self.timeouts:,} in vain",
            f"evicted    {self.parked:,} parked, {self.dropped:,} dropped, {self.fatal:,} unusable"
            + (f"; {self.park_failures:,} failed to be parked: {self.last_failure}" if self.park_failures else ""),
            f"models     {', '.join(self.models) or 'none'}",
        ]
        for one in self.sessions:
            name = one.workspace + ("" if one.session_id is None else f" #{one.session_id}")
            lines.append(
                f"session    {one.state:<8} {one.resident_tokens:>7,} tokens "
                f"{one.context_bytes + one.checkpoint_bytes:>14,} bytes  idle {one.idle_s:,.0f} s  {one.model} {name}"
            )
        return "\n".join(lines)
