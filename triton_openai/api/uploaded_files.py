"""``/v1/files``: files that clients upload, and those with the results of batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import quote

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.api.bodies import FileField, converted, json_response, made_response, tell_ignored, unknown_field
from triton_openai.api.paging import Page, fetch_page, page_query
from triton_openai.api.responses.objects import Deleted
from triton_openai.api.service import key_of, new_id, service_of
from triton_openai.batches.file_folder import UPLOAD_LEASE_SECONDS, UPLOAD_RENEWAL_SECONDS, Files, Writing
from triton_openai.errors import ServiceError
from triton_openai.serving.forms import Form
from triton_openai.serving.request_body import LIMITS
from triton_openai.storage.batch_store import StoredFile
from triton_openai.telemetry.request_record import RECORD

#: Those of the service; absent where they are off.
FILES: web.AppKey[Files] = web.AppKey("files", Files)
_T = TypeVar("_T")
Purpose = Literal["batch", "user_data", "vision", "evals", "assistants", "fine-tune"]
#: Seconds that clients may say files are kept.
Lifetime = Annotated[int, Meta(ge=3600, le=2_592_000)]
# Bytes of a form besides its file, and of a field of it.
_FORM_SIZE, _FIELD_SIZE = 64 * 1024, 1024
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


def files_of(request: web.Request) -> Files:
    """Return the files of the service. Raises :class:`EndpointNotFound` where they are off."""
    files = request.app.get(FILES)
    if files is None:
        raise errors.EndpointNotFound("This service keeps no files and runs no batches (--batches).")
    return files


async def find_file(request: web.Request, file_id: str, param: str) -> StoredFile:
    """Return a file of the request's key. Raises :class:`ObjectNotFound`."""
    files = files_of(request)
    file = await files.store.file(file_id, key_of(request).name) if files.exist else None
    if file is None:
        raise errors.ObjectNotFound(f"There is no file '{file_id[:100]}'.", param=param)
    return file


async def create(request: web.Request) -> web.Response:
    """Upload a file. The requests of a batch are a file with a JSON object in each line."""
    files, settings = files_of(request), service_of(request).settings
    most = files.settings.max_size
    form = Form(request, request.app[LIMITS], max_size=most + _FORM_SIZE)
    created = time.time()
    # Counted now, so that uploads at the same time do not exceed the limit together.
    file = StoredFile(
        id=new_id("file"),
        owner=key_of(request).name,
        bytes=request.content_length or most,
        created=created,
        expires=created + UPLOAD_LEASE_SECONDS,
        state="uploading",
    )
    if not await files.store.reserve(file, files.settings.max_total):
        raise too_much(files)
    writing: Writing | None = None
    renewing = asyncio.create_task(_renew(files, file.id))
    try:
        writing = await files.write(file.id)
        upload = await _read(request, form, writing, strict=settings.api.strict_parameters)
        largest = files.settings.max_batch_size if upload.purpose == "batch" else most
        if writing.size > largest:
            raise errors.PayloadTooLarge(f"The file is larger than the limit of {largest} bytes.", param="file")
        await writing.end()
        seconds = files.settings.max_age * 86_400 if upload.purpose == "batch" else None
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
        await files.store.written(file)
    except BaseException:
        if writing is not None:
            writing.close()
        # Also when the client has left. What cannot be deleted now is swept.
        with suppress(ServiceError):
            await asyncio.shield(files.delete(file))
        raise
    finally:
        renewing.cancel()
    return json_response(file_object(file))


async def _renew(files: Files, file_id: str) -> None:
    """Let an upload count for as long as this process works on it."""
    while True:
        await asyncio.sleep(UPLOAD_RENEWAL_SECONDS)
        # What cannot be renewed now is renewed next time.
        with suppress(ServiceError):
            await files.store.renew_upload(file_id, time.time() + UPLOAD_LEASE_SECONDS)


def too_much(files: Files) -> errors.PayloadTooLarge:
    """Return the error for a key that has no room for more *files*."""
    most = files.settings.max_total
    message = f"The files of this key would have more than {most} bytes together. Delete some."
    return errors.PayloadTooLarge(message, code="storage_limit_exceeded")


