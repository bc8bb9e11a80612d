"""Models that are given token ids and answer in them: text, counts, ends, log probabilities, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.conformance.calls import (
    PATHS,
    ask,
    end_of,
    id_of,
    in_session_loop,
    inputs_of,
    outcome,
    request,
    steered,
    text_of,
)
from tests.proxy_fixture import TRANSPORTS, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run_group import collect
from triton_openai.api.bodies import new_id
from triton_openai.api.service import RequestContext, Service, runs_of
from triton_openai.app import SERVICE
from triton_openai.cli.inspect import ModelReport, inspect_models
from triton_openai.config.tree import ModelSettings, Settings
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.generation import Generation, Sampling
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer as ModelTokenizer
from triton_openai.telemetry.request_record import RequestRecord

pytestmark = in_session_loop

MODELS = ("tensorrt_llm", "tensorrt_llm_legacy", "tensorrt_llm_nonstreaming")
STREAMING = ("tensorrt_llm", "tensorrt_llm_legacy")
SEEDS = {"tensorrt_llm": "seed", "tensorrt_llm_legacy": "random_seed", "tensorrt_llm_nonstreaming": "seed"}
LIMITS = TimeLimits(first_token=120, idle=120, total=None)
# One token for each byte of what is beyond ASCII.
HARD = 'Zoë paid 5 € for  two 😀👩‍👩‍👧\n\tand left "now".'


def token_settings(triton: TestTriton, transport: str, **overrides: Any) -> Settings:
    """Return settings that serve the engines under their own names."""
    settings = proxy_settings(triton, transport, **overrides)
    own = {model: ModelSettings(adapter="trtllm", tokenizer=str(triton.tokenizer)) for model in MODELS}
    return msgspec.structs.replace(settings, models={**settings.models, **own})


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def token_proxies(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One running service per transport that serves the engines, shared by the tests of this file."""
    async with (
        serving(token_settings(triton, "http"), transport="http") as over_http,
        serving(token_settings(triton, "grpc"), transport="grpc") as over_grpc,
    ):
        await over_http.ready()
        await over_grpc.ready()
        yield {"http": over_http, "grpc": over_grpc}


@pytest.fixture(params=TRANSPORTS)
def direct(request: pytest.FixtureRequest, token_proxies: dict[str, Proxy]) -> Proxy:
    """The service over each transport in turn."""
    return token_proxies[request.param]


@pytest.fixture(scope="session")
def vocabulary(triton: TestTriton) -> Tokenizer:
    """The demo's tokenizer, as its library reads it."""
    return Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))


