"""Checks what an operator's settings say of a model's tensors (:class:`Interface`) against the model's config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import INTEGER_RANGES, ModelConfig, TensorSpec

#: The kind of values that an input or an output has.
Kind = Literal["text", "flag", "integer", "number"]
_WORDS: Mapping[Kind, str] = {"text": "BYTES", "flag": "BOOL", "integer": "an integer type", "number": "FP32 or FP16"}
_FLOATS = ("FP32", "FP16", "FP64")


def fits(kind: Kind, datatype: str) -> bool:
    """Return whether a tensor of *datatype* holds values of *kind*."""
    if kind == "text":
        return datatype == "BYTES"
    if kind == "flag":
        return datatype == "BOOL"
    return datatype in _FLOATS or (kind == "integer" and datatype in INTEGER_RANGES)


def check_named(
    config: ModelConfig,
    setting: Literal["inputs", "outputs"],
    named: Mapping[str, str],
    kinds: Mapping[str, Kind],
    *,
    required: str,
) -> None:
    """
    Check the tensors that *setting* names; *kinds* are the uses that it may name, *required* the one that it must.

    Raises :class:`ConfigurationError`.
    """
    specs = config.inputs if setting == "inputs" else config.outputs
    label = f"The settings of the model '{config.name}'"
    for use, name in named.items():
        if use not in kinds:
            raise ConfigurationError(f"{label} name '{setting}.{use}', which is unknown{_similar(use, kinds)}.")
        if name not in specs:
            raise ConfigurationError(
                f"{label} name '{name}' under '{setting}', which the model does not declare{_similar(name, specs)}."
            )
        if not fits(kinds[use], specs[name].datatype):
            raise ConfigurationError(
                f"{label} name '{name}' as '{setting}.{use}', which takes {_WORDS[kinds[use]]}; the model declares it "
                f"as {specs[name].datatype}."
            )
    if required not in named:
        raise ConfigurationError(f"{label} do not name '{setting}.{required}'.")


def constants(config: ModelConfig, given: Mapping[str, Any], *, filled: Collection[str]) -> dict[str, list[Any]]:
    """
    Return the values of the inputs that every request gets: the operator's, as lists.

    *filled* are the inputs that every request fills by itself. Raises :class:`ConfigurationError` for a value that its
    input cannot hold, and for a required input that has none.
    """
    values: dict[str, list[Any]] = {}
    for name, value in given.items():
        if name not in config.inputs:
            raise ConfigurationError(
                f"The settings of the model '{config.name}' name '{name}' under 'constants', which the model does not "
                f"declare{_similar(name, config.inputs)}."
            )
        values[name] = value if isinstance(value, list) else [value]
        spec = config.inputs[name]
        if not all(_holds(spec, item) for item in values[name]):
            raise ConfigurationError(
                f"The input '{name}' of the model '{config.name}' is {spec.datatype} and cannot be {value!r}."
            )
    for name, spec in config.inputs.items():
        if not spec.optional and name not in filled and name not in values:
            raise ConfigurationError(
                f"The model '{config.name}' requires the input '{name}', which not every request fills: give it a "
                "value under 'constants'."
            )
    return values


def _holds(spec: TensorSpec, value: Any) -> bool:
    if spec.datatype == "BYTES":
        return isinstance(value, str)
    if spec.datatype == "BOOL" or isinstance(value, bool):
        return spec.datatype == "BOOL" and isinstance(value, bool)
    if spec.datatype in INTEGER_RANGES:
        low, high = INTEGER_RANGES[spec.datatype]
        return isinstance(value, int) and low <= value <= high
    return spec.datatype in _FLOATS and isinstance(value, int | float)


def _similar(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f" (known are {', '.join(known)})"
