"""Several choices, log probabilities, guides and prompts as token ids: what reaches the model, and what the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import (
    ADDS_BOS,
    ENGINES,
    MODELS,
    PATHS,
    SEEDS,
    TRTLLM,
    ask,
    id_of,
    in_session_loop,
    inputs_asked,
    inputs_of,
    recorded,
    require,
    steered,
    text_of,
)
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = [in_session_loop, pytest.mark.face]
ENSEMBLES = ("ensemble", "ensemble_legacy")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def seeds_of(triton, model, answer, count):
    """Return the seed that each of an answer's choices was asked for with, in their order."""
    seeds = []
    for number in range(count):
        (event,) = await recorded(triton, id=f"{id_of(answer)}-{number}", model=ENGINES[model], event="request")
        inputs = event["inputs"]
        if "sampling_parameters" in inputs:
            seeds.append(json.loads(inputs["sampling_parameters"]["value"][0])["seed"])
        elif "request" in inputs:
            seeds.append(json.loads(inputs["request"]["value"][0])["sampling"]["seed"])
        else:
            seeds += [value["value"][0] for name, value in inputs.items() if name in SEEDS]
    return seeds


@pytest.mark.parametrize("model", [model for model in MODELS if ENGINES[model] == model or model in ENSEMBLES])
async def test_choices_have_seeds_of_their_own(proxy, triton, model):
    """With the client's seed they follow from it, so that the same request gives the same answers."""
    require(proxy, model, "seed")
    answer = await ask(proxy, "chat", model, "Hello", n=3, seed=7, max_tokens=4)

    assert 200 == answer.status, answer.body
    assert [0, 1, 2] == [choice["index"] for choice in answer.json["choices"]]
    assert [7, 8, 9] == await seeds_of(triton, model, answer, 3)


@pytest.mark.parametrize("model", MODELS)
async def test_answers_are_sampled_unless_asked_otherwise(proxy, model):
    """A request that says nothing of sampling is sampled, so its choices differ; greedy ones are the same."""
    require(proxy, model, "seed", "temperature")
    sampled, greedy = [
        await ask(proxy, "chat", model, "Hello", n=3, seed=7, max_tokens=99, **fields)
        for fields in ({}, {"temperature": 0})
    ]
    texts = [{choice["message"]["content"] for choice in answer.json["choices"]} for answer in (sampled, greedy)]

    assert [3, 1] == [len(each) for each in texts]


@pytest.mark.parametrize("model", [model for model in TRTLLM if ENGINES[model] == model])
async def test_requests_without_a_seed_have_different_ones(proxy, triton, model):
    """An engine that is given none uses the same one every time, and would repeat itself."""
    first, second = [await ask(proxy, "chat", model, "Hello", max_tokens=4) for _ in range(2)]
    seeds = []
    for answer in (first, second):
        inputs = await inputs_of(triton, model, id_of(answer))
        seeds += [value["value"] for name, value in inputs.items() if name in SEEDS]

    assert 2 == len(seeds)
    assert seeds[0] != seeds[1]


async def test_choices_without_a_seed_differ(proxy, triton):
    """Seeds are drawn where the client gives none: a backend's own default may be the same every time."""
    answer = await ask(proxy, "chat", "ensemble", "Hello", n=4, max_tokens=4)

    assert 4 == len(set(await seeds_of(triton, "ensemble", answer, 4)))


@pytest.mark.parametrize("model", MODELS)
async def test_the_prompt_counts_once(proxy, model):
    """Usage counts a prompt once, however many answers it has, and the tokens of all answers."""
    one = (await ask(proxy, "completions", model, steered(text="one two"), max_tokens=9)).json["usage"]
    three = (await ask(proxy, "completions", model, steered(text="one two"), max_tokens=9, n=3)).json["usage"]

    assert one["prompt_tokens"] == three["prompt_tokens"]
    assert 3 * one["completion_tokens"] == three["completion_tokens"]


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_opens_all_choices_in_their_order(proxy, model):
    """Whichever begins first: the official client's helpers take the first chunk of a stream for that of choice 0."""
    answer = await ask(proxy, "chat", model, steered(text="one"), n=3, max_tokens=9, stream=True)
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]

    assert [0, 1, 2] == [choice["index"] for choice in choices[:3]]
    assert [0, 1, 2] == [place for place, choice in enumerate(choices) if "role" in choice["delta"]]


