"""Requests that are the parts of one sequence, whose state the backend keeps between them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from triton_openai.errors import ServiceError
from triton_openai.tasks import Background
from triton_openai.triton.client import AnswerTask, Receiver, TritonClient
from triton_openai.triton.tensors import InferRequest

# The time limit for the end of a sequence that was given up, half of it for the request that still runs.
_END_TIMEOUT = 20.0


class SequenceAnswers(AnswerTask):
    """
    The stream of the answers to *request* and to those that follow it; each is sent when the one before is answered.

    See :class:`triton_openai.triton.client.ResponseStream`. If the sequence fails or is closed, its last request is
    sent in the *background*: without it the backend would keep the state for some time.
    """

    def __init__(self, client: TritonClient, request: InferRequest, receiver: Receiver, background: Background) -> None:
        self._client = client
        self._background = background
        following = [replace(part, headers=request.headers) for part in request.following]
        self._parts = [request, *following]
        super().__init__(receiver)

    async def _ask(self) -> None:
        for part in self._parts:
            await self._send(part)

    async def _send(self, part: InferRequest) -> None:
        call = asyncio.ensure_future(self._client.infer(part))
        try:
            # Shielded: if the end of the sequence arrived before this request, the backend would keep the state.
            response = await asyncio.shield(call)
        except BaseException:
            last = None
            if part is not self._parts[-1]:
                last = self._parts[-1]
            self._background.start(_end_sequence(self._client, call, last), timeout=_END_TIMEOUT)
            raise
        finally:
            # Breaks a reference cycle: the call's error has a traceback with this frame.
            del call
        self._receive(response)


async def _end_sequence(client: TritonClient, call: asyncio.Future[Any], last: InferRequest | None) -> None:
    """Wait until *call* has ended, and end the sequence with its *last* request."""
    await asyncio.wait([call], timeout=_END_TIMEOUT / 2)
    call.cancel()
    if last is not None:
        # Where the sequence has not begun, or Triton is gone, there is nothing to end.
        with suppress(ServiceError):
            await client.infer(last)
