"""Log probabilities, biases and token ids of every model: what reaches it, what reaches the client, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import (
    BLS,
    ENGINES,
    TRTLLM_AND_VLLM,
    ask,
    id_of,
    in_session_loop,
    inputs_of,
    recorded,
    steered,
    text_of,
)
from tests.proxy_fixture import Answer, changed, proxy_settings, serving
from triton_openai.demo.standins.logits import log_probability
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = in_session_loop

# What streams tells each token's log probability with its text; a whole answer does not say which text is whose.
# The LLM API tells none; what engines tell token by token is in tests/integration/test_token_level_logprobs.py.
TEXT = tuple(model for model in TRTLLM_AND_VLLM if model not in ("tensorrt_llm", "tensorrt_llm_llmapi"))
TOLD = tuple(model for model in TEXT if model != "ensemble_nonstreaming")
TEXT_LEVEL = tuple(model for model in TEXT if model != "vllm_model")
END = "<|im_end|>"
TEMPLATE = Path(__file__).resolve().parents[1] / "fixtures" / "tools.jinja"


@pytest.fixture(scope="session")
def tokenizer(triton):
    """The tokenizer of all models."""
    return Tokenizer.load(str(triton.tokenizer))


def entries_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the entries of a chat's only choice, of a whole answer or of a stream."""
    assert 200 == answer.status, answer.body
    chunks = answer.chunks if answer.body.startswith(b"data:") else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


def lists_of(answer: Answer) -> Mapping[str, list[Any]]:
    """Return the parallel lists of a completion's only choice, those of a stream's chunks joined."""
    assert 200 == answer.status, answer.body
    chunks = answer.chunks if answer.body.startswith(b"data:") else [answer.json]
    found: dict[str, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found.setdefault(name, []).extend(values)
    assert 1 == len({len(values) for values in found.values()})
    return found


def known(tokenizer: Tokenizer, text: str) -> list[Any]:
    """Return the log probabilities that the stand-ins give to the tokens of *text*."""
    return [pytest.approx(log_probability(number), rel=1e-4) for number in tokenizer.encode(text)]


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TOLD)
async def test_each_token_has_its_own(proxy, tokenizer, model, stream):
    """Each token of a chat has its text, its bytes, and the number that the backend told for it."""
    answer = await ask(proxy, "chat", model, steered(text="one two three"), logprobs=True, max_tokens=9, stream=stream)

    entries = [entry for entry in entries_of(answer) if entry["token"] != END]
    assert ["one", " two", " three"] == [entry["token"] for entry in entries]
    assert known(tokenizer, "one two three") == [entry["logprob"] for entry in entries]
    assert [list(entry["token"].encode()) for entry in entries] == [entry["bytes"] for entry in entries]
    assert all([] == entry["top_logprobs"] for entry in entries)


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TOLD)
async def test_offsets_of_completions(proxy, tokenizer, model, stream):
    """The lists are parallel, and each token's offset is where it stands in the text."""
    answer = await ask(
        proxy, "completions", model, steered(text="one two three"), logprobs=0, max_tokens=3, stream=stream
    )

    lists = lists_of(answer)
    assert ["one", " two", " three"] == lists["tokens"]
    assert list(accumulate([3, 4], initial=0)) == lists["text_offset"]
    assert known(tokenizer, "one two three") == lists["token_logprobs"]
    assert [{token: value} for token, value in zip(lists["tokens"], lists["token_logprobs"], strict=True)] == lists[
        "top_logprobs"
    ]


@pytest.mark.parametrize("model", TOLD)
async def test_log_probabilities_come_with_their_token(proxy, model):
    """In a stream each chunk of text brings its tokens' entries."""
    answer = await ask(proxy, "chat", model, steered(text="one two three"), logprobs=True, max_tokens=3, stream=True)

    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    told = [
        (choice["delta"]["content"], "".join(entry["token"] for entry in choice["logprobs"]["content"]))
        for choice in choices
        if choice["delta"].get("content")
    ]
    assert told
    assert all(text == tokens for text, tokens in told)


