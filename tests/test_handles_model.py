"""The model handle: what it says of a file, its tokens, loading and the ways a load ends."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import RunChild

from llamacppshim import (
    Adapter,
    Context,
    LoadCancelledError,
    Model,
    ModelLoadError,
    OutOfRangeError,
    UnsupportedFeatureError,
    live_counts,
)

KINDS = {
    "tiny-llama": "attention",
    "tiny-spm": "attention",
    "tiny-swa": "swa",
    "tiny-mamba": "recurrent",
    "tiny-hybrid": "hybrid",
    "tiny-bert": "none",
    "tiny-split-00001-of-00002": "attention",
}


@functools.cache
def reader_of(path: Path) -> gguf.GGUFReader:
    """The oracle reads slowly: once a file."""
    return gguf.GGUFReader(path)


def field(reader: gguf.GGUFReader, key: str) -> object:
    found = reader.get_field(key)
    assert found is not None
    return found.contents()


@pytest.mark.parametrize("name", KINDS)
def test_a_model_says_what_its_file_says(tiny_models: dict[str, Path], loaded: dict[str, Model], name: str) -> None:
    """Oracle: the gguf package's own reader."""
    path = tiny_models[name]
    reader = reader_of(path)
    arch = field(reader, "general.architecture")
    model = loaded[name]
    assert model.path == str(path)
    assert model.architecture == arch
    assert str(arch) in model.description
    assert model.memory_kind == KINDS[name]
    assert model.n_layer == field(reader, f"{arch}.block_count")
    assert model.n_embd == field(reader, f"{arch}.embedding_length")
    assert model.n_ctx_train == field(reader, f"{arch}.context_length")
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    assert model.n_vocab == len(tokens)
    if "split" not in name:
        assert model.n_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
        assert model.n_params == sum(int(tensor.n_elements) for tensor in reader.tensors)
    for i in (0, 7, len(tokens) - 1):
        assert model.token_text(i) == tokens[i]
    assert (model.n_swa > 0) == (name == "tiny-swa")
    assert not model.vocab_only
    assert not model.closed


def test_heads_are_those_of_the_file(model: Model, tiny_llama: Path) -> None:
    reader = reader_of(tiny_llama)
    assert model.n_head == field(reader, "llama.attention.head_count")
    assert model.n_head_kv == field(reader, "llama.attention.head_count_kv")


def test_metadata_is_a_new_dict_of_text(model: Model, tiny_llama: Path) -> None:
    reader = reader_of(tiny_llama)
    metadata = model.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == str(field(reader, "llama.block_count"))
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items())
    metadata.clear()
    assert model.metadata


def test_the_chat_template_is_the_file_s(loaded: dict[str, Model], tiny_llama: Path) -> None:
    assert loaded["tiny-llama"].chat_template == field(reader_of(tiny_llama), "tokenizer.chat_template")
    assert loaded["tiny-bert"].chat_template is None


def test_the_name_is_the_file_s_or_else_its_stem(tiny_models: dict[str, Path], loaded: dict[str, Model]) -> None:
    for name, model in loaded.items():
        reader = reader_of(tiny_models[name])
        known = [found.contents() for key in ("general.basename", "general.name") if (found := reader.get_field(key))]
        assert model.name == (known[0] if known else tiny_models[name].stem)


