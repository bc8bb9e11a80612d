"""Server-sent events of OpenAI's chats and completions, as clients read them."""

from __future__ import annotations

from typing import Any

import httptools
import msgspec

#: Bytes of an answer that are kept for an error message.
_MAX_ERROR_BYTES = 65_536
#: Longest line of an event, in bytes.
MAX_LINE_BYTES = 16 * 1024 * 1024
_DONE = b"[DONE]"


class Usage(msgspec.Struct, frozen=True):
    """How many tokens a request has taken."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one event has."""

    text: str = ""
    reasoning: str = ""
    #: Names and arguments of tool calls, as they arrive.
    calls: str = ""
    usage: Usage | None = None
    #: Whether a limit of tokens ended the answer.
    cut_off: bool = False


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    # Some servers send lists.
    content: Any = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    #: Of completions.
    text: str | None = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def read_event(line: bytes) -> Piece | None:
    """
    Return what a *line* of an answer has, and ``None`` if it has nothing: a comment, a name, or the end.

    Raises :class:`ValueError` for an error that the server sent, and for what is no chunk of an answer.
    """
    name, colon, payload = line.partition(b":")
    payload = payload.strip()
    if name != b"data" or not colon or not payload or payload == _DONE:
        return None
    try:
        chunk = _decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"The server sent an event that is no part of an answer: {error}") from error
    if chunk.error is not None:
        raise ValueError(error_message(chunk.error))
    text = ""
    reasoning = ""
    calls = ""
    cut_off = False
    for choice in chunk.choices or ():
        delta = choice.delta or _Delta()
        if choice.finish_reason == "length":
            cut_off = True
        for part in (choice.text, delta.content, delta.refusal):
            if isinstance(part, str):
                text += part
        if delta.reasoning_content:
            reasoning += delta.reasoning_content
        elif isinstance(delta.reasoning, str):
            reasoning += delta.reasoning
        for call in delta.tool_calls or ():
            if call.function is not None:
                calls += _written(call.function)
    return Piece(text=text, reasoning=reasoning, calls=calls, usage=chunk.usage, cut_off=cut_off)


def _written(function: _Function) -> str:
    """Return a part of a call as text: its name, or a part of its arguments."""
    name = ""
    if function.name:
        name = f"{function.name} "
    return name + (function.arguments or "")


def error_message(error: Any) -> str:
    """Return the message of an *error* as servers write it: an object with a message, or a text."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        error = inner
    return str(error)


def error_of_body(body: bytes) -> str:
    """Return the message in the *body* of a refused request."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.MsgspecError:
        return " ".join(body[:500].decode(errors="replace").split())


class EventReader:
    """Reads one answer, from its HTTP head on, and counts the events with text, reasoning or calls as tokens."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._counted = 0
        self._problem: str | None = None
        self._streams = False
        self.ended = False
        #: Tokens beyond one an event, known at the end from the usage that the server reports.
        self.uncounted = 0
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> int:
        """Return how many events with tokens are in *data*. Raises `ValueError` as :func:`read_event` does."""
        before = self._counted
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._problem is None:
                raise ValueError(f"The server's answer is no HTTP/1.1: {error}") from error
        if self._problem is not None:
            raise ValueError(self._problem)
        return self._counted - before

    # Called by the parser, in which an exception would lose its text

    def on_headers_complete(self) -> None:
        """Note whether the answer is an error."""
        self._streams = self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        """Read the lines that are complete."""
        self._body += body
        if not self._streams:
            del self._body[_MAX_ERROR_BYTES:]
            return
        *lines, rest = self._body.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            self._problem = f"The server sent an event of more than {MAX_LINE_BYTES} bytes."
            return
        self._body = rest
        for line in lines:
            self._read(bytes(line))

    def on_message_complete(self) -> None:
        """Note the end."""
        if not self._streams:
            status = self._parser.get_status_code()
            self._problem = f"HTTP {status}: {error_of_body(bytes(self._body))}"
            return
        self.ended = True
        if self.usage is not None:
            self.uncounted = max(0, self.usage.completion_tokens - self._counted)

    def _read(self, line: bytes) -> None:
        if self._problem is not None:
            return
        try:
            piece = read_event(line)
        except ValueError as error:
            self._problem = str(error)
            return
        if piece is None:
            return
        if piece.usage is not None:
            self.usage = piece.usage
        if piece.text or piece.reasoning or piece.calls:
            self._counted += 1
