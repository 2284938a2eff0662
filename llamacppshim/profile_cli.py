"""Owns `llamacppshim profile`: write one with settings measured on this machine, and check one against its model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import typer

from llamacppshim.config import RuntimeConfig
from llamacppshim.errors import InvalidArgumentError, UnsupportedFeatureError
from llamacppshim.manifest import hash_bytes
from llamacppshim.profile import PROFILE_NAME, Profile, PromptConfig
from llamacppshim.terminal import bar, say

app = typer.Typer(no_args_is_help=True, help="Profiles: how one model is run, in a file beside it.")


@app.command()
def init(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.")],
    n_ctx: Annotated[int | None, typer.Option(metavar="N", help="Cells of the context, in tokens.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is there.")] = False,
) -> None:
    """Measure threads, flash attention and ubatch on this machine, and write llamacppshim.json beside the model."""
    from llamacppshim._native import Model
    from llamacppshim.tuning import tune

    console = rich.console.Console(highlight=False)
    file = model.parent / PROFILE_NAME
    if file.exists() and not force:
        raise InvalidArgumentError(f"{file} is there already; --force replaces it")
    with Model(model) as loaded:
        if loaded.memory_kind == "none":
            raise UnsupportedFeatureError(f"{loaded.name} makes embeddings, not text")
        with bar(console, "measuring", rich.progress.MofNCompleteColumn()) as update:
            tuned = tune(loaded, progress=update)
        profile = Profile(
            profile_id=loaded.name,
            model=model.name,
            model_digest=loaded.digest,
            prompt=PromptConfig(template_digest=hash_bytes((loaded.chat_template or "").encode())),
            runtime=RuntimeConfig(
                n_ctx=n_ctx,
                n_threads=tuned.n_threads,
                n_threads_batch=tuned.n_threads_batch,
                flash_attn=tuned.flash_attn,
                n_ubatch=tuned.n_ubatch,
            ),
        )
    table = rich.table.Table("threads", "flash attention", "ubatch", "prefill tokens/s", "decode tokens/s", box=None)
    for trial in tuned.trials:
        numbers = f"{trial.prefill_tokens_per_s:,.0f}", f"{trial.decode_tokens_per_s:,.1f}"
        table.add_row(str(trial.n_threads), trial.flash_attn, str(trial.n_ubatch), *numbers)
    console.print(table, soft_wrap=True)
    profile.save(file)
    say(
        console,
        f"{file}: {tuned.n_threads} threads ({tuned.n_threads_batch} for batches), flash attention {tuned.flash_attn}, "
        f"ubatch {tuned.n_ubatch}",
    )


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A profile, its folder, or the model beside it.")],
) -> None:
    """Read a profile strictly, compare its digests with the model, and open a runtime with it."""
    from llamacppshim.runtime import Runtime

    file = path / PROFILE_NAME if path.is_dir() else path
    if file.suffix != ".json":
        file = file.parent / PROFILE_NAME
    if not path.exists():
        raise InvalidArgumentError(f"{path}: no such file or folder")
    if not file.exists():
        raise InvalidArgumentError(f"{path} has no profile: there is no {file}")
    console = rich.console.Console(highlight=False)
    with Runtime.from_profile(file) as runtime:
        config = runtime.config
        say(
            console,
            f"{os.fspath(file)}: fits {runtime.model_name}; {config.n_ctx:,} cells, {config.n_threads} threads, "
            f"flash attention {config.flash_attn}, K {config.type_k}, V {config.type_v}",
        )
