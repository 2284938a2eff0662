"""The pure parts under a session: the plan, the ledger, the checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacppshim.checkpoints import Checkpoint, Checkpoints
from llamacppshim.errors import OutOfRangeError
from llamacppshim.ledger import Ledger, as_tokens
from llamacppshim.reuse import Memory, ReusePlan, common_prefix, plan

G = 8


def memory(kind: Any = "attention", **values: Any) -> Memory:
    own: dict[str, Any] = {
        **{"n_swa": 0, "pos_min": 0, "n_ubatch": G, "n_grid": 0, "whole": -1, "keeps_layout": True, "layout": True},
        **values,
    }
    return Memory(kind=kind, **own)


def planned(
    resident: int,
    wanted: int,
    common: int,
    facts: Memory,
    checkpoints: list[tuple[int, bool]] | None = None,
    *,
    limit: int | None = None,
    bitwise: bool = False,
) -> ReusePlan:
    """Of lists of these lengths that are equal up to `common`."""
    a, b = np.zeros(resident, dtype=np.int32), np.zeros(wanted, dtype=np.int32)
    a[common:] = 1
    limit = wanted if limit is None else limit
    return plan(a, b, facts, checkpoints or [], limit=limit, bitwise=bitwise)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_the_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)) == n


@pytest.mark.parametrize(
    ("resident", "wanted", "common", "kept"),
    [(0, 0, 0, 0), (0, 5, 0, 0), (5, 0, 0, 0), (5, 5, 5, 5), (5, 9, 5, 5), (9, 5, 5, 5), (9, 9, 3, 3), (9, 9, 0, 0)],
)
def test_attention_keeps_every_equal_token(resident: int, wanted: int, common: int, kept: int) -> None:
    found = planned(resident, wanted, common, memory())
    assert found.reuse_tokens == kept
    assert found.source == ("live" if kept else "none")
    differs = common < min(resident, wanted)
    assert found.first_difference == ((common, 1, 0) if differs else None)


@pytest.mark.parametrize(
    ("n_swa", "pos_min", "keep", "live"),
    # Position N looks back to N - n_swa + 1.
    [
        (4, 0, 1, True),
        (4, 0, 9, True),
        (4, 6, 9, True),
        (4, 7, 9, False),
        (4, 6, 10, True),
        (1, 9, 9, True),
        (4, 1, 4, True),
        (4, 2, 4, False),
    ],
)
def test_a_window_needs_the_cells_it_looks_back_on(n_swa: int, pos_min: int, keep: int, live: bool) -> None:
    facts = memory("swa", n_swa=n_swa, pos_min=pos_min, keeps_layout=False)
    found = planned(20, 30, keep, facts, [(3, True)])
    assert (found.source, found.reuse_tokens) == (("live", keep) if live else ("checkpoint", 3))
    assert found.exact == "token"
    if not live:
        assert f"needs positions from {max(0, keep - n_swa + 1)}, it holds them from {pos_min}" in found.reason


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_what_cannot_be_cut_goes_on_or_back_to_a_checkpoint(kind: Any) -> None:
    facts = memory(kind)
    assert planned(20, 30, 20, facts).reuse_tokens == 20
    assert planned(20, 20, 20, facts).reuse_tokens == 20
    for checkpoints, kept in (([], 0), ([(16, True)], 16), ([(3, True), (19, False)], 19), ([(20, True)], 0)):
        found = planned(20, 30, 19, facts, checkpoints)
        assert found.reuse_tokens == kept
        assert found.source == ("checkpoint" if kept else "none")
        assert f"a {kind} memory cannot be cut from 20 to 19" in found.reason
    assert planned(20, 20, 20, facts, [(19, True)], limit=19).reuse_tokens == 19
    assert planned(20, 20, 20, facts, [(20, True)], limit=19).reuse_tokens == 0


def test_what_a_failed_decode_touched_is_not_trusted() -> None:
    for kind in ("attention", "recurrent"):
        facts = memory(kind, suspect=True)
        assert planned(20, 30, 20, facts).reuse_tokens == 0
        found = planned(20, 30, 20, facts, [(7, True), (20, True)])
        assert (found.source, found.reuse_tokens) == ("checkpoint", 20)


@pytest.mark.parametrize(
    ("common", "n_grid", "kept"),
    [(7, 16, 0), (8, 16, 8), (9, 16, 8), (15, 16, 8), (16, 16, 16), (19, 16, 16), (19, 8, 8)],
)
def test_bitwise_keeps_whole_pieces_that_were_read_as_such(common: int, n_grid: int, kept: int) -> None:
    found = planned(20, 30, common, memory(n_grid=n_grid), bitwise=True)
    assert (found.reuse_tokens, found.exact) == (kept, "bitwise")


def test_bitwise_keeps_a_whole_prompt_with_its_last_piece() -> None:
    assert planned(20, 20, 20, memory(n_grid=16, whole=20), bitwise=True).reuse_tokens == 20
    assert planned(25, 20, 20, memory(n_grid=16, whole=20), bitwise=True).reuse_tokens == 20
    assert planned(20, 21, 20, memory(n_grid=16, whole=20), bitwise=True).reuse_tokens == 16
    assert planned(20, 20, 20, memory(n_grid=16, whole=20), limit=19, bitwise=True).reuse_tokens == 16


def test_bitwise_uses_only_exact_checkpoints() -> None:
    facts = memory("recurrent", n_grid=16)
    assert planned(20, 30, 19, facts, [(8, True), (16, False)], bitwise=True).reuse_tokens == 8
    assert planned(20, 30, 19, facts, [(8, True), (16, True)], bitwise=True).exact == "bitwise"


def test_a_moved_layout_is_no_longer_exact() -> None:
    assert planned(16, 30, 16, memory(n_grid=16)).exact == "bitwise"
    assert planned(16, 30, 16, memory(n_grid=16, layout=False)).exact == "token"
    assert planned(16, 30, 15, memory(n_grid=16)).exact == "token"
    assert planned(16, 30, 8, memory("swa", n_grid=16, keeps_layout=False)).exact == "token"
    assert planned(16, 30, 16, memory("swa", n_grid=16, keeps_layout=False)).exact == "bitwise"


# The ledger.


@given(st.lists(st.one_of(st.lists(st.integers(0, 9), max_size=200), st.integers(0, 300)), max_size=12))
def test_a_ledger_is_a_list(steps: list[list[int] | int]) -> None:
    ledger, expected = Ledger(), []
    for step in steps:
        if isinstance(step, int):
            ledger.truncate(step)
            del expected[step:]
            ledger.append(step)
            expected.append(step)
        else:
            ledger.replace(step, keep=len(expected) // 2)
            expected[len(expected) // 2 :] = step
        assert ledger.tokens.tolist() == expected and len(ledger) == len(expected)


def test_tokens_are_whole_numbers_that_fit() -> None:
    assert as_tokens([]).size == 0
    assert as_tokens(np.array([1, 2], dtype=np.int64)).dtype == np.int32
    for wrong in ([1.0], [[1]], ["a"], [True], [None], "text"):
        with pytest.raises(TypeError):
            as_tokens(wrong)
    for outside in ([-1], [2**31], np.array([2**63], dtype=np.uint64)):
        with pytest.raises(OutOfRangeError):
            as_tokens(outside)


# The checkpoints.


def taken(checkpoints: Checkpoints, position: int, n_bytes: int = 10) -> bool:
    if not checkpoints.make_room(position, n_bytes):
        return False
    checkpoints.add(Checkpoint(position, bytes(n_bytes), True))
    return True


def places(checkpoints: Checkpoints) -> list[int]:
    return [position for position, _ in checkpoints.positions()]


def test_checkpoints_stay_within_their_count_and_spread_out() -> None:
    checkpoints = Checkpoints(4, 1000)
    for position in range(100, 1100, 100):
        assert taken(checkpoints, position)
        assert len(checkpoints) <= 4
    assert places(checkpoints)[-1] == 1000
    gaps = np.diff([0, *places(checkpoints)])
    assert gaps.max() <= 500
    assert checkpoints.evicted == 6


def test_checkpoints_stay_within_their_bytes_before_one_is_taken() -> None:
    checkpoints = Checkpoints(100, 35)
    for position in (1, 2, 3):
        assert taken(checkpoints, position)
    assert checkpoints.make_room(4, 10)
    assert checkpoints.nbytes <= 25
    checkpoints.add(Checkpoint(4, bytes(10), True))
    assert not taken(checkpoints, 5, 36)
    assert checkpoints.too_large == 1
    assert taken(checkpoints, 6, 35)
    assert places(checkpoints) == [6]


def test_none_are_kept_where_none_may_be() -> None:
    checkpoints = Checkpoints(0, 1000)
    assert not taken(checkpoints, 1)
    assert (len(checkpoints), checkpoints.too_large) == (0, 0)


def test_a_checkpoint_replaces_the_one_at_its_position() -> None:
    checkpoints = Checkpoints(4, 1000)
    for n_bytes in (10, 20):
        assert taken(checkpoints, 5, n_bytes)
    assert (places(checkpoints), checkpoints.nbytes) == ([5], 20)
    for position in (1, 9):
        assert taken(checkpoints, position)
    checkpoints.forget_after(5)
    assert places(checkpoints) == [1, 5]
    assert checkpoints.at(9) is None
    checkpoints.clear()
    assert places(checkpoints) == []
