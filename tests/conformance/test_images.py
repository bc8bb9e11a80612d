"""Images: what reaches the model, over each transport, and what is refused."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.cases import every_case
from tests.conformance.calls import PATHS, id_of, in_session_loop, inputs_of, steered
from tests.pictures import data_url, part, png, seen
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import MediaSettings, ModelSettings, Settings
from triton_openai.media import fetch

pytestmark = in_session_loop

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "images.jinja"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
SEEING = {"vllm_model": "image", "tensorrt_llm_bls_multimodal": "image_url_input", "companion": "media"}
JPEG_PREFIX = "data:image/jpeg;base64,"
#: A file whose bytes are no image.
TEXT = b"<html>no image, and long enough to be recognised as none</html>"


def settings_for(triton: TestTriton, transport: str, media: MediaSettings) -> Settings:
    """Return settings under which the models of ``SEEING`` take images."""
    models = {
        name: ModelSettings(tokenizer=str(triton.tokenizer), chat_template=str(TEMPLATE))
        for name in (*SEEING, "ensemble")
    }
    return msgspec.structs.replace(proxy_settings(triton, transport), models=models, media=media)


async def ask(proxy: Proxy, model: str, *content: Any, **fields: Any) -> Answer:
    """Ask *model* about one message with *content*."""
    texts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return await proxy.post(
        PATHS["chat"], {"model": model, "messages": [{"role": "user", "content": texts}], "max_tokens": 200, **fields}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def proxy(request: pytest.FixtureRequest, triton: TestTriton) -> AsyncIterator[Proxy]:
    """A service whose models take images, over each transport."""
    media = MediaSettings(max_images=3, max_image_size=2_000_000)
    async with serving(settings_for(triton, request.param, media), transport=request.param) as running:
        await running.ready()
        yield running


@every_case("stream", [False, True])
async def test_several_images_reach_vllm(triton: TestTriton, proxy: Proxy, stream: bool) -> None:
    """Files as they are, in the order of the messages, and a placeholder for each where it stood."""
    first, second = png(1), png(2)

    answer = await ask(
        proxy, "vllm_model", "Compare ", part(data_url(first), detail="high"), " and ", part(data_url(second)), ".",
        stream=stream,
    )  # fmt: skip

    assert 200 == answer.status, answer.body
    inputs = await inputs_of(triton, "vllm_model", id_of(answer))
    assert {"dtype": "BYTES", "shape": [2], "value": seen(first, second)} == inputs["image"]
    assert f"user\nCompare {PLACEHOLDER} and {PLACEHOLDER}.<|im_end|>" in inputs["text_input"]["value"][0]
    assert b"You sent 2 images." in answer.body or stream


@pytest.mark.parametrize("model", SEEING)
async def test_one_image(triton: TestTriton, proxy: Proxy, model: str) -> None:
    """One image has the shape of one element, and the prefix that the backend knows, whatever its format."""
    file = png(3)

    answer = await ask(proxy, model, steered(text="a red dot"), part(data_url(file)))

    assert "a red dot" == answer.json["choices"][0]["message"]["content"]
    inputs = await inputs_of(triton, model, id_of(answer))
    vllm = model in ("vllm_model", "companion")
    expected = {"dtype": "BYTES", "shape": [1] if vllm else [1, 1]}
    assert {**expected, "value": seen(file, prefix="" if vllm else JPEG_PREFIX)} == inputs[SEEING[model]]


async def test_a_large_image_and_several_answers(triton: TestTriton, proxy: Proxy) -> None:
    """A megabyte goes through, to each of the answers."""
    file = png(4, size=1_000_000)

    answer = await ask(proxy, "vllm_model", "What is it?", part(data_url(file)), n=2)

    assert 200 == answer.status, answer.body
    for number in range(2):
        inputs = await inputs_of(triton, "vllm_model", f"{id_of(answer)}-{number}")
        assert seen(file) == inputs["image"]["value"]


async def test_without_an_image_nothing_is_sent(triton: TestTriton, proxy: Proxy) -> None:
    """The input stays away from a chat without images."""
    answer = await ask(proxy, "vllm_model", "Hello")

    assert "image" not in await inputs_of(triton, "vllm_model", id_of(answer))


async def test_the_operators_placeholder(triton: TestTriton) -> None:
    """Where the template takes text only, the placeholder stands in front of the message's text."""
    settings = settings_for(triton, "http", MediaSettings())
    own = ModelSettings(tokenizer=str(triton.tokenizer), image_placeholder="<|image_{n}|>")
    async with serving(msgspec.structs.replace(settings, models={"vllm_model": own})) as running:
        await running.ready()
        answer = await ask(running, "vllm_model", "Compare.", part(data_url(png(5))), part(data_url(png(6))))

    inputs = await inputs_of(triton, "vllm_model", id_of(answer))
    assert "user\n<|image_1|>\n<|image_2|>\nCompare.<|im_end|>" in inputs["text_input"]["value"][0]
    assert seen(png(5), png(6)) == inputs["image"]["value"]


