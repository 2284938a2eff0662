"""Other projects on top: C against the installed library, Cython against the capsule that needs no library."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import tiny
from building import FIXTURES, ROOT, build_folder, run, tool

import llamacppshim

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="calls the compiler as cc")

CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(downstream LANGUAGES {language})
find_package(llamacppshim {version} EXACT REQUIRED)
add_executable(downstream {source})
target_link_libraries(downstream PRIVATE llamacppshim::lcs)
"""

C_PROGRAM = """
#include <lcs.h>
#include <stdio.h>

int main(int argc, char ** argv) {
    lcs_build build;
    lcs_model_params model_params;
    lcs_context_params context_params;
    lcs_model * model = NULL;
    lcs_context * context = NULL;
    const int32_t token = 1;
    const float * logits;
    if (argc != 2 || lcs_build_info(&build) != LCS_STATUS_OK) {
        return 1;
    }
    lcs_model_params_init(&model_params);
    lcs_context_params_init(&context_params);
    context_params.n_ctx = 256;
    if (lcs_model_load(argv[1], &model_params, &model) != LCS_STATUS_OK ||
        lcs_context_init(model, &context_params, &context) != LCS_STATUS_OK ||
        lcs_context_decode(context, &token, 1, 0, -1, LCS_LOGITS_LAST, NULL, NULL) != LCS_STATUS_OK ||
        lcs_context_logits(context, -1, &logits) != LCS_STATUS_OK) {
        lcs_error_info error;
        lcs_last_error(&error);
        fprintf(stderr, "%s\\n", error.message);
        return 1;
    }
    printf("%s %d\\n", build.pin, (int) (logits[0] == logits[0]));
    lcs_context_free(context);
    lcs_model_free(model);
    return 0;
}
"""

CYTHON_MODULE = """
# cython: language_level=3
from llamacppshim.lcs cimport *
from llamacppshim.lcs_capi cimport import_llamacppshim

cdef extern from "lcs_capi.h":
    ctypedef struct lcs_capi:
        size_t n_functions
    const lcs_capi* lcs_capi_table

import_llamacppshim()


def pin():
    cdef lcs_build build
    lcs_build_info(&build)
    return build.pin.decode()


def n_functions():
    return lcs_capi_table.n_functions


def n_vocab(bytes path):
    cdef lcs_model_params params
    cdef lcs_model* model = NULL
    cdef lcs_model_info info
    lcs_model_params_init(&params)
    if lcs_model_load(path, &params, &model) != LCS_STATUS_OK:
        raise OSError(path)
    lcs_model_get_info(model, &info)
    lcs_model_free(model)
    return info.n_vocab
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the development component is installed."""
    folder = tmp_path_factory.mktemp("prefix")
    run([tool("cmake"), "--install", build_folder(), "--component", "development", "--prefix", folder])
    return folder


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny.build(FIXTURES)["tiny-llama"]


@pytest.mark.parametrize(("language", "source"), [("C", "main.c"), ("CXX", "main.cpp")])
def test_a_program_finds_links_and_runs_the_installed_library(
    tmp_path: Path, prefix: Path, model: Path, language: str, source: str
) -> None:
    version = llamacppshim.build_info()["version"]
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_PROJECT.format(language=language, source=source, version=version))
    (tmp_path / source).write_text(C_PROGRAM)
    build = tmp_path / "build"
    run([tool("cmake"), "-S", tmp_path, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"])
    run([tool("cmake"), "--build", build])
    assert run([build / "downstream", model]) == f"{llamacppshim.build_info()['pin']} 1\n"


def test_the_installed_library_carries_its_licences_and_one_header(prefix: Path) -> None:
    assert [path.name for path in (prefix / "include").iterdir()] == ["lcs.h"]
    licences = {path.name for path in (prefix / "share" / "licenses" / "llamacppshim").iterdir()}
    assert {"LICENSE", "LICENSE-llama.cpp"} <= licences


def compile_module(folder: Path, *, include: Path) -> Path:
    """A Cython module that links nothing."""
    source = folder / "downstream.pyx"
    source.write_text(CYTHON_MODULE)
    run([sys.executable, "-m", "cython", source], cwd=folder)
    module = folder / f"downstream{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [f"-I{include}", f"-I{sysconfig.get_path('include')}"]
    link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    compiler = os.environ.get("CC", "cc")
    run([compiler, "-shared", "-fPIC", "-O1", *headers, folder / "downstream.c", *link, "-o", module])
    return module


def test_a_cython_module_calls_the_shim_through_the_capsule(tmp_path: Path, model: Path) -> None:
    module = compile_module(tmp_path, include=Path(llamacppshim.get_include()))
    assert " lcs_" not in run([tool("nm"), "--undefined-only", module])
    program = "import downstream, sys; print(downstream.pin(), downstream.n_vocab(sys.argv[1].encode()))"
    n_vocab = llamacppshim.Model(model).n_vocab
    output = run([sys.executable, "-c", program, model], cwd=tmp_path)
    assert output == f"{llamacppshim.build_info()['pin']} {n_vocab}\n"


def test_the_table_has_every_function_of_the_header(tmp_path: Path) -> None:
    """Oracle: what lcs.h declares, counted in its text."""
    declared = re.findall(r"^LCS_API [\w ]+\W+(lcs_\w+)\(", (ROOT / "csrc" / "lcs.h").read_text("utf-8"), re.MULTILINE)
    header = (Path(llamacppshim.get_include()) / "lcs_capi.h").read_text("utf-8")
    assert len(declared) == len(set(declared)) > 70
    assert re.findall(r"^#define (lcs_\w+) \(lcs_capi_table->\1\)$", header, re.MULTILINE) == declared
    compile_module(tmp_path, include=Path(llamacppshim.get_include()))
    program = "import downstream; print(downstream.n_functions())"
    assert run([sys.executable, "-c", program], cwd=tmp_path) == f"{len(declared)}\n"


def test_a_module_of_another_header_is_refused_at_import(tmp_path: Path) -> None:
    include = tmp_path / "include"
    include.mkdir()
    for name in ("lcs.h", "lcs_capi.h"):
        text = (Path(llamacppshim.get_include()) / name).read_text("utf-8")
        (include / name).write_text(re.sub(r"(LCS_CAPI_SIGNATURE UINT64_C)\(\w+\)", r"\1(0x1)", text))
    compile_module(tmp_path, include=include)
    output = run([sys.executable, "-c", "import downstream"], cwd=tmp_path, fails=True)
    assert output.splitlines()[-1] == (
        "ImportError: compiled against another lcs.h than the installed llamacppshim's: rebuild"
    )
