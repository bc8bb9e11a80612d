"""
Finds adapters: the built-in ones in one literal table, a third party's under an entry point group, both through
:func:`load`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

import msgspec
import structlog

from triton_openai.adapters._common.base import Adapter
from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import ModelConfig

ENGINE = "engine of a TensorRT-LLM model"
_ROLES: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = (
    ("preprocessing of a TensorRT-LLM model", frozenset({"QUERY", "REQUEST_OUTPUT_LEN"}), frozenset()),
    ("postprocessing of a TensorRT-LLM model", frozenset({"TOKENS_BATCH"}), frozenset()),
    (ENGINE, frozenset({"input_lengths", "request_output_len"}), frozenset({"output_ids"})),
    ("encoders of a multimodal TensorRT-LLM model", frozenset(), frozenset({"OUT_PROMPT_EMBEDDING_TABLE"})),
)
# Parameters with which a model names another that it calls.
_CALLS = (
    "tensorrt_llm_model_name",
    "tensorrt_llm_draft_model_name",
    "context_model_name",
    "generation_model_name",
)


def helper_role(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> str | None:
    """
    Return what the model does for others, or ``None`` if it is none of the known helpers.

    An engine that no other model of *repository* uses is no helper: it can be served itself.
    """
    for role, inputs, outputs in _ROLES:
        if inputs <= config.inputs.keys() and outputs <= config.outputs.keys():
            return None if role == ENGINE and not users_of(config, repository) else role
    return None


def users_of(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> Sequence[ModelConfig]:
    """Return the models of *repository* that call the engine *config*: ensembles, and models that name it."""
    return [other for other in repository.values() if other.name != config.name and _uses(other, config.name)]


def _uses(user: ModelConfig, name: str) -> bool:
    if user.steps:
        return any(step.model == name for step in user.steps)
    if any(user.parameter(key) == name for key in _CALLS):
        return True
    # The name that a BLS falls back to.
    is_bls = {"text_input", "max_tokens"} <= user.inputs.keys() and user.parameter(_CALLS[0]) is None
    return is_bls and name == "tensorrt_llm"


_log = structlog.get_logger(__name__)

ENTRY_POINT_GROUP = "triton_openai.adapters"

# In the order in which they are asked; a class is imported when it is first needed.
BUILT_IN: Mapping[str, str] = {
    "vllm": "triton_openai.adapters.vllm:Vllm",
    "trtllm-ensemble": "triton_openai.adapters.trtllm_ensemble:TrtllmEnsemble",
    "trtllm": "triton_openai.adapters.trtllm:Trtllm",
    "trtllm-llmapi": "triton_openai.adapters.trtllm_llmapi:TrtllmLlmapi",
    "trtllm-bls": "triton_openai.adapters.trtllm_bls:TrtllmBls",
    "embeddings": "triton_openai.adapters.embeddings:Embeddings",
    "cross-encoder": "triton_openai.adapters.cross_encoder:CrossEncoder",
}


class Claim(msgspec.Struct, frozen=True):
    """Which adapter takes a model, and why."""

    adapter: type[Adapter]
    reason: str


def _third_party() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in BUILT_IN or (point.name in found and found[point.name].value != point.value):
            raise ConfigurationError(
                f"The adapter name '{point.name}' is taken twice ({point.value}). Known adapters: {', '.join(names())}."
            )
        found[point.name] = point
    return found


def names() -> list[str]:
    """Return the names of all adapters, built-in ones first."""
    third_party = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - BUILT_IN.keys()
    return [*BUILT_IN, *sorted(third_party)]


def load(name: str) -> type[Adapter]:
    """Return the adapter class called *name*. Raises :class:`ConfigurationError` listing the known names."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        loaded = getattr(importlib.import_module(module), attribute)
    else:
        point = _third_party().get(name)
        if point is None:
            raise ConfigurationError(f"There is no adapter '{name}'. Known adapters: {', '.join(names())}.")
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"The adapter '{name}' ({point.value}) cannot be loaded: {error}.") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Adapter)):
        raise ConfigurationError(f"The adapter '{name}' is not a subclass of triton_openai.adapters.Adapter.")
    return loaded


class Registry:
    """All adapters, loaded once. A third party's are asked first: whoever installs one means it."""

    def __init__(self) -> None:
        ordered = [name for name in names() if name not in BUILT_IN] + list(BUILT_IN)
        self._adapters = {name: load(name) for name in ordered}

    def claim(self, config: ModelConfig) -> Claim | None:
        """Return the first adapter that claims the model."""
        for adapter in self._adapters.values():
            try:
                reason = adapter.matches(config)
            except Exception:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
                _log.exception("an adapter failed to look at a model", adapter=adapter.name, model=config.name)
                continue
            if reason is not None:
                return Claim(adapter, reason)
        return None

    def named(self, name: str) -> Claim:
        """Return the adapter that the settings ask for by name. Raises :class:`ConfigurationError`."""
        adapter = self._adapters.get(name) or load(name)
        return Claim(adapter, "set in the configuration")
