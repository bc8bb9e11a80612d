"""
How a chat template wants tool calls written, found out by trying it.

Published templates differ where they say nothing: some walk through a call's arguments as an object, some print them
as text; some show calls only where the content is null, some fail on a null; Mistral's refuse ids that are not nine
letters and digits, Kimi K2's show nothing of a call but its id. A template is a program, so a small conversation that
is rendered says more than its source does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

#: Renders messages; ``None`` where the template refuses them or fails.
Attempt: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str | None]

_NAME, _KEY, _VALUE = "probed_function", "probed_key", "probed_value"
_SHORT_ID = "Ab3dE6gH9"
_LONG_ID = "call_0123456789abcdef01234567"
_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = re.compile(r"functions\..+:[0-9]+")


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a template wants of messages with tool calls.

    ``ids``: ``any`` as they are; ``short`` nine letters and digits; ``named`` as ``functions.<name>:<count>``, the only
    place where the function's name is shown.
    """

    text_arguments: bool = False
    null_content: bool = False
    ids: Literal["any", "short", "named"] = "any"
    needs_names: bool = False
    #: The field in which the thinking before a call is read, and whether content beside it is refused (gpt-oss has it
    #: in ``thinking``, and takes either).
    reasoning: str = "reasoning_content"
    reasoning_alone: bool = False


def probe(attempt: Attempt, *, null_first: bool, empty: Any) -> ToolForm:
    """
    Return the form in which *attempt* renders tool calls whole.

    *null_first* is whether a null content is tried before *empty*. Where no form is right, what is customary is
    returned: objects, and the content that was to be tried first. Never raises.
    """
    contents = (None, empty) if null_first else (empty, None)
    for text_arguments in (False, True):
        for content in contents:
            for needs_names in (False, True):
                form = ToolForm(text_arguments=text_arguments, null_content=content is None, needs_names=needs_names)
                rendered = attempt(_conversation(form, content, _SHORT_ID))
                if rendered is not None and _is_whole(rendered):
                    return _with_reasoning(attempt, form, content)
    return ToolForm(null_content=null_first)


def _with_reasoning(attempt: Attempt, form: ToolForm, content: Any) -> ToolForm:
    """Return *form* with what is left to find out."""
    form = msgspec.structs.replace(form, ids=_ids(attempt, form, content))
    for field in ("reasoning_content", "thinking", "reasoning"):
        user, call, answer = _conversation(form, content, _SHORT_ID)
        if _VALUE * 2 in (attempt([user, {**call, field: _VALUE * 2}, answer]) or ""):
            both = {**call, field: "Probed.", "content": "Probed."}
            alone = attempt([user, both, answer]) is None
            return msgspec.structs.replace(form, reasoning=field, reasoning_alone=alone)
    return form


def _ids(attempt: Attempt, form: ToolForm, content: Any) -> Literal["any", "short", "named"]:
    if attempt(_conversation(form, content, _LONG_ID)) is None:
        return "short"
    call_alone = attempt(_conversation(form, content, _LONG_ID)[:2])
    shows_id_only = call_alone is not None and _LONG_ID in call_alone and _NAME not in call_alone
    return "named" if shows_id_only else "any"


def _conversation(form: ToolForm, content: Any, call_id: str) -> list[dict[str, Any]]:
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if form.text_arguments else {_KEY: _VALUE}
    call = {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": arguments}}
    answer = {"role": "tool", "content": "Probed.", "tool_call_id": call_id}
    return [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {**answer, "name": _NAME} if form.needs_names else answer,
    ]


def _is_whole(rendered: str) -> bool:
    """Say whether the call's argument is there, and neither in Python's spelling nor as JSON within JSON."""
    return _VALUE in rendered and f"'{_KEY}'" not in rendered and f'\\"{_KEY}' not in rendered


def fit_ids(messages: Sequence[dict[str, Any]], form: ToolForm) -> None:
    """
    Change the ids in prepared *messages* (and names of tool messages) to what *form* asks for, in place.

    The same id becomes the same id everywhere. A tool message without an id answers the first call that has no answer
    yet, of its name if it has one.
    """
    if form.ids == "any" and not form.needs_names:
        return
    given: dict[str, tuple[str, str]] = {}
    open_calls: list[tuple[str, str]] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            old = call.get("id")
            new = _fitting(old, name, count, form)
            count += 1
            call["id"] = new
            open_calls.append((new, name))
            if old is not None:
                given[old] = (new, name)
        if message["role"] == "tool":
            _fit_answer(message, form, given, open_calls)


def _fit_answer(
    message: dict[str, Any],
    form: ToolForm,
    given: Mapping[str, tuple[str, str]],
    open_calls: list[tuple[str, str]],
) -> None:
    old = message.get("tool_call_id")
    found = given.get(old) if old is not None else _first(open_calls, message.get("name"))
    if found is not None:
        if found in open_calls:
            open_calls.remove(found)
        message["tool_call_id"] = found[0]
        if form.needs_names:
            message.setdefault("name", found[1])
    elif old is not None and form.ids == "short":
        message["tool_call_id"] = _short(old)


def _first(open_calls: Sequence[tuple[str, str]], name: str | None) -> tuple[str, str] | None:
    named = (call for call in open_calls if name is None or call[1] == name)
    return next(named, None)


def _fitting(old: str | None, name: str, count: int, form: ToolForm) -> str:
    if form.ids == "named":
        return old if old is not None and _NAMED.fullmatch(old) else f"functions.{name}:{count}"
    if form.ids == "short":
        return _short(old if old is not None else f"{name}:{count}")
    return old if old is not None else f"call_{count}"


def _short(text: str) -> str:
    return text if _SHORT.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
