"""Renders a turn as the events of a Responses stream, and makes the response of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec
from msgspec import UNSET, UnsetType

from triton_openai.answer.run import Run
from triton_openai.api.bodies import encode_each, now
from triton_openai.api.logprobs import chat_logprobs
from triton_openai.api.responses import objects
from triton_openai.api.responses.item_renderer import ItemRenderer, response_event
from triton_openai.api.responses.request_reader import ToolName
from triton_openai.api.sse import SERVER_SENT, EventRenderer, Framing
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, Overloaded, ServiceError
from triton_openai.generation import Delta, FinishReason
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content
from triton_openai.telemetry.request_record import RequestRecord

# The codes by which clients decide whether to try again; of several that fit, the first.
_CODES: Mapping[type[ServiceError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
    InvalidRequest: "invalid_prompt",
}


@dataclass
class ResponseEvents(EventRenderer):
    """The events of one response, which has one run."""

    #: It grows with the answer, and is whole once :meth:`concluded` or :meth:`cancelled` was called.
    response: objects.ResponseObject
    run: Run
    #: Reads the text.
    parser: AnswerParser
    _: KW_ONLY
    #: How the client calls its tools.
    names: Mapping[str, ToolName]
    #: Whether reasoning items have their ``encrypted_content``.
    sealed: bool
    #: Whether it is tool calls and nothing else.
    forced: bool = False
    #: The call, whose first and last event have what the headers of an answer over HTTP say; ``None``: over HTTP.
    record: RequestRecord | None = None
    #: Keeps the response before its last event is sent.
    keep: Callable[[], Awaitable[None]] | None = None
    framing: Framing = SERVER_SENT

    def __post_init__(self) -> None:
        self._items = ItemRenderer(self.response, names=self.names, sealed=self.sealed, framing=self.framing)
        self._opened = False
        self._queued = False
        # The opening events have the first numbers, though they may be rendered after the first text.
        self._items.next_number = 2
        # The items before the answer.
        self._first = 0
        # The summary, until its events are sent.
        self._compaction: objects.OutputCompaction | None = None

    def queued(self) -> bytes:
        """Return the first events of a response that waits for its turn in the background; the opening follows."""
        self._queued = True
        return self._begun("response.created", 0) + self._begun("response.queued", 1)

    def opening(self) -> bytes:
        """Return the events that open the response, each once; that with the summary comes when it is made."""
        if self._opened:
            return self._compacted()
        self._opened = True
        if self._queued:
            self.response.status = "in_progress"
            self._items.next_number += 1
            begun = self._begun("response.in_progress", 2)
        else:
            begun = self._begun("response.created", 0) + self._begun("response.in_progress", 1)
        return begun + self._compacted()

    def _compacted(self) -> bytes:
        """Return the events of the summary, once, if there is one."""
        item = self._compaction
        if item is None:
            return b""
        self._compaction = None
        number = self._items.next_number
        self._items.next_number += 3
        added = response_event("response.output_item.added", number, self.framing, output_index=0, item=item)
        event = response_event(
            "response.compaction.compacting", number + 1, self.framing, output_index=0, item_id=item.id
        )
        done = response_event("response.output_item.done", number + 2, self.framing, output_index=0, item=item)
        return added + event + done

    def go_on(self, run: Run, parser: AnswerParser, compaction: objects.OutputCompaction | None) -> None:
        """
        Take the run that answers and the parser of its text, where they were made after the first events.

        *compaction* is the summary that they go on from: the first item. :meth:`opening` then returns its events.
        """
        self.run = run
        self.parser = parser
        if compaction is None or self._first:
            return
        compaction.id = f"cmp_{self.response.id.partition('_')[2]}0000"
        self._items.add(compaction)
        self._first = self._items.count
        self._compaction = compaction

    def keep_alive(self) -> bytes:
        """Return the opening events, then an event that changes nothing: comments do not reset clients' timers."""
        events = self.opening()
        if events:
            return events
        self._items.next_number += 1
        return self._begun("response.in_progress", self._items.next_number - 1)

    def _begun(self, name: str, number: int) -> bytes:
        """Return an event with the response as it began; the other events have the rest."""
        status: objects.ResponseStatus = "in_progress"
        if self._queued and not self._opened:
            status = "queued"
        begun = msgspec.structs.replace(self.response, status=status, error=None, output=())
        if self.record is None or name != "response.created":
            return response_event(name, number, self.framing, response=begun)
        return response_event(name, number, self.framing, response=begun, headers=self.record.answer_headers())

    def piece(self, choice: int, delta: Delta) -> bytes:
        if self.parser.plain and type(self._items.item) is objects.OutputMessage and not delta.logprobs:
            return self._items.text(delta.text)
        if delta.logprobs:
            entries = encode_each(chat_logprobs(delta.logprobs).content)
        else:
            entries = []
        events = self.parser.feed(delta.text, delta.tokens)
        if (
            len(events) == 1
            and type(events[0]) is Content
            and type(self._items.item) is objects.OutputMessage
            and not entries
        ):
            return self._items.text(events[0].text)
        return self._items.parsed(events, entries)

    def last(self, choice: int) -> bytes:
        """Return the text that the parser delayed, and the end of the last item."""
        events = self._items.parsed(self.parser.flush(cut=self.run.progress.cut), [])
        if self._items.count == self._first and not self.forced:
            # An empty answer is a message too. A forced call that is cut before its name is nothing.
            events += self._items.begin(objects.OutputMessage)
        cut = self.run.progress.finish_reason is FinishReason.LENGTH
        if isinstance(self._items.item, objects.OutputFunctionCall | objects.OutputCustomCall):
            cut = self.parser.cut
        if cut:
            return events + self._items.close("incomplete")
        return events + self._items.close("completed")

    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the last events, after the response that they have was stored."""
        events = self.concluded(error)
        if self.keep is not None:
            # The response says whether it is stored.
            await self.keep()
        param = None
        if error is not None:
            param = error.param
        headers: Mapping[str, str] | UnsetType = UNSET
        if self.record is not None:
            headers = self.record.answer_headers(error)
        number = self._items.next_number
        return events + terminal_events(self.response, number, param, framing=self.framing, headers=headers)

    def concluded(self, error: ServiceError | None) -> bytes:
        """Set how the response ended, by *error* if there is one; return the events before the last ones."""
        response = self.response
        if error is not None:
            events = self.opening() + self._items.close("incomplete")
            response.status = "failed"
            response.error = _failure(error)
            return events
        response.status = "completed"
        broken = self.parser.cut and not self.run.progress.cut
        if self.run.progress.finish_reason is FinishReason.LENGTH or broken:
            response.status = "incomplete"
            response.incomplete_details = objects.IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = now()
        response.usage = self._usage()
        return b""

    def cancelled(self) -> bytes:
        """Make the response a cancelled one, which keeps what it has; return the end of the open item."""
        self.response.status = "cancelled"
        return self._items.close("incomplete")

    def _usage(self) -> objects.ResponseUsage:
        usage = self.run.progress.usage or self.run.progress.usage_estimate
        made = usage.completion_tokens
        reasoning = min(self.parser.reasoning_tokens, made)
        return objects.ResponseUsage.of(usage.prompt_tokens, made, cached=usage.cached_tokens or 0, reasoning=reasoning)


def _failure(error: ServiceError) -> objects.ResponseFailure:
    if error.code == "service_stopping":
        # As if the process had been killed.
        return objects.INTERRUPTED
    if error.status == 503:
        unknown = "server_is_overloaded"
    else:
        unknown = "server_error"
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return objects.ResponseFailure(code, error.message)
    return objects.ResponseFailure(unknown, error.message)


def terminal_events(
    response: objects.ResponseObject,
    number: int,
    param: str | None = None,
    *,
    framing: Framing = SERVER_SENT,
    headers: Mapping[str, str] | UnsetType = UNSET,
) -> bytes:
    """
    Return what every stream of *response* ends with, from event *number* on; *param* is what a failure blames.

    Over a WebSocket the last event has the *headers* of an answer over HTTP.
    For a cancelled response that is ``response.cancelled``, which OpenAI names for webhooks only.
    """
    rendered = b""
    failure = response.error
    if failure is not None:
        # Some clients read only the one, some only the other.
        rendered = response_event("error", number, framing, code=failure.code, message=failure.message, param=param)
        number += 1
    return rendered + response_event(f"response.{response.status}", number, framing, response=response, headers=headers)
