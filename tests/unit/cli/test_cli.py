"""The command line: flags come from the settings, and mistakes end with one sentence and status 2."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import triton_openai
from tests.cases import every_case
from tests.documents import ROOT
from triton_openai.cli import main
from triton_openai.cli.arguments import Parsed, parse
from triton_openai.cli.demo import _headers, _with_own_key, demo
from triton_openai.cli.inspect import ModelReport, render
from triton_openai.cli.terminal import problems, table
from triton_openai.config.options import options
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings, RestrictedApi, ServerSettings, Settings
from triton_openai.errors import ConfigurationError


def test_values_stay_as_they_were_written() -> None:
    """The parser collects text; only what was given is there, so that it can win over other sources."""
    parsed = parse(["serve", "--config=f", "--port=1", "--triton-url", "a", "--triton-url=b", "--no-vllm-metrics"])

    assert "serve" == parsed.command
    assert {"config": "f", "port": "1", "triton-url": ["a", "b"], "vllm-metrics": False} == parsed.settings


def test_flags_of_serve() -> None:
    """A setting has a flag, or is in the YAML file only: then its flag is an error that names the key there."""
    for option in options():
        value = [] if option.is_switch else ["m=x"] * max(1, len(option.fields))
        arguments = ["serve", option.flag, *value]
        if not option.file_only:
            assert option.name in parse(arguments).settings
            continue
        for flag in (option.flag, f"--no-{option.name}") if option.is_switch else (option.flag, f"{option.flag}=1"):
            with pytest.raises(ConfigurationError) as caught:
                parse(["serve", flag, *value])
            assert f"{flag.partition('=')[0]} is not accepted: set {option.key} " in caught.value.message


def printed_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what *arguments* print on a terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert 0 == caught.value.code
    return capsys.readouterr().out


def test_help_fits_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Help fits one screen: it shows the common flags in a sentence or two lines; every flag is in --help-all."""
    short = printed_by(monkeypatch, capsys, "serve", "--help")
    full = printed_by(monkeypatch, capsys, "serve", "--help-all")

    assert len(short.splitlines()) <= 45
    printed = (set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (short, full))
    shown = [flags - {"--help-all", "--config"} for flags in printed]
    assert {option.flag for option in options() if option.common} == shown[0]
    assert {option.flag for option in options() if not option.file_only} == shown[1]
    for option in options():
        assert not option.file_only or option.key in full
    assert len(shown[1]) <= 58


def test_the_reference_has_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/reference/commands.md has those that `--help` lists."""
    listed = re.findall(r"^    ([a-z-]+)(?:$|  )", printed_by(monkeypatch, capsys, "--help"), re.MULTILINE)
    text = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| \[?`([a-z][a-z-]*)`", text, re.MULTILINE)

    assert len(listed) > 8
    assert set(listed) == set(described)


@pytest.mark.parametrize("command", ["serve", "demo", "inspect"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help is grouped and shows defaults."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])

    printed = capsys.readouterr().out
    assert 0 == caught.value.code
    assert "models:" in printed
    assert "--log-format" in printed
    assert "(default: console)" in " ".join(printed.split())


# Flags of tritonserver, trtllm-serve, SGLang and others that mean something else than any of ours, or nothing here.
UNRELATED = """
    allow-http backend-config cache-config cert config-format context-length convert cors enable-metrics ep-size
    exit-on-error grpc-address grpc-port http-port http-thread-count kv-cache-free-gpu-memory-fraction log-verbose
    max-batch-size max-concurrent-requests max-log-len max-seq-len max-tokens mem-fraction-static metrics-port
    middleware model-name model-path rate-limit response-role strict-readiness temperature timeout tp-size trace-config
    uds
"""


@every_case("name", UNRELATED.split())
def test_no_suggestion_misleads(name: str) -> None:
    """A flag of another server, or such a variable, is not taken for one of ours that looks a little like it."""
    with pytest.raises(ConfigurationError) as caught:
        parse(["serve", f"--{name}", "1"])
    assert f"--{name} is not an option of `triton-openai serve`. See triton-openai serve --help" in caught.value.message
    with pytest.raises(ConfigurationError, match=r"is not a setting\.$"):
        load_settings({}, {f"TRITON_OPENAI_{name.replace('-', '_').upper()}": "1"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            [],
            "The command is missing. The commands are serve, demo, inspect, check, collect-env, chat, bench, batch,",
        ),
        (["--port", "1"], "The command is missing. To serve models, write it before the options: triton-openai serve"),
        (["--model-repository", "m"], "options: triton-openai serve --model-repository. The commands are serve, demo"),
        (["srve"], "There is no command 'srve'. Did you mean serve?"),
        (["serve", "--prt", "1"], "--prt is not an option of `triton-openai serve`. Did you mean --port?"),
        (["serve", "--por", "1"], "--por is not an option of `triton-openai serve`. Did you mean --port?"),
        (["serve", "--tls-cert", "1"], "Did you mean --tls-certificate?"),
        (["serve", "--apikeys", "1"], "--apikeys is not an option of `triton-openai serve`. See triton-openai serve"),
        (["serve", "--toolcall-parser", "1"], "Did you mean --tool-call-parser?"),
        (
            ["serve", "extra"],
            "`triton-openai serve` takes options only, and 'extra' is none. The models are those that Triton has. To "
            "serve a model of the Hugging Face hub with vLLM in Triton, write it into a model repository: "
            "triton-openai model-repository vllm --model extra --to models; examples/vllm shows the rest.",
        ),
        (["serve", "--port"], "Argument --port: expected one argument."),
        (["demo", "--triton-url", "http://a"], "`triton-openai demo` has no --triton-url."),
        (["inspect", "--port", "1"], "`triton-openai inspect` has no --port."),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    """A mistake is one sentence that says what to write."""
    with pytest.raises(ConfigurationError) as caught:
        parse(arguments)

    assert message in caught.value.message


def test_exit_status_of_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line on stderr and status 2."""
    assert 2 == main(["serve", "--port", "x"])

    printed = capsys.readouterr()
    assert ("", "triton-openai: --port: 'x' is not accepted: expected a whole number.\n") == (printed.out, printed.err)


