"""Is greedy sampling as fast as numpy's argmax?

Time a row of 262,144 logits, the largest vocabulary in use: the sampler on a row of the caller's, the bare argmax, and
numpy's. The sampler no slower than numpy. ``pytest benches --benchmark-only``.
Baseline: numpy.argmax.
Check: all give the same token, wherever the largest logit stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

import llamacppshim

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import real_models

Row = NDArray[np.float32]
Argmax = Callable[[Row], int]


@pytest.fixture(scope="module")
def model() -> Iterator[llamacppshim.Model]:
    with llamacppshim.Model(real_models.path("gemma3"), vocab_only=True) as model:
        assert model.n_vocab == 262_144
        yield model


@pytest.fixture(scope="module")
def logits(model: llamacppshim.Model) -> Row:
    return np.random.default_rng(0).normal(size=model.n_vocab).astype(np.float32)


def sides(model: llamacppshim.Model) -> dict[str, Argmax]:
    return {
        "sampler": llamacppshim.Sampler(model).sample_row,
        "argmax": llamacppshim.argmax,
        "numpy": lambda row: int(np.argmax(row)),
    }


@pytest.mark.parametrize("side", ["sampler", "argmax", "numpy"])
def test_greedy_choice_of_a_row(benchmark: BenchmarkFixture, model: llamacppshim.Model, logits: Row, side: str) -> None:
    choose = sides(model)[side]
    for place in (0, 1, 131_071, model.n_vocab - 1):
        row = logits.copy()
        row[place] = 100.0
        assert choose(row) == place
    assert choose(logits) == int(np.argmax(logits))
    benchmark.group = "greedy choice of 262,144"
    benchmark(choose, logits)
