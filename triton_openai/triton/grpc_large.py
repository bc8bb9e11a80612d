"""
Large requests as protobuf bytes, put together where the event loop is not held up.

The library copies contents three times on their way into a message, each time in one piece: for 50 MB that keeps every
other stream waiting for a tenth of a second. Here they are copied once, in a thread, and in pieces between which others
get their turn.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any

from tritonclient.grpc import service_pb2

from triton_openai.triton.tensors import InferRequest

# Contents from this size on are worth a thread.
_LARGE = 1 << 20
_PIECE = 1 << 20


def is_large(request: InferRequest) -> bool:
    """Return whether *request* carries contents that should not be copied on the event loop."""
    return any(isinstance(tensor.values, bytes) and len(tensor.values) >= _LARGE for tensor in request.inputs)


async def serialized(message: Any, request: InferRequest) -> bytes:
    """Return *message*, a ``ModelInferRequest`` of *request* without its contents, as bytes with them."""
    return await asyncio.to_thread(_serialized, message.SerializeToString(), [each.raw() for each in request.inputs])


def serialize(message: Any) -> bytes:
    """Return a message as bytes; one that is bytes already, as it is."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _serialized(head: bytes, contents: list[bytes]) -> bytes:
    # The bytes of a message may be followed by further elements of its repeated fields: a tag (the field's number, and
    # 2 for "with a length"), the length, and the contents.
    field = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
    buffer = io.BytesIO()
    buffer.write(head)
    for content in contents:
        buffer.write(_varint(field << 3 | 2) + _varint(len(content)))
        view = memoryview(content)
        for start in range(0, len(view), _PIECE):
            buffer.write(view[start : start + _PIECE])
    return buffer.getvalue()


def _varint(value: int) -> bytes:
    """Return *value* seven bits at a time, the lowest first; all but the last byte have their highest bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
