"""
Relays Triton's gRPC protocol: each call is checked and made again, message by message, without reading what is in it.

Every call is treated as a stream in both directions, which on the wire each call is: so messages, half-closing,
cancellation, metadata, trailers, deadlines and statuses of all kinds of calls pass in one way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

import grpc
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.config.files import FromFiles, read_file
from triton_openai.config.tls import TlsSettings, server_context
from triton_openai.errors import ConfigurationError, EndpointNotFound, ServiceError
from triton_openai.triton.grpc import GrpcClient
from triton_openai.triton.relay.operation import Door, Operation, Visit
from triton_openai.triton.relay.rules import Rules

# What gRPC sets itself on each connection.
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
    """
    Return what to listen with; ``None`` without TLS.

    New connections get the newest certificate. Raises :class:`ConfigurationError`, also for a key with a passphrase,
    which gRPC does not take.
    """
    certificate, key, client_ca = settings.certificate, settings.key, settings.client_ca
    if certificate is None:
        return None
    if settings.key_passphrase_file is not None:
        raise ConfigurationError(
            "--enable-kserve-frontends needs a key without a passphrase in --tls-key: gRPC takes no other."
        )

    def read() -> grpc.ServerCertificateConfiguration:
        # gRPC would report files that do not fit only as connections that fail.
        server_context(settings)
        chain = read_file(certificate, "--tls-certificate")
        pair = (chain if key is None else read_file(key, "--tls-key"), chain)
        roots = None if client_ca is None else read_file(client_ca, "--tls-client-ca")
        return grpc.ssl_server_certificate_configuration([pair], roots)

    files = FromFiles(read, (certificate, key, client_ca), what="the certificate of the gRPC relay")
    return grpc.dynamic_ssl_server_credentials(files.current(), files.current, client_ca is not None)


class GrpcRelay(grpc.GenericRpcHandler):
    """
    A gRPC server in front of the one of the Triton that *client*, which the relay closes, speaks to. *changed* is
    called when somebody has changed which models are loaded; *door* decides who is let in.
    """

    def __init__(self, client: GrpcClient, rules: Rules, *, door: Door, changed: Callable[[], None]) -> None:
        self._client = client
        self._rules = rules
        self._door = door
        self._changed = changed
        self._server: Any = None
        #: Where it listens, once started.
        self.scheme = "grpc"
        self.port = 0

    async def start(
        self, host: str, port: int, *, credentials: grpc.ServerCredentials | None = None, reuse_port: bool = False
    ) -> None:
        """Listen, with TLS where there are *credentials*. Raises :class:`ConfigurationError`."""
        # Without being told, gRPC shares the port with whoever has it.
        options = (*_OPTIONS, ("grpc.so_reuseport", int(reuse_port)))
        self._server = grpc.aio.server(handlers=(self,), options=options)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                self.port = int(self._server.add_insecure_port(address))
            else:
                self.scheme = "grpcs"
                self.port = int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigurationError(
                f"Cannot listen on {host} port {port} for Triton's gRPC protocol. "
                "Choose another with --kserve-grpc-port."
            )
        await self._server.start()

    async def close(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Take no new calls, give what runs *grace* seconds to finish, or until *hurried*, and close."""
        if self._server is not None:
            stopping = asyncio.ensure_future(self._server.stop(grace))
            if hurried is not None:
                hurry = asyncio.create_task(hurried.wait())
                await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
                hurry.cancel()
                if not stopping.done():
                    # A second one shortens the first.
                    await self._server.stop(0)
            await stopping
        await self._client.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return what answers a call: the relay, whatever the method is called."""
        method = handler_call_details.method

        async def handle(_: Any, context: Any) -> None:
            await self._handle(method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, method: str, context: Any) -> None:
        metadata = context.invocation_metadata() or ()
        texts = CIMultiDict((key, value) for key, value in metadata if isinstance(value, str))
        visit = self._door.visit("grpc", "", method, CIMultiDictProxy(texts))
        status: str | None = None
        try:
            operation = self._rules.of_rpc(method)
            try:
                await visit.enter(operation)
                operation = self._rules.check(operation, f"method {method}")
                code, details, trailers = await self._relay(_Messages(method, operation, self._rules, visit), context)
            except ServiceError as error:
                visit.failed(error)
                code, details, trailers = _status_of(error), error.message, _refusal(visit, error)
            # A client that has left is found out at the latest when it is told how its call ended.
            status = None if context.cancelled() else code.name
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details, trailers)
            context.set_trailing_metadata(trailers)
            if operation is not None and operation.loads:
                self._changed()
        finally:
            visit.end(status)

    async def _relay(self, messages: _Messages, context: Any) -> tuple[Any, str, Any]:
        """Pass the call on, and return how it ended. Raises :class:`ServiceError` for one that may not go on."""
        visit = messages.visit
        # What is to be looked at is looked at before Triton hears of the call.
        first = await messages.next(context) if messages.read else None
        added = (*visit.passed_on.items(), *self._client.metadata)
        # What the service says itself, a client does not say as well: which of two is read is anybody's guess.
        withheld = {*visit.withheld, *(name.lower() for name, _ in added)}
        call: Any = self._client.channel.stream_stream(messages.method)(
            timeout=context.time_remaining(), metadata=(*_custom(context.invocation_metadata(), withheld), *added)
        )
        sending = asyncio.create_task(_send(messages, context, call, first))
        receiving = asyncio.create_task(_receive(visit, context, call))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                # Raises what keeps the client from sending more.
                sending.result()
            return await receiving
        finally:
            # Also when the client has cancelled, or has left.
            sending.cancel()
            receiving.cancel()
            call.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)


class _Messages:
    """What a client sends in one call, looked at where that is needed."""

    def __init__(self, method: str, operation: Operation, rules: Rules, visit: Visit) -> None:
        self.method = method
        self.visit = visit
        self._rules = rules
        #: Whether messages are read, and not only passed on.
        self.read = operation.loads or visit.names_models
        self._counts = visit.counted
        self._begun = False

    async def next(self, context: Any) -> Any:
        """Return the next one, or the end. Raises :class:`ServiceError` for one that may not pass."""
        message = await context.read()
        if message is not grpc.aio.EOF:
            if self.read:
                name = self._rules.read(self.method, message)
                if self.visit.names_models:
                    self.visit.use((name,))
            if self._begun and self._counts:
                await self.visit.count()
            self._begun = True
        return message


async def _send(messages: _Messages, context: Any, call: Any, message: Any) -> None:
    """
    Pass on *message*, if there is one already, and what else the client sends, and that it has sent all.

    Raises :class:`ServiceError` for what may not pass.
    """
    try:
        if message is None:
            message = await messages.next(context)
        while message is not grpc.aio.EOF:
            await call.write(message)
            message = await messages.next(context)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        # The call has ended: its status says why.
        pass


async def _receive(visit: Visit, context: Any, call: Any) -> tuple[Any, str, Any]:
    """Pass on what Triton answers; return how the call ended."""
    try:
        await context.send_initial_metadata((*_custom(await call.initial_metadata()), *visit.told.items()))
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


def _refusal(visit: Visit, error: ServiceError) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in {**visit.told, **error.headers()}.items())


def _custom(
    metadata: Iterable[tuple[str, str | bytes]] | None, withheld: Collection[str] = ()
) -> tuple[tuple[str, str | bytes], ...]:
    """Return what *metadata* has beside what belongs to one connection, and what is *withheld*."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if not key.startswith(("grpc-", ":")) and key not in _OWN_METADATA and key not in withheld
    )
