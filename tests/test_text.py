"""Text to tokens piece by piece, against the whole text at once."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from building import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacppshim import Model
from llamacppshim.errors import ManifestMismatchError
from llamacppshim.text import PIECE_BYTES, TAIL_BYTES, Tokenizer

VOCABULARIES = ["tiny-llama", "tiny-spm"]
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "llamacppshim").glob("*.py")))
WORDS = [
    "a",
    "word",
    "words",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "日本",
    "🙂",
    "1",
    "23",
    "'s",
    "!=",
    "->",
    "def ",
    "x_y",
    ".",
    "\r\n",
]


def whole(model: Model, text: bytes, parse_special: bool = False) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=parse_special).tolist()


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(0, 400), cut=st.floats(0, 1))
def test_a_text_after_its_head_is_as_in_the_whole(
    loaded: dict[str, Model], name: str, seed: int, n: int, cut: float
) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice(WORDS) for _ in range(n))
    at = int(cut * len(text))
    head, rest = text[:at].encode(), text[at:].encode()
    model, tokenizer = loaded[name], Tokenizer(loaded[name])
    before = model.tokenize(head, add_special=False, parse_special=False)
    joint = tokenizer.follow(head, before, rest, False)
    assert [*before[: len(before) - joint.n_back], *joint.tokens] == whole(model, head + rest)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_long_text_with_an_edit_is_as_the_whole_and_mostly_cached(loaded: dict[str, Model], name: str) -> None:
    model, tokenizer = loaded[name], Tokenizer(loaded[name])
    text = (SOURCES * (6 * PIECE_BYTES // len(SOURCES) + 1)).encode()
    tokens, starts = tokenizer.segments([text], False)
    assert starts == [0]
    assert tokens.tolist() == whole(model, text)
    first = tokenizer.tokenized_bytes
    assert first >= len(text)
    assert tokenizer.segments([text], False)[0].tolist() == tokens.tolist()
    assert tokenizer.tokenized_bytes == first
    at = text.rindex(b"\ndef ")
    edited = text[: at + 1] + b"# an edit\n" + text[at + 1 :]
    assert tokenizer.segments([edited], False)[0].tolist() == whole(model, edited)
    assert tokenizer.tokenized_bytes - first < 3 * PIECE_BYTES


@pytest.mark.parametrize("name", VOCABULARIES)
def test_segments_begin_where_their_text_begins(loaded: dict[str, Model], name: str) -> None:
    model, tokenizer = loaded[name], Tokenizer(loaded[name])
    texts = [line.encode() for line in re.split(r"(?<=\n)(?=[A-Za-z])", SOURCES)[:200]]
    tokens, starts = tokenizer.segments(texts, False)
    assert tokens.tolist() == whole(model, b"".join(texts))
    for text, begin, end in zip(texts, starts, [*starts[1:], len(tokens)], strict=True):
        shown = b"".join(model.token_piece(token) for token in tokens[begin:end])
        assert shown.lstrip(b" ") == text.lstrip(b" ")
    assert tokenizer.segments([], False)[0].size == 0
    assert tokenizer.segments([b"", b""], False)[1] == [0, 0]


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_texts_that_begin_like_those_before_join_as_if_they_were_the_first(
    loaded: dict[str, Model], name: str, seed: int
) -> None:
    draw = random.Random(seed)
    tokenizer = Tokenizer(loaded[name])
    texts: list[bytes] = []
    for _ in range(8):
        del texts[draw.randint(0, len(texts)) :]
        texts += ["".join(draw.choices(WORDS, k=draw.randint(0, 4))).encode() for _ in range(draw.randint(0, 6))]
        parse_special = draw.random() < 0.2
        tokens, starts = tokenizer.joined(texts, parse_special)
        expected, expected_starts = Tokenizer(loaded[name]).joined(texts, parse_special)
        assert tokens.tolist() == expected.tolist()
        assert starts == expected_starts
        tokens[:] = -1  # the caller's own
        starts.clear()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_token_over_a_boundary_is_refused_by_name(loaded: dict[str, Model], name: str) -> None:
    with pytest.raises(ManifestMismatchError, match="segments 1 and 2: a token reaches over") as caught:
        Tokenizer(loaded[name]).segments([b"first\n", b"hello wor", b"ld\n"], False)
    assert caught.value.field == "segments[2].token_start"


def test_special_tokens_are_found_in_pieces_too(loaded: dict[str, Model]) -> None:
    model = loaded["tiny-llama"]
    special = model.token_piece(model.eos)
    head = (b"line\n" * 400) + special + b"\n"
    rest = b"word" + special + b" end"
    tokenizer = Tokenizer(model)
    before = model.tokenize(head, add_special=False, parse_special=True)
    joint = tokenizer.follow(head, before, rest, True)
    assert [*before[: len(before) - joint.n_back], *joint.tokens] == whole(model, head + rest, True)
    assert model.eos in joint.tokens
    plain = model.tokenize(head, add_special=False, parse_special=False)
    assert model.eos not in tokenizer.follow(head, plain, rest, False).tokens


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("text", ["word", " word", "\nword", "", "日本", "."])
def test_text_after_tokens_gets_no_space_of_its_own(loaded: dict[str, Model], name: str, text: str) -> None:
    model, tokenizer = loaded[name], Tokenizer(loaded[name])
    before = model.tokenize("Some generated text, then", add_special=True, parse_special=False)
    after = tokenizer.after(before, text.encode(), False)
    both = model.detokenize(np.concatenate([before, after]), remove_special=True)
    assert both.removeprefix(b" ") == b"Some generated text, then" + text.encode()


def test_a_head_without_lines_is_taken_as_a_whole(loaded: dict[str, Model]) -> None:
    for name in VOCABULARIES:
        model, tokenizer = loaded[name], Tokenizer(loaded[name])
        head = ("é日" * (TAIL_BYTES * 12)).encode()
        before = model.tokenize(head, add_special=False, parse_special=False)
        joint = tokenizer.follow(head, before, "é more".encode(), False)
        assert [*before[: len(before) - joint.n_back], *joint.tokens] == whole(model, head + "é more".encode())


def test_the_cache_stays_within_its_bytes(loaded: dict[str, Model]) -> None:
    tokenizer = Tokenizer(loaded["tiny-llama"], max_bytes=20_000)
    for i in range(50):
        tokenizer.segments([f"text number {i}\n".encode() * 50], False)
    assert tokenizer._cache_bytes <= 20_000
    assert 1 <= len(tokenizer._cache) < 50
