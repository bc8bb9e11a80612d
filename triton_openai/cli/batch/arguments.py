"""The options of ``triton-openai batch``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.cli.endpoint import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from triton_openai.cli.parser import CommandParser, count, number, seconds
from triton_openai.errors import ConfigurationError

_EPILOG = (
    f"The key is read from the environment variable {KEY_VARIABLE}. The guide is docs/guides/batches.md, 'One command'."
)
# What a batch leaves to the service.
_LIVE_ONLY = ("concurrency", "retries", "timeout")
_ABOUT: Mapping[str, str] = {
    "run": "Send the prompts of a file, and write the answers. The same command again continues after an interruption.",
    "list": "List the batches of this key, newest first.",
    "cancel": "Cancel batches. The results until then are kept.",
    "fetch": "Write the results of a batch into a file.",
}


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``triton-openai batch``, and the key."""

    action: str
    url: str
    key: str | None
    #: Ids of batches, for ``cancel`` and ``fetch``.
    batches: Sequence[str] = ()
    # What `run` reads.
    input: Path = Path()
    format: str | None = None
    model: str = ""
    prompt: str | None = None
    system: str | None = None
    id_field: str | None = None
    endpoint: str = "/v1/chat/completions"
    body: Mapping[str, Any] = {}
    # What it writes.
    output: Path = Path()
    ordered: bool = False
    overwrite: bool = False
    # How it sends.
    live: bool = False
    concurrency: int = 64
    retries: int = 8
    timeout: float = 3600.0
    window: str = "24h"
    lines_per_batch: int = 50_000
    #: For ``fetch``: also of a batch that runs.
    partial: bool = False


def batch_options(parsed: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> BatchOptions:
    """Return the options that were *parsed*, and those of *environ*. Raises :class:`ConfigurationError`."""
    values = dict(parsed)
    key = environ.get(KEY_VARIABLE, "").strip() or None
    url = service_url(values.pop("url") or environ.get(URL_VARIABLE, "").strip() or DEFAULT_URL)
    if values["action"] == "run":
        _complete(values)
    return BatchOptions(url=url, key=key, **values)


def service_url(url: str) -> str:
    """
    Return the address of a service without ``/v1`` and without a final slash.

    A URL without a scheme is one of HTTP. Raises :class:`ConfigurationError`.
    """
    full = url
    if "://" not in full:
        full = f"http://{url}"
    if not full.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url must begin with http:// or https://, and is {url!r}.")
    return full.rstrip("/").removesuffix("/v1")


def _complete(values: dict[str, Any]) -> None:
    """Check the options of ``run``, and put those of requests into their body."""
    other = values.pop("other_input")
    if (values["input"] is None) == (other is None):
        raise ConfigurationError("Name one input file: triton-openai batch run FILE -o FILE.")
    if other is not None:
        values["input"] = other
    if values["input"].resolve() == values["output"].resolve():
        raise ConfigurationError("The input and the output must be two files.")
    for name in _LIVE_ONLY:
        if values[name] is None:
            values.pop(name)
        elif not values["live"]:
            raise ConfigurationError(f"--{name} needs --live: the service decides how the lines of a batch run.")
    endpoint = values["endpoint"].strip("/")
    values["endpoint"] = f"/v1/{endpoint.removeprefix('v1/')}"
    body = _json_object(values["body"])
    for name in ("max_tokens", "temperature"):
        value = values.pop(name)
        if value is not None:
            body[name] = value
    if values["endpoint"] == "/v1/responses" and "max_tokens" in body:
        # Its name there.
        body["max_output_tokens"] = body.pop("max_tokens")
    values["body"] = body


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"--body must be a JSON object: {error}.") from error


