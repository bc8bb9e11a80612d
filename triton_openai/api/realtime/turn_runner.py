"""The turns of one transcription session: the one that is being spoken, and those that are being written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import asdict

from triton_openai.access.authorizer import AuthorizedCall
from triton_openai.api.media_limits import counting_audio
from triton_openai.api.realtime.events import TranscriptionSettings, error_body, server_event
from triton_openai.api.realtime.input_audio import InputAudio
from triton_openai.api.realtime.turns import LiveTurn, Turn, TurnRequest, WholeTurn, job_of
from triton_openai.api.service import Service, begin
from triton_openai.api.transcriptions import recognition_of
from triton_openai.errors import ServiceError, ServiceOverloaded
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, NoStream, Operation
from triton_openai.serving.session import CallSession

# Turns of one session that are written down at the same time; above that, audio waits.
_MAX_TURNS = 8
# How long, in seconds. Meanwhile nothing is read of the client, not even its pings, and many clients give up after 40
# seconds without an answer to these. So the next turn does not wait again, until one has ended.
_MAX_WAIT = 20.0
_PREFIX = "conversation.item.input_audio_transcription"


class Turns:
    """
    The turns of *session*, each of which is a call of *operation*.

    With *beta*, items have the events of the beta form. *on_forgotten* is called when a turn needs no memory any more.
    """

    def __init__(
        self,
        session: CallSession,
        service: Service,
        operation: Operation,
        *,
        beta: bool,
        on_forgotten: Callable[[], object],
    ) -> None:
        #: The turn that is being spoken.
        self.current: Turn | None = None
        self._session = session
        self._service = service
        self._operation = operation
        self._beta = beta
        self._on_forgotten = on_forgotten
        self._last_item: str | None = None
        # Those that are being written down, with the current one.
        self._open: set[Turn] = set()
        self._ended = asyncio.Event()
        # Whether a turn has waited in vain since there was room for one.
        self._late = False

    @property
    def size(self) -> int:
        """The bytes of audio that they keep."""
        return sum(turn.size for turn in self._open)

    async def begin(
        self, audio: InputAudio, position: int, model: ServedModel, settings: TranscriptionSettings, *, detected: bool
    ) -> None:
        """
        Begin a turn at a *position* of *audio*; if it was *detected*, report that.

        Waits if too many are open. Raises :class:`ServiceOverloaded` if that takes too long.
        """
        await self._wait_for_others()
        job, languages = job_of(model, settings)
        if recognition_of(model).live_idle is None:
            turn: Turn = WholeTurn(position, audio.rate, job, languages)
        else:
            turn = LiveTurn(position, audio.rate, job, languages, model)
        self.current = turn
        self._open.add(turn)
        if isinstance(turn, LiveTurn):
            self._transcribe(turn, settings)
        if detected:
            start = audio.milliseconds(position)
            await self._send("input_audio_buffer.speech_started", audio_start_ms=start, item_id=turn.item_id)

    async def _wait_for_others(self) -> None:
        """Wait until there is room for a turn. Raises :class:`ServiceOverloaded`."""
        wait = _MAX_WAIT
        if self._late:
            wait = 0.0
        self._late = True
        try:
            async with asyncio.timeout(wait):
                while len(self._open) >= _MAX_TURNS:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError as error:
            raise ServiceOverloaded(
                f"The model is late: {_MAX_TURNS} turns of the session wait for it. Audio was dropped."
            ) from error
        self._late = False

    async def feed(self, audio: InputAudio, end: int) -> None:
        """Give the current turn, if there is one, its *audio* up to *end*."""
        turn = self.current
        if turn is not None:
            pcm = audio.take(turn.end, end)
            audio.drop_before(end)
            await turn.feed(pcm)

    async def end(self, audio: InputAudio, position: int, settings: TranscriptionSettings, *, detected: bool) -> None:
        """End the current turn at a *position* of *audio*, and report its item; if that was *detected*, report it."""
        await self.feed(audio, position)
        turn = self.current
        assert turn is not None, "it has begun"
        self.current = None
        turn.finish()
        if detected:
            end = audio.milliseconds(position)
            await self._send("input_audio_buffer.speech_stopped", audio_end_ms=end, item_id=turn.item_id)
        await self._report_item(turn)
        if not isinstance(turn, LiveTurn):
            self._transcribe(turn, settings)

    async def _report_item(self, turn: Turn) -> None:
        previous = self._last_item
        self._last_item = turn.item_id
        await self._send("input_audio_buffer.committed", previous_item_id=previous, item_id=turn.item_id)
        item = _item(turn.item_id)
        if self._beta:
            await self._send("conversation.item.created", previous_item_id=previous, item=item)
        else:
            await self._send("conversation.item.added", previous_item_id=previous, item=item)
            await self._send("conversation.item.done", previous_item_id=previous, item=item)

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._session.send(server_event(kind, **fields))

    def drop(self) -> None:
        """Forget the current turn: it becomes no item."""
        turn = self.current
        self.current = None
        if turn is not None:
            self._forget(turn)

    def close(self) -> None:
        """Forget all turns: the session ends."""
        for turn in tuple(self._open):
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        """Note that *turn* is written down, or never will be."""
        if turn.task is not None:
            turn.task.cancel()
        turn.close()
        self._open.discard(turn)
        self._ended.set()
        self._on_forgotten()

    def _transcribe(self, turn: Turn, settings: TranscriptionSettings) -> None:
        """Begin to write *turn* down."""
        turn.task = self._session.start(self._answer(turn, settings), then=lambda _: self._forget(turn))

    async def _answer(self, turn: Turn, settings: TranscriptionSettings) -> None:
        """Write *turn* down."""
        record = self._session.new_record()
        part = {"item_id": turn.item_id, "content_index": 0}

        async def on_delta(delta: str) -> None:
            await self._send(f"{_PREFIX}.delta", **part, delta=delta)

        async def work(authorized: AuthorizedCall) -> None:
            call: Call[TurnRequest] = Call(
                self._operation,
                TurnRequest(**asdict(settings)),
                authorized.key,
                record,
                NoStream(),
                headers=self._session.opening.headers,
                reservation=authorized.reservation,
            )
            async with counting_audio(self._service, call):
                try:
                    context = await begin(self._service, call)
                    record.response_id = turn.job.id
                    text = await context.admitted(partial(turn.transcribe, on_delta=on_delta), param="audio")
                finally:
                    record.audio_seconds = {"input": turn.seconds}
            fields: dict[str, Any] = {"transcript": text.text}
            if text.language is not None:
                fields["languages"] = [{"code": text.language}]
            usage = {"type": "duration", "seconds": round(turn.seconds, 3)}
            await self._send(f"{_PREFIX}.completed", **part, **fields, usage=usage, headers=record.answer_headers())

        async def failed(error: ServiceError) -> None:
            headers = record.answer_headers(error)
            await self._send(f"{_PREFIX}.failed", **part, error=error_body(error), headers=headers)

        await self._session.run_call(record, self._operation.group, work, failed)


def _item(item_id: str) -> dict[str, Any]:
    """Return the item of a turn, whose text follows."""
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
