"""Which hosts and addresses images are fetched from."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.media.allowed_hosts import (
    AddressRefusedError,
    AllowedHosts,
    CheckedResolver,
    SystemResolver,
    is_public,
    is_public_or_private,
    parse_address,
    parse_url,
)

PUBLIC = ("8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::808:808")
PRIVATE = ("127.0.0.1", "127.255.0.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd00::1")
NEVER = (
    "0.0.0.0", "169.254.169.254", "192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.7", "203.0.113.7",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::8.8.8.8", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
    "2001::1", "2001:db8::1", "2001:10::1", "2002:7f00:1::", "3fff::1", "5f00::1",
)  # fmt: skip


@every_case("text", PUBLIC)
def test_public(text: str) -> None:
    """Addresses of the public internet."""
    assert is_public(ip_address(text))
    assert is_public_or_private(ip_address(text))


@every_case("text", PRIVATE)
def test_private(text: str) -> None:
    """Addresses that the operator has to allow."""
    assert not is_public(ip_address(text))
    assert is_public_or_private(ip_address(text))


@every_case("text", NEVER)
def test_never(text: str) -> None:
    """Addresses that are nobody's, lead back, or hide another one: nothing allows them."""
    assert not is_public(ip_address(text))
    assert not is_public_or_private(ip_address(text))


@given(st.ip_addresses(v=4))
def test_what_python_calls_special_is_not_public(address: IPv4Address) -> None:
    """Python's own notion, which differs between its releases, is never narrower than ours."""
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_link_local:
        assert not is_public(address)


@given(st.one_of(st.ip_addresses(v=6), st.integers(0, 2**32 - 1).map(lambda low: IPv6Address(0xFFFF << 32 | low))))
def test_the_same_for_ipv6(address: IPv6Address) -> None:
    """No mapped address passes, whatever is in it. (NAT64's are another thing: see above.)"""
    if address in IPv6Network("64:ff9b::/96"):
        return
    if not address.is_global or address.is_multicast or address.is_reserved or address.ipv4_mapped is not None:
        assert not is_public(address)


@every_case("text", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "", "1.2.3.4.5"])
def test_other_forms_are_no_addresses(text: str) -> None:
    """Only the usual form is an address: how the system would read the others is not ours to guess."""
    assert parse_address(text) is None


class FakeResolver(AbstractResolver):
    """Answers with what it is told to, one answer for each question."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers)
        self.closed = False

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the next answer."""
        return [
            ResolveResult(hostname=host, host=each, port=port, family=socket.AF_INET, proto=0, flags=0)
            for each in self.answers.pop(0)
        ]

    async def close(self) -> None:
        """Note it."""
        self.closed = True


@every_case("answer", [("10.0.0.1",), ("8.8.8.8", "127.0.0.1"), ("fe80::1%eth0",), ("8.8.8.8", "not an address")])
async def test_one_wrong_address_is_too_many(answer: tuple[str, ...]) -> None:
    """A name with any address that is not allowed is not connected to at all."""
    with pytest.raises(AddressRefusedError):
        await CheckedResolver(FakeResolver(answer), is_public).resolve("example.com", 443)


async def test_good_addresses_pass() -> None:
    """The answer is handed on as it is, so that the connection goes to what was checked."""
    inner = FakeResolver(("8.8.8.8", "1.1.1.1"))
    resolver = CheckedResolver(inner, is_public)

    found = await resolver.resolve("example.com", 443)
    await resolver.close()

    assert ["8.8.8.8", "1.1.1.1"] == [each["host"] for each in found]
    assert inner.closed


HOSTS = AllowedHosts(
    ["example.com", "*.images.example.org", "cdn.example.net:8443", "bücher.example", "[2606:4700::1111]"]
)


