"""The commands `check` and `collect-env`: what settings have, and what a report of a fault has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import every_case
from triton_openai.cli import main
from triton_openai.cli.collect_env import changed_settings
from triton_openai.config.sources import load_settings

_KEYS = "keys:\n- {name: alice, key: sk-secret-1}\n- {name: bob, key: sk-secret-2}\n"


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def results(printed: str) -> dict[str, tuple[str, str]]:
    """Return the result and the details of each check that is *printed*."""
    rows = {}
    for line in printed.splitlines()[1:]:
        for result in ("ok", "wrong"):
            subject, found, details = line.partition(f"  {result}  ")
            if found:
                rows[subject.strip()] = result, details.strip()
    return rows


def test_settings_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part of the settings has a line; without Triton, and without a warning, the status is 0."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(_KEYS)
    keys.chmod(0o600)
    file = tmp_path / "settings.yaml"
    file.write_text(f"access: {{api_keys_file: {keys}}}\nmodels: {{m: {{adapter: text}}}}\n")
    assert 0 == main(["check", "--config", str(file), "--triton-url", "http://triton:8000", "--strict"])

    printed = capsys.readouterr()
    assert "" == printed.err
    assert {
        "settings": ("ok", str(file)),
        "models": ("ok", "1 model has settings"),
        "API keys": ("ok", "2 keys"),
        "TLS": ("ok", "off"),
        "Triton": ("ok", "http://triton:8000"),
        "service": ("ok", "could start"),
    } == results(printed.out)


WRONG = {
    "adapter": (["--adapter", "nope"], "models", "nope"),
    "template": (["--chat-template", "/nowhere.jinja"], "models", "/nowhere.jinja"),
    "tokenizer": (["--tokenizer", "/nowhere"], "models", "/nowhere"),
    "tool parser": (["--tool-call-parser", "nope"], "models", "nope"),
    "keys": (["--api-keys-file", "/nowhere.yaml"], "API keys", "/nowhere.yaml"),
    "same keys": (["--api-key", "a:k,b:k"], "API keys", "the same key"),
    "certificate": (["--tls-certificate", "/nowhere.pem"], "TLS", "/nowhere.pem"),
    "key without certificate": (["--tls-key", "/nowhere.pem"], "TLS", "needs --tls-certificate"),
    "repository": (["--model-repository", "/nowhere"], "Triton", "/nowhere"),
    "companion": (["--triton-repository", "/nowhere"], "Triton", "/nowhere"),
    "authority": (["--triton-ca", "/nowhere.pem"], "Triton", "/nowhere.pem"),
    "token": (["--triton-token-file", "/nowhere"], "Triton", "/nowhere"),
    "header": (["--triton-header", "nonsense"], "Triton", "write NAME:VALUE"),
    "store": (["--responses-store", "nope://x"], "service", "nope"),
}


@every_case("name", WRONG)
def test_settings_that_do_not_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What would end the start of the service is named, with status 2."""
    arguments, subject, reason = WRONG[name]
    assert 2 == main(["check", *arguments])
    printed = capsys.readouterr().out
    assert ("wrong", "see below") == results(printed)[subject]
    assert reason in printed.rpartition(f"{subject}: ")[2]


def test_everything_that_is_wrong_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One mistake does not hide another."""
    assert 2 == main(["check", "--adapter", "nope", "--api-keys-file", "/nowhere", "--tls-key", "/nowhere"])

    found = results(capsys.readouterr().out)
    assert ["models", "API keys", "TLS"] == [subject for subject, (result, _) in found.items() if result == "wrong"]


def test_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no setting at all is one sentence, as for every command."""
    assert 2 == main(["check", "--port", "x"])

    assert ("", "triton-openai: --port: 'x' is not accepted: expected a whole number.\n") == capsys.readouterr()


def test_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an operator may have overlooked is a warning: the status is 0, and 1 if the check is strict."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(_KEYS)
    keys.chmod(0o644)
    file = tmp_path / "settings.yaml"
    file.write_text("server: {log_content: 10}")
    arguments = ["check", "--host", "0.0.0.0", "--config", str(file)]
    assert (0, 1) == (main(arguments), main([*arguments, "--strict"]))
    err = capsys.readouterr().err
    assert "asks for no API key: everybody who reaches it may use it." in err
    assert "Prompts and answers are logged" in err
    assert 1 == main(["check", "--api-keys-file", str(keys), "--strict"])
    err = capsys.readouterr().err
    assert f"Every user of this machine can read the file of API keys: chmod o-rwx {keys}" in err
    assert "asks for no API key" not in err


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A report has versions and settings, and no secret of a file, a flag or a variable."""
    file = tmp_path / "settings.yaml"
    file.write_text("triton_access: {headers: ['x-tenant:topsecret']}\nserver: {port: 9}\n")
    monkeypatch.setenv("TRITON_OPENAI_API_KEY", "alice:topsecret")
    monkeypatch.setenv("OPENAI_API_KEY", "topsecret")
    store = "postgresql://me:topsecret@db/x?password=topsecret"
    assert 0 == main(["collect-env", "--config", str(file), "--responses-store", store])

    printed, err = capsys.readouterr()
    assert "" == err
    assert "topsecret" not in printed
    masked = "postgresql://<redacted>@db/x?<redacted>"
    for line in ("- server.port: 9", "- access.api_key: <redacted>", f"- responses.store: {masked}", "- aiohttp: 3"):
        assert f"\n{line}" in printed
    assert "OPENAI_API_KEY, " in printed


def test_a_report_of_settings_that_do_not_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that are refused are a part of the report."""
    assert 0 == main(["collect-env", "--port", "x"])

    assert "They are not accepted: --port: 'x' is not accepted" in capsys.readouterr().out


SECRETS = """
access:
  api_key: ["alice:topsecret"]
  openai_restricted_api: [{apis: [metrics], header: x-a, value: topsecret}]
  limits_store: "redis://:topsecret@redis:6379"
triton_access: {headers: ["authorization:topsecret"], token_file: /run/token}
triton:
  endpoints: [{url: ["http://me:topsecret@triton:8000"], access: {headers: ["a:topsecret"]}}]
responses: {store: "postgresql://db/x?password=topsecret"}
batches: {store: "postgresql://me:topsecret@db/x"}
traces: {otlp_endpoint: "http://me:topsecret@collector:4317"}
tls: {key: /etc/key.pem}
models: {m: {aliases: [n], tokenizer: org/name}}
"""


def test_secrets_of_every_kind(tmp_path: Path) -> None:
    """Keys, headers and passwords in URLs are masked wherever they stand; what is none stays."""
    file = tmp_path / "settings.yaml"
    file.write_text(SECRETS.replace("me:topsecret@triton", "triton").replace("me:topsecret@collector", "collector"))
    shown = changed_settings(load_settings({"config": str(file)}, {}))

    assert "topsecret" not in str(shown)
    assert ("/run/token", "/etc/key.pem", "n", "org/name") == (
        shown["triton_access.token_file"], shown["tls.key"], shown["models.m.aliases"], shown["models.m.tokenizer"],
    )  # fmt: skip
    assert "http://triton:8000" in shown["triton.endpoints"]
