"""Finds the adapter of a model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import msgspec
import structlog

from triton_openai.adapters._common.base import Adapter
from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

ENTRY_POINT_GROUP = "triton_openai.adapters"

# In the order in which they are asked.
BUILT_IN: Mapping[str, str] = {
    "companion": "triton_openai.adapters.companion:Companion",
    "vllm": "triton_openai.adapters.vllm:Vllm",
    "trtllm-ensemble": "triton_openai.adapters.trtllm_ensemble:TrtllmEnsemble",
    "trtllm": "triton_openai.adapters.trtllm:Trtllm",
    "trtllm-llmapi": "triton_openai.adapters.trtllm_llmapi:TrtllmLlmapi",
    "trtllm-bls": "triton_openai.adapters.trtllm_bls:TrtllmBls",
    # A waveform looks like an embedding.
    "synthesizer": "triton_openai.adapters.synthesizer:Synthesizer",
    "classifier": "triton_openai.adapters.classifier:Classifier",
    "embeddings": "triton_openai.adapters.embeddings:Embeddings",
    "cross-encoder": "triton_openai.adapters.cross_encoder:CrossEncoder",
    "transcriber": "triton_openai.adapters.transcriber:Transcriber",
    "text": "triton_openai.adapters.text:Text",
}

ENGINE = "engine of a TensorRT-LLM model"
# What a model does for others, and the inputs and outputs that show it.
_ROLES: tuple[tuple[str, set[str], set[str]], ...] = (
    ("preprocessing of a TensorRT-LLM model", {"QUERY", "REQUEST_OUTPUT_LEN"}, set()),
    ("postprocessing of a TensorRT-LLM model", {"TOKENS_BATCH"}, set()),
    (ENGINE, {"input_lengths", "request_output_len"}, {"output_ids"}),
    ("encoders of a multimodal TensorRT-LLM model", set(), {"OUT_PROMPT_EMBEDDING_TABLE"}),
)
# Parameters with which a model names another that it calls.
_CALLS = (
    "tensorrt_llm_model_name",
    "tensorrt_llm_draft_model_name",
    "context_model_name",
    "generation_model_name",
)
# The name by which the code of CosyVoice 2, Spark-TTS and sherpa's speech LLM calls its language model.
_ENGINE_OF_SPEECH = "tensorrt_llm"


def helper_role(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> str | None:
    """
    Return what the model does for others, or ``None`` if it is none of the known helpers.

    An engine that no other model of *repository* uses is no helper: it can be served itself.
    """
    for role, inputs, outputs in _ROLES:
        if inputs <= config.inputs.keys() and outputs <= config.outputs.keys():
            if role == ENGINE and not users_of(config, repository):
                return None
            return role
    return None


def users_of(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> Sequence[ModelConfig]:
    """Return the models of *repository* that call the engine *config*: ensembles, and models that name it."""
    return [other for other in repository.values() if other.name != config.name and _uses(other, config.name)]


def _uses(user: ModelConfig, name: str) -> bool:
    if user.steps:
        return any(step.model == name for step in user.steps)
    if any(user.parameter(key) == name for key in _CALLS):
        return True
    if name == _ENGINE_OF_SPEECH and _speaks_with_engine(user):
        return True
    # The name that a BLS falls back to.
    is_bls = {"text_input", "max_tokens"} <= user.inputs.keys() and user.parameter(_CALLS[0]) is None
    return is_bls and name == "tensorrt_llm"


def _speaks_with_engine(user: ModelConfig) -> bool:
    """Return whether *user* is the front of a language model with speech as its input or output."""
    synthesizes = {"reference_text", "target_text"} <= user.inputs.keys() and "llm_tokenizer_dir" in user.parameters
    hears = {"WAV", "TEXT_PREFIX"} <= user.inputs.keys() and "engine_dir" not in user.parameters
    return synthesizes or hears


class Claim(msgspec.Struct, frozen=True):
    """Which adapter takes a model, and why."""

    adapter: type[Adapter]
    reason: str


@cache
def third_party_adapters(path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Return the adapters of other packages on the import path *path*. To look through all packages takes long."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP))


def _load(name: str, points: Collection[EntryPoint]) -> type[Adapter]:
    """Return the adapter class of the name *name*. Raises :class:`ConfigurationError`, also if two packages have it."""
    values = ", ".join(point.value for point in points)
    if len(points) > 1:
        raise ConfigurationError(f"The adapter name '{name}' is taken twice ({values}).")
    (point,) = points
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"The adapter '{name}' ({values}) cannot be loaded: {error}.") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Adapter)):
        raise ConfigurationError(f"The adapter '{name}' is not a subclass of triton_openai.adapters.Adapter.")
    return loaded


class Registry:
    """
    All adapters, loaded once: the built-in ones, and those of other packages under an entry point group.

    Those of other packages are asked first: the operator has installed them on purpose.
    """

    def __init__(self) -> None:
        points = {name: {EntryPoint(name, value, ENTRY_POINT_GROUP)} for name, value in BUILT_IN.items()}
        for point in third_party_adapters(tuple(sys.path)):
            points.setdefault(point.name, set()).add(point)
        #: By name, in the order in which they are asked.
        self.adapters = {name: _load(name, points[name]) for name in sorted(points, key=BUILT_IN.__contains__)}

    def claim(self, config: ModelConfig) -> Claim | None:
        """Return the first adapter that claims the model."""
        for adapter in self.adapters.values():
            try:
                reason = adapter.matches(config)
            except Exception:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
                _log.exception("an adapter failed to look at a model", adapter=adapter.name, model=config.name)
                continue
            if reason is not None:
                return Claim(adapter, reason)
        return None

    def adapter_named(self, name: str) -> Claim:
        """Return the adapter that the settings ask for by name. Raises :class:`ConfigurationError`."""
        if name not in self.adapters:
            raise ConfigurationError(f"There is no adapter '{name}'. Known adapters: {', '.join(self.adapters)}.")
        return Claim(self.adapters[name], "set in the configuration")
