"""A Triton of this folder's own, and the service in front of it over each transport, which has to recover each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.clients.service import until
from tests.faults.surroundings import COMPLETIONS, PATIENT, TRANSPORTS, Own, Watched, assert_works, body, left, watched
from tests.triton_fixture import embedded, shared
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository

MODELS = ["ensemble", "vllm_model", "text_embedding"]


@pytest.fixture(scope="session")
def faulty_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """A Triton with a generating model of each kind and one for embeddings, which can be unloaded."""
    folder = tmp_path_factory.mktemp("triton")
    record = folder / "record.jsonl"
    repository = build_repository(folder, models=MODELS, record=record)
    server = embedded(repository, model_control_mode="explicit", load_models=MODELS)
    with shared(server):
        yield Own(server, repository, Record(record))


@pytest.fixture
def own(faulty_triton: Own) -> Own:
    """That Triton, running."""
    if faulty_triton.server.poll() is not None:
        faulty_triton.server.start()
    faulty_triton.lost |= left(faulty_triton)
    return faulty_triton


@pytest.fixture(scope="session")
def services(faulty_triton: Own, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watched]]:
    """The service over each transport, shared by the whole folder."""
    with contextlib.ExitStack() as opened:
        running = {}
        for transport in TRANSPORTS:
            arguments = ["--triton-url", faulty_triton.url(transport)]
            arguments += ["--tokenizer", str(faulty_triton.repository.tokenizer)]
            started = watched(tmp_path_factory.mktemp("service"), *arguments, triton=PATIENT)
            running[transport] = opened.enter_context(started)
        for service in running.values():
            # What stays from now on is there from the first requests.
            assert_works(service)
        yield running
        assert [] == [line for service in running.values() for line in service.complaints()]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """How a service reaches Triton."""
    return str(request.param)


@pytest.fixture
def service(own: Own, services: dict[str, Watched], transport: str) -> Iterator[Watched]:
    """The service over each transport in turn, ready; what a test does to it leaves nothing behind in it."""
    with _unchanged(services[transport]):
        yield services[transport]


@pytest.fixture
def both(own: Own, services: dict[str, Watched]) -> Iterator[dict[str, Watched]]:
    """The same for both at once, where something is done to Triton."""
    with _unchanged(services["http"]), _unchanged(services["grpc"]):
        yield services


@contextlib.contextmanager
def _unchanged(service: Watched) -> Iterator[None]:
    until(lambda: service.status("/health/ready") == 200)
    # A connection that was closed because it had long been idle is back before anything is counted.
    assert 200 == service.post(COMPLETIONS, body("vllm_model", "Hello")).status
    with service.back_to_level():
        yield
