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
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal, get_args

import msgspec

from llamacppshim.errors import ContextOverflowError, InvalidArgumentError
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import SegmentRecord, hash_bytes, hash_tokens

StableKind = Literal["system", "tools", "repo_rules", "repo_map", "pinned_file", "task_summary"]
VolatileKind = Literal["diff", "test_output", "log", "user_turn", "assistant_turn"]
Kind = Literal[StableKind, VolatileKind]
STABLE_KINDS: tuple[str, ...] = get_args(StableKind)
VOLATILE_KINDS: tuple[str, ...] = get_args(VolatileKind)

#: How many tokens a text has where it follows a newline: alone, some vocabularies would put a space before it.
Count = Callable[[str], int]
#: The tokens of the joint text, and at which of them each text begins: `text.Tokenizer.segments` does it.
Tokenize = Callable[[Sequence[bytes]], tuple[Tokens, Sequence[int]]]
Verdict = tuple[Literal["pinned", "kept", "dropped"], str]

#: Patterns of folders that tools write.
MAX_COUNTS = 1 << 16

_ORDER = {kind: place for place, kind in enumerate((*STABLE_KINDS, *VOLATILE_KINDS))}
_ORDER["assistant_turn"] = _ORDER["user_turn"]  # a conversation is one list
_NUMBERS = ("tokens", "from")
NOT_IN_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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
            raise refused("kind", self.kind, "one of " + " ".join((*STABLE_KINDS, *VOLATILE_KINDS)))
        _utf8("content", self.content)
        if self.name is not None:
            _utf8("name", self.name)
            if not self.name or NOT_IN_A_LINE.search(self.name):
                raise refused("name", self.name, "None, or one line of text that is not empty")

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
            require_int("budget", self.budget, 0)
        if self.block_size is not None:
            require_int("block_size", self.block_size, 1)


class TokenCounter:
    """A counter that counts each text once. Keeps the counts of the last `max_counts` texts, by SHA-256, and no text.

    For one tokenizer. Safe from several threads at once, where `count` is.
    """

    def __init__(self, count: Count, max_counts: int = MAX_COUNTS) -> None:
        require_int("max_counts", max_counts, 1)
        self._count = count
        self._max_counts = max_counts
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __call__(self, text: str) -> int:
        key = hashlib.sha256(_utf8("text", text)).digest()
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
        head = ("kind", "name", "priority", "tokens", "from", "block", "", "why")
        lines = [head, *(_cells(row, self.block_size) for row in self.rows)]
        columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        shown = [
            "  ".join(
                cell.rjust(width) if column[0] in _NUMBERS else cell.ljust(width)
                for cell, width, column in zip(cells, widths, columns, strict=True)
            ).rstrip()
            for cells in zip(*columns, strict=True)
        ]
        n_dropped = sum(row.what == "dropped" for row in self.rows)
        total = "" if self.tokens is None else f", {self.tokens:,} tokens"
        limit = "" if self.budget is None else f" of {self.budget:,}"
        return "\n".join([*shown, f"{len(self.rows) - n_dropped} segments{total}{limit}; {n_dropped} dropped"])


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
    require_int("budget", budget, 0)
    n_tokens = _counted(count, [segment.block for segment in given])
    return _admission(given, n_tokens, _verdicts(given, n_tokens, budget), ContextPolicy(budget=budget))


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
        raise refused("policy", policy, "a ContextPolicy or None")
    ordered = sorted(_segments(segments), key=_place)
    blocks = [segment.block for segment in ordered]
    n_tokens = None if count is None else _counted(count, blocks)
    if policy.budget is None:
        verdicts = [_without_budget(segment) for segment in ordered]
    elif n_tokens is None:
        raise refused("count", count, "a counter of tokens where there is a budget")
    else:
        verdicts = _verdicts(ordered, n_tokens, policy.budget)
    admission = _admission(ordered, n_tokens, verdicts, policy)

    stable: list[str] = []
    volatile: list[str] = []
    records: list[SegmentRecord] = []
    stable_hash = hashlib.sha256()
    at = 0
    for segment, block, (what, _) in zip(ordered, blocks, verdicts, strict=True):
        if what == "dropped":
            continue
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
        explanation=admission.explanation,
    )


# Ordering and admission.


