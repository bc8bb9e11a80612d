"""
Finds and reads a tokenizer's files as Hugging Face models ship them, and the sampling that a model's authors recommend.

The files and their precedence are those of ``transformers``' ``PreTrainedTokenizerBase.from_pretrained``:
``tokenizer.json`` is the tokenizer; ``tokenizer_config.json`` names the special tokens (over
``special_tokens_map.json``) and may hold the chat template; ``chat_template.jinja`` and
``additional_chat_templates/*.jinja`` win over the templates in it; ``generation_config.json`` (else ``config.json``)
knows the ids that end a generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from triton_openai.config.tree import AUTO, NONE, DefaultParameters
from triton_openai.errors import ConfigurationError
from triton_openai.jobs import Pooling

_log = structlog.get_logger(__name__)

_GENERATION_CONFIG = "generation_config.json"

#: The files that are read. Nothing else, such as weights, is downloaded.
HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    _GENERATION_CONFIG,
    "config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    # Of sentence-transformers.
    "modules.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
)

# What sentence-transformers calls the ways of pooling: flags in older files, one name in newer ones.
_POOLING_MODES: Mapping[str, Literal["mean", "cls", "last"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}

# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_VALUES = msgspec.json.Decoder(DefaultParameters).type

# A name, and after @ a branch, a tag or a commit.
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?)(?:@([A-Za-z0-9_][\w./-]*))?", re.ASCII)


#: The name of the file that describes the model's format of tool calls.
TOOL_FORMAT = "tool_format.yaml"


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer's folder says, read but not yet understood."""

    tokenizer_json: Path
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    model_config: Mapping[str, Any]
    chat_templates: Mapping[str, str]
    #: How an encoder's vectors are pooled; ``None`` where no file says it.
    pooling: Pooling | None = None
    #: The file that describes the model's format of tool calls, if there is one.
    tool_format: Path | None = None


def locate(source: str) -> TokenizerFiles:
    """
    Return the files at *source*: a folder, a ``tokenizer.json``, or a name on the Hugging Face hub, optionally with a
    revision (``org/name@revision``). Raises :class:`ConfigurationError` if it is none of them.
    """
    try:
        path = Path(source).expanduser()
        # An empty path would be the working directory.
        exists = bool(source.strip()) and path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: a NUL in the name; RuntimeError: "~nobody"; OSError: a name too long, no permission.
        raise ConfigurationError(
            f"The tokenizer '{source}' given by --tokenizer cannot be read.", detail=str(error)
        ) from error
    if not exists:
        if not may_be_on_hub(source):
            raise ConfigurationError(
                f"There is no tokenizer at '{source}': --tokenizer takes a folder that holds tokenizer.json, "
                "that file itself, or a Hugging Face name such as 'org/name' or 'org/name@revision'."
            )
        path = fetch_from_hub(source)
    if path.is_dir():
        folder = path
        tokenizer_json = path / "tokenizer.json"
    else:
        folder = path.parent
        tokenizer_json = path
    if not tokenizer_json.is_file():
        raise ConfigurationError(
            f"The tokenizer '{source}' given by --tokenizer has no tokenizer.json. Where it has only a slow form, such "
            "as tokenizer.model, transformers writes one: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    origin = f"of the tokenizer '{source}' given by --tokenizer"
    config = _read_object(folder / "tokenizer_config.json", origin)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        config=config,
        special_tokens_map=_read_object(folder / "special_tokens_map.json", origin),
        generation_config=_read_object(folder / _GENERATION_CONFIG, origin),
        model_config=_read_object(folder / "config.json", origin),
        chat_templates=_templates_of(config) | _template_files(folder, origin),
        tool_format=_existing(folder / TOOL_FORMAT),
        pooling=_pooling(folder, origin),
    )


def _existing(path: Path) -> Path | None:
    if path.is_file():
        return path
    return None


def may_be_on_hub(source: str) -> bool:
    """Return whether *source* can be a name on the Hugging Face hub: an old one has no slash."""
    return _HUB_NAME.fullmatch(source) is not None


def is_hub_name(source: str) -> bool:
    """Return whether *source* has the form ``org/name`` or ``org/name@revision`` of the Hugging Face hub."""
    match = _HUB_NAME.fullmatch(source)
    return match is not None and "/" in match[1]


