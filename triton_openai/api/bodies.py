"""JSON bodies: requests are read into typed structs, with errors that name the field; answers are written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import accumulate, islice
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from triton_openai.config import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from triton_openai.prompts import offload
from triton_openai.prompts.json_values import decoder
from triton_openai.serving.request_body import ask_for_body, content_coding, decompress
from triton_openai.telemetry.observation import OBSERVATION

_BRACKETS = b"[]{}"
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_OPENS = bytes.maketrans(_BRACKETS, b"\1\0\1\0")
_SPACE = b" \t\r\n"
_DIGIT_BYTES = b"0123456789"
_AS_ZEROS = bytes.maketrans(_DIGIT_BYTES + b".", b"0" * 11)
# Twice the digits of any number that is computed with; the time to read one grows with their square.
_MOST_DIGITS = 40
# Levels that are counted the quick way.
_USUAL_DEPTH = 8
_DATA_URL = b'"data:'
_SMALL = 1024
_PIECE = 1024 * 1024
# Fields of requests by the setting that bounds how many they hold.
_LISTS: Mapping[str, str] = {
    "messages": "max_messages",
    "tools": "max_tools",
    "functions": "max_tools",
    "documents": "max_prompts",
    "prompt": "max_prompts",
    "input": "max_prompts",
    # The sides of a score request.
    "queries": "max_prompts",
    "items": "max_prompts",
    "data_1": "max_prompts",
    "data_2": "max_prompts",
    "text_1": "max_prompts",
    "text_2": "max_prompts",
}


class JsonCheck:
    """
    What one request may still have; JSON that stands in its strings is checked with the same account.

    Every step is a pass of compiled code over the bytes. What is no JSON is left to the decoder.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self._values = limits.max_json_values
        self._ids = limits.max_token_ids

    def check(self, body: bytes, *, exactly: bool = False) -> None:
        """
        Raise for JSON with too much text, too many values or token ids, too long a number, or too deep a nesting.

        What is clearly none of this is not counted, unless *exactly* is set.
        """
        limits = self._limits
        text = _without_images(body, limits.max_text_size)
        opened = text.count(b"[") + text.count(b"{")
        few = opened + text.count(b",") < self._values and opened <= limits.max_json_depth
        if few and not exactly and not _has_long_number(text):
            # It cannot be any of this, whatever stands in its strings.
            return
        # Without escaped characters, every second part is what stands in quotes.
        plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text
        if plain.count(b'"') > 4 * self._values:
            # A value has two quotes, and its key two.
            raise self._too_many_values()
        bare = b"".join(plain.split(b'"')[::2]).translate(None, _SPACE)
        if _has_long_number(bare):
            raise InvalidRequest(
                f"A number in the request's JSON has more than {_MOST_DIGITS} digits.", code="invalid_json"
            )
        # Each value but the first of a list or an object follows a comma, and the first an opening bracket.
        opened = bare.count(b"[") + bare.count(b"{")
        if opened > self._values:
            raise self._too_many_values()
        ids = _token_ids(bare)
        self._values -= 1 + opened + bare.count(b",") - ids
        if self._values < 0:
            raise self._too_many_values()
        self._ids -= ids
        if self._ids < 0:
            raise PayloadTooLarge(f"The request has more than {limits.max_token_ids} token ids.")
        depth = _depth(bare.translate(None, _ALL_BUT_BRACKETS), enough=limits.max_json_depth)
        if depth > limits.max_json_depth:
            raise InvalidRequest(
                f"The request's JSON is nested too deeply: more than {limits.max_json_depth} levels.",
                code="invalid_json",
            )

    def _too_many_values(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request's JSON has more than {self._limits.max_json_values} values.")


def _without_images(body: bytes, most: int) -> bytes:
    """
    Return *body* without the contents of data URLs. Raises :class:`PayloadTooLarge` where *most* bytes do not hold it.

    What is left out has neither quotes nor anything but base64's own escape, ``\\/``, so that the rest is JSON still.
    """
    if len(body) <= most:
        return body
    kept, size, place = [], 0, 0
    while place < len(body):
        start = body.find(_DATA_URL, place, place + most + len(_DATA_URL)) + 1
        end = body.find(b'"', start) if start else -1
        if end < 0:
            # No image, or one without an end, which the decoder refuses: the rest is text.
            start = end = len(body)
        elif not _is_image(body, start, end):
            start = end
        size += start - place
        if size > most:
            raise PayloadTooLarge(
                f"The request has more than {most} bytes besides its images.", code="string_above_max_length"
            )
        kept.append(body[place:start])
        place = end
    return b"".join(kept)


def _is_image(body: bytes, start: int, end: int) -> bool:
    """Return whether the data URL there is read as quickly as base64 is."""
    escapes = 0
    for place in range(start, end, _PIECE):
        piece = body[place : min(place + _PIECE, end)]
        found = piece.count(b"\\")
        if not piece.isascii() or (found and found != body.count(b"\\/", place, min(place + _PIECE + 1, end))):
            return False
        escapes += found
    return end - start >= _SMALL and escapes <= (end - start) // 16


def _has_long_number(text: bytes) -> bool:
    return b"0" * (_MOST_DIGITS + 1) in text.translate(_AS_ZEROS)


def _token_ids(bare: bytes) -> int:
    """Return how many values follow a comma in lists of nothing but whole numbers: those are read quickly."""
    lists = (part.partition(b"]") for part in bare.split(b"[")[1:])
    return sum(inner.count(b",") for inner, _, _ in lists if not inner.translate(None, _DIGIT_BYTES + b","))


def _depth(brackets: bytes, *, enough: int) -> int:
    """Return how deep *brackets* nest; about, where they do not match."""
    for level in range(min(_USUAL_DEPTH, enough)):
        # The innermost pairs go, level by level, which is all there is to do for almost every request.
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            return level
        brackets = inner
    deltas = map((-1, 1).__getitem__, brackets.translate(_OPENS))
    return min(_USUAL_DEPTH, enough) + max(accumulate(deltas), default=0)


def check_texts(body: msgspec.Struct, check: JsonCheck) -> None:
    """Raise for JSON in the texts of a request that goes, together with all else, beyond what *check* allows."""
    for index, message in enumerate(getattr(body, "messages", None) or ()):
        for number, call in enumerate(getattr(message, "tool_calls", None) or ()):
            _check_text(getattr(call.function, "arguments", None), f"messages[{index}].tool_calls[{number}]", check)
        called = getattr(message, "function_call", None)
        _check_text(getattr(called, "arguments", None), f"messages[{index}].function_call", check)
    _check_text(getattr(body, "guided_json", None), "guided_json", check)
    structured = getattr(body, "structured_outputs", None)
    if isinstance(structured, dict):
        _check_text(structured.get("json"), "structured_outputs.json", check)


def _check_text(text: Any, place: str, check: JsonCheck) -> None:
    if not isinstance(text, str):
        return
    try:
        check.check(text.encode("utf-8", "replace"), exactly=True)
    except InvalidRequest as error:
        error.param = place
        raise


def check_counts(body: msgspec.Struct, limits: LimitSettings) -> None:
    """Raise :class:`InvalidRequest` for a request that lists more of something than it may."""
    for name, setting in _LISTS.items():
        given = getattr(body, name, None)
        if not isinstance(given, list) or (given and isinstance(given[0], int)):
            # A list of token ids is one prompt.
            continue
        most = getattr(limits, setting)
        if len(given) > most:
            raise _too_many(name, most, len(given))
    messages = getattr(body, "messages", None)
    if isinstance(messages, list):
        parts = sum([_parts(message) for message in messages])
        if parts > limits.max_content_parts:
            raise _too_many("messages", limits.max_content_parts, parts, " content parts in all")


def _parts(message: Any) -> int:
    content = getattr(message, "content", None)
    return len(content) if isinstance(content, list) else 0


def _too_many(name: str, most: int, given: int, what: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"'{name}' holds {given}{what}, and may hold {most} at most.", param=name, code="array_above_max_length"
    )


class ModelRequest(msgspec.Struct, kw_only=True):
    """Base of all requests to a model; an empty name means the default model."""

    model: str = ""


_T = TypeVar("_T", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode


def json_response(answer: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return *answer* as a response."""
    return web.Response(status=status, body=_encode(answer), content_type="application/json", headers=headers)


LIMITS: web.AppKey[LimitSettings] = web.AppKey("limits", LimitSettings)

# Bodies of more bytes are read in a thread: on the event loop it takes some 5 ms at most. Unknown fields are looked for
# in smaller ones only, which takes about a millisecond.
_LONGEST_INLINE = 64 * 1024
# How many unknown fields of a request are told.
_MOST_UNKNOWN = 16

_WHERE = re.compile(r" - at `(?P<key>key in )?\$(?P<path>.*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?$")
_TYPE = re.compile(r"`(\w+)`")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBERS = re.compile(rb"[\[\],\s\d.eE+-]{1,4096}")
# Of the largest integers that a backend takes.
_DIGITS = 20
_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


async def read_json(request: web.Request, kind: type[_T], *, strict: bool) -> _T:
    """
    Return the request's body as *kind*.

    With *strict*, fields that *kind* does not know are refused. Raises :class:`InvalidRequest` and its kin.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type and content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaType(f"The body must be JSON (application/json), not '{content_type[:100]}'.")
    coding = content_coding(request)
    limits = request.app[LIMITS]
    try:
        body = await _read(request, limits)
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(request) from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "The request's body cannot be read: it is not what its Transfer-Encoding says.", code="invalid_encoding"
        ) from error
    if coding is not None and body:
        body = await decompress(body, coding, request.client_max_size)
    request[OBSERVATION].body_size = len(body)
    parsed = await offload.run(
        lambda: read_within(body, kind, limits, strict=strict), size=len(body), threshold=_LONGEST_INLINE
    )
    if not strict and len(body) <= _LONGEST_INLINE:
        request[OBSERVATION].unknown_fields = unknown_fields(body, kind)
    return parsed


def read_within(body: bytes, kind: type[_T], limits: LimitSettings, *, strict: bool = False) -> _T:
    """Return *body* as *kind*. Raises :class:`InvalidRequest`, also for what goes beyond *limits*."""
    check = JsonCheck(limits)
    check.check(body)
    parsed = parse_json(body, kind, strict=strict)
    check_counts(parsed, limits)
    check_texts(parsed, check)
    return parsed


async def _read(request: web.Request, limits: LimitSettings) -> bytes:
    """Return the body. Raises :class:`PayloadTooLarge` at once when it is announced to be, and for a slow client."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise _too_large(request)
    ask_for_body(request)
    if request.content.is_eof():
        # It has arrived with the head, as most do.
        return await request.read()
    loop = asyncio.get_running_loop()
    began = loop.time()
    reading = asyncio.create_task(request.read())
    # A client that leaves ends both, and nobody is there any more for the second reason.
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        while True:
            # Who sends much may take longer, if it comes at a fair rate.
            allowed = limits.body_timeout + request.content.total_bytes / limits.min_body_rate
            left = began + allowed - loop.time()
            done, _ = await asyncio.wait({reading}, timeout=max(0, left))
            if done:
                return reading.result()
            if left <= 0:
                raise RequestTimeout(f"The request's body did not arrive in time ({allowed:.0f} seconds).")
    finally:
        reading.cancel()


def _too_large(request: web.Request) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request's body is larger than the limit of {request.client_max_size} bytes.")


def parse_json(body: bytes, kind: type[_T], *, strict: bool = False) -> _T:
    """Return *body* as *kind*. Raises :class:`InvalidRequest`."""
    if not body.strip():
        raise InvalidRequest("The request's body is empty; a JSON object is needed.", code="invalid_json")
    try:
        try:
            parsed: _T = decoder(kind).decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            parsed = decoder(kind).decode(_with_integers(body))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The request's JSON is nested too deeply.", code="invalid_json") from error
    if strict:
        _refuse_unknown(body, kind)
    return parsed


def _with_integers(body: bytes) -> bytes:
    """
    Return *body* with whole numbers such as 4.0 written as integers, which they are in JSON Schema and not in msgspec.

    Only in fields that are a number or a short array of numbers. Raises :class:`msgspec.ValidationError` for no object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, raw in fields.items():
        if _NUMBERS.fullmatch(raw):
            fields[name] = msgspec.Raw(_NUMBER.sub(_integer, bytes(raw)))
    return msgspec.json.encode(fields)


def _integer(match: re.Match[bytes]) -> bytes:
    number = Decimal(match[0].decode())
    # Without writing out what no integer field can hold.
    whole = number.adjusted() < _DIGITS and number == number.to_integral_value()
    return b"%d" % int(number) if whole else match[0]


def _refuse_unknown(body: bytes, kind: type[msgspec.Struct]) -> None:
    for name in unknown_fields(body, kind):
        raise InvalidRequest(f"Unknown parameter: '{name[:100]}'.", param=name[:100], code="unknown_parameter")


def unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> Sequence[str]:
    """
    Return the first few names in the JSON object *body* that *kind* does not have; null says that it is not used.

    Raises :class:`InvalidRequest` for a name that is not UTF-8, which msgspec passes over where *kind* lacks it.
    """
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.", code="invalid_json") from error
    unknown = (name for name, value in given.items() if name not in known and bytes(value) != b"null")
    return list(islice(unknown, _MOST_UNKNOWN))


def explain(message: str) -> InvalidRequest:
    """Turn a msgspec validation message (``… - at `$.messages[0].role```) into our error with OpenAI's ``param``."""
    where = _WHERE.search(message)
    path = where.group("path").lstrip(".") if where else ""
    # msgspec writes [...] where it does not say which element it is.
    param = re.sub(r"\[\.\.\.\]", "", path) or None
    what = message[: where.start()] if where else message
    missing = _MISSING.search(what)
    if missing:
        field = f"{param}.{missing.group('field')}" if param else missing.group("field")
        return InvalidRequest(f"Missing required parameter: '{field}'.", param=field, code="missing_required_parameter")
    subject = f"'{param}'" if param else "the request's body"
    wrong = _WRONG_TYPE.search(what)
    if wrong:
        expected = " or ".join(
            _TYPE_NAMES.get(name.strip(), name.strip()) for name in wrong.group("expected").split("|")
        )
        got = wrong.group("got")
        but = f", but got {_TYPE_NAMES.get(got, got)} instead" if got else ""
        return InvalidRequest(
            f"Invalid type for {subject}: expected {expected}{but}.", param=param, code="invalid_type"
        )
    what = _TYPE.sub(lambda name: _TYPE_NAMES.get(name[1], name[1]), what)
    return InvalidRequest(
        f"Invalid value for {subject}: {what[:1].lower()}{what[1:]}.", param=param, code="invalid_value"
    )


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether *value* is absent, or one of the *neutral* values (1.0 is 1, ``True`` is not)."""
    return value is None or any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in neutral)
