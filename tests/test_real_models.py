"""Two trained models, one of attention and one with a sliding window: tokenizers, sense, and warm against cold.

One thread each: threads that wait for each other crawl on a busy machine, and nothing here is about them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from building import ROOT

from llamacppshim import ChatTemplate, Context, Model, Sampler

TEXTS = [
    "The capital of France is",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Größe, naïve, 東京, 🙂🏽, \u0440\u0443\u0441\u0441\u043a\u0438\u0439\n\n\ttabs  and   spaces ",
    " leading space",
    "<|im_end|><bos><eos> is text",
]


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(request.getfixturevalue(request.param)) as model:
        yield model


def greedy(ctx: Context, model: Model, n: int) -> list[int]:
    """Up to n tokens after the last decode."""
    tokens: list[int] = []
    with Sampler(model) as sampler:
        while len(tokens) < n and not model.is_eog(token := sampler.sample(ctx)):
            tokens.append(token)
            ctx.decode([token])
    return tokens


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_tokenising(model: Model, text: str) -> None:
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    assert model.detokenize(tokens).decode() == text
    assert not any(model.is_control(int(token)) for token in tokens)


def test_gemma_begins_with_one_bos_and_smollm2_with_none(smollm2: Path, gemma3: Path) -> None:
    for path, n_bos in ((gemma3, 1), (smollm2, 0)):
        with Model(path) as model, ChatTemplate(model) as template:
            plain = model.tokenize("Hello", add_special=False, parse_special=False).tolist()
            whole = model.tokenize("Hello", add_special=True, parse_special=False).tolist()
            assert whole == [model.bos] * n_bos + plain
            # A template writes its own BOS; the text must not get a second one.
            text = template.render([{"role": "user", "content": "Hello"}]).text
            chat = model.tokenize(text, add_special=True, parse_special=True).tolist()
            assert (chat[0] == model.bos and chat.count(model.bos) == 1) or model.metadata[
                "general.architecture"
            ] == "llama"


def test_the_kinds_of_memory_are_told_apart(smollm2: Path, gemma3: Path) -> None:
    for path, expected in ((smollm2, ("attention", 0)), (gemma3, ("swa", 512))):
        with Model(path) as model:
            assert (model.memory_kind, model.n_swa) == expected


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [("smollm2", "The capital of France is", b"Paris"), ("gemma3", "The opposite of hot is", b"cold")],
)
def test_what_is_asked_is_known(name: str, prompt: str, expected: bytes, request: pytest.FixtureRequest) -> None:
    with Model(request.getfixturevalue(name)) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode(model.tokenize(prompt, add_special=True, parse_special=False))
        assert expected in model.detokenize(greedy(ctx, model, 8))


def test_a_question_in_chat_form_is_answered_and_ended(smollm2: Path) -> None:
    with Model(smollm2) as model, ChatTemplate(model) as template, Context(model, n_ctx=512, n_threads=1) as ctx:
        text = template.render([{"role": "user", "content": "What is the capital city of Germany?"}]).text
        ctx.decode(model.tokenize(text, add_special=True, parse_special=True))
        answer = greedy(ctx, model, 100)
        assert b"Berlin" in model.detokenize(answer)
        assert len(answer) < 100


def test_a_changed_suffix_on_a_warm_prefix_gives_what_a_cold_run_gives(smollm2: Path) -> None:
    """Oracle: a fresh context that decodes the same pieces. So equal to the bit: near ties cannot hide a wrong cell."""
    with Model(smollm2) as model, Context(model, n_ctx=1024, n_threads=1) as warm:
        text = "The planets, from the sun outwards, are named as follows. " * 12
        prefix = model.tokenize(text, add_special=True, parse_special=False).tolist()
        warm.decode(prefix, logits="none")
        for question in ("The first of them is", "The largest of them is", "We live on"):
            suffix = model.tokenize(question, add_special=False, parse_special=False).tolist()
            assert warm.seq_rm(0, len(prefix), -1)
            warm.decode(suffix)
            with Context(model, n_ctx=1024, n_threads=1) as cold:
                cold.decode(prefix, logits="none")
                cold.decode(suffix)
                np.testing.assert_array_equal(warm.logits(), cold.logits())
                assert greedy(warm, model, 24) == greedy(cold, model, 24)


@pytest.mark.usefixtures("smollm2")
def test_the_readme_example_runs_and_reads_its_prefix_once(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    assert re.fullmatch(r"0 reused, [1-9]\d* read:  Berlin\.", first)
    assert re.fullmatch(r"[1-9]\d* reused, 0 read:  Madrid\.", second)
