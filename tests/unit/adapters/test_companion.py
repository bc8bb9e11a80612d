"""The companion's adapter: what it asks of the model, and what it reads in the answers."""

from __future__ import annotations

import base64
import io
import json
import wave
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.adapters import companion
from triton_openai.adapters.companion import Companion
from triton_openai.companion.repository import config_text, runner_of
from triton_openai.errors import (
    InvalidAnswer,
    InvalidRequest,
    LoraNotLoaded,
    ModelCrashed,
    Overloaded,
    PromptRefused,
    RequestRefused,
    ServiceError,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import Beams, FinishReason, Generation, Guide, Lora, Sampling, Vocabulary
from triton_openai.jobs import (
    ClassificationJob,
    ClassificationResult,
    EmbeddingJob,
    ScoreJob,
    ScoreResult,
    TokenClassificationJob,
    TokenEmbeddingJob,
    TokenPair,
    TranscriptionJob,
    TranslationJob,
)
from triton_openai.triton.carrier import fault_error
from triton_openai.triton.tensors import CarriedResponse, Delivery, JsonResponse, ModelConfig, TensorSpec

INPUTS = {name: TensorSpec(name=name, datatype="BYTES", dims=(1,)) for name in ("request", "carrier")}
INPUTS["media"] = TensorSpec(name="media", datatype="BYTES", dims=(-1,), optional=True)
OUTPUTS = {"response": TensorSpec(name="response", datatype="BYTES", dims=(1,))}


def config(**parameters: str) -> ModelConfig:
    """Return the configuration of a companion model."""
    return ModelConfig(name="companion", backend="python", decoupled=True, inputs=INPUTS, outputs=OUTPUTS,
                       parameters={"triton_openai_contract": "1", **parameters})  # fmt: skip


def generation(**fields: Any) -> Generation:
    """Return a generation for token ids."""
    sampling = fields.pop("sampling", {})
    usual: dict[str, Any] = {"id": "x", "prompt": "Hi", "prompt_ids": (5, 6)}
    return Generation(sampling=Sampling(**{"max_tokens": 9, **sampling}), **{**usual, **fields})


def asked(job: Any, **parameters: str) -> dict[str, Any]:
    """Return the JSON of the first request."""
    request = Companion(config(**parameters), {}).encode(job)[0]
    body: dict[str, Any] = json.loads(request.inputs[0].values[0])
    return body


@every_case("parameters,expected", [
    ({}, "parameter triton_openai_contract 1"),
    ({"triton_openai_contract": "2"}, None),
    ({"triton_openai_contract": ""}, None),
])  # fmt: skip
def test_models_are_claimed_by_the_contract(parameters: dict[str, str], expected: str | None) -> None:
    """And only those of a version that is known."""
    assert expected == Companion.matches(config(**parameters))


def test_the_written_configuration_names_the_contract() -> None:
    """What the command writes is what the adapter claims."""
    assert 'key: "triton_openai_contract" value: { string_value: "1" }' in config_text({})


_ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampling": ({"sampling": {"temperature": 0.5}}, {"sampling": {"max_tokens": 9, "temperature": 0.5}}),
    "top_p 0": ({"sampling": {"top_p": 0}}, {"sampling": {"max_tokens": 9, "top_k": 1}}),
    "biases": ({"sampling": {"logit_bias": ((5, 1.5),)}}, {"sampling": {"max_tokens": 9, "logit_bias": {"5": 1.5}}}),
    "stop strings, which are found here": ({"sampling": {"stop": ("x",)}}, {"sampling": {"max_tokens": 9}}),
    "log probabilities": ({"sampling": {"logprobs": 3}}, {"return": {"logprobs": 3}}),
    "that of the whole": ({"cumulative_logprob": True}, {"return": {"logprobs": 0}}),
    "a LoRA adapter": ({"lora": Lora(name="a", path="/a")}, {"lora": {"name": "a", "path": "/a"}}),
    "a priority": ({"priority": 1}, {"priority": -9}),
    "the last priority": ({"priority": 10}, {"priority": 0}),
    "a beam search": (
        {
            "beams": Beams(width=3, index=1, search="s", length_penalty=2.0),
            "sampling": {"stop_token_ids": (7,)},
            "vocabulary": Vocabulary(size=10, end_ids=(4,)),
        },
        {"beams": {"width": 3, "index": 1, "search": "s", "ends": [4, 7], "length_penalty": 2.0}},
    ),
    "a beam search that goes on": (
        {
            "beams": Beams(width=1, search="s"),
            "sampling": {"ignore_eos": True},
            "vocabulary": Vocabulary(size=10, end_ids=(4,)),
        },
        {"beams": {"width": 1, "index": 0, "search": "s", "length_penalty": 1.0, "ends": []}},
    ),
    "a schema": (
        {"guide": Guide(kind="json_schema", value='{"type":"object"}')},
        {"sampling": {"max_tokens": 9, "structured_outputs": {"json": {"type": "object"}}}},
    ),
}


