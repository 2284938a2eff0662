"""Owns conversations: messages to tokens that nobody can forge, replies that stay as they were generated, and where a
conversation has drifted from what is resident.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from llamacppshim._native import ChatMessage, ChatTemplate, Rendered
from llamacppshim.answer import Chunk, FinishReason
from llamacppshim.config import DecodeConfig
from llamacppshim.errors import InvalidArgumentError, UnsupportedFeatureError
from llamacppshim.formats import Messages, Parts, needs_tools, require_format, text_of, written
from llamacppshim.ledger import Ledger, Tokens
from llamacppshim.replies import Replies
from llamacppshim.report import PrefixStatus
from llamacppshim.reuse import Difference
from llamacppshim.runtime import Runtime
from llamacppshim.sequence import Progress

if TYPE_CHECKING:
    from llamacppshim.session import Session

RENDERED_MAX = 16
KNOWN_MAX = 4096
DONE_MAX = 4
UNKNOWN = -1


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens, and at which token each of its parts begins."""

    tokens: Tokens
    starts: tuple[int, ...]
    parts: tuple[tuple[str, bool], ...]
    rendered: Rendered | None


class _Done(NamedTuple):
    """Parts that were tokenised: which are replies, how many of the first were tokenised as one text, and their tokens
    without BOS."""

    parts: Parts
    replies: list[Tokens | None]
    n_joint: int
    tokens: Tokens
    starts: list[int]


