"""The body of a batch of messages: split as a decoder would, in short steps, and each request within its limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.api.messages.batch_body import _split, parse_batch
from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge

LIMITS = LimitSettings()
ONE = {"custom_id": "a", "params": {"model": "m", "messages": []}}
TEXTS = st.text(st.sampled_from('a"\\[]{},: \n\u00e9'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(TEXTS | st.just("requests"), VALUES, max_size=3)


@given(FIELDS, st.lists(VALUES, max_size=4), FIELDS, st.sampled_from([None, 1]))
def test_a_body_is_split_as_it_is_decoded(before: Any, items: Any, after: Any, indent: int | None) -> None:
    """Whatever its strings hold, the items are those of the list, and the rest is the object without them."""
    fields = {**before, "requests": items, **{name: value for name, value in after.items() if name != "requests"}}
    envelope, found = _split(json.dumps(fields, indent=indent, ensure_ascii=False).encode(), 100)
    assert items == [json.loads(item) for item in found]
    assert {**fields, "requests": []} == json.loads(envelope)


@given(st.binary(max_size=60) | st.text(st.sampled_from('"\\[]{},:requests '), max_size=60).map(str.encode))
def test_a_body_that_is_anything(body: bytes) -> None:
    """What is no batch is refused."""
    with pytest.raises(InvalidRequest):
        parse_batch(body, LIMITS, max_requests=10)


def test_requests_of_a_batch() -> None:
    """The requests are there as they were written, with the models of all of them."""
    body = json.dumps({"requests": [ONE, {**ONE, "custom_id": "b", "params": {"model": "n"}}], "more": 1}).encode()
    read = parse_batch(body, LIMITS, max_requests=2)
    assert ["a", "b"] == [one.custom_id for one in read.requests]
    assert [ONE["params"], {"model": "n"}] == [json.loads(bytes(one.params)) for one in read.requests]
    assert {"m", "n"} == read.models
    with pytest.raises(PayloadTooLarge, match="1 requests"):
        parse_batch(body, LIMITS, max_requests=1)


@every_case(
    "item, param",
    [
        ({**ONE, "custom_id": "a b"}, "requests[1].custom_id"),
        ({"custom_id": "b"}, "requests[1].params"),
        ({**ONE, "custom_id": "b", "params": {"stream": True}}, "requests[1].params.stream"),
        ({**ONE, "custom_id": "b", "params": {"model": 5}}, "requests[1].params"),
        (ONE, "requests[1].custom_id"),
        (5, "requests[1]"),
    ],
)
def test_requests_that_no_batch_can_have(item: Any, param: str) -> None:
    """The error names the request and its field."""
    with pytest.raises(InvalidRequest) as caught:
        parse_batch(json.dumps({"requests": [ONE, item]}).encode(), LIMITS, max_requests=10)
    assert param == caught.value.param


@every_case(
    "params",
    [
        {"messages": "a" * 200_000}, {"messages": [[]] * 60_000}, {"messages": [1.5] * 60_000},
        json.loads("[" * 300 + "]" * 300),
    ],
)  # fmt: skip
def test_each_request_has_the_limits_of_a_live_one(params: Any) -> None:
    """It is refused before it is decoded."""
    limits = LimitSettings(max_text_size=180_000)
    body = json.dumps({"requests": [ONE, {"custom_id": "b", "params": params}]}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_batch(body, limits, max_requests=10)
    assert "requests[1]" == caught.value.param


def test_the_limits_of_requests_are_not_added_up() -> None:
    """Each may have as many values as a live one."""
    limits = LimitSettings(max_text_size=180_000)
    many = [{"custom_id": f"{number}", "params": {"messages": [1.5] * 30_000}} for number in range(4)]
    assert 4 == len(parse_batch(json.dumps({"requests": many}).encode(), limits, max_requests=10).requests)


@every_case("body", [b'{"requests":["' + b"\\" * 100_001, b'{"requests":[' + b'"\\"",' * 100, b'"\\"' * 1000, b'"'])
def test_strings_without_an_end(body: bytes) -> None:
    """They are refused, and take no longer than others."""
    with pytest.raises(InvalidRequest):
        parse_batch(body, LIMITS, max_requests=10)
