"""``triton-openai model-repository``: writes models into a repository for Triton, or converts them in place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_openai.cli.parser import CommandParser
from triton_openai.companion import repository
from triton_openai.errors import ConfigurationError

COMMAND = "model-repository"
PURPOSE = "Write a model that serves vLLM inside Triton, with all of vLLM's parameters."

_ENGINE = "vllm"
# Short flags of vLLM's server.
_SHORT = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "q": "quantization",
    "cc": "compilation_config", "O": "optimization_level",
}  # fmt: skip
# What belongs to this service or to the server of vLLM, and not to its engine.
_SERVER = frozenset(
    {
        *("host", "port", "uds", "api_key", "served_model_name", "chat_template", "chat_template_content_format"),
        *("tool_call_parser", "enable_auto_tool_choice", "tool_parser_plugin", "response_role", "root_path"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "allowed_origins", "allow_credentials", "allowed_methods"),
        *("allowed_headers", "uvicorn_log_level", "disable_fastapi_docs", "return_tokens_as_token_ids", "middleware"),
        *("enable_request_id_headers", "max_log_len", "disable_uvicorn_access_log", "api_server_count", "headless"),
    }
)
_MULTIPLES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_NAME = re.compile(r"[\w.-]+")


def build_parser() -> CommandParser:
    """Return the parser of the command's own flags; all others are those of vLLM's engine."""
    parser = CommandParser(
        prog=f"triton-openai {COMMAND}",
        usage=f"%(prog)s {_ENGINE} [--model] NAME --to DIR [vLLM's engine flags] | {_ENGINE} --from DIR/NAME",
        description=PURPOSE,
        epilog="All other flags are those of `vllm serve` that concern its engine, such as --max-model-len 8192.",
        allow_abbrev=False,
    )
    parser.add_argument("engine", choices=[_ENGINE], help="The library that runs the model.")
    parser.add_argument("--model", metavar="NAME", help="A model of the Hugging Face hub, or a folder.")
    parser.add_argument("--name", help="The model's name in Triton. (default: the last part of --model)")
    parser.add_argument("--to", metavar="DIR", type=Path, help="The model repository to write into.")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="DIR/NAME",
        type=Path,
        help="A model of Triton's vLLM backend to convert in place, or a converted one to convert back.",
    )
    parser.add_argument(
        "--lora-modules", metavar="NAME=PATH", nargs="+", default=(), help="LoRA adapters: names and folders."
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """
    Run the command with *arguments*, those behind its name, and return its exit status.

    Raises :class:`ConfigurationError`.
    """
    parsed, further = build_parser().parse_known_args(arguments)
    if parsed.model is None and further and not further[0].startswith("-"):
        # As `vllm serve` takes it.
        parsed.model = further.pop(0)
    if parsed.source is not None:
        if parsed.model or parsed.to or further:
            raise ConfigurationError("--from converts a model as it is: it takes no other flags.")
        print(repository.convert(parsed.source))
        return 0
    if not parsed.model or parsed.to is None:
        raise ConfigurationError("Write the model and --to, the folder of the model repository; or --from alone.")
    engine = {"model": parsed.model, **engine_arguments(further)}
    loras = dict(_lora(text) for text in parsed.lora_modules)
    if loras:
        engine.setdefault("enable_lora", True)
    name = parsed.name or Path(parsed.model).name
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name for a model: give one with --name.")
    folder = repository.write(parsed.to, name, engine, loras)
    # Without --load-model, Triton would load nothing. The default timeout is shorter than the start of an engine.
    print(
        f"{folder} is written. Serve it: tritonserver --model-repository={parsed.to} --model-control-mode=explicit "
        f"--load-model={name} --backend-config=python,stub-timeout-seconds=600"
    )
    return 0


def engine_arguments(flags: Sequence[str]) -> Mapping[str, Any]:
    """
    Return vLLM's engine arguments for *flags* of its server.

    Raises :class:`ConfigurationError` for what is no flag, and for flags of the server itself.
    """
    engine: dict[str, Any] = {}
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-"):
            raise ConfigurationError(f"{flag!r} is no flag, and belongs to none.")
        written, equals, value = flag.partition("=")
        name = written.lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name)
        if name == "served_model_name":
            raise ConfigurationError(
                f"{written} is not for the engine. Write --name for the name in Triton. "
                "A further name is --alias NAME=MODEL of `triton-openai serve`."
            )
        if name in _SERVER:
            raise ConfigurationError(f"{written} is a flag of vLLM's server: see triton-openai serve --help-all.")
        if equals:
            engine[name] = _value(value)
        elif rest and not rest[0].startswith("--"):
            engine[name] = _value(rest.pop(0))
        elif name.startswith("no_"):
            engine[name.removeprefix("no_")] = False
        else:
            engine[name] = True
    return engine


def _value(text: str) -> Any:
    """Return what *text* means: JSON, a number such as ``32k``, or itself."""
    human = _HUMAN.fullmatch(text)
    if human is not None:
        return int(float(human[1]) * _MULTIPLES[human[2]])
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lora(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigurationError(f"--lora-modules takes NAME=PATH, got {text!r}.")
    return name, path
