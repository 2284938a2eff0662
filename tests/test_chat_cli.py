"""`llamacppshim chat`: as a user types it at a terminal, through pipes, and the conversation underneath."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pytest
import templates
from rich.console import Console

from llamacppshim import Chunk, Model, Runtime, SnapshotStore, chat_cli, history, workspace
from llamacppshim.chat_cli import Chat
from llamacppshim.conversation import Conversation, Turn
from llamacppshim.errors import (
    ContextOverflowError,
    InvalidArgumentError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
)
from llamacppshim.header import read_gguf_header

Files = dict[str, str]

# The conversation underneath.

FILES: Files = {
    "a.py": "".join(f"alpha_{i} = {i * 7}\n" for i in range(20)),
    "b.py": "".join(f"beta_{i} = {i * 11}\n" for i in range(20)),
    "c.py": "".join(f"gamma_{i} = {i * 13}\n" for i in range(20)),
}
N_UBATCH = 64


@pytest.fixture
def open_chat(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Conversation]]:
    """Opens runtimes as the command does, but small, on one store; closed at the end."""
    opened: list[Conversation] = []

    def open_chat(name: str = "tiny-llama", folder: str | None = "/folder", **values: Any) -> Conversation:
        small = {"n_ctx": 2048, "n_ubatch": N_UBATCH, "n_threads": 1}
        settings = {"max_tokens": values.pop("max_tokens", 8), "temperature": 0.0}
        header = read_gguf_header(tiny_models[name])
        runtime = chat_cli.open_runtime(header, SnapshotStore(tmp_path / "store"), **{**small, **values})
        opened.append(Conversation(runtime, folder, **settings))
        if folder is not None:
            opened[-1].begin(FILES)
        return opened[-1]

    yield open_chat
    for conversation in opened:
        conversation.close()
        conversation.runtime.close()


def asked(conversation: Conversation, text: str) -> Turn:
    """The whole turn."""
    turn = conversation.ask(text)
    for _ in turn.texts():
        pass
    assert conversation.conclude(turn)
    return turn


def held(conversation: Conversation) -> list[int]:
    assert conversation.current.session is not None
    return conversation.current.session.tokens.tolist()


def again(
    conversation: Conversation, open_chat: Callable[..., Conversation], **values: Any
) -> tuple[Conversation, str]:
    """The conversation as another process finds it."""
    record = conversation.record(conversation.store_state())
    data = msgspec.json.encode(record)
    name = conversation.runtime.model_name
    conversation.runtime.close()
    other = open_chat(name, conversation.folder, **values)
    return other, other.resume(msgspec.json.decode(data, type=history.Record))


MODELS = ["tiny-llama", "tiny-spm", "tiny-swa", "tiny-mamba", "tiny-hybrid"]


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_comes_back_warm_and_as_it_was(name: str, open_chat: Callable[..., Conversation]) -> None:
    """Oracle: the tokens of one that was not interrupted."""
    straight = open_chat(name)
    straight.read_ahead()
    asked(straight, "What is alpha_3?")
    asked(straight, "And beta_4?")
    expected = held(straight)
    straight.runtime.close()

    first = open_chat(name)
    status = first.read_ahead()
    assert status is not None and status.reused_tokens == 0
    asked(first, "What is alpha_3?")
    n_held = len(held(first))
    second, why = again(first, open_chat)
    assert why == ""
    status = second.read_ahead()
    assert status is not None and status.reused_tokens == n_held - 1 + (n_held == status.reused_tokens)
    assert status.prefilled_tokens < 16
    turn = asked(second, "And beta_4?")
    assert turn.reply.status.prefilled_tokens < 24
    assert held(second) == expected


def test_another_context_size_is_warm_too(open_chat: Callable[..., Conversation]) -> None:
    first = open_chat()
    asked(first, "What is alpha_3?")
    n_held = len(held(first))
    second, why = again(first, open_chat, n_ctx=4096)
    assert why == ""
    status = second.read_ahead()
    assert status is not None and status.reused_tokens >= n_held - 1


@pytest.mark.parametrize("n_ctx", [2048, 4096])
def test_a_new_conversation_over_the_same_folder_is_warm(open_chat: Callable[..., Conversation], n_ctx: int) -> None:
    first = open_chat()
    first.runtime.speed.bytes_per_s = 1e12
    asked(first, "What is alpha_3?")
    first.store_state()
    first.runtime.close()
    second = open_chat(n_ctx=n_ctx)
    second.runtime.speed.tokens_per_s = 1.0  # restoring is faster than reading, as with real models
    status = second.read_ahead()
    assert status is not None and status.plan.source == "snapshot"
    assert status.prefilled_tokens == 0


def test_settings_that_change_the_cells_are_named_and_the_conversation_goes_on(
    open_chat: Callable[..., Conversation],
) -> None:
    first = open_chat()
    asked(first, "What is alpha_3?")
    messages = first.current.messages
    second, why = again(first, open_chat, type_k="q8_0", type_v="q8_0")
    assert why == "its type_k is another"
    assert second.current.messages == messages
    status = second.read_ahead()
    assert status is not None and status.reused_tokens == 0


def test_what_an_interrupt_leaves_of_a_prefill_is_kept(open_chat: Callable[..., Conversation]) -> None:
    first = open_chat()

    def interrupt(done: int, total: int) -> None:
        if done >= 3 * N_UBATCH:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.read_ahead(progress=interrupt)
    assert first.changed
    second, why = again(first, open_chat)
    assert why == ""
    status = second.read_ahead()
    assert status is not None and status.reused_tokens >= 3 * N_UBATCH - 1


def test_what_was_read_of_a_question_that_was_dropped_is_kept(open_chat: Callable[..., Conversation]) -> None:
    first = open_chat()
    first.read_ahead()
    n_files = len(held(first))
    first.changed = False
    question = "What is alpha_3? " * 40

    def interrupt(done: int, total: int) -> None:
        if done >= 3 * N_UBATCH:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.ask(question, progress=interrupt)
    assert first.changed and first.current.messages == []
    second, why = again(first, open_chat)
    assert why == ""
    assert asked(second, question).reply.status.reused_tokens >= n_files + 3 * N_UBATCH - 1


def test_a_question_that_was_read_and_not_answered_is_kept_too(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    conversation.read_ahead()
    conversation.changed = False
    assert not conversation.conclude(conversation.ask("What is alpha_3? " * 40))
    assert conversation.changed


def test_an_interrupted_answer_stays_as_far_as_it_came(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat(max_tokens=100)
    turn = conversation.ask("What is alpha_3?")
    texts = turn.texts()
    said = "".join(next(texts)[0] for _ in range(5))
    assert conversation.conclude(turn)
    assert conversation.current.messages[-1].content == said
    n_held = len(held(conversation))
    status = asked(conversation, "Go on.").reply.status
    assert status.reused_tokens >= n_held - 1  # its last token was chosen, and not read yet


def test_a_question_without_an_answer_is_not_part_of_it(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    assert not conversation.conclude(conversation.ask("What is alpha_3?"))
    assert conversation.current.messages == []


# Branches.


@pytest.mark.parametrize("name", MODELS)
def test_a_branch_reads_nothing_and_the_way_back_neither(name: str, open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat(name)
    asked(conversation, "What is alpha_3?")
    conversation.runtime.speed.tokens_per_s = 1.0  # restoring is faster than reading, as with real models
    before = held(conversation)
    assert conversation.branch()
    assert conversation.current.name == "2" and held(conversation) == before
    assert asked(conversation, "In the branch?").reply.status.prefilled_tokens < 24
    assert len(conversation.current.messages) == 4
    assert conversation.back()
    assert len(conversation.current.messages) == 2
    assert asked(conversation, "In the first?").reply.status.prefilled_tokens < 24
    assert not conversation.branch("2")
    assert conversation.current.messages[-2].content.endswith("In the branch?")
    assert asked(conversation, "And again?").reply.status.prefilled_tokens < 24


def test_more_branches_than_sequences_are_parked_and_found_again(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    conversation.runtime.speed.bytes_per_s = 1e12
    asked(conversation, "What is alpha_3?")
    for i in range(5):
        conversation.branch(f"b{i}")
        asked(conversation, f"In {i}?")
    assert conversation.runtime.n_sessions == 4
    conversation.branch("1")
    conversation.runtime.speed.tokens_per_s = 1.0
    status = asked(conversation, "Back?").reply.status
    assert status.plan.source == "snapshot" and status.prefilled_tokens < 24
    assert len(conversation.current.messages) == 4


def test_the_cells_of_other_branches_are_given_up_before_a_question_is_refused(
    open_chat: Callable[..., Conversation],
) -> None:
    conversation = open_chat(n_ctx=1024)
    conversation.read_ahead()
    conversation.branch()
    n_room = conversation.runtime.n_ctx_seq - len(held(conversation))
    asked(conversation, "alpha " * (n_room * 2 // 3))
    conversation.back()
    asked(conversation, "beta " * (n_room * 2 // 3))
    assert conversation.branches["2"].session is None
    with pytest.raises(ContextOverflowError):
        conversation.ask("gamma " * n_room)
    assert len(conversation.current.messages) == 2
    asked(conversation, "Still here?")


def test_what_a_first_attempt_has_read_is_not_told_as_reused(open_chat: Callable[..., Conversation]) -> None:
    """Oracle: the session's own count of what was computed."""
    conversation = open_chat(n_ctx=1024)
    conversation.read_ahead()
    n_files = len(held(conversation))
    conversation.branch()
    asked(conversation, "alpha " * ((1024 - n_files) * 2 // 3))
    conversation.back()
    session = conversation.current.session
    assert session is not None
    before = session.explain().work.prefill_tokens
    turn = conversation.ask("beta " * ((1024 - n_files) * 2 // 3))
    status, after = turn.reply.status, session.explain().work.prefill_tokens
    assert conversation.branches["2"].session is None  # so there was a second attempt
    assert status.prefilled_tokens == after - before > N_UBATCH
    assert n_files - 1 <= status.reused_tokens <= n_files
    assert status.reused_tokens + status.prefilled_tokens == status.prefix_tokens


@pytest.mark.parametrize("name", ["", "two words", "x" * 41, "esc\x1b[2J", "nul\0"])
def test_a_branch_has_a_word_for_a_name(name: str, open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat(folder=None)
    with pytest.raises(InvalidArgumentError):
        conversation.branch(name)
    assert list(conversation.branches) == ["1"]


def test_branches_come_back_too(open_chat: Callable[..., Conversation]) -> None:
    first = open_chat()
    asked(first, "One?")
    first.branch("other")
    asked(first, "Two?")
    record = first.record()
    second, _ = again(first, open_chat)
    assert msgspec.structs.replace(second.record(), state="") == record
    assert second.current.name == "other" and second.back() and second.current.name == "1"
    asked(second, "Three?")
    assert len(second.current.messages) == 4


# A folder that changes.


def with_edit(name: str, old: str, new: str) -> Files:
    assert old in FILES[name]
    return {**FILES, name: FILES[name].replace(old, new)}


def test_after_an_answer_a_change_is_added_and_all_that_was_read_stays(
    open_chat: Callable[..., Conversation],
) -> None:
    conversation = open_chat()
    asked(conversation, "What is alpha_3?")
    n_held = len(held(conversation))
    now = with_edit("a.py", "alpha_3 = 21", "alpha_3 = 22")
    refreshed = conversation.refresh(now, "a.py")
    assert refreshed is not None and not refreshed.in_place and refreshed.names == ["a.py"]
    assert conversation.refresh(now, "a.py") is None
    status = asked(conversation, "And now?").reply.status
    assert status.reused_tokens >= n_held - 1
    assert status.prefilled_tokens < refreshed.n_update + 32
    assert refreshed.n_update < conversation.count(FILES["a.py"])
    text = conversation.current.messages[-2]
    assert "alpha_3 = 22" in workspace.asked(text.content, text.updates)
    assert conversation.current.known(conversation.files) == now


def test_a_change_near_the_end_is_told_in_place(open_chat: Callable[..., Conversation]) -> None:
    """Where nothing follows it, the tokens behind the first change are fewer than those of a message about it."""
    conversation = open_chat()
    conversation.read_ahead()
    n_held = len(held(conversation))
    refreshed = conversation.refresh(with_edit("c.py", "gamma_19 = 247", "gamma_19 = 248"))
    assert refreshed is not None and refreshed.in_place
    assert refreshed.n_kept > n_held - 32
    status = conversation.read_ahead()
    assert status is not None and (status.reused_tokens, status.prefilled_tokens) == (
        refreshed.n_kept,
        refreshed.n_read,
    )
    assert conversation.current.known(conversation.files)["c.py"] == conversation.files["c.py"]


def test_a_restart_with_a_changed_file_reuses_at_least_what_is_before_it(
    open_chat: Callable[..., Conversation],
) -> None:
    first = open_chat()
    asked(first, "What is alpha_3?")
    n_before = first.count(workspace.told({"a.py": FILES["a.py"]}))
    second, _ = again(first, open_chat)
    now = {**with_edit("b.py", "beta_3 = 33", "beta_3 = 34"), "d.py": "delta = 1\n"}
    del now["c.py"]
    refreshed = second.refresh(now)
    assert refreshed is not None and refreshed.names == ["b.py", "c.py", "d.py"]
    status = second.read_ahead()
    assert status is not None and status.reused_tokens >= n_before
    asked(second, "And now?")
    assert second.current.known(second.files) == now
    assert second.refresh(now) is None


def test_an_update_that_does_not_fit_is_told_in_place(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat(n_ctx=1024)
    asked(conversation, "What is alpha_3?")
    now = {name: content.replace(" = ", " = 100") for name, content in FILES.items()}
    for _ in range(4):
        refreshed = conversation.refresh(now)
        assert refreshed is not None
        asked(conversation, "And now?")
        assert len(held(conversation)) <= 1024
        now = {name: content.replace(" = 1", " = 2") + "# more\n" for name, content in now.items()}


def test_an_edit_that_is_undone_before_the_next_question_is_no_change(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    asked(conversation, "What is alpha_3?")
    assert conversation.refresh(with_edit("a.py", "alpha_3 = 21", "alpha_3 = 22")) is not None
    assert len(conversation.current.pending) == 1
    conversation.refresh(FILES)
    assert conversation.current.pending == []
    assert conversation.current.known(conversation.files) == FILES


def test_the_smallest_files_are_read_where_not_all_fit(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    conversation.begin({**FILES, "big.py": "x = 1\n" * 2000})
    assert conversation.left_out == ["big.py"] and list(conversation.files) == ["a.py", "b.py", "c.py"]
    assert conversation.refresh({**FILES, "big.py": "x = 2\n" * 2000}) is None  # it was left out, and still is
    with pytest.raises(InvalidArgumentError, match="give a larger --ctx"):
        conversation.begin({"big.py": "x = 1\n" * 2000})


@pytest.mark.parametrize("source", sorted(templates.sources()))
def test_every_template_tells_the_files(source: str, model: Model) -> None:
    """Those that refuse or forget a system message too."""
    with Runtime.open(model, n_ctx=256, chat_template=templates.sources()[source]) as runtime:
        conversation = Conversation(runtime, "/folder")
        conversation.files = {"a.py": "alpha = 21\n"}
        tokens = conversation._tokens([history.Message("user", "What is alpha?")])
        text = model.detokenize(tokens).decode("utf-8", "replace")
        assert text.count("alpha = 21") == 1 and text.count("What is alpha?") == 1
        assert b"alpha = 21" in model.detokenize(conversation._before_next())
        conversation.close()


def test_thoughts_are_told_apart_and_kept_apart(open_chat: Callable[..., Conversation]) -> None:
    source = next(text for name, text in templates.sources().items() if name.startswith("Qwen-Qwen3-0.6B"))
    conversation = open_chat(chat_template=source)
    turn = conversation.ask("Why?")
    assert turn._thinks

    thought = ["<think>\nHm", "m.\n</think>\n\n", "Be", "cause."]
    chunks = [Chunk(text=text, tokens=(1,)) for text in thought] + [Chunk(finish_reason="stop")]
    turn.reply._chunks = iter(chunks)  # what the model would say
    texts = list(turn.texts())
    assert "".join(text for text, is_thought in texts if is_thought).strip() == "Hmm."
    assert "".join(text for text, is_thought in texts if not is_thought).strip() == "Because."
    assert conversation.conclude(turn)
    answer = conversation.current.messages[-1]
    assert (answer.content.strip(), answer.reasoning.strip(), answer.tokens) == ("Because.", "Hmm.", ())
    asked(conversation, "And?")


# Files of conversations.


@pytest.fixture
def record() -> history.Record:
    update = workspace.update("a.py", "x = 1\n", "x = 2\n", len)
    said = (
        history.Message("user", "What is x?", updates=(update,)),
        history.Message("assistant", "2", tokens=(17,)),
        history.Message("user", "Why?"),
        history.Message("assistant", "Because.", reasoning="Hm."),
    )
    return history.Record(
        format=history.FORMAT,
        version=history.VERSION,
        model="tiny-llama",
        model_digest="0" * 64,
        folder="/folder",
        files=FILES,
        left_out=("big.py",),
        branches=(history.BranchRecord("1", None, said[:2]), history.BranchRecord("other", "1", said, (update,))),
        current="other",
        checksum="",
    )


def test_a_file_gives_back_what_it_was_given_and_is_its_owners_alone(record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    history.save(path, record, None)
    assert history.load(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    history.save(path, msgspec.structs.replace(record, current="1"), None)
    assert history.load(path).current == "1"
    assert [one.name for one in tmp_path.iterdir() if one.suffix != ""] == ["talk.json"]


def test_no_other_file_is_replaced(record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    for place in (path, tmp_path, Path("/dev/null")):
        with pytest.raises(SnapshotError):
            history.save(place, record, None)
    assert path.read_text() == "mine"


def test_whatever_is_cut_or_changed_in_a_file_is_an_error_or_the_record(record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    data = history.encoded(record)
    draw = random.Random(1)
    damaged = [data[: draw.randrange(len(data))] for _ in range(50)]
    for _ in range(300):
        at = draw.randrange(len(data))
        damaged.append(data[:at] + bytes([draw.randrange(256)]) + data[at + draw.randrange(3) :])
    n_refused = 0
    for one in damaged:
        path.write_bytes(one)
        try:
            assert history.load(path) == record
        except SnapshotError as error:
            assert "\n" not in str(error)
            n_refused += 1
    assert n_refused >= 300


def test_no_flipped_bit_gets_into_a_conversation(record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    data = history.encoded(record)
    begin, end = data.index(b"Because."), data.index(b"Because.") + len(b"Because.")
    for at in range(begin, end):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(SnapshotCorruptError):
                history.load(path)


def changed(record: history.Record, **values: Any) -> bytes:
    return history.encoded(msgspec.structs.replace(record, **values))


DAMAGES: dict[str, Callable[[history.Record], bytes]] = {
    "empty": lambda record: b"",
    "another format": lambda record: changed(record, format="another"),
    "unknown field": lambda record: changed(record)[:-1] + b',"more":1}',
    "deep": lambda record: b'{"format":' + b"[" * 100_000,
    "surrogate": lambda record: b'{"format":"\\ud800"}',
    "branch twice": lambda record: changed(record, branches=record.branches * 2),
    "no branch": lambda record: changed(record, branches=()),
    "current unknown": lambda record: changed(record, current="nowhere"),
    "parent unknown": lambda record: changed(record, branches=(history.BranchRecord("1", "0", ()),)),
    "parent itself": lambda record: changed(record, branches=(history.BranchRecord("1", "1", ()),)),
    "no answer": lambda record: changed(
        record, branches=(history.BranchRecord("1", None, (history.Message("user", "?"),)),)
    ),
    "branch that steers": lambda record: changed(record, branches=(history.BranchRecord("1\x1b[2J", None, ()),)),
    "name of two lines": lambda record: changed(record, files={"a\nb": "x"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_one_clear_line(damage: str, record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(DAMAGES[damage](msgspec.structs.replace(record, current="1")))
    with pytest.raises(SnapshotCorruptError) as caught:
        history.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_another_version_is_told_from_damage(record: history.Record, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(b'{"format":"llamacppshim chat","version":2,"anything":[]}')
    with pytest.raises(SnapshotMismatchError) as caught:
        history.load(path)
    assert caught.value.field == "version"


def test_a_conversation_of_another_model_or_folder_changes_nothing(
    open_chat: Callable[..., Conversation], record: history.Record
) -> None:
    conversation = open_chat()
    asked(conversation, "One?")
    before = conversation.record()
    ours = msgspec.structs.replace(record, model_digest=before.model_digest)
    for field, other in (("model", record), ("folder", msgspec.structs.replace(ours, folder=None))):
        with pytest.raises(SnapshotMismatchError) as caught:
            conversation.resume(other)
        assert caught.value.field == field
        if field == "model":  # which has the same name
            expected = "a conversation of another model: it is called tiny-llama too, but its digest is another"
            assert str(caught.value) == expected
    message = history.Message("assistant", "x", tokens=(10**9,))
    branches = (history.BranchRecord("1", None, (history.Message("user", "?"), message)),)
    with pytest.raises(SnapshotCorruptError):
        conversation.resume(msgspec.structs.replace(ours, branches=branches, current="1"))
    assert conversation.record() == before
    asked(conversation, "Two?")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", str(tmp_path / "cache"))
    return history.make_home()


def test_what_another_chat_has_saved_meanwhile_is_set_aside(record: history.Record, home: Path) -> None:
    path = home / "place.json"
    first = history.keep(path, record, None)
    assert first == (path, history.digest(path), None)
    theirs = msgspec.structs.replace(record, current="1")
    assert history.keep(path, theirs, first.digest) == (path, history.digest(path), None)
    own = history.beside(path)
    for _ in range(2):
        assert history.keep(path, record, first.digest, own) == (own, history.digest(own), None)
    assert history.load(own) == record and history.load(path) == theirs
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    own.unlink()
    last = history.keep(path, record, first.digest)
    assert last.aside is not None and history.load(last.aside) == theirs
    assert last.digest == first.digest == history.digest(path) and history.load(path) == record


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_set_aside_and_never_waited_for(
    make: Callable[[Path], None], tiny_llama: Path, environment: dict[str, str], home: Path, tmp_path: Path
) -> None:
    with Model(tiny_llama) as model:
        place = history.place(model.digest, None)
    make(place)
    done = piped("One?\n", tmp_path, environment, "--model", tiny_llama, "--max-tokens", "4")
    assert done.returncode == 0
    assert b"the last conversation cannot be used: " in done.stderr
    assert b"what was saved there before is now " in done.stderr
    assert [message.content for message in history.load(place).branches[0].messages[::2]] == ["One?"]
    assert sorted(path.is_file() for path in home.glob("*.json")) == [False, True]


def test_old_conversations_go(record: history.Record, home: Path) -> None:
    for i in range(history.MAX_FILES + 5):
        (home / f"{i}.json").write_text("{}")
        os.utime(home / f"{i}.json", (i, i))
    history.keep(home / "place.json", record, None)
    left = {path.name for path in home.glob("*.json")}
    assert len(left) == history.MAX_FILES and "place.json" in left and "5.json" not in left


def test_a_superseded_state_is_removed(open_chat: Callable[..., Conversation]) -> None:
    conversation = open_chat()
    names = [""]
    for question in ("One?", "Two?"):
        asked(conversation, question)
        names.append(conversation.store_state(replacing=names[-1]))
    assert conversation.runtime.store is not None
    assert [entry.name for entry in conversation.runtime.store.entries()] == names[2:]


# At a terminal.

# The child takes the terminal it is given as its own, so that Ctrl-C and a hang-up reach it.
CODE = """
import fcntl, os, sys, termios
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from llamacppshim.cli import main
main()
"""
PATIENCE_S = 60.0
STEERING = re.compile(rb"\x1b\[[?0-9;]*[a-zA-Z]")
LINE = re.compile(rb"reused ([0-9,]+) tokens, read ([0-9,]+)")


def number(text: bytes) -> int:
    return int(text.replace(b",", b""))


class Terminal:
    """A chat in a terminal of its own: what it shows is waited for, never a time."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str | Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        command = [sys.executable, "-c", CODE, "chat", *map(str, arguments)]
        self.child = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._ours = ours
        self._at = 0
        self.seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self.hang_up()

    def _more(self, why: str) -> bool:
        """Reads what there is; False at the end."""
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_S)
        assert ready, f"nothing more came, {why}: {self.seen[-2000:]!r}"
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data
        return bool(data)

    def expect(self, text: str) -> bytes:
        """What was shown until this text came, after what was expected before."""
        wanted = text.encode()
        while (found := self.seen.find(wanted, self._at)) < 0:
            assert self._more(f"waiting for {text!r}"), f"it ended without {text!r}: {self.seen[-2000:]!r}"
        shown = self.seen[self._at : found + len(wanted)]
        self._at = found + len(wanted)
        return shown

    def expect_line(self) -> tuple[int, int]:
        """The next quiet line: tokens reused, and read."""
        shown = self.expect(" tokens, read ")
        while LINE.search(self.seen, self._at - len(shown)) is None or self.seen[self._at :].find(b"\n") < 0:
            assert self._more("waiting for a whole line")
        found = LINE.search(self.seen, self._at - len(shown))
        assert found is not None
        return number(found[1]), number(found[2])

    def expect_answer(self) -> None:
        """Something of it."""
        while not STEERING.sub(b"", self.seen[self._at :]).strip():
            assert self._more("waiting for an answer")

    def expect_prompt(self, text: str = "> ") -> None:
        """Until it waits for a key: a signal that comes just before would be acted on with the next key."""
        self.expect(text)
        status = Path(f"/proc/{self.child.pid}/stat")
        n_asleep = 0
        while self.child.poll() is None and status.exists() and n_asleep < 20:
            n_asleep = n_asleep + 1 if b") S " in status.read_bytes() else 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def hang_up(self) -> None:
        if self._ours >= 0:
            os.close(self._ours)
        self._ours = -1

    def end(self) -> int:
        """Waits until it has ended, and gives its exit code."""
        while self._ours >= 0 and self._more("waiting for the end"):
            pass
        return self.child.wait(PATIENCE_S)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("VISUAL", "EDITOR", "INPUTRC")}
    return {**own, "LLAMACPPSHIM_CACHE": str(tmp_path / "cache"), "TERM": "xterm", "HOME": str(tmp_path)}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path, tiny_models: dict[str, Path], environment: dict[str, str]) -> Iterator[Start]:
    """Starts chats of one user at terminals."""
    terminals: list[Terminal] = []

    def start(*arguments: str | Path, model: str = "tiny-llama", **more: str) -> Terminal:
        values = ["--model", tiny_models[model], "--max-tokens", "12", *arguments]
        terminals.append(Terminal(tmp_path, {**environment, **more}, *values))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.__exit__(None, None, None)


def test_it_streams_tells_each_turn_and_comes_back_warm(start: Start, repo: Path, tmp_path: Path) -> None:
    with start("--repo", repo) as chat:
        chat.expect("3 files, ")
        reused, n_files = chat.expect_line()
        assert reused == 0 and n_files > 300
        chat.expect("> ")
        chat.type("What is alpha_3?\n")
        reused, n_read = chat.expect_line()
        assert reused == n_files and n_read < 32
        chat.expect("first token after ")
        chat.expect(" tokens/s")
        chat.expect("> ")
        chat.type("And beta_4?\n")
        reused, n_read = chat.expect_line()
        assert reused > n_files + 20 and n_read < 32
        chat.expect("> ")
        chat.type("/quit\n")
        assert chat.end() == 0
    n_held = reused + n_read
    with start("--repo", repo) as chat:
        chat.expect("2 questions so far")
        reused, n_read = chat.expect_line()
        assert reused > n_held and n_read < 16
        chat.expect("> ")
        chat.type("\x1b[A\n")  # the last question, by the arrow key
        chat.expect("And beta_4?")
        reused, n_read = chat.expect_line()
        assert n_read < 32
        chat.expect("> ")
        chat.type("\x04")
        assert chat.end() == 0
    home = tmp_path / "cache" / "chats"
    for path in home.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o700 if path.is_dir() else mode == 0o600 or path.name == ".lock"
    (repo / "b.py").write_text(FILES["b.py"].replace("beta_3 = 33", "beta_3 = 34"))
    with start("--repo", repo) as chat:
        chat.expect("changed: b.py; ")
        reused, n_read = chat.expect_line()
        assert reused > n_held and n_read < 16


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_line(start: Start) -> None:
    with start("--max-tokens", "6000") as chat:
        chat.expect("> ")
        chat.type("Go on.\n")
        chat.expect("Go on.\r\n")
        chat.expect_answer()
        chat.type("\x03")
        chat.expect("interrupted, the answer so far is kept")
        chat.expect("> ")
        chat.type("/explain\n")
        chat.expect("1 question, here")
        chat.expect_prompt()
        chat.type("\x03")
        chat.expect("leaves)")
        chat.expect("> ")
        chat.type("half a line")
        chat.expect("half a lin")
        chat.expect_prompt("e")
        chat.type("\x03")  # only the line is gone
        chat.expect("leaves)")
        chat.expect_prompt()
        chat.type("\x03")
        assert chat.end() == 0


def test_interrupts_at_any_moment_leave_a_chat_that_goes_on(start: Start, repo: Path) -> None:
    draw = random.Random(1)
    with start("--repo", repo, "--max-tokens", "600", "--ctx", "16384") as chat:
        chat.expect_prompt("\x1b[?2004h> ")
        for i in range(12):
            chat.type(f"Say {'something ' * draw.choice([1, 5, 400])}{i}\n")
            chat.expect(f"{i}\r\n")
            if draw.random() < 0.5:
                chat.expect_answer()
            chat.type("\x03")
            chat.expect_prompt("\x1b[?2004h> ")
        chat.type("Still here?\n")
        chat.expect_line()
        chat.expect("\x1b[?2004h> ")
        chat.type("/quit\n")
        assert chat.end() == 0
        assert b"Traceback" not in chat.seen


def test_a_long_prefill_shows_what_is_left_and_ctrl_c_leaves_it_for_later(start: Start, repo: Path) -> None:
    (repo / "long.py").write_text("".join(f"value_{i} = {i * i}\n" for i in range(4000)))
    n_left = []
    for _ in range(2):
        with start("--repo", repo, "--ctx", "65536") as chat:
            chat.expect("reading")
            n_left.append(number(chat.expect(" tokens, about ").split()[-3]))
            chat.expect(" s left")
            chat.type("\x03")
            chat.expect("the rest is read with the next question")
            chat.expect("> ")
            chat.type("/explain\n")
            chat.expect("resident   ")
            n_resident = number(chat.expect(" of ").split()[0])
            assert n_resident >= chat_cli.N_UBATCH
            chat.expect("> ")
            chat.type("/quit\n")
            assert chat.end() == 0
            assert chat.seen.count(b"\x1b[?25l") == chat.seen.count(b"\x1b[?25h")  # the cursor is there again
        n_left.append(n_resident)
    first, n_resident, second, _ = n_left
    assert second <= first - n_resident + 16


def test_branches_are_told_and_an_unknown_command_is_no_question(start: Start, repo: Path) -> None:
    with start("--repo", repo) as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("/back\n")
        chat.expect("this is the first branch")
        chat.type("/nosuch thing\n")
        chat.expect("there is no /nosuch; /help lists the commands")
        chat.type("/help\n")
        for name in chat_cli.COMMANDS:
            chat.expect(f"{name} ")
        chat.expect("> ")
        chat.type("/fit\n")
        chat.expect("q8_0 cache")
        chat.expect("> ")
        chat.type("/branch idea\n")
        chat.expect("branch idea of 1; /back returns there")
        chat.expect("idea> ")
        chat.type("Two?\n")
        _, n_read = chat.expect_line()
        assert n_read < 32
        chat.expect("idea> ")
        chat.type("/back\n")
        chat.expect("branch 1, 1 question so far")
        _, n_read = chat.expect_line()
        assert n_read < 16
        chat.expect("1> ")
        chat.type("Three?\n")
        _, n_read = chat.expect_line()
        assert n_read < 32
        chat.expect("1> ")
        chat.type("/explain\n")
        chat.expect("branch     1: 2 questions, here")
        chat.expect("branch     idea of 1: 2 questions")
        chat.expect("1> ")
        chat.type("/quit\n")
        assert chat.end() == 0


def test_a_saved_conversation_is_loaded_warm_and_only_where_it_belongs(
    start: Start, repo: Path, tmp_path: Path
) -> None:
    with start("--repo", repo) as chat:
        chat.expect("> ")
        chat.type("One?\n")
        reused, n_read = chat.expect_line()
        chat.expect("> ")
        chat.type("/save talk.json\n")
        chat.expect("saved: talk.json")
        chat.expect("> ")
        chat.type("/save repo/a.py\n")
        chat.expect("repo/a.py: damaged, or no conversation")
        chat.type("/load repo/a.py\n")
        chat.expect("repo/a.py: damaged, or no conversation")
        chat.type("/load nosuch\n")
        chat.expect("nosuch: No such file or directory")
        chat.expect_prompt()
        os.kill(chat.child.pid, signal.SIGTERM)
        assert chat.end() == 128 + signal.SIGTERM
    n_held = reused + n_read
    shutil.rmtree(tmp_path / "cache" / "chats")  # what is saved needs nothing of it
    with start("--repo", repo, "--new") as chat:
        chat.expect("> ")
        chat.type("/load talk.json\n")
        chat.expect("talk.json: 1 question so far")
        reused, n_read = chat.expect_line()
        assert reused > n_held and n_read < 16
        chat.expect("> ")
        chat.type("\x04")
        assert chat.end() == 0
    data = (tmp_path / "talk.json.lcs").read_bytes()
    (tmp_path / "talk.json.lcs").write_bytes(data[: len(data) // 2])
    with start("--repo", repo, "--new") as chat:
        chat.expect("> ")
        chat.type("/load talk.json\n")
        chat.expect("what was read for it is not used: it is damaged")
        chat.expect("> ")
        chat.type("Two?\n")
        chat.expect_line()
        chat.expect("> ")
    with start(model="tiny-spm") as chat:
        chat.expect("it goes on from the text as it stands")
        chat.expect("> ")
        chat.type("/load talk.json\n")
        chat.expect("talk.json: a conversation of another model: tiny-llama, not tiny-spm")
        chat.expect("> ")
        chat.type("Still here?\n")
        chat.expect_line()


def test_an_edited_file_is_read_where_it_changed(start: Start, repo: Path) -> None:
    with start("--repo", repo, EDITOR="sed -i 's/beta_3 = 33/beta_3 = 34/'") as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect_line()
        chat.expect("> ")
        (repo / "a.py").write_text(FILES["a.py"].replace("alpha_3 = 21", "alpha_3 = 22"))
        chat.type("/edit a.py\n")
        chat.expect("changed: a.py; ")
        n_update = number(chat.expect(" tokens of it go with the next question").split()[0])
        chat.expect("> ")
        chat.type("/edit b.py\n")  # it has not changed, so the editor is asked
        chat.expect("changed: b.py; ")
        n_update += number(chat.expect(" tokens of it go with the next question").split()[0])
        chat.expect("> ")
        chat.type("Two?\n")
        _, n_read = chat.expect_line()
        assert n_update < n_read < n_update + 40
        chat.expect("> ")
        chat.type("/edit\n")
        chat.expect("the folder is as it was read")
        for name, why in (("nosuch.py", "not in the folder"), ("../talk", "not in the folder"), (".git", "hidden")):
            (repo / ".git").write_text("x")
            chat.type(f"/edit {name}\n")
            chat.expect(f"{name}: {why}")
        chat.expect("> ")
    assert "beta_3 = 34" in (repo / "b.py").read_text()


def test_an_editor_that_cannot_be_understood_is_told_and_the_chat_goes_on(start: Start, repo: Path) -> None:
    with start("--repo", repo, VISUAL="vi 'unbalanced") as chat:
        chat.expect("> ")
        chat.type("/edit b.py\n")
        chat.expect("$VISUAL is no command line: No closing quotation: vi 'unbalanced")
        chat.expect("> ")
        chat.type("Still here?\n")
        chat.expect_line()
        assert b"Traceback" not in chat.seen


@pytest.mark.parametrize("visual", ["", " ", "\t "])
def test_a_blank_editor_is_none(visual: str, start: Start, repo: Path, tmp_path: Path) -> None:
    script = "#!/bin/sh\ntouch " + str(tmp_path / "ran") + "\n"
    (repo / "run.sh").write_text(script)
    (repo / "run.sh").chmod(0o755)
    with start("--repo", repo, VISUAL=visual) as chat:
        chat.expect("> ")
        chat.type("/edit run.sh\n")
        chat.expect("run.sh is as it was read")
    with start("--repo", repo, VISUAL=visual, EDITOR="sed -i s/touch/echo/") as chat:
        chat.expect("> ")
        chat.type("/edit run.sh\n")
        chat.expect("changed: run.sh")
        chat.expect("> ")
    assert not (tmp_path / "ran").exists() and (repo / "run.sh").read_text() == script.replace("touch", "echo")


def test_a_pasted_question_of_several_lines_is_one(start: Start, tmp_path: Path) -> None:
    with start() as chat:
        chat.expect("> ")
        chat.type("\x1b[200~What is\ndef f():\n    pass\x1b[201~")
        chat.expect("pass")
        chat.type("\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("this goes \\\n")
        chat.expect("... ")
        chat.type("on\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("/quit\n")
        assert chat.end() == 0
    (path,) = (tmp_path / "cache" / "chats").glob("*.json")
    questions = [message.content for message in history.load(path).branches[0].messages[::2]]
    assert questions == ["What is\ndef f():\n    pass", "this goes \non"]


def test_a_terminal_that_hangs_up_loses_nothing(start: Start, tmp_path: Path) -> None:
    with start() as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect_line()
        chat.expect("> ")
        chat.hang_up()
        assert chat.end() == 128 + signal.SIGHUP
    (path,) = (tmp_path / "cache" / "chats").glob("*.json")
    record = history.load(path)
    assert len(record.branches[0].messages) == 2
    assert (path.parent / "states" / record.state).exists()


def test_what_was_said_when_it_was_killed_is_kept(start: Start, tmp_path: Path) -> None:
    with start("--max-tokens", "6000") as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect("One?\r\n")
        chat.expect_answer()
        os.kill(chat.child.pid, signal.SIGTERM)
        assert chat.end() == 128 + signal.SIGTERM
    (path,) = (tmp_path / "cache" / "chats").glob("*.json")
    question, answer = history.load(path).branches[0].messages
    assert question.content == "One?" and answer.content


def test_what_was_read_and_answered_before_a_kill_is_kept(start: Start, repo: Path, tmp_path: Path) -> None:
    with start("--repo", repo) as chat:
        _, n_files = chat.expect_line()
        for question in ("One?", "Two?"):
            chat.expect("> ")
            chat.type(f"{question}\n")
            chat.expect_line()
        chat.expect("> ")
        os.kill(chat.child.pid, signal.SIGKILL)
        assert chat.end() == -signal.SIGKILL
    with start("--repo", repo) as chat:
        chat.expect("2 questions so far")
        reused, n_read = chat.expect_line()
        assert reused >= n_files and n_read < 100  # the two turns are read again, the files are not
        chat.expect("> ")
        os.kill(chat.child.pid, signal.SIGKILL)
    with start("--repo", repo, "--new") as chat:
        reused, n_read = chat.expect_line()
        assert reused == n_files
        chat.expect("> ")
        chat.type("Three?\n")
        aside = chat.expect(": /load takes it").decode().split()[-4].removesuffix(":")
        chat.expect("> ")
        os.kill(chat.child.pid, signal.SIGKILL)
    places = list((tmp_path / "cache" / "chats").glob("*.json"))
    assert {tuple(message.content for message in history.load(path).branches[0].messages[::2]) for path in places} == {
        ("One?", "Two?"),
        ("Three?",),
    }
    assert Path(aside) in places


def test_what_took_long_to_read_is_kept_at_once(start: Start, repo: Path) -> None:
    with start("--repo", repo) as chat:
        chat.expect_line()
        chat.expect("> ")
        (repo / "c.py").write_text(FILES["c.py"].replace(" = ", " = 1"))
        chat.type("/edit c.py\n")
        chat.expect("changed: c.py; told in place, and what follows is read again")
        reused, n_read = chat.expect_line()
        assert n_read >= 64
        n_held = reused + n_read
        chat.expect_prompt()
        os.kill(chat.child.pid, signal.SIGKILL)
        assert chat.end() == -signal.SIGKILL
    with start("--repo", repo) as chat:
        reused, n_read = chat.expect_line()
        assert reused >= n_held - 1 and n_read <= 1
        chat.expect("> ")
        chat.type("word " * chat_cli.KEPT_AT_ONCE_TOKENS + "\n")
        reused, n_read = chat.expect_line()
        assert n_read >= chat_cli.KEPT_AT_ONCE_TOKENS
        n_held = reused + n_read
        chat.expect_prompt()
        os.kill(chat.child.pid, signal.SIGKILL)
        assert chat.end() == -signal.SIGKILL
    with start("--repo", repo) as chat:
        chat.expect("1 question so far")
        reused, n_read = chat.expect_line()
        assert reused >= n_held and n_read < 16


def test_what_is_read_on_the_way_to_a_branch_is_kept_at_once(
    open_chat: Callable[..., Conversation], home: Path, tmp_path: Path
) -> None:
    conversation = open_chat()
    silent = Console(file=io.StringIO())
    chat = Chat(conversation, silent, silent, tmp_path / "place.json", lambda: None)
    asked(conversation, "One?")
    conversation.branch()
    assert chat.keep()
    first = conversation.branches["1"]
    assert first.session is not None
    first.session.close()  # parked, and not found any more
    assert conversation.runtime.store is not None
    for entry in conversation.runtime.store.entries():
        conversation.runtime.store.remove(entry.name)
    chat._obey("/back")
    record = history.load(tmp_path / "place.json")
    assert record.current == "1" and not conversation.changed
    (entry,) = conversation.runtime.store.entries()
    assert entry.name == record.state and entry.n_tokens == len(held(conversation))


def questions(path: Path) -> list[str]:
    return [message.content for message in history.load(path).branches[0].messages[::2]]


def ask_in_turn(one: Terminal, other: Terminal, *asked: str) -> None:
    """A question each, of chats that have found nothing of each other when they started."""
    for chat in (one, other):
        chat.expect("> ")
    for chat, question in zip((one, other), asked, strict=True):
        chat.type(f"{question}\n")
        chat.expect_line()
        chat.expect("> ")


def test_each_of_two_running_chats_has_its_words_on_disk(start: Start, tmp_path: Path) -> None:
    chats = tmp_path / "cache" / "chats"
    moved = "another chat has saved at the same place; until one of the two leaves, this one is "
    with start() as one, start() as other:
        ask_in_turn(one, other, "1?", "2?")
        (place,) = (path for path in chats.glob("*.json") if "-" not in path.name)
        for question in ("3?", "4?"):
            one.type(f"{question}\n")
            one.expect_line()
            if question == "3?":
                one.expect(moved)
                own = Path(one.expect(".json").decode())
            one.expect_prompt()
        assert one.seen.count(moved.encode()) == 1
        assert questions(own) == ["1?", "3?", "4?"] and questions(place) == ["2?"]
        os.kill(one.child.pid, signal.SIGKILL)
        other.type("5?\n")
        other.expect_line()
        other.expect_prompt()
        assert questions(place) == ["2?", "5?"]
        with start() as third:
            third.expect("2 questions so far")
            third.expect("> ")
            third.type("6?\n")
            third.expect_line()
            third.expect("> ")
            other.type("7?\n")
            other.expect(moved)
            others = Path(other.expect(".json").decode())
            other.expect("> ")
            assert questions(others) == ["2?", "5?", "7?"]
            other.type("/quit\n")
            other.expect("what was saved there before is now ")
            assert other.end() == 0
            assert questions(place) == ["2?", "5?", "7?"] and not others.exists()
    assert questions(own) == ["1?", "3?", "4?"]


def test_a_conversation_that_is_left_for_another_stays_on_disk(start: Start, tmp_path: Path) -> None:
    chats = tmp_path / "cache" / "chats"
    with start() as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("/save talk.json\n")
        chat.expect("> ")
        chat.type("Two?\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("/load talk.json\n")
        chat.expect_line()
        chat.expect("> ")
        chat.type("Three?\n")
        chat.expect_line()
        chat.expect("what was saved there before is now ")
        chat.expect("> ")
        chat.type("/quit\n")
        assert chat.end() == 0
    assert sorted(map(questions, chats.glob("*.json"))) == [["One?", "Three?"], ["One?", "Two?"]]


def test_a_save_that_fails_is_told_once(
    open_chat: Callable[..., Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, silent, err = open_chat(folder=None), Console(file=io.StringIO()), io.StringIO()
    chat = Chat(conversation, silent, Console(file=err), tmp_path / "place.json", lambda: None)

    def refuse(*_: Any) -> history.Kept:
        raise SnapshotError("No space left on device")

    monkeypatch.setattr(history, "keep", refuse)
    for question in ("One?", "Two?"):
        chat._obey(question)
    assert not chat.keep()
    assert err.getvalue().count("the conversation could not be saved: No space left on device") == 1
    chat._obey("/save")  # where it is asked for, it is answered
    assert err.getvalue().count("the conversation could not be saved: No space left on device") == 2


def test_two_chats_of_one_folder_lose_nothing_of_each_other(start: Start, tmp_path: Path) -> None:
    with start() as one, start() as other:
        ask_in_turn(one, other, "Of one?", "Of the other?")
        one.type("/quit\n")
        assert one.end() == 0
        other.type("/save\n")
        other.expect("what was saved there before is now ")
        aside = other.expect(": /load takes it").decode().removesuffix(": /load takes it")
        other.expect("> ")
        other.type(f"/load {aside}\n")
        other.expect("1 question so far")
        _, n_read = other.expect_line()
        assert n_read < 16
        other.expect("> ")
        other.type("/load\n")
        other.expect("1 question so far")
        other.type("/quit\n")
        assert other.end() == 0
    records = [history.load(path) for path in (tmp_path / "cache" / "chats").glob("*.json")]
    assert {record.branches[0].messages[0].content for record in records} == {"Of one?", "Of the other?"}


# Through pipes.


def piped(
    lines: str | bytes, folder: Path, environment: dict[str, str], *arguments: str | Path
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CODE, "chat", *map(str, arguments)]
    data = lines if isinstance(lines, bytes) else lines.encode()
    return subprocess.run(
        command, cwd=folder, env=environment, input=data, capture_output=True, check=False, timeout=5 * PATIENCE_S
    )


def test_through_pipes_answers_are_all_of_the_output(
    tiny_models: dict[str, Path], environment: dict[str, str], repo: Path, tmp_path: Path
) -> None:
    arguments = ["--model", tiny_models["tiny-llama"], "--repo", repo, "--max-tokens", "9"]
    done = piped("One?\n\n  \n/explain\nTwo?", tmp_path, environment, *arguments)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr and b"left" not in done.stderr
    (path,) = (tmp_path / "cache" / "chats").glob("*.json")
    answers = [message.content for message in history.load(path).branches[0].messages[1::2]]
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in answers) and len(answers) == 2
    assert len(LINE.findall(done.stderr)) == 3
    done = piped("Three?\n" + "long " * 9000 + "\nFour?\n", tmp_path, environment, *arguments)
    assert done.returncode == 1  # one question got no answer
    assert b"the context is full" in done.stderr and b"Traceback" not in done.stderr
    assert len(done.stdout.decode().splitlines()) >= 2
    assert len(history.load(path).branches[0].messages) == 8


@pytest.mark.parametrize("stream", ["<", ">"])
def test_a_closed_stream_is_told(stream: str, tiny_llama: Path, environment: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "llamacppshim.cli", "chat", "--model", str(tiny_llama)]
    command = ["sh", "-c", f'exec "$@" {stream}&-', "sh", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, input=b"")
    what = {"<": b"input", ">": b"output"}[stream]
    assert (done.returncode, done.stderr) == (1, b"llamacppshim: there is no standard " + what + b"\n")


def test_who_closes_the_errors_gets_answers_all_the_same(
    tiny_llama: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "llamacppshim.cli", "chat", "--model", str(tiny_llama), "--max-tokens", "4"]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, input=b"One?\n")
    assert done.returncode == 0
    (path,) = (tmp_path / "cache" / "chats").glob("*.json")
    assert done.stdout.decode() == history.load(path).branches[0].messages[1].content + "\n"


def test_who_closes_the_errors_has_a_prompt_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CODE", "import sys; sys.stderr = None" + CODE)
    with start() as chat:
        chat.expect("> ")
        chat.type("One?\n")
        chat.expect("> ")
        chat.type("/quit\n")
        assert chat.end() == 0
        assert b"Traceback" not in chat.seen


def test_names_that_no_file_has_are_told(
    tiny_llama: Path, environment: dict[str, str], repo: Path, tmp_path: Path
) -> None:
    commands = [f"/{name} {path}" for name in ("load", "save", "edit") for path in ("a\0b", "~nosuchuser/x")]
    done = piped("\n".join(commands), tmp_path, environment, "--model", tiny_llama, "--repo", repo)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    names = ("a\ufffdb: ", "'a\\x00b.lcs': ", "~nosuchuser/x: ")
    assert len([line for line in done.stderr.decode().splitlines() if line.startswith(names)]) == len(commands)


def test_nothing_steers_the_terminal(
    tiny_models: dict[str, Path], environment: dict[str, str], repo: Path, tmp_path: Path
) -> None:
    lines = b"/edit \x1b]0;x\x07\n/\x1b[2J\n/load \x1b[2J\n/branch \x1b[2J\n/save \x9b2J\xff/x\n"
    done = piped(lines, tmp_path, environment, "--model", tiny_models["tiny-llama"], "--repo", repo)
    assert b"Traceback" not in done.stderr
    assert not set(done.stderr.decode()) & {"\x1b", "\x07", "\x9b"}


def test_an_answer_that_would_steer_the_terminal_is_shown_as_text(
    open_chat: Callable[..., Conversation], tmp_path: Path
) -> None:
    conversation = open_chat(folder=None)
    out, err = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    chat = Chat(conversation, out, err, tmp_path / "place.json", lambda: None)
    ask = conversation.ask

    def answered(*values: Any, **named: Any) -> Turn:
        turn = ask(*values, **named)
        turn.reply._chunks = iter([Chunk(text="a\x1b[2J\x9bb\tc\n", tokens=(1,)), Chunk(finish_reason="stop")])
        return turn

    conversation.ask = answered  # type: ignore[method-assign]
    chat._obey("One?")
    assert isinstance(out.file, io.StringIO) and out.file.getvalue() == "a\ufffd[2J\ufffdb\tc\n\n"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"{}", "damaged, or no conversation"),
        (b'{"format":"another","version":1}', "no conversation of ours"),
        (b'{"format":"llamacppshim chat","version":2}', "version is 2, expected 1"),
    ],
)
def test_a_last_conversation_that_cannot_be_used_is_told_and_set_aside(
    data: bytes,
    line: str,
    tiny_models: dict[str, Path],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMACPPSHIM_CACHE", environment["LLAMACPPSHIM_CACHE"])
    with Model(tiny_models["tiny-llama"]) as model:
        place = history.place(model.digest, None)
    history.make_home()
    place.write_bytes(data)
    done = piped("One?\n", tmp_path, environment, "--model", tiny_models["tiny-llama"], "--max-tokens", "4")
    assert done.returncode == 0 and line in done.stderr.decode()
    assert len(history.load(place).branches[0].messages) == 2
    assert data in [path.read_bytes() for path in place.parent.glob("*.json")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--model", "{bert}"], "makes embeddings"),
        (["--repo", "missing"], "missing is not a folder"),
        (["--repo", "empty"], "empty holds no text files"),
        (["--model", "{llama}", "--repo", "big"], "give a larger --ctx"),
        (["--model", "{llama}", "--max-tokens", "-1"], "max_tokens -1"),
        (["--model", "{llama}", "--temperature", "-1"], "temperature -1"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    arguments: list[str], line: str, tiny_models: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "big.txt").write_text("word " * 20_000)
    names = {"bert": tiny_models["tiny-bert"], "llama": tiny_models["tiny-llama"]}
    done = piped("", tmp_path, environment, *[argument.format(**names) for argument in arguments])
    last = done.stderr.decode().splitlines()[-1]
    assert (done.returncode, done.stdout) == (1, b"")
    assert last.startswith("llamacppshim: ") and line in last and b"Traceback" not in done.stderr


def test_a_profile_beside_the_model_is_used(
    tiny_models: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(tiny_models["tiny-llama"])
    profile = {"profile_id": "mine", "model": "model.gguf", "runtime": {"n_ctx": 1024}, "sampling": {"max_tokens": 3}}
    (tmp_path / "llamacppshim.json").write_text(json.dumps(profile))
    done = piped("One?\n", tmp_path, environment, "--model", model)
    assert done.returncode == 0 and b"context 1,024 tokens" in done.stderr
    assert b"cut after 3 tokens" in done.stderr


# Real models.


def test_a_real_model_comes_back_warm(smollm2: Path, environment: dict[str, str], repo: Path, tmp_path: Path) -> None:
    arguments = ["--model", smollm2, "--repo", repo, "--max-tokens", "8"]
    counts = []
    for question in ("What is alpha_3?", "And beta_4?"):
        done = piped(f"{question}\n", tmp_path, environment, *arguments)
        assert done.returncode == 0 and done.stdout.strip()
        counts += [(number(one), number(other)) for one, other in LINE.findall(done.stderr)]
    (cold, first), (warm, rest) = counts[0], counts[2]
    assert cold == 0 and warm > first and rest < 16


def test_a_windowed_base_model_goes_on_with_text(gemma3: Path, environment: dict[str, str], tmp_path: Path) -> None:
    lines = "The capital of France is\n/branch\nAnd of Italy\n/back\nIt lies on\n"
    done = piped(lines, tmp_path, environment, "--model", gemma3, "--max-tokens", "8", "--ctx", "1024")
    assert done.returncode == 0 and b"it goes on from the text as it stands" in done.stderr
    assert len(done.stdout.decode().splitlines()) >= 3
    assert all(number(n_read) < 16 for _, n_read in LINE.findall(done.stderr))


# What cannot be kept.


def small_disk(folder: Path, n_bytes: int) -> bool:
    """Mounts one there; False where this machine does not let us."""
    return (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", folder], check=False).returncode == 0
    )


def test_a_full_disk_keeps_the_text_and_says_what_it_lost(
    tiny_llama: Path, environment: dict[str, str], repo: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    if not small_disk(cache, 200 << 10):
        pytest.skip("this user may mount nothing")
    try:
        arguments = ["--model", tiny_llama, "--repo", repo, "--max-tokens", "3"]
        small = {**environment, "LLAMACPPSHIM_CACHE": str(cache)}
        done = piped("hi\n/save\n", tmp_path, small, *arguments)
        assert b"what was read could not be kept" in done.stderr and b"could not be saved" not in done.stderr
        assert b"saved: " in done.stderr and len(list((cache / "chats").glob("*.json"))) == 1
        again = piped("ho\n", tmp_path, small, *arguments)
        assert b"1 question so far" in again.stderr
        with open(cache / "fill", "wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        done = piped("hi\n/save\n", tmp_path, small, *arguments, "--new")
        assert b"could not be saved" in done.stderr and b"\nsaved: " not in done.stderr and done.returncode == 1
    finally:
        subprocess.run(["umount", cache], check=True)


def test_without_a_place_for_it_a_chat_is_not_kept(
    tiny_llama: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    nowhere = {**environment, "LLAMACPPSHIM_CACHE": str(tmp_path / "file")}
    done = piped("hi\n", tmp_path, nowhere, "--model", tiny_llama, "--max-tokens", "3")
    assert done.stderr.count(b"this conversation cannot be kept: ") == 1
    assert done.stdout.strip() and b"Traceback" not in done.stderr
    assert b"could not be saved" not in done.stderr and done.returncode == 0  # it is told once


def test_a_state_is_used_where_its_store_cannot_be_written(
    tiny_llama: Path, environment: dict[str, str], repo: Path, tmp_path: Path
) -> None:
    arguments = ["--model", tiny_llama, "--repo", repo, "--max-tokens", "3"]
    done = piped("One?\n", tmp_path, environment, *arguments)
    n_held = sum(map(number, LINE.findall(done.stderr)[-1]))
    states = tmp_path / "cache" / "chats" / "states"
    (states / ".lock").unlink()
    (states / ".lock").mkdir()  # as if it were read-only, for root too
    done = piped("", tmp_path, environment, *arguments)
    assert b"this conversation cannot be kept: " in done.stderr
    reused, n_read = map(number, LINE.findall(done.stderr)[0])
    assert reused >= n_held and n_read < 16
    (state,) = states.glob("*.lcs")
    state.write_bytes(state.read_bytes()[:-1])
    done = piped("", tmp_path, environment, *arguments)
    assert b"what was read then is not used: it is damaged" in done.stderr
    state.unlink()
    done = piped("", tmp_path, environment, *arguments)
    assert b"what was read then is not used: it is not there any more" in done.stderr


def test_a_file_that_was_left_out_is_taken_up_where_there_is_room(
    tiny_llama: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small.txt").write_text("small\n")
    for n_words, fits in ((1000, True), (3000, False)):
        (folder / "large.txt").write_text("word " * n_words)
        arguments = ["--model", tiny_llama, "--repo", folder, "--max-tokens", "3", "--ctx", "1280", "--new"]
        done = piped("/edit large.txt\nx\n", tmp_path, environment, *arguments)
        assert b"left out, for want of room: large.txt" in done.stderr
        assert (b"tokens of it go with the next question" in done.stderr) == fits
        assert (b"tokens are wanted, the context has" in done.stderr) != fits
        read = [number(n_read) for _, n_read in LINE.findall(done.stderr)]
        assert (read[-1] > 900) == fits
