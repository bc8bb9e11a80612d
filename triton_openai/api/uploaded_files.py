"""``/v1/files``: files that clients upload, and those with the results of batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import quote

import msgspec
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.access.keys import ApiKey
from triton_openai.api.bodies import (
    FileField,
    converted,
    json_reply,
    json_reply_of,
    new_id,
    report_ignored,
    unknown_field,
)
from triton_openai.api.paging import Page, fetch_page, page_query
from triton_openai.api.responses.objects import Deleted
from triton_openai.api.service import Service
from triton_openai.batches.file_folder import UPLOAD_LEASE_SECONDS, UPLOAD_RENEWAL_SECONDS, Files, Writing
from triton_openai.errors import ServiceError, StoreUnavailable
from triton_openai.operations import Call, Form, FormPart, LocalFile, RemoteFile, Reply
from triton_openai.storage.batch_records import StoredFile

_T = TypeVar("_T")
Purpose = Literal["batch", "user_data", "vision", "evals", "assistants", "fine-tune"]
#: Seconds that clients may say files are kept.
Lifetime = Annotated[int, Meta(ge=3600, le=2_592_000)]
# Bytes of a form besides its file, and of a field of it.
_FORM_SIZE = 64 * 1024
_FIELD_SIZE = 1024
_LONGEST_NAME = 512


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When a file expires."""

    anchor: Literal["created_at"]
    #: How long after the anchor.
    seconds: Lifetime