class Chatter:
    """What the chats of one runtime share: the compiled template, what it rendered last, and replies as generated."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._template: ChatTemplate | None = None
        self._rendered: OrderedDict[Hashable, Rendered] = OrderedDict()
        self._done: list[_Done] = []  # the last ones, newest first; replaced, never changed
        self._is_plain: dict[bytes, bool] = {}
        self._special_counts: dict[bytes, int] = {}
        self._is_control = np.full(runtime.model.n_vocab, UNKNOWN, dtype=np.int8)  # by token

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            source = self.runtime.config.chat_template
            model = self.runtime.model
            self._template = ChatTemplate(model) if source is None else ChatTemplate(source, model=model)
        return self._template

    def close(self) -> None:
        if self._template is not None:
            self._template.close()

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, values: dict[str, Any]) -> Rendered:
        """By the model's template; the same conversation is rendered once."""
        if (tools or needs_tools(messages)) and not self.template.supports_tools:
            raise UnsupportedFeatureError(
                "the model's template has no protocol for tools, and the conversation has some", feature="tools"
            )
        try:
            key = _frozen([list(messages), tools, values])
            hash(key)
        except (TypeError, RecursionError):
            return self.template.render(messages, tools, **values)  # which says what is wrong with it
        with self.runtime.chat_lock:
            found = self._rendered.get(key)
            if found is None:
                found = self.template.render(messages, tools, **values)
                self._rendered[key] = found
                if len(self._rendered) > RENDERED_MAX:
                    self._rendered.popitem(last=False)
            else:
                self._rendered.move_to_end(key)
            return found

    def parse(self, text: str, rendered: Rendered, *, partial: bool) -> ChatMessage:
        with self.runtime.chat_lock:
            return self.template.parse(text, partial=partial, rendered=rendered)

    def for_reply(self, config: DecodeConfig, rendered: Rendered) -> DecodeConfig:
        """The template's own stop texts, the tokens that its replies are read by, and the grammar of its tool calls,
        unless another is given."""
        changes: dict[str, Any] = {}
        if rendered.additional_stops:
            changes["stop"] = (*config.stop, *(text for text in rendered.additional_stops if text not in config.stop))
        shown = [self.runtime.tokenizer.plain_cached(text.encode(), True) for text in rendered.preserved_tokens]
        if shown:
            changes["show_special"] = tuple(int(tokens[0]) for tokens in shown if len(tokens) == 1)
        if rendered.grammar and config.grammar is None:
            patterns, tokens = _triggers(rendered)
            changes |= {"grammar": rendered.grammar, "grammar_lazy": rendered.grammar_lazy}
            # It is one of the whole turn, of which the prompt has the beginning already.
            changes["grammar_prefix"] = None if rendered.grammar_lazy else rendered.generation_prompt
            changes |= {"trigger_patterns": patterns, "trigger_tokens": tokens}
        return msgspec.structs.replace(config, **changes) if changes else config

    # Tokens.

    def prompt(self, parts: Parts, replies: Replies, rendered: Rendered | None) -> Prompt:
        """The parts as tokens. Special tokens are only where the format itself wrote them, and BOS is there once."""
        parts = _merged(parts)
        ledger, starts, known, n_joint = self._begun(parts, replies)
        n_begun = len(starts)
        run: list[bytes] = []  # parts that may be tokenised as one text

        def flush() -> None:
            nonlocal n_joint
            if run:
                if not len(ledger):
                    n_joint = len(starts) + len(run)
                self._append(ledger, starts, run)
                run.clear()

        for text, is_input in parts[n_begun:]:
            data = text.encode()
            reply = None
            if is_input and text in replies:
                flush()
                reply = replies.find(text, len(ledger))
            known.append(reply)
            if reply is not None:
                starts.append(len(ledger))
                ledger.extend(reply)
            elif is_input and not self._plain(data):
                flush()
                starts.append(len(ledger))
                ledger.extend(self.runtime.tokenizer.after(ledger.tokens, data, False))
            else:
                run.append(data)
        flush()
        if n_joint < len(parts):  # a text as a whole is known to the tokenizer
            self._done = [_Done(parts, known, n_joint, ledger.copy(), starts), *self._done[: DONE_MAX - 1]]
        tokens, starts, _ = self.runtime.with_bos(ledger.copy(), starts)
        return Prompt(tokens, tuple(starts), tuple(parts), rendered)

    def _begun(self, parts: Parts, replies: Replies) -> tuple[Ledger, list[int], list[Tokens | None], int]:
        """The tokens of the first parts, where each begins, which are replies, and how many of them are one text, from
        an earlier prompt.

        What follows that text only adds tokens, so what is known of it holds for every prompt that begins so.
        """
        best, n = None, 0
        for done in self._done:
            same = 0
            for part, other, its_reply, at in zip(parts, done.parts, done.replies, done.starts, strict=False):
                if part != other or (part[1] and not _same_reply(replies.find(part[0], at), its_reply)):
                    break
                same += 1
            if same > max(n, done.n_joint):  # the part that ends the text is the same too
                best, n = done, same
        if best is None:
            return Ledger(), [], [], 0
        end = best.starts[n] if n < len(best.starts) else len(best.tokens)
        return Ledger(best.tokens[:end]), best.starts[:n], best.replies[:n], best.n_joint

    def _append(self, ledger: Ledger, starts: list[int], run: list[bytes]) -> None:
        """A run of parts, in which special tokens stand where the format wrote them, and nowhere else."""
        tokenizer = self.runtime.tokenizer
        if len(ledger):  # after a reply, or a text that only looks like a special token
            for data in run:
                starts.append(len(ledger))
                ledger.extend(tokenizer.after(ledger.tokens, data, True))
            return
        tokens, places = tokenizer.joined(run, True)
        expected = sum(self._n_special_of(data) for data in run)
        if self._n_special(tokens) == expected:
            starts += places
            ledger.extend(tokens)
            return
        # Two parts make a special token together that neither has: each on its own, then.
        for data in run:
            starts.append(len(ledger))
            ledger.extend(tokenizer.after(ledger.tokens, data, True))

    def _plain(self, data: bytes) -> bool:
        """Whether it has no text of a special token."""
        found = self._is_plain.get(data)
        if found is None:
            tokenizer = self.runtime.tokenizer
            found = np.array_equal(tokenizer.plain_cached(data, True), tokenizer.plain_cached(data, False))
            _bounded(self._is_plain)[data] = found
        return found

    def _n_special_of(self, data: bytes) -> int:
        found = self._special_counts.get(data)
        if found is None:
            found = self._n_special(self.runtime.tokenizer.plain_cached(data, True))
            _bounded(self._special_counts)[data] = found
        return found

    def _n_special(self, tokens: Tokens) -> int:
        is_control = self._is_control[tokens]
        if (is_control == UNKNOWN).any():
            for token in np.unique(tokens[is_control == UNKNOWN]).tolist():
                self._is_control[token] = self.runtime.model.is_control(token)
            is_control = self._is_control[tokens]
        return int(np.count_nonzero(is_control))


class Reply:
    """An answer to a conversation: an iterator of `Chunk`, and what is known of it.

    Attributes
    ----------
    status
        Of the prefix: what was reused and read.
    begin
        The token at which it begins.
    """

    def __init__(
        self, session: Session, chatter: Chatter, prompt: Prompt, status: PrefixStatus, config: DecodeConfig
    ) -> None:
        self.status = status
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._session = session
        self._chatter = chatter
        self.begin = len(prompt.tokens)
        self._rendered = prompt.rendered
        self._chunks = session.decode(config)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = next(self._chunks)
        self.text += chunk.text
        self.tokens += chunk.tokens
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            if chunk.finish_reason in ("stop", "length"):
                self._session.remember_reply(self.text, self.tokens, self.begin)
        return chunk

    @property
    def message(self) -> ChatMessage:
        """What the text says so far, taken apart: content, reasoning, tool calls.

        Raises TemplateError where a whole reply does not have the form that the template asks for.
        """
        if self._rendered is None:
            return ChatMessage("assistant", self.text, "", ())
        return self._chatter.parse(self.text, self._rendered, partial=self.finish_reason != "stop")


