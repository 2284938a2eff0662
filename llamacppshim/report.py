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
            f"exact      {self.exact}: "
            + (
                "every logit is a cold run's"
                if self.exact == "bitwise"
                else "the last bits may differ from a cold run's"
            ),
        ]
        if self.evicted_tokens:
            lines.append(f"evicted    {self.evicted_tokens:,} tokens behind the prefix; the rest was read with them")
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
