"""
Qwen 3 Coder, Qwen 3 Next and later, Nemotron 3, Step 3.5::

    <tool_call>
    <function=f>
    <parameter=k>
    value
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.markers import Markers, markers
from triton_openai.parsers.reader import Step, discard
from triton_openai.parsers.tools.tagged_calls import TaggedCalls

_KEY = re.compile(r"[^<>\n]*")
#: The template puts each value on lines of its own. The model at times forgets to close a parameter: a tag that begins
#: a line then ends it.
_VALUE_ENDS = Markers("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


class Qwen3Coder(TaggedCalls):
    """
    As the chat template of Qwen 3 Coder asks for calls. Parameters carry no type: the tool's schema has it.

    The model at times leaves out ``<tool_call>``, so ``<function=`` opens a call too.
    """

    #: The markers around one call or several.
    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"
    markers = Markers("<tool_call>", "<function=")

    def _block(self, marker: str) -> Step[None]:
        if marker == self.opening:
            yield from self._reader.space()
            yield from self._reader.literal("<function=")
        end = yield from self._function()
        while end != self.closing:
            yield from self._reader.space()
            end = yield from self._reader.one_of((self.closing, "<function="))
            if end == "<function=":
                self._before_call(end)
                end = yield from self._function()
            else:
                self._behind_call()

    def _function(self) -> Step[str]:
        """Read a function behind ``<function=``; return the tag that ended it."""
        name = yield from self._name()
        yield from self._reader.literal(">")
        self._open(name)
        part = yield from self._next_part()
        while part == "<parameter=":
            part = yield from self._parameter()
        self._finish()
        return part

    def _parameter(self) -> Step[str]:
        """Read a parameter behind ``<parameter=``; return the next part of the function."""
        key = yield from self._key(_KEY)
        yield from self._reader.literal(">")
        yield from self._reader.optional("\n")
        end = yield from self._value(key, _VALUE_ENDS)
        if end.endswith("</parameter>"):
            return (yield from self._next_part())
        return end.lstrip()

    def _next_part(self) -> Step[str]:
        return (yield from self._marker(markers("<parameter=", "</function>", self.closing), discard))
