"""Sends the requests of one call that need no streaming, and gathers their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triton_openai.api.service import Service
from triton_openai.deadlines import within
from triton_openai.errors import UpstreamTimeout
from triton_openai.models import ServedModel
from triton_openai.telemetry.upstream import UPSTREAM
from triton_openai.triton.client import ResponseStream, TritonClient
from triton_openai.triton.single_answer import SingleAnswer
from triton_openai.triton.status import no_answer
from triton_openai.triton.tensors import InferRequest, InferResponse

# Requests of one call that are sent to Triton at the same time: enough to fill its batcher.
_PARALLEL_REQUESTS = 16


async def answers_of(
    service: Service, model: ServedModel, requests: Sequence[InferRequest], *, timeout: float | None
) -> Sequence[InferResponse]:
    """
    Return the first answer to each of *requests*, in their order.

    Raises :class:`ServiceError` for the first that fails, and :class:`UpstreamTimeout` when all together take more than
    *timeout* seconds.
    """
    gate = asyncio.Semaphore(_PARALLEL_REQUESTS)
    tasks = [asyncio.create_task(_answer(service, model, request, gate)) for request in requests]

    async def together() -> Sequence[InferResponse]:
        return await asyncio.gather(*tasks)

    try:
        return await within(timeout, together())
    except asyncio.TimeoutError as error:
        raise UpstreamTimeout(f"The answer was not complete after {timeout or 0:g} seconds.") from error
    finally:
        for task in tasks:
            task.cancel()


async def _answer(
    service: Service, model: ServedModel, request: InferRequest, gate: asyncio.Semaphore
) -> InferResponse:
    async with gate:
        with UPSTREAM.get().call(request) as sent:
            return await _first_answer(service.client, model, sent)


async def _first_answer(client: TritonClient, model: ServedModel, request: InferRequest) -> InferResponse:
    stream: ResponseStream = await client.stream(request) if request.stream else SingleAnswer(client, request)
    try:
        responses = await stream.read()
        if not responses:
            raise no_answer(model.name)
        return responses[0]
    finally:
        stream.close()
