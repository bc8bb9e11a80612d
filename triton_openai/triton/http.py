"""
Triton over HTTP: control calls and single answers through one pooled aiohttp session, streams through
:mod:`triton_openai.triton.http_stream`.

Source of the facts: the KServe v2 HTTP protocol with Triton's binary data, model repository and generate extensions.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from triton_openai.config.tls import PERHAPS_REFUSED, words
from triton_openai.errors import ServiceError, UpstreamError, UpstreamTimeout
from triton_openai.triton.client import IndexEntry, Receiver, ServerInfo
from triton_openai.triton.connection import ConnectionSettings, Header, watched_socket
from triton_openai.triton.http_stream import ConnectionPool, HttpStream, error_text
from triton_openai.triton.status import Failure, classify, cut_off, no_answer, unreachable
from triton_openai.triton.tensors import (
    BinaryResponse,
    InferRequest,
    InferResponse,
    ModelConfig,
    OutputTensor,
    parse_model_config,
)


class HttpSession:
    """
    The session of new calls. Those that it had before go on until their last call has ended.

    Made on first use, because a session belongs to the running loop.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None, timeout: aiohttp.ClientTimeout) -> None:
        self._ssl = ssl_context
        self._timeout = timeout
        self._current: aiohttp.ClientSession | None = None
        self._calls: dict[aiohttp.ClientSession, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the session for one call, its answer included."""
        session = self._current
        if session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl or True, socket_factory=watched_socket)
            session = self._current = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
            self._calls[session] = 0
        self._calls[session] += 1
        try:
            yield session
        finally:
            if session in self._calls:
                self._calls[session] -= 1
                self._close_unused()

    def renew(self) -> None:
        """Begin further calls on new connections; idle ones are closed, and those in use when their calls end."""
        self._current = None
        self._close_unused()

    def _close_unused(self) -> None:
        for session, calls in list(self._calls.items()):
            if not calls and session is not self._current:
                del self._calls[session]
                task = asyncio.get_running_loop().create_task(session.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every connection."""
        self._current = None
        sessions = list(self._calls)
        self._calls.clear()
        await asyncio.gather(*self._closing, *(session.close() for session in sessions))


_LARGE_BODY = 1 << 20
_HEADER_LENGTH = "Inference-Header-Content-Length"
_index_decoder = msgspec.json.Decoder(list[IndexEntry])
_server_decoder = msgspec.json.Decoder(ServerInfo)


class _OutputParameters(msgspec.Struct, frozen=True):
    binary_data_size: int = 0


class _Output(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _OutputParameters = _OutputParameters()


class _InferHeader(msgspec.Struct, frozen=True):
    outputs: list[_Output] = []


_header_decoder = msgspec.json.Decoder(_InferHeader)


def generate_body(request: InferRequest) -> bytes:
    """
    Return the body of a generate call: one key per input, a scalar for a single element, a flat list for more.

    Triton infers the shapes from the model's metadata, in the way :meth:`ModelConfig.wire_shape` lays them out.
    """
    fields = [b'{"id":', msgspec.json.encode(request.id)]
    for tensor in request.inputs:
        values = tensor.values
        if len(values) == 1:
            value = msgspec.json.encode(values[0])
        elif tensor.datatype == "BYTES":
            # One by one: they may be images of many megabytes, and encoding holds the interpreter lock.
            value = b"[%b]" % b",".join(map(msgspec.json.encode, values))
        else:
            value = msgspec.json.encode(list(values))
        fields += (b",", msgspec.json.encode(tensor.name), b":", value)
    return b"".join([*fields, b"}"])


def infer_body(request: InferRequest) -> tuple[bytes, int]:
    """Return the body of an infer call with binary tensors, and the length of its JSON part."""
    inputs = []
    contents = []
    for tensor in request.inputs:
        raw = tensor.raw()
        contents.append(raw)
        inputs.append(
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(raw)},
            }
        )
    header: dict[str, Any] = {"id": request.id, "inputs": inputs}
    parameters: dict[str, Any] = {"priority": request.priority} if request.priority else {}
    if request.outputs:
        header["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    encoded = msgspec.json.encode(header)
    return b"".join([encoded, *contents]), len(encoded)


def _in_pieces(body: bytes) -> bytes | io.BytesIO:
    """Return a large body in the form that is written piece by piece, so that other requests get their turn."""
    return io.BytesIO(body) if len(body) >= _LARGE_BODY else body


def parse_infer(body: bytes, header_length: int, model: str) -> BinaryResponse:
    """
    Return the outputs of an infer answer of *model*.

    Raises :class:`UpstreamError` where there are none, and when the contents do not add up.
    """
    try:
        header = _header_decoder.decode(body[:header_length])
    except msgspec.MsgspecError as error:
        raise UpstreamError("Triton sent an answer that cannot be read.", detail=str(error)) from error
    if not header.outputs:
        raise no_answer(model)
    outputs: dict[str, OutputTensor] = {}
    offset = header_length
    for output in header.outputs:
        end = offset + output.parameters.binary_data_size
        if end > len(body):
            raise UpstreamError(f"Triton sent a malformed '{output.name}' output.")
        outputs[output.name] = OutputTensor(output.datatype, output.shape, body[offset:end])
        offset = end
    return BinaryResponse(outputs)


def _reason(error: aiohttp.ClientError) -> str:
    """Return why no connection could be made; what a handshake failed of stands in the cause."""
    cause = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error.__cause__
    return words(cause) if isinstance(cause, ssl.SSLError) else f"{type(error).__name__}: {error}"


class HttpClient:
    """One Triton behind its HTTP port. See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        host, port = parts.hostname or "localhost", parts.port or (443 if tls else 8000)
        self._base = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._host_header = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        self._settings = settings
        self._ssl = settings.ssl_context() if tls else None
        self._pool = ConnectionPool(
            host,
            port,
            ssl_context=self._ssl,
            server_name=settings.server_name if tls else None,
            connect_timeout=settings.connect_timeout,
            doubted=self._renew,
        )
        self._session = HttpSession(
            ssl_context=self._ssl,
            timeout=aiohttp.ClientTimeout(total=settings.control_timeout, sock_connect=settings.connect_timeout),
        )
        # The headers of the settings as they stand in a request, made again when they change.
        self._headers: tuple[Header, ...] = ()
        self._header_lines = ""

    def _renew(self) -> None:
        self._session.renew()

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, *, model: str = "", **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Round one call, and the reading of its answer, translate what aiohttp raises and what Triton refuses."""
        options["headers"] = {**dict(self._settings.headers()), **options.get("headers", {})}
        if self._ssl is not None:
            options["server_hostname"] = self._settings.server_name
        loop = asyncio.get_running_loop()
        began, answered = loop.time(), False
        try:
            async with (
                self._session.call() as session,
                session.request(method, f"{self._base}{path}", **options) as response,
            ):
                answered = True
                if response.status >= 400:
                    text = error_text(await response.read())
                    raise classify(Failure(text, model, str(response.status)))
                yield response
        except aiohttp.ServerDisconnectedError as error:
            raise self._cut_off(error) from error
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise unreachable(_reason(error)) from error
        except asyncio.CancelledError:
            # Whoever gave up had reason to: further calls need not find out one by one that nobody is there.
            if not answered and loop.time() - began >= self._settings.connect_timeout:
                self._pool.distrust()
            raise
        except TimeoutError as error:
            self._pool.distrust()
            raise UpstreamTimeout("Triton did not answer in time.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._cut_off(error) from error

    def _cut_off(self, error: BaseException) -> ServiceError:
        if isinstance(error.__cause__, ssl.SSLError):
            return unreachable(words(error.__cause__))
        return cut_off(None if self._ssl is None else PERHAPS_REFUSED)

    async def live(self) -> bool:
        """Return whether the server answers."""
        async with self._call("GET", "/v2/health/live"):
            return True

    async def server_info(self) -> ServerInfo:
        """Return what the server says of itself."""
        async with self._call("GET", "/v2") as response:
            body = await response.read()
        try:
            return _server_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UpstreamError("Triton sent server metadata that cannot be read.", detail=str(error)) from error

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index."""
        async with self._call("POST", "/v2/repository/index", data=b"") as response:
            body = await response.read()
        try:
            return _index_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UpstreamError("Triton sent a repository index that cannot be read.", detail=str(error)) from error

    async def model_config(self, model: str) -> ModelConfig:
        """Return a model's configuration."""
        async with self._call("GET", f"/v2/models/{quote(model, safe='')}/config", model=model) as response:
            return parse_model_config(await response.read())

    async def load_model(self, model: str) -> None:
        """Load a model; returns when it is ready, however long that takes."""
        await self._control(
            model, "load", b"{}", aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout)
        )

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """Begin to unload a model."""
        body = msgspec.json.encode({"parameters": {"unload_dependents": dependents}})
        await self._control(model, "unload", body, None)

    async def _control(self, model: str, action: str, body: bytes, timeout: aiohttp.ClientTimeout | None) -> None:
        path = f"/v2/repository/models/{quote(model, safe='')}/{action}"
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        async with self._call("POST", path, model=model, data=body, **options) as response:
            await response.read()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request with binary tensors; how long it may take is the caller's business."""
        body, header_length = infer_body(request)
        headers: Mapping[str, str] = {
            _HEADER_LENGTH: str(header_length),
            "Content-Type": "application/octet-stream",
            **request.headers,
        }
        path = f"/v2/models/{quote(request.model, safe='')}/infer"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout)
        async with self._call(
            "POST", path, model=request.model, data=_in_pieces(body), headers=headers, timeout=timeout
        ) as response:
            answer = await response.read()
            length = response.headers.get(_HEADER_LENGTH)
        header_length = int(length) if length is not None and length.isdecimal() else len(answer)
        return parse_infer(answer, header_length, request.model)

    def stream(self, request: InferRequest, receiver: Receiver) -> HttpStream:
        """Send a ``generate_stream`` call."""
        large = sum(tensor.size for tensor in request.inputs) > _LARGE_BODY
        return HttpStream(self._pool, request, receiver, message=partial(self._message, request), large=large)

    def _message(self, request: InferRequest) -> bytes:
        """Return the bytes of a ``generate_stream`` call."""
        body = generate_body(request)
        further = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
        head = (
            f"POST {self._prefix}/v2/models/{quote(request.model, safe='')}/generate_stream HTTP/1.1\r\n"
            f"Host: {self._host_header}\r\n"
            "Content-Type: application/json\r\n"
            "Accept: text/event-stream\r\n"
            f"{self._lines()}{further}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode("ascii")
        return head + body

    def _lines(self) -> str:
        headers = self._settings.headers()
        if headers is not self._headers:
            self._headers = headers
            self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return self._header_lines

    async def close(self) -> None:
        """Close the session and the idle connections."""
        self._pool.close()
        await self._session.close()
