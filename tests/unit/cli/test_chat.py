"""The command `chat`: one question, what is piped in, and a conversation in a terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.chat_server import ChatServer, chat_server, event, usage
from triton_openai.cli import main
from triton_openai.cli.endpoint import endpoint_of
from triton_openai.errors import ConfigurationError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ChatServer]:
    """A service that the environment names."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server() as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        yield running


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> str:
    """Return what a terminal shows when a user types *lines* into a chat; an exception stands for its keys."""
    terminal = _Terminal()
    rest = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("builtins.input", read)
    assert 0 == main(["chat", "--no-history"])
    return terminal.getvalue()


def test_one_question(server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone is on standard output; the key goes along, and the first model is asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    options = ["--system", "Be short.", "--max-tokens", "5", "--temperature", "0.5"]
    assert 0 == main(["chat", *options, "Who", "are", "you?"])

    assert ("Hello!\n", "") == capsys.readouterr()
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who are you?"}]
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 5, "temperature": 0.5}
    assert [body] == server.asked
    assert "Bearer sk-1" == server.sent[0]["Authorization"]


def test_an_answer_that_a_limit_ends(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard error says so, and standard output has the answer alone."""
    end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "%s"}]}\n\n'
    for reason, is_said in ((b"length", True), (b"stop", False)):
        server.answer = (event(content="Once upon"), end % reason, usage(2))
        assert 0 == main(["chat", "--max-tokens", "2", "Tell me a story."])
        printed = capsys.readouterr()
        assert "Once upon\n" == printed.out
        assert is_said == ("The answer is incomplete: it has reached --max-tokens" in printed.err)


def test_a_piped_question(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard input is the question where it is no terminal; thinking is not part of what is piped on."""
    server.answer = (event(reasoning_content="hm"), event(content="a\x1b[31mb"), usage(2))
    monkeypatch.setattr("sys.stdin", io.StringIO("What?\n"))
    assert 0 == main(["chat", "--model", "other"])

    assert "a\x1b[31mb\n" == capsys.readouterr().out
    assert ("other", "What?") == (server.asked[0]["model"], server.asked[0]["messages"][0]["content"])
    assert "Authorization" not in server.sent[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert 2 == main(["chat"])
    assert "there is nothing to ask" in capsys.readouterr().err


def test_thinking_is_dim(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows thinking dim; nothing that a model writes controls the terminal."""
    server.answer = (event(reasoning_content="h\x1b[5mm"), event(content="a\x1b]0;x\x07b"), usage(2))
    shown = typed(monkeypatch, "hi")

    assert "\033[2mh\ufffd[5mm\033[0m\n\na\ufffd]0;x\ufffdb\n" in shown


def test_a_conversation(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes along with each question, until it is forgotten; commands change what is asked."""
    shown = typed(
        monkeypatch, "one", "/system Be kind.", "two", "/retry", "/new", "/model x", "/system", "/etc/passwd?", "/nope"
    )

    answer = {"role": "assistant", "content": "Hello!"}
    one = {"role": "user", "content": "one"}
    two = {"role": "user", "content": "two"}
    system = {"role": "system", "content": "Be kind."}
    assert [
        ("m", [one]),
        ("m", [system, one, answer, two]),
        ("m", [system, one, answer, two]),
        ("x", [{"role": "user", "content": "/etc/passwd?"}]),
    ] == [(body["model"], body["messages"]) for body in server.asked]
    assert 1 == shown.count("There is no command /nope.")


def test_what_a_user_may_do(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and empty lines end nothing, lines are joined by backslashes, and `/exit` ends."""
    typed(monkeypatch, KeyboardInterrupt, "", "/retry", "a\\", "b", "/exit", "never")

    assert ["a\nb"] == [body["messages"][0]["content"] for body in server.asked]


def test_an_answer_that_fails(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes on after an error; what there was of the answer stays a part of it."""
    server.answer = (event(content="Hel"), b'data: {"error": {"message": "The model has ended."}}\n\n')
    shown = typed(monkeypatch, "one", "two")

    assert 2 == shown.count("The answer failed: The model has ended.")
    assert [{"role": "assistant", "content": "Hel"}] == server.asked[1]["messages"][1:2]


@every_case(
    "status, answer, message",
    [
        (401, b'{"error": {"message": "No key."}}', "answers with HTTP 401: No key. Set OPENAI_API_KEY to a key"),
        (404, b'{"detail": "Not Found"}', "answers with HTTP 404: Not Found."),
        (500, b"<h1>Oh</h1>", "answers with HTTP 500: <h1>Oh</h1>."),
        (502, b"", "answers with HTTP 502: no reason."),
    ],
)
def test_a_service_that_refuses(status: int, answer: bytes, message: str) -> None:
    """Its reason is one sentence on stderr, with what to do about it; the exit status is 1."""
    with chat_server() as server, pytest.MonkeyPatch.context() as patch:
        err = io.StringIO()
        patch.setattr("sys.stderr", err)
        server.status = status
        server.answer = [answer] * bool(answer)
        assert 1 == main(["chat", "--url", server.url, "hi"])
    assert message in err.getvalue()


def test_what_is_no_chat(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer in one piece, a body that is no list of models, and no server: each has an error of its own."""
    server.headers = {"Content-Type": "application/json"}
    server.answer = [b'{"error": "busy"}']
    assert 1 == main(["chat", "hi"])
    assert "it is no stream but: busy" in capsys.readouterr().err
    server.models = {"models": []}
    assert 1 == main(["chat", "hi"])
    assert "is no list of models" in capsys.readouterr().err
    server.models = {"data": []}
    assert 1 == main(["chat", "hi"])
    assert "lists no model that generates text. Name one with --model." in capsys.readouterr().err
    assert 1 == main(["chat", "--url", "http://127.0.0.1:1", "hi"])
    assert "cannot be asked: Connection refused." in capsys.readouterr().err


def test_models_that_write_no_text(server: ChatServer) -> None:
    """Where a service says what its models write, one that writes text is asked."""
    server.models = {"data": [{"id": "vectors"}, {"id": "writes", "architecture": {"output_modalities": ["text"]}}]}
    assert 0 == main(["chat", "hi"])

    assert "writes" == server.asked[0]["model"]


URLS = {
    "http://a:1": "http://a:1/v1",
    "a:1": "http://a:1/v1",
    "https://a/v1/": "https://a/v1",
    "https://a/openai/v1/chat/completions": "https://a/openai/v1",
    "http://[::1]:9000": "http://[::1]:9000/v1",
}


@every_case("written", URLS)
def test_urls(written: str) -> None:
    """URLs are taken as people copy them."""
    assert URLS[written] == endpoint_of(written, {}).url
    assert URLS[written] == endpoint_of(None, {"OPENAI_BASE_URL": written}).url


@every_case("written", ["ftp://a", "http://", "http://a:x", "http://a:0", "http://a?b=c", "http://me:secret@a/v1"])
def test_wrong_urls(written: str) -> None:
    """What is no URL of a service is refused, without its password."""
    with pytest.raises(ConfigurationError) as caught:
        endpoint_of(written, {})
    assert caught.value.message.startswith("--url")
    assert "secret" not in caught.value.message


def test_a_real_terminal(server: ChatServer, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and not the chat; what was typed is kept in a file that only its user can read."""
    server.answer = (event(content="begun"),)
    server.hangs = True
    own, other = pty.openpty()
    environ = {**os.environ, "TERM": "dumb", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "triton_openai", "chat"], stdin=other, stdout=other, stderr=other, env=environ
    )
    os.close(other)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(own, 4096)
        shown = shown.partition(text)[2]

    try:
        until(b"Ctrl-D ends.")
        until(b"> ")
        os.write(own, b"hello\n")
        until(b"begun")
        process.send_signal(signal.SIGINT)
        until(b"Stopped.")
        until(b"> ")
        os.write(own, b"/exit\n")
        assert 0 == process.wait(120)
    finally:
        process.kill()
        process.wait()
        os.close(own)
    history = tmp_path / "triton-openai" / "chat_history"
    assert ["hello", "/exit"] == history.read_text().splitlines()
    assert 0o600 == history.stat().st_mode & 0o777
