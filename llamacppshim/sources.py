"""Owns which file a model's name means: a path, an entry of an Ollama store or a Hugging Face cache, the default. Pure.

Files are found and opened where they are, never copied. What a store says is foreign data: a name is checked before it
becomes a path, sizes are bounded before they are read, and no file outside the store is opened on its behalf.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, Annotated, Any, Literal, NamedTuple

import msgspec

from llamacppshim.errors import ModelLoadError, UnsupportedFeatureError
from llamacppshim.files import sha256_of
from llamacppshim.models import DEFAULT_MODEL, Progress, default_model

FORMS = "a model is a path, ollama:[HOST/][NAMESPACE/]MODEL[:TAG], hf:ORG/REPO[:FILE] or default"
MAGIC = b"GGUF"
#: Ollama's layouts of one file a tensor list thousands of layers in about a megabyte.
MAX_MANIFEST_BYTES = 4 << 20
MAX_LISTED = 10

#: Where Ollama's installer for Linux puts the store of its service.
SERVICE_STORE = "/usr/share/ollama/.ollama/models"
#: The newer tree first, as Ollama itself looks.
TREES = ("manifests-v2", "manifests")
#: Two names of one registry; which of them stands in a tree depends on Ollama's version.
PUBLIC_HOSTS = ("registry.ollama.ai", "ollama.com")

KIND_PREFIX = "application/vnd.ollama.image."
MANIFEST_LIST = "application/vnd.ollama.manifest.list.v2+json"
#: Of a manifest list, the runners whose files may be GGUF, the best first.
RUNNERS = ("llamacpp", "ollama")
#: Layers that would change the answers. A template, parameters and a licence are left out in silence: almost every
#: entry has them, the template is Go's and the GGUF has its own.
TOLD_KINDS = ("adapter", "projector", "draft", "system", "messages")

_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")
#: The grammar of Ollama's types/model/name.go. None of them matches a separator, or a name of dots alone.
_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}
_HF_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")

Origin = Literal["path", "ollama", "hf", "default"]


class ModelSource(msgspec.Struct, frozen=True):
    """Where a model's file is.

    ``digest`` is its SHA-256 as the origin tells it, else None; a path tells none. ``notes`` says, one line each, what
    the origin has besides and is not used.
    """

    path: Path
    digest: str | None
    origin: Origin
    notes: tuple[str, ...] = ()


class FoundModel(msgspec.Struct, frozen=True):
    """An entry of a store: the ``spec`` that `resolve_model` takes, and either its source or why it has none."""

    spec: str
    source: ModelSource | None
    n_bytes: int = 0
    reason: str = ""


class OllamaName(NamedTuple):
    """A name in Ollama's grammar, with its defaults filled in."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> OllamaName:
        """From ``[SCHEME://][HOST/][NAMESPACE/]MODEL[:TAG]``. The case is kept, as Ollama does.

        Raises
        ------
        ModelLoadError   a part is empty, too long or has a character that it may not have
        """
        # A tag has no slash, so a colon before the last slash belongs to the host.
        rest, _, tag = text.rpartition(":") if text.rfind(":") > text.rfind("/") else (text, "", "latest")
        rest, slash, model = rest.rpartition("/")
        namespace, host = "library", PUBLIC_HOSTS[0]
        if slash:
            rest, slash, namespace = rest.rpartition("/")
        if slash:
            host = _SCHEME.sub("", rest)
        name = cls(host, namespace, model, tag)
        if (wrong := name._invalid()) is not None:
            raise _error(f"ollama:{text}", f"{getattr(name, wrong)!r} is not a valid {wrong}")
        return name

    def __str__(self) -> str:
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    @property
    def short(self) -> str:
        """Without the host and the namespace that are the defaults."""
        if self.host.lower() not in PUBLIC_HOSTS:
            return str(self)
        of = "" if self.namespace.lower() == "library" else f"{self.namespace}/"
        return f"{of}{self.model}:{self.tag}"

    @property
    def folded(self) -> OllamaName:
        """What names of the same model have in common: Ollama compares them without regard to case."""
        host = self.host.lower()
        return OllamaName(
            PUBLIC_HOSTS[0] if host in PUBLIC_HOSTS else host,
            self.namespace.lower(),
            self.model.lower(),
            self.tag.lower(),
        )

    def _invalid(self) -> str | None:
        """The first part that the grammar does not allow."""
        values = zip(_PARTS.items(), self, strict=True)
        return next((part for (part, pattern), value in values if not pattern.fullmatch(value)), None)


