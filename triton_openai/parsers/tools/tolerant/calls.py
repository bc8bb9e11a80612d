# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Calls with slips: the name of a tool and its arguments, in any notation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.parsers.tools import names
from triton_openai.parsers.tools.tags import MAX_HEADER, RECIPIENT
from triton_openai.parsers.tools.tolerant.context import Context, ContextReader
from triton_openai.parsers.tools.tolerant.keys import NAME
from triton_openai.parsers.tools.tolerant.request_tools import ARGUMENT_KEYS, CALL_KEYS, NO_PARAMETERS, WRAPPERS
from triton_openai.parsers.tools.tolerant.scanner import CALL_TAG, FENCE, OPENING, Unreadable
from triton_openai.parsers.tools.tolerant.state import MAX_DEPTH
from triton_openai.parsers.tools.tolerant.tagged import TagReader
from triton_openai.parsers.tools.tolerant.values import ValueReader

_MESSAGE = "<|message|>"
#: What stands between the name of a call and its arguments.
_BEFORE_ARGUMENTS = re.compile(
    r"(?:\s++|\[CALL_ID\]\w{0,64}|\[ARGS\]|<\|tool_call_argument_begin\|>|<｜tool▁sep｜>|<tool_sep(?::\w{1,32})?>|```(?:json)?|<\|channel\|>\w{0,64}+"
    r"|<\|constrain\|>\w{0,64}+|<\|message\|>|:(?=\s{0,64}+\{))*+"
)
#: The name of a call in a tag of its own, and the tag that opens its arguments.
_NAME_IN_TAGS = re.compile(
    r"<(name|tool_name|function_name)>\s{0,64}+([^\s<>]{1,256}+)\s{0,64}+</\1>(?:\s{0,64}+<(?:arguments|parameters)>)?"
)
#: A tag with the name of a tool, or of something else.
_NAME_TAG = re.compile(r"<([\w.:-]{1,256}+)\s{0,64}+>")
_CALL_ID = re.compile(r"\[CALL_ID\](\w+)")
_IDS = frozenset({"type", "id", "tool_call_id"})


class Call(msgspec.Struct, frozen=True):
    """A call that was read."""

    #: The name of the tool, and what the model wrote for it.
    name: str
    written: str
    arguments: Mapping[str, Any]
    #: The kinds of its repairs.
    repairs: frozenset[str]
    #: The id that the model wrote in a place of its own.
    id: str | None = None


class Calls(msgspec.Struct, frozen=True):
    """The calls that were read, and where the text after them begins."""

    calls: Sequence[Call]
    end: int


