"""Structured output: what is no guide is refused, and only nothing is nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.structured_output import guide_of
from triton_openai.errors import InvalidRequest

EVERY = frozenset({"json", "json_schema", "regex", "choice", "grammar", "structural_tag"})


def request(**fields: Any) -> CompletionRequest:
    """Return a request with *fields*."""
    return CompletionRequest(model="m", prompt="p", **fields)


@every_case("name", ["choice", "json", "regex", "grammar", "structural_tag", "json_object"])
@every_case("value", [0, 0.0, 1, 1.5])
def test_numbers_are_no_guides(name: str, value: float) -> None:
    """Zero is not false: it asks for something, wrongly, and must not be passed over."""
    with pytest.raises(InvalidRequest) as caught:
        guide_of(request(structured_outputs={name: value}), EVERY)

    assert f"structured_outputs.{name}" == caught.value.param


@every_case("value", [None, False])
@every_case("name", ["choice", "json", "regex", "grammar", "structural_tag", "json_object"])
def test_null_and_false_ask_for_nothing(name: str, value: object) -> None:
    """Clients send both for what they do not use."""
    assert guide_of(request(structured_outputs={name: value}), EVERY) is None
