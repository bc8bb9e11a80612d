"""
Transcribes a recording chunk by chunk: a few are sent to Triton at the same time, and their texts come in order.

No chunk is decoded long before Triton gets it, so a recording needs no more memory than the chunks in flight. When the
client leaves, these still run: no backend cancels them.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import takewhile
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.adapters._common.base import Adapter
from triton_openai.answer.prepare import tokenizer_of
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.jobs import Segment, Transcript, TranscriptionJob, TranslationJob
from triton_openai.languages import UNSPACED, blank_between
from triton_openai.media.audio import Recording
from triton_openai.media.cutting import Chunk
from triton_openai.models.served import ServedModel
from triton_openai.prompts.whisper import WhisperTokens
from triton_openai.tasks import cancel
from triton_openai.triton.tensors import InferResponse

# The most seconds of chunks in flight for one recording: 8 MB of samples, of which a transport makes copies.
_MAX_SECONDS_IN_FLIGHT = 120.0
# A letter or a digit of a word whose end has to be awaited.
_IN_WORD = re.compile(rf"[^\W{UNSPACED}]")

# Reads the text so far.
_ReadText: TypeAlias = Callable[[], str]
_Show: TypeAlias = Callable[[_ReadText], None]
_Ask: TypeAlias = Callable[[Chunk, _Show | None], Awaitable[Transcript]]


class TranscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to get for a recording."""

    #: Without samples, which each chunk has.
    job: TranscriptionJob
    #: The codes of the languages that it can be in, if the client names some.
    languages: Sequence[str] = ()
    #: Whether the client wants the times of the parts.
    times: bool = False
    #: Whether the text is wanted while the model still writes it.
    live: bool = False
    #: The most chunks that are sent to Triton at the same time.
    parallel: int = 4


class Transcription:
    """The transcript of one recording by *model*, as far as it goes."""

    def __init__(self, upstream: UpstreamClient, model: ServedModel, options: TranscriptionOptions) -> None:
        #: The text so far: all pieces that :meth:`deltas` has yielded.
        self.text = ""
        #: The segments of the model; one for each chunk if the model has none.
        self.segments: list[Segment] = []
        #: The code of the language, once it is known.
        self.language = options.job.language
        self._upstream = upstream
        self._model = model
        self._options = options
        self._whisper: WhisperTokens | None = None
        self._number = 0

    async def deltas(self, recording: Recording) -> AsyncGenerator[str]:
        """Yield the pieces of the text. Raises :class:`ServiceError`."""
        await self._prepare()
        asked: deque[_Asked] = deque()
        async with aclosing(recording.chunks()) as chunks:
            try:
                more = True
                while more or asked:
                    while more and self._has_capacity(asked):
                        chunk = await anext(chunks, None)
                        more = chunk is not None
                        if chunk is not None and not chunk.silent:
                            await self._detect(chunk)
                            asked.append(_Asked(chunk, self._ask, live=self._options.live))
                    if asked:
                        async for piece in self._told(asked[0]):
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

    async def _prepare(self) -> None:
        """Find the tokens, where the model answers in those. Raises :class:`ConfigurationError`."""
        if self._model.adapter.capabilities.tokens:
            self._whisper = WhisperTokens(await tokenizer_of(self._model))

    async def _detect(self, chunk: Chunk) -> None:
        """Find out the language of *chunk*, if that is needed: then it is the whole recording's."""
        if self._whisper is None or self.language is not None:
            return
        ids = await self._whisper.prompt(None, translate=False, times=False, before=None)
        transcript = await self._run(chunk, ids, None)
        detected = self._whisper.language(transcript.token_ids)
        wanted = self._options.languages
        if wanted and detected not in wanted:
            self.language = wanted[0]
        else:
            self.language = detected
        if self.language is None and isinstance(self._options.job, TranslationJob):
            raise UpstreamError("The model did not tell the language of the audio.")

    async def _ask(self, chunk: Chunk, show: _Show | None) -> Transcript:
        whisper = self._whisper
        job = self._options.job
        if whisper is None:
            return await self._run(chunk, (), show)
        translate = isinstance(job, TranslationJob)
        language = None
        if self.language in whisper.languages:
            language = self.language
        ids = await whisper.prompt(language, translate=translate, times=self._options.times, before=job.prompt)
        result = await self._run(chunk, ids, None)
        text, segments = whisper.read(result.token_ids, chunk.seconds)
        if not self._options.times:
            segments = []
        return replace(result, text=text, segments=segments)

    async def _run(self, chunk: Chunk, ids: Sequence[int], show: _Show | None) -> Transcript:
        """Return the transcript of *chunk*; *show* gets readers of the text so far. Raises :class:`ServiceError`."""
        self._number += 1
        adapter = self._model.adapter
        job = self._options.job
        job = replace(job, id=f"{job.id}-{self._number}", samples=chunk.samples, prompt_ids=ids)

        on_responses = None
        if show is not None:
            on_responses = partial(_show_text, show, adapter, job)
        (request,) = await offload.run(adapter.encode, job, cost=offload.BYTE * len(chunk.samples))
        responses = await self._upstream.ask(request, on_responses)
        result: Transcript = adapter.decode(job, responses)
        return result

    async def _told(self, asked: _Asked) -> AsyncGenerator[str]:
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
        chunk = asked.chunk
        self.language = self.language or result.language
        self.segments += [
            replace(each, start=chunk.start + each.start, end=chunk.start + each.end) for each in result.segments
        ]
        text = self.text[first:].strip()
        if text and not result.segments:
            self.segments.append(Segment(start=chunk.start, end=chunk.end, text=text))


