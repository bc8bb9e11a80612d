"""What becomes of a prompt on its way, and how much of it the backend had already: seen on a real Triton."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from tests.conformance.calls import PATHS, ask, id_of, in_session_loop, inputs_of, steered
from tests.proxy_fixture import TRANSPORTS, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import ModelSettings
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = in_session_loop

# By their adapter: text level, cumulative text, token level, the LLM API.
COUNTING = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_llmapi")
BLOCK = 64


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def known(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One service per transport that knows block sizes, a context length, and trusts templates."""
    tokenizer = str(triton.tokenizer)
    own = {model: ModelSettings(tokenizer=tokenizer, kv_cache_block_size=BLOCK) for model in COUNTING}
    own["tensorrt_llm"] = msgspec.structs.replace(own["tensorrt_llm"], adapter="trtllm")
    own["vllm_model"] = ModelSettings(tokenizer=tokenizer, kv_cache_block_size=BLOCK, max_model_len=100)

    def settings(transport: str):
        base = changed(proxy_settings(triton, transport), api={"trust_request_chat_template": True})
        return msgspec.structs.replace(base, models={**base.models, **own})

    async with (
        serving(settings("http"), transport="http") as over_http,
        serving(settings("grpc"), transport="grpc") as over_grpc,
    ):
        await over_http.ready()
        await over_grpc.ready()
        yield {"http": over_http, "grpc": over_grpc}


@pytest.fixture(params=TRANSPORTS)
def served(request: pytest.FixtureRequest, known: dict[str, Proxy]) -> Proxy:
    """The service over each transport in turn."""
    return known[request.param]


@pytest.fixture(scope="session")
def tokenizer(triton: TestTriton) -> Tokenizer:
    """The demo's tokenizer."""
    return Tokenizer.load(str(triton.tokenizer))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", COUNTING)
async def test_cached_tokens_are_counted(served: Proxy, model: str, stream: bool) -> None:
    """What the engine found in its cache is told in tokens, where its block size is known."""
    prompt = f"{uuid.uuid4()} " + "one two three four " * 50 + steered("", text="x")
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    async def details() -> tuple[int, int]:
        answer = await ask(served, "completions", model, prompt, **options)
        assert 200 == answer.status, answer.body
        usage = (answer.chunks[-1] if stream else answer.json)["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    total, first = await details()
    _, second = await details()

    assert 0 == first
    assert total // BLOCK * BLOCK == second
    assert second > 2 * BLOCK


@pytest.mark.parametrize("model", ["ensemble", "vllm_model", "ensemble_legacy"])
async def test_nothing_is_said_of_a_cache_that_nobody_knows(proxy: Proxy, known: dict[str, Proxy], model: str) -> None:
    """Without the block size, or from a backend that does not tell, there are no cached tokens, not even none."""
    service = known[proxy.transport] if model == "vllm_model" else proxy
    answer = await ask(service, "completions", model, steered(text="x"))
    assert {"prompt_tokens", "completion_tokens", "total_tokens"} == set(answer.json["usage"])


async def test_only_who_knows_the_block_size_asks(proxy: Proxy, triton: TestTriton) -> None:
    """The metrics cost the backend work."""
    answer = await ask(proxy, "completions", "ensemble", steered(text="x"))
    assert "return_perf_metrics" not in await inputs_of(triton, "tensorrt_llm", id_of(answer))


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("model", ["vllm_model", "tensorrt_llm"])
async def test_a_long_prompt_is_cut(served: Proxy, tokenizer: Tokenizer, model: str, endpoint: str) -> None:
    """The model gets the last tokens, no more of them than were allowed."""
    prompt = "zero " * 300 + steered("one two three", text="x")

    answer = await ask(served, endpoint, model, prompt, max_tokens=2, truncate_prompt_tokens=30)

    assert 200 == answer.status, answer.body
    assert 30 == answer.json["usage"]["prompt_tokens"]


async def test_what_was_cut_is_what_the_model_gets(served: Proxy, triton: TestTriton, tokenizer: Tokenizer) -> None:
    """The model gets what was cut, on both sides, and exactly for token ids."""
    words = "one two three four five six"
    added = tokenizer.count("", True)
    left = await ask(served, "completions", "vllm_model", words, max_tokens=1, truncate_prompt_tokens=2 + added)
    right = await ask(
        served,
        "completions",
        "vllm_model",
        words,
        max_tokens=1,
        truncate_prompt_tokens=2 + added,
        truncation_side="right",
    )
    ids = await served.post(
        "/v1/completions",
        {"model": "tensorrt_llm", "prompt": tokenizer.encode(words), "max_tokens": 1, "truncate_prompt_tokens": 2},
    )

    async def prompt_of(answer) -> str:
        return str((await inputs_of(triton, "vllm_model", id_of(answer)))["text_input"]["value"][0])

    assert (" five six", "one two") == (await prompt_of(left), await prompt_of(right))
    got = (await inputs_of(triton, "tensorrt_llm", id_of(ids)))["input_ids"]["value"]
    assert tokenizer.encode(words)[-2:] == got


async def test_minus_one_fills_the_context(served: Proxy) -> None:
    """The prompt leaves room for the answer that is asked for."""
    prompt = "zero " * 300
    answer = await ask(served, "completions", "vllm_model", prompt, max_tokens=10, truncate_prompt_tokens=-1)
    assert (200, 90) == (answer.status, answer.json["usage"]["prompt_tokens"])
    unknown = await ask(served, "completions", "ensemble", prompt, truncate_prompt_tokens=-1)
    assert (400, "truncate_prompt_tokens") == (unknown.status, unknown.error["param"])


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
        ({"priority": 1}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": "high"}, "priority"),
    ],
)
async def test_what_makes_no_sense_is_refused(known: dict[str, Proxy], fields: dict[str, object], param: str) -> None:
    """With the name of what is wrong."""
    answer = await known["http"].post("/v1/completions", {"model": "vllm_model", "prompt": "Hello there", **fields})
    assert (400, param) == (answer.status, answer.error["param"])


