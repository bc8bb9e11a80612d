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
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, cast

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.errors import InvalidAnswer

#: Raw contents; a view if they have more bytes than LARGE, because to copy them would block the event loop.
Buffer: TypeAlias = bytes | memoryview
LARGE = 1 << 20
# The rows in a request to a model that takes any number of rows.
_FREE_BATCH = 64
#: The item codes of arrays. They have the sizes of the protocol on every platform that is supported, without NumPy.
ARRAY_CODES = {
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
#: The bytes of an element of each type except BYTES.
ELEMENT_SIZES = {**{name: array(code).itemsize for name, code in ARRAY_CODES.items()}, "BOOL": 1, "FP16": 2, "BF16": 2}
#: The most bytes of an answer whose size the model's configuration does not fix: texts, and dimensions of any length.
MAX_OPEN_ANSWER = 64 * 1024 * 1024
# The bytes that every answer may have: names and shapes take bytes too, and some models exceed their configuration.
_MIN_ANSWER = 1024 * 1024
#: The largest number of tokens that a backend can report.
MAX_COUNT = 2**31 - 1
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
# The bytes of a number in a Python object.
_NUMBER_SIZE = 8
# The range of all integer types together.
_LEAST = INTEGER_RANGES["INT64"][0]
_MOST = INTEGER_RANGES["UINT64"][1]
_LENGTH = struct.Struct("<I")
# The names of the parameters that adapters have read: two configurations of a model are compared by these. Others
# often depend on the machine, such as gpu_device_ids.
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
    """One step of an ensemble: its model, and the maps from its tensor names to those of the ensemble."""

    model: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


class ModelConfig(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A model's configuration as Triton serves it: all that adapters decide by."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    decoupled: bool = False
    inputs: Mapping[str, TensorSpec] = {}
    outputs: Mapping[str, TensorSpec] = {}
    parameters: Mapping[str, str] = {}
    steps: tuple[EnsembleStep, ...] = ()
    #: The priority levels of the dynamic batcher's queue; 0 without any.
    priority_levels: int = 0
    #: Whether requests are parts of sequences, whose state the backend keeps.
    sequences: bool = False
    #: The seconds without a request after which the backend forgets a sequence.
    sequence_idle: float = 1.0
    #: The version of Triton ("2.53.0"), empty if unknown.
    server_version: str = ""

    @property
    def fingerprint(self) -> str:
        """The server's version and a hash of the configuration, for ``system_fingerprint``."""
        digest = hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:8]
        return "-".join(part for part in ("triton", self.server_version, digest) if part)

    @property
    def behaviour(self) -> ModelConfig:
        """The config without what changes no answer: parameters that no adapter reads, and the folders of files."""
        parameters: dict[str, str] = {}
        for name, value in self.parameters.items():
            if name in _PARAMETERS_READ:
                parameters[name] = value
                if value.startswith("/"):
                    parameters[name] = value.rpartition("/")[2]
        return msgspec.structs.replace(self, parameters=parameters)

    @property
    def batching(self) -> bool:
        """Whether every tensor on the wire has a leading batch dimension."""
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
        """Return the most rows of *spec* in a request."""
        rows = self.max_batch_size or next(iter(spec.dims), 1)
        if rows < 0:
            return _FREE_BATCH
        return rows

    def max_answer(self, outputs: Iterable[str], rows: int) -> int:
        """Return the most bytes of an answer with these *outputs* to a request with this number of *rows*."""
        if not self.batching:
            rows = 1
        fixed = 0
        is_open = False
        for name in outputs:
            spec = self.outputs[name]
            size = ELEMENT_SIZES.get(spec.datatype)
            if size is None or min(spec.dims, default=0) < 0:
                is_open = True
            else:
                fixed += size * math.prod(spec.dims) * rows
        total = max(fixed, _MIN_ANSWER)
        if is_open:
            total += MAX_OPEN_ANSWER
        return total

    def wire_shape(self, spec: TensorSpec, count: int) -> tuple[int, ...]:
        """
        Return the shape of *count* elements of *spec* for one request row, with a leading 1 for a batching model.

        The innermost dynamic dim takes all elements, which is also what the generate extension infers.
        """
        # A dynamic dim is -1, which counts as 1 here.
        dims = [abs(dim) for dim in spec.dims]
        for index in reversed(range(len(dims))):
            if spec.dims[index] < 0:
                dims[index] = count
                break
        if self.batching:
            return (1, *dims)
        return tuple(dims)


class Tensor(msgspec.Struct, gc=False, frozen=True):
    """An input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Flat (row-major). BYTES values are ``str`` (sent as UTF-8). ``bytes`` are raw contents: a large matrix is never
    #: converted to Python numbers.
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
    #: Whether a cancellation stops the backend. If not, a transport may read the rest of the answer and drop it.
    cancellable: bool = True
    #: Whether the generate extension's JSON can express the request and its answers.
    json_expressible: bool = True
    #: Whether the backend notices a cancellation only over gRPC, or earlier than over HTTP.
    prefers_grpc: bool = False
    #: The priority in Triton's queues: 1 is first, 0 the default. The generate extension has none.
    priority: int = 0
    #: If set, the outputs are texts ``value:index:label``: this number of each row, with the highest values.
    classification: int = 0
    #: Further parameters of Triton's protocol, such as those of a sequence.
    parameters: Mapping[str, bool | int | str] = {}
    #: The rest of its sequence, for the same Triton. Each is sent when the one before is answered; the last ends it.
    following: tuple[InferRequest, ...] = ()
    #: Whether its answers come over a carrier, with those of other requests; see ``triton/carrier.py``.
    carried: bool = False
    #: Of a carried request: whether tokens that come together are taken one by one.
    token_by_token: bool = False
    #: The parameter that JSON cannot express, if there is one.
    needed_for: str | None = None
    #: The most bytes of an answer, or of each of several; a longer one is refused.
    max_answer: int = MAX_OPEN_ANSWER
    #: Sent as HTTP headers or gRPC metadata: names in lower case, values printable ASCII. Adapters do not set them.
    headers: Mapping[str, str] = {}

    @property
    def cost(self) -> float:
        """An estimate of the microseconds that it takes to encode it."""
        cost = 0.0
        for tensor in self.inputs:
            if isinstance(tensor.values, bytes):
                cost += offload.COPY * len(tensor.values)
            elif tensor.datatype == "BYTES":
                cost += offload.COPY * sum(map(len, tensor.values))
            else:
                cost += offload.BYTE * len(tensor.values)
        return cost


class InferResponse(Protocol):
    """
    One response. Absent outputs read as empty lists; values are flattened.

    Answers are checked here, where they are read: each method raises :class:`InvalidAnswer` for an output of another
    type, length or shape than it should have.
    """

    @property
    def model(self) -> str:
        """The Triton model that answered."""

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        """
        Return the first text or number of each of several outputs, ``None`` for one that is absent or empty.

        A value from JSON can be of any type: for speed, the caller checks it.
        """

    def texts(self, name: str) -> Sequence[str]:
        """Return a BYTES output as text (invalid UTF-8 becomes U+FFFD)."""

    def numbers(self, name: str) -> Sequence[float]:
        """Return a numeric output. Numbers that a backend sends as text count as numbers."""

    def integers(self, name: str, *, least: int = 0) -> Sequence[int]:
        """Return an output of integers from *least* to :data:`MAX_COUNT`."""

    def vectors(self, name: str) -> Sequence[bytes]:
        """Return a floating output of shape ``[n, d]`` (or ``[d]``) as *n* little-endian float32 rows."""

    def tensor(self, name: str) -> OutputTensor | None:
        """Return an output with its shape; ``None`` if it is absent, and from JSON, which has no shapes."""

    @property
    def size(self) -> int:
        """An estimate of the bytes of its outputs."""

    def invalid(self, problem: str, *, detail: str | None = None) -> InvalidAnswer:
        """Return the error for an answer of which *problem* is true."""


class CheckedOutputs:
    """Base of responses: reads numbers in the same way, whatever the transport."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def model(self) -> str: ...

    def numbers(self, name: str) -> Sequence[float]:
        raise NotImplementedError

    def integers(self, name: str, *, least: int = 0) -> Sequence[int]:
        values = self.numbers(name)
        if isinstance(values, array) and values.typecode not in "fd":
            whole: Sequence[int] = cast(Sequence[int], values)
        else:
            whole = [self._integer(name, value) for value in values]
        if min(whole, default=least) < least or max(whole, default=least) > MAX_COUNT:
            raise self.invalid(f"the output '{name}' has a number below {least} or above {MAX_COUNT}")
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
            # A float does not have all digits of a large number.
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


class JsonOutputs(CheckedOutputs):
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
            numbers: list[Any] = []
            for value in values:
                if type(value) is str:
                    numbers.append(self._number(name, value))
                else:
                    numbers.append(value)
            values = numbers
            kinds.discard(str)
        if not kinds <= {int, float, bool}:
            raise self.invalid(f"the output '{name}' has something else where a number is needed")
        if bool in kinds:
            # As integers: a boolean is none in JSON.
            values = [+value for value in values]
        if int in kinds and not all(_LEAST <= value <= _MOST for value in values if type(value) is int):
            raise self.invalid(f"the output '{name}' has a number that is too large")
        return values

    def integers(self, name: str, *, least: int = 0) -> Sequence[int]:
        value = self.value(name)
        # Nearly all of them are a single count.
        if type(value) is int and least <= value <= MAX_COUNT:
            return (value,)
        return super().integers(name, least=least)

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
    """Return an estimate of the bytes of *values*: texts, numbers, and lists of both."""
    size = 0
    for value in values:
        if isinstance(value, list):
            size += sum(map(_item_size, value))
        else:
            size += _item_size(value)
    return size


def _item_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return _NUMBER_SIZE


class OutputTensor(msgspec.Struct, frozen=True):
    """An output with its raw contents."""

    datatype: str
    shape: tuple[int, ...]
    data: Buffer
