"""Owns `llamacppshim demo`: three questions about a folder of source files, in one session that is kept warm.

The files are read once. Each turn prefills only what the session does not hold yet; then the last turn is run again in
a fresh one, to show what keeping it saved and that the answer is the same. Both compute the same to the bit: the last
bits of logits depend on how tokens are cut into batches, a near tie can turn on them, and reuse is "bitwise" here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from llamacppshim import (
    Admission,
    ChatTemplate,
    DecodeConfig,
    Model,
    Runtime,
    Segment,
    Session,
    Snapshot,
    TokenCounter,
    admit,
    assemble_context,
    build_info,
    collect_many,
    read_folder,
)
from llamacppshim.errors import InternalError, InvalidArgumentError, UnsupportedFeatureError
from llamacppshim.folders import GENERATED
from llamacppshim.header import layouts_told, read_gguf_header
from llamacppshim.sources import resolve_model
from llamacppshim.terminal import Update, bar, say, seconds

SCHEMA_VERSION = 1

# With the default model on two cores, prefilling this much takes about half a minute; the demo does it twice.
PREFIX_TOKENS = 4096
MIN_PREFIX_TOKENS = 256
TURNS_TOKENS = 512
ANSWER_TOKENS = 64
PIECE_TOKENS = 128
BRANCHES = 3
BRANCH_TOKENS = 24

MAX_TABLE_LINES = 24  # of a longer table, only what was kept is shown
MAX_FILE_BYTES = 1 << 20
OWN_SUFFIXES = frozenset({".py", ".pyi"})
SUFFIXES = OWN_SUFFIXES | {
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".jsx", ".kt", ".lua", ".m"),
    *(".mm", ".php", ".pl", ".pxd", ".pxi", ".pyx", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts"),
    *(".tsx", ".zig"),
}
INSTRUCTION = "Here are the source files of a project.\n"
QUESTIONS = (
    "What is this project for? Answer in one sentence.",
    "Name one function in these files and say what it does.",
    "Which errors can it raise?",
)


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
class Restored:
    """What another process did with a saved session: it asked the last question again, and branched."""

    n_bytes: int
    save_ms: float
    restore_ms: float
    restored_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    ttft_ms: float
    tokens: list[int]
    branches: int
    branch_ms: float
    branch_bytes: int
    branch_tokens_per_s: float


@dataclass
class Prefix:
    """The stable part of the prompt: the assembled files, and what became of each."""

    folder: Path
    text: str
    admission: Admission
    n_bytes: dict[str, int]
    cut: bool

    def report(self) -> dict[str, Any]:
        rows = self.admission.explanation.rows
        files = [
            {"path": row.name, "n_bytes": self.n_bytes[row.name or ""], "n_tokens": row.tokens, "cut": self.cut}
            for row in rows
            if row.what != "dropped"
        ]
        left_out = [row.name for row in rows if row.what == "dropped"]
        return {"folder": os.fspath(self.folder), "files": files, "left_out": sorted(left_out, key=self.size)}

    def size(self, name: str | None) -> tuple[int, str]:
        return self.n_bytes[name or ""], name or ""


def run(console: Console, repo: Path | None, model_name: str, json_path: Path | None) -> None:
    """The whole demonstration. Raises what the handles raise, and OSError."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise InvalidArgumentError(f"{json_path.parent} is not a folder")
    if repo is not None and not repo.is_dir():
        raise InvalidArgumentError(f"{repo} is not a folder")
    model_path = model_file(console, model_name)
    with Model(model_path) as model, ChatTemplate(model) as template:
        say(console, f"model   {model.name} ({model.architecture}, {model.n_bytes / 1e6:,.0f} MB)")
        n_ctx = context_size(model)
        prefix = read_prefix(model, template, repo, n_ctx - TURNS_TOKENS)
        say_prefix(console, prefix)

        messages: list[dict[str, str]] = []
        turns: list[Turn] = []
        with open_runtime(model, n_ctx) as runtime, runtime.session() as warm:
            for question in QUESTIONS:
                say(console, f"\n{len(turns) + 1}  {question}", style="bold")
                content = question if messages else f"{prefix.text}\n\n{question}"
                messages.append({"role": "user", "content": content})
                turns.append(ask(console, warm, prompt_tokens(model, template, messages), question))
                messages.append({"role": "assistant", "content": turns[-1].answer})
            last = prompt_tokens(model, template, messages[:-1])
            warm.ensure_prefix(last)
            saved = warm.snapshot()
        say(console, "\nThe last turn again, in a fresh context", style="bold")
        with open_runtime(model, n_ctx) as runtime, runtime.session() as fresh:
            cold = ask(console, fresh, last, QUESTIONS[-1])
        say_comparison(console, turns[-1], cold)
        say(console, "\nSaved, restored in a new process, and branched there", style="bold")
        restored = go_on_elsewhere(model_path, saved, last)
        say_restored(console, turns[-1], restored)
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
                "prefix": prefix.report(),
                "turns": [asdict(turn) for turn in turns],
                "cold": asdict(cold),
                "comparison": {
                    "warm_ttft_ms": turns[-1].ttft_ms,
                    "cold_ttft_ms": cold.ttft_ms,
                    "same_tokens": turns[-1].tokens == cold.tokens,
                },
                "restored": {**asdict(restored), "same_tokens": restored.tokens == turns[-1].tokens},
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
    ignore = () if repo is None else GENERATED  # nothing in our own folder is generated
    files = read_folder(folder, suffixes=suffixes, max_file_bytes=MAX_FILE_BYTES, ignore=ignore)
    if not files:
        raise InvalidArgumentError(f"{folder} holds no source files")
    n_bytes = {file.name or "": len(file.content.encode()) for file in files}
    # Of files, admission keeps the last ones of a list longest.
    files.sort(key=lambda file: (-n_bytes[file.name or ""], file.name))

    def count(block: str) -> int:
        """After a newline, as blocks stand."""
        after = model.tokenize("\n" + block, add_special=False, parse_special=False)
        return len(after) - len(model.tokenize("\n", add_special=False, parse_special=False))

    budget = n_tokens - len(prompt_tokens(model, template, [{"role": "user", "content": INSTRUCTION}]))
    counter = TokenCounter(count)
    admission = admit(files, budget, counter)
    cut = not admission.kept
    if cut:
        admission = admit([beginning(files[-1], budget, counter)], budget, counter)
    text = INSTRUCTION + assemble_context(admission.kept).stable_text
    return Prefix(folder, text, admission, n_bytes, cut)