async def test_a_template_without_images(triton: TestTriton) -> None:
    """Nobody knows what to write into the prompt: the model is not asked."""
    async with serving(proxy_settings(triton, "http")) as running:
        await running.ready()
        answer = await ask(running, "vllm_model", "What is it?", part(data_url(png())))

    assert 400 == answer.status
    assert "messages[0].content[1].image_url" == answer.error["param"]
    assert "unsupported_parameter" == answer.error["code"]
    assert "image_placeholder" in answer.error["message"]


REFUSED = {
    "not base64": ("data:image/png;base64,####", "invalid_base64"),
    "no image": (data_url(TEXT), "invalid_image_format"),
    "another kind": (data_url(png(), "text/html"), "invalid_image_format"),
    "too large": (data_url(png(size=2_000_000)), "image_too_large"),
    "a file of the server": ("file:///etc/passwd", "invalid_image_url"),
    "an address": ("http://169.254.169.254/latest/meta-data", "invalid_image_url"),
}


@every_case("name", REFUSED)
async def test_what_is_refused(proxy: Proxy, name: str) -> None:
    """Bad images are the client's mistake, and named."""
    url, code = REFUSED[name]

    answer = await ask(proxy, "vllm_model", "What is it?", part(data_url(png())), part(url))

    assert (400, code) == (answer.status, answer.error["code"])
    assert "messages[0].content[2].image_url" == answer.error["param"]
    assert len(answer.error["message"]) < 300


@pytest.mark.parametrize("model,most", [("vllm_model", 3), ("tensorrt_llm_bls_multimodal", 1)])
async def test_too_many_images(proxy: Proxy, model: str, most: int) -> None:
    """The operator's limit holds, and the model's own where it is lower."""
    answer = await ask(proxy, model, *[part(data_url(png()))] * (most + 1))

    assert (400, "too_many_images") == (answer.status, answer.error["code"])
    assert f"messages[0].content[{most}].image_url" == answer.error["param"]


