"""Owns the file of a conversation: what it says, where it lies by default, and how it is replaced. Pure.

It is JSON, whole or not there at all, and its owner's alone. The state that its tokens have cost to compute is a
snapshot: at the default place an entry of a store, which the file names and a budget may have removed; elsewhere a file
beside it. Without it the tokens are read again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from llamacppshim.errors import (
    InvalidArgumentError,
    LlamaCppShimError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
)
from llamacppshim.files import locked, open_regular, replaced, sha256_of
from llamacppshim.manifest import hash_bytes
from llamacppshim.models import cache_dir
from llamacppshim.snapshot import Snapshot
from llamacppshim.store import NAME, SUFFIX
from llamacppshim.workspace import Files, Update, told

FORMAT = "llamacppshim chat"
VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_NAME = 40
#: Of the default folder: files, and bytes and age of the states beside them.
MAX_FILES = 100
STATE_BYTES = 4 << 30
STATE_TTL_S = 30 * 86_400.0


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was said, by whom; of an answer the tokens as generated, of a question what had changed before it."""

    role: Literal["user", "assistant"]
    content: str
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    updates: tuple[Update, ...] = ()


class BranchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A branch: the one it came from (None: the first), what was said, and what has changed since."""

    name: str
    parent: str | None
    messages: tuple[Message, ...]
    pending: tuple[Update, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation with all its branches.

    ``files`` are those that it begins with, ``left_out`` the names of others that were there; ``state`` is the name of
    a store's entry, where one was kept. ``checksum`` is a file's: SHA-256 hex of the record encoded with an empty one,
    which it has here.
    """

    format: str
    version: int
    model: str
    model_digest: str
    folder: str | None
    files: Files
    left_out: tuple[str, ...]
    branches: tuple[BranchRecord, ...]
    current: str
    checksum: str
    state: str = ""


class Kept(NamedTuple):
    """Where a conversation is now, the digest of its file, and where another that was there has gone."""

    path: Path
    digest: str
    aside: Path | None


class _Head(msgspec.Struct):
    format: str
    version: int


def require_name(name: str) -> None:
    """Of a branch, which stands in the prompt. Raises InvalidArgumentError where it is no word."""
    if not name.isprintable() or len(name.split()) != 1 or len(name) > MAX_NAME:
        raise InvalidArgumentError(f"a branch's name is one word of at most {MAX_NAME} characters", field="name")


def home() -> Path:
    """The folder of conversations, and of their states."""
    return cache_dir() / "chats"


def states() -> Path:
    """The folder of the store of their states."""
    return home() / "states"


