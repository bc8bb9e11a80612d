"""
One table that turns Triton's and the backends' error texts into our errors; both transports use it.

Triton reports a failed stream by text only (gRPC), or with an HTTP status that is unreliable for ``generate``. So the
text decides, by the first rule that matches; the transport's status decides only for texts that no rule knows. The
texts are those of the backends' sources. What may have paths, addresses or tracebacks is ``detail``, for the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from triton_openai import errors
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.triton.reloading import unknown_model_error

_REQUEST_ID = re.compile(r"\[request id: [^\]]*\]\s*")
_ENSEMBLE = re.compile(r"in ensemble '[^']*', ")
# Where a sentence ends and a stack begins: Python's, Triton's stub's, and those of C++ backends.
_STACK = re.compile(r"Traceback|File \"|\bAt:\s*\n|^[^\S\n]*\d+[^\S\n]+0x[0-9a-fA-F]", re.MULTILINE)
# A place in the sources, in parentheses or before a message, as TensorRT-LLM and xgrammar log it.
_PLACE = re.compile(r" ?\(/[\w.-]+/[^()\s]*\)|\[\d\d:\d\d:\d\d\] /[^\s:]+:\d+:? ?")
# Private to the server: network and memory addresses, and paths.
_PRIVATE = re.compile(
    r"\b\w{1,40}://[^\s'\"<>]+|(['\"])/[^'\"]*/[^'\"]*\1|(?<![\w.])/[\w.-]+/[\w./-]+(?::\d+)?|0x[0-9a-fA-F]{4,}"
)
# TensorRT-LLM's LLM API model and the vLLM backend put this before every error. Rules recognise those that are the
# request's fault.
_WRAPPING = re.compile(r".*Error generating (?:request|stream):", re.DOTALL)
# The words in vLLM's errors: when it refuses a request (parameters, prompts, grammars, files), and of its engine.
_OF_REQUESTS = (
    r"(?i:\b(?:temperature|seed|top_[pk]|min_p|n must|(?:max|min)_tokens|best_of|(?:prompt_)?logprobs|logit_bias"
    r"|\w+_penalty|stop (?:cannot|strings?)|stop_token_ids|bad_words|allowed_token_ids|detokenize|priority|prompts?"
    r"|\w*token[ _]ids?|out.of.vocab\w*|(?:structured|guided)\w*|grammars?|regex\w*|schemas?|choices?|images?|videos?"
    r"|audios?|multi-?modal\w*|sampling_?params?|logits.processors?|matryoshka|incorrect padding|base64"
    r"|exclude_input_in_output)\b)"
)
_OF_ENGINES = (
    r"CUDA|cuBLAS|cuDNN|NCCL|HIP error|out of memory|No space left|device-side|KV cache|Engine[A-Z]|[Bb]ackground loop"
    r"|[Tt]imed out|[Cc]onnection (?:refused|reset|closed)|[Bb]roken pipe|object (?:has no|is not)|index out of range"
)
_MAX_TEXT = 4000
_MAX_DETAIL = 256 * 1024
_MAX_REASON = 500


def public_reason(text: str) -> str | None:
    """
    Return *text* as it may be shown to a client, on one line of at most 500 characters.

    Request ids, ensemble prefixes and stack traces are dropped. Paths and addresses become ``…``. ``None`` if empty.
    """
    text = _ENSEMBLE.sub("", _REQUEST_ID.sub("", text[:_MAX_TEXT]))
    stack = _STACK.search(text)
    if stack is not None:
        text = text[: stack.start()]
    text = " ".join(text.split())
    text = _PRIVATE.sub("…", _PLACE.sub("", text)).strip()
    if re.search(r"\w", text):
        return text[:_MAX_REASON]
    return None


class Rule(msgspec.Struct, frozen=True):
    """
    What the text of a failure means.

    The message may name the *model*, a pattern's groups, and what was *said*: the public part of the group ``reason``,
    or of the whole match.
    """

    error: Callable[..., ServiceError]
    message: str
    #: Of the texts that mean it.
    patterns: Sequence[re.Pattern[str]]
    #: The message if there is no public part.
    unsaid: str | None
    options: Mapping[str, Any]


def _rule(
    error: Callable[..., ServiceError], message: str, *patterns: str, unsaid: str | None = None, **options: Any
) -> Rule:
    return Rule(error, message, [re.compile(pattern, re.DOTALL) for pattern in patterns], unsaid, options)


RULES = (
    # Triton's core.
    _rule(errors.Overloaded, "The model's queue is full.", r"Exceeds maximum queue size", retry_after=1),
    _rule(
        errors.UpstreamTimeout, "The request waited too long in the model's queue.",
        r"Request timeout expired", retry_after=1,
    ),
    _rule(
        errors.UpstreamUnavailable, "The model is not available at the moment.",
        r"is not (?:at )?ready|Server (?:not ready|is stopping)|shutting down", retry_after=2,
    ),
    _rule(
        errors.ModelCrashed, "The model is not available at the moment.",
        # The last of the Python backend, whose process has ended before it could say more.
        r"Stub process .* is not healthy|unhealthy|EngineCore encountered|Failed to retrieve the response error",
        retry_after=2,
    ),
    _rule(unknown_model_error, "{model}", r"Request for unknown model|has no available versions"),
    # Its model repository.
    _rule(
        errors.NotImplementedUpstream,
        "Triton does not load or unload models by request: it was not started with --model-control-mode=explicit.",
        r"explicit model load / unload is not allowed",
    ),
    _rule(
        errors.ModelConflict, "Another model that '{model}' needs, or that needs it, is being loaded or unloaded.",
        r"currently loading or unloading", param="model", code="model_busy",
    ),
    _rule(
        UpstreamError, "Triton could not load the model '{model}': {said}",
        r"(?:failed to load|load failed for model) '[^']*'[,:]? (?P<reason>.*)", code="model_load_failed",
        unsaid="Triton could not load the model '{model}'; its log says why.",
    ),
    _rule(
        errors.NotImplementedUpstream, "The model's deployment does not stream.",
        r"doesn't support models with decoupled transaction policy|Streaming is only supported",
    ),
    _rule(
        errors.ContextLengthExceeded,
        "This model's maximum context length is {limit} tokens, but the request needs {prompt} for its prompt and "
        "{answer} for its answer.",
        # TensorRT-LLM's LLM API.
        r"sum of prompt length \((?P<prompt>\d+)(?:\.\d+)?\).*? max_tokens \((?P<answer>\d+)\) should not exceed"
        r" max_\w+ \((?P<limit>\d+)\)",
        param="max_tokens",
    ),
    _rule(
        errors.ContextLengthExceeded,
        "This model's maximum input is {limit} tokens, but the request's prompt has {prompt} tokens.",
        # TensorRT-LLM's executor, through each of its wrappers.
        r"Prompt length \((?P<prompt>\d+)\) exceeds maximum (?:input|sequence) length \((?P<limit>\d+)\)",
        # TensorRT-LLM's LLM API: PyTorch's limits of a batch and of a sequence. It divides lengths, which makes floats.
        r"sum of prompt length \((?P<prompt>\d+)(?:\.\d+)?\).*? should not exceed max_\w+ \((?P<limit>\d+)\)",
        r"max_seq_len \((?P<limit>\d+)\) - `splited_prompt_len` \((?P<prompt>\d+)(?:\.\d+)?\)",
        # vLLM's engine, over its releases.
        r"prompt \((?:total )?length (?P<prompt>\d+)\) .*?\b(?:length|context length)(?: of)? \(?(?P<limit>\d+)\)?",
        r"passed (?P<prompt>\d+) input tokens .*? maximum input length of (?P<limit>\d+)",
    ),
    _rule(
        errors.ContextLengthExceeded,
        "This model's maximum context length is {limit} tokens, but the request needs {prompt} for its prompt and "
        "{answer} for its answer.",
        r"Input length \((?P<prompt>\d+)\) \+ max new tokens \((?P<answer>\d+)\)[^.]*? must be less than max sequence"
        r" length \((?P<limit>\d+)\)",
    ),
    _rule(
        errors.ContextLengthExceeded, "{said}",
        r"\A(?:Error generating stream: )?"
        r"(?P<reason>.*(?:maximum (?:context|model) length|(?:[Pp]rompt|[Ii]nput)[^.]{0,40} is too long).*)",
        unsaid="The prompt is longer than the model takes.",
    ),
    # Several backends, each in its own wording.
    _rule(
        errors.PromptRefused, "The prompt is empty: there is nothing to continue.",
        r"!mInputTokenIds\.empty\(\)|[Pp]rompt(?: \w+)? (?:can ?not|can't|must not|should not) be empty"
        r"|[Pp]rompt is empty|[Ee]mpty prompt|text_input is required",
    ),
    _rule(
        errors.InvalidRequest, "The model's backend refused the sampling parameters.",
        r"'NoneType' object has no attribute 'lora_name'|Unexpected keyword argument"
        r"|Failed to process the request\(s\) for model '[^']*', message: JSONDecodeError",
    ),
    # Pillow, in several backends.
    _rule(
        errors.InvalidRequest, "The model's backend cannot read an image of the request.",
        r"cannot identify image file|image file is truncated|broken data stream|decompression bomb",
    ),
    _rule(
        errors.LoraNotLoaded, "The model's backend does not have the LoRA adapter '{said}'.",
        r"LoRA (?P<reason>[^\n]{1,200}) is not supported|LoRA feature is not enabled|LoRA task \d+ not found in cache",
        unsaid="The model's backend does not have this LoRA adapter, or its weights.", param="model",
    ),
    _rule(
        errors.Overloaded, "The model has no room for another LoRA adapter now.",
        r"PEFT Cache is full|There are no done tasks to evict", retry_after=1,
    ),
    _rule(
        errors.RequestRefused, "{said}",
        # vLLM's checks of the size of embeddings. Its engine speaks of the dimensions of tensors.
        rf"Error generating stream: ?(?!.{{0,4000}}(?:{_OF_ENGINES}|[Tt]ensor|[Ss]hape|[Ii]mage))"
        r"(?P<reason>.{0,4000}\b(?:matryoshka|[Dd]imensions|pooling_params)\b.{0,4000})",
        param="dimensions",
    ),
    _rule(
        errors.RequestRefused, "{said}",
        r"Model [^\n]* does not support '(?:generate|embed)' request",
        r"\A(?:in ensemble '[^']*', )*(?:\[request id: [^\]]*\] ?)?Error generating stream: ?"
        rf"(?!.{{0,4000}}(?:{_OF_ENGINES}))(?P<reason>.{{0,4000}}{_OF_REQUESTS}.{{0,4000}})",
        # The BLS and Python models, whose texts stand inside tracebacks.
        r"max_tokens must be a single value > 0",
        r"An error occurred when processing the input values for request id [^,]*, the error was '(?P<reason>[^']*)'",
        r"maximum input size|exceeds the maximum allowed input size",
    ),
)  # fmt: skip

_BY_STATUS = {
    **dict.fromkeys(
        ("UNAVAILABLE", "503"),
        _rule(errors.UpstreamUnavailable, "Triton is not available at the moment.", retry_after=2),
    ),
    **dict.fromkeys(("UNIMPLEMENTED", "501"), _rule(errors.NotImplementedUpstream, "Triton does not support this.")),
    "DEADLINE_EXCEEDED": _rule(errors.UpstreamTimeout, "Triton did not answer in time."),
    "CANCELLED": _rule(UpstreamError, "Triton cancelled the request."),
    "RESOURCE_EXHAUSTED": _rule(UpstreamError, "A message was too large for Triton or for this service."),
}


_CUT_OFF = "The connection to Triton was lost before the answer was complete."
# The statuses by which another server refuses the request itself.
_REFUSALS = frozenset({"400", "408", "411", "413", "414", "415", "417", "431"})


def foreign_error(status: str, body: str = "") -> ServiceError:
    """
    Return the error for an answer that is not from a Triton, such as the page of a proxy, an ingress or a login.

    *status* is the HTTP status, *body* the beginning of the answer. A Triton answers with its own JSON, tensors or
    events, and with JSON of an ``error`` where it fails (http_server.cc). So the request has not reached a model; but a
    proxy that fails may have lost the connection while the model worked.
    """
    detail = f"HTTP status {status}: {body[:500]}"
    rule = _BY_STATUS.get(status)
    if rule is not None:
        return rule.error(rule.message, detail=detail, **rule.options)
    if status == "429":
        return errors.Overloaded("A server in front of Triton takes no requests now.", detail=detail, retry_after=1)
    if status == "504":
        return errors.ProxyTimeout("Triton did not answer in time.", detail=detail)
    if status in _REFUSALS:
        return UpstreamError(f"A server in front of Triton refused the request with status {status}.", detail=detail)
    if status.startswith("5"):
        return errors.ProxyFailed(_CUT_OFF, detail=detail)
    return unreachable_error(detail)


def classify(text: str, model: str, status: str = "") -> ServiceError:
    """Return the error for a failure of *model* by its *text*, or by the transport's *status* without a rule for it."""
    detail = text[:_MAX_DETAIL]
    if len(text) > _MAX_TEXT:
        # It may repeat what a client sent, and the time of a pattern grows faster than the text.
        text = f"{text[: _MAX_TEXT - 1000]} … {text[-1000:]}"
    for rule in RULES:
        for pattern in rule.patterns:
            match = pattern.search(text)
            if match is not None:
                return _error_of(rule, match, model, detail)
    by_status = _BY_STATUS.get(status)
    if by_status is not None:
        return by_status.error(by_status.message, detail=detail, **by_status.options)
    said = text
    wrapping = _WRAPPING.match(text)
    if wrapping is not None:
        said = text[wrapping.end() :]
    reason = None
    if not ("\n" in said.strip() or _STACK.search(said) or _PRIVATE.search(said)):
        # A text that no rule has is shown to clients only if nothing has to be removed from it.
        reason = public_reason(said)
    return model_failed_error(reason, detail=detail)


