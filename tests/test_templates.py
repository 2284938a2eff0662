"""ChatTemplate on every template that the pinned source ships: its text against jinja2's, what of it came from the
messages, and replies taken apart.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from templates import (
    CONVERSATIONS,
    REASONS,
    SPECIAL,
    Conversation,
    call,
    function,
    message,
    rendered,
    result,
    sources,
)

from llamacppshim import ChatTemplate, Model, Rendered, TemplateError

TEMPLATES = list(sources())


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> Iterator[None]:
    """The search for leaks after each of hundreds of tests would else walk over all that is loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def every_template_but(*names: str) -> list[str]:
    assert set(names) <= set(TEMPLATES)
    return [name for name in TEMPLATES if name not in names]


def every_conversation_but(*names: str) -> list[str]:
    assert set(names) <= set(CONVERSATIONS)
    return [name for name in CONVERSATIONS if name not in names]


WITH_CALLS = [
    "call",
    "call-json",
    "call-null",
    "call-special",
    "call-values",
    "call-without-tools",
    "call-with-all",
    "call-thought",
    "calls",
    "call-with-all unthinking",
    "call-with-all unprompted",
]
WITH_TOOLS = ["tools", "tools-quoted", "tools-bare", *(name for name in WITH_CALLS if name != "call-without-tools")]