def beginning(file: Segment, budget: int, count: Callable[[str], int]) -> Segment:
    """As much of a file as fits, by halving what is too much."""
    low, high = 0, len(file.content)
    while high - low > max(1, len(file.content) // 1000):
        middle = (low + high) // 2
        fits = count(Segment(file.kind, file.content[:middle], file.name).block) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return Segment(file.kind, file.content[:low], file.name)


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


def open_runtime(model: Model, n_ctx: int, **values: Any) -> Runtime:
    """The whole window cache is kept: without it a sliding window would give the same tokens, but not the same bits."""
    own = {"n_batch": PIECE_TOKENS, "n_ubatch": PIECE_TOKENS, "reuse": "bitwise", "swa_full": True}
    return Runtime.open(model, n_ctx=n_ctx, **{**own, **values})


def answer(
    session: Session, tokens: list[int], question: str, on_prefill: Update, on_text: Callable[[str], None]
) -> Turn:
    """Greedy, at most ANSWER_TOKENS."""
    started = time.perf_counter()
    status = session.ensure_prefix(tokens, progress=on_prefill)
    turn = Turn(question, len(tokens), status.reused_tokens, len(tokens) - status.reused_tokens)
    first: float | None = None
    pieces: list[str] = []
    for chunk in session.decode(max_tokens=ANSWER_TOKENS):
        first = first or time.perf_counter()
        turn.tokens += chunk.tokens
        pieces.append(chunk.text)
        on_text(chunk.text)
        turn.finish_reason = chunk.finish_reason or turn.finish_reason
    ended = time.perf_counter()
    first = first or ended
    turn.answer = "".join(pieces)
    turn.ttft_ms = (first - started) * 1e3
    turn.tokens_per_s = (len(turn.tokens) - 1) / (ended - first) if len(turn.tokens) > 1 else 0.0
    return turn


def go_on_elsewhere(model_path: Path, saved: Snapshot, tokens: list[int]) -> Restored:
    """Saves the session to a file that another process restores."""
    with tempfile.TemporaryDirectory(prefix="llamacppshim-") as folder:
        path = Path(folder) / "session.lcs"
        started = time.perf_counter()
        saved.save(path)
        save_ms = (time.perf_counter() - started) * 1e3
        request = {"model": os.fspath(model_path), "snapshot": os.fspath(path), "n_ctx": saved.manifest.n_ctx}
        # The packages of this process: a folder that is named like one may lie where the command was started.
        code = f"import sys; sys.path[:] = {sys.path!r}; from llamacppshim.demo import restored; restored()"
        text = json.dumps({**request, "tokens": tokens})
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InternalError(f"the new process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return Restored(n_bytes=path.stat().st_size, save_ms=save_ms, **json.loads(done.stdout))


def restored() -> None:
    """The other process: a request on standard input, its figures on standard output."""
    request = json.load(sys.stdin)
    tokens, n_ctx, snapshot = request["tokens"], request["n_ctx"], Snapshot.load(request["snapshot"])
    with Model(request["model"]) as model:
        with open_runtime(model, n_ctx) as runtime:
            started = time.perf_counter()
            session = runtime.restore(snapshot)
            restore_ms = (time.perf_counter() - started) * 1e3
            restored_tokens = session.explain().resident_tokens
            turn = answer(session, tokens, "", lambda done, total: None, lambda text: None)
        # Of a unified cache branches share the cells. It takes the state of a cache of one sequence.
        with open_runtime(model, n_ctx, reuse="token", n_seq_max=BRANCHES + 1, kv_unified=True) as runtime:
            session = runtime.restore(snapshot)
            session.ensure_prefix(tokens)
            started = time.perf_counter()
            branches = session.branch(BRANCHES)
            branch_ms = (time.perf_counter() - started) * 1e3
            branch_bytes = sum(branch.explain().branch_bytes for branch in branches)
            configs = [DecodeConfig(max_tokens=BRANCH_TOKENS, temperature=0.8, seed=seed) for seed in range(BRANCHES)]
            started = time.perf_counter()
            answers = collect_many(branches, configs)
            seconds = time.perf_counter() - started
    figures = {
        "restore_ms": restore_ms,
        "restored_tokens": restored_tokens,
        "reused_tokens": turn.reused_tokens,
        "prefilled_tokens": turn.prefilled_tokens,
        "ttft_ms": turn.ttft_ms,
        "tokens": turn.tokens,
        "branches": BRANCHES,
        "branch_ms": branch_ms,
        "branch_bytes": branch_bytes,
        "branch_tokens_per_s": sum(len(one.tokens) for one in answers) / seconds,
    }
    print(json.dumps(figures))


def ask(console: Console, session: Session, tokens: list[int], question: str) -> Turn:
    """One turn on the screen: a bar while it prefills, the answer as it comes, and what it cost."""
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(bar(console, "prefilling", rich.progress.MofNCompleteColumn()))

        def on_text(text: str) -> None:
            stack.close()
            say(console, text, end="")

        turn = answer(session, tokens, question, show, on_text)
    say(console, "")
    say(
        console,
        f"reused {turn.reused_tokens:,} tokens, prefilled {turn.prefilled_tokens:,}; "
        f"first token after {seconds(turn.ttft_ms)}, then {turn.tokens_per_s:.1f} tokens/s",
        style="dim",
    )
    return turn


def model_file(console: Console, name: str) -> Path:
    """The file that a model's name means; what of its entry is not used is said."""
    with bar(console, f"downloading {name}", rich.progress.DownloadColumn()) as update:
        source = resolve_model(name, progress=update)
    for note in source.notes:
        say(console, f"note    {note}", style="dim")
    if source.origin == "ollama":
        with layouts_told(source):  # which a load would not
            read_gguf_header(source.path)
    return source.path


def say_prefix(console: Console, prefix: Prefix) -> None:
    say(console, f"files   {prefix.folder}" + (" (the beginning of one)" if prefix.cut else ""))
    lines = str(prefix.admission.explanation).splitlines()
    if len(lines) > MAX_TABLE_LINES:
        lines = [line for line in lines if " dropped " not in line]
    say(console, "\n".join(f"        {line}" for line in lines), style="dim")


def say_comparison(console: Console, warm: Turn, cold: Turn) -> None:
    same = "both gave the same tokens" if warm.tokens == cold.tokens else "the tokens differ"
    say(
        console,
        f"\nfirst token after {seconds(warm.ttft_ms)} warm, {seconds(cold.ttft_ms)} cold: "
        f"{cold.ttft_ms / warm.ttft_ms:,.0f} times sooner; {same}",
        style="bold",
    )


def say_restored(console: Console, warm: Turn, restored: Restored) -> None:
    same = "the same tokens" if warm.tokens == restored.tokens else "other tokens"
    say(
        console,
        f"saved {restored.n_bytes / 1e6:,.0f} MB in {restored.save_ms:,.0f} ms, restored {restored.restored_tokens:,} "
        f"tokens in {restored.restore_ms:,.0f} ms; the last question again: read {restored.prefilled_tokens:,}, "
        f"first token after {seconds(restored.ttft_ms)}, {same}",
        style="dim",
    )
    say(
        console,
        f"{restored.branches} branches in {restored.branch_ms:.1f} ms, {restored.branch_bytes:,} bytes copied; "
        f"together {restored.branch_tokens_per_s:.1f} tokens/s, each at most {BRANCH_TOKENS} tokens",
        style="dim",
    )
