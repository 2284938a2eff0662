"""The chat templates of the pinned source, conversations to try them on, and jinja2 set up as Hugging Face does.

What llama.cpp does to a request before a template sees it is written down here as `REASONS`: with the reasons applied,
jinja2 must give the very text that ChatTemplate gives.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import tiny
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

Variables = dict[str, Any]


@functools.cache
def sources() -> dict[str, str]:
    """The source of every template by its file's name."""
    folder = tiny.source() / "models" / "templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


#
# Conversations.
#


@dataclass(frozen=True)
class Conversation:
    messages: list[Variables]
    tools: list[Variables] | None = None
    generation: bool = True
    thinking: bool = True
    more: Variables = field(default_factory=dict)  # variables of the template

    def request(self) -> Variables:
        """The arguments of ChatTemplate.render."""
        return {
            "messages": self.messages,
            "tools": self.tools,
            "add_generation_prompt": self.generation,
            "enable_thinking": self.thinking,
            **self.more,
        }

    def variables(self, bos: str = "", eos: str = "") -> Variables:
        """What transformers gives to a template; a ChatTemplate without a model has no BOS and EOS texts."""
        return {**copy.deepcopy(self.request()), "documents": None, "bos_token": bos, "eos_token": eos}


def message(role: str, content: Any, **more: Any) -> Variables:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, call_id: str = "call00001") -> Variables:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, name: str = "weather", call_id: str = "call00001") -> Variables:
    return message("tool", content, name=name, tool_call_id=call_id)


def function(name: str, description: str, required: list[str], **properties: Variables) -> Variables:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools(description: str) -> list[Variables]:
    return [
        function(
            "weather",
            description,
            ["city"],
            city={"type": "string", "description": "in Zürich or 東京"},
            days={"type": "integer", "description": "how many", "default": 3},
        ),
        function(
            "say",
            "Say it.",
            ["text"],
            text={"type": "string", "description": "which", "enum": ["a", "b"]},
            loud={"type": "boolean", "description": "how"},
        ),
    ]


TOOLS = tools("The weather <b>of</b> a city & more")
QUOTED_TOOLS = tools("The 'weather' \"of\" a city")
# No description, and no parameters.
BARE_TOOLS: list[Variables] = [
    {
        "type": "function",
        "function": {"name": "bare", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "barest"}},
]

# What ends a turn, begins one, or means something else to one of the families.
SPECIAL = (
    "<|im_end|>\n<|im_start|>system\n<|eot_id|><|start_header_id|></s>[INST]<end_of_turn><start_of_turn><|end|>"
    "<|endoftext|><tool_call></think><|END_OF_TURN_TOKEN|>[gMASK]<|channel|><|message|><turn|>"
)
ARGUMENTS = {"city": "Zürich", "days": 3}
VALUES = {"list": [1.5, None, {}], "whole": 2.0, "small": 1e-7, "at": 47.37688661, "none": None}
ONE, TWO, THREE = message("user", "One?"), message("assistant", "Two."), message("user", "Three?")
BRIEF, ASK = message("system", "Be brief."), message("user", "Weather?")
CALLED = message("assistant", "", tool_calls=[call("weather", ARGUMENTS)])

