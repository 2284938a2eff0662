"""Owns what a prompt may be: text, segments of one text, or tokens; and a prefix as it was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from llamacppshim.assemble import Assembled
from llamacppshim.errors import InvalidArgumentError
from llamacppshim.ledger import Tokens
from llamacppshim.manifest import ContextManifest, SegmentRecord, hash_bytes, hash_tokens

#: Text, parts of one text, tokens, or what `assemble_context` made: its stable segments.
Prompt = str | bytes | Sequence[str] | Sequence[int] | Tokens | Assembled


class Prefix:
    """A prompt's beginning as it was asked for, tokenised; kept so that the same one costs nothing again."""

    __slots__ = ("byte_hash", "digest", "key", "manifest", "n_bos", "text", "token_hash", "tokens")

    def __init__(self, key: Any, text: bytes | None, tokens: Tokens, n_bos: int) -> None:
        self.key = key
        self.text = text
        self.tokens = tokens
        self.n_bos = n_bos
        self.byte_hash = hash_bytes(text or b"")
        self.token_hash = hash_tokens(tokens)
        self.manifest: ContextManifest | None = None
        self.digest = ""

    def describe(self, manifest: ContextManifest) -> None:
        if manifest is not self.manifest or not self.digest:
            self.manifest = manifest
            self.digest = manifest.digest()


def parts_of(prompt: Any) -> tuple[Literal["text", "segments", "tokens"], Any]:
    if isinstance(prompt, (str, bytes)):
        return "text", [prompt]
    if isinstance(prompt, Assembled):
        return "segments", prompt.stable_parts
    if isinstance(prompt, np.ndarray):
        return "tokens", prompt
    if isinstance(prompt, Sequence):
        if prompt and all(isinstance(part, (str, bytes)) for part in prompt):
            return "segments", prompt
        return "tokens", prompt
    raise TypeError(f"a prompt is a text, a sequence of texts, or tokens, not {type(prompt).__name__}")


def utf8(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the text has a lone surrogate at index {error.start}", field="text", actual=error.start
        ) from None


def segment_kinds(prompt: Any, n: int) -> Sequence[str]:
    """Of the segments of a prompt; plain texts have none of their own."""
    if isinstance(prompt, Assembled):
        return [record.kind for record in prompt.records if record.stable]
    return ["text"] * n


def segment_records(
    texts: Sequence[bytes], kinds: Sequence[str], starts: Sequence[int], tokens: Tokens
) -> Iterator[SegmentRecord]:
    at = 0
    for text, kind, begin, end in zip(texts, kinds, starts, [*starts, len(tokens)][1:], strict=False):
        yield SegmentRecord(
            kind=kind,
            stable=True,
            byte_start=at,
            byte_end=at + len(text),
            byte_hash=hash_bytes(text),
            token_start=begin,
            token_end=end,
            token_hash=hash_tokens(tokens[begin:end]),
        )
        at += len(text)
