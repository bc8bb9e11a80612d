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


class MessageBatchBody(msgspec.Struct, frozen=True):
    """What a batch is made of."""

    requests: list[BatchedMessage]
    models: set[str]


def read_batch(body: bytes, limits: LimitSettings, *, max_requests: int) -> MessageBatchBody:
    """
    Return the requests in *body*, and their models. Takes long, and runs in a thread.

    Raises :class:`InvalidRequest` for what no batch can have, and for requests that exceed *limits*.
    """
    envelope, items = _split(body, max_requests)
    # If there is no list of requests, it is an error that the decoder describes.
    kind = _Envelope if items else MessageBatchRequest
    JsonCheck(limits).check(envelope)
    parse_json(envelope, kind, [])
    requests: list[BatchedMessage] = []
    names: set[str] = set()
    models: set[str] = set()
    for number, item in enumerate(items):
        place = f"{_FIELD}[{number}]"
        try:
            JsonCheck(limits, batched=True).check(item)
            one = parse_json(item, BatchedMessage, [])
            params = _params(one)
        except InvalidRequest as error:
            if error.param is None:
                error.param = place
            else:
                error.param = f"{place}.{error.param}"
            error.message = f"'{place}' is wrong. {error.message}"
            raise
        if one.custom_id in names:
            raise InvalidValue(f"'{place}.custom_id' is that of an earlier request.", f"{place}.custom_id")
        names.add(one.custom_id)
        models.add(params.model)
        requests.append(one)
    return MessageBatchBody(requests, models)


def _params(one: BatchedMessage) -> _Params:
    # The rest of them is looked at when the request runs.
    try:
        params = _decode_params(one.params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(f"'params' is wrong: {error}.", "params") from error
    if params.stream:
        raise InvalidValue("'params.stream' must not be true in a batch.", "params.stream")
    return params


def _split(body: bytes, max_items: int) -> tuple[bytes, list[bytes]]:
    """
    Return the JSON object *body* with an empty list of requests, and the items of that list as they are written.

    What is not JSON may be split anywhere: whoever decodes the parts sees that. Raises :class:`PayloadTooLarge` for
    more than *max_items*: to free millions of them would take long as well.
    """
    items: list[bytes] = []
    envelope: list[bytes] = []
    kept = depth = begin = 0
    key = b""
    inside = False
    for place, end in _marks(body):
        mark = body[place : place + 1]
        if mark == b'"':
            # Of the object's strings, the last one before a list is the list's key.
            if depth == 1:
                key = body[place:end]
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
                kept = place
                if items or body[begin:place].strip():
                    items.append(body[begin:place])
        elif inside and depth == 2:
            if len(items) + 1 >= max_items:
                raise PayloadTooLarge(f"A batch can have {max_items} requests at most.", param=_FIELD)
            items.append(body[begin:place])
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
    place = 0
    size = len(body)
    left = _MAX_MARKS
    while place < size:
        found = _MARK.search(body, place, place + _STEP)
        if found is None:
            place += _STEP
            continue
        begin = found.start()
        place = found.end()
        if found[0] == b'"':
            place = _next_quote(body, place)
            while left and place < size and _is_escaped(body, place - 1):
                place = _next_quote(body, place)
                left -= 1
        if not left:
            raise PayloadTooLarge(f"The batch's JSON has more than {_MAX_MARKS} values and quotation marks.")
        left -= 1
        yield begin, place


def _next_quote(body: bytes, place: int) -> int:
    """Return the place behind the next quotation mark, or behind *body*."""
    return body.find(b'"', place) + 1 or len(body)


def _is_escaped(body: bytes, place: int) -> bool:
    """Return whether an odd number of backslashes precedes *place*."""
    width = 16
    count = 0
    while True:
        before = body[max(0, place - width) : place]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        count += backslashes
        if backslashes < width:
            return count % 2 == 1
        # There are more, maybe many: in steps, each of which holds the interpreter.
        place -= width
        width = min(2 * width, _STEP)
