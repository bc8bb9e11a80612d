"""An HTTP server in threads of the tests' own process."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class QuietHttpServer(ThreadingHTTPServer):
    """Serves each connection in a thread. A client that leaves is no error, and prints no traceback into a test."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what is an error of the test itself."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