@every_case(
    "url",
    [
        "https://example.com/a.png", "http://example.com/a.png", "HTTPS://EXAMPLE.COM/", "https://example.com:443/",
        "http://example.com:80", "https://a.images.example.org/", "https://a.b.images.example.org/",
        "https://cdn.example.net:8443/x", "http://cdn.example.net:8443/x", "https://bücher.example/",
        "https://xn--bcher-kva.example/", "https://[2606:4700::1111]/", "https://[2606:4700:0::1111]/",
        "https://example.com/?u=http://evil.test@x", "https://example.com#@evil.test",
        "https://exa\nmple.com/", "https://example\u2024com/",
    ],
)  # fmt: skip
def test_allowed_hosts(url: str) -> None:
    """Names are compared as they are resolved: in lower case and in their ASCII form."""
    HOSTS.check(parse_url(url))


@every_case(
    "url",
    [
        "ftp://example.com/a.png", "file:///etc/passwd", "gopher://example.com/", "//example.com/a.png", "a.png", "",
        "https://", "https:///a.png", "https://user@example.com/", "https://user:pw@example.com/", "https://:@example.com/",
        "https://example.com@evil.test/", "https://evil.test\\@example.com/", "https://evil.test#@example.com/",
        "https://example.com.evil.test/", "https://evilexample.com/", "https://sub.example.com/", "https://example.com./",
        "https://images.example.org/", "https://.images.example.org/", "https://eviLimages.example.org/",
        "https://example.com:8443/", "http://example.com:443/", "https://example.com:80/", "https://cdn.example.net/",
        "https://example.com:0/", "https://example.com:99999/", "https://example.com:x/", "https://[::1/", "https://[::1]/",
        "http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "https://example.com\0.evil.test/",
    ],
)  # fmt: skip
def test_other_urls(url: str) -> None:
    """Everything else is refused with one clear sentence."""
    with pytest.raises(InvalidRequest) as caught:
        HOSTS.check(parse_url(url))
    assert "invalid_image_url" == caught.value.code
    assert "pw" not in caught.value.message


def test_urls_have_an_end() -> None:
    """A text that could not be a request's first line is not parsed at all."""
    with pytest.raises(InvalidRequest, match="too long"):
        parse_url("https://example.com/" + "a" * 10_000_000)


@given(st.text(max_size=60).map(lambda text: f"https://{text}"))
def test_no_text_slips_through(text: str) -> None:
    """What is allowed is what the client library would connect to."""
    try:
        url = parse_url(text)
        HOSTS.check(url)
    except InvalidRequest:
        return
    host = url.raw_host or ""
    assert host in ("example.com", "cdn.example.net", "xn--bcher-kva.example", "2606:4700::1111") or host.endswith(
        ".images.example.org"
    )


@every_case(
    "entry",
    ["", "*", "*.", "https://example.com", "example.com/path", "*.*.example.com", "a*b.example", "user@example.com",
     "example.com:", "example.com:x", "exa mple.com", "::1", "[::1"],
)  # fmt: skip
def test_wrong_entries(entry: str) -> None:
    """An entry that means nothing is the operator's mistake, told at start."""
    with pytest.raises(ConfigurationError, match="--allowed-media-domain"):
        AllowedHosts([entry])


def test_no_host_is_allowed_by_default() -> None:
    """Without a list, the answer says what to do instead."""
    hosts = AllowedHosts([])

    assert not hosts
    with pytest.raises(InvalidRequest, match="data URL"):
        hosts.check(parse_url("https://example.com/a.png"))


async def test_the_systems_resolver() -> None:
    """It gives addresses, and raises what the system raises."""
    resolver = SystemResolver()
    try:
        found = await resolver.resolve("localhost", 80)
        assert {"127.0.0.1", "::1"} >= {each["host"] for each in found}
        assert found
        assert 80 == found[0]["port"]
        # A label of more than 63 characters is no name, so no server is asked.
        with pytest.raises((OSError, UnicodeError)):
            await resolver.resolve("a" * 300, 80)
    finally:
        await resolver.close()
