"""Owns the snapshot: what a session holds as a value, and its file format (docs/snapshots.md). Pure.

Every byte of a file is judged here before anything native sees one: sizes and places against the file, then the
checksums, then that the parts fit each other. Whose state it is, the manifest says; that is for the runtime to compare.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from llamacppshim.answer import Chunk, TextStream
from llamacppshim.checkpoints import Checkpoint
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import SnapshotCorruptError, SnapshotError, SnapshotMismatchError
from llamacppshim.files import replaced
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import ContextManifest, hash_tokens

MAGIC = b"LCSSNAP\n"
VERSION = 1
ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20

# Magic, version, bytes of the header, bytes of the file, XXH3-64 of the header; zeros to 64 bytes.
_PREAMBLE = struct.Struct("<8sIIQQ32x")

Stage = Literal["empty", "prefix", "suffix"]
Buffer = bytes | memoryview


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file: its place, and XXH3-64 as 16 hex digits."""

    name: str
    offset: int
    nbytes: int
    hash: str


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer that can be taken up: its settings, the seed in use, where in the tokens it begins, what of its text
    was held back, or said although it may begin a stop text, and the chunk that reached nobody. Forbidden tokens: JSON
    has no infinite bias."""

    config: DecodeConfig
    forbidden: tuple[int, ...] = ()
    seed: int
    begin: int
    pending: bytes = b""
    said: str = ""
    late: tuple[str, tuple[int, ...], bool] | None = None  # text, tokens, and whether it is the last by a stop

    @classmethod
    def of(
        cls, config: DecodeConfig, seed: int, begin: int, stream: TextStream, late: Chunk | None = None
    ) -> AnswerRecord:
        bias = pairs_of(config)
        forbidden = tuple(token for token, value in bias if value == -math.inf)
        if forbidden:
            kept = tuple((token, value) for token, value in bias if value != -math.inf)
            config = msgspec.structs.replace(config, logit_bias=kept)
        return cls(
            config=config,
            forbidden=forbidden,
            seed=seed,
            begin=begin,
            pending=stream.pending(),
            said=stream.said,
            late=None if late is None else (late.text, late.tokens, late.finish_reason == "stop"),
        )

    def late_chunk(self) -> Chunk | None:
        if self.late is None:
            return None
        text, tokens, stopped = self.late
        return Chunk(text=text, tokens=tokens, finish_reason="stop" if stopped else None)

    def full_config(self) -> DecodeConfig:
        if not self.forbidden:
            return self.config
        bias = (*pairs_of(self.config), *((token, -math.inf) for token in self.forbidden))
        return msgspec.structs.replace(self.config, logit_bias=bias)


def pairs_of(config: DecodeConfig) -> tuple[tuple[int, float], ...]:
    bias = config.logit_bias or ()
    return tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)


class Contents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a snapshot says of itself.

    n_resident      leading tokens that the state holds; the rest is read again
    n_grid, whole   as `reuse.Memory`
    checkpoints     position, exact, and whether there is a row, of each
    replies         text of each, and from which to which token it stands
    """

    manifest: ContextManifest
    n_tokens: int
    n_resident: int
    n_prefix: int
    n_prompt: int
    n_bos: int
    n_vocab: int
    stage: Stage
    n_grid: int
    whole: int
    layout: bool
    exact: Literal["bitwise", "token"]
    has_text: bool
    has_row: bool
    checkpoints: tuple[tuple[int, bool, bool], ...] = ()
    answer: AnswerRecord | None = None
    replies: tuple[tuple[str, int, int], ...] = ()


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    contents: Contents
    parts: tuple[PartRecord, ...]


