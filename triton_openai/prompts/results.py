"""
Results of tool calls, in the place where templates look for them.

A template shows a result behind the turn that called, often by its id. Clients leave ids out, send instructions in
between, and send results whose calls were cut from the history. Templates without tools refuse both, or drop them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from triton_openai.prompts.parts import Prepared, joined, text_part
from triton_openai.prompts.system_messages import SYSTEM_ROLES


def results_behind_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return prepared *messages* with each result directly behind the turn that made its call, and with the call's id.

    System messages, and what the user said while a call ran, follow the results.
    """
    order = _ResultOrder()
    for message in messages:
        if message["role"] == "tool":
            order.add_result(message)
        else:
            order.add(message)
    return order.messages()


class _Turn:
    """A message, and the results behind it."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        calls = message.get("tool_calls", ())
        #: The ids of the calls that have no result, in order; none if one of the calls has no id.
        self.unanswered = dict.fromkeys([call["id"] for call in calls if "id" in call])
        if len(self.unanswered) < len(calls):
            self.unanswered = {}
        #: How many of the calls have no result.
        self.waiting = len(calls)
        self.results: list[dict[str, Any]] = []


class _ResultOrder:
    """Messages in order, with results behind their calls."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        # The turn behind which results without a call of their own stand
        self._current: _Turn | None = None
        # The turns whose calls have no result, by the ids of these calls; of the same id, the latest one comes last
        self._by_id: dict[str, list[_Turn]] = {}

    def add(self, message: dict[str, Any]) -> None:
        """Add a *message* that is no result."""
        turn = _Turn(message)
        self._turns.append(turn)
        for call_id in turn.unanswered:
            self._by_id.setdefault(call_id, []).append(turn)
        is_aside = message["role"] in SYSTEM_ROLES and self._current is not None and self._current.waiting > 0
        if not is_aside:
            self._current = turn

    def add_result(self, result: dict[str, Any]) -> None:
        """Add a *result* behind its call, or, if that is unknown, behind the latest turn."""
        turn = self._current
        call_id = result.get("tool_call_id")
        if call_id is None and turn is not None and turn.unanswered:
            call_id = next(iter(turn.unanswered))
            result = {**result, "tool_call_id": call_id}
        turns = self._by_id.get(call_id or "")
        if turns:
            turn = turns.pop()
            del turn.unanswered[call_id]
        if turn is None:
            # The conversation begins with it.
            turn = _Turn(result)
            self._turns.append(turn)
            return
        turn.waiting -= 1
        turn.results.append(result)

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages."""
        return [message for turn in self._turns for message in (turn.message, *turn.results)]


def orphans_as_text(messages: Sequence[dict[str, Any]], *, in_parts: bool) -> list[dict[str, Any]]:
    """Return prepared *messages* in which results without a call before them are messages of the user."""
    changed: list[dict[str, Any]] = []
    follows_call = False
    for message in messages:
        if message["role"] == "tool" and not follows_call:
            changed.append(_result_as_text(message, in_parts=in_parts))
            continue
        follows_call = message["role"] == "tool" or bool(message.get("tool_calls"))
        changed.append(message)
    return changed


def calls_as_text(messages: Sequence[dict[str, Any]], *, in_parts: bool) -> list[dict[str, Any]]:
    """Return prepared *messages* in which calls are words of the assistant, and results messages of the user."""
    changed: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            changed.append(_result_as_text(message, in_parts=in_parts))
        elif "tool_calls" in message:
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            calls = "\n".join([_call_as_text(call["function"]) for call in message["tool_calls"]])
            said["content"] = _with_text(message["content"], calls, in_parts=in_parts)
            changed.append(said)
        else:
            changed.append(message)
    return changed


def _call_as_text(function: dict[str, Any]) -> str:
    """Return what stands in the place of a call of *function*."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"Call: {function['name']} {arguments}"


def _result_as_text(message: dict[str, Any], *, in_parts: bool) -> dict[str, Any]:
    """Return the user's message that has the result in *message*."""
    title: Prepared = "Result of the call:\n"
    if in_parts:
        title = [text_part("Result of the call:")]
    content = message["content"]
    if isinstance(content, str) and isinstance(title, str):
        return {"role": "user", "content": title + content}
    return {"role": "user", "content": joined([title, content])}


def _with_text(content: Any, text: str, *, in_parts: bool) -> Prepared:
    """Return *content* of a message with *text* behind it."""
    if in_parts:
        return [*(content or ()), text_part(text)]
    if content:
        return f"{content}\n{text}"
    return text
