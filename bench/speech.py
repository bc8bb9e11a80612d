"""
``python -m bench.speech``: what speech costs the service itself, in front of a Triton whose models compute nothing.

For transcriptions, the CPU time of the service (receive, decode, cut, send, format) as a share of the length of the
audio. For speech, the time from the moment in which the model sends its first part to the first bytes at the client.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import soundfile

from bench.accounting import CpuClock
from bench.figures import table, written
from bench.forms import FORM_TYPE, form_with_file
from bench.processes import HOST
from bench.subjects import Subject, ours
from triton_openai.load.tally import percentile
from triton_openai.tritonserver.embedded import EmbeddedTriton

_CONFIGS: Mapping[str, str] = MappingProxyType(
    {
        "hears": """
input { name: "INPUT_0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT_0" data_type: TYPE_STRING dims: [ 1 ] }
""",
        "speaks": """
model_transaction_policy { decoupled: true }
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "waveform" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "note" value: { string_value: %s } }
""",
    }
)
_SETTINGS = """
models:
  hears: {adapter: transcriber, inputs: {audio: INPUT_0}, outputs: {text: OUTPUT_0}, audio: {max_seconds: 30}}
  speaks: {audio: {sample_rate: 24000}}
"""
#: What is heard: the rate, the channels, libsndfile's names, and the share of its length that it may take.
FILES: Mapping[str, tuple[int, int, str, str | None, float]] = MappingProxyType(
    {
        "WAV, 16 kHz, mono": (16_000, 1, "WAV", "PCM_16", 2),
        "WAV, 44.1 kHz, stereo": (44_100, 2, "WAV", "PCM_16", 2),
        "FLAC, 16 kHz, mono": (16_000, 1, "FLAC", "PCM_16", 4),
        "MP3, 44.1 kHz, stereo": (44_100, 2, "MP3", None, 4),
        "Ogg/Opus, 48 kHz, mono": (48_000, 1, "OGG", "OPUS", 4),
    }
)
#: Formats of speech, of which the first bytes are to be there in so many milliseconds.
FORMATS = ("pcm", "wav", "mp3", "opus", "flac")
_FIRST_BYTES = 20.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.speech", description="What speech costs the service.")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the recordings (120)")
    parser.add_argument("--rounds", type=int, default=5, help="recordings of each kind, texts of each format times 4")
    options = parser.parse_args(arguments)
    files = {name: recording(options.seconds, *kind[:4]) for name, kind in FILES.items()}
    heard: dict[str, list[str]] = {name: [name] for name in files}
    spoken: dict[str, list[str]] = {kind: [kind] for kind in FORMATS}
    for transport in ("http", "grpc"):
        with _service(transport) as (subject, note):
            for name, file in files.items():
                shares = [share for _ in range(options.rounds + 1) if (share := _share(subject, file, options.seconds))]
                heard[name].append(f"{written(percentile(shares[1:], 0.5), 2)} %")
            for kind in FORMATS:
                delays = [_delay(subject, note, kind) for _ in range(4 * options.rounds + 1)][1:]
                spoken[kind] += [written(percentile(delays, share)) for share in (0.5, 0.95)]
    for name, (*_, aim) in FILES.items():
        heard[name].append(f"{aim:g} %")
    print(table(["CPU time of a transcription, of the audio's length", "HTTP", "gRPC", "aim"], [*heard.values()]))
    print()
    header = ["first bytes of speech, ms", "HTTP p50", "p95", "gRPC p50", "p95", "aim"]
    print(table(header, [[*cells, f"{_FIRST_BYTES:g}"] for cells in spoken.values()]))


def recording(seconds: float, rate: int, channels: int, container: str, subtype: str | None) -> bytes:
    """Return a file with noise as loud and as deep as a voice, in syllables, with pauses."""
    generator = np.random.default_rng(1)
    count = int(seconds * rate)
    # Noise that loses 6 dB an octave above 200 Hz, as a voice does about.
    spectrum = np.fft.rfft(generator.standard_normal(count).astype(np.float32))
    spectrum /= np.maximum(1.0, np.fft.rfftfreq(count, 1 / rate) / 200)
    voice = np.fft.irfft(spectrum, count)
    times = np.arange(count) / rate
    voice *= np.clip(np.sin(2 * np.pi * 4 * times), 0, 1) * (times % 5 < 4)
    voice *= 0.5 / np.abs(voice).max()
    target = io.BytesIO()
    # In parts: libsndfile's encoder of Vorbis and Opus has the whole of what it gets on its stack.
    with soundfile.SoundFile(target, "w", rate, channels, subtype=subtype, format=container) as file:
        for start in range(0, count, rate):
            file.write(np.stack([voice[start : start + rate]] * channels, axis=1))
    return target.getvalue()


@contextmanager
def _service(transport: str) -> Iterator[tuple[Subject, Path]]:
    """Yield the service over *transport*, and the file in which the speaker notes its times."""
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as name:
        folder = Path(name)
        note = folder / "note"
        for model, config in _CONFIGS.items():
            version = folder / "models" / model / "1"
            version.mkdir(parents=True)
            shutil.copyfile(Path(__file__).with_name("model") / "speech.py", version / "model.py")
            tensors = config
            if model == "speaks":
                tensors = config % json.dumps(str(note))
            head = f'name: "{model}"\nbackend: "python"\nmax_batch_size: 0\ninstance_group [ {{ kind: KIND_CPU }} ]'
            text = head + tensors
            (version.parent / "config.pbtxt").write_text(text)
        settings = folder / "settings.yaml"
        settings.write_text(_SETTINGS)
        triton = EmbeddedTriton(model_repository=folder / "models", environment=os.environ)
        triton.start()
        try:
            if transport == "http":
                url = triton.http_url
            else:
                url = triton.grpc_url
            with ours(f"ours-{transport}", url, folder, options=["--config", str(settings)]) as subject:
                yield subject, note
        finally:
            triton.stop()


def _share(subject: Subject, file: bytes, seconds: float) -> float:
    """Return the CPU time that the service takes for a transcription of *file*, in percent of its length."""
    body = form_with_file({"model": "hears", "response_format": "verbose_json"}, file, "a")
    clock = CpuClock(subject.relay)
    before = clock.read()
    with _ask(subject, "transcriptions", body, FORM_TYPE) as answer:
        transcript = json.load(answer)
    assert transcript["segments"], transcript
    return (clock.read() - before) / 1e9 / seconds * 100


def _delay(subject: Subject, note: Path, kind: str) -> float:
    """Return the milliseconds from the model's first part to the first bytes of a file of *kind*."""
    body = {"model": "speaks", "voice": "alloy", "input": "Triton answers.", "response_format": kind}
    with _ask(subject, "speech", json.dumps(body).encode(), "application/json") as answer:
        first = answer.read(1)
        came = time.monotonic_ns()
        assert first
        assert answer.read()
    return (came - int(note.read_text())) / 1e6


def _ask(subject: Subject, endpoint: str, body: bytes, kind: str) -> Any:
    url = f"http://{HOST}:{subject.target.port}/v1/audio/{endpoint}"
    return urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind}), timeout=60)


if __name__ == "__main__":
    main()
