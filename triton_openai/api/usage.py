"""The tokens that an answer counts, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triton_openai.generation import AnswerState, Usage, total_usage


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens came from the backend's cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the completion's tokens were reasoning."""

    reasoning_tokens: int


class UsageObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``usage`` of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def known_usage(progress: AnswerState) -> Usage | None:
    """
    Return the tokens of an answer without a usage that has ended, ``None`` if they are not known.

    Where the backend counts those of the answer, and nobody those of the prompt, the prompt has 0, which none has.
    """
    return None if progress.tokens is None else Usage(prompt_tokens=0, completion_tokens=progress.tokens)


def usage_of(usages: Sequence[Usage | None], *, n: int = 1, reasoning_tokens: int | None = None) -> UsageObject | None:
    """Return the sum of *usages*, or ``None`` if one is not known; see :func:`total_usage`."""
    total = total_usage(usages, n=n)
    if total is None:
        return None
    return UsageObject(
        prompt_tokens=total.prompt_tokens,
        completion_tokens=total.completion_tokens,
        total_tokens=total.prompt_tokens + total.completion_tokens,
        prompt_tokens_details=msgspec.UNSET
        if total.cached_tokens is None
        else PromptTokensDetails(cached_tokens=total.cached_tokens),
        completion_tokens_details=msgspec.UNSET
        if reasoning_tokens is None
        else CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
