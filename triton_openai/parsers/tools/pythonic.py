"""Calls written as Python: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Malformed, Step
from triton_openai.parsers.tools import python_text
from triton_openai.parsers.tools.base import MarkedCalls
from triton_openai.parsers.tools.json_text import quote

_KEY = re.compile(r"\w*")
_LONGEST_KEY = 256


class Pythonic(MarkedCalls):
    """
    As ToolACE, Llama 3.2 and Llama 4 (which may put ``<|python_start|>`` and ``<|python_end|>`` round it) write calls:
    a list at the beginning of the answer. Arguments are keywords and literals, and become JSON.
    """

    special_tokens = True
    markers = Markers("<|python_start|>")
    bare = "["
    #: What closes the calls behind each marker.
    closings: ClassVar[dict[str, str]] = {"<|python_start|>": "<|python_end|>"}

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.next()) == "[":
            reader.take()
            yield from self._list()
        else:
            yield from self._lines()
        if marker:
            yield from reader.space()
            yield from self._close(self.closings[marker])

    def _list(self) -> Step[None]:
        yield from self._reader.space()
        yield from self._call()
        while True:
            yield from self._reader.space()
            if (yield from self._reader.one_of((",", "]"))) == ",":
                yield from self._reader.space()
                if (yield from self._reader.next()) != "]":
                    self._before_call()
                    yield from self._call()
                    continue
                self._reader.take()
            self._behind_call()
            return

    def _lines(self) -> Step[None]:
        """Read calls that no list holds, one a line."""
        yield from self._call()
        while True:
            yield from self._reader.space()
            following = yield from self._reader.next()
            if not (following.isalpha() or following == "_"):
                return
            self._before_call()
            yield from self._call()

    def _call(self) -> Step[None]:
        reader = self._reader
        name = yield from self._name()
        yield from reader.literal("(")
        yield from reader.space()
        separator = "{"
        while (yield from reader.next()) != ")":
            if separator != "{":
                yield from reader.literal(",")
                yield from reader.space()
                if (yield from reader.next()) == ")":
                    break
            key = yield from reader.collect(_KEY, _LONGEST_KEY)
            yield from reader.space()
            yield from reader.literal("=")
            if not key:
                raise Malformed
            if separator == "{":
                self._start_call(name)
            self._output.arguments(f"{separator}{quote(key)}: ")
            yield from python_text.value(reader, self._output.arguments)
            separator = ", "
            yield from reader.space()
        reader.take()
        if separator == "{":
            self._start_call(name)
        self._output.arguments("}" if separator != "{" else "{}")
        self._behind_call()


class Lfm2(Pythonic):
    """As Liquid's LFM2 writes them: ``<|tool_call_start|>[f(a=1)]<|tool_call_end|>``."""

    markers = Markers("<|tool_call_start|>")
    bare = ""
    closings: ClassVar[dict[str, str]] = {"<|tool_call_start|>": "<|tool_call_end|>"}


class Olmo3(Pythonic):
    """As Ai2's Olmo 3 writes them: one call a line between ``<function_calls>`` and ``</function_calls>``."""

    special_tokens = False
    markers = Markers("<function_calls>")
    bare = ""
    closings: ClassVar[dict[str, str]] = {"<function_calls>": "</function_calls>"}
