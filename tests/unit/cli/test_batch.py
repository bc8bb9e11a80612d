"""The command `batch`: from a file of prompts to a file of answers, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.batch_command import parse
from tests.cases import every_case
from tests.clock import Clock
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.unit.api.test_batches import MODEL, settings_of
from triton_openai.cli.batch import client, remote, uploading
from triton_openai.cli.batch import progress as progress_module
from triton_openai.cli.batch.answers import RunFiles, state_path
from triton_openai.cli.batch.client import Client, RequestFailure, retry_after_of
from triton_openai.cli.batch.command import execute
from triton_openai.cli.batch.progress import Counts, Lines, duration, progress_for, short
from triton_openai.errors import ConfigurationError

KEY = "sk-1"
ANSWER = {"choices": [{"message": {"content": "x\u2028y"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait."""
    monkeypatch.setattr(client, "_FIRST_DELAY", 0.0)
    monkeypatch.setattr(remote, "_FIRST_POLL", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of ten prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Prompt {number}?\n" for number in range(1, 11)))
    return path


async def run(url: str, *arguments: Any, key: str = KEY) -> int:
    """Run the command `batch run` at *url*, and return its exit status."""
    return await execute(parse(["run", *map(str, arguments), "--url", url, "--model", MODEL], {"OPENAI_API_KEY": key}))


def results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids(path: Path) -> list[str]:
    """Return the ids of a file of results."""
    return [one["custom_id"] for one in results(path)]


def names(folder: Path) -> set[str]:
    """Return the names of the files in a folder."""
    return {path.name for path in folder.iterdir()}


ALL = [f"line-{number}" for number in range(1, 11)]


class Service:
    """A service with OpenAI's API: by the text of a prompt, *behaviour* answers each attempt in turn, else it works."""

    def __init__(self) -> None:
        self.behaviour: dict[str, list[Callable[[web.Request], Any]]] = {}
        self.asked: Counter[str] = Counter()
        self.headers: list[Mapping[str, str]] = []
        self.running = 0
        self.most = 0
        #: Of those that run, how many wait until they may answer.
        self.held = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        prompt = (await request.json())["messages"][-1]["content"]
        self.asked[prompt] += 1
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.held += 1
            try:
                await self.may_answer.wait()
            finally:
                self.held -= 1
            await asyncio.sleep(0)
            turns = self.behaviour.get(prompt, [])
            if turns:
                response: web.StreamResponse = turns.pop(0)(request)
                return response
            return web.json_response(text=json.dumps(ANSWER, indent=2))
        finally:
            self.running -= 1


async def reached(is_so: Callable[[], bool]) -> None:
    """Wait until something *is_so*."""
    async with asyncio.timeout(120):
        # What is waited for is a file, or a count.
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def live() -> AsyncIterator[Service]:
    """Run such a service."""
    service = Service()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", service.answer)
    async with TestServer(app) as server:
        service.url = str(server.make_url("/v1"))
        yield service


def status(code: int, *, body: str = '{"error": {"message": "No."}}', **headers: str) -> Callable[[web.Request], Any]:
    """Return what answers with an error."""
    return lambda _: web.Response(
        status=code, text=body, headers={name.replace("_", "-"): v for name, v in headers.items()}
    )


def lost(request: web.Request) -> web.Response:
    """Break the connection off."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


# Live


async def test_live_requests_are_bounded_and_answered(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """Each prompt has one answer, in a file whose lines no reader breaks; the key is in the header and nowhere else."""
    output = tmp_path / "out.jsonl"
    async with live() as service:
        service.may_answer.clear()
        task = asyncio.ensure_future(run(service.url, prompts, "-o", output, "--live", "--concurrency", 3))
        await reached(lambda: service.running == 3)
        service.may_answer.set()
        assert 0 == await task
    assert sorted(ALL) == sorted(ids(output))
    assert 10 == len(output.read_text().splitlines())
    assert {"status_code": 200, "request_id": "", "body": ANSWER} == results(output)[0]["response"]
    assert 3 == service.most
    assert {f"Bearer {KEY}"} == {one["Authorization"] for one in service.headers}
    # Nothing failed, so nothing is to be continued.
    assert {output.name, prompts.name} == names(tmp_path)
    said = capsys.readouterr().err
    assert "10 of 10 lines have answers" in said
    assert KEY not in said


@every_case(
    "turns, attempts, succeeds",
    [
        ([status(429, Retry_After="0")] * 3, 4, True),
        ([status(503, body="<html>"), lost, status(500)], 4, True),
        ([status(429)] * 9, 9, False),
        ([status(502)] * 9, 9, False),
        ([status(400)], 1, False),
        # For example, a model that the key may not use.
        ([status(403)], 1, False),
        ([status(413, body="too large")], 1, False),
        ([status(307, Location="http://user:secret@other/")], 1, False),
        ([status(200, body="no JSON")] * 9, 9, False),
    ],
)
async def test_what_a_failure_of_one_line_becomes(
    turns: list[Any], attempts: int, succeeds: bool, tmp_path_factory: Any
) -> None:
    """What may pass is tried again, as long as the service wants; the rest is a failed line, and the others go on."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.txt"
    prompts.write_text("bad\ngood\n")
    output = folder / "out.jsonl"
    async with live() as service:
        service.behaviour["bad"] = list(turns)
        assert (not succeeds) == await run(service.url, prompts, "-o", output, "--live")
        assert attempts == service.asked["bad"]
        if succeeds:
            assert {"line-1", "line-2"} == set(ids(output))
            return
        errors = folder / "out.errors.jsonl"
        assert (["line-2"], ["line-1"]) == (ids(output), ids(errors))
        assert "secret" not in errors.read_text()
        # The same command again sends only that one.
        service.behaviour["bad"] = []
        assert 0 == await run(service.url, prompts, "-o", output, "--live", "--ordered")
        assert (["line-1", "line-2"], 1) == (ids(output), service.asked["good"])
        assert not errors.exists()


@every_case("wanted, seconds", [("3", 3), ("0.5", 0.5), ("-1", 0), ("nan", 0), ("99999", 600), ("x", None), ("", None),
                               ("Wed, 21 Oct 2015 07:28:00 GMT", 0)])  # fmt: skip
def test_retry_after(wanted: str, seconds: float | None) -> None:
    """It is a number or a date, and never longer than a person would wait."""
    assert seconds == retry_after_of({"Retry-After": wanted})


async def test_all_requests_wait_when_the_service_asks_for_it(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """One answer with Retry-After holds the others back, too."""
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float, result: Any = None) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with live() as service:
        service.behaviour["Prompt 1?"] = [status(429, Retry_After="40")]
        assert 0 == await run(service.url, prompts, "-o", tmp_path / "out", "--live", "--concurrency", 1)
    # Before the next attempt, and before each of the ten requests that are sent from then on.
    assert 11 == len([seconds for seconds in slept if seconds == pytest.approx(40)])


@pytest.mark.parametrize("code", [401, 429])
async def test_a_wrong_key_ends_a_run_at_once(code: int, prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """No other line would be answered, and none is failed for that."""
    output = tmp_path / "out.jsonl"
    async with live() as service:
        for number in range(1, 11):
            service.behaviour[f"Prompt {number}?"] = [
                status(code, body='{"error": {"message": "Wrong key sk-12345678.", "code": "insufficient_quota"}}')
            ]
        assert 1 == await run(service.url, prompts, "-o", output, "--live", "--concurrency", 2)
        assert sum(service.asked.values()) <= 2
        said = capsys.readouterr().err
        assert f"HTTP {code}: Wrong key <redacted>" in said
        service.behaviour.clear()
        assert 0 == await run(service.url, prompts, "-o", output, "--live")


async def test_a_full_disk_ends_a_run(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The reason is a sentence, and half a line that was written is not taken for an answer."""
    output = tmp_path / "out.jsonl"
    real = os.write
    written: list[int] = []

    def write(descriptor: int, data: Any) -> int:
        if data[:12] == b'{"id":"live_':
            written.append(descriptor)
            if len(written) == 5:
                return real(descriptor, data[:50])
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    async with live() as service:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            assert 1 == await run(service.url, prompts, "-o", output, "--live", "--concurrency", 1)
        assert "No space left on device" in capsys.readouterr().err
        assert 4 == output.read_bytes().count(b"\n")
        assert 0 == await run(service.url, prompts, "-o", output, "--live", "--ordered")
    assert ALL == ids(output)


async def test_a_service_that_is_away_fails_no_lines(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """The run stops and says so. The same command continues it."""
    output = tmp_path / "out.jsonl"
    assert 1 == await run("http://127.0.0.1:1", prompts, "-o", output, "--live", "--retries", 1)
    said = capsys.readouterr().err
    assert "cannot be reached: Connection refused." in said
    assert "The same command again continues." in said
    assert not (tmp_path / "out.errors.jsonl").exists()
    async with live() as service:
        assert 0 == await run(service.url, prompts, "-o", output, "--live")
    assert sorted(ALL) == sorted(ids(output))


async def test_an_interrupted_run_continues(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """After Ctrl-C, and after a crash in the middle of a line, only what has no answer is sent."""
    output = tmp_path / "out.jsonl"
    async with live() as service:
        task = asyncio.ensure_future(run(service.url, prompts, "-o", output, "--live", "--concurrency", 1))
        await reached(lambda: sum(service.asked.values()) >= 5)
        service.may_answer.clear()
        await reached(lambda: service.held == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "The same command again continues" in capsys.readouterr().err
        answered = len(ids(output))
        assert 0 < answered < 10
        with output.open("ab") as file:
            file.write(b'{"custom_id": "line-10", "resp')
        assert KEY not in state_path(output).read_text()
        service.may_answer.set()
        service.asked.clear()
        assert 0 == await run(service.url, prompts, "-o", output, "--live", "--ordered")
        assert 10 - answered == sum(service.asked.values())
    assert ALL == ids(output)


async def test_a_killed_command_continues(prompts: Path, tmp_path: Path) -> None:
    """After `kill -9` at any time, each line has one answer, and no answered line is sent again."""
    output = tmp_path / "out.jsonl"
    arguments = ["batch", "run", str(prompts), "-o", str(output), "--live", "--concurrency", "2", "--model", MODEL]
    async with live() as service:
        environ = {**os.environ, "OPENAI_BASE_URL": service.url, "OPENAI_API_KEY": KEY}

        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-c", "import sys; from triton_openai.cli import main; sys.exit(main())", *arguments,
                env=environ, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip

        for number in (2, 6):
            service.may_answer.set()
            process = await start()
            await reached(lambda number=number: sum(service.asked.values()) >= number)  # type: ignore[misc]
            service.may_answer.clear()
            await reached(lambda: service.held == 2)
            process.kill()
            await process.wait()
            await reached(lambda: service.running == 0)
        service.may_answer.set()
        answered = set(ids(output))
        service.asked.clear()
        process = await start()
        assert 0 == await process.wait()
        assert 10 - len(answered) == sum(service.asked.values())
    assert sorted(ALL) == sorted(ids(output))


async def test_what_is_not_continued(prompts: Path, tmp_path: Path) -> None:
    """A file that is no output of this run stays as it is, unless the user says so; two runs do not share one."""
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    async with live() as service:
        with pytest.raises(ConfigurationError, match="exists"):
            await run(service.url, prompts, "-o", output, "--live")
        assert "mine\n" == output.read_text()
        service.behaviour["Prompt 3?"] = [status(400)]
        assert 1 == await run(service.url, prompts, "-o", output, "--live", "--overwrite")
        with pytest.raises(ConfigurationError, match="other requests"):
            await run(service.url, prompts, "-o", output, "--live", "--max-tokens", 1)
        with RunFiles(output), pytest.raises(ConfigurationError, match="Another run"):
            await run(service.url, prompts, "-o", output, "--live")
        with pytest.raises(ConfigurationError, match="two files"):
            await run(service.url, prompts, "-o", prompts, "--live")
        shorter = tmp_path / "shorter.txt"
        await asyncio.to_thread(shorter.write_text, "a\n")
        assert 0 == await run(service.url, shorter, "-o", output, "--live", "--overwrite")
    assert ["line-1"] == ids(output)


async def test_a_corrected_command_begins_anew(prompts: Path, tmp_path: Path) -> None:
    """Where no line was answered, the same output takes the answers to other requests, and failed lines are gone."""
    output = tmp_path / "out.jsonl"
    async with live() as service:
        for number in range(1, 11):
            service.behaviour[f"Prompt {number}?"] = [status(400)]
        assert 1 == await run(service.url, prompts, "-o", output, "--live", "--temperature", 9)
        assert 10 == len(ids(tmp_path / "out.errors.jsonl"))
        service.behaviour.clear()
        assert 0 == await run(service.url, prompts, "-o", output, "--live", "--temperature", 1)
    assert sorted(ALL) == sorted(ids(output))
    assert {"prompts.txt", "out.jsonl"} == names(tmp_path)


@every_case(
    "written, url",
    [
        ("localhost:9000/v1", "http://localhost:9000"),
        ("https://llm.example/v1/", "https://llm.example"),
        ("http://llm.example", "http://llm.example"),
    ],
)
def test_the_url_of_the_service(written: str, url: str) -> None:
    """The same as for `chat` and `bench`: one without a scheme is one of HTTP."""
    assert url == parse(["list", "--url", written], {}).url


@every_case("written", ["ftp://llm.example", "file:///v1"])
def test_other_urls_are_refused(written: str) -> None:
    """The error names the schemes that there are."""
    with pytest.raises(ConfigurationError, match="must begin with http"):
        parse(["list", "--url", written], {})


@every_case("written, window", [("24", "24h"), ("6h", "6h")])
def test_the_window_is_a_number_of_hours(written: str, window: str) -> None:
    """With the letter of OpenAI's API, or without."""
    assert window == parse(["run", "in.txt", "-o", "out", "--window", written], {}).window


@every_case("option", ["--concurrency=4", "--retries=2", "--timeout=9"])
def test_options_of_live_requests_need_them(option: str) -> None:
    """A batch would ignore them."""
    with pytest.raises(ConfigurationError, match="needs --live"):
        parse(["run", "in.txt", "-o", "out", option], {})
    parse(["run", "in.txt", "-o", "out", "--live", option], {})


@every_case(
    "option",
    [
        *("--temperature=inf", "--temperature=nan", "--temperature=x", "--timeout=nan", "--timeout=-1", "--timeout=0"),
        *("--max-tokens=0", "--max-tokens=x", "--concurrency=1.5", "--retries=-1", "--lines-per-batch=many"),
    ],
)
def test_numbers_that_are_none(option: str) -> None:
    """Each is refused as for the other commands, with what it has to be."""
    with pytest.raises(ConfigurationError, match=" is not accepted: expected a "):
        parse(["run", "in.txt", "-o", "out", "--live", option], {})


@every_case("written", ["1d", "soon", "", "h", "-1h"])
def test_other_windows_are_refused(written: str) -> None:
    """Before anything is sent, and with an example."""
    with pytest.raises(ConfigurationError, match="such as 24h"):
        parse(["run", "in.txt", "-o", "out", f"--window={written}"], {})


# Batches


@asynccontextmanager
async def service_with_batches(folder: Path, **batches: Any) -> AsyncIterator[SimpleNamespace]:
    """Run the service itself in front of a model that answers at once."""
    async with FakeTriton(config_of(MODEL)) as triton:
        triton.responses = ({"text_output": "an answer"},)
        async with serving(settings_of(folder, triton, **batches)) as proxy:
            await proxy.ready()
            yield SimpleNamespace(url=str(proxy.client.make_url("/")), triton=triton, proxy=proxy)


async def listed(service: SimpleNamespace) -> list[dict[str, Any]]:
    """Return the batches of the service."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with service.proxy.client.get("/v1/batches", headers=headers) as response:
        return list((await response.json())["data"])


async def test_prompts_as_batches(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """More lines than a batch may have become several; answers come in order, and list and fetch show the same."""
    output = tmp_path / "out.jsonl"
    async with service_with_batches(tmp_path / "service") as service:
        arguments = (prompts, "-o", output, "--ordered", "--lines-per-batch", 4, "--endpoint", "completions")
        assert 0 == await run(service.url, *arguments)
        assert ALL == ids(output)
        batches = await listed(service)
        assert [2, 4, 4] == [batch["request_counts"]["total"] for batch in batches]
        fetched = tmp_path / "fetched.jsonl"
        environ = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{service.url}v1/"}
        assert 0 == await execute(parse(["fetch", batches[0]["id"], "-o", str(fetched)], environ))
        assert {"line-9", "line-10"} == set(ids(fetched))
        capsys.readouterr()
        assert 0 == await execute(parse(["list"], environ))
        shown = capsys.readouterr().out
        assert all(batch["id"] in shown for batch in batches)
        assert 1 == await execute(parse(["cancel", "batch_1", batches[0]["id"]], environ))
        assert 1 == await execute(parse(["fetch", "batch_1", "-o", str(tmp_path / "x")], environ))


async def test_failed_lines_of_a_batch_are_sent_again(tmp_path: Path, capsys: Any) -> None:
    """They are in a file beside the answers, whose name the summary has; the exit status is 1."""
    requests = tmp_path / "requests.jsonl"
    lines = [{"custom_id": name, "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": max_tokens}}
             for name, max_tokens in (("good", 1), ("bad", -1))]  # fmt: skip
    lines.append(
        {"custom_id": "other", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}}
    )
    lines.append({**lines[0], "custom_id": "last"})
    requests.write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "out.jsonl"
    async with service_with_batches(tmp_path / "service") as service:
        for number in (2, 3):
            assert 1 == await run(service.url, "-i", requests, "-o", output)
            assert ({"good", "last", "other"}, ["bad"]) == (set(ids(output)), ids(tmp_path / "out.errors.jsonl"))
            assert number == len(await listed(service))
        said = capsys.readouterr().err
        assert "out.errors.jsonl" in said
        assert "The first: HTTP 400: Invalid value for 'max_tokens'" in said


async def test_a_batch_that_is_refused_as_a_whole(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """The service's reasons are shown, and the next try makes a new batch."""
    output = tmp_path / "out.jsonl"
    async with service_with_batches(tmp_path / "service", max_enqueued_tokens=1) as service:
        assert 1 == await run(service.url, prompts, "-o", output, "--endpoint", "completions")
        said = capsys.readouterr().err
        assert "token_limit_exceeded" in said
        assert said.endswith("Correct the cause and run the command again.\n")
        assert 1 == await run(service.url, prompts, "-o", output, "--endpoint", "completions")
        assert 2 == len(await listed(service))
        assert 1 == await run(service.url, prompts, "-o", output, "--endpoint", "completions", key="sk-wrong")


async def test_an_input_that_a_proxy_does_not_take_comes_in_parts(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 413 with the page of a proxy is no limit of the service: the file is uploaded in parts."""
    monkeypatch.setattr(uploading, "_PART_SIZE", 300)
    asked: list[str] = []
    real = Client.json

    async def json_of(self: Client, method: str, path: str, **options: Any) -> Any:
        asked.append(path)
        if path == "/v1/files":
            raise RequestFailure("HTTP 413: <html>", status=413)
        return await real(self, method, path, **options)

    monkeypatch.setattr(Client, "json", json_of)
    output = tmp_path / "out.jsonl"
    async with service_with_batches(tmp_path / "service") as service:
        assert 0 == await run(service.url, prompts, "-o", output, "--endpoint", "completions", "--ordered")
    assert ALL == ids(output)
    assert len([path for path in asked if path.endswith("/parts")]) > 2


async def test_a_service_without_batches(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """The error names the way that works there, and the same output can be used for it."""
    output = tmp_path / "out.jsonl"
    async with live() as service:
        assert 1 == await run(service.url, prompts, "-o", output)
        assert "--live" in capsys.readouterr().err
        assert 0 == await run(service.url, prompts, "-o", output, "--live")
    assert sorted(ALL) == sorted(ids(output))


async def test_a_batch_that_cannot_be_made_leaves_nothing_open(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    """An endpoint without batches is refused by the service; the run is not stuck with it."""
    output = tmp_path / "out.jsonl"
    async with service_with_batches(tmp_path / "service") as service:
        assert 1 == await run(service.url, prompts, "-o", output, "--endpoint", "completions", "--window", "999h")
        assert "completion_window" in capsys.readouterr().err
        assert 0 == await run(service.url, prompts, "-o", output, "--endpoint", "completions")
    assert sorted(ALL) == sorted(ids(output))


@pytest.mark.parametrize("when", ["before", "after", "between"])
async def test_a_crash_around_the_creation_makes_no_second_batch(
    when: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the command or the answer is lost, the next run finds its batch at the service."""
    output = tmp_path / "out.jsonl"
    arguments = (prompts, "-o", output, "--endpoint", "completions")
    real = Client.json
    crashed: list[str] = []

    async def json_of(self: Client, method: str, path: str, **options: Any) -> Any:
        creates = (method, path) == ("POST", "/v1/batches") and not crashed
        if creates and when == "before":
            crashed.append(path)
            raise asyncio.CancelledError
        answer = await real(self, method, path, **options)
        if creates:
            crashed.append(path)
            if when == "after":
                raise asyncio.CancelledError
            raise RequestFailure("The answer is lost.")
        return answer

    monkeypatch.setattr(Client, "json", json_of)
    async with service_with_batches(tmp_path / "service") as service:
        if when != "between":
            with pytest.raises(asyncio.CancelledError):
                await run(service.url, *arguments)
        assert 0 == await run(service.url, *arguments)
        assert crashed
        assert 1 == len(await listed(service))
    assert sorted(ALL) == sorted(ids(output))


async def test_a_batch_goes_on_while_the_command_does_not_run(prompts: Path, tmp_path: Path) -> None:
    """The next run fetches what came meanwhile, also after a crash between two lines; it is not mixed with --live."""
    output = tmp_path / "out.jsonl"
    arguments = (prompts, "-o", output, "--endpoint", "completions")
    async with service_with_batches(tmp_path / "service", paused=True) as service:
        task = asyncio.ensure_future(run(service.url, *arguments))
        batches: list[dict[str, Any]] = []
        while not batches or batches[0]["status"] != "in_progress":
            batches = await listed(service)
        state = state_path(output)
        await reached(lambda: batches[0]["id"] in state.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ConfigurationError, match="has not ended"):
            await run(service.url, *arguments, "--live")
        with pytest.raises(ConfigurationError, match="go on with that --url"):
            await run("http://127.0.0.1:1", *arguments)
        environ = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": service.url}
        fetch = ["fetch", batches[0]["id"], "-o", str(tmp_path / "part.jsonl")]
        assert 1 == await execute(parse(fetch, environ))
        assert 0 == await execute(parse([*fetch, "--partial", "--overwrite"], environ))
        assert [] == ids(tmp_path / "part.jsonl")
        assert 0 == await execute(parse(["cancel", batches[0]["id"]], environ))
        # What never ran has failed, and is sent again.
        assert 1 == await run(service.url, *arguments)
        assert sorted(ALL) == sorted(ids(tmp_path / "out.errors.jsonl"))
    async with service_with_batches(tmp_path / "service") as service:
        assert 0 == await run(service.url, *arguments)
    assert sorted(ALL) == sorted(ids(output))


# What it shows


def test_progress_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are plain lines with the rate, the tokens and the time that is left; a terminal gets a bar."""
    stream = io.StringIO()
    times = iter([0.0, 1.0, 10.0, 11.0, 1000.0])
    # Of this module alone: threads of other tests look at the clock, too.
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    progress = progress_for(100, 20, stream)
    assert isinstance(progress, Lines)
    counts = Counts(done=40, failed=2, input_tokens=1234, output_tokens=999_999_999)
    for _ in range(4):
        progress.update(counts)
    first, last = stream.getvalue().splitlines()
    assert "40 of 100 lines, 2.0 lines/s, 30 s left, 1.23k tokens in, 1G out, 2 failed" == first
    assert "50 min 0 s left" in last
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.undo()
    bar = progress_for(100, 20, stream)
    bar.update(counts)
    bar.note("a note")
    bar.close()
    assert "40/100" in stream.getvalue()
    assert "a note" in stream.getvalue()


def test_numbers_for_people() -> None:
    """They are short."""
    assert ["0", "999", "1k", "12.3M", "2G"] == [short(number) for number in (0, 999, 1000, 12_345_678, 2 * 10**9)]
    assert ["0 s", "59 s", "1 min 0 s", "2 h 5 min"] == [duration(seconds) for seconds in (0, 59.4, 60, 7500)]
