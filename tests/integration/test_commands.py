"""The commands as processes: what they print, how they end, and the Triton that they start."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient

from tests.clients.service import serving, until
from tests.ports import free_ports
from tests.programs import needs
from triton_openai.cli import main
from triton_openai.cli.banner import Banner, render_banner
from triton_openai.demo.repository import build_repository

_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_OPENAI_")}


def _start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "triton_openai", *arguments],
        env={**_ENVIRONMENT, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def _run(*arguments: str) -> tuple[int, str, str]:
    with _start(*arguments) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def _inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run ``inspect`` in this process: as one of its own, half of the time would be that of imports."""
    return main(["inspect", *arguments]), *capsys.readouterr()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_banner_for_machines(triton, tmp_path: Path) -> None:
    """One JSON line names every model with its adapter, its aliases and where all of it is; SIGINT ends it cleanly."""
    urls = f"{triton.http_url},{triton.grpc_url}"
    arguments = ("--log-level", "error", "--alias", "gpt-4o=ensemble")
    with serving(tmp_path, *arguments, fork=False, TRITON_OPENAI_TRITON_URL=urls) as service:
        banner = service.banner
        models = {model["name"]: model for model in banner["models"]}
        assert service.status("/health/ready") == 200
        service.process.send_signal(signal.SIGINT)
        out, _ = service.process.communicate(timeout=120)
        assert ("", [], 0) == (out, service.log_lines(), service.process.returncode)

    assert ("serving", True, urls.split(",")) == (banner["event"], banner["triton_answers"], banner["triton"])
    assert {"level", "timestamp"} <= banner.keys()
    assert ("ready", ["gpt-4o"]) == (models["ensemble"]["state"], models["ensemble"]["aliases"])
    assert "gpt-4o" not in models
    assert f"{banner['address']}/v1" == banner["base_url"]


def test_banner_for_people(triton) -> None:
    """A person reads where it is, what is served, and what to tell a client, once; SIGTERM ends it cleanly."""
    with _start("serve", "--port", "0", "--log-level", "error", "--triton-url", triton.http_url) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "base_url" not in lines[-1]:
            lines.append(process.stdout.readline())
        process.terminate()
        out, err = process.communicate(timeout=120)
        assert ("", "", 0) == (out.strip(), err, process.returncode)

    text = "".join(lines)
    assert re.search(r"listens at http://127\.0\.0\.1:\d+\n", text)
    assert f"Triton at {triton.http_url}\n" in text
    assert re.search(r"^  ensemble +\S+ +generate +(yes|no) +ready$", text, re.MULTILINE)
    assert re.search(r'base_url="http://127\.0\.0\.1:\d+/v1"', text)


def test_a_triton_that_is_down_is_waited_for(tmp_path: Path) -> None:
    """Without a Triton the service starts, lives, and says that it is not ready."""
    with serving(tmp_path, "--triton-url", "http://127.0.0.1:9") as service:
        assert (False, []) == (service.banner["triton_answers"], service.banner["models"])
        assert service.status("/health/live") == 200
        assert service.status("/health/ready") == 503


