"""Which hosts and addresses images are fetched from, and how: a web server on this machine gets names from the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from tests.cases import every_case
from tests.pictures import data_url, png
from tests.ports import closed_port
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.media.fetch import (
    AddressRefusedError,
    AllowedHosts,
    CheckedResolver,
    Fetcher,
    IPAddress,
    is_public,
    is_public_or_private,
    parse_address,
    parse_url,
)
from triton_openai.media.images import ImageLoader, ImageReference

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


class FakeLookup:
    """Answers as `socket.getaddrinfo` with the addresses that it is told to, one answer for each question."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers)

    def __call__(self, host: str, port: int, *_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in self.answers.pop(0)]


@every_case("answer", [("10.0.0.1",), ("8.8.8.8", "127.0.0.1"), ("fe80::1%eth0",), ("8.8.8.8", "not an address")])
async def test_one_wrong_address_is_too_many(answer: tuple[str, ...]) -> None:
    """A name with any address that is not allowed is not connected to at all."""
    with pytest.raises(AddressRefusedError):
        await CheckedResolver(is_public, FakeLookup(answer)).resolve("example.com", 443)


async def test_good_addresses_pass() -> None:
    """The answer is handed on as it is, so that the connection goes to what was checked."""
    resolver = CheckedResolver(is_public, FakeLookup(("8.8.8.8", "1.1.1.1")))

    found = await resolver.resolve("example.com", 443)
    await resolver.close()

    assert [("8.8.8.8", 443), ("1.1.1.1", 443)] == [(each["host"], each["port"]) for each in found]


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

    with pytest.raises(InvalidRequest, match="data URL"):
        hosts.check(parse_url("https://example.com/a.png"))


async def test_the_systems_resolver() -> None:
    """The system's resolver gives addresses, and raises what the system raises."""
    resolver = CheckedResolver(is_public_or_private)
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


#: For these tests, the one public address that there is.
HERE = "127.0.0.1"
LIMIT = 100_000


def only_here(address: IPAddress) -> bool:
    """Allow one address of this machine."""
    return address == ip_address(HERE)


class Site:
    """A web server, what it was asked, and how many of its answers were under way at the same time."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.port = 0
        self.running = 0
        self.max_running = 0
        self.left = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer by the path."""
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/never":
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if request.path == "/drip":
            response = web.StreamResponse(headers={"Content-Type": "image/png"})
            await response.prepare(request)
            await response.write(png())
            await asyncio.Event().wait()
        if request.path == "/missing":
            raise web.HTTPNotFound
        if request.path.startswith("/to/"):
            raise web.HTTPTemporaryRedirect(request.path.removeprefix("/to/") + "?" + request.query_string)
        if request.path == "/go":
            return web.Response(status=302, headers={"Location": request.query["to"], "Set-Cookie": "a=b"})
        if request.path == "/cut":
            response = web.StreamResponse(headers={"Content-Type": "image/png", "Content-Length": "1000"})
            await response.prepare(request)
            await response.write(png())
            assert request.transport is not None
            request.transport.abort()
            return response
        for _ in range(5):  # so that others get their turn
            await asyncio.sleep(0)
        return web.Response(body=png(1), content_type="image/png")


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Run the web server."""
    here = Site()
    app = web.Application()
    app.router.add_get("/{rest:.*}", here.handle)
    async with TestServer(app, host=HERE, handler_cancellation=True) as server:
        here.port = server.port or 0
        yield here


@asynccontextmanager
async def fetching(here: Site, *answers: tuple[str, ...], **options: Any) -> AsyncIterator[Fetcher]:
    """Make a fetcher for ``images.example``, which resolves to *answers* one after the other."""
    hosts = AllowedHosts(
        [f"images.example:{here.port}", f"{HERE}:{here.port}", f"[::1]:{here.port}", "2130706433", "017700000001"]
    )
    given: dict[str, Any] = {"max_size": LIMIT, "timeout": 120.0, "concurrency": 4, "allows": only_here, **options}
    fetcher = Fetcher(hosts=hosts, lookup=FakeLookup(*answers), **given)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name is resolved once for each fetch, and by nobody else."""
    async with site() as here, fetching(here, (HERE,)) as fetcher:
        image = await fetcher.fetch(f"http://images.example:{here.port}/a.png")

    assert png(1) == image
    (request,) = here.requests
    assert f"images.example:{here.port}" == request.host
    assert "identity" == request.headers["Accept-Encoding"]
    assert "Authorization" not in request.headers


async def test_dns_rebinding() -> None:
    """A name that has another address the next time is refused: no answer and no connection is kept."""
    async with site() as here, fetching(here, (HERE,), ("127.0.0.2",), (HERE, "127.0.0.2")) as fetcher:
        url = f"http://images.example:{here.port}/a.png"
        await fetcher.fetch(url)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="no public address"):
                await fetcher.fetch(url)

    assert 1 == len(here.requests)


@every_case("host", ["[::1]:{port}", "2130706433", "017700000001"])
async def test_addresses_as_hosts(host: str) -> None:
    """An address in the URL is checked too, in whichever form; also when it is the operator's mistake to allow it."""
    async with site() as here, fetching(here) as fetcher:
        with pytest.raises(InvalidRequest, match="no public address") as caught:
            await fetcher.fetch(f"http://{host.format(port=here.port)}/a.png")

    assert "invalid_image_url" == caught.value.code
    assert [] == here.requests


async def test_an_allowed_address() -> None:
    """An address that is listed and allowed needs no resolver."""
    async with site() as here, fetching(here) as fetcher:
        assert png(1) == await fetcher.fetch(f"http://{HERE}:{here.port}/a.png")


