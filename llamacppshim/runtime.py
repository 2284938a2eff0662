"""Owns one model, one context and its pool of sequences, and who may use the context when."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from llamacppshim._native import Adapter, Batch, Context, Model, Sampler, build_info
from llamacppshim.closing import Closing
from llamacppshim.config import CONTEXT_FIELDS, LOAD_FIELDS, DecodeConfig, RuntimeConfig, configured, with_n_ctx
from llamacppshim.digests import file_digest, known_digest
from llamacppshim.errors import (
    ClosedError,
    DecodeAbortedError,
    DecodeError,
    ForkedError,
    InvalidBatchError,
    LlamaCppShimError,
    ManifestMismatchError,
    NoKVSlotError,
    SessionUnavailableError,
    UnsupportedFeatureError,
)
from llamacppshim.files import identity_of
from llamacppshim.ledger import Tokens
from llamacppshim.machine import machine_budget, require_room
from llamacppshim.manifest import Identity, digest_of, hash_bytes
from llamacppshim.profile import Profile, runtime_fields
from llamacppshim.reuse import MemoryKind
from llamacppshim.sequence import Cells, ResidentSequence, Stop
from llamacppshim.store import SnapshotStore
from llamacppshim.text import Tokenizer
from llamacppshim.turns import Turns

if TYPE_CHECKING:
    from llamacppshim.chat import Chatter
    from llamacppshim.session import Session
    from llamacppshim.snapshot import Snapshot

# What changes the bits of a cell, besides what has a field of its own in the identity.
_NUMERIC_FIELDS = (
    *("n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split"),
    *("offload_kqv", "op_offload", "use_extra_bufts"),
)
_ROPE_FIELDS = tuple(name for name in CONTEXT_FIELDS if name.startswith(("rope_", "yarn_")))


class Piece(NamedTuple):
    """Tokens for the end of a sequence, and whether the last one's logits are wanted."""

    sequence: ResidentSequence
    tokens: Tokens
    row: bool


class Speed:
    """How fast this runtime reads tokens and restores bytes, as last measured; until then, guesses that restore rather
    than read."""

    def __init__(self) -> None:
        self.tokens_per_s = 1_000.0
        self.bytes_per_s = 500e6

    def has_read(self, n_tokens: int, seconds: float) -> None:
        if n_tokens >= 64 and seconds > 0:
            self.tokens_per_s = n_tokens / seconds

    def has_restored(self, n_bytes: int, seconds: float) -> None:
        if n_bytes >= 1 << 16 and seconds > 0:
            self.bytes_per_s = n_bytes / seconds

    def restoring_is_faster(self, n_bytes: int, n_tokens: int) -> bool:
        return n_bytes / self.bytes_per_s < n_tokens / self.tokens_per_s


