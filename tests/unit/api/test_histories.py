"""What the service answers, it takes back: as the same API sends it, and as clients that change the API do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.extended import examples
from tests.unit.api.responses.test_responses import reading, renderer
from tests.unit.parsers.slip_cases import SLIPS, Slip
from tests.unit.parsers.test_slips import PLAN, WORDS, state
from tests.unit.prompts.test_messages import STRING
from triton_openai.api.bodies import read_within
from triton_openai.api.chat import ChatRequest, message_of
from triton_openai.api.conversation import make_parser
from triton_openai.api.messages import types
from triton_openai.api.messages.message_events import MessageEvents
from triton_openai.api.messages.message_reader import read as read_messages
from triton_openai.api.responses.objects import ResponsesRequest
from triton_openai.config.tree import LimitSettings
from triton_openai.generation import Delta, FinishReason
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, Parsers
from triton_openai.prompts.messages import Message
from triton_openai.prompts.past_calls import PastCalls
from triton_openai.prompts.prepare import prepare


def parser_of(slip: Slip, *, streams: bool) -> AnswerParser:
    """Return the parser of an answer."""
    reasoning = None if slip.thinks is None else REASONING_PARSERS.load(slip.thinks)
    kinds = Parsers(tools=TOOL_PARSERS.load(slip.parser), reasoning=reasoning)
    return make_parser(kinds, PLAN, slip.prompt, streams=streams)


def chat_answer(slip: Slip, text: str, *, streams: bool, cut: bool) -> dict[str, Any]:
    """Return the message of a chat."""
    parser = parser_of(slip, streams=streams)
    message = message_of(parser.feed(text) + parser.flush(cut=cut), PLAN, ("reasoning_content",))
    found: dict[str, Any] = msgspec.to_builtins(message)
    return found


def response_answer(slip: Slip, text: str, *, streams: bool, cut: bool) -> list[dict[str, Any]]:
    """Return the items of a response."""
    events = renderer(parser_of(slip, streams=streams), reason=FinishReason.LENGTH if cut else FinishReason.STOP)
    events.piece(0, Delta(text))
    events.last(0)
    events.concluded(None)
    items: list[dict[str, Any]] = msgspec.to_builtins(events.response.output)
    return items


class Run:
    """A run that has ended."""

    def __init__(self, *, cut: bool) -> None:
        self.progress = state(FinishReason.LENGTH if cut else FinishReason.STOP)


def message_answer(slip: Slip, text: str, *, streams: bool, cut: bool) -> list[dict[str, Any]]:
    """Return the blocks of a message."""
    run: Any = Run(cut=cut)
    parser = parser_of(slip, streams=streams)
    events = MessageEvents("m", "m", run, parser, limited=False, omits_thinking=False, request_id="r", whole=True)
    events.piece(0, Delta(text))
    events.last(0)
    blocks: list[dict[str, Any]] = msgspec.to_builtins(events.blocks)
    return blocks


def take(messages: Sequence[Message]) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in *messages* as a chat template gets them."""
    prepared = prepare(messages, STRING, past_calls=PastCalls(tools=PLAN.prompt))
    calls = [call["function"] for message in prepared for call in message.get("tool_calls", ())]
    assert all(isinstance(call["arguments"], dict) for call in calls)
    return [(call["name"], call["arguments"]) for call in calls]


Calls = Sequence[tuple[str, str, Any]]
_Body = TypeVar("_Body", bound=msgspec.Struct)


def read_body(body: dict[str, Any], kind: type[_Body]) -> _Body:
    """Return *body* as *kind*, read with the limits of a request."""
    return read_within(json.dumps(body).encode(), kind, LimitSettings())


