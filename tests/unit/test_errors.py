"""What clients are told of each error beside its message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from triton_openai import errors
from triton_openai.errors import ConfigurationError, ModelConflict, RateLimited, ServiceError


def below(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    """Yield all errors."""
    yield kind
    for each in kind.__subclasses__():
        yield from below(each)


def test_attributes() -> None:
    """Each has a status, an OpenAI type and a code, by which its class is known; nothing else is set."""
    assert {
        "UnsupportedParameter": (400, "invalid_request_error", "unsupported_parameter", True),
        "ContextLengthExceeded": (400, "invalid_request_error", "context_length_exceeded", True),
        "ApiRestricted": (401, "authentication_error", "invalid_auth", True),
        "ModelNotFound": (404, "invalid_request_error", "model_not_found", True),
        "ModelConflict": (409, "invalid_request_error", "model_conflict", False),
        "RateLimited": (429, "rate_limit_error", "rate_limit_exceeded", True),
        "ModelUnloading": (503, "server_error", "model_unloading", True),
        "UpstreamTimeout": (504, "server_error", "upstream_timeout", True),
        "NotImplementedUpstream": (501, "server_error", "not_supported", False),
        "ConfigurationError": (501, "server_error", "configuration_error", False),
    }.items() <= {
        kind.__name__: (kind.status, kind.type, kind.code, kind.retryable) for kind in below(ServiceError)
    }.items()
    for kind in below(ServiceError):
        assert 400 <= kind.status < 600
        assert set(vars(kind)) - set(vars(ServiceError)) - {"__firstlineno__"} == set()


@pytest.mark.parametrize(
    "error, headers",
    [
        (ServiceError("a"), {}),
        (ServiceError("a", retry_after=0.2), {"Retry-After": "1"}),
        (errors.InvalidApiKey("a"), {"WWW-Authenticate": "Bearer"}),
        # The official clients would try a 409 and a 501 again.
        (ModelConflict("a"), {"x-should-retry": "false"}),
        (ConfigurationError("a"), {"x-should-retry": "false"}),
        (ConfigurationError("a", retry_after=7), {"Retry-After": "7"}),
        (RateLimited("a", kind="tokens", wait=2.1), {"Retry-After": "3"}),
    ],
)
def test_headers(error: ServiceError, headers: dict[str, str]) -> None:
    """Headers steer the retries of the official clients."""
    assert headers == error.headers()


def test_what_is_no_text() -> None:
    """A header that is no UTF-8 can be quoted."""
    error = errors.UnsupportedMediaType("Not '\udcff'.", param="\ud800")

    assert ("Not '?'.", "?") == tuple(
        msgspec.json.decode(error.envelope())["error"][name] for name in ("message", "param")
    )


def test_the_envelope() -> None:
    """The envelope is OpenAI's, with every key."""
    error = errors.InvalidValue("No.", "stop")

    assert {"error": {"message": "No.", "type": "invalid_request_error", "param": "stop", "code": "invalid_value"}} == (
        msgspec.json.decode(error.envelope())
    )
