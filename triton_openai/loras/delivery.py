"""
When the weights of a LoRA adapter go with a request, and when its number is enough.

An engine keeps the weights that it was sent in a cache, drops the longest unused ones when that is full, and says so
when it is asked for one that it does not have. What is remembered here is only a guess about that cache, which others
fill as well and a restart empties: the engine's answer corrects it, so the guess needs no care about either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from triton_openai.generation import Lora

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
