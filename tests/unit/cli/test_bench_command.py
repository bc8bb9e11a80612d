"""The command `bench`: what it asks, counts and prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.chat_server import ChatServer, chat_server, event, usage
from tests.clock import Clock
from triton_openai.cli import main
from triton_openai.cli.bench import progress_line
from triton_openai.load import streams
from triton_openai.load.tally import Outcome, Plan


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A service that the environment names; a stream goes on at once after a failure."""
    monkeypatch.setattr(streams, "PAUSE_SECONDS", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server() as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        yield running


def test_a_table(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the rates, and the spread of each time."""
    assert 0 == main(["bench", "--requests", "6", "--streams", "2"])

    printed = capsys.readouterr()
    assert "" == printed.err
    assert f"m at {server.url}: 6 answers of up to 128 tokens, 2 at a time, in " in printed.out
    assert ", 12 tokens\n" in printed.out
    words = [line.split() for line in printed.out.splitlines()[4:]]
    assert ["MILLISECONDS", "MEAN", "P50", "P90", "P99", "MAX"] == words[0]
    names = [" ".join(line[:2]) for line in words[1:]]
    # The network may bring both tokens of an answer at once.
    assert ["first token", "whole answer"] == [name for name in names if name != "between tokens"]
    assert 6 == len(server.asked)


def test_json(server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the same. Tokens that came together count by the usage of the service, and prompts differ."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    server.answer = (event(reasoning="a b c"), event(content="d"), usage(4))
    assert 0 == main(["bench", "--requests", "4", "--max-tokens", "7", "--ignore-eos", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert (4, 0, 16, 4, 7) == tuple(report[name] for name in ("answers", "failed", "tokens", "streams", "max_tokens"))
    assert {"mean", "p50", "p90", "p99", "max"} == set(report["first_token"])
    assert 4 == len({body["messages"][0]["content"] for body in server.asked})
    body = server.asked[0]
    assert (True, True, 7, {"include_usage": True}) == (
        body["stream"], body["ignore_eos"], body["max_tokens"], body["stream_options"],
    )  # fmt: skip
    assert "Bearer sk-1" == server.sent[0]["Authorization"]


def test_prompts_of_a_file(server: ChatServer, tmp_path: Path) -> None:
    """The lines of a file are asked in turn, as completions where that is asked for."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    server.answer = (b'data: {"choices": [{"text": "a"}]}\n\n', usage(1))
    assert 0 == main(["bench", "--requests", "3", "--streams", "1", "--prompts", str(file), "--completions"])

    assert ["one", "two", "one"] == [body["prompt"] for body in server.asked]


def test_requests_that_fail(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an answer there is nothing to show; the first error is."""
    server.status = 429
    server.answer = [b'{"error": {"message": "Slow down."}}']
    assert 1 == main(["bench", "--requests", "3"])

    printed = capsys.readouterr()
    assert "" == printed.out
    assert "triton-openai: No request succeeded. The first failed: refused: HTTP 429: Slow down.\n" == printed.err


def test_a_window_of_time(server: ChatServer, capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """A number of seconds takes the place of a number of requests."""
    # Each request takes half of it, so that at least one lies in it.
    server.on_request = lambda: clock.advance(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton_openai.cli.bench._WARM_SECONDS", 0.0)
        assert 0 == main(["bench", "--seconds", "10", "--streams", "1", "--prompt", "x", "--json"])

    assert {"x"} == {body["messages"][0]["content"] for body in server.asked}
    assert json.loads(capsys.readouterr().out)["tokens"] > 0


@every_case(
    "arguments, message",
    [
        (["--requests", "1", "--seconds", "1"], "--requests and --seconds exclude each other"),
        (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts exclude each other"),
        (["--prompts", "/nowhere"], "--prompts: /nowhere cannot be read: No such file or directory."),
        (["--prompts", "/dev/null"], "--prompts: /dev/null has no line with a prompt."),
        (["--streams", "0"], "Argument --streams: '0' is not accepted: expected a whole number above 0."),
        (["--seconds", "nan"], "Argument --seconds: 'nan' is not accepted: expected a number."),
        (["--timeout", "-1"], "Argument --timeout: '-1' is not accepted: expected a number above 0."),
        (["--stream", "1"], "--stream is not an option of `triton-openai bench`. Did you mean --streams?"),
        (["x"], "`triton-openai bench` takes options only, and 'x' is none: leave it out."),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one sentence, before anything is sent."""
    assert 2 == main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_progress() -> None:
    """A bar shows how much is done, of requests or of seconds."""
    outcome = Outcome(answers=1, tokens=20, errors=["x"])

    assert "[############............] 2 of 4 requests, 20 tokens, 1 failed" == progress_line(
        Plan(streams=1, answers=4), outcome, 3.0
    )
    assert "[########................] 1 of 3 s, 20 tokens, 1 failed" == progress_line(
        Plan(streams=1, seconds=2.0, warm=1.0), outcome, 1.0
    )