@pytest.mark.parametrize("name", ["blob", "sha256-00ff", "ünïcode 模型.bin", "x.gguf.part"])
def test_any_suffix_will_do_and_any_kind_of_path(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to(tiny_llama)
    for given in (path, str(path), os.fsencode(path)):
        with Model(given) as model:
            assert model.path == str(path)
            assert model.n_vocab > 0


def test_a_model_is_only_its_vocabulary_where_that_is_asked(tiny_llama: Path, model: Model) -> None:
    with Model(tiny_llama, vocab_only=True) as only:
        assert only.vocab_only
        assert only.memory_kind == "none"
        text = "the same tokens"
        expected = model.tokenize(text, add_special=True, parse_special=True)
        np.testing.assert_array_equal(only.tokenize(text, add_special=True, parse_special=True), expected)
        with pytest.raises(UnsupportedFeatureError, match="vocab_only"):
            Context(only)


@pytest.mark.parametrize(
    "options",
    [
        {"use_mmap": False},
        {"check_tensors": True},
        {"use_extra_bufts": False},
        {"n_gpu_layers": 0},
        {"split_mode": "none"},
        {"split_mode": "row"},
        {"tensor_split": [0.5, 0.5]},
        {"devices": []},
        {"load_mtp": True},
    ],
)
def test_every_option_of_a_load_gives_the_same_model(tiny_llama: Path, model: Model, options: dict[str, Any]) -> None:
    with Model(tiny_llama, **options) as other:
        assert other.metadata == model.metadata
        assert other.n_bytes == model.n_bytes


def test_unknown_options_and_types_are_type_errors(tiny_llama: Path) -> None:
    wrongs: list[dict[str, Any]] = [
        {"n_layers": 3},
        {"n_gpu_layers": "3"},
        {"n_gpu_layers": 1.5},
        {"progress": 3},
        {"devices": "CUDA0"},
    ]
    for wrong in wrongs:
        with pytest.raises(TypeError):
            Model(tiny_llama, **wrong)
    for path in (None, 3, object()):
        with pytest.raises(TypeError):
            Model(path)  # type: ignore[arg-type]


# Digests


def test_the_digest_is_the_file_s_sha256(model: Model, tiny_llama: Path) -> None:
    assert model.digest == hashlib.sha256(tiny_llama.read_bytes()).hexdigest()


def test_the_digest_of_a_split_model_covers_every_part(tiny_models: dict[str, Path]) -> None:
    parts = [tiny_models[f"tiny-split-0000{i}-of-00002"] for i in (1, 2)]
    with Model(parts[0]) as model:
        assert model.digest == hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def test_the_digest_follows_the_file_and_refuses_one_that_has_changed(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(tiny_llama, path)
    with Model(path, use_mmap=False) as model:
        before = model.digest
        with open(path, "ab") as file:
            file.write(b"\0" * 32)
        assert model.digest == before  # of what was loaded, which was already read
    with Model(path, use_mmap=False) as model:
        assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest() != before
    with Model(path, use_mmap=False) as model:
        os.utime(path, ns=(1, 1))
    with Model(path, use_mmap=False) as model:
        with open(path, "ab") as file:
            file.write(b"\0" * 32)
        with pytest.raises(ModelLoadError, match="has changed since it was loaded") as caught:
            model.digest  # noqa: B018
        assert caught.value.path == str(path)
        path.unlink()
        with pytest.raises(ModelLoadError, match="No such file"):
            model.digest  # noqa: B018


def test_the_digest_is_read_once_a_process(tiny_llama: Path, tmp_path: Path, run_child: RunChild) -> None:
    """Oracle: the second time, the file cannot be opened any more."""
    run_child(
        """
        import shutil
        shutil.copy(TINY["tiny-llama"], "m.gguf")
        model = Model("m.gguf", use_mmap=False)
        digest = model.digest
        other = Model("m.gguf", use_mmap=False)
        os.rename("m.gguf", "away")
        assert other.digest == digest == model.digest
        """
    )


# Tokens


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-spm", "tiny-swa"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "hello world",
        "  two  spaces\n\n\ttab",
        "naïve Привет 你好 🦙🦙",
        "a\0b\0",
        "x" * 3000,
        "word " * 5000,
        "<|im_start|>user",
    ],
)
@pytest.mark.parametrize("parse_special", [False, True])
def test_tokens_give_back_their_text(loaded: dict[str, Model], name: str, text: str, parse_special: bool) -> None:
    """Oracle: the text itself; and joining the pieces one by one."""
    model = loaded[name]
    tokens = model.tokenize(text, add_special=False, parse_special=parse_special)
    assert tokens.dtype == np.int32
    assert tokens.ndim == 1
    assert model.detokenize(tokens) == text.encode()
    assert model.detokenize(tokens.tolist()) == text.encode()
    pieces = b"".join(model.token_piece(token) for token in tokens)
    # A vocabulary that puts a space in front of the first word takes it away only from the whole.
    assert pieces in (text.encode(), b" " + text.encode())
    same = model.tokenize(text.encode(), add_special=False, parse_special=parse_special)
    np.testing.assert_array_equal(same, tokens)


def test_bytes_that_are_no_utf_8_are_tokenised_too(loaded: dict[str, Model]) -> None:
    model = loaded["tiny-spm"]
    for raw in (b"\xff\xfe", b"half a \xf0\x9f", bytes(range(256))):
        assert len(model.tokenize(raw, add_special=False, parse_special=False)) > 0
    for view in (bytearray(b"abc"), memoryview(b"abc")):
        assert model.detokenize(model.tokenize(view, add_special=False, parse_special=False)) == b"abc"


