"""Phi 4 mini: ``functools[{"name": "f", "arguments": {…}}, …]``, with nothing behind it."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Step
from triton_openai.parsers.tools.json_calls import JsonCalls


class Phi4Mini(JsonCalls):
    """As vLLM's chat template for Phi 4 mini asks for calls ("prefix function calls with functools marker")."""

    markers = Markers("functools[")

    def _block(self, marker: str) -> Step[None]:
        yield from self._items()