def fetch_from_hub(source: str) -> Path:
    """
    Download the tokenizer's files of the model *source* (or find them in the hub's cache) and return their folder.

    *source* is a name, with an optional branch, tag or commit after ``@``. The hub's address, access token, cache and
    offline mode (``HF_HUB_OFFLINE``) are ``huggingface_hub``'s own settings. Raises :class:`ConfigurationError`.
    """
    # Imported here: it takes 0.1 s, which a service with local tokenizers saves.
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match = _HUB_NAME.fullmatch(source)
    if match is None:
        name = source
        revision = None
    else:
        name = match[1]
        revision = match[2]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        # The hub's client passes through whatever its HTTP library raises, and that library changes between releases.
        cached = None
        if isinstance(error, GatedRepoError):
            why = "is gated on the Hugging Face hub: accept its terms there and set HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            why = "is neither a local folder nor a model on the Hugging Face hub: check --tokenizer (a private model "
            why += "needs HF_TOKEN)"
        elif isinstance(error, RevisionNotFoundError):
            why = f"has no revision '{revision}' on the Hugging Face hub: check --tokenizer"
        elif constants.HF_HUB_OFFLINE:
            # A cache that another program filled may lack unneeded files.
            cached = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
            why = "is not a local folder, HF_HUB_OFFLINE is set, and the hub's cache lacks it. Download it there first"
        elif isinstance(error, OSError) and error.filename is not None:
            why = "cannot be kept in the Hugging Face hub's cache: let HF_HOME name a folder that can be written to"
        else:
            why = "is no local folder, and the Hugging Face hub could not be reached. Check the name and the network"
        if not isinstance(cached, str):
            raise ConfigurationError(
                f"The tokenizer '{source}' {why}, or give --tokenizer a local folder.",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        folder = Path(cached).parent
    # The cache names the folder after the commit.
    _log.info("tokenizer comes from the Hugging Face hub", tokenizer=name, revision=folder.name)
    return folder


def _pooling(folder: Path, origin: str) -> Pooling | None:
    """
    Return how the vectors of a model of sentence-transformers are pooled; ``None`` if its files are not in *folder*.

    Raises :class:`ConfigurationError` for another way than the mean, the first or the last vector.
    """
    config = _read_object(folder / "1_Pooling" / "config.json", origin)
    modes = [name for name in _POOLING_MODES if config.get(name) is True]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLING_MODES:
        message = f"1_Pooling/config.json {origin} has the pooling {' and '.join(modes)}, which is not supported."
        raise ConfigurationError(message)
    modules = _read_list(folder / "modules.json", origin)
    types = [module.get("type") for module in modules if isinstance(module, dict)]
    normalize = any(isinstance(name, str) and name.endswith("Normalize") for name in types)
    texts = _read_object(folder / "config_sentence_transformers.json", origin)
    prompts = texts.get("prompts")
    prefix = ""
    if isinstance(prompts, dict):
        prefix = prompts.get(texts.get("default_prompt_name"), "")
    return Pooling(mode=_POOLING_MODES[modes[0]], normalize=normalize, prefix=str(prefix))


def _read_list(path: Path, origin: str) -> list[Any]:
    """Return the JSON list in *path*, empty where there is no such file."""
    value = _read_json(path, origin, default=[])
    if not isinstance(value, list):
        raise ConfigurationError(f"{path.name} {origin} must hold a JSON list.")
    return value


def _read_object(path: Path, origin: str) -> dict[str, Any]:
    """Return the JSON object in *path*, empty where there is no such file."""
    value = _read_json(path, origin, default={})
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name} {origin} must hold a JSON object.")
    return value


def _read_json(path: Path, origin: str, *, default: Any) -> Any:
    """Return the JSON in *path*, *default* where there is no such file."""
    text = _read_text(path, origin)
    if text is None:
        return default
    try:
        # Read as transformers does: with NaN and huge integers.
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path.name} {origin} is not valid JSON: {error}") from error


def _read_text(path: Path, origin: str) -> str | None:
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path.name} {origin} cannot be read.", detail=str(error)) from error


def _templates_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of ``tokenizer_config.json``: one string, or a list of ``{"name", "template"}``."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = value
    else:
        entries = []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _template_files(folder: Path, origin: str) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    paths["default"] = folder / "chat_template.jinja"
    texts = {name: _read_text(path, origin) for name, path in paths.items()}
    return {name: text for name, text in texts.items() if text is not None}


# The ones that vLLM's server takes (`ModelConfig.get_diff_sampling_param`), and their names in a request.
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}


def recommended_sampling(
    setting: str | None, own: Mapping[str, Any], notes: list[str]
) -> tuple[Mapping[str, Any], str | None]:
    """
    Return the sampling that the model's authors recommend, under the names of a request, and its origin.

    *setting* is ``generation_config``, *own* the content of the file beside the tokenizer. Invalid values are omitted,
    with a note. Raises :class:`ConfigurationError` if a configured file cannot be read.
    """
    if setting == NONE:
        return {}, None
    config = own
    origin = f"the tokenizer's {_GENERATION_CONFIG}"
    if setting not in (None, AUTO):
        path = Path(setting).expanduser()
        if path.is_dir():
            path = path / _GENERATION_CONFIG
        if not path.is_file():
            raise ConfigurationError(f"There is no file '{setting}' given by generation_config.")
        config = _read_object(path, "given by generation_config")
        origin = f"{setting} (generation_config)"
    values: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = config.get(key)
        try:
            values |= msgspec.convert({name: value}, _VALUES).explicit()
        except msgspec.ValidationError:
            notes.append(f"{key} in {origin} is not used: {value!r} is no valid {name}")
    return values, origin if values else None
