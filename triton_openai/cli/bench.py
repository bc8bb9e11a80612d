"""The command ``bench``: how fast an OpenAI-compatible service answers."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from triton_openai.cli.endpoint import Endpoint, add_options, endpoint_of
from triton_openai.cli.parser import CommandParser, OwnCommand, count, seconds
from triton_openai.cli.terminal import table
from triton_openai.errors import ConfigurationError, ServiceError, printable
from triton_openai.load.events import EventReader
from triton_openai.load.streams import Target, run_streams
from triton_openai.load.tally import Outcome, Plan, Tally, percentile
from triton_openai.tasks import cancel

_STREAMS = 8
_REQUESTS = 64
_MAX_TOKENS = 128
_TIMEOUT = 300.0
# Longest time over which the streams of a window start, and how long they run before it opens.
_RAMP_SECONDS = 1.0
_WARM_SECONDS = 1.0
_PROGRESS_SECONDS = 0.2
_BAR_WIDTH = 24
_MAX_LINE = 78
_SHARES = (0.5, 0.9, 0.99)
_SUBJECTS = "a lighthouse|a violin|the sea|a bakery|two brothers|a long winter|a train|a garden|the moon|an old map"


class Report(msgspec.Struct, kw_only=True):
    """What was measured. Times are in seconds; each has its mean, percentiles and longest."""

    url: str
    model: str
    streams: int
    max_tokens: int
    seconds: float
    answers: int
    failed: int
    tokens: int
    tokens_per_second: float
    answers_per_second: float
    first_token: Mapping[str, float]
    between_tokens: Mapping[str, float]
    whole_answer: Mapping[str, float]
    errors: Sequence[str]


def _add_options(parser: CommandParser) -> None:
    """Add the options of ``bench`` to its *parser*."""
    add_options(parser)
    parser.add_argument(
        "--streams", metavar="COUNT", type=count, default=_STREAMS, help=f"Requests at a time. (default: {_STREAMS})"
    )
    parser.add_argument("--requests", metavar="COUNT", type=count, help=f"Requests in all. (default: {_REQUESTS})")
    parser.add_argument(
        "--seconds", metavar="SECONDS", type=seconds, help="Measure for so long, instead of a number of requests."
    )
    parser.add_argument(
        "--max-tokens",
        metavar="COUNT",
        type=count,
        default=_MAX_TOKENS,
        help=f"Longest answer. (default: {_MAX_TOKENS})",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="Ask for answers of that very length: vLLM and this service can."
    )
    parser.add_argument("--prompt", metavar="TEXT", help="Ask this. (default: each request asks for another story)")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="Ask the lines of this file in turn.")
    parser.add_argument(
        "--completions", action="store_true", help="Ask /completions and not /chat/completions, as for base models."
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=_TIMEOUT,
        help=f"Longest time of a request. (default: {_TIMEOUT:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print JSON, with the errors.")


def _run(options: Mapping[str, Any]) -> int:
    """Measure as the command line's *options* ask for, and print a table. Return 1 if a request failed."""
    plan = _plan(options)
    prompts = _prompts(options)
    endpoint = endpoint_of(options["url"], os.environ)
    report = asyncio.run(_measured(endpoint, options, plan, prompts))
    if options["json"]:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(render(report)))
    if report.failed:
        return 1
    return 0


def _plan(options: Mapping[str, Any]) -> Plan:
    """Return the measurement that *options* ask for. Raises :class:`ConfigurationError`."""
    if options["prompt"] is not None and options["prompts"] is not None:
        raise ConfigurationError("--prompt and --prompts exclude each other.")
    streams = options["streams"]
    if options["seconds"] is not None:
        if options["requests"] is not None:
            raise ConfigurationError("--requests and --seconds exclude each other: one of them ends the measurement.")
        return Plan(
            streams=streams,
            ramp=min(_RAMP_SECONDS, streams / 64),
            warm=_WARM_SECONDS,
            seconds=options["seconds"],
            settled=True,
            limit=options["timeout"],
            max_errors=sys.maxsize,
        )
    requests = options["requests"] or _REQUESTS
    return Plan(streams=min(streams, requests), answers=requests, max_errors=sys.maxsize)


async def _measured(endpoint: Endpoint, options: Mapping[str, Any], plan: Plan, prompts: Iterator[str]) -> Report:
    """Measure *endpoint*. Raises :class:`ServiceError` if no request succeeds."""
    async with endpoint.session() as session:
        model = await endpoint.model(session, options["model"])
    bodies = _bodies(model, options, prompts)
    parts = urlsplit(endpoint.url)
    path = "chat/completions"
    if options["completions"]:
        path = "completions"
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
    head = _head(endpoint, f"{parts.path}/{path}", parts.netloc)
    target = Target(
        host=parts.hostname or "",
        port=parts.port or {"http": 80, "https": 443}[parts.scheme],
        request=lambda: _request(head, next(bodies)),
        reader=EventReader,
        tls=tls,
        reconnects=True,
        timeout=options["timeout"],
    )
    outcome = Outcome()
    progress = asyncio.create_task(_show_progress(plan, outcome, sys.stderr.isatty()))
    try:
        await run_streams(target, plan, Tally(plan, outcome))
    finally:
        await cancel(progress)
    if not outcome.answers and outcome.errors:
        raise ServiceError(f"No request succeeded. The first failed: {printable(outcome.errors[0], 300)}")
    return _report(endpoint.url, model, plan, options, outcome)