async def _read(request: web.Request, form: Form, writing: Writing, *, strict: bool) -> FileUpload:
    """Return the fields of *form*, while its file is written. Raises :class:`InvalidRequest`."""
    fields: dict[str, object] = {}
    lifetime: dict[str, object] = {}
    ignored: list[str] = []
    async for part in form:
        name, inner = part.name, part.name.removeprefix("expires_after[").removesuffix("]")
        into, key = (lifetime, inner) if inner in ("anchor", "seconds") and inner != name else (fields, name)
        if into is fields and name not in FileUpload.__struct_fields__:
            if strict:
                raise unknown_field(name)
            ignored.append(name)
        elif key in into:
            raise errors.InvalidRequest(f"The form has '{name}' twice.", param=name, code="invalid_value")
        elif name == "file":
            # Databases have no texts with a NUL.
            name = (part.filename or name)[:_LONGEST_NAME].replace("\0", "\N{REPLACEMENT CHARACTER}")
            into[key] = FileField(name, part.media_type, b"")
            async for piece in part.pieces():
                await writing.add(piece)
        else:
            text = await part.read(_FIELD_SIZE)
            if not text:
                # Clients write so what they do not set.
                continue
            try:
                # Some clients send the object as JSON.
                into[key] = msgspec.json.decode(text) if name == "expires_after" else text.decode()
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise errors.InvalidValue(f"'{name}' cannot be read.", name) from error
    if lifetime:
        fields["expires_after"] = lifetime
    record = request[RECORD]
    record.body_size = form.size
    record.unknown_fields = ignored[:16]
    tell_ignored(record, ignored)
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


async def list_files(request: web.Request) -> web.Response:
    """List the files of the request's key."""
    purpose = request.query.get("purpose")
    # OpenAI's default is the most: clients that go through all pages notice no difference.
    limit, after, reverse = page_query(request.query, most=10_000, default=100)
    files = files_of(request)
    find = partial(files.store.files, key_of(request).name, purpose=purpose, reverse=reverse) if files.exist else None
    rows, more = await fetch_page(find, limit, after)
    return await page_response(FileList, rows, file_object, more=more)


async def page_response(
    kind: type[Page[Any]], rows: Sequence[_T], describe: Callable[[_T], object], *, more: bool
) -> web.Response:
    """Return a page of what is kept as *rows*, each as *describe* returns it; many of them take a thread."""
    return await made_response(
        lambda: kind.of([describe(row) for row in rows], more=more), cost=2 * offload.ITEM * len(rows)
    )


async def retrieve(request: web.Request) -> web.Response:
    """Return what is known of a file."""
    return json_response(file_object(await find_file(request, request.match_info["file"], "file_id")))


async def content(request: web.Request) -> web.StreamResponse:
    """Return the contents of a file, or a range of them. No browser shows them."""
    file = await find_file(request, request.match_info["file"], "file_id")
    return await send_file(request, file, file.filename)


async def send_file(
    request: web.Request, file: StoredFile, filename: str, media_type: str = "application/octet-stream"
) -> web.StreamResponse:
    """Send the contents of *file*, or a range of them; clients are told to save it as *filename*."""
    headers = {
        "Content-Type": media_type,
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(filename, safe='', errors='replace')}",
        "X-Content-Type-Options": "nosniff",
    }
    files = files_of(request)
    if files.read_remote is None:
        if not await files.has(file.id):
            await files.check()
            raise _gone(file)
        return web.FileResponse(files.folder / file.id, headers=headers)
    return await _send_remote(request, files.read_remote, file, headers)


def _gone(file: StoredFile) -> errors.ObjectNotFound:
    return errors.ObjectNotFound(f"The contents of the file '{file.id}' are not there any more.", param="file_id")


async def _send_remote(
    request: web.Request,
    read: Callable[[str, int, int], Awaitable[bytes]],
    file: StoredFile,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    # A file never changes.
    response = web.StreamResponse(headers={**headers, "ETag": f'"{file.id}"', "Accept-Ranges": "bytes"})
    if any(tag.value in (file.id, "*") for tag in request.if_none_match or ()):
        response.set_status(304)
        await response.prepare(request)
        return response
    start, end = 0, file.bytes
    if "Range" in request.headers and request.headers.get("If-Range", f'"{file.id}"') == f'"{file.id}"':
        try:
            start, end, _ = request.http_range.indices(file.bytes)
        except ValueError:
            # As if it was not there: it is no range of bytes, or has several.
            pass
        else:
            response.set_status(206 if start < end else 416)
            told = f"{start}-{end - 1}" if start < end else "*"
            response.headers["Content-Range"] = f"bytes {told}/{file.bytes}"
    response.content_length = max(0, end - start)
    # Before the head: what fails now is still an error that the client can read.
    try:
        piece = await read(file.id, start, end) if start < end and request.method != "HEAD" else b""
    except FileNotFoundError as error:
        raise _gone(file) from error
    await response.prepare(request)
    while piece:
        await response.write(piece)
        start += len(piece)
        piece = await read(file.id, start, end) if start < end else b""
    return response


async def delete(request: web.Request) -> web.Response:
    """Delete a file, unless an open batch reads it."""
    file = await find_file(request, request.match_info["file"], "file_id")
    if not await files_of(request).delete(file):
        raise errors.ObjectInUse("A batch that has not ended reads the file. Cancel it first.", param="file_id")
    return json_response(Deleted(id=file.id, object="file"))
