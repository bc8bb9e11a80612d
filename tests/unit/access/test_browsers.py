"""Which requests of web pages a service without API keys refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict, CIMultiDictProxy

from tests.cases import every_case
from triton_openai.access.browsers import BROWSER_GUARD, BrowserGuard
from triton_openai.access.cors import Cors
from triton_openai.app import apply_settings, create_app
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings, RestrictedApi, ServerSettings, Settings
from triton_openai.errors import ConfigurationError, HostNotAllowed, OriginNotAllowed

LOOPBACK = ("127.0.0.1", 9000)
NETWORK = ("10.1.2.3", 9000)
#: What a page of another site can send to every service without a preflight.
PAGE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}


def guard(*allowed: str, host: str = "127.0.0.1", cors: tuple[str, ...] = ()) -> BrowserGuard:
    return BrowserGuard(ServerSettings(host=host, allowed_hosts=allowed), Cors(AccessSettings(cors_allow_origin=cors)))


def request_of(method: str, headers: Any, at: Any = LOOPBACK) -> Any:
    transport = Mock(get_extra_info=lambda name, default=None: at if name == "sockname" else default)
    return make_mocked_request(method, "/v1/models", CIMultiDictProxy(CIMultiDict(headers)), transport=transport)


def refused(by: BrowserGuard, request: Any) -> type[Exception] | None:
    """Return the error with which *request* is refused, which the operator reads in the log too."""
    try:
        by.check(request)
    except (HostNotAllowed, OriginNotAllowed) as error:
        return type(error) if error.warns else AssertionError
    return None


@every_case(
    "host, allowed",
    [
        *((host, True) for host in ("localhost", "LocalHost:9000", "localhost.", "localhost.:9000", "a.b.localhost:1")),
        *((host, True) for host in ("127.0.0.1", "127.0.0.1:9000", "127.8.9.1", "[::1]:9000", "[::ffff:127.0.0.1]")),
        *((host, False) for host in ("evil.example", "evil.example:9000", "x", "localhost.evil.example")),
        *((host, False) for host in ("localhost-evil.example", "evillocalhost", "127.0.0.1.nip.io", "127.1")),
        *((host, False) for host in ("8.8.8.8", "10.1.2.3:9000", "169.254.169.254", "[fe80::1]", "0.0.0.0:9000")),
        *((host, False) for host in ("", ":9000", ".", "evil.example@localhost", "localhost:9000:1", "localhost/a")),
        *((host, False) for host in ("localhost, evil.example", "[::1", "::1", "loca\u0142host", "a" * 16_000)),
    ],
)
def test_hosts(host: str, allowed: bool) -> None:
    """Of requests that arrive at a loopback address, those for this machine are answered, whatever the method."""
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        assert (None if allowed else HostNotAllowed) is refused(guard(), request_of(method, {"Host": host}))


def test_every_host_header_counts() -> None:
    """A second header hides no host behind the first one, and a client of HTTP/1.0 may send none."""
    for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
        assert HostNotAllowed is refused(guard(), request_of("GET", [("Host", host) for host in hosts]))
    assert refused(guard(), request_of("GET", {})) is None


@every_case(
    "allowed, host, at, answered",
    [
        # On the network, a service without keys answers everybody, unless its operator lists hosts.
        ((), "triton-openai.default.svc:9000", NETWORK, True),
        ((), "10.1.2.3:9000", NETWORK, True),
        ((), "evil.example", ("::ffff:127.0.0.1", 9000, 0, 0), False),
        ((), "evil.example", ("::1", 9000, 0, 0), False),
        ((), "evil.example", ("fd00::1", 9000, 0, 0), True),
        ((), "evil.example", "/run/socket", False),
        (("llm.example.com",), "llm.example.com", LOOPBACK, True),
        (("llm.example.com",), "LLM.Example.com.:443", LOOPBACK, True),
        (("LLM.example.com",), "llm.example.com", NETWORK, True),
        (("llm.example.com",), "a.llm.example.com", LOOPBACK, False),
        (("llm.example.com",), "evil.example", NETWORK, False),
        # A kubelet asks a pod by its address.
        (("llm.example.com",), "10.1.2.3:9000", NETWORK, True),
        (("llm.example.com",), "localhost:9000", NETWORK, True),
        (("*.example.com",), "a.b.example.com", LOOPBACK, True),
        (("*.example.com",), "example.com", LOOPBACK, False),
        (("*.example.com",), "evilexample.com", LOOPBACK, False),
        (("fd00::7", "[fd00::8]", "10.9.9.9"), "[fd00::7]:9000", LOOPBACK, True),
        (("fd00::7", "[fd00::8]", "10.9.9.9"), "[fd00::8]", LOOPBACK, True),
        (("fd00::7", "[fd00::8]", "10.9.9.9"), "10.9.9.9:1", LOOPBACK, True),
        (("*",), "evil.example", LOOPBACK, True),
        (("*",), "", NETWORK, True),
    ],
)
def test_allowed_hosts(allowed: tuple[str, ...], host: str, at: Any, answered: bool) -> None:
    """``server.allowed_hosts`` adds hosts, and has them checked at every address."""
    assert (None if answered else HostNotAllowed) is refused(guard(*allowed), request_of("GET", {"Host": host}, at))


def test_the_configured_host_is_answered() -> None:
    """A name that ``--host`` has leads to the service, though it may stand for a loopback address."""
    assert refused(guard(host="Workstation"), request_of("GET", {"Host": "workstation:9000"})) is None
    assert refused(guard(host="0.0.0.0"), request_of("GET", {"Host": "0.0.0.0:9000"})) is None


OWN, OTHER, NULL = "http://localhost:9000", "http://localhost:3000", "null"


@every_case(
    "site, origin, answered",
    [
        (None, None, True),
        (None, OWN, True),
        (None, OWN.upper(), True),
        (None, "https://localhost:9000", True),
        (None, OTHER, False),
        (None, "http://localhost", False),
        (None, "http://127.0.0.1:9000", False),
        (None, "http://localhost:9000.evil.example", False),
        (None, NULL, False),
        (None, "", False),
        (None, "http://", False),
        (None, "chrome-extension://abc", False),
        ("same-origin", OWN, True),
        # Behind a proxy that changes Host.
        ("same-origin", "https://llm.example.com", True),
        ("same-origin", None, True),
        ("none", None, True),
        ("none", "chrome-extension://abc", True),
        ("cross-site", "https://evil.example", False),
        ("cross-site", NULL, False),
        ("cross-site", None, False),
        ("cross-site", OWN, False),
        # Another program's page on this machine.
        ("same-site", OTHER, False),
        ("same-site", None, False),
        ("anything", None, False),
    ],
)
def test_pages(site: str | None, origin: str | None, answered: bool) -> None:
    """What changes something or costs a generation is for the service's own page, and for programs."""
    given = {"Host": "localhost:9000", "Sec-Fetch-Site": site, "Origin": origin}
    headers = {name: value for name, value in given.items() if value is not None}
    for method in ("POST", "DELETE", "PUT", "PATCH", "BREW"):
        assert (None if answered else OriginNotAllowed) is refused(guard(), request_of(method, headers))
        assert (None if answered else OriginNotAllowed) is refused(guard(), request_of(method, headers, NETWORK))
    for method in ("GET", "HEAD", "OPTIONS"):
        assert refused(guard(), request_of(method, headers)) is None


