"""The linters, as part of the tests: ruff, mypy --strict, and the stubs held to the extension."""

from __future__ import annotations

import sys
from pathlib import Path

from building import ROOT, run


def test_ruff_finds_nothing() -> None:
    run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT)


def test_the_types_are_strict() -> None:
    run([sys.executable, "-m", "mypy"], cwd=ROOT)


def test_the_stubs_say_what_the_extension_has(tmp_path: Path) -> None:
    # Away from the sources, so that the installed package is looked at.
    run([sys.executable, "-m", "mypy.stubtest", "llamacppshim._native"], cwd=tmp_path)
