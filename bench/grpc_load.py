"""Streams over Triton's gRPC: one ``ModelStreamInfer`` call for each answer, all on one channel."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from bench.messages import Load
from bench.repository import MARK
from bench.wire import FLAGS, OUTPUTS, PROMPT
from triton_openai.load.tally import Tally

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def infer_request(model: str, tokens: int) -> bytes:
    """Return the request that `bench.wire.http_request` makes, as a message of the KServe protocol."""
    message: Any = service_pb2.ModelInferRequest(model_name=model)
    texts = {"text_input": PROMPT, "sampling_parameters": json.dumps({"max_tokens": tokens})}
    for name, text in texts.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(struct.pack("<I", len(text)) + text.encode())
    for name in ("stream", *FLAGS):
        message.inputs.add(name=name, datatype="BOOL", shape=[1])
        message.raw_input_contents.append(b"\1")
    for name in OUTPUTS:
        message.outputs.add(name=name)
    content: bytes = message.SerializeToString()
    return content


async def run_grpc(load: Load, tally: Tally) -> None:
    """Start the streams of *load*, let *tally* measure, and cancel them."""
    request = infer_request(load.model, load.tokens)
    async with grpc.aio.insecure_channel(f"{load.target.host}:{load.target.port}") as channel:
        # Messages stay bytes: parsing them would be the client's cost and not the server's.
        infer: Any = channel.stream_stream(_METHOD)

        async def stream(delay: float) -> None:
            await asyncio.sleep(delay)
            of_stream = True
            try:
                while await _answer(infer(), request, tally, of_stream=of_stream):
                    of_stream = False
            except (grpc.RpcError, ValueError) as error:
                tally.failed(str(error))

        streams = [asyncio.create_task(stream(load.ramp * index / load.streams)) for index in range(load.streams)]
        try:
            await tally.measure()
            await tally.drain(lambda: all(task.done() for task in streams))
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def _answer(call: Any, request: bytes, tally: Tally, *, of_stream: bool) -> bool:
    """Ask once and read the answer; return whether to ask again."""
    begun = time.perf_counter()
    last: float | None = None
    try:
        await call.write(request)
        await call.done_writing()
        while (message := await call.read()) is not grpc.aio.EOF:
            now = time.perf_counter()
            # Lengths in the message may be the mark's byte by chance: there is one token in each.
            if MARK not in message:
                raise ValueError(f"a message without a token: {message[:300]!r}")
            if last is None:
                tally.first(now - begun, of_stream=of_stream)
            tally.tokens(1, None if last is None else now - last)
            last = now
    finally:
        call.cancel()
    if last is None:
        raise ValueError("an answer without a token")
    return tally.answered(last - begun)
