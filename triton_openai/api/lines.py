"""
Lines of batches as calls of the operations that live requests call.

A line has its key's models, a record, a log line and a span like any request. It never waits for admission: what runs
batches begins it where there is room, and tries again if there is none any more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from triton_openai import errors
from triton_openai.access.keys import ApiKey
from triton_openai.access.rate_limits import RateLimit, tokens_charged
from triton_openai.answer.run import Run
from triton_openai.api.bodies import FormRequest, decode_json
from triton_openai.api.messages.message_events import error_body
from triton_openai.api.service import Service
from triton_openai.batches.batch_runner import Outcome
from triton_openai.config.tree import BatchesSettings
from triton_openai.operations import NO_HEADERS, Call, EventSource, Operation, Renderer, Streamed, Whole
from triton_openai.storage.batch_store import Batch, BatchUsage
from triton_openai.telemetry.request_record import RequestRecord, request_id

# No key has such a name.
_POOL = "batches\n"


class _NoStream:
    """The output of a line, whose answer is always whole."""

    async def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Streamed:
        self._refuse()

    async def send_parts(
        self, parts: AsyncGenerator[bytes, None], *, timeout: float | None, media_type: str | None = None
    ) -> Streamed:
        self._refuse()

    async def send_events(self, source: EventSource) -> Streamed:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("a line was answered by a stream")


class _Answer(msgspec.Struct):
    #: As the APIs name it.
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class LineHost:
    """
    Answers the lines of batches by the operations of *service*.

    See :class:`triton_openai.batches.batch_runner.Host`.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_path = endpoints(service.operations)

    @property
    def settings(self) -> BatchesSettings:
        return self._service.settings.batches

    @property
    def stopping(self) -> bool:
        return self._service.executor.draining.begun

    @property
    def most_running(self) -> int:
        return max(1, self._service.worker.share(self.settings.max_running))

    @property
    def longest_line(self) -> int:
        return self._service.settings.server.max_body_size

    def knows(self, owner: str) -> bool:
        key = self._service.authorizer.named(owner)
        return key is not None and key.batch

    def target(self, model: str) -> str | None:
        models = self._service.models
        try:
            name = model if model in models.served else models.wanted(model)
        except errors.InvalidRequest:
            return None
        served = models.served.get(name) or models.unlisted_lora(name)
        return None if served is None or not models.fleet.snapshot.reachable else served.triton_model

    def room(self, target: str, running: int) -> bool:
        return self._service.admission.spare(target, running, self.settings.max_share)

    async def check(self, batch: Batch, model: str) -> None:
        await self._service.find_model(model, self._key(batch.owner))

    def _key(self, owner: str) -> ApiKey:
        key = self._service.authorizer.named(owner)
        if key is None:
            raise errors.InvalidApiKey("The API key of the batch was removed.")
        return key

    async def wait(self, owner: str) -> float:
        key = self._service.authorizer.named(owner)
        most = None if key is None else key.limit.batch_tokens_per_minute
        return 0.0 if most is None else await self._count(owner, 0, RateLimit(tokens_per_minute=most))

    async def _count(self, owner: str, tokens: int, limit: RateLimit) -> float:
        """Count *tokens* of batches, unless *owner* has to wait; return for how many seconds."""
        limits = self._service.authorizer.limits
        decision = await limits.admit(_POOL + owner, limit)
        if decision.refusal is not None:
            return decision.refusal.wait
        limits.leave(_POOL + owner, tokens)
        return 0.0

    async def answer(self, batch: Batch, custom_id: str, body: bytes) -> Outcome:
        service, operation = self._service, self._by_path[batch.endpoint]
        record = RequestRecord(
            request_id=request_id({}), method="POST", path=batch.endpoint, batch=batch.id, custom_id=custom_id
        )
        record.key = batch.owner or None
        record.batch_trace = batch.trace

        async def work() -> Outcome:
            key = self._key(batch.owner)
            request = await decode_json(body, operation, record, service.settings)
            call = Call(operation, request, key, record, _NoStream())
            reply = await operation.handler(service, call)
            assert isinstance(reply, Whole), "the answer of a line is whole"
            record.status = reply.status
            if key.limit.batch_tokens_per_minute is not None:
                # With a limit, so that there is an account.
                unlimited = RateLimit(concurrent_requests=2**53)
                await self._count(batch.owner, tokens_charged(record, served=True, cut_short=False), unlimited)
            return Outcome(reply.status, reply.body, record.request_id, usage=_usage(reply.body))

        async def failed(error: errors.ServiceError) -> Outcome:
            rendered = error_body(batch.endpoint, NO_HEADERS, record, error)
            status, body = rendered or (error.status, error.envelope())
            record.status = status
            return Outcome(status, body, record.request_id, error=error)

        return await service.executor.run(record, work, failed=failed)


def endpoints(operations: Iterable[Operation]) -> Mapping[str, Operation]:
    """Return the operations that lines of batches can ask, by path: those that ask a model in JSON."""
    return {
        operation.path: operation
        for operation in operations
        if operation.jobs
        and not operation.media
        and operation.request is not None
        and not issubclass(operation.request, FormRequest)
    }


def _usage(answer: bytes) -> BatchUsage:
    usage = _decode(answer).usage or {}
    given = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return BatchUsage(
        input_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        cached_tokens=given.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        reasoning_tokens=made.get("reasoning_tokens") or 0,
    )
