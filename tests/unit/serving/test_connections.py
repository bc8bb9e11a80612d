"""Connections of clients: whole responses, which reach them as aiohttp's own do."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError, web

from tests.cases import every_case
from triton_openai.serving.connections import WholeResponse

_DATE = re.compile(r"Date: \w{3}, \d\d \w{3} 20[2-9]\d \d\d:\d\d:\d\d GMT")
_REQUESTS = (
    "GET {} HTTP/1.1\r\nHost: a\r\n\r\n",
    "HEAD {} HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET {} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "GET {} HTTP/1.0\r\nHost: a\r\n\r\n",
    "GET {} HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
)
_JSON = {"body": b'{"name": "twenty or so"}', "content_type": "application/json"}
# What a response is made of, and which of its methods is called.
_RESPONSES: tuple[tuple[Any, str], ...] = (
    ({**_JSON, "status": 404, "headers": {"x-one": "a"}}, ""),
    (_JSON, "force_close"),
    (_JSON, "enable_chunked_encoding"),
    ({"body": b""}, "enable_chunked_encoding"),
    ({"body": b"", "status": 204}, ""),
    ({}, ""),
)


async def _exchanged(port: int, request: str) -> list[str]:
    """Send *request*, and one more if it may; return the answers: the first head's lines in order, and the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    more = "GET /plain HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    writer.write(f"{request}{'' if 'close' in request else more}".encode())
    try:
        answer = (await asyncio.wait_for(reader.read(), 120)).decode()
    finally:
        writer.close()
    head, _, rest = _DATE.sub("Date: now", answer).partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return [status, *sorted(lines), rest]


@every_case("request_text", _REQUESTS)
async def test_a_whole_response_is_sent_as_aiohttp_sends_it(aiohttp_server, request_text):
    """The same lines in the head, the same body, and the connection stays open for as many requests."""

    async def handle(request: web.Request) -> web.StreamResponse:
        kind = WholeResponse if "whole" in request.path else web.Response
        fields, method = _RESPONSES[int(request.query["case"])]
        response = kind(**{"body": io.BytesIO(b"a file"), **fields})
        if method:
            getattr(response, method)()
        return response

    async def plain(_: web.Request) -> web.Response:
        return web.Response(text="next")

    async def sign(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "me"

    app = web.Application()
    app.router.add_get("/{kind:whole|own}", handle)
    app.router.add_get("/plain", plain)
    app.on_response_prepare.append(sign)
    server = await aiohttp_server(app)
    for case in range(len(_RESPONSES)):
        own, whole = [
            await _exchanged(server.port, request_text.format(f"/{kind}?case={case}")) for kind in ("own", "whole")
        ]
        assert own == whole, case


@every_case("value", ["a\r\nx-other: b", "a\nx-other: b", "a\rb"])
async def test_a_header_is_one_line(aiohttp_client, value):
    """As in aiohttp, what is written into a header cannot add another one, or begin the body: nothing is sent."""

    async def handler(request):
        return WholeResponse(body=b"{}", headers={"x-one": value if "bad" in request.query else "a"})

    app = web.Application()
    app.router.add_get("/", handler)
    client = await aiohttp_client(app)

    assert "a" == (await client.get("/")).headers["x-one"]
    with pytest.raises(ServerDisconnectedError):
        await client.get("/?bad")
