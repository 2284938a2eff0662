"""Owns reading a folder into segments: which files are text that somebody wrote, and why others are left out. Pure."""

from __future__ import annotations

import itertools
import os
import re
import stat
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from llamacppshim.assemble import NOT_IN_A_LINE, Segment, refused, require_int
from llamacppshim.errors import InvalidArgumentError

GENERATED = ("__pycache__/", "build/", "dist/", "node_modules/", "target/", "venv/")
MAX_FILE_BYTES = 1 << 20
MOST_FILE_BYTES = 1 << 30
MAX_GITIGNORE_BYTES = 1 << 18

# What a file was when it was listed, it need not be any more: a pipe is not waited for, a link not followed.
_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)

#: Told (path relative to the folder, why it was left out).
OnSkip = Callable[[str, str], None]


def read_folder(
    path: str | os.PathLike[str],
    *,
    suffixes: Iterable[str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    ignore: Iterable[str] = GENERATED,
    on_skip: OnSkip | None = None,
) -> list[Segment]:
    """The text files below a folder as pinned_file segments, by path; the name is the path relative to the folder.

    Left out are links, whatever begins with a dot, what the ``.gitignore`` files in and below the folder exclude, what
    is no UTF-8 text or holds a NUL, empty and larger files, and those that cannot be read.

    Parameters
    ----------
    suffixes
        ``{".py", ".c"}``: only files that end so, in whatever case. None: all.
    max_file_bytes
        Larger files are left out. At most 1 GiB.
    ignore
        Patterns as in a ``.gitignore`` of the folder that comes before its own. Given ones replace the default.
    on_skip
        Told (path relative to the folder, why) of all that is left out; of a folder once, its path ending with "/".

    Raises
    ------
    InvalidArgumentError  the path is no folder, or a parameter makes no sense
    OSError               the folder itself cannot be read
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidArgumentError(f"{root} is not a folder", field="path", expected="a folder", actual=str(root))
    require_int("max_file_bytes", max_file_bytes, 0)
    if max_file_bytes > MOST_FILE_BYTES:
        raise refused("max_file_bytes", max_file_bytes, f"at most {MOST_FILE_BYTES:,}")
    wanted = None if suffixes is None else tuple(suffix.lower() for suffix in _texts("suffixes", suffixes))
    reader = _FolderReader(root, wanted, max_file_bytes, on_skip)
    patterns = _patterns(_encoded("ignore", _texts("ignore", ignore)))
    return sorted(reader.read(patterns), key=lambda segment: segment.name or "")


def _texts(field: str, values: Iterable[str]) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise refused(field, values, "a sequence of texts")
    found = list(values)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise refused(f"{field}[{i}]", text, "a text")
    return found


def _encoded(field: str, texts: Sequence[str]) -> list[bytes]:
    for i, text in enumerate(texts):
        if not _is_unicode(text):
            raise refused(f"{field}[{i}]", text, "a text without lone surrogates")
    return [text.encode() for text in texts]


class _SkippedError(Exception):
    """Why a file is left out."""


class _FolderReader:
    """One reading of a folder. Where patterns differ, the deeper ``.gitignore`` decides, as in git."""

    def __init__(self, root: Path, suffixes: tuple[str, ...] | None, max_bytes: int, on_skip: OnSkip | None) -> None:
        self._root = root
        self._suffixes = suffixes
        self._max_bytes = max_bytes
        self._on_skip = on_skip

    def read(self, ignore: list[_Pattern]) -> Iterator[Segment]:
        """In no order that means anything."""
        folders: list[tuple[str, list[_Rules]]] = [("", [_Rules("", ignore)])]
        while folders:
            folder, rules = folders.pop()
            try:
                entries = sorted(os.scandir(self._root / folder), key=lambda entry: entry.name)
            except OSError as error:
                if not folder:
                    raise
                self._skip(folder, _reason(error))
                continue
            if any(entry.name == ".gitignore" and entry.is_file(follow_symlinks=False) for entry in entries):
                rules = [*rules, _Rules(folder, self._gitignore(f"{folder}.gitignore"))]
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                name = f"{folder}{entry.name}{'/' if is_folder else ''}"
                try:
                    self._judge(entry, name, rules)
                    if is_folder:
                        folders.append((name, rules))
                    else:
                        yield Segment("pinned_file", self._content(name), name)
                except _SkippedError as skipped:
                    self._skip(name, str(skipped))

    def _gitignore(self, name: str) -> list[_Pattern]:
        try:
            data = self._bytes(name, MAX_GITIGNORE_BYTES)
        except _SkippedError as skipped:
            self._skip(name, str(skipped))
            return []
        return _patterns(line.removesuffix(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))

    def _judge(self, entry: os.DirEntry[str], name: str, rules: Sequence[_Rules]) -> None:
        """By everything but its content."""
        if entry.is_symlink():
            raise _SkippedError("a link")
        if entry.name.startswith("."):
            raise _SkippedError("hidden")
        if not name.endswith("/"):
            if not entry.is_file(follow_symlinks=False):
                raise _SkippedError("not a regular file")
            if self._suffixes is not None and not entry.name.lower().endswith(self._suffixes):
                raise _SkippedError("another suffix")
        for folder, patterns in reversed(rules):
            decisive = _decisive(patterns, os.fsencode(name[len(folder) :]))
            if decisive is not None:
                if decisive.ignores:
                    raise _SkippedError("ignored")
                return

    def _content(self, name: str) -> str:
        if NOT_IN_A_LINE.search(name) or not _is_unicode(name):
            raise _SkippedError("its name is not a line of UTF-8")
        data = self._bytes(name, self._max_bytes)
        if not data:
            raise _SkippedError("empty")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise _SkippedError("not UTF-8") from None
        if "\0" in text:
            raise _SkippedError("binary")
        return text

    def _bytes(self, name: str, limit: int) -> bytes:
        """What a file held when it was opened. What has no size is empty, or one of the system's, which may be waited
        for for ever.
        """
        try:
            with open(self._root / name, "rb", opener=lambda path, flags: os.open(path, flags | _OPEN_FLAGS)) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise _SkippedError("not a regular file")
                if found.st_size > limit:
                    raise _SkippedError(f"over {limit:,} bytes")
                return file.read(found.st_size)
        except OSError as error:
            raise _SkippedError(_reason(error)) from None

    def _skip(self, name: str, why: str) -> None:
        if self._on_skip is not None:
            self._on_skip(os.fsencode(name).decode("utf-8", "replace"), why)


def _is_unicode(name: str) -> bool:
    """File names that are not UTF-8 come with lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"


# Patterns, as git reads them: bytes, of which `?` and `[...]` are one.


class _Pattern(NamedTuple):
    """A line of a ``.gitignore``."""

    regex: re.Pattern[bytes]  # of a whole path, or of a whole name
    ignores: bool  # or else, begun with "!", takes that back
    of_path: bool
    of_folder: bool


class _Rules(NamedTuple):
    """The patterns of a folder, of paths relative to it; the last comes first."""

    folder: str
    patterns: list[_Pattern]


_T = TypeVar("_T")
_Piece = bytes | None  # an expression for one byte; None: a star
_Name = list[_Piece] | None  # what one name of a path is; None: "**", any number of names

_LINE_BYTES = 4 * 4096  # enough for the longest path that a system call takes, each byte of it in brackets
_CLASSES = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b" \t",
    b"cntrl": bytes([*range(32), 127]),
    b"digit": string.digits.encode(),
    b"graph": bytes(range(33, 127)),
    b"lower": string.ascii_lowercase.encode(),
    b"print": bytes(range(32, 127)),
    b"punct": string.punctuation.encode(),
    b"space": b" \t\n\r",
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}


