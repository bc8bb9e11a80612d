"""The demo with its language model: its answers fit the requests, and the documents' examples print what they show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, SecretStr

from tests.clients.service import Service, exchange
from tests.documents import ADDRESS, ROOT, blocks
from tests.programs import needs

#: The file that the guide to batches sends.
BATCH_LINE = json.dumps(
    {
        "custom_id": "page-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "ensemble", "messages": [{"role": "user", "content": "Hello"}]},
    }
)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MODELS = ("ensemble", "vllm_model")
# The engine is the same behind both.
_EACH_MODEL = pytest.mark.parametrize("model", ["ensemble", pytest.param("vllm_model", marks=pytest.mark.extended)])
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "districts": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "size", "districts"],
    "additionalProperties": False,
}


class City(BaseModel):
    """What LangChain is asked to fill in."""

    name: str
    size: Literal["small", "large"]


@pytest.fixture
def client(demo: Service) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=demo.base_url, api_key="none", max_retries=0) as made:
        yield made


def asked(model: str, question: str = QUESTION, **more: Any) -> dict[str, Any]:
    """Return a request for the likeliest answer."""
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "seed": 1, "max_tokens": 32, **more}


@_EACH_MODEL
def test_text(client: openai.OpenAI, model: str) -> None:
    """A model answers sensibly, whole and streamed, with exact counts, log probabilities and reasons."""
    whole = client.chat.completions.create(**asked(model, logprobs=True, top_logprobs=2))
    streamed = client.chat.completions.create(**asked(model, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    stopped = client.chat.completions.create(**asked(model, stop=[" France"])).choices[0]
    short = client.chat.completions.create(**asked(model, max_tokens=2))

    choice = whole.choices[0]
    assert (ANSWER, "stop") == (choice.message.content, choice.finish_reason)
    assert ANSWER == "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 4
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert ANSWER == "".join(token.token for token in tokens).removesuffix("<|im_end|>")
    # Greedy: each token is the likeliest one.
    assert all(token.logprob == max(other.logprob for other in token.top_logprobs) < 0 for token in tokens)
    assert ("The capital of", "stop") == (stopped.message.content, stopped.finish_reason)
    assert short.usage is not None
    assert ("The capital", "length", 2) == (
        short.choices[0].message.content,
        short.choices[0].finish_reason,
        short.usage.completion_tokens,
    )


@_EACH_MODEL
def test_guides(client: openai.OpenAI, model: str) -> None:
    """Answers fit the schema, the expression, the choice or the grammar, and a tool is called when it has to be."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(**asked(model, "Describe Paris.", max_tokens=64, response_format=form))
    jsonschema_rs.validate(SCHEMA, json.loads(answer.choices[0].message.content or ""))
    for guide, expected in (
        ({"guided_regex": "[0-9]{2}/x"}, r"12/x"),
        ({"guided_choice": ['a "b"']}, 'a "b"'),
        ({"guided_grammar": 'root ::= "yes" "!"'}, "yes!"),
    ):
        text = client.chat.completions.create(**asked(model), extra_body=guide).choices[0].message.content or ""
        assert (expected[2:], len(expected)) == (text[2:], len(text)), guide
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        tools = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        message = client.chat.completions.create(**asked(model, "The weather in Rome?", **tools)).choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert ("get_weather", {"city": "Rome"}) == (call.function.name, json.loads(call.function.arguments))
    with pytest.raises(openai.BadRequestError, match="Grammar error"):
        client.chat.completions.create(**asked(model), extra_body={"guided_regex": "("})


def test_parameters(client: openai.OpenAI) -> None:
    """The engine does what the contracts have parameters for."""
    without = client.chat.completions.create(**asked("ensemble", logit_bias={"7042": -100})).choices[0]
    long = client.chat.completions.create(**asked("vllm_model"), extra_body={"min_tokens": 20})
    endless = client.chat.completions.create(**asked("ensemble"), extra_body={"ignore_eos": True}).choices[0]

    assert "Paris" not in (without.message.content or "")
    assert long.usage is not None
    assert long.usage.completion_tokens >= 20
    assert "length" == endless.finish_reason
    emoji = client.chat.completions.create(**asked("ensemble", "Write three emoji.", logprobs=True, max_tokens=6))
    logprobs = emoji.choices[0].logprobs
    content = (logprobs and logprobs.content) or []
    assert 6 == len(content)
    # Which ones the model prefers depends on the processor.
    written = b"".join(bytes(token.bytes or []) for token in content).decode(errors="ignore")
    assert any(character >= "\U0001f000" for character in written)


