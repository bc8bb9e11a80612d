"""Parsers of command lines: their errors, values of options that are no settings, and commands without settings."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from triton_openai.errors import ConfigurationError


class CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in one sentence, like other wrong settings, without the usage."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        #: The names and keywords of every argument, for completion.
        self.arguments: list[tuple[Sequence[str], Mapping[str, Any]]] = []
        super().__init__(*arguments, **keywords)

    def add_argument(self, *names: Any, **keywords: Any) -> argparse.Action:
        """Add an argument, as the base class does."""
        self.arguments.append((names, keywords))
        return super().add_argument(*names, **keywords)

    def add_to(self, group: Any, *names: Any, **keywords: Any) -> None:
        """Add an argument in a *group* of the help."""
        self.arguments.append((names, keywords))
        group.add_argument(*names, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`ConfigurationError`."""
        raise ConfigurationError(f"{message[0].upper()}{message[1:].rstrip('.')}. See {self.prog} --help.")


class OwnCommand(msgspec.Struct, frozen=True):
    """A command that reads no settings, but options of its own."""

    name: str
    purpose: str
    add_options: Callable[[CommandParser], None]
    #: Gets the options by their names, and returns the exit status.
    run: Callable[[Mapping[str, Any]], int]


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
