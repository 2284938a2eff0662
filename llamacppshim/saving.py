"""Owns the way between a session and a snapshot: what is taken, what has to match before anything is loaded, and what a
session holds afterwards.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llamacppshim._native import Sampler
from llamacppshim.errors import (
    ContextOverflowError,
    NoKVSlotError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
)
from llamacppshim.manifest import Identity
from llamacppshim.reuse import ReusePlan
from llamacppshim.snapshot import AnswerRecord, Contents, Snapshot

if TYPE_CHECKING:
    from llamacppshim.prompt import Prefix
    from llamacppshim.runtime import Runtime
    from llamacppshim.session import Session

# The size of the context does not enter a cell; but see `_rope_depends_on_n_ctx`.
FREE_FIELDS = {"n_ctx"}


def take(session: Session, prefix: Prefix) -> Snapshot:
    """What the session holds. Reads nothing, and changes nothing."""
    assert prefix.manifest is not None
    held, tokens, n_prompt = session.sequence, session.tokens, session.holding.n_prompt
    with session.runtime.turns.lock:
        state = held.save_state()
        row = held.row() if held.has_row else None  # which nobody writes to
    answer = session.answer_in_hand
    record: AnswerRecord | None = None
    draws = b""
    if answer is not None:
        record = AnswerRecord.of(answer.config, answer.sampler.seed, answer.begin, answer.stream, answer.undelivered)
        draws = answer.sampler.draws_save()
    checkpoints = tuple(held.checkpoints.taken)
    contents = Contents(
        manifest=prefix.manifest,
        n_tokens=len(tokens),
        n_resident=len(held),
        n_prefix=session.n_prefix,
        n_prompt=n_prompt,
        n_bos=prefix.n_bos,
        n_vocab=session.runtime.model.n_vocab,
        stage=session.stage,
        n_grid=held.n_grid,
        whole=held.whole,
        layout=held.layout,
        exact="bitwise" if held.is_exact(n_prompt) else "token",
        has_text=prefix.text is not None,
        has_row=row is not None,
        checkpoints=tuple((one.position, one.exact, one.row is not None) for one in checkpoints),
        answer=record,
        replies=tuple(session.replies.within(tokens)),
    )
    return Snapshot(
        contents=contents,
        tokens=tokens,
        state=state,
        text=prefix.text,
        row=row,
        checkpoints=checkpoints,
        draws=draws,
    )


def judge(runtime: Runtime, snapshot: Snapshot) -> None:
    """Whether a snapshot is of this runtime, field by field, and fits it; before anything is touched.

    Raises SnapshotMismatchError with the first field that differs, ContextOverflowError (stage ``restore``).
    """
    own, other = runtime.identity(), snapshot.manifest
    for name in Identity.__struct_fields__:
        expected, actual = getattr(own, name), getattr(other, name)
        if expected == actual or (name in FREE_FIELDS and not _rope_depends_on_n_ctx(runtime, snapshot)):
            continue
        raise SnapshotMismatchError(path=snapshot.path, field=name, expected=expected, actual=actual)
    if snapshot.contents.n_vocab != runtime.model.n_vocab:
        raise SnapshotMismatchError(
            path=snapshot.path, field="n_vocab", expected=runtime.model.n_vocab, actual=snapshot.contents.n_vocab
        )
    if snapshot.n_tokens > runtime.n_ctx_seq + 1:  # one more token may have been chosen than the context holds
        raise ContextOverflowError(
            stage="restore", resident_tokens=0, additional_tokens=snapshot.n_tokens, num_ctx=runtime.n_ctx_seq
        )


def _rope_depends_on_n_ctx(runtime: Runtime, snapshot: Snapshot) -> bool:
    """Models with factors for long contexts rotate differently once the context is longer than the original one."""
    architecture = runtime.model.architecture
    original = runtime.model.metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if original is None:
        return False
    sizes = runtime.identity().n_ctx, snapshot.manifest.n_ctx
    return len({size > int(original) for size in sizes}) > 1


def restore(session: Session, snapshot: Snapshot) -> ReusePlan:
    """Makes the session hold what the snapshot holds. The session is entered, and its sequence its own.

    Where another sequence is free, the state is loaded there and the sequences change places: a failure leaves the
    session as it was. Else the session is emptied first, and the error says so.
    """
    runtime = session.runtime
    judge(runtime, snapshot)
    n, room = snapshot.contents.n_resident, runtime.available_tokens(session.sequence, 0)
    if n > room:
        resident = runtime.n_ctx_seq - room
        raise ContextOverflowError(
            stage="restore", resident_tokens=resident, additional_tokens=n, num_ctx=runtime.n_ctx_seq
        )
    sampler = _sampler(session, snapshot)
    began = time.perf_counter()
    try:
        scratch = runtime.take_sequence()
        if scratch is not None:
            try:
                scratch.load_snapshot(snapshot)
            except NoKVSlotError:
                runtime.release(scratch)  # too little room for both
                scratch = None
            except BaseException:
                runtime.release(scratch)
                raise
        if scratch is not None:
            session.change_sequence(scratch)
        else:
            session.empty()
            try:
                session.sequence.load_snapshot(snapshot)
            except NoKVSlotError as error:
                raise ContextOverflowError(
                    f"restore: too few free cells for {n} tokens; the session was emptied before",
                    stage="restore",
                    resident_tokens=runtime.resident_tokens,
                    additional_tokens=n,
                    num_ctx=runtime.context.n_ctx,
                ) from error
            except SnapshotError as error:
                error.args = (f"{error}; the session was emptied before, since no other sequence is free",)
                raise
    except BaseException:
        if sampler is not None:
            sampler.close()
        raise
    plan = ReusePlan(
        reuse_tokens=snapshot.contents.n_resident,
        source="snapshot",
        reason="restored from " + (snapshot.path or "memory"),
        exact=snapshot.contents.exact if session.sequence.layout else "token",
        seconds=time.perf_counter() - began,
    )
    session.hold(snapshot, plan, sampler)
    return plan


def _sampler(session: Session, snapshot: Snapshot) -> Sampler | None:
    """The sampler of the answer that was in hand, where it stopped."""
    record = snapshot.contents.answer
    if record is None:
        return None
    sampler: Sampler | None = None
    try:
        sampler = Sampler(session.runtime.model, **{**record.full_config().sampling(), "seed": record.seed})
        for token in snapshot.tokens[record.begin :]:
            sampler.accept(int(token))
        sampler.draws_load(snapshot.draws)
    except BaseException as error:
        if sampler is not None:
            sampler.close()
        if isinstance(error, (ValueError, OverflowError)) and not isinstance(error, SnapshotError):
            raise SnapshotCorruptError(f"its answer is not one of its sampler: {error}", path=snapshot.path) from error
        raise
    return sampler
