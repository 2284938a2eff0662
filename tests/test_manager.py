"""SessionManager: what is resident against a simple model of it, one owner at a time whatever ends a block, and
sessions that come back as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import RunChild
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sessions import ALARM, N_CTX, N_UBATCH, TOLERANCE, cold_row, last_row, open_runtime, some_tokens

from llamacppshim import Model, Runtime, RuntimeConfig, Session, SnapshotStore, leases, live_counts, resolve_model
from llamacppshim import manager as manager_module
from llamacppshim.errors import (
    BusyError,
    ClosedError,
    DecodeError,
    InvalidArgumentError,
    ModelLoadError,
    OutOfMemoryError,
    OutOfRangeError,
    SessionClosedError,
    SessionUnavailableError,
    SnapshotError,
)
from llamacppshim.leases import Bytes, Claim, Request, bytes_needed
from llamacppshim.manager import SessionManager
from llamacppshim.report import ManagerReport

NAME = "tiny-swa"  # the smallest; its prefixes leave checkpoints
SMALL = RuntimeConfig(
    n_ctx=N_CTX, n_batch=N_UBATCH, n_ubatch=N_UBATCH, n_threads=1, checkpoint_every=64, max_checkpoints=3
)
LARGE = RuntimeConfig(
    n_ctx=4 * N_CTX, n_batch=N_UBATCH, n_ubatch=N_UBATCH, n_threads=1, checkpoint_every=64, max_checkpoints=3
)
PLENTY = 1 << 30
TOKENS = some_tokens(70)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


BEFORE: dict[str, int] = {}


@pytest.fixture(autouse=True)
def others_are_known() -> None:
    """Other files' models may be open."""
    BEFORE.update(live_counts())


def alive() -> dict[str, int]:
    """The handles of this test."""
    return {kind: n - BEFORE[kind] for kind, n in live_counts().items()}


@pytest.fixture
def path(tiny_models: dict[str, Path]) -> Path:
    return tiny_models[NAME]


@pytest.fixture
def need(path: Path) -> Bytes:
    """Of a small session."""
    return bytes_needed(str(path), SMALL)


def in_thread(work: Callable[[], Any]) -> Any:
    """What another thread, that ends then, makes of it."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


def refusal(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def refusal_in_thread(work: Callable[[], Any]) -> Exception | None:
    return in_thread(lambda: refusal(work))


def use(manager: SessionManager, path: Path, workspace: str, config: RuntimeConfig = SMALL, **values: Any) -> Session:
    """A block that reads something of the workspace's own."""
    with manager.session(path, config, workspace=workspace, **values) as session:
        session.ensure_prefix(some_tokens(70, seed=sum(workspace.encode())))
        return session


def until(condition: Callable[[], bool]) -> None:
    """Another thread brings it about."""
    step = threading.Event()
    for _ in range(6000):
        if condition():
            return
        step.wait(0.01)
    raise AssertionError("it does not come about")


def resident(manager: SessionManager) -> list[str]:
    """Workspaces, the last used one first."""
    return [one.workspace for one in manager.explain().sessions]


# Keys.


