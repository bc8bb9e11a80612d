"""The tokens that an answer counts, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from triton_openai.answer.run import Run
from triton_openai.generation import Usage, total_usage


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
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(runs: Sequence[Run], *, n: int = 1, reasoning_tokens: int | None = None) -> UsageObject | None:
    """
    Return the tokens of *runs* that have ended, *n* for each prompt, or ``None`` if those of one are not known.

    Where the backend counts those of the answer, and nobody those of the prompt, the prompt has 0, which none has.
    """
    usages: list[Usage | None] = []
    for run in runs:
        tokens = run.progress.tokens
        if tokens is None:
            counted = None
        else:
            counted = Usage(prompt_tokens=0, completion_tokens=tokens)
        usages.append(run.progress.usage or counted)
    total = total_usage(usages, n=n)
    if total is None:
        return None
    return usage_object(total, reasoning_tokens)


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> UsageObject:
    """Return *usage* in OpenAI's form."""
    prompt_details: PromptTokensDetails | UnsetType = UNSET
    if usage.cached_tokens is not None:
        prompt_details = PromptTokensDetails(cached_tokens=usage.cached_tokens)
    completion_details: CompletionTokensDetails | UnsetType = UNSET
    if reasoning_tokens is not None:
        completion_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=prompt_details,
        completion_tokens_details=completion_details,
    )
