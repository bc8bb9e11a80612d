"""
Relays Triton's gRPC protocol: checks each call, and makes it again without parsing its messages.

On the wire, every call is a stream in both directions. So one handler relays messages, half-closing, cancellation,
metadata, trailers, deadlines and statuses of all kinds of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

import grpc
from multidict import CIMultiDict, CIMultiDictProxy
from tritonclient.grpc import service_pb2

from triton_openai.access.guard import Guard, RelayedRequest
from triton_openai.config.files import FromFiles, read_file
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings, TlsSettings
from triton_openai.errors import ConfigurationError, EndpointNotFound, InvalidRequest, ServiceError
from triton_openai.triton.client import check_name
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.grpc import GrpcClient
from triton_openai.triton.relay.rules import Operation, check_load, check_operation, operation_of_rpc

# Set by gRPC itself on each connection.
_OWN_METADATA = frozenset({"user-agent", "content-type", "te", "host"})
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Return the server's credentials, ``None`` without TLS. Raises :class:`ConfigurationError`."""
    certificate, key, client_ca = settings.certificate, settings.key, settings.client_ca
    if certificate is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        # gRPC would report unusable files only as failed connections.
        server_context(settings)
        chain = read_file(certificate, "--tls-certificate")
        pair = (chain if key is None else read_file(key, "--tls-key"), chain)
        roots = None if client_ca is None else read_file(client_ca, "--tls-client-ca")
        return grpc.ssl_server_certificate_configuration([pair], roots)

    files = FromFiles(read, (certificate, key, client_ca), what="the certificate of the gRPC relay")
    return grpc.dynamic_ssl_server_credentials(files.current(), files.current, client_ca is not None)