@every_case("name", list(_ASKED))
def test_what_the_model_is_asked(name: str) -> None:
    """The prompt's ids, and vLLM's parameters by their names."""
    fields, expected = _ASKED[name]
    body = asked(generation(**fields))

    assert expected.items() <= body.items()
    assert [5, 6] == body["ids"]


@every_case("fields,error", [
    ({"sampling": {"seed": 2**63}}, InvalidRequest),
    ({"sampling": {"max_tokens": 2**31}}, InvalidRequest),
    ({"prompt": ""}, PromptRefused),
])  # fmt: skip
def test_what_is_refused_here(fields: dict[str, Any], error: type[Exception]) -> None:
    """Numbers that no engine holds, and nothing to continue."""
    with pytest.raises(error):
        asked(generation(**fields))


def test_stop_strings_need_each_token() -> None:
    """What comes together is taken one by one, so that the answer ends behind the right token."""
    adapter = Companion(config(), {})
    for stop in ((), ("x",)):
        (request,) = adapter.encode(generation(sampling={"stop": stop}))
        assert request.carried
        assert bool(stop) == request.token_by_token


def test_an_answer_is_read() -> None:
    """Tokens, log probabilities, the finish reason and the engine's counts."""
    decoder = Companion(config(), {}).decoder(generation(sampling={"logprobs": 1}, cumulative_logprob=True))
    first = decoder.feed(CarriedResponse(Delivery(1, [7], logprobs=[(7, -0.5, 2, [(8, -0.25), (7, -0.5)])])))
    last = decoder.feed(CarriedResponse(Delivery(1, [9], "stop", None, (2, 1, 2), [(9, -1.0, 1, [(9, -1.0)])])))

    assert (1, 2, -0.5) == (first.tokens, first.prompt_tokens, first.cumulative_logprob)
    (entry,) = first.logprobs
    assert (7, -0.5, 2, [8]) == (entry.id, entry.logprob, entry.rank, [one.id for one in entry.top])
    assert (FinishReason.STOP, 1, -1.5) == (last.finish_reason, last.cached_tokens, last.cumulative_logprob)


def test_the_prompts_log_probabilities() -> None:
    """Of each token but the first, with as many alternatives as were asked for."""
    adapter = Companion(config(), {})
    scores: list[Any] = [None, (6, -0.5, 2, [(8, -0.25), (6, -0.5)])]
    response = CarriedResponse(Delivery(1, [7], prompt_logprobs=scores))

    entries = adapter.decode_prompt_logprobs(response, 1)
    assert entries is not None
    assert [(6, -0.5, 1)] == [(entry.id, entry.logprob, len(entry.top)) for entry in entries]
    assert adapter.decode_prompt_logprobs(CarriedResponse(Delivery(1, [7])), 1) is None


def answer(body: Any) -> JsonResponse:
    """Return a response with *body*."""
    return JsonResponse({"response": body if isinstance(body, str) else json.dumps(body)}, "companion")


