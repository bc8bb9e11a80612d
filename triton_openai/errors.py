"""
The error tree. Every error knows how a client sees it: status, ``type``, ``code`` and ``param``.

::

    ServiceError                       500  server_error
    ├── InvalidRequest                 400  invalid_request_error
    │   ├── UnsupportedParameter       400  unsupported_parameter
    │   ├── RequestRefused             400  invalid_request
    │   ├── PromptRefused              400  invalid_value
    │   │   └── ContextLengthExceeded  400  context_length_exceeded
    │   ├── InvalidApiKey              401  invalid_api_key
    │   ├── ApiRestricted              401  invalid_auth
    │   ├── OriginNotAllowed           403  origin_not_allowed
    │   ├── ManagementDisabled         403  management_disabled
    │   ├── KeyNotSufficient           403  key_not_sufficient
    │   ├── ModelNotFound              404  model_not_found
    │   ├── LoraNotLoaded              404  lora_not_loaded
    │   ├── EndpointNotFound           404  not_found
    │   ├── MethodNotAllowed           405  method_not_allowed
    │   ├── RequestTimeout             408  request_timeout
    │   ├── ModelConflict              409  model_conflict
    │   ├── PayloadTooLarge            413  request_too_large
    │   ├── UnsupportedMediaType       415  unsupported_media_type
    │   └── HeadersTooLarge            431  headers_too_large
    ├── Overloaded                     429  rate_limit_exceeded
    │   └── RateLimited                429  rate_limit_exceeded   (type: what there was too much of)
    ├── ServiceOverloaded              503  overloaded
    ├── UpstreamError                  502  upstream_error
    │   ├── UpstreamUnavailable        503  upstream_unavailable
    │   │   └── ModelUnloading         503  model_unloading
    │   └── UpstreamTimeout            504  upstream_timeout
    ├── NotImplementedUpstream         501  not_supported
    └── ConfigurationError             501  configuration_error   (also what the CLI prints and exits with)

The envelope is OpenAI's (``{"error": {"message", "type", "param", "code"}}``) with ``code`` always a string or null.
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


def printable(text: str, longest: int) -> str:
    """Return the first *longest* characters of *text*, masked, with ``?`` for what is not printable."""
    # Cut twice: long texts are not searched to their end, and no cut leaves a key too short to be seen as one.
    short = masked(text[: longest + 256])[:longest]
    return short if short.isprintable() else "".join([c if c.isprintable() else "?" for c in short])


def summary(text: str) -> str:
    """Return *text* in one line: of a Python traceback what stands before it, and the exception that it ends with."""
    before, _, trace = text.rpartition(_TRACEBACK)
    before = before.partition(_TRACEBACK)[0]
    # pybind11 puts the frames last, behind "At:".
    trace = trace.partition("\n\nAt:\n")[0]
    if before or text.startswith(_TRACEBACK):
        # Frames are indented.
        trace = " ".join([line for line in trace.splitlines() if line[:1].strip()])
    return " ".join(f"{before} {trace}".split())


# Some backends put whole tracebacks into what they say.
_LONGEST_REASON = 2000
_LONGEST_TRACE = 20_000


class ServiceError(Exception):
    """
    Base of everything the service reports to a client.

    *message* is shown to the client as it is: a clear sentence, free of server paths, tracebacks and secrets.
    *detail* goes to the log only.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        detail: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.detail = detail
        self.retry_after = retry_after

    @property
    def reason(self) -> str:
        """What a line of the log says of it: the detail, else the message, without the frames of a traceback."""
        return printable(summary(self.detail or self.message), _LONGEST_REASON)

    @property
    def trace(self) -> str | None:
        """A detail of several lines, such as the traceback of a backend, for the log at "debug"."""
        detail = (self.detail or "").strip()
        return masked(detail[:_LONGEST_TRACE]) if "\n" in detail else None

    def body(self) -> dict[str, Any]:
        """Return the ``error`` object of OpenAI's envelope."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def envelope(self) -> bytes:
        """Return the JSON envelope ``{"error": {...}}``."""
        return msgspec.json.encode({"error": self.body()})

    def headers(self) -> Mapping[str, str]:
        """
        Return the response headers that steer a client's retries.

        The official clients retry 408, 409, 429 and every 5xx unless ``x-should-retry`` says otherwise.
        """
        if self.retry_after is not None:
            return {"Retry-After": f"{max(1, round(self.retry_after))}"}
        return {}


class InvalidRequest(ServiceError):
    """The client's request is wrong; *param* names the field in dotted form where one is to blame."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class UnsupportedParameter(InvalidRequest):
    """A documented parameter that the model cannot honour and that would change its answer."""

    code = "unsupported_parameter"


class RequestRefused(InvalidRequest):
    """The model's backend refused the request; *said* is what it said of that, as far as a client may read it."""

    def __init__(self, said: str | None, *, detail: str | None = None) -> None:
        message = f"The model refused the request: {said}" if said else "The model refused the request."
        super().__init__(message, detail=detail)
        self.said = said


