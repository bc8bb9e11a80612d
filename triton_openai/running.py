"""
Runs one generation on its model: adapter, transport, text stages, timeouts, and the end of it.

The loop of :meth:`Run.read` is the hot path between the transport and the writer: per response one decode, one
stop-string stage where there are stop strings, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog

from triton_openai.adapters.base import Decoder
from triton_openai.background import Background
from triton_openai.chat.offload import run as offloaded
from triton_openai.chat.tokenizer import INLINE_CHARACTERS, Tokenizer
from triton_openai.config.tree import TritonSettings
from triton_openai.errors import InvalidRequest, ServiceError, UpstreamError, UpstreamTimeout
from triton_openai.generation import Delta, FinishReason, Generation, Usage
from triton_openai.models import ServedModel
from triton_openai.text.stops import StopStrings
from triton_openai.text.tokens import TokenText
from triton_openai.triton.client import ResponseStream, TritonClient
from triton_openai.triton.single_answer import SingleAnswer
from triton_openai.triton.status import no_answer
from triton_openai.triton.tensors import InferRequest

_log = structlog.get_logger(__name__)

_STOP_REQUEST_TIMEOUT = 5.0
REPLACEMENT = "\ufffd"
# What counting one piece costs beside its length, in characters of a long text.
_PIECE_COST = 20
# Prompts of one request that are sent to Triton at the same time.
_PARALLEL_RUNS = 32


class Run:
    """One prompt being answered. Whoever starts it must :meth:`close` it; that stops the work on the backend."""

    def __init__(
        self,
        model: ServedModel,
        generation: Generation,
        *,
        client: TritonClient,
        settings: TritonSettings,
        background: Background,
        tokenizer: Tokenizer | None,
    ) -> None:
        # What runs
        self.model = model
        self.generation = generation
        self._client = client
        self._settings = settings
        self._background = background
        self._tokenizer = tokenizer
        # The stream's state
        self._loop = asyncio.get_running_loop()
        self._decoder: Decoder = model.adapter.decoder(generation)
        stops = generation.sampling.stop
        include = bool(generation.sampling.include_stop_str_in_output)
        self._token_text = _token_text(model, generation, tokenizer)
        self._stops = StopStrings(stops, include=include) if stops and not model.adapter.capabilities.stop else None
        self._stream: ResponseStream | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last = self._loop.time()
        self._waiting = False
        self._ended = False
        # Counts: None once the backend has left one out
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._tokens: int | None = 0
        self._steps = 0
        self._text: list[str] = []
        # The result
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        # When: sent to Triton, answered with a first token, and at its end
        self.sent: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.cumulative_logprob = 0.0

    @property
    def usage_so_far(self) -> Usage | None:
        """The counts up to now, where the backend gives them with every step."""
        if self.usage is not None or self._tokens is None or self._prompt_tokens is None:
            return self.usage
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._tokens)

    @property
    def steps(self) -> int:
        """In how many steps the answer came up to now: a token each, or a few, or all of them."""
        return self._steps

    @property
    def finished(self) -> bool:
        """Whether the generation has ended and ``finish_reason`` and ``usage`` are settled."""
        return self._ended

    async def start(self) -> None:
        """Send the request. Raises :class:`ServiceError`."""
        request = self.model.adapter.encode(self.generation)
        if self.generation.priority:
            request = msgspec.structs.replace(request, priority=self.generation.priority, json_expressible=False)
        self.sent = self._last = self._loop.time()
        if request.stream:
            self._stream = await self._client.stream(request)
        else:
            self._stream = SingleAnswer(self._client, request)
        self._watch_silence(self._settings.first_token_timeout)

    async def read(self) -> Sequence[Delta]:
        """
        Return the next deltas, all with text; empty only when it has finished, when ``finish_reason`` and ``usage``
        are known.

        Raises :class:`ServiceError` for what went wrong upstream.
        """
        assert self._stream is not None, "start() comes first"
        stops, token_text = self._stops, self._token_text
        while not self._ended:
            self._waiting, self._last = True, self._loop.time()
            try:
                responses = await self._stream.read()
            except InvalidRequest as error:
                if not self._steps:
                    raise
                # Backends word both alike, but what they have begun to answer they had accepted.
                reason = error.message.replace("The model refused the request", "The model failed")
                raise UpstreamError(reason, detail=error.detail) from error
            finally:
                self._waiting = False
            deltas: list[Delta] = []
            if not responses:
                if self._steps == 0:
                    raise no_answer(self.model.name)
                self._append_rest(deltas)
                await self._conclude()
                return deltas
            if self._steps == 0:
                self.first = self._loop.time()
                self._watch_silence(self._settings.idle_timeout)
            for response in responses:
                for delta in self._decoder.feed(response):
                    if token_text is not None:
                        token_text.feed(delta)
                    self._count(delta)
                    if stops is not None:
                        delta.text = stops.feed(delta.text)
                        if stops.matched is not None:
                            self.finish_reason = FinishReason.STOP
                    if delta.text or delta.logprobs:
                        deltas.append(delta)
                if stops is not None and stops.matched is not None:
                    # The rest is not wanted: stop paying for it at once, then tell the client.
                    self.close()
                    await self._conclude()
                    return deltas
                if token_text is not None and token_text.stopped:
                    self.finish_reason = FinishReason.STOP
                    self._append_rest(deltas)
                    self.close()
                    await self._conclude()
                    return deltas
            if deltas:
                return deltas
        return ()

    def close(self) -> None:
        """Stop the work on the backend unless it has ended. Never raises; may be called twice."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._ended or self._stream is None:
            self._ended = True
            return
        self._ended = True
        self.ended = self._loop.time()
        self._stream.close()
        if self._settings.stop_requests:
            order = self.model.adapter.cancel(self.generation)
            if order is not None:
                self._background.start(self._send(order), timeout=_STOP_REQUEST_TIMEOUT)

    async def _send(self, order: InferRequest) -> None:
        try:
            if not order.stream:
                await self._client.infer(order)
                return
            stream = await self._client.stream(order)
            try:
                while await stream.read():
                    pass
            finally:
                stream.close()
        except ServiceError as error:
            # The engine of a model that is not decoupled has no way to answer, and stops all the same.
            _log.debug("stop request failed", model=order.model, reason=error.detail or error.message)

    def _count(self, delta: Delta) -> None:
        self._steps += 1
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.tokens is None:
            self._tokens = None
        elif self._tokens is not None:
            self._tokens += delta.tokens
        if delta.logprobs:
            self.cumulative_logprob += sum(entry.logprob for entry in delta.logprobs)
        if delta.text:
            self._text.append(delta.text)

    def _append_rest(self, deltas: list[Delta]) -> None:
        """Append what the decoder and the stop strings still hold, now that nothing follows."""
        for delta in self._decoder.flush():
            self._text.append(delta.text)
            if self._stops is not None:
                delta.text = self._stops.feed(delta.text)
            if delta.text:
                deltas.append(delta)
        if self._token_text is not None:
            text = self._token_text.flush()
            if self._stops is not None:
                text = self._stops.feed(text)
            if text:
                deltas.append(Delta(text))
        if self._stops is not None:
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP
            rest = self._stops.flush()
            if rest:
                deltas.append(Delta(rest))

    async def _conclude(self) -> None:
        """Settle usage and finish reason: from the backend, else from counting, else they stay unknown."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._ended = True
        self.ended = self._loop.time()
        tokens, prompt = self._tokens, self._prompt_tokens
        if tokens is None or prompt is None:
            tokenizer = self._tokenizer
            if tokenizer is not None:
                adds_bos = self.model.adapter.hints.adds_bos
                if prompt is None:
                    prompt = await tokenizer.count_async(self.generation.prompt, adds_bos)
                if tokens is None:
                    tokens = await count_pieces(tokenizer, self._text)
        if tokens is not None and prompt is not None:
            cached = self._cached_tokens
            self.usage = Usage(
                prompt_tokens=prompt,
                completion_tokens=tokens,
                # A backend may count a block of its cache whole that the prompt fills in part.
                cached_tokens=None if cached is None else min(cached, prompt),
            )
        if self.finish_reason is None:
            self.finish_reason = self._reason_by_count(prompt, tokens)

    def _reason_by_count(self, prompt: int | None, tokens: int | None) -> FinishReason | None:
        limit = self.generation.sampling.max_tokens
        room = self.model.settings.max_model_len
        if room is not None and prompt is not None:
            limit = min(limit, room - prompt)
        # Every step with text was at least one token, whatever tokenizing it again gives.
        if max(tokens or 0, len(self._text)) >= limit:
            return FinishReason.LENGTH
        return FinishReason.STOP if tokens is not None else None

    def _watch_silence(self, allowed: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_later(allowed, self._check_silence, allowed)

    def _check_silence(self, allowed: float) -> None:
        # One timer per stream that looks at a time stamp, instead of one that is set anew for every token.
        # While nobody waits for Triton, it is the client who is slow, and that is its right.
        left = self._last + allowed - self._loop.time() if self._waiting else allowed
        if left > 0:
            self._watch = self._loop.call_later(left, self._check_silence, allowed)
            return
        self._watch = None
        assert self._stream is not None
        what = "no further token" if self._steps else "no answer"
        self._stream.abort(UpstreamTimeout(f"The model sent {what} for {allowed:g} seconds.", code="upstream_silent"))


def _token_text(model: ServedModel, generation: Generation, tokenizer: Tokenizer | None) -> TokenText | None:
    """Return the stage that turns token ids into text, where the backend answers in them."""
    if not model.adapter.capabilities.tokens or tokenizer is None or generation.vocabulary is None:
        return None
    sampling = generation.sampling
    return TokenText(
        tokenizer.pieces,
        context=generation.prompt_ids or (),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        ends=() if sampling.ignore_eos else generation.vocabulary.end_ids,
        stops=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens or 0,
    )


async def count_pieces(tokenizer: Tokenizer, pieces: Sequence[str]) -> int:
    """
    Return how many tokens *pieces*, each what one step brought, were made of.

    Tokenized one by one, because that is how they came: a step is a token, or a few. A backend that decodes token by
    token shows each part of a split character as one U+FFFD, which is one token and not the three of its UTF-8 bytes.
    """

    def count_one(piece: str) -> int:
        broken = piece.count(REPLACEMENT)
        return broken + tokenizer.count(piece.replace(REPLACEMENT, "")) if broken else tokenizer.count(piece)

    size = sum(map(len, pieces)) + _PIECE_COST * len(pieces)
    return await offloaded(lambda: sum(map(count_one, pieces)), size=size, threshold=INLINE_CHARACTERS)


class Step(msgspec.Struct, gc=False):
    """What run number *choice* adds, and whether that was its end; the last step may add nothing."""

    choice: int
    deltas: Sequence[Delta]
    finished: bool


class Answers:
    """
    The deltas of one or several runs as they come. Whoever makes it must :meth:`close` it; that closes every run.

    One run is read directly. Several are read by a task each, into a queue that is bounded: a slow client holds all of
    them back.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._queue: asyncio.Queue[Step | Exception] = asyncio.Queue(maxsize=2 * len(runs))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Send the requests. Raises :class:`ServiceError`."""
        if len(self.runs) == 1:
            await self.runs[0].start()
            return
        gate = asyncio.Semaphore(_PARALLEL_RUNS)
        self._tasks = [asyncio.create_task(self._pump(number, run, gate)) for number, run in enumerate(self.runs)]

    async def read(self) -> Step:
        """
        Return the next step of any run. Not to be called once every run has finished. Raises the first error of any.
        """
        if not self._tasks:
            run = self.runs[0]
            deltas = await run.read()
            return Step(0, deltas, run.finished)
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        """Stop what still runs."""
        for task in self._tasks:
            task.cancel()
        for run in self.runs:
            run.close()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, number: int, run: Run, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await run.start()
                while not run.finished:
                    deltas = await run.read()
                    await self._queue.put(Step(number, deltas, run.finished))
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            await self._queue.put(error)
