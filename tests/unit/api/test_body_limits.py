"""Requests that are too large in themselves, found before anything is made of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.unit.api.responses.test_stored import service
from triton_openai.answer.logits_reader import PromptScoring, score_prompts
from triton_openai.api import bodies
from triton_openai.api.bodies import JsonCheck, parse_json, read_within, separated
from triton_openai.api.chat import ChatRequest
from triton_openai.api.chat_tools import plan_chat_tools
from triton_openai.api.embeddings import SIDES, ScoreRequest
from triton_openai.config.tree import LimitSettings, ServerSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from triton_openai.serving.request_body import read_body

SMALL = LimitSettings(max_token_ids=20, max_text_size=400)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """What has no setting is small as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_DEPTH", 8)
        patch.setattr(bodies, "MAX_VALUES", 50)
        yield


def nested(depth: int) -> str:
    """Return JSON that is *depth* levels deep."""
    return "[" * (depth - 1) + "{}" + "]" * (depth - 1)


def check(body: bytes, limits: LimitSettings = SMALL) -> None:
    """Look at a whole body."""
    JsonCheck(limits).check(body)


def measures(value: Any) -> tuple[int, int, int]:
    """Return the depth of a JSON value, and how many values and token ids it has."""
    if not isinstance(value, list | dict):
        return 0, 1, 0
    inside = [measures(item) for item in (value.values() if isinstance(value, dict) else value)]
    depths, counts, ids = zip(*inside, strict=True) if inside else ((), (), ())
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        # The first one passes for a value.
        return 1, 2, len(value) - 1
    return 1 + max(depths, default=0), 1 + sum(counts), sum(ids)


json_values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{},é:'), max_size=30) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text('a"\\[{,', max_size=6), inner, max_size=4),
    max_leaves=60,
)


@given(json_values)
def test_what_is_refused(value: Any) -> None:
    """Depth and size are exact; a list or an object that is empty may count for one value more."""
    depth, count, ids = measures(value)
    body = json.dumps(value).encode()
    refused = None
    try:
        check(body)
    except InvalidRequest as error:
        refused = error

    if depth > 8 or len(body) > 400 or count > 50 or ids > 20:
        assert refused is not None
    elif count + ids + body.count(b"[]") + body.count(b"{}") <= 50 and not re.search(rb"[\d.]{41}", body):
        assert refused is None


