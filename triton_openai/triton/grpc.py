"""
Triton over gRPC, with the messages that tritonclient ships.

One ``ModelStreamInfer`` call per request: cancellation is per call, and answers cannot be mixed up. Errors come as text
on a good call; the metadata ``triton_grpc_error``, which would end the call with a real status, is not sent: it makes
Triton 24.10 crash when a response follows the error, as it does from a BLS model. Our side of the call is closed after
the one request, so the server ends the call after the last answer and no final flag has to be looked for.

Source of the facts: ``grpc_service.proto`` and the decoupled and error documents of Triton's server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from triton_openai import offload
from triton_openai.errors import InvalidAnswer, ServiceError
from triton_openai.tasks import cancel, spawn
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.client import IndexEntry, Receiver, ResponseStream, ServerInfo
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.connection import ConnectionSettings, GrpcFiles
from triton_openai.triton.http2 import FOREIGN, LOST, TOO_LONG, UNREACHABLE, Call
from triton_openai.triton.http2_channel import Channel
from triton_openai.triton.http2_frames import varint
from triton_openai.triton.status import classify, cut_off_error, foreign_error, no_answer_error, unreachable_error
from triton_openai.triton.tensors import LARGE, MAX_OPEN_ANSWER, Buffer, InferRequest, InferResponse, ModelConfig

_SERVICE = "/inference.GRPCInferenceService"
# The time limit of calls on a replaced channel.
_OLD_CHANNEL_SECONDS = 24 * 3600.0
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),
    # A dead peer behind a live route is detected although nothing is sent. Servers end a connection for pings that
    # follow closer than 5 minutes, and loading a model may take longer.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A restarted Triton is used within a second, not after minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process must not share a connection: their Tritons may be restarted on the same port.
    ("grpc.use_local_subchannel_pool", 1),
)
_HTTP_STATUS = re.compile(r"Received http2 header with status: (\d+)")
# gRPC's own text for an answer that is longer than the channel takes.
_RECEIVED = "Received message larger than max"
# The bytes of an answer besides the contents of its outputs.
_ENVELOPE = 64 * 1024
# The limits of answers in bytes: for nearly all, and for the few that may be larger. gRPC has one for each channel.
_MAX_ANSWER = MAX_OPEN_ANSWER + 4 * LARGE
_MAX_LARGE_ANSWER = 2**31 - 1
_STREAM_METHOD = f"{_SERVICE}/ModelStreamInfer"
_Response = service_pb2.ModelInferResponse
_RESPONSE = service_pb2.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number
_RAW = _Response.DESCRIPTOR.fields_by_name["raw_output_contents"].number
# The longest time for which an abandoned call is read to its end.
_READ_OUT_SECONDS = 60.0


def _tag(field: str) -> bytes:
    """Return the tag of a field of ``ModelInferRequest``: its number, and 2 for "with a length"."""
    return varint(service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name[field].number << 3 | 2)


_ID = _tag("id")
_CONTENTS = _tag("raw_input_contents")


@lru_cache(maxsize=256)
def _description(
    model: str,
    inputs: Sequence[tuple[str, str, Sequence[int]]],
    outputs: Sequence[str],
    priority: int,
    classification: int,
) -> bytes:
    """Return the bytes of a ``ModelInferRequest`` without id and contents. Most requests to a model share them."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    if priority:
        message.parameters["priority"].int64_param = priority
    for name in outputs:
        output = message.outputs.add(name=name)
        if classification:
            output.parameters["classification"].int64_param = classification
    return serialize(message)


