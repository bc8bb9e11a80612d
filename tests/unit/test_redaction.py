"""What clients write, as it stands in logs and spans."""

from __future__ import annotations

import uuid

from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.cases import every_case
from triton_openai.errors import ModelNotFound, UpstreamError, printable, summary
from triton_openai.telemetry.access_log import AccessLog
from triton_openai.telemetry.request_record import RequestRecord, request_id
from triton_openai.telemetry.tracing import shared_attributes

KEYS = (
    "sk-a-secret",
    "sk-proj-Abc_123-xyz",
    "sk-ant-api03-abcdefgh",
    "nvapi-abc-DEF_123",
    "hf_abcdefghijklm",
    "ghp_0123456789abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    "Bearer abcdefgh",
    # openssl rand -hex 32
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
)
NAMES = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "ensemble",
    "task-force-one",
    "mask-rcnn-large",
    "tensorrt_llm_bls",
    "Qwen2.5-Coder-32B-Instruct-GPTQ-Int4",
    # A commit of a model on the hub
    "0123456789abcdef0123456789abcdef01234567",
)
IDS = (
    str(uuid.uuid4()),
    uuid.uuid4().hex,
    "1-67891233-abcdef012345678912345678",
    "req_011CSHoEeqs5C35K2UUqR7Fy",
)


@every_case("key", KEYS)
def test_what_looks_like_a_key_is_masked(key: str) -> None:
    """What looks like a key is masked wherever it stands."""
    for text in (key, f"/v1/models/{key}", f"openai/{key}", f"The model '{key}' is not found."):
        assert key[-6:] not in printable(text, 300)
        assert "<redacted>" in printable(text, 300)
    # Also where the cut would go through it.
    long = f"{'x ' * 30}{key}"
    assert all(key[:12] not in printable(long, longest) for longest in range(len(long)))


@every_case("name", NAMES)
def test_names_stay_as_they_are(name: str) -> None:
    """An operator has to find the mistake in them."""
    assert name == printable(name, 64)


@given(st.text(), st.integers(min_value=0, max_value=50))
def test_every_text_is_short_and_printable(text: str, longest: int) -> None:
    """No character of it does anything to a terminal, and a line stays a line."""
    short = printable(text, longest)

    assert len(short) <= longest
    assert short.isprintable()
    assert "\n" not in summary(text)


def test_request_ids() -> None:
    """A client's own is taken if it is one, and is none of its keys."""
    assert list(IDS) == [request_id({"x-request-id": name}) for name in IDS]
    for wrong in ("", "a b", "a\x1b", "é", "a" * 129, *KEYS, f"req-{KEYS[0]}", f"{KEYS[0]}:1"):
        assert 32 == len(request_id({"x-request-id": wrong}))


def test_the_line_of_a_request() -> None:
    """
    The line of a request has the beginning of an unknown name, and neither keys nor what moves a terminal's cursor.
    """
    record = RequestRecord(request_id="1", method="GET " * 99, path=f"/v1/models/\x1b[2J/{KEYS[0]}{'/x' * 999}")
    record.error = ModelNotFound(f"{KEYS[1]}/{'name ' * 99}")
    record.status = 404
    with capture_logs() as logs:
        AccessLog().ended(record)

    (line,) = logs
    assert "GET " * 8 == line["method"]
    assert line["path"].startswith("/v1/models/?[2J/<redacted>/x/x")
    assert 256 == len(line["path"])
    assert line["model"].startswith("<redacted>/name name")
    assert 64 == len(line["model"])


def test_the_head_of_a_span() -> None:
    """The path and the client's name of itself, too."""
    request = make_mocked_request("GET", f"/{KEYS[0]}", headers={"User-Agent": f"curl {KEYS[1]}\x1b", "Host": KEYS[0]})
    record = RequestRecord(request_id="1", method="GET", path=request.path, request=request)
    (head, _) = shared_attributes(record)

    assert "/<redacted>" == record.path
    assert {"curl <redacted>?", "<redacted>"} <= set(head.values())


def test_what_a_backend_quotes() -> None:
    """What a backend quotes in an error's reason or traceback is redacted."""
    error = UpstreamError("It failed.", detail=f"Traceback (most recent call last):\n  File x\nValueError: {KEYS[0]}\n")

    assert "ValueError: <redacted>" == error.reason
    assert KEYS[0] not in (error.trace or KEYS[0])
