"""
``python -m bench.realtime``: how long after the end of a word its text arrives in a realtime session.

The recording of ten seconds in PyPI's ``moonshine-voice`` is sent as fast as it was spoken. The service runs:
``make demo ARGS=--speech``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import soundfile
import soxr

from bench.figures import table, written
from triton_openai.load.tally import percentile

_RATE = 24_000
# Seconds of audio in an event, and of silence behind the recording: the last turn ends in it.
_PIECE = 0.02
_SILENCE = 1.5
# A root mean square of -40 dBFS over a piece: what is louder belongs to a word.
_LOUD = 0.01
_PREFIX = "conversation.item.input_audio_transcription"


def recording() -> Any:
    """Return the samples of the recording, and of the silence behind it. Raises :class:`SystemExit` without it."""
    package = find_spec("moonshine_voice")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The recording is not installed: make .venv/.spoken")
    path = Path(package.submodule_search_locations[0], "assets", "beckett.wav")
    samples, rate = soundfile.read(path, dtype="float32")
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    samples = soxr.resample(samples, rate, _RATE)
    return np.concatenate([samples, np.zeros(int(_SILENCE * _RATE), np.float32)])


def end_of_word(samples: Any, milliseconds: float) -> float:
    """Return the second at which the last word before *milliseconds* of *samples* ends."""
    size = int(_PIECE * _RATE)
    count = int(milliseconds / 1000 * _RATE) // size
    pieces = samples[: count * size].reshape(-1, size)
    loud = np.flatnonzero(np.sqrt(np.square(pieces).mean(axis=1)) > _LOUD)
    return float(loud[-1] + 1) * _PIECE


async def session(url: str, model: str, silence: int) -> dict[str, list[float]]:
    """Return the milliseconds from the end of a turn's last word to each of its events."""
    samples = recording()
    delays: dict[str, list[float]] = {"speech_stopped": [], "first delta": [], "completed": []}
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(f"{url}/v1/realtime?intent=transcription") as socket,
    ):
        detection = {"type": "server_vad", "silence_duration_ms": silence}
        settings = {"transcription": {"model": model, "language": "en"}, "turn_detection": detection}
        update = {"type": "transcription", "audio": {"input": settings}}
        await socket.send_json({"type": "session.update", "session": update})
        began = time.monotonic()
        sending = asyncio.create_task(_send(socket, samples, began))
        ends: dict[str, float] = {}
        with_delta: set[str] = set()
        missing = 1
        while missing or not sending.done():
            try:
                event = await socket.receive_json(timeout=1)
            except TimeoutError:
                # The last turn may end before the silence behind it.
                continue
            now = time.monotonic() - began
            kind = event["type"]
            item = event.get("item_id", "")
            if kind == "error" or kind.endswith(".failed"):
                raise SystemExit(str(event))
            if kind.endswith("speech_stopped"):
                ends[item] = end_of_word(samples, event["audio_end_ms"])
                delays["speech_stopped"].append((now - ends[item]) * 1000)
            elif kind == f"{_PREFIX}.delta" and item in ends and item not in with_delta:
                with_delta.add(item)
                delays["first delta"].append((now - ends[item]) * 1000)
            elif kind == f"{_PREFIX}.completed":
                delays["completed"].append((now - ends[item]) * 1000)
            missing = len(ends) - len(delays["completed"])
        await sending
    return delays


async def _send(socket: Any, samples: Any, began: float) -> None:
    size = int(_PIECE * _RATE)
    for start in range(0, len(samples), size):
        piece = (samples[start : start + size].clip(-1, 1) * 32_767).astype("<i2").tobytes()
        # A piece is sent when it was spoken.
        await asyncio.sleep(max(0.0, began + (start + size) / _RATE - time.monotonic()))
        await socket.send_json({"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the delays."""
    parser = argparse.ArgumentParser(prog="python -m bench.realtime", description="The delay of a realtime session.")
    parser.add_argument("--url", default="http://127.0.0.1:9000", help="the service (http://127.0.0.1:9000)")
    parser.add_argument("--model", default="whisper-1", help="the recognizer (whisper-1)")
    parser.add_argument("--silence", type=int, default=500, help="silence that ends a turn, in ms (500)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the recording is sent (3)")
    options = parser.parse_args(arguments)
    delays: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, values in asyncio.run(session(options.url, options.model, options.silence)).items():
            delays.setdefault(name, []).extend(values)
    rows = [
        [name, str(len(values)), written(percentile(values, 0.5)), written(percentile(values, 0.95))]
        for name, values in delays.items()
        if values
    ]
    print(table(["from the end of a word, ms", "turns", "p50", "p95"], rows))


if __name__ == "__main__":
    main()
