"""Headers without their models. Oracles: the loaded model, the numbers of tests/tiny.py, the same refusals."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import RunChild

from llamacppshim import (
    GgufHeader,
    InvalidArgumentError,
    Model,
    ModelLoadError,
    ModelSource,
    RuntimeConfig,
    estimate_memory,
    read_gguf_header,
)
from llamacppshim.header import estimate_file, layouts_told

SHARED = (
    *("architecture", "n_params", "n_bytes", "n_vocab", "n_ctx_train", "n_embd", "n_embd_out", "n_layer"),
    *("n_head", "n_head_kv", "n_swa", "memory_kind", "metadata"),
)


def check_against(header: GgufHeader, model: Model) -> None:
    for name in SHARED:
        assert getattr(header, name) == getattr(model, name), name
    assert sum(one.n_bytes for one in header.tensors.values()) == model.n_bytes
    assert len(header.window_pattern) == model.n_layer
    assert any(header.window_pattern) == (model.n_swa > 0)


@pytest.mark.parametrize(
    ("name", "tokenizer", "vocab_type"),
    [
        *[("tiny-llama", "gpt2", "bpe"), ("tiny-spm", "llama", "spm"), ("tiny-swa", "llama", "spm")],
        *[("tiny-mamba", "gpt2", "bpe"), ("tiny-hybrid", "gpt2", "bpe"), ("tiny-bert", "bert", "wpm")],
        ("tiny-split-00001-of-00002", "gpt2", "bpe"),
    ],
)
def test_a_header_says_what_the_loaded_model_says(
    loaded: dict[str, Model], tiny_models: dict[str, Path], name: str, tokenizer: str, vocab_type: str
) -> None:
    header = read_gguf_header(tiny_models[name])
    check_against(header, loaded[name])
    assert (header.tokenizer, header.vocab_type) == (tokenizer, vocab_type)
    assert header.generates == (name != "tiny-bert")
    assert header.path == os.fspath(tiny_models[name])
    files = sorted(tiny_models[name].parent.glob("tiny-split-*.gguf")) if "split" in name else [tiny_models[name]]
    assert header.n_parts == len(files)
    assert header.n_file_bytes == sum(file.stat().st_size for file in files)


def test_the_real_models_have_the_facts_of_their_cards(smollm2: Path, gemma3: Path) -> None:
    small, windowed = read_gguf_header(smollm2), read_gguf_header(gemma3)
    assert (small.architecture, small.n_layer, small.n_head, small.n_head_kv) == ("llama", 30, 9, 3)
    assert (small.memory_kind, small.tokenizer, small.n_vocab, small.n_ctx_train) == ("attention", "gpt2", 49152, 8192)
    assert set(small.tensors) == {"f32", "q4_1", "q8_0"}
    assert (windowed.architecture, windowed.n_swa, windowed.n_vocab) == ("gemma3", 512, 262144)
    assert windowed.n_ctx_train == 32768
    # Five layers with a window, then one without.
    assert windowed.window_pattern == tuple(i % 6 != 5 for i in range(18))


def test_layers_say_what_they_keep(tiny_models: dict[str, Path]) -> None:
    hybrid = read_gguf_header(tiny_models["tiny-hybrid"])
    assert [layer.n_embd_k for layer in hybrid.layers] == [0, 0, 64, 0, 64]
    assert [layer.n_state > 0 for layer in hybrid.layers] == [True, True, False, True, False]
    mamba = read_gguf_header(tiny_models["tiny-mamba"])
    assert all(layer.n_state and not layer.n_embd_k for layer in mamba.layers)


def test_a_header_is_a_value(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bin"
    copy.write_bytes(tiny_llama.read_bytes())
    header = read_gguf_header(copy)
    copy.unlink()  # it holds nothing open
    assert header.n_layer == 3
    with pytest.raises(AttributeError):
        header.n_layer = 4  # type: ignore[misc]
    with pytest.raises(ModelLoadError, match="no such file"):
        header.measure([RuntimeConfig(n_ctx=256)])
    copy.write_bytes(tiny_llama.read_bytes())  # as large, and with the same content; but who would know
    with pytest.raises(ModelLoadError, match="is not what it was when its header was read"):
        header.measure([RuntimeConfig(n_ctx=256)])


def test_what_is_no_model_is_refused_as_by_a_load(tiny_llama: Path, tmp_path: Path) -> None:
    whole = tiny_llama.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"PK\3\4" + bytes(60), whole[:1000], whole[:-1], whole.replace(b"blk.1", b"blk.0")):
        damaged.write_bytes(content)
        with pytest.raises(ModelLoadError) as alone:
            read_gguf_header(damaged)
        with pytest.raises(ModelLoadError) as by_load:
            Model(damaged)
        assert str(alone.value) == str(by_load.value)
    for path in (tmp_path, tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(ModelLoadError):
            read_gguf_header(path)
    for wrong in (None, 3, "a\0b"):
        with pytest.raises((TypeError, ModelLoadError)):
            read_gguf_header(wrong)  # type: ignore[arg-type]


def read_from(source: ModelSource) -> GgufHeader:
    with layouts_told(source):
        return read_gguf_header(source.path)


def test_one_reading_gives_the_header_and_the_estimate(tiny_models: dict[str, Path]) -> None:
    for name in ("tiny-llama", "tiny-swa", "tiny-mamba", "tiny-hybrid"):
        for config in (None, RuntimeConfig(n_ctx=700, n_seq_max=3, use_mmap=False)):
            header, estimate = estimate_file(tiny_models[name], config)
            assert header == read_gguf_header(tiny_models[name])
            assert estimate == estimate_memory(header, config)
    header, estimate = estimate_file(tiny_models["tiny-bert"])
    assert (header.architecture, estimate) == ("bert", None)
    with pytest.raises(InvalidArgumentError, match="flash attention"):
        estimate_file(tiny_models["tiny-llama"], RuntimeConfig(type_v="q8_0", flash_attn="off"))


def test_a_layout_of_ollama_s_own_engine_is_called_so(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0"
    whole = tiny_models["tiny-llama"].read_bytes()
    for content, words in (
        (whole.replace(b"\5\0\0\0\0\0\0\0llama\x0c", b"\5\0\0\0\0\0\0\0mlama\x0c"), "unknown model architecture"),
        (whole.replace(b"blk.2.ffn_down.weight", b"v.2.1.ffn_down.weight"), "not found"),
    ):
        assert content != whole
        blob.write_bytes(content)
        with pytest.raises(ModelLoadError, match=f"only Ollama's own engine can: .*{words}"):
            read_from(ModelSource(blob, None, "ollama"))
        with pytest.raises(ModelLoadError) as plain:
            read_from(ModelSource(blob, None, "path"))
        assert words in str(plain.value) and "Ollama" not in str(plain.value)
    blob.write_bytes(whole[:50])
    with pytest.raises(ModelLoadError) as damaged:
        read_from(ModelSource(blob, None, "ollama"))
    assert "Ollama" not in str(damaged.value)


N_EMBD, N_FF, N_VOCAB = 32, 32, 260  # of the small models: heads of 16, no whole block of a quantised cache


def small_layer(i: int) -> dict[str, tuple[int, ...]]:
    return {
        **{f"blk.{i}.{name}_norm.weight": (N_EMBD,) for name in ("attn", "ffn")},
        **{f"blk.{i}.{name}.weight": (N_EMBD, N_EMBD) for name in ("attn_q", "attn_output")},
        **{f"blk.{i}.{name}.weight": (N_EMBD // 2, N_EMBD) for name in ("attn_k", "attn_v")},
        **{f"blk.{i}.ffn_{name}.weight": (N_FF, N_EMBD) for name in ("gate", "up", "down")},
    }


def small_gguf(path: Path, arch: str, keys: dict[str, int], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A model of a few layers whose whole file is some 40 KB."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {"context_length": 256, "embedding_length": N_EMBD, **keys}.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    writer.add_token_merges(["t 1", "t 2"])
    for name, shape in {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,), **tensors}.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_model(path: Path) -> Path:
    return small_gguf(path, "llama", {"block_count": 1, "attention.sliding_window": 64}, small_layer(0))


def predicting_model(path: Path) -> Path:
    """One layer, and one of multi-token prediction behind it."""
    keys = {"block_count": 2, "nextn_predict_layers": 1, "leading_dense_block_count": 2, "expert_count": 2}
    keys |= {"expert_used_count": 1, "expert_feed_forward_length": 32, "expert_shared_count": 0}
    tensors = {}
    for i in range(2):
        tensors |= {name.replace("ffn_norm", "post_attention_norm"): n for name, n in small_layer(i).items()}
    tensors |= {f"blk.1.nextn.{name}.weight": (N_EMBD,) for name in ("enorm", "hnorm")}
    return small_gguf(path, "glm4moe", keys, {**tensors, "blk.1.nextn.eh_proj.weight": (N_EMBD, 2 * N_EMBD)})


def test_layers_of_prediction_are_told_apart(tmp_path: Path) -> None:
    header = read_gguf_header(predicting_model(tmp_path / "predicting.gguf"))
    assert (header.n_layer, header.n_layer_nextn, header.n_expert, header.n_expert_used) == (1, 1, 2, 1)
    assert [layer.prediction for layer in header.layers] == [False, True]
    assert [layer.n_embd_k for layer in header.layers] == [16, 16]
    assert header.window_pattern == (False,)


def mutated(whole: bytes, n_header: int, draw: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(n_header)
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            value = draw.choice([0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
            data[at : at + 8] = struct.pack("<Q", value)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 3, 6, 8, 9, 12, 13, 64, 512, 513, 2**32 - 1]))
        elif kind == 3:
            start, n = draw.randrange(n_header), draw.randint(1, 60)
            data[at : at + n] = data[start : start + n]
        else:
            del data[draw.randrange(len(data)) :]
            n_header = min(n_header, len(data))
        if not data:
            break
        n_header = min(n_header, len(data))
    return bytes(data)


def test_thousands_of_damaged_headers_are_an_error_or_an_answer(run_child: RunChild, tmp_path: Path) -> None:
    whole = small_model(tmp_path / "small.gguf")
    header = read_gguf_header(whole)
    assert header.window_pattern == (False,)
    run_child(
        f"""
        import random, re, sys
        sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
        from pathlib import Path
        from test_header import mutated
        from llamacppshim.header import read_gguf_header
        from llamacppshim.memory import estimate_memory
        whole = Path({os.fspath(whole)!r}).read_bytes()
        file = Path("damaged.gguf")
        draw, answers = random.Random(6), 0
        for i in range(3000):
            file.write_bytes(mutated(whole, {header.n_header_bytes}, draw))
            began = time.monotonic()
            try:
                header = read_gguf_header(file)
                answers += 1
                assert header.n_bytes <= len(whole) and len(header.layers) <= 512
                estimate_memory(header, n_ctx=256)
            except LlamaCppShimError as error:
                assert "\\n" not in str(error)
            assert time.monotonic() - began < 30, i
        assert 30 < answers < 2900, answers
        # Not ru_maxrss: a child that was started by vfork has its parent's there, models and all.
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
        assert int(peak[1]) < 1 << 20, peak[0]
        assert live_counts()["headers"] == 0
        """
    )
