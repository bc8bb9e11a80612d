"""
``POST /v1/audio/transcriptions`` and ``POST /v1/audio/translations``: what is spoken in a file, as text.

Source of the wire format: OpenAI's ``audio`` (openai-openapi 2.3.0). What a model does not report of a segment of
``verbose_json`` is empty or null there; segments of models without times are the chunks that they were sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from triton_openai.adapters._common.base import Recognition
from triton_openai.answer.recognition import TranscriptionOptions
from triton_openai.answer.repetition import compression_ratio
from triton_openai.answer.run_group import timeout_error
from triton_openai.answer.transcription import Transcription
from triton_openai.api.bodies import (
    FileField,
    FormRequest,
    Milliseconds,
    ModelRequest,
    Share,
    encode,
    json_reply,
    new_id,
    report_ignored,
)
from triton_openai.api.media_limits import Upload, audio_too_large, form_of, max_form_size, receiving_audio
from triton_openai.api.parameters import refusing
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.api.sse import data_event
from triton_openai.api.uploaded_files import find_file, read_file
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.jobs import Segment, TranscriptionJob, TranslationJob, Word
from triton_openai.languages import LANGUAGES, code_of
from triton_openai.media.audio import Recording, decoded_size, require_audio
from triton_openai.media.voice_activity import Pauses
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Form, Reply, Whole

_Format = Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"]
_TIMED = ("srt", "vtt", "verbose_json")


class VoiceActivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    How speech is distinguished from silence; times are in milliseconds.

    ``threshold`` is the probability of speech; without the extra ``vad`` a level from 0 (-60 dBFS) to 1 (-20 dBFS).
    """

    type: Literal["server_vad"]
    threshold: Share = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 200


# How clients name themselves that refuse an answer whose segments have null in place of a number, or lack it. Source:
# the schema of answers in @ai-sdk/openai 3.0.141, where both probabilities are required numbers.
_CLIENTS_OF_NUMBERS = ("ai-sdk/",)


class _AudioRequest(FormRequest, kw_only=True):
    """What both requests have."""

    #: WAV, FLAC, Ogg, MP3, MP4, WebM or AAC, whatever its name says.
    file: FileField
    #: What precedes the audio, or how its words are written; for models whose operator says that they have room for it.
    prompt: str | None = None
    response_format: _Format = "json"
    #: Ignored by models that take none.
    temperature: Share | None = None


# Names of OpenAI's API that would change the answer.
@refusing(known_speaker_names=None, known_speaker_references=None)
class TranscriptionRequest(_AudioRequest, kw_only=True):
    """
    The request, a form.

    ``language`` is an ISO 639-1 code or an English name; ``languages`` restricts what is found out. Without
    ``chunking_strategy``, the audio is cut only where the model must have it so; "auto" and an object (as JSON, or as
    fields with brackets) also cut it at silence. ``stream`` goes with the formats "json" and "text".
    """

    language: str | None = None
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    #: What has times in the format "verbose_json": "segment", and "word" for models that return times.
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ()
    #: "logprobs": the tokens with their probabilities, in the format "json", of models that return them.
    include: tuple[str, ...] = ()
    stream: bool = False
    chunking_strategy: str | None = None
    chunking_type: Literal["server_vad"] | None = msgspec.field(default=None, name="chunking_strategy[type]")
    threshold: Share | None = msgspec.field(default=None, name="chunking_strategy[threshold]")
    padding: Milliseconds | None = msgspec.field(default=None, name="chunking_strategy[prefix_padding_ms]")
    silence: Milliseconds | None = msgspec.field(default=None, name="chunking_strategy[silence_duration_ms]")


# As in the form.
@refusing(known_speaker_names=None, known_speaker_references=None)
class TranscriptionLine(ModelRequest, kw_only=True):
    """The request as the body of a line of a batch: ``file`` is the id of an uploaded file. The rest is as in forms."""

    file: str
    prompt: str | None = None
    response_format: _Format = "json"
    temperature: Share | None = None
    language: str | None = None
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ()
    include: tuple[str, ...] = ()
    stream: bool | None = None
    chunking_strategy: Literal["auto"] | VoiceActivity | None = None