def test_vectors() -> None:
    """One request for each text, and its vector as the engine made it."""
    adapter = Companion(config(triton_openai_runner="embed"), {})
    job = EmbeddingJob(id="x", inputs=("a", "b"), dimensions=2)
    assert [EmbeddingJob] == list(adapter.jobs)
    assert ["a", "b"] == [json.loads(one.inputs[0].values[0])["prompt"] for one in adapter.encode(job)]
    vector = base64.b64encode(array("f", [0.5, 0.25]).tobytes()).decode()

    result = adapter.decode(job, [answer({"vector": vector, "prompt": 3})] * 2)
    assert 6 == result.prompt_tokens
    classes = ClassificationJob(id="x", inputs=("a",))
    classified = adapter.decode(classes, [answer({"vector": vector})])
    assert isinstance(classified, ClassificationResult)
    assert [[0.5, 0.25]] == [list(values) for values in classified.values]


def pairs(**fields: Any) -> ScoreJob:
    """Return a job of two pairs, of which one has segments."""
    encoded = (TokenPair((5, 6, 7), (0, 0, 1)), TokenPair((5, 8), (0, 0)))
    return ScoreJob(id="x", pairs=(("a", "b"), ("a", "c")), encoded=encoded, **fields)


def test_scores() -> None:
    """A cross-encoder is a classifier with one class: each pair is a request, and its number the score."""
    adapter = Companion(config(triton_openai_runner="classify"), {})
    assert [ClassificationJob, ScoreJob] == list(adapter.jobs)
    first, second = [json.loads(one.inputs[0].values[0]) for one in adapter.encode(pairs())]
    assert ("classify", [5, 6, 7]) == (first["kind"], first["ids"])
    assert {"extra_kwargs": {"compressed_token_type_ids": 2}} == first["pooling"]
    assert {} == second["pooling"]

    one = base64.b64encode(array("f", [0.5]).tobytes()).decode()
    result = adapter.decode(pairs(), [answer({"vector": one, "prompt": 3})] * 2)
    assert isinstance(result, ScoreResult)
    assert ([0.5, 0.5], 6) == (result.scores, result.prompt_tokens)

    three = base64.b64encode(array("f", [0.5] * 3).tobytes()).decode()
    with pytest.raises(InvalidRequest, match="does not rank texts: it has 3 classes"):
        adapter.decode(pairs(), [answer({"vector": three})] * 2)


@every_case("job", [
    EmbeddingJob(id="x", inputs=("a",), activate=False),
    ClassificationJob(id="x", inputs=("a",), activate=False),
    pairs(activate=False),
])  # fmt: skip
def test_values_before_the_activation(job: Any) -> None:
    """The engine leaves it out where the client asks for that."""
    for request in Companion(config(), {}).encode(job):
        assert json.loads(request.inputs[0].values[0])["pooling"]["use_activation"] is False


@every_case("body,error", [
    ("{", InvalidAnswer),
    ({"vector": "?"}, InvalidAnswer),
    ({"vector": "AAA="}, InvalidAnswer),
    ({"e": {"kind": "invalid", "message": "no"}}, RequestRefused),
    ({"e": {"kind": "engine", "message": "no"}}, ServiceError),
    ({"e": "x"}, InvalidAnswer),
])  # fmt: skip
def test_answers_without_a_vector(body: Any, error: type[Exception]) -> None:
    """A client's mistake is a 400, and what cannot be read a 502."""
    adapter = Companion(config(triton_openai_runner="embed"), {})

    with pytest.raises(error):
        adapter.decode(EmbeddingJob(id="x", inputs=("a",)), [answer(body)])


