"""Owns the Hugging Face cache: which file a repository's name means, what the cache has, and downloads into it.

The package huggingface_hub knows the cache's layout and the network; it is an extra, and imported when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from llamacppshim.errors import UnsupportedFeatureError
from llamacppshim.gguf_files import (
    SPLIT,
    FoundModel,
    ModelSource,
    Refused,
    check_digest,
    checked_path,
    found_model,
    one_line,
    opened,
    part_names,
    reason_of,
    some_of,
)
from llamacppshim.models import Progress

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HF_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")


def resolve(name: str, verify: bool, download: bool, progress: Progress | None) -> ModelSource:
    """The file that ORG/REPO[:FILE] means. Raises Refused, OSError, or UnsupportedFeatureError without the package."""
    repo, file = _parse(name)
    hub = _hub()
    try:
        source = _cached(hub, repo, file)
    except Refused:
        if not (download and file):  # a file can be obtained though others of its repository are damaged
            raise
        source = None
    if source is None:
        if not download:
            raise Refused(f"not in the cache {_cache_dir()}; download=True obtains it")
        source = _downloaded(hub, repo, file, progress)
    path = checked_path(str(source.path))
    if verify and source.digest is not None:
        with opened(path) as content:
            check_digest(content, source.digest)
    return source


def cache_place() -> str | None:
    """The cache's folder; None without the package, which alone knows where that is."""
    try:
        return _cache_dir()
    except ImportError:
        return None


def found_models() -> list[FoundModel]:
    """Every GGUF file in the cache; none without the package."""
    place = cache_place()
    if place is None or not os.path.isdir(place):
        return []
    try:
        hub = _hub()
    except UnsupportedFeatureError:
        return []
    repos, warnings = _scan(hub)
    found = [damaged for warning in warnings for damaged in _damaged_repo(str(warning))]
    for repo in repos:
        files = _files_in(repo)
        found += [_found(f"hf:{repo.repo_id}:{name}", files[name]) for name in _models_among(files)[0]]
    return sorted(found, key=lambda model: model.spec)


def _hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UnsupportedFeatureError(
            "hf: needs the package huggingface_hub: pip install 'llamacppshim[hf]'", feature="hf"
        ) from error


def _parse(name: str) -> tuple[str, str]:
    """The repository and the file in it, empty where none is named."""
    repo, colon, file = name.partition(":")
    org, _, model = repo.partition("/")
    for part in (org, model):
        # These two the hub forbids; the first would also be a separator in the cache's folder names.
        if not _HF_NAME.fullmatch(part) or "--" in part or ".." in part:
            raise Refused(f"{repo!r} is not ORG/REPO of Hugging Face")
    if colon and (not file.isprintable() or "\\" in file or {"", ".", ".."} & set(file.split("/"))):
        raise Refused(f"{file!r} is not a file in a repository")
    return repo, file


def _cache_dir() -> str:
    # Of the package's own rules, and without the half second that importing the rest of it takes.
    return str(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)


def _cached(hub: ModuleType, repo: str, file: str) -> ModelSource | None:
    """What the cache has, without the network."""
    # Asked first: it answers for a file that is whole, also in a repository whose other files are damaged.
    found = hub.try_to_load_from_cache(repo, file, cache_dir=_cache_dir()) if file else None
    if isinstance(found, str):
        return _source(Path(found))
    files = _cached_files(hub, repo)
    if file:
        return _source(files[file]) if file in files else None
    if not any(name.lower().endswith(".gguf") for name in files):
        return None
    chosen, notes = _choose(files)
    return _source(files[chosen], notes)


def _cached_files(hub: ModuleType, repo: str) -> dict[str, Path]:
    repos, warnings = _scan(hub)
    folder = "models--" + repo.replace("/", "--")
    for warning in warnings:
        if re.search(rf"{re.escape(folder)}(?![\w.-])", str(warning)):
            raise Refused(f"its cache is damaged: {warning}")
    return next((_files_in(found) for found in repos if found.repo_id == repo), {})


