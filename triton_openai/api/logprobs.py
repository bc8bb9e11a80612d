"""Log probabilities in the forms of OpenAI's two APIs (openai-openapi 2.3.0), and of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add

import msgspec
from msgspec.structs import astuple, replace

from triton_openai.answer.run import Run
from triton_openai.errors import InvalidAnswer
from triton_openai.generation import IMPOSSIBLE, TokenLogprob


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position; ``bytes`` is null where they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a position."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a plain completion's choice: parallel lists, with null for a token that nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One of the tokens considered at a position of the prompt, as in vLLM's server."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Sequence[dict[str, PromptLogprob] | None]


# Entries that are freed at once.
_PIECE = 1000


def chat_logprobs(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return *entries* as a chat choice has them."""
    return ChatLogprobs(
        content=[
            ContentLogprob(
                entry.token,
                _chosen(entry),
                _bytes(entry.raw),
                [TopLogprob(item.token, _as_json(item.logprob), _bytes(item.raw)) for item in entry.top],
            )
            for entry in entries
        ]
    )


def completion_logprobs(entries: Sequence[TokenLogprob], *, offset: int) -> tuple[CompletionLogprobs, int]:
    """Return *entries* as a plain completion has them, the first at character *offset*, and the offset after them."""
    offsets = []
    for entry in entries:
        # A token that goes on with a character stands where that begins.
        inside = b"\x80" <= (entry.raw or b"")[:1] < b"\xc0"
        offsets.append(max(offset - inside, 0))
        offset += _characters(entry)
    logprobs = CompletionLogprobs(
        tokens=[entry.token for entry in entries],
        token_logprobs=[_chosen(entry) for entry in entries],
        top_logprobs=[_considered(entry) for entry in entries],
        text_offset=offsets,
    )
    return logprobs, offset


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    """Return both in one: those of the prompt, and of what follows it."""
    return CompletionLogprobs(*map(add, astuple(first), astuple(then)))


def narrowed(entries: Sequence[TokenLogprob], count: int) -> Sequence[TokenLogprob]:
    """Return *entries* with no more than *count* alternatives each."""
    return [replace(entry, top=entry.top[:count]) for entry in entries]


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> PromptLogprobs:
    """Return the *entries* of a prompt by token id, the prompt's own token first; ``None`` for the first position."""
    return [_by_id(entry, _chosen(entry)) for entry in entries]


def drop_prompt_logprobs(runs: Sequence[Run]) -> None:
    """Free the prompts' log probabilities in steps: to free hundreds of thousands at once holds the event loop."""
    held = list({id(run.prompt_logprobs): list(run.prompt_logprobs) for run in runs}.values())
    for run in runs:
        run.prompt_logprobs = ()
    for entries in held:
        while entries:
            del entries[-_PIECE:]


def _by_id(entry: TokenLogprob, logprob: float | None) -> dict[str, PromptLogprob] | None:
    if logprob is None:
        return None
    found = {str(entry.id): PromptLogprob(logprob, entry.rank, entry.token)}
    for place, item in enumerate(entry.top):
        found.setdefault(str(item.id), PromptLogprob(_as_json(item.logprob), place + 1, item.token))
    return found


def _considered(entry: TokenLogprob) -> dict[str, float] | None:
    """Return the alternatives by their texts; the chosen token is always there, maybe as one more."""
    logprob = _chosen(entry)
    if logprob is None:
        return None
    return {entry.token: logprob, **{item.token: _as_json(item.logprob) for item in entry.top}}


def _chosen(entry: TokenLogprob) -> float | None:
    if entry.logprob is None:
        return None
    return _as_json(entry.logprob)


def _as_json(logprob: float) -> float:
    """Return *logprob* within what JSON can hold. Raises :class:`InvalidAnswer` for NaN and infinity."""
    if math.isnan(logprob) or logprob == math.inf:
        raise InvalidAnswer("its log probabilities are not numbers")
    return max(logprob, IMPOSSIBLE)


def _characters(entry: TokenLogprob) -> int:
    """Return how many characters begin in a token: one that is spread over several counts where it begins."""
    if entry.hidden:
        return 0
    if entry.raw is None:
        return len(entry.token)
    return sum(byte & 0xC0 != 0x80 for byte in entry.raw)


def _bytes(raw: bytes | None) -> list[int] | None:
    if raw is None:
        return None
    return list(raw)