_RUNNERS: dict[str, tuple[dict[str, Any], str]] = {
    "a name on the hub": ({"model": "openai/whisper-large-v3-turbo"}, "transcribe"),
    "a folder": ({"model": "{folder}/whisper"}, "transcribe"),
    "a folder of another model": ({"model": "{folder}/whisper-like"}, "generate"),
    "a folder of a language model that hears": ({"model": "{folder}/hears"}, "generate, transcribe_text"),
    "a folder whose name is of another model": ({"model": "{folder}/voxtral-like"}, "generate"),
    "another one on the hub": ({"model": "Qwen/Qwen3-ASR-1.7B"}, "generate, transcribe_text"),
    "one that does nothing else": ({"model": "FunAudioLLM/Fun_ASR-Nano"}, "transcribe_text"),
    "a name in other letters": ({"model": "mistralai/Voxtral-Mini-3B-2507"}, "generate, transcribe_text"),
    "the task of older releases": ({"model": "own/model", "task": "transcription"}, "transcribe_text"),
    "that task of a Whisper": ({"model": "openai/whisper-tiny", "task": "transcription"}, "transcribe"),
    "embeddings of a model that hears": ({"model": "Qwen/Qwen3-Omni-30B", "runner": "pooling"}, "embed"),
    "a folder that cannot be read": ({"model": "{folder}/broken-whisper"}, "generate"),
    "an organization": ({"model": "whispering/llama"}, "generate"),
    "no model": ({}, "generate"),
}


@every_case("name", list(_RUNNERS))
def test_a_whisper_is_for_transcriptions(name: str, tmp_path: Path) -> None:
    """The configuration says so, by the model's own one where there is a folder."""
    folder = tmp_path / name
    for model, text in (("whisper", '{"model_type": "whisper"}'), ("whisper-like", '{"model_type": "llama"}'),
                        ("broken-whisper", "{"), ("voxtral-like", '{"architectures": ["LlamaForCausalLM"]}'),
                        ("hears", '{"architectures": ["Qwen3ASRForConditionalGeneration"]}')):  # fmt: skip
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text(text)
    arguments, expected = _RUNNERS[name]
    arguments = {key: value.replace("{folder}", str(folder)) for key, value in arguments.items()}

    assert expected == runner_of(arguments)
    assert f'string_value: "{expected}"' in config_text(arguments)


def test_a_window_of_speech() -> None:
    """Whisper's decoder goes on from the token ids, and hears a WAV file; to find the language it writes one token."""
    samples = array("f", [0.0, 1.0, -2.0]).tobytes()
    whisper = Companion(config(triton_openai_runner="transcribe"), {})
    job = TranscriptionJob(id="x", samples=samples, prompt_ids=(1, 2, 3), temperature=0.4)
    (request,) = whisper.encode(job)
    body, media = request.inputs
    (detecting,) = whisper.encode(TranscriptionJob(id="x", samples=samples, prompt_ids=(1,)))

    asked_for = json.loads(body.values[0])
    assert ("transcribe", [1, 2, 3], {"temperature": 0.4}) == (
        asked_for["kind"],
        asked_for["ids"],
        asked_for["sampling"],
    )
    assert {"temperature": 0.0, "max_tokens": 1} == json.loads(detecting.inputs[0].values[0])["sampling"]
    with wave.open(io.BytesIO(base64.b64decode(media.values[0]))) as file:
        assert (16_000, 1) == (file.getframerate(), file.getnchannels())
        assert [0, 32_767, -32_767] == array("h", file.readframes(3)).tolist()


_HEARD: dict[str, tuple[TranscriptionJob, dict[str, Any]]] = {
    "a transcription": (TranscriptionJob(id="x", samples=b""), {"task": "transcribe"}),
    "a language, a prompt and a temperature": (
        TranscriptionJob(id="x", samples=b"", language="de", prompt="Ada", temperature=0.4),
        {"task": "transcribe", "language": "de", "prompt": "Ada"},
    ),
    "a translation, which is into English": (
        TranslationJob(id="x", samples=b"", language="de"),
        {"task": "translate", "to_language": "en", "language": "de"},
    ),
}


@every_case("name", list(_HEARD))
def test_a_model_that_writes_its_prompts(name: str) -> None:
    """It gets what the client wants in place of token ids, and a bound of the answer."""
    job, expected = _HEARD[name]
    asked_for = asked(job, triton_openai_runner="generate, transcribe_text")
    sampling = {"temperature": job.temperature or 0.0, "max_tokens": 1024}
    media = [{"type": "audio", "at": 0, "encoding": "base64"}]

    assert {"v": 1, "kind": "transcribe", "sampling": sampling, "media": media, **expected} == asked_for


