"""The faces alone, without sockets and without a Triton: what each API renders of the same model's answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.conformance.calls import PATHS, outcome, request, steered, text_of
from tests.faces import MODEL, Faces, running
from tests.proxy_fixture import Answer

TEXT = "one two three"
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
ALL = ("chat", "completions", "responses", "messages")


@pytest.fixture
async def faces() -> AsyncIterator[Faces]:
    """The service without sockets."""
    async with running() as service:
        yield service


async def ask(faces: Faces, face: str, prompt: str, **fields: Any) -> Answer:
    """Ask the model through *face*."""
    if face in PATHS:
        return await faces.post(PATHS[face], request(face, MODEL, prompt, **fields))
    if face == "responses":
        fields["max_output_tokens"] = fields.pop("max_tokens", 20)
        return await faces.post("/v1/responses", {"model": MODEL, "input": prompt, "store": False, **fields})
    messages = [{"role": "user", "content": prompt}]
    return await faces.post("/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 20, **fields})


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of any face, each of which may have a name."""
    lines = answer.body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def text_in(face: str, answer: Answer) -> str:
    """Return the text of a whole answer or of a stream of any face."""
    if face in PATHS:
        return text_of(face, answer)
    if answer.headers["Content-Type"].startswith("text/event-stream"):
        deltas = [event.get("delta") for event in events_of(answer)]
        return "".join(each if isinstance(each, str) else (each or {}).get("text", "") for each in deltas)
    if face == "responses":
        return str(answer.json["output"][0]["content"][0]["text"])
    return str(answer.json["content"][0]["text"])


@every_case("text", [TEXT, "", "naïve 😀 日本", 'x\n\ndata: y\r\n"\\\t\u0000\u2028</s>', "a" * 200])
@every_case("stream", [False, True])
@every_case("face", [face for face in ALL if face in PATHS])
async def test_the_text(faces: Faces, face: str, stream: bool, text: str) -> None:
    """Any text arrives as it was, whole and streamed."""
    answer = await ask(faces, face, steered(text=text), max_tokens=300, stream=stream)

    assert (200, text) == (answer.status, text_in(face, answer))


@every_case("stream", [False, True])
@every_case("face", ALL)
async def test_every_face_has_the_same_answer(faces: Faces, face: str, stream: bool) -> None:
    """The same prompt has the same text, through whichever API it is asked."""
    answer = await ask(faces, face, steered(text=TEXT), max_tokens=20, stream=stream)

    assert (200, TEXT) == (answer.status, text_in(face, answer)), answer.body


@every_case("stop, text, finish", [("o thr", "one tw", "stop"), (" two", "one", "stop"), ("nowhere", TEXT, "stop")])
@every_case("stream", [False, True])
@every_case("endpoint", PATHS)
async def test_stop_strings(faces: Faces, endpoint: str, stream: bool, stop: str, text: str, finish: str) -> None:
    """A stop string ends the answer, wherever it lies among the tokens."""
    options = {"include_usage": True} if stream else None
    answer = await ask(
        faces, endpoint, steered(text=TEXT), max_tokens=9, stop=stop, stream=stream, stream_options=options
    )

    assert (text, finish) == (outcome(endpoint, answer)["text"], outcome(endpoint, answer)["finish"])


@every_case("stream", [False, True])
@every_case("endpoint", PATHS)
async def test_the_limit(faces: Faces, endpoint: str, stream: bool) -> None:
    """The finish reason says that the limit ended the answer, and the usage counts its tokens."""
    options = {"include_usage": True} if stream else None
    answer = await ask(faces, endpoint, steered(text=TEXT), max_tokens=2, stream=stream, stream_options=options)

    assert {"text": "one two", "finish": "length", "tokens": 2} == outcome(endpoint, answer)


@every_case("stream", [False, True])
@every_case("endpoint", PATHS)
async def test_several_choices(faces: Faces, endpoint: str, stream: bool) -> None:
    """Choices are numbered, and each has its text and its end; seeds follow from the client's."""
    answer = await ask(faces, endpoint, steered(text=TEXT), max_tokens=9, n=3, seed=7, stream=stream)

    if stream:
        ends = [choice for chunk in answer.chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert [0, 1, 2] == sorted(choice["index"] for choice in ends)
    else:
        assert [0, 1, 2] == [choice["index"] for choice in answer.json["choices"]]
        assert 9 == answer.json["usage"]["completion_tokens"]
    seeds = [tensor.values[0] for sent in faces.triton.asked[-3:] for tensor in sent.inputs if tensor.name == "seed"]
    assert [7, 8, 9] == sorted(seeds)


@every_case("stream", [False, True])
async def test_several_prompts(faces: Faces, stream: bool) -> None:
    """The choices of a completion are in the order of its prompts."""
    prompts = [steered(text=text) for text in ("one", "two", "")]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 9, "stream": stream}
    answer = await faces.post("/v1/completions", body)

    choices = [choice for chunk in (answer.chunks if stream else [answer.json]) for choice in chunk["choices"]]
    texts = ["".join(one["text"] for one in choices if one["index"] == index) for index in range(3)]
    assert ["one", "two", ""] == texts


