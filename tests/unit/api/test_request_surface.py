"""The small machines of the request surface: schemas and vectors."""

from __future__ import annotations

import math
from array import array

import pytest

from tests.cases import every_case
from triton_openai.api.embeddings import _embedding
from triton_openai.errors import UpstreamError
from triton_openai.parsers.tools.schema import Parameters


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
        _embedding(0, array("f", [0.5, value]).tobytes(), as_text)
