"""
What a request goes on from and refers to: a conversation, earlier responses, single items.

All of it counts against the limits that a body has, before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from triton_openai import offload
from triton_openai.api.bodies import MAX_MESSAGES, JsonCheck
from triton_openai.api.responses.reader import is_id, numbered, reference
from triton_openai.api.responses.state import ResponseState, joined
from triton_openai.api.responses.types import Item
from triton_openai.config.tree import Settings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, ObjectNotFound
from triton_openai.storage.store import Place, Row

_ITEMS = offload.json_decoder(list[Item])


class Sources(NamedTuple):
    """
    The items *before* a request, its own with their references *resolved*, and the *rows* that its own are kept as.

    *check* is the count of their values, which goes on with the JSON in their texts; ``None`` where that is too few.
    """

    before: Sequence[Item]
    resolved: Sequence[Item]
    rows: Sequence[Row]
    check: JsonCheck | None


async def gather(
    state: ResponseState,
    items: Sequence[Item],
    owner: str,
    *,
    source: str | None,
    suffix: str,
    size: int,
    settings: Settings,
) -> Sources:
    """
    Return what a request with *items*, in a body of *size* bytes, is about.

    *source* is the conversation or the response that it goes on from. The rows have ids with *suffix*. Raises
    :class:`InvalidRequest`.
    """
    param = "conversation" if source is not None and source.startswith("conv_") else "previous_response_id"
    budget = _Budget(settings)
    before: Sequence[bytes] = ()
    if source is not None:
        keys, count, total = await state.chain(source, owner, most=MAX_MESSAGES)
        budget.add(count, total, param)
        before = await state.read(keys)
    known: dict[str, bytes] = {}
    decoded: Sequence[Item] = ()
    if before:
        decoded = await offload.run(budget.decoded, before, param, cost=offload.json_cost(budget.size))
        known = {str(item.get("id")): data for item, data in zip(decoded, before, strict=True)}
    wanted = [(number, found) for number, item in enumerate(items) if (found := reference(item)) is not None]
    fetched = await _fetched(state, [each for each in wanted if each[1] not in known], owner, budget)
    for number, item_id in wanted:
        if item_id in known:
            budget.add(1, len(known[item_id]), f"input[{number}]")
    brings = bool(before or wanted)

    def assembled() -> Sources:
        found = {**known, **fetched}
        parsed = {item_id: msgspec.json.decode(found[item_id], type=dict[str, Any]) for _, item_id in wanted}
        resolved = list(items)
        for number, item_id in wanted:
            resolved[number] = parsed[item_id]
        # All will stand in the conversation.
        own = numbered(resolved, suffix, "input", known if param == "conversation" else ())
        rows = [Row("input", item["id"], encode(item, f"input[{number}]")) for number, item in enumerate(own)]
        check = None
        if brings:
            check = budget.check([*before, *(row.data for row in rows)], param if before else "input")
        return Sources(decoded, resolved, rows, check)

    sources = await offload.run(assembled, cost=offload.json_cost(size + budget.size))
    if param == "conversation":
        state.check_room(len(before), sum(map(len, before)), sources.rows)
    return sources


def encode(item: Item, place: str) -> bytes:
    """Return *item*, which stands at *place* in the request, in JSON. Raises :class:`InvalidRequest`."""
    try:
        return msgspec.json.encode(item)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"'{place}' cannot be stored: {error}.", param=place) from error


async def _fetched(
    state: ResponseState, wanted: Sequence[tuple[int, str]], owner: str, budget: _Budget
) -> Mapping[str, bytes]:
    """Return the kept items that are *wanted*, each with the number of its reference, by their ids."""
    # The id of an item ends with that of its response, and a number.
    places = {item_id: Place(f"resp_{item_id.partition('_')[2][:32]}", item_id) for _, item_id in wanted}
    if not places:
        return {}
    store = state.store() if state.keeps else None
    sizes = {} if store is None else await store.sizes(owner, [each for each in places.values() if is_id(each.id)])
    for number, item_id in wanted:
        if places[item_id] not in sizes:
            raise ObjectNotFound(f"There is no item '{item_id[:100]}'.", param=f"input[{number}].id")
        budget.add(1, sizes[places[item_id]], f"input[{number}]")
    found = {} if store is None else await store.fetch(owner, {*places.values()})
    for number, item_id in wanted:
        if places[item_id] not in found:
            # Deleted meanwhile.
            raise ObjectNotFound(f"There is no item '{item_id[:100]}'.", param=f"input[{number}].id")
    return {item_id: found[place] for item_id, place in places.items()}


class _Budget:
    """Counts what a request brings in against the limits of a body."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._count = 0
        self.size = 0

    def add(self, count: int, size: int, param: str) -> None:
        """Count more items. Raises :class:`ContextLengthExceeded` for too many, which *param* brings in."""
        self._count += count
        self.size += size
        if self._count > MAX_MESSAGES:
            raise too_long(f"There are more than {MAX_MESSAGES} items.", param)
        most = self._settings.server.max_body_size
        if self.size > most:
            raise too_long(f"There are more than {most} bytes (server.max_body_size).", param)

    def decoded(self, items: Sequence[bytes], param: str) -> Sequence[Item]:
        """Check *items* as a body, and read them."""
        whole = joined(items)
        self._check(whole, param)
        decoded: Sequence[Item] = _ITEMS.decode(whole)
        return decoded

    def check(self, items: Sequence[bytes], param: str) -> JsonCheck | None:
        """Check all *items* together as a body; return what counts the JSON in their texts."""
        most = self._settings.server.max_body_size
        if sum(map(len, items)) > most:
            raise too_long(f"There are more than {most} bytes (server.max_body_size).", param)
        return self._check(joined(items), param)

    def _check(self, whole: bytes, param: str) -> JsonCheck | None:
        check = JsonCheck(self._settings.limits)
        try:
            return None if check.check(whole) else check
        except InvalidRequest as error:
            raise too_long(error.message, param) from error


def too_long(what: str, param: str | None) -> ContextLengthExceeded:
    """Return the error for a request that *param* brings too much into."""
    return ContextLengthExceeded(
        f"The input, with what it goes on from and refers to, is larger than a request may be. {what}", param=param
    )
