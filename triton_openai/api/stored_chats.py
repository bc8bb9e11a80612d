"""
Chat completions that are kept, as ``store: true`` asks for: stored, listed, read, described, deleted.

A chat completion is an entry of the store that responses are kept in. Its head is what it is listed by; its rows are
the ``answer``, whose id is the entry's key, and the request's ``messages``. Keys are in the order of time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from secrets import token_hex
from typing import Any, TypeAlias

import msgspec

from triton_openai import errors, offload
from triton_openai.api.bodies import converted, json_reply, report_ignored
from triton_openai.api.paging import page_query, unknown_id_error
from triton_openai.api.responses.objects import Deleted, Metadata
from triton_openai.api.responses.retrieve import list_of, page_of
from triton_openai.api.responses.stored import is_key
from triton_openai.api.service import RequestContext, Service
from triton_openai.operations import Call, Reply, Whole
from triton_openai.prompts.messages import Message
from triton_openai.storage.store import BATCH, Entry, Row, RowKey, Store, fitting

#: Stores a whole answer, which is in JSON.
Keep: TypeAlias = Callable[[bytes], Awaitable[None]]

_PREFIX = "chatcmpl-"
_METADATA = re.compile(r"metadata\[(.*)\]")


class _Head(msgspec.Struct):
    model: str
    metadata: dict[str, str]


_HEAD = offload.json_decoder(_Head)


class CompletionUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What changes in a chat completion."""

    metadata: Metadata | None


def new_key() -> str:
    """Return the id of a chat completion that is to be stored."""
    return f"{_PREFIX}{time.time_ns() // 1000:014x}{token_hex(9)}"


def keeper(
    context: RequestContext[Any], answer_id: str, *, model: str, metadata: Any, messages: Sequence[Message]
) -> Keep:
    """
    Return what stores the answer with this id from :func:`new_key`, the *metadata*, and the *messages* it answers.

    Raises :class:`InvalidRequest` for other *metadata* than the API takes.
    """
    described = converted({"metadata": metadata}, CompletionUpdate)
    return partial(_keep, context, answer_id, _Head(model, described.metadata or {}), messages)


async def _keep(
    context: RequestContext[Any], answer_id: str, head: _Head, messages: Sequence[Message], answer: bytes
) -> None:
    """Store the *answer*. A failure is logged, and reported to the client if its answer has not begun."""

    def encoded() -> list[Row]:
        rows = [Row("answer", answer_id, answer)]
        for number, message in enumerate(messages):
            rows.append(_message_row(message, f"{answer_id}-{number}"))
        return rows

    state = context.service.responses
    owner = context.call.key.name
    rows = await offload.run(encoded, cost=offload.json_cost(context.record.body_size or 0))
    try:
        await state.store().put(answer_id, owner, msgspec.json.encode(head), 0, rows=rows)
    except errors.StoreUnavailable as error:
        state.warn_not_stored(error, answer_id)
        report_ignored(context.record, ["store"])


def _message_row(message: Message, message_id: str) -> Row:
    """Return the row of a message: its content is a text, or null if it has parts."""
    fields = _without_nulls(msgspec.to_builtins(message))
    content = fields.pop("content", None)
    parts = None
    if isinstance(content, list):
        parts = [_stored_part(part) for part in content]
        content = None
    always = {"id": message_id, "content": content, "content_parts": parts, "refusal": None, "name": None}
    return Row("messages", message_id, msgspec.json.encode(always | fields))


def _stored_part(part: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return _without_nulls(part)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


async def _entry(service: Service, call: Call[Any]) -> tuple[str, Entry]:
    """Return the key and the entry of the completion in the path. Raises :class:`ObjectNotFound`."""
    key = call.path["completion"]
    entry = await service.responses.entry(_PREFIX, key, call.key.name)
    if entry is None:
        raise errors.ObjectNotFound(f"There is no chat completion '{key[:100]}'.", param="completion_id")
    return key, entry


async def _shown(store: Store, owner: str, heads: Mapping[str, _Head]) -> Sequence[Row]:
    """Return completions with their metadata, without those that are deleted meanwhile."""
    answers = await store.fetch(owner, [RowKey(key, key) for key in heads])
    rows = []
    for key, head in heads.items():
        answer = answers.get(RowKey(key, key))
        if answer is not None:
            metadata = msgspec.json.encode(head.metadata)
            # The answer is an object in JSON: the metadata becomes its last member.
            rows.append(Row("", key, b'%b,"metadata":%b}' % (answer[:-1], metadata)))
    return rows


async def retrieve(service: Service, call: Call[Any]) -> Reply:
    """Return a chat completion that was stored."""
    while True:
        key, entry = await _entry(service, call)
        for row in await _shown(service.responses.store(), entry.owner, {key: _HEAD.decode(entry.head)}):
            return Whole(row.data)


async def update(service: Service, call: Call[CompletionUpdate]) -> Reply:
    """Replace the metadata of a chat completion."""
    while True:
        key, entry = await _entry(service, call)
        head = _Head(_HEAD.decode(entry.head).model, call.body.metadata or {})
        # Another writer may be faster.
        if await service.responses.store().put(key, entry.owner, msgspec.json.encode(head), entry.version):
            return await retrieve(service, call)


async def delete(service: Service, call: Call[None]) -> Reply:
    """Delete a chat completion that was stored."""
    key, _ = await _entry(service, call)
    await service.responses.store().delete(key)
    return json_reply(Deleted(id=key, object="chat.completion.deleted"))


async def list_messages(service: Service, call: Call[None]) -> Reply:
    """List the messages that a stored chat completion answers."""
    key, _ = await _entry(service, call)
    return json_reply(await page_of(service, call, key, "messages", "asc"))


async def list_all(service: Service, call: Call[None]) -> Reply:
    """List the chat completions that were stored, of a ``model``, and with ``metadata[KEY]`` of a value."""
    store = service.responses.store()
    owner = call.key.name
    model = call.query.get("model")
    limit, after, reverse = page_query(call.query, "asc")
    if after is not None and not is_key(_PREFIX, after):
        raise unknown_id_error("after")
    metadata = {}
    for name, value in call.query.items():
        match = _METADATA.fullmatch(name)
        if match is not None:
            metadata[match[1]] = value
    heads: dict[str, _Head] = {}
    more = True
    while more and len(heads) <= limit:
        batch = await store.entries(owner, _PREFIX, after=after, limit=BATCH, reverse=reverse)
        more = len(batch) == BATCH
        for key, data in batch:
            after = key
            if data is None:
                continue
            head = _HEAD.decode(data)
            if model in (None, head.model) and metadata.items() <= head.metadata.items():
                heads[key] = head
    sizes = await store.sizes(owner, [RowKey(key, key) for key in heads])
    count = fitting((sizes.get(RowKey(key, key), 0) for key in heads), service.settings.limits.max_text_size)
    shown = dict(islice(heads.items(), min(count, limit)))
    return json_reply(list_of(await _shown(store, owner, shown), more=len(shown) < len(heads)))
