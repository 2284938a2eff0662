"""The memory rule. Oracles: what llama.cpp says of real contexts, a child's resident memory, and sums by hand."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import RunChild
from test_header import N_EMBD, predicting_model, small_layer, small_model

from llamacppshim import (
    Context,
    Fit,
    FoundModel,
    GgufHeader,
    InvalidArgumentError,
    MemoryEstimate,
    Model,
    ModelLoadError,
    ModelSource,
    OutOfMemoryError,
    OutOfRangeError,
    Runtime,
    RuntimeConfig,
    UnsupportedFeatureError,
    estimate_memory,
    fit_cli,
    largest_context,
    live_counts,
    machine_budget,
    read_gguf_header,
)
from llamacppshim import memory as memory_module
from llamacppshim import runtime as runtime_module
from llamacppshim._native import available_memory
from llamacppshim.config import CONTEXT_FIELDS
from llamacppshim.header import estimate_file
from llamacppshim.memory import estimate_of, judge_fit

GENERATING = ("tiny-llama", "tiny-spm", "tiny-swa", "tiny-mamba", "tiny-hybrid")
MEBI = 1 << 20


def reported(model: Model, config: RuntimeConfig) -> dict[str, dict[str, int]]:
    with Context(model, **{name: getattr(config, name) for name in CONTEXT_FIELDS}) as context:
        return context.memory_use()


def total(use: dict[str, dict[str, int]], kind: str) -> int:
    return sum(one[kind] for one in use.values())


def check_estimate(header: GgufHeader, model: Model, config: RuntimeConfig) -> None:
    estimate, use = estimate_memory(header, config), reported(model, config)
    real = sum(total(use, kind) for kind in ("model", "context", "compute"))
    assert estimate.engine_bytes == pytest.approx(real, rel=0.03)
    # The dry run is llama.cpp's own: nothing is lost on the way.
    assert estimate.engine_bytes == real
    assert estimate.kv + estimate.recurrent == total(use, "context")
    # The layers, by their shapes alone, come to the same.
    assert sum(estimate.kv_layers) == estimate.kv
    assert estimate.weights_bytes == total(use, "model")


@pytest.mark.parametrize("name", GENERATING)
def test_an_estimate_is_what_a_real_context_reports(
    loaded: dict[str, Model], tiny_models: dict[str, Path], name: str
) -> None:
    header = read_gguf_header(tiny_models[name])
    types = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
    for type_k, n_seq_max, unified in itertools.product(types, (1, 3), (False, True)):
        for n_ctx, n_ubatch, full, flash in ((256, 32, False, "auto"), (700, 512, True, "on"), (1025, 64, False, "on")):
            check_estimate(
                header,
                loaded[name],
                RuntimeConfig(
                    n_ctx=n_ctx,
                    n_ubatch=n_ubatch,
                    n_seq_max=n_seq_max,
                    kv_unified=unified,
                    swa_full=full,
                    type_k=type_k,  # type: ignore[arg-type]
                    type_v=type_k,  # type: ignore[arg-type]
                    flash_attn=flash,  # type: ignore[arg-type]
                    n_rs_seq=2 if n_seq_max == 3 else 0,
                ),
            )


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("load", [{}, {"use_mmap": False}, {"use_extra_bufts": False}], ids=str)
def test_an_estimate_of_a_real_model_is_what_it_reports(
    request: pytest.FixtureRequest, name: str, load: dict[str, Any]
) -> None:
    path = request.getfixturevalue(name)
    header = read_gguf_header(path)
    with Model(path, **load) as model:
        for kind, n_seq_max, unified, full in itertools.product(
            ("f16", "q8_0", "q4_0"), (1, 4), (False, True), (False, True)
        ):
            config = RuntimeConfig(
                n_ctx=2048, type_k=kind, type_v=kind, n_seq_max=n_seq_max, kv_unified=unified, swa_full=full, **load
            )
            check_estimate(header, model, config)


@pytest.mark.parametrize(("name", "load"), [("smollm2", {}), ("gemma3", {"use_mmap": False})])
def test_an_estimate_of_a_real_model_is_its_resident_memory(
    request: pytest.FixtureRequest, run_child: RunChild, name: str, load: dict[str, Any]
) -> None:
    path = request.getfixturevalue(name)
    header = read_gguf_header(path)
    config = {"n_ctx": 1024, "n_ubatch": 128, **load}
    child = run_child(
        f"""
        def resident():
            for line in open("/proc/self/smaps_rollup"):
                if line.startswith("Rss:"):
                    return int(line.split()[1]) * 1024
        before = resident()
        with Runtime.open({os.fspath(path)!r}, **{config!r}) as runtime, runtime.session() as session:
            session.ensure_prefix([300 + 7 * i % 20000 for i in range(1000)])  # every page of the cache is used
            session.collect(max_tokens=4, ignore_eos=True)
            print(resident() - before, session.explain().checkpoint_bytes)
        """,
        stdout=None,
    )
    resident, checkpoints = map(int, child.stdout.split())
    estimate = estimate_memory(header, RuntimeConfig(**config))
    assert checkpoints <= estimate.checkpoints
    assert estimate.needed_bytes + checkpoints == pytest.approx(resident, rel=0.10)


def test_the_parts_follow_from_the_shapes(tiny_models: dict[str, Path]) -> None:
    header = read_gguf_header(tiny_models["tiny-swa"])  # four layers, 64 numbers of K and of V, every other windowed
    config = RuntimeConfig(n_ctx=2048, n_ubatch=64, n_batch=64)
    full, windowed = 2048 * 2 * 64 * 2, 256 * 2 * 64 * 2  # 32 + 64 cells, padded to 256
    estimate = estimate_memory(header, config)
    assert estimate.kv_layers == (windowed, full, windowed, full)
    assert estimate.checkpoints == 16 * (2 * windowed + 4 * header.n_vocab)
    saved = 2 * (full + windowed) + 12 * 2 * (2048 + 256) + 4 * header.n_vocab  # cells and the last row
    assert estimate.snapshot == saved + 12 * 2048 + (32 << 10)  # tokens, and the answer in hand
    assert estimate_memory(header, config, swa_full=True).kv_layers == (full,) * 4
    assert estimate_memory(header, config, n_seq_max=2).kv_layers == (2 * windowed, full, 2 * windowed, full)
    rows = 16 * 4 * header.n_vocab
    assert estimate_memory(header, config, swa_full=True).checkpoints == rows
    pool = estimate_memory(header, config, swa_full=True, kv_unified=True, n_seq_max=2)
    assert pool.checkpoints == 2 * (rows + 16 * 2 * full)
    assert estimate_memory(header, config, checkpoint_bytes=1000).checkpoints == 1000
    assert estimate_memory(header, config, max_checkpoints=0, swa_full=True).checkpoints == 0
    assert estimate.outputs == 4 * header.n_vocab
    mamba = read_gguf_header(tiny_models["tiny-mamba"])
    states = 4 * sum(layer.n_state for layer in mamba.layers)
    assert estimate_memory(mamba, n_ctx=512, n_seq_max=2).recurrent == 2 * states
    # llama.cpp has no rollback for Mamba, and keeps no copies for it.
    assert estimate_memory(mamba, n_ctx=512, n_seq_max=2, n_rs_seq=3).recurrent == 2 * states
    assert estimate_memory(mamba, n_ctx=512).kv == 0
    for swa_full in (False, True):
        checkpoints = estimate_memory(mamba, n_ctx=512, swa_full=swa_full).checkpoints
        assert checkpoints == 16 * (states + 4 * mamba.n_vocab)
    hybrid = read_gguf_header(tiny_models["tiny-hybrid"])
    states = 4 * sum(layer.n_state for layer in hybrid.layers)
    assert estimate_memory(hybrid, n_ctx=512, n_seq_max=2).recurrent == 2 * states


def test_prediction_counts_where_it_is_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    path = predicting_model(tmp_path / "predicting.gguf")
    header, config = read_gguf_header(path), RuntimeConfig(n_ctx=256, use_mmap=False)
    without, with_it = estimate_memory(header, config), estimate_memory(header, config, prediction=True)
    for estimate, load_mtp in ((without, False), (with_it, True)):
        with Model(path, use_mmap=False, load_mtp=load_mtp) as model:
            assert estimate.weights_bytes == total(reported(model, config), "model")
    extra = sum(4 * math.prod(shape) for shape in small_layer(1).values()) + 4 * (2 * N_EMBD + 2 * N_EMBD * N_EMBD)
    assert with_it.weights_bytes - without.weights_bytes == extra
    assert (without.prediction_kv, with_it.prediction_kv) == (0, 256 * 2 * (16 + 16))
    plain = read_gguf_header(tiny_llama)
    assert estimate_memory(plain, config, prediction=True) == estimate_memory(plain, config)


def test_adapters_count_by_their_files(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    header, lora = read_gguf_header(tiny_models["tiny-llama"]), tiny_models["tiny-lora"]
    assert estimate_memory(header, adapters=[lora, (lora, 0.5)]).adapters == 2 * lora.stat().st_size  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="absent: No such file"):
        estimate_memory(header, adapters=[tmp_path / "absent"])  # type: ignore[arg-type]


def test_the_context_is_the_trained_one_by_default(tiny_llama: Path) -> None:
    header = read_gguf_header(tiny_llama)
    assert estimate_memory(header).config.n_ctx == 8192
    longer = msgspec.structs.replace(header, n_ctx_train=1 << 20)
    assert estimate_memory(longer).config.n_ctx == 8192
    shorter = msgspec.structs.replace(header, n_ctx_train=1000)
    assert estimate_memory(shorter).config.n_ctx == 1000


def test_what_a_runtime_would_refuse_is_refused(tiny_models: dict[str, Path]) -> None:
    header = read_gguf_header(tiny_models["tiny-llama"])
    with pytest.raises(InvalidArgumentError, match="flash attention"):
        estimate_memory(header, type_v="q8_0", flash_attn="off")
    with pytest.raises(OutOfRangeError):
        estimate_memory(header, n_seq_max=257)
    with pytest.raises(InvalidArgumentError, match="no field"):
        estimate_memory(header, n_context=3)
    with pytest.raises(TypeError):
        estimate_memory(header, {"n_ctx": 3})  # type: ignore[arg-type]
    assert live_counts()["headers"] == 0


def test_a_context_that_not_even_a_dry_run_has_room_for_is_told_by_its_shape(tiny_llama: Path) -> None:
    header = read_gguf_header(tiny_llama)
    estimate = estimate_memory(header, n_ctx=0x7FFFFF00)
    assert estimate.kv == sum(estimate.kv_layers) == 3 * 0x7FFFFF00 * 2 * 64 * 2
    assert not estimate.fits(machine_budget())


@pytest.mark.parametrize(
    ("needed", "verdict"),
    [
        (0, "good"),
        (8500, "good"),
        (8501, "tight"),
        (9700, "tight"),
        (9701, "none"),
        (10_000, "none"),
        (1 << 60, "none"),
    ],
)
def test_verdicts_turn_at_their_shares(needed: int, verdict: str) -> None:
    fit = judge_fit(needed, 10_000)
    assert fit == Fit(verdict, needed, 10_000)  # type: ignore[arg-type]
    assert bool(fit) == (verdict != "none")
    assert judge_fit(1, 0).verdict == "none"


@pytest.mark.parametrize(
    "budget", [math.nan, math.inf, 1e9, -1, -(10**30), "x", None, True, [1], np.zeros(2)], ids=repr
)
def test_a_budget_that_is_no_number_of_bytes_is_refused(tiny_llama: Path, budget: Any) -> None:
    header = read_gguf_header(tiny_llama)
    estimate = estimate_memory(header, n_ctx=256)
    for call in (
        lambda: estimate.fits(budget),
        lambda: judge_fit(0, budget),
        lambda: largest_context(header, RuntimeConfig(), budget_bytes=budget),
        lambda: largest_context(header, None, budget, ()),
    ):
        with pytest.raises(
            InvalidArgumentError, match=r"^budget_bytes is .*, expected an integer of at least 0$"
        ) as caught:
            call()
        assert caught.value.field == "budget_bytes"
    assert estimate.fits(np.int64(1 << 40)).verdict == "good" and not estimate.fits(0)


@pytest.mark.parametrize("header", ["x.gguf", None, 3, Path("x.gguf")], ids=repr)
def test_what_is_no_header_is_named(header: Any) -> None:
    for call in (estimate_memory, lambda header: largest_context(header, RuntimeConfig(), 1 << 30)):
        with pytest.raises(TypeError, match=rf"^header must be a GgufHeader, .*, not {type(header).__name__}$"):
            call(header)


@pytest.mark.parametrize("name", GENERATING)
def test_the_largest_context_fits_and_the_next_one_does_not(tiny_models: dict[str, Path], name: str) -> None:
    header = msgspec.structs.replace(read_gguf_header(tiny_models[name]), n_ctx_train=40_000)
    base = estimate_memory(header, n_ctx=256).total_bytes
    for budget in (0, base, int(base / 0.97) + 1, 2 * base, 1 << 40):
        for kind, n_ctx in largest_context(header, RuntimeConfig(), budget, ("f16", "q8_0")).items():

            def fits(n: int, kind: str = kind, budget: int = budget) -> bool:
                return bool(estimate_memory(header, n_ctx=n, type_k=kind, type_v=kind).fits(budget))

            assert n_ctx % 256 == 0 or n_ctx == 40_000
            assert n_ctx == 0 or fits(n_ctx)
            assert n_ctx == 40_000 or not fits(n_ctx + 256)


def test_a_type_that_the_model_cannot_take_is_left_out(tmp_path: Path) -> None:
    header = read_gguf_header(small_model(tmp_path / "small.gguf"))  # heads of 16 numbers, no whole block of 32
    assert largest_context(header, RuntimeConfig(), 1 << 40) == {"f16": 256}
    assert largest_context(header, None, 1 << 40, ("f32", "q5_0")) == {"f32": 256}


def test_a_quantised_cache_needs_flash_attention(tiny_llama: Path) -> None:
    header = read_gguf_header(tiny_llama)
    assert set(largest_context(header, RuntimeConfig(flash_attn="off"), 1 << 40)) == {"f16"}


def test_what_follows_from_a_context_beyond_every_dry_run_grows_with_it(tiny_models: dict[str, Path]) -> None:
    for name in GENERATING:
        header = read_gguf_header(tiny_models[name])
        sizes = [1 << n for n in range(14, 31)]
        for kind in ("compute", "kv", "total_bytes"):
            found = [getattr(estimate_memory(header, n_ctx=n), kind) for n in sizes]
            assert found == sorted(found), (name, kind)
        # Where both can be had, what follows from a smaller context is not less than what is measured.
        config = RuntimeConfig(n_ctx=1 << 18)
        followed = estimate_of(header, config, memory_module._use_by_shape(header, config))
        assert followed.compute >= 0.99 * estimate_memory(header, config).compute
        assert followed.kv == estimate_memory(header, config).kv


@pytest.mark.parametrize("name", GENERATING)
def test_more_sequences_than_a_ubatch_has_tokens(
    loaded: dict[str, Model], tiny_models: dict[str, Path], name: str
) -> None:
    """Then the graph of one token for each sequence is the larger one."""
    header = read_gguf_header(tiny_models[name])
    for n_ubatch, n_seq_max, unified in ((1, 8, False), (1, 8, True), (31, 64, False), (63, 64, True)):
        config = RuntimeConfig(n_ctx=2048, n_ubatch=n_ubatch, n_seq_max=n_seq_max, kv_unified=unified)
        check_estimate(header, loaded[name], config)


# Opening.


def test_a_runtime_that_cannot_fit_is_refused_with_the_numbers(
    tiny_llama: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_gguf_header(tiny_llama)
    config = RuntimeConfig(n_ctx=512)
    needed = estimate_memory(header, config).total_bytes
    limit = next(n for n in itertools.count(int(needed / 0.97) - 2) if needed <= 0.97 * n)
    before = live_counts()
    for budget, opens in ((0, False), (limit - 1, False), (limit, True), (needed * 2, True)):
        monkeypatch.setattr(runtime_module, "machine_budget", lambda budget=budget: budget)
        if opens:
            Runtime.open(tiny_llama, config).close()
        else:
            with pytest.raises(OutOfMemoryError, match="n_ctx 512 needs") as caught:
                Runtime.open(tiny_llama, config)
            assert (caught.value.needed_bytes, caught.value.available_bytes) == (needed, budget)
            Runtime.open(tiny_llama, config, check_memory=False).close()
        assert live_counts() == before
    # Of a model that is loaded already, what is mapped still has to fit; what it took for itself is no news.
    monkeypatch.setattr(runtime_module, "machine_budget", lambda: limit - 1)
    with pytest.raises(OutOfMemoryError):
        Runtime.open(model, config)
    with Model(tiny_llama, use_mmap=False) as loaded:
        Runtime.open(loaded, config).close()


def test_what_cannot_be_estimated_is_not_refused_for_that(run_child: RunChild, tiny_llama: Path) -> None:
    """The model's double is a file with a hole, as large as the model."""
    run_child(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        name, text = refusal(read_gguf_header, {os.fspath(tiny_llama)!r})
        assert (name, text) == ("OutOfMemoryError", "no file for the model's double: File too large"), (name, text)
        with Runtime.open({os.fspath(tiny_llama)!r}, n_ctx=256) as runtime, runtime.session() as session:
            session.ensure_prefix("abc")
        """
    )


def test_an_embedding_model_makes_no_text(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedFeatureError):
        Runtime.open(tiny_models["tiny-bert"])
    assert not read_gguf_header(tiny_models["tiny-bert"]).generates


def test_the_budget_is_what_the_machine_has_less_the_reserve() -> None:
    available = available_memory()
    if available is not None:
        sizes = {}
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            sizes[name] = int(value.split()[0]) * 1024
        assert 0 < available <= sizes["MemTotal"] + sizes["SwapTotal"]
    assert 0 < machine_budget() < machine_budget(0)
    assert machine_budget(1 << 62) == 0


@pytest.fixture
def cgroup() -> Iterator[Callable[[int], Path]]:
    """Makes a group with a memory limit, by whichever version of cgroups this machine lets us make one."""
    made: list[Path] = []

    def make(n_bytes: int) -> Path:
        for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            group = Path(root) / f"llamacppshim-test-{os.getpid()}"
            try:
                group.mkdir()
                made.append(group)
                (group / limit).write_text(str(n_bytes))
            except OSError:
                continue
            return group / "cgroup.procs"
        pytest.skip("this machine lets nobody make a cgroup with a memory limit")

    yield make
    for group in made:
        group.rmdir()


def test_the_limit_of_a_cgroup_is_kept(
    cgroup: Callable[[int], Path], run_child: RunChild, tiny_llama: Path, smollm2: Path
) -> None:
    run_child(
        f"""
        from pathlib import Path
        from llamacppshim._native import available_memory
        Path({os.fspath(cgroup(90 * MEBI))!r}).write_text(str(os.getpid()))
        available = available_memory()
        assert 30 << 20 < available <= 90 << 20, available
        assert machine_budget() == 0

        # A cache of 147 MB, which llama.cpp would have cleared page by page.
        name, text = refusal(Runtime.open, {os.fspath(tiny_llama)!r}, n_ctx=200_000, check_memory=False)
        assert (name, text[:18]) == ("OutOfMemoryError", "the KV cache needs"), (name, text)
        # Weights of 92 MiB; mapped, they take none of it.
        name, text = refusal(Model, {os.fspath(smollm2)!r}, use_mmap=False)
        assert (name, text[:21]) == ("OutOfMemoryError", "the model needs 92 Mi"), (name, text)
        with Model({os.fspath(smollm2)!r}):
            pass
        """
    )


# The command line.


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "llamacppshim.cli", *map(os.fspath, arguments)],
        env=environment,
        cwd="/",  # the installed package, not the sources
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_fit_prints_contexts_against_types(tiny_models: dict[str, Path]) -> None:
    done = command("fit", tiny_models["tiny-swa"], "--ctx", "3000")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("model    gemma3, 4 layers, sliding window of 32, ")
    table = [line.split() for line in lines if line[:1].isdigit() or line[:1] == " "]
    assert [row[0] for row in table] == ["2,048", "3,000", "4,096", "8,192"]
    assert all(row.count("good") == 3 for row in table)
    assert lines[-1] == "largest  8,192 with f16, 8,192 with q8_0, 8,192 with q4_0 (trained for 8,192)"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fit", "/nonexistent.gguf"], "no such file"),
        (["fit", "tiny-bert"], "makes embeddings, not text"),
        (["fit", "tiny-llama", "--ctx", "-1"], "n_ctx"),
    ],
)
def test_fit_says_in_a_line_what_is_wrong(tiny_models: dict[str, Path], arguments: list[str], text: str) -> None:
    done = command(*(tiny_models.get(word, word) for word in arguments))
    assert done.returncode == 1
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_estimate_can_be_kept_as_it_is(tiny_llama: Path) -> None:
    estimate = estimate_memory(read_gguf_header(tiny_llama), n_ctx=256)
    assert msgspec.json.decode(msgspec.json.encode(estimate), type=MemoryEstimate) == estimate


def test_the_list_of_models_says_which_fit_and_reads_a_header_once(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", str(tmp_path / "cache"))
    model, damaged = tmp_path / "model.gguf", tmp_path / "damaged.gguf"
    model.write_bytes(tiny_models["tiny-llama"].read_bytes())
    damaged.write_bytes(b"GGUF")
    found = [
        FoundModel("a", ModelSource(model, None, "path")),
        FoundModel("b", ModelSource(tiny_models["tiny-bert"], None, "path")),
        FoundModel("c", ModelSource(damaged, None, "path")),
        FoundModel("d", None, reason="no such blob"),
        FoundModel("e", ModelSource(model, None, "path")),
    ]
    total = estimate_memory(read_gguf_header(model)).total_bytes
    reads: list[Path] = []

    def counted(path: Path) -> tuple[GgufHeader, MemoryEstimate | None]:
        reads.append(path)
        return estimate_file(path)

    monkeypatch.setattr(fit_cli, "estimate_file", counted)
    for budget, word in ((2 * total, "fits"), (int(total / 0.9), "fits tightly"), (total, "does not fit")):
        monkeypatch.setattr(fit_cli, "machine_budget", lambda budget=budget: budget)
        reads.clear()
        texts = [text for _, text in fit_cli.verdicts(found)]
        line = f"llama, context 8,192, {word}: {total / 1e6:,.0f} MB with n_ctx 8,192"
        bert = "bert, makes embeddings, not text"
        assert texts == [line, bert, "truncated: the version needs 4 bytes, 0 are left", "no such blob", line]
        # What is kept is the need; what the machine has is looked at again. A refusal may be over by the next time.
        assert len(reads) == (3 if budget == 2 * total else 1)
    model.write_bytes(tiny_models["tiny-mamba"].read_bytes())
    assert next(iter(fit_cli.verdicts(found)))[1].startswith("mamba, ")
