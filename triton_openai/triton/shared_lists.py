"""
The lists of models in a service of several processes: one process looks at the Tritons, and the others follow it.

The process that looks publishes each list that has changed. If it ends or hangs, another one looks.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from triton_openai.triton.catalog import Snapshot

# The time limit of a look by another process. After it, each process looks for itself.
_LOOK_SECONDS = 5.0
# The process that looks sends a heartbeat in each interval. After this number of intervals without one, the others look
# for themselves.
_SILENT_INTERVALS = 3


class ListListener(Protocol):
    """Takes the messages of the other processes about the lists."""

    def lead(self) -> None:
        """Become the process that looks."""

    def beat(self) -> None:
        """Take the heartbeat of the process that looks."""

    def take(self, name: str, data: bytes | None) -> None:
        """Take the new list of the Triton *name*; ``None`` if the Triton has left."""

    def look(self, name: str, reload: bool) -> Coroutine[Any, Any, bool]:
        """Look at the list of the Triton *name*; return whether it is known here."""


class ListChannel(Protocol):
    """The channel to the other processes of a service."""

    async def follow(self, listener: ListListener) -> tuple[bool, Mapping[str, bytes]]:
        """Call *listener* from now on; return whether this process looks, and the newest lists."""

    def publish(self, name: str, data: bytes | None) -> None:
        """Publish a new list; ``None`` if the Triton has left."""

    def beat(self) -> None:
        """Send a heartbeat: this process looks."""

    def ask(self, name: str, reload: bool) -> asyncio.Future[bool | None]:
        """Make the process that looks do so now. Its new list has arrived when the result is true."""


class Looker(Protocol):
    """What looks at the Tritons in this process: the fleet."""

    async def look(self, name: str, reload: bool) -> bool:
        """Look at the list of the Triton *name*; return whether it is known here."""

    def follow(self, name: str) -> None:
        """Use the new list of the Triton *name*."""


class SharedLists:
    """
    This process's side of the lists, over a *channel*; see :class:`ListListener` for what the others call.

    The process that looks sends a heartbeat every *interval* seconds.
    """

    def __init__(self, channel: ListChannel, interval: float) -> None:
        self._channel = channel
        self._interval = interval
        self._looker: Looker
        #: Whether this is the process that looks.
        self.leads = False
        #: By the name of a Triton, as the process that looks has published it.
        self.newest: dict[str, Snapshot] = {}
        self._last_beat = 0.0
        self._leading = asyncio.Event()

    @property
    def follows(self) -> bool:
        """Whether another process looks."""
        now = asyncio.get_running_loop().time()
        return not self.leads and now - self._last_beat < _SILENT_INTERVALS * self._interval

    async def join(self, looker: Looker) -> None:
        """Begin to share. If no process answers, this process looks for itself."""
        self._looker = looker
        self.beat()
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                leads, lists = await self._channel.follow(self)
        except TimeoutError:
            leads = True
            lists = {}
        for name, data in lists.items():
            self.newest.setdefault(name, pickle.loads(data))
        if leads:
            self.lead()

    async def run(self) -> None:
        """Send heartbeats while this process looks, until cancelled."""
        while True:
            await self._leading.wait()
            self._channel.beat()
            await asyncio.sleep(self._interval)

    async def ask(self, name: str, reload: bool) -> bool:
        """Make the process that looks do so now; return whether :attr:`newest` has its list."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                looked = await self._channel.ask(name, reload)
        except TimeoutError:
            return False
        return bool(looked) and name in self.newest

    def publish(self, name: str, snapshot: Snapshot | None) -> None:
        """Publish a new list, if this process looks; ``None`` if the Triton has left."""
        if not self.leads:
            return
        if snapshot is None:
            self.newest.pop(name, None)
            self._channel.publish(name, None)
        else:
            self.newest[name] = snapshot
            self._channel.publish(name, pickle.dumps(snapshot))

    # What the others call

    def lead(self) -> None:
        self.leads = True
        self._leading.set()

    def beat(self) -> None:
        self._last_beat = asyncio.get_running_loop().time()

    def take(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.newest.pop(name, None)
            return
        self.newest[name] = pickle.loads(data)
        self._looker.follow(name)

    async def look(self, name: str, reload: bool) -> bool:
        return await self._looker.look(name, reload)