def take_chat(message: dict[str, Any], ids: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return what a chat makes of *message* in its history, with an answer to each of its calls."""
    answers = [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in ids]
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}, message, *answers]}
    return take(read_body(body, ChatRequest).messages)


def take_response(items: Sequence[dict[str, Any]], ids: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return what a response makes of *items* in its input."""
    answers = [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in ids]
    body = {"input": [{"role": "user", "content": "Hi"}, *items, *answers]}
    read_body({"model": "m", **body}, ResponsesRequest)
    return take(reading(body).conversation.messages)


def take_message(blocks: Sequence[dict[str, Any]], ids: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return what the Messages API makes of *blocks*."""
    answers = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in ids]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks or "Hm"}]
    body = {"model": "m", "messages": [*turns, *([{"role": "user", "content": answers}] if answers else [])]}
    return take(read_messages(read_body(body, types.CountTokensRequest), strict_tools=True).conversation.messages)


def as_chat(calls: Calls) -> dict[str, Any]:
    """Return *calls* as a message of a chat."""
    made = [{"id": id, "type": "function", "function": {"name": n, "arguments": a}} for id, n, a in calls]
    return {"role": "assistant", "content": None if made else "Hm", "tool_calls": made or None}


def as_items(calls: Calls) -> list[dict[str, Any]]:
    """Return *calls* as items of a response."""
    return [{"type": "function_call", "call_id": id, "name": name, "arguments": a} for id, name, a in calls]


def as_blocks(calls: Calls) -> list[dict[str, Any]]:
    """Return *calls* as blocks of a message."""
    return [{"type": "tool_use", "id": id, "name": name, "input": a} for id, name, a in calls]


def check(slip: Slip, text: str, *, streams: bool, cut: bool) -> None:
    """Assert that every API takes the answer that *text* makes, from itself and from the others."""
    message = chat_answer(slip, text, streams=streams, cut=cut)
    items = response_answer(slip, text, streams=streams, cut=cut)
    blocks = message_answer(slip, text, streams=streams, cut=cut)
    of_chat = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    of_items = [(i["call_id"], i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    of_blocks = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    ids = [call[0] for call in of_chat]
    own = take_chat(message, ids)
    assert [name for _, name, _ in of_chat] == [name for name, _ in own]
    assert own == take_response(items, [call[0] for call in of_items])
    assert [name for name, _ in own] == [name for name, _ in take_message(blocks, [call[0] for call in of_blocks])]
    for calls in (of_chat, of_items, of_blocks):
        ids = [call[0] for call in calls]
        read_by = (
            take_chat(as_chat(calls), ids),
            take_response(as_items(calls), ids),
            take_message(as_blocks(calls), ids),
        )
        assert read_by[0] == read_by[1] == read_by[2]


@given(
    slip=st.sampled_from(SLIPS), start=st.floats(0, 1), size=st.integers(0, 5),
    inserted=st.sampled_from(["", *WORDS]), cut=st.booleans(), streams=st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_what_is_answered_is_taken(
    slip: Slip, start: float, size: int, inserted: str, cut: bool, streams: bool
) -> None:  # fmt: skip
    """An answer that is cut or malformed anywhere is accepted as history by the same API and by the other two."""
    at = round(start * len(slip.text))
    check(slip, slip.text[:at] if cut else slip.text[:at] + inserted + slip.text[at + size :], streams=streams, cut=cut)


#: Arguments with longer numbers, and of more levels, than a request may have.
BEYOND_LIMITS = (
    '{"command": 0.' + "3" * 60 + "}",
    '{"command": ' + "9" * 60 + "}",
    '{"command": ' + "[" * 150,
    '{"command": ' + "[" * 150 + "]" * 150 + "}",
    '{"command": ' + "[" * 150 + '"' * 300_000,
    "[" * 60_000,
)
BROKEN = ("", None, "{", '{"command": "l', "ls", "[1]", '"ls"', [1], 1, True, "null", {"command": "ls"})


@every_case("arguments", [*BROKEN, *BEYOND_LIMITS])
def test_whatever_a_client_makes_of_arguments(arguments: Any) -> None:
    """Every API takes broken, empty and other arguments, and makes the same of them."""
    calls = [("c1", "exec", arguments)]
    read_by = [take_chat(as_chat(calls), ["c1"]), take_response(as_items(calls), ["c1"])]
    read_by.append(take_message(as_blocks(calls), ["c1"]))
    assert read_by[0] == read_by[1] == read_by[2]
    assert json.dumps(read_by[0])
