"""Values of options of the command line that are no settings."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Return *text* as a whole number above 0. Raises :class:`argparse.ArgumentTypeError`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: expected a whole number above 0")
    return value


def number(text: str) -> float:
    """Return *text* as a finite number. Raises :class:`argparse.ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: expected a number")
    return value


def seconds(text: str) -> float:
    """Return *text* as a number of seconds above 0. Raises :class:`argparse.ArgumentTypeError`."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: expected a number above 0")
    return value
