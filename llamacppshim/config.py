"""Owns what a runtime and a decode can be told, and which values make sense. Pure: what the native layer judges itself
(whether a KV type goes with a head size, a sampler's ranges) is left to it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from llamacppshim.errors import InvalidArgumentError, OutOfRangeError

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"]
Reuse = Literal["token", "bitwise"]
Seam = Literal["refuse", "reread"]
Overflow = Literal["error", "evict"]

# Fields of `RuntimeConfig` that are parameters of `Model`, and of `Context`.
LOAD_FIELDS = (
    *("n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "use_extra_bufts"),
    "check_tensors",
)
CONTEXT_FIELDS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_threads", "n_threads_batch", "poll", "flash_attn"),
    *("type_k", "type_v", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv", "op_offload", "swa_full", "kv_unified"),
)

DEFAULT_N_CTX = 8192

_SPLIT_MODES = ("none", "layer", "row", "tensor")
_FLASH_ATTN = ("auto", "on", "off")
_ROPE_SCALING = ("model", "none", "linear", "yarn", "longrope")
_UINT32_MAX = 2**32 - 1
_FLOAT_MAX = 1e300  # an integer beyond it has no float


def _refuse(field: str, value: object, expected: str) -> InvalidArgumentError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidArgumentError(
        f"{field} is {shown}, expected {expected}", field=field, expected=expected, actual=value
    )


def _int(field: str, value: object, low: int, high: int, *, none: bool = False) -> None:
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(field, value, "an integer" + (" or None" if none else ""))
    if not low <= value <= high:
        raise OutOfRangeError(
            f"{field} {value} is outside {low}..{high}", field=field, expected=f"{low}..{high}", actual=value
        )


def _float(field: str, value: object, low: float, *, none: bool = False, above: bool = False) -> None:
    if value is None and none:
        return
    limit = "a finite number" if low == -math.inf else f"a finite number {'above' if above else 'of at least'} {low:g}"
    limit += " or None" if none else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refuse(field, value, limit)
    if abs(value) > _FLOAT_MAX or not math.isfinite(value) or value < low or (above and value == low):
        raise OutOfRangeError(f"{field} {value} is not {limit}", field=field, expected=limit, actual=value)


def require_timeout(value: object) -> None:
    """A time limit: seconds, or None."""
    _float("timeout_s", value, 0.0, none=True)


def _plain(config: msgspec.Struct) -> None:
    """Numbers are of the field's own type, not numpy's, nor an integer for a float: digests are to be those of what a
    file gives back."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            value = value.item()
            msgspec.structs.force_setattr(config, name, value)
        if type(value) is int and "float" in config.__annotations__.get(name, "") and abs(value) <= _FLOAT_MAX:
            msgspec.structs.force_setattr(config, name, float(value))


