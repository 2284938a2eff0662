"""Owns what a model's name means: a path, an entry of an Ollama store or of a Hugging Face cache, the default. Pure."""

from __future__ import annotations

import os

from llamacppshim import hub, ollama
from llamacppshim.errors import ModelLoadError
from llamacppshim.gguf_files import FoundModel, ModelSource, Refused, checked_path, one_line, reason_of
from llamacppshim.models import DEFAULT_MODEL, Progress, default_model

FORMS = "a model is a path, ollama:[HOST/][NAMESPACE/]MODEL[:TAG], hf:ORG/REPO[:FILE] or default"


def resolve_model(
    spec: str | os.PathLike[str],
    *,
    verify: bool = False,
    download: bool = False,
    progress: Progress | None = None,
) -> ModelSource:
    """The file that a model's name means.

    Parameters
    ----------
    spec
        ``ollama:[HOST/][NAMESPACE/]MODEL[:TAG]``, ``hf:ORG/REPO[:FILE]``, ``default``, or else a path: of a GGUF file
        with any suffix, or of the first part of a split one. A path object is always a path; so is ``./default``.
    verify
        Read the whole file, and compare it with the digest that its origin tells.
    download
        Obtain what ``hf:`` names where the cache lacks it. Without it ``hf:`` never uses the network; ``default`` is
        downloaded once in any case.
    progress
        Told (bytes done, bytes in total) of each file that is downloaded.

    Raises
    ------
    ModelLoadError            there is no such model, or its file or entry is damaged; nothing outside of a store that
                              the entry leads to was opened
    UnsupportedFeatureError   ``hf:`` without the package huggingface_hub
    """
    given = os.fsdecode(spec)
    try:
        if isinstance(spec, str):
            if spec == "default":
                return ModelSource(default_model(progress), DEFAULT_MODEL.sha256, "default")
            kind, colon, name = spec.partition(":")
            if kind == "ollama" and colon:
                return ollama.resolve(ollama.OllamaName.parse(name), verify)
            if kind == "hf" and colon:
                return hub.resolve(name, verify, download, progress)
            if not os.path.lexists(given) and os.path.basename(given) == given:
                raise Refused(f"no such file; {FORMS}")
        return ModelSource(checked_path(given), None, "path")
    except ModelLoadError:
        raise
    except (Refused, OSError) as error:
        raise _error(given, reason_of(error)) from error


def list_models() -> list[FoundModel]:
    """Every model of the Ollama stores, and of the Hugging Face cache if huggingface_hub is there.

    Damaged entries are among them, with the reason. Nothing is downloaded, and no digest is verified.
    """
    return [*ollama.found_models(), *hub.found_models()]


def _error(subject: str, reason: str) -> ModelLoadError:
    """One line, whatever a name or a store holds."""
    reason = one_line(reason)
    return ModelLoadError(f"{one_line(subject, 200) or repr(subject)}: {reason}", path=subject, reason=reason)
