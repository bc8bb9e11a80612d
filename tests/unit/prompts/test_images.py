"""Images in prompts: the parts that templates take, and the placeholders for those that take text only."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.pictures import part
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.prompts.media_marks import ImageMarks
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.prompt_template import marks
from triton_openai.prompts.template import ChatTemplate

IMAGE = part("data:image/png;base64,AAAA")
_END = "{% endfor %}"
_PER_MESSAGE = "{% for message in messages %}"

#: The ways in which the model families' published templates look for images, each with what it writes.
SEEING = {
    "by type or key (Qwen-VL)": (
        f"{_PER_MESSAGE}{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
        "{% for c in message['content'] %}{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}<I>"
        "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}|{% endfor %}",
        "be brief|one <I> and <I>|",
    ),
    "by type (Llama, Gemma)": (
        f"{{%- set first = messages[0]['content'][0]['text'] -%}}{_PER_MESSAGE}{{% if message['content'] is string %}}"
        "{{ message['content'] }}{% elif message['content'] is iterable %}{% for item in message['content'] %}"
        "{% if item['type'] == 'image' %}{{ '<I>' }}{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
        "{% endfor %}{% else %}{{ raise_exception('no') }}{% endif %}|{% endfor %}",
        "be brief|one <I> and <I>|",
    ),
    "images first (LLaVA)": (
        f"{_PER_MESSAGE}{{% for c in message['content'] | selectattr('type', 'equalto', 'image') %}}<I>{_END}"
        "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}|"
        "{% endfor %}",
        "be brief|<I><I>one  and |",
    ),
    "among names (Mistral, Pixtral)": (
        f"{_PER_MESSAGE}{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}"
        "{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
        "{% elif block['type'] in ['image', 'image_url'] %}<I>{% else %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}{% endif %}|{% endfor %}",
        "be brief|one <I> and <I>|",
    ),
    "in a macro (Qwen3-VL, GLM-V)": (
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
        "{% if item.type == 'image' %}<I>{% elif item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}"
        f"{{% endif %}}{{% endmacro %}}{_PER_MESSAGE}{{{{ show(message.content) }}}}|{_END}",
        "be brief|one <I> and <I>|",
    ),
    "as image_url only": (
        f"{_PER_MESSAGE}{{% for c in message.content %}}{{% if c.type == 'image_url' %}}<I>{{% else %}}{{{{ c.text }}}}"
        "{% endif %}{% endfor %}|{% endfor %}",
        "be brief|one <I> and <I>|",
    ),
}
STRING = ChatTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}", name="string")
PARTS = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }},{% endfor %}|{% endfor %}", name="p")


def decode(*contents: Any) -> list[Message]:
    """Return a chat of a system's message and the user's *contents*."""
    given = [{"role": "system", "content": "be brief"}, *({"role": "user", "content": each} for each in contents)]
    return msgspec.json.decode(json.dumps(given), type=list[Message])


def text(value: str) -> dict[str, str]:
    """Return a text part."""
    return {"type": "text", "text": value}


@every_case("name", SEEING)
def test_templates_of_models_that_see(name: str) -> None:
    """Each writes its own placeholder, where it puts it."""
    source, expected = SEEING[name]
    template = ChatTemplate(source, name=name)
    messages = decode([text("one "), IMAGE, text(" and "), IMAGE])

    found = prepare(messages, template, marks(template, None, "messages"))

    assert expected == template.render(found)
    assert "base64" not in str(found), "templates get no data"


@every_case("template", [STRING, PARTS])
def test_templates_that_know_no_images(template: ChatTemplate) -> None:
    """Nothing is guessed: the request is refused, with what helps."""
    for setting in (None, "auto"):
        with pytest.raises(UnsupportedParameter, match="image_placeholder") as caught:
            marks(template, setting, "messages[0].content[0].image_url")
        assert "messages[0].content[0].image_url" == caught.value.param


def rendered(template: ChatTemplate, placeholder: str, *contents: Any) -> str:
    """Return the prompt of a chat with the operator's placeholder."""
    return template.render(prepare(decode(*contents), template, marks(template, placeholder, "messages")))


def test_placeholders() -> None:
    """Placeholders stand in front of the message's text, numbered through the whole request."""
    first, second = [text("a"), IMAGE, IMAGE], [IMAGE, text("b"), text("c")]

    assert "be brief|<1>\n<2>\na|<3>\nb\nc|" == rendered(STRING, "<{n}>", first, second)
    assert "be brief,|<1>\n<2>\na,|<3>\nb\nc,|" == rendered(PARTS, "<{n}>", first, second)
    assert "be brief|a|b\nc|" == rendered(STRING, "none", first, second)
    assert "be brief|<I>|" == rendered(STRING, "<I>", [IMAGE])
    assert "be brief||" == rendered(STRING, "none", [IMAGE])


def test_a_placeholder_wins_over_the_template() -> None:
    """What the operator says goes."""
    template = ChatTemplate(SEEING["by type (Llama, Gemma)"][0], name="t")

    assert "be brief|<img>\na|" == rendered(template, "<img>", [text("a"), IMAGE])


def test_placeholders_that_the_client_wrote() -> None:
    """A client that places its images itself is understood; the others are put in front."""
    assert "be brief|<I> here|" == rendered(STRING, "<I>", [text("<I> here"), IMAGE])
    assert "be brief|<I>\n<I> here|" == rendered(STRING, "<I>", [text("<I> here"), IMAGE, IMAGE])
    assert "be brief|<1>\n<2> here|" == rendered(STRING, "<{n}>", [text("<2> here"), IMAGE, IMAGE])
    with pytest.raises(InvalidRequest, match="more often") as caught:
        rendered(STRING, "<I>", [text("<I> and <I>"), IMAGE])
    assert "messages[1].content" == caught.value.param


def test_messages_without_images_are_as_ever() -> None:
    """Nothing changes for the others, not even where their text looks like a placeholder."""
    assert "be brief|say <I>|<I>\nx|" == rendered(STRING, "<I>", "say <I>", [IMAGE, text("x")])


def test_other_parts_are_refused_beside_images() -> None:
    """Audio is no image."""
    for mark in (ImageMarks(part={"type": "image"}), ImageMarks(placeholder="<I>")):
        with pytest.raises(UnsupportedParameter) as caught:
            prepare(decode([IMAGE, {"type": "input_audio", "input_audio": {}}]), STRING, mark)
        assert "messages[1].content[1]" == caught.value.param


def test_the_bare_text() -> None:
    """The template of the documents, for backends that write the rest themselves."""
    template = ChatTemplate("{{ messages[-1].content }}", name="bare")

    assert "What is it?" == rendered(template, "none", [IMAGE, text("What is it?")])
    assert "What is it?" == rendered(template, "none", [text("What is it?"), IMAGE])
