"""Model sources: what a name means, every way in which a store can be damaged, and that nothing outside is opened."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import RunChild
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacppshim import Model, ollama, sources
from llamacppshim import hub as hub_module
from llamacppshim.errors import LlamaCppShimError, ModelLoadError, UnsupportedFeatureError
from llamacppshim.gguf_files import FoundModel, ModelSource, Refused
from llamacppshim.models import DEFAULT_MODEL
from llamacppshim.ollama import OllamaName
from llamacppshim.sources import list_models, resolve_model

KIND = "application/vnd.ollama.image."
MANIFEST_LIST = "application/vnd.ollama.manifest.list.v2+json"
LATEST = "registry.ollama.ai/library/m/latest"
PUBLIC = "registry.ollama.ai"
NOBODY = 65534


def refused(spec: str | os.PathLike[str], **options: Any) -> str:
    """The reason of the error, which is one line, ours and the builtin's, and names what was asked for."""
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(spec, **options)
    error = caught.value
    assert isinstance(error, LlamaCppShimError) and isinstance(error, OSError)
    assert len(str(error).splitlines()) == 1 and str(error).isprintable()
    assert error.path == os.fsdecode(spec)
    assert str(error).endswith(f": {error.reason}")
    return error.reason


def layer(kind: str, digest: str, size: int = 1) -> dict[str, Any]:
    return {"mediaType": KIND + kind, "digest": digest, "size": size}


class Store:
    """An Ollama store in a folder, with one model ``m`` whose blob is a real GGUF file."""

    def __init__(self, folder: Path, gguf: bytes) -> None:
        self.folder = folder
        self.outside = folder.parent / "outside"
        self.outside.mkdir(parents=True)
        self.gguf = gguf
        self.digest = self.blob(gguf)
        self.model = layer("model", self.digest, len(gguf))
        self.layers(self.model)

    def blob_path(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "-")

    @property
    def model_blob(self) -> Path:
        return self.blob_path(self.digest)

    def blob(self, data: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blob_path(digest).parent.mkdir(parents=True, exist_ok=True)
        self.blob_path(digest).write_bytes(data)
        return digest

    def manifest_path(self, place: str = LATEST, tree: str = "manifests") -> Path:
        path = self.folder / tree / place
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, manifest: object, place: str = LATEST, tree: str = "manifests") -> None:
        data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        self.manifest_path(place, tree).write_bytes(data)

    def layers(self, *layers: object, place: str = LATEST, tree: str = "manifests") -> None:
        config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": self.digest, "size": 1}
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": config,
            "layers": list(layers),
        }
        self.write(manifest, place, tree)

    def children(self, *children: object) -> None:
        self.write({"schemaVersion": 2, "mediaType": MANIFEST_LIST, "manifests": list(children)})

    def move_out(self, path: Path) -> None:
        """Leaves a link to where it has gone."""
        shutil.move(path, self.outside / path.name)
        path.symlink_to(self.outside / path.name)


@pytest.fixture(scope="session")
def gguf(tiny_models: dict[str, Path]) -> bytes:
    """The smallest real GGUF file there is."""
    return tiny_models["tiny-lora"].read_bytes()


@pytest.fixture
def store(tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    return Store(tmp_path / "store", gguf)


@pytest.fixture(autouse=True)
def no_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own models are none of these tests' business."""
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ollama, "SERVICE_STORE", str(tmp_path / "service"))
    monkeypatch.setattr(hub_module, "_cache_dir", lambda: str(tmp_path / "no-cache"))


# Paths


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model", "sha256-0", "default", "ollama:m", "hf:a"])
def test_a_path_may_have_any_suffix_and_a_path_object_is_always_one(tmp_path: Path, gguf: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gguf)
    assert resolve_model(path) == ModelSource(path, None, "path")
    assert resolve_model(str(path)) == ModelSource(path, None, "path")


def test_a_bare_name_may_be_a_file_in_this_folder(tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma3:1b").write_bytes(gguf)
    assert resolve_model("gemma3:1b").path == Path("gemma3:1b")


def test_a_link_stays_the_path_that_was_given(tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "file").write_bytes(gguf)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "link2").symlink_to(tmp_path / "link")
    assert resolve_model(tmp_path / "link2").path == tmp_path / "link2"


