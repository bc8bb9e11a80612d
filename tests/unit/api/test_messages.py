"""The Messages API without a backend: what a request becomes, and what events become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.described import check
from triton_openai.api.bodies import read_within
from triton_openai.api.messages.message_events import MessageEvents, envelope, stop_reason_of
from triton_openai.api.messages.message_reader import ParsedRequest, read
from triton_openai.api.messages.types import Block, CountTokensRequest, MessagesRequest
from triton_openai.app import create_app
from triton_openai.config.tree import AccessSettings, LimitSettings, ServerSettings, Settings
from triton_openai.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    InvalidValue,
    Overloaded,
    RateLimited,
    ServiceError,
    ServiceOverloaded,
    UnsupportedParameter,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.generation import Delta, FinishReason, Usage
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
TOOL = {"name": "Bash", "input_schema": {"type": "object"}}


def request(*messages: Any, **fields: Any) -> MessagesRequest:
    """Return a request as it is decoded."""
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return read_within(json.dumps(body).encode(), MessagesRequest, LimitSettings())


def reading(*messages: Any, strict_tools: bool = False, **fields: Any) -> ParsedRequest:
    """Return a request as a conversation."""
    return read(request(*messages, **fields), strict_tools=strict_tools)


def chat(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages of the conversation, without what they leave empty."""
    found = msgspec.to_builtins(reading(*messages, **fields).conversation.messages)
    return [{key: value for key, value in message.items() if value is not None} for message in found]


def user(*blocks: Any) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    """Return an assistant's message."""
    return {**user(*blocks), "role": "assistant"}


