"""
History templates: the Liquid texts with which openai_trtllm makes prompts.

Such a template gets ``items``, the messages, each with an ``identity`` (``System``, ``User``, ``Assistant`` or
``Tool``), its ``content``, and the ``name`` of a system or user message, else nil. Unknown variables and filters are
errors, as in the Liquid of openai_trtllm. All other features of a chat are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter, install_advice
from triton_openai.prompts.prompt_template import PLAIN, PromptTemplate, Rendering

_IDENTITIES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_NAMED = frozenset({"system", "user"})
_MAX_REASON = 1_000
# One message of each kind: a template that fails on these fails on every chat.
_SAMPLE = tuple({"role": role, "content": "text", "name": "name"} for role in (*_IDENTITIES, "user"))


class HistoryTemplate(PromptTemplate):
    """
    A Liquid template of openai_trtllm, which renders a chat in place of a chat template. Immutable; safe in threads.

    Raises :class:`ConfigurationError` for invalid Liquid, for a template that fails on an ordinary chat, and if the
    package for Liquid is not installed.
    """

    def __init__(self, source: str) -> None:
        # The package is an optional extra.
        try:
            from liquid import Environment, FalsyStrictUndefined
            from liquid.exceptions import LiquidError
        except ImportError as error:
            raise ConfigurationError(
                f"history_template needs a package that is not installed: {install_advice('liquid')}."
            ) from error
        try:
            self._template = Environment(undefined=FalsyStrictUndefined).from_string(source)
        except (LiquidError, RecursionError) as error:
            raise ConfigurationError(f"The text of history_template is not valid Liquid: {_words(error)}.") from error
        self.name = "history_template"
        self.source = source
        try:
            self.render(_SAMPLE)
        except InvalidRequest as error:
            raise ConfigurationError(f"The text of history_template fails: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """
        Return the prompt of prepared *messages*. Raises :class:`UnsupportedParameter` for what a history template
        cannot express, and :class:`InvalidRequest` when it fails.
        """
        for name, value in (
            ("tools", rendering.tools),
            ("documents", rendering.documents),
            ("chat_template_kwargs", rendering.variables),
            ("add_generation_prompt", not rendering.add_generation_prompt),
        ):
            if value:
                param = rendering.origins.name(name)
                raise UnsupportedParameter(f"The model's history template does not take '{param}'.", param=param)
        items = [_item(message, rendering, index) for index, message in enumerate(messages)]
        try:
            return self._template.render(items=items)
        except Exception as error:
            # A template is a program, and may raise any error.
            raise InvalidRequest(
                f"The history template failed on these messages: {_words(error)}."[:_MAX_REASON],
                param=rendering.origins.name("messages"),
                detail=f"{type(error).__name__}: {error}",
            ) from error


def _item(message: Mapping[str, Any], rendering: Rendering, index: int) -> dict[str, Any]:
    if message.get("tool_calls"):
        raise UnsupportedParameter(
            "The model's history template does not take tool calls.",
            param=rendering.origins.message(index).field("tool_calls"),
        )
    role = message["role"]
    return {
        "identity": _IDENTITIES[role],
        "content": message["content"],
        "name": message.get("name") if role in _NAMED else None,
    }


def _words(error: Exception) -> str:
    """Return the message of *error*, without the excerpt of the template that may follow."""
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0].rstrip(".")
    return type(error).__name__
