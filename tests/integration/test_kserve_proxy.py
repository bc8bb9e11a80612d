"""The configurations of nginx and Envoy that the guide to Triton's own protocol shows, in front of a real Triton."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.ports import free_ports
from tests.programs import found, needs
from tests.triton_fixture import TestTriton

GUIDE = Path(__file__).parents[2] / "docs/guides/kserve-protocol.md"
KEY = {"api-key": "secret-key-1"}


@pytest.fixture(params=[pytest.param(name, marks=needs(name)) for name in ("nginx", "Envoy")])
def ports(request: pytest.FixtureRequest, triton: TestTriton, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Run the guide's proxy, and return its ports for HTTP and gRPC."""
    http, grpc = free_ports(2)
    log = tmp_path / "error.log"
    if request.param == "nginx":
        command = _nginx(triton, tmp_path, log, http, grpc)
    else:
        command, grpc = _envoy(triton, tmp_path, log, http), http
    process = subprocess.Popen(command)
    try:
        for port in (http, grpc):
            while not _listens(port):
                assert process.poll() is None, log.read_text(encoding="utf-8")
                time.sleep(0.01)
        yield http, grpc
    finally:
        process.terminate()
        process.wait(120)


def _nginx(triton: TestTriton, tmp_path: Path, log: Path, http: int, grpc: int) -> Sequence[str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f" {kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    replaced = {
        "127.0.0.1:8000": triton.http_url.removeprefix("http://"),
        "127.0.0.1:8001": triton.grpc_url.removeprefix("grpc://"),
        "listen 8080": f"listen 127.0.0.1:{http}",
        "listen 8081": f"listen 127.0.0.1:{grpc}",
        "\nhttp {": f"\nhttp {{ access_log off;{folders}",
    }
    config = tmp_path / "nginx.conf"
    text = _shown("nginx", replaced)
    config.write_text(f"daemon off; pid {tmp_path}/pid; error_log {log} warn;\n{text}", encoding="utf-8")
    return found("nginx"), "-c", str(config), "-e", str(log)


def _envoy(triton: TestTriton, tmp_path: Path, log: Path, port: int) -> Sequence[str]:
    ports = {8000: triton.http_url, 8001: triton.grpc_url}
    replaced = {f"port_value: {old} ": f"port_value: {url.rpartition(':')[2]} " for old, url in ports.items()}
    config = tmp_path / "envoy.yaml"
    config.write_text(
        _shown("yml", {**replaced, "address: 0.0.0.0, port_value: 8080": f"address: 127.0.0.1, port_value: {port}"}),
        encoding="utf-8",
    )
    options = ("--use-dynamic-base-id", "--concurrency", "1", "--log-path", str(log), "--log-level", "warning")
    return found("Envoy"), "-c", str(config), *options


def _shown(language: str, replaced: Mapping[str, str]) -> str:
    """Return the configuration that the guide shows in *language*, with what is *replaced* for the test."""
    text = GUIDE.read_text(encoding="utf-8").partition(f"```{language}\n")[2].partition("```")[0]
    for old, new in replaced.items():
        assert 1 == text.count(old), old
        text = text.replace(old, new)
    return text


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def test_the_proxy_of_the_guide(triton: TestTriton, ports: tuple[int, int]) -> None:
    """The proxy of the guide asks for a key, passes inference over both protocols, and nothing that manages Triton."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{ports[0]}") as session:

        async def status(method: str, path: str, **headers: str) -> int:
            async with session.request(method, path, headers=headers) as response:
                await response.read()
                return response.status

        assert [401, 401, 200] == [
            await status("GET", "/v2/health/ready", **headers) for headers in ({}, {"api-key": "another"}, KEY)
        ]
        for method, path in (
            ("POST", "/v2/repository/models/vllm_model/unload"), ("POST", "/v2/repository/index"),
            ("GET", "/v2/logging"), ("GET", "/v2/models/../logging"), ("GET", "/v2/trace/setting"), ("GET", "/"),
            ("GET", "/v2/models/vllm_model/trace/setting"), ("GET", "/v2/systemsharedmemory/status"),
        ):  # fmt: skip
            assert 404 == await status(method, path, **KEY), path
        body = {"text_input": "Hello", "stream": True, "sampling_parameters": '{"max_tokens": 3}'}
        async with session.post("/v2/models/vllm_model/generate_stream", json=body, headers=KEY) as response:
            assert (200, "text/event-stream; charset=utf-8") == (response.status, response.headers["Content-Type"])
            assert 3 <= (await response.text()).count("data: ")

    def over_grpc() -> None:
        with InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
            assert client.is_model_ready("vllm_model", headers=KEY)
            for headers, call in (({}, client.get_server_metadata), (KEY, client.get_model_repository_index)):
                with pytest.raises(InferenceServerException):
                    call(headers=headers)

    await asyncio.to_thread(over_grpc)
