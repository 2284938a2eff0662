"""Prints the path of the pinned llama.cpp source tree, obtaining it first where needed.

Order: ``--source DIR`` or the environment variable LLAMACPPSHIM_LLAMA_CPP; the cache; the package index.
The pin (commit, release, digests) is read from ``llama.cpp.cmake`` beside this file, which owns it.

Needs only the standard library and pip. Every failure is one line on stderr and exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

HERE = Path(__file__).resolve().parent
SOURCE_VARIABLE = "LLAMACPPSHIM_LLAMA_CPP"
CACHE_VARIABLE = "LLAMACPPSHIM_CACHE"

# What the build compiles or includes. Docs, models and tools may differ without changing the library.
BUILT = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "licenses", "src", "vendor")


class FetchError(Exception):
    """The pinned source cannot be had; the text says why, in one line."""


def read_pin() -> dict[str, str]:
    """The pin as ``llama.cpp.cmake`` states it: commit, release, sdist_sha256, tree_sha256."""
    text = (HERE / "llama.cpp.cmake").read_text(encoding="utf-8")
    found = dict(re.findall(r'set\(LCS_LLAMA_([A-Z0-9_]+)\s+"?([0-9A-Za-z.]+)"?\)', text))
    return {name.lower(): value for name, value in found.items()}


def tree_sha256(tree: Path) -> str:
    """SHA-256 over the path and content of every file that the build reads."""
    digest = hashlib.sha256()
    for name in BUILT:
        top = tree / name
        files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for file in files:
            content = hashlib.sha256(file.read_bytes()).digest()
            digest.update(file.relative_to(tree).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()


def verified(tree: Path, pin: dict[str, str], origin: str, remedy: str = "") -> Path:
    if not (tree / "include" / "llama.h").is_file():
        raise FetchError(f"{origin} {tree} is not a llama.cpp source tree: it has no include/llama.h{remedy}")
    actual = tree_sha256(tree)
    if actual != pin["tree_sha256"]:
        raise FetchError(
            f"{origin} {tree} is not llama.cpp {pin['commit']}: "
            f"tree digest {actual[:16]}, expected {pin['tree_sha256'][:16]}{remedy}"
        )
    return tree


def cache_dir() -> Path:
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "llamacppshim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamacppshim"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, so that builds that start together download once."""
    with open(path, "a+b") as file:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(pin: dict[str, str], into: Path) -> Path:
    """The source distribution that vendors the pinned commit, its hash checked by pip."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"llama-cpp-python=={pin['release']} --hash=sha256:{pin['sdist_sha256']}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--require-hashes", "--requirement", str(requirements), "--dest", str(into)]
    # pip asks the distribution's build backend for its metadata. Our own build has that backend at hand; elsewhere pip
    # must be let fetch it.
    if importlib.util.find_spec("scikit_build_core"):
        command.append("--no-build-isolation")
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        output = result.stdout + result.stderr
        if "DO NOT MATCH THE HASHES" in output:
            got = re.search(r"Got\s+([0-9a-f]{64})", output)
            raise FetchError(
                f"llama-cpp-python {pin['release']} has a wrong hash: "
                f"got {got.group(1) if got else 'another'}, expected {pin['sdist_sha256']}"
            )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
        raise FetchError(
            f"llama-cpp-python {pin['release']} cannot be downloaded ({errors[-1]}); "
            f"set {SOURCE_VARIABLE} to a llama.cpp {pin['commit']} tree to build without a package index"
        )
    (archive,) = into.glob("*.tar.gz")
    return archive


def unpack(archive: Path, into: Path) -> Path:
    """Only the vendored llama.cpp of the source distribution."""
    with tarfile.open(archive) as tar:
        members = []
        for member in tar:
            _, _, inner = member.name.partition("/vendor/llama.cpp/")
            if inner and inner != ".git":  # a dangling submodule link, at which git would complain
                member.name = inner
                members.append(member)
        if hasattr(tarfile, "data_filter"):
            tar.extractall(into, members, filter="data")
        else:
            tar.extractall(into, members)
    return into


def fetch(source: str | None = None) -> Path:
    pin = read_pin()
    if given := source or os.environ.get(SOURCE_VARIABLE):
        return verified(Path(given).resolve(), pin, "the given tree")
    cache = cache_dir()
    tree = cache / f"llama.cpp-{pin['commit']}"
    if not tree.is_dir():
        try:
            fill(cache, tree, pin)
        except OSError as error:
            raise FetchError(f"cache {cache} cannot be written ({error}); set {CACHE_VARIABLE} to another") from error
    return verified(tree, pin, "the cached tree", "; delete it to fetch it anew")


def fill(cache: Path, tree: Path, pin: dict[str, str]) -> None:
    """Puts the tree into the cache, whole or not at all."""
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{tree.name}.lock"):
        if tree.is_dir():
            return
        unfinished = f"{tree.name}.fetch-"
        for left_over in cache.glob(f"{unfinished}*"):  # of a fetch that was killed: the lock is ours, so none runs
            shutil.rmtree(left_over, ignore_errors=True)
        print(f"downloading llama.cpp {pin['commit']} (77 MB, once)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=cache, prefix=unfinished) as folder:
            unpacked = unpack(download(pin, Path(folder)), Path(folder) / "tree")
            verified(unpacked, pin, "the downloaded tree")
            unpacked.rename(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the path of the pinned llama.cpp source tree.")
    parser.add_argument("--source", help=f"build from this tree instead (also: {SOURCE_VARIABLE})")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.source).as_posix())
    except (FetchError, OSError, tarfile.TarError) as error:
        print(f"llamacppshim: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