# Where ChatTemplate's text is not jinja2's: by reason, the conversations and the templates. A pair that stands under
# several reasons has them all.
DIFFERENCES: dict[str, list[tuple[Iterable[str], Iterable[str]]]] = {
    "null_is_empty": [
        (
            ["null"],
            [
                "Apertus-8B-Instruct",
                "Cohere2MoE",
                "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
                "MiMo-VL",
                "Mistral-Small-3.2-24B-Instruct-2506",
                "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
                "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
                "Qwen-Qwen2.5-7B-Instruct",
                "Qwen3-Coder",
                "deepseek-ai-DeepSeek-V3.1",
                "google-gemma-2-2b-it",
                "meta-llama-Llama-3.1-8B-Instruct",
                "meta-llama-Llama-3.2-3B-Instruct",
                "meta-llama-Llama-3.3-70B-Instruct",
                "mistralai-Mistral-Nemo-Instruct-2407",
                "upstage-Solar-Open-100B",
            ],
        ),
        (
            ["null", "call-null"],
            [
                "Bielik-11B-v3.0-Instruct",
                "CohereForAI-c4ai-command-r-plus-tool_use",
                "GLM-4.6",
                "GLM-4.7-Flash",
                "LFM2-8B-A1B",
                "LFM2.5-8B-A1B",
                "LFM2.5-Instruct",
                "MiniMax-M2",
                "Qwen-QwQ-32B",
                "Qwen-Qwen3-0.6B",
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                "ibm-granite-granite-3.3-2B-Instruct",
                "llama-cpp-rwkv-world",
                "microsoft-Phi-3.5-mini-instruct",
                "mistralai-Ministral-3-14B-Reasoning-2512",
                "openai-gpt-oss-120b",
                "unsloth-mistral-Devstral-Small-2507",
            ],
        ),
    ],
    "parts_are_joined": [
        (
            ["parts"],
            every_template_but(
                "Apriel-1.6-15b-Thinker-fixed",
                "Cohere2MoE",
                "GLM-4.6",
                "GLM-4.7-Flash",
                "Kimi-K2-Instruct",
                "Kimi-K2-Thinking",
                "Kimi-K3",
                "MiniMax-M1",
                "MiniMax-M2",
                "MiniMax-M3",
                "Mistral-Small-3.2-24B-Instruct-2506",
                "Qwen3.5-4B",
                "Reka-Edge",
                "Spark2.5",
                "StepFun3.5-Flash",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "ibm-granite-granite-4.0",
                "ibm-granite-granite-4.1",
                "moonshotai-Kimi-K2",
                "muse-glimmer",
                "tencent-Hy3",
                "unsloth-Apriel-1.5",
                "unsloth-mistral-Devstral-Small-2507",
            ),
        ),
    ],
    "arguments_are_objects": [
        (
            ["call-json"],
            every_template_but(
                "HuggingFaceTB-SmolLM3-3B",
                "LFM2-8B-A1B",
                "LFM2.5-Instruct",
                "Reka-Edge",
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "google-gemma-2-2b-it",
                "ibm-granite-granite-3.3-2B-Instruct",
                "llama-cpp-rwkv-world",
                "meetkai-functionary-medium-v3.2",
                "microsoft-Phi-3.5-mini-instruct",
            ),
        ),
    ],
    "arguments_are_text": [
        (
            [
                "call",
                "call-null",
                "call-special",
                "call-values",
                "call-without-tools",
                "call-with-all",
                "call-thought",
                "calls",
                "call-with-all unthinking",
                "call-with-all unprompted",
            ],
            ["meetkai-functionary-medium-v3.2"],
        ),
    ],
    "developer_is_system": [
        (
            ["developer"],
            every_template_but(
                "MiniMax-M3",
                "Reka-Edge",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "openai-gpt-oss-120b",
            ),
        ),
    ],
    "system_is_merged": [
        (
            [
                "developer",
                "system-turns",
                "newlines",
                "unicode",
                "empty",
                "special",
                "tools",
                "system-turns unprompted",
            ],
            ["google-gemma-2-2b-it"],
        ),
    ],
    "dates_are_given": [
        (every_conversation_but(), ["fireworks-ai-llama-3-firefunction-v2"]),
        (every_conversation_but("calls"), ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"]),
    ],
    "tools_are_undefined": [
        (
            [
                "user",
                "developer",
                "turns",
                "system-turns",
                "two-users",
                "newlines",
                "unicode",
                "unicode-space",
                "empty",
                "null",
                "parts",
                "special",
                "reasoning",
                "effort",
                "last-assistant",
                "last-reasoning",
                "call-without-tools",
                "user unthinking",
                "system-turns unprompted",
            ],
            [
                "CohereForAI-c4ai-command-r-plus-tool_use",
                "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
                "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            ],
        ),
    ],
    "prompting_is_undefined": [
        (
            ["last-assistant", "last-reasoning", "system-turns unprompted", "call-with-all unprompted"],
            ["llama-cpp-rwkv-world", "upstage-Solar-Open-100B"],
        ),
    ],
    "tools_are_whole": [
        (
            ["tools-bare"],
            every_template_but(
                "ByteDance-Seed-OSS",
                "CohereForAI-c4ai-command-r-plus-tool_use",
                "GigaChat3-10B-A1.8B",
                "GigaChat3.1-10B-A1.8B",
                "HuggingFaceTB-SmolLM3-3B",
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                "deepseek-ai-DeepSeek-V3.1",
                "fireworks-ai-llama-3-firefunction-v2",
                "google-gemma-2-2b-it",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "llama-cpp-rwkv-world",
                "meetkai-functionary-medium-v3.2",
                "microsoft-Phi-3.5-mini-instruct",
            ),
        ),
    ],
    "undefined_is_lenient": [
        (["tools-bare"], ["ByteDance-Seed-OSS", "CohereForAI-c4ai-command-r-plus-tool_use"]),
        (every_conversation_but(), ["fireworks-ai-llama-3-firefunction-v2"]),
    ],
    "containers_print_little": [
        (["call-values"], ["google-gemma-4-31B-it-interleaved", "google-gemma-4-31B-it", "openbmb-MiniCPM5-1B"]),
    ],
    "floats_are_rounded": [
        (
            ["call-values"],
            every_template_but(
                "HuggingFaceTB-SmolLM3-3B",
                "LFM2-8B-A1B",
                "LFM2.5-Instruct",
                "MiniMax-M3",
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "google-gemma-2-2b-it",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "ibm-granite-granite-3.3-2B-Instruct",
                "llama-cpp-rwkv-world",
                "meetkai-functionary-medium-v3.2",
                "microsoft-Phi-3.5-mini-instruct",
                "muse-glimmer",
                "openbmb-MiniCPM5-1B",
            ),
        ),
    ],
    "floats_are_fixed": [
        (
            ["call-values"],
            [
                "MiniMax-M3",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "muse-glimmer",
                "openbmb-MiniCPM5-1B",
            ],
        ),
    ],
    "blanks_are_ascii": [
        (
            ["unicode-space"],
            [
                "CohereForAI-c4ai-command-r-plus-tool_use",
                "MiniMax-M1",
                "NVIDIA-Nemotron-Nano-v2",
                "Qwen3.5-4B",
                "fireworks-ai-llama-3-firefunction-v2",
                "google-gemma-2-2b-it",
                "google-gemma-4-31B-it-interleaved",
                "google-gemma-4-31B-it",
                "llama-cpp-rwkv-world",
                "meta-llama-Llama-3.1-8B-Instruct",
                "meta-llama-Llama-3.2-3B-Instruct",
                "meta-llama-Llama-3.3-70B-Instruct",
            ],
        ),
    ],
    "safe_is_plain": [
        (
            WITH_TOOLS,
            ["meetkai-functionary-medium-v3.1"],
        ),
    ],
    "map_is_a_list": [
        (
            WITH_TOOLS,
            ["llama-cpp-deepseek-r1"],
        ),
    ],
    "lists_may_change": [
        (
            WITH_CALLS,
            ["Kimi-K2-Instruct", "Kimi-K2-Thinking"],
        ),
    ],
    "quoted_is_json": [
        (["tools-quoted"], ["Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"]),
    ],
    "contents_are_stripped": [
        (["newlines"], ["StepFun3.5-Flash"]),
    ],
    "reasoning_is_thinking": [
        (["last-reasoning", "call-thought"], ["LFM2.5-8B-A1B", "openai-gpt-oss-120b"]),
    ],
    "calls_have_no_content": [
        (["call-thought"], ["openai-gpt-oss-120b"]),
    ],
    "return_is_end": [
        (["last-assistant", "last-reasoning"], ["openai-gpt-oss-120b"]),
    ],
    "contents_are_blocks": [
        (
            [
                "empty",
                "null",
                "reasoning",
                "last-reasoning",
                "call-with-all",
                "call-thought",
                "call-with-all unthinking",
                "call-with-all unprompted",
            ],
            ["mistralai-Ministral-3-14B-Reasoning-2512"],
        ),
    ],
    "content_is_lost": [
        (
            [
                "reasoning",
                "last-reasoning",
                "call-with-all",
                "call-thought",
                "call-with-all unthinking",
                "call-with-all unprompted",
            ],
            ["unsloth-mistral-Devstral-Small-2507"],
        ),
    ],
    "results_join_the_call": [
        (
            WITH_CALLS,
            ["google-gemma-4-31B-it-interleaved"],
        ),
    ],
    "turn_is_added": [
        (["call-thought"], ["google-gemma-4-31B-it"]),
    ],
    "results_are_sorted": [
        (["calls"], ["deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-ai-DeepSeek-V4"]),
    ],
    "effort_has_two_names": [
        (["effort"], ["muse-glimmer"]),
    ],
}

# Where both raise, and the words of the template.
RAISING: dict[str, tuple[str, list[str]]] = {
    "Mistral-Small-3.2-24B-Instruct-2506": ("roles must alternate user", ["two-users"]),
    "google-gemma-2-2b-it": (
        "roles must alternate user",
        [
            "two-users",
            "call",
            "call-json",
            "call-null",
            "call-special",
            "call-values",
            "call-without-tools",
            "call-with-all",
            "call-thought",
            "calls",
            "call-with-all unthinking",
            "call-with-all unprompted",
        ],
    ),
    "meta-llama-Llama-3.1-8B-Instruct": ("This model only supports single tool-calls at once!", ["calls"]),
    "meta-llama-Llama-3.2-3B-Instruct": ("This model only supports single tool-calls at once!", ["calls"]),
    "meta-llama-Llama-3.3-70B-Instruct": ("This model only supports single tool-calls at once!", ["calls"]),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("roles must alternate user", ["two-users"]),
    "mistralai-Mistral-Nemo-Instruct-2407": ("roles must alternate user", ["two-users"]),
}


def reasons_of(name: str, conversation: str) -> tuple[str, ...]:
    return tuple(
        reason
        for reason, rows in DIFFERENCES.items()
        if any(conversation in conversations and name in templates for conversations, templates in rows)
    )


def test_every_name_in_the_tables_is_one() -> None:
    assert list(DIFFERENCES) == list(REASONS)
    for rows in DIFFERENCES.values():
        for conversations, templates in rows:
            assert set(conversations) <= set(CONVERSATIONS)
            assert set(templates) <= set(TEMPLATES)
    for names in (RAISING, MARKED_TOO, CONTENT_MARKS, THOUGHT_MARKS, TAKEN_APART_ODDLY):
        assert set(names) <= set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rendering_is_jinja2_s_or_differs_for_the_listed_reasons(name: str) -> None:
    source = sources()[name]
    words, raising = RAISING.get(name, ("", []))
    with ChatTemplate(source) as template:
        for conversation, request in CONVERSATIONS.items():
            where = f"{name}, {conversation}"
            expected = rendered(source, request)
            if conversation in raising:
                with pytest.raises(TemplateError, match=re.escape(words)):
                    template.render(**request.request())
                assert expected is None, where
                continue
            found = template.render(**request.request())
            assert "".join(part for part, _ in found.parts) == found.text, where
            reasons = reasons_of(name, conversation)
            if not reasons:
                assert found.text == expected, where
                continue
            assert found.text == rendered(source, request, reasons), f"{where}: not for {reasons} alone"
            for n in range(len(reasons)):
                for fewer in itertools.combinations(reasons, n):
                    assert found.text != rendered(source, request, fewer), f"{where}: {fewer} are enough"


@pytest.mark.parametrize("name", TEMPLATES)
def test_with_a_model_bos_and_eos_are_its_own_but_for_those_that_the_tokenizer_adds(
    name: str, loaded: dict[str, Model]
) -> None:
    model = loaded["tiny-spm"]
    assert model.bos is not None and model.eos is not None
    bos, eos = model.token_text(model.bos), model.token_text(model.eos)
    assert bos and eos and model.add_bos
    source, request = sources()[name], CONVERSATIONS["turns"]
    expected = rendered(source, request, reasons_of(name, "turns"), bos, eos)
    assert expected is not None
    expected = expected.removeprefix(bos)
    if model.add_eos:
        expected = expected.removesuffix(eos)
    with ChatTemplate(source, model=model) as template:
        assert template.render(**request.request()).text == expected


#
# What a template has rendered before, and what is rendered once for several texts.
#

# Handlers that write what begins a reply themselves, or change the prompt.
OWN_GENERATION_PROMPT = [
    "muse-glimmer",
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
    "google-gemma-4-31B-it-interleaved",
]


@pytest.mark.parametrize("name", every_template_but(*OWN_GENERATION_PROMPT))
def test_what_begins_a_reply_is_what_the_prompt_adds_to_a_rendering_without_it(name: str) -> None:
    """Each of the two texts by a call of its own, which renders it whole."""
    raising = RAISING.get(name, ("", []))[1]
    with ChatTemplate(sources()[name]) as template:
        for conversation, request in CONVERSATIONS.items():
            if conversation in raising:
                continue
            prompted, bare = (
                template.render(**{**request.request(), "add_generation_prompt": add}) for add in (True, False)
            )
            both = zip(prompted.text, bare.text, strict=False)
            n = next((i for i, (one, other) in enumerate(both) if one != other), len(bare.text))
            assert prompted.generation_prompt == bare.generation_prompt == prompted.text[n:], conversation


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_grows_renders_as_by_a_new_template(name: str) -> None:
    raising = RAISING.get(name, ("", []))[1]
    with ChatTemplate(sources()[name]) as template:
        for request in (
            CONVERSATIONS[each].request() for each in ("call-with-all", "reasoning") if each not in raising
        ):
            messages = request["messages"]
            ends = [n for n, each in enumerate(messages, 1) if each["role"] == "user"]
            found = [template.render(**{**request, "messages": messages[:n]}) for n in (*ends, ends[0])]
            assert found[-1] == found[0]
            with ChatTemplate(sources()[name]) as anew:
                assert anew.render(**request) == found[-2]


#
# What of a text came from the messages.
#

# Input that is no text of the request: what stood in the middle between two texts, by the template.
MARKED_TOO = {
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "a newline and the content are stripped as one text",
    "google-gemma-2-2b-it": "the newline between the system's text and the user's is added to the message",
}


def safe_conversations(forged: str) -> dict[str, Conversation]:
    """With texts that no template holds, and `forged` in all that a user, a tool or a model's argument says."""
    said = [f"zq{i}a{forged} zq{i}b" for i in range(10)]
    tool = function("zqtool", said[0], ["zqarg"], zqarg={"type": "string", "description": said[1]})
    called = [call("zqtool", {"zqarg": said[2]})]
    return {
        "turns": Conversation(
            [
                message("system", said[3]),
                message("user", said[4]),
                message("assistant", "zqanswer zqanswer", reasoning_content="zqthought"),
                message("user", said[5]),
            ]
        ),
        "tools": Conversation(
            [message("user", said[6]), message("assistant", "", tool_calls=called), result(said[7], "zqtool")], [tool]
        ),
    }


def texts_in(value: Any) -> Iterator[str]:
    """All that a request says, and the names of what says it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


@functools.cache
def all_rendered(name: str, forged: str) -> dict[str, tuple[Conversation, Rendered]]:
    raising = RAISING.get(name, ("", []))[1]
    with ChatTemplate(sources()[name]) as template:
        return {
            key: (conversation, template.render(**conversation.request()))
            for key, conversation in safe_conversations(forged).items()
            if key == "turns" or "call" not in raising
        }


def from_template(found: Rendered) -> str:
    return "".join(part for part, is_input in found.parts if not is_input)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_messages_say_is_input_and_what_the_template_says_is_not(name: str) -> None:
    for conversation, found in all_rendered(name, "").values():
        assert "zq" not in from_template(found)
        is_input = [mark for part, mark in found.parts for _ in part]
        for each in conversation.messages:
            content = each["content"]
            assert each["role"] != "user" or content in found.text
            for at in re.finditer(re.escape(content), found.text) if content else ():
                assert all(is_input[at.start() : at.end()]), content
        # Whatever else is input is a name, a number or a mark of the JSON that the template makes of tools and calls.
        words = {word.lower() for text in texts_in(conversation.request()) for word in re.findall(r"\w+", text)}
        marks = " \n" if conversation.tools or name in MARKED_TOO else " "
        marks += "{}[]\"':," if conversation.tools else ""
        for part, mark in found.parts:
            if mark:
                assert set(re.findall(r"\w+", part.lower())) <= words, part
                assert not re.sub(r"\w+", "", part).strip(marks), part


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forged_turn_in_a_message_or_a_result_stays_input(name: str) -> None:
    """The template writes the same around forged texts as around harmless ones."""
    forged = " " + SPECIAL.replace("\n", " ")  # a template may take lines apart
    harmless = all_rendered(name, "")
    for key, (_, found) in all_rendered(name, forged).items():
        made = from_template(found)
        expected = from_template(harmless[key][1])
        if name == "openbmb-MiniCPM5-1B" and key == "tools":  # it wraps an argument that has a <
            assert made.count("<![CDATA[") == expected.count("<![CDATA[") + 1
            made = "".join(re.split(r"<!\[CDATA\[(?!\.)|(?<!\.)\]\]>", made))
        assert made == expected
        given = "".join(part for part, is_input in found.parts if is_input)
        # As often as it is said: tojson writes a quoted text, but these hold nothing that it would escape.
        assert given.count("<|im_end|>") == found.text.count("<|im_end|>") - made.count("<|im_end|>") > 0


#
# Replies.
#

CONTENT = "Hello,\nit is *fine* 🦙: {1} <b>x</b>."
THOUGHT = "Hmm, 🦙.\nYes."

# What stands around the content of a reply, and around its thought where that is not what Rendered says.
CONTENT_MARKS = {
    "Cohere2MoE": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "meetkai-functionary-medium-v3.2": ("all\n", ""),
    "muse-glimmer": ("<|message|>", ""),
    "openai-gpt-oss-120b": ("<|channel|>final<|message|>", ""),
}
THOUGHT_MARKS = {
    "muse-glimmer": (" to=self<|message|>", "<|eom|><|start|>assistant"),
    "openai-gpt-oss-120b": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}

# Where upstream is wrong, (thinking, content, reasoning). A newline of the prompt that follows the mark it derived is
# taken for the reply's own (chat-auto-parser-generator.cpp, build_parser: the marks are trimmed, the prompt is not).
NEWLINE_IS_REASONING = [(True, CONTENT, "\n" + THOUGHT)]
# supports_thinking is always true, but replies have thoughts only where the template has <think> (parsers/lfm2.cpp).
THOUGHT_IS_CONTENT = [(True, f"<think>{THOUGHT}</think>{CONTENT}", "")]
TAKEN_APART_ODDLY: dict[str, list[tuple[bool, str, str]]] = {
    "HuggingFaceTB-SmolLM3-3B": [(False, "\n" + CONTENT, "")],
    "LFM2-8B-A1B": THOUGHT_IS_CONTENT,
    "LFM2.5-Instruct": THOUGHT_IS_CONTENT,
    "Qwen-QwQ-32B": NEWLINE_IS_REASONING,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": NEWLINE_IS_REASONING,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": NEWLINE_IS_REASONING,
    "llama-cpp-deepseek-r1": NEWLINE_IS_REASONING,
    # The mark that is derived, <|begin_assistant|>, begins a turn and no thought; the prompt's words open the thought.
    "Apriel-1.6-15b-Thinker-fixed": [
        (False, "", f"Here are my reasoning steps:\n{CONTENT}"),
        (True, CONTENT, f"Here are my reasoning steps:\n<|begin_assistant|>{THOUGHT}"),
    ],
}


def reply(name: str, asked: Rendered, thought: str) -> str:
    """As a model would write it after this prompt."""
    begin, end = THOUGHT_MARKS.get(name, (asked.thinking_start, min(asked.thinking_ends, key=len, default="")))
    before, after = CONTENT_MARKS.get(name, ("", ""))
    is_open = begin != "" and asked.generation_prompt.rstrip().endswith(begin.strip())
    if thought:
        thought = f"{'' if is_open else begin}{thought}{end}"
    elif is_open:
        thought = end  # the template opens a thought in any case
    return f"{thought}{before}{CONTENT}{after}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_is_taken_apart_and_grows_piece_by_piece(name: str) -> None:
    # Hy3 thinks only where it is told how hard.
    more = {"reasoning_effort": "high"} if name == "tencent-Hy3" else {}
    with ChatTemplate(sources()[name]) as template:
        for thinking in (False, True) if template.supports_thinking else (False,):
            asked = template.render([message("user", "Hi")], enable_thinking=thinking, **more)
            text = reply(name, asked, THOUGHT if thinking else "")
            expected = (CONTENT, THOUGHT if thinking else "")
            for odd_thinking, *odd in TAKEN_APART_ODDLY.get(name, []):
                if odd_thinking == thinking:
                    assert tuple(odd) != expected
                    expected = (odd[0], odd[1])
            found = template.parse(text, rendered=asked)
            assert (found.content, found.reasoning, found.tool_calls) == (*expected, ())
            content = reasoning = ""
            for end in range(len(text) + 1):
                piece = template.parse(text[:end], partial=True, rendered=asked)
                assert piece.content.startswith(content) and piece.reasoning.startswith(reasoning)
                assert not piece.tool_calls
                content, reasoning = piece.content, piece.reasoning
            assert (content, reasoning) == expected
