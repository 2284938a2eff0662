"""Owns the digests of model files that earlier processes have computed: a file in the cache folder. Pure.

A digest is taken for a file's as long as its path, size, time of change, device and inode are the same. The file is an
aid: what cannot be read or written is computed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from llamacppshim.files import replaced, sha256_of
from llamacppshim.manifest import hash_bytes
from llamacppshim.models import cache_dir

MAX_ENTRIES = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_digest(path: str) -> str:
    """SHA-256 hex of a file; of one that cannot be read, nothing's."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sha256_of(file)
    return hash_bytes()


def known_digest(path: str, compute: Callable[[], str]) -> str:
    """The SHA-256 of a file, from the cache or else computed, and kept for the next process."""
    try:
        key = _key(path)
    except OSError:
        return compute()
    cache = cache_dir() / "digests.json"
    found = _read(cache).get(key)
    if found is not None:
        return found
    digest = compute()
    with contextlib.suppress(OSError):
        if _key(path) == key:
            _write(cache, {**_read(cache), key: digest})
    return digest


def _key(path: str) -> str:
    found = os.stat(path)
    return f"{os.path.abspath(path)}|{found.st_size}|{found.st_mtime_ns}|{found.st_dev}|{found.st_ino}"


def _read(cache: Path) -> dict[str, str]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and _SHA256.fullmatch(value)}


def _write(cache: Path, entries: dict[str, str]) -> None:
    """Whole or not at all; two processes at once may lose one of their entries."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    newest = dict(list(entries.items())[-MAX_ENTRIES:])
    with replaced(cache) as file:
        file.write(json.dumps(newest, indent=0).encode())
