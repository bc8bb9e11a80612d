"""
Runs one generation on its model: adapter, transport, stages, time limits, usage and finish reason.

:meth:`Run.receive` is the hot path between the transport and the writer. The transport calls it in the turn of the
event loop in which the bytes of a token arrive, and it passes the token on in the same turn: no task is woken for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import ClassVar

from msgspec.structs import replace

from triton_openai.adapters._common.base import Adapter, Decoder
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.logits_reader import LogitsReader
from triton_openai.answer.stages import Pipeline
from triton_openai.answer.thinking_budget import ThinkingStage
from triton_openai.answer.upstream_call import UpstreamCall, UpstreamClient, silence_error
from triton_openai.errors import InvalidAnswer
from triton_openai.generation import AnswerState, Delta, FinishReason, Generation, Lora, TokenLogprob, Usage
from triton_openai.models.lora.delivery import LoraDeliveries
from triton_openai.prompts.tokenizer import Tokenizer, count_pieces
from triton_openai.triton.client import Receiver
from triton_openai.triton.tensors import InferRequest, InferResponse

#: Takes the number of a run and its next deltas, all with something to show.
Push = Callable[[int, Sequence[Delta]], None]

# A character has at most four tokens; of an incomplete one the first is counted.
_UNSEEN_TOKENS = 2
_REPLACEMENT = "\ufffd"
# Responses of an answer: a backend may send parts of tokens, and some without any, but not without end.
_STEPS_PER_TOKEN = 16
_MORE_STEPS = 1000
# The most tokens of an incomplete character: a character has at most four bytes.
_MAX_HALVES = 3


class Run(UpstreamCall):
    """
    A running generation. A started run must be closed: :meth:`close` stops the backend's work.

    *lora_deliveries* send the weights of the generation's LoRA adapter where requests have to.
    """

    progress: AnswerState
    #: What its progress is.
    _state: ClassVar[type[AnswerState]] = AnswerState
    #: What ends its thinking.
    _stage: ThinkingStage | None = None

    def __init__(
        self,
        generation: Generation,
        *,
        adapter: Adapter,
        upstream: UpstreamClient,
        time_limits: TimeLimits,
        token_limit: TokenLimit,
        tokenizer: Tokenizer | None = None,
        lora_deliveries: LoraDeliveries | None = None,
    ) -> None:
        progress = self._state(generation)
        super().__init__(
            upstream,
            progress,
            prompt=generation.prompt,
            lora=generation.lora,
            lora_deliveries=lora_deliveries,
        )
        self.generation = generation
        # What the model is asked for: the generation itself, or what goes on from a part of its answer.
        self._request = generation
        progress.whole = not generation.stream and adapter.returns_whole(generation)
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        #: Whether the run has ended, and with which error, if any. :meth:`finalize` sets usage and reason.
        self.over = False
        self.failure: Exception | None = None
        self._adapter = adapter
        self._limits = time_limits
        self._token_limit = token_limit
        self._tokenizer = tokenizer
        self._decoder: Decoder = adapter.decoder(generation)
        self._logits: LogitsReader | None = None
        self._pipeline = Pipeline(adapter.capabilities, generation, tokenizer, progress, self._stage)
        self._max_steps = _STEPS_PER_TOKEN * generation.sampling.max_tokens + _MORE_STEPS
        # Tokens of the steps with nothing to show since the last delta that was pushed.
        self._unshown = 0
        # What may be the beginning of a character. It is shown when the text goes on or ends by itself.
        self._half = ""
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
        if not self.generation.sampling.max_tokens:
            self._push = push
            self._done = done
            self._finish(None)
            return
        self._send(self._receiver())
        self._push = push
        self._done = done

    def _receiver(self) -> Receiver | None:
        """Return the reader of logits, if their log probabilities are wanted; start the time limit of the answer."""
        whole = self._limits.total is not None and (self.progress.whole or self._adapter.returns_whole(self._request))
        if not whole:
            # An answer that comes as a whole has no first token: only the limit for the whole answer applies.
            self._last_response = monotonic()
            self._silence_limit = self._limits.first_token
        if not self._pipeline.reads_logits:
            return None
        self._decoder = self._logits = LogitsReader(self, self._decoder, self._request)
        return self._logits

    def _restart(self) -> Receiver | None:
        if self._logits is not None:
            self._logits.close()
        self._decoder = self._adapter.decoder(self._request)
        self._pipeline = self._new_pipeline()
        return self._receiver()

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self._adapter.capabilities, self._request, self._tokenizer, self.progress, self._stage)

    def _encode(self, lora: Lora | None) -> InferRequest:
        generation = self._request
        if lora is not generation.lora:
            # With the weights of the LoRA adapter.
            generation = replace(generation, lora=lora)
        (request,) = self._adapter.encode(generation)
        if generation.priority and not request.carried:
            # The client of a batch has not asked for a priority: where JSON cannot express it, it is left out.
            expressible = request.json_expressible and self._upstream.priority > 0
            request = replace(request, priority=generation.priority, json_expressible=expressible)
        return request

    def _stop_request(self) -> InferRequest | None:
        return self._adapter.cancel(self._request)

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

    def _ended(self, error: Exception | None) -> None:
        if error is None:
            shown: list[Delta] = []
            try:
                self._pipeline.flush(self._decoder, shown)
                if shown:
                    self._hold_flushed(shown, 0)
                if shown and self._unshown:
                    shown[-1].tokens = self._unshown
                if shown and self._push is not None:
                    self._push(self._number, shown)
            except Exception as failure:  # noqa: BLE001 - the waiting task raises any error
                error = failure
        if error is not None:
            self._abort(error)
        else:
            self._finish(None)

    def _hold(self, delta: Delta) -> None:
        """Hold back the end of *delta* that may be a part of a character."""
        text = self._half + delta.text
        delta.text = text[:-_MAX_HALVES] + text[-_MAX_HALVES:].rstrip(_REPLACEMENT)
        self._half = text[len(delta.text) :]

    def _hold_flushed(self, shown: list[Delta], before: int) -> None:
        """Hold back the same of what the stages had delayed: the deltas in *shown* from the index *before* on."""
        for delta in shown[before:]:
            self._hold(delta)
        shown[before:] = [delta for delta in shown[before:] if delta.text or delta.logprobs]

    def resume(self) -> None:
        """Undo one :meth:`pause`, which does not count as silence."""
        super().resume()
        self._last_response = monotonic()

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
    def no_answer_cause(self) -> str:
        """The likely cause of a missing answer, to append to an error, if the adapter knows one."""
        if self.progress.steps:
            cause = None
        else:
            cause = self._adapter.no_answer_cause(self._request)
        if cause:
            return f" {cause}"
        return ""

    def close(self) -> None:
        """Stop the work on the backend unless it has ended. Never raises; may be called twice."""
        if self._lease is not None:
            self._abort(None)
        self.over = True
        # Breaks a reference cycle that would keep prompt and answer in memory.
        self._push = None
        self._done = None

    def _fall_silent(self) -> None:
        what = "answer"
        if self.progress.steps:
            what = "further token"
        self._fail(silence_error(what, self._silence_limit, self.no_answer_cause))

    def _abort(self, error: BaseException | None) -> None:
        self.progress.cancelled = self.progress.finish_reason is None
        self._stop()
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self.over = True
        if isinstance(error, Exception):
            self.failure = error
        self._release(error)
        if self._logits is not None:
            self._logits.close()
        if self._done is not None:
            self._done(self._number)

    async def finalize(self) -> None:
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
        limit = self._token_limit.effective(generation.sampling.max_tokens, prompt)
        if tokens is None:
            tokens = await self._count_tokens(limit)
        elif progress.finish_reason is None:
            if tokens >= limit:
                progress.finish_reason = FinishReason.LENGTH
            else:
                progress.finish_reason = FinishReason.STOP
        if tokens is not None and prompt is not None:
            cached = progress.cached_tokens
            if cached is not None:
                # A backend may count a whole block of its cache that the prompt fills only in part.
                cached = min(cached, prompt)
            progress.usage = Usage(
                prompt_tokens=prompt,
                completion_tokens=tokens,
                cached_tokens=cached,
            )
        half = self._half
        self._half = ""
        if half and progress.finish_reason is not FinishReason.LENGTH and self._push is not None:
            # It is what the model wrote.
            self._push(self._number, [Delta(half)])

    async def _count_tokens(self, limit: int) -> int | None:
        """
        Return the number of tokens that the backend did not report, and set the finish reason, if both are certain.

        A backend that streams sends a response for each token, with or without text, and often an empty one at the end
        of the sequence. So each response is at least one token, except for a last one without text. Fewer responses
        than *limit* show that the limit was not reached. Of an answer in one response only the text is known: if it
        ends within a character, the limit cut it there.
        """
        progress = self.progress
        max_tokens = self.generation.sampling.max_tokens
        text = progress.text
        steps = progress.steps
        counted = None
        cut = steps >= limit
        if self._tokenizer is not None:
            counted = await count_pieces(self._tokenizer, progress.pieces, progress.dropped)
            counted = max(counted, steps - progress.silent)
            unseen = 0
            if steps == 1 and text.endswith(_REPLACEMENT):
                unseen = _UNSEEN_TOKENS
            cut = counted + unseen >= limit
        if progress.finish_reason is None:
            if cut:
                progress.finish_reason = FinishReason.LENGTH
            elif counted is not None or steps > 1 or len(text.encode("utf-8", "replace")) < limit:
                progress.finish_reason = FinishReason.STOP
        if counted is not None and cut and progress.finish_reason is FinishReason.LENGTH:
            counted = max(counted, limit)
        if counted is None:
            return None
        return min(counted, max_tokens)
