"""
``/v1/uploads``: files that come in parts, because a proxy takes no larger ones or a connection does not last.

Source of the wire format: OpenAI's ``Uploads`` (openai-openapi 2.3.0). The id of an upload and that of its file have
the same digits, so an upload needs no row of its own: until it is complete, the file is one that is being uploaded, and
counts for the limit of its key with the size that was declared.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta

from triton_openai import errors
from triton_openai.api.bodies import FileField, Positive, json_reply, new_id, unknown_field
from triton_openai.api.service import Service
from triton_openai.api.uploaded_files import (
    ExpiresAfter,
    FileObject,
    Purpose,
    file_object,
    files_of,
    max_size_for,
    plain_name,
    renew_upload,
    seconds_kept,
    too_much,
)
from triton_openai.batches.file_folder import UPLOAD_LEASE_SECONDS, Files
from triton_openai.batches.upload_parts import UploadParts
from triton_openai.errors import ServiceError
from triton_openai.operations import Call, Form, FormPart, Reply
from triton_openai.storage.batch_records import StoredFile

#: Seconds after which an upload that is not complete expires, as at OpenAI.
LIFETIME = 3600.0
#: Bytes of a part, as at OpenAI, and parts of an upload.
MAX_PART_SIZE = 64 * 1024 * 1024
MAX_PARTS = 1000
# An upload may have so many parts, and one more for each so many bytes: empty parts cost no bytes, but an inode each.
_MIN_PARTS = 16
_PART_BYTES = 4096
# How many times the bytes of a file its parts may have together: a client that has lost an answer sends a part again.
_MAX_REPEATED = 2
# Bytes of a form besides its part.
_FORM_SIZE = 64 * 1024
_UPLOAD_ID = re.compile(r"upload_([0-9a-f]{32})")
# By the id in the path. An upload is completed or cancelled by one request at a time: to complete it copies the file.
_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


class UploadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file that will come in parts: its name, and how many bytes it has in all."""

    filename: str
    purpose: Purpose
    bytes: Positive
    #: It is not stored: the contents of a file are sent without a type.
    mime_type: str
    expires_after: ExpiresAfter | None = None


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload. It has a file once it is complete."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None = None


class PartRequest(msgspec.Struct, kw_only=True):
    """A part of a file, a form with one field."""

    data: FileField


