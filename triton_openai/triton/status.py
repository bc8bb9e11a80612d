"""
One table that turns Triton's and the backends' error texts into our errors; both transports use it.

Triton reports a failed stream by text only (gRPC), or with an HTTP status that is unreliable for ``generate``, so the
text decides first, the most specific rule first; the transport's status is only the last resort. The texts are listed
in the backends' own sources; what may carry server paths, addresses or tracebacks goes to the log as ``detail``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from triton_openai.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LoraNotLoaded,
    ModelConflict,
    ModelNotFound,
    NotImplementedUpstream,
    Overloaded,
    PromptRefused,
    RequestRefused,
    ServiceError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)

_REQUEST_ID = re.compile(r"\[request id: [^\]]*\]\s*")
_ENSEMBLE = re.compile(r"in ensemble '[^']*', ")
# Where a sentence ends and a stack begins: Python's, Triton's stub's, and those of C++ backends.
_STACK = re.compile(r"Traceback|File \"|\bAt:\s*\n|^\s*\d+\s+0x[0-9a-fA-F]", re.MULTILINE)
# A place in the sources, in parentheses or before a message, as TensorRT-LLM and xgrammar log it.
_PLACE = re.compile(r" ?\(/[\w.-]+/[^()\s]*\)|\[\d\d:\d\d:\d\d\] /[^\s:]+:\d+:? ?")
# What a server keeps to itself: addresses on the network and in memory, and paths.
_PRIVATE = re.compile(
    r"\w+://[^\s'\"<>]+|(['\"])/[^'\"]*/[^'\"]*\1|(?<![\w.])/[\w.-]+/[\w./-]+(?::\d+)?|0x[0-9a-fA-F]{4,}"
)
_LONGEST_TEXT = 4000
_MAX_REASON = 500


class Failure(msgspec.Struct, frozen=True):
    """A failure as a transport saw it: its *text*, the *model* asked, and the transport's *status* name, if any."""

    text: str
    model: str
    status: str = ""


class Rule(msgspec.Struct, frozen=True):
    """A text *pattern* and the error that it means."""

    pattern: re.Pattern[str]
    error: Callable[[Failure, re.Match[str]], ServiceError]


def public_reason(text: str) -> str | None:
    """
    Return *text* as it may be shown to a client, on one line of at most 500 characters.

    Request ids, ensemble prefixes and stack traces are dropped. Paths and addresses become an ellipsis. ``None`` when
    nothing is left.
    """
    text = _ENSEMBLE.sub("", _REQUEST_ID.sub("", text[:_LONGEST_TEXT]))
    stack = _STACK.search(text)
    text = " ".join(text[: stack.start() if stack else None].split())
    text = _PRIVATE.sub("…", _PLACE.sub("", text)).strip()
    return text[:_MAX_REASON] if re.search(r"\w", text) else None


def _too_long(failure: Failure, match: re.Match[str]) -> ServiceError:
    prompt, limit = match.group("prompt"), match.group("limit")
    return ContextLengthExceeded(
        f"This model's maximum input is {limit} tokens, but the request's prompt has {prompt} tokens.",
        detail=failure.text,
    )


def _limit_only(failure: Failure, match: re.Match[str]) -> ServiceError:
    reason = public_reason(failure.text.removeprefix("Error generating stream: "))
    return ContextLengthExceeded(reason or "The prompt is longer than the model takes.", detail=failure.text)


def _refused(failure: Failure, match: re.Match[str]) -> ServiceError:
    return RequestRefused(public_reason(match.groupdict().get("reason") or match.group(0)), detail=failure.text)


def _no_room(failure: Failure, match: re.Match[str]) -> ServiceError:
    return ContextLengthExceeded(
        f"This model's maximum context length is {match['limit']} tokens, but the request needs {match['prompt']} for"
        f" its prompt and {match['answer']} for its answer.",
        detail=failure.text,
    )


def _empty_prompt(failure: Failure, match: re.Match[str]) -> ServiceError:
    return PromptRefused("The prompt is empty: there is nothing to continue.", detail=failure.text)


def _no_lora(failure: Failure, match: re.Match[str]) -> ServiceError:
    name = public_reason(match["name"] or "")
    which = f"the LoRA adapter '{name}'" if name else "this LoRA adapter, or its weights"
    return LoraNotLoaded(f"The model's backend does not have {which}.", param="model", detail=failure.text)


