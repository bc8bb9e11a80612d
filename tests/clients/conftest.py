"""One running service for all clients, and connections to it that check its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from tests import described
from tests.clients.service import Service, serving
from tests.triton_fixture import TestTriton

#: A name with a slash, as models on the Hugging Face hub have them.
SLASHED = "acme/chat-7b"

_TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
_SETTINGS = f"""
defaults:
  tokenizer: %s
  image_placeholder: <image>
models:
  ensemble:
    aliases: [{SLASHED}]
"""


@pytest.fixture(scope="session", params=["http", "grpc"])
def service(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service over each transport in turn, as a process."""
    folder = tmp_path_factory.mktemp("service")
    settings = folder / "settings.yaml"
    settings.write_text(_SETTINGS % triton.tokenizer)
    url = triton.http_url if request.param == "http" else triton.grpc_url
    with serving(folder, "--triton-url", url, "--config", str(settings)) as running:
        yield running
        assert [] == running.complaints()


@pytest.fixture(scope="session", params=["http", "grpc"])
def tooled(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service with a chat template that takes tools, as a process, over each transport in turn."""
    url = triton.http_url if request.param == "http" else triton.grpc_url
    folder = tmp_path_factory.mktemp("tools")
    settings = folder / "settings.yaml"
    settings.write_text("models: {tensorrt_llm: {adapter: trtllm}, tensorrt_llm_bls: {max_model_len: 400}}")
    options = ("--tokenizer", str(triton.tokenizer), "--chat-template", str(_TEMPLATE), "--config", str(settings))
    with serving(folder, "--triton-url", url, *options) as running:
        yield running
        assert [] == running.complaints()


class _Body(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The body of an answer, which is held against the service's description of itself once it was read to its end."""

    def __init__(self, request: httpx2.Request, response: httpx2.Response) -> None:
        self._request, self._response, self._stream = request, response, response.stream
        self._data: list[bytes] = []

    def _check(self) -> None:
        path, answer = self._request.url.path, self._response
        described.check(self._request.method, path, answer.status_code, answer.headers, b"".join(self._data))

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._stream, httpx2.SyncByteStream)
        for data in self._stream:
            self._data.append(data)
            yield data
        self._check()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        async for data in self._stream:
            self._data.append(data)
            yield data
        self._check()

    def close(self) -> None:
        assert isinstance(self._stream, httpx2.SyncByteStream)
        self._stream.close()

    async def aclose(self) -> None:
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        await self._stream.aclose()


class _Transport(httpx2.HTTPTransport):
    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        response.stream = _Body(request, response)
        return response


class _AsyncTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        response.stream = _Body(request, response)
        return response


@pytest.fixture
def connection() -> Iterator[httpx2.Client]:
    """What a client sends its requests over."""
    with httpx2.Client(transport=_Transport(), timeout=240) as made:
        yield made


@pytest.fixture
async def async_connection() -> AsyncIterator[httpx2.AsyncClient]:
    """The same for asynchronous clients."""
    async with httpx2.AsyncClient(transport=_AsyncTransport(), timeout=240) as made:
        yield made


@pytest.fixture
def client(tooled: Service, connection: httpx2.Client) -> OpenAI:
    """The official client, with a model that calls tools."""
    return OpenAI(base_url=tooled.base_url, api_key="none", max_retries=0, http_client=connection)
