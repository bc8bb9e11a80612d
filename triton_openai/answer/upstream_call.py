"""
One request to Triton and its answer: lease, stream, attempts at other Tritons, stop request, trace and LoRA weights.

Generations, jobs, transcriptions and speech all reach Triton through an :class:`UpstreamCall`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from time import monotonic

import msgspec
import structlog
from msgspec.structs import replace

from triton_openai.errors import InvalidRequest, Overloaded, ServiceError, UpstreamTimeout, UpstreamUnavailable
from triton_openai.generation import AnswerState, Lora
from triton_openai.models.lora.delivery import LoraAnswers, LoraDeliveries
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.client import (
    OnResponses,
    Receiver,
    ResponseCollector,
    ResponseStream,
    SingleAnswer,
    all_responses,
)
from triton_openai.triton.leasing import Attempts, lost_error
from triton_openai.triton.member import Lease
from triton_openai.triton.route import Route
from triton_openai.triton.sequence import LiveSequence, Parts, SequenceAnswers, WholeSequence
from triton_openai.triton.status import failed_midway_error, no_answer_error
from triton_openai.triton.tensors import InferRequest, InferResponse

_log = structlog.get_logger(__name__)

_STOP_REQUEST_TIMEOUT = 5.0
# The seconds before each stop request. An engine ignores one that arrives before the request itself, which may still
# wait for its tokenizer.
_STOP_DELAYS = (0.0, 1.0, 1.0)


class UpstreamClient(msgspec.Struct, frozen=True):
    """How Triton is called for one request of a client."""

    route: Route
    #: Traces the calls.
    tracer: CallTracer
    #: Runs stop requests, whose answers are not awaited.
    background: Background
    #: The priority of jobs in the model's queue, 0 for the default. Generations have a priority of their own.
    priority: int = 0

    async def ask(self, request: InferRequest, on_responses: OnResponses | None = None) -> Sequence[InferResponse]:
        """
        Return all responses to *request*, and to the rest of its sequence. Raises :class:`ServiceError`.

        *on_responses* gets the responses so far whenever further ones arrive. If the request is sent to another Triton,
        they begin again.
        """
        if self.priority:
            request = replace(request, priority=self.priority)
        return await _CollectedCall(self, request, on_responses).result()

    async def ask_live(
        self, sequence: LiveSequence, on_responses: OnResponses | None = None
    ) -> Sequence[InferResponse]:
        """Return all responses to a *sequence* that is still being made, once it has ended. See :meth:`ask`."""
        first = await sequence.get(0)
        assert first is not None, "a sequence has a part"
        return await _CollectedCall(self, first, on_responses, sequence).result()


class CallProgress(msgspec.Struct, eq=False):
    """The progress of a call that is no generation; see :class:`triton_openai.generation.AnswerState`."""

    #: The number of responses.
    steps: int = 0
    #: Times of :func:`time.monotonic`. The one of the first token stays ``None``: there are no tokens.
    sent: float | None = None
    first: float | None = None
    ended: float | None = None
    error: ServiceError | None = None
    #: Whether the service stopped it before its end.
    cancelled: bool = False


class UpstreamCall:
    """
    One request to Triton. If it fails before its answer begins, another Triton gets it.

    A subclass encodes the request and takes the responses: it implements :meth:`_encode`, :meth:`receive` and
    :meth:`_ended`. The transport calls :meth:`receive` and :meth:`end` as those of a
    :class:`triton_openai.triton.client.Receiver`. *prompt* is what the choice of the Triton may depend on;
    *lora_deliveries* send the weights of *lora* where requests have to. Whoever calls :meth:`_send` must call
    :meth:`_release`.
    """

    #: Whether another Triton may be asked although a part of the answer has arrived: none of it was passed on.
    _repeatable = False

    def __init__(
        self,
        upstream: UpstreamClient,
        progress: AnswerState | CallProgress,
        *,
        prompt: str | None = None,
        lora: Lora | None = None,
        lora_deliveries: LoraDeliveries | None = None,
    ) -> None:
        self.progress = progress
        self._upstream = upstream
        self._prompt = prompt
        self._lora = lora
        self._lora_deliveries = lora_deliveries
        previous = upstream.route.previous_attempts
        if previous is None:
            self._attempts = Attempts()
        else:
            self._attempts = copy(previous)
        self._model = ""
        # Both are set while the backend works.
        self._lease: Lease | None = None
        self._stream: ResponseStream | None = None
        self._pauses = 0

    # For subclasses

    def _encode(self, lora: Lora | None) -> InferRequest:
        """Return the request, with the LoRA adapter *lora* if it has one. Raises :class:`ServiceError`."""
        raise NotImplementedError

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together."""
        raise NotImplementedError

    def _ended(self, error: Exception | None) -> None:
        """
        Take the end of the answer, and release the call. *error* is how the request failed at the last Triton.

        The backend's work has been stopped.
        """
        raise NotImplementedError

    def _restart(self) -> Receiver | None:
        """Forget the answer so far: another Triton gets the request. Returns the receiver, as :meth:`_send` has it."""
        return None

    def _stop_request(self) -> InferRequest | None:
        """Return the request that stops the work, for a backend that does not notice a cancellation."""
        return None

    def _parts(self, request: InferRequest) -> Parts | None:
        """Return the parts of the sequence that *request* begins, if it does."""
        if request.following:
            return WholeSequence([request, *request.following])
        return None

    # The lease and the stream

    def _send(self, receiver: Receiver | None = None) -> None:
        """
        Send the request to a Triton that has not had it. Raises :class:`ServiceError`.

        *receiver* gets the responses first, and passes on what it makes of them.
        """
        lease = self._upstream.route.lease(self._attempts, prompt=self._prompt)
        self._lease = lease
        if lease.counted:
            lease.lost = self._lost
            self._attempts.append(lease.endpoint)
        try:
            if self._lora_deliveries is not None:
                delivery = self._lora_deliveries.at(lease.endpoint)
                self._stream = LoraAnswers(delivery, self._open, receiver or self)
            else:
                self._stream = self._open(self._lora, receiver or self)
        except BaseException as error:
            self._release(error)
            raise
        if self._pauses:
            self._stream.pause()

    def _open(self, lora: Lora | None, receiver: Receiver) -> ResponseStream:
        """Open the stream of the answer. Raises :class:`ServiceError`."""
        lease = self._lease
        assert lease is not None, "it lasts as long as the request"
        progress = self.progress
        request = self._encode(lora)
        self._model = request.model
        lora_name = None
        if lora is not None:
            lora_name = lora.name
        request = self._upstream.tracer.begin(request, progress, lease, lora=lora_name)
        if progress.sent is None:
            # The time counts from the first attempt.
            progress.sent = monotonic()
        if request.stream:
            return lease.client.stream(request, receiver)
        parts = self._parts(request)
        if parts is not None:
            return SequenceAnswers(lease.client, request, receiver, self._upstream.background, parts)
        return SingleAnswer(lease.client, request, receiver)

    def end(self, error: Exception | None) -> None:
        """Take the end of the stream; *error* is what the backend or the transport reported."""
        if self._lease is None:
            return
        progress = self.progress
        if error is None and not progress.steps:
            error = no_answer_error(self._model)
        elif isinstance(error, InvalidRequest) and progress.steps:
            midway = failed_midway_error(error)
            # Its traceback would keep the request in a reference cycle.
            midway.__cause__ = error.with_traceback(None)
            error = midway
        if error is None or (isinstance(error, UpstreamUnavailable) and not progress.steps):
            # The backend has no work to stop: it has ended, or has not received the request.
            self._stream = None
        if error is not None:
            if self._retry(error):
                return
            self._stop()
        self._ended(error)

    def pause(self) -> None:
        """Pause the backend, until :meth:`resume` was called as often."""
        self._pauses += 1
        if self._stream is not None:
            self._stream.pause()

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        self._pauses -= 1
        if not self._pauses and self._stream is not None:
            self._stream.resume()

    # Failures and the end

    def _retry(self, error: Exception) -> bool:
        """
        Send the request, which failed with *error*, to another Triton, and return whether it was sent.

        If that fails, the call ends with *error*: it says more than that no other Triton takes the request.
        """
        lease = self._lease
        progress = self.progress
        if lease is None or (progress.steps and not self._repeatable):
            return False
        if not self._upstream.route.may_retry(lease, error, self._attempts):
            return False
        if isinstance(error, (UpstreamUnavailable, Overloaded)):
            # The model has not received the request.
            self._stream = None
        self._stop(silent=True)
        self._release(error)
        try:
            self._send(self._restart())
        except ServiceError:
            return False
        progress.error = None
        progress.ended = None
        return True

    def _fail(self, error: Exception) -> None:
        """Give up a Triton that is silent: ask another one, or end with *error*."""
        if not self._retry(error):
            self._stop(silent=True)
            self._ended(error)

    def _lost(self, final: bool) -> None:
        """Leave a Triton that does not answer any more. Without another one, wait for it unless this is *final*."""
        error = lost_error()
        if self._retry(error):
            return
        if final or not self._upstream.route.resends_lost or self._lease is None:
            self._stop()
            self._ended(error)

    def _stop(self, *, silent: bool = False) -> None:
        """Stop the backend's work, if it is running; *silent* is whether it sent nothing for too long."""
        stream = self._stream
        self._stream = None
        if stream is None:
            return
        stream.close(silent=silent)
        request = self._stop_request()
        lease = self._lease
        if request is None or lease is None:
            return
        delays: Sequence[float] = _STOP_DELAYS
        if self.progress.steps:
            # A backend that has answered has certainly received the request.
            delays = delays[:1]
        work = _send_stop(self._upstream.tracer, lease, request, delays)
        self._upstream.background.start(work, timeout=_STOP_REQUEST_TIMEOUT)

    def _release(self, error: BaseException | None) -> None:
        """End the lease, and record how the request ended. Further calls only record it again."""
        progress = self.progress
        if isinstance(error, ServiceError):
            progress.error = error
        progress.ended = monotonic()
        lease = self._lease
        self._lease = None
        if lease is not None and lease.counted:
            failure = None
            if isinstance(error, Exception):
                failure = error
            lease.close(failure, answered=progress.steps > 0)

    def _abort(self, error: BaseException | None) -> None:
        """Stop the backend's work before its end, and end the lease."""
        self.progress.cancelled = True
        self._stop()
        self._release(error)


