"""Uploads: files that come in parts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from tests.proxy_fixture import Proxy
from tests.store_fixture import Place
from tests.unit.api.test_uploaded_files import left, running
from triton_openai.api import uploads
from triton_openai.app import SERVICE
from triton_openai.batches.upload_parts import UploadParts

PIECES = [b"first " * 1000, b"", b"second" * 100_000, b"third"]
WHOLE = b"".join(PIECES)
NEW = {"filename": "in.jsonl", "purpose": "batch", "bytes": len(WHOLE), "mime_type": "text/jsonl"}


async def call(proxy: Proxy, method: str, path: str, key: str = "sk-1", **options: Any) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.client.request(method, path, headers=headers, **options) as response:
        answer = await proxy._answer(method, path, response)
        return answer.status, answer.json


async def begin(proxy: Proxy, **changes: Any) -> str:
    """Begin an upload, and return its path."""
    status, upload = await call(proxy, "POST", "/v1/uploads", json={**NEW, **changes})
    assert 200 == status, upload
    assert ("upload", "pending", None) == (upload["object"], upload["status"], upload["file"])
    return f"/v1/uploads/{upload['id']}"


async def add(proxy: Proxy, path: str, data: bytes, key: str = "sk-1") -> tuple[int, Any]:
    """Add a part."""
    form = FormData()
    form.add_field("data", data, filename="blob")
    return await call(proxy, "POST", f"{path}/parts", key, data=form)


async def part(proxy: Proxy, path: str, data: bytes) -> str:
    """Add a part, and return its id."""
    status, made = await add(proxy, path, data)
    assert (200, "upload.part", path.rpartition("/")[2]) == (status, made["object"], made["upload_id"]), made
    return str(made["id"])


async def complete(proxy: Proxy, path: str, ids: list[str], **more: Any) -> tuple[int, Any]:
    """Complete an upload."""
    return await call(proxy, "POST", f"{path}/complete", json={"part_ids": ids, **more})


async def test_a_file_of_parts_is_a_file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in any order, also after a restart, become the file in the order that the client names, and go then."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with running(place) as proxy:
        path = await begin(proxy, expires_after={"anchor": "created_at", "seconds": 7200})
        last = await part(proxy, path, PIECES[3])
        first, empty = await asyncio.gather(part(proxy, path, PIECES[0]), part(proxy, path, PIECES[1]))
        assert (200, []) == (
            (await call(proxy, "GET", "/v1/files"))[0],
            (await call(proxy, "GET", "/v1/files"))[1]["data"],
        )
    async with running(place) as proxy:
        middle = await part(proxy, path, PIECES[2])
        ids = [first, empty, middle, last]
        status, answer = await complete(proxy, path, ids, md5="0" * 32)
        assert (400, "checksum_mismatch") == (status, answer["error"]["code"])
        digest = hashlib.md5(WHOLE, usedforsecurity=False).hexdigest().upper()
        answers = await asyncio.gather(*(complete(proxy, path, ids, md5=digest) for _ in range(2)))
        assert [200, 200] == [status for status, _ in answers]
        upload = answers[0][1]
        file = upload["file"]
        assert ("completed", "in.jsonl", len(WHOLE), "batch", "processed") == (
            upload["status"], file["filename"], file["bytes"], file["purpose"], file["status"]
        )  # fmt: skip
        assert 7200 == file["expires_at"] - file["created_at"]
        # A client that has lost the answer asks again.
        assert (200, upload) == await complete(proxy, path, ids)
        for what in ("cancel", "parts"):
            status, answer = (
                await add(proxy, path, b"x") if what == "parts" else await call(proxy, "POST", f"{path}/cancel")
            )
            assert (400, "upload_completed") == (status, answer["error"]["code"])
        headers = {"Authorization": "Bearer sk-1"}
        async with proxy.client.get(f"/v1/files/{file['id']}/content", headers=headers) as response:
            assert WHOLE == await response.read()
        assert [file["id"]] == left(proxy)


async def test_empty_parts_have_a_bound(tmp_path: Path) -> None:
    """Each part is a file on the disk, also without any bytes: a small upload has few."""
    async with running(tmp_path) as proxy:
        path = await begin(proxy, bytes=5)
        for _ in range(16):
            await part(proxy, path, b"")
        status, answer = await add(proxy, path, b"")
        assert (400, "too_many_parts") == (status, answer["error"]["code"])
        assert "5 bytes can have 16 parts" in answer["error"]["message"]
        large = await begin(proxy, bytes=8192)
        for _ in range(18):
            await part(proxy, large, b"")
        assert 400 == (await add(proxy, large, b""))[0]


async def test_what_is_no_upload_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, parts, digests and names that are wrong, and uploads of others, are errors that name the field."""
    monkeypatch.setattr(uploads, "MAX_PARTS", 3)
    async with running(tmp_path, max_size=700_000, max_batch_size=650_000, max_total=1_250_000) as proxy:
        path = await begin(proxy)
        other = await begin(proxy, bytes=5)
        one = await part(proxy, path, b"x" * 600_000)
        foreign = await part(proxy, other, b"12345")

        def new(**changes: Any) -> Any:
            return call(proxy, "POST", "/v1/uploads", json={**NEW, **changes})

        no_data = FormData({"file": "x"}, default_to_multipart=True)
        cases = (
            ("too large", new(bytes=650_001), 413, "bytes"),
            ("too large for other purposes", new(bytes=700_001, purpose="user_data"), 413, "bytes"),
            ("too much for the key", new(bytes=690_000, purpose="user_data"), 413, None),
            ("no bytes", new(bytes=0), 400, "bytes"),
            ("no such purpose", new(purpose="other"), 400, "purpose"),
            ("more than declared, twice", add(proxy, other, b"x" * 6), 400, "data"),
            ("no data", call(proxy, "POST", f"{path}/parts", data=no_data), 400, "data"),
            ("of another key", add(proxy, path, b"x", "sk-2"), 404, "upload_id"),
            ("of nobody", add(proxy, "/v1/uploads/upload_1", b"x"), 404, "upload_id"),
            ("a path", add(proxy, "/v1/uploads/upload_..%2F..", b"x"), 404, "upload_id"),
            ("no parts", complete(proxy, path, []), 400, "part_ids"),
            ("a part of another upload", complete(proxy, path, [foreign]), 400, "part_ids"),
            ("a part that is a path", complete(proxy, path, ["../x"]), 400, "part_ids"),
            ("a part twice", complete(proxy, path, [one, one]), 400, "part_ids"),
            ("too little", complete(proxy, path, [one]), 400, "part_ids"),
        )
        for kind, answered, status, param in cases:
            got, answer = await answered
            assert (status, param) == (got, answer["error"]["param"]), (kind, answer)
        # What was refused is not kept, and does not count.
        assert 2 == len([name for name in left(proxy) if name.endswith(".upload")])
        for data in (b"", b""):
            assert 200 == (await add(proxy, path, data))[0]
        status, answer = await add(proxy, path, b"")
        assert (400, "too_many_parts") == (status, answer["error"]["code"])


