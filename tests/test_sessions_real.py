"""Sessions, snapshots and branches on the two real models: BPE with attention, and 262,144 tokens with a window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import ROOT
from conftest import RunChild
from sessions import last_row

from llamacppshim import Model, Runtime, Session, collect_many

N_UBATCH = 128
TEXT = "".join((ROOT / "llamacppshim" / name).read_text() for name in ("turns.py", "ledger.py", "checkpoints.py"))
QUESTION = "\nclass Example:\n    def __init__(self, n: int) -> None:\n"
OTHER = "\n# A note that is something else, and rather longer than it need be.\n" * 3
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 11}

#: Of each: the model, its settings, tokens of prefix (beyond the window of 512), and whether a turn is exact.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "smollm2": ("smollm2", {}, True),
    "smollm2-q8_0": ("smollm2", {"type_k": "q8_0", "type_v": "q8_0"}, True),
    "smollm2-q4_0": ("smollm2", {"type_k": "q4_0", "type_v": "q4_0"}, True),
    "gemma3": ("gemma3", {}, False),
    "gemma3-full": ("gemma3", {"swa_full": True}, True),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def real(smollm2: Path, gemma3: Path) -> Iterator[dict[str, Model]]:
    models = {"smollm2": Model(smollm2), "gemma3": Model(gemma3)}
    yield models
    for model in models.values():
        model.close()


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """The models of this file stay open between its tests; test_sessions_life.py counts."""


def opened(real: dict[str, Model], case: str, **values: Any) -> Runtime:
    name, own, _ = CASES[case]
    return Runtime.open(real[name], **{"n_ctx": 1536, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, **own, **values})


def prefix_of(runtime: Runtime) -> list[int]:
    tokens = runtime.model.tokenize(TEXT, add_special=True, parse_special=False)
    return [int(token) for token in tokens[:700]]


def turn(session: Session, prefix: list[int], text: str) -> None:
    session.ensure_prefix(prefix)
    session.prefill_suffix(text)


@EVERY_CASE
def test_a_warm_turn_gives_the_cold_answer(real: dict[str, Model], case: str) -> None:
    n = 256 if case == "smollm2" else 64
    with opened(real, case, reuse="bitwise") as runtime:
        prefix = prefix_of(runtime)
        with runtime.session() as session:
            turn(session, prefix, QUESTION)
            row = last_row(session)
            cold = session.collect(max_tokens=n, ignore_eos=True)
        with runtime.session() as session:
            turn(session, prefix, OTHER)
            session.collect(max_tokens=20, ignore_eos=True)
            status = session.ensure_prefix(prefix)
            assert status.prefilled_tokens == 0
            assert status.reused_tokens == len(prefix) // N_UBATCH * N_UBATCH
            session.prefill_suffix(QUESTION)
            if CASES[case][2]:
                assert session.explain().exact == "bitwise"
                np.testing.assert_array_equal(last_row(session), row)
                warm = session.collect(max_tokens=n, ignore_eos=True)
                assert (warm.tokens, warm.text) == (cold.tokens, cold.text)
            else:
                assert session.explain().exact == "token"
                warm = session.collect(max_tokens=32, ignore_eos=True)
                require_same_but_for_ties(real, case, session, warm.tokens, cold.tokens[:32])


def require_same_but_for_ties(
    real: dict[str, Model], case: str, session: Session, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Cells that were placed anew change this model's logits by up to 1.4 (llama-facts.md); only within that may an
    answer part from the cold one."""
    if found == expected:
        return
    n = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    prompt = [int(token) for token in session.tokens[: len(session.tokens) - len(found) + n]]
    with opened(real, case, reuse="bitwise") as runtime, runtime.session() as cold:
        cold.ensure_prefix(prompt)
        row = last_row(cold)
    assert row.max() - row[found[n]] < 1.5


