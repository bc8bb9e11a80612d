"""
Starts Triton with the vLLM backend, another with the companion model, vLLM's own servers, and a service for each.

Ends them and all that they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.installation import Installation
from tests.engine.reasons import COMPANION
from triton_openai.companion.repository import write

_START_SECONDS = 900.0
_END_SECONDS = 60.0
_LORAS = ("lora-a", "lora-b")
# Small enough for two cores: one thread for each engine and not all on the same core, 1 GiB for the KV cache, nothing
# compiled at the first request, nothing fetched or reported.
_ENGINE_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(int(_START_SECONDS)),
    "TOKENIZERS_PARALLELISM": "false",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": "",
}
_CONFIG = """backend: "vllm"
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""


@dataclass(frozen=True)
class Servers:
    """Addresses: of the service, over each of Triton's protocols, and of vLLM's server of each model."""

    ours: Mapping[str, str]
    vllm: Mapping[str, str]


@contextlib.contextmanager
def started(found: Installation, logs: Path, behind: Sequence[str]) -> Iterator[Servers]:
    """
    Start all servers one after the other, and end them at last; what they write goes to files in *logs*.

    *behind* is what the service is in front of: ``backend``, asked over each protocol, or ``companion``, or both.
    """
    with contextlib.ExitStack() as stack:
        vllm = {name: _start_vllm(found, name, logs, stack) for name in ("tiny", "embed")}
        ours = {}
        if "backend" in behind:
            http, grpc = _start_triton(found, logs, stack, "backend")
            ours["http"] = _start_service(found, "http", f"http://127.0.0.1:{http}", logs, stack)
            ours["grpc"] = _start_service(found, "grpc", f"grpc://127.0.0.1:{grpc}", logs, stack)
        if COMPANION in behind:
            http, _ = _start_triton(found, logs, stack, COMPANION)
            ours[COMPANION] = _start_service(found, COMPANION, f"http://127.0.0.1:{http}", logs, stack)
        yield Servers(ours=ours, vllm=vllm)


def _start_triton(found: Installation, logs: Path, stack: contextlib.ExitStack, behind: str) -> tuple[int, int]:
    repository = logs / f"repository-{behind}"
    shutil.rmtree(repository, ignore_errors=True)
    loras = {name: str(found.models / name) for name in _LORAS}
    shared: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    pooling = {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}}
    for name, more in (("tiny", {"max_model_len": 2048, **lora}), ("embed", {"max_model_len": 512, **pooling})):
        model = {"model": str(found.models / name), "max_num_seqs": 32, **shared, **more}
        if behind == COMPANION:
            write(repository, name, model, loras if name == "tiny" else {})
            continue
        version = repository / name / "1"
        version.mkdir(parents=True)
        version.with_name("config.pbtxt").write_text(_CONFIG)
        (version / "model.json").write_text(json.dumps(model))
        (version / "multi_lora.json").write_text(json.dumps(loras))
    http, grpc = _free_ports(2)
    # The stub has to take the standard library of the environment's own Python, and not of another 3.11.
    library = subprocess.run(
        [found.python, "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    variables = {
        **_ENGINE_VARIABLES,
        "LD_LIBRARY_PATH": f"{library}:{found.site / 'nvidia_pytriton.libs'}",
        "PATH": f"{found.python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(found.folder / "venv"),
    }
    command = [
        str(found.server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={found.backends}",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        f"--backend-config=python,stub-timeout-seconds={int(_START_SECONDS)}",
    ]
    _start(command, logs / f"triton-{behind}.log", f"http://127.0.0.1:{http}/v2/health/ready", stack, variables)
    return http, grpc


def _start_vllm(found: Installation, name: str, logs: Path, stack: contextlib.ExitStack) -> str:
    (port,) = _free_ports(1)
    if name == "tiny":
        loras = [f"{lora}={found.models / lora}" for lora in _LORAS]
        more = ["--max-model-len", "2048", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
        more += ["--lora-modules", *loras, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    else:
        more = ["--max-model-len", "512", "--runner", "pooling", "--hf-overrides", '{"is_matryoshka": true}']
    command = [str(found.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(found.models / name)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--distributed-executor-backend", "uni", "--max-num-seqs", "32", *more]
    url = f"http://127.0.0.1:{port}"
    variables = {**_ENGINE_VARIABLES, "PATH": f"{found.python.parent}:{os.environ['PATH']}"}
    _start(command, logs / f"vllm-{name}.log", f"{url}/health", stack, variables)
    return url


def _start_service(found: Installation, name: str, triton: str, logs: Path, stack: contextlib.ExitStack) -> str:
    (port,) = _free_ports(1)
    config = logs / "triton-openai.yaml"
    models: dict[str, dict[str, Any]] = {each: {"tokenizer": str(found.models / each)} for each in ("tiny", "embed")}
    models["tiny"] |= {"loras": list(_LORAS), "max_model_len": 2048, "tool_call_parser": "hermes"}
    models["embed"]["max_model_len"] = 512
    config.write_text(json.dumps({"models": models}))
    command = [sys.executable, "-m", "triton_openai", "serve", "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--triton-url", triton]
    command += ["--responses-store", "memory"]
    url = f"http://127.0.0.1:{port}"
    log = logs / f"triton-openai-{name}.log"
    _start(command, log, f"{url}/health/ready", stack, {})
    return url


def _start(
    command: Sequence[str], log: Path, ready: str, stack: contextlib.ExitStack, variables: Mapping[str, str]
) -> None:
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # A session of its own: an engine whose parent was killed can be found by it.
            start_new_session=True,
            cwd=log.parent,
            env={**os.environ, **variables},
        )
    stack.callback(_end, process)
    while not _answers(ready):
        if process.poll() is not None or time.monotonic() - began > _START_SECONDS:
            raise RuntimeError(f"{log.stem} has not started:\n" + "\n".join(log.read_text().splitlines()[-30:]))
        time.sleep(1)
    print(f"{log.stem} has started after {time.monotonic() - began:.0f} s; log: {log}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    # What it started and left behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
