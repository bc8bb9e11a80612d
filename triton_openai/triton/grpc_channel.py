"""The gRPC channel to one Triton, made again when the files that it was made with have changed."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_openai.triton.connection import ConnectionSettings, GrpcFiles, Header
from triton_openai.triton.grpc_large import serialize

_SERVICE = "/inference.GRPCInferenceService"
# Calls on a channel that was replaced may go on for as long as they like; this bounds what they like.
_OLD_CHANNEL_SECONDS = 24 * 3600.0
_TRUST_SECONDS = 1.0
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
        self._made = 0.0

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
        """Begin further calls on a new connection: one was silent, and the way that they all take may be cut."""
        # Not again and again for a model that is silent.
        if time.monotonic() - self._made >= _TRUST_SECONDS:
            self._doubted = True

    def _replace(self, files: GrpcFiles | None) -> grpc.aio.Channel:
        # Not before it is used: a channel belongs to the running loop.
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(self._channel.close(_OLD_CHANNEL_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._used = files
        self._made = time.monotonic()
        if files is None:
            channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        else:
            name = self._settings.server_name
            options = (*_OPTIONS, ("grpc.ssl_target_name_override", name)) if name is not None else _OPTIONS
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
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)
