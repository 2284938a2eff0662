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


@given(
    st.text("ab#", max_size=20),
    st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=2),
    st.lists(st.integers(0, 30), max_size=8),
    st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_a_stop_text_is_found_across_a_cut_of_the_answer(
    text: str, stop: list[str], places: list[int], cuts: list[bool]
) -> None:
    """Where the answer was left and taken up, its end is where it would have been."""
    whole, left = TextStream(stop), TextStream(stop)
    said = ""
    for piece, cut_here in zip(cut(text.encode(), places), cuts, strict=False):
        whole.feed(piece)
        said += left.feed(piece)
        assert left.stopped == whole.stopped
        if left.stopped:
            break
        if cut_here:
            said += left.release()
            again = TextStream(stop)
            again.resume(left.pending(), left.said)
            left = again
    assert text.startswith(said) or left.stopped


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


def test_a_thread_gives_way_to_others_that_wait() -> None:
    turns, order = Turns(), []

    def work(name: str, n: int) -> None:
        for _ in range(n):
            turns.ask()
            with turns.lock:
                turns.taken()
                order.append(name)
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name, 60)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == sorted("abc" * 60)
    # Without giving way, a thread has the lock for a whole switch interval, some five of these turns, and more.
    runs = [len(list(group)) for _, group in itertools.groupby(order[:-20])]
    assert sum(runs) / len(runs) < 3


def test_a_thread_alone_does_not_wait() -> None:
    turns = Turns()
    turns._waiting[-1] = time.monotonic() - 100  # somebody who never came
    for _ in range(3):
        turns.ask()
        with turns.lock:
            turns.taken()


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
