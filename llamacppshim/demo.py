"""Owns `llamacppshim demo`: three questions about a folder of source files, on one context that is kept warm.

The files are read once. Each turn prefills only what the context does not hold yet; then the last turn is run again in
a fresh context, to show what keeping it saved and that the answer is the same. The last bits of logits depend on how
tokens are cut into batches, and a near tie can turn on them: so prompts are prefilled in pieces that begin at multiples
of PIECE_TOKENS, and only whole pieces are kept. Then both runs compute the same, to the bit.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import stat
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import rich.progress
from rich.console import Console

from llamacppshim import ChatTemplate, Context, Model, Sampler, build_info
from llamacppshim.errors import InvalidArgumentError, UnsupportedFeatureError
from llamacppshim.models import default_model

SCHEMA_VERSION = 1

# With the default model on two cores, prefilling this much takes about half a minute; the demo does it twice.
PREFIX_TOKENS = 4096
MIN_PREFIX_TOKENS = 256
TURNS_TOKENS = 512
ANSWER_TOKENS = 64
PIECE_TOKENS = 128

MAX_FILE_BYTES = 1 << 20
OWN_SUFFIXES = frozenset({".py", ".pyi"})
SUFFIXES = OWN_SUFFIXES | {
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".jsx", ".kt", ".lua", ".m"),
    *(".mm", ".php", ".pl", ".pxd", ".pxi", ".pyx", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts"),
    *(".tsx", ".zig"),
}
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules", "target", "venv"})

INSTRUCTION = "Here are the source files of a project.\n"
QUESTIONS = (
    "What is this project for? Answer in one sentence.",
    "Name one function in these files and say what it does.",
    "Which errors can it raise?",
)

Update = Callable[[int, int], None]


@dataclass
class SourceFile:
    """A file of the prefix, its path relative to the folder."""

    path: str
    n_bytes: int
    text: str
    n_tokens: int = 0
    cut: bool = False

    def block(self) -> str:
        return f"\n=== {self.path} ===\n{self.text}"

    def report(self) -> dict[str, Any]:
        return {"path": self.path, "n_bytes": self.n_bytes, "n_tokens": self.n_tokens, "cut": self.cut}


@dataclass
class Turn:
    """One answer and what it cost. The time to the first token counts from the request, prefill included."""

    question: str
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    ttft_ms: float = 0.0
    tokens_per_s: float = 0.0
    finish_reason: str = "length"
    answer: str = ""
    tokens: list[int] = field(default_factory=list)


@dataclass
class Prefix:
    """The stable part of the prompt."""

    folder: Path
    text: str
    taken: list[SourceFile]
    left_out: list[str]


def run(console: Console, repo: Path | None, model_path: Path | None, json_path: Path | None) -> None:
    """The whole demonstration. Raises what the handles raise, and OSError."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise InvalidArgumentError(f"{json_path.parent} is not a folder")
    if repo is not None and not repo.is_dir():
        raise InvalidArgumentError(f"{repo} is not a folder")
    if model_path is None:
        with bar(console, "downloading SmolLM2-135M-Instruct", rich.progress.DownloadColumn()) as update:
            model_path = default_model(update)
    with Model(model_path) as model, ChatTemplate(model) as template:
        say(console, f"model   {model.name} ({model.architecture}, {model.n_bytes / 1e6:,.0f} MB)")
        n_ctx = context_size(model)
        prefix = read_prefix(model, template, repo, n_ctx - TURNS_TOKENS)
        say_prefix(console, prefix)

        messages: list[dict[str, str]] = []
        turns: list[Turn] = []
        with Conversation(model, template, n_ctx) as warm:
            for question in QUESTIONS:
                say(console, f"\n{len(turns) + 1}  {question}", style="bold")
                content = question if messages else f"{prefix.text}\n\n{question}"
                messages.append({"role": "user", "content": content})
                turns.append(ask(console, warm, messages, question))
                messages.append({"role": "assistant", "content": turns[-1].answer})
        say(console, "\nThe last turn again, in a fresh context", style="bold")
        with Conversation(model, template, n_ctx) as fresh:
            cold = ask(console, fresh, messages[:-1], QUESTIONS[-1])
        say_comparison(console, turns[-1], cold)
        if json_path is not None:
            report = {
                "schema_version": SCHEMA_VERSION,
                "model": {
                    "name": model.name,
                    "path": os.fspath(model_path),
                    "architecture": model.architecture,
                    "n_bytes": model.n_bytes,
                },
                "build": build_info(),
                "n_ctx": n_ctx,
                "prefix": {
                    "folder": os.fspath(prefix.folder),
                    "files": [file.report() for file in prefix.taken],
                    "left_out": prefix.left_out,
                },
                "turns": [asdict(turn) for turn in turns],
                "cold": asdict(cold),
                "comparison": {
                    "warm_ttft_ms": turns[-1].ttft_ms,
                    "cold_ttft_ms": cold.ttft_ms,
                    "same_tokens": turns[-1].tokens == cold.tokens,
                },
            }
            json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def context_size(model: Model) -> int:
    if model.memory_kind == "none":
        raise UnsupportedFeatureError(f"{model.name} ({model.architecture}) makes embeddings, not text")
    n_ctx = min(PREFIX_TOKENS + TURNS_TOKENS, model.n_ctx_train)
    if n_ctx < MIN_PREFIX_TOKENS + TURNS_TOKENS:
        raise UnsupportedFeatureError(
            f"{model.name} takes {n_ctx} tokens, the demo needs {MIN_PREFIX_TOKENS + TURNS_TOKENS}"
        )
    return n_ctx


