"""The sampling that a model's authors recommend, in the ``generation_config.json`` that ships with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.config.models import DefaultParameters
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer

AUTO = "auto"
NONE = "none"

_FILE = "generation_config.json"
# Those that vLLM's server takes (`ModelConfig.get_diff_sampling_param`), and what a request calls them.
_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended_sampling(
    source: str | None, tokenizer: Tokenizer | None, notes: list[str]
) -> tuple[Mapping[str, Any], str | None]:
    """
    Return what is recommended, under the names of a request, and where it came from.

    *source* is ``generation_config``. A value that no request could have is left out, with a note. Blocks (disk).
    Raises :class:`ConfigurationError` for a file that was named and cannot be read.
    """
    if source == NONE:
        return {}, None
    if source is None or source == AUTO:
        config, origin = {} if tokenizer is None else tokenizer.generation_config, f"the tokenizer's {_FILE}"
    else:
        config, origin = _read(source), f"{source} (generation_config)"
    found: dict[str, Any] = {}
    for key, name in _NAMES.items():
        value = config.get(key)
        try:
            found |= msgspec.convert({name: value}, DefaultParameters).given()
        except msgspec.ValidationError:
            notes.append(f"{key} in {origin} is not used: {value!r} is no valid {name}")
    return found, origin if found else None


def _read(source: str) -> Mapping[str, Any]:
    path = Path(source).expanduser()
    try:
        config = json.loads((path / _FILE if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"'{source}' given by generation_config cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"'{source}' given by generation_config must hold a JSON object.")
    return config
