"""Writes the companion model into a model repository, and converts models of Triton's vLLM backend in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from triton_openai.errors import ConfigurationError

CONFIG_FILE = "config.pbtxt"
ENGINE_FILE = "engine.json"
BACKEND_FILE = "model.json"
MODEL_FILE = "model.py"
LORA_FILE = "multi_lora.json"
#: What is kept of a model of the vLLM backend, to convert it back.
KEPT_CONFIG = "config.pbtxt.vllm-backend"


class _ModelConfig(msgspec.Struct, frozen=True):
    """What a model's ``config.json`` says of its architecture."""

    architectures: list[str] = []
    model_type: str = ""


class SpeechModel(msgspec.Struct, frozen=True):
    """A kind of models of which vLLM's class writes down speech (``SupportsTranscription``)."""

    #: The architecture in the model's ``config.json``.
    architecture: str
    #: What names of such models on the hub contain, in small letters.
    name: str
    #: What an engine with such a model is for.
    runner: str


# What vLLM's pooler gives for each token.
_TOKEN_TASKS = ("token_embed", "token_classify")
_WHISPER = "transcribe"
_SPEECH = "transcribe_text"
_CHATS_TOO = f"generate, {_SPEECH}"
#: The kinds in vLLM 0.11 to 0.33. Those that vLLM serves for transcriptions alone do not chat.
SPEECH_MODELS = (
    SpeechModel("WhisperForConditionalGeneration", "whisper", _WHISPER),
    SpeechModel("VoxtralForConditionalGeneration", "voxtral", _CHATS_TOO),
    SpeechModel("VoxtralRealtimeGeneration", "voxtral", _CHATS_TOO),
    SpeechModel("Qwen3ASRForConditionalGeneration", "qwen3-asr", _CHATS_TOO),
    SpeechModel("Qwen3ASRRealtimeGeneration", "qwen3-asr", _CHATS_TOO),
    SpeechModel("Qwen3OmniMoeForConditionalGeneration", "qwen3-omni", _CHATS_TOO),
    SpeechModel("Gemma3nForConditionalGeneration", "gemma-3n", _CHATS_TOO),
    SpeechModel("GraniteSpeechForConditionalGeneration", "granite-speech", _CHATS_TOO),
    SpeechModel("GraniteSpeechPlusForConditionalGeneration", "granite-speech", _CHATS_TOO),
    SpeechModel("GlmAsrForConditionalGeneration", "glm-asr", _CHATS_TOO),
    SpeechModel("MoonshotKimiaForCausalLM", "kimi-audio", _CHATS_TOO),
    SpeechModel("CohereAsrForConditionalGeneration", "cohere-transcribe", _SPEECH),
    SpeechModel("FireRedASR2ForConditionalGeneration", "fireredasr2", _SPEECH),
    SpeechModel("FunASRForConditionalGeneration", "fun-asr", _SPEECH),
    SpeechModel("MossTranscribeDiarizeForConditionalGeneration", "moss-transcribe", _SPEECH),
)


_NONE: Mapping[str, str] = MappingProxyType({})
_CONFIG = """\
# Written by triton-openai: vLLM inside Triton's Python backend.
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "request" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "carrier" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "media" data_type: TYPE_STRING dims: [ -1 ] optional: true }}
]
output [ {{ name: "response" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
parameters {{ key: "triton_openai_contract" value: {{ string_value: "1" }} }}
parameters {{ key: "triton_openai_runner" value: {{ string_value: "{runner}" }} }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: {{ string_value: "yes" }} }}
"""


def model_code() -> str:
    """Return the text of the model's ``model.py``."""
    return files("triton_openai.companion").joinpath(MODEL_FILE).read_text(encoding="utf-8")


def config_text(arguments: Mapping[str, Any]) -> str:
    """Return the text of the model's configuration for an engine with these *arguments*."""
    return _CONFIG.format(runner=runner_of(arguments))


