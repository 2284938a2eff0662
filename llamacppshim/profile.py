"""Owns the profile: a JSON file beside a model that says how it is run, checked to the last field. Pure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from llamacppshim.config import AdapterConfig, DecodeConfig, RuntimeConfig
from llamacppshim.errors import GrammarError, InvalidArgumentError, OutOfRangeError, UnsupportedFeatureError
from llamacppshim.files import open_regular, replaced
from llamacppshim.formats import FORMATS
from llamacppshim.manifest import digest_of

PROFILE_NAME = "llamacppshim.json"
MAX_PROFILE_BYTES = 1 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOT_IN_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38
_BREAKER_BYTES = 40

# The sampler's own limits, judged here too because a profile is written long before its first answer. A test holds the
# two equal.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "dynatemp_range": (0, 1e6),
    "dynatemp_exponent": (0, 1e3),
    "top_k": (-(2**31), _INT32_MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1e6, 1e6),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "penalty_repeat": (1e-6, 1e6),
    "penalty_freq": (-1e6, 1e6),
    "penalty_present": (-1e6, 1e6),
    "penalty_last_n": (0, 1_000_000),
    "dry_multiplier": (0, 1e6),
    "dry_base": (0, 1e6),
    "dry_allowed_length": (0, 1_000_000),
    "dry_penalty_last_n": (0, 1_000_000),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 1e3),
    "mirostat_eta": (0, 1e3),
    "min_keep": (0, 2**32 - 1),
}


# Judging values.


def _refused(field: str, value: object, expected: str) -> InvalidArgumentError:
    shown = _short(repr(value))
    return InvalidArgumentError(
        f"{field} is {shown}, expected {expected}", field=field, expected=expected, actual=value
    )


def _unsupported(field: str, value: str, expected: str) -> UnsupportedFeatureError:
    shown = _short(repr(value))
    return UnsupportedFeatureError(f"{field} {shown} is not supported, only {expected}", feature=f"{field} {shown}")


def _require(field: str, value: object, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise _refused(field, value, expected)


def _require_digest(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise _refused(field, value, "64 hexadecimal digits in lower case, or None")


def _require_number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _refused(field, value, f"a number of {low:.10g} to {high:.10g}")


def _require_path(field: str, value: str) -> None:
    if not value or "\0" in value:
        raise _refused(field, value, "a path")


def _require_sampling(config: DecodeConfig) -> None:
    """What every model's sampler would refuse. Grammars, and which tokens there are, need the model."""
    for name, (low, high) in SAMPLING_RANGES.items():
        if (value := getattr(config, name)) is not None:
            _require_number(f"sampling.{name}", value, low, high)
    for i, breaker in enumerate(config.dry_breakers or ()):
        if not isinstance(breaker, str) or not 1 <= len(breaker.encode(errors="replace")) <= _BREAKER_BYTES:
            raise _refused(f"sampling.dry_breakers[{i}]", breaker, f"a text of 1 to {_BREAKER_BYTES} bytes")
    for i, token in enumerate(config.trigger_tokens):
        _require_number(f"sampling.trigger_tokens[{i}]", token, 0, _INT32_MAX)
    for i, pair in enumerate(config.logit_bias or ()):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _refused(f"sampling.logit_bias[{i}]", pair, "a token and its bias")
        _require_number(f"sampling.logit_bias[{i}][0]", pair[0], 0, _INT32_MAX)
        _require_number(f"sampling.logit_bias[{i}][1]", pair[1], -math.inf, _FLOAT32_MAX)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


# The profile and its parts.


class PromptConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages become a prompt.

    Attributes
    ----------
    format
        ``model``: the model's own template. ``chatml``, ``llama3``: these, whatever it has. ``raw``: text as it is.
    template_digest
        SHA-256 hex that the model's template must have. None: whichever.
    add_bos
        Whether a prompt begins with BOS. None: as the model has it.
    """

    format: str = "model"
    template_digest: str | None = None
    add_bos: bool | None = None

    def __post_init__(self) -> None:
        _require("format", self.format, str, "a text")
        if self.format not in FORMATS:
            raise _unsupported("prompt.format", self.format, "one of " + " ".join(FORMATS))
        _require_digest("template_digest", self.template_digest)
        _require("add_bos", self.add_bos, (bool, type(None)), "True, False or None")


class ToolsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tools are spoken of. ``protocol`` None: as the model's template does, if it does. Another is a name for the
    program that writes and reads the calls itself, as text; nothing here speaks it."""

    protocol: str | None = None

    def __post_init__(self) -> None:
        _require("protocol", self.protocol, (str, type(None)), "a text or None")
        if self.protocol == "":
            raise _refused("protocol", self.protocol, "a text that is not empty, or None")


_PARTS = {"prompt": PromptConfig, "runtime": RuntimeConfig, "sampling": DecodeConfig, "tools": ToolsConfig}


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one model is run. An immutable value; its file is `PROFILE_NAME` beside the model.

    Attributes
    ----------
    profile_id
        Part of the identity of what is computed with it.
    model
        The model's file, relative to the profile's folder.
    model_digest
        SHA-256 hex that it must have. None: whichever.
    backend
        ``llama``; ``local`` is taken as another name for it.
    """

    profile_id: str = ""
    model: str
    model_digest: str | None = None
    prompt: PromptConfig = PromptConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    sampling: DecodeConfig = DecodeConfig()
    tools: ToolsConfig = ToolsConfig()
    backend: str = "llama"

    def __post_init__(self) -> None:
        for name in ("profile_id", "model", "backend"):
            _require(name, getattr(self, name), str, "a text")
        _require_path("model", self.model)
        _require_digest("model_digest", self.model_digest)
        for name, kind in _PARTS.items():
            _require(name, getattr(self, name), kind, f"a {kind.__name__}")
        for i, adapter in enumerate(self.runtime.adapters):
            _require_path(f"runtime.adapters[{i}].path", adapter.path)
        if self.backend == "local":
            msgspec.structs.force_setattr(self, "backend", "llama")
        if self.backend != "llama":
            raise _unsupported("backend", self.backend, "llama")
        _require_sampling(self.sampling)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """From its file, or the folder that holds it. As `from_json`, the path before the text; OSError where it cannot
        be read, or is no regular file."""
        file = _profile_file(path)
        with open_regular(file) as opened:
            data = opened.read(MAX_PROFILE_BYTES + 1)
        if len(data) > MAX_PROFILE_BYTES:
            raise InvalidArgumentError(f"{file}: over {MAX_PROFILE_BYTES:,} bytes, not a profile")
        return _decoded(data, f"{file}: ")

    @classmethod
    def from_json(cls, data: bytes | str) -> Profile:
        """Strictly: no unknown field at any level, no value of another type, none that makes no sense.

        Raises
        ------
        InvalidArgumentError     ``field`` is the path of the field (``runtime.n_ctx``, ``sampling.stop[1]``); empty
                                 where the whole is not JSON, or no object
        UnsupportedFeatureError  another prompt format or backend
        """
        return _decoded(data)

    def to_json(self) -> bytes:
        """What is not as by default, in the order of the fields; equal profiles give equal bytes. `from_json` reads it.

        Raises InvalidArgumentError for values that JSON does not have: a lone surrogate, an infinite bias.
        """
        return msgspec.json.format(msgspec.json.encode(_decided(self._as_loaded())), indent=2) + b"\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole or not at all, to this file or as `PROFILE_NAME` in this folder. OSError where not."""
        file = _profile_file(path)
        data = self.to_json()
        with replaced(file, mode=0o666) as opened:
            opened.write(data)

    def digest(self) -> str:
        """SHA-256 hex over every field, those left to their defaults too."""
        return digest_of(self._as_loaded())

    def model_path(self, folder: str | os.PathLike[str]) -> Path:
        """The model's file, for a profile of this folder."""
        return Path(folder, self.model)

    def runtime_config(self, folder: str | os.PathLike[str] | None = None) -> RuntimeConfig:
        """For `Runtime.open`. With the profile's folder: relative paths of adapters are taken from there."""
        if folder is None:
            return self.runtime
        adapters = tuple(
            AdapterConfig(os.fspath(Path(folder, adapter.path)), adapter.scale) for adapter in self.runtime.adapters
        )
        return msgspec.structs.replace(self.runtime, adapters=adapters)

    def decode_config(self) -> DecodeConfig:
        """For `Session.decode`."""
        return self.sampling

    def require_sampling(self, n_vocab: int, make_sampler: Callable[..., Any]) -> None:
        """Judge what only the model can tell: whether it has the tokens, and its sampler takes the grammar.

        Parameters
        ----------
        n_vocab
            Tokens of the model.
        make_sampler
            ``partial(Sampler, model)``; what it makes is closed.

        Raises InvalidArgumentError with the path of the field.
        """
        config = self.sampling
        tokens = [
            *((f"show_special[{i}]", token) for i, token in enumerate(config.show_special)),
            *((f"trigger_tokens[{i}]", token) for i, token in enumerate(config.trigger_tokens)),
            *((f"logit_bias[{i}][0]", token) for i, (token, _) in enumerate(_bias_of(config))),
        ]
        for name, token in tokens:
            if token >= n_vocab:
                raise _refused(f"sampling.{name}", token, f"a token of the model, 0 to {n_vocab - 1}")
        # The grammar alone, so that what is wrong then is not in it.
        alone = DecodeConfig(grammar=config.grammar, grammar_root=config.grammar_root)
        for name, one in (("grammar", alone), ("trigger_patterns", config)):
            try:
                with _fields_of("sampling", DecodeConfig):
                    make_sampler(**one.sampling()).close()
            except GrammarError as error:
                raise InvalidArgumentError(_line(f"sampling.{name}: {error}"), field=f"sampling.{name}") from error

    def _as_loaded(self) -> Profile:
        """Through JSON and back: 1 where a float stands becomes 1.0, and what a file could not hold is refused."""
        try:
            data = msgspec.json.encode(self)
        except UnicodeEncodeError:
            field = next(path for path, text in _texts(msgspec.to_builtins(self)) if _SURROGATE.search(text))
            raise InvalidArgumentError(f"{field} has a lone surrogate", field=field) from None
        return _decoded(data)


