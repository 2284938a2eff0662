"""Owns Ollama's store: the grammar of its names, where it lies, and which file an entry means. Pure.

Files are opened where they are, never copied. What a store says is foreign data: a name is checked before it becomes a
path, sizes are bounded before they are read, and no file outside the store is opened on its behalf.
"""

from __future__ import annotations

import collections
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from llamacppshim.gguf_files import (
    FoundModel,
    ModelSource,
    Refused,
    check_digest,
    check_gguf,
    found_model,
    one_line,
    opened,
    reason_of,
    some_of,
)

#: Ollama's layouts of one file a tensor list thousands of layers in about a megabyte.
MAX_MANIFEST_BYTES = 4 << 20

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

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")
#: The grammar of Ollama's types/model/name.go. None of them matches a separator, or a name of dots alone.
_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}


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
        Refused   a part is empty, too long or has a character that it may not have
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
            raise Refused(f"{getattr(name, wrong)!r} is not a valid {wrong}")
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


def ollama_stores() -> list[Path]:
    """The folders in which an Ollama store is looked for: OLLAMA_MODELS, else those of its installers."""
    # Blanks and quotes go, as Ollama does.
    if given := os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'"):
        return [Path(given)]
    return [Path(os.path.expanduser("~"), ".ollama", "models"), Path(SERVICE_STORE)]


def resolve(name: OllamaName, verify: bool) -> ModelSource:
    """The file of an entry. Raises Refused or OSError where there is none, or it is damaged."""
    roots = _roots()
    if not roots:
        raise Refused(f"no Ollama store: {'; '.join(map(_why_no_store, ollama_stores()))}")
    root, place = _find(roots, name)
    return _source(root, place, verify)


def found_models() -> list[FoundModel]:
    """Every entry of the stores, damaged ones with the reason."""
    found: dict[str, FoundModel] = {}
    for root in _roots():
        for model in _models_in(root):
            # What an earlier store has under the same name is what the name means.
            found.setdefault(model.spec, model)
    return list(found.values())


def _models_in(root: str) -> Iterator[FoundModel]:
    for name, place in _names(root).items():
        spec = f"ollama:{name.short}"
        try:
            yield found_model(spec, _source(root, place, verify=False))
        except (Refused, OSError) as error:
            yield FoundModel(spec, None, reason=one_line(reason_of(error)))


def _roots() -> list[str]:
    """The real folders of the stores that are there."""
    folders = [os.path.realpath(folder) for folder in ollama_stores()]
    return [root for root in folders if any(os.path.isdir(os.path.join(root, tree)) for tree in TREES)]


def _why_no_store(folder: Path) -> str:
    try:
        os.scandir(folder).close()
    except (OSError, ValueError) as error:
        return f"{folder}: {reason_of(error)}"
    return f"{folder}: has no manifests"


def _inside(root: str, *place: str) -> str:
    """The real path of something in a store; what a link leads to elsewhere is refused before it is opened."""
    real = os.path.realpath(os.path.join(root, *place))
    if not real.startswith(os.path.join(root, "")):
        raise Refused(f"{'/'.join(place)} leads out of the store, to {real}")
    return real


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
    raise Refused(_what_there_is([found for _, _, found in names], name))


def _what_there_is(names: list[OllamaName], wanted: OllamaName) -> str:
    """Why a name was not found, with those that would be."""
    if tags := {name.tag for name in names if name.folded[:3] == wanted.folded[:3]}:
        return f"no tag {wanted.tag}; it has {some_of(tags)}"
    return f"no such model in the Ollama store, which has {some_of({name.short for name in names}) or 'none'}"


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
    except (Refused, OSError):
        return
    for entry in entries:
        below = (*place, entry.name)
        if len(below) < 1 + len(OllamaName._fields):
            yield from _places(root, below)
        elif not entry.is_dir(follow_symlinks=False):
            yield below