def add_options(parser: CommandParser) -> None:
    """Add the actions of ``batch``, and the options of each, to its *parser*."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandParser)
    commands: dict[str, CommandParser] = {}
    for name, about in _ABOUT.items():
        command = actions.add_parser(name, description=about, help=about, epilog=_EPILOG, allow_abbrev=False)
        command.add_argument(
            "--url", help=f"The service. (default: {URL_VARIABLE} of the environment, or {DEFAULT_URL})"
        )
        commands[name] = command
    _add_run(commands["run"])
    commands["cancel"].add_argument("batches", metavar="ID", nargs="+", help="The id of a batch.")
    fetch = commands["fetch"]
    fetch.add_argument("batches", metavar="ID", nargs=1, help="The id of a batch.")
    fetch.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="The file to write.")
    fetch.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    fetch.add_argument("--partial", action="store_true", help="Of a batch that runs, write the results until now.")
    parser.arguments.append((("action",), {"choices": list(_ABOUT)}))
    known = {names for names, _ in parser.arguments}
    for command in commands.values():
        parser.arguments += [(names, keywords) for names, keywords in command.arguments if names not in known]
        known.update(names for names, _ in command.arguments)


def _add_run(parser: CommandParser) -> None:
    """Add the options of ``run``."""
    parser.add_argument(
        "input",
        metavar="FILE",
        type=Path,
        nargs="?",
        help="A text file with a prompt in each line, CSV, JSONL, or request lines of OpenAI's batches.",
    )
    parser.add_argument("-i", "--input-file", dest="other_input", metavar="FILE", type=Path, help="The input, too.")
    parser.add_argument(
        "-o", "--output", "--output-file", metavar="FILE", type=Path, required=True, help="The file of answers."
    )
    reading = parser.add_argument_group("prompts")
    parser.add_to(reading, "--model", metavar="NAME", default="", help="The model. (default: the only one there)")
    parser.add_to(
        reading,
        "--prompt",
        metavar="TEMPLATE",
        help="The prompt, with fields of the row in braces: 'Summarize: {text}'. "
        "(default: {prompt}; of a text file {text}, its line)",
    )
    parser.add_to(reading, "--system", metavar="TEXT", help="The system message of each request.")
    parser.add_to(
        reading,
        "--id",
        dest="id_field",
        metavar="FIELD",
        help="The field with the name of a row. (default: its number)",
    )
    parser.add_to(reading, "--format", choices=["text", "csv", "jsonl", "requests"], help="How to read the input.")
    parser.add_to(
        reading,
        "--endpoint",
        metavar="PATH",
        default="/v1/chat/completions",
        help="What prompts are sent to: chat/completions, completions, responses or embeddings. (default: %(default)s)",
    )
    parser.add_to(reading, "--max-tokens", metavar="N", type=count, help="Most tokens of an answer.")
    parser.add_to(reading, "--temperature", metavar="N", type=number, help="The sampling temperature.")
    parser.add_to(reading, "--body", metavar="JSON", default="{}", help="Further fields of each request.")
    sending = parser.add_argument_group("sending")
    parser.add_to(
        sending,
        "--live",
        action="store_true",
        help="Send requests one by one instead of a batch: to any OpenAI-compatible URL.",
    )
    parser.add_to(
        sending, "--concurrency", metavar="N", type=count, help="With --live: requests at a time. (default: 64)"
    )
    parser.add_to(
        sending, "--retries", metavar="N", type=count, help="With --live: attempts after the first. (default: 8)"
    )
    parser.add_to(
        sending, "--timeout", metavar="SECONDS", type=seconds, help="With --live: longest request. (default: 3600)"
    )
    parser.add_to(
        sending,
        "--window",
        metavar="HOURS",
        type=_window,
        default="24h",
        help="Of a batch: the hours in which it must end, 1h to 168h. (default: 24h)",
    )
    parser.add_to(
        sending,
        "--lines-per-batch",
        metavar="N",
        type=count,
        default=50_000,
        help="More become several. (default: 50000)",
    )
    writing = parser.add_argument_group("answers")
    parser.add_to(writing, "--ordered", action="store_true", help="Write the answers in the order of the input.")
    parser.add_to(writing, "--overwrite", action="store_true", help="Begin again, and replace the output.")


def _window(text: str) -> str:
    """Return hours as OpenAI's ``completion_window`` writes them; the service checks how many."""
    hours = text.removesuffix("h")
    if not (hours.isascii() and hours.isdigit()):
        raise argparse.ArgumentTypeError("it must be a number of hours, such as 24h")
    return f"{hours}h"