def _bias_of(config: DecodeConfig) -> tuple[tuple[int, float], ...]:
    """Pairs, as DecodeConfig makes them of whatever it is given."""
    return config.logit_bias if isinstance(config.logit_bias, tuple) else ()


def _profile_file(path: str | os.PathLike[str]) -> Path:
    """The profile's file, of itself or its folder."""
    file = Path(path)
    if "\0" in os.fspath(file):
        raise _refused("path", os.fspath(path), "a path")
    return file / PROFILE_NAME if file.is_dir() else file


@contextlib.contextmanager
def runtime_fields(overrides: Container[str] = ()) -> Iterator[None]:
    """Refusals of settings by what opens a runtime carry the path of the field in the profile (``runtime.devices``),
    but for those that come from elsewhere.
    """
    with _fields_of("runtime", RuntimeConfig, overrides):
        yield


@contextlib.contextmanager
def _fields_of(part: str, kind: type[msgspec.Struct], overrides: Container[str] = ()) -> Iterator[None]:
    try:
        yield
    except (InvalidArgumentError, OutOfRangeError) as error:
        name = re.split(r"[.\[]", error.field)[0]
        if name not in kind.__struct_fields__ or name in overrides:
            raise
        field, text = f"{part}.{error.field}", str(error)
        raise type(error)(
            f"{part}.{text}" if text.startswith(error.field) else f"{field}: {text}",
            field=field,
            expected=error.expected,
            actual=error.actual,
        ) from error


