"""Owns what the command line says of memory: the table of `fit`, and a model's line in `models`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import rich.table
from rich.console import Console

from llamacppshim._native import build_info
from llamacppshim.config import RuntimeConfig, with_n_ctx
from llamacppshim.errors import LlamaCppShimError, ModelLoadError, UnsupportedFeatureError
from llamacppshim.facts import FileFacts
from llamacppshim.gguf_files import FoundModel, ModelSource
from llamacppshim.header import GgufHeader, estimate_file, layouts_told
from llamacppshim.machine import machine_budget
from llamacppshim.memory import (
    FIT_TYPES,
    MemoryEstimate,
    estimate_each,
    estimate_memory,
    judge_fit,
    largest_context,
    of_type,
)
from llamacppshim.terminal import say

COLOURS = {"good": "green", "tight": "yellow", "none": "red"}
FIRST_ROW = 2048


def show(console: Console, header: GgufHeader, budget_bytes: int, config: RuntimeConfig | None = None) -> None:
    """Prints contexts against types of the cache: what each needs, and whether it fits.

    Raises UnsupportedFeatureError for a model that makes no text, ModelLoadError.
    """
    if not header.generates:
        raise UnsupportedFeatureError(f"{header.path} makes embeddings, not text", feature="sessions")
    asked = with_n_ctx(config or RuntimeConfig(), header.n_ctx_train)
    estimate = estimate_memory(header, asked)
    say(console, f"model    {_facts(header)}")
    say(console, f"weights  {_mb(estimate.weights_bytes)}, of which {_mb(estimate.weights_mapped)} are mapped")
    say(console, f"budget   {_mb(budget_bytes)}: what the machine has left, less a reserve")
    say(console, f"n_ctx {asked.n_ctx:,}  {_parts(estimate)}")
    console.print(_table(header, asked, budget_bytes))
    largest = largest_context(header, asked, budget_bytes)
    found = ", ".join(f"{n:,} with {name}" if n else f"none with {name}" for name, n in largest.items())
    say(console, f"largest  {found} (trained for {header.n_ctx_train:,})")


class _Summary(msgspec.Struct, frozen=True, array_like=True):
    """What `models` says of a file. ``build`` is whose words these are: another one may need another amount."""

    build: str
    architecture: str
    n_ctx_train: int
    n_ctx: int  # by default; 0: it makes no text
    total_bytes: int  # with that

    def verdict(self, budget_bytes: int) -> str:
        if self.n_ctx == 0:
            return f"{self.architecture}, makes embeddings, not text"
        fits = {"good": "fits", "tight": "fits tightly", "none": "does not fit"}
        verdict = fits[judge_fit(self.total_bytes, budget_bytes).verdict]
        need = f"{_mb(self.total_bytes)} with n_ctx {self.n_ctx:,}"
        return f"{self.architecture}, context {self.n_ctx_train:,}, {verdict}: {need}"


def verdicts(models: Iterable[FoundModel]) -> Iterator[tuple[FoundModel, str]]:
    """Of each model of a list, in a few words: its architecture, its context, and whether that fits; or why not."""
    budget_bytes = machine_budget()
    info = build_info()
    build = f"{info['version']} {info['pin']} {' '.join(info['cpu_found'])}"

    def is_summary(text: str) -> bool:
        try:
            return msgspec.json.decode(text, type=_Summary).build == build
        except msgspec.DecodeError:
            return False

    facts = FileFacts("models", is_summary)

    def in_words(source: ModelSource, path: Path) -> str:
        try:
            text = facts.learn(path, partial(_summary, source, build))
        except ModelLoadError as error:
            return error.reason
        except LlamaCppShimError as error:
            return str(error)
        return msgspec.json.decode(text, type=_Summary).verdict(budget_bytes)

    told: dict[tuple[Path, str], Future[str]] = {}  # several names may share a file
    answers: list[tuple[FoundModel, Future[str] | None]] = []
    pool = ThreadPoolExecutor(os.cpu_count())  # most of a reading is llama.cpp's, without the GIL
    try:
        for model in models:
            answer = None
            if (source := model.source) is not None:
                key = source.path.resolve(), source.origin
                answer = told[key] = told.get(key) or pool.submit(in_words, source, key[0])
            answers.append((model, answer))
        for model, answer in answers:
            yield model, model.reason if answer is None else answer.result()
    finally:
        pool.shutdown(cancel_futures=True)
    facts.save()


def _summary(source: ModelSource, build: str) -> str:
    with layouts_told(source):
        header, estimate = estimate_file(source.path)
    n_ctx, total_bytes = (0, 0) if estimate is None else (estimate.config.n_ctx or 0, estimate.total_bytes)
    summary = _Summary(build, header.architecture, header.n_ctx_train, n_ctx, total_bytes)
    return msgspec.json.encode(summary).decode()


def _table(header: GgufHeader, config: RuntimeConfig, budget_bytes: int) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False)
    table.add_column("n_ctx", justify="right")
    for name in FIT_TYPES:
        table.add_column(f"{name} cache", justify="right")
    rows = _rows(header.n_ctx_train, config.n_ctx or FIRST_ROW)
    found = iter(estimate_each(header, [of_type(config, name, n_ctx) for n_ctx in rows for name in FIT_TYPES]))
    for n_ctx in rows:
        cells = [f"{n_ctx:,}"]
        for one in itertools.islice(found, len(FIT_TYPES)):
            if one is None:
                cells.append("-")
                continue
            verdict = one.fits(budget_bytes).verdict
            cells.append(f"[{COLOURS[verdict]}]{_mb(one.total_bytes)} {verdict:<5}[/]")
        table.add_row(*cells)
    return table


def _rows(n_ctx_train: int, asked: int) -> Sequence[int]:
    most = max(n_ctx_train, asked)
    rows = {asked, n_ctx_train}
    n = FIRST_ROW
    while n < most:
        rows.add(n)
        n *= 2
    return sorted(n for n in rows if n > 0)


def _facts(header: GgufHeader) -> str:
    kinds = {
        "attention": "full attention",
        "swa": f"sliding window of {header.n_swa:,}",
        "recurrent": "recurrent",
        "hybrid": "recurrent and attention layers",
    }
    types = ", ".join(
        f"{_mb(one.n_bytes)} {name}" for name, one in sorted(header.tensors.items(), key=lambda item: -item[1].n_bytes)
    )
    return f"{header.architecture}, {header.n_layer} layers, {kinds[header.memory_kind]}, {types}"


def _parts(estimate: MemoryEstimate) -> str:
    parts = {
        "cache": estimate.kv,
        "recurrent state": estimate.recurrent,
        "compute": estimate.compute + estimate.work,
        "logits": estimate.outputs,
        "tables": estimate.tables,
        "adapters": estimate.adapters,
        "checkpoints, at most": estimate.checkpoints,
        "a snapshot, while it is taken": estimate.snapshot,
    }
    return ", ".join(f"{name} {_mb(n)}" for name, n in parts.items() if n)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"
