"""Owns the memory rule: what a configuration of a model needs, and whether that fits a budget.

What llama.cpp allocates is not guessed: the header measures it by a dry run (`GgufHeader.measure`). What is added here
is what llama.cpp does not count, and how the cache is shared among layers. Pure: a header is only asked.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llamacppshim.config import RuntimeConfig, configured, with_n_ctx
from llamacppshim.errors import InvalidArgumentError, LlamaCppShimError, ModelLoadError, OutOfMemoryError

if TYPE_CHECKING:
    from llamacppshim.header import GgufHeader, Layer

GOOD_SHARE = 0.85
TIGHT_SHARE = 0.97
FIT_TYPES = ("f16", "q8_0", "q4_0")

# Bytes and elements of one block of a cache's type.
_BLOCKS = {
    **{"f32": (4, 1), "f16": (2, 1), "bf16": (2, 1), "q8_0": (34, 32), "q5_1": (24, 32), "q5_0": (22, 32)},
    **{"q4_1": (20, 32), "q4_0": (18, 32), "iq4_nl": (18, 32)},
}
# Of a saved sequence: for each cell its position and its sequences, for each token the token and its text; and the
# answer in hand, with its settings and the state of its random numbers.
_SAVED_CELL_BYTES = 12
_SAVED_TOKEN_BYTES = 12
_SAVED_ANSWER_BYTES = 32 << 10
# What llama.cpp does not count, as measured on the real models: handles, scheduler and pools; for each token its text,
# its place in the tokenizer's tables, and (BPE) its merge; for each cell its position and sequences.
_BASE_BYTES = 8 << 20
_TOKEN_BYTES = {"bpe": 200}
_OTHER_TOKEN_BYTES = 70
_CELL_BYTES = 64
# Each sequence's, of a context that stands for one that is too large even for a dry run.
_MEASURED_CELLS = 1 << 14

Verdict = Literal["good", "tight", "none"]
Use = dict[str, dict[str, int]]  # as Context.memory_use()


class Fit(msgspec.Struct, frozen=True):
    """Whether something fits a budget. True where it does.

    ``good`` up to 85 % of the budget, ``tight`` up to 97 %, ``none`` beyond.
    """

    verdict: Verdict
    needed_bytes: int
    budget_bytes: int

    def __bool__(self) -> bool:
        return self.verdict != "none"


def judge_fit(needed_bytes: int, budget_bytes: int) -> Fit:
    """The verdict on so many bytes. InvalidArgumentError for a budget that is no number of bytes."""
    _require_budget(budget_bytes)
    if needed_bytes <= GOOD_SHARE * budget_bytes:
        return Fit("good", needed_bytes, budget_bytes)
    return Fit("tight" if needed_bytes <= TIGHT_SHARE * budget_bytes else "none", needed_bytes, budget_bytes)


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a model with one context needs, in bytes of host memory.

    Attributes
    ----------
    config
        What was asked, with ``n_ctx`` as it would be.
    weights_mapped
        The stretches of the file that are mapped: shared between processes, and taken back by the kernel when short.
    weights_loaded
        Weights in memory of their own; ``weights_repacked`` are copies in the form that faster kernels read.
    kv, kv_layers
        The cache of attention layers, and of each layer.
    recurrent
        The state of recurrent layers, rollback copies (``n_rs_seq``) included.
    compute
        The buffers of a graph.
    outputs
        Rows of logits.
    work
        The CPU's scratch for one operation: without flash attention, the weights of all cells for a ubatch.
    tables
        What llama.cpp and the tokenizer list of tokens and cells. This and ``work`` are estimates: llama.cpp does not
        count them.
    adapters
        LoRA adapters, by the sizes of their files.
    prediction_kv
        The cache of a second context for multi-token prediction, where it was asked for.
    checkpoints
        The most that sessions keep of them.
    snapshot
        One in flight: a whole sequence. Not in the total: it comes and goes.
    devices
        What lies on devices, by buffer type. Not in the total.
    """

    config: RuntimeConfig
    weights_mapped: int
    weights_loaded: int
    weights_repacked: int
    kv: int
    kv_layers: tuple[int, ...]
    recurrent: int
    compute: int
    outputs: int
    work: int
    tables: int
    adapters: int
    prediction_kv: int
    checkpoints: int
    snapshot: int
    devices: dict[str, int]

    @property
    def weights_bytes(self) -> int:
        return self.weights_mapped + self.weights_loaded + self.weights_repacked

    @property
    def context_bytes(self) -> int:
        """Of one context: what a second one of the same model would add, but for its checkpoints."""
        return self.kv + self.recurrent + self.compute + self.outputs

    @property
    def engine_bytes(self) -> int:
        """What `Context.memory_use` reports."""
        return self.weights_bytes + self.context_bytes

    @property
    def total_bytes(self) -> int:
        return self.needed_bytes + self.checkpoints

    @property
    def needed_bytes(self) -> int:
        """The total without checkpoints: what it cannot do without."""
        return self.engine_bytes + self.work + self.tables + self.adapters + self.prediction_kv

    def fits(self, budget_bytes: int) -> Fit:
        """Whether the total fits. InvalidArgumentError for a budget that is no number of bytes."""
        return judge_fit(self.total_bytes, budget_bytes)


