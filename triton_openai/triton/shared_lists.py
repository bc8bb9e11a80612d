"""
The lists of models of a service of several processes: one looks at the Tritons, and the others follow.

Whoever looks publishes each list that has changed. Should it end or hang, another one looks.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from triton_openai.triton.catalog import Snapshot

# Longest wait for a look that another process makes. Then each looks for itself.
_LOOK_SECONDS = 5.0
# Who looks says so in each interval. After so many without a word, the others look for themselves.
_SILENT_INTERVALS = 3


class ListListener(Protocol):
    """What the other processes tell a process about the lists."""

    def lead(self) -> None:
        """Be the one that looks, from now on."""

    def beat(self) -> None:
        """Take note that another process looks."""

    def take(self, name: str, data: bytes | None) -> None:
        """Take the new list of the Triton *name*; ``None`` where it has left."""

    def look(self, name: str, reload: bool) -> Coroutine[Any, Any, bool]:
        """Look at the list of the Triton *name*; return whether it is known here."""


class ListChannel(Protocol):
    """The way to the other processes of a service."""

    async def follow(self, listener: ListListener) -> tuple[bool, Mapping[str, bytes]]:
        """Share the lists, of which *listener* hears; return whether this process looks, and the newest lists."""

    def publish(self, name: str, data: bytes | None) -> None:
        """Give the others a new list; ``None`` where the Triton has left."""

    def beat(self) -> None:
        """Tell the others that this process looks."""

    def ask(self, name: str, reload: bool) -> asyncio.Future[bool | None]:
        """Have the process that looks do so now. Its new list has arrived when the result is true."""


class Looker(Protocol):
    """Who has the lists of this process: the fleet."""

    async def look(self, name: str, reload: bool) -> bool:
        """Look at the list of the Triton *name*; return whether it is known here."""

    def follow(self, name: str) -> None:
        """Take the new list of the Triton *name*."""


class SharedLists:
    """
    This process's side of the lists, over a *channel*; see :class:`ListListener` for what the others call.

    Who looks says so every *interval* seconds.
    """

    def __init__(self, channel: ListChannel, interval: float) -> None:
        self._channel = channel
        self._interval = interval
        self._looker: Looker
        #: Whether this is the process that looks.
        self.leads = False
        #: By the name of a Triton, as the process that looks has published it.
        self.newest: dict[str, Snapshot] = {}
        self._heard = 0.0
        self._leading = asyncio.Event()

    @property
    def follows(self) -> bool:
        """Whether another process looks."""
        now = asyncio.get_running_loop().time()
        return not self.leads and now - self._heard < _SILENT_INTERVALS * self._interval

    async def join(self, looker: Looker) -> None:
        """Begin to share. Without an answer this process looks for itself."""
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
        """Tell the others that this process looks, while it does, until cancelled."""
        while True:
            await self._leading.wait()
            self._channel.beat()
            await asyncio.sleep(self._interval)

    async def ask(self, name: str, reload: bool) -> bool:
        """Have the process that looks do so now; return whether :attr:`newest` has its list."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                looked = await self._channel.ask(name, reload)
        except TimeoutError:
            return False
        return bool(looked) and name in self.newest

    def publish(self, name: str, snapshot: Snapshot | None) -> None:
        """Give the others a new list; ``None`` where the Triton has left. Only who looks does."""
        if not self.leads:
            return
        if snapshot is None:
            self.newest.pop(name, None)
        else:
            self.newest[name] = snapshot
        self._channel.publish(name, None if snapshot is None else pickle.dumps(snapshot))

    # What the others call

    def lead(self) -> None:
        self.leads = True
        self._leading.set()

    def beat(self) -> None:
        self._heard = asyncio.get_running_loop().time()

    def take(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.newest.pop(name, None)
            return
        self.newest[name] = pickle.loads(data)
        self._looker.follow(name)

    async def look(self, name: str, reload: bool) -> bool:
        return await self._looker.look(name, reload)
