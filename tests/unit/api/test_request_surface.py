"""The small machines of the request surface: seeds, schemas of calls, vectors."""

from __future__ import annotations

import math
from array import array

import pytest

from tests.cases import every_case
from triton_openai.api.embeddings import _render
from triton_openai.api.service import nth_seed
from triton_openai.api.tools import calls_schema, plan
from triton_openai.errors import InvalidRequest, UpstreamError
from triton_openai.parsers.tools.schema import Parameters


def tool(name: str, parameters: object = None) -> dict[str, object]:
    """Return a tool as a client sends it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@every_case("first", [0, 7, 2**63 - 1, 2**64 - 1, -5])
def test_seeds_of_further_answers(first):
    """The first is the client's; the others differ, are the same every time, and never leave what backends take."""
    seeds = [nth_seed(first, number) for number in range(5)]

    assert first == seeds[0]
    assert 5 == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds[1:])


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
    deep = plan(tools=[tool("f", nested)], tool_choice="required", functions=None, function_call=None, parallel=None)
    with pytest.raises(InvalidRequest):
        deep.guide()


def test_two_tools_of_one_name():
    """Nobody could tell which is meant."""
    with pytest.raises(InvalidRequest) as caught:
        plan(tools=[tool("f"), tool("f")], tool_choice=None, functions=None, function_call=None, parallel=None)

    assert "tools" == caught.value.param


def test_alternatives_that_multiply():
    """A schema that refers to itself thirtyfold costs a bounded number of looks, and leaves the type open."""
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 30}, "b": {"type": "integer"}}}
    parameters = Parameters(schema)

    assert frozenset() == parameters.types("a")
    assert frozenset({"integer"}) == parameters.types("b")


@every_case("value", [math.nan, math.inf, -math.inf])
@every_case("as_text", [True, False])
def test_vectors_hold_numbers(value, as_text):
    """What is no number is an error, and never null or garbage for the client."""
    with pytest.raises(UpstreamError):
        _render(array("f", [0.5, value]).tobytes(), as_text)