def estimate_memory(
    header: GgufHeader, config: RuntimeConfig | None = None, *, prediction: bool = False, **overrides: Any
) -> MemoryEstimate:
    """What a model with one context needs.

    Parameters
    ----------
    header
        From `read_gguf_header`.
    config
        `RuntimeConfig`; ``overrides`` are its fields, and win. ``n_ctx`` of None: the training length, at most 8192.
    prediction
        Count the layers of multi-token prediction, and a context for them, too.

    Raises
    ------
    InvalidArgumentError, OutOfRangeError, UnsupportedFeatureError  what `Runtime.open` would raise for it
    ModelLoadError  the file is not what it was when its header was read; or an adapter's is not there
    TypeError       what is given is no header, or no configuration
    """
    _require_header(header)
    wanted = with_n_ctx(configured(RuntimeConfig, config, overrides), header.n_ctx_train)
    (use,) = header.measure([wanted], load_mtp=prediction)
    return estimate_of(header, wanted, use, prediction=prediction)


def of_type(config: RuntimeConfig, cache_type: str, n_ctx: int) -> RuntimeConfig:
    """The configuration with this type of K and V, and so many cells."""
    return msgspec.structs.replace(config, n_ctx=n_ctx, type_k=cache_type, type_v=cache_type)


def estimate_each(header: GgufHeader, configs: Sequence[RuntimeConfig]) -> list[MemoryEstimate | None]:
    """`estimate_memory` of configurations whose weights lie in the same places, in one reading; None where the model
    cannot take it, a type of the cache for instance.
    """
    return [
        None if isinstance(use, InvalidArgumentError) else estimate_of(header, config, use)
        for config, use in zip(configs, header.measure(configs), strict=True)
    ]


def largest_context(
    header: GgufHeader, config: RuntimeConfig | None, budget_bytes: int, types: Sequence[str] = FIT_TYPES
) -> dict[str, int]:
    """For each type of K and V, the largest ``n_ctx`` up to the training length whose verdict is not ``none``; 0: none.

    A multiple of 256, or the training length. Types that the model cannot take are left out. InvalidArgumentError for a
    budget that is no number of bytes, or a type that there is not.
    """
    _require_header(header)
    _require_budget(budget_bytes)
    most = max(1, header.n_ctx_train)
    fits = dict.fromkeys(types, 0)
    too_large = dict.fromkeys(types, most + 1)
    asked = dict.fromkeys(types, most)
    while asked:
        configs = [of_type(config or RuntimeConfig(), name, n) for name, n in asked.items()]
        for (name, n), one in zip(list(asked.items()), estimate_each(header, configs), strict=True):
            del asked[name]
            if one is None:
                del fits[name]
                continue
            (fits if one.fits(budget_bytes) else too_large)[name] = n
            middle = (fits[name] + too_large[name]) // 2 // 256 * 256
            if fits[name] < middle < too_large[name]:
                asked[name] = middle
    return fits


