"""One real Triton with every stand-in, for all tests that want one."""

from __future__ import annotations

import compileall
import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from _pytest.runner import runtestprotocol

from tests.standins.repository import BY_THEMSELVES, FURTHER, RECOGNIZERS, build_repository
from tests.stopped import wait_until_stopped
from triton_openai.demo.configs import Contract, render
from triton_openai.demo.record import Record
from triton_openai.demo.repository import BUILDERS, DemoRepository
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.tritonserver.embedded import EmbeddedTriton

EXAMPLES = Path(__file__).parents[1] / "examples"
_PROFILES = Path(__file__).parent / "fixtures" / "io_profiles.json"


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


def embedded(repository: DemoRepository, extra_args: Sequence[str] = (), **options: Any) -> EmbeddedTriton:
    """
    Return a Triton that serves *repository* and takes its configurations as they are; they must be complete.

    To complete them, Triton would run each model once more: that is half of the CPU time of its start. What the vLLM
    backend would declare is written into its models' configurations.
    """
    declared = json.loads(_PROFILES.read_text())["vllm@r25.11"]
    contract = Contract(declared["in"], declared["out"])
    for name in ("vllm_model", "vllm_embedding"):
        if (file := repository.path / name / "config.pbtxt").exists():
            config = render(name, contract, backend="vllm", decoupled=True, instances=1)
            file.write_text(config.replace("KIND_CPU", "KIND_MODEL"))
    for file in repository.path.glob("tensorrt_llm_bls*/config.pbtxt"):
        # Each is a process more to start; the tests ask for no more than two at a time.
        file.write_text(file.read_text().replace("count: 4", "count: 2"))
    return EmbeddedTriton(
        model_repository=repository.path,
        backends=repository.backends,
        environment=os.environ,
        extra_args=["--disable-auto-complete-config", *extra_args],
        **options,
    )


@contextlib.contextmanager
def frozen(server: EmbeddedTriton) -> Iterator[None]:
    """Freeze *server* for the block: connections stay open and nothing answers."""
    assert server.pid is not None
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        wait_until_stopped(server.pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)


def wait_for_end(server: EmbeddedTriton, timeout: float) -> int | None:
    """Return the exit status of *server*, None where it still runs after *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while (status := server.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return status


@contextlib.contextmanager
def shared(server: EmbeddedTriton) -> Iterator[None]:
    """Run *server* for several tests."""
    try:
        server.start()
        _SHARED.append(server)
        yield
    finally:
        if server in _SHARED:
            _SHARED.remove(server)
        # Also a start that took too long leaves a process behind.
        server.stop(timeout=0.1)


_SHARED: list[EmbeddedTriton] = []
_ENDED = "Triton failed by itself"
# What pytest-timeout says of a test.
_LATE = "from pytest-timeout"
# The Python backend says so when the process of a model did not report for a second, as on a machine that stood still.
_UNHEALTHY = re.compile(r"Stub process '\S+' is not healthy")
# Whether services that were running have still to find a Triton that was started again.
_STARTED_AGAIN = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """
    Run a test, and once more if a shared Triton failed by itself meanwhile: then the second result counts.

    Triton 2.51 now and then ends when calls are cancelled, which says nothing about us, and on a machine that stands
    still it takes its models for dead, and may end while it starts them again. It is started again after that, and
    after a test that has run out of time.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if ended := _start_again(item, reports):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = _start_again(item, reports)
        for report in reports:
            report.sections.append((_ENDED, ended + again))
            report.user_properties.append((_ENDED, 2 if again else 1))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _start_again(item: pytest.Item, reports: list[pytest.TestReport]) -> str:
    """Start shared Tritons again that have ended or hang; return what they say of it. Only a failed test shows that."""
    said = []
    failed = [report.longreprtext for report in reports if report.failed]
    late = any(_LATE in text for text in failed) or _took_for_dead(reports)
    for server in _SHARED:
        # A Triton that hangs may answer to other requests.
        hangs = late and server.poll() is None
        if failed and not hangs and not _answers(server.http_url):
            # It may take seconds from its last connection to its end.
            hangs = wait_for_end(server, 60) is None
        status = server.poll()
        if hangs:
            said.append(f"It may hang, and was started again.\n{server.log_tail()}\n")
            server.kill()
        # Some tests stop or kill theirs, and then start it.
        elif status not in (None, 0, -signal.SIGKILL):
            said.append(f"It ended with status {status}, and was started again.\n{server.log_tail()}\n")
        elif status is None or not failed:
            continue
        server.start()
        item.config.stash[_STARTED_AGAIN] = True
    return "".join(said)


