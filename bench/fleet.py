"""What it costs to choose one of many Tritons, and to keep their lists of models fresh: ``python -m bench.fleet``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import structlog

from triton_openai.config.tree import EndpointSettings, Policy, RoutingSettings, TritonSettings
from triton_openai.triton.client import IndexEntry, Receiver, ResponseStream, ServerInfo
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig

_CHOICES = 20_000
_RUNNING = 64


class Instant:
    """A Triton that answers at once: what is measured is the service's own work."""

    async def server_info(self) -> ServerInfo:
        return ServerInfo(name="triton", version="2.51.0")

    async def repository_index(self) -> Sequence[IndexEntry]:
        return [IndexEntry(name=f"model{number}", version="1", state="READY") for number in range(3)]

    async def model_config(self, model: str) -> ModelConfig:
        return ModelConfig(name=model)

    async def load_model(self, model: str) -> None:
        raise NotImplementedError

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        raise NotImplementedError

    async def infer(self, request: InferRequest) -> InferResponse:
        raise NotImplementedError

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def _choices(fleet: Fleet) -> float:
    """Return the microseconds of CPU for a lease and its end, with some requests running."""
    running = [fleet.lease("model0", key=str(number).encode()) for number in range(_RUNNING)]
    began = time.process_time()
    for number in range(_CHOICES):
        running[number % _RUNNING].close()
        running[number % _RUNNING] = fleet.lease("model0", key=str(number).encode())
    spent = time.process_time() - began
    for lease in running:
        lease.close()
    return spent / _CHOICES * 1e6


async def _measure(count: int, policy: Policy) -> tuple[float, float]:
    """Return the microseconds of a choice, and the CPU time in a second that the lists of models take, in percent."""
    endpoints = [EndpointSettings(name=f"t{number}", url=(f"http://t{number}:8000",)) for number in range(count)]
    settings = TritonSettings(endpoints=tuple(endpoints), routing=RoutingSettings(policy=policy))
    fleet = Fleet(settings, connect=lambda _: Instant())
    running = asyncio.create_task(fleet.run())
    await fleet.first.wait()
    choice = _choices(fleet)
    began = time.process_time()
    await fleet.refresh()
    fresh = (time.process_time() - began) / settings.refresh_interval * 100
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await fleet.close()
    return choice, fresh


def main() -> None:
    """Print a table."""
    # Not that each Triton answers.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("Tritons  policy           µs per request  % of a core for the lists")
    for policy in ("least_requests", "round_robin", "affinity"):
        for count in (1, 3, 20, 1000):
            choice, fresh = asyncio.run(_measure(count, policy))
            print(f"{count:7}  {policy:15}  {choice:14.1f}  {fresh:25.2f}")


if __name__ == "__main__":
    main()