class _Refused(Exception):
    """Why there is no source; whoever knows what was asked for makes the error of it."""


class _Layer(msgspec.Struct, frozen=True):
    media_type: str = msgspec.field(name="mediaType")
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def kind(self) -> str:
        return self.media_type.removeprefix(KIND_PREFIX)


class _Child(msgspec.Struct, frozen=True):
    """A manifest in a list: itself, or the digest of the blob that it stands in."""

    runner: str = ""
    digest: str = ""
    layers: list[_Layer] | None = None


class _Manifest(msgspec.Struct, frozen=True):
    # Fields of no use here are let pass: Ollama adds some from time to time. Go writes null for an empty list.
    schema_version: int = msgspec.field(name="schemaVersion")
    media_type: str = msgspec.field(name="mediaType", default="")
    layers: list[_Layer] | None = None
    manifests: list[_Child] | None = None


_MANIFEST = msgspec.json.Decoder(_Manifest)


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
                return _resolve_ollama(OllamaName.parse(name), verify)
            if kind == "hf" and colon:
                return _resolve_hf(name, verify, download, progress)
            if not os.path.lexists(given) and os.path.basename(given) == given:
                raise _Refused(f"no such file; {FORMS}")
        return ModelSource(_checked_path(given), None, "path")
    except ModelLoadError:
        raise
    except (_Refused, OSError) as error:
        raise _error(given, _reason(error)) from error


def list_models() -> list[FoundModel]:
    """Every model of the Ollama stores, and of the Hugging Face cache if huggingface_hub is there.

    Damaged entries are among them, with the reason. Nothing is downloaded, and no digest is verified.
    """
    found: dict[str, FoundModel] = {}
    for root in _roots():
        for model in _ollama_models(root):
            # What an earlier store has under the same name is what the name means.
            found.setdefault(model.spec, model)
    return [*found.values(), *_hf_models()]


def ollama_stores() -> list[Path]:
    """The folders in which an Ollama store is looked for: OLLAMA_MODELS, else those of its installers."""
    # Blanks and quotes go, as Ollama does.
    if given := os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'"):
        return [Path(given)]
    return [Path(os.path.expanduser("~"), ".ollama", "models"), Path(SERVICE_STORE)]


def _error(subject: str, reason: str) -> ModelLoadError:
    """One line, whatever a name or a store holds."""
    reason = _line(reason)
    return ModelLoadError(f"{_line(subject, 200) or repr(subject)}: {reason}", path=subject, reason=reason)


def _line(text: str, limit: int = 1000) -> str:
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:limit])
    return shown + "…" * (len(text) > limit)


def _reason(error: Exception) -> str:
    """What an error says, the system's without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _open(path: str | Path, what: str = "") -> IO[bytes]:
    """A regular file. Others are not opened: a pipe would block, and a device might do something."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise _Refused(f"{what}is a folder, not a file")
        if not stat.S_ISREG(mode):
            raise _Refused(f"{what}is not a regular file")
        return open(path, "rb")
    except FileNotFoundError as error:
        raise _Refused(f"{what}no such file") from error
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise _Refused(f"{what}{_reason(error)}") from error


def _check_gguf(file: IO[bytes], what: str = "") -> None:
    begin = file.read(len(MAGIC))
    if begin != MAGIC:
        seen = f"it begins with {begin!r}" if begin else "it is empty"
        raise _Refused(f"{what}is not a GGUF file: {seen}")


def _check_digest(file: IO[bytes], digest: str, what: str = "") -> None:
    file.seek(0)
    if (computed := sha256_of(file)) != digest:
        raise _Refused(f"{what}damaged: its SHA-256 is {computed}, expected {digest}")


def part_names(name: str) -> Iterator[str]:
    """The file's name, or those of all parts where it is the first part of a split model."""
    split = _SPLIT.fullmatch(name)
    if split is None or int(split[3]) == 0:
        yield name
        return
    stem, number, count = split[1], int(split[2]), int(split[3])
    if number != 1:
        raise _Refused(f"is part {number} of {count}: give the first, {stem}-00001-of-{split[3]}.gguf")
    for part in range(1, count + 1):
        yield f"{stem}-{part:05}-of-{split[3]}.gguf"


def _checked_path(given: str) -> Path:
    """A GGUF file with all its parts there."""
    path = Path(given)
    if _SPLIT.fullmatch(path.name) is None and os.path.islink(given):
        # llama.cpp finds the other parts by the first one's name, which a link may lack.
        target = Path(os.path.realpath(given))
        path = target if _SPLIT.fullmatch(target.name) else path
    for name in part_names(path.name):
        what = "" if name == path.name else f"part {name}: "
        with _open(path.with_name(name) if name != path.name else path, what) as file:
            _check_gguf(file, what)
    return path


