"""Owns the way from segments to a prompt: their order, what of them fits a budget, and their frame. Pure.

Stable segments stand first, so that a change of the volatile ones leaves the prefix as it was. Each segment is framed:

    pinned_file src/a.py
    <its content, unchanged>
    end

Every frame begins with a letter at the start of a line and ends with a single newline after a letter. There no
tokenizer merges, so the tokens of the whole are those of the frames, and their counts add up. A frame is for the
model's eyes only: a content that looks like one forges nothing, for positions come from the byte ranges.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from llamacppshim.errors import ContextOverflowError, InvalidArgumentError, UnsupportedFeatureError
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import SegmentRecord, hash_bytes, hash_tokens

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

StableKind = Literal["system", "tools", "repo_rules", "repo_map", "pinned_file", "task_summary"]
VolatileKind = Literal["diff", "test_output", "log", "user_turn", "assistant_turn"]
Kind = Literal[StableKind, VolatileKind]
STABLE_KINDS: tuple[str, ...] = get_args(StableKind)
VOLATILE_KINDS: tuple[str, ...] = get_args(VolatileKind)

#: How many tokens a text has.
Count = Callable[[str], int]
#: The tokens of the joint text, and at which of them each text begins: `text.Tokenizer.segments` does it.
Tokenize = Callable[[Sequence[bytes]], tuple[Tokens, Sequence[int]]]
#: Told (path relative to the folder, why it was left out).
OnSkip = Callable[[str, str], None]

#: Patterns of folders that tools write.
GENERATED = ("__pycache__/", "build/", "dist/", "node_modules/", "target/", "venv/")
MAX_FILE_BYTES = 1 << 20
MAX_COUNTS = 1 << 16

_ORDER = {kind: place for place, kind in enumerate((*STABLE_KINDS, *VOLATILE_KINDS))}
_ORDER["assistant_turn"] = _ORDER["user_turn"]  # a conversation is one list
_NOT_IN_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Priority(IntEnum):
    """What goes last where not everything fits; PINNED never goes."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2
    PINNED = 3


PRIORITIES = {
    **dict.fromkeys(("system", "tools", "repo_rules"), Priority.PINNED),
    **dict.fromkeys(("repo_map", "pinned_file", "task_summary"), Priority.HIGH),
    **dict.fromkeys(("diff", "test_output"), Priority.MEDIUM),
    **dict.fromkeys(("log", "user_turn", "assistant_turn"), Priority.LOW),
}


class Segment(msgspec.Struct, frozen=True):
    """A piece of a prompt: what it is, its text, and the name it is shown with (a file's path, for instance).

    Raises InvalidArgumentError for an unknown kind, a content that is not Unicode text (a lone surrogate), or a name
    that is not one line of it. Every other character is allowed in a content, NUL too.
    """

    kind: Kind
    content: str
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _ORDER:
            raise _refused("kind", self.kind, "one of " + " ".join((*STABLE_KINDS, *VOLATILE_KINDS)))
        _require_text("content", self.content)
        if self.name is not None:
            _require_text("name", self.name)
            if not self.name or _NOT_IN_A_LINE.search(self.name):
                raise _refused("name", self.name, "None, or one line of text that is not empty")

    @property
    def stable(self) -> bool:
        return self.kind in STABLE_KINDS

    @property
    def priority(self) -> Priority:
        return PRIORITIES[self.kind]

    @property
    def title(self) -> str:
        return self.kind if self.name is None else f"{self.kind} {self.name}"

    @property
    def block(self) -> str:
        """As it stands in the prompt."""
        return f"{self.title}\n{self.content}\nend\n"


class ContextPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt is assembled.

    Attributes
    ----------
    budget
        Most tokens of all segments together, BOS not counted. None: no limit.
    block_size
        Tokens of a block of the cache, ``n_ubatch`` for instance: the explanation then tells where segments begin in
        their block. It moves nothing.
    """

    budget: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            _require_int("budget", self.budget, 0)
        if self.block_size is not None:
            _require_int("block_size", self.block_size, 1)


class TokenCounter:
    """A counter that counts each text once. Keeps the counts of the last `max_counts` texts, by SHA-256, and no text.

    For one tokenizer. Safe from several threads at once, where `count` is.
    """

    def __init__(self, count: Count, max_counts: int = MAX_COUNTS) -> None:
        _require_int("max_counts", max_counts, 1)
        self._count = count
        self._max_counts = max_counts
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __call__(self, text: str) -> int:
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            if (found := self._counts.get(key)) is not None:
                self._counts.move_to_end(key)
                return found
        n = self._count(text)
        with self._lock:
            self._counts[key] = n
            if len(self._counts) > self._max_counts:
                self._counts.popitem(last=False)
        return n


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one segment.

    ``tokens`` is what the counter said of its block; ``token_start`` where it begins among those that stand, BOS not
    counted, and ``block_offset`` how far that is behind the start of a cache block (0: aligned). None: not known.
    """

    kind: str
    name: str | None
    priority: Priority
    tokens: int | None
    what: Literal["pinned", "kept", "dropped"]
    why: str
    token_start: int | None = None
    block_offset: int | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each segment, in the order of the prompt. ``str()`` of it is a table meant to be read.

    ``tokens``: of all that stand; None where there was no counter.
    """

    rows: tuple[Row, ...]
    tokens: int | None
    budget: int | None
    block_size: int | None = None

    def __str__(self) -> str:
        head = ("kind", "name", "priority", "tokens", "at", "", "why")
        lines = [head, *(_cells(row, self.block_size) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(
                cell.rjust(width) if i in (3, 4) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        n_dropped = sum(row.what == "dropped" for row in self.rows)
        total = "" if self.tokens is None else f", {self.tokens:,} tokens"
        limit = "" if self.budget is None else f" of {self.budget:,}"
        table.append(f"{len(self.rows) - n_dropped} segments{total}{limit}; {n_dropped} dropped")
        return "\n".join(table)


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What fits a budget: the segments that stay and those that go, both in the order given, and why."""

    kept: tuple[Segment, ...]
    dropped: tuple[Segment, ...]
    explanation: Explanation


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt: its segments in order, as texts and as records, and what became of those that were offered.

    Attributes
    ----------
    stable_parts, volatile_parts
        The block of each segment. `Session.ensure_prefix` takes the stable ones, `Session.prefill_suffix` the
        `volatile_text`.
    records
        Where each block lies in the bytes of `text`, and its hash. Their token ranges are empty until `tokenized`.
    stable_byte_hash
        SHA-256 of the stable text, as in `PrefixStatus`.
    """

    segments: tuple[Segment, ...]
    stable_parts: tuple[str, ...]
    volatile_parts: tuple[str, ...]
    records: tuple[SegmentRecord, ...]
    stable_byte_hash: str
    explanation: Explanation

    @property
    def stable_text(self) -> str:
        return "".join(self.stable_parts)

    @property
    def volatile_text(self) -> str:
        return "".join(self.volatile_parts)

    @property
    def text(self) -> str:
        return self.stable_text + self.volatile_text

    @property
    def stable_bytes(self) -> int:
        return max((record.byte_end for record in self.records if record.stable), default=0)

    @property
    def total_bytes(self) -> int:
        return self.records[-1].byte_end if self.records else 0

    def explain(self) -> Explanation:
        return self.explanation

    def tokenized(self, tokenize: Tokenize) -> Assembled:
        """The same with the token ranges and hashes of its records filled, BOS not counted.

        Raises whatever `tokenize` raises: ManifestMismatchError where a token reaches over the boundary of two blocks.
        """
        parts = [part.encode() for part in (*self.stable_parts, *self.volatile_parts)]
        tokens, starts = tokenize(parts)
        ends = [*starts, len(tokens)][1:]
        records = tuple(
            msgspec.structs.replace(
                record, token_start=int(begin), token_end=int(end), token_hash=hash_tokens(tokens[begin:end])
            )
            for record, begin, end in zip(self.records, starts, ends, strict=True)
        )
        return msgspec.structs.replace(self, records=records)


def admit(segments: Iterable[Segment], budget: int, count: Count) -> Admission:
    """Which segments stay within a budget of tokens.

    The pinned ones (system, tools, repo_rules) and the newest user turn, the last of the list, always stay. The others
    are ranked by priority and, within one, by recency: the later in the list, the higher. They stay from the highest
    rank down to the first that does not fit; that one goes, and with it every lower rank, smaller or not. So nothing
    is dropped while something of a lower priority stays, a conversation loses its beginning and never its middle, and
    a larger budget keeps all that a smaller one does.

    Parameters
    ----------
    segments
        In the order of the prompt; what stays keeps it.
    budget
        Most tokens of the blocks of all that stay.
    count
        Tokens of a block; a `TokenCounter` remembers them.

    Raises
    ------
    ContextOverflowError  stage "admit": the pinned segments (``resident_tokens``) and the newest user turn
                          (``additional_tokens``) alone exceed the budget (``num_ctx``)
    InvalidArgumentError  what is no segment, a budget below 0, or a count that is no number of tokens
    """
    given = _segments(segments)
    _require_int("budget", budget, 0)
    return _admitted(given, budget, [_counted(count, segment.block) for segment in given])


def assemble_context(
    segments: Iterable[Segment], *, count: Count | None = None, policy: ContextPolicy | None = None
) -> Assembled:
    """The prompt of these segments; the same for any order in which they are given.

    Kinds follow each other as in `STABLE_KINDS` and `VOLATILE_KINDS`. Within a stable kind segments stand by name and
    then by content, compared by code point, and without a name first. The volatile kinds have an order of their own,
    in which they must be given: diffs among each other, test outputs, logs, and all turns of the conversation, of the
    user and of the assistant, as one list.

    Parameters
    ----------
    count
        Tokens of a block; needed for a budget, else only for the explanation.
    policy
        With a budget, `admit` is asked what of the ordered prompt stays: in one priority the end of it stays longest.

    Raises
    ------
    ContextOverflowError, InvalidArgumentError  as `admit`
    """
    policy = ContextPolicy() if policy is None else policy
    if not isinstance(policy, ContextPolicy):
        raise _refused("policy", policy, "a ContextPolicy or None")
    ordered = sorted(_segments(segments), key=_place)
    n_tokens = None if count is None else [_counted(count, segment.block) for segment in ordered]
    if policy.budget is None:
        admission = _everything(ordered, n_tokens)
    elif n_tokens is None:
        raise _refused("count", count, "a counter of tokens: there is a budget")
    else:
        admission = _admitted(ordered, policy.budget, n_tokens)

    stable: list[str] = []
    volatile: list[str] = []
    records: list[SegmentRecord] = []
    stable_hash = hashlib.sha256()
    at = 0
    for segment in admission.kept:
        block = segment.block
        data = block.encode()
        (stable if segment.stable else volatile).append(block)
        if segment.stable:
            stable_hash.update(data)
        records.append(
            SegmentRecord(
                kind=segment.kind,
                stable=segment.stable,
                byte_start=at,
                byte_end=at + len(data),
                byte_hash=hash_bytes(data),
                token_start=0,
                token_end=0,
                token_hash="",
            )
        )
        at += len(data)
    return Assembled(
        segments=admission.kept,
        stable_parts=tuple(stable),
        volatile_parts=tuple(volatile),
        records=tuple(records),
        stable_byte_hash=stable_hash.hexdigest(),
        explanation=_placed(admission.explanation, policy.block_size),
    )


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
    is no UTF-8 text or holds a NUL, empty and larger files, and those that cannot be read. Needs ``pathspec``.

    Parameters
    ----------
    suffixes
        ``{".py", ".c"}``: only files that end so, in whatever case. None: all.
    max_file_bytes
        Larger files are left out.
    ignore
        Patterns as in a ``.gitignore`` of the folder that comes before its own. Given ones replace the default.
    on_skip
        Told (path relative to the folder, why) of all that is left out; of a folder once, its path ending with "/".

    Raises
    ------
    InvalidArgumentError     the path is no folder, or a parameter makes no sense
    UnsupportedFeatureError  ``pathspec`` is not installed
    OSError                  the folder itself cannot be read
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidArgumentError(f"{root} is not a folder", field="path", expected="a folder", actual=str(root))
    _require_int("max_file_bytes", max_file_bytes, 0)
    wanted = None if suffixes is None else tuple(_suffix(one) for one in _texts("suffixes", suffixes))
    reader = _FolderReader(root, wanted, max_file_bytes, on_skip or (lambda name, why: None))
    return sorted(reader.read(_texts("ignore", ignore)), key=lambda segment: segment.name or "")


# Ordering and admission.


def _place(segment: Segment) -> tuple[int, str, str]:
    if segment.stable:
        return _ORDER[segment.kind], segment.name or "", segment.content
    return _ORDER[segment.kind], "", ""


def _admitted(segments: Sequence[Segment], budget: int, n_tokens: Sequence[int]) -> Admission:
    newest = max((i for i, segment in enumerate(segments) if segment.kind == "user_turn"), default=None)
    pinned = [i for i, segment in enumerate(segments) if segment.priority is Priority.PINNED]
    n_pinned = sum(n_tokens[i] for i in pinned)
    n_newest = 0 if newest is None else n_tokens[newest]
    left = budget - n_pinned - n_newest
    if left < 0:
        raise ContextOverflowError(
            stage="admit", resident_tokens=n_pinned, additional_tokens=n_newest, num_ctx=budget
        )

    what: dict[int, tuple[Literal["pinned", "kept", "dropped"], str]] = dict.fromkeys(pinned, ("pinned", "never goes"))
    if newest is not None:
        what[newest] = ("kept", "the newest user turn always stays")
    ranked = sorted((i for i in range(len(segments)) if i not in what), key=lambda i: (-segments[i].priority, -i))
    first_gone: int | None = None
    for i in ranked:
        if first_gone is not None:
            what[i] = ("dropped", f"ranks below {segments[first_gone].title}, which does not fit")
        elif n_tokens[i] > left:
            first_gone = i
            what[i] = ("dropped", f"needs {n_tokens[i]:,} tokens, {left:,} are left")
        else:
            left -= n_tokens[i]
            what[i] = ("kept", "fits")

    rows = tuple(
        Row(
            kind=segment.kind,
            name=segment.name,
            priority=segment.priority,
            tokens=n_tokens[i],
            what=what[i][0],
            why=what[i][1],
        )
        for i, segment in enumerate(segments)
    )
    return Admission(
        kept=tuple(segment for i, segment in enumerate(segments) if what[i][0] != "dropped"),
        dropped=tuple(segment for i, segment in enumerate(segments) if what[i][0] == "dropped"),
        explanation=Explanation(rows=rows, tokens=budget - left, budget=budget),
    )


def _everything(segments: Sequence[Segment], n_tokens: Sequence[int] | None) -> Admission:
    rows = tuple(
        Row(
            kind=segment.kind,
            name=segment.name,
            priority=segment.priority,
            tokens=None if n_tokens is None else n_tokens[i],
            what="pinned" if segment.priority is Priority.PINNED else "kept",
            why="no budget",
        )
        for i, segment in enumerate(segments)
    )
    total = None if n_tokens is None else sum(n_tokens)
    return Admission(
        kept=tuple(segments), dropped=(), explanation=Explanation(rows=rows, tokens=total, budget=None)
    )


def _placed(explanation: Explanation, block_size: int | None) -> Explanation:
    """With the places of those that stand."""
    if explanation.tokens is None:
        return explanation
    rows: list[Row] = []
    at = 0
    for row in explanation.rows:
        if row.what != "dropped" and row.tokens is not None:
            offset = None if block_size is None else at % block_size
            rows.append(msgspec.structs.replace(row, token_start=at, block_offset=offset))
            at += row.tokens
        else:
            rows.append(row)
    return msgspec.structs.replace(explanation, rows=tuple(rows), block_size=block_size)


def _cells(row: Row, block_size: int | None) -> tuple[str, ...]:
    at = "" if row.token_start is None else f"{row.token_start:,}"
    if row.token_start is not None and block_size is not None:
        at += f" = {row.token_start // block_size}*{block_size}+{row.block_offset}"
    return (
        row.kind,
        row.name or "",
        row.priority.name.lower(),
        "" if row.tokens is None else f"{row.tokens:,}",
        at,
        row.what,
        row.why,
    )


# Folders.


class _FolderReader:
    """One reading of a folder. A pattern of a deeper ``.gitignore`` outweighs those above, as git has it."""

    def __init__(self, root: Path, suffixes: tuple[str, ...] | None, max_bytes: int, on_skip: OnSkip) -> None:
        try:
            from pathspec import GitIgnoreSpec
        except ImportError:
            raise UnsupportedFeatureError(
                "reading a folder needs pathspec: pip install 'llamacppshim[cli]'", feature="read_folder"
            ) from None
        self._spec = GitIgnoreSpec
        self._root = root
        self._suffixes = suffixes
        self._max_bytes = max_bytes
        self._on_skip = on_skip

    def read(self, ignore: Iterable[str]) -> Iterator[Segment]:
        folders: list[tuple[str, list[tuple[str, GitIgnoreSpec]]]] = [("", [("", self._rules(ignore))])]
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
                rules = [*rules, (folder, self._rules(self._gitignore(folder + ".gitignore")))]
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                name = folder + entry.name + ("/" if is_folder else "")
                if why := self._why_not(entry, name, rules):
                    self._skip(name, why)
                elif is_folder:
                    folders.append((name, rules))
                elif isinstance(content := self._content(name), str):
                    yield Segment("pinned_file", content, name)
                else:
                    self._skip(name, content.why)

    def _rules(self, lines: Iterable[str]) -> GitIgnoreSpec:
        """Without the lines that are no pattern: git passes over them too."""
        good = []
        for line in lines:
            try:
                self._spec.from_lines([line])
            except (ValueError, re.error):
                continue
            good.append(line)
        return self._spec.from_lines(good)

    def _gitignore(self, name: str) -> list[str]:
        try:
            return (self._root / name).read_bytes().decode("utf-8", "surrogateescape").splitlines()
        except OSError as error:
            self._skip(name, _reason(error))
            return []

    def _why_not(self, entry: os.DirEntry[str], name: str, rules: list[tuple[str, GitIgnoreSpec]]) -> str:
        """Judged before anything of it is read; empty where nothing speaks against it."""
        if entry.is_symlink():
            return "a link"
        if entry.name.startswith("."):
            return "hidden"
        if not name.endswith("/"):
            if not entry.is_file(follow_symlinks=False):
                return "no file"
            if self._suffixes is not None and not entry.name.lower().endswith(self._suffixes):
                return "another suffix"
        for folder, spec in reversed(rules):
            verdict = spec.check_file(name[len(folder) :]).include
            if verdict is not None:
                return "ignored" if verdict else ""
        return ""

    def _content(self, name: str) -> str | _Unfit:
        try:
            with open(self._root / name, "rb") as file:
                data = file.read(self._max_bytes + 1)
            if _NOT_IN_A_LINE.search(name):
                return _Unfit("its name is not one line")
            name.encode()
            text = data.decode()
        except OSError as error:
            return _Unfit(_reason(error))
        except UnicodeError:
            return _Unfit("no UTF-8 text")
        if not data:
            return _Unfit("empty")
        if len(data) > self._max_bytes:
            return _Unfit(f"over {self._max_bytes:,} bytes")
        if "\0" in text:
            return _Unfit("binary")
        return text

    def _skip(self, name: str, why: str) -> None:
        self._on_skip(os.fsencode(name).decode("utf-8", "replace"), why)
