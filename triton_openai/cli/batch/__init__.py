"""``triton-openai batch``: sends a file of prompts to a service and writes a file of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_openai.cli.batch.arguments import add_options
from triton_openai.cli.parser import OwnCommand


def _run(options: Mapping[str, Any]) -> int:
    # Imported only when needed, so that the help of all commands is fast.
    from triton_openai.cli.batch.command import run

    return run(options)


BATCH = OwnCommand(
    "batch",
    "Send a file of prompts to a service, as a batch or as live requests, and write a file of answers.",
    add_options,
    _run,
)
