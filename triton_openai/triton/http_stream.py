"""
Streams of HTTP's generate extension over pooled connections, on asyncio's protocols and llhttp (through httptools).

This is the hot path of the product: once per token a packet is parsed here. A raw protocol takes about two thirds of
the CPU time that aiohttp's client takes for the same stream (`make bench` measures it), so streams do not go through
aiohttp; all other calls do.

Source of the facts: Triton's ``extension_generate.md`` and http_server.cc: each response is one ``data: {json}``
event ended by an empty line, the end of the body is the end of the answers, and a failure is a JSON object with the
key ``error``, as an event or as a plain body, under a status that cannot be relied on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.triton.http_connection import (
    EVENT_END,
    HIGH_WATER,
    Connection,
    ConnectionPool,
    StaleConnectionError,
    decode_values,
)
from triton_openai.triton.status import Failure, classify, cut_off
from triton_openai.triton.tensors import InferResponse, JsonResponse


class HttpStream:
    """The answers of one ``generate_stream`` call. See :class:`triton_openai.triton.client.ResponseStream`."""

    def __init__(self, pool: ConnectionPool, connection: Connection, request: bytes, model: str) -> None:
        self._pool = pool
        self._connection = connection
        self._request = request
        self._model = model
        self._tail = b""
        self._error: ServiceError | None = None
        self._ended = False

    async def read(self) -> Sequence[InferResponse]:
        """Return the responses that arrived together; empty at the end."""
        while not self._ended:
            self._raise_pending()
            try:
                data = await self._connection.take()
            except StaleConnectionError:
                await self._send_again()
                continue
            except ServiceError:
                # abort() closes the connection: its reason is the one to tell.
                self._raise_pending()
                self.close()
                raise
            connection = self._connection
            if not connection.events and (data or connection.status >= 400):
                await self._fail(data)
            if not data and connection.complete:
                if self._tail.strip():
                    self.close()
                    raise cut_off()
                self._ended = True
                connection.finish()
                break
            responses = self._parse(data)
            if responses:
                return responses
        return ()

    def _raise_pending(self) -> None:
        if self._error is not None:
            self.close()
            raise self._error

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error* and cancel the work."""
        if not self._ended:
            self._error = error
            self._connection.close()
            if error.code == "upstream_silent":
                self._pool.distrust()

    def close(self) -> None:
        """Cancel the work unless it has ended."""
        if not self._ended:
            self._ended = True
            self._connection.close()

    def _parse(self, data: bytes) -> list[InferResponse]:
        if self._tail:
            data = self._tail + data
        *events, self._tail = data.split(EVENT_END)
        responses: list[InferResponse] = []
        for event in events:
            # Triton writes "data: "; the space is optional in the event stream format.
            start = event.find(b"{")
            if start < 0:
                continue
            values = decode_values(event[start:] if start else event)
            failure = values.get("error")
            if failure is not None and "model_name" not in values:
                self._error = classify(Failure(str(failure), self._model))
                break
            responses.append(JsonResponse(values))
        return responses

    async def _fail(self, data: bytes) -> None:
        body = [data]
        size = len(data)
        while not self._connection.complete and size < HIGH_WATER:
            more = await self._connection.take()
            body.append(more)
            size += len(more)
        status = str(self._connection.status)
        self.close()
        text = error_text(b"".join(body))
        raise classify(Failure(text, self._model, status))

    async def _send_again(self) -> None:
        self._connection = await self._pool.acquire(fresh=True)
        self._connection.send(self._request)


def error_text(body: bytes) -> str:
    """Return the text of Triton's ``{"error": "…"}`` body, or the start of the body where it is something else."""
    try:
        values = decode_values(body)
    except UpstreamError:
        return body[:500].decode("utf-8", "replace")
    error = values.get("error")
    return error if isinstance(error, str) else json.dumps(error)