@every_case("stream", [False, True])
async def test_choices_are_numbered_prompt_by_prompt(proxy, stream):
    """The choices of the first prompt come first, in a stream by their index."""
    prompts = [steered(text="red"), steered(text="blue")]
    body = {"model": "vllm_model", "prompt": prompts, "n": 2, "max_tokens": 5, "stream": stream}
    answer = await proxy.post("/v1/completions", body)

    texts = ["", "", "", ""]
    for chunk in answer.chunks if stream else [answer.json]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert ["red", "red", "blue", "blue"] == texts


async def test_best_of_returns_the_likeliest(proxy):
    """Of the answers made, the one with the highest cumulative log probability is returned; all of them are counted."""
    answer = await ask(proxy, "completions", "vllm_model", steered(text="one two"), best_of=3, max_tokens=9)

    assert ["one two"] == [choice["text"] for choice in answer.json["choices"]]
    assert 0 == answer.json["usage"]["completion_tokens"] % 3
    assert answer.json["choices"][0]["logprobs"] is None


@every_case(
    "fields, param",
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 0}, "n"),
    ],
)
async def test_contradictions_are_refused(proxy, fields, param):
    """Fewer candidates than choices, and candidates of a stream, are refused by name."""
    answer = await ask(proxy, "completions", "vllm_model", "Hello", **fields)

    assert (400, param) == (answer.status, answer.error["param"])


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_echo_puts_the_prompt_first(proxy, model, stream):
    """With echo each choice begins with its prompt, exactly as it was sent."""
    prompt = steered(text="one two")
    answer = await ask(proxy, "completions", model, prompt, echo=True, max_tokens=9, stream=stream)
    chunks = answer.chunks if stream else [answer.json]

    assert prompt + "one two" == "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@every_case("stream", [False, True])
async def test_chat_log_probabilities(proxy, stream):
    """Each token has its log probability, its bytes, and as many alternatives as were asked for."""
    answer = await ask(
        proxy, "chat", "vllm_model", steered(text="one two"), logprobs=True, top_logprobs=1, max_tokens=9, stream=stream
    )
    chunks = answer.chunks if stream else [answer.json]
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    tokens = [token for each in logprobs for token in each["content"]]

    # vLLM counts the token that ends an answer, and tells its log probability too.
    assert "one two" == "".join(token["token"] for token in tokens).removesuffix("<|im_end|>")
    assert [list(token["token"].encode()) for token in tokens] == [token["bytes"] for token in tokens]
    assert all(token["logprob"] < 0 and 1 == len(token["top_logprobs"]) for token in tokens)
    assert all(each["refusal"] is None for each in logprobs)


@every_case("stream", [False, True])
async def test_completion_log_probabilities(proxy, stream):
    """The lists are parallel, and the offsets say where each token stands in the text."""
    answer = await ask(
        proxy, "completions", "vllm_model", steered(text="one two"), logprobs=2, max_tokens=9, stream=stream
    )
    chunks = answer.chunks if stream else [answer.json]
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    tokens = [token for each in logprobs for token in each["tokens"]]
    offsets = [offset for each in logprobs for offset in each["text_offset"]]

    assert "one two" == "".join(tokens).removesuffix("<|im_end|>")
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert all(token in each["top_logprobs"][place] for each in logprobs for place, token in enumerate(each["tokens"]))


