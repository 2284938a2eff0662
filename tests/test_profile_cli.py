"""`llamacppshim profile`, runtimes opened by a profile, and the trial of settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamacppshim import Model, Profile, PromptConfig, Runtime, RuntimeConfig
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import InvalidArgumentError, ManifestMismatchError, UnsupportedFeatureError
from llamacppshim.tuning import tune

MAIN = [sys.executable, "-c", "from llamacppshim.cli import main; main()", "profile"]


def start(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*MAIN, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def model(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_models["tiny-llama"], tmp_path / "model.gguf"))


def test_a_profile_is_measured_written_and_checked(model: Path, tmp_path: Path) -> None:
    done = start(tmp_path, "init", model, "--n-ctx", "1024")
    assert (done.returncode, done.stderr) == (0, "")
    assert "flash attention" in done.stdout and "decode tokens/s" in done.stdout
    profile = Profile.load(tmp_path)
    assert (profile.model, profile.runtime.n_ctx) == ("model.gguf", 1024)
    with Model(model) as loaded:
        assert profile.model_digest == loaded.digest
    for path in (tmp_path, tmp_path / "llamacppshim.json", model):
        done = start(tmp_path, "check", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "fits tiny-llama; 1,024 cells" in done.stdout
    done = start(tmp_path, "init", model)
    assert done.returncode == 1 and "is there already" in done.stderr
    assert start(tmp_path, "init", model, "--force").returncode == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_digest": "0" * 64}, "model_digest is"),
        ({"prompt": {"template_digest": "0" * 64}}, "template_digest is"),
        ({"runtime": {"n_ctx": 0}}, "runtime.n_ctx"),
        ({"runtime": {"type_v": "q8_0", "flash_attn": "off"}}, "flash"),
        ({"unknown": 1}, "unknown"),
        ({"backend": "localnode"}, "backend"),
        ({"model": "missing.gguf"}, "missing.gguf"),
        ({"sampling": {"grammar": "root ::= ("}}, "sampling.grammar: line 1"),
        ({"sampling": {"grammar": "root ::= nope"}}, 'sampling.grammar: line 1, column 10: rule "nope" is not defined'),
        ({"sampling": {"logit_bias": {"1000000000": 1}}}, "sampling.logit_bias[0][0] is 1000000000"),
        ({"runtime": {"devices": ["x"]}}, 'runtime.devices: device "x"'),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_in_a_line(
    model: Path, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    (tmp_path / "llamacppshim.json").write_text(json.dumps({"model": "model.gguf", **change}))
    done = start(tmp_path, "check", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("llamacppshim: ") and done.stderr.count("\n") == 1
    assert text in done.stderr


def test_a_profile_that_is_not_there_is_named_as_it_was_asked_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for asked, text in (
        ("nope", "nope: no such file or folder"),
        ("none/x.json", "none/x.json: no such file or folder"),
        ("empty", "empty has no profile: there is no empty/llamacppshim.json"),
        ("model.gguf", "model.gguf has no profile: there is no llamacppshim.json"),
        ("pipe.json", "pipe.json: is not a regular file"),
    ):
        done = start(tmp_path, "check", asked)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"llamacppshim: {text}\n")


def test_a_model_without_text_or_a_missing_one_gets_none(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    for path, text in ((tiny_models["tiny-bert"], "embeddings, not text"), (tmp_path / "x.gguf", "x.gguf")):
        done = start(tmp_path, "init", path, "--force")
        assert done.returncode == 1 and text in done.stderr
    assert not (tmp_path / "llamacppshim.json").exists()


def test_a_runtime_takes_everything_from_its_profile(model: Path, tmp_path: Path) -> None:
    Profile(
        profile_id="mine",
        model="model.gguf",
        prompt=PromptConfig(format="chatml", add_bos=True),
        runtime=RuntimeConfig(n_ctx=512, n_ubatch=64),
        sampling=DecodeConfig(max_tokens=5, ignore_eos=True),
    ).save(tmp_path)
    with Runtime.from_profile(tmp_path, n_ubatch=32) as runtime, runtime.session() as session:
        assert (runtime.config.n_ctx, runtime.config.n_ubatch) == (512, 32)
        identity = runtime.identity()
        assert (identity.profile_id, identity.prompt_format, identity.add_bos) == ("mine", "chatml", True)
        session.ensure_prefix("hello")
        assert session.tokens[0] == runtime.model.bos
        assert len(session.collect().tokens) == 5
        assert len(session.collect(max_tokens=2).tokens) == 2
        reply = session.chat([{"role": "user", "content": "hello"}])
        assert len([token for chunk in reply for token in chunk.tokens]) == 5
        text = runtime.model.detokenize(session.tokens).decode("utf-8", "replace")
        assert "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" in text
        status = session.ensure_prefix("hello")
    with Runtime.open(model, n_ctx=512, n_ubatch=32) as other, other.session() as session:
        assert session.ensure_prefix("hello").manifest_digest != status.manifest_digest
        assert other.identity().compatible(identity) == "profile_id"


def test_a_profile_of_another_model_is_a_mismatch(model: Path, tmp_path: Path) -> None:
    Profile(model="model.gguf", model_digest="0" * 64).save(tmp_path)
    with pytest.raises(ManifestMismatchError) as caught:
        Runtime.from_profile(tmp_path)
    assert caught.value.field == "model_digest"
    with pytest.raises(FileNotFoundError):
        Runtime.from_profile(tmp_path / "nowhere.json")
    (tmp_path / "llamacppshim.json").write_text("[]")
    with pytest.raises(InvalidArgumentError):
        Runtime.from_profile(tmp_path)


def test_the_trial_covers_its_settings_and_chooses_among_them(loaded: dict[str, Model]) -> None:
    steps: list[tuple[int, int]] = []
    tuned = tune(loaded["tiny-llama"], depth=64, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] == len(tuned.trials)
    assert {trial.flash_attn for trial in tuned.trials} == {"on", "off"}
    assert {trial.n_ubatch for trial in tuned.trials} == {128, 256, 512}
    fastest = max(tuned.trials, key=lambda trial: trial.decode_tokens_per_s)
    assert all(trial.decode_tokens_per_s > 0 for trial in tuned.trials)
    assert tuned.n_threads in {trial.n_threads for trial in tuned.trials} and fastest in tuned.trials
    assert tune(loaded["tiny-llama"], depth=32, type_k="q8_0", type_v="q8_0").flash_attn == "on"
    for name in ("tiny-mamba", "tiny-hybrid"):
        assert tune(loaded[name], depth=32).n_threads >= 1
    with pytest.raises(UnsupportedFeatureError):
        tune(loaded["tiny-bert"])


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"grammar": "root ::= ("}, "sampling.grammar"),
        ({"grammar": "root ::= nope"}, "sampling.grammar"),
        ({"logit_bias": [[10**9, 1.0]]}, "sampling.logit_bias"),
    ],
)
def test_a_runtime_is_not_opened_by_a_profile_whose_sampling_its_model_refuses(
    tiny_llama: Path, tmp_path: Path, sampling: dict[str, Any], field: str
) -> None:
    shutil.copy(tiny_llama, tmp_path / "m.gguf")
    (tmp_path / "llamacppshim.json").write_text(json.dumps({"model": "m.gguf", "sampling": sampling}))
    with pytest.raises(InvalidArgumentError) as caught:
        Runtime.from_profile(tmp_path, n_ctx=256)
    assert caught.value.field is not None and caught.value.field.startswith(field)
    for values, overrides, name in (({"devices": ["x"]}, {}, "runtime.devices"), ({}, {"devices": ["x"]}, "devices")):
        (tmp_path / "llamacppshim.json").write_text(json.dumps({"model": "m.gguf", "runtime": values}))
        with pytest.raises(InvalidArgumentError) as caught:
            Runtime.from_profile(tmp_path, n_ctx=256, **overrides)
        assert caught.value.field == name  # the profile's, or the caller's own
