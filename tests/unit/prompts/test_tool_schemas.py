"""Tools without what OpenAI's API leaves open, for templates that read it without a check."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.errors import InvalidRequest
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.template import ChatTemplate

LOOP = "{% for t in tools or [] %}{% set f = t.function %}{{ f.name }}: "
MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"
END = "{% endfor %}" + MESSAGES
PROPERTIES = "{% for name, p in f.parameters.properties.items() %} {{ name }}"
#: Each as a published template reads tools.
HABITS = {
    # gpt-oss
    "descriptions": LOOP + "{{ '// ' + f.description }}" + END,
    "parameters": LOOP + "{% for name in f.parameters.properties %} {{ name }}{% endfor %}" + END,
    "descriptions of parameters": LOOP + PROPERTIES + "{{ ' // ' + p.description }}{% endfor %}" + END,
    # Gemma 4
    "types in upper case": LOOP + PROPERTIES + " {{ p.type.upper() }}{% endfor %}" + END,
    "types of items": (
        LOOP + PROPERTIES + "{% if p.type == 'array' %} {{ p['items']['type'] + '[]' }}{% endif %}{% endfor %}" + END
    ),
    "a table of types": (
        LOOP + PROPERTIES + " {{ {'string': 'str', 'integer': 'int', 'object': 'dict', 'array': 'list', "
        "'number': 'float', 'boolean': 'bool'}[p.type] + '' }}{% endfor %}" + END
    ),
    "keys that are there": LOOP
    + PROPERTIES
    + "{% if 'enum' in p %} {{ p.enum | join('|') }}{% endif %}{% endfor %}"
    + END,
    # DeepSeek and others, whose tools without parameters are left out
    "only tools with parameters": (
        "{% for t in tools or [] if t.function.parameters %}{{ t.function.name }}: {% endfor %}"
        + END.partition("%}")[2]
    ),
    "json": LOOP + "{{ t | tojson }}" + END,
}

NAME = "get_weather"
TOOLS: dict[str, dict[str, Any]] = {
    "name alone": {},
    "null fields": {"description": None, "parameters": None, "strict": None},
    "no description": {"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    "no parameters": {"description": "Looks."},
    "empty parameters": {"parameters": {}},
    "no types": {"parameters": {"properties": {"city": {}, "unit": {"enum": ["C", "F"]}}}},
    "union": {"parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"], "enum": None}}}},
    "alternatives": {
        "parameters": {
            "type": "object",
            "properties": {"city": {"anyOf": [{"type": "null"}, {"type": "string"}], "default": None}},
        }
    },
    "references": {
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/City"},
                "near": {"type": "array", "items": {"$ref": "#/$defs/City"}},
            },
            "$defs": {"City": {"type": "object", "properties": {"name": {"type": "string"}}}},
        }
    },
    "arrays": {"parameters": {"type": "object", "properties": {"cities": {"type": "array"}}}},
}


@every_case("habit", HABITS)
def test_every_tool_with_every_habit(habit: str) -> None:
    """A tool's name and those of its parameters reach the model, whatever the template reads."""
    template = ChatTemplate(HABITS[habit], name=habit)

    def check(kind: str) -> None:
        function = TOOLS[kind]
        tool = {"type": "function", "function": {"name": NAME, **function}}
        prompt = template.render([{"role": "user", "content": "?"}], Rendering(tools=[tool]))
        assert f"{NAME}: " in prompt or (habit == "json" and NAME in prompt)
        if "p in" in HABITS[habit] or "in f.param" in HABITS[habit]:
            assert all(name in prompt for name in (function.get("parameters") or {}).get("properties", ()))

    every_case("kind", TOOLS)(check)()


def test_tools_that_a_template_takes_stay_as_they_are() -> None:
    """A template that prints tools as JSON gets them as the client sent them."""
    template = ChatTemplate(HABITS["json"], name="json")
    tool = {"type": "function", "function": {"name": NAME}}
    prompt = template.render([{"role": "user", "content": "?"}], Rendering(tools=[tool]))
    assert '{"type": "function", "function": {"name": "get_weather"}}' in prompt


@every_case("source,words", [
    (LOOP + "{% if f.name == 'bad' %}{{ raise_exception('A bad name.') }}{% endif %}" + END, "A bad name."),
    (LOOP + "{{ f.missing.deep }}" + END, "failed on these tools"),
    ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{% if tools %}{{ f(tools) }}{% endif %}" + MESSAGES, "nested too deeply"),
])  # fmt: skip
def test_errors_of_tools(source: str, words: str) -> None:
    """An error that the tools cause names them; one of the messages names these."""
    template = ChatTemplate(source, name="test")
    rendering = Rendering(tools=[{"type": "function", "function": {"name": "bad"}}])
    with pytest.raises(InvalidRequest, match=words) as caught:
        template.render([{"role": "user", "content": "?"}], rendering)
    assert "tools" == caught.value.param

    refusing = ChatTemplate(
        LOOP + END + "{% if messages | length > 1 %}{{ raise_exception('Too many.') }}{% endif %}", name="test"
    )
    with pytest.raises(InvalidRequest, match="Too many") as caught:
        refusing.render([{"role": "user", "content": "?"}] * 2, rendering)
    assert "messages" == caught.value.param
