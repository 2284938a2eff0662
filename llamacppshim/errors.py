"""Owns the exception classes and the names of decode statuses. A leaf: it imports nothing of this package."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

#: Which class an ``lcs_status`` of the shim becomes, by its name in ``lcs.h``.
BY_STATUS: dict[str, type[LlamaCppShimError]] = {}


class DecodeStatus(IntEnum):
    """What ``llama_decode`` answered. Another negative number is kept as it is, and is fatal."""

    OK = 0
    NO_KV_SLOT = 1
    ABORTED = 2
    INVALID_BATCH = -1
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


class LlamaCppShimError(Exception):
    """Base of every error of this package. ``log`` is llama.cpp's last warning or error line during the call."""

    log: str = ""

    def __init_subclass__(cls, *, status: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if status is not None and BY_STATUS.setdefault(status, cls) is not cls:
            raise TypeError(f"{status} already has a class")


class _FieldError(LlamaCppShimError):
    """An error about one named value: which, what it should be, what it is."""

    def __init__(self, text: str = "", *, field: str = "", expected: object = None, actual: object = None) -> None:
        super().__init__(text or f"{field} is {actual}, expected {expected}")
        self.field = field
        self.expected = expected
        self.actual = actual


class InvalidArgumentError(_FieldError, ValueError, status="ARG"):
    """An argument whose value makes no sense, or a combination that llama.cpp refuses."""


class OutOfRangeError(_FieldError, IndexError, ValueError, status="RANGE"):
    """A token, sequence, row, position or size outside its range."""


class BufferTooSmallError(LlamaCppShimError, BufferError, status="BUFFER"):
    """A buffer given to the shim is smaller than its answer."""


class OutOfMemoryError(LlamaCppShimError, MemoryError, status="NOMEM"):
    """Host or device memory ran out, or would. Bytes needed and available, where both were known before."""

    def __init__(self, text: str = "", *, needed_bytes: int | None = None, available_bytes: int | None = None) -> None:
        super().__init__(text or f"{needed_bytes} bytes are needed, {available_bytes} are available")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class InternalError(LlamaCppShimError, RuntimeError, status="INTERNAL"):
    """llama.cpp refused in a way that has no class of its own."""


class UnsupportedFeatureError(LlamaCppShimError, NotImplementedError, status="UNSUPPORTED"):
    """This model, memory kind or build cannot do it."""

    def __init__(self, text: str = "", *, feature: str = "") -> None:
        super().__init__(text or f"{feature} is not supported")
        self.feature = feature


class ClosedError(LlamaCppShimError, RuntimeError):
    """The handle was closed; raised before C is called."""


class StaleViewError(ClosedError):
    """A view of logits that a later decode has replaced."""


class BusyError(LlamaCppShimError, RuntimeError, status="BUSY"):
    """Another thread is inside this handle."""


class ForkedError(LlamaCppShimError, RuntimeError, status="FORKED"):
    """The handle was made before ``os.fork()``, and this is the child."""


class ModelLoadError(LlamaCppShimError, OSError, status="LOAD"):
    """A model or adapter file is missing, short, damaged or foreign."""

    def __init__(self, text: str = "", *, path: str | None = None, reason: str = "") -> None:
        super().__init__(text or f"{path}: {reason}")
        self.path = path
        self.reason = reason


class LoadCancelledError(ModelLoadError, status="CANCELLED"):
    """The progress callback said stop."""


class BatchTooLargeError(LlamaCppShimError, ValueError, status="BATCH_TOO_LARGE"):
    """More tokens, or more rows, than one batch of this context takes."""

    def __init__(self, text: str = "", *, n_tokens: int = 0, n_batch: int = 0) -> None:
        super().__init__(text or f"n_tokens {n_tokens}, n_batch {n_batch}")
        self.n_tokens = n_tokens
        self.n_batch = n_batch


class DecodeError(LlamaCppShimError, RuntimeError):
    """A decode that did not end with OK.

    ``status`` is a `DecodeStatus` (a plain int where llama.cpp gave another number), ``raw_status`` that number,
    ``committed`` how many of the tokens are resident all the same, ``dirty`` the sequences whose memory can no longer
    be trusted.
    """

    default_status: DecodeStatus = DecodeStatus.COMPUTE_FAILED

    def __init__(
        self,
        text: str = "",
        *,
        status: int | None = None,
        raw_status: int | None = None,
        committed: int = 0,
        dirty: Iterable[int] = (),
    ) -> None:
        self.status = decode_status(self.default_status if status is None else status)
        self.raw_status = int(self.status) if raw_status is None else raw_status
        self.committed = committed
        self.dirty = frozenset(dirty)
        super().__init__(text or f"decode status {self.raw_status}, {committed} tokens committed")


class NoKVSlotError(DecodeError, status="NO_KV_SLOT"):
    """Too few free cells: drop a sequence, or take a larger n_ctx."""

    default_status = DecodeStatus.NO_KV_SLOT


class DecodeAbortedError(DecodeError, status="ABORTED"):
    """The decode was cancelled."""

    default_status = DecodeStatus.ABORTED


class InvalidBatchError(DecodeError, status="INVALID_BATCH"):
    """Positions that do not continue their sequence; nothing has changed."""

    default_status = DecodeStatus.INVALID_BATCH


class DecodeFatalError(DecodeError, status="DECODE_FATAL"):
    """A failure inside the computation. From the base class itself: the context answers nothing from then on."""


class DecodeAllocError(DecodeFatalError, MemoryError, status="ALLOC_FAILED"):
    """llama.cpp could not allocate for this decode."""

    default_status = DecodeStatus.ALLOC_FAILED


class DecodeComputeError(DecodeFatalError, status="COMPUTE_FAILED"):
    """The graph failed."""


class SnapshotError(LlamaCppShimError, ValueError):
    """A saved state that cannot be used."""

    def __init__(self, text: str = "", *, path: str | None = None) -> None:
        super().__init__(text or f"{path}: not usable")
        self.path = path


class SnapshotCorruptError(SnapshotError, status="STATE_CORRUPT"):
    """A saved state that is cut, damaged or not one of ours."""


class SnapshotMismatchError(SnapshotError, status="STATE_MISMATCH"):
    """A saved state of another model, pin, cache layout or kind."""

    def __init__(
        self,
        text: str = "",
        *,
        path: str | None = None,
        field: str = "",
        expected: object = None,
        actual: object = None,
    ) -> None:
        of = f"{path}: " if path else ""
        super().__init__(text or f"{of}{field} is {actual}, expected {expected}", path=path)
        self.field = field
        self.expected = expected
        self.actual = actual


class TemplateError(LlamaCppShimError, ValueError, status="TEMPLATE"):
    """A chat template that does not parse, fails, or exceeds its limits; or a reply that does not fit it."""


class GrammarError(LlamaCppShimError, ValueError, status="GRAMMAR"):
    """A grammar that does not parse, exceeds its limits, or refuses a token."""


class TokenMismatchError(LlamaCppShimError, ValueError):
    """Tokens that are not the ones a text was promised to have."""


class ManifestMismatchError(_FieldError, ValueError):
    """Two identities that should be one: the first field that differs."""


class ContextOverflowError(LlamaCppShimError, ValueError):
    """The tokens do not fit the context. ``stage``: ``prefix suffix decode restore admit``."""

    def __init__(
        self,
        text: str = "",
        *,
        stage: str = "",
        resident_tokens: int = 0,
        additional_tokens: int = 0,
        num_ctx: int = 0,
    ) -> None:
        super().__init__(
            text or f"{stage}: {resident_tokens} resident and {additional_tokens} more tokens exceed num_ctx {num_ctx}"
        )
        self.stage = stage
        self.resident_tokens = resident_tokens
        self.additional_tokens = additional_tokens
        self.num_ctx = num_ctx


class SessionUnavailableError(LlamaCppShimError, RuntimeError):
    """No session can be had now."""

    def __init__(self, text: str = "", *, reason: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason or text


class SessionClosedError(LlamaCppShimError, RuntimeError):
    """The session was closed."""

    def __init__(self, text: str = "", *, reason: str = "") -> None:
        self.reason = reason or text or "session is closed"
        super().__init__(text or self.reason)


class SessionFatalError(LlamaCppShimError, RuntimeError):
    """The session met an unrecoverable state; ``cause`` is the first one."""

    def __init__(self, text: str = "", *, cause: BaseException | None = None) -> None:
        super().__init__(text or f"session is unusable: {cause}")
        self.cause = cause


def decode_status(raw: int) -> DecodeStatus | int:
    """The named status, or the number itself."""
    try:
        return DecodeStatus(raw)
    except ValueError:
        return raw


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def error_for(
    status: str,
    message: str,
    *,
    log: str = "",
    field: str = "",
    expected: str = "",
    actual: str = "",
    path: str | None = None,
    raw_status: int | None = None,
    committed: int = 0,
    dirty: Iterable[int] = (),
) -> LlamaCppShimError:
    """The exception for a failure of the shim: its class by status, its text from the message and the log line."""
    cls = BY_STATUS.get(status, InternalError)
    reason = message or status
    if log and log not in reason and reason not in log:
        reason = f"{reason} (llama.cpp: {log})"
    error: LlamaCppShimError
    if issubclass(cls, ModelLoadError):
        error = cls(f"{path}: {reason}" if path else reason, path=path, reason=reason)
    elif issubclass(cls, DecodeError):
        error = cls(reason, status=raw_status or None, raw_status=raw_status or None, committed=committed, dirty=dirty)
    elif issubclass(cls, BatchTooLargeError):
        error = cls(reason, n_tokens=_number(actual), n_batch=_number(expected))
    elif issubclass(cls, OutOfMemoryError):
        known = field == "memory"
        error = cls(
            reason,
            needed_bytes=_number(actual) if known else None,
            available_bytes=_number(expected) if known else None,
        )
    elif issubclass(cls, UnsupportedFeatureError):
        error = cls(reason, feature=field)
    elif issubclass(cls, (_FieldError, SnapshotMismatchError)):
        error = cls(reason, field=field, expected=expected, actual=actual)
    else:
        error = cls(reason)
    error.log = log
    return error
