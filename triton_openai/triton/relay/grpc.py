"""
Relays Triton's gRPC protocol: each call is checked and made again, message by message, without reading what is in it.

Every call is treated as a stream in both directions, which on the wire each call is: so messages, half-closing,
cancellation, metadata, trailers, deadlines and statuses of all kinds of calls pass in one way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import structlog

from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.triton.grpc import GrpcClient
from triton_openai.triton.relay.rules import NAMING, Rules

_log = structlog.get_logger(__name__)

# What gRPC sets itself on each connection.
_OWN_METADATA = frozenset({"user-agent", "content-type", "te", "host"})
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
}


class GrpcRelay(grpc.GenericRpcHandler):
    """
    A gRPC server in front of the one of the Triton that *client*, which the relay closes, speaks to. *changed* is
    called when somebody has changed which models are loaded.
    """

    def __init__(self, client: GrpcClient, rules: Rules, *, changed: Callable[[], None]) -> None:
        self._client = client
        self._rules = rules
        self._changed = changed
        self._server: Any = None
        #: Where it listens, once started.
        self.scheme = "grpc"
        self.port = 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Listen. Raises :class:`ConfigurationError`."""
        # Without being told, gRPC shares the port with whoever has it.
        options = (*_OPTIONS, ("grpc.so_reuseport", int(reuse_port)))
        self._server = grpc.aio.server(handlers=(self,), options=options)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = int(self._server.add_insecure_port(address))
        except RuntimeError:
            self.port = 0
        if not self.port:
            await self._client.close()
            raise ConfigurationError(
                f"Cannot listen on {host} port {port} for Triton's gRPC protocol. "
                "Choose another with --kserve-grpc-port."
            )
        await self._server.start()

    async def close(self, grace: float) -> None:
        """Take no new calls, give what runs *grace* seconds to finish, and close."""
        if self._server is not None:
            await self._server.stop(grace)
        await self._client.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return what answers a call: the relay, whatever the method is called."""
        method = handler_call_details.method

        async def handle(_: Any, context: Any) -> None:
            await self._handle(method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, method: str, context: Any) -> None:
        try:
            operation = self._rules.of_rpc(method)
            first = None
            if method in NAMING:
                first = await context.read()
                self._rules.check_message(method, b"" if first is grpc.aio.EOF else first)
        except ServiceError as error:
            await context.abort(_STATUSES.get(error.status, grpc.StatusCode.INTERNAL), error.message)
            return
        call: Any = self._client.channel.stream_stream(method)(
            timeout=context.time_remaining(), metadata=_custom(context.invocation_metadata())
        )
        sending = asyncio.create_task(_send(context, call, first))
        try:
            status = await _receive(context, call)
        finally:
            # Also when the client has cancelled, or has left.
            sending.cancel()
            call.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if status is not None:
            code, details, trailers = status
            await context.abort(code, details, trailers)
        elif operation.loads:
            self._changed()


async def _send(context: Any, call: Any, first: bytes | None) -> None:
    """Pass on what the client sends, and that it has sent all."""
    try:
        if first is not None:
            await call.write(first)
        while (message := await context.read()) is not grpc.aio.EOF:
            await call.write(message)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        # The call has ended: its status says why.
        pass


async def _receive(context: Any, call: Any) -> tuple[Any, str, Any] | None:
    """Pass on what Triton answers; return how the call failed, if it did."""
    try:
        await context.send_initial_metadata(_custom(await call.initial_metadata()))
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)
        code, details = await call.code(), await call.details()
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    trailers = _custom(await call.trailing_metadata())
    if code is not grpc.StatusCode.OK:
        return code, details or "", trailers
    context.set_trailing_metadata(trailers)
    return None


def _custom(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return what *metadata* has beside what belongs to one connection."""
    return tuple(
        (key, value) for key, value in metadata or () if not key.startswith(("grpc-", ":")) and key not in _OWN_METADATA
    )
