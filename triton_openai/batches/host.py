"""What batches need of the service that answers their lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from triton_openai.access.rate_limits import Reservation
from triton_openai.config.tree import BatchesSettings
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, BatchUsage


class Outcome(NamedTuple):
    """The answer to a line."""

    status: int
    #: JSON.
    body: bytes
    request_id: str = ""
    #: The reason for an answer without a result.
    error: ServiceError | None = None
    usage: BatchUsage = BatchUsage()


class Host(Protocol):
    """
    The service that answers the lines. It is a protocol because the operations of the API are above batches.

    It has more than 20 methods because it is all that batches need of the service.
    """

    @property
    def settings(self) -> BatchesSettings:
        """The current settings."""

    @property
    def stopping(self) -> bool:
        """Whether the service stops, so that no line may start."""

    @property
    def max_running(self) -> int:
        """How many lines of one model may run at one Triton, over all processes."""

    @property
    def share(self) -> float:
        """The part of the lines of this machine that this process runs."""

    def tritons(self, target: str) -> int:
        """Return how many Tritons have a Triton model."""

    def slots_of(self, target: str) -> str:
        """Return the name under which all processes with the same Tritons share the slots of a Triton model."""

    def endpoints(self, target: str) -> Sequence[str]:
        """Return the names of the Tritons to which :meth:`answer` can send lines for a Triton model; none for one."""

    def metrics_urls(self, target: str) -> Mapping[str, str]:
        """Return where the Tritons with a model may have metrics, by the names of :meth:`endpoints`."""

    def queue_models(self, target: str) -> Sequence[str]:
        """Return a Triton model and the steps of it, which may have queues of their own."""

    @property
    def max_line_size(self) -> int:
        """The bytes that a line may have."""

    def problem(self, batch: Batch) -> BatchError | None:
        """Return the reason why *batch* may not run any more: its key has lost a right that its lines need."""

    def check_line(self, line: bytes) -> None:
        """Raise :class:`InvalidRequest` for a line that exceeds the limits of a request's JSON. Runs in a thread."""

    def body_checker(self, batch: Batch) -> Callable[[bytes], None]:
        """
        Return a function that raises :class:`InvalidRequest` for a body with parameters of wrong types.

        It checks bodies of requests to the endpoint of *batch*, as live requests are checked, and runs in a thread.
        """

    def input_tokens(self, body: bytes) -> int:
        """Return about how many input tokens the request *body* has. Runs in a thread."""

    def max_enqueued_tokens(self, model: str) -> tuple[str, int] | None:
        """Return the Triton model behind *model* and the most input tokens of a key for it; ``None`` for any number."""

    async def check(self, batch: Batch, model: str, *, brings_template: bool) -> str:
        """
        Check that lines of *batch* may ask *model*, and return the name with which :meth:`target` finds it.

        *brings_template* is for lines with a chat template of their own. Raises :class:`InvalidRequest` or
        :class:`ConfigurationError` if they may not, and :class:`UpstreamUnavailable` if that is not known now.
        """

    def target(self, model: str) -> str | None:
        """Return the Triton model behind the name *model*; ``None`` while it is not served."""

    def live(self, target: str) -> int | None:
        """Return how many live requests for *target* run in this process; ``None`` if none came for a minute."""

    def capacity(self, target: str) -> float:
        """Return how many requests for *target* the settings allow this process; infinity if they do not say that."""

    def has_room(self, target: str, running: int) -> bool:
        """Return whether live requests for *target* leave room for another line while *running* lines run."""

    async def probe(self, batch: Batch, model: str) -> None:
        """
        Refresh the list of models, and send *model* the smallest request, with the key of *batch*.

        Raises :class:`ServiceError` if it is not answered.
        """

    async def admit(self, owner: str) -> Reservation | None:
        """
        Count a line of *owner* against the limits of its key; return ``None`` for a key without limits.

        The line may not start if the reservation has a refusal. Raises :class:`ServiceError` if the limits cannot be
        checked.
        """

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        """Return the answer to a line, from the Triton called *endpoint* if possible, and close its *reservation*."""

    def refusal(self, batch: Batch, error: ServiceError) -> Outcome:
        """Return *error* as the answer to a line."""