class _Part(NamedTuple):
    name: str
    data: Buffer


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Snapshot:
    """What a session held: tokens, state, checkpoints, the last logits, the sampler. Immutable.

    Made by `Session.snapshot`, `Snapshot.load` or `Snapshot.from_bytes`.
    """

    contents: Contents
    tokens: Tokens
    state: Buffer
    text: Buffer | None = None
    row: NDArray[np.float32] | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    draws: Buffer = b""
    path: str | None = None

    def __post_init__(self) -> None:
        self.tokens.flags.writeable = False
        if self.row is not None:
            self.row.flags.writeable = False

    def __reduce__(self) -> Any:
        return Snapshot.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"<Snapshot {self.n_tokens:,} tokens, {self.nbytes:,} bytes>"

    @property
    def manifest(self) -> ContextManifest:
        return self.contents.manifest

    @property
    def n_tokens(self) -> int:
        return self.contents.n_tokens

    @property
    def nbytes(self) -> int:
        """Of all its parts, as a file has them but for the header."""
        return sum(len(part.data) for part in self._parts())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 hex over what it says of itself and the checksums of its parts."""
        header = msgspec.json.encode(_Header(contents=self.contents, parts=tuple(self._records())))
        return hashlib.sha256(header).hexdigest()

    def _parts(self) -> Iterator[_Part]:
        yield _Part("tokens", _bytes_of(self.tokens))
        if self.text is not None:
            yield _Part("text", self.text)
        yield _Part("state", self.state)
        if self.row is not None:
            yield _Part("row", _bytes_of(self.row))
        for i, one in enumerate(self.checkpoints):
            yield _Part(f"checkpoint{i}", one.state)
            if one.row is not None:
                yield _Part(f"checkpoint{i}.row", _bytes_of(one.row))
        if self.draws:
            yield _Part("draws", self.draws)

    def _records(self, begin: int = 0) -> Iterator[PartRecord]:
        offset = begin
        for part in self._parts():
            yield PartRecord(part.name, offset, len(part.data), f"{xxhash.xxh3_64_intdigest(part.data):016x}")
            offset = _aligned(offset + len(part.data))

    # Out.

    def _layout(self) -> tuple[bytes, list[tuple[int, Buffer]], int]:
        """The bytes before the parts, the parts with their offsets, and the size of the whole."""
        # The header holds offsets from its own end, so that its length does not depend on them.
        records = tuple(self._records())
        header = msgspec.json.encode(_Header(contents=self.contents, parts=records))
        begin = _aligned(_PREAMBLE.size + len(header))
        parts = [(begin + record.offset, part.data) for record, part in zip(records, self._parts(), strict=True)]
        size = parts[-1][0] + len(parts[-1][1])
        preamble = _PREAMBLE.pack(MAGIC, VERSION, len(header), size, xxhash.xxh3_64_intdigest(header))
        return preamble + header, parts, size

    def to_bytes(self) -> bytes:
        head, parts, size = self._layout()
        out = bytearray(size)
        out[: len(head)] = head
        for offset, data in parts:
            out[offset : offset + len(data)] = data
        return bytes(out)

    def save(self, path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> None:
        """Write it to a file, whole or not at all: a temporary file beside it, fsync, rename. Mode 0600.

        Raises SnapshotError where it cannot be written; what was there is still there then.
        """
        target = Path(path)
        reason = ""
        try:
            if "\0" in str(target):
                reason = "a null character in its name"
            elif target.exists() and not target.is_file():  # the rename would replace a device or a pipe
                reason = "not a regular file"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            raise SnapshotError(f"{ascii_line(target)}: {reason}", path=str(target))
        head, parts, size = self._layout()
        try:
            with replaced(target, prefix=".snapshot-") as file:
                _write(file, head)
                for offset, data in parts:
                    file.seek(offset)
                    _write(file, data, None if progress is None else _from(progress, offset, size))
        except OSError as error:
            raise SnapshotError(f"{target}: {error.strerror or error}", path=str(target)) from error

    # In.

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Map a file and check every byte of it. The file must not be changed in place while the snapshot is in use.

        Raises
        ------
        SnapshotCorruptError   cut, damaged, or no snapshot
        SnapshotMismatchError  of another version of the format (field "version")
        SnapshotError          it cannot be read
        """
        with _opened(path) as (file, name, size):
            if size == 0:
                raise SnapshotCorruptError(f"{name}: the file is empty", path=name)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls._parse(memoryview(data), name)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Snapshot:
        """As `load`, from what `to_bytes` gave. The bytes are borrowed, not copied."""
        view = memoryview(data)
        if view.ndim != 1 or not view.c_contiguous:
            raise SnapshotCorruptError("the bytes are not contiguous")
        return cls._parse(view.cast("B") if view.nbytes else memoryview(b""), None)

    @classmethod
    def read_contents(cls, path: str | os.PathLike[str]) -> Contents:
        """What a file says of itself, without looking at its parts."""
        with _opened(path) as (file, name, size):
            return _read_header(file, name, size)[0].contents

    @classmethod
    def read_tokens(cls, path: str | os.PathLike[str]) -> Tokens:
        """The tokens of a file, checked, without looking at its other parts."""
        with _opened(path) as (file, name, size):
            header, begin = _read_header(file, name, size)
            record = header.parts[0] if header.parts else None
            if record is None or record.name != "tokens" or record.offset != 0 or not 0 <= record.nbytes <= size:
                raise _corrupt(name, "it has no tokens")
            file.seek(begin)
            data = file.read(record.nbytes)
        if len(data) != record.nbytes or record.nbytes % 4 or f"{xxhash.xxh3_64_intdigest(data):016x}" != record.hash:
            raise _corrupt(name, "the checksum of part tokens is wrong")
        return np.frombuffer(data, dtype="<i4")

    @classmethod
    def _parse(cls, data: memoryview, path: str | None) -> Snapshot:
        n_header, checksum = _judge_preamble(bytes(data[: _PREAMBLE.size]), len(data), path)
        end = _PREAMBLE.size + n_header
        header = _judge_header(bytes(data[_PREAMBLE.size : end]), checksum, path)
        begin = _aligned(end)
        if any(data[end:begin]):
            raise _corrupt(path, "there is something behind its header")
        parts = _judge_parts(data, header, begin, path)
        return _assemble(header.contents, parts, path)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, str, int]]:
    """A regular file, its name and its size; everything the system refuses is a SnapshotError."""
    name = os.fspath(path)
    try:
        # Without O_NONBLOCK, a pipe that nobody writes to would be waited for.
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise SnapshotError(f"{name}: not a regular file", path=name)
            yield file, name, found.st_size
    except OSError as error:
        raise SnapshotError(f"{name}: {error.strerror or error}", path=name) from error
    except ValueError as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{name!a}: {error}", path=name) from error