def _error_of(rule: Rule, match: re.Match[str], model: str, detail: str) -> ServiceError:
    """Return the error for a failure of *model* whose text is a *match* of *rule*."""
    groups = match.groupdict()
    said = public_reason(groups.pop("reason", match[0]) or "")
    message: str | None = rule.message
    if said is None and "{said}" in rule.message:
        message = rule.unsaid
    if message is not None:
        message = message.format(model=model, said=said, **groups)
    options = rule.options
    if "prompt" in groups:
        # The tokens of the answer are not available for the prompt.
        limit = int(groups["limit"]) - int(groups.get("answer") or 0)
        options = {**options, "tokens": int(groups["prompt"]), "limit": limit}
    return rule.error(message, detail=detail, **options)


def model_failed_error(said: str | None, *, detail: str | None) -> UpstreamError:
    """Return the error for a model that failed; *said* is the public part of the reason."""
    if said:
        message = f"The model failed: {said}"
    else:
        message = "The model failed to answer the request."
    return UpstreamError(message, detail=detail)


def failed_midway_error(error: errors.InvalidRequest) -> UpstreamError:
    """Return *error* as the model's fault: a backend that has begun to answer had accepted the request."""
    if isinstance(error, errors.RequestRefused):
        said = error.backend_reason
    else:
        said = error.message
    return model_failed_error(said, detail=error.detail)


def no_answer_error(model: str) -> ServiceError:
    """Return the error for a stream that ended without a single response, which Triton itself does not report."""
    return UpstreamError("The model ended without an answer.", detail=f"model {model!r} sent no response")


def cut_off_error(reason: str | None = None) -> ServiceError:
    """Return the error for a connection that broke before the answer was complete; *reason* goes to the log."""
    return errors.UpstreamLost(_CUT_OFF, detail=reason)


def unreachable_error(reason: str) -> ServiceError:
    """Return the error for a Triton that cannot be connected to."""
    return errors.UpstreamUnavailable("Triton cannot be reached at the moment.", detail=reason, retry_after=2)
