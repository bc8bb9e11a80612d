"""
The body of a batch of messages, read request by request.

It may have 48 MiB and tens of thousands of requests. To decode it at once would hold the interpreter, and so the event
loop, for hundreds of milliseconds, and the limits of a request's JSON are those of each request in it. So it is split
first, in short steps, and each request is checked and decoded by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from triton_openai.api.bodies import JsonCheck, parse_json
from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest, InvalidValue, PayloadTooLarge

_FIELD = "requests"
# Outside of strings, what structures JSON.
_MARK = re.compile(rb'["\[\]{},]')
_OPENING = b"[{"
_CLOSING = b"]}"
# Bytes that one step looks through.
_STEP = 1024 * 1024
# 50,000 requests of 160 values and quotation marks.
_MAX_MARKS = 8_000_000
_LONGEST_KEY = 100


class BatchedMessage(msgspec.Struct, kw_only=True):
    """A request for a message, and the name that its result has."""

    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """Requests for messages, which are answered within a day. ``params`` are those of ``POST /v1/messages``."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1)]


class _Params(msgspec.Struct):
    model: str = ""
    stream: bool | None = None


class _Envelope(msgspec.Struct):
    requests: list[msgspec.Raw]


_decode_params = msgspec.json.Decoder(_Params).decode


class ParsedBatch(msgspec.Struct, frozen=True):
    """The requests of a batch, and the models that they ask."""

    requests: list[BatchedMessage]
    models: set[str]


def parse_batch(body: bytes, limits: LimitSettings, *, max_requests: int) -> ParsedBatch:
    """
    Return the requests in *body*, and their models. Takes long, and runs in a thread.

    Raises :class:`InvalidRequest` for what no batch can have, and for requests that exceed *limits*.
    """
    envelope, items = _split(body, max_requests)
    # If there is no list of requests, it is an error that the decoder describes.
    kind: type[msgspec.Struct] = MessageBatchRequest
    if items:
        kind = _Envelope
    JsonCheck(limits).check(envelope)
    parse_json(envelope, kind, [])
    requests: list[BatchedMessage] = []
    names: set[str] = set()
    models: set[str] = set()
    for number, item in enumerate(items):
        path = f"{_FIELD}[{number}]"
        try:
            JsonCheck(limits, batched=True).check(item)
            request = parse_json(item, BatchedMessage, [])
            params = _params(request)
        except InvalidRequest as error:
            if error.param is None:
                error.param = path
            else:
                error.param = f"{path}.{error.param}"
            error.message = f"'{path}' is wrong. {error.message}"
            raise
        if request.custom_id in names:
            raise InvalidValue(f"'{path}.custom_id' is that of an earlier request.", f"{path}.custom_id")
        names.add(request.custom_id)
        models.add(params.model)
        requests.append(request)
    return ParsedBatch(requests, models)


def _params(request: BatchedMessage) -> _Params:
    # The others are checked line by line before the batch runs.
    try:
        params = _decode_params(request.params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(f"'params' is wrong: {error}.", "params") from error
    if params.stream:
        raise InvalidValue("'params.stream' must not be true in a batch.", "params.stream")
    return params


def _split(body: bytes, max_items: int) -> tuple[bytes, list[bytes]]:
    """
    Return the JSON object *body* with an empty list of requests, and the items of that list as they are written.

    What is not JSON may be split anywhere: the decoder of the parts refuses it. Raises :class:`PayloadTooLarge` for
    more than *max_items*: to free millions of them would take long as well.
    """
    items: list[bytes] = []
    envelope: list[bytes] = []
    kept = depth = begin = 0
    key = b""
    inside = False
    for offset, end in _marks(body):
        mark = body[offset : offset + 1]
        if mark == b'"':
            # Of the object's strings, the last one before a list is the list's key.
            if depth == 1:
                key = body[offset:end]
        elif mark in _OPENING:
            depth += 1
            if depth == 2 and mark == b"[" and _is_field(key):
                items.clear()
                envelope.append(body[kept:end])
                inside = True
                begin = end
        elif mark in _CLOSING:
            depth -= 1
            if inside and depth == 1:
                inside = False
                kept = offset
                if items or body[begin:offset].strip():
                    items.append(body[begin:offset])
        elif inside and depth == 2:
            if len(items) + 1 >= max_items:
                raise PayloadTooLarge(f"A batch can have {max_items} requests at most.", param=_FIELD)
            items.append(body[begin:offset])
            begin = end
    envelope.append(body[kept:])
    return b"".join(envelope), items


def _is_field(key: bytes) -> bool:
    """Return whether *key*, as it is written, is the name of the list."""
    try:
        return len(key) <= _LONGEST_KEY and bool(msgspec.json.decode(key) == _FIELD)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _marks(body: bytes) -> Iterator[tuple[int, int]]:
    """
    Yield begin and end of each string of *body*, and of each bracket and comma that is in none.

    Raises :class:`PayloadTooLarge` for too many: each takes half a microsecond.
    """
    offset = 0
    size = len(body)
    left = _MAX_MARKS
    while offset < size:
        match = _MARK.search(body, offset, offset + _STEP)
        if match is None:
            offset += _STEP
            continue
        begin = match.start()
        offset = match.end()
        if match[0] == b'"':
            offset = _next_quote(body, offset)
            while left and offset < size and _is_escaped(body, offset - 1):
                offset = _next_quote(body, offset)
                left -= 1
        if not left:
            raise PayloadTooLarge(f"The batch's JSON has more than {_MAX_MARKS} values and quotation marks.")
        left -= 1
        yield begin, offset


def _next_quote(body: bytes, offset: int) -> int:
    """Return the offset behind the next quotation mark, or behind *body*."""
    return body.find(b'"', offset) + 1 or len(body)


def _is_escaped(body: bytes, offset: int) -> bool:
    """Return whether an odd number of backslashes precedes *offset*."""
    width = 16
    count = 0
    while True:
        before = body[max(0, offset - width) : offset]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        count += backslashes
        if backslashes < width:
            return count % 2 == 1
        # There are more, maybe many: in steps, each of which holds the interpreter.
        offset -= width
        width = min(2 * width, _STEP)
