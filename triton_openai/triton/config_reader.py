"""Reads the configuration of a model from the JSON form of a ``ModelConfig`` message (``model_config.proto``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.errors import UpstreamError
from triton_openai.triton.tensors import ModelConfig


def read_model_config(config: Any, model: str) -> ModelConfig:
    """
    Return the configuration of *model* in the JSON form of a ``ModelConfig`` message.

    Raises :class:`UpstreamError`, also for the configuration of another model.
    """
    try:
        parameters = config.get("parameters", {})
        steps = config.get("ensemble_scheduling", {}).get("step", ())
        fields = {
            **config,
            "decoupled": config.get("model_transaction_policy", {}).get("decoupled", False),
            "inputs": _specs(config.get("input", ())),
            "outputs": _specs(config.get("output", ())),
            "parameters": {name: value.get("string_value", "") for name, value in parameters.items()},
            "steps": [{"input_map": {}, "output_map": {}, **step, "model": step["model_name"]} for step in steps],
            "priority_levels": config.get("dynamic_batching", {}).get("priority_levels", 0),
            "sequences": "sequence_batching" in config,
            "sequence_idle": _idle_seconds(config.get("sequence_batching", {})),
        }
        # Not strict: protobuf's JSON form writes int64 as text, Triton's own writes numbers.
        read = msgspec.convert(fields, ModelConfig, strict=False)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UpstreamError("Triton sent a model configuration that cannot be read.", detail=repr(error)) from error
    if read.name != model:
        raise UpstreamError("Triton sent the configuration of another model.", detail=f"asked for {model!r}")
    return read


def _idle_seconds(batching: Mapping[str, Any]) -> float:
    """Return the seconds after which a sequence is idle. Source: ``ModelSequenceBatching``, whose default is 1 s."""
    return (int(batching.get("max_sequence_idle_microseconds", 0)) or 1_000_000) / 1_000_000


def _specs(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {item["name"]: {"dims": (), **item, "datatype": _datatype(item.get("data_type", ""))} for item in items}


def _datatype(name: str) -> str:
    if name == "TYPE_STRING":
        return "BYTES"
    return name.removeprefix("TYPE_")
