"""What the readers of one text share, and their base."""

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


class ContextReader:
    """Base of the readers of a text: the parts of its *context*."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._scanner = context.scanner
        self._tools = context.tools
        self._options = context.options
        self._state = context.state
