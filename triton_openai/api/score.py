"""``POST /v1/score``, also ``/score``, in the shapes of vLLM's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from triton_openai.api.access import model_of
from triton_openai.api.bodies import read_json
from triton_openai.api.documented import TextsOrNull
from triton_openai.api.parameters import refuse
from triton_openai.api.scoring import REFUSED, ScoringRequest, ScoringUsage, score, texts_of, usage_of
from triton_openai.api.service import new_id, now, service_of
from triton_openai.errors import InvalidRequest
from triton_openai.telemetry.observation import observe
from triton_openai.time_limits import TimeLimits

_encode = msgspec.json.Encoder().encode

#: What the two sides are called, in the order in which vLLM's server tries them.
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(ScoringRequest, kw_only=True):
    """The request: two sides under one pair of names (see :data:`SIDES`), each a text or several."""

    queries: TextsOrNull = None
    documents: TextsOrNull = None
    items: TextsOrNull = None
    data_1: TextsOrNull = None
    data_2: TextsOrNull = None
    text_1: TextsOrNull = None
    text_2: TextsOrNull = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = msgspec.field(name="object", default="score")
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    id: str
    object: Literal["list"] = msgspec.field(name="object", default="list")
    created: int
    model: str
    data: Sequence[Score]
    usage: ScoringUsage | msgspec.UnsetType = msgspec.UNSET


async def handle(request: web.Request) -> web.StreamResponse:
    """Score one text against each of several, or texts pair by pair."""
    service = service_of(request)
    body = await read_json(request, ScoreRequest, strict=service.settings.api.strict_parameters)
    model = await model_of(request, body)
    observation = observe(request, "score", model=model)
    observation.parameters = body
    refuse(body, REFUSED)
    pairs, second = _pairs(body)
    score_id = observation.response_id = new_id("score")
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=False)
    async with service.admission.enter(model.owner, observation, patience=limits.patience):
        limits = limits.after(observation.queued_seconds)
        result = await score(service, model, body, score_id, pairs, param=second, timeout=limits.total)
    observation.input_tokens = result.prompt_tokens
    answer = ScoreList(
        id=score_id,
        created=now(),
        model=body.model,
        data=[Score(index=index, score=value) for index, value in enumerate(result.scores)],
        usage=usage_of(result),
    )
    return web.Response(body=_encode(answer), content_type="application/json")


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs, and what the client calls the second side. Raises :class:`InvalidRequest`."""
    given = [name for name in dict.fromkeys(name for side in SIDES for name in side) if getattr(body, name) is not None]
    names = next((side for side in SIDES if set(side) == set(given)), None)
    if names is None:
        known = ", ".join(f"'{first}' and '{second}'" for first, second in SIDES)
        raise InvalidRequest(
            f"Give the two sides under one pair of names: {known}.",
            param=given[0] if given else SIDES[-1][0],
            code="missing_required_parameter" if len(given) < 2 else "invalid_value",
        )
    first, second = (texts_of(getattr(body, name), name) for name in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"'{names[0]}' must be one text, or as many as '{names[1]}': there are {len(first)} and {len(second)}.",
            param=names[0],
            code="invalid_value",
        )
    return list(zip(first, second, strict=True)), names[1]
