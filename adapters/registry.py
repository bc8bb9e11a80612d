"""
Finds adapters: the built-in ones in one literal table, a third party's under an entry point group, both through
:func:`load`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

import msgspec
import structlog

from triton_openai.adapters.base import Adapter
from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import ModelConfig

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
        raise ConfigurationError(f"The adapter '{name}' is not a subclass of triton_openai.adapters.base.Adapter.")
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
