"""The voices of a model that synthesizes speech: recordings in a folder, or names of the model's own voices."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from triton_openai.adapters._common.base import Synthesis
from triton_openai.config.files import LOOK_SECONDS, FileWatch
from triton_openai.config.tree import AudioSettings
from triton_openai.errors import ConfigurationError, InvalidValue, missing
from triton_openai.jobs import Voice

_log = structlog.get_logger(__name__)

_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
# A name that a model without a list gets as it is: no path, and nothing that hides.
_NAME = re.compile(r"\w[\w .:+@()-]{0,99}")
# Voices that an error lists.
_MAX_LISTED = 50


class Voices:
    """The voices of the model *name*, which synthesizes speech as *speech* describes."""

    def __init__(self, name: str, settings: AudioSettings, speech: Synthesis) -> None:
        """Blocks: it reads recordings. Raises :class:`ConfigurationError` for what the model cannot do."""
        # Has NumPy in memory, in services whose models speak. It is loaded here, in a thread.
        from triton_openai.media import encode

        self._encode = encode
        self._model = name
        self._aliases = settings.voice_aliases
        self._speech = speech
        self._folder: Path | None = None
        self._watch: FileWatch | None = None
        self._next_look = 0.0
        self._voices: Mapping[str, Voice] = {}
        voices = settings.voices
        if speech.reference_rate:
            if voices and not isinstance(voices, str):
                raise self._wrong("takes recordings: 'audio.voices' must be a folder with NAME.wav and NAME.txt")
            if not voices and not speech.has_own_voice:
                raise self._wrong("imitates recordings and has none: set 'audio.voices' to a folder with them")
            if isinstance(voices, str):
                self._folder = Path(voices)
                self._read_folder(self._folder)
        elif voices and speech.voice_type is None:
            raise self._wrong("has one voice, and 'audio.voices' names others")
        elif isinstance(voices, str):
            raise self._wrong("takes no recordings: 'audio.voices' must list the names of its voices")
        else:
            self._voices = self._known(voices if isinstance(voices, Mapping) else {name: name for name in voices})
        for alias, voice in self._aliases.items():
            if not self.takes_any_name and voice not in self._voices:
                raise self._wrong(f"has no voice '{voice}', for which 'audio.voice_aliases' gives '{alias}'")

    def _wrong(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"The model '{self._model}' {what}.")

    def _known(self, voices: Mapping[str, str | int]) -> Mapping[str, Voice]:
        kind = self._speech.voice_type
        for name, value in voices.items():
            if kind is not None and not isinstance(value, kind):
                raise self._wrong(f"takes voices as {'texts' if kind is str else 'numbers'}, and '{name}' is {value!r}")
        if not voices and kind is int:
            raise self._wrong("takes numbers for voices: give them names with 'audio.voices'")
        return {name: Voice(name=name, known_as=value) for name, value in voices.items()}

    @property
    def takes_any_name(self) -> bool:
        """Whether no voices are listed, so that every name is sent to the model."""
        return self._folder is None and self._speech.voice_type is str and not self._voices

    def names(self) -> list[str]:
        """Return the names of all voices, aliases included, in their order."""
        return sorted({*self._voices, *self._aliases})

    def default_voice(self) -> Voice | None:
        """Return a voice, ``None`` for the model's own, or if none is known."""
        return next(iter(self._voices.values()), None)

    async def reload(self) -> None:
        """Read the folder again if it has changed. What cannot be used is logged, and changes nothing."""
        if self._folder is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            await asyncio.to_thread(self._look, self._folder)

    def _look(self, folder: Path) -> None:
        # A recording and its text are two files, and a copy takes a while.
        if self._watch is not None and self._watch.due(settled=True):
            with self._watch.reading():
                self._read_folder(folder)
                _log.info("changed voices in use", model=self._model, voices=len(self._voices))

    def find(self, name: str | None) -> tuple[Voice | None, bool]:
        """
        Return the voice called *name*, ``None`` for the model's own, and whether *name* was ignored.

        It is ignored where it names no voice and the model has only one.

        Raises :class:`InvalidValue` for an unknown name, and for none where there are several.
        """
        voices = self._voices
        if name is not None and self.takes_any_name:
            known = self._aliases.get(name, name)
            if not _NAME.fullmatch(known):
                raise InvalidValue("'voice' must be a name of at most 100 letters, digits and ' .:+@()-'.", "voice")
            return Voice(name=name, known_as=known), False
        voice = None
        if name is not None:
            voice = voices.get(self._aliases.get(name, name))
        if voice is not None:
            return voice, False
        own = self._speech.has_own_voice
        if len(voices) + own == 1:
            # The model's own, if it is that.
            return self.default_voice(), True
        if name is None and own:
            return None, False
        if name is None:
            raise missing("voice")
        names = self.names()
        listed = ", ".join(names[:_MAX_LISTED])
        if len(names) > _MAX_LISTED:
            listed += ", ..."
        raise InvalidValue(f"The model '{self._model}' has no voice '{name[:100]}'. It has: {listed}.", "voice")

    def _read_folder(self, folder: Path) -> None:
        """Read the recordings in *folder*. Raises :class:`ConfigurationError`."""
        try:
            files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (*_SUFFIXES, ".txt"))
        except OSError as error:
            raise self._wrong(f"has no voices: {folder} cannot be read ({error.strerror or error})") from error
        watch = FileWatch([folder, *files], problem="changed voices not used", model=self._model)
        voices: dict[str, Voice] = {}
        names_by_text: dict[str, str] = {}
        for path in files:
            if path.suffix.lower() == ".txt":
                continue
            voice = self._read(path)
            if voice.name in voices:
                raise self._wrong(f"has two recordings of the voice '{voice.name}' in {folder}")
            other = names_by_text.setdefault(voice.text, voice.name)
            if other != voice.name and self._speech.voices_by_transcript:
                # It would speak with the one that it got first.
                raise self._wrong(
                    f"distinguishes voices by the text of their recordings, and those of '{other}' and "
                    f"'{voice.name}' are the same"
                )
            voices[voice.name] = voice
        if not voices:
            raise self._wrong(f"has no voices: {folder} has no recordings ({', '.join(_SUFFIXES)})")
        self._voices = voices
        self._watch = watch

    def _read(self, path: Path) -> Voice:
        """Return the voice recorded in the file *path*. Raises :class:`ConfigurationError`."""
        rate = self._speech.reference_rate
        try:
            # Some models divide by its length.
            text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
            samples, file_rate = self._encode.read_audio(path.read_bytes())
            samples = self._encode.resampled(samples, file_rate, rate)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                reason = error.strerror
            else:
                reason = str(error)
            raise self._wrong(f"cannot use the voice {path.name} or its text {path.stem}.txt: {reason}") from error
        seconds = len(samples) / rate
        if not text or not seconds:
            raise self._wrong(f"cannot use the voice {path.name}: {'the recording' if text else 'its text'} is empty")
        if self._speech.with_reference and seconds >= self._speech.max_seconds:
            raise self._wrong(
                f"speaks {self._speech.max_seconds:g} seconds with the recording, and {path.name} is as long"
            )
        return Voice(name=path.stem, samples=samples.astype("<f4").tobytes(), text=text, seconds=seconds)
