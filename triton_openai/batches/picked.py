"""A line that was picked to start."""

from __future__ import annotations

from typing import NamedTuple

from triton_openai.batches.line_limits import Limit
from triton_openai.storage.batch_records import Line


class PickedLine(NamedTuple):
    """A line that was picked to start, and the limit that counts it."""

    line: Line
    limit: Limit
