"""The digests of model files, kept from one process to the next as long as the file is the same."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from llamacppshim.digests import known_digest
from llamacppshim.facts import MAX_ENTRIES


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests.json"


def asked(path: Path, digest: str = "a" * 64) -> tuple[str, int]:
    """The answer, and how often it was computed."""
    n = 0

    def compute() -> str:
        nonlocal n
        n += 1
        return digest

    return known_digest(str(path), compute), n


def test_a_digest_is_computed_once_until_the_file_changes(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    assert asked(path) == ("a" * 64, 1)
    assert asked(path, "b" * 64) == ("a" * 64, 0)
    path.write_bytes(b"three")
    assert asked(path, "c" * 64) == ("c" * 64, 1)
    os.utime(path, ns=(1, 1))
    assert asked(path, "d" * 64)[1] == 1
    other = tmp_path / "other"
    other.write_bytes(b"three")
    os.utime(other, ns=(1, 1))
    other.replace(path)  # the same size and time, another inode
    assert asked(path, "e" * 64) == ("e" * 64, 1)


def test_a_damaged_cache_is_no_cache(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    cache.parent.mkdir()
    for text in ("", "{", "[]", '{"x": 5}', "\ufeff{}", "[" * 100_000):
        cache.write_text(text)
        assert asked(path)[1] == 1
        assert asked(path)[1] == 0
    entries = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(entries, "not a digest")))
    assert asked(path) == ("a" * 64, 1)


def test_without_a_cache_or_a_file_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").write_bytes(b"one")
    for path in (tmp_path / "model", tmp_path / "missing"):
        assert asked(path) == ("a" * 64, 1)


def test_the_cache_is_bounded_and_shared_by_threads(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({f"old{i}": "f" * 64 for i in range(2 * MAX_ENTRIES)}))
    paths = [tmp_path / f"model{i}" for i in range(8)]
    for path in paths:
        path.write_bytes(b"x")
    threads = [threading.Thread(target=asked, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < len(json.loads(cache.read_text())) <= MAX_ENTRIES
    assert [file.name for file in cache.parent.iterdir()] == ["digests.json"]
