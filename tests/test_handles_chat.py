"""The chat template handle: rendering against Jinja itself, parsing replies, and templates that misbehave."""

from __future__ import annotations

import json
import pickle
from typing import Any

import jinja2
import pytest

from llamacppshim import (
    ChatTemplate,
    InvalidArgumentError,
    LlamaCppShimError,
    Model,
    Rendered,
    TemplateError,
    _native,
)

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|> in ünïcode?\n"},
    {"role": "assistant", "content": "A marker."},
    {"role": "user", "content": "Thanks 🦙"},
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

# Hermes's manner of tools: a template that llama.cpp derives a parser from.
WITH_TOOLS = """{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content if message.content else '' }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def template(model: Model) -> Any:
    with ChatTemplate(model) as template:
        yield template


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_rendering_is_jinja_s_own(model: Model, template: ChatTemplate, add_generation_prompt: bool) -> None:
    source = model.chat_template
    assert source is not None
    expected = jinja2.Template(source).render(messages=MESSAGES, add_generation_prompt=add_generation_prompt)
    rendered = template.render(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert rendered.text == expected
    assert "".join(part for part, _ in rendered.parts) == expected
    assert template.source == source
    assert not template.supports_tools
    assert not template.supports_thinking


def test_the_parts_tell_the_template_s_text_from_the_users(template: ChatTemplate) -> None:
    rendered = template.render(MESSAGES)
    given = "".join(part for part, is_input in rendered.parts if is_input)
    made = "".join(part for part, is_input in rendered.parts if not is_input)
    for message in MESSAGES:
        assert message["content"] in given
    assert made.count("<|im_end|>") == 4
    assert given.count("<|im_end|>") == 1


def test_a_model_without_a_template_gets_chatml(loaded: dict[str, Model]) -> None:
    with ChatTemplate(loaded["tiny-bert"]) as template:
        assert template.render([{"role": "user", "content": "hi"}]).text.startswith("<|im_start|>user\nhi<|im_end|>")


def test_a_source_needs_no_model_and_takes_its_own_variables() -> None:
    with ChatTemplate("{{ messages[0].content }}|{{ x }}|{{ y.z }}") as template:
        assert template.render([{"role": "user", "content": "a"}], x=3, y={"z": "ü"}).text == "a|3|ü"


def test_a_source_with_a_model_has_its_bos_text(loaded: dict[str, Model]) -> None:
    source = "{% for m in messages %}[{{ bos_token }}{{ m.content }}{{ eos_token }}]{% endfor %}"
    model = loaded["tiny-spm"]
    assert model.bos is not None
    assert model.eos is not None
    with ChatTemplate(source, model=model) as template:
        text = template.render([{"role": "user", "content": "a"}]).text
    assert text == f"[{model.token_text(model.bos)}a{model.token_text(model.eos)}]"


def test_tools_are_shown_called_and_parsed() -> None:
    with ChatTemplate(WITH_TOOLS) as template:
        assert template.supports_tools
        assert template.capabilities["supports_tools"]
        rendered = template.render(MESSAGES[1:2], tools=TOOLS)
        assert '"name": "weather"' in rendered.text
        reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
        message = template.parse(reply)
        assert message.role == "assistant"
        assert [call.name for call in message.tool_calls] == ["weather"]
        assert json.loads(message.tool_calls[0].arguments) == {"city": "Bern"}
        assert template.parse("It rains.").content == "It rains."
        # Another render does not take the first one's syntax away.
        template.render(MESSAGES)
        assert template.parse(reply, rendered=rendered) == message
        for end in range(len(reply)):
            template.parse(reply[:end], partial=True, rendered=rendered)


def test_a_reply_without_a_render_is_read_as_one_to_a_user(template: ChatTemplate) -> None:
    message = template.parse("Hello\n🦙")
    assert (message.role, message.content, message.reasoning, message.tool_calls) == ("assistant", "Hello\n🦙", "", ())


SAID = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        SAID,
        SAID + "{% if add_generation_prompt %}go{% endif %}",
        SAID + "{% if add_generation_prompt is defined %}go{% else %}stop{% endif %}{{ x }}",
        SAID + "{% set x = 'go' if add_generation_prompt else x %}{{ x }}{% set messages = x %}{{ messages }}",
        SAID + "{# add_generation_prompt #}{% set add_generation_prompt = true %}{{ add_generation_prompt }}",
        "{% set add_generation_prompt = false %}" + SAID + "{% if add_generation_prompt %}go{% endif %}",
        "{% set ns = namespace(n='a') %}"
        + SAID
        + "{% if add_generation_prompt %}{% set ns.n = 'b' %}{% endif %}{{ ns.n }}",
        "{% set all = [] %}"
        + SAID
        + "{% if add_generation_prompt %}{% set _ = all.append('go') %}{% endif %}{{ all | join }}",
        "{% macro end() %}{{ 'go' if add_generation_prompt else 'no' }}{% endmacro %}" + SAID + "{{ end() }}",
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ns.last ~ '!' }}{% else %}{{ ns.last[0] }}{% endif %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}"
        "{{ 'go' if add_generation_prompt }}",
        "{% for m in messages %}{% if loop.last and add_generation_prompt %}!{% endif %}{{ m.content }}{% endfor %}",
        "{% if add_generation_prompt %}go{% endif %}" + SAID,
    ],
)
def test_the_texts_with_and_without_a_generation_prompt_are_jinja_s_in_either_order(source: str) -> None:
    """Of the three renders of a call some are made of others: what begins a reply is the difference of two of them."""
    jinja = jinja2.Template(source)
    expected = [jinja.render(messages=MESSAGES[1:], x="x", **more) for more in ({}, {"add_generation_prompt": True})]
    n = next((i for i, (a, b) in enumerate(zip(*expected, strict=False)) if a != b), min(map(len, expected)))
    for order in ((True, False), (False, True)):
        with ChatTemplate(source) as template:
            for prompts in order:
                rendered = template.render(MESSAGES[1:], add_generation_prompt=prompts, x="x")
                assert rendered.text == expected[prompts]
                assert rendered.generation_prompt == expected[True][n:]


@pytest.mark.parametrize("value", [1, True, 1.0, -0.0, 0.0, 1e22, 1e-7, 2**70, "é\x7f\u2028\n", None, [[]], {"a": {}}])
def test_a_variable_is_the_value_that_was_given(value: Any) -> None:
    """By whichever encoder it goes: `json` takes what the fast one is not trusted with."""
    with ChatTemplate("{{ (x if x is defined else 0) | tojson }}|{{ messages[0].content }}") as template:
        mine = template.render([{"role": "user", "content": "é"}], x=value)
        other = template.render([{"role": "user", "content": "é"}], x=value, y=(1,))  # a tuple: not for the fast one
    assert mine.text == other.text


def test_what_is_rendered_is_an_immutable_value(template: ChatTemplate) -> None:
    rendered = template.render(MESSAGES)
    assert isinstance(rendered, Rendered)
    assert pickle.loads(pickle.dumps(rendered)) == rendered
    with pytest.raises(AttributeError):
        rendered.text = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    ("messages", "kwargs", "error"),
    [
        ("text", {}, InvalidArgumentError),
        ([5], {}, InvalidArgumentError),
        ([{}], {}, InvalidArgumentError),
        ([{"role": 5, "content": "x"}], {}, InvalidArgumentError),
        ([{"role": "user", "content": 5}], {}, InvalidArgumentError),
        ([{"role": "user", "content": "\ud800"}], {}, InvalidArgumentError),
        ([{"role": "user", "content": "x"}], {"tools": 5}, InvalidArgumentError),
        ([{"role": "user", "content": "x"}], {"tools": [5]}, InvalidArgumentError),
        ([{"role": "user", "content": "x"}], {"tool_choice": "maybe"}, InvalidArgumentError),
        ([{"role": "user", "content": "x"}], {"x": float("nan")}, InvalidArgumentError),
        ([{"role": "user", "content": object()}], {}, TypeError),
    ],
)
def test_a_wrong_request_is_refused_and_the_template_still_works(
    template: ChatTemplate, messages: Any, kwargs: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        template.render(messages, **kwargs)
    assert "\n" not in str(caught.value)
    assert template.render([{"role": "user", "content": "x"}]).text


def test_a_message_of_an_error_is_bounded(model: Model) -> None:
    for char in ("a", "é", "€"):
        source = "{{ raise_exception(messages[0].content) if messages[0].content|length > 50000 else '' }}"
        with ChatTemplate(source, model=model) as template:
            with pytest.raises(TemplateError) as caught:
                template.render([{"role": "user", "content": char * 100_000}])
            text = str(caught.value)
            assert char * 100 in text and text.endswith("…") and len(text.encode()) <= 2003 and "\ufffd" not in text


def test_a_request_that_nests_too_deeply_is_refused(template: ChatTemplate) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match="nests too deeply"):
        template.render([{"role": "user", "content": "x"}], x=deep)
    with pytest.raises(LlamaCppShimError):
        template.render([{"role": "user", "content": "x"}], x=json.loads("[" * 500 + "]" * 500))
    while isinstance(deep, list):  # or its end would be the deep recursion
        deep = deep[0]


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ x",
        "{% if %}",
        "{% endfor %}",
        "{{ 1 / 0 }}{% nonsense %}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if x %}" * 5000,
        "x" * (2 << 20),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1000000000) %}{% for j in range(1000000000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
    ],
)
def test_a_broken_or_endless_template_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError) as caught, ChatTemplate(source) as template:
        template.render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_a_template_that_raises_only_for_some_requests_still_serves_the_others() -> None:
    source = "{% set text = messages[0].content %}{% if text == 'bad' %}"
    source += "{{ raise_exception('no bad words') }}{% endif %}{{ text }}"
    with ChatTemplate(source) as template:
        with pytest.raises(TemplateError, match="no bad words"):
            template.render([{"role": "user", "content": "bad"}])
        assert template.render([{"role": "user", "content": "good"}]).text == "good"


@pytest.mark.parametrize("wrong", [5, None, ["x"]])
def test_what_is_no_template_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ChatTemplate(wrong)


def test_a_template_of_two_models_is_refused(loaded: dict[str, Model]) -> None:
    with pytest.raises(InvalidArgumentError):
        ChatTemplate(loaded["tiny-llama"], model=loaded["tiny-spm"])
    with pytest.raises(TypeError):
        ChatTemplate("x", model=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="lone surrogate"):
        ChatTemplate("\ud800")


def test_a_foreign_syntax_is_refused(template: ChatTemplate) -> None:
    class Foreign:
        syntax = '{"x": 1}'

    with pytest.raises(InvalidArgumentError):
        template.parse("x", rendered=Foreign())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        template.parse(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        template.parse("\ud800")


def test_for_every_failing_step_a_render_fails_cleanly(template: ChatTemplate) -> None:
    expected = template.render(MESSAGES).text
    for n in range(1, 100):
        _native._fault_arm(n)
        try:
            template.render(MESSAGES)
        except MemoryError:
            assert _native._fault_fired()
        fired = _native._fault_fired()
        _native._fault_arm(0)
        assert template.render(MESSAGES).text == expected
        if not fired:
            break
    assert 1 < n < 99
