"""
The spans of requests, made from their records.

One span for a request, from when it came to when its last byte had left; under it one for each stage of the work, one
for the time in the queue, and one for each request to Triton, whose ids are what Triton's own spans are put under. Only
the first and the last kind exist while the work goes on: the rest is made when it has ended, from the times that the
record holds, and nothing happens per token.

Nothing imports this module unless traces are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_openai.errors import ServiceError
from triton_openai.telemetry.observation import Observation, Observer, Stage
from triton_openai.telemetry.propagation import trace_context
from triton_openai.telemetry.span_attributes import (
    CANCELLED,
    call_attributes,
    content_attributes,
    error_type,
    head_attributes,
    name_of,
    request_attributes,
    response_attributes,
)
from triton_openai.telemetry.upstream import Answer, Upstream
from triton_openai.triton.tensors import InferRequest

#: The event on the span of a request to Triton.
FIRST_TOKEN = "first_token"

_NANOSECONDS = 1_000_000_000
_propagator = TraceContextTextMapPropagator()


class Tracing(Observer):
    """
    Makes the spans of requests with the *tracer* that is set before the first one comes.

    Requests that are not POST ask for no work: they are health checks, lists and metrics, and have no spans. *locate*
    tells to which address of Triton a request goes; *continue_traces* is whether clients may say whose trace it is.
    With *content*, prompts and answers are in the spans, each text cut to so many characters.
    """

    def __init__(
        self,
        locate: Callable[[InferRequest], str] | None = None,
        *,
        continue_traces: bool = True,
        content: int | None = None,
    ) -> None:
        self.tracer: Tracer | None = None
        self._locate = locate
        self._continue_traces = continue_traces
        self._content = content

    def started(self, observation: Observation) -> None:
        """Begin the span, as a part of the client's trace if there is one."""
        if self.tracer is None or observation.method != "POST":
            return
        parent = Context()
        if self._continue_traces:
            # Not the headers themselves: the propagator logs a warning, with its text, for what is no state.
            parent = _propagator.extract(trace_context(observation.headers), parent)
        span = self.tracer.start_span(
            name_of(observation), parent, SpanKind.SERVER, attributes=head_attributes(observation)
        )
        context = span.get_span_context()
        observation.log_fields = {
            **observation.log_fields,
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
        }
        # Triton records whatever has a traceparent: where nothing is recorded here, it gets none.
        if span.is_recording():
            observation.upstream = Trace(self.tracer, span, observation, self._locate)

    def identified(self, observation: Observation) -> None:
        """Name the span."""
        trace = observation.upstream
        if isinstance(trace, Trace):
            trace.span.update_name(name_of(observation))

    def ended(self, observation: Observation) -> None:
        """Make the spans of what was done, and end that of the request."""
        trace = observation.upstream
        if not isinstance(trace, Trace):
            return
        if self._content is not None:
            trace.span.set_attributes(content_attributes(observation, self._content))
        trace.end()


class Trace(Upstream):
    """The *span* of one request, and what comes under it."""

    def __init__(
        self, tracer: Tracer, span: Span, observation: Observation, locate: Callable[[InferRequest], str] | None
    ) -> None:
        super().__init__(observation.upstream.headers)
        self.span = span
        self._tracer = tracer
        self._context = set_span_in_context(span, Context())
        self._observation = observation
        self._locate = locate
        # The record's clock has another zero than that of spans.
        self._zero = time.time_ns() - int(time.monotonic() * _NANOSECONDS)
        self._calls: list[tuple[Span, int, Answer]] = []

    def begin(self, request: InferRequest, answer: Answer, *, lora: str | None = None) -> InferRequest:
        """Begin the span of a request to Triton; it ends with that of the client's request, at the answer's own end."""
        span, sent = self._begin(request, lora)
        self._calls.append((span, time.time_ns(), answer))
        return sent

    @contextmanager
    def call(self, request: InferRequest) -> Iterator[InferRequest]:
        """Make the span of a request to Triton."""
        span, sent = self._begin(request, None)
        try:
            yield sent
        except ServiceError as error:
            _fail(span, error)
            raise
        except BaseException:
            span.set_attribute("error.type", CANCELLED)
            raise
        finally:
            span.end()

    def _begin(self, request: InferRequest, lora: str | None) -> tuple[Span, InferRequest]:
        url = None if self._locate is None else self._locate(request)
        attributes = call_attributes(request, url, lora)
        span = self._tracer.start_span(f"infer {request.model}", self._context, SpanKind.CLIENT, attributes=attributes)
        headers = dict(self.headers)
        _propagator.inject(headers, set_span_in_context(span, self._context))
        return span, self._with(request, headers)

    def end(self) -> None:
        """End every span."""
        observation = self._observation
        for stage in observation.stages:
            self._add(stage)
        for number, (span, began, answer) in enumerate(self._calls):
            again = next((later for _, later, other in self._calls[number + 1 :] if other is answer), None)
            if again is None:
                self._end_call(span, began, answer)
            else:
                # The answer was asked for once more, with the weights that this one lacked.
                span.set_status(Status(StatusCode.ERROR))
                span.end(again)
        span = self.span
        span.set_attributes(request_attributes(observation))
        span.set_attributes(response_attributes(observation))
        error = observation.error
        # The conventions for servers: what the client is to blame for is no error of theirs.
        if error is not None and error.status >= ServiceError.status and not observation.client_left:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _end_call(self, span: Span, began: int, answer: Answer) -> None:
        if answer.first is not None:
            span.add_event(FIRST_TOKEN, timestamp=max(began, self._at(answer.first)))
        if answer.error is not None:
            _fail(span, answer.error)
        elif answer.cancelled:
            span.set_attribute("error.type", CANCELLED)
        # The event loop's clock, from which the answer has its times, may stand still for a moment.
        span.end(None if answer.ended is None else max(began, self._at(answer.ended)))

    def _add(self, stage: Stage) -> None:
        began = self._at(stage.began)
        span = self._tracer.start_span(stage.name, self._context, start_time=began)
        if stage.failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(None if stage.ended is None else self._at(stage.ended))

    def _at(self, moment: float) -> int:
        return self._zero + int(moment * _NANOSECONDS)


def _fail(span: Span, error: ServiceError) -> None:
    span.set_attribute("error.type", error_type(error))
    # For a client of Triton whatever it refuses is an error. Its message stays here: it may quote a prompt.
    span.set_status(Status(StatusCode.ERROR))
