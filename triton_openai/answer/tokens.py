"""The stages of an answer that work on its tokens and its text, for what a model's backend does not do itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triton_openai.answer.stop_strings import HeldLogprobs, StopStrings
from triton_openai.generation import Alternative, Delta, Generation, TokenLogprob
from triton_openai.models.served import ServedModel
from triton_openai.prompts.detokenizer import TokenPieces, detokenizer
from triton_openai.prompts.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TokenNames:
    """
    Names entries that have an id. A part of a character has no text of its own and shows as U+FFFD; its bytes are
    exact.

    *skip_special_tokens* is whether these are left out of the answer's text.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset[int]()

    def named(self, entry: TokenLogprob) -> TokenLogprob:
        """Return *entry* with its names; without an id, or where the backend names another token, as it is."""
        if entry.id is None:
            return entry
        token, raw = self._name(entry.id, entry.token, entry.raw)
        return TokenLogprob(
            token=token,
            logprob=entry.logprob,
            raw=raw,
            top=tuple([self._alternative(item) for item in entry.top]),
            id=entry.id,
            rank=entry.rank,
            hidden=entry.id in self._skipped,
        )

    def _alternative(self, item: Alternative) -> Alternative:
        if item.id is None:
            return item
        token, raw = self._name(item.id, item.token, item.raw)
        return Alternative(token, item.logprob, raw, item.id)

    def _name(self, number: int, told: str, told_raw: bytes | None) -> tuple[str, bytes | None]:
        raw = self._pieces.raw(number)
        if raw is None:
            return (told, told_raw) if told else (self._pieces.decode([number], False), None)
        token = raw.decode("utf-8", "replace")
        if told and not _same(told, token):
            # The tokenizer that was configured is not the backend's: what it says is another token.
            return told, told_raw
        return token, raw


def _same(told: str, ours: str) -> bool:
    """Return whether a backend's name, decoded alone, can be that of our token: spaces and parts may differ."""
    if _REPLACEMENT in told:
        return _REPLACEMENT in ours
    return told.strip() == ours.strip()


class TokenText:
    """
    Gives deltas their text. Holds one stream's state.

    The answer ends before the first of *ends*, which may come anywhere, or of *stops*, which may not come among the
    first *min_tokens*: ``stopped`` says that it has, and ``stop_id`` which of *stops* it was, if it was one. The id
    itself is neither shown nor counted, as an engine does it with the one end id that it knows.
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
        self.stop_id: int | None = None

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
                self.stop_id = None if number in self._ends else number
                delta.token_ids = ids = ids[:place]
                delta.logprobs = delta.logprobs[:place]
                delta.tokens = place
                break
        return ids


def token_text(model: ServedModel, generation: Generation, tokenizer: Tokenizer | None) -> TokenText | None:
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


def stop_strings(model: ServedModel, generation: Generation) -> StopStrings | None:
    """Return the stage that cuts stop strings off, where the backend does not do so or is made to show them."""
    sampling, capabilities = generation.sampling, model.adapter.capabilities
    if not sampling.stop or (capabilities.stop and not (capabilities.stop_shown and sampling.stop_showable)):
        return None
    return StopStrings(sampling.stop, include=bool(sampling.include_stop_str_in_output))


def held_logprobs(generation: Generation) -> HeldLogprobs | None:
    """Return what keeps the log probabilities of tokens that a stop string may still cut off."""
    sampling = generation.sampling
    if not sampling.stop or sampling.logprobs is None:
        return None
    return HeldLogprobs(sampling.stop, include=bool(sampling.include_stop_str_in_output))


def token_names(model: ServedModel, generation: Generation, tokenizer: Tokenizer | None) -> TokenNames | None:
    """Return what names the tokens of a backend that tells their ids beside the text."""
    if generation.sampling.logprobs is None or tokenizer is None or model.adapter.capabilities.tokens:
        return None
    return TokenNames(tokenizer.pieces, skip_special_tokens=generation.sampling.skip_special_tokens is not False)
