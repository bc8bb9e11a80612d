"""
The events of transcription sessions, in both forms that OpenAI's API has had.

The general form has ``session.update`` with the fields nested in ``audio.input``. The beta form, for clients that send
``OpenAI-Beta: realtime=v1``, has ``transcription_session.update`` with flat fields. Source: openai-python 3.57,
``types/realtime`` and ``types/beta/realtime``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from triton_openai.api.bodies import Milliseconds, Share, encode, explain, new_id
from triton_openai.errors import InvalidRequest, InvalidValue, ServiceError
from triton_openai.media.voice_activity import Pauses

_T = TypeVar("_T", bound=msgspec.Struct)
_Text = Annotated[str, Meta(max_length=4096)]
#: The samples a second of G.711 (ITU-T), and of OpenAI's PCM.
G711_RATE = 8_000
PCM_RATE = 24_000
# The most bytes of what a session is to be.
_MAX_SESSION_SIZE = 64 * 1024
# The names of the formats in the beta form.
_BETA_FORMATS: Mapping[str, str] = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}


class ClientEvent(msgspec.Struct):
    """An event of the client. What it has beside these fields is ignored."""

    type: str
    event_id: Annotated[str, Meta(max_length=512)] | None = None
    #: Audio in base64.
    audio: str | None = None
    #: What a session is to be.
    session: msgspec.Raw = msgspec.Raw()


# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_CLIENT_EVENT = msgspec.json.Decoder(ClientEvent)


class AudioFormat(msgspec.Struct, frozen=True):
    """How audio is sent: samples of 16 bits (little-endian), or G.711 with the μ-law or the A-law; one channel."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    #: Samples a second of PCM: 24,000 unless another rate is named. G.711 has 8,000.
    rate: Annotated[int, Meta(ge=8_000, le=48_000)] | None = None

    @property
    def samples_per_second(self) -> int:
        """The rate, also where it is not named."""
        if self.type != "audio/pcm":
            return G711_RATE
        return self.rate or PCM_RATE


class TranscriptionUpdate(msgspec.Struct, frozen=True):
    """What and how is written down. A field that is left out stays as it was."""

    model: str | UnsetType | None = UNSET
    language: _Text | UnsetType | None = UNSET
    languages: Sequence[_Text] | UnsetType | None = UNSET
    prompt: _Text | UnsetType | None = UNSET
    keywords: Sequence[_Text] | UnsetType | None = UNSET


class DetectionUpdate(msgspec.Struct, frozen=True):
    """How the ends of turns are detected. A field that is left out stays as it was."""

    type: Literal["server_vad", "semantic_vad"] | UnsetType = UNSET
    threshold: Share | UnsetType | None = UNSET
    prefix_padding_ms: Milliseconds | UnsetType | None = UNSET
    silence_duration_ms: Milliseconds | UnsetType | None = UNSET


class InputUpdate(msgspec.Struct, frozen=True):
    """The field ``audio.input``."""

    format: AudioFormat | UnsetType | None = UNSET
    transcription: TranscriptionUpdate | UnsetType | None = UNSET
    turn_detection: DetectionUpdate | UnsetType | None = UNSET


class AudioUpdate(msgspec.Struct, frozen=True):
    """The field ``audio``."""

    input: InputUpdate | UnsetType = UNSET


class SessionUpdate(msgspec.Struct, frozen=True):
    """A session in the general form."""

    type: str = "transcription"
    audio: AudioUpdate | UnsetType = UNSET


class BetaUpdate(msgspec.Struct, frozen=True):
    """A session in the beta form."""

    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | UnsetType | None = UNSET
    input_audio_transcription: TranscriptionUpdate | UnsetType | None = UNSET
    turn_detection: DetectionUpdate | UnsetType | None = UNSET


class TranscriptionSettings(msgspec.Struct, frozen=True):
    """What and how is written down."""

    #: An empty name means the default model.
    model: str = ""
    language: str | None = None
    languages: Sequence[str] = ()
    prompt: str | None = None
    keywords: Sequence[str] = ()


