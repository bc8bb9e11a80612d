"""The parser of a command line, and commands that have options of their own in place of settings."""

from __future__ import annotations

import argparse
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
