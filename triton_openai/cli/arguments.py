"""The command line: built from the settings tree, so that a new setting has its flag and its help at once."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from triton_openai import __version__
from triton_openai.cli.aliases import COMMANDS as OTHER_COMMANDS
from triton_openai.cli.aliases import ENGINE_ADVICE
from triton_openai.cli.batch import BATCH
from triton_openai.cli.bench import BENCH
from triton_openai.cli.chat import CHAT
from triton_openai.cli.completion import CompletableCommand, add_completion_options, script
from triton_openai.cli.model_repository import COMMAND, PURPOSE
from triton_openai.cli.model_repository import build_parser as model_repository_parser
from triton_openai.cli.parser import CommandParser, OwnCommand
from triton_openai.config.options import Option, bare_type, options
from triton_openai.config.sources import refuse_if_file_only
from triton_openai.config.tree import Settings
from triton_openai.config.validation import did_you_mean
from triton_openai.errors import ConfigurationError

_COMMANDS = {
    "serve": "Serve the models of a Triton through the OpenAI API.",
    "demo": "Start an embedded Triton with a small language model, serve it, and ask it something.",
    "inspect": "Show how each model of a Triton would be served: adapter, parameters, tokenizer, template.",
    "check": "Check settings, keys and files without Triton.",
    "collect-env": "Print what a report of a fault needs: versions, machine and settings, without secrets.",
}


def _parse(options: Mapping[str, Any]) -> int:
    # Imported here: it loads every parser.
    from triton_openai.cli.parse_answer import run

    return run(options)


def _add_parse_options(parser: CommandParser) -> None:
    """Add the options of the command ``parse`` to its *parser*."""
    parser.add_argument(
        "--format", required=True, metavar="NAME|FILE", help="A built-in format, or a YAML file that describes one."
    )
    parser.add_argument("--reasoning", metavar="NAME", help="A built-in format of reasoning.")
    parser.add_argument("--tools", metavar="FILE", type=Path, help="JSON file with the request's tools.")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="The end of the prompt, which may open thinking.")
    parser.add_argument("--cut", action="store_true", help="A limit of tokens ended the answer.")


def _complete(options: Mapping[str, Any]) -> int:
    """Print the script that completes commands and options in the shell of *options*."""
    _, commands = build_parsers(everything=True)
    parsers = {**commands, COMMAND: model_repository_parser()}
    print(script(options["shell"], [CompletableCommand.of(name, parser) for name, parser in parsers.items()]), end="")
    return 0


#: By name.
OWN_COMMANDS: Mapping[str, OwnCommand] = {
    command.name: command
    for command in (
        CHAT,
        BENCH,
        BATCH,
        OwnCommand(
            "parse",
            "Show what a format of tool calls makes of an answer on standard input.",
            _add_parse_options,
            _parse,
        ),
        OwnCommand(
            "completion",
            "Print the script that completes commands and options in a shell.",
            add_completion_options,
            _complete,
        ),
    )
}

_EPILOG = (
    "Every option can also be set in the environment (--triton-url as TRITON_OPENAI_TRITON_URL) and, after that, in "
    "the YAML file (as triton.url)."
)
_MORE = "More options: --help-all. All settings: docs/reference/settings.md. "

# Defaults that differ by command: these print their own messages instead of log lines.
DEFAULTS = {
    "demo": {"log-level": "warning"},
    "inspect": {"log-level": "error"},
}

# What ``--strict`` means to the commands that have it.
_STRICT = {
    "inspect": "End with status 1 if a model has a problem, or there is no model.",
    "check": "End with status 1 if there is a warning.",
}

# Settings that a command does not use, by group or by name: the demo starts its own Triton, and inspect does not serve.
_LEFT_OUT: Mapping[str, frozenset[str]] = {
    "demo": frozenset({"tls", "triton_access", "triton-url", "model-repository", "workers", "load-model"}),
    "inspect": frozenset(
        {
            *(
                "access",
                "metrics",
                "tls",
                "traces",
                "host",
                "port",
                "allowed-host",
                "workers",
                "max-body-size",
                "shutdown-grace",
            ),
            *("max-running-requests", "max-running-requests-per-model", "max-queued-requests", "shutdown-delay"),
            *("enable-kserve-frontends", "kserve-http-port", "kserve-grpc-port", "request-timeout", "page"),
            *("model-repository", "model-control-mode", "load-model"),
        }
    ),
}
_FLAG: Mapping[str, Any] = {"action": "store_true"}
_DEMO_SWITCHES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "once": ("End after the first answers.", _FLAG),
    "all": ("Serve a model of every kind of backend, not only of two.", _FLAG),
    "model": ("Another small model: a GGUF file, or a name on the Hugging Face hub.", {"metavar": "FILE|NAME"}),
    "weights": (
        "The file with the demo's own weights, where they are not installed.",
        {"metavar": "FILE", "type": Path},
    ),
    "speech": (
        "Also recognize and synthesize speech, with Whisper and Kokoro: make demo ARGS=--speech installs them.",
        _FLAG,
    ),
    "scripted": ("No language model: answers are made up, as docs/reference/scripted-models.md says.", _FLAG),
}
# Groups of which the short help shows an option or two, with those of the service.
_FEW = frozenset({"tls", "traces", "access"})
_TITLES = {
    **{"server": "service", "tls": "TLS", "triton": "Triton", "triton_access": "access to Triton", "api": "API"},
    **{"media": "images", "defaults": "models"},
}


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A command line."""

    command: str
    #: As they were written.
    settings: dict[str, Any]
    # The switches of single commands.
    models: Sequence[str] = ()
    json: bool = False
    strict: bool = False
    once: bool = False
    speech: bool = False
    scripted: bool = False
    all: bool = False
    model: str | None = None
    weights: Path | None = None
    #: Those of a command without settings.
    options: Mapping[str, Any] = {}


