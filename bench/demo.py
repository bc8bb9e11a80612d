"""
``make bench ARGS="--cases demo"``: the demo as a user has it: its language model, alone, over the OpenAI API.

Time to the first token of a warm short chat, tokens per second of one stream, and memory of all its processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

_ROUNDS = 5
_TOKENS = 64


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, tokens per second, and memory in bytes (what processes share counts once)."""

    first_token: float
    speed: float
    memory: int


def measure_demo() -> Demo:
    """Start the demo and measure it."""
    command = [sys.executable, "-m", "triton_openai", "demo", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"{json.loads(process.stdout.readline())['base_url']}/chat/completions"
            for line in process.stdout:
                # It asks questions of its own at first.
                if "Ctrl-C" in line:
                    break
            times = [list(_arrivals(url)) for _ in range(_ROUNDS)]
            memory = sum(map(_memory, _tree(process.pid)))
        finally:
            process.terminate()
    return Demo(
        first_token=median(first - sent for sent, first, *_ in times),
        speed=median((len(rest) + 1) / (rest[-1] - first) for _, first, *rest in times),
        memory=memory,
    )


def _arrivals(url: str) -> Iterator[float]:
    """Yield when a request was sent, and when each of its tokens came."""
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    body = {"model": "ensemble", "messages": messages, "stream": True, "max_tokens": _TOKENS, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    yield time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {") and _text(json.loads(line[6:])):
                yield time.perf_counter()


def _text(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _tree(pid: int) -> list[int]:
    """Return the process *pid* and all below it."""
    pids = [pid]
    for parent in pids:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += map(int, tasks.read_text().split())
    return pids


def _memory(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss: +(\d+)", rollup, re.M)[0]) * 1024
