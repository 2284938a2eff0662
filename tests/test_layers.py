"""The directions of architecture.md, read from the sources: who may import, cimport or include whom."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import ROOT

PACKAGE = ROOT / "llamacppshim"

# Each module with those of this package that it may import. Names of later modules stand here already, so that the
# first line of such a module is held to them. `_native` is the extension.
PURE = {
    "errors": set[str](),
    "config": {"errors"},
    "closing": set(),
    "turns": set(),
    "answer": set(),
    "checkpoints": set(),
    "ledger": {"errors"},
    "reuse": {"errors", "ledger"},
    "files": set(),
    "models": {"errors", "files"},
    "facts": {"files", "models"},
    "digests": {"facts", "files", "manifest"},
    "gguf_files": {"files"},
    "ollama": {"gguf_files"},
    "hub": {"errors", "gguf_files", "models"},
    "sources": {"errors", "gguf_files", "hub", "models", "ollama"},
    "manifest": {"errors", "config", "reuse"},
    "replies": {"ledger"},
    "report": {"manifest", "reuse"},
    "text": {"errors", "ledger", "reuse"},
    "memory": {"errors", "config"},
    "assemble": {"errors", "ledger", "manifest"},
    "folders": {"errors", "assemble"},
    "workspace": {"errors", "assemble", "folders"},
    "history": {"errors", "files", "manifest", "models", "snapshot", "store", "workspace"},
    "profile": {"errors", "config", "files", "formats", "manifest"},
    "formats": {"errors"},
    "prompt": {"errors", "assemble", "ledger", "manifest"},
    "snapshot": {"errors", "config", "files", "answer", "manifest", "checkpoints", "ledger"},
    "store": {"errors", "files", "manifest", "ledger", "reuse", "snapshot"},
}
BELOW_RUNTIME = {*PURE, "_native", "header", "machine", "terminal"}
LIVE = {
    "terminal": set(),
    "header": {"errors", "config", "files", "gguf_files", "memory", "reuse", "_native"},
    "machine": {"errors", "config", "memory", "header", "_native"},
    "sequence": BELOW_RUNTIME,
    "runtime": BELOW_RUNTIME | {"sequence", "session", "chat"},  # which it makes, and so imports then
    "holding": BELOW_RUNTIME | {"sequence"},
    "generate": BELOW_RUNTIME,
    "reading": BELOW_RUNTIME,
    "saving": BELOW_RUNTIME,
    # Its `chat` is the one call that comes from above, imported when it is used.
    "session": BELOW_RUNTIME | {"sequence", "runtime", "holding", "generate", "reading", "saving", "chat"},
    "branch": BELOW_RUNTIME | {"runtime", "session", "generate"},
    "chat": BELOW_RUNTIME | {"sequence", "runtime"},
    "demo": BELOW_RUNTIME | {"runtime", "session", "chat", "__init__"},
    "leases": BELOW_RUNTIME,
    "manager": BELOW_RUNTIME | {"runtime", "leases"},
    "conversation": BELOW_RUNTIME | {"sequence", "runtime", "session", "chat"},
    "chat_cli": BELOW_RUNTIME | {"runtime", "demo", "conversation", "fit_cli"},
    "tuning": BELOW_RUNTIME,
    "fit_cli": BELOW_RUNTIME | {"demo"},
    "profile_cli": BELOW_RUNTIME | {"runtime", "demo", "tuning"},
    "snapshot_cli": BELOW_RUNTIME | {"runtime", "demo"},
    "cli": BELOW_RUNTIME | {"demo", "chat_cli", "profile_cli", "snapshot_cli", "fit_cli"},
    "__main__": {"__init__", "cli"},
}
ALLOWED = {**PURE, **LIVE}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, but for those that only type checkers read: a name in an annotation is no dependency."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from statements(node)


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a source file imports; the package itself is ``__init__``."""
    found = set()
    for node in statements(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "llamacppshim" if node.level else (node.module or "")
            if node.level and node.module:
                base += "." + node.module
            modules = {name.stem for name in PACKAGE.glob("*.py*")} | set(ALLOWED)
            names = [
                f"{base}.{alias.name}" if base == "llamacppshim" and alias.name in modules else base
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "llamacppshim":
                found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    if path.stem == "__init__":
        return
    assert path.stem in ALLOWED, f"{path.name} has no place in the layers: give it one here"
    assert imports_of(path) <= ALLOWED[path.stem]


def test_the_check_sees_every_form_of_import(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "import llamacppshim.config\nfrom llamacppshim import reuse, Model\nfrom . import store\n"
        "from .session import a\nfrom llamacppshim.runtime import b\nimport os\n"
    )
    assert imports_of(source) == {"config", "reuse", "__init__", "store", "session", "runtime"}


def test_the_pure_modules_import_no_extension_even_in_their_packages() -> None:
    for path in PACKAGE.glob("*.py"):
        if path.stem in PURE:
            assert "_native" not in path.read_text("utf-8"), path.name


def test_the_errors_are_a_leaf() -> None:
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / "errors.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def cython_sources() -> list[Path]:
    return [path for suffix in ("pyx", "pxi", "pxd") for path in sorted((ROOT / "src").glob(f"*.{suffix}"))]


def test_the_extension_imports_only_the_errors_of_this_package() -> None:
    found = set()
    for path in cython_sources():
        for line in re.findall(r"^\s*(?:from|import)\s+llamacppshim.*$", path.read_text("utf-8"), re.MULTILINE):
            found.add(line.strip())
    assert found == {"from llamacppshim import errors", "from llamacppshim.errors import DecodeStatus"}


def test_cython_sees_llama_cpp_only_through_the_shim() -> None:
    for path in cython_sources():
        text = path.read_text("utf-8")
        assert not re.search(r'["<](llama|ggml|gguf|common)[a-z-]*\.(h|hpp)[">]', text), path.name
        headers = set(re.findall(r'cdef extern from "([^"]+)"', text))
        assert headers <= {"lcs.h", "lcs_capi.h", "Python.h"}, path.name


def test_the_pxd_only_declares() -> None:
    text = (ROOT / "src" / "lcs.pxd").read_text("utf-8")
    assert "cdef inline" not in text
    assert '"""' not in text


def declared_functions(text: str) -> set[str]:
    return set(re.findall(r"\b(lcs_[a-z0-9_]+)\s*\(", text))


def header() -> str:
    """lcs.h without its comments, which name functions too."""
    text = (ROOT / "csrc" / "lcs.h").read_text("utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def test_the_pxd_declares_every_function_of_the_header_and_no_other() -> None:
    pxd = re.sub(r"#.*", "", (ROOT / "src" / "lcs.pxd").read_text("utf-8"))
    assert len(declared_functions(header())) > 60
    assert declared_functions(pxd) == declared_functions(header())


def test_the_pxd_declares_every_field_and_enum_value_of_the_header() -> None:
    pxd = (ROOT / "src" / "lcs.pxd").read_text("utf-8")
    values = set(re.findall(r"\bLCS_[A-Z0-9_]+\b(?=\s*(?:=|,|\n|\}))", header())) - {"LCS_API", "LCS_H"}
    assert values <= set(re.findall(r"\bLCS_[A-Z0-9_]+\b", pxd))
    for name, body in re.findall(r"typedef struct (lcs_\w+) \{(.*?)\}", header(), re.DOTALL):
        block = re.search(rf"ctypedef struct {name}:\n((?:        .*\n)+)", pxd)
        assert block, name
        fields = set(re.findall(r"(\w+)(?:\[\d+\])?\s*(?=[;,])", body))
        assert fields == set(re.findall(r"(\w+)(?:\[\d+\])?$", block[1], re.MULTILINE)), name


def test_c_files_of_the_shim_know_nothing_of_python() -> None:
    for path in (ROOT / "csrc").glob("lcs*"):
        assert "Python.h" not in path.read_text("utf-8"), path.name


def test_the_c_header_includes_no_header_of_llama_cpp() -> None:
    assert set(re.findall(r"#include\s+[<\"]([^>\"]+)", header())) == {"stdbool.h", "stddef.h", "stdint.h"}
