"""Transcribes audio while it is spoken, with a recognizer that takes it as a sequence of small requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from triton_openai.answer.transcription import StableText
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import ServiceError
from triton_openai.jobs import Transcript, TranscriptionJob
from triton_openai.models.served import ServedModel
from triton_openai.tasks import cancel
from triton_openai.triton.sequence import LiveSequence
from triton_openai.triton.tensors import InferResponse

# Requests that wait for their answers, above which more audio waits.
_MAX_UNANSWERED = 8
# The backend drops a sequence that is idle for too long. After this part of that time, it gets silence.
_IDLE_PART = 0.8


def do_nothing() -> None:
    """Do nothing: nobody waits for answers."""


class LiveTranscription:
    """
    The transcript of one turn of speech by *model*, which takes sequences. *job* has no samples.

    One task feeds it, and another one reads :meth:`deltas`.
    """

    def __init__(self, model: ServedModel, job: TranscriptionJob) -> None:
        recognition = model.adapter.capabilities.recognition
        assert recognition is not None, "it is a recognizer"
        assert recognition.live_idle is not None, "it takes sequences"
        #: The text so far: all pieces that :meth:`deltas` has yielded.
        self.text = ""
        #: The code of the language, if the model returns it.
        self.language = job.language
        #: Called with each answer.
        self.on_answer: Callable[[], None] = do_nothing
        self._idle = recognition.live_idle * _IDLE_PART
        self._adapter = model.adapter
        self._job = job
        self._encoder = model.adapter.begin_live(job)
        self._sequence = LiveSequence(self._encoder.closing)
        self._timer: asyncio.TimerHandle | None = None
        # Whether no more audio is taken.
        self._finished = False
        self._answers = StableText()
        self._news = asyncio.Event()

    async def feed(self, samples: bytes) -> None:
        """Take further *samples*: little-endian float32 at the model's rate. Waits while the model is late."""
        if self._finished:
            return
        for request in self._encoder.feed(samples):
            self._sequence.add(request)
            self._wait_for_audio()
            await self._sequence.wait_until(_MAX_UNANSWERED)

    def finish(self, samples: bytes) -> None:
        """Take the last *samples*: the turn has ended."""
        if self._finished:
            return
        self._finished = True
        self._stop_timer()
        for request in self._encoder.feed(samples):
            self._sequence.add(request)
        self._sequence.add(self._encoder.finish(), last=True)

    def close(self) -> None:
        """Drop the audio that is not sent yet. Call it at the end."""
        self._finished = True
        self._stop_timer()
        self._sequence.close()

    def _wait_for_audio(self) -> None:
        """Send silence if no audio completes a request in time: without requests, the backend forgets the sequence."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._idle, self._fill)

    def _fill(self) -> None:
        if not self._sequence.unanswered:
            for request in self._encoder.fill():
                self._sequence.add(request)
        self._wait_for_audio()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def deltas(self, upstream: UpstreamClient) -> AsyncGenerator[str]:
        """Yield the pieces of the text, the last of which ends it. Raises :class:`ServiceError`."""
        asking = asyncio.ensure_future(upstream.ask_live(self._sequence, self._show))
        asking.add_done_callback(lambda _: self._news.set())
        try:
            while not asking.done():
                await self._news.wait()
                self._news.clear()
                if len(self._answers.stable) > len(self.text):
                    yield self._take(self._answers.stable)
            responses = await asking
            transcript = cast(Transcript, self._adapter.decode(self._job, responses))
            self.language = self.language or transcript.language
            if len(transcript.text) > len(self.text):
                yield self._take(transcript.text)
        finally:
            self.close()
            await cancel(asking)

    def _take(self, text: str) -> str:
        """Return what *text* adds to what was yielded, which is not taken back."""
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _show(self, responses: Sequence[InferResponse]) -> None:
        """Read the answers so far."""
        self.on_answer()
        try:
            text = str(self._adapter.decode(self._job, responses).text)
        except ServiceError:
            # What cannot be read is reported at the end.
            return
        if self._answers.update(text):
            self._news.set()
