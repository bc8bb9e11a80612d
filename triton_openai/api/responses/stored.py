"""
What is kept of responses: when, and where.

A response is an entry of the store, which belongs to the key that made it. The entry's head is the response without
its output; its rows are its ``input`` and ``output``, by item, and the ``events`` of one that is made in the
background. Its parent is the response or the conversation that it goes on from.

One that is made at once is kept when it has ended, and before the last event of its stream is sent. A stream is kept
when it begins, too, as one that has failed: so it stays if this process is killed. One that is made in the background
is kept while it waits, when it begins, and when it has ended. Its maker has a lease meanwhile: without, it has failed.
Whoever cancels or deletes it changes the entry, and its maker can add nothing more.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog

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

    The next response can go on from it, also if it is not stored. Only the last *max_lanes* lanes have one.
    """

    def __init__(self, max_lanes: int) -> None:
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
        if len(self._by_lane) > self._max_lanes:
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
    """Responses, conversations and chats in *store*, of which each key sees its own; ``None`` keeps nothing."""

    def __init__(self, store: Store | None, settings: ResponsesSettings) -> None:
        self._store = store
        self._settings = settings
        #: The responses that this process makes in the background, by their ids.
        self.live: dict[str, EventLog] = {}
        #: By owner, how many more are about to be.
        self.beginning: Counter[str] = Counter()

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
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

    def not_kept(self, error: errors.ServiceError, key: str) -> None:
        """Log that what has the id *key* is not kept; that a store does not answer is logged once."""
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
            kept = None
        else:
            kept = await self.store().chain(response_id, owner, ["output"], max_links=1)
        if entry is None or kept is None or not kept.links[0].exists:
            raise errors.ObjectNotFound(f"There is no response '{response_id[:100]}'.", param="response_id")
        output = kept.rows
        cost = offload.json_cost(entry.size)
        response, items = await offload.run(
            lambda: (_RESPONSE.decode(entry.head), _OUTPUT.decode(joined(output))), cost=cost
        )
        found = StoredResponse(self, owner, response, entry.version)
        lost = found.running and entry.until < time.time()
        response.output = items
        if lost:
            response.status = "failed"
            response.error = INTERRUPTED
        if lost or (response.status == "cancelled" and not output):
            # Its maker has not ended it: it has the output that its events tell of.
            events = b"".join((await self.store().chain(response_id, owner, [EVENTS], max_links=1)).rows)
            response.output = await offload.run(replayed, events, cost=offload.BYTE * len(events))
            if lost or response.output:
                # Another process that is faster does the same.
                await found.put(_output_rows(response))
        return found

    async def history(self, key: str, owner: str, param: str, *, most: int, most_size: int) -> Chain:
        """
        Return the items of a conversation, or of a response and those before it, each in JSON, the oldest first.

        *param* says which: ``conversation`` or ``previous_response_id``.

        They are counted and not read where they are more than *most*, or have more than *most_size* bytes. Raises
        :class:`InvalidRequest` for what is not there, has not ended, or is part of a conversation.
        """
        bounds = {"max_rows": most, "max_size": most_size}
        if param == "conversation":
            found = await self.store().chain(key, owner, ["items"], max_links=1, **bounds)
            if not found.links[0].exists:
                raise no_conversation(key)
            return found
        found = Chain([Link(key, False, 0.0)], (), 0, 0)
        if is_key("resp_", key):
            found = await self.store().chain(key, owner, _ITEMS, max_links=most + 1, **bounds)
        for link in found.links:
            if link.key.startswith("conv_"):
                raise errors.InvalidValue("That is a conversation, or part of one: give 'conversation' instead.", param)
            if not link.exists:
                missing = f"Previous response with id '{key[:100]}' not found."
                if link.key != key:
                    missing = f"The response '{key}' goes on from '{link.key}', which is not stored any more."
                raise errors.InvalidRequest(missing, param=param, code="previous_response_not_found")
            if link.until > time.time():
                raise errors.InvalidValue(f"The response '{link.key}' has not ended yet.", param)
        return found

    def check_room(self, count: int, size: int, items: Sequence[Row]) -> None:
        """Raise :class:`ConversationFull` if there is no room for *items* beside *count* items of *size* bytes."""
        most_items = self._settings.max_conversation_items
        most_size = self._settings.max_conversation_size
        if count + len(items) > most_items or size + sum(len(row.data) for row in items) > most_size:
            raise errors.ConversationFull(most_items, most_size)

    async def extend(
        self, conversation_id: str, owner: str, items: Sequence[Row], *, holder: str | None = None
    ) -> None:
        """
        Add *items* to a conversation, those of a response only if that is its *holder*, which then holds it no longer.

        Raises :class:`ConversationFull`, :class:`ConversationBusy` and :class:`ObjectNotFound`.
        """
        most_items = self._settings.max_conversation_items
        most_size = self._settings.max_conversation_size
        rows = [row._replace(list="items") for row in items]
        if holder is None:
            lease = None
        else:
            lease = (holder, 0.0)
        try:
            added = await self.store().append(
                conversation_id, owner, rows, max_rows=most_items, max_size=most_size, lease=lease
            )
        except EntryFull as error:
            raise errors.ConversationFull(most_items, most_size) from error
        if not added and holder is not None:
            raise errors.ConversationBusy("The conversation was deleted or is held by another response.")
        if not added:
            raise no_conversation(conversation_id)