def read_prefix(model: Model, template: ChatTemplate, repo: Path | None, n_tokens: int) -> Prefix:
    """As many files as fit into n_tokens, the smallest first; in the prompt they stand in the order of their paths."""
    folder, suffixes = (Path(__file__).parent, OWN_SUFFIXES) if repo is None else (repo, SUFFIXES)
    files = sorted(source_files(folder, suffixes), key=lambda file: (file.n_bytes, file.path))
    if not files:
        raise InvalidArgumentError(f"{folder} holds no source files")
    n_left = n_tokens - len(prompt_tokens(model, template, [{"role": "user", "content": INSTRUCTION}]))
    taken: list[SourceFile] = []
    for file in files:
        tokens = model.tokenize(file.block(), add_special=False, parse_special=False)
        file.n_tokens = min(len(tokens), n_left)
        if len(tokens) > n_left:
            if taken:
                break
            file.cut = True
            n_shown = len(model.detokenize(tokens[:n_left]).decode("utf-8", "ignore"))
            file.text = file.text[: max(0, n_shown - (len(file.block()) - len(file.text)))]
        taken.append(file)
        n_left -= file.n_tokens
    text = INSTRUCTION + "".join(file.block() for file in sorted(taken, key=lambda file: file.path))
    return Prefix(folder, text, taken, [file.path for file in files[len(taken) :]])


