"""Log lines: readable or JSON, on stderr, without what belongs to clients."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Literal

import pytest
import structlog
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from triton_openai.cli.terminal import shows_colours
from triton_openai.config.tree import ServerSettings
from triton_openai.errors import UpstreamError
from triton_openai.telemetry.logging import LOG_FIELDS, configure_logging, timestamp, warn
from triton_openai.telemetry.streams import drain


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    drain()
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in _printed(capsys).splitlines()]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Our lines and those of libraries are JSON objects, with what is bound to the request unless they say else."""
    for _ in range(2):
        configure_logging(ServerSettings(log_format="json"))
    token = LOG_FIELDS.set({"request_id": "r1"})
    try:
        structlog.get_logger("ours").info("done", tokens_per_second=3)
        structlog.get_logger("ours").info("done", request_id="r2", path=Path("/x"))
        logging.getLogger("theirs").warning("careful %s", "now", extra={"size": 1})
        with structlog.testing.capture_logs() as captured:
            structlog.get_logger("ours").info("captured")
    finally:
        LOG_FIELDS.reset(token)

    ours, of_another, theirs = _lines(capsys)
    assert ["captured"] == [line["event"] for line in captured]
    assert ("r2", "/x") == (of_another["request_id"], of_another["path"])
    assert {"event", "level", "logger", "request_id", "size", "timestamp"} == set(theirs)
    assert ("done", "ours", "info", 3, "r1") == tuple(
        ours[name] for name in ("event", "logger", "level", "tokens_per_second", "request_id")
    )
    assert ("careful now", "theirs", "warning") == tuple(theirs[name] for name in ("event", "logger", "level"))


def test_workers_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of a worker has its number, unless it is about another one."""
    configure_logging(ServerSettings(log_format="json"), worker=3)
    structlog.get_logger("ours").info("done")
    logging.getLogger("theirs").warning("careful")
    structlog.get_logger("ours").info("gone", worker=1)

    assert [3, 3, 1] == [line["worker"] for line in _lines(capsys)]


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    """Less severe lines are left out, whoever writes them."""
    configure_logging(ServerSettings(log_format="json", log_level="error"))
    structlog.get_logger("ours").info("no")
    logging.getLogger("theirs").warning("no")
    structlog.get_logger("ours").error("yes")
    structlog.get_logger("a plug-in's").bind(part="adapter").bind(of="n").critical("yes", of="m")

    lines = _lines(capsys)
    assert [("yes", None, None), ("yes", "adapter", "m")] == [
        (line["event"], line.get("part"), line.get("of")) for line in lines
    ]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_client_text_is_redacted(log_format, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither fields that hold a prompt, nor the variables of a traceback, reach the log."""
    configure_logging(ServerSettings(log_format=log_format))
    secret = "what the client wrote"
    try:
        raise ValueError("broken\ud800")
    except ValueError:
        structlog.get_logger("ours").exception("failed", prompt=secret, messages=[secret])

    printed = _printed(capsys)
    assert "broken\\ud800" in printed
    assert "<redacted>" in printed
    assert re.search(r'"error"|\[error ', printed)
    assert "the client" not in printed.replace('secret = "what the client wrote"', "")


def test_console(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A person reads the event first and its fields after it, at once, and without colours in a file."""
    plain = "2023-11-14T22:13:20.012345Z [info     ] it runs [ours] model=a of='x y' n=1\n"
    wanted = {"TERM": "xterm", "NO_COLOR": ""}
    cases: list[tuple[bool, Literal["console", "json"], dict[str, str], str]] = [
        (False, "console", wanted, plain),
        (True, "console", wanted, "\x1b[1mit runs\x1b[0m [\x1b[0m\x1b[1m\x1b[34mours\x1b[0m]"),
        (True, "console", {**wanted, "NO_COLOR": "1"}, plain),
        (True, "console", {**wanted, "TERM": "dumb"}, plain),
        (True, "json", wanted, '{"model":"a","of":"x y","n":1,"detail":null,"event":"it runs"'),
    ]
    for terminal, log_format, environ, expected in cases:
        with (tmp_path / "log").open("w") as output, monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda: 1_700_000_000_012_345_678)
            patch.setattr(output, "isatty", lambda terminal=terminal: terminal, raising=False)
            patch.setattr("sys.stderr", output)
            for name, value in environ.items():
                patch.setenv(name, value)
            configure_logging(ServerSettings(log_format=log_format), colours=shows_colours(output))
            structlog.get_logger("ours").info("it runs", model="a", of="x y", n=1, detail=None)
            structlog.get_logger("ours").info("\ud800")
            drain()
            printed = (tmp_path / "log").read_text()
        assert expected in printed
        assert "\\ud800" in printed
        assert "None" not in printed
        assert ("\x1b" in printed) == ("\x1b" in expected)


def test_the_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a line is in UTC, to the microsecond."""
    for nanoseconds, expected in (
        (1_700_000_000_999_999_999, "2023-11-14T22:13:20.999999Z"),
        (1_700_000_001_000_001_999, "2023-11-14T22:13:21.000001Z"),
    ):
        monkeypatch.setattr("time.time_ns", lambda now=nanoseconds: now)
        assert expected == timestamp()


def test_what_a_backend_says(capsys: pytest.CaptureFixture[str]) -> None:
    """An error is a warning in one line; its traceback follows for those who debug."""
    configure_logging(ServerSettings(log_format="json", log_level="debug"))
    log = structlog.get_logger("ours")
    for detail in ("Traceback (most recent call last):\n  File x\nValueError: no\n", None):
        warn(log, "failed", UpstreamError("It failed.", detail=detail), model="m")

    lines = _lines(capsys)
    assert [("warning", "ValueError: no"), ("debug", None), ("warning", "It failed.")] == [
        (line["level"], line.get("reason")) for line in lines
    ]
    assert [False, True, False] == ["File x" in str(line.get("trace")) for line in lines]
    assert {("failed", "m")} == {(line["event"], line["model"]) for line in lines}


def test_lines_of_libraries_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """What clients send that is not HTTP, or not for tracing, makes no lines; a failure does."""
    configure_logging(ServerSettings(log_format="json"))
    server = logging.getLogger("aiohttp.server")
    for error in (BadHttpMessage("x"), web.RequestPayloadError("x"), ValueError("x"), None):
        server.error("failed", exc_info=error)
    for name in ("span", "propagation.tracecontext"):
        logging.getLogger(f"opentelemetry.trace.{name}").warning("x")

    assert [("failed", True), ("failed", False)] == [(line["event"], "exception" in line) for line in _lines(capsys)]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_whatever_stands_in_a_line_is_one_line(log_format, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be sent or would end the line is written in another way."""
    configure_logging(ServerSettings(log_format=log_format))
    structlog.get_logger("ours").info("done", name="a\ud800\nb", path=Path("/x y"), none=None)

    (line,) = _printed(capsys).splitlines()
    assert "a\\ud800\\nb" in line
    assert "/x y" in line
