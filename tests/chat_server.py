"""An OpenAI-compatible service in a thread, whose answers a test writes, for commands that have the main thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import QuietHttpServer


def event(**delta: Any) -> bytes:
    """Return an event with a part of a chat's answer."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    """Return the last event of an answer of so many *tokens*, and the end."""
    body = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    return b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"


HELLO = (event(role="assistant"), event(content="Hel"), event(content="lo!"), usage(2))


class ChatServer:
    """What the service answers, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.headers = {"Content-Type": "text/event-stream"}
        #: Parts of the body of an answer.
        self.answer: Sequence[bytes] = HELLO
        self.models: Any = {"object": "list", "data": [{"id": "m"}]}
        #: Whether connections end with their answers.
        self.closes = False
        #: Whether an answer never ends.
        self.hangs = False
        #: Called when a request has come that is none for a list of models.
        self.on_request: Callable[[], object] = lambda: None
        #: The bodies and headers of all requests but those for lists of models.
        self.asked: list[dict[str, Any]] = []
        self.sent: list[dict[str, str]] = []
        #: Set when a part of an answer is out; never cleared.
        self.begun = threading.Event()
        self.ended = threading.Event()


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Serve on a port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps(server.models).encode()
            self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
            self.wfile.write(body)

        def do_POST(self) -> None:
            server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.sent.append(dict(self.headers))
            server.on_request()
            headers = {**server.headers, "Transfer-Encoding": "chunked"}
            if server.closes:
                headers["Connection"] = "close"
                self.close_connection = True
            self._head(server.status, headers)
            for part in server.answer:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
                server.begun.set()
            if server.hangs:
                server.ended.wait(120)
                self.close_connection = True
                return
            self.wfile.write(b"0\r\n\r\n")

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with QuietHttpServer(("127.0.0.1", 0), Handler) as http:
        server = ChatServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            http.shutdown()
            thread.join()
