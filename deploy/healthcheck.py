"""
The images' health check: exit status 0 when the service in this container answers, else 1 with the reason.

``HEALTHCHECK_URL`` says what to ask where port and certificate are not set by variables. A certificate is not checked,
because it is made out to the name that clients use; a service that asks for one of its clients cannot be asked so.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

_SECONDS = 2.0


def main() -> None:
    """Ask once."""
    scheme = "https" if os.environ.get("TRITON_OPENAI_TLS_CERTIFICATE") else "http"
    port = os.environ.get("TRITON_OPENAI_PORT") or "9000"
    url = os.environ.get("HEALTHCHECK_URL") or f"{scheme}://127.0.0.1:{port}/health/live"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # A proxy that is configured for the rest of the container is not asked for the container itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=_SECONDS):
            pass
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
