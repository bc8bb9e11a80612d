"""What is shown of prompts and answers to operators who ask for it: bounded, marked, and without images."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.telemetry.fake_answer import FakeAnswer
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.embeddings import EmbeddingsRequest, RerankRequest, ScoreRequest, TextObject
from triton_openai.generation import FinishReason
from triton_openai.telemetry.access_log import input_messages, output_messages

PIXELS = "iVBORw0KGgo" * 20
URL = f"data:image/png;base64,{PIXELS}"


def chat(*messages: Any) -> ChatRequest:
    """Return a request as it is read."""
    return msgspec.convert({"model": "m", "messages": messages}, ChatRequest)


def texts(found: Any) -> list[str]:
    """Return every text in *found*."""
    if isinstance(found, str):
        return [found]
    items = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [text for item in items for text in texts(item)]


def test_a_chat() -> None:
    """Roles, texts, reasoning, calls and their results, in the form of OpenTelemetry's conventions."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    body = chat(
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, "you"]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "reasoning": "so", "refusal": "No.", "function_call": {"name": "f"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [{}]},
    )

    assert [
        {"role": "system", "parts": [{"type": "text", "content": "Be short."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Hi"}, {"type": "text", "content": "you"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "rain"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "so"},
                {"type": "text", "content": "No."},
                {"type": "tool_call", "id": None, "name": "f", "arguments": "null"},
            ],
        },
        {"role": "function", "parts": [{"type": "tool_call_response", "id": "f", "response": "1"}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "No."}, {"type": "tool_call", "id": None}]},
    ] == input_messages(body, 100)


@pytest.mark.parametrize(
    "body, shown",
    [
        (CompletionRequest(prompt="Hello"), ["Hello"]),
        (CompletionRequest(prompt=["a", "b"], suffix="end"), ["a", "b", "end"]),
        (CompletionRequest(prompt=[1, 2, 3]), ["<3 token ids>"]),
        (CompletionRequest(prompt=[[1, 2], [3]]), ["<2 token ids>", "<1 token ids>"]),
        (EmbeddingsRequest(input=["a", "b"]), ["a", "b"]),
        (RerankRequest(query="q", documents=["a", TextObject(text="b")]), ["q", "a", "b"]),
        (ScoreRequest(text_1="a", text_2=["b"]), ["a", "b"]),
        (ScoreRequest(data_1="a", data_2=["b"]), ["a", "b"]),
        (ScoreRequest(queries="a", items=["b"]), ["a", "b"]),
        (CompletionRequest(prompt=[]), None),
        (None, None),
    ],
)
def test_other_requests(body: object, shown: list[str] | None) -> None:
    """The texts of other requests are parts of one message."""
    parts = [{"type": "text", "content": text} for text in shown or ()]
    assert ([] if shown is None else [{"role": "user", "parts": parts}]) == input_messages(body, 100)


def test_answers() -> None:
    """One message for each, also for one that has not come to its end."""
    answers = [
        FakeAnswer(text="one two", finish_reason=FinishReason.LENGTH),
        FakeAnswer(text="\ud800", finish_reason=None),
    ]

    assert [
        {"role": "assistant", "parts": [{"type": "text", "content": "one…(+4 characters)"}], "finish_reason": "length"},
        {"role": "assistant", "parts": [{"type": "text", "content": "?"}]},
    ] == output_messages(answers, 3)


@pytest.mark.parametrize("longest", [40, 10_000])
def test_images_are_never_shown(longest: int) -> None:
    """Images are shown neither as parts nor within a text, whole or cut."""
    parts = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"image_url": URL},
        {"type": "text", "text": f"see ![x]({URL}) and DATA:;base64,{PIXELS}"},
    ]
    # JSON may have a backslash before each slash, as PHP writes it.
    arguments = msgspec.json.encode({"url": URL}).decode().replace("/", "\\/")
    call = {"id": "c", "type": "function", "function": {"name": "show", "arguments": arguments}}
    asked = {"role": "user", "content": parts}
    made = {"role": "assistant", "tool_calls": [call]}
    found = input_messages(chat(asked, {"role": "tool", "content": URL}, made), longest)

    assert "iVBOR" not in str(found)
    assert ["image_url", "image_url"] == [part["type"] for part in found[0]["parts"][:2]]
    assert found[0]["parts"][2]["content"].startswith("see ![x](<data URL>")
    assert found[1]["parts"][0]["response"].startswith("<data URL>")


def test_long_chats() -> None:
    """The last messages are shown, with how many are not."""
    found = input_messages(chat(*({"role": "user", "content": str(number)} for number in range(1000))), 100)

    assert {"role": "omitted", "parts": [], "count": 936} == found[0]
    assert ["936", "999"] == [found[1]["parts"][0]["content"], found[-1]["parts"][0]["content"]]
    assert 64 == len(input_messages(chat(*[{"role": "user", "content": "a"}] * 64), 100))


def test_much_of_everything() -> None:
    """However many texts there are, a line has a bound."""
    part = {"type": "text", "text": "x" * 10_000}
    found = input_messages(chat(*({"role": "user", "content": [part] * 1000} for _ in range(1000))), 1000)

    assert 64 * 1000 == sum(text.partition("…")[0].count("x") for text in texts(found) if text.startswith("x"))
    assert len(json.dumps(found)) < 64 * 1000 + 64 * 65 * 100


CONTENT = st.none() | st.text() | st.lists(st.text() | st.fixed_dictionaries({}, optional={"text": st.text()}))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant", "function"]), "content": CONTENT})
)


@given(MESSAGES, st.integers(1, 20))
def test_any_chat_can_be_shown(messages: Any, longest: int) -> None:
    """An observer must not fail, and what it makes can be written."""
    found = input_messages(chat(*messages), longest)

    json.dumps(found).encode()
    assert all(len(text.partition("…(+")[0]) <= max(longest, len("tool_call_response")) for text in texts(found))