class _CollectedCall(UpstreamCall):
    """A call whose responses are returned together. *live* is the sequence that the request begins, if it does."""

    _repeatable = True

    def __init__(
        self,
        upstream: UpstreamClient,
        request: InferRequest,
        on_responses: OnResponses | None,
        live: LiveSequence | None = None,
    ) -> None:
        super().__init__(upstream, CallProgress())
        self._request = request
        self._live = live
        self._collector = ResponseCollector(on_responses, request.max_answer)

    async def result(self) -> Sequence[InferResponse]:
        """Return all responses. Raises :class:`ServiceError`."""
        self._send()
        try:
            return await self._collector.responses()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            # Breaks a reference cycle: an error's traceback has this frame.
            self.progress = CallProgress()

    def _encode(self, lora: Lora | None) -> InferRequest:
        return self._request

    def _parts(self, request: InferRequest) -> Parts | None:
        return self._live or super()._parts(request)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        self.progress.steps += len(responses)
        if self._live is not None:
            self._repeatable = self._live.complete
        self._collector.receive(responses)

    def _ended(self, error: Exception | None) -> None:
        self._release(error)
        self._collector.end(error)

    def _restart(self) -> Receiver | None:
        self.progress.steps = 0
        self._collector.clear()
        return None


def silence_error(what: str, seconds: float, cause: str = "") -> UpstreamTimeout:
    """Return the error for a model that sent no *what* for so many *seconds*; *cause* is a sentence about why."""
    return UpstreamTimeout(f"The model sent no {what} for {seconds:g} seconds.{cause}", code="upstream_silent")


async def _send_stop(tracer: CallTracer, lease: Lease, request: InferRequest, delays: Sequence[float]) -> None:
    for delay in delays:
        await asyncio.sleep(delay)
        try:
            with tracer.call(request, lease) as sent:
                await all_responses(lease.client, sent)
        except ServiceError as error:
            # A model that is not decoupled cannot answer a stop request, but obeys it.
            _log.debug("stop request failed", model=request.model, reason=error.reason)
