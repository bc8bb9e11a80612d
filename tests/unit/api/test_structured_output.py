"""Structured output: each way to ask for it becomes one guide, and what is no guide is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.api.bodies import parse_json
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.structured_output import guide_of
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.generation import Guide

EVERY = frozenset({"json", "json_schema", "regex", "choice", "grammar", "structural_tag"})
SCHEMA = {"type": "object"}
TAG = {"type": "structural_tag", "format": {"a": 1}}


def guide(supported: frozenset[str] = EVERY, **fields: Any) -> Guide | None:
    """Return the guide that a request with *fields* asks for."""
    body = msgspec.json.encode({"model": "m", "prompt": "p", **fields})
    return guide_of(parse_json(body, CompletionRequest), supported)


@every_case(
    "fields, kind, value",
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"response_format": TAG}, "structural_tag", TAG),
        ({"structured_outputs": {"json_object": True}}, "json", ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": '{"type":  "object"}'}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "5"}}, "regex", 5),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"structural_tag": {"format": 1}}}, "structural_tag", {"format": 1}),
        ({"structured_outputs": {"structural_tag": '{"format": 1}'}}, "structural_tag", {"format": 1}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_grammar": '"root"'}, "grammar", "root"),
    ],
)  # fmt: skip
def test_guides(fields: dict[str, Any], kind: str, value: object) -> None:
    """The backend gets schemas and lists as JSON, and all else as it is."""
    found = guide(**fields)

    assert found is not None
    assert kind == found.kind
    assert value == (json.loads(found.value) if found.value else "")
    assert found.param.partition(".")[0] == next(iter(fields))


@every_case(
    "fields, param",
    [
        *(({"structured_outputs": {name: value}}, f"structured_outputs.{name}") for value in (0, 1.5) for name in
          ("choice", "json", "regex", "grammar", "structural_tag", "json_object")),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{}, "x": true'}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_what_is_no_guide(fields: dict[str, Any], param: str) -> None:
    """Zero is not null: it asks for something, wrongly, and must not be passed over. Nor can two be followed."""
    with pytest.raises(InvalidRequest) as caught:
        guide(**fields)

    assert param == caught.value.param


@every_case(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None, "json_object": False}}]
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    """Clients send these for what they do not use."""
    assert guide(**fields) is None


def test_a_model_without_guided_decoding() -> None:
    """It does not pretend to be held to a format."""
    with pytest.raises(UnsupportedParameter, match="it has no guided decoding"):
        guide(frozenset(), guided_regex="a")
    with pytest.raises(UnsupportedParameter, match="it supports json, regex") as caught:
        guide(frozenset({"json", "regex"}), guided_choice=["a"])
    assert "guided_choice" == caught.value.param