def ids_of(vocabulary: Tokenizer, text: str) -> list[int]:
    """Return the token ids of *text* alone."""
    return list(vocabulary.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_text_counts_and_end_are_exact(
    direct: Proxy, vocabulary: Tokenizer, model: str, endpoint: str, stream: bool
) -> None:
    """Characters that are spread over tokens come out whole, and every token is counted."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    answer = await ask(direct, endpoint, model, steered(text=HARD), max_tokens=400, **options)

    assert {"text": HARD, "finish": "stop", "tokens": len(ids_of(vocabulary, HARD))} == outcome(endpoint, answer)


@pytest.mark.parametrize("model", MODELS)
async def test_length_is_exact(direct: Proxy, vocabulary: Tokenizer, model: str) -> None:
    """An answer that is cut says so, and one that just fits does not."""
    count = len(ids_of(vocabulary, "one two three"))

    cut = await ask(direct, "completions", model, steered(text="one two three four"), max_tokens=count)
    fits = await ask(direct, "completions", model, steered(text="one two three"), max_tokens=count + 1)

    assert {"text": "one two three", "finish": "length", "tokens": count} == outcome("completions", cut)
    assert {"text": "one two three", "finish": "stop", "tokens": count} == outcome("completions", fits)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "ensemble_legacy", "tensorrt_llm_bls"])
async def test_an_answer_that_ends_inside_a_character_ends_before_it(direct: Proxy, model: str, stream: bool) -> None:
    """The limit may cut a character: nothing of it is shown. What the model wrote by itself stays."""
    # A stream of an ensemble decodes each token alone.
    wrote = "a" + "\ufffd" * (3 if stream and model.startswith("ensemble") else 1)
    for text, shown in (("a😀", "a"), ("a\ufffd", wrote)):
        limit = 3 if shown == "a" else 20
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await ask(direct, "completions", model, steered(text=text), max_tokens=limit, **options)
        assert {"text": shown, "finish": "length" if limit == 3 else "stop"} == {
            name: value for name, value in outcome("completions", answer).items() if name != "tokens"
        }


@pytest.mark.parametrize("model", STREAMING)
async def test_tokens_come_one_by_one(direct: Proxy, model: str) -> None:
    """Each step of the engine is an event of its own, with its leading space."""
    answer = await ask(direct, "completions", model, steered(text=" one two three"), stream=True)

    texts = [choice["text"] for chunk in answer.chunks for choice in chunk["choices"] if choice["text"]]
    assert [" one", " two", " three"] == texts


async def test_a_prompt_of_ids_arrives_unchanged(direct: Proxy, triton: TestTriton, vocabulary: Tokenizer) -> None:
    """The text of a prompt is tokenized here, once, with what the configuration says about special tokens."""
    prompt = steered("Hé", text="yes")

    answer = await ask(direct, "completions", "tensorrt_llm", prompt, max_tokens=8)

    sent = await inputs_of(triton, "tensorrt_llm", id_of(answer))
    ids = ids_of(vocabulary, prompt)
    assert (ids, [len(ids)]) == (sent["input_ids"]["value"], sent["input_lengths"]["value"])
    assert len(ids) == answer.json["usage"]["prompt_tokens"]


async def test_a_chat_is_tokenized_as_the_preprocessing_would(direct: Proxy, triton: TestTriton) -> None:
    """What the template wrote gets no second special token in front."""
    through_ensemble = await ask(direct, "chat", "ensemble", steered(text="yes"))
    itself = await ask(direct, "chat", "tensorrt_llm", steered(text="yes"))

    expected = await inputs_of(triton, "tensorrt_llm", id_of(through_ensemble))
    sent = await inputs_of(triton, "tensorrt_llm", id_of(itself))
    for name in ("input_ids", "end_id", "pad_id", "request_output_len"):
        assert expected[name] == sent[name]


@pytest.mark.parametrize("model", MODELS)
async def test_sampling_reaches_the_engine(direct: Proxy, triton: TestTriton, model: str) -> None:
    """Every parameter arrives under the name and with the type that the engine declares."""
    answer = await ask(
        direct,
        "completions",
        model,
        steered(text="yes"),
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_tokens=1,
        seed=5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        ignore_eos=True,
    )

    sent = {
        name: (entry["dtype"], *entry["value"])
        for name, entry in (await inputs_of(triton, model, id_of(answer))).items()
        if name != "input_ids"
    }
    common = {
        "request_output_len": ("INT32", 7),
        "temperature": ("FP32", 0.5),
        "runtime_top_p": ("FP32", 0.25),
        "runtime_top_k": ("INT32", 3),
        SEEDS[model]: ("UINT64", 5),
        "frequency_penalty": ("FP32", 0.5),
        "presence_penalty": ("FP32", 0.25),
        "repetition_penalty": ("FP32", 1.5),
        "end_id": ("INT32", -1),
        "streaming": ("BOOL", model in STREAMING),
    }
    assert common.items() <= sent.items()
    assert ("INT32", 1) == sent["min_length" if model == "tensorrt_llm_legacy" else "min_tokens"]


async def test_temperature_zero_is_greedy(direct: Proxy, triton: TestTriton) -> None:
    """The engine takes no temperature of 0."""
    answer = await ask(direct, "completions", "tensorrt_llm", steered(text="yes"), temperature=0)

    sent = await inputs_of(triton, "tensorrt_llm", id_of(answer))
    assert [1] == sent["runtime_top_k"]["value"]
    assert not {"temperature", "runtime_top_p"} & sent.keys()


async def test_stop_strings_and_stop_ids(direct: Proxy, vocabulary: Tokenizer) -> None:
    """Both end the answer before them; neither is shown, and the id is not counted."""
    text = "one two three"
    (two,) = ids_of(vocabulary, " two")

    by_string = await ask(direct, "completions", "tensorrt_llm", steered(text=text), stop=["wo th"])
    by_id = await ask(direct, "completions", "tensorrt_llm", steered(text=text), stop_token_ids=[two])

    assert ("one t", "stop") == (by_string.json["choices"][0]["text"], by_string.json["choices"][0]["finish_reason"])
    assert {"text": "one", "finish": "stop", "tokens": 1} == outcome("completions", by_id)


async def test_special_tokens_show_on_request(direct: Proxy, vocabulary: Tokenizer) -> None:
    """Special tokens are left out of the text unless the client wants them."""
    added = {token.content: number for number, token in vocabulary.get_added_tokens_decoder().items() if token.special}
    special = "<|im_start|>"
    ids = [*ids_of(vocabulary, "a"), added[special], *ids_of(vocabulary, "b")]

    without = await ask(direct, "completions", "tensorrt_llm", steered(tokens=ids))
    shown = await ask(direct, "completions", "tensorrt_llm", steered(tokens=ids), skip_special_tokens=False)

    assert ("ab", f"a{special}b") == (without.json["choices"][0]["text"], shown.json["choices"][0]["text"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_log_probabilities(direct: Proxy, vocabulary: Tokenizer, model: str, stream: bool) -> None:
    """One entry for every token, with its exact bytes."""
    text = "one é 😀"

    answer = await ask(direct, "chat", model, steered(text=text), logprobs=True, stream=stream or None)

    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    ids = ids_of(vocabulary, text)
    assert [pytest.approx(-0.05 - (number * 2654435761 % 1000) / 500.0, rel=1e-4) for number in ids] == [
        entry["logprob"] for entry in entries
    ]
    assert list(text.encode()) == [byte for entry in entries for byte in entry["bytes"]]
    assert ["one", " ", "\ufffd"] == [entry["token"] for entry in entries][:3]


async def test_text_offsets_count_characters(direct: Proxy) -> None:
    """The tokens of one character stand where it begins, whatever its parts look like."""
    answer = await ask(direct, "completions", "tensorrt_llm", steered(text="a€b"), logprobs=0)

    assert [0, 1, 1, 1, 2] == answer.json["choices"][0]["logprobs"]["text_offset"][:5]


def context_of(service: Service, model: ServedModel) -> RequestContext[Any]:
    """Return the context of a request that only a test makes."""
    nothing: Any = None
    record = RequestRecord(request_id="r", method="POST", path="/")
    return RequestContext(nothing, service, nothing, model, record, LIMITS)


def nine_tokens() -> GenerationSpec:
    """Return what asks for nine tokens."""
    template = Generation(id=new_id("cmpl"), prompt="", sampling=Sampling(max_tokens=9))
    return GenerationSpec(template=template, limit=TokenLimit(tokens=9))


async def test_token_ids_go_through_unchanged(
    token_proxies: dict[str, Proxy], triton: TestTriton, vocabulary: Tokenizer
) -> None:
    """Token ids go through unchanged, also those that no text would give."""
    service = token_proxies["http"].client.app[SERVICE]
    model = await service.models.find("tensorrt_llm")
    ids = [*ids_of(vocabulary, "a"), *ids_of(vocabulary, "b"), *ids_of(vocabulary, steered(text=" yes"))]

    (run,) = await runs_of(context_of(service, model), (await model.prompter()).tokenizer, [ids], nine_tokens())
    (answer,) = await collect([run], timeout=120)

    assert ids == (await inputs_of(triton, "tensorrt_llm", run.generation.id))["input_ids"]["value"]
    assert run.progress.usage is not None
    assert (" yes", len(ids)) == (answer.text, run.progress.usage.prompt_tokens)


async def test_token_ids_must_exist(token_proxies: dict[str, Proxy]) -> None:
    """An engine would read beyond its table."""
    service = token_proxies["http"].client.app[SERVICE]
    model = await service.models.find("tensorrt_llm")
    tokenizer = (await model.prompter()).tokenizer

    with pytest.raises(InvalidRequest, match="10000000"):
        await runs_of(context_of(service, model), tokenizer, [[1, 10_000_000]], nine_tokens())


async def test_bad_words_go_as_ids(token_proxies: dict[str, Proxy], triton: TestTriton, vocabulary: Tokenizer) -> None:
    """Each word as it is written at the start of a text and within it; two dimensions need gRPC."""
    answer = await ask(token_proxies["grpc"], "completions", "tensorrt_llm", steered(text="yes"), bad_words=["one"])
    over_http = await ask(token_proxies["http"], "completions", "tensorrt_llm", steered(text="yes"), bad_words=["one"])

    sent = await inputs_of(triton, "tensorrt_llm", id_of(answer))
    ids = [*ids_of(vocabulary, "one"), *ids_of(vocabulary, " one")]
    assert ([1, 2, 2], [*ids, 1, 2]) == (sent["bad_words_list"]["shape"], sent["bad_words_list"]["value"])
    assert (400, "unsupported_parameter") == (over_http.status, over_http.error["code"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_the_work(direct: Proxy, triton: TestTriton, stream: bool) -> None:
    """Closing the stream is enough: the engine sees it."""
    seed = 424_242 + 2 * TRANSPORTS.index(direct.transport) + stream
    body = request(
        "completions", "tensorrt_llm", steered(text="word ", eos=False, delay_ms=50), max_tokens=2000, seed=seed
    )

    call = asyncio.create_task(direct.post(PATHS["completions"], {**body, "stream": stream}))

    def asked(events: list[dict[str, Any]]) -> bool:
        return any(each["inputs"].get("seed", {}).get("value") == [seed] for each in events)

    events = await asyncio.to_thread(triton.record.wait_for, asked, model="tensorrt_llm", event="request")
    (asked_id,) = [each["id"] for each in events if each["inputs"].get("seed", {}).get("value") == [seed]]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert "cancelled" == (await end_of(triton, "tensorrt_llm", asked_id))[0]


async def test_an_engine_is_hidden_unless_it_is_named(proxy: Proxy) -> None:
    """Where a model of text uses it, the engine is that model's helper."""
    answer = await ask(proxy, "completions", "tensorrt_llm_legacy", "Hello")

    assert (404, "model_not_found") == (answer.status, answer.error["code"])


async def test_an_engine_with_an_adapter_of_its_own_is_served(triton: TestTriton) -> None:
    """An engine with an adapter of its own answers to its name, with the tokenizer of the preprocessing beside it."""
    models = {"tensorrt_llm_legacy": ModelSettings(adapter="trtllm")}
    async with serving(msgspec.structs.replace(proxy_settings(triton, "http"), models=models)) as service:
        await service.ready()

        answer = await ask(service, "completions", "tensorrt_llm_legacy", steered(text="€"))

        assert "€" == answer.json["choices"][0]["text"]


async def test_the_ensembles_name_can_be_routed_to_its_engine(triton: TestTriton) -> None:
    """With `prefer_token_level` clients keep the name, and what an ensemble cannot do is exact."""
    async with serving(changed(proxy_settings(triton, "http"), triton={"prefer_token_level": "always"})) as service:
        await service.ready()

        answers = {
            model: await ask(service, "chat", model, steered(text=HARD))
            for model in ("ensemble", "ensemble_legacy", "ensemble_nonstreaming", "tensorrt_llm_bls")
        }

        for model, answer in answers.items():
            assert (model, HARD) == (answer.json["model"], answer.json["choices"][0]["message"]["content"])
            assert service.models.served[model].adapter.capabilities.tokens
        sent = await inputs_of(triton, "tensorrt_llm", id_of(answers["ensemble"]))
        assert json.dumps(sent["exclude_input_in_output"]["value"]) == "[true]"


async def test_inspect_shows_the_routing(triton: TestTriton) -> None:
    """Under the ensemble's name, with the adapter that answers and why."""
    settings = changed(proxy_settings(triton, "http"), triton={"prefer_token_level": "always"})

    reports = {each.name: each for each in await inspect_models(settings)}

    assert ("trtllm", ["ensemble"]) == (reports["ensemble"].adapter, list(reports["ensemble"].served_as))
    assert "answered by its engine 'tensorrt_llm'" in reports["ensemble"].reason
    assert reports["tensorrt_llm_legacy"].adapter is None


async def test_engines_answer_by_default_where_characters_would_be_lost(triton: TestTriton, monkeypatch: Any) -> None:
    """Engines answer for models that stream token by token; without a tokenizer `inspect` says what is lost."""
    settings = proxy_settings(triton, "http", prefer_token_level="auto")
    splitting = ("ensemble", "ensemble_legacy", "tensorrt_llm_bls_delta")
    exact = ("ensemble_nonstreaming", "tensorrt_llm_bls")

    reports = {each.name: each for each in await inspect_models(settings)}
    assert [("trtllm", False)] * 3 == [(reports[name].adapter, loses(reports[name])) for name in splitting]
    assert [(reports[name].adapter, loses(reports[name])) for name in exact] == [
        ("trtllm-ensemble", False),
        ("trtllm-bls", False),
    ]

    monkeypatch.setattr("triton_openai.prompts.prompter._exists", lambda _: False)
    reports = {each.name: each for each in await inspect_models(settings)}
    assert all(loses(reports[name]) for name in splitting)
    assert not any(loses(reports[name]) for name in exact)


async def test_without_a_usable_tokenizer_the_model_answers_itself(triton: TestTriton, monkeypatch: Any) -> None:
    """A tokenizer that the model's config names may turn out to be none that can be read here."""

    def load(_: str) -> NoReturn:
        raise ConfigurationError("It cannot be read.")

    monkeypatch.setattr(ModelTokenizer, "load", load)
    async with serving(proxy_settings(triton, "http", prefer_token_level="auto")) as service:
        await service.ready()
        answer = await ask(service, "completions", "ensemble", steered(text=HARD))

        assert HARD == answer.json["choices"][0]["text"]
        assert [False] == (await inputs_of(triton, "tensorrt_llm", id_of(answer)))["streaming"]["value"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", PATHS)
async def test_the_model_itself_answers_what_its_engine_cannot_be_asked(
    triton: TestTriton, endpoint: str, stream: bool
) -> None:
    """Bad words as token ids need gRPC, and as texts they do not; what neither takes is refused."""
    async with serving(proxy_settings(triton, "http", prefer_token_level="auto")) as service:
        await service.ready()
        taken = await ask(
            service, endpoint, "ensemble", steered(text="yes"), bad_words=["no"], priority=0, stream=stream
        )
        refused = await ask(service, endpoint, "ensemble", steered(text="yes"), bad_words=["no"], min_p=0.1)

        assert (200, "yes") == (taken.status, text_of(endpoint, taken)), taken.body
        assert ["no"] == (await inputs_of(triton, "preprocessing", id_of(taken)))["BAD_WORDS_DICT"]["value"]
        assert (400, "min_p") == (refused.status, refused.error["param"])


def loses(report: ModelReport) -> bool:
    """Return whether a note of *report* says that streamed text may lose characters."""
    return any("may lose characters" in note for note in report.notes)
