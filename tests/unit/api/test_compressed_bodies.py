"""Compressed bodies at every endpoint that takes one: what comes out is bounded."""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.api import uploads
from triton_openai.api.routes import OPERATIONS
from triton_openai.config.tree import (
    AudioLimits,
    BatchesSettings,
    FilesSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.operations import BodyKind, Operation

LIMIT = 200_000
# Of many times the limit, which a small body becomes.
SIZE = 20 * LIMIT
FORM = {"Content-Type": "multipart/form-data; boundary=x"}
JSON = {"Content-Type": "application/json"}


JSON_BOMB = gzip.compress(b'{"model": "' + b"x" * SIZE + b'"}', 1)


def bomb(operation: Operation) -> tuple[bytes, dict[str, str]]:
    """Return a body of *operation* that becomes too large, and its headers."""
    if operation.body_kind is not BodyKind.FORM:
        return JSON_BOMB, JSON
    field = b"file"
    if "/parts" in operation.path:
        field = b"data"
    head = b'--x\r\nContent-Disposition: form-data; name="%b"; filename="f"\r\n\r\n' % field
    return gzip.compress(head + b"x" * SIZE + b"\r\n--x--\r\n"), FORM


async def test_a_bomb_is_refused_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 413 that says what it counts, and nothing of it is kept."""
    monkeypatch.setattr(uploads, "MAX_PART_SIZE", LIMIT)
    async with FakeTriton(config_of("m")) as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,), model_control_mode="explicit"),
            server=ServerSettings(max_body_size=LIMIT),
            files=FilesSettings(store=f"dir:{tmp_path / 'files'}", max_size=LIMIT, max_batch_size=LIMIT),
            batches=BatchesSettings(store=f"sqlite:{tmp_path / 'db'}"),
            audio=AudioLimits(max_file_size=LIMIT),
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            made = {"filename": "f", "purpose": "batch", "bytes": LIMIT, "mime_type": "text/plain"}
            upload = (await proxy.post("/v1/uploads", made)).json["id"]
            statuses: dict[str, Any] = {}
            for operation in OPERATIONS:
                if operation.body_kind is BodyKind.NONE:
                    continue
                body, headers = bomb(operation)
                assert len(body) < LIMIT
                method, path = operation.routes[0].split()
                path = re.sub(r"\{[^}]*\}", "x", path.replace("{upload:[^/]+}", upload))
                compressed = {**headers, "Content-Encoding": "gzip"}
                async with proxy.client.request(method, path, data=io.BytesIO(body), headers=compressed) as response:
                    answer = await response.json()
                    statuses[f"{method} {path}"] = response.status
                    assert 413 == response.status, (method, path, answer)
                    assert "larger than" in answer["error"]["message"], (method, path, answer)
            assert len(statuses) > 25
            assert [] == [path.name for path in (tmp_path / "files").iterdir() if path.suffix != ".lock"]
