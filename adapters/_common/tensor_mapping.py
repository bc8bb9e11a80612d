"""
Tensors whose names follow no standard: finds and fills a model's inputs, and checks an operator's description of them
(:class:`TensorMapping`) against the model's config.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from triton_openai.adapters._common.base import Adapter
from triton_openai.errors import ConfigurationError, ContextLengthExceeded
from triton_openai.generation import TensorMapping
from triton_openai.jobs import TokenPair
from triton_openai.triton.tensors import INTEGER_RANGES, InferRequest, ModelConfig, Tensor, TensorSpec

FLOATS = ("FP32", "FP16", "FP64")
_INTEGERS = ("INT64", "INT32")
#: The inputs of an exported Hugging Face model.
IDS = "input_ids"
MASK = "attention_mask"
SEGMENTS = "token_type_ids"
#: The input of a model that takes texts.
TEXT = "text"


class DescribedAdapter(Adapter):
    """Base of the adapters whose models' tensors the operator may describe. A subclass takes them up in `_bind`."""

    def __init__(
        self, config: ModelConfig, repository: Mapping[str, ModelConfig], mapping: TensorMapping | None = None
    ) -> None:
        super().__init__(config, repository)
        self._bind(mapping)

    def _bind(self, mapping: TensorMapping | None) -> None:
        """Use the tensors of *mapping*, or those that the config shows by itself."""
        raise NotImplementedError

    @classmethod
    def described(
        cls, config: ModelConfig, repository: Mapping[str, ModelConfig], mapping: TensorMapping | None
    ) -> Adapter:
        return cls(config, repository, mapping)

    def described_request(
        self, job_id: str, inputs: Sequence[Tensor], constants: Iterable[Tensor], outputs: Sequence[str]
    ) -> InferRequest:
        """Return the request with *inputs*, and those of *constants* of which the job has no value of its own."""
        names = {tensor.name for tensor in inputs}
        return self.request(
            job_id, [*inputs, *(constant for constant in constants if constant.name not in names)], outputs
        )


def text_or_id_inputs(config: ModelConfig, mapping: TensorMapping | None = None) -> Mapping[str, TensorSpec]:
    """
    Return the inputs by their uses: :data:`TEXT`, or those of :func:`id_inputs`; empty if the model requires others.

    *mapping* describes them where the config does not show them. Raises :class:`ConfigurationError`.
    """
    if mapping is None:
        text = _text_input(config)
        if text is not None:
            return {TEXT: text}
        return id_inputs(config)
    if IDS in mapping.inputs:
        kinds: Mapping[str, Kind] = {IDS: "integer", MASK: "integer", SEGMENTS: "integer"}
        return named_tensors(config, mapping, "inputs", kinds, required=IDS)
    return named_tensors(config, mapping, "inputs", {TEXT: "text"}, required=TEXT)


def _text_input(config: ModelConfig) -> TensorSpec | None:
    """Return the only required input if it is a BYTES input with one text in each row."""
    if len(config.required) != 1 or config.required[0].datatype != "BYTES":
        return None
    dims = config.required[0].dims
    if not config.batching and dims[:1] == (-1,):
        free = dims[1:]
    else:
        free = dims
    if all(dim in (1, -1) for dim in free):
        return config.required[0]
    return None


def text_tensor(config: ModelConfig, spec: TensorSpec, texts: Sequence[str]) -> Tensor:
    """Return the input *spec* with one text in each row."""
    ones = (1,) * (len(spec.dims) - (0 if config.batching else 1))
    return Tensor(spec.name, spec.datatype, (len(texts), *ones), texts)