def host_bytes(use: Use) -> dict[str, Mapping[str, int]]:
    """What of a context's use lies in host memory, by buffer type."""
    return {
        name: one for name, one in use.items() if name.startswith("CPU") or name.endswith("_Host") or name == "output"
    }


def estimate_of(
    header: GgufHeader, config: RuntimeConfig, use: Use | LlamaCppShimError, *, prediction: bool = False
) -> MemoryEstimate:
    """From what llama.cpp says of a context, measured or live. Raises the error that it says instead, but for want of
    room: then not even a dry run has it, and the shapes of the layers tell.
    """
    if isinstance(use, OutOfMemoryError):
        use = _use_by_shape(header, config)
    if isinstance(use, LlamaCppShimError):
        raise use
    host = host_bytes(use)
    devices = {name: sum(one.values()) for name, one in use.items() if name not in host}
    cells = _Cells(header, config)
    context = sum(one["context"] for one in host.values())
    # The rest of a hybrid's is state: llama.cpp keeps rollback copies only where the architecture can use them.
    kv = {"recurrent": 0, "hybrid": min(context, sum(cells.kv_layers))}.get(header.memory_kind, context)
    return MemoryEstimate(
        config=config,
        weights_mapped=sum(one["model"] for name, one in host.items() if name.endswith("_Mapped")),
        weights_loaded=sum(one["model"] for name, one in host.items() if name in ("CPU", "CPU_Host")),
        weights_repacked=sum(
            one["model"]
            for name, one in host.items()
            if name not in ("CPU", "CPU_Host") and not name.endswith("_Mapped")
        ),
        kv=kv,
        kv_layers=cells.kv_layers,
        recurrent=context - kv,
        compute=sum(one["compute"] for name, one in host.items() if name != "output"),
        outputs=sum(one["compute"] for name, one in host.items() if name == "output"),
        work=cells.work_bytes,
        tables=_BASE_BYTES
        + header.n_vocab * _TOKEN_BYTES.get(header.vocab_type, _OTHER_TOKEN_BYTES)
        + cells.n_cells * _CELL_BYTES,
        adapters=sum(_size_of(adapter.path) for adapter in config.adapters),
        prediction_kv=cells.prediction_bytes if prediction else 0,
        checkpoints=cells.checkpoint_bytes,
        snapshot=cells.sequence_bytes,
        devices=devices,
    )


def _use_by_shape(header: GgufHeader, config: RuntimeConfig) -> Use:
    """The cache by the shape of its layers; what follows from it as much larger than that of a context that can be
    measured as the context is.
    """
    cells = _Cells(header, config)
    small = msgspec.structs.replace(config, n_ctx=_MEASURED_CELLS * config.n_seq_max)
    (use,) = header.measure([small])
    if isinstance(use, LlamaCppShimError):
        raise use
    n_times = cells.n_cells / _Cells(header, small).n_cells
    found = {name: {**one, "context": 0, "compute": round(one["compute"] * n_times)} for name, one in use.items()}
    found["output"] = use["output"]
    found["CPU"] = {**found["CPU"], "context": sum(cells.kv_layers) + cells.state_bytes}
    return found


