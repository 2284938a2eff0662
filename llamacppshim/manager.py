"""Owns many sessions within one budget of bytes: who has which, which stay resident, and which have to go for others.

Every session has a runtime of its own, so that evicting one really frees its cells; those of one model share its
weights. Who has a session is told by a weak reference to the claim that its block holds. So whatever ends a block
without a word (an interrupt between two lines, a thread that is gone) also ends its hold, and no flag can stay behind.
What takes long (loading, parking, closing) is done outside of the lock, by whoever needs it, as a job.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from llamacppshim._native import Model
from llamacppshim.closing import Closing
from llamacppshim.config import RuntimeConfig, configured, require_timeout
from llamacppshim.errors import (
    BusyError,
    ClosedError,
    ForkedError,
    InvalidArgumentError,
    LlamaCppShimError,
    LoadCancelledError,
    OutOfMemoryError,
    SessionUnavailableError,
)
from llamacppshim.gguf_files import ModelSource
from llamacppshim.leases import AsyncLease, Bytes, Claim, Job, Key, Lease, Request
from llamacppshim.report import ManagerReport, ResidentSession
from llamacppshim.runtime import Runtime
from llamacppshim.store import SnapshotStore

if TYPE_CHECKING:
    from llamacppshim.session import Session

CLOSE_POLL_S = 0.01
MAX_PARKED = 4096  # keys whose snapshot is remembered; the others' are found by their tokens


class SessionManager(Closing):
    """Hands out sessions by key, to one owner at a time, within one budget of bytes.

    May be used from several threads, and from asyncio. It has no thread of its own: whoever needs room, or gives a
    session back, evicts what has to go.

    Parameters
    ----------
    budget_bytes
        For all contexts (cells and compute buffers), all checkpoints, and with a store the one snapshot at a time that
        is on its way there. Weights are not counted: they are mapped, and shared.
    idle_ttl_s
        Seconds after its last use at which a session is evicted; None: never.
    store
        A `SnapshotStore`, or its folder, where evicted sessions are parked; None: they are dropped.
    clock
        Seconds; tells what is idle.
    """

    _kind = "session manager"

    def __init__(
        self,
        budget_bytes: int,
        idle_ttl_s: float | None,
        store: SnapshotStore | str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 0:
            raise InvalidArgumentError(field="budget_bytes", expected="a number of bytes", actual=budget_bytes)
        _require_seconds("idle_ttl_s", idle_ttl_s)
        self._pid = os.getpid()
        self.budget_bytes = budget_bytes
        self.idle_ttl_s = idle_ttl_s
        self.store = store if store is None or isinstance(store, SnapshotStore) else SnapshotStore(store)
        self._clock = clock
        self._lock = threading.Lock()  # of all that follows; never held over anything that takes long
        self._entries: dict[Key, _Entry] = {}
        self._queue: list[weakref.ref[Claim]] = []  # requests that have no session yet, in the order of asking
        self._weights: dict[tuple[object, ...], _Weights] = {}
        self._parked: dict[Key, tuple[str, str]] = {}  # the entry in the store, and the snapshot's digest
        self._parking = threading.Lock()  # one snapshot at a time is on its way
        self._turns = itertools.count()
        self._figures = dict.fromkeys(("hits", "misses", "restored", "waits", "timeouts", "park_failures"), 0)
        self._evicted = {"parked": 0, "dropped": 0, "fatal": 0}
        self._last_failure = ""
        self._closing = False
        self._closed = False

    # Sessions.

    def session(
        self,
        model: str | os.PathLike[str] | ModelSource,
        config: RuntimeConfig | None = None,
        *,
        workspace: str = "",
        session_id: str | None = None,
        timeout_s: float | None = None,
        **overrides: Any,
    ) -> AbstractContextManager[Session]:
        """A session that is the block's alone until it ends: ``with manager.session(...) as session:``.

        The same model, configuration, workspace and session_id get the same session as long as it is resident, as the
        last owner has left it. One that was parked comes back as it was; else it is empty. So begin with
        `Session.ensure_prefix` or `Session.chat`, which read what is missing. Branches end with the block.

        Parameters
        ----------
        model
            What `resolve_model` takes, or has returned.
        config
            `RuntimeConfig`; ``overrides`` are its fields, and win.
        workspace, session_id
            Whatever the caller tells its sessions apart by.
        timeout_s
            Seconds to wait for another owner, or for room; None: as long as it takes.

        Raises
        ------
        OutOfMemoryError         it can never fit, whatever is evicted; nothing was
        SessionUnavailableError  the time was over
        BusyError                this thread (for `asession`: this task) has the session already
        ClosedError, ForkedError
        ModelLoadError           and what else `resolve_model` and `Runtime.open` raise
        """
        return Lease(self, self._asked(model, config, workspace, session_id, timeout_s, overrides))

    def asession(
        self,
        model: str | os.PathLike[str] | ModelSource,
        config: RuntimeConfig | None = None,
        *,
        workspace: str = "",
        session_id: str | None = None,
        timeout_s: float | None = None,
        **overrides: Any,
    ) -> AbstractAsyncContextManager[Session]:
        """As `session`, for ``async with``. Waiting takes no thread; what takes long is done in the loop's pool."""
        return AsyncLease(self, self._asked(model, config, workspace, session_id, timeout_s, overrides))

    def _asked(
        self,
        model: str | os.PathLike[str] | ModelSource,
        config: RuntimeConfig | None,
        workspace: str,
        session_id: str | None,
        timeout_s: float | None,
        overrides: dict[str, Any],
    ) -> Request:
        if not isinstance(workspace, str):
            raise InvalidArgumentError(field="workspace", expected="a text", actual=workspace)
        if session_id is not None and not isinstance(session_id, str):
            raise InvalidArgumentError(field="session_id", expected="a text or None", actual=session_id)
        require_timeout(timeout_s)
        return Request(model, configured(RuntimeConfig, config, overrides), workspace, session_id, timeout_s)

    def expire(self, idle_s: float | None = None) -> int:
        """Evicts what has been idle for so many seconds (None: idle_ttl_s), as every miss and every end of a block do
        for idle_ttl_s. 0: everything that nobody has. How many sessions.
        """
        _require_seconds("idle_s", idle_s)
        self._require_open()
        claim, n = Claim(), 0
        for job in self._expire(claim, self.idle_ttl_s if idle_s is None else idle_s):
            job()
            n += 1
        return n

    # Acquiring.

    def acquire(self, claim: Claim) -> Iterator[Job | None]:
        """What has to be done until the claim has its session."""
        self._require_open()
        yield claim.resolve
        with self._lock:
            self._queue = [one for one in self._queue if one() is not None]
            self._queue.append(weakref.ref(claim))
        while not claim.leased:
            with self._lock:
                job = self._next(claim)
                if job is None and not claim.leased:
                    self._note_wait(claim)
            if not claim.leased:
                yield job

    def _next(self, claim: Claim) -> Job | None:
        """The next job for this claim; None: wait, unless it is leased now."""
        self._require_open()
        entry = self._entries.get(claim.key)
        has_it = entry is not None and entry.holder is claim
        if entry is not None and not has_it and entry.holder is not None:
            if claim.stalls(entry.holder):
                return self._refuse(claim, BusyError(f"{claim.who} has {claim} already"))
            claim.wants_room = False
            return None
        if entry is not None and not entry.is_usable:
            entry.hold(claim, to_evict=True)
            return functools.partial(self._evict, entry)
        if entry is None:
            if claim.need is None:
                return claim.estimate
            if (expired := self._expired(self.idle_ttl_s)) is not None:
                expired.hold(claim, to_evict=True)
                return functools.partial(self._evict, expired)
        else:
            claim.need = entry.need
        return self._admit(claim, entry, has_it)

    def _admit(self, claim: Claim, entry: _Entry | None, has_it: bool) -> Job | None:
        """Takes or makes the claim's entry where there is room for it, else evicts the least recently used one."""
        assert claim.need is not None
        others = [one for one in self._entries.values() if one is not entry]
        stalled = [one.charge for one in others if one.holder is not None and claim.stalls(one.holder)]
        if (n := self._sum([claim.need, *stalled])) > self.budget_bytes:
            held = f" with the {len(stalled)} that {claim.who} has" if stalled else ""
            parts = ", ".join(f"{name} {value:,}" for name, value in claim.need._asdict().items())
            error = OutOfMemoryError(f"{claim} needs {n:,} bytes{held} ({parts}), budget_bytes {self.budget_bytes:,}")
            if not stalled:
                raise error
            return self._refuse(claim, error)
        earlier = self._earlier(claim)
        if not has_it and any(one.key == claim.key or self._goes_first(one, claim) for one in earlier):
            return None
        if self._sum([claim.need, *(one.charge for one in others)]) <= self.budget_bytes:
            return self._take(claim, entry)
        claim.wants_room = True
        wanted = {one.key for one in earlier}
        free = [one for one in others if one.holder is None and one.key not in wanted]
        if self._sum([claim.need, *(one.charge for one in others if one not in free)]) > self.budget_bytes:
            return None  # whatever were evicted
        victim = min(free, key=_by_turn)
        victim.hold(claim, to_evict=True)
        return functools.partial(self._evict, victim)

    def _refuse(self, claim: Claim, error: LlamaCppShimError) -> Job:
        """Not before garbage is collected, once: what an interrupt has left of a block may be held by nothing else."""
        if claim.has_collected:
            raise error
        claim.has_collected = True
        return gc.collect

    def _take(self, claim: Claim, entry: _Entry | None) -> Job | None:
        claim.wants_room = False
        if entry is None:
            weights = self._weights.setdefault(claim.weights_key, _Weights())
            assert claim.need is not None
            entry = _Entry(claim.key, weights, claim.need)
            entry.hold(claim)
            self._entries[claim.key] = entry
            self._figures["misses"] += 1
            claim.opens = True
            return functools.partial(self._open, entry, claim)
        entry.hold(claim)
        if entry.branches():  # of a block that has ended without a word
            return entry.close_branches
        self._figures["hits"] += not claim.opens
        entry.touch(self._clock(), next(self._turns))
        entry.begin_block(claim)
        self._leave_queue(claim)
        return None

    def _earlier(self, claim: Claim) -> list[Claim]:
        """Those before it in the queue, but for those that cannot go on while this one waits."""
        before = itertools.takewhile(lambda one: one is not claim, self._asking())
        return [one for one in before if not claim.stalls(one)]

    def _goes_first(self, earlier: Claim, claim: Claim) -> bool:
        """Whether an earlier one that has waited for room has it by now, if this one does not take it. Else those that
        come again and again for resident sessions would keep it out."""
        return earlier.wants_room and self._could_fit(earlier) and not self._could_fit(earlier, claim)

    def _could_fit(self, *claims: Claim) -> bool:
        """Beside what others own."""
        needs = [one.need for one in claims if one.need is not None]
        owned = [one.charge for one in self._entries.values() if one.holder not in (None, *claims)]
        return self._sum([*needs, *owned]) <= self.budget_bytes

    def _note_wait(self, claim: Claim) -> None:
        if claim.expired:
            self._figures["timeouts"] += 1
            why = (
                f"for {self._sum([claim.need]):,} bytes, which the owners of other sessions leave no room for"
                if claim.wants_room and claim.need is not None
                else "for its turn"
            )
            raise SessionUnavailableError(f"{claim} has waited {claim.timeout_s:g} s {why}")
        self._figures["waits"] += not claim.has_waited
        claim.has_waited = True

    def _open(self, entry: _Entry, claim: Claim) -> None:
        try:
            model = entry.weights.load(claim)
        except LoadCancelledError:
            self._require_open()  # which is why, where it is closed
            raise
        runtime = Runtime.open(model, claim.key.config, store=self.store)
        try:
            session = runtime.session()
            self._unpark(claim.key, session)
            entry.opened(runtime, session)
        except BaseException:
            runtime.close()
            raise

    def _unpark(self, key: Key, session: Session) -> None:
        with self._lock:
            name, digest = self._parked.pop(key, ("", ""))
        if self.store is None or not name:
            return
        with contextlib.suppress(LlamaCppShimError):  # gone, or damaged: what is asked for will be read
            snapshot = self.store.load(name)
            if snapshot.digest == digest:  # another session may have held the same tokens, and parked them since
                session.restore(snapshot)
                with self._lock:
                    self._figures["restored"] += 1

    # Giving back.

    def give_back(self, claim: Claim) -> Iterator[Job]:
        """The block has ended. What is to be done besides."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            entry = self._entries.get(claim.key)
        if entry is None or entry.holder is not claim:  # closed meanwhile
            return
        entry.end_block()
        with self._lock:
            if entry.holder is not claim:
                return
            entry.touch(self._clock(), next(self._turns))
            usable = entry.is_usable
            if usable:
                entry.claim = None
            claim.leased = False
            self._wake()
        if not usable:
            yield functools.partial(self._evict, entry)
        yield from self._expire(claim, self.idle_ttl_s)

    def abandon(self, claim: Claim) -> None:
        """Whatever the claim has is free again; what was opened for it, and never given to it, goes."""
        if os.getpid() != self._pid:
            return
        unused: list[_Entry] = []
        with self._lock:
            self._leave_queue(claim)
            for entry in list(self._entries.values()):
                if entry.holder is claim:
                    if claim.opens and not claim.leased and entry.key == claim.key:
                        unused.append(entry)
                    else:
                        entry.claim = None
            orphans = self._take_orphans()
            self._wake()
        for weights in orphans:
            weights.close()
        for entry in unused:
            self._evict(entry, park=False)

    # Evicting.

    def _expire(self, claim: Claim, idle_s: float | None) -> Iterator[Job]:
        while True:
            with self._lock:
                entry = self._expired(idle_s)
                if entry is None:
                    return
                entry.hold(claim, to_evict=True)
            yield functools.partial(self._evict, entry)

    def _expired(self, idle_s: float | None) -> _Entry | None:
        """Of what nobody has or waits for: what is unusable, or else what has been idle longest, for so long at least.
        Under the lock."""
        wanted = {one.key for one in self._asking()}
        free = [one for one in self._entries.values() if one.holder is None and one.key not in wanted]
        since = -math.inf if idle_s is None else self._clock() - idle_s
        return min((one for one in free if not one.is_usable or one.used <= since), key=_by_turn, default=None)

    def _evict(self, entry: _Entry, *, park: bool = True) -> None:
        """Its memory is free when this returns. The entry is held by a claim of the caller's."""
        outcome = "dropped"
        try:
            if entry.is_fatal:
                outcome = "fatal"
            elif park and entry.is_usable:
                outcome = self._park(entry)
        finally:
            if entry.runtime is not None:
                entry.runtime.close()
            with self._lock:
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
                    if entry.runtime is not None:
                        self._evicted[outcome] += 1
                orphans = self._take_orphans()
                self._wake()
            for weights in orphans:
                weights.close()

    def _take_orphans(self) -> list[_Weights]:
        """Weights of no session, and of none that is asked for: they stay where one goes for another of the same model.
        Under the lock."""
        used = [one.weights for one in self._entries.values()]
        wanted = {one.weights_key for one in self._asking()}
        keys = [key for key, one in self._weights.items() if one not in used and key not in wanted]
        return [self._weights.pop(key) for key in keys]

    def _park(self, entry: _Entry) -> Literal["parked", "dropped"]:
        session, store = entry.session, self.store
        if store is None or session is None or session.stage == "empty":
            return "dropped"
        with self._parking:
            try:
                snapshot = session.snapshot()
                path = store.put(snapshot)
            except Exception as error:  # whatever it is, it is no reason to fail the one who needs the room
                with self._lock:
                    self._figures["park_failures"] += 1
                    self._last_failure = f"{type(error).__name__}: {error}"
                return "dropped"
        if path is None:
            return "dropped"
        with self._lock:
            self._parked.pop(entry.key, None)
            self._parked[entry.key] = path.name, snapshot.digest
            while len(self._parked) > MAX_PARKED:
                del self._parked[next(iter(self._parked))]
        return "parked"

    # Bytes, and who asks. Under the lock.

    def _sum(self, charges: Iterable[Bytes]) -> int:
        charges = list(charges)
        snapshot = max((one.snapshot for one in charges), default=0) if self.store is not None else 0
        return sum(one.context + one.checkpoints for one in charges) + snapshot

    def _asking(self) -> list[Claim]:
        return [one for ref in self._queue if (one := ref()) is not None]

    def _wake(self) -> None:
        for claim in self._asking():
            claim.wake()

    def _leave_queue(self, claim: Claim) -> None:
        self._queue = [one for one in self._queue if one() not in (claim, None)]
        self._wake()  # who stood behind it may go on

    # Life.

    def explain(self) -> ManagerReport:
        """What is resident, and what was done so far. From any thread, also when closed."""
        self._require_not_forked()
        with self._lock:
            now = self._clock()
            entries = sorted((one for one in self._entries.values() if one.is_there), key=lambda one: -one.turn)
            charges = [one.charge for one in entries]
            context, checkpoints = sum(one.context for one in charges), sum(one.checkpoints for one in charges)
            total = self._sum(charges)
            return ManagerReport(
                budget_bytes=self.budget_bytes,
                resident_bytes=total,
                context_bytes=context,
                checkpoint_bytes=checkpoints,
                snapshot_bytes=total - context - checkpoints,
                models=tuple(sorted(one.name for one in self._weights.values() if one.name)),
                sessions=tuple(one.report(now) for one in entries),
                last_failure=self._last_failure,
                **self._figures,
                **self._evicted,
            )

    def _require_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this session manager was made before os.fork(), and this is the child")

    def _require_open(self) -> None:
        self._require_not_forked()
        if self._closing:
            raise ClosedError("session manager is closed")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Parks what nobody has, closes the rest, and frees everything. Safe to repeat.

        As with `Runtime.close`, calls that run in owners' sessions are cancelled and waited for; these sessions are not
        parked. Requests that wait get ClosedError. BusyError from inside a call of a session; the manager is open then.
        """
        if self._closed or os.getpid() != self._pid:
            return
        claim = Claim()
        try:
            while True:
                with self._lock:
                    self._closing = True
                    for entry in self._entries.values():
                        if (holder := entry.holder) is not None:
                            holder.cancelled = True  # a load ends soon
                    self._wake()
                    if not self._entries:
                        break
                    found = next((one for one in self._entries.values() if one.state != "changing"), None)
                    if found is not None:
                        owner = found.holder
                        found.hold(claim, to_evict=True)
                if found is None:
                    time.sleep(CLOSE_POLL_S)  # others are opening or evicting
                    continue
                try:
                    self._evict(found, park=owner is None)
                except BaseException:
                    if owner is not None:
                        found.hold(owner)
                    raise
        except BaseException:
            self._closing = False
            raise
        self._closed = True

    def __repr__(self) -> str:
        return f"<SessionManager {'closed' if self._closed else f'{len(self._entries)} sessions'}>"


class _Weights:
    """A loaded model, shared by all entries that have this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # whoever comes second waits for the load, and has it too
        self._model: Model | None = None
        self.name = ""  # once it is loaded

    def load(self, claim: Claim) -> Model:
        with self._lock:
            if self._model is None:
                self._model = Model(claim.path, progress=lambda _: not claim.cancelled, **claim.load_options)
                self.name = self._model.name
            return self._model

    def close(self) -> None:
        with self._lock:
            if self._model is not None:
                self._model.close()


