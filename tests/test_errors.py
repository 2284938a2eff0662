"""The exception classes: their bases, fields and texts, and that the shim's statuses each have one."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
from building import ROOT

from llamacppshim import _native, errors
from llamacppshim.errors import DecodeStatus

# Contract section 2: class, its builtin, its fields with a value each.
CONTRACT: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("ModelLoadError", OSError, {"path": "a.gguf", "reason": "short"}),
    ("ClosedError", RuntimeError, {}),
    ("BusyError", RuntimeError, {}),
    ("ForkedError", RuntimeError, {}),
    ("SessionUnavailableError", RuntimeError, {"reason": "none free"}),
    ("SessionClosedError", RuntimeError, {"reason": "was closed"}),
    ("SessionFatalError", RuntimeError, {"cause": KeyError("x")}),
    (
        "ContextOverflowError",
        ValueError,
        {"stage": "prefix", "resident_tokens": 1, "additional_tokens": 2, "num_ctx": 2},
    ),
    ("BatchTooLargeError", ValueError, {"n_tokens": 9, "n_batch": 8}),
    ("UnsupportedFeatureError", NotImplementedError, {"feature": "lora"}),
    ("ManifestMismatchError", ValueError, {"field": "rope", "expected": "a", "actual": "b"}),
    *(
        (name, RuntimeError, {"status": status, "raw_status": int(status), "committed": 3, "dirty": frozenset({1, 70})})
        for name, status in [
            ("DecodeError", DecodeStatus.COMPUTE_FAILED),
            ("NoKVSlotError", DecodeStatus.NO_KV_SLOT),
            ("DecodeAbortedError", DecodeStatus.ABORTED),
            ("InvalidBatchError", DecodeStatus.INVALID_BATCH),
            ("DecodeFatalError", DecodeStatus.ALLOC_FAILED),
        ]
    ),
    ("SnapshotError", ValueError, {"path": "a.snap"}),
    ("SnapshotCorruptError", ValueError, {"path": "a.snap"}),
    ("SnapshotMismatchError", ValueError, {"path": "a", "field": "type_k", "expected": "f16", "actual": "q8_0"}),
    ("TokenMismatchError", ValueError, {}),
    ("TemplateError", ValueError, {}),
    ("GrammarError", ValueError, {}),
    ("InvalidArgumentError", ValueError, {"field": "n_ctx", "expected": 1, "actual": 0}),
    ("OutOfRangeError", IndexError, {"field": "row", "expected": 1, "actual": 7}),
    ("OutOfRangeError", ValueError, {}),
    ("OutOfMemoryError", MemoryError, {"needed_bytes": 2, "available_bytes": 1}),
    ("InternalError", RuntimeError, {}),
    ("LoadCancelledError", OSError, {"path": "a.gguf", "reason": "stopped"}),
    ("StaleViewError", RuntimeError, {}),
]


@pytest.mark.parametrize(("name", "builtin", "fields"), CONTRACT)
def test_an_error_is_ours_and_the_builtin_s_and_keeps_its_fields(
    name: str, builtin: type[Exception], fields: dict[str, Any]
) -> None:
    cls = getattr(errors, name)
    error = cls("a text", **fields)
    assert isinstance(error, errors.LlamaCppShimError)
    assert isinstance(error, builtin)
    assert str(error) == "a text"
    assert {field: getattr(error, field) for field in fields} == fields


@pytest.mark.parametrize(("name", "builtin", "fields"), CONTRACT)
def test_an_error_without_a_text_says_its_fields_on_one_line(
    name: str, builtin: type[Exception], fields: dict[str, Any]
) -> None:
    text = str(getattr(errors, name)(**fields))
    assert "\n" not in text
    for field in ("path", "feature", "n_tokens", "n_batch", "stage", "num_ctx", "resident_tokens", "raw_status"):
        if field in fields:
            assert str(fields[field]) in text


@pytest.mark.parametrize(("name", "builtin", "fields"), CONTRACT)
def test_an_error_survives_pickling_and_copying(name: str, builtin: type[Exception], fields: dict[str, Any]) -> None:
    """Errors cross process borders, although handles do not."""
    error = getattr(errors, name)("a text", **fields)
    error.log = "a line"
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(same) is type(error)
        assert str(same) == "a text"
        assert same.log == "a line"
        assert {field: repr(getattr(same, field)) for field in fields} == {k: repr(v) for k, v in fields.items()}


def test_every_status_of_the_shim_has_a_class() -> None:
    assert set(errors.BY_STATUS) == set(_native.status_names()) - {"OK"}
    header = (ROOT / "csrc" / "lcs.h").read_text("utf-8")
    declared = set(re.findall(r"\bLCS_STATUS_([A-Z_]+)\b(?=\s*[,=]|,)", header)) - {"COUNT"}
    assert declared == set(_native.status_names())


def test_a_status_cannot_have_two_classes() -> None:
    with pytest.raises(TypeError, match="NOMEM already has a class"):
        type("Second", (errors.LlamaCppShimError,), {}, status="NOMEM")
    assert errors.BY_STATUS["NOMEM"] is errors.OutOfMemoryError


def test_decode_statuses_are_llama_cpp_s_numbers() -> None:
    assert {status.name: status.value for status in DecodeStatus} == {
        "OK": 0,
        "NO_KV_SLOT": 1,
        "ABORTED": 2,
        "INVALID_BATCH": -1,
        "ALLOC_FAILED": -2,
        "COMPUTE_FAILED": -3,
    }
    assert _native.DecodeStatus is DecodeStatus


def test_an_unknown_decode_status_keeps_its_number() -> None:
    error = errors.error_for("DECODE_FATAL", "unknown", raw_status=-77, committed=2, dirty=[0])
    assert type(error) is errors.DecodeFatalError
    assert (error.status, error.raw_status, error.committed, error.dirty) == (-77, -77, 2, frozenset({0}))
    assert not isinstance(error.status, DecodeStatus)


@pytest.mark.parametrize(
    ("status", "facts", "fields"),
    [
        ("LOAD", {"path": "m.gguf"}, {"path": "m.gguf", "reason": "why (llama.cpp: line)"}),
        ("CANCELLED", {"path": "m.gguf"}, {"path": "m.gguf"}),
        ("UNSUPPORTED", {"field": "vocab"}, {"feature": "vocab"}),
        ("BATCH_TOO_LARGE", {"expected": "8", "actual": "9"}, {"n_tokens": 9, "n_batch": 8}),
        ("RANGE", {"field": "row", "expected": "0..1", "actual": "2"}, {"field": "row", "actual": "2"}),
        ("STATE_MISMATCH", {"field": "type_k", "expected": "a", "actual": "b"}, {"field": "type_k", "actual": "b"}),
        ("NO_KV_SLOT", {"raw_status": 1, "committed": 4}, {"status": DecodeStatus.NO_KV_SLOT, "committed": 4}),
        ("COMPUTE_FAILED", {"raw_status": -3, "dirty": [2]}, {"raw_status": -3, "dirty": {2}}),
        ("INVALID_BATCH", {"raw_status": 0}, {"status": DecodeStatus.INVALID_BATCH, "raw_status": -1}),
        ("GRAMMAR", {}, {}),
    ],
)
def test_a_failure_of_the_shim_becomes_its_class_with_the_log_line_in_the_text(
    status: str, facts: dict[str, Any], fields: dict[str, Any]
) -> None:
    error = errors.error_for(status, "why", log="line", **facts)
    assert type(error) is errors.BY_STATUS[status]
    assert str(error).endswith("why (llama.cpp: line)")
    assert error.log == "line"
    assert {field: getattr(error, field) for field in fields} == fields


def test_a_log_line_that_is_the_message_is_not_said_twice() -> None:
    assert str(errors.error_for("INTERNAL", "cannot do it", log="cannot do it")) == "cannot do it"


def test_a_failure_inside_the_computation_is_one_family() -> None:
    assert issubclass(errors.DecodeAllocError, (errors.DecodeFatalError, MemoryError))
    assert issubclass(errors.DecodeComputeError, errors.DecodeFatalError)
    assert errors.BY_STATUS["ALLOC_FAILED"] is errors.DecodeAllocError
    assert errors.BY_STATUS["COMPUTE_FAILED"] is errors.DecodeComputeError
