"""What handlers work with: the running service, and the context of a request to a model."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from aiohttp import web

from triton_openai.access.keys import KEY, ApiKey
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api.bodies import ModelRequest, read_json, tell_ignored
from triton_openai.api.parameters import check_unused
from triton_openai.config.tree import Settings
from triton_openai.errors import PromptRefused, UnsupportedParameter
from triton_openai.media.images import ImageLoader
from triton_openai.models.control import ModelControl
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.serving.admission import Admission
from triton_openai.tasks import Background
from triton_openai.telemetry.observation import OBSERVATION, OBSERVERS, Observation
from triton_openai.triton.client import TritonClient

_Body = TypeVar("_Body", bound=ModelRequest)
_Other = TypeVar("_Other", bound=ModelRequest)
_Answer = TypeVar("_Answer")


@dataclass
class Service:
    """The parts of the running service. ``settings`` is replaced as a whole when the settings change."""

    settings: Settings
    models: Models
    control: ModelControl
    client: TritonClient
    background: Background
    admission: Admission
    images: ImageLoader


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """Return the service of the application that serves *request*."""
    return request.app[SERVICE]


def key_of(request: web.Request) -> ApiKey:
    """Return the API key of *request*; one that allows everything where the service asks for no keys."""
    return request[KEY]


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a fresh object id such as ``chatcmpl-…``; Triton gets the same id for the request."""
    return f"{prefix}{separator}{os.urandom(16).hex()}"


def now() -> int:
    """Return the time for OpenAI's ``created``: whole seconds since the epoch."""
    return int(time.time())


async def find_model(request: web.Request, name: str) -> ServedModel:
    """
    Return the served model called *name*, or the default model if the name is empty.

    Raises :class:`ModelNotFound`, also for a model that the request's key may not use, and
    :class:`UpstreamUnavailable` if Triton does not answer or the model is not ready.
    """
    return await service_of(request).models.find(name, key_of(request).allows)


async def read_request(request: web.Request, kind: type[_Body]) -> tuple[Service, _Body, ServedModel]:
    """
    Return the service, the body of *request* as *kind*, and the model that the body names.

    A deployment in the path, as Azure's clients have it, takes the place of the body's model. A body without a model
    gets the name of the default one. Raises as :func:`read_json` and :func:`find_model`.
    """
    service = service_of(request)
    body = await read_json(request, kind, strict=service.settings.api.strict_parameters)
    model = await service.models.find(request.match_info.get("deployment", body.model), key_of(request).allows)
    body.model = model.name
    return service, body, model


@dataclass
class RequestContext(Generic[_Body]):
    """A request to a model, and what its handler works with."""

    request: web.Request
    service: Service
    body: _Body
    model: ServedModel
    observation: Observation
    #: The time that is left after the wait for admission.
    limits: TimeLimits

    def about(self, body: _Other) -> RequestContext[_Other]:
        """Return the context with another *body*."""
        return RequestContext(self.request, self.service, body, self.model, self.observation, self.limits)

    async def admitted(
        self, answer: Callable[[RequestContext[_Body]], Awaitable[_Answer]], *, param: str, runs: bool = True
    ) -> _Answer:
        """
        Wait for admission, and return what *answer* returns for this context, which counts as running.

        The wait counts towards the limits. What only prepares an answer, and so *runs* not, does not wait. A text-level
        model may be served by its token-level engine. If the engine does not take the request, the text-level model
        gets it. *param* is the field to blame if the model refuses the input and names no field. Raises as
        :meth:`Admission.enter`, and the engine's :class:`UnsupportedParameter` if neither takes the request.
        """
        admission, triton_model = self.service.admission, self.model.triton_model
        task = None
        if runs:
            task = await admission.enter(triton_model, self.observation, patience=self.limits.patience)
        try:
            if runs:
                self.limits = self.limits.after(self.observation.queued_seconds)
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
        except PromptRefused as error:
            error.param = error.param or param
            raise
        finally:
            if runs:
                admission.leave(triton_model, task)


async def begin(request: web.Request, kind: type[_Body], operation: str) -> RequestContext[_Body]:
    """Return the context of *request*; *operation* is its name in logs and metrics. Raises :class:`InvalidRequest`."""
    service, body, model = await read_request(request, kind)
    stream = bool(getattr(body, "stream", False))
    observation = request[OBSERVATION]
    # Metrics have a name for each model, and none for each name that a client makes up.
    label = model.name if model.listed else model.triton_model
    observation.identify(operation, model=label, adapter=model.adapter.name, stream=stream)
    observation.response_model = model.answers_as
    request.app[OBSERVERS].identified(observation)
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=stream)
    observation.parameters = body
    if ignored := check_unused(body):
        tell_ignored(observation, ignored)
    return RequestContext(request, service, body, model, observation, limits)
