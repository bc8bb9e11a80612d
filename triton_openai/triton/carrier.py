"""
Many streams over one request that stays open: a *carrier*.

A model that takes ``carried`` requests answers each of them at once, and sends what all streams produce over the
carrier, in one response per step of its engine. So the number of responses does not grow with the number of streams.
Each process has a carrier of its own at each model that it asks, which it closes when it has been idle.

Source of the facts: contract 1 of the companion model, see ``triton_openai/companion/model.py``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from triton_openai.errors import (
    InvalidAnswer,
    InvalidRequest,
    LoraNotLoaded,
    ModelCrashed,
    Overloaded,
    RequestRefused,
    ServiceError,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.triton.client import Receiver, ResponseStream, TritonClient
from triton_openai.triton.engine_capacity import EngineCapacity
from triton_openai.triton.revival import Revivals
from triton_openai.triton.status import classify, cut_off_error, public_reason
from triton_openai.triton.tensors import CarriedResponse, Delivery, InferRequest, InferResponse, Tensor

# A response is acknowledged after so many: half of those that the model sends ahead. Each acknowledgement is a request.
_ACKNOWLEDGED_AFTER = 16
# The fields of a delivery that come once for each stream.
_ONCE = ("finish", "stop", "usage", "error", "prompt_logprobs")
# Seconds after which a carrier without streams is closed: an open request keeps Triton from unloading the model.
_IDLE_SECONDS = 5.0
# Seconds without a response after which the model's process is taken for dead: an idle carrier gets one each second.
# Triton says nothing of a process that was killed, and does not start another one.
SILENCE = 10.0
# Seconds between two looks at the silence.
_LOOK = 1.0
# Bytes of what a paused stream has received, before it ends: its client reads too slowly.
_MAX_WAITING = 1024 * 1024
# About the bytes of a token with its log probabilities.
_TOKEN_SIZE = 8
_SCORES_SIZE = 200


class _Deliveries(msgspec.Struct, gc=False):
    """A response of a carrier; with a fault, it is the only one."""

    number: int = msgspec.field(name="n", default=0)
    fault: Any = msgspec.field(name="e", default=None)
    deliveries: list[Delivery] = msgspec.field(name="d", default_factory=list)
    #: How many requests wait in the engine, and how many it runs at most.
    queue: tuple[int, int] | None = msgspec.field(name="q", default=None)


class _Fault(msgspec.Struct):
    """Why a request was not taken."""

    kind: str = "engine"
    message: str = ""
    param: str | None = None


class _Refusal(msgspec.Struct):
    """The response of a request that was not taken."""

    fault: _Fault | None = msgspec.field(name="e", default=None)


_decode = msgspec.json.Decoder(_Deliveries).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode
_UNREADABLE = (msgspec.MsgspecError, RecursionError)


def fault_error(fault: Any, model: str) -> ServiceError:
    """Return our error for what the model says of a request that it does not answer."""
    try:
        said = msgspec.convert(fault, _Fault)
    except msgspec.ValidationError as problem:
        return InvalidAnswer("its error cannot be read", model=model, detail=str(problem))
    if said.kind == "lora":
        return LoraNotLoaded(said.message, param=said.param)
    if said.kind == "unsupported":
        return UnsupportedParameter(said.message, param=said.param)
    if said.kind == "overloaded":
        return Overloaded(said.message)
    if said.kind == "dead":
        return ModelCrashed(said.message)
    # The table recognizes what the engine says of prompts that are too long.
    error = classify(f"Error generating stream: {said.message}", model)
    if said.kind == "invalid" and not isinstance(error, InvalidRequest):
        error = RequestRefused(public_reason(said.message), detail=said.message)
    if error.param is None:
        error.param = said.param
    return error


def _append(first: Delivery, second: Delivery) -> None:
    """Append to *first* what came for its stream after it."""
    first.ids = [*first.ids, *second.ids]
    if second.logprobs is not None:
        first.logprobs = [*(first.logprobs or ()), *second.logprobs]
    for field in _ONCE:
        value = getattr(second, field)
        if value is not None:
            setattr(first, field, value)


def _size_of(delivery: Delivery) -> int:
    """Return about how many bytes *delivery* takes while it waits."""
    return _TOKEN_SIZE * len(delivery.ids) + _SCORES_SIZE * len(delivery.logprobs or ())


def _single_tokens(delivery: Delivery) -> list[Delivery]:
    """Return *delivery* as one for each of its tokens; the last has what is there once."""
    scores = delivery.logprobs
    parts = []
    for place, number in enumerate(delivery.ids):
        part = Delivery(delivery.stream, [number])
        if scores is not None:
            part.logprobs = scores[place : place + 1]
        parts.append(part)
    parts[0].prompt_logprobs = delivery.prompt_logprobs
    parts[-1].finish = delivery.finish
    parts[-1].stop = delivery.stop
    parts[-1].usage = delivery.usage
    return parts


class Carriers:
    """The carriers to the models of one Triton. They report the queues of its engines to *capacity*."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        self.revivals = Revivals()
        self._carriers: dict[tuple[TritonClient, str], Carrier] = {}

    def stream(self, client: TritonClient, request: InferRequest, receiver: Receiver) -> ResponseStream:
        """Send a carried request over *client*; what it produces reaches *receiver*."""
        key = (client, request.model)
        carrier = self._carriers.get(key)
        if carrier is None or carrier.closed:
            carrier = Carrier(self, client, request)
            self._carriers[key] = carrier
        return CarriedStream(carrier, request, receiver)

    def close(self) -> None:
        """Close all carriers; their streams get nothing more."""
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()
        self.revivals.close()


