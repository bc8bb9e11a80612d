"""Messages: what clients send, and what templates get."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.prompts.messages import AssistantMessage, Message, UserMessage
from triton_openai.prompts.past_calls import PastCalls
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.template import ChatTemplate

DECODER = msgspec.json.Decoder(list[Message])

_CALLS = "{% for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
STRING = ChatTemplate(f"{{% for m in messages %}}{{{{ m.content }}}}{_CALLS}{{% endfor %}}", name="string")
PARTS = ChatTemplate(
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", name="parts"
)
EITHER = ChatTemplate(
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endfor %}",
    name="either",
)
NULL = ChatTemplate(
    "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    name="null",
)
DEVELOPER = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'developer' %}{% endif %}{{ m.content }}{% endfor %}", name="developer"
)


FIRST_ONLY = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.content }}{% endfor %}",
    name="first only",
)


def decode(*messages: Any) -> list[Message]:
    """Decode *messages* as the request's decoder does."""
    return DECODER.decode(json.dumps(messages))


def test_every_role() -> None:
    """Every role of the API is taken; developers speak as the system, functions as tools."""
    given = decode(
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s", "name": "boss"},
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t", "tool_call_id": "call_1"},
        {"role": "function", "content": "f", "name": "look_up"},
    )

    expected = [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "s", "name": "boss"},
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t", "tool_call_id": "call_1"},
        {"role": "tool", "content": "f", "name": "look_up"},
    ]
    assert expected == prepare(given, STRING)


def test_developers_stay_where_the_template_knows_them() -> None:
    """A template that speaks of developers gets them."""
    given = decode({"role": "developer", "content": "d"})

    assert prepare(given, DEVELOPER) == [{"role": "developer", "content": "d"}]


def test_developers_are_known_in_a_list_too() -> None:
    """Templates name several roles at once, as in a list of constants."""
    source = "{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{% endif %}"
    template = ChatTemplate(source, name="list")

    assert [{"role": "developer", "content": "d"}] == prepare(decode({"role": "developer", "content": "d"}), template)


