"""Owns the command line: arguments in, one line and an exit code out. The work is done elsewhere."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import rich.console
    import typer
except ImportError:
    sys.exit("llamacppshim: the command line needs its extra: pip install 'llamacppshim[cli]'")

from llamacppshim import profile_cli, snapshot_cli
from llamacppshim.errors import LlamaCppShimError
from llamacppshim.sources import FORMS, list_models
from llamacppshim.terminal import printable, say

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(profile_cli.app, name="profile")
app.add_typer(snapshot_cli.app, name="snapshot")


@app.callback()
def commands() -> None:
    """In-process llama.cpp whose context is kept."""


@app.command()
def demo(
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder of source files to ask about. [default: this package's own]"),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="SPEC", help=f"{FORMS}: SmolLM2-135M-Instruct, 93 MB, downloaded once")
    ] = "default",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the figures there too."),
    ] = None,
) -> None:
    """Ask three questions about a folder of source files, reading it once.

    Each turn prefills only what the context does not hold yet. The last one is then run again in a fresh context, to
    compare. About two minutes on two cores; about 4,000 tokens of the files are read.
    """
    from llamacppshim.demo import run

    run(rich.console.Console(), repo, model, json)


@app.command()
def chat(
    model: Annotated[str, typer.Option(metavar="SPEC", help=FORMS)] = "default",
    repo: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of text files to talk about.")] = None,
    ctx: Annotated[int | None, typer.Option(metavar="N", help="Cells of the context, in tokens.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of one answer. [default: an eighth of the context]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="0: always the same answer. [default: the profile's, else 0.7]")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start afresh instead of going on.")] = False,
) -> None:
    """Talk with a model, over a folder if one is given. It is read once; the same command again goes on, warm."""
    from llamacppshim.chat_cli import Options, run

    raise typer.Exit(run(Options(model, repo, ctx, max_tokens, temperature, new)))


@app.command()
def models() -> None:
    """List the models of this machine's Ollama stores and Hugging Face cache, as --model takes them, and which fit."""
    from llamacppshim.fit_cli import verdicts
    from llamacppshim.hub import cache_place
    from llamacppshim.ollama import ollama_stores

    console = rich.console.Console()
    found, cache = list_models(), cache_place()
    if not found:
        places = [*map(str, ollama_stores()), *([] if cache is None else [cache])]
        say(console, "none; looked in " + " and ".join(places))
    if cache is None:
        needs = "the Hugging Face cache was not looked in: that needs pip install 'llamacppshim[hf]'"
        say(rich.console.Console(stderr=True), needs)
    width = max((len(model.spec) for model in found), default=0)
    for model, verdict in verdicts(found):
        size = "-" if model.source is None else f"{model.n_bytes / 1e6:,.0f} MB"
        notes = () if model.source is None else model.source.notes
        say(console, f"{model.spec:<{width}}  {size:>10}  {'; '.join([verdict, *notes])}")


@app.command()
def fit(
    model: Annotated[str, typer.Argument(metavar="SPEC", help=FORMS)],
    ctx: Annotated[
        int | None, typer.Option(metavar="N", help="Cells of the context, in tokens. [default: trained, at most 8192]")
    ] = None,
) -> None:
    """Say what a model needs, and which contexts of it this machine has room for now. Reads its header only."""
    from llamacppshim.config import RuntimeConfig
    from llamacppshim.demo import model_file
    from llamacppshim.fit_cli import show
    from llamacppshim.header import read_gguf_header
    from llamacppshim.machine import machine_budget

    console = rich.console.Console()
    header = read_gguf_header(model_file(console, model))
    show(console, header, machine_budget(), RuntimeConfig(n_ctx=ctx))


def main() -> None:
    """The console script. An error is one line and exit code 1, Ctrl-C is 130."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # whoever has closed it wants to hear nothing
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows what it can
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except LlamaCppShimError as error:
        message = str(error)
    except UnicodeDecodeError as error:
        message = f"the text is not UTF-8: {error.reason} at byte {error.start}"
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print("llamacppshim: " + printable(message).replace("\n", " "), file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