def make_home() -> Path:
    """The same, made for its owner alone where it is missing. Raises SnapshotError where it cannot be made."""
    folder = home()
    with _told(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def place(model_digest: str, folder: str | None) -> Path:
    """Where the last conversation of a model over a folder lies."""
    return home() / f"{hash_bytes(model_digest.encode(), b' ', os.fsencode(folder or ''))[:32]}.json"


def digest(path: Path) -> str | None:
    """Of the file as it is; None where there is none. Raises SnapshotError where it cannot be read."""
    with _told(path):
        try:
            with open_regular(path) as file:
                return sha256_of(file)
        except FileNotFoundError:
            return None


def load(path: Path) -> Record:
    """A conversation, judged whole.

    Raises
    ------
    SnapshotCorruptError   cut, damaged, or no conversation
    SnapshotMismatchError  of another version (field "version")
    SnapshotError          it cannot be read
    """
    with _told(path), open_regular(path) as file:
        data = file.read(MAX_FILE_BYTES + 1) if os.fstat(file.fileno()).st_size else b""
    if len(data) > MAX_FILE_BYTES:
        raise SnapshotCorruptError(f"{path}: over {MAX_FILE_BYTES:,} bytes, no conversation of ours", path=str(path))
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise SnapshotCorruptError(f"{path}: no conversation of ours", path=str(path))
        if head.version != VERSION:
            raise SnapshotMismatchError(path=str(path), field="version", expected=VERSION, actual=head.version)
        read = msgspec.json.decode(data, type=Record)
        record = msgspec.structs.replace(read, checksum="")
        if read.checksum != _checksum(record):
            raise ValueError("its checksum is wrong")
        _judge(record)
    except SnapshotError:
        raise
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise SnapshotCorruptError(f"{path}: damaged, or no conversation: {error}", path=str(path)) from error
    return record


def load_state(name: str) -> Snapshot:
    """A state at its default place, where the store itself cannot be opened. Raises as `Snapshot.load`."""
    if NAME.fullmatch(name) is None:
        raise SnapshotError(f"{name!r} is no entry's name")
    return Snapshot.load(states() / name)


def state_beside(path: Path) -> Path:
    """The snapshot of a conversation that is saved under a name of the user's."""
    return path.with_name(path.name + SUFFIX)


def save(path: Path, record: Record, snapshot: Snapshot | None) -> None:
    """Replaces a conversation's file, and its snapshot beside it; any other file stays. Mode 0600.

    Raises SnapshotError where there is another file, or one cannot be written; what was there is still there then.
    """
    with _told(path):
        if path.exists():
            load(path)
        if snapshot is not None:
            snapshot.save(state_beside(path))
        with replaced(path) as file:
            file.write(encoded(record))


def encoded(record: Record) -> bytes:
    """The content of its file."""
    return msgspec.json.encode(msgspec.structs.replace(record, checksum=_checksum(record)))


def _checksum(record: Record) -> str:
    return hash_bytes(msgspec.json.encode(msgspec.structs.replace(record, checksum="")))


def beside(path: Path, name: str = "") -> Path:
    """Another file of the same place, by eight hex digits: of a digest, or of its own."""
    return path.with_name(f"{path.stem}-{(name or secrets.token_hex(4))[:8]}.json")


def keep(path: Path, record: Record, seen: str | None, own: Path | None = None) -> Kept:
    """As `save`, at its default place, which several chats may have.

    Parameters
    ----------
    seen
        `digest` of the file that the conversation goes on from; None: it has not been there yet. What is there and is
        not that one, another chat's for instance, is set aside under a name of its own.
    own
        A file that is written instead, where the conversation was at the place and another is there now.
    """
    make_home()
    data = encoded(record)
    with _told(path), locked(path.with_name(".lock")):
        aside: Path | None = None
        target = path
        try:
            found = digest(path)
        except SnapshotError:
            found = secrets.token_hex(4)  # a pipe for instance: whatever it is, it is no conversation
        if found is not None and found != seen:
            if own is not None and seen is not None:
                target = own
            else:
                aside = beside(path, found)
                os.replace(path, aside)
        with replaced(target) as file:
            file.write(data)
        files = sorted(
            (one for one in path.parent.glob("*.json") if one.is_file()), key=lambda one: one.stat().st_mtime
        )
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return Kept(target, hash_bytes(data), aside)


def _judge(record: Record) -> None:
    """What types do not say. Raises ValueError or KeyError."""
    told(record.files)
    parents = {branch.name: branch.parent for branch in record.branches}
    if len(parents) != len(record.branches) or record.current not in parents:
        raise ValueError("its branches do not fit together")
    for name in parents:
        require_name(name)
        above: str | None = name
        for _ in parents:
            above = above if above is None else parents[above]
        if above is not None:
            raise ValueError(f"its branch {name!a} comes from itself")
    for branch in record.branches:
        roles = [message.role for message in branch.messages]
        if len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError(f"its branch {branch.name!a} is no questions with their answers")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system refuses."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}", path=str(path)) from error
    except ValueError as error:
        if isinstance(error, LlamaCppShimError):
            raise
        raise SnapshotError(f"{path}: {error}", path=str(path)) from error  # a null character in its name
