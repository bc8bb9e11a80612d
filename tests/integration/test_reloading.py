"""New settings for a service that runs: on SIGHUP and from a changed file, with one process and with several."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Reply, Service, serving, steered, until
from tests.triton_fixture import TestTriton

# The lines of all requests tell which worker has answered.
_TOLD = ("--log-level", "debug")
_ECHO = {"model": "ensemble", "messages": [{"role": "user", "content": "Hello"}]}


@dataclass(frozen=True)
class Configured:
    """A service, the file with its settings, and how many processes it has."""

    service: Service
    file: Path
    workers: int
    #: How many lines of the log are older than the test.
    older: int = 0

    def write(self, settings: Mapping[str, Any]) -> None:
        """Exchange the file in one step, as a mounted configuration is."""
        new = self.file.with_suffix(".new")
        # Every JSON text is a YAML text.
        new.write_text(json.dumps(settings))
        new.replace(self.file)

    def ask_to_reload(self) -> None:
        """Send SIGHUP."""
        self.service.process.send_signal(signal.SIGHUP)

    def take(self, settings: Mapping[str, Any]) -> None:
        """Exchange the file and wait until it is in force, without the two seconds in which changes are noticed."""
        before = len(self.said("settings reloaded"))
        self.write(settings)
        self.ask_to_reload()
        until(lambda: len(self.said("settings reloaded")) > before)

    def said(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines of this kind."""
        lines = map(json.loads, self.service.log_lines()[self.older :])
        return [line for line in lines if line["event"] == event]

    def models(self) -> set[str]:
        """Return the names that are served."""
        return {model["id"] for model in self.service.send("GET", "/v1/models").json["data"]}

    def agree(self, ask: Any, expected: Any) -> None:
        """Check that every process answers *ask* so."""
        before = len(self.said("request"))

        def all_have_answered() -> bool:
            assert expected == ask()
            return self.workers == len({line.get("worker") for line in self.said("request")[before:]})

        until(all_have_answered)


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def running(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Configured]:
    """The service, with one process and with two."""
    folder, workers = tmp_path_factory.mktemp("reloading"), request.param
    file = folder / "settings.yaml"
    file.write_text(json.dumps(_settings("chatml", "old-name")))
    arguments = ("--config", str(file), "--triton-url", triton.http_url, "--workers", str(workers), *_TOLD)
    with serving(folder, *arguments, XDG_RUNTIME_DIR=str(folder)) as service:
        running = Configured(service, file, workers)
        until(lambda: len([line for line in running.said("model is served") if line["model"] == "ensemble"]) == workers)
        yield running


@pytest.fixture
def configured(running: Configured, template: Path) -> Configured:
    """That service, with an alias, and with a template of the test's own for one model."""
    running.take(_settings(template, "old-name"))
    return replace(running, older=len(running.service.log_lines()))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A chat template."""
    file = tmp_path / "template.jinja"
    file.write_text("first {{ messages[0].content }}")
    return file


def _settings(template: Path | str, alias: str, **api: Any) -> dict[str, Any]:
    return {"models": {"ensemble": {"chat_template": str(template), "aliases": [alias]}}, "api": api}


def test_a_changed_file(configured: Configured) -> None:
    """Aliases, limits and templates change in all processes, without anybody asking for it."""
    configured.agree(lambda: "old-name" in configured.models(), True)
    configured.write(_settings("chatml", "new-name", default_max_tokens=1))
    # A signal that came late has them read once more.
    (line,) = until(lambda: [line for line in configured.said("settings reloaded") if line["changed"]])
    assert ["api.default_max_tokens", "models.ensemble.aliases", "models.ensemble.chat_template"] == sorted(
        line["changed"]
    )
    configured.agree(lambda: frozenset(configured.models() & {"old-name", "new-name"}), frozenset({"new-name"}))
    assert 404 == configured.service.post("/v1/chat/completions", {**_ECHO, "model": "old-name"}).status
    configured.agree(
        lambda: configured.service.post("/v1/chat/completions", _ECHO).json["usage"]["completion_tokens"], 1
    )
    assert [] == configured.service.complaints()


def test_a_request_reads_templates_again(configured: Configured, triton: TestTriton, template: Path) -> None:
    """SIGHUP takes the template's new text, though the settings name the same file."""

    def prompt() -> str:
        answer = configured.service.post("/v1/chat/completions", {**_ECHO, "max_tokens": 1})
        assert 200 == answer.status
        for event in triton.record.events(id=answer.json["id"]):
            for name in ("text_input", "QUERY"):
                if name in event.get("inputs", {}):
                    return str(event["inputs"][name]["value"])
        return "no prompt was recorded"

    configured.agree(lambda: "first Hello" in prompt(), True)
    template.write_text("second {{ messages[0].content }}")
    configured.ask_to_reload()
    until(lambda: configured.said("settings reloaded"))

    configured.agree(lambda: "second Hello" in prompt(), True)