def test_who_asks_early_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP is for a service to read its settings again, and must not be the end of one that still starts."""
    monkeypatch.setattr("triton_openai.cli.serve.serve", lambda *_: signal.getsignal(signal.SIGHUP))
    before = signal.getsignal(signal.SIGHUP)
    try:
        assert signal.SIG_IGN == main(["serve"])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_python_m() -> None:
    """`python -m triton_openai` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "triton_openai", "--version"], capture_output=True, text=True, check=True, timeout=120
    )

    assert f"triton-openai {triton_openai.__version__}\n" == done.stdout


def test_the_demo_has_a_key_of_its_own_beside_a_file(tmp_path: Path) -> None:
    """The keys of a file are digests, maybe, and nobody's to use."""
    file = AccessSettings(api_keys_file=tmp_path / "keys.yaml")
    one, other = _with_own_key(file), _with_own_key(file)

    assert one.api_key != other.api_key
    assert one.api_key[0].endswith(_headers(one)["x-api-key"])
    for as_it_is in (AccessSettings(), AccessSettings(api_key=("a:b",), api_keys_file=tmp_path / "keys.yaml")):
        assert as_it_is == _with_own_key(as_it_is)


def test_the_demo_is_one_process() -> None:
    """Workers that a settings file asks for are refused, and not left out in silence."""
    with pytest.raises(ConfigurationError, match="one process"):
        demo(Settings(server=ServerSettings(workers=2)), {}, Parsed(command="demo", settings={}, once=True))


def test_the_demo_opens_its_own_door() -> None:
    """The demo's question carries a key, and what a restricted API asks for, where the settings close the service."""
    restricted = RestrictedApi(apis=("inference",), header="x-admin", value="v")
    other = RestrictedApi(apis=("metrics",), header="x-other", value="w")

    assert {} == _headers(AccessSettings())
    assert {"x-admin": "v", "x-api-key": "sk-1"} == _headers(
        AccessSettings(api_key=("alice:sk-1", "sk-2"), openai_restricted_api=(restricted, other))
    )


@pytest.mark.parametrize("encoding, stdout", [("utf-8", "/dev/full"), ("ascii", "/dev/null")])
def test_a_banner_that_cannot_be_printed_costs_nothing_but_itself(encoding: str, stdout: str) -> None:
    """A full disk behind stdout, or a name without letters there, is no reason not to serve; the exit status is 0."""
    program = (
        "from triton_openai.cli.banner import show; from triton_openai.config.tree import ServerSettings; "
        "from triton_openai.telemetry.logging import configure_logging; "
        "configure_logging(ServerSettings()); show('пример'); show('b')"
    )
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    with Path(stdout).open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, env=environ, stdout=out, stderr=subprocess.PIPE, text=True
        )

    assert (0, 1) == (done.returncode, done.stderr.count("what is served cannot be printed"))


@every_case("field", ["scores", "classes", "audio"])
def test_a_report(field: str) -> None:
    """What a model does that generates nothing is told with what that needs."""
    lines = render([ModelReport(name="m", adapter="a", tokenizer="t", **{field: "three"})]).splitlines()  # type: ignore[arg-type]
    assert [f"  {field:<14} three", f"  {'tokenizer':<14} t"] == lines[-2:]


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are aligned, empty ones left out; a terminal gets colours, unless somebody asks for none."""
    rows = [["m", "", "yes"], ["long", "", "no"]]
    plain = ["  MODEL  CHAT", "  m      yes", "  long   no"]
    assert plain == table(["MODEL", "NOTHING", "CHAT"], rows)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = table(["MODEL", "NOTHING", "CHAT"], rows)
    assert "\033[32myes \033[0m" in coloured[1]
    assert plain == [re.sub(r"\033\[\d+m", "", line).rstrip() for line in coloured]
    assert ["", "\033[31m  wrong\033[0m"] == problems(["wrong"])
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert plain == table(["MODEL", "NOTHING", "CHAT"], rows)
    # A closed one.
    monkeypatch.setattr("sys.stdout", None)
    assert plain == table(["MODEL", "NOTHING", "CHAT"], rows)
    assert [] == problems([])
