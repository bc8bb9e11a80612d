"""
Reads a chat template's syntax tree to learn in which form it wants its messages.

Templates say nothing about themselves: some expect ``message["content"]`` to be a string, some loop over its parts,
some test and take both. vLLM decides the same way (its "string" and "openai" content formats, found by looking for a
loop over a message's content); here the tests ``is string`` and ``is none`` count as well. Names are followed through
``set``, ``for`` and macro arguments, without regard to scopes: a template that reuses a name for something else is at
worst given parts that it can read anyway.
"""

from __future__ import annotations

from enum import Enum

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
