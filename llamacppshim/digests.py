"""Owns the digests of model files, and keeps them for the processes to come. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from llamacppshim.facts import FileFacts
from llamacppshim.files import open_regular, sha256_of
from llamacppshim.manifest import hash_bytes

_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_digest(path: str) -> str:
    """SHA-256 hex of a file; of one that cannot be read, or would be waited for, nothing's."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        return sha256_of(file)
    return hash_bytes()


def known_digest(path: str, compute: Callable[[], str]) -> str:
    """The SHA-256 of a file, from the cache or else computed, and kept for the next process."""
    facts = FileFacts("digests", _SHA256.fullmatch)
    digest = facts.learn(path, compute)
    facts.save()
    return digest
