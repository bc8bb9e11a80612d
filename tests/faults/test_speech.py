"""Uploads and recordings that end early: the client leaves, or Triton dies between two chunks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.forms import FORM_TYPE, form_with_file
from tests.clients.service import until
from tests.faults.surroundings import PATIENT, TRANSPORTS, Own, Watched, watched
from tests.speech import RATE, SENTENCE, encoded, muxed, speak, wav
from tests.standins.repository import build_repository
from tests.triton_fixture import embedded, shared
from triton_openai.demo.record import Record

PATH = "/v1/audio/transcriptions"
_SETTINGS = {
    "audio": {"parallel_chunks": 2},
    "models": {
        "parakeet": {
            "adapter": "transcriber",
            "inputs": {"audio": "INPUT_0"},
            "outputs": {"text": "OUTPUT_0"},
            "audio": {"max_seconds": 2},
        }
    },
}
SHORT = wav(speak(SENTENCE))


@cache
def minutes() -> bytes:
    """Return minutes of speech, of which Triton gets two seconds at a time."""
    return encoded(speak([*SENTENCE] * 200), RATE, "FLAC")


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """A Triton with a recognizer."""
    folder = tmp_path_factory.mktemp("hearing")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=["parakeet", "zipformer", "transducer"], record=record)
    server = embedded(repository)
    with shared(server):
        yield Own(server, repository, Record(record))


@pytest.fixture(scope="module", params=TRANSPORTS)
def service(
    request: pytest.FixtureRequest, hearing: Own, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """The service over each transport."""
    folder = tmp_path_factory.mktemp("service")
    with watched(folder, "--triton-url", hearing.url(request.param), triton=PATIENT, further=_SETTINGS) as running:
        assert " ".join(SENTENCE) == transcribed(running, SHORT)
        yield running


def form(content: bytes, **fields: str) -> bytes:
    """Return a form with a file."""
    return form_with_file({"model": "parakeet", **fields}, content, "a.wav")


def request(service: Watched, content: bytes, **fields: str) -> socket.socket:
    """Return a connection over which *content*, the whole of a form or its beginning, was sent."""
    body = form(content, **fields)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM_TYPE}\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port), 120)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return connection


def read(connection: socket.socket, end: bytes = b"") -> bytes:
    """Return what comes up to *end*, or to the end of the connection."""
    found = b""
    while not (end and end in found) and (piece := connection.recv(65_536)):
        found += piece
    return found


def transcribed(service: Watched, content: bytes) -> str:
    """Return the text of a file."""
    with request(service, content) as connection:
        answer = read(connection)
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["text"])


def heard(own: Own, model: str = "parakeet") -> int:
    """Return how many chunks a recognizer got so far, or parts of them."""
    return len(own.record.events(model=model, event="request"))


def unended(own: Own) -> int:
    """Return how many sequences have begun and not ended."""
    found = own.record.events(model="transducer_scorer", event="request")
    flags = [tuple(each["inputs"][name]["value"][0] for name in ("START", "END")) for each in found]
    return int(sum(start - end for start, end in flags))


def test_a_client_that_leaves_in_mid_upload(hearing: Own, service: Watched) -> None:
    """Nothing of the upload stays, and Triton hears nothing of it."""
    before = heard(hearing)
    with service.back_to_level():
        for share in (0.1, 0.5, 0.99):
            body = form(minutes())
            connection = socket.create_connection(("127.0.0.1", service.port), 120)
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM_TYPE}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: int(len(body) * share)])
            connection.close()
    assert before == heard(hearing)
    assert " ".join(SENTENCE) == transcribed(service, SHORT)


def test_a_client_that_leaves_a_recording(hearing: Own, service: Watched) -> None:
    """Of the recording that nobody waits for, Triton gets no further chunks, streamed or not."""
    for fields in ({"stream": "true"}, {}):
        before = heard(hearing)
        with service.back_to_level(), request(service, minutes(), **fields) as connection:
            if fields:
                read(connection, b"transcript.text.delta")
            else:
                until(lambda: heard(hearing) > before + 2)  # noqa: B023
        assert heard(hearing) - before < 200, "all of it"
    assert " ".join(SENTENCE) == transcribed(service, SHORT)


def test_a_client_that_leaves_a_sequence(hearing: Own, service: Watched) -> None:
    """The sequences of a recording that nobody waits for are ended, streamed or not, and get no further parts."""
    for fields in ({"stream": "true"}, {}):
        before = heard(hearing, "transducer_scorer")
        with service.back_to_level(), request(service, minutes(), model="transducer", **fields) as connection:
            if fields:
                read(connection, b"transcript.text.delta")
            else:
                until(lambda: heard(hearing, "transducer_scorer") > before + 20)  # noqa: B023
        until(lambda: not unended(hearing))
        assert heard(hearing, "transducer_scorer") - before < 1000, "all of it"


def test_triton_killed_between_chunks(hearing: Own, service: Watched) -> None:
    """A stream ends with an error event, a whole answer with its status; and all is well when Triton is back."""
    before = heard(hearing)
    with request(service, minutes(), stream="true") as streamed, request(service, minutes()) as whole:
        begun = read(streamed, b"transcript.text.delta")
        until(lambda: heard(hearing) > before + 4)
        hearing.server.kill()
        end, answer = begun + read(streamed), read(whole)
    error = json.loads(end.rpartition(b"event: error\ndata: ")[2].partition(b"\n\n")[0])["error"]
    assert error["code"] in ("upstream_disconnected", "upstream_unavailable")
    assert b"transcript.text.done" not in end
    status = answer.split(b" ", 2)[1]
    assert status in (b"502", b"503")
    hearing.server.start()
    until(lambda: service.status("/health/ready") == 200)
    assert " ".join(SENTENCE) == transcribed(service, SHORT)


def peak(service: Watched) -> int:
    """Return the most memory that the process has had since :func:`forget_peak`."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak(service: Watched) -> None:
    """Begin to look for the most memory again."""
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")


