"""What does the next turn of a long conversation cost before a token of it is read?

Milliseconds, median of the turns: a conversation of so many messages and about 33,000 tokens of source code goes on by
an answer and a question each time, rendered by the model's template (or `--template FILE`, with `--tools` tools) and
tokenised. `new_ms`, a part of `turn_ms`, is the vocabulary's work on texts that were not there before. Less than 5
beyond it.
Baseline: the same of a template and a tokenizer that have seen nothing of the conversation, compiled before.
Check: both give the same text, marks, parser and tokens, and the tokens are those of the model for the whole text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
N_BYTES = 118_000

if TYPE_CHECKING:
    from llamacppshim import Rendered
    from llamacppshim.chat import Chatter, Prompt
    from llamacppshim.replies import Replies


def conversation(n_messages: int) -> list[dict[str, str]]:
    """Of source code, in turns, the last one the user's."""
    source = "".join(path.read_text("utf-8") for path in sorted((HERE.parents[1] / "llamacppshim").glob("*.py")))
    n = N_BYTES // n_messages
    texts = [f"[{i}] {source[i * n % (len(source) - n) :][:n]}" for i in range(n_messages)]
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return messages if n_messages % 2 else messages[:-1]


def tool(i: int) -> dict[str, Any]:
    properties = {
        name: {"type": kind, "description": "what it is for"} for name, kind in (("path", "string"), ("n", "integer"))
    }
    function = {"name": f"tool_{i}", "description": "Does something with the workspace.", "parameters": {}}
    function["parameters"] = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": function}


def turn(
    chatter: Chatter, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None, replies: Replies
) -> tuple[Rendered, Prompt]:
    rendered = chatter.render(messages, tools, {})
    return rendered, chatter.prompt(list(rendered.parts), replies, rendered)


def measure(model: str, n_messages: int, n_tools: int, n_turns: int, template: str | None) -> dict[str, Any]:
    from llamacppshim import Runtime
    from llamacppshim.chat import Chatter
    from llamacppshim.replies import Replies
    from llamacppshim.text import Tokenizer

    source = None if template is None else Path(template).read_text("utf-8")
    tools = [tool(i) for i in range(n_tools)] or None
    replies = Replies()
    times: dict[str, list[float]] = {"render": [], "tokens": [], "turn": [], "new": [], "anew": []}
    with Runtime.open(model, n_ctx=256, chat_template=source) as runtime:
        messages = conversation(n_messages)
        warm = Chatter(runtime)
        turn(warm, messages, tools, replies)
        shared = runtime.tokenizer
        plain = shared.plain
        new_s = 0.0

        def timed(text: bytes, parse_special: bool) -> Any:
            nonlocal new_s
            started = time.perf_counter()
            tokens = plain(text, parse_special)
            new_s += time.perf_counter() - started
            return tokens

        shared.plain = timed  # type: ignore[method-assign]
        for i in range(n_turns):
            said = f"Turn {i}: " + "go on, please. " * 4
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": said[::-1]}]
            new_s = 0.0
            began = time.perf_counter()
            rendered = warm.render(messages, tools, {})
            between = time.perf_counter()
            prompt = warm.prompt(list(rendered.parts), replies, rendered)
            ended = time.perf_counter()
            times["render"].append(between - began)
            times["tokens"].append(ended - between)
            times["turn"].append(ended - began)
            times["new"].append(new_s)

            cold = Chatter(runtime)
            assert cold.template.source  # compiled
            runtime.tokenizer = Tokenizer(runtime.model)
            began = time.perf_counter()
            expected, expected_prompt = turn(cold, messages, tools, replies)
            times["anew"].append(time.perf_counter() - began)
            cold.close()
            runtime.tokenizer = shared
            assert rendered == expected
            assert prompt.tokens.tolist() == expected_prompt.tokens.tolist()
            assert prompt.starts == expected_prompt.starts
        whole = runtime.model.tokenize(rendered.text.encode(), add_special=False, parse_special=True)
        assert whole.tolist() == prompt.tokens.tolist()[-len(whole) :]
        warm.close()
        medians = {f"{name}_ms": round(statistics.median(each) * 1e3, 3) for name, each in times.items()}
        return {"n_messages": len(messages), "n_tools": n_tools, "n_tokens": len(prompt.tokens), **medians}


def main() -> None:
    import _run
    import peers

    parser = argparse.ArgumentParser(description="Rendering and tokenising a conversation that goes on.")
    parser.add_argument("--messages", type=int, nargs="*", default=[12, 60, 240])
    parser.add_argument("--tools", type=int, default=0)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--template", help="a Jinja file, instead of the model's own")
    chosen = parser.parse_args()
    model = str(_run.model("smollm2"))
    for n_messages in chosen.messages:
        asked = json.dumps([model, n_messages, chosen.tools, chosen.turns, chosen.template])
        site = peers.SHIM[peers.DEFAULT_THREADS]
        ran = _run.run([sys.executable, str(HERE), "--measure", asked], {"PYTHONPATH": str(site)})
        _run.emit(bench="rendering", template=chosen.template or "the model's", **json.loads(ran.out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
