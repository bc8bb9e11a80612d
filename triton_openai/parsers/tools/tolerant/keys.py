# ruff: noqa: RUF001 - some names stand before full-width bars
"""
Keys of objects, and what follows a value that has no certain end.

A quote, a comma or a line break ends a value if the rest of the call follows it: the next key, or the end.
"""

from __future__ import annotations

import re

from triton_openai.parsers.tools.tolerant.context import ContextReader
from triton_openai.parsers.tools.tolerant.escapes import unescaped
from triton_openai.parsers.tools.tolerant.request_tools import CALL_KEYS
from triton_openai.parsers.tools.tolerant.scanner import CLOSING_BRACKETS, Unreadable
from triton_openai.parsers.tools.tolerant.state import MAX_DEPTH, Level

#: More closing brackets than are open: of the list of calls, and of what is around it.
_EXTRA_BRACKETS = 2
_QUOTE = r"""(?:<\|"\|>|<escape>|\\?["'`“”])"""
#: No white space before the key; some may follow it.
_KEY = re.compile(
    rf"""({_QUOTE}{{0,2}}+)([^\s"'`“”:=,;{{}}\[\]()<>\\][^"'`“”:=,;{{}}\[\]()<>\\\n]{{0,199}}+)"""
    rf"""\s{{0,64}}+({_QUOTE}{{0,2}}+)\s{{0,64}}+(:|=>|=)(?!=)"""
)
_JSON_KEY = re.compile(r'"((?:[^"\\\n]|\\.){0,200}+)"\s{0,64}+()()(:)')
_OBJECT_OF_CALL = re.compile(r'\[?\s{0,64}+\{\s{0,64}+"([^"\\\n]{1,40}+)"')
_BARE_SCALAR = re.compile(r"(?:[tT]rue|[fF]alse|null|None)\b")
_BEGINS_VALUE = frozenset("\"'“[{(<-0123456789")
_BEGINS_CALL = frozenset("{<[")
#: The name of a call.
NAME = re.compile(r"""(?:call:|function:)?\s{0,64}+["'`]?((?:[^\s<>(){}\[\]"'`,;=|｜]){1,256})["'`]?""")


class KeyReader(ContextReader):
    """Reads keys, and decides whether a value ends."""

    def read(self, at: int) -> tuple[str, int]:
        """Return the key at *at*, and where its value begins. Raises :class:`Unreadable`."""
        scanner = self._scanner
        state = self._state
        scanner.budget.take()
        match = _JSON_KEY.match(scanner.text, at)
        if match is not None:
            return unescaped(match[1], state), match.end()
        match = _KEY.match(scanner.text, at)
        if match is None:
            raise Unreadable
        opening = match[1]
        closing = match[3]
        if opening != closing or opening not in ('"', ""):
            state.record_repair("quotes")
        if not opening or match[4] != ":":
            state.record_repair("notation")
        level = state.innermost
        if level is not None and not opening and not closing:
            level.has_bare_keys = True
        return match[2].strip(), match.end()

    def continues(self, at: int, *, after_text: bool = False, certain: bool = False) -> bool:
        """
        Return whether the rest of the call begins at *at*, where a value may end.

        *after_text* is whether the value contains text after a quote, or text without quotes. With *certain*, only a
        key of the schema shows that the value ends here.
        """
        scanner = self._scanner
        state = self._state
        closed = 0
        at = scanner.after_space(at)
        for _ in range(MAX_DEPTH):
            while scanner.at_bracket(at):
                if closed > state.depth + _EXTRA_BRACKETS:
                    break
                closed += 1
                at = scanner.after_space(at + 1)
            if scanner.is_over(at):
                return not self._options.cut or closed >= state.depth
            if closed > state.depth + _EXTRA_BRACKETS:
                return False
            if scanner.closes(at):
                return True
            is_whole = closed >= state.depth
            if is_whole and scanner.text[at] == ";":
                return True
            if scanner.text[at] != ",":
                if is_whole:
                    return not after_text and (scanner.text[at].isalnum() or self._begins_object_of_call(at))
                level = state.levels[state.depth - closed - 1]
                return level.is_object and self._is_marked(at) and self._is_next(at, level, certain=True)
            at = scanner.after_commas(at)
            if scanner.is_over(at) or scanner.text[at] in CLOSING_BRACKETS:
                # A comma after the last item
                continue
            if is_whole:
                return self._begins_call(at)
            level = state.levels[state.depth - closed - 1]
            if level.is_object:
                return self._is_next(at, level, certain=certain)
            if certain:
                return False
            return self._begins_value(at)
        return False

    def _begins_call(self, at: int) -> bool:
        """Return whether another call may begin at *at*."""
        text = self._scanner.text
        return text.startswith((*_BEGINS_CALL, '"{'), at) or NAME.match(text, at) is not None

    def _begins_object_of_call(self, at: int) -> bool:
        """Return whether the object of a call begins at *at*, without a comma before it."""
        self._scanner.budget.take()
        match = _OBJECT_OF_CALL.match(self._scanner.text, at)
        return match is not None and match[1] in CALL_KEYS

    def _is_marked(self, at: int) -> bool:
        """Return whether a key at *at* needs no comma before it: it is in quotes, or an equals sign follows."""
        self._scanner.budget.take()
        text = self._scanner.text
        keyword = _KEY.match(text, at)
        is_keyword = keyword is not None and keyword[4] == "="
        return is_keyword or _JSON_KEY.match(text, at) is not None

    def _is_next(self, at: int, level: Level, *, certain: bool) -> bool:
        """Return whether the next key of *level* is at *at*. A *certain* one is a key of the schema."""
        self._scanner.budget.take()
        text = self._scanner.text
        match = _JSON_KEY.match(text, at)
        if match is not None:
            key = match[1]
        else:
            match = _KEY.match(text, at)
            if match is None:
                return False
            key = match[2].strip()
        if key in level.seen:
            return False
        is_known = level.keys is not None and key in level.keys
        if is_known or certain:
            return is_known
        # A key that the schema does not have is in quotes, or as bare as those before it.
        if match[1]:
            return True
        return level.has_bare_keys and self._begins_value(self._scanner.after_space(match.end()))

    def _begins_value(self, at: int) -> bool:
        """Return whether something other than text without quotes begins at *at*."""
        text = self._scanner.text
        if text.startswith('\\"', at):
            return True
        return text[at : at + 1] in _BEGINS_VALUE or _BARE_SCALAR.match(text, at) is not None
