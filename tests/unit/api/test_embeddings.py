"""The pairs of texts that a score or rerank request asks for, and the inputs of one for embeddings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.api.bodies import parse_json
from triton_openai.api.embeddings import (
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    _pairs,
    _texts,
    inputs_of,
)
from triton_openai.errors import InvalidRequest


def pairs(**fields: Any) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs of a score request with *fields*."""
    return _pairs(parse_json(msgspec.json.encode(fields), ScoreRequest))


@every_case(
    "fields, expected, second",
    [
        ({"text_1": "a", "text_2": ["b", {"text": "c"}]}, [("a", "b"), ("a", "c")], "text_2"),
        ({"queries": ["a", "b"], "items": ["c", "d"]}, [("a", "c"), ("b", "d")], "items"),
        ({"queries": {"text": "a"}, "documents": "b"}, [("a", "b")], "documents"),
        ({"data_1": ["a"], "data_2": ["b"] * 3}, [("a", "b")] * 3, "data_2"),
    ],
)
def test_pairs(fields: dict[str, Any], expected: list[tuple[str, str]], second: str) -> None:
    """One text is scored with each of the others, several pair by pair."""
    assert (expected, second) == pairs(**fields)


@every_case(
    "fields, param, code",
    [
        ({}, "text_1", "missing_required_parameter"),
        ({"queries": "a"}, "queries", "missing_required_parameter"),
        ({"queries": "a", "documents": "b", "items": "c"}, "queries", "invalid_value"),
        ({"text_1": "a", "data_2": "b"}, "data_2", "invalid_value"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "invalid_value"),
        ({"text_1": [], "text_2": ["c"]}, "text_1", "invalid_value"),
        ({"text_1": "a", "text_2": ["b", 5]}, "text_2[1]", "invalid_type"),
        ({"text_1": "a", "text_2": ["b", {"text": "c", "image_url": "x"}]}, "text_2[1]", "unsupported_parameter"),
        ({"text_1": {"video": "x", "text": "c"}, "text_2": "a"}, "text_1", "unsupported_parameter"),
    ],
)
def test_what_is_no_pair(fields: dict[str, Any], param: str, code: str) -> None:
    """Both sides come under one pair of names, and hold texts alone."""
    with pytest.raises(InvalidRequest) as caught:
        pairs(**fields)

    assert (param, code) == (caught.value.param, caught.value.code)


def test_documents_may_have_other_fields() -> None:
    """Titles and the like are not scored."""
    body = parse_json(b'{"query": "a", "documents": ["b", {"text": "c", "title": "d"}]}', RerankRequest)

    assert ["b", "c"] == _texts(body.documents, "documents")


@every_case(
    "given, expected",
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", "invalid_value"),
        ([], "invalid_value"),
        (["a", ""], "invalid_value"),
        ([[1], []], "invalid_value"),
        (["a", [1]], "invalid_type"),
        (["a", 1], "invalid_type"),
        ([[1], 2], "invalid_type"),
    ],
)
def test_inputs(given: Any, expected: Any) -> None:
    """Texts, or lists of token ids, of which none is empty."""
    body = parse_json(msgspec.json.encode({"input": given}), EmbeddingsRequest)
    if isinstance(expected, list):
        assert expected == inputs_of(body)
        return
    with pytest.raises(InvalidRequest) as caught:
        inputs_of(body)
    assert ("input", expected) == (caught.value.param, caught.value.code)
