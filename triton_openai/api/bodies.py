"""Reads request bodies: JSON into typed structs, and what is wrong with them into errors that name the field."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from triton_openai.api.body_limits import check_counts, check_json
from triton_openai.config import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType

_T = TypeVar("_T", bound=msgspec.Struct)

LIMITS: web.AppKey[LimitSettings] = web.AppKey("limits", LimitSettings)

# What aiohttp undoes; the last two where there is a decoder, and else it says so. Others it would pass on as they are.
_CODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})

_WHERE = re.compile(r" - at `(?P<key>key in )?\$(?P<path>.*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?$")
_TYPE = re.compile(r"`(\w+)`")
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
    if request.headers.get("Content-Encoding", "").strip().lower() not in _CODINGS:
        raise unknown_coding()
    limits = request.app[LIMITS]
    try:
        body = await _read(request, limits)
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(request) from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "The request's body cannot be read: it is not what its Content-Encoding or Transfer-Encoding says.",
            code="invalid_encoding",
        ) from error
    check_json(body, limits)
    parsed = parse_json(body, kind, strict=strict)
    check_counts(parsed, limits)
    return parsed


def unknown_coding() -> UnsupportedMediaType:
    """Return what a client is told whose body nothing here can decode."""
    return UnsupportedMediaType("The body's Content-Encoding is not known here: gzip and deflate are.")


async def _read(request: web.Request, limits: LimitSettings) -> bytes:
    """Return the body. Raises :class:`PayloadTooLarge` at once when it is announced to be, and for a slow client."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise _too_large(request)
    await _ask_for_body(request)
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


async def _ask_for_body(request: web.Request) -> None:
    """Send ``100 Continue`` to a client that waits for it, now that its request is let in and not too large."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # It is no part of the answer, which is still to come.
        request.writer.output_size = 0


def _too_large(request: web.Request) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request's body is larger than the limit of {request.client_max_size} bytes.")


def parse_json(body: bytes, kind: type[_T], *, strict: bool = False) -> _T:
    """Return *body* as *kind*. Raises :class:`InvalidRequest`."""
    if not body.strip():
        raise InvalidRequest("The request's body is empty; a JSON object is needed.", code="invalid_json")
    try:
        parsed = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The request's JSON is nested too deeply.", code="invalid_json") from error
    if strict:
        _refuse_unknown(body, kind)
    return parsed


def _refuse_unknown(body: bytes, kind: type[msgspec.Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
        if name not in known:
            raise InvalidRequest(f"Unknown parameter: '{name[:100]}'.", param=name[:100], code="unknown_parameter")


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
    """Return whether *value* is absent, or one of the *neutral* values (by value and type: ``True`` is not 1)."""
    return value is None or any(type(value) is type(item) and value == item for item in neutral)