def vectors(*rows: Sequence[float], **more: Any) -> dict[str, Any]:
    """Return a part of the vectors of an input's tokens."""
    flat = array("f", [value for row in rows for value in row])
    return {"vector": base64.b64encode(flat.tobytes()).decode(), "shape": [len(rows), len(rows[0])], **more}


def test_vectors_of_tokens() -> None:
    """A request for each input. The parts of an answer belong together, up to the one that has no more behind it."""
    adapter = Companion(config(triton_openai_runner="token_embed"), {})
    job = TokenEmbeddingJob(id="x", inputs=((5, 6, 7), (8,)), activate=False)
    first, second = [json.loads(one.inputs[0].values[0]) for one in adapter.encode(job)]
    assert ("token_embed", [5, 6, 7], {"use_activation": False}) == (first["kind"], first["ids"], first["pooling"])
    assert [8] == second["ids"]

    parts = [
        vectors([1.0, 2.0], [3.0, 4.0], more=True),
        vectors([5.0, 6.0], more=False, prompt=3),
        vectors([7.0, 8.0], prompt=1),
    ]
    result: Any = adapter.decode(job, [answer(part) for part in parts])
    assert 4 == result.prompt_tokens
    assert [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0]]] == [
        [array("f", row).tolist() for row in rows] for rows in result.vectors
    ]


_ODD: dict[str, list[dict[str, Any]]] = {
    "no shape": [{"vector": vectors([1.0])["vector"]}],
    "a shape of other vectors": [{**vectors([1.0, 2.0]), "shape": [2, 2]}],
    "a shape of one number": [{**vectors([1.0, 2.0]), "shape": [2]}],
    "a shape of nothing": [{**vectors([1.0]), "shape": [0, 1]}],
    "a shape below nothing": [{**vectors([1.0]), "shape": [-1, -1]}],
    "no end": [vectors([1.0], more=True)],
    "two answers to one input": [vectors([1.0]), vectors([1.0])],
    "no answer": [],
}


@every_case("name", list(_ODD))
def test_vectors_of_tokens_that_cannot_be_read(name: str) -> None:
    """The model is at fault."""
    adapter = Companion(config(triton_openai_runner="token_classify"), {})
    job = TokenClassificationJob(id="x", inputs=((5,),))

    with pytest.raises(InvalidAnswer):
        adapter.decode(job, [answer(part) for part in _ODD[name]])