def parse(arguments: Sequence[str]) -> Parsed:
    """Read the command line. Raises :class:`ConfigurationError`, and :class:`SystemExit` after ``--help``."""
    _check_command(arguments[0] if arguments else "")
    parser, commands = build_parsers(everything="--help-all" in arguments)
    namespace, unknown = parser.parse_known_args(arguments)
    values = vars(namespace)
    if unknown:
        raise ConfigurationError(_unknown(unknown[0], values["command"], commands))
    if values["command"] in OWN_COMMANDS:
        own = {name: value for name, value in values.items() if name != "command"}
        return Parsed(command=values["command"], settings={}, options=own)
    settings = {"config", *(option.name for option in options())}
    return Parsed(
        settings={name: value for name, value in values.items() if name in settings},
        **{name: values[name] for name in Parsed.__struct_fields__ if name in values},
    )


def _check_command(first: str) -> None:
    if first in (*_COMMANDS, *OWN_COMMANDS, "-h", "--help", "--version"):
        return
    commands = [*_COMMANDS, *OWN_COMMANDS, COMMAND]
    if not first:
        problem = "The command is missing."
    elif first.startswith("-"):
        # Other servers have no commands: --model-repository is not a misspelt `model-repository`.
        problem = f"The command is missing. To serve models, write it before the options: triton-openai serve {first}."
    elif first in OTHER_COMMANDS:
        problem = f"There is no command {first!r}. {OTHER_COMMANDS[first]}"
    else:
        problem = f"There is no command {first!r}.{did_you_mean(first, commands)}"
    raise ConfigurationError(f"{problem} The commands are {', '.join(commands)}. See triton-openai --help.")


@cache
def build_parsers(*, everything: bool) -> tuple[CommandParser, Mapping[str, CommandParser]]:
    """Return the parser for all commands, and that of each. Their help shows the common flags, or *everything*."""
    parser = CommandParser(
        prog="triton-openai",
        description="The OpenAI API in front of NVIDIA Triton Inference Server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triton-openai {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(
            name,
            usage="%(prog)s [OPTION]..." + " [MODEL]..." * (name == "inspect"),
            description=purpose,
            help=purpose,
            epilog=_EPILOG if everything else _MORE + _EPILOG,
            allow_abbrev=False,
            # Wide enough to put a flag, its value and its help on one line.
            formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
        )
        command.add_argument("--help-all", action="help", help="Show every option and exit.")
        command.add_argument(
            "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of the settings."
        )
        if name == "inspect":
            command.add_argument("models", metavar="MODEL", nargs="*", help="Show the details of these models.")
            command.add_argument("--json", action="store_true", help="Print JSON, with all details.")
        if name in _STRICT:
            command.add_argument("--strict", action="store_true", help=_STRICT[name])
        if name == "demo":
            for switch, (help_text, keywords) in _DEMO_SWITCHES.items():
                command.add_argument(f"--{switch}", help=help_text, **keywords)
        _add_settings(command, name, everything=everything)
    # It has flags of its own, and reads them itself.
    commands.add_parser(COMMAND, help=PURPOSE, add_help=False)
    for name, own in OWN_COMMANDS.items():
        own.add_options(commands.add_parser(name, description=own.purpose, help=own.purpose, allow_abbrev=False))
    return parser, commands.choices