@every_case("stop", [" two", "wo th", "hree", "e two three"])
@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TOLD)
async def test_what_a_stop_string_cuts_has_no_entry(proxy, model, stream, stop):
    """Entries are those of the tokens that begin in the text shown, once each and in order."""
    tokens = ["one", " two", " three", " four"]
    answer = await ask(
        proxy, "chat", model, steered(text="".join(tokens)), logprobs=True, stop=[stop], max_tokens=20, stream=stream
    )

    shown = text_of("chat", answer)
    begins = list(accumulate(map(len, tokens), initial=0))
    assert "".join(tokens).partition(stop)[0] == shown
    assert [token for token, start in zip(tokens, begins, strict=False) if start < len(shown)] == [
        entry["token"] for entry in entries_of(answer)
    ]


@every_case("stop", ["nowhere", " five"])
@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TOLD)
async def test_stop_strings_that_do_not_come_lose_nothing(proxy, model, stream, stop):
    """What was held back for them is told at the end."""
    answer = await ask(
        proxy, "chat", model, steered(text="one two three f"), logprobs=True, stop=[stop], max_tokens=20, stream=stream
    )

    entries = [entry for entry in entries_of(answer) if entry["token"] != END]
    assert "one two three f" == text_of("chat", answer) == "".join(entry["token"] for entry in entries)


@pytest.mark.parametrize("model", TOLD)
async def test_every_choice_has_its_own(proxy, model):
    """Several answers do not share entries."""
    answer = await ask(proxy, "chat", model, steered(text="one two"), logprobs=True, n=3, max_tokens=2)

    for choice in answer.json["choices"]:
        assert ["one", " two"] == [entry["token"] for entry in choice["logprobs"]["content"]]


@every_case("stream", [False, True])
async def test_log_probabilities_beside_tool_calls_and_reasoning(triton, stream):
    """Text that a parser takes for a call, or for thoughts, has entries all the same: they are the tokens generated."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = f"<think>\nwell\n</think>\n{call}"
    settings = changed(
        proxy_settings(triton, "http"), defaults={"chat_template": str(TEMPLATE), "reasoning_parser": "think"}
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        answer = await ask(
            proxy, "chat", "vllm_model", steered(text=text), logprobs=True, tools=[tool], max_tokens=99, stream=stream
        )

    assert 200 == answer.status, answer.body
    assert b'"tool_calls"' in answer.body
    assert b'"reasoning_content":"' in answer.body
    tokens = [entry["token"] for entry in entries_of(answer)]
    assert text == "".join(tokens).removesuffix(END)


@every_case("stream", [False, True])
async def test_the_bytes_of_split_characters(proxy, stream):
    """vLLM tells token ids, so the tokenizer knows which bytes a part of a character is."""
    text = "é 😀"
    answer = await ask(
        proxy, "chat", "vllm_model", steered(text=text), logprobs=True, top_logprobs=1, max_tokens=20, stream=stream
    )

    entries = [entry for entry in entries_of(answer) if entry["token"] != END]
    assert list(text.encode()) == [byte for entry in entries for byte in entry["bytes"]]
    assert list(text.encode()) == [byte for entry in entries for byte in entry["top_logprobs"][0]["bytes"]]
    assert "\ufffd" == entries[0]["token"]


async def test_bytes_that_nobody_knows_are_null(proxy):
    """An ensemble decodes each token alone and loses the bytes of a split character."""
    answer = await ask(proxy, "chat", "ensemble", steered(text="é"), logprobs=True, max_tokens=20)

    assert [("\ufffd", None)] * 2 == [(entry["token"], entry["bytes"]) for entry in entries_of(answer)]


@every_case("endpoint, fields", [("chat", {"logprobs": True}), ("completions", {"logprobs": 0})])
async def test_whole_answers_do_not_say_whose_text_it_is(proxy, endpoint, fields):
    """A text-level model that does not stream is refused, with what can be done."""
    answer = await ask(proxy, endpoint, "ensemble_nonstreaming", "Hello", **fields)

    assert (400, "logprobs") == (answer.status, answer.error["param"])
    assert "--prefer-token-level" in answer.error["message"]


async def test_a_step_of_several_tokens_is_an_error(proxy):
    """Which text belongs to which token is not guessed."""
    prompt = steered(text="one two three four", tokens_per_response=2)
    answer = await ask(proxy, "chat", "ensemble", prompt, logprobs=True, max_tokens=9)

    assert 502 == answer.status
    assert "--prefer-token-level" in answer.error["message"]


@every_case(
    "endpoint, fields, param",
    [("chat", {"logprobs": True, "top_logprobs": 2}, "top_logprobs"), ("completions", {"logprobs": 2}, "logprobs")],
)
@pytest.mark.parametrize("model", ["ensemble", "ensemble_legacy", "tensorrt_llm_bls"])
async def test_alternatives_are_refused_by_the_name_that_asked(proxy, model, endpoint, fields, param):
    """Chats and completions ask for them differently."""
    answer = await ask(proxy, endpoint, model, "Hello", **fields)

    assert (400, param, "unsupported_parameter") == (answer.status, answer.error["param"], answer.error["code"])


async def scores_of(triton, model, answer, count):
    """Return the flags that asked for scores, of each of an answer's candidates."""
    flags = []
    for number in range(count):
        (event,) = await recorded(triton, id=f"{id_of(answer)}-{number}", model=model, event="request")
        flags.append({name for name in event["inputs"] if "log" in name})
    return flags