def _sampling_refused(failure: Failure, match: re.Match[str]) -> ServiceError:
    return InvalidRequest("The model's backend refused the sampling parameters.", detail=failure.text)


def _unreadable_image(failure: Failure, match: re.Match[str]) -> ServiceError:
    return InvalidRequest("The model's backend cannot read an image of the request.", detail=failure.text)


def _generation_failed(failure: Failure, match: re.Match[str]) -> ServiceError:
    # The backend passes on the text of a ValueError (the request's fault) and drops the text of everything else.
    return _refused(failure, match) if match.group("reason").strip() else _failed(failure)


def _failed(failure: Failure) -> ServiceError:
    # A failure may say anything. What a client can do nothing about is shown only where nothing has to be taken out.
    text = failure.text.strip()
    private = "\n" in text or _STACK.search(text) or _PRIVATE.search(text)
    return model_failed(None if private else public_reason(text), detail=failure.text)


def model_failed(said: str | None, *, detail: str | None) -> UpstreamError:
    """Return the error for a model that failed; *said* is what a client may read of the reason."""
    message = f"The model failed: {said}" if said else "The model failed to answer the request."
    return UpstreamError(message, detail=detail)


def failed_midway(error: InvalidRequest) -> UpstreamError:
    """Return what *error* is once the answer has begun: backends word both alike, and had accepted the request."""
    said = error.said if isinstance(error, RequestRefused) else error.message
    return model_failed(said, detail=error.detail)


def _not_loaded(failure: Failure, match: re.Match[str]) -> ServiceError:
    reason = public_reason(match.group("reason"))
    message = f"Triton could not load the model '{failure.model}'"
    return UpstreamError(
        f"{message}: {reason}" if reason else f"{message}; its log says why.",
        code="model_load_failed",
        detail=failure.text,
    )


def _unavailable(failure: Failure, match: re.Match[str]) -> ServiceError:
    return UpstreamUnavailable("The model is not available at the moment.", detail=failure.text, retry_after=2)


def _rule(pattern: str, error: Callable[[Failure, re.Match[str]], ServiceError]) -> Rule:
    return Rule(re.compile(pattern, re.DOTALL), error)


