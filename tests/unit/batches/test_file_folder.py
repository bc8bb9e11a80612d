"""The folder of files: what the metrics say of it and of the batches."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from tests.clients.service import until
from tests.clock import turns
from triton_openai.batches.figures import batch_state
from triton_openai.batches.file_folder import Files, on_disk
from triton_openai.config.tree import BatchesSettings, FilesSettings
from triton_openai.errors import StoreUnavailable
from triton_openai.storage.batch_records import Batch, Line, StoredFile
from triton_openai.storage.batch_tables import ROW_SIZE

NOW = 1_000_000.0


def open_in(folder: Path) -> list[str]:
    """Return the files of *folder* that this process has open, whichever others its threads open or close meanwhile."""
    opened: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(link.readlink())
    return [path.name for path in opened if path.is_relative_to(folder)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Return a folder at a fixed time."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    return Files(FilesSettings(store=f"dir:{tmp_path / 'files'}"), BatchesSettings(store=f"sqlite:{tmp_path / 'db'}"))


async def add(files: Files, name: str, *, created: float, expires: float, total: int, waiting: int) -> Batch:
    """Add a batch of *total* lines, of which so many are *waiting*; it reads a file of 100 bytes."""
    file = StoredFile(
        id=f"file-{name}", owner="me", purpose="batch", filename="a", bytes=100, created=created, expires=None
    )
    await files.store.files.complete(file)
    batch = Batch(
        id=name, owner="me", kind="openai", endpoint="/x", input=file.id, created=created, window="1h", expires=expires,
        total=total, status="in_progress" if total else "validating",
    )  # fmt: skip
    assert "added" == await files.store.batches.add(batch, max_open=10, max_total=1000 * ROW_SIZE)
    await files.store.lines.add(batch, [Line(number, 0, 1, "m", 0) for number in range(1, waiting + 1)])
    return batch


async def test_nothing_was_ever_made(files: Files) -> None:
    """A service that has no files has zeros to show, and makes no database for them."""
    state = await batch_state(files)
    assert state is not None
    assert (0.0, 0.0, 0.0) == (state.lag, state.needed, state.files_bytes)
    assert {"validating": 0, "in_progress": 0, "finalizing": 0, "cancelling": 0} == state.statuses
    assert not files.exist
    await files.store.close()


async def test_an_operator_sees_what_waits(files: Files) -> None:
    """The age of the oldest batch with waiting lines, and the speed at which all end within their windows."""
    await add(files, "new", created=NOW - 5, expires=NOW + 50, total=0, waiting=0)
    await add(files, "all-run", created=NOW - 90, expires=NOW + 100, total=10, waiting=0)
    await add(files, "waits", created=NOW - 60, expires=NOW + 200, total=40, waiting=30)
    last = await add(files, "done", created=NOW - 70, expires=NOW + 300, total=9, waiting=0)

    def end(found: Batch) -> None:
        found.succeeded, found.failed = 8, 1
        found.set_status("finalizing")

    await files.store.batches.change(last.id, end)
    state = await batch_state(files)
    assert state is not None
    assert (60.0, 400.0) == (state.lag, state.files_bytes)
    # 50 lines within 200 seconds.
    assert 0.25 == state.needed
    assert {"validating": 1, "in_progress": 2, "finalizing": 1, "cancelling": 0} == state.statuses
    await files.store.close()


async def test_tables_that_cannot_be_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape goes without what the tables do not tell."""
    await add(files, "one", created=NOW, expires=NOW + 100, total=1, waiting=1)

    async def figures() -> None:
        raise StoreUnavailable("no")

    monkeypatch.setattr(files.store.batches, "open_batches", figures)
    assert await batch_state(files) is None
    await files.store.close()


async def test_no_file_is_closed_under_a_thread() -> None:
    """Whoever is cancelled while a thread works on a file goes on when the thread has ended."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        raise OSError("and nobody asks")

    task = asyncio.create_task(on_disk(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await turns()
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_folder_without_locks(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files cannot be locked, each attempt leaves nothing open."""

    def refused(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(OSError, match="no locks"):
        files.locks.lock("a")
    assert (files.folder / "a.lock").exists()
    assert [] == open_in(files.folder)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_leaves_while_its_file_is_opened(
    files: Files, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Nobody has the descriptor then, so it is closed."""
    made: list[int] = []
    goes_on, create = threading.Event(), files._create

    def slow(name: str) -> int:
        goes_on.wait(120)
        made.append(create(name))
        if fails:
            os.close(made[0])
            raise OSError
        return made[0]

    monkeypatch.setattr(files, "_create", slow)
    task = asyncio.create_task(files.write("a"))
    await turns(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    await asyncio.to_thread(until, lambda: made and not open_in(files.folder))
    await files.store.close()
