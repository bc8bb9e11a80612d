"""Calls that the backend was held to by a schema: ``[{"name": "f", "parameters": {…}}, …]`` and nothing else."""

from __future__ import annotations

import re

from triton_openai.parsers.reader import SPACE, Step
from triton_openai.parsers.tools.json_calls import JsonCalls

_REST = re.compile(r".*", re.DOTALL)


class GuidedCalls(JsonCalls):
    """
    The answer to ``tool_choice: required``; its schema is made in ``triton_openai.api.tools``.

    The array is recognised at the start of the text alone. An answer that is none is content.
    """

    def _text(self) -> Step[None]:
        yield from self._reader.run(SPACE, self._output.content)
        if (yield from self._reader.peek()) == "[":
            self._is_bare = True
            yield from self._attempt(self._block(""), "")
        yield from self._reader.run(_REST, self._output.content)
