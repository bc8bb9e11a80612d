# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
The text of a call with slips, and the budget of steps for reading it.

Every look at the text counts as a step, and so does every character that a search passes. Each pattern looks at a
bounded number of characters from each position: what repeats has a bound, or is possessive and followed by nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from triton_openai.parsers.tools.tags import CLOSINGS, MESSAGE_ENDS, OPENINGS

# The maximum of steps: for each character of a text, in addition to that, and in total. The event loop waits for the
# reading: 50 ms at most.
_STEPS_PER_CHARACTER = 10
_EXTRA_STEPS = 20_000
_MAX_TOTAL_STEPS = 100_000
#: How many characters after a position decide what begins there.
_LOOKAHEAD = 320

FENCE = "```"
#: Brackets that end objects, arrays and keywords.
CLOSING_BRACKETS = frozenset("}])")
#: An optional namespace in front of the name of a tag.
NAMESPACE = r"(?:｜DSML｜|[\w.-]{1,40}:)?"
#: The name of a function or of a parameter in its tag.
NAME_ATTRIBUTE = r"""(?:=|\s{1,64}+name\s{0,64}+=\s{0,64}+)["']?([^\s<>"'=]{1,256}+)["']?"""
CLOSING_TAGS = (*CLOSINGS, *MESSAGE_ENDS)
_MORE_OPENINGS = (
    "<|plugin|>", "functools", "function<｜tool▁sep｜>", "function<｜tool_sep｜>",
    "```json", "```python", "```tool_call", "```tool_code", "```",
)  # fmt: skip


def any_of(texts: Sequence[str]) -> str:
    """Return a pattern for any of *texts*; a longer one before its own beginning."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


OPENING = re.compile(any_of((*OPENINGS, *_MORE_OPENINGS)))
CALL_TAG = re.compile(rf"<{NAMESPACE}(?:function|invoke|tool){NAME_ATTRIBUTE}\s{{0,64}}(?:/?>|(?=\n))")
CLOSING = re.compile(
    rf"{any_of(CLOSING_TAGS)}|</{NAMESPACE}(?:function(?:=[^<>\n]{{1,256}}+)?|invoke|tool)>|</(?:arguments|parameters)>|```"
)
_NAME_END = re.compile(r"</([\w.:-]{1,256}+)>")
#: White space, and comments of some length.
_SPACE = re.compile(r"(?:\s++|//[^\n]{0,200}+\n|/\*(?:[^*]|\*(?!/)){0,200}+\*/)*+")


class Unreadable(Exception):
    """The text is no call whose meaning is clear."""


class Incomplete(Exception):
    """More text could change the result."""


class StepBudget:
    """The steps that remain for a text and the texts inside of it."""

    def __init__(self, size: int) -> None:
        """Begin with the budget of a text of *size* characters."""
        self._remaining = min(_STEPS_PER_CHARACTER * size + _EXTRA_STEPS, _MAX_TOTAL_STEPS)

    def take(self, count: int = 1) -> None:
        """Subtract *count* steps. Raises :class:`Unreadable` if fewer remain."""
        self._remaining -= count
        if self._remaining < 0:
            raise Unreadable


class Scanner:
    """A text, and what begins at a position in it. Each method counts its steps."""

    def __init__(self, text: str, budget: StepBudget, *, ended: bool, names: Collection[str] = ()) -> None:
        """Scan *text*; *ended* is whether no more text follows. The tags of *names* enclose calls of these tools."""
        self.text = text
        self.budget = budget
        self.ended = ended
        self.names = names
        # Where runs of closing tags end, by the position of each tag
        self._ends_of_runs: dict[int, int] = {}

    def require_lookahead(self, at: int) -> None:
        """Raise :class:`Incomplete` if more text could change what begins at *at*."""
        if not self.ended and at + _LOOKAHEAD > len(self.text):
            raise Incomplete

    def is_over(self, at: int) -> bool:
        """Return whether *at* is the end of the text."""
        return at >= len(self.text)

    def after_space(self, at: int) -> int:
        """Return the position after white space and comments."""
        end = at
        match = _SPACE.match(self.text, at)
        if match is not None:
            end = match.end()
        self.budget.take(1 + end - at)
        self.require_lookahead(end)
        return end

    def after_commas(self, at: int) -> int:
        """Return the position after commas, and after the white space behind each."""
        while at < len(self.text) and self.text[at] == ",":
            at = self.after_space(at + 1)
        return at

    def closing(self, at: int) -> re.Match[str] | None:
        """Return the closing tag at *at*."""
        match = CLOSING.match(self.text, at)
        if match is None:
            match = _NAME_END.match(self.text, at)
            if match is not None and match[1] not in self.names:
                match = None
        return match

    def at_bracket(self, at: int) -> bool:
        """Return whether a closing bracket is at *at* which begins no closing tag."""
        return self.text[at : at + 1] in CLOSING_BRACKETS and self.closing(at) is None

    def opens(self, at: int) -> bool:
        """Return whether a call begins at *at*."""
        self.budget.take()
        return OPENING.match(self.text, at) is not None or CALL_TAG.match(self.text, at) is not None

    def closes(self, at: int) -> bool:
        """Return whether a call ends at *at*: with a closing tag, or because the next call begins."""
        self.budget.take()
        return self.closing(at) is not None or self.opens(at)

    def after_closings(self, at: int) -> int:
        """Return the position after white space and closing tags."""
        passed: list[int] = []
        while at not in self._ends_of_runs:
            passed.append(at)
            end = self.after_space(at)
            match = self.closing(end)
            if match is None:
                self._ends_of_runs[at] = end
                break
            at = match.end()
        end = self._ends_of_runs[at]
        self._ends_of_runs.update(dict.fromkeys(passed, end))
        return end
