"""
Speaks a text: cuts it into pieces that the model can speak, and asks for the next one while the one before plays.

The parts come in order. Of a client that reads slowly, at most a few parts wait here: the backend is paused, and no
piece is asked for before all of the one before it has come.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic

from msgspec.structs import replace

from triton_openai.adapters._common.base import Synthesis
from triton_openai.answer.limits import TimeLimits
from triton_openai.answer.upstream_call import CallProgress, UpstreamCall, UpstreamClient, silence_error
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.generation import AnswerState, Lora
from triton_openai.jobs import Speech, SynthesisJob, Voice
from triton_openai.models.served import ServedModel
from triton_openai.triton.tensors import InferRequest, InferResponse

# The characters that are spoken in a second if no recording shows the speed, and the weight of a character that is a
# syllable.
_PER_SECOND = 15.0
_SYLLABLE = 3
_SYLLABLES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# Where a text may be cut, the best cuts first. Between sentences: after a mark that ends one, if no small letter
# follows, and no title or initial precedes; after those of Chinese and Japanese, which put no blanks; at the end of a
# line. Between clauses, and between words.
_CUTS = (
    re.compile(
        r"(?<=[.!?\u2026])(?<!\b[A-Z]\.)(?<!\b(?:Mr|Dr|St|vs)\.)(?<!\bMrs\.)[\"'\u201d\u2019)\]]*\s+(?![a-z\s])"
        r"|(?<=[\u3002\uff01\uff1f])(?![\u201d\u2019\u300d\u300f\uff09])|(?<!\s)\s*\n\s*"
    ),
    re.compile(r"(?<=[,;:\u2013\u2014])\s+|(?<=[\uff0c\u3001\uff1b\uff1a])"),
    re.compile(r"\s+"),
)
# The letters of the first piece, which takes in short sentences.
_MIN_FIRST_PIECE = 20
# With fewer letters than these, some models speak badly, and are not ready with the next piece when the first one ends.
# With more than those, about four seconds of speech, the first audio would be late.
_SHORTEST_PIECE = 12
_MAX_FIRST_PIECE = 60
# The most that a piece is longer than the one before, during which it is made.
_GROWTH = 2
# Responses that wait for a client to read before the backend is paused.
_MAX_WAITING = 4


def _length(text: str) -> int:
    """Return the length of *text* when spoken, in letters."""
    return len(text) + (_SYLLABLE - 1) * len(_SYLLABLES.findall(text))


def longest_piece(speech: Synthesis, voice: Voice | None) -> int:
    """Return the most letters that a model can speak at once, with *voice*."""
    rate = _PER_SECOND
    seconds = speech.max_seconds
    if voice is not None and voice.seconds:
        rate = max(1.0, _length(voice.text) / voice.seconds)
        if speech.with_reference:
            seconds -= voice.seconds
    return max(1, int(rate * seconds))


def pieces(text: str, longest: int, *, streams: bool) -> list[str]:
    """
    Return *text* in pieces of whole sentences, each of at most *longest* letters; none if there is nothing to speak.

    If the model does not stream, the first piece is a sentence, and they grow. A sentence as short as "Hello." waits
    for what follows, if that is not long.
    """
    parts: list[str] = []
    start = 0
    end = 0
    if streams:
        limit = longest
    else:
        limit = min(longest, _MIN_FIRST_PIECE)
    for stop in _stops(text, 0, len(text), longest, _CUTS):
        piece = text[start:end].strip()
        if piece and _length(text[start:stop].strip()) > limit:
            if not parts and not streams and _length(piece) < _SHORTEST_PIECE:
                end = _first_end(text, start, end, stop, min(longest, _MAX_FIRST_PIECE))
                piece = text[start:end].strip()
            if end == stop:
                continue
            parts.append(piece)
            if streams:
                limit = longest
            else:
                limit = min(longest, max(_MIN_FIRST_PIECE, _GROWTH * _length(piece)))
            start = end
        end = stop
    rest = text[start:].strip()
    if rest:
        parts.append(rest)
    return parts


def _first_end(text: str, start: int, end: int, stop: int, longest: int) -> int:
    """
    Return where a first piece ends that ended at *end*, with few letters, where the next sentence ends at *stop*.

    It takes the next sentence in, or its first clauses, as far as it has at most *longest* letters then.
    """
    clauses = [match.end() for match in _CUTS[1].finditer(text, end, stop)]
    fitting = [place for place in (*clauses, stop) if _length(text[start:place].strip()) <= longest]
    return max(fitting, default=end)


def _stops(text: str, start: int, end: int, longest: int, cuts: Sequence[re.Pattern[str]]) -> Iterator[int]:
    """Yield the places at which *text* may be cut from *start* to *end*, with at most *longest* letters between two."""
    if not cuts:
        # A very long word.
        step = max(1, longest // _SYLLABLE)
        yield from range(start + step, end, step)
        yield end
        return
    for stop in (*(match.end() for match in cuts[0].finditer(text, start, end)), end):
        if _length(text[start:stop].strip()) <= longest:
            yield stop
        else:
            yield from _stops(text, start, stop, longest, cuts[1:])
        start = stop


class _PieceCall(UpstreamCall):
    """
    The call that speaks one piece, whose responses wait here until they are taken. Must be closed.

    *ended* is called when all responses have arrived. Raises :class:`ServiceError`.
    """

    def __init__(self, upstream: UpstreamClient, request: InferRequest, ended: Callable[[], None]) -> None:
        super().__init__(upstream, CallProgress())
        self.over = False
        self._request = request
        self._on_end = ended
        self._waiting: deque[InferResponse] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._send()

    def _encode(self, lora: Lora | None) -> InferRequest:
        return self._request

    def receive(self, responses: Sequence[InferResponse]) -> None:
        self.progress.steps += len(responses)
        self._waiting += responses
        if len(self._waiting) > _MAX_WAITING and not self._pauses:
            self.pause()
        self._news.set()

    def _ended(self, error: Exception | None) -> None:
        self.over = True
        self._error = error
        self._release(error)
        self._news.set()
        if error is None:
            self._on_end()

    async def next(self, timeout: float) -> InferResponse | None:
        """Return the next response, ``None`` after the last one. Raises :class:`ServiceError`."""
        while not self._waiting:
            if self._pauses:
                self.resume()
            if self._error is not None:
                raise self._error
            if self.over:
                return None
            self._news.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._news.wait()
            except TimeoutError:
                what = "audio"
                if self.progress.steps:
                    what = "further audio"
                self._fail(silence_error(what, timeout))
        return self._waiting.popleft()

    def close(self) -> None:
        """Stop the backend's work if it has not ended."""
        if not self.over:
            self.over = True
            self._abort(None)
        self._waiting.clear()
        # Breaks a reference cycle: the error's traceback has a frame with this call.
        self._error = None
        self.progress = CallProgress()