def _bodies(model: str, options: Mapping[str, Any], prompts: Iterator[str]) -> Iterator[bytes]:
    """Yield the body of a request for each of the *prompts*."""
    body: dict[str, Any] = {"model": model, "max_tokens": options["max_tokens"], "stream": True}
    # The service counts the tokens: it may send several in one event.
    body["stream_options"] = {"include_usage": True}
    if options["ignore_eos"]:
        body["ignore_eos"] = True
    for prompt in prompts:
        if options["completions"]:
            asked: Mapping[str, Any] = {"prompt": prompt}
        else:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        yield msgspec.json.encode({**body, **asked})


def _prompts(options: Mapping[str, Any]) -> Iterator[str]:
    """Return the prompts, without end. Raises :class:`ConfigurationError` for a file without prompts."""
    if options["prompt"] is not None:
        return _repeated([options["prompt"]])
    file = options["prompts"]
    if file is None:
        return _stories()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--prompts: {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--prompts: {file} cannot be read: {error}.") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigurationError(f"--prompts: {file} has no line with a prompt.")
    return _repeated(prompts)


def _repeated(prompts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from prompts


def _stories() -> Iterator[str]:
    """Yield prompts that differ from their beginning on, so that no cache of prompts shortens the work."""
    chooser = random.Random()
    subjects = _SUBJECTS.split("|")
    while True:
        number = chooser.randrange(10**9)
        first = chooser.choice(subjects)
        second = chooser.choice(subjects)
        yield f"Story {number}: tell me a long story about {first} and {second}."


def _head(endpoint: Endpoint, path: str, host: str) -> str:
    headers = {"Host": host, **endpoint.headers, "Content-Type": "application/json", "Accept": "text/event-stream"}
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines])


def _request(head: str, body: bytes) -> bytes:
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _show_progress(plan: Plan, outcome: Outcome, is_terminal: bool) -> None:
    """Show on a terminal how far the measurement is, in a line that is removed at the end."""
    if not is_terminal:
        return
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        while True:
            elapsed = loop.time() - begun
            line = progress_line(plan, outcome, elapsed)
            print(f"\r\033[K{line[:_MAX_LINE]}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_PROGRESS_SECONDS)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def progress_line(plan: Plan, outcome: Outcome, elapsed: float) -> str:
    """Return a bar and the numbers so far, *elapsed* seconds after the beginning."""
    ended = outcome.answers + len(outcome.errors)
    if plan.answers is not None:
        share = ended / plan.answers
        what = f"{ended} of {plan.answers} requests"
    else:
        length = plan.ramp + plan.warm + plan.seconds
        share = elapsed / length
        what = f"{elapsed:.0f} of {length:.0f} s"
    filled = round(min(1.0, share) * _BAR_WIDTH)
    bar = "#" * filled + "." * (_BAR_WIDTH - filled)
    line = f"[{bar}] {what}, {outcome.tokens} tokens"
    if outcome.errors:
        line += f", {len(outcome.errors)} failed"
    return line


def _report(url: str, model: str, plan: Plan, options: Mapping[str, Any], outcome: Outcome) -> Report:
    seconds = outcome.seconds
    return Report(
        url=url,
        model=model,
        streams=plan.streams,
        max_tokens=options["max_tokens"],
        seconds=seconds,
        answers=outcome.answers,
        failed=len(outcome.errors),
        tokens=outcome.tokens,
        tokens_per_second=outcome.tokens / seconds,
        answers_per_second=outcome.answers / seconds,
        first_token=_spread(outcome.first),
        between_tokens=_spread([gap / 1e6 for gap in outcome.gaps]),
        whole_answer=_spread(outcome.whole),
        errors=[printable(error, 300) for error in outcome.errors[:100]],
    )


def _spread(values: Sequence[float]) -> Mapping[str, float]:
    """Return the mean, percentiles and the largest of *values*; nothing of none."""
    if not values:
        return {}
    spread = {"mean": sum(values) / len(values)}
    for share in _SHARES:
        value = percentile(values, share)
        assert value is not None
        spread[f"p{share * 100:.0f}"] = value
    spread["max"] = max(values)
    return spread


def render(report: Report) -> list[str]:
    """Return *report* as lines for people."""
    lines = [
        f"{report.model} at {report.url}: {report.answers} answers of up to {report.max_tokens} tokens, "
        f"{report.streams} at a time, in {report.seconds:.1f} s",
        "",
        f"  {report.tokens_per_second:,.1f} tokens/s, {report.answers_per_second:,.2f} answers/s, "
        f"{report.tokens:,} tokens",
        "",
    ]
    head = ["MILLISECONDS", "MEAN", "P50", "P90", "P99", "MAX"]
    timed = {
        "first token": report.first_token,
        "between tokens": report.between_tokens,
        "whole answer": report.whole_answer,
    }
    rows = [[name, *[f"{value * 1e3:,.1f}" for value in values.values()]] for name, values in timed.items() if values]
    if rows:
        lines += table(head, rows, texts=1)
    if report.failed:
        lines += ["", f"  {report.failed} requests failed. The first: {report.errors[0]}"]
    return lines


BENCH = OwnCommand(
    "bench",
    "Measure how fast any OpenAI-compatible service answers: tokens per second, first token, between tokens.",
    _add_options,
    _run,
)
