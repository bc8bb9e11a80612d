"""A stream that fails in the middle: each client gets the error first, and then no clean end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests import chromium
from tests.balancers import Nginx
from tests.conformance.calls import in_session_loop, steered
from tests.programs import needs
from tests.proxy_fixture import Proxy, read
from triton_openai.serving import http_output
from triton_openai.serving.http_output import CLOSE_SECONDS

pytestmark = in_session_loop
BODY = {
    "model": "vllm_model",
    "messages": [{"role": "user", "content": steered(text="one two three", fail_at=2, error="out of luck")}],
    "stream": True,
}
# Programs that are busy for a second would not see the error: a process that has just begun may be.
PATIENCE = 5.0
SCRIPT = """(async () => {
    const found = await Promise.all([0, 20].map(async (pause) => {
        let text = "";
        try {
            const response = await fetch(%s, { method: "POST", headers: %s, body: %s });
            const reader = response.body.getReader();
            for (;;) {
                const { value, done } = await reader.read();
                if (done) break;
                text += new TextDecoder().decode(value);
                await new Promise((go) => setTimeout(go, pause));
            }
            return "whole";
        } catch (error) {
            return error.constructor.name + " " + /event: error\\ndata: .*out of luck.*\\n\\n$/.test(text);
        }
    }));
    return found.join();
})()"""


@pytest.fixture(autouse=True)
def _real_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let broken streams end as late as outside of tests: some clients need it."""
    monkeypatch.setattr(http_output, "CLOSE_SECONDS", CLOSE_SECONDS)


def script(url: str) -> str:
    """Return JavaScript that reads two streams, one of them slowly, and gives what came of it."""
    return SCRIPT % tuple(map(json.dumps, (url, {"Content-Type": "application/json"}, json.dumps(BODY))))


@pytest.fixture(params=["direct", *(pytest.param(name, marks=needs("nginx")) for name in ("nginx", "buffering nginx"))])
async def address(request: pytest.FixtureRequest, proxies: dict[str, Proxy], tmp_path: Path) -> AsyncIterator[str]:
    """The service's own address, and those of an nginx before it, which buffers or does not."""
    client = proxies["http"].client
    if request.param == "direct":
        yield str(client.make_url("/")).rstrip("/")
        return
    relay = Nginx(tmp_path / "nginx", buffering=request.param == "buffering nginx")
    await relay.use([client.port or 0])
    try:
        yield f"http://127.0.0.1:{relay.port}"
    finally:
        await relay.close()


async def by_openai(url: str) -> None:
    """The official client raises the error itself."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        call: Any = client.chat.completions.create
        with pytest.raises(openai.APIError, match="out of luck"):
            async for _ in await call(**BODY):
                pass


async def by_wire(url: str) -> None:
    """Who believes a clean end sees none, and who reads the names of events finds one."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=BODY) as response,
    ):
        body, broken = await read(response)
    assert broken
    assert [b"event: error"] == [line for line in body.splitlines() if line.startswith(b"event:")]
    assert b"[DONE]" not in body


async def output(*command: str) -> tuple[int | None, str]:
    """Return the exit status and the output of *command*."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    text, _ = await process.communicate()
    return process.returncode, text.decode()


async def by_curl(url: str) -> None:
    """Exit status 18: a part of the file."""
    body = ("-H", "Content-Type: application/json", "-d", json.dumps(BODY))
    status, text = await output("curl", "--silent", "--noproxy", "*", f"{url}/v1/chat/completions", *body)
    assert 18 == status
    assert "event: error\ndata: " in text


async def by_node(url: str) -> None:
    """Node's own ``fetch``."""
    http_output.CLOSE_SECONDS = PATIENCE
    status, text = await output("node", "-e", f"{script(f'{url}/v1/chat/completions')}.then((t) => console.log(t))")
    assert (0, "TypeError true,TypeError true") == (status, text.strip())


@pytest.mark.parametrize(
    "ask",
    [by_openai, by_wire, pytest.param(by_curl, marks=needs("curl")), pytest.param(by_node, marks=needs("Node.js"))],
)
async def test_clients_see_the_error_and_then_a_broken_end(ask: Callable[[str], Awaitable[None]], address: str) -> None:
    """Clients see the error and then a broken end, directly and behind nginx."""
    await ask(address)


@pytest.mark.extended
@needs("Chromium")
async def test_a_browser_sees_the_error_and_then_a_broken_end(proxies: dict[str, Proxy], tmp_path: Path) -> None:
    """A browser that takes its time sees the error, though it drops what is unread at such an end."""
    http_output.CLOSE_SECONDS = PATIENCE
    async with chromium.tab(tmp_path) as tab:
        await tab.open(str(proxies["http"].client.make_url("/")))
        assert "TypeError true,TypeError true" == await tab.run(script("/v1/chat/completions"))