@pytest.mark.parametrize("endpoint", PATHS)
async def test_priority_where_the_queue_has_levels(proxy: Proxy, endpoint: str) -> None:
    """Triton takes it; what the queue does not have is refused with the numbers."""
    for priority in (0, 1, 2):
        answer = await ask(proxy, endpoint, "ensemble_nonstreaming", steered(text="x"), priority=priority)
        assert 200 == answer.status, answer.body
    beyond = await ask(proxy, endpoint, "ensemble_nonstreaming", steered(text="x"), priority=3)
    assert (400, "priority") == (beyond.status, beyond.error["param"])
    assert "to 2" in beyond.error["message"]


async def test_the_last_message_is_continued(served: Proxy, triton: TestTriton) -> None:
    """The prompt ends with the assistant's own words."""
    asked = {"role": "user", "content": "Hi"}
    body = {
        "model": "vllm_model",
        "messages": [asked, {"role": "assistant", "content": "The answer is"}],
        "continue_final_message": True,
        "max_tokens": 2,
    }
    answer = await served.post("/v1/chat/completions", body)
    assert 200 == answer.status, answer.body
    assert (await inputs_of(triton, "vllm_model", id_of(answer)))["text_input"]["value"][0].endswith("The answer is")

    both = await served.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert (400, "continue_final_message") == (both.status, both.error["param"])
    nobody = await served.post("/v1/chat/completions", {**body, "messages": [asked]})
    assert (400, "continue_final_message") == (nobody.status, nobody.error["param"])


async def test_a_template_of_the_request(served: Proxy, triton: TestTriton) -> None:
    """A template of the request takes the place of the model's where the operator allows that."""
    body = {"model": "vllm_model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    template = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
    answer = await served.post("/v1/chat/completions", {**body, "chat_template": template})
    assert 200 == answer.status, answer.body
    assert ["[user: Hi]"] == (await inputs_of(triton, "vllm_model", id_of(answer)))["text_input"]["value"]

    for wrong in ("{% for", "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", "x" * 200_000, 5):
        refused = await served.post("/v1/chat/completions", {**body, "chat_template": wrong})
        assert 400 == refused.status, refused.body


async def test_tokenize_renders_like_a_chat(served: Proxy, tokenizer: Tokenizer) -> None:
    """Tools, an open end and a template of the request's count."""
    asked = {"role": "user", "content": "one two"}
    body = {"model": "vllm_model", "messages": [asked]}
    plain = await served.post("/tokenize", {**body, "chat_template": "{{ messages[0].content }}"})
    assert tokenizer.encode("one two") == plain.json["tokens"]
    messages = [asked, {"role": "assistant", "content": "three four"}]
    end = await served.post("/tokenize", {**body, "messages": messages, "continue_final_message": True})
    assert end.json["tokens"][-2:] == tokenizer.encode("\nthree four")[-2:]
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    with_tools = await served.post("/tokenize", {**body, "tools": [tool]})
    without = await served.post("/tokenize", body)
    assert with_tools.status == 400 or with_tools.json["count"] > without.json["count"]


async def test_tokens_as_the_vocabulary_writes_them(served: Proxy) -> None:
    """Tokens are written as the vocabulary has them, with the context length, as vLLM's server returns them."""
    answer = await served.post("/tokenize", {"model": "vllm_model", "prompt": "how é", "return_token_strs": True})

    assert ["<|startoftext|>", "h", "ow", "Ġ", "Ã", "©"] == answer.json["token_strs"]
    assert (6, 100) == (answer.json["count"], answer.json["max_model_len"])


async def test_tokenize_looks_at_tools_with_a_prompt_too(served: Proxy) -> None:
    """A prompt has no use for them; what is no tool is refused all the same."""
    refused = await served.post("/tokenize", {"model": "vllm_model", "prompt": "Hi", "tools": ["a"]})

    assert (400, "tools[0]") == (refused.status, refused.error["param"])
