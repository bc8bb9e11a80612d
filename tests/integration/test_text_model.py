"""A model that its operator describes, as the example has it: in a real Triton, over both transports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.proxy_fixture import serving
from triton_openai.config import ModelSettings, Settings, TritonSettings
from triton_openai.tritonserver.embedded import EmbeddedTriton

EXAMPLE = Path(__file__).parents[2] / "examples" / "text-model"


@pytest.fixture(scope="module")
def triton() -> Iterator[EmbeddedTriton]:
    """Run a Triton with the example's model."""
    server = EmbeddedTriton(model_repository=EXAMPLE / "repository", environment=os.environ)
    server.start()
    yield server
    server.stop()


async def test_the_example(triton: EmbeddedTriton) -> None:
    """Text, counts, finish reasons and stop strings, streamed and whole."""
    described = yaml.safe_load((EXAMPLE / "settings.yaml").read_text())["models"]
    assert f"```yaml\n{(EXAMPLE / 'settings.yaml').read_text()}```" in (EXAMPLE / "README.md").read_text()
    models = msgspec.convert(described, dict[str, ModelSettings])
    cases: list[tuple[dict[str, Any], str, str, int | None]] = [
        ({"max_tokens": 4}, "TO BE OR NOT", "length", 4),
        ({"max_tokens": 9}, "TO BE OR NOT TO BE", "stop", 6),
        ({"max_tokens": 9, "stop": "NOT"}, "TO BE OR", "stop", 3),
        ({"max_tokens": 9, "stop": " TO"}, "TO BE OR NOT", "stop", None),
    ]
    for url in (triton.http_url, triton.grpc_url):
        async with serving(Settings(triton=TritonSettings(url=(url,)), models=models)) as proxy:
            await proxy.ready()
            for asked, text, reason, count in cases:
                body = {"model": "my_model", "prompt": "to be or not to be", **asked}
                whole = (await proxy.post("/v1/completions", body)).json
                answer = await proxy.post("/v1/completions", {**body, "stream": True})
                pieces = [choice for chunk in answer.chunks for choice in chunk["choices"]]
                assert (text, reason) == (whole["choices"][0]["text"].rstrip(), whole["choices"][0]["finish_reason"])
                assert (text, reason) == ("".join(one["text"] for one in pieces).rstrip(), pieces[-1]["finish_reason"])
                assert count in (None, whole.get("usage", {}).get("completion_tokens", count))
            chat = {"model": "my_model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 99}
            assert "HELLO" in (await proxy.post("/v1/chat/completions", chat)).json["choices"][0]["message"]["content"]
            refused = await proxy.post("/v1/completions", {"model": "my_model", "prompt": "a", "temperature": 0.5})
            assert (400, "temperature") == (refused.status, refused.error["param"])
