"""The address of a client: its own, or what a trusted proxy says, and never what anybody else says."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import structlog
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from tests.cases import every_case
from triton_openai.app import create_app
from triton_openai.config.tree import ServerSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.serving.client_address import ClientAddresses

PROXIES = ("10.0.0.0/8", "192.168.1.1", "2001:db8::/64")
FOR, FORWARDED = "X-Forwarded-For", "Forwarded"


def address(peer: str | None, *headers: tuple[str, str], proxies: tuple[str, ...] = PROXIES) -> str | None:
    """Return the address of the client of a request from *peer*."""
    transport = Mock(get_extra_info=lambda name, default=None: (peer, 1) if name == "peername" and peer else default)
    request = make_mocked_request("GET", "/", CIMultiDict(headers), transport=transport)
    return ClientAddresses(proxies).address_of(request)


@every_case("peer, headers, expected", [
    # Nobody is trusted but the proxies.
    ("1.2.3.4", [], "1.2.3.4"),
    ("1.2.3.4", [(FOR, "5.6.7.8")], "1.2.3.4"),
    ("1.2.3.4", [(FORWARDED, "for=5.6.7.8")], "1.2.3.4"),
    ("192.168.1.2", [(FOR, "5.6.7.8")], "192.168.1.2"),
    ("2001:db9::1", [(FOR, "5.6.7.8")], "2001:db9::1"),
    (None, [(FOR, "5.6.7.8")], None),
    # What a proxy says of its own client.
    ("10.1.1.1", [], "10.1.1.1"),
    ("10.1.1.1", [(FOR, "5.6.7.8")], "5.6.7.8"),
    ("::ffff:10.1.1.1", [(FOR, "5.6.7.8")], "5.6.7.8"),
    ("192.168.1.1", [(FOR, "2001:DB9::1")], "2001:db9::1"),
    ("2001:db8::5", [(FOR, "[2001:db9::1]:443")], "2001:db9::1"),
    ("10.1.1.1", [(FOR, "5.6.7.8:1234")], "5.6.7.8"),
    ("10.1.1.1", [(FOR, "fe80::1%eth0")], "fe80::1"),
    # The client may have sent what stands before.
    ("10.1.1.1", [(FOR, "9.9.9.9, 5.6.7.8")], "5.6.7.8"),
    ("10.1.1.1", [(FOR, "9.9.9.9, 5.6.7.8, 10.2.2.2, 192.168.1.1")], "5.6.7.8"),
    ("10.1.1.1", [(FOR, "9.9.9.9"), (FOR, "5.6.7.8,10.2.2.2")], "5.6.7.8"),
    ("10.1.1.1", [(FOR, "10.3.3.3, 10.2.2.2")], "10.3.3.3"),
    # What cannot be read ends the way.
    ("10.1.1.1", [(FOR, "5.6.7.8, unknown")], "10.1.1.1"),
    ("10.1.1.1", [(FOR, "5.6.7.8, unknown, 10.2.2.2")], "10.2.2.2"),
    ("10.1.1.1", [(FOR, "5.6.7.8,")], "10.1.1.1"),
    ("10.1.1.1", [(FOR, "evil\\x1b[31m")], "10.1.1.1"),
    ("10.1.1.1", [(FOR, "")], "10.1.1.1"),
    # RFC 7239
    ("10.1.1.1", [(FORWARDED, "for=5.6.7.8")], "5.6.7.8"),
    ("10.1.1.1", [(FORWARDED, 'For="[2001:db9:cafe::17]:4711"')], "2001:db9:cafe::17"),
    ("10.1.1.1", [(FORWARDED, "for=9.9.9.9;proto=http, by=10.1.1.1 ; for=5.6.7.8;")], "5.6.7.8"),
    ("10.1.1.1", [(FORWARDED, 'for=9.9.9.9, for="5.6.7.8";by="a,b;for=1.1.1.1", for=10.2.2.2')], "5.6.7.8"),
    ("10.1.1.1", [(FORWARDED, "for=9.9.9.9"), (FORWARDED, "for=5.6.7.8")], "5.6.7.8"),
    ("10.1.1.1", [(FORWARDED, "for=5.6.7.8, for=_hidden")], "10.1.1.1"),
    ("10.1.1.1", [(FORWARDED, "for=5.6.7.8, proto=https")], "10.1.1.1"),
    ("10.1.1.1", [(FORWARDED, 'for=5.6.7.8, for="broken')], "10.1.1.1"),
    ("10.1.1.1", [(FORWARDED, "=;,;=")], "10.1.1.1"),
    # Of the two, the client may have sent either.
    ("10.1.1.1", [(FOR, "5.6.7.8"), (FORWARDED, "for=5.6.7.8")], "5.6.7.8"),
    ("10.1.1.1", [(FOR, "5.6.7.8"), (FORWARDED, "for=9.9.9.9")], "10.1.1.1"),
])  # fmt: skip
def test_addresses(peer: str | None, headers: list[tuple[str, str]], expected: str | None) -> None:
    """The last address on the way that is no trusted proxy's."""
    assert expected == address(peer, *headers)


@given(st.text('for=10.2;," \\[]:a', max_size=60), st.booleans())
def test_whatever_stands_there(text: str, forwarded: bool) -> None:
    """No header is an error, and what is logged is an address."""
    assert set(address("10.1.1.1", (FORWARDED if forwarded else FOR, text)) or "") <= set("0123456789abcdef.:")


@pytest.mark.parametrize("proxy", ["10.0.0.1/8", "999.1.1.1", "1.2.3.4/33", "::/129"])
def test_what_is_no_network(proxy: str) -> None:
    """The start ends with the name of the setting."""
    with pytest.raises(ConfigurationError, match=r"server\.trusted_proxies"):
        create_app(Settings(server=ServerSettings(trusted_proxies=(proxy,))))


async def test_the_line_of_a_request(aiohttp_client: Any) -> None:
    """The client's address is in the line, of refused requests too."""
    for proxies, expected in (("127.0.0.0/8",), "5.6.7.8"), ((), "127.0.0.1"):
        client = await aiohttp_client(create_app(Settings(server=ServerSettings(trusted_proxies=proxies))))
        with structlog.testing.capture_logs() as lines:
            await (await client.post("/v1/nothing", headers={FOR: "5.6.7.8"})).read()
        assert [expected] == [line["client"] for line in lines if line["event"] == "request"]


@every_case("name, element", [(FOR, "1.1.1.1"), (FOR, ""), (FORWARDED, "for=1.1.1.1"), (FORWARDED, "")])
def test_long_headers(name: str, element: str) -> None:
    """Of headers without end, the end is read: the nearest proxies write there."""
    wanted = "for=5.6.7.8" if name == FORWARDED else "5.6.7.8"
    long = ",".join([element] * 100_000)
    assert "5.6.7.8" == address("10.1.1.1", (name, long), (name, wanted))