class PartObject(msgspec.Struct, kw_only=True):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class CompleteRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parts in their order. ``md5`` is the digest of the whole file, in hexadecimal digits."""

    part_ids: Annotated[Sequence[str], Meta(min_length=1, max_length=MAX_PARTS)]
    md5: str | None = None


async def create(service: Service, call: Call[UploadRequest]) -> Reply:
    """Begin to upload a file in parts. Within an hour, all parts must have come and the upload be completed."""
    files = files_of(service)
    body = call.body
    largest = max_size_for(files, body.purpose)
    if body.bytes > largest:
        raise errors.PayloadTooLarge(f"The file is larger than the limit of {largest} bytes.", param="bytes")
    created = time.time()
    file = StoredFile(
        id=new_id("file"),
        owner=call.key.name,
        purpose=body.purpose,
        filename=plain_name(body.filename),
        bytes=body.bytes,
        created=created,
        expires=created + LIFETIME,
        state="uploading",
    )
    if not await files.store.files.reserve(file, files.settings.max_total):
        raise too_much(files)
    if body.expires_after is not None:
        await UploadParts(files, file.id).set_seconds(body.expires_after.seconds)
    return json_reply(_upload_object(file, "pending"))


async def add_part(service: Service, call: Call[Form]) -> Reply:
    """Upload a part of a file: up to 67108864 bytes. Parts may come at the same time, and in any order."""
    files = files_of(service)
    file = await _pending(service, call)
    parts = UploadParts(files, file.id)
    await _check_room(parts, file)
    part_id = new_id("part", "_")
    created = time.time()
    # Parts that are on their way count, too: together they would be more than the key may have.
    reservation = StoredFile(
        id=part_id,
        owner=call.key.name,
        bytes=min(call.body.declared_size or MAX_PART_SIZE, MAX_PART_SIZE),
        created=created,
        expires=created + UPLOAD_LEASE_SECONDS,
        state="uploading",
    )
    if not await files.store.files.reserve(reservation, files.settings.max_total):
        raise too_much(files)
    renewing = asyncio.create_task(renew_upload(files, part_id))
    try:
        await _write(service, call, parts, part_id)
        try:
            await _check_room(parts, file)
        except ServiceError:
            await parts.delete(part_id)
            raise
    finally:
        renewing.cancel()
        # What cannot be deleted now is swept.
        with suppress(ServiceError):
            await files.store.files.delete([part_id])
    return json_reply(PartObject(id=part_id, created_at=int(created), upload_id=call.path["upload"]))


async def _check_room(parts: UploadParts, file: StoredFile) -> None:
    """Raise :class:`InvalidRequest` if *parts* are more than the file may have."""
    sizes = await parts.sizes()
    max_parts = min(MAX_PARTS, _MIN_PARTS + file.bytes // _PART_BYTES)
    if len(sizes) > max_parts:
        raise errors.InvalidRequest(
            f"An upload of {file.bytes} bytes can have {max_parts} parts at most.", param="data", code="too_many_parts"
        )
    if sum(sizes.values()) > _MAX_REPEATED * file.bytes:
        message = f"The parts have more than {_MAX_REPEATED} times the {file.bytes} bytes of the file together."
        raise errors.InvalidRequest(message, param="data", code="upload_too_large")


async def _write(service: Service, call: Call[Form], parts: UploadParts, part_id: str) -> None:
    """Write the field ``data`` of a form as a part. Raises :class:`InvalidRequest`."""
    written = False
    async for field in call.body.parts(MAX_PART_SIZE + _FORM_SIZE):
        if field.name != "data":
            if service.settings.api.strict_parameters:
                raise unknown_field(field.name)
            continue
        if written:
            raise errors.InvalidValue("The form has 'data' twice.", "data")
        await _write_field(field, parts, part_id)
        written = True
    call.record.body_size = call.body.size
    if not written:
        raise errors.missing("data")


async def _write_field(field: FormPart, parts: UploadParts, part_id: str) -> None:
    writing = await parts.write(part_id)
    try:
        async for piece in field.pieces():
            await writing.add(piece)
            if writing.size > MAX_PART_SIZE:
                raise errors.PayloadTooLarge(
                    f"The part is larger than the limit of {MAX_PART_SIZE} bytes.", param="data"
                )
        await writing.end()
    finally:
        writing.close()


async def complete(service: Service, call: Call[CompleteRequest]) -> Reply:
    """Make a file of the parts of an upload. The bytes must be as many as were declared."""
    files = files_of(service)
    async with _lock(call.path["upload"]):
        file = await _find(files, call)
        if file.state != "processed":
            try:
                file = await _joined(files, file, call.body)
            except ServiceError:
                # Another service may have completed it meanwhile, and deleted the parts.
                file = await _find(files, call)
                if file.state != "processed":
                    raise
    return json_reply(_upload_object(file, "completed"))


def _lock(upload_id: str) -> asyncio.Lock:
    """Return the lock of an upload in this process."""
    lock = _locks.get(upload_id)
    if lock is None:
        lock = asyncio.Lock()
        _locks[upload_id] = lock
    return lock


async def _joined(files: Files, file: StoredFile, body: CompleteRequest) -> StoredFile:
    """Return the file that the parts of an upload become, and delete the parts. Raises :class:`ServiceError`."""
    parts = UploadParts(files, file.id)
    seconds: float | None = await parts.seconds()
    if seconds is None:
        seconds = seconds_kept(files, file.purpose)
    sizes = await parts.sizes()
    for part_id in body.part_ids:
        if part_id not in sizes:
            raise errors.InvalidValue(f"The upload has no part '{part_id[:100]}'.", "part_ids")
    if len(set(body.part_ids)) != len(body.part_ids):
        raise errors.InvalidValue("'part_ids' names a part twice.", "part_ids")
    size = sum(sizes[part_id] for part_id in body.part_ids)
    if size != file.bytes:
        message = f"The parts have {size} bytes together, and the upload was made for {file.bytes}."
        raise errors.InvalidRequest(message, param="part_ids", code="upload_incomplete")
    digest = await parts.join([(part_id, sizes[part_id]) for part_id in body.part_ids], body.md5)
    if digest is not None:
        message = f"The MD5 digest of the parts is {digest}, and not '{(body.md5 or '')[:32]}'."
        raise errors.InvalidRequest(message, param="md5", code="checksum_mismatch")
    expires = None
    if seconds is not None:
        expires = file.created + seconds
    done = msgspec.structs.replace(file, state="processed", expires=expires)
    if not await files.store.files.complete_upload(done):
        # Another service has completed it, or it was cancelled or has expired meanwhile.
        other = await files.store.files.find_upload(file.id, file.owner)
        if other is None:
            await files.unlink(file.id)
            raise errors.ObjectNotFound("The upload was cancelled, or has expired.", param="upload_id")
        done = other
    await parts.clear()
    return done


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel an upload that is not complete, and delete its parts."""
    files = files_of(service)
    async with _lock(call.path["upload"]):
        file = await _pending(service, call)
        await files.delete(file)
        await UploadParts(files, file.id).clear()
    return json_reply(_upload_object(file, "cancelled"))


async def _pending(service: Service, call: Call[Any]) -> StoredFile:
    """Return the file of an upload that is not complete. Raises :class:`InvalidRequest`."""
    file = await _find(files_of(service), call)
    if file.state == "processed":
        raise errors.InvalidRequest("The upload is complete.", param="upload_id", code="upload_completed")
    return file


async def _find(files: Files, call: Call[Any]) -> StoredFile:
    """Return the file of the upload that the path of *call* names. Raises :class:`ObjectNotFound`."""
    upload_id = call.path["upload"]
    named = _UPLOAD_ID.fullmatch(upload_id)
    file = None
    if named is not None and files.exist:
        file = await files.store.files.find_upload(f"file-{named[1]}", call.key.name)
    if file is None:
        raise errors.ObjectNotFound(f"There is no upload '{upload_id[:100]}'.", param="upload_id")
    return file


def _upload_object(file: StoredFile, status: Literal["pending", "completed", "cancelled"]) -> UploadObject:
    """Return the upload of *file* as clients see it."""
    described = None
    if status == "completed":
        described = file_object(file)
    purpose: Any = file.purpose
    return UploadObject(
        id=f"upload_{file.id.removeprefix('file-')}",
        bytes=file.bytes,
        created_at=int(file.created),
        expires_at=int(file.created + LIFETIME),
        filename=file.filename,
        purpose=purpose,
        status=status,
        file=described,
    )