@pytest.mark.parametrize("name", KINDS)
def test_add_special_adds_what_the_model_wants(loaded: dict[str, Model], name: str) -> None:
    model = loaded[name]
    plain = model.tokenize("hi", add_special=False, parse_special=False).tolist()
    special = model.tokenize("hi", add_special=True, parse_special=False).tolist()
    before = [model.bos] if model.add_bos else []
    after = [model.sep if model.vocab_type == "wpm" else model.eos] if model.add_eos or model.add_sep else []
    assert special == before + plain + after
    if model.add_bos and model.vocab_type != "wpm":
        # Upstream keeps the space in front of the first word where it has removed a BOS before it.
        assert model.detokenize(special, remove_special=True).lstrip() == model.detokenize(plain)
        assert model.detokenize(special) != model.detokenize(plain)


def test_parse_special_decides_whether_a_control_token_is_text(model: Model) -> None:
    as_token = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
    as_text = model.tokenize("<|im_end|>", add_special=False, parse_special=False)
    assert len(as_token) == 1
    assert len(as_text) > 1
    token = int(as_token[0])
    assert model.is_control(token)
    assert model.is_eog(token)
    assert model.token_text(token) == "<|im_end|>"
    assert model.token_piece(token) == b"<|im_end|>"
    assert model.token_piece(token, special=False) == b""
    assert model.detokenize(as_token, unparse_special=False) == b""
    assert not model.is_control(int(as_text[0]))
    assert not model.is_eog(int(as_text[0]))


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_are_ids_or_none(tiny_models: dict[str, Path], loaded: dict[str, Model], name: str) -> None:
    names = ["bos", "eos", "eot", "sep", "nl", "pad", "mask"]
    names += ["fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"]
    reader = reader_of(tiny_models[name])
    model = loaded[name]
    for special in names:
        token = getattr(model, special)
        assert token is None or 0 <= token < model.n_vocab
    for key, special in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        known = reader.get_field(f"tokenizer.ggml.{key}")
        if known is not None:
            assert getattr(model, special) == known.contents()
    assert model.eos is None or model.is_eog(model.eos)


@pytest.mark.parametrize("call", ["token_piece", "token_text", "token_score", "token_attr", "is_eog", "is_control"])
def test_token_ids_outside_the_vocabulary_are_refused(model: Model, call: str) -> None:
    for token in (-1, model.n_vocab, -(2**31), 2**31 - 1, 2**31, -(2**31) - 1, 2**64, -(10**5000)):
        with pytest.raises(OutOfRangeError) as caught:
            getattr(model, call)(token)
        assert "\n" not in str(caught.value)
    for wrong in (1.0, "1", None, b"1", [1]):
        with pytest.raises(TypeError):
            getattr(model, call)(wrong)
    assert getattr(model, call)(np.int64(model.n_vocab - 1)) == getattr(model, call)(model.n_vocab - 1)