def text(words: str, **fields: Any) -> dict[str, Any]:
    """Return a text."""
    return {"type": "text", "text": words, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    """Return what a tool answered."""
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


CALL = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
FOUND = {"type": "search_result", "source": "https://x/y", "title": "T", "content": [text("a"), text("b")]}
FOUND_TEXT = '<file name="T">\nhttps://x/y\na\nb\n</file>'
READ: dict[str, tuple[list[Any], dict[str, Any], list[tuple[str, Any]]]] = {
    "nothing": ([user()], {}, [("user", [])]),
    "a text": ([user("hi")], {}, [("user", "hi")]),
    "the same as a block": ([user(text("hi", cache_control={"type": "ephemeral"}))], {}, [("user", "hi")]),
    "system": ([user("hi")], {"system": "Help."}, [("system", "Help."), ("user", "hi")]),
    "what is not for the model": (
        [user("hi")],
        {"system": [text("x-anthropic-billing-header: cc_version=2.1;"), text("Help.")]},
        [("system", "Help."), ("user", "hi")],
    ),
    "turns of one role": ([user("a"), assistant("b"), assistant("c"), user("d")], {}, [
        ("user", "a"), ("assistant", ["b", "c"]), ("user", "d"),
    ]),
    "a late system message": ([user("a"), {"role": "system", "content": [text("b")]}], {}, [
        ("user", "a"), ("system", "b"),
    ]),
    "a result before text": ([user(text("next"), result([text("a"), text("b")]))], {}, [
        ("tool", "a\nb"), ("user", "next"),
    ]),
    "a result alone": ([user(result("a"))], {}, [("tool", "a")]),
    "no result": ([user(result(None))], {}, [("tool", "")]),
    "an error": ([user(result("no such file", is_error=True))], {}, [("tool", "Error: no such file")]),
    "an error that says so": ([user(result("Error: no", is_error=True))], {}, [("tool", "Error: no")]),
    "an image": ([user(IMAGE, text("what?"))], {}, [("user", ["data:image/png;base64,aGk=", "what?"])]),
    "an image's address": ([user({"type": "image", "source": {"type": "url", "url": "http://x/y"}})], {}, [
        ("user", ["http://x/y"]),
    ]),
    "a tool's image": ([user(result([text("see"), IMAGE]))], {}, [
        ("tool", "see"), ("user", ["data:image/png;base64,aGk="]),
    ]),
    "a document": (
        [user({"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}})],
        {},
        [("user", '<file name="T">\nd\n</file>')],
    ),
    "a document of parts": (
        [user({
            "type": "document", "title": "T", "context": "c",
            "source": {"type": "content", "content": [text("a"), IMAGE, text("b")]},
        })],
        {},
        [("user", ['<file name="T">\nc\na\nb\n</file>', "data:image/png;base64,aGk="])],
    ),
    "what a search found": (
        [user(result([FOUND]), FOUND)],
        {},
        [("tool", FOUND_TEXT), ("user", FOUND_TEXT)],
    ),
    "tools that ran at Anthropic": (
        [user("a"), assistant(
            text("b"),
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            text("c"),
        ), user("d")],
        {},
        [("user", "a"), ("assistant", ["b", "c"]), ("user", "d")],
    ),
    "a summary": ([assistant({"type": "compaction", "content": "We said hi."}), user("b")], {}, [
        ("assistant", "We said hi."), ("user", "b"),
    ]),
    "thoughts of another server": (
        [assistant({"type": "redacted_thinking", "data": "x"}, text("a")), user("b")],
        {},
        [("assistant", "a"), ("user", "b")],
    ),
}  # fmt: skip


@every_case("case", READ.values())
def test_messages(case: tuple[list[Any], dict[str, Any], list[tuple[str, Any]]]) -> None:
    """Every block becomes part of the chat's messages; what says the same becomes the same."""
    messages, fields, expected = case
    found = []
    for message in chat(*messages, **fields):
        content = message["content"]
        if isinstance(content, list):
            content = [part["text"] if part["type"] == "text" else part["image_url"] for part in content]
        found.append((message["role"], content))

    assert expected == found


def test_what_is_left_out_is_told() -> None:
    """Blocks that only Anthropic's API can read, and tools that run there, are named."""
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    thought, used = {"type": "redacted_thinking", "data": "x"}, {"type": "mcp_tool_use", "id": "m", "name": "f"}

    assert ["redacted_thinking", "mcp_tool_use", hosted["type"]] == reading(
        assistant(thought, used, text("a")), user("b"), tools=[hosted]
    ).left_out


def test_calls_and_thoughts() -> None:
    """Calls, and what was thought before them, go back to the model; also thoughts that the client never saw."""
    (hidden,) = blocks_of([Reasoning("secret")], omits_thinking=True)
    first, second = chat(
        assistant({"type": "thinking", "thinking": "hm", "signature": ""}, text("ok"), CALL),
        user(result("x")),
        assistant(msgspec.to_builtins(hidden), text("y")),
    )[::2]

    assert ("hm", "ok") == (first["reasoning_content"], first["content"])
    (call,) = first["tool_calls"]
    assert ("t1", "function", {"name": "Bash", "arguments": {"command": "ls"}}) == (
        call["id"],
        call["type"],
        call["function"],
    )
    assert "secret" == second["reasoning_content"]
    assert "secret" not in json.dumps(msgspec.to_builtins(hidden))


def test_parameters() -> None:
    """Every parameter is read."""
    schema = {"type": "object"}
    conversation = reading(
        user("a"),
        assistant("b"),
        stop_sequences=["x"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        thinking={"type": "disabled"},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}},
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ).conversation
    found = conversation.options

    assert (9, ["x"], True, 0.5, 0.9, 4) == (
        found.max_tokens, found.stop, found.stream, found.temperature, found.top_p, found.top_k,
    )  # fmt: skip
    assert "max" == found.reasoning_effort
    assert {"enable_thinking": False, "thinking": False} == found.chat_template_kwargs
    assert schema == found.response_format.json_schema.schema  # type: ignore[union-attr]
    assert found.continue_final_message
    assert not conversation.tools.parallel
    for choice, expected in (("any", "required"), ("none", "none"), ("auto", "auto")):
        plan = reading(user("a"), tools=[TOOL], tool_choice={"type": choice}).conversation.tools
        assert expected == plan.mode
    plan = reading(user("a"), tools=[TOOL], tool_choice={"type": "tool", "name": "Bash"}).conversation.tools
    assert ("named", "Bash") == (plan.mode, plan.name)


def names(*messages: Any, **fields: Any) -> list[str]:
    """Return the names of the tools that the model sees."""
    return [tool["function"]["name"] for tool in reading(*messages, **fields).conversation.tools.prompt]


def test_tools() -> None:
    """Deferred tools are shown once they are found, behind the others; hosted ones are left out, or refused."""
    tools = [{**TOOL, "name": "Later", "defer_loading": True}, {**TOOL, "name": "Never", "defer_loading": True}, TOOL]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    found = result([{"type": "tool_reference", "tool_name": "Later"}])

    assert ["Bash"] == names(user("a"), tools=[*tools, hosted])
    assert ["Bash", "Later"] == names(user(found), tools=tools)
    assert "Later" in chat(user(found), tools=tools)[0]["content"]
    with pytest.raises(UnsupportedParameter, match="web_search_20250305") as refused:
        names(user("a"), tools=[hosted], strict_tools=True)
    assert "tools[0].type" == refused.value.param


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    "an unknown block": ({"messages": [user({"type": "audio"})]}, "messages[0].content[0].type"),
    "a call by a user": ({"messages": [user("a"), assistant("b"), user(CALL)]}, "messages[2]"),
    "a result by an assistant": ({"messages": [assistant(result("a"))]}, "messages[0]"),
    "an image by the system": ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0]"),
    "a document that is no text": (
        {"messages": [user({"type": "document", "source": {**IMAGE["source"], "media_type": "application/pdf"}})]},  # type: ignore[dict-item]
        "messages[0]",
    ),
    "a tool without a schema": ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    "a tool with a wrong name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    "an unknown choice": ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    "an unknown effort": ({"output_config": {"effort": "none"}}, "output_config.effort"),
}


@every_case("case", WRONG.values())
def test_what_is_wrong(case: tuple[dict[str, Any], str]) -> None:
    """What is wrong is refused, and the field named."""
    fields, param = case
    with pytest.raises(InvalidRequest) as refused:
        reading(**{"messages": [user("a")], **fields}) if "messages" not in fields else read(
            read_within(json.dumps({"max_tokens": 1, **fields}).encode(), MessagesRequest, LimitSettings()),
            strict_tools=False,
        )
    assert param == refused.value.param


def test_a_document_that_is_no_text() -> None:
    """A document that is no text is refused by its title and type, with what to send in its place."""
    source = {"type": "base64", "media_type": "text/markdown", "data": "IyBh"}
    with pytest.raises(InvalidRequest, match=r"'a.md' is of type 'text/markdown'.*a source of type 'text'"):
        reading(user({"type": "document", "title": "a.md", "source": source}))


def test_origins() -> None:
    """Messages and options have the names that the client wrote."""
    origins = reading(user("a"), assistant("b"), user(result("c"), text("d")), system="e").conversation.origins

    assert "system" == origins.message(0).content()
    assert "messages[2]" == origins.message(4).content("[1].image_url")
    assert "messages[1]" == origins.message(2).call(0, ".type") == origins.message(2).field("audio")
    assert ["stop_sequences", "output_config.format", "tools"] == [
        origins.name(option) for option in ("stop", "response_format", "tools")
    ]


class AnswerState:
    """What a run tells of itself."""

    def __init__(self, reason: FinishReason | None = FinishReason.STOP, stop: str | int | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop
        self.usage_so_far = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8)
        self.progress = self
        self.cut = reason is FinishReason.LENGTH


class Parser:
    """Gives the events that the test chooses, piece by piece."""

    def __init__(self, pieces: Sequence[Sequence[Event]], *, cut: bool = False) -> None:
        self._pieces = list(pieces)
        self.calls = sum(isinstance(event, ToolCallStart) for piece in pieces for event in piece)
        self.cut = cut

    def feed(self, text: str, tokens: int | None = None) -> Sequence[Event]:
        return self._pieces.pop(0)

    def flush(self, *, cut: bool = False) -> Sequence[Event]:
        return self._pieces.pop(0) if self._pieces else []


def blocks_of(events: Sequence[Event], *, omits_thinking: bool) -> list[Block]:
    """Return the blocks of a whole message."""
    parser: Any = Parser([events])
    run: Any = AnswerState()
    made: Any = MessageEvents(
        "m", "m", run, parser, limited=False, omits_thinking=omits_thinking, request_id="r", whole=True
    )
    made.last(0)
    return list(made.blocks)


def stream(pieces: Sequence[Sequence[Event]], *, omits: bool = False, pings: bool = False) -> list[dict[str, Any]]:
    """Return the events of a stream; the last piece comes at its end."""
    parser: Any = Parser(pieces)
    run: Any = AnswerState()
    events = MessageEvents("msg_1", "m", run, parser, limited=False, omits_thinking=omits, request_id="r")
    data = events.keep_alive() if pings else b""
    data += events.opening() + b"".join(events.piece(0, Delta("x")) for _ in pieces[:-1])
    data += events.last(0) + asyncio.run(events.ended(None))
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\n")
        value = json.loads(body.removeprefix("data: "))
        assert f"event: {value['type']}" == name
        found.append(value)
    check("POST", "/v1/messages", 200, {"Content-Type": "text/event-stream", "x-request-id": "r"}, data)
    return found


def accumulated(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks of a stream together, as clients do."""
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    state = "between"
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (state, len(blocks)) == ("between", event["index"])
                state = "inside"
                blocks.append(event["content_block"])
                inputs.append("")
            case "content_block_delta":
                assert (state, len(blocks) - 1) == ("inside", event["index"])
                delta = event["delta"]
                kind = delta.pop("type").removesuffix("_delta")
                if kind == "input_json":
                    inputs[-1] += delta["partial_json"]
                else:
                    blocks[-1][kind] += delta[kind]
            case "content_block_stop":
                assert (state, len(blocks) - 1) == ("inside", event["index"])
                state = "between"
            case _:
                assert "between" == state
    assert "between" == state
    for block, text in zip(blocks, inputs, strict=True):
        if text:
            block["input"] = json.loads(text)
    return blocks


PIECES: dict[str, tuple[list[list[Event]], list[str]]] = {
    "nothing": ([[]], []),
    "text in pieces": ([[Content("a")], [Content("b")], []], ["text"]),
    "thoughts and text": ([[Reasoning("a")], [Reasoning("b"), Content("c")], []], ["thinking", "text"]),
    "a call": (
        [[ToolCallStart(0, "i", "f")], [ToolCallArguments(0, '{"a"')], [ToolCallArguments(0, ":1}")]],
        ["tool_use"],
    ),
    "calls without arguments": ([[ToolCallStart(0, "i", "f"), ToolCallStart(1, "j", "g")]], ["tool_use", "tool_use"]),
    "text round a call": (
        [[Content("a"), ToolCallStart(0, "i", "f"), ToolCallArguments(0, "{}")], [Content("b")]],
        ["text", "tool_use", "text"],
    ),
}


@every_case("case", PIECES.values())
def test_streams(case: tuple[list[list[Event]], list[str]]) -> None:
    """Each block opens, grows and closes before the next; the message is framed by its own events."""
    pieces, expected = case
    events = stream(pieces)

    assert expected == [block["type"] for block in accumulated(events)]
    assert "message_start" == events[0]["type"]
    assert [] == events[0]["message"]["content"]
    assert ["message_delta", "message_stop"] == [event["type"] for event in events[-2:]]
    assert {
        "input_tokens": 2,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": 8,
        "output_tokens": 4,
    } == (events[-2]["usage"])


def test_pings() -> None:
    """While nothing comes, pings go out; the first one behind the message's start, which comes once."""
    kinds = [event["type"] for event in stream([[Content("a")], []], pings=True)]

    assert ["message_start", "ping", "content_block_start"] == kinds[:3]
    assert 1 == kinds.count("message_start")


_CALLS = st.builds(
    lambda name, arguments: (name, json.dumps(arguments)),
    st.text("ab", min_size=1),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3),
)
_PARTS = st.lists(
    st.one_of(st.builds(Content, st.text()), st.builds(Reasoning, st.text(min_size=1)), _CALLS), max_size=8
)


@given(_PARTS, st.data(), st.booleans())
def test_any_stream_is_the_whole_message(parts: list[Any], data: st.DataObject, omits: bool) -> None:
    """However a turn is cut into pieces, what a client puts together is what it gets without streaming."""
    events: list[Event] = []
    calls = 0
    for part in parts:
        if isinstance(part, tuple):
            cut = data.draw(st.integers(0, len(part[1])))
            events.append(ToolCallStart(calls, f"id{calls}", part[0]))
            events += [ToolCallArguments(calls, piece) for piece in (part[1][:cut], part[1][cut:]) if piece]
            calls += 1
        else:
            events.append(part)
    cut = data.draw(st.integers(0, len(events)))

    whole = blocks_of(events, omits_thinking=omits)

    assert msgspec.to_builtins(whole) == accumulated(stream([events[:cut], events[cut:]], omits=omits))


def test_a_call_that_was_cut() -> None:
    """A call that was cut has the members that are whole: a number may have gone on, and so may a text."""
    whole = {"a": 12, "b c": {"d": ['"']}, "e": None}
    text = json.dumps(whole)
    for size in range(len(text) + 1):
        (block,) = blocks_of([ToolCallStart(0, "i", "f"), ToolCallArguments(0, text[:size])], omits_thinking=False)
        found = msgspec.to_builtins(block)
        ends = [text.index(end) + len(end) for end in ("12,", "]},", "null}")]
        members = dict(list(whole.items())[: sum(end <= size for end in ends)])
        assert {"type": "tool_use", "id": "i", "name": "f", "input": members} == found, text[:size]


def test_stop_reasons() -> None:
    """Why an answer ended, in Anthropic's words."""
    plain: Any = AnswerParser(None, None)
    call, cut = Parser([[ToolCallStart(0, "i", "f")]]), Parser([[ToolCallStart(0, "i", "f")]], cut=True)
    for progress, parser, limited, expected in (
        (AnswerState(), plain, False, ("end_turn", None)),
        (AnswerState(), call, False, ("tool_use", None)),
        (AnswerState(), cut, False, ("max_tokens", None)),
        (AnswerState(FinishReason.LENGTH), call, False, ("max_tokens", None)),
        (AnswerState(FinishReason.LENGTH), plain, True, ("model_context_window_exceeded", None)),
        (AnswerState(stop="END"), plain, False, ("stop_sequence", "END")),
        (AnswerState(stop=7), plain, False, ("end_turn", None)),
        (AnswerState(None), plain, False, (None, None)),
        (AnswerState(None), call, False, ("tool_use", None)),
    ):
        found: Any = stop_reason_of(progress, parser, limited=limited)  # type: ignore[arg-type]
        assert expected == found


def test_errors() -> None:
    """Errors have Anthropic's types; the message names the field, and says what clients look for."""
    for error, kind, message in (
        (InvalidValue("'stop' is wrong.", "stop"), "invalid_request_error", "'stop' is wrong."),
        (InvalidValue("No.", "messages[0]"), "invalid_request_error", "messages[0]: No."),
        (Overloaded("Full."), "overloaded_error", "Full."),
        (ServiceOverloaded("Full."), "overloaded_error", "Full."),
        (RateLimited("Slow.", kind="tokens", wait=1), "rate_limit_error", "Slow."),
        (UpstreamTimeout("Late."), "timeout_error", "Late."),
        (UpstreamUnavailable("Gone."), "api_error", "Gone."),
        (
            ContextLengthExceeded("x", tokens=9, limit=8),
            "invalid_request_error",
            "prompt is too long: 9 tokens > 8 maximum",
        ),
        (
            ContextLengthExceeded("x", tokens=8, limit=8),
            "invalid_request_error",
            "prompt is too long: 8 tokens > 7 maximum",
        ),
        (ContextLengthExceeded("Longer."), "invalid_request_error", "prompt is too long: Longer."),
    ):
        found = json.loads(envelope(error, "r"))
        assert {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"} == found
    run: Any = AnswerState()
    events = MessageEvents("m", "m", run, AnswerParser(None, None), limited=False, omits_thinking=False, request_id="r")
    assert asyncio.run(events.ended(ServiceError("Bad."))).startswith(
        b'event: error\ndata: {"type":"error","error":{"type":"api_error"'
    )


async def test_errors_from_before_the_handler() -> None:
    """What is refused before a handler has the request has Anthropic's form too, for its clients only."""
    settings = Settings(access=AccessSettings(api_key=("a:secret",)), server=ServerSettings(max_body_size=1024))
    version = {"anthropic-version": "2023-06-01"}
    key = {"x-api-key": "secret", "Content-Type": "application/json"}
    async with TestClient(TestServer(create_app(settings))) as client:
        for method, path, headers, body, status, kind in (
            ("POST", "/v1/messages", {}, b"{}", 401, "authentication_error"),
            ("POST", "/v1/messages?beta=true", key, b" " * 2000, 413, "request_too_large"),
            ("POST", "/v1/messages/count_tokens", key, b"[", 400, "invalid_request_error"),
            ("GET", "/v1/messages", key, None, 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", key, b"{}", 400, "invalid_request_error"),
            ("GET", "/v1/messages/batches/none", key, None, 404, "not_found_error"),
            ("POST", "/v1/messages/unknown", key, b"{}", 404, "not_found_error"),
            ("GET", "/v1/models", version, None, 401, "authentication_error"),
        ):
            async with client.request(method, path, headers=headers, data=body) as response:
                found = await response.json()
                assert (status, "error", kind) == (response.status, found["type"], found["error"]["type"]), path
                assert found["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
        async with client.get("/v1/models") as response:
            assert ["error"] == list(await response.json())


def test_a_long_conversation_is_read_once() -> None:
    """The count takes the same fields as the message; a request of an agent's size is read as a whole."""
    fields = {"messages": [user(text("x" * 150_000))], "tools": [{**TOOL, "name": f"t{n}"} for n in range(40)]}
    counted = msgspec.convert(fields, CountTokensRequest)

    assert 40 == len(read(counted, strict_tools=False).conversation.tools.prompt)