def _size_of(path: Path) -> int:
    return sum(os.stat(path.with_name(name)).st_size for name in part_names(path.name))


def _some(names: Iterable[str]) -> str:
    """Names for an error's text, and how many it leaves out."""
    listed = sorted(names)
    more = len(listed) - MAX_LISTED
    return ", ".join(listed[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _roots() -> list[str]:
    """The real folders of the stores that are there."""
    folders = [os.path.realpath(folder) for folder in ollama_stores()]
    return [root for root in folders if any(os.path.isdir(os.path.join(root, tree)) for tree in TREES)]


def _inside(root: str, *place: str) -> str:
    """The real path of something in a store; what a link leads to elsewhere is refused before it is opened."""
    real = os.path.realpath(os.path.join(root, *place))
    if not real.startswith(os.path.join(root, "")):
        raise _Refused(f"{'/'.join(place)} leads out of the store, to {real}")
    return real


def _resolve_ollama(name: OllamaName, verify: bool) -> ModelSource:
    roots = _roots()
    if not roots:
        raise _Refused(f"no Ollama store: {'; '.join(map(_why_no_store, ollama_stores()))}")
    root, place = _find(roots, name)
    return _ollama_source(root, place, verify)


def _why_no_store(folder: Path) -> str:
    try:
        os.scandir(folder).close()
    except (OSError, ValueError) as error:
        return f"{folder}: {_reason(error)}"
    return f"{folder}: has no manifests"


def _find(roots: list[str], name: OllamaName) -> tuple[str, tuple[str, ...]]:
    """The store and the place in it of a manifest: with this very case if there is one, else with another."""
    hosts = PUBLIC_HOSTS if name.host.lower() in PUBLIC_HOSTS else (name.host,)
    for root in roots:
        for tree in TREES:
            for host in hosts:
                exact = (tree, host, *name[1:])
                if os.path.lexists(os.path.join(root, *exact)):
                    return root, exact
    names = [(root, place, found) for root in roots for found, place in _names(root).items()]
    for root, place, found in names:
        if found.folded == name.folded:
            return root, place
    raise _Refused(_what_there_is([found for _, _, found in names], name))


def _what_there_is(names: list[OllamaName], wanted: OllamaName) -> str:
    """Why a name was not found, with those that would be."""
    if tags := {name.tag for name in names if name.folded[:3] == wanted.folded[:3]}:
        return f"no tag {wanted.tag}; it has {_some(tags)}"
    return f"no such model in the Ollama store, which has {_some({name.short for name in names}) or 'none'}"


def _names(root: str) -> dict[OllamaName, tuple[str, ...]]:
    """The names in a store, with where their manifests are. What is no name is no entry, as for Ollama."""
    found: dict[OllamaName, tuple[str, ...]] = {}
    for tree in TREES:
        for place in _places(root, (tree,)):
            name = OllamaName(*place[1:])
            if name._invalid() is None:
                host = PUBLIC_HOSTS[0] if name.host in PUBLIC_HOSTS else name.host
                found.setdefault(name._replace(host=host), place)
    return found


def _places(root: str, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What lies at the depth of a manifest. A folder that cannot be read, or that leads out, has nothing."""
    try:
        with os.scandir(_inside(root, *place)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (_Refused, OSError):
        return
    for entry in entries:
        below = (*place, entry.name)
        if len(below) < 1 + len(OllamaName._fields):
            yield from _places(root, below)
        elif not entry.is_dir(follow_symlinks=False):
            yield below


def _ollama_models(root: str) -> Iterator[FoundModel]:
    for name, place in _names(root).items():
        spec = f"ollama:{name.short}"
        try:
            yield _found(spec, _ollama_source(root, place, verify=False))
        except (_Refused, OSError) as error:
            yield FoundModel(spec, None, reason=_line(_reason(error)))


def _found(spec: str, source: ModelSource) -> FoundModel:
    return FoundModel(spec, source, _size_of(source.path))


def _ollama_source(root: str, place: tuple[str, ...], verify: bool) -> ModelSource:
    layers = _layers(root, _decode(_read(_inside(root, *place))))
    layer = _model_layer(layers)
    digest = layer.digest.removeprefix("sha256:")
    path = _blob(root, layer.digest)
    what = f"blob {os.path.basename(path)}: "
    with _open(path, what) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes != layer.size:
            raise _Refused(f"{what}has {n_bytes:,} bytes, expected {layer.size:,}")
        _check_gguf(file, what)
        if verify:
            _check_digest(file, digest, what)
    return ModelSource(Path(path), digest, "ollama", _notes(layers))


def _read(path: str) -> bytes:
    """A manifest's bytes, bounded."""
    with _open(path, "manifest: ") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise _Refused(f"manifest: more than {MAX_MANIFEST_BYTES:,} bytes")
    return data


def _decode(data: bytes) -> _Manifest:
    try:
        manifest = _MANIFEST.decode(data)
    except RecursionError:
        raise _Refused("manifest: nested too deeply") from None
    except ValueError as error:
        raise _Refused(f"manifest: {error}") from error
    if manifest.schema_version != 2:
        raise _Refused(f"manifest: schemaVersion {manifest.schema_version}, expected 2")
    return manifest


def _layers(root: str, manifest: _Manifest) -> list[_Layer]:
    """The layers; of a list of manifests, those for the runner that reads GGUF."""
    if manifest.media_type == MANIFEST_LIST:
        layers = _child_layers(root, manifest.manifests or [])
    else:
        layers = manifest.layers or []
    for layer in layers:
        if not _DIGEST.fullmatch(layer.digest):
            raise _Refused(f"manifest: the {layer.kind} layer has the malformed digest {layer.digest!r}")
    return layers


def _child_layers(root: str, children: list[_Child]) -> list[_Layer]:
    by_runner = {child.runner.lower(): child for child in reversed(children)}
    child = next((by_runner[runner] for runner in RUNNERS if runner in by_runner), None)
    if child is None:
        raise _Refused(f"is only for the runner {_some(by_runner) or 'of no name'}, which is Ollama's own")
    if child.layers is not None:
        return child.layers
    if not _DIGEST.fullmatch(child.digest):
        raise _Refused(f"manifest: the runner {child.runner} has the malformed digest {child.digest!r}")
    data = _read(_blob(root, child.digest))
    if hashlib.sha256(data).hexdigest() != child.digest.removeprefix("sha256:"):
        raise _Refused(f"manifest: damaged, {child.digest} has another SHA-256")
    manifest = _decode(data)
    if manifest.media_type == MANIFEST_LIST:
        raise _Refused("manifest: a list in a list")
    return manifest.layers or []


def _model_layer(layers: list[_Layer]) -> _Layer:
    """The one layer that is a GGUF file."""
    models = [layer for layer in layers if layer.kind == "model"]
    digests = {layer.digest for layer in models}
    if len(digests) > 1:
        raise _Refused(f"has {len(digests)} model layers, expected one: {_some(digests)}")
    if len(models) > 1:
        raise _Refused(f"manifest: the model layer {models[0].digest} is there {len(models)} times")
    if models:
        return models[0]
    if n_tensors := sum(layer.kind == "tensor" for layer in layers):
        raise _Refused(f"has no GGUF layer but {n_tensors} tensor layers, which only Ollama's own engine reads")
    raise _Refused(f"has no GGUF layer; it has {_some({layer.kind for layer in layers}) or 'none at all'}")


def _blob(root: str, digest: str) -> str:
    """The real path of a blob, by its name of today or with the colon of old."""
    folder = _inside(root, "blobs")
    name = digest.replace(":", "-")
    # On Windows a colon would name a stream of another file.
    for candidate in (name, digest) if os.name != "nt" else (name,):
        if os.path.lexists(os.path.join(folder, candidate)):
            return _inside(root, "blobs", candidate)
    raise _Refused(f"blob {name} is missing")


def _notes(layers: list[_Layer]) -> tuple[str, ...]:
    counts = collections.Counter(layer.kind for layer in layers)
    return tuple(
        f"{counts[kind]} {kind} layer{'s' * (counts[kind] > 1)} not used" for kind in TOLD_KINDS if counts[kind]
    )


def _hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UnsupportedFeatureError(
            "hf: needs the package huggingface_hub: pip install 'llamacppshim[hf]'", feature="hf"
        ) from error


def _resolve_hf(name: str, verify: bool, download: bool, progress: Progress | None) -> ModelSource:
    repo, file = _parse_hf(name)
    hub = _hub()
    try:
        source = _cached(hub, repo, file)
    except _Refused:
        if not (download and file):  # a file can be obtained though others of its repository are damaged
            raise
        source = None
    if source is None:
        if not download:
            raise _Refused(f"not in the cache {_cache_dir()}; download=True obtains it")
        source = _downloaded(hub, repo, file, progress)
    path = _checked_path(str(source.path))
    if verify and source.digest is not None:
        with _open(path) as content:
            _check_digest(content, source.digest)
    return source


def _parse_hf(name: str) -> tuple[str, str]:
    """The repository and the file in it, empty where none is named."""
    repo, colon, file = name.partition(":")
    org, _, model = repo.partition("/")
    for part in (org, model):
        # These two the hub forbids; the first would also be a separator in the cache's folder names.
        if not _HF_NAME.fullmatch(part) or "--" in part or ".." in part:
            raise _Refused(f"{repo!r} is not ORG/REPO of Hugging Face")
    if colon and (not file.isprintable() or "\\" in file or {"", ".", ".."} & set(file.split("/"))):
        raise _Refused(f"{file!r} is not a file in a repository")
    return repo, file


def _cache_dir() -> str:
    # Of the package's own rules, and without the half second that importing the rest of it takes.
    return str(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)


def _cached(hub: ModuleType, repo: str, file: str) -> ModelSource | None:
    """What the cache has, without the network."""
    # Asked first: it answers for a file that is whole, also in a repository whose other files are damaged.
    found = hub.try_to_load_from_cache(repo, file, cache_dir=_cache_dir()) if file else None
    if isinstance(found, str):
        return _hf_source(Path(found))
    files = _cached_files(hub, repo)
    if file:
        return _hf_source(files[file]) if file in files else None
    if not any(name.lower().endswith(".gguf") for name in files):
        return None
    chosen, notes = _choose(files)
    return _hf_source(files[chosen], notes)


def _cached_files(hub: ModuleType, repo: str) -> dict[str, Path]:
    repos, warnings = _scan(hub)
    folder = "models--" + repo.replace("/", "--")
    for warning in warnings:
        if re.search(rf"{re.escape(folder)}(?![\w.-])", str(warning)):
            raise _Refused(f"its cache is damaged: {warning}")
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
        has = f"{len(models)} GGUF files, name one of them: {_some(models)}" if models else "no GGUF model"
        raise _Refused(f"has {has}")
    return models[0], tuple(f"projector {name} not used" for name in projectors)


def _models_among(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The GGUF files, split ones by their first part; and the projectors, which llama.cpp's tools name mmproj."""
    models: list[str] = []
    projectors: list[str] = []
    for name in sorted(names):
        split = _SPLIT.fullmatch(name)
        if not name.lower().endswith(".gguf") or (split is not None and int(split[2]) != 1):
            continue
        (projectors if "mmproj" in PurePosixPath(name).name.lower() else models).append(name)
    return models, projectors


def _hf_source(path: Path, notes: tuple[str, ...] = ()) -> ModelSource:
    """With the digest from the blob's name: for a large file that is its SHA-256. A split model has one for each."""
    digest = None
    if _SPLIT.fullmatch(path.name) is None:
        with contextlib.suppress(OSError):
            digest = os.path.basename(os.readlink(path))
    return ModelSource(path, digest if digest and _SHA256.fullmatch(digest) else None, "hf", notes)


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
    except _Refused:
        raise
    except Exception as error:  # the package's own, its HTTP library's, the system's
        if error in told:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _Refused(f"cannot be downloaded: {reason}") from error
    return _hf_source(Path(paths[0]), notes)


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


def _hf_models() -> list[FoundModel]:
    try:
        if not os.path.isdir(_cache_dir()):
            return []
        hub = _hub()
    except (ImportError, UnsupportedFeatureError):
        return []
    repos, warnings = _scan(hub)
    found = [damaged for warning in warnings for damaged in _damaged_repo(str(warning))]
    for repo in repos:
        files = _files_in(repo)
        found += [_hf_model(f"hf:{repo.repo_id}:{name}", files[name]) for name in _models_among(files)[0]]
    return sorted(found, key=lambda model: model.spec)


def _hf_model(spec: str, path: Path) -> FoundModel:
    try:
        return _found(spec, _hf_source(_checked_path(str(path))))
    except (_Refused, OSError) as error:
        return FoundModel(spec, None, reason=_line(_reason(error)))


def _damaged_repo(warning: str) -> Iterator[FoundModel]:
    """A repository that could not be scanned, if there are GGUF files in it."""
    folder = re.search(r"models--([\w.-]+)", warning)
    if folder is None:
        return
    if any(Path(_cache_dir(), folder[0], "snapshots").rglob("*.gguf")):
        yield FoundModel(f"hf:{folder[1].replace('--', '/', 1)}", None, reason=_line(warning))
