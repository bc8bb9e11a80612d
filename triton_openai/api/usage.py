"""The tokens that an answer counts, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triton_openai.generation import Usage


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


def usage_of(usages: Sequence[Usage | None], *, n: int = 1, reasoning_tokens: int | None = None) -> UsageObject | None:
    """
    Return the sum of *usages*, or ``None`` if one of them is not known.

    A prompt counts once for its *n* answers.
    """
    known = [usage for usage in usages if usage is not None]
    if len(known) < len(usages):
        return None
    prompts = known[::n]
    prompt, completion = sum(each.prompt_tokens for each in prompts), sum(each.completion_tokens for each in known)
    cached = [each.cached_tokens for each in prompts if each.cached_tokens is not None]
    return UsageObject(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=msgspec.UNSET
        if len(cached) < len(prompts)
        else PromptTokensDetails(cached_tokens=sum(cached)),
        completion_tokens_details=msgspec.UNSET
        if reasoning_tokens is None
        else CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
