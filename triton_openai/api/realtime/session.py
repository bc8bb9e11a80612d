"""
``GET /v1/realtime``, upgraded: a session that transcribes audio while it is being spoken.

Audio arrives in events and is cut into turns, by voice activity or by the client. Each turn becomes an item of the
conversation and is a call of its own, with its own admission, limits, log line and span. Source of the events: OpenAI's
realtime API (openai-python 3.57), see :mod:`triton_openai.api.realtime.events`.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import msgspec

from triton_openai import errors, offload
from triton_openai.access.authorizer import Entered
from triton_openai.api.bodies import new_id, now
from triton_openai.api.realtime.events import (
    ClientEvent,
    DetectionSettings,
    InputUpdate,
    SessionSettings,
    TranscriptionSettings,
    error_body,
    error_event,
    read_beta_update,
    read_event,
    read_update,
    server_event,
)
from triton_openai.api.realtime.input_audio import InputAudio
from triton_openai.api.realtime.turns import LiveTurn, Turn, TurnRequest, WholeTurn, job_of, recognition_of
from triton_openai.api.service import (
    Service,
    begin,
    counting_audio,
    job_not_taken_error,
    media_reservation,
)
from triton_openai.jobs import TranscriptionJob
from triton_openai.media.audio import require_audio
from triton_openai.media.pcm import SAMPLE_SIZE
from triton_openai.media.voice_activity import Detector, SpeechStarted, VoiceActivity, detector_for
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, NoStream, Opening, Reply, Send
from triton_openai.serving.session import CallSession
from triton_openai.serving.websocket import MAX_SECONDS
from triton_openai.shares import may_take

# The largest piece of audio in one event, as OpenAI has it.
_MAX_AUDIO_SIZE = 15 * 1024 * 1024
# The same in base64, and what else an event has.
_MAX_FRAME_SIZE = _MAX_AUDIO_SIZE * 4 // 3 + 64 * 1024
# Characters of base64 that are decoded at once, and the most that pad it.
_BASE64_SLICE = 1024 * 1024
_PADDING = 2
# Seconds of audio that are examined at once.
_SLICE_SECONDS = 5
# Microseconds that it takes to find speech in a second of audio.
_DETECTION_COST = 6_000
# Microseconds that it takes to load the network that does it.
_LOADING_COST = 100_000
# The shortest audio that can be committed, in milliseconds, as OpenAI has it.
_MIN_COMMITTED = 100
# The longest turn that is detected, in seconds: a speaker without pauses sees text, too.
_MAX_TURN = 300.0
# Turns of one session that are transcribed at the same time; above that, audio waits.
_MAX_TURNS = 4
# Memory is reserved in steps of so many bytes.
_STEP = 256 * 1024
# Events of clients of conversations.
_CONVERSING = ("conversation.", "response.", "output_audio_buffer.")
_BETA = "realtime=v1"
_BETA_SUBPROTOCOL = "openai-beta.realtime-v1"

_Handler = Callable[["RealtimeSession", ClientEvent], Awaitable[None]]


class RealtimeSession(CallSession):
    """
    A transcription session of one connection.

    Its methods are the events of the client, and the steps in the life of a turn.
    """

    def __init__(self, service: Service, opening: Opening, send: Send) -> None:
        """Raises :class:`InvalidValue` for another intent, and :class:`ServiceOverloaded` for too many sessions."""
        super().__init__(service.executor, service.authorizer, opening, send)
        intent = opening.query.get("intent", "transcription")
        if intent != "transcription":
            raise errors.InvalidValue("'intent' must be 'transcription'.", "intent")
        self.max_frame_size = min(service.settings.server.max_body_size, _MAX_FRAME_SIZE)
        self._service = service
        operation = next(row for row in service.operations if row.name == "connect_realtime")
        self._operation = msgspec.structs.replace(operation, jobs=(TranscriptionJob,), label="transcription")
        self._id = new_id("sess", "_")
        self._expires_at = now() + int(MAX_SECONDS)
        self._beta = _is_beta(opening.headers)
        transcription = TranscriptionSettings(model=opening.query.get("model", ""))
        self._settings = SessionSettings(transcription=transcription)
        self._model: ServedModel | None = None
        self._audio = InputAudio(self._settings.format, None)
        self._detectors: dict[int, Detector] = {}
        self._ready = False
        self._turn: Turn | None = None
        self._last_item: str | None = None
        # Turns that have not been written down, with the one that is being spoken.
        self._turns: set[Turn] = set()
        self._turn_ended = asyncio.Event()
        self._reservation = media_reservation(service)
        # Audio, and the end of the service.
        self._lock = asyncio.Lock()
        self._owner = opening.key.name
        self._counted = False
        self._count_in()

    def _count_in(self) -> None:
        """Count the session. Raises :class:`ServiceOverloaded`."""
        sessions = self._service.realtime_sessions
        max_sessions = self._service.worker.share(self._service.settings.audio.max_sessions)
        own = sessions[self._owner]
        if not may_take(1, own=own, free=max_sessions - sessions.total()):
            raise errors.ServiceOverloaded("Too many realtime sessions are open (audio.max_sessions).", retry_after=10)
        sessions[self._owner] += 1
        self._counted = True

    # The connection

    async def begin(self) -> None:
        kind = "session.created"
        if self._beta:
            kind = "transcription_session.created"
        await self._send_settings(kind, beta=self._beta)

    async def receive(self, frame: bytes) -> None:
        if self._executor.draining.begun:
            # What was spoken before is still written down.
            return
        event_id = None
        try:
            event = await offload.run(read_event, frame, cost=offload.json_cost(len(frame)))
            event_id = event.event_id
            handler = _HANDLERS.get(event.type)
            if handler is None:
                _refuse_event(event.type)
            async with self._lock:
                await handler(self, event)
        except errors.ServiceError as error:
            await self.send(error_event(error, event_id))

    def error_frame(self, error: errors.ServiceError) -> bytes:
        return error_event(error)

    async def finish(self) -> None:
        async with self._lock:
            if self._turn is not None:
                await self._end_turn(self._audio.end)
        await super().finish()

    def close(self) -> None:
        if self._counted:
            self._counted = False
            self._service.realtime_sessions[self._owner] -= 1
        super().close()
        for turn in self._turns:
            turn.close()
        self._reservation.shrink(0)

    # Settings

    async def update(self, event: ClientEvent) -> None:
        """Take an update in the general form."""
        await self._update(read_update(event.session))
        await self._send_settings("session.updated", beta=False)

    async def update_as_beta(self, event: ClientEvent) -> None:
        """Take an update in the beta form."""
        await self._update(read_beta_update(event.session))
        await self._send_settings("transcription_session.updated", beta=True)

    async def _update(self, update: InputUpdate) -> None:
        """Use other settings from the next turn on. Raises :class:`InvalidRequest`."""
        settings = self._settings.updated(update)
        changes_audio = (settings.format, settings.detection) != (self._settings.format, self._settings.detection)
        if changes_audio and self._turn is not None:
            raise errors.InvalidRequest(
                "The format and the detection of turns cannot change during a turn: commit or clear the audio before.",
                param="session.audio.input",
            )
        if settings.transcription != self._settings.transcription or self._model is None:
            self._model = await self._find_model(settings.transcription)
        self._settings = settings
        if changes_audio:
            self._ready = False

    async def _find_model(self, settings: TranscriptionSettings) -> ServedModel:
        """Return the model that *settings* name, which takes them. Raises :class:`InvalidRequest`."""
        model = await self._service.find_model(settings.model, self.opening.key)
        if TranscriptionJob not in model.jobs:
            raise job_not_taken_error(self._service, model, TranscriptionJob)
        job_of(model, settings)
        return model

    async def _send_settings(self, kind: str, *, beta: bool) -> None:
        if beta:
            session = self._settings.rendered_as_beta(self._id, self._expires_at)
        else:
            session = self._settings.rendered(self._id, self._expires_at)
        await self.send(server_event(kind, session=session))

    # Audio

    async def append(self, event: ClientEvent) -> None:
        """Take further audio."""
        if event.audio is None:
            raise errors.missing("audio")
        data = await _decoded(event.audio)
        await self._prepare()
        size = _SLICE_SECONDS * self._audio.bytes_per_second
        for start in range(0, len(data), size):
            await self._append(data[start : start + size])

    async def _prepare(self) -> None:
        """Get ready for audio with the present settings. Raises :class:`ServiceError`."""
        if self._model is None:
            self._model = await self._find_model(self._settings.transcription)
        if self._ready:
            return
        await asyncio.to_thread(require_audio)
        before = self._audio.milliseconds(self._audio.end)
        activity = None
        if self._settings.detection is not None:
            activity = await self._activity(self._settings.detection)
        self._audio = InputAudio(self._settings.format, activity, before)
        self._ready = True

    async def _activity(self, detection: DetectionSettings) -> VoiceActivity:
        rate = self._settings.format.samples_per_second
        detector = self._detectors.get(rate)
        if detector is None:
            detector = await offload.run(detector_for, rate, cost=_LOADING_COST)
            self._detectors[rate] = detector
        detector.reset()
        return VoiceActivity(rate, detection.pauses, detector=detector)

    async def _append(self, data: bytes) -> None:
        """Take a few seconds of audio, and what happens in them. Raises :class:`ServiceError`."""
        audio = self._audio
        seconds = len(data) / audio.bytes_per_second
        self._check_length(seconds)
        await self._reserve(int(seconds * audio.rate) * SAMPLE_SIZE)
        before = audio.end
        changes = await offload.run(audio.append, data, cost=_DETECTION_COST * seconds)
        activity = audio.activity
        if activity is None and self._turn is None:
            await self._begin_turn(before)
        for change in changes:
            if isinstance(change, SpeechStarted):
                await self._begin_turn(change.position)
                await self._report_start(change.position)
            else:
                await self._end_turn(change.position)
        await self._feed_turn(audio.end)
        if activity is not None and self._turn is None:
            audio.drop_before(activity.earliest_start)
        elif activity is not None and self._turn is not None and self._turn.seconds > _MAX_TURN:
            activity.finish(audio.end)
            await self._end_turn(audio.end)

    def _check_length(self, seconds: float) -> None:
        """Raise :class:`InvalidRequest` if the turn has no room for more *seconds*."""
        max_seconds = self._service.settings.audio.max_duration
        if self._turn is not None and self._turn.seconds + seconds > max_seconds:
            raise errors.InvalidRequest(
                f"The audio is longer than {max_seconds:g} seconds (audio.max_duration): commit or clear it before.",
                param="audio",
                code="audio_too_long",
            )

    async def _reserve(self, more: int) -> None:
        """Reserve memory for what is kept, and *more* bytes. Raises :class:`ServiceOverloaded`."""
        size = self._kept(more)
        self._reservation.shrink(size)
        await self._reservation.grow(size)

    def _kept(self, more: int = 0) -> int:
        """Return the bytes of what is kept, and of *more*, in whole steps."""
        kept = self._audio.size + more + sum(turn.size for turn in self._turns)
        return -(-kept // _STEP) * _STEP

    async def commit(self, event: ClientEvent) -> None:
        """End the turn."""
        turn = self._turn
        milliseconds = 0.0
        if turn is not None:
            milliseconds = turn.seconds * 1000
        if milliseconds < _MIN_COMMITTED:
            raise errors.InvalidRequest(
                f"The input audio buffer cannot be committed: it has {milliseconds:.0f} ms of audio, and at least "
                f"{_MIN_COMMITTED} ms are needed.",
                code="input_audio_buffer_commit_empty",
            )
        end = self._audio.end
        if self._audio.activity is not None:
            self._audio.activity.finish(end)
        await self._end_turn(end, by_client=True)

    async def clear(self, event: ClientEvent) -> None:
        """Forget the turn, and all audio that is not committed."""
        turn = self._turn
        self._turn = None
        self._audio.clear()
        if turn is not None:
            turn.close()
            self._forget(turn)
        await self.send(server_event("input_audio_buffer.cleared"))

    # Turns

    async def _begin_turn(self, position: int) -> None:
        """Begin a turn at *position*."""
        while len(self._turns) >= _MAX_TURNS:
            self._turn_ended.clear()
            await self._turn_ended.wait()
        model = self._model
        assert model is not None, "there is audio"
        job, languages = job_of(model, self._settings.transcription)
        rate = self._audio.rate
        if recognition_of(model).live_idle is None:
            turn: Turn = WholeTurn(position, rate, job, languages)
        else:
            turn = LiveTurn(position, rate, job, languages, model)
        self._turn = turn
        self._turns.add(turn)
        if isinstance(turn, LiveTurn):
            self._transcribe(turn)

    async def _report_start(self, position: int) -> None:
        assert self._turn is not None, "it has begun"
        await self.send(
            server_event(
                "input_audio_buffer.speech_started",
                audio_start_ms=self._audio.milliseconds(position),
                item_id=self._turn.item_id,
            )
        )

    async def _feed_turn(self, end: int) -> None:
        """Give the turn its audio up to *end*."""
        turn = self._turn
        if turn is not None:
            pcm = self._audio.take(turn.end, end)
            self._audio.drop_before(end)
            await turn.feed(pcm)

    async def _end_turn(self, end: int, *, by_client: bool = False) -> None:
        """End the turn at *end*, and report its item."""
        await self._feed_turn(end)
        turn = self._turn
        assert turn is not None, "it has begun"
        self._turn = None
        turn.finish()
        if self._audio.activity is not None and not by_client:
            await self.send(
                server_event(
                    "input_audio_buffer.speech_stopped",
                    audio_end_ms=self._audio.milliseconds(end),
                    item_id=turn.item_id,
                )
            )
        previous = self._last_item
        self._last_item = turn.item_id
        await self.send(server_event("input_audio_buffer.committed", previous_item_id=previous, item_id=turn.item_id))
        item = _item(turn.item_id)
        if self._beta:
            await self.send(server_event("conversation.item.created", previous_item_id=previous, item=item))
        else:
            await self.send(server_event("conversation.item.added", previous_item_id=previous, item=item))
            await self.send(server_event("conversation.item.done", previous_item_id=previous, item=item))
        if not isinstance(turn, LiveTurn):
            self._transcribe(turn)

    def _transcribe(self, turn: Turn) -> None:
        """Begin to write *turn* down."""
        turn.task = self.start(self._answer(turn, self._settings.transcription), then=lambda _: self._forget(turn))

    def _forget(self, turn: Turn) -> None:
        """Note that *turn* is written down, or never will be."""
        if turn.task is not None:
            turn.task.cancel()
        turn.close()
        self._turns.discard(turn)
        self._turn_ended.set()
        self._reservation.shrink(self._kept())

    async def _answer(self, turn: Turn, settings: TranscriptionSettings) -> None:
        """Write *turn* down."""
        record = self.new_record()
        prefix = "conversation.item.input_audio_transcription"
        place = {"item_id": turn.item_id, "content_index": 0}

        async def on_delta(delta: str) -> None:
            await self.send(server_event(f"{prefix}.delta", **place, delta=delta))

        async def work(entered: Entered) -> None:
            call: Call[TurnRequest] = Call(
                self._operation,
                TurnRequest.of(settings),
                entered.key,
                record,
                NoStream(),
                headers=self.opening.headers,
                reservation=entered.reservation,
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
            await self.send(server_event(f"{prefix}.completed", **place, **fields, usage=usage))

        async def failed(error: errors.ServiceError) -> None:
            await self.send(server_event(f"{prefix}.failed", **place, error=error_body(error)))

        await self.run_call(record, self._operation.group, work, failed)


async def _decoded(audio: str) -> bytes:
    """Return the bytes of *audio* in base64. Raises :class:`InvalidRequest`."""
    return await offload.run(_from_base64, audio, cost=offload.BYTE * len(audio))


def _from_base64(audio: str) -> bytes:
    """Return the bytes of *audio*, decoded in slices: each holds the interpreter. Raises :class:`InvalidRequest`."""
    starts = range(0, len(audio), _BASE64_SLICE)
    try:
        if "=" in audio[:-_PADDING]:
            raise ValueError("padding in the middle")
        slices = [binascii.a2b_base64(audio[start : start + _BASE64_SLICE], strict_mode=True) for start in starts]
    except ValueError as error:
        raise errors.InvalidRequest("The audio is not valid base64.", param="audio", code="invalid_base64") from error
    return b"".join(slices)


def _is_beta(headers: Mapping[str, str]) -> bool:
    """Return whether the client asks for the beta form."""
    offered = headers.get("Sec-WebSocket-Protocol", "")
    return _BETA in headers.get("OpenAI-Beta", "") or _BETA_SUBPROTOCOL in offered


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


def _refuse_event(kind: str) -> NoReturn:
    """Raise the error for an event of a *kind* that sessions do not have."""
    known = ", ".join(_HANDLERS)
    if kind.startswith(_CONVERSING):
        message = f"Transcription sessions have no conversation: '{kind[:64]}' is not supported. They take {known}."
    else:
        message = f"There is no event '{kind[:64]}'. Transcription sessions take {known}."
    raise errors.InvalidValue(message, "type")


_HANDLERS: Mapping[str, _Handler] = {
    "session.update": RealtimeSession.update,
    "transcription_session.update": RealtimeSession.update_as_beta,
    "input_audio_buffer.append": RealtimeSession.append,
    "input_audio_buffer.commit": RealtimeSession.commit,
    "input_audio_buffer.clear": RealtimeSession.clear,
}


async def refuse_get(service: Service, call: Call[None]) -> Reply:
    """
    Transcribe audio while it is being spoken, over a WebSocket.

    The request has to be the upgrade to one. The events are those of OpenAI's transcription sessions.
    """
    raise errors.InvalidRequest("This path takes WebSockets only: send the request with 'Upgrade: websocket'.")