def test_one_key_is_one_session_and_every_part_of_the_key_counts(path: Path, tmp_path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        first = use(manager, path, "a")
        assert use(manager, path, "a") is first
        others = [
            use(manager, path, "b"),
            use(manager, path, "a", session_id="1"),
            use(manager, path, "a", session_id=""),
            use(manager, path, "a", SMALL, n_ctx=2 * N_CTX),
            use(manager, path, "a", LARGE),
        ]
        assert len({id(one) for one in [first, *others]}) == 6
        assert use(manager, path, "a", session_id="1") is others[1]
        report = manager.explain()
        assert (report.hits, report.misses, len(report.sessions)) == (2, 6, 6)


def test_a_model_is_told_by_its_content_and_its_weights_are_loaded_once(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.gguf"
    shutil.copyfile(path, copied)
    (tmp_path / "link").symlink_to(path)
    with SessionManager(PLENTY, None) as manager:
        first = use(manager, path, "a")
        for same in (str(path), resolve_model(path), tmp_path / "link", copied):
            assert use(manager, same, "a") is first
        assert use(manager, path, "b").runtime.model is first.runtime.model
        assert alive()["models"] == 1 and alive()["contexts"] == 2
        assert use(manager, path, "a", use_mmap=False).runtime.model is not first.runtime.model
        assert manager.explain().models == (NAME, NAME)
        manager.expire(0)
        assert alive()["models"] == alive()["contexts"] == 0


def test_weights_stay_where_a_session_goes_for_another_of_the_same_model(
    path: Path, need: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    monkeypatch.setattr(manager_module, "Model", lambda *args, **kwargs: loads.append(1) or Model(*args, **kwargs))
    with SessionManager(total(need), None) as manager:
        for workspace in "abab":
            use(manager, path, workspace)
        assert len(loads) == 1 and manager.explain().misses == 4
        with pytest.raises(OutOfMemoryError), manager.session(path, LARGE):
            raise AssertionError
        manager.expire(0)
        assert alive()["models"] == 0


def test_another_file_in_the_place_of_the_model_is_another_model(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_models[NAME], path)
    with SessionManager(PLENTY, None) as manager:
        first = use(manager, path, "a")
        shutil.copyfile(tiny_models["tiny-mamba"], tmp_path / "new")
        os.replace(tmp_path / "new", path)
        second = use(manager, path, "a")
        assert (first.runtime.memory_kind, second.runtime.memory_kind) == ("swa", "recurrent")


def test_an_adapter_is_told_by_its_content(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    llama, adapter = tiny_models["tiny-llama"], tmp_path / "adapter.gguf"
    shutil.copyfile(tiny_models["tiny-lora"], adapter)
    with SessionManager(PLENTY, None) as manager:
        first = use(manager, llama, "a", adapters=[adapter])
        assert use(manager, llama, "a", adapters=[adapter]) is first
        with open(adapter, "ab") as file:
            file.write(b"\0" * 32)
        assert use(manager, llama, "a", adapters=[adapter]) is not first


def test_a_split_model_is_told_by_all_its_parts(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    names = [name for name in tiny_models if "split" in name]
    parts = [Path(shutil.copy(tiny_models[name], tmp_path)) for name in sorted(names)]
    with SessionManager(PLENTY, None) as manager:
        first = use(manager, parts[0], "a")
        assert use(manager, parts[0], "a") is first
        with open(parts[1], "ab") as file:
            file.write(b"\0" * 32)
        assert use(manager, parts[0], "a") is not first


def test_arguments_are_judged_before_anything_is_done(path: Path, tmp_path: Path) -> None:
    for values in ({"budget_bytes": -1}, {"budget_bytes": 1.5}, {"budget_bytes": True}):
        with pytest.raises(InvalidArgumentError, match="budget_bytes"):
            SessionManager(**{"idle_ttl_s": None, **values})
    for ttl in (-1, float("nan"), "1", True):
        with pytest.raises(InvalidArgumentError, match="idle_ttl_s"):
            SessionManager(PLENTY, ttl)
    with SessionManager(PLENTY, None) as manager:
        with pytest.raises(InvalidArgumentError, match="workspace"):
            manager.session(path, workspace=1)
        with pytest.raises(InvalidArgumentError, match="session_id"):
            manager.session(path, session_id=1)
        with pytest.raises((InvalidArgumentError, OutOfRangeError), match="timeout_s"):
            manager.session(path, timeout_s=-1)
        with pytest.raises(InvalidArgumentError, match="n_ctxx"):
            manager.session(path, n_ctxx=1)
        with pytest.raises(TypeError, match="RuntimeConfig"):
            manager.session(path, {"n_ctx": 1})
        with pytest.raises(InvalidArgumentError, match="idle_s"):
            manager.expire(-1)
        with pytest.raises(ModelLoadError), manager.session(tmp_path / "none.gguf"):
            raise AssertionError
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                call(manager)
        assert manager.explain() == ManagerReport(
            budget_bytes=PLENTY,
            resident_bytes=0,
            context_bytes=0,
            checkpoint_bytes=0,
            snapshot_bytes=0,
            models=(),
            sessions=(),
        )


# The budget.


def total(*needs: Bytes, store: bool = False) -> int:
    return sum(one.context + one.checkpoints for one in needs) + store * max(one.snapshot for one in needs)


@pytest.mark.parametrize("store", [False, True])
def test_a_session_that_needs_the_whole_budget_fits_and_one_byte_less_is_refused(
    path: Path, need: Bytes, tmp_path: Path, store: bool
) -> None:
    folder = tmp_path / "store" if store else None
    with SessionManager(total(need, store=store), None, folder) as manager:
        use(manager, path, "a")
        use(manager, path, "b")
        report = manager.explain()
        assert resident(manager) == ["b"] and (report.parked, report.dropped) == (int(store), 1 - store)
    with SessionManager(total(need, store=store) - 1, None, folder) as manager:
        with pytest.raises(OutOfMemoryError) as caught, manager.session(path, SMALL, workspace="a"):
            raise AssertionError
        text = str(caught.value)
        assert f"{total(need, store=store):,} bytes" in text and f"{manager.budget_bytes:,}" in text
        assert "\n" not in text and alive()["contexts"] == 0


def test_what_can_never_fit_evicts_nothing(path: Path, need: Bytes) -> None:
    with SessionManager(2 * total(need), None) as manager:
        use(manager, path, "a")
        use(manager, path, "b")
        with pytest.raises(OutOfMemoryError), manager.session(path, SMALL, n_ctx=1 << 20):
            raise AssertionError
        assert resident(manager) == ["b", "a"]


def test_the_least_recently_used_one_goes_before_the_new_one_is_allocated(
    path: Path, need: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real_open = Runtime.open

    def counted(*args: Any, **kwargs: Any) -> Runtime:
        seen.append(alive()["contexts"])
        return real_open(*args, **kwargs)

    with SessionManager(3 * total(need), None) as manager:
        monkeypatch.setattr(Runtime, "open", counted)
        for workspace in ("a", "b", "c"):
            use(manager, path, workspace)
        use(manager, path, "a")
        # Idle sessions count with what they hold: less than they might, so that it is no whole fourth one that fits.
        fourth = bytes_needed(str(path), LARGE)
        assert seen == [0, 1, 2]
        manager.budget_bytes = total(fourth) + 2 * manager.explain().resident_bytes // 3
        use(manager, path, "d", LARGE)
        assert resident(manager) == ["d", "a", "c"] and seen[3] == 2


def test_an_owned_session_is_never_evicted(path: Path, need: Bytes) -> None:
    with SessionManager(2 * total(need), 0.0) as manager, manager.session(path, SMALL, workspace="a") as owned:
        owned.ensure_prefix(TOKENS)
        for workspace in ("b", "c", "d"):
            use(manager, path, workspace)
        assert manager.expire(0) == 0
        assert not owned.closed and resident(manager) == ["a"]
        # What this thread has itself cannot be given back while it waits: so it does not.
        with pytest.raises(OutOfMemoryError, match="this thread has"), manager.session(path, LARGE):
            raise AssertionError
        assert owned.collect(max_tokens=2, ignore_eos=True).tokens


def test_while_owners_have_everything_one_waits_and_gives_up_in_time(path: Path, need: Bytes) -> None:
    with SessionManager(total(need), None) as manager:
        with manager.session(path, SMALL, workspace="a"):
            error = refusal_in_thread(lambda: use(manager, path, "b", timeout_s=0.0))
            assert isinstance(error, SessionUnavailableError) and "owners" in error.reason, error
            error = refusal_in_thread(lambda: use(manager, path, "a", timeout_s=0.01))
            assert isinstance(error, SessionUnavailableError) and "turn" in str(error)
            waiting = threading.Thread(target=use, args=(manager, path, "b"))
            waiting.start()
            until(lambda: manager.explain().waits == 2)
            assert resident(manager) == ["a"]
        waiting.join()
        report = manager.explain()
        assert resident(manager) == ["b"] and (report.waits, report.timeouts, report.dropped) == (2, 2, 1)


def test_the_context_that_is_really_there_counts(path: Path, need: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate that was too low: others go after all, and what cannot stay is not kept."""
    low = need._replace(context=need.context // 2)
    monkeypatch.setattr(leases, "bytes_needed", lambda *args: low)
    with SessionManager(total(need), None) as manager:
        use(manager, path, "a")
        use(manager, path, "b")
        assert resident(manager) == ["b"] and manager.explain().context_bytes == need.context
    with SessionManager(total(need) - 1, None) as manager:
        with pytest.raises(OutOfMemoryError), manager.session(path, SMALL):
            raise AssertionError
        assert resident(manager) == [] and alive()["contexts"] == 0


def test_checkpoints_count_as_held_when_idle_and_as_they_may_grow_when_owned(path: Path, need: Bytes) -> None:
    with SessionManager(PLENTY, None) as manager:
        with manager.session(path, SMALL) as session:
            session.ensure_prefix(TOKENS)
            held = session.explain().checkpoint_bytes
            assert manager.explain().checkpoint_bytes == need.checkpoints >= held > 0
        assert manager.explain().checkpoint_bytes == held
        # One more owner than the idle one's checkpoints leave room for.
        manager.budget_bytes = 2 * total(need) - 1
        use(manager, path, "b")
        assert resident(manager) == ["b", ""]
        with manager.session(path, SMALL):
            error = refusal_in_thread(lambda: use(manager, path, "b", timeout_s=0.0))
            assert isinstance(error, SessionUnavailableError)
            assert resident(manager) == ["", "b"]


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_a_snapshot_on_its_way_is_no_larger_than_was_set_aside(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"attention": "tiny-llama", "swa": NAME, "recurrent": "tiny-mamba", "hybrid": "tiny-hybrid"}[kind]
    sizes: list[int] = []
    put = SnapshotStore.put

    def measured(store: SnapshotStore, snapshot: Any) -> Path | None:
        sizes.append(snapshot.nbytes - sum(one.nbytes for one in snapshot.checkpoints))
        assert manager.explain().resident_bytes == counted
        return put(store, snapshot)

    monkeypatch.setattr(SnapshotStore, "put", measured)
    with SessionManager(PLENTY, None, tmp_path / "store") as manager:
        with manager.session(tiny_models[name], SMALL) as session:
            session.ensure_prefix(some_tokens(N_CTX - 10))
            session.collect(max_tokens=20, ignore_eos=True)
            assert session.explain().checkpoint_bytes <= manager.explain().checkpoint_bytes
        set_aside, counted = manager.explain().snapshot_bytes, manager.explain().resident_bytes
        manager.expire(0)
        assert sizes and 0 < sizes[0] <= set_aside


# Idle ones.


def test_idle_ones_go_at_the_second_and_never_before(path: Path) -> None:
    clock = Clock()
    with SessionManager(PLENTY, 10.0, clock=clock) as manager:
        use(manager, path, "a")
        clock.now += 4.0
        use(manager, path, "b")
        clock.now += 5.999
        assert manager.expire() == 0
        clock.now = 1010.0
        assert manager.expire() == 1 and resident(manager) == ["b"]
        clock.now = 1014.0
        use(manager, path, "c")  # a miss looks
        assert resident(manager) == ["c"]
        clock.now += 10.0
        first = use(manager, path, "c")  # it is there still: warm is better than parked
        assert use(manager, path, "c") is first
        with manager.session(path, SMALL, workspace="d"):
            use(manager, path, "c")
            clock.now += 10.0
            assert manager.expire(20.0) == 0
        assert resident(manager) == ["d"]  # and so does the end of a block
        assert manager.expire(0) == 1 and manager.explain().dropped == 4
    with SessionManager(PLENTY, None, clock=clock) as manager:
        use(manager, path, "a")
        clock.now += 1e9
        assert manager.expire() == 0 and resident(manager) == ["a"]


# What comes back.


def turns(session: Session, kind: str, part: int) -> list[Any]:
    """Some turns of a conversation; the second part goes on in the middle of an answer."""
    if part == 0:
        session.ensure_prefix(some_tokens(150))
        session.prefill_suffix(some_tokens(40, seed=1))
        return [session.collect(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True).tokens]
    out: list[Any] = [session.collect(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True).tokens, last_row(session)]
    session.prefill_suffix(some_tokens(20, seed=2), append=True)
    out.append(last_row(session))
    session.ensure_prefix([*some_tokens(150), *some_tokens(20, seed=4)])
    return [*out, last_row(session)]


@pytest.mark.parametrize("reuse", ["token", "bitwise"])
@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_a_session_comes_back_warm_or_from_the_store_as_if_it_had_never_been_given_back(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, reuse: str
) -> None:
    name = {"attention": "tiny-llama", "swa": NAME, "recurrent": "tiny-mamba", "hybrid": "tiny-hybrid"}[kind]
    path, config = tiny_models[name], {"reuse": reuse, "max_checkpoints": 16}
    with open_runtime(tiny_models, kind, reuse=reuse) as runtime:
        with runtime.session() as straight:
            expected = turns(straight, kind, 0) + turns(straight, kind, 1)
            exact = straight.explain().exact == "bitwise"
        cold = cold_row(runtime, [*some_tokens(150), *some_tokens(20, seed=4)], [])
    for folder in (None, tmp_path / "store"):
        with SessionManager(PLENTY, None, folder) as manager:
            with manager.session(path, SMALL, **config) as session:
                found = turns(session, kind, 0)
                tokens = session.tokens
            if folder is not None:
                assert manager.expire(0) == 1
            with manager.session(path, SMALL, **config) as again:
                assert (again is session) == (folder is None)
                np.testing.assert_array_equal(again.tokens, tokens)
                found += turns(again, kind, 1)
            assert manager.explain().restored == (folder is not None)
        assert found[:2] == expected[:2]
        for row, wanted in zip(found[2:], expected[2:], strict=True):
            np.testing.assert_allclose(row, wanted, atol=TOLERANCE)
        np.testing.assert_allclose(found[-1], cold, atol=TOLERANCE)
        if reuse == "bitwise" and exact and kind != "swa":
            np.testing.assert_array_equal(found[-1], cold)


def test_what_was_parked_is_found_by_a_plain_runtime_and_by_another_manager(path: Path, tmp_path: Path) -> None:
    with SessionManager(PLENTY, None, tmp_path) as manager:
        use(manager, path, "a")
    with Runtime.open(path, SMALL, store=tmp_path) as runtime, runtime.session() as session:
        assert session.ensure_prefix(some_tokens(70, seed=97)).plan.source == "snapshot"
    with SessionManager(PLENTY, None, tmp_path) as manager, manager.session(path, SMALL, workspace="b") as session:
        assert len(session.tokens) == 0
        assert session.ensure_prefix(some_tokens(70, seed=97)).plan.source == "snapshot"


def test_sessions_that_hold_the_same_tokens_are_not_taken_for_one_another(path: Path, tmp_path: Path) -> None:
    """They have one entry in the store; the one that was parked last is there."""
    with SessionManager(PLENTY, None, tmp_path) as manager:
        with manager.session(path, SMALL, workspace="a") as session:
            session.ensure_prefix(TOKENS)
        with manager.session(path, SMALL, workspace="b") as session:
            session.ensure_prefix(TOKENS[:50])
            session.prefill_suffix(TOKENS[50:])
        assert manager.expire(0) == 2
        with manager.session(path, SMALL, workspace="a") as session:
            assert len(session.tokens) == 0
        with manager.session(path, SMALL, workspace="b") as session:
            assert session.explain().prefix_tokens == 50 and len(session.tokens) == len(TOKENS)


def test_a_park_that_fails_costs_the_session_and_nobody_else(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise SnapshotError("no space left on device")

    with SessionManager(PLENTY, 0.0, tmp_path / "store") as manager:
        with monkeypatch.context() as patched:
            patched.setattr(SnapshotStore, "put", full)
            use(manager, path, "a")
        report = manager.explain()
        assert (report.parked, report.dropped, report.park_failures) == (0, 1, 1)
        assert "no space" in report.last_failure and "no space" in str(report)
        use(manager, path, "a")
        assert manager.explain().restored == 0 and manager.explain().parked == 1
        for file in (tmp_path / "store").glob("*.lcs"):
            file.write_bytes(b"damaged")
        with manager.session(path, SMALL, workspace="a") as session:
            assert len(session.tokens) == 0
    with SessionManager(PLENTY, 0.0, SnapshotStore(tmp_path / "small", max_bytes=1000)) as manager:
        use(manager, path, "a")
        assert (manager.explain().parked, manager.explain().dropped, manager.explain().park_failures) == (0, 1, 0)


# Sessions that cannot be used any more.


def test_a_fatal_session_goes_at_once_and_the_next_call_gets_a_fresh_one(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models["tiny-llama"]
    with SessionManager(PLENTY, None, tmp_path) as manager:
        with manager.session(path, SMALL) as session:
            session.ensure_prefix(TOKENS)
            with pytest.raises(DecodeError), session.entered():
                raise _native_fatal()
            assert session.explain().state == "fatal"
        assert resident(manager) == [] and alive()["contexts"] == 0
        report = manager.explain()
        assert (report.fatal, report.parked, report.dropped) == (1, 0, 0)
        with manager.session(path, SMALL) as fresh:
            assert fresh is not session and len(fresh.tokens) == 0
            fresh.ensure_prefix(TOKENS)


def _native_fatal() -> DecodeError:
    from llamacppshim.errors import DecodeFatalError

    return DecodeFatalError("the context is beyond repair")


@pytest.mark.parametrize("what", ["session", "runtime", "context", "adapters"])
def test_an_owner_who_spoils_the_session_spoils_it_for_nobody_else(
    tiny_models: dict[str, Path], tmp_path: Path, what: str
) -> None:
    path = tiny_models["tiny-llama"]
    with SessionManager(PLENTY, None, tmp_path) as manager:
        with manager.session(path, SMALL) as session:
            session.ensure_prefix(TOKENS)
            if what == "session":
                session.close()
            elif what == "runtime":
                session.runtime.close()
            elif what == "context":
                session.runtime.context.close()
            else:
                session.runtime.set_adapters([tiny_models["tiny-lora"]])
        assert resident(manager) == [] and manager.explain().dropped == 1
        with manager.session(path, SMALL) as fresh:
            assert fresh is not session and fresh.runtime.adapters == ()
            assert fresh.ensure_prefix(TOKENS).plan.source == "none"
        fresh.close()  # by one who has it no more
        with manager.session(path, SMALL) as another:
            assert another is not fresh and len(another.tokens) == 0


def test_nothing_of_a_block_is_left_to_the_next_owner(path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        with manager.session(path, SMALL, n_seq_max=3, n_ctx=3 * N_CTX) as session:
            session.ensure_prefix(TOKENS)
            branch = session.branch()[0]
            chunks = session.decode(max_tokens=9, ignore_eos=True)
            n = len(session.tokens) + len(next(chunks).tokens)
        assert branch.closed and [chunk.finish_reason for chunk in chunks] == ["cancelled"]
        session.cancel()  # late
        with manager.session(path, SMALL, n_seq_max=3, n_ctx=3 * N_CTX) as again:
            assert again is session and again.runtime.n_sessions == 1 and len(again.tokens) == n
            # What was left can be gone on with all the same.
            assert len(again.collect(max_tokens=8, ignore_eos=True).tokens) == 8


def test_a_block_that_raises_gives_back(path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        session = use(manager, path, "")
        with pytest.raises(ZeroDivisionError), manager.session(path, SMALL):
            raise ZeroDivisionError
        with manager.session(path, SMALL, timeout_s=0) as again:
            assert again is session and len(again.tokens) == len(TOKENS)


# Owners.


def test_threads_get_one_session_one_after_another_in_the_order_of_asking(path: Path) -> None:
    order: list[int] = []
    inside = threading.Lock()

    def block(i: int) -> None:
        with manager.session(path, SMALL):
            assert inside.acquire(blocking=False)
            order.append(i)
            inside.release()

    with SessionManager(PLENTY, None) as manager:
        threads = [threading.Thread(target=block, args=(i,)) for i in range(6)]
        with manager.session(path, SMALL):
            for i, thread in enumerate(threads):
                thread.start()
                until(lambda n=i: manager.explain().waits == n + 1)
        for thread in threads:
            thread.join()
        assert order == list(range(6))
        assert (manager.explain().hits, manager.explain().misses, manager.explain().waits) == (6, 1, 6)


def test_threads_that_ask_at_once_open_one_session_and_load_one_model(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, loads = threading.Barrier(8), []
    monkeypatch.setattr(manager_module, "Model", lambda *args, **kwargs: loads.append(1) or Model(*args, **kwargs))

    def block(i: int) -> None:
        together.wait()
        use(manager, path, "ab"[i % 2])

    bytes_needed(str(path), SMALL)
    loads.clear()
    with SessionManager(PLENTY, None) as manager:
        threads = [threading.Thread(target=block, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (manager.explain().misses, manager.explain().hits, len(loads)) == (2, 6, 1)


def test_who_waits_for_room_is_not_kept_out_by_those_who_come_again_and_again(path: Path, need: Bytes) -> None:
    done = threading.Event()
    order: list[str] = []

    def other() -> None:
        with manager.session(path, SMALL, workspace="b"):
            order.append("b")
        done.set()

    with SessionManager(total(need), None) as manager:
        thread = threading.Thread(target=other)
        for i in range(1000):
            with manager.session(path, SMALL, workspace="a"):
                order.append("a")
                if i == 0:
                    thread.start()
                    until(lambda: manager.explain().waits == 1)
            if done.is_set():
                break
        thread.join()
        assert order[:3] == ["a", "b", "a"]


def test_what_somebody_waits_for_is_no_room_for_those_who_came_later(path: Path, need: Bytes) -> None:
    held_up = threading.Event()
    found: list[Session] = []

    async def main() -> None:
        async def block() -> None:
            async with manager.asession(path, SMALL, workspace="a") as session:
                found.append(session)

        task = asyncio.create_task(block())
        while manager.explain().waits == 0:
            await asyncio.sleep(0)
        held_up.wait()  # the loop, and so the one that waits
        await task

    with SessionManager(total(need), 0.0) as manager:
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        with manager.session(path, SMALL, workspace="a") as session:
            thread.start()
            until(lambda: manager.explain().waits == 1)
        assert resident(manager) == ["a"] and manager.expire() == 0
        with pytest.raises(SessionUnavailableError):
            use(manager, path, "b", timeout_s=0)
        held_up.set()
        thread.join()
        assert found == [session]
        use(manager, path, "b", timeout_s=0)


def test_a_second_block_within_the_first_is_refused_and_changes_nothing(path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        with manager.session(path, SMALL) as session:
            for _ in range(2):
                with pytest.raises(BusyError, match="this thread has"), manager.session(path, SMALL):
                    raise AssertionError
            assert use(manager, path, "another")
            assert isinstance(refusal_in_thread(lambda: use(manager, path, "", timeout_s=0)), SessionUnavailableError)
            session.ensure_prefix(TOKENS)
        lease = manager.session(path, SMALL)
        for _ in range(2):
            with lease as again:
                assert again is session
                with pytest.raises(BusyError), lease:
                    raise AssertionError


def test_a_block_that_ends_without_a_word_is_over(path: Path, need: Bytes) -> None:
    """As by an interrupt between two lines, or in a thread that is gone."""
    with SessionManager(total(need), None) as manager:
        lease = manager.session(path, SMALL, workspace="a")
        session = in_thread(lease.__enter__)
        session.ensure_prefix(TOKENS)
        assert manager.explain().sessions[0].state == "owned"
        waiting = threading.Thread(target=use, args=(manager, path, "b"))
        waiting.start()
        until(lambda: manager.explain().waits == 1)
        del lease
        waiting.join()
        assert resident(manager) == ["b"]
        # Nothing but itself holds it.
        lease = manager.session(path, SMALL, workspace="b")
        lease.__enter__()
        lease.itself = lease
        del lease
        with manager.session(path, SMALL, workspace="b", timeout_s=0):
            pass
        # Closed from a thread that did not open it.
        lease = manager.session(path, SMALL, workspace="b")
        lease.__enter__()
        in_thread(lambda: lease.__exit__(None, None, None))
        use(manager, path, "b", timeout_s=0)


def test_an_opening_that_ended_without_a_word_is_not_told(path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        claim = Claim(Request(path, SMALL, "", None, None))
        for job in manager.acquire(claim):
            assert job is not None
            if claim.opens:
                break
            job()
        assert [one.state for one in manager.explain().sessions] == ["changing"]
        del claim, job
        report = manager.explain()
        assert report.sessions == () and report.resident_bytes == 0
        use(manager, path, "", timeout_s=0)
        assert len(manager.explain().sessions) == 1


def test_branches_of_a_block_that_ended_without_a_word_are_closed_for_the_next(path: Path) -> None:
    with SessionManager(PLENTY, None) as manager:
        config = {"n_seq_max": 2, "n_ctx": 2 * N_CTX}
        lease = manager.session(path, SMALL, **config)
        session = lease.__enter__()
        session.ensure_prefix(TOKENS)
        branch = session.branch()[0]
        del lease
        with manager.session(path, SMALL, **config) as again:
            assert again is session and branch.closed and len(again.tokens) == len(TOKENS)


# asyncio.


def test_tasks_wait_without_a_thread_each_and_in_order(path: Path) -> None:
    """Many more than the pool has threads, which the one that has the session needs for its answer."""
    order: list[int] = []

    async def block(i: int) -> None:
        async with manager.asession(path, SMALL) as session:
            session.ensure_prefix(TOKENS)
            async for _ in session.adecode(max_tokens=2, ignore_eos=True):
                pass
            order.append(i)

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(block(i) for i in range(50))), 300)

    with SessionManager(PLENTY, None) as manager:
        asyncio.run(main())
        assert sorted(order) == list(range(50))
        report = manager.explain()
        assert (report.misses, report.hits, report.sessions[0].state) == (1, 49, "idle")


def test_tasks_and_threads_share_a_manager(path: Path, need: Bytes) -> None:
    inside = threading.Lock()

    async def block(i: int) -> None:
        async with manager.asession(path, SMALL, workspace="ab"[i % 2]) as session:
            assert inside.acquire(blocking=False)
            await asyncio.to_thread(session.ensure_prefix, TOKENS)
            inside.release()

    def blocks() -> None:
        for i in range(10):
            with manager.session(path, SMALL, workspace="ab"[i % 2]):
                assert inside.acquire(blocking=False)
                inside.release()

    async def main() -> None:
        await asyncio.gather(*(block(i) for i in range(10)))

    with SessionManager(total(need), None) as manager:
        threads = [threading.Thread(target=blocks), threading.Thread(target=lambda: asyncio.run(main()))]
        for thread in threads:
            thread.start()
        asyncio.run(main())
        for thread in threads:
            thread.join()
        report = manager.explain()
        assert report.hits + report.misses == 30 and report.misses == report.dropped + 1


def test_a_cancelled_task_leaves_the_queue_the_session_and_the_budget_as_they_were(path: Path, need: Bytes) -> None:
    async def block(workspace: str, timeout_s: float | None = None) -> None:
        async with manager.asession(path, SMALL, workspace=workspace, timeout_s=timeout_s):
            pass

    async def cancelled_when(task: asyncio.Task[None], condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        async with manager.asession(path, SMALL, workspace="a") as session:
            await cancelled_when(asyncio.create_task(block("a")), lambda: manager.explain().waits == 1)
            await cancelled_when(asyncio.create_task(block("b")), lambda: manager.explain().waits == 2)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(block("a"), 0.01)
            with pytest.raises(SessionUnavailableError):
                await asyncio.create_task(block("b", 0.01))
            with pytest.raises(OutOfMemoryError, match="this task has"):
                await block("b")
        assert manager._queue == []
        async with manager.asession(path, SMALL, workspace="a", timeout_s=0) as again:
            assert again is session
        # While it is being opened.
        await cancelled_when(asyncio.create_task(block("b")), lambda: resident(manager) == ["b"])
        assert resident(manager) == [] and alive()["contexts"] == 0
        await block("b")
        # Inside the block.
        started = asyncio.Event()

        async def long() -> None:
            async with manager.asession(path, SMALL, workspace="b"):
                started.set()
                await asyncio.sleep(1000)

        task = asyncio.create_task(long())
        await started.wait()
        await cancelled_when(task, lambda: True)
        async with manager.asession(path, SMALL, workspace="b", timeout_s=0):
            pass

    with SessionManager(total(need), None) as manager:
        asyncio.run(main())


def test_a_task_that_asks_again_is_refused_and_other_tasks_wait(path: Path) -> None:
    async def other() -> None:
        async with manager.asession(path, SMALL):
            pass

    async def main() -> None:
        async with manager.asession(path, SMALL):
            with pytest.raises(BusyError, match="this task has"):
                async with manager.asession(path, SMALL):
                    raise AssertionError
            waiting = asyncio.create_task(other())
            while manager.explain().waits == 0:
                await asyncio.sleep(0)
            # A block that would stop the loop, and so the task that has the session, is refused too.
            with pytest.raises(BusyError, match="this thread has"), manager.session(path, SMALL):
                raise AssertionError
        await waiting
        with manager.session(path, SMALL):
            with pytest.raises(BusyError):
                async with manager.asession(path, SMALL):
                    raise AssertionError
            waiting = asyncio.create_task(other())
            while manager.explain().waits == 1:
                await asyncio.sleep(0)
        await waiting

    with SessionManager(PLENTY, None) as manager:
        asyncio.run(main())
        with manager.session(path, SMALL):

            async def inner() -> None:
                with pytest.raises(BusyError):
                    async with manager.asession(path, SMALL):
                        raise AssertionError

            asyncio.run(inner())


# The end.


def test_close_parks_what_is_idle_and_ends_what_is_not(path: Path, tmp_path: Path) -> None:
    decoding, closing, ended = threading.Event(), threading.Event(), []

    def owner() -> None:
        with manager.session(path, SMALL, workspace="owned") as session:
            session.ensure_prefix(TOKENS)
            try:
                for chunk in session.decode(ignore_eos=True):
                    decoding.set()
                    closing.wait()
                    ended.append(chunk.finish_reason)
            except SessionClosedError:  # closed between two of its calls
                ended.append("cancelled")
            until(lambda: session.closed)
            with pytest.raises(SessionClosedError):
                session.ensure_prefix(TOKENS)

    def waiter() -> None:
        with pytest.raises(ClosedError), manager.session(path, SMALL, workspace="owned"):
            raise AssertionError

    manager = SessionManager(PLENTY, None, tmp_path)
    use(manager, path, "idle")
    threads = [threading.Thread(target=owner), threading.Thread(target=waiter)]
    threads[0].start()
    decoding.wait()
    threads[1].start()
    until(lambda: manager.explain().waits == 1)
    closing.set()
    manager.close()
    for thread in threads:
        thread.join()
    assert ended[-1] == "cancelled" and manager.closed
    manager.close()
    report = manager.explain()
    assert (report.parked, report.dropped, report.sessions, report.models) == (1, 1, (), ())
    assert not any(alive()[name] for name in ("models", "contexts"))
    for call in (lambda: use(manager, path, "a"), manager.expire, manager.__enter__):
        with pytest.raises(ClosedError):
            call()


def test_close_within_a_block_ends_it_quietly_but_not_within_a_call(path: Path, tmp_path: Path) -> None:
    manager = SessionManager(PLENTY, None, tmp_path)
    with manager.session(path, SMALL) as session:
        with pytest.raises(BusyError):
            session.ensure_prefix(TOKENS, progress=lambda done, total: manager.close())
        assert not manager.closed and not session.closed
        assert isinstance(refusal_in_thread(lambda: use(manager, path, "", timeout_s=0)), SessionUnavailableError)
        session.ensure_prefix(TOKENS)
        manager.close()
        assert manager.closed and session.closed
    assert manager.explain().dropped == 1


def test_close_ends_a_load_that_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, closing = threading.Event(), threading.Event()

    def slow(*args: Any, progress: Callable[[float], bool], **kwargs: Any) -> Model:
        loading.set()
        until(lambda: not progress(0.5))
        closing.set()
        return Model(*args, progress=progress, **kwargs)

    bytes_needed(str(path), SMALL)
    monkeypatch.setattr(manager_module, "Model", slow)
    manager, errors = SessionManager(PLENTY, None), []
    thread = threading.Thread(target=lambda: errors.append(refusal_in_thread(lambda: use(manager, path, "a"))))
    thread.start()
    loading.wait()
    manager.close()
    thread.join()
    assert closing.is_set() and isinstance(errors[0], ClosedError)


def test_a_cancelled_task_ends_the_load_it_waits_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, told = threading.Event(), threading.Event()

    def slow(*args: Any, progress: Callable[[float], bool], **kwargs: Any) -> Model:
        loading.set()
        until(lambda: not progress(0.5))
        told.set()
        return Model(*args, progress=progress, **kwargs)

    async def main() -> None:
        async def block() -> None:
            async with manager.asession(path, SMALL):
                raise AssertionError

        task = asyncio.create_task(block())
        await asyncio.to_thread(loading.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with SessionManager(PLENTY, None) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(manager_module, "Model", slow)
            asyncio.run(main())
        assert told.is_set() and resident(manager) == []
        use(manager, path, "")


def test_a_loop_that_ends_while_a_session_is_opened_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task is cancelled then, and none of them may leave a thread's work to nobody."""
    opening, ending = threading.Event(), threading.Event()
    real_open = Runtime.open

    def slow(*args: Any, **kwargs: Any) -> Runtime:
        opening.set()
        ending.wait()
        return real_open(*args, **kwargs)

    async def main() -> None:
        async def block() -> None:
            async with manager.asession(path, SMALL):
                raise AssertionError

        task = asyncio.create_task(block())
        await asyncio.to_thread(opening.wait)
        asyncio.get_running_loop().call_later(0.05, ending.set)  # when the tasks have been cancelled
        assert not task.done()

    monkeypatch.setattr(Runtime, "open", slow)
    with SessionManager(PLENTY, None) as manager:
        asyncio.run(main())
        assert resident(manager) == [] and alive()["contexts"] == 0


OPEN = f"""
    from llamacppshim.manager import SessionManager
    path = TINY["{NAME}"]
    config = RuntimeConfig(n_ctx={N_CTX}, n_batch={N_UBATCH}, n_ubatch={N_UBATCH}, n_threads=1, max_checkpoints=3)
    def use(workspace, **values):
        with manager.session(path, config, workspace=workspace, **values) as session:
            session.ensure_prefix(f"Hello {{workspace}}\\n")
            return session.collect(max_tokens=3, ignore_eos=True).tokens
"""


def test_a_fork_refuses_frees_nothing_and_does_not_hang(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        manager = SessionManager(1 << 30, None, "store")
        expected = use("a")
        done = threading.Event()
        def busy():
            i = 0
            while not done.is_set():
                use(f"busy {i % 3}")
                i += 1
        thread = threading.Thread(target=busy)
        thread.start()
        for _ in range(10):
            with manager.session(path, config, workspace="a") as session:
                pid = os.fork()
                if pid == 0:
                    ok = {refusal(call)[0] for call in (lambda: use("a"), manager.expire, manager.explain)}
                    manager.close()
            if pid == 0:
                os._exit(0 if ok == {"ForkedError"} and not manager.closed else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        done.set()
        thread.join()
        assert use("a") == expected
        manager.close()
        assert not any(live_counts().values())
        """,
    )


def test_leaving_everything_open_is_silent(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        manager = SessionManager(1 << 30, None)
        use("a")
        lease = manager.session(path, config, workspace="b")
        session = lease.__enter__()
        """,
    )


QUIET = """
    import faulthandler, warnings
    faulthandler.dump_traceback_later(200, exit=True)
    warnings.simplefilter("ignore", ResourceWarning)
"""


def test_no_interrupt_leaves_a_session_owned_a_place_in_the_queue_or_a_lock(run_child: RunChild) -> None:
    run_child(
        OPEN,
        QUIET,
        ALARM,
        """
        def blocks():
            for workspace in "abc":
                use(workspace, timeout_s=20)
        for budget, store in ((1 << 30, None), (12 << 20, "store")):
            with SessionManager(budget, None, store) as manager:
                expected = use("a"), use("b"), use("c")
                assert interrupted(lambda: use("a", timeout_s=20), 1, 2e-3) > 50
                assert interrupted(blocks, 2.5, 2e-2) > 20
                gc.collect()
                assert (use("a", timeout_s=0), use("b", timeout_s=0), use("c", timeout_s=0)) == expected
                manager.expire(0)
                report = manager.explain()
                assert report.sessions == () and report.resident_bytes == 0, report
            gc.collect()
            assert not any(live_counts().values()), live_counts()
        """,
        stderr=None,  # what is raised while Python itself runs a finalizer is said there, and ignored
    )


def test_an_interrupt_at_any_line_leaves_the_manager_right(run_child: RunChild) -> None:
    """At each line of its modules in turn: of a hit, and of a miss that evicts."""
    run_child(
        OPEN,
        """
        import functools, itertools, warnings
        from llamacppshim import leases, manager as module
        warnings.simplefilter("ignore", ResourceWarning)
        leases.bytes_needed = functools.lru_cache(leases.bytes_needed)
        os.fsync = lambda file: None
        def block(workspace):
            with manager.session(path, config, workspace=workspace, timeout_s=0) as session:
                return session.ensure_prefix(f"Hello {workspace}\\n")
        lines = {file: open(file).read().splitlines() for file in (module.__file__, leases.__file__)}
        def interrupted_at(n, work):
            "Whether there are so many lines."
            left = n
            def trace(frame, event, arg):
                nonlocal left
                file = frame.f_code.co_filename
                if file not in lines:
                    return None
                # At the edges of a `with` Python is traced where no signal comes, and where nothing guards the block.
                if event == "line" and not lines[file][frame.f_lineno - 1].strip().startswith(("with ", "try:")):
                    left -= 1
                    if left == 0:
                        raise KeyboardInterrupt
                return trace
            sys.settrace(trace)
            try:
                work()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            return left <= 0
        need = leases.bytes_needed(path, config)
        budget = need.context + need.checkpoints + need.snapshot
        for store in (None, "store"):
            with SessionManager(budget, None, store) as manager:
                block("a")
                for others in ("a", "b"):
                    for n in itertools.count(1, 5 if others == "a" else 17):
                        if not interrupted_at(n, lambda: block(others)):
                            break
                        gc.collect()
                        report = manager.explain()
                        assert report.resident_bytes <= budget, (n, report)
                        assert all(one.state == "idle" for one in report.sessions), (n, report)
                        assert live_counts()["contexts"] == len(report.sessions) <= 1, (n, live_counts(), report)
                        block("a")
                        assert manager._queue == [], n
                    assert n > 100, n
        assert not any(live_counts().values()), live_counts()
        """,
        stderr=None,  # what is raised while Python itself runs a finalizer is said there, and ignored
    )


def test_an_interrupt_ends_a_wait(run_child: RunChild) -> None:
    run_child(
        OPEN,
        QUIET,
        ALARM,
        """
        with SessionManager(1 << 30, None) as manager:
            use("a")
            lease = manager.session(path, config, workspace="a")
            thread = threading.Thread(target=lease.__enter__)
            thread.start()
            thread.join()
            assert interrupted(lambda: use("a"), 1, 2e-3) > 50
            lease.__exit__(None, None, None)
            use("a", timeout_s=0)
            assert manager._queue == []
        """,
        stderr=None,
    )


def test_a_thousand_opens_and_parks_do_not_grow(run_child: RunChild) -> None:
    run_child(
        OPEN,
        """
        import functools
        from llamacppshim import leases
        leases.bytes_needed = functools.lru_cache(leases.bytes_needed)  # to save time, as is the next line
        os.fsync = lambda file: None
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with SessionManager(1 << 24, None, SnapshotStore("store", max_bytes=4 << 20)) as manager:
            for i in range(1000):
                with manager.session(path, config, workspace=f"{i}") as session:
                    session.ensure_prefix([300 + i])
                assert live_counts()["contexts"] <= 3 and live_counts()["models"] == 1
                if i == 200:
                    gc.collect()
                    before = resident()
            gc.collect()
            assert resident() - before < 16 << 20, (before, resident())
            report = manager.explain()
            assert report.misses == 1000 and report.parked == 1000 - len(report.sessions), report
        assert not any(live_counts().values()), live_counts()
        """,
    )


def test_the_report_says_what_there_is(path: Path, tmp_path: Path) -> None:
    clock = Clock()
    with SessionManager(PLENTY, None, tmp_path, clock=clock) as manager:
        use(manager, path, "repo", session_id="7")
        clock.now += 61
        with manager.session(path, SMALL, workspace="b"):
            report = manager.explain()
            text = str(report)
        assert [one.state for one in report.sessions] == ["owned", "idle"]
        assert report.sessions[1].idle_s == 61 and report.sessions[1].resident_tokens == 70
        assert report.resident_bytes == report.context_bytes + report.checkpoint_bytes + report.snapshot_bytes
        assert report.context_bytes == sum(one.context_bytes for one in report.sessions)
        assert report.checkpoint_bytes == sum(one.checkpoint_bytes for one in report.sessions)
        for part in ("owned", "idle", "repo #7", NAME, f"{report.resident_bytes:,}", "2 opened one"):
            assert part in text
        with pytest.raises(AttributeError):
            report.hits = 1
        assert "2 sessions" in repr(manager)
    assert "closed" in repr(manager)


# Against a model.


class Resident:
    """What the model knows of a session."""

    def __init__(self, context: int, tokens: list[int]) -> None:
        self.context = context
        self.tokens = tokens
        self.checkpoints = 0
        self.used = 0.0
        self.owner = ""
        self.lease: Any = None
        self.session: Any = None
        self.ruined: str = ""


KEYS = [(workspace, session_id, large) for workspace in "ab" for session_id in (None, "1") for large in (False, True)]


class Managed(RuleBasedStateMachine):
    """A manager against lists and sums."""

    path: ClassVar[Path]
    folder: ClassVar[Path | None]
    needs: ClassVar[dict[bool, Bytes]]
    context: ClassVar[dict[bool, int]]  # that is really there
    ttl = 100.0

    @initialize(extra=st.integers(0, 3))
    def begin(self, extra: int) -> None:
        self.clock = Clock()
        small, large = self.needs[False], self.needs[True]
        store = self.folder is not None
        self.budget = (total(small, large, store=store), total(small, small), total(large), 3 * total(small))[extra]
        if store:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.manager = SessionManager(self.budget, self.ttl, self.folder, clock=self.clock)
        self.resident: dict[Any, Resident] = {}  # in the order of last use
        self.parked: dict[Any, list[int]] = {}
        figures = ("hits", "misses", "restored", "parked", "dropped", "fatal", "waits", "timeouts", "park_failures")
        self.counts = dict.fromkeys(figures, 0)
        self.n = 0

    # The model.

    def charge(self, key: Any) -> Bytes:
        one, need = self.resident[key], self.needs[key[2]]
        return Bytes(one.context, need.checkpoints if one.owner else one.checkpoints, need.snapshot)

    def sum(self, charges: list[Bytes]) -> int:
        return total(*charges, store=self.folder is not None) if charges else 0

    def evict(self, key: Any) -> None:
        one = self.resident.pop(key)
        if one.ruined:
            self.counts["fatal" if one.ruined == "fatal" else "dropped"] += 1
        elif self.folder is not None and one.tokens:
            self.counts["parked"] += 1
            self.parked[key] = one.tokens
        else:
            self.counts["dropped"] += 1

    def expire(self, idle_s: float) -> int:
        gone = [key for key, one in self.resident.items() if not one.owner and self.clock.now - one.used >= idle_s]
        for key in gone:
            self.evict(key)
        return len(gone)

    def make_room(self, key: Any, need: Bytes, who: str) -> type[Exception] | None:
        others = [other for other in self.resident if other != key]
        mine = [self.charge(other) for other in others if self.resident[other].owner == who == "here"]
        if self.sum([need, *mine]) > self.budget:
            return OutOfMemoryError
        owned = [self.charge(other) for other in others if self.resident[other].owner]
        if self.sum([need, *owned]) > self.budget:
            self.counts["timeouts"] += 1
            return SessionUnavailableError
        while self.sum([need, *(self.charge(other) for other in self.resident if other != key)]) > self.budget:
            self.evict(next(other for other in self.resident if other != key and not self.resident[other].owner))
        return None

    def expected(self, key: Any, who: str) -> type[Exception] | None:
        if key in self.resident:
            one = self.resident[key]
            if one.owner:
                if one.owner == who == "here":
                    return BusyError
                self.counts["timeouts"] += 1
                return SessionUnavailableError
            if one.ruined:
                self.evict(key)
        need = self.needs[key[2]]
        if key not in self.resident:
            self.expire(self.ttl)
            if (error := self.make_room(key, need, who)) is not None:
                return error
            self.counts["misses"] += 1
            self.counts["restored"] += key in self.parked
            self.resident[key] = Resident(self.context[key[2]], self.parked.pop(key, []))
        else:
            if (error := self.make_room(key, need._replace(context=self.context[key[2]]), who)) is not None:
                return error
            self.counts["hits"] += 1
        return None

    # What is done to both.

    @rule(key=st.sampled_from(KEYS), elsewhere=st.booleans())
    def open(self, key: Any, elsewhere: bool) -> None:
        workspace, session_id, large = key
        lease = self.manager.session(
            self.path, LARGE if large else SMALL, workspace=workspace, session_id=session_id, timeout_s=0
        )
        who = "elsewhere" if elsewhere else "here"  # in a thread of its own each time
        error = self.expected(key, who)
        if error is not None:
            found = refusal_in_thread(lease.__enter__) if elsewhere else refusal(lease.__enter__)
            assert type(found) is error, found
            return
        session = in_thread(lease.__enter__) if elsewhere else lease.__enter__()
        one = self.resident[key] = self.resident.pop(key)
        assert one.session in (None, session)
        one.owner, one.lease, one.session, one.used = who, lease, session, self.clock.now
        assert list(session.tokens) == one.tokens

    def owned(self, pick: int) -> Any:
        keys = [key for key, one in self.resident.items() if one.owner]
        return keys[pick % len(keys)] if keys else None

    @rule(pick=st.integers(0, 7), n=st.integers(1, 150), answer=st.booleans())
    def use(self, pick: int, n: int, answer: bool) -> None:
        if (key := self.owned(pick)) is None or self.resident[key].ruined:
            return
        one, self.n = self.resident[key], self.n + 1
        one.session.ensure_prefix(some_tokens(n, seed=self.n))
        if answer:
            one.session.collect(max_tokens=2, ignore_eos=True)
        one.tokens = list(one.session.tokens)

    @rule(pick=st.integers(0, 7), how=st.sampled_from(["fatal", "closed"]))
    def ruin(self, pick: int, how: str) -> None:
        if (key := self.owned(pick)) is None or self.resident[key].ruined:
            return
        session = self.resident[key].session
        if how == "closed":
            session.close()
        else:
            with contextlib.suppress(DecodeError), session.entered():
                raise _native_fatal()
        self.resident[key].ruined = how

    @rule(pick=st.integers(0, 7), lost=st.booleans())
    def give_back(self, pick: int, lost: bool) -> None:
        if (key := self.owned(pick)) is None:
            return
        one = self.resident[key]
        one.owner, lease, one.lease = "", one.lease, None
        one.checkpoints = one.session.explain().checkpoint_bytes
        if lost and not one.ruined:
            del lease
            gc.collect()  # a frame may still know of it
            return  # as good as given back, but nobody has seen when
        self.resident[key] = self.resident.pop(key)
        lease.__exit__(None, None, None)
        one.used = self.clock.now
        if one.ruined:
            self.evict(key)
        self.expire(self.ttl)

    @rule(seconds=st.sampled_from([0.5, 50.0, 99.5, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(idle_s=st.sampled_from([None, 0, 50.0]))
    def park(self, idle_s: float | None) -> None:
        assert self.manager.expire(idle_s) == self.expire(self.ttl if idle_s is None else idle_s)

    @invariant()
    def both_hold_the_same(self) -> None:
        if not hasattr(self, "manager"):
            return
        report = self.manager.explain()
        names = [(one.workspace, one.session_id, one.context_bytes) for one in report.sessions]
        assert names == [(key[0], key[1], self.context[key[2]]) for key in reversed(self.resident)]
        assert report.resident_bytes == self.sum([self.charge(key) for key in self.resident]) <= self.budget
        assert alive()["contexts"] == len(self.resident)
        assert alive()["models"] == bool(self.resident)
        found = {name: getattr(report, name) for name in self.counts}
        assert found == self.counts

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
            report = self.manager.explain()
            assert report.sessions == () and report.resident_bytes == 0
            assert report.misses == report.parked + report.dropped + report.fatal
            assert alive()["contexts"] == alive()["models"] == 0


@pytest.fixture
def real_contexts(path: Path) -> Iterator[dict[bool, int]]:
    found = {}
    for large, config in ((False, SMALL), (True, LARGE)):
        with Runtime.open(path, config) as runtime:
            found[large] = sum(one["context"] + one["compute"] for one in runtime.context.memory_use().values())
    return found


@pytest.mark.parametrize("store", [False, True])
def test_random_use_leaves_resident_what_the_model_says(
    path: Path, tmp_path: Path, real_contexts: dict[bool, int], store: bool
) -> None:
    own = {
        "path": path,
        "folder": tmp_path / "store" if store else None,
        "needs": {large: bytes_needed(str(path), config) for large, config in ((False, SMALL), (True, LARGE))},
        "context": real_contexts,
    }
    run_state_machine_as_test(
        type("Managed", (Managed,), own),
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