@pytest.mark.parametrize("model", TEXT)
async def test_best_of_is_ranked_by_what_the_backend_sums(proxy, triton, model):
    """``best_of`` is ranked by what the backend sums, also where tokens are not told apart."""
    answer = await ask(proxy, "completions", model, steered(text="one two"), best_of=3, max_tokens=9)

    assert 200 == answer.status, answer.body
    assert ["one two"] == [choice["text"] for choice in answer.json["choices"]]
    assert answer.json["choices"][0]["logprobs"] is None
    if model in BLS:
        # The engine behind it is asked under an id of its own.
        return
    flag = "return_cumulative_logprob" if model == "vllm_model" else "return_log_probs"
    assert [{flag}] * 3 == await scores_of(triton, ENGINES[model], answer, 3)


async def test_best_of_needs_log_probabilities(proxy):
    """The LLM API's model tells none."""
    answer = await ask(proxy, "completions", "tensorrt_llm_llmapi", "Hello", best_of=2)

    assert (400, "best_of") == (answer.status, answer.error["param"])


@pytest.mark.parametrize("model", TEXT_LEVEL)
async def test_biases_go_as_texts(proxy, triton, tokenizer, model):
    """Each token's own text; what the preprocessing makes of it is the bias of that token and of no other."""
    (one,), (two,) = tokenizer.encode(" one"), tokenizer.encode(" two")
    answer = await ask(
        proxy, "completions", model, steered(text="yes"), logit_bias={str(one): 5, str(two): -2.5}, max_tokens=5
    )

    assert 200 == answer.status, answer.body
    if model in ("ensemble", "ensemble_nonstreaming", "ensemble_legacy"):
        bias = (await inputs_of(triton, ENGINES[model], id_of(answer)))["embedding_bias"]["value"]
        expected = {one: 5.0, two: -2.5}
        # The record ends after so many elements.
        assert {number: value for number, value in expected.items() if number < len(bias)} == {
            number: value for number, value in enumerate(bias) if value
        }
    else:
        sent = await inputs_of(triton, model, id_of(answer))
        # The token that begins every text is biased with each, and gets the sum taken off by a text of nothing else.
        assert {" one": 5.0, " two": -2.5, "": -2.5} == dict(
            zip(sent["embedding_bias_words"]["value"], sent["embedding_bias_weights"]["value"], strict=True)
        )


async def test_a_token_that_no_text_gives_has_no_bias(proxy, tokenizer):
    """Part of a character; the message says which token."""
    number = tokenizer.encode("é")[0]
    answer = await ask(proxy, "chat", "ensemble", "Hello", logit_bias={str(number): 1})

    assert (400, "logit_bias", "unsupported_parameter") == (
        answer.status,
        answer.error["param"],
        answer.error["code"],
    )
    assert f"token {number} " in answer.error["message"]


