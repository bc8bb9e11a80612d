"""Settings of the metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Prometheus is given."""

    enabled: Annotated[bool, Meta(description="Answer at /metrics.", extra={"name": "metrics"})] = True
    vllm_names: Annotated[
        bool,
        Meta(
            description="Give the main metrics under vLLM's names too, for what reads those: dashboards, autoscalers, "
            "gateways.",
            extra={"name": "vllm-metrics"},
        ),
    ] = False
    relay_triton: Annotated[
        bool,
        Meta(
            description="Give Triton's own metrics too, read from triton-metrics-url.",
            extra={"name": "relay-triton-metrics"},
        ),
    ] = False
    triton_url: Annotated[
        str | None,
        Meta(
            description="Where Triton has its metrics; by default port 8002 of the host in triton-url, or where a "
            "Triton that is started here has them.",
            extra={"name": "triton-metrics-url", "metavar": "URL"},
        ),
    ] = None