# With one process, other tests read the file again.
@pytest.mark.parametrize("running", [pytest.param(1, marks=pytest.mark.extended), 2], indirect=True, ids=["one", "two"])
@pytest.mark.parametrize(
    "change, named",
    [
        ({"api": {"default_max_tokens": "many"}}, "api.default_max_tokens in"),
        ({"models": {"ensemble": {"chat_template": "/nowhere.jinja"}}}, "ensemble: '/nowhere.jinja' given by"),
        ({"models": {"ensemble": {"adapter": "none"}}}, "none"),
        ({"models": {"ensemble": {"adapter": "embeddings"}}}, "ensemble: "),
    ],
    ids=["value", "template", "no-adapter", "wrong-adapter"],
)
def test_a_bad_file(configured: Configured, change: dict[str, Any], named: str) -> None:
    """Everything stays as it was, the log says why, and a good file after it is taken."""
    configured.write({**_settings("chatml", "new-name"), **change})
    configured.ask_to_reload()
    problems = until(lambda: configured.said("new settings refused, the old ones stay in use"))

    assert named in problems[0]["reason"]
    configured.agree(lambda: frozenset(configured.models() & {"old-name", "new-name"}), frozenset({"old-name"}))
    assert 200 == configured.service.post("/v1/chat/completions", _ECHO).status
    configured.take(_settings("chatml", "new-name"))
    configured.agree(lambda: "new-name" in configured.models(), True)


def test_running_requests_go_on(configured: Configured, triton: TestTriton) -> None:
    """A stream that began under a name which is taken away is answered to its end."""
    body = {
        "model": "old-name",
        "prompt": steered(prompt := uuid.uuid4().hex, text="a b c d", repeat=10, delay_ms=50),
        "max_tokens": 64,
        "stream": True,
    }
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(configured.service.post("/v1/completions", body)))
    thread.start()
    triton.record.wait_for(lambda events: any(prompt in json.dumps(event) for event in events), 120, event="request")
    configured.take(_settings("chatml", "new-name"))
    thread.join(120)

    assert "[DONE]" == replies[0].events[-1]


def test_what_needs_a_restart(configured: Configured) -> None:
    """What needs a restart is named, and the rest is taken over."""
    configured.take({**_settings("chatml", "new-name"), "media": {"max_images": 3}})

    (line,) = configured.said("settings need a restart to take effect")
    assert ["media.max_images"] == line["settings"]
    assert "new-name" in configured.models()


