"""What the APIs for agents share: reasoning that a client keeps, tools that run at a provider, and counts."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import structlog

from triton_openai import offload
from triton_openai.answer.prepare import tokenizer_of
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import answers_cost, collect
from triton_openai.api.bodies import report_ignored
from triton_openai.api.conversation import Conversation, prompt_of
from triton_openai.api.service import RequestContext, job_not_taken_error
from triton_openai.errors import ConfigurationError, printable
from triton_openai.generation import Generation
from triton_openai.models.served import ServedModel
from triton_openai.operations import Renderer
from triton_openai.telemetry.request_record import RequestRecord

_log = structlog.get_logger(__name__)

_SEALED = "triton-openai:1:"
# What a summary begins with that stands for all before it.
_SEALED_ALL = "triton-openai:1all:"
# Longest text of a tool's type in a message or the log.
LONGEST_TYPE = 64


def seal(reasoning: str, *, summarizes_all: bool = False) -> str:
    """
    Return *reasoning* as an opaque text, which a client sends back with the next turn.

    It is encoded, not encrypted: it is no secret from the client. *summarizes_all* is whether it is a summary that
    stands for all before it.
    """
    begin = _SEALED
    if summarizes_all:
        begin = _SEALED_ALL
    return base64.b64encode((begin + reasoning).encode(errors="surrogatepass")).decode()


def unsealed(sealed: str | None) -> str | None:
    """Return what :func:`seal` made *sealed* of, or ``None`` for what another server made."""
    text = _decoded(sealed)
    for begin in (_SEALED, _SEALED_ALL):
        if text.startswith(begin):
            return text.removeprefix(begin)
    return None


def seals_all(sealed: Any) -> bool:
    """Return whether *sealed*, of any type, is a summary that stands for all before it."""
    return isinstance(sealed, str) and _decoded(sealed).startswith(_SEALED_ALL)


def _decoded(sealed: str | None) -> str:
    try:
        return base64.b64decode(sealed or "", validate=True).decode(errors="surrogatepass")
    except (binascii.Error, ValueError):
        return ""


async def known_effort(model: ServedModel, effort: str | None) -> str | None:
    """Return *effort*, a level of reasoning that agents send to every model, if the model's template takes one."""
    if effort is None:
        return None
    try:
        template = (await model.prompter()).template_for()
    except ConfigurationError:
        # The error is raised when the request is rendered.
        return None
    if template.takes_effort(effort):
        return effort
    return None


def report_left_out(record: RequestRecord, kinds: Sequence[str]) -> None:
    """Report to the client, and once to the log, the *kinds* of tools and items of a request that are left out."""
    report_ignored(record, kinds)
    for kind in dict.fromkeys(kinds):
        _warn_left_out(kind)


@lru_cache(64)
def _warn_left_out(kind: str) -> None:
    # Agents send them with every request.
    _log.warning("part of a request is left out", type=printable(kind, LONGEST_TYPE))


async def count_tokens(context: RequestContext[Conversation]) -> int:
    """Return how many tokens a conversation has, as the model's template and tokenizer make them."""
    model = context.model
    if Generation not in model.jobs:
        raise job_not_taken_error(context.service, model, Generation)
    tokenizer = await tokenizer_of(model)
    prompt, _, _ = await prompt_of(context, await model.prompter())
    return await tokenizer.count_async(prompt, model.adapter.metadata.adds_bos)


async def feed_renderer(renderer: Renderer, run: Run, *, timeout: float | None) -> None:
    """Pass the whole answer of *run* to *renderer*, for its state and not for its events. Raises ServiceError."""
    (answer,) = await collect([run], timeout=timeout)

    def rendered() -> None:
        for delta in answer.deltas:
            renderer.piece(0, delta)
        renderer.last(0)

    await offload.run(rendered, cost=answers_cost([answer], offload.CHARACTER))
