"""
What listens at an address that does not behave like Triton: a person mixes up ports more often than anything else.

One plain connection tells. A gRPC server begins with its HTTP/2 settings whatever it is sent; a TLS server answers what
is no handshake with an alert, or hangs up; an HTTP server answers a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from urllib.parse import SplitResult, urlsplit

# Longest answer that is read: its head and a short body tell everything.
_MOST = 16 * 1024


async def explain(url: str, *, timeout: float) -> str | None:
    """
    Return what seems to listen at *url*, an address of Triton, and what to write instead; ``None`` if nothing is wrong.

    Connects once, for *timeout* seconds at most. Sends no credentials.
    """
    parts = urlsplit(url)
    tls, grpc = parts.scheme in ("https", "grpcs"), parts.scheme.startswith("grpc")
    port = parts.port or (8001 if grpc else 443 if tls else 8000)
    answer, speaks_tls = b"", False
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout):
            answer = await _ask(parts.hostname or "localhost", port, parts)
            speaks_tls = not tls and await _speaks_tls(parts.hostname or "localhost", port, answer)
    place = parts.netloc if parts.port else f"{parts.netloc}:{port}"
    if speaks_tls:
        return f"{url} wants TLS: write {'grpcs' if grpc else 'https'}://{place}."
    if _is_http2(answer):
        if grpc:
            return f"{url} does not use TLS: write grpc://{place}." if tls else None
        return f"{url} looks like a gRPC port: write grpc://{place}, or use Triton's HTTP port (8000 by default)."
    if not answer.startswith(b"HTTP/"):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"\r\nserver: triton-openai" in head.lower() and _is_openai_error(body):
        return (
            f"{url} looks like another triton-openai, not like a Triton: write the address of the Triton behind it "
            "(http://HOST:8000 or grpc://HOST:8001 by default)."
        )
    if grpc:
        return f"{url} looks like an HTTP port: write http://{place}, or use Triton's gRPC port (8001 by default)."
    if tls:
        return f"{url} does not use TLS: write http://{place}."
    if head.split(b" ", 2)[1:2] == [b"404"]:
        return (
            f"{url} answers HTTP, but does not look like a Triton: there is nothing at /v2. Triton's HTTP port is 8000 "
            "by default; 8001 is for gRPC, and 8002 for metrics only."
        )
    return None


async def _ask(host: str, port: int, parts: SplitResult) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        path = "" if parts.scheme.startswith("grpc") else parts.path.rstrip("/")
        writer.write(f"GET {path}/v2 HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < _MOST and (more := await reader.read(_MOST)):
            answer += more
            if not answer.startswith(b"HTTP/"):
                # Everything else shows in its first bytes, and gRPC servers may keep the connection.
                break
        return answer
    finally:
        writer.close()


async def _speaks_tls(host: str, port: int, answer: bytes) -> bool:
    """Return whether the server that gave *answer* to plain HTTP takes TLS."""
    if answer.startswith(b"\x15\x03") or b"plain HTTP request was sent to HTTPS port" in answer:
        return True
    if answer:
        return False
    # It has hung up: some servers do so without an alert.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        # A server that wants to see a certificate is one, too.
        return "ALERT" in (error.reason or "")
    writer.close()
    return True


def _is_http2(answer: bytes) -> bool:
    """Return whether *answer* begins with a frame of settings on stream 0 (RFC 9113, 6.5)."""
    return len(answer) >= 9 and answer[3:5] in (b"\x04\x00", b"\x04\x01") and answer[5:9] == bytes(4)


def _is_openai_error(body: bytes) -> bool:
    """Return whether *body* is OpenAI's envelope; Triton's own errors, and those of a relay, are texts."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        return False
    return isinstance(error, dict)