@given(st.binary(max_size=60) | st.text('[]{}",\\', max_size=60).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    """What is no JSON is refused or left to the decoder, and nothing else happens."""
    with suppress(InvalidRequest):
        check(body)


@every_case(
    "body, status, code",
    [
        (nested(9), 400, "invalid_json"),
        ('{"a": ' + "[1]," * 3 + nested(9), 400, "invalid_json"),
        (f"[{','.join(['-1'] * 51)}]", 413, "request_too_large"),
        (f"[{','.join(['1'] * 48)}, 1.5, 2, 3]", 413, "request_too_large"),
        (f"[{', '.join(['1'] * 55)}]", 413, "request_too_large"),
        (json.dumps(["x" * 397]), 413, "string_above_max_length"),
        ("[" + "1" * 41 + "]", 400, "invalid_json"),
        ("[0." + "0" * 39 + "1]", 400, "invalid_json"),
    ],
)
def test_errors(body: str, status: int, code: str) -> None:
    """Errors say what there is too much of."""
    with pytest.raises(InvalidRequest) as caught:
        check(body.encode())
    assert (status, code) == (caught.value.status, caught.value.code)


def test_token_ids() -> None:
    """Lists of whole numbers have a limit of their own, wherever they are, and other values are none of it."""
    limits = LimitSettings(max_token_ids=100)
    check(json.dumps({"prompt": [[1, 22, 333] * 16, [4] * 50], "b": "[1,2" * 1000}).encode(), limits)
    with pytest.raises(PayloadTooLarge, match="more than 100 token ids"):
        check(json.dumps({"prompt": [[1] * 52, [4] * 52]}, indent=4).encode(), limits)
    with pytest.raises(PayloadTooLarge, match="more than 50 values"):
        check(json.dumps({"prompt": [[1] * 20, [1.5] * 50]}).encode(), limits)


def data_url(size: int) -> str:
    """Return a data URL of so many characters."""
    return "data:image/png;base64,".ljust(size, "A")


def test_images_are_no_text() -> None:
    """Data URLs count for the whole body alone, as the JSON of any language writes them."""
    limits = LimitSettings(max_text_size=3000)
    url = data_url(5000)
    with_slashes = url.replace("AAAA", r"A\/AA" + "A" * 60)
    for body in (f'["{url}", "{url}", "{"x" * 2000}"]', f'["{with_slashes}"]', f'{{"a": "{url}", "b": []}}'):
        check(body.encode(), limits)
    anthropic = ', "data": "'.join(['{"type": "base64"', "A" * 5000 + '"}'])
    check(anthropic.encode(), limits)
    check(anthropic.replace('": "', '":"').encode(), limits)
    for body in (
        anthropic.replace("AAAA", "AA A"),
        anthropic.replace('"data"', '"text"'),
        f'{{"data": ["{"A" * 5000}"]}}',
        f'["{url}", "{"x" * 3000}"]',
        f'["{url}é"]',
        f'["{url}\\n"]',
        '["data:' + "\\/" * 2000 + '"]',
        f'["{url}',
        f"[{', '.join([f'{chr(34)}data:,{chr(34)}'] * 5000)}]",
    ):
        with pytest.raises(PayloadTooLarge, match="more than 3000 bytes besides its images"):
            check(body.encode(), limits)


@every_case("before", ["", '"', "\\\\", '\\\\"', '\\"', '"a', "\\\\\\"])
def test_what_looks_like_an_image_hides_nothing(before: str) -> None:
    """Whatever stands around it, what follows is counted or is no JSON."""
    limits = LimitSettings(max_text_size=3000)
    images = (data_url(5000), 'data":"' + "A" * 5000)
    for image, behind in itertools.product(images, ("", "\\", "\\\\", "\\/")):
        body = f'["{before}{image}{behind}", {"[]," * 60} 1]'.encode()
        try:
            check(body, limits)
        except InvalidRequest:
            continue
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(body)


def test_json_in_texts_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of past tool calls, and schemas given as texts, count all together."""
    arguments = json.dumps({"a": [1.5] * 15})

    def chat(calls: int, **fields: Any) -> bytes:
        call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call] * calls}]
        return json.dumps({"model": "m", "messages": messages, **fields}).encode()

    limits = LimitSettings()
    monkeypatch.setattr(bodies, "MAX_VALUES", 100)
    read_within(chat(4), ChatRequest, limits)
    for body, param in (
        (chat(6), "messages[0].tool_calls[3]"),
        (chat(1, guided_json=json.dumps([{}] * 50)), "guided_json"),
        (chat(1, structured_outputs={"json": json.dumps([{}] * 50)}), "structured_outputs.json"),
    ):
        with pytest.raises(PayloadTooLarge, match="more than 100 values") as caught:
            read_within(body, ChatRequest, limits)
        assert param == caught.value.param


@every_case(
    "body",
    [
        nested(8),
        # What stands in strings is no structure.
        json.dumps(["[" * 40, "{" * 40, '"' * 20, "\\" * 20, '\\"[' * 8]),
        # What is no JSON is somebody else's to tell.
        "]" * 100,
        "{}" * 40,
    ],
)
def test_what_is_let_through(body: str) -> None:
    """Brackets in strings do not count, and what is not JSON is left to the decoder."""
    check(body.encode())


def test_the_largest_of_bodies() -> None:
    """Tens of megabytes of the worst are judged at once: they would be gigabytes of objects."""
    for body in (b"[[],[[],[{}]]]," * 4_000_000, b"[" * 50_000_000, b'"' * 50_000_000, b'"",' * 10_000_000):
        with pytest.raises(PayloadTooLarge):
            check(body, LimitSettings())


USER = {"role": "user", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}


@every_case(
    "kind, body, param",
    [
        (ChatRequest, {"messages": [USER] * 4097}, "messages"),
        (ChatRequest, {"messages": [PARTS]}, "messages[0].content"),
        (ChatRequest, {"messages": [USER], "documents": [{}] * 2049}, "documents"),
        *(
            (ScoreRequest, {side: ["a"] * 2049}, side)
            for side in dict.fromkeys(name for pair in SIDES for name in pair)
        ),
    ],
)
def test_too_many_of_something(kind: type[msgspec.Struct], body: dict[str, Any], param: str) -> None:
    """A field with too many of something is named."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(msgspec.json.encode(body), kind)
    assert (param, "array_above_max_length") == (caught.value.param, caught.value.code)


def test_too_many_prompts() -> None:
    """Token ids are one prompt, however many they are."""
    assert [[1] * 5000] == separated([1] * 5000, "prompt")
    for prompts in (["a"] * 2049, [[1]] * 2049):
        with pytest.raises(InvalidRequest) as caught:
            separated(prompts, "prompt")  # type: ignore[arg-type]
        assert ("prompt", "array_above_max_length") == (caught.value.param, caught.value.code)


def test_too_many_tools() -> None:
    """A request may have 512 tools, and no more."""
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(513)]
    planned = plan_chat_tools(tools=tools[:512], tool_choice=None, functions=None, function_call=None, parallel=None)
    assert 512 == len(planned.schemas)
    with pytest.raises(InvalidRequest) as caught:
        plan_chat_tools(tools=tools, tool_choice=None, functions=None, function_call=None, parallel=None)
    assert ("tools", "array_above_max_length") == (caught.value.param, caught.value.code)


