"""
What the workers of one service share: the counts of rate limits, which models take no requests now, and the lists of
the models of each Triton, at which one worker looks for all.

The parent of the workers keeps it (:class:`SharedState`); a worker asks over its channel (:class:`SharedClient`). So
one event loop handles everything in order, without locks. When a worker ends, its share is released at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from triton_openai.access.rate_limits import Decision, RateLimit, RateLimits
from triton_openai.draining import ModelChange
from triton_openai.errors import ServiceOverloaded
from triton_openai.serving.workers.channel import Channel
from triton_openai.telemetry.metric_files import forget_worker
from triton_openai.triton.shared_lists import SharedLists

# Longest wait for the parent, which answers at once unless it is stopped.
_ANSWER_SECONDS = 5.0


class SharedState:
    """The parent's side. Workers are known by their numbers; their metrics are in the private *directory*."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._limits = RateLimits()
        self._running: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._channels: dict[int, Channel] = {}
        self._claims: dict[str, int] = {}
        # The models that each worker has closed.
        self._closed: defaultdict[int, set[str]] = defaultdict(set)
        # Those who share the lists, the one of them that looks, and the newest lists by Triton.
        self._followers: dict[int, Channel] = {}
        self._looker: int | None = None
        self._lists: dict[str, bytes] = {}

    def add(self, index: int, channel: Channel) -> None:
        """Add worker *index*, which has just begun to listen; it closes the models that others have closed."""
        self._channels[index] = channel
        for models in filter(None, self._closed.values()):
            channel.notify("apply", "close", models)

    def methods(self, index: int, channel: Channel) -> dict[str, Callable[..., Any]]:
        """Return what worker *index* at the other end of *channel* may call."""
        methods = (self.admit, self.leave, self.claim, self.unclaim, self.change, self.publish, self.beat, self.look)
        follow = partial(self.follow, index, channel)
        return {"follow": follow, **{method.__name__: partial(method, index) for method in methods}}

    def release_worker(self, index: int) -> None:
        """Release everything of worker *index*, which has ended."""
        forget_worker(self._directory, index)
        self._channels.pop(index, None)
        for name in self._running.pop(index, Counter()).elements():
            self._limits.leave(name, 0)
        self._claims = {model: owner for model, owner in self._claims.items() if owner != index}
        opened = self._closed.pop(index, None)
        if opened:
            for channel in self._channels.values():
                channel.notify("apply", "open", opened)
        self._followers.pop(index, None)
        if index == self._looker:
            self._looker = next(iter(self._followers), None)
            if self._looker is not None:
                self._followers[self._looker].notify("lead")

    def follow(self, index: int, channel: Channel) -> tuple[bool, dict[str, bytes]]:
        """Share the lists with worker *index*; return whether it is the one that looks, and the newest lists."""
        self._followers[index] = channel
        if self._looker is None:
            self._looker = index
        return self._looker == index, self._lists

    def publish(self, index: int, name: str, data: bytes | None) -> None:
        """Give the others the list of the Triton *name*, ``None`` where it has left, from the worker that looks."""
        if index != self._looker:
            return
        if data is None:
            self._lists.pop(name, None)
        else:
            self._lists[name] = data
        self._notify_followers("take", name, data)

    def beat(self, index: int) -> None:
        """Tell the others that worker *index* looks."""
        if index == self._looker:
            self._notify_followers("beat")

    def _notify_followers(self, method: str, *arguments: Any) -> None:
        for index, channel in self._followers.items():
            if index != self._looker:
                channel.notify(method, *arguments)

    async def look(self, index: int, name: str, reload: bool) -> bool | None:
        """Have the worker that looks do so now; what it publishes goes out before the answer."""
        if self._looker in (None, index):
            return False
        looked: bool | None = await self._followers[self._looker].call("look", name, reload)
        return looked

    def admit(self, index: int, name: str, limit: RateLimit) -> Decision:
        """Count a request of the key *name* in, if *limit* allows it."""
        decision = self._limits.decide(name, limit)
        if decision.refusal is None:
            self._running[index][name] += 1
        return decision

    def leave(self, index: int, name: str, tokens: int) -> None:
        """Count a request of the key *name* out, and the *tokens* that it used in."""
        running = self._running[index]
        running[name] -= 1
        if not running[name]:
            del running[name]
        self._limits.leave(name, tokens)

    def claim(self, index: int, models: Collection[str]) -> str | None:
        """Claim *models* for worker *index*: all, or none if one is claimed already, which is returned."""
        taken = next((model for model in models if model in self._claims), None)
        if taken is None:
            self._claims.update(dict.fromkeys(models, index))
        return taken

    def unclaim(self, index: int, models: Collection[str]) -> None:
        """Release the claim of *models*."""
        for model in models:
            self._claims.pop(model, None)

    async def change(self, index: int, action: ModelChange, models: Collection[str]) -> None:
        """Have the other workers make a change of *models*; return when all have."""
        if action == "close":
            self._closed[index].update(models)
        elif action == "open":
            self._closed[index].difference_update(models)
        others = [channel for other, channel in self._channels.items() if other != index]
        await asyncio.gather(*(channel.call("apply", action, models) for channel in others))


