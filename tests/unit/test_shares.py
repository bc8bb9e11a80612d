"""What keys have together: none of them can use it up alone, and a single one has it all."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import copy_context
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai import offload
from triton_openai.app import SERVICE
from triton_openai.config.tree import (
    AccessSettings,
    GatewaySettings,
    ModelDefaults,
    ResponsesSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.errors import ServiceOverloaded, StoreUnavailable
from triton_openai.shares import SHARING_KEY, may_take
from triton_openai.storage import open_store
from triton_openai.storage.store import Row


@given(st.integers(2, 200), st.lists(st.sampled_from("abcd"), max_size=400))
def test_shares(limit: int, wishes: list[str]) -> None:
    """No key gets more than half, whoever else wants something; there is room for a key that has nothing."""
    have: dict[str, int] = {}
    for key in wishes:
        token = SHARING_KEY.set(key)
        own, free = have.get(key, 0), limit - sum(have.values())
        if may_take(1, own=own, free=free):
            have[key] = own + 1
        SHARING_KEY.reset(token)
    assert sum(have.values()) <= limit
    assert max(have.values(), default=0) <= (limit + 1) // 2
    if len(have) < limit.bit_length() - 1:
        assert limit > sum(have.values())


ACCESS = {
    "keys": (AccessSettings(api_key=("one:sk-1", "two:sk-2")), {"api-key": "sk-1"}, {"api-key": "sk-2"}),
    "tenants": (
        AccessSettings(trust_gateway=True, gateway=GatewaySettings()),
        {"x-llm-d-inference-fairness-id": "one"},
        {"x-llm-d-inference-fairness-id": "two"},
    ),
    "a single key": (AccessSettings(api_key=("one:sk-1", "one:sk-2")), {"api-key": "sk-1"}, {"api-key": "sk-2"}),
    "no keys": (AccessSettings(), {}, {}),
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "m", "input": "a", "background": True},
    "/v1/completions": {"model": "m", "prompt": "a"},
}


@every_case("path, access", [(path, access) for path in PATHS for access in ACCESS])
async def test_one_key_does_not_take_what_others_need(path: str, access: str) -> None:
    """The first key gets half of what may be made in the background or wait, and others find room."""
    settings, first, second = ACCESS[access]
    shared = access in ("keys", "tenants")
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = ({"text_output": "one"}, {"text_output": " two"})
        triton.may_go_on.clear()
        background = path == "/v1/responses"
        running = Settings(
            triton=TritonSettings(url=(triton.url,)),
            access=settings,
            defaults=ModelDefaults(chat_template="chatml"),
            responses=ResponsesSettings(store="memory", max_background=8),
            server=ServerSettings(max_running_requests=None if background else 1, max_queued_requests=8),
        )
        async with serving(running) as proxy:
            await proxy.ready()
            asking: list[asyncio.Task[int]] = []

            async def ask(headers: dict[str, str]) -> int:
                async with proxy.client.post(path, json=PATHS[path], headers=headers) as response:
                    await response.read()
                    return int(response.status)

            admission = proxy.client.server.app[SERVICE].admission  # type: ignore[attr-defined]

            def undecided() -> int:
                """Return how many requests are neither answered nor wait or run."""
                admitted = 0
                # What runs in the background has been answered.
                if not background:
                    admitted = len(admission.queue) + sum(map(len, admission.running.values()))
                return sum(not task.done() for task in asking) - admitted

            async def ask_often(headers: dict[str, str], number: int) -> int:
                """Return how many of so many requests are refused; the others wait, or are made."""
                now = [asyncio.create_task(ask(headers)) for _ in range(number)]
                asking.extend(now)
                async with asyncio.timeout(120):
                    while undecided():  # noqa: ASYNC110 - an admission sets no event here
                        await asyncio.sleep(0.002)
                return sum(task.done() and task.result() == 503 for task in now)

            # One of the queue's requests runs.
            room = 8 if background else 9
            taken = 12 - await ask_often(first, 12)
            assert (room - 4 if shared else room) == taken
            assert (0 if shared else 1) == await ask_often(second, 1)
            triton.may_go_on.set()
            await asyncio.wait_for(asyncio.gather(*asking), 120)


def test_long_texts_of_one_key() -> None:
    """A key whose texts wait to be tokenized does not keep those of another one out."""
    lane, go_on = offload.Lane(long=True), Event()

    def submit(key: str | None) -> bool:
        def run() -> bool:
            SHARING_KEY.set(key)
            try:
                lane.submit(go_on.wait, 2_000_000, True)
            except ServiceOverloaded:
                return False
            return True

        return copy_context().run(run)

    try:
        assert [True, True, True, False] == [submit("one") for _ in range(4)]
        assert [True, False] == [submit("two") for _ in range(2)]
        assert [True, False] == [submit(None) for _ in range(2)]
    finally:
        go_on.set()
        lane._threads.shutdown()


async def test_a_key_that_writes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one key writes before the sweep does not close the store to another key."""
    store = open_store(ResponsesSettings(store="memory", max_size=1024 * 1024))
    assert store is not None

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(store, "_sweep", nothing)
    places = {"a": 1, "b": 1}
    written = dict.fromkeys(places, 0)

    async def write(key: str) -> None:
        SHARING_KEY.set(key)
        entry = f"resp_{places[key]:032x}"
        places[key] += 1
        await store.put(f"{key}{entry}", key, b"", 0, rows=[Row("output", "a", bytes(50_000))])
        written[key] += 1

    with contextlib.suppress(StoreUnavailable):
        for _ in range(30):
            await write("a")
    assert written["a"] < 30
    await write("b")
    await store.close()
