"""Calls written as Python: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from triton_openai.parsers.reader import Malformed, Markers, Step
from triton_openai.parsers.tools.json_text import quote
from triton_openai.parsers.tools.literals import PythonLiterals
from triton_openai.parsers.tools.tool_parser import ListedCalls

_KEY = re.compile(r"\w*")
_LONGEST_KEY = 256


class Pythonic(ListedCalls):
    """
    As ToolACE, Llama 3.2 and Llama 4 (which may put ``<|python_start|>`` and ``<|python_end|>`` round it) write calls:
    a list at the beginning of the answer. Arguments are keywords and literals, and become JSON.
    """

    special_tokens = True
    markers = Markers("<|python_start|>")
    bare = "["
    bare_names = True
    begins = re.compile(r"[\w-]")
    closing = "<|python_end|>"

    def _bare_openings(self) -> Sequence[str]:
        if self.bare:
            return [f"\n[{name}(" for name in self.tools]
        return []

    def _call(self) -> Step[None]:
        reader = self._reader
        name = yield from self._name()
        yield from reader.literal("(")
        literals = PythonLiterals(reader)
        output = self._output
        separator = ""
        while not (yield from literals.closes(")", separator)):
            key = yield from reader.collect(_KEY, _LONGEST_KEY)
            yield from reader.token("=")
            if not key:
                raise Malformed
            if not separator:
                self._start_call(name)
                output.ending(f"{{{quote(key)}: ")
            else:
                # The key confirms the value before it.
                output.arguments(f"{separator}{quote(key)}: ")
            yield from literals.value(output.arguments, output.ending)
            separator = ", "
        if not separator:
            self._start_call(name)
        output.ending("}" if separator else "{}")
        self._end_call()


class Lfm2(Pythonic):
    """As Liquid's LFM2 writes them: ``<|tool_call_start|>[f(a=1)]<|tool_call_end|>``."""

    markers = Markers("<|tool_call_start|>")
    bare = ""
    closing = "<|tool_call_end|>"


class Olmo3(Pythonic):
    """As Ai2's Olmo 3 writes them: one call a line between ``<function_calls>`` and ``</function_calls>``."""

    special_tokens = False
    markers = Markers("<function_calls>")
    bare = ""
    closing = "</function_calls>"