class SpeechRun:
    """
    The synthesis of *texts*, one after the other, as *job* says for each. Must be closed.

    *progress* gets the times of what is sent and comes.
    """

    def __init__(
        self,
        upstream: UpstreamClient,
        model: ServedModel,
        job: SynthesisJob,
        texts: Sequence[str],
        limits: TimeLimits,
        progress: AnswerState,
    ) -> None:
        self._upstream = upstream
        self._model = model
        self._job = job
        self._limits = limits
        self._left = deque(enumerate(texts))
        self._progress = progress
        self._current: _PieceCall | None = None
        self._upcoming: _PieceCall | None = None

    async def pieces(self) -> AsyncIterator[AsyncIterator[Speech]]:
        """Yield the parts of each text. Raises :class:`ServiceError`, also for a text without any audio."""
        while self._left or self._upcoming is not None:
            if self._current is not None:
                self._current.close()
            self._current = self._upcoming or self._open()
            self._upcoming = None
            self._look_ahead()
            yield self._parts(self._current)

    async def _parts(self, answers: _PieceCall) -> AsyncIterator[Speech]:
        progress = self._progress
        adapter = self._model.adapter
        silent = True
        while True:
            if progress.first is not None:
                limit = self._limits.idle
            else:
                limit = self._limits.first_token
            response = await answers.next(limit)
            if response is None:
                break
            part: Speech = adapter.decode(self._job, (response,))
            if not part.data:
                # Some end with an empty one.
                continue
            if progress.first is None:
                progress.first = monotonic()
            silent = False
            yield part
        if silent:
            raise UpstreamError("The model sent no audio for the text.", code="no_audio")

    def _open(self) -> _PieceCall:
        """Send the next text. Raises :class:`ServiceError`."""
        number, text = self._left[0]
        (request,) = self._model.adapter.encode(replace(self._job, id=f"{self._job.id}-{number}", text=text))
        if self._progress.sent is None:
            self._progress.sent = monotonic()
        answers = _PieceCall(self._upstream, request, self._look_ahead)
        self._left.popleft()
        return answers

    def _look_ahead(self) -> None:
        """Send the next text if all of the current one's audio has come, and no further one."""
        current = self._current
        if current is not None and current.over and self._upcoming is None and self._left:
            # What cannot be sent now is tried again in its turn.
            with suppress(ServiceError):
                self._upcoming = self._open()

    def close(self) -> None:
        """Stop the work on the backend."""
        self._left.clear()
        for answers in (self._current, self._upcoming):
            if answers is not None:
                answers.close()
        self._current = None
        self._upcoming = None
        self._progress.ended = monotonic()
