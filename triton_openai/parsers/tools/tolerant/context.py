"""What the readers of one text share."""

from __future__ import annotations

import msgspec

from triton_openai.parsers.tools.tolerant.request_tools import RequestTools
from triton_openai.parsers.tools.tolerant.scanner import Scanner
from triton_openai.parsers.tools.tolerant.state import CallState, Options


class Context(msgspec.Struct, frozen=True):
    """A text, the request's tools, and the state of the call that is read."""

    scanner: Scanner
    tools: RequestTools
    options: Options
    state: CallState

    def inner(self, text: str) -> Context:
        """Return the context of *text*, which is a string in this one. Both share one budget of steps."""
        return Context(
            scanner=Scanner(text, self.scanner.budget, ended=True, names=self.scanner.names),
            tools=self.tools,
            options=Options(cut=self.options.cut, keeps_types=self.options.keeps_types),
            state=CallState(),
        )
