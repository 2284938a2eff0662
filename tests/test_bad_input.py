"""Bad input of every kind: a typed error of one line, nothing lost, and the handles still work. Files that a reader
could die of are read in a child process."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunChild

from llamacppshim import (
    Context,
    InvalidArgumentError,
    LlamaCppShimError,
    Model,
    ModelLoadError,
    OutOfRangeError,
    Sampler,
    hash_bytes,
    live_counts,
)

# In a child: loads a damaged file; what it does not refuse it must be able to use.
TRY = """
def attempt(path):
    try:
        model = Model(path, use_mmap=False)
    except (ModelLoadError, OutOfMemoryError) as error:
        assert "\\n" not in str(error) and str(error), repr(error)
        if isinstance(error, ModelLoadError):
            assert error.path == str(path) and error.reason, repr(error)
        return error
    with model:
        tokens = model.tokenize("still here", add_special=False, parse_special=False)
        assert model.detokenize(tokens)
        with Context(model, n_ctx=256, n_threads=1) as context:
            context.decode([1, 2, 3])
    return None
"""


def refused(path: Path | str | bytes) -> ModelLoadError:
    before = live_counts()
    with pytest.raises(ModelLoadError) as caught:
        Model(path)
    assert live_counts() == before
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert caught.value.path == os.fsdecode(path)
    assert caught.value.reason in str(caught.value)
    return caught.value


def test_a_missing_file_a_folder_and_an_empty_path_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "missing.gguf").reason.lower()
    assert "folder" in refused(tmp_path).reason
    refused("")
    refused("x" * 5000)
    refused(os.fsencode(tmp_path) + b"/\xff\xfe.gguf")
    with pytest.raises(ModelLoadError, match="NUL"):
        Model("a\0b")
    with pytest.raises(ModelLoadError):
        Model("\ud800.gguf")


def test_a_file_that_may_not_be_read_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "locked.gguf"
    path.write_bytes(tiny_llama.read_bytes()[:1000])
    path.chmod(0)
    refused(path)  # for root, who may read it, it is short


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"\0" * 4096, b"GGML" * 100, b"hello\n"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (0, b"GGUX"),
        (0, b"FUGG"),
        (4, struct.pack("<I", 0)),
        (4, struct.pack("<I", 1)),
        (4, struct.pack("<I", 4)),
        (4, struct.pack(">I", 3)),
        (8, struct.pack("<Q", 2**64 - 1)),
        (8, struct.pack("<Q", 2**40)),
        (16, struct.pack("<Q", 2**64 - 1)),
        (16, struct.pack("<Q", 2**31)),
        (24, struct.pack("<Q", 2**63)),
        (24, struct.pack("<Q", 2**31)),
    ],
)
def test_a_wrong_version_and_huge_counts_are_refused(
    tiny_llama: Path, tmp_path: Path, offset: int, content: bytes
) -> None:
    raw = bytearray(tiny_llama.read_bytes())
    raw[offset : offset + len(content)] = content
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    refused(path)


def test_a_file_cut_anywhere_is_refused(tiny_llama: Path, tmp_path: Path, run_child: RunChild) -> None:
    """In one child, at edges of the header, of the tensors, and at the last byte."""
    run_child(
        TRY,
        """
        raw = open(TINY["tiny-llama"], "rb").read()
        cuts = [*range(0, 600, 23), *range(1000, len(raw), len(raw) // 40), len(raw) - 4096, len(raw) - 33]
        for cut in cuts:
            open("cut.gguf", "wb").write(raw[:cut])
            assert isinstance(attempt("cut.gguf"), ModelLoadError), cut
        assert set(live_counts().values()) == {0}
        """,
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-hybrid", "tiny-bert"])
def test_a_file_with_a_flipped_bit_is_refused_or_works(run_child: RunChild, name: str) -> None:
    """No flip may end the process: the child ends well, or this fails with its last words."""
    run_child(
        TRY,
        f"""
        name = {name!r}
        raw = bytearray(open(TINY[name], "rb").read())
        import random
        generator = random.Random(7)
        places = [generator.randrange(24, 3000) for _ in range(60)]             # keys and their values
        places += [generator.randrange(3000, len(raw)) for _ in range(5)]       # vocabulary, tensors
        for i, place in enumerate(places):
            bit = 1 << generator.randrange(8)
            raw[place] ^= bit
            open("flip.gguf", "wb").write(raw)
            raw[place] ^= bit
            try:
                attempt("flip.gguf")
            except LlamaCppShimError as error:     # loads, but cannot be used: a context or a tokenizer says so
                assert "\\n" not in str(error)
        assert set(live_counts().values()) == {{0}}
        """,
        timeout=900,
    )


def test_what_is_no_regular_file_is_refused_without_waiting(run_child: RunChild) -> None:
    run_child(
        TRY,
        """
        os.mkfifo("pipe.gguf")
        for path in ("/dev/null", "/dev/zero", "pipe.gguf", "/proc/self/mem", "/"):
            assert isinstance(attempt(path), ModelLoadError), path
        """,
        timeout=60,
    )


def test_a_split_model_without_its_other_part_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    first, second = (tiny_models[f"tiny-split-0000{i}-of-00002"] for i in (1, 2))
    alone = tmp_path / first.name
    alone.write_bytes(first.read_bytes())
    refused(alone)
    refused(second)
    (tmp_path / second.name).write_bytes(second.read_bytes()[:-100])
    refused(alone)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    refused(renamed)


# Text

TEXTS = {
    "nuls": "a\0b\0\0",
    "only nul": "\0",
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "combining": "e" + "\u0301" * 5000,
    "right to left": "\u202eabc\u202c",
    "long word": "x" * 200_000,
    "long letters": "abcdefghij" * 20_000,
    "long spaces": " " * 200_000,
    "long newlines": "\n" * 100_000,
    "emoji": "👩‍👩‍👧‍👦" * 1000,
}


@pytest.mark.parametrize("text", list(TEXTS.values()), ids=list(TEXTS))
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-spm"])
def test_strange_texts_come_back_whole(loaded: dict[str, Model], name: str, text: str) -> None:
    model = loaded[name]
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    assert model.detokenize(tokens) == text.encode()


@pytest.mark.parametrize("raw", [b"\xff", b"\xf0\x9f\xa6", b"ok \xc3", b"\x80\x80", b"\xed\xa0\x80", bytes(range(256))])
def test_bytes_that_are_half_of_something_are_tokenised_without_harm(loaded: dict[str, Model], raw: bytes) -> None:
    for name in ("tiny-llama", "tiny-spm", "tiny-swa", "tiny-bert"):
        tokens = loaded[name].tokenize(raw, add_special=False, parse_special=True)
        assert ((tokens >= 0) & (tokens < loaded[name].n_vocab)).all()


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udc80" * 100])
def test_a_lone_surrogate_is_refused_with_its_place(model: Model, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="lone surrogate") as caught:
        model.tokenize(text, add_special=False, parse_special=False)
    assert caught.value.actual == len(text) - len(text.lstrip("ok "))


@pytest.mark.parametrize("text", [None, 5, ["a"], object(), 1.5])
def test_what_is_no_text_is_a_type_error(model: Model, text: Any) -> None:
    with pytest.raises(TypeError):
        model.tokenize(text, add_special=False, parse_special=False)


def test_special_texts_in_a_text_need_the_caller_s_word(model: Model) -> None:
    with pytest.raises(TypeError):
        model.tokenize("x")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        model.tokenize("x", True, True)  # type: ignore[call-arg]


# Numbers


class Index:
    """An integer that misbehaves while it is read."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def __index__(self) -> Any:
        return self.action()


def test_an_integer_that_misbehaves_while_it_is_read_changes_nothing(model: Model) -> None:
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2])
        outcomes: list[str] = []

        def meddle(call: Any) -> Any:
            def action() -> int:
                try:
                    call()
                except LlamaCppShimError as error:
                    outcomes.append(type(error).__name__)
                return 1

            return Index(action)

        growing: list[Any] = [1, 2, 3]
        growing.append(Index(lambda: 4 + len([growing.pop() for _ in range(4)]) - 4))
        context.decode(growing)
        context.decode([meddle(context.close), meddle(lambda: context.decode([1])), meddle(context.logits)])
        assert outcomes == ["BusyError"] * 3

        def fail() -> int:
            raise KeyError("own")

        for call in (
            lambda: context.decode([1, Index(fail)]),
            lambda: context.logits([Index(fail)]),
            lambda: context.seq_rm(Index(fail)),
            lambda: model.detokenize([Index(fail)]),
            lambda: context.decode([1], seq_id=Index(fail)),
        ):
            with pytest.raises(KeyError, match="own"):
                call()
        with pytest.raises(TypeError):
            context.decode([Index(lambda: "1")])
        assert context.seq_pos_max(0) == 8
        context.decode([1])


