"""Files: uploads, what they become, who sees them, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from aiohttp import FormData

from tests.clock import Clock, turns
from tests.conformance.fake_triton import FakeTriton
from tests.proxy_fixture import Proxy, serving
from tests.store_fixture import Place, local
from triton_openai.api import uploaded_files
from triton_openai.app import SERVICE
from triton_openai.batches import file_folder as batch_files
from triton_openai.batches.bucket import BucketFiles
from triton_openai.config.tree import (
    AccessSettings,
    BatchesSettings,
    FilesSettings,
    LimitSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.errors import ObjectNotFound
from triton_openai.storage.batch_records import StoredFile

TEXT = b"<script>alert(1)</script>\n" * 4000


@asynccontextmanager
async def running(
    place: Place | Path, *, server: ServerSettings | None = None, limits: LimitSettings | None = None, **files: Any
) -> AsyncIterator[Proxy]:
    """Run the service with two keys, and its files in *place*."""
    place = local(place) if isinstance(place, Path) else place
    async with FakeTriton() as triton:
        settings = Settings(
            server=server or ServerSettings(),
            limits=limits or LimitSettings(),
            triton=TritonSettings(url=(triton.url,)),
            files=FilesSettings(store=place.files, **files),
            batches=BatchesSettings(store=place.batches),
            access=AccessSettings(api_key=("one:sk-1", "two:sk-2")),
        )
        async with serving(settings) as proxy:
            yield proxy


async def call(proxy: Proxy, method: str, path: str, key: str = "sk-1", **options: Any) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.client.request(method, f"/v1/files{path}", headers=headers, **options) as response:
        answer = await proxy._answer(method, f"/v1/files{path}", response)
        return answer.status, answer.json


def left(proxy: Proxy) -> list[str]:
    """Return the names of the files that are kept."""
    files = proxy.client.app[SERVICE].files
    names = [path.name for path in files.folder.iterdir() if path.suffix != ".lock"]
    if isinstance(files, BucketFiles):
        names += [one["path"].removeprefix("files/") for page in obstore.list(files.bucket) for one in page]
    return [name for name in names if not name.startswith("shared-")]


def form(content: bytes = TEXT, name: str = "a.html", **fields: str) -> FormData:
    """Return a form with a file, the last of its fields."""
    made = FormData(quote_fields=False)
    for field, value in fields.items():
        made.add_field(field.replace("expires_", "expires_after[") + "]" * field.startswith("expires_"), value)
    made.add_field("file", content, filename=name, content_type="text/html")
    return made


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads to a bucket pass through the state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def test_a_file_from_upload_to_deletion(place: Place) -> None:
    """A file comes back as it was, whole or in part, for its key alone, as something that no browser shows."""
    async with running(place) as proxy:
        name = "../../etc/<b>\u00fc.html"
        status, made = await call(proxy, "POST", "", data=form(name=name, purpose="user_data"))
        assert 200 == status
        assert re.fullmatch("file-[0-9a-f]{32}", made["id"])
        assert (name, len(TEXT), "user_data", None) == (
            made["filename"], made["bytes"], made["purpose"], made["expires_at"]
        )  # fmt: skip
        path = f"/{made['id']}"
        assert (200, made) == await call(proxy, "GET", path)
        headers = {"Authorization": "Bearer sk-1"}
        async with proxy.client.get(f"/v1/files{path}/content", headers=headers) as response:
            assert TEXT == await response.read()
            assert "application/octet-stream" == response.headers["Content-Type"]
            assert "nosniff" == response.headers["X-Content-Type-Options"]
            assert response.headers["Content-Disposition"].startswith("attachment; filename*=UTF-8''..%2F..%2Fetc")
            tag = response.headers["ETag"]
        end, size = len(TEXT) - 1, len(TEXT)
        for asked, more, status, span, expected in (
            ("bytes=5-9", {}, 206, f"bytes 5-9/{size}", TEXT[5:10]),
            (f"bytes=5-{size * 2}", {}, 206, f"bytes 5-{end}/{size}", TEXT[5:]),
            ("bytes=-3", {}, 206, f"bytes {size - 3}-{end}/{size}", TEXT[-3:]),
            ("bytes=5-9", {"If-Range": tag}, 206, f"bytes 5-9/{size}", TEXT[5:10]),
            (f"bytes={size}-", {}, 416, f"bytes */{size}", None),
        ):
            ranged = {**headers, "Range": asked, **more}
            async with proxy.client.get(f"/v1/files{path}/content", headers=ranged) as part:
                content = await part.read()
                assert (status, span) == (part.status, part.headers.get("Content-Range")), (asked, more)
                assert expected in (None, content)
        async with proxy.client.head(f"/v1/files{path}/content", headers=headers) as head:
            assert (200, str(size), b"") == (head.status, head.headers["Content-Length"], await head.read())
        async with proxy.client.get(f"/v1/files{path}/content", headers={**headers, "If-None-Match": tag}) as same:
            assert 304 == same.status
        for method, what in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            status, answer = await call(proxy, method, path + what, "sk-2")
            assert (404, "not_found") == (status, answer["error"]["code"])
        assert [] == (await call(proxy, "GET", "", "sk-2"))[1]["data"]
        status, gone = await call(proxy, "DELETE", path)
        assert (200, {"id": made["id"], "object": "file", "deleted": True}) == (status, gone)
        assert 404 == (await call(proxy, "GET", path))[0]
        assert [] == left(proxy)
        # Somebody else has deleted one.
        lost = (await call(proxy, "POST", "", data=form(purpose="user_data")))[1]["id"]
        await proxy.client.app[SERVICE].files.unlink(lost)
        status, answer = await call(proxy, "GET", f"/{lost}/content")
        assert (404, "not_found") == (status, answer["error"]["code"])


async def test_pages_of_files(place: Place) -> None:
    """Files are listed newest first, in pages, all or those of one purpose."""
    async with running(place) as proxy:
        assert [] == (await call(proxy, "GET", ""))[1]["data"]
        purposes = ("batch", "vision", "batch")
        ids = [(await call(proxy, "POST", "", data=form(b"{}\n", purpose=one)))[1]["id"] for one in purposes]
        page = (await call(proxy, "GET", "?limit=2"))[1]
        assert ([ids[2], ids[1]], True) == ([one["id"] for one in page["data"]], page["has_more"])
        page = (await call(proxy, "GET", f"?after={page['last_id']}"))[1]
        assert ([ids[0]], False) == ([one["id"] for one in page["data"]], page["has_more"])
        page = (await call(proxy, "GET", "?purpose=batch&order=asc"))[1]
        assert [ids[0], ids[2]] == [one["id"] for one in page["data"]]
        # Those of a batch do not stay for ever.
        assert [30 * 86_400] * 2 == [one["expires_at"] - one["created_at"] for one in page["data"]]
        for query in ("limit=0", "limit=10001", "order=up", "after=file-x", "after=%00"):
            assert 400 == (await call(proxy, "GET", f"?{query}"))[0]


async def test_names_with_any_character(place: Place) -> None:
    """What no name has is found nowhere, and whatever a client calls its file, the file is kept."""
    async with running(place) as proxy:
        headers = {"Authorization": "Bearer sk-1", "Content-Type": "multipart/form-data; boundary=b"}
        for name in ("a%00b", "%F0%9F%98%80", "%7F" * 600, "%ff", "%ed%a0%80"):
            data = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--b\r\n'
            data += (
                f"Content-Disposition: form-data; name=\"file\"; filename*=UTF-8''{name}\r\n\r\nx\r\n--b--\r\n".encode()
            )
            async with proxy.client.post("/v1/files", data=data, headers=headers) as response:
                status, made = response.status, await response.json()
            if status != 200:
                # It cannot be read.
                assert 400 == status, made
                assert name in ("%ff", "%ed%a0%80")
                continue
            assert (200, made) == await call(proxy, "GET", f"/{made['id']}")
        assert 404 == (await call(proxy, "GET", "/%00"))[0]
        assert [] == (await call(proxy, "GET", "?purpose=%00"))[1]["data"]


async def test_what_is_refused_leaves_nothing(place: Place) -> None:
    """Wrong forms and what is too large are refused with the field to blame, and leave no bytes behind."""
    cases: list[tuple[FormData, int, str | None]] = [
        (form(), 400, "purpose"),
        (form(purpose="fun"), 400, "purpose"),
        (form(purpose="batch", expires_anchor="created_at", expires_seconds="60"), 400, "expires_after.seconds"),
        (form(purpose="batch", expires_seconds="3600"), 400, "expires_after.anchor"),
        (form(purpose="batch"), 413, "file"),
        (FormData({"purpose": "batch", "expires_after": "{"}, default_to_multipart=True), 400, "expires_after"),
        (FormData({"purpose": "batch", "expires_after": "[" * 1024}, default_to_multipart=True), 400, "expires_after"),
        (FormData({"purpose": "batch"}, default_to_multipart=True), 400, "file"),
        (form(b"x" * 300_000, purpose="vision"), 413, None),
    ]
    async with running(place, max_size=200_000, max_batch_size=100_000, max_total=350_000) as proxy:
        for data, status, param in cases:
            answer = await call(proxy, "POST", "", data=data)
            assert status == answer[0], answer
            assert param in (None, answer[1]["error"]["param"]), answer
        for _ in range(3):
            assert 200 == (await call(proxy, "POST", "", data=form(purpose="vision")))[0]
        full = await call(proxy, "POST", "", data=form(purpose="vision"))
        assert (413, "storage_limit_exceeded") == (full[0], full[1]["error"]["code"])
        assert 200 == (await call(proxy, "POST", "", "sk-2", data=form(purpose="vision")))[0]
        assert 4 == len(left(proxy))


async def test_uploads_larger_than_a_body_may_be(tmp_path: Path) -> None:
    """A file may be larger than other requests: it goes to the disk as it comes."""
    async with running(tmp_path, server=ServerSettings(max_body_size=10_000)) as proxy:
        status, made = await call(proxy, "POST", "", data=form(purpose="assistants"))
        assert (200, len(TEXT)) == (status, made["bytes"])


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that has no room is a 507, and leaves nothing; when there is room again, it works."""
    async with running(tmp_path) as proxy:

        def write_at(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(batch_files, "write_at", write_at)
            status, answer = await call(proxy, "POST", "", data=form(purpose="batch"))
            assert (507, "insufficient_storage") == (status, answer["error"]["code"])
        assert [] == left(proxy)
        assert 200 == (await call(proxy, "POST", "", data=form(purpose="batch")))[0]


async def test_expired_files_and_lost_uploads_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has expired is gone at once for clients, and from the disk with the next sweep."""
    async with running(tmp_path) as proxy:
        data = form(purpose="vision", expires_anchor="created_at", expires_seconds="3600")
        path = f"/{(await call(proxy, 'POST', '', data=data))[1]['id']}"
        kept = (await call(proxy, "POST", "", data=form(purpose="vision")))[1]["id"]
        lost = tmp_path / "files" / "file-1.new"
        lost.write_bytes(b"1")
        os.utime(lost, (1, 1))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3601)
        assert 404 == (await call(proxy, "GET", path))[0]
        await proxy.client.app[SERVICE].files.sweep()
        assert [kept] == left(proxy)


async def test_a_killed_upload_gives_its_bytes_back(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process had reserved when it was killed counts for three minutes, and is swept then."""
    now, size = time.time(), 100_000
    monkeypatch.setattr(time, "time", lambda: now + clock.moved)
    async with running(tmp_path, max_total=size + 20_000) as proxy:
        files = proxy.client.app[SERVICE].files
        reserved = now + batch_files.UPLOAD_LEASE_SECONDS
        killed = StoredFile(id="file-killed", owner="one", bytes=size, created=now, expires=reserved, state="uploading")
        assert await files.store.files.reserve(killed, files.settings.max_total)
        (await files.write(killed.id)).put(b"x")
        assert 413 == (await call(proxy, "POST", "", data=form(b"x" * size, purpose="vision")))[0]
        await clock.elapse(batch_files.UPLOAD_LEASE_SECONDS + 1)
        status, made = await call(proxy, "POST", "", data=form(b"x" * size, purpose="vision"))
        assert 200 == status
        await files.sweep()
        assert [made["id"]] == left(proxy)


async def test_a_slow_upload_counts_until_it_ends(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reserved for it is renewed as long as it takes."""
    now, size = time.time(), 100_000
    reserved, renewed, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(time, "time", lambda: now + clock.moved)
    part = 'Content-Disposition: form-data; name="{}"\r\n\r\n'
    begin = f"--x\r\n{part.format('purpose')}vision\r\n--x\r\n{part.format('file')}"

    async def slow() -> AsyncIterator[bytes]:
        yield begin.encode()
        await end.wait()
        yield b"text\r\n--x--"

    headers = {"Authorization": "Bearer sk-1", "Content-Type": "multipart/form-data; boundary=x"}
    limits = LimitSettings(body_timeout=10_000)
    async with running(tmp_path, limits=limits, max_size=size, max_total=size + 20_000) as proxy:
        store = proxy.client.app[SERVICE].files.store.files
        renew, reserve = store.renew_upload, store.reserve

        async def reserving(file: StoredFile, most: int) -> bool:
            added: bool = await reserve(file, most)
            reserved.set()
            return added

        async def renewing(file_id: str, until: float) -> None:
            await renew(file_id, until)
            renewed.set()

        monkeypatch.setattr(store, "reserve", reserving)
        monkeypatch.setattr(store, "renew_upload", renewing)
        uploading = asyncio.create_task(proxy.client.post("/v1/files", data=slow(), headers=headers))
        await reserved.wait()
        await turns(20)
        for _ in range(6):
            renewed.clear()
            await clock.elapse(batch_files.UPLOAD_RENEWAL_SECONDS + 1)
            await renewed.wait()
        assert clock.moved > batch_files.UPLOAD_LEASE_SECONDS
        assert 413 == (await call(proxy, "POST", "", data=form(b"x" * size, purpose="vision")))[0]
        end.set()
        assert 200 == (await uploading).status
        assert 200 == (await call(proxy, "POST", "", data=form(b"x" * 50_000, purpose="vision")))[0]


async def test_off(tmp_path: Path) -> None:
    """Where files are off, the paths are not found, with a word about why."""
    async with FakeTriton() as triton:
        settings = Settings(triton=TritonSettings(url=(triton.url,)), batches=BatchesSettings(enabled=False))
        async with serving(settings) as proxy:
            answer = await proxy.get("/v1/files")
            assert (404, "not_found") == (answer.status, answer.error["code"])
            assert "--batches" in answer.error["message"]


async def test_a_page_has_a_hundred_files(tmp_path: Path) -> None:
    """A list has a hundred files unless a client asks for more, and its pages lead to all of them."""
    async with running(tmp_path) as proxy:
        store = proxy.client.app[SERVICE].files.store.files
        for number in range(250):
            file = StoredFile(id=f"file-{number:032x}", owner="one", bytes=1, created=number, state="processed")
            await store.reserve(msgspec.structs.replace(file, state="uploading"), 1000)
            await store.complete(msgspec.structs.replace(file, purpose="user_data", filename="a"))
        seen: list[str] = []
        more, query = True, ""
        sizes = []
        while more:
            _, page = await call(proxy, "GET", query)
            seen += [file["id"] for file in page["data"]]
            sizes.append(len(page["data"]))
            more, query = page["has_more"], f"?after={page['last_id']}"
        assert [100, 100, 50] == sizes
        assert [f"file-{number:032x}" for number in reversed(range(250))] == seen
        assert 250 == len((await call(proxy, "GET", "?limit=10000"))[1]["data"])
        assert 400 == (await call(proxy, "GET", "?limit=10001"))[0]


async def test_a_file_that_has_lost_its_end(tmp_path: Path) -> None:
    """Whoever reads it whole gets an error: the rest does not come."""
    async with running(tmp_path) as proxy:
        service = proxy.client.app[SERVICE]
        status, file = await call(proxy, "POST", "", data=form(purpose="user_data"))
        assert 200 == status
        stored = await service.files.store.files.find(file["id"], "one")
        assert TEXT == await uploaded_files.read_file(service, stored)
        os.truncate(service.files.folder / stored.id, 5)
        async with asyncio.timeout(120):
            with pytest.raises(ObjectNotFound):
                await uploaded_files.read_file(service, stored)
