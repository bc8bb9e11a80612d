"""Sends requests as batches of a running service, waits for them, and fetches their results."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import IO, Any

import msgspec

from triton_openai.cli.batch.answers import RunFiles, SentBatch, State
from triton_openai.cli.batch.client import Client, RequestFailure, with_retries
from triton_openai.cli.batch.progress import Counts, lines_text
from triton_openai.cli.batch.prompts import Request
from triton_openai.cli.batch.results import RunCounts, read_result
from triton_openai.cli.batch.uploading import upload

# Bytes of the input of one batch: OpenAI takes 200 MB, and services of this kind have the same limit by default.
_MAX_BATCH_SIZE = 190 * 1000 * 1000
# Seconds between two looks at a batch: at first, and at most.
_FIRST_POLL = 0.5
_MAX_POLL = 10.0
# Batches among which one of this run is looked for.
_PAGE = 100
_MAX_PAGES = 20
#: The names of a batch's metadata by which its run recognizes it.
_RUN = "triton_openai_run"
_NUMBER = "triton_openai_batch"
_ENDED = ("completed", "failed", "expired", "cancelled")
_MAX_PROBLEMS = 5


class BatchFailed(Exception):
    """A batch was refused as a whole; the text is why."""


class RemoteRun:
    """
    Runs requests as batches of a service, which runs them by itself: the command may end meanwhile.

    The state is stored before a batch is made, and the batch has the name of the run. So after a crash, the run finds
    its batch, and no line is in two batches.
    """

    def __init__(self, client: Client, files: RunFiles, counts: RunCounts, *, window: str, max_lines: int) -> None:
        assert files.state is not None, "the run has begun"
        self._client = client
        self._files = files
        self._counts = counts
        self._window = window
        self._max_lines = max_lines
        self._state: State = files.state
        # What each open batch has done, by its number.
        self._progress: dict[int, Counts] = {}

    async def run(self, read: Callable[[], Iterator[Request]]) -> None:
        """
        Run those of the requests that *read* returns which have no result, and fetch the results of all.

        Raises :class:`RequestFailure` and :class:`BatchFailed`.
        """
        await self._fetch_open()
        # All lines of a batch ask one endpoint.
        for url in await asyncio.to_thread(lambda: list(dict.fromkeys(request.url for request in read()))):
            requests = (one for one in read() if one.url == url and not self._files.has_result(one.custom_id))
            while batch := await self._send(requests):
                self._counts.note(f"Batch {batch.id}: {lines_text(batch.lines)}. It goes on if this command ends.")
        await self._fetch_open()

    # Sending

    async def _send(self, requests: Iterator[Request]) -> SentBatch | None:
        """Make a batch of the next *requests*, and return it; ``None`` if there are none."""
        first = next(requests, None)
        if first is None:
            return None
        with tempfile.TemporaryFile(dir=self._files.errors_path.parent) as content:
            lines = await asyncio.to_thread(self._write, content, chain([first], requests))
            number = len(self._state.batches) + 1
            file_id = await upload(self._client, content, f"{self._state.run}-{number}.jsonl", self._counts.note)
        sent = SentBatch(number=number, lines=lines)
        self._state.batches.append(sent)
        self._files.save()
        await self._create(sent, first.url, file_id)
        return sent

    def _write(self, content: IO[bytes], requests: Iterator[Request]) -> int:
        """Write the lines of one batch, and return their number. Runs in a thread."""
        lines = 0
        size = 0
        for request in islice(requests, self._max_lines):
            line = request.line()
            content.write(line)
            lines += 1
            size += len(line)
            if size >= _MAX_BATCH_SIZE:
                break
        content.flush()
        return lines

    async def _create(self, sent: SentBatch, endpoint: str, file_id: str) -> None:
        """Make a batch of a file. It is looked for before another attempt: the answer may have been lost."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": self._window,
            "metadata": {_RUN: self._state.run, _NUMBER: str(sent.number)},
        }
        tried = False

        async def create() -> str:
            nonlocal tried
            if tried:
                made = await self._find(sent)
                if made is not None:
                    return made
            tried = True
            batch = await self._client.json("POST", "/v1/batches", json=body)
            return str(batch["id"])

        try:
            sent.id = await with_retries(create, self._counts.note)
        except RequestFailure:
            # The service has refused it.
            self._state.batches.remove(sent)
            raise
        finally:
            self._files.save()

    async def _find(self, sent: SentBatch) -> str | None:
        """Return the id of a batch that this run may have made; ``None`` if it has not."""
        async for batch in batches(self._client, max_pages=_MAX_PAGES):
            metadata = batch.get("metadata") or {}
            if metadata.get(_RUN) == self._state.run and metadata.get(_NUMBER) == str(sent.number):
                return str(batch["id"])
        return None

    # Waiting and fetching

    async def _fetch_open(self) -> None:
        """Wait for the batches that have not ended, and fetch their results."""
        for sent in list(self._state.open_batches):
            if not sent.id:
                # The command ended while it made the batch.
                made = await with_retries(partial(self._find, sent), self._counts.note)
                if made is None:
                    self._state.batches.remove(sent)
                    self._files.save()
                    continue
                sent.id = made
                self._files.save()
        problems: list[str] = []
        interval = _FIRST_POLL
        while waiting := self._state.open_batches:
            for sent in list(waiting):
                batch = await self._retrieve(sent)
                if batch is None:
                    continue
                self._note_progress(sent, batch)
                if batch["status"] in _ENDED:
                    problems += await self._end(sent, batch)
            self._counts.show()
            if self._state.open_batches:
                await asyncio.sleep(interval)
                interval = min(1.25 * interval, _MAX_POLL)
        if problems:
            raise BatchFailed("\n".join(problems))

    async def _retrieve(self, sent: SentBatch) -> Any | None:
        """Return a batch as it is now; ``None`` if the service has it no longer, so that its lines are sent again."""
        get = partial(self._client.json, "GET", f"/v1/batches/{sent.id}")
        try:
            return await with_retries(get, self._counts.note)
        except RequestFailure as failure:
            if failure.status != 404:
                raise
        self._counts.note(f"The service has no batch {sent.id}. The same command again sends its lines again.")
        self._end_progress(sent)
        return None

    def _note_progress(self, sent: SentBatch, batch: Mapping[str, Any]) -> None:
        counts = batch.get("request_counts") or {}
        failed = counts.get("failed", 0)
        usage = batch.get("usage") or {}
        self._progress[sent.number] = Counts(
            done=counts.get("completed", 0) + failed,
            failed=failed,
            input_tokens=usage.get("input_tokens", 0),
            output_tokens=usage.get("output_tokens", 0),
        )
        self._sum_up()

    def _sum_up(self) -> None:
        totals = map(sum, zip(*self._progress.values(), strict=True))
        self._counts.remote = Counts(*totals)

    async def _end(self, sent: SentBatch, batch: Mapping[str, Any]) -> Sequence[str]:
        """Write the results of a batch that has ended, and return why it was refused as a whole."""
        for field in ("output_file_id", "error_file_id"):
            file_id = batch.get(field)
            if file_id:
                await with_retries(partial(self._fetch, file_id), self._counts.note)
        self._end_progress(sent)
        return problems_of(batch)

    def _end_progress(self, sent: SentBatch) -> None:
        """Note that the results of a batch are in the files."""
        self._progress.pop(sent.number, None)
        self._sum_up()
        self._files.sync()
        sent.fetched = True
        self._files.save()

    async def _fetch(self, file_id: str) -> None:
        async for line in self._client.lines(f"/v1/files/{file_id}/content"):
            try:
                self._counts.add(read_result(line + b"\n"))
            except msgspec.MsgspecError as error:
                raise RequestFailure(
                    f"The file {file_id} has a line that is no result: {error}.", status=200
                ) from error


def problems_of(batch: Mapping[str, Any]) -> Sequence[str]:
    """Return why a *batch* was refused as a whole, in sentences; nothing for one that ran."""
    if batch["status"] != "failed":
        return []
    texts = [f"The batch {batch['id']} failed."]
    errors = (batch.get("errors") or {}).get("data") or []
    for error in errors[:_MAX_PROBLEMS]:
        where = ""
        if error.get("line") is not None:
            where = f"line {error['line']}: "
        texts.append(f"  {where}{error.get('message')} ({error.get('code')})")
    if len(errors) > _MAX_PROBLEMS:
        texts.append(f"  and {len(errors) - _MAX_PROBLEMS} more")
    return texts


async def batches(client: Client, *, max_pages: int) -> Any:
    """Yield the batches of the key, the newest first, of so many pages at most."""
    after = ""
    for _ in range(max_pages):
        page = await client.json("GET", f"/v1/batches?limit={_PAGE}{after}")
        for batch in page["data"]:
            yield batch
        if not page.get("has_more") or not page["data"]:
            return
        after = f"&after={page['data'][-1]['id']}"
