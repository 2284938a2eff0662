"""What every test shares: the tiny models, the real ones, a child process for risky calls, and the leak check."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import real_models
import tiny
from building import FIXTURES

from llamacppshim import Context, Model, live_counts

# What a child's code may use without a word.
PRELUDE = """
import copy, gc, json, os, pickle, signal, sys, threading, time, weakref
import numpy as np
from llamacppshim import *
from llamacppshim import _native
TINY = json.loads(os.environ["TINY_MODELS"])

def refusal(call, *args, **kwargs):
    "The name of the error that the call raises, and its text; both empty where it raises none."
    try:
        call(*args, **kwargs)
    except Exception as error:
        assert "\\n" not in str(error), error
        return type(error).__name__, str(error)
    return "", ""
"""

RunChild = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_finish() -> None:
    """What stands for the whole run is not looked through again after every test, where `nothing_leaks` collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, Path]:
    """Every tiny model by name, as tests/tiny.py makes them."""
    return tiny.build(FIXTURES)


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["tiny-llama"]


@pytest.fixture(scope="session")
def loaded(tiny_models: dict[str, Path]) -> Iterator[dict[str, Model]]:
    """Every tiny model, loaded once. Tests share them and leave them open."""
    names = [name for name in tiny_models if "lora" not in name and not name.endswith("-00002-of-00002")]
    models = {name: Model(tiny_models[name]) for name in names}
    yield models
    for model in models.values():
        model.close()


@pytest.fixture
def model(loaded: dict[str, Model]) -> Model:
    return loaded["tiny-llama"]


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=2, n_threads=1) as context:
        yield context


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_models.path("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return real_models.path("gemma3")


@pytest.fixture
def run_child(tiny_models: dict[str, Path], tmp_path: Path) -> RunChild:
    """Runs pieces of code in a new interpreter, which must end well, and silently but for what ``stdout`` says."""

    def run(
        *pieces: str, stdout: str | None = "", stderr: str | None = "", returncode: int = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        code = PRELUDE + "".join(textwrap.dedent(piece) for piece in pieces)
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code],
            env={**os.environ, "TINY_MODELS": json.dumps({name: str(path) for name, path in tiny_models.items()})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == returncode, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert stdout is None or done.stdout == stdout
        assert stderr is None or done.stderr == stderr
        return done

    return run


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = live_counts()
    yield
    gc.collect()
    assert live_counts() == before
