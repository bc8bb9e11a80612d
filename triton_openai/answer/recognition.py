"""
Asks a recognizer what is spoken in the chunks of one recording, and asks again where its answer cannot be right.

An answer may be cut by the model's limit of tokens, repeat itself, lack words, or be invented for audio without speech.
Sources of the rules: openai/whisper (``transcribe.py``) for windows, temperatures, repetitions and silence.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.adapters._common.base import Adapter, Recognition
from triton_openai.answer.prepare import tokenizer_of
from triton_openai.answer.repetition import (
    is_too_fast,
    is_too_slow,
    repeats_itself,
    text_without_loop,
    without_loop,
    word_rate,
)
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import UpstreamError
from triton_openai.jobs import Segment, SpokenToken, Transcript, TranscriptionJob, TranslationJob, Word
from triton_openai.languages import blank_between
from triton_openai.media import voice_activity
from triton_openai.media.cutting import Chunk, Windows, halves
from triton_openai.media.voice_activity import Detector, speech_seconds
from triton_openai.models.served import ServedModel
from triton_openai.prompts.whisper import WhisperTokens
from triton_openai.triton.tensors import InferResponse

# Audio that is not cut again, in seconds, whatever the answer to it is.
_MIN_SECONDS = 6.0
# Audio that is too short to have a word.
_MIN_HEARD = 0.1
# What is tried one after the other where the model takes a temperature, and the mean log probability below which the
# next one is tried.
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MIN_LOGPROB = -1.0
# The probability from which on there is no speech, unless the words are probable.
_NO_SPEECH = 0.6
# Speech that is sent at least: so many seconds of moments that may be speech. Singing and whispering are less probable
# than talking, and must not be lost.
_MIN_SPEECH = 0.1
_SPEECH_THRESHOLD = 0.2
# The probability of what certainly is speech, and the seconds of it whose words an answer may lack.
_CERTAIN_SPEECH = 0.5
_MAX_SKIPPED = 6.0
# Microseconds to look for speech in a second of audio, and to load the network.
_LOOK_COST = 5_000.0
_LOAD_COST = 60_000.0
# By which part the words a second of two answers to the same audio differ, if none of them has a loop.
_SAME_RATE = 0.2
# How often in a row the next window may begin within a second of the last one.
_MAX_SHORT_STEPS = 3
_SHORT_STEP = 1.0
# Bytes of a sample.
_SAMPLE = 4

# Reads the text so far.
ReadText: TypeAlias = Callable[[], str]
Show: TypeAlias = Callable[[ReadText], None]
Ask: TypeAlias = Callable[[Chunk, Show | None], Awaitable[Transcript]]


class TranscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to get for a recording."""

    #: Without samples, which each chunk has.
    job: TranscriptionJob
    #: The codes of the languages that it can be in, if the client names some.
    languages: Sequence[str] = ()
    #: Whether the client wants the times of the words.
    words: bool = False
    #: Whether the text is wanted while the model still writes it.
    live: bool = False
    #: The most chunks that are sent to Triton at the same time.
    parallel: int = 4