class StoredResponse:
    """
    A *response* of *owner* that is kept, or will be unless it has ``store: false``.

    *version* is that of what is kept, 0 before the first time.
    """

    def __init__(self, state: ResponseStore, owner: str, response: ResponseObject, version: int = 0) -> None:
        self.state = state
        self.owner = owner
        self.response = response
        self.version = version
        #: What its input is kept as, while it is made.
        self.input: Sequence[Row] = ()
        #: The responses before the one that it goes on from, the newest first.
        self.ancestors: Sequence[str] = ()
        #: Where the connection keeps it, and what it goes on from; ``None`` if the connection keeps nothing.
        self.recent: RecentLane | None = None
        #: The items before its input, each in JSON, if the connection keeps it.
        self.before: Sequence[bytes] = ()
        #: Whether it holds its conversation no longer, because it stands there.
        self.released = False
        #: Its events, if this process makes it in the background.
        self.log = state.live.get(response.id)

    @property
    def running(self) -> bool:
        """Whether it is being made."""
        return self.response.status in _RUNNING

    async def put(
        self, rows: Sequence[Row] = (), *, response: ResponseObject | None = None, lease: float = 0.0
    ) -> bool:
        """
        Keep it, or *response* in its place, without the output, with more *rows*, unless another version is kept.

        Whoever makes it says so again within *lease* seconds. Returns whether it is kept.
        """
        head = msgspec.structs.replace(response or self.response, output=())
        encoded = await offload.run(msgspec.json.encode, head, cost=offload.rendering_cost(head))
        if head.conversation is None:
            parent = head.previous_response_id
        else:
            parent = head.conversation["id"]
        kept = await self.state.store().put(
            *(head.id, self.owner, encoded, self.version),
            rows=rows, parent=parent, ancestors=self.ancestors, lease=(head.id, lease),
        )  # fmt: skip
        self.version += kept
        return kept

    async def announce(self) -> None:
        """Keep a stream, before it is made, as what it will be if this process ends in the middle of it."""
        lost = msgspec.structs.replace(self.response, status="failed", error=INTERRUPTED)
        try:
            await self.put(self.input, response=lost)
        except errors.StoreUnavailable as error:
            self.not_kept(error)

    async def begin(self) -> bool:
        """Tell other processes that it is in progress; return false if one of them has cancelled it."""
        try:
            return await self.put(lease=LEASE_SECONDS)
        except errors.StoreUnavailable as error:
            self.not_kept(error)
            return True

    async def keep(self) -> None:
        """
        Keep it, which has ended. If that does not work, it says so.

        One of the background, of which a waiting client has nothing, is kept a little later if not at once.
        """
        response = self.response
        log = self.log
        rows = [*self.input, *_output_rows(response)]
        if response.conversation is not None and response.status in ("completed", "incomplete"):
            try:
                await self.state.extend(response.conversation["id"], self.owner, rows, holder=response.id)
                self.released = True
            except errors.ServiceError as error:
                self.not_kept(error)
                response.conversation = None
        if log is not None:
            await log.close()
            rows += log.rows()
        for pause in (*(() if log is None else _PAUSES), None) if response.store else ():
            try:
                if await self.put(rows):
                    return
                # Somebody has ended or deleted it, or this was kept, and the store could not say so.
                if log is None:
                    response.store = False
                else:
                    self.response = (await self.state.find(response.id, self.owner)).response
                return
            except errors.ObjectNotFound:
                response.status = "cancelled"
                return
            except errors.StoreUnavailable as error:
                self.not_kept(error)
                if pause is None:
                    response.store = False
                    response.conversation = None
                else:
                    await asyncio.sleep(pause)

    def not_kept(self, error: errors.ServiceError) -> None:
        """Log that it is not kept."""
        self.state.not_kept(error, self.response.id)


def is_key(prefix: str, key: str) -> bool:
    """Return whether *key* can be the id of what is kept, of a kind as its *prefix* says."""
    return key.startswith(prefix) and _KEY.fullmatch(key) is not None


def no_conversation(conversation_id: str) -> errors.ObjectNotFound:
    """Return the error for a conversation that is not there."""
    return errors.ObjectNotFound(f"There is no conversation '{conversation_id[:100]}'.", param="conversation")


def joined(items: Sequence[bytes]) -> bytes:
    """Return *items*, each in JSON, as a list in JSON."""
    return b"[%b]" % b",".join(items)


def _output_rows(response: ResponseObject) -> list[Row]:
    return [Row("output", item.id, msgspec.json.encode(item)) for item in response.output]
