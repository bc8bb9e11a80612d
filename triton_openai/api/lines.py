"""
Lines of batches as calls of the operations that live requests call.

A line has its key's models, a record, a log line and a span like any request. It never waits for admission: the batch
runner starts it when there is room, and tries again if there is none any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from triton_openai import errors, offload
from triton_openai.access.keys import ApiKey
from triton_openai.access.rate_limits import RateLimit, Reservation
from triton_openai.api.bodies import FormRequest, JsonCheck, decode_json, read_within, text_size
from triton_openai.api.info import probe
from triton_openai.api.messages.message_events import error_body
from triton_openai.api.service import Service, job_not_taken_error
from triton_openai.batches.host import Outcome
from triton_openai.config.tree import ApiGroup, BatchesSettings, metrics_url
from triton_openai.models.canary import PATIENCE
from triton_openai.models.served import ServedModel
from triton_openai.operations import NO_HEADERS, Call, NoStream, Operation, Whole
from triton_openai.prompts.prompt_template import PromptTemplate
from triton_openai.storage.batch_records import Batch, BatchError, BatchUsage
from triton_openai.telemetry.request_record import RequestRecord, request_id

# About: of English prose, and more than of other texts.
_BYTES_OF_TOKEN = 4
# The prefix of the names of limits for batches alone. No key has such a name.
_POOL = "batches\n"


class LineHost:
    """
    Answers the lines of batches by the operations of *service*.

    It has more than 20 methods because it is all that batches need of the service, each method a few statements: see
    :class:`triton_openai.batches.host.Host`.
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
    def max_running(self) -> int:
        return self.settings.max_running

    @property
    def share(self) -> float:
        return 1 / self._service.worker.count

    def tritons(self, target: str) -> int:
        return self._service.fleet.leasing.triton_count(target)

    def slots_of(self, target: str) -> str:
        members = self._service.fleet.members.values()
        urls = sorted(url for member in members for url in member.settings.url)
        digest = blake2b("\n".join(urls).encode(), digest_size=8).hexdigest()
        return f"{target} {digest}"

    def endpoints(self, target: str) -> Sequence[str]:
        leasing = self._service.fleet.leasing
        if leasing.single is not None or leasing.policy(target) == "affinity":
            return ()
        return leasing.triton_names(target)

    def metrics_urls(self, target: str) -> Mapping[str, str]:
        service = self._service
        names = self.endpoints(target)
        if not names:
            if len(service.fleet.members) > 1:
                # No metrics are those of all Tritons.
                return {}
            return {"": service.settings.triton_metrics_url}
        members = service.fleet.members
        return {name: metrics_url(members[name].settings.url[0]) for name in names if name in members}

    def queue_models(self, target: str) -> Sequence[str]:
        config = self._service.fleet.snapshot.configs.get(target)
        if config is None:
            return [target]
        return [target, *(step.model for step in config.steps)]

    @property
    def max_line_size(self) -> int:
        return self._service.settings.server.max_body_size

    def problem(self, batch: Batch) -> BatchError | None:
        try:
            self._key(batch)
        except errors.InvalidRequest as error:
            return BatchError(code=error.code, message=error.message)
        return None

    def check_line(self, line: bytes) -> None:
        JsonCheck(self._service.settings.limits, batched=True).check(line)

    def target(self, model: str) -> str | None:
        models = self._service.models
        try:
            if model in models.served:
                name = model
            else:
                name = models.requested_name(model)
        except errors.InvalidRequest:
            return None
        served = models.served.get(name) or models.unlisted_lora(name)
        if served is None or not models.fleet.snapshot.reachable:
            return None
        return served.triton_model

    def live(self, target: str) -> int | None:
        return self._service.admission.live(target)

    def capacity(self, target: str) -> float:
        return self._service.admission.capacity(target)

    def has_room(self, target: str, running: int) -> bool:
        return self._service.admission.spare(target, running, self.settings.max_share)

    def body_checker(self, batch: Batch) -> Callable[[bytes], None]:
        operation = self._by_path[batch.endpoint]
        kind: Any = operation.hidden_request or operation.request
        # Made here: two threads that use a type for the first time at the same time can crash msgspec (0.22).
        offload.json_decoder(kind)
        limits = self._service.settings.limits
        strict = operation.strict
        if strict is None:
            strict = self._service.settings.api.strict_parameters

        def check(body: bytes) -> None:
            if strict:
                read_within(body, kind, limits)
            else:
                read_within(body, kind, limits, [])

        return check

    def input_tokens(self, body: bytes) -> int:
        return math.ceil(text_size(body) / _BYTES_OF_TOKEN)

    def max_enqueued_tokens(self, model: str) -> tuple[str, int] | None:
        target = self.target(model) or model
        settings = self._service.settings
        limit = settings.batches.max_enqueued_tokens
        if target in settings.models:
            limit = settings.models[target].max_enqueued_tokens or limit
        if limit is None:
            return None
        return target, limit

    async def check(self, batch: Batch, model: str, *, brings_template: bool) -> str:
        served = await self._service.find_model(model or default_model(self._by_path[batch.endpoint]), self._key(batch))
        await check_model(self._service, batch.endpoint, served, brings_template=brings_template)
        if self.target(model) == served.triton_model:
            return model
        # The name leads to this model with the rights of the key only, or by the default of the endpoint.
        return served.name

    async def probe(self, batch: Batch, model: str) -> None:
        service = self._service
        # A line has failed although the model is in the list.
        await service.fleet.refresh_on_miss()
        served = await service.find_model(model, self._key(batch))
        await check_model(service, batch.endpoint, served, brings_template=True)
        await probe(service, served, timeout=min(PATIENCE, service.settings.triton.first_token_timeout))

    def _key(self, batch: Batch) -> ApiKey:
        """
        Return the key of *batch* as it is now.

        Raises :class:`InvalidApiKey`, :class:`KeyNotSufficient` or :class:`ApiRestricted` if the key was removed or has
        lost a right that the lines need.
        """
        authorizer = self._service.authorizer
        key = authorizer.key_named(batch.owner)
        if key is None:
            raise errors.InvalidApiKey("The API key of the batch was removed.", code="key_revoked")
        key.check_may_batch()
        if not authorizer.restrictions.opens(
            groups_of(self._service.operations, batch.endpoint), batch.opened, batch.id
        ):
            raise errors.ApiRestricted(
                "The API that the batch asks was restricted after the batch was made, or its header has a new value."
            )
        return key

    async def admit(self, owner: str) -> Reservation | None:
        authorizer = self._service.authorizer
        key = authorizer.key_named(owner)
        if key is None:
            # Its lines end with this error.
            return None
        tokens = key.limit.batch_tokens_per_minute
        if tokens is not None:
            limit = RateLimit(tokens_per_minute=tokens)
            return await authorizer.admit(replace(key, name=_POOL + owner, limit=limit))
        if key.limit.limits_live_requests:
            return await authorizer.admit(key)
        return None

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        service = self._service
        operation = self._by_path[batch.endpoint]
        record = RequestRecord(
            request_id=request_id({}), method="POST", path=batch.endpoint, batch=batch.id, custom_id=custom_id
        )
        record.key = batch.owner or None
        record.batch_trace = batch.trace
        record.preferred_endpoint = endpoint or None

        async def work() -> Outcome:
            key = self._key(batch)
            record.key_digest = key.digest
            service.authorizer.set_sharing_key(key)
            request = await decode_json(body, operation, record, service.settings)
            reply = await operation.function(service, Call(operation, request, key, record, NoStream()))
            assert isinstance(reply, Whole), "the answer of a line is whole"
            record.status = reply.status
            return Outcome(reply.status, reply.body, record.request_id, usage=_usage(record))

        async def failed(error: errors.ServiceError) -> Outcome:
            outcome = _failed(batch, record, error)
            record.status = outcome.status
            return outcome

        return await service.executor.run(record, work, failed=failed, reservation=lambda: reservation)

    def refusal(self, batch: Batch, error: errors.ServiceError) -> Outcome:
        return _failed(batch, RequestRecord(request_id=request_id({}), method="POST", path=batch.endpoint), error)