def _bytes_of(array: NDArray[Any]) -> memoryview:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.data.cast("B") if little.size else memoryview(b"")


def ascii_line(path: object) -> str:
    """A path for a message, whatever is in it."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


CHUNK_BYTES = 64 << 20


def _write(file: Any, data: Buffer, progress: Callable[[int], None] | None = None) -> None:
    """All of it: one write takes 2 GiB at most."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += file.write(view[done : done + CHUNK_BYTES])
        if progress is not None:
            progress(done)


def _from(progress: Callable[[int, int], None], offset: int, size: int) -> Callable[[int], None]:
    return lambda done: progress(offset + done, size)


def _corrupt(path: str | None, why: str) -> SnapshotCorruptError:
    return SnapshotCorruptError(f"{path}: {why}" if path else f"the snapshot is damaged: {why}", path=path)


def _read_header(file: BinaryIO, path: str, size: int) -> tuple[_Header, int]:
    """The header of an open file, and where its parts begin."""
    n_header, checksum = _judge_preamble(file.read(_PREAMBLE.size), size, path)
    return _judge_header(file.read(n_header), checksum, path), _aligned(_PREAMBLE.size + n_header)


def _judge_preamble(begin: bytes, size: int, path: str | None) -> tuple[int, int]:
    """Bytes of the header, and its checksum."""
    if len(begin) < _PREAMBLE.size:
        raise _corrupt(path, f"{len(begin)} bytes are less than a preamble of {_PREAMBLE.size}")
    magic, version, n_header, n_file, checksum = _PREAMBLE.unpack(begin)
    if magic != MAGIC:
        raise _corrupt(path, "it does not begin with a snapshot's magic")
    if version != VERSION:
        raise SnapshotMismatchError(path=path, field="version", expected=VERSION, actual=version)
    if begin[32:] != bytes(_PREAMBLE.size - 32):
        raise _corrupt(path, "its preamble is not zero where it should be")
    if n_file != size:
        raise _corrupt(path, f"it has {size} bytes, its preamble says {n_file}")
    if n_header > min(MAX_HEADER_BYTES, size - _PREAMBLE.size):
        raise _corrupt(path, f"a header of {n_header} bytes does not fit")
    return n_header, checksum


