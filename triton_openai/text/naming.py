"""Names for the tokens of log probabilities: the text and the exact bytes that the tokenizer has for an id."""

from __future__ import annotations

from triton_openai.generation import Alternative, TokenLogprob
from triton_openai.text.pieces import TokenPieces

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
