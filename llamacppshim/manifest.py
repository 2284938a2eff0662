"""Owns identity: what a cache or a saved state depends on, as digests and plain values, and who differs. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacppshim.errors import InvalidArgumentError

VERSION = 1


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of the prompt: where its bytes and tokens lie, and their SHA-256."""

    kind: str
    stable: bool
    byte_start: int
    byte_end: int
    byte_hash: str
    token_start: int
    token_end: int
    token_hash: str


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the cells of a cache depend on besides their tokens. Digests are SHA-256 hex."""

    version: int = VERSION
    profile_id: str = ""
    backend: str = "llama"
    backend_version: str
    model_digest: str
    tokenizer_digest: str
    template_digest: str
    prompt_format: str = "raw"
    runtime_digest: str
    n_ctx: int
    rope: dict[str, Any]
    type_k: str
    type_v: str
    flash_attn: bool
    swa_full: bool
    kv_layout: str
    adapters: tuple[tuple[str, float], ...] = ()
    add_bos: bool
    block_size: int

    def compatible(self, other: Identity) -> str | None:
        """The first field in which the two differ; None where they are the same."""
        for name in Identity.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return None

    def digest(self) -> str:
        return digest_of({name: getattr(self, name) for name in Identity.__struct_fields__})


class ContextManifest(Identity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity, and what the prompt consists of."""

    stable_bytes: int
    total_bytes: int
    stable_byte_hash: str
    stable_token_hash: str
    segments: tuple[SegmentRecord, ...] = ()

    def digest(self) -> str:
        return digest_of(self)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes | str) -> ContextManifest:
        """Raises InvalidArgumentError, with the path of the field where it is no manifest."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"not a manifest: {error}", field="manifest") from error


def digest_of(value: Any) -> str:
    """SHA-256 hex of the value as JSON, its keys in order."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def hash_bytes(*parts: bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def hash_tokens(tokens: NDArray[np.int32] | Sequence[int]) -> str:
    """SHA-256 hex over the tokens as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).hexdigest()