class SharedClient:
    """A worker's side. For :class:`triton_openai.access.rate_limits.LimitStore`, it counts among all workers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def listen(self, apply: Callable[[ModelChange, Collection[str]], Coroutine[Any, Any, None]]) -> None:
        """Call *apply* for what other workers change; it returns when it has made the change."""
        self._channel.methods["apply"] = apply

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        """Count a request in. Raises :class:`ServiceOverloaded` when the parent does not answer."""
        answer: asyncio.Future[Decision | None] = self._channel.call("admit", name, limit)

        def give_back(answer: asyncio.Future[Decision | None]) -> None:
            decision = answer.result()
            if decision is not None and decision.refusal is None:
                self.leave(name, 0)

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                if (decision := await asyncio.shield(answer)) is not None:
                    return decision
        except BaseException as error:
            # The request has gone, but the answer may still count it in.
            answer.add_done_callback(give_back)
            if not isinstance(error, TimeoutError):
                raise
        raise ServiceOverloaded("The rate limits cannot be checked now.", retry_after=1)

    def leave(self, name: str, tokens: int) -> None:
        self._channel.notify("leave", name, tokens)

    async def close(self) -> None:
        """Do nothing: the channel is the worker's."""

    async def follow(self, lists: SharedLists) -> tuple[bool, Mapping[str, bytes]]:
        """Share the lists of models; see :class:`triton_openai.triton.shared_lists.ListChannel`."""
        methods: Sequence[Callable[..., Any]] = (lists.lead, lists.beat, lists.take, lists.look)
        self._channel.methods |= {method.__name__: method for method in methods}
        answer: tuple[bool, Mapping[str, bytes]] | None = await self._channel.call("follow")
        # Without a parent, the worker is about to end.
        if answer is None:
            return (True, {})
        return answer

    def publish(self, name: str, data: bytes | None) -> None:
        """Give the others a new list."""
        self._channel.notify("publish", name, data)

    def beat(self) -> None:
        """Tell the others that this worker looks."""
        self._channel.notify("beat")

    def ask(self, name: str, reload: bool) -> asyncio.Future[bool | None]:
        """Have the worker that looks do so now."""
        return self._channel.call("look", name, reload)

    async def claim(self, models: Collection[str]) -> str | None:
        """Claim *models* among all workers, this one included; return the one that is claimed already, if any is."""
        taken: str | None = await self._channel.call("claim", tuple(models))
        return taken

    def unclaim(self, models: Collection[str]) -> None:
        """Give the claim back."""
        self._channel.notify("unclaim", tuple(models))

    def change(self, action: ModelChange, models: Collection[str]) -> asyncio.Future[Any]:
        """Have the others make a change at once; the result is there when all have."""
        return self._channel.call("change", action, tuple(models))