def _place(segment: Segment) -> tuple[int, str, str]:
    if segment.stable:
        return _ORDER[segment.kind], segment.name or "", segment.content
    return _ORDER[segment.kind], "", ""


def _verdicts(segments: Sequence[Segment], n_tokens: Sequence[int], budget: int) -> list[Verdict]:
    found: dict[int, Verdict] = {}
    n_pinned = n_newest = 0
    newest = max((i for i, segment in enumerate(segments) if segment.kind == "user_turn"), default=None)
    for i, segment in enumerate(segments):
        if segment.priority is Priority.PINNED:
            found[i] = _without_budget(segment)
            n_pinned += n_tokens[i]
        elif i == newest:
            found[i] = ("kept", "the newest user turn always stays")
            n_newest = n_tokens[i]
    left = budget - n_pinned - n_newest
    if left < 0:
        raise ContextOverflowError(stage="admit", resident_tokens=n_pinned, additional_tokens=n_newest, num_ctx=budget)
    first_gone: Segment | None = None
    ranked = sorted(set(range(len(segments))) - set(found), key=lambda i: (-segments[i].priority, -i))
    for i in ranked:
        if first_gone is not None:
            found[i] = ("dropped", f"ranks below {first_gone.title}, which does not fit")
        elif n_tokens[i] > left:
            found[i] = ("dropped", f"needs {n_tokens[i]:,} tokens, {left:,} are left")
            first_gone = segments[i]
        else:
            found[i] = ("kept", "fits")
            left -= n_tokens[i]
    return [found[i] for i in range(len(segments))]


def _without_budget(segment: Segment) -> Verdict:
    if segment.priority is Priority.PINNED:
        return ("pinned", "is never dropped")
    return ("kept", "there is no budget")


def _admission(
    segments: Sequence[Segment], n_tokens: Sequence[int] | None, verdicts: Sequence[Verdict], policy: ContextPolicy
) -> Admission:
    rows: list[Row] = []
    kept: list[Segment] = []
    dropped: list[Segment] = []
    at = 0
    for i, (segment, (what, why)) in enumerate(zip(segments, verdicts, strict=True)):
        (dropped if what == "dropped" else kept).append(segment)
        start = None if n_tokens is None or what == "dropped" else at
        rows.append(
            Row(
                kind=segment.kind,
                name=segment.name,
                priority=segment.priority,
                tokens=None if n_tokens is None else n_tokens[i],
                what=what,
                why=why,
                token_start=start,
                block_offset=None if start is None or policy.block_size is None else start % policy.block_size,
            )
        )
        at += 0 if n_tokens is None or what == "dropped" else n_tokens[i]
    explanation = Explanation(
        rows=tuple(rows),
        tokens=None if n_tokens is None else at,
        budget=policy.budget,
        block_size=policy.block_size,
    )
    return Admission(kept=tuple(kept), dropped=tuple(dropped), explanation=explanation)


def _cells(row: Row, block_size: int | None) -> tuple[str, ...]:
    block = ""
    if row.token_start is not None and block_size is not None:
        block = f"{row.token_start // block_size} + {row.block_offset}"
    return (
        row.kind,
        row.name or "",
        row.priority.name.lower(),
        "" if row.tokens is None else f"{row.tokens:,}",
        "" if row.token_start is None else f"{row.token_start:,}",
        block,
        row.what,
        row.why,
    )


# Judging what is given.


def refused(field: str, value: object, expected: str) -> InvalidArgumentError:
    shown = repr(value[:80] if isinstance(value, str) else value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidArgumentError(
        f"{field} is {shown}, expected {expected}", field=field, expected=expected, actual=value
    )


def require_int(field: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise refused(field, value, f"an integer of at least {low}")


def _utf8(field: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise refused(field, text, "a text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{field} has a lone surrogate at index {error.start}", field=field, actual=error.start
        ) from None


def _segments(segments: Iterable[Segment]) -> list[Segment]:
    found = list(segments)
    for i, segment in enumerate(found):
        if not isinstance(segment, Segment):
            raise refused(f"segments[{i}]", segment, "a Segment")
    return found


def _counted(count: Count, blocks: Sequence[str]) -> list[int]:
    if not callable(count):
        raise refused("count", count, "a function of a text")
    found = [count(block) for block in blocks]
    for n in found:
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise refused("count", n, "a number of tokens from each call")
    return found
