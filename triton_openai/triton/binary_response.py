"""
Responses with raw tensors: those of gRPC, and of HTTP with the binary extension.

Source of the facts: the KServe v2 protocol with Triton's binary extension. Raw contents are little-endian and
row-major; a BYTES element is a 4-byte length and its bytes; BOOL is one byte.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from triton_openai.errors import InvalidAnswer
from triton_openai.triton.tensors import ARRAY_CODES, ELEMENT_SIZES, Buffer, CheckedOutputs, OutputTensor

_LENGTH = struct.Struct("<I")


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
        """Return, for each of *names*, its index among the outputs, -1 if absent, and what reads its first value."""
        readers = self._readers.get(names)
        if readers is None:
            known: dict[str, tuple[int, Callable[[Buffer], Any]]] = {}
            for index, (name, datatype, _) in enumerate(self.outputs):
                known[name] = (index, _reader(name, datatype, self.model))
            readers = [known.get(name, (-1, bytes)) for name in names]
            self._readers[names] = readers
        return readers


class BinaryResponse(CheckedOutputs):
    """
    A response with raw tensors: gRPC's, and HTTP's with the binary extension.

    *contents* has the bytes of each output of *layout*. Most outputs are never read.
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
        values: list[Any] = []
        for index, read in self._layout.readers(names):
            value = None
            if index >= 0:
                value = read(contents[index])
            values.append(value)
        return values

    def tensor(self, name: str) -> OutputTensor | None:
        for (output, datatype, shape), data in zip(self._layout.outputs, self._contents, strict=True):
            if output == name:
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
