"""
Reads multipart forms part by part, as they arrive: within limits of size, number and time, for authorized requests.

What reads a whole form into a typed request is ``read_form`` in ``api/bodies.py``.
"""

from __future__ import annotations

import asyncio
import io
import warnings
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, MultipartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from triton_openai.serving.request_body import MIN_BODY_RATE, ask_for_body, check_body_size, content_coding

_T = TypeVar("_T")
#: Parts of a form, files and repeated fields included.
MAX_PARTS = 256
# Lines and bytes of a part's head: its name, that of its file, and a media type. Bytes that are read at once.
_HEAD_LINES, _HEAD_LINE, _PIECE = 16, 4096, 65_536


class HttpForm:
    """
    The form that *request* brings; see :class:`triton_openai.operations.Form`.

    Raises :class:`UnsupportedMediaType` for what is no form.
    """

    def __init__(self, request: web.Request, limits: LimitSettings) -> None:
        kind = request.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise UnsupportedMediaType(f"The body must be a form (multipart/form-data), not '{kind[:100]}'.")
        if content_coding(request) is not None:
            raise UnsupportedMediaType("The body's Content-Encoding is not supported: a form cannot be compressed.")
        self._max_size = request.client_max_size
        # Of heads that aiohttp cannot read: Python would keep and print each such text, and they are the client's.
        for warning in (BadContentDispositionHeader, BadContentDispositionParam):
            warnings.simplefilter("ignore", warning)
        self._request, self._limits = request, limits
        # Seconds that were spent waiting for the client.
        self._waited = 0.0

    async def parts(self, max_size: int) -> AsyncIterator[Part]:
        self._max_size = max_size
        check_body_size(max_size, self._request.content_length or 0)
        ask_for_body(self._request)
        try:
            reader = MultipartReader(
                self._request.headers, self._request.content, max_field_size=_HEAD_LINE, max_headers=_HEAD_LINES
            )
        except ValueError as error:
            raise _malformed() from error
        number = 0
        while (part := await self.arrived(reader.next())) is not None:
            number += 1
            if number > MAX_PARTS:
                raise PayloadTooLarge(f"The request's form has more than {MAX_PARTS} parts.")
            if not isinstance(part, BodyPartReader) or not part.name:
                raise InvalidRequest("A part of the request's form has no name.", code="invalid_form")
            if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "binary").lower() not in ("binary", "8bit", "7bit"):
                raise UnsupportedMediaType("The parts of a form cannot have a Content-Transfer-Encoding.")
            yield Part(self, part, part.name)

    @property
    def size(self) -> int:
        return self._request.content.total_bytes

    @property
    def declared_size(self) -> int | None:
        return self._request.content_length

    async def arrived(self, what: Awaitable[_T]) -> _T:
        """Return *what* is awaited of the form. Raises :class:`InvalidRequest`, also if it takes too long."""
        loop = asyncio.get_running_loop()
        # A large form may take longer, if it arrives at a minimum rate.
        allowed, began = self._limits.body_timeout + self.size / MIN_BODY_RATE, loop.time()
        try:
            async with asyncio.timeout(allowed - self._waited):
                found = await what
        except TimeoutError as error:
            raise RequestTimeout(f"The request's body did not arrive in time ({allowed:.0f} seconds).") from error
        except (ValueError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
            raise _malformed() from error
        self._waited += loop.time() - began
        check_body_size(self._max_size, self.size)
        return found


class Part:
    """A part of a form: *name* is the field's."""

    def __init__(self, form: HttpForm, reader: BodyPartReader, name: str) -> None:
        self.name = name
        #: That of a file, ``None`` for a text.
        self.filename = reader.filename
        self.media_type = reader.headers.get(hdrs.CONTENT_TYPE, "")
        self._form, self._reader = form, reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the contents as they arrive. Raises as :meth:`HttpForm.arrived`."""
        while not self._reader.at_eof():
            yield await self._form.arrived(self._reader.read_chunk(_PIECE))

    async def read(self, most: int) -> bytes:
        """Return the contents. Raises :class:`PayloadTooLarge` for more than *most* bytes, and as :meth:`pieces`."""
        # Its bytes are not copied at the end.
        content = io.BytesIO()
        async for piece in self.pieces():
            content.write(piece)
            if content.tell() > most:
                name = self.name[:100]
                raise PayloadTooLarge(f"The field '{name}' is larger than the limit of {most} bytes.", param=name)
        return content.getvalue()


def _malformed() -> InvalidRequest:
    return InvalidRequest("The request's body is not a valid form (multipart/form-data).", code="invalid_form")
