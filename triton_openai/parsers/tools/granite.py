"""
Granite 3: ``<|tool_call|>[{"name": "f", "arguments": {…}}, …]`` (3.0) or ``<tool_call>[…]`` (3.1 and later).

Granite 4 writes calls as Hermes does, Granite 20B Function Calling as ``<function_call>{…}``.
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Step
from triton_openai.parsers.tools.hermes import Hermes
from triton_openai.parsers.tools.json_calls import JsonCalls


class Granite(JsonCalls):
    """
    As IBM's Granite 3.0 to 3.3 write calls. Some releases write the array with no marker, or the marker is a special
    token that was skipped: an array of calls of known tools is taken at the beginning of the text too.
    """

    special_tokens = True
    markers = Markers("<|tool_call|>", "<tool_call>")
    bare = "["

    def _block(self, marker: str) -> Step[None]:
        yield from super()._block(marker)
        if marker == "<tool_call>":
            # Granite 4 closes it, the third generation does not.
            yield from self._reader.space()
            if (yield from self._reader.peek()) == "<":
                yield from self._close("</tool_call>")


class Granite4(Hermes):
    """As the chat template of IBM's Granite 4 asks for calls; its markers are special tokens."""

    special_tokens = True


class Granite20bFunctionCalling(JsonCalls):
    """As IBM's Granite 20B Function Calling writes calls, each behind a marker."""

    markers = Markers("<function_call>")
