"""Calls written as Python: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from triton_openai.parsers.reader import Malformed, Step
from triton_openai.parsers.tools.json_text import dump
from triton_openai.parsers.tools.literals import PythonLiterals
from triton_openai.parsers.tools.tool_parser import ListedCalls

_KEY = re.compile(r"\w*")
_MAX_KEY = 256


class Pythonic(ListedCalls):
    """A list of calls, or one call after the other. Arguments are keywords and literals, and become JSON."""

    begins = re.compile(r"[\w-]")

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
            key = yield from reader.collect(_KEY, _MAX_KEY)
            yield from reader.token("=")
            if not key:
                raise Malformed
            if not separator:
                self._start_call(name)
                output.arguments_to_confirm(f"{{{dump(key)}: ")
            else:
                # The key confirms the value before it.
                output.arguments(f"{separator}{dump(key)}: ")
            yield from literals.member(key, output.arguments, output.arguments_to_confirm, self._types)
            separator = ", "
        if separator:
            output.arguments_to_confirm("}")
        else:
            self._start_call(name)
            output.arguments_to_confirm("{}")
        self._end_call()
