"""The parser of snapshot files under random damage with right checksums: an error of ours, or a value that is whole.

Runs for LLAMACPPSHIM_FUZZ_SECONDS (CI: a minute), from a seed that it prints where it fails.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from typing import Any

import xxhash
from test_snapshots import a_snapshot

from llamacppshim.errors import SnapshotError
from llamacppshim.snapshot import Snapshot

SECONDS = float(os.environ.get("LLAMACPPSHIM_FUZZ_SECONDS", "3"))
VALUES: list[Any] = [
    *[None, True, False, 0, 1, -1, 2, 3, 4, 5, 10, 63, 64, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.5, 1e308],
    *["", "x", "tokens", "state", "row", "bitwise", "suffix", "\u0000", "\ud7ff" * 50, "f" * 64, "0" * 16],
    *[[], {}, [[4, True, True]], [[1, False, False]] * 5, {"a": {}}, [None]],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            found += places(one, (*path, i))
    return found


def damage(header: Any, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        *parents, last = draw.choice(places(header))
        at = header
        for key in parents:
            at = at[key]
        what = draw.randrange(5)
        if what == 0 and isinstance(at, dict):
            del at[last]
        elif what == 1 and isinstance(at, dict):
            at[draw.choice(("unknown", "n_ctx", "hash", "offset"))] = copy.deepcopy(draw.choice(VALUES))
        elif what == 2 and isinstance(at, list) and at:
            at.insert(draw.randrange(len(at) + 1), copy.deepcopy(draw.choice(at)))
        elif what == 3 and isinstance(at[last], int):
            at[last] += draw.choice((-64, -1, 1, 64, 4))
        else:
            at[last] = copy.deepcopy(draw.choice(VALUES))
        if not places(header):
            return


def rebuilt(data: bytes, draw: random.Random) -> bytes:
    n = int.from_bytes(data[12:16], "little")
    begin = -(-(64 + n) // 64) * 64
    header, parts = json.loads(data[64 : 64 + n]), bytearray(data[begin:])
    if draw.random() < 0.3:  # damage in a part, with its checksum set right
        record = draw.choice(header["parts"])
        at = record["offset"] + draw.randrange(max(1, record["nbytes"]))
        parts[min(at, len(parts) - 1)] = draw.randrange(256)
        part = bytes(parts[record["offset"] : record["offset"] + record["nbytes"]])
        record["hash"] = f"{xxhash.xxh3_64_intdigest(part):016x}"
    else:
        damage(header, draw)
    encoded = json.dumps(header).encode()
    begin = -(-(64 + len(encoded)) // 64) * 64
    size = begin + len(parts)
    head = data[:12] + len(encoded).to_bytes(4, "little") + size.to_bytes(8, "little")
    head += xxhash.xxh3_64_intdigest(encoded).to_bytes(8, "little") + bytes(32)
    whole = bytearray(head + encoded + bytes(begin - 64 - len(encoded)) + bytes(parts))
    if draw.random() < 0.1:
        del whole[draw.randrange(len(whole)) :]
    return bytes(whole)


def test_damage_with_right_checksums_is_an_error_or_a_whole_value() -> None:
    data = a_snapshot().to_bytes()
    until, n_refused, n_read = time.monotonic() + SECONDS, 0, 0
    seed = 0
    while time.monotonic() < until or n_refused < 500:
        seed += 1
        damaged = rebuilt(data, random.Random(seed))
        try:
            snapshot = Snapshot.from_bytes(damaged)
        except SnapshotError as error:
            assert "\n" not in str(error), seed
            n_refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        else:
            n_read += 1
            assert Snapshot.from_bytes(snapshot.to_bytes()).digest == snapshot.digest, seed
    assert n_read > 10