def test_a_split_model_is_its_first_part(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    first = tiny_models["tiny-split-00001-of-00002"]
    assert resolve_model(first).path == first
    second = tiny_models["tiny-split-00002-of-00002"]
    assert refused(second) == "is part 2 of 2: give the first, tiny-split-00001-of-00002.gguf"
    (tmp_path / "link").symlink_to(first)
    # Oracle: llama.cpp, which finds the second part by the name of the first.
    source = resolve_model(tmp_path / "link")
    assert source.path == first.resolve()
    Model(source.path).close()


def test_a_split_model_needs_all_its_parts(tmp_path: Path, gguf: bytes) -> None:
    first = tmp_path / "m-00001-of-00003.gguf"
    first.write_bytes(gguf)
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(gguf)
    assert refused(first) == "part m-00003-of-00003.gguf: no such file"
    (tmp_path / "m-00003-of-00003.gguf").write_bytes(b"lost")
    assert refused(first) == "part m-00003-of-00003.gguf: is not a GGUF file: it begins with b'lost'"
    assert refused(tmp_path / "m-00000-of-00003.gguf").startswith("is part 0 of 3")
    (tmp_path / "m-00001-of-00000.gguf").write_bytes(b"lost")
    assert refused(tmp_path / "m-00001-of-00000.gguf").startswith("is not a GGUF file")


def test_what_is_no_gguf_file_says_why(tmp_path: Path) -> None:
    assert refused(tmp_path / "missing.gguf") == "no such file"
    assert refused(tmp_path) == "is a folder, not a file"
    for data, reason in (
        (b"", "it is empty"),
        (b"GG", "it begins with b'GG'"),
        (b"PK\3\4", r"it begins with b'PK\x03\x04'"),
    ):
        (tmp_path / "file").write_bytes(data)
        assert refused(tmp_path / "file") == f"is not a GGUF file: {reason}"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "is not a regular file"
    assert refused("/dev/null") == "is not a regular file"
    (tmp_path / "loop").symlink_to("loop")
    assert refused(tmp_path / "loop") == "Too many levels of symbolic links"
    (tmp_path / "dangling").symlink_to("nowhere")
    assert refused(tmp_path / "dangling") == "no such file"
    assert refused(tmp_path / ("x" * 300)) == "File name too long"
    assert refused(f"{tmp_path}/a\nb\x1b[1m") == "no such file"
    assert refused(f"{tmp_path}/a\0b") == "embedded null byte"


def test_a_file_that_may_not_be_read_says_so(gguf: bytes) -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own nobody but its user may enter
        os.chmod(folder, 0o755)
        file = Path(folder, "file")
        file.write_bytes(gguf)
        file.chmod(0)
        try:
            if user == 0:
                os.seteuid(NOBODY)  # root may read everything
            assert refused(file) == "Permission denied"
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("spec", ["gemma3:1b", "gemma3", "", "olama:gemma3", "OLLAMA:gemma3", "Default"])
def test_a_name_of_no_form_is_told_the_forms(spec: str) -> None:
    reason = refused(spec)
    assert reason.startswith("no such file; a model is a path, ollama:")
    assert "hf:ORG/REPO[:FILE]" in reason and reason.endswith("default")


def test_the_default_is_the_pinned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def default_model(progress: object) -> Path:
        told.append(progress)
        return tmp_path / "default.gguf"

    monkeypatch.setattr(sources, "default_model", default_model)
    expected = ModelSource(tmp_path / "default.gguf", DEFAULT_MODEL.sha256, "default")
    assert resolve_model("default", progress=print) == expected
    assert told == [print]


# Ollama names

CASES = {
    "gemma3": (PUBLIC, "library", "gemma3", "latest"),
    "gemma3:1b": (PUBLIC, "library", "gemma3", "1b"),
    "library/gemma3": (PUBLIC, "library", "gemma3", "latest"),
    "Ns/M.1:Q4_K_M": (PUBLIC, "Ns", "M.1", "Q4_K_M"),
    "registry.example.com/ns/model:tag": ("registry.example.com", "ns", "model", "tag"),
    "localhost:5000/ns/m:t": ("localhost:5000", "ns", "m", "t"),
    "localhost:5000/ns/m": ("localhost:5000", "ns", "m", "latest"),
    "hf.co/org/repo:quant": ("hf.co", "org", "repo", "quant"),
    "https://host:1/ns/m": ("host:1", "ns", "m", "latest"),
    "_a/_b/_c:_d": ("_a", "_b", "_c", "_d"),
    f"{'h' * 350}/{'n' * 80}/{'m' * 80}:{'t' * 80}": ("h" * 350, "n" * 80, "m" * 80, "t" * 80),
}


@pytest.mark.parametrize("text", CASES)
def test_a_name_has_its_defaults(text: str) -> None:
    assert OllamaName.parse(text) == CASES[text]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "model"),
        (":t", "model"),
        ("m:", "tag"),
        ("m:a:b", "model"),
        ("m@sha256:0", "model"),
        ("-m", "model"),
        (".m", "model"),
        ("m" * 81, "model"),
        ("m:" + "t" * 81, "tag"),
        ("m:.t", "tag"),
        ("n.s/m", "namespace"),
        ("n" * 81 + "/m", "namespace"),
        ("/m", "namespace"),
        ("../m", "namespace"),
        ("host:5000/m", "namespace"),
        ("h/n:s/m:t", "namespace"),
        ("//m", "host"),
        ("a/b/n/m", "host"),
        ("../n/m", "host"),
        ("h" * 351 + "/n/m", "host"),
        ("h/n/..", "model"),
        ("h/n/m:..", "tag"),
        ("h/n/m:a/b", "host"),
        ("m\\n", "model"),
        ("m\n", "model"),
        ("m\0", "model"),
        ("\uff4d", "model"),
    ],
)
def test_a_name_out_of_the_grammar_says_which_part(text: str, wrong: str) -> None:
    assert re.fullmatch(rf".* is not a valid {wrong}", refused(f"ollama:{text}"))


PART = r"[A-Za-z0-9_][A-Za-z0-9_{0}]{{0,79}}"
NAMESPACE, MODEL = PART.format("-"), PART.format(".-")
HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"
GRAMMAR = re.compile(
    rf"(?:(?:(?:[A-Za-z][A-Za-z0-9+.-]*://)?(?P<host>{HOST})/)?(?P<namespace>{NAMESPACE})/)?"
    rf"(?P<model>{MODEL})(?::(?P<tag>{MODEL}))?"
)


def part(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))


@settings(deadline=None, max_examples=200)
@given(part(HOST), part(NAMESPACE), part(MODEL), part(MODEL))
def test_a_name_that_is_written_is_read_again(host: str, namespace: str, model: str, tag: str) -> None:
    name = OllamaName(host, namespace, model, tag)
    assert OllamaName.parse(str(name)) == name
    assert OllamaName.parse(f"https://{name}") == name
    assert OllamaName.parse(name.short).folded == name.folded
    assert OllamaName.parse(f"{model}:{tag}") == (PUBLIC, "library", model, tag)


@settings(deadline=None, max_examples=1000)
@given(st.text(alphabet="aZ0_-.:/@+\\ \n\0é", max_size=12) | st.text(max_size=20))
def test_a_name_is_accepted_as_the_grammar_says_and_holds_no_trick(text: str) -> None:
    """Oracle: the grammar in Ollama's types/model/name.go, as one expression."""
    match = GRAMMAR.fullmatch(text)
    try:
        name = OllamaName.parse(text)
    except Refused:
        assert match is None
        return
    assert match is not None
    defaults = {"host": PUBLIC, "namespace": "library", "tag": "latest"}
    assert name._asdict() == {key: value or defaults[key] for key, value in match.groupdict().items()}
    for value in name:
        assert os.path.basename(value) == value and value not in ("", ".", "..")
        assert os.path.normpath(os.path.join("/root", value)) == f"/root/{value}"


