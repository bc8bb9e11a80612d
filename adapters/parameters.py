"""
The parameter table of an adapter: OpenAI's name on the left, what the model declares on the right.

A table is data: :func:`bind` resolves it against a model's config once, encoding walks the bound rows, `inspect` and
the README print them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.generation import Sampling
from triton_openai.triton.tensors import INTEGER_RANGES, ModelConfig


class Rule(str, enum.Enum):
    """What happens to a parameter on a model."""

    MAPPED = "mapped"
    """Sent to the backend."""
    PROXY = "done here"
    """Done by this service, exactly as the backend would."""
    IGNORED = "ignored"
    """Accepted without effect, because it cannot change the answer."""
    REFUSED = "refused"
    """A request that uses it is refused with 400 and the parameter's name."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """
    One row: the *name* of a :class:`Sampling` field, the inputs (or JSON keys) that can carry it in order of
    preference, and what to do when the model declares none of them. *why* tells a client whose request is refused what
    can be done about it.
    """

    name: str
    inputs: tuple[str, ...] = ()
    otherwise: Rule = Rule.REFUSED
    note: str = ""
    why: str = ""
    # Whether the input has to hold negative numbers.
    signed: bool = False


class BoundParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A row bound to a model: its *target* is an input or a key, ``None`` unless the rule is :attr:`Rule.MAPPED`."""

    name: str
    rule: Rule
    target: str | None = None
    datatype: str | None = None
    note: str = ""
    why: str = ""


def bind(table: Sequence[Parameter], config: ModelConfig) -> tuple[BoundParameter, ...]:
    """Resolve *table* against the inputs that *config* declares."""
    bound = []
    for parameter in table:
        target = next((name for name in parameter.inputs if _fits(parameter, config, name)), None)
        if target is None:
            bound.append(
                BoundParameter(name=parameter.name, rule=parameter.otherwise, note=parameter.note, why=parameter.why)
            )
        else:
            datatype = config.inputs[target].datatype
            bound.append(
                BoundParameter(
                    name=parameter.name, rule=Rule.MAPPED, target=target, datatype=datatype, note=parameter.note
                )
            )
    return tuple(bound)


def refused(name: str, why: str = "") -> BoundParameter:
    """Return the row of a parameter that the model cannot honour, and *why*."""
    return BoundParameter(name=name, rule=Rule.REFUSED, why=why)


def _fits(parameter: Parameter, config: ModelConfig, name: str) -> bool:
    spec = config.inputs.get(name)
    return spec is not None and not (parameter.signed and spec.datatype.startswith("UINT"))


def values_of(parameter: BoundParameter, sampling: Sampling) -> Sequence[Any]:
    """
    Return the flat values of *parameter* in a request, empty when it is not used.

    Raises :class:`InvalidRequest` with the parameter's name for a number that the input's dtype cannot hold.
    """
    value = getattr(sampling, parameter.name)
    if value is None or value == ():
        return ()
    if isinstance(value, tuple):
        return value
    check_range(parameter.name, value, parameter.datatype)
    return (value,)


def check_range(name: str, value: Any, datatype: str | None) -> None:
    """Raise :class:`InvalidRequest` when *value* does not fit *datatype*: nothing is wrapped or clamped."""
    limits = INTEGER_RANGES.get(datatype or "")
    if limits is not None and not limits[0] <= value <= limits[1]:
        raise InvalidRequest(
            f"'{name}' must be between {limits[0]} and {limits[1]} for this model, got {value}.",
            param=name,
            code="integer_above_max_value" if value > limits[1] else "integer_below_min_value",
        )
    if datatype in ("FP32", "FP16") and (not math.isfinite(value) or abs(value) > _MAX_FLOAT[datatype]):
        raise InvalidRequest(f"'{name}' is out of range for this model, got {value}.", param=name)


_MAX_FLOAT: Mapping[str, float] = {"FP32": 3.4028234e38, "FP16": 65504.0}
