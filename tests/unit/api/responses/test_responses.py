"""The Responses API's reader and renderer, without a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.described import check
from triton_openai.api.agents import seal
from triton_openai.api.bodies import read_within
from triton_openai.api.responses.item_events import replayed
from triton_openai.api.responses.items import input_items, normalize_items
from triton_openai.api.responses.objects import ResponseObject, ResponsesRequest
from triton_openai.api.responses.request_reader import ParsedRequest, ToolName, read
from triton_openai.api.responses.response_events import ResponseEvents, terminal_events
from triton_openai.config.tree import LimitSettings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, ServiceError, ServiceOverloaded
from triton_openai.generation import Delta, FinishReason, TokenLogprob, Usage
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.prompts.messages import AssistantMessage

# What Codex CLI sends with a model that it does not know, shortened.
CODEX: dict[str, Any] = json.loads((Path(__file__).parents[3] / "fixtures" / "codex.json").read_text())


def reading(fields: dict[str, Any], *, strict: bool = False) -> ParsedRequest:
    """Read a request as the handler does."""
    body = read_within(json.dumps({"model": "m", **fields}).encode(), ResponsesRequest, LimitSettings())
    items = [(f"input[{number}]", item) for number, item in enumerate(input_items(body))]
    return read(body, items, strict_tools=strict, effort=None)


def test_what_codex_sends() -> None:
    """A conversation with thinking, calls of a namespace and of a custom tool becomes a chat with functions."""
    conversation = reading(CODEX).conversation
    system, user, first, done, second, patched = map(msgspec.to_builtins, conversation.messages)

    assert ("developer", "user", "tool", "tool") == tuple(each["role"] for each in (system, user, done, patched))
    assert ("Hm.", "Wait.") == (first["reasoning_content"], first["content"][0]["text"])
    names = [message["tool_calls"][0]["function"]["name"] for message in (first, second)]
    assert ["multi_agent_v1__wait_agent", "apply_patch"] == names
    assert {"input": "*** Begin"} == json.loads(second["tool_calls"][0]["function"]["arguments"])
    assert ("call_1", "done") == (done["tool_call_id"], done["content"])
    assert ["exec_command", "apply_patch", "multi_agent_v1__wait_agent"] == [
        tool["function"]["name"] for tool in conversation.tools.prompt
    ]
    assert "start: x" in conversation.tools.prompt[1]["function"]["description"]
    assert conversation.options.stream


def test_turns_of_the_assistant() -> None:
    """Thinking, text and calls in a row are one message; text or thinking behind them begins the next."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    for items, expected in (
        ([thought, said, call, call], ["t a cc"]),
        ([call, said], [" . c", " a "]),
        ([said, said], [" a ", " a "]),
        ([said, thought, call], [" a ", "t . c"]),
        ([thought], ["t . "]),
        ([said, {**call, "status": "incomplete", "arguments": '{"a'}], [" a "]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": seal("x")}, call], ["x . c"]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, call], [" . c"]),
        ([{"type": "compaction", "encrypted_content": seal("x")}], [" Summary of the conversation so far:\nx "]),
    ):
        found = [
            f"{message.reasoning_content or ''} {message.content or '.'} {'c' * len(message.tool_calls or ())}"
            for message in reading({"input": items}).conversation.messages
            if isinstance(message, AssistantMessage)
        ]
        assert expected == found


def test_tool_choices() -> None:
    """All forms name tools as the client calls them."""
    tools = CODEX["tools"]
    wait = {"type": "function", "name": "wait_agent", "namespace": "multi_agent_v1"}
    custom = {"type": "custom", "name": "apply_patch"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [wait, custom, {"type": "web_search"}]}
    plan = reading({"input": "x", "tools": tools, "tool_choice": allowed}).conversation.tools

    assert ("required", ["multi_agent_v1__wait_agent", "apply_patch"]) == (plan.mode, list(plan.schemas))
    plan = reading({"input": "x", "tools": tools, "tool_choice": custom}).conversation.tools
    assert ("named", "apply_patch") == (plan.mode, plan.name)
    for wrong in ({"type": "web_search"}, {"type": "function", "name": "wait_agent"}, {"type": ["function"]}):
        with pytest.raises(InvalidRequest):
            reading({"input": "x", "tools": tools, "tool_choice": wrong})


