"""Messages with tool calls take the form that a template shows them whole in: found out by trying."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tests.cases import every_case
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.prompt_template import ToolForm
from triton_openai.prompts.template import ChatTemplate

ARGUMENTS = '{"city":"Zürich"}'
CALLS = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
OBJECT = CALLS + "{{ c.function.name }}{{ c.function.arguments | tojson }}" + END

#: Habits of published templates, each in a small template of our own, and what is found out of it.
HABITS = {
    # Qwen, Llama, GLM and most others
    "an object": (OBJECT, ToolForm()),
    # DeepSeek V3 and R1
    "text": (CALLS + "{{ c.function.name + c.function.arguments }}" + END, ToolForm(text_arguments=True)),
    # Phi 4 mini: an object would come out in Python's spelling
    "text that prints anything": (
        CALLS + "{{ c.function.name }}{{ c.function.arguments }}" + END,
        ToolForm(text_arguments=True),
    ),
    # DeepSeek V3
    "calls where the content is null": (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        ToolForm(null_content=True),
    ),
    # R1 0528: tests for null, and fails on it
    "a null that fails": (
        "{% for m in messages %}{% if m.content is none %}null{% endif %}{{ m.content + '.' }}"
        "{% for c in m.tool_calls or () %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        ToolForm(),
    ),
    # Mistral
    "ids of nine letters and digits": (
        OBJECT.replace("{{ c", "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c", 1),
        ToolForm(ids="short"),
    ),
    # Kimi K2
    "ids that are the name": (CALLS + "{{ c.id }}{{ c.function.arguments | tojson }}" + END, ToolForm(ids="named")),
    # Qwen 1.5
    "names of tools' answers": (
        OBJECT.replace("{{ m.content", "{% if m.role == 'tool' %}{{ '' + m.name }}{% endif %}{{ m.content"),
        ToolForm(needs_names=True),
    ),
    # gpt-oss
    "thinking, or words": (
        OBJECT.replace(
            "{% if m.tool_calls %}",
            "{% if m.tool_calls %}{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
            "{{ '' ~ m.thinking or m.content }}",
        ),
        ToolForm(reasoning="thinking", reasoning_alone=True),
    ),
    "reasoning": (OBJECT.replace("{% for c", "{{ m.reasoning }}{% for c"), ToolForm(reasoning="reasoning")),
    "calls in parts": (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% for c in m.tool_calls or () %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        ToolForm(),
    ),
    # Granite 3: nothing is right, so the customary form stays.
    "no calls at all": ("{% for m in messages %}{{ m.content }}{% endfor %}", ToolForm()),
    "a refusal": ("{{ raise_exception('no') }}", ToolForm()),
}


def make(source: str) -> ChatTemplate:
    """Return a template."""
    return ChatTemplate(source, name="test")


def talk(*, content: Any = None, ids: tuple[Any, Any] = ("call_1", "call_2"), names: bool = False) -> list[Any]:
    """Return prepared-from messages: a question, two calls, their answers in the other order."""
    functions = [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": ""}]
    calls = [
        {"type": "function", "function": function} | ({} if call_id is None else {"id": call_id})
        for call_id, function in zip(ids, functions, strict=True)
    ]
    answers: list[dict[str, Any]] = [{"role": "tool", "content": "12:00"}, {"role": "tool", "content": "7 degrees"}]
    for answer, call_id, name in zip(answers, reversed(ids), ("now", "get_weather"), strict=True):
        if call_id is not None:
            answer["tool_call_id"] = call_id
        if names:
            answer["name"] = name
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": calls}, *answers]


def prepared(source: str, messages: list[Any]) -> list[dict[str, Any]]:
    """Return *messages* as the template *source* wants them, having shown that it takes them."""
    template = make(source)
    found = prepare(msgspec.convert(messages, list[Message]), template)
    template.render(found)
    return found


@every_case("habit", HABITS)
def test_habits_are_found(habit: str) -> None:
    """Each template's habit is found by rendering a small conversation."""
    source, form = HABITS[habit]

    assert form == make(source).tool_form


