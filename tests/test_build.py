"""The installed package, and how the build answers where something is missing or wrong."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from building import ROOT, build_folder, run, tool

import llamacppshim
from llamacppshim import _native

sys.path.insert(0, str(ROOT / "third_party"))
import fetch

EXTENSION = Path(_native.__file__)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


def licenses() -> dict[str, str]:
    files = importlib.metadata.files("llamacppshim") or []
    found = [file for file in files if ".dist-info/licenses/" in file.as_posix()]
    return {file.name: Path(file.locate()).read_text("utf-8") for file in found}


# The artifact


@linux
def test_the_extension_exports_its_init_function_and_nothing_else() -> None:
    symbols = run([tool("nm"), "-D", "--defined-only", EXTENSION]).split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["PyInit__native"]


@linux
def test_the_extension_needs_only_the_c_and_cpp_run_time() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run([tool("readelf"), "-d", EXTENSION]))
    allowed = r"(libc|libm|libdl|libpthread|libstdc\+\+|libgcc_s|ld-linux-.*)\.so\.\d+"
    assert needed
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


@linux
def test_the_extension_is_stripped_and_tied_to_no_folder() -> None:
    sections = run([tool("readelf"), "-S", "-W", EXTENSION])
    assert ".dynsym" in sections
    assert ".symtab" not in sections
    assert ".debug" not in sections
    assert not re.search("RPATH|RUNPATH", run([tool("readelf"), "-d", EXTENSION]))


def test_the_package_holds_what_is_used_and_nothing_else() -> None:
    files = importlib.metadata.files("llamacppshim") or []
    inside = [Path(*file.parts[1:]) for file in files if file.parts[0] == "llamacppshim"]
    others = {file.parts[0] for file in files if file.parts[0] != "llamacppshim"} - {".."}
    assert all(name.endswith(".dist-info") for name in others)
    unknown = [
        str(file)
        for file in inside
        if file.suffix not in {".py", ".pyi", ".pyc"}
        and file.name not in {"py.typed", "lcs.pxd", "lcs_capi.pxd", EXTENSION.name}
        and file.parts[0] != "include"
    ]
    assert unknown == []
    assert {"_native.pyi", "py.typed", "lcs.pxd", "lcs_capi.pxd", EXTENSION.name} <= {str(file) for file in inside}
    assert {str(file) for file in inside if file.parts[0] == "include"} == {"include/lcs.h", "include/lcs_capi.h"}


def test_get_include_holds_the_header_that_was_built() -> None:
    include = Path(llamacppshim.get_include())
    assert (include / "lcs.h").read_bytes() == (ROOT / "csrc" / "lcs.h").read_bytes()


def test_one_version_and_one_pin_everywhere() -> None:
    build = llamacppshim.build_info()
    assert build["version"] == importlib.metadata.version("llamacppshim")
    assert build["pin"] == fetch.read_pin()["commit"]
    assert build["cpu_missing"] is None


def test_the_licences_of_everything_linked_are_installed() -> None:
    texts = licenses()
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text("utf-8")
    for name, words in {
        "LICENSE-llama.cpp": "The ggml authors",
        "LICENSE-nlohmann-json": "Niels Lohmann",
        "LICENSE-llamafile": "Mozilla Foundation",
        "LICENSE-xxhash": "Yann Collet",
        "LICENSE-yarn": "Jeffrey Quesnelle and Bowen Peng",
    }.items():
        assert words in texts[name]


def test_no_copyright_line_of_a_compiled_source_is_left_out() -> None:
    """Oracle: the sources that the compiler read, and every copyright holder named in them."""
    holders: set[str] = set()
    tree = fetch.fetch()
    read = run([tool("ninja"), "-C", build_folder(), "-t", "deps"])
    sources = {line.strip() for line in read.splitlines() if line.startswith(" ") and str(tree) in line}
    assert len(sources) > 100
    for source in sources:
        text = Path(source).read_text("utf-8", "replace")
        holders |= set(re.findall(r"Copyright(?:Text:)? (?:\([cC]\) )?\d[\d, -]*([^\n<]*)", text))
    installed = "\n".join(licenses().values())
    assert holders
    assert [holder for holder in holders if holder.strip(" .*/") not in installed] == []


def test_the_source_distribution_holds_what_a_build_needs_and_no_build(tmp_path: Path) -> None:
    program = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run([sys.executable, "-c", program, tmp_path], cwd=ROOT)
    (archive,) = tmp_path.glob("llamacppshim-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "CMakeLists.txt", "CMakePresets.json", "PKG-INFO"} <= names
    assert {"csrc/lcs.h", "src/_native.pyx", "src/lcs.pxd", "third_party/fetch.py", "llamacppshim/__init__.py"} <= names
    assert folders <= {"benches", "cmake", "csrc", "docs", "examples", "llamacppshim", "src", "tests", "third_party"}
    assert [name for name in names if Path(name).name in {"llama.h", "ggml.h", "sgemm.cpp"}] == []
    assert archive.stat().st_size < 2_000_000


# Configuring


def configure(folder: Path, *options: str, env: dict[str, str] | None = None, fails: bool = False) -> str:
    return run([tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", *options], env=env, fails=fails)


def the_error(output: str) -> str:
    """The text of the one error of a configuration, unwrapped."""
    assert output.count("CMake Error") == 1, output
    text = output.partition("CMake Error")[2].partition("\n")[2].partition("\n\n\n")[0]
    return " ".join(text.partition("Call Stack")[0].split())


def test_an_unknown_backend_is_one_error(tmp_path: Path) -> None:
    output = configure(tmp_path, "-DLLAMACPPSHIM_BACKEND=opencl", fails=True)
    assert the_error(output) == 'LLAMACPPSHIM_BACKEND is "opencl", not one of cpu, cuda, metal, vulkan'


def test_a_compiler_that_is_none_is_one_error(tmp_path: Path) -> None:
    output = configure(tmp_path, env={"CC": "/nowhere/gcc"}, fails=True)
    assert the_error(output) == 'CC is "/nowhere/gcc", which is no program'


def test_a_machine_without_compilers_is_one_error(tmp_path: Path) -> None:
    variables = {"CC": "", "CXX": "", "PATH": str(tmp_path)}
    output = configure(tmp_path / "build", env=variables, fails=True)
    assert the_error(output).startswith("there is no C compiler: install")


def test_a_tree_of_another_commit_is_one_error(tmp_path: Path) -> None:
    tree = tmp_path / "llama.cpp"
    (tree / "include").mkdir(parents=True)
    (tree / "include" / "llama.h").write_text("// another\n")
    output = configure(tmp_path / "build", f"-DLLAMACPPSHIM_LLAMA_CPP={tree}", fails=True)
    assert re.search(r"the given tree \S+ is not llama\.cpp [0-9a-f]{9}: tree digest", the_error(output))


def test_no_index_and_an_empty_cache_are_one_error(tmp_path: Path) -> None:
    variables = {**OFFLINE, "LLAMACPPSHIM_CACHE": str(tmp_path / "cache")}
    text = the_error(configure(tmp_path / "build", env=variables, fails=True))
    assert "cannot be downloaded" in text
    assert "set LLAMACPPSHIM_LLAMA_CPP to a llama.cpp" in text


def test_a_build_to_be_shared_is_x86_64_v3_even_where_builds_are_reproducible(tmp_path: Path) -> None:
    configure(
        tmp_path,
        "-DLLAMACPPSHIM_NATIVE=OFF",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        env={"SOURCE_DATE_EPOCH": "0"},
    )
    commands = json.loads((tmp_path / "compile_commands.json").read_text("utf-8"))
    assert [entry["file"] for entry in commands if "-march=native" in entry["command"]] == []
    (kernels,) = [entry["command"] for entry in commands if entry["file"].endswith("ggml-cpu/ggml-cpu.c")]
    if re.search("x86_64|AMD64", os.uname().machine):
        assert {"-msse4.2", "-mavx", "-mavx2", "-mbmi2", "-mfma", "-mf16c"} <= set(kernels.split())
        assert "avx512" not in kernels


# Fetching, from a source distribution of our own making: no network is needed.

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "LLAMACPPSHIM_LLAMA_CPP": ""}
BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = os.path.join(folder, "llama_cpp_python-0.0.1.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 0.0.1\\n")
    return os.path.basename(info)
"""


