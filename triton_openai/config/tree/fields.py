"""
The kinds of fields that settings have.

What cannot be derived from a field is in the ``extra`` of its ``Meta``. The ``extra`` of a group counts for all
settings of the group:

``name``
    The flag's name, where the field's own name would be too short; of a group, what its flags begin with (``prefix``).
``metavar``
    What the help shows for the value.
``form``
    What an error message says that a text should be, in place of the pattern that it has to match.
``common``
    ``serve --help`` shows the flag; ``serve --help-all`` shows every flag.
``file_only``
    No flag and no environment variable: the setting is in the YAML file only. Most settings belong there; a flag is for
    what people set in a shell or in a container's arguments.
``verbatim``
    The value is a text in which commas and equals signs mean nothing.
``secret``
    Error messages do not repeat the value.
``live``
    A running service takes a new value over (see ``reload``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta


class SettingsGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all groups of settings: immutable, and without unknown fields."""


def flag(text: str, **extra: Any) -> Meta:
    """Explain a setting that has a flag and a variable."""
    return Meta(description=text, extra=extra)


def common_flag(text: str, **extra: Any) -> Meta:
    """Explain a setting whose flag the short help shows."""
    return flag(text, common=True, **extra)


def file_only(text: str, **extra: Any) -> Meta:
    """Explain a setting of the YAML file."""
    return flag(text, file_only=True, **extra)


#: What a setting that names something can also be: found by the service itself, or nothing.
AUTO = "auto"
NONE = "none"

SECONDS = {"metavar": "SECONDS"}
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra=SECONDS)]
Bytes = Annotated[int, Meta(ge=1024, extra={"metavar": "BYTES"})]
Tokens = Annotated[int, Meta(ge=1, extra={"metavar": "TOKENS"})]
Count = Annotated[int, Meta(ge=1, extra={"metavar": "N"})]
Characters = Annotated[int, Meta(ge=1)]
Days = Annotated[float, Meta(gt=0, le=3650, extra={"metavar": "DAYS"})]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Text = Annotated[str, Meta(min_length=1)]
File = Annotated[Path | None, Meta(extra={"metavar": "FILE"})]
Folders = Annotated[tuple[Path, ...], Meta(extra={"metavar": "DIR"})]
