"""The wire format, byte for byte, for every model over both transports."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time

import pytest
from tokenizers import Tokenizer

from tests.cases import every_case
from tests.conformance.calls import (
    ADDS_BOS,
    BREAKS_CHARACTERS,
    COUNTS_END,
    ENGINES,
    MODELS,
    PATHS,
    STREAMING,
    ask,
    id_of,
    in_session_loop,
    inputs_of,
    steered,
    text_of,
)
from tests.proxy_fixture import TRANSPORTS, proxy_settings, serving

pytestmark = [in_session_loop, pytest.mark.face]

PROMPT = steered("Say it", text="one two three")
PIECES = ["one", " two", " three"]
# The text of a chunk.
TEXT = re.compile(r'(?<="content":")[^"]*|(?<="text":")[^"]*')


@pytest.fixture(scope="module")
def tokenizer(triton):
    return Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))


def usage(tokenizer: Tokenizer, endpoint: str, model: str) -> dict[str, int]:
    """Return what the tokenizer says: the rendered prompt with one BOS, and three tokens (vLLM counts the end too)."""
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n" if endpoint == "chat" else PROMPT
    # The template writes a BOS; only some backends put one in front of a bare prompt.
    bos = endpoint == "chat" or model in ADDS_BOS
    prompt = len(tokenizer.encode(rendered, add_special_tokens=False).ids) + bos
    completion = 4 if model in COUNTS_END else 3
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def one_line(value: object) -> str:
    """Return JSON as it stands on the wire."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def pieces_of(model: str) -> list[str]:
    """Return the texts of a stream: as the tokens come, or all at once from a model that cannot stream."""
    return PIECES if model in STREAMING else ["".join(PIECES)]


@pytest.mark.parametrize("model", MODELS)
async def test_a_whole_chat(proxy, model, tokenizer):
    """A chat completion has exactly the keys that clients need, in OpenAI's order."""
    answer = await ask(proxy, "chat", model, PROMPT, max_tokens=9)

    expected = {
        "id": "*",
        "object": "chat.completion",
        "created": "*",
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": usage(tokenizer, "chat", model),
        "system_fingerprint": "*",
    }
    assert one_line(expected) == answer.normalised.decode()
    assert "application/json" == answer.headers["Content-Type"].partition(";")[0]
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", id_of(answer))


@pytest.mark.parametrize("model", MODELS)
async def test_a_whole_completion(proxy, model, tokenizer):
    """A text completion has exactly the keys that clients need, in OpenAI's order."""
    answer = await ask(proxy, "completions", model, PROMPT, max_tokens=9)

    expected = {
        "id": "*",
        "object": "text_completion",
        "created": "*",
        "model": model,
        "choices": [
            {"text": "one two three", "index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": usage(tokenizer, "completions", model),
        "system_fingerprint": "*",
    }
    assert one_line(expected) == answer.normalised.decode()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", id_of(answer))


def ends(reason: str | None, counted: dict[str, int] | None) -> tuple[dict[str, object], dict[str, object]]:
    """Return what a choice's chunk says of its end, and what stands in a stream's last chunk alone."""
    end: dict[str, object] = {"finish_reason": reason}
    if reason is None:
        return end, {}
    return {**end, "stop_reason": None}, {} if counted is not None else {"system_fingerprint": "*"}


def chat_stream(model: str, counted: dict[str, int] | None) -> str:
    """Return the whole body of a chat stream, normalised."""
    head: dict[str, object] = {"id": "*", "object": "chat.completion.chunk", "created": "*", "model": model}
    tail = {} if counted is None else {"usage": None}

    def chunk(delta, reason=None):
        end, last = ends(reason, counted)
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, **end}], **last, **tail}

    chunks = [
        chunk({"role": "assistant", "content": "", "refusal": None}),
        *(chunk({"content": piece}) for piece in pieces_of(model)),
        chunk({}, "stop"),
    ]
    if counted is not None:
        chunks.append({**head, "choices": [], "system_fingerprint": "*", "usage": counted})
    return "".join(f"data: {line}\n\n" for line in [*map(one_line, chunks), "[DONE]"])


