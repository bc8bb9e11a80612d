"""
Turns of a transcription session: each is a stretch of speech that becomes an item, and one call.

A recognizer that takes sequences gets the audio of a turn while it is spoken; any other one gets it at the turn's end,
as if it were a file.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

import msgspec

from triton_openai.answer.live_transcription import LiveTranscription, do_nothing
from triton_openai.answer.recognition import TranscriptionOptions
from triton_openai.answer.run_group import timeout_error
from triton_openai.answer.transcription import Transcription
from triton_openai.api.bodies import ModelRequest, new_id
from triton_openai.api.media_limits import media_reservation
from triton_openai.api.realtime.events import TranscriptionSettings
from triton_openai.api.service import RequestContext
from triton_openai.api.transcriptions import check_prompt, language_code, prompt_of, recognition_of
from triton_openai.errors import InvalidRequest
from triton_openai.jobs import TranscriptionJob
from triton_openai.languages import code_of
from triton_openai.media.audio import Recording, decoded_size
from triton_openai.media.pcm import SAMPLE_SIZE, Resampler, wav_of
from triton_openai.models.served import ServedModel

#: Takes a piece of the text.
OnDelta: TypeAlias = Callable[[str], Awaitable[None]]
_TRANSCRIPTION = "session.audio.input.transcription"


class TurnRequest(ModelRequest, kw_only=True):
    """What a turn asks for, as logs and traces have it: the fields of :class:`TranscriptionSettings`."""

    language: str | None = None
    languages: Sequence[str] = ()
    prompt: str | None = None
    keywords: Sequence[str] = ()


class TurnText(msgspec.Struct, frozen=True):
    """What was spoken in a turn, and the code of its language if it is known."""

    text: str
    language: str | None


def job_of(model: ServedModel, settings: TranscriptionSettings) -> tuple[TranscriptionJob, Sequence[str]]:
    """
    Return the job that *settings* ask of *model*, and the codes of the languages that the audio can be in.

    A language is ignored by a model that takes none: some clients send "en" to all. Raises :class:`InvalidRequest`.
    """
    recognition = recognition_of(model)
    prompt = prompt_of(settings.prompt, settings.keywords)
    if prompt is not None:
        check_prompt(model, f"{_TRANSCRIPTION}.prompt")
    languages = [code for code in map(code_of, settings.languages) if code in recognition.languages]
    language = None
    if recognition.languages and settings.language:
        language = language_code(model, settings.language, f"{_TRANSCRIPTION}.language")
    elif languages and not recognition.token_ids:
        # The model cannot choose among them.
        language = languages[0]
    language = language or recognition.language
    job = TranscriptionJob(id=new_id("transcr"), samples=b"", language=language, prompt=prompt)
    return job, languages


class Turn(ABC):
    """
    A turn of speech that began at the sample *start* of the session's audio, of *rate* samples a second.

    *job*, without samples, is what is done with it; *languages* are those that it can be in, if the client names some.
    """

    def __init__(self, start: int, rate: int, job: TranscriptionJob, languages: Sequence[str]) -> None:
        self.job = job
        self.languages = languages
        self.item_id = new_id("item", "_")
        #: Writes it down.
        self.task: asyncio.Task[None] | None = None
        #: Where the next audio begins.
        self.end = start
        self.start = start
        self.rate = rate

    @property
    def seconds(self) -> float:
        """How long it is so far."""
        return (self.end - self.start) / self.rate

    async def feed(self, pcm: bytes) -> None:
        """Take further samples of 16 bits."""
        self.end += len(pcm) // SAMPLE_SIZE
        await self._take(pcm)

    @abstractmethod
    async def _take(self, pcm: bytes) -> None:
        """Take further samples of 16 bits."""

    @abstractmethod
    def finish(self) -> None:
        """Take no more audio: the turn has ended."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The bytes of audio that it keeps."""

    @abstractmethod
    async def transcribe(self, context: RequestContext[TurnRequest], on_delta: OnDelta) -> TurnText:
        """Do the job, and give the pieces of the text to *on_delta*. Raises :class:`ServiceError`."""

    @abstractmethod
    def close(self) -> None:
        """Drop the audio that is left: nobody waits for the text any more."""


async def _passed_on(deltas: AsyncGenerator[str], on_delta: OnDelta) -> None:
    async with aclosing(deltas):
        async for delta in deltas:
            await on_delta(delta)


class WholeTurn(Turn):
    """A turn that the model gets when it has ended, as a recording."""

    def __init__(self, start: int, rate: int, job: TranscriptionJob, languages: Sequence[str]) -> None:
        super().__init__(start, rate, job, languages)
        self._pcm = bytearray()

    async def _take(self, pcm: bytes) -> None:
        self._pcm += pcm

    def finish(self) -> None:
        pass

    @property
    def size(self) -> int:
        return len(self._pcm)

    def close(self) -> None:
        self._pcm = bytearray()

    async def transcribe(self, context: RequestContext[TurnRequest], on_delta: OnDelta) -> TurnText:
        limits = context.service.settings.audio
        recognition = recognition_of(context.model)
        longest = min(self.seconds, recognition.max_seconds * limits.parallel_chunks)
        with media_reservation(context.service) as reservation:
            await reservation.finish(self.size + decoded_size(longest, recognition.sample_rate))
            recording = Recording(
                await asyncio.to_thread(wav_of, self._pcm, self.rate),
                rate=recognition.sample_rate,
                max_chunk_seconds=recognition.max_seconds,
                max_seconds=max(limits.max_duration, self.seconds),
            )
            options = TranscriptionOptions(
                job=self.job,
                languages=self.languages,
                live=context.model.adapter.capabilities.streaming,
                parallel=limits.parallel_chunks,
            )
            transcription = Transcription(context.upstream(), context.model, options)
            try:
                async with asyncio.timeout(context.limits.total):
                    await _passed_on(transcription.deltas(recording), on_delta)
            except TimeoutError as error:
                raise timeout_error(context.limits.total) from error
        return TurnText(transcription.text, transcription.language)


class LiveTurn(Turn):
    """A turn that the *model* gets while it is spoken."""

    #: The bytes that it keeps at most, as far as anybody counts: what waits for answers, and for another Triton.
    SIZE = 4 * 1024 * 1024

    def __init__(
        self, start: int, rate: int, job: TranscriptionJob, languages: Sequence[str], model: ServedModel
    ) -> None:
        super().__init__(start, rate, job, languages)
        self._transcription = LiveTranscription(model, job)
        self._resampler = Resampler(rate, recognition_of(model).sample_rate)
        self._asked = False

    async def _take(self, pcm: bytes) -> None:
        await self._transcription.feed(self._resampler.feed(pcm))

    def finish(self) -> None:
        self._transcription.finish(self._resampler.feed(b"", last=True))

    @property
    def size(self) -> int:
        return self.SIZE

    async def transcribe(self, context: RequestContext[TurnRequest], on_delta: OnDelta) -> TurnText:
        if self._asked:
            raise InvalidRequest("Another variant of the model has had the audio.")
        self._asked = True
        transcription = self._transcription
        total = context.limits.total
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(total) as deadline:

                def postpone() -> None:
                    if total is not None and not deadline.expired():
                        deadline.reschedule(loop.time() + total)

                # The speech may last as long as it likes. As it goes on, so do the answers.
                transcription.on_answer = postpone
                await _passed_on(transcription.deltas(context.upstream()), on_delta)
        except TimeoutError as error:
            raise timeout_error(total) from error
        finally:
            transcription.on_answer = do_nothing
        return TurnText(transcription.text, transcription.language)

    def close(self) -> None:
        self._transcription.close()
