"""Transcriptions through the clients that people use."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.service import Service, serving
from tests.speech import SENTENCE, encoded, speak, wav
from tests.triton_fixture import TestTriton

TEXT = " ".join(SENTENCE)
FILE = wav(speak(SENTENCE))


@pytest.fixture(scope="module", params=["http", "grpc"])
def hearing(
    request: pytest.FixtureRequest, recognizers: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service in front of the recognizers, as a process, over each transport in turn."""
    url = recognizers.http_url if request.param == "http" else recognizers.grpc_url
    folder = tmp_path_factory.mktemp("hearing")
    options = ("--tokenizer", f"whisper={recognizers.tokenizer}", "--alias", "whisper-1=whisper")
    with serving(folder, "--triton-url", url, *options) as running:
        yield running
        assert [] == running.complaints()


@pytest.fixture
def client(hearing: Service) -> Iterator[OpenAI]:
    """The official client."""
    with OpenAI(base_url=hearing.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_transcriptions(client: OpenAI) -> None:
    """Every format has its type, and files may be given in each of the client's ways."""
    transcriptions = client.audio.transcriptions
    plain = transcriptions.create(model="infer_bls", file=("speech.wav", FILE, "audio/wav"))
    assert TEXT == plain.text
    assert plain.usage is not None
    assert plain.usage.type == "duration"
    assert 3 == plain.usage.seconds
    flac = io.BytesIO(encoded(speak(SENTENCE), 16_000, "FLAC"))
    text = transcriptions.create(model="whisper-1", file=flac, response_format="text")
    assert f"{TEXT}\n" == text
    verbose = transcriptions.create(
        model="whisper-1", file=FILE, response_format="verbose_json", timestamp_granularities=["segment"], temperature=0
    )
    assert ("english", TEXT, 3.0) == (verbose.language, verbose.text, verbose.duration)
    assert verbose.segments is not None
    assert [*SENTENCE] == [segment.text for segment in verbose.segments]
    assert (0.5, 0.9) == (verbose.segments[1].start, verbose.segments[1].end)
    srt = transcriptions.create(
        model="sensevoice", file=FILE, response_format="srt", chunking_strategy={"type": "server_vad"}
    )
    assert f"1\n00:00:00,000 --> 00:00:03,000\n{TEXT}\n\n" == srt
    with warnings.catch_warnings():
        # Of the client's, about the whole method.
        warnings.simplefilter("ignore", DeprecationWarning)
        translation = client.audio.translations.create(model="whisper-1", file=FILE)
    assert "better " * 5 + "better" == translation.text


def test_streamed_transcriptions(client: OpenAI) -> None:
    """The client's own events: the deltas are the text, which the last one has."""
    with client.audio.transcriptions.create(model="whisper_bls", file=FILE, stream=True, language="en") as stream:
        *deltas, done = stream
    assert "transcript.text.done" == done.type
    assert TEXT == done.text == "".join(event.delta for event in deltas if event.type == "transcript.text.delta")
    assert len(deltas) > 1


async def test_streams_of_the_asynchronous_client(hearing: Service) -> None:
    """It reads the same events."""
    async with AsyncOpenAI(base_url=hearing.base_url, api_key="none") as client:
        stream = await client.audio.transcriptions.create(model="infer_bls", file=FILE, stream=True)
        assert ["transcript.text.delta", "transcript.text.done"] == [event.type async for event in stream]


def test_errors(client: OpenAI) -> None:
    """A refusal has the field, and a stream that fails raises the error."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(model="infer_bls", file=b"no audio", language="en")
    assert ("file", "invalid_audio_format") == (refused.value.param, refused.value.code)
    file = wav(speak([*SENTENCE] * 4 + ["fail"] * 60))
    with client.audio.transcriptions.create(model="infer_bls", file=file, stream=True) as stream:
        event = next(iter(stream))
        assert "transcript.text.delta" == event.type
        with pytest.raises(openai.APIError):
            list(stream)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(hearing: Service, tmp_path: Path) -> None:
    """A form of curl's is read, with the file's name or without."""
    (tmp_path / "speech.wav").write_bytes(FILE)
    url = f"{hearing.base_url}/audio/transcriptions"
    for form in (["file=@speech.wav"], ["file=@speech.wav;type=audio/mpeg;filename=a.mp3", "response_format=json"]):
        fields = [word for field in ("model=infer_bls", "language=en", *form) for word in ("-F", field)]
        run = subprocess.run(
            ["curl", "--silent", "--noproxy", "*", url, *fields], cwd=tmp_path, capture_output=True, check=True
        )
        assert TEXT == json.loads(run.stdout)["text"], run.stdout