async def read(*pieces: bytes, ended: bool, **limits: Any) -> bytes:
    """Return the body of a request of *pieces*, of 100 bytes at most."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(Mock(spec=asyncio.Transport))
    content = aiohttp.StreamReader(protocol, 2**16, loop=loop)
    request = make_mocked_request("POST", "/", payload=content, client_max_size=100)
    reading = asyncio.create_task(read_body(request, LimitSettings(**limits)))
    for piece in pieces:
        await asyncio.sleep(0)
        content.feed_data(piece)
    if ended:
        content.feed_eof()
    return await reading


async def test_bodies_as_they_arrive() -> None:
    """Bodies arrive in any number of pieces, up to the limit, and no longer than the client may take."""
    assert b"" == await read(ended=True)
    assert b"a" * 100 == await read(b"a" * 40, b"a" * 60, ended=True)
    with pytest.raises(PayloadTooLarge, match="limit of 100 bytes"):
        await read(b"a" * 40, b"a" * 61, ended=False)
    with pytest.raises(RequestTimeout):
        await read(ended=False, body_timeout=0.01)
    with pytest.raises(RequestTimeout):
        await read(b"a" * 50, b"a", ended=False, body_timeout=0.01)


async def test_what_many_answers_repeat() -> None:
    """A short body cannot have a prompt repeated without end; so it is with the prompt's log probabilities."""
    async with service("memory", server=ServerSettings(max_body_size=100_000)) as proxy:
        asked = {"model": "m", "prompt": "x" * 40_000, "echo": True}
        assert 200 == (await proxy.post("/v1/completions", {**asked, "n": 2})).status
        for stream in (False, True):
            refused = await proxy.post("/v1/completions", {**asked, "n": 3, "stream": stream})
            assert (400, "n") == (refused.status, refused.error["param"])
            assert "server.max_body_size" in refused.error["message"]
    generation: Any = SimpleNamespace(prompt_ids=range(250_001))
    scoring = PromptScoring(count=3, param="logprobs", timeout=1)
    with pytest.raises(InvalidRequest, match="1000004"):
        await score_prompts(cast(Any, None), cast(Any, None), [generation], scoring, cast(Any, None))
