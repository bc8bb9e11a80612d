"""The gRPC channel to one Triton, made again when the files that it was made with have changed."""

from __future__ import annotations

import asyncio
import io
from typing import Any
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_openai.triton.connection import ConnectionSettings, GrpcFiles, Header
from triton_openai.triton.tensors import InferRequest

# Contents from this size on are worth a thread.
_LARGE = 1 << 20
_PIECE = 1 << 20


def is_large(request: InferRequest) -> bool:
    """Return whether *request* carries contents that should not be copied on the event loop."""
    return any(tensor.size >= _LARGE for tensor in request.inputs)


async def serialized(message: Any, request: InferRequest) -> bytes:
    """Return *message*, a ``ModelInferRequest`` of *request* without its contents, as bytes with them."""
    head = message.SerializeToString()
    return await asyncio.to_thread(lambda: _serialized(head, [each.raw() for each in request.inputs]))


def serialize(message: Any) -> bytes:
    """Return a message as bytes; one that is bytes already, as it is."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _serialized(head: bytes, contents: list[bytes]) -> bytes:
    # The bytes of a message may be followed by further elements of its repeated fields: a tag (the field's number, and
    # 2 for "with a length"), the length, and the contents.
    field = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
    buffer = io.BytesIO()
    buffer.write(head)
    for content in contents:
        buffer.write(_varint(field << 3 | 2) + _varint(len(content)))
        view = memoryview(content)
        for start in range(0, len(view), _PIECE):
            buffer.write(view[start : start + _PIECE])
    return buffer.getvalue()


def _varint(value: int) -> bytes:
    """Return *value* seven bits at a time, the lowest first; all but the last byte have their highest bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SERVICE = "/inference.GRPCInferenceService"
# Calls on a channel that was replaced may go on for as long as they like; this bounds what they like.
_OLD_CHANNEL_SECONDS = 24 * 3600.0
_OPTIONS: tuple[tuple[str, Any], ...] = (
    # The default limit of 4 MiB is smaller than a long answer or a batch of embeddings.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A dead peer behind a live route is noticed although nothing is being sent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A Triton that comes back is found within a second, not after minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process must not share a connection: their Tritons may be restarted on the same port.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcChannel:
    """
    The newest channel to *url*.

    Calls that run when the certificates change go on over the channel that they began on. Raises
    :class:`ConfigurationError` for files that cannot be used.
    """

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        parts = urlsplit(url)
        self._target = parts.netloc if parts.port else f"{parts.netloc}:8001"
        self._settings = settings
        self._files = settings.grpc_files() if parts.scheme == "grpcs" else None
        self._used: GrpcFiles | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._closing: set[asyncio.Task[None]] = set()
        self._doubted = False
        self._checking: asyncio.Task[None] | None = None

    def metadata(self) -> tuple[Header, ...]:
        """Return what every call carries."""
        return self._settings.headers()

    def stub(self) -> Any:
        """Return the stub to begin calls on."""
        self.channel()
        return self._stub

    def channel(self) -> grpc.aio.Channel:
        """Return the channel itself, for calls that no stub has."""
        files = self._files.current() if self._files is not None else None
        if self._channel is None or self._doubted or files is not self._used:
            self._doubted = False
            self._channel = self._replace(files)
        return self._channel

    def distrust(self) -> None:
        """Begin further calls on a new connection: nobody has answered on this one, and the way may be cut."""
        self._doubted = True

    def doubt(self) -> None:
        """Find out whether anybody is there: one call was silent, which the model may be and not the way to it."""
        if self._checking is None and self._stub is not None:
            self._checking = asyncio.get_running_loop().create_task(self._check(self._stub))

    async def settled(self) -> None:
        """Wait until there is no doubt, so that the next call does not have to find out too."""
        if self._checking is not None:
            await asyncio.wait({self._checking})

    async def _check(self, stub: Any) -> None:
        try:
            await stub.ServerLive(
                service_pb2.ServerLiveRequest(), timeout=self._settings.connect_timeout, metadata=self.metadata()
            )
        except grpc.RpcError as error:
            # Whoever refuses is there, and a connection that is known to be lost is made again by the library.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and stub is self._stub:
                self.distrust()
        finally:
            self._checking = None

    def _replace(self, files: GrpcFiles | None) -> grpc.aio.Channel:
        # Not before it is used: a channel belongs to the running loop.
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(self._channel.close(_OLD_CHANNEL_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        options = (
            *_OPTIONS,
            # How long an attempt may take, until the server has greeted; the name is from its lesser use.
            ("grpc.min_reconnect_backoff_ms", int(self._settings.connect_timeout * 1000)),
        )
        self._used = files
        if files is None:
            channel = grpc.aio.insecure_channel(self._target, options=options)
        else:
            name = self._settings.server_name
            if name is not None:
                options = (*options, ("grpc.ssl_target_name_override", name))
            credentials = grpc.ssl_channel_credentials(files.roots, files.key, files.certificate)
            channel = grpc.aio.secure_channel(self._target, credentials, options=options)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # The same calls, for messages that are bytes already as well.
        stub.ModelInfer = channel.unary_unary(
            f"{_SERVICE}/ModelInfer",
            request_serializer=serialize,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        stub.ModelStreamInfer = channel.stream_stream(
            f"{_SERVICE}/ModelStreamInfer",
            request_serializer=serialize,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self._stub = stub
        return channel

    async def close(self) -> None:
        """Close every channel; calls in flight are cancelled."""
        closing = [*self._closing, *([self._checking] if self._checking is not None else [])]
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)
