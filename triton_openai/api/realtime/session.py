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
from typing import NoReturn

import msgspec

from triton_openai import errors, offload
from triton_openai.api.bodies import new_id, now
from triton_openai.api.media_limits import media_reservation
from triton_openai.api.realtime.events import (
    ClientEvent,
    DetectionSettings,
    InputUpdate,
    SessionSettings,
    TranscriptionSettings,
    error_event,
    read_beta_update,
    read_event,
    read_update,
    server_event,
)
from triton_openai.api.realtime.input_audio import InputAudio
from triton_openai.api.realtime.turn_runner import Turns
from triton_openai.api.realtime.turns import job_of
from triton_openai.api.service import Service, job_not_taken_error
from triton_openai.jobs import TranscriptionJob
from triton_openai.media.audio import require_audio
from triton_openai.media.pcm import SAMPLE_SIZE
from triton_openai.media.voice_activity import Detector, SpeechStarted, VoiceActivity, detector_for
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Opening, Query, Reply, Send
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
# Memory is reserved in steps of so many bytes.
_STEP = 256 * 1024
# Events of clients of conversations.
_CONVERSING = ("conversation.", "response.", "output_audio_buffer.")
_BETA = "realtime=v1"
_BETA_SUBPROTOCOL = "openai-beta.realtime-v1"

#: The parameters of the request that opens a session.
QUERY: Query = {
    "intent": ("What the session is for.", {"enum": ["transcription"]}),
    "model": ("The model that transcribes, until the session names another one.", {"type": "string"}),
}
_Handler = Callable[["RealtimeSession", ClientEvent], Awaitable[None]]


class RealtimeSession(CallSession):
    """
    A transcription session of one connection.

    It has more methods than other classes, because each event of the client has one, and audio and turns meet here.
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
        operation = msgspec.structs.replace(operation, jobs=(TranscriptionJob,), label="transcription")
        self._id = new_id("sess", "_")
        self._expires_at = now() + int(MAX_SECONDS)
        self._beta = _is_beta(opening.headers)
        transcription = TranscriptionSettings(model=opening.query.get("model", ""))
        self._settings = SessionSettings(transcription=transcription)
        self._model: ServedModel | None = None
        self._audio = InputAudio(self._settings.format, None)
        # The last one, and the rate that it is for: clients may name any rate, and each has a network of its own.
        self._detector: Detector | None = None
        self._detector_rate = 0
        self._ready = False
        self._reservation = media_reservation(service)
        self._turns = Turns(
            self, service, operation, beta=self._beta, on_forgotten=lambda: self._reservation.shrink(self._kept)
        )
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
        event_id = None
        try:
            event = await offload.run(read_event, frame, cost=offload.json_cost(len(frame)))
            event_id = event.event_id
            handler = _HANDLERS.get(event.type)
            if handler is None:
                _refuse_event(event.type)
            async with self._lock:
                # What was spoken before is still written down. Behind it, a turn would never end.
                if not self._executor.draining.begun:
                    await handler(self, event)
        except errors.ServiceError as error:
            await self.send(error_event(error, event_id))

    def error_frame(self, error: errors.ServiceError, headers: Mapping[str, str]) -> bytes:
        return error_event(error, headers=headers)

    async def finish(self) -> None:
        async with self._lock:
            if self._turns.current is not None:
                await self._end_turn(self._audio.end, detected=self._audio.activity is not None)
        await super().finish()

    def close(self) -> None:
        if self._counted:
            self._counted = False
            sessions = self._service.realtime_sessions
            sessions[self._owner] -= 1
            if not sessions[self._owner]:
                del sessions[self._owner]
        super().close()
        self._turns.close()
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
        if changes_audio and self._turns.current is not None:
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
        detector = self._detector
        if detector is None or rate != self._detector_rate:
            detector = await offload.run(detector_for, rate, cost=_LOADING_COST)
            self._detector = detector
            self._detector_rate = rate
        detector.reset()
        return VoiceActivity(rate, detection.pauses, detector=detector)

    async def _append(self, data: bytes) -> None:
        """Take a few seconds of audio, and what happens in them. Raises :class:`ServiceError`."""
        audio = self._audio
        seconds = len(data) / audio.bytes_per_second
        self._check_length(seconds)
        await self._reservation.grow(self._kept + _in_steps(int(seconds * audio.rate) * SAMPLE_SIZE))
        before = audio.end
        changes = await offload.run(audio.append, data, cost=_DETECTION_COST * seconds)
        activity = audio.activity
        turns = self._turns
        if activity is None and turns.current is None:
            await self._begin_turn(before, detected=False)
        for change in changes:
            if isinstance(change, SpeechStarted):
                await self._begin_turn(change.position, detected=True)
            elif turns.current is not None:
                await self._end_turn(change.position, detected=True)
        await turns.feed(audio, audio.end)
        if activity is not None and turns.current is None:
            audio.drop_before(activity.earliest_start)
        elif activity is not None and turns.current is not None and turns.current.seconds > _MAX_TURN:
            activity.finish(audio.end)
            await self._end_turn(audio.end, detected=True)
        self._reservation.shrink(self._kept)

    async def _begin_turn(self, position: int, *, detected: bool) -> None:
        model = self._model
        assert model is not None, "there is audio"
        await self._turns.begin(self._audio, position, model, self._settings.transcription, detected=detected)

    async def _end_turn(self, position: int, *, detected: bool) -> None:
        await self._turns.end(self._audio, position, self._settings.transcription, detected=detected)

    def _check_length(self, seconds: float) -> None:
        """Raise :class:`InvalidRequest` if the turn has no room for more *seconds*."""
        max_seconds = self._service.settings.audio.max_duration
        turn = self._turns.current
        if turn is not None and turn.seconds + seconds > max_seconds:
            raise errors.InvalidRequest(
                f"The audio is longer than {max_seconds:g} seconds (audio.max_duration): commit or clear it before.",
                param="audio",
                code="audio_too_long",
            )

    @property
    def _kept(self) -> int:
        """The bytes of audio that are kept, in whole steps."""
        return _in_steps(self._audio.size + self._turns.size)

    async def commit(self, event: ClientEvent) -> None:
        """End the turn."""
        turn = self._turns.current
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
        await self._end_turn(end, detected=False)

    async def clear(self, event: ClientEvent) -> None:
        """Forget the turn, and all audio that is not committed."""
        self._audio.clear()
        self._turns.drop()
        await self.send(server_event("input_audio_buffer.cleared"))


def _in_steps(size: int) -> int:
    """Return *size*, rounded up to the steps in which memory is reserved."""
    return -(-size // _STEP) * _STEP


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
