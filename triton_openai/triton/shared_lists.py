"""
The lists of models in a service of several processes: one process looks at the Tritons, and the others follow it.

The process that looks publishes each list that has changed. If it ends or hangs, another one looks.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from triton_openai.triton.catalog import Snapshot

# The time limit of a look by another process. After it, each process looks for itself.
_LOOK_SECONDS = 5.0
# The process that looks sends a heartbeat in each interval. After this number of intervals without one, the others look
# for themselves.
_SILENT_INTERVALS = 3


class ListChannel(Protocol):
    """The channel to the other processes of a service."""

    async def follow(self, lists: SharedLists) -> tuple[bool, Mapping[str, bytes]]:
        """Call *lists* from now on; return whether this process looks, and the newest lists."""

    def publish(self, name: str, data: bytes | None) -> None:
        """Publish a new list; ``None`` if the Triton has left."""

    def beat(self) -> None:
        """Send a heartbeat: this process looks."""

    def ask(self, name: str, reload: bool) -> asyncio.Future[bool | None]:
        """Make the process that looks do so now. Its new list has arrived when the result is true."""


class SharedLists:
    """
    This process's side of the lists, over a *channel*.

    The process that looks sends a heartbeat every *interval* seconds. *look* looks at the list of the Triton of a name,
    and returns whether it is known here; *follow* uses a new list of another process.
    """

    def __init__(
        self,
        channel: ListChannel,
        interval: float,
        *,
        look: Callable[[str, bool], Coroutine[Any, Any, bool]],
        follow: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._interval = interval
        #: Called by the other processes, as :meth:`lead`, :meth:`beat` and :meth:`take` are.
        self.look = look
        self._follow = follow
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

    async def join(self) -> None:
        """Begin to share. If no process answers, this process looks for itself."""
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
        """Become the process that looks."""
        self.leads = True
        self._leading.set()

    def beat(self) -> None:
        """Take the heartbeat of the process that looks."""
        self._last_beat = asyncio.get_running_loop().time()

    def take(self, name: str, data: bytes | None) -> None:
        """Take the new list of the Triton *name*; ``None`` if the Triton has left."""
        if data is None:
            self.newest.pop(name, None)
            return
        self.newest[name] = pickle.loads(data)
        self._follow(name)
