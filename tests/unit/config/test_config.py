"""Settings come from flags, the environment, a YAML file and defaults, and every mistake is named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.config.options import options
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import DefaultParameters, Settings
from triton_openai.errors import ConfigurationError


@pytest.fixture
def read(tmp_path: Path):
    """Read settings from YAML text, flags and environment variables."""

    def read(
        yaml: str | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> Settings:
        given = dict(flags or {})
        if yaml is not None:
            path = tmp_path / "settings.yaml"
            path.write_text(yaml, encoding="utf-8")
            given["config"] = str(path)
        return load_settings(given, environ or {})

    return read


def test_defaults() -> None:
    """Without any source the service listens on this machine only and looks for Triton where Triton listens."""
    settings = load_settings({}, {})

    assert Settings() == settings
    assert ("127.0.0.1", 9000) == (settings.server.host, settings.server.port)
    assert ("http://127.0.0.1:8000",) == settings.triton.url


def test_precedence(read) -> None:
    """Flags win over the environment, the environment over the file, the file over the defaults."""
    yaml = "server: {port: 1, workers: 1, max_body_size: 2048}"
    environ = {"TRITON_OPENAI_PORT": "2", "TRITON_OPENAI_WORKERS": "2"}

    server = read(yaml, {"port": "3"}, environ).server

    assert (3, 2, 2048, "127.0.0.1") == (server.port, server.workers, server.max_body_size, server.host)


def test_config_from_environment(tmp_path: Path) -> None:
    """The YAML file can be named in the environment, and a flag names another one."""
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("server: {port: 1}")
    two.write_text("server: {port: 2}")
    environ = {"TRITON_OPENAI_CONFIG": str(one)}

    assert 1 == load_settings({}, environ).server.port
    assert 2 == load_settings({"config": str(two)}, environ).server.port


def test_other_and_empty_variables_are_left_alone() -> None:
    """Variables of other programs do not count, and an empty one is as good as none."""
    assert Settings() == load_settings({}, {"PATH": "/bin", "TRITON_HOME": "x", "TRITON_OPENAI_PORT": ""})


def test_every_setting_has_all_its_names(read) -> None:
    """Every setting explains itself and takes its own default back, from flag, variable and file alike."""
    for option in options():
        assert option.help.endswith("."), option.name
        if option.is_alias or option.per_model or not option.default:
            continue
        default = [str(item) for item in option.default] if option.is_list else option.default
        written = ",".join(default) if option.is_list else str(default).lower() if option.is_switch else str(default)
        section, key = option.path
        assert Settings() == read(msgspec.yaml.encode({section: {key: default}}).decode())
        if not option.file_only:
            assert Settings() == read(None, {option.name: written}) == read(None, None, {option.variable: written})


def test_settings_of_the_file_only(read) -> None:
    """Neither a flag nor a variable sets them; the error says where they belong."""
    for option in options():
        if not option.file_only:
            continue
        for origin, flags, environ in (
            (option.flag, {option.name: "1"}, {}),
            (option.variable, {}, {option.variable: "1"}),
        ):
            with pytest.raises(ConfigurationError) as caught:
                read(None, flags, environ)
            assert caught.value.message.startswith(f"{origin} is not accepted: set {option.key} ")
            assert option.per_model == (f" or models.NAME.{option.path[-1]} " in caught.value.message)
    assert Settings() == read(None, {}, {"TRITON_OPENAI_IDLE_TIMEOUT": ""})


def test_names_are_distinct() -> None:
    """No two settings share a flag or a variable."""
    assert len(options()) == len({option.flag for option in options()}) == len({o.variable for o in options()})


def test_models(read) -> None:
    """What a model says itself wins over the defaults; its parameters are completed from them one by one."""
    settings = read(
        """
        defaults:
          tokenizer: /everyone
          default_parameters: {temperature: 1, top_p: 0.9}
        models:
          ensemble:
            aliases: gpt-4o
            tokenizer: /own
            default_parameters: {temperature: 0.5, stop: [a, b]}
        """
    )

    model = settings.model("ensemble")

    assert ("/own", ("gpt-4o",)) == (model.tokenizer, model.aliases)
    assert {"temperature": 0.5, "top_p": 0.9, "stop": ("a", "b")} == model.default_parameters.explicit()
    assert "/everyone" == settings.model("another").tokenizer
    assert {"gpt-4o": "ensemble"} == settings.aliases()
    assert DefaultParameters() == Settings().model("any").default_parameters


def test_parts_of_models_that_are_merged(read) -> None:
    """Two merges are no key that is there twice."""
    settings = read("models: {a: &a {tokenizer: t}, b: &b {max_model_len: 5}, c: {<<: *a, <<: *b}}")

    assert ("t", 5) == (settings.models["c"].tokenizer, settings.models["c"].max_model_len)


def test_model_flags(read) -> None:
    """A per-model flag speaks of all models, or of the one it names; a path with = in it is a path."""
    settings = read(
        "models: {ensemble: {tokenizer: /file, chat_template: chatml}}",
        {"tokenizer": ["ensemble=meta/llama", "/models/x=1"], "alias": ["a=ensemble", "b=ensemble,c=vllm"]},
    )

    assert "meta/llama" == settings.model("ensemble").tokenizer
    assert "chatml" == settings.model("ensemble").chat_template
    assert "/models/x=1" == settings.defaults.tokenizer
    assert {"a": "ensemble", "b": "ensemble", "c": "vllm"} == settings.aliases()


def test_contents_that_would_not_be_logged(read) -> None:
    """To ask for them and to silence them is a mistake, and the service would warn of what it does not do."""
    with pytest.raises(ConfigurationError, match=r"server\.log_content in .* and --log-level exclude"):
        read("server: {log_content: 100}", {"log-level": "warning"})
    assert 100 == read("server: {log_content: 100}", {"log-level": "debug"}).server.log_content


def test_workers_that_would_admit_nothing(read) -> None:
    """The workers divide the limits of running requests, and none of them gets nothing; an empty queue is fine."""
    for flag in ("max-running-requests", "max-running-requests-per-model"):
        with pytest.raises(ConfigurationError, match=f"^--{flag}: 3 is too few for 4 workers"):
            read(None, {"workers": "4", flag: "3"})
        read(None, {"workers": "4", flag: "4", "max-queued-requests": "0"})
        read(None, {flag: "1"})


def test_what_a_gateway_says_needs_trust(read) -> None:
    """The settings for it are not passed over in silence."""
    with pytest.raises(ConfigurationError, match=r"^access\.gateway\.objectives\.a in .* needs access\.trust_gateway"):
        read("access: {gateway: {objectives: {a: 1}}}")
    access = read("access: {trust_gateway: true, gateway: {objectives: {a: 1}, concurrent_requests: 2}}").access
    assert ({"a": 1}, 2) == (access.gateway.objectives, access.gateway.concurrent_requests)


def test_a_prompt_is_made_in_one_way(read) -> None:
    """A chat template and a history template exclude each other, but a model may differ from all others."""
    for yaml, flags in (
        ("models: {m: {history_template: a}}", {"chat-template": ["m=b"]}),
        ("defaults: {history_template: a}", {"chat-template": ["b"]}),
    ):
        with pytest.raises(ConfigurationError, match="not both"):
            read(yaml, flags)
    settings = read("models: {m: {history_template: h}}", {"chat-template": ["chatml"]})

    assert (None, "h") == (settings.model("m").chat_template, settings.model("m").history_template)
    assert ("chatml", None) == (settings.model("n").chat_template, settings.model("n").history_template)


def test_urls(read) -> None:
    """One address for each transport, given twice or with a comma."""
    for given in (["http://a:8000/", "grpc://a:8001"], ["grpc://a:8001,http://a:8000/"]):
        triton = read(None, {"triton-url": given}).triton

        assert {"http://a:8000/", "grpc://a:8001"} == set(triton.url)


def test_repository_takes_the_place_of_the_default_address(read) -> None:
    """A model repository is no contradiction to an address that nobody gave."""
    settings = read(None, {"model-repository": ["~/models"]})

    assert (Path.home() / "models",) == settings.triton.model_repository
    assert ("http://127.0.0.1:1",) == settings.with_triton("http://127.0.0.1:1").triton.url


@every_case(
    "yaml, message",
    [
        ("server: {prt: 1}", "server.prt in FILE is not a setting. Did you mean port?"),
        ("sever: {}", "sever in FILE is not a setting. Did you mean server?"),
        ("server: {port: '1'}", "server.port in FILE: '1' is not accepted: expected a whole number."),
        ("server: {port: 70000}", "server.port in FILE: 70000 is not accepted: expected a whole number <= 65535."),
        ("server: {log_format: xml}", "server.log_format in FILE: 'xml' is not accepted: expected console or json."),
        (
            "access: {openai_restricted_api: [{apis: [all], header: a, value: b}]}",
            "access.openai_restricted_api in FILE is not accepted: [0].apis[0]: expected one of inference, embedding, "
            "batch, model-repository, metrics, health, info, not 'all'.",
        ),
        ("server: 1", "server in FILE has to be a mapping of names to values."),
        ("server: {port: 1, port: 2}", "The settings file FILE is not valid YAML: 'port' is there twice"),
        ("[1]", "The settings file FILE has to be a mapping of names to values."),
        ("a: [", "The settings file FILE is not valid YAML:"),
        ("? [a]\n: b", "The settings file FILE is not valid YAML:"),
        ("triton: {idle_timeout: .inf}", "triton.idle_timeout in FILE: inf is not accepted:"),
        ("triton: {idle_timeout: .nan}", "triton.idle_timeout in FILE: nan is not accepted:"),
        ("triton: {model_repository: [1]}", "triton.model_repository in FILE: [1] is not accepted: expected a path."),
        ("models: {1: {}}", "models.1 in FILE is not a name; put it in quotes."),
        ("models: {m: {tokeniser: x}}", "models.m.tokeniser in FILE is not a setting. Did you mean tokenizer?"),
        ("models: {m: {tokenizer: 1}}", "models.m.tokenizer in FILE: 1 is not accepted: expected text."),
        (
            "models: {m: {default_parameters: {temperature: 3}}}",
            "models.m.default_parameters.temperature in FILE: 3 is not accepted: expected a number <= 2.0.",
        ),
        (
            "models: {a: {aliases: ['']}}",
            "models.a.aliases in FILE: [''] is not accepted: expected text",
        ),
        ("models: {a: {aliases: [x]}, b: {aliases: [x]}}", "the alias 'x' stands for two models, 'a' and 'b'."),
        (
            "models: {a: {aliases: [x]}, x: {aliases: [y]}}",
            "models.x.aliases in FILE: the alias 'y' stands for 'x', which is itself an alias, of 'a'; name that.",
        ),
        ("models: {a: {aliases: [a]}}", "the alias 'a' stands for 'a', which is itself an alias"),
        ("models: {a: {loras: [x, {name: x}]}}", "models.a.loras in FILE: two LoRA adapters have the name 'x'."),
        (
            "models: {a: {loras: [{name: x, task_id: 1}, {name: y, task_id: 1}]}}",
            "models.a.loras in FILE: two LoRA adapters have the task_id 1.",
        ),
        ("models: {a: {loras: [{path: x}]}}", "models.a.loras in FILE is not accepted: [0] lacks the field 'name'."),
        ("models: {a: {loras: [{name: x, taskid: 1}]}}", "[0] has no field 'taskid'. Did you mean task_id?"),
        ("models: {a: {loras: [{name: x, task_id: -1}]}}", "[0].task_id: expected a whole number >= 0."),
        ("models: {a: {loras: [{name: x, task_id: 9223372036854775808}]}}", "is not accepted:"),
        ("models: {a: {loras: ['']}}", "is not accepted:"),
    ],
)
def test_mistakes_in_the_file(read, yaml: str, message: str) -> None:
    """A mistake in the file is named with its place."""
    with pytest.raises(ConfigurationError) as caught:
        read(yaml)

    assert message in re.sub(r"\S*settings\.yaml", "FILE", caught.value.message)


@every_case(
    "flags, environ, message",
    [
        ({"prt": "1"}, {}, "--prt is not a setting. Did you mean --port?"),
        ({"port": "x"}, {}, "--port: 'x' is not accepted: expected a whole number."),
        ({"config": "/nowhere.yaml"}, {}, "The settings file /nowhere.yaml cannot be read: No such file or directory."),
        ({"config": ""}, {}, "--config: '' is not accepted: expected a path."),
        ({"alias": ["x"]}, {}, "--alias: 'x' is not accepted: write NAME=MODEL."),
        ({"tokenizer": ["m="]}, {}, "--tokenizer: 'm=' is not accepted: write MODEL=VALUE or VALUE."),
        ({"tokenizer": ["a", "b"]}, {}, "--tokenizer is given twice for all models: 'a' and 'b'."),
        ({"triton-url": ["triton:8000"]}, {}, "Did you mean http://triton:8000?"),
        ({"triton-url": ["ftp://triton"]}, {}, "has to begin with http://, https://, grpc:// or grpcs://."),
        ({"triton-url": ["http://"]}, {}, "'http://' names no host."),
        ({"triton-url": ["http://a:x"]}, {}, "'http://a:x' is not an address"),
        ({"triton-url": ["grpc://a"]}, {}, "names no port; Triton's gRPC port is usually 8001."),
        ({"triton-url": ["http://a/ü"]}, {}, "write its path percent-encoded"),
        ({"triton-url": ["http://a/b c"]}, {}, "write its path percent-encoded"),
        ({"triton-url": ["grpc://ü:1"]}, {}, "its host as xn--"),
        ({"triton-url": ["grpc://a:1/b"]}, {}, "has a path, which a gRPC address cannot have."),
        ({"triton-url": ["http://a:1", "https://b:1"]}, {}, "are two HTTP addresses"),
        ({"triton-url": [","]}, {}, "--triton-url: at least one address is needed."),
        ({"api-key": [""]}, {}, "--api-key is given and empty: leave it out to let every client in."),
        ({}, {"TRITON_OPENAI_OPENAI_RESTRICTED_API": ";"}, "TRITON_OPENAI_OPENAI_RESTRICTED_API is given and empty"),
        ({"api-key": ["a b"]}, {}, "--api-key is not accepted: expected text without spaces and commas, and with one"),
        ({"responses-store": "x"}, {}, "expected none, memory, sqlite[:PATH] or postgresql://..."),
        ({"cors-allow-origin": ["a.b"]}, {}, "expected https://HOST[:PORT] without a path, with * for any port, or *"),
        (
            {"triton-url": ["http://a"], "model-repository": ["m"]},
            {},
            "--triton-url and --model-repository exclude each",
        ),
        (
            {},
            {"TRITON_OPENAI_PRT": "1"},
            "TRITON_OPENAI_PRT is not a setting. Did you mean TRITON_OPENAI_PORT?",
        ),
        (
            {},
            {"TRITON_OPENAI_VLLM_METRICS": "maybe"},
            "TRITON_OPENAI_VLLM_METRICS: 'maybe' is not accepted: expected true or false.",
        ),
    ],
)
def test_mistakes_in_flags_and_variables(read, flags, environ, message: str) -> None:
    """A mistake on the command line or in the environment is named as it was written."""
    with pytest.raises(ConfigurationError) as caught:
        read(None, flags, environ)

    assert message in caught.value.message


def test_lora_adapters(read) -> None:
    """Names, and mappings for those whose weights are sent, side by side; other models are free to have the same."""
    mappings = "[french, {name: german, path: 1/german}, {name: dutch, task_id: 9223372036854775807}]"
    settings = read(f"models: {{a: {{loras: {mappings}, lora_dir: /models/a}}, b: {{loras: french}}}}")

    french, german, dutch = settings.model("a").loras
    assert "french" == french
    assert ("german", "1/german", None) == (german.name, german.path, german.task_id)
    assert ("dutch", None, 2**63 - 1) == (dutch.name, dutch.path, dutch.task_id)
    assert Path("/models/a") == settings.model("a").lora_dir
    assert ("french",) == settings.model("b").loras


def test_a_password_in_an_address_is_refused_and_not_repeated(read) -> None:
    """Addresses are printed and logged, so they hold no credentials."""
    with pytest.raises(ConfigurationError) as caught:
        read(None, {"triton-url": ["http://user:hunter2@triton:8000"]})

    assert "hunter2" not in caught.value.message
