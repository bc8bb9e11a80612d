"""Errors of lists of mappings in settings and other files: they name the field, and one that may be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.access.keys import read_keys
from triton_openai.config.addresses import read_endpoints
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings
from triton_openai.errors import ConfigurationError


def of_settings(file: Path) -> Any:
    return load_settings({"config": str(file)}, {})


def of_keys(file: Path) -> Any:
    return read_keys(AccessSettings(api_keys_file=file))


def refusal(read: Callable[[Path], Any], file: Path, text: str) -> str:
    """Return why *text* in *file* is refused."""
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read(file)
    assert "sk-a-secret" not in caught.value.message
    # Neither msgspec's notation nor its words.
    assert not {"`", "$"} & set(caught.value.message.replace("}$'", ""))
    return caught.value.message


@every_case(
    "entries, problem",
    [
        ("[{urll: http://a}]", "[0] has no field 'urll'. Did you mean url?"),
        ("[{url: [http://a]}, {url: [http://b], nam: b}]", "[1] has no field 'nam'. Did you mean name?"),
        ("[{url: [http://a], colour: b}]", "[0] has no field 'colour'. It can have url, name, weight, dns, access."),
        ("[{weight: 1}]", "[0] lacks the field 'url'."),
        ("[{url: [http://a], weight: many}]", "[0].weight: expected a number, not text."),
        ("[{url: [http://a], weight: -1}]", "[0].weight: expected a number >= 0.0."),
        ("[{url: [http://a], access: {certificat: x}}]", "[0].access has no field 'certificat'. Did you mean certific"),
        ("[{url: [http://a], access: {headers: sk-a-secret}}]", "[0].access.headers: expected a list, not text."),
        ("[{url: [http://a], access: {header: ['A: sk-a-secret']}}]", "[0].access has no field 'header'. Did you mean"),
        ("[{url: [http://a], access: {ca: 3}}]", "[0].access.ca: expected a path."),
    ],
)
def test_endpoints(tmp_path: Path, entries: str, problem: str) -> None:
    """The settings and the file of endpoints say the same."""
    file = tmp_path / "file.yaml"
    settings = refusal(of_settings, file, f"triton: {{endpoints: {entries}}}")
    assert settings.startswith(f"triton.endpoints in {file} is not accepted: {problem}")
    assert refusal(read_endpoints, file, entries).startswith(f"The file of endpoints {file} is not accepted: {problem}")


@every_case(
    "text, problem",
    [
        ("keys: [{nmae: a, key: sk-a-secret}]", "keys[0] has no field 'nmae'. Did you mean name?"),
        (
            "keys: [{name: a, request_per_minute: 3}]",
            "keys[0] has no field 'request_per_minute'. Did you mean requests",
        ),
        ("keys: [{name: a, sk-a-secret: x}]", "keys[0] has no field '<redacted>'. It can have "),
        ("keys: [{key: sk-a-secret}]", "keys[0] lacks the field 'name'."),
        ("keys: [{name: a, key: sk-a-secret, batch: 1}]", "keys[0].batch: expected true or false, not a whole number."),
        (
            "keys: [{name: a, key: sk-a-secret, models: [x, 3]}]",
            "keys[0].models[1]: expected text, not a whole number.",
        ),
        ("keys: [{name: a, 3: sk-a-secret}]", "keys[0]: expected text."),
        ("keys: {name: sk-a-secret}", "keys: expected a list, not a mapping of names to values."),
        ("kyes: []", "it has no field 'kyes'. Did you mean keys?"),
        ("- sk-a-secret", "expected a mapping of names to values, not a list."),
        ("", "expected a mapping of names to values, not null."),
    ],
)
def test_keys(tmp_path: Path, text: str, problem: str) -> None:
    """No message has a key."""
    file = tmp_path / "keys.yaml"
    assert refusal(of_keys, file, text).startswith(f"The file of API keys {file} is not accepted: {problem}")


@every_case(
    "text, problem",
    [
        ("models: {m: {loras: [{nam: x}]}}", "models.m.loras in FILE is not accepted: [0] has no field 'nam'."),
        ("access: {openai_restricted_api: [{api: [info], header: a, value: b}]}", "[0] has no field 'api'. Did you"),
        (
            "access: {openai_restricted_api: [{apis: [info, helth], header: a, value: sk-a-secret}]}",
            "[0].apis[1]: expected one of inference, embedding, batch, model-repository, metrics, health, info, not",
        ),
    ],
)
def test_other_lists(tmp_path: Path, text: str, problem: str) -> None:
    """Every list of mappings in the settings is read so."""
    file = tmp_path / "settings.yaml"
    assert problem in refusal(of_settings, file, text).replace(str(file), "FILE")


@every_case(
    "urls, problem",
    [
        ("http://a:8000,http://b:8000", "are two HTTP addresses; at most one is possible. Several Tritons"),
        ("grpc://a:8001,grpcs://b:8001", "are two gRPC addresses; at most one is possible. Several Tritons"),
        ("a,b", "'a' is not accepted: it has to begin with http://, https://, grpc:// or grpcs://. Several Tritons"),
        ("http://a:8000,b:8000", "'b:8000' is not accepted: it has to begin"),
    ],
)
def test_several_tritons_in_one_setting(urls: str, problem: str) -> None:
    """Who gives several Tritons as the addresses of one is told where they belong."""
    for flags, environ in (({"triton-url": [urls]}, {}), ({}, {"TRITON_OPENAI_TRITON_URL": urls})):
        with pytest.raises(ConfigurationError) as caught:
            load_settings(flags, environ)
        assert problem in caught.value.message
        assert "--endpoint" in caught.value.message
    with pytest.raises(ConfigurationError) as caught:
        load_settings({"triton-url": ["a:8000"]}, {})
    assert "--endpoint" not in caught.value.message