# Ollama stores


def test_a_model_is_opened_where_it_is(tmp_path: Path, tiny_models: dict[str, Path], store: Store) -> None:
    """Oracle: the model as llama.cpp opens it, and the digest that it has there."""
    real = tiny_models["tiny-swa"].read_bytes()
    digest = store.blob(real)
    store.layers(layer("model", digest, len(real)), layer("template", store.digest), layer("license", store.digest))
    source = resolve_model("ollama:m")
    assert source == ModelSource(store.blob_path(digest).resolve(), digest.removeprefix("sha256:"), "ollama")
    assert resolve_model("ollama:m", verify=True) == source
    with Model(source.path) as model:
        assert model.digest == source.digest
        assert model.path == str(source.path)


@pytest.mark.parametrize("name", CASES)
def test_every_form_of_a_name_finds_its_manifest(store: Store, name: str) -> None:
    if len(name) > 300:
        assert refused(f"ollama:{name}").startswith("no such model in the Ollama store")
        return
    store.manifest_path().unlink()
    store.layers(store.model, place="/".join(CASES[name]))
    assert resolve_model(f"ollama:{name}").path == store.model_blob.resolve()


def test_what_is_not_used_is_said(store: Store) -> None:
    kinds = ["projector", "adapter", "adapter", "template", "params", "license", "system", "messages", "draft"]
    store.layers(store.model, *(layer(kind, f"sha256:{i:064}") for i, kind in enumerate(kinds)))
    assert resolve_model("ollama:m").notes == (
        "2 adapter layers not used",
        "1 projector layer not used",
        "1 draft layer not used",
        "1 system layer not used",
        "1 messages layer not used",
    )


def test_the_case_of_a_name_does_not_matter_unless_both_are_there(store: Store, gguf: bytes) -> None:
    """As Ollama does: what is written on the disk wins over what was typed."""
    assert resolve_model("ollama:M:LATEST").path == store.model_blob.resolve()
    assert resolve_model("ollama:Registry.Ollama.AI/Library/M").path == store.model_blob.resolve()
    other = gguf + b"\0"
    digest = store.blob(other)
    store.layers(layer("model", digest, len(other)), place=f"{PUBLIC}/library/M/latest")
    assert resolve_model("ollama:M").path == store.blob_path(digest).resolve()
    assert resolve_model("ollama:m").path == store.model_blob.resolve()


def test_a_blob_of_old_has_a_colon_in_its_name(store: Store) -> None:
    old = store.folder / "blobs" / store.digest
    store.model_blob.rename(old)
    assert resolve_model("ollama:m") == ModelSource(old.resolve(), store.digest[7:], "ollama")
    store.blob(store.gguf)
    assert resolve_model("ollama:m").path == store.model_blob.resolve()


def test_the_newer_tree_of_manifests_comes_first(store: Store, gguf: bytes) -> None:
    """manifests-v2 has links to blobs, and the registry by its other name."""
    other = gguf + b"\0"
    new = layer("model", store.blob(other), len(other))
    digest = store.blob(json.dumps({"schemaVersion": 2, "layers": [new]}).encode())
    link = store.manifest_path("ollama.com/library/m/latest", "manifests-v2")
    link.symlink_to(os.path.relpath(store.blob_path(digest), link.parent))
    assert resolve_model("ollama:m").digest == new["digest"][7:]
    assert resolve_model("ollama:ollama.com/library/m").digest == new["digest"][7:]
    assert [(found.spec, found.n_bytes) for found in list_models()] == [("ollama:m:latest", len(other))]
    link.unlink()
    assert resolve_model("ollama:ollama.com/library/m").digest == store.digest[7:]


def test_of_a_list_of_manifests_the_one_that_is_gguf_is_taken(store: Store) -> None:
    mlx = {"runner": "mlx", "format": "safetensors", "layers": [layer("tensor", store.digest)]}
    store.children(mlx, {"runner": "ollama", "format": "gguf", "layers": [store.model]})
    assert resolve_model("ollama:m").digest == store.digest[7:]
    blob = store.blob(json.dumps({"schemaVersion": 2, "layers": [store.model]}).encode())
    store.children(mlx, {"runner": "ollama", "layers": []}, {"runner": "LlamaCPP", "digest": blob})
    assert resolve_model("ollama:m").digest == store.digest[7:]


def test_the_digest_is_verified_when_asked(store: Store) -> None:
    data = bytearray(store.gguf)
    data[-1] ^= 1
    store.model_blob.write_bytes(data)
    assert resolve_model("ollama:m").digest == store.digest[7:]
    wrong = hashlib.sha256(data).hexdigest()
    assert refused("ollama:m", verify=True) == (
        f"blob {store.model_blob.name}: damaged: its SHA-256 is {wrong}, expected {store.digest[7:]}"
    )


def test_what_is_not_there_is_told_with_what_is(store: Store) -> None:
    store.layers(store.model, place=f"{PUBLIC}/library/m/1b")
    store.layers(store.model, place="hf.co/org/repo/Q4_0")
    assert refused("ollama:m:4b") == "no tag 4b; it has 1b, latest"
    assert refused("ollama:x") == "no such model in the Ollama store, which has hf.co/org/repo:Q4_0, m:1b, m:latest"
    for i in range(20):
        store.layers(store.model, place=f"{PUBLIC}/library/m/t{i:02}")
    assert refused("ollama:m:4b") == "no tag 4b; it has 1b, latest, t00, t01, t02, t03, t04, t05, t06, t07 and 12 more"
    shutil.rmtree(store.folder / "manifests" / "hf.co")
    shutil.rmtree(store.folder / "manifests" / PUBLIC)
    assert refused("ollama:m") == "no such model in the Ollama store, which has none"


def test_without_a_store_the_error_says_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    assert refused("ollama:m") == (
        f"no Ollama store: {tmp_path}/home/.ollama/models: No such file or directory; "
        f"{tmp_path}/service: has no manifests"
    )


