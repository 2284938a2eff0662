"""Owns the prompt formats besides the model's own template, as texts that know where they come from. Pure.

A part of a prompt is a pair of its text and whether it came from a message: only what the format itself writes may be
parsed for special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from llamacppshim.errors import InvalidArgumentError, UnsupportedFeatureError

FORMATS = ("model", "chatml", "llama3", "raw")
Format = Literal["model", "chatml", "llama3", "raw"]
Parts = list[tuple[str, bool]]
Messages = Sequence[Mapping[str, Any]]


def require_format(name: object) -> None:
    if name not in FORMATS:
        raise UnsupportedFeatureError(f"prompt format {name!r} is none of {' '.join(FORMATS)}", feature="prompt.format")


def written(name: str, messages: Messages, *, add_generation_prompt: bool = True) -> Parts:
    """A conversation in one of the formats that need no template.

    Raises
    ------
    UnsupportedFeatureError  another format; or tools, for which these formats have no protocol
    InvalidArgumentError     a message without role or text
    """
    require_format(name)
    writer = _WRITERS.get(name)
    if writer is None:
        raise UnsupportedFeatureError("the format of the model is its template's", feature="prompt.format")
    return writer([_plain(message, i) for i, message in enumerate(messages)], add_generation_prompt)


def text_of(content: object) -> str | None:
    """The text of a message's content, of typed text parts too; None where there is none, or something else."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    return None


def needs_tools(messages: Messages) -> bool:
    """Whether a message calls a tool, or is the result of a call."""
    known = [message for message in messages if isinstance(message, Mapping)]
    return any(message.get("role") in ("tool", "function") or message.get("tool_calls") for message in known)


def _plain(message: Mapping[str, Any], i: int) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f"messages[{i}] is no mapping", field=f"messages[{i}]")
    if needs_tools([message]):
        raise UnsupportedFeatureError(
            f"messages[{i}] is about a tool, and this format has no protocol for tools", feature="tools"
        )
    role, content = message.get("role"), text_of(message.get("content"))
    if not isinstance(role, str) or not role:
        raise InvalidArgumentError(f"messages[{i}] has no role", field=f"messages[{i}].role")
    if content is None:
        raise InvalidArgumentError(f"messages[{i}] has no text", field=f"messages[{i}].content")
    return role, content


def _chatml(messages: list[tuple[str, str]], add_generation_prompt: bool) -> Parts:
    parts: Parts = []
    for role, content in messages:
        parts += [("<|im_start|>", False), (role, True), ("\n", False), (content, True), ("<|im_end|>\n", False)]
    if add_generation_prompt:
        parts.append(("<|im_start|>assistant\n", False))
    return parts


def _llama3(messages: list[tuple[str, str]], add_generation_prompt: bool) -> Parts:
    parts: Parts = []
    for role, content in messages:
        parts += [("<|start_header_id|>", False), (role, True), ("<|end_header_id|>\n\n", False)]
        parts += [(content.strip(), True), ("<|eot_id|>", False)]
    if add_generation_prompt:
        parts.append(("<|start_header_id|>assistant<|end_header_id|>\n\n", False))
    return parts


def _raw(messages: list[tuple[str, str]], add_generation_prompt: bool) -> Parts:
    del add_generation_prompt  # nothing is written that the messages do not say
    return [(content, True) for _, content in messages]


_WRITERS: dict[str, Callable[[list[tuple[str, str]], bool], Parts]] = {
    "chatml": _chatml,
    "llama3": _llama3,
    "raw": _raw,
}