def completion_stream(model: str, counted: dict[str, int] | None) -> str:
    """Return the whole body of a completion stream, normalised."""
    head: dict[str, object] = {"id": "*", "object": "text_completion", "created": "*", "model": model}
    tail = {} if counted is None else {"usage": None}
    texts = [(piece, None) for piece in pieces_of(model)] + [("", "stop")]

    def chunk(text, reason):
        end, last = ends(reason, counted)
        return {**head, "choices": [{"text": text, "index": 0, "logprobs": None, **end}], **last, **tail}

    chunks = [chunk(text, reason) for text, reason in texts]
    if counted is not None:
        chunks.append({**head, "choices": [], "system_fingerprint": "*", "usage": counted})
    return "".join(f"data: {line}\n\n" for line in [*map(one_line, chunks), "[DONE]"])


def in_one_piece(events: str) -> list[tuple[str, str]]:
    """Return each event of a stream without its text, and its text; events that differ only in their text are one."""
    joined: list[tuple[str, str]] = []
    for event in events.split("\n\n"):
        frame = TEXT.sub("", event)
        text = "".join(TEXT.findall(event))
        if joined and joined[-1][0] == frame:
            text = joined.pop()[1] + text
        joined.append((frame, text))
    return joined


@every_case("include_usage", [None, False, True])
@every_case("endpoint", PATHS)
@pytest.mark.parametrize("model", MODELS)
async def test_a_stream(proxy, model, endpoint, include_usage, tokenizer):
    """
    A stream is exactly these events, each chunk with the same id and time, usage only where it was asked for; a model
    that is not decoupled sends its text as one chunk, and a companion model's tokens are one if they come together.
    """
    options = None if include_usage is None else {"include_usage": include_usage}
    answer = await ask(proxy, endpoint, model, PROMPT, max_tokens=9, stream=True, stream_options=options)

    counted = usage(tokenizer, endpoint, model) if include_usage else None
    expected = chat_stream(model, counted) if endpoint == "chat" else completion_stream(model, counted)
    streamed = answer.normalised.decode()
    if model == "companion":
        assert in_one_piece(expected) == in_one_piece(streamed)
    else:
        assert expected == streamed
    assert 1 == len({(chunk["id"], chunk["created"]) for chunk in answer.chunks})


@every_case("endpoint", PATHS)
async def test_the_headers_of_a_stream(proxy, endpoint):
    """Nothing on the way may keep, or collect, the events."""
    answer = await ask(proxy, endpoint, "ensemble", PROMPT, max_tokens=9, stream=True)

    assert 200 == answer.status
    assert "text/event-stream; charset=utf-8" == answer.headers["Content-Type"]
    assert "no-cache" == answer.headers["Cache-Control"]
    assert "no" == answer.headers["X-Accel-Buffering"]
    assert "chunked" == answer.headers["Transfer-Encoding"]
    assert "Content-Length" not in answer.headers
    assert "x-request-id" in answer.headers


async def test_created_is_now(proxy):
    """The time is in whole seconds since the epoch."""
    before = int(time.time())
    created = (await ask(proxy, "chat", "ensemble", PROMPT, max_tokens=1)).json["created"]

    assert before <= created <= int(time.time())


@pytest.mark.parametrize("model", MODELS)
async def test_the_prompt_never_comes_back(proxy, model):
    """No model shows the prompt in its answer, not even one that repeats it: special tokens and all."""
    prompt = steered("<|im_start|>user\nWho goes there? é😀<|im_end|>\n", text="a friend")
    answers = await asyncio.gather(
        *(ask(proxy, "completions", model, prompt, max_tokens=9, stream=streamed) for streamed in (True, False))
    )

    streamed, whole = answers
    assert "a friend" == "".join(chunk["choices"][0]["text"] for chunk in streamed.chunks)
    assert "a friend" == whole.json["choices"][0]["text"]


