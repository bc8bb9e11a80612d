"""
A Triton that costs next to nothing, for what is about our process alone: the bench's models behind HTTP's generate,
and a model of embeddings.

As a process, ``python -m bench.fake_triton PORT SECONDS``, each stream has a token every SECONDS; ``0`` sends a whole
answer at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import cast

from bench.processes import HOST
from bench.repository import CLOSING, OPENING, PACED, PACED_CALL, TOKEN

_STRINGS = ("text_input", "sampling_parameters?")
_FLAGS = (
    "stream?", "exclude_input_in_output?", "return_finish_reason?", "return_num_input_tokens?",
    "return_num_output_tokens?",
)  # fmt: skip


#: The mark of a token is in its name, which each answer repeats.
EMBEDDINGS = "bench_embeddings~"
_DIMENSIONS = 384


def _tensors(names: Sequence[str], kind: str) -> list[dict[str, object]]:
    return [
        {"name": name.rstrip("?"), "data_type": kind, "dims": [1], "optional": name.endswith("?")} for name in names
    ]


def _generates(name: str) -> dict[str, object]:
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [*_tensors(_STRINGS, "TYPE_STRING"), *_tensors(_FLAGS, "TYPE_BOOL")],
        "output": [
            *_tensors(("text_output", "finish_reason"), "TYPE_STRING"),
            *_tensors(("num_input_tokens", "num_output_tokens"), "TYPE_UINT32"),
        ],
    }


#: The configurations of the models.
CONFIGS = (
    _generates(PACED),
    _generates(PACED_CALL),
    {
        "name": EMBEDDINGS,
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}],
        "output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1, _DIMENSIONS]}],
    },
)
#: What a Triton answers to requests that are not inference, by path.
ANSWERS = {
    "/v2": {"name": "triton", "version": "2.51.0", "extensions": ["binary_tensor_data"]},
    "/v2/repository/index": [{"name": config["name"], "version": "1", "state": "READY"} for config in CONFIGS],
    **{f"/v2/models/{config['name']}/config": config for config in CONFIGS},
}


def event(text: str, finish: str) -> bytes:
    """Return an event of a stream with *text*, and the reason why the answer ends with it."""
    values = {
        "model_name": PACED,
        "model_version": "1",
        "text_output": text,
        "finish_reason": finish,
        "num_input_tokens": 7,
        "num_output_tokens": 1,
    }
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN_CHUNK = _chunk(event(TOKEN, "None"))
_LAST_CHUNK = _chunk(event(TOKEN, "length")) + b"0\r\n\r\n"
_CALL_CHUNKS = _chunk(event(OPENING, "None")), _chunk(event(CLOSING, "length")) + b"0\r\n\r\n"


def _embedding() -> bytes:
    data = bytes(4 * _DIMENSIONS)
    output = {
        "name": "embedding",
        "datatype": "FP32",
        "shape": [1, _DIMENSIONS],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"model_name": EMBEDDINGS, "model_version": "1", "outputs": [output]}).encode()
    lengths = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d" % (len(head), len(head) + len(data))
    return b"HTTP/1.1 200 OK\r\n" + lengths + b"\r\n\r\n" + head + data


_EMBEDDING = _embedding()


class _Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self.left = 0
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.left = 0
        self._triton.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length: ")
        if not end or len(body) < int(length.partition(b"\r\n")[0] or 0):
            return
        self._data = b""
        assert self._transport is not None
        path = head.split(b" ", 2)[1].decode()
        if path.endswith("/generate_stream"):
            self.left = json.loads(json.loads(body)["sampling_parameters"])["max_tokens"]
            if PACED_CALL in path:
                opening, self._last = _CALL_CHUNKS
            else:
                opening = b""
                self._last = _LAST_CHUNK
            self._transport.write(_STREAM + opening)
            self._triton.begin(self)
            return
        if path.endswith("/infer"):
            self._transport.write(_EMBEDDING)
            return
        answer = json.dumps(ANSWERS.get(path, {})).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))

    def send(self, count: int = 1) -> None:
        """Send *count* of the tokens that are left."""
        last = count >= self.left
        self.left -= min(count, self.left)
        assert self._transport is not None
        tokens = _TOKEN_CHUNK * max(0, count - last)
        self._transport.write(tokens + self._last if last else tokens)
        if last:
            self._triton.streams.discard(self)

    def send_each(self, seconds: float, due: float) -> None:
        """Send a token that is *due*, and one every *seconds* after it, as long as any are left."""
        if self in self._triton.streams:
            self.send()
        # Not after the last one: the connection's next request has a timer of its own.
        if self in self._triton.streams:
            # Not counted from now: streams whose tokens were late together would stay in step.
            due += seconds
            asyncio.get_running_loop().call_at(due, self.send_each, seconds, due)


class FakeTriton:
    """
    Sends a token every *seconds* (0: all at once).

    ``None`` leaves that to who calls :meth:`step`, but for answers of one token.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.streams: set[_Connection] = set()
        self._seconds = seconds
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0) -> int:
        """Begin to listen; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), HOST, port, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    def begin(self, stream: _Connection) -> None:
        """Begin to answer."""
        if not stream.left:
            # The order to end every stream, as the bench's model has it.
            for other in self.streams:
                other.left = 1
        self.streams.add(stream)
        if self._seconds:
            stream.send_each(self._seconds, asyncio.get_running_loop().time())
        elif self._seconds is not None or stream.left == 1:
            stream.send(stream.left)

    async def began(self) -> None:
        """Wait until there is a stream."""
        while not self.streams:  # noqa: ASYNC110 - for the counting of calls only
            await asyncio.sleep(0.001)

    def step(self) -> None:
        """Send each open stream its next token."""
        for stream in list(self.streams):
            stream.send()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()


async def _run(port: int, seconds: float) -> None:
    await FakeTriton(seconds).listen(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop  # the bench runs where there is one

    uvloop.run(_run(int(sys.argv[1]), float(sys.argv[2])))