# JSON.

# Where msgspec says that it is: "... - at `$.runtime.n_ctx`", or "... - at `key` in `$.sampling.logit_bias`".
_PLACE = re.compile(r" - at (?:`key` in )?`\$([^`]*)`\Z")
_OBJECT = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def _decoded(data: bytes | str, prefix: str = "") -> Profile:
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.ValidationError as error:
        raise _explained(error, prefix) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        if (field := _torn(data)) is not None:
            raise InvalidArgumentError(_line(f"{prefix}{field} has a lone surrogate"), field=field) from error
        raise InvalidArgumentError(_line(f"{prefix}not JSON: {error}")) from error
    except UnsupportedFeatureError as error:
        raise UnsupportedFeatureError(_line(f"{prefix}{error}"), feature=error.feature) from None
    # msgspec takes the last of two fields with one name.
    fields = json.loads(data, object_pairs_hook=_Fields, parse_int=_text, parse_float=_text)
    if (field := _said_twice(fields)) is not None:
        raise InvalidArgumentError(_line(f"{prefix}{_short(field)} is there twice"), field=field)
    return profile


class _Fields(list[tuple[str, Any]]):
    """An object of JSON as it is written."""


def _text(digits: str) -> str:
    return digits  # no number is looked at, however long


def _said_twice(value: Any, path: str = "") -> str | None:
    """The path of a field that its object has twice."""
    if isinstance(value, _Fields):
        below = [(_joined(path, name), one) for name, one in value]
    elif isinstance(value, list):
        below = [(f"{path}[{i}]", one) for i, one in enumerate(value)]
    else:
        return None
    seen: set[str] = set()
    for own, one in below:
        if own in seen:
            return own
        seen.add(own)
        if (found := _said_twice(one, own)) is not None:
            return found
    return None


def _torn(data: bytes | str) -> str | None:
    """The path of a text with half of a pair of surrogates, in what is JSON but for that."""
    try:
        return next((path for path, text in _texts(json.loads(data)) if _SURROGATE.search(text)), None)
    except (ValueError, RecursionError):
        return None


def _explained(error: msgspec.ValidationError, prefix: str) -> InvalidArgumentError:
    """Whether msgspec judged or one of our classes, whose error is then the cause of msgspec's."""
    what, path = str(error), ""
    if place := _PLACE.search(what):
        what, path = what[: place.start()], place[1].removeprefix(".")
    expected: object = None
    actual: object = None
    if isinstance(cause := error.__cause__, (InvalidArgumentError, OutOfRangeError)):
        what = str(cause).removeprefix(cause.field)
        # AdapterConfig calls its fields "adapters.path", and the path ends with "adapters[0]" already.
        field = _joined(path, cause.field.rpartition(".")[2] if "adapters[" in path else cause.field)
        expected, actual = cause.expected, cause.actual
    elif named := _OBJECT.fullmatch(what):
        field = _joined(path, named[2])
        what = " is no field of a profile" if named[1] == "contains unknown" else " is missing"
    else:
        field = path
        what = f": {_short(what[:1].lower() + what[1:])}" if path else what
    return InvalidArgumentError(_line(f"{prefix}{_short(field)}{what}"), field=field, expected=expected, actual=actual)


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def _line(text: str) -> str:
    return _NOT_IN_A_LINE.sub(lambda found: repr(found[0])[1:-1], text)


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in it, with its path; the names of fields likewise."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield _joined(path, name), name
            yield from _texts(one, _joined(path, name))
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _texts(one, f"{path}[{i}]")


def _decided(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that are not as by default, those of the parts likewise."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        one = getattr(value, field.name)
        if one != field.default:
            found[field.name] = _decided(one) if isinstance(one, msgspec.Struct) else one
    return found
