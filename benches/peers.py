"""Makes what the benches compare with, under build/peers.

``python3 benches/peers.py [shim] [llama-bench] [llama-server] [llama-cpp-python] [--jobs N]``; without names, all.

shim              this tree, twice: on ggml's own threads and on OpenMP; each with the decode loop in C of loop/
llama-bench       the same twice, from the pinned tree with the flags of our own build
llama-server      once, on ggml's own threads
llama-cpp-python  the release that vendors the same pin, built for this machine, in an environment of its own
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = ROOT / "build" / "peers"
THREADS = ("pool", "openmp")  # what runs the graph: ggml's own threads, or OpenMP's
SHIM = {threads: PEERS / f"shim-{threads}" for threads in THREADS}  # a folder for PYTHONPATH
LOOP = {threads: SHIM[threads] / "bin" / "loop" for threads in THREADS}
LLAMA_BENCH = {threads: PEERS / f"llama-bench-{threads}" / "bin" / "llama-bench" for threads in THREADS}
DEFAULT_THREADS = "pool"  # as LLAMACPPSHIM_OPENMP is by default
LLAMA_SERVER = LLAMA_BENCH[DEFAULT_THREADS].with_name("llama-server")
PYTHON = PEERS / "llama-cpp-python" / "bin" / "python"

AMX_GUARD = ROOT / "third_party" / "amx_guard.hpp"
CCACHE = shutil.which("ccache")
LAUNCHERS = {f"CMAKE_{language}_COMPILER_LAUNCHER": CCACHE for language in ("C", "CXX")} if CCACHE else {}


def pinned(name: str) -> str:
    text = (ROOT / "third_party" / "llama.cpp.cmake").read_text(encoding="utf-8")
    found = re.search(rf"set\(LCS_LLAMA_{name} (\S+?)\)", text)
    if found is None:
        raise SystemExit(f"third_party/llama.cpp.cmake names no {name}")
    return found[1]


def compilers() -> dict[str, str]:
    """The environment, with the names of the compilers that our other builds use: by others, ccache would miss all."""
    return {"CC": "gcc", "CXX": "g++", **os.environ}


def build(source: Path, folder: Path, jobs: int, targets: Sequence[str] = (), **definitions: str) -> None:
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-D{name}={value}" for name, value in {**LAUNCHERS, **definitions}.items()]
    subprocess.run(configure, check=True, env=compilers())
    command = ["cmake", "--build", str(folder), "-j", str(jobs)]
    if targets:
        command += ["--target", *targets]
    subprocess.run(command, check=True, env=compilers())


def make_shim(jobs: int) -> None:
    for threads, site in SHIM.items():
        folder = PEERS / f"build-{threads}"
        build(
            ROOT,
            folder,
            jobs,
            LLAMACPPSHIM_PYTHON="ON",
            LLAMACPPSHIM_OPENMP="ON" if threads == "openmp" else "OFF",
            Python_EXECUTABLE=sys.executable,
            CMAKE_MODULE_PATH=str(files("cython_cmake") / "cmake"),
        )
        prefix = folder / "prefix"
        for component, to in (("python", site), ("development", prefix)):
            install = ["cmake", "--install", str(folder), "--component", component, "--prefix", str(to)]
            subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(
            ROOT / "llamacppshim",
            site / "llamacppshim",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        # As pip does for the other side: an import is not to compile it.
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(site / "llamacppshim")], check=True)
        build(HERE / "loop", folder / "loop", jobs, CMAKE_PREFIX_PATH=str(prefix))
        LOOP[threads].parent.mkdir(exist_ok=True)
        shutil.copy2(folder / "loop" / "loop", LOOP[threads])


def make_llama_tool(jobs: int, target: str, all_threads: Sequence[str]) -> None:
    fetch = [sys.executable, str(ROOT / "third_party" / "fetch.py")]
    source = subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip()
    commit = pinned("COMMIT")
    for threads in all_threads:
        build(
            HERE / "llama_bench",
            LLAMA_BENCH[threads].parent.parent,
            jobs,
            [target],
            LLAMA_DIR=source,
            LLAMA_BUILD_COMMIT=commit,
            GGML_BUILD_COMMIT=commit,
            GGML_OPENMP="ON" if threads == "openmp" else "OFF",
        )


def make_llama_bench(jobs: int) -> None:
    make_llama_tool(jobs, "llama-bench", THREADS)


def make_llama_server(jobs: int) -> None:
    make_llama_tool(jobs, "llama-server", [DEFAULT_THREADS])


def make_llama_cpp_python(jobs: int) -> None:
    if not PYTHON.exists():
        venv.create(PYTHON.parent.parent, with_pip=True)
    release = f"llama-cpp-python=={pinned('RELEASE')}"
    environment = {
        **compilers(),
        # The guard: without it this peer, too, dies on a CPU with AMX.
        "CMAKE_ARGS": f"-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-include{AMX_GUARD}",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        **LAUNCHERS,
    }
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, release], check=True, env=environment)


MAKERS = {
    "shim": make_shim,
    "llama-bench": make_llama_bench,
    "llama-server": make_llama_server,
    "llama-cpp-python": make_llama_cpp_python,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make what the benches compare with, under build/peers.")
    parser.add_argument("peers", nargs="*", choices=[[], *MAKERS], metavar="peer", help=f"of {', '.join(MAKERS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    for name in arguments.peers or MAKERS:
        MAKERS[name](arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
