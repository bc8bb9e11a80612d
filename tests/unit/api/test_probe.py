"""The requests that the service itself sends to models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.adapters.vllm import Vllm
from triton_openai.api.info import probe
from triton_openai.app import SERVICE
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.errors import ServiceError


async def test_probes_run_like_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor runs them: an adapter that fails is a failure of the service. No metric counts them."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            server: Any = proxy.client.server
            service = server.app[SERVICE]
            model = service.models.served["m"]
            await probe(service, model, timeout=120)
            assert 1 == len(triton.asked)

            def fail(*_: object) -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(Vllm, "encode", fail)
            with pytest.raises(ServiceError, match="failed to answer"):
                await probe(service, model, timeout=120)
            assert "triton_openai_requests_total{" not in (await proxy.get("/metrics")).body.decode()
