"""`llamacppshim snapshot` as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sessions import open_runtime, some_tokens
from test_snapshots import a_snapshot

from llamacppshim import Model, Runtime, Snapshot, SnapshotStore

MAIN = [sys.executable, "-c", "from llamacppshim.cli import main; main()", "snapshot"]


def start(folder: Path, *arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [*MAIN, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, input=text, check=False)


@pytest.mark.parametrize("source", ["file", "input"])
def test_a_text_is_saved_and_goes_on(tiny_models: dict[str, Path], tmp_path: Path, source: str) -> None:
    text = "The quick brown fox.\n" * 20
    (tmp_path / "text").write_text(text)
    given = ("text", None) if source == "file" else ("-", text)
    model = tiny_models["tiny-llama"]
    done = start(tmp_path, "save", given[0], "out.lcs", "--model", model, "--n-ctx", "1024", text=given[1])
    assert (done.returncode, done.stderr) == (0, "")
    saved = Snapshot.load(tmp_path / "out.lcs")
    assert f"{saved.n_tokens:,} tokens read" in done.stdout and f"{saved.nbytes:,} bytes" in done.stdout
    with Runtime.open(model, n_ctx=1024) as runtime:
        session = runtime.restore(saved)
        assert session.ensure_prefix(text).reused_tokens == saved.n_tokens
        session.close()
    shown = start(tmp_path, "show", "out.lcs")
    assert shown.returncode == 0
    for part in (saved.manifest.model_digest, f"prefix {saved.n_tokens:,}", "1,024 cells", "bitwise"):
        assert part in shown.stdout


def test_damage_is_found_and_told_in_a_line(tmp_path: Path) -> None:
    a_snapshot().save(tmp_path / "good.lcs")
    data = bytearray((tmp_path / "good.lcs").read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad.lcs").write_bytes(data)
    done = start(tmp_path, "verify", "good.lcs", "bad.lcs", "missing.lcs")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "good.lcs: whole, 10 tokens, 959 bytes",
        "bad.lcs: the checksum of part draws is wrong",
        "missing.lcs: No such file or directory",
    ]
    assert start(tmp_path, "verify", "good.lcs").returncode == 0
    done = start(tmp_path, "show", "missing.lcs")
    assert (done.returncode, done.stderr) == (1, "llamacppshim: missing.lcs: No such file or directory\n")


def test_a_folder_is_listed_and_kept_in_its_budget(loaded: dict[str, Model], tmp_path: Path) -> None:
    with open_runtime(loaded, "attention", store=tmp_path / "store") as runtime:
        for i in range(3):
            session = runtime.session()
            session.ensure_prefix(some_tokens(100 + i, seed=i))
            session.close(park=True)
    (tmp_path / "store" / "notes").write_text("x")
    done = start(tmp_path, "list", "store")
    assert done.returncode == 0
    assert "3 entries" in done.stdout and "1 other files" in done.stdout and "102" in done.stdout
    assert start(tmp_path, "gc", "store").stdout == "0 files removed\n"
    n_bytes = SnapshotStore(tmp_path / "store").n_bytes
    assert start(tmp_path, "gc", "store", "--max-bytes", str(n_bytes - 1)).stdout == "1 files removed\n"
    assert start(tmp_path, "gc", "store", "--ttl", "0").stdout == "2 files removed\n"
    for command in (("list", "nowhere"), ("gc", "nowhere")):
        done = start(tmp_path, *command)
        assert (done.returncode, done.stderr) == (1, "llamacppshim: nowhere is not a folder\n")
        assert not (tmp_path / "nowhere").exists()


def test_what_is_no_text_or_no_model_is_one_line(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    done = start(tmp_path, "save", "binary", "out.lcs", "--model", tiny_models["tiny-llama"])
    assert (done.returncode, done.stderr) == (1, "llamacppshim: the text is not UTF-8: invalid start byte at byte 0\n")
    done = start(tmp_path, "save", "missing", "out.lcs", "--model", tiny_models["tiny-llama"])
    assert done.returncode == 1 and done.stderr == "llamacppshim: missing: No such file or directory\n"
    (tmp_path / "text").write_text("x " * 3000)
    done = start(tmp_path, "save", "text", "out.lcs", "--model", tiny_models["tiny-llama"], "--n-ctx", "512")
    assert done.returncode == 1 and "exceed num_ctx 512" in done.stderr
    assert not (tmp_path / "out.lcs").exists()
