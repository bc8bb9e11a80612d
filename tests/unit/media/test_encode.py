"""Encoders that write for readers who cannot go back, joins of parts, and audio of operators and models."""

from __future__ import annotations

import io
import sys
import wave
from typing import Any, cast

import av
import numpy as np
import pytest
import soundfile

from tests.cases import every_case
from triton_openai.errors import UnsupportedParameter, UpstreamError
from triton_openai.media import encode as encode_module
from triton_openai.media.encode import Joiner, Samples, _Sink, encoder, read_audio, resampled, samples_of
from triton_openai.media.speech_formats import Format, encoding_cost, file_rate


def tone(rate: int, seconds: float = 2.0, pitch: float = 440.0) -> Samples:
    """Return a tone."""
    steps = np.arange(round(rate * seconds)) / rate
    return np.asarray(0.5 * np.sin(2 * np.pi * pitch * steps), np.float32)


def pitch_of(samples: Any, rate: int) -> float:
    """Return the loudest frequency in *samples*."""
    spectrum = np.abs(np.fft.rfft(samples))
    return float(spectrum.argmax() * rate / len(samples))


@every_case(
    "kind, rate, expected",
    [
        ("mp3", 24_000, 24_000), ("mp3", 16_000, 16_000), ("mp3", 20_000, 22_050), ("mp3", 96_000, 48_000),
        ("opus", 24_000, 48_000), ("opus", 22_050, 48_000), ("aac", 24_000, 24_000), ("aac", 20_000, 22_050),
        ("flac", 22_050, 22_050), ("wav", 22_050, 22_050), ("pcm", 16_000, 24_000), ("pcm", 44_100, 24_000),
    ],
)  # fmt: skip
def test_every_rate(kind: Format, rate: int, expected: int) -> None:
    """A rate that a format does not have becomes one that it has: the sound and the length stay."""
    made, samples, data = encoder(kind, rate), tone(rate), b""
    for start in range(0, len(samples), 3_333):
        data += made.encode(samples[start : start + 3_333])
    data += made.finish()

    assert encoding_cost(kind, rate, rate) >= encoding_cost(kind, file_rate(kind, rate), file_rate(kind, rate)) > 0
    if kind == "pcm":
        found, found_rate = np.frombuffer(data, "<i2") / 32_768, expected
    else:
        with av.open(io.BytesIO(data), "r") as file:
            found = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
            found_rate = file.streams.audio[0].rate
    assert expected == found_rate
    assert 1.99 < len(found) / found_rate < 2.15
    assert abs(pitch_of(found, found_rate) - 440) < 2


@every_case("rate, seconds", [(24_000, 2.0), (16_000, 0.05), (22_050, 30.0)])
def test_flac_says_how_long_it_is(rate: int, seconds: float) -> None:
    """Nothing leaves before the number of samples is in the head: libraries that read all at once need it."""
    made = encoder("flac", rate)
    samples = tone(rate, seconds)
    parts = [made.encode(samples[start : start + 3_333]) for start in range(0, len(samples), 3_333)]
    assert {b""} >= set(parts)
    data = made.finish()
    assert len(samples) == int.from_bytes(data[18:26], "big") & 0xF_FFFF_FFFF
    found, found_rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (rate, len(samples)) == (found_rate, len(found))


def test_flac_that_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long file is not kept in memory: it leaves while it is made, and decoders of streams read it."""
    monkeypatch.setattr(encode_module, "_MAX_WHOLE", 10_000)
    made = encoder("flac", 24_000)
    noise = np.asarray(np.random.default_rng(1).normal(0, 0.1, 48_000), np.float32)
    parts = [made.encode(noise[start : start + 4_800]) for start in range(0, len(noise), 4_800)]
    assert any(parts)
    data = b"".join(parts) + made.finish()
    with av.open(io.BytesIO(data), "r") as file:
        found = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
    assert len(noise) == len(found)


def test_full_scale() -> None:
    """What is too loud is cut, and does not wrap around."""
    made = encoder("pcm", 24_000)
    data = made.encode(np.array([-2, -1, 0, 0.5, 1, 2], np.float32))

    assert [-32_768, -32_768, 0, 16_384, 32_767, 32_767] == np.frombuffer(data, "<i2").tolist()


def test_an_empty_file() -> None:
    """Without any samples a WAV file still has its head."""
    assert 44 == len(encoder("wav", 24_000).finish())


def test_a_sink_does_not_go_back() -> None:
    """What is written over bytes that have left is dropped, and what is beside them is kept."""
    sink = _Sink()
    sink.write(b"abcdef")
    sink.seek(1)
    sink.write(b"BC")
    assert b"aBCdef" == sink.take()
    sink.seek(4)
    sink.write(b"EFGH")
    assert (b"GH", 8) == (sink.take(), sink.tell())
    sink.seek(0)
    sink.write(b"A")
    assert (b"", 1) == (sink.take(), sink.tell())
    assert 8 == sink.seek(0, io.SEEK_END)


@every_case("module, kind, rate, extra", [("soundfile", "mp3", 24_000, "audio"), ("soxr", "pcm", 16_000, "audio"),
                                          ("av", "aac", 24_000, "media")])  # fmt: skip
def test_what_is_not_installed(module: str, kind: Format, rate: int, extra: str) -> None:
    """A format that needs an extra is refused by its name; wav, and pcm at its rate, need none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        with pytest.raises(UnsupportedParameter, match=rf"\[{extra}\]") as caught:
            encoder(kind, rate)
        assert "response_format" == caught.value.param
        for free in (encoder("wav", 16_000), encoder("pcm", 24_000)):
            assert free.encode(tone(24_000))


