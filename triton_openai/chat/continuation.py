"""Chats whose last message the model is to go on with: vLLM's and transformers' ``continue_final_message``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from triton_openai.errors import InvalidRequest

_PARAM = "continue_final_message"


class Continuation:
    """
    Renders an open end: the last message's text gets a mark behind it, and the prompt is cut there.

    Cutting at the mark, and not at the text, is right whatever the template does to the text; transformers does it the
    same way.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)

    def mark(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Return prepared *messages* with the mark behind the last one's text.

        Raises :class:`InvalidRequest` where there is nothing of an assistant's to go on with.
        """
        last = messages[-1]
        content = last.get("content")
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise InvalidRequest(
                f"'{_PARAM}' needs the last message to be an assistant's, without tool calls.", param=_PARAM
            )
        # The space behind the mark shows whether the template trims the text.
        if isinstance(content, str) and content:
            marked: Any = f"{content}{self._mark} "
        elif isinstance(content, list) and content and content[-1].get("text"):
            marked = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{self._mark} "}]
        else:
            raise InvalidRequest(f"'{_PARAM}' needs the last message to have text.", param=_PARAM)
        return [*messages[:-1], {**last, "content": marked}]

    def cut(self, prompt: str) -> str:
        """
        Return *prompt* up to the end of the last message's text, trimmed where the template trims it.

        Raises :class:`InvalidRequest` where the template leaves the text out.
        """
        place = prompt.rfind(self._mark)
        if place < 0:
            raise InvalidRequest(
                "The model's chat template does not show the last message as it is, so it cannot be continued.",
                param=_PARAM,
            )
        text = prompt[:place]
        return text if prompt.startswith(" ", place + len(self._mark)) else text.rstrip()
