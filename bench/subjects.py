"""What is measured: ways from a client to the same Triton."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from bench.messages import Target
from bench.processes import HOST, free_port, running, wait_until_answers
from bench.repository import FLOOD_CALL, PACED_CALL
from triton_openai.tritonserver.embedded import EmbeddedTriton

# By this the service knows how the model writes its calls.
_TOOLS = Path(__file__).with_name("tools.jinja")


@dataclass(frozen=True)
class Subject:
    """One way, ready to be used: what to send where, and which process (if any) carries it."""

    name: str
    target: Target
    relay: tuple[int, ...] = ()
    log: Path | None = None


# Both directions of buffering off, connections kept on both sides, one worker: what an operator puts in front of a
# stream. It runs as whoever runs the benchmark, and everything it writes is in its own folder.
_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    tcp_nodelay on;
    upstream triton {{ server {triton}; keepalive 512; keepalive_requests 1000000; }}
    server {{
        listen {host}:{port} backlog=4096;
        location / {{
            proxy_pass http://triton;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def _triton_http(name: str, triton: EmbeddedTriton, folder: Path) -> contextlib.AbstractContextManager[Subject]:
    return contextlib.nullcontext(Subject(name, control(triton)))


def _triton_grpc(name: str, triton: EmbeddedTriton, folder: Path) -> contextlib.AbstractContextManager[Subject]:
    return contextlib.nullcontext(Subject(name, _target("grpc", triton.grpc_url)))


@contextlib.contextmanager
def _nginx(name: str, triton: EmbeddedTriton, folder: Path) -> Iterator[Subject]:
    port = free_port()
    config = folder / "nginx.conf"
    log = folder / "nginx.log"
    config.write_text(_NGINX.format(folder=folder, triton=urlsplit(triton.http_url).netloc, host=HOST, port=port))
    with running([nginx_path() or "nginx", "-c", str(config), "-p", str(folder)], log) as pid:
        wait_until_answers(port, "/v2/health/ready", log)
        yield Subject(name, Target(protocol="generate", host=HOST, port=port), (pid,), log)


@contextlib.contextmanager
def _floor(name: str, triton: EmbeddedTriton, folder: Path, *options: str) -> Iterator[Subject]:
    port = free_port()
    log = folder / f"{name}.log"
    with running([sys.executable, "-m", "bench.floor", str(port), *options], log) as pid:
        wait_until_answers(port, "/health/ready", log)
        yield Subject(name, Target(protocol="chat", host=HOST, port=port), (pid,), log)


def _floor_logged(name: str, triton: EmbeddedTriton, folder: Path) -> contextlib.AbstractContextManager[Subject]:
    return _floor(name, triton, folder, "--access-log")


def _ours_http(name: str, triton: EmbeddedTriton, folder: Path) -> contextlib.AbstractContextManager[Subject]:
    return ours(name, triton.http_url, folder)


def _ours_grpc(name: str, triton: EmbeddedTriton, folder: Path) -> contextlib.AbstractContextManager[Subject]:
    return ours(name, triton.grpc_url, folder)


@contextlib.contextmanager
def _ours_traced(name: str, triton: EmbeddedTriton, folder: Path) -> Iterator[Subject]:
    port = free_port()
    log = folder / "collector.log"
    with running([sys.executable, "-m", "bench.collector", str(port)], log):
        wait_until_answers(port, "/", log)
        # Within the shortest measurement, so that sending is in it.
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{port}", "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with ours(name, triton.http_url, folder, environment) as subject:
            yield subject


@contextlib.contextmanager
def ours(
    name: str, url: str, folder: Path, environment: dict[str, str] | None = None, *, prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[Subject]:  # fmt: skip
    """
    Run the service in front of the Triton at *url*, with more *options*.

    *prefix* is the program that runs its interpreter.
    """
    port = free_port()
    log = folder / f"{name}.log"
    options = ["--host", HOST, "--port", str(port), "--triton-url", url, "--chat-template", "chatml", *options]
    for model in (PACED_CALL, FLOOD_CALL):
        options += ["--chat-template", f"{model}={_TOOLS}"]
    command = [*(prefix or [sys.executable]), "-m", "triton_openai", "serve", *options]
    with running(command, log, environment) as pid:
        wait_until_answers(port, "/health/ready", log)
        yield Subject(name, Target(protocol="chat", host=HOST, port=port), (pid,), log)


def _target(protocol: str, url: str) -> Target:
    parts = urlsplit(url)
    return Target(protocol="grpc" if protocol == "grpc" else "generate", host=HOST, port=parts.port or 0)


def control(triton: EmbeddedTriton) -> Target:
    """Return the way to *triton* itself, whatever is measured."""
    return _target("generate", triton.http_url)


def nginx_path() -> str | None:
    """Return where nginx is; distributions put it where a user's PATH does not always look."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def can_trace() -> bool:
    """Say whether what sends spans is installed (the extra ``otlp``)."""
    try:
        metadata.version("opentelemetry-exporter-otlp-proto-http")
    except metadata.PackageNotFoundError:
        return False
    return True


Starter = Callable[[str, EmbeddedTriton, Path], contextlib.AbstractContextManager[Subject]]

# In the order of the report.
SUBJECTS: Mapping[str, Starter] = MappingProxyType(
    {
        "triton-http": _triton_http,
        "triton-grpc": _triton_grpc,
        "nginx": _nginx,
        "floor": _floor,
        "floor-logged": _floor_logged,
        "ours-http": _ours_http,
        "ours-grpc": _ours_grpc,
        "ours-traced": _ours_traced,
    }
)
