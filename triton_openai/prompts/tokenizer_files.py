"""
Finds and reads the files of a tokenizer as Hugging Face models ship them.

Which files exist and which of two wins is what ``transformers`` does in ``PreTrainedTokenizerBase.from_pretrained``:
``tokenizer.json`` is the tokenizer; ``tokenizer_config.json`` names the special tokens (over
``special_tokens_map.json``) and may hold the chat template; ``chat_template.jinja`` and
``additional_chat_templates/*.jinja`` win over the templates in it; ``generation_config.json`` (else ``config.json``)
knows the ids that end a generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)

#: Everything that is read; nothing else (weights!) is ever downloaded.
HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)

#: Vocabularies of tokenizers that exist in ``transformers``' slow form only.
SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "vocab.txt",
    "vocab.json",
    "tekken.json",
    "qwen.tiktoken",
)

# A name, and after @ a branch, a tag or a commit.
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?)(?:@([A-Za-z0-9_][\w./-]*))?", re.ASCII)


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer's folder says, read but not yet understood."""

    source: str
    tokenizer_json: Path
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    model_config: Mapping[str, Any]
    chat_templates: Mapping[str, str]


def locate(source: str, fetch: Callable[[str], Path]) -> TokenizerFiles:
    """
    Return the files that *source* means: a folder, a ``tokenizer.json``, or a name on the Hugging Face hub, which may
    have a revision (``org/name@revision``).

    *fetch* brings a hub name's files to a local folder. Raises :class:`ConfigurationError` when there is nothing
    usable behind *source*.
    """
    if not source.strip():
        raise ConfigurationError("The tokenizer's name is empty: give --tokenizer a folder or a hub name.")
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return read_folder(path, source)
        if path.is_file():
            return _read(path.parent, path, source)
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: a NUL in the name; RuntimeError: "~nobody"; OSError: a name too long, no permission.
        raise ConfigurationError(
            f"The tokenizer '{source}' given by --tokenizer cannot be read.", detail=str(error)
        ) from error
    if not _HUB_NAME.fullmatch(source):
        raise ConfigurationError(
            f"There is no tokenizer at '{source}': --tokenizer takes a folder that holds tokenizer.json, "
            "that file itself, or a Hugging Face name such as 'org/name' or 'org/name@revision'."
        )
    return read_folder(fetch(source), source)


def read_folder(folder: Path, source: str) -> TokenizerFiles:
    """Read *folder*; raises :class:`ConfigurationError` when it has no ``tokenizer.json`` or a file is broken."""
    tokenizer_json = folder / "tokenizer.json"
    if tokenizer_json.is_file():
        return _read(folder, tokenizer_json, source)
    slow = next((name for name in SLOW_FILES if (folder / name).is_file()), None)
    if slow is not None:
        raise ConfigurationError(
            f"The tokenizer '{source}' has only the slow form ({slow}); --tokenizer needs tokenizer.json. "
            "transformers writes one: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    raise ConfigurationError(
        f"The tokenizer '{source}' has no tokenizer.json: give --tokenizer a folder or a hub name that has one."
    )


def is_hub_name(source: str) -> bool:
    """Return whether *source* has the form ``org/name`` or ``org/name@revision`` of the Hugging Face hub."""
    match = _HUB_NAME.fullmatch(source)
    return match is not None and "/" in match[1]


def fetch_from_hub(source: str) -> Path:
    """
    Download the tokenizer's files of the model *source* (or find them in the hub's cache) and return their folder.

    *source* is a name, and after ``@`` the branch, tag or commit to use instead of the main branch. Where the hub is,
    the access token, the cache and offline mode (``HF_HUB_OFFLINE``) are ``huggingface_hub``'s own settings. Raises
    :class:`ConfigurationError` when the model or the revision does not exist, the model is gated, or the hub cannot be
    reached.
    """
    # Here, because it brings an HTTP client: 0.1 s at start that a service with local tokenizers need not pay.
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match = _HUB_NAME.fullmatch(source)
    name, revision = (source, None) if match is None else (match[1], match[2])
    try:
        folder = Path(str(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES))))
    except GatedRepoError as error:
        raise ConfigurationError(
            f"The tokenizer '{source}' is gated on the Hugging Face hub: accept its terms there and set HF_TOKEN, or "
            "give --tokenizer a local folder.",
            detail=str(error),
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"The tokenizer '{source}' is neither a local folder nor a model on the Hugging Face hub: check "
            "--tokenizer (a private model needs HF_TOKEN).",
            detail=str(error),
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigurationError(
            f"The tokenizer '{source}': the model has no revision '{revision}' on the Hugging Face hub; check "
            "--tokenizer.",
            detail=str(error),
        ) from error
    except Exception as error:
        # The hub's client passes through whatever its HTTP library raises, and that library changes between
        # releases; whatever it is, the operator's remedy is the same.
        why, cached = "the Hugging Face hub could not be reached for it. Check the name and the network", None
        if constants.HF_HUB_OFFLINE:
            # A cache that another program filled may lack files that are not needed here.
            cached = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
            why = "HF_HUB_OFFLINE is set and the hub's cache does not hold it. Download it there first"
        if not isinstance(cached, str):
            raise ConfigurationError(
                f"The tokenizer '{source}' is not a local folder, and {why}, or give --tokenizer a local folder.",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        folder = Path(cached).parent
    # The cache names the folder after the commit.
    _log.info("tokenizer comes from the Hugging Face hub", tokenizer=name, revision=folder.name)
    return folder


def _read(folder: Path, tokenizer_json: Path, source: str) -> TokenizerFiles:
    config = _read_json(folder / "tokenizer_config.json", source)
    return TokenizerFiles(
        source=source,
        tokenizer_json=tokenizer_json,
        config=config,
        special_tokens_map=_read_json(folder / "special_tokens_map.json", source),
        generation_config=_read_json(folder / "generation_config.json", source),
        model_config=_read_json(folder / "config.json", source),
        chat_templates=_templates_of(config) | _template_files(folder, source),
    )


def _read_json(path: Path, source: str) -> dict[str, Any]:
    """Read an optional JSON object. The standard library reads it as ``transformers`` does (NaN, huge integers)."""
    text = _read_text(path, source)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path.name} of the tokenizer '{source}' given by --tokenizer is not valid JSON: {error}"
        ) from error
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path.name} of the tokenizer '{source}' given by --tokenizer must hold a JSON object."
        )
    return value


def _read_text(path: Path, source: str) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path.name} of the tokenizer '{source}' given by --tokenizer cannot be read.", detail=str(error)
        ) from error


def _templates_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of ``tokenizer_config.json``: one string, or a list of ``{"name", "template"}``."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _template_files(folder: Path, source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        text = _read_text(path, source)
        if text is not None:
            found[path.stem] = text
    default = _read_text(folder / "chat_template.jinja", source)
    if default is not None:
        found["default"] = default
    return found