def _scan(hub: ModuleType) -> tuple[list[Any], list[Exception]]:
    """The models in the cache, and what is wrong with others."""
    if not os.path.isdir(_cache_dir()):
        return [], []
    found = hub.scan_cache_dir(cache_dir=_cache_dir())
    return [repo for repo in found.repos if repo.repo_type == "model"], found.warnings


def _files_in(repo: Any) -> dict[str, Path]:
    """The files of a cached repository by their names in it: of its main revision, else of the newest that has one."""
    files: dict[str, Path] = {}
    order = sorted(repo.revisions, key=lambda found: ("main" in found.refs, found.last_modified), reverse=True)
    for revision in order:
        for file in revision.files:
            files.setdefault(file.file_path.relative_to(revision.snapshot_path).as_posix(), file.file_path)
    return files


def _choose(names: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The one model among the files of a repository, and what is not used of the others."""
    models, projectors = _models_among(names)
    if len(models) != 1:
        has = f"{len(models)} GGUF files, name one of them: {some_of(models)}" if models else "no GGUF model"
        raise Refused(f"has {has}")
    return models[0], tuple(f"projector {name} not used" for name in projectors)


def _models_among(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The GGUF files, split ones by their first part; and the projectors, which llama.cpp's tools name mmproj."""
    models: list[str] = []
    projectors: list[str] = []
    for name in sorted(names):
        split = SPLIT.fullmatch(name)
        if not name.lower().endswith(".gguf") or (split is not None and int(split[2]) != 1):
            continue
        (projectors if "mmproj" in PurePosixPath(name).name.lower() else models).append(name)
    return models, projectors


def _source(path: Path, notes: tuple[str, ...] = ()) -> ModelSource:
    """With the digest from the blob's name: for a large file that is its SHA-256. A split model has one for each."""
    digest = None
    if SPLIT.fullmatch(path.name) is None:
        with contextlib.suppress(OSError):
            digest = os.path.basename(os.readlink(path))
    return ModelSource(path, digest if digest and _SHA256.fullmatch(digest) else None, "hf", notes)


def _found(spec: str, path: Path) -> FoundModel:
    try:
        return found_model(spec, _source(checked_path(str(path))))
    except (Refused, OSError) as error:
        return FoundModel(spec, None, reason=one_line(reason_of(error)))


def _damaged_repo(warning: str) -> Iterator[FoundModel]:
    """A repository that could not be scanned, if there are GGUF files in it."""
    folder = re.search(r"models--([\w.-]+)", warning)
    if folder is None:
        return
    if any(Path(_cache_dir(), folder[0], "snapshots").rglob("*.gguf")):
        yield FoundModel(f"hf:{folder[1].replace('--', '/', 1)}", None, reason=one_line(warning))


def _downloaded(hub: ModuleType, repo: str, file: str, progress: Progress | None) -> ModelSource:
    notes: tuple[str, ...] = ()
    told: list[BaseException] = []
    try:
        if not file:
            file, notes = _choose(hub.list_repo_files(repo))
        folder, name = os.path.split(file)
        paths = [
            hub.hf_hub_download(repo, os.path.join(folder, part), tqdm_class=_bar(progress, told))
            for part in part_names(name)
        ]
    except Refused:
        raise
    except Exception as error:  # the package's own, its HTTP library's, the system's
        if error in told:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refused(f"cannot be downloaded: {reason}") from error
    return _source(Path(paths[0]), notes)


def _bar(progress: Progress | None, told: list[BaseException]) -> type:
    """A class of progress bars that show nothing, but tell `progress`; what that raises is kept in `told`."""
    furthest = -1

    class Bar(importlib.import_module("tqdm").tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **{**options, "disable": False, "file": io.StringIO()})

        def display(self, *_arguments: object, **_options: object) -> None:
            """Nothing."""

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            super().update(n)
            # The package may count one file with two bars, of what was received and what was written.
            if progress is not None and self.total and self.n > furthest:
                furthest = int(self.n)
                try:
                    progress(furthest, int(self.total))
                except BaseException as error:
                    told.append(error)
                    raise

    return Bar
