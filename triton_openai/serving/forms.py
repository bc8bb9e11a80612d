"""
Reads multipart forms (RFC 7578) part by part, as they arrive: within limits of size, number and time.

The parser is that of python-multipart, which Starlette and FastAPI use as well. aiohttp's reader goes through what
precedes the first boundary line by line, without a turn for the event loop: 4 MB of line breaks take 5 s there.
python-multipart takes a body in slices and searches it with compiled code. :class:`FormParser` bounds what remains
slow: everything that is no content of a part, and lines of contents that begin with the boundary.

What reads a whole form into a typed request is ``read_form`` in ``api/bodies.py``.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from triton_openai.serving.content_coding import Decoder, decoder_for
from triton_openai.serving.request_body import (
    MIN_BODY_RATE,
    ask_for_body,
    check_body_size,
    content_coding,
    too_large_decompressed,
)

#: Parts of a form, files and repeated fields included.
MAX_PARTS = 256
#: Bytes of a form that are no contents of parts: heads, boundaries, and what precedes the first and follows the last.
MAX_OVERHEAD = 256 * 1024
#: Bytes before the first boundary.
MAX_PREAMBLE = 4096
#: Bytes that are parsed in one turn of the event loop. The slowest of them take 0.3 µs each.
SLICE = 32 * 1024
# Lines of a part's head, and bytes of each.
_MAX_HEAD_LINES = 16
_MAX_HEAD_LINE = 4096
# Semicolons of a Content-Disposition; the time to read one grows with the square of them.
_MAX_SEMICOLONS = 64
# Bytes of a Content-Type with a boundary, which has 70 bytes at most (RFC 2046).
_MAX_CONTENT_TYPE = 1024
_PLAIN_CODINGS = ("binary", "8bit", "7bit")
# RFC 7578 forbids this form of a name that is not ASCII. Some clients send it, and some of them no other one.
_EXTENDED_NAME = re.compile(rb";[ \t]*filename\*[ \t]*=[ \t]*(UTF-8|ISO-8859-1)'[^';]*'([^\s;\"]*)", re.IGNORECASE)

_OnArrival: TypeAlias = Callable[[int], Awaitable[None]]

# It logs a warning for each form that is malformed, and clients can send many.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class PartHead(msgspec.Struct, frozen=True):
    """The head of a part of a form."""

    #: The name of the field.
    name: str
    #: The name of the file as the client gave it; ``None`` for a part that has none.
    filename: str | None
    #: The media type as the client gave it; empty if there is none.
    media_type: str


class FormParser:
    """
    Parses the bytes of a form into events: the head of each part, pieces of its contents, and ``None`` at its end.

    The work for a slice is bounded, and so is the work for a form of any size. Raises :class:`InvalidRequest` for what
    is no form, and :class:`PayloadTooLarge` for one with too many parts or with too much besides their contents.
    """

    def __init__(self, boundary: bytes) -> None:
        #: What was parsed and is not taken yet.
        self.events: deque[PartHead | bytes | None] = deque()
        self._first_boundary = b"--" + boundary
        self._boundary_line = b"\r\n--" + boundary
        self._preamble: bytearray | None = bytearray()
        self._ended = False
        # Bytes of the whole form, and of the contents of its parts.
        self._size = 0
        self._content_size = 0
        # Lines that begin with the boundary, and the bytes in which the next one may have begun.
        self._boundary_lines = 0
        self._last_bytes = b""
        self._head: dict[bytes, bytes] = {}
        self._field = bytearray()
        self._value = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_field,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_field,
                    "on_headers_finished": self._end_head,
                    "on_part_data": self._add_content,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
                max_header_count=_MAX_HEAD_LINES,
                max_header_size=_MAX_HEAD_LINE,
            )
        except FormParserError as error:
            raise malformed_form() from error

    def feed(self, data: bytes) -> None:
        """Parse *data*, at most :data:`SLICE` bytes, and add its events. Raises as the class says."""
        self._size += len(data)
        if self._preamble is not None:
            data = self._behind_preamble(self._preamble, data)
        if data and not self._ended:
            self._count_boundaries(data)
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise malformed_form() from error
        if self._size - self._content_size > MAX_OVERHEAD:
            raise PayloadTooLarge(
                f"The request's form has more than {MAX_OVERHEAD} bytes besides the contents of its parts."
            )

    def close(self) -> None:
        """Note that no more bytes come. Raises :class:`InvalidRequest` if the form has no end."""
        if not self._ended:
            raise malformed_form()

    def _behind_preamble(self, preamble: bytearray, data: bytes) -> bytes:
        """Return the bytes from the first boundary on; none if it has not come yet."""
        preamble += data
        if preamble.startswith(self._first_boundary):
            start = 0
        else:
            start = preamble.find(b"\n" + self._first_boundary) + 1
            if start == 0 or start > MAX_PREAMBLE:
                if len(preamble) > MAX_PREAMBLE + len(self._first_boundary):
                    raise malformed_form()
                return b""
        self._preamble = None
        return bytes(preamble[start:])

    def _count_boundaries(self, data: bytes) -> None:
        """
        Raise :class:`PayloadTooLarge` if there are more lines that begin with the boundary than a form has parts.

        A client chooses a boundary that its contents do not have (RFC 2046, section 5.1.1). The parser goes through
        what follows each of them byte by byte.
        """
        data = self._last_bytes + data
        self._boundary_lines += data.count(self._boundary_line)
        self._last_bytes = data[1 - len(self._boundary_line) :]
        if self._boundary_lines > MAX_PARTS:
            raise PayloadTooLarge(f"The request's form has more than {MAX_PARTS} parts.")

    # What the parser calls

    def _begin_part(self) -> None:
        self._head = {}

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_field(self) -> None:
        self._head.setdefault(bytes(self._field).lower(), bytes(self._value))
        self._field.clear()
        self._value.clear()

    def _end_head(self) -> None:
        self.events.append(_head_of(self._head))

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content_size += end - start
        self.events.append(data[start:end])

    def _end_part(self) -> None:
        self.events.append(None)

    def _end(self) -> None:
        self._ended = True


def _head_of(head: dict[bytes, bytes]) -> PartHead:
    """Return what the lines of a *head* mean. Raises :class:`InvalidRequest` and :class:`UnsupportedMediaType`."""
    disposition = head.get(b"content-disposition", b"")
    if disposition.count(b";") > _MAX_SEMICOLONS:
        raise malformed_form()
    kind, options = parse_options_header(disposition)
    name = options.get(b"name", b"")
    if not kind or not name:
        raise InvalidRequest("A part of the request's form has no name.", code="invalid_form")
    coding = _text(head.get(b"content-transfer-encoding", b"binary"))
    if coding.strip().lower() not in _PLAIN_CODINGS:
        raise UnsupportedMediaType("The parts of a form cannot have a Content-Transfer-Encoding.")
    filename = None
    if b"filename" in options:
        filename = _text(options[b"filename"])
    extended = _EXTENDED_NAME.search(disposition)
    if extended is not None:
        filename = unquote_to_bytes(extended[2]).decode(extended[1].decode(), "replace")
    return PartHead(name=_text(name), filename=filename, media_type=_text(head.get(b"content-type", b"")))


def _text(value: bytes) -> str:
    """Return *value* as text. What is not UTF-8 is replaced: a lone surrogate could not be written as JSON."""
    return value.decode("utf-8", "replace")


class HttpForm:
    """
    The form that *request* brings; see :class:`triton_openai.operations.Form`.

    Raises :class:`UnsupportedMediaType` for what is no form, and :class:`InvalidRequest` for one without a boundary.
    """

    def __init__(self, request: web.Request, limits: LimitSettings) -> None:
        content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
        kind = content_type.partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise UnsupportedMediaType(f"The body must be a form (multipart/form-data), not '{kind[:100]}'.")
        coding = content_coding(request)
        self._decoder: Decoder | None = None
        if coding is not None:
            self._decoder = decoder_for(coding)
        # The bytes that were parsed.
        self._parsed_size = 0
        self._parser = FormParser(_boundary_of(content_type))
        self._request = request
        self._limits = limits
        # Seconds that were spent waiting for the client.
        self._waited = 0.0

    def parts(self, max_size: int, on_arrival: _OnArrival | None = None) -> AsyncIterator[Part]:
        check_body_size(max_size, self._request.content_length or 0)
        # Neither is kept in the form: whoever waits for what arrives may have a reference to the form.
        return self._parts(max_size, on_arrival)

    async def _parts(self, max_size: int, on_arrival: _OnArrival | None) -> AsyncIterator[Part]:
        ask_for_body(self._request)
        events = self._parser.events
        number = 0
        while await self._parsed(max_size, on_arrival):
            event = events.popleft()
            if not isinstance(event, PartHead):
                continue
            number += 1
            if number > MAX_PARTS:
                raise PayloadTooLarge(f"The request's form has more than {MAX_PARTS} parts.")
            yield Part(event, self._contents(max_size, on_arrival))

    @property
    def size(self) -> int:
        if self._decoder is not None:
            return self._parsed_size
        return self._request.content.total_bytes

    @property
    def declared_size(self) -> int | None:
        if self._decoder is not None:
            # That of the compressed bytes says nothing.
            return None
        return self._request.content_length

    async def _contents(self, max_size: int, on_arrival: _OnArrival | None) -> AsyncIterator[bytes]:
        """Yield the contents of the part whose head came last."""
        while await self._parsed(max_size, on_arrival):
            event = self._parser.events.popleft()
            if not isinstance(event, bytes):
                return
            yield event

    async def _parsed(self, max_size: int, on_arrival: _OnArrival | None) -> bool:
        """Wait until an event has been parsed; return whether there is one: there is none behind the form's end."""
        while not self._parser.events:
            data = await self._next_decoded(max_size)
            if not data:
                self._parser.close()
                return False
            if on_arrival is not None:
                await on_arrival(self.size)
            self._parser.feed(data)
            # Much may have arrived by now, and then nothing else would wait.
            await asyncio.sleep(0)
        return True

    async def _next_decoded(self, max_size: int) -> bytes:
        """
        Return the next bytes of the form, decompressed, none at the end: one slice at most.

        Raises as :meth:`_next_slice`. What comes out of a slice is not known before, so no more than a slice is taken
        of it at a time.
        """
        decoder = self._decoder
        if decoder is None:
            return await self._next_slice(max_size)
        content = b""
        while not content:
            data = b""
            if not decoder.has_more:
                data = await self._next_slice(max_size)
                if not data:
                    decoder.close()
                    return b""
            content = decoder.decode(data, SLICE)
            # What comes next may be nothing again, for as long as the body is.
            await asyncio.sleep(0)
        self._parsed_size += len(content)
        if self._parsed_size > max_size:
            raise too_large_decompressed(max_size)
        return content

    async def _next_slice(self, max_size: int) -> bytes:
        """
        Return the next bytes, none at the end.

        Raises :class:`InvalidRequest`, also if they take too long, and :class:`PayloadTooLarge` above *max_size* bytes.
        """
        loop = asyncio.get_running_loop()
        # A large form may take longer, if it arrives at a minimum rate.
        allowed = self._limits.body_timeout + self._request.content.total_bytes / MIN_BODY_RATE
        began = loop.time()
        try:
            async with asyncio.timeout(allowed - self._waited):
                data = await self._request.content.read(SLICE)
        except TimeoutError as error:
            raise RequestTimeout(f"The request's body did not arrive in time ({allowed:.0f} seconds).") from error
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise malformed_form() from error
        self._waited += loop.time() - began
        check_body_size(max_size, self._request.content.total_bytes)
        return data


