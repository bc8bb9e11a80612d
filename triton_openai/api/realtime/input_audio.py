"""The audio of a transcription session, in one format: what is kept of it, and where speech starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from triton_openai.api.realtime.events import AudioFormat
from triton_openai.media.pcm import SAMPLE_SIZE, as_floats, decode_g711
from triton_openai.media.voice_activity import SpeechEnded, SpeechStarted, VoiceActivity

_LAWS: dict[str, Literal["ULAW", "ALAW"]] = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


class InputAudio:
    """
    The audio in *audio_format* that follows *before* milliseconds of other audio of the session.

    *activity* finds speech in it; without it, the client says where a turn ends. Positions are samples from the
    beginning of this audio.
    """

    def __init__(self, audio_format: AudioFormat, activity: VoiceActivity | None, before: int = 0) -> None:
        self.rate = audio_format.samples_per_second
        self.activity = activity
        #: The end of the audio.
        self.end = 0
        self._before = before
        self._law = _LAWS.get(audio_format.type)
        # The first half of a sample that was sent in two events.
        self._half = b""
        self._start = 0
        self._pcm = bytearray()

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return len(self._pcm)

    @property
    def bytes_per_second(self) -> int:
        """The size of a second of audio, as it is sent."""
        if self._law is not None:
            return self.rate
        return self.rate * SAMPLE_SIZE

    def append(self, data: bytes) -> Sequence[SpeechStarted | SpeechEnded]:
        """Take further audio, as it is sent, and return what happens in it. Not to be called twice at the same time."""
        pcm = self._decoded(data)
        self._pcm += pcm
        self.end += len(pcm) // SAMPLE_SIZE
        if self.activity is None:
            return ()
        return self.activity.feed(as_floats(pcm))

    def _decoded(self, data: bytes) -> bytes:
        """Return samples of 16 bits."""
        if self._law is not None:
            return decode_g711(data, self._law)
        data = self._half + data
        whole = len(data) // SAMPLE_SIZE * SAMPLE_SIZE
        self._half = data[whole:]
        return data[:whole]

    def take(self, start: int, end: int) -> bytes:
        """Return the audio between two positions, as far as it is kept."""
        first = max(0, start - self._start) * SAMPLE_SIZE
        last = max(0, end - self._start) * SAMPLE_SIZE
        return bytes(self._pcm[first:last])

    def drop_before(self, position: int) -> None:
        """Forget the audio before *position*."""
        position = min(position, self.end)
        if position > self._start:
            del self._pcm[: (position - self._start) * SAMPLE_SIZE]
            self._start = position

    def clear(self) -> None:
        """Forget all audio so far. Speech that goes on has ended."""
        self._half = b""
        self.drop_before(self.end)
        if self.activity is not None:
            self.activity.finish(self.end)

    def milliseconds(self, position: int) -> int:
        """Return the time of *position* since the beginning of the session's audio."""
        return self._before + round(position * 1000 / self.rate)
