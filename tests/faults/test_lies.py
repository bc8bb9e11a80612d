"""A Triton that lies, in each field of each kind of answer: clients read a sentence, and the operator in the log."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.conformance.calls import steered
from tests.conformance.test_transcriptions import send
from tests.extended import examples
from tests.faults.liar import HttpAnswer, Liar, lies_about, lying
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, proxy_settings, serving
from tests.speech import SENTENCE, speak, wav
from tests.triton_fixture import TestTriton

# Of some hundred to two thousand of each case; 0 for all.
COUNT = int(os.environ.get("LIES", examples(40, few=10)))
MESSAGES = [{"role": "user", "content": steered(text="one two three")}]
CHAT = {"messages": MESSAGES, "max_tokens": 5}
TEXTS = ["one", "two"]
#: Requests that together read every output of every adapter, each with the transports over which it is possible.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vllm": ("/v1/chat/completions", {"model": "vllm_model", **CHAT}),
    "vllm, streamed": ("/v1/chat/completions", {"model": "vllm_model", **CHAT, "stream": True}),
    "vllm, log probabilities": (
        "/v1/chat/completions",
        {"model": "vllm_model", **CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "vllm, several answers": (
        "/v1/completions",
        {"model": "vllm_model", "prompt": steered(text="one"), "n": 2, "best_of": 3},
    ),
    "vllm, embeddings": ("/v1/embeddings", {"model": "vllm_embedding", "input": "one"}),
    "ensemble": ("/v1/chat/completions", {"model": "ensemble", **CHAT}),
    "ensemble, streamed": ("/v1/chat/completions", {"model": "ensemble", **CHAT, "stream": True, "logprobs": True}),
    "ensemble at once": ("/v1/chat/completions", {"model": "ensemble_nonstreaming", **CHAT}),
    "bls": ("/v1/chat/completions", {"model": "tensorrt_llm_bls", **CHAT, "stream": True}),
    "engine": ("/v1/chat/completions", {"model": "tensorrt_llm", **CHAT, "stream": True, "logprobs": True}),
    "engine, alternatives": (
        "/v1/chat/completions",
        {"model": "tensorrt_llm", **CHAT, "logprobs": True, "top_logprobs": 2},
    ),
    "engine, prompt": (
        "/v1/completions",
        {"model": "tensorrt_llm", "prompt": "one two", "max_tokens": 2, "prompt_logprobs": 1},
    ),
    "llmapi": ("/v1/chat/completions", {"model": "tensorrt_llm_llmapi", **CHAT, "stream": True}),
    "text": ("/v1/chat/completions", {"model": "text_model", **CHAT}),
    "response": ("/v1/responses", {"model": "vllm_model", "input": MESSAGES, "stream": True, "store": False}),
    "message": ("/v1/messages", {"model": "ensemble", **CHAT, "stream": True}),
    "embeddings": ("/v1/embeddings", {"model": "text_embedding", "input": TEXTS}),
    "embeddings compared": (
        "/v1/rerank",
        {"model": "text_embedding", "query": "one", "documents": TEXTS},
    ),
    "pairs": ("/v1/rerank", {"model": "text_rerank_pairs", "query": "one", "documents": TEXTS}),
    "pairs of ids": ("/v1/score", {"model": "text_rerank_ids", "queries": "one", "documents": TEXTS}),
    "query and documents": ("/v1/rerank", {"model": "text_rerank", "query": "one", "documents": TEXTS}),
    "classes": ("/v1/classify", {"model": "text_classification", "input": TEXTS}),
    "classes of ids": ("/v1/classify", {"model": "text_classification_ids", "input": TEXTS}),
    "speech": ("/v1/audio/speech", {"model": "file_tts", "input": "one", "response_format": "wav"}),
    "recording": ("/v1/audio/transcriptions", {"model": "sensevoice"}),
}
# Numbers in binary form, which JSON cannot express.
BINARY = {"engine, alternatives", "engine, prompt", "speech", "recording"}


@asynccontextmanager
async def lied_to(triton: TestTriton, transport: str) -> AsyncIterator[tuple[Liar, Proxy]]:
    """Run the service with a liar between it and its Triton."""
    async with lying(triton.http_url, triton.grpc_url) as liar:
        settings = proxy_settings(triton, transport)
        url = liar.http_url if transport == "http" else liar.grpc_url
        told = msgspec.structs.replace(settings.triton, url=(url,), refresh_interval=3600.0)
        async with serving(msgspec.structs.replace(settings, triton=told), transport=transport) as proxy:
            await proxy.ready()
            yield liar, proxy


async def ask(proxy: Proxy, path: str, body: Mapping[str, Any]) -> Answer:
    """Send a request and return the answer."""
    if path.endswith("transcriptions"):
        return await send(proxy, wav(speak(SENTENCE)), path, **body)
    return await proxy.post(path, body)


def trouble(answer: Answer) -> str | None:
    """Return what is wrong with an answer to a request that was right, if Triton may have lied."""
    if answer.status == 200:
        ended = answer.body.count(b"event: error") + answer.body.count(b'"type":"response.failed"')
        return "several errors in a stream" if ended > 2 else None
    said = str(answer.json["error"]["message"])
    # Logits that are missing: this is how an engine answers that was built without them.
    if answer.status not in (502, 503, 501) and "engine sends no" not in said:
        return f"status {answer.status}: {said}"
    return None if said.endswith((".", "…")) or "The model failed" in said else f"no sentence: {said}"


@pytest.mark.sampled
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
async def test_answers_of_models(triton: TestTriton, name: str, transport: str) -> None:
    """No lie is an error of the service, and none leaves a traceback in the log."""
    if transport == "http" and name in BINARY - {"recording", "speech"}:
        pytest.skip("HTTP's JSON cannot express these numbers")
    path, body = CASES[name]
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with lied_to(triton, transport) as (liar, proxy):
        true = await ask(proxy, path, body)
        assert 200 == true.status, true.body
        found = list(lies_about(liar.heard["inference"]))
        lies = Random(name).sample(found, COUNT) if 0 < COUNT < len(found) else found
        with capture_logs() as logs:
            for what, lie in lies:
                liar.lies["inference"] = lie
                try:
                    wrong = trouble(await ask(proxy, path, body))
                except AssertionError as error:
                    wrong = str(error)[:300]
                if wrong is not None:
                    problems.append(f"{what}: {wrong}")
        liar.lies.clear()
        again = await ask(proxy, path, body)
    # After a few of them, the operator is warned that the model does not answer.
    bad = [line for line in logs if line["event"] != "model does not answer"]
    problems += [line for line in bad if line.get("exc_info") or line["log_level"] in ("error", "critical")]
    assert [] == problems, "\n".join(str(problem)[:500] for problem in problems)
    assert 200 == again.status, again.body


def places(value: Any) -> Iterator[Sequence[str | int]]:
    """Yield the path to each value within *value*, and to the whole."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        for path in places(one):
            yield (key, *path)