def _judge_header(encoded: bytes, checksum: int, path: str | None) -> _Header:
    if xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise _corrupt(path, "the checksum of its header is wrong")
    try:
        header = msgspec.json.decode(encoded, type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header: {error}") from error
    return header


def _judge_parts(data: memoryview, header: _Header, begin: int, path: str | None) -> dict[str, memoryview]:
    parts: dict[str, memoryview] = {}
    expected = 0
    end = begin
    for record in header.parts:
        if record.offset != expected or record.nbytes < 0 or record.name in parts:
            raise _corrupt(path, f"part {record.name} is not where it should be")
        at = begin + record.offset
        if at + record.nbytes > len(data):
            raise _corrupt(path, f"part {record.name} ends behind the file")
        if any(data[end:at]):
            raise _corrupt(path, f"there is something before part {record.name}")
        part = data[at : at + record.nbytes]
        if f"{xxhash.xxh3_64_intdigest(part):016x}" != record.hash:
            raise _corrupt(path, f"the checksum of part {record.name} is wrong")
        parts[record.name] = part
        end = at + record.nbytes
        expected = _aligned(record.offset + record.nbytes)
    if end != len(data):
        raise _corrupt(path, f"{len(data) - end} bytes follow its parts")
    return parts


def _assemble(contents: Contents, parts: dict[str, memoryview], path: str | None) -> Snapshot:
    """The parts fit each other and the contents; no more and no fewer are there."""

    def take(name: str) -> memoryview:
        try:
            return parts.pop(name)
        except KeyError:
            raise _corrupt(path, f"part {name} is missing") from None

    def array(name: str, dtype: str, n: int) -> NDArray[Any]:
        part = take(name)
        if len(part) != 4 * n:
            raise _corrupt(path, f"part {name} has {len(part)} bytes, not {4 * n}")
        return np.frombuffer(part, dtype=dtype)

    c = contents
    if not 0 <= c.n_bos <= c.n_prefix <= c.n_prompt <= c.n_tokens or not 0 <= c.n_resident <= c.n_tokens:
        raise _corrupt(path, "its counts of tokens contradict each other")
    if not 0 <= c.n_grid <= c.n_resident or not -1 <= c.whole <= c.n_resident or c.n_vocab < 1:
        raise _corrupt(path, "its counts of pieces contradict each other")
    tokens = array("tokens", "<i4", c.n_tokens)
    if c.n_tokens and not 0 <= int(tokens.min()) <= int(tokens.max()) < c.n_vocab:
        raise _corrupt(path, "it has tokens outside its vocabulary")
    if hash_tokens(tokens[: c.n_prefix]) != c.manifest.stable_token_hash:
        raise _corrupt(path, "its prefix is not the one of its manifest")
    text = take("text") if c.has_text else None
    state = take("state")
    if (len(state) == 0) != (c.n_resident == 0):
        raise _corrupt(path, "its state does not go with its tokens")
    row = array("row", "<f4", c.n_vocab) if c.has_row else None
    if c.has_row and c.n_resident == 0:
        raise _corrupt(path, "it has logits of no token")
    checkpoints: list[Checkpoint] = []
    last = 0
    for i, (position, exact, has_row) in enumerate(c.checkpoints):
        if not last < position <= c.n_resident:
            raise _corrupt(path, f"checkpoint {i} is out of place")
        last = position
        own = array(f"checkpoint{i}.row", "<f4", c.n_vocab) if has_row else None
        checkpoints.append(Checkpoint(position, take(f"checkpoint{i}"), exact, own))
    draws: Buffer = b""
    if c.answer is not None:
        if not 0 <= c.answer.begin <= c.n_tokens:
            raise _corrupt(path, "its answer begins behind its tokens")
        if c.answer.late is not None and any(not 0 <= token < c.n_vocab for token in c.answer.late[1]):
            raise _corrupt(path, "its answer has tokens outside its vocabulary")
        draws = take("draws")
    if any(not 0 <= begin <= end <= c.n_tokens for _, begin, end in c.replies):
        raise _corrupt(path, "a reply stands outside its tokens")
    if parts:
        raise _corrupt(path, f"part {next(iter(parts))} is unknown")
    return Snapshot(
        contents=c,
        tokens=tokens,
        state=state,
        text=text,
        row=row,
        checkpoints=tuple(checkpoints),
        draws=draws,
        path=path,
    )