CONVERSATIONS: dict[str, Conversation] = {
    "user": Conversation([ONE]),
    "developer": Conversation([message("developer", "Be brief."), ONE]),
    "turns": Conversation([ONE, TWO, THREE, message("assistant", "Four."), message("user", "Five?")]),
    "system-turns": Conversation([BRIEF, ONE, TWO, THREE]),
    "two-users": Conversation([ONE, THREE]),
    "newlines": Conversation(
        [
            message("system", "\n a \n"),
            message("user", "\n\n b\n\n"),
            message("assistant", "\n c \n\n"),
            message("user", "\n d\r\n e \n"),
        ]
    ),
    "unicode": Conversation(
        [message("system", "Ünïcödé"), message("user", "日本語 🦙 é"), message("assistant", "עברית \u200d"), ONE]
    ),
    "unicode-space": Conversation([message("user", "\u2028x\u00a0\u00a0")]),
    "empty": Conversation([message("system", ""), message("user", ""), message("assistant", ""), ONE]),
    "null": Conversation([ONE, message("assistant", None), THREE]),
    "parts": Conversation([message("user", [{"type": "text", "text": "One?"}, {"type": "text", "text": "Two?"}])]),
    "special": Conversation(
        [message(role, f"{role} {SPECIAL}") for role in ("system", "user", "assistant")]
        + [message("user", f"again {SPECIAL}")]
    ),
    "reasoning": Conversation(
        [
            ONE,
            message("assistant", "Two.", reasoning_content="Hmm 2."),
            THREE,
            message("assistant", "Four.", reasoning_content="Hmm 4."),
            message("user", "Five?"),
        ]
    ),
    "effort": Conversation([ONE], more={"reasoning_effort": "low"}),
    "last-assistant": Conversation([ONE, TWO], generation=False),
    "last-reasoning": Conversation([ONE, message("assistant", "Two.", reasoning_content="Hmm 2.")], generation=False),
    "tools": Conversation([BRIEF, ASK], TOOLS),
    "tools-quoted": Conversation([ASK], QUOTED_TOOLS),
    "tools-bare": Conversation([ASK], BARE_TOOLS),
    "call": Conversation([ASK, CALLED, result("sunny")], TOOLS),
    "call-json": Conversation(
        [ASK, message("assistant", "", tool_calls=[call("weather", json.dumps(ARGUMENTS))]), result("sunny")], TOOLS
    ),
    "call-null": Conversation(
        [ASK, message("assistant", None, tool_calls=CALLED["tool_calls"]), result("sunny")], TOOLS
    ),
    "call-special": Conversation(
        [
            ASK,
            message("assistant", "", tool_calls=[call("weather", {"city": f"c {SPECIAL}"})]),
            result(f"t {SPECIAL}"),
        ],
        TOOLS,
    ),
    "call-values": Conversation(
        [
            ASK,
            message("assistant", "", tool_calls=[call("say", VALUES)]),
            result("said"),
        ],
        TOOLS,
    ),
    "call-without-tools": Conversation([ASK, CALLED, result("sunny")]),
    "call-with-all": Conversation(
        [
            BRIEF,
            ASK,
            message("assistant", "Let me see.", reasoning_content="Hmm.", tool_calls=[call("weather", ARGUMENTS)]),
            result('{"sky": "blue", "t": 2.5}'),
            message("assistant", "Blue."),
            message("user", "Thanks"),
        ],
        TOOLS,
    ),
    "call-thought": Conversation(
        [
            ASK,
            message("assistant", "Let me see.", reasoning_content="Hmm.", tool_calls=[call("weather", ARGUMENTS)]),
            result("sunny"),
        ],
        TOOLS,
    ),
    # The results in another order than the calls.
    "calls": Conversation(
        [
            ASK,
            message(
                "assistant",
                "",
                tool_calls=[
                    call("weather", ARGUMENTS),
                    call("say", {"text": "a", "loud": True}, "call00002"),
                ],
            ),
            result("said", "say", "call00002"),
            result("sunny"),
            message("assistant", "Done."),
            message("user", "More"),
        ],
        TOOLS,
    ),
}
for _name in ("user", "call-with-all"):
    _from = CONVERSATIONS[_name]
    CONVERSATIONS[f"{_name} unthinking"] = Conversation(_from.messages, _from.tools, thinking=False)
for _name in ("system-turns", "call-with-all"):
    _from = CONVERSATIONS[_name]
    CONVERSATIONS[f"{_name} unprompted"] = Conversation(_from.messages, _from.tools, generation=False)


#
# jinja2 as transformers/utils/chat_template_utils.py sets it up.
#


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}``, of which transformers records where it stands, and renders what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(text: str) -> None:
    raise jinja2.TemplateError(text)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@dataclass(frozen=True)
class Setup:
    """How an environment differs from that of transformers."""

    kind: type[jinja2.Environment] = ImmutableSandboxedEnvironment
    options: tuple[tuple[str, Any], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()


@functools.cache
def environment(setup: Setup) -> jinja2.Environment:
    made = setup.kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        **dict(setup.options),
    )
    made.filters["tojson"] = tojson
    made.filters.update(setup.filters)
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


@functools.cache
def compiled(source: str, setup: Setup) -> jinja2.Template:
    return environment(setup).from_string(source)


#
# What llama.cpp does beside rendering.
#