async def test_a_redirect_is_checked_like_the_first_url() -> None:
    """Within the allowed hosts it is followed, without what the first answer gave."""
    async with site() as here, fetching(here, (HERE,), (HERE,)) as fetcher:
        to = f"http://{HERE}:{here.port}/a.png"
        assert png(1) == await fetcher.fetch(f"http://images.example:{here.port}/go?to={to}")

    assert ["/go", "/a.png"] == [request.path for request in here.requests]
    assert "Cookie" not in here.requests[1].headers


@every_case(
    "to",
    ["http://elsewhere.example/a.png", "http://169.254.169.254/a.png", "file:///etc/passwd", "ftp://images.example/x",
     "http://user:pw@images.example/", "//elsewhere.example/a.png", "http://[::1]:{port}/a.png", "http://2130706433/",
     "http://images.example:1/", "http://[", "data:image/png;base64,AAAA"],
)  # fmt: skip
async def test_redirects_out(to: str) -> None:
    """Nothing is connected that could not have been asked for."""
    async with site() as here, fetching(here, (HERE,)) as fetcher:
        with pytest.raises(InvalidRequest) as caught:
            await fetcher.fetch(f"http://images.example:{here.port}/go?to={to.format(port=here.port)}")

    assert "invalid_image_url" == caught.value.code
    assert 1 == len(here.requests)


async def test_redirects_keep_their_encryption() -> None:
    """From https to http nothing is followed; the other way round is fine."""
    fetcher = Fetcher(hosts=AllowedHosts(["images.example"]), max_size=LIMIT, timeout=20, concurrency=1)

    assert "https" == fetcher._next(URL("http://images.example/a"), "https://images.example/b").scheme
    with pytest.raises(InvalidRequest, match="from https to http"):
        fetcher._next(URL("https://images.example/a"), "http://images.example/b")


async def test_redirect_to_a_name_that_is_not_public() -> None:
    """The second host is resolved and checked as well."""
    async with site() as here, fetching(here, (HERE,), ("10.0.0.1",)) as fetcher:
        with pytest.raises(InvalidRequest, match="no public address"):
            await fetcher.fetch(f"http://images.example:{here.port}/go?to=/a.png")


@every_case("path", ["never", "drip"])
async def test_slow_hosts(path: str) -> None:
    """A host that does not answer, or does not finish, is left."""
    async with site() as here, fetching(here, (HERE,), timeout=0.3) as fetcher:
        with pytest.raises(InvalidRequest, match=r"within 0.3 seconds"):
            await fetcher.fetch(f"http://images.example:{here.port}/{path}")


async def test_hosts_that_fail() -> None:
    """A connection that breaks and a port where nobody listens are told alike, with the host and nothing more."""
    async with site() as here, fetching(here, (HERE,)) as fetcher:
        with pytest.raises(InvalidRequest, match="cannot be reached"):
            await fetcher.fetch(f"http://images.example:{here.port}/cut?token=secret")
    with closed_port() as here.port:
        async with fetching(here, (HERE,)) as fetcher:
            with pytest.raises(InvalidRequest) as caught:
                await fetcher.fetch(f"http://images.example:{here.port}/a.png?token=secret")
    assert "The image could not be fetched: its host 'images.example' cannot be reached." == caught.value.message


async def test_a_bounded_number_at_a_time() -> None:
    """Others wait for their turn."""
    async with site() as here, fetching(here, *[(HERE,)] * 6, concurrency=2) as fetcher:
        url = f"http://images.example:{here.port}/a.png"
        images = await asyncio.gather(*(fetcher.fetch(url) for _ in range(6)))

    assert 6 == len(images)
    assert here.max_running <= 2


def loader_for(fetcher: Fetcher, **limits: int) -> ImageLoader:
    """Return a loader with *limits*."""
    return ImageLoader(fetcher, **{"max_images": 4, "max_size": LIMIT, "max_total_size": 10 * LIMIT, **limits})


async def test_the_first_failure_ends_the_others() -> None:
    """Nobody waits for what is not wanted any more, and the error names the image that failed."""
    async with site() as here, fetching(here, (HERE,), (HERE,)) as fetcher:
        address = f"http://images.example:{here.port}"
        with pytest.raises(InvalidRequest, match="404") as caught:
            await loader_for(fetcher).load(
                [ImageReference("first", f"{address}/never"), ImageReference("second", f"{address}/missing")]
            )
        if any(request.path == "/never" for request in here.requests):
            await asyncio.wait_for(here.left.wait(), 120)

    assert "second" == caught.value.param


async def test_images_together() -> None:
    """Many small images are limited like a large one."""
    async with site() as here, fetching(here) as fetcher:
        references = [ImageReference(f"[{number}]", data_url(png(size=1000))) for number in range(3)]
        assert 3 == len(await loader_for(fetcher, max_total_size=6000).load(references))
        with pytest.raises(InvalidRequest, match="together") as caught:
            await loader_for(fetcher, max_total_size=4000).load(references)

    assert "[2]" == caught.value.param


async def test_order() -> None:
    """Images come in the order of the request, not in that of their arrival."""
    async with site() as here, fetching(here, (HERE,)) as fetcher:
        images = await loader_for(fetcher).load(
            [
                ImageReference("a", f"http://images.example:{here.port}/a.png"),
                ImageReference("b", data_url(png(2, size=10))),
                ImageReference("c", data_url(png(3, size=20))),
            ]
        )

    assert [len(png(1)), len(png(2, size=10)), len(png(3, size=20))] == [image.size for image in images]
