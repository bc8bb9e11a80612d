"""
How responses are stored: when, and where.

A response is an entry of the store, which belongs to the key that made it. The entry's head is the response without
its output; its rows are its ``input`` and ``output``, by item, and the ``events`` of one that is made in the
background. Its parent is the response or the conversation that it goes on from.

One that is made at once is stored when it has ended, and before the last event of its stream is sent. A stream is
stored when it begins, too, as one that has failed: that it is if this process is killed. One that is made in the
background is stored while it waits, when it begins, and when it has ended. Its maker has a lease meanwhile; when the
lease has expired, the response has failed. A process that cancels or deletes it changes the entry, and its maker can
add nothing more.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from triton_openai import errors, offload
from triton_openai.api.responses.event_log import EVENTS, LEASE_SECONDS, EventLog
from triton_openai.api.responses.item_events import replayed
from triton_openai.api.responses.objects import INTERRUPTED, OutputItem, ResponseObject
from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.store import Chain, Entry, EntryFull, Link, Row, Store
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)
_RUNNING = frozenset({"queued", "in_progress"})
_KEY = re.compile(r"(?:resp_|conv_|chatcmpl-)[0-9a-f]{32}")
# The lists of a response's rows; a conversation has the list `items`.
_ITEMS = ("input", "output")
# Most bytes of the responses that one connection keeps in memory.
_RECENT_SIZE = 64 * 1024 * 1024
# The seconds between attempts to keep a response that was made in the background.
_PAUSES = (0.5, 1.0, 2.0, 4.0)
# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_RESPONSE = offload.json_decoder(ResponseObject)
_OUTPUT = offload.json_decoder(list[OutputItem])


class RecentResponses:
    """
    The last response of each lane of one connection, with all that it goes on from, in memory.

    The next response can go on from it, also if it is not stored. Only the last lanes have one: as many as *max_lanes*
    returns, which may change.
    """

    def __init__(self, max_lanes: Callable[[], int]) -> None:
        self._max_lanes = max_lanes
        self._by_lane: dict[str | None, tuple[str, Sequence[bytes]]] = {}

    def lane(self, stream_id: str | None) -> RecentLane:
        """Return what a request of the lane *stream_id* sees of them."""
        return RecentLane(self, stream_id)

    def drop(self, stream_id: str | None) -> None:
        """Forget the response of a lane."""
        self._by_lane.pop(stream_id, None)

    def find(self, response_id: str) -> Sequence[bytes] | None:
        """Return the items of a response and all before it, each in JSON, the oldest first; ``None``: not here."""
        for key, items in self._by_lane.values():
            if key == response_id:
                return items
        return None

    def put(self, stream_id: str | None, response_id: str, items: Sequence[bytes]) -> None:
        """Make a response the last of its lane, if there is memory for its *items*."""
        self.drop(stream_id)
        others = sum(len(item) for _, kept in self._by_lane.values() for item in kept)
        if others + sum(map(len, items)) > _RECENT_SIZE:
            return
        self._by_lane[stream_id] = (response_id, items)
        while len(self._by_lane) > self._max_lanes():
            del self._by_lane[next(iter(self._by_lane))]


class RecentLane(NamedTuple):
    """The responses of a connection, as a request of one lane sees them."""

    responses: RecentResponses
    stream_id: str | None

    def find(self, response_id: str) -> Chain | None:
        """Return the items of a response and all before it; ``None``: not here."""
        items = self.responses.find(response_id)
        if items is None:
            return None
        return Chain([Link(response_id, True, 0.0)], items, len(items), sum(map(len, items)))

    def put(self, made: StoredResponse) -> None:
        """Keep a response that has ended."""
        response = made.response
        if response.status not in ("completed", "incomplete"):
            self.responses.drop(self.stream_id)
            return
        rows = [*made.input, *_output_rows(response)]
        self.responses.put(self.stream_id, response.id, [*made.before, *[row.data for row in rows]])


class ResponseStore:
    """Responses, conversations and chats in *store*, of which each key sees its own; ``None`` stores nothing."""

    def __init__(self, store: Store | None, settings: ResponsesSettings) -> None:
        self._store = store
        self._settings = settings
        #: The responses that this process makes in the background, by their ids.
        self.live: dict[str, EventLog] = {}
        #: By owner, how many more are about to be.
        self.beginning: Counter[str] = Counter()

    @property
    def keeps(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def available(self) -> bool:
        """Whether the store answers, as far as is known, or there is none."""
        return self._store is None or self._store.available

    def store(self, param: str | None = None) -> Store:
        """Return the store. Raises :class:`UnsupportedParameter` if there is none."""
        if self._store is None:
            raise errors.UnsupportedParameter("This service keeps no responses (--responses-store none).", param=param)
        return self._store

    async def verify(self) -> None:
        """Raise :class:`ConfigurationError` for a store that this release cannot use."""
        if self._store is not None:
            await self._store.verify()

    async def check(self) -> None:
        """Warn the operator if the store cannot be used."""
        try:
            await self.store().get("")
        except errors.ServiceError as error:
            warn(_log, "responses cannot be stored", error)

    def warn_not_stored(self, error: errors.ServiceError, key: str) -> None:
        """Log that the object with the id *key* is not stored; an outage of the store is logged once."""
        if self.available:
            warn(_log, "response is not kept", error, response=key)

    async def close(self) -> None:
        """Disconnect from the store."""
        if self._store is not None:
            await self._store.close()

    async def entry(self, prefix: str, key: str, owner: str) -> Entry | None:
        """Return the entry of *key*, which begins with *prefix*, if it is *owner*'s."""
        store = self.store()
        entry = None
        if is_key(prefix, key):
            entry = await store.get(key)
        if entry is not None and entry.owner == owner:
            return entry
        return None

    async def find(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response. Raises :class:`ObjectNotFound`."""
        entry = await self.entry("resp_", response_id, owner)
        if entry is None:
            raise _no_response(response_id)
        chain = await self.store().chain(response_id, owner, ["output"], max_links=1)
        if not chain.links[0].exists:
            # It was deleted meanwhile.
            raise _no_response(response_id)
        output = chain.rows
        response = await offload.run(_decoded, entry.head, output, cost=offload.json_cost(entry.size))
        stored = StoredResponse(self, owner, response, entry.version)
        lost = stored.running and entry.until < time.time()
        if lost:
            response.status = "failed"
            response.error = INTERRUPTED
        if lost or (response.status == "cancelled" and not output):
            # Its maker has not ended it: it has the output that is in its events.
            chain = await self.store().chain(response_id, owner, [EVENTS], max_links=1)
            events = b"".join(chain.rows)
            response.output = await offload.run(replayed, events, cost=offload.BYTE * len(events))
            if lost or response.output:
                # Another process that is faster does the same.
                await stored.save(_output_rows(response))
        return stored

    async def history(self, key: str, owner: str, param: str, *, max_items: int, max_size: int) -> Chain:
        """
        Return the items of a conversation, or of a response and those before it, each in JSON, the oldest first.

        *param* says which: ``conversation`` or ``previous_response_id``.

        They are counted and not read where they are more than *max_items*, or have more than *max_size* bytes. Raises
        :class:`InvalidRequest` for what is not there, has not ended, or is part of a conversation.
        """
        bounds = {"max_rows": max_items, "max_size": max_size}
        if param == "conversation":
            chain = await self.store().chain(key, owner, ["items"], max_links=1, **bounds)
            if not chain.links[0].exists:
                raise no_conversation(key)
            return chain
        chain = Chain([Link(key, False, 0.0)], (), 0, 0)
        if is_key("resp_", key):
            chain = await self.store().chain(key, owner, _ITEMS, max_links=max_items + 1, **bounds)
        for link in chain.links:
            if link.key.startswith("conv_"):
                raise errors.InvalidValue("That is a conversation, or part of one: give 'conversation' instead.", param)
            if not link.exists:
                missing = f"Previous response with id '{key[:100]}' not found."
                if link.key != key:
                    missing = f"The response '{key}' goes on from '{link.key}', which is not stored any more."
                raise errors.InvalidRequest(missing, param=param, code="previous_response_not_found")
            if link.until > time.time():
                raise errors.InvalidValue(f"The response '{link.key}' has not ended yet.", param)
        return chain

    def check_room(self, count: int, size: int, items: Sequence[Row]) -> None:
        """Raise :class:`ConversationFull` if there is no room for *items* beside *count* items of *size* bytes."""
        max_items = self._settings.max_conversation_items
        max_size = self._settings.max_conversation_size
        if count + len(items) > max_items or size + sum(len(row.data) for row in items) > max_size:
            raise errors.ConversationFull(max_items, max_size)

    async def extend(
        self, conversation_id: str, owner: str, items: Sequence[Row], *, holder: str | None = None
    ) -> None:
        """
        Add *items* to a conversation; those of a response only if it is the *holder* of its lease, which ends then.

        Raises :class:`ConversationFull`, :class:`ConversationBusy` and :class:`ObjectNotFound`.
        """
        max_items = self._settings.max_conversation_items
        max_size = self._settings.max_conversation_size
        rows = [row._replace(list="items") for row in items]
        if holder is None:
            lease = None
        else:
            lease = (holder, 0.0)
        try:
            added = await self.store().append(
                conversation_id, owner, rows, max_rows=max_items, max_size=max_size, lease=lease
            )
        except EntryFull as error:
            raise errors.ConversationFull(max_items, max_size) from error
        if not added and holder is not None:
            raise errors.ConversationBusy("The conversation was deleted, or another response is being made in it.")
        if not added:
            raise no_conversation(conversation_id)


class StoredResponse:
    """
    A *response* of *owner* that is stored, or will be unless it has ``store: false``.

    *version* is that of the stored entry, 0 if there is none.
    """

    def __init__(self, state: ResponseStore, owner: str, response: ResponseObject, version: int = 0) -> None:
        self.state = state
        self.owner = owner
        self.response = response
        self.version = version
        #: The rows of its input, while it is made.
        self.input: Sequence[Row] = ()
        #: The responses before the one that it goes on from, the newest first.
        self.ancestors: Sequence[str] = ()
        #: Where the connection keeps it, and what it goes on from; ``None`` if the connection keeps nothing.
        self.recent: RecentLane | None = None
        #: The items before its input, each in JSON, if the connection keeps it.
        self.before: Sequence[bytes] = ()
        #: Whether its lease of the conversation has ended, because its items are there.
        self.released = False
        #: Its events, if this process makes it in the background.
        self.log = state.live.get(response.id)

    @property
    def running(self) -> bool:
        """Whether it is being made."""
        return self.response.status in _RUNNING

    async def save(
        self, rows: Sequence[Row] = (), *, response: ResponseObject | None = None, lease: float = 0.0
    ) -> bool:
        """
        Store it, or *response* in its place, without the output, with more *rows*, unless another version is stored.

        Its maker renews the lease within *lease* seconds. Returns whether it is stored.
        """
        head = replace(response or self.response, output=())
        encoded = await offload.run(msgspec.json.encode, head, cost=offload.rendering_cost(head))
        if head.conversation is None:
            parent = head.previous_response_id
        else:
            parent = head.conversation["id"]
        is_stored = await self.state.store().put(
            head.id,
            self.owner,
            encoded,
            self.version,
            rows=rows,
            parent=parent,
            ancestors=self.ancestors,
            lease=(head.id, lease),
        )
        if is_stored:
            self.version += 1
        return is_stored

    async def save_placeholder(self) -> None:
        """Store a stream, before it is made, as failed: that it is if this process ends before the stream."""
        lost = replace(self.response, status="failed", error=INTERRUPTED)
        try:
            await self.save(self.input, response=lost)
        except errors.StoreUnavailable as error:
            self.warn_not_stored(error)

    async def mark_in_progress(self) -> bool:
        """Store that it is in progress; return false if another process has cancelled it."""
        try:
            return await self.save(lease=LEASE_SECONDS)
        except errors.StoreUnavailable as error:
            self.warn_not_stored(error)
            return True

    async def finalize(self) -> None:
        """
        Store it, which has ended. If that fails, the response says so.

        For one of the background, for which no client waits, there are several attempts.
        """
        response = self.response
        log = self.log
        rows = [*self.input, *_output_rows(response)]
        if response.conversation is not None and response.status in ("completed", "incomplete"):
            try:
                await self.state.extend(response.conversation["id"], self.owner, rows, holder=response.id)
                self.released = True
            except errors.ServiceError as error:
                self.warn_not_stored(error)
                response.conversation = None
        if log is not None:
            await log.close()
            rows += log.rows()
        if not response.store:
            return
        pauses: Sequence[float] = ()
        if log is not None:
            pauses = _PAUSES
        for pause in (*pauses, None):
            try:
                if await self.save(rows):
                    return
                # Another process has ended or deleted it; or this was stored, and the answer of the store was lost.
                if log is None:
                    response.store = False
                else:
                    self.response = (await self.state.find(response.id, self.owner)).response
                return
            except errors.ObjectNotFound:
                response.status = "cancelled"
                return
            except errors.StoreUnavailable as error:
                self.warn_not_stored(error)
                if pause is None:
                    response.store = False
                    response.conversation = None
                else:
                    await asyncio.sleep(pause)

    def warn_not_stored(self, error: errors.ServiceError) -> None:
        """Log that it is not stored."""
        self.state.warn_not_stored(error, self.response.id)


def is_key(prefix: str, key: str) -> bool:
    """Return whether *key* can be the id of a stored object whose ids begin with *prefix*."""
    return key.startswith(prefix) and _KEY.fullmatch(key) is not None


def _decoded(head: bytes, output: Sequence[bytes]) -> ResponseObject:
    response: ResponseObject = _RESPONSE.decode(head)
    response.output = _OUTPUT.decode(joined(output))
    return response


def _no_response(response_id: str) -> errors.ObjectNotFound:
    return errors.ObjectNotFound(f"There is no response '{response_id[:100]}'.", param="response_id")


def no_conversation(conversation_id: str) -> errors.ObjectNotFound:
    """Return the error for a conversation that is not there."""
    return errors.ObjectNotFound(f"There is no conversation '{conversation_id[:100]}'.", param="conversation")


def joined(items: Sequence[bytes]) -> bytes:
    """Return *items*, each in JSON, as a list in JSON."""
    return b"[%b]" % b",".join(items)


def _output_rows(response: ResponseObject) -> list[Row]:
    return [Row("output", item.id, msgspec.json.encode(item)) for item in response.output]