@every_case(
    "image,param,code",
    [
        ({"type": "image_url"}, ".image_url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {"url": 3}}, ".image_url.url", "invalid_type"),
        ({"type": "image_url", "image_url": [1]}, ".image_url", "invalid_type"),
        (part(data_url(png()), detail="huge"), ".image_url.detail", "invalid_value"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "", "unsupported_parameter"),
        ({"type": "file", "file": {"file_id": "x"}}, ".file.file_id", "unsupported_parameter"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "", "unsupported_parameter"),
    ],
)
async def test_wrong_parts(proxy: Proxy, image: dict[str, Any], param: str, code: str) -> None:
    """A part that is no image, or lacks what one has, is refused by its place."""
    answer = await ask(proxy, "vllm_model", image)

    assert (400, f"messages[0].content[0]{param}", code) == (
        answer.status, answer.error["param"], answer.error["code"],
    )  # fmt: skip


async def test_a_url_as_the_part_itself(triton: TestTriton, proxy: Proxy) -> None:
    """The Responses API's form, and that of some clients."""
    answer = await ask(
        proxy, "vllm_model", {"type": "input_image", "image_url": data_url(png(7))},
        {"type": "image_url", "image_url": data_url(png(8))},
    )  # fmt: skip

    inputs = await inputs_of(triton, "vllm_model", id_of(answer))
    assert seen(png(7), png(8)) == inputs["image"]["value"]


async def test_a_model_that_takes_none(proxy: Proxy) -> None:
    """A text model refuses the part."""
    answer = await ask(proxy, "ensemble", "What is it?", part(data_url(png())))

    assert (400, "unsupported_parameter") == (answer.status, answer.error["code"])
    assert "messages[0].content[1]" == answer.error["param"]


@pytest.mark.parametrize("model", SEEING)
async def test_an_image_that_the_backend_cannot_read(proxy: Proxy, model: str) -> None:
    """A broken file is the client's mistake too; the backend's traceback and addresses stay with the server."""
    answer = await ask(proxy, model, "What is it?", part(data_url(png()[:15])))

    assert 400 == answer.status, answer.body
    assert "The model's backend cannot read an image of the request." == answer.error["message"]


@dataclass(frozen=True)
class Host:
    """A web server, and how often it was asked."""

    address: str
    asked: list[str]

    @property
    def named(self) -> str:
        """Its address by name, for the system's resolver to find."""
        return f"localhost:{self.address.rpartition(':')[2]}"


@asynccontextmanager
async def image_host() -> AsyncIterator[Host]:
    """Run a web server with an image, with what is none, and with redirects."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/image.png":
            return web.Response(body=png(9), content_type="image/png")
        if request.path == "/unnamed":
            return web.Response(body=png(9), content_type="application/octet-stream")
        if request.path == "/page":
            return web.Response(body=png(9), content_type="text/html")
        if request.path == "/liar":
            return web.Response(body=TEXT, content_type="image/png")
        if request.path == "/zipped":
            headers = {"Content-Encoding": "gzip"}
            return web.Response(body=gzip.compress(png(9)), content_type="image/png", headers=headers)
        if request.path == "/near":
            raise web.HTTPFound("/image.png")
        if request.path == "/far":
            raise web.HTTPFound("http://169.254.169.254/image.png")
        if request.path == "/round":
            raise web.HTTPFound("/round")
        if request.path == "/large":
            return web.Response(body=png(size=2_000_000), content_type="image/png")
        if request.path == "/large-unsaid":
            response = web.StreamResponse(headers={"Content-Type": "image/png"})
            response.enable_chunked_encoding()
            await response.prepare(request)
            await response.write(png(9) + b"\0" * 2_000_000)
            return response
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{rest:.*}", handle)
    async with TestServer(app) as server:
        yield Host(f"{server.host}:{server.port}", asked)


@pytest.fixture(autouse=True)
def _patient_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no fetch end because the machine is busy."""
    made: Any = fetch.Fetcher.__init__
    monkeypatch.setitem(made.__kwdefaults__, "timeout", 120.0)


@asynccontextmanager
async def fetching(triton: TestTriton, transport: str, host: Host, **media: Any) -> AsyncIterator[Proxy]:
    """Run a service that may fetch images from *host*, which has no public address."""
    given = {
        "allowed_domains": (host.address, host.named),
        "private_addresses": True,
        "max_image_size": 1_000_000,
        **media,
    }
    async with serving(settings_for(triton, transport, MediaSettings(**given)), transport=transport) as running:
        await running.ready()
        yield running


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("model", SEEING)
async def test_fetched_images(triton: TestTriton, transport: str, model: str) -> None:
    """An image of an allowed host reaches the model as a file: no backend is given an address."""
    async with image_host() as host, fetching(triton, transport, host) as proxy:
        for url in (
            f"{host.address}/image.png",
            f"{host.address}/unnamed",
            f"{host.address}/near",
            f"{host.named}/near",
        ):
            answer = await ask(proxy, model, "What is it?", part(f"http://{url}"))

            assert 200 == answer.status, answer.body
            inputs = await inputs_of(triton, model, id_of(answer))
            prefix = "" if model in ("vllm_model", "companion") else JPEG_PREFIX
            assert seen(png(9), prefix=prefix) == inputs[SEEING[model]]["value"]


FAILING = {
    "missing": ("invalid_image_url", "404"),
    "page": ("invalid_image_url", "text/html"),
    "liar": ("invalid_image_format", "format"),
    "zipped": ("invalid_image_format", "supported format"),
    "far": ("invalid_image_url", "169.254.169.254"),
    "round": ("invalid_image_url", "redirects"),
    "large": ("image_too_large", "limit"),
    "large-unsaid": ("image_too_large", "limit"),
}


@every_case("path", FAILING)
async def test_fetches_that_fail(triton: TestTriton, path: str) -> None:
    """What an allowed host may not do to this service, or does wrong, is told to the client as its own mistake."""
    code, words = FAILING[path]
    async with image_host() as host, fetching(triton, "http", host) as proxy:
        answer = await ask(proxy, "vllm_model", "What is it?", part(f"http://{host.address}/{path}"))

    assert (400, code) == (answer.status, answer.error["code"]), answer.body
    assert "messages[0].content[1].image_url" == answer.error["param"]
    assert words in answer.error["message"]


async def test_private_addresses_need_the_operators_word(triton: TestTriton) -> None:
    """An allowed host with a private address is refused before anything is connected."""
    async with image_host() as host, fetching(triton, "http", host, private_addresses=False) as proxy:
        answer = await ask(proxy, "vllm_model", "What is it?", part(f"http://{host.address}/image.png"))

    assert (400, "invalid_image_url") == (answer.status, answer.error["code"])
    assert "no public address" in answer.error["message"]
    assert [] == host.asked


async def test_one_wrong_image_and_nothing_is_fetched(triton: TestTriton) -> None:
    """All URLs are looked at before the first connection."""
    async with image_host() as host, fetching(triton, "http", host) as proxy:
        good = part(f"http://{host.address}/image.png")
        answer = await ask(proxy, "vllm_model", good, part("http://elsewhere.example/x.png"))

    assert "messages[0].content[1].image_url" == answer.error["param"]
    assert [] == host.asked