def _parts(request: InferRequest) -> Iterator[bytes]:
    """Yield the parts of a ``ModelInferRequest``, whose fields may have any order. All contents are raw."""
    # Adapters of other packages may use lists, which have no hash.
    inputs = tuple([(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in request.inputs])
    yield _description(request.model, inputs, tuple(request.outputs), request.priority, request.classification)
    request_id = request.id.encode()
    yield _ID + varint(len(request_id)) + request_id
    if request.parameters:
        further = service_pb2.ModelInferRequest()
        for name, value in request.parameters.items():
            if isinstance(value, bool):
                kind = "bool"
            elif isinstance(value, int):
                kind = "int64"
            else:
                kind = "string"
            setattr(further.parameters[name], f"{kind}_param", value)
        yield serialize(further)
    for tensor in request.inputs:
        raw = tensor.raw()
        yield _CONTENTS + varint(len(raw))
        yield raw


def encode_request(request: InferRequest) -> bytes:
    """Return the ``ModelInferRequest`` of *request*."""
    # To join more than a megabyte of bytes does not hold the interpreter lock.
    return b"".join(_parts(request))


def serialize(message: Any) -> bytes:
    """Return *message* serialized; bytes stay as they are."""
    if isinstance(message, bytes):
        return message
    return bytes(message.SerializeToString())


def decode_response(message: Any, model: str = "") -> BinaryResponse:
    """
    Return the outputs of a ``ModelInferResponse`` of *model*.

    Raises :class:`InvalidAnswer` if their contents are not raw.
    """
    return BinaryResponse(*_outputs(message, model))


@lru_cache(maxsize=256)
def _layout(model: str, outputs: Sequence[bytes]) -> Layout:
    tensors = map(_Response.InferOutputTensor.FromString, outputs)
    return Layout([(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors], model)


def _outputs(message: Any, model: str, contents: Sequence[Buffer] | None = None) -> tuple[Layout, Sequence[Buffer]]:
    layout = _layout(model, tuple([output.SerializeToString() for output in message.outputs]))
    if contents is None:
        contents = message.raw_output_contents[:]
    if len(layout.outputs) != len(contents):
        raise InvalidAnswer("it has outputs without raw contents", model=model)
    return layout, contents


def _without(message: memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """Return *message* without its fields of a *number*, and their values. All fields must have a length."""
    rest = b""
    values = []
    end = 0
    while end < len(message):
        begin = end
        size = 0
        index = end
        more = True
        while more:
            index += 1
            size |= (message[index] & 0x7F) << 7 * (index - begin - 1)
            more = message[index] > 0x7F
        end = index + 1 + size
        if message[begin] == number << 3 | 2:
            values.append(message[index + 1 : end])
        else:
            rest += message[begin:end]
    return rest, values


def _contents(data: Any, head: bytes) -> list[bytes] | None:
    """
    Return the contents of the outputs in *data*, a ``ModelStreamInferResponse`` whose response begins with *head*.

    The responses of a stream differ only in the contents, which come last. To read these alone costs a third.
    ``None`` means that the whole message has to be read.
    """
    size = len(data) - 3
    # The response's tag (the number of the field, and 2 for "with a length"), and a length of two bytes.
    if head and 0 < size < 1 << 14 and data.startswith(bytes((2 << 3 | 2, size & 0x7F | 0x80, size >> 7)) + head):
        contents: list[bytes] = _Response.FromString(data[3 + len(head) :]).raw_output_contents[:]
        return contents
    return None


def call_error(code: str, details: str, model: str) -> ServiceError:
    """Return the error for a call that ended with *code*: by the text if it is known, else by the code."""
    if code == UNREACHABLE:
        return unreachable_error(details)
    if code == LOST:
        return cut_off_error(details)
    if code.startswith(FOREIGN):
        return foreign_error(code.removeprefix(FOREIGN), details)
    # The texts of grpc.aio for a server that does not speak gRPC, with an HTTP status or without.
    status = _HTTP_STATUS.fullmatch(details)
    if status is not None:
        return foreign_error(status[1], details)
    if code == "UNKNOWN" and details.startswith(("No status received", "Stream removed")):
        return cut_off_error(details)
    if code == TOO_LONG or (code == "RESOURCE_EXHAUSTED" and _RECEIVED in details):
        return InvalidAnswer("its body is too long", model=model, detail=details)
    if code == "UNAVAILABLE":
        # grpc.aio's own texts, the more specific first: "failed to connect … Connection reset by peer" is the former.
        if "failed to connect" in details or "resolution" in details.lower():
            return unreachable_error(details)
        if "Socket closed" in details or "reset by peer" in details or "GOAWAY" in details:
            return cut_off_error()
    return classify(details, model, code)


class GrpcStream(Call):
    """
    One ``ModelStreamInfer`` call. See :class:`triton_openai.triton.client.ResponseStream`.

    *reconnect* is called when the connection to Triton may be dead.
    """

    def __init__(
        self, channel: Channel, request: InferRequest, receiver: Receiver, reconnect: Callable[[], None]
    ) -> None:
        super().__init__()
        self.max_message = request.max_answer + _ENVELOPE
        self._receiver: Receiver | None = receiver
        self._model = request.model
        self._cancellable = request.cancellable
        self._reconnect = reconnect
        # The common part of the responses: their outputs, and the bytes before the contents.
        self._layout = Layout(())
        self._head = b""
        self._encoding: asyncio.Task[None] | None = None
        if request.cost > offload.INLINE:
            self._encoding = asyncio.create_task(self._start_large(channel, request))
        else:
            channel.start(self, encode_request(request), request.headers)

    async def _start_large(self, channel: Channel, request: InferRequest) -> None:
        try:
            message = await offload.run(encode_request, request, cost=request.cost)
        except Exception as error:  # noqa: BLE001 - the receiver handles every error
            self._end(error)
        else:
            channel.start(self, message, request.headers)

    def _end(self, error: Exception | None) -> None:
        receiver = self._receiver
        self._receiver = None
        if receiver is not None:
            receiver.end(error)

    def messages_received(self, messages: list[Buffer]) -> None:
        responses: list[InferResponse] = []
        error: ServiceError | None = None
        try:
            for data in messages:
                contents = _contents(data, self._head)
                if contents is not None and len(contents) == len(self._layout.outputs):
                    responses.append(BinaryResponse(self._layout, contents))
                else:
                    responses += self._read(data)
        except (DecodeError, IndexError) as problem:
            error = InvalidAnswer("it cannot be read", model=self._model, detail=str(problem))
        except ServiceError as problem:
            error = problem
        if responses and self._receiver is not None:
            self._receiver.receive(responses)
        if error is not None:
            receiver = self._receiver
            self.close()
            if receiver is not None:
                receiver.end(error)
            # It has this frame in its traceback: a reference cycle.
            del error

    def _read(self, data: Buffer) -> Sequence[BinaryResponse]:
        """Return the response in *data*, if it is one. Raises :class:`ServiceError` for an error in it."""
        message = service_pb2.ModelStreamInferResponse()
        responses: Sequence[memoryview] = ()
        contents: Sequence[Buffer] | None = None
        if len(data) > LARGE:
            # Read without its contents, so that these are not copied.
            data, responses = _without(memoryview(data), _RESPONSE)
        message.MergeFromString(data)
        for response in responses:
            rest, contents = _without(response, _RAW)
            message.infer_response.MergeFromString(rest)
        if message.error_message:
            raise classify(message.error_message, self._model)
        if not message.infer_response.outputs:
            return ()
        layout, contents = _outputs(message.infer_response, self._model, contents)
        if not responses and isinstance(data, bytes):
            tail = _Response(raw_output_contents=contents).SerializeToString()
            self._layout = layout
            self._head = b""
            if data.endswith(tail):
                self._head = data[3 : -len(tail)]
        return (BinaryResponse(layout, contents),)

    def call_ended(self, code: str, details: str) -> None:
        error = None
        if code != "OK":
            error = call_error(code, details, self._model)
        self._end(error)

    def close(self, *, silent: bool = False) -> None:
        """
        Cancel the work unless it has ended.

        Triton 24.10 sometimes crashes if a call is cancelled while Triton writes to it. If cancelling would not stop
        the backend, the remaining responses are read and dropped instead.
        """
        if self._receiver is None:
            return
        self._receiver = None
        if self._encoding is not None:
            self._encoding.cancel()
        # Without a connection, the server cannot have the request.
        if self._cancellable or silent or self.connection is None:
            self.cancel()
        else:
            self.resume()
            asyncio.get_running_loop().call_later(_READ_OUT_SECONDS, self.cancel)
        if silent:
            self._reconnect()


class GrpcClient:
    """
    One Triton behind its gRPC port. See :class:`triton_openai.triton.client.TritonClient`.

    Running calls keep their connection when certificates change. Raises :class:`ConfigurationError` for unusable files.
    """

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        parts = urlsplit(url)
        if parts.port:
            self._target = parts.netloc
        else:
            self._target = f"{parts.netloc}:8001"
        self._settings = settings
        self._files = None
        if parts.scheme == "grpcs":
            self._files = settings.grpc_files()
        self._used: GrpcFiles | None = None
        # By the most bytes of an answer.
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._streams = Channel(url, _STREAM_METHOD, settings)
        # Older channels that are closing.
        self._tasks: set[asyncio.Task[None]] = set()

    def channel(self, max_answer: int) -> grpc.aio.Channel:
        """Return the channel for calls whose answers have at most *max_answer* bytes."""
        files = None
        if self._files is not None:
            files = self._files.current()
        if files is not self._used:
            self._replace_channels()
            self._used = files
        if max_answer <= _MAX_ANSWER:
            limit = _MAX_ANSWER
        else:
            limit = _MAX_LARGE_ANSWER
        # Created on first use: a channel belongs to the running loop.
        if limit not in self._channels:
            self._channels[limit] = self._connect(files, limit)
        return self._channels[limit]

    def _replace_channels(self) -> None:
        """Use new channels for further calls. Running calls end on their channels."""
        for channel in self._channels.values():
            spawn(channel.close(_OLD_CHANNEL_SECONDS), self._tasks)
        self._channels.clear()

    def _connect(self, files: GrpcFiles | None, max_answer: int) -> grpc.aio.Channel:
        options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", max_answer),
            # The timeout of an attempt to connect, despite its name.
            ("grpc.min_reconnect_backoff_ms", int(self._settings.connect_timeout * 1000)),
        ]
        if files is None:
            return grpc.aio.insecure_channel(self._target, options=options)
        if self._settings.access.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._settings.access.server_name))
        return grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(*files), options=options)

    def reconnect(self) -> None:
        """Use new connections for further calls: one was silent, and may be dead."""
        self._replace_channels()
        self._streams.reconnect()

    async def _unary(
        self,
        method: str,
        message: Any,
        *,
        model: str = "",
        limited: bool = True,
        headers: Mapping[str, str] = MappingProxyType({}),
        max_answer: int = 0,
    ) -> Any:
        timeout = None
        if limited:
            timeout = self._settings.control_timeout
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            call: Any = self.channel(max_answer).unary_unary(f"{_SERVICE}/{method}", request_serializer=serialize)
            answer = await call(message, timeout=timeout, metadata=(*self._settings.headers(), *headers.items()))
            return getattr(service_pb2, f"{method}Response").FromString(answer)
        except DecodeError as error:
            raise InvalidAnswer("it cannot be read", model=model, detail=str(error)) from error
        except asyncio.CancelledError:
            # The caller has given up a silent connection. Further calls must not use it.
            if loop.time() - began >= self._settings.connect_timeout:
                self.reconnect()
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.reconnect()
            raise call_error(error.code().name, error.details() or "", model) from error

    async def server_info(self) -> ServerInfo:
        answer = await self._unary("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerInfo(name=answer.name, version=answer.version)

    async def repository_index(self) -> Sequence[IndexEntry]:
        answer = await self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        return [
            IndexEntry(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
            for entry in answer.models
        ]

    async def model_config(self, model: str) -> ModelConfig:
        answer = await self._unary("ModelConfig", service_pb2.ModelConfigRequest(name=model), model=model)
        return read_model_config(MessageToDict(answer.config, preserving_proto_field_name=True), model)

    async def load_model(self, model: str) -> None:
        message = service_pb2.RepositoryModelLoadRequest(model_name=model)
        await self._unary("RepositoryModelLoad", message, model=model, limited=False)

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        message = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        message.parameters["unload_dependents"].bool_param = dependents
        await self._unary("RepositoryModelUnload", message, model=model)

    async def infer(self, request: InferRequest) -> InferResponse:
        message = await offload.run(encode_request, request, cost=request.cost)
        answer = await self._unary(
            "ModelInfer",
            message,
            model=request.model,
            limited=False,
            headers=request.headers,
            max_answer=request.max_answer,
        )
        if not answer.outputs:
            # Triton's status is OK even if the model ended without a response.
            raise no_answer_error(request.model)
        return decode_response(answer, request.model)

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        return GrpcStream(self._streams, request, receiver, self.reconnect)

    async def close(self) -> None:
        """Close every connection; calls in flight are cancelled."""
        await cancel(*self._tasks)
        await self._streams.close()
        for channel in self._channels.values():
            await channel.close(None)
