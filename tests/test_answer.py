"""The pure parts of an answer: whole characters, stop texts, log-probabilities; whose turn it is; what can be set."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacppshim.answer import TextStream, logprobs_of
from llamacppshim.config import AdapterConfig, DecodeConfig, RuntimeConfig
from llamacppshim.errors import InvalidArgumentError, OutOfRangeError
from llamacppshim.turns import Turns


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_no_chunk_splits_a_character(text: str, places: list[int]) -> None:
    stream = TextStream()
    said = [stream.feed(piece) for piece in cut(text.encode(), places)]
    assert "".join(said) + stream.feed(b"", final=True) == text
    assert not stream.stopped
    assert "\ufffd" not in "".join(said) or "\ufffd" in text


@given(
    st.text("ab\u00e9x", max_size=30),
    st.lists(st.text("ab\u00e9x", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 60), max_size=20),
)
def test_nothing_of_a_stop_text_is_said_however_it_comes(text: str, stop: list[str], places: list[int]) -> None:
    stream, said = TextStream(stop), ""
    for piece in cut(text.encode(), places):
        said += stream.feed(piece)
        assert not any(one in said for one in stop)
        if stream.stopped:
            break
    found = [at for at in (text.find(one) for one in stop) if at >= 0]
    assert stream.stopped == bool(found)
    if not found:
        assert said + stream.release() == text
    else:
        assert text.startswith(said)


def test_the_first_of_several_stop_texts_counts() -> None:
    stream = TextStream(["END", "STOP"])
    assert stream.feed(b"one STOP two END") == "one "
    assert stream.stopped


def test_what_is_held_back_comes_when_it_was_no_stop_text() -> None:
    stream = TextStream(["###"])
    assert stream.feed(b"a##") == "a"
    assert stream.feed(b"b") == "##b"
    assert stream.feed(b"#") == ""
    assert stream.release() == "#"


def test_bytes_that_are_no_text_are_replaced_and_an_incomplete_end_waits() -> None:
    stream = TextStream()
    assert stream.feed(b"\xff\xe6\x97") == "\ufffd"
    assert stream.release() == ""
    assert stream.feed(b"\xa5") == "\u65e5"
    assert stream.feed(b"\xe6", final=True) == "\ufffd"


def test_log_probabilities_sum_to_one_and_fall() -> None:
    row = np.array([1.0, 5.0, -2.0, 5.0, 0.0], dtype=np.float32)
    own, top = logprobs_of(row, 0, 9)
    assert len(top) == 5
    assert [token for token, _ in top] == [1, 3, 0, 4, 2]
    assert np.exp([value for _, value in top]).sum() == pytest.approx(1.0)
    assert own == dict(top)[0]
    assert logprobs_of(row, 2, 0)[1] == []
    assert logprobs_of(row + 1e4, 0, 0)[0] == pytest.approx(own, abs=1e-3)


# Turns.


def test_turns_come_in_the_order_of_asking() -> None:
    turns, order = Turns(), []

    def wait(i: int) -> None:
        with turns:
            order.append(i)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(8)]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= i:
                time.sleep(0.0005)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    with turns:
        pass


def test_a_turn_is_let_go_by_an_error() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass


# Configurations.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n_ctx", value) for value in (0, -1, 2**32, 1.5, "1", True)],
        *[("n_batch", 0), ("n_ubatch", 0), ("n_seq_max", 0), ("n_seq_max", 257), ("n_threads", 513), ("poll", 101)],
        *[("flash_attn", "maybe"), ("type_k", "q2_k"), ("type_v", None), ("rope_scaling", 1), ("kv_unified", 1)],
        *[("rope_freq_base", 0.0), ("rope_freq_base", float("nan")), ("yarn_ext_factor", float("inf"))],
        *[("n_gpu_layers", -2), ("split_mode", "x"), ("main_gpu", 16), ("tensor_split", (-1.0,)), ("devices", "cpu")],
        *[("reuse", "all"), ("seam", "x"), ("max_checkpoints", -1), ("checkpoint_bytes", -1), ("checkpoint_every", 0)],
        *[("adapters", (5,)), ("adapters", "x.gguf"), ("adapters", (("x", float("nan")),))],
    ],
)
def test_a_wrong_setting_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises((InvalidArgumentError, OutOfRangeError)) as caught:
        RuntimeConfig(**{field: value})
    assert caught.value.field.startswith(field)
    assert "\n" not in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")), ("seed", 2**32), ("seed", -1)],
        *[("stop", ("",)), ("stop", (1,)), ("stop", 5), ("logprobs", -1), ("timeout_s", -1.0), ("ignore_eos", None)],
    ],
)
def test_a_wrong_decode_setting_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises((InvalidArgumentError, OutOfRangeError)) as caught:
        DecodeConfig(**{field: value})
    assert field in str(caught.value)


def test_short_forms_are_understood() -> None:
    config = RuntimeConfig(adapters=["a.gguf", ("b.gguf", 0.5), AdapterConfig("c.gguf")], devices=["x"])
    assert [(one.path, one.scale) for one in config.adapters] == [("a.gguf", 1.0), ("b.gguf", 0.5), ("c.gguf", 1.0)]
    assert DecodeConfig(stop="x").stop == ("x",)
    assert DecodeConfig(logit_bias={1: 2.0}).logit_bias == ((1, 2.0),)
    with pytest.raises(TypeError):
        RuntimeConfig(unknown=1)
    with pytest.raises(AttributeError):
        config.n_ctx = 5
