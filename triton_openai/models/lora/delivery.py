"""The answers to a request with a LoRA adapter whose weights may have to be sent, once or again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import structlog

from triton_openai.errors import LoraNotLoaded, ServiceError
from triton_openai.generation import Lora
from triton_openai.triton.client import ResponseStream
from triton_openai.triton.tensors import InferResponse

# What it may take until a request that carries weights has come to the engine. Who waits longer asks by number: behind
# a full engine's queue the weights have arrived long before the first token is out.
_PATIENCE = 5.0


class LoraDelivery:
    """
    What is known of one adapter on one model. *load* returns it with its number and its weights.

    Of requests that come at once one sends the weights, and the others wait until it is answered, or for *patience*
    seconds: weights are large, and a hundred copies of them would fill the network and two processes' memory for
    nothing. If that one fails, the next sends them.
    """

    def __init__(self, load: Callable[[], Awaitable[Lora]], *, patience: float = _PATIENCE) -> None:
        self._load = load
        self._patience = patience
        # The adapter without its weights, once they have been read.
        self._known: Lora | None = None
        self._there = False
        self._losses = 0
        self._sending: asyncio.Future[None] | None = None

    async def lease(self, *, send: bool = False) -> LoraLease:
        """
        Return the adapter for one request, with its weights if that request is the one to bring them.

        *send* asks for the weights in any case. Raises what loading them raises. Whoever has a lease must say how it
        ended: :meth:`LoraLease.arrived`, :meth:`LoraLease.lost` or :meth:`LoraLease.close`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        if not send and self._known is not None and self._there:
            return LoraLease(self, self._known, self._losses, None)
        while not send and self._sending is not None:
            left = deadline - loop.time()
            if left > 0:
                await asyncio.wait({self._sending}, timeout=left)
            elif self._known is None:
                # Not even read yet; reading it a second time would not be faster.
                await asyncio.wait({self._sending})
            if self._known is not None and (self._there or deadline <= loop.time()):
                return LoraLease(self, self._known, self._losses, None)
        sending = loop.create_future() if self._sending is None else None
        if sending is not None:
            self._sending = sending
        try:
            lora = await self._load()
        except BaseException:
            self._settle(sending)
            raise
        self._known = msgspec.structs.replace(lora, weights=None, config=None)
        return LoraLease(self, lora, self._losses, sending)

    def _settle(self, sending: asyncio.Future[None] | None) -> None:
        if sending is not None and self._sending is sending:
            self._sending = None
            sending.set_result(None)

    def _arrived(self, sending: asyncio.Future[None] | None) -> None:
        self._there = True
        self._settle(sending)

    def _lost(self, losses: int, sending: asyncio.Future[None] | None) -> None:
        # Of many requests that find the weights gone only the first says something new.
        if losses == self._losses and self._there:
            self._there = False
            self._losses += 1
        self._settle(sending)


class LoraLease:
    """An adapter as one request takes it along."""

    def __init__(self, delivery: LoraDelivery, lora: Lora, losses: int, sending: asyncio.Future[None] | None) -> None:
        self.lora = lora
        self._delivery = delivery
        self._losses = losses
        self._sending = sending

    def arrived(self) -> None:
        """Tell that the engine has answered: it has the weights."""
        self._delivery._arrived(self._sending)

    def lost(self) -> None:
        """Tell that the engine has no weights for the number."""
        self._delivery._lost(self._losses, self._sending)

    def close(self) -> None:
        """Tell that nothing is known: the request ended without an answer. Does nothing after the others."""
        self._delivery._settle(self._sending)


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
