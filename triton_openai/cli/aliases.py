"""
Flags and variables of similar servers: each is taken with a warning, or an error that says what to do.

``ALIASES``, ``WITHOUT_EFFECT`` and ``REFUSED`` are the whole list, by the server that has them; the guide to migrating
is written from it. ``COMMANDS`` has commands. The arguments of vLLM's engine are not listed: they are unknown flags
like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from triton_openai.config.options import ENVIRONMENT_PREFIX
from triton_openai.errors import ConfigurationError


def _log_level(value: str) -> str:
    return {"trace": "debug", "critical": "error"}.get(value, value)


def _grpc(value: str) -> str:
    """Return the gRPC URL of a server, which other programs write with the scheme of HTTP."""
    scheme, _, rest = value.rpartition("://")
    if scheme in ("https", "grpcs"):
        return f"grpcs://{rest}"
    return f"grpc://{rest}"


def _text_of(file: str) -> str:
    """Return the text of a *file*. Raises :class:`ConfigurationError`."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"The file '{file}' with the history template cannot be read: {error}.") from error


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
        "--history-template-file": ("--history-template", _text_of),
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
        "--api-server-count": ("--workers", None),
    },
}
#: By server: each flag whose value changes nothing here, and why.
WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "NVIDIA's OpenAI frontend": {
        "--backend": "Each model's adapter is chosen by its tensors; --adapter overrides the choice.",
        "--tritonserver-log-verbose-level": "To choose what Triton logs, start it yourself and write --triton-url.",
        "--max-tool-call-parse-bytes": "Tool calls are parsed as they arrive, at any length.",
    },
}
# What configures the engine belongs to the model. The first is the companion model, the second Triton's vLLM backend.
_FOR_THE_MODEL = "Give it to `triton-openai model-repository vllm`"
_MODEL_JSON = "model.json, in the folder of the vLLM backend's model"
#: What to do with any other argument of vLLM's engine.
ENGINE_ADVICE = f"Is it an argument of vLLM's engine? {_FOR_THE_MODEL}, or write it into {_MODEL_JSON}."
#: Commands of ``vllm`` that have another name here, and what to write instead.
COMMANDS: Mapping[str, str] = {
    "run-batch": "`triton-openai batch run -i FILE -o FILE` sends the requests of the file to a running service.",
    "complete": "`triton-openai chat` asks a running service.",
}
#: By server: each flag that means nothing here, and what to do instead.
REFUSED: Mapping[str, Mapping[str, str]] = {
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
        "--allowed-media-domains": "Write --allowed-media-domain HOST for each of them.",
        "--lora-modules": f"{_FOR_THE_MODEL}, or write the adapters into multi_lora.json beside model.json, and "
        "enable_lora into model.json.",
        "--override-generation-config": "Write defaults.default_parameters in the YAML file.",
        "--chat-template-content-format": "Leave it out: the form is found out from the chat template.",
        "--enable-force-include-usage": "Write api.always_include_usage: true in the YAML file.",
        "--enable-request-id-headers": "Leave it out: every answer has x-request-id.",
        "--enable-log-requests": "Write server.log_content in the YAML file: how many characters of a text to log.",
        "--disable-log-requests": "Leave it out: prompts are not logged.",
        "--disable-fastapi-docs": "Write --no-page.",
        "--root-path": "Let the proxy take the prefix away.",
        # Of the engine's short arguments, those that begin like a short flag of openai_trtllm.
        "-tp": f"{_FOR_THE_MODEL}, or write tensor_parallel_size into {_MODEL_JSON}.",
        "-pp": f"{_FOR_THE_MODEL}, or write pipeline_parallel_size into {_MODEL_JSON}.",
        "--hf-token": "Set HF_TOKEN in the environment, here and where Triton runs.",
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
_WITHOUT_EFFECT = {flag: why for flags in WITHOUT_EFFECT.values() for flag, why in flags.items()}
_REFUSED = {flag: (advice, server) for server, flags in REFUSED.items() for flag, advice in flags.items()}


def translate(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str], Sequence[str]]:
    """
    Return *arguments* and *environ* with our names in the place of other servers', and a warning for each of these.

    A variable of ours wins. Raises :class:`ConfigurationError`.
    """
    written: list[str] = []
    warnings: list[str] = []
    # What to do with a value that is an argument of its own.
    convert: Callable[[str], str | None] | None = None
    for argument in arguments:
        if convert is not None:
            value = argument if argument.startswith("-") else convert(argument)
            written += [] if value is None else [value]
            convert = None
            continue
        flag, equals, value = argument.partition("=")
        if flag not in _REFUSED and not argument.startswith("--") and len(argument) > 2:
            # A short flag and its value in one word.
            flag = argument[:2]
            equals = "="
            value = argument[2:].removeprefix("=")
        _check(flag, flag)
        if flag in _WITHOUT_EFFECT:
            warnings.append(f"{flag} is accepted without effect. {_WITHOUT_EFFECT[flag]}")
            if not equals:
                convert = _drop
            continue
        if flag not in _ALIASES:
            written.append(argument)
            continue
        ours, converter = _ALIASES[flag]
        warnings.append(f"{flag} is accepted; its name here is {ours}.")
        if equals:
            if converter is not None:
                value = converter(value)
            written.append(f"{ours}={value}")
        else:
            written.append(ours)
            convert = converter
    translated = dict(environ)
    for variable, theirs in VARIABLES.items():
        value = translated.pop(variable, "")
        if not value:
            continue
        _check(theirs, variable)
        flag, converter = _ALIASES.get(theirs, (theirs, None))
        ours = ENVIRONMENT_PREFIX + flag.lstrip("-").replace("-", "_").upper()
        if translated.get(ours):
            warnings.append(f"{variable} is ignored: {ours} is set.")
            continue
        warnings.append(f"{variable} is accepted; its name here is {ours}.")
        if converter is None:
            translated[ours] = value
        else:
            translated[ours] = converter(value)
    return written, MappingProxyType(translated), warnings


def _drop(value: str) -> None:
    """Convert the value of a flag without effect to nothing."""


def _check(flag: str, origin: str) -> None:
    if flag in _REFUSED:
        advice, server = _REFUSED[flag]
        raise ConfigurationError(f"{origin}, known from {server}, has no counterpart here. {advice}")