RULES: tuple[Rule, ...] = (
    # Triton's core.
    _rule(
        r"Exceeds maximum queue size",
        lambda f, _: Overloaded("The model's queue is full.", detail=f.text, retry_after=1),
    ),
    _rule(
        r"Request timeout expired",
        lambda f, _: UpstreamTimeout("The request waited too long in the model's queue.", detail=f.text, retry_after=1),
    ),
    _rule(r"Request for unknown model|has no available versions", lambda f, _: ModelNotFound(f.model)),
    _rule(r"is not ready|Stub process .* is not healthy|unhealthy|shutting down|EngineCore encountered", _unavailable),
    # Its model repository.
    _rule(
        r"explicit model load / unload is not allowed",
        lambda f, _: NotImplementedUpstream(
            "Triton does not load or unload models by request: it was not started with --model-control-mode=explicit.",
            detail=f.text,
        ),
    ),
    _rule(
        r"currently loading or unloading",
        lambda f, _: ModelConflict(
            f"Another model that '{f.model}' needs, or that needs it, is being loaded or unloaded.",
            param="model",
            code="model_busy",
            detail=f.text,
        ),
    ),
    _rule(r"(?:failed to load|load failed for model) '[^']*'[,:]? (?P<reason>.*)", _not_loaded),
    _rule(
        r"doesn't support models with decoupled transaction policy|Streaming is only supported",
        lambda f, _: NotImplementedUpstream("The model's deployment does not stream.", detail=f.text),
    ),
    # TensorRT-LLM's executor, through each of its wrappers.
    _rule(r"Prompt length \((?P<prompt>\d+)\) exceeds maximum (?:input|sequence) length \((?P<limit>\d+)\)", _too_long),
    _rule(
        r"Input length \((?P<prompt>\d+)\) \+ max new tokens \((?P<answer>\d+)\)[^.]*? must be less than max sequence"
        r" length \((?P<limit>\d+)\)",
        _no_room,
    ),
    # TensorRT-LLM's LLM API: PyTorch's limits of a batch and of a sequence. It divides lengths, which makes floats.
    _rule(
        r"sum of prompt length \((?P<prompt>\d+)(?:\.\d+)?\).*? should not exceed max_\w+ \((?P<limit>\d+)\)", _too_long
    ),
    _rule(r"max_seq_len \((?P<limit>\d+)\) - `splited_prompt_len` \((?P<prompt>\d+)(?:\.\d+)?\)", _too_long),
    # vLLM's engine, over its releases.
    _rule(
        r"prompt \((?:total )?length (?P<prompt>\d+)\) .*?\b(?:length|context length)(?: of)? \(?(?P<limit>\d+)\)?",
        _too_long,
    ),
    _rule(r"passed (?P<prompt>\d+) input tokens .*? maximum input length of (?P<limit>\d+)", _too_long),
    _rule(r"maximum (?:context|model) length|(?:[Pp]rompt|[Ii]nput)[^.]{0,40} is too long", _limit_only),
    # Each of them, in its own words.
    _rule(
        r"!mInputTokenIds\.empty\(\)|[Pp]rompt(?: \w+)? (?:can ?not|can't|must not|should not) be empty"
        r"|[Pp]rompt is empty|[Ee]mpty prompt|text_input is required",
        _empty_prompt,
    ),
    _rule(
        r"'NoneType' object has no attribute|Unexpected keyword argument|Failed to process the request",
        _sampling_refused,
    ),
    # Pillow, in whichever backend.
    _rule(
        r"cannot identify image file|image file is truncated|broken data stream|decompression bomb",
        _unreadable_image,
    ),
    _rule(r"(?P<reason>Model [^\n]* does not support '(?:generate|embed)' request)", _refused),
    _rule(
        r"LoRA (?P<name>[^\n]{1,200}) is not supported|LoRA feature is not enabled|LoRA task \d+ not found in cache",
        _no_lora,
    ),
    _rule(r"Error generating (?:stream|request): ?(?P<reason>.*)", _generation_failed),
    _rule(
        r"PEFT Cache is full|There are no done tasks to evict",
        lambda f, _: Overloaded("The model has no room for another LoRA adapter now.", detail=f.text, retry_after=1),
    ),
    # The BLS and Python models, whose texts stand inside tracebacks.
    _rule(r"max_tokens must be a single value > 0", _refused),
    _rule(
        r"An error occurred when processing the input values for request id [^,]*, the error was '(?P<reason>[^']*)'",
        _refused,
    ),
    _rule(r"maximum input size|exceeds the maximum allowed input size", _refused),
)

_BY_STATUS: dict[str, Callable[[Failure], ServiceError]] = {
    "UNAVAILABLE": lambda f: UpstreamUnavailable(
        "Triton is not available at the moment.", detail=f.text, retry_after=2
    ),
    "DEADLINE_EXCEEDED": lambda f: UpstreamTimeout("Triton did not answer in time.", detail=f.text),
    "CANCELLED": lambda f: UpstreamError("Triton cancelled the request.", detail=f.text),
    "RESOURCE_EXHAUSTED": lambda f: UpstreamError(
        "A message was too large for Triton or for this service.", detail=f.text
    ),
    "UNIMPLEMENTED": lambda f: NotImplementedUpstream("Triton does not support this.", detail=f.text),
    "501": lambda f: NotImplementedUpstream("Triton does not support this.", detail=f.text),
    "503": lambda f: UpstreamUnavailable("Triton is not available at the moment.", detail=f.text, retry_after=2),
}


def classify(failure: Failure) -> ServiceError:
    """Return the error that *failure* means; what no rule knows is the upstream's fault (502)."""
    for rule in RULES:
        match = rule.pattern.search(failure.text)
        if match is not None:
            return rule.error(failure, match)
    by_status = _BY_STATUS.get(failure.status)
    return by_status(failure) if by_status is not None else _failed(failure)


def no_answer(model: str) -> ServiceError:
    """Return the error for a stream that ended without a single response, which Triton itself does not report."""
    return UpstreamError("The model ended without an answer.", detail=f"model {model!r} sent no response")


def cut_off(reason: str | None = None) -> ServiceError:
    """Return the error for a connection that broke before the answer was complete; *reason* goes to the log."""
    return UpstreamError(
        "The connection to Triton was lost before the answer was complete.",
        code="upstream_disconnected",
        detail=reason,
    )


def unreachable(reason: str) -> ServiceError:
    """Return the error for a Triton that cannot be connected to."""
    return UpstreamUnavailable("Triton cannot be reached at the moment.", detail=reason, retry_after=2)
