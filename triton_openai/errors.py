"""
All errors, with their status, ``type``, ``code`` and ``param``.

The envelope is OpenAI's (``{"error": {"message", "type", "param", "code"}}``) with ``code`` always a string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

_MASK = "<redacted>"
# How keys and tokens in common use begin: OpenAI, Anthropic and Stripe, NVIDIA, Hugging Face, Groq, xAI, GitHub,
# GitLab, Slack, AWS, Google, and JSON web tokens.
_PREFIXES = r"[spr]k[-_]|nvapi-|hf_|gsk_|xai-|gh[opsu]_|github_pat_|glpat-|xox[abeoprs]-|AKIA|AIza|eyJ[\w-]+\."
# A run of more letters and digits than a UUID, a trace id or a Git commit has is random text too.
_KEY = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:{_PREFIXES})[\w.~-]{{6,}}|(?i:bearer|basic)[ :]+[\w.+/=~-]{{6,}})|[A-Za-z0-9]{{41,}}"
)
_TRACEBACK = "Traceback (most recent call last):"


def holds_key(text: str) -> bool:
    """Return whether a part of *text* looks like a key."""
    return _KEY.search(text) is not None


def masked(text: str) -> str:
    """Return *text* with a mask in place of what looks like a key."""
    return _KEY.sub(_MASK, text)


def printable(text: str, max_chars: int) -> str:
    """Return the first *max_chars* characters of *text*, masked, with ``?`` for what is not printable."""
    # Cut twice: a long text is not searched as a whole, and no cut leaves a part of a key that looks like no key.
    short = masked(text[: max_chars + 256])[:max_chars]
    if short.isprintable():
        return short
    return "".join([c if c.isprintable() else "?" for c in short])


def summary(text: str) -> str:
    """Return *text* in one line: of a Python traceback what stands before it, and the exception that it ends with."""
    before, _, trace = text.rpartition(_TRACEBACK)
    before = before.partition(_TRACEBACK)[0]
    # pybind11 puts the frames last, after "At:".
    trace = trace.partition("\n\nAt:\n")[0]
    if before or text.startswith(_TRACEBACK):
        # Frames are indented.
        trace = " ".join([line for line in trace.splitlines() if line[:1].strip()])
    return " ".join(f"{before} {trace}".split())


# Some backends put whole tracebacks into what they say.
_MAX_REASON_CHARS = 2000
_MAX_TRACE_CHARS = 20_000


class ServiceError(Exception):
    """
    A failure of the service itself.

    *message* is shown to the client: a clear sentence, free of server paths, tracebacks and secrets. Characters of the
    client's that control a terminal become ``?``. Without one, the service itself has failed, and only its log has the
    reason.
    *detail* goes to the log only.
    """

    # A subclass gives what differs from its base.
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    #: Whether trying again can help.
    retryable: ClassVar[bool] = True
    #: Whether the log has a warning of it although it is the client's: a setting may be wrong.
    warns: ClassVar[bool] = False

    def __init_subclass__(cls, **attributes: Any) -> None:
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __init__(
        self,
        message: str = "The service failed to answer the request.",
        *,
        param: str | None = None,
        code: str | None = None,
        detail: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        if not message.isprintable():
            message = "".join([c if c.isprintable() or c == "\n" else "?" for c in message])
        super().__init__(message)
        # What quotes a header or a query may hold bytes that are no UTF-8, and no JSON is made of them.
        self.message = message.encode(errors="replace").decode()
        if param is None:
            self.param = None
        else:
            self.param = param.encode(errors="replace").decode()
        if code is not None:
            self.code = code
        self.detail = detail
        self.retry_after = retry_after

    @property
    def reason(self) -> str:
        """The text for a log line: the detail, else the message, without the frames of a traceback."""
        return printable(summary(self.detail or self.message), _MAX_REASON_CHARS)

    @property
    def trace(self) -> str | None:
        """A detail of several lines, such as the traceback of a backend, for the log at "debug"."""
        detail = (self.detail or "").strip()
        if "\n" in detail:
            return masked(detail[:_MAX_TRACE_CHARS])
        return None

    def body(self) -> dict[str, Any]:
        """Return the ``error`` object of OpenAI's envelope."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def envelope(self) -> bytes:
        """Return the JSON envelope ``{"error": {...}}``."""
        return msgspec.json.encode({"error": self.body()})

    def headers(self) -> Mapping[str, str]:
        """
        Return the response headers that steer a client's retries.

        The official clients retry 408, 409, 429 and every 5xx unless ``x-should-retry`` says otherwise. Some agents
        retry 429 and 503 only with ``Retry-After``.
        """
        if self.retry_after is not None or self.status in (429, 503):
            return {"Retry-After": f"{max(1, math.ceil(self.retry_after or 1))}"}
        if self.retryable:
            return {}
        return {"x-should-retry": "false"}

    def header_fields(self) -> dict[str, str]:
        """Return :meth:`headers` as an event has them: with names in lower case."""
        return {name.lower(): value for name, value in self.headers().items()}


