"""A Triton that lies: it relays the answers of a real one over both protocols, and changes what it has heard."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import grpc
import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer
from tritonclient.grpc import service_pb2

_SERVICE = "inference.GRPCInferenceService"
_INFERENCE = ("/generate_stream", "/infer")
_KEPT = ("Content-Type", "Inference-Header-Content-Length")
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_DEEP = b"[" * 100_000 + b"]" * 100_000


class HttpAnswer(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes


#: An answer over gRPC: its messages.
GrpcAnswer = Sequence[bytes]
Answer = HttpAnswer | GrpcAnswer


class Liar:
    """Listens at ``http_url`` and ``grpc_url``."""

    def __init__(self) -> None:
        self.http_url = ""
        self.grpc_url = ""
        #: The last true answer of each path or method that is no inference, and of all inference as one.
        self.heard: dict[str, Answer] = {}
        #: What is said instead.
        self.lies: dict[str, Answer] = {}


@asynccontextmanager
async def lying(http_url: str, grpc_url: str) -> AsyncIterator[Liar]:
    """Run a liar in front of the Triton at these addresses."""
    liar = Liar()
    app = web.Application(client_max_size=2**30)
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Accept-Encoding"]) as session,
        grpc.aio.insecure_channel(grpc_url.removeprefix("grpc://"), options=_OPTIONS) as channel,
    ):
        app.router.add_route("*", "/{path:.*}", _http_handler(liar, session, http_url))
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_GrpcHandler(liar, channel),))
        liar.grpc_url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with TestServer(app) as http:
            liar.http_url = str(http.make_url("")).rstrip("/")
            try:
                yield liar
            finally:
                await server.stop(None)


def _http_handler(liar: Liar, session: aiohttp.ClientSession, target: str) -> Any:
    async def relay(request: web.Request) -> web.Response:
        body = await request.read()
        place = "inference" if request.path.endswith(_INFERENCE) else request.path
        answer = liar.lies.get(place)
        if answer is None:
            headers = {name: request.headers[name] for name in _KEPT if name in request.headers}
            async with session.request(request.method, target + request.raw_path, data=body, headers=headers) as heard:
                kept = {name: heard.headers[name] for name in _KEPT if name in heard.headers}
                answer = liar.heard[place] = HttpAnswer(heard.status, kept, await heard.read())
        assert isinstance(answer, HttpAnswer)
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body)

    return relay


class _GrpcHandler(grpc.GenericRpcHandler):
    def __init__(self, liar: Liar, channel: grpc.aio.Channel) -> None:
        self._liar = liar
        self._channel = channel

    def service(self, details: Any) -> Any:
        path = details.method
        method = path.rpartition("/")[2]
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream(path))
        return grpc.unary_unary_rpc_method_handler(self._single(path, method))

    def _stream(self, path: str) -> Any:
        async def relay(requests: Any, context: Any) -> AsyncIterator[bytes]:
            answer = self._liar.lies.get("inference")
            if answer is None:
                call: Any = self._channel.stream_stream(path)
                answer = [message async for message in call(requests)]
                self._liar.heard["inference"] = answer
            assert not isinstance(answer, HttpAnswer)
            for told in answer:
                yield told

        return relay

    def _single(self, path: str, method: str) -> Any:
        place = "inference" if method == "ModelInfer" else method

        async def relay(request: bytes, context: Any) -> bytes:
            answer = self._liar.lies.get(place)
            if answer is None:
                call: Any = self._channel.unary_unary(path)
                answer = self._liar.heard[place] = [await call(request)]
            assert not isinstance(answer, HttpAnswer)
            return answer[0]

        return relay


class Tensor(NamedTuple):
    """An output of a binary answer."""

    name: str
    datatype: str
    shape: Sequence[Any]
    data: bytes


# What stands in JSON for a value: written out, as some of it is no value of Python's.
_VALUES: Mapping[str, bytes] = {
    "null": b"null", "true": b"true", "5": b"5", "-1": b"-1", "1.5": b"1.5", "NaN": b"NaN", "Infinity": b"Infinity",
    "-Infinity": b"-Infinity", "2**31": b"2147483648", "2**63": b"9223372036854775808", "10**30": b"1" + b"0" * 30,
    "400 digits": b"9" * 400, "5000 digits": b"9" * 5000, "1e308": b"1e308", "1e400": b"1e400", "empty": b'""',
    "text": b'"x"', "number as text": b'"12"', "NaN as text": b'"nan"', "long number as text": b'"%s"' % (b"9" * 5000),
    "surrogate": b'"\\ud800"', "surrogates": b'"a\\udc00\\ud800"', "in a list": b'["\\ud800"]', "bytes": b'"\xff\xfe"',
    "cut UTF-8": b'"\xe2\x82"', "NUL": b'"\\u0000"', "JSON": b'"[{}]"', "JSON of NaN": b'"[NaN]"',
    "JSON of nulls": b'"[null, null]"', "JSON of texts": b'"[\\"a\\"]"', "deep JSON": b'"' + _DEEP + b'"',
    "object": b"{}", "objects": b'[{"a":1}]', "list": b"[]", "lists": b"[[1]]", "nulls": b"[null]",
    "texts": b'["a","b"]', "numbers": b"[1,2,3]", "floats": b"[0.5,1.5,2.5]", "mixed": b'[1,"a",null,true]',
    "deep": _DEEP, "many": b"[" + b"1," * 5000 + b"1]", "no JSON": b"nonsense", "nothing": b"",
}  # fmt: skip
_EVENTS: Mapping[str, bytes] = {
    "a list": b"[]", "a number": b"5", "null": b"null", "empty": b"", "no JSON": b"nonsense", "no UTF-8": b"\xff",
    "an error that is a number": b'{"error": 5}', "an error that is an object": b'{"error": {"a": 1}}',
    "an error with a surrogate": b'{"error": "\\ud800"}', "an error that is null": b'{"error": null}', "deep": _DEEP,
    "an empty object": b"{}", "cut": b'{"text_output": "a',
}  # fmt: skip
_DATATYPES = ("BYTES", "FP32", "FP64", "FP16", "BF16", "INT8", "INT32", "INT64", "UINT64", "BOOL", "NONSENSE", "")
_SHAPES: Sequence[Sequence[int]] = (
    [],
    [0],
    [-1],
    [1],
    [2],
    [1, 1],
    [1, 2],
    [7, 7],
    [2**62, 2**62],
    [-(2**63)],
    [1] * 99,
)
_DATA: Mapping[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "one byte": lambda _: b"\1",
    "half": lambda data: data[: len(data) // 2],
    "twice": lambda data: data * 2,
    "all ones": lambda data: b"\xff" * len(data),
    "all zeros": lambda data: bytes(len(data)),
    "NaN": lambda data: struct.pack("<f", math.nan) * (len(data) // 4),
    "infinite": lambda data: struct.pack("<f", math.inf) * (len(data) // 4),
    "huge": lambda data: struct.pack("<f", 3e38) * (len(data) // 4),
    "negative": lambda data: struct.pack("<i", -5) * (len(data) // 4),
    "largest": lambda data: struct.pack("<i", 2**31 - 1) * (len(data) // 4),
    "a text that is no UTF-8": lambda _: struct.pack("<I", 3) + b"a\xff\xfe",
    "a text that is a number": lambda _: struct.pack("<I", 2) + b"12",
    "an empty text": lambda _: struct.pack("<I", 0),
    "two texts": lambda _: (struct.pack("<I", 1) + b"a") * 2,
    "JSON": lambda _: struct.pack("<I", 10) + b'[{"1": {}}',
    "deep JSON": lambda _: struct.pack("<I", len(_DEEP)) + _DEEP,
}


def lies_about(answer: Answer) -> Iterator[tuple[str, Answer]]:
    """Yield changed answers, each with what is changed."""
    if not isinstance(answer, HttpAnswer):
        yield from _grpc_lies(answer)
        return
    yield from _lies_about_http(answer)
    if "Inference-Header-Content-Length" in answer.headers:
        yield from _binary_lies(answer)
    else:
        yield from _event_lies(answer)


def _lies_about_http(answer: HttpAnswer) -> Iterator[tuple[str, Answer]]:
    for length in ("-1", "abc", "0", "5", "9" * 9, "9" * 6000, ""):
        yield f"head of {length[:9]}", answer._replace(headers={**answer.headers, _KEPT[1]: length})
    for kind in ("text/html", "application/json", "text/event-stream", "a"):
        yield f"type {kind}", answer._replace(headers={**answer.headers, _KEPT[0]: kind})
    for name, body in _EVENTS.items():
        yield f"a body that is {name}", answer._replace(body=body)
        yield f"an error that is {name}", answer._replace(status=500, body=body)
    yield "half a body", answer._replace(body=answer.body[: len(answer.body) // 2])


def _event_lies(answer: HttpAnswer) -> Iterator[tuple[str, Answer]]:
    events = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n") if event]

    def said(place: int, event: bytes) -> HttpAnswer:
        told = [*events[:place], event, *events[place + 1 :]]
        return answer._replace(body=b"".join(b"data: %b\n\n" % one for one in told))

    for place in sorted({0, len(events) // 2, len(events) - 1}):
        for name, event in _EVENTS.items():
            yield f"event {place} is {name}", said(place, event)
        fields = msgspec.json.decode(events[place], type=dict[str, msgspec.Raw])
        for field in fields:
            left = {name: bytes(value) for name, value in fields.items() if name != field}
            yield f"event {place} lacks {field}", said(place, _object(left))
            for name, value in _VALUES.items():
                yield f"{field} of event {place} is {name}", said(place, _object({**left, field: value}))
    yield "no events", answer._replace(body=b"")


def _object(fields: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (json.dumps(name).encode(), value) for name, value in fields.items())


def _tensor_lies(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Sequence[Tensor]]]:
    for place, tensor in enumerate(tensors):
        before, after = tensors[:place], tensors[place + 1 :]
        changes: dict[str, Tensor] = {f"is {datatype}": tensor._replace(datatype=datatype) for datatype in _DATATYPES}
        changes |= {f"has the shape {str(shape)[:20]}": tensor._replace(shape=shape) for shape in _SHAPES}
        changes |= {f"has {name}": tensor._replace(data=change(tensor.data)) for name, change in _DATA.items()}
        text = struct.pack("<I", 1) + b"x"
        changes |= {
            "is a text": tensor._replace(datatype="BYTES", shape=[1], data=text),
            "is many texts": tensor._replace(datatype="BYTES", shape=[50], data=text * 50),
            "is a matrix": tensor._replace(datatype="FP32", shape=[3, 3], data=struct.pack("<f", 1) * 9),
            "is half numbers": tensor._replace(datatype="FP16", data=b"\0\x7e" * math.prod(tensor.shape)),
            "has another name": tensor._replace(name="other"),
        }
        for name, change in changes.items():
            yield f"{tensor.name} {name}", [*before, change, *after]
        yield f"{tensor.name} is missing", [*before, *after]
        yield f"{tensor.name} comes twice", [*tensors, tensor]
    yield "nothing", ()


def _binary_lies(answer: HttpAnswer) -> Iterator[tuple[str, Answer]]:
    size = int(answer.headers[_KEPT[1]])
    head = json.loads(answer.body[:size])
    tensors, place = [], size
    for output in head["outputs"]:
        end = place + output["parameters"]["binary_data_size"]
        tensors.append(Tensor(output["name"], output["datatype"], output["shape"], answer.body[place:end]))
        place = end

    def said(written: bytes, contents: bytes) -> HttpAnswer:
        headers = {**answer.headers, _KEPT[1]: str(len(written))}
        return answer._replace(headers=headers, body=written + contents)

    for name, told in _tensor_lies(tensors):
        outputs = [
            {"name": one.name, "datatype": one.datatype, "shape": one.shape,
             "parameters": {"binary_data_size": len(one.data)}}
            for one in told
        ]  # fmt: skip
        written = json.dumps({**head, "outputs": outputs}).encode()
        yield name, said(written, b"".join(one.data for one in told))
    contents = answer.body[size:]
    for field in ("name", "datatype", "shape", "parameters"):
        for name, value in _VALUES.items():
            fields = {key: json.dumps(told).encode() for key, told in head["outputs"][0].items()} | {field: value}
            yield f"{field} is {name}", said(b'{"outputs":[%b]}' % _object(fields), contents)
    for name, value in _VALUES.items():
        left = {key: json.dumps(told).encode() for key, told in head["outputs"][0].items() if key != "parameters"}
        written = _object(left)
        parameters = b'"parameters":{"binary_data_size":%b}' % value
        yield f"binary_data_size is {name}", said(b'{"outputs":[%b,%b}]}' % (written[:-1], parameters), contents)
        yield f"outputs are {name}", said(b'{"outputs":%b}' % value, contents)


def _grpc_lies(messages: GrpcAnswer) -> Iterator[tuple[str, Answer]]:
    stream = service_pb2.ModelStreamInferResponse
    streamed = all(b"\x12" == message[:1] for message in messages)
    kind = stream if streamed else service_pb2.ModelInferResponse
    for place in sorted({0, len(messages) // 2, len(messages) - 1}):
        parsed = kind.FromString(messages[place])
        response = parsed.infer_response if streamed else parsed
        contents = response.raw_output_contents
        tensors = [
            Tensor(output.name, output.datatype, list(output.shape), data)
            for output, data in zip(response.outputs, contents, strict=True)
        ]

        def said(message: bytes, place: int = place) -> GrpcAnswer:
            return [*messages[:place], message, *messages[place + 1 :]]

        for name, told in _tensor_lies(tensors):
            changed = kind.FromString(messages[place])
            inner = changed.infer_response if streamed else changed
            del inner.outputs[:]
            del inner.raw_output_contents[:]
            for one in told:
                output = inner.outputs.add(name=one.name, datatype=one.datatype)
                output.shape.extend([min(dim, 2**62) for dim in one.shape])
                inner.raw_output_contents.append(one.data)
            yield f"{name} in message {place}", said(changed.SerializeToString())
        bare = kind.FromString(messages[place])
        del (bare.infer_response if streamed else bare).raw_output_contents[:]
        yield f"message {place} without contents", said(bare.SerializeToString())
        for name, data in (("ones", b"\xff" * 50), ("half", messages[place][: len(messages[place]) // 2]), ("", b"")):
            yield f"message {place} is {name or 'empty'}", said(data)
    if streamed:
        yield "an empty error", [stream(error_message=" ").SerializeToString()]
        yield "no messages", []
