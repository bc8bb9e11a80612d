"""
``python -m bench.floor PORT [--access-log]``: the least that an aiohttp service does for a chat.

It reads the JSON body and writes three events, or one JSON object. There is no Triton behind it. With ``--access-log``,
aiohttp writes its usual line for each request to standard error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from bench.processes import HOST
from bench.repository import TOKEN

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def _chunk(delta: dict[str, str]) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    chunk = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "floor", "choices": [choice]}
    return b"data: " + _encode(chunk) + b"\n\n"


async def _chat(request: web.Request) -> web.StreamResponse:
    if _decode(await request.read()).get("stream"):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in (_chunk({"role": "assistant"}), _chunk({"content": TOKEN}), _chunk({}) + b"data: [DONE]\n\n"):
            await response.write(event)
        await response.write_eof()
        return response
    choice = {"index": 0, "message": {"role": "assistant", "content": TOKEN}, "finish_reason": "length"}
    completion = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "floor", "choices": [choice]}
    return web.Response(body=_encode(completion), content_type="application/json")


async def _ready(_: web.Request) -> web.Response:
    return web.Response()


async def _run(port: int, *, logged: bool) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/health/ready", _ready)
    runner = web.AppRunner(app, access_log=logging.getLogger("access") if logged else None)
    await runner.setup()
    await web.TCPSite(runner, HOST, port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    uvloop.run(_run(int(sys.argv[1]), logged="--access-log" in sys.argv))
