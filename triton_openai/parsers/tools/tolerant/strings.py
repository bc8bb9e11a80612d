# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Strings with unescaped, missing or doubled quotes."""

from __future__ import annotations

import re
from functools import cache

from triton_openai.parsers.tools.tolerant.context import Context, ContextReader
from triton_openai.parsers.tools.tolerant.escapes import undoubled, unescaped
from triton_openai.parsers.tools.tolerant.keys import KeyReader
from triton_openai.parsers.tools.tolerant.scanner import CLOSING_BRACKETS, CLOSING_TAGS, Incomplete, Unreadable, any_of

_DELIMITERS = ('<|"|>', "<escape>", '"""', "'''", '\\"', '"', "'", "`", "“")
_CLOSING_DELIMITERS = {"“": "”"}
_CLOSING_BRACKETS_AND_TAG = rf"(?P<stop>[}}\])](?:\s{{0,8}}[}}\])]){{0,8}}\s{{0,8}}(?P<tag>{any_of(CLOSING_TAGS)}))"
#: What may stand at the end of the text behind a string without an end.
_LAST_TAGS = (*CLOSING_TAGS, "</function>", "</invoke>", "</｜DSML｜invoke>", "```")
_MEMBER = re.compile(r',\s{0,64}+"([^"\\\n]{1,200}+)"\s{0,64}+:')
_BRACKET = re.compile(r"[\[\](){}]")
_COMMA_AT_END = re.compile(r'"\s{0,64}+,\Z')
_ESCAPED_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*\\"')


@cache
def _stops(closing: str) -> re.Pattern[str]:
    """Return a pattern for escapes in a string, for *closing*, which ends it, and for the end of a call."""
    escape = r"(?P<escape>\\.)|"
    if closing.startswith(("<", "\\")):
        escape = ""
    return re.compile(rf"{escape}(?P<end>{re.escape(closing)})|{_CLOSING_BRACKETS_AND_TAG}", re.DOTALL)