def chat(
    session: Session,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    prompt_format: str | None = None,
    template: Mapping[str, Any] | None = None,
    config: DecodeConfig | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Reply:
    """See `Session.chat`."""
    prompt_format = session.runtime.prompt_format if prompt_format is None else prompt_format
    require_format(prompt_format)
    chosen = session.runtime.decode_config(config, overrides)
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError("messages must be a sequence of at least one message", field="messages")
    chatter = session.runtime.chatter
    values = _variables(template)
    if prompt_format == "model":
        rendered = chatter.render(messages, tools, values)
        parts: Parts = list(rendered.parts)
        chosen = chatter.for_reply(chosen, rendered)
    else:
        if tools:
            raise UnsupportedFeatureError(f"format {prompt_format} has no protocol for tools", feature="tools")
        if values:
            raise UnsupportedFeatureError(f"format {prompt_format} has no template to be told that", feature="template")
        rendered, parts = None, written(prompt_format, messages)
    prompt = chatter.prompt(parts, session.replies, rendered)
    status = session.ensure_prefix(prompt.tokens, timeout_s=timeout_s, progress=progress)
    status = msgspec.structs.replace(status, plan=_with_drift(status.plan, prompt, messages))
    session.tell(status.plan)
    return Reply(session, chatter, prompt, status, chosen)


def _variables(template: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a template is told besides; what it is given anyway has a place of its own."""
    if template is None:
        return {}
    if not isinstance(template, Mapping) or not all(isinstance(name, str) for name in template):
        raise InvalidArgumentError(field="template", expected="a mapping of names to values", actual=template)
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in template:
            raise InvalidArgumentError(f"template may not name {name}: it has its own parameter", field="template")
    return dict(template)


_Known = TypeVar("_Known", bound=dict[bytes, Any])


def _bounded(known: _Known) -> _Known:
    """What is known of texts; forgotten now and then."""
    if len(known) >= KNOWN_MAX:
        known.clear()
    return known


def _same_reply(one: Tokens | None, other: Tokens | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _frozen(value: object) -> Hashable:
    """A value of JSON's types as a key: a list and a tuple are alike, 1 and true are not."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return (dict, *((key, _frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (list, *(_frozen(item) for item in value))
    return (type(value), repr(value) if isinstance(value, float) else value)  # -0.0 and 0.0 are equal


def _merged(parts: Parts) -> Parts:
    """Neighbours of one kind are one text: two inputs may make a special token's text together."""
    found: Parts = []
    for text, is_input in parts:
        if not text:
            continue
        if found and found[-1][1] == is_input:
            found[-1] = (found[-1][0] + text, is_input)
        else:
            found.append((text, is_input))
    return found


def _owners(parts: Sequence[tuple[str, bool]], messages: Messages) -> list[int]:
    """The message that each part came from, as far as its text tells; -1 for what the format wrote."""
    owners: list[int] = []
    at = 0
    contents = [json.dumps(message, ensure_ascii=False, default=str) for message in messages]
    for text, is_input in parts:
        if not is_input:
            owners.append(-1)
            continue
        inner = json.dumps(text, ensure_ascii=False)[1:-1]
        own = text_of(messages[at].get("content")) if at < len(messages) else None
        here = next((i for i in range(at, len(messages)) if inner in contents[i] or text == own), at)
        at = min(here, len(messages) - 1)
        owners.append(at)
    return owners


def _with_drift(plan: Any, prompt: Prompt, messages: Messages) -> Any:
    """Names the message in which the conversation parts from what was resident."""
    difference: Difference | None = plan.first_difference
    if difference is None:
        return plan
    place = max((i for i, start in enumerate(prompt.starts) if start <= difference.position), default=-1)
    owners = _owners(prompt.parts, messages)
    owner = next((owners[i] for i in range(place, -1, -1) if owners[i] >= 0), -1)
    where = "before the first message"
    if owner >= 0:
        where = f"in or after messages[{owner}] ({messages[owner].get('role')})"
    reason = f"{plan.reason}; the conversation parts from what was resident {where}"
    return msgspec.structs.replace(plan, reason=reason)


def _triggers(rendered: Rendered) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """As the sampler takes them: patterns over the whole output so far, and tokens."""
    patterns: list[str] = []
    tokens: list[int] = []
    for trigger in rendered.grammar_triggers:
        kind, value = trigger["type"], trigger["value"]
        if kind == "token":
            tokens.append(int(trigger["token"]))
        elif kind == "word":
            patterns.append("[\\s\\S]*?(" + _escaped(value) + ")[\\s\\S]*")
        elif kind == "pattern":
            patterns.append("[\\s\\S]*?(" + value + ")[\\s\\S]*")
        else:
            patterns.append(value)
    return tuple(patterns), tuple(tokens)


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in "\\^$.|?*+()[]{}" else c for c in text)
