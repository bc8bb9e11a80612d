"""The ids of past tool calls, in the form that a chat template takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from triton_openai.prompts.prompt_template import ToolForm

_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = re.compile(r"functions\..+:[0-9]+")


def fit_ids(messages: Sequence[dict[str, Any]], form: ToolForm) -> None:
    """
    Change the ids in prepared *messages*, and the names of tool messages, to *form*, in place and consistently.

    A tool message without an id answers the first unanswered call, of its name if it has one.
    """
    # The new id and the function's name, by the client's id
    calls: dict[str, tuple[str, str]] = {}
    # A dictionary instead of a list, because a conversation may have thousands of calls
    unanswered: dict[tuple[str, str], None] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            old = call.get("id")
            call["id"] = _fitting(old, name, count, form)
            count += 1
            unanswered[call["id"], name] = None
            if old is not None:
                calls[old] = (call["id"], name)
        if message["role"] == "tool":
            answered = _answered(message, calls, unanswered)
            if answered is not None:
                unanswered.pop(answered, None)
            _fit_answer(message, answered, form)


def _answered(
    message: dict[str, Any], calls: dict[str, tuple[str, str]], unanswered: dict[tuple[str, str], None]
) -> tuple[str, str] | None:
    """Return the call that a tool *message* answers: its new id and the function's name."""
    old = message.get("tool_call_id")
    if old is not None:
        return calls.get(old)
    name = message.get("name")
    for call in unanswered:
        if name in (None, call[1]):
            return call
    return None


def _fit_answer(message: dict[str, Any], answered: tuple[str, str] | None, form: ToolForm) -> None:
    """Change the id of a tool *message* to *form*."""
    old = message.get("tool_call_id")
    if answered is not None:
        message["tool_call_id"] = answered[0]
        if form.needs_names:
            message.setdefault("name", answered[1])
    elif old is not None and form.ids == "short":
        message["tool_call_id"] = _short(old)


def _fitting(old: str | None, name: str, count: int, form: ToolForm) -> str:
    """Return the id of the call with the number *count*, whose id was *old*."""
    if form.ids == "named":
        if old is not None and _NAMED.fullmatch(old):
            return old
        return f"functions.{name}:{count}"
    if form.ids == "short":
        if old is None:
            return _short(f"{name}:{count}")
        return _short(old)
    if old is None:
        return f"call_{count}"
    return old


def _short(text: str) -> str:
    if _SHORT.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:9]
