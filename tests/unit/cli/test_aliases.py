"""Names of other servers' flags and variables: each works with a warning, or says what to do instead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cases import every_case
from triton_openai.cli import main
from triton_openai.cli.aliases import ALIASES, REFUSED, VARIABLES, WITHOUT_EFFECT, translate
from triton_openai.cli.arguments import parse
from triton_openai.config.options import options
from triton_openai.config.sources import load_settings
from triton_openai.errors import ConfigurationError

# One value of each kind that the flags take, as other servers write it and as it is in the settings.
VALUES = {
    "--port": ("9001", "server.port", 9001),
    "--max-body-size": ("4096", "server.max_body_size", 4096),
    "--log-level": ("critical", "server.log_level", "error"),
    "--host": ("0.0.0.0", "server.host", "0.0.0.0"),
    "--triton-url": ("http://triton:8001", "triton.url", ("grpc://triton:8001",)),
    "--otlp-endpoint": ("http://c:4317", "traces.otlp_endpoint", "http://c:4317"),
    "--tokenizer": ("/models/x", "defaults.tokenizer", "/models/x"),
    "--default-max-tokens": ("7", "api.default_max_tokens", 7),
    "--tls-certificate": ("c.pem", "tls.certificate", "c.pem"),
    "--tls-key": ("k.pem", "tls.key", "k.pem"),
    "--tls-client-ca": ("a.pem", "tls.client_ca", "a.pem"),
    "--workers": ("2", "server.workers", 2),
    "--api-key": ("secret", "access.api_key", ("secret",)),
    "--history-template": (__file__, "defaults.history_template", Path(__file__).read_text()),
}
FLAGS = [(flag, ours) for flags in ALIASES.values() for flag, (ours, _) in flags.items()]


def value_of(arguments: list[str], environ: dict[str, str], path: str) -> tuple[object, list[str]]:
    """Return the setting at *path* after the command line and the environment, and the warnings."""
    written, ours, warnings = translate(arguments, environ)
    group, _, name = path.partition(".")
    value = getattr(getattr(load_settings(parse(written).settings, ours), group), name)
    return value if isinstance(value, int | tuple) else str(value), [*warnings]


@every_case("flag, ours", FLAGS)
def test_flags(flag: str, ours: str) -> None:
    """Each form of a flag sets ours."""
    written, path, value = VALUES[ours]
    forms = [[flag, written], [f"{flag}={written}"], *([] if flag.startswith("--") else [[flag + written]])]
    for form in forms:
        assert (value, [f"{flag} is accepted; its name here is {ours}."]) == value_of(["serve", *form], {}, path)


@every_case("variable, flag", [item for item in VARIABLES.items() if "TEMPLATE" not in item[0]])
def test_variables(variable: str, flag: str) -> None:
    """A variable sets ours, and ours wins."""
    ours = dict(FLAGS).get(flag, flag)
    written, path, value = VALUES[ours]
    name = next(option.variable for option in options() if option.flag == ours)

    warning = f"{variable} is accepted; its name here is {name}."
    assert (value, [warning]) == value_of(["serve"], {variable: written}, path)
    _, *both = translate(["serve"], {variable: "x", name: "y"})
    assert [{name: "y"}, [f"{variable} is ignored: {name} is set."]] == both


# The command lines of NVIDIA's documents; the last one has every flag of the frontend.
NVIDIA = (
    "--model-repository tests/vllm_models --tokenizer meta-llama/Meta-Llama-3.1-8B-Instruct",
    "--model-repository tests/vllm_models --tokenizer T --enable-kserve-frontends",
    "--model-repository s3://bucket/triton_model_repo --tokenizer tokenizer_dir --openai-port 8000",
    "--model-repository M --tokenizer T --tool-call-parser mistral --chat-template t.jinja",
    "--model-repository M --tokenizer T --lora-separator _lora_",
    "--model-repository /m --tokenizer T --backend tensorrtllm --lora-separator _lora_ --host 0.0.0.0 "
    "--tritonserver-log-verbose-level 1 --tool-call-parser llama3 --max-tool-call-parse-bytes=131072 --chat-template t "
    "--default-max-tokens 16 --model-control-mode explicit --load-model a --load-model b --openai-port 9000 "
    "--uvicorn-log-level trace --openai-restricted-api inference,model-repository admin-key admin-value "
    "--openai-restricted-api health k v --http-max-input-size 67108864 --enable-kserve-frontends "
    "--kserve-http-port 8000 --kserve-grpc-port 8001",
)


@every_case("line", NVIDIA)
def test_the_command_lines_of_nvidias_frontend(line: str) -> None:
    """
    The command lines of NVIDIA's frontend are taken as they are; what has no effect is said, with what there is in
    its place.
    """
    written, environ, warnings = translate(["serve", *line.split()], {})
    settings = load_settings(parse(written).settings, environ)

    assert settings.triton.model_repository
    idle = {flag: why for flag, why in WITHOUT_EFFECT["NVIDIA's OpenAI frontend"].items() if flag in line}
    assert [*idle.items()] == [
        (flag, text) for flag, _, text in (one.partition(" is accepted without effect. ") for one in warnings) if text
    ]


# As vLLM's server takes them: long, negated, with underscores, with a key in them, and short.
ENGINE_ARGUMENTS = """
    --dtype --dtype=auto --enable-prefix-caching --no-enable-prefix-caching --gpu_memory_utilization --max-num-seqs=256
    --compilation-config.level --model --seed --task --tensor-parallel-size -tp -tp=2 -pp -pp=2 -dp -dp=2 -dcp -q -O -O3
    -cc -cc.level