class _WithoutLibrary:
    """Finds no module: each fails as soundfile does where its C library is missing."""

    def find_spec(self, name: str, *_: object) -> None:
        """Fail for the modules of the extra."""
        if name in ("soundfile", "soxr"):
            raise OSError("cannot load library 'libsndfile.so'")


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without its C library counts as not installed."""
    for name in ("soundfile", "soxr"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_WithoutLibrary(), *sys.meta_path])
    for kind, rate in (("mp3", 24_000), ("pcm", 16_000)):
        with pytest.raises(UnsupportedParameter, match=r"\[audio\]"):
            encoder(cast(Format, kind), rate)
    for read in (lambda: read_audio(b"fLaC"), lambda: resampled(tone(16_000), 16_000, 24_000)):
        with pytest.raises(ValueError, match=r"\[audio\]"):
            read()


@every_case(
    "data, datatype, expected",
    [
        (np.array([0.5, -1], "<f4"), "FP32", [0.5, -1]),
        (np.array([0.5, -1], "<f2"), "FP16", [0.5, -1]),
        (np.array([0.5, -1], "<f8"), "FP64", [0.5, -1]),
        (np.array([16_384, -32_768], "<i2"), "INT16", [0.5, -1]),
    ],
)
def test_samples(data: Any, datatype: str, expected: list[float]) -> None:
    """Every type of samples becomes numbers from -1 to 1."""
    assert expected == samples_of(data.tobytes(), datatype).tolist()


@every_case("data, datatype", [(np.array([np.nan], "<f4"), "FP32"), (np.array([np.inf], "<f2"), "FP16"),
                               (np.zeros(3, np.uint8), "INT16")])  # fmt: skip
def test_what_is_no_audio(data: Any, datatype: str) -> None:
    """NaN and infinity, and half a sample, are the model's mistake."""
    with pytest.raises(UpstreamError):
        samples_of(data.tobytes(), datatype)


def test_joins() -> None:
    """Where two parts overlap, one fades out while the other fades in, in equal steps; the rest is as it was."""
    joiner = Joiner(3)
    parts = [np.full(size, value, np.float32) for size, value in ((5, 1.0), (6, 2.0), (2, 4.0))]
    joined = np.concatenate([*(joiner.join(part) for part in parts), joiner.rest()])

    assert [1, 1, 1, 1.5, 2, 2, 2, 4] == joined.tolist()[:8]
    assert 5 + 3 + 0 == len(joined)
    assert [] == joiner.rest().tolist()
    # Without an overlap, parts are as they are.
    assert parts[0] is Joiner(0).join(parts[0])


@every_case("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_recordings(form: str) -> None:
    """Channels are mixed into one."""
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone(16_000), np.zeros(32_000)], axis=1), 16_000, format=form)
    samples, rate = read_audio(file.getvalue())

    assert 16_000 == rate
    assert 1.99 < len(samples) / rate < 2.1
    assert 0.2 < np.abs(samples).max() < 0.3


def test_recordings_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library reads WAV files of 16 bits, at the rate that they have; the rest is refused with a hint."""
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone(16_000)] * 2, axis=1), 16_000, format="WAV", subtype="PCM_16")
    wide = io.BytesIO()
    with wave.open(wide, "wb") as written:
        written.setparams((1, 3, 16_000, 0, "NONE", ""))
        written.writeframes(b"abc")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    samples, rate = read_audio(file.getvalue())
    assert (32_000, 16_000) == (len(samples), rate)
    assert samples is resampled(samples, rate, 16_000)
    with pytest.raises(ValueError, match=r"\[audio\]"):
        resampled(samples, rate, 24_000)
    for data in (b"", b"RIFF", b"fLaC", wide.getvalue()):
        with pytest.raises(ValueError, match=r"\[audio\]"):
            read_audio(data)


@every_case("data", [b"", b"RIFF", b"ID3" + bytes(200), bytes(5000)])
def test_what_cannot_be_read(data: bytes) -> None:
    """A file that is no audio is told from one that is."""
    with pytest.raises(ValueError, match=r"not audio|is empty"):
        read_audio(data)


@every_case("size", [0, 0xFFFF_FFFF])
def test_audio_that_was_streamed(size: int) -> None:
    """A model, or an operator's recorder, may not know how long its file is when it writes the head."""
    file = io.BytesIO()
    soundfile.write(file, tone(16_000), 16_000, format="WAV", subtype="PCM_16")
    data = bytearray(file.getvalue())
    data[4:8] = data[40:44] = size.to_bytes(4, "little")
    samples, rate = read_audio(bytes(data))
    assert (32_000, 16_000) == (len(samples), rate)
