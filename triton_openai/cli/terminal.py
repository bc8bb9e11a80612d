"""What terminals show: tables with aligned columns, and colours where the user wants them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_BOLD = "1"
_GREEN = "32"
_YELLOW = "33"
_RED = "31"
# By the content of a cell.
_COLOURS = {"yes": _GREEN, "ready": _GREEN, "loading": _YELLOW, "no": _RED}


def shows_colours(stream: object) -> bool:
    """
    Return whether to write colours to *stream*, which may be None: to a terminal, unless its user wants none.

    Source: https://no-color.org, and the terminal type ``dumb``.
    """
    is_terminal = getattr(stream, "isatty", None)
    if is_terminal is None or not is_terminal():
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = sys.maxsize) -> list[str]:
    """
    Return indented lines with aligned columns; a column that is empty in every row is left out.

    The first *texts* columns are aligned to the left, and the others, of numbers, to the right.
    """
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    aligned = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        if number < texts:
            aligned.append([cell.ljust(width) for cell in column])
        else:
            aligned.append([cell.rjust(width) for cell in column])
    lines = []
    for number, cells in enumerate(zip(*aligned, strict=True)):
        if number == 0:
            painted = [_painted(cell, _BOLD) for cell in cells]
        else:
            painted = [_painted(cell, _colour(cell.strip())) for cell in cells]
        lines.append("  " + "  ".join(painted).rstrip())
    return lines


def problems(lines: Sequence[str]) -> list[str]:
    """Return an empty line and *lines*, indented and in red; nothing if there are no lines."""
    if not lines:
        return []
    return ["", *[_painted(f"  {line}", _RED) for line in lines]]


def _colour(text: str) -> str | None:
    if text.startswith("not "):
        return _YELLOW
    return _COLOURS.get(text)


def _painted(text: str, colour: str | None) -> str:
    """Return *text* in *colour* where stdout shows colours."""
    if colour is not None and shows_colours(sys.stdout):
        return f"\033[{colour}m{text}\033[0m"
    return text
