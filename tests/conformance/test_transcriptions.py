"""Transcriptions and translations, by every kind of recognizer, over both transports."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.conformance.calls import in_session_loop
from tests.extended import examples
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, serving
from tests.speech import RATE, SENTENCE, WORDS, encoded, muxed, speak, wav
from tests.standins.repository import RECOGNIZERS
from tests.triton_fixture import TestTriton
from triton_openai.api import conversation, media_limits, transcriptions
from triton_openai.app import SERVICE
from triton_openai.config.tree import (
    AccessSettings,
    AudioLimits,
    AudioSettings,
    BatchesSettings,
    FilesSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.media import audio

pytestmark = in_session_loop

PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
TEXT = " ".join(SENTENCE)
_TEMPLATE = Path(__file__).parents[1] / "fixtures" / "last_message.jinja"


def settings_for(triton: TestTriton, transport: str, **models: ModelSettings) -> Settings:
    """Return settings with a description of each model that needs one; *models* take the place of some."""
    urls = {"http": triton.http_url, "grpc": triton.grpc_url}
    described: dict[str, ModelSettings] = {
        "whisper": ModelSettings(tokenizer=str(triton.tokenizer), aliases=("whisper-1",)),
        "parakeet": ModelSettings(
            adapter="transcriber", inputs={"audio": "INPUT_0"}, outputs={"text": "OUTPUT_0"},
            audio=AudioSettings(languages=("en",), max_seconds=10),
        ),
        "pcm": ModelSettings(
            adapter="transcriber", inputs={"audio": "SPEECH", "language": "LANGUAGE"},
            outputs={
                "text": "OUTPUT_0", "segments": "SEGMENTS", "language": "SPOKEN", "words": "WORDS",
                "logprobs": "SCORES",
            },
            audio=AudioSettings(languages={"auto": "any", "de": "German"}),
        ),
        "by_file": ModelSettings(
            adapter="transcriber", inputs={"audio": "AUDIO"}, outputs={"text": "decoded_texts"},
            audio=AudioSettings(form="base64"),
        ),
        "dictating": ModelSettings(
            adapter="transcriber", inputs={"audio": "SPEECH"}, outputs={"text": "TEXT"}, text="delta",
            audio=AudioSettings(part_seconds=0.5),
        ),
        "chatting": ModelSettings(
            tokenizer=str(triton.tokenizer), chat_template=str(_TEMPLATE), audio_placeholder="<audio{n}>"
        ),
        "by_bytes": ModelSettings(
            adapter="transcriber", inputs={"audio": "AUDIO"}, outputs={"text": "decoded_texts"}
        ),
    }  # fmt: skip
    return Settings(triton=TritonSettings(url=(urls[transport],)), models={**described, **models})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(recognizers: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """The service over each transport."""
    async with AsyncExitStack() as stack:
        found = {}
        for transport in TRANSPORTS:
            settings = settings_for(recognizers, transport)
            found[transport] = await stack.enter_async_context(serving(settings, transport=transport))
            await found[transport].ready()
        yield found


async def send(proxy: Proxy, content: bytes, path: str = PATH, /, *, name: str = "speech.wav", **fields: Any) -> Answer:
    """Send a form with the file *content* and *fields*; a list is a field with brackets."""
    form = aiohttp.FormData()
    for field, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            form.add_field(f"{field}[]" if isinstance(value, list) else field, str(one))
    form.add_field("file", io.BytesIO(content), filename=name)
    async with proxy.client.post(path, data=form) as response:
        return await proxy._answer("POST", path, response)


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(event) for event in answer.events]


async def refused(proxy: Proxy, content: bytes, path: str = PATH, /, **fields: Any) -> tuple[int, str, str]:
    """Return status, param and code of an error."""
    answer = await send(proxy, content, path, **fields)
    assert 200 != answer.status, (fields, answer.body)
    return answer.status, answer.error["param"], answer.error["code"]


def asked(triton: TestTriton, model: str) -> Sequence[Mapping[str, Any]]:
    """Return the inputs of all requests that *model* got so far."""
    return [each["inputs"] for each in triton.record.events() if each["model"] == model and each["event"] == "request"]


async def test_every_recognizer_writes_down_what_it_hears(services: dict[str, Proxy]) -> None:
    """Each kind gives the same text, over both transports, in every format that has no times."""
    file = wav(speak(SENTENCE))
    for model in RECOGNIZERS.keys() - {"chatting"}:
        for transport, proxy in services.items():
            expected = f"any: {TEXT}" if model == "pcm" else TEXT
            answer = await send(proxy, file, model=model)
            assert 200 == answer.status, (model, transport, answer.body)
            assert {"text": expected, "usage": {"type": "duration", "seconds": 3}} == answer.json, (model, transport)
            text = await send(proxy, file, model=model, response_format="text")
            assert f"{expected}\n" == text.body.decode(), (model, transport)
            assert "text/plain; charset=utf-8" == text.headers["Content-Type"]
            stream = await send(proxy, file, model=model, stream="true")
            *deltas, done = events(stream)
            assert {"type": "transcript.text.done", "text": expected} == done, (model, transport)
            assert expected == "".join(each["delta"] for each in deltas)


async def test_times_and_languages_come_from_token_ids(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """Whisper's engine tells the language, and when each word is spoken: in verbose JSON and in subtitles."""
    file = wav(np.concatenate([np.zeros(RATE // 2, np.float32), speak(("hallo", "welt"), pause=0.6)]))
    for proxy in services.values():
        answer = await send(proxy, file, model="whisper-1", response_format="verbose_json")
        body = answer.json
        assert ("transcribe", "german", "hallo welt") == (body["task"], body["language"], body["text"])
        assert pytest.approx(2.5, abs=0.01) == body["duration"]
        assert [(0, 50, 0.5, 0.9, "hallo"), (1, 150, 1.5, 1.9, "welt")] == [
            (each["id"], each["seek"], each["start"], each["end"], each["text"]) for each in body["segments"]
        ]
        assert [[9], [10]] == [each["tokens"] for each in body["segments"]]
        srt = await send(proxy, file, model="whisper", response_format="srt")
        assert (
            "1\n00:00:00,500 --> 00:00:00,900\nhallo\n\n2\n00:00:01,500 --> 00:00:01,900\nwelt\n\n" == srt.body.decode()
        )
        vtt = await send(proxy, file, model="whisper", response_format="vtt")
        assert (
            "WEBVTT\n\n00:00:00.500 --> 00:00:00.900\nhallo\n\n00:00:01.500 --> 00:00:01.900\nwelt\n\n"
            == vtt.body.decode()
        )
    # The language is asked for once, and then told, whatever else the client restricts it to.
    before = len(asked(recognizers, "whisper"))
    restricted = await send(services["grpc"], file, model="whisper", languages=["fr", "en"])
    assert "hallo welt" == restricted.json["text"]
    told = await send(services["grpc"], file, model="whisper", language="German")
    assert "hallo welt" == told.json["text"]
    prompts = [each["DECODER_INPUT_IDS"]["value"] for each in asked(recognizers, "whisper")[before:]]
    french, german = 50_265, 50_261
    assert [[50_258], [50_258, french, 50_359], [50_258, german, 50_359]] == prompts


async def test_the_engine_answers_for_its_model(recognizers: TestTriton) -> None:
    """With a tokenizer, Whisper's engine answers for the model of texts in front of it, and so there are times."""
    tokenizer = ModelSettings(tokenizer=str(recognizers.tokenizer), audio=AudioSettings(prompt=True))
    async with serving(settings_for(recognizers, "grpc", infer_bls=tokenizer)) as proxy:
        await proxy.ready()
        answer = await send(proxy, wav(speak(("try", "again"))), model="infer_bls", response_format="verbose_json")
        before = len(asked(recognizers, "whisper"))
        prompted = await send(
            proxy,
            wav(speak(("try", "again"))),
            model="infer_bls",
            prompt="never again",
            keywords=["welt"],
            language="en",
        )
    assert ["try", "again"] == [each["text"] for each in answer.json["segments"]]
    assert "try again" == prompted.json["text"]
    (prompt,) = [each["DECODER_INPUT_IDS"]["value"] for each in asked(recognizers, "whisper")[before:]]
    assert [50_361, 0, 7, 10, 50_258, 50_259, 50_359] == prompt


async def test_what_clients_send_always(services: dict[str, Proxy]) -> None:
    """What no recognizer takes, or the model cannot be told, is ignored, and a header says so."""
    file, proxy = wav(speak(SENTENCE)), services["http"]
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"model": "zipformer", "language": "en"}, "language"),
        ({"model": "transducer", "language": "en", "languages": ["de"]}, "language, languages"),
        ({"model": "zipformer", "language": "en", "stream": "true"}, "language"),
        ({"model": "infer_bls", "language": "en", "temperature": 0.2}, "temperature"),
        ({"model": "infer_bls", "temperature": 0}, None),
        ({"model": "infer_bls", "timestamp_granularities": ["word", "segment"]}, "timestamp_granularities"),
    ]
    for fields, ignored in cases:
        answer = await send(proxy, file, **fields)
        assert 200 == answer.status, (fields, answer.body)
        assert ignored == answer.headers.get("x-triton-openai-ignored"), fields
    translated = await send(proxy, file, TRANSLATIONS, model="whisper", temperature=0.4)
    assert (200, "temperature") == (translated.status, translated.headers["x-triton-openai-ignored"])


async def test_times_of_words(services: dict[str, Proxy]) -> None:
    """Words have times of their own, of the model or as its segments fit the sound; without segments if so asked."""
    pause = np.zeros(RATE, np.float32)
    file = wav(np.concatenate([speak(("never", "tried")), pause, speak(("no", "matter"))]))
    expected = [("never", 0.0, 0.4), ("tried", 0.5, 0.9), ("no", 2.0, 2.4), ("matter", 2.5, 2.9)]
    for model in ("whisper", "pcm"):
        for granularities in (["word"], ["word", "segment"]):
            answer = await send(
                services["http"],
                file,
                model=model,
                response_format="verbose_json",
                timestamp_granularities=granularities,
            )
            assert 200 == answer.status, answer.body
            assert expected == [(each["word"], each["start"], each["end"]) for each in answer.json["words"]], model
            assert ("segment" in granularities) == ("segments" in answer.json)
    answer = await send(services["http"], file, model="whisper", response_format="verbose_json")
    assert ("segments" in answer.json, "words" in answer.json) == (True, False)


async def test_probabilities(services: dict[str, Proxy]) -> None:
    """Tokens come with their probabilities where the model returns them, in the answer and at the end of a stream."""
    file, expected = wav(speak(("no", "matter"))), [(" no", list(b" no"), -0.25), (" matter", list(b" matter"), -0.25)]
    for stream in (False, True):
        fields: dict[str, Any] = {"model": "pcm", "include": ["logprobs"], "stream": str(stream).lower()}
        answer = await send(services["grpc"], file, **fields)
        assert 200 == answer.status, answer.body
        found = events(answer)[-1] if stream else answer.json
        assert expected == [(each["token"], each["bytes"], each["logprob"]) for each in found["logprobs"]]
    assert "logprobs" not in (await send(services["grpc"], file, model="pcm")).json


async def test_probabilities_that_are_not_known(services: dict[str, Proxy]) -> None:
    """They are null, and 0 for a client that refuses what is no number."""
    for agent, expected in (("OpenAI/Python 3.57", None), ("ai/6.0.326 ai-sdk/openai/3.0.141 runtime/node.js", 0.0)):
        form = aiohttp.FormData()
        for field, value in {"model": "whisper", "response_format": "verbose_json", "language": "en"}.items():
            form.add_field(field, value)
        form.add_field("file", io.BytesIO(wav(speak(SENTENCE))), filename="speech.wav")
        async with services["grpc"].client.post(PATH, data=form, headers={"User-Agent": agent}) as response:
            segments = (await response.json())["segments"]
        assert {(expected, expected)} == {(each["avg_logprob"], each["no_speech_prob"]) for each in segments}


async def test_what_a_model_is_told(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """Languages and prompts reach each kind in its own form; a prefix of Whisper is never empty."""
    file, proxy = wav(speak(("hallo", "welt"))), services["grpc"]
    for model, given, name, value in (
        ("infer_bls", None, "TEXT_PREFIX", "<|startoftranscript|>"),
        ("infer_bls", "de", "TEXT_PREFIX", "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"),
        ("whisper_bls", "english", "TEXT_PREFIX", "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"),
        ("sensevoice", None, "LANGUAGE", 0),
        ("sensevoice", "yue", "LANGUAGE", 7),
        ("sensevoice", None, "TEXT_NORM", 14),
        ("pcm", "de-AT", "LANGUAGE", "German"),
    ):
        answer = await send(proxy, file, model=model, **({"language": given} if given else {}))
        assert 200 == answer.status, answer.body
        assert [value] == asked(recognizers, model)[-1][name]["value"], (model, given)
    # What SenseVoice says of the language is no part of the text.
    verbose = (await send(proxy, file, model="sensevoice", response_format="verbose_json")).json
    assert ("german", "hallo welt") == (verbose["language"], verbose["text"])
    verbose = (await send(proxy, file, model="pcm", response_format="verbose_json")).json
    assert ("german", ["hallo", "welt"]) == (verbose["language"], [each["text"] for each in verbose["segments"]])
    # Chunks of the same padded length share a batch; the length is that of the speech.
    request = asked(recognizers, "infer_bls")[-1]
    assert ([1, 10 * RATE], [RATE]) == (request["WAV"]["shape"], request["WAV_LENS"]["value"])
    # A language that is configured is told where the client names none.
    known = ModelSettings(audio=AudioSettings(language="de"))
    async with serving(settings_for(recognizers, "http", infer_bls=known)) as other:
        await other.ready()
        answer = await send(other, file, TRANSLATIONS, model="infer_bls", response_format="verbose_json")
    assert ("translate", "english", "HALLO WELT") == tuple(answer.json[name] for name in ("task", "language", "text"))
    assert (
        "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
        in asked(recognizers, "infer_bls")[-1]["TEXT_PREFIX"]["value"]
    )


async def test_translations(services: dict[str, Proxy]) -> None:
    """Whisper translates where the language can be found out; no other model does."""
    file = wav(speak(("hallo", "welt")))
    for proxy in services.values():
        answer = await send(proxy, file, TRANSLATIONS, model="whisper")
        assert "better better" == answer.json["text"]
        assert (400, "model", "unsupported_parameter") == await refused(proxy, file, TRANSLATIONS, model="infer_bls")
        assert (400, "model", "invalid_request") == await refused(proxy, file, TRANSLATIONS, model="sensevoice")


async def test_long_recordings(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """A long recording is cut where it is quiet, its chunks are with Triton together, and their texts are in order."""
    chosen = random.Random(1)
    words = ["never", *(chosen.choice(WORDS[:-1]) for _ in range(95))]
    file = encoded(speak(words), RATE, "FLAC")
    for proxy in services.values():
        for model, most in (("whisper_bls", 10), ("parakeet", 10), ("infer_bls", 20), ("whisper", 30)):
            before = len(asked(recognizers, model))
            answer = await send(proxy, file, model=model, response_format="verbose_json")
            assert " ".join(words) == answer.json["text"], model
            chunks = len(asked(recognizers, model)) - before - (model == "whisper")
            # In 30 seconds, 13 words repeat themselves so much that Whisper is asked again.
            again = int(model == "whisper")
            assert math.ceil(48 / most) <= chunks <= math.ceil(48 / (most - 2)) + again, model
            segments = answer.json["segments"]
            assert (0, pytest.approx(48, abs=0.15)) == (segments[0]["start"], segments[-1]["end"]), model
            assert all(one["end"] <= two["start"] + 0.001 for one, two in pairwise(segments))
            stream = events(await send(proxy, file, model=model, stream="true"))
            assert " ".join(words) == "".join(each.get("delta", "") for each in stream) == stream[-1]["text"]


async def test_the_text_does_not_depend_on_the_format(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """Whatever the format, each recognizer gets the same requests: so its text is the same."""
    chosen = random.Random(1)
    file = wav(speak(["never", *(chosen.choice(WORDS[:-1]) for _ in range(79))]))
    proxy = services["grpc"]
    for model in ("whisper", "infer_bls", "parakeet"):
        requests = []
        for form in ("json", "text", "srt", "vtt", "verbose_json"):
            before = len(asked(recognizers, model))
            answer = await send(proxy, file, model=model, response_format=form, language="en")
            assert 200 == answer.status, answer.body
            requests.append(sorted(json.dumps(one, sort_keys=True) for one in asked(recognizers, model)[before:]))
        assert [requests[0]] * 5 == requests, model


async def test_a_model_that_revises_its_text(services: dict[str, Proxy]) -> None:
    """Of a text that grows, the client gets what two answers agree on, and never a word that is taken back."""
    pieces: list[int] = []
    for proxy in services.values():
        # As long as one request can be: there are many more pieces than can come together.
        *deltas, done = events(await send(proxy, wav(speak([*SENTENCE] * 3)), model="whisper_bls", stream="true"))
        assert " ".join([*SENTENCE] * 3) == done["text"] == "".join(each["delta"] for each in deltas)
        assert not any("..." in each["delta"] for each in deltas)
        pieces.append(len(deltas))
    # What comes together on a busy machine is one piece.
    assert max(pieces) > 1


def parts(triton: TestTriton, model: str) -> dict[Any, list[tuple[bool, bool]]]:
    """Return which requests of each sequence that *model* got begin it, and which end it."""
    found: dict[Any, list[tuple[bool, bool]]] = {}
    for inputs in asked(triton, model):
        (sequence,), (start,), (end,) = (inputs[name]["value"] for name in ("CORRID", "START", "END"))
        found.setdefault(sequence, []).append((bool(start), bool(end)))
    return found


async def test_recordings_as_sequences(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """Each chunk is a sequence of its own: its parts come one after the other, the last one ends it."""
    steps = ("transducer_features", "transducer_scorer", "dictating")
    before = {step: parts(recognizers, step).keys() for step in steps}
    pieces: list[int] = []
    # The first part has more than the further ones, however short the recording is.
    for words in (SENTENCE, ("no",)):
        for proxy in services.values():
            for model in ("transducer", "dictating"):
                answer = await send(proxy, wav(speak(words)), model=model, chunking_strategy="auto")
                assert " ".join(words) == answer.json["text"], model
                # So long that there are many more pieces than can come together.
                *deltas, _ = events(await send(proxy, wav(speak([*SENTENCE] * 6)), model=model, stream="true"))
                assert " ".join([*SENTENCE] * 6) == "".join(each["delta"] for each in deltas)
                pieces.append(len(deltas))
    # What comes together on a busy machine is one piece.
    assert max(pieces) > 2
    long = await send(services["grpc"], encoded(speak([*SENTENCE] * 24), RATE, "FLAC"), model="transducer")
    assert " ".join([*SENTENCE] * 24) == long.json["text"]
    for step in steps:
        sequences = {key: found for key, found in parts(recognizers, step).items() if key not in before[step]}
        assert len(sequences) == 8 + 2 * (step != "dictating"), step
        for found in sequences.values():
            assert [(place == 0, place == len(found) - 1) for place in range(len(found))] == found
    # Three seconds, of which the first request has one part and what the encoder sees behind it.
    assert 10 in map(len, parts(recognizers, "transducer_scorer").values())


async def test_sequences_are_ended(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """One that fails, or that nobody waits for, is ended: the model keeps nothing of it."""
    steps, known = ("transducer_scorer", "dictating"), parts(recognizers, "dictating")
    failing, file = wav(speak(("never", "fail", "tried", "ever"))), wav(speak([*SENTENCE] * 10))
    for proxy in services.values():
        for model in ("transducer", "dictating"):
            answer = await send(proxy, failing, model=model)
            assert (502, "upstream_error") == (answer.status, answer.error["code"])
            form = aiohttp.FormData({"model": model, "stream": "true"})
            form.add_field("file", io.BytesIO(file), filename="speech.wav")
            async with proxy.client.post(PATH, data=form) as response:
                await response.content.readuntil(b"transcript.text.delta")
    async with asyncio.timeout(120):
        while not all(found[-1][1] for step in steps for found in parts(recognizers, step).values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert 4 == len(parts(recognizers, "dictating").keys() - known)
    assert all(len(found) < 60 for found in parts(recognizers, "dictating").values()), "all of it was sent"


async def test_cutting_at_silence(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """With a chunking strategy, silence ends a segment, and is not sent; without one, only the limit does."""
    silence = np.zeros(2 * RATE, np.float32)
    file = wav(np.concatenate([silence, speak(("never", "tried")), silence, speak(("again",)), silence]))
    vad = {"type": "server_vad", "silence_duration_ms": 300, "prefix_padding_ms": 100}
    fields = {f"chunking_strategy[{name}]": value for name, value in vad.items()}
    for given in ({"chunking_strategy": "auto"}, {"chunking_strategy": json.dumps(vad)}, fields):
        answer = await send(services["http"], file, model="sensevoice", response_format="verbose_json", **given)
        segments = answer.json["segments"]
        assert ["never tried", "again"] == [each["text"] for each in segments], given
        padding = 0.3 if "auto" in given.values() else 0.1
        assert [pytest.approx(2 - padding, abs=0.03), pytest.approx(5 - padding, abs=0.03)] == [
            each["start"] for each in segments
        ]
    whole = await send(services["http"], file, model="sensevoice", response_format="srt")
    assert "1\n00:00:00,000 --> 00:00:07,500\nnever tried again\n\n" == whole.body.decode()
    # Models invent text for silence: it is not sent.
    before = len(asked(recognizers, "infer_bls"))
    nothing = await send(services["http"], wav(np.zeros(50 * RATE)), model="infer_bls", response_format="verbose_json")
    assert ("", []) == (nothing.json["text"], nothing.json["segments"])
    assert {"type": "duration", "seconds": 50} == nothing.json["usage"]
    assert before == len(asked(recognizers, "infer_bls"))


async def test_formats_of_files(services: dict[str, Proxy]) -> None:
    """Files of all formats, rates and numbers of channels say the same, whatever their names are."""
    samples = {rate: speak(SENTENCE, rate=rate) for rate in (8000, 16_000, 24_000, 44_100, 48_000)}
    stereo = np.stack([samples[44_100], np.zeros_like(samples[44_100])], axis=1)
    files = {
        "wav, 8 kHz": wav(samples[8000], 8000),
        "wav, 24 bits": wav(samples[48_000], 48_000, "PCM_24"),
        "wav, floats": wav(samples[16_000], 16_000, "FLOAT"),
        "wav, mu-law": wav(samples[8000], 8000, "ULAW"),
        "wav, two channels": wav(stereo * 2, 44_100),
        "flac": encoded(samples[24_000], 24_000, "FLAC"),
        "vorbis": encoded(samples[44_100], 44_100, "OGG", "VORBIS"),
        "opus": encoded(samples[48_000], 48_000, "OGG", "OPUS"),
        "mp3": encoded(samples[44_100], 44_100, "MP3"),
        "mp4": muxed(samples[48_000], 48_000, "mp4", "aac"),
        "video": muxed(samples[48_000], 48_000, "mp4", "aac", video=True),
        "webm": muxed(samples[48_000], 48_000, "webm", "libopus"),
        "aac": muxed(samples[48_000], 48_000, "adts", "aac"),
    }
    for what, file in files.items():
        for name in ("speech.wav", "../../etc/passwd"):
            answer = await send(services["http"], file, name=name, model="zipformer")
            assert (200, TEXT) == (answer.status, answer.json.get("text")), what


async def test_bad_files(services: dict[str, Proxy]) -> None:
    """What cannot be read is refused with the field's name, and the next request is answered."""
    good, tone = wav(speak(SENTENCE)), speak(SENTENCE, rate=48_000)
    flac, mp3 = (encoded(tone, 48_000, container) for container in ("FLAC", "MP3"))
    mp4 = muxed(tone, 48_000, "mp4", "aac")
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    cases = {
        "empty": (b"", "invalid_audio"),
        "text": (b"never tried", "invalid_audio_format"),
        "playlist": (playlist, "invalid_audio_format"),
        "concat": (b"ffconcat version 1.0\nfile /etc/passwd\n", "invalid_audio_format"),
        "voc": (encoded(tone, 48_000, "VOC"), "invalid_audio_format"),
        "head alone": (good[:44], "invalid_audio"),
        "flac, cut": (flac[: len(flac) // 2], "invalid_audio"),
        "mp3, cut": (mp3[: len(mp3) // 3], "invalid_audio"),
        "mp4, cut": (mp4[: len(mp4) // 2], "invalid_audio"),
        "magic alone": (b"OggS", "invalid_audio"),
        "no audio": (muxed(tone, 48_000, "mp4", "aac", video=True, audio=False), "invalid_audio"),
        "17 channels": (wav(np.zeros((RATE, 17))), "invalid_audio"),
        "no samples": (wav(np.zeros(0)), "invalid_audio"),
        "no numbers": (wav(np.full(RATE, math.nan), subtype="FLOAT"), "invalid_audio"),
        "infinite": (wav(np.full(RATE, math.inf), subtype="FLOAT"), "invalid_audio"),
        "too slow": (wav(np.zeros(2000), 2000), "invalid_audio"),
        "too fast": (wav(np.zeros(2000), 384_000), "invalid_audio"),
        "too long": (encoded(np.zeros(8000 * 3601), 8000, "FLAC"), "audio_too_long"),
    }
    for proxy in services.values():
        for what, (file, code) in cases.items():
            assert (400, "file", code) == await refused(proxy, file, model="infer_bls"), what
            assert (400, "file", code) == await refused(proxy, file, model="infer_bls", stream="true"), what
        assert TEXT == (await send(proxy, good, model="infer_bls")).json["text"]


async def test_seconds_that_were_heard(recognizers: TestTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and the event loop imports none of the libraries."""
    importing: list[threading.Thread] = []
    monkeypatch.setattr(transcriptions, "require_audio", lambda: importing.append(threading.current_thread()))
    async with serving(settings_for(recognizers, "grpc")) as proxy:
        await proxy.ready()
        for fields in ({}, {"stream": "true"}):
            assert 200 == (await send(proxy, wav(speak(SENTENCE)), model="parakeet", **fields)).status
        cut = encoded(speak(SENTENCE), RATE, "FLAC")
        assert 400 == (await send(proxy, cut[: len(cut) // 2], model="zipformer")).status
        metrics = (await proxy.get("/metrics")).body.decode()
    heard = [each for each in metrics.splitlines() if each.startswith("triton_openai_audio_seconds_total{")]
    assert 'triton_openai_audio_seconds_total{adapter="transcriber",direction="input",model="parakeet"} 6.0' in heard
    assert importing
    assert threading.main_thread() not in importing


@pytest.mark.sampled
async def test_a_hundred_uploads_at_once(recognizers: TestTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings bound how many files are held at the same time; the others wait unread, and all are answered."""
    file = wav(speak(SENTENCE))
    held: list[int] = []
    count = examples(100, few=40)
    limits = AudioLimits(max_total_size=12 * len(file))
    # However long the others take.
    server = ServerSettings(queue_timeout=600)
    async with serving(replace(settings_for(recognizers, "grpc"), audio=limits, server=server)) as proxy:
        await proxy.ready()
        reading = media_limits.form_of

        async def watched(*arguments: Any, **options: Any) -> Any:
            held.append(proxy.client.app[SERVICE].media.reserved)
            return await reading(*arguments, **options)

        monkeypatch.setattr(transcriptions, "form_of", watched)
        answers = await asyncio.gather(*(send(proxy, file, model="infer_bls", language="en") for _ in range(count)))
        assert {(200, TEXT)} == {(answer.status, answer.json["text"]) for answer in answers}
        assert count == len(held)
        assert 2 * len(file) < max(held) <= limits.max_total_size
        assert 0 == proxy.client.app[SERVICE].media.reserved


async def test_the_largest_upload(recognizers: TestTriton) -> None:
    """The limit is that of audio and not of bodies, and what has more is refused before it is read."""
    file = wav(speak([*SENTENCE] * 12))
    audio, server = AudioLimits(max_file_size=len(file)), ServerSettings(max_body_size=100_000)
    async with serving(replace(settings_for(recognizers, "grpc"), audio=audio, server=server)) as proxy:
        await proxy.ready()
        assert 200 == (await send(proxy, file, model="zipformer")).status
        for more in (1, 2 * 1024 * 1024):
            assert (413, "file", "request_too_large") == await refused(proxy, file + bytes(more), model="zipformer")


async def test_audio_seconds_per_minute(recognizers: TestTriton, tmp_path: Path) -> None:
    """A key may have so much audio heard in a minute; what it asks for beside that is answered."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: few, key: sk-few, audio_seconds_per_minute: 5}, {name: all, key: sk-all}]")
    settings = replace(settings_for(recognizers, "grpc"), access=AccessSettings(api_keys_file=keys))
    file = wav(speak(SENTENCE))
    async with serving(settings) as proxy:
        few, everything = {"api-key": "sk-few"}, {"api-key": "sk-all"}
        await proxy.ready()

        async def status(headers: dict[str, str], path: str = PATH) -> tuple[int, str | None, str]:
            form = aiohttp.FormData({"model": "infer_bls", "language": "en"} if path == PATH else {"model": "whisper"})
            form.add_field("file", io.BytesIO(file), filename="speech.wav")
            async with proxy.client.post(path, data=form, headers=headers) as response:
                left = response.headers.get("x-ratelimit-remaining-audio-seconds")
                return response.status, left, await response.text()

        assert (200, "5") == (await status(few))[:2]
        assert (200, "2") == (await status(few, TRANSLATIONS))[:2]
        refused, left, text = await status(few)
        error = json.loads(text)["error"]
        assert (429, "0", "audio_seconds") == (refused, left, error["type"])
        assert "limit 5" in error["message"]
        assert (200, None) == (await status(everything))[:2]
        async with proxy.client.get("/v1/models", headers=few) as response:
            assert (200, False) == (response.status, "x-ratelimit-limit-audio-seconds" in response.headers)


async def test_bad_requests(services: dict[str, Proxy], recognizers: TestTriton) -> None:
    """What a model cannot do is refused by its name."""
    file, proxy = wav(speak(("no",))), services["http"]
    unsupported = "unsupported_parameter"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"language": "xx"}, "language", "invalid_language"),
        ({"language": "de", "model": "parakeet"}, "language", "invalid_language"),
        ({"languages": ["xx"]}, "languages", "invalid_language"),
        ({"prompt": "never"}, "prompt", unsupported),
        ({"keywords": ["never"]}, "keywords", unsupported),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"response_format": "diarized_json"}, "response_format", unsupported),
        ({"response_format": "xml"}, "response_format", "invalid_value"),
        (
            {"timestamp_granularities": ["word"], "response_format": "verbose_json"},
            "timestamp_granularities",
            unsupported,
        ),
        ({"include": ["logprobs"]}, "include", unsupported),
        ({"include": ["item"]}, "include", "invalid_value"),
        (
            {"include": ["logprobs"], "model": "pcm", "language": "de", "response_format": "text"},
            "include",
            "invalid_value",
        ),
        ({"stream": "true", "response_format": "srt"}, "stream", "invalid_value"),
        ({"chunking_strategy": "vad"}, "chunking_strategy", "invalid_value"),
        ({"chunking_strategy": '{"type": "server_vad", "threshold": 2}'}, "chunking_strategy", "invalid_value"),
        ({"known_speaker_names": ["me"]}, "known_speaker_names", unsupported),
        ({"file": "twice"}, "file", "invalid_value"),
    ]
    for fields, param, code in cases:
        assert (400, param, code) == await refused(proxy, file, **{"model": "infer_bls", **fields}), fields
    answer = await proxy.post(PATH, b"", **{"Content-Type": "multipart/form-data; boundary=a"})
    assert 400 == answer.status
    small = settings_for(recognizers, "http")
    small = type(small)(triton=small.triton, models=small.models, audio=AudioLimits(max_file_size=1024, max_duration=1))
    async with serving(small) as other:
        await other.ready()
        assert (413, "file", "request_too_large") == await refused(other, file, model="infer_bls")
        assert (400, "file", "audio_too_long") == await refused(
            other, encoded(np.zeros(RATE * 2), RATE, "FLAC"), model="infer_bls"
        )


async def test_a_recognizer_that_fails(services: dict[str, Proxy]) -> None:
    """A failure is an error of Triton's, and in a stream that has begun its last event."""
    words = [*SENTENCE] * 8
    # The fault is in the second chunk, whatever the first one says.
    parts = [speak(words[:18], pause=0.1), np.zeros(3 * RATE, np.float32), speak(("fail", "no"))]
    file = wav(np.concatenate(parts))
    for proxy in services.values():
        answer = await send(proxy, file, model="parakeet", chunking_strategy="auto")
        assert (502, "upstream_error") == (answer.status, answer.error["code"])
        stream = await send(proxy, file, model="parakeet", chunking_strategy="auto", stream="true")
        *deltas, failed = events(stream)
        assert " ".join(words[:18]) == "".join(each["delta"] for each in deltas)
        assert "upstream_error" == failed["error"]["code"]


def part(content: bytes | str, kind: str = "wav") -> dict[str, Any]:
    """Return the part of a chat's message with a file, or with what stands for its base64."""
    data = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


async def test_audio_in_chats(services: dict[str, Proxy]) -> None:
    """A model with an input for audio gets each part as WAV, and the prompt says where it is; others refuse it."""
    path, text = "/v1/chat/completions", {"type": "text", "text": "and"}
    mp3 = encoded(speak(("again",), rate=44_100), 44_100, "MP3")
    for transport, proxy in services.items():
        content = [part(wav(speak(("never", "tried")))), text, part(mp3, "mp3")]
        answer = await proxy.post(path, {"model": "chatting", "messages": [{"role": "user", "content": content}]})
        assert 200 == answer.status, (transport, answer.body)
        said = answer.json["choices"][0]["message"]["content"]
        assert "['never tried', 'again'] <audio1>\n<audio2>\nand" == said
        for bad, param, code in (
            (part("no base64!"), "input_audio.data", "invalid_base64"),
            (part(b"no audio"), "input_audio.data", "invalid_audio_format"),
            (part(encoded(np.zeros(8000 * 601), 8000, "FLAC")), "input_audio.data", "audio_too_long"),
            ({"type": "input_audio"}, "input_audio.data", "missing_required_parameter"),
            ({"type": "audio_url", "audio_url": {"url": "http://a/"}}, "", "unsupported_parameter"),
        ):
            body = {"model": "chatting", "messages": [{"role": "user", "content": [text, bad]}]}
            answer = await proxy.post(path, body)
            place = f"messages[0].content[1].{param}".rstrip(".")
            assert (400, place, code) == (answer.status, answer.error["param"], answer.error["code"]), bad


async def test_audio_in_chats_has_memory_together(recognizers: TestTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decoded when there is memory for as much as it may become, which is given back however the request ends."""
    limits = AudioLimits(max_duration=10.0, max_total_size=6_000_000)
    reserved: list[int] = []
    decoding = audio.load

    # However long the others take.
    server = ServerSettings(queue_timeout=600)
    async with serving(replace(settings_for(recognizers, "http"), audio=limits, server=server)) as proxy:
        await proxy.ready()
        media = proxy.client.app[SERVICE].media

        async def watched(*arguments: Any, **options: Any) -> Any:
            reserved.append(media.reserved)
            return await decoding(*arguments, **options)

        monkeypatch.setattr(conversation, "load", watched)
        quiet = encoded(np.zeros(9 * 8000), 8000, "FLAC")
        assert len(quiet) < 2000
        messages = [{"role": "user", "content": [part(quiet, "flac")]}]
        chats = [{"model": "chatting", "messages": messages, "stream": number % 2 == 1} for number in range(8)]
        answers = await asyncio.gather(*(proxy.post("/v1/chat/completions", body) for body in chats))
        assert {200} == {answer.status for answer in answers}
        assert 8 == len(reserved)
        assert 1_000_000 < min(reserved) <= max(reserved) <= limits.max_total_size * 7 / 8
        assert 0 == media.reserved
        bad = [{"role": "user", "content": [part(b"no audio")]}]
        assert 400 == (await proxy.post("/v1/chat/completions", {"model": "chatting", "messages": bad})).status
        assert (9, 0) == (len(reserved), media.reserved)


async def test_audio_in_chats_of_other_models(proxies: dict[str, Proxy]) -> None:
    """It is refused by its name."""
    body = {"model": "vllm_model", "messages": [{"role": "user", "content": [part(wav(speak(("no",))))]}]}
    answer = await proxies["http"].post("/v1/chat/completions", body)
    assert (400, "messages[0].content[0]") == (answer.status, answer.error["param"])
    assert "'input_audio' is not supported by this model" in answer.error["message"]


async def test_lines_of_batches_name_uploaded_files(recognizers: TestTriton, tmp_path: Path) -> None:
    """A line has the id of a file in place of the file. It is answered as a form is, and refused for its own faults."""
    settings = replace(
        settings_for(recognizers, "http"),
        files=FilesSettings(store=f"dir:{tmp_path / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{tmp_path / 'db'}"),
        audio=AudioLimits(max_file_size=200_000),
    )
    async with serving(settings) as proxy:
        await proxy.ready()

        async def upload(content: bytes, purpose: str = "user_data") -> str:
            form = aiohttp.FormData({"purpose": purpose})
            form.add_field("file", io.BytesIO(content), filename="speech.wav")
            async with proxy.client.post("/v1/files", data=form) as response:
                return str((await response.json())["id"])

        spoken = await upload(wav(speak(SENTENCE)))
        large = await upload(bytes(200_001))
        bodies: dict[str, dict[str, Any]] = {
            "json": {"file": spoken},
            "text": {"file": spoken, "response_format": "text", "chunking_strategy": "auto"},
            "cut": {"file": spoken, "chunking_strategy": {"type": "server_vad"}},
            "missing": {"file": "file-1"},
            "no audio": {"file": await upload(b"no audio")},
            "large": {"file": large},
            "a path": {"file": "../db"},
            "wrong type": {"file": 1},
            "no file": {},
        }
        lines = [
            {"custom_id": name, "method": "POST", "url": PATH, "body": {"model": "parakeet", **body}}
            for name, body in bodies.items()
        ]
        file = await upload("\n".join(map(json.dumps, lines)).encode(), "batch")
        made = {"input_file_id": file, "endpoint": PATH, "completion_window": "1h"}
        batch = (await proxy.post("/v1/batches", made)).json
        async with asyncio.timeout(120):
            while batch["status"] in ("validating", "in_progress", "finalizing"):
                await asyncio.sleep(0.02)
                batch = (await proxy.get(f"/v1/batches/{batch['id']}")).json
        assert "completed" == batch["status"], batch
        results: dict[str, dict[str, Any]] = {}
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            async with proxy.client.get(f"/v1/files/{file_id}/content") as response:
                for one in (await response.text()).splitlines():
                    result = json.loads(one)
                    results[result["custom_id"]] = result["response"]
        assert {"text": TEXT, "usage": {"type": "duration", "seconds": 3}} == results["json"]["body"]
        assert f"{TEXT}\n" == results["text"]["body"]
        assert TEXT == results["cut"]["body"]["text"]
        for name, status in (
            ("missing", 404), ("no audio", 400), ("large", 413), ("a path", 404), ("wrong type", 400), ("no file", 400)
        ):  # fmt: skip
            error = results[name]["body"]["error"]
            assert (status, "file") == (results[name]["status_code"], error["param"]), (name, error)