class InvalidRequest(ServiceError, status=400, type="invalid_request_error", code="invalid_request"):
    """The client's request is wrong; *param* names the field in dotted form, if one is wrong."""


def missing(field: str) -> InvalidRequest:
    """Return the error for a request without *field*."""
    return InvalidRequest(f"Missing required parameter: '{field}'.", param=field, code="missing_required_parameter")


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    """A documented parameter that the model cannot honour and that would change its answer."""


class RequestRefused(InvalidRequest):
    """The model's backend refused the request; the message has its reason, without server details."""

    def __init__(self, backend_reason: str | None, *, detail: str | None = None, param: str | None = None) -> None:
        if backend_reason:
            message = f"The model refused the request: {backend_reason}"
        else:
            message = "The model refused the request."
        super().__init__(message, detail=detail, param=param)
        self.backend_reason = backend_reason


class InvalidValue(InvalidRequest, code="invalid_value"):
    """The value of the parameter *param* is not allowed."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message, param=param)


class PromptRefused(InvalidRequest, code="invalid_value"):
    """The model cannot continue the prompt, such as an empty one. The endpoint adds the name of the field."""


class ContextLengthExceeded(PromptRefused, code="context_length_exceeded"):
    """
    The prompt, or prompt and completion together, exceed the model's context length.

    *tokens* is how many the prompt has, and *limit* how many it may have, where the prompt alone is too long.
    """

    def __init__(self, message: str, *, tokens: int | None = None, limit: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.tokens = tokens
        self.limit = limit


class InvalidApiKey(InvalidRequest, status=401, code="invalid_api_key"):
    """The request has no API key, or one that is not known."""

    def headers(self) -> Mapping[str, str]:
        """Return how to send a key, which every 401 needs."""
        return {"WWW-Authenticate": "Bearer"}


class ApiRestricted(InvalidApiKey, type="authentication_error", code="invalid_auth"):
    """The path belongs to a restricted API, and the request lacks the header that opens it."""


class OriginNotAllowed(InvalidRequest, status=403, code="origin_not_allowed", warns=True):
    """A web page of an origin that is not allowed sent the request."""


class HostNotAllowed(InvalidRequest, status=403, code="host_not_allowed", warns=True):
    """The service asks for no API key, and the request's `Host` is neither this machine nor an allowed host."""


class RequestTimeout(InvalidRequest, status=408, code="request_timeout"):
    """The request did not arrive in time."""


class HeadersTooLarge(InvalidRequest, status=431, code="headers_too_large"):
    """The request line or a header is larger than the configured limit."""


class ManagementDisabled(InvalidRequest, status=403, code="management_disabled"):
    """Managing models is off for this service, or for the request's key."""


class KeyNotSufficient(InvalidRequest, status=403, code="key_not_sufficient"):
    """The request needs more than the rights and limits of its key allow."""


class ModelNotFound(InvalidRequest, status=404, code="model_not_found"):
    """
    No served model has this *name*. The message suggests a similar name, or lists those that the key may use.

    *hidden* is for a model that the key of the request may not use.
    """

    def __init__(
        self,
        name: str,
        *,
        hidden: bool = False,
        why: str = "does not exist",
        hint: str = "",
        detail: str | None = None,
    ) -> None:
        self.name = name[:200]
        self.hidden = hidden
        if hidden:
            what = "does not exist, or this key may not use it"
        else:
            what = why
        super().__init__(f"The model '{self.name}' {what}.{hint}", param="model", detail=detail)


class LoraNotLoaded(InvalidRequest, status=404, code="lora_not_loaded"):
    """The model's backend does not have the LoRA adapter of the request, or has lost its weights."""


class EndpointNotFound(InvalidRequest, status=404, code="not_found"):
    """No such path."""


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"):
    """The path exists, but not with this method."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> Mapping[str, str]:
        """Return the allowed methods, which every 405 needs."""
        return {**super().headers(), "Allow": self._allowed}


class ModelConflict(InvalidRequest, status=409, code="model_conflict", retryable=False):
    """The model's state does not allow loading or unloading it, or another call is changing it."""


class PayloadTooLarge(InvalidRequest, status=413, code="request_too_large"):
    """The body is larger than the configured limit."""


class UnsupportedMediaType(InvalidRequest, status=415, code="unsupported_media_type"):
    """The body's content type is not that of the endpoint, or its content coding is not supported."""


