"""Requests that are too large in themselves, found before anything is made of them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_openai.api.body_limits import check_counts, check_json
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.score import SIDES, ScoreRequest
from triton_openai.api.tools import plan
from triton_openai.config import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge

SMALL = LimitSettings(
    max_json_depth=8, max_json_values=50, max_json_string=40, max_messages=3, max_content_parts=3, max_prompts=3,
    max_tools=2,
)  # fmt: skip


def nested(depth: int) -> str:
    """Return JSON that is *depth* levels deep."""
    return "[" * (depth - 1) + "{}" + "]" * (depth - 1)


def measures(value: Any) -> tuple[int, int, int]:
    """Return the depth, the number of values, and the longest string (as it is written) of a JSON value."""
    if isinstance(value, str):
        return 0, 1, len(json.dumps(value)) - 2
    if not isinstance(value, list | dict):
        return 0, 1, 0
    keys = [len(json.dumps(key)) - 2 for key in value] if isinstance(value, dict) else []
    inner = [measures(item) for item in (value.values() if isinstance(value, dict) else value)]
    depths, counts, lengths = zip(*inner, strict=True) if inner else ((), (), ())
    return 1 + max(depths, default=0), 1 + sum(counts), max([*lengths, *keys], default=0)


json_values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{},é:'), max_size=30) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text('a"\\[{,', max_size=6), inner, max_size=4),
    max_leaves=60,
)


@given(json_values)
def test_what_is_refused(value: Any) -> None:
    """Depth and strings are exact; a list or an object that is empty may count for one value more."""
    depth, count, longest = measures(value)
    body = json.dumps(value).encode()
    refused = None
    try:
        check_json(body, SMALL)
    except InvalidRequest as error:
        refused = error

    if depth > 8 or longest > 40 or count > 50:
        assert refused is not None
    elif count + body.count(b"[]") + body.count(b"{}") <= 50:
        assert refused is None


@given(st.binary(max_size=60) | st.text('[]{}",\\', max_size=60).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    """What is no JSON is refused or left to the decoder, and nothing else happens."""
    with suppress(InvalidRequest):
        check_json(body, SMALL)


@pytest.mark.parametrize(
    "body, status, code",
    [
        (nested(9), 400, "invalid_json"),
        ('{"a": ' + "[1]," * 3 + nested(9), 400, "invalid_json"),
        (f"[{','.join('1' * 51)}]", 413, "request_too_large"),
        (json.dumps(["x" * 41]), 413, "string_above_max_length"),
        (json.dumps({"x" * 41: 1}), 413, "string_above_max_length"),
    ],
)
def test_errors(body: str, status: int, code: str) -> None:
    """They say what there is too much of."""
    with pytest.raises(InvalidRequest) as caught:
        check_json(body.encode(), SMALL)
    assert (status, code) == (caught.value.status, caught.value.code)


def test_lists_and_objects() -> None:
    """They have a limit of their own, however little is in them, and brackets in strings are none of them."""
    limits = LimitSettings(max_json_containers=10)
    check_json(json.dumps([{}, {"a": [1] * 1000, "b": "[" * 1000}, *[[]] * 6]).encode(), limits)
    with pytest.raises(PayloadTooLarge, match="more than 10 lists and objects"):
        check_json(json.dumps([{}, {"a": [1] * 1000, "b": "[" * 1000}, *[[]] * 7]).encode(), limits)


@pytest.mark.parametrize(
    "body",
    [
        nested(8),
        # What stands in strings is no structure.
        json.dumps(["[" * 40, "{" * 40, '"' * 20, "\\" * 20, '\\"[' * 8]),
        # What is no JSON is somebody else's to tell.
        "[" * 40,
        "]" * 100,
    ],
)
def test_what_is_let_through(body: str) -> None:
    """Brackets in strings do not count, and what is not JSON is left to the decoder."""
    check_json(body.encode(), SMALL)


def test_the_largest_of_bodies() -> None:
    """Tens of megabytes of the worst are judged at once: they would be gigabytes of objects."""
    for body in (b"[[],[[],[{}]]]," * 4_000_000, b"[" * 50_000_000, b'"' * 50_000_000, b'"",' * 10_000_000):
        with pytest.raises(PayloadTooLarge):
            check_json(body, LimitSettings())


USER = {"role": "user", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}


@pytest.mark.parametrize(
    "kind, body, param",
    [
        (ChatRequest, {"messages": [USER] * 4}, "messages"),
        (ChatRequest, {"messages": [PARTS, PARTS]}, "messages"),
        (ChatRequest, {"messages": [USER], "tools": [{}] * 3}, "tools"),
        (ChatRequest, {"messages": [USER], "functions": [{}] * 3}, "functions"),
        (ChatRequest, {"messages": [USER], "documents": [{}] * 4}, "documents"),
        (CompletionRequest, {"prompt": ["a"] * 4}, "prompt"),
        (CompletionRequest, {"prompt": [[1]] * 4}, "prompt"),
        *((ScoreRequest, {side: ["a"] * 4}, side) for side in dict.fromkeys(name for pair in SIDES for name in pair)),
    ],
)
def test_too_many_of_something(kind: type[msgspec.Struct], body: dict[str, Any], param: str) -> None:
    """The field is named."""
    request = msgspec.convert({"model": "m", **body}, kind)
    with pytest.raises(InvalidRequest) as caught:
        check_counts(request, SMALL)
    assert (param, "array_above_max_length") == (caught.value.param, caught.value.code)
    check_counts(request, LimitSettings())


def test_token_ids_are_one_prompt() -> None:
    """However many they are."""
    check_counts(CompletionRequest(model="m", prompt=[1] * 1000), SMALL)


def test_the_setting_decides_how_many_tools_there_may_be() -> None:
    """And no other limit below it."""
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(LimitSettings().max_tools)]
    check_counts(msgspec.convert({"model": "m", "messages": [USER], "tools": tools}, ChatRequest), LimitSettings())

    planned = plan(tools=tools, tool_choice=None, functions=None, function_call=None, parallel=None)
    assert len(tools) == len(planned.schemas)
