"""What an operator closes or limits is closed and limited for batches too: when they are made, and when lines run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.cases import every_case
from tests.clock import Clock
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, changed, serving
from tests.unit.api.test_batches import Client, jsonl, line, settings_of
from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.access.rate_limits import RateLimits
from triton_openai.app import SERVICE, apply_settings
from triton_openai.config.tree import GatewaySettings, RestrictedApi, Settings

KEY = {"Authorization": "Bearer sk-1"}
OPEN = {"admin-key": "secret"}
EMBEDS = config_of(
    "embeds", ("text BYTES 1",), ("embedding FP32 4",), backend="python", model_transaction_policy={}
)  # fmt: skip
MESSAGE = {"model": "vllm", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}


def restricted(*groups: Any, value: str = "secret") -> RestrictedApi:
    """Return a restriction of *groups*."""
    return RestrictedApi(apis=groups, header="admin-key", value=value)


class Service:
    """A running service, whose access its operator changes."""

    def __init__(self, proxy: Proxy, triton: FakeTriton, settings: Settings) -> None:
        self.proxy, self.triton, self.settings = proxy, triton, settings
        self.client = Client(proxy, triton)

    async def change(self, *, access: Mapping[str, Any] | None = None, **batches: Any) -> None:
        """Apply new settings."""
        self.settings = changed(self.settings, access=access or {}, batches=batches)
        await apply_settings(self.app, self.settings, reload=False)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the body of an answer to a request with the key and *headers*."""
        async with self.proxy.client.request(method, path, json=body, headers={**KEY, **headers}) as response:
            return response.status, await response.json()

    async def make(self, endpoint: str, **headers: str) -> tuple[int, Any]:
        """Make a batch of two lines for *endpoint*."""
        if endpoint == "/v1/messages":
            requests = [{"custom_id": f"id-{number}", "params": MESSAGE} for number in range(2)]
            return await self.ask("POST", "/v1/messages/batches", {"requests": requests}, **headers)
        bodies = {
            "/v1/completions": {"model": "vllm", "prompt": "a"},
            "/v1/embeddings": {"model": "embeds", "input": "a"},
        }
        lines = [line(number, url=endpoint, body=bodies[endpoint]) for number in range(2)]
        file = await self.client.upload(jsonl(lines))
        body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        return await self.ask("POST", "/v1/batches", body, **headers)

    async def ended(self, made: Mapping[str, Any]) -> tuple[str, int, list[str]]:
        """Return how a batch has ended, how many lines succeeded, and the codes of its problems."""
        path = "/v1/messages/batches/" if made["id"].startswith("msgbatch") else "/v1/batches/"
        async with asyncio.timeout(120):
            while True:
                _, batch = await self.ask("GET", path + made["id"])
                if batch.get("processing_status") == "ended":
                    counts = batch["request_counts"]
                    return "ended", counts["succeeded"], ["errored"] if counts["errored"] else []
                if batch.get("status") in ("completed", "failed"):
                    problems = (batch["errors"] or {"data": []})["data"]
                    return batch["status"], batch["request_counts"]["completed"], [one["code"] for one in problems]
                await asyncio.sleep(0.01)

    @property
    def app(self) -> web.Application:
        """The application."""
        app: web.Application | None = self.proxy.client.app
        assert app is not None
        return app

    @property
    def asked(self) -> int:
        """How many requests models have got."""
        return len(self.triton.asked)


@asynccontextmanager
async def running(folder: Path, **access: Any) -> AsyncIterator[Service]:
    """Run the service before a model that generates and one that embeds."""
    async with FakeTriton(config_of("vllm"), EMBEDS) as triton:
        triton.responses = ({"text_output": "an answer"},)
        settings = changed(settings_of(folder, triton), access=access, defaults={"chat_template": "chatml"})
        async with serving(settings) as proxy:
            await proxy.ready()
            yield Service(proxy, triton, settings)


@every_case("endpoint, groups, is_closed", [
    ("/v1/completions", ("inference",), True),
    ("/v1/messages", ("inference",), True),
    # Embeddings are inference, unless they have an entry of their own.
    ("/v1/embeddings", ("inference",), True),
    ("/v1/embeddings", ("embedding",), True),
    ("/v1/completions", ("embedding",), False),
    ("/v1/messages", ("embedding",), False),
    ("/v1/completions", ("model-repository", "metrics", "info"), False),
])  # fmt: skip
async def test_a_batch_is_made_with_the_rights_of_its_lines(
    tmp_path: Path, endpoint: str, groups: tuple[Any, ...], is_closed: bool
) -> None:
    """A batch for a restricted API needs the header, as each of its lines would; without it no model is asked."""
    folder = tmp_path / f"{endpoint.replace('/', '-')}{'-'.join(groups)}"
    async with running(folder, openai_restricted_api=(restricted(*groups),)) as service:
        status, answer = await service.make(endpoint)
        assert (401 if is_closed else 200) == status, answer
        if is_closed:
            assert 0 == service.asked
            for wrong in ("Secret", "", "secret2"):
                assert 401 == (await service.make(endpoint, **{"admin-key": wrong}))[0]
        status, made = await service.make(endpoint, **OPEN)
        assert 200 == status, made
        # The stand-in for Triton has no answers to embeddings.
        assert endpoint == "/v1/embeddings" or 2 == (await service.ended(made))[1]