class StringReader(ContextReader):
    """Reads strings."""

    def __init__(self, context: Context, keys: KeyReader) -> None:
        super().__init__(context)
        self._keys = keys

    def delimiter(self, at: int) -> str | None:
        """Return the quote at *at* that opens a string."""
        for delimiter in _DELIMITERS:
            if self._scanner.text.startswith(delimiter, at):
                return delimiter
        return None

    def read(self, start: int, delimiter: str) -> tuple[str, int]:
        """
        Read the string that *delimiter* opens at *start*. Return its text, and the position after it.

        The string ends at the first closing quote behind which the rest of the call follows.
        """
        scanner = self._scanner
        state = self._state
        body = start + len(delimiter)
        closing = _CLOSING_DELIMITERS.get(delimiter, delimiter)
        if delimiter == "'":
            state.record_repair("literals")
        elif delimiter != '"':
            state.record_repair("quotes")
        at = body
        quotes = 0
        while True:
            match = _stops(closing).search(scanner.text, at)
            if match is None:
                scanner.budget.take(1 + len(scanner.text) - at)
                if not scanner.ended:
                    raise Incomplete
                return self._unclosed(body, closing)
            scanner.budget.take(1 + match.end() - at)
            at = match.end()
            if match.lastgroup == "escape":
                continue
            scanner.require_lookahead(at)
            if match.lastgroup == "stop":
                tag = match.start("tag")
                behind = scanner.after_closings(tag)
                if scanner.is_over(behind) or scanner.opens(behind):
                    return self._unclosed(body, closing, tag)
                continue
            # After an odd number of quotes, the text may be inside of quotes that belong to the string.
            if self._keys.continues(at, after_text=quotes > 0, certain=quotes % 2 == 1):
                break
            quotes += 1
        text = scanner.text[body : match.start()]
        if quotes:
            state.record_guess("quotes")
            member = self._next_member(text)
            if member is not None:
                # Its own quote is missing.
                self._check_guess(text[:member], closing)
                return unescaped(text[:member].rstrip(), state), body + member
            text = undoubled(text, closing)
            self._check_guess(text, closing)
        if closing.startswith("<"):
            return text.replace(closing, '"'), match.end()
        if closing.startswith("\\"):
            # The whole call is escaped once more.
            text = unescaped(text, state)
        return unescaped(text, state), match.end()

    def _check_guess(self, text: str, closing: str) -> None:
        """
        Raise :class:`Unreadable` if *text*, a string with quotes inside, shows that it ends earlier.

        It does so by what looks like the next member of the object, or the next string of the array, outside of
        brackets of its own.
        """
        level = self._state.innermost
        if level is None:
            return
        quote = re.escape(closing)
        self._scanner.budget.take(3 * len(text))
        if not level.is_object:
            if re.search(rf"{quote}\s{{1,64}}+{quote}", text):
                # A comma may be missing between two strings.
                raise Unreadable
            return
        seen = any_of(sorted(level.seen))
        if re.search(rf"{quote}(?:{seen}){quote}\s{{0,64}}+:", text):
            raise Unreadable
        if level.is_keywords and re.search(rf"(?<!\\){quote}(?:\s{{0,64}}+[,)]|\s{{1,64}}+{quote})", text):
            # Two strings beside each other are one in Python.
            raise Unreadable
        outside = _outside_of_brackets(text)
        if _members(quote).search(outside):
            raise Unreadable
        if level.has_bare_keys and _bare_members(quote).search(outside):
            raise Unreadable

    def _unclosed(self, body: int, closing: str, stop: int | None = None) -> tuple[str, int]:
        """
        Return the text of a string whose last quote is escaped or missing, and the position after it.

        What follows the string ends the call, at *stop* or at the end of the text.
        """
        scanner = self._scanner
        state = self._state
        state.count_unclosed_string()
        if self._options.cut and stop is None:
            raise Unreadable
        scanner.budget.take(len(scanner.text) - body)
        end = stop
        if end is None:
            end = self._start_of_last_tags(body)
        text = scanner.text[body:end]
        member = self._next_member(text)
        state.record_guess("quotes")
        if member is not None:
            self._check_guess(text[:member], closing)
            return unescaped(text[:member].rstrip(), state), body + member
        text = self._without_brackets(text)
        if closing != '"' or _COMMA_AT_END.search(text):
            # Nothing shows where the string ends, or something else is wrong behind it.
            raise Unreadable
        if text.count("{") != text.count("}") or text.count("[") != text.count("]"):
            raise Unreadable
        self._check_guess(text, closing)
        end = body + len(text)
        quotes = len(_ESCAPED_QUOTE.findall(text))
        if text.endswith('\\"') and quotes % 2:
            text = text[:-2]
        elif text.endswith('"') and not text.endswith('\\"'):
            text = text[:-1]
        return unescaped(text, state), end

    def _without_brackets(self, text: str) -> str:
        """Return *text* without the brackets that close the open objects and arrays. Raises if there are none."""
        depth = self._state.depth
        stripped = text.rstrip()
        while depth and stripped and stripped[-1] in CLOSING_BRACKETS:
            stripped = stripped[:-1].rstrip()
            depth -= 1
        if depth == self._state.depth:
            raise Unreadable
        return stripped

    def _start_of_last_tags(self, body: int) -> int:
        """Return where the closing tags at the end of the text begin."""
        text = self._scanner.text
        end = len(text)
        while True:
            while end > body and text[end - 1].isspace():
                end -= 1
            tag = next((tag for tag in _LAST_TAGS if text.endswith(tag, body, end)), None)
            if tag is None:
                return end
            end -= len(tag)

    def _next_member(self, text: str) -> int | None:
        """Return where in *text* the member begins whose key shows that the string before it has ended."""
        level = self._state.innermost
        if level is None or not level.is_object or level.keys is None:
            return None
        for match in _MEMBER.finditer(text):
            if match[1] in level.keys and match[1] not in level.seen:
                break
        else:
            return None
        before = text[: match.start()]
        if len(_outside_of_brackets(before)) < len(before):
            # It may belong to an object inside of the text.
            return None
        return match.start()


def _outside_of_brackets(text: str) -> str:
    """Return what of *text* is not inside of brackets."""
    outside: list[str] = []
    depth = 0
    begin = 0
    for match in _BRACKET.finditer(text):
        if match[0] in CLOSING_BRACKETS:
            depth = max(0, depth - 1)
            begin = match.end()
            continue
        if depth == 0:
            outside.append(text[begin : match.start()])
        depth += 1
    if depth == 0:
        outside.append(text[begin:])
    return "".join(outside)


@cache
def _members(quote: str) -> re.Pattern[str]:
    """Return a pattern for a key of an object behind another member, with a quote, a comma or the colon missing."""
    key = r"[^\s\"'\\:,;][^\"'\\\n]{0,199}+"
    space = r"\s{0,64}+"
    return re.compile(
        rf"[,;]{space}{quote}{key}{quote}{space}:"
        rf"|{quote}{space}[,;]{space}[\w-]{{1,200}}+{quote}{space}:"
        rf"|{quote}{space}[,;]?{space}{quote}{key}{quote}{space}(?::|{quote})"
    )


@cache
def _bare_members(quote: str) -> re.Pattern[str]:
    """Return a pattern for a key without quotes behind another member."""
    space = r"\s{0,64}+"
    return re.compile(rf"{quote}{space},?{space}[\w-]{{1,200}}+{space}[:=]{space}{quote}")