class Upstream:
    """A copy of third_party that is pinned to a small source distribution in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.tree = self.cache / "llama.cpp-abcdef012"
        self.links = folder / "links"
        self.links.mkdir(parents=True)
        self.archive = self.links / "llama_cpp_python-0.0.1.tar.gz"
        files = {
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
            "own.py": BACKEND,
            "PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.0.1\n",
            "vendor/llama.cpp/.git": "gitdir: ../../nowhere\n",
            "vendor/llama.cpp/CMakeLists.txt": "project(llama.cpp)\n",
            "vendor/llama.cpp/include/llama.h": "// the header\n",
        }
        with tarfile.open(self.archive, "w:gz") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(f"llama_cpp_python-0.0.1/{name}")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text.encode()))
        expected = folder / "expected"
        fetch.unpack(self.archive, expected)
        self.pin(tree_sha256=fetch.tree_sha256(expected), at=folder / "third_party")

    def pin(self, tree_sha256: str, at: Path) -> None:
        at.mkdir()
        self.script = at / "fetch.py"
        shutil.copy(ROOT / "third_party" / "fetch.py", self.script)
        values = {
            "COMMIT": "abcdef012",
            "RELEASE": "0.0.1",
            "SDIST_SHA256": hashlib.sha256(self.archive.read_bytes()).hexdigest(),
            "TREE_SHA256": tree_sha256,
        }
        lines = [f"set(LCS_LLAMA_{name} {value})\n" for name, value in values.items()]
        (at / "llama.cpp.cmake").write_text("".join(lines))

    @property
    def env(self) -> dict[str, str]:
        return {**OFFLINE, "PIP_FIND_LINKS": str(self.links), "LLAMACPPSHIM_CACHE": str(self.cache)}

    def fetch(self, *, fails: bool = False, **env: str) -> str:
        return run([sys.executable, self.script], env={**self.env, **env}, fails=fails)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path)


def one_line(output: str) -> str:
    (line,) = output.splitlines()
    assert line.startswith("llamacppshim: ")
    return line


def test_the_source_is_fetched_once_and_then_found(upstream: Upstream) -> None:
    first = upstream.fetch()
    assert "downloading" in first
    assert first.splitlines()[-1] == str(upstream.tree)
    assert (upstream.tree / "include" / "llama.h").read_text() == "// the header\n"
    assert upstream.fetch(PIP_FIND_LINKS="") == f"{upstream.tree}\n"


def test_the_tree_has_no_link_to_a_git_repository_that_is_not_there(upstream: Upstream) -> None:
    upstream.fetch()
    assert not (upstream.tree / ".git").exists()


def test_builds_that_start_together_download_once(upstream: Upstream) -> None:
    command = [sys.executable, str(upstream.script)]
    env = {**os.environ, **upstream.env}
    both = [subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out for out, _ in outputs] == [f"{upstream.tree}\n"] * 2
    assert sum("downloading" in err for _, err in outputs) == 1


def test_what_a_killed_fetch_left_behind_is_cleared_away(upstream: Upstream) -> None:
    left_over = upstream.cache / f"{upstream.tree.name}.fetch-killed" / "tree"
    left_over.mkdir(parents=True)
    upstream.fetch()
    assert sorted(path.name for path in upstream.cache.iterdir()) == [upstream.tree.name, f"{upstream.tree.name}.lock"]


def test_another_file_of_the_right_name_is_refused(upstream: Upstream) -> None:
    with open(upstream.archive, "ab") as file:
        file.write(b"x")
    line = one_line(upstream.fetch(fails=True).partition("\n")[2])
    assert re.search(r"llama-cpp-python 0\.0\.1 has a wrong hash: got [0-9a-f]{64}, expected [0-9a-f]{64}$", line)
    assert not upstream.tree.exists()


def test_a_distribution_of_another_tree_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    upstream.pin(tree_sha256="0" * 64, at=tmp_path / "other")
    line = one_line(upstream.fetch(fails=True).partition("\n")[2])
    assert "the downloaded tree" in line
    assert "is not llama.cpp abcdef012" in line
    assert not upstream.tree.exists()


def test_a_cached_tree_that_was_changed_is_refused(upstream: Upstream) -> None:
    upstream.fetch()
    (upstream.tree / "include" / "llama.h").write_text("// changed\n")
    line = one_line(upstream.fetch(fails=True))
    assert "the cached tree" in line
    assert line.endswith("delete it to fetch it anew")


def test_a_cache_that_cannot_be_written_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = one_line(upstream.fetch(fails=True, LLAMACPPSHIM_CACHE=str(tmp_path / "file" / "cache")))
    assert "cannot be written" in line
    assert line.endswith("set LLAMACPPSHIM_CACHE to another")


def test_a_cache_that_can_only_be_read_is_enough(upstream: Upstream) -> None:
    upstream.fetch()
    (upstream.cache / f"{upstream.tree.name}.lock").unlink()
    (upstream.cache / f"{upstream.tree.name}.lock").mkdir()  # for root too, nothing can be opened for writing there
    assert upstream.fetch() == f"{upstream.tree}\n"


def test_a_folder_that_is_no_tree_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    line = one_line(upstream.fetch(fails=True, LLAMACPPSHIM_LLAMA_CPP=str(tmp_path)))
    assert line.endswith(f"the given tree {tmp_path} is not a llama.cpp source tree: it has no include/llama.h")


def test_a_given_tree_goes_before_the_cache(upstream: Upstream, tmp_path: Path) -> None:
    upstream.fetch()
    given = tmp_path / "given"
    shutil.copytree(upstream.tree, given)
    assert upstream.fetch(LLAMACPPSHIM_LLAMA_CPP=str(given)) == f"{given}\n"