def _choice(field: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _refuse(field, value, "one of " + " ".join(choices))


def _bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refuse(field, value, "True or False")


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter file and how strongly it is applied."""

    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise _refuse("adapters.path", self.path, "a path")
        _float("adapters.scale", self.scale, -math.inf)


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is loaded, what context it gets, and how its sessions reuse what they have read.

    ``None`` leaves a value to llamacppshim or the model; `Runtime.config` has every value as resolved.

    Attributes
    ----------
    n_ctx
        Cells, in tokens. Without ``kv_unified`` each of ``n_seq_max`` sequences gets an equal share. None: the model's
        training length, at most 8192.
    n_batch, n_ubatch
        Most tokens of one decode, and of one graph. Prefills go in pieces of ``n_ubatch``: what a cancel waits for on
        memories that cannot be cut, and what another session waits for.
    n_seq_max
        Sessions that can be open at once.
    flash_attn
        ``auto``: off on the CPU with an f16 or f32 cache, where it is slower; on where the cache is quantised;
        llama.cpp's own choice on devices.
    swa_full
        Keep every cell of sliding-window layers: rollbacks need no checkpoints, at the price of the memory.
    kv_unified
        One pool of cells for all sessions instead of equal shares. Branches then share cells; never bitwise.
    chat_template
        Jinja source to use instead of the model's.
    reuse
        ``token``: every equal resident token is kept; the last bits of logits may differ from a cold run's.
        ``bitwise``: only what a cold run would have computed in the same batches is kept, and the rest read again in
        pieces of ``n_ubatch`` from position 0; logits equal a cold run's wherever the memory allows it (``exact``).
    seam
        Where the tokens of prefix and suffix would merge: ``refuse`` with TokenMismatchError, or ``reread`` the prefix
        from the token before.
    on_overflow
        What a live session does that outgrows its context: ``error``; or ``evict`` its middle, where the memory can
        shift positions. The prefix, the first ``n_sink`` and the last ``n_recent`` tokens (None: a quarter of the
        context) stay. Exactness is lost from then on, and said so.
    max_checkpoints, checkpoint_bytes, checkpoint_every
        For memories that cannot be cut: how many states one session keeps, within how many bytes, and after how many
        tokens of a long prefill one is taken. 0 checkpoints: none.
    """

    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_rs_seq: int = 0
    n_threads: int | None = None
    n_threads_batch: int | None = None
    poll: int | None = None
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"
    rope_scaling: Literal["model", "none", "linear", "yarn", "longrope"] = "model"
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    offload_kqv: bool = True
    op_offload: bool = True
    swa_full: bool = False
    kv_unified: bool = False

    n_gpu_layers: int = -1
    devices: tuple[str, ...] | None = None
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    use_extra_bufts: bool = True
    check_tensors: bool = False
    adapters: tuple[AdapterConfig, ...] = ()
    chat_template: str | None = None

    reuse: Reuse = "token"
    seam: Seam = "refuse"
    on_overflow: Overflow = "error"
    n_sink: int = 4
    n_recent: int | None = None
    max_checkpoints: int = 16
    checkpoint_bytes: int = 256 << 20
    checkpoint_every: int = 1024

    def __post_init__(self) -> None:
        _plain(self)
        _int("n_ctx", self.n_ctx, 1, _UINT32_MAX, none=True)
        _int("n_batch", self.n_batch, 1, _UINT32_MAX)
        _int("n_ubatch", self.n_ubatch, 1, _UINT32_MAX)
        _int("n_seq_max", self.n_seq_max, 1, 256)
        _int("n_rs_seq", self.n_rs_seq, 0, 255)
        for name in ("n_threads", "n_threads_batch"):
            _int(name, getattr(self, name), 0, 512, none=True)
        _int("poll", self.poll, 0, 100, none=True)
        _choice("flash_attn", self.flash_attn, _FLASH_ATTN)
        _choice("type_k", self.type_k, get_args(CacheType))
        _choice("type_v", self.type_v, get_args(CacheType))
        _choice("rope_scaling", self.rope_scaling, _ROPE_SCALING)
        for name in ("rope_freq_base", "rope_freq_scale"):
            _float(name, getattr(self, name), 0.0, none=True, above=True)
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            _float(name, getattr(self, name), -math.inf, none=True)
        _int("yarn_orig_ctx", self.yarn_orig_ctx, 0, _UINT32_MAX, none=True)
        for name in ("offload_kqv", "op_offload", "swa_full", "kv_unified"):
            _bool(name, getattr(self, name))
        _int("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        _choice("split_mode", self.split_mode, _SPLIT_MODES)
        _int("main_gpu", self.main_gpu, 0, 15)
        for name in ("use_mmap", "use_mlock", "use_extra_bufts", "check_tensors"):
            _bool(name, getattr(self, name))
        for name in ("devices", "tensor_split"):
            if getattr(self, name) is not None:
                msgspec.structs.force_setattr(self, name, _tuple(name, getattr(self, name)))
        for i, device in enumerate(self.devices or ()):
            if not isinstance(device, str) or not device:
                raise _refuse(f"devices[{i}]", device, "a device's name")
        for i, share in enumerate(self.tensor_split or ()):
            _float(f"tensor_split[{i}]", share, 0.0)
        adapters = tuple(_adapter(one) for one in _tuple("adapters", self.adapters))
        msgspec.structs.force_setattr(self, "adapters", adapters)
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise _refuse("chat_template", self.chat_template, "a text or None")
        _choice("reuse", self.reuse, get_args(Reuse))
        _choice("seam", self.seam, get_args(Seam))
        _choice("on_overflow", self.on_overflow, get_args(Overflow))
        _int("n_sink", self.n_sink, 0, _UINT32_MAX)
        _int("n_recent", self.n_recent, 1, _UINT32_MAX, none=True)
        _int("max_checkpoints", self.max_checkpoints, 0, 1 << 20)
        _int("checkpoint_bytes", self.checkpoint_bytes, 0, 1 << 62)
        _int("checkpoint_every", self.checkpoint_every, 1, 1 << 31)


def _tuple(field: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refuse(field, value, "a sequence")
    return tuple(value)


def _item(value: Any) -> Any:
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _bias(i: int, pair: Any) -> tuple[Any, Any]:
    if isinstance(pair, (str, bytes)) or not isinstance(pair, Iterable):
        raise _refuse(f"logit_bias[{i}]", pair, "a token and its bias")
    found = tuple(_item(value) for value in pair)
    if len(found) != 2:
        raise _refuse(f"logit_bias[{i}]", pair, "a token and its bias")
    return found


def _adapter(one: object) -> AdapterConfig:
    """From itself, a path, or a pair of path and scale."""
    if isinstance(one, AdapterConfig):
        return one
    if isinstance(one, (str, os.PathLike)):
        return AdapterConfig(os.fspath(one))
    if isinstance(one, (tuple, list)) and len(one) == 2 and isinstance(one[0], (str, os.PathLike)):
        return AdapterConfig(os.fspath(one[0]), one[1])
    raise _refuse("adapters", one, "a path, or a pair of path and scale")


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an answer is generated. Values of the chain that are None do nothing; `Sampler` says what each does.

    Attributes
    ----------
    max_tokens
        None: until the model stops, or the context is full.
    temperature
        0: greedy.
    seed
        None: another one each time.
    stop
        Texts that end the answer; they are not part of it.
    logprobs
        How many of the most likely tokens to report with each token; 0: only the token's own; None: none.
    ignore_eos
        Go on after an end-of-generation token.
    show_special
        Special tokens whose text is part of the answer all the same.
    timeout_s
        Seconds after which the answer ends with ``cancelled``.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    show_special: tuple[int, ...] = ()
    timeout_s: float | None = None

    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    penalty_repeat: float | None = None
    penalty_freq: float | None = None
    penalty_present: float | None = None
    penalty_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_breakers: tuple[str, ...] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_keep: int | None = None
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] | None = None
    grammar: str | None = None
    grammar_root: str | None = None
    grammar_prefix: str | None = None
    grammar_lazy: bool = False
    trigger_patterns: tuple[str, ...] = ()
    trigger_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _plain(self)
        _int("max_tokens", self.max_tokens, 0, 2**31 - 1, none=True)
        _float("temperature", self.temperature, 0.0)
        _int("seed", self.seed, 0, _UINT32_MAX, none=True)
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            msgspec.structs.force_setattr(self, "logit_bias", self.logit_bias.items())
        for name in ("stop", "show_special", "dry_breakers", "logit_bias", "trigger_patterns", "trigger_tokens"):
            if getattr(self, name) is not None:
                msgspec.structs.force_setattr(self, name, _tuple(name, getattr(self, name)))
        for i, text in enumerate(self.stop):
            if not isinstance(text, str) or not text or any("\ud800" <= c <= "\udfff" for c in text):
                raise _refuse(f"stop[{i}]", text, "a text that is not empty, without lone surrogates")
        if self.logit_bias is not None:
            bias = tuple(_bias(i, pair) for i, pair in enumerate(self.logit_bias))
            msgspec.structs.force_setattr(self, "logit_bias", bias)
        tokens = tuple(_item(token) for token in self.trigger_tokens)
        msgspec.structs.force_setattr(self, "trigger_tokens", tokens)
        for i, token in enumerate(self.show_special):
            _int(f"show_special[{i}]", token, 0, 2**31 - 1)
        _int("logprobs", self.logprobs, 0, 1000, none=True)
        _bool("ignore_eos", self.ignore_eos)
        _float("timeout_s", self.timeout_s, 0.0, none=True)

    def sampling(self) -> dict[str, Any]:
        """What the sampler chain is made of: everything but when to end and what to report."""
        values = msgspec.structs.asdict(self)
        for name in ("max_tokens", "stop", "logprobs", "ignore_eos", "show_special", "timeout_s"):
            del values[name]
        return values


def configured(kind: type[Any], config: Any, overrides: dict[str, Any]) -> Any:
    """A configuration with some of its fields replaced; an unknown field is named."""
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__}, not {type(config).__name__}")
    for name in overrides:
        if name not in kind.__struct_fields__:
            raise InvalidArgumentError(f"{kind.__name__} has no field {name}", field=name)
    if config is None:
        return kind(**overrides)
    return msgspec.structs.replace(config, **overrides) if overrides else config


def with_n_ctx(config: RuntimeConfig, n_ctx_train: int) -> RuntimeConfig:
    """With a number of cells, where it has none."""
    if config.n_ctx is not None:
        return config
    return msgspec.structs.replace(config, n_ctx=min(n_ctx_train or DEFAULT_N_CTX, DEFAULT_N_CTX))
