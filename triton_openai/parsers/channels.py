"""
Muse Glimmer: messages to somebody, each with a header::

     to=self<|message|>thinking<|eom|>
    <|start|>assistant to=get_weather<|message|><atem:function_calls>…</atem:function_calls><|eom|>
    <|start|>assistant to=user<|message|>answer<|eot|>

The prompt ends with ``<|start|>assistant``, so that the text begins inside of a header.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.parsers.reader import Malformed, Step, markers
from triton_openai.parsers.reasoning import ReasoningGrammar
from triton_openai.parsers.thinking_meter import ThinkingMeter
from triton_openai.parsers.tools.tags import HEADER_TEXT, MAX_HEADER, RECIPIENT

_MESSAGE = "<|message|>"
_START = "<|start|>"
_ENDS = ("<|eom|>", "<|eot|>")
_THINKING = f"to=self{_MESSAGE}"


class MuseGlimmer(ReasoningGrammar):
    """What the model says to itself is reasoning, and all else content: the tool parser reads the calls in it."""

    special_tokens = True

    def __init__(self, *, inside: bool | None = None) -> None:
        super().__init__()
        self._inside = bool(inside)
        self._has_reasoned = False

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:
        """Return whether *prompt* ends with the header of thinking."""
        if prompt.endswith(_THINKING):
            return True
        return None

    @classmethod
    def ending(cls, *, calls: bool) -> str:
        if calls:
            # To a tool or to the user: the model says which.
            return f"<|eom|>{_START}assistant to="
        return f"<|eom|>{_START}assistant to=user{_MESSAGE}"

    @classmethod
    def meter(cls, prompt: str, calls: Sequence[str]) -> ThinkingMeter:
        ends = (*_ENDS, _START, *calls)
        return ThinkingMeter((_THINKING,), ends, inside=bool(cls.inside_after(prompt)), anywhere=True)

    def _text(self) -> Step[None]:
        reader = self._reader
        header: str | None = _THINKING
        if not self._inside:
            header = yield from reader.attempt(self._header(), self._output.content)
        while True:
            marker = yield from self._body(header)
            if marker in _ENDS:
                yield from reader.space()
                marker = yield from reader.until(markers(_START), self._output.content)
            if not marker:
                return
            header = yield from reader.attempt(self._header(), self._output.content, _START)

    def _header(self) -> Step[str]:
        """Read a header from its recipient on."""
        text = yield from self._reader.collect(HEADER_TEXT, MAX_HEADER)
        yield from self._reader.literal(_MESSAGE)
        if not _is_header(text):
            raise Malformed
        return text + _MESSAGE

    def _body(self, header: str | None) -> Step[str]:
        """Read the message after its *header*; return the marker that ended it, nothing at the end of the text."""
        reader = self._reader
        recipient = None
        if header is not None:
            recipient = RECIPIENT.search(header)
        if recipient is None or recipient[1] != "self":
            return (yield from reader.until(markers(*_ENDS, _START), self._output.content))
        if self._has_reasoned:
            self._output.reasoning("\n")
        self._has_reasoned = True
        return (yield from self._read_thinking((*_ENDS, _START), self._output.reasoning))


def _is_header(text: str) -> bool:
    """Return whether *text* before the marker of a message is its header."""
    return not text.strip() or text.strip() == "assistant" or RECIPIENT.search(text) is not None
