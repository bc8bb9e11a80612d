"""A headless Chromium for tests of the page, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.programs import found

_SECONDS = 120


class Tab:
    """One tab; *problems* are uncaught errors and what the browser logs, such as violations of the content policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of *method*."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_SECONDS):
            while (message := await self._socket.receive_json()).get("id") != number:
                shown = message.get("params", {})
                # An answer like 401 is no problem.
                if (
                    message.get("method") == "Runtime.exceptionThrown"
                    or shown.get("entry", {}).get("source") == "security"
                ):
                    self.problems.append(str(shown))
        assert "error" not in message, message
        return dict(message["result"])

    async def run(self, script: str) -> Any:
        """Return the value of *script*, awaited if it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Return the value of *condition* once it is true."""
        look = f"const value = {condition}; value ? done(value) : setTimeout(look, 20)"
        try:
            return await self.run(f"new Promise((done) => (function look() {{ {look} }})())")
        except TimeoutError:
            page = await self.text("body")
            raise AssertionError(f"never true: {condition}; the page shows {page}") from None

    async def open(self, url: str) -> None:
        """Go to *url*."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def type(self, selector: str, text: str) -> None:
        """Put *text* into the field *selector*, in place of what is in it."""
        value = f"at.value = {json.dumps(text)}; at.dispatchEvent(new Event('input', {{ bubbles: true }}))"
        await self.run(f"{{ const at = document.querySelector({selector!r}); {value} }}")

    async def click(self, selector: str) -> None:
        """Click."""
        await self.run(f"document.querySelector({selector!r}).click()")

    async def text(self, selector: str) -> str:
        """Return the text that *selector* shows."""
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))

    async def picture(self, width: int, height: int) -> bytes:
        """Return a PNG of the top of the page, in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.run("scrollTo(0, 0)")
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def tab(folder: Path, *, microphone: Path | None = None) -> AsyncIterator[Tab]:
    """
    Start the browser with its files in *folder* and yield a tab of it.

    It hears the WAV file *microphone* over and over, and lets every page do so.
    """
    hearing = [
        "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={microphone}",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        found("Chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", *(hearing if microphone is not None else []), "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reading: asyncio.Task[bytes] | None = None
    try:
        address = ""
        while not address:
            line = await asyncio.wait_for(process.stderr.readline(), _SECONDS)
            assert line, "the browser ended"
            address = line.decode().partition("DevTools listening on ws://")[2].partition("/")[0]
        # A pipe that nobody reads holds the browser when it is full.
        reading = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{address}/json/new?about:blank") as made:
                url = (await made.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                one = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await one.call(f"{domain}.enable")
                yield one
    finally:
        process.kill()
        await process.wait()
        if reading is not None:
            await reading