class _Entry:
    """A resident session and its runtime, or one that is being opened. What it says of itself is read from the things
    themselves."""

    def __init__(self, key: Key, weights: _Weights, need: Bytes) -> None:
        self.key = key
        self.weights = weights
        self.need = need
        self.claim: weakref.ref[Claim] | None = None
        self.runtime: Runtime | None = None
        self.session: Session | None = None
        self.used = 0.0
        self.turn = -1  # rises with every use
        self._going = False  # whoever holds it evicts it
        self._epoch = 0

    def opened(self, runtime: Runtime, session: Session) -> None:
        used = runtime.context.memory_use().values()
        self.need = self.need._replace(context=sum(one["context"] + one["compute"] for one in used))
        self._epoch = runtime.epoch
        self.session = session
        self.runtime = runtime

    @property
    def holder(self) -> Claim | None:
        """Whose it is: an owner's, or who opens or evicts it."""
        return None if self.claim is None else self.claim()

    @property
    def state(self) -> Literal["owned", "idle", "changing"]:
        holder = self.holder
        return "idle" if holder is None else "owned" if holder.leased else "changing"

    def hold(self, claim: Claim, *, to_evict: bool = False) -> None:
        self._going = to_evict
        self.claim = weakref.ref(claim)

    def touch(self, now: float, turn: int) -> None:
        self.used, self.turn = now, turn

    @property
    def charge(self) -> Bytes:
        """What counts: of checkpoints the most there may be, while an owner may take more."""
        if self.session is None or (self.holder is not None and not self._going):
            return self.need
        return self.need._replace(checkpoints=self.session.sequence.checkpoints.nbytes)

    @property
    def is_there(self) -> bool:
        """What an interrupt has left of one is not; whoever asks next clears it away."""
        return self.holder is not None or (self.runtime is not None and not self.runtime.closed)

    @property
    def is_usable(self) -> bool:
        """Neither closed nor fatal, and of the adapters that its key says."""
        runtime, session = self.runtime, self.session
        return (
            runtime is not None
            and session is not None
            and not (session.closed or runtime.closed or runtime.context.closed)
            and runtime.epoch == self._epoch
        )

    @property
    def is_fatal(self) -> bool:
        return self.session is not None and self.session.explain().state == "fatal"

    def branches(self) -> list[Session]:
        """Sessions that owners have made beside theirs, and left open."""
        if self.runtime is None:
            return []
        return [one for one in self.runtime.sessions if one is not self.session]

    def close_branches(self) -> None:
        for one in self.branches():
            one.close()

    def begin_block(self, claim: Claim) -> None:
        assert self.session is not None
        self.session.sequence.stop.cancelled = False  # one that came late was for the last owner
        claim.session = self.session
        claim.leased = True

    def end_block(self) -> None:
        self.close_branches()
        if self.session is not None:
            self.session.n_changes += 1  # an iterator that was left ends

    def report(self, now: float) -> ResidentSession:
        state, charge = self.state, self.charge
        return ResidentSession(
            model=self.runtime.model_name if self.runtime is not None else "",
            workspace=self.key.workspace,
            session_id=self.key.session_id,
            state=state,
            idle_s=now - self.used if state == "idle" else 0.0,
            resident_tokens=len(self.session.sequence) if self.session is not None else 0,
            context_bytes=charge.context,
            checkpoint_bytes=charge.checkpoints,
        )


def _by_turn(entry: _Entry) -> int:
    return entry.turn


def _require_seconds(field: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise InvalidArgumentError(field=field, expected="seconds, or None", actual=value)