class Carrier:
    """
    A carrier to one model, as the receiver of its responses.

    It is opened by the first stream, which waits with the others until the model has answered. *carriers* are those of
    its Triton.
    """

    def __init__(self, carriers: Carriers, client: TritonClient, request: InferRequest) -> None:
        self._carriers = carriers
        self.client = client
        self.model = request.model
        self.closed = False
        #: The requests beside its own that the model has not answered.
        self.requests: set[_Request] = set()
        self._name = secrets.token_hex(8)
        self._streams: dict[int, CarriedStream] = {}
        self._number = 0
        self._open = False
        # The number of the last response that came, and of the last that was acknowledged.
        self._read = 0
        self._acknowledged = 0
        self._idle: asyncio.TimerHandle | None = None
        # When the model was heard last.
        self._heard = monotonic()
        opening = self._message("carrier", 0, f"carrier-{self._name}", request)
        # Whether the capacity has a limit for this engine: until a response has come without its queue.
        self._limited = True
        self._stream = client.stream(opening, self)
        self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)
        carriers.capacity.expect(self.model, carriers, self)

    def _message(self, kind: str, number: int, request_id: str, like: InferRequest) -> InferRequest:
        body = Tensor("request", "BYTES", (1,), (f'{{"v":1,"kind":"{kind}"}}',))
        return InferRequest(
            model=self.model,
            id=request_id,
            inputs=(body, self._place(number)),
            outputs=("response",),
            stream=True,
            headers=like.headers,
        )

    def _place(self, number: int) -> Tensor:
        """Return the input that says where a request belongs; it acknowledges what has been read, too."""
        self._acknowledged = self._read
        return Tensor("carrier", "BYTES", (1,), (f'["{self._name}",{number},{self._read}]',))

    def add(self, stream: CarriedStream) -> int:
        """Add *stream*, and return its number; it starts once the carrier is open."""
        self._number += 1
        self._streams[self._number] = stream
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._open:
            asyncio.get_running_loop().call_soon(stream.start)
        return self._number

    def remove(self, number: int) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(number, None)
        if not self._streams and not self.closed and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self.close)

    def as_stream(self, request: InferRequest, number: int) -> InferRequest:
        """Return *request* as the stream *number* of this carrier."""
        return msgspec.structs.replace(request, inputs=(*request.inputs, self._place(number)))

    def cancel(self, number: int, request: InferRequest) -> None:
        """Have the engine stop the stream *number*."""
        if self._open and not self.closed:
            _Request(self, self._message("cancel", number, request.id, request))

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """
        Take responses of the model: what belongs to each stream.

        What has come together for a stream is passed on together: several come where this process is behind.
        """
        deliveries: dict[int, Delivery] = {}
        error = None
        try:
            for response in responses:
                for text in response.texts("response"):
                    self._take(text, deliveries)
        except ServiceError as caught:
            error = caught
        streams = self._streams
        for number, delivery in deliveries.items():
            receiving = streams.get(number)
            # One that was cancelled may have been on its way.
            if receiving is not None:
                receiving.take(delivery)
        if error is not None:
            self._lose(error)
            return
        if self._read - self._acknowledged >= _ACKNOWLEDGED_AFTER and not self.closed:
            request = InferRequest(model=self.model, id="", inputs=())
            _Request(self, self._message("credit", 0, f"carrier-{self._name}", request))

    def _take(self, text: str, deliveries: dict[int, Delivery]) -> None:
        """Add what the response *text* brings to the *deliveries* by stream. Raises :class:`ServiceError`."""
        try:
            answer = _decode(text)
        except _UNREADABLE as error:
            raise InvalidAnswer("it cannot be read", model=self.model, detail=str(error)) from error
        self._heard = monotonic()
        if answer.fault is not None:
            raise fault_error(answer.fault, self.model)
        if self._open and answer.number != self._read + 1:
            raise InvalidAnswer("a response of a carrier is missing", model=self.model)
        self._read = answer.number
        if not self.closed and (self._limited or answer.queue is not None):
            self._limited = answer.queue is not None
            self._carriers.capacity.report(self.model, self._carriers, self, answer.queue)
        if not self._open:
            self._open = True
            for stream in list(self._streams.values()):
                stream.start()
        for delivery in answer.deliveries:
            earlier = deliveries.setdefault(delivery.stream, delivery)
            if earlier is not delivery:
                _append(earlier, delivery)

    def _look(self) -> None:
        """Take it that the model's process has died, if nothing has come for too long."""
        silent = monotonic() - self._heard
        if silent < SILENCE:
            self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)
            return
        error = ModelCrashed(f"The model's process has not answered for {SILENCE:g} seconds.", retry_after=SILENCE)
        self._lose(error)
        self._carriers.revivals.start(self.client, self.model)

    def end(self, error: Exception | None) -> None:
        """Take the end of the carrier: that of all its streams."""
        self._lose(error or cut_off_error("the carrier of its streams has ended"))

    def close(self) -> None:
        """Close the carrier; the model ends what streams there are."""
        self.closed = True
        self._carriers.capacity.forget(self.model, self._carriers, self)
        self._looking.cancel()
        if self._idle is not None:
            self._idle.cancel()
        self._stream.close()

    def _lose(self, error: Exception) -> None:
        """End all streams with *error*. A process that has died does not answer any request, so none stays open."""
        self.close()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
        for request in list(self.requests):
            request.close()


