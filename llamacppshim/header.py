"""Owns what is known of a model without loading it: the header of its GGUF file, and what contexts of it would need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from llamacppshim._native import read_header
from llamacppshim.config import CONTEXT_FIELDS, LOAD_FIELDS, RuntimeConfig, with_n_ctx
from llamacppshim.errors import LlamaCppShimError, ModelLoadError
from llamacppshim.files import identity_of
from llamacppshim.gguf_files import ModelSource
from llamacppshim.memory import MemoryEstimate, Use, estimate_of
from llamacppshim.reuse import MemoryKind

# Architectures under names of its own, and vision parts in the same file.
_OLLAMA_LAYOUTS = ("unknown model architecture", "wrong number of tensors", "not found")


class Layer(msgspec.Struct, frozen=True):
    """What one layer keeps of each token, or of each sequence.

    Attributes
    ----------
    n_embd_k, n_embd_v
        Numbers of K and of V in one cell of its cache; 0: none.
    n_state
        Numbers (f32) of recurrent state a sequence; 0: none.
    windowed
        It keeps a sliding window of cells only.
    prediction
        It is one of multi-token prediction, which `Model` loads only when asked to.
    """

    n_head: int
    n_head_kv: int
    n_embd_k: int
    n_embd_v: int
    n_state: int
    windowed: bool
    prediction: bool


class TensorType(msgspec.Struct, frozen=True):
    """How many tensors of a type a file has, and their bytes."""

    n_tensors: int
    n_bytes: int


class GgufHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a GGUF file says of its model. A value: the file is not held open.

    Attributes
    ----------
    tokenizer, vocab_type
        As the file calls it (``gpt2``), and what that is (``bpe``).
    n_parts, n_file_bytes, n_header_bytes
        Of a split model, all files; the header is the first's.
    n_bytes
        Of all tensors; ``tensors`` has them by type.
    n_swa
        The window of the windowed layers, in tokens; 0: none.
    n_layer, n_layer_nextn
        Layers of the model, and those of multi-token prediction behind them; ``layers`` lists all.
    generates
        Whether sessions can run it: it makes text, with a decoder alone.
    metadata
        Every scalar of the file, as text.
    file
        Size, time of change in ns, device and inode of the (first) file when it was read.
    """

    path: str
    file: tuple[int, int, int, int]
    architecture: str
    tokenizer: str
    vocab_type: str
    version: int
    n_parts: int
    n_file_bytes: int
    n_header_bytes: int
    n_params: int
    n_bytes: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_embd_out: int
    n_layer: int
    n_layer_nextn: int
    n_head: int
    n_head_kv: int
    n_swa: int
    n_expert: int
    n_expert_used: int
    memory_kind: MemoryKind | str
    generates: bool
    layers: tuple[Layer, ...]
    tensors: dict[str, TensorType]
    metadata: dict[str, str]

    @property
    def window_pattern(self) -> tuple[bool, ...]:
        """Of each layer of the model, whether it keeps a window only."""
        return tuple(layer.windowed for layer in self.layers if not layer.prediction)

    def measure(self, configs: Sequence[RuntimeConfig], *, load_mtp: bool = False) -> list[Use | LlamaCppShimError]:
        """What ``memory_use()`` of a context with each configuration would be: llama.cpp's word, without the memory.

        The weights are where the first configuration puts them. An error is what making the context would raise.

        Raises ModelLoadError if the file is not what it was, and what `read_gguf_header` raises.
        """
        if (file := identity_of(self.path)) is not None and file != self.file:
            reason = "the file is not what it was when its header was read"
            raise ModelLoadError(f"{self.path}: {reason}", path=self.path, reason=reason)
        load = _load_parameters(configs[0]) if configs else {}
        _, uses = read_header(self.path, map(_context_parameters, configs), {**load, "load_mtp": load_mtp})
        return uses


def read_gguf_header(path: str | bytes | os.PathLike[str]) -> GgufHeader:
    """Read and check the header of a GGUF file; of a split model those of all parts, the first is given.

    No weight is read: some 7 ms with a vocabulary of 50,000 tokens, 16 ms with 260,000. The check is the one that a
    load begins with.

    Raises
    ------
    ModelLoadError  the file is missing, short, foreign, damaged, or of an architecture that llama.cpp does not know
    """
    file = identity_of(path)
    facts, _ = read_header(path)
    return _header(path, file, facts)


def estimate_file(
    path: str | bytes | os.PathLike[str], config: RuntimeConfig | None = None
) -> tuple[GgufHeader, MemoryEstimate | None]:
    """`read_gguf_header` and `estimate_memory` in one reading; no estimate of a model that makes no text.

    Raises what they raise.
    """
    file = identity_of(path)
    asked = config or RuntimeConfig()
    contexts: list[RuntimeConfig] = []

    def choose(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        contexts.extend([with_n_ctx(asked, facts["n_ctx_train"])] if facts["generates"] else [])
        return [_context_parameters(one) for one in contexts]

    facts, uses = read_header(path, choose, _load_parameters(asked))
    header = _header(path, file, facts)
    found = [estimate_of(header, one, use) for one, use in zip(contexts, uses, strict=True)]
    return header, found[0] if found else None


def _header(
    path: str | bytes | os.PathLike[str], file: tuple[int, int, int, int] | None, facts: Mapping[str, Any]
) -> GgufHeader:
    return msgspec.convert({"path": os.fsdecode(path), "file": file, **facts}, GgufHeader)


def _load_parameters(config: RuntimeConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LOAD_FIELDS}


def _context_parameters(config: RuntimeConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in CONTEXT_FIELDS}


@contextlib.contextmanager
def layouts_told(source: ModelSource) -> Iterator[None]:
    """While the header of a source is read. Of a file from Ollama, which has an engine and layouts of its own, a
    refusal says so where that may be why.
    """
    try:
        yield
    except ModelLoadError as error:
        reason = error.reason
        if source.origin != "ollama" or not any(words in reason for words in _OLLAMA_LAYOUTS):
            raise
        reason = f"llama.cpp cannot read it, perhaps only Ollama's own engine can: {reason}"
        raise ModelLoadError(f"{source.path}: {reason}", path=os.fspath(source.path), reason=reason) from None
