"""History templates: openai_trtllm's Liquid over ``items``."""

from __future__ import annotations

import builtins
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.app import create_app
from triton_openai.config.tree import ModelSettings, Settings
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.prompts.history import HistoryTemplate
from triton_openai.prompts.messages import (
    AssistantMessage,
    ContentPart,
    DeveloperMessage,
    FunctionMessage,
    Message,
    MessageFunctionCall,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.prompter import Prompter

# With what openai_trtllm's own templates use: trimmed tags, capture, case with several values, names where there are.
NAMED = """\
{% for item in items -%}
[{{ item.identity }}{% if item.name %} ({{ item.name }}){% endif %}] {{ item.content }}
{% endfor -%}
[Assistant]"""
RENAMED = """\
{% for item in items -%}
{%- capture who -%}
    {%- case item.identity -%}
        {%- when "System", "Tool" -%}
            Room
        {%- when "User" -%}
            <guest>
        {%- else -%}
            <host>
    {%- endcase -%}
{%- endcapture -%}

{{- who }}: {{ item.content }}
{% endfor -%}
<host>:"""
CHAT: list[Message] = [
    SystemMessage(content="be kind", name="house rules"),
    SystemMessage(content="be brief"),
    AssistantMessage(content="yes?", name="unseen"),
    ToolMessage(content="21 °C", tool_call_id="t1"),
    UserMessage(content="who  are\nyou? ", name="Ann"),
    UserMessage(content="so?"),
]


TWICE = (
    "{% for item in items %}{% capture kept %}{{ item.content }}{% endcapture %}{{ kept }}\0{{ item.content }}\0"
    "{% endfor %}"
)


@cache
def prompter(text: str) -> Prompter:
    """Return a prompter without a tokenizer."""
    return Prompter.resolve(ModelSettings(history_template=text))


@every_case(
    "template, expected",
    [
        (
            NAMED,
            "[System (house rules)] be kind\n[System] be brief\n[Assistant] yes?\n[Tool] 21 °C\n"
            "[User (Ann)] who  are\nyou? \n[User] so?\n[Assistant]",
        ),
        (
            RENAMED,
            "Room: be kind\nRoom: be brief\n<host>: yes?\nRoom: 21 °C\n<guest>: who  are\nyou? \n<guest>: so?\n<host>:",
        ),
        (
            "{% for item in items %}<|{{ item.identity | downcase }}|>{{ item.content | strip }}"
            "{% unless forloop.last %}<|sep|>{% endunless %}{% endfor %}",
            "<|system|>be kind<|sep|><|system|>be brief<|sep|><|assistant|>yes?<|sep|><|tool|>21 °C<|sep|>"
            "<|user|>who  are\nyou?<|sep|><|user|>so?",
        ),
        ("{{ items | map: 'identity' | uniq | join: ',' }}", "System,Assistant,Tool,User"),
        (
            "{% assign last = items | last %}{% if last.identity == 'User' and items.size > 2 %}{{ last.content }}"
            "{% elsif last %}no{% endif %}",
            "so?",
        ),
    ],
)
def test_prompts(template: str, expected: str) -> None:
    """A template over items gives the prompt that openai_trtllm gives."""
    assert expected == prompter(template).render(CHAT)


def test_other_roles_and_contents() -> None:
    """A developer is a system, a function a tool, parts are lines, and no content is an empty text."""
    text = "{% for item in items %}{{ item.identity }}={{ item.content }};{% endfor %}"
    messages: list[Message] = [
        DeveloperMessage(content="a"),
        FunctionMessage(content="b", name="f"),
        UserMessage(content=[ContentPart(type="text", text="c"), ContentPart(type="text", text="d")]),
        AssistantMessage(content=None, refusal="no"),
        AssistantMessage(content=None),
    ]

    assert "System=a;Tool=b;User=c\nd;Assistant=no;Assistant=;" == prompter(text).render(messages)


@every_case(
    "asked, param",
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"documents": [{"text": "d"}]}, "documents"),
        ({"variables": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_it_cannot_express(asked: dict[str, Any], param: str) -> None:
    """What a history template has no place for is refused by name."""
    with pytest.raises(UnsupportedParameter) as caught:
        prompter(NAMED).render(CHAT, Rendering(**asked))

    assert param == caught.value.param


def test_tool_calls() -> None:
    """A message that called a tool has no place either."""
    call = AssistantMessage(tool_calls=[MessageToolCall(function=MessageFunctionCall(name="f", arguments="{}"))])
    with pytest.raises(UnsupportedParameter) as caught:
        prompter(NAMED).render([UserMessage(content="Hi"), call])

    assert "messages[1].tool_calls" == caught.value.param


@given(st.lists(st.text(), min_size=1, max_size=5))
@example(["a\r\nb\rc\n"])
def test_contents_are_never_templates(texts: list[str]) -> None:
    """Whatever messages hold, Liquid or not, goes into the prompt as it is."""
    template = prompter(TWICE)
    hostile = [*texts, "{{ items }}", "{% for i in (1..9) %}x{% endfor %}"]

    rendered = template.render([UserMessage(content=text) for text in hostile])

    assert "".join(f"{text}\0{text}\0" for text in hostile) == rendered


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{% for item in items %}", "is not valid Liquid"),
        ("{{ item.content | nothing_like_it }}{% nope %}", "is not valid Liquid"),
        ("{% for item in items %}{{ item.contnt }}{% endfor %}", "contnt"),
        ("{{ bos_token }}", "bos_token"),
        ("{% include 'other' %}", "other"),
        ("{% for item in items %}{{ item.content | nothing_like_it }}{% endfor %}", "nothing_like_it"),
    ],
)
def test_templates_that_cannot_work(text: str, reason: str) -> None:
    """A template that is not valid Liquid, or fails on every chat, is an error at start that names the setting."""
    with pytest.raises(ConfigurationError) as caught:
        create_app(Settings(models={"m": ModelSettings(history_template=text)}))
    assert "history_template " in caught.value.message
    assert reason in caught.value.message


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package for Liquid is not installed, the error says how to get it."""
    real = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "liquid":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigurationError, match=r"history_template needs .* 'triton-openai\[liquid\]'"):
        HistoryTemplate("A")
