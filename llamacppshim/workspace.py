"""Owns what a model is told of a folder: its files as a chat begins, and later only what has changed in them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from llamacppshim.assemble import Count, Segment, admit, assemble_context
from llamacppshim.errors import InvalidArgumentError
from llamacppshim.folders import read_folder

INSTRUCTION = "These are the files of a folder. Answer questions about them.\n"
CHANGED = "The folder has changed since.\n"
REMOVED = "This file was removed."
CONTEXT_LINES = 2

Files = dict[str, str]


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it is now (None: gone), and the text that says so to a model that knows the file before."""

    name: str
    content: str | None
    text: str


def read(folder: Path, on_skip: Callable[[str, str], None] | None = None) -> Files:
    """Every text file below a folder, by its path within it.

    Raises
    ------
    InvalidArgumentError  it is no folder, or holds no text
    OSError               it cannot be read
    """
    files = {segment.name or "": segment.content for segment in read_folder(folder, on_skip=on_skip)}
    if not files:
        raise InvalidArgumentError(f"{folder} holds no text files", field="folder", actual=str(folder))
    return files


def chosen(files: Mapping[str, str], budget: int, count: Count) -> tuple[Files, list[str]]:
    """The files that fit a budget of tokens, the smallest first, and the names of the others.

    Raises InvalidArgumentError where not even one fits.
    """
    by_size = sorted(files, key=lambda name: (-len(files[name].encode()), name))
    segments = [_segment(name, files[name]) for name in by_size]  # of files, admission keeps the last ones longest
    kept = {segment.name or "" for segment in admit(segments, max(0, budget), count).kept}
    if not kept:
        n_least = min(count(segment.block) for segment in segments)
        raise InvalidArgumentError(
            f"the smallest file has {n_least:,} tokens, and there is room for {max(0, budget):,}: give a larger --ctx",
            field="ctx",
        )
    return {name: files[name] for name in sorted(kept)}, sorted(files.keys() - kept)


def told(files: Mapping[str, str]) -> str:
    """The files, as a chat begins with them."""
    return INSTRUCTION + assemble_context(_segment(name, content) for name, content in files.items()).stable_text


def changed(known: Mapping[str, str], now: Mapping[str, str], left_out: Iterable[str]) -> list[str]:
    """The names of files that are not what the model knows, new ones included. Those left out are not missed."""
    new = now.keys() - known.keys() - set(left_out)
    return sorted(new | {name for name, content in known.items() if now.get(name) != content})


def update(name: str, known: str | None, now: str | None, count: Count) -> Update:
    """What to say of a file: the lines that differ, or the whole where that takes fewer tokens."""
    if now is None:
        return Update(name, None, Segment("diff", REMOVED, name).block)
    whole = _segment(name, now).block
    if known is None:
        return Update(name, now, whole)
    lines = difflib.unified_diff(known.splitlines(), now.splitlines(), "before", "now", n=CONTEXT_LINES, lineterm="")
    difference = Segment("diff", "\n".join(lines), name).block
    return Update(name, now, min(difference, whole, key=count))


def asked(question: str, updates: Sequence[Update]) -> str:
    """A question, after what has changed since the last one."""
    return CHANGED + "".join(one.text for one in updates) + "\n" + question if updates else question


def _segment(name: str, content: str) -> Segment:
    return Segment("pinned_file", content, name)
