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
from triton_openai.triton.client import IndexEntry, Receiver, ServerInfo
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
    """One ``ModelStreamInfer`` call. See :class:`triton_openai.triton.client.ResponseStream`."""

    def __init__(
        self, channel: GrpcChannel, request: InferRequest, receiver: Receiver, tasks: set[asyncio.Task[None]]
    ) -> None:
        self._channel = channel
        self._model = request.model
        self._cancellable = request.cancellable
        self._receiver: Receiver | None = receiver
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._sent = False
        self._task = asyncio.create_task(self._run(request))
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    async def _run(self, request: InferRequest) -> None:
        try:
            await self._call(request)
        except grpc.RpcError as error:
            self._end(translate(error, self._model))
        except Exception as error:  # noqa: BLE001 - the receiver's, whatever it is
            self._end(error)
        else:
            self._end(None)

    async def _call(self, request: InferRequest) -> None:
        await self._channel.settled()
        call = self._channel.stub().ModelStreamInfer(metadata=(*self._channel.metadata(), *request.headers.items()))
        try:
            await call.write(await message_of(request))
            await call.done_writing()
            self._sent = True
            while (message := await call.read()) is not grpc.aio.EOF:
                await self._resumed.wait()
                if message.error_message:
                    self._end(classify(Failure(message.error_message, self._model)))
                    if self._cancellable:
                        return
                elif message.infer_response.outputs and self._receiver is not None:
                    self._receiver.receive((decode_response(message.infer_response),))
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise classify(Failure(await call.details() or "", self._model, code.name))
        finally:
            call.cancel()

    def _end(self, error: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end(error)

    def pause(self) -> None:
        """Read nothing more."""
        if self._receiver is not None:
            self._resumed.clear()

    def resume(self) -> None:
        """Read on."""
        self._resumed.set()

    def close(self, *, silent: bool = False) -> None:
        """
        Cancel the work unless it has ended.

        Triton 24.10 crashes now and then when a call is cancelled while it writes to it: where a cancellation would end
        nothing, what still comes is read and dropped.
        """
        if self._receiver is None:
            return
        self._receiver = None
        if self._cancellable or silent or not self._sent:
            self._task.cancel()
        else:
            self._resumed.set()
            asyncio.get_running_loop().call_later(_READ_OUT_SECONDS, self._task.cancel)
        if silent:
            self._channel.doubt()


class GrpcClient:
    """One Triton behind its gRPC port. See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._channel = GrpcChannel(url, settings)
        self._tasks: set[asyncio.Task[None]] = set()

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

    def stream(self, request: InferRequest, receiver: Receiver) -> GrpcStream:
        """Send a ``ModelStreamInfer`` call."""
        return GrpcStream(self._channel, request, receiver, self._tasks)

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()
