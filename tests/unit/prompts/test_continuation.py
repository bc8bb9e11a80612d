"""Chats whose last message is to be continued."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.errors import InvalidRequest
from triton_openai.prompts import prompter
from triton_openai.prompts.continuation import continued
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.template import ChatTemplate

TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
KEEPING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def compiled(source: str) -> ChatTemplate:
    """Compile *source*, once."""
    return ChatTemplate(source, name="test", special_tokens=TOKENS)


def rendered(source: str, content: Any, **last: Any) -> str:
    """Return a chat's prompt with an open end."""
    template = compiled(source)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, **last}]
    return continued(messages, lambda marked: template.render(marked, Rendering(add_generation_prompt=False)))


@given(content=st.text(min_size=1))
def test_the_prompt_ends_where_the_text_does(content: str) -> None:
    """Nothing of what the template writes behind a message is there, whatever its text holds."""
    assert f"<user>Hi</><assistant>{content}" == rendered(KEEPING, content)


def test_spaces_at_the_end_are_the_templates_affair() -> None:
    """A template that trims its messages trims this one too."""
    assert "<user>Hi</><assistant>The answer is " == rendered(KEEPING, "The answer is ")
    assert "<user>Hi</><assistant>The answer is" == rendered(TRIMMING, "The answer is ")


@every_case("name", prompter.NAMES)
def test_every_built_in_template_can_be_continued(name: str) -> None:
    """The text is the last thing in the prompt."""
    template = ChatTemplate(prompter.read_builtin(name), name=name, special_tokens=TOKENS)
    content: Any = "The answer is"
    if template.wants_parts:
        content = [{"type": "text", "text": content}]
    assert rendered(prompter.read_builtin(name), content).endswith("The answer is")


def test_parts() -> None:
    """The last part is the one that goes on."""
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    prompt = rendered(source, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert prompt.endswith("[a][b")


@every_case(
    "message",
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
    ],
)
def test_what_cannot_be_continued(message: dict[str, Any]) -> None:
    """There has to be something of the assistant's to go on with."""
    with pytest.raises(InvalidRequest) as caught:
        continued([message], lambda marked: "")
    assert "continue_final_message" == caught.value.param


def test_a_template_that_hides_the_message() -> None:
    """Another end must not be taken for it."""
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ messages[0].content }}", "x")
    assert "continue_final_message" == caught.value.param
