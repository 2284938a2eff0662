"""Owns reading a folder into segments: which files are text that somebody wrote, and why others are left out. Pure."""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamacppshim.assemble import NOT_IN_A_LINE, Segment, refused, require_int
from llamacppshim.errors import InvalidArgumentError, UnsupportedFeatureError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    _Rules = tuple[str, GitIgnoreSpec]  # the folder that they are relative to, and the patterns

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
    is no UTF-8 text or holds a NUL, empty and larger files, and those that cannot be read. Needs ``pathspec`` and
    ``google-re2``.

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
    InvalidArgumentError     the path is no folder, a parameter makes no sense, or patterns are too large together
    UnsupportedFeatureError  ``pathspec`` or ``google-re2`` is not installed
    OSError                  the folder itself cannot be read
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidArgumentError(f"{root} is not a folder", field="path", expected="a folder", actual=str(root))
    require_int("max_file_bytes", max_file_bytes, 0)
    if max_file_bytes > MOST_FILE_BYTES:
        raise refused("max_file_bytes", max_file_bytes, f"at most {MOST_FILE_BYTES:,}")
    wanted = None if suffixes is None else tuple(suffix.lower() for suffix in _texts("suffixes", suffixes))
    reader = _FolderReader(root, wanted, max_file_bytes, on_skip)
    return sorted(reader.read(_unicode("ignore", _texts("ignore", ignore))), key=lambda segment: segment.name or "")


def _texts(field: str, values: Iterable[str]) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise refused(field, values, "a sequence of texts")
    found = list(values)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise refused(f"{field}[{i}]", text, "a text")
    return found


def _unicode(field: str, texts: Sequence[str]) -> Sequence[str]:
    for i, text in enumerate(texts):
        if not _is_unicode(text):
            raise refused(f"{field}[{i}]", text, "a text without lone surrogates")
    return texts


class _SkippedError(Exception):
    """Why a file is left out."""


class _FolderReader:
    """One reading of a folder. Where patterns differ, the deeper ``.gitignore`` decides, as in git."""

    def __init__(self, root: Path, suffixes: tuple[str, ...] | None, max_bytes: int, on_skip: OnSkip | None) -> None:
        try:
            import re2  # type: ignore[import-untyped]
            from pathspec import GitIgnoreSpec
        except ImportError:
            raise UnsupportedFeatureError(
                "reading a folder needs pathspec and google-re2: pip install 'llamacppshim[cli]'", feature="read_folder"
            ) from None
        self._spec, self._no_regex = GitIgnoreSpec, re2.error
        self._root = root
        self._suffixes = suffixes
        self._max_bytes = max_bytes
        self._on_skip = on_skip

    def read(self, ignore: Iterable[str]) -> Iterator[Segment]:
        """In no order that means anything."""
        folders: list[tuple[str, list[_Rules]]] = [("", [("", self._patterns("ignore", ignore))])]
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
                name = f"{folder}.gitignore"
                rules = [*rules, (folder, self._patterns(name, self._gitignore(name)))]
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

    def _patterns(self, name: str, lines: Iterable[str]) -> GitIgnoreSpec:
        """Without the lines that are none: git passes over them too. RE2 matches them: with `re`, some patterns would
        search for ever."""
        good = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of brackets that Python may read otherwise one day
            for line in lines:
                try:
                    self._spec.from_lines([line], backend="re2")
                except (ValueError, re.error, self._no_regex):
                    continue
                good.append(line)
            try:
                return self._spec.from_lines(good, backend="re2")
            except self._no_regex:
                raise InvalidArgumentError(
                    f"{name}: its patterns are too large to be matched together", field="ignore"
                ) from None

    def _gitignore(self, name: str) -> list[str]:
        try:
            data = self._bytes(name, MAX_GITIGNORE_BYTES)
        except _SkippedError as skipped:
            self._skip(name, str(skipped))
            return []
        lines = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").split("\n")
        return [line.removesuffix("\r") for line in lines if _is_unicode(line)]  # a name that is no UTF-8 is not read

    def _judge(self, entry: os.DirEntry[str], name: str, rules: Sequence[_Rules]) -> None:
        """By everything but its content."""
        if entry.is_symlink():
            raise _SkippedError("a link")
        if entry.name.startswith("."):
            raise _SkippedError("hidden")
        if NOT_IN_A_LINE.search(name) or not _is_unicode(name):
            raise _SkippedError("its name is not a line of UTF-8")
        if not name.endswith("/"):
            if not entry.is_file(follow_symlinks=False):
                raise _SkippedError("not a regular file")
            if self._suffixes is not None and not entry.name.lower().endswith(self._suffixes):
                raise _SkippedError("another suffix")
        for folder, patterns in reversed(rules):
            ignored = patterns.check_file(name[len(folder) :]).include
            if ignored is not None:
                if ignored:
                    raise _SkippedError("ignored")
                return

    def _content(self, name: str) -> str:
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
