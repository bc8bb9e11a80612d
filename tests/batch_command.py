"""Command lines of ``triton-openai batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_openai.cli.arguments import parse as parse_command
from triton_openai.cli.batch import BATCH
from triton_openai.cli.batch.arguments import BatchOptions, batch_options


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> BatchOptions:
    """Return the options of a command line, which begins with the action. Raises :class:`ConfigurationError`."""
    return batch_options(parse_command([BATCH.name, *arguments]).options, environ)