class _Asked:
    """A chunk in flight."""

    def __init__(self, chunk: Chunk, ask: _Ask, *, live: bool) -> None:
        self.chunk = chunk
        # The text so far, and the part of it that will not change. It is not decoded before the text is read.
        self._before = ""
        self._sure = ""
        self._reads = False
        self._read_text: _ReadText | None = None
        self._news = asyncio.Event()
        show = None
        if live:
            show = self._show
        self.task = asyncio.ensure_future(ask(chunk, show))
        self.task.add_done_callback(lambda _: self._news.set())

    def _show(self, read_text: _ReadText) -> None:
        self._read_text = read_text
        if self._reads:
            self._update(read_text)

    def _update(self, read_text: _ReadText) -> None:
        try:
            text = read_text()
        except ServiceError:
            # What cannot be read is reported at the end.
            return
        sure = _agreed(self._before, text)
        self._before = text
        if len(sure) > len(self._sure) and sure.startswith(self._sure):
            self._sure = sure
            self._news.set()

    async def pieces(self) -> AsyncGenerator[str]:
        """
        Yield the text in pieces, the last of which ends it. Raises :class:`ServiceError`.

        What was said stays said, even if the model changes its mind about what two of its answers agreed on.
        """
        told = 0
        self._reads = True
        if self._read_text is not None:
            self._update(self._read_text)
        while not self.task.done():
            await self._news.wait()
            self._news.clear()
            if len(self._sure) > told:
                piece = self._sure[told:]
                told = len(self._sure)
                yield piece
        text = (await self.task).text
        if len(text) > told:
            yield text[told:]


def _show_text(show: _Show, adapter: Adapter, job: TranscriptionJob, responses: Sequence[InferResponse]) -> None:
    show(lambda: str(adapter.decode(job, responses).text))


def _agreed(before: str, text: str) -> str:
    """Return what two successive answers of a model that revises its text both begin with, up to the end of a word."""
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
    while end and any(_IN_WORD.match(each, end) and _IN_WORD.match(each, end - 1) for each in (before, text)):
        end -= 1
    # A blank waits for its word: the text may end here.
    return text[:end].rstrip()
