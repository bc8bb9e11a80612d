"""
Conversations in the order of turns that a chat template takes.

Many templates refuse, or silently drop, what clients send: two messages of the user in a row, a user's message after a
tool's result, a call that was never run, several calls in one turn, an answer without text, a system message. Such
turns are merged, split, or get a neutral turn between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from triton_openai.prompts.parts import Prepared, joined, text_part
from triton_openai.prompts.results import calls_as_text, orphans_as_text
from triton_openai.prompts.system_messages import SYSTEM_ROLES

#: The text of a turn that only fills a gap.
NEUTRAL = "..."
#: The result of a call that the client never answered.
NOT_RUN = "The call was not run."


class TurnRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a template does not take, and what it gets in its place."""

    #: System messages become the beginning of the user's first message.
    system_in_user: bool = False
    #: The first message has to be the user's.
    user_first: bool = False
    #: There has to be a message of the user.
    needs_user: bool = False
    merges_users: bool = False
    merges_assistants: bool = False
    #: An assistant has to say something.
    fills_assistants: bool = False
    #: There is a neutral answer between a tool's result and a message of the user.
    answers_results: bool = False
    #: A call that has no result gets one.
    adds_results: bool = False
    #: There is a neutral answer after a call that has no result.
    answers_calls: bool = False
    #: An assistant's turn has one call only.
    splits_calls: bool = False
    #: Calls and their results become text.
    calls_as_text: bool = False
    #: A result without a call before it becomes the user's.
    orphans_as_text: bool = False


#: A template that takes every order of turns.
ANY_ORDER = TurnRules()


def fit_turns(messages: Sequence[dict[str, Any]], rules: TurnRules, *, in_parts: bool = False) -> list[dict[str, Any]]:
    """
    Return prepared *messages* in the order that *rules* allow.

    *in_parts* is whether content has to be a list of parts.
    """
    fitted = list(messages)
    if rules.calls_as_text:
        fitted = calls_as_text(fitted, in_parts=in_parts)
    elif rules.orphans_as_text:
        fitted = orphans_as_text(fitted, in_parts=in_parts)
    if rules.system_in_user:
        fitted = _with_system_in_user(fitted)
    if rules.splits_calls:
        fitted = _with_single_calls(fitted)
    return _Order(rules, in_parts=in_parts).fitted(fitted)


def _with_system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *messages* with the content of the leading system messages in the first message of the user."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] in SYSTEM_ROLES:
        leading += 1
    if not leading:
        return messages
    contents = [message["content"] for message in messages[:leading]]
    others = messages[leading:]
    if others and others[0]["role"] == "user":
        return [{**others[0], "content": joined([*contents, others[0]["content"]])}, *others[1:]]
    return [{"role": "user", "content": joined(contents)}, *others]


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *messages* with each of an assistant's calls in a turn of its own, followed by its result."""
    split: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results: list[dict[str, Any]] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        own = _ResultsOfCalls(results)
        for number, call in enumerate(calls):
            turn = {**message, "tool_calls": [call]}
            if number:
                # What the assistant said stands before its first call.
                turn = {"role": "assistant", "content": _empty_like(message["content"]), "tool_calls": [call]}
            split.append(turn)
            split += own.take(call)
        split += own.rest()
    return split