@every_case(
    "cors, site, origin, answered",
    [
        (("*",), "cross-site", "https://evil.example", True),
        (("*",), "cross-site", None, True),
        (("https://chat.example",), "cross-site", "https://chat.example", True),
        (("https://chat.example",), "cross-site", "https://evil.example", False),
        (("https://chat.example",), "cross-site", None, False),
        (("http://localhost:*",), "same-site", OTHER, True),
        (("http://localhost:*",), None, OTHER, True),
        (("null",), "cross-site", NULL, True),
    ],
)
def test_cors_opens(cors: tuple[str, ...], site: str | None, origin: str | None, answered: bool) -> None:
    """Pages that CORS allows may send everything."""
    given = {"Host": "localhost:9000", "Sec-Fetch-Site": site, "Origin": origin}
    headers = {name: value for name, value in given.items() if value is not None}
    assert (None if answered else OriginNotAllowed) is refused(guard(cors=cors), request_of("POST", headers))


@every_case(
    "forwarded, answered",
    [("llm.example.com", True), ("LLM.example.com:443, inner", True), ("inner, llm.example.com", False), ("", False)],
)
def test_the_page_behind_a_proxy(forwarded: str, answered: bool) -> None:
    """Browsers send no ``Sec-Fetch-Site`` over plain HTTP: then a proxy that changes ``Host`` says what it was."""
    headers = {"Host": "localhost:9000", "Origin": "https://llm.example.com", "X-Forwarded-Host": forwarded}
    assert (None if answered else OriginNotAllowed) is refused(guard(), request_of("POST", headers))


