"""The HTTP client of ``triton-openai batch``: the key, errors in one sentence, and when to send a request again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp
import msgspec

from triton_openai.cli.endpoint import Endpoint, connection_reason
from triton_openai.errors import printable

_T = TypeVar("_T")
# Statuses after which the same request may succeed.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 529})
_FIRST_DELAY = 1.0
_MAX_DELAY = 60.0
# A service that asks for more than this is asked again after this time.
_MAX_RETRY_AFTER = 600.0
_MAX_MESSAGE = 500
# Bytes of a line of a file of results: more than a request of a batch can be answered with.
_MAX_LINE = 512 * 1024 * 1024
_PIECE = 256 * 1024


class RequestFailure(Exception):
    """A request that has failed, with a sentence for people. *status* is 0 if nothing has answered."""

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", retry_after: float | None = None, body: bytes = b""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        #: The answer.
        self.body = body
        #: Seconds after which the service wants the next attempt, if it says so.
        self.retry_after = retry_after

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or self.status in _PASSING


class Client:
    """
    Sends requests to the service at *url*, with the *key* in a header.

    The key appears in no message: errors name the service's own texts, of which what looks like a key is masked.
    """

    def __init__(self, url: str, key: str | None, *, connections: int, timeout: float) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers=Endpoint(url, key).headers,
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=timeout, connect=60.0),
            # Companies reach services by proxies of the environment.
            trust_env=True,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def answer(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield its answer. Raises :class:`RequestFailure` for an error, or none."""
        try:
            async with self._session.request(method, self._url + path, allow_redirects=False, **options) as response:
                if response.status >= 300:
                    raise await _failure(response)
                yield response
        except TimeoutError as error:
            raise RequestFailure("The service did not answer in time.") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = printable(connection_reason(error), _MAX_MESSAGE)
            raise RequestFailure(f"The service at {shown_url(self._url)} cannot be reached: {reason}.") from error

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """Send a request, and return the JSON of its answer. Raises :class:`RequestFailure`."""
        async with self.answer(method, path, **options) as response:
            content = await response.read()
        try:
            return msgspec.json.decode(content)
        except msgspec.MsgspecError as error:
            raise RequestFailure(f"The answer to {method} {path} is no JSON.", status=response.status) from error

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """Yield the lines of a file of results. Raises :class:`RequestFailure`, also if it breaks off."""
        async with self.answer("GET", path, timeout=aiohttp.ClientTimeout(total=None, sock_read=300.0)) as response:
            pending = bytearray()
            async for piece in response.content.iter_chunked(_PIECE):
                pending += piece
                *whole, rest = pending.split(b"\n")
                for line in whole:
                    if line.strip():
                        yield bytes(line)
                pending = bytearray(rest)
                if len(pending) > _MAX_LINE:
                    raise RequestFailure(f"A line of {path} is too long.", status=200)
            if pending.strip():
                yield bytes(pending)


def shown_url(url: str) -> str:
    """Return *url* without a user and a password."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


async def _failure(response: aiohttp.ClientResponse) -> RequestFailure:
    """Return the error of a *response*: that of OpenAI's envelope, or the beginning of another body."""
    status = response.status
    if status < 400:
        target = shown_url(response.headers.get("Location", "another address"))
        return RequestFailure(f"The service redirects to {target}: name that address in --url.", status=404)
    content = await response.read()
    message, code = error_of(content)
    text = f"HTTP {status}"
    if message:
        text = f"{text}: {message}"
    return RequestFailure(text, status=status, code=code, retry_after=retry_after_of(response.headers), body=content)


def error_of(content: bytes) -> tuple[str, str]:
    """Return message and code of an error's body."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return printable(content.decode("utf-8", "replace").strip(), 200), ""
    error = body
    if isinstance(body, dict):
        error = body.get("error", body)
    if isinstance(error, dict):
        return printable(str(error.get("message") or ""), _MAX_MESSAGE), str(error.get("code") or "")
    return printable(str(error), _MAX_MESSAGE), ""


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` names, as a number or a date (RFC 9110, section 10.2.3)."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    # Also of "nan".
    if not seconds >= 0:
        return 0.0
    return min(seconds, _MAX_RETRY_AFTER)


def delay(attempt: int, retry_after: float | None) -> float:
    """Return the seconds before an attempt, from 1 on: what the service wants, or twice as long each time."""
    backoff = min(_FIRST_DELAY * 2.0 ** (attempt - 1), _MAX_DELAY) * random.uniform(0.75, 1.25)
    if retry_after is None:
        return backoff
    return max(retry_after, backoff / 4)


async def with_retries(
    send: Callable[[], Awaitable[_T]], note: Callable[[str], None], *, attempts: int | None = None
) -> _T:
    """
    Return what *send* returns, which is called again after a passing failure; *note* gets the reason once.

    Raises :class:`RequestFailure` for another failure, and after so many *attempts*; ``None``: as many as it takes.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await send()
        except RequestFailure as failure:
            if not failure.temporary or attempt == attempts:
                raise
            if attempt == 1:
                note(f"{failure.message} Trying again.")
            await asyncio.sleep(delay(attempt, failure.retry_after))
