"""Owns the session: a stable prefix, a suffix for this turn, an answer, and what of them need not be read again."""

from __future__ import annotations

import codecs
import contextvars
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llamacppshim import saving
from llamacppshim._native import Sampler
from llamacppshim.answer import Chunk, Completion, completion_of
from llamacppshim.closing import Closing
from llamacppshim.config import DecodeConfig, require_timeout
from llamacppshim.errors import (
    BusyError,
    ContextOverflowError,
    DecodeAbortedError,
    DecodeFatalError,
    ForkedError,
    InternalError,
    InvalidArgumentError,
    ManifestMismatchError,
    OutOfRangeError,
    SessionClosedError,
    SessionFatalError,
    SnapshotError,
    UnsupportedFeatureError,
)
from llamacppshim.formats import Messages
from llamacppshim.generate import Answer, Step
from llamacppshim.holding import Holding, Mark
from llamacppshim.ledger import Tokens, as_tokens
from llamacppshim.manifest import Identity
from llamacppshim.prompt import Prefix, Prompt
from llamacppshim.reading import PromptReader
from llamacppshim.replies import Replies
from llamacppshim.report import ContextReport, PrefixStatus, SuffixStatus, Work
from llamacppshim.reuse import ReusePlan
from llamacppshim.sequence import Progress, ResidentSequence
from llamacppshim.snapshot import Snapshot

if TYPE_CHECKING:
    from llamacppshim.chat import Reply
    from llamacppshim.runtime import Runtime

POLL_S = 0.01


