"""Owns the terminal: keys into lines, text out that cannot steer it, and what shows that something takes long."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import rich.progress
import rich.style
from rich.console import Console

if sys.platform != "win32":
    import termios

#: A prefill that is over sooner shows no bar.
BAR_AFTER_S = 1.0
DIM = rich.style.Style(dim=True)

Update = Callable[[int, int], None]


def printable(text: str) -> str:
    """Whatever could steer a terminal is a replacement character."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text)


def say(console: Console, text: str, *, style: str | None = None, end: str = "\n") -> None:
    """Text as it is, but for what could steer the terminal."""
    console.print(printable(text), style=style, end=end, markup=False, emoji=False, highlight=False, soft_wrap=True)


def seconds(ms: float) -> str:
    """As a person reads it."""
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms / 1e3:.2f} s"


@contextlib.contextmanager
def bar(console: Console, label: str, count: rich.progress.ProgressColumn) -> Iterator[Update]:
    """A progress bar from the first update on, gone when the work is done. Nothing where no terminal is."""
    columns = rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(), count
    progress = rich.progress.Progress(*columns, console=console, transient=True)
    task: rich.progress.TaskID | None = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            progress.start()
            task = progress.add_task(label, total=total)
        progress.update(task, completed=done)

    try:
        yield update if console.is_terminal else lambda done, total: None
    finally:
        if task is not None:
            progress.stop()


class Lines:
    """Lines of standard input: edited with readline at a terminal, as they come from elsewhere."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._readline: Any = None
        self._settings: list[Any] | None = None  # of the terminal, as it was found
        self._n_entered = 0  # lines that readline had taken when the last one was asked for
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if sys.platform != "win32" and sys.stdin.isatty():
            self._settings = termios.tcgetattr(sys.stdin)
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline

                self._readline = readline
                if "libedit" not in (readline.__doc__ or ""):
                    readline.parse_and_bind("set enable-bracketed-paste on")  # so a paste of many lines is one

    def remember(self, lines: Iterable[str]) -> None:
        """Earlier ones come with the arrow keys."""
        if self._readline is not None:
            for line in lines:
                self._readline.add_history(line)

    def read(self, prompt: str, *, interactive: bool) -> str:
        """Raises EOFError at the end of the input, KeyboardInterrupt for Ctrl-C."""
        line = self._one(prompt, interactive)
        while interactive and line.endswith("\\"):
            line = line[:-1] + "\n" + self._one("... ", interactive)
        return line

    def _one(self, prompt: str, interactive: bool) -> str:
        if self._readline is not None:
            self._n_entered = self._readline.get_current_history_length()
            return input(prompt)
        if interactive:
            stream(self._err, prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def echo(self, on: bool) -> None:
        """Whether the terminal shows what is typed. Typed ahead, it would get between an answer or a bar; the next
        prompt shows it."""
        if sys.platform != "win32" and self._settings is not None:
            flags = self._settings[3] if on else self._settings[3] & ~termios.ECHO
            with contextlib.suppress(termios.error):  # a terminal that is gone
                termios.tcsetattr(sys.stdin, termios.TCSANOW, [*self._settings[:3], flags, *self._settings[4:]])

    def was_empty(self) -> bool:
        """Whether nothing had been typed when Ctrl-C came: neither a part of a line, nor one that was just entered."""
        if self._readline is None:
            return True
        return not self._readline.get_line_buffer() and self._n_entered == self._readline.get_current_history_length()


class Bar:
    """What a prefill has read, and how long the rest may take: on a terminal, once it takes longer than a moment."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._progress: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def start(self) -> None:
        if not self._console.is_interactive:
            return
        columns = (
            rich.progress.TextColumn("reading"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[count]}"),
        )
        self._began = time.monotonic()
        self._progress = rich.progress.Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task("", total=None, count="")
        self._timer = threading.Timer(BAR_AFTER_S, self._progress.start)
        self._timer.start()

    def update(self, done: int, total: int) -> None:
        """As `Progress` of a prefill is told."""
        if self._progress is not None:
            left = (time.monotonic() - self._began) * (total - done) / max(done, 1)
            count = f"{done:,} of {total:,} tokens, about {left:,.0f} s left"
            self._progress.update(self._task, completed=done, total=total, count=count)

    def stop(self) -> None:
        """Safe to repeat, also where an interrupt has cut it short."""
        if self._timer is not None:
            self._timer.cancel()
            if self._timer.is_alive():
                self._timer.join()
        if self._progress is not None:
            self._progress.stop()
        self._timer = self._progress = None


@contextlib.contextmanager
def spinner(console: Console, what: str) -> Iterator[None]:
    """On a terminal, that something is done that may take a while."""
    with console.status(what) if console.is_interactive else contextlib.nullcontext():
        yield


def stream(console: Console, text: str, *, dim: bool = False) -> None:
    """A piece of text as it comes, its tabs as they are."""
    safe = printable(text)
    console.file.write(DIM.render(safe) if dim and console.is_terminal else safe)
    console.file.flush()
