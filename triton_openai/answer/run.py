"""
Runs one generation on its model: adapter, transport, stages, time limits, usage and finish reason.

:meth:`Run.receive` is the hot path between the transport and the writer. The transport calls it in the turn of the
event loop in which the bytes of a token arrive, and it passes the token on in the same turn: no task is woken for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from triton_openai.adapters._common.base import Adapter, Decoder
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.logits_reader import LogitsReader
from triton_openai.answer.stages import Pipeline
from triton_openai.errors import (
    InvalidAnswer,
    InvalidRequest,
    Overloaded,
    ServiceError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.generation import AnswerState, Delta, FinishReason, Generation, Lora, TokenLogprob, Usage
from triton_openai.models.lora.delivery import LoraAnswers, LoraDeliveries
from triton_openai.prompts.tokenizer import Tokenizer, count_pieces
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import Upstream
from triton_openai.triton.client import Heard, Receiver, ResponseStream, SingleAnswer, TritonClient, gather
from triton_openai.triton.fleet import Lease, Route, Tried, lost_error
from triton_openai.triton.status import failed_midway_error, no_answer_error
from triton_openai.triton.tensors import InferRequest, InferResponse

_log = structlog.get_logger(__name__)

#: Takes the number of a run and its next deltas, all with something to show.
Push = Callable[[int, Sequence[Delta]], None]


# A character has at most four tokens; of an incomplete one the first is counted.
_UNSEEN_TOKENS = 2
_REPLACEMENT = "\ufffd"
# Responses of an answer: a backend may send parts of tokens, and some without any, but not without end.
_STEPS_PER_TOKEN = 16
_MORE_STEPS = 1000
# Tokens that a character may lack its last byte after: it has four at most.
_MOST_HALVES = 3
_STOP_REQUEST_TIMEOUT = 5.0
# The seconds before each stop request. An engine ignores one that arrives before the request itself, which may still
# wait for its tokenizer.
_STOP_DELAYS = (0.0, 1.0, 1.0)
# The longest that the end of a sequence takes for which nobody waits, half of it for the request that runs.
_END_TIMEOUT = 20.0


class Sender(msgspec.Struct, frozen=True):
    """How the work for one request of a client reaches Triton."""

    route: Route
    #: Sees the work.
    upstream: Upstream
    #: Where stop requests are sent, for which nobody waits.
    background: Background
    #: The level of what is asked in the model's queue, 0 for the usual one. Generations have one of their own.
    priority: int = 0

    async def ask(self, request: InferRequest, heard: Heard | None = None) -> Sequence[InferResponse]:
        """
        Return all answers to *request*, and to the rest of its sequence. Raises :class:`ServiceError`.

        *heard* gets those so far, if they come one by one; from their beginning, if another Triton is asked again.
        """
        if self.priority:
            request = replace(request, priority=self.priority)

        async def attempt(lease: Lease) -> Sequence[InferResponse]:
            with self.upstream.call(request, lease) as sent:
                if sent.following:
                    ask = self._ask_sequence
                else:
                    ask = gather
                return await ask(lease.client, sent, heard)

        return await self.route.ask(attempt)

    async def _ask_sequence(
        self, client: TritonClient, request: InferRequest, heard: Heard | None
    ) -> Sequence[InferResponse]:
        responses: list[InferResponse] = []
        parts = [request, *(replace(each, headers=request.headers) for each in request.following)]
        for part in parts:
            call = asyncio.ensure_future(client.infer(part))
            try:
                # Should the end overtake it, the sequence would stay.
                responses.append(await asyncio.shield(call))
            except BaseException as error:
                end = _end_sequence(client, call, None if part is parts[-1] else parts[-1])
                self.background.start(end, timeout=_END_TIMEOUT)
                if responses and isinstance(error, InvalidRequest):
                    raise failed_midway_error(error) from error
                raise
            if heard is not None:
                heard(responses)
        return responses


async def _end_sequence(client: TritonClient, call: asyncio.Future[Any], last: InferRequest | None) -> None:
    """End a sequence that nobody waits for, once *call* has: what the backend keeps of it would stay for a time."""
    await asyncio.wait([call], timeout=_END_TIMEOUT / 2)
    call.cancel()
    if last is not None:
        # If it has not begun, or Triton has gone, there is nothing to end.
        with suppress(ServiceError):
            await client.infer(last)


class Run:
    """
    A running generation. A started run must be closed: :meth:`close` stops the backend's work.

    *lora_delivery* sends the weights of the generation's LoRA adapter where requests have to.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        adapter: Adapter,
        sender: Sender,
        time_limits: TimeLimits,
        token_limit: TokenLimit,
        tokenizer: Tokenizer | None = None,
        lora_delivery: LoraDeliveries | None = None,
    ) -> None:
        self.generation = generation
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.progress = AnswerState(generation)
        #: Whether the run has ended, and with which error, if any. :meth:`conclude` sets usage and reason.
        self.over = False
        self.failure: Exception | None = None
        self._adapter = adapter
        self._sender = sender
        self._limits = time_limits
        self._token_limit = token_limit
        self._tokenizer = tokenizer
        self._lora_delivery = lora_delivery
        # Set while the backend works.
        self._stream: ResponseStream | None = None
        self._lease: Lease | None = None
        # The Tritons that have got the request.
        self._tried = Tried()
        self._decoder: Decoder = adapter.decoder(generation)
        self._logits: LogitsReader | None = None
        self._pipeline = Pipeline(adapter.capabilities, generation, tokenizer, self.progress)
        self._max_steps = _STEPS_PER_TOKEN * generation.sampling.max_tokens + _MORE_STEPS
        # Tokens of the steps with nothing to show since the last delta that was pushed.
        self._unshown = 0
        # What may be the beginning of a character, and is shown when the text goes on or has ended by itself.
        self._half = ""
        self._pauses = 0
        # When the last response came, and the seconds within which the next one has to come.
        self._last_response = 0.0
        self._silence_limit = math.inf
        self._number = 0
        self._push: Push | None = None
        self._done: Callable[[int], None] | None = None

    def start(self, number: int, push: Push, done: Callable[[int], None]) -> None:
        """
        Send the request, unless no tokens are wanted. *push* gets the deltas, and *done* the end, of run *number*.

        Raises :class:`ServiceError`.
        """
        self._number = number
        self._push = push
        self._done = done
        if not self.generation.sampling.max_tokens:
            self._finish(None)
            return
        if self._sender.route.before is not None:
            self._tried = self._sender.route.tried()
        try:
            self._begin()
        except ServiceError as error:
            self.progress.error = error
            self._release(error)
            raise

    def _begin(self) -> None:
        """Send the request to a Triton that has not had it. Raises :class:`ServiceError`."""
        lease = self._lease = self._sender.route.lease(self._tried, prompt=self.generation.prompt)
        if lease.counted:
            lease.lost = self._lose
            self._tried.append(lease.endpoint)
        receiver: Receiver = self
        if self._pipeline.reads_logits:
            receiver = self._decoder = self._logits = LogitsReader(self, self._decoder, self.generation)
        if self._limits.total is None or not self._adapter.returns_whole(self.generation):
            # An answer that comes as a whole has no first token: only the limit for the whole answer applies.
            self._last_response = monotonic()
            self._silence_limit = self._limits.first_token
        if self._lora_delivery is not None:
            self._stream = LoraAnswers(self._lora_delivery.at(lease.endpoint), self._open, receiver)
        else:
            self._stream = self._open(self.generation.lora, receiver)
        if self._pauses:
            self._stream.pause()

    def _begin_again(self, error: Exception) -> bool:
        """
        Send the request, which has failed by *error*, to another Triton, and return ``False`` if it may not go on.

        If that fails too, the run ends with *error*: it tells more than that there is no other Triton.
        """
        lease = self._lease
        if lease is None or self.progress.steps or not self._sender.route.again(lease, error, self._tried):
            return False
        if isinstance(error, (UpstreamUnavailable, Overloaded)):
            # The request has not reached the model.
            self._stream = None
        self._stop(silent=True)
        self._release(error)
        if self._logits is not None:
            self._logits.close()
        self._decoder = self._adapter.decoder(self.generation)
        self._pipeline = Pipeline(self._adapter.capabilities, self.generation, self._tokenizer, self.progress)
        try:
            self._begin()
        except ServiceError as failure:
            self._release(failure)
            self._abort(error)
        return True

    def _lose(self, final: bool) -> None:
        """Take it that the Triton has stopped answering; what cannot go elsewhere waits or, if it is *final*, ends."""
        error = lost_error()
        ends = final or not self._sender.route.resends_lost
        if not self.over and not self._begin_again(error) and ends:
            self._abort(error)

    def _release(self, error: Exception | None) -> None:
        lease = self._lease
        self._lease = None
        if lease is not None:
            lease.close(error, answered=self.progress.first is not None)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together, and push their deltas."""
        if self.over:
            return
        progress = self.progress
        pipeline = self._pipeline
        progress.now = self._last_response = monotonic()
        if progress.first is None:
            progress.first = progress.now
            self._silence_limit = self._limits.idle
        shown: list[Delta] = []
        unshown = self._unshown
        try:
            for response in responses:
                delta = self._decoder.feed(response)
                pipeline.feed(delta)
                if self._half or delta.text[-1:] == _REPLACEMENT:
                    self._hold(delta)
                if delta.text or delta.logprobs or (delta.token_ids and pipeline.token_ids):
                    if unshown:
                        # Its text ends with what was held back.
                        delta.tokens = (delta.tokens or 0) + unshown
                        unshown = 0
                    shown.append(delta)
                elif delta.tokens:
                    unshown += delta.tokens
                if pipeline.may_end and pipeline.ended:
                    # Stop the backend first, then send the last text to the client.
                    self._stop()
                    before = len(shown)
                    pipeline.flush(self._decoder, shown)
                    if len(shown) > before:
                        self._hold_flushed(shown, before)
                    break
            self._unshown = unshown
            if progress.steps > self._max_steps:
                raise InvalidAnswer("it does not end where its limit is", model=self._adapter.config.name)
            if shown and self._push is not None:
                self._push(self._number, shown)
        except Exception as error:  # noqa: BLE001 - the waiting task raises any error
            self._abort(error)
        else:
            if pipeline.may_end and pipeline.ended:
                self._finish(None)

    def end(self, error: Exception | None) -> None:
        """Take the end of the stream."""
        if self.over:
            return
        if error is None:
            shown: list[Delta] = []
            try:
                if not self.progress.steps:
                    raise no_answer_error(self._adapter.config.name)
                self._pipeline.flush(self._decoder, shown)
                if shown:
                    self._hold_flushed(shown, 0)
                if shown and self._unshown:
                    shown[-1].tokens = self._unshown
                if shown and self._push is not None:
                    self._push(self._number, shown)
            except Exception as failure:  # noqa: BLE001 - the waiting task raises any error
                error = failure
        elif isinstance(error, InvalidRequest) and self.progress.steps:
            midway = failed_midway_error(error)
            # Its traceback would keep the request in a cycle.
            midway.__cause__ = error.with_traceback(None)
            error = midway
        if error is not None and self._begin_again(error):
            return
        if error is None or (isinstance(error, UpstreamUnavailable) and not self.progress.steps):
            # Nothing is left to be stopped, or the request has not reached the model.
            self._stream = None
        if error is not None:
            self._abort(error)
        else:
            self._finish(None)

    def _hold(self, delta: Delta) -> None:
        """Hold back the end of *delta* that may be a part of a character."""
        text = self._half + delta.text
        delta.text = text[:-_MOST_HALVES] + text[-_MOST_HALVES:].rstrip(_REPLACEMENT)
        self._half = text[len(delta.text) :]

    def _hold_flushed(self, shown: list[Delta], before: int) -> None:
        """Hold back the same of what the stages had delayed: of *shown* from the place *before* on."""
        for delta in shown[before:]:
            self._hold(delta)
        shown[before:] = [delta for delta in shown[before:] if delta.text or delta.logprobs]

    def pause(self) -> None:
        """Pause the backend, because the client reads slowly, until :meth:`resume` was called as often."""
        self._pauses += 1
        if self._stream is not None:
            self._stream.pause()

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        self._pauses -= 1
        if not self._pauses and self._stream is not None:
            self._last_response = monotonic()
            self._stream.resume()

    def check(self, now: float) -> float:
        """Fail if nothing has come for too long; a pause does not count. Return the seconds until the next check."""
        longest = min(self._limits.first_token, self._limits.idle)
        if self.over or self._pauses:
            left = longest
        else:
            left = self._last_response + self._silence_limit - now
        if left <= 0:
            self._fall_silent()
            return longest
        return min(left, longest)

    @property
    def cause_of_silence(self) -> str:
        """The likely cause of a missing answer, to append to an error, if the adapter knows one."""
        if self.progress.steps:
            cause = None
        else:
            cause = self._adapter.cause_of_silence(self.generation)
        if cause:
            return f" {cause}"
        return ""

    def close(self) -> None:
        """Stop the work on the backend unless it has ended. Never raises; may be called twice."""
        if self._stream is not None:
            self._abort(None)
        self.over = True
        # Breaks a reference cycle that would keep prompt and answer in memory.
        self._push = self._done = None

    def _open(self, lora: Lora | None, receiver: Receiver) -> ResponseStream:
        """Send the request. Raises :class:`ServiceError`."""
        generation = self.generation
        progress = self.progress
        if lora is not generation.lora:
            generation = replace(generation, lora=lora)
        (request,) = self._adapter.encode(generation)
        if generation.priority and not request.carried:
            # Of a line of a batch nobody asked for it: without gRPC it goes without.
            expressible = request.json_expressible and self._sender.priority > 0
            request = replace(request, priority=generation.priority, json_expressible=expressible)
        lease = self._lease
        assert lease is not None, "it lasts as long as the request"
        request = self._sender.upstream.begin(request, progress, lease, lora=None if lora is None else lora.name)
        if progress.sent is None:
            # A LoRA adapter may need a second attempt; the time counts from the first.
            progress.sent = monotonic()
        if request.stream:
            return lease.client.stream(request, receiver)
        return SingleAnswer(lease.client, request, receiver)

    def _stop(self, *, silent: bool = False) -> None:
        """Stop the backend's work, if it is running."""
        stream = self._stream
        self._stream = None
        if stream is None:
            return
        stream.close(silent=silent)
        order = self._adapter.cancel(self.generation)
        lease = self._lease
        if order is not None and lease is not None:
            # With its first answer it is certain that the engine has the request.
            delays = _STOP_DELAYS if self.progress.first is None else _STOP_DELAYS[:1]
            self._sender.background.start(
                _send_stop(self._sender.upstream, lease, order, delays), timeout=_STOP_REQUEST_TIMEOUT
            )

    def _fall_silent(self) -> None:
        if self.progress.steps:
            what = "no further token"
        else:
            what = "no answer"
        message = f"The model sent {what} for {self._silence_limit:g} seconds.{self.cause_of_silence}"
        error = UpstreamTimeout(message, code="upstream_silent")
        if not self._begin_again(error):
            self._abort(error, silent=True)

    def _abort(self, error: Exception | None, *, silent: bool = False) -> None:
        """End with *error* before the backend has."""
        self.progress.cancelled = self.progress.finish_reason is None
        self._stop(silent=silent)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        self.over = True
        self.failure = error
        if isinstance(error, ServiceError):
            self.progress.error = error
        self.progress.ended = monotonic()
        self._release(error)
        if self._logits is not None:
            self._logits.close()
        if self._done is not None:
            self._done(self._number)

    async def conclude(self) -> None:
        """
        Set usage and finish reason: the backend's if it sends them, else counted ones if possible.

        An answer that its limit cuts inside a character ends before that.
        """
        progress = self.progress
        generation = self.generation
        tokens = progress.tokens
        prompt = progress.prompt_tokens
        if prompt is None and generation.prompt_ids is not None:
            prompt = len(generation.prompt_ids)
        if prompt is None:
            prompt = generation.prompt_tokens
        if prompt is None and self._tokenizer is not None:
            adds_bos = self._adapter.metadata.adds_bos
            prompt = await self._tokenizer.count_async(generation.prompt, adds_bos, refusable=False)
        limit = self._token_limit.reached(generation.sampling.max_tokens, prompt)
        if tokens is None:
            tokens = await self._infer(limit)
        elif progress.finish_reason is None:
            if tokens >= limit:
                progress.finish_reason = FinishReason.LENGTH
            else:
                progress.finish_reason = FinishReason.STOP
        if tokens is not None and prompt is not None:
            cached = progress.cached_tokens
            progress.usage = Usage(
                prompt_tokens=prompt,
                completion_tokens=tokens,
                # A backend may count a whole block of its cache that the prompt fills only in part.
                cached_tokens=None if cached is None else min(cached, prompt),
            )
        half = self._half
        self._half = ""
        if half and progress.finish_reason is not FinishReason.LENGTH and self._push is not None:
            # It is what the model wrote.
            self._push(self._number, [Delta(half)])

    async def _infer(self, limit: int) -> int | None:
        """
        Return the number of tokens that the backend did not report, and set the finish reason, if both are certain.

        A backend that streams sends a response for each token, with or without text, and often an empty one at the end
        of the sequence. So each response is at least one token, except for a last one without text. Fewer responses
        than *limit* show that the limit was not reached. Of an answer in one response only the text is known: if it
        ends within a character, the limit cut it there.
        """
        progress = self.progress
        most = self.generation.sampling.max_tokens
        text = progress.text
        steps = progress.steps
        counted = None
        cut = steps >= limit
        if self._tokenizer is not None:
            counted = max(
                await count_pieces(self._tokenizer, progress.pieces, progress.dropped), steps - progress.silent
            )
            cut = counted + (_UNSEEN_TOKENS if steps == 1 and text.endswith(_REPLACEMENT) else 0) >= limit
        if progress.finish_reason is None:
            if cut:
                progress.finish_reason = FinishReason.LENGTH
            elif counted is not None or steps > 1 or len(text.encode("utf-8", "replace")) < limit:
                progress.finish_reason = FinishReason.STOP
        if counted is not None and cut and progress.finish_reason is FinishReason.LENGTH:
            counted = max(counted, limit)
        if counted is None:
            return None
        return min(counted, most)


async def _send_stop(upstream: Upstream, lease: Lease, order: InferRequest, delays: Sequence[float]) -> None:
    for delay in delays:
        await asyncio.sleep(delay)
        try:
            with upstream.call(order, lease) as sent:
                await gather(lease.client, sent)
        except ServiceError as error:
            # A model that is not decoupled cannot answer a stop request, but obeys it.
            _log.debug("stop request failed", model=order.model, reason=error.reason)