def replaced(value: Any, path: Sequence[str | int], change: str) -> str:
    """Return the JSON of *value* with *change*, JSON or not, at *path*."""
    if not path:
        return change
    mark = "-the lie-"
    copy = json.loads(json.dumps(value))
    holder = copy
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = mark
    return json.dumps(copy).replace(f'"{mark}"', change)


CHANGES = (
    "null", "true", "5", "-1", "1.5", "NaN", "1e400", "9" * 400, "9" * 5000, '""', '"x"', '"a\\r\\nb: c"', '"\\ud800"',
    '"../x"', '"\\u0000"', "{}", '{"a":1}', "[]", "[[]]", "[null]", '["a",5]', "[" * 5000 + "]" * 5000, "nonsense", "",
    '"' + "x" * 100_000 + '"', "4294967296", "2147483648", "-9223372036854775808",
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("path", ["/v2", "/v2/repository/index", "/v2/models/text_model/config"])
async def test_answers_about_models(triton: TestTriton, path: str) -> None:
    """What Triton tells of itself and its models may be anything, too: other models are served, and it is logged."""
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with lied_to(triton, "http") as (liar, proxy):
        true = liar.heard[path]
        assert isinstance(true, HttpAnswer)
        value = json.loads(true.body)
        if path.endswith("index"):
            # Some are like all.
            value = [one for one in value if one["name"] in ("text_model", "vllm_model")]
        found = [(place, change) for place in places(value) for change in CHANGES]
        some = Random(path).sample(found, min(COUNT, len(found))) if COUNT else found
        with capture_logs() as logs:
            for place, change in some:
                liar.lies[path] = true._replace(body=replaced(value, place, change).encode())
                await proxy.models.fleet.reload()
                listed = await proxy.get("/v1/models")
                assert 200 == listed.status
                health = await proxy.get("/health/ready")
                assert health.status in (200, 503), (place, change, health.body)
                answer = await proxy.post(*CASES["vllm"])
                if answer.status not in (200, 404, 502, 503):
                    problems.append(f"{place} {change[:30]}: {answer.status} {answer.body[:300]!r}")
                if not path.endswith("index") and answer.status != 200:
                    problems.append(f"{place} {change[:30]} ends another model: {answer.body[:300]!r}")
        liar.lies.clear()
        await proxy.models.fleet.reload()
        assert 200 == (await proxy.post(*CASES["text"])).status
    problems += [line for line in logs if line.get("exc_info") or line["log_level"] == "critical"]
    assert [] == problems, "\n".join(str(problem)[:500] for problem in problems)
