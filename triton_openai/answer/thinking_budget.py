"""A limit of the tokens of thinking, held in the service: the stage that ends the thinking of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from triton_openai.generation import Delta, tokens_in
from triton_openai.parsers.thinking_meter import Span, ThinkingMeter
from triton_openai.prompts.tokenizer import Tokenizer

# The characters that are tokenized at first for each token that is wanted.
_CHARACTERS_PER_TOKEN = 8
# Longer texts, which only whole answers have, are estimated: to count them would hold up the event loop.
_MAX_COUNTED = 16_384
# A response of more characters than this has several tokens, where the backend does not count them.
_LONG_TOKEN = 32


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How much an answer may think, and how its thinking ends there."""

    #: The tokens of thinking.
    tokens: int
    #: Makes what finds the thinking in the answer to a prompt.
    meter: Callable[[str], ThinkingMeter]
    #: The text that ends the thinking in place of the model, and its ids where the tokenizer is known.
    ending: str
    ending_ids: tuple[int, ...] = ()


class ThinkingStage:
    """
    Counts the thinking of one answer, and cuts the answer where its budget is spent; ``spent`` is whether it was.
    ``tokens`` is how many tokens the answer has up to the end of its thinking.

    A response with several tokens is cut between them, by the *tokenizer* if there is one and the text is not very
    long, else by their share of the text. The beginning of a marker is waited for: it may end the thinking by itself.
    """

    def __init__(self, budget: ThinkingBudget, prompt: str, tokenizer: Tokenizer | None) -> None:
        self._left = budget.tokens
        self._meter = budget.meter(prompt)
        self._tokenizer = tokenizer
        self.spent = budget.tokens == 0 and self._meter.inside
        self.tokens = 0

    def feed(self, delta: Delta) -> None:
        """Count *delta*, and cut it where the budget is spent."""
        meter = self._meter
        if meter.over:
            return
        was_inside = meter.inside
        spans = meter.feed(delta.text)
        tokens = self._tokens_of(delta)
        size = sum([end - start for start, end in spans])
        if tokens == 1:
            thinking = int(bool(size) or (was_inside and meter.inside))
        elif not size:
            thinking = 0
        elif self._tokenizer is not None and len(delta.text) <= _MAX_COUNTED:
            thinking = sum([self._tokenizer.count(delta.text[start:end]) for start, end in spans])
        else:
            thinking = -(-tokens * size // len(delta.text))
        if thinking > self._left and tokens > 1 and size:
            self.tokens += self._cut(delta, spans, self._left, thinking, tokens)
            self.spent = True
            return
        self.tokens += tokens
        self._left -= thinking
        ends_here = self._left <= 0 and meter.inside and not meter.is_at_marker
        # What has ended by itself does not go on.
        self.spent = ends_here and delta.finish_reason is None

    def _tokens_of(self, delta: Delta) -> int:
        """Return the tokens of *delta*. A backend that does not count sends one in a response, or the whole answer."""
        if delta.tokens is not None:
            return delta.tokens
        if len(delta.text) <= _LONG_TOKEN:
            return 1
        if self._tokenizer is not None and len(delta.text) <= _MAX_COUNTED:
            return self._tokenizer.count(delta.text)
        return tokens_in(delta.text)

    def _cut(self, delta: Delta, spans: Sequence[Span], left: int, thinking: int, tokens: int) -> int:
        """
        Cut *delta*, of which *thinking* of its *tokens* are in *spans*, after *left* of them.

        Returns how many tokens it keeps.
        """
        text = delta.text
        cut = _share(spans, left, thinking)
        kept = max(1, round(tokens * cut / len(text)))
        start = spans[0][0]
        countable = start + _CHARACTERS_PER_TOKEN * left <= _MAX_COUNTED
        if self._tokenizer is not None and len(spans) == 1 and countable:
            before = self._tokenizer.count(text[:start])
            ids = delta.token_ids or self._first_ids(text, before + left)
            kept = before + left
            exact = self._tokenizer.decode(ids[:kept], skip_special_tokens=False)
            if text.startswith(exact) and len(exact) >= start:
                cut = len(exact)
        delta.text = text[:cut]
        delta.token_ids = delta.token_ids[:kept]
        delta.logprobs = delta.logprobs[:kept]
        delta.finish_reason = None
        kept = min(kept, tokens)
        if delta.tokens is not None:
            delta.tokens = kept
        return kept

    def _first_ids(self, text: str, count: int) -> Sequence[int]:
        """Return the ids of the beginning of *text*, *count* at least if it has as many."""
        assert self._tokenizer is not None
        size = _CHARACTERS_PER_TOKEN * (count + 1)
        ids = self._tokenizer.encode(text[:size])
        while size < min(len(text), _MAX_COUNTED) and len(ids) <= count:
            size *= 2
            ids = self._tokenizer.encode(text[:size])
        return ids


def _share(spans: Sequence[Span], left: int, thinking: int) -> int:
    """Return the position after the share *left* / *thinking* of the characters in *spans*."""
    wanted = sum([end - start for start, end in spans]) * left // thinking
    for start, end in spans:
        if wanted <= end - start:
            return start + wanted
        wanted -= end - start
    return spans[-1][1]