class _ResultsOfCalls:
    """The results of one turn's calls: by their ids, or, without ids, in the calls' order."""

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        self._results = dict(enumerate(results))
        # The numbers of the results by id, the first one last
        self._numbers: dict[Any, list[int]] = {}
        for number in reversed(self._results):
            self._numbers.setdefault(results[number].get("tool_call_id"), []).append(number)

    def take(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Remove the result of *call*, and return it, if there is one."""
        for call_id in (call.get("id"), None):
            numbers = self._numbers.get(call_id)
            if numbers:
                return [self._results.pop(numbers.pop())]
        return []

    def rest(self) -> Iterable[dict[str, Any]]:
        """Return the results that belong to none of the calls."""
        return self._results.values()


def _empty_like(content: Any) -> Any:
    """Return content without text, in the form of *content*."""
    if isinstance(content, list):
        return [text_part("")]
    if content is None:
        return None
    return ""


class _Order:
    """Puts messages into the order that some rules allow."""

    def __init__(self, rules: TurnRules, *, in_parts: bool) -> None:
        self._rules = rules
        self._in_parts = in_parts
        self._fitted: list[dict[str, Any]] = []
        # All contents of each message: joined at the end, because joining pair by pair copies the first ones each time
        self._contents: list[list[Prepared]] = []
        # The calls of the last turn that have no result yet, by id
        self._unanswered: dict[Any, dict[str, Any]] = {}

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return *messages* in order."""
        lacks_user = self._rules.needs_user and not any(message["role"] == "user" for message in messages)
        for message in messages:
            if lacks_user and message["role"] not in SYSTEM_ROLES:
                self._append({"role": "user", "content": self._text(NEUTRAL)})
                lacks_user = False
            self._before(message)
            if self._merges(message):
                self._contents[-1].append(message["content"])
            else:
                self._append(message)
        self._close_calls()
        if lacks_user:
            self._append({"role": "user", "content": self._text(NEUTRAL)})
        for message, contents in zip(self._fitted, self._contents, strict=True):
            if len(contents) > 1:
                message["content"] = joined(contents)
        return self._fitted

    def _text(self, text: str) -> Prepared:
        if self._in_parts:
            return [text_part(text)]
        return text

    @property
    def _last_role(self) -> str | None:
        """The role of the last message but system messages."""
        if self._fitted and self._fitted[-1]["role"] not in SYSTEM_ROLES:
            role: str = self._fitted[-1]["role"]
            return role
        return None

    def _before(self, message: dict[str, Any]) -> None:
        """Add what has to stand before *message*."""
        role = message["role"]
        if role == "tool":
            self._unanswered.pop(message.get("tool_call_id"), None)
            return
        if role in SYSTEM_ROLES:
            return
        self._close_calls()
        if role == "user" and self._rules.answers_results and self._last_role == "tool":
            self._append({"role": "assistant", "content": self._text(NEUTRAL)})
        if role != "user" and self._rules.user_first and self._last_role is None:
            self._append({"role": "user", "content": self._text(NEUTRAL)})

    def _close_calls(self) -> None:
        """Add what has to follow calls without results."""
        unanswered = self._unanswered
        self._unanswered = {}
        if not unanswered:
            return
        if self._rules.adds_results:
            for call_id, call in unanswered.items():
                result = {"role": "tool", "content": self._text(NOT_RUN), "name": call["function"]["name"]}
                if call_id is not None:
                    result["tool_call_id"] = call_id
                self._append(result)
        if self._rules.answers_calls:
            self._append({"role": "assistant", "content": self._text(NEUTRAL)})

    def _merges(self, message: dict[str, Any]) -> bool:
        """Return whether *message* becomes a part of the last one."""
        if message["role"] != self._last_role:
            return False
        if message["role"] == "user":
            return self._rules.merges_users
        if message["role"] != "assistant" or not self._rules.merges_assistants:
            return False
        return set(message) == set(self._fitted[-1]) == {"role", "content"}

    def _append(self, message: dict[str, Any]) -> None:
        message = dict(message)
        if message["role"] == "assistant":
            calls = message.get("tool_calls", ())
            self._unanswered = {call.get("id"): call for call in calls}
            if not calls and self._rules.fills_assistants and _is_empty(message["content"]):
                message["content"] = self._text(NEUTRAL)
        self._fitted.append(message)
        self._contents.append([message["content"]])


def _is_empty(content: Any) -> bool:
    if isinstance(content, list):
        return all(part.get("type") == "text" and not part["text"].strip() for part in content)
    return content is None or not content.strip()
