"""Which web pages may send requests."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tests.cases import every_case
from triton_openai.access.cors import Cors
from triton_openai.config.tree import AccessSettings
from triton_openai.errors import OriginNotAllowed

ALLOWED = ("http://localhost:*", "http://[::1]:*", "https://chat.example")


@every_case(
    "origin, allowed",
    [
        *((origin, True) for origin in ("http://localhost", "http://localhost:3000", "http://[::1]:8080", ALLOWED[-1])),
        ("https://localhost:3000", False),
        ("http://localhost.evil.example:80", False),
        ("http://localhost:80.evil.example", False),
        ("http://evil.example:80", False),
        ("http://localhost:", False),
        (f"{ALLOWED[-1]}:8443", False),
        ("null", False),
    ],
)
def test_origins(origin: str, allowed: bool) -> None:
    """``:*`` stands for any port, the default one as well, and for nothing else."""
    cors = Cors(AccessSettings(cors_allow_origin=ALLOWED))
    request = make_mocked_request("OPTIONS", "/", {"Origin": origin, "Access-Control-Request-Method": "POST"})
    response = web.Response()
    cors.add_headers(request, response)
    assert (origin if allowed else None) == response.headers.get("Access-Control-Allow-Origin")
    if allowed:
        assert cors.preflight(request) is not None
    else:
        with pytest.raises(OriginNotAllowed):
            cors.preflight(request)
