"""Owns one request to a session manager: what it asks for, whose it is, how it waits, and the block it is made for."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from llamacppshim.config import LOAD_FIELDS, RuntimeConfig
from llamacppshim.digests import file_digest, known_digest
from llamacppshim.errors import UnsupportedFeatureError
from llamacppshim.gguf_files import ModelSource, part_names
from llamacppshim.header import estimate_file
from llamacppshim.sources import resolve_model

if TYPE_CHECKING:
    import asyncio

    from llamacppshim.manager import SessionManager
    from llamacppshim.session import Session

POLL_S = 0.1  # how often a wait looks for blocks that have ended without a word

#: Done outside of the lock. In place of one, None: wait.
Job = Callable[[], object]


class Bytes(NamedTuple):
    """What a session takes: its context, the most its checkpoints may grow to, the copy that is made to park it."""

    context: int
    checkpoints: int
    snapshot: int


class Key(NamedTuple):
    """What makes two requests ask for one session."""

    digests: tuple[str, ...]  # of the model's parts, then of the adapters
    config: RuntimeConfig
    workspace: str
    session_id: str | None


def bytes_needed(path: str, config: RuntimeConfig) -> Bytes:
    """What a session of this model and configuration will take, known before anything is allocated.

    Raises what `read_gguf_header` and `estimate_memory` raise; UnsupportedFeatureError for a model that makes no text.
    """
    _, found = estimate_file(path, config)
    if found is None:
        raise UnsupportedFeatureError(f"{path} makes embeddings, not text", feature="sessions")
    return Bytes(found.context_bytes, found.checkpoints, found.snapshot)


class Request(NamedTuple):
    model: str | os.PathLike[str] | ModelSource
    config: RuntimeConfig
    workspace: str
    session_id: str | None
    timeout_s: float | None


class Claim:
    """One request, from its asking to the end of its block, and whose it is. What holds an entry holds it by a claim
    that is alive."""

    path: str
    key: Key

    def __init__(self, request: Request | None = None) -> None:
        self._request = request
        self.thread = threading.current_thread()
        self.task = _current_task()
        self.timeout_s = None if request is None else request.timeout_s
        self._expires = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        self.need: Bytes | None = None
        self.session: Session | None = None
        self.leased = False  # its session is its own now
        self.opens = False
        self.wants_room = False
        self.cancelled = False
        self.has_waited = False
        self.has_collected = False
        self._gate = threading.Lock()
        self._gate.acquire()

    # What is asked for.

    def resolve(self) -> None:
        assert self._request is not None
        model, config, workspace, session_id, _ = self._request
        path = resolve_model(model.path if isinstance(model, ModelSource) else model).path
        files = [str(path.with_name(name)) for name in part_names(path.name)]
        files += [one.path for one in config.adapters]
        digests = tuple(known_digest(file, functools.partial(file_digest, file)) for file in files)
        self.path = str(path)
        self.key = Key(digests, config, workspace, session_id)

    def estimate(self) -> None:
        self.need = bytes_needed(self.path, self.key.config)

    @property
    def load_options(self) -> dict[str, Any]:
        return {name: getattr(self.key.config, name) for name in LOAD_FIELDS}

    @property
    def weights_key(self) -> tuple[object, ...]:
        n_parts = len(self.key.digests) - len(self.key.config.adapters)
        return self.key.digests[:n_parts], *self.load_options.items()

    def __str__(self) -> str:
        name, workspace, session_id = os.path.basename(self.path), self.key.workspace, self.key.session_id
        return f"the session of {name}, workspace {workspace!r}" + (f", {session_id!r}" if session_id else "")

    # Who asks.

    who = "this thread"

    def stalls(self, other: Claim) -> bool:
        """Whether the other cannot go on while this one waits."""
        return other.thread is self.thread

    # Waiting. A lock is waited for by one call into C: an interrupt leaves it as it is.

    @property
    def expired(self) -> bool:
        return self._expires is not None and time.monotonic() >= self._expires

    @property
    def patience_s(self) -> float:
        return POLL_S if self._expires is None else min(POLL_S, max(0.0, self._expires - time.monotonic()))

    def wait(self) -> None:
        self._gate.acquire(timeout=self.patience_s)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._gate.release()


class AsyncClaim(Claim):
    who = "this task"

    def __init__(self, request: Request) -> None:
        import asyncio  # takes a third of the time to import this package, and most have no use for it

        super().__init__(request)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def stalls(self, other: Claim) -> bool:
        """Other tasks of this thread go on."""
        return other.thread is self.thread and (other.task is None or other.task == self.task)

    async def wait_async(self) -> None:
        import asyncio

        waiter = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([waiter], timeout=self.patience_s)
        finally:
            waiter.cancel()
        self._event.clear()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def run(self, job: Job) -> None:
        """In a thread; a cancel waits for its end, which it hastens where it can."""
        import asyncio

        step = self._loop.run_in_executor(None, job)  # no task: the end of the loop cancels those one by one
        try:
            await asyncio.shield(step)
        except asyncio.CancelledError:
            self.cancelled = True
            while not step.done():  # the task may be cancelled again meanwhile
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([step])
            step.exception()  # is of no interest now
            raise


def _current_task() -> weakref.ref[asyncio.Task[Any]] | None:
    if "asyncio" not in sys.modules:
        return None
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else weakref.ref(task)


class Lease(AbstractContextManager["Session"]):
    """The block of `SessionManager.session`."""

    def __init__(self, manager: SessionManager, request: Request) -> None:
        self._manager = manager
        self._request = request
        self._claim: Claim | None = None

    def __enter__(self) -> Session:
        claim = Claim(self._request)
        try:
            for job in self._manager.acquire(claim):
                claim.wait() if job is None else job()
            self._claim = claim
            assert claim.session is not None
            return claim.session
        except BaseException:
            self._manager.abandon(claim)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        try:
            for job in self._manager.give_back(claim):
                job()
        except BaseException:
            self._manager.abandon(claim)
            raise


class AsyncLease(AbstractAsyncContextManager["Session"]):
    """The block of `SessionManager.asession`."""

    def __init__(self, manager: SessionManager, request: Request) -> None:
        self._manager = manager
        self._request = request
        self._claim: AsyncClaim | None = None

    async def __aenter__(self) -> Session:
        claim = AsyncClaim(self._request)
        try:
            for job in self._manager.acquire(claim):
                await (claim.wait_async() if job is None else claim.run(job))
            self._claim = claim
            assert claim.session is not None
            return claim.session
        except BaseException:
            self._manager.abandon(claim)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        try:
            for job in self._manager.give_back(claim):
                await claim.run(job)
        except BaseException:
            self._manager.abandon(claim)
            raise
