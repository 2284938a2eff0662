"""Answers one question about one side, in a process of its own: ``_worker.py SIDE QUESTION ARGUMENTS``, one JSON line.

Imports only the side that is measured, so that its time to import and its memory are its own.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

PROMPT = "The opposite of hot is"
ANSWER = "cold"
N_ANSWER = 8


def memory() -> dict[str, int]:
    """Bytes of this process: resident, of these not from files, and the largest resident set so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"rss": "VmRSS", "anon": "RssAnon", "peak": "VmHWM", "virtual": "VmSize"}
    return {name: int(lines[key].split()[0]) * 1024 for name, key in names.items()}


class Side(Protocol):
    package: str
    n_vocab: int

    def load(self, model: str) -> None: ...
    def open(self, model: str, **parameters: Any) -> None: ...
    def tokenize(self, text: str) -> list[int]: ...
    def text(self, tokens: list[int]) -> str: ...
    def clear(self) -> None: ...
    def feed(self, tokens: list[int]) -> None: ...
    def greedy(self, tokens: list[int], n: int) -> list[int]: ...


class Ours:
    package = "llamacppshim"

    def load(self, model: str) -> None:
        import llamacppshim

        self.model = llamacppshim.Model(model)
        self.n_vocab = self.model.n_vocab

    def open(self, model: str, **parameters: Any) -> None:
        import llamacppshim

        self.load(model)
        self.context = llamacppshim.Context(self.model, **parameters)
        self.sampler = llamacppshim.Sampler(self.model)

    def tokenize(self, text: str) -> list[int]:
        return [int(token) for token in self.model.tokenize(text, add_special=True, parse_special=False)]

    def text(self, tokens: list[int]) -> str:
        return self.model.detokenize(tokens).decode()

    def clear(self) -> None:
        self.context.clear()

    def feed(self, tokens: list[int]) -> None:
        self.context.decode(tokens)

    def greedy(self, tokens: list[int], n: int) -> list[int]:
        found: list[int] = []
        self.context.clear()
        for _ in range(n):
            self.context.decode(tokens)
            tokens = [self.sampler.sample(self.context)]
            found += tokens
        return found


class LlamaCppPython:
    package = "llama_cpp"

    def load(self, model: str) -> None:
        llama_cpp = import_module("llama_cpp")
        llama_cpp.llama_backend_init()
        self.raw = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self.raw:
            raise RuntimeError(f"{model} does not load")

    def open(self, model: str, **parameters: Any) -> None:
        parameters.pop("poll", None)
        self.llama = import_module("llama_cpp").Llama(model, verbose=False, **parameters)
        self.n_vocab = self.llama.n_vocab()

    def tokenize(self, text: str) -> list[int]:
        return list(self.llama.tokenize(text.encode()))

    def text(self, tokens: list[int]) -> str:
        return str(self.llama.detokenize(tokens).decode())

    def clear(self) -> None:
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()

    def feed(self, tokens: list[int]) -> None:
        self.llama.eval(tokens)

    def greedy(self, tokens: list[int], n: int) -> list[int]:
        found: list[int] = []
        for token in self.llama.generate(tokens, temp=0.0, repeat_penalty=1.0):
            found.append(token)
            if len(found) == n:
                break
        return found


def speed(
    side: Side, *, model: str, n_prompt: int, n_gen: int, repetitions: int, check: bool = True, **parameters: Any
) -> dict[str, Any]:
    """Tokens a second: of a prompt in one call; of tokens one by one as llama-bench decodes them, random ones, not
    sampled; of a greedy answer. First the answer itself."""
    side.open(model, n_ctx=max(n_prompt, n_gen, 256), **parameters)
    prompt = side.tokenize(PROMPT)
    answer = side.greedy(prompt, N_ANSWER) if check else []
    draw = random.Random(0)
    tokens = [prompt[0], *(draw.randrange(side.n_vocab) for _ in range(max(n_prompt, n_gen) - 1))]
    found: dict[str, Any] = {"answer": answer, "text": side.text(answer) if check else ""}
    for name, pieces in (("prefill", [tokens[:n_prompt]]), ("decode", [[token] for token in tokens[:n_gen]])):
        count = sum(map(len, pieces))
        if count == 0:
            continue
        side.clear()
        side.feed(pieces[0])  # as llama-bench warms up
        samples = []
        for _ in range(repetitions):
            side.clear()
            began = time.perf_counter()
            for piece in pieces:
                side.feed(piece)
            samples.append(count / (time.perf_counter() - began))
        found[name] = sorted(samples)[repetitions // 2]
    if n_gen > 0:
        began = time.perf_counter()
        side.greedy(prompt, n_gen)
        found["generate"] = n_gen / (time.perf_counter() - began)
    return found


def load(side: Side, *, model: str) -> dict[str, Any]:
    """Seconds to import the package and to load a model, and what is resident then."""
    bare = memory()
    began = time.perf_counter()
    import_module(side.package)
    imported = time.perf_counter()
    after_import = memory()
    loading = time.perf_counter()
    side.load(model)
    loaded = time.perf_counter()
    return {
        "import_s": imported - began,
        "load_s": loaded - loading,
        "bare": bare,
        "imported": after_import,
        "loaded": memory(),
    }


def first_token(side: Side, *, model: str, **parameters: Any) -> dict[str, Any]:
    """Seconds from a path to the first decoded token (model, context, decode), and what is resident after each."""
    import_module(side.package)
    imported = memory()
    began = time.perf_counter()
    side.open(model, **parameters)
    opened = time.perf_counter()
    after_open = memory()
    side.feed([1])
    done = time.perf_counter()
    return {
        "open_s": opened - began,
        "first_token_s": done - began,
        "imported": imported,
        "opened": after_open,
        "decoded": memory(),
    }


def prefilled(side: Side, *, model: str, n_prompt: int, **parameters: Any) -> dict[str, Any]:
    """What is resident after creating a context, and after one full batch."""
    found = first_token(side, model=model, **parameters)
    side.clear()
    side.feed(list(range(100, 100 + n_prompt)))
    return {**found, "prefilled": memory()}


def loop(side: Side, *, model: str, n_tokens: int, n_rounds: int, n_threads: int) -> dict[str, Any]:
    """Nanoseconds a token of decode and greedy sample, each round, and the tokens."""
    import llamacppshim

    rounds = []
    with llamacppshim.Model(model) as handle, llamacppshim.Sampler(handle) as sampler:
        context = llamacppshim.Context(handle, n_ctx=n_tokens + 1, n_threads=n_threads)
        for _ in range(n_rounds):
            context.clear()
            token, tokens = 1, []
            began = time.perf_counter_ns()
            for _ in range(n_tokens):
                context.decode((token,))
                token = sampler.sample(context)
                tokens.append(token)
            rounds.append((time.perf_counter_ns() - began) / n_tokens)
        context.close()
    return {"ns": rounds, "tokens": tokens}


SIDES: dict[str, Callable[[], Side]] = {"Ours": Ours, "LlamaCppPython": LlamaCppPython}
QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "speed": speed,
    "load": load,
    "first_token": first_token,
    "prefilled": prefilled,
    "loop": loop,
}

if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[2]](SIDES[sys.argv[1]](), **json.loads(sys.argv[3]))))
