"""How numbers are written."""

from __future__ import annotations

from collections.abc import Sequence


def written(value: float | None, digits: int = 1) -> str:
    """Return a number for the table, a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"


def ratio(value: float | None, base: float | None) -> float | None:
    """Return *value* / *base* where both are known and the base is not zero."""
    if value is not None and base:
        return value / base
    return None


def table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return rows under a header: the first *texts* columns to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *rows]
    )