def test_defaults(client: openai.OpenAI) -> None:
    """Without sampling parameters a small model does not wander, and no answer is longer than its context."""
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]

    answer = client.chat.completions.create(model="ensemble", messages=messages)

    assert "The capital of France is Paris." == answer.choices[0].message.content
    lowered = client.chat.completions.create(model="ensemble", messages=messages, max_tokens=100_000, temperature=0)
    assert ANSWER == lowered.choices[0].message.content


def test_the_status(demo: Service) -> None:
    """The status tells what the language model can do, without what only its backend could do."""
    models = {model["name"]: model for model in demo.send("GET", "/status").json["models"]}

    for model in MODELS:
        told = models[model]["tasks"], models[model]["features"], models[model]["chat"]
        assert (["generate"], ["streaming", "tools", "json_schema", "logprobs"], True) == told


def test_a_client_that_leaves(demo: Service) -> None:
    """More requests than the engine has slots are left; the next one does not wait for them."""
    for model in MODELS:
        for _ in range(20):
            connection = demo.connect()
            body = json.dumps(asked(model, stream=True, max_tokens=1500, ignore_eos=True))
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            connection.close()
    connection = demo.connect(timeout=120)
    reply = exchange(connection, "POST", "/v1/chat/completions", asked("ensemble"))
    connection.close()

    assert ANSWER == reply.json["choices"][0]["message"]["content"]


def test_embeddings(client: openai.OpenAI) -> None:
    """Texts of the same meaning lie closer together than others, without a word in common."""
    texts = ["How do I bake bread?", "a recipe for a loaf", "The shares lost value."]
    bread, loaf, shares = (
        each.embedding for each in client.embeddings.create(model="text_embedding", input=texts).data
    )

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert pytest.approx(1, abs=1e-3) == cosine(bread, bread)
    assert cosine(bread, loaf) > cosine(bread, shares) + 0.05


@pytest.mark.extended
def test_langchain(demo: Service) -> None:
    """``with_structured_output`` by function calling returns the object; the examples do it by JSON schema."""
    # Not at the top: each of pytest's processes collects this file, and it takes a second.
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient() as connection:
        chat = ChatOpenAI(
            model="ensemble", base_url=demo.base_url, api_key=SecretStr("none"), temperature=0, http_client=connection
        )
        found = chat.with_structured_output(City, method="function_calling").invoke("Tell me about Paris.")

    assert isinstance(found, City)
    assert found.name


def run(demo: Service, *command: str, folder: Path = ROOT) -> str:
    """Run a *command* of a document in *folder* and return what it prints."""
    line = [part.replace(ADDRESS, demo.address) for part in command]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == result.returncode, result.stderr
    return result.stdout


# They import every client, and OpenAI's is asked by the other tests.
@pytest.mark.extended
def test_examples_in_python(demo: Service, tmp_path: Path) -> None:
    """Each program in the documents that has no marker ends, and prints what its document shows."""
    (tmp_path / "requests.jsonl").write_text(BATCH_LINE)
    expected = [(block.place, block.code, block.output) for block in blocks("python") if not block.marker]
    ((program,),) = [[block.output] for block in blocks("sh", documents=("examples/langchain/README.md",))]
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--base-url', 'http://localhost:9000/v1']\n"
        f"runpy.run_path({str(ROOT / 'examples/langchain/chat.py')!r}, run_name='__main__')"
    )
    expected.append(("examples/langchain/chat.py", code, program))
    # One process for all, because the imports take most of the time.
    code = "".join(f"exec({code!r}, {{'__name__': '__main__'}})\nprint('\\f')\n" for _, code, _ in expected)
    printed = run(demo, sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", code, folder=tmp_path)

    assert len(expected) > 10
    for (place, _, shown), output in zip(expected, printed.split("\f\n")[:-1], strict=True):
        if shown:
            assert shown.strip() == output.strip(), place


@needs("curl")
def test_examples_with_curl(demo: Service) -> None:
    """Each request in the documents that has no marker succeeds, with the answer that its document shows."""
    for block in blocks("sh"):
        if block.marker:
            continue
        for command in block.commands:
            if command.startswith("curl "):
                answer = run(demo, "sh", "-ec", command.replace("curl ", "curl -sS --fail -m 60 ", 1))
                if '"stream": true' in command:
                    assert answer.endswith("data: [DONE]\n\n"), block.place
                    continue
                printed = json.loads(answer)
                if block.output and "…" not in block.output:
                    changing = dict.fromkeys(("id", "created", "system_fingerprint"))
                    assert {**json.loads(block.output), **changing} == {**printed, **changing}, block.place