def test_hosted_tools_can_be_refused() -> None:
    """A strict service names what it does not have."""
    with pytest.raises(InvalidRequest, match="web_search") as caught:
        reading(CODEX, strict=True)
    assert "tools[3].type" == caught.value.param


@every_case("param, item", [
    ("input[0].type", {"type": ["message"]}),
    ("input[0].type", {"type": {"a": "message"}}),
    ("input[0].type", {"type": "unheard_of"}),
    *(("input[0].content", {"role": "user", "content": content}) for content in (5, True, {"text": "a"})),
    ("input[0].content[0]", {"role": "assistant", "content": [5]}),
    ("input[0].call_id", {"type": "function_call", "name": "f"}),
    ("input[0].role", {"role": "nobody", "content": ""}),
    ("input[0].content[0].text", {"role": "user", "content": [{"type": "input_text", "text": 1}]}),
    ("input[0].tools[0].type", {"type": "additional_tools", "tools": [{}]}),
    ("input[0]", {"type": "compaction", "encrypted_content": "x"}),
])  # fmt: skip
def test_bad_items(param, item):
    """A wrong item is the client's mistake, with its place; it gets an id before anybody reads it."""
    normalize_items([item], "s", "input")
    with pytest.raises(InvalidRequest) as caught:
        reading({"input": [item]})
    assert param == caught.value.param


def test_names_in_include() -> None:
    """Names that OpenAI's document has are taken, whether or not this service has such items; others are refused."""
    known = ["reasoning.encrypted_content", "web_search_call.action.sources", "message.output_text.logprobs"]

    assert reading({"input": "x", "include": known}).conversation.options.logprobs
    with pytest.raises(InvalidRequest, match="usage_costs") as caught:
        reading({"input": "x", "include": [*known, "usage_costs"]})
    assert ("include[3]", "invalid_value") == (caught.value.param, caught.value.code)


def test_origins() -> None:
    """Messages and options have the names that the client wrote."""
    origins = reading(CODEX).conversation.origins

    assert "input[0].content[1].image_url" == origins.message(0).content("[1].image_url")
    assert "input[4].arguments" == origins.message(2).call(0, ".function.arguments")
    assert "input[4]" == origins.message(2).call(0, ".function")
    assert "input[5].output" == origins.message(3).content()
    options = ("messages", "response_format", "reasoning_effort", "top_p")
    assert ["input", "text.format", "reasoning.effort", "top_p"] == [origins.name(option) for option in options]


def test_what_is_wrong_with_a_tool() -> None:
    """A wrong tool is named with its path, wherever it is; and so are too many of them."""
    wrong: list[tuple[Any, str]] = [
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": "a b"}], "tools[0].name"),
        ([{"type": "custom", "name": "a b"}], "tools[0].name"),
        ([{"type": "function", "name": "a", "parameters": [1]}], "tools[0].parameters"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "!"}]}], "tools[0].tools[0].name"),
        ([{"type": "function", "name": "a"}] * 2, "tools"),
        ([{"type": "function", "name": f"f{n}"} for n in range(513)], "tools"),
    ]
    for tools, param in wrong:
        with pytest.raises(InvalidRequest) as caught:
            reading({"input": "x", "tools": tools})
        assert param == caught.value.param
    items = [{"type": "additional_tools", "tools": wrong[1][0]}]
    with pytest.raises(InvalidRequest) as caught:
        reading({"input": items})
    assert "input[0].tools[0].name" == caught.value.param


def test_kept_items_are_whole() -> None:
    """Items are kept with what the API requires of them, which clients may leave out."""
    calls = [
        {"type": f"{kind}{end}", "call_id": "c"} for kind in ("function_call", "custom_tool_call")
        for end in ("", "_output")
    ]  # fmt: skip
    kept = normalize_items(
        [*calls, {"role": "assistant", "content": "a"}, {**calls[0], "status": "incomplete"}], "s", "input"
    )
    assert [*["completed"] * 5, "incomplete"] == [item["status"] for item in kept]
    whole = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    assert whole == kept[4]["content"]
    for part in ({"type": "output_text", "text": "a"}, {"type": "text", "text": "a"}, {"text": "a"}, "a"):
        (parted,) = normalize_items([{"role": "assistant", "content": [part]}], "s", "input")
        assert whole == parted["content"]
    (asked,) = normalize_items([{"role": "user", "content": [{"type": "text", "text": "a"}, "a"]}], "s", "input")
    assert [{"type": "input_text", "text": "a"}] * 2 == asked["content"]


