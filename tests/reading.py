"""Reads pushed streams bit by bit, as a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triton_openai.triton.client import ResponseStream, TritonClient
from triton_openai.triton.tensors import InferRequest, InferResponse


class Reading:
    """A stream whose responses wait until they are read; nothing is sent by Triton meanwhile."""

    def __init__(self, client: TritonClient, request: InferRequest) -> None:
        self._arrived: list[InferResponse] = []
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self.stream: ResponseStream = client.stream(request, self)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """See :class:`triton_openai.triton.client.Receiver`."""
        assert responses
        assert not self._ended
        self._arrived += responses
        self.stream.pause()
        self._news.set()

    def end(self, error: Exception | None) -> None:
        """See :class:`triton_openai.triton.client.Receiver`."""
        assert not self._ended
        self._ended, self._error = True, error
        self._news.set()

    async def read(self) -> Sequence[InferResponse]:
        """Return what has arrived since the last call, at least one response; empty at the end. Raises its error."""
        while not self._arrived and not self._ended:
            self._news.clear()
            self.stream.resume()
            await self._news.wait()
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    def close(self) -> None:
        """Close the stream."""
        self.stream.close()
        self._ended = True
