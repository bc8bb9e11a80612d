# ruff: noqa: RUF001, RUF002 - DeepSeek's markers are made of full-width bars
"""Calls in a section, each between markers of its own, with JSON objects as arguments."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Step
from triton_openai.parsers.tools.base import MarkedCalls


class SectionCalls(MarkedCalls):
    """A section of calls, each after a marker of its own; white space between them is markup."""

    #: What opens a call. Where it is one of the :attr:`markers`, a call may stand without a section.
    call: ClassVar[str]
    #: What closes a section.
    closings: ClassVar[tuple[str, ...]]

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
    # Both spellings of the section occur.
    markers = Markers("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    call = "<|tool_call_begin|>"
    closings = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        call_id = yield from self._name()
        yield from reader.token("<|tool_call_argument_begin|>")
        named, _, count = call_id.rpartition(":")
        name = (named if count.isdigit() else call_id).removeprefix("functions.")
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
