"""What ends when an operator removes a key, and what the log says of a file that others can read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import ClientPayloadError

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.access import authorizer as authorizers
from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.app import apply_settings
from triton_openai.config.reload import Source
from triton_openai.config.tree import AccessSettings, GatewaySettings, ModelDefaults, Settings, TritonSettings

COMPLETION = {"model": "m", "prompt": "a"}
RESPONSE = {"model": "m", "input": "a"}
BEFORE = "keys: [{name: one, key: [sk-1, sk-old]}, {name: two, key: sk-2}]"
AFTER = "keys: [{name: one, key: sk-1}, {name: three, key: sk-3}]"


@pytest.fixture(autouse=True)
def _only_the_test_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks at the file of keys once a second too, and would take a change between two looks of a test."""
    monkeypatch.setattr(authorizers, "LOOK_SECONDS", 3600.0)


@every_case("path, body", [
    ("/v1/completions", {**COMPLETION, "stream": True}),
    ("/v1/completions", COMPLETION),
    ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/v1/responses", {**RESPONSE, "stream": True, "background": True}),
])  # fmt: skip
async def test_requests_of_a_removed_key_end(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """
    What runs with a key ends when the key is removed, also where its name stays; others go on.

    So does what a tenant of a gateway runs with it.
    """
    file = tmp_path / "keys.yaml"
    file.write_text(BEFORE)
    access = AccessSettings(api_keys_file=file, trust_gateway=True, gateway=GatewaySettings())
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = ({"text_output": "one"}, {"text_output": " two"})
        triton.may_go_on.clear()
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)), access=access, defaults=ModelDefaults(chat_template="chatml")
        )
        async with serving(settings) as proxy:
            await proxy.ready()

            async def ask(key: str, **headers: str) -> tuple[int, bytes]:
                headers = {"api-key": key, **headers}
                async with proxy.client.post(path, json=body, headers=headers) as response:
                    content = b""
                    try:
                        async for piece in response.content.iter_any():
                            content += piece
                    except ClientPayloadError:
                        # A stream that ends with an error breaks off.
                        pass
                    return response.status, content

            tenant = {"x-llm-d-inference-fairness-id": "tenant"}
            asking = [asyncio.create_task(ask(key)) for key in ("sk-1", "sk-old", "sk-2")]
            asking.append(asyncio.create_task(ask("sk-2", **tenant)))
            while len(triton.asked) < 4:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
            file.write_text(AFTER)
            assert proxy.client.app is not None
            keys = proxy.client.app[AUTHORIZER]
            for _ in range(2):
                # The file has to look the same twice.
                if await keys.keys.reload():
                    keys._keys_changed()
            stays, *ended = asking
            for task in ended:
                status, content = await asyncio.wait_for(task, 120)
                # A stream may have begun.
                assert status == 401 or (status == 200 and "stream" in body)
                assert b"The API key was removed." in content
                assert b" two" not in content
            triton.may_go_on.set()
            status, content = await asyncio.wait_for(stays, 120)
            assert 200 == status
            assert b"was removed" not in content
            assert content.rstrip().endswith((b"[DONE]", b"}"))


async def test_a_key_that_new_settings_remove(tmp_path: Path) -> None:
    """The same holds for keys of the settings."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = ({"text_output": "one"}, {"text_output": " two"})
        triton.may_go_on.clear()
        connection = TritonSettings(url=(triton.url,))
        async with serving(Settings(triton=connection, access=AccessSettings(api_key=("a:sk-1", "b:sk-2")))) as proxy:
            await proxy.ready()
            asking = asyncio.create_task(proxy.post("/v1/completions", COMPLETION, **{"api-key": "sk-1"}))
            while not triton.asked:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
            assert proxy.client.app is not None
            new = Settings(triton=connection, access=AccessSettings(api_key=("b:sk-2",)))
            await apply_settings(proxy.client.app, new, reload=False)
            assert "invalid_api_key" == (await asyncio.wait_for(asking, 120)).error["code"]


@every_case("mode, warns", [(0o644, True), (0o604, True), (0o666, True), (0o640, False), (0o600, False)])
async def test_a_file_of_keys_that_others_can_read(tmp_path: Path, mode: int, warns: bool) -> None:
    """The log warns of it at the start, and of each new file."""
    file = tmp_path / "keys.yaml"
    file.write_text(BEFORE)
    file.chmod(mode)
    event = "every user of this machine can read the file of API keys"
    with structlog.testing.capture_logs() as lines:
        async with serving(Settings(access=AccessSettings(api_keys_file=file))) as proxy:
            assert [event] * warns == [line["event"] for line in lines if line["event"] == event]
            lines.clear()
            assert proxy.client.app is not None
            authorizer = proxy.client.app[AUTHORIZER]
            (tmp_path / "next").write_text(AFTER)
            (tmp_path / "next").chmod(mode)
            os.replace(tmp_path / "next", file)  # noqa: PTH105
            for _ in range(2):
                if await authorizer.keys.reload():
                    authorizer._keys_changed()
            assert [event] * warns == [line["event"] for line in lines if line["event"] == event]


@every_case("text, has_secrets", [
    ("access: {api_key: [sk-1]}", True),
    ("access: {openai_restricted_api: [{apis: [info], header: a, value: b}]}", True),
    ("access: {limits_store: 'redis://user:password@host/0'}", True),
    ("batches: {store: 'postgresql://user:password@host/db'}", True),
    ("access: {limits_store: 'redis://host/0', api_keys_file: keys.yaml}", False),
    ("responses: {store: 'sqlite:/tmp/a'}", False),
    ("server: {port: 1}", False),
    ("[not, a, mapping]", False),
    ("access: 1", False),
    ("{", False),
])  # fmt: skip
def test_a_settings_file_with_secrets(tmp_path: Path, text: str, has_secrets: bool) -> None:
    """Whether others may read the settings file is a matter only where it holds a secret."""
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert has_secrets == Source(Settings, file).has_secrets()