class Recognizer:
    """The *model*, for one recording."""

    def __init__(self, upstream: UpstreamClient, model: ServedModel, options: TranscriptionOptions) -> None:
        recognition: Recognition | None = model.adapter.capabilities.recognition
        assert recognition is not None, "it is a recognizer"
        #: The code of the language, once it is known.
        self.language = options.job.language
        self.recognition = recognition
        self._upstream = upstream
        self._model = model
        self._options = options
        self._whisper: WhisperTokens | None = None
        self._detector: Detector | None = None
        # The network has a state: two threads that use it at the same time end the process.
        self._detector_lock = threading.Lock()
        # Whether somebody says the same again and again: less audio was asked for, and its answer repeats itself too.
        self._speaker_repeats = False
        # Whether somebody speaks slowly: less audio was asked for, and its answer has no more words a second.
        self._speaker_is_slow = False
        self._number = 0

    @property
    def has_window_ends(self) -> bool:
        """Whether its answers say where the next window begins, as those in Whisper's tokens do."""
        return self._whisper is not None

    async def prepare(self) -> None:
        """Find the tokens, where the model answers in those. Raises :class:`ConfigurationError`."""
        if self.recognition.token_ids:
            self._whisper = WhisperTokens(await tokenizer_of(self._model))

    async def is_silent(self, chunk: Chunk) -> bool:
        """Return whether *chunk* is not sent, because the model would invent a text for it."""
        if chunk.silent or chunk.seconds < _MIN_HEARD:
            return True
        if not self.recognition.invents or not voice_activity.silero_available():
            return False
        cost = chunk.seconds * _LOOK_COST + _LOAD_COST
        return await offload.run(self._has_no_speech, chunk, cost=cost)

    def _has_no_speech(self, chunk: Chunk) -> bool:
        return self._speech_seconds(chunk.samples, _SPEECH_THRESHOLD) < _MIN_SPEECH

    def _speech_seconds(self, samples: bytes, threshold: float) -> float:
        """Return how many seconds of *samples* are speech. Blocks the thread."""
        with self._detector_lock:
            if self._detector is None:
                self._detector = voice_activity.detector_for(self.recognition.sample_rate)
            return speech_seconds(samples, self._detector, threshold)

    async def detect(self, chunk: Chunk) -> None:
        """Find out the language of *chunk*, if that is needed: then it is the whole recording's."""
        if self._whisper is None or self.language is not None:
            return
        ids = await self._whisper.prompt(None, translate=False, before=None)
        transcript = await self._run(chunk, self._options.job, ids, None)
        detected = self._whisper.language(transcript.token_ids)
        wanted = self._options.languages
        if wanted and detected not in wanted:
            self.language = wanted[0]
        else:
            self.language = detected
        if self.language is None and isinstance(self._options.job, TranslationJob):
            raise UpstreamError("The model did not return the language of the audio.")

    async def transcribe(self, chunk: Chunk, show: Show | None) -> Transcript:
        """
        Return what a model of texts hears in *chunk*; *show* gets readers of the text so far.

        If the answer cannot be right, both halves of the chunk are asked for. What was shown is not taken back. Raises
        :class:`ServiceError`.
        """
        return await self._transcribe_whole(chunk, show, again=False)

    async def _transcribe_whole(self, chunk: Chunk, show: Show | None, *, again: bool) -> Transcript:
        transcript = await self._ask_for_text(chunk, show)
        if show is not None:
            return transcript
        sound = self._is_sound(transcript, chunk, again=again)
        if sound and not await self._lacks_words(transcript, chunk, chunk.seconds):
            return transcript
        if chunk.seconds < _MIN_SECONDS:
            return self._without_loop(transcript, chunk)
        parts = await asyncio.to_thread(halves, chunk, self.recognition.sample_rate)
        spoken = [part for part in parts if not await self.is_silent(part)]
        transcripts = [await self._transcribe_whole(part, None, again=True) for part in spoken]
        joined = _joined(chunk, spoken, transcripts)
        self._confirms(joined, chunk.seconds, transcript, chunk.seconds)
        return joined

    async def windows(self, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[tuple[Chunk, Transcript]]:
        """
        Yield windows of *chunks* with what Whisper hears in them. Raises :class:`ServiceError`.

        Each begins where the answer to the last one ended, whatever the client wants: so the text does not depend on
        the format of the answer.
        """
        windows = Windows(chunks, self.recognition.sample_rate, self.recognition.max_seconds)
        short_steps = 0
        while (window := await windows.next()) is not None:
            if await self.is_silent(window):
                windows.go_on(window.seconds)
                continue
            await self.detect(window)
            transcript, seconds = await self._transcribe_beginning(window)
            short_steps += 1
            if seconds >= _SHORT_STEP:
                short_steps = 0
            elif short_steps > _MAX_SHORT_STEPS:
                seconds = window.seconds
            windows.go_on(seconds)
            yield window, transcript

    async def _transcribe_beginning(self, window: Chunk) -> tuple[Transcript, float]:
        """Return what is spoken in *window* up to as many seconds as the answer is about."""
        first = await self._ask_for_tokens(window)
        transcript, seconds = first
        sound = self._is_sound(transcript, window, again=False)
        sound = sound and not await self._lacks_words(transcript, window, seconds)
        while not sound and window.seconds >= _MIN_SECONDS:
            window, _ = await asyncio.to_thread(halves, window, self.recognition.sample_rate)
            if await self.is_silent(window):
                return Transcript(text=""), window.seconds
            transcript, seconds = await self._ask_for_tokens(window)
            if self._confirms(transcript, seconds, *first):
                return first
            sound = self._is_sound(transcript, window, again=True)
            sound = sound and not await self._lacks_words(transcript, window, seconds)
        if not sound:
            transcript = self._without_loop(transcript, window)
        return transcript, seconds

    async def _ask_for_tokens(self, window: Chunk) -> tuple[Transcript, float]:
        """Return Whisper's answer to *window*, and how many seconds of it the answer is about."""
        assert self._whisper is not None, "it answers in token ids"
        job = self._options.job
        language = None
        if self.language in self._whisper.languages:
            language = self.language
        translate = isinstance(job, TranslationJob)
        ids = await self._whisper.prompt(language, translate=translate, before=job.prompt)
        transcript = await self._run(window, job, ids, None)
        return self._read(transcript, window.seconds)

    def _read(self, transcript: Transcript, seconds: float) -> tuple[Transcript, float]:
        """Return *transcript* with the text of its token ids, and how many seconds of the audio it is about."""
        assert self._whisper is not None, "it answers in token ids"
        hearing = self._whisper.read(transcript.token_ids, seconds)
        transcript = replace(transcript, text=hearing.text, segments=hearing.segments, complete=hearing.complete)
        return transcript, hearing.seconds

    async def _ask_for_text(self, chunk: Chunk, show: Show | None) -> Transcript:
        """Return the answer of a model that returns text, by the first temperature with which it can be right."""
        job = self._options.job
        if not self.recognition.temperature:
            return _without_silence(await self._run(chunk, job, (), show))
        first = job.temperature or 0.0
        temperatures = [first, *(each for each in _TEMPERATURES if each > first)]
        if show is not None:
            temperatures = [first]
        transcript = Transcript(text="")
        for temperature in temperatures:
            answer = await self._run(chunk, replace(job, temperature=temperature), (), show)
            segments = [replace(segment, temperature=temperature) for segment in answer.segments]
            transcript = _without_silence(replace(answer, segments=segments))
            if _is_likely(transcript):
                break
        return transcript

    async def _run(self, chunk: Chunk, job: TranscriptionJob, ids: Sequence[int], show: Show | None) -> Transcript:
        """Return the answer to *job* for *chunk*; *show* gets readers of the text so far."""
        self._number += 1
        adapter = self._model.adapter
        job = replace(job, id=f"{job.id}-{self._number}", samples=chunk.samples, prompt_ids=ids)
        on_responses = None
        if show is not None:
            on_responses = partial(_show_text, show, adapter, job)
        (request,) = await offload.run(adapter.encode, job, cost=offload.BYTE * len(chunk.samples))
        responses = await self._upstream.ask(request, on_responses)
        result: Transcript = adapter.decode(job, responses)
        return result

    def _is_sound(self, transcript: Transcript, chunk: Chunk, *, again: bool) -> bool:
        """
        Return whether the answer to *chunk* can be right: it has an end, and repeats itself only if the speaker does.

        The speaker does if the answer to less audio, asked for *again*, repeats itself too and can be spoken so fast.
        """
        if not transcript.complete:
            return False
        if not self.recognition.invents or not repeats_itself(transcript.text):
            return True
        if is_too_fast(transcript.text, chunk.seconds):
            return False
        if again:
            self._speaker_repeats = True
        return self._speaker_repeats

    async def _lacks_words(self, transcript: Transcript, chunk: Chunk, seconds: float) -> bool:
        """
        Return whether the answer to the first *seconds* of *chunk* is too short for the speech in them.

        Whisper may pass over sentences, and the code of sherpa ends an answer at its limit of tokens without a sign.
        """
        if not self.recognition.invents or self._speaker_is_slow or seconds < _MAX_SKIPPED:
            return False
        if not is_too_slow(transcript.text, seconds):
            return False
        samples = chunk.samples[: round(seconds * self.recognition.sample_rate) * _SAMPLE]
        cost = seconds * _LOOK_COST + _LOAD_COST
        spoken = await offload.run(self._speech_seconds, samples, _CERTAIN_SPEECH, cost=cost)
        return spoken >= _MAX_SKIPPED and is_too_slow(transcript.text, spoken)

    def _confirms(self, transcript: Transcript, seconds: float, before: Transcript, seconds_before: float) -> bool:
        """
        Return whether *transcript* shows that the answer *before* it is right. Each is about so many *seconds*.

        A loop makes an answer longer, and what was passed over makes it shorter. If both have as many words a second,
        the speaker repeats words, or speaks slowly.
        """
        if not before.complete or not transcript.complete or is_too_fast(before.text, seconds_before):
            return False
        expected = word_rate(transcript.text, seconds)
        confirmed = abs(word_rate(before.text, seconds_before) - expected) <= _SAME_RATE * expected
        if confirmed and repeats_itself(before.text):
            self._speaker_repeats = True
        elif confirmed:
            self._speaker_is_slow = True
        return confirmed

    def _without_loop(self, transcript: Transcript, chunk: Chunk) -> Transcript:
        """Return *transcript* of a *chunk* that is not cut again, without what only a loop of the model can be."""
        if self._whisper is not None and not transcript.complete:
            ids = [*without_loop(transcript.token_ids), self._whisper.end]
            shorter, _ = self._read(replace(transcript, token_ids=ids), chunk.seconds)
            return shorter
        if is_too_fast(transcript.text, chunk.seconds):
            return Transcript(text=text_without_loop(transcript.text), language=transcript.language)
        return transcript


def _is_likely(transcript: Transcript) -> bool:
    """Return whether no other temperature has to be tried."""
    if repeats_itself(transcript.text):
        return False
    return transcript.avg_logprob is None or transcript.avg_logprob >= _MIN_LOGPROB


def _is_no_speech(result: Transcript | Segment) -> bool:
    """Return whether the model says that there is no speech, and its words are not probable either."""
    if result.no_speech_prob is None or result.no_speech_prob <= _NO_SPEECH:
        return False
    return result.avg_logprob is None or result.avg_logprob <= _MIN_LOGPROB


def _without_silence(transcript: Transcript) -> Transcript:
    """Return *transcript* without what the model invented where it heard no speech."""
    if _is_no_speech(transcript):
        return replace(transcript, text="", segments=(), words=(), logprobs=())
    segments = [segment for segment in transcript.segments if not _is_no_speech(segment)]
    if len(segments) == len(transcript.segments):
        return transcript
    text = ""
    for segment in segments:
        text += blank_between(text, segment.text) + segment.text
    words = [word for word in transcript.words if any(part.start <= word.start < part.end for part in segments)]
    # Tokens have no times, so those of the rest are not known.
    return replace(transcript, text=text, segments=segments, words=words, logprobs=())


def _joined(chunk: Chunk, parts: Sequence[Chunk], transcripts: Sequence[Transcript]) -> Transcript:
    """Return the transcript of *chunk* from those of its *parts*."""
    text = ""
    language = None
    segments: list[Segment] = []
    words: list[Word] = []
    logprobs: list[SpokenToken] = []
    for part, transcript in zip(parts, transcripts, strict=True):
        text += blank_between(text, transcript.text) + transcript.text
        language = language or transcript.language
        later = part.start - chunk.start
        segments += [shifted(segment, later) for segment in segments_of(transcript, part)]
        words += [replace(word, start=word.start + later, end=word.end + later) for word in transcript.words]
        logprobs += transcript.logprobs
    return Transcript(text=text, language=language, segments=segments, words=words, logprobs=logprobs)


def segments_of(transcript: Transcript, chunk: Chunk) -> Sequence[Segment]:
    """Return the segments of *transcript*; one for the whole *chunk* if it has none."""
    if transcript.segments or not transcript.text:
        return transcript.segments
    whole = Segment(
        start=0.0,
        end=chunk.seconds,
        text=transcript.text,
        avg_logprob=transcript.avg_logprob,
        no_speech_prob=transcript.no_speech_prob,
    )
    return [whole]


def shifted(segment: Segment, seconds: float) -> Segment:
    """Return *segment* so many *seconds* later."""
    return replace(segment, start=segment.start + seconds, end=segment.end + seconds)


def _show_text(show: Show, adapter: Adapter, job: TranscriptionJob, responses: Sequence[InferResponse]) -> None:
    show(lambda: str(adapter.decode(job, responses).text))
