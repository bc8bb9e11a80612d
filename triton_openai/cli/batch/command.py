"""Runs ``triton-openai batch``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from triton_openai.cli.batch.answers import ResultFile, RunFiles, State, errors_path
from triton_openai.cli.batch.arguments import BatchOptions, batch_options
from triton_openai.cli.batch.client import Client, RequestFailure, shown_url, with_retries
from triton_openai.cli.batch.live import LiveRun
from triton_openai.cli.batch.progress import duration, lines_text, progress_for, short
from triton_openai.cli.batch.prompts import Prompts
from triton_openai.cli.batch.remote import BatchFailed, RemoteRun, batches, problems_of
from triton_openai.cli.batch.results import RunCounts, read_result, reason_of
from triton_openai.cli.terminal import table
from triton_openai.errors import ConfigurationError

_CONTROL_TIMEOUT = 300.0
_CONTROL_CONNECTIONS = 4
_MAX_LISTED_PAGES = 10
_INTERRUPTED = 130
# What services answer that have no batches.
_NO_SUCH_PATH = (404, 405, 501)


def run(parsed: Mapping[str, Any]) -> int:
    """
    Run the command with the options that were *parsed*, and return its exit status.

    0: every line was answered; 1: lines or the command failed; 130: it was interrupted. Raises
    :class:`ConfigurationError` for wrong options or a wrong input.
    """
    options = batch_options(parsed)
    try:
        return asyncio.run(_interruptible(options))
    except KeyboardInterrupt:
        return _INTERRUPTED


async def execute(options: BatchOptions) -> int:
    """Run the command with these *options*, and return its exit status. Raises :class:`ConfigurationError`."""
    try:
        return await _ACTIONS[options.action](options)
    except RequestFailure as failure:
        _say(f"triton-openai: {failure.message}")
        return 1


async def _interruptible(options: BatchOptions) -> int:
    """Run the command until it ends, or until a signal ends it."""
    task = asyncio.ensure_future(execute(options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return _INTERRUPTED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


# run


async def _run(options: BatchOptions) -> int:
    prompts = Prompts(options)
    connections = _CONTROL_CONNECTIONS
    timeout = _CONTROL_TIMEOUT
    if options.live:
        connections = options.concurrency
        timeout = options.timeout
    async with Client(options.url, options.key, connections=connections, timeout=timeout) as client:
        model = options.model
        if not model and prompts.format != "requests":
            model = await _only_model(client)
        digest, total = await asyncio.to_thread(_scanned, prompts, model)
        with RunFiles(options.output, overwrite=options.overwrite) as files:
            _begin(files, options, digest, total)
            return await _answered(client, files, prompts, model, options)


async def _only_model(client: Client) -> str:
    """Return the model of the service, if it has only one. Raises :class:`ConfigurationError`."""
    page = await client.json("GET", "/v1/models")
    names = [str(model["id"]) for model in page["data"]]
    if len(names) != 1:
        raise ConfigurationError(f"Name a model with --model. The service has {', '.join(names[:20]) or 'none'}.")
    return names[0]


def _scanned(prompts: Prompts, model: str) -> tuple[str, int]:
    """Return the digest of all requests and their number. Raises :class:`ConfigurationError`. Runs in a thread."""
    digest = sha256()
    ids: set[str] = set()
    for request in prompts.requests(model):
        if request.custom_id in ids:
            raise ConfigurationError(f"The input has the id {request.custom_id!r} twice.")
        ids.add(request.custom_id)
        digest.update(request.line())
    if not ids:
        raise ConfigurationError("The input has no prompts.")
    return digest.hexdigest(), len(ids)


def _begin(files: RunFiles, options: BatchOptions, digest: str, total: int) -> None:
    """Continue the run that *files* have, or begin a new one. Raises :class:`ConfigurationError`."""
    url = shown_url(options.url)
    state = files.state
    if state is not None and state.digest != digest and not files.answers.ids and not state.open_batches:
        # All that a mistake in the command left: the corrected command has other requests.
        files.errors.clear()
        state = None
    if state is None:
        files.state = State(digest=digest, total=total, run=f"run-{os.urandom(8).hex()}", url=url)
        files.save()
        return
    if state.digest != digest:
        raise ConfigurationError(
            f"{options.output} belongs to a run with other requests: the input or the options have changed. "
            "Name another output, or begin again with --overwrite."
        )
    if state.open_batches:
        if options.live:
            raise ConfigurationError(
                "A batch of this run has not ended. Go on without --live, or cancel it and fetch its results first."
            )
        if state.url != url:
            raise ConfigurationError(f"A batch of this run has not ended. It is at {state.url}: go on with that --url.")
    if state.finished:
        # Those that have failed are sent again.
        files.errors.clear()
        state.finished = False
    state.url = url
    files.save()


async def _answered(client: Client, files: RunFiles, prompts: Prompts, model: str, options: BatchOptions) -> int:
    """Send what has no answer, and return the exit status."""
    state = files.state
    assert state is not None, "the run has begun"
    before = len(files.answers.ids)
    if before:
        _say(f"Going on: {before:,} of {state.total:,} lines have answers.")
    progress = progress_for(state.total, before + len(files.errors.ids))
    counts = RunCounts(files, state.total, progress)
    began = time.monotonic()
    # Its lines ran while the command did not.
    ran_before = bool(state.open_batches)
    try:
        if options.live:
            await _run_live(client, files, counts, prompts, model, options)
        else:
            remote = RemoteRun(client, files, counts, window=options.window, max_lines=options.lines_per_batch)
            await remote.run(partial(prompts.requests, model))
    except (asyncio.CancelledError, RequestFailure, BatchFailed, OSError) as error:
        # What fails again is the reason already.
        with suppress(OSError):
            files.sync()
        progress.close()
        _say(_stopped(error, files, options))
        if isinstance(error, asyncio.CancelledError):
            raise
        return 1
    counts.show()
    progress.close()
    if options.ordered:
        files.answers.sync()
        ids = (request.custom_id for request in prompts.requests(model))
        await asyncio.to_thread(files.answers.put_in_order, ids)
    files.finish()
    seconds = time.monotonic() - began
    if ran_before:
        seconds = 0.0
    return _summary(files, counts, options, len(files.answers.ids) - before, seconds)


async def _run_live(
    client: Client, files: RunFiles, counts: RunCounts, prompts: Prompts, model: str, options: BatchOptions
) -> None:
    live = LiveRun(client, files, counts, concurrency=options.concurrency, retries=options.retries)
    await live.run(request for request in prompts.requests(model) if not files.has_result(request.custom_id))


def _stopped(error: BaseException, files: RunFiles, options: BatchOptions) -> str:
    """Return what to say about a run that has stopped before its end."""
    state = files.state
    assert state is not None, "the run has begun"
    texts: list[str] = []
    if isinstance(error, RequestFailure):
        texts.append(error.message)
        if error.status in _NO_SUCH_PATH and not options.live:
            texts.append("A service without batches gets the requests one by one with --live.")
    elif isinstance(error, OSError):
        texts.append(f"The answers cannot be written: {error.strerror or error}.")
    elif isinstance(error, BatchFailed):
        texts.append(str(error))
    texts.append(f"Stopped: {len(files.answers.ids):,} of {state.total:,} lines have answers in {options.output}.")
    ids = [batch.id for batch in state.open_batches if batch.id]
    if ids:
        texts.append(f"The service goes on with {', '.join(ids)}: 'triton-openai batch cancel' ends it.")
    refused = isinstance(error, BatchFailed) or (isinstance(error, RequestFailure) and not error.temporary)
    if refused:
        texts.append("Correct the cause and run the command again.")
    else:
        texts.append("The same command again continues.")
    return "\n".join(texts)


def _summary(files: RunFiles, counts: RunCounts, options: BatchOptions, new: int, seconds: float) -> int:
    """
    Say what came out of a run, and return the exit status.

    *new* lines were answered in so many *seconds*; 0: the time is not known.
    """
    answered = len(files.answers.ids)
    failed = len(files.errors.ids)
    _say(f"{answered:,} of {counts.total:,} lines have answers: {options.output}")
    if new:
        now = counts.current
        tokens = f"{short(now.input_tokens)} tokens in, {short(now.output_tokens)} out"
        pace = ""
        if seconds:
            pace = f" in {duration(seconds)}, {new / seconds:.1f} lines/s"
        _say(f"{new:,} of them now{pace}: {tokens}")
    if failed:
        with files.errors_path.open("rb") as errors:
            reason = reason_of(errors.readline())
        _say(f"{lines_text(failed)} failed: {files.errors_path}. The same command again retries them.")
        _say(f"The first: {reason}")
        return 1
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# list, cancel and fetch


def _client(options: BatchOptions) -> Client:
    return Client(options.url, options.key, connections=_CONTROL_CONNECTIONS, timeout=_CONTROL_TIMEOUT)


async def _list(options: BatchOptions) -> int:
    async with _client(options) as client, aclosing(batches(client, max_pages=_MAX_LISTED_PAGES)) as listed:
        rows = [_row(batch) async for batch in listed]
    if not rows:
        print("There are no batches.")
        return 0
    print("\n".join(table(("id", "status", "lines", "answered", "failed", "model", "endpoint", "created"), rows)))
    return 0


def _row(batch: dict[str, Any]) -> Sequence[str]:
    counts = batch.get("request_counts") or {}
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
    numbers = [f"{counts.get(name, 0):,}" for name in ("total", "completed", "failed")]
    return (batch["id"], batch["status"], *numbers, batch.get("model") or "", batch["endpoint"], created)


async def _cancel(options: BatchOptions) -> int:
    failed = 0
    async with _client(options) as client:
        for batch_id in options.batches:
            try:
                batch = await client.json("POST", f"/v1/batches/{batch_id}/cancel")
                print(f"{batch_id}: {batch['status']}")
            except RequestFailure as failure:
                _say(f"{batch_id}: {failure.message}")
                failed = 1
    return failed


async def _fetch(options: BatchOptions) -> int:
    """Write the results of a batch, and its failed lines into the file beside them."""
    batch_id = options.batches[0]
    async with _client(options) as client:
        batch = await client.json("GET", f"/v1/batches/{batch_id}")
        files = [batch.get("output_file_id"), batch.get("error_file_id")]
        paths = [f"/v1/files/{file_id}/content" for file_id in files if file_id]
        ended = batch["status"] in ("completed", "failed", "expired", "cancelled")
        if not ended:
            if not options.partial:
                _say(f"{batch_id} has not ended ({batch['status']}). --partial writes the results until now.")
                return 1
            paths = [f"/v1/batches/{batch_id}/output?partial=true"]
        for problem in problems_of(batch):
            _say(problem)
        errors = errors_path(options.output)
        for path in (options.output, errors):
            if path.exists() and path.stat().st_size and not options.overwrite:
                raise ConfigurationError(f"{path} exists. Name another output, or replace it with --overwrite.")
        return await _written(client, paths, options.output, errors)


async def _written(client: Client, paths: Sequence[str], output: Path, errors: Path) -> int:
    """Write the results that are at *paths*, and return the exit status."""
    with closing(ResultFile(output, empty=True)) as answers, closing(ResultFile(errors, empty=True)) as failures:

        async def write(path: str) -> None:
            async for line in client.lines(path):
                result = read_result(line + b"\n")
                if result.succeeded:
                    answers.add(result.custom_id, result.data)
                else:
                    failures.add(result.custom_id, result.data)

        for path in paths:
            await with_retries(partial(write, path), _say)
        answers.sync()
        _say(f"{len(answers.ids):,} answers: {output}")
        if not failures.ids:
            await asyncio.to_thread(errors.unlink)
            return 0
        failures.sync()
        _say(f"{lines_text(len(failures.ids))} failed: {errors}")
        return 1


_ACTIONS = {"run": _run, "list": _list, "cancel": _cancel, "fetch": _fetch}
