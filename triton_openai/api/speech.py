"""
``POST /v1/audio/speech`` speaks a text, and ``GET /v1/audio/voices`` lists the voices.

Source of the wire format: OpenAI's ``CreateSpeechRequest`` and the events ``speech.audio.delta`` and
``speech.audio.done`` (openai-openapi 2.3.0). OpenAI has no list of voices; this one is as Open WebUI reads it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai import offload
from triton_openai.adapters._common.base import Synthesis
from triton_openai.answer.speech import SpeechRun, longest_piece, pieces
from triton_openai.api.bodies import ModelRequest, encode, json_reply, new_id, report_ignored
from triton_openai.api.media_limits import counting_audio
from triton_openai.api.parameters import accepting
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.api.sse import data_event
from triton_openai.errors import ConfigurationError, InvalidAnswer, InvalidValue
from triton_openai.generation import AnswerState, Generation, Sampling
from triton_openai.jobs import Speech, SynthesisJob
from triton_openai.media.speech_formats import MEDIA_TYPES, Format, encoding_cost
from triton_openai.operations import Call, Reply

if TYPE_CHECKING:
    # Has NumPy in memory, in services whose models speak.
    from triton_openai.media.encode import Samples

_LONGEST_INPUT = 4096
# Seconds that are encoded at once; the first ones are to leave soon.
_FIRST_BLOCK = 0.1
_BLOCK = 1.0
# Of what a model sends as a file, whose length is not known before.
_READING = 20_000


class VoiceId(msgspec.Struct, frozen=True):
    """A voice by its id, which is its name."""

    id: str


@accepting("user")
class SpeechRequest(ModelRequest, kw_only=True):
    """
    The request.

    ``voice`` is one of the model's, in OpenAI's API always required; a model with a single voice takes any name.
    ``language`` is no parameter of OpenAI's.
    """

    input: Annotated[str, Meta(min_length=1, max_length=_LONGEST_INPUT)]
    voice: str | VoiceId | None = None
    response_format: Format = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    instructions: Annotated[str, Meta(max_length=_LONGEST_INPUT)] | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    stream_format: Literal["audio", "sse"] = "audio"

    @property
    def stream(self) -> bool:
        """Whether the answer is sent while it is made, as it always is."""
        return True


class SpeechUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens. No synthesizer in Triton counts any, so they are 0."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class SpeechEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the audio in base64, or its end with the usage."""

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: str | UnsetType = UNSET
    usage: SpeechUsage | UnsetType = UNSET


class VoiceObject(msgspec.Struct, frozen=True, kw_only=True):
    """A voice of a model."""

    id: str
    name: str
    model: str


class VoiceList(msgspec.Struct, frozen=True, kw_only=True):
    """The voices, one after the other of each model."""

    voices: Sequence[VoiceObject]


async def create(service: Service, call: Call[SpeechRequest]) -> Reply:
    """Speak a text. The audio is sent while it is made."""
    async with counting_audio(service, call):
        return await _spoken(await begin(service, call))


async def _spoken(context: RequestContext[SpeechRequest]) -> Reply:
    body = context.body
    model = context.model
    capabilities = model.adapter.capabilities
    voices = model.voices
    if capabilities.synthesis is None or voices is None:
        raise ConfigurationError(f"The adapter '{model.adapter.name}' does not describe its speech.", param="model")
    await voices.reload()
    if isinstance(body.voice, VoiceId):
        name: str | None = body.voice.id
    else:
        name = body.voice
    voice, only = voices.find(name)
    if only and name is not None:
        report_ignored(context.record, ["voice"])
    texts = pieces(body.input, longest_piece(capabilities.synthesis, voice), streams=capabilities.streaming)
    if not texts:
        raise InvalidValue("'input' has nothing to speak.", "input")
    speed = body.speed
    if speed == 1:
        speed = None
    job = SynthesisJob(
        id=new_id("speech"),
        text=texts[0],
        voice=voice,
        speed=speed,
        instructions=body.instructions or None,
        language=body.language,
    )
    return await context.admitted(lambda context: _speak(context, job, texts), param="input")


