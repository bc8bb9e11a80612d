"""
Flags and variables of similar servers: each is an alias of ours with a warning, or an error that says what to do.

``ALIASES`` and ``REFUSED`` are the whole list, by the server that has them; the guide to migrating is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from triton_openai.config.options import ENVIRONMENT_PREFIX
from triton_openai.errors import ConfigurationError


def _log_level(value: str) -> str:
    return {"trace": "debug", "critical": "error"}.get(value, value)


def _grpc(value: str) -> str:
    """Return the URL of a server that speaks gRPC, which others write with the scheme of HTTP."""
    scheme, _, rest = value.rpartition("://")
    return f"{'grpcs' if scheme in ('https', 'grpcs') else 'grpc'}://{rest}"


#: By server: each flag, the flag of ours that it stands for, and what is done to its value where they differ.
ALIASES: Mapping[str, Mapping[str, tuple[str, Callable[[str], str] | None]]] = {
    "NVIDIA's OpenAI frontend": {
        "--openai-port": ("--port", None),
        "--http-max-input-size": ("--max-body-size", None),
        "--uvicorn-log-level": ("--log-level", _log_level),
    },
    "openai_trtllm": {
        "-H": ("--host", None),
        "-p": ("--port", None),
        "-t": ("--triton-url", _grpc),
        "--triton-endpoint": ("--triton-url", _grpc),
        "-o": ("--otlp-endpoint", None),
    },
    "triton-inference-server-openai-api": {
        "--tokenizer_dir": ("--tokenizer", None),
        "--default_max_tokens": ("--default-max-tokens", None),
    },
    "vLLM's server": {
        "--ssl-certfile": ("--tls-certificate", None),
        "--ssl-keyfile": ("--tls-key", None),
        "--ssl-ca-certs": ("--tls-client-ca", None),
        "--otlp-traces-endpoint": ("--otlp-endpoint", None),
    },
}
#: By server: each flag that means nothing here, and what to do instead.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "NVIDIA's OpenAI frontend": {
        "--backend": "Leave it out: the adapter is chosen by each model's tensors. --adapter overrides the choice.",
        "--tritonserver-log-verbose-level": "To choose what Triton logs, start it yourself and write --triton-url.",
        "--max-tool-call-parse-bytes": "Leave it out: tool calls are parsed as they arrive, at any length.",
    },
    "openai_trtllm": {
        "--history-template": "Write the text as defaults.history_template in the YAML file, or use --chat-template.",
        "--history-template-file": "Put the text into defaults.history_template in the YAML file, or use "
        "--chat-template.",
    },
    "triton-inference-server-openai-api": {
        "--engine_dir": "Leave it out: --max-model-len sets what was read from the engine, and with "
        "--triton-repository it is read from the model's files.",
        "--triton_http_proto": "Write --triton-url http://HOST:PORT.",
        "--triton_http_host": "Write --triton-url http://HOST:PORT.",
        "--triton_http_port": "Write --triton-url http://HOST:PORT.",
        "--verbose": "Write --log-level debug.",
    },
    "vLLM's server": {
        "--served-model-name": "Write --alias NAME=MODEL.",
        "--enable-auto-tool-choice": "Leave it out: tool calls are recognized wherever the model has a parser.",
        "--allowed-origins": "Write --cors-allow-origin ORIGIN for each of them.",
    },
}
#: Variables of openai_trtllm and the flags of it or of ours that they stand for.
VARIABLES: Mapping[str, str] = {
    "OPENAI_TRTLLM_HOST": "--host",
    "OPENAI_TRTLLM_PORT": "--port",
    "OPENAI_TRTLLM_TRITON_ENDPOINT": "--triton-endpoint",
    "OPENAI_TRTLLM_OTLP_ENDPOINT": "--otlp-endpoint",
    "OPENAI_TRTLLM_API_KEY": "--api-key",
    "OPENAI_TRTLLM_HISTORY_TEMPLATE": "--history-template",
    "OPENAI_TRTLLM_HISTORY_TEMPLATE_FILE": "--history-template-file",
}
_ALIASES = {flag: alias for flags in ALIASES.values() for flag, alias in flags.items()}
_REFUSED = {flag: (advice, server) for server, flags in REFUSED.items() for flag, advice in flags.items()}


class Translated(msgspec.Struct, frozen=True):
    """A command line and an environment with names of ours only, and a *warning* for each other name."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    warnings: Sequence[str]


def translate(arguments: Sequence[str], environ: Mapping[str, str]) -> Translated:
    """Put our names in the place of other servers'; a variable of ours wins. Raises :class:`ConfigurationError`."""
    written: list[str] = []
    warnings: list[str] = []
    convert: Callable[[str], str] | None = None
    for argument in arguments:
        if convert is not None:
            written.append(argument if argument.startswith("-") else convert(argument))
            convert = None
            continue
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--") and len(argument) > 2:
            # A short flag and its value in one word.
            flag, equals, value = argument[:2], "=", argument[2:].removeprefix("=")
        _check(flag, flag)
        if flag not in _ALIASES:
            written.append(argument)
            continue
        ours, converter = _ALIASES[flag]
        warnings.append(f"{flag} is accepted; its name here is {ours}.")
        if equals:
            written.append(f"{ours}={value if converter is None else converter(value)}")
        else:
            written.append(ours)
            convert = converter
    translated = dict(environ)
    for variable, theirs in VARIABLES.items():
        if not (value := translated.pop(variable, "")):
            continue
        _check(theirs, variable)
        flag, converter = _ALIASES.get(theirs, (theirs, None))
        ours = ENVIRONMENT_PREFIX + flag.lstrip("-").replace("-", "_").upper()
        if translated.get(ours):
            warnings.append(f"{variable} is ignored: {ours} is set.")
            continue
        warnings.append(f"{variable} is accepted; its name here is {ours}.")
        translated[ours] = value if converter is None else converter(value)
    return Translated(written, MappingProxyType(translated), warnings)


def _check(flag: str, origin: str) -> None:
    if flag in _REFUSED:
        advice, server = _REFUSED[flag]
        raise ConfigurationError(f"{origin}, known from {server}, has no counterpart here. {advice}")
