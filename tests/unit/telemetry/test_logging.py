"""Log lines: readable or JSON, on stderr, without what belongs to clients."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from triton_openai.config.tree import ServerSettings
from triton_openai.telemetry.logging import LOG_FIELDS, configure_logging


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    printed = capsys.readouterr()
    assert printed.out == ""
    return [json.loads(line) for line in printed.err.splitlines()]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Our lines and those of libraries are JSON objects, with what is bound to the request unless they say else."""
    configure_logging(ServerSettings(log_format="json"))
    token = LOG_FIELDS.set({"request_id": "r1"})
    try:
        structlog.get_logger("ours").info("done", tokens_per_second=3)
        structlog.get_logger("ours").info("done", request_id="r2")
        logging.getLogger("theirs").warning("careful %s", "now")
    finally:
        LOG_FIELDS.reset(token)

    ours, of_another, theirs = _lines(capsys)
    assert "r2" == of_another["request_id"]
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
    structlog.get_logger("a plug-in's").bind(part="adapter").critical("yes", of="m")

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
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("ours").exception("failed", prompt=secret, messages=[secret])

    printed = capsys.readouterr().err
    assert "broken" in printed
    assert "<redacted>" in printed
    assert "the client" not in printed.replace('secret = "what the client wrote"', "")


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads the event first and its fields after it, without colours in a file."""
    configure_logging(ServerSettings())
    structlog.get_logger("ours").info("model is served", model="ensemble")

    assert "model is served" in (printed := capsys.readouterr().err)
    assert "model=ensemble" in printed
    assert printed.endswith("\n")
    assert "\x1b" not in printed


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_whatever_stands_in_a_line_is_one_line(log_format, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be sent or would end the line is written in another way."""
    configure_logging(ServerSettings(log_format=log_format))
    structlog.get_logger("ours").info("done", name="a\ud800\nb", path=Path("/x y"), none=None)

    (line,) = capsys.readouterr().err.splitlines()
    assert "a\\ud800\\nb" in line
    assert "/x y" in line