class DetectionSettings(msgspec.Struct, frozen=True):
    """How the ends of turns are detected: OpenAI's defaults."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500

    @property
    def pauses(self) -> Pauses:
        """The same in seconds."""
        return Pauses(
            threshold=self.threshold,
            padding=self.prefix_padding_ms / 1000,
            silence=self.silence_duration_ms / 1000,
        )


class SessionSettings(msgspec.Struct, frozen=True):
    """What a session is."""

    format: AudioFormat = AudioFormat()
    transcription: TranscriptionSettings = TranscriptionSettings()
    #: ``None``: the client says where a turn ends.
    detection: DetectionSettings | None = DetectionSettings()

    def updated(self, update: InputUpdate) -> SessionSettings:
        """Return the settings after *update*. Raises :class:`InvalidValue`."""
        settings = self
        if isinstance(update.format, AudioFormat):
            settings = replace(settings, format=update.format)
        elif update.format is None:
            settings = replace(settings, format=AudioFormat())
        if update.transcription is None:
            settings = replace(settings, transcription=TranscriptionSettings())
        elif isinstance(update.transcription, TranscriptionUpdate):
            settings = replace(settings, transcription=_merged(settings.transcription, update.transcription))
        if update.turn_detection is None:
            settings = replace(settings, detection=None)
        elif isinstance(update.turn_detection, DetectionUpdate):
            if update.turn_detection.type == "semantic_vad":
                raise InvalidValue(
                    "Turns are detected by voice activity only: 'server_vad', or null.",
                    "session.audio.input.turn_detection.type",
                )
            before = settings.detection or DetectionSettings()
            settings = replace(settings, detection=_merged(before, update.turn_detection))
        return settings

    def rendered(self, session_id: str, expires_at: int) -> dict[str, Any]:
        """Return the session in the general form."""
        audio_format: dict[str, Any] = {"type": self.format.type}
        if self.format.type == "audio/pcm":
            audio_format["rate"] = self.format.samples_per_second
        return {
            "id": session_id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "expires_at": expires_at,
            "audio": {
                "input": {
                    "format": audio_format,
                    "noise_reduction": None,
                    "transcription": self._transcription(),
                    "turn_detection": self._detection(),
                }
            },
            "include": None,
        }

    def rendered_as_beta(self, session_id: str, expires_at: int) -> dict[str, Any]:
        """Return the session in the beta form."""
        names = {name: beta for beta, name in _BETA_FORMATS.items()}
        return {
            "id": session_id,
            "object": "realtime.transcription_session",
            "expires_at": expires_at,
            "input_audio_format": names[self.format.type],
            "input_audio_noise_reduction": None,
            "input_audio_transcription": self._transcription(),
            "turn_detection": self._detection(),
            "include": None,
        }

    def _transcription(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self.transcription)
        return {name: value for name, value in fields.items() if value or name == "model"}

    def _detection(self) -> dict[str, Any] | None:
        if self.detection is None:
            return None
        return {"type": "server_vad", **msgspec.structs.asdict(self.detection)}


def _merged(settings: _T, update: msgspec.Struct) -> _T:
    """Return *settings* with what *update* has; null is the default."""
    defaults = type(settings)()
    changes = {}
    for name in settings.__struct_fields__:
        value = getattr(update, name)
        if value is None:
            changes[name] = getattr(defaults, name)
        elif value is not UNSET:
            changes[name] = value
    return replace(settings, **changes)


def read_event(frame: bytes) -> ClientEvent:
    """Return the event in *frame*. Raises :class:`InvalidRequest`."""
    try:
        return _CLIENT_EVENT.decode(frame)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"The event is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The event's JSON is nested too deeply.", code="invalid_json") from error


_GENERAL_UPDATE = msgspec.json.Decoder(SessionUpdate)
_BETA_UPDATE = msgspec.json.Decoder(BetaUpdate)


def read_update(session: msgspec.Raw) -> InputUpdate:
    """Return the update of a *session* in the general form. Raises :class:`InvalidRequest`."""
    update: SessionUpdate = _read(session, _GENERAL_UPDATE)
    if update.type != "transcription":
        raise InvalidValue(
            "This service has transcription sessions only: 'session.type' must be 'transcription'.", "session.type"
        )
    if update.audio is UNSET or update.audio.input is UNSET:
        return InputUpdate()
    return update.audio.input


def read_beta_update(session: msgspec.Raw) -> InputUpdate:
    """Return the update of a *session* in the beta form. Raises :class:`InvalidRequest`."""
    update: BetaUpdate = _read(session, _BETA_UPDATE)
    audio_format: AudioFormat | UnsetType | None
    if isinstance(update.input_audio_format, str):
        audio_format = msgspec.convert({"type": _BETA_FORMATS[update.input_audio_format]}, AudioFormat)
    else:
        audio_format = update.input_audio_format
    return InputUpdate(
        format=audio_format,
        transcription=update.input_audio_transcription,
        turn_detection=update.turn_detection,
    )


def _read(session: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    size = memoryview(session).nbytes
    if not size:
        raise InvalidRequest("The event has no 'session'.", param="session", code="missing_required_parameter")
    if size > _MAX_SESSION_SIZE:
        raise InvalidRequest(
            f"The session has more than {_MAX_SESSION_SIZE} bytes.", param="session", code="string_too_long"
        )
    try:
        return decoder.decode(session)
    except msgspec.ValidationError as error:
        raise explain(str(error), "session") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest("The session cannot be read.", param="session", code="invalid_json") from error


def server_event(kind: str, **fields: Any) -> bytes:
    """Return the frame of an event of the service."""
    return encode({"type": kind, "event_id": new_id("event", "_"), **fields})


def error_event(error: ServiceError, event_id: str | None = None, *, headers: Mapping[str, str] | None = None) -> bytes:
    """
    Return the frame that reports *error*; *event_id* is that of the client's event.

    *headers* are what the headers of an answer over HTTP say: by default, those of the error.
    """
    if headers is None:
        headers = error.header_fields()
    return server_event("error", error={**error_body(error), "event_id": event_id}, headers=headers)


def error_body(error: ServiceError) -> dict[str, Any]:
    """Return *error* as the API writes it."""
    body: dict[str, Any] = msgspec.to_builtins(error.body())
    return body