class FileUpload(msgspec.Struct, kw_only=True):
    """A file, and what it is for. The fields of ``expires_after`` are ``expires_after[anchor]`` and so on."""

    file: FileField
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose | Literal["batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Page[FileObject], tag_field="object", tag="list"):
    """A page of files."""


def files_of(service: Service) -> Files:
    """Return the files of *service*. Raises :class:`EndpointNotFound` where they are off."""
    if service.files is None:
        raise errors.EndpointNotFound("This service keeps no files and runs no batches (--batches).")
    return service.files


def check_files(service: Service, key: ApiKey) -> None:
    """Raise :class:`EndpointNotFound` where *service* keeps no files."""
    files_of(service)


async def find_file(service: Service, key: ApiKey, file_id: str, param: str) -> StoredFile:
    """Return a file of *key*. Raises :class:`ObjectNotFound`."""
    files = files_of(service)
    file = None
    if files.exist:
        file = await files.store.files.find(file_id, key.name)
    if file is None:
        raise errors.ObjectNotFound(f"There is no file '{file_id[:100]}'.", param=param)
    return file


async def create(service: Service, call: Call[Form]) -> Reply:
    """Upload a file. The requests of a batch are a file with a JSON object in each line."""
    files = files_of(service)
    max_size = files.settings.max_size
    parts = call.body.parts(max_size + _FORM_SIZE)
    created = time.time()
    # Counted now, so that uploads at the same time do not exceed the limit together.
    file = StoredFile(
        id=new_id("file"),
        owner=call.key.name,
        bytes=call.body.declared_size or max_size,
        created=created,
        expires=created + UPLOAD_LEASE_SECONDS,
        state="uploading",
    )
    if not await files.store.files.reserve(file, files.settings.max_total):
        raise too_much(files)
    writing: Writing | None = None
    renewing = asyncio.create_task(renew_upload(files, file.id))
    try:
        writing = await files.write(file.id)
        upload = await _read(call, parts, writing, strict=service.settings.api.strict_parameters)
        largest = max_size_for(files, upload.purpose)
        if writing.size > largest:
            raise errors.PayloadTooLarge(f"The file is larger than the limit of {largest} bytes.", param="file")
        await writing.end()
        seconds = seconds_kept(files, upload.purpose)
        if upload.expires_after is not None:
            seconds = upload.expires_after.seconds
        file = msgspec.structs.replace(
            file,
            purpose=upload.purpose,
            filename=upload.file.name,
            bytes=writing.size,
            expires=None if seconds is None else created + seconds,
            state="processed",
        )
        await files.store.files.complete(file)
    except BaseException:
        if writing is not None:
            writing.close()
        # Also when the client has left. What cannot be deleted now is swept.
        with suppress(ServiceError):
            await asyncio.shield(files.delete(file))
        raise
    finally:
        renewing.cancel()
    return json_reply(file_object(file))


def max_size_for(files: Files, purpose: str) -> int:
    """Return the most bytes of a file for *purpose*."""
    if purpose == "batch":
        return files.settings.max_batch_size
    return files.settings.max_size


def seconds_kept(files: Files, purpose: str) -> float | None:
    """Return for how long a file for *purpose* is kept if its client does not say; ``None``: until it is deleted."""
    if purpose == "batch":
        return files.settings.max_age * 86_400
    return None


def plain_name(name: str) -> str:
    """Return the client's *name* of a file as it is stored."""
    # Databases have no texts with a NUL.
    return name[:_LONGEST_NAME].replace("\0", "\N{REPLACEMENT CHARACTER}")


async def renew_upload(files: Files, file_id: str) -> None:
    """Count an upload for as long as this process works on it."""
    while True:
        await asyncio.sleep(UPLOAD_RENEWAL_SECONDS)
        # What cannot be renewed now is renewed next time.
        with suppress(ServiceError):
            await files.store.files.renew_upload(file_id, time.time() + UPLOAD_LEASE_SECONDS)


def too_much(files: Files) -> errors.PayloadTooLarge:
    """Return the error for a key that has no room for more *files*."""
    max_total = files.settings.max_total
    message = f"The files of this key would have more than {max_total} bytes together. Delete some."
    return errors.PayloadTooLarge(message, code="storage_limit_exceeded")


async def _read(call: Call[Form], parts: AsyncIterator[FormPart], writing: Writing, *, strict: bool) -> FileUpload:
    """Return the fields of a form with *parts*, while its file is written. Raises :class:`InvalidRequest`."""
    fields: dict[str, object] = {}
    lifetime: dict[str, object] = {}
    ignored: list[str] = []
    async for part in parts:
        name = part.name
        inner = part.name.removeprefix("expires_after[").removesuffix("]")
        if inner in ("anchor", "seconds") and inner != name:
            into = lifetime
            key = inner
        else:
            into = fields
            key = name
        if into is fields and name not in FileUpload.__struct_fields__:
            if strict:
                raise unknown_field(name)
            ignored.append(name)
        elif key in into:
            raise errors.InvalidRequest(f"The form has '{name}' twice.", param=name, code="invalid_value")
        elif name == "file":
            into[key] = FileField(plain_name(part.filename or name), part.media_type, b"")
            async for piece in part.pieces():
                await writing.add(piece)
        else:
            text = await part.read(_FIELD_SIZE)
            if not text:
                # Clients write so what they do not set.
                continue
            try:
                # Some clients send the object as JSON.
                if name == "expires_after":
                    into[key] = msgspec.json.decode(text)
                else:
                    into[key] = text.decode()
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise errors.InvalidValue(f"'{name}' cannot be read.", name) from error
    if lifetime:
        fields["expires_after"] = lifetime
    record = call.record
    record.body_size = call.body.size
    record.unknown_fields = ignored[:16]
    report_ignored(record, ignored)
    return converted(fields, FileUpload, strict=False)


def file_object(file: StoredFile) -> FileObject:
    """Return *file* as clients see it."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=int(file.created),
        expires_at=None if file.expires is None else int(file.expires),
        filename=file.filename.encode(errors="replace").decode(),
        # None but these are stored.
        purpose=cast(Any, file.purpose),
    )


async def list_files(service: Service, call: Call[None]) -> Reply:
    """List the files of the request's key."""
    purpose = call.query.get("purpose")
    # OpenAI's default is the most: clients that go through all pages notice no difference.
    limit, after, reverse = page_query(call.query, max_limit=10_000, default=100)
    files = files_of(service)
    find = None
    if files.exist:
        find = partial(files.store.files.page, call.key.name, purpose=purpose, reverse=reverse)
    rows, more = await fetch_page(find, limit, after)
    return await page_reply(FileList, rows, file_object, more=more)


async def page_reply(
    kind: type[Page[Any]], rows: Sequence[_T], describe: Callable[[_T], object], *, more: bool
) -> Reply:
    """Return a page of what is kept as *rows*, each as *describe* returns it; many of them take a thread."""
    return await json_reply_of(
        lambda: kind.of([describe(row) for row in rows], more=more), cost=2 * offload.ITEM * len(rows)
    )


async def retrieve(service: Service, call: Call[None]) -> Reply:
    """Return what is known of a file."""
    return json_reply(file_object(await find_file(service, call.key, call.path["file"], "file_id")))


async def content(service: Service, call: Call[None]) -> Reply:
    """Return the contents of a file, or a range of them. No browser shows them."""
    file = await find_file(service, call.key, call.path["file"], "file_id")
    return await file_reply(service, file, file.filename)


async def file_reply(
    service: Service, file: StoredFile, filename: str, media_type: str = "application/octet-stream"
) -> Reply:
    """Return the contents of *file* as a reply; clients are told to save it as *filename*."""
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(filename, safe='', errors='replace')}",
        "X-Content-Type-Options": "nosniff",
    }
    files = files_of(service)
    if not files.remote:
        if not await files.has(file.id):
            await files.check()
            raise _gone(file)
        return LocalFile(files.folder / file.id, media_type, headers)

    async def read(start: int, end: int) -> bytes:
        try:
            return await files.read_piece(file.id, start, end)
        except FileNotFoundError as error:
            raise _gone(file) from error

    return RemoteFile(file.id, file.bytes, read, media_type, headers)


async def read_file(service: Service, file: StoredFile) -> bytes:
    """Return the contents of *file*, which is small enough. Raises :class:`ServiceError`."""
    files = files_of(service)
    content = bytearray()
    try:
        while len(content) < file.bytes:
            piece = await files.read_piece(file.id, len(content), file.bytes)
            if not piece:
                # The disk has lost its end.
                raise _gone(file)
            content += piece
    except FileNotFoundError as error:
        raise _gone(file) from error
    except StoreUnavailable as error:
        if await files.has(file.id):
            raise
        raise _gone(file) from error
    return bytes(content)


def _gone(file: StoredFile) -> errors.ObjectNotFound:
    return errors.ObjectNotFound(f"The contents of the file '{file.id}' are not there any more.", param="file_id")


async def delete(service: Service, call: Call[None]) -> Reply:
    """Delete a file, unless an open batch reads it."""
    file = await find_file(service, call.key, call.path["file"], "file_id")
    if not await files_of(service).delete(file):
        raise errors.ObjectInUse("A batch that has not ended reads the file. Cancel it first.", param="file_id")
    return json_reply(Deleted(id=file.id, object="file"))
