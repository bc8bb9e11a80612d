"""Calls written as tags, of which the arguments' JSON is built while they come: the families that do so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from triton_openai.parsers.reader import Ended, Malformed, Markers, Sink, Step, markers
from triton_openai.parsers.tools.json_text import dump, escape
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tool_parser import MarkedCalls

#: A parameter's name is held back until its end.
_MAX_KEY = 1_000

_KEY = re.compile(r"[^<]*")
_QWEN_KEY = re.compile(r"[^<>\n]*")
#: The template puts each value on lines of its own. The model at times forgets to close a parameter: a tag that begins
#: a line then ends it.
_QWEN_VALUE_ENDS = Markers("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


class TaggedCalls(MarkedCalls):
    """
    A call is a name and parameters of name and text.

    The text of a parameter that the tool's schema calls a string streams; any other's is read to its end first, since
    what it becomes depends on the whole of it.
    """

    def _open(self, name: str) -> None:
        """Begin the call of *name*."""
        self._start_call(name)
        self._parameters = Parameters(self.tools.get(self._called))
        self._separator = "{"
        self._keys: set[str] = set()

    def _finish(self) -> None:
        """End the call."""
        self._output.arguments_to_confirm("}" if self._separator == ", " else "{}")
        self._end_call()

    def _key(self, characters: re.Pattern[str]) -> Step[str]:
        """Read a parameter's name, made of *characters*."""
        key = (yield from self._reader.collect(characters, _MAX_KEY)).strip()
        yield from self._reader.next()
        if not key:
            raise Malformed
        return key

    def _begin_parameter(self, key: str) -> None:
        """Note that the tag of the parameter *key* was read: it confirms what came before it."""
        if key in self._keys:
            raise Malformed
        self._keys.add(key)
        self._output.confirm()

    def _value(self, key: str, ends: Markers, doubts: Sequence[str], *, is_text: bool = False) -> Step[str]:
        """
        Read a parameter's value up to the first of *ends*, and return that.

        *is_text* says that the value is a string, where the schema has one; otherwise the schema says it. One of
        *doubts* in it shows that its end tag is missing, or that it is a text about calls. Raises :class:`Malformed`
        for that.
        """
        prefix = f"{self._separator}{dump(key)}: "
        output = self._output
        self._separator = ", "
        if self._called in self.tools:
            ends = markers(*ends.texts, *doubts)
        types = self._parameters.types(key)
        if (is_text and (not types or "string" in types)) or self._parameters.is_text(key):
            output.arguments(prefix + '"')
            end = yield from self._marker(ends, lambda piece: output.arguments(escape(piece)))
            output.arguments_to_confirm('"')
        else:
            parts: list[str] = []
            end = yield from self._marker(ends, parts.append)
            output.arguments_to_confirm(prefix + self._parameters.value(key, "".join(parts)))
        if end in doubts and self._called in self.tools:
            raise Malformed
        return end

    def _marker(self, ends: Markers, sink: Sink) -> Step[str]:
        """Give the text up to the first of *ends* to *sink*; return it. Raises :class:`Ended`."""
        end = yield from self._reader.until(ends, sink, drops_begun=True)
        if not end:
            raise Ended
        return end


class KeyTags(TaggedCalls):
    """
    A name, then keys and values in tags of their own::

        <tool_call>f
        <arg_key>k</arg_key>
        <arg_value>value</arg_value>
        </tool_call>

    Strings stand as they are, all else as JSON.
    """

    bare_names = True
    #: What opens a call, and what closes it.
    call: ClassVar[str]
    call_end: ClassVar[str]
    #: The tags around a key, and those around a value.
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    #: What may follow the name.
    name_end: ClassVar[str] = ""
    #: What in a value shows that its end tag is missing.
    doubts: ClassVar[Sequence[str]]

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        if marker != self.call:
            yield from reader.token(self.call)
        yield from reader.space()
        name = yield from self._name()
        parts = (self.key[0], self.call_end)
        if self.name_end:
            part = yield from reader.token(self.name_end, *parts)
        else:
            part = yield from reader.token(*parts)
        self._open(name)
        if part == self.name_end:
            part = yield from reader.token(*parts)
        while part == self.key[0]:
            key = yield from self._key(_KEY)
            yield from reader.literal(self.key[1])
            yield from reader.token(self.value[0])
            self._begin_parameter(key)
            yield from self._value(key, markers(self.value[1]), self.doubts)
            part = yield from reader.token(*parts)
        self._finish()


class FunctionTags(TaggedCalls):
    """
    Functions and parameters in tags, between two markers::

        <tool_call>
        <function=f>
        <parameter=k>
        value
        </parameter>
        </function>
        </tool_call>

    Parameters carry no type: the tool's schema has it. Models at times leave out the first marker, so ``<function=``
    opens a call too.
    """

    #: The markers around one call or several.
    opening: ClassVar[str]
    closing: ClassVar[str]
    #: What in a value shows that its end tag is missing.
    doubts: ClassVar[Sequence[str]]

    def _block(self, marker: str) -> Step[None]:
        if marker == self.opening:
            yield from self._reader.token("<function=")
        end = yield from self._function()
        while end != self.closing:
            end = yield from self._reader.token(self.closing, "<function=")
            if end == "<function=":
                self._before_call(end)
                end = yield from self._function()
            else:
                self._end_call()

    def _function(self) -> Step[str]:
        """Read a function after ``<function=``; return the tag that ended it."""
        name = yield from self._name()
        yield from self._reader.literal(">")
        self._open(name)
        part = yield from self._next_part()
        while part == "<parameter=":
            part = yield from self._parameter()
        self._finish()
        return part

    def _parameter(self) -> Step[str]:
        """Read a parameter after ``<parameter=``; return the next part of the function."""
        key = yield from self._key(_QWEN_KEY)
        yield from self._reader.literal(">")
        self._begin_parameter(key)
        yield from self._reader.optional("\n")
        # The model at times closes another tag.
        doubts = (*self.doubts, "\n</parameter=", "</parameter=", "\n</function=", f"\n</{key}>")
        end = yield from self._value(key, _QWEN_VALUE_ENDS, doubts)
        if end.endswith("</parameter>"):
            return (yield from self._next_part())
        return end.lstrip()

    def _next_part(self) -> Step[str]:
        return (yield from self._reader.token("<parameter=", "</function>", self.closing))