@pytest.mark.parametrize("model", ["vllm_model", "tensorrt_llm_llmapi"])
async def test_biases_that_cannot_be_sent(proxy, model):
    """vLLM's backend fails on them, and the LLM API's model has none."""
    answer = await ask(proxy, "chat", model, "Hello", logit_bias={"5": 1})

    assert (400, "logit_bias") == (answer.status, answer.error["param"])


@every_case("endpoint", ["chat", "completions"])
@every_case("stream", [False, True])
async def test_token_ids_of_vllm(proxy, triton, tokenizer, endpoint, stream):
    """Token ids of vLLM are told with the log probabilities, which the client did not ask for and does not get."""
    prompt = steered(text="one two")
    answer = await ask(
        proxy, endpoint, "vllm_model", prompt, return_token_ids=True, max_tokens=9, stream=stream, echo=None
    )

    assert 200 == answer.status, answer.body
    chunks = answer.chunks if stream else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [number for choice in choices for number in choice.get("token_ids", [])]
    # With the one that ends the answer, as vLLM counts it.
    assert [*tokenizer.encode("one two"), tokenizer.token_id(END)] == ids
    assert all(choice["logprobs"] is None for choice in choices)
    holders = chunks if endpoint == "chat" else choices
    (asked,) = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    sent = await inputs_of(triton, "vllm_model", id_of(answer))
    assert tokenizer.encode(sent["text_input"]["value"][0], True) == asked
    assert 0 == json.loads(sent["sampling_parameters"]["value"][0])["logprobs"]


@pytest.mark.parametrize("model", [*TEXT_LEVEL, "tensorrt_llm_llmapi"])
async def test_text_level_models_know_no_ids(proxy, model):
    """What they answered is not tokenized again and called their tokens."""
    answer = await ask(proxy, "chat", model, "Hello", return_token_ids=True)

    assert (400, "return_token_ids") == (answer.status, answer.error["param"])
    assert "--prefer-token-level" in answer.error["message"]


async def test_token_ids_need_the_tokenizer(triton):
    """vLLM's model tells the answer's, and nobody else the prompt's."""
    settings = proxy_settings(triton, "http")
    del settings.models["vllm_model"]  # type: ignore[attr-defined]
    async with serving(settings) as proxy:
        await proxy.ready()
        answer = await ask(proxy, "completions", "vllm_model", "Hello", return_token_ids=True)

    assert (400, "return_token_ids") == (answer.status, answer.error["param"])


@pytest.mark.parametrize("model", TEXT)
@every_case(
    "fields, param",
    [
        ({"echo": True, "logprobs": 0}, "logprobs"),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_the_prompts_log_probabilities_are_refused(proxy, model, fields, param):
    """No text-level model tells them, and Triton's vLLM backend drops them."""
    answer = await ask(proxy, "completions", model, "Hello", **fields)

    assert (400, param, "unsupported_parameter") == (answer.status, answer.error["param"], answer.error["code"])


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TEXT)
async def test_the_prompt_alone(proxy, triton, model, stream):
    """With echo, no tokens are what was asked for: nothing goes to the model."""
    answer = await ask(
        proxy,
        "completions",
        model,
        "Hello there",
        echo=True,
        max_tokens=0,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
    )

    assert 200 == answer.status, answer.body
    assert "Hello there" == text_of("completions", answer)
    chunks = answer.chunks if stream else [answer.json]
    assert ["length"] == [
        choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
    ]
    assert (0, True) == (chunks[-1]["usage"]["completion_tokens"], chunks[-1]["usage"]["prompt_tokens"] > 0)


async def test_no_tokens_and_no_prompt_is_nothing(proxy):
    """Zero tokens are a mistake without echo, and in a chat."""
    completion = await ask(proxy, "completions", "ensemble", "Hello", max_tokens=0)
    chat = await ask(proxy, "chat", "ensemble", "Hello", max_tokens=0)

    assert [(400, "max_tokens")] * 2 == [(each.status, each.error["param"]) for each in (completion, chat)]
