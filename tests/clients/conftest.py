"""One running service for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.service import Service, serving
from tests.triton_fixture import TestTriton

#: A name with a slash, as models on the Hugging Face hub have them.
SLASHED = "acme/chat-7b"

_TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
_SETTINGS = f"""
defaults:
  tokenizer: %s
  image_placeholder: <image>
models:
  ensemble:
    aliases: [{SLASHED}]
"""


@pytest.fixture(scope="session", params=["http", "grpc"])
def service(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service over each transport in turn, as a process."""
    folder = tmp_path_factory.mktemp("service")
    settings = folder / "settings.yaml"
    settings.write_text(_SETTINGS % triton.tokenizer)
    url = triton.http_url if request.param == "http" else triton.grpc_url
    with serving(folder, "--triton-url", url, "--config", str(settings)) as running:
        yield running
        assert [] == running.complaints()


@pytest.fixture(scope="session", params=["http", "grpc"])
def tooled(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service with a chat template that takes tools, as a process, over each transport in turn."""
    url = triton.http_url if request.param == "http" else triton.grpc_url
    folder = tmp_path_factory.mktemp("tools")
    settings = folder / "settings.yaml"
    settings.write_text("models: {tensorrt_llm: {adapter: trtllm}, tensorrt_llm_bls: {max_model_len: 400}}")
    options = ("--tokenizer", str(triton.tokenizer), "--chat-template", str(_TEMPLATE), "--config", str(settings))
    with serving(folder, "--triton-url", url, *options) as running:
        yield running
        assert [] == running.complaints()
