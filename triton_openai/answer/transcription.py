"""
Transcribes a recording in chunks, whose texts come in order.

Whisper's engine gets one window after the other: each begins where the last answer ends. To other models, a few chunks
are sent at the same time. No chunk is decoded long before Triton gets it, so a recording needs no more memory than the
chunks in flight. When the client leaves, these still run: no backend cancels them.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import takewhile

import msgspec

from triton_openai.answer.recognition import (
    Ask,
    ReadText,
    Recognizer,
    TranscriptionOptions,
    segments_of,
    shifted,
)
from triton_openai.answer.spoken_words import place_words
from triton_openai.answer.timeline import add_segment, add_words
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import ServiceError
from triton_openai.jobs import Segment, SpokenToken, Transcript, Word
from triton_openai.languages import UNSPACED, blank_between
from triton_openai.media.audio import Recording
from triton_openai.media.cutting import Chunk
from triton_openai.models.served import ServedModel
from triton_openai.tasks import cancel

# The most seconds of chunks in flight for one recording: 8 MB of samples, of which a transport makes copies.
_MAX_SECONDS_IN_FLIGHT = 120.0
# A letter or a digit of a word whose end has to be awaited.
_IN_WORD = re.compile(rf"[^\W{UNSPACED}]")


class Transcription:
    """The transcript of one recording by *model*, as far as it goes."""

    def __init__(self, upstream: UpstreamClient, model: ServedModel, options: TranscriptionOptions) -> None:
        #: The text so far: all pieces that :meth:`deltas` has yielded.
        self.text = ""
        #: The segments of the model; one for each chunk if the model has none.
        self.segments: list[Segment] = []
        #: The words, if they are wanted, and the tokens with their probabilities, if the model returns them.
        self.words: list[Word] = []
        self.logprobs: list[SpokenToken] = []
        self._recognizer = Recognizer(upstream, model, options)
        self._options = options

    @property
    def language(self) -> str | None:
        """The code of the language, once it is known."""
        return self._recognizer.language

    async def deltas(self, recording: Recording) -> AsyncGenerator[str]:
        """Yield the pieces of the text. Raises :class:`ServiceError`."""
        await self._recognizer.prepare()
        async with aclosing(recording.chunks()) as chunks:
            if self._recognizer.has_window_ends:
                pieces = self._in_windows(chunks)
            else:
                pieces = self._in_parallel(chunks)
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _in_windows(self, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[str]:
        """Ask for one window after the other."""
        async with aclosing(self._recognizer.windows(chunks)) as windows:
            async for window, transcript in windows:
                blank = blank_between(self.text, transcript.text)
                self.text += blank + transcript.text
                await self._take(window, transcript)
                if transcript.text:
                    yield blank + transcript.text

    async def _in_parallel(self, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[str]:
        """Ask for a few chunks at the same time."""
        asked: deque[_Asked] = deque()
        try:
            more = True
            while more or asked:
                while more and self._has_capacity(asked):
                    chunk = await anext(chunks, None)
                    more = chunk is not None
                    if chunk is not None and not await self._recognizer.is_silent(chunk):
                        await self._recognizer.detect(chunk)
                        asked.append(_Asked(chunk, self._recognizer.transcribe, live=self._options.live))
                if asked:
                    async for piece in self._pieces_of(asked[0]):
                        yield piece
                    asked.popleft()
        finally:
            await cancel(*[sent.task for sent in asked])

    def _has_capacity(self, asked: Sequence[_Asked]) -> bool:
        if not asked:
            return True
        seconds = [sent.chunk.seconds for sent in asked]
        in_flight = sum(seconds) + max(seconds)
        return len(asked) < self._options.parallel and in_flight <= _MAX_SECONDS_IN_FLIGHT

    async def _pieces_of(self, asked: _Asked) -> AsyncGenerator[str]:
        """Yield the pieces that a chunk adds to the text, and take its segments over."""
        first = len(self.text)
        async for piece in asked.pieces():
            if first == len(self.text):
                blank = blank_between(self.text, piece)
            else:
                blank = ""
            self.text += blank + piece
            yield blank + piece
        result = asked.task.result()
        if not result.segments:
            # What was shown stays, even if the model has taken it back.
            result = msgspec.structs.replace(result, text=self.text[first:].strip())
        await self._take(asked.chunk, result)

    async def _take(self, chunk: Chunk, transcript: Transcript) -> None:
        """Take over what belongs to the text of *chunk*."""
        self.logprobs += transcript.logprobs
        if self._options.words:
            words = await place_words(transcript, chunk, self._recognizer.recognition.sample_rate)
            add_words(self.words, words, chunk.start, chunk.end)
        self._recognizer.language = self._recognizer.language or transcript.language
        for segment in segments_of(transcript, chunk):
            add_segment(self.segments, shifted(segment, chunk.start), chunk.start, chunk.end)


class _Asked:
    """A chunk in flight."""

    def __init__(self, chunk: Chunk, ask: Ask, *, live: bool) -> None:
        self.chunk = chunk
        # It is not decoded before the text is read.
        self._text = StableText()
        self._reads = False
        self._read_text: ReadText | None = None
        self._news = asyncio.Event()
        show = None
        if live:
            show = self._show
        self.task = asyncio.ensure_future(ask(chunk, show))
        self.task.add_done_callback(lambda _: self._news.set())

    def _show(self, read_text: ReadText) -> None:
        self._read_text = read_text
        if self._reads:
            self._update(read_text)

    def _update(self, read_text: ReadText) -> None:
        try:
            text = read_text()
        except ServiceError:
            # What cannot be read is reported at the end.
            return
        if self._text.update(text):
            self._news.set()

    async def pieces(self) -> AsyncGenerator[str]:
        """
        Yield the text in pieces, the last of which ends it. Raises :class:`ServiceError`.

        What was shown stays, even if the model revises what two of its answers agreed on.
        """
        shown = 0
        self._reads = True
        if self._read_text is not None:
            self._update(self._read_text)
        while not self.task.done():
            await self._news.wait()
            self._news.clear()
            stable = self._text.stable
            if len(stable) > shown:
                piece = stable[shown:]
                shown = len(stable)
                yield piece
        text = (await self.task).text
        if len(text) > shown:
            yield text[shown:]


class StableText:
    """The part that will not change of a text that the model revises with each of its answers."""

    def __init__(self) -> None:
        #: What two successive answers began with. It only grows.
        self.stable = ""
        self._latest = ""

    def update(self, latest: str) -> bool:
        """Take the *latest* answer; return whether more of the text is stable now."""
        stable = agreed(self._latest, latest)
        self._latest = latest
        if len(stable) <= len(self.stable) or not stable.startswith(self.stable):
            return False
        self.stable = stable
        return True


def agreed(before: str, text: str) -> str:
    """Return what two successive answers of a model that revises its text both begin with, up to the end of a word."""
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
    while end and any(_IN_WORD.match(each, end) and _IN_WORD.match(each, end - 1) for each in (before, text)):
        end -= 1
    # A blank waits for its word: the text may end here.
    return text[:end].rstrip()