def _boundary_of(content_type: str) -> bytes:
    """Return the boundary that a form's *content_type* names. Raises :class:`InvalidRequest`."""
    if len(content_type) > _MAX_CONTENT_TYPE:
        raise malformed_form()
    _, options = parse_options_header(content_type.encode("utf-8", "surrogateescape"))
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise malformed_form()
    return boundary


class Part:
    """A part of a form, with its contents as they arrive."""

    def __init__(self, head: PartHead, contents: AsyncIterator[bytes]) -> None:
        #: The name of the field.
        self.name = head.name
        #: The name of the file as the client gave it; ``None`` for a part that has none.
        self.filename = head.filename
        self.media_type = head.media_type
        self._contents = contents

    def pieces(self) -> AsyncIterator[bytes]:
        """Return the contents as they arrive. Raises :class:`InvalidRequest` if they do not."""
        return self._contents

    async def read(self, max_size: int) -> bytes:
        """Return the contents. Raises as :meth:`pieces`, and :class:`PayloadTooLarge` beyond *max_size* bytes."""
        # Its bytes are not copied at the end.
        content = io.BytesIO()
        async for piece in self.pieces():
            content.write(piece)
            if content.tell() > max_size:
                name = self.name[:100]
                raise PayloadTooLarge(f"The field '{name}' is larger than the limit of {max_size} bytes.", param=name)
        return content.getvalue()


def malformed_form() -> InvalidRequest:
    """Return the error for a body that is no form."""
    return InvalidRequest("The request's body is not a valid form (multipart/form-data).", code="invalid_form")