"""


@every_case("flag", ENGINE_ARGUMENTS.split())
def test_arguments_of_vllms_engine(flag: str) -> None:
    """
    Each, however it is written, ends with a sentence that names the command that takes it, and its file, and is taken
    for no flag of ours.
    """
    for form in ([flag], [flag, "2"]):
        with pytest.raises(ConfigurationError) as caught:
            parse(translate(["serve", *form], {})[0])
        assert caught.value.message.startswith(flag.partition("=")[0])
        assert "Give it to `triton-openai model-repository vllm`" in caught.value.message
        assert "model.json, in the folder of the vLLM backend's model." in caught.value.message
        assert "Did you mean" not in caught.value.message


COMMANDS = {
    "run-batch -i in.jsonl -o out.jsonl --model M": "`triton-openai batch run -i FILE -o FILE`",
    "complete": "`triton-openai chat` asks",
    "bench serve --model M": "`triton-openai bench` takes options only, and 'serve' is none: leave it out.",
    "bench throughput": "leave it out",
}


@every_case("line", COMMANDS)
def test_commands_of_vllm(line: str) -> None:
    """A command of ``vllm`` that is another one here ends with a sentence that names ours."""
    with pytest.raises(ConfigurationError) as caught:
        parse(translate(line.split(), {})[0])
    assert COMMANDS[line] in caught.value.message


@every_case("flag", [flag for flags in REFUSED.values() for flag in flags])
def test_refused_flags(flag: str) -> None:
    """The error names flags and settings of ours that are there."""
    for form in ([flag, "x"], [f"{flag}=x"]):
        with pytest.raises(ConfigurationError, match="has no counterpart here") as caught:
            translate(["serve", *form], {})
        assert caught.value.message.startswith(flag)
        named = {word.strip(".,:") for word in caught.value.message.split()[1:] if word.startswith("--")}
        assert named <= {option.flag for option in options() if not option.file_only} | {"--no-page"}


def test_no_alias_is_a_flag_of_ours() -> None:
    """Ours are read as they are."""
    theirs = {flag for flags in (*ALIASES.values(), *WITHOUT_EFFECT.values(), *REFUSED.values()) for flag in flags}

    assert not theirs & {option.flag for option in options()}
    line = shlex.split("serve --port 1 --triton-url http://h:8001 --api-key=a:-p")
    assert ([*line], {}, []) == translate(line, {})


def test_mistakes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag without its value, and a variable without a counterpart, end the command with one sentence."""
    assert 2 == main(["serve", "-p"])
    assert "triton-openai: Argument --port: expected one argument." in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_TRTLLM_HISTORY_TEMPLATE_FILE", "/nowhere/history.liquid")
    assert 2 == main(["serve"])
    assert "The file '/nowhere/history.liquid' with the history template cannot be read" in capsys.readouterr().err


@every_case("form", ["flag", "equals", "file", "variable", "variable of a file"])
def test_history_templates_of_openai_trtllm(tmp_path_factory: pytest.TempPathFactory, form: str) -> None:
    """The text, with its commas, equals signs and line ends, becomes the template of all models."""
    text = "{% for item in items -%}\n{% if item.identity == 'User', x %}{{ item.content }}{% endif %}\n{% endfor -%}\n"
    file = tmp_path_factory.mktemp("history") / "history.liquid"
    file.write_text(text)
    flags, environ = {
        "flag": (["--history-template", text], {}),
        "equals": ([f"--history-template={text}"], {}),
        "file": (["--history-template-file", str(file)], {}),
        "variable": ([], {"OPENAI_TRTLLM_HISTORY_TEMPLATE": text}),
        "variable of a file": ([], {"OPENAI_TRTLLM_HISTORY_TEMPLATE_FILE": str(file)}),
    }[form]
    arguments, variables, warnings = translate(["serve", *flags], environ)
    settings = load_settings(parse(arguments).settings, variables)

    assert text == settings.defaults.history_template == settings.model("m").history_template
    assert (form in ("flag", "equals")) == (not warnings)


def test_the_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning is one line on stderr, and a log line where logs are JSON."""
    monkeypatch.setattr("triton_openai.cli.serve.serve", lambda *_: 0)
    for form, begin in (("console", "triton-openai: --openai-port"), ("json", '{"event":"--openai-port')):
        assert 0 == main(["serve", "--openai-port", "9001", "--log-format", form])
        assert capsys.readouterr().err.startswith(begin)
