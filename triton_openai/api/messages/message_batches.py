"""``/v1/messages/batches``: Anthropic's Message Batches, on the engine of OpenAI's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import msgspec

from triton_openai import errors, offload
from triton_openai.api.batches import add, cancel_batch, find_batch, proofs_of
from triton_openai.api.bodies import new_id, whole
from triton_openai.api.lines import check_model
from triton_openai.api.messages.batch_body import BatchedMessage, read_batch
from triton_openai.api.messages.message_events import add_request_id
from triton_openai.api.paging import Page, fetch_page, message_page_query
from triton_openai.api.service import Service
from triton_openai.api.uploaded_files import file_reply, files_of, page_reply
from triton_openai.batches.file_folder import Files, Writing, on_disk
from triton_openai.operations import Call, Reply
from triton_openai.storage.batch_store import Batch

_PATH = "/v1/messages"
_HOURS = 24
# Microseconds for each byte of a body: to split it, and to check and decode its requests.
_SPLIT = 2 * offload.BYTE
_BLANKS = bytes.maketrans(b"\r\n", b"  ")
_STEP = 1024 * 1024


class MessageCounts(msgspec.Struct, kw_only=True):
    """The requests of a batch; all of them are ``processing`` until it has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch of Anthropic's API."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: None = None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(Page[MessageBatch]):
    """A page of batches."""


class DeletedMessageBatch(msgspec.Struct, kw_only=True):
    """What was deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


async def create(service: Service, call: Call[bytes]) -> Reply:
    """Run requests for messages below live traffic. Most of their parameters are looked at when they run."""
    files = files_of(service)
    add_request_id(call.record)
    batch_id = new_id("msgbatch", "_")
    opened = proofs_of(service, call, _PATH, batch_id)
    data = call.body
    call.record.body_size = len(data)
    read = partial(read_batch, data, service.settings.limits, max_requests=service.settings.batches.max_requests)
    body = await offload.run(read, cost=_SPLIT * len(data))
    for model in body.models:
        await check_model(service, _PATH, await service.find_model(model, call.key))
    now = time.time()
    batch = Batch(
        id=batch_id,
        opened=opened,
        owner=call.key.name,
        kind="anthropic",
        endpoint=_PATH,
        input="",
        created=now,
        window=f"{_HOURS}h",
        expires=now + _HOURS * 3600,
    )
    batch.input, batch.total = batch.id, len(body.requests)
    writing = await files.write(f"{batch.id}.requests")
    try:
        await on_disk(_write, writing, body.requests)
        await writing.end()
        await add(service, call.record, batch, "requests")
    except BaseException:
        writing.close()
        # It may be there all the same. What cannot be looked at now is swept.
        with suppress(errors.ServiceError):
            await asyncio.shield(_undo(files, batch))
        raise
    return whole(_batch_object(batch))


async def _undo(files: Files, batch: Batch) -> None:
    """Delete the requests of a *batch* that was not made."""
    if await files.store.batch(batch.id, batch.owner, batch.kind) is None:
        await files.unlink(f"{batch.id}.requests")


def _write(writing: Writing, requests: Iterable[BatchedMessage]) -> None:
    """Write a line for each of *requests*; runs in a thread."""
    for one in requests:
        line = {"custom_id": one.custom_id, "method": "POST", "url": _PATH, "body": one.params}
        # A line break between two fields would end the line. In steps, each of which holds the interpreter.
        view = memoryview(msgspec.json.encode(line))
        for start in range(0, len(view), _STEP):
            writing.put(bytes(view[start : start + _STEP]).translate(_BLANKS))
        writing.put(b"\n")


async def list_batches(service: Service, call: Call[None]) -> Reply:
    """List the batches of messages of the request's key, newest first."""
    files = files_of(service)
    add_request_id(call.record)
    limit, param, place, before = message_page_query(call.query)
    find = None
    if files.exist:
        find = partial(files.store.batches, call.key.name, "anthropic", reverse=not before)
    batches, more = await fetch_page(find, limit, place, param)
    if before:
        batches = batches[::-1]
    return await page_reply(MessageBatchPage, batches, _batch_object, more=more)


async def _batch(service: Service, call: Call[None]) -> Batch:
    """Return the batch that the path of *call* names. Raises :class:`ObjectNotFound`."""
    add_request_id(call.record)
    return await find_batch(service, call, "anthropic", "message_batch_id")


async def retrieve(service: Service, call: Call[None]) -> Reply:
    """Return a batch of messages as it is now."""
    return whole(_batch_object(await _batch(service, call)))


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel a batch of messages. Requests that run may end, others are not begun any more."""
    return whole(_batch_object(await cancel_batch(service, call, await _batch(service, call))))


async def delete(service: Service, call: Call[None]) -> Reply:
    """Delete a batch of messages that has ended, and its results."""
    batch = await _batch(service, call)
    if batch.open:
        raise errors.ObjectInUse("The batch has not ended. Cancel it first.", param="message_batch_id")
    files = files_of(service)
    if batch.output is not None and (file := await files.store.file(batch.output, batch.owner)) is not None:
        await files.delete(file)
    # Last: if anything of it fails, the client can try again.
    await files.store.drop_batch(batch.id)
    return whole(DeletedMessageBatch(id=batch.id))


async def results(service: Service, call: Call[None]) -> Reply:
    """Return the results of a batch that has ended: a JSON object in each line, in the order in which they came."""
    batch = await _batch(service, call)
    files = files_of(service)
    if batch.open or batch.output is None:
        file = None
    else:
        file = await files.store.file(batch.output, batch.owner)
    if file is None:
        if batch.open:
            why = "has not ended"
        else:
            why = "has no results any more, or never had any"
        raise errors.ObjectNotFound(f"The batch {why}.", param="message_batch_id")
    return await file_reply(service, file, f"{batch.id}_results.jsonl", "application/x-jsonl")


def _batch_object(batch: Batch) -> MessageBatch:
    """Return *batch* as clients see it."""
    total = batch.total
    ended = not batch.open
    if ended:
        never = total - batch.succeeded - batch.failed
    else:
        never = 0
    ended_at = None
    if ended:
        ended_at = batch.times.get(f"{batch.status}_at")
    counts = MessageCounts(
        processing=0 if ended else total,
        succeeded=batch.succeeded if ended else 0,
        errored=(batch.failed + (never if batch.status == "failed" else 0)) if ended else 0,
        canceled=never if batch.status == "cancelled" else 0,
        expired=never if batch.status == "expired" else 0,
    )
    cancelling = batch.times.get("cancelling_at")
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=counts,
        ended_at=None if ended_at is None else _time(ended_at),
        created_at=_time(batch.created),
        expires_at=_time(batch.expires),
        cancel_initiated_at=None if cancelling is None else _time(cancelling),
        # Not a whole URL: what stands in front of the service may speak another protocol, under another name.
        results_url=f"{_PATH}/batches/{batch.id}/results" if ended and batch.output is not None else None,
    )


def _time(seconds: float) -> str:
    """Return a Unix time in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