@pytest.mark.parametrize("model", [model for model in MODELS if model not in BREAKS_CHARACTERS])
async def test_pieces_are_never_taken_back(proxy, model):
    """Every piece of a stream is whole characters, although the model's own text changes under them."""
    text = "naïve 😀😀 日本"
    answer = await ask(proxy, "completions", model, steered(text=text), max_tokens=99, stream=True)

    pieces = [chunk["choices"][0]["text"] for chunk in answer.chunks]
    assert text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("model", ["ensemble", "ensemble_legacy", "ensemble_nonstreaming", "tensorrt_llm"])
async def test_a_chat_begins_with_one_bos(proxy, triton, model, tokenizer):
    """The template's, or the one that preprocessing adds: whether it does depends on its release."""
    answer = await ask(proxy, "chat", model, PROMPT, max_tokens=2)

    bos = tokenizer.encode("").ids[0]
    ids = (await inputs_of(triton, ENGINES[model], id_of(answer)))["input_ids"]["value"]
    assert [0] == [place for place, number in enumerate(ids) if number == bos]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_text_beyond_ascii_is_whole_by_default(triton, transport):
    """Umlauts, emoji and ideographs arrive on every adapter, streamed or not, with nothing set but the tokenizers."""
    text = "Grüße 😀👩‍👧, 日本語 und Ελλάδα!"
    settings = proxy_settings(triton, transport, prefer_token_level="auto")
    async with serving(settings, transport=transport) as proxy:
        await proxy.ready()
        for model in (*MODELS, "tensorrt_llm_bls_legacy"):
            for endpoint, streamed in itertools.product(PATHS, (False, True)):
                answer = await ask(proxy, endpoint, model, steered(text=text), max_tokens=99, stream=streamed)
                assert (model, endpoint, streamed, text) == (model, endpoint, streamed, text_of(endpoint, answer))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_whole_text_beyond_ascii_needs_no_tokenizer(triton, transport, monkeypatch):
    """Where an ensemble or a BLS model answers itself, what is not streamed has every character too."""
    text = "Grüße 😀👩‍👧, 日本語 und Ελλάδα!"
    monkeypatch.setattr("triton_openai.prompts.prompter._exists", lambda _: False)
    async with serving(proxy_settings(triton, transport), transport=transport) as proxy:
        await proxy.ready()
        # The older releases repeat the prompt, which takes a tokenizer to take out.
        for model in ("ensemble", "ensemble_nonstreaming", "tensorrt_llm_bls", "tensorrt_llm_bls_delta"):
            answer = await ask(proxy, "completions", model, steered(text=text), max_tokens=99)
            assert (model, text) == (model, text_of("completions", answer))


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_several_prompts(proxy, model, streamed, tokenizer):
    """Choices are numbered as the prompts are, whichever ends first; usage is that of all of them together."""
    prompts = [
        steered(text="one three", first_delay_ms=60),
        steered(text="one"),
        steered(text="one two three"),
        steered(text=""),
    ]
    options = {"stream_options": {"include_usage": True}} if streamed else {}
    body = {"model": model, "prompt": prompts, "max_tokens": 2, "stream": streamed, **options}

    answer = await proxy.post("/v1/completions", body)

    assert 200 == answer.status
    bos = model in ADDS_BOS
    asked = sum(len(tokenizer.encode(prompt, add_special_tokens=False).ids) + bos for prompt in prompts)
    # The first and the third fill the limit; vLLM counts the ends of the others, too.
    made = 2 + 1 + 2 + 0 + (2 if model in COUNTS_END else 0)
    if streamed:
        *chunks, last = answer.chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(4)]
        reasons = [
            next(c["finish_reason"] for c in choices if c["index"] == i and c["finish_reason"]) for i in range(4)
        ]
        counted = last["usage"]
    else:
        assert [0, 1, 2, 3] == [choice["index"] for choice in answer.json["choices"]]
        texts = [choice["text"] for choice in answer.json["choices"]]
        reasons = [choice["finish_reason"] for choice in answer.json["choices"]]
        counted = answer.json["usage"]
    assert ["one three", "one", "one two", ""] == texts
    assert ["length", "stop", "length", "stop"] == reasons
    assert {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made} == counted
