"""What the handlers of requests for a model do first: read the body, find the model, take limits and admission."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from aiohttp import web

from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api.bodies import ModelRequest, read_json
from triton_openai.api.parameters import refuse
from triton_openai.api.service import Service, find_model, observe, service_of
from triton_openai.errors import PromptRefused, UnsupportedParameter
from triton_openai.models.served import ServedModel
from triton_openai.telemetry.observation import Observation

_Body = TypeVar("_Body", bound=ModelRequest)
_Answer = TypeVar("_Answer")


@dataclass
class RequestContext(Generic[_Body]):
    """A request to a model, and what its handler works with."""

    request: web.Request
    service: Service
    body: _Body
    model: ServedModel
    observation: Observation
    #: What is left of them after the wait for admission.
    limits: TimeLimits

    @asynccontextmanager
    async def admitted(self, *, param: str) -> AsyncIterator[None]:
        """
        Wait for admission, and hold it for the block. The wait counts towards the time limits.

        *param* is the field to blame where the model refuses the input without naming one. Raises as
        :meth:`Admission.enter`.
        """
        patience = self.limits.patience
        try:
            async with self.service.admission.enter(self.model.owner, self.observation, patience=patience):
                self.limits = self.limits.after(self.observation.queued_seconds)
                yield
        except PromptRefused as error:
            error.param = error.param or param
            raise

    async def answered(self, answer: Callable[[RequestContext[_Body]], Awaitable[_Answer]]) -> _Answer:
        """
        Return what *answer* returns for this context.

        Where an engine stands in for the model and does not take the request, the model itself is asked. Raises the
        engine's :class:`UnsupportedParameter` where neither takes it.
        """
        try:
            return await answer(self)
        except UnsupportedParameter as refusal:
            if self.model.text_level is None:
                raise
            try:
                model = self.model.on_text_level("its engine does not take the request")
                return await answer(replace(self, model=model))
            except UnsupportedParameter:
                raise refusal from None


async def read_request(request: web.Request, kind: type[_Body]) -> tuple[Service, _Body, ServedModel]:
    """
    Return the service, the body of *request* as *kind*, and the model that it names.

    A body without a model gets the name of the default one. Raises as :func:`read_json` and :func:`find_model`.
    """
    service = service_of(request)
    body = await read_json(request, kind, strict=service.settings.api.strict_parameters)
    model = await find_model(request, body.model)
    body.model = model.name
    return service, body, model


async def begin(
    request: web.Request, kind: type[_Body], operation: str, *, refused: Mapping[str, tuple[Any, ...]] = {}
) -> RequestContext[_Body]:
    """
    Return the context of *request*, whose body is of *kind*.

    *operation* is its name in logs, metrics and traces; *refused* lists the fields that only take neutral values.
    Raises :class:`InvalidRequest` and its kin, and :class:`ModelNotFound`.
    """
    service, body, model = await read_request(request, kind)
    stream = bool(getattr(body, "stream", False))
    observation = observe(request, operation, model=model, stream=stream)
    observation.parameters = body
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=stream)
    refuse(body, refused)
    return RequestContext(request, service, body, model, observation, limits)
