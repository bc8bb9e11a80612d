"""Reads what a carrier of a companion model brings: token ids, log probabilities, and why an answer ends."""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.generation import Alternative, Delta, FinishReason, Generation, TokenLogprob
from triton_openai.triton.tensors import CarriedResponse, InferResponse, Scored

_FINISHES: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class DeliveryDecoder:
    """Reads what a carrier brings for one answer."""

    def __init__(self, generation: Generation) -> None:
        self._logprobs = generation.sampling.logprobs
        self._prompt: int | None = len(generation.prompt_ids or ())
        self._total = 0.0
        self._sums = generation.cumulative_logprob

    def feed(self, response: InferResponse) -> Delta:
        """Return what *response* adds."""
        if not isinstance(response, CarriedResponse):
            raise response.invalid("it did not come over a carrier")
        delivery = response.delivery
        ids = delivery.ids
        delta = Delta(token_ids=ids, tokens=len(ids))
        if self._prompt is not None:
            delta.prompt_tokens = self._prompt
            self._prompt = None
        scores = delivery.logprobs
        if scores is not None:
            if self._logprobs is not None:
                count = self._logprobs
                delta.logprobs = [token_logprob(scored, count) for scored in scores]
            if self._sums:
                self._total += sum([scored[1] for scored in scores])
                delta.cumulative_logprob = self._total
        if delivery.finish is not None:
            delta.finish_reason = _FINISHES.get(delivery.finish)
            if delivery.usage is not None:
                delta.prompt_tokens, delta.cached_tokens, _ = delivery.usage
        return delta

    def flush(self) -> str:
        """Return nothing: ids are never held back."""
        return ""


def token_logprob(scored: Scored, count: int) -> TokenLogprob:
    """Return a token's log probability with *count* alternatives. Names are added where the tokenizer is."""
    number, logprob, rank, top = scored
    alternatives = [Alternative("", value, id=token) for token, value in top[:count]]
    return TokenLogprob("", logprob, id=number, rank=rank, top=tuple(alternatives))
