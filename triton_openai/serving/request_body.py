"""
Reads the bodies of requests: within limits of size and time, and decompressed in threads.

The server by itself neither answers ``Expect`` nor decompresses: the service does that for authorized requests only.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai import offload
from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from triton_openai.serving.content_coding import codings, decoder_for

#: Whether the client waits for ``100 Continue`` before it sends the body.
EXPECTS_CONTINUE: web.RequestKey[bool] = web.RequestKey("expects_continue", bool)


def without_misread_headers(message: RawRequestMessage) -> tuple[RawRequestMessage, bool]:
    """
    Return *message* without headers that aiohttp handles in another way, and whether it expects ``100-continue``.

    These are ``Expect``, which aiohttp would answer itself, and a ``Range`` in another unit than bytes, which it would
    refuse. Other expectations and units are ignored (RFC 9110, sections 10.1.1 and 14.2).
    """
    if hdrs.EXPECT not in message.headers and hdrs.RANGE not in message.headers:
        return message, False
    headers = CIMultiDict(message.headers)
    expected = ",".join(headers.popall(hdrs.EXPECT, ())).lower().split(",")
    if not headers.get(hdrs.RANGE, "").startswith("bytes="):
        headers.popall(hdrs.RANGE, None)
    message = message._replace(headers=CIMultiDictProxy(headers))
    return message, message.version >= HttpVersion11 and "100-continue" in map(str.strip, expected)


def ask_for_body(request: web.Request) -> None:
    """Send ``100 Continue`` to a client that waits for it before the body. Raises :class:`UnsupportedMediaType`."""
    coding = ",".join(request.headers.getall(hdrs.TRANSFER_ENCODING, ["chunked"]))
    if coding.strip().lower() != "chunked":
        raise UnsupportedMediaType("The body's Transfer-Encoding is not supported: use chunked, or none.")
    if not request.content.is_eof() and request.get(EXPECTS_CONTINUE) and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


# Bytes per second at which a long body must arrive: those of a slow mobile connection.
MIN_BODY_RATE = 16 * 1024
# Joining the pieces of a body takes some 0.5 ms per MiB.
_LONGEST_JOINED = 1024 * 1024


async def read_body(request: web.Request, limits: LimitSettings) -> bytes:
    """Return the body of *request*, which is authorized, decompressed. Raises :class:`InvalidRequest`."""
    coding = content_coding(request)
    max_size = request.client_max_size
    check_body_size(max_size, request.content_length or 0)
    ask_for_body(request)
    try:
        # Mostly it came with the head.
        if request.content.is_eof():
            body = request.content.read_nowait()
        else:
            body = await _arrived(request, limits)
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "The request's body cannot be read: it is not what its Transfer-Encoding says.", code="invalid_encoding"
        ) from error
    if len(body) > max_size:
        check_body_size(max_size, len(body))
    if coding is None or not body:
        return body
    return await decompress(body, coding, max_size)


async def _arrived(request: web.Request, limits: LimitSettings) -> bytes:
    """Return a body that is still arriving. Raises :class:`PayloadTooLarge` and :class:`RequestTimeout`."""
    pieces = [bytearray()]
    size = 0
    began = asyncio.get_running_loop().time()
    allowed = limits.body_timeout
    try:
        async with asyncio.timeout_at(began + allowed) as deadline:
            async for piece in request.content.iter_any():
                if len(pieces[-1]) > _LONGEST_JOINED:
                    pieces.append(bytearray())
                pieces[-1] += piece
                size += len(piece)
                check_body_size(request.client_max_size, size)
                # A large body may take longer, if it arrives at a minimum rate.
                allowed = limits.body_timeout + size / MIN_BODY_RATE
                deadline.reschedule(began + allowed)
    except TimeoutError as error:
        raise RequestTimeout(f"The request's body did not arrive in time ({allowed:.0f} seconds).") from error
    return await offload.run(b"".join, pieces, cost=offload.COPY * size)


def check_body_size(max_size: int, size: int) -> None:
    """Raise :class:`PayloadTooLarge` if *size* bytes are more than *max_size*."""
    if size > max_size:
        raise PayloadTooLarge(f"The request's body is larger than the limit of {max_size} bytes.")


# How many bodies are decompressed at the same time: each needs memory for a whole body.
_THREADS = 2


def content_coding(request: web.Request) -> str | None:
    """Return the coding of the body, if any. Raises :class:`UnsupportedMediaType` for one that is not decoded."""
    if hdrs.CONTENT_ENCODING not in request.headers:
        return None
    named = ",".join(request.headers.getall(hdrs.CONTENT_ENCODING)).lower().split(",")
    used = [coding for coding in map(str.strip, named) if coding not in ("", "identity")]
    if not used:
        return None
    supported = [coding for coding in codings() if coding != "x-gzip"]
    if len(used) > 1 or used[0] not in codings():
        names = ", ".join(supported)
        raise UnsupportedMediaType(f"The body's Content-Encoding is not supported: use {names}, or none.")
    return used[0]


async def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """Return *body*, decoded from *coding* to *limit* bytes at most. Raises :class:`InvalidRequest`."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), _decompress, body, coding, limit)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="decompress")


def _decompress(body: bytes, coding: str, limit: int) -> bytes:
    decoder = decoder_for(coding)
    content = decoder.decode(body, limit + 1)
    if len(content) > limit:
        raise too_large_decompressed(limit)
    decoder.close()
    return content


def too_large_decompressed(limit: int) -> PayloadTooLarge:
    """Return the error for a body that has more than *limit* bytes when it is decompressed."""
    return PayloadTooLarge(f"The request's body is larger than the limit of {limit} bytes, decompressed.")
