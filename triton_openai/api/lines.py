"""
Lines of batches as requests: they go through the handlers of live requests, without a socket.

A line has its key's models, a record, a log line and a span like any request. It never waits for admission: what runs
batches begins it where there is room, and tries again if there is none any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai import errors
from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.access.keys import KEY, ApiKey
from triton_openai.access.rate_limits import RateLimit, Reservation, tokens_charged
from triton_openai.api.bodies import FormRequest, JsonCheck
from triton_openai.api.info import probe
from triton_openai.api.service import OPERATIONS_BY_HANDLER, SERVICE, Operation, find_model, job_not_taken_error
from triton_openai.batches.results import Outcome
from triton_openai.config.tree import BatchesSettings, Group
from triton_openai.config.worker import WORKER
from triton_openai.draining import DRAINING
from triton_openai.models.canary import PATIENCE
from triton_openai.models.served import ServedModel
from triton_openai.prompts.messages import PromptTemplate
from triton_openai.serving.middleware import ERROR_BODY, Observed
from triton_openai.serving.request_body import LIMITS
from triton_openai.storage.batch_store import Batch, BatchError, BatchUsage
from triton_openai.telemetry.logging import LOG_FIELDS
from triton_openai.telemetry.request_record import RECORD, RequestRecord, request_id

_log = structlog.get_logger(__name__)
_HEADERS = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json"}))
_NO_QUERY: Mapping[str, str] = MappingProxyType({})
# No key has such a name.
_POOL = "batches\n"


class _Content:
    """The body of a request that has arrived."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def is_eof(self) -> bool:
        return True

    def read_nowait(self) -> bytes:
        data, self._data = self._data, b""
        return data


class _Match(dict[str, str]):
    """The route of a request."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.handler = handler


class LineRequest(dict[Any, Any]):
    """What handlers use of a request to *handler*."""

    method, transport, can_read_body = "POST", None, True
    headers, query = _HEADERS, _NO_QUERY

    def __init__(self, app: web.Application, handler: Handler, path: str, body: bytes) -> None:
        super().__init__()
        self.app, self.path, self.content, self.match_info = app, path, _Content(body), _Match(handler)
        self.content_length, self.client_max_size = len(body), app[SERVICE].settings.server.max_body_size


class LineHost:
    """Answers the lines of batches by the handlers of *app*; see :class:`triton_openai.batches.batch_runner.Host`."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._by_path = endpoints(app[OPERATIONS_BY_HANDLER])

    @property
    def settings(self) -> BatchesSettings:
        return self._app[SERVICE].settings.batches

    @property
    def stopping(self) -> bool:
        return self._app[DRAINING].begun

    @property
    def most_running(self) -> int:
        return max(1, self._app[WORKER].share(self.settings.max_running))

    @property
    def longest_line(self) -> int:
        return self._app[SERVICE].settings.server.max_body_size

    def problem(self, batch: Batch) -> BatchError | None:
        try:
            self._key(batch)
        except errors.InvalidRequest as error:
            return BatchError(code=error.code, message=error.message)
        return None

    def check_line(self, line: bytes) -> None:
        JsonCheck(self._app[LIMITS], batched=True).check(line)

    def target(self, model: str) -> str | None:
        models = self._app[SERVICE].models
        try:
            name = model if model in models.served else models.wanted(model)
        except errors.InvalidRequest:
            return None
        served = models.served.get(name) or models.unlisted_lora(name)
        return None if served is None or not models.fleet.snapshot.reachable else served.triton_model

    def room(self, target: str, running: int) -> bool:
        return self._app[SERVICE].admission.spare(target, running, self.settings.max_share)

    async def check(self, batch: Batch, model: str, *, brings_template: bool) -> None:
        found = await self._found(batch, model)
        await check_model(self._app, batch.endpoint, found, brings_template=brings_template)

    async def _found(self, batch: Batch, model: str) -> ServedModel:
        request = LineRequest(self._app, self._by_path[batch.endpoint], batch.endpoint, b"")
        request[KEY] = self._key(batch)
        return await find_model(cast(web.Request, request), model)

    async def probe(self, batch: Batch, model: str) -> None:
        service = self._app[SERVICE]
        # Whatever the list says, a line has found otherwise.
        await service.fleet.refresh_on_miss()
        found = await self._found(batch, model)
        await check_model(self._app, batch.endpoint, found, brings_template=True)
        await probe(service, found, timeout=min(PATIENCE, service.settings.triton.first_token_timeout))

    def _key(self, batch: Batch) -> ApiKey:
        """
        Return the key of *batch* as it is now.

        Raises :class:`InvalidApiKey`, :class:`KeyNotSufficient` or :class:`ApiRestricted` if the key is not there any
        more or has lost a right that the lines need.
        """
        authorizer = self._app[AUTHORIZER]
        key = authorizer.named(batch.owner)
        if key is None:
            raise errors.InvalidApiKey("The API key of the batch was removed.", code="key_revoked")
        key.check_may_batch()
        if not authorizer.restrictions.opens(groups_of(self._app, batch.endpoint), batch.opened, batch.id):
            raise errors.ApiRestricted(
                "The API that the batch asks was restricted after the batch was made, or its header has a new value."
            )
        return key

    async def admit(self, owner: str) -> Reservation | None:
        authorizer = self._app[AUTHORIZER]
        key = authorizer.named(owner)
        if key is None:
            # Its lines end with this error.
            return None
        tokens = key.limit.batch_tokens_per_minute
        if tokens is not None:
            limit = RateLimit(tokens_per_minute=tokens)
            return await authorizer.admit(msgspec.structs.replace(key, name=_POOL + owner, limit=limit))
        return await authorizer.admit(key) if key.limit.any else None

    async def answer(self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None) -> Outcome:
        app = self._app
        record = RequestRecord(
            request_id=request_id({}), method="POST", path=batch.endpoint, batch=batch.id, custom_id=custom_id
        )
        record.key, record.batch_trace = batch.owner or None, batch.trace
        handler = self._by_path[batch.endpoint]
        request = cast(web.Request, LineRequest(app, handler, batch.endpoint, body))
        request[RECORD] = record
        served = False
        with Observed(app, record):
            LOG_FIELDS.set(record.log_fields)
            try:
                request[KEY] = key = self._key(batch)
                app[AUTHORIZER].share(key)
                response = await handler(request)
                answer = response.body if isinstance(response, web.Response) else None
                assert isinstance(answer, bytes), "a line was answered by a stream"
                record.status = response.status
                served = True
                return Outcome(response.status, answer, record.request_id, usage=_usage(record))
            except asyncio.CancelledError:
                reason = app[DRAINING].reason()
                if reason is None:
                    record.client_left = True
                    raise
                error = reason
            except errors.ServiceError as known:
                error = known
            except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
                _log.exception("line failed", request_id=record.request_id, batch=batch.id)
                error = errors.ServiceError()
            finally:
                if reservation is not None:
                    cut_short = record.client_left or app[DRAINING].reason() is not None
                    reservation.close(tokens_charged(record, served=served, cut_short=cut_short))
            record.error = error
            outcome = _failed(request, error)
            record.status = outcome.status
            return outcome

    def refusal(self, batch: Batch, error: errors.ServiceError) -> Outcome:
        request = LineRequest(self._app, self._by_path[batch.endpoint], batch.endpoint, b"")
        request[RECORD] = RequestRecord(request_id=request_id({}), method="POST", path=batch.endpoint)
        return _failed(cast(web.Request, request), error)


