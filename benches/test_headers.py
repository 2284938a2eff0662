"""What does it cost to know a model without loading it?

Milliseconds of a header with a vocabulary of 49,152 and of 262,144 tokens, of the memory of 24 contexts of it, and of a
list of 200 Ollama entries, each with a file of its own: before anything is known of them, and after.
Baseline: llama.cpp's own way to a model's facts, a load without weights.
Check: the header says what that load says; the list names every model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llamacppshim import FoundModel, Model, RuntimeConfig, list_models, read_gguf_header
from llamacppshim.fit_cli import verdicts
from llamacppshim.manifest import hash_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import real_models
import tiny
from building import FIXTURES

N_MODELS = 200


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("way", ["header", "header and 24 contexts", "load of the vocabulary"])
def test_facts(benchmark: Any, name: str, way: str) -> None:
    path = real_models.path(name)
    header = read_gguf_header(path)
    with Model(path, vocab_only=True) as model:
        assert (header.n_vocab, header.n_ctx_train, header.metadata) == (
            model.n_vocab,
            model.n_ctx_train,
            model.metadata,
        )
    configs = [RuntimeConfig(n_ctx=512 * n, type_k=kind) for n in range(1, 13) for kind in ("f16", "q8_0")]
    run = {
        "header": lambda: read_gguf_header(path),
        "header and 24 contexts": lambda: header.measure(configs),
        "load of the vocabulary": lambda: Model(path, vocab_only=True).close(),
    }[way]
    benchmark.pedantic(run, rounds=20, warmup_rounds=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 32,000 tokens in each of its files."""
    root = tmp_path_factory.mktemp("ollama")
    (root / "blobs").mkdir()
    whole = tiny.build(FIXTURES)["tiny-spm"].read_bytes()
    for i in range(N_MODELS):
        data = whole + bytes(i + 1)
        digest = hash_bytes(data)
        (root / "blobs" / f"sha256-{digest}").write_bytes(data)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)}
        folder = root / "manifests" / "registry.ollama.ai" / "library" / f"model{i}"
        folder.mkdir(parents=True)
        (folder / "latest").write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    return root


@pytest.mark.parametrize("known", [False, True], ids=["at first", "afterwards"])
def test_a_list(benchmark: Any, store: Path, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", str(tmp_path))

    def run() -> list[tuple[FoundModel, str]]:
        return list(verdicts(one for one in list_models() if one.spec.startswith("ollama:model")))

    def forget() -> None:
        (tmp_path / "models.json").unlink(missing_ok=True)

    found = run()
    assert len(found) == N_MODELS
    assert all(verdict.startswith("llama, context 8,192, ") for _, verdict in found)
    benchmark.pedantic(run, setup=None if known else forget, rounds=10)