def test_developers_that_are_lost_beside_tools() -> None:
    """A template that has a developer's message only without tools gets it as the system's."""
    source = (
        "{% if tools %}{{ tools | tojson }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% elif messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages if m.role not in ['system', 'developer'] %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, name="lost")

    assert [{"role": "system", "content": "d"}] == prepare(decode({"role": "developer", "content": "d"}), template)


@every_case("role", ["critic", "", None, 3])
def test_unknown_roles_fail_to_decode(role: object) -> None:
    """A role that does not exist is refused where the request is decoded."""
    with pytest.raises(msgspec.ValidationError):
        decode({"role": role, "content": "x"})


@every_case("message", [{"content": "x"}, {"role": "user", "content": 3}, "x", {"role": "user", "name": 3}])
def test_wrong_types_fail_to_decode(message: object) -> None:
    """Wrong types are refused with the place where they stand."""
    with pytest.raises(msgspec.ValidationError, match=r"\$\[0\]"):
        decode(message)


def test_unknown_keys_are_ignored() -> None:
    """What this service does not know, it does not mind."""
    given = decode({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "weight": 1})

    assert prepare(given, STRING) == [{"role": "user", "content": "x"}]


def test_no_messages() -> None:
    """An empty list is refused."""
    with pytest.raises(InvalidRequest) as caught:
        prepare([], STRING)
    assert caught.value.param == "messages"


@every_case(
    "content,string,parts,either",
    [
        ("a", "a", ["a"], "a"),
        ([{"type": "text", "text": "a"}], "a", ["a"], "a"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb", ["a", "b"], ["a", "b"]),
        (["a", {"text": "b"}], "a\nb", ["a", "b"], ["a", "b"]),
        ([], "", [], ""),
        ("", "", [""], ""),
    ],
)
def test_content_forms(content: object, string: object, parts: object, either: object) -> None:
    """Content reaches a template in the form that it takes, whichever form the client used."""

    def wrap(value: object) -> object:
        return [{"type": "text", "text": text} for text in value] if isinstance(value, list) else value

    given = decode({"role": "user", "content": content})

    assert [{"role": "user", "content": wrap(string)}] == prepare(given, STRING)
    assert [{"role": "user", "content": wrap(parts)}] == prepare(given, PARTS)
    assert [{"role": "user", "content": wrap(either)}] == prepare(given, EITHER)


@every_case("kind, expected", [
    ("image_url", "only text is"),
    ("input_audio", "only text is"),
    ("x" * 500, "only text is"),
    ("video_url", "reads no video. Send frames of it as images"),
    ("audio_url", "part of type 'input_audio'"),
])  # fmt: skip
def test_parts_that_are_not_text(kind: str, expected: str) -> None:
    """Other parts than text are refused, with their place, and with what to send instead where there is something."""
    given = decode({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]})

    with pytest.raises(UnsupportedParameter, match=expected) as caught:
        prepare(given, STRING)
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.code == "unsupported_parameter"
    assert len(caught.value.message) < 300


@every_case("place", ["file.", ""])
def test_files_of_text(place: str) -> None:
    """A file is its text, between lines with its name, wherever its fields stand; others are refused by their field."""

    def part(**fields: str) -> list[Message]:
        kind: dict[str, object] = {"type": "file", "file": fields} if place else {"type": "input_file", **fields}
        return decode({"role": "user", "content": [kind, "What is it?"]})

    data = base64.b64encode("\ufeffa,b\n1,ü".encode()).decode()
    shown = '<file name="t.csv">\na,b\n1,ü\n</file>\nWhat is it?'
    for given in (data, f"data:text/csv;base64,{data}", f"data:text/csv;charset=utf-8;base64,{data}"):
        (message,) = prepare(part(filename="t.csv", file_data=given), STRING)
        assert shown == message["content"]
    for fields, wrong in (
        ({"file_id": "file-1"}, "file_id"),
        ({"file_url": "https://example.com/a.txt"}, "file_url"),
        ({"filename": "a.txt"}, "file_data"),
        ({"file_data": "data:application/pdf;base64,AAAA"}, "file_data"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            prepare(part(**fields), STRING)
        assert f"messages[0].content[0].{place}{wrong}" == caught.value.param


@every_case("part", [{"type": "text"}, {}, {"type": "refusal"}, {"type": "refusal", "text": "x"}])
def test_parts_without_their_text(part: dict[str, str]) -> None:
    """A part that lacks its text is refused, with its place."""
    given = decode({"role": "user", "content": "a"}, {"role": "assistant", "content": [part]})

    with pytest.raises(InvalidRequest, match="must have its text") as caught:
        prepare(given, STRING)
    assert caught.value.param == "messages[1].content[0]"


@every_case("role", ["user", "system", "developer"])
@every_case("extra", [{}, {"content": None}])
def test_messages_that_must_have_content(role: str, extra: dict[str, None]) -> None:
    """Null content says nothing, except of an assistant or a tool."""
    with pytest.raises(InvalidRequest, match="must be a string or a list") as caught:
        prepare(decode({"role": role, **extra}), STRING)
    assert caught.value.param == "messages[0].content"


def test_null_content_where_it_may_be() -> None:
    """Assistants and tools may have null content: templates get an empty text."""
    given = decode({"role": "assistant", "content": None}, {"role": "tool"}, {"role": "function", "name": "f"})

    expected = [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": ""},
        {"role": "tool", "content": "", "name": "f"},
    ]
    assert expected == prepare(given, STRING)
    assert prepare(given[:1], PARTS) == [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]


def test_tool_calls() -> None:
    """Arguments become objects, ids are kept, and content is null for templates that show calls only then."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    given = decode({"role": "assistant", "content": None, "tool_calls": [call]})
    expected = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}]

    assert prepare(given, STRING) == [{"role": "assistant", "content": "", "tool_calls": expected}]
    assert prepare(given, NULL) == [{"role": "assistant", "content": None, "tool_calls": expected}]


@every_case("arguments", ["", "  ", "{}", None, {}])
def test_calls_without_arguments(arguments: object) -> None:
    """All the ways in which clients say "no arguments" mean an empty object."""
    call = {"function": {"name": "f", "arguments": arguments}}
    given = decode({"role": "assistant", "tool_calls": [call]})

    assert prepare(given, STRING)[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_arguments_that_are_parsed_already() -> None:
    """An object instead of JSON text is taken as it is."""
    given = decode({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]})

    assert prepare(given, STRING)[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {}, "b": {}}}}},
    {"type": "function", "function": {"name": "h"}},
]


@every_case(
    "arguments,expected",
    [
        ("{", {}),
        ('{"a', {"a": None}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": "b\\u00', {"a": "b"}),
        ('{"a": "b", ', {"a": "b"}),
        ('{"a": ["b", {"c": 1', {"a": ["b", {"c": 1}]}),
        ('{"a": "b", "c": tru', {"a": "b", "c": None}),
        ('{"a": "b",}', {"a": "b"}),
        ("{'a': 'b'}", {"a": "b"}),
        ('{"a": "b "c" d"}', {"a": 'b "c" d'}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ('"b"', {"a": "b"}),
        ("b", {"a": "b"}),
        ("[1]", {"arguments": [1]}),
        ("3", {"arguments": 3}),
        ([1], {"arguments": [1]}),
        (3.5, {"arguments": 3.5}),
        (True, {"arguments": True}),
        ("}{", {"a": "}{"}),
        ("[" * 99999, {"a": "[" * 99999}),
        ('{"a": 1e999}', {"a": '{"a": 1e999}'}),
    ],
)
def test_bad_arguments(arguments: Any, expected: dict[str, Any]) -> None:
    """Past arguments that are no object become one: repaired, closed, or shown as they are; the call is named."""
    given = decode({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    repaired: list[str] = []
    prepared = prepare(given, STRING, past_calls=PastCalls(tools=TOOLS, repaired=repaired))

    assert expected == prepared[0]["tool_calls"][0]["function"]["arguments"]
    assert ["f"] == repaired


def test_long_bad_arguments_are_text() -> None:
    """Arguments that are long, or that come after many others, are shown as they are."""
    past = PastCalls(tools=TOOLS)
    short = '{"a": ' + "x" * 60_000 + ",}"
    assert {"a": "x" * 60_000} == past.read("f", short)[0]
    long = '{"a": ' + "x" * 70_000 + ",}"
    assert {"a": long} == past.read("f", long)[0]
    shown = [past.read("f", short)[0]["a"] for _ in range(10)]
    assert short == shown[-1]


@every_case("name", ["g", "h", "unknown"])
def test_bad_arguments_of_other_tools(name: str) -> None:
    """Text goes to no parameter of a tool that has several, or none."""
    for arguments in ("print(1)", "[1]"):
        given = decode({"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]})
        shown = prepare(given, STRING, past_calls=PastCalls(tools=TOOLS))[0]["tool_calls"][0]["function"]["arguments"]
        assert {"arguments": [1] if arguments == "[1]" else arguments} == shown


@every_case("arguments", [None, "", " ", "{}", {}, '{"a": 1}'])
def test_good_arguments(arguments: Any) -> None:
    """Arguments that need no repair are not named."""
    given = decode({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    repaired: list[str] = []
    prepare(given, STRING, past_calls=PastCalls(tools=TOOLS, repaired=repaired))
    assert not repaired


def test_calls_that_are_no_functions() -> None:
    """Calls of other types, and functions without a function, are refused."""
    with pytest.raises(UnsupportedParameter, match="'mcp'") as caught:
        prepare(decode({"role": "assistant", "tool_calls": [{"type": "mcp"}]}), STRING)
    assert caught.value.param == "messages[0].tool_calls[0].type"

    with pytest.raises(InvalidRequest, match="must have a 'function'") as missing:
        prepare(decode({"role": "assistant", "tool_calls": [{"id": "x"}]}), STRING)
    assert missing.value.param == "messages[0].tool_calls[0].function"

    with pytest.raises(InvalidRequest, match="must have 'custom'") as missing:
        prepare(decode({"role": "assistant", "tool_calls": [{"type": "custom"}]}), STRING)
    assert missing.value.param == "messages[0].tool_calls[0].custom"


def test_a_call_of_a_custom_tool() -> None:
    """The text of a custom tool's call is the one argument of a function."""
    given = decode({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run", "input": "1"}}]})

    assert [{"type": "function", "function": {"name": "run", "arguments": {"input": "1"}}}] == (
        prepare(given, STRING)[0]["tool_calls"]
    )


def test_an_empty_list_of_calls_is_left_out() -> None:
    """Templates ask whether there are tool calls by asking for the key."""
    nothing: tuple[Any, ...] = ([], None)
    for calls in nothing:
        given = decode({"role": "assistant", "content": "a", "tool_calls": calls})
        assert prepare(given, STRING) == [{"role": "assistant", "content": "a"}]


def test_the_deprecated_function_call() -> None:
    """An old client's function_call is a tool call."""
    given = decode({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})

    assert prepare(given, STRING)[0]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@every_case("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept(key: str) -> None:
    """Reasoning that a client sends back reaches the template, under either name."""
    given = decode({"role": "assistant", "content": "a", key: "hm"})

    assert prepare(given, STRING) == [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]


def test_refusals_are_what_the_assistant_said() -> None:
    """A refusal stands where the content would."""
    part = decode({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "name": "bot"})
    field = decode({"role": "assistant", "content": None, "refusal": "no", "name": "bot"})

    assert prepare(part, STRING) == [{"role": "assistant", "content": "no", "name": "bot"}]
    assert prepare(field, STRING) == [{"role": "assistant", "content": "no", "name": "bot"}]


def test_audio_answers_are_refused() -> None:
    """An assistant's spoken answer cannot be shown to a text model."""
    with pytest.raises(UnsupportedParameter) as caught:
        prepare(decode({"role": "assistant", "audio": {"id": "x"}}), STRING)
    assert caught.value.param == "messages[0].audio"


def test_messages_can_be_made_in_code() -> None:
    """The types are plain structs, so that other endpoints can make messages too."""
    given: list[Message] = [UserMessage(content="u"), AssistantMessage(content="a")]

    assert prepare(given, STRING) == [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


def test_late_system_messages() -> None:
    """A template that takes a system message at the beginning only gets one there, and later ones as the user's."""
    given = decode(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "system", "content": [{"type": "text", "text": "g"}]},
    )

    assert [("system", "a\n\nb"), ("user", "c\n\nd\n\ne"), ("assistant", "f"), ("user", "g")] == [
        (message["role"], message["content"]) for message in prepare(given, FIRST_ONLY)
    ]
    assert 7 == len(prepare(given, STRING))
    # Nothing changes where the template takes what there is.
    assert ["user", "user"] == [message["role"] for message in prepare([given[2], given[4]], FIRST_ONLY)]
