"""Tiny models with random weights, one of each memory kind, made from a fixed seed.

``python3 tests/tiny.py FOLDER`` or ``tiny.build(folder)``. The vocabularies are those that the pinned llama.cpp ships
for its own tests. What is already there and up to date is left alone; two processes may start at once.

The weights are scaled so that the layers outweigh the token's own embedding and the attention is peaked: the most
likely next token then depends on the whole prompt, as it does in a trained model.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
STAMP = "tiny.json"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

N_EMBD = 128
N_HEAD = 2
N_HEAD_KV = 1
N_EMBD_HEAD = 64
N_FF = 256
N_CTX_TRAIN = 8192
N_SWA = 32
LORA_RANK = 4

Array = NDArray[Any]


@functools.cache
def source() -> Path:
    """The pinned llama.cpp tree."""
    fetch = HERE.parent / "third_party" / "fetch.py"
    result = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"no llama.cpp source for the vocabularies: {result.stderr.strip()}")
    return Path(result.stdout.strip())


@functools.cache
def vocabulary(name: str) -> dict[str, gguf.ReaderField]:
    reader = gguf.GGUFReader(source() / "models" / f"ggml-vocab-{name}.gguf")
    return {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}


class File:
    """One GGUF file in the making: keys of one architecture, seeded weights, one vocabulary."""

    def __init__(self, path: Path, arch: str, seed: int, split_max_tensors: int = 0) -> None:
        self.path = path
        self.arch = arch
        self.random = np.random.default_rng(seed)
        self.writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
        self.quiet: Array = np.zeros(0, dtype=np.int64)

    def keys(self, **values: int | float | bool | Sequence[int]) -> None:
        """Keys of this architecture; a double underscore stands for the dot."""
        for name, value in values.items():
            key = f"{self.arch}.{name.replace('__', '.')}"
            if isinstance(value, bool):
                self.writer.add_bool(key, value)
            elif isinstance(value, int):
                self.writer.add_uint32(key, value)
            elif isinstance(value, float):
                self.writer.add_float32(key, value)
            else:
                self.writer.add_array(key, list(value))

    def vocabulary(self, name: str, extra_control: Sequence[str] = ()) -> int:
        """Copies a vocabulary, appends control tokens, and returns the number of tokens."""
        fields = vocabulary(name)
        types = list(fields["tokenizer.ggml.token_type"].contents())
        types += [int(gguf.TokenType.CONTROL)] * len(extra_control)
        for key, field in fields.items():
            value = field.contents()
            if key == "tokenizer.ggml.tokens":
                value = [*value, *extra_control]
            elif key == "tokenizer.ggml.token_type":
                value = types
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            self.writer.add_key_value(key, value, field.types[0], field.types[-1] if is_array else None)
        self.quiet = np.flatnonzero(np.array(types) != gguf.TokenType.NORMAL)
        return len(types)

    def embedding(self, n_vocab: int, n_embd: int = N_EMBD) -> None:
        """Few loud tokens, so that the most likely one stands out; the special ones are never it."""
        rows = self.random.standard_normal((n_vocab, n_embd), dtype=np.float32) * 0.02
        rows *= np.exp(0.5 * self.random.standard_normal((n_vocab, 1), dtype=np.float32))
        rows[self.quiet] *= 0.25
        self.writer.add_tensor("token_embd.weight", rows.astype(np.float16))

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Rows of unit gain turn unit input into unit output."""
        weights = self.random.standard_normal((n_out, n_in), dtype=np.float32) * (gain / np.sqrt(n_in))
        self.writer.add_tensor(f"{name}.weight", weights.astype(np.float16))

    def vector(self, name: str, values: Array | float, n: int = N_EMBD) -> None:
        self.writer.add_tensor(name, np.broadcast_to(np.float32(values), (n,)).astype(np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def attention(file: File, layer: str, n_embd: int = N_EMBD, gain: float = 1.5) -> None:
    n_head = n_embd // N_EMBD_HEAD
    file.matrix(f"{layer}.attn_q", n_head * N_EMBD_HEAD, n_embd, gain)
    file.matrix(f"{layer}.attn_k", N_HEAD_KV * N_EMBD_HEAD, n_embd, gain)
    file.matrix(f"{layer}.attn_v", N_HEAD_KV * N_EMBD_HEAD, n_embd)
    file.matrix(f"{layer}.attn_output", n_embd, n_head * N_EMBD_HEAD)


def feed_forward(file: File, layer: str, n_embd: int = N_EMBD) -> None:
    file.matrix(f"{layer}.ffn_gate", N_FF, n_embd, 1.5)
    file.matrix(f"{layer}.ffn_up", N_FF, n_embd)
    file.matrix(f"{layer}.ffn_down", n_embd, N_FF)


def write_llama(path: Path, name: str, vocab: str, control: Sequence[str] = (), split_max_tensors: int = 0) -> None:
    n_layer = 3
    file = File(path, "llama", seed=1, split_max_tensors=split_max_tensors)
    file.writer.add_name(name)
    file.keys(block_count=n_layer, context_length=N_CTX_TRAIN, embedding_length=N_EMBD, feed_forward_length=N_FF)
    file.keys(attention__head_count=N_HEAD, attention__head_count_kv=N_HEAD_KV, rope__dimension_count=N_EMBD_HEAD)
    file.keys(attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=10000.0)
    n_vocab = file.vocabulary(vocab, control)
    file.keys(vocab_size=n_vocab)
    if control:
        file.writer.add_chat_template(CHATML)
    file.embedding(n_vocab)
    file.vector("output_norm.weight", 12.0)
    for i in range(n_layer):
        layer = f"blk.{i}"
        file.vector(f"{layer}.attn_norm.weight", 1.0)
        attention(file, layer)
        file.vector(f"{layer}.ffn_norm.weight", 1.0)
        feed_forward(file, layer)
    file.close()


def write_tiny_llama(path: Path) -> None:
    write_llama(path, "tiny-llama", "gpt-2", control=("<|im_start|>", "<|im_end|>"))


def write_tiny_split(path: Path) -> None:
    """The same content in two files. The writer adds the part numbers to the name."""
    stem = path.name.partition("-00001-of-")[0]
    write_llama(
        path.with_name(f"{stem}.gguf"),
        "tiny-llama",
        "gpt-2",
        control=("<|im_start|>", "<|im_end|>"),
        split_max_tensors=16,
    )


def write_tiny_spm(path: Path) -> None:
    write_llama(path, "tiny-spm", "llama-spm")


def write_tiny_swa(path: Path) -> None:
    n_layer = 4
    file = File(path, "gemma3", seed=2)
    file.writer.add_name("tiny-swa")
    file.keys(block_count=n_layer, context_length=N_CTX_TRAIN, embedding_length=N_EMBD, feed_forward_length=N_FF)
    file.keys(attention__head_count=N_HEAD, attention__head_count_kv=N_HEAD_KV)
    file.keys(attention__key_length=N_EMBD_HEAD, attention__value_length=N_EMBD_HEAD)
    file.keys(attention__sliding_window=N_SWA, attention__sliding_window_pattern=[i % 2 == 0 for i in range(n_layer)])
    file.keys(attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e6)
    file.embedding(file.vocabulary("llama-spm"))
    file.vector("output_norm.weight", 12.0)
    for i in range(n_layer):
        layer = f"blk.{i}"
        file.vector(f"{layer}.attn_norm.weight", 1.0)
        attention(file, layer)
        file.vector(f"{layer}.attn_q_norm.weight", 1.5, N_EMBD_HEAD)
        file.vector(f"{layer}.attn_k_norm.weight", 1.5, N_EMBD_HEAD)
        # Gemma multiplies its embeddings by sqrt(n_embd): these gains keep the layers ahead of them.
        file.vector(f"{layer}.post_attention_norm.weight", 8.0)
        file.vector(f"{layer}.ffn_norm.weight", 1.0)
        feed_forward(file, layer)
        file.vector(f"{layer}.post_ffw_norm.weight", 8.0)
    file.close()


def write_tiny_mamba(path: Path) -> None:
    n_layer, n_conv, n_inner, n_state, n_rank = 3, 4, 2 * N_EMBD, 16, 16
    file = File(path, "mamba", seed=3)
    file.writer.add_name("tiny-mamba")
    file.keys(block_count=n_layer, context_length=N_CTX_TRAIN, embedding_length=N_EMBD, feed_forward_length=0)
    file.keys(attention__head_count=0, attention__layer_norm_rms_epsilon=1e-5)
    file.keys(ssm__conv_kernel=n_conv, ssm__inner_size=n_inner, ssm__state_size=n_state, ssm__time_step_rank=n_rank)
    file.embedding(file.vocabulary("gpt-2"))
    file.vector("output_norm.weight", 12.0)
    for i in range(n_layer):
        layer = f"blk.{i}"
        file.vector(f"{layer}.attn_norm.weight", 1.0)
        file.matrix(f"{layer}.ssm_in", 2 * n_inner, N_EMBD, 1.5)
        convolution = file.random.standard_normal((n_inner, n_conv), dtype=np.float32)
        file.writer.add_tensor(f"{layer}.ssm_conv1d.weight", convolution)
        file.vector(f"{layer}.ssm_conv1d.bias", 0.0, n_inner)
        file.matrix(f"{layer}.ssm_x", n_rank + 2 * n_state, n_inner)
        file.matrix(f"{layer}.ssm_dt", n_inner, n_rank)
        # Steps of about 0.05 let a state outlive a hundred tokens.
        file.vector(f"{layer}.ssm_dt.bias", -3.0, n_inner)
        decay = -np.arange(1, n_state + 1, dtype=np.float32)
        file.writer.add_tensor(f"{layer}.ssm_a", np.tile(decay, (n_inner, 1)))
        file.vector(f"{layer}.ssm_d", 1.0, n_inner)
        file.matrix(f"{layer}.ssm_out", N_EMBD, n_inner, 2.0)
    file.close()


def write_tiny_hybrid(path: Path) -> None:
    n_layer, n_conv = 5, 3
    head_counts_kv = [0, 0, N_HEAD_KV, 0, N_HEAD_KV]
    file = File(path, "lfm2", seed=4)
    file.writer.add_name("tiny-hybrid")
    file.keys(block_count=n_layer, context_length=N_CTX_TRAIN, embedding_length=N_EMBD, feed_forward_length=N_FF)
    file.keys(attention__head_count=N_HEAD, attention__head_count_kv=head_counts_kv)
    file.keys(attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=10000.0, shortconv__l_cache=n_conv)
    file.keys(vocab_size=file.vocabulary("gpt-2"))
    file.embedding(len(vocabulary("gpt-2")["tokenizer.ggml.tokens"].data))
    file.vector("token_embd_norm.weight", 12.0)
    for i, n_head_kv in enumerate(head_counts_kv):
        layer = f"blk.{i}"
        file.vector(f"{layer}.attn_norm.weight", 1.0)
        if n_head_kv:
            attention(file, layer)
            file.vector(f"{layer}.attn_q_norm.weight", 1.5, N_EMBD_HEAD)
            file.vector(f"{layer}.attn_k_norm.weight", 1.5, N_EMBD_HEAD)
        else:
            convolution = file.random.standard_normal((N_EMBD, n_conv), dtype=np.float32)
            file.writer.add_tensor(f"{layer}.shortconv.conv.weight", convolution)
            file.matrix(f"{layer}.shortconv.in_proj", 3 * N_EMBD, N_EMBD)
            file.matrix(f"{layer}.shortconv.out_proj", N_EMBD, N_EMBD)
        file.vector(f"{layer}.ffn_norm.weight", 1.0)
        feed_forward(file, layer)
    file.close()


def write_tiny_bert(path: Path) -> None:
    n_layer, n_ctx = 2, 512
    file = File(path, "bert", seed=5)
    file.writer.add_name("tiny-bert")
    file.keys(block_count=n_layer, context_length=n_ctx, embedding_length=N_EMBD, feed_forward_length=N_FF)
    file.keys(attention__head_count=N_HEAD, attention__layer_norm_epsilon=1e-12, attention__causal=False)
    file.keys(pooling_type=int(gguf.PoolingType.MEAN))
    file.embedding(file.vocabulary("bert-bge"))
    positions = file.random.standard_normal((n_ctx, N_EMBD), dtype=np.float32) * 0.01
    file.writer.add_tensor("position_embd.weight", positions)
    file.writer.add_tensor("token_types.weight", np.zeros((2, N_EMBD), dtype=np.float32))
    norms = ["token_embd_norm"]
    for i in range(n_layer):
        layer = f"blk.{i}"
        norms += [f"{layer}.attn_output_norm", f"{layer}.layer_output_norm"]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            file.matrix(f"{layer}.{name}", N_EMBD, N_EMBD)
            file.vector(f"{layer}.{name}.bias", 0.0)
        file.matrix(f"{layer}.ffn_up", N_FF, N_EMBD)
        file.vector(f"{layer}.ffn_up.bias", 0.0, N_FF)
        file.matrix(f"{layer}.ffn_down", N_EMBD, N_FF)
        file.vector(f"{layer}.ffn_down.bias", 0.0)
    for norm in norms:
        file.vector(f"{norm}.weight", 1.0)
        file.vector(f"{norm}.bias", 0.0)
    file.close()


def write_lora(path: Path, name: str, n_embd: int) -> None:
    """On the queries and the feed-forward of the first two layers; strong enough to change the answer."""
    file = File(path, "llama", seed=6)
    file.writer.add_name(name)
    file.writer.add_type(gguf.GGUFType.ADAPTER)
    file.writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    file.writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(LORA_RANK))
    for i in range(2):
        for tensor, n_in, n_out in (("attn_q", n_embd, n_embd), ("ffn_down", N_FF, n_embd)):
            down = file.random.standard_normal((LORA_RANK, n_in), dtype=np.float32) / np.sqrt(n_in)
            up = file.random.standard_normal((n_out, LORA_RANK), dtype=np.float32) / np.sqrt(LORA_RANK)
            file.writer.add_tensor(f"blk.{i}.{tensor}.weight.lora_a", down.astype(np.float32))
            file.writer.add_tensor(f"blk.{i}.{tensor}.weight.lora_b", up.astype(np.float32))
    file.close()


def write_tiny_lora(path: Path) -> None:
    write_lora(path, "tiny-lora", N_EMBD)


def write_tiny_lora_foreign(path: Path) -> None:
    write_lora(path, "tiny-lora-foreign", N_EMBD + 64)


MAKERS: dict[str, Callable[[Path], None]] = {
    "tiny-llama.gguf": write_tiny_llama,
    "tiny-spm.gguf": write_tiny_spm,
    "tiny-swa.gguf": write_tiny_swa,
    "tiny-mamba.gguf": write_tiny_mamba,
    "tiny-hybrid.gguf": write_tiny_hybrid,
    "tiny-bert.gguf": write_tiny_bert,
    "tiny-lora.gguf": write_tiny_lora,
    "tiny-lora-foreign.gguf": write_tiny_lora_foreign,
    "tiny-split-00001-of-00002.gguf": write_tiny_split,
}


def recipe() -> str:
    """What the files depend on: this file and the writer. The vocabularies change only with the pin."""
    pin = (HERE.parent / "third_party" / "llama.cpp.cmake").read_bytes()
    parts = Path(__file__).read_bytes(), pin, importlib.metadata.version("gguf").encode()
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def up_to_date(folder: Path, wanted: str) -> dict[str, int] | None:
    """The files and their sizes, if all of them are there and from this recipe."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sizes if stamp["recipe"] == wanted and stamp["files"] == sizes else None


def build(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Makes what is missing or outdated; returns every file by its stem."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = recipe()
    with open(folder / f"{STAMP}.lock", "a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sizes = up_to_date(folder, wanted)
        if sizes is None:
            with tempfile.TemporaryDirectory(dir=folder, prefix="tiny-") as temporary:
                for name, make in MAKERS.items():
                    make(Path(temporary) / name)
                made = sorted(Path(temporary).iterdir())
                sizes = {path.name: path.stat().st_size for path in made}
                stamp = Path(temporary) / STAMP
                stamp.write_text(json.dumps({"recipe": wanted, "files": sizes}, indent=1))
                # The stamp goes last: whoever is killed on the way leaves files that are made again.
                for path in [*made, stamp]:
                    os.replace(path, folder / path.name)
    return {Path(name).stem: folder / name for name in sorted(sizes)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the tiny models that the tests use.")
    parser.add_argument("folder", type=Path)
    for path in build(parser.parse_args().folder).values():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