GUIDES = [
    ({"response_format": {"type": "json_object"}}, ("json", ""), {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        ("json_schema", SCHEMA),
        {"json": SCHEMA},
    ),
    ({"structured_outputs": {"regex": "[ab]+"}}, ("regex", "[ab]+"), {"regex": "[ab]+"}),
    ({"guided_choice": ["a.b", "c"]}, ("regex", r"(a\.b|c)"), {"choice": ["a.b", "c"]}),
    ({"guided_grammar": "root ::= x"}, ("ebnf_grammar", "root ::= x"), {"grammar": "root ::= x"}),
]


@every_case("fields, tensors, parameters", GUIDES)
async def test_guides_reach_tensorrt_llm(proxy, triton, fields, tensors, parameters):
    """A guide becomes the engine's guide type and guide."""
    answer = await ask(proxy, "chat", "ensemble", "Hello", max_tokens=5, **fields)
    inputs = await inputs_of(triton, "tensorrt_llm", id_of(answer))
    guide = inputs.get("guided_decoding_guide", {"value": [""]})["value"][0]

    assert tensors == (
        inputs["guided_decoding_guide_type"]["value"][0],
        json.loads(guide) if tensors[0] == "json_schema" else guide,
    )


@every_case("fields, tensors, parameters", GUIDES)
async def test_guides_reach_vllm(proxy, triton, fields, tensors, parameters):
    """A guide becomes JSON text inside the sampling parameters, under the name that the release knows."""
    answer = await ask(proxy, "chat", "vllm_model", "Hello", max_tokens=5, **fields)
    inputs = await inputs_of(triton, "vllm_model", id_of(answer))
    sampling = json.loads(inputs["sampling_parameters"]["value"][0])

    assert parameters == json.loads(sampling["structured_outputs"])


async def test_guides_are_refused_where_there_are_none(proxy):
    """A model that cannot be held to a format does not pretend."""
    answer = await ask(proxy, "chat", "ensemble_legacy", "Hello", response_format={"type": "json_object"})

    assert (400, "response_format") == (answer.status, answer.error["param"])


@every_case(
    "fields, param",
    [
        ({"response_format": {"type": "nonsense"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": 5}, "structured_outputs"),
    ],
)
async def test_malformed_guides_are_refused(proxy, fields, param):
    """What is no guide, or two at a time, is refused by name."""
    answer = await ask(proxy, "chat", "vllm_model", "Hello", **fields)

    assert (400, param) == (answer.status, answer.error["param"])


@pytest.mark.parametrize("model", MODELS)
async def test_prompts_as_token_ids(proxy, triton, model):
    """Token ids of a text are answered as that text is."""
    tokenizer = Tokenizer.load(str(triton.tokenizer))
    prompt = steered(text="one two")
    # Where the backend adds the token that begins a text to every prompt, only ids that have it can be sent as text.
    ids = tokenizer.encode(prompt, model in ADDS_BOS)
    single = await proxy.post("/v1/completions", {"model": model, "prompt": ids, "max_tokens": 9})
    several = await proxy.post("/v1/completions", {"model": model, "prompt": [ids, ids], "max_tokens": 9})

    assert ["one two"] == [choice["text"] for choice in single.json["choices"]]
    assert ["one two"] * 2 == [choice["text"] for choice in several.json["choices"]]


async def test_token_ids_that_text_cannot_say(proxy, triton):
    """A backend that adds a token to every text cannot be given ids without it, and another prompt is not answered."""
    ids = Tokenizer.load(str(triton.tokenizer)).encode("Hello")
    answer = await proxy.post("/v1/completions", {"model": "vllm_model", "prompt": ids})

    assert (400, "unsupported_parameter", "prompt") == (
        answer.status,
        answer.error["code"],
        answer.error["param"],
    )


@every_case("version, key", [("2.53.0", None), ("2.54.0", "guided_decoding"), ("", "guided_decoding")])
async def test_guides_of_the_first_vllm_backends_that_have_them(version, key):
    """24.12 declares the same tensors as 25.01 and refuses every guide: the server's version tells them apart."""
    flags = ("stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs", "return_num_input_tokens")
    inputs = ("text_input BYTES 1", "sampling_parameters? BYTES 1", *(f"{name}? BOOL 1" for name in flags))
    async with FakeTriton(
        config_of("m", inputs=inputs, outputs=("text_output BYTES -1", "finish_reason BYTES -1"))
    ) as fake:
        fake.version = version
        fake.responses = [{"text_output": "ab", "finish_reason": "stop"}]
        async with serving(Settings(triton=TritonSettings(url=(fake.url,)))) as running:
            answer = await ask(running, "completions", "m", "Hello", guided_regex="[ab]+")

    if key is None:
        assert (400, "unsupported_parameter", "guided_regex") == (
            answer.status,
            answer.error["code"],
            answer.error["param"],
        )
        assert not fake.asked
    else:
        assert 200 == answer.status, answer.body
        ((_, sent),) = fake.asked
        assert key in json.loads(sent["sampling_parameters"])


@every_case("stream", [False, True])
@every_case("endpoint", PATHS)
@pytest.mark.parametrize("model", MODELS)
async def test_what_ended_the_answer(proxy, model, endpoint, stream):
    """The stop string, or the stop token where it can be one; null where the model itself or the limit did."""

    async def reasons(**fields: Any) -> tuple[str, str | int | None]:
        prompt = steered(text="one two three")
        answer = await ask(proxy, endpoint, model, prompt, stream=stream, **fields)
        assert 200 == answer.status, answer.body
        (choice,) = (answer.chunks if stream else [answer.json])[-1]["choices"]
        return choice["finish_reason"], choice["stop_reason"]

    assert ("stop", "two") == await reasons(stop=["four", "two"], max_tokens=9)
    assert ("stop", None) == await reasons(stop=["four"], max_tokens=9)
    assert ("length", None) == await reasons(stop=["four"], max_tokens=1)
    if model in ("vllm_model", "tensorrt_llm"):
        assert ("stop", 848) == await reasons(stop_token_ids=[848], max_tokens=9)


@every_case("endpoint", PATHS)
async def test_the_fingerprint(proxy, endpoint):
    """The fingerprint stands in the last chunk of a stream, and is another for another model."""
    found = {}
    for model in ("vllm_model", "tensorrt_llm"):
        whole = await ask(proxy, endpoint, model, steered(text="one"), max_tokens=9)
        streamed = await ask(proxy, endpoint, model, steered(text="one"), max_tokens=9, stream=True)
        with_usage = await ask(
            proxy,
            endpoint,
            model,
            steered(text="one"),
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        found[model] = whole.json["system_fingerprint"]
        for chunks in (streamed.chunks, with_usage.chunks):
            *others, last = chunks
            assert found[model] == last["system_fingerprint"]
            assert not any("system_fingerprint" in chunk for chunk in others)
    assert 2 == len(set(found.values()))
    assert all(value.startswith("triton-2.") for value in found.values())


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_echo_of_token_ids_shows_the_special_ones(proxy, triton, model, stream):
    """All of the prompt, also the token that the backend adds itself when it is sent as text."""
    tokenizer = Tokenizer.load(str(triton.tokenizer))
    prompt = steered(text="one two")
    ids = [tokenizer.token_id("<|startoftext|>"), *tokenizer.encode(prompt)]
    body = {"model": model, "prompt": ids, "max_tokens": 9, "echo": True, "stream": stream}
    answer = await proxy.post("/v1/completions", body)

    assert "<|startoftext|>" + prompt + "one two" == text_of("completions", answer)


@pytest.mark.parametrize("model", MODELS)
async def test_a_prompt_that_brings_its_special_tokens(proxy, triton, model):
    """The model gets just these; a backend that adds some to every text can do so for prompts that begin with them."""
    tokenizer = Tokenizer.load(str(triton.tokenizer))
    prompt = "<|startoftext|>" + steered(text="one two")
    body = {"model": model, "max_tokens": 9, "add_special_tokens": False, "echo": True}
    answer = await proxy.post("/v1/completions", {**body, "prompt": prompt})
    without = await proxy.post("/v1/completions", {**body, "prompt": steered(text="one two")})

    assert prompt + "one two" == text_of("completions", answer)
    assert len(tokenizer.encode(prompt)) == answer.json["usage"]["prompt_tokens"]
    # The companion model gets token ids: no backend adds any to them.
    if model in ADDS_BOS and model != "companion":
        assert (400, "add_special_tokens") == (without.status, without.error["param"])
    else:
        assert len(tokenizer.encode(prompt)) - 1 == without.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("model", MODELS)
async def test_special_tokens_on_top_of_a_chat_template(proxy, triton, model):
    """They are added to those of the template by a model that adds them, and refused by another one."""
    body = {"model": model, "messages": [{"role": "user", "content": steered(text="one two")}], "max_tokens": 9}
    plain = await proxy.post("/v1/chat/completions", body)
    added = await proxy.post("/v1/chat/completions", {**body, "add_special_tokens": True})

    if model in ADDS_BOS:
        assert 1 + plain.json["usage"]["prompt_tokens"] == added.json["usage"]["prompt_tokens"]
    else:
        assert (400, "add_special_tokens") == (added.status, added.error["param"])


async def test_the_answers_of_a_beam_search(proxy, triton):
    """They are those of one search for each prompt: different ones, the likeliest first, with log probabilities."""
    prompts = [steered(text="a"), steered(text="one two")]
    body = {"model": "companion", "use_beam_search": True, "n": 2, "max_tokens": 1, "logprobs": 1}
    answer = await proxy.post("/v1/completions", {**body, "prompt": prompts})

    assert 200 == answer.status, answer.body
    choices = answer.json["choices"]
    assert 4 == len(choices)
    for best, other in (choices[:2], choices[2:]):
        assert best["text"] != other["text"]
        assert best["logprobs"]["token_logprobs"] >= other["logprobs"]["token_logprobs"]
    asked = await inputs_asked(triton, "companion", answer.json["id"], 4)
    searches = [json.loads(inputs["request"]["value"][0])["beams"] for inputs in asked]
    assert [0, 1, 0, 1] == [search["index"] for search in searches]
    assert 2 == len({search["search"] for search in searches})


async def test_a_guided_beam_search(proxy):
    """There is none: the search does not follow a guide."""
    body = {"model": "companion", "prompt": "Hi", "use_beam_search": True, "guided_regex": "a"}
    answer = await proxy.post("/v1/completions", body)

    assert (400, "use_beam_search") == (answer.status, answer.error["param"])


@every_case(
    "fields, ignored",
    [
        ({"temperature": 0.5, "length_penalty": 2, "ignore_eos": False, "stop_token_ids": [1], "stop": ["x"]}, None),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "bad_words": [], "logit_bias": {}}, None),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, "top_p, top_k, min_p"),
        ({"seed": 0, "min_tokens": 1}, "min_tokens, seed"),
        (
            {"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 2},
            "frequency_penalty, presence_penalty, repetition_penalty",
        ),
        (
            {"bad_words": ["x"], "allowed_token_ids": [5], "logit_bias": {"5": 1}},
            "bad_words, allowed_token_ids, logit_bias",
        ),
    ],
)
async def test_what_a_beam_search_ignores(proxy, fields, ignored):
    """A header names it, under the names that have an effect elsewhere."""
    body = {"model": "companion", "prompt": "Hi", "use_beam_search": True, "n": 2, "max_tokens": 2, **fields}
    answer = await proxy.post("/v1/completions", body)

    assert 200 == answer.status, answer.body
    assert ignored == answer.headers.get("x-triton-openai-ignored")


async def test_a_budget_of_a_beam_search(proxy):
    """There is none: the header has the client's name of it."""
    messages = [{"role": "user", "content": "Hi"}]
    budget = {"thinking_budget": 5}
    body = {"model": "companion", "messages": messages, "use_beam_search": True, "n": 2, "max_tokens": 2, **budget}
    answer = await proxy.post("/v1/chat/completions", body)

    assert (200, "thinking_budget") == (answer.status, answer.headers["x-triton-openai-ignored"])


@every_case("prompt", [[], [[]], [-1], [10**9], [1, "a"], [[1], "a", 5]])
async def test_wrong_token_ids(proxy, prompt):
    """What can be no prompt is refused by name."""
    answer = await proxy.post("/v1/completions", {"model": "ensemble", "prompt": prompt})

    assert (400, "prompt") == (answer.status, (answer.error["param"] or "").partition("[")[0])


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "vllm_model"])
async def test_usage_in_every_chunk(proxy, model):
    """With continuous usage each chunk tells the counts up to it."""
    answer = await ask(
        proxy,
        "chat",
        model,
        steered(text="one two three"),
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in answer.chunks if chunk["usage"]]

    assert counts == sorted(counts)
    assert counts[-1] > 1


@every_case("endpoint", PATHS)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "vllm_model"])
async def test_a_chunk_counts_the_tokens_of_its_text(proxy, triton, model, endpoint):
    """A chunk counts the tokens of its text, and not those of text that is still held back for a stop string."""
    tokenizer = Tokenizer.load(str(triton.tokenizer))
    answer = await ask(
        proxy,
        endpoint,
        model,
        steered(text="one two three four five six"),
        max_tokens=20,
        stop=["three four x"],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    text, counted = "", 0
    *chunks, last = answer.chunks
    for chunk in chunks:
        (choice,) = chunk["choices"]
        piece = choice["text"] if endpoint == "completions" else choice["delta"].get("content")
        if piece:
            text, counted = text + piece, chunk["usage"]["completion_tokens"]
            assert len(tokenizer.encode(text)) == counted

    assert "one two three four five six" == text
    assert last["usage"]["completion_tokens"] >= counted


@pytest.mark.parametrize("model", ["ensemble", "vllm_model"])
async def test_a_nucleus_of_nothing_is_the_likeliest_token(proxy, triton, model):
    """OpenAI takes a top_p of 0; the backends do not, or read it as none, and get its meaning."""
    answer = await ask(proxy, "completions", model, "Hello", top_p=0, temperature=0.5, max_tokens=2)

    assert 200 == answer.status, answer.body
    inputs = await inputs_of(triton, ENGINES[model], id_of(answer))
    if model == "ensemble":
        assert {"runtime_top_k": [1]} == {
            name: inputs[name]["value"] for name in ("runtime_top_k", "runtime_top_p") if name in inputs
        }
    else:
        sampling = json.loads(inputs["sampling_parameters"]["value"][0])
        assert {"top_k": 1} == {name: sampling[name] for name in ("top_k", "top_p") if name in sampling}
