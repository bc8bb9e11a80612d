"""What it costs to choose one of many Tritons, and to keep their lists of models fresh: ``python -m bench.fleet``."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import structlog

from triton_openai.config.tree import EndpointSettings, Policy, RoutingSettings, TritonSettings
from triton_openai.triton.client import IndexEntry, Receiver, ResponseStream, ServerInfo
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.routing import Pool, Target
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig

_CHOICES = 20_000
_RUNNING = 64
_REQUESTS = 1200
_AT_A_TIME = 12
#: What chat templates put before a system prompt.
TEMPLATES = {
    "ChatML": "<|im_start|>system\n",
    "Llama 3.1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    ),
    "none": "",
}


class Instant:
    """A Triton that answers what it is asked about its models at once, and takes no requests."""

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
    running = [fleet.leasing.lease("model0", key=str(number).encode()) for number in range(_RUNNING)]
    began = time.process_time()
    for number in range(_CHOICES):
        running[number % _RUNNING].close()
        running[number % _RUNNING] = fleet.leasing.lease("model0", key=str(number).encode())
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


def share_at_one_triton(size: int, head: str, tenants: int) -> tuple[float, float]:
    """
    Send the prompts of *tenants*, each with a system prompt of 200 to 800 bytes, over three Tritons, 12 at a time.

    *size* is the setting ``prefix_size``, *head* what the chat template begins with. Returns the part of a tenant's
    requests that its busiest Triton got, and the most that a Triton ran, as a multiple of its share.
    """
    order = random.Random(5)
    settings = RoutingSettings()
    beginnings = [f"You are an assistant for {order.random()} " for _ in range(tenants)]
    systems = [beginning.ljust(order.randint(200, 800), "x") for beginning in beginnings]
    pool = Pool("affinity", max_ejected=0.5, load_factor=settings.load_factor, seed=1)
    pool.update([Target(f"t{number}", 1.0) for number in range(3)])
    got: defaultdict[int, Counter[str]] = defaultdict(Counter)
    running: list[Target] = []
    busiest = 0.0
    for _ in range(_REQUESTS):
        if len(running) == _AT_A_TIME:
            pool.count(running.pop(order.randrange(_AT_A_TIME)), -1)
        tenant = order.randrange(tenants)
        prompt = f"{head}{systems[tenant]}{order.random()}"
        target = pool.choose(0.0, key=prompt[:size].encode())
        assert target is not None
        pool.count(target, 1)
        running.append(target)
        got[tenant][target.endpoint] += 1
        # The bound is rounded up to a whole request.
        busiest = max(busiest, (target.running - 1) / (pool.running / 3))
    return sum(max(counts.values()) for counts in got.values()) / _REQUESTS, busiest


def main() -> None:
    """Print two tables."""
    # Not that each Triton answers.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("Tritons  policy           µs per request  % of a core for the lists")
    for policy in ("least_requests", "round_robin", "affinity"):
        for count in (1, 3, 20, 1000):
            choice, fresh = asyncio.run(_measure(count, policy))
            print(f"{count:7}  {policy:15}  {choice:14.1f}  {fresh:25.2f}")
    print("\nPart of the requests with one system prompt of 200 to 800 bytes that one of three Tritons gets")
    print("prefix_size", *(f"{name:>12}" for name in TEMPLATES))
    for size in (64, 128, 192, 256, 512, 1024):
        shares = [share_at_one_triton(size, head, 30)[0] for head in TEMPLATES.values()]
        print(f"{size:11}", *(f"{share:12.2f}" for share in shares))


if __name__ == "__main__":
    main()
