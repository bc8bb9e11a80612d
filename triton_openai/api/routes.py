"""Every path that is served, in one table."""

from __future__ import annotations

from aiohttp import web

from triton_openai.api import (
    chat,
    completions,
    embeddings,
    health,
    metrics,
    model_control,
    models,
    rerank,
    score,
    tokenize,
    version,
)
from triton_openai.api.groups import Routes
from triton_openai.api.openapi import published


def add_routes(app: web.Application) -> None:
    """Add all routes; the OpenAI ones exist with and without ``/v1``, for clients whose ``base_url`` lacks it."""
    routes = Routes(app)
    for prefix in ("/v1", ""):
        routes.post("inference", f"{prefix}/chat/completions", chat.handle)
        routes.post("inference", f"{prefix}/completions", completions.handle)
        routes.post("embedding", f"{prefix}/embeddings", embeddings.handle)
        # Some clients post to list models.
        routes.get("model-repository", f"{prefix}/models", models.list_models)
        routes.post("model-repository", f"{prefix}/models", models.list_models)
        # vLLM's server has these without the prefix.
        routes.post("inference", f"{prefix}/tokenize", tokenize.tokenize)
        routes.post("inference", f"{prefix}/detokenize", tokenize.detokenize)
        routes.post("embedding", f"{prefix}/rerank", rerank.handle)
        routes.post("embedding", f"{prefix}/score", score.handle)
        routes.get("model-repository", f"{prefix}/models/{{model:.+}}", models.get_model)
        routes.post("model-repository", f"{prefix}/models/{{model:.+}}/load", model_control.load)
        routes.post("model-repository", f"{prefix}/models/{{model:.+}}/unload", model_control.unload)
    # Where the second version of Cohere's client asks.
    routes.post("embedding", "/v2/rerank", rerank.handle)
    routes.get("info", "/version", version.version)
    routes.get("info", "/openapi.json", published.openapi)
    routes.get("health", "/health/live", health.live)
    for path in ("/health/ready", "/health", "/v1/health", "/health_check"):
        routes.get("health", path, health.ready)
    routes.get("metrics", "/metrics", metrics.metrics)
