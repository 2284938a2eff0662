"""Owns a conversation: what was said in each of its branches, what of it a session holds, and how a changed folder is
told with the least reading.

Branches are sessions of one pool of cells, so that a branch shares what it came from. Where all sequences are taken,
the branch that was left longest ago is parked in the runtime's store, and taken up when it is returned to. So is the
one that a branch comes from, where the runtime has a single sequence.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from llamacppshim import workspace
from llamacppshim.answer import Chunk
from llamacppshim.assemble import TokenCounter
from llamacppshim.chat import Reply
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import (
    ContextOverflowError,
    InvalidArgumentError,
    LlamaCppShimError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMismatchError,
    TemplateError,
)
from llamacppshim.formats import written
from llamacppshim.history import FORMAT, VERSION, BranchRecord, Message, Record, load_state, require_name
from llamacppshim.ledger import Tokens
from llamacppshim.report import PrefixStatus
from llamacppshim.reuse import common_prefix
from llamacppshim.runtime import Runtime
from llamacppshim.sequence import Progress
from llamacppshim.session import Session
from llamacppshim.snapshot import Snapshot
from llamacppshim.workspace import Files, Update

Read = TypeVar("Read")

FIRST = "1"
#: Of the context: what files may fill at most, and, unless told otherwise, one answer.
FILES_SHARE = 0.75
ANSWER_SHARE = 0.125
#: Where no profile says how: the likeliest tokens alone would have small models say one sentence for ever. What is
#: penalised are repetitions within an answer, so files may be quoted.
SAMPLING = DecodeConfig(temperature=0.7, min_p=0.05, dry_multiplier=0.8, dry_allowed_length=4)
#: Reading so many tokens before the first question changes what a start next time costs.
WORTH_KEEPING_TOKENS = 64


class Branch:
    """One line of the conversation. ``pending``: what has changed in the folder since the last question."""

    def __init__(
        self, name: str, parent: str | None, messages: Sequence[Message] = (), pending: Sequence[Update] = ()
    ) -> None:
        self.name = name
        self.parent = parent
        self.messages = list(messages)
        self.pending = list(pending)
        self.session: Session | None = None

    def known(self, files: Files) -> Files:
        """The folder as the model knows it at the end of this branch, where it began with these files."""
        found: dict[str, str | None] = dict(files)
        for message in self.messages:
            found |= {one.name: one.content for one in message.updates}
        found |= {one.name: one.content for one in self.pending}
        return {name: content for name, content in found.items() if content is not None}


class Turn:
    """A question, and its answer while it is generated. Times are seconds since the question."""

    def __init__(self, question: Message, reply: Reply, began: float, *, thinks: bool) -> None:
        self.question = question
        self.reply = reply
        self.first_s = self.last_s = time.perf_counter() - began
        self._began = began
        self._thinks = thinks
        self._said = {"reasoning": 0, "content": 0}  # characters of each

    def texts(self) -> Iterator[tuple[str, bool]]:
        """The answer as it comes, each piece with whether it is a thought."""
        for chunk in self.reply:
            self._measure(chunk)
            if self._thinks:
                yield from self._news()
            else:
                yield chunk.text, False

    def _measure(self, chunk: Chunk) -> None:
        self.last_s = time.perf_counter() - self._began
        if len(self.reply.tokens) == len(chunk.tokens):
            self.first_s = self.last_s

    def _news(self) -> Iterator[tuple[str, bool]]:
        with contextlib.suppress(TemplateError):  # an answer without the template's form: all but its end was shown
            message = self.reply.message
            for kind in ("reasoning", "content"):
                text, n_said = getattr(message, kind), self._said[kind]
                self._said[kind] = max(n_said, len(text))
                if text[n_said:]:
                    yield text[n_said:], kind == "reasoning"

    @property
    def answer(self) -> Message:
        """So far."""
        if self._thinks:
            with contextlib.suppress(TemplateError):
                message = self.reply.message
                if message.reasoning:
                    return Message("assistant", message.content, message.reasoning)
        return Message("assistant", self.reply.text, tokens=tuple(self.reply.tokens))

    @property
    def tokens_per_s(self) -> float:
        """After the first token; 0 where there was no second."""
        n, seconds = len(self.reply.tokens) - 1, self.last_s - self.first_s
        return n / seconds if n > 0 and seconds > 0 else 0.0


class Refreshed(NamedTuple):
    """What a look at the folder came to: the files that had changed; and either how many tokens go with the next
    question, or, where the files are told anew from the beginning, how many are kept and have to be read."""

    names: list[str]
    n_update: int
    n_kept: int
    n_read: int
    in_place: bool


class Conversation:
    """On one runtime, whose sequences it uses as it needs them.

    Parameters
    ----------
    folder
        Its path, where the conversation is over one; `begin` or `resume` says what the model knows of it.
    max_tokens
        Of one answer. None: as the profile says, else an eighth of the context.
    temperature
        None: as the profile says, else that of `SAMPLING`.
    """

    def __init__(
        self, runtime: Runtime, folder: str | None, *, max_tokens: int | None = None, temperature: float | None = None
    ) -> None:
        self.runtime = runtime
        self.folder = folder
        self.changed = False  # since it was begun, resumed or saved
        self.files: Files = {}
        self.left_out: list[str] = []
        self.branches = {FIRST: Branch(FIRST, None)}  # the one that was left longest ago first
        self.current = self.branches[FIRST]
        has_template = runtime.profile is not None or runtime.model.chat_template is not None
        self.format = runtime.prompt_format if has_template else "raw"
        config = SAMPLING if runtime.profile is None else runtime.profile.decode_config()
        if max_tokens is None:
            max_tokens = config.max_tokens
        self.max_tokens = int(runtime.n_ctx_seq * ANSWER_SHARE) if max_tokens is None else max_tokens
        temperature = config.temperature if temperature is None else temperature
        self._config = msgspec.structs.replace(config, max_tokens=self.max_tokens, temperature=temperature)
        self._thinks = self.format == "model" and runtime.chatter.template.supports_thinking
        self._takes_system = self._find_out()
        n_newline = len(runtime.tokenizer.plain(b"\n", False))
        self.count = TokenCounter(lambda text: len(runtime.tokenizer.plain(b"\n" + text.encode(), False)) - n_newline)

    def begin(self, found: Files) -> None:
        """Afresh, over these files of the folder: as many as fit.

        Raises InvalidArgumentError where not even one does.
        """
        budget = int(self.runtime.n_ctx_seq * FILES_SHARE) - self.count(workspace.INSTRUCTION)
        self.files, self.left_out = workspace.chosen(found, budget, self.count)

    def close(self) -> None:
        """Its sessions. Safe to repeat."""
        for branch in self.branches.values():
            if branch.session is not None:
                branch.session.close()

    # Asking.

    def ask(self, text: str, *, progress: Progress | None = None) -> Turn:
        """Reads what is new, and begins the answer; `conclude` makes it part of the conversation.

        Raises
        ------
        ContextOverflowError  it does not fit, although nothing else is held; nothing has changed
        and whatever `Session.chat` raises
        """
        began = time.perf_counter()
        branch = self.current
        question = Message("user", self._spaced(text), updates=tuple(branch.pending))
        session = self._session(branch)
        messages = self._messages([*branch.messages, question])
        values: dict[str, Any] = {"prompt_format": self.format, "config": self._config, "progress": progress}
        try:
            reply = self._with_room(lambda: session.chat(messages, **values))
        except ContextOverflowError:
            raise
        except BaseException:
            self.changed = True  # what was read until then is worth keeping
            raise
        self.changed = self.changed or reply.status.prefilled_tokens >= WORTH_KEEPING_TOKENS
        if reply.status.available_tokens < self.max_tokens:
            self._park_others()
        return Turn(question, reply, began, thinks=self._thinks)

    def conclude(self, turn: Turn) -> bool:
        """The question and its answer, as far as that came, are said. False where nothing was answered: then the
        question is not part of the conversation, and what was read stays."""
        answer = turn.answer
        if not answer.content:
            return False
        assert self.current.session is not None
        self.current.session.remember_reply(turn.reply.text, turn.reply.tokens, turn.reply.begin)
        self.current.messages += [turn.question, answer]
        self.current.pending = []
        self.changed = True
        return True

    def read_ahead(self, *, progress: Progress | None = None) -> PrefixStatus | None:
        """Reads what stands before the next question, whatever that is; None where there is nothing."""
        if not self.files and not self.current.messages:
            return None
        session, tokens = self._session(self.current), self._before_next()
        try:
            status = self._with_room(lambda: session.ensure_prefix(tokens, progress=progress))
        except ContextOverflowError:
            raise  # nothing was read
        except BaseException:
            self.changed = True  # what was read until then is worth keeping
            raise
        self.changed = self.changed or status.prefilled_tokens >= WORTH_KEEPING_TOKENS
        return status

    def _before_next(self) -> Tokens:
        """The tokens that any two questions have in common."""
        one, other = (
            self._tokens([*self.current.messages, Message("user", self._spaced(text))]) for text in ("A", "0")
        )
        return one[: common_prefix(one, other)]

    def _spaced(self, text: str) -> str:
        """Raw texts are not kept apart by a template."""
        return f"\n{text}" if self.format == "raw" and self.current.messages else text

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """As templates take them. Those that know no system message find its text before the first question."""
        told: list[dict[str, str]] = []
        for message in messages:
            told.append({"role": message.role, "content": workspace.asked(message.content, message.updates)})
            if message.reasoning:
                told[-1]["reasoning_content"] = message.reasoning
        if self.files and self._takes_system:
            return [{"role": "system", "content": workspace.told(self.files)}, *told]
        if self.files:
            told[0]["content"] = f"{workspace.told(self.files)}\n{told[0]['content']}"
        return told

    def _tokens(self, messages: Sequence[Message]) -> Tokens:
        chatter, asked = self.runtime.chatter, self._messages(messages)
        rendered = chatter.render(asked, None, {}) if self.format == "model" else None
        parts = written(self.format, asked) if rendered is None else list(rendered.parts)
        return chatter.prompt(parts, self._session(self.current).replies, rendered).tokens

    def _find_out(self) -> bool:
        """Whether the format has a place for a system message: some templates refuse one, others leave it out."""
        if self.format != "model":
            return True
        messages = [{"role": "system", "content": workspace.INSTRUCTION}, {"role": "user", "content": "A"}]
        try:
            return workspace.INSTRUCTION.strip() in self.runtime.chatter.render(messages, None, {}).text
        except TemplateError:
            return False

    # Sessions.

    def _session(self, branch: Branch) -> Session:
        """The branch's own; a new one, that knows its answers, where it has none."""
        if branch.session is None or branch.session.closed:
            self._free_a_sequence()
            branch.session = self.runtime.session()
            at = 0  # about: which of two equal answers is meant
            for message in branch.messages:
                if message.tokens:
                    branch.session.remember_reply(message.content, message.tokens, at)
                    at += len(message.tokens)
        return branch.session

    def _free_a_sequence(self) -> None:
        others = [branch for branch in self.branches.values() if branch.session and branch is not self.current]
        if others and self.runtime.n_sessions >= self.runtime.config.n_seq_max:
            self._park(others[0])

    def _with_room(self, read: Callable[[], Read]) -> Read:
        """Again without the other branches where it does not fit beside them: that is known before anything is read."""
        try:
            return read()
        except ContextOverflowError:
            if not self._park_others():
                raise
            return read()

    def _park_others(self) -> bool:
        """The cells of all other branches are free for this one. False where there were none."""
        others = [branch for branch in self.branches.values() if branch.session and branch is not self.current]
        for branch in others:
            self._park(branch)
        return bool(others)

    def _park(self, branch: Branch) -> None:
        session, branch.session = branch.session, None
        if session is not None:
            self._store(session)
            session.close()

    def _store(self, session: Session) -> None:
        with contextlib.suppress(LlamaCppShimError):  # what cannot be stored is read again
            session.park()

    # Branches.

    def branch(self, name: str | None = None) -> bool:
        """Go on in another branch, which begins as this one is; False where there is one of that name, as that one is.

        Raises InvalidArgumentError for a name that is no word.
        """
        if name is None:
            name = next(str(n) for n in range(2, len(self.branches) + 3) if str(n) not in self.branches)
        if name in self.branches:
            self._go_to(name)
            return False
        require_name(name)
        parent = self.current
        session = self._session(parent)
        child = Branch(name, parent.name, parent.messages, parent.pending)
        if self.runtime.config.n_seq_max > 1:
            self._free_a_sequence()
            (child.session,) = session.branch()
        else:
            self._store(session)
            child.session, parent.session = session, None
        self.branches[name] = child
        self._go_to(name)
        return True

    def back(self) -> bool:
        """Go on where this branch came from; False where this is the first."""
        if self.current.parent is None:
            return False
        self._go_to(self.current.parent)
        return True

    def _go_to(self, name: str) -> None:
        self.current = self.branches.pop(name)
        self.branches[name] = self.current  # used last
        self.changed = True

    # The folder.

    def refresh(self, found: Files, only: str | None = None) -> Refreshed | None:
        """Tells the model what has changed in the folder, by whichever way reads less: added to the next question,
        which leaves all that was read; or in place, which reads again what follows the first change. None where
        nothing has changed.

        Parameters
        ----------
        found
            The folder as it is.
        only
            The file to look at; all of them by default.
        """
        branch = self.current
        known = branch.known(self.files)
        names = workspace.changed(known, found, self.left_out) if only is None else [only]
        names = [name for name in names if known.get(name) != found.get(name)]
        if not names:
            return None
        session = self._session(branch)
        # A change that waits for the next question is told anew, against what was known before it.
        kept = [one for one in branch.pending if one.name not in names]
        before = Branch("", None, branch.messages, kept).known(self.files)
        updates = [workspace.update(name, before.get(name), found.get(name), self.count) for name in names]
        updates = [one for one in updates if one.content != before.get(one.name)]
        n_update = sum(self.count(one.text) for one in updates)
        tokens = self._before_next()
        n_now = session.plan(tokens).reuse_tokens

        old, saved = (self.files, self.left_out), [(one, one.messages, one.pending) for one in self.branches.values()]
        told = self._tell_anew(found if only is None else _with(known, only, found))
        if told and (only is None or only in self.files or only not in found):
            anew = self._before_next()
            n_anew = session.plan(anew).reuse_tokens
            added_fits = len(tokens) + n_update + self.max_tokens <= self.runtime.n_ctx_seq
            if not added_fits or len(anew) - n_anew <= len(tokens) - n_now + n_update:
                self.changed = True
                return Refreshed(names, 0, n_anew, len(anew) - n_anew, True)
        self.files, self.left_out = old
        for one, messages, pending in saved:
            one.messages, one.pending = messages, pending
        if only is not None and len(tokens) + n_update > self.runtime.n_ctx_seq:
            raise ContextOverflowError(
                stage="suffix",
                resident_tokens=len(tokens),
                additional_tokens=n_update,
                num_ctx=self.runtime.n_ctx_seq,
            )
        branch.pending = [*kept, *updates]
        self.changed = True
        return Refreshed(names, n_update, n_now, len(tokens) - n_now, False)

    def _tell_anew(self, found: Files) -> bool:
        """The conversation begins with the folder as it is, and no branch tells of changes; False where it cannot."""
        left_out = self.left_out
        try:
            self.begin(found)
        except InvalidArgumentError:
            return False
        self.left_out = sorted({*self.left_out, *left_out} - self.files.keys())
        for branch in self.branches.values():
            branch.messages = [_without_updates(message) for message in branch.messages]
            branch.pending = []
        return True

    # Keeping.

    def record(self, state: str = "") -> Record:
        """As a file keeps it."""
        branches = [
            BranchRecord(one.name, one.parent, tuple(one.messages), tuple(one.pending))
            for one in self.branches.values()
        ]
        return Record(
            format=FORMAT,
            version=VERSION,
            model=self.runtime.model_name,
            model_digest=self.runtime.identity().model_digest,
            folder=self.folder,
            files=self.files,
            left_out=tuple(self.left_out),
            branches=tuple(branches),
            current=self.current.name,
            state=state,
            checksum="",
        )

    def snapshot(self) -> Snapshot | None:
        """What the session holds; None where that is nothing."""
        session = self.current.session
        if session is None or session.closed or not len(session.tokens):
            return None
        if session.stage == "empty":
            session.ensure_prefix(session.tokens)  # what an interrupted prefill has left is a prompt of its own
        return session.snapshot()

    def store_state(self, *, replacing: str = "") -> str:
        """Keeps what the session holds in the runtime's store, instead of another entry; the name, empty where there is
        nothing to keep or it is too large for the store. Without a store, the other entry stays.

        Raises SnapshotError where it cannot be written.
        """
        store = self.runtime.store
        if store is None:
            return replacing
        snapshot = self.snapshot()
        if snapshot is None:
            return ""
        path = store.put(snapshot)
        name = "" if path is None else path.name
        if replacing != name:
            store.remove(replacing)
        return name

    def resume(self, record: Record, beside: Path | None = None) -> str:
        """Go on with a saved conversation, instead of this one; why its state could not be used, or "".

        Parameters
        ----------
        beside
            Where its state is: the file of a snapshot. By default, the store; or the place of the store where this
            runtime has none, since what cannot be written to may be read all the same.

        Raises
        ------
        SnapshotMismatchError  it is one of another model or another folder; nothing has changed
        SnapshotCorruptError   its tokens are not this model's; nothing has changed
        """
        own = self.record()
        for field, ours, theirs in (
            ("model", (own.model_digest, own.model), (record.model_digest, record.model)),
            ("folder", (own.folder, own.folder), (record.folder, record.folder)),
        ):
            if ours[0] != theirs[0]:
                which = f"{theirs[1] or 'none'}, not {ours[1] or 'none'}"
                if ours[1] == theirs[1]:
                    which = f"it is called {theirs[1]} too, but its digest is another"
                raise SnapshotMismatchError(
                    f"a conversation of another {field}: {which}",
                    field=field,
                    expected=ours[0],
                    actual=theirs[0],
                )
        n_vocab = self.runtime.model.n_vocab
        messages = [message for branch in record.branches for message in branch.messages]
        if any(not 0 <= token < n_vocab for message in messages for token in message.tokens):
            raise SnapshotCorruptError("its tokens are not this model's")
        self.close()
        self.files, self.left_out = dict(record.files), list(record.left_out)
        self.branches = {one.name: Branch(one.name, one.parent, one.messages, one.pending) for one in record.branches}
        self._go_to(record.current)
        self.changed = False
        return self._restore(record.state, beside)

    def _restore(self, state: str, beside: Path | None) -> str:
        store = self.runtime.store
        try:
            if beside is not None:
                snapshot = Snapshot.load(beside)
            elif not state:
                return ""
            else:
                snapshot = load_state(state) if store is None else store.load(state)
            self._session(self.current).restore(snapshot)
        except SnapshotMismatchError as error:
            return f"its {error.field} is another"
        except SnapshotCorruptError:
            return "it is damaged"
        except ContextOverflowError:
            return "it does not fit this context"
        except SnapshotError as error:
            return "it is not there any more" if isinstance(error.__cause__, FileNotFoundError) else str(error)
        return ""


def _with(files: Files, name: str, found: Files) -> Files:
    """The files, with one of them as it was found."""
    changed = {other: content for other, content in files.items() if other != name}
    return changed | {name: found[name]} if name in found else changed


def _without_updates(message: Message) -> Message:
    return Message(message.role, message.content, message.reasoning, message.tokens)
