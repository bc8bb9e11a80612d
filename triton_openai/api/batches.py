"""``/v1/batches``: batches of requests, whose lines are a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triton_openai import errors
from triton_openai.api.bodies import json_reply, new_id
from triton_openai.api.lines import endpoints, groups_of
from triton_openai.api.paging import Page, fetch_page, page_limit
from triton_openai.api.responses.objects import Metadata, ResponseUsage
from triton_openai.api.service import Service
from triton_openai.api.uploaded_files import ExpiresAfter, files_of, find_file, page_reply, too_much
from triton_openai.operations import Call, Reply
from triton_openai.storage.batch_records import Batch, Status
from triton_openai.telemetry.request_record import RequestRecord

_Window = Annotated[str, Meta(pattern=r"^([1-9]\d?|1[0-5]\d|16[0-8])h$")]


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The requests of a batch are the lines of a file, all to one endpoint. The window is ``1h`` to ``168h``."""

    input_file_id: str
    endpoint: str
    completion_window: _Window
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchFault(msgspec.Struct, kw_only=True):
    """An error of a batch, or of a line of its input."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(msgspec.Struct, kw_only=True):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: Sequence[BatchFault]


class BatchCounts(msgspec.Struct, kw_only=True):
    """The lines of a batch: all, those that succeeded, and those that were refused or failed."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. A time is null until its status is reached."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: ResponseUsage
    metadata: dict[str, str] | None


class BatchList(Page[BatchObject], tag_field="object", tag="list"):
    """A page of batches."""


async def create(service: Service, call: Call[BatchRequest]) -> Reply:
    """Run the requests of a file below live traffic. They are checked as a whole before any of them runs."""
    files = files_of(service)
    body = call.body
    allowed = endpoints(service.operations)
    if body.endpoint not in allowed:
        raise errors.InvalidValue(f"'endpoint' must be one of {', '.join(sorted(allowed))}.", "endpoint")
    file = await find_file(service, call.key, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise errors.InvalidValue(f"The purpose of the input file is '{file.purpose}', not 'batch'.", "input_file_id")
    if file.bytes > files.settings.max_batch_size:
        raise errors.InvalidValue("The input file is too large for a batch.", "input_file_id")
    now = time.time()
    batch_id = new_id("batch", "_")
    metadata = None
    if body.metadata is not None:
        metadata = dict(body.metadata)
    output_seconds = None
    if body.output_expires_after is not None:
        output_seconds = body.output_expires_after.seconds
    batch = Batch(
        id=batch_id,
        opened=proofs_of(service, call, body.endpoint, batch_id),
        owner=call.key.name,
        kind="openai",
        endpoint=body.endpoint,
        input=file.id,
        created=now,
        window=body.completion_window,
        expires=now + int(body.completion_window[:-1]) * 3600,
        metadata=metadata,
        output_seconds=output_seconds,
    )
    await add(service, call.record, batch, "input_file_id")
    return json_reply(batch_object(batch))


def proofs_of(service: Service, call: Call[Any], endpoint: str, batch_id: str) -> dict[str, str]:
    """
    Return the proof that *call* may create the batch *batch_id*, whose lines ask *endpoint*.

    Raises :class:`ApiRestricted` unless it has every header that its lines would need as requests of their own.
    """
    groups = groups_of(service.operations, endpoint)
    return service.authorizer.restrictions.proofs(groups, call.headers, batch_id)


async def add(service: Service, record: RequestRecord, batch: Batch, param: str) -> None:
    """
    Add *batch*, whose input the field *param* names.

    Raises :class:`TooManyBatches`, :class:`PayloadTooLarge` and :class:`ObjectNotFound`.
    """
    max_open = service.settings.batches.max_batches
    files = files_of(service)
    fields = record.log_fields
    if "trace_id" in fields:
        batch.trace = "00-{trace_id}-{span_id}-{trace_flags}".format_map(fields)
    added = await files.store.batches.add(batch, max_open=max_open, max_total=files.settings.max_total)
    if added == "too many":
        raise errors.TooManyBatches(f"This key has {max_open} batches that have not ended.", retry_after=60)
    if added == "no room":
        raise too_much(files)
    if added == "no file":
        raise errors.ObjectNotFound(f"There is no file '{batch.input}'.", param=param)
    wake(service)


async def find_batch(
    service: Service, call: Call[Any], kind: Literal["openai", "anthropic"], param: str = "batch_id"
) -> Batch:
    """Return the batch that the path of *call* names, if it is its key's. Raises :class:`ObjectNotFound`."""
    files = files_of(service)
    batch_id = call.path["batch"]
    batch = None
    if files.exist:
        batch = await files.store.batches.find(batch_id, call.key.name, kind)
    if batch is None:
        raise errors.ObjectNotFound(f"There is no batch '{batch_id[:100]}'.", param=param)
    return batch


async def cancel_batch(service: Service, call: Call[Any], batch: Batch) -> Batch:
    """Cancel *batch*, unless it has ended or is about to; return it as it is then."""

    def cancel(batch: Batch) -> None:
        if batch.status in ("validating", "in_progress"):
            batch.set_status("cancelling")

    changed = await files_of(service).store.batches.change(batch.id, cancel)
    wake(service)
    return changed or await find_batch(service, call, batch.kind)


def wake(service: Service) -> None:
    """Make the batch runner read the tables now."""
    assert service.batches is not None, "there are files"
    service.batches.wake()


async def retrieve(service: Service, call: Call[None]) -> Reply:
    """Return a batch as it is now."""
    return json_reply(batch_object(await find_batch(service, call, "openai")))


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel a batch. Requests that run may end, others do not start. The results until then are kept."""
    batch = await cancel_batch(service, call, await find_batch(service, call, "openai"))
    if batch.status not in ("cancelling", "cancelled"):
        raise errors.InvalidRequest(
            f"The batch cannot be cancelled: its status is '{batch.status}'.",
            param="batch_id",
            code="batch_not_cancellable",
        )
    return json_reply(batch_object(batch))


async def list_batches(service: Service, call: Call[None]) -> Reply:
    """List the batches of the request's key, newest first."""
    files = files_of(service)
    find = None
    if files.exist:
        find = partial(files.store.batches.page, call.key.name, "openai")
    batches, more = await fetch_page(find, page_limit(call.query, 100), call.query.get("after"))
    return await page_reply(BatchList, batches, batch_object, more=more)


def batch_object(batch: Batch) -> BatchObject:
    """Return *batch* as clients see it. Its files are named once they exist."""
    usage = batch.usage
    faults = None
    if batch.problems:
        faults = BatchFaults(data=[BatchFault(**msgspec.structs.asdict(problem)) for problem in batch.problems])
    output = None
    errors_file = None
    if not batch.open:
        output = batch.output
        errors_file = batch.errors
    statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    times: dict[str, Any] = {f"{status}_at": batch.times.get(f"{status}_at") for status in statuses}
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=faults,
        input_file_id=batch.input,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=output,
        error_file_id=errors_file,
        created_at=int(batch.created),
        expires_at=int(batch.expires),
        request_counts=BatchCounts(total=batch.total, completed=batch.succeeded, failed=batch.failed),
        usage=ResponseUsage.of(
            usage.input_tokens, usage.output_tokens, cached=usage.cached_tokens, reasoning=usage.reasoning_tokens
        ),
        metadata=batch.metadata,
        **times,
    )
