"""Events of OpenAI's chats and completions, as the commands `chat` and `bench` read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import every_case
from tests.chat_server import HELLO, event, usage
from triton_openai.load.events import EventReader, Piece, read_event

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def line(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode()


PIECES = {
    "content": (line(delta={"content": "a"}), Piece(text="a")),
    "without a space": (b'data:{"choices":[{"delta":{"content":"a"}}]}\r', Piece(text="a")),
    "thinking of vLLM and SGLang": (line(delta={"reasoning_content": "t"}), Piece(reasoning="t")),
    "thinking of OpenRouter": (line(delta={"reasoning": "t"}), Piece(reasoning="t")),
    "both names": (line(delta={"reasoning": "t", "reasoning_content": "t"}), Piece(reasoning="t")),
    "refusal": (line(delta={"refusal": "no"}), Piece(text="no")),
    "completion": (line(text="b"), Piece(text="b")),
    "limit": (line(delta={}, finish_reason="length"), Piece(cut_off=True)),
    "call": (
        line(delta={"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}),
        Piece(calls="f {}"),
    ),
    "nulls": (line(delta={"content": None, "tool_calls": None}, finish_reason="stop", logprobs=None), Piece()),
    "no choices": (b'data: {"choices": null, "usage": null}', Piece()),
    "end": (b"data: [DONE]", None),
    "comment": (b": ping", None),
    "name": (b"event: message", None),
    "nothing": (b"", None),
}


@every_case("name", PIECES)
def test_pieces(name: str) -> None:
    """Servers write the same things in several ways."""
    written, expected = PIECES[name]

    assert expected == read_event(written)


@every_case(
    "error, message",
    [
        ({"error": {"message": "no room"}}, "no room"),
        ({"error": "no room"}, "no room"),
        ({"error": {"error": {"message": "no room"}}}, "no room"),
        ([], "no part of an answer"),
        ({"choices": "x"}, "no part of an answer"),
    ],
)
def test_errors_in_a_stream(error: Any, message: str) -> None:
    """An error has its own text; what is no chunk is one."""
    with pytest.raises(ValueError, match=message):
        read_event(b"data: " + json.dumps(error).encode())


def test_an_answer_in_pieces_of_any_size() -> None:
    """Where the network cuts an answer makes no difference."""
    data = _HEAD + chunked(*HELLO)
    for size in (1, 2, 7, 100, len(data)):
        reader = EventReader()
        count = sum(reader.feed(data[start : start + size]) for start in range(0, len(data), size))
        assert (2, True, 0) == (count, reader.ended, reader.uncounted)


def test_tokens_that_came_together() -> None:
    """The usage counts tokens that arrive in one event."""
    reader = EventReader()

    assert 1 == reader.feed(_HEAD + chunked(event(content="one two three"), usage(3)))
    assert 2 == reader.uncounted


@every_case(
    "data, message",
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 30\r\n\r\n" + b'{"error": {"message": "slow"}}', "HTTP 429: slow"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 12\r\n\r\n<html>\n</htm", "HTTP 502: <html> </htm"),
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP/1.1"),
        (_HEAD + chunked(b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
        (_HEAD + chunked(b"data: {\n\n"), "no part of an answer"),
    ],
)
def test_answers_that_fail(data: bytes, message: str) -> None:
    """Whatever is no stream of text is an error with the server's own words."""
    with pytest.raises(ValueError, match=message):
        EventReader().feed(data)
