"""The banner: what is served and where, printed after the first discovery of models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import structlog
from aiohttp import web

from triton_openai import __version__
from triton_openai.app import SERVICE
from triton_openai.cli.terminal import problems, table
from triton_openai.config.tree import Settings
from triton_openai.models.overview import ModelLine, model_lines
from triton_openai.telemetry.logging import timestamp
from triton_openai.telemetry.streams import write_in_background

_log = structlog.get_logger(__name__)
# Tenths of a second that a Triton that is ready has to show its models.
_ATTEMPTS = 100
# Longest time that the banner waits for tokenizers and templates, which are loaded in the background.
_CHECK_SECONDS = 10.0


class Banner(msgspec.Struct, frozen=True, kw_only=True):
    """What is served and where; with ``--log-format json`` it is printed like a log line."""

    event: str = "serving"
    level: str = "info"
    timestamp: str = msgspec.field(default_factory=timestamp)
    version: str = __version__
    address: str
    base_url: str
    triton: tuple[str, ...]
    triton_answers: bool
    models: tuple[ModelLine, ...]


def render_banner(banner: Banner, log_format: str) -> str:
    """Return *banner* as text for people, or as one line of JSON."""
    if log_format == "json":
        return msgspec.json.encode(banner).decode()
    lines = [
        f"triton-openai {banner.version} listens at {banner.address}",
        f"Triton at {' and '.join(banner.triton) or 'addresses that are still looked up'}",
        "",
    ]
    if banner.models:
        lines += table(
            ["MODEL", "ADAPTER", "TASKS", "CHAT", "STATE", "ALSO AS"],
            [
                [model.name, model.adapter or "", ", ".join(model.tasks), _chat(model), model.state,
                 ", ".join(model.aliases + model.loras)]
                for model in banner.models
            ],
        )  # fmt: skip
        uses = {True: "chat", False: "be used"}
        failing: dict[tuple[str, str], list[str]] = {}
        for model in banner.models:
            if model.problem:
                failing.setdefault((uses["generate" in model.tasks], model.problem), []).append(model.name)
        lines += problems(
            [f"{_enumerated(names)} cannot {use}: {problem}" for (use, problem), names in failing.items()]
        )
    elif banner.triton_answers:
        # With the address: that of a Triton that this command has started is no default.
        inspect = " ".join(["triton-openai inspect", *(f"--triton-url {url}" for url in banner.triton[:1])])
        lines.append(f"  No model that can be served yet; `{inspect}` says why. New ones are found by themselves.")
    else:
        lines.append("  Triton does not answer yet. Its models are served as soon as it does.")
    lines += ["", f'For clients: base_url="{banner.base_url}"', ""]
    return "\n".join(lines)


def show(banner: str) -> None:
    """
    Print a rendered *banner*.

    If it cannot be printed (a full disk, a closed pipe, a terminal that lacks the letters of a model's name), the log
    says so, and the service goes on. Nothing that is printed after it holds the service up either.
    """
    write_in_background("stdout").lost = lambda _, reason: _not_printed(reason)
    try:
        print(banner, flush=True)
    except UnicodeEncodeError as error:
        _not_printed(str(error))


def _not_printed(reason: str) -> None:
    _log.warning("what is served cannot be printed", reason=reason)


def _enumerated(names: Sequence[str]) -> str:
    """Return *names* as a sentence lists them."""
    *others, last = names
    if others:
        return f"{', '.join(others)} and {last}"
    return last


def _chat(model: ModelLine) -> str:
    if "generate" not in model.tasks:
        return ""
    if model.chat is None:
        return "loading"
    if model.chat:
        return "yes"
    return "no"


async def banner_of(settings: Settings, app: web.Application, address: str, *, launched: bool = False) -> Banner:
    """Return the banner after the first discovery; the models of a Triton that was *launched* here are waited for."""
    models = app[SERVICE].models
    await models.fleet.first.wait()
    # In explicit mode a Triton may well start without any model.
    expected = launched and (settings.triton.model_control_mode == "none" or bool(settings.triton.load_model))
    for _ in range(_ATTEMPTS if expected else 0):
        if models.ready:
            break
        await models.fleet.refresh()
        await asyncio.sleep(0.1)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CHECK_SECONDS):
            await asyncio.gather(*(model.lazy_prompter.checked.wait() for model in models.served.values()))
    return Banner(
        address=address,
        base_url=f"{address}/v1",
        triton=tuple(url for member in models.fleet.members.values() for url in member.settings.url),
        triton_answers=models.fleet.snapshot.reachable,
        models=tuple(model_lines(models)),
    )
