"""One real Triton with every stand-in, for all tests that want one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from _pytest.runner import runtestprotocol

from triton_openai.demo.record import Record
from triton_openai.demo.repository import DemoRepository, build_repository, model_names
from triton_openai.triton.embedded import EmbeddedTriton


@dataclass(frozen=True)
class TestTriton:
    """A running server: where it is, what it serves, and what its models have been asked."""

    __test__ = False

    server: EmbeddedTriton
    repository: DemoRepository
    record: Record

    @property
    def http_url(self) -> str:
        """The address of the HTTP endpoint."""
        return self.server.http_url

    @property
    def grpc_url(self) -> str:
        """The address of the gRPC endpoint."""
        return self.server.grpc_url

    @property
    def metrics_url(self) -> str:
        """The address of the metrics."""
        return self.server.metrics_url

    @property
    def tokenizer(self) -> Path:
        """The tokenizer folder that all models use."""
        return self.repository.tokenizer


_SHARED: list[EmbeddedTriton] = []
_ENDED = "Triton ended by itself"
_MORE_ATTEMPTS = 2
# Whether services that were running have still to find a Triton that was started again.
_STARTED_AGAIN = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """
    Run a test as usual; again if the shared Triton ended by itself meanwhile, as Triton 2.51 now and then does when
    calls are cancelled: that says nothing about us. A test that ends it each time fails.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for _ in range(_MORE_ATTEMPTS):
        ended = _start_again(failed=any(report.failed for report in reports))
        if not ended:
            break
        item.config.stash[_STARTED_AGAIN] = True
        item.user_properties.append((_ENDED, True))
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            report.sections.append((_ENDED, ended))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _start_again(*, failed: bool) -> str:
    """Start shared Tritons that have ended; return what they say of it. After a test that *failed*, look closer."""
    said = []
    for server in _SHARED:
        if failed and not _is_open(server.http_url):
            # It may take seconds from its last connection to its end.
            with contextlib.suppress(TimeoutError):
                server.wait(60)
        status = server.poll()
        if status is not None:
            said.append(f"It ended with status {status}, and was started again.\n{server.log_tail()}")
            server.start()
    return "\n".join(said)


def _is_open(url: str) -> bool:
    host, _, port = urlsplit(url).netloc.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(autouse=True)
def _found_again(request: pytest.FixtureRequest) -> None:
    """Let running services find a Triton that was started again: over gRPC that takes them up to a second."""
    if request.config.stash.get(_STARTED_AGAIN, False):
        request.config.stash[_STARTED_AGAIN] = False
        request.getfixturevalue("triton_found_again")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which tests were run again."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    for report in reports:
        if report.when == "call" and any(name == _ENDED for name, _ in report.user_properties):
            terminalreporter.write_line(f"{_ENDED} in {report.nodeid}, which was run again: {report.outcome}.")


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A real Triton that serves every stand-in; shared by the whole run, so leave it as you found it."""
    folder = tmp_path_factory.mktemp("triton")
    record = folder / "record.jsonl"
    models = [*model_names(), "tensorrt_llm_bls_multimodal", "text_rerank_pairs", "text_rerank_ids"]
    repository = build_repository(folder / "repository", models=models, record=record)
    server = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
    server.start()
    _SHARED.append(server)
    try:
        yield TestTriton(server, repository, Record(record))
    finally:
        _SHARED.remove(server)
        server.stop(timeout=1.0)