class Session(Closing):
    """One conversation on a runtime, made by `Runtime.session`. One thread at a time; `cancel`, `explain` from any."""

    _kind = "session"

    def __init__(self, runtime: Runtime, sequence: ResidentSequence) -> None:
        self._pid = os.getpid()
        self.runtime = runtime
        self.holding = Holding(runtime, sequence)
        self._prompts = PromptReader(runtime)
        self._mutex = threading.Lock()
        self._inside: _Call | None = None
        self._closing = False  # a close waits for the call that is inside
        self._state: Literal["open", "closed", "fatal"] = "open"
        self._cause: BaseException | None = None
        self._stage: Literal["empty", "prefix", "suffix"] = "empty"
        self._prefix: Prefix | None = None
        self._n_prefix = 0
        self._identity: Identity | None = None
        self._plan: ReusePlan | None = None
        self._answer: Answer | None = None
        self._branch_bytes = 0
        self._replies = Replies()
        self._cut_short = False  # the last prefix was not read to its end
        self.n_changes = 0  # a generator that finds another number has been overtaken

    # The prefix.

    def ensure_prefix(
        self,
        prompt: Prompt,
        *,
        parse_special: bool = False,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> PrefixStatus:
        """Hold exactly this prefix, reading only what is not resident already.

        What followed the resident part (an old suffix, generated tokens) is dropped. Nothing is kept where the model,
        the tokenizer, the template, the runtime's settings, the adapters or BOS are not those it was read with.

        Parameters
        ----------
        prompt
            Text; or a sequence of texts, the segments of one text, each of which has to begin at a token; or tokens,
            which are taken as they are. A text gets the model's BOS, once.
        parse_special
            Whether the texts of special tokens in the text stand for these tokens.
        timeout_s
            Seconds after which the prefill is cancelled.
        progress
            Told (tokens read, tokens to read) after each piece.

        Raises
        ------
        ContextOverflowError   the prefix does not fit; nothing has changed
        ManifestMismatchError  a token reaches over the boundary of two segments; nothing has changed
        DecodeAbortedError     cancelled, or the time was over: whole pieces stay, and need not be read again
        DecodeError            of the context; what is proven stays
        BusyError, SessionClosedError, SessionFatalError
        """
        with self.entered(timeout_s):
            self._require_not_stopped()
            prefix = self._prompts.prefix(prompt, parse_special, self._prefix)
            n, n_before = len(prefix.tokens), len(self.sequence)
            drift = self._drift()
            reusable = 0 if drift else self.sequence.plan(prefix.tokens, n).reuse_tokens
            room = self.runtime.available_tokens(self.sequence, reusable)
            if n - reusable > room:
                raise ContextOverflowError(
                    stage="prefix",
                    resident_tokens=self.runtime.n_ctx_seq - room,
                    additional_tokens=n - reusable,
                    num_ctx=self.runtime.n_ctx_seq,
                )
            self._begin_change()
            self.sequence.epoch = self.runtime.epoch
            self._identity = self.runtime.identity()
            if drift:
                with self.runtime.turns.lock:
                    self.sequence.drop()
            stored = self._from_store(prefix, reusable)
            try:
                plan, n_read = self._read_prefix(prefix, progress, drift, stored)
            except BaseException:
                # The prefix was not finished: what is proven is all that the session holds.
                self.holding.cut_to_held()
                self._n_prefix, self._stage, self._prefix = len(self.sequence), "empty", None
                self._cut_short = True
                raise
            self._prompts.describe(prefix)
            self._n_prefix, self._stage, self._prefix = n, "prefix", prefix
            return PrefixStatus(
                reused_tokens=plan.reuse_tokens,
                dropped_tokens=max(0, n_before - plan.reuse_tokens),
                prefilled_tokens=n_read,
                prefix_tokens=n,
                resident_tokens=n,
                available_tokens=self.holding.available_tokens,
                stable_byte_hash=prefix.byte_hash,
                stable_token_hash=prefix.token_hash,
                manifest_digest=prefix.digest,
                plan=plan,
            )

    def _read_prefix(
        self, prefix: Prefix, progress: Progress | None, drift: str, stored: ReusePlan | None
    ) -> tuple[ReusePlan, int]:
        holding, held, n = self.holding, self.sequence, len(prefix.tokens)
        holding.replace(prefix.tokens)
        plan = holding.keep()
        if stored is not None:
            plan = _as_stored(plan, stored)
        elif drift:
            plan = msgspec.structs.replace(plan, reason=drift)
        self._plan = plan
        end = n
        if holding.bitwise and plan.reuse_tokens < n:
            end = n - n % self.runtime.n_ubatch  # the last piece is read with what follows
        n_read = holding.read(
            end, "prefix", want_row=end == n, marks=holding.prefix_marks(len(held)), progress=progress
        )
        if len(held) == end:
            held.take_checkpoint()
        return plan, n_read

    def _from_store(self, prefix: Prefix, live: int) -> ReusePlan | None:
        """Restores what was stored of the prompt, where that is faster than reading what it adds to the tokens that are
        live."""
        runtime = self.runtime
        if runtime.store is None or len(prefix.tokens) == 0:
            return None
        try:
            match = runtime.store.find(runtime.identity(), prefix.tokens)
            if match is None or not runtime.speed.restoring_is_faster(match.n_bytes, match.common - live):
                return None
            snapshot = runtime.store.load(match.name)
            plan = saving.restore(self, snapshot)
        except (SnapshotError, ContextOverflowError, InternalError):
            return None  # damaged, gone, or of no use here after all: it is read
        runtime.speed.has_restored(snapshot.nbytes, plan.seconds)
        return plan

    def plan(self, prompt: Prompt, *, parse_special: bool = False) -> ReusePlan:
        """What `ensure_prefix` would keep for this prompt of what is live. Changes nothing."""
        with self.entered() as held:
            prefix = self._prompts.prefix(prompt, parse_special, self._prefix)
            if drift := self._drift():
                return ReusePlan(reuse_tokens=0, source="none", reason=drift)
            return held.plan(prefix.tokens, len(prefix.tokens))

    # The suffix.

    def prefill_suffix(
        self,
        prompt: Prompt,
        *,
        append: bool = False,
        parse_special: bool = False,
        manifest_digest: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> SuffixStatus:
        """Read this turn's text after the prefix.

        Parameters
        ----------
        prompt
            Text or tokens; may be empty. Never gets a BOS. Text is tokenised together with the prefix's.
        append
            Go on after what was read and generated since `ensure_prefix`, instead of right after the prefix.
        manifest_digest
            That of the prefix it was built for; any prefix by default.

        Raises
        ------
        ManifestMismatchError  no prefix, another one, one that already has a suffix, or one of another identity
        TokenMismatchError     tokens of prefix and suffix would merge (``RuntimeConfig.seam`` says what else to do)
        ContextOverflowError   it does not fit
        DecodeAbortedError, DecodeError, BusyError, SessionClosedError, SessionFatalError  as `ensure_prefix`
            After each of them the session is where it was before the call; what of the suffix was read is found again.
        """
        with self.entered(timeout_s):
            self._require_not_stopped()
            suffix = self.begin_suffix(
                prompt, append=append, parse_special=parse_special, manifest_digest=manifest_digest
            )
            try:
                marks = self.holding.suffix_marks(suffix.begin)
                n_read = self.holding.settle("suffix", marks=marks, progress=progress)
            except BaseException:
                self.undo_suffix(suffix)
                raise
            assert self._prefix is not None
            return SuffixStatus(
                suffix_tokens=len(self.holding.target) - len(suffix.mark.tokens),
                prefix_tokens=self._n_prefix,
                resident_tokens=len(self.holding.target),
                available_tokens=self.holding.available_tokens,
                prefilled_tokens=n_read,
                reread_tokens=len(suffix.mark.tokens) - suffix.begin,
                manifest_digest=self._prefix.digest,
            )

    def begin_suffix(
        self, prompt: Prompt, *, append: bool, parse_special: bool, manifest_digest: str | None = None
    ) -> Suffix:
        """The session is meant to hold it, and reads it later. Entered."""
        self._require_prefix(append, manifest_digest)
        at = len(self.holding.target)
        is_next = at == self._n_prefix
        n_back, tokens = self._prompts.suffix(prompt, parse_special, self._prefix if is_next else None, self.tokens)
        begin = at - n_back
        n = begin + len(tokens)
        if append and n_back == 0 and n > self.runtime.n_ctx_seq and (n_gone := self.make_room(len(tokens))):
            at, begin, n = at - n_gone, begin - n_gone, n - n_gone
        if n > self.runtime.n_ctx_seq:
            raise ContextOverflowError(
                stage="suffix", resident_tokens=at, additional_tokens=n - at, num_ctx=self.runtime.n_ctx_seq
            )
        if n == 0:
            raise InvalidArgumentError("there is nothing to go on from: the session holds no token", field="prefix")
        suffix = Suffix(self.holding.mark(), self._stage, begin)
        self._begin_change()
        if append and n_back == 0 and len(self.sequence) == at:
            self.sequence.take_checkpoint()  # the start of the newest turn
        self.holding.replace(tokens, keep=begin)
        self._stage = "suffix"
        return suffix

    def make_room(self, n_tokens: int) -> int:
        """Drops tokens from behind the prefix, if that is allowed and enough; how many. Entered."""
        n_gone = self.holding.evict(self._n_prefix, n_tokens)
        if n_gone and self._answer is not None:
            self._answer.moved(self._n_prefix, n_gone)
        return n_gone

    def undo_suffix(self, suffix: Suffix) -> None:
        """As if `begin_suffix` had not been. Entered."""
        self.holding.undo(suffix.mark)
        self._stage = suffix.stage

    # The answer.

    def decode(self, config: DecodeConfig | None = None, **overrides: Any) -> Iterator[Chunk]:
        """Generate, a chunk a token.

        Leaving the loop ends it; a later `decode` with the same sampling goes on as if it had not been left.

        Parameters
        ----------
        config
            `DecodeConfig`; ``overrides`` are its fields, and win.

        Returns
        -------
        Chunks, the last with its ``finish_reason``: ``stop`` (an end-of-generation token, or a stop text), ``length``
        (max_tokens), ``cancelled`` (or timeout_s, or another call changed what is held), ``context_full``.

        Raises
        ------
        ContextOverflowError  other sessions have taken the cells (kv_unified)
        DecodeError           of the context; the session goes on from what is proven
        GrammarError, InvalidArgumentError, OutOfRangeError  the configuration
        ManifestMismatchError  the last `ensure_prefix` was cut short, or the identity is another by now
        """
        return Step(self, self.runtime.decode_config(config, overrides)).chunks()

    def collect(self, config: DecodeConfig | None = None, **overrides: Any) -> Completion:
        """The whole answer of `decode`."""
        began = time.perf_counter()
        return completion_of(((chunk, time.perf_counter()) for chunk in self.decode(config, **overrides)), began)

    async def adecode(self, config: DecodeConfig | None = None, **overrides: Any) -> AsyncIterator[Chunk]:
        """`decode`, each token in a thread of the event loop's pool. Cancelling the task cancels the decode."""
        import asyncio  # takes a third of the time to import this package, and most have no use for it

        chunks = self.decode(config, **overrides)
        while True:
            # No task: the end of the loop cancels tasks one by one, this one too, while its thread goes on.
            within = functools.partial(contextvars.copy_context().run, next, chunks, None)
            step = asyncio.get_running_loop().run_in_executor(None, within)
            try:
                chunk = await asyncio.shield(step)
            except asyncio.CancelledError:
                self.cancel()
                while not step.done():  # the task may be cancelled again meanwhile
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([step])
                self.sequence.stop.cancelled = False
                if step.exception() is None and (late := step.result()) is not None and self._answer is not None:
                    self._answer.undelivered = late if late.text or late.tokens else None
                raise
            if chunk is None:
                return
            yield chunk

    def chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt_format: str | None = None,
        template: Mapping[str, Any] | None = None,
        config: DecodeConfig | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Reply:
        """Answer a whole conversation, reading only what of it is not resident.

        What users, files and tools have said is never parsed for special tokens. Replies stay as they were generated:
        their text in a later call stands for the same tokens.

        Parameters
        ----------
        messages, tools
            As `ChatTemplate.render` takes them: the whole conversation, each time.
        prompt_format
            ``model`` (the model's own template), ``chatml``, ``llama3`` or ``raw``; None: as the profile says, else the
            model's.
        template
            What the template is told besides: ``enable_thinking``, ``tool_choice``, variables of its own.
        config
            `DecodeConfig`; ``overrides`` are its fields, and win. The template's stop texts come in addition, and the
            grammar of its tool calls where no other is given.
        timeout_s, progress
            As for `ensure_prefix`, which this calls before it returns.

        Returns
        -------
        An iterator of `Chunk`, with ``status`` (its plan says at which message the conversation has drifted), ``text``
        and ``message`` (content, reasoning and tool calls, so far).

        Raises
        ------
        UnsupportedFeatureError  another format, or tools where there is no protocol for them
        InvalidArgumentError, TemplateError  messages that are none, or that the template refuses
        and as `ensure_prefix` and `decode`
        """
        from llamacppshim.chat import chat

        return chat(
            self,
            messages,
            tools,
            prompt_format=prompt_format,
            template=template,
            config=config,
            timeout_s=timeout_s,
            progress=progress,
            **overrides,
        )

    @property
    def replies(self) -> Replies:
        """Those of `chat`, as they were generated."""
        return self._replies

    def remember_reply(self, text: str, tokens: Sequence[int], at: int) -> None:
        """As it was generated, after so many tokens; not where a stop text was cut off."""
        data = b"".join(self.runtime.model.token_piece(token, special=False) for token in tokens)
        # Bytes that are no text, an incomplete character at the end for instance, are replaced or left out in it.
        whole = data.decode("utf-8", "replace")
        begun = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        if text and text in (whole, begun):
            self._replies.remember(text, at, as_tokens(list(tokens)))

    def tell(self, plan: ReusePlan) -> None:
        """More is known of the last plan."""
        self._plan = plan

    def cancel(self) -> None:
        """End the running call, or if none runs, the next one. From any thread.

        A prefill raises DecodeAbortedError, an answer ends with ``cancelled``. At once on memories that tell what was
        computed (attention, sliding window, on the CPU), else after the running piece.
        """
        if os.getpid() == self._pid and self._state == "open":
            stop = self.sequence.stop
            stop.cancelled = True
            self.runtime.interrupt(stop)

    def answer_for(self, config: DecodeConfig) -> Answer:
        """The last answer where nothing has happened since and the sampling is the same; else a new one, which
        `take_up` makes the session's. Changes nothing. Entered."""
        if self._cut_short:
            raise ManifestMismatchError("the prefix was not read to its end: call ensure_prefix again", field="prefix")
        self._require_same_identity()
        at = len(self.holding.target)
        if at == 0:
            raise InvalidArgumentError("there is nothing to go on from: the session holds no token", field="prefix")
        last = self.answer_in_hand
        if last is not None and last.goes_on_with(config):
            return last
        return Answer(config, Sampler(self.runtime.model, **config.sampling()), at)

    def take_up(self, answer: Answer, config: DecodeConfig) -> None:
        """This answer is generated from now on. Entered."""
        self.n_changes += 1
        if answer is not self._answer:
            self._drop_answer()
            self._answer = answer
        answer.config = config
        answer.stream.stopped = False

    # Saving, restoring, branching.

    def snapshot(self) -> Snapshot:
        """What the session holds as a value: tokens, state, checkpoints, the last logits, the answer in hand.

        Cost: one copy of the state, and one pass of a fast hash. Tokens that are still to be read (after a cancel, or
        the last one of an answer) are not read for it.

        Raises
        ------
        ManifestMismatchError    no prefix, or one of another identity
        UnsupportedFeatureError  tokens were evicted from its middle
        """
        with self.entered():
            if self._prefix is None:
                raise ManifestMismatchError("there is no prefix: call ensure_prefix first", field="prefix")
            self._require_same_identity()
            self.holding.align()
            if self.sequence.evicted_tokens:
                raise UnsupportedFeatureError(
                    "a session that has lost its middle is no prompt's state, and is not saved", feature="snapshot"
                )
            return saving.take(self, self._prefix)

    def restore(self, snapshot: Snapshot) -> ReusePlan:
        """Hold what the snapshot's session held, and go on as that one would.

        Loaded into another sequence where one is free, so that a failure leaves this session as it was; else this one
        is emptied first, and the error says so.

        Raises
        ------
        SnapshotMismatchError  the first field of the identity that differs; nothing has changed
        ContextOverflowError   it does not fit (stage ``restore``)
        SnapshotCorruptError   its state is damaged
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"a Snapshot is needed, not {type(snapshot).__name__}")
        with self.entered():
            return saving.restore(self, snapshot)

    def branch(self, n: int = 1, *, at: int | None = None) -> list[Session]:
        """So many sessions that hold what this one holds, each going on by itself. Reads nothing.

        With ``kv_unified`` they share the cells; else each gets a copy. They may be closed in any order, and may branch
        themselves. An answer in hand goes on in each as it would here.

        Parameters
        ----------
        at
            Tokens to share, fewer than all where the memory can be cut there or has a checkpoint.

        Raises
        ------
        SessionUnavailableError  fewer free sequences; none was made
        UnsupportedFeatureError  this memory cannot be cut at ``at``
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidArgumentError(field="n", expected="at least 1", actual=n)
        with self.entered() as held:
            self._require_same_identity()
            self.holding.align()
            whole = len(self.holding.target)
            at = whole if at is None else at
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= whole:
                raise OutOfRangeError(f"at {at} is outside 0..{whole}", field="at", expected=whole, actual=at)
            sequences = self.runtime.take_sequences(n)
            children: list[Session] = []
            try:
                for sequence in sequences:
                    with self.runtime.turns.lock:
                        n_bytes = sequence.copy_from(held)
                    children.append(self._child(sequence, at, n_bytes))
            except BaseException:
                for child in children:
                    child.close()
                for sequence in sequences[len(children) :]:
                    self.runtime.release(sequence)
                raise
            for child in children:
                self.runtime.adopt(child)
            return children

    def _child(self, sequence: ResidentSequence, at: int, n_bytes: int) -> Session:
        tokens, whole = self.holding.target.tokens[:at], len(self.holding.target)
        plan = ReusePlan(reuse_tokens=len(sequence), source="branch", reason="")
        if at < len(sequence):
            plan = sequence.prepare(tokens, at)
            if plan.reuse_tokens < at and not self.holding.bitwise:
                raise UnsupportedFeatureError(f"no branch at {at}: {plan.reason}", feature="branch below the tip")
        child = Session(self.runtime, sequence)
        child.holding.replace(tokens)
        child.holding.n_prompt = min(at, self.holding.n_prompt)
        child._identity, child._n_prefix, child._cut_short = self._identity, min(at, self._n_prefix), self._cut_short
        if at >= self._n_prefix:
            child._stage, child._prefix = "prefix" if at == self._n_prefix else self._stage, self._prefix
        exact: Literal["bitwise", "token"] = "bitwise" if child.holding.is_exact else "token"
        reason = f"branched at {at} of {whole} tokens" + (f"; {plan.reason}" if plan.reason else "")
        child._plan = ReusePlan(reuse_tokens=plan.reuse_tokens, source="branch", reason=reason, exact=exact)
        child._branch_bytes = n_bytes
        child._replies = self._replies.copy()
        if at == whole and self.answer_in_hand is not None:
            child._answer = self.answer_in_hand.copy()
        return child

    def park(self) -> None:
        """Keep a snapshot in the runtime's store. Nothing to keep is no error.

        Raises
        ------
        InvalidArgumentError  the runtime has no store
        SnapshotError         it cannot be written
        """
        if self.runtime.store is None:
            raise InvalidArgumentError("the runtime was opened without a store", field="store")
        if self._prefix is not None:
            self.runtime.store.put(self.snapshot())

    # What saving and stepping need; the caller has entered the session.

    @property
    def sequence(self) -> ResidentSequence:
        return self.holding.sequence

    @property
    def n_prefix(self) -> int:
        return self._n_prefix

    @property
    def stage(self) -> Literal["empty", "prefix", "suffix"]:
        return self._stage

    @property
    def answer_in_hand(self) -> Answer | None:
        """The last answer, if nothing has happened since."""
        answer = self._answer
        return answer if answer is not None and answer.end == len(self.holding.target) else None

    def change_sequence(self, other: ResidentSequence) -> None:
        """Go on with another sequence, and let go of the own one. Its work, and a cancel, come along."""
        old = self.sequence
        other.counters, other.stop, other.epoch = old.counters, old.stop, old.epoch
        self.holding.sequence = other
        self.runtime.release(old)

    def empty(self) -> None:
        """Hold nothing."""
        self._begin_change()
        with self.runtime.turns.lock:
            self.sequence.drop()
        self.holding.cut_to_held()
        self._n_prefix, self._stage, self._prefix = 0, "empty", None

    def hold(self, snapshot: Snapshot, plan: ReusePlan, sampler: Sampler | None) -> None:
        """The sequence holds the snapshot's state: so does the session."""
        contents = snapshot.contents
        self._begin_change()
        self.holding.replace(snapshot.tokens)
        self.holding.n_prompt = contents.n_prompt
        self._n_prefix, self._stage = contents.n_prefix, contents.stage
        text = None if snapshot.text is None else bytes(snapshot.text)
        self._prefix = Prefix(None, text, snapshot.tokens[: contents.n_prefix].copy(), contents.n_bos)
        self._prefix.manifest = contents.manifest
        self._prompts.describe(self._prefix)
        self._identity, self._plan = self.runtime.identity(), plan
        if contents.answer is not None and sampler is not None:
            record = contents.answer
            self._answer = Answer(record.full_config(), sampler, record.begin, len(snapshot.tokens))
            self._answer.stream.resume(record.pending, record.said)
            self._answer.undelivered = record.late_chunk()
        for said, begin, end in contents.replies:
            self._replies.remember(said, begin, snapshot.tokens[begin:end].copy())

    # What it is.

    def explain(self) -> ContextReport:
        """What is resident and why. Also of a session that is closed or fatal, and from any thread."""
        holding, held = self.holding, self.sequence
        counters, checkpoints = held.counters, held.checkpoints
        is_open = self._state == "open"
        n, resident = len(holding.target), len(held) if is_open else 0
        return ContextReport(
            state=self._state,
            cause="" if self._cause is None else str(self._cause),
            model=self.runtime.model_name,
            memory_kind=self.runtime.memory_kind,
            reuse=self.runtime.config.reuse,
            exact="bitwise" if is_open and holding.is_exact else "token",
            seq_id=held.seq_id if is_open else None,
            n_ctx=self.runtime.n_ctx_seq,
            resident_tokens=resident,
            pending_tokens=max(0, n - resident) if is_open else 0,
            available_tokens=holding.available_tokens if is_open else 0,
            prefix_tokens=self._n_prefix,
            suffix_tokens=holding.n_prompt - self._n_prefix,
            generated_tokens=n - holding.n_prompt,
            stable_byte_hash=self._prefix.byte_hash if self._prefix else "",
            stable_token_hash=self._prefix.token_hash if self._prefix else "",
            manifest=self._prefix.manifest if self._prefix else None,
            plan=self._plan,
            checkpoints=tuple(one.position for one in list(checkpoints.taken)) if is_open else (),
            checkpoint_bytes=checkpoints.nbytes if is_open else 0,
            branch_bytes=self._branch_bytes if is_open else 0,
            evicted_tokens=held.evicted_tokens if is_open else 0,
            work=Work(
                prefill_tokens=counters.prefill_tokens,
                prefill_s=counters.prefill_s,
                decode_tokens=counters.decode_tokens,
                decode_s=counters.decode_s,
                checkpoints_taken=counters.checkpoints_taken,
                checkpoints_restored=counters.checkpoints_restored,
                checkpoints_evicted=checkpoints.evicted,
                checkpoints_too_large=checkpoints.too_large,
            ),
        )

    @property
    def tokens(self) -> Tokens:
        """The tokens the session holds: prefix, suffix, generated ones. A copy."""
        return self.holding.target.copy()

    @property
    def closed(self) -> bool:
        return self._state != "open"

    def close(self, *, park: bool = False) -> None:
        """Free the sequence. Safe to repeat; a call that runs in another thread is cancelled and waited for.

        Parameters
        ----------
        park
            Keep a snapshot in the runtime's store first, where the next `ensure_prefix` finds it. SnapshotError where
            it cannot be written; the session is still open then.
        """
        if self._state == "closed" or os.getpid() != self._pid:
            return
        if park and self._state == "open":
            self.park()
        call = _Call(sys._getframe())
        try:
            while (other := self._enter(call)) is not None:
                if other.thread == call.thread:
                    raise BusyError("the session cannot be closed from inside one of its calls")
                self._closing = True
                self.cancel()
                time.sleep(POLL_S)
            self._end("closed")
        finally:
            self._closing = False
            if self._inside is call:
                self._inside = None
            del call  # it holds this frame, which would hold it

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") != "open" or sys.is_finalizing() or os.getpid() != self._pid:
            return
        if not self.runtime.closed:
            warnings.warn("a session was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Session {self._state} {len(self.sequence)} of {self.runtime.n_ctx_seq} tokens resident>"

    # Entering.

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this session was made before os.fork(), and this is the child")
        if self._state == "fatal":
            raise SessionFatalError(cause=self._cause)
        if self._state == "closed":
            raise SessionClosedError(reason="its runtime is closed" if self.runtime.closed else "session is closed")

    def _enter(self, call: _Call) -> _Call | None:
        """Takes the session for a call; the one that has it, where there is one."""
        with self._mutex:
            other = self._inside
            if other is not None and other.runs_beside(call):
                return other
            self._inside = call
            return None

    def entered(
        self, timeout_s: float | None = None, *, frame: FrameType | None = None
    ) -> AbstractContextManager[ResidentSequence]:
        """One call at a time. What makes the context unusable makes the session fatal.

        Parameters
        ----------
        frame
            Of the function that the call is over with, where that is not the one that calls this.
        """
        return self._entered(timeout_s, _Call(sys._getframe(1) if frame is None else frame))

    @contextmanager
    def _entered(self, timeout_s: float | None, call: _Call) -> Iterator[ResidentSequence]:
        self._require_open()
        require_timeout(timeout_s)
        try:
            other = self._enter(call)
            if self._closing:  # else a close would wait for as long as others come
                raise SessionClosedError(reason="session is being closed")
            if other is not None:
                who = "this thread" if other.thread == call.thread else "another thread"
                raise BusyError(f"{who} is inside this session")
            self._require_open()
            stop = self.sequence.stop
            stop.begin(timeout_s)
            try:
                yield self.sequence
            except DecodeAbortedError as error:
                if stop.requested:
                    error.args = (stop.why(len(self.sequence)),)
                raise
            except DecodeFatalError as error:
                self.fail(error)
                raise
        finally:
            if self._inside is call:
                self._inside = None

    def fail(self, error: BaseException) -> None:
        """Fatal, where the error says that nothing can be trusted. Entered."""
        if type(error) is DecodeFatalError and self._state == "open":
            self._cause = error
            self._end("fatal")

    def _require_not_stopped(self) -> None:
        """A cancel that came between two calls is for the second, whether it has anything to read or not."""
        if self.sequence.stop.requested:
            raise DecodeAbortedError

    def _end(self, state: Literal["closed", "fatal"]) -> None:
        was_open, self._state = self._state == "open", state
        self._drop_answer()
        if was_open:
            self.sequence.checkpoints.clear()
            if not self.runtime.closed:
                self.runtime.release(self.sequence)

    def _begin_change(self) -> None:
        """What was generated, if anything, is no longer taken up."""
        self.n_changes += 1
        self._cut_short = False
        self._drop_answer()

    def _drop_answer(self) -> None:
        if self._answer is not None:
            self._answer.sampler.close()
            self._answer = None

    # Identity.

    def _drift(self) -> str:
        """Why what is held must not be used any more; empty where it may."""
        if self._identity is None or len(self.sequence) == 0:
            return ""
        field = self._identity.compatible(self.runtime.identity())
        return "" if field is None else f"{field} is not what the resident tokens were read with"

    def _require_prefix(self, append: bool, manifest_digest: str | None) -> None:
        if self._prefix is None:
            raise ManifestMismatchError(
                "there is no prefix: call ensure_prefix first", field="prefix", expected="a prefix", actual=None
            )
        n_more = len(self.holding.target) - self._n_prefix
        if not append and (self._stage == "suffix" or n_more):
            raise ManifestMismatchError(
                "the prefix already has a suffix: call ensure_prefix again, or use append=True",
                field="suffix",
                expected=None,
                actual=f"{n_more} tokens",
            )
        own = self._prefix.digest
        if manifest_digest is not None and manifest_digest != own:
            raise ManifestMismatchError(field="manifest_digest", expected=manifest_digest, actual=own)
        self._require_same_identity()

    def _require_same_identity(self) -> None:
        if self._identity is None:
            return
        now = self.runtime.identity()
        if (field := self._identity.compatible(now)) is not None:
            expected, actual = getattr(self._identity, field), getattr(now, field)
            raise ManifestMismatchError(field=field, expected=expected, actual=actual)
        self.sequence.epoch = self.runtime.epoch  # others came, and went again before anything was computed


class _Call:
    """A call that is inside a session: a frame of its thread.

    Whether it still is there, the thread's stack says: an interrupt can come between a block's end and its context
    manager's first line, and then nothing else tells that the call is over. The frame itself is held, since another
    one may be given the address of one that is gone.
    """

    __slots__ = ("_frame", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self._frame = frame

    def runs_beside(self, other: _Call) -> bool:
        """Whether it is not over. Where the other has the same frame, it is: a function enters a session once."""
        if self._frame is other._frame:
            return False
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class Suffix:
    """A suffix that was begun: what was held before, and at which token it begins."""

    __slots__ = ("begin", "mark", "stage")

    def __init__(self, mark: Mark, stage: Literal["empty", "prefix", "suffix"], begin: int) -> None:
        self.mark = mark
        self.stage = stage
        self.begin = begin


def _as_stored(plan: ReusePlan, stored: ReusePlan) -> ReusePlan:
    """What is kept of a restored snapshot; nothing, where it turned out to be of no use."""
    return ReusePlan(
        reuse_tokens=plan.reuse_tokens,
        source="snapshot" if plan.reuse_tokens else "none",
        reason=f"{stored.reason} ({stored.reuse_tokens} tokens); {plan.reason}",
        first_difference=plan.first_difference,
        exact=plan.exact,
        seconds=stored.seconds,
    )
