"""The tokens that an answer counts, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triton_openai.answer.run import Run
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


def usage_of(runs: Sequence[Run], *, n: int = 1, reasoning_tokens: int | None = None) -> UsageObject | None:
    """
    Return the usage of all *runs* together, or ``None`` if that of any of them is not known.

    A prompt counts once for its *n* answers.
    """
    return _total([run.progress.usage for run in runs], n, reasoning_tokens)


def usage_so_far(run: Run) -> UsageObject | None:
    """Return the usage of *run* up to now, or ``None`` if its backend does not count as it goes."""
    return _total([run.progress.usage_so_far], 1, None)


def _total(usages: Sequence[Usage | None], n: int, reasoning_tokens: int | None) -> UsageObject | None:
    prompt = completion = 0
    cached: int | None = 0
    for number, usage in enumerate(usages):
        if usage is None:
            return None
        completion += usage.completion_tokens
        if number % n == 0:
            prompt += usage.prompt_tokens
            cached = None if cached is None or usage.cached_tokens is None else cached + usage.cached_tokens
    return UsageObject(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=msgspec.UNSET if cached is None else PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=msgspec.UNSET
        if reasoning_tokens is None
        else CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