@EVERY_CASE
def test_by_token_a_turn_reads_only_what_is_new(real: dict[str, Model], case: str) -> None:
    with opened(real, case) as runtime, runtime.session() as session:
        prefix = prefix_of(runtime)
        turn(session, prefix, OTHER * (14 if case == "gemma3" else 2))  # so long that the window loses what it needs
        session.collect(max_tokens=4, ignore_eos=True)
        status = session.ensure_prefix(prefix)
        assert (status.reused_tokens, status.prefilled_tokens) == (len(prefix), 0)
        assert status.plan.source == ("checkpoint" if case == "gemma3" else "live")
        after = session.prefill_suffix(QUESTION)
        assert after.prefilled_tokens == after.suffix_tokens
        warm = session.collect(max_tokens=16, ignore_eos=True).tokens
        with opened(real, case) as fresh, fresh.session() as cold:
            turn(cold, prefix, QUESTION)
            expected = cold.collect(max_tokens=16, ignore_eos=True).tokens
        require_same_but_for_ties(real, case, session, warm, expected)


@EVERY_CASE
@pytest.mark.parametrize("config", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_snapshot_goes_on_in_a_fresh_process(
    real: dict[str, Model], case: str, config: dict[str, Any], tmp_path: Path, run_child: RunChild
) -> None:
    n = 256 if case in ("smollm2", "gemma3") else 32
    with opened(real, case) as runtime, runtime.session() as session:
        turn(session, prefix_of(runtime), QUESTION)
        session.collect(max_tokens=9, ignore_eos=True, **config)
        session.snapshot().save(tmp_path / "s.lcs")
        expected = session.collect(max_tokens=n, ignore_eos=True, **config).tokens
        path = runtime.model.path
    values = {"n_ctx": 1536, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, **CASES[case][1]}
    child = run_child(
        f"path, values, config = json.loads({json.dumps(json.dumps([path, values, config]))})\n",
        f"""
        with Runtime.open(path, **values) as runtime:
            session = runtime.restore(Snapshot.load("s.lcs"))
            answer = session.collect(max_tokens={n}, ignore_eos=True, **config)
            work = session.explain().work
            print(json.dumps([answer.tokens, work.prefill_tokens, work.decode_tokens]))
        """,
        stdout=None,
    )
    found, n_prefilled, n_decoded = json.loads(child.stdout)
    assert (n_prefilled, n_decoded) == (0, n)
    if case.startswith("gemma3"):  # its cells are placed anew
        same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), n)
        assert same >= 16 or config
    else:
        assert tuple(found) == expected


@pytest.mark.parametrize("case", ["smollm2", "gemma3"])
@pytest.mark.parametrize("unified", [False, True])
def test_branches_answer_together_as_each_alone(real: dict[str, Model], case: str, unified: bool) -> None:
    n_ctx = 1536 if unified else 5 * 1024
    with opened(real, case, n_seq_max=5, n_ctx=n_ctx, kv_unified=unified) as runtime:
        prefix = prefix_of(runtime)[:300]
        questions = ["\nimport numpy as np\n", "\ndef main() -> None:\n", "\n# The\n", "\nclass\n"]
        with runtime.session() as parent:
            parent.ensure_prefix(prefix)
            children = parent.branch(4)
            assert sum(child.explain().work.prefill_tokens for child in children) == 0
            assert all((child.explain().branch_bytes == 0) == unified for child in children)
            for child, question in zip(children, questions, strict=True):
                child.prefill_suffix(question)
            together = collect_many(children, max_tokens=12, ignore_eos=True)
            for child in children:
                child.close()
            for question, answer in zip(questions, together, strict=True):
                turn(parent, prefix, question)
                alone = parent.collect(max_tokens=12, ignore_eos=True).tokens
                require_same_but_for_ties(real, case, parent, alone, answer.tokens)


def test_text_becomes_the_tokens_of_the_whole_text_with_one_bos(real: dict[str, Model]) -> None:
    for case in ("smollm2", "gemma3"):
        with opened(real, case) as runtime, runtime.session() as session:
            at = TEXT.rindex("\nclass ") + 1
            head, tail = TEXT[:at].rstrip("\n") + "\n", TEXT[at:][:800]
            session.ensure_prefix(head)
            session.prefill_suffix(tail)
            whole = runtime.model.tokenize(head + tail, add_special=True, parse_special=False)
            np.testing.assert_array_equal(session.tokens, whole)
            assert list(session.tokens).count(runtime.model.bos) == (1 if runtime.model.add_bos else 0)
