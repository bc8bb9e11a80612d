"""
Tensors, model configurations, inference requests and responses: the types that both transports and every adapter use.

Source of the facts: the KServe v2 protocol with Triton's binary and generate extensions, and ``model_config.proto``.
Raw contents are little-endian and row-major; a BYTES element is a 4-byte length and its bytes; BOOL is one byte.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, cast

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.errors import InvalidAnswer, UpstreamError

#: Raw contents: a view where there are more bytes than LARGE, because to copy them would hold the event loop.
Buffer: TypeAlias = bytes | memoryview
LARGE = 1 << 20
# Rows in a request to a model that takes any number of them.
_FREE_BATCH = 64
#: Item codes of arrays, which have exactly the protocol's sizes on every platform we serve. They need no NumPy.
ARRAY_CODES = {
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
#: The bytes of an element, of every type but BYTES.
ELEMENT_SIZES = {**{name: array(code).itemsize for name, code in ARRAY_CODES.items()}, "BOOL": 1, "FP16": 2, "BF16": 2}
#: The most bytes of an answer whose size the model's configuration leaves open: texts, and dimensions of any length.
MAX_OPEN_ANSWER = 64 * 1024 * 1024
# What every answer may have: a name and a shape take bytes too, and not every model is as exact as its configuration.
_MIN_ANSWER = 1024 * 1024
#: The largest number of tokens that a backend can report.
MAX_COUNT = 2**31 - 1
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
# Of a number in an object of Python.
_NUMBER_SIZE = 8
# Of all types of integers.
_LEAST = INTEGER_RANGES["INT64"][0]
_MOST = INTEGER_RANGES["UINT64"][1]
_LENGTH = struct.Struct("<I")
# Names of parameters of models that adapters have read: what distinguishes two configs of a model. Others are often
# particular to a machine, such as gpu_device_ids.
_PARAMETERS_READ: set[str] = set()


class TensorSpec(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One declared input or output."""

    name: str
    datatype: str
    #: Without the batch dimension; ``-1`` is a dynamic one.
    dims: tuple[Annotated[int, Meta(ge=-1, le=MAX_COUNT)], ...]
    optional: bool = False
    #: The file with the labels of its classes.
    label_filename: str = ""


