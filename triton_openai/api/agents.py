"""What the APIs for agents share: reasoning that a client keeps, and tools that run at a provider."""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache

import structlog

from triton_openai.errors import ConfigurationError, printable
from triton_openai.models.served import ServedModel

_log = structlog.get_logger(__name__)

_SEALED = "triton-openai:1:"
# Longest text of a tool's type in a message or the log.
LONGEST_TYPE = 64


def seal(reasoning: str) -> str:
    """
    Return *reasoning* as an opaque text, which a client sends back with the next turn.

    It is encoded, not encrypted: it is no secret from the client.
    """
    return base64.b64encode((_SEALED + reasoning).encode(errors="surrogatepass")).decode()


def unsealed(sealed: str | None) -> str | None:
    """Return what :func:`seal` made *sealed* of, or ``None`` for what another server made."""
    try:
        text = base64.b64decode(sealed or "", validate=True).decode(errors="surrogatepass")
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_SEALED) if text.startswith(_SEALED) else None


async def known_effort(model: ServedModel, effort: str | None) -> str | None:
    """Return *effort*, a level of reasoning that agents send to every model, if the model's template takes one."""
    if effort is None:
        return None
    try:
        known = (await model.prompter()).template_for().variables
    except ConfigurationError:
        # The request says so when it is rendered.
        return None
    return effort if "reasoning_effort" in known else None


@lru_cache(64)
def warn_left_out(kind: str) -> None:
    """Warn once in a while: agents list such tools in every request."""
    _log.warning("a hosted tool is left out", type=printable(kind, LONGEST_TYPE))
