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
    Return the usage of all *runs* together, or ``None`` when it is not known for every one of them.

    A prompt counts once, however many answers (*n*) it has.
    """
    usage = _total([run.progress.usage for run in runs], n)
    if usage is None or reasoning_tokens is None:
        return usage
    details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
    return msgspec.structs.replace(usage, completion_tokens_details=details)


def usage_so_far(runs: Sequence[Run], *, n: int = 1) -> UsageObject | None:
    """Return the usage of all *runs* up to now, or ``None`` when a backend does not count as it goes."""
    return _total([run.progress.usage_so_far for run in runs], n)


def _total(usages: Sequence[Usage | None], n: int) -> UsageObject | None:
    prompt = completion = 0
    cached: int | None = 0
    for number, usage in enumerate(usages):
        if usage is None:
            return None
        completion += usage.completion_tokens
        if number % n == 0:
            prompt += usage.prompt_tokens
            cached = None if cached is None or usage.cached_tokens is None else cached + usage.cached_tokens
    total = UsageObject(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    if cached is None:
        return total
    return msgspec.structs.replace(total, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
