"""Limits of whole batches: enqueued tokens by key and model, and inputs of embedding requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.store_fixture import Place
from tests.unit.api.test_batches import MODEL, Client, line, settings_of
from triton_openai.api.bodies import text_size
from triton_openai.batches.inputs import InputReader
from triton_openai.config.tree import BatchesSettings, ModelSettings
from triton_openai.storage.batch_records import Batch


def sized(tokens: int) -> dict[str, Any]:
    """Return a line with about so many input tokens."""
    body = {"model": MODEL, "prompt": "", "max_tokens": 1}
    body["prompt"] = "x" * (4 * tokens - len(json.dumps(body)))
    return line(0, body=body)


async def test_enqueued_tokens_count_until_a_batch_ends(place: Place, tmp_path: Path) -> None:
    """A batch beyond them fails and names the limit; other keys have their own, and what ends is free again."""
    async with FakeTriton(config_of(MODEL)) as triton:
        triton.responses = ({"text_output": "an answer"},)
        settings = settings_of(tmp_path, triton)
        batches = BatchesSettings(store=place.batches, max_enqueued_tokens=1000, paused=True)
        settings = replace(settings, batches=batches, files=replace(settings.files, store=place.files))
        async with serving(settings) as proxy:
            await proxy.ready()
            one = Client(proxy, triton)
            two = Client(proxy, triton, "sk-2")

            async def status_of(client: Client, tokens: int) -> tuple[str, dict[str, Any]]:
                batch = await client.create([sized(tokens)])
                while batch["status"] == "validating":
                    await asyncio.sleep(0.01)
                    _, batch = await client.call("GET", f"/v1/batches/{batch['id']}")
                return batch["status"], batch

            assert "failed" == (await status_of(one, 1001))[0]
            status, first = await status_of(one, 600)
            assert "in_progress" == status
            status, second = await status_of(one, 401)
            assert "failed" == status
            (error,) = second["errors"]["data"]
            assert "token_limit_exceeded" == error["code"]
            assert "1,000" in error["message"]
            assert MODEL in error["message"]
            assert "in_progress" == (await status_of(one, 400))[0]
            assert "in_progress" == (await status_of(two, 1000))[0]
            await one.call("POST", f"/v1/batches/{first['id']}/cancel")
            assert "cancelled" == (await one.ended(first))["status"]
            assert "in_progress" == (await status_of(one, 600))[0]


async def test_batches_at_the_same_time_have_one_limit(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are validated together do not exceed it together."""
    async with FakeTriton(config_of(MODEL)) as triton:
        settings = settings_of(tmp_path, triton)
        batches = BatchesSettings(store=place.batches, max_enqueued_tokens=1000, paused=True)
        settings = replace(settings, batches=batches, files=replace(settings.files, store=place.files))
        async with serving(settings) as proxy:
            await proxy.ready()
            client = Client(proxy, triton)
            made = await asyncio.gather(*(client.create([sized(300)]) for _ in range(6)))
            statuses = []
            for batch in made:
                while batch["status"] == "validating":
                    await asyncio.sleep(0.01)
                    _, batch = await client.call("GET", f"/v1/batches/{batch['id']}")  # noqa: PLW2901
                statuses.append(batch["status"])
            assert 3 == statuses.count("in_progress"), statuses


async def test_messages_beyond_the_limit_say_so(tmp_path: Path) -> None:
    """A batch of Anthropic's API has no errors of its own: each of its requests has the reason."""
    async with (
        FakeTriton(config_of(MODEL)) as triton,
        serving(settings_of(tmp_path, triton, max_enqueued_tokens=10)) as proxy,
    ):
        await proxy.ready()
        client = Client(proxy, triton)
        params = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 100}]}
        requests = [{"custom_id": f"id-{number}", "params": params} for number in range(3)]
        _, batch = await client.call("POST", "/v1/messages/batches", json={"requests": requests})
        path = f"/v1/messages/batches/{batch['id']}"
        while batch["processing_status"] != "ended":
            await asyncio.sleep(0.01)
            _, batch = await client.call("GET", path)
        assert 3 == batch["request_counts"]["errored"]
        headers = {"Authorization": "Bearer sk-1"}
        async with proxy.client.get(f"{path}/results", headers=headers) as response:
            results = [json.loads(one) for one in (await response.text()).splitlines()]
        assert ["id-0", "id-1", "id-2"] == [one["custom_id"] for one in results]
        assert "Enqueued token limit" in results[0]["result"]["error"]["error"]["message"]
        assert [] == triton.asked


async def test_a_model_can_have_another_number(tmp_path: Path) -> None:
    """The setting of a model takes the place of that of all, also without the latter, and by any of its names."""
    async with FakeTriton(config_of(MODEL)) as triton:
        settings = settings_of(tmp_path, triton, paused=True)
        models = {MODEL: ModelSettings(max_enqueued_tokens=100, aliases=("other",))}
        async with serving(replace(settings, models=models)) as proxy:
            await proxy.ready()
            client = Client(proxy, triton)
            under_alias = sized(60)
            under_alias["body"]["model"] = "other"
            batch = await client.ended(await client.create([sized(60), {**under_alias, "custom_id": "b"}]))
            assert "token_limit_exceeded" == batch["errors"]["data"][0]["code"]


@every_case(
    "inputs, number",
    [
        (['"a"', '"b"'], 2),
        (['["a", "b", "c"]'], 3),
        (["[1, 2, 3]"], 1),
        (["[[1, 2], [3]]", '"a"'], 3),
        (["[]", "null", ' [ "a" , "b" ] '], 4),
    ],
)
def test_embedding_inputs_count_one_by_one(inputs: list[str], number: int, tmp_path_factory: Any) -> None:
    """A text is one, token ids are one, and a list of either is as many as it has; one too many is reported once."""
    path = tmp_path_factory.mktemp("inputs") / "input"
    lines = [
        f'{{"custom_id": "{at}", "method": "POST", "url": "/v1/embeddings", "body": {{"model": "m", "input": {one}}}}}'
        for at, one in enumerate(inputs)
    ]
    path.write_text("\n".join(lines))
    batch = Batch(
        id="b", owner="", kind="openai", endpoint="/v1/embeddings", input="f", created=0, window="24h", expires=1
    )
    for limit, codes in ((number, []), (number - 1, ["too_many_embedding_inputs"])):
        with path.open("rb") as file:
            reader = InputReader(
                file.fileno(), batch, max_requests=100, max_line_size=10_000, max_inputs=limit,
                check_line=lambda _: None, check_body=lambda _: None,
            )  # fmt: skip
            while reader.read(1):
                pass
            assert codes == [problem.code for problem in reader.problems], (inputs, limit)
            reader.close()


def test_images_are_no_text() -> None:
    """The bytes of an image or of a file in base64 count for no tokens."""
    image = "data:image/png;base64," + "A" * 100_000
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]}
    assert text_size(json.dumps(body).encode()) < 200
    assert len(b'{"data": ""}') == text_size(b'{"data": "QUJD"}')


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a bucket pass through the state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
