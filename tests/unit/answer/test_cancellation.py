"""A cancellation is never lost, also not one that arrives in the same turn of the loop as the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import aiohttp
import pytest

from tests.pictures import png
from triton_openai.answer.run_group import collect
from triton_openai.media.fetch import AllowedHosts, Fetcher
from triton_openai.tasks import Background
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.http_stream import ConnectionPool


async def cancel_at_every_turn(start: Callable[[], Coroutine[Any, Any, asyncio.Task[Any]]]) -> Any:
    """Start the work again and again, cancel it one turn of the loop later each time, and return its result."""
    for turns in range(1, 1000):
        task = await start()
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            # Only a task that has ended refuses to be cancelled.
            assert turns > 2
            return task.result()
        with pytest.raises(asyncio.CancelledError):
            await task
    pytest.fail("The work never ends.")


async def soon(result: Any = None) -> Any:
    """Return *result* after some turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)
    return result


def started(function: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Coroutine[Any, Any, asyncio.Task[Any]]]:
    """Return what starts a task of *function*."""

    async def start() -> asyncio.Task[Any]:
        return asyncio.create_task(function())

    return start


async def test_a_connection_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose client left while its connection was made is not sent."""

    async def connect(protocol: Callable[[], asyncio.Protocol], *_: Any, **__: Any) -> Any:
        connection = protocol()
        transport = MagicMock()
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        return await soon((transport, connection))

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    pool = ConnectionPool("http://127.0.0.1:1", ConnectionSettings(connect_timeout=60))

    assert (await cancel_at_every_turn(started(pool.connect))).usable


async def test_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch ends with the request that wants the image."""

    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield await soon(png())

    @contextlib.asynccontextmanager
    async def get(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=200, content_type="image/png", content=SimpleNamespace(iter_chunked=pieces))

    monkeypatch.setattr(aiohttp.ClientSession, "get", get)
    fetcher = Fetcher(hosts=AllowedHosts(("images.example",)), max_size=100_000, timeout=60, concurrency=1)

    image = await cancel_at_every_turn(started(lambda: fetcher.fetch("https://images.example/a.png")))

    assert png() == image
    await fetcher.close()


async def test_background_work() -> None:
    """Work that is cancelled at the end of the service does not look as if it had succeeded."""

    async def start() -> asyncio.Task[Any]:
        before = asyncio.all_tasks()
        Background().start(soon(), timeout=60)
        (task,) = asyncio.all_tasks() - before
        return task

    assert await cancel_at_every_turn(start) is None


async def test_a_whole_answer() -> None:
    """An answer that is not streamed ends with its client."""
    runs: list[Mock] = []

    def work() -> Coroutine[Any, Any, Any]:
        run = Mock(failure=None, finalize=soon, check=lambda _: 60.0)
        run.start = lambda number, push, tell: asyncio.get_running_loop().call_soon(tell, number)
        runs.append(run)
        return collect([run], timeout=60)

    (answer,) = await cancel_at_every_turn(started(work))

    assert "" == answer.text
    for run in runs:
        run.close.assert_called_once_with()
