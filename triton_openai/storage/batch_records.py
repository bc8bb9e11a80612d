"""What the tables of batches hold: files, batches, lines and results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

#: The states of a line with a result. One that waits has 0, and one that runs has 1: if its batch ends, it never ran.
SUCCEEDED = 2
FAILED = 3

# Lines that ran together when a process or a Triton ended run again in groups of this part of their number.
_GROUP_DIVISOR = 8

#: The statuses of batches that have ended.
FinalStatus: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]
Status: TypeAlias = Literal["validating", "in_progress", "finalizing", "cancelling"] | FinalStatus

#: The statuses of batches that have not ended.
OPEN: Sequence[Status] = ("validating", "in_progress", "finalizing", "cancelling")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file without its contents. Times are Unix times."""

    id: str
    owner: str
    #: Set when the upload is complete.
    purpose: str = ""
    #: The client's name for it, which is not a path.
    filename: str = ""
    bytes: int
    created: float
    expires: float | None = None
    state: Literal["uploading", "processed"] = "processed"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a batch, or of a line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchUsage(msgspec.Struct):
    """The tokens of the lines that succeeded."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: BatchUsage) -> None:
        """Add the tokens of *other*."""
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.reasoning_tokens += other.reasoning_tokens


class Batch(msgspec.Struct, kw_only=True):
    """
    A batch, as the table stores it in JSON: the names of fields must not change.

    Times are Unix times, by their names in OpenAI's API, such as ``in_progress_at``.
    """

    id: str
    owner: str
    kind: Literal["openai", "anthropic"]
    endpoint: str
    #: The id of a file, or that of the batch itself.
    input: str
    created: float
    window: str
    expires: float
    status: Status = "validating"
    #: The status at its end, once that is decided.
    outcome: FinalStatus | Literal[""] = ""
    times: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    #: The ``traceparent`` of the request that created it, if that was traced.
    trace: str = ""
    #: By restricted group: the proof that the request that created it was allowed to use the group.
    opened: dict[str, str] = {}
    #: Seconds for which its files are kept; ``None`` for the default.
    output_seconds: int | None = None
    #: The model of all lines, if they have the same.
    model: str | None = None
    problems: list[BatchError] = []
    output: str | None = None
    errors: str | None = None
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Lines that succeeded although a process or a Triton had ended while they ran alone.
    exonerated: int = 0
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    #: The input tokens of all lines by Triton model, about, for models with a limit of them.
    enqueued: dict[str, int] = {}
    #: Counts the claims of the batch.
    generation: int = 0
    #: The number of its last part.
    parts: int = 0

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.status in OPEN

    @property
    def unfinished(self) -> int:
        """The number of lines that have no result."""
        return self.total - self.succeeded - self.failed

    def set_status(self, status: Status) -> None:
        """Change the status, and note the time."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())


class Line(NamedTuple):
    """A line of an input: its bytes there, its model, and a number that lines with the same beginning share."""

    number: int
    offset: int
    length: int
    model: str
    prefix: int
    #: How often a process of the service ended while the line ran alone.
    process_deaths: int = 0
    #: How often a Triton ended while the line ran alone.
    triton_deaths: int = 0
    #: The number of lines that may run at the same time as this one, itself included; 0 for any number. A line that
    #: ran when a process or a Triton ended is quarantined: it has such a limit.
    max_group: int = 0

    @property
    def deaths(self) -> int:
        """How often a process or a Triton ended while the line ran alone."""
        return self.process_deaths + self.triton_deaths


def next_group(size: int) -> int:
    """Return the largest group in which lines run again, after something ended that ran *size* lines together."""
    return max(1, size // _GROUP_DIVISOR)


class Part(NamedTuple):
    """
    A part of a batch: lines that one process has claimed, and a file with their results.

    A process has one part of a batch at a time. A number is never used again.
    """

    batch: str
    number: int


class Done(NamedTuple):
    """A line that has ended: the bytes of its result in the file of its part, and its usage."""

    number: int
    state: int
    offset: int
    length: int
    usage: BatchUsage
    #: Whether it succeeded although something had ended while it ran alone.
    exonerated: bool = False


class Result(NamedTuple):
    """The bytes of the result of a line in a part."""

    number: int
    state: int
    part: int
    offset: int
    length: int


class LeaseLost(Exception):
    """Another process has claimed the batch or the lines of the part, or the batch has ended."""
