"""The first text stage of a backend that answers in token ids: ids that end the answer, then ids to text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triton_openai.generation import Delta
from triton_openai.text.detokenizer import detokenizer
from triton_openai.text.naming import TokenNames
from triton_openai.text.pieces import TokenPieces


class TokenText:
    """
    Gives deltas their text. Holds one stream's state.

    The answer ends before the first of *ends*, which may come anywhere, or of *stops*, which may not come among the
    first *min_tokens*: ``stopped`` says that it has. The id itself is neither shown nor counted, as an engine does it
    with the one end id that it knows.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        ends: Collection[int] = (),
        stops: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._names = TokenNames(pieces, skip_special_tokens=skip_special_tokens)
        self._text = detokenizer(pieces, context=context, skip_special_tokens=skip_special_tokens)
        self._ends = frozenset(ends)
        self._stops = frozenset(stops)
        self._any = self._ends | self._stops
        self._min_tokens = min_tokens
        self._count = 0
        self.stopped = False

    def feed(self, delta: Delta) -> None:
        """Set the text of *delta*, and cut what comes from the id that ends the answer on."""
        if self.stopped:
            delta.token_ids, delta.logprobs, delta.tokens = (), (), 0
            return
        ids = delta.token_ids
        if not self._any.isdisjoint(ids):
            ids = self._cut(delta)
        self._count += len(ids)
        delta.text = self._text.feed(ids)
        if delta.logprobs:
            delta.logprobs = [self._names.named(entry) for entry in delta.logprobs]

    def flush(self) -> str:
        """Return the text that was held back."""
        return self._text.flush()

    def _cut(self, delta: Delta) -> Sequence[int]:
        ids = delta.token_ids
        for place, number in enumerate(ids):
            if number in self._ends or (number in self._stops and self._count + place >= self._min_tokens):
                self.stopped = True
                delta.token_ids = ids = ids[:place]
                delta.logprobs = delta.logprobs[:place]
                delta.tokens = place
                break
        return ids