def check_memory(service: Watched, kind: str, file: bytes) -> None:
    """Check that a *file* of some *kind* costs its size and 64 MB, for a model that takes as much at once as it may."""
    with request(service, SHORT, model="zipformer") as connection:
        assert b"HTTP/1.1 200" in read(connection)[:20]
    before = service.memory()
    forget_peak(service)
    with request(service, file, model="zipformer") as connection:
        answer = read(connection)
    assert b"HTTP/1.1 200" in answer[:20], answer[:500]
    assert peak(service) - before < len(file) + 64_000_000, kind


def test_memory_of_an_upload(service: Watched) -> None:
    """Over each transport, a recording goes to Triton in parts that do not add up."""
    check_memory(service, "wav", wav(np.tile(speak(SENTENCE), 250)))


def compressed(kind: str) -> bytes:
    """Return a recording that takes much less room than its samples."""
    if kind == "an hour of silence":
        return encoded(np.zeros(8000 * 3600, np.int16), 8000, "FLAC")
    if kind == "many channels":
        return encoded(np.tile(speak(SENTENCE)[:, None], (60, 8)), RATE, "FLAC")
    # As well as it can, the encoder would take ten seconds.
    quickly = {"compression_level": "0", "b": "24k"}
    return muxed(np.tile(speak(SENTENCE, rate=8000), 400), 8000, "ogg", "libopus", encoder=quickly)


@pytest.mark.parametrize("service", TRANSPORTS[:1], indirect=True)
@pytest.mark.parametrize(
    "kind",
    [
        "many channels",
        pytest.param("an hour of silence", marks=pytest.mark.extended),
        pytest.param("opus", marks=pytest.mark.extended),
    ],
)
def test_memory_of_a_compressed_upload(service: Watched, kind: str) -> None:
    """However it is compressed, and however long it is then; the transport has no part in that."""
    check_memory(service, kind, compressed(kind))


def test_many_uploads_at_once(service: Watched) -> None:
    """A crowd with compressed hours of silence ends with as many refusals, and leaves no memory behind."""
    silence = encoded(np.zeros(8000 * 3700, np.int16), 8000, "FLAC")
    with service.back_to_level():
        connections = [request(service, silence) for _ in range(40)]
        for connection in connections:
            with connection:
                assert b"audio_too_long" in read(connection)
