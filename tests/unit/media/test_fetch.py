"""Fetching images, from a web server on this machine that a resolver of the test gives names to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.cases import every_case
from tests.pictures import data_url, png
from tests.unit.media.test_addresses import FakeResolver
from triton_openai.errors import InvalidRequest
from triton_openai.media.allowed_hosts import AllowedHosts, IPAddress
from triton_openai.media.fetch import ImageFetcher
from triton_openai.media.images import ImageLoader, ImageReference

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
        self.most = 0
        self.left = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer by the path."""
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
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
async def fetching(here: Site, *answers: tuple[str, ...], **options: Any) -> AsyncIterator[ImageFetcher]:
    """Make a fetcher for ``images.example``, which resolves to *answers* one after the other."""
    hosts = AllowedHosts(
        [f"images.example:{here.port}", f"{HERE}:{here.port}", f"[::1]:{here.port}", "2130706433", "017700000001"]
    )
    given: dict[str, Any] = {"largest": LIMIT, "timeout": 20.0, "concurrency": 4, "allows": only_here, **options}
    fetcher = ImageFetcher(hosts, resolver=FakeResolver(*answers), **given)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name is resolved once for each fetch, and by nobody else."""
    async with site() as here, fetching(here, (HERE,)) as fetcher:
        image = await fetcher.fetch(f"http://images.example:{here.port}/a.png")

    assert len(png(1)) == image.size
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
        with pytest.raises(InvalidRequest) as caught:
            await fetcher.fetch(f"http://{host.format(port=here.port)}/a.png")

    assert "invalid_image_url" == caught.value.code
    assert [] == here.requests


async def test_an_allowed_address() -> None:
    """An address that is listed and allowed needs no resolver."""
    async with site() as here, fetching(here) as fetcher:
        assert "image/png" == (await fetcher.fetch(f"http://{HERE}:{here.port}/a.png")).media_type


async def test_a_redirect_is_checked_like_the_first_url() -> None:
    """Within the allowed hosts it is followed, without what the first answer gave."""
    async with site() as here, fetching(here, (HERE,), (HERE,)) as fetcher:
        to = f"http://{HERE}:{here.port}/a.png"
        assert "image/png" == (await fetcher.fetch(f"http://images.example:{here.port}/go?to={to}")).media_type

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
        port = here.port
    async with fetching(here, (HERE,)) as fetcher:
        with pytest.raises(InvalidRequest) as caught:
            await fetcher.fetch(f"http://images.example:{port}/a.png?token=secret")
    assert "The image could not be fetched: its host 'images.example' cannot be reached." == caught.value.message


async def test_a_bounded_number_at_a_time() -> None:
    """Others wait for their turn."""
    async with site() as here, fetching(here, *[(HERE,)] * 6, concurrency=2) as fetcher:
        url = f"http://images.example:{here.port}/a.png"
        images = await asyncio.gather(*(fetcher.fetch(url) for _ in range(6)))

    assert 6 == len(images)
    assert here.most <= 2


def loader_for(fetcher: ImageFetcher, **limits: int) -> ImageLoader:
    """Return a loader with *limits*."""
    return ImageLoader(fetcher, **{"most": 4, "largest": LIMIT, "together": 10 * LIMIT, **limits})


async def test_the_first_failure_ends_the_others() -> None:
    """Nobody waits for what is not wanted any more, and the error names the image that failed."""
    async with site() as here, fetching(here, (HERE,), (HERE,)) as fetcher:
        address = f"http://images.example:{here.port}"
        with pytest.raises(InvalidRequest, match="404") as caught:
            await loader_for(fetcher).load(
                [ImageReference("first", f"{address}/never"), ImageReference("second", f"{address}/missing")]
            )
        if any(request.path == "/never" for request in here.requests):
            await asyncio.wait_for(here.left.wait(), 10)

    assert "second" == caught.value.param


async def test_images_together() -> None:
    """Many small images are limited like a large one."""
    async with site() as here, fetching(here) as fetcher:
        references = [ImageReference(f"[{number}]", data_url(png(size=1000))) for number in range(3)]
        assert 3 == len(await loader_for(fetcher, together=6000).load(references))
        with pytest.raises(InvalidRequest, match="together") as caught:
            await loader_for(fetcher, together=4000).load(references)

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