async def test_a_cancelled_and_an_expired_upload_leave_nothing(tmp_path: Path) -> None:
    """Their parts are deleted, and their bytes are free for the key."""
    async with running(tmp_path, max_total=len(WHOLE) + 100_000) as proxy:
        path = await begin(proxy)
        await part(proxy, path, b"x" * 50_000)
        status, upload = await call(proxy, "POST", f"{path}/cancel")
        assert (200, "cancelled") == (status, upload["status"])
        assert [] == left(proxy)
        assert 404 == (await add(proxy, path, b"x"))[0]
        path = await begin(proxy)
        await part(proxy, path, b"x" * 50_000)
        files = proxy.client.app[SERVICE].files
        await files.store.files.renew_upload(f"file-{path.rpartition('_')[2]}", time.time() - 1)
        assert 404 == (await add(proxy, path, b"x"))[0]
        await begin(proxy)
        await files.sweep()
        assert [] == left(proxy)


async def test_a_part_that_is_sent_again(tmp_path: Path) -> None:
    """A client whose connection broke before the answer sends the part again, and names one of both."""
    async with running(tmp_path) as proxy:
        path = await begin(proxy, bytes=6)
        await part(proxy, path, b"one")
        ids = [await part(proxy, path, b"one"), await part(proxy, path, b"two")]
        status, upload = await complete(proxy, path, ids)
        assert (200, 6) == (status, upload["file"]["bytes"])
        assert [upload["file"]["id"]] == left(proxy)


async def test_an_upload_is_completed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at the same time make one copy of the file: each copy takes the disk's space beside its limit."""
    copies = 0
    join = UploadParts.join

    async def counted(self: UploadParts, *arguments: Any) -> str | None:
        nonlocal copies
        copies += 1
        return await join(self, *arguments)

    monkeypatch.setattr(UploadParts, "join", counted)
    async with running(tmp_path) as proxy:
        path = await begin(proxy)
        ids = [await part(proxy, path, WHOLE)]
        answers = await asyncio.gather(*(complete(proxy, path, ids) for _ in range(5)))
        assert [200] * 5 == [status for status, _ in answers]
        assert 1 == copies


async def test_an_upload_that_ends_while_it_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled by another service, or expired, it becomes no file, and nothing of it is left."""
    join = UploadParts.join
    async with running(tmp_path) as proxy:
        files = proxy.client.app[SERVICE].files

        async def late(self: UploadParts, *arguments: Any) -> str | None:
            # So both begin.
            await files.store.files.expire(self._file_id)
            return await join(self, *arguments)

        monkeypatch.setattr(UploadParts, "join", late)
        path = await begin(proxy)
        ids = [await part(proxy, path, WHOLE)]
        status, answer = await complete(proxy, path, ids)
        assert 404 == status, answer
        assert [] == (await call(proxy, "GET", "/v1/files"))[1]["data"]
        await files.sweep()
        assert [] == left(proxy)
