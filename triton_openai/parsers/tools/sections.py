# ruff: noqa: RUF001, RUF002 - the markers of DeepSeek and StepFun are made of full-width bars
"""Calls in a section, each after a marker of its own: with JSON objects as arguments, or with a tag for each."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from triton_openai.parsers.reader import SPACE, Malformed, Markers, Step, discard, markers
from triton_openai.parsers.tools import names, tolerant
from triton_openai.parsers.tools.tagged_calls import TaggedCalls
from triton_openai.parsers.tools.tool_parser import MarkedCalls

_ATTRIBUTE_NAME = re.compile(r"[a-z]*")
_ATTRIBUTE = re.compile(r'[^"<>\n]*')
_TAG_NAME = re.compile(r"[^<>/\s]*")
_MAX_NAME = 1_000
#: The ends of parameters and calls that models write in place of those of a format like them.
_OTHER_ENDS = ("</parameter>", "</invoke>")


class SectionCalls(MarkedCalls):
    """A section of calls, each after a marker of its own; white space between them is markup."""

    #: What opens a call. Where it is one of the :attr:`markers`, a call may stand without a section.
    call: ClassVar[str]

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        if marker != self.call:
            yield from reader.token(self.call)
        yield from self._call()
        while (yield from reader.token(self.call, *self.closings)) == self.call:
            self._before_call(self.call)
            yield from self._call()
        self._end_call()

    @abstractmethod
    def _call(self) -> Step[None]:
        """Read a call after its opening marker."""


class KimiK2(SectionCalls):
    """
    Kimi K2, K2 Thinking and K2.5, as Moonshot's "Tool Call Guidance" for K2 tells it::

        <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
        <|tool_calls_section_end|>

    The id is the model's own, ``functions.<name>:<count>``: it must come back with the tool's answer, since the
    template shows the model the answer under that name.
    """

    special_tokens = True
    bare_names = True
    call = "<|tool_call_begin|>"
    # Both spellings of the section occur.
    markers = Markers("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", call)
    closings = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")

    def _id_of(self, call: tolerant.Call) -> str:
        return call.written

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        call_id = yield from self._name()
        yield from reader.token("<|tool_call_argument_begin|>")
        named, _, count = call_id.rpartition(":")
        name = (named if count.isdigit() else call_id).removeprefix("functions.")
        if name not in self.tools:
            name = names.resolve(call_id, self.tools) or name
        yield from self._json_call(name, call_id)
        yield from self._close("<|tool_call_end|>")


class DeepSeekV3(SectionCalls):
    """
    As the chat templates of DeepSeek V3 and R1 0528 write calls::

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
        ```json
        {…}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    and that of V3.1, ``f<｜tool▁sep｜>{…}`` between begin and end of a call. What follows the separator shows which.
    """

    special_tokens = True
    call = "<｜tool▁call▁begin｜>"
    markers = Markers("<｜tool▁calls▁begin｜>", call)
    closings = ("<｜tool▁calls▁end｜>",)

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        name = yield from self._name()
        yield from reader.token("<｜tool▁sep｜>")
        yield from reader.space()
        fenced = (yield from reader.next()) != "{"
        if fenced:
            name = yield from self._name()
            yield from reader.token("```json")
        yield from self._json_call(name)
        if fenced:
            yield from reader.token("```")
        yield from self._close("<｜tool▁call▁end｜>")


class NamedJson(SectionCalls):
    """A name, a separator, the arguments as a JSON object, and a closing marker."""

    call_end: ClassVar[str]
    separator: ClassVar[str]

    def _call(self) -> Step[None]:
        yield from self._reader.space()
        name = yield from self._name()
        yield from self._reader.token(self.separator)
        yield from self._json_call(name)
        yield from self._close(self.call_end)