class EnsembleStep(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One step of an ensemble: the model it calls, and the maps of tensor names (step's name to ensemble's name)."""

    model: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


class ModelConfig(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A model's configuration as Triton serves it. Adapters decide by nothing else."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    decoupled: bool = False
    inputs: Mapping[str, TensorSpec] = {}
    outputs: Mapping[str, TensorSpec] = {}
    parameters: Mapping[str, str] = {}
    steps: tuple[EnsembleStep, ...] = ()
    #: Those of the dynamic batcher's queue; 0 where it has none.
    priority_levels: int = 0
    #: Whether requests belong to sequences, whose state the backend keeps.
    sequences: bool = False
    #: That of the Triton that has the model ("2.53.0"), empty if unknown.
    server_version: str = ""

    @property
    def fingerprint(self) -> str:
        """The server's version and a hash of the configuration, for ``system_fingerprint``."""
        digest = hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:8]
        return "-".join(part for part in ("triton", self.server_version, digest) if part)

    @property
    def behaviour(self) -> ModelConfig:
        """The config without what cannot change an answer: parameters that no adapter reads, and where files lie."""
        read = {
            name: value.rpartition("/")[2] if value.startswith("/") else value
            for name, value in self.parameters.items()
            if name in _PARAMETERS_READ
        }
        return msgspec.structs.replace(self, parameters=read)

    @property
    def batching(self) -> bool:
        """Whether every tensor on the wire carries a leading batch dimension."""
        return self.max_batch_size > 0

    def parameter(self, name: str) -> str | None:
        """
        Return the value of a config parameter; ``None`` when it is missing, empty or an unfilled template (``${…}``).

        TensorRT-LLM ships configs as templates, and they are often deployed with parameters left unfilled.
        """
        _PARAMETERS_READ.add(name)
        value = self.parameters.get(name, "").strip()
        if not value or value.startswith("${"):
            return None
        return value

    @property
    def required(self) -> Sequence[TensorSpec]:
        """The inputs that every request needs."""
        return [spec for spec in self.inputs.values() if not spec.optional]

    def row_dims(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the dims of one row of *spec*: without batching, its first dim is the number of rows."""
        if self.batching:
            return spec.dims
        return spec.dims[1:]

    def batch_size(self, spec: TensorSpec) -> int:
        """Return how many rows of *spec* a request takes."""
        rows = self.max_batch_size or next(iter(spec.dims), 1)
        if rows < 0:
            return _FREE_BATCH
        return rows

    def max_answer(self, outputs: Iterable[str], rows: int) -> int:
        """Return how many bytes an answer with these *outputs* can have, for a request of so many *rows*."""
        fixed = 0
        is_open = False
        for name in outputs:
            spec = self.outputs[name]
            size = ELEMENT_SIZES.get(spec.datatype)
            if size is None or min(spec.dims, default=0) < 0:
                is_open = True
            else:
                fixed += size * math.prod(spec.dims) * (rows if self.batching else 1)
        return max(fixed, _MIN_ANSWER) + (MAX_OPEN_ANSWER if is_open else 0)

    def wire_shape(self, spec: TensorSpec, count: int) -> tuple[int, ...]:
        """
        Return the shape of *count* elements of *spec* for one request row, with a leading 1 for a batching model.

        The innermost dynamic dim takes all elements, which is also what the generate extension infers.
        """
        dims = [1 if dim < 0 else dim for dim in spec.dims]
        dynamic = [i for i, dim in enumerate(spec.dims) if dim < 0]
        if dynamic:
            dims[dynamic[-1]] = count
        if self.batching:
            return (1, *dims)
        return tuple(dims)


class Tensor(msgspec.Struct, gc=False, frozen=True):
    """An input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Flat (row-major). BYTES values are ``str`` (sent as UTF-8). ``bytes`` are the raw contents: a large matrix never
    #: becomes Python numbers.
    values: Sequence[Any]

    def raw(self) -> bytes:
        """Return the raw contents. Raises ``OverflowError`` or ``TypeError`` for values that do not fit."""
        if isinstance(self.values, bytes):
            return self.values
        if self.datatype == "BYTES":
            parts: list[bytes] = []
            for value in self.values:
                text = value.encode()
                parts += (_LENGTH.pack(len(text)), text)
            return b"".join(parts)
        if self.datatype == "BOOL":
            return bytes(map(bool, self.values))
        if self.datatype == "FP16":
            return struct.pack(f"<{len(self.values)}e", *self.values)
        numbers = array(ARRAY_CODES[self.datatype], self.values)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tobytes()


class InferRequest(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """An adapter's request to Triton."""

    model: str
    id: str
    inputs: tuple[Tensor, ...]
    #: The requested outputs. HTTP's generate extension ignores them and sends all.
    outputs: tuple[str, ...] = ()
    #: Whether the model is decoupled: it answers step by step, and the request can be cancelled in between.
    stream: bool = False
    #: Whether cancelling stops the backend; if not, a transport may read the rest and drop it.
    cancellable: bool = True
    #: Whether the generate extension's JSON can express the request and its answers.
    json_expressible: bool = True
    #: Whether the backend notices a cancellation only over gRPC, or earlier than over HTTP.
    prefers_grpc: bool = False
    #: For Triton's queues, 1 first and 0 for the default; the generate extension has none.
    priority: int = 0
    #: If set, the outputs are texts ``value:index:label``, as many of each row with the highest values.
    classification: int = 0
    #: Further parameters of Triton's protocol, such as those of a sequence.
    parameters: Mapping[str, bool | int | str] = {}
    #: The rest of its sequence: each is sent when the one before is answered, all to the same Triton. The last ends it.
    following: tuple[InferRequest, ...] = ()
    #: Whether its answers come over a carrier, with those of other requests; see ``triton/carrier.py``.
    carried: bool = False
    #: Of a carried request: whether tokens that come together are taken one by one.
    token_by_token: bool = False
    #: The parameter that JSON cannot express, if one prevents it.
    needed_for: str | None = None
    #: The bytes that an answer, or each of several, may have; a longer one is not read.
    max_answer: int = MAX_OPEN_ANSWER
    #: Sent as HTTP headers or gRPC metadata: names in lower case, values printable ASCII. Adapters do not set them.
    headers: Mapping[str, str] = {}

    @property
    def cost(self) -> float:
        """About how many microseconds it takes to encode it."""
        cost = 0.0
        for one in self.inputs:
            if isinstance(one.values, bytes):
                cost += offload.COPY * len(one.values)
            elif one.datatype == "BYTES":
                cost += offload.COPY * sum(map(len, one.values))
            else:
                cost += offload.BYTE * len(one.values)
        return cost


class InferResponse(Protocol):
    """
    One response. Absent outputs read as empty lists; values are flattened.

    What an answer holds is checked here, where it is read: each method raises :class:`InvalidAnswer` for an output
    of another type, length or shape than it should have.
    """

    @property
    def model(self) -> str:
        """The Triton model that answered."""

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        """
        Return the first text or number of each of several outputs, ``None`` of one that is absent or empty.

        From JSON it can be of any type: for the sake of speed, the caller checks it.
        """

    def texts(self, name: str) -> Sequence[str]:
        """Return a BYTES output as text (invalid UTF-8 becomes U+FFFD)."""

    def numbers(self, name: str) -> Sequence[float]:
        """Return a numeric output; numbers that some backends send as text are numbers, too."""

    def integers(self, name: str, *, least: int = 0, most: int = MAX_COUNT) -> Sequence[int]:
        """Return an output of integers from *least* to *most*."""

    def vectors(self, name: str) -> Sequence[bytes]:
        """Return a floating output of shape ``[n, d]`` (or ``[d]``) as *n* little-endian float32 rows."""

    def tensor(self, name: str) -> OutputTensor | None:
        """Return an output as it came; ``None`` where it is absent, and from JSON, which has no shapes."""

    @property
    def size(self) -> int:
        """About how many bytes its outputs have."""

    def invalid(self, problem: str, *, detail: str | None = None) -> InvalidAnswer:
        """Return the error for an answer of which *problem* is true."""


class _Checked:
    """What reads numbers in the same way, wherever they come from."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def model(self) -> str: ...

    def numbers(self, name: str) -> Sequence[float]:
        raise NotImplementedError

    def integers(self, name: str, *, least: int = 0, most: int = MAX_COUNT) -> Sequence[int]:
        values = self.numbers(name)
        if isinstance(values, array) and values.typecode not in "fd":
            whole: Sequence[int] = cast(Sequence[int], values)
        else:
            whole = [self._integer(name, value) for value in values]
        if min(whole, default=least) < least or max(whole, default=most) > most:
            raise self.invalid(f"the output '{name}' has a number below {least} or above {most}")
        return whole

    def _integer(self, name: str, value: float) -> int:
        # Neither NaN nor infinity is a whole number.
        if not float(value).is_integer():
            raise self.invalid(f"the output '{name}' has a number that is not whole")
        return int(value)

    def _number(self, name: str, text: str) -> float:
        """Return the number that *text* is."""
        try:
            value = float(text)
        except ValueError as error:
            raise self.invalid(f"the output '{name}' has a text where a number is needed") from error
        if value.is_integer() and _LEAST <= value <= _MOST and text.strip("+-").isdecimal():
            # Of the larger ones, a float has not all digits.
            return int(text)
        return value

    def _row(self, name: str, values: Sequence[float]) -> bytes:
        """Return *values* as float32."""
        try:
            return array("f", values).tobytes()
        except OverflowError as error:
            raise self.invalid(f"the output '{name}' has a number that is too large") from error

    def invalid(self, problem: str, *, detail: str | None = None) -> InvalidAnswer:
        return InvalidAnswer(problem, model=self.model, detail=detail)


class JsonOutputs(_Checked):
    """Reads ``values`` of HTTP's generate extension: tensors flattened to lists, a single element to a scalar."""

    __slots__ = ()

    def value(self, name: str) -> Any:
        """Return an output, ``None`` where it is absent."""
        raise NotImplementedError

    def _values(self, name: str) -> Sequence[Any]:
        value = self.value(name)
        if value is None:
            return ()
        if isinstance(value, list):
            return value
        return (value,)

    def texts(self, name: str) -> Sequence[str]:
        values = self._values(name)
        if any(type(value) is not str for value in values):
            raise self.invalid(f"the output '{name}' has something else where a text is needed")
        return values

    def numbers(self, name: str) -> Sequence[float]:
        values = self._values(name)
        kinds = set(map(type, values))
        if str in kinds:
            values = [self._number(name, value) if type(value) is str else value for value in values]
            kinds.discard(str)
        if not kinds <= {int, float, bool}:
            raise self.invalid(f"the output '{name}' has something else where a number is needed")
        if bool in kinds:
            values = [int(value) if type(value) is bool else value for value in values]
        if int in kinds and not all(_LEAST <= value <= _MOST for value in values if type(value) is int):
            raise self.invalid(f"the output '{name}' has a number that is too large")
        return values

    def integers(self, name: str, *, least: int = 0, most: int = MAX_COUNT) -> Sequence[int]:
        value = self.value(name)
        # Nearly all are a count that is alone.
        if type(value) is int and least <= value <= most:
            return (value,)
        return super().integers(name, least=least, most=most)

    def vectors(self, name: str) -> Sequence[bytes]:
        """Return the values as one float32 row (the generate extension does not carry shapes); none without values."""
        values = self.numbers(name)
        if values:
            return [self._row(name, values)]
        return []

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        return [next(iter(self._values(name)), None) for name in names]

    def tensor(self, name: str) -> OutputTensor | None:
        return None


class JsonResponse(JsonOutputs, msgspec.Struct, frozen=True):
    """A response of HTTP's generate extension."""

    values: Mapping[str, Any]
    model: str = ""

    def value(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def size(self) -> int:
        return json_size(self.values.values())


#: A token with its log probability: id, value, rank, and the likeliest ids there with their values.
Scored: TypeAlias = tuple[int, float, int | None, list[tuple[int, float]]]


class Delivery(msgspec.Struct, gc=False, array_like=True):
    """What a carrier brings for one of its streams. All but the tokens comes with the last one."""

    stream: int
    ids: list[int]
    finish: str | None = None
    #: The stop token that ended the answer.
    stop: int | str | None = None
    #: Tokens: of the prompt, those of them that came from the cache, of the answer.
    usage: tuple[int, int | None, int] | None = None
    logprobs: list[Scored] | None = None
    #: Why there is no answer.
    error: Any = None
    prompt_logprobs: list[Scored | None] | None = None


class CarriedResponse(JsonOutputs, msgspec.Struct, gc=False):
    """What a carrier brings for one of its streams, as a response of a model."""

    delivery: Delivery
    #: The model that answered.
    model: str = ""

    def value(self, name: str) -> Any:
        return getattr(self.delivery, name, None)

    @property
    def size(self) -> int:
        return _NUMBER_SIZE * len(self.delivery.ids)


def json_size(values: Iterable[Any]) -> int:
    """Return about how many bytes *values* have: texts, lists of numbers or texts, and numbers."""
    size = 0
    for value in values:
        if isinstance(value, list):
            size += sum([len(item) if type(item) is str else _NUMBER_SIZE for item in value])
        else:
            size += len(value) if isinstance(value, str) else _NUMBER_SIZE
    return size


class OutputTensor(msgspec.Struct, frozen=True):
    """An output with its raw contents."""

    datatype: str
    shape: tuple[int, ...]
    data: Buffer


class Layout:
    """
    The outputs of a response of *model* with raw tensors: name, datatype and shape of each.

    The responses of a stream share it.
    """

    def __init__(self, outputs: Iterable[tuple[str, str, tuple[int, ...]]], model: str = "") -> None:
        self.outputs = tuple(outputs)
        self.model = model
        self._readers: dict[tuple[str, ...], Sequence[tuple[int, Callable[[Buffer], Any]]]] = {}

    def readers(self, names: tuple[str, ...]) -> Sequence[tuple[int, Callable[[Buffer], Any]]]:
        """Return the place of each of *names* among the outputs, -1 without one, and what reads its first value."""
        readers = self._readers.get(names)
        if readers is None:
            places = {
                name: (place, _reader(name, datatype, self.model))
                for place, (name, datatype, _) in enumerate(self.outputs)
            }
            readers = self._readers[names] = [places.get(name, (-1, bytes)) for name in names]
        return readers


class BinaryResponse(_Checked):
    """
    A response with raw tensors: gRPC's, and HTTP's with the binary extension.

    *contents* has the bytes of each output of *layout*. Most outputs of a step are never asked for.
    """

    __slots__ = ("_contents", "_layout")

    def __init__(self, layout: Layout, contents: Sequence[Buffer]) -> None:
        self._layout = layout
        self._contents = contents

    @property
    def model(self) -> str:
        return self._layout.model

    @property
    def size(self) -> int:
        return sum(map(len, self._contents))

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        contents = self._contents
        return [read(contents[place]) if place >= 0 else None for place, read in self._layout.readers(names)]

    def tensor(self, name: str) -> OutputTensor | None:
        for (found, datatype, shape), data in zip(self._layout.outputs, self._contents, strict=True):
            if found == name:
                self._check_size(name, datatype, shape, len(data))
                return OutputTensor(datatype, shape, data)
        return None

    def _check_size(self, name: str, datatype: str, shape: tuple[int, ...], size: int) -> None:
        """Raise :class:`InvalidAnswer` for contents of *size* bytes that do not fit *shape*."""
        width = ELEMENT_SIZES.get(datatype)
        if width is None and datatype != "BYTES":
            raise self.invalid(f"the output '{name}' has a type that the protocol does not have")
        if min(shape, default=0) < 0 or (width is not None and width * math.prod(shape) != size):
            raise self.invalid(f"the contents of the output '{name}' do not fit its shape")

    def texts(self, name: str) -> Sequence[str]:
        output = self.tensor(name)
        if output is None:
            return ()
        if output.datatype != "BYTES":
            raise self.invalid(f"the output '{name}' has something else where a text is needed")
        data = output.data
        texts = []
        offset = 0
        while offset < len(data):
            end = offset + 4
            offset = end + int.from_bytes(data[offset:end], "little")
            if offset > len(data):
                raise self.invalid(f"the output '{name}' is cut off")
            texts.append(str(data[end:offset], "utf-8", "replace"))
        if len(texts) != math.prod(output.shape):
            raise self.invalid(f"the contents of the output '{name}' do not fit its shape")
        return texts

    def numbers(self, name: str) -> Sequence[float]:
        output = self.tensor(name)
        if output is None:
            return ()
        if output.datatype == "BYTES":
            return [self._number(name, text) for text in self.texts(name)]
        if output.datatype == "BOOL":
            return [int(byte != 0) for byte in output.data]
        if output.datatype == "FP16":
            return struct.unpack(f"<{len(output.data) // 2}e", output.data)
        code = ARRAY_CODES.get(output.datatype)
        if code is None:
            raise self.invalid(f"the output '{name}' is {output.datatype}, which has no plain numbers")
        values = array(code)
        values.frombytes(output.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def vectors(self, name: str) -> Sequence[bytes]:
        """Return a floating output of shape ``[n, d]`` as float32 rows; raw FP32 is sliced, not converted."""
        output = self.tensor(name)
        if output is None:
            return ()
        if len(output.shape) > 1:
            rows = output.shape[0]
        else:
            rows = 1
        if output.datatype == "FP32":
            data = bytes(output.data)
        else:
            data = self._row(name, self.numbers(name))
        if rows <= 0 or not data or len(data) % (4 * rows):
            raise self.invalid(f"the output '{name}' has rows of different lengths, or none")
        width = len(data) // rows
        return [data[i * width : (i + 1) * width] for i in range(rows)]


def _reader(name: str, datatype: str, model: str) -> Callable[[Buffer], Any]:
    length = _LENGTH.unpack_from

    def text(data: Buffer) -> str | None:
        if not data:
            return None
        size = len(data)
        if size >= 4:
            end = 4 + length(data)[0]
        else:
            end = 4
        if end > size:
            raise InvalidAnswer(f"the output '{name}' is cut off", model=model)
        try:
            return str(data[4:end], "utf-8")
        except UnicodeDecodeError:
            return str(data[4:end], "utf-8", "replace")

    def number(data: Buffer) -> Any:
        if not data:
            return None
        if len(data) < item.size:
            raise InvalidAnswer(f"the output '{name}' is cut off", model=model)
        return item.unpack_from(data)[0]

    def other(data: Buffer) -> Any:
        raise InvalidAnswer(f"the output '{name}' is {datatype}, which has no plain numbers", model=model)

    if datatype == "BYTES":
        return text
    codes = {**ARRAY_CODES, "FP16": "e", "BOOL": "?"}
    if datatype not in codes:
        return other
    item = struct.Struct("<" + codes[datatype])
    return number


def read_model_config(config: Any, model: str) -> ModelConfig:
    """
    Return the configuration of *model* in the JSON form of a ``ModelConfig`` message.

    Raises :class:`UpstreamError`, also if it is that of another model.
    """
    try:
        fields = {
            **config,
            "decoupled": config.get("model_transaction_policy", {}).get("decoupled", False),
            "inputs": _specs(config.get("input", ())),
            "outputs": _specs(config.get("output", ())),
            "parameters": {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()},
            "steps": [
                {"input_map": {}, "output_map": {}, **step, "model": step["model_name"]}
                for step in config.get("ensemble_scheduling", {}).get("step", ())
            ],
            "priority_levels": config.get("dynamic_batching", {}).get("priority_levels", 0),
            "sequences": "sequence_batching" in config,
        }
        # Not strict: protobuf's JSON form writes int64 as text, Triton's own writes numbers.
        read = msgspec.convert(fields, ModelConfig, strict=False)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UpstreamError("Triton sent a model configuration that cannot be read.", detail=repr(error)) from error
    if read.name != model:
        raise UpstreamError("Triton sent the configuration of another model.", detail=f"asked for {model!r}")
    return read


def _specs(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {item["name"]: {"dims": (), **item, "datatype": _datatype(item.get("data_type", ""))} for item in items}


def _datatype(name: str) -> str:
    if name == "TYPE_STRING":
        return "BYTES"
    return name.removeprefix("TYPE_")