async def test_a_service_without_keys(aiohttp_client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every path is guarded but the health; the answer and the log name the setting."""
    app = create_app(Settings())
    client = await aiohttp_client(app)
    for path in ("/", "/docs", "/v1/models", "/v1/files", "/metrics", "/openapi.json", "/v1/nothing", "/version"):
        answer = await client.get(path, headers={"Host": "evil.example"})
        assert (403, "host_not_allowed") == (answer.status, (await answer.json())["error"]["code"]), path
        assert "--allowed-host" in (await answer.json())["error"]["message"]
        assert (await client.get(path, headers={"Sec-Fetch-Site": "cross-site"})).status != 403
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await client.get(path, headers={"Host": "balancer"})).status in (200, 503)
    for path in ("/v1/models/m/load", "/v1/files", "/v1/chat/completions", "/v1/messages", "/v1/audio/speech"):
        answer = await client.post(path, data=b"{}", headers=PAGE)
        body = await answer.json()
        assert (403, True) == (answer.status, "--cors-allow-origin" in body["error"]["message"]), path
        assert ("error" if path == "/v1/messages" else None) == body.get("type")
    assert 403 == (await client.delete("/v1/files/file-1", headers=PAGE)).status
    log = capsys.readouterr().out
    assert log.count("request refused") > 8
    assert "server.allowed_hosts" in log
    # The settings of a running service change.
    await apply_settings(app, Settings(server=ServerSettings(allowed_hosts=("evil.example",))), False)
    assert 200 == (await client.get("/version", headers={"Host": "evil.example"})).status


async def test_a_service_that_asks_for_something(aiohttp_client: Any) -> None:
    """No browser adds a key or the header of a restriction by itself, so those requests are the client's own."""
    restricted = RestrictedApi(apis=("model-repository",), header="x-door", value="open")
    for access, headers in (
        (AccessSettings(api_key=("a-key",)), {"api-key": "a-key"}),
        (AccessSettings(openai_restricted_api=(restricted,)), {"x-door": "open"}),
    ):
        client = await aiohttp_client(create_app(Settings(access=access)))
        sent = {**PAGE, **headers, "Host": "evil.example"}
        assert 200 == (await client.get("/v1/models", headers=sent)).status
        assert 200 == (await client.post("/v1/models", headers=sent)).status
        assert 401 == (await client.get("/v1/models", headers={"Host": "evil.example"})).status
    # The other groups are open.
    client = await aiohttp_client(create_app(Settings(access=AccessSettings(openai_restricted_api=(restricted,)))))
    assert 403 == (await client.get("/version", headers={"Host": "evil.example"})).status


@every_case(
    "text, accepted",
    [
        *((text, True) for text in ("*", "a", "llm.example.com", "*.example.com", "10.0.0.1", "::1", "[fd00::1]")),
        *((text, False) for text in ("a:9000", "http://a", "*.", "a.*", "**", "a b", "*a", "[::1]:80", "a/b")),
    ],
)
def test_settings(text: str, accepted: bool) -> None:
    """A host has no port; the message says what it should be."""
    if accepted:
        assert (text,) == load_settings({"allowed-host": [text]}, {}).server.allowed_hosts
        assert (text,) == load_settings({}, {"TRITON_OPENAI_ALLOWED_HOST": text}).server.allowed_hosts
        return
    with pytest.raises(ConfigurationError, match="a host name or an address without a port"):
        load_settings({"allowed-host": [text]}, {})


def test_the_file(tmp_path: Path) -> None:
    """The YAML file has it as ``server.allowed_hosts``."""
    file = tmp_path / "settings.yaml"
    file.write_text("server: {allowed_hosts: [llm.example.com, '*.svc']}")
    settings = load_settings({"config": str(file)}, {})
    guarding = create_app(settings)[BROWSER_GUARD]
    assert refused(guarding, request_of("GET", {"Host": "triton.default.svc"})) is None