class Overloaded(ServiceError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """Triton or this service has no capacity for the request now; a later retry may succeed."""


class RateLimited(Overloaded):
    """The key has reached its limit per minute or of concurrent requests; *kind* is which one."""

    def __init__(self, message: str, *, kind: str, wait: float) -> None:
        super().__init__(message, retry_after=wait)
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """Return the ``error`` object; its type names the limit, as OpenAI's does."""
        return {**super().body(), "type": self.kind}


class ServiceOverloaded(ServiceError, status=503, code="overloaded"):
    """This service has reached its limit of requests, or is overloaded; another replica may have capacity."""


class StoreUnavailable(ServiceError, status=503, code="store_unavailable"):
    """What keeps responses and conversations, or files and batches, cannot be reached, or is full."""


class StorageFull(ServiceError, status=507, code="insufficient_storage"):
    """The disk that keeps files and batches is full."""


class NoSummary(InvalidRequest, status=422, code="no_summary", retryable=False):
    """The model wrote no summary of the conversation that is to be compacted."""

    def __init__(self, model: str, max_tokens: int) -> None:
        super().__init__(
            f"The conversation was not compacted: the model '{model}' wrote no summary in {max_tokens} tokens.",
            param="input",
        )


class ObjectInUse(InvalidRequest, status=409, code="in_use", retryable=False):
    """An open batch reads the file, or the batch to be deleted has not ended."""


class TooManyBatches(Overloaded, code="too_many_batches"):
    """The key has as many open batches as it may have."""


class ObjectNotFound(InvalidRequest, status=404, code="not_found"):
    """There is no such response, conversation, item, file or batch, or it belongs to another key."""


class ConversationFull(InvalidRequest, code="conversation_full"):
    """A conversation has no room for more items."""

    def __init__(self, max_items: int, max_size: int) -> None:
        super().__init__(
            f"A conversation can have {max_items} items and {max_size} bytes at most. Delete items of it, or go on "
            "from a summary (/v1/responses/compact) in a new conversation.",
            param="conversation",
        )


class ConversationBusy(InvalidRequest, status=409, code="conversation_locked"):
    """A response is being made in the conversation; the next one can be asked for when that has ended."""


class UpstreamError(ServiceError, status=502, code="upstream_error"):
    """Triton, or a model in it, failed in a way that is not the client's fault."""


class InvalidAnswer(UpstreamError, code="upstream_invalid_answer"):
    """
    Triton's answer is not what its protocol and the model's configuration promise: a wrong type, length or shape.

    *problem* is what is wrong, as the rest of a sentence. It is one of few texts, without contents of the answer: the
    operator is informed once of each.
    """

    def __init__(self, problem: str, *, model: str = "", detail: str | None = None) -> None:
        if model:
            of_model = f" for the model '{model}'"
        else:
            of_model = ""
        super().__init__(f"Triton's answer{of_model} is invalid: {problem}.", detail=detail)
        self.problem = problem


class UpstreamLost(UpstreamError, code="upstream_disconnected"):
    """The connection to Triton ended before the answer was complete: Triton has ended, or does not answer any more."""


class ProxyFailed(UpstreamLost):
    """
    A server in front of Triton failed with the request: it may have lost its connection, or may have had none.

    Nginx answers 502 in both cases (``ngx_http_upstream.c``).
    """


class UpstreamUnavailable(UpstreamError, status=503, code="upstream_unavailable"):
    """Triton, or the model, cannot be reached or is not ready."""


class ModelCrashed(UpstreamUnavailable):
    """The model's process, or its engine, has ended, perhaps because of this request."""


class ModelUnloading(UpstreamUnavailable, code="model_unloading"):
    """The model is being unloaded: new requests are refused, and running ones may finish until a deadline."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model '{name}' is being unloaded.", param="model", retry_after=2)


class UpstreamTimeout(UpstreamError, status=504, code="upstream_timeout"):
    """Triton sent nothing for longer than the configured time limit."""


class ProxyTimeout(UpstreamTimeout):
    """A server in front of Triton had no answer in time; it may have had no connection either."""


class NotImplementedUpstream(ServiceError, status=501, code="not_supported", retryable=False):
    """Triton does not support the request; a retry cannot succeed."""


class ConfigurationError(ServiceError, status=501, code="configuration_error", retryable=False):
    """
    The operator's settings are wrong or incomplete (unknown key, missing tokenizer, unreadable template).

    At start the command prints the message and exits with status 2. At request time it stands between a model and its
    use, so its message names the flags that help; it counts as a failure of the service.
    """


def install_advice(*extras: str) -> str:
    """Return how to install *extras*, which ``setup.cfg`` lists: from the package index or in a clone."""
    names = ",".join(extras)
    return f"pip install 'triton-openai[{names}]', or in a clone pip install '.[{names}]'"
