"""
Triton over gRPC, on the stubs that tritonclient ships.

One ``ModelStreamInfer`` call per request: cancellation is per call, and answers cannot be mixed up. Errors come as text
on a good call; the metadata ``triton_grpc_error``, which would end the call with a real status, is not sent: it makes
Triton 24.10 crash when a response follows the error, as it does from a BLS model. Our side of the call is closed after
the one request, so the server ends the call after the last answer and no final flag has to be looked for.

Source of the facts: ``grpc_service.proto`` and the decoupled and error documents of Triton's server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from triton_openai.errors import ServiceError
from triton_openai.triton.client import IndexEntry, ServerInfo
from triton_openai.triton.connection import ConnectionSettings, Header
from triton_openai.triton.grpc_channel import GrpcChannel, is_large, serialized
from triton_openai.triton.status import Failure, classify, cut_off, no_answer, unreachable
from triton_openai.triton.tensors import (
    BinaryResponse,
    EnsembleStep,
    InferRequest,
    InferResponse,
    ModelConfig,
    OutputTensor,
    TensorSpec,
    datatype,
)

# Longest time for which an abandoned call is read to its end.
_READ_OUT_SECONDS = 60.0


def encode_request(request: InferRequest, *, contents: bool = True) -> Any:
    """Return the ``ModelInferRequest`` of *request*, all contents raw; without *contents* they are to follow."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.id)
    for tensor in request.inputs:
        entry = message.inputs.add()
        entry.name = tensor.name
        entry.datatype = tensor.datatype
        entry.shape.extend(tensor.shape)
        if contents:
            message.raw_input_contents.append(tensor.raw())
    if request.priority:
        message.parameters["priority"].int64_param = request.priority
    for name in request.outputs:
        message.outputs.add().name = name
    return message


async def message_of(request: InferRequest) -> Any:
    """Return the message of *request*, or its bytes if it is large: both can be sent."""
    if is_large(request):
        return await serialized(encode_request(request, contents=False), request)
    return encode_request(request)


def decode_response(message: Any) -> BinaryResponse:
    """Return the outputs of a ``ModelInferResponse``."""
    return BinaryResponse(
        {
            output.name: OutputTensor(output.datatype, tuple(output.shape), data)
            for output, data in zip(message.outputs, message.raw_output_contents, strict=False)
        }
    )


