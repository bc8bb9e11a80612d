"""
Runs one generation on its model: adapter, transport, text stages, timeouts, and the end of it.

The loop of :meth:`Run.read` is the hot path between the transport and the writer: per response one decode, one
stop-string stage where there are stop strings, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import structlog

from triton_openai.adapters._common.base import Decoder
from triton_openai.answer.logprobs import INLINE_NUMBERS, log_probabilities
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.answer.tokens import held_logprobs, stop_strings, token_names, token_text
from triton_openai.config import TritonSettings
from triton_openai.errors import InvalidRequest, ServiceError, UpstreamTimeout
from triton_openai.generation import Delta, FinishReason, Generation, Lora, TokenLogprob, Usage
from triton_openai.models.lora.delivery import LoraAnswers
from triton_openai.models.served import ServedModel
from triton_openai.prompts.offload import run as offloaded
from triton_openai.prompts.tokenizer import Tokenizer, count_pieces, tokens_in, tokens_in_pieces
from triton_openai.telemetry.observation import UPSTREAM, InterTokenLatency
from triton_openai.triton.client import ResponseStream, SingleAnswer, TritonClient
from triton_openai.triton.status import failed_midway, no_answer
from triton_openai.triton.tensors import InferRequest

_log = structlog.get_logger(__name__)


class Background:
    """Holds running tasks, so that none is lost to the garbage collector or left behind at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, timeout: float) -> None:
        """Run *work* for at most *timeout* seconds. What it raises of ours is logged; nobody waits for it."""
        task = asyncio.create_task(self._guarded(work, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float = 2.0) -> None:
        """Give what runs a moment to finish, then cancel it."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=timeout)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    @staticmethod
    async def _guarded(work: Coroutine[Any, Any, Any], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await work
        except ServiceError as error:
            _log.warning("background work failed", reason=error.reason)
        except TimeoutError:
            _log.warning("background work took too long", seconds=timeout)


_STOP_REQUEST_TIMEOUT = 5.0
# A character is four tokens at most, and the first of half a one is counted.
_UNSEEN_TOKENS = 2


class Run:
    """One prompt being answered. Whoever starts it must :meth:`close` it; that stops the work on the backend."""

    def __init__(
        self,
        model: ServedModel,
        generation: Generation,
        *,
        client: TritonClient,
        settings: TritonSettings,
        limits: TimeLimits,
        background: Background,
        tokenizer: Tokenizer | None,
    ) -> None:
        # What runs
        self.model = model
        self.generation = generation
        self._client = client
        self._settings = settings
        self._limits = limits
        self._background = background
        self._tokenizer = tokenizer
        # The stream's state
        self._loop = asyncio.get_running_loop()
        self._decoder: Decoder = model.adapter.decoder(generation)
        self._token_text = token_text(model, generation, tokenizer)
        self._stops = stop_strings(model, generation)
        self._names = token_names(model, generation, tokenizer)
        self._held = held_logprobs(generation)
        self._stream: ResponseStream | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last = self._loop.time()
        self._waiting = False
        self._ended = False
        # Counts: None once the backend has left one out; silent is a last step without text
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._tokens: int | None = 0
        self._steps = 0
        self._silent = True
        self._text: list[str] = []
        # The result
        self.finish_reason: FinishReason | None = None
        #: The stop string or the stop token that ended the answer, where one did and it is known which.
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None
        self.error: ServiceError | None = None
        self.cancelled = False
        # When: sent to Triton, answered with a first token, and at its end
        self.sent: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.inter_token_latency = InterTokenLatency()
        self.cumulative_logprob: float | None = None
        self.prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def usage_so_far(self) -> Usage | None:
        """The counts up to now, where the backend gives them with every step."""
        if self.usage is not None or self._tokens is None or self._prompt_tokens is None:
            return self.usage
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._tokens)

    @property
    def usage_estimate(self) -> Usage:
        """About what the counts up to now are, made of what is known of them and of the texts."""
        prompt, tokens, ids = self._prompt_tokens, self._tokens, self.generation.prompt_ids
        if prompt is None:
            prompt = len(ids) if ids is not None else tokens_in(self.generation.prompt)
        return Usage(prompt_tokens=prompt, completion_tokens=tokens or tokens_in_pieces(self._text))

    @property
    def steps(self) -> int:
        """In how many steps the answer came up to now: a token each, or a few, or all of them."""
        return self._steps

    @property
    def text(self) -> str:
        """What the backend has written up to now: before stop strings, and before anything is read out of it."""
        return "".join(self._text)

    @property
    def finished(self) -> bool:
        """Whether the generation has ended and ``finish_reason`` and ``usage`` are settled."""
        return self._ended

    async def start(self) -> None:
        """Send the request; nothing where no tokens are wanted. Raises :class:`ServiceError`."""
        if not self.generation.sampling.max_tokens:
            return
        if self.model.lora_delivery is not None:
            answers = LoraAnswers(self.model.lora_delivery, self._open)
            await answers.start()
            self._stream = answers
        else:
            self._stream = await self._open(self.generation.lora)
        if self._ended:
            # Closed while the stream was being opened, by who could not know it yet.
            self._ended = False
            self.close()
            return
        if self._limits.total is None or not self.model.adapter.at_once(self.generation):
            # What comes at once has no first token; the limit of the whole answer holds for it.
            self._watch_silence(self._limits.first_token)

    async def _open(self, lora: Lora | None) -> ResponseStream:
        generation = self.generation
        if lora is not generation.lora:
            generation = msgspec.structs.replace(generation, lora=lora)
        request = self.model.adapter.encode(generation)
        if generation.priority:
            request = msgspec.structs.replace(request, priority=generation.priority, json_expressible=False)
        request = UPSTREAM.get().begin(request, self, lora=None if lora is None else lora.name)
        self._last = self._loop.time()
        # A LoRA adapter's weights may make a second attempt of it; the client has waited since the first.
        self.sent = self._last if self.sent is None else self.sent
        return await self._client.stream(request) if request.stream else SingleAnswer(self._client, request)

    async def read(self) -> Sequence[Delta]:
        """
        Return the next deltas, all with text; empty only when it has finished, when ``finish_reason`` and ``usage``
        are known.

        Raises :class:`ServiceError` for what went wrong upstream.
        """
        if self._stream is None:
            await self._conclude()
            return ()
        # *told* is whether the backend, which looks for stop strings itself, says that the answer ends here.
        stops, token_text, told = self._stops, self._token_text, False
        while not self._ended:
            self._waiting, self._last = True, self._loop.time()
            try:
                responses = await self._stream.read()
            except InvalidRequest as error:
                if not self._steps:
                    raise
                raise failed_midway(error) from error
            finally:
                self._waiting = False
            deltas: list[Delta] = []
            if not responses:
                if self._steps == 0:
                    raise no_answer(self.model.name)
                self._append_rest(deltas)
                await self._conclude()
                return deltas
            came = self._loop.time()
            if self._steps == 0:
                self.first = came
                self._watch_silence(self._limits.idle)
            for response in responses:
                for delta in self._decoder.feed(response):
                    if delta.logits is not None:
                        await self._add_logprobs(delta)
                    if token_text is not None:
                        token_text.feed(delta)
                    self._count(delta, came)
                    if stops is not None:
                        told = self.model.adapter.capabilities.stop and delta.finish_reason is FinishReason.STOP
                        delta.text = stops.end(delta.text) if told else stops.feed(delta.text)
                        if stops.matched is not None:
                            self.finish_reason, self.stop_reason = FinishReason.STOP, stops.matched
                    if delta.logprobs:
                        self._tell(delta)
                    if delta.text or delta.logprobs or (delta.token_ids and self.generation.token_ids):
                        deltas.append(delta)
                if stops is not None and stops.matched is not None and not told:
                    # The rest is not wanted: stop paying for it at once, then tell the client.
                    self._append_held(deltas)
                elif token_text is not None and token_text.stopped:
                    self.finish_reason, self.stop_reason = FinishReason.STOP, token_text.stop_id
                    self._append_rest(deltas)
                else:
                    continue
                self.close()
                await self._conclude()
                return deltas
            if deltas:
                return deltas
        return ()

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error* and stop the work on the backend, unless it has ended or not begun."""
        if self._stream is not None and not self._ended:
            self._stream.abort(error)

    def close(self) -> None:
        """Stop the work on the backend unless it has ended. Never raises; may be called twice."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._ended or self._stream is None:
            self._ended = True
            return
        self._ended = True
        self.cancelled = self.finish_reason is None
        self.ended = self._loop.time()
        self._stream.close()
        order = self.model.adapter.cancel(self.generation)
        if order is not None:
            self._background.start(self._send(order), timeout=_STOP_REQUEST_TIMEOUT)

    async def _send(self, order: InferRequest) -> None:
        try:
            with UPSTREAM.get().call(order) as sent:
                if not sent.stream:
                    await self._client.infer(sent)
                    return
                stream = await self._client.stream(sent)
                try:
                    while await stream.read():
                        pass
                finally:
                    stream.close()
        except ServiceError as error:
            # The engine of a model that is not decoupled has no way to answer, and stops all the same.
            _log.debug("stop request failed", model=order.model, reason=error.reason)

    def _count(self, delta: Delta, came: float) -> None:
        self._steps += 1
        self._silent = not delta.text
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            last = delta.token_ids[-1] if delta.token_ids else None
            if delta.finish_reason is FinishReason.STOP and last in self.generation.sampling.stop_token_ids:
                self.stop_reason = last
        if delta.tokens is None:
            self._tokens = None
        elif self._tokens is not None:
            self._tokens += delta.tokens
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.text:
            self._text.append(delta.text)
            self.inter_token_latency.arrived(came)

    async def _add_logprobs(self, delta: Delta) -> None:
        """Make the log probabilities of *delta* from its logits, and let these go."""
        logits, delta.logits = delta.logits, None
        assert logits is not None
        ids, count = delta.token_ids, self.generation.sampling.logprobs or 0
        delta.logprobs = await offloaded(
            lambda: log_probabilities(logits, ids, count), size=len(ids) * logits.width, threshold=INLINE_NUMBERS
        )

    def _tell(self, delta: Delta) -> None:
        """Name the tokens of *delta*'s log probabilities, and keep those that a stop string may still cut off."""
        if self._names is not None:
            delta.logprobs = [self._names.named(entry) for entry in delta.logprobs]
        if self._held is not None:
            delta.logprobs = self._held.feed(delta.logprobs)

    def _append_held(self, deltas: list[Delta]) -> None:
        """Append the entries that were still held, now that the answer's end is known, with the text they belong to."""
        entries = self._held.end() if self._held is not None else ()
        if entries and deltas:
            deltas[-1].logprobs = [*deltas[-1].logprobs, *entries]
        elif entries:
            deltas.append(Delta(logprobs=entries))

    def _append_rest(self, deltas: list[Delta]) -> None:
        """Append what the decoder and the stop strings still hold, now that nothing follows."""
        for delta in self._decoder.flush():
            self._text.append(delta.text)
            self._silent = False
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
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._stops.matched
            rest = self._stops.flush()
            if rest:
                deltas.append(Delta(rest))
        self._append_held(deltas)

    async def _conclude(self) -> None:
        """Settle usage and finish reason: from the backend, else from what can be counted, else they stay unknown."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._ended = True
        self.ended = self._loop.time()
        tokens, prompt = self._tokens, self._prompt_tokens
        if prompt is None and self.generation.prompt_ids is not None:
            prompt = len(self.generation.prompt_ids)
        if prompt is None and self._tokenizer is not None:
            prompt = await self._tokenizer.count_async(self.generation.prompt, self.model.adapter.hints.adds_bos)
        limit = self.generation.sampling.max_tokens
        room = self.model.settings.max_model_len
        if room is not None and prompt is not None:
            limit = min(limit, room - prompt)
        if tokens is None:
            tokens = await self._infer(limit)
        elif self.finish_reason is None:
            self.finish_reason = FinishReason.LENGTH if tokens >= limit else FinishReason.STOP
        if tokens is not None and prompt is not None:
            cached = self._cached_tokens
            self.usage = Usage(
                prompt_tokens=prompt,
                completion_tokens=tokens,
                # A backend may count a block of its cache whole that the prompt fills in part.
                cached_tokens=None if cached is None else min(cached, prompt),
            )

    async def _infer(self, limit: int) -> int | None:
        """
        Return the tokens of an answer that its backend did not count, and set why it ended, where neither is a guess.

        A backend that streams sends a response for each token, with or without text, and often an empty one at the end
        of the sequence. So each response is a token at least, but for a last one without text, and fewer responses than
        *limit* show that it was not reached. An answer that came at once shows its text alone: if that ends with half a
        character, it was cut there.
        """
        text, steps, most = "".join(self._text), self._steps, self.generation.sampling.max_tokens
        counted, cut = None, steps >= limit
        if self._tokenizer is not None:
            counted = max(await count_pieces(self._tokenizer, self._text), steps - self._silent)
            cut = counted + (_UNSEEN_TOKENS if steps == 1 and text.endswith("\ufffd") else 0) >= limit
        if self.finish_reason is None:
            if cut:
                self.finish_reason = FinishReason.LENGTH
            elif counted is not None or steps > 1 or len(text.encode("utf-8", "replace")) < limit:
                self.finish_reason = FinishReason.STOP
        if counted is not None and cut and self.finish_reason is FinishReason.LENGTH:
            counted = max(counted, limit)
        return None if counted is None else min(counted, most)

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