def test_the_stores_are_where_ollama_puts_them(tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Store(tmp_path / "service", gguf)
    assert resolve_model("ollama:m").path == service.model_blob.resolve()
    shutil.rmtree(service.outside)
    home = Store(tmp_path / "home" / ".ollama" / "models", gguf)
    assert resolve_model("ollama:m").path == home.model_blob.resolve()
    home.layers(home.model, place=f"{PUBLIC}/library/a/b")
    service.layers(service.model, place=f"{PUBLIC}/library/c/d")
    assert [found.spec for found in list_models()] == ["ollama:a:b", "ollama:m:latest", "ollama:c:d"]
    assert resolve_model("ollama:c:d").path == service.model_blob.resolve()
    monkeypatch.setenv("OLLAMA_MODELS", f" '{tmp_path / 'service'}' ")
    assert resolve_model("ollama:m").path == service.model_blob.resolve()
    assert "a" not in [found.spec for found in list_models()]


def test_the_store_itself_may_be_a_link(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(store.folder)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "link"))
    assert resolve_model("ollama:m").path == store.model_blob.resolve()


def bare_manifest(**fields: object) -> Callable[[Store], None]:
    return lambda store: store.write({"schemaVersion": 2, "layers": [store.model], **fields})


def manifest(data: bytes) -> Callable[[Store], None]:
    return lambda store: store.write(data)


def with_layer(**fields: object) -> Callable[[Store], None]:
    return lambda store: store.layers({**store.model, **fields})


def fifo(path: Callable[[Store], Path]) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        path(store).unlink()
        os.mkfifo(path(store))

    return damage


def blob_is_a_folder(store: Store) -> None:
    store.model_blob.unlink()
    store.model_blob.mkdir()


def blob_is_a_link(target: str) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        store.model_blob.unlink()
        store.model_blob.symlink_to(target.format(name=store.model_blob.name))

    return damage


def manifest_is_a_link_to_a_system_file(store: Store) -> None:
    store.manifest_path().unlink()
    store.manifest_path().symlink_to("/etc/passwd")


def blob_is_overwritten(data: Callable[[bytes], bytes], same_size: bool) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        new = data(store.gguf)
        store.model_blob.write_bytes(new)
        if same_size:
            store.layers({**store.model, "size": len(new)})

    return damage


def two_models(store: Store) -> None:
    store.layers(store.model, layer("model", "sha256:" + "f" * 64))


def a_child_by(digest: str) -> Callable[[Store], None]:
    return lambda store: store.children({"runner": "ollama", "digest": digest})


def a_child_in_a_blob(data: object, change: bytes = b"") -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        digest = store.blob(json.dumps(data).encode())
        with open(store.blob_path(digest), "ab") as file:
            file.write(change)
        store.children({"runner": "ollama", "digest": digest})

    return damage


