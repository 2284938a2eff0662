"""What the tests of the build share: the tools, where things lie, and running a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "build" / "fixtures"

# The tools of this environment first, whether it is activated or not.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    assert found, f"the test environment has no {name}"
    return found


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fails: bool = False,
) -> str:
    """Both outputs of a command that succeeds (or `fails`)."""
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": PATH, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, f"exit code {done.returncode} of {command}\n{done.stdout[-8000:]}"
    return done.stdout


def build_folder() -> Path:
    """The folder in which this package was built, or else one like it."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    for library in sorted(ROOT.glob(f"build/{tag}*/csrc/liblcs.a")):
        return library.parents[1]
    folder = ROOT / "build" / "downstream"
    run([tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja"])
    run([tool("cmake"), "--build", folder, "--target", "lcs"])
    return folder
