"""
The log probabilities of TensorRT-LLM's text-level models: a list of numbers beside the text, without tokens.

A model that streams sends a step for each token, so the text that a step adds is that token's, as the backend decodes
it: exact, though bytes that the backend could not decode are lost. A step of several tokens, and a whole answer at
once, do not say where one token ends and the next begins; tokenizing the text again would often give the same tokens
and would not show when it does not. So that is not done: the engine itself, asked token by token, tells the ids.

Source of the facts: ``output_log_probs`` of the executor's ``Result`` and of ``all_models/inflight_batcher_llm``.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.errors import UpstreamError
from triton_openai.generation import Delta, TokenLogprob
from triton_openai.triton.tensors import InferResponse

LOGPROBS = "output_log_probs"
CUMULATIVE = "cum_log_probs"
#: What a client whose request is refused can do.
TOKEN_BY_TOKEN = "its engine can do it, answered token by token with --prefer-token-level"

_REPLACEMENT = "\ufffd"


def newest(values: Sequence[float], *, count: int, total: int) -> Sequence[float]:
    """
    Return the values of the *count* new tokens, of *total* so far.

    The executor repeats those of all tokens so far, maybe with padding behind them; a list that is just as long as the
    new tokens is taken for theirs. Raises :class:`UpstreamError` for a list that is neither.
    """
    if len(values) >= total:
        values = values[total - count : total]
    if len(values) != count:
        raise UpstreamError("The model sent log probabilities that do not match its tokens.")
    return values


class StepLogprobs:
    """Reads the log probabilities of one stream of text."""

    def __init__(self) -> None:
        # How many tokens there were, and whether a list holds the new ones alone where nobody counts them.
        self._total = 0
        self._only_new = False
        # Whether bytes of the last token may still be to come.
        self._open = False

    def __call__(self, response: InferResponse, delta: Delta) -> Sequence[TokenLogprob]:
        """Return the entry of *delta*'s token. Raises :class:`UpstreamError` for a step of several."""
        new = self._new(response.numbers(LOGPROBS), delta)
        if not len(new):
            return ()
        if len(new) > 1:
            raise UpstreamError(
                "The model sent several tokens in one step, whose log probabilities cannot be told apart by its text:"
                f" {TOKEN_BY_TOKEN}."
            )
        text = delta.text
        whole = bool(text) and not self._open and _REPLACEMENT not in text
        self._open = not text
        return (TokenLogprob(text, float(new[0]), raw=text.encode() if whole else None),)

    def _new(self, values: Sequence[float], delta: Delta) -> Sequence[float]:
        count = delta.tokens
        if count is None:
            return self._uncounted(values, delta.text)
        self._total += count
        return newest(values, count=count, total=self._total) if count else ()

    def _uncounted(self, values: Sequence[float], text: str) -> Sequence[float]:
        """Return the new values of a release that does not count tokens: the list grows, or shows that it does not."""
        if not self._only_new and len(values) > self._total:
            new, self._total = values[self._total :], len(values)
            return new
        # As long as before although there is new text: these are the new token's, and so were those before.
        self._only_new = self._only_new or bool(text)
        return values if text else ()