ZEROS = "sha256:" + "0" * 64
#: What is done to a store, and the reason by then; {blob}, {digest}, {n} and {outside} are those of the store.
DAMAGES: dict[str, tuple[Callable[[Store], None], str]] = {
    "missing": (lambda store: store.model_blob.unlink(), "blob {blob} is missing"),
    "no blobs": (lambda store: shutil.rmtree(store.folder / "blobs"), "blob {blob} is missing"),
    "truncated": (blob_is_overwritten(lambda data: data[:-1], False), "blob {blob}: has {less} bytes, expected {n}"),
    "longer": (blob_is_overwritten(lambda data: data + b"\0", False), "blob {blob}: has {more} bytes, expected {n}"),
    "size zero": (with_layer(size=0), "blob {blob}: has {n} bytes, expected 0"),
    "foreign": (
        blob_is_overwritten(lambda data: b"FUGG" + data[4:], False),
        "blob {blob}: is not a GGUF file: it begins with b'FUGG'",
    ),
    "empty": (blob_is_overwritten(lambda data: b"", True), "blob {blob}: is not a GGUF file: it is empty"),
    "a folder": (blob_is_a_folder, "blob {blob}: is a folder, not a file"),
    "a pipe": (fifo(lambda store: store.model_blob), "blob {blob}: is not a regular file"),
    "blob out": (
        lambda store: store.move_out(store.model_blob),
        "blobs/{blob} leads out of the store, to {outside}/{blob}",
    ),
    "blob to a device": (blob_is_a_link("/dev/zero"), "blobs/{blob} leads out of the store, to /dev/zero"),
    "blob up": (blob_is_a_link("../../outside"), "blobs/{blob} leads out of the store, to {outside}"),
    "blob nowhere": (blob_is_a_link("nowhere"), "blob nowhere: no such file"),
    "blob loop": (blob_is_a_link("{name}"), "blob {blob}: Too many levels of symbolic links"),
    "blobs out": (
        lambda store: store.move_out(store.folder / "blobs"),
        "blobs leads out of the store, to {outside}/blobs",
    ),
    "manifest out": (
        lambda store: store.move_out(store.manifest_path()),
        f"manifests/{LATEST} leads out of the store, to {{outside}}/latest",
    ),
    "manifest to a system file": (
        manifest_is_a_link_to_a_system_file,
        f"manifests/{LATEST} leads out of the store, to /etc/passwd",
    ),
    "manifest a pipe": (fifo(lambda store: store.manifest_path()), "manifest: is not a regular file"),
    "huge": (manifest(b'{"schemaVersion":2,"layers":[' + b" " * (4 << 20)), "manifest: more than 4,194,304 bytes"),
    "deep": (manifest(b'{"schemaVersion":2,"x":' + b"[" * 1_000_000), "manifest: nested too deeply"),
    "deep layers": (
        manifest(b'{"schemaVersion":2,"layers":' + b"[" * 1_000_000),
        "manifest: Expected `object`, got `array` - at `$.layers[0]`",
    ),
    "nothing": (manifest(b""), "manifest: Input data was truncated"),
    "cut": (manifest(b'{"schemaVersion":2,"layers":['), "manifest: Input data was truncated"),
    "no JSON": (manifest(b"GGUF"), "manifest: JSON is malformed: invalid character (byte 0)"),
    "an array": (manifest(b"[]"), "manifest: Expected `object`, got `array`"),
    "no text": (manifest(b'{"schemaVersion":2,"mediaType":"\xff"}'), "manifest: *"),
    "version 1": (bare_manifest(schemaVersion=1), "manifest: schemaVersion 1, expected 2"),
    "version text": (bare_manifest(schemaVersion="2"), "manifest: Expected `int`, got `str` - at `$.schemaVersion`"),
    "no version": (manifest(b"{}"), "manifest: Object missing required field `schemaVersion`"),
    "layers an object": (bare_manifest(layers={}), "manifest: Expected `array | null`, got `object` - at `$.layers`"),
    "size a text": (with_layer(size="1"), "manifest: Expected `int`, got `str` - at `$.layers[0].size`"),
    "size below zero": (with_layer(size=-1), "manifest: Expected `int` >= 0 - at `$.layers[0].size`"),
    "no digest": (
        bare_manifest(layers=[{"mediaType": KIND + "model", "size": 1}]),
        "manifest: Object missing required field `digest` - at `$.layers[0]`",
    ),
    **{
        f"digest {digest!r}": (
            with_layer(digest=digest),
            f"manifest: the model layer has the malformed digest {digest!r}",
        )
        for digest in (
            "",
            "sha256:",
            ZEROS[:-1],
            ZEROS + "0",
            ZEROS + "\n",
            "sha256:" + "A" * 64,
            "sha256-" + "0" * 64,
            "sha512:" + "0" * 64,
            "sha256:../../outside/secret",
            "/etc/passwd",
        )
    },
    "another layer's digest": (
        lambda store: store.layers(store.model, layer("template", "../x")),
        "manifest: the template layer has the malformed digest '../x'",
    ),
    "two models": (two_models, "has 2 model layers, expected one: *"),
    "a model twice": (
        lambda store: store.layers(store.model, store.model),
        "manifest: the model layer {digest} is there 2 times",
    ),
    "no layers": (bare_manifest(layers=None), "has no GGUF layer; it has none at all"),
    "a template": (lambda store: store.layers(layer("template", ZEROS)), "has no GGUF layer; it has template"),
    "safetensors": (
        lambda store: store.layers(layer("json", ZEROS), *[layer("tensor", ZEROS)] * 3),
        "has no GGUF layer but 3 tensor layers, which only Ollama's own engine reads",
    ),
    "for one runner": (
        lambda store: store.children({"runner": "mlx", "layers": []}),
        "is only for the runner mlx, which is Ollama's own",
    ),
    "for no runner": (lambda store: store.children(), "is only for the runner of no name, which is Ollama's own"),
    "a list in a list": (
        a_child_in_a_blob({"schemaVersion": 2, "mediaType": MANIFEST_LIST}),
        "manifest: a list in a list",
    ),
    "a child changed": (a_child_in_a_blob({"schemaVersion": 2}, b" "), "manifest: damaged, * has another SHA-256"),
    "a child of no digest": (
        a_child_by("sha256:../x"),
        "manifest: the runner ollama has the malformed digest 'sha256:../x'",
    ),
    "a child missing": (a_child_by(ZEROS), "blob sha256-" + "0" * 64 + " is missing"),
}
#: These hide the manifest from a listing, which shows what can be asked for.
HIDDEN: dict[str, tuple[Callable[[Store], None], str]] = {
    "a folder out": (
        lambda store: store.move_out(store.folder / "manifests" / PUBLIC / "library"),
        f"manifests/{LATEST} leads out of the store, to {{outside}}/library/m/latest",
    ),
    "a tree out": (
        lambda store: store.move_out(store.folder / "manifests"),
        f"manifests/{LATEST} leads out of the store, to {{outside}}/manifests/{LATEST}",
    ),
}


def expected(store: Store, reason: str) -> str:
    n = len(store.gguf)
    values = {"blob": store.model_blob.name, "digest": store.digest, "outside": store.outside.resolve()}
    return reason.format(n=f"{n:,}", less=f"{n - 1:,}", more=f"{n + 1:,}", **values)


def alike(reason: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".+"), reason) is not None


@pytest.mark.parametrize("damage", [*DAMAGES, *HIDDEN])
def test_every_damage_has_its_own_reason(store: Store, damage: str) -> None:
    spoil, pattern = {**DAMAGES, **HIDDEN}[damage]
    pattern = expected(store, pattern)
    spoil(store)
    assert alike(refused("ollama:m"), pattern), refused("ollama:m")
    assert alike(refused("ollama:m", verify=True), pattern)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_listed_with_its_reason(store: Store, damage: str) -> None:
    spoil, pattern = DAMAGES[damage]
    pattern = expected(store, pattern)
    spoil(store)
    (found,) = list_models()
    assert found.spec == "ollama:m:latest"
    assert found.source is None and found.n_bytes == 0
    assert alike(found.reason, pattern), found.reason
    assert len(found.reason.splitlines()) == 1


@pytest.mark.parametrize("damage", HIDDEN)
def test_a_folder_that_leads_out_has_nothing_to_list(store: Store, damage: str) -> None:
    HIDDEN[damage][0](store)
    assert list_models() == []


def test_a_manifest_that_is_a_folder_is_refused_and_not_listed(store: Store) -> None:
    store.manifest_path().unlink()
    store.manifest_path().mkdir()
    assert refused("ollama:m") == "manifest: is a folder, not a file"
    assert list_models() == []