def source_files(folder: Path, suffixes: frozenset[str]) -> Iterator[SourceFile]:
    """Text files of these suffixes, but for links, hidden and generated folders, and whatever cannot be read."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(parent, name)
            if path.suffix.lower() not in suffixes or name.startswith("."):
                continue
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and 0 < found.st_size <= MAX_FILE_BYTES:
                    text = path.read_text(encoding="utf-8")
                    if "\0" not in text:
                        relative = os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "replace")
                        yield SourceFile(relative, found.st_size, text)


def prompt_tokens(model: Model, template: ChatTemplate, messages: list[dict[str, str]]) -> list[int]:
    """The conversation as the template writes it. Where a message holds the text of a special token, it stays text."""
    rendered = template.render(messages)
    texts = [text for text, is_input in rendered.parts if is_input]
    if any(holds_special(model, text) for text in texts):
        tokens: list[int] = []
        for text, is_input in rendered.parts:
            tokens += model.tokenize(text, add_special=not tokens, parse_special=not is_input).tolist()
        return tokens
    return [int(token) for token in model.tokenize(rendered.text, add_special=True, parse_special=True)]


def holds_special(model: Model, text: str) -> bool:
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    return any(model.is_control(int(token)) for token in set(tokens.tolist()))


class Conversation:
    """A context of one sequence that knows which tokens it holds."""

    def __init__(self, model: Model, template: ChatTemplate, n_ctx: int) -> None:
        self.model = model
        self.template = template
        # The whole window cache: without it a sliding window cannot be cut back to a common prefix.
        self.context = Context(model, n_ctx=n_ctx, n_batch=PIECE_TOKENS, swa_full=True)
        self.sampler = Sampler(model, temperature=0.0)
        self.resident: list[int] = []
        self.n_whole = 0  # of these, in whole pieces of a prompt

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sampler.close()
        self.context.close()

    def keep(self, tokens: list[int]) -> int:
        """Removes what is not a whole piece of `tokens`; how many of them are resident then, never all."""
        n = 0
        while n < min(self.n_whole, len(tokens) - 1) and self.resident[n] == tokens[n]:
            n += 1
        n -= n % PIECE_TOKENS
        if n < len(self.resident):
            can_be_cut = self.model.memory_kind in ("attention", "swa")
            if not (can_be_cut and self.context.seq_rm(0, n, -1)):
                self.context.clear()
                n = 0
            del self.resident[n:]
        return n

    def decode(self, tokens: list[int], *, logits: Literal["last", "none"]) -> None:
        self.context.decode(tokens, logits=logits)
        self.resident += tokens

    def answer(
        self, messages: list[dict[str, str]], question: str, on_prefill: Update, on_text: Callable[[str], None]
    ) -> Turn:
        """Greedy, at most ANSWER_TOKENS."""
        started = time.perf_counter()
        tokens = prompt_tokens(self.model, self.template, messages)
        reused = self.keep(tokens)
        turn = Turn(question, len(tokens), reused, len(tokens) - reused)
        for begin in range(reused, len(tokens), PIECE_TOKENS):
            piece = tokens[begin : begin + PIECE_TOKENS]
            self.decode(piece, logits="last" if begin + len(piece) == len(tokens) else "none")
            on_prefill(begin + len(piece) - reused, turn.prefilled_tokens)
        self.n_whole = len(tokens) - len(tokens) % PIECE_TOKENS

        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        pieces: list[str] = []
        n_decoded = 0
        token = self.sampler.sample(self.context, -1)
        first = time.perf_counter()
        while True:
            if self.model.is_eog(token):
                turn.finish_reason = "stop"
                break
            turn.tokens.append(token)
            pieces.append(decoder.decode(self.model.token_piece(token, special=False)))
            on_text(pieces[-1])
            if len(turn.tokens) == ANSWER_TOKENS or len(self.resident) == self.context.n_ctx_seq:
                break
            self.decode([token], logits="last")
            n_decoded += 1
            token = self.sampler.sample(self.context, -1)
        seconds = time.perf_counter() - first
        pieces.append(decoder.decode(b"", final=True))
        on_text(pieces[-1])
        turn.answer = "".join(pieces)
        turn.ttft_ms = (first - started) * 1e3
        turn.tokens_per_s = n_decoded / seconds if n_decoded else 0.0
        return turn


def ask(console: Console, conversation: Conversation, messages: list[dict[str, str]], question: str) -> Turn:
    """One turn on the screen: a bar while it prefills, the answer as it comes, and what it cost."""
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(bar(console, "prefilling", rich.progress.MofNCompleteColumn()))

        def on_text(text: str) -> None:
            stack.close()
            say(console, text, end="")

        turn = conversation.answer(messages, question, show, on_text)
    say(console, "")
    say(
        console,
        f"reused {turn.reused_tokens:,} tokens, prefilled {turn.prefilled_tokens:,}; "
        f"first token after {seconds(turn.ttft_ms)}, then {turn.tokens_per_s:.1f} tokens/s",
        style="dim",
    )
    return turn


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


def say(console: Console, text: str, *, style: str | None = None, end: str = "\n") -> None:
    """Text as it is. What could steer the terminal is shown as a replacement character."""
    safe = "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text)
    console.print(safe, style=style, end=end, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say_prefix(console: Console, prefix: Prefix) -> None:
    n_tokens = sum(file.n_tokens for file in prefix.taken)
    say(console, f"files   {prefix.folder}: {len(prefix.taken)} files, {n_tokens:,} tokens")
    for file in sorted(prefix.taken, key=lambda file: file.path):
        say(console, f"        {file.n_tokens:>5,}  {file.path}{' (its beginning)' if file.cut else ''}", style="dim")
    if prefix.left_out:
        say(
            console,
            f"        left out, too large for {PREFIX_TOKENS:,} tokens: {', '.join(prefix.left_out[:4])}"
            + (f" and {len(prefix.left_out) - 4} more" if len(prefix.left_out) > 4 else ""),
            style="dim",
        )


def say_comparison(console: Console, warm: Turn, cold: Turn) -> None:
    same = "both gave the same tokens" if warm.tokens == cold.tokens else "the tokens differ"
    say(
        console,
        f"\nfirst token after {seconds(warm.ttft_ms)} warm, {seconds(cold.ttft_ms)} cold: "
        f"{cold.ttft_ms / warm.ttft_ms:,.0f} times sooner; {same}",
        style="bold",
    )


def seconds(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms / 1e3:.2f} s"