@every_case("habit", [habit for habit, (_, form) in HABITS.items() if form.text_arguments])
def test_arguments_as_text(habit: str) -> None:
    """The client's own text goes in as it is; arguments that came as an object become text."""
    _, message, *_ = prepared(HABITS[habit][0], talk())
    parsed = talk()
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Zürich"}
    _, written, *_ = prepared(HABITS[habit][0], parsed)

    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS, "{}"]
    assert written["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}'


@every_case("content", [None, ""])
def test_content_beside_calls(content: str | None) -> None:
    """A null and an empty content become the one that the template shows calls with."""
    assert prepared(HABITS["calls where the content is null"][0], talk(content=content))[1]["content"] is None
    assert prepared(HABITS["a null that fails"][0], talk(content=content))[1]["content"] == ""
    assert prepared(HABITS["calls in parts"][0], talk(content=content))[1]["content"] == [{"type": "text", "text": ""}]


def test_ids_stay() -> None:
    """Ids that a template has no wishes for are the client's, and none is made up."""
    messages = prepared(OBJECT, talk(ids=("a b", None)))

    assert [call.get("id") for call in messages[1]["tool_calls"]] == ["a b", None]
    assert [message.get("tool_call_id") for message in messages[2:]] == [None, "a b"]


def test_short_ids() -> None:
    """Ids of other servers become nine letters and digits, the same everywhere; fitting ones stay."""
    source = HABITS["ids of nine letters and digits"][0]
    messages = prepared(source, talk(ids=("chatcmpl-tool-1", "Ab3dE6gH9")))
    first, second = (call["id"] for call in messages[1]["tool_calls"])

    assert len(first) == 9
    assert first.isalnum()
    assert second == "Ab3dE6gH9"
    assert [message["tool_call_id"] for message in messages[2:]] == [second, first]


@every_case("habit", ["ids of nine letters and digits", "ids that are the name"])
def test_missing_ids(habit: str) -> None:
    """Calls without ids get some; their answers are matched by name, else in order."""
    source = HABITS[habit][0]
    named = prepared(source, talk(ids=(None, None), names=True))
    first, second = (call["id"] for call in named[1]["tool_calls"])
    plain = prepared(source, talk(ids=(None, None)))

    assert first != second
    assert [message["tool_call_id"] for message in named[2:]] == [second, first]
    assert [message["tool_call_id"] for message in plain[2:]] == [first, second]


def test_named_ids() -> None:
    """Kimi's own ids stay; others carry the function's name, counted through the whole conversation."""
    source = HABITS["ids that are the name"][0]
    messages = prepared(source, [*talk(ids=("functions.get_weather:0", "x")), *talk(ids=("x", "y"))])
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]

    assert ids == ["functions.get_weather:0", "functions.now:1", "functions.get_weather:2", "functions.now:3"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [
        ids[i] for i in (1, 0, 3, 2)
    ]


def test_answers_to_nothing() -> None:
    """An answer whose call is not there keeps its id, or gets a fitting one; the template sees it either way."""
    stray = [*talk(), {"role": "tool", "content": "x", "tool_call_id": "who"}, {"role": "tool", "content": "y"}]

    assert prepared(HABITS["ids that are the name"][0], stray)[-2]["tool_call_id"] == "who"
    assert len(prepared(HABITS["ids of nine letters and digits"][0], stray)[-2]["tool_call_id"]) == 9
    assert "tool_call_id" not in prepared(HABITS["ids that are the name"][0], stray)[-1]


def test_names_of_answers() -> None:
    """Where a template fails without it, an answer gets the name of the function that was called."""
    source = HABITS["names of tools' answers"][0]

    assert [message["name"] for message in prepared(source, talk())[2:]] == ["now", "get_weather"]
    assert "name" not in prepared(OBJECT, talk())[2]


def test_reasoning_goes_where_it_is_read() -> None:
    """The thinking that a client sends back reaches the template under its name for it, with or without content."""
    source = HABITS["thinking, or words"][0]
    messages = talk()
    messages[1]["reasoning_content"] = "Hm."
    alone = prepared(source, messages)[1]
    messages[1]["content"] = "Look:"
    both = prepared(source, messages)[1]
    plain = prepared(OBJECT, messages)[1]

    assert (alone["thinking"], alone["content"]) == ("Hm.", "")
    assert (both["thinking"], both["content"]) == ("Hm.\nLook:", "")
    assert (plain["reasoning_content"], plain["content"]) == ("Hm.", "Look:")
    assert "reasoning_content" not in both


def test_older_functions() -> None:
    """Calls of the older API have no ids at all."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12:00"},
    ]
    found = prepared(HABITS["ids of nine letters and digits"][0], messages)

    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"]


def test_json_text_of_arguments_is_an_object() -> None:
    """Text that is no JSON object becomes one for templates that take text too."""
    messages = talk()
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps([1])

    assert '{"arguments": [1]}' == prepared(HABITS["text"][0], messages)[1]["tool_calls"][0]["function"]["arguments"]
