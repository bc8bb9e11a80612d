"""Tensors on the wire: their bytes are those of Triton's own client, their shapes those that Triton infers."""

from __future__ import annotations

import json
import math
import struct
from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

from tests.cases import every_case
from triton_openai.errors import UpstreamError
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.grpc import decode_response, encode_request
from triton_openai.triton.http import generate_body, infer_body, parse_infer
from triton_openai.triton.tensors import (
    INTEGER_RANGES,
    MAX_OPEN_ANSWER,
    InferRequest,
    JsonResponse,
    ModelConfig,
    Tensor,
    TensorSpec,
)

FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
INTEGERS = {name: np.dtype(name.lower()) for name in INTEGER_RANGES}


@given(st.lists(st.text(max_size=30), max_size=5))
def test_texts_are_written_as_tritons_client_writes_them(texts):
    """A BYTES tensor is lengths and UTF-8, and reads back as it was."""
    raw = Tensor("t", "BYTES", (len(texts),), texts).raw()

    expected = serialize_byte_tensor(np.array([text.encode() for text in texts], dtype=np.object_))
    assert (expected.item() if expected.size else b"") == raw
    assert texts == list(BinaryResponse(Layout((("t", "BYTES", (len(texts),)),)), (raw,)).texts("t"))
    assert [text.encode() for text in texts] == list(deserialize_bytes_tensor(raw))


@every_case("datatype", INTEGERS)
def test_integers_are_written_as_numpy_writes_them(datatype):
    """Both ends of every integer type are written and read back."""
    values = [*INTEGER_RANGES[datatype], 0, 1]
    raw = Tensor("t", datatype, (4,), values).raw()

    assert np.array(values, dtype=INTEGERS[datatype]).tobytes() == raw
    assert datatype == np_to_triton_dtype(INTEGERS[datatype])
    assert values == list(BinaryResponse(Layout((("t", datatype, (4,)),)), (raw,)).numbers("t"))


@every_case("datatype", INTEGERS)
@every_case("end", [0, 1])
def test_integers_that_do_not_fit_are_refused(datatype, end):
    """Integers that do not fit are refused, and not wrapped."""
    value = INTEGER_RANGES[datatype][end] + (-1, 1)[end]

    with pytest.raises(OverflowError):
        Tensor("t", datatype, (1,), (value,)).raw()


@every_case("datatype", FLOATS)
def test_floats_are_written_as_numpy_writes_them(datatype):
    """Every floating type is written little-endian and read back, infinities and NaN included."""
    values = [0.0, -0.0, 1.5, 0.1, 65504.0, math.inf]
    raw = Tensor("t", datatype, (6,), values).raw()

    expected = np.array(values, dtype=FLOATS[datatype])
    assert expected.tobytes() == raw
    found = BinaryResponse(Layout((("t", datatype, (6,)),)), (raw,)).numbers("t")
    assert expected.tolist() == list(found)
    nan = Tensor("t", datatype, (1,), (math.nan,)).raw()
    assert math.isnan(BinaryResponse(Layout((("t", datatype, (1,)),)), (nan,)).numbers("t")[0])


def test_booleans_are_one_byte_each():
    """True is 1; every other byte than 0 reads as true."""
    assert b"\x01\x00\x01" == Tensor("t", "BOOL", (3,), (True, False, 1)).raw()
    assert [False, True, True] == BinaryResponse(Layout((("t", "BOOL", (3,)),)), (b"\x00\x01\x02",)).numbers("t")


def test_invalid_utf8_is_replaced():
    """A model's bytes may be no text; they become U+FFFD and no error."""
    raw = struct.pack("<I", 3) + b"a\xff\xfe"

    assert ["a\ufffd\ufffd"] == BinaryResponse(Layout((("t", "BYTES", (1,)),)), (raw,)).texts("t")


