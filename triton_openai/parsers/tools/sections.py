# ruff: noqa: RUF001, RUF002 - the markers of DeepSeek and StepFun are made of full-width bars
"""Calls in a section, each after a marker of its own: with JSON objects as arguments, or with a tag for each."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from triton_openai.parsers.reader import SPACE, Malformed, Markers, Step, discard, markers
from triton_openai.parsers.tools import names, tolerant
from triton_openai.parsers.tools.tagged_calls import TaggedCalls
from triton_openai.parsers.tools.tool_parser import MarkedCalls

_ATTRIBUTE_NAME = re.compile(r"[a-z]*")
_ATTRIBUTE = re.compile(r'[^"<>\n]*')
_LONGEST = 1_000


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
            name = names.resolved(call_id, self.tools) or name
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


class Invokes(SectionCalls, TaggedCalls):
    """``<invoke name="f">`` with ``<parameter name="k">`` in it; between tags stands white space."""

    #: What closes a call.
    call_end: ClassVar[str]
    #: Opening tag (without attributes) and closing tag.
    parameter: ClassVar[tuple[str, str]]
    #: Whether one line break on either side of a value is markup.
    trims_lines: ClassVar[bool] = False

    def _call(self) -> Step[None]:
        attributes = yield from self._attributes()
        self._open(attributes.get("name", ""))
        ends = (self.parameter[0], self.call_end)
        doubts = [text for tag in (self.call_end, *self.closings) for text in (f"\n{tag}", tag)]
        value_ends = markers(*((f"\n{self.parameter[1]}",) if self.trims_lines else ()), self.parameter[1])
        while (yield from self._reader.token(*ends)) == self.parameter[0]:
            attributes = yield from self._attributes()
            if not attributes.get("name"):
                raise Malformed
            self._begin_parameter(attributes["name"])
            if self.trims_lines:
                yield from self._reader.optional("\n")
            yield from self._value(attributes["name"], value_ends, doubts, is_text=attributes.get("string") == "true")
        self._finish()

    def _attributes(self) -> Step[dict[str, str]]:
        """Read ``a="b"`` as often as it stands there, and ``>``."""
        reader = self._reader
        attributes: dict[str, str] = {}
        while True:
            yield from reader.run(SPACE, discard)
            if (yield from reader.next()) == ">":
                reader.take()
                return attributes
            name = yield from reader.collect(_ATTRIBUTE_NAME, 32)
            yield from reader.literal('="')
            attributes[name] = yield from reader.collect(_ATTRIBUTE, _LONGEST)
            yield from reader.literal('"')


class MiniMaxM2(Invokes):
    """
    As MiniMax's chat template for M2 asks for calls::

        <minimax:tool_call>
        <invoke name="f">
        <parameter name="k">value</parameter>
        </invoke>
        </minimax:tool_call>

    Parameters carry no type: the tool's schema has it.
    """

    call = "<invoke"
    markers = Markers("<minimax:tool_call>", call)
    closings = ("</minimax:tool_call>",)
    call_end = "</invoke>"
    parameter = ("<parameter", "</parameter>")
    # The template puts values between the tags as they are; the model at times on lines of their own.
    trims_lines = True


class DeepSeekV32(Invokes):
    """
    As DeepSeek's encoding of V3.2 ("DSML") writes calls: ``string`` says whether a value is a string or JSON::

        <｜DSML｜function_calls>
        <｜DSML｜invoke name="f">
        <｜DSML｜parameter name="k" string="true">value</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜function_calls>

    V4 calls the outer tag ``tool_calls``.
    """

    special_tokens = True
    call = "<｜DSML｜invoke"
    markers = Markers("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", call)
    closings = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    call_end = "</｜DSML｜invoke>"
    parameter = ("<｜DSML｜parameter", "</｜DSML｜parameter>")


class Step3(Invokes):
    """
    As StepFun's Step 3 writes calls::

        <｜tool_calls_begin｜>
        <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
        <steptml:parameter name="k">value</steptml:parameter>
        </steptml:invoke><｜tool_call_end｜>
        <｜tool_calls_end｜>

    Parameters carry no type: the tool's schema has it.
    """

    special_tokens = True
    call = "<｜tool_call_begin｜>"
    markers = Markers("<｜tool_calls_begin｜>", call)
    call_end = "</steptml:invoke>"
    closings = ("<｜tool_calls_end｜>",)
    parameter = ("<steptml:parameter", "</steptml:parameter>")

    def _call(self) -> Step[None]:
        yield from self._reader.token("function<｜tool_sep｜>")
        yield from self._reader.token("<steptml:invoke")
        yield from super()._call()
        yield from self._close("<｜tool_call_end｜>")
