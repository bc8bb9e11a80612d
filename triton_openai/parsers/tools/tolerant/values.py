"""JSON-like values: objects, arrays, strings, numbers and words, in the types of the tool's schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tolerant.context import Context, ContextReader
from triton_openai.parsers.tools.tolerant.keys import KeyReader
from triton_openai.parsers.tools.tolerant.request_tools import ARGUMENT_KEYS, CALL_KEYS, NO_PARAMETERS, WRAPPERS
from triton_openai.parsers.tools.tolerant.scanner import CLOSING_BRACKETS, Incomplete, Unreadable
from triton_openai.parsers.tools.tolerant.state import Level
from triton_openai.parsers.tools.tolerant.strings import StringReader

#: Numbers, and words such as ``true``, are not longer.
_MAX_SCALAR = 400
_COMMENT = re.compile(r"/[/*]")
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*+(?:\.(?:\d[\d_]*+)?)?|\.\d[\d_]*+)(?:[eE][-+]?\d+)?)")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
_END_OF_WORD = re.compile(r"[,;}\])\n<]|\Z")
_NO_TEXT = re.compile(r"""["'{}\[\]()\\\n]""")
_WORDS: Mapping[str, Any] = {
    "true": True, "True": True, "false": False, "False": False, "null": None, "None": None,
}  # fmt: skip
_JSON_WORDS = frozenset({"true", "false", "null"})
#: Words of programs, which are no text.
_PROGRAM_WORDS = frozenset({"undefined", "NaN", "nan", "Infinity", "-Infinity", "inf"})


