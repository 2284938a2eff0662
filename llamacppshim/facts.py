"""Owns what earlier processes have found out of files: a small JSON file in the cache folder for each kind of fact.
Pure.

A fact is taken for a file's as long as its path, size, time of change, device and inode are the same. The cache is an
aid: what cannot be read or written is found out again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable

from llamacppshim.files import identity_of, open_regular, replaced
from llamacppshim.models import cache_dir

MAX_ENTRIES = 1000


class FileFacts:
    """The texts that are known of files, under a name; ``is_fact`` tells a text from damage."""

    def __init__(self, name: str, is_fact: Callable[[str], object]) -> None:
        self._cache = cache_dir() / f"{name}.json"
        self._is_fact = is_fact
        self._known = self._read()
        self._new: dict[str, str] = {}

    def learn(self, path: str | os.PathLike[str], find_out: Callable[[], str]) -> str:
        """What is known, else what is found out; not kept where the file has changed meanwhile."""
        file = identity_of(path)
        if file is None:
            return find_out()
        key = "|".join(map(str, (os.path.abspath(path), *file)))
        if (known := self._new.get(key) or self._known.get(key)) is not None:
            return known
        found = find_out()
        if identity_of(path) == file:
            self._new[key] = found
        return found

    def save(self) -> None:
        """Whole or not at all; two processes at once may lose some of their entries."""
        if not self._new:
            return
        newest = dict(list({**self._read(), **self._new}.items())[-MAX_ENTRIES:])
        with contextlib.suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self._cache) as file:
                file.write(json.dumps(newest, indent=0).encode())

    def _read(self) -> dict[str, str]:
        try:
            with open_regular(self._cache) as file:
                found = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, str) and self._is_fact(value)}
