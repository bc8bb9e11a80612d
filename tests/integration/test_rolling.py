"""Replicas that are replaced one by one, behind a load balancer and under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp

from tests.balancers import balancing
from tests.clients.service import Service, serving, steered
from tests.programs import find
from tests.triton_fixture import TestTriton

_CLIENTS = 32
# A stream takes more than a second, of few tokens: the load is that of many at once, and not of many that begin.
_TEXT, _REPEAT = "one two three four", 1
_BODY = {
    "model": "vllm_model",
    "prompt": steered(text=_TEXT, repeat=_REPEAT, delay_ms=300),
    "max_tokens": 64,
    "stream": True,
}


class Clients:
    """Clients that ask again and again, and what went wrong."""

    def __init__(self, port: int) -> None:
        self.answered = 0
        self.problems: list[str] = []
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._enough = False

    async def run(self) -> None:
        """Ask until :meth:`stop`."""
        # Each request over a connection of its own: how a balancer ends kept ones is its own affair.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._ask(session) for _ in range(_CLIENTS)))

    def stop(self) -> None:
        """Let what runs end, and ask no more."""
        self._enough = True

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        while not self._enough:
            try:
                async with session.post(self._url, json=_BODY) as response:
                    body = await response.read()
            except aiohttp.ClientError as error:
                self.problems.append(repr(error))
                continue
            events = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event[:1] != ":"]
            if response.status != 200 or events[-2:] != ["[DONE]", ""]:
                self.problems.append(f"{response.status} {body[-300:]!r}")
            elif (text := _text(events[:-2])) != _TEXT * _REPEAT:
                self.problems.append(f"an answer lost something: {text!r}")
            else:
                self.answered += 1


def _text(events: list[str]) -> str:
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices).strip()


async def test_no_request_is_lost(triton: TestTriton, tmp_path: Path) -> None:
    """
    Two replicas are replaced one after the other while 32 clients stream: every answer is whole.

    One of them has two workers. They stand behind nginx where it is installed, else behind a balancer of the tests'
    own.
    """
    balancer = "nginx" if find("nginx") else "relay"
    async with contextlib.AsyncExitStack() as stack:
        balanced, follower = await stack.enter_async_context(balancing(balancer, tmp_path))

        async def replica(name: str, workers: int) -> Service:
            folder = tmp_path / name
            folder.mkdir()
            # Over HTTP, a Triton that gets too little of a busy machine drops responses, the end of an answer too.
            arguments = ("--triton-url", triton.grpc_url, "--workers", str(workers))
            # The balancer notices within less than a second, but not while the machine stands still.
            patience = ("--shutdown-delay", "10", "--shutdown-grace", "120")
            started = serving(folder, *arguments, *patience, XDG_RUNTIME_DIR=str(folder))
            return await asyncio.to_thread(stack.enter_context, started)

        # Started together, because that takes longest; the balancer hears of each when its time has come.
        replicas = [replica("old-0", 1), replica("old-1", 2), replica("new-0", 1), replica("new-1", 1)]
        *old, first, second = await asyncio.gather(*replicas)
        for service in old:
            await follower.add(service.port)
        clients = Clients(balanced.port)
        running = asyncio.create_task(clients.run())
        for service, new in zip(old, (first, second), strict=True):
            await _answers(clients, _CLIENTS)
            await follower.add(new.port)
            # A replica that Triton does not answer in time is away for a moment.
            while not {new.port, service.port} <= follower.ready:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.02)
            service.process.terminate()
            assert 0 == await asyncio.to_thread(service.process.wait, 120)
            assert [] == service.complaints()
        await _answers(clients, _CLIENTS)
        clients.stop()
        try:
            await asyncio.wait_for(running, 120)
        except TimeoutError:
            clients.problems.append("an answer did not end")

    assert [] == clients.problems
    assert clients.answered >= 3 * _CLIENTS


async def _answers(clients: Clients, count: int) -> None:
    """Wait for *count* more answers."""
    enough = clients.answered + count
    while clients.answered < enough and not clients.problems:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.02)