def test_nothing_outside_a_store_is_opened(tmp_path: Path, gguf: bytes, run_child: RunChild) -> None:
    """Oracle: the interpreter's own audit events of every file and folder that is opened."""
    stores = []
    for i, (spoil, _) in enumerate([*DAMAGES.values(), *HIDDEN.values()]):
        store = Store(tmp_path / str(i) / "store", gguf)
        (store.outside / "secret").write_bytes(gguf)
        spoil(store)
        stores.append(str(store.folder))
    run_child(
        f"""
        from llamacppshim import hub, sources
        opened = []
        watching = False
        def audit(event, arguments):
            if watching and event in ("open", "os.scandir", "os.listdir") and not isinstance(arguments[0], int):
                opened.append(os.path.realpath(os.fsdecode(arguments[0])))
        sys.addaudithook(audit)
        hub._cache_dir = lambda: "/nowhere"
        names = ["m", "M", "m:other", "x", "../m", "ollama.com/library/m", "../../outside/secret", "a/../m:.."]
        for store in {stores!r}:
            os.environ["OLLAMA_MODELS"] = store
            inside = os.path.realpath(store)
            opened.clear()
            watching = True
            for name in names:
                kind, _ = refusal(sources.resolve_model, "ollama:" + name, verify=True)
                assert kind == "ModelLoadError", (store, name)
            sources.list_models()
            watching = False
            assert opened, store
            assert [path for path in opened if os.path.commonpath([inside, path]) != inside] == [], store
        """
    )


def test_a_manifest_with_any_byte_changed_is_an_error_or_the_same_file(store: Store) -> None:
    store.layers(store.model, layer("template", ZEROS), layer("projector", ZEROS))
    data = store.manifest_path().read_bytes()
    random = Random(0)
    n_refused = 0
    for _ in range(1000):
        start, length = random.randrange(len(data)), random.choice([0, 1, 1, 5])
        new = random.choice([b"", b"0", b'"', b"[{", b"../", random.randbytes(2)])
        store.write(data[:start] + new + data[start + length :])
        try:
            source = resolve_model("ollama:m")
        except ModelLoadError as error:
            n_refused += 1
            assert str(error).isprintable() and len(str(error)) < 1300
        else:
            assert (source.path, source.digest) == (store.model_blob.resolve(), store.digest[7:])
    assert 500 < n_refused < 1000


def test_names_that_ollama_would_not_accept_are_not_listed(store: Store) -> None:
    for place in (f"{PUBLIC}/library/m/.DS_Store", f"{PUBLIC}/a.b/m/t", f"{PUBLIC}/library/m/\n", "short/place"):
        store.layers(store.model, place=place)
    (store.folder / "manifests" / ".DS_Store").write_bytes(b"")
    (store.folder / "manifests" / "loop").symlink_to("loop")
    source = ModelSource(store.model_blob.resolve(), store.digest[7:], "ollama")
    assert list_models() == [FoundModel("ollama:m:latest", source, len(store.gguf))]


def test_every_listed_name_means_what_was_listed(store: Store) -> None:
    for place in CASES.values():
        if len(place[0]) < 300:
            store.layers(store.model, place="/".join(place))
    found = list_models()
    assert len(found) == len({*CASES.values()})  # all but the long one, and m:latest, which no case has
    for model in found:
        assert resolve_model(model.spec) == model.source


# Hugging Face


@pytest.fixture
def hub() -> Any:
    return pytest.importorskip("huggingface_hub")


REVISIONS = ("1" * 40, "2" * 40)