def endpoints(operations: Mapping[Handler, Operation]) -> Mapping[str, Handler]:
    """Return the handlers that lines of batches can ask, by path: those of operations that ask a model in JSON."""
    return {
        operation.path: handler
        for handler, operation in operations.items()
        if operation.jobs
        and not operation.media
        and operation.request is not None
        and not issubclass(operation.request, FormRequest)
    }


def groups_of(app: web.Application, endpoint: str) -> Sequence[Group]:
    """Return the groups that a batch whose lines ask *endpoint* needs."""
    operations = app[OPERATIONS_BY_HANDLER]
    return "batch", operations[endpoints(operations)[endpoint]].group


async def check_model(
    app: web.Application, endpoint: str, model: ServedModel, *, brings_template: bool = False
) -> None:
    """
    Raise what each line to *endpoint* would raise because of its *model*, whatever else it has.

    That is :class:`InvalidRequest` if the model does something else, and :class:`ConfigurationError` if it lacks a
    tokenizer, or a chat template that lines do not bring.
    """
    operations = app[OPERATIONS_BY_HANDLER]
    operation = operations[endpoints(operations)[endpoint]]
    if set(model.jobs).isdisjoint(operation.jobs):
        raise job_not_taken_error(app, model, operation.jobs[0])
    if operation.label != "chat" or brings_template:
        return
    prompter = await model.prompter()
    if not prompter.can_chat:
        # Raises, and says what is missing.
        prompter.template_for()
    failures = [template.failure for template in prompter.templates.values() if isinstance(template, PromptTemplate)]
    if all(failures):
        raise errors.ConfigurationError(failures[0] or "")


def _failed(request: web.Request, error: errors.ServiceError) -> Outcome:
    """Return *error* as the API of *request* has it."""
    render = request.app.get(ERROR_BODY)
    status, body = (render and render(request, error)) or (error.status, error.envelope())
    return Outcome(status, body, request[RECORD].request_id, error=error)


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
