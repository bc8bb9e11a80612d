"""The answers to a request with a LoRA adapter whose weights may have to be sent, once or again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from triton_openai.errors import LoraNotLoaded, ServiceError
from triton_openai.generation import Lora
from triton_openai.loras.delivery import LoraDelivery, LoraLease
from triton_openai.triton.client import ResponseStream
from triton_openai.triton.tensors import InferResponse

_log = structlog.get_logger(__name__)


class LoraAnswers:
    """
    The stream that *send* opens for the adapter, opened anew when the engine says that it has no weights for it.

    That is said instead of the first response, so whoever reads does not notice. See
    :class:`triton_openai.triton.client.ResponseStream`.
    """

    def __init__(self, delivery: LoraDelivery, send: Callable[[Lora], Awaitable[ResponseStream]]) -> None:
        self._delivery = delivery
        self._send = send
        self._lease: LoraLease | None = None
        self._stream: ResponseStream | None = None
        self._error: ServiceError | None = None
        self._misses = 0
        #: Replaced by the stream's own once it has begun: nothing is left to do here per token.
        self.read: Callable[[], Coroutine[Any, Any, Sequence[InferResponse]]] = self._read_first

    async def start(self) -> None:
        """Send the request. Raises :class:`ServiceError`."""
        # By the second miss in a row others' weights came and went in between: then this request brings its own.
        self._lease = lease = await self._delivery.lease(send=self._misses > 1)
        try:
            if self._error is not None:
                raise self._error
            if lease.lora.weights is not None:
                size = len(lease.lora.weights.data)
                _log.info("LoRA weights are sent", lora=lease.lora.name, number=lease.lora.number, bytes=size)
            self._stream = await self._send(lease.lora)
        except BaseException:
            lease.close()
            raise

    async def _read_first(self) -> Sequence[InferResponse]:
        while True:
            assert self._lease is not None, "start() comes first"
            assert self._stream is not None, "start() comes first"
            try:
                responses = await self._stream.read()
            except LoraNotLoaded:
                self._lease.lost()
                if self._lease.lora.weights is not None:
                    raise
            except BaseException:
                self._lease.close()
                raise
            else:
                if responses:
                    self._lease.arrived()
                    self.read = self._stream.read
                else:
                    self._lease.close()
                # It holds the weights, and the answer may be long.
                self._lease = None
                return responses
            self._misses += 1
            self._stream.close()
            await self.start()

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error*, and cancel the work."""
        self._error = error
        if self._stream is not None:
            self._stream.abort(error)

    def close(self) -> None:
        """Cancel the work unless it has ended."""
        if self._lease is not None:
            self._lease.close()
        if self._stream is not None:
            self._stream.close()