def runner_of(arguments: Mapping[str, Any]) -> str:
    """
    Return what an engine with these *arguments* is for, as the adapter reads it: see ``RUNNER`` there.

    *arguments* are vLLM's, in which older releases have a ``task``.
    """
    pooler = arguments.get("pooler_config")
    if isinstance(pooler, Mapping) and pooler.get("task") in _TOKEN_TASKS:
        return str(pooler["task"])
    task = arguments.get("task")
    if "classify" in (task, arguments.get("convert")):
        return "classify"
    if arguments.get("runner") == "pooling" or task not in (None, "auto", "generate", "transcription"):
        return "embed"
    speech = _speech_model(str(arguments.get("model", "")))
    if speech is not None:
        return speech.runner
    if task == "transcription":
        return _SPEECH
    return "generate"


def _speech_model(model: str) -> SpeechModel | None:
    """Return what kind of speech model *model* is, a folder or a name on the hub: by its configuration or its name."""
    path = Path(model) / "config.json"
    if not path.is_file():
        name = model.rpartition("/")[2].lower().replace("_", "-")
        return next((kind for kind in SPEECH_MODELS if kind.name in name), None)
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.MsgspecError):
        return None
    if config.model_type == "whisper":
        return SPEECH_MODELS[0]
    return next((kind for kind in SPEECH_MODELS if kind.architecture in config.architectures), None)


def write(to: Path, name: str, arguments: Mapping[str, Any], loras: Mapping[str, str] = _NONE) -> Path:
    """
    Write the model *name* with the engine's *arguments* into the repository *to*, and return its folder.

    *loras* has the folders of LoRA adapters by their names.

    Raises :class:`ConfigurationError` if the repository has such a model.
    """
    folder = to / name
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: give another --model, or convert it with --from {folder}.")
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config_text(arguments), encoding="utf-8")
    (version / MODEL_FILE).write_text(model_code(), encoding="utf-8")
    (version / ENGINE_FILE).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
    if loras:
        (version / LORA_FILE).write_text(json.dumps(loras, indent=2) + "\n", encoding="utf-8")
    return folder


def convert(folder: Path) -> str:
    """
    Convert the model in *folder* in place: of the vLLM backend to the companion, or a converted one back.

    Return a sentence that says what was done. Raises :class:`ConfigurationError` for any other folder.
    """
    version = _newest(folder)
    kept = folder / KEPT_CONFIG
    if (version / ENGINE_FILE).exists():
        if not kept.exists():
            raise ConfigurationError(f"{folder} was not converted from the vLLM backend: {kept.name} is missing.")
        kept.replace(folder / CONFIG_FILE)
        (version / ENGINE_FILE).replace(version / BACKEND_FILE)
        (version / MODEL_FILE).unlink(missing_ok=True)
        return f"{folder} is a model of the vLLM backend again."
    source = version / BACKEND_FILE
    if not source.exists():
        raise ConfigurationError(f"{folder} is no model of the vLLM backend: {source} is missing.")
    if (version / MODEL_FILE).exists():
        raise ConfigurationError(f"{version / MODEL_FILE} exists: this model has code of its own.")
    arguments = read_arguments(source)
    config = folder / CONFIG_FILE
    if config.exists():
        config.replace(kept)
    else:
        # The backend's configuration may be empty: Triton completes it.
        kept.write_text('backend: "vllm"\n', encoding="utf-8")
    config.write_text(config_text(arguments), encoding="utf-8")
    (version / MODEL_FILE).write_text(model_code(), encoding="utf-8")
    source.replace(version / ENGINE_FILE)
    return f"{folder} is a companion model now. The same command converts it back."


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the engine's arguments in the JSON file *path*. Raises :class:`ConfigurationError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error


def _newest(folder: Path) -> Path:
    versions = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    if not versions:
        raise ConfigurationError(f"{folder} is no model of a repository: it has no folder with a version.")
    return max(versions, key=lambda path: int(path.name))