def test_a_signal_ends_it_when_nobody_reads_the_log() -> None:
    """A signal ends the service when nobody reads the log, as in `serve 2>&1 | head`, which closes the pipe."""
    command = [sys.executable, "-m", "triton_openai", "serve", "--triton-url", "http://127.0.0.1:1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            assert any("For clients" in line or '"base_url"' in line for line in process.stdout)
            process.stdout.close()
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        finally:
            process.kill()


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is taken ends the command with one sentence and status 2."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        status = main(["serve", "--port", str(port)])

    message = f"triton-openai: Cannot listen on 127.0.0.1 port {port}: Address already in use. "
    assert (2, "", message + "Choose another with --port or --host.\n") == (status, *capsys.readouterr())


def test_a_repository_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Triton that cannot be started ends the service with the reason and status 2."""
    folder = tmp_path / "none"
    status = main(["serve", "--port", "0", "--log-level", "error", "--model-repository", str(folder)])

    err = capsys.readouterr().err
    assert (2, f"triton-openai: There is no model repository at {folder}.") == (status, err.splitlines()[-1])


def test_wrong_settings_end_a_triton_that_starts(tmp_path: Path) -> None:
    """A setting that turns out to be wrong while Triton starts ends both, with the reason and status 2."""
    arguments = ("--model-repository", str(tmp_path), "--tool-call-parser", "nonesuch")
    status, _, err = _run("serve", "--port", "0", "--log-level", "error", *arguments)

    assert 2 == status
    assert err.splitlines()[-1].startswith("triton-openai: There is no tool parser 'nonesuch'. Known names: ")


def test_the_hint_names_a_triton_that_starts_here() -> None:
    """Where no model can be served, the command that says why has the address of the Triton."""
    banner = Banner(
        address="http://127.0.0.1:9000",
        base_url="http://127.0.0.1:9000/v1",
        triton=("http://127.0.0.1:38017", "grpc://127.0.0.1:40967"),
        triton_answers=True,
        models=(),
    )
    assert "`triton-openai inspect --triton-url http://127.0.0.1:38017` says why." in render_banner(banner, "console")


def _tritons_of(pid: int) -> list[int]:
    """Return the processes called tritonserver below the process *pid*."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, name, rest = re.split(r" \(|\) ", stat.read_text(), maxsplit=2)
            parents[int(number)], names[int(number)] = int(rest.split()[1]), name

    def below(number: int) -> bool:
        return number == pid or (number in parents and below(parents[number]))

    return [number for number, name in names.items() if name.startswith("tritonserver") and below(number)]


def test_a_supervised_triton(tmp_path: Path) -> None:
    """A Triton that was started here and dies comes back, without its broken model, and goes when the service goes."""
    repository = build_repository(tmp_path / "repository", models=["text_embedding"])
    version = repository.path / "broken" / "1"
    version.mkdir(parents=True)
    held = tmp_path / "held"
    # While there is such a file, Triton does not become ready.
    code = f"import pathlib, time\nwhile pathlib.Path({str(held)!r}).exists():\n    time.sleep(0.02)\n"
    (version / "model.py").write_text(f"{code}raise RuntimeError('on purpose')")
    (version.parent / "config.pbtxt").write_text('name: "broken"\nbackend: "python"\n')
    for name, config in (("misspelt", 'bakend: "python"'), ("empty", 'backend: "python"')):
        (repository.path / name).mkdir()
        (repository.path / name / "config.pbtxt").write_text(config)
    settings = {"triton": {"refresh_interval": 0.2}}
    arguments = ("--log-level", "error", "--model-repository", str(repository.path))
    with serving(tmp_path, *arguments, settings=settings) as service:
        process = service.process
        states = {model["name"]: model["state"] for model in service.banner["models"]}
        broken = "not ready: Internal: RuntimeError: on purpose"
        assert {"text_embedding": "ready", "broken": broken, "misspelt": "not loaded"} == states
        assert service.status("/health/ready") == 200

        (first,) = _tritons_of(process.pid)
        held.touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: service.status("/health/ready") == 503)
        held.unlink()
        until(lambda: service.status("/health/ready") == 200)
        (second,) = _tritons_of(process.pid)

        process.terminate()
        assert process.wait(120) == 0
        assert first != second
        lines = map(json.loads, service.log_lines())
        told = [line for line in lines if line["event"] == "model could not be loaded"]
        reasons = {"broken": "on purpose", "misspelt": "failed to read text proto", "empty": "at least one version"}
        assert [] == [line for line in told if reasons.pop(line["model"]) not in line["reason"]]
        assert {} == reasons
        until(lambda: not Path(f"/proc/{second}").exists())


def test_models_at_run_time(tmp_path: Path) -> None:
    """A Triton started here has the models that are named, loads others when asked, and listens for its own clients."""
    repository = build_repository(tmp_path / "repository", models=["text_embedding", "text_rerank"])
    serve = ("--log-level", "error", "--model-repository", str(repository.path))
    control = ("--model-control-mode", "explicit", "--load-model", "text_embedding")
    ports = free_ports(2)
    listen = ("--enable-kserve-frontends", "--kserve-http-port", str(ports[0]), "--kserve-grpc-port", str(ports[1]))
    with serving(tmp_path, *serve, *control, *listen) as service:
        # The other one is there, and waits.
        states = {model["name"]: model["state"].partition(":")[0] for model in service.banner["models"]}
        assert {"text_embedding": "ready", "text_rerank": "not loaded"} == states
        assert "text_rerank" == service.send("POST", "/v1/models/text_rerank/load").json["id"]
        over_http, over_grpc = f"http://127.0.0.1:{ports[0]}", f"grpc://127.0.0.1:{ports[1]}"
        assert [over_http, over_grpc] == service.banner["triton"]
        assert _status(f"{over_http}/v2/models/text_rerank/ready") == 200
        with InferenceServerClient(over_grpc.removeprefix("grpc://")) as client:
            assert client.is_model_ready("text_rerank")
        service.process.send_signal(signal.SIGTERM)
        out, _ = service.process.communicate(timeout=120)

        assert (0, "", []) == (service.process.returncode, out, service.log_lines())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--load-model", "m"), "--load-model is for a Triton that is started here: it needs --model-repository."),
        (("--load-model", "m", "--model-repository", "."), "--load-model needs --model-control-mode explicit."),
        (
            ("--load-model", "m,*", "--model-repository", ".", "--model-control-mode", "explicit"),
            "--load-model: '*' stands for all models, and takes no other name beside it.",
        ),
    ],
)
def test_models_to_load_that_make_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be meant is said before anything starts."""
    assert 2 == main(["serve", "--port", "0", *arguments])
    assert ("", f"triton-openai: {message}\n") == capsys.readouterr()


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file or a folder that the operator names and that is not there ends the start with a sentence."""
    own = tmp_path / "settings.yaml"
    for arguments, settings in (
        (("--chat-template", "/nothing"), "{}"),
        (("--chat-template", "m=nothing.jinja"), "{}"),
        (("--tokenizer", "./nothing"), "{}"),
        (("--tokenizer", f"m={tmp_path}"), "{}"),
        (("--triton-repository", "/nothing"), "{}"),
        ((), "defaults: {chat_template: /nothing}"),
        ((), "models: {m: {chat_template: /nothing}}"),
        ((), "models: {m: {tokenizer: /nothing}}"),
        ((), "models: {m: {generation_config: /nothing}}"),
    ):
        own.write_text(settings)
        assert 2 == main(["serve", "--port", "0", "--config", str(own), *arguments])
        out, err = capsys.readouterr()
        assert ("", 1) == (out, err.count("\n"))
        assert re.match(r"triton-openai: .*(nothing|has no tokenizer\.json)", err)
        assert ("m=" in str(arguments) or "{m:" in settings) == err.startswith("triton-openai: m: ")