def test_a_replaced_worker_has_the_keys_in_force(triton: TestTriton, tmp_path: Path) -> None:
    """A bad file leaves the old ones; a signal for all processes is no reason to be replaced."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: one, key: sk-one}]")
    arguments = ("--api-keys-file", str(keys), "--triton-url", triton.http_url, "--workers", "2", *_TOLD)
    with serving(tmp_path, *arguments, XDG_RUNTIME_DIR=str(tmp_path)) as service:
        configured = Configured(service, keys, 2)

        def asked_with(key: str) -> int:
            return service.send("GET", "/v1/models", headers={"api-key": key}).status

        def workers_that_found_triton() -> set[int]:
            return {line["worker"] for line in configured.said("Triton answers")}

        until(lambda: workers_that_found_triton() == {0, 1})
        configured.write({"keys": [{"name": "two", "key": "sk-two"}]})
        until(lambda: len(configured.said("API keys are read again")) == 2)
        keys.unlink()
        until(lambda: len(configured.said("the old API keys stay in force")) == 2)
        pids = [line["pid"] for line in configured.said("worker started")]
        for pid in pids:
            os.kill(pid, signal.SIGHUP)
        configured.agree(lambda: asked_with("sk-two"), 200)
        assert 2 == len(configured.said("worker started"))
        configured.write({"keys": [{"name": "two", "key": "sk-two"}]})
        until(lambda: len(configured.said("API keys are read again")) == 4)
        configured = replace(configured, older=len(service.log_lines()))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: workers_that_found_triton() == {0, 1})

        configured.agree(lambda: asked_with("sk-two"), 200)
        configured.agree(lambda: asked_with("sk-one"), 401)
        assert b"sk-two" not in b"".join(file.read_bytes() for file in tmp_path.rglob("api-keys*"))


@pytest.mark.parametrize("running", [2], indirect=True, ids=["two"])
def test_a_replaced_worker_has_the_new_settings(configured: Configured) -> None:
    """A replaced worker has the new settings, also where the file has become bad since."""
    workers = replace(configured, older=0).said("worker started")[-2:]
    configured.take(_settings("llama3", "new-name"))
    configured.write({"api": "nothing"})
    configured.ask_to_reload()
    until(lambda: configured.said("new settings refused, the old ones stay in use"))

    def served() -> int:
        return [line["model"] for line in configured.said("model is served")].count("new-name")

    before = served()
    for line in workers:
        os.kill(line["pid"], signal.SIGKILL)
    until(lambda: len(configured.said("worker started")) == 2)
    until(lambda: served() == before + 2)

    configured.agree(lambda: "new-name" in configured.models(), True)


def test_tritons_are_added_drained_and_refused(triton: TestTriton, tmp_path: Path) -> None:
    """The list of Tritons, their weights and the policy change in all workers; one Triton alone takes a restart."""
    file, workers = tmp_path / "settings.yaml", 2

    def several(*weights: float, **more: Any) -> dict[str, Any]:
        listed = [{"name": f"t{n}", "url": [triton.http_url], "weight": weight} for n, weight in enumerate(weights)]
        return {"triton": {"endpoints": listed, **more}}

    file.write_text(json.dumps(several(1)))
    arguments = ("--config", str(file), "--workers", str(workers), *_TOLD)
    with serving(tmp_path, *arguments, XDG_RUNTIME_DIR=str(tmp_path)) as service:
        running = Configured(service, file, workers)
        until(lambda: len([line for line in running.said("model is served") if line["model"] == "ensemble"]) == workers)

        def states() -> list[str]:
            return [line["state"] for line in service.send("GET", "/status").json["endpoints"]]

        running.write(several(1, 1, 0, routing={"policy": "round_robin"}))
        until(lambda: running.said("settings reloaded"))
        for _ in range(8):
            until(lambda: states() == ["ready", "ready", "drained"])
        answers = [service.post("/v1/completions", {"model": "ensemble", "prompt": "Hello"}) for _ in range(20)]
        assert {answer.status for answer in answers} == {200}
        used = {line.get("endpoint") for line in running.said("request")} - {None}
        assert used == {"t0", "t1"}
        running.write({"triton": {"url": [triton.http_url]}})
        until(lambda: running.said("new settings refused, the old ones stay in use"))
        assert states() == ["ready", "ready", "drained"]
