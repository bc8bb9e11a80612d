"""The list of several Tritons: what is wrong with it ends the start with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import every_case
from triton_openai.config.addresses import check_endpoints, endpoints
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import EndpointSettings
from triton_openai.errors import ConfigurationError


def test_short_forms() -> None:
    """A name, two addresses and names that are looked up have a short form; a path may have any characters."""
    found = check_endpoints(["a=http://h:1/x=y+z+grpc://h:2", "dns+http://pool:8000", "http://h:3"], "x")
    assert found == [
        EndpointSettings(name="a", url=("http://h:1/x=y+z", "grpc://h:2")),
        EndpointSettings(name="pool:8000", url=("http://pool:8000",), dns=True),
        EndpointSettings(name="h:3", url=("http://h:3",)),
    ]


_BOTH = "exclude each other: name one Triton, or several"


@every_case(
    "yaml, flag, environment, problem",
    [
        ("url: ['http://a:1'], endpoints: ['http://b:1']", False, False, _BOTH),
        ("url: ['http://a:1']", True, False, _BOTH),
        ("endpoints: ['http://b:1']", False, True, _BOTH),
        ("url: ['http://a:1'], endpoints_file: /x", False, False, _BOTH),
        ("", True, True, "^TRITON_OPENAI_TRITON_URL and --endpoint " + _BOTH),
        ("endpoints: ['a=http://b:1', 'a=http://c:1']", False, False, "two endpoints have the name 'a'"),
        ("endpoints: ['http://b:1', 'http://b:1']", False, False, "two endpoints have the name 'b:1'"),
        ("endpoints: [{url: ['http://b:1'], weight: -1}]", False, False, "expected a number >= 0"),
        (
            "endpoints: [{url: ['http://b:1'], wieght: 1}]",
            False,
            False,
            "\\[0\\] has no field 'wieght'. Did you mean weight",
        ),
        (
            "endpoints: ['http://b:1'], routing: {policy: best}",
            False,
            False,
            "routing.policy .*'best' .* expected least_requests, round_robin or affinity",
        ),
        ("endpoints: ['http://b:1'], routing: {affinity: [me]}", False, False, "expected session, conversation or"),
        ("endpoints: ['http://b:1'], routing: {overrides: {m: best}}", False, False, "overrides.m .*'best'"),
        ("endpoints: ['dns+http://:8000']", False, False, "names no host"),
        ("endpoints: [{url: ['http://:8000'], dns: true}]", False, False, "names no host"),
        ("endpoints: ['dns+http://a:1+grpc://b:1']", False, False, "have one host"),
        ("endpoints: ['a b=http://b:1']", False, False, "an endpoint's name has .* unlike 'a b'"),
        ("endpoints: ['=http://b:1']", False, False, "an endpoint's name has .* unlike ''"),
        ("endpoints: ['a=http://b:1+http://c:1']", False, False, "two HTTP addresses"),
    ],
)
def test_wrong_endpoints(tmp_path: Path, yaml: str, flag: bool, environment: bool, problem: str) -> None:
    """Whatever names them, the sentence says where and what."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"triton: {{{yaml}}}")
    flags = {"config": str(file), **({"endpoint": ["http://c:1"]} if flag else {})}
    environ = {"TRITON_OPENAI_TRITON_URL": "http://d:1"} if environment else {}
    with pytest.raises(ConfigurationError, match=problem):
        load_settings(flags, environ)


@every_case(
    "text, problem",
    [
        (None, "cannot be read: No such file"),
        ("", "is not accepted"),
        ("- {name: b}", "\\[0\\] lacks the field 'url'"),
        ("- a=http://b:1", "two endpoints have the name 'a'"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str | None, problem: str) -> None:
    """The file of endpoints is read at the start, together with those of the settings."""
    file = tmp_path / "endpoints.yaml"
    if text is not None:
        file.write_text(text)
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"triton: {{endpoints: ['a=http://a:1'], endpoints_file: {file}}}")
    with pytest.raises(ConfigurationError, match=problem):
        endpoints(load_settings({"config": str(settings)}, {}).triton)