class TranslationRequest(_AudioRequest, kw_only=True):
    """The request, a form. The answer is in English."""


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The length of the audio in seconds, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class SegmentObject(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what is spoken. ``seek`` is the start in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float = 0.0
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None


class WordObject(msgspec.Struct, frozen=True, kw_only=True):
    """A word, and the seconds in which it is spoken."""

    word: str
    start: float
    end: float


class LogprobObject(msgspec.Struct, frozen=True, kw_only=True):
    """A token, its bytes in UTF-8, and the logarithm of its probability."""

    token: str
    bytes: Sequence[int]
    logprob: float


class TranscriptObject(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; the format "verbose_json" has all fields. ``language`` is an English name."""

    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    text: str
    segments: Sequence[SegmentObject] | UnsetType = UNSET
    words: Sequence[WordObject] | UnsetType = UNSET
    logprobs: Sequence[LogprobObject] | UnsetType = UNSET
    usage: DurationUsage


class TranscriptEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: a piece of the text, and at the end all of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Sequence[LogprobObject] | UnsetType = UNSET


async def transcribe(service: Service, call: Call[Form]) -> Reply:
    """
    Write down what is spoken in a file.

    The formats are JSON, plain text and subtitles. With `stream`, the text comes piece by piece.
    """
    async with receiving_audio(service, call) as upload:
        max_size = max_form_size(service.settings)
        body = await form_of(service, call, TranscriptionRequest, max_size=max_size, upload=upload)
        return await _transcribe(await begin(service, call.with_body(body)), upload)


class _StoredSize(NamedTuple):
    """A recording that is on the disk, as what is reserved for it sees it."""

    size: int

    @property
    def declared_size(self) -> int:
        return self.size


async def transcribe_line(service: Service, call: Call[TranscriptionLine]) -> Reply:
    """Write down what is spoken in an uploaded file, for a line of a batch. A text is a JSON string in the answer."""
    line = call.body
    file = await find_file(service, call.key, line.file, "file")
    max_size = service.settings.audio.max_file_size
    if file.bytes > max_size:
        raise audio_too_large(max_size)
    stored: Call[Any] = call.with_body(_StoredSize(file.bytes))
    async with receiving_audio(service, stored) as upload:
        upload.end()
        content = await read_file(service, file)
        strategy: str | None = None
        if isinstance(line.chunking_strategy, VoiceActivity):
            strategy = encode(line.chunking_strategy).decode()
        else:
            strategy = line.chunking_strategy
        body = TranscriptionRequest(
            model=line.model,
            file=FileField(file.filename, "", content),
            prompt=line.prompt,
            response_format=line.response_format,
            temperature=line.temperature,
            language=line.language,
            languages=line.languages,
            keywords=line.keywords,
            timestamp_granularities=line.timestamp_granularities,
            include=line.include,
            chunking_strategy=strategy,
        )
        reply = await _transcribe(await begin(service, call.with_body(body)), upload)
    assert isinstance(reply, Whole), "it is no stream"
    if reply.media_type == "application/json":
        return reply
    return Whole(encode(reply.body.decode()))


async def _transcribe(context: RequestContext[TranscriptionRequest], upload: Upload) -> Reply:
    body = context.body
    if body.stream and body.response_format in _TIMED:
        raise InvalidValue(f"'stream' does not go with the format '{body.response_format}'.", "stream")
    _check_times(context)
    _check_include(context)
    if body.keywords:
        check_prompt(context.model, "keywords")
    recognition = recognition_of(context.model)
    supported = recognition.languages
    candidates = [code for code in map(code_of, body.languages) if code in supported]
    language = None
    if not supported:
        # Clients send one always, and the model cannot be told.
        report_ignored(context.record, [name for name in ("language", "languages") if getattr(body, name)])
    elif body.language:
        language = language_code(context.model, body.language, "language")
    elif candidates and not recognition.token_ids:
        # The model cannot choose among them.
        language = candidates[0]
    elif body.languages and not candidates:
        language = language_code(context.model, body.languages[0], "languages")
    prompt = prompt_of(body.prompt, body.keywords)
    job = TranscriptionJob(id=new_id("transcr"), samples=b"", language=language, prompt=prompt)
    return await _answer(context, upload, job, pauses=_pauses(body), languages=candidates)


async def translate(service: Service, call: Call[Form]) -> Reply:
    """
    Write down in English what is spoken in a file.

    The formats are JSON, plain text and subtitles.
    """
    async with receiving_audio(service, call) as upload:
        max_size = max_form_size(service.settings)
        body = await form_of(service, call, TranslationRequest, max_size=max_size, upload=upload)
        job = TranslationJob(id=new_id("transl"), samples=b"", prompt=body.prompt or None)
        return await _answer(await begin(service, call.with_body(body)), upload, job)


async def _answer(
    context: RequestContext[Any],
    upload: Upload,
    job: TranscriptionJob,
    *,
    pauses: Pauses | None = None,
    languages: Sequence[str] = (),
) -> Reply:
    """Return the answer to a request for *job*, whose recording is cut at *pauses*. Raises :class:`ServiceError`."""
    body = context.body
    limits = context.service.settings.audio
    if body.response_format == "diarized_json":
        raise UnsupportedParameter(
            "Speakers are not distinguished: 'diarized_json' is not supported.", param="response_format"
        )
    if body.temperature and not recognition_of(context.model).temperature:
        report_ignored(context.record, ["temperature"])
    else:
        job = replace(job, temperature=body.temperature)
    if body.prompt:
        check_prompt(context.model, "prompt")
    await asyncio.to_thread(require_audio)
    if len(body.file.content) > limits.max_file_size:
        raise audio_too_large(limits.max_file_size)
    context.record.response_id = job.id
    return await context.admitted(lambda each: _transcribed(each, upload, job, pauses, languages), param="file")


async def _transcribed(
    context: RequestContext[Any],
    upload: Upload,
    job: TranscriptionJob,
    pauses: Pauses | None,
    languages: Sequence[str],
) -> Reply:
    body = context.body
    limits = context.service.settings.audio
    recognition = recognition_of(context.model)
    # What follows a window is there before the next one is cut.
    longest = recognition.max_seconds * max(limits.parallel_chunks, 2)
    await upload.reserve_decoded(decoded_size(longest, recognition.sample_rate))
    recording = Recording(
        body.file.content,
        rate=recognition.sample_rate,
        max_chunk_seconds=recognition.max_seconds,
        max_seconds=limits.max_duration,
        pauses=pauses,
        on_decoded=lambda seconds: upload.decoded(decoded_size(seconds, recognition.sample_rate)),
    )
    stream = getattr(body, "stream", False)
    options = TranscriptionOptions(
        job=replace(job, language=job.language or recognition.language),
        languages=languages,
        words=_wants_words(body),
        live=stream and context.model.adapter.capabilities.streaming,
        parallel=limits.parallel_chunks,
    )
    transcription = Transcription(context.upstream(), context.model, options)
    try:
        if stream:
            return await context.send_parts(_events(transcription, recording, logprobs=_wants_logprobs(body)))
        async with asyncio.timeout(context.limits.total), aclosing(transcription.deltas(recording)) as deltas:
            async for _ in deltas:
                pass
    except TimeoutError as error:
        raise timeout_error(context.limits.total) from error
    finally:
        context.record.audio_seconds = {"input": recording.seconds}
    if body.response_format == "json" and _wants_logprobs(body):
        usage = DurationUsage(seconds=math.ceil(recording.seconds))
        return json_reply(TranscriptObject(text=transcription.text, logprobs=_logprobs(transcription), usage=usage))
    granularities = getattr(body, "timestamp_granularities", ())
    unknown = _unknown_number(context.call)
    return _rendered(body.response_format, transcription, recording, granularities, task=_task(job), unknown=unknown)


def _unknown_number(call: Call[Any]) -> float | None:
    """Return what stands for a probability that is not known: null, but 0 for a client that takes numbers only."""
    agent = call.headers.get("User-Agent", "")
    if any(client in agent for client in _CLIENTS_OF_NUMBERS):
        return 0.0
    return None


def _task(job: TranscriptionJob) -> Literal["transcribe", "translate"]:
    if isinstance(job, TranslationJob):
        return "translate"
    return "transcribe"


async def _events(transcription: Transcription, recording: Recording, *, logprobs: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(transcription.deltas(recording)) as deltas:
        async for delta in deltas:
            yield data_event(encode(TranscriptEvent(type="transcript.text.delta", delta=delta)))
    done = TranscriptEvent(type="transcript.text.done", text=transcription.text)
    if logprobs:
        done = replace(done, logprobs=_logprobs(transcription))
    yield data_event(encode(done))


def _logprobs(transcription: Transcription) -> Sequence[LogprobObject]:
    return [
        LogprobObject(token=each.token, bytes=list(each.token.encode()), logprob=each.logprob)
        for each in transcription.logprobs
    ]


def _rendered(
    form: _Format,
    transcription: Transcription,
    recording: Recording,
    granularities: Sequence[str],
    *,
    task: Literal["transcribe", "translate"],
    unknown: float | None,
) -> Reply:
    """
    Return the answer in the format *form*.

    *granularities* are what has times in "verbose_json", and *unknown* stands there for an unknown probability.
    """
    segments = transcription.segments
    usage = DurationUsage(seconds=math.ceil(recording.seconds))
    if form == "json":
        return json_reply(TranscriptObject(text=transcription.text, usage=usage))
    if form == "verbose_json":
        code = "en"
        if task == "transcribe":
            code = transcription.language or ""
        verbose = TranscriptObject(
            task=task,
            language=LANGUAGES.get(code, code),
            duration=recording.seconds,
            text=transcription.text,
            usage=usage,
        )
        if "segment" in granularities or not granularities:
            verbose = replace(
                verbose,
                segments=[
                    _segment(number, segment, recording.seconds, unknown) for number, segment in enumerate(segments)
                ],
            )
        if "word" in granularities:
            words = [_word(word, recording.seconds) for word in transcription.words]
            verbose = replace(verbose, words=words)
        return json_reply(verbose)
    if form == "srt":
        point = ","
    else:
        point = "."
    cues = [f"{_time(each.start, point)} --> {_time(each.end, point)}\n{_line(each)}\n\n" for each in segments]
    if form == "srt":
        text = "".join([f"{number}\n{cue}" for number, cue in enumerate(cues, 1)])
    elif form == "vtt":
        text = "".join(("WEBVTT\n\n", *cues))
    else:
        text = f"{transcription.text}\n"
    return Whole(text.encode(), media_type="text/plain; charset=utf-8")


def _rounded(seconds: float, duration: float) -> float:
    """Return *seconds* in milliseconds, not behind the end of the audio: resampled audio can be a little longer."""
    return min(round(seconds, 3), duration)


def _or(number: float | None, unknown: float | None) -> float | None:
    """Return *number*, or *unknown* in its place."""
    if number is None:
        return unknown
    return number


def _segment(number: int, segment: Segment, duration: float, unknown: float | None) -> SegmentObject:
    return SegmentObject(
        id=number,
        seek=round(segment.start * 100),
        start=_rounded(segment.start, duration),
        end=_rounded(segment.end, duration),
        text=segment.text,
        tokens=segment.tokens,
        temperature=segment.temperature or 0.0,
        avg_logprob=_or(segment.avg_logprob, unknown),
        compression_ratio=compression_ratio(segment.text),
        no_speech_prob=_or(segment.no_speech_prob, unknown),
    )


def _word(word: Word, duration: float) -> WordObject:
    return WordObject(word=word.text, start=_rounded(word.start, duration), end=_rounded(word.end, duration))


def _time(seconds: float, point: str) -> str:
    """Return a time of subtitles."""
    minutes, thousandths = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"


def _line(segment: Segment) -> str:
    """Return the text of a subtitle, which an empty line or an arrow would end."""
    return " ".join(segment.text.split()).replace("-->", "->")


def recognition_of(model: ServedModel) -> Recognition:
    """Return how *model*, which recognizes speech, takes it."""
    recognition = model.adapter.capabilities.recognition
    assert recognition is not None, "the model takes the job"
    return recognition


def prompt_of(prompt: str | None, keywords: Sequence[str]) -> str | None:
    """Return the prompt for a recognizer that has the *keywords* too; ``None`` for none."""
    return " ".join(filter(None, (prompt, ", ".join(keywords)))) or None


def language_code(model: ServedModel, name: str, param: str) -> str:
    """Return the code of the language *name*. Raises :class:`InvalidRequest` if *model* does not take it."""
    code = code_of(name)
    codes = recognition_of(model).languages
    if code not in codes:
        raise InvalidRequest(
            f"The model '{model.name}' does not take the language '{name[:50]}'. It takes {', '.join(codes)}.",
            param=param,
            code="invalid_language",
        )
    return code


def _wants_words(body: Any) -> bool:
    """Return whether a request has the times of words in its answer."""
    return body.response_format == "verbose_json" and "word" in getattr(body, "timestamp_granularities", ())


def _wants_logprobs(body: Any) -> bool:
    return "logprobs" in getattr(body, "include", ())


def _check_times(context: RequestContext[TranscriptionRequest]) -> None:
    """Raise :class:`UnsupportedParameter` for times of words where there is nothing to place words by."""
    body = context.body
    recognition = recognition_of(context.model)
    if body.timestamp_granularities and body.response_format != "verbose_json":
        report_ignored(context.record, ["timestamp_granularities"])
    if _wants_words(body) and not (recognition.words or recognition.segments):
        raise UnsupportedParameter(
            f"The model '{context.model.name}' returns no times, by which words could be placed. Whisper's engine does "
            "(its operator names its tokenizer), and a model that is described with 'outputs.words' or "
            "'outputs.segments'.",
            param="timestamp_granularities",
        )


def _check_include(context: RequestContext[TranscriptionRequest]) -> None:
    """Raise :class:`InvalidValue` or :class:`UnsupportedParameter` for what cannot be included in the answer."""
    body = context.body
    unknown = [name for name in body.include if name != "logprobs"]
    if unknown:
        raise InvalidValue(f"'include' takes 'logprobs', not '{unknown[0][:50]}'.", "include")
    if not _wants_logprobs(body):
        return
    if not recognition_of(context.model).logprobs:
        raise UnsupportedParameter(
            f"The model '{context.model.name}' returns no probabilities. If it does, its operator has to describe them "
            "('outputs.logprobs').",
            param="include",
        )
    if body.response_format != "json":
        raise InvalidValue("'include' goes with the format 'json' only.", "include")


def check_prompt(model: ServedModel, param: str) -> None:
    """Raise :class:`UnsupportedParameter`, about *param*, if *model* takes no prompt."""
    if not recognition_of(model).prompt:
        raise UnsupportedParameter(
            f"The model '{model.name}' takes no prompt. If it does, its operator has to configure it ('audio.prompt').",
            param=param,
        )


def _pauses(body: TranscriptionRequest) -> Pauses | None:
    """Return how the audio is cut at silence, if it is. Raises :class:`InvalidValue`."""
    strategy = body.chunking_strategy
    if strategy == "auto":
        return Pauses()
    fields: dict[str, Any] = {
        "type": body.chunking_type,
        "threshold": body.threshold,
        "prefix_padding_ms": body.padding,
        "silence_duration_ms": body.silence,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if not strategy and not fields:
        return None
    try:
        if strategy:
            activity = msgspec.json.decode(strategy, type=VoiceActivity)
        else:
            activity = VoiceActivity(**{"type": "server_vad", **fields})
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidValue(
            "'chunking_strategy' must be 'auto' or an object of the type 'server_vad'.", "chunking_strategy"
        ) from error
    return Pauses(
        threshold=activity.threshold,
        padding=activity.prefix_padding_ms / 1000,
        silence=activity.silence_duration_ms / 1000,
    )
