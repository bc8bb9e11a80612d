"""
How much a template may do: a count of steps that is the same on every machine, and characters, which are steps too.

What the account costs (Python 3.11, chats of 20 messages, with and without it): chatml 77 and 94 µs, llama3 70 and 101,
mistral 330 and 395; that is 1 to 3 µs for a message.

A step is about one expression, item or comparison: a microsecond at most. So many characters as
:data:`CHARACTERS_PER_STEP` are one step too, for what is done to them (copying, searching, escaping) takes no longer.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

#: What rendering an operator's template may cost. 20,000 messages cost about two million steps, and 40 million
#: characters copied ten times cost 6 million.
MOST_STEPS = 4_000_000
#: The same for a template that came in a request: half a second or so.
MOST_STEPS_OF_A_REQUEST = 500_000
#: The longest text that an expression may make.
LONGEST_TEXT = 64 * 1024 * 1024
CHARACTERS_PER_STEP = 64

_SHIFT = CHARACTERS_PER_STEP.bit_length() - 1
_VIEWS = (KeysView, ValuesView, ItemsView)


class RunawayTemplate(SecurityError):
    """A rendering does more than it may."""


class Work:
    """What one rendering may still do."""

    __slots__ = ("left",)

    def __init__(self, steps: int) -> None:
        self.left = steps

    def charge(self, steps: int) -> None:
        """Take *steps*. Raises :class:`RunawayTemplate` when there are not so many left."""
        self.left -= steps
        if self.left < 0:
            raise RunawayTemplate("the template takes too much work")

    def charge_text(self, characters: int) -> None:
        """Take what a text of so many characters costs to make. Raises :class:`RunawayTemplate`, also if it is too
        long."""
        if characters > LONGEST_TEXT:
            raise RunawayTemplate(f"an expression would make a text of {characters} characters")
        self.charge(characters >> _SHIFT)

    def weigh(self, value: Any) -> int:
        """
        Return how many characters *value* would have as text, about; items count :data:`CHARACTERS_PER_STEP` each.

        What stands in it twice counts twice, as it does in a text or a comparison: a short template can build a list of
        lists whose text would fill the world. The walk itself is charged. Raises :class:`RunawayTemplate`.
        """
        if isinstance(value, str | bytes):
            return len(value)
        limit = self.left << _SHIFT
        total = items = 0
        pending: list[Any] = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, int):
                total += item.bit_length() >> 2
            elif (inner := _inside(item)) is not None:
                items += len(inner)
                pending.extend(inner)
            if total + (items << _SHIFT) > limit:
                raise RunawayTemplate("the template takes too much work")
        self.charge(items)
        return total + (items << _SHIFT)


def _inside(value: Any) -> list[Any] | tuple[Any, ...] | None:
    """Return what a container holds, ``None`` for what is none."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Namespace):
        value = vars(value)["_Namespace__attrs"]
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (*_VIEWS, set, frozenset, range)) else None


def size(value: Any) -> int:
    """Return the number of items, or characters, of *value*; 0 for what has none, or does not know."""
    try:
        return len(value)
    except TypeError:
        return 0