def decode_config(config: Any) -> ModelConfig:
    """Return our form of a ``ModelConfig`` message."""
    return ModelConfig(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        decoupled=config.model_transaction_policy.decoupled,
        inputs=_specs(config.input, has_optional=True),
        outputs=_specs(config.output, has_optional=False),
        parameters={key: value.string_value for key, value in config.parameters.items()},
        steps=tuple(
            EnsembleStep(model=step.model_name, input_map=dict(step.input_map), output_map=dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ),
        priority_levels=config.dynamic_batching.priority_levels,
    )


def _specs(items: Any, *, has_optional: bool) -> dict[str, TensorSpec]:
    name_of = model_config_pb2.DataType.Name
    return {
        item.name: TensorSpec(
            name=item.name,
            datatype=datatype(name_of(item.data_type)),
            dims=tuple(item.dims),
            optional=item.optional if has_optional else False,
        )
        for item in items
    }


def translate(error: grpc.RpcError, model: str) -> ServiceError:
    """Return our error for a failed call: by the text if it is known, else by the status."""
    code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "UNKNOWN"
    details = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else str(error)
    if code == "UNAVAILABLE":
        # The library's own texts, the more specific first: "failed to connect … Connection reset by peer" is the
        # former.
        if "failed to connect" in details or "resolution" in details.lower():
            return unreachable(details)
        if "Socket closed" in details or "reset by peer" in details or "GOAWAY" in details:
            return cut_off()
    return classify(Failure(details, model, code))


class GrpcStream:
    """The answers of one ``ModelStreamInfer`` call. See :class:`triton_openai.triton.client.ResponseStream`."""

    def __init__(self, channel: GrpcChannel, call: Any, request: InferRequest, left: set[asyncio.Task[None]]) -> None:
        self._channel = channel
        self._call = call
        self._cancellable = request.cancellable
        self._left = left
        self._sending: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._request: InferRequest | None = request
        self._model = request.model
        self._error: ServiceError | None = None
        self._ended = False

    async def read(self) -> Sequence[InferResponse]:
        """Return the next response; empty at the end."""
        while not self._ended:
            message = await self._next()
            if message is None:
                self._ended = True
                break
            if message.error_message:
                self.close()
                raise classify(Failure(message.error_message, self._model))
            response = message.infer_response
            if response.outputs:
                return (decode_response(response),)
        return ()

    async def _next(self) -> Any:
        """Return the next message, or ``None`` at the end of the call."""
        try:
            if self._request is not None:
                self._sending = asyncio.create_task(self._send(self._request))
                await self._sending
            answer = await (self._call.read() if self._cancellable else self._read_apart())
        except grpc.RpcError as error:
            self._ended = True
            raise self._error or translate(error, self._model) from error
        except asyncio.CancelledError:
            # grpc.aio raises this both for a cancelled call (ours: abort) and for a cancelled task (the client left).
            if self._error is not None:
                self._ended = True
                raise self._error from None
            self.close()
            raise
        if answer is not grpc.aio.EOF:
            return answer
        if self._error is not None:
            raise self._error
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            self._ended = True
            raise classify(Failure(await self._call.details() or "", self._model, code.name))
        return None

    async def _send(self, request: InferRequest) -> None:
        """Send the request: a task of its own, because cancelling a call does not end a wait for its connection."""
        message = await message_of(request)
        self._request = None
        await self._call.write(message)
        await self._call.done_writing()

    def _cancel(self) -> None:
        self._call.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _read_apart(self) -> Any:
        """
        Return the next message, read in a task of its own.

        grpc.aio cancels the whole call when a task that reads from it is cancelled, as that of a client that leaves is.
        """
        self._reading = asyncio.create_task(self._call.read())
        answer = await asyncio.shield(self._reading)
        self._reading = None
        return answer

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error* and cancel the work."""
        if not self._ended:
            self._error = error
            self._cancel()
            if error.code == "upstream_silent":
                self._channel.doubt()

    def close(self) -> None:
        """Cancel the work unless it has ended."""
        if self._ended:
            return
        self._ended = True
        if self._cancellable or self._request is not None or self._error is not None:
            self._cancel()
            return
        task = asyncio.get_running_loop().create_task(_read_out(self._call, self._reading))
        self._left.add(task)
        task.add_done_callback(self._left.discard)


async def _read_out(call: Any, reading: asyncio.Task[Any] | None) -> None:
    """
    Read what still comes and drop it, where a cancellation would end nothing; *reading* is a read that has begun.

    Triton 24.10 crashes now and then when a call is cancelled while it writes to it.
    """
    try:
        async with asyncio.timeout(_READ_OUT_SECONDS):
            if reading is not None and await reading is grpc.aio.EOF:
                return
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, grpc.RpcError):
        call.cancel()
    except asyncio.CancelledError:
        call.cancel()
        raise


class GrpcClient:
    """One Triton behind its gRPC port. See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._channel = GrpcChannel(url, settings)
        self._left: set[asyncio.Task[None]] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection, for calls of which nothing is known here; they carry :attr:`metadata`."""
        return self._channel.channel()

    @property
    def metadata(self) -> tuple[Header, ...]:
        """What every call carries to be let in."""
        return self._channel.metadata()

    async def _unary(
        self,
        method: str,
        message: Any,
        *,
        model: str = "",
        limited: bool = True,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        timeout = self._settings.control_timeout if limited else None
        await self._channel.settled()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await getattr(self._channel.stub(), method)(
                message, timeout=timeout, metadata=(*self._channel.metadata(), *headers.items())
            )
        except asyncio.CancelledError:
            # Whoever gave up had reason to: further calls need not find out one by one that nobody is there.
            if loop.time() - began >= self._settings.connect_timeout:
                self._channel.doubt()
            raise
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._channel.distrust()
            raise translate(error, model) from error

    async def live(self) -> bool:
        """Return whether the server answers."""
        await self._unary("ServerLive", service_pb2.ServerLiveRequest())
        return True

    async def server_info(self) -> ServerInfo:
        """Return what the server says of itself."""
        answer = await self._unary("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerInfo(name=answer.name, version=answer.version)

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index."""
        answer = await self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        return [
            IndexEntry(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
            for entry in answer.models
        ]

    async def model_config(self, model: str) -> ModelConfig:
        """Return a model's configuration."""
        answer = await self._unary("ModelConfig", service_pb2.ModelConfigRequest(name=model), model=model)
        return decode_config(answer.config)

    async def load_model(self, model: str) -> None:
        """Load a model; returns when it is ready, however long that takes."""
        message = service_pb2.RepositoryModelLoadRequest(model_name=model)
        await self._unary("RepositoryModelLoad", message, model=model, limited=False)

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """Begin to unload a model."""
        message = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        message.parameters["unload_dependents"].bool_param = dependents
        await self._unary("RepositoryModelUnload", message, model=model)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request; how long it may take is the caller's business."""
        message = await message_of(request)
        answer = await self._unary("ModelInfer", message, model=request.model, limited=False, headers=request.headers)
        if not answer.outputs:
            # Triton says OK for a model that ended without a response.
            raise no_answer(request.model)
        return decode_response(answer)

    async def stream(self, request: InferRequest) -> GrpcStream:
        """Start a ``ModelStreamInfer`` call; the first read reports what goes wrong."""
        metadata = (*self._channel.metadata(), *request.headers.items())
        await self._channel.settled()
        call = self._channel.stub().ModelStreamInfer(metadata=metadata)
        return GrpcStream(self._channel, call, request, self._left)

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        left = list(self._left)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._channel.close()
