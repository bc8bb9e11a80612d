"""
The items that a request is about: its own, and those that it goes on from and refers to; and how they are stored.

A request goes on from a conversation or from earlier responses, and refers to single items. All of it counts against
the limits that a body has, before it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from triton_openai import offload
from triton_openai.api.bodies import MAX_MESSAGES, JsonCheck
from triton_openai.api.paging import MAX_ID, is_id
from triton_openai.api.responses.objects import CompactRequest, Item, ResponsesRequest
from triton_openai.api.responses.stored import RecentLane, ResponseStore, joined
from triton_openai.config.tree import Settings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, InvalidValue, ObjectNotFound
from triton_openai.storage.store import Row, RowKey

_ITEMS = offload.json_decoder(list[Item])
_PREFIXES: Mapping[str, str] = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp",
}  # fmt: skip
# Items that have a status, which clients may leave out. No set: what a client writes may have no hash.
_ENDED = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
# Responses of a chain of which one can be deleted each while the next one is made.
_ANCESTORS = 8


def input_items(body: ResponsesRequest | CompactRequest) -> list[Item]:
    """Return the items of ``input``; a text is a message of the user."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input or []


def reference(item: Item) -> str | None:
    """Return the id that *item* refers to, if it stands for another one."""
    kind = item.get("type")
    if kind == "item_reference" or (kind is None and item.keys() <= {"type", "id"}):
        return str(item.get("id"))
    return None


def normalize_items(items: Iterable[Item], suffix: str, path: str, taken: Collection[str] = ()) -> list[Item]:
    """
    Return *items*, not checked yet, in the form in which they are stored: with a type, an id, and parts for content.

    *path* is that of the items in the request. *suffix* makes the ids of those that have none, or one that is *taken*,
    with a number: the id of an item names the response that it is stored with. Raises :class:`InvalidValue` for an id
    that cannot be stored.
    """
    normalized = []
    used = set(taken)
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        item_id = item.get("id") or ""
        if not is_id(item_id):
            param = f"{path}[{number}].id"
            raise InvalidValue(f"'{param}' must be a text of at most {MAX_ID} characters.", param)
        if not item_id or item_id in used:
            item_id = f"{_PREFIXES.get(str(kind), 'item')}_{suffix}{number:03x}"
        used.add(item_id)
        whole = {**item, "type": kind, "id": item_id}
        if kind in _ENDED:
            whole["status"] = item.get("status") or "completed"
        if kind == "message":
            whole["content"] = _content_parts(item)
        normalized.append(whole)
    return normalized


def _content_parts(message: Item) -> Any:
    """Return the content of a *message* as parts. What is neither a text nor a list is refused when it is read."""
    if message.get("role") == "assistant":
        text_type = "output_text"
    else:
        text_type = "input_text"
    content = message.get("content")
    if isinstance(content, str):
        return [_whole_part(content, text_type)]
    if isinstance(content, list):
        return [_whole_part(part, text_type) for part in content]
    return content or []


def _whole_part(part: Any, text_type: str) -> Any:
    if isinstance(part, str):
        whole = {"text": part}
    elif isinstance(part, dict):
        whole = part
    else:
        return part
    # Chats call a text otherwise, and some clients leave the type out.
    if whole.get("type") in (None, "text"):
        whole = {**whole, "type": text_type}
    if whole["type"] == "output_text":
        return {**whole, "annotations": whole.get("annotations") or [], "logprobs": whole.get("logprobs") or []}
    return whole


def rows_of(items: Iterable[Item], suffix: str, path: str, taken: Collection[str] = (), *, name: str) -> Sequence[Row]:
    """
    Return the rows of the list *name* in which *items* are stored; the other arguments are of :func:`normalize_items`.

    Raises :class:`InvalidRequest`.
    """
    rows = []
    for number, item in enumerate(normalize_items(items, suffix, path, taken)):
        try:
            rows.append(Row(name, item["id"], msgspec.json.encode(item)))
        except (TypeError, ValueError, RecursionError) as error:
            param = f"{path}[{number}]"
            raise InvalidRequest(f"'{param}' cannot be stored: {error}.", param=param) from error
    return rows