def test_templates_that_do_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chat template that the operator names ends the start if it is wrong, as one that is not there does."""
    template, own = tmp_path / "own.jinja", tmp_path / "settings.yaml"
    nested = "{% for a in b %}" * 30 + "{% endfor %}" * 30
    for source, problem in (
        ("{{ a }}\n{% if %}", "is wrong in line 2: Expected an expression"),
        ("{% for m in messages %}", "is wrong in line 1: Unexpected end of template"),
        ("{{ a|nothing }}", "is wrong in line 1: No filter named 'nothing'"),
        (nested, "cannot be compiled: SyntaxError"),
        ("{{" + "(" * 5000 + "}}", "is nested too deeply"),
    ):
        template.write_text(source)
        for arguments, settings in (
            (("--chat-template", str(template)), "{}"),
            (("--chat-template", f"m={template}"), "{}"),
            ((), f"defaults: {{chat_template: {template}}}"),
            ((), f"models: {{m: {{chat_template: {template}}}}}"),
        ):
            own.write_text(settings)
            assert 2 == main(["serve", "--port", "0", "--config", str(own), *arguments])
            out, err = capsys.readouterr()
            assert ("", 1) == (out, err.count("\n"))
            which = "m: " if "m=" in str(arguments) or "{m:" in settings else ""
            assert err.startswith(f"triton-openai: {which}The chat template 'own.jinja' {problem}")


# The next test sees the same answer, from a demo that goes on.
@pytest.mark.extended
def test_demo() -> None:
    """The demo builds its models, starts a Triton, asks its question over the API, prints the answer, and ends."""
    status, out, err = _run("demo", "--scripted", "--port", "0", "--once")

    assert (0, ["Starting Triton ..."]) == (status, err.splitlines())
    question, answer = re.findall(r"^[QA]: (.+)$", out, re.MULTILINE)
    assert question in answer
    assert "stand-in" in answer


@needs("curl")
def test_commands_of_a_demo_with_a_key() -> None:
    """What it prints to copy has the key, and works; its scripted models call tools without further flags."""
    restricted = ("--openai-restricted-api", "embedding", "x-more", "a b")
    process = _start("demo", "--scripted", "--port", "0", "--api-key", "me:o'key$x", *restricted)
    try:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: not line.startswith("Ctrl-C"), process.stdout))
        beginning = lines.index("Ask it yourself:\n")
        question, answer = re.findall(r"^[QA]: (.+)$", "".join(lines[:beginning]), re.MULTILINE)
        text = "".join(lines[beginning + 1 :])
        commands = [each.strip().replace("curl ", "curl -sS --fail -m 60 ", 1) for each in text.strip().split("\n\n")]
        answers = [subprocess.check_output(["sh", "-c", each], text=True) for each in commands]
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
        asked = {
            "model": "ensemble",
            "messages": [{"role": "user", "content": f"Weather? <<steer {json.dumps({'text': call})}>>"}],
            "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        }
        url = re.findall(r'base_url="(.+)"', "".join(lines))[0] + "/chat/completions"
        head = {"Content-Type": "application/json", "Authorization": "Bearer o'key$x"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), head)) as response:
            (choice,) = json.load(response)["choices"]
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(120)
    finally:
        process.kill()
        process.communicate()

    assert question in answer
    assert "stand-in" in answer
    assert [True, True] == ["data: [DONE]" in answers[0], '"embedding"' in answers[1]]
    assert {"name": "get_weather", "arguments": '{"city": "Bonn"}'} == choice["message"]["tool_calls"][0]["function"]


def test_inspect(triton, capsys: pytest.CaptureFixture[str]) -> None:
    """Every model is in the table, and the details say what claims one and what becomes of its parameters."""
    url = f"--triton-url={triton.http_url}"
    status, out, err = _run("inspect", url)
    strict, details, _ = _inspect(capsys, url, "--strict", "ensemble", "preprocessing")
    status_json, out_json, err_json = _inspect(capsys, url, "--json")

    assert (0, 0, "", "") == (status, status_json, err, err_json)
    reports = {report["name"]: report for report in json.loads(out_json)}
    assert {"ensemble", "preprocessing", "text_embedding"} <= reports.keys()
    assert [name for name in reports if name not in out] == []
    assert reports["ensemble"]["adapter"]
    assert reports["preprocessing"]["adapter"] is None
    assert re.search(r"^  ensemble +\S+ +generate +yes +/\S+ +ready$", out, re.MULTILINE)
    assert re.search(r"^  preprocessing +serves others$", out, re.MULTILINE)
    assert out.endswith(f"\nFor details: triton-openai inspect --triton-url {triton.http_url} MODEL\n")
    # Nobody has named its tokenizer.
    assert re.search(r"^  vllm_model +vllm +\S.* no +ready$", out, re.MULTILINE)
    assert re.search(r"^  vllm_model: .*--tokenizer", out, re.MULTILINE)
    assert (False, True) == tuple(reports[name]["chat"] for name in ("vllm_model", "ensemble"))
    assert 0 == strict
    assert re.search(r"^    max_tokens +-> ", details, re.MULTILINE)
    assert "vllm_model" not in details
    # Its backend takes images, its template does not.
    assert reports["tensorrt_llm_bls_multimodal"]["images"].startswith("none: the chat template")
    assert "none" == reports["ensemble"]["images"]


def test_strict_inspect(triton, capsys: pytest.CaptureFixture[str]) -> None:
    """A problem of any model ends it with status 1, and the name of no model with status 2."""
    strict, out, _ = _inspect(capsys, f"--triton-url={triton.http_url}", "--strict")
    status, nothing, err = _inspect(capsys, f"--triton-url={triton.http_url}", "ensembl")

    assert (1, 2, "") == (strict, status, nothing)
    assert "vllm_model: " in out
    assert "triton-openai: Triton has no model 'ensembl'. Did you mean ensemble?\n" == err


def test_inspect_shows_names_that_no_model_has(triton, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings for a model that Triton lacks, or for an alias, are a problem."""
    settings = tmp_path / "settings.yaml"
    settings.write_text("models: {ensembel: {tokenizer: /x}, ensemble: {aliases: [gpt]}, gpt: {tokenizer: /x}}")
    arguments = (f"--triton-url={triton.http_url}", "--config", str(settings))
    status, out, err = _inspect(capsys, *arguments, "--strict")
    _, named, _ = _inspect(capsys, *arguments, "gpt")

    assert (1, "") == (status, err)
    assert "  ensembel: The settings are for a model that Triton does not have. Did you mean ensemble?\n" in out
    assert "  gpt: The settings are for an alias: give them to the model 'ensemble'.\n" in out
    assert named.startswith("ensemble\n")


def test_the_hint_of_inspect_can_be_copied(triton, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It repeats the options, so that it reaches the same Triton, and shows no secret."""
    settings = tmp_path / "my settings.yaml"
    settings.write_text("{}")
    given = ("--endpoint", f"a={triton.http_url}", "--config", str(settings), "--triton-header", "x: sk-a-secret")
    _, out, _ = _inspect(capsys, *given, "--alias", "x=ensemble", "--alias", "y=ensemble", "--no-strict-tools")
    hint = out.rstrip().rpartition("For details: ")[2]
    assert hint.endswith(" MODEL")
    assert "sk-a-secret" not in out
    _, details, _ = _inspect(capsys, *shlex.split(hint.replace("...", "x:y"))[2:-1], "y")
    assert details.startswith("ensemble\n")


def test_inspect_without_a_triton(capsys: pytest.CaptureFixture[str]) -> None:
    """A Triton that does not answer is one sentence."""
    status, out, err = _inspect(capsys, "--triton-url", "http://127.0.0.1:9")

    assert (2, "", 1) == (status, out, err.count("\n"))
    assert "triton-openai: No Triton answers at http://127.0.0.1:9: Connection refused\n" == err
