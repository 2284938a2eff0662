"""Owns `llamacppshim chat`: lines in, answers out, what the commands and Ctrl-C do, and what the screen says of it all.

Answers go to standard output, everything else to standard error, so that both can be redirected. What a model or a file
name says is text: nothing of it reaches the terminal raw.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console

from llamacppshim import history, workspace
from llamacppshim.conversation import WORTH_KEEPING_TOKENS, Conversation, Refreshed, Turn
from llamacppshim.demo import model_file
from llamacppshim.errors import ContextOverflowError, InvalidArgumentError, LlamaCppShimError, SnapshotError
from llamacppshim.fit_cli import show
from llamacppshim.header import GgufHeader, read_gguf_header
from llamacppshim.machine import machine_budget
from llamacppshim.profile import PROFILE_NAME, Profile
from llamacppshim.runtime import Runtime
from llamacppshim.store import SnapshotStore
from llamacppshim.terminal import Bar, Lines, say, seconds, spinner, stream

#: A conversation and three branches can be warm at once. They share the cells, so more of them cost next to nothing.
N_SESSIONS = 4
#: Reading so many tokens of a question again would take so long that what is held is kept at once after its answer.
KEPT_AT_ONCE_TOKENS = 512
#: Of a prefill's pieces: as fast as larger ones on a CPU, and a bar that moves.
N_UBATCH = 256
MAX_NAMES = 6
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")
UNSAVED = "the conversation could not be saved"
UNKEPT = "what was read could not be kept, and is read again the next time"
FULL = "the context is full: /back to before a branch, or start again with a larger --ctx or with --new"


class Options(NamedTuple):
    """What the command line says."""

    model: str = "default"
    repo: Path | None = None
    n_ctx: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    new: bool = False


def run(options: Options) -> int:
    """The whole chat; its exit code, 1 where something that was piped in failed.

    Raises what opening the model and reading the folder raise.
    """
    for name, what in (("stdin", "input"), ("stdout", "output")):
        if getattr(sys, name) is None:
            raise InvalidArgumentError(f"there is no standard {what}")
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    folder = None if options.repo is None else os.fspath(options.repo.resolve())
    path = model_file(err, options.model)
    with spinner(err, f"looking through {options.repo}"):
        found = {} if options.repo is None else workspace.read(options.repo)
    header, budget_bytes = read_gguf_header(path), machine_budget()
    store = _open_store(err)
    with _ended_by_signals(), contextlib.ExitStack() as stack:
        with spinner(err, f"opening {path.name}"):
            values = {} if options.n_ctx is None else {"n_ctx": options.n_ctx}
            runtime = stack.enter_context(open_runtime(header, store, **values))
        conversation = Conversation(runtime, folder, max_tokens=options.max_tokens, temperature=options.temperature)
        stack.callback(conversation.close)
        place = history.place(runtime.identity().model_digest, folder)
        chat = Chat(conversation, out, err, place, lambda: show(err, header, budget_bytes, runtime.config))
        try:
            chat.greet()
            chat.begin(found, new=options.new)
            chat.talk()
        finally:
            chat.settle()
            chat.keep()
        return 1 if chat.n_failed and not chat.interactive else 0


def _open_store(err: Console) -> SnapshotStore | None:
    """Where states are kept; None where nothing can be written, which is no reason not to talk."""
    try:
        history.make_home()
        return SnapshotStore(history.states(), max_bytes=history.STATE_BYTES, ttl_s=history.STATE_TTL_S)
    except (LlamaCppShimError, OSError) as error:
        say(err, f"this conversation cannot be kept: {error}", style="yellow")
        return None


def open_runtime(header: GgufHeader, store: SnapshotStore | None, **overrides: Any) -> Runtime:
    """By the profile beside the model, if that is for it. Raises as `Runtime.open` and `Runtime.from_profile`."""
    # Each sequence takes cells for a window of its own, which is much for a model of windows: its branches are parked.
    n_seq_max = 1 if header.n_swa else N_SESSIONS
    # A session that has lost its middle could not be kept.
    values = {"n_seq_max": n_seq_max, "kv_unified": True, "on_overflow": "error", **overrides}
    path = Path(header.path)
    profile = path.parent / PROFILE_NAME
    if profile.is_file() and os.path.samefile(Profile.load(profile).model_path(path.parent), path):
        return Runtime.from_profile(profile, store=store, **values)
    return Runtime.open(path, store=store, **{"n_ubatch": N_UBATCH, **values})


class Chat:
    """A conversation at a terminal, or through pipes.

    Parameters
    ----------
    place
        The file that keeps the conversation until the next chat.
    show_fit
        Prints what the model needs.
    """

    def __init__(
        self, conversation: Conversation, out: Console, err: Console, place: Path, show_fit: Callable[[], None]
    ) -> None:
        self.conversation = conversation
        self.show_fit = show_fit
        self.interactive = sys.stdin.isatty()
        self.n_failed = 0
        self._out = out
        self._err = err
        self._place = place
        self._seen: str | None = None  # the file at that place, where the conversation goes on from it
        self._state = ""  # the store's entry that it names
        self._own = history.beside(place)  # where it is kept while that place is another chat's
        self._is_beside = False
        # Why nothing is kept, of what was told already. Without a store, the first line says it.
        self._told = {UNSAVED} if conversation.runtime.store is None else set()
        self._leaving = False  # an interrupt at an empty prompt was the last thing that happened
        self._lines = Lines(err)
        self._bar = Bar(err)

    # The beginning and the end.

    def greet(self) -> None:
        runtime = self.conversation.runtime
        model = runtime.model
        self.note(
            f"{model.name} ({model.architecture}, {model.n_bytes / 1e6:,.0f} MB), context {runtime.n_ctx_seq:,} tokens"
            + ("; /help lists the commands" if self.interactive else "")
        )
        if self.conversation.format == "raw":
            self.note("no chat template, probably a base model: it goes on from the text as it stands")

    def begin(self, found: workspace.Files, *, new: bool) -> None:
        """Goes on with the last conversation, or a new one; and reads what stands before the first question."""
        if not new and self._resume_last():
            self._take_up(found)
        else:
            if self.conversation.folder is not None:
                self.conversation.begin(found)
                self._tell_folder()
            self._read_ahead()

    def _take_up(self, found: workspace.Files) -> None:
        """A conversation of before goes on, over the folder as it is now."""
        messages = self.conversation.current.messages
        self._lines.remember(message.content for message in messages if message.role == "user")
        if self.conversation.folder is not None:
            refreshed = self.conversation.refresh(found)
            self._tell_folder()
            if refreshed is not None:
                self._tell(refreshed)
        self._read_ahead()

    def _resume_last(self) -> bool:
        if not self._place.exists():
            return False
        try:
            record = history.load(self._place)
            why = self.conversation.resume(record)
        except SnapshotError as error:
            self.note(f"the last conversation cannot be used: {error}")
            return False
        self._seen, self._state = history.digest(self._place), record.state
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self._place.stat().st_mtime))
        n = len(self.conversation.current.messages) // 2
        self.note(f"going on from {when}, {_plural(n, 'question')} so far; --new starts afresh")
        if why:
            self.note(f"what was read then is not used: {why}")
        return True

    def _tell_folder(self) -> None:
        conversation = self.conversation
        n_tokens = conversation.count(workspace.told(conversation.files))
        line = f"{conversation.folder}: {_plural(len(conversation.files), 'file')}, {n_tokens:,} tokens"
        if conversation.left_out:
            line += "; left out, for want of room: " + _some(conversation.left_out)
        self.note(line)

    def keep(self) -> bool:
        """Saves the conversation at its default place, where it has changed or is not there; the text at least, if
        there is no room for its state. Whether it is saved."""
        if not self.conversation.changed and not self._is_beside:
            return True
        state = self._keep_state() if self.conversation.changed else self._state
        if not self._save(state, own=None):
            return False
        self.conversation.changed = False
        return True

    def _keep_now(self, *, with_state: bool) -> None:
        """While it goes on, so that a killed process loses nothing that was said or took long to read.

        Another chat that has come to the same place meanwhile stays there until one of the two leaves.
        """
        try:
            if self._save(self._state, own=self._own) and with_state:
                with spinner(self._err, "keeping what was read"):
                    state = self._keep_state()
                    if self._save(state, own=self._own) and state:
                        self.conversation.changed = False
        except KeyboardInterrupt:  # then it waits until one leaves
            if not self.interactive:
                raise

    def _keep_state(self) -> str:
        """The name of what is kept now of what was read; empty where that is nothing."""
        try:
            return self.conversation.store_state(replacing=self._state)
        except (LlamaCppShimError, OSError) as error:
            self._warn_once(UNKEPT, error)
            return ""

    def _save(self, state: str, own: Path | None) -> bool:
        try:
            kept = history.keep(self._place, self.conversation.record(state), self._seen, own)
        except (LlamaCppShimError, OSError) as error:
            self._warn_once(UNSAVED, error)
            return False
        self._state = state
        if kept.path != self._place:
            if not self._is_beside:
                self.note(f"another chat has saved at the same place; until one of the two leaves, this one is {own}")
            self._is_beside = True
            return True
        self._seen = kept.digest
        if self._is_beside:
            self._is_beside = False
            with contextlib.suppress(OSError):
                self._own.unlink()
        if kept.aside is not None:
            self.note(f"what was saved there before is now {kept.aside}: /load takes it")
        return True

    def _warn_once(self, what: str, error: Exception) -> None:
        """Not after every answer: what hindered one hinders the next."""
        if what not in self._told:
            self._told.add(what)
            self.warn(f"{what}: {error}")

    # The loop.

    def talk(self) -> None:
        """Until the input ends."""
        while True:
            try:
                if not self._go_on():
                    return
            except KeyboardInterrupt:  # between two lines of ours; what it has left, the next prompt settles
                if not self.interactive:
                    raise

    def _go_on(self) -> bool:
        """One line, and what it asks for; False where it was the last."""
        self.settle()
        try:
            line = self._lines.read(self._prompt(), interactive=self.interactive)
        except EOFError:
            if self.interactive:
                self.note("")
            return False
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            if self._leaving and self._lines.was_empty():
                self.note("")
                return False
            self._leaving = True
            self.note("\n(Ctrl-C again, Ctrl-D or /quit leaves)")
            return True
        self._leaving = False
        try:
            return not line.strip() or self._obey(line)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self.note("interrupted")
        except ContextOverflowError as error:
            self._tell_overflow(error)
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except (LlamaCppShimError, OSError) as error:
            self.warn(str(error))
        return True

    def settle(self) -> None:
        """The screen and the keys as they were, whatever an interrupt has left."""
        self._bar.stop()
        self._lines.echo(True)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Keys are not shown, and a bar is, once it takes long."""
        try:
            self._lines.echo(False)
            self._bar.start()
            yield
        finally:
            self.settle()

    def _prompt(self) -> str:
        return "> " if len(self.conversation.branches) == 1 else f"{self.conversation.current.name}> "

    def _obey(self, line: str) -> bool:
        """A command, or a question; False where it is the last."""
        if not line.startswith("/"):
            self._ask(line)
            return True
        name, _, argument = line.strip().partition(" ")
        if name == "/quit":
            return False
        command = COMMANDS.get(name)
        if command is None:
            self.warn(f"there is no {name}; /help lists the commands")
            return True
        command.do(self, argument.strip())
        return True

    def _ask(self, question: str) -> None:
        interrupted = False
        failed: LlamaCppShimError | None = None
        with self._busy():
            try:
                turn = self.conversation.ask(question, progress=self._bar.update)
                self._bar.stop()
            except KeyboardInterrupt:
                self.note("interrupted; the question is dropped, what was read of it stays")
                if not self.interactive:
                    raise
                return
            try:
                for text, is_thought in turn.texts():
                    stream(self._out, text, dim=is_thought)
            except KeyboardInterrupt:
                interrupted = True
            except LlamaCppShimError as error:
                failed = error
            except BaseException:
                self.conversation.conclude(turn)  # who leaves now is to find what was said
                raise
        stream(self._out, "\n")
        is_said = self.conversation.conclude(turn)
        self._tell_turn(turn, interrupted=interrupted, is_said=is_said)
        if is_said:
            self._keep_now(with_state=turn.reply.status.prefilled_tokens >= KEPT_AT_ONCE_TOKENS)
        if failed is not None:
            raise failed
        if interrupted and not self.interactive:
            raise KeyboardInterrupt

    def _tell_turn(self, turn: Turn, *, interrupted: bool, is_said: bool) -> None:
        reply, status = turn.reply, turn.reply.status
        line = f"reused {status.reused_tokens:,} tokens, read {status.prefilled_tokens:,}"
        if reply.tokens:
            line += f"; first token after {seconds(turn.first_s * 1e3)}"
        if turn.tokens_per_s:
            line += f", then {turn.tokens_per_s:.1f} tokens/s"
        if not is_said:
            line += "; no answer, so the question is dropped"
        elif interrupted or reply.finish_reason == "cancelled":
            line += "; interrupted, the answer so far is kept"
        elif reply.finish_reason == "length":
            line += f"; cut after {len(reply.tokens):,} tokens (--max-tokens)"
        self.note(line)
        if reply.finish_reason == "context_full":
            self.warn(FULL)

    def _tell_overflow(self, error: ContextOverflowError) -> None:
        n = error.resident_tokens + error.additional_tokens
        self.warn(f"{n:,} tokens are wanted, the context has {error.num_ctx:,}; {FULL}")

    def _read_ahead(self) -> None:
        """With a bar where it takes long; what it read is told, and kept where that is much. Ctrl-C leaves the rest for
        the next question."""
        began = time.perf_counter()
        try:
            with self._busy():
                status = self.conversation.read_ahead(progress=self._bar.update)
        except KeyboardInterrupt:
            self.note("interrupted; the rest is read with the next question")
            self._keep_now(with_state=True)
        except ContextOverflowError as error:
            self._tell_overflow(error)
        else:
            if status is not None:
                took = seconds((time.perf_counter() - began) * 1e3)
                self.note(f"reused {status.reused_tokens:,} tokens, read {status.prefilled_tokens:,} in {took}")
                if status.prefilled_tokens >= WORTH_KEEPING_TOKENS:
                    self._keep_now(with_state=True)

    # Commands.

    def help(self, argument: str) -> None:
        del argument
        width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            self.tell(f"{f'{name} {command.takes}':<{width}}  {command.help}")
        self.tell(f"{'/quit':<{width}}  leave; the conversation is kept (Ctrl-D does the same)")
        self.tell("Ctrl-C ends an answer, and keeps what there is of it. A line that ends with \\ goes on.")

    def explain(self, argument: str) -> None:
        del argument
        session = self.conversation.current.session
        if session is None:
            self.tell("nothing is read yet")
        else:
            self.tell(str(session.explain()))
        for branch in sorted(self.conversation.branches.values(), key=lambda one: one.name):
            where = f" of {branch.parent}" if branch.parent else ""
            here = ", here" if branch is self.conversation.current else ""
            self.tell(f"branch     {branch.name}{where}: {_plural(len(branch.messages) // 2, 'question')}{here}")

    def fit(self, argument: str) -> None:
        del argument
        self.show_fit()

    def branch(self, argument: str) -> None:
        is_new = self.conversation.branch(argument or None)
        current = self.conversation.current
        if is_new:
            self.note(f"branch {current.name} of {current.parent}; /back returns there")
        else:
            self._arrive()

    def back(self, argument: str) -> None:
        del argument
        if self.conversation.back():
            self._arrive()
        else:
            self.warn("this is the first branch")

    def _arrive(self) -> None:
        current = self.conversation.current
        self.note(f"branch {current.name}, {_plural(len(current.messages) // 2, 'question')} so far")
        self._read_ahead()

    def save(self, argument: str) -> None:
        if not argument:
            self.conversation.changed = True
            self._told.clear()
            if self.keep():
                self.note(f"saved: {self._place}")
            return
        path = _path(argument)
        history.save(path, self.conversation.record(), self.conversation.snapshot())
        self.note(f"saved: {path}")

    def load(self, argument: str) -> None:
        conversation = self.conversation
        path = _path(argument) if argument else self._place
        record = history.load(path)
        found = {} if conversation.folder is None else workspace.read(Path(conversation.folder))
        beside = history.state_beside(path)
        was_said = any(branch.messages for branch in conversation.branches.values())
        try:
            why = conversation.resume(record, beside if beside.exists() else None)
        except SnapshotError as error:
            self.warn(f"{path}: {error}")
            return
        conversation.changed = True
        if was_said:  # that stays where it is: what is saved from here on takes no file of it
            self._seen, self._state = None, ""
            self._own, self._is_beside = history.beside(self._place), False
        if path == self._place:
            self._seen, self._state = history.digest(path), record.state
        self.note(f"{path}: {_plural(len(conversation.current.messages) // 2, 'question')} so far")
        if why:
            self.note(f"what was read for it is not used: {why}")
        self._take_up(found)

    def edit(self, argument: str) -> None:
        conversation = self.conversation
        if conversation.folder is None:
            self.warn("there is no folder: start with --repo DIR")
            return
        folder = Path(conversation.folder)
        skipped: dict[str, str] = {}
        found = workspace.read(folder, skipped.__setitem__)
        name = _name_within(folder, argument) if argument else None
        if name is not None:
            known = conversation.current.known(conversation.files)
            if found.get(name) == known.get(name) and self.interactive and self._edited(folder / name):
                found = workspace.read(folder, skipped.__setitem__)
            if name not in found and name not in known:
                self.warn(f"{name}: {skipped.get(name, 'not in the folder')}")
                return
        refreshed = conversation.refresh(found, name)
        if refreshed is None:
            self.note(f"{name or 'the folder'} is as it was read")
            return
        self._tell(refreshed)
        if refreshed.in_place:
            self._read_ahead()

    def _edited(self, path: Path) -> bool:
        """Lets the user's editor, if one is named, edit a file; whether it did.

        Raises InvalidArgumentError where what names it is no command line, OSError where it cannot be started.
        """
        editor = _editor()
        if not editor or not path.is_file():
            return False
        before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the editor's
        try:
            done = subprocess.run([*editor, os.fspath(path)], check=False)
        finally:
            signal.signal(signal.SIGINT, before)
        if done.returncode != 0:
            self.warn(f"{shlex.join(editor)} ended with {done.returncode}")
        return True

    def _tell(self, refreshed: Refreshed) -> None:
        names = f"changed: {_some(refreshed.names)}"
        if refreshed.in_place:
            # How much is read again the next line says, which knows what the store has of it.
            self.note(f"{names}; told in place, and what follows is read again")
        else:
            self.note(
                f"{names}; {refreshed.n_update:,} tokens of it go with the next question, "
                f"all {refreshed.n_kept:,} that were read stay"
            )

    # The screen.

    def note(self, text: str) -> None:
        """Quietly. A terminal that is gone keeps nothing from being saved."""
        with contextlib.suppress(OSError):
            say(self._err, text, style="dim")

    def tell(self, text: str) -> None:
        """What was asked for."""
        with contextlib.suppress(OSError):
            say(self._err, text)

    def warn(self, text: str) -> None:
        """That something was asked for and did not happen."""
        self.n_failed += 1
        with contextlib.suppress(OSError):
            say(self._err, text, style="yellow")


