"""Answers over gRPC: large ones are read without copying what is in them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from triton_openai.errors import UpstreamError
from triton_openai.triton import grpc
from triton_openai.triton.grpc import GrpcStream
from triton_openai.triton.tensors import LARGE, InferRequest


class Taking:
    """What takes the responses of a stream."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.error: Exception | None = None

    def receive(self, responses: Any) -> None:
        """Keep them."""
        self.responses += responses

    def end(self, error: Exception | None) -> None:
        """Keep the error."""
        self.error = error


def message(*contents: bytes, error: str = "") -> bytes:
    """Return a message of a stream with an output of each of *contents*."""
    made = service_pb2.ModelStreamInferResponse(error_message=error)
    response = made.infer_response
    response.model_name, response.id = "m" * 300, "request"
    response.parameters["triton_final_response"].bool_param = True
    for number, content in enumerate(contents):
        response.outputs.add(name=f"output_{number}", datatype="UINT8", shape=[1, len(content)])
        response.raw_output_contents.append(content)
    return bytes(made.SerializeToString())


def taken(*messages: bytes | memoryview) -> Taking:
    """Return what takes *messages*."""
    taking = Taking()
    channel: Any = Mock()
    GrpcStream(channel, InferRequest(model="m", id="1", inputs=()), taking, Mock()).messages_received(list(messages))
    return taking


def test_large_contents_are_views() -> None:
    """They are where they arrived, and everything else is read as from a small answer."""
    contents = (b"small", bytes(range(256)) * 8192, b"", b"last")
    arrived = memoryview(bytearray(message(*contents)))
    small = message(b"before")
    (before, large, after) = taken(small, arrived, small).responses
    for number, content in enumerate(contents):
        output = large.tensor(f"output_{number}")
        assert (output.data, output.datatype, output.shape) == (content, "UINT8", (1, len(content)))
    assert large.tensor("output_1").data.obj is arrived.obj
    assert b"before" == before.tensor("output_0").data == after.tensor("output_0").data


def test_a_large_error_is_an_error() -> None:
    """Of a megabyte, or beside a megabyte."""
    for sent in (message(error="x" * 2 * LARGE), message(bytes(2 * LARGE), error="it broke")):
        assert isinstance(taken(memoryview(sent)).error, Exception)


@given(cut=st.integers(0, 400), put=st.binary(max_size=20))
def test_large_answers_that_cannot_be_read(cut: int, put: bytes) -> None:
    """They end with our own error, or are read as far as they can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "LARGE", 16)
        sent = message(b"some contents", b"more")
        taking = taken(memoryview(sent[:cut] + put + sent[cut + len(put) :]))
    assert taking.error is None or isinstance(taking.error, UpstreamError) or taking.responses == []