class Runtime(Closing):
    """A model and a context, open for sessions. Make one with `Runtime.open`.

    May be used from several threads: sessions take turns at the context, a piece of a prefill or a token each.
    """

    _kind = "runtime"

    def __init__(
        self,
        model: Model,
        config: RuntimeConfig,
        *,
        owns_model: bool,
        store: SnapshotStore | str | os.PathLike[str] | None = None,
        budget: int | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._closed = True  # until it is whole
        self.model = model
        self.model_name = model.name
        self._owns_model = owns_model
        self._adapters: tuple[tuple[Adapter, float], ...] = ()
        self._adapter_digests: tuple[tuple[str, float], ...] = ()
        self._request = with_n_ctx(config, model.n_ctx_train)
        if budget is not None:
            require_room(model, self._request, budget, counted=owns_model)
        self.context = self._make_context()
        self.config = _resolved(self._request, self.context)
        self.memory_kind: MemoryKind = self.context.memory_kind
        # Of one pool for several sequences, llama.cpp gives one's masked cells to another, those of a full cache too.
        pooled = self.context.n_stream == 1 and self.context.n_seq_max > 1
        keeps_window = self.context.swa_full and not pooled
        self.can_be_cut = self.memory_kind == "attention" or (self.memory_kind == "swa" and keeps_window)
        self.is_recurrent = self.memory_kind in ("recurrent", "hybrid")
        windowed = self.memory_kind in ("swa", "hybrid") and not keeps_window
        self.n_swa = model.n_swa if windowed else 0
        self.layout_is_own = self.context.n_seq_max == 1 or not self.context.kv_unified
        self.n_ctx_seq = self.context.n_ctx_seq
        self.n_ubatch = self.context.n_ubatch
        self.tokenizer = Tokenizer(model)
        self.profile: Profile | None = None
        self.store = store if store is None or isinstance(store, SnapshotStore) else SnapshotStore(store)
        self.speed = Speed()
        self.epoch = 0  # counts the adapters' changes: cells of one epoch are not added to those of another

        self.turns = Turns()
        self.chat_lock = threading.Lock()  # a compiled template takes one thread at a time
        self._chatter: Chatter | None = None
        self._running_mutex = threading.RLock()  # a signal handler that cancels may come while it is held
        self._running: Stop | None = None
        self._rows: dict[int, weakref.ref[ResidentSequence]] = {}  # whose the rows of the last decode are
        # Held by their sessions alone: whatever happens to a session, its sequence is free when nobody has it.
        self._sequences: weakref.WeakValueDictionary[int, ResidentSequence] = weakref.WeakValueDictionary()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._file = identity_of(model.path)
        try:
            self._fixed = self._fixed_identity()
            self._closed = False
            self.set_adapters(config.adapters)
        except BaseException:
            self._closed = True
            self.context.close()
            raise

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | Model,
        config: RuntimeConfig | None = None,
        *,
        progress: Callable[[float], bool | None] | None = None,
        store: SnapshotStore | str | os.PathLike[str] | None = None,
        check_memory: bool = True,
        **overrides: Any,
    ) -> Runtime:
        """Load a model and make a context for it.

        Parameters
        ----------
        model
            A GGUF file, or a model that is loaded already; that one stays the caller's to close.
        config
            `RuntimeConfig`; ``overrides`` are its fields, and win.
        progress
            Told the fraction loaded; False cancels.
        store
            A `SnapshotStore`, or its folder: what sessions park there on close is found again by `ensure_prefix`, in
            this process or another.
        check_memory
            Refuse what `estimate_memory` would call ``none`` on this machine now. False: only what cannot be allocated
            at all is refused; mapped weights larger than the memory then come from the disk again and again.

        Raises
        ------
        ModelLoadError           a missing, damaged or foreign file; LoadCancelledError if cancelled
        UnsupportedFeatureError  a model that does not generate text
        InvalidArgumentError, OutOfRangeError, OutOfMemoryError  the configuration, by field
        """
        config = configured(RuntimeConfig, config, overrides)
        budget = machine_budget() if check_memory else None
        if isinstance(model, Model):
            # How it was loaded is said by the model, not by the configuration.
            config = msgspec.structs.replace(config, **model.load_options)
            return cls(model, config, owns_model=False, store=store, budget=budget)
        loaded = Model(model, progress=progress, **{name: getattr(config, name) for name in LOAD_FIELDS})
        try:
            return cls(loaded, config, owns_model=True, store=store, budget=budget)
        except BaseException:
            loaded.close()
            raise

    @classmethod
    def from_profile(
        cls,
        path: str | os.PathLike[str],
        *,
        progress: Callable[[float], bool | None] | None = None,
        store: SnapshotStore | str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> Runtime:
        """As `open`, with the model, the settings, the prompt format and the sampling of a `Profile`.

        Parameters
        ----------
        path
            The profile's file, or its folder.

        Raises
        ------
        InvalidArgumentError   the profile, by the path of the field
        ManifestMismatchError  the model or its template is not the one the profile was made for
        """
        file = Path(path)
        folder = file if file.is_dir() else file.parent
        profile = Profile.load(file)
        config = configured(RuntimeConfig, profile.runtime_config(folder), overrides)
        with runtime_fields(overrides):
            runtime = cls.open(profile.model_path(folder), config, progress=progress, store=store)
        try:
            runtime._take_profile(profile)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _take_profile(self, profile: Profile) -> None:
        own = self._fixed
        for field, expected, actual in (
            ("model_digest", profile.model_digest, own.model_digest),
            ("template_digest", profile.prompt.template_digest, own.template_digest),
        ):
            if expected is not None and expected != actual:
                raise ManifestMismatchError(field=field, expected=expected, actual=actual)
        profile.require_sampling(self.model.n_vocab, functools.partial(Sampler, self.model))
        self.profile = profile
        self._fixed = msgspec.structs.replace(
            own,
            profile_id=profile.profile_id,
            prompt_format=profile.prompt.format,
            add_bos=own.add_bos if profile.prompt.add_bos is None else profile.prompt.add_bos,
        )

    @property
    def add_bos(self) -> bool:
        """Whether a text begins with BOS: as the profile says, else the model."""
        return self._fixed.add_bos

    def with_bos(self, tokens: Tokens, starts: Sequence[int]) -> tuple[Tokens, list[int], int]:
        """A text's tokens begun with BOS, where a text has one and these do not, and where its parts begin then: BOS
        belongs to the first. And how many BOS were added."""
        bos = self.model.bos
        if not self.add_bos or bos is None or (len(tokens) and tokens[0] == bos):
            return tokens, list(starts), 0
        return np.concatenate([np.array([bos], dtype=np.int32), tokens]), [at + 1 if at else 0 for at in starts], 1

    def decode_config(self, config: DecodeConfig | None, overrides: dict[str, Any]) -> DecodeConfig:
        """What a decode is told: where it is given no configuration, the profile's sampling."""
        if config is None and self.profile is not None:
            config = self.profile.decode_config()
        found: DecodeConfig = configured(DecodeConfig, config, overrides)
        return found

    @property
    def prompt_format(self) -> str:
        """Of chats that do not name one."""
        return "model" if self.profile is None else self.profile.prompt.format

    def _make_context(self) -> Context:
        if self.model.vocab_only:
            raise UnsupportedFeatureError(f"{self.model.name} was loaded for its vocabulary only", feature="context")
        values = {name: getattr(self._request, name) for name in CONTEXT_FIELDS}
        context = Context(self.model, **values)
        if context.memory_kind == "none":
            context.close()
            raise UnsupportedFeatureError(
                f"{self.model.name} ({self.model.architecture}) makes embeddings, not text", feature="sessions"
            )
        return context

    # Sessions.

    def session(self) -> Session:
        """A new, empty session on a sequence of its own.

        Raises SessionUnavailableError while all n_seq_max sequences are taken.
        """
        from llamacppshim.session import Session

        self._require_open()
        session = Session(self, self.take_sequences(1)[0])
        self._sessions.add(session)
        return session

    def adopt(self, session: Session) -> None:
        """A session that was made beside `session()`: closed with the runtime."""
        self._sessions.add(session)

    def restore(self, snapshot: Snapshot) -> Session:
        """A new session that holds what the snapshot's did.

        Raises SnapshotMismatchError with the first field of the identity that differs, SnapshotCorruptError,
        ContextOverflowError (stage ``restore``), SessionUnavailableError.
        """
        session = self.session()
        try:
            session.restore(snapshot)
        except BaseException:
            session.close()
            raise
        return session

    def take_sequences(self, n: int) -> list[ResidentSequence]:
        """So many free sequences, empty; all or none."""
        try:
            return self._take_sequences(n)
        except SessionUnavailableError:
            gc.collect()  # what an interrupt has left of a session may hold nothing but itself
            return self._take_sequences(n)

    def _take_sequences(self, n: int) -> list[ResidentSequence]:
        with self.turns.lock:
            self._require_open()
            free = self._free_ids()
            if len(free) < n:
                n_max = self.config.n_seq_max
                wanted = "a sequence is" if n == 1 else f"{n} sequences are"
                raise SessionUnavailableError(
                    reason=f"{wanted} wanted, {len(free)} of n_seq_max {n_max} are free: close a session"
                )
            taken = []
            for seq_id in free[:n]:
                self._empty(seq_id)
                taken.append(ResidentSequence(self, seq_id))
                self._sequences[seq_id] = taken[-1]
            return taken

    def _free_ids(self) -> list[int]:
        return [seq_id for seq_id in range(self.config.n_seq_max) if seq_id not in self._sequences]

    def take_sequence(self) -> ResidentSequence | None:
        """A free sequence, if there is one."""
        try:
            return self._take_sequences(1)[0]
        except SessionUnavailableError:
            return None

    def release(self, sequence: ResidentSequence) -> None:
        """A session's sequence is free again. Never fails."""
        with self.turns.lock:
            if self._sequences.get(sequence.seq_id) is sequence:
                del self._sequences[sequence.seq_id]
                self._empty(sequence.seq_id)

    def _empty(self, seq_id: int) -> None:
        with contextlib.suppress(LlamaCppShimError):  # a context that is closed or fatal holds nothing
            self.context.seq_rm(seq_id, -1, -1)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Those that are open, in no order."""
        return tuple(one for one in list(self._sessions) if not one.closed)

    @property
    def n_sessions(self) -> int:
        """How many sequences are taken."""
        return len(self._sequences)

    def available_tokens(self, sequence: ResidentSequence, keep: int | None = None) -> int:
        """How many more tokens the sequence could hold now; or if it kept only so many of its own."""
        keep = len(sequence) if keep is None else keep
        free = self.n_ctx_seq - keep
        if self.config.kv_unified and self.memory_kind != "recurrent":  # whose cells are not tokens
            lengths = [(keep if one is sequence else len(one), one.cells) for one in list(self._sequences.values())]
            free = min(free, self.n_ctx_seq - Cells.count(lengths))
        return max(0, free)

    @property
    def resident_tokens(self) -> int:
        """Of all sessions; cells that branches share count once."""
        return Cells.count((len(one), one.cells) for one in list(self._sequences.values()))

    @property
    def chatter(self) -> Chatter:
        """What the chats of its sessions share."""
        from llamacppshim.chat import Chatter

        self._require_open()
        with self.chat_lock:
            if self._chatter is None:
                self._chatter = Chatter(self)
            return self._chatter

    # Adapters and identity.

    @property
    def adapters(self) -> tuple[tuple[Adapter, float], ...]:
        """The LoRA adapters in use, and their scales."""
        return self._adapters

    def set_adapters(self, adapters: Iterable[Any]) -> None:
        """Use these LoRA adapters (paths, pairs of path and scale, or AdapterConfig), and no others, from now on.

        What sessions hold was computed with others: their next `ensure_prefix` reads it again.
        """
        self._require_open()
        wanted = msgspec.structs.replace(self.config, adapters=tuple(adapters)).adapters
        loaded: list[tuple[Adapter, float]] = []
        try:
            loaded += [(Adapter(self.model, one.path), one.scale) for one in wanted]
            digests = tuple((adapter.digest, scale) for adapter, scale in loaded)
            with self.turns.lock:
                self.context.set_adapters(loaded)
                self.epoch += 1
        except BaseException:
            for adapter, _ in loaded:
                adapter.close()
            raise
        for adapter, _ in self._adapters:
            adapter.close()
        self._adapters, self._adapter_digests = tuple(loaded), digests
        self.config = msgspec.structs.replace(self.config, adapters=wanted)

    def identity(self) -> Identity:
        """What the cells of this runtime depend on, as of now.

        The model is the one that was loaded. Where its file is another by now, its digest is one that no file has:
        what is saved from here on cannot be taken for either's.
        """
        identity = self._fixed
        changes: dict[str, Any] = {}
        if (file := identity_of(self.model.path)) != self._file:
            if file is not None and _digest_now(self.model.path) == identity.model_digest:
                self._file = file  # touched, or copied back
            else:
                changes["model_digest"] = digest_of([identity.model_digest, "the file has changed", file])
        if self._adapter_digests:
            changes["adapters"] = self._adapter_digests
        return msgspec.structs.replace(identity, **changes) if changes else identity

    def _fixed_identity(self) -> Identity:
        model, context, config = self.model, self.context, self.config
        build = build_info()
        flags = {
            name: build[name] for name in ("version", "backend", "compile_options", "cpu_features") if name in build
        }
        return Identity(
            backend_version=f"{build['pin']}+{digest_of(flags)[:16]}",
            model_digest=_model_digest(model),
            tokenizer_digest=model.tokenizer_digest,
            template_digest=hash_bytes((config.chat_template or model.chat_template or "").encode()),
            runtime_digest=digest_of({name: getattr(config, name) for name in _NUMERIC_FIELDS}),
            n_ctx=context.n_ctx,
            rope={name: getattr(config, name) for name in _ROPE_FIELDS},
            type_k=context.type_k,
            type_v=context.type_v,
            flash_attn=context.flash_attn,
            swa_full=context.swa_full,
            kv_layout=f"{context.n_stream} streams" if context.n_stream > 1 else "one stream",
            add_bos=model.add_bos,
            block_size=context.n_ubatch,
        )

    # The context's turns.

    def decode(self, sequence: ResidentSequence, tokens: Tokens, *, row: bool) -> None:
        """Tokens of one sequence, at most one ubatch, and the ledger's truth afterwards. Takes a turn.

        Raises
        ------
        DecodeAbortedError  the session's stop was requested
        NoKVSlotError       no free cells, although all that nobody holds were freed
        DecodeError         as the context; every sequence knows what it still holds
        """
        self.turns.ask()
        with self.turns.lock:
            self.turns.taken()
            self._require_epoch(sequence)
            self.claim_rows(sequence)
            try:
                self._decode_once(sequence, tokens, row=row)
            except NoKVSlotError:
                self._free_cells()
                self._decode_once(sequence, tokens, row=row)

    def decode_shared(self, pieces: Iterable[Piece]) -> None:
        """Tokens of several sequences in one batch of at most one ubatch. Takes a turn.

        A failure is for the caller to find the cause of, one sequence after the other: every sequence knows what it
        still holds. A stop that is requested meanwhile is for the next batch: this one belongs to others too.

        Raises DecodeError as the context.
        """
        pieces = list(pieces)
        self.turns.ask()
        with self.turns.lock, Batch() as batch:
            self.turns.taken()
            for piece in pieces:
                self._require_epoch(piece.sequence)
            self.claim_rows(*(piece.sequence for piece in pieces))
            for sequence, tokens, row in pieces:
                at, last = len(sequence), len(tokens) - 1
                for i, token in enumerate(tokens):
                    batch.add(int(token), at + i, sequence.seq_id, row and i == last)
            for piece in pieces:
                piece.sequence.suspect = True
            try:
                self.context.decode_batch(batch)
            except BaseException as error:
                self._after_failure(error, pieces)
                raise
            end = 0
            self._rows = {}
            for sequence, tokens, row in pieces:
                end += len(tokens)
                sequence.decoded(tokens, row=row, index=end - 1)
                if row:
                    self._rows[end - 1] = weakref.ref(sequence)

    def _require_epoch(self, sequence: ResidentSequence) -> None:
        if sequence.epoch != self.epoch:
            raise ManifestMismatchError(
                "the adapters are not those that the resident tokens were read with",
                field="adapters",
                expected=sequence.epoch,
                actual=self.epoch,
            )

    def _after_failure(self, error: BaseException, pieces: Sequence[Piece]) -> None:
        """Every sequence knows what it still holds. Of one, the error says how far it got; of several, each one's own
        memory, but where that cannot be told."""
        cause = error.__cause__ if isinstance(error, KeyboardInterrupt) else error
        known = cause if isinstance(cause, DecodeError) else None
        if isinstance(error, LlamaCppShimError) and known is None:  # judged before the call
            for piece in pieces:
                piece.sequence.suspect = False
            return
        self._rows = {}
        if self.context.fatal:
            self._renew()
            return
        if known is not None:
            dirty: Collection[int] = known.dirty
        else:  # the call was left by something else
            dirty = list(self._sequences) if self.is_recurrent else ()
        for seq_id in dirty:
            if seq_id in self._sequences:
                self._sequences[seq_id].suspect = True
        for sequence, tokens, _ in pieces:
            committed = known.committed if known is not None and len(pieces) == 1 else None
            sequence.failed(tokens, committed, dirty=sequence.seq_id in dirty)

    def _decode_once(self, sequence: ResidentSequence, tokens: Tokens, *, row: bool) -> None:
        sequence.suspect = True
        try:
            with self._interruptible(sequence, len(tokens)):
                self.context.decode(tokens, seq_id=sequence.seq_id, pos=len(sequence), logits="last" if row else "none")
        except InvalidBatchError:
            raise  # nothing was touched, but the memory is not what the ledger says
        except BaseException as error:
            self._after_failure(error, [Piece(sequence, tokens, row)])
            raise
        sequence.decoded(tokens, row=row)
        self._rows = {}
        if row:
            self._rows[-1] = weakref.ref(sequence)

    def _renew(self) -> None:
        """A context that answers nothing any more is replaced; the sessions read again what they need."""
        self.context.close()
        for sequence in list(self._sequences.values()):
            sequence.forget()
        self.context = self._make_context()
        self.context.set_adapters(self._adapters)

    def _free_cells(self) -> None:
        """Of sequences that nobody has."""
        for seq_id in self._free_ids():
            if self.context.seq_pos_max(seq_id) >= 0:
                self.context.seq_rm(seq_id, -1, -1)

    def claim_rows(self, *users: ResidentSequence) -> None:
        """Before a call of these sequences that replaces the rows of the last decode: any other whose last row is among
        them gets a copy. Their own are theirs until the call has replaced them."""
        for index, owner in list(self._rows.items()):
            other = owner()
            if other is None or other not in users:
                del self._rows[index]
            if other is not None and other not in users:
                other.save_row()

    @contextlib.contextmanager
    def _interruptible(self, sequence: ResidentSequence, n_tokens: int) -> Iterator[None]:
        """The native call inside ends when the stop is requested: at once where the memory tells what was computed,
        else after this piece. Others' calls are not touched."""
        stop = sequence.stop
        timer: threading.Timer | None = None
        with self._running_mutex:
            if stop.requested:
                raise DecodeAbortedError(stop.why(len(sequence)))
            self._running = None if self.is_recurrent else stop
        if stop.expires is not None and n_tokens > 1 and not self.is_recurrent:  # one token is soon over
            timer = threading.Timer(min(max(0.0, stop.remaining), threading.TIMEOUT_MAX), self.interrupt, (stop,))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            with self._running_mutex:
                self._running = None
                if stop.requested and not self.context.closed:
                    self.context.cancel_clear()  # it may have come too late for this call
            if timer is not None:
                timer.cancel()

    def interrupt(self, stop: Stop) -> None:
        """From any thread: ends the native call that runs for this stop, if one does."""
        with self._running_mutex:
            if self._running is stop:
                self.context.cancel()

    # Life.

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this runtime was opened before os.fork(), and this is the child")
        if self._closed:
            raise ClosedError("runtime is closed")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Closes its sessions, then frees the context and, if it was loaded here, the model. Safe to repeat.

        A call that runs in another thread is cancelled and waited for.
        """
        if self._closed or os.getpid() != self._pid:
            return
        for session in list(self._sessions):
            session.close()
        with self.turns.lock:
            self._closed = True
            self.context.close()
        for adapter, _ in self._adapters:
            adapter.close()
        if self._chatter is not None:
            with self.chat_lock:
                self._chatter.close()
        if self._owns_model:
            self.model.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or sys.is_finalizing() or os.getpid() != self._pid:
            return
        warnings.warn(f"a runtime of {self.model_name} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        if self._closed:
            return "<Runtime closed>"
        return f"<Runtime {self.model_name} {self.memory_kind} n_ctx={self.config.n_ctx} sessions={self.n_sessions}>"


def _resolved(config: RuntimeConfig, context: Context) -> RuntimeConfig:
    """As the context has it."""
    names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_threads", "n_threads_batch", "swa_full")
    values: dict[str, Any] = {name: getattr(context, name) for name in (*names, "type_k", "type_v", "kv_unified")}
    values["flash_attn"] = "on" if context.flash_attn else "off"
    return msgspec.structs.replace(config, **values)


def _model_digest(model: Model) -> str:
    """Of one file, an earlier process may have it; parts of a split model are read again."""
    if model.metadata.get("split.count", "0") not in ("0", "1"):
        return model.digest
    return known_digest(model.path, lambda: model.digest)


def _digest_now(path: str) -> str:
    """Of the file as it is; kept like the model's own."""
    return known_digest(path, lambda: file_digest(path))