class CallReader(ContextReader):
    """Reads calls."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._values = ValueReader(context)
        self._tags = TagReader(context, self._values)

    def calls(self, start: int) -> Calls:
        """Read calls from *start* up to what is no call. Raises :class:`Unreadable` if there are none."""
        scanner = self._scanner
        calls: list[Call] = []
        at = self._after_openings(start)
        end = at
        while True:
            try:
                more, at = self._calls_at(at)
            except Unreadable:
                if not calls or self._options.bare:
                    raise
                break
            calls += more
            at, is_closed = self._after_call(at)
            end = at
            if is_closed:
                # The format's own grammar reads what follows.
                break
            while not scanner.is_over(at) and scanner.text[at] in ",;":
                at = scanner.after_space(at + 1)
            if scanner.is_over(at):
                end = at
                break
            at = self._after_openings(at)
            if at == end and scanner.text[at] not in "{<":
                break
        if self._options.bare and not scanner.is_over(scanner.after_closings(end)):
            raise Unreadable
        return Calls(calls, end)

    def arguments_of(self, name: str) -> Calls:
        """Read the whole text as the arguments of the tool *name*."""
        scanner = self._scanner
        at = scanner.after_space(0)
        if scanner.is_over(at) or scanner.text[at] != "{":
            raise Unreadable
        arguments, end = self._arguments(name, at)
        end = scanner.after_closings(end)
        if not scanner.is_over(end):
            raise Unreadable
        return Calls([self._made(name, name, arguments)], end)

    def _after_openings(self, at: int) -> int:
        """Return the position after opening tags and brackets."""
        scanner = self._scanner
        while True:
            at = scanner.after_space(at)
            match = OPENING.match(scanner.text, at)
            if match is not None:
                at = match.end()
            elif scanner.text.startswith("[", at):
                at += 1
            else:
                return at

    def _after_call(self, at: int) -> tuple[int, bool]:
        """Return the position after what closes a call and the lists around it, and whether that is a closing tag."""
        scanner = self._scanner
        while True:
            at = scanner.after_space(at)
            closing = scanner.closing(at)
            if closing is not None and closing[0] != FENCE:
                return closing.end(), True
            if closing is not None:
                at = closing.end()
                continue
            end = at
            while scanner.at_bracket(end) and end < at + MAX_DEPTH:
                end = scanner.after_space(end + 1)
            if end == at:
                return at, False
            if "]" not in scanner.text[at:end] and not scanner.is_over(end) and not scanner.closes(end):
                # A bracket of the text
                return at, False
            at = end

    def _calls_at(self, at: int) -> tuple[Sequence[Call], int]:
        """Return the call at *at*, or the calls in the object or the string there, and the position after them."""
        text = self._scanner.text
        self._state.begin_call()
        if self._scanner.is_over(at):
            raise Unreadable
        if text[at] == "{" or (text[at] == "(" and not self._options.bare):
            return self._object_calls(at)
        if text[at] == '"' and not self._options.bare:
            return self._quoted_calls(at)
        call, at = self._call(at)
        return [call], at

    def _call(self, at: int) -> tuple[Call, int]:
        """Return the call whose name is at *at*, and the position after it."""
        text = self._scanner.text
        tag = CALL_TAG.match(text, at)
        if tag is not None:
            return self._named_call(tag[1], tag.end(), in_tag=True)
        tag = _NAME_IN_TAGS.match(text, at)
        if tag is not None:
            return self._named_call(tag[2], tag.end(), in_tag=True)
        tag = _NAME_TAG.match(text, at)
        if tag is not None and self._tools.has(tag[1]):
            call, end = self._named_call(tag[1], tag.end(), in_tag=True)
            return call, self._after_end_tag(end, tag[1])
        header = text.find(_MESSAGE, at, at + MAX_HEADER)
        recipient = None
        if header >= 0:
            recipient = RECIPIENT.search(text, at, header)
        if recipient is not None:
            return self._named_call(recipient[1], header + len(_MESSAGE))
        word = NAME.match(text, at)
        if word is None:
            raise Unreadable
        return self._named_call(word[1].rstrip(":") or word[1], word.end())

    def _after_end_tag(self, at: int, name: str) -> int:
        """Return the position after white space and the end tag of *name*; *at* if there is none."""
        end = self._scanner.after_space(at)
        tag = f"</{name}>"
        if self._scanner.text.startswith(tag, end):
            return end + len(tag)
        return at

    def _named_call(self, written: str, at: int, *, in_tag: bool = False) -> tuple[Call, int]:
        """Read the arguments of a call whose name is *written*."""
        scanner = self._scanner
        name = self._tools.resolve(written)
        if name is None and not names.is_opaque(written):
            raise Unreadable
        start = at
        between = _BEFORE_ARGUMENTS.match(scanner.text, at)
        if between is not None:
            start = between.end()
        scanner.require_lookahead(start)
        scanner.budget.take(start - at)
        if name != written:
            self._state.record_repair("name")
        if self._options.bare and scanner.text[start : start + 1] not in ("(", "{", "<"):
            raise Unreadable
        arguments, end = self._arguments(name, start)
        if name is None:
            known = self._tools.tool_for_arguments(arguments)
            if known is None:
                raise Unreadable
            name, arguments = known
        if in_tag:
            self._state.record_repair("tags")
        call_id = None
        match = _CALL_ID.search(scanner.text, at, start)
        if match is not None:
            call_id = match[1]
        return self._made(name, written, arguments, call_id), end

    def _object_calls(self, at: int) -> tuple[Sequence[Call], int]:
        """Read a call that is an object, perhaps with parentheses for its braces, or an object around calls."""
        if self._scanner.text[at] == "(":
            self._state.record_repair("brackets")
        members, end = self._values.call(at)
        wrapped = self._wrapped_calls(members)
        if wrapped is None:
            return [self._call_of(members)], end
        self._state.record_repair("notation")
        return [self._call_of(inner) for inner in wrapped], end

    def _wrapped_calls(self, members: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the objects of calls in an object that has nothing else; ``None`` if *members* are of another one."""
        if len(members) != 1:
            return None
        ((key, value),) = members.items()
        if key not in WRAPPERS or self._tools.resolve(key) is not None:
            return None
        if isinstance(value, dict):
            return [value]
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return value
        return None

    def _call_of(self, members: Mapping[str, Any]) -> Call:
        """Return the call that is an object with *members*: a name and arguments."""
        function = members.get("function")
        if isinstance(function, dict):
            members = function
        named = self._tools.named_in(members)
        if named is None:
            return self._call_with_name_as_key(members)
        key, name = named
        written = members[key]
        if name != written:
            self._state.record_repair("name")
        others = {other: value for other, value in members.items() if other != key}
        for argument_key in ARGUMENT_KEYS:
            if argument_key not in others or self._is_argument(others[argument_key], argument_key, name):
                continue
            if self._options.bare and not others.keys() <= CALL_KEYS:
                raise Unreadable
            return self._made(name, written, self._arguments_in(others[argument_key], name))
        return self._made(name, written, self._arguments_beside(others, name))

    def _is_argument(self, value: Any, key: str, name: str) -> bool:
        """Return whether *value* of *key* in a call's object is an argument of the tool *name*, not all of them."""
        return not isinstance(value, dict) and self._tools.parameters(name).has(key)

    def _quoted_calls(self, at: int) -> tuple[Sequence[Call], int]:
        """Read calls that are objects in a string."""
        value, end = self._values.value(at, NO_PARAMETERS, "")
        if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
            raise Unreadable
        inner = CallReader(self._context.inner(value))
        read = inner.calls(0)
        if value[read.end :].strip():
            raise Unreadable
        return [msgspec.structs.replace(call, repairs=call.repairs | {"notation"}) for call in read.calls], end

    def _call_with_name_as_key(self, members: Mapping[str, Any]) -> Call:
        """Return the call whose only member has the name of a tool as its key, and the arguments as its value."""
        if len(members) != 1 or self._options.bare:
            raise Unreadable
        ((written, value),) = members.items()
        name = self._tools.resolve(written)
        if name is None or not isinstance(value, dict):
            raise Unreadable
        self._state.record_repair("notation")
        return self._made(name, written, self._typed(value, name))

    def _arguments_beside(self, members: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return the arguments of *name*, which are *members* of the call's object beside its name."""
        arguments = {key: value for key, value in members.items() if key not in _IDS}
        if arguments:
            required = self._tools.parameters(name).required
            is_complete = bool(required) and required <= arguments.keys()
            if not self._tools.takes(name, arguments) and (self._options.bare or not is_complete):
                raise Unreadable
            self._state.record_repair("notation")
        elif self._options.bare or self._tools.parameters(name).required:
            raise Unreadable
        return arguments

    def _arguments_in(self, value: Any, name: str) -> Mapping[str, Any]:
        """Return the arguments of *name* from their *value* in the call's object."""
        if value is None:
            return {}
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            (value,) = value
            self._state.record_repair("notation")
        if isinstance(value, dict):
            return self._typed(value, name)
        if not isinstance(value, str):
            raise Unreadable
        text = value.strip()
        if not text:
            return {}
        (call,) = CallReader(self._context.inner(text)).arguments_of(name).calls
        self._state.repairs |= call.repairs
        return call.arguments

    def _typed(self, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return *arguments*, which were read without the schema of *name*, in the types of that schema."""
        parameters = self._tools.parameters(name)
        return {key: self._values.converted(parameters, key, value) for key, value in arguments.items()}

    def _arguments(self, name: str | None, at: int) -> tuple[Mapping[str, Any], int]:
        """Read arguments in any notation. Return them and the position after them."""
        scanner = self._scanner
        parameters = self._tools.parameters(name)
        if scanner.is_over(at) or scanner.closes(at):
            is_unfinished = scanner.is_over(at) and (self._options.cut or self._options.bare)
            if is_unfinished or parameters.required or name is None:
                raise Unreadable
            return {}, at
        if scanner.text[at] == "{":
            return self._values.object(at, parameters)
        if scanner.text[at] == '"' and name is not None:
            # The arguments are an object in a string.
            value, end = self._values.value(at, NO_PARAMETERS, "")
            return self._arguments_in(value, name), end
        if scanner.text[at] != "(":
            self._state.record_repair("tags")
            return self._tags.read(at, parameters)
        self._state.record_repair("brackets")
        inner = scanner.after_space(at + 1)
        if not scanner.text.startswith("{", inner):
            return self._values.object(at, parameters)
        arguments, end = self._values.object(inner, parameters)
        end = scanner.after_space(end)
        if scanner.text.startswith(")", end):
            return arguments, end + 1
        if not scanner.is_over(end) and not scanner.closes(end):
            raise Unreadable
        return arguments, end

    def _made(self, name: str, written: str, arguments: Mapping[str, Any], call_id: str | None = None) -> Call:
        """Return the call. Raises :class:`Unreadable` for a guess at arguments that the tool does not take."""
        parameters = self._tools.parameters(name)
        if self._state.is_guess and parameters.names:
            is_complete = parameters.required <= arguments.keys()
            if not is_complete or not all(map(parameters.has, arguments)):
                raise Unreadable
        return Call(name, written, arguments, frozenset(self._state.repairs or {"tags"}), call_id)
