"""The reasoning of gpt-oss, with the tool calls left to the tool parser."""

from __future__ import annotations

from triton_openai.parsers.reader import Step
from triton_openai.parsers.reasoning.base import ReasoningParser
from triton_openai.parsers.tools.harmony import BODY_END, Harmony

#: The tools of the model's server, as the format names them.
_SERVER_TOOLS = frozenset({"python", "browser", "container"})


class HarmonyReasoning(Harmony, ReasoningParser):
    """
    Harmony's ``analysis`` as reasoning, its other messages as content.

    A message to a function passes as content with its markup, exactly as the model wrote it: the tool parser
    reads it next, or, where the request has no tools, the client sees it.
    """

    def __init__(self, *, inside: bool | None = None) -> None:
        super().__init__()
        self._inside = bool(inside)

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:
        """Return whether *prompt* ends with the header of an analysis."""
        return True if prompt.endswith("<|channel|>analysis<|message|>") else None

    def _text(self) -> Step[None]:
        yield from self._messages((yield from (self._reasoning() if self._inside else self._begins())))

    def _is_function(self, recipient: str) -> bool:
        # The request's tools are not known here: the tool parser decides about what is not the server's for certain.
        return recipient.partition(".")[0] not in _SERVER_TOOLS

    def _call(self, name: str) -> Step[str]:
        self._output.content(self._reader.release())
        end = yield from self._reader.until(BODY_END, self._output.content)
        # The next message's beginning is not the end of this one.
        if end != "<|start|>":
            self._output.content(end)
        return end
