"""``/v1/messages/batches``: Anthropic's Message Batches, which the runner of OpenAI's batches runs."""

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
from triton_openai.api.bodies import json_reply, new_id
from triton_openai.api.lines import check_model
from triton_openai.api.messages.batch_body import BatchedMessage, parse_batch
from triton_openai.api.messages.message_events import add_request_id
from triton_openai.api.paging import Page, fetch_page, message_page_query
from triton_openai.api.service import Service
from triton_openai.api.uploaded_files import file_reply, files_of, page_reply
from triton_openai.batches.file_folder import Files, Writing, on_disk
from triton_openai.operations import Call, Reply
from triton_openai.storage.batch_records import Batch, StoredFile

_PATH = "/v1/messages"
_HOURS = 24
# Microseconds for each byte of a body: to split it, and to check and decode its requests.
_SPLIT = 2 * offload.BYTE
_BLANKS = bytes.maketrans(b"\r\n", b"  ")
_STEP = 1024 * 1024


class MessageCounts(msgspec.Struct, kw_only=True):
    """The requests of a batch; all of them count as ``processing`` until it has ended."""

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
    """Run requests for messages below live traffic. Most of their parameters are checked before any of them runs."""
    files = files_of(service)
    add_request_id(call.record)
    batch_id = new_id("msgbatch", "_")
    opened = proofs_of(service, call, _PATH, batch_id)
    data = call.body
    call.record.body_size = len(data)
    read = partial(parse_batch, data, service.settings.limits, max_requests=service.settings.batches.max_requests)
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
        input=batch_id,
        created=now,
        window=f"{_HOURS}h",
        expires=now + _HOURS * 3600,
    )
    batch.total = len(body.requests)
    writing = await files.write(f"{batch.id}.requests")
    try:
        await on_disk(_write, writing, body.requests)
        await writing.end()
        await add(service, call.record, batch, "requests")
    except BaseException:
        writing.close()
        # The batch may have been added all the same. A file that cannot be deleted now is swept.
        with suppress(errors.ServiceError):
            await asyncio.shield(_undo(files, batch))
        raise
    return json_reply(_batch_object(batch))


async def _undo(files: Files, batch: Batch) -> None:
    """Delete the requests of *batch* if it was not added."""
    if await files.store.batches.find(batch.id, batch.owner, batch.kind) is None:
        await files.unlink(f"{batch.id}.requests")


def _write(writing: Writing, requests: Iterable[BatchedMessage]) -> None:
    """Write a line for each of *requests*; runs in a thread."""
    for request in requests:
        line = {"custom_id": request.custom_id, "method": "POST", "url": _PATH, "body": request.params}
        # A line break between two fields would end the line. In steps, each of which holds the interpreter.
        view = memoryview(msgspec.json.encode(line))
        for start in range(0, len(view), _STEP):
            writing.put(bytes(view[start : start + _STEP]).translate(_BLANKS))
        writing.put(b"\n")


async def list_batches(service: Service, call: Call[None]) -> Reply:
    """List the batches of messages of the request's key, newest first."""
    files = files_of(service)
    add_request_id(call.record)
    limit, param, cursor, before = message_page_query(call.query)
    find = None
    if files.exist:
        find = partial(files.store.batches.page, call.key.name, "anthropic", reverse=not before)
    batches, more = await fetch_page(find, limit, cursor, param)
    if before:
        batches = batches[::-1]
    return await page_reply(MessageBatchPage, batches, _batch_object, more=more)


async def _batch(service: Service, call: Call[None]) -> Batch:
    """Return the batch that the path of *call* names. Raises :class:`ObjectNotFound`."""
    add_request_id(call.record)
    return await find_batch(service, call, "anthropic", "message_batch_id")


async def retrieve(service: Service, call: Call[None]) -> Reply:
    """Return a batch of messages as it is now."""
    return json_reply(_batch_object(await _batch(service, call)))


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel a batch of messages. Requests that run may end, others do not start."""
    return json_reply(_batch_object(await cancel_batch(service, call, await _batch(service, call))))


async def delete(service: Service, call: Call[None]) -> Reply:
    """Delete a batch of messages that has ended, and its results."""
    batch = await _batch(service, call)
    if batch.open:
        raise errors.ObjectInUse("The batch has not ended. Cancel it first.", param="message_batch_id")
    files = files_of(service)
    file = await _output(files, batch)
    if file is not None:
        await files.delete(file)
    # Last: if anything of it fails, the client can try again.
    await files.store.batches.delete(batch.id)
    return json_reply(DeletedMessageBatch(id=batch.id))


async def results(service: Service, call: Call[None]) -> Reply:
    """Return the results of a batch that has ended: a JSON object in each line, in the order of the input."""
    batch = await _batch(service, call)
    files = files_of(service)
    if batch.open:
        raise errors.ObjectNotFound("The batch has not ended.", param="message_batch_id")
    file = await _output(files, batch)
    if file is None:
        raise errors.ObjectNotFound("The batch has no results any more, or never had any.", param="message_batch_id")
    return await file_reply(service, file, f"{batch.id}_results.jsonl", "application/x-jsonl")


async def _output(files: Files, batch: Batch) -> StoredFile | None:
    """Return the file with the results of *batch*, if it has one."""
    if batch.output is None:
        return None
    return await files.store.files.find(batch.output, batch.owner)


def _batch_object(batch: Batch) -> MessageBatch:
    """Return *batch* as clients see it."""
    ended_at = None
    results_url = None
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if batch.status == "cancelling":
        status = "canceling"
    if not batch.open:
        status = "ended"
        ended_at = _time(batch.times.get(f"{batch.status}_at"))
        if batch.output is not None:
            # A path and not a URL: a proxy in front of the service may have another protocol and another name.
            results_url = f"{_PATH}/batches/{batch.id}/results"
    return MessageBatch(
        id=batch.id,
        processing_status=status,
        request_counts=_counts(batch),
        ended_at=ended_at,
        created_at=_text(batch.created),
        expires_at=_text(batch.expires),
        cancel_initiated_at=_time(batch.times.get("cancelling_at")),
        results_url=results_url,
    )


def _counts(batch: Batch) -> MessageCounts:
    """Return the counts of *batch* as Anthropic's API has them: by result, once it has ended."""
    if batch.open:
        return MessageCounts(processing=batch.total, succeeded=0, errored=0, canceled=0, expired=0)
    counts = MessageCounts(processing=0, succeeded=batch.succeeded, errored=batch.failed, canceled=0, expired=0)
    if batch.status == "cancelled":
        counts.canceled = batch.unfinished
    elif batch.status == "expired":
        counts.expired = batch.unfinished
    elif batch.status == "failed":
        counts.errored += batch.unfinished
    return counts


def _time(seconds: float | None) -> str | None:
    """Return a Unix time as a text, if there is one."""
    if seconds is None:
        return None
    return _text(seconds)


def _text(seconds: float) -> str:
    """Return a Unix time in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