class Cache:
    """A cache folder as huggingface_hub lays it out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def repo(self, repo: str) -> Path:
        return self.folder / f"models--{repo.replace('/', '--')}"

    def add(self, repo: str, name: str, data: bytes, revision: str = REVISIONS[0], main: bool = True) -> Path:
        digest = hashlib.sha256(data).hexdigest()
        blob = self.repo(repo) / "blobs" / digest
        link = self.repo(repo) / "snapshots" / revision / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
        if main:
            (self.repo(repo) / "refs").mkdir(exist_ok=True)
            (self.repo(repo) / "refs" / "main").write_text(revision)
        return link


@pytest.fixture
def cache(tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(hub_module, "_cache_dir", lambda: str(tmp_path / "hub"))
    return Cache(tmp_path / "hub")


def test_a_cached_file_is_used_where_it_is(cache: Cache, gguf: bytes) -> None:
    link = cache.add("org/repo", "sub/model.Q4_0.gguf", gguf)
    cache.add("org/repo", "README.md", b"text")
    source = ModelSource(link, hashlib.sha256(gguf).hexdigest(), "hf")
    assert resolve_model("hf:org/repo") == source
    assert resolve_model("hf:org/repo:sub/model.Q4_0.gguf", verify=True) == source
    assert list_models() == [FoundModel("hf:org/repo:sub/model.Q4_0.gguf", source, len(gguf))]


def test_one_of_several_files_must_be_named(cache: Cache, gguf: bytes) -> None:
    cache.add("org/repo", "b.gguf", gguf)
    link = cache.add("org/repo", "a.gguf", gguf + b"\0")
    assert refused("hf:org/repo") == "has 2 GGUF files, name one of them: a.gguf, b.gguf"
    assert refused("hf:org/repo", download=True) == "has 2 GGUF files, name one of them: a.gguf, b.gguf"
    assert resolve_model("hf:org/repo:a.gguf").path == link


def test_a_projector_is_not_the_model(cache: Cache, gguf: bytes) -> None:
    link = cache.add("org/repo", "model.gguf", gguf)
    cache.add("org/repo", "mmproj-model-f16.gguf", gguf)
    source = resolve_model("hf:org/repo")
    assert (source.path, source.notes) == (link, ("projector mmproj-model-f16.gguf not used",))
    assert [found.spec for found in list_models()] == ["hf:org/repo:model.gguf"]


def test_a_cached_split_model_is_its_first_part(cache: Cache, tiny_models: dict[str, Path]) -> None:
    """Oracle: llama.cpp opens it."""
    names = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    parts = [tiny_models[f"tiny-split-0000{i}-of-00002"].read_bytes() for i in (1, 2)]
    links = [cache.add("org/repo", name, data) for name, data in zip(names, parts, strict=True)]
    source = resolve_model("hf:org/repo")
    assert source == ModelSource(links[0], None, "hf")
    Model(source.path).close()
    assert [found.n_bytes for found in list_models()] == [sum(map(len, parts))]
    assert refused(f"hf:org/repo:{names[1]}") == f"is part 2 of 2: give the first, {names[0]}"
    links[1].unlink()
    assert refused("hf:org/repo") == f"part {names[1]}: no such file"


def test_the_main_revision_comes_first_and_others_still_count(cache: Cache, gguf: bytes) -> None:
    old = cache.add("org/repo", "model.gguf", gguf, REVISIONS[0])
    other = cache.add("org/repo", "other.gguf", gguf, REVISIONS[0])
    new = cache.add("org/repo", "model.gguf", gguf + b"\0", REVISIONS[1])
    assert resolve_model("hf:org/repo:model.gguf").path == new
    assert resolve_model("hf:org/repo:other.gguf").path == other
    assert [found.spec for found in list_models()] == ["hf:org/repo:model.gguf", "hf:org/repo:other.gguf"]
    (cache.repo("org/repo") / "refs" / "main").write_text(REVISIONS[0])
    os.utime(old.resolve(), (1, 1))  # which is older, but main
    assert resolve_model("hf:org/repo:model.gguf").path == old
    assert [found.source.path for found in list_models() if found.source] == [old, other]
    (cache.repo("org/repo") / "refs" / "main").unlink()
    assert [found.source.path for found in list_models() if found.source] == [new, other]


def test_a_file_that_is_no_link_has_no_digest(cache: Cache, gguf: bytes) -> None:
    """As on Windows without links."""
    link = cache.add("org/repo", "model.gguf", gguf)
    link.unlink()
    link.write_bytes(gguf)
    assert resolve_model("hf:org/repo", verify=True) == ModelSource(link, None, "hf")


def test_what_the_cache_lacks_is_refused_without_the_network(cache: Cache, gguf: bytes) -> None:
    assert refused("hf:org/repo") == f"not in the cache {cache.folder}; download=True obtains it"
    cache.add("org/repo", "config.json", b"{}")
    assert refused("hf:org/repo") == f"not in the cache {cache.folder}; download=True obtains it"
    cache.add("org/repo", "mmproj.gguf", gguf)
    assert refused("hf:org/repo") == "has no GGUF model"
    assert refused("hf:org/repo:x.gguf") == f"not in the cache {cache.folder}; download=True obtains it"
    shutil.rmtree(cache.folder)
    assert refused("hf:org/repo") == f"not in the cache {cache.folder}; download=True obtains it"
    assert list_models() == []


def test_a_damaged_cache_says_so(cache: Cache, gguf: bytes) -> None:
    good = cache.add("org/good", "model.gguf", gguf)
    cache.add("org/bad", "model.gguf", gguf)
    whole = cache.add("org/bad", "whole.gguf", gguf + b"\0")
    cache.add("org/bad-not", "weights.bin", gguf)
    for repo in ("org/bad", "org/bad-not"):
        (cache.repo(repo) / "blobs" / hashlib.sha256(gguf).hexdigest()).unlink()
    assert resolve_model("hf:org/good").path == good
    assert resolve_model("hf:org/bad:whole.gguf").path == whole
    for spec in ("hf:org/bad", "hf:org/bad:model.gguf"):
        assert refused(spec).startswith("its cache is damaged: Blob missing")
    bad, fine = list_models()
    assert (bad.spec, bad.source, fine.spec) == ("hf:org/bad", None, "hf:org/good:model.gguf")
    assert bad.reason.startswith("Blob missing")


def test_a_cached_file_that_is_damaged_is_refused_and_listed(cache: Cache, gguf: bytes) -> None:
    link = cache.add("org/repo", "model.gguf", gguf)
    link.resolve().write_bytes(gguf + b"\0")
    assert resolve_model("hf:org/repo").digest == hashlib.sha256(gguf).hexdigest()
    assert refused("hf:org/repo", verify=True).startswith("damaged: its SHA-256 is ")
    link.resolve().write_bytes(b"<html>")
    assert refused("hf:org/repo") == "is not a GGUF file: it begins with b'<htm'"
    reason = "is not a GGUF file: it begins with b'<htm'"
    assert list_models() == [FoundModel("hf:org/repo:model.gguf", None, reason=reason)]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("", "'' is not ORG/REPO"),
        ("repo", "'repo' is not ORG/REPO"),
        ("a/b/c", "'a/b/c' is not ORG/REPO"),
        ("../b", "'../b' is not ORG/REPO"),
        ("a/..", "'a/..' is not ORG/REPO"),
        ("a--b/c", "'a--b/c' is not ORG/REPO"),
        ("a/b:", "'' is not a file"),
        ("a/b:/etc/passwd", "'/etc/passwd' is not a file"),
        ("a/b:../x.gguf", "'../x.gguf' is not a file"),
        ("a/b:x/./y", "'x/./y' is not a file"),
        ("a/b:x\\y", r"'x\\y' is not a file"),
        ("a/b:x\n", r"'x\n' is not a file"),
    ],
)
def test_a_name_that_is_none_of_the_hub_is_refused(name: str, wrong: str) -> None:
    assert refused(f"hf:{name}").startswith(wrong)


def test_without_the_package_the_error_names_the_extra(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedFeatureError) as caught:
        resolve_model("hf:org/repo")
    assert str(caught.value) == "hf: needs the package huggingface_hub: pip install 'llamacppshim[hf]'"
    assert caught.value.feature == "hf"
    assert [found.spec for found in list_models()] == ["ollama:m:latest"]


@pytest.mark.parametrize("has_package", [True, False])
def test_the_list_of_models_says_where_it_looked(has_package: bool, tmp_path: Path) -> None:
    if has_package:
        pytest.importorskip("huggingface_hub")
    block = "" if has_package else "sys.modules['huggingface_hub'] = None; "
    code = f"import sys; {block}sys.argv[1:] = ['models']; from llamacppshim.cli import main; main()"
    environment = {**os.environ, "OLLAMA_MODELS": "/nowhere", "HF_HUB_CACHE": "/nothing", "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, check=True)
    needs = b"the Hugging Face cache was not looked in: that needs pip install 'llamacppshim[hf]'\n"
    looked = b"/nowhere and /nothing" if has_package else b"/nowhere"
    assert (done.stdout, done.stderr) == (b"none; looked in " + looked + b"\n", b"" if has_package else needs)


def test_the_cache_is_found_as_the_package_finds_it_and_the_network_is_not_touched(
    cache: Cache, gguf: bytes, run_child: RunChild
) -> None:
    link = cache.add("org/repo", "model.gguf", gguf)
    run_child(
        f"""
        os.environ.update(HF_HUB_CACHE={str(cache.folder)!r}, HF_HUB_OFFLINE="1", OLLAMA_MODELS="/nowhere")
        from llamacppshim import sources
        def audit(event, arguments):
            if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
                os._exit(3)
        sys.addaudithook(audit)
        assert str(sources.resolve_model("hf:org/repo").path) == {str(link)!r}
        assert [found.spec for found in sources.list_models()] == ["hf:org/repo:model.gguf"]
        for name in ("hf:org/none", "hf:org/repo:none.gguf"):
            assert refusal(sources.resolve_model, name)[0] == "ModelLoadError"
            kind, text = refusal(sources.resolve_model, name, download=True)
            assert kind == "ModelLoadError" and ": cannot be downloaded: " in text, text
        """
    )


@pytest.fixture
def remote(cache: Cache, hub: Any, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A repository on the hub, org/repo, from which the package seems to download."""
    files = {"model.gguf": gguf}

    def hf_hub_download(repo: str, name: str, *, tqdm_class: type) -> str:
        data = files[name]
        # Of large files the package counts what was received, and what was written some time later.
        options = {"total": len(data), "initial": 0, "unit": "B", "unit_scale": True, "desc": name}
        with tqdm_class(**options) as received, tqdm_class(**options) as written:
            sizes = [len(data[start : start + 1000]) for start in range(0, len(data), 1000)]
            for now, before in zip([*sizes, 0], [0, *sizes], strict=True):
                received.update(now)
                written.update(before)
        return str(cache.add(repo, name, data))

    monkeypatch.setattr(hub, "list_repo_files", lambda repo: [*files, "README.md"], raising=False)
    monkeypatch.setattr(hub, "hf_hub_download", hf_hub_download, raising=False)
    return files


