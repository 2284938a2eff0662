"""Owns a model's file before its header is read: that it is a GGUF file with all its parts, and what a source is. Pure.

A name may lead anywhere: nothing but a regular file is opened, and whatever it is called, messages are one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

from llamacppshim.files import open_regular, sha256_of

MAGIC = b"GGUF"
MAX_LISTED = 10

SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

Origin = Literal["path", "ollama", "hf", "default"]


class ModelSource(msgspec.Struct, frozen=True):
    """Where a model's file is.

    ``digest`` is its SHA-256 as the origin tells it, else None; a path tells none. ``notes`` says, one line each, what
    the origin has besides and is not used.
    """

    path: Path
    digest: str | None
    origin: Origin
    notes: tuple[str, ...] = ()


class FoundModel(msgspec.Struct, frozen=True):
    """An entry of a store: the ``spec`` that `resolve_model` takes, and either its source or why it has none."""

    spec: str
    source: ModelSource | None
    n_bytes: int = 0
    reason: str = ""


class Refused(Exception):
    """Why there is no source; whoever knows what was asked for makes the error of it."""


def one_line(text: str, limit: int = 1000) -> str:
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:limit])
    return shown + "…" * (len(text) > limit)


def reason_of(error: Exception) -> str:
    """What an error says, the system's without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def some_of(names: Iterable[str]) -> str:
    """Names for an error's text, and how many it leaves out."""
    listed = sorted(names)
    more = len(listed) - MAX_LISTED
    return ", ".join(listed[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def opened(path: str | Path, what: str = "") -> IO[bytes]:
    """A regular file, to read."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise Refused(f"{what}no such file") from error
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise Refused(f"{what}{reason_of(error)}") from error


def check_gguf(file: IO[bytes], what: str = "") -> None:
    begin = file.read(len(MAGIC))
    if begin != MAGIC:
        seen = f"it begins with {begin!r}" if begin else "it is empty"
        raise Refused(f"{what}is not a GGUF file: {seen}")


def check_digest(file: IO[bytes], digest: str, what: str = "") -> None:
    file.seek(0)
    if (computed := sha256_of(file)) != digest:
        raise Refused(f"{what}damaged: its SHA-256 is {computed}, expected {digest}")


def part_names(name: str) -> Iterator[str]:
    """The file's name, or those of all parts where it is the first part of a split model."""
    split = SPLIT.fullmatch(name)
    if split is None or int(split[3]) == 0:
        yield name
        return
    stem, number, count = split[1], int(split[2]), int(split[3])
    if number != 1:
        raise Refused(f"is part {number} of {count}: give the first, {stem}-00001-of-{split[3]}.gguf")
    for part in range(1, count + 1):
        yield f"{stem}-{part:05}-of-{split[3]}.gguf"


def checked_path(given: str) -> Path:
    """A GGUF file with all its parts there."""
    path = Path(given)
    if SPLIT.fullmatch(path.name) is None and os.path.islink(given):
        # llama.cpp finds the other parts by the first one's name, which a link may lack.
        target = Path(os.path.realpath(given))
        path = target if SPLIT.fullmatch(target.name) else path
    for name in part_names(path.name):
        what = "" if name == path.name else f"part {name}: "
        with opened(path.with_name(name) if name != path.name else path, what) as file:
            check_gguf(file, what)
    return path


def _size_of(path: Path) -> int:
    return sum(os.stat(path.with_name(name)).st_size for name in part_names(path.name))


def found_model(spec: str, source: ModelSource) -> FoundModel:
    return FoundModel(spec, source, _size_of(source.path))
