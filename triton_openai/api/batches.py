"""Sends the requests of one call that need no streaming, and gathers their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api.service import Service, Task, new_id, prepare
from triton_openai.errors import UpstreamTimeout
from triton_openai.generation import EmbeddingJob, Sampling, ScoreJob
from triton_openai.models.served import ServedModel
from triton_openai.telemetry.observation import UPSTREAM
from triton_openai.triton.client import ResponseStream, SingleAnswer, TritonClient
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
    tasks: list[asyncio.Task[InferResponse]] = []
    try:
        async with asyncio.timeout(timeout):
            for request in requests:
                tasks.append(asyncio.create_task(_answer(service, model, request, gate)))
                # Thousands of them take long to send: not in one turn of the event loop.
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
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


_TEXT = "Hi"


async def probe(service: Service, model: ServedModel, *, timeout: float) -> None:
    """
    Ask *model* for one token, or for one vector or score.

    Raises :class:`ServiceError`, also when it takes more than *timeout* seconds; limits of this service do not apply.
    """
    capabilities = model.adapter.capabilities
    number = new_id("probe")
    tokenizer = (await model.prompter()).tokenizer
    if capabilities.generate:
        generation = await prepare(model, tokenizer, _TEXT, Task(id=number, sampling=Sampling(max_tokens=1)))
        limits = TimeLimits(first_token=timeout, idle=timeout, total=None)
        run = service.run(model, generation, tokenizer, limits)
        try:
            await run.start()
            while not run.finished:
                await run.read()
        finally:
            run.close()
    elif capabilities.embed:
        job = EmbeddingJob(id=number, inputs=(_TEXT,))
        await answers_of(service, model, model.adapter.encode_embeddings(job), timeout=timeout)
    else:
        pairs = [(_TEXT, _TEXT)]
        encoded = await tokenizer.encode_pairs_async(pairs) if tokenizer is not None else ()
        scores = ScoreJob(id=number, pairs=pairs, encoded=encoded)
        await answers_of(service, model, model.adapter.encode_scores(scores), timeout=timeout)