@every_case("stream", [False, True])
async def test_echo(faces: Faces, stream: bool) -> None:
    """A completion begins with its prompt if the client wants that."""
    prompt = steered("Hello", text=TEXT)
    answer = await ask(faces, "completions", prompt, max_tokens=9, echo=True, stream=stream)

    assert prompt + TEXT == text_of("completions", answer)


@every_case("fail_at, streamed, status", [(0, False, 502), (0, True, 502), (2, False, 502), (2, True, 200)])
@every_case("face", ALL)
async def test_a_failure(faces: Faces, face: str, fail_at: int, streamed: bool, status: int) -> None:
    """Before the first text an error has its status; after it, it is the last event, and nothing calls it whole."""
    prompt = steered(text=TEXT, fail_at=fail_at, error="out of luck")
    answer = await ask(faces, face, prompt, stream=streamed)

    assert b"The model failed: out of luck" in answer.body
    assert b"[DONE]" not in answer.body
    # A stream of responses begins before the model answers.
    assert answer.status == status or (face == "responses" and streamed)


@every_case(
    "fields, param",
    [
        ({"temperature": 5}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_p": "much"}, "top_p"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
@every_case("endpoint", PATHS)
async def test_mistakes(faces: Faces, endpoint: str, fields: dict[str, Any], param: str) -> None:
    """A mistake is named by the client's own name for it, before the model is asked."""
    asked = len(faces.triton.asked)
    answer = await ask(faces, endpoint, "Hello", **fields)

    assert (400, param) == (answer.status, answer.error["param"])
    assert asked == len(faces.triton.asked)


@every_case("face", ALL)
async def test_a_model_that_does_not_exist(faces: Faces, face: str) -> None:
    """Each API has its own error for it."""
    answer = (
        await ask(faces, face, "Hello", model="no_such_model")
        if face not in PATHS
        else await faces.post(PATHS[face], request(face, "no_such_model", "Hello"))
    )

    assert 404 == answer.status
    assert b"no_such_model" in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call(stream: bool) -> None:
    """A call that the model writes is a tool call of each API."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "f", "parameters": parameters}
    tools: dict[str, dict[str, Any]] = {
        "chat": {"type": "function", "function": function},
        "responses": {"type": "function", **function},
        "messages": {"name": "f", "input_schema": parameters},
    }
    async with running(tool_call_parser="hermes", chat_template=str(TEMPLATE)) as faces:
        for face, tool in tools.items():
            prompt = steered(text=call)
            fields = {} if face == "responses" else {"max_tokens": 60}
            answer = await ask(faces, face, prompt, tools=[tool], stream=stream, **fields)

            assert 200 == answer.status, answer.body
            assert b'"f"' in answer.body, face
            assert b"<tool_call>" not in answer.body, face


@every_case("stream", [False, True])
@every_case("strict", [False, True])
@every_case("face, name", [("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("completions", "max_tokens")])
async def test_more_tokens_than_fit(face: str, name: str, strict: bool, stream: bool) -> None:
    """The answer has as many as there is room for, and a header says so; with strict parameters it is refused."""
    async with running(max_model_len=100) as service:
        service.service.settings = msgspec.structs.replace(
            service.service.settings,
            api=msgspec.structs.replace(service.service.settings.api, strict_parameters=strict),
        )
        few = await ask(service, face, steered(text=TEXT), **{name: 20}, stream=stream)
        many = await ask(service, face, steered(text=TEXT), **{name: 4000}, min_tokens=3000, stream=stream)
        long = await ask(service, face, "word " * 200, **{name: 20}, stream=stream)

    assert 200 == few.status
    assert "x-max-tokens" not in few.headers
    assert (400, "context_length_exceeded") == (long.status, long.error["code"])
    if strict:
        assert (400, "context_length_exceeded") == (many.status, many.error["code"])
    else:
        assert 200 == many.status
        assert 0 < int(many.headers["x-max-tokens"]) < 100


async def test_a_truncated_prompt_keeps_room_for_the_answer() -> None:
    """A prompt that is cut to what fits leaves the tokens that the client asks for."""
    async with running(max_model_len=100) as service:
        answer = await ask(
            service, "completions", "word " * 200, max_tokens=30, truncate_prompt_tokens=-1, stream=False
        )

    assert 200 == answer.status
    assert "x-max-tokens" not in answer.headers
    # The model puts a token in front.
    assert 71 == answer.json["usage"]["prompt_tokens"]