async def _speak(context: RequestContext[SpeechRequest], job: SynthesisJob, texts: Sequence[str]) -> Reply:
    """Answer with the speech of *texts*. Raises :class:`ServiceError`."""
    body = context.body
    record = context.record
    progress = AnswerState(Generation(id=job.id, prompt=body.input, sampling=Sampling(max_tokens=0)))
    record.answers = [progress]
    record.response_id = job.id
    run = SpeechRun(context.upstream(), context.model, job, texts, context.limits, progress)
    parts = _file(context, run)
    try:
        if body.stream_format == "sse":
            return await context.send_parts(_events(parts))
        return await context.send_parts(parts, MEDIA_TYPES[body.response_format])
    finally:
        run.close()


async def _events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the events for *parts* of a file."""
    async with aclosing(parts):
        async for part in parts:
            if part:
                audio = base64.b64encode(part).decode("ascii")
                yield data_event(encode(SpeechEvent(type="speech.audio.delta", audio=audio)))
    yield data_event(encode(SpeechEvent(type="speech.audio.done", usage=SpeechUsage())))


async def _file(context: RequestContext[SpeechRequest], run: SpeechRun) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the file as they are made, some of them empty. Raises :class:`ServiceError`."""
    from triton_openai.media.encode import encoder

    record = context.record
    kind = context.body.response_format
    synthesis = context.model.adapter.capabilities.synthesis
    assert synthesis is not None, "it was checked before"
    rate = synthesis.rate
    # Before the model is asked: what it needs may be missing.
    made = None
    if rate:
        made = await asyncio.to_thread(encoder, kind, rate)
    async for samples, rate in _spoken_samples(run, synthesis):
        if made is None:
            made = await asyncio.to_thread(encoder, kind, rate)
        start = 0
        while start < len(samples):
            seconds = _FIRST_BLOCK
            if record.audio_seconds:
                seconds = _BLOCK
            block = samples[start : start + round(seconds * rate)]
            data = await offload.run(made.encode, block, cost=encoding_cost(kind, rate, len(block)))
            start += len(block)
            record.audio_seconds = {"output": record.audio_seconds.get("output", 0.0) + len(block) / rate}
            yield data
    assert made is not None, "there was a text"
    yield await offload.run(made.finish, cost=encoding_cost(kind, rate, rate))


async def _spoken_samples(run: SpeechRun, synthesis: Synthesis) -> AsyncIterator[tuple[Samples, int]]:
    """Yield what is spoken, and the rate of its samples. Raises :class:`ServiceError`."""
    from triton_openai.media.encode import Joiner

    rate = synthesis.rate
    async for spoken in run.pieces():
        joiner = Joiner(round(synthesis.overlap * rate))
        async for part in spoken:
            samples, rate = await _samples(part, rate)
            yield joiner.join(samples), rate
        yield joiner.rest(), rate


async def _samples(part: Speech, rate: int) -> tuple[Samples, int]:
    """Return the samples of *part*, and their rate; a file has its own, unless an earlier one had another *rate*."""
    from triton_openai.media.encode import read_audio, resampled, samples_of

    if part.datatype != "file":
        return samples_of(part.data, part.datatype), rate

    def read() -> tuple[Samples, int]:
        samples, own_rate = read_audio(part.data)
        target_rate = rate or own_rate
        return resampled(samples, own_rate, target_rate), target_rate

    try:
        return await offload.run(read, cost=_READING)
    except ValueError as error:
        raise InvalidAnswer("its audio cannot be read", detail=str(error)) from error


async def list_voices(service: Service, call: Call[None]) -> Reply:
    """List the voices of the models that speak, or of one, that the key may use."""
    name = call.query.get("model")
    if name is not None:
        models = [await service.find_model(name, call.key)]
    else:
        models = [model for name, model in service.models.served.items() if call.key.allows(name)]
    voices = []
    for model in models:
        if model.voices is not None:
            await model.voices.reload()
            voices += [VoiceObject(id=voice, name=voice, model=model.name) for voice in model.voices.names()]
    return json_reply(VoiceList(voices=voices))
