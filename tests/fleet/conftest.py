"""Three real Tritons with the same models, which tests load, unload, freeze, stop and start."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.patient_stores import _patient_stores
from tests.proxy_fixture import Proxy, serving
from tests.triton_fixture import embedded
from triton_openai.config.tree import (
    EjectionSettings,
    EndpointSettings,
    ModelSettings,
    ResponsesSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.demo.record import Record
from triton_openai.demo.repository import DemoRepository, build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

__all__ = ["_patient_stores"]
MODELS = ["ensemble", "vllm_model", "text_embedding"]
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class One:
    """One Triton, and what its models have been asked."""

    name: str
    server: EmbeddedTriton
    repository: DemoRepository
    record: Record

    @property
    def endpoint(self) -> EndpointSettings:
        """Its settings."""
        return EndpointSettings(name=self.name, url=(self.server.http_url, self.server.grpc_url))

    def asked(self, model: str) -> int:
        """Return how many requests *model* has got."""
        return len(self.record.events(model=model, event="request"))


def port_of(url: str) -> int:
    """Return the port in *url*."""
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture(scope="session")
def tritons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, One]]:
    """The three, running, on the same ports of 127.0.0.1, .2 and .3, as behind one name."""
    with contextlib.ExitStack() as opened:
        found: dict[str, One] = {}
        for number, name in enumerate(NAMES, 1):
            folder = tmp_path_factory.mktemp(name)
            record = folder / "record.jsonl"
            repository = build_repository(folder, models=MODELS, record=record)
            first = found["a"].server if found else None
            listen = (f"127.0.0.{number}", port_of(first.http_url), port_of(first.grpc_url)) if first else None
            server = embedded(repository, model_control_mode="explicit", load_models=MODELS, listen=listen)
            opened.callback(server.stop, timeout=0.1)
            found[name] = One(name, server, repository, Record(record))
            if first is None:
                # The others have its ports, so it is the one to find out which are free.
                server.start()
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda one: one.server.start(), [found["b"], found["c"]]))
        yield found


@pytest.fixture
def three(tritons: dict[str, One]) -> dict[str, One]:
    """The three with all models, whatever a test before has done to them."""
    for one in tritons.values():
        if one.server.poll() is not None:
            one.server.start()
    return tritons


def settings_of(three: dict[str, One], *names: str, **triton: Any) -> Settings:
    """Return the settings of a service in front of those Tritons called *names*."""
    tokenizer = ModelSettings(tokenizer=str(next(iter(three.values())).repository.tokenizer))
    endpoints = tuple(three[name].endpoint for name in names or NAMES)
    triton = {"refresh_interval": 0.2, "ejection": EjectionSettings(time=0.2, max_time=1.0), **triton}
    return Settings(
        server=ServerSettings(shutdown_grace=20.0),
        responses=ResponsesSettings(store="memory"),
        triton=TritonSettings(endpoints=endpoints, model_control_mode="explicit", **triton),
        models=dict.fromkeys(("vllm_model", "text_embedding"), tokenizer),
    )


@contextlib.asynccontextmanager
async def fleet(settings: Settings) -> AsyncIterator[Proxy]:
    """Run a service with *settings* that has found its models."""
    async with serving(settings) as proxy:
        await proxy.ready()
        yield proxy


def write_endpoints(file: Path, *endpoints: EndpointSettings) -> None:
    """Write a file of endpoints."""
    lines = [f"- {{name: {one.name}, url: [{', '.join(one.url)}], weight: {one.weight}}}\n" for one in endpoints]
    file.write_text("".join(lines) or "[]\n")
