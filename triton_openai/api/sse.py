"""
Renders answers as server-sent events: the only place that does.

Events are ``data: <json>`` and an empty line; a line that starts with a colon is a comment, which clients skip; the
stream of a completion ends with ``data: [DONE]``. Lines end with line feeds alone, and clients that read text line by
line find no other character that could end one. A stream that fails ends with an event that is named ``error``, and
without the last chunk of its body, so that no client takes it for whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run import Run
from triton_openai.api.bodies import encode, now
from triton_openai.api.parameters import StreamOptions
from triton_openai.api.usage import UsageObject, usage_object, usage_of
from triton_openai.errors import ServiceError
from triton_openai.operations import Renderer

_FIELD = b"data: "
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
#: A comment, which keeps a connection open while there is no event.
HEARTBEAT = b": keep-alive\n\n"


def data_event(data: bytes) -> bytes:
    """Return an event without a name, with the JSON *data*."""
    return _FIELD + data + _END


class Framing(msgspec.Struct, frozen=True):
    """What stands before and after the JSON of an event that has a name."""

    before: bytes
    after: bytes

    def begin(self, name: str) -> bytes:
        """Return what stands before the JSON of the event *name*."""
        return self.before.replace(b"NAME", name.encode())

    def event(self, name: str, data: bytes) -> bytes:
        """Return the event *name* with the JSON *data*."""
        return b"".join((self.begin(name), data, self.after))


#: Events for HTTP.
SERVER_SENT = Framing(b"event: NAME\ndata: ", _END)
#: Events for a WebSocket: lines of JSON, each of which becomes a frame. JSON has no line feed in it.
JSON_LINES = Framing(b"", b"\n")


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event with a *name*, and the JSON *data*."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def error_event(error: ServiceError) -> bytes:
    """Return the event for *error*: some clients read only its name, some only its data."""
    return event("error", error.envelope())


class EventRenderer(Renderer):
    """Renders server-sent events."""

    def keep_alive(self) -> bytes:
        return HEARTBEAT


class Chunks(EventRenderer):
    """
    Renders OpenAI's chunks, with a choice for each of *runs*.

    The parts that all chunks share are encoded once. *kind* is the name of the chunks' type, and *options* say whether
    usage is wanted, which with *always_usage* every stream has. The fingerprint is in the
    chunk with the usage if there is one, else in the last chunk of each choice, as in vLLM's server.
    """

    has_error_event = False

    def __init__(
        self,
        kind: str,
        spec: GenerationSpec,
        runs: Sequence[Run],
        *,
        model: str,
        fingerprint: str,
        options: StreamOptions | None,
        always_usage: bool,
    ) -> None:
        head = {"id": spec.template.id, "object": kind, "created": now(), "model": model}
        self._head = _FIELD + encode(head)[:-1] + b',"choices":['
        self._runs = runs
        self._n = spec.n
        self._include_usage = always_usage or (options is not None and bool(options.include_usage))
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        # Of each choice the tokens whose text has been sent, or is about to be.
        self._shown = [0] * len(runs)
        self._ids = spec.template.token_ids
        self._fingerprint = b',"system_fingerprint":' + encode(fingerprint)
        #: What follows the choice in most chunks.
        if self._include_usage:
            self._tail = b'],"usage":null}' + _END
        else:
            self._tail = b"]}" + _END

    @abstractmethod
    def first(self, choice: int) -> bytes:
        """Return the events that open a choice."""

    def opening(self) -> bytes:
        """Return the events that open all choices, in order: the official client takes the first chunk for choice 0."""
        return b"".join(self.openings())

    def openings(self) -> Iterable[bytes]:
        return map(self.first, range(len(self._runs)))

    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the chunk with the usage of all choices, where it is wanted and known, and the end; or the *error*."""
        if error is not None:
            return error_event(error)
        usage = None
        if self._include_usage:
            usage = self._usage()
        if usage is None:
            return _DONE
        return self._head + b"]" + self._fingerprint + b',"usage":' + encode(usage) + b"}" + _END + _DONE

    def _usage(self) -> UsageObject | None:
        return usage_of(self._runs, n=self._n)

    def _counted(self, choice: int) -> bytes:
        """Return what follows the choice in a chunk that counts the tokens so far."""
        if not self._continuous:
            return self._tail
        progress = self._runs[choice].progress
        counted = progress.usage_so_far
        if counted is None:
            return self._tail
        if progress.usage is None:
            # The backend may be ahead of the text.
            counted = msgspec.structs.replace(counted, completion_tokens=self._shown[choice])
        return b'],"usage":' + encode(usage_object(counted)) + b"}" + _END

    def _ended(self, choice: int) -> bytes:
        """Return what follows the choice in its last chunk."""
        tail = self._counted(choice)
        if self._include_usage:
            return tail
        return tail[:1] + self._fingerprint + tail[1:]


def event_count(events: bytes) -> int:
    """Return how many whole *events* there are."""
    return events.count(_END)


def event_data(events: bytes) -> Iterator[bytes]:
    """Yield the JSON of each of whole *events*, which have names."""
    for each in events.split(_END)[:-1]:
        yield each.partition(b"\n" + _FIELD)[2]


def without_events(events: bytes, number: int) -> bytes:
    """Return whole *events* without the first *number* of them."""
    if event_count(events) < number:
        return b""
    return events.split(_END, max(number, 0))[-1]
