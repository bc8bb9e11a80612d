"""How a text is read, and the state of the call that is being read."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tolerant.scanner import Unreadable

_MAX_UNCLOSED_STRINGS = 8

#: Objects and arrays inside of each other.
MAX_DEPTH = 50


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a text is read."""

    #: Whether a limit ended the text: then nothing that is missing at its end is added.
    cut: bool
    #: Whether no marker shows that the text is a call.
    bare: bool = False
    #: Whether a string stays a string where the schema has another type.
    keeps_types: bool = False


class Level(msgspec.Struct):
    """An object or an array that is open."""

    is_object: bool
    #: The parameters of an object, or of the objects in an array.
    parameters: Parameters
    #: The keys that the object may have; ``None`` if they are unknown.
    keys: Collection[str] | None = None
    #: The keys that were read.
    seen: set[str] = msgspec.field(default_factory=set)
    #: Whether the object consists of keywords in parentheses.
    is_keywords: bool = False
    #: Whether a key of the object has no quotes.
    has_bare_keys: bool = False


class CallState:
    """The open objects and arrays of a call, and its repairs."""

    def __init__(self) -> None:
        self.levels: list[Level] = []
        #: The kinds of the repairs.
        self.repairs: set[str] = set()
        #: Whether what follows decided where a string ends.
        self.is_guess = False
        # Of all calls of the text: each string without an end is read up to the end of the text.
        self._unclosed_strings = 0

    def begin_call(self) -> None:
        """Begin a call."""
        self.levels = []
        self.repairs = set()
        self.is_guess = False

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self.levels)

    @property
    def innermost(self) -> Level | None:
        """The object or array that was opened last."""
        if self.levels:
            return self.levels[-1]
        return None

    def open(self, level: Level) -> None:
        """Open an object or an array. Raises :class:`Unreadable` if it is nested too deeply."""
        if self.depth > MAX_DEPTH:
            raise Unreadable
        self.levels.append(level)

    def close(self) -> None:
        """Close the innermost object or array."""
        self.levels.pop()

    def record_repair(self, kind: str) -> None:
        """Record a repair."""
        self.repairs.add(kind)

    def record_guess(self, kind: str) -> None:
        """Record a repair that depends on what follows."""
        self.is_guess = True
        self.repairs.add(kind)

    def count_unclosed_string(self) -> None:
        """Count a string without an end. Raises :class:`Unreadable` if there are too many."""
        self._unclosed_strings += 1
        if self._unclosed_strings > _MAX_UNCLOSED_STRINGS:
            raise Unreadable