@every_case("raw", [b"\x01", b"\x01\x00\x00", b"\x02\x00\x00\x00a", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00\x05"])
def test_cut_texts_are_an_error(raw):
    """Lengths that lead beyond the contents are the upstream's fault."""
    with pytest.raises(UpstreamError, match="is invalid"):
        BinaryResponse(Layout((("t", "BYTES", (1,)),)), (raw,)).texts("t")


def test_numbers_that_come_as_text():
    """A backend's BYTES where numbers are declared are read as numbers, and a type without numbers is an error."""
    raw = Tensor("t", "BYTES", (1,), ("5",)).raw()

    assert [5] == BinaryResponse(Layout((("t", "BYTES", (1,)),)), (raw,)).numbers("t")
    with pytest.raises(UpstreamError, match="BF16"):
        BinaryResponse(Layout((("t", "BF16", (1,)),)), (b"\x00\x00",)).numbers("t")


def test_the_first_value_of_each_output():
    """The first value of an output is read by name and type, also behind others; without a value it is ``None``."""
    table = [
        ("BYTES", Tensor("t", "BYTES", (2,), ("é", "b")).raw(), "é"),
        ("BYTES", b"\x00\x00\x00\x00", ""),
        ("BYTES", b"", None),
        ("INT32", struct.pack("<2i", -7, 8), -7),
        ("FP32", struct.pack("<f", 0.5), 0.5),
        ("FP32", b"", None),
        ("FP16", struct.pack("<2e", 1.5, 2.5), 1.5),
        ("BOOL", b"\x01\x00", True),
        ("BOOL", b"", None),
    ]
    names = [f"t{place}" for place in range(len(table))]
    described = tuple((name, datatype, (1,)) for name, (datatype, _, _) in zip(names, table, strict=True))
    response = BinaryResponse(Layout(described), [data for _, data, _ in table])

    assert [value for _, _, value in reversed(table)] == list(response.first(tuple(reversed(names))))
    assert [None, "é"] == list(response.first(("absent", "t0")))
    for datatype, data, match in (("BYTES", b"\x02\x00\x00\x00a", "'t' is cut off"), ("BF16", b"\x00\x00", "BF16")):
        with pytest.raises(UpstreamError, match=match):
            BinaryResponse(Layout((("t", datatype, (1,)),)), (data,)).first(("t",))


@every_case("datatype", FLOATS)
@every_case("shape", [(2, 3), (6,), (1, 6), (3, 1, 2)])
def test_vectors_are_rows_of_float32(datatype, shape):
    """A matrix is its rows, a single row is one; whatever was sent becomes float32."""
    values = np.arange(6, dtype=FLOATS[datatype])
    rows = shape[0] if len(shape) > 1 else 1
    expected = [row.tobytes() for row in values.astype(np.float32).reshape(rows, -1)]
    assert expected == list(BinaryResponse(Layout((("t", datatype, shape),)), (values.tobytes(),)).vectors("t"))


@every_case("shape, data", [((2, 3), b"\x00" * 20), ((0, 3), b""), ((4, 1), b"\x00" * 12)])
def test_vectors_that_do_not_add_up_are_an_error(shape, data):
    """Contents that cannot be cut into the rows that the shape promises are the upstream's fault."""
    with pytest.raises(UpstreamError, match="is invalid"):
        BinaryResponse(Layout((("t", "FP32", shape),)), (data,)).vectors("t")


@every_case(
    "outputs, rows, expected",
    [
        ({"a": ("FP32", (1_000_000,))}, 4, 16_000_000),
        ({"a": ("FP32", (2, 1_000_000)), "b": ("FP64", ())}, 4, 32_000_032),
        ({"a": ("FP32", (8,))}, 4, 2**20),
        ({"a": ("FP32", (-1,))}, 4, 2**20 + MAX_OPEN_ANSWER),
        ({"a": ("BYTES", (1,)), "b": ("BYTES", (1,))}, 4, 2**20 + MAX_OPEN_ANSWER),
    ],
)
def test_the_largest_answer_of_a_model(outputs, rows, expected):
    """It follows from types and dimensions, and is some megabytes where those are open."""
    specs = {name: TensorSpec(name=name, datatype=kind, dims=dims) for name, (kind, dims) in outputs.items()}
    config = ModelConfig(name="m", max_batch_size=8, outputs=specs)
    assert expected == config.max_answer(outputs, rows)
    assert config.max_answer(outputs, 1) == msgspec.structs.replace(config, max_batch_size=0).max_answer(outputs, rows)


@every_case("response", [BinaryResponse(Layout(()), ()), JsonResponse({})])
def test_absent_outputs_are_empty(response):
    """What did not come reads as nothing."""
    assert [] == list(response.texts("t"))
    assert [] == list(response.numbers("t"))


def test_the_answers_of_generate_are_unwrapped():
    """A single element comes as a scalar, more as a list, none as an empty list; zero is a value."""
    response = JsonResponse({"one": "a", "more": ["a", "b"], "none": [], "zero": 0, "text": ""})

    assert ("a",) == tuple(response.texts("one"))
    assert ["a", "b"] == list(response.texts("more"))
    assert [] == list(response.texts("none"))
    assert [0] == [*map(int, response.numbers("zero"))]
    assert ("",) == tuple(response.texts("text"))
    assert [array("f", [1.0, 2.0]).tobytes()] == JsonResponse({"v": [1, 2]}).vectors("v")


def infer(dims: tuple[int, ...], count: int, *, batching: bool) -> tuple[int, ...] | None:
    """
    Return the shape that Triton's generate extension gives *count* elements, ``None`` where it gives none: fixed dims
    must divide the count, the innermost dynamic dim takes the rest, other dynamic ones become 1.
    """
    shape = [-1, *dims] if batching else list(dims)
    fixed = math.prod(dim for dim in shape if dim > 0)
    if count % fixed:
        return None
    dynamic = [index for index, dim in enumerate(shape) if dim < 0]
    if not dynamic:
        return tuple(shape) if count == fixed else None
    for index in dynamic:
        shape[index] = 1
    shape[dynamic[-1]] = count // fixed
    return tuple(shape)


@given(
    dims=st.lists(st.sampled_from([-1, 1]), min_size=1, max_size=3).map(tuple),
    count=st.integers(1, 5),
    batching=st.booleans(),
)
def test_shapes_are_those_that_generate_infers(dims, count, batching):
    """Both transports give the model the same shape: what we say over gRPC is what Triton finds out over HTTP."""
    spec = TensorSpec(name="t", datatype="BYTES", dims=dims)
    config = ModelConfig(name="m", max_batch_size=8 if batching else 0, inputs={"t": spec})

    if count == 1 or -1 in dims:
        assert infer(dims, count, batching=batching) == config.wire_shape(spec, count)


REQUEST = InferRequest(
    model="m",
    id="id-1",
    inputs=(
        Tensor("text", "BYTES", (1, 1), ("é\n\"\u0000",)),
        Tensor("words", "BYTES", (1, 2), ("a", "b")),
        Tensor("number", "UINT64", (1, 1), (2**64 - 1,)),
        Tensor("ratio", "FP32", (1, 1), (0.1,)),
        Tensor("flag", "BOOL", (1, 1), (True,)),
    ),
    outputs=("out",),
)  # fmt: skip


def test_the_body_of_generate():
    """Single elements are scalars, several a list, and the id is a key."""
    expected = (
        '{"id":"id-1","text":"é\\n\\"\\u0000","words":["a","b"],"number":18446744073709551615,"ratio":0.1,"flag":true}'
    )

    assert expected == generate_body(REQUEST).decode()


def grpc_message(request):
    """Return the message that Triton reads."""
    return service_pb2.ModelInferRequest.FromString(encode_request(request))


def test_a_grpc_request_holds_the_same():
    """Names, types, shapes and raw contents in order; the outputs that are wanted, and no others."""
    message = grpc_message(REQUEST)

    assert ("m", "id-1") == (message.model_name, message.id)
    assert [(t.name, t.datatype, t.shape) for t in REQUEST.inputs] == [
        (entry.name, entry.datatype, tuple(entry.shape)) for entry in message.inputs
    ]
    assert [tensor.raw() for tensor in REQUEST.inputs] == list(message.raw_input_contents)
    assert ["out"] == [output.name for output in message.outputs]


def test_lists_are_as_good_as_tuples():
    """An adapter of another package may give either, over both protocols."""
    replace = msgspec.structs.replace
    inputs = [replace(one, shape=list(one.shape), values=list(one.values)) for one in REQUEST.inputs]
    lists = replace(REQUEST, inputs=inputs, outputs=["out"])

    for encode in (encode_request, infer_body, generate_body):
        assert encode(REQUEST) == encode(lists)


def test_an_infer_body_can_be_read_back():
    """The JSON part and the contents are as long as they say; an answer of the same form is read."""
    body, length = infer_body(REQUEST)

    assert sum(len(tensor.raw()) for tensor in REQUEST.inputs) == len(body) - length
    raw = Tensor("out", "BYTES", (2,), ("a", "é")).raw()
    header = b'{"outputs":[{"name":"out","datatype":"BYTES","shape":[2],"parameters":{"binary_data_size":%d}}]}'
    header = header % len(raw)
    assert ["a", "é"] == list(parse_infer(header + raw, len(header), "m").texts("out"))


def test_a_priority_is_said_where_there_is_one():
    """A priority is a parameter of the request, in both protocols, and left out where it is the default."""
    urgent = msgspec.structs.replace(REQUEST, priority=3)
    body, length = infer_body(urgent)

    assert {"priority": 3} == json.loads(body[:length])["parameters"]
    assert 3 == grpc_message(urgent).parameters["priority"].int64_param
    plain, plain_length = infer_body(REQUEST)
    assert "parameters" not in json.loads(plain[:plain_length])
    assert not grpc_message(REQUEST).parameters


def test_parameters_of_a_sequence():
    """They keep their types, in both protocols, beside those of the request itself."""
    given = {"sequence_id": 2**62, "sequence_start": True, "sequence_end": False}
    part = msgspec.structs.replace(REQUEST, parameters=given, priority=3, id="42")
    body, length = infer_body(part)

    assert {**given, "priority": 3} == json.loads(body[:length])["parameters"]
    message = grpc_message(part)
    found = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    assert ({**given, "priority": 3}, "42") == (found, message.id)
    assert list(REQUEST.inputs[0].shape) == list(message.inputs[0].shape)
    named = grpc_message(msgspec.structs.replace(REQUEST, parameters={"sequence_id": "a"}))
    assert "a" == named.parameters["sequence_id"].string_param


@every_case("header", [b"", b"{", b"[]", b'{"outputs":[{"name":"out"}]}', b'{"outputs":1}'])
def test_an_answer_that_cannot_be_read(header):
    """What is no answer is the upstream's fault."""
    with pytest.raises(UpstreamError, match="cannot be read"):
        parse_infer(header, len(header), "m")


def test_an_answer_that_is_cut():
    """Contents shorter than promised are the upstream's fault."""
    header = b'{"outputs":[{"name":"out","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}'

    with pytest.raises(UpstreamError, match="fewer bytes"):
        parse_infer(header + b"\x00" * 7, len(header), "m")


def test_a_grpc_answer_is_read_by_position():
    """Contents belong to the outputs in their order."""
    message = service_pb2.ModelInferResponse(model_name="m")
    for name, raw in (("a", b"\x01\x00\x00\x00"), ("b", Tensor("b", "BYTES", (1,), ("x",)).raw())):
        output = message.outputs.add()
        output.name, output.datatype = name, "INT32" if name == "a" else "BYTES"
        output.shape.append(1)
        message.raw_output_contents.append(raw)
    response = decode_response(message)

    assert [1] == list(response.numbers("a"))
    assert ["x"] == list(response.texts("b"))
    message.raw_output_contents.pop()
    with pytest.raises(UpstreamError, match="without raw contents"):
        decode_response(message)


@every_case(
    "data",
    [
        b"[]",
        b"{}",
        b'{"name":1}',
        b'{"name":"m","max_batch_size":"x"}',
        b'{"name":"m","input":[{"name":"a","dims":["x"]}]}',
    ],
)
def test_a_config_that_cannot_be_read(data):
    """A configuration that is none is the upstream's fault, and what was wrong goes to the log."""
    with pytest.raises(UpstreamError, match="cannot be read") as caught:
        read_model_config(msgspec.json.decode(data), "m")

    assert caught.value.detail


def test_a_config_as_triton_writes_it():
    """Types, dims (as numbers or text), optional inputs, parameters and steps are read; the rest is passed over."""
    config = read_model_config(
        msgspec.json.decode(
            b'{"name":"m","platform":"ensemble","max_batch_size":4,"version_policy":{"latest":{"num_versions":1}},'
            b'"input":[{"name":"a","data_type":"TYPE_STRING","dims":["-1"],"optional":true,"format":"FORMAT_NONE"}],'
            b'"output":[{"name":"b","data_type":"TYPE_FP16","dims":[2,3]}],"model_transaction_policy":{"decoupled":true},'
            b'"parameters":{"p":{"string_value":"v"},"hole":{"string_value":"${hole}"},"blank":{"string_value":" "}},'
            b'"ensemble_scheduling":{"step":[{"model_name":"s","model_version":-1,"input_map":{"x":"a"},"output_map":{}}]}}'
        ),
        "m",
    )

    assert TensorSpec(name="a", datatype="BYTES", dims=(-1,), optional=True) == config.inputs["a"]
    assert TensorSpec(name="b", datatype="FP16", dims=(2, 3)) == config.outputs["b"]
    assert (True, True, "s") == (config.decoupled, config.batching, config.steps[0].model)
    assert ["v", None, None, None] == [config.parameter(name) for name in ("p", "hole", "blank", "missing")]
