"""A Triton of this folder's own, and the service in front of it over each transport, which has to recover each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clients.service import until
from tests.faults.surroundings import PATIENT, TRANSPORTS, Own, Watched, assert_works, left, watched
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODELS = ["ensemble", "vllm_model", "text_embedding"]


@pytest.fixture(scope="session")
def faulty_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """A Triton with a generating model of each kind and one for embeddings, which can be unloaded."""
    folder = tmp_path_factory.mktemp("triton")
    record = folder / "record.jsonl"
    repository = build_repository(folder, models=MODELS, record=record)
    server = EmbeddedTriton(
        model_repository=repository.path,
        backends=repository.backends,
        environment=os.environ,
        model_control_mode="explicit",
        load_models=MODELS,
    )
    server.start()
    try:
        yield Own(server, repository, Record(record))
    finally:
        server.stop(timeout=1.0)


@pytest.fixture
def own(faulty_triton: Own) -> Own:
    """That Triton, running."""
    if faulty_triton.server.poll() is not None:
        faulty_triton.server.start()
    faulty_triton.lost |= left(faulty_triton)
    return faulty_triton


@pytest.fixture(scope="module", params=TRANSPORTS)
def module_service_transport(request: pytest.FixtureRequest) -> str:
    """How that service reaches Triton."""
    return str(request.param)


@pytest.fixture(scope="module")
def module_service(
    module_service_transport: str, faulty_triton: Own, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """The service over each transport in turn."""
    arguments = ["--triton-url", faulty_triton.url(module_service_transport)]
    arguments += ["--tokenizer", str(faulty_triton.repository.tokenizer)]
    with watched(tmp_path_factory.mktemp("service"), *arguments, triton=PATIENT) as running:
        # What stays from now on is there from the first requests.
        assert_works(running)
        yield running
        assert [] == running.complaints()


@pytest.fixture
def service(own: Own, module_service: Watched) -> Iterator[Watched]:
    """That service, ready; what a test does to it leaves nothing behind in it."""
    until(lambda: module_service.status("/health/ready") == 200)
    with module_service.back_to_level():
        yield module_service