def test_a_model_is_downloaded_when_asked_once_and_silently(
    remote: dict[str, bytes], gguf: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    source = resolve_model("hf:org/repo", download=True, progress=lambda done, total: seen.append((done, total)))
    assert source.digest == hashlib.sha256(gguf).hexdigest()
    assert seen == sorted(set(seen)) and seen[-1] == (len(gguf), len(gguf)) and len(seen) > 10
    remote.clear()
    assert resolve_model("hf:org/repo", download=True) == resolve_model("hf:org/repo:model.gguf") == source
    assert capfd.readouterr() == ("", "")


def test_all_parts_of_a_split_model_are_downloaded(remote: dict[str, bytes], gguf: bytes) -> None:
    remote.clear()
    remote.update({f"q4/m-0000{i}-of-00003.gguf": gguf + bytes([i]) for i in (1, 2, 3)})
    assert resolve_model("hf:org/repo", download=True).path.name == "m-00001-of-00003.gguf"
    assert resolve_model("hf:org/repo:q4/m-00001-of-00003.gguf").path.parent.name == "q4"


def test_a_download_that_fails_says_why(remote: dict[str, bytes], hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote["second.gguf"] = b"GGUF"
    assert refused("hf:org/repo", download=True) == "has 2 GGUF files, name one of them: model.gguf, second.gguf"
    for failure in (OSError("no network\nsecond line"), ValueError("no network"), RuntimeError("no network")):

        def fail(*_: object, failure: Exception = failure, **__: object) -> str:
            raise failure

        monkeypatch.setattr(hub, "hf_hub_download", fail)
        assert refused("hf:org/repo:model.gguf", download=True) == "cannot be downloaded: no network"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_the_callback_raises_comes_out(remote: dict[str, bytes], kind: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        resolve_model("hf:org/repo", download=True, progress=stop)


def test_the_package_has_what_is_asked_of_it(hub: Any) -> None:
    """Names and parameters that the tests above have replaced."""
    assert "tqdm_class" in inspect.signature(hub.hf_hub_download).parameters
    assert "cache_dir" in inspect.signature(hub.scan_cache_dir).parameters
    assert callable(hub.list_repo_files)
    assert isinstance(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE, str)


def test_no_part_of_the_package_is_imported_before_it_is_needed(run_child: RunChild) -> None:
    run_child(
        """
        from llamacppshim import sources
        os.environ["OLLAMA_MODELS"] = "/nowhere"
        refusal(sources.resolve_model, "ollama:m")
        assert not [name for name in sys.modules if name.startswith("huggingface_hub")]
        """
    )


# The command line


def test_the_command_line_lists_and_takes_them(tiny_models: dict[str, Path], tmp_path: Path, store: Store) -> None:
    main = [sys.executable, "-c", "from llamacppshim.cli import main; main()"]
    data = tiny_models["tiny-llama"].read_bytes()
    other = {**store.model, "digest": store.blob(data), "size": len(data)}
    store.layers(other, place="registry.ollama.ai/library/other/1b")
    store.layers(store.model, place="registry.ollama.ai/library/gone/latest")
    store.model_blob.unlink()

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*main, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    listed = start("models")
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "MB" in lines["ollama:other:1b"]
    assert "missing" in lines["ollama:gone:latest"]
    (tmp_path / "text").write_text("The quick brown fox.\n")
    done = start("snapshot", "save", "text", "out.lcs", "--model", "ollama:other:1b", "--n-ctx", "256")
    assert (done.returncode, done.stderr) == (0, "")
    done = start("snapshot", "save", "text", "out.lcs", "--model", "ollama:gone", "--n-ctx", "256")
    assert done.returncode == 1
    assert done.stderr.startswith("llamacppshim: ollama:gone: ") and done.stderr.count("\n") == 1