def test_sizes_just_outside_and_far_outside_are_named_with_their_limit(model: Model) -> None:
    for params, name in (
        ({"n_ctx": -1}, "n_ctx"),
        ({"n_batch": 2**32}, "n_batch"),
        ({"n_ubatch": -(2**63)}, "n_ubatch"),
        ({"n_seq_max": 10**100}, "n_seq_max"),
        ({"n_outputs_max": -5}, "n_outputs_max"),
    ):
        with pytest.raises(OutOfRangeError) as caught:
            Context(model, **params)  # type: ignore[arg-type]
        value = next(iter(params.values()))
        assert f"{name} {value} is outside" in str(caught.value)
        assert caught.value.field == name


def test_the_handles_still_work_after_a_long_row_of_refusals(model: Model) -> None:
    """Oracle: the answer before them."""
    with Context(model, n_ctx=256, n_threads=1) as context, Sampler(model) as sampler:
        context.decode([1, 2, 3])
        expected = context.logits()
        token = sampler.sample(context)
        for _ in range(50):
            for call in (
                lambda: context.decode([-1]),
                lambda: context.decode([1], pos=77),
                lambda: context.decode([1], seq_id=9),
                lambda: context.state_load(b"x"),
                lambda: context.logits([99]),
                lambda: sampler.sample(context, 99),
                lambda: sampler.accept(-1),
                lambda: Sampler(model, grammar="("),
                lambda: Model("/nowhere"),
            ):
                with pytest.raises(LlamaCppShimError):
                    call()
        np.testing.assert_array_equal(context.logits(), expected)
        assert sampler.sample(context) == token


def test_hash_bytes_is_xxh3_and_takes_any_buffer() -> None:
    """Oracle: the published values of XXH3-64 with seed 0."""
    assert hash_bytes(b"") == 0x2D06800538D394C2
    assert hash_bytes(b"a") == 0xE6C632B61E964E1F
    assert hash_bytes(np.arange(100, dtype=np.uint8)) == hash_bytes(bytes(range(100)))
    assert hash_bytes(bytes(10**6)) != hash_bytes(bytes(10**6 - 1))
    with pytest.raises(InvalidArgumentError):
        hash_bytes(np.zeros((4, 4))[:, ::2])
    with pytest.raises(TypeError):
        hash_bytes("text")  # type: ignore[arg-type]
