"""The tools of a chat: what the template gets, which calls are allowed, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.api.bodies import parse_json
from triton_openai.api.chat import ChatRequest
from triton_openai.api.chat_tools import plan_chat_tools
from triton_openai.api.tools import ToolPlan, calls_schema
from triton_openai.errors import InvalidRequest


def tool(name: str, parameters: object = None) -> dict[str, object]:
    """Return a tool as a client sends it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(*tools: Any, **fields: str) -> dict[str, Any]:
    """Return a choice among *tools*."""
    return {"type": "allowed_tools", "allowed_tools": {"tools": tools, **fields}}


def planned(**fields: Any) -> ToolPlan:
    """Return the plan of a chat with *fields*."""
    body = parse_json(msgspec.json.encode({"messages": [], **fields}), ChatRequest)
    return plan_chat_tools(
        tools=body.tools,
        tool_choice=body.tool_choice,
        functions=body.functions,
        function_call=body.function_call,
        parallel=body.parallel_tool_calls,
    )


TOOLS = [tool("a", {"type": "object", "title": "A"}), {**tool("b"), "extra": [1]}]
NO_ARGUMENTS = {"type": "object", "properties": {}}
A, B = ({"type": "function", "function": {"name": name}} for name in "ab")


@every_case(
    "fields, mode, names, parallel",
    [
        ({}, "auto", ["a", "b"], True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", ["a", "b"], False),
        ({"tool_choice": "required"}, "required", ["a", "b"], True),
        ({"tool_choice": allowed(B)}, "auto", ["b"], True),
        ({"tool_choice": allowed(A, mode="required")}, "required", ["a"], True),
        ({"tool_choice": "none"}, "none", [], True),
    ],
)  # fmt: skip
def test_which_tools_may_be_called(fields: dict[str, Any], mode: str, names: list[str], parallel: bool) -> None:
    """The template gets just these, as the client wrote them; the schemas are those of their parameters."""
    found = planned(tools=TOOLS, **fields)

    assert (mode, parallel, False) == (found.mode, found.parallel, found.legacy)
    assert [each for each in TOOLS if each["function"]["name"] in names] == list(found.prompt)  # type: ignore[index]
    assert {name: TOOLS[0]["function"]["parameters"] if name == "a" else NO_ARGUMENTS for name in names} == (  # type: ignore[index]
        found.schemas
    )


def test_a_tool_that_must_be_called() -> None:
    """The answer is held to its parameters, and the others are shown still."""
    found = planned(tools=TOOLS, tool_choice=A)
    guide = found.guide()

    assert ("named", "a", False, 2) == (found.mode, found.name, found.parallel, len(found.prompt))
    assert guide is not None
    assert ({"type": "object", "title": "A"}, "tool_choice") == (msgspec.json.decode(guide.value), guide.param)


def test_functions_are_tools() -> None:
    """The older form means the same, one call at a time, and errors speak its words."""
    found = planned(functions=[{"name": "a"}], function_call={"name": "a"})
    assert ("named", "a", True, False) == (found.mode, found.name, found.legacy, found.parallel)
    assert [A] == list(found.prompt)
    assert not planned(functions=[{"name": "a"}], parallel_tool_calls=True).parallel
    with pytest.raises(InvalidRequest) as caught:
        planned(functions=[{"name": "a"}], function_call={"name": "b"})
    assert "function_call.name" == caught.value.param


@every_case(
    "fields, param",
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**A, "type": "web_search"}]}, "tools[0].type"),
        ({"tools": [A, tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("a", [1])]}, "tools[0].function.parameters"),
        ({"tools": [A, A]}, "tools"),
        ({"functions": [{"name": "a"}, {}]}, "functions[1].name"),
        ({"tools": [A], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [A, {"type": "custom", "custom": {"name": "a"}}]}, "tools"),
        ({"tools": [A], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [A], "tool_choice": {"type": "custom", "custom": {"name": "b"}}}, "tool_choice.custom.name"),
        ({"tools": [A], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [A], "tool_choice": B}, "tool_choice.function.name"),
        ({"tools": [A], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
        ({"tools": [A], "tool_choice": allowed(A, B)}, "tool_choice.allowed_tools.tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": A}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    """The field that is wrong is named."""
    with pytest.raises(InvalidRequest) as caught:
        planned(**fields)

    assert param == caught.value.param


def test_custom_tools_are_functions_of_one_text() -> None:
    """Custom tools are functions of one text to the model; only a regular expression holds a forced call."""
    forms: list[tuple[dict[str, Any] | None, str, str | None]] = [
        (None, "Runs.", None),
        ({"type": "text"}, "Runs.", None),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}, "start: X", None),
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}, "a+", "^(?:a+)$"),
    ]
    for form, described, pattern in forms:
        custom = {"type": "custom", "custom": {"name": "run", "description": "Runs.", "format": form}}
        found = planned(tools=[A, custom], tool_choice={"type": "custom", "custom": {"name": "run"}})
        _, shown = found.prompt
        assert ("named", "run", frozenset({"run"})) == (found.mode, found.name, found.custom)
        assert shown["function"]["description"].startswith("Runs.")
        assert described in shown["function"]["description"]
        assert found.schemas["run"] == shown["function"]["parameters"]
        assert pattern == found.schemas["run"]["properties"]["input"].get("pattern")


def test_references_move_with_their_schema():
    """Whatever a reference counts from its schema's root, the root itself too, is found again."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/X"}}, "$defs": {"X": {}}}
    moved = calls_schema({"f": schema, "a/b": {"type": "object"}}, parallel=False)

    assert ["#/$defs/tool0", "#/$defs/tool1"] == [
        variant["properties"]["parameters"]["$ref"] for variant in moved["items"]["anyOf"]
    ]
    properties = moved["$defs"]["tool0"]["properties"]
    assert ("#/$defs/tool0", "#/$defs/tool0/$defs/X") == (properties["a"]["$ref"], properties["b"]["$ref"])
    assert {} == moved["$defs"]["tool0"]["$defs"]["X"]
    assert 1 == moved["maxItems"]


def test_odd_schemas_are_no_accident():
    """A schema whose definitions are none, and one nested beyond reason, end in no traceback."""
    calls_schema({"f": {"$defs": [1], "definitions": True}}, parallel=True)
    nested: dict[str, object] = {}
    for _ in range(3000):
        nested = {"properties": nested}
    deep = plan_chat_tools(
        tools=[tool("f", nested)], tool_choice="required", functions=None, function_call=None, parallel=None
    )
    with pytest.raises(InvalidRequest):
        deep.guide()


def test_two_tools_of_one_name():
    """Nobody could tell which is meant."""
    with pytest.raises(InvalidRequest) as caught:
        plan_chat_tools(
            tools=[tool("f"), tool("f")], tool_choice=None, functions=None, function_call=None, parallel=None
        )

    assert "tools" == caught.value.param