class InputResolver:
    """
    Finds the items that a request of *owner* is about: its own, those that it goes on from, and those it refers to.

    What is loaded counts against the limits of a body.
    """

    def __init__(self, state: ResponseStore, owner: str, settings: Settings) -> None:
        #: The items before the request, and its own with their references resolved.
        self.before: Sequence[Item] = ()
        #: Those before, each in JSON.
        self.encoded: Sequence[bytes] = ()
        self.resolved: Sequence[Item] = ()
        #: The responses before the one that it goes on from, the newest first.
        self.ancestors: Sequence[str] = ()
        #: The id of the conversation, or of the response with which the chain began.
        self.root: str | None = None
        #: The rows in which its own items are stored.
        self.rows: Sequence[Row] = ()
        #: The bytes that are loaded.
        self.size = 0
        #: The count of their values, which goes on with the JSON in their texts; ``None`` where that is too few.
        self.check: JsonCheck | None = None
        self._state = state
        self._owner = owner
        self._settings = settings
        # The items that are loaded.
        self._count = 0
        # The most values that the items before it have; ``None`` if they have to be counted with its own.
        self._max_values: int | None = None

    async def resolve(
        self,
        items: Sequence[Item],
        *,
        source: str | None,
        param: str,
        suffix: str,
        size: int,
        recent: RecentLane | None = None,
    ) -> None:
        """
        Load what a request with *items*, in a body of *size* bytes, is about.

        *source* is what it goes on from: a conversation or a response, as *param* says, which may be one of *recent*.
        The rows have ids with *suffix*. Raises :class:`InvalidRequest`.
        """
        before: Sequence[bytes] = ()
        if source is not None:
            before = await self._history(source, param, recent)
            self.encoded = before
        loaded: dict[str, bytes] = {}
        if before:
            self.before = await offload.run(self._decoded, before, param, cost=offload.json_cost(self.size))
            loaded = {str(item.get("id")): data for item, data in zip(self.before, before, strict=True)}
        references: dict[int, str] = {}
        missing: dict[int, str] = {}
        for number, item in enumerate(items):
            item_id = reference(item)
            if item_id is None:
                continue
            references[number] = item_id
            if item_id not in loaded:
                missing[number] = item_id
        fetched = await self._fetched(missing)
        for number, item_id in references.items():
            if item_id in loaded:
                self._add(1, len(loaded[item_id]), f"input[{number}]")

        def assemble() -> None:
            self._resolve_references(items, references, {**loaded, **fetched})
            taken: Collection[str] = ()
            if param == "conversation":
                # All will be in the conversation.
                taken = loaded
            self.rows = rows_of(self.resolved, suffix, "input", taken, name="input")
            self._check_together(before, references, param)

        await offload.run(assemble, cost=offload.json_cost(size + self.size))
        if param == "conversation":
            self._state.check_room(len(before), sum(map(len, before)), self.rows)

    async def _history(self, source: str, param: str, recent: RecentLane | None) -> Sequence[bytes]:
        """Return the items of the conversation, or of the responses, that the request goes on from."""
        max_size = self._settings.server.max_body_size
        history = None
        if recent is not None and param == "previous_response_id":
            history = recent.find(source)
        if history is None:
            history = await self._state.history(source, self._owner, param, max_items=MAX_MESSAGES, max_size=max_size)
        self._add(history.length, history.size, param)
        self.ancestors = [link.key for link in history.links[1:_ANCESTORS]]
        self.root = history.links[-1].key
        return history.rows

    def _resolve_references(
        self, items: Sequence[Item], references: Mapping[int, str], stored: Mapping[str, bytes]
    ) -> None:
        parsed = {item_id: msgspec.json.decode(stored[item_id], type=Item) for item_id in references.values()}
        resolved = list(items)
        for number, item_id in references.items():
            resolved[number] = parsed[item_id]
        self.resolved = resolved

    def _check_together(self, before: Sequence[bytes], references: Mapping[int, str], param: str) -> None:
        """Check the items before the request with its own, unless those are clearly few."""
        if not before and not references:
            return
        own = [row.data for row in self.rows]
        if not references and self._max_values is not None and self._checked(own, param, self._max_values) is None:
            return
        if not before:
            param = "input"
        self.check = self._checked([*before, *own], param)

    async def _fetched(self, wanted: Mapping[int, str]) -> Mapping[str, bytes]:
        """Return the stored items that are *wanted*, each with the number of its reference, by their ids."""
        if not wanted:
            return {}
        # The id of an item ends with that of its response, and a number.
        places = {item_id: RowKey(f"resp_{item_id.partition('_')[2][:32]}", item_id) for item_id in wanted.values()}
        stored: Mapping[RowKey, bytes] = {}
        if self._state.keeps:
            store = self._state.store()
            sizes = await store.sizes(self._owner, [place for place in places.values() if is_id(place.id)])
            for number, item_id in wanted.items():
                self._add(1, sizes.get(places[item_id], 0), f"input[{number}]")
            stored = await store.fetch(self._owner, sizes)
        for number, item_id in wanted.items():
            # It may also have been deleted meanwhile.
            if places[item_id] not in stored:
                raise ObjectNotFound(f"There is no item '{item_id[:100]}'.", param=f"input[{number}].id")
        return {item_id: stored[place] for item_id, place in places.items()}

    def _add(self, count: int, size: int, param: str) -> None:
        """Count more items. Raises :class:`ContextLengthExceeded` for too many; *param* names what loads them."""
        self._count += count
        self.size += size
        if self._count > MAX_MESSAGES:
            raise too_long_error(f"There are more than {MAX_MESSAGES} items.", param)
        self._check_size(self.size, param)

    def _check_size(self, size: int, param: str) -> None:
        max_size = self._settings.server.max_body_size
        if size > max_size:
            raise too_long_error(f"There are more than {max_size} bytes (server.max_body_size).", param)

    def _decoded(self, items: Sequence[bytes], param: str) -> Sequence[Item]:
        """Check *items* as a body, and read them."""
        self._checked(items, param)
        decoded: Sequence[Item] = _ITEMS.decode(joined(items))
        return decoded

    def _checked(self, items: Sequence[bytes], param: str, beside: int = 0) -> JsonCheck | None:
        """
        Check *items* together as a body; return what counts the JSON in their texts, if that has to be counted.

        They are all that the request is about, or its own, *beside* so many values before them.
        """
        size = sum(map(len, items))
        if beside:
            size += self.size
        self._check_size(size, param)
        limits = self._settings.limits
        check = JsonCheck(limits, beside)
        try:
            # Each came in a body whose nesting was checked.
            few = check.check(joined(items), nested=True) and size <= limits.max_text_size
        except InvalidRequest as error:
            raise too_long_error(error.message, param) from error
        if few:
            self._max_values = check.max_values
            return None
        self._max_values = None
        return check


def too_long_error(reason: str, param: str | None) -> ContextLengthExceeded:
    """Return the error for a request that loads too much because of *param*."""
    return ContextLengthExceeded(
        f"The input, with what it goes on from and refers to, is larger than a request may be. {reason}", param=param
    )
