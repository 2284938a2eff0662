"""Owns the short trial that finds which settings are fastest on this machine: threads, flash attention, ubatch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from llamacppshim._native import Context, Model
from llamacppshim.errors import LlamaCppShimError, UnsupportedFeatureError

DEPTH_TOKENS = 768  # resident when a decode is timed: flash attention pays, or costs, with depth
DECODE_TOKENS = 12
UBATCHES = (128, 256, 512)

#: Told (trials done, trials in all).
Progress = Callable[[int, int], None]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and what they gave."""

    n_threads: int
    flash_attn: Literal["on", "off"]
    n_ubatch: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest settings, and all trials."""

    n_threads: int
    n_threads_batch: int
    flash_attn: Literal["on", "off"]
    n_ubatch: int
    trials: tuple[Trial, ...]


def tune(model: Model, *, progress: Progress | None = None, depth: int = DEPTH_TOKENS, **values: Any) -> Tuned:
    """Times a prefill of `depth` tokens and a dozen decodes behind it, for each of a few settings.

    Decoding decides on threads and flash attention, prefill on threads for batches and on the ubatch. The trials are
    few and short, so settings within some per cent of each other are chosen by chance.

    Parameters
    ----------
    values
        Further parameters of `Context`, ``type_k`` for instance, the same in each trial.

    Raises
    ------
    UnsupportedFeatureError  a model that does not generate text
    """
    depth = max(1, min(depth, (model.n_ctx_train or depth + 64) - DECODE_TOKENS))
    plans = [(n, flash, UBATCHES[-1]) for flash in _flash(values) for n in _threads()]
    n_all = len(plans) + len(UBATCHES) - 1
    trials: list[Trial] = []

    def run(n_threads: int, flash_attn: Literal["on", "off"], n_ubatch: int) -> None:
        trials.append(_trial(model, n_threads, flash_attn, n_ubatch, depth, values))
        if progress is not None:
            progress(len(trials), n_all)

    for plan in plans:
        run(*plan)
    by_decode = max(trials, key=lambda trial: trial.decode_tokens_per_s)
    same_flash = [trial for trial in trials if trial.flash_attn == by_decode.flash_attn]
    by_prefill = max(same_flash, key=lambda trial: trial.prefill_tokens_per_s)
    for n_ubatch in UBATCHES[:-1]:
        run(by_prefill.n_threads, by_decode.flash_attn, n_ubatch)
    best = max([by_prefill, *trials[len(plans) :]], key=lambda trial: trial.prefill_tokens_per_s)
    return Tuned(
        n_threads=by_decode.n_threads,
        n_threads_batch=by_prefill.n_threads,
        flash_attn=by_decode.flash_attn,
        n_ubatch=best.n_ubatch,
        trials=tuple(trials),
    )


def _threads() -> list[int]:
    """One, half, and all of the cores that this process may use."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({1, max(1, n // 2), n})


def _flash(values: dict[str, Any]) -> tuple[Literal["on", "off"], ...]:
    """A quantised V needs it."""
    quantised = values.get("type_v") not in (None, "f32", "f16", "bf16")
    return ("on",) if quantised else ("off", "on")


def _trial(
    model: Model, n_threads: int, flash_attn: Literal["on", "off"], n_ubatch: int, depth: int, values: dict[str, Any]
) -> Trial:
    own = {"n_threads": n_threads, "n_threads_batch": n_threads, "flash_attn": flash_attn, "n_ubatch": n_ubatch}
    try:
        context = Context(model, **{**values, "n_ctx": depth + DECODE_TOKENS, "n_batch": max(n_ubatch, 1), **own})
    except LlamaCppShimError:  # these settings do not go together on this model
        return Trial(**_asked(own), prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0)
    with context:
        if context.memory_kind == "none":
            raise UnsupportedFeatureError(f"{model.name} makes embeddings, not text", feature="tuning")
        tokens = [(i * 7919) % max(1, model.n_vocab - 1) for i in range(depth)]
        context.decode(tokens[:1])  # threads and pages are there
        context.clear()
        began = time.perf_counter()
        context.decode(tokens)
        prefilled = time.perf_counter()
        for token in tokens[:DECODE_TOKENS]:
            context.decode((token,))
        decoded = time.perf_counter()
    return Trial(
        **_asked(own),
        prefill_tokens_per_s=depth / (prefilled - began),
        decode_tokens_per_s=DECODE_TOKENS / (decoded - prefilled),
    )


def _asked(own: dict[str, Any]) -> dict[str, Any]:
    return {name: own[name] for name in ("n_threads", "flash_attn", "n_ubatch")}