class Command(NamedTuple):
    do: Callable[[Chat, str], None]
    takes: str
    help: str


COMMANDS = {
    "/explain": Command(Chat.explain, "", "what is held, what was reused, and why not more"),
    "/fit": Command(Chat.fit, "", "what the model needs, and which contexts this machine had room for"),
    "/branch": Command(Chat.branch, "[NAME]", "go on in a new branch, or in that one; nothing is read for it"),
    "/back": Command(Chat.back, "", "go on where this branch came from"),
    "/edit": Command(Chat.edit, "[FILE]", "take up a file that has changed, or edit it now; only the change is read"),
    "/save": Command(Chat.save, "[FILE]", "save the conversation; it is saved on leaving anyway"),
    "/load": Command(Chat.load, "[FILE]", "go on with a saved conversation"),
    "/help": Command(Chat.help, "", "this list"),
}


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A terminal that closes, or a polite kill, ends the chat as its user would: what was said is kept."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ENDING_SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _editor() -> list[str]:
    """The command line of the user's editor; nothing where none is named."""
    for name in ("VISUAL", "EDITOR"):
        value = os.environ.get(name, "").strip()
        if value:
            try:
                return shlex.split(value)
            except ValueError as error:
                raise InvalidArgumentError(f"${name} is no command line: {error}: {value}") from error
    return []


def _path(argument: str) -> Path:
    """As a user names one. Raises InvalidArgumentError for the home of a user that is unknown."""
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidArgumentError(f"{argument}: {error}") from error


def _name_within(folder: Path, argument: str) -> str:
    """A file's name as the folder has it: relative to it, or to where the chat was started."""
    path = _path(argument)
    candidate = path if path.is_absolute() else folder / path
    if not candidate.exists() and path.exists():
        candidate = path.absolute()
    with contextlib.suppress(ValueError):
        return Path(os.path.normpath(candidate)).relative_to(folder).as_posix()
    return argument


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _some(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")