class Request:
    """One render by jinja2, to be changed by reasons before it runs."""

    def __init__(self, source: str, variables: Variables) -> None:
        self.source = source
        self.variables = variables
        self.messages: list[Variables] = variables["messages"]
        self.kind: type[jinja2.Environment] = ImmutableSandboxedEnvironment
        self.options: dict[str, Any] = {}
        self.filters: dict[str, Any] = {}
        self.after: list[Callable[[str], str]] = []

    def functions(self) -> Iterator[Variables]:
        for each in self.messages:
            for made in each.get("tool_calls", ()):
                yield made["function"]

    def render(self) -> str:
        self.variables["messages"] = self.messages
        setup = Setup(self.kind, tuple(self.options.items()), tuple(self.filters.items()))
        text = compiled(self.source, setup).render(**self.variables)
        for change in self.after:
            text = change(text)
        return text


@dataclass(frozen=True)
class Reason:
    """Why llama.cpp's text differs, with the place in common/, and the change under which jinja2 gives the same."""

    why: str
    change: Callable[[Request], None]


REASONS: dict[str, Reason] = {}


def reason(why: str) -> Callable[[Callable[[Request], None]], Callable[[Request], None]]:
    def add(change: Callable[[Request], None]) -> Callable[[Request], None]:
        REASONS[change.__name__] = Reason(why, change)
        return change

    return add


@reason("a null content is an empty text to the template (chat.cpp, to_json_oaicompat)")
def null_is_empty(request: Request) -> None:
    for each in request.messages:
        if each["content"] is None:
            each["content"] = ""


@reason("parts are joined by newlines where the template takes only text (chat.cpp, concat_content_parts)")
def parts_are_joined(request: Request) -> None:
    for each in request.messages:
        if isinstance(each["content"], list):
            each["content"] = "\n".join(part["text"] for part in each["content"])


@reason("arguments in JSON are parsed where the template takes an object (chat.cpp, func_args_not_string)")
def arguments_are_objects(request: Request) -> None:
    for each in request.functions():
        if isinstance(each["arguments"], str):
            each["arguments"] = json.loads(each["arguments"])


@reason("arguments are kept as compact JSON where the template takes no object (caps.cpp, supports_object_arguments)")
def arguments_are_text(request: Request) -> None:
    for each in request.functions():
        if not isinstance(each["arguments"], str):
            each["arguments"] = json.dumps(each["arguments"], ensure_ascii=False, separators=(",", ":"))


@reason("the developer's role is the system's, except to gpt-oss (chat.cpp, map_developer_role_to_system)")
def developer_is_system(request: Request) -> None:
    for each in request.messages:
        if each["role"] == "developer":
            each["role"] = "system"


@reason(
    "the system's text goes into the next message where the template has no such role"
    " (chat.cpp, system_message_not_supported)"
)
def system_is_merged(request: Request) -> None:
    first, second, *rest = request.messages
    if first["role"] == "system":
        content = f"{first['content']}\n{second['content']}"
        request.messages = [{**second, "content": content}, *rest]


@reason("date_string and datetime are given: today, not the template's own date (chat.cpp, common_chat_extra_context)")
def dates_are_given(request: Request) -> None:
    request.variables["date_string"] = strftime_now("%d %b %Y")
    request.variables["datetime"] = strftime_now("%b %d %Y")


@reason("no tools are undefined, not none (chat.cpp, common_chat_template_direct_apply_impl)")
def tools_are_undefined(request: Request) -> None:
    if request.variables["tools"] is None:
        del request.variables["tools"]


@reason(
    "add_generation_prompt is undefined when false (chat.cpp, common_chat_template_direct_apply_impl):"
    " wrong where the template's default is true"
)
def prompting_is_undefined(request: Request) -> None:
    if not request.variables["add_generation_prompt"]:
        del request.variables["add_generation_prompt"]


@reason("a tool has always a description and parameters (chat.cpp, common_chat_tools_to_json_oaicompat)")
def tools_are_whole(request: Request) -> None:
    for each in request.variables["tools"] or ():
        of = each["function"]
        each["function"] = {
            "name": of["name"],
            "description": of.get("description", ""),
            "parameters": of.get("parameters", {}),
        }