class ValueReader(ContextReader):
    """Reads values. Each method returns the value and the position after it, or raises :class:`Unreadable`."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._keys = KeyReader(context)
        self._strings = StringReader(context, self._keys)

    def value(self, at: int, parameters: Parameters, key: str, *, of_call: bool = False) -> tuple[Any, int]:
        """Read the value of *key*, whose type *parameters* have. *of_call*: it is a part of a call, not an argument."""
        scanner = self._scanner
        at = scanner.after_space(at)
        if scanner.is_over(at):
            raise Unreadable
        first = scanner.text[at]
        if first == "{":
            return self.object(at, self._tools.inner_parameters(parameters, key))
        if first in "[(":
            return self.array(at, self._tools.inner_parameters(parameters, key))
        delimiter = self._strings.delimiter(at)
        if delimiter is None:
            return self._word(at, parameters, key, of_call=of_call)
        text, end = self._strings.read(at, delimiter)
        if of_call:
            return text, end
        return self.converted(parameters, key, text), end

    def object(self, at: int, parameters: Parameters) -> tuple[dict[str, Any], int]:
        """Read the object, or the keywords in parentheses, whose opening bracket is at *at*."""
        is_keywords = self._scanner.text[at] == "("
        level = Level(True, parameters, parameters.names or None, is_keywords=is_keywords)
        return self._members(at, level)

    def call(self, at: int) -> tuple[dict[str, Any], int]:
        """Read the object of a call, with the name of a tool and its arguments."""
        level = Level(True, NO_PARAMETERS, CALL_KEYS)
        return self._members(at, level, of_call=True)

    def _members(self, at: int, level: Level, *, of_call: bool = False) -> tuple[dict[str, Any], int]:
        scanner = self._scanner
        self._state.open(level)
        result: dict[str, Any] = {}
        is_doubled = self._is_doubled(at)
        if is_doubled:
            self._state.record_repair("brackets")
            at = scanner.after_space(at + 1)
        at += 1
        while True:
            at = self._next_item(at, after_item=bool(result))
            if scanner.is_over(at):
                self._add_missing_brackets()
                break
            if scanner.text[at] in "})":
                at += 1
                if is_doubled:
                    at = self._after_second_brace(at)
                break
            if scanner.closes(at) or self._is_end_of_array(at):
                self._state.record_repair("brackets")
                break
            key, at = self._keys.read(at)
            if key in result:
                raise Unreadable
            level.seen.add(key)
            # Without a marker, most objects are no calls, and most of these show it early.
            is_bare_call = of_call and self._options.bare
            if is_bare_call and key not in CALL_KEYS and key not in WRAPPERS:
                raise Unreadable
            if of_call and key in ARGUMENT_KEYS:
                result[key], at = self._arguments_of_call(at, result)
            else:
                result[key], at = self.value(at, level.parameters, key, of_call=of_call)
            if is_bare_call and self._tools.names_no_tool(key, result[key]):
                raise Unreadable
        self._state.close()
        return result, at

    def _is_end_of_array(self, at: int) -> bool:
        """Return whether the bracket at *at* ends the array around the object, or the list of calls at its end."""
        scanner = self._scanner
        if not scanner.text.startswith("]", at):
            return False
        if any(not level.is_object for level in self._state.levels):
            return True
        end = scanner.after_space(at + 1)
        return scanner.is_over(end) or scanner.closes(end)

    def _is_doubled(self, at: int) -> bool:
        """Return whether another brace follows the one at *at*, as in the templates of some programs."""
        scanner = self._scanner
        return scanner.text[at] == "{" and scanner.text.startswith("{", scanner.after_space(at + 1))

    def _after_second_brace(self, at: int) -> int:
        """Return the position after the second brace of an end, if there is one at *at*."""
        end = self._scanner.after_space(at)
        if self._scanner.text.startswith("}", end):
            return end + 1
        return at

    def _arguments_of_call(self, at: int, members: Mapping[str, Any]) -> tuple[Any, int]:
        """Read the arguments in the object of a call; *members* came before them."""
        name = None
        named = self._tools.named_in(members)
        if named is not None:
            name = named[1]
        at = self._scanner.after_space(at)
        if self._scanner.text.startswith(("{", "("), at):
            if self._scanner.text[at] == "(":
                self._state.record_repair("brackets")
            return self.object(at, self._tools.parameters(name))
        return self.value(at, NO_PARAMETERS, "")

    def array(self, at: int, parameters: Parameters) -> tuple[list[Any], int]:
        """Read the array whose opening bracket is at *at*; *parameters* are those of the objects in it."""
        scanner = self._scanner
        self._state.open(Level(False, parameters))
        if scanner.text[at] == "(":
            self._state.record_repair("literals")
        items: list[Any] = []
        at += 1
        while True:
            at = self._next_item(at, after_item=bool(items))
            if scanner.is_over(at):
                self._add_missing_brackets()
                break
            if scanner.at_bracket(at) and scanner.text[at] != "}":
                at += 1
                break
            if scanner.text[at] == "}" or scanner.closes(at):
                self._state.record_repair("brackets")
                break
            item, end = self._item(at, parameters)
            if end == at:
                raise Unreadable
            at = end
            items.append(item)
        self._state.close()
        return items, at

    def _item(self, at: int, parameters: Parameters) -> tuple[Any, int]:
        first = self._scanner.text[at]
        if first == "{":
            return self.object(at, parameters)
        if first in "[(":
            return self.array(at, parameters)
        return self.value(at, NO_PARAMETERS, "")

    def _next_item(self, at: int, *, after_item: bool) -> int:
        """Return the position of the next item, behind commas."""
        scanner = self._scanner
        start = at
        at = scanner.after_space(at)
        commas = 0
        while not scanner.is_over(at) and scanner.text[at] in ",;":
            commas += 1
            at = scanner.after_space(at + 1)
        if _COMMENT.search(scanner.text, start, at):
            self._state.record_repair("literals")
        closes = scanner.is_over(at) or scanner.text[at] in CLOSING_BRACKETS
        is_extra = commas > 1 or (commas == 1 and (closes or not after_item))
        is_missing = commas == 0 and after_item and not closes
        if is_extra or is_missing:
            self._state.record_repair("commas")
        return at

    def _add_missing_brackets(self) -> None:
        """Record brackets that are missing at the end of the text."""
        if self._options.cut:
            raise Unreadable
        self._state.record_repair("brackets")

    def _word(self, at: int, parameters: Parameters, key: str, *, of_call: bool) -> tuple[Any, int]:
        """Read a value without quotes."""
        state = self._state
        end = self._end_of_word(at)
        word = self._scanner.text[at:end].strip()
        if self._scanner.is_over(end) and self._options.cut:
            raise Unreadable
        types = parameters.types(key)
        if word in _WORDS and (not types or _WORDS[word] is None or types - {"string"}):
            if word not in _JSON_WORDS:
                state.record_repair("literals")
            return _WORDS[word], end
        if _NUMBER.fullmatch(word):
            number = _number(word)
            if _JSON_NUMBER.fullmatch(word) is None:
                state.record_repair("literals")
            return self.converted(parameters, key, number), end
        if word.endswith('"') and word.count('"') == 1:
            word = word[:-1]
        if not of_call and "string" not in types:
            raise Unreadable
        level = state.innermost
        if level is not None and level.is_keywords and "," in word:
            # A value without a key
            raise Unreadable
        if not word or word in _PROGRAM_WORDS or _NO_TEXT.search(word):
            raise Unreadable
        state.record_guess("quotes")
        return word, end

    def _end_of_word(self, at: int) -> int:
        """Return where the value without quotes ends that begins at *at*."""
        scanner = self._scanner
        searched = at
        while True:
            match = _END_OF_WORD.search(scanner.text, searched)
            assert match is not None
            end = match.start()
            scanner.budget.take(1 + match.end() - searched)
            if scanner.is_over(match.end()) and not scanner.ended:
                raise Incomplete
            scanner.require_lookahead(match.end())
            is_text = not _is_scalar(scanner.text, at, end)
            if self._keys.continues(end, after_text=is_text, certain=is_text):
                return end
            if match[0] in ("\n", ""):
                raise Unreadable
            searched = match.end()
            if match[0] == ",":
                # The result is the same for each comma of a run.
                searched = scanner.after_commas(end)

    def converted(self, parameters: Parameters, key: str, value: Any) -> Any:
        """Return *value* in a type that the schema has, if its text is a value of that type."""
        if self._options.keeps_types or parameters.allows(key, value):
            return value
        types = parameters.types(key)
        if isinstance(value, str):
            decoded = json.loads(parameters.value(key, value))
            if not isinstance(decoded, str):
                self._state.record_repair("types")
                return decoded
            return self.parsed_text(value, parameters, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and types == {"string"}:
            self._state.record_repair("types")
            return json.dumps(value)
        return value

    def parsed_text(self, text: str, parameters: Parameters, key: str) -> Any:
        """Return the object or the array that the string *text* contains, if the schema has one; else *text*."""
        stripped = text.strip()
        types = parameters.types(key)
        if not stripped.startswith(("{", "[")) or not types & {"object", "array"}:
            return text
        inner = self._context.inner(stripped)
        inner.state.open(Level(True, parameters))
        value, end = ValueReader(inner).value(0, parameters, key)
        if not inner.scanner.is_over(inner.scanner.after_space(end)):
            raise Unreadable
        self._state.repairs |= inner.state.repairs
        self._state.record_repair("types")
        return value


def _is_scalar(text: str, start: int, end: int) -> bool:
    """Return whether *text* from *start* to *end* is a number or a word such as ``true``."""
    if end - start > _MAX_SCALAR:
        return False
    word = text[start:end].strip()
    return word in _WORDS or _NUMBER.fullmatch(word) is not None


def _number(word: str) -> int | float:
    """Return the number that *word* is. Raises :class:`Unreadable` if it is infinite."""
    plain = word.replace("_", "")
    base = 10
    if plain.lstrip("+-")[:2].lower() == "0x":
        base = 16
    try:
        return int(plain, base)
    except ValueError:
        pass
    number = float(plain)
    if not math.isfinite(number):
        raise Unreadable
    return number
