"""``python -m bench.collector PORT``: where spans go when tracing is measured; takes everything and keeps nothing."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.processes import HOST


class _Handler(BaseHTTPRequestHandler):
    # The service keeps its connection.
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer((HOST, int(sys.argv[1])), _Handler).serve_forever()
