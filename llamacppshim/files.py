"""Owns how files are opened, locked, hashed, and replaced whole or not at all. Pure: the standard library alone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

CHUNK_BYTES = 1 << 20


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file to read. Others are refused before they are opened: a pipe would block, a device might do something.

    Raises OSError, of which ``strerror`` says why; ValueError for a path with a NUL.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return open(path, "rb")


def sha256_of(file: IO[bytes]) -> str:
    """SHA-256 hex of what follows in an open file."""
    sha = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        sha.update(chunk)
    return sha.hexdigest()


def identity_of(path: str | bytes | os.PathLike[str]) -> tuple[int, int, int, int] | None:
    """Size, time of change in ns, device and inode: another as soon as the file is another. None where none is."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock between processes, by a file that is made where it is missing and stays."""
    with open(path, "a+b") as file:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replaced(target: Path, *, prefix: str = ".llamacppshim-", mode: int = 0o600) -> Iterator[IO[bytes]]:
    """A new file beside the target that takes its place, synced, once the block has ended; gone if it ends badly.

    Parameters
    ----------
    prefix
        Of its name until then.
    mode
        Of the new file, less the umask.
    """
    temporary = target.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """The rename itself survives a crash too, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