class Lenient(jinja2.ChainableUndefined):
    """Adds nothing to a text, and has members and methods that are undefined too."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __call__(self, *args: Any) -> Lenient:
        return self


@reason(
    "what is undefined has members, and adds nothing to a text (jinja/runtime.cpp, member_expression and"
    " binary_expression)"
)
def undefined_is_lenient(request: Request) -> None:
    request.options["undefined"] = Lenient


def printed(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return ""
    return "".join(str(printed(item)) for item in value) if isinstance(value, list) else value


@reason(
    "none and objects print nothing, a list its items (jinja/runtime.h, gather_string_parts_recursive): what an"
    " argument says is LOST"
)
def containers_print_little(request: Request) -> None:
    request.options["finalize"] = printed


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    value = float(f"{value:g}")
    return int(value) if value.is_integer() and abs(value) < 1e6 else value


def rounded_tojson(value: Any, **how: Any) -> str:
    return tojson(rounded(value), **how)


def rounded_string(value: Any) -> str:
    return str(rounded(value)) if isinstance(value, float) else str(value)


@reason(
    "tojson and string give a float six digits, and no .0 to a whole one (jinja/value.cpp,"
    " value_to_json_internal): what an argument says is CHANGED"
)
def floats_are_rounded(request: Request) -> None:
    request.filters.update(tojson=rounded_tojson, string=rounded_string)


class FixedFloat(float):
    def __str__(self) -> str:
        text = f"{float(self):f}".rstrip("0")
        return text + "0" if text.endswith(".") else text


def fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: fixed(item) for name, item in value.items()}
    return FixedFloat(value) if isinstance(value, float) else value


@reason(
    "a float prints six decimals, so that a small one is 0.0 (jinja/value.h, value_float_t): what an argument says"
    " is CHANGED"
)
def floats_are_fixed(request: Request) -> None:
    for each in request.functions():
        each["arguments"] = fixed(each["arguments"])


def ascii_trim(value: Any, chars: Any = None) -> AsciiText:
    return AsciiText(value).strip(chars)


class AsciiText(str):
    """A text whose own methods know only the blanks of ASCII."""

    def strip(self, chars: Any = None) -> AsciiText:
        return AsciiText(super().strip(chars or " \t\n\r\v\f"))

    def replace(self, *args: Any) -> AsciiText:
        return AsciiText(super().replace(*args))

    def lstrip(self, chars: Any = None) -> AsciiText:
        return AsciiText(super().lstrip(chars or " \t\n\r\v\f"))

    def rstrip(self, chars: Any = None) -> AsciiText:
        return AsciiText(super().rstrip(chars or " \t\n\r\v\f"))


@reason("strip and trim take away the blanks of ASCII only (jinja/string.cpp, strip)")
def blanks_are_ascii(request: Request) -> None:
    for each in request.messages:
        each["content"] = AsciiText(each["content"])
    request.filters["trim"] = ascii_trim


@reason("safe gives plain text: no markup that would escape what is added to it (jinja/value.cpp)")
def safe_is_plain(request: Request) -> None:
    request.filters["safe"] = str


@jinja2.pass_context
def listed_map(context: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return list(jinja2.filters.do_map(context, *args, **kwargs))


@reason("map gives a list, which tojson takes; jinja2's generator it refuses (jinja/value.cpp)")
def map_is_a_list(request: Request) -> None:
    request.filters["map"] = listed_map


@reason("lists have append; transformers' sandbox refuses it (jinja/value.cpp)")
def lists_may_change(request: Request) -> None:
    request.kind = SandboxedEnvironment


def engine_repr(value: Any) -> str:
    if isinstance(value, str):
        return tojson(value) if "'" in value else f"'{value}'"
    if isinstance(value, list):
        return f"[{', '.join(map(engine_repr, value))}]"
    if isinstance(value, dict):
        members = (f"{engine_repr(name)}: {engine_repr(item)}" for name, item in value.items())
        return f"{{{', '.join(members)}}}"
    return repr(value)


class EngineDict(dict[str, Any]):
    __str__ = engine_repr


@reason("in the text of an object, a text with a ' is JSON (jinja/value.cpp, value_to_string_repr)")
def quoted_is_json(request: Request) -> None:
    request.variables["tools"] = [EngineDict(each) for each in request.variables["tools"]]


@reason("StepFun: every content is stripped (chat.cpp, trim_all_content)")
def contents_are_stripped(request: Request) -> None:
    for each in request.messages:
        each["content"] = each["content"].strip()


@reason("reasoning is given as `thinking`, the name that the template reads (parsers/lfm2.cpp, parsers/gpt-oss.cpp)")
def reasoning_is_thinking(request: Request) -> None:
    for each in request.messages:
        if "reasoning_content" in each:
            each["thinking"] = each["reasoning_content"]


@reason("gpt-oss: a message with reasoning and calls has no content (parsers/gpt-oss.cpp)")
def calls_have_no_content(request: Request) -> None:
    for each in request.messages:
        if "reasoning_content" in each and "tool_calls" in each:
            del each["content"]


@reason("gpt-oss: without a generation prompt the last <|return|> is <|end|> (parsers/gpt-oss.cpp)")
def return_is_end(request: Request) -> None:
    request.after.append(lambda text: "<|end|>".join(text.rsplit("<|return|>", 1)))


@reason(
    "content and reasoning are a list of blocks to the templates with [SYSTEM_PROMPT] and [ARGS]"
    " (parsers/ministral3.cpp)"
)
def contents_are_blocks(request: Request) -> None:
    for each in request.messages:
        if each["role"] in ("system", "assistant"):
            thought = each.pop("reasoning_content", None)
            blocks = [] if thought is None else [{"type": "thinking", "thinking": thought}]
            each["content"] = [*blocks, {"type": "text", "text": each["content"]}]


@reason(
    "Devstral is taken for Ministral 3, whose content is a list of blocks (parsers/ministral3.cpp). Its template"
    " reads only the first: the content of a message with reasoning is LOST"
)
def content_is_lost(request: Request) -> None:
    contents_are_blocks(request)


@reason(
    "old Gemma 4: results and the answer join the message that called (parsers/gemma4.cpp,"
    " convert_tool_responses_gemma4): the content of a message that calls is LOST"
)
def results_join_the_call(request: Request) -> None:
    made: list[Variables] = []
    left = list(request.messages)
    while left:
        each = left.pop(0)
        if "tool_calls" in each:
            names = [called["function"]["name"] for called in each["tool_calls"]]
            each = {name: each[name] for name in ("role", "tool_calls", "reasoning_content") if name in each}
            responses: list[Variables] = []
            while left and left[0]["role"] == "tool":
                content = left.pop(0)["content"]
                with contextlib.suppress(ValueError):
                    content = json.loads(content)
                responses.append({"name": names[len(responses)], "response": content})
            each["tool_responses"] = responses
            if left and left[0]["role"] == "assistant":
                each["content"] = left.pop(0)["content"]
        made.append(each)
    request.messages = made


@reason("Gemma 4: the model's turn is added where the template ends with an end of turn (parsers/gemma4.cpp)")
def turn_is_added(request: Request) -> None:
    if request.variables["add_generation_prompt"]:
        request.after.append(lambda text: text + ("<|turn>model\n" if text.endswith("<turn|>\n") else ""))


@reason("DeepSeek V4: results are put in the order of their calls (parsers/deepseek.cpp)")
def results_are_sorted(request: Request) -> None:
    order = [made["id"] for each in request.messages for made in each.get("tool_calls", ())]
    at = [i for i, each in enumerate(request.messages) if each["role"] == "tool"]
    results = sorted((request.messages[i] for i in at), key=lambda each: order.index(each["tool_call_id"]))
    for i, each in zip(at, results, strict=True):
        request.messages[i] = each


@reason("reasoning_effort is also reasoning_strength (jinja/caps.cpp, caps_apply_reasoning_effort)")
def effort_has_two_names(request: Request) -> None:
    if "reasoning_effort" in request.variables:
        request.variables["reasoning_strength"] = request.variables["reasoning_effort"]


def rendered(
    source: str, conversation: Conversation, reasons: tuple[str, ...] = (), bos: str = "", eos: str = ""
) -> str | None:
    """By jinja2, with these reasons applied; None where the template raises."""
    request = Request(source, conversation.variables(bos, eos))
    try:
        for name in reasons:
            REASONS[name].change(request)
        return request.render()
    except (jinja2.TemplateError, jinja2.exceptions.SecurityError, TypeError, ValueError, AttributeError, KeyError):
        return None