@every_case("endpoint", ["/v1/completions", "/v1/messages"])
async def test_an_api_that_is_restricted_in_between(tmp_path: Path, endpoint: str) -> None:
    """A batch that was made without the header ends when the API is restricted; one with the header goes on."""
    folder = tmp_path / endpoint.replace("/", "-")
    async with running(folder) as service:
        await service.change(paused=True)
        _, before = await service.make(endpoint)
        await service.change(access={"openai_restricted_api": (restricted("inference"),)})
        _, after = await service.make(endpoint, **OPEN)
        await service.change(paused=False)
        assert 2 == (await service.ended(after))[1]
        _, succeeded, codes = await service.ended(before)
        assert 0 == succeeded
        assert codes in (["invalid_auth"], ["errored"])
        # The header's value is another one: whoever made the batch may not know it.
        await service.change(paused=True)
        _, older = await service.make(endpoint, **OPEN)
        await service.change(access={"openai_restricted_api": (restricted("inference", value="new"),)}, paused=False)
        assert 0 == (await service.ended(older))[1]


async def test_a_key_that_loses_a_right(tmp_path: Path) -> None:
    """Lines need the models and the right to batches that their key has when they run, not when they were made."""
    keys = tmp_path / "keys.yaml"
    access = {"api_key": (), "api_keys_file": keys}
    keys.write_text("keys: [{name: one, key: sk-1, batch: true}]")
    async with running(tmp_path, **access) as service:
        await service.change(paused=True)
        _, first = await service.make("/v1/completions")
        keys.write_text("keys: [{name: one, key: sk-1, batch: true, models: [embeds]}]")
        await service.change(paused=False)
        assert 0 == (await service.ended(first))[1]
        keys.write_text("keys: [{name: one, key: sk-1, batch: true}]")
        await service.change(paused=True)
        _, second = await service.make("/v1/messages")
        keys.write_text("keys: [{name: one, key: sk-1}]")
        await service.change(paused=False)
        assert 403 == (await service.ask("GET", f"/v1/messages/batches/{second['id']}"))[0]
        files = service.app[SERVICE].files
        assert files is not None
        store = files.store
        async with asyncio.timeout(120):
            batch = await store.batches.find(second["id"], "one", "anthropic")
            while batch is not None and batch.open:
                await asyncio.sleep(0.01)
                batch = await store.batches.find(second["id"], "one", "anthropic")
        assert batch is not None
        assert ("failed", 0) == (batch.status, batch.succeeded)
        assert ["key_not_sufficient"] == [problem.code for problem in batch.problems]
        assert 0 == service.asked


@every_case("rights, may_batch", [
    ("", False),
    (", requests_per_minute: 5", False),
    (", models: [vllm]", False),
    (", batch: false, batch_tokens_per_minute: 10", False),
    (", batch: true", True),
    (", batch_tokens_per_minute: 100000", True),
])  # fmt: skip
async def test_a_keys_file_that_says_nothing_of_batches(tmp_path: Path, rights: str, may_batch: bool) -> None:
    """A file that is older than batches does not open them."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: one, key: sk-1{rights}}}]")
    async with running(tmp_path, api_key=(), api_keys_file=keys) as service:
        assert (200 if may_batch else 403) == (await service.ask("GET", "/v1/files"))[0]
        assert (200 if may_batch else 403) == (await service.ask("GET", "/v1/messages/batches"))[0]


@every_case("limits", [
    {"requests_per_minute": 2},
    {"tokens_per_minute": 1},
    {"batch_tokens_per_minute": 1},
    {"requests_per_minute": 2, "tokens_per_minute": 10**6},
])  # fmt: skip
async def test_limits_hold_for_lines(tmp_path: Path, limits: dict[str, int], clock: Clock) -> None:
    """Lines beyond what the key may use in a minute wait, and none fails; live requests share the limits."""
    clock.run()
    folder = tmp_path / "-".join(f"{name}-{number}" for name, number in limits.items())
    folder.mkdir()
    keys = folder / "keys.yaml"
    further = "".join(f", {name}: {number}" for name, number in limits.items())
    keys.write_text(f"keys: [{{name: one, key: sk-1, batch: true{further}}}]")
    async with running(folder, api_key=(), api_keys_file=keys) as service:
        service.app[AUTHORIZER].limits = RateLimits(clock)
        made = await service.client.create([line(number) for number in range(6)])
        # A line that runs counts for one token.
        most = 2 if "requests_per_minute" in limits else 1
        # An attempt that does not come to the model counts for the rest of its minute.
        async with asyncio.timeout(300):
            while service.asked < most:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
        for _ in range(40):
            await asyncio.sleep(0.005)
        assert service.asked <= most
        status, _ = await service.ask("POST", "/v1/completions", {"model": "vllm", "prompt": "a"})
        assert (200 if "batch_tokens_per_minute" in limits else 429) == status
        batch = made
        while batch["completed_at"] is None:
            # Each leap has the service look at Triton again, and many timers end.
            clock.advance(120)
            await asyncio.sleep(0.01)
            _, batch = await service.client.call("GET", f"/v1/batches/{made['id']}")
        assert {"total": 6, "completed": 6, "failed": 0} == batch["request_counts"]


async def test_limits_of_a_gateways_tenants_hold_for_lines(tmp_path: Path) -> None:
    """A tenant has the same limits in its batches as in its requests, with and without keys."""
    gateway = GatewaySettings(requests_per_minute=7)
    for keys, owner in (("one:sk-1",), "one/tenant"), ((), "tenant"):
        async with running(tmp_path, api_key=keys, trust_gateway=True, gateway=gateway) as service:
            key = service.app[AUTHORIZER].key_named(owner)
            assert key is not None
            assert 7 == key.limit.requests_per_minute
