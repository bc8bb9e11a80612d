"""Prompts that end with the text of the last message, so that the model continues it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from triton_openai.errors import InvalidRequest
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.parts import text_part


def continued(
    messages: Sequence[dict[str, Any]],
    render: Callable[[Sequence[dict[str, Any]]], str],
    origins: Origins = CHAT_ORIGINS,
) -> str:
    """
    Return the prompt that *render* makes of prepared *messages*, up to the end of the last message's text.

    A mark after that text shows where to cut the prompt, whatever the template does to the text, as ``transformers``
    does it for ``continue_final_message``. Raises :class:`InvalidRequest` if the last message is not an assistant's
    text, or if the template omits the text.
    """
    param = origins.name("continue_final_message")
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise InvalidRequest(f"'{param}' needs an assistant's last message, without tool calls.", param=param)
    content = last["content"]
    text = _text_of(content)
    if not text:
        raise InvalidRequest(f"'{param}' needs the last message to have text.", param=param)
    mark = secrets.token_hex(16)
    # The space after the mark shows whether the template trims the text.
    marked: Any = f"{text}{mark} "
    if not isinstance(content, str):
        marked = [*content[:-1], text_part(marked)]
    prompt = render([*messages[:-1], {**last, "content": marked}])
    before, separator, after = prompt.rpartition(mark)
    if not separator:
        raise InvalidRequest(
            "The model's chat template does not show the last message as it is, so it cannot be continued.",
            param=param,
        )
    if after.startswith(" "):
        return before
    return before.rstrip()


def _text_of(content: Any) -> str | None:
    """Return the text at the end of prepared *content*."""
    if isinstance(content, str):
        return content
    if not content:
        return None
    text: str | None = content[-1].get("text")
    return text