class PromptRefused(InvalidRequest):
    """The model cannot continue the prompt, such as an empty one. The endpoint adds the name of its field."""

    code = "invalid_value"


class ContextLengthExceeded(PromptRefused):
    """The prompt, or prompt and completion together, are longer than the model takes."""

    code = "context_length_exceeded"


class InvalidApiKey(InvalidRequest):
    """The request has no API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"

    def headers(self) -> Mapping[str, str]:
        """Say how a key is given, as every 401 has to."""
        return {"WWW-Authenticate": "Bearer"}


class ApiRestricted(InvalidApiKey):
    """The path belongs to a restricted API, and the request lacks the header that opens it."""

    type = "authentication_error"
    code = "invalid_auth"


class OriginNotAllowed(InvalidRequest):
    """The browser asked for a web page whose origin is not allowed."""

    status = 403
    code = "origin_not_allowed"


class RequestTimeout(InvalidRequest):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"


class HeadersTooLarge(InvalidRequest):
    """The request line or a header is larger than the configured limit."""

    status = 431
    code = "headers_too_large"


class ManagementDisabled(InvalidRequest):
    """What manages Triton, such as loading models, is off unless the operator allows it, and may be for a key."""

    status = 403
    code = "management_disabled"


class KeyNotSufficient(InvalidRequest):
    """What the request's key is limited to could not be kept to if this were allowed."""

    status = 403
    code = "key_not_sufficient"


class ModelNotFound(InvalidRequest):
    """
    No served model has this *name*, of which the first 200 characters are kept; *why* is said in place of "does not
    exist".
    """

    status = 404
    code = "model_not_found"

    def __init__(
        self, name: str, *, hidden: bool = False, why: str = "does not exist", detail: str | None = None
    ) -> None:
        self.name = name[:200]
        what = "does not exist, or this key may not use it" if hidden else why
        super().__init__(f"The model '{self.name}' {what}.", param="model", detail=detail)


class LoraNotLoaded(InvalidRequest):
    """The model's backend does not have the LoRA adapter that a request asks for, or no longer has its weights."""

    status = 404
    code = "lora_not_loaded"


class EndpointNotFound(InvalidRequest):
    """No such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


class ModelConflict(InvalidRequest):
    """The model is not in the state that loading or unloading it needs, or another call is about to change it."""

    status = 409
    code = "model_conflict"

    def headers(self) -> Mapping[str, str]:
        """Return headers that tell the official clients not to retry: the answer would be another refusal."""
        return {"x-should-retry": "false"}


class PayloadTooLarge(InvalidRequest):
    """The body is larger than the configured limit."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON by its content type, or in a coding that is not known."""

    status = 415
    code = "unsupported_media_type"


class Overloaded(ServiceError):
    """Triton or this service has no room for the request now; trying again later may work."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class RateLimited(Overloaded):
    """The key has used what it may use in a minute, or at the same time; *kind* is ``requests`` or ``tokens``."""

    def __init__(self, message: str, *, kind: str, wait: float) -> None:
        super().__init__(message, retry_after=math.ceil(wait))
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """Return the ``error`` object; its type says what there was too much of, as OpenAI's does."""
        return {**super().body(), "type": self.kind}


class ServiceOverloaded(ServiceError):
    """This service has as many requests as it may, or more than it can follow; another replica may have room."""

    status = 503
    code = "overloaded"


class UpstreamError(ServiceError):
    """Triton, or a model in it, failed in a way that is not the client's fault."""

    status = 502
    type = "server_error"
    code = "upstream_error"


class UpstreamUnavailable(UpstreamError):
    """Triton, or the model, cannot be reached or is not ready."""

    status = 503
    code = "upstream_unavailable"


class ModelUnloading(UpstreamUnavailable):
    """The model is being unloaded: new requests are refused, and those that run may finish until a deadline."""

    code = "model_unloading"

    def __init__(self, name: str) -> None:
        super().__init__(f"The model '{name}' is being unloaded.", param="model", retry_after=2)


class UpstreamTimeout(UpstreamError):
    """Triton did not answer, or fell silent, for longer than the configured time."""

    status = 504
    code = "upstream_timeout"


class NotImplementedUpstream(ServiceError):
    """Triton says that it does not support what was asked; trying again cannot help."""

    status = 501
    code = "not_supported"

    def headers(self) -> Mapping[str, str]:
        """Return headers that tell the official clients not to retry."""
        return {"x-should-retry": "false"}


class ConfigurationError(ServiceError):
    """
    The operator's settings are wrong or incomplete (unknown key, missing tokenizer, unreadable template).

    At start the command prints the message and exits with status 2; at request time it is what stands between a
    model and its use, so its message names the flags that help. It is not the client's fault, so it counts as a failure
    of the service; the same request will not work until the operator has acted, so clients are told not to retry it,
    unless *retry_after* says when.
    """

    status = 501
    type = "server_error"
    code = "configuration_error"

    def headers(self) -> Mapping[str, str]:
        """Return headers that tell the official clients whether to retry."""
        return {"x-should-retry": "false"} if self.retry_after is None else super().headers()
