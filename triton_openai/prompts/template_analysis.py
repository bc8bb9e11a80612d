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
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias

import msgspec
from jinja2 import nodes


class ContentFormat(Enum):
    """In which forms a template takes a message's content."""

    STRING = "string"
    #: It loops over the content, and would loop over a string's characters.
    PARTS = "parts"
    #: It loops over the content, and also tests whether it is a string.
    EITHER = "either"


class Analysis(msgspec.Struct, frozen=True):
    """What a template's syntax tree tells."""

    content_format: ContentFormat
    #: It tests ``content is none`` (DeepSeek's do, to find tool calls), so that a null must reach it as it is. A mere
    #: ``is not none`` does not count: an empty text passes it, and Qwen 3's template has it but fails on a null.
    tests_null_content: bool
    #: Every string that stands in an expression.
    constants: frozenset[str]


def analyse(tree: nodes.Template) -> Analysis:
    """Return what *tree* tells about the form of the messages. Never raises."""
    names = _Names(tree)
    loops = any(names.is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = [test for test in tree.find_all(nodes.Test) if names.is_content(test.node)]
    negated = [negation.node for negation in tree.find_all(nodes.Not)]
    if not loops:
        content_format = ContentFormat.STRING
    elif any(test.name == "string" for test in tests):
        content_format = ContentFormat.EITHER
    else:
        content_format = ContentFormat.PARTS
    return Analysis(
        content_format=content_format,
        tests_null_content=any(test.name == "none" and not any(test is other for other in negated) for test in tests),
        constants=frozenset(const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)),
    )


class _Names:
    """Which names of a template stand for the messages, for one message, for one message's content."""

    def __init__(self, tree: nodes.Template) -> None:
        self._all = {"messages"}
        self._one: set[str] = set()
        self._content: set[str] = set()
        self._lists: set[str] = set()
        self._follow(tree)

    def is_content(self, node: nodes.Node | None) -> bool:
        """Say whether *node* is a message's ``content``, maybe filtered or chosen by a condition."""
        if isinstance(node, nodes.Name):
            return node.name in self._content
        if isinstance(node, nodes.Filter):
            # `content | length` is a number, but nobody loops over it or asks whether it is a string.
            return self.is_content(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.is_content(node.expr1) or self.is_content(node.expr2)
        if isinstance(node, nodes.Or | nodes.And):
            return self.is_content(node.left) or self.is_content(node.right)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and self._is_one(node.node)
        if isinstance(node, nodes.Getitem):
            return _is_constant(node.arg, "content") and self._is_one(node.node)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            return bool(node.args) and _is_constant(node.args[0], "content") and self._is_one(node.node.node)
        return False

    def _is_all(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._all
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Slice) and self._is_all(node.node)
        if isinstance(node, nodes.Filter):
            return node.name not in {"first", "last"} and self._is_all(node.node)
        if isinstance(node, nodes.CondExpr):
            return self._is_all(node.expr1) or self._is_all(node.expr2)
        return False

    def _is_one(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._one
        if isinstance(node, nodes.Getitem):
            return not isinstance(node.arg, nodes.Slice) and self._is_all(node.node)
        if isinstance(node, nodes.Filter):
            return node.name in {"first", "last"} and self._is_all(node.node)
        return False

    def _follow(self, tree: nodes.Template) -> None:
        """Add names until a whole pass adds none: an alias may be used above the line that makes it, in a loop."""
        bindings = _bindings(tree)
        # Mistral's name for tool calls, which may come as content too: a loop over it is no loop over parts.
        self._lists = {name for name, value, _ in bindings if _is_field(value, "tool_calls")}
        before = -1
        while before != self._known():
            before = self._known()
            for name, value, iterated in bindings:
                if iterated:
                    if self._is_all(value):
                        self._one.add(name)
                elif self._is_all(value):
                    self._all.add(name)
                elif self._is_one(value):
                    self._one.add(name)
                elif self.is_content(value) and name not in self._lists:
                    self._content.add(name)

    def _known(self) -> int:
        return len(self._all) + len(self._one) + len(self._content)


def _bindings(tree: nodes.Template) -> list[tuple[str, nodes.Node, bool]]:
    """Return every name that a ``set``, ``for`` or macro call binds, with its value; True where it is iterated."""
    found: list[tuple[str, nodes.Node, bool]] = [
        (assign.target.name, assign.node, False)
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name)
    ]
    found.extend(
        (loop.target.name, loop.iter, True) for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)
    )
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        parameters = [parameter.name for parameter in macro.args]
        found.extend((name, value, False) for name, value in zip(parameters, call.args, strict=False))
        found.extend((keyword.key, keyword.value, False) for keyword in call.kwargs)
    return found


def _is_field(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and _is_constant(node.arg, name)


def _is_constant(node: nodes.Node | None, value: str) -> bool:
    return isinstance(node, nodes.Const) and node.value == value


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
    # In their order; a dictionary, because a conversation may have thousands of calls.
    open_calls: dict[tuple[str, str], None] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            old = call.get("id")
            new = _fitting(old, name, count, form)
            count += 1
            call["id"] = new
            open_calls[new, name] = None
            if old is not None:
                given[old] = (new, name)
        if message["role"] == "tool":
            _fit_answer(message, form, given, open_calls)


def _fit_answer(
    message: dict[str, Any],
    form: ToolForm,
    given: Mapping[str, tuple[str, str]],
    open_calls: dict[tuple[str, str], None],
) -> None:
    old = message.get("tool_call_id")
    found = given.get(old) if old is not None else _first(open_calls, message.get("name"))
    if found is not None:
        open_calls.pop(found, None)
        message["tool_call_id"] = found[0]
        if form.needs_names:
            message.setdefault("name", found[1])
    elif old is not None and form.ids == "short":
        message["tool_call_id"] = _short(old)


def _first(open_calls: Iterable[tuple[str, str]], name: str | None) -> tuple[str, str] | None:
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
