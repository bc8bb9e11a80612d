"""Asks the engines that report their load for it: how many requests run and wait in them, and their KV cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping

from triton_openai.adapters._common.base import Adapter
from triton_openai.errors import ServiceError
from triton_openai.generation import EngineLoad
from triton_openai.models.lookup import Models
from triton_openai.triton.client import TritonClient, all_responses


async def engine_loads(models: Models, timeout: float) -> Mapping[str, EngineLoad]:
    """
    Return the load of each Triton model whose engine reports it within *timeout* seconds.

    Over several Tritons the requests are summed, and the cache is that of the fullest engine.
    """
    adapters = {model.triton_model: model.adapter for model in models.served.values()}
    tasks = [
        asyncio.create_task(_ask(adapter, member.client))
        for name, adapter in adapters.items()
        if adapter.load_request() is not None
        for member in models.fleet.members.values()
        if name in member.targets
    ]
    if not tasks:
        return {}
    loads: defaultdict[str, list[EngineLoad]] = defaultdict(list)
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout)
    finally:
        # Those that are late, and all when nobody waits for them any more.
        for task in tasks:
            task.cancel()
    for task in done:
        name, load = task.result()
        if load is not None:
            loads[name].append(load)
    return {name: _merged(several) for name, several in loads.items()}


async def _ask(adapter: Adapter, client: TritonClient) -> tuple[str, EngineLoad | None]:
    """Return the model of *adapter* and the load that its engine at *client* reports, ``None`` if it fails."""
    request = adapter.load_request()
    assert request is not None, "it reports its load"
    load = None
    with contextlib.suppress(ServiceError):
        load = adapter.decode_load(await all_responses(client, request))
    return request.model, load


def _merged(loads: list[EngineLoad]) -> EngineLoad:
    fullest = max(loads, key=lambda load: load.cache_usage or 0.0)
    return EngineLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        cache_usage=fullest.cache_usage,
        cache_blocks=fullest.cache_blocks,
        block_size=fullest.block_size,
    )