def default_model(operation: Operation) -> str:
    """Return the model that a request to *operation* asks if it names none; empty for the service's default."""
    assert operation.request is not None
    defaults = [field.default for field in msgspec.structs.fields(operation.request) if field.name == "model"]
    return str(defaults[0])


def endpoints(operations: Iterable[Operation]) -> Mapping[str, Operation]:
    """
    Return the operations that lines of batches can ask, by path: those whose requests to a model are in JSON.

    An operation that takes a form has a JSON of its own for lines, if it takes them.
    """
    by_path: dict[str, Operation] = {}
    for operation in operations:
        if operation.line_request is not None:
            by_path[operation.path] = replace(
                operation, request=operation.line_request, function=operation.line_function, reads=None
            )
        elif operation.jobs and not operation.media and _reads_json(operation):
            by_path[operation.path] = operation
    return by_path


def _reads_json(operation: Operation) -> bool:
    return operation.request is not None and not issubclass(operation.request, FormRequest)


def groups_of(operations: Iterable[Operation], endpoint: str) -> Sequence[ApiGroup]:
    """Return the groups that a batch whose lines ask *endpoint* needs."""
    return "batch", endpoints(operations)[endpoint].group


async def check_model(service: Service, endpoint: str, model: ServedModel, *, brings_template: bool = False) -> None:
    """
    Check that *model* can answer lines to *endpoint*.

    Raises :class:`InvalidRequest` if the model does something else, and :class:`ConfigurationError` if it lacks a
    tokenizer, or a chat template that lines do not bring.
    """
    operation = endpoints(service.operations)[endpoint]
    if set(model.jobs).isdisjoint(operation.jobs):
        raise job_not_taken_error(service, model, operation.jobs[0])
    if operation.label != "chat" or brings_template:
        return
    prompter = await model.prompter()
    if not prompter.can_chat:
        # Raises, and says what is missing.
        prompter.template_for()
    failures = [template.failure for template in prompter.templates.values() if isinstance(template, PromptTemplate)]
    if all(failures):
        raise errors.ConfigurationError(failures[0] or "")


def _failed(batch: Batch, record: RequestRecord, error: errors.ServiceError) -> Outcome:
    """Return *error* in the form of the API of *batch*."""
    rendered = error_body(batch.endpoint, NO_HEADERS, record, error)
    if rendered is None:
        return Outcome(error.status, error.envelope(), record.request_id, error=error)
    status, body = rendered
    return Outcome(status, body, record.request_id, error=error)


def _usage(record: RequestRecord) -> BatchUsage:
    usage = record.usage
    if usage is None:
        return BatchUsage()
    return BatchUsage(
        input_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens or 0,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=record.reasoning_tokens() or 0,
    )