class CarriedStream:
    """One stream of a carrier. See :class:`triton_openai.triton.client.ResponseStream`."""

    def __init__(self, carrier: Carrier, request: InferRequest, receiver: Receiver) -> None:
        self._carrier = carrier
        self._request = request
        self._receiver: Receiver | None = receiver
        # What asks the model to begin, until it has.
        self._asking: _Acceptance | None = None
        self._paused = False
        # What came while it was paused, and about its size.
        self._waiting: deque[Delivery] = deque()
        self._size = 0
        self._number = carrier.add(self)

    def start(self) -> None:
        """Send the request, now that the carrier is open."""
        if self._receiver is None or self._asking is not None:
            return
        try:
            request = self._carrier.as_stream(self._request, self._number)
            self._asking = _Acceptance(self, self._carrier, request)
        except ServiceError as error:
            self.fail(error)

    def take(self, delivery: Delivery) -> None:
        """Take what the engine has produced for this stream."""
        if self._receiver is None:
            return
        if self._paused:
            self._waiting.append(delivery)
            self._size += _size_of(delivery)
            if self._size > _MAX_WAITING:
                self._overflow()
            return
        self._pass_on(delivery)

    def _pass_on(self, delivery: Delivery) -> None:
        receiver = self._receiver
        assert receiver is not None, "it has not ended"
        ended = delivery.finish is not None
        if delivery.error is not None:
            self.fail(fault_error(delivery.error, self._request.model))
            return
        if ended:
            # Nothing is left to be cancelled.
            self._forget()
        if delivery.finish == "abort":
            receiver.end(UpstreamError("The model stopped before the end of its answer."))
            return
        model = self._request.model
        if self._request.token_by_token and len(delivery.ids) > 1:
            receiver.receive([CarriedResponse(one, model) for one in _single_tokens(delivery)])
        else:
            receiver.receive((CarriedResponse(delivery, model),))
        if ended:
            receiver.end(None)

    def _overflow(self) -> None:
        self._carrier.cancel(self._number, self._request)
        self.fail(UpstreamError("The answer was stopped: its client reads it too slowly.", code="client_too_slow"))

    def fail(self, error: Exception) -> None:
        """End with *error*."""
        receiver = self._receiver
        self._forget()
        if receiver is not None:
            receiver.end(error)

    def _forget(self) -> None:
        self._receiver = None
        self._waiting.clear()
        self._carrier.remove(self._number)

    def pause(self) -> None:
        """Keep what comes: the engine goes on."""
        self._paused = True

    def resume(self) -> None:
        """Pass on what has come meanwhile."""
        self._paused = False
        while self._waiting and not self._paused:
            delivery = self._waiting.popleft()
            self._size -= _size_of(delivery)
            # Its end empties the list.
            self._pass_on(delivery)

    def close(self, *, silent: bool = False) -> None:
        """Have the engine stop, unless it has."""
        if self._receiver is None:
            return
        self._forget()
        if self._asking is not None:
            self._carrier.cancel(self._number, self._request)


class _Request:
    """
    A request to the model beside that of the *carrier*, whose answer nobody needs: if it fails, the carrier does too.
    """

    def __init__(self, carrier: Carrier, request: InferRequest) -> None:
        self._carrier = carrier
        self._stream = carrier.client.stream(request, self)
        carrier.requests.add(self)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Drop the answer."""

    def end(self, error: Exception | None) -> None:
        """Drop the end."""
        self._carrier.requests.discard(self)

    def close(self) -> None:
        """Close it: there will be no answer."""
        self._carrier.requests.discard(self)
        self._stream.close()


class _Acceptance(_Request):
    """The request that begins *stream*. It gets no answer if the model has taken it."""

    def __init__(self, stream: CarriedStream, carrier: Carrier, request: InferRequest) -> None:
        self._for = stream
        self._model = request.model
        super().__init__(carrier, request)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        for response in responses:
            for text in response.texts("response"):
                self._for.fail(self._error(text))

    def _error(self, text: str) -> ServiceError:
        try:
            return fault_error(_decode_refusal(text).fault, self._model)
        except _UNREADABLE as error:
            return InvalidAnswer("it cannot be read", model=self._model, detail=str(error))

    def end(self, error: Exception | None) -> None:
        super().end(error)
        if error is not None:
            self._for.fail(error)
