"""Tables for terminals: aligned columns, and colours where they are shown and wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from triton_openai.config.terminal import shows_colours

_BOLD = "1"
_GREEN = "32"
_YELLOW = "33"
_RED = "31"
# By the content of a cell.
_COLOURS = {"yes": _GREEN, "ready": _GREEN, "loading": _YELLOW, "no": _RED}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines with aligned columns; a column that is empty in every row is left out."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    head_line, *lines = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in zip(*columns, strict=True)
    ]
    head_line = [_painted(cell, _BOLD) for cell in head_line]
    lines = [[_painted(cell, _colour(cell.strip())) for cell in line] for line in lines]
    return ["  " + "  ".join(line).rstrip() for line in (head_line, *lines)]


def problems(lines: Sequence[str]) -> list[str]:
    """Return *lines* as a part of their own, indented, in red; nothing where there are none."""
    if lines:
        return ["", *(_painted(f"  {line}", _RED) for line in lines)]
    return []


def _colour(text: str) -> str | None:
    if text.startswith("not "):
        return _YELLOW
    return _COLOURS.get(text)


def _painted(text: str, colour: str | None) -> str:
    """Return *text* in *colour* where stdout shows colours."""
    if colour is not None and shows_colours(sys.stdout):
        return f"\033[{colour}m{text}\033[0m"
    return text
