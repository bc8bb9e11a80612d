"""Uploads the input of a batch: as one file, or in parts where a proxy takes no request of its size."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from io import BufferedReader, FileIO
from typing import IO

import aiohttp

from triton_openai.cli.batch.client import Client, RequestFailure, with_retries

# Attempts of each request, and bytes of a part: what nginx takes by default is 1 MiB.
_ATTEMPTS = 8
_PART_SIZE = 512 * 1024
_MAX_PARTS = 1000


async def upload(client: Client, content: IO[bytes], name: str, note: Callable[[str], None]) -> str:
    """Upload *content* as a file with a *name*, and return its id. Raises :class:`RequestFailure`."""
    try:
        return await with_retries(partial(_whole, client, content, name), note, attempts=_ATTEMPTS)
    except RequestFailure as failure:
        # The service itself says with a code which of its limits it means.
        if failure.status != 413 or failure.code:
            raise
    note("A proxy takes no request of this size. The input is uploaded in parts.")
    return await _in_parts(client, content, name, note)


async def _whole(client: Client, content: IO[bytes], name: str) -> str:
    content.seek(0)
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    # The form closes the object that it has sent, and the file may be sent again.
    unclosed = BufferedReader(FileIO(content.fileno(), closefd=False))
    form.add_field("file", unclosed, filename=name)
    file = await client.json("POST", "/v1/files", data=form)
    return str(file["id"])


async def _in_parts(client: Client, content: IO[bytes], name: str, note: Callable[[str], None]) -> str:
    size = os.fstat(content.fileno()).st_size
    new = {"filename": name, "purpose": "batch", "bytes": size, "mime_type": "application/jsonl"}
    made = await with_retries(partial(client.json, "POST", "/v1/uploads", json=new), note, attempts=_ATTEMPTS)
    path = f"/v1/uploads/{made['id']}"
    part_size = max(_PART_SIZE, math.ceil(size / _MAX_PARTS))
    part_ids: list[str] = []
    for start in range(0, size, part_size):
        data = await asyncio.to_thread(os.pread, content.fileno(), part_size, start)
        part_ids.append(await with_retries(partial(_part, client, path, data), note, attempts=_ATTEMPTS))
    complete = partial(client.json, "POST", f"{path}/complete", json={"part_ids": part_ids})
    done = await with_retries(complete, note, attempts=_ATTEMPTS)
    return str(done["file"]["id"])


async def _part(client: Client, path: str, data: bytes) -> str:
    form = aiohttp.FormData()
    form.add_field("data", data, filename="part")
    part = await client.json("POST", f"{path}/parts", data=form)
    return str(part["id"])