def test_origins_after_truncation() -> None:
    """What is left of a conversation keeps its instructions, and its paths in the request."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields = {"instructions": "i", "input": [*turns, {"role": "developer", "content": "d"}, *turns, *turns]}
    conversation = reading(fields).conversation
    conversation.keep([0, 3, 4, 5, 6, 7])
    assert ["system", "developer", "user", "assistant", "user", "assistant"] == [
        msgspec.to_builtins(message)["role"] for message in conversation.messages
    ]
    assert "input[3].content[0].image_url" == conversation.origins.message(2).content("[0].image_url")
    conversation.keep([0, 1, 4, 5])
    assert "input[5].content" == conversation.origins.message(2).content()


class FakeRun:
    """A run that has ended."""

    def __init__(self, reason: FinishReason | None = FinishReason.STOP) -> None:
        self.progress = self
        self.finish_reason = reason
        self.cut = reason is FinishReason.LENGTH
        self.usage = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)


class Scripted:
    """A parser that finds what the test says: a list of events for each text, and the rest at the end."""

    plain = False

    def __init__(self, *found: list[Event], cut: bool = False) -> None:
        self._found = list(found)
        self.cut, self.reasoning_tokens, self.calls = cut, 1, 0

    def feed(self, text: str, tokens: int | None) -> list[Event]:
        return self._found.pop(0)

    def flush(self, *, cut: bool = False) -> list[Event]:
        return [event for events in self._found for event in events]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Read events, which are as they are described."""
    check("POST", "/v1/responses", 200, {"Content-Type": "text/event-stream", "x-request-id": "r"}, data)
    return [json.loads(block.partition("data: ")[2]) for block in data.decode().split("\n\n")[:-1]]


def renderer(parser: Any = None, *, reason: FinishReason | None = FinishReason.STOP, **options: Any) -> ResponseEvents:
    """Return a renderer of a response."""
    response = ResponseObject(id="resp_0", created_at=1, model="m", reasoning={}, text={})
    run: Any = FakeRun(reason)
    return ResponseEvents(
        response, run, parser or AnswerParser(None, None), **{"names": {}, "sealed": False, **options}
    )


def rendered(events: ResponseEvents, *deltas: Delta) -> list[dict[str, Any]]:
    """Render a whole stream; the opening comes after the first text, as in a stream."""
    pieces = b"".join([events.piece(0, delta) for delta in deltas])
    return events_of(events.opening() + pieces + events.last(0) + asyncio.run(events.ended(None)))