def id_inputs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Return the inputs of an exported Hugging Face model; empty if the model requires other inputs."""
    # Optional ones are filled too.
    specs = {name: config.inputs[name] for name in (IDS, MASK, SEGMENTS) if name in config.inputs}
    required = {spec.name for spec in config.required}
    fit = all(spec.datatype in _INTEGERS and spec.dims == specs[IDS].dims for spec in specs.values() if IDS in specs)
    known = {IDS, MASK} <= required <= specs.keys()
    if known and fit and len(config.row_dims(specs[IDS])) == 1:
        return specs
    return {}


# Padded ids of a request that are never too many.
_FEW_IDS = 65_536


def id_batches(config: ModelConfig, spec: TensorSpec, lengths: Sequence[int], pad_id: int | None) -> Sequence[range]:
    """
    Return which sequences of token ids, of these *lengths*, share a request, as ranges of their indices.

    They are as many as the model batches: one where sequences can be of any length and not be padded. A batch ends
    before most of it would be padding, so that one long sequence among many short ones does not take gigabytes.
    """
    if pad_id is None and spec.dims[-1] < 0:
        max_rows = 1
    else:
        max_rows = config.batch_size(spec)
    batches = []
    first = 0
    max_length = 0
    total = 0
    for row, length in enumerate(lengths):
        max_length = max(max_length, length)
        total = total + length
        rows = row - first + 1
        if rows > 1 and (rows > max_rows or rows * max_length > max(_FEW_IDS, 2 * total)):
            batches.append(range(first, row))
            first = row
            max_length = length
            total = length
    return [*batches, range(first, len(lengths))]


def id_tensors(
    config: ModelConfig, specs: Mapping[str, TensorSpec], sequences: Sequence[TokenPair], pad_id: int | None
) -> Iterator[Tensor]:
    """
    Yield the inputs *specs* (see :func:`id_inputs`) with one of *sequences* in each row.

    Raises :class:`ContextLengthExceeded` for a sequence longer than the model's fixed length, and
    :class:`ConfigurationError` if padding is needed and *pad_id* is not known.
    """
    max_length = max(len(sequence.ids) for sequence in sequences)
    if specs[IDS].dims[-1] > 0:
        width = specs[IDS].dims[-1]
    else:
        width = max_length
    if max_length > width:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {width} tokens. However, the longest sequence of the request has "
            f"{max_length} tokens."
        )
    if pad_id is None and any(len(sequence.ids) < width for sequence in sequences):
        raise ConfigurationError(
            f"The model '{config.name}' takes sequences of {width} tokens, and its tokenizer has no pad token."
        )
    for use, spec in specs.items():
        values: list[int] = []
        for sequence in sequences:
            row = {IDS: sequence.ids, MASK: [1] * len(sequence.ids), SEGMENTS: sequence.segments}[use]
            if use == IDS:
                fill = pad_id or 0
            else:
                fill = 0
            values += [*row, *[fill] * (width - len(row))]
        yield Tensor(spec.name, spec.datatype, (len(sequences), width), values)


class RowsAdapter(DescribedAdapter):
    """Base of the adapters whose models take a text, or its token ids, in each row. `_bind` sets the fields."""

    #: Those of :func:`text_or_id_inputs`.
    inputs: Mapping[str, TensorSpec]
    #: Those of :func:`constants`.
    constants: Mapping[str, Sequence[Any]]
    #: The most rows of a request.
    batch: int

    def batches(self, rows: Sequence[Any], pad_id: int | None) -> Sequence[range]:
        """Return which of *rows*, texts or token ids, share a request, as ranges of their indices."""
        if self.capabilities.tokens and self.batch > 1:
            return id_batches(self.config, self.inputs[IDS], list(map(len, rows)), pad_id)
        count = len(rows)
        return [range(start, min(start + self.batch, count)) for start in range(0, count, self.batch)]

    def row_tensors(self, rows: Sequence[Any], pad_id: int | None) -> list[Tensor]:
        """Return the inputs of a request with *rows*. Raises as :func:`id_tensors`."""
        constant = constant_tensors(self.config, self.constants, len(rows))
        if self.capabilities.tokens:
            return [*id_tensors(self.config, self.inputs, [TokenPair(ids, ()) for ids in rows], pad_id), *constant]
        return [text_tensor(self.config, self.inputs[TEXT], rows), *constant]


#: The kind of values that an input or an output has.
Kind = Literal["text", "flag", "integer", "number", "code", "audio"]
_WORDS: Mapping[Kind, str] = {
    **{"text": "BYTES", "flag": "BOOL", "integer": "an integer type", "number": "FP32 or FP16"},
    **{"code": "BYTES or an integer type", "audio": "FP32, FP16, FP64, INT16, UINT8 or BYTES"},
}


def fits(kind: Kind, datatype: str) -> bool:
    """Return whether a tensor of *datatype* holds values of *kind*."""
    if kind == "text":
        return datatype == "BYTES"
    if kind == "flag":
        return datatype == "BOOL"
    if kind == "code":
        return datatype == "BYTES" or datatype in INTEGER_RANGES
    if kind == "audio":
        return datatype in (*FLOATS, "INT16", "UINT8", "BYTES")
    return datatype in FLOATS or (kind == "integer" and datatype in INTEGER_RANGES)


def named_tensors(
    config: ModelConfig,
    mapping: TensorMapping,
    setting: Literal["inputs", "outputs"],
    kinds: Mapping[str, Kind],
    *,
    required: str,
) -> dict[str, TensorSpec]:
    """
    Return the tensors that a *setting* of *mapping* names, by their uses.

    *kinds* are the uses that it may name, *required* the one that it must. Raises :class:`ConfigurationError`.
    """
    named: Mapping[str, str] = getattr(mapping, setting)
    specs: Mapping[str, TensorSpec] = getattr(config, setting)
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
    return {use: specs[name] for use, name in named.items()}


def listed_uses(mapping: TensorMapping) -> str:
    """Return the tensors of *mapping* with their uses, for a person to read."""
    uses = {**mapping.inputs, **mapping.outputs}
    return ", ".join(f"{name} is {use}" for use, name in uses.items())


def constants(config: ModelConfig, mapping: TensorMapping | None, *, filled: Collection[str]) -> dict[str, list[Any]]:
    """
    Return the values of the inputs that every request gets: the operator's, as lists.

    *filled* are the inputs that every request fills by itself. Raises :class:`ConfigurationError` for a value that its
    input cannot hold, and for a required input that has none.
    """
    values: dict[str, list[Any]] = {}
    for name, value in (mapping.constants if mapping is not None else {}).items():
        if name not in config.inputs:
            raise ConfigurationError(
                f"The settings of the model '{config.name}' name '{name}' under 'constants', which the model does not "
                f"declare{_similar(name, config.inputs)}."
            )
        if isinstance(value, list):
            values[name] = value
        else:
            values[name] = [value]
        spec = config.inputs[name]
        if not all(_holds(spec, item) for item in values[name]):
            raise ConfigurationError(
                f"The input '{name}' of the model '{config.name}' is {spec.datatype} and cannot be {value!r}."
            )
    for spec in config.required:
        if spec.name not in filled and spec.name not in values:
            raise ConfigurationError(
                f"The model '{config.name}' requires the input '{spec.name}', which not every request fills: give it a "
                "value under 'constants'."
            )
    return values


def constant_tensors(config: ModelConfig, values: Mapping[str, Sequence[Any]], rows: int) -> Iterator[Tensor]:
    """Yield the inputs in *values* (see :func:`constants`) for a request with *rows* rows."""
    for name, value in values.items():
        spec = config.inputs[name]
        shape = config.wire_shape(spec, len(value))
        if config.batching:
            yield Tensor(name, spec.datatype, (rows, *shape[1:]), [*value] * rows)
        else:
            yield Tensor(name, spec.datatype, shape, value)


def _holds(spec: TensorSpec, value: Any) -> bool:
    if spec.datatype == "BYTES":
        return isinstance(value, str)
    if spec.datatype == "BOOL" or isinstance(value, bool):
        return spec.datatype == "BOOL" and isinstance(value, bool)
    if spec.datatype in INTEGER_RANGES:
        low, high = INTEGER_RANGES[spec.datatype]
        return isinstance(value, int) and low <= value <= high
    return spec.datatype in FLOATS and isinstance(value, int | float)


def _similar(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f" (known are {', '.join(known)})"
