"""
The images' health check: exit status 0 when the service in this container answers with 200, else 1 with the reason.

    healthcheck.py [PATH]

asks for ``/health/live``, or for PATH. ``HEALTHCHECK_URL`` says what to ask where port and certificate are not set by
variables. A certificate is not checked, because it is made out to the name that clients use. A service that asks its
clients for certificates is shown its own: it has to be from an authority that it accepts.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

_SECONDS = 2.0


def main() -> None:
    """Ask once."""
    certificate = os.environ.get("TRITON_OPENAI_TLS_CERTIFICATE")
    port = os.environ.get("TRITON_OPENAI_PORT") or "9000"
    path = sys.argv[1] if len(sys.argv) > 1 else "/health/live"
    own = f"{'https' if certificate else 'http'}://127.0.0.1:{port}{path}"
    url = os.environ.get("HEALTHCHECK_URL") or own
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # A proxy that is configured for the rest of the container is not asked for the container itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        if certificate and os.environ.get("TRITON_OPENAI_TLS_CLIENT_CA"):
            # With this an encrypted key is an error, instead of a question to nobody.
            context.load_cert_chain(certificate, os.environ.get("TRITON_OPENAI_TLS_KEY") or None, lambda: "")
        with opener.open(url, timeout=_SECONDS):
            pass
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
