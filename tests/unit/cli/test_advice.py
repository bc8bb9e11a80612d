"""The advice to serve a model better: one line in the log, and in what ``inspect`` shows."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.cli import main
from triton_openai.config.tree import Settings, TritonSettings

ADVICE = "triton-openai model-repository vllm --from FOLDER"
OTHER = config_of(
    "other",
    inputs=("request BYTES 1", "carrier? BYTES 1"),
    outputs=("response BYTES 1",),
    backend="python",
    parameters={"triton_openai_contract": {"string_value": "1"}},
)


async def test_a_model_of_the_vllm_backend_points_to_the_companion(capsys: pytest.CaptureFixture[str]) -> None:
    """Its line in the log says how it becomes one, that of a companion model does not; so does ``inspect``."""
    async with FakeTriton(config_of("m"), OTHER) as triton:
        with structlog.testing.capture_logs() as logs:
            async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
                await proxy.ready()
        arguments = ["inspect", f"--triton-url={triton.url}"]
        shown = []
        for name in ("m", "other"):
            await asyncio.to_thread(main, [*arguments, name])
            shown.append([line for line in capsys.readouterr().out.splitlines() if ADVICE in line])

    said = {line["model"]: line.get("advice", "") for line in logs if line["event"] == "model is served"}
    assert {"m", "other"} == said.keys()
    assert ADVICE in said["m"]
    assert "\n" not in said["m"]
    assert "" == said["other"]
    assert [1, 0] == [len(lines) for lines in shown]