def test_more_vectors_than_a_request_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tokens before the model is asked, and by their bytes, which only the model knows."""
    adapter = Companion(config(triton_openai_runner="token_embed"), {})
    with pytest.raises(InvalidRequest, match="16385 tokens together"):
        adapter.encode(TokenEmbeddingJob(id="x", inputs=((5,) * 16_000, (5,) * 385)))

    monkeypatch.setattr(companion, "MAX_VECTOR_BYTES", 12)
    job = TokenEmbeddingJob(id="x", inputs=((5,), (6,)))
    with pytest.raises(InvalidRequest, match="have 16 bytes together"):
        adapter.decode(job, [answer(vectors([1.0, 2.0]))] * 2)


_RUNS: dict[str, tuple[str | None, list[Any], bool]] = {
    "none": (None, [Generation], True),
    "generate": ("generate", [Generation], True),
    "Whisper": ("transcribe", [TranscriptionJob, TranslationJob], True),
    "speech alone": ("transcribe_text", [TranscriptionJob, TranslationJob], False),
    "both": ("generate, transcribe_text", [Generation, TranscriptionJob, TranslationJob], True),
    "both without a space": ("generate,transcribe_text", [Generation, TranscriptionJob, TranslationJob], True),
}


@every_case("name", list(_RUNS))
def test_what_a_model_is_for(name: str) -> None:
    """Its configuration says so. Only one that takes texts as token ids needs its tokenizer here."""
    runner, jobs, tokens = _RUNS[name]
    parameters = {}
    if runner is not None:
        parameters["triton_openai_runner"] = runner
    adapter = Companion(config(**parameters), {})

    assert jobs == list(adapter.jobs)
    assert tokens == adapter.capabilities.tokens
    assert (TranscriptionJob in jobs) == (adapter.capabilities.recognition is not None)


_TEXTS: dict[str, tuple[dict[str, Any], tuple[str, bool]]] = {
    "a text": ({"text": " Hello. ", "complete": True, "prompt": 40, "completion": 3}, ("Hello.", True)),
    "one that was cut": ({"text": "Hello", "complete": False, "prompt": 40, "completion": 1024}, ("Hello", False)),
}


@every_case("name", list(_TEXTS))
def test_a_transcript_as_text(name: str) -> None:
    """It is taken as it is; one that was cut is asked for again with less audio."""
    body, expected = _TEXTS[name]
    adapter = Companion(config(triton_openai_runner="transcribe_text"), {})
    responses = [JsonResponse({"response": json.dumps(body)}, "companion")]
    transcript: Any = adapter.decode(TranscriptionJob(id="x", samples=b""), responses)

    assert (*expected, None, 40) == (
        transcript.text, transcript.complete, transcript.avg_logprob, transcript.prompt_tokens
    )  # fmt: skip


_SPOKEN: dict[str, tuple[Any, tuple[list[int], float | None]]] = {
    "tokens": ({"ids": [5, 6], "logprob": -3.0, "prompt": 4}, ([5, 6], -1.5)),
    "nothing": ({"ids": [], "logprob": 0.0, "prompt": 4}, ([], None)),
}


@every_case("name", list(_SPOKEN))
def test_what_is_spoken(name: str) -> None:
    """Its token ids, with their mean log probability."""
    body, expected = _SPOKEN[name]
    whisper = Companion(config(triton_openai_runner="transcribe"), {})
    job = TranslationJob(id="x", samples=b"")
    transcript: Any = whisper.decode(job, [JsonResponse({"response": json.dumps(body)}, "companion")])

    assert expected == (transcript.token_ids, transcript.avg_logprob)


_UNSPOKEN: dict[str, tuple[list[str], type[ServiceError]]] = {
    "an error": ([json.dumps({"e": {"kind": "invalid", "message": "no"}})], RequestRefused),
    "a fault": ([json.dumps({"e": {"kind": "engine", "message": "no"}})], ServiceError),
    "no JSON": (["{"], InvalidAnswer),
    "no answer": ([], InvalidAnswer),
}


@every_case("name", list(_UNSPOKEN))
def test_a_transcription_that_fails(name: str) -> None:
    """It ends with an error that says why."""
    texts, expected = _UNSPOKEN[name]
    whisper = Companion(config(triton_openai_runner="transcribe"), {})
    responses = [JsonResponse({"response": text}, "companion") for text in texts]

    with pytest.raises(expected):
        whisper.decode(TranscriptionJob(id="x", samples=b""), responses)


_FAULTS: dict[str, type[ServiceError]] = {
    "invalid": RequestRefused,
    "unsupported": UnsupportedParameter,
    "lora": LoraNotLoaded,
    "overloaded": Overloaded,
    "dead": ModelCrashed,
    "engine": UpstreamError,
}


@every_case("kind", list(_FAULTS))
def test_the_faults_of_a_job(kind: str) -> None:
    """They are those of a generation: a model that has died is no mistake of the client's."""
    answer = JsonResponse({"response": json.dumps({"e": {"kind": kind, "message": "no"}})}, "companion")
    jobs: dict[str, Any] = {
        "embed": EmbeddingJob(id="x", inputs=("a",)),
        "transcribe": TranscriptionJob(id="x", samples=b""),
    }
    for runner, job in jobs.items():
        with pytest.raises(_FAULTS[kind]) as caught:
            Companion(config(triton_openai_runner=runner), {}).decode(job, [answer])
        assert type(caught.value) is type(fault_error({"kind": kind, "message": "no"}, "companion"))