class _Cells:
    """How the cache of a configuration is laid out, layer by layer."""

    def __init__(self, header: GgufHeader, config: RuntimeConfig) -> None:
        config = with_n_ctx(config, header.n_ctx_train)
        assert config.n_ctx is not None
        self.config = config
        n_ctx = _padded(config.n_ctx)
        self.n_stream = 1 if config.kv_unified else config.n_seq_max
        self.n_seq = n_ctx if config.kv_unified else _padded(n_ctx // config.n_seq_max)
        n_batch = min(config.n_batch, config.n_ctx)
        n_ubatch = min(config.n_ubatch, n_batch)
        n_window = header.n_swa * (config.n_seq_max if config.kv_unified else 1) + n_ubatch
        self.n_window = self.n_seq if config.swa_full else min(self.n_seq, _padded(n_window))
        self.n_cells = self.n_seq * self.n_stream
        flash = config.flash_attn == "on" or (
            config.flash_attn == "auto" and (_is_quantised(config.type_k) or _is_quantised(config.type_v))
        )
        own = [layer for layer in header.layers if not layer.prediction]
        # Without flash attention V is transposed, and every layer's rows are as wide as the widest.
        self._widest_v = 0 if flash else max((layer.n_embd_v for layer in own), default=0)
        self.kv_layers = tuple(self._cell_bytes(layer) * self._cells_of(layer) * self.n_stream for layer in own)
        # Each cell's weight in each head for each token, turned from f32 into the type of V.
        self.work_bytes = 0
        if not flash and config.type_v != "f32":
            scores = (layer.n_head * self._cells_of(layer) for layer in own if layer.n_embd_v)
            self.work_bytes = 2 * n_ubatch * max(scores, default=0)
        state = 4 * sum(layer.n_state for layer in own)
        self.state_bytes = state * config.n_seq_max * (1 + config.n_rs_seq)
        per_sequence = sum(
            (self._cell_bytes(layer) + _SAVED_CELL_BYTES) * self._cells_of(layer) for layer in own if layer.n_embd_k
        )
        row = 4 * header.n_vocab
        self.sequence_bytes = per_sequence + state + row + _SAVED_TOKEN_BYTES * self.n_seq + _SAVED_ANSWER_BYTES
        # What cannot be cut back to where it was: state, and cells that a window has let go. One pool for several
        # sequences lets them go even where all are kept.
        lets_go = not config.swa_full or (config.kv_unified and config.n_seq_max > 1)
        uncut = state + sum(
            self._cell_bytes(layer) * self._cells_of(layer) for layer in own if layer.windowed and lets_go
        )
        self.checkpoint_bytes = config.n_seq_max * min(config.checkpoint_bytes, config.max_checkpoints * (uncut + row))
        self.prediction_bytes = sum(
            2 * (layer.n_embd_k + layer.n_embd_v) * self.n_cells for layer in header.layers if layer.prediction
        )

    def _cells_of(self, layer: Layer) -> int:
        return self.n_window if layer.windowed else self.n_seq

    def _cell_bytes(self, layer: Layer) -> int:
        if layer.n_embd_k == 0:
            return 0
        n_v = max(layer.n_embd_v, self._widest_v) if layer.n_embd_v else 0
        return _row_bytes(self.config.type_k, layer.n_embd_k) + _row_bytes(self.config.type_v, n_v)


def _require_header(header: object) -> None:
    """By what it can do: this module is below the class."""
    if not hasattr(header, "measure"):
        raise TypeError(f"header must be a GgufHeader, as read_gguf_header gives it, not {type(header).__name__}")


def _require_budget(budget_bytes: object) -> None:
    try:
        n_bytes = -1 if isinstance(budget_bytes, bool) else operator.index(budget_bytes)  # type: ignore[arg-type]
    except TypeError:
        n_bytes = -1
    if n_bytes < 0:
        expected = "an integer of at least 0"
        shown = repr(budget_bytes)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise InvalidArgumentError(
            f"budget_bytes is {shown}, expected {expected}",
            field="budget_bytes",
            expected=expected,
            actual=budget_bytes,
        )


def _is_quantised(cache_type: str) -> bool:
    return _BLOCKS[cache_type][1] > 1


def _row_bytes(name: str, n: int) -> int:
    n_bytes, n_elements = _BLOCKS[name]
    return n // n_elements * n_bytes


def _padded(n: int) -> int:
    return -(-n // 256) * 256


def _size_of(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelLoadError(f"{path}: {reason}", path=os.fspath(path), reason=reason) from None
