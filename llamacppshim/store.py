"""Owns a directory of snapshots within a budget: what is in it, which entry begins a prompt, and what has to go. Pure.

An entry is one file; its name says its identity, its length and the hash of its tokens, all computed here. It is
written under another name and renamed, so a crash leaves no half entry. Processes that share a directory agree by a
lock file where they evict and add; readers need none, since a file that is mapped stays readable after it was
removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from llamacppshim.errors import InvalidArgumentError, SnapshotError
from llamacppshim.files import locked, sync_folder
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import Identity
from llamacppshim.reuse import common_prefix
from llamacppshim.snapshot import Snapshot

BLOCK_TOKENS = 64
SUFFIX = ".lcs"
TEMPORARY = re.compile(r"\.snapshot-.*\.tmp")
NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,10})-([0-9a-f]{32})\.lcs")


@dataclass
class Entry:
    """A finished file of the store."""

    name: str
    identity: str
    n_tokens: int
    n_bytes: int
    used: float
    blocks: tuple[bytes, ...] = ()
    tokens: Tokens | None = None


@dataclass
class Match:
    """An entry that begins like a prompt: how many tokens the two share."""

    name: str
    path: Path
    common: int
    n_tokens: int
    n_bytes: int


@dataclass
class _Index:
    entries: dict[str, Entry] = field(default_factory=dict)
    by_block: dict[tuple[str, bytes], set[str]] = field(default_factory=dict)
    stamp: tuple[int, int] = (-1, -1)


class SnapshotStore:
    """A directory of snapshots. Safe for several threads, and several processes at once.

    Parameters
    ----------
    folder
        Made, with mode 0700, where it is missing.
    max_bytes
        Of all entries. The least recently used ones go before another is written; one that is larger than all is not
        kept.
    ttl_s
        Seconds after its last use at which an entry goes; None: never.
    collect
        Do so now, and remove what killed processes left.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int = 8 << 30,
        ttl_s: float | None = None,
        *,
        collect: bool = True,
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise InvalidArgumentError(field="max_bytes", expected="a number of bytes", actual=max_bytes)
        if ttl_s is not None and not (isinstance(ttl_s, (int, float)) and ttl_s >= 0):
            raise InvalidArgumentError(field="ttl_s", expected="seconds, or None", actual=ttl_s)
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.ignored = 0  # files that are no entries, or damaged ones, as of the last look
        self.evicted = 0
        self._mutex = threading.Lock()
        self._index = _Index()
        self._damaged: dict[str, tuple[int, int]] = {}
        with self._told():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if collect:
            self.collect()

    def __len__(self) -> int:
        with self._mutex:
            self._refresh()
            return len(self._index.entries)

    @property
    def n_bytes(self) -> int:
        """Of all entries."""
        with self._mutex:
            self._refresh()
            return sum(entry.n_bytes for entry in self._index.entries.values())

    def entries(self) -> list[Entry]:
        """What is there, the most recently used first."""
        with self._mutex:
            self._refresh()
            return sorted(self._index.entries.values(), key=lambda entry: -entry.used)

    # Writing.

    def put(self, snapshot: Snapshot) -> Path | None:
        """Keep a snapshot; None where it is larger than the whole budget.

        Raises SnapshotError where it cannot be written (a full disk); the other entries are still there then.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"a Snapshot is needed, not {type(snapshot).__name__}")
        name = entry_name(snapshot.manifest, snapshot.tokens)
        path = self.folder / name
        size = snapshot.nbytes + (1 << 16)
        if size > self.max_bytes:
            return None
        with self._mutex, self._locked():
            self._refresh()
            self._expire()
            replaced = self._index.entries.get(name)
            self._evict_to(self.max_bytes - size + (replaced.n_bytes if replaced else 0), keep=name)
            snapshot.save(path)
            self._refresh()
            self._evict_to(self.max_bytes, keep=name)
        return path

    def remove(self, name: str) -> bool:
        """An entry by its name; False where there is none."""
        if NAME.fullmatch(name) is None:
            return False
        with self._mutex, self._locked():
            self._refresh()
            return self._unlink(name)

    def collect(self) -> int:
        """Removes what is over its time or over the budget, and files that killed processes left. How many files."""
        with self._mutex, self._locked():
            self._refresh()
            before = len(self._index.entries)
            self._expire()
            self._evict_to(self.max_bytes)
            n = before - len(self._index.entries)
            for name in os.listdir(self.folder):
                # Who writes an entry holds the lock, and it is ours now: so whoever wrote this is gone.
                if TEMPORARY.fullmatch(name) is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(self.folder / name)
                        n += 1
            return n

    # Reading.

    def find(self, identity: Identity, tokens: Tokens) -> Match | None:
        """The entry that shares the longest beginning with a prompt, at least one whole block or the whole entry."""
        key = identity_key(identity)
        blocks = _blocks(tokens)
        with self._mutex:
            self._refresh()
            best: Match | None = None
            candidates: set[str] = set()
            for block in reversed(blocks):
                candidates = self._index.by_block.get((key, block), set())
                if candidates:
                    break
            if not candidates:  # entries shorter than a block
                candidates = self._index.by_block.get((key, b""), set())
            for name in candidates:
                entry = self._index.entries[name]
                common = common_prefix(entry.tokens, tokens) if entry.tokens is not None else 0
                if common and (best is None or common > best.common):
                    best = Match(name, self.folder / name, common, entry.n_tokens, entry.n_bytes)
            return best

    def load(self, name: str) -> Snapshot:
        """An entry by its name, checked whole. A damaged one is counted, and not found again."""
        path = self.folder / name
        if NAME.fullmatch(name) is None:
            raise SnapshotError(f"{name!r} is no entry's name", path=str(path))
        try:
            snapshot = Snapshot.load(path)
            if entry_name(snapshot.manifest, snapshot.tokens) != name:
                raise SnapshotError(f"{path}: its name is not that of its content", path=str(path))
        except SnapshotError:
            with self._mutex:
                self._forget(name, damaged=True)
            raise
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        with self._mutex:
            if (entry := self._index.entries.get(name)) is not None:
                entry.used = time.time()
        return snapshot

    # The index. Under the mutex.

    def _refresh(self) -> None:
        """Looks again where the directory has changed."""
        with self._told():
            found = os.stat(self.folder)
        stamp = (found.st_mtime_ns, found.st_ino)
        # A change within the clock's resolution of the last look would not show: look again while it is that fresh.
        fresh = time.time_ns() - found.st_mtime_ns < 50_000_000
        if stamp == self._index.stamp and not fresh:
            return
        self._index.stamp = stamp
        seen: set[str] = set()
        self.ignored = 0
        with self._told(), os.scandir(self.folder) as files:
            for file in files:
                if NAME.fullmatch(file.name) is None:
                    self.ignored += file.name != ".lock" and TEMPORARY.fullmatch(file.name) is None
                    continue
                with contextlib.suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    mark = (status.st_mtime_ns, status.st_size)
                    if self._damaged.get(file.name) == mark:
                        self.ignored += 1
                    elif file.name in self._index.entries:
                        entry = self._index.entries[file.name]
                        entry.n_bytes, entry.used = status.st_size, max(entry.used, status.st_mtime)
                        seen.add(file.name)
                    elif self._learn(file.name, status.st_size, status.st_mtime, mark):
                        seen.add(file.name)
        for name in [name for name in self._index.entries if name not in seen]:
            self._forget(name)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What the system refuses."""
        try:
            yield
        except OSError as error:
            raise SnapshotError(f"{self.folder}: {error.strerror or error}", path=str(self.folder)) from error

    def _learn(self, name: str, n_bytes: int, used: float, mark: tuple[int, int]) -> bool:
        match = NAME.fullmatch(name)
        assert match is not None
        try:
            tokens = Snapshot.read_tokens(self.folder / name)
        except SnapshotError:
            tokens = None
        if tokens is None or len(tokens) != int(match[2]) or _hash(tokens) != match[3]:
            self._damaged[name] = mark
            self.ignored += 1
            return False
        blocks = tuple(_blocks(tokens)) or (b"",)
        self._index.entries[name] = Entry(name, match[1], len(tokens), n_bytes, used, blocks, tokens)
        for block in blocks:
            self._index.by_block.setdefault((match[1], block), set()).add(name)
        return True

    def _forget(self, name: str, *, damaged: bool = False) -> None:
        if damaged:
            with contextlib.suppress(OSError):
                status = os.stat(self.folder / name)
                self._damaged[name] = (status.st_mtime_ns, status.st_size)
                self.ignored += 1
        entry = self._index.entries.pop(name, None)
        if entry is None:
            return
        for block in entry.blocks:
            names = self._index.by_block[entry.identity, block]
            names.discard(name)
            if not names:
                del self._index.by_block[entry.identity, block]

    # Eviction. Under the mutex and the lock.

    def _expire(self) -> None:
        if self.ttl_s is not None:
            oldest = time.time() - self.ttl_s
            for entry in list(self._index.entries.values()):
                if entry.used < oldest:
                    self._unlink(entry.name)

    def _evict_to(self, n_bytes: int, keep: str = "") -> None:
        by_age = sorted(self._index.entries.values(), key=lambda entry: (entry.used, entry.name))
        total = sum(entry.n_bytes for entry in by_age)
        for entry in by_age:
            if total <= n_bytes:
                return
            if entry.name != keep and self._unlink(entry.name):
                total -= entry.n_bytes
                self.evicted += 1

    def _unlink(self, name: str) -> bool:
        self._forget(name)
        try:
            os.unlink(self.folder / name)
        except OSError:
            return False
        sync_folder(self.folder)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time changes the directory."""
        with contextlib.ExitStack() as stack:
            with self._told():
                stack.enter_context(locked(self.folder / ".lock"))
            yield


def identity_key(identity: Identity) -> str:
    """Short, for names; the whole identity is compared when an entry is restored. The size of the context, which most
    states do not depend on, is judged then alone."""
    return Identity.digest(msgspec.structs.replace(identity, n_ctx=0))[:32]


def entry_name(identity: Identity, tokens: Tokens) -> str:
    """Of the file that holds these tokens for this identity."""
    return f"{identity_key(identity)}-{len(tokens)}-{_hash(tokens)}{SUFFIX}"


def _hash(tokens: Tokens) -> str:
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").data, digest_size=16).hexdigest()


def _blocks(tokens: Tokens) -> list[bytes]:
    """A hash for each whole block of tokens, of everything up to its end."""
    found: list[bytes] = []
    data = np.ascontiguousarray(tokens, dtype="<i4")
    running = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(data) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        running.update(data[begin : begin + BLOCK_TOKENS].data)
        found.append(running.copy().digest())
    return found
