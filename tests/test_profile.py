"""Profiles: what a file may say, and that a refusal always names the field."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import RunChild

from llamacppshim import Model, Sampler
from llamacppshim.config import AdapterConfig, DecodeConfig, RuntimeConfig
from llamacppshim.errors import InvalidArgumentError, LlamaCppShimError, OutOfRangeError, UnsupportedFeatureError
from llamacppshim.profile import (
    MAX_PROFILE_BYTES,
    PROFILE_NAME,
    SAMPLING_RANGES,
    Profile,
    PromptConfig,
    ToolsConfig,
    runtime_fields,
)

DIGEST = "0123456789abcdef" * 4


def full() -> Profile:
    """Every part says something, but for tools, of which there is nothing to say; and every list has entries."""
    return Profile(
        profile_id="a profile",
        model="model.gguf",
        model_digest=DIGEST,
        prompt=PromptConfig(format="chatml", template_digest=DIGEST, add_bos=False),
        runtime=RuntimeConfig(
            n_ctx=4096,
            n_threads=2,
            flash_attn="on",
            devices=("CPU", "GPU"),
            tensor_split=(0.5, 0.25),
            adapters=(AdapterConfig("one.gguf", 0.5), AdapterConfig("/two.gguf")),
        ),
        sampling=DecodeConfig(
            max_tokens=64,
            temperature=0.7,
            seed=1,
            stop=("a", "b"),
            top_k=40,
            dry_breakers=("\n", ":"),
            logit_bias=((1, -1.5), (2, 3.0)),
            trigger_patterns=("x",),
            trigger_tokens=(5, 6),
        ),
        tools=ToolsConfig(protocol="hermes"),
    )


def refusal(changes: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        Profile.from_json(json.dumps({"model": "m.gguf", **changes}))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(caught.value.field.replace("\n", "\\n"))
    return caught.value


# What a file says.


@pytest.mark.parametrize("profile", [Profile(model="m.gguf"), full()], ids=["least", "full"])
def test_a_saved_profile_is_the_same_when_loaded(tmp_path: Path, profile: Profile) -> None:
    profile.save(tmp_path)
    path = tmp_path / PROFILE_NAME
    loaded = Profile.load(path)
    assert loaded == profile == Profile.load(tmp_path)
    assert loaded.digest() == profile.digest()
    assert path.read_bytes() == loaded.to_json() == profile.to_json()
    assert os.listdir(tmp_path) == [PROFILE_NAME]


def test_a_file_says_only_what_was_decided() -> None:
    assert json.loads(Profile(model="m.gguf").to_json()) == {"model": "m.gguf"}
    profile = Profile(model="m.gguf", runtime=RuntimeConfig(n_ctx=512), prompt=PromptConfig(add_bos=False))
    assert profile.to_json().decode() == (
        '{\n  "model": "m.gguf",\n  "prompt": {\n    "add_bos": false\n  },\n  "runtime": {\n    "n_ctx": 512\n  }\n}\n'
    )


def test_a_file_that_spells_out_the_defaults_says_the_same() -> None:
    for profile in (Profile(model="m.gguf"), full()):
        spelt = Profile.from_json(msgspec.json.encode(profile))
        assert spelt == profile and spelt.digest() == profile.digest() and spelt.to_json() == profile.to_json()


def test_the_digest_is_that_of_the_values() -> None:
    one = Profile(model="m.gguf", sampling=DecodeConfig(temperature=1, stop="end"))
    same = Profile(model="m.gguf", sampling=DecodeConfig(temperature=1.0, stop=["end"]))
    assert one.digest() == same.digest() and one.to_json() == same.to_json()
    assert one.digest() == Profile.from_json(one.to_json()).digest()
    digests = {one.digest(), full().digest(), Profile(model="m.gguf").digest(), Profile(model="n.gguf").digest()}
    assert len(digests) == 4


@pytest.mark.parametrize("name", ["llama", "local"])
def test_local_is_another_name_of_the_backend(name: str) -> None:
    profile = Profile.from_json(json.dumps({"model": "m.gguf", "backend": name}))
    assert profile.backend == "llama"
    assert profile == Profile(model="m.gguf", backend=name) == Profile(model="m.gguf")
    assert b"backend" not in profile.to_json()


@pytest.mark.parametrize("name", ["localnode", "vllm", "", "Llama", "a\nb"])
def test_other_backends_are_not_supported(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"^backend .* is not supported, only llama$") as caught:
        Profile.from_json(json.dumps({"model": "m.gguf", "backend": name}))
    assert caught.value.feature == f"backend {name!r}"
    with pytest.raises(UnsupportedFeatureError):
        Profile(model="m.gguf", backend=name)


@pytest.mark.parametrize("name", ["model", "chatml", "llama3", "raw"])
def test_the_four_prompt_formats_are_taken(name: str) -> None:
    assert Profile.from_json(json.dumps({"model": "m", "prompt": {"format": name}})).prompt.format == name
    assert PromptConfig().format == "model"


@pytest.mark.parametrize("name", ["mistral", "", "ChatML", "x" * 10_000])
def test_other_prompt_formats_are_not_supported(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"^prompt\.format '") as caught:
        Profile.from_json(json.dumps({"model": "m", "prompt": {"format": name}}))
    assert len(str(caught.value)) < 200


def test_the_configurations_are_ready_for_use(tmp_path: Path) -> None:
    profile = full()
    assert profile.runtime_config() is profile.runtime
    assert profile.decode_config() is profile.sampling
    found = profile.runtime_config(tmp_path).adapters
    assert found == (AdapterConfig(str(tmp_path / "one.gguf"), 0.5), AdapterConfig("/two.gguf"))
    assert profile.runtime_config(tmp_path).n_ctx == 4096
    assert profile.model_path(tmp_path) == tmp_path / "model.gguf"
    assert Profile(model="/models/m.gguf").model_path(tmp_path) == Path("/models/m.gguf")


# What is refused, and where.


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": {"nonsense": 1}}, "prompt.nonsense"),
        ({"runtime": {"nonsense": 1}}, "runtime.nonsense"),
        ({"runtime": {"adapters": [{"path": "a"}, {"path": "b", "nonsense": 1}]}}, "runtime.adapters[1].nonsense"),
        ({"sampling": {"nonsense": 1}}, "sampling.nonsense"),
        ({"tools": {"nonsense": 1}}, "tools.nonsense"),
        ({"a.b` - at `$.c`": 1}, "a.b` - at `$.c`"),
        ({"runtime": {"`\n": 1}}, "runtime.`\n"),
        ({"runtime": {"": 1}}, "runtime."),
    ],
)
def test_unknown_fields_are_refused_at_every_level(changes: Any, field: str) -> None:
    error = refusal(changes)
    assert error.field == field.removesuffix(".")
    assert "is no field of a profile" in str(error)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": None}, "model"),
        ({"profile_id": 1}, "profile_id"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"format": 3}}, "prompt.format"),
        ({"prompt": {"add_bos": 1}}, "prompt.add_bos"),
        ({"runtime": {"n_ctx": "4096"}}, "runtime.n_ctx"),
        ({"runtime": {"n_ctx": True}}, "runtime.n_ctx"),
        ({"runtime": {"n_ctx": 1.5}}, "runtime.n_ctx"),
        ({"runtime": {"use_mmap": 1}}, "runtime.use_mmap"),
        ({"runtime": {"devices": "CPU"}}, "runtime.devices"),
        ({"runtime": {"tensor_split": [1, None]}}, "runtime.tensor_split[1]"),
        ({"runtime": {"adapters": ["a.gguf"]}}, "runtime.adapters[0]"),
        ({"runtime": {"adapters": [{"path": "a", "scale": "1"}]}}, "runtime.adapters[0].scale"),
        ({"sampling": {"stop": ["a", 1]}}, "sampling.stop[1]"),
        ({"sampling": {"stop": "a"}}, "sampling.stop"),
        ({"sampling": {"logit_bias": [[1, 1], [1]]}}, "sampling.logit_bias[1]"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias"),
        ({"tools": {"protocol": {}}}, "tools.protocol"),
        ({"backend": None}, "backend"),
    ],
)
def test_wrong_types_are_refused(changes: Any, field: str) -> None:
    assert refusal(changes).field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "a\0b"}, "model"),
        ({"runtime": {"adapters": [{"path": "a"}, {"path": "b\0"}]}}, "runtime.adapters[1].path"),
        ({"model_digest": "0" * 63}, "model_digest"),
        ({"model_digest": "G" * 64}, "model_digest"),
        ({"prompt": {"template_digest": ""}}, "prompt.template_digest"),
        ({"tools": {"protocol": ""}}, "tools.protocol"),
        ({"runtime": {"n_ctx": 0}}, "runtime.n_ctx"),
        ({"runtime": {"n_ctx": 10**30}}, "runtime.n_ctx"),
        ({"runtime": {"type_k": "q3"}}, "runtime.type_k"),
        ({"runtime": {"flash_attn": "o\nn"}}, "runtime.flash_attn"),
        ({"runtime": {"rope_freq_base": 0.0}}, "runtime.rope_freq_base"),
        ({"runtime": {"adapters": [{"path": "a"}, {"path": ""}]}}, "runtime.adapters[1].path"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"mirostat": 3}}, "sampling.mirostat"),
        ({"sampling": {"dry_breakers": ["a", "x" * 41]}}, "sampling.dry_breakers[1]"),
        ({"sampling": {"trigger_tokens": [0, -1]}}, "sampling.trigger_tokens[1]"),
        ({"sampling": {"logit_bias": [[0, 1], [-1, 1]]}}, "sampling.logit_bias[1][0]"),
        ({"sampling": {"logit_bias": {"1": 1e39}}}, "sampling.logit_bias[0][1]"),
    ],
)
def test_impossible_values_are_refused(changes: Any, field: str) -> None:
    assert refusal(changes).field == field


def test_an_empty_stop_text_is_found() -> None:
    assert refusal({"sampling": {"stop": ["a", ""]}}).field == "sampling.stop[1]"


def test_a_refusal_of_a_configuration_carries_what_that_said() -> None:
    error = refusal({"runtime": {"n_ctx": 0}})
    with pytest.raises(OutOfRangeError) as own:
        RuntimeConfig(n_ctx=0)
    assert (error.expected, error.actual) == (own.value.expected, 0)
    assert str(error) == f"runtime.{own.value}"


@pytest.mark.parametrize(
    "data", ["", "{", "nothing", '{"model": "\\ud800', "\x00", '{"model": NaN}', b"\xff{}", "[" * 10**6, "\ud800"]
)
def test_what_is_not_json_has_no_field(data: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Profile.from_json(data)
    assert caught.value.field == ""
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("half", ["\\ud800", "\\uDFFF", "abc\\udbffdef", "\\ud83d\\ud83d\\ude00"])
@pytest.mark.parametrize(
    ("data", "field", "shown"),
    [
        ('{"model": "*"}', "model", "model"),
        ('{"model": "m", "sampling": {"stop": ["a", "*"]}}', "sampling.stop[1]", "sampling.stop[1]"),
        ('{"model": "m", "runtime": {"*": 1}}', "runtime.*", "runtime."),
    ],
)
def test_half_a_pair_of_surrogates_is_named(data: str, field: str, shown: str, half: str) -> None:
    for text in (data.replace("*", half), data.replace("*", half).encode()):
        with pytest.raises(InvalidArgumentError, match=r"^[^\n\ud800-\udfff]* has a lone surrogate$") as caught:
            Profile.from_json(text)
        assert caught.value.field == field.replace("*", json.loads(f'"{half}"'))
        assert str(caught.value).startswith(shown)
    whole = data.replace("*", "\\ud83d\\ude00")
    assert "runtime" in whole or Profile.from_json(whole).model


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ('{"model": "m", "model": "m"}', "model"),
        ('{"model": "m", "runtime": {"n_ctx": 1}, "runtime": {}}', "runtime"),
        ('{"model": "m", "runtime": {"n_ctx": 512, "n_batch": 1, "n_ctx": 1024}}', "runtime.n_ctx"),
        ('{"model": "m", "runtime": {"n\\u005fctx": 512, "n_ctx": 1024}}', "runtime.n_ctx"),
        (
            '{"model": "m", "runtime": {"adapters": [{"path": "a"}, {"path": "b", "path": "c"}]}}',
            "runtime.adapters[1].path",
        ),
        ('{"model": "m", "sampling": {"logit_bias": {"1": 1, "2": 1, "1": 2}}}', "sampling.logit_bias.1"),
    ],
)
def test_a_field_that_is_there_twice_is_refused(data: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Profile.from_json(data)
    assert (caught.value.field, str(caught.value)) == (field, f"{field} is there twice")


def test_equal_names_in_different_places_are_no_repetition() -> None:
    text = '{"model": "m", "runtime": {"adapters": [{"path": "a"}, {"path": "a"}]}, "sampling": {"temperature": 1%s.0}}'
    assert len(Profile.from_json(text % "").runtime.adapters) == 2
    with pytest.raises(InvalidArgumentError) as caught:  # a number of more digits than Python's own reader takes
        Profile.from_json(text % ("0" * 5000))
    assert caught.value.field in ("", "sampling.temperature")


def test_the_model_must_be_named_and_the_whole_an_object() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^model is missing$") as caught:
        Profile.from_json("{}")
    assert caught.value.field == "model"
    with pytest.raises(InvalidArgumentError, match="Expected `object`, got `array`") as caught:
        Profile.from_json("[]")
    assert caught.value.field == ""


def test_the_text_names_the_file_and_stays_short(tmp_path: Path) -> None:
    path = tmp_path / PROFILE_NAME
    path.write_text(json.dumps({"model": "m", "x" * 100_000 + "\n": 1}))
    with pytest.raises(InvalidArgumentError) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: xxx") and len(str(caught.value)) < len(str(path)) + 200
    assert caught.value.field == "x" * 100_000 + "\n"
    path.write_text('{"model": "m", "backend": "localnode"}')
    with pytest.raises(UnsupportedFeatureError) as unsupported:
        Profile.load(tmp_path)
    assert str(unsupported.value).startswith(f"{path}: backend 'localnode'")


def test_what_cannot_be_a_profile_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.truncate(MAX_PROFILE_BYTES + 1)
    with pytest.raises(InvalidArgumentError, match="over 1,048,576 bytes, not a profile"):
        Profile.load(path)
    path.write_bytes(b'{"model": "m"}'.ljust(MAX_PROFILE_BYTES))
    assert Profile.load(path) == Profile(model="m")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        with pytest.raises(FileNotFoundError):
            Profile.load(path)
    with pytest.raises(FileNotFoundError):
        full().save(tmp_path / "none" / "x.json")


def test_a_path_that_is_none_is_refused() -> None:
    for call in (Profile.load, full().save):
        with pytest.raises(InvalidArgumentError, match=r"^path is 'a\\x00b', expected a path$") as caught:
            call("a\0b")
        assert caught.value.field == "path"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, run_child: RunChild) -> None:
    os.mkfifo(tmp_path / PROFILE_NAME)
    (tmp_path / "folder" / PROFILE_NAME).mkdir(parents=True)
    run_child(
        f"""
        from llamacppshim.digests import file_digest
        from llamacppshim.manifest import hash_bytes
        root = {os.fspath(tmp_path)!r}
        for path in (root, root + "/{PROFILE_NAME}", "/dev/zero", root + "/folder"):
            name, text = refusal(Profile.load, path)
            assert name in ("OSError", "IsADirectoryError") and "is " in text and path in text, (name, text)
        # Nor is that of an adapter.
        assert file_digest(root + "/{PROFILE_NAME}") == file_digest("a\\0b") == hash_bytes()
        """,
        timeout=60,
    )


@pytest.mark.parametrize(
    "values", [{"model": 3}, {"model": ""}, {"runtime": {}}, {"sampling": None}, {"profile_id": None}]
)
def test_a_profile_made_in_python_is_judged_too(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Profile(**{"model": "m", **values})
    assert caught.value.field == next(iter(values))


@pytest.mark.parametrize(
    ("profile", "field"),
    [
        (Profile(model="\ud800"), "model"),
        (Profile(model="m", sampling=DecodeConfig(grammar="\udfff")), "sampling.grammar"),
        (Profile(model="m", sampling=DecodeConfig(logit_bias={1: -math.inf})), "sampling.logit_bias[0][1]"),
        (Profile(model="m", sampling=DecodeConfig(top_k=1.5)), "sampling.top_k"),
    ],
)
def test_what_json_cannot_hold_is_not_saved(tmp_path: Path, profile: Profile, field: str) -> None:
    (tmp_path / PROFILE_NAME).write_text("before")
    with pytest.raises(InvalidArgumentError) as caught:
        profile.save(tmp_path)
    assert caught.value.field == field
    assert (tmp_path / PROFILE_NAME).read_text() == "before"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    full().save(tmp_path)
    before = (tmp_path / PROFILE_NAME).read_bytes()
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        Profile(model="m").save(tmp_path)
    assert (tmp_path / PROFILE_NAME).read_bytes() == before
    assert os.listdir(tmp_path) == [PROFILE_NAME]


# Against the sampler.


@pytest.mark.parametrize(
    ("sampling", "field", "text"),
    [
        ({"grammar": "root ::= ("}, "grammar", ": line 1, column 10: a ( without its )"),
        ({"grammar": "root ::= nope"}, "grammar", 'rule "nope" is not defined'),
        ({"grammar": ""}, "grammar", 'no rule "root"'),
        ({"grammar": 'root ::= "a"', "grammar_root": "other"}, "grammar", 'no rule "other"'),
        ({"grammar": 'root ::= "\0"'}, "grammar", " has a NUL at byte 10"),
        (
            {"grammar": 'root ::= "a"', "grammar_lazy": True, "trigger_patterns": ("(",)},
            "trigger_patterns",
            'trigger pattern "("',
        ),
        ({"logit_bias": ((1, 1.0), (10**9, 1.0))}, "logit_bias[1][0]", " is 1000000000, expected a token of the model"),
        ({"trigger_tokens": (1, 50_259)}, "trigger_tokens[1]", " is 50259, expected a token of the model, 0 to 50258"),
        ({"show_special": (50_259,)}, "show_special[0]", " is 50259, expected a token of the model, 0 to 50258"),
    ],
)
def test_what_only_the_model_can_judge_carries_the_path_too(
    model: Model, sampling: dict[str, Any], field: str, text: str
) -> None:
    profile = Profile(model="m", sampling=DecodeConfig(**sampling))
    with pytest.raises(InvalidArgumentError) as caught:
        profile.require_sampling(model.n_vocab, partial(Sampler, model))
    assert caught.value.field == f"sampling.{field}"
    assert str(caught.value).startswith(f"sampling.{field}") and text in str(caught.value)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"grammar": 'root ::= "a"', "grammar_lazy": True, "trigger_patterns": ("a+",), "trigger_tokens": (50_258,)},
        {"logit_bias": {0: -1.0, 50_258: 2.0}, "top_k": 40, "seed": 1, "show_special": (0, 50_258)},
    ],
)
def test_what_the_model_takes_is_taken(model: Model, sampling: dict[str, Any]) -> None:
    profile = Profile(model="m", sampling=DecodeConfig(**sampling))
    profile.require_sampling(model.n_vocab, partial(Sampler, model))


def test_a_refusal_while_opening_carries_the_path_but_for_what_came_from_elsewhere() -> None:
    def refused(field: str, overrides: Any = ()) -> InvalidArgumentError:
        with pytest.raises(InvalidArgumentError) as caught, runtime_fields(overrides):
            raise InvalidArgumentError(f"{field} is odd", field=field, expected=1, actual=2)
        return caught.value

    for field in ("devices", "tensor_split[1]", "adapters.path"):
        error = refused(field)
        assert (error.field, str(error)) == (f"runtime.{field}", f"runtime.{field} is odd")
        assert (error.expected, error.actual) == (1, 2)
    for field in ("path", "runtime.devices", ""):
        assert refused(field).field == field
    assert refused("devices", {"devices": ["x"]}).field == "devices"
    with pytest.raises(OutOfRangeError, match=r"^runtime\.devices: there is no \"x\"$"), runtime_fields():
        raise OutOfRangeError('there is no "x"', field="devices")


WHOLE = ("top_k", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_keep")


@pytest.mark.parametrize(("name", "side"), [(name, side) for name in SAMPLING_RANGES for side in (-1, 1)])
def test_the_ranges_are_those_of_the_sampler(model: Model, name: str, side: int) -> None:
    limit: Any = SAMPLING_RANGES[name][side > 0]
    if name in WHOLE:
        beyond = limit + side
    else:  # a little to either side: the sampler has 32 bits of each
        beyond, limit = limit + side * max(abs(limit), 1) * 1e-6, limit - side * abs(limit) * 1e-6
    refused = (InvalidArgumentError, OutOfRangeError)
    Sampler(model, **{name: limit}).close()
    Profile(model="m", sampling=DecodeConfig(**{name: limit}))
    with pytest.raises(refused) as caught:
        Profile(model="m", sampling=DecodeConfig(**{name: beyond}))
    assert caught.value.field.endswith(name)
    if (name, side) != ("temperature", -1):  # there it is greedy, which DecodeConfig says with 0
        with pytest.raises(refused):
            Sampler(model, **{name: beyond}).close()


def test_every_number_of_the_sampler_has_its_range() -> None:
    judged = {"seed", *SAMPLING_RANGES}
    for field in msgspec.structs.fields(DecodeConfig):
        if field.name in DecodeConfig().sampling() and field.type in (int | None, float | None, float):
            assert field.name in judged


# Ten thousand mutations.

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**30, 0.5, -0.5, 1e308, "", "model", "llama3", "\x00\n", "é\u2028"),
    *([], [[]], ["", 1], [None], {}, {"": 0}, {"path": 1}, {"1": 1}, {"format": "no"}, [[1, 2]], "x" * 5000),
]


def places(value: Any, path: str = "") -> list[tuple[Any, Any, str]]:
    """Each container, key and path below a value."""
    found: list[tuple[Any, Any, str]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        own = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}" if path else key
        found += [(value, key, own), *places(one, own)]
    return found


def mutated(draw: random.Random, value: Any) -> str:
    """Changed in one place, whose path is returned."""
    container, key, path = draw.choice(places(value))
    action = draw.choice(("set", "set", "set", "remove", "add"))
    if action == "remove":
        del container[key]
        return path.rpartition("[")[0] if isinstance(container, list) else path
    if action == "add" and isinstance(container, dict):
        name = draw.choice(("nonsense", "a\nb", "`", "$.x", key + "s"))
        container[name] = draw.choice(VALUES)
        return f"{path.removesuffix(key)}{name}"
    container[key] = draw.choice(VALUES)
    return path


def test_ten_thousand_mutations_are_taken_or_refused_by_the_field() -> None:
    draw = random.Random(5)
    base = json.loads(msgspec.json.encode(full()))
    n_taken = n_refused = n_unsupported = 0
    for _ in range(10_000):
        value = copy.deepcopy(base)
        path = mutated(draw, value)
        try:
            profile = Profile.from_json(json.dumps(value))
        except UnsupportedFeatureError as error:
            n_unsupported += 1
            assert str(error).startswith(path if path != "prompt" else "prompt.format"), (path, error)
        except InvalidArgumentError as error:
            n_refused += 1
            # The field itself, one below it, or the list that it is an entry of.
            assert (
                error.field == path
                or error.field.startswith((f"{path}.", f"{path}["))
                or (path.startswith(f"{error.field}[") and error.field)
            ), (path, error.field, error)
            assert str(error).startswith(error.field[:70].replace("\n", "\\n"))
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            n_taken += 1
            assert Profile.from_json(profile.to_json()) == profile
    assert n_refused > 5000 and n_taken > 1000 and n_unsupported > 10


def test_noise_is_refused_without_a_crash() -> None:
    draw = random.Random(6)
    base = full().to_json()
    for _ in range(2000):
        data = bytearray(base)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            Profile.from_json(bytes(data))
        except LlamaCppShimError as error:
            assert "\n" not in str(error)
