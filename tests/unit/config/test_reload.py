"""Settings that are read again: when, and what becomes of those that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from triton_openai.access.authorizer import AUTHORIZER, Authorizer
from triton_openai.access.keys import sha256
from triton_openai.app import apply_settings, create_app
from triton_openai.config import reload
from triton_openai.config.files import FileWatch
from triton_openai.config.reload import Reloader, Source
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings, ApiSettings, RestrictedApi, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.models.lookup import Models


class Service:
    """Takes settings over, or refuses them, and keeps a record."""

    def __init__(self) -> None:
        self.taken: list[tuple[Settings, bool]] = []
        self.refusal: str | None = None
        self.mistake: Exception | None = None

    async def apply_settings(self, settings: Settings, reload: bool) -> None:
        if self.mistake is not None:
            raise self.mistake
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self.taken.append((settings, reload))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LOOK_SECONDS", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    write(path, "api: {default_max_tokens: 1}")
    return path


def write(path: Path, text: str) -> None:
    """Exchange the file in one step, as a mounted configuration is."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def remove(path: Path) -> None:
    path.unlink()


class CountingWatch(FileWatch):
    """Counts how often the file is looked at."""

    looks = 0

    def due(self, *, settled: bool = False) -> bool:
        self.looks += 1
        return super().due(settled=settled)


@contextlib.asynccontextmanager
async def reloading(file: Path, service: Service):
    source = Source(lambda: load_settings({"config": str(file)}, {}), file)
    source.watch = CountingWatch([file], problem="refused")
    reloader = Reloader(source.load(), source, service.apply_settings)
    task = asyncio.create_task(reloader.run())
    try:
        with capture_logs() as logs:
            yield reloader, logs, source.watch
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(condition) -> None:
    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - what it waits for is not announced
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), 120)


