"""Escapes and quotes in the text of a string."""

from __future__ import annotations

import re

from triton_openai.parsers.tools.tolerant.scanner import Unreadable
from triton_openai.parsers.tools.tolerant.state import CallState

_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "'": "'"}
#: Paths such as ``C:\bin`` have these too, beside what is no escape.
_AMBIGUOUS = frozenset("bf")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.|\Z)", re.DOTALL)


def unescaped(text: str, state: CallState) -> str:
    """
    Return what *text* of a JSON string means. A backslash that begins no escape is part of the text.

    Raises :class:`Unreadable` if another backslash in the text could be either.
    """
    if "\\" not in text:
        return text
    has_invalid = False
    has_ambiguous = False

    def meaning(match: re.Match[str]) -> str:
        nonlocal has_invalid, has_ambiguous
        escape = match[1]
        if escape.startswith("u") and len(escape) == 5:
            return chr(int(escape[1:], 16))
        if escape not in _ESCAPES:
            has_invalid = True
            return match[0]
        if escape in _AMBIGUOUS:
            has_ambiguous = True
        return _ESCAPES[escape]

    result = _ESCAPE.sub(meaning, text)
    if has_invalid and has_ambiguous:
        raise Unreadable
    if has_invalid:
        state.record_repair("escapes")
    # Pairs of surrogates are one character.
    return result.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def undoubled(text: str, quote: str) -> str:
    """Return *text* without a quote that the model wrote twice at its beginning, at its end, or at both."""
    count = text.count(quote)
    if count > 2:
        return text
    begins = text.startswith(quote)
    ends = text.endswith(quote) and not text.endswith("\\" + quote)
    if begins and ends and len(text) >= 2 * len(quote):
        return text[len(quote) : -len(quote)]
    if count != 1:
        return text
    if begins:
        return text.removeprefix(quote)
    if ends:
        return text.removesuffix(quote)
    return text
