"""Where traces go: our settings, and OpenTelemetry's own variables where those say nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from triton_openai.config.sources import load_settings
from triton_openai.config.tree import TracesSettings
from triton_openai.errors import ConfigurationError


@pytest.fixture
def read(tmp_path: Path):
    """Return the settings of the traces from the environment and a YAML file."""

    def read(environ: Mapping[str, str], **settings: object) -> TracesSettings:
        file = tmp_path / "settings.yaml"
        file.write_text(json.dumps({"traces": settings}))
        return load_settings({"config": str(file)}, environ).traces

    return read


@pytest.mark.parametrize(
    "environ, url, protocol",
    [
        ({}, None, None),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317", "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp/"}, "https://c/otlp/v1/traces", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/x"}, "https://c/x", "http/protobuf"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"},
            "http://t/x",
            "http/protobuf",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            "http://c:1",
            "grpc",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, "http://c/v1/traces", None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, None, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, None, None),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, None, None),
        ({"OTEL_SDK_DISABLED": "true", "TRITON_OPENAI_OTLP_ENDPOINT": "http://c"}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None, None),
    ],
)
def test_standard_variables(read, environ: dict[str, str], url: str | None, protocol: str | None) -> None:
    """Standard variables mean what OpenTelemetry's specification says."""
    settings = read(environ)

    assert url == settings.exporter_url
    assert protocol in (None, settings.protocol)


@pytest.mark.parametrize(
    "environ, settings, characters",
    [
        ({}, {}, None),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}, {}, 1024),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY"}, {}, 1024),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_and_event"}, {"content": 9}, 9),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "EVENT_ONLY"}, {}, None),
        ({"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "false"}, {}, None),
        ({}, {"content": 200}, 200),
    ],
)
def test_content(read, environ: dict[str, str], settings: dict[str, int], characters: int | None) -> None:
    """Prompts and answers are in spans only where somebody says so."""
    assert characters == read(environ, **settings).content


def test_settings_win(read) -> None:
    """What was said to this service counts more than what is said to all."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    settings = read({**environ, "OTEL_TRACES_EXPORTER": "none"}, otlp_endpoint="http://own", otlp_protocol="grpc")

    assert ("http://own", "grpc") == (settings.exporter_url, settings.protocol)
    assert "http://own/v1/traces" == read(environ, otlp_endpoint="http://own").exporter_url


@pytest.mark.parametrize(
    "environ, settings, names",
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, {}, "OTEL_TRACES_EXPORTER"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"},
            {},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not accepted: expected grpc or http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, {}, "Did you mean http://c:4317"),
        ({}, {"otlp_endpoint": "c:4317"}, "traces.otlp_endpoint in "),
        ({}, {"otlp_endpoint": "grpc://c:4317"}, "http://"),
        ({}, {"otlp_endpoint": "http://:4317"}, "no host"),
        ({}, {"otlp_endpoint": "http://c:x"}, "not an address"),
        ({}, {"otlp_endpoint": "http://me:secret@c"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_mistakes_are_named(read, environ: dict[str, str], settings: dict[str, Any], names: str) -> None:
    """With what was wrong, and no password."""
    with pytest.raises(ConfigurationError) as raised:
        read(environ, **settings)

    assert names in raised.value.message
    assert "secret" not in raised.value.message