def _usable(command: str) -> list[Option]:
    """Return the settings that have a flag for *command*."""
    left_out = _LEFT_OUT.get(command, frozenset())
    return [
        option
        for option in options()
        if not option.file_only and option.name not in left_out and option.section not in left_out
    ]


def _add_settings(parser: CommandParser, command: str, *, everything: bool) -> None:
    defaults = DEFAULTS.get(command, {})
    groups: dict[str, Any] = {}
    for option in _usable(command):
        # Aliases belong to single models, and their group in the help is that of the models.
        if option.is_alias:
            section = "defaults"
        else:
            section = option.section
        if not everything and section in _FEW:
            section = "server"
        if section not in groups:
            groups[section] = parser.add_argument_group(
                _TITLES.get(section, section), _about(section) if everything else None
            )
        text = _help(option, defaults.get(option.name, option.default), everything=everything)
        # Values stay text here: converting and checking them is the same work for every source.
        keywords: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": text if everything or option.common else argparse.SUPPRESS,
        }
        if option.is_switch:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            choices = None
            if option.choices:
                choices = f"{{{','.join(option.choices)}}}"
            metavar = option.metavar or choices or option.name.rpartition("-")[2].upper()
            if option.per_model and not option.verbatim:
                keywords["metavar"] = f"[MODEL=]{metavar}"
            else:
                keywords["metavar"] = metavar
        if option.is_list or option.per_model:
            keywords["action"] = "append"
        if option.fields:
            keywords["nargs"] = len(option.fields)
        groups[section].add_argument(option.flag, dest=option.name, **keywords)
        parser.arguments.append(((option.flag,), {**keywords, "choices": option.choices}))
    if everything:
        keys = ", ".join(option.key for option in options() if option.file_only)
        parser.add_argument_group("only in the YAML file", f"{keys}. See docs/reference/settings.md.")


def _help(option: Option, default: Any, *, everything: bool) -> str:
    if everything:
        text = option.help
    else:
        text = re.split(r"(?<=[.;]) ", option.help)[0].replace(";", ".")
    text = text.replace("%", "%%")
    if option.is_switch and default is not None:
        return f"{text} (default: {'on' if default else 'off'})"
    if default in (None, ()):
        return text
    if isinstance(default, tuple):
        default = ", ".join(map(str, default))
    if isinstance(default, float):
        return f"{text} (default: {default:g})"
    return f"{text} (default: {default})"


def _about(section: str) -> str:
    kind = next(field.type for field in msgspec.structs.fields(Settings) if field.name == section)
    return (inspect.getdoc(bare_type(kind)) or "").replace("%", "%%")


def _unknown(argument: str, command: str, parsers: Mapping[str, CommandParser]) -> str:
    if command in OWN_COMMANDS:
        if not argument.startswith("-"):
            # Such as the kind of benchmark that `vllm bench serve` takes.
            return f"`triton-openai {command}` takes options only, and {argument!r} is none: leave it out."
        known_names = [name for names, _ in parsers[command].arguments for name in names]
        hint = did_you_mean(argument.partition("=")[0], known_names) or f" See triton-openai {command} --help."
        return f"{argument} is not an option of `triton-openai {command}`.{hint}"
    if not argument.startswith("-"):
        # Such as the model that `vllm serve` takes.
        if command == "serve":
            models = (
                " The models are those that Triton has. To serve a model of the Hugging Face hub with vLLM in Triton, "
                f"write it into a model repository: triton-openai {COMMAND} vllm --model {argument} --to models; "
                "examples/vllm shows the rest."
            )
        else:
            models = ""
        return f"`triton-openai {command}` takes options only, and {argument!r} is none.{models}"
    flag = argument.partition("=")[0]
    known = {option.flag: option for option in options()}
    option = known.get(flag) or known.get(flag.replace("--no-", "--", 1))
    if option is None:
        hint = did_you_mean(flag, [usable.flag for usable in _usable(command)])
        if not hint:
            hint = f" See triton-openai {command} --help-all."
            if command == "serve":
                hint += f" {ENGINE_ADVICE}"
        return f"{flag} is not an option of `triton-openai {command}`.{hint}"
    refuse_if_file_only(option, flag)
    return f"`triton-openai {command}` has no {flag}. See triton-openai {command} --help."
