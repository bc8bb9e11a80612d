"""
Kimi K2, K2 Thinking and K2.5::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
    <|tool_calls_section_end|>
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Malformed, Step
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.base import SectionCalls


class KimiK2(SectionCalls):
    """
    As Moonshot's "Tool Call Guidance" for K2 tells it. The id is the model's own, ``functions.<name>:<count>``: it must
    come back with the tool's answer, since the template shows the model the answer under that name.
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
        yield from reader.space()
        yield from reader.literal("<|tool_call_argument_begin|>")
        yield from reader.space()
        if (yield from reader.next()) != "{":
            raise Malformed
        named, _, count = call_id.rpartition(":")
        self._start_call((named if count.isdigit() else call_id).removeprefix("functions."), call_id)
        yield from json_text.value(reader, self._output.arguments)
        self._behind_call()
        yield from reader.space()
        yield from self._close("<|tool_call_end|>")