def short(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without what begins and ends every stream."""
    assert ["response.created", "response.in_progress"] == [each["type"] for each in events[:2]]
    return [each["type"].removeprefix("response.") for each in events[2:]]


MESSAGE = ["output_text.done", "content_part.done", "output_item.done"]


def test_plain_text() -> None:
    """Text is a message, in pieces and whole."""
    events = rendered(renderer(), Delta("a"), Delta('\n"b'))

    opened = ["output_item.added", "content_part.added"]
    assert [*opened, "output_text.delta", "output_text.delta", *MESSAGE, "completed"] == short(events)
    assert 'a\n"b' == events[-2]["item"]["content"][0]["text"] == "".join(each.get("delta", "") for each in events)
    response = events[-1]["response"]
    assert (events[-2]["item"], "completed") == (response["output"][0], response["status"])
    assert {"cached_tokens": 2, "cache_write_tokens": 0} == response["usage"]["input_tokens_details"]
    assert [] == events[0]["response"]["output"] == events[2]["item"]["content"]


def test_every_kind_of_item() -> None:
    """Thinking, text, a function of a namespace and a custom tool are items of their own, in their order."""
    parser = Scripted(
        [Reasoning("Hm")],
        [Reasoning("."), Content("Hi")],
        [ToolCallStart(0, "c0", "ns__f"), ToolCallArguments(0, '{"a"'), ToolCallArguments(0, ":1}")],
        [ToolCallStart(1, "c1", "patch"), ToolCallArguments(1, '{"input": "x\\ny"}')],
        [ToolCallStart(2, "c2", "g")],
    )
    names = {"ns__f": ToolName("f", "ns"), "patch": ToolName("patch", None, True)}
    events = rendered(renderer(parser, names=names, sealed=True), *[Delta("x")] * 4)

    added = ["output_item.added"]
    part, done = ["content_part.added"], ["content_part.done", "output_item.done"]
    called = ["function_call_arguments.done", "output_item.done"]
    assert [
        *added, *part, *["reasoning_text.delta"] * 2, "reasoning_text.done", *done,
        *added, *part, "output_text.delta", *MESSAGE,
        *added, *["function_call_arguments.delta"] * 2, *called,
        *added, "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        *added, "function_call_arguments.delta", *called, "completed",
    ] == short(events)  # fmt: skip
    thought, message, function, custom, bare = events[-1]["response"]["output"]
    assert ("Hm.", seal("Hm.")) == (thought["content"][0]["text"], thought["encrypted_content"])
    assert "Hi" == message["content"][0]["text"]
    assert ("f", "ns", '{"a":1}', "c0") == tuple(function[key] for key in ("name", "namespace", "arguments", "call_id"))
    assert ("custom_tool_call", "patch", "x\ny") == (custom["type"], custom["name"], custom["input"])
    assert ("g", "{}") == (bare["name"], bare["arguments"])
    assert 1 == events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"]


def test_reasoning_as_a_summary() -> None:
    """A client that asks for a summary gets the whole reasoning as one, in its own events and in the item."""
    for wanted in ("auto", "concise", "detailed"):
        stream = renderer(Scripted([Reasoning("H")], [Reasoning("m"), Content("Hi")]), sealed=True)
        stream.response.reasoning = {"summary": wanted}
        stream.__post_init__()
        events = rendered(stream, Delta("x"), Delta("y"))

        part = "reasoning_summary_part"
        text = ["reasoning_summary_text.delta"] * 2 + ["reasoning_summary_text.done"]
        assert ["output_item.added", f"{part}.added", *text, f"{part}.done", "output_item.done"] == short(events)[:7]
        assert {0} == {event["summary_index"] for event in events[3:8]}
        thought, message = events[-1]["response"]["output"]
        assert ([{"type": "summary_text", "text": "Hm"}], []) == (thought["summary"], thought["content"])
        assert (seal("Hm"), "Hi") == (thought["encrypted_content"], message["content"][0]["text"])
        # It comes back with the next request.
        (read_again,) = reading({"input": [{**thought, "encrypted_content": None}]}).conversation.messages
        assert "Hm" == msgspec.to_builtins(read_again)["reasoning_content"]


@every_case("param, fields", [
    ("metadata", {"metadata": {f"k{n}": "" for n in range(17)}}),
    ("metadata", {"metadata": {"k" * 65: ""}}),
    ("metadata", {"metadata": {"k": "v" * 513}}),
    ("metadata", {"metadata": {"k": 1}}),
    ("reasoning.summary", {"reasoning": {"summary": "short"}}),
    ("text.verbosity", {"text": {"verbosity": "most"}}),
])  # fmt: skip
def test_fields_out_of_range(param, fields):
    """Fields out of range are refused by name; at the limit they are taken."""
    with pytest.raises(InvalidRequest) as caught:
        reading({"input": "x", **fields})
    assert param == caught.value.param
    reading({"input": "x", "metadata": {f"{n:064}": "v" * 512 for n in range(16)}})


def test_ends() -> None:
    """The last event tells how it ended, and so does the last item."""
    cut = rendered(renderer(reason=FinishReason.LENGTH), Delta("a"))
    assert ("response.incomplete", {"reason": "max_output_tokens"}) == (
        cut[-1]["type"], cut[-1]["response"]["incomplete_details"],
    )  # fmt: skip
    assert "incomplete" == cut[-2]["item"]["status"]
    call: list[Event] = [ToolCallStart(0, "c", "f"), ToolCallArguments(0, '{"a')]
    assert "incomplete" == rendered(renderer(Scripted(call, cut=True)), Delta("a"))[-2]["item"]["status"]
    empty = rendered(renderer())
    assert [""] == [each["content"][0]["text"] for each in empty[-1]["response"]["output"]]


@every_case("error, code", [
    (ServiceError("No."), "server_error"),
    (ServiceOverloaded("No."), "server_is_overloaded"),
    (ContextLengthExceeded("No."), "context_length_exceeded"),
])  # fmt: skip
def test_failures(error, code):
    """A failure ends the open item, is told as an error, and last as the failed response."""
    stream = renderer()
    events = events_of(stream.opening() + stream.piece(0, Delta("a")) + asyncio.run(stream.ended(error)))
    assert ["error", "response.failed"] == [each["type"] for each in events[-2:]]
    assert (code, "No.", None) == tuple(events[-2][key] for key in ("code", "message", "param"))
    assert ("failed", code) == (events[-1]["response"]["status"], events[-1]["response"]["error"]["code"])
    assert "incomplete" == events[-1]["response"]["output"][0]["status"]
    # Before the first text too.
    stream = renderer()
    assert ["error", "failed"] == short(events_of(asyncio.run(stream.ended(error))))


def test_signs_of_life() -> None:
    """What keeps the connection alive opens the response first; after that it is an event that changes nothing."""
    stream = renderer()
    sent = stream.keep_alive() + stream.keep_alive()
    assert b"" == stream.opening()
    sent += stream.piece(0, Delta("a")) + stream.last(0) + asyncio.run(stream.ended(None))
    assert ["in_progress", "output_item.added"] == short(events_of(sent))[:2]


def test_log_probabilities() -> None:
    """Log probabilities come with their text, and whole with its end."""
    entry = TokenLogprob("a", -0.5, b"a")
    events = rendered(renderer(), Delta("a", logprobs=[entry]), Delta("b"), Delta("", logprobs=[entry]))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [1, 0, 1] == [len(each["logprobs"]) for each in deltas]
    assert 2 == len(events[-1]["response"]["output"][0]["content"][0]["logprobs"])


def test_inputs_of_custom_tools() -> None:
    """What is no object with the text is passed on as the model wrote it; of one that was cut, the text so far is."""
    for arguments, text in (
        ('{"input":"a"}', "a"), ('{"patch":"a"}', "a"), ('{"a":"b","c":"d"}', '{"a":"b","c":"d"}'),
        ('{"input":1}', '{"input":1}'), ("[1]", "[1]"), ("", ""), ("{", ""), ('{"inp', ""), ('{"input":', ""),
        ('{"input": "a b', "a b"), (r'{"input":"a\n\"', 'a\n"'), ('{"input":"a\\', "a"), (r'{"input":"a\u00', "a"),
        ('{"input":"a"', "a"), (r'{"input":"\ud83d\ude00\ud83d\ud', "😀"), (r'{"input":"\ude00b', r'{"input":"\ude00b'),
        ('{"input":"a","b', '{"input":"a","b'),
    ):  # fmt: skip
        call: list[Event] = [ToolCallStart(0, "c", "t"), ToolCallArguments(0, arguments)]
        events = rendered(renderer(Scripted(call), names={"t": ToolName("t", None, True)}), Delta("x"))
        assert text == events[-2]["item"]["input"]


_TEXTS = st.text(max_size=3)
_EVENTS = st.lists(
    st.one_of(
        st.builds(Content, _TEXTS),
        st.builds(Reasoning, _TEXTS.filter(bool)),
        st.tuples(st.sampled_from(["f", "t", "u"]), _TEXTS),
    ),
    max_size=6,
)


@given(_EVENTS, st.booleans())
def test_any_answer(found: list[Any], cut: bool) -> None:
    """Whatever a parser finds, each item is opened, filled and ended in turn, and the last event has them all."""
    script: list[Event] = []
    calls = 0
    for each in found:
        if isinstance(each, tuple):
            script += [ToolCallStart(calls, f"c{calls}", each[0]), ToolCallArguments(calls, each[1])]
            calls += 1
        else:
            script.append(each)
    names = {"t": ToolName("t", "n"), "u": ToolName("u", None, True)}
    parser = Scripted(*[[each] for each in script[:-1]], script[-1:], cut=cut)
    events = rendered(renderer(parser, names=names), *[Delta("x")] * max(0, len(script) - 1))

    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for each in events[2:-1]:
        kind = each["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(each["item"])
            texts.append("")
        assert len(items) - 1 == each["output_index"]
        assert items[-1]["id"] == each.get("item_id", items[-1]["id"])
        texts[-1] += each.get("delta", "")
        if kind == "output_item.done":
            assert (items[-1]["id"], items[-1]["type"]) == (each["item"]["id"], each["item"]["type"])
            content = each["item"].get("content", [{}])[0].get("text")
            assert texts[-1] == next(
                text for text in (content, each["item"].get("arguments"), each["item"].get("input")) if text is not None
            )
            items[-1] = each["item"]
    assert items == events[-1]["response"]["output"]
    assert len({item["id"] for item in items}) == len(items) > 0


async def test_the_end_is_kept_first() -> None:
    """What is sent last is kept before; where it cannot be, the response says so, without a gap in the numbers."""
    for works in (True, False):
        stream = renderer()
        stream.response.store = True
        kept: list[str] = []

        async def keep(kept: list[str] = kept, works: bool = works, stream: Any = stream) -> None:
            kept.append(stream.response.status)
            stream.response.store = works

        stream.keep = keep
        sent = stream.opening() + stream.piece(0, Delta("a")) + stream.last(0)
        last = await stream.ended(None)
        assert ["completed"] == kept
        assert works is events_of(sent + last)[-1]["response"]["store"]


def test_a_response_that_waits() -> None:
    """A response that waits is created and queued before it is in progress; cancelled, it keeps what it has."""
    stream = renderer(names={"t": ToolName("t", None, True)})
    events = events_of(stream.queued() + stream.opening() + stream.piece(0, Delta("a")) + stream.piece(0, Delta("b")))
    assert [
        ("created", "queued"), ("queued", "queued"), ("in_progress", "in_progress")
    ] == [(each["type"].removeprefix("response."), each["response"]["status"]) for each in events[:3]]  # fmt: skip
    events = events_of(stream.cancelled() + terminal_events(stream.response, 10))
    assert [*MESSAGE, "cancelled"] == [each["type"].removeprefix("response.") for each in events]
    (item,) = events[-1]["response"]["output"]
    assert ("ab", "incomplete") == (item["content"][0]["text"], item["status"])
    # Before its turn there is nothing.
    stream = renderer()
    events = events_of(stream.queued() + stream.cancelled() + terminal_events(stream.response, 2))
    assert ["response.created", "response.queued", "response.cancelled"] == [each["type"] for each in events]


@given(_EVENTS, st.integers(0), st.booleans())
def test_output_from_events(found: list[Any], place: int, summarizes: bool) -> None:
    """The first events of any answer give the output as far as they go, and all of them the whole output."""
    script: list[Event] = []
    for number, each in enumerate(found):
        if isinstance(each, tuple):
            script += [ToolCallStart(number, f"c{number}", each[0]), ToolCallArguments(number, each[1])]
        else:
            script.append(each)
    names = {"t": ToolName("t", "n"), "u": ToolName("u", None, True)}
    stream = renderer(Scripted(*[[each] for each in script]), names=names)
    stream.response.reasoning = {"summary": "auto"} if summarizes else {}
    stream.__post_init__()
    pieces = b"".join([stream.opening(), *[stream.piece(0, Delta("x")) for _ in script], stream.last(0)])
    events = [each + b"\n\n" for each in pieces.split(b"\n\n")[:-1]]

    def shown(items: Any) -> list[dict[str, Any]]:
        return list(json.loads(msgspec.json.encode(items)))

    output = shown(stream.response.output)
    assert output == shown(replayed(pieces))
    begun = shown(replayed(b"".join(events[: place % len(events)])))
    for item, whole in zip(begun, output, strict=False):
        assert item["id"] == whole["id"]
        assert item["status"] == "incomplete" or item == whole
        texts = [
            "".join(part["text"] for part in (*each.get("content", ()), *each.get("summary", ())))
            + each.get("arguments", "")
            + each.get("input", "")
            for each in (item, whole)
        ]
        assert texts[1].startswith(texts[0])
