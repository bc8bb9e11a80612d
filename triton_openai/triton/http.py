"""
Triton over HTTP: builds requests and reads answers. :mod:`triton_openai.triton.http_stream` transports them.

Source of the facts: the KServe v2 HTTP protocol with Triton's binary data, model repository and generate extensions.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from time import monotonic
from types import MappingProxyType
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.errors import InvalidAnswer, ServiceError, UpstreamTimeout
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.client import IndexEntry, Receiver, ServerInfo
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.connection import ConnectionSettings, Header
from triton_openai.triton.http_json import UNREADABLE, refusal, too_long
from triton_openai.triton.http_stream import MAX_HEAD_BYTES, ConnectionPool, HttpCall, HttpStream
from triton_openai.triton.status import foreign_error, no_answer_error
from triton_openai.triton.tensors import LARGE, Buffer, InferRequest, InferResponse, ModelConfig

# An index of ten thousand models has a few megabytes, as has a configuration with long parameters.
MAX_CONTROL_BYTES = 64 * 1024 * 1024
# The most digits of the length of a body.
_MAX_LENGTH_DIGITS = 15
_quoted = lru_cache(256)(partial(quote, safe=""))
_Decoded = TypeVar("_Decoded")


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: Annotated[int, Meta(ge=0)] = 0


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _TensorParameters = _TensorParameters()


class _InferHeader(msgspec.Struct, frozen=True):
    outputs: list[_Tensor] = []


# The beginning of the JSON of every answer to an infer call, and where it is searched.
_NAME_OR_OUTPUTS = re.compile(rb'\A\s*\{.*"(?:model_name|outputs)"', re.DOTALL)
_START = 4096
_header_decoder = msgspec.json.Decoder(_InferHeader)


def generate_body(request: InferRequest) -> bytes:
    """
    Return the body of a generate call: one key per input, a scalar for a single element, a flat list for more.

    Triton infers the shapes from the model's metadata, in the way :meth:`ModelConfig.wire_shape` lays them out.
    """
    body: dict[str, Any] = {"id": request.id}
    for tensor in request.inputs:
        values = tensor.values
        if len(values) == 1:
            body[tensor.name] = values[0]
        elif tensor.datatype == "BYTES":
            # One by one: they may be images of many megabytes, and the encoder holds the interpreter lock.
            body[tensor.name] = msgspec.Raw(b"[%b]" % b",".join(map(msgspec.json.encode, values)))
        elif isinstance(values, list | tuple):
            body[tensor.name] = values
        else:
            body[tensor.name] = list(values)
    return msgspec.json.encode(body)


def infer_body(request: InferRequest) -> tuple[bytes, int]:
    """Return the body of an infer call with binary tensors, and the length of its JSON part."""
    contents = [tensor.raw() for tensor in request.inputs]
    inputs = [
        _Tensor(tensor.name, tensor.datatype, tensor.shape, _TensorParameters(len(raw)))
        for tensor, raw in zip(request.inputs, contents, strict=True)
    ]
    header: dict[str, Any] = {"id": request.id, "inputs": inputs}
    parameters: dict[str, Any] = {**request.parameters}
    if request.priority:
        parameters["priority"] = request.priority
    if request.outputs:
        form: dict[str, Any] = {"binary_data": True}
        if request.classification:
            form["classification"] = request.classification
        header["outputs"] = [{"name": name, "parameters": form} for name in request.outputs]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    encoded = msgspec.json.encode(header)
    return b"".join([encoded, *contents]), len(encoded)


def parse_infer(body: bytes, header_length: int, model: str) -> BinaryResponse:
    """Return the outputs of an infer answer. Raises :class:`UpstreamError` for none, and for sizes that do not fit."""
    try:
        header = _header_decoder.decode(body[:header_length])
    except UNREADABLE as error:
        raise InvalidAnswer("it cannot be read", model=model, detail=str(error)) from error
    if not header.outputs:
        raise no_answer_error(model)
    contents: list[Buffer] = []
    offset = header_length
    for output in header.outputs:
        end = offset + output.parameters.binary_data_size
        if end > len(body):
            raise InvalidAnswer("it has fewer bytes than it says", model=model)
        if end - offset <= LARGE:
            contents.append(body[offset:end])
        else:
            # Not copied: that would block the event loop.
            contents.append(memoryview(body)[offset:end])
        offset = end
    outputs = [(output.name, output.datatype, output.shape) for output in header.outputs]
    return BinaryResponse(Layout(outputs, model), contents)


class HttpClient:
    """One Triton behind its HTTP port. See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._pool = ConnectionPool(url, settings)
        self._prefix = urlsplit(url).path.rstrip("/")
        host, port = self._pool.address
        if ":" not in host:
            self._host_header = f"{host}:{port}"
        else:
            self._host_header = f"[{host}]:{port}"
        # The headers of the settings, and their lines in a request, rebuilt when they change.
        self._headers: tuple[Header, ...] = ()
        self._header_lines = ""
        if not settings.headers_change:
            self._read_headers()

    async def _call(
        self, message: bytes, *, model: str = "", limited: bool = True, max_size: int = MAX_CONTROL_BYTES
    ) -> HttpCall:
        """
        Send the request *message* and return the answer, if *limited* within the control timeout.

        Raises :class:`ServiceError`, also for an answer of more than *max_size* bytes.
        """
        began = monotonic()
        timeout = None
        if limited:
            timeout = self._settings.control_timeout
        try:
            async with asyncio.timeout(timeout):
                answer = await HttpCall.send(self._pool, message, too_long("body", model), max_size=max_size)
        except TimeoutError as error:
            self._pool.close_idle()
            raise UpstreamTimeout("Triton did not answer in time.") from error
        except asyncio.CancelledError:
            # The caller has given up a silent connection. Further calls must not use it.
            if monotonic() - began >= self._settings.connect_timeout:
                self._pool.close_idle()
            raise
        if answer.status >= 300:
            raise refusal(answer.parts, answer.status, model)
        return answer

    async def server_info(self) -> ServerInfo:
        return _decoded(ServerInfo, await self._call(self._request("GET", "/v2")))

    async def repository_index(self) -> Sequence[IndexEntry]:
        answer = await self._call(self._request("POST", "/v2/repository/index"))
        return _decoded(list[IndexEntry], answer)

    async def model_config(self, model: str) -> ModelConfig:
        answer = await self._call(self._request("GET", f"/v2/models/{quote(model, safe='')}/config"), model=model)
        config = _decoded(dict[str, Any], answer)
        if "name" not in config:
            raise _foreign(b"".join(answer.parts), answer.status)
        return read_model_config(config, model)

    async def load_model(self, model: str) -> None:
        await self._control(model, "load", b"{}", limited=False)

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        await self._control(model, "unload", msgspec.json.encode({"parameters": {"unload_dependents": dependents}}))

    async def _control(self, model: str, action: str, body: bytes, *, limited: bool = True) -> None:
        path = f"/v2/repository/models/{quote(model, safe='')}/{action}"
        answer = await self._call(self._request("POST", path, body), model=model, limited=limited)
        # Triton's own answer has no body.
        if b"".join(answer.parts).strip():
            _decoded(Any, answer)

    async def infer(self, request: InferRequest) -> InferResponse:
        def message() -> bytes:
            body, json_length = infer_body(request)
            path = f"/v2/models/{quote(request.model, safe='')}/infer"
            fixed = f"Inference-Header-Content-Length: {json_length}\r\nContent-Type: application/octet-stream\r\n"
            return self._request("POST", path, body, request.headers, fixed)

        made = await offload.run(message, cost=request.cost)
        max_size = request.max_answer + MAX_HEAD_BYTES
        answer = await self._call(made, model=request.model, limited=False, max_size=max_size)
        length = answer.json_length
        content = await offload.run(b"".join, answer.parts, cost=offload.COPY * sum(map(len, answer.parts)))
        if length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS:
            return parse_infer(content, int(length), request.model)
        if not length and _NAME_OR_OUTPUTS.search(content[:_START]) is None:
            # Not from a Triton: its JSON has one of these keys.
            raise _foreign(content)
        return parse_infer(content, len(content), request.model)

    def stream(self, request: InferRequest, receiver: Receiver) -> HttpStream:
        def message() -> bytes:
            path = f"/v2/models/{_quoted(request.model)}/generate_stream"
            fixed = "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            return self._request("POST", path, generate_body(request), request.headers, fixed)

        return HttpStream(self._pool, request, receiver, message=message)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
        fixed: str = "",
    ) -> bytes:
        """Return the bytes of a request with *fixed* header lines, the settings' and its own *headers*."""
        if self._settings.headers_change:
            self._read_headers()
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host_header}\r\n{fixed}{self._header_lines}"
        for name, value in headers.items():
            head += f"{name}: {value}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        return head.encode("ascii") + body

    def _read_headers(self) -> None:
        headers = self._settings.headers()
        if headers is not self._headers:
            self._headers = headers
            self._header_lines = "".join([f"{name}: {value}\r\n" for name, value in headers])

    async def close(self) -> None:
        """Close the idle connections; those in use close when their calls end."""
        self._pool.close()


def _decoded(kind: type[_Decoded], answer: HttpCall) -> _Decoded:
    """Return the body of *answer* as *kind*. Raises :class:`ServiceError` for what no Triton sends."""
    body = b"".join(answer.parts)
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise _foreign(body, answer.status) from error


def _foreign(body: bytes, status: int = 200) -> ServiceError:
    return foreign_error(str(status), body[:500].decode("utf-8", "replace"))
