"""
config.pbtxt files of the stand-ins, made from the contracts of the real backends.

``contracts.json`` holds the tensors as the backends declare them, one string each: ``name[?] TYPE [dims] [r] [g] [l]``
(``?`` optional, ``r`` reshaped to a scalar per row, ``g`` ragged, ``l`` with a file of labels), the wiring of the
ensembles and the names of the parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

_TENSOR = re.compile(r"(?P<name>\w+)(?P<optional>\??) (?P<type>\w+) \[(?P<dims>[-\d,]*)\](?P<marks>( [rgl])*)")


@dataclass(frozen=True)
class Contract:
    """The tensors of one model, the names of its parameters and, for an ensemble, its steps."""

    inputs: list[str]
    outputs: list[str]
    parameters: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


def contracts() -> dict[str, Contract]:
    """Return the contracts that come with the package, by name."""
    data = json.loads(files("triton_openai.demo").joinpath("contracts.json").read_text(encoding="utf-8"))
    return {name: Contract(**entry) for name, entry in data.items()}


def render(
    name: str,
    contract: Contract,
    *,
    backend: str = "",
    max_batch_size: int = 0,
    decoupled: bool | None = None,
    instances: int = 0,
    dynamic_batching: bool = False,
    priority_levels: int = 0,
    parameters: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> str:
    """
    Return the text of a config.pbtxt.

    The contract's parameters that *parameters* lacks are empty, as in an installed repository. *renamed* gives other
    names to the models of an ensemble's steps.
    """
    lines = [f'name: "{name}"', 'platform: "ensemble"' if contract.steps else f'backend: "{backend}"']
    lines.append(f"max_batch_size: {max_batch_size}")
    if decoupled is not None:
        lines.append(f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}")
    if dynamic_batching:
        levels = f"priority_levels: {priority_levels} default_priority_level: {priority_levels}"
        lines.append(f"dynamic_batching {{ {levels if priority_levels else ''} }}")
    lines += [_tensor("input", text) for text in contract.inputs]
    lines += [_tensor("output", text) for text in contract.outputs]
    if contract.steps:
        lines.append("ensemble_scheduling {")
        lines += [_step(step, renamed or {}) for step in contract.steps]
        lines.append("}")
    values = dict(parameters or {})
    for key in [*contract.parameters, *(key for key in values if key not in contract.parameters)]:
        value = json.dumps(values.get(key, ""))
        lines.append(f'parameters {{ key: "{key}" value: {{ string_value: {value} }} }}')
    if instances:
        lines.append(f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]")
    return "\n".join(lines) + "\n"


def _tensor(side: str, text: str) -> str:
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise ValueError(f"not a tensor: {text!r}")
    parts = [f'name: "{match["name"]}"', f"data_type: TYPE_{match['type']}", f"dims: [ {match['dims']} ]"]
    if "r" in match["marks"]:
        parts.append("reshape: { shape: [ ] }")
    if "g" in match["marks"]:
        parts.append("allow_ragged_batch: true")
    if "l" in match["marks"]:
        parts.append('label_filename: "labels.txt"')
    if match["optional"]:
        parts.append("optional: true")
    return f"{side} {{ {' '.join(parts)} }}"


def _step(step: Mapping[str, Any], renamed: Mapping[str, str]) -> str:
    model = step["model_name"]
    lines = [f'  step {{ model_name: "{renamed.get(model, model)}" model_version: -1']
    lines += [f'    input_map {{ key: "{key}" value: "{value}" }}' for key, value in step["input_map"].items()]
    lines += [f'    output_map {{ key: "{key}" value: "{value}" }}' for key, value in step["output_map"].items()]
    return "\n".join([*lines, "  }"])