def _source(root: str, place: tuple[str, ...], verify: bool) -> ModelSource:
    layers = _layers(root, _decode(_read(_inside(root, *place))))
    layer = _model_layer(layers)
    digest = layer.digest.removeprefix("sha256:")
    path = _blob(root, layer.digest)
    what = f"blob {os.path.basename(path)}: "
    with opened(path, what) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes != layer.size:
            raise Refused(f"{what}has {n_bytes:,} bytes, expected {layer.size:,}")
        check_gguf(file, what)
        if verify:
            check_digest(file, digest, what)
    return ModelSource(Path(path), digest, "ollama", _notes(layers))


def _read(path: str) -> bytes:
    """A manifest's bytes, bounded."""
    with opened(path, "manifest: ") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise Refused(f"manifest: more than {MAX_MANIFEST_BYTES:,} bytes")
    return data


def _decode(data: bytes) -> _Manifest:
    try:
        manifest = _MANIFEST.decode(data)
    except RecursionError:
        raise Refused("manifest: nested too deeply") from None
    except ValueError as error:
        raise Refused(f"manifest: {error}") from error
    if manifest.schema_version != 2:
        raise Refused(f"manifest: schemaVersion {manifest.schema_version}, expected 2")
    return manifest


def _layers(root: str, manifest: _Manifest) -> list[_Layer]:
    """The layers; of a list of manifests, those for the runner that reads GGUF."""
    if manifest.media_type == MANIFEST_LIST:
        layers = _child_layers(root, manifest.manifests or [])
    else:
        layers = manifest.layers or []
    for layer in layers:
        if not _DIGEST.fullmatch(layer.digest):
            raise Refused(f"manifest: the {layer.kind} layer has the malformed digest {layer.digest!r}")
    return layers


def _child_layers(root: str, children: list[_Child]) -> list[_Layer]:
    by_runner = {child.runner.lower(): child for child in reversed(children)}
    child = next((by_runner[runner] for runner in RUNNERS if runner in by_runner), None)
    if child is None:
        raise Refused(f"is only for the runner {some_of(by_runner) or 'of no name'}, which is Ollama's own")
    if child.layers is not None:
        return child.layers
    if not _DIGEST.fullmatch(child.digest):
        raise Refused(f"manifest: the runner {child.runner} has the malformed digest {child.digest!r}")
    data = _read(_blob(root, child.digest))
    if hashlib.sha256(data).hexdigest() != child.digest.removeprefix("sha256:"):
        raise Refused(f"manifest: damaged, {child.digest} has another SHA-256")
    manifest = _decode(data)
    if manifest.media_type == MANIFEST_LIST:
        raise Refused("manifest: a list in a list")
    return manifest.layers or []


def _model_layer(layers: list[_Layer]) -> _Layer:
    """The one layer that is a GGUF file."""
    models = [layer for layer in layers if layer.kind == "model"]
    digests = {layer.digest for layer in models}
    if len(digests) > 1:
        raise Refused(f"has {len(digests)} model layers, expected one: {some_of(digests)}")
    if len(models) > 1:
        raise Refused(f"manifest: the model layer {models[0].digest} is there {len(models)} times")
    if models:
        return models[0]
    if n_tensors := sum(layer.kind == "tensor" for layer in layers):
        raise Refused(f"has no GGUF layer but {n_tensors} tensor layers, which only Ollama's own engine reads")
    raise Refused(f"has no GGUF layer; it has {some_of({layer.kind for layer in layers}) or 'none at all'}")


def _blob(root: str, digest: str) -> str:
    """The real path of a blob, by its name of today or with the colon of old."""
    folder = _inside(root, "blobs")
    name = digest.replace(":", "-")
    # On Windows a colon would name a stream of another file.
    for candidate in (name, digest) if os.name != "nt" else (name,):
        if os.path.lexists(os.path.join(folder, candidate)):
            return _inside(root, "blobs", candidate)
    raise Refused(f"blob {name} is missing")


def _notes(layers: list[_Layer]) -> tuple[str, ...]:
    counts = collections.Counter(layer.kind for layer in layers)
    return tuple(
        f"{counts[kind]} {kind} layer{'s' * (counts[kind] > 1)} not used" for kind in TOLD_KINDS if counts[kind]
    )
