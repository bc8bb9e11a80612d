"""Sends requests one by one, so many at a time, to any service with OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from triton_openai.cli.batch.answers import RunFiles
from triton_openai.cli.batch.client import Client, RequestFailure, delay
from triton_openai.cli.batch.prompts import Request
from triton_openai.cli.batch.results import Result, RunCounts, result_line, tokens_of

# Seconds after which what was written survives a failure of the machine.
_SYNC_SECONDS = 2.0
# What every further line would get, too: a wrong key, and at OpenAI an account without money.
_WRONG_KEY = 401
_NO_MONEY = "insufficient_quota"
_JSON = {"Content-Type": "application/json"}


class LiveRun:
    """
    Sends *requests*, and writes each answer when it comes; *concurrency* of them run at a time.

    A request is sent again up to *retries* times after a failure that may pass. When the service asks for a pause,
    all requests that have not been sent wait.
    """

    def __init__(self, client: Client, files: RunFiles, counts: RunCounts, *, concurrency: int, retries: int) -> None:
        self._client = client
        self._files = files
        self._counts = counts
        self._concurrency = concurrency
        self._retries = retries
        # Until when no request is sent, by the clock of the event loop.
        self._paused_until = 0.0
        self._noted = False
        self._succeeded = 0

    async def run(self, requests: Iterator[Request]) -> None:
        """Send *requests*. Raises :class:`RequestFailure` if no further line can be answered."""
        try:
            async with asyncio.TaskGroup() as group:
                saving = group.create_task(self._save())
                workers = [group.create_task(self._work(requests)) for _ in range(self._concurrency)]
                await asyncio.wait(workers)
                saving.cancel()
        except BaseExceptionGroup as failures:
            # The first one has ended the others.
            raise failures.exceptions[0] from None

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            await asyncio.to_thread(self._files.sync)
            self._counts.show()

    async def _work(self, requests: Iterator[Request]) -> None:
        for request in requests:
            self._counts.add(await self._result(request))
            self._counts.show()

    async def _result(self, request: Request) -> Result:
        """Return the answer to *request*, or the error after the last attempt."""
        attempt = 0
        succeeded_before = self._succeeded
        while True:
            attempt += 1
            await self._pause()
            try:
                result = await self._ask(request)
            except RequestFailure as failure:
                if failure.status == _WRONG_KEY or failure.code == _NO_MONEY:
                    raise
                if failure.temporary and attempt <= self._retries:
                    self._note(failure)
                    await asyncio.sleep(delay(attempt, failure.retry_after))
                    continue
                if failure.status == 0 and self._succeeded == succeeded_before:
                    # Nothing has answered for as long: the service is away, and other lines would fail as well.
                    raise
                return self._failed(request, failure)
            self._succeeded += 1
            return result

    def _note(self, failure: RequestFailure) -> None:
        """Show the first failure, and let all requests wait if the service asks for that."""
        if not self._noted:
            self._counts.note(f"{failure.message} Trying again.")
            self._noted = True
        if failure.retry_after is not None:
            until = asyncio.get_running_loop().time() + failure.retry_after
            self._paused_until = max(self._paused_until, until)

    async def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        # Another answer may make it longer meanwhile; then this request is sent a little early, and waits after that.
        await asyncio.sleep(max(0.0, self._paused_until - loop.time()))

    async def _ask(self, request: Request) -> Result:
        async with self._client.answer("POST", request.url, data=request.body, headers=_JSON) as response:
            body = await response.read()
        request_id = response.headers.get("x-request-id", "")
        try:
            data = result_line(request.custom_id, status=response.status, request_id=request_id, body=body)
        except msgspec.MsgspecError as error:
            raise RequestFailure("The answer is no JSON.", status=502) from error
        read, written = tokens_of(body)
        return Result(request.custom_id, True, data, read, written)

    def _failed(self, request: Request, failure: RequestFailure) -> Result:
        """Return the result of a request that has failed: with the answer of the service, if it is JSON."""
        if failure.body:
            try:
                data = result_line(request.custom_id, status=failure.status, body=failure.body)
                return Result(request.custom_id, False, data)
            except msgspec.MsgspecError:
                # The page of a proxy.
                pass
        code = failure.code or "request_failed"
        return Result(request.custom_id, False, result_line(request.custom_id, error=(code, failure.message)))
