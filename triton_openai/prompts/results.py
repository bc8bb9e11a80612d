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
    Return prepared *messages* with each result directly behind its call, and with the id of its call.

    System messages between a call and its results follow the results.
    """
    placed: list[dict[str, Any]] = []
    # How many calls of the last turn have no result, their ids if all have one, and the system messages since then.
    waiting = 0
    unanswered: list[str] = []
    late: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role == "tool":
            placed.append(_with_id(message, unanswered))
            waiting -= 1
            continue
        if role in SYSTEM_ROLES and waiting > 0:
            late.append(message)
            continue
        placed += late
        late = []
        calls = message.get("tool_calls", ())
        waiting = len(calls)
        unanswered = [call["id"] for call in calls if "id" in call]
        if len(unanswered) < waiting:
            unanswered = []
        placed.append(message)
    return [*placed, *late]


def _with_id(result: dict[str, Any], unanswered: list[str]) -> dict[str, Any]:
    """Return *result* with the id of its call, which is removed from those that are *unanswered*."""
    if "tool_call_id" not in result and unanswered:
        result = {**result, "tool_call_id": unanswered[0]}
    if result.get("tool_call_id") in unanswered:
        unanswered.remove(result["tool_call_id"])
    return result


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
