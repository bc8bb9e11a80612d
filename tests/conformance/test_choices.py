"""Several choices, log probabilities, guides and prompts as token ids: what reaches the model, and what the client."""

from __future__ import annotations

import json

import pytest

from tests.conformance.calls import ADDS_BOS, ENGINES, MODELS, ask, id_of, in_session_loop, inputs_of, recorded, steered
from triton_openai.chat.tokenizer import Tokenizer

pytestmark = in_session_loop
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
        else:
            name = next(name for name in ("seed", "random_seed", "sampling_param_seed") if name in inputs)
            seeds.append(inputs[name]["value"][0])
    return seeds


@pytest.mark.parametrize("model", [model for model in MODELS if ENGINES[model] == model or model in ENSEMBLES])
async def test_choices_have_seeds_of_their_own(proxy, triton, model):
    """With the client's seed they follow from it, so that the same request gives the same answers."""
    answer = await ask(proxy, "chat", model, "Hello", n=3, seed=7, max_tokens=4)

    assert 200 == answer.status, answer.body
    assert [0, 1, 2] == [choice["index"] for choice in answer.json["choices"]]
    assert [7, 8, 9] == await seeds_of(triton, model, answer, 3)


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


@pytest.mark.parametrize("stream", [False, True])
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


@pytest.mark.parametrize(
    "fields, param",
    [({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"), ({"n": 0}, "n")],
)
async def test_contradictions_are_refused(proxy, fields, param):
    """Fewer candidates than choices, and candidates of a stream, are refused by name."""
    answer = await ask(proxy, "completions", "vllm_model", "Hello", **fields)

    assert (400, param) == (answer.status, answer.error["param"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_echo_puts_the_prompt_first(proxy, model, stream):
    """With echo each choice begins with its prompt, exactly as it was sent."""
    prompt = steered(text="one two")
    answer = await ask(proxy, "completions", model, prompt, echo=True, max_tokens=9, stream=stream)
    chunks = answer.chunks if stream else [answer.json]

    assert prompt + "one two" == "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True])
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


@pytest.mark.parametrize("stream", [False, True])
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


@pytest.mark.parametrize("fields, tensors, parameters", GUIDES)
async def test_guides_reach_tensorrt_llm(proxy, triton, fields, tensors, parameters):
    """A guide becomes the engine's guide type and guide."""
    answer = await ask(proxy, "chat", "ensemble", "Hello", max_tokens=5, **fields)
    inputs = await inputs_of(triton, "tensorrt_llm", id_of(answer))
    guide = inputs.get("guided_decoding_guide", {"value": [""]})["value"][0]

    assert tensors == (
        inputs["guided_decoding_guide_type"]["value"][0],
        json.loads(guide) if tensors[0] == "json_schema" else guide,
    )


@pytest.mark.parametrize("fields, tensors, parameters", GUIDES)
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


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "nonsense"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
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


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [10**9], [1, "a"], [[1], "a", 5]])
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
