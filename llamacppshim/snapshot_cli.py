"""Owns `llamacppshim snapshot`: save what a text has cost to read, look at it, check it, keep a folder in budget."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import typer

from llamacppshim.demo import model_file
from llamacppshim.errors import InvalidArgumentError, SnapshotError
from llamacppshim.snapshot import Snapshot
from llamacppshim.sources import FORMS
from llamacppshim.store import SnapshotStore
from llamacppshim.terminal import bar, say

app = typer.Typer(no_args_is_help=True, help="Snapshots: what was read, kept in files.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a store.")]
Model = Annotated[str, typer.Option(metavar="SPEC", help=FORMS)]


@app.command()
def save(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file; - for standard input.")],
    file: File,
    model: Model = "default",
    n_ctx: Annotated[int | None, typer.Option(metavar="N", help="Cells of the context, in tokens.")] = None,
) -> None:
    """Read a text as a prefix, and save the session."""
    from llamacppshim.runtime import Runtime

    console = rich.console.Console()
    prompt = (sys.stdin.buffer.read() if str(text) == "-" else text.read_bytes()).decode("utf-8", "strict")
    with Runtime.open(model_file(console, model), n_ctx=n_ctx) as runtime, runtime.session() as session:
        with bar(console, "reading", rich.progress.MofNCompleteColumn()) as update:
            status = session.ensure_prefix(prompt, progress=update)
        saved = session.snapshot()
        with bar(console, "saving", rich.progress.DownloadColumn()) as update:
            saved.save(file, progress=update)
        seconds = session.explain().work.prefill_s
    say(console, f"{file}: {status.prefix_tokens:,} tokens read in {seconds:.1f} s, {saved.nbytes:,} bytes")


@app.command()
def show(file: File) -> None:
    """What a snapshot says of itself. Its parts are not looked at: `verify` does."""
    contents = Snapshot.read_contents(file)
    manifest = contents.manifest
    table = rich.table.Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "tokens": f"{contents.n_tokens:,}: prefix {contents.n_prefix:,}, "
        f"suffix {contents.n_prompt - contents.n_prefix:,}, generated {contents.n_tokens - contents.n_prompt:,}",
        "resident": f"{contents.n_resident:,}, {contents.exact}",
        "checkpoints": ", ".join(f"{position:,}" for position, _, _ in contents.checkpoints) or "none",
        "answer": "in hand" if contents.answer is not None else "none",
        "text": f"{manifest.stable_bytes:,} bytes, {len(manifest.segments)} segments" if contents.has_text else "none",
        "model": manifest.model_digest,
        "adapters": ", ".join(f"{digest[:16]} scaled by {scale:g}" for digest, scale in manifest.adapters) or "none",
        "built by": manifest.backend_version,
        "context": f"{manifest.n_ctx:,} cells, {manifest.kv_layout}, K {manifest.type_k}, V {manifest.type_v}, "
        f"flash attention {'on' if manifest.flash_attn else 'off'}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    rich.console.Console(highlight=False).print(table, soft_wrap=True)


@app.command()
def verify(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Snapshots.")]) -> None:
    """Check every byte. Exit code 1 if one is damaged."""
    console = rich.console.Console()
    n_damaged = 0
    for file in files:
        try:
            snapshot = Snapshot.load(file)
        except SnapshotError as error:
            n_damaged += 1
            say(console, str(error), style="red")
        else:
            say(console, f"{file}: whole, {snapshot.n_tokens:,} tokens, {snapshot.nbytes:,} bytes")
    if n_damaged:
        raise typer.Exit(1)


@app.command("list")
def list_(folder: Folder) -> None:
    """The entries of a store, the most recently used first."""
    store = _store(folder)
    table = rich.table.Table("tokens", "bytes", "used", "file", box=None, pad_edge=False)
    entries = store.entries()
    for entry in entries:
        table.add_row(f"{entry.n_tokens:,}", f"{entry.n_bytes:,}", _ago(time.time() - entry.used), entry.name)
    console = rich.console.Console(highlight=False)
    console.print(table, soft_wrap=True)
    total = sum(entry.n_bytes for entry in entries)
    noun = "entry" if len(entries) == 1 else "entries"
    say(console, f"{len(entries)} {noun}, {total:,} bytes; {store.ignored} other files", style="dim")


@app.command()
def gc(
    folder: Folder,
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="Of all entries.")] = None,
    ttl: Annotated[float | None, typer.Option(metavar="S", help="Seconds since its last use.")] = None,
) -> None:
    """Remove what is over a budget or a time, and what killed processes left."""
    n = _store(folder, max_bytes, ttl).collect()
    say(rich.console.Console(), f"{n} files removed")


def _store(folder: Path, max_bytes: int | None = None, ttl_s: float | None = None) -> SnapshotStore:
    """Of a folder that is there; without limits, nothing goes."""
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is not a folder")
    return SnapshotStore(folder, max_bytes=1 << 62 if max_bytes is None else max_bytes, ttl_s=ttl_s, collect=False)


def _ago(seconds: float) -> str:
    for unit, n in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= n:
            return f"{seconds / n:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
