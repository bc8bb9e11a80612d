"""Sends the weights of LoRA adapters: with the first request, and again when the engine has lost them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial

import msgspec
import structlog

from triton_openai.errors import LoraNotLoaded
from triton_openai.generation import Lora
from triton_openai.triton.client import Receiver, ResponseStream
from triton_openai.triton.tensors import InferResponse

# What it may take until a request that carries weights has come to the engine. Who waits longer asks by number: behind
# a full engine's queue the weights have arrived long before the first token is out.
_PATIENCE = 5.0


# Tritons that are remembered for one adapter.
_MAX_ENDPOINTS = 4096


class LoraDelivery:
    """
    Whether one model has the weights of one adapter. *load* returns the adapter with its number and its weights.

    Of simultaneous requests only the first sends the weights. The others wait until it is answered, or for *patience*
    seconds: a hundred copies of large weights would fill the network and the memory of two processes. If the first one
    fails, the next sends the weights.
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
        Return the adapter for one request, with its weights if the engine has to get them with this request.

        *send* asks for the weights in any case. Raises what loading them raises. The caller reports how the lease
        ended: :meth:`LoraLease.arrived`, :meth:`LoraLease.lost` or :meth:`LoraLease.close`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while not send:
            left = deadline - loop.time()
            if self._known is not None and (self._there or (self._sending is not None and left <= 0)):
                return LoraLease(self, self._known, self._losses, None)
            if self._sending is None:
                break
            # What is not even read after that time is waited for: reading it a second time would not be faster.
            await asyncio.wait({self._sending}, timeout=left if left > 0 else None)
        sending = None
        if self._sending is None:
            sending = loop.create_future()
        if sending is not None:
            self._sending = sending
        try:
            lora = await self._load()
        except BaseException:
            self.settle(sending)
            raise
        self._known = msgspec.structs.replace(lora, weights=None, config=None)
        return LoraLease(self, lora, self._losses, sending)

    def settle(self, sending: asyncio.Future[None] | None, *, arrived: bool = False, lost_after: int = -1) -> None:
        """
        Record how the request that holds *sending* ended.

        *arrived*: the engine has the weights. *lost_after*: it has none; it had lost them so many times when the
        request began. Of many requests that find the weights gone, only the first counts as another loss.
        """
        if lost_after == self._losses and self._there:
            self._there = False
            self._losses += 1
        self._there = self._there or arrived
        if sending is not None and self._sending is sending:
            self._sending = None
            sending.set_result(None)


class LoraDeliveries:
    """What is known of one adapter on each of several Tritons, by their names: every one has to get the weights."""

    def __init__(self, load: Callable[[], Awaitable[Lora]]) -> None:
        self._load = load
        self._by_endpoint: dict[str, LoraDelivery] = {}

    def at(self, endpoint: str) -> LoraDelivery:
        """Return the delivery to the Triton *endpoint*."""
        delivery = self._by_endpoint.get(endpoint)
        if delivery is None:
            if len(self._by_endpoint) >= _MAX_ENDPOINTS:
                # Addresses come and go; what is forgotten is sent once more.
                del self._by_endpoint[next(iter(self._by_endpoint))]
            delivery = LoraDelivery(self._load)
            self._by_endpoint[endpoint] = delivery
        return delivery


class LoraLease:
    """The adapter for one request, with or without its weights."""

    def __init__(self, delivery: LoraDelivery, lora: Lora, losses: int, sending: asyncio.Future[None] | None) -> None:
        self.lora = lora
        #: Report that the engine has answered: it has the weights.
        self.arrived = partial(delivery.settle, sending, arrived=True)
        #: Report that the engine has no weights for the number.
        self.lost = partial(delivery.settle, sending, lost_after=losses)
        #: Report that the request ended without an answer. Does nothing after the others.
        self.close = partial(delivery.settle, sending)


_log = structlog.get_logger(__name__)


class LoraAnswers:
    """
    The stream that *send* opens for the adapter, opened anew when the engine says that it has no weights for it.

    That is said instead of the first response, so the *receiver* does not notice. See
    :class:`triton_openai.triton.client.ResponseStream`.
    """

    def __init__(
        self, delivery: LoraDelivery, send: Callable[[Lora, Receiver], ResponseStream], receiver: Receiver
    ) -> None:
        self._delivery = delivery
        self._send = send
        self._receiver: Receiver | None = receiver
        self._lease: LoraLease | None = None
        self._stream: ResponseStream | None = None
        self._misses = 0
        self._paused = False
        # A second attempt is made in the turn of a connection that others use too; its log lines are this request's.
        self._context = copy_context()
        self._attempt = self._begin()

    def _begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._open(), context=self._context)

    async def _open(self) -> None:
        try:
            # At the second miss in a row, the weights of another request came and went: this request sends its own.
            lease = await self._delivery.lease(send=self._misses > 1)
            self._lease = lease
            if lease.lora.weights is not None:
                size = len(lease.lora.weights.data)
                _log.info("LoRA weights are sent", lora=lease.lora.name, number=lease.lora.number, bytes=size)
            self._stream = self._send(lease.lora, self)
            if self._paused:
                self._stream.pause()
        except Exception as error:  # noqa: BLE001 - the receiver's, whatever it is
            self.end(error)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        if self._lease is not None:
            self._lease.arrived()
            # It holds the weights, and the answer may be long.
            self._lease = None
        if self._receiver is not None:
            self._receiver.receive(responses)

    def end(self, error: Exception | None) -> None:
        """Pass on the end, or begin again."""
        lease = self._lease
        self._lease = None
        self._stream = None
        if lease is not None and isinstance(error, LoraNotLoaded):
            lease.lost()
            if lease.lora.weights is None:
                self._misses += 1
                self._attempt = self._begin()
                return
        elif lease is not None:
            lease.close()
        receiver = self._receiver
        self._receiver = None
        if receiver is not None:
            receiver.end(error)

    def pause(self) -> None:
        self._paused = True
        if self._stream is not None:
            self._stream.pause()

    def resume(self) -> None:
        self._paused = False
        if self._stream is not None:
            self._stream.resume()

    def close(self, *, silent: bool = False) -> None:
        self._receiver = None
        self._attempt.cancel()
        if self._lease is not None:
            self._lease.close()
        if self._stream is not None:
            self._stream.close(silent=silent)