def test_detokenize_takes_any_integers_and_refuses_the_rest(model: Model) -> None:
    tokens = model.tokenize("some words here", add_special=False, parse_special=False)
    expected = model.detokenize(tokens)
    same: list[Any] = [list(tokens), tuple(tokens), tokens.astype(np.int64), tokens.astype(np.uint16), iter(tokens)]
    same += [np.repeat(tokens, 2)[::2], tokens.data, tokens.astype(">i4")]
    for given in same:
        assert model.detokenize(given) == expected
    assert model.detokenize(range(0)) == b""
    assert model.detokenize(np.array([])) == b""
    for wrong in ("abc", b"abc", bytearray(b"abc"), [1.5], [None], ["1"], np.array([1.5]), np.array([True]), 3, None):
        with pytest.raises(TypeError):
            model.detokenize(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 dimensions"):
        model.detokenize(tokens.reshape(1, -1))
    for far in ([model.n_vocab], [-1], [2**31], np.array([2**40]), np.array([2**63], np.uint64)):
        with pytest.raises(OutOfRangeError):
            model.detokenize(far)


def test_a_piece_may_be_longer_than_any_guess(model: Model) -> None:
    longest = max(range(model.n_vocab), key=lambda token: len(model.token_piece(token)))
    piece = model.token_piece(longest)
    assert len(piece) > 64, "this vocabulary no longer tests the second attempt"
    assert model.detokenize([longest] * 1000) == piece * 1000


# Loading


def test_progress_rises_to_one(tiny_llama: Path) -> None:
    seen: list[float] = []
    threads = set()

    def progress(fraction: float) -> bool:
        seen.append(fraction)
        threads.add(threading.current_thread())
        return True

    with Model(tiny_llama, progress=progress):
        assert seen == sorted(seen)
        assert seen[0] >= 0
        assert seen[-1] == 1
        assert threads == {threading.current_thread()}


def test_a_progress_that_forgets_its_answer_goes_on(tiny_llama: Path) -> None:
    with Model(tiny_llama, progress=lambda fraction: None) as model:
        assert model.n_vocab > 0


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_false_cancels_the_load(tiny_llama: Path, at: float) -> None:
    before = live_counts()
    with pytest.raises(ModelLoadError) as caught:
        Model(tiny_llama, progress=lambda fraction: fraction < at)
    assert type(caught.value) is LoadCancelledError
    assert caught.value.path == str(tiny_llama)
    assert caught.value.reason
    assert live_counts() == before


def test_an_exception_in_progress_cancels_the_load_and_arrives(tiny_llama: Path) -> None:
    class OwnError(Exception):
        pass

    def progress(fraction: float) -> bool:
        raise OwnError(fraction)

    before = live_counts()
    with pytest.raises(OwnError):
        Model(tiny_llama, progress=progress)
    assert live_counts() == before


def test_two_threads_can_load_at_once(tiny_llama: Path) -> None:
    """Each load waits in its progress callback for the other: it works only if neither holds what the other needs."""
    meeting = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def load() -> None:
        met: list[int] = []

        def progress(fraction: float) -> bool:
            if not met:
                met.append(meeting.wait())
            return True

        try:
            Model(tiny_llama, progress=progress).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_tokenising_a_long_text_leaves_the_gil_free(run_child: RunChild) -> None:
    """Oracle: another thread counts on, although the switch interval is longer than the whole test, so that nothing but
    letting the GIL go hands it over."""
    run_child(
        """
        model = Model(TINY["tiny-llama"])
        text = "many different words, 12345 and more; " * 20000
        sys.setswitchinterval(1000)
        count, stop, started = 0, False, threading.Event()
        def tick():
            global count
            while not stop:
                count += 1
                started.set()
                time.sleep(0.0005)             # long enough for the other to take the GIL
        thread = threading.Thread(target=tick)
        thread.start()
        started.wait()
        before = count
        model.tokenize(text, add_special=False, parse_special=False)
        assert count > before
        stop = True
        thread.join()
        """
    )


# Logs


def test_llama_cpp_s_lines_go_to_the_logger_at_its_level(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "llamacppshim"):
        Model(tiny_llama).close()
    assert any("general.architecture" in record.getMessage() for record in caplog.records)
    assert {record.name for record in caplog.records} == {"llamacppshim"}
    assert {record.levelno for record in caplog.records} >= {logging.INFO}
    assert min(record.levelno for record in caplog.records) >= logging.INFO
    caplog.clear()
    with caplog.at_level(logging.ERROR, "llamacppshim"):
        Model(tiny_llama).close()
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_nothing_is_written_unless_a_handler_asks(run_child: RunChild) -> None:
    run_child(
        """
        import logging
        model = Model(TINY["tiny-llama"])
        context = Context(model, n_ctx=256, n_threads=1)
        context.decode([1])
        refusal(Model, "missing.gguf")
        open("bad.gguf", "wb").write(b"GGUF" + b"\\xff" * 100)
        refusal(Model, "bad.gguf")
        refusal(Sampler, model, grammar="root ::= nonsense")
        refusal(ChatTemplate, "{{ raise_exception('x') }}{% for %}")
        """
    )


# Adapters


def test_an_adapter_says_what_its_file_says(model: Model, tiny_models: dict[str, Path]) -> None:
    path = tiny_models["tiny-lora"]
    with Adapter(model, path) as adapter:
        assert adapter.model is model
        assert adapter.path == str(path)
        assert adapter.metadata["general.type"] == "adapter"
        assert adapter.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_foreign_adapter_is_refused(model: Model, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    for path in (tiny_models["tiny-lora-foreign"], tiny_models["tiny-llama"], tmp_path, tmp_path / "missing"):
        with pytest.raises(ModelLoadError) as caught:
            Adapter(model, path)
        assert caught.value.path == str(path)
    with Adapter(model, tiny_models["tiny-lora"]) as adapter:
        assert adapter.metadata
