"""
Finds models that do not answer although Triton calls them ready: Triton checks that they loaded, not their engines.

After :data:`FAILURES` requests of clients in a row without any response from a model, the service sends small requests
of its own until one is answered. A model with :data:`FAILURES` timeouts in a row is reported at once, until it answers
a client, since it may answer small requests. Each process has its own view.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from triton_openai.errors import ModelUnloading, ServiceError, UpstreamError, UpstreamTimeout
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.tasks import cancel
from triton_openai.telemetry.instruments import NOT_ANSWERING
from triton_openai.telemetry.metrics import Metrics, Series
from triton_openai.telemetry.request_record import Observer, RequestRecord

_log = structlog.get_logger(__name__)

#: Requests in a row that a model left without an answer before it is asked for one.
FAILURES = 3
#: Longest wait for the answer to a small request, and for how long a client that left must have waited to count.
PATIENCE = 30.0
# Between an attempt and the next.
_INTERVAL = 10.0


class _Trouble(msgspec.Struct):
    """What the requests of a model have shown since it answered last."""

    #: How many in a row had no answer, and how many of them waited in vain.
    failures: int = 0
    silences: int = 0
    #: Whether it did not answer a small request.
    silent: bool = False


class Canary(Observer):
    """
    Probes *models* that seem not to answer: *ask* raises :class:`UpstreamError` if a model does not answer.

    *metrics* have the models that do not answer.
    """

    def __init__(self, models: Models, ask: Callable[[ServedModel], Awaitable[None]], metrics: Metrics) -> None:
        self._models = models
        self._ask = ask
        self._metrics = metrics
        # By Triton model, what its requests have shown since it answered last.
        self._troubles: defaultdict[str, _Trouble] = defaultdict(_Trouble)
        #: By Triton model that is being asked: what asks it.
        self.asking: dict[str, asyncio.Task[None]] = {}
        #: The Triton models that are shown as not answering.
        self.not_answering: dict[str, ServedModel] = {}

    @property
    def any_answers(self) -> bool:
        """Whether at least one served model answers; if some models generate text, one of these."""
        silent = {name for name, trouble in self._troubles.items() if trouble.silent}
        served = self._models.served.values()
        generating = {model.triton_model for model in served if "generate" in model.tasks}
        expected = generating or {model.triton_model for model in served}
        return not silent or not expected <= silent

    def ended(self, record: RequestRecord) -> None:
        """Update whether the model answers, by the end of a request."""
        model = self._models.served.get(record.model or "")
        if model is None:
            return
        name = model.triton_model
        if record.error is None:
            silence = None
        else:
            silence = _silence(record)
        if silence is None and _answered(record):
            self._forget(name)
        elif silence is not None or _left_without(record):
            trouble = self._troubles[name]
            trouble.failures += 1
            if silence is not None:
                trouble.silences += 1
                if trouble.silences >= FAILURES:
                    self._show(name, model, silence.reason)
            if trouble.failures >= FAILURES and name not in self.asking:
                # Without the context of the request that happened to be the last one.
                self.asking[name] = contextvars.Context().run(asyncio.create_task, self._watch(name))

    async def close(self) -> None:
        """Stop the probes."""
        await cancel(*self.asking.values())

    async def _watch(self, name: str) -> None:
        """Probe the Triton model *name* until it answers or is gone."""
        # A Triton that is away before or after an attempt is what is wrong, and is reported elsewhere.
        while await self._reachable() and (model := self._models.served.get(name)) is not None:
            reason = None
            try:
                await self._ask(model)
            except UpstreamError as error:
                reason = error.reason
            except ServiceError as error:
                if type(error) is ServiceError:
                    # A mistake of the adapter, which is logged, says nothing of its model.
                    break
                # Whoever refuses a request is there.
                _log.debug("small request refused", model=name, reason=error.reason)
            trouble = self._troubles[name]
            if reason is None:
                trouble.silent = False
                if trouble.silences < FAILURES:
                    break
            elif not await self._reachable():
                break
            elif name in self._models.served:
                trouble.silent = True
                self._show(name, model, reason)
            await asyncio.sleep(_INTERVAL)
        self._forget(name)

    def _show(self, name: str, model: ServedModel, reason: str) -> None:
        """Report that *model* does not answer, once."""
        if name not in self.not_answering:
            self.not_answering[name] = model
            _log.error("model does not answer", model=name, failures=self._troubles[name].failures, reason=reason)
            self._gauge(model).set(1)

    async def _reachable(self) -> bool:
        await self._models.fleet.refresh()
        return self._models.fleet.snapshot.reachable

    def _forget(self, name: str) -> None:
        """Reset the failures of the model *name*."""
        self._troubles.pop(name, None)
        task = self.asking.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        model = self.not_answering.pop(name, None)
        if model is not None:
            if name in self._models.served:
                _log.info("model answers again", model=name)
            self._gauge(model).set(0)

    def _gauge(self, model: ServedModel) -> Series:
        return self._metrics.child(NOT_ANSWERING, model.triton_model, model.adapter.name)


def _silence(record: RequestRecord) -> UpstreamTimeout | None:
    """Return the timeout that ended a request, before or after the first token; ``None`` for another end."""
    if not isinstance(error := record.error, UpstreamTimeout):
        return None
    in_vain = record.time_to_first_token is None and any(answer.cancelled for answer in record.answers)
    if in_vain or error.code == "upstream_silent":
        return error
    return None


def _answered(record: RequestRecord) -> bool:
    """Return whether the model sent something: a first token is enough."""
    return (record.error is None and not record.client_left) or record.time_to_first_token is not None


def _left_without(record: RequestRecord) -> bool:
    """Return whether the model should have answered; a client that leaves may have had other reasons."""
    if record.client_left:
        return record.duration - record.queued_seconds >= PATIENCE
    return isinstance(record.error, UpstreamError) and not isinstance(record.error, ModelUnloading)