def _decisive(patterns: Iterable[_Pattern], path: bytes) -> _Pattern | None:
    """The one that decides on a path, which ends with a slash where it is a folder."""
    is_folder = path.endswith(b"/")
    path = path.removesuffix(b"/")
    name = path.rpartition(b"/")[2]
    for one in patterns:
        if (is_folder or not one.of_folder) and one.regex.fullmatch(path if one.of_path else name):
            return one
    return None


def _patterns(lines: Iterable[bytes]) -> list[_Pattern]:
    """The last first, without the lines that never fit."""
    found = [one for line in lines if (one := _pattern(line)) is not None]
    return found[::-1]


def _pattern(line: bytes) -> _Pattern | None:
    if line.startswith(b"#") or len(line) > _LINE_BYTES:
        return None
    text = line.rstrip(b" ")
    n_escapes = len(text) - len(text.rstrip(b"\\"))
    if n_escapes % 2 and text != line:
        text += b" "
    ignores = not text.startswith(b"!")
    text = text.removeprefix(b"!")
    of_folder = text.endswith(b"/")
    text = text.removesuffix(b"/")
    of_path = b"/" in text
    names = _names(text.removeprefix(b"/"))
    if not text or names is None:
        return None
    return _Pattern(re.compile(_expression(names), re.DOTALL), ignores, of_path, of_folder)