class GrpcRelay(grpc.GenericRpcHandler):
    """
    A gRPC server in front of the Triton at *url*. *guard* authorizes clients. *changed* is called after they loaded or
    unloaded a model.
    """

    def __init__(self, url: str, settings: Settings, guard: Guard, changed: Callable[[], None]) -> None:
        self._client = GrpcClient(url, ConnectionSettings(access=settings.triton_access))
        self._settings = settings.server
        self._guard, self._changed = guard, changed
        self._may_load = settings.triton.model_control_mode == "explicit"
        self._credentials = server_credentials(settings.tls)
        self._server: Any = None
        #: The scheme and the port of its address, once started.
        self.scheme = "grpc" if self._credentials is None else "grpcs"
        self.port = 0

    async def start(self, *, reuse_port: bool) -> None:
        """Listen. Raises :class:`ConfigurationError`."""
        host, port = self._settings.host, self._settings.kserve_grpc_port
        # By default gRPC shares the port with other processes.
        options = (*_OPTIONS, ("grpc.so_reuseport", int(reuse_port)))
        self._server = grpc.aio.server(handlers=(self,), options=options)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                self.port = int(self._server.add_insecure_port(address))
            else:
                self.port = int(self._server.add_secure_port(address, self._credentials))
        except RuntimeError as error:
            raise ConfigurationError(
                f"Cannot listen on {host} port {port} for Triton's gRPC protocol. "
                "Choose another with --kserve-grpc-port."
            ) from error
        await self._server.start()

    async def close(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Accept no new calls, give running ones *grace* seconds, or until *hurried*, and close."""
        if self._server is not None:
            stopping = asyncio.ensure_future(self._server.stop(grace))
            hurry = asyncio.create_task((hurried or asyncio.Event()).wait())
            await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not stopping.done():
                # A second stop shortens the grace period of the first.
                await self._server.stop(0)
            await stopping
        await self._client.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call: the relay, for every method."""
        method = handler_call_details.method

        async def handle(_: Any, context: Any) -> None:
            await self._handle(method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, method: str, context: Any) -> None:
        metadata = context.invocation_metadata() or ()
        texts = CIMultiDict((key, value) for key, value in metadata if isinstance(value, str))
        relayed = RelayedRequest(self._guard, "grpc", method, CIMultiDictProxy(texts))
        operation = operation_of_rpc(method)
        status: str | None = None
        try:
            try:
                await relayed.authorize(operation)
                operation = check_operation(operation, f"method {method}", may_load=self._may_load)
                code, details, trailers = await self._relay(method, operation, relayed, context)
            except ServiceError as error:
                relayed.error = error
                code, details, trailers = _status_of(error), error.message, _refusal(relayed, error)
            # Only known when the call has ended.
            status = None if context.cancelled() else code.name
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details, trailers)
            context.set_trailing_metadata(trailers)
            if operation is not None and operation.loads:
                self._changed()
        finally:
            relayed.end(status)

    async def _relay(
        self, method: str, operation: Operation, relayed: RelayedRequest, context: Any
    ) -> tuple[Any, str, Any]:
        """Relay the call, and return how it ended. Raises :class:`ServiceError` to refuse it."""
        inspected = operation.loads or relayed.names_models
        messages = self._messages(method if inspected else None, operation, relayed, context)
        # The first message is checked before the call to Triton begins.
        first = await anext(messages, None) if inspected else None
        added = (*relayed.upstream_headers.items(), *self._client.metadata)
        # The service's own metadata replaces the client's: with both, it is undefined which one counts.
        hidden = {*relayed.hidden, *(name.lower() for name, _ in added)}
        call: Any = self._client.channel.stream_stream(method)(
            timeout=context.time_remaining(), metadata=(*_custom(context.invocation_metadata(), hidden), *added)
        )
        sending = asyncio.create_task(_send(first, messages, call))
        receiving = asyncio.create_task(_receive(relayed, context, call))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                # Raises the error that ended the client's messages.
                sending.result()
            return await receiving
        finally:
            # Also if the client has cancelled or disconnected.
            sending.cancel()
            receiving.cancel()
            call.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _messages(
        self, inspected: str | None, operation: Operation, relayed: RelayedRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """Yield the client's messages; those of the method *inspected* are checked. Raises :class:`ServiceError`."""
        begun = False
        while (message := await context.read()) is not grpc.aio.EOF:
            if inspected is not None:
                found, name = _read(inspected, message)
                if operation.loads:
                    check_name(name)
                    check_load(found.parameters)
                if relayed.names_models:
                    relayed.check_models((name,))
            if begun and relayed.counted:
                await relayed.count()
            begun = True
            yield message


def _read(method: str, message: bytes) -> tuple[Any, str]:
    """Return *message* parsed, and the model that it names, empty for all models. Raises :class:`InvalidRequest`."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    kind = service.methods_by_name[method.rpartition("/")[2]].input_type
    try:
        found = getattr(service_pb2, kind.name).FromString(message)
    except Exception as error:  # protobuf's error has no public name that all its versions share
        raise InvalidRequest("The message cannot be read.") from error
    return found, found.model_name if "model_name" in kind.fields_by_name else found.name


async def _send(first: bytes | None, messages: AsyncIterator[bytes], call: Any) -> None:
    """Send *first*, *messages* and their end. Raises :class:`ServiceError` for a refused message."""
    try:
        if first is not None:
            await call.write(first)
        async for message in messages:
            await call.write(message)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        # The call has ended: its status says why.
        pass


async def _receive(relayed: RelayedRequest, context: Any, call: Any) -> tuple[Any, str, Any]:
    """Relay Triton's answers; return how the call ended."""
    try:
        initial = await call.initial_metadata()
        await context.send_initial_metadata((*_custom(initial), *relayed.answer_headers.items()))
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)
        code, details = await call.code(), await call.details()
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    return code, details or "", _custom(await call.trailing_metadata())


def _status_of(error: ServiceError) -> grpc.StatusCode:
    if isinstance(error, EndpointNotFound):
        return grpc.StatusCode.UNIMPLEMENTED
    return _STATUSES.get(error.status, grpc.StatusCode.INTERNAL)


def _refusal(relayed: RelayedRequest, error: ServiceError) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in {**relayed.answer_headers, **error.headers()}.items())


def _custom(
    metadata: Iterable[tuple[str, str | bytes]] | None, hidden: Collection[str] = ()
) -> tuple[tuple[str, str | bytes], ...]:
    """Return *metadata* without the keys of one connection and those that are *hidden*."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if not key.startswith(("grpc-", ":")) and key not in _OWN_METADATA and key not in hidden
    )
