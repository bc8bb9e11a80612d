"""Reads a model configuration from the JSON of ``GET /v2/models/M/config``."""

from __future__ import annotations

import msgspec

from triton_openai.errors import UpstreamError
from triton_openai.triton.tensors import EnsembleStep, ModelConfig, TensorSpec


class _Io(msgspec.Struct, frozen=True):
    name: str
    data_type: str = ""
    dims: list[int | str] = []
    optional: bool = False


class _Policy(msgspec.Struct, frozen=True):
    decoupled: bool = False


class _Value(msgspec.Struct, frozen=True):
    string_value: str = ""


class _Step(msgspec.Struct, frozen=True):
    model_name: str
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class _Ensemble(msgspec.Struct, frozen=True):
    step: list[_Step] = []


class _Batching(msgspec.Struct, frozen=True):
    priority_levels: int | str = 0


class _Config(msgspec.Struct, frozen=True):
    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    input: list[_Io] = []
    output: list[_Io] = []
    parameters: dict[str, _Value] = {}
    model_transaction_policy: _Policy = _Policy()
    ensemble_scheduling: _Ensemble = _Ensemble()
    dynamic_batching: _Batching = _Batching()


_decoder = msgspec.json.Decoder(_Config)


def datatype(data_type: str) -> str:
    """Return the protocol's name of a config's data type: ``TYPE_STRING`` is BYTES on the wire."""
    name = data_type.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _specs(items: list[_Io]) -> dict[str, TensorSpec]:
    return {
        item.name: TensorSpec(
            name=item.name,
            datatype=datatype(item.data_type),
            # protobuf's JSON form writes int64 as text; Triton's own writes numbers: accept both.
            dims=tuple(int(dim) for dim in item.dims),
            optional=item.optional,
        )
        for item in items
    }


def parse_model_config(data: bytes) -> ModelConfig:
    """Return the configuration; raises :class:`UpstreamError` when *data* is not one."""
    try:
        config = _decoder.decode(data)
        return ModelConfig(
            name=config.name,
            backend=config.backend,
            platform=config.platform,
            max_batch_size=config.max_batch_size,
            decoupled=config.model_transaction_policy.decoupled,
            inputs=_specs(config.input),
            outputs=_specs(config.output),
            parameters={key: value.string_value for key, value in config.parameters.items()},
            steps=tuple(
                EnsembleStep(model=step.model_name, input_map=step.input_map, output_map=step.output_map)
                for step in config.ensemble_scheduling.step
            ),
            # An uint64: text in protobuf's JSON form.
            priority_levels=int(config.dynamic_batching.priority_levels),
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise UpstreamError("Triton sent a model configuration that cannot be read.", detail=str(error)) from error