class Invokes(SectionCalls, TaggedCalls):
    """
    Tags with attributes for calls and parameters, with white space between the tags::

        <invoke name="f">
        <parameter name="k">value</parameter>
        </invoke>
    """

    #: What closes a call.
    call_end: ClassVar[str]
    #: What follows the opening of a call before its attributes, and what follows its closing tag.
    call_head: ClassVar[Sequence[str]] = ()
    call_tail: ClassVar[str] = ""
    #: The opening tag, without attributes, and the closing tag of a parameter.
    parameter: ClassVar[tuple[str, str]]
    #: The end of an opening tag.
    tag_end: ClassVar[str] = ">"
    #: The attributes with the names of the call and of a parameter.
    name_attribute: ClassVar[str] = "name"
    key_attribute: ClassVar[str] = "name"
    #: The attribute that says that a value is a text, and its value.
    text_attribute: ClassVar[tuple[str, str]] = ("string", "true")
    #: Whether one line break on either side of a value is markup.
    trims_lines: ClassVar[bool] = False
    #: The tags of arguments that are one JSON object.
    json_block: ClassVar[tuple[str, str] | None] = None

    def _call(self) -> Step[None]:
        for text in self.call_head:
            yield from self._reader.token(text)
        attributes = yield from self._attributes()
        name = attributes.get(self.name_attribute, "")
        parts = [self.parameter[0], self.call_end]
        if self.json_block is not None:
            parts.append(self.json_block[0])
        part = yield from self._reader.token(*parts)
        if self.json_block is not None and part == self.json_block[0]:
            yield from self._json_arguments(name, self.json_block[1])
        else:
            self._open(name)
            while part == self.parameter[0]:
                yield from self._parameter()
                part = yield from self._reader.token(*parts[:2])
            self._finish()
        if self.call_tail:
            yield from self._close(self.call_tail)

    def _json_arguments(self, name: str, closing: str) -> Step[None]:
        """Read the arguments as a JSON object, and the end of the call."""
        yield from self._attributes()
        yield from self._json_call(name)
        yield from self._reader.token(closing)
        yield from self._close(self.call_end)

    def _parameter(self) -> Step[None]:
        """Read a parameter after the beginning of its opening tag."""
        attributes = yield from self._attributes()
        key = attributes.get(self.key_attribute)
        if not key:
            raise Malformed
        self._begin_parameter(key)
        closings = [self.parameter[1]]
        if self.trims_lines:
            closings.insert(0, f"\n{self.parameter[1]}")
            yield from self._reader.optional("\n")
        ends = dict.fromkeys((self.call_end, *self.closings, *_OTHER_ENDS))
        doubts = [text for tag in ends if tag != self.parameter[1] for text in (f"\n{tag}", tag)]
        is_text = attributes.get(self.text_attribute[0]) == self.text_attribute[1]
        yield from self._value(key, markers(*closings), doubts, is_text=is_text)

    def _attributes(self) -> Step[dict[str, str]]:
        """Read ``a="b"`` as often as it stands there, and the end of the tag."""
        reader = self._reader
        attributes: dict[str, str] = {}
        while True:
            yield from reader.run(SPACE, discard)
            if (yield from reader.next()) == self.tag_end[0]:
                yield from reader.literal(self.tag_end)
                return attributes
            name = yield from reader.collect(_ATTRIBUTE_NAME, 32)
            yield from reader.literal('="')
            attributes[name] = yield from reader.collect(_ATTRIBUTE, _MAX_NAME)
            yield from reader.literal('"')


class TagNames(SectionCalls, TaggedCalls):
    """
    Calls in tags with a name, whose parameters are tags of their own names::

        <invoke name="f">
        <k>value</k>
        </invoke>
    """

    call_end: ClassVar[str]
    #: The beginnings of a parameter's opening and closing tags.
    parameter: ClassVar[tuple[str, str]]

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.token('name="')
        name = yield from reader.collect(_ATTRIBUTE, _MAX_NAME)
        yield from reader.literal('">')
        self._open(name)
        while not (yield from self._ends()):
            key = yield from self._key(_TAG_NAME)
            yield from reader.literal(">")
            self._begin_parameter(key)
            doubts = [text for tag in (self.call_end, *self.closings) for text in (f"\n{tag}", tag)]
            yield from self._value(key, markers(f"{self.parameter[1]}{key}>"), doubts)
        self._finish()

    def _ends(self) -> Step[bool]:
        """Read up to the name of the next parameter, or past the end of the call. Return whether the call has ended."""
        opening = self.parameter[0]
        rest = self.call_end.removeprefix(opening)
        if rest == self.call_end:
            return (yield from self._reader.token(opening, self.call_end)) == self.call_end
        # The closing tag begins as an opening tag does.
        yield from self._reader.token(opening)
        if (yield from self._reader.next()) != rest[0]:
            return False
        yield from self._reader.literal(rest)
        return True