def _names(text: bytes) -> list[_Name] | None:
    """A pattern, taken apart at its slashes. None where it is none: a bracket without its end, a last backslash."""
    pieces: list[_Piece] = []
    names: list[_Name] = [pieces]
    at = 0
    while at < len(text):
        byte, at = text[at : at + 1], at + 1
        is_escaped = byte == b"\\"
        if is_escaped:
            byte, at = text[at : at + 1], at + 1
        if byte == b"/":
            pieces = []
            names.append(pieces)
        elif is_escaped or byte not in b"*?[":
            if not byte:
                return None
            pieces.append(re.escape(byte))
        elif byte == b"?":
            pieces.append(b"[^/]")
        elif byte == b"[":
            found = _set(text, at)
            if found is None:
                return None
            piece, at = found
            pieces.append(piece)
        else:
            begin = at
            while text[at : at + 1] == b"*":
                at += 1
            if at > begin and not pieces and text[at : at + 1] in (b"", b"/"):
                names[-1] = None
            else:
                pieces.append(None)
    return names


def _set(text: bytes, at: int) -> tuple[bytes, int] | None:
    """The expression for a bracket that has just begun, and where it has ended. None where it has no end, or names a
    class that there is not.
    """
    is_negated = text[at : at + 1] in (b"!", b"^")
    begin = at = at + is_negated
    members: set[int] = set()
    low: int | None = None  # of a range, should a dash follow
    while at < len(text):
        byte = text[at : at + 1]
        if byte == b"]" and at > begin:
            members = set(range(256)) - members if is_negated else members
            chosen = b"".join(b"\\x%02x" % member for member in sorted(members - {ord("/")}))
            return (b"[%s]" % chosen if chosen else b"(?!)"), at + 1
        end = text.find(b"]", at + 2) if text[at : at + 2] == b"[:" else -1
        if end > at + 2 and text[end - 1 : end] == b":":
            named = _CLASSES.get(text[at + 2 : end - 1])
            if named is None:
                return None
            members.update(named)
            at, low = end + 1, None
            continue
        is_range = byte == b"-" and low is not None and text[at + 1 : at + 2] not in (b"", b"]")
        at += is_range
        at += text[at : at + 1] == b"\\"
        if at >= len(text):
            return None
        if is_range and low is not None:
            members.update(range(low, text[at] + 1))
            low = None
        else:
            low = text[at]
            members.add(low)
        at += 1
    return None


def _expression(names: Iterable[_Name]) -> bytes:
    """Of a whole path. Every star but the last takes the first place where what follows it fits, and keeps it: that
    leaves the most for the rest, so no other need be tried, and the cost is a product of the two lengths at most.
    """
    n_groups = itertools.count()

    def first(text: bytes) -> bytes:
        group = b"g%d" % next(n_groups)  # a lookahead is left but once; since 3.11 there is (?>...)
        return b"(?=(?P<%s>%s))(?P=%s)" % (group, text, group)

    def written(pieces: list[_Piece]) -> bytes:
        begin, *runs = (b"".join(run) for run in _split(pieces))
        if not runs:
            return begin
        return begin + b"".join(first(b"[^/]*?" + run) for run in runs[:-1]) + b"[^/]*" + runs[-1]

    begin, *blocks = ([written(name) for name in block] for block in _split(names))
    if not blocks:
        return b"/".join(begin)
    text = b"".join(name + b"/" for name in begin)
    for block in blocks[:-1]:
        if block:
            text += first(b"(?:|.*?/)" + b"".join(name + b"/" for name in block))
    return text + (b"(?:|.*?/)" + b"/".join(blocks[-1]) if blocks[-1] else b".+")


def _split(values: Iterable[_T | None]) -> list[list[_T]]:
    """At every None."""
    parts: list[list[_T]] = [[]]
    for value in values:
        if value is None:
            parts.append([])
        else:
            parts[-1].append(value)
    return parts
