"""
A Triton that costs next to nothing, for what is about our process alone: the bench's model behind HTTP's generate.

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
from bench.repository import PACED, TOKEN

_STRINGS = ("text_input", "sampling_parameters?")
_FLAGS = (
    "stream?", "exclude_input_in_output?", "return_finish_reason?", "return_num_input_tokens?",
    "return_num_output_tokens?",
)  # fmt: skip


def _tensors(names: Sequence[str], kind: str) -> list[dict[str, object]]:
    return [
        {"name": name.rstrip("?"), "data_type": kind, "dims": [1], "optional": name.endswith("?")} for name in names
    ]


_CONFIG = {
    "name": PACED,
    "backend": "python",
    "max_batch_size": 0,
    "model_transaction_policy": {"decoupled": True},
    "input": [*_tensors(_STRINGS, "TYPE_STRING"), *_tensors(_FLAGS, "TYPE_BOOL")],
    "output": [
        *_tensors(("text_output", "finish_reason"), "TYPE_STRING"),
        *_tensors(("num_input_tokens", "num_output_tokens"), "TYPE_UINT32"),
    ],
}
_ANSWERS = {
    "/v2": {"name": "triton", "version": "2.51.0", "extensions": []},
    "/v2/repository/index": [{"name": PACED, "version": "1", "state": "READY"}],
    f"/v2/models/{PACED}/config": _CONFIG,
}


def _event(finish: str) -> bytes:
    values = {
        "model_name": PACED,
        "model_version": "1",
        "text_output": TOKEN,
        "finish_reason": finish,
        "num_input_tokens": 7,
        "num_output_tokens": 1,
    }
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN_CHUNK = _chunk(_event("None"))
_LAST_CHUNK = _chunk(_event("length")) + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self.left = 0

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
            self._transport.write(_STREAM)
            self._triton.begin(self)
            return
        answer = json.dumps(_ANSWERS.get(path, {})).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))

    def send(self, count: int = 1) -> None:
        """Send *count* of the tokens that are left."""
        last = count >= self.left
        self.left -= min(count, self.left)
        assert self._transport is not None
        tokens = _TOKEN_CHUNK * max(0, count - last)
        self._transport.write(tokens + _LAST_CHUNK if last else tokens)
        if last:
            self._triton.streams.discard(self)

    def send_each(self, seconds: float) -> None:
        """Send a token every *seconds*, as long as any are left."""
        if self in self._triton.streams:
            self.send()
            asyncio.get_running_loop().call_later(seconds, self.send_each, seconds)


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
            stream.send_each(self._seconds)
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