async def test_nothing_to_watch_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without files looks at none."""
    monkeypatch.setattr("asyncio.to_thread", Mock(side_effect=AssertionError))
    monkeypatch.setattr(reload, "LOOK_SECONDS", 0)
    reloader = Reloader(Settings(), Source(Settings), Service().apply_settings)
    authorizer = Authorizer(AccessSettings())
    monkeypatch.setattr("triton_openai.access.authorizer.LOOK_SECONDS", 0)
    for watch in (reloader.run(), authorizer.watch()):
        task = asyncio.create_task(watch)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()


async def test_a_changed_file_is_read(file: Path) -> None:
    """Tokenizers and templates stay where their settings do."""
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        write(file, "api: {default_max_tokens: 2}")
        await until(lambda: logs)

    ((settings, reload),) = service.taken
    assert (2, False) == (settings.api.default_max_tokens, reload)
    assert settings == reloader.settings
    assert ["api.default_max_tokens"] == logs[-1]["changed"]


async def test_a_request_renews(file: Path) -> None:
    """On request everything is read again, the file having changed or not."""
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        reloader.request()
        await until(lambda: logs)

    assert [(reloader.settings, True)] == service.taken
    assert [] == logs[-1]["changed"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("api: {default_max_tokens: none}", "api.default_max_tokens"),
        ("api: {default_max_token: 3}", "api.default_max_token in"),
        ("api: {default_max_tokens: 2", "not valid YAML"),
    ],
)
async def test_a_bad_file_changes_nothing(file: Path, text: str, named: str) -> None:
    """The log names the setting; the next good file is taken."""
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        before = reloader.settings
        write(file, text)
        await until(lambda: logs)
        assert (before, []) == (reloader.settings, service.taken)
        assert "error" == logs[-1]["log_level"]
        assert named in logs[-1]["reason"]
        write(file, "api: {default_max_tokens: 5}")
        await until(lambda: service.taken)

    assert 5 == reloader.settings.api.default_max_tokens


async def test_refused_settings_are_not_kept(file: Path) -> None:
    """What cannot be used is offered again with the next change, because it still differs."""
    service = Service()
    service.refusal = "There is no such template."
    async with reloading(file, service) as (reloader, logs, _):
        write(file, "defaults: {chat_template: none.jinja}")
        await until(lambda: logs)
        assert "There is no such template." == logs[-1]["reason"]
        assert reloader.settings.defaults.chat_template is None
        service.refusal = None
        reloader.request()
        await until(lambda: service.taken)

    assert "none.jinja" == reloader.settings.defaults.chat_template


@pytest.mark.parametrize(
    "guarded",
    [
        "access: {api_key: [a:secret]}",
        "access: {openai_restricted_api: [{apis: [metrics], header: admin, value: secret}]}",
    ],
)
async def test_a_service_is_not_opened_by_what_is_left_out(file: Path, guarded: str) -> None:
    """A file that lost a line has no mistake, and would let everybody in."""
    write(file, guarded)
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        write(file, "{}")
        await until(lambda: logs)
        write(file, f"{guarded}\napi: {{default_max_tokens: 9}}")
        await until(lambda: service.taken)

    assert "error" == logs[0]["log_level"]
    assert "restart the service" in logs[0]["reason"]
    assert [9] == [settings.api.default_max_tokens for settings, _ in service.taken]
    assert 9 == reloader.settings.api.default_max_tokens


async def test_what_needs_a_restart_is_said(file: Path) -> None:
    """A setting that needs a restart keeps its value and is named; the others are taken all the same."""
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        write(file, "server: {port: 1, queue_timeout: 3}\napi: {default_max_tokens: 1}")
        await until(lambda: len(logs) == 2)

    assert ["server.port"] == logs[0]["settings"]
    assert (9000, 3) == (reloader.settings.server.port, reloader.settings.server.queue_timeout)


async def test_a_file_that_is_gone_for_a_moment(file: Path) -> None:
    """The settings stay, which is said once; a file that comes back is read."""
    service = Service()
    async with reloading(file, service) as (_, logs, watch):
        remove(file)
        seen = watch.looks
        await until(lambda: watch.looks > seen + 4)
        (line,) = logs
        assert "error" == line["log_level"]
        assert f"{file} cannot be read" in line["reason"]
        write(file, "api: {default_max_tokens: 9}")
        await until(lambda: service.taken)

    assert 9 == service.taken[0][0].api.default_max_tokens


async def test_a_file_that_is_cut_off_takes_nothing_away(file: Path) -> None:
    """A full disk leaves a file empty, which nobody wants to be taken for settings; `{}` is for who wants none."""
    service = Service()
    write(file, "api: {default_max_tokens: 9}")
    async with reloading(file, service) as (reloader, logs, _):
        before = reloader.settings
        write(file, "")
        await until(lambda: logs)
        assert (before, []) == (reloader.settings, service.taken)
        assert "is empty" in logs[-1]["reason"]
        write(file, "{}")
        await until(lambda: service.taken)

    assert reloader.settings.api == ApiSettings()


async def test_a_file_that_was_empty_can_be_read_again(file: Path) -> None:
    """Where nothing would change, nothing is refused."""
    service = Service()
    write(file, "")
    async with reloading(file, service) as (reloader, _, _):
        reloader.request()
        await until(lambda: service.taken)


async def test_a_pipe_is_not_waited_for(file: Path) -> None:
    """Nobody may ever write into it, and a thread that reads it would keep the service from ending."""
    service = Service()
    async with reloading(file, service) as (reloader, logs, _):
        remove(file)
        os.mkfifo(file)
        await until(lambda: logs and "pipe" in logs[-1].get("reason", ""))
        remove(file)
        write(file, "api: {default_max_tokens: 4}")
        await until(lambda: service.taken)

    assert 4 == reloader.settings.api.default_max_tokens


async def test_a_mistake_does_not_end_the_watching(file: Path) -> None:
    """Whatever goes wrong, the next change is seen."""
    service = Service()
    service.mistake = ValueError("a mistake")
    async with reloading(file, service) as (reloader, logs, _):
        reloader.request()
        await until(lambda: logs)
        service.mistake = None
        reloader.request()
        await until(lambda: service.taken)

    assert "error" == logs[0]["log_level"]


def test_a_file_whose_rights_are_mended_is_another_one(file: Path) -> None:
    """A file whose rights are mended is read, though not a byte of it has changed."""
    source = Source(Settings, file)
    file.chmod(0o640)

    assert source.watch.due()
    source.watch.used()
    assert not source.watch.due()


def test_a_file_that_could_not_be_read_is_tried_again(file: Path) -> None:
    """A file that could not be read is tried again while it looks the same; the log says it once for each reason."""
    watch = FileWatch([file], problem="not used")
    write(file, "new")
    with capture_logs() as logs:
        for reason in ("no memory", "no memory", "no descriptors"):
            assert watch.due()
            watch.failed(OSError(reason))

    assert ["no memory", "no descriptors"] == [line["reason"] for line in logs]
    watch.used()
    assert not watch.due()


def test_a_file_that_is_being_written_is_not_read_yet(file: Path) -> None:
    """A change counts when the file looks the same twice."""
    watch = FileWatch([file], problem="not used")
    looks = []
    for text in ("a", "ab", None, None):
        if text is not None:
            write(file, text)
        looks.append(watch.due(settled=True))

    assert [False, False, True, False] == looks


async def test_refused_settings_wait_for_the_next_change(file: Path) -> None:
    """Taking settings over may take long: it is not repeated every second."""
    service = Service()
    service.refusal = "There is no such template."
    attempts = 0

    async def apply_settings(settings: Settings, reload: bool) -> None:
        nonlocal attempts
        attempts += 1
        await Service.apply_settings(service, settings, reload)

    service.apply_settings = apply_settings  # type: ignore[method-assign]
    async with reloading(file, service) as (_, logs, watch):
        write(file, "api: {default_max_tokens: 9}")
        await until(lambda: logs)
        seen = watch.looks
        await until(lambda: watch.looks > seen + 4)

    assert (1, 1) == (attempts, len(logs))


async def test_refused_settings_leave_the_keys_and_restrictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in force come back also where the file that they were in has gone meanwhile."""
    files = [tmp_path / name for name in ("old", "new")]
    for one in files:
        one.write_text(f"keys: [{{name: a, key: {one.name}}}]")
    restricted = RestrictedApi(apis=("metrics",), header="x", value="y")
    new = Settings(access=AccessSettings(api_keys_file=files[1], openai_restricted_api=(restricted,)))
    app = create_app(Settings(access=AccessSettings(api_keys_file=files[0])))

    async def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError("A template is wrong.")

    monkeypatch.setattr(Models, "apply_settings", refuse)
    files[0].unlink()
    with pytest.raises(ConfigurationError, match="A template is wrong"):
        await apply_settings(app, new, False)

    authorizer = app[AUTHORIZER]
    assert authorizer.keys.ring is not None
    assert [True, False] == [sha256(one.name) in authorizer.keys.ring for one in files]
    assert not authorizer.restrictions.groups