def _took_for_dead(reports: list[pytest.TestReport]) -> bool:
    """Return whether a test has failed because a Triton took a model for dead."""
    texts = [report.longreprtext + "".join(text for _, text in report.sections) for report in reports if report.failed]
    return _UNHEALTHY.search("".join(texts)) is not None


def _answers(url: str) -> bool:
    """Return whether the Triton at *url* answers. One that hangs accepts connections for a while."""
    try:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    return True


@pytest.fixture(autouse=True)
def _found_again(request: pytest.FixtureRequest) -> None:
    """Let running services find a Triton that was started again: over gRPC that takes them up to a second."""
    if request.config.stash.get(_STARTED_AGAIN, False):
        request.config.stash[_STARTED_AGAIN] = False
        request.getfixturevalue("triton_found_again")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how often Triton failed by itself, and which tests were run again."""
    ends = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            # The report of a test module that cannot be imported has none.
            count = dict(getattr(report, "user_properties", ())).get(_ENDED)
            if count is not None:
                ends[report.nodeid] = count, outcome
    if ends:
        total = sum(count for count, _ in ends.values())
        terminalreporter.section(f"{_ENDED} {total} times; {len(ends)} tests were run again")
    for name, (_, outcome) in ends.items():
        terminalreporter.write_line(f"{outcome} when run again: {name}")


@contextlib.contextmanager
def _loaded_once(source: str) -> Iterator[None]:
    """Give all services of this process one tokenizer of the folder *source*: each loads it for a dozen models."""
    loaded, load = functools.cache(Tokenizer.load), Tokenizer.load.__func__  # type: ignore[attr-defined]

    def found(kind: type[Tokenizer], given: str) -> Tokenizer:
        return loaded(given) if given == source else cast(Tokenizer, load(kind, given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", classmethod(found))
        yield


@contextlib.contextmanager
def running_triton(folder: Path) -> Iterator[TestTriton]:
    """Run a real Triton that serves every stand-in and an example, with its files in *folder*."""
    record = folder / "record.jsonl"
    models = [*BUILDERS, *(name for name in FURTHER if name not in BY_THEMSELVES), "sensevoice"]
    repository = build_repository(folder / "repository", models=models, record=record)
    shutil.copytree(EXAMPLES / "text-model" / "repository", repository.path, dirs_exist_ok=True)
    # Once, and not in each of the models' processes.
    compileall.compile_dir(folder / "repository" / "standins", quiet=1)
    server = embedded(repository)
    with shared(server), _loaded_once(str(repository.tokenizer)):
        yield TestTriton(server, repository, Record(record))


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A real Triton that serves every stand-in and an example; shared by the whole run, so leave it as you found it."""
    with running_triton(tmp_path_factory.mktemp("triton")) as running:
        yield running


@pytest.fixture(scope="session")
def recognizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A real Triton that serves recognizers of speech, with Whisper's tokens as the tokenizer."""
    # Only here: it imports what decodes audio, which the process that runs no test does not need.
    from tests.speech import write_whisper_tokenizer

    folder = tmp_path_factory.mktemp("recognizers")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=RECOGNIZERS, record=record)
    write_whisper_tokenizer(repository.tokenizer)
    server = embedded(repository)
    with shared(server):
        yield TestTriton(server, repository, Record(record))
