"""Every path that is served, in one table."""

from __future__ import annotations

from aiohttp import web

from triton_openai.api import chat, completions, embeddings, health, models, rerank, score, tokenize, version
from triton_openai.api.openapi import published


def add_routes(app: web.Application) -> None:
    """Add all routes; the OpenAI ones exist with and without ``/v1``, for clients whose ``base_url`` lacks it."""
    router = app.router
    for prefix in ("/v1", ""):
        router.add_post(f"{prefix}/chat/completions", chat.handle)
        router.add_post(f"{prefix}/completions", completions.handle)
        router.add_post(f"{prefix}/embeddings", embeddings.handle)
        # Some clients post to list models.
        router.add_get(f"{prefix}/models", models.list_models)
        router.add_post(f"{prefix}/models", models.list_models)
        # vLLM's server has these without the prefix.
        router.add_post(f"{prefix}/tokenize", tokenize.tokenize)
        router.add_post(f"{prefix}/detokenize", tokenize.detokenize)
        router.add_post(f"{prefix}/rerank", rerank.handle)
        router.add_post(f"{prefix}/score", score.handle)
        router.add_get(f"{prefix}/models/{{model:.+}}", models.get_model)
    # Where the second version of Cohere's client asks.
    router.add_post("/v2/rerank", rerank.handle)
    router.add_get("/version", version.version)
    router.add_get("/openapi.json", published.openapi)
    router.add_get("/health/live", health.live)
    for path in ("/health/ready", "/health", "/v1/health", "/health_check"):
        router.add_get(path, health.ready)
