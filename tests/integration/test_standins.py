"""The TensorRT-LLM stand-ins behave, on a real Triton, as the real models are known to: also where that is awkward."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tokenizers import Tokenizer

from tests.integration.standin_calls import ask, generate, steered, streaming, tensor

BLS = ("tensorrt_llm_bls", "tensorrt_llm_bls_delta")
BROKEN = "\ufffd"


@pytest.fixture(scope="module")
def url(triton):
    return triton.grpc_url


@pytest.fixture(scope="module")
def tokenizer(triton):
    return Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))


def config(triton, model):
    with urllib.request.urlopen(f"{triton.http_url}/v2/models/{model}/config") as answer:
        return json.load(answer)


def texts(answers):
    return [answer.text() for answer in answers if answer.tensors]


def engine_request(triton, request_id, model="tensorrt_llm"):
    """Return the engine's record of a request that came with this id."""
    (event,) = triton.record.wait_for(id=request_id, model=model, event="request")
    return event


def ended(triton, request_id, model="tensorrt_llm"):
    """Wait until the engine has ended a request and return how and after how many tokens."""
    ends = ("finished", "cancelled", "stopped", "failed")
    events = triton.record.wait_for(
        lambda found: any(each["event"] in ends for each in found), id=request_id, model=model
    )
    return next((each["event"], each["tokens"]) for each in events if each["event"] in ends)


def test_configs_say_what_the_real_ones_say(triton):
    """Platform, backend, transaction policy and the names of inputs are those of the releases they stand for."""
    ensemble = config(triton, "ensemble")
    assert ensemble["platform"] == "ensemble"
    assert ensemble["backend"] == ""
    assert ensemble["model_transaction_policy"]["decoupled"] is True
    assert {"seed", "min_tokens", "return_num_input_tokens"} <= {each["name"] for each in ensemble["input"]}
    assert [step["model_name"] for step in ensemble["ensemble_scheduling"]["step"]] == [
        "preprocessing", "tensorrt_llm", "postprocessing",
    ]  # fmt: skip
    legacy = config(triton, "ensemble_legacy")
    names = {each["name"]: each for each in legacy["input"]}
    assert {"random_seed", "min_length"} <= set(names)
    assert not {"seed", "min_tokens", "exclude_input_in_output", "return_num_input_tokens"} & set(names)
    assert names["text_input"]["dims"] == ["-1"] or names["text_input"]["dims"] == [-1]
    assert config(triton, "tensorrt_llm_legacy")["backend"] == "tensorrtllm"
    assert config(triton, "ensemble_nonstreaming")["model_transaction_policy"]["decoupled"] is False
    parameters = config(triton, "tensorrt_llm")["parameters"]
    assert parameters["tokenizer_dir"]["string_value"] == str(triton.tokenizer)
    for model, accumulate in zip(BLS, ("true", "false"), strict=True):
        assert config(triton, model)["parameters"]["accumulate_tokens"]["string_value"] == accumulate


@pytest.mark.parametrize("model", ["ensemble", "ensemble_nonstreaming", *BLS])
def test_the_prompt_is_echoed_unless_excluded(url, model):
    """Without a stream the prompt stands before the answer, unless the request excludes it."""
    prompt = steered("Hi", text=" there", fail_at=None)
    assert texts(ask(url, model, text_input=prompt, max_tokens=9)) == [prompt + " there"]
    answers = ask(url, model, text_input=prompt, max_tokens=9, exclude_input_in_output=True)
    assert texts(answers) == [" there"]


def test_the_answer_is_honest_about_itself(url):
    """Unsteered, a stand-in says that it is one, quotes the last user turn, and ends on its own."""
    prompt = "<|im_start|>user\nWhat is new?<|im_end|>\n<|im_start|>assistant\n"
    answers = ask(url, "ensemble", text_input=prompt, max_tokens=200, exclude_input_in_output=True)
    (text,) = texts(answers)
    assert "stand-in for a language model" in text
    assert text.endswith('You wrote: "What is new?"')
    # The executor samples with top_p or top_k only; a temperature alone does nothing.
    for fields, same in (({}, True), ({"temperature": 1.0}, True), ({"top_k": 1}, True), ({"top_p": 1.0}, False)):
        other = ask(url, "ensemble", text_input=prompt, max_tokens=200, exclude_input_in_output=True, seed=1, **fields)
        assert same == (texts(other) == [text]), fields


def test_a_stream_ends_with_an_empty_response_after_eos(url):
    """An ensemble streams new tokens only; the end of sequence is an empty response that carries the final flag."""
    answers = ask(url, "ensemble", text_input=steered(text="one two three"), max_tokens=9, stream=True,
                  return_num_input_tokens=True, return_num_output_tokens=True)  # fmt: skip
    assert texts(answers) == ["one", " two", " three", ""]
    assert [answer.final for answer in answers] == [False, False, False, True]
    assert [answer.tensors["num_output_tokens"].tolist() for answer in answers] == [[[1]], [[1]], [[1]], [[0]]]
    assert len({answer.tensors["num_input_tokens"].item() for answer in answers}) == 1


def test_a_stream_that_reaches_its_length_ends_with_a_token(url):
    """At max_tokens the last token comes with the final flag, also when it is the only one."""
    for limit in (1, 2):
        answers = ask(url, "ensemble", text_input=steered(text="one two three"), max_tokens=limit, stream=True)
        assert texts(answers) == ["one", " two"][:limit]
        assert [answer.final for answer in answers] == [False, True][-limit:]


def test_an_answer_may_be_empty(url):
    """With the end of sequence as first token there is one response, with no text."""
    for stream in (True, False):
        answers = ask(url, "ensemble", text_input=steered(text=""), max_tokens=9, stream=stream,
                      exclude_input_in_output=True)  # fmt: skip
        assert texts(answers) == [""]
        assert answers[0].final


def test_several_tokens_may_come_in_one_response(url):
    """A response may carry more than one token, and its count says so."""
    answers = ask(url, "ensemble", text_input=steered(text="a b c d e", tokens_per_response=3), max_tokens=9,
                  stream=True, return_num_output_tokens=True)  # fmt: skip
    assert texts(answers) == ["a b c", " d e"]
    assert [answer.tensors["num_output_tokens"].item() for answer in answers] == [3, 2]


@pytest.mark.parametrize("model", ["ensemble", "ensemble_legacy", "tensorrt_llm_bls_delta"])
def test_stateless_decoding_breaks_characters(url, model):
    """Each token that holds a part of a character becomes its own U+FFFD, and the character is lost."""
    answers = ask(url, model, text_input=steered(text="é😀"), max_tokens=9, stream=True)
    assert "".join(texts(answers)) == BROKEN * 6


@pytest.mark.parametrize("model", ["ensemble", "ensemble_legacy", "tensorrt_llm_bls_legacy", *BLS])
def test_a_whole_answer_is_decoded_whole(url, model):
    """Without a stream there is one response with text, and no character of it is lost."""
    answers = ask(url, model, text_input=steered(text="é😀"), max_tokens=9)
    (text,) = texts(answers)
    assert text.endswith("é😀")


@pytest.mark.parametrize("model", ["tensorrt_llm_bls_legacy", "tensorrt_llm_bls"])
def test_an_old_bls_loses_the_temperature(triton, url, model):
    """Up to 0.12 it is declared and not handed on to the engine."""
    legacy = model.endswith("legacy")
    limit = 4100 + legacy
    ask(url, model, text_input=steered(text="one"), max_tokens=limit, temperature=0.5, top_k=2)
    asked = triton.record.wait_for(
        lambda found: any(each["inputs"].get("request_output_len", {}).get("value") == [limit] for each in found),
        model="tensorrt_llm_legacy" if legacy else "tensorrt_llm",
        event="request",
    )
    (inputs,) = [each["inputs"] for each in asked if each["inputs"]["request_output_len"]["value"] == [limit]]
    assert legacy == ("temperature" not in inputs)
    assert [2] == inputs["runtime_top_k"]["value"]


def test_cumulative_text_ends_in_one_replacement_until_it_resolves(url):
    """Accumulated text grows, and an incomplete character is one trailing U+FFFD that repeats."""
    answers = ask(url, "tensorrt_llm_bls", text_input=steered(text="a😀b"), max_tokens=9, stream=True)
    assert texts(answers) == ["a", *[f"a{BROKEN}"] * 3, "a😀", "a😀b", "a😀b"]


@pytest.mark.parametrize("model", BLS)
def test_bls_ends_with_a_flag_alone(url, model):
    """No data response of a BLS model carries the final flag; a response without tensors does."""
    for stream in (True, False):
        answers = ask(url, model, text_input=steered(text="one two"), max_tokens=2, stream=stream)
        assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert all(answer.tensors for answer in answers[:-1])
        assert not answers[-1].tensors


def test_a_matched_stop_word_stays_in_the_text(triton, url):
    """The engine matches stop words on tokens, ends there and leaves the word; a word with other tokens is missed."""
    prompt = steered(text="go on STOP here")
    with streaming(url, "ensemble", text_input=prompt, max_tokens=20, stream=True, stop_words=[" STOP"]) as stream:
        assert "".join(texts(stream.rest())) == "go on STOP"
        assert ended(triton, stream.id)[0] == "finished"
    missed = ask(url, "ensemble", text_input=prompt, max_tokens=20, stream=True, stop_words=["STOP"])
    assert "".join(texts(missed)) == "go on STOP here"


def test_words_are_encoded_as_ids_and_offsets(triton, url, tokenizer):
    """Preprocessing hands words on as their ids in a row and the offsets of their ends."""
    words = ["a", " b c"]
    with streaming(url, "ensemble", text_input=steered(text="x"), max_tokens=2, stop_words=words) as stream:
        stream.rest()
    encoded = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    value = engine_request(triton, stream.id)["inputs"]["stop_words_list"]
    ids = [token for word in encoded for token in word]
    assert value["shape"] == [1, 2, len(ids)]
    assert value["value"] == [*ids, len(encoded[0]), len(ids), *[-1] * (len(ids) - 2)]


def test_bls_watches_for_a_stop_word_in_the_text(triton, url):
    """A BLS model stops its engine at a stop word that begins where a piece begins, after it has sent the word."""
    prompt = steered(text="go on STOP here and there and everywhere", delay_ms=20)
    answers = ask(url, "tensorrt_llm_bls_delta", text_input=prompt, max_tokens=50, stream=True, stop_words=[" on S"])
    assert "".join(texts(answers)).startswith("go on S")
    assert "".join(texts(answers)) != "go on STOP here and there and everywhere"
    cut = ask(url, "tensorrt_llm_bls_delta", text_input=prompt, max_tokens=50, stop_words=["STOP"],
              exclude_input_in_output=True)  # fmt: skip
    assert texts(cut) == ["go on STOP"]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_an_ensemble_reports_an_error_of_its_engine(url, fail_at):
    """An engine's error reaches the client with the ensemble's prefix, before or after the first token."""
    prompt = steered(text="one two three", fail_at=fail_at, error="out of luck", delay_ms=30)
    answers = ask(url, "ensemble", text_input=prompt, max_tokens=9, stream=True)
    assert answers[-1].error == "in ensemble 'ensemble', out of luck"
    # Triton drops what is still on its way within the ensemble when the engine fails.
    told = texts(answers)
    assert told == ["one", " two"][:fail_at][: len(told)]


@pytest.mark.parametrize("model", BLS)
def test_a_bls_error_is_a_traceback_and_then_a_flag(url, model):
    """A BLS model answers an early error with its whole traceback, without the flag, which follows alone."""
    for inputs in ({"text_input": steered(fail_at=0, error="out of luck")}, {"text_input": "Hi", "max_tokens": 0}):
        error, flag = ask(url, model, stream=True, **{"max_tokens": 5, **inputs})
        assert error.error is not None
        assert error.error.startswith("Traceback (most recent call last):")
        assert "out of luck" in error.error or "max_tokens must be a single value > 0" in error.error
        assert '.py", line' in error.error
        assert not error.final
        assert flag.final
        assert not flag.tensors


def test_a_bls_error_after_the_first_token_is_never_told(triton, url):
    """Once data has been sent, the engine's failure reaches nobody: the stream stays open and silent."""
    prompt = steered("lost words", text="one two three", fail_at=1, delay_ms=1)
    with streaming(url, "tensorrt_llm_bls_delta", text_input=prompt, max_tokens=9, stream=True) as stream:
        assert stream.take().text() == "one"
        failed = triton.record.wait_for(model="tensorrt_llm", event="failed")
        assert failed
        # Another request on the same instances comes and goes; the lost one still has no end.
        for _ in range(5):
            ask(url, "tensorrt_llm_bls_delta", text_input=steered(text="x"), max_tokens=2)
        assert stream.answers.empty()
        stream.cancel()


def test_a_long_prompt_is_refused(url):
    """A prompt beyond the engine's limit gives the executor's text."""
    (answer,) = ask(url, "ensemble", text_input="word " * 2100, max_tokens=5, stream=True)
    assert answer.error is not None
    assert "Prompt length (" in answer.error
    assert "exceeds maximum input length (2048)" in answer.error


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_a_lora_task_that_is_not_in_the_cache(url, model):
    """
    The number of a LoRA task that is not in the cache gives the executor's text, through the models around it too.
    """
    asked = {"input_ids": [1], "input_lengths": 1, "request_output_len": 2, "streaming": True}
    if model != "tensorrt_llm":
        asked = {"text_input": "Hi", "max_tokens": 2, "stream": True}
    answer = ask(url, model, lora_task_id=4711, **asked)[0]
    assert answer.error is not None
    assert "LoRA task 4711 not found in cache. Please send LoRA weights with request" in answer.error
    assert "processing the input values" not in answer.error


def test_without_the_decoupled_policy_there_is_no_stream(triton, url):
    """A model that is not decoupled refuses to stream and answers a unary call."""
    (answer,) = ask(url, "ensemble_nonstreaming", text_input="Hi", max_tokens=5, stream=True)
    assert answer.error is not None
    assert "Streaming is only supported in decoupled mode." in answer.error
    with grpcclient.InferenceServerClient(url.removeprefix("grpc://")) as client:
        inputs = [tensor("text_input", steered(text="yes"), batched=True), tensor("max_tokens", 5, batched=True),
                  tensor("exclude_input_in_output", True, batched=True)]  # fmt: skip
        result = client.infer("ensemble_nonstreaming", inputs)
        assert result.as_numpy("text_output").tolist() == [b"yes"]
    status, body = generate(triton.http_url, "ensemble_nonstreaming", stream=False, text_input="Hi", max_tokens=2)
    assert status == 200
    assert body[0]["text_output"].startswith("Hi")


def test_the_old_ensemble_echoes_and_sends_placeholders(url):
    """The older ensemble always echoes without special tokens, and sends zeros for what was not asked for."""
    prompt = "<|im_start|>user\n" + steered("Hi", text=" there")
    (answer,) = ask(url, "ensemble_legacy", text_input=prompt, max_tokens=9)
    assert answer.text() == prompt.removeprefix("<|im_start|>") + " there"
    assert answer.tensors["cum_log_probs"].tolist() == [[0.0]]
    assert answer.tensors["context_logits"].shape == (1, 1, 1)
    assert answer.tensors["generation_logits"].shape == (1, 1, 1, 1)
    assert not answer.tensors["output_log_probs"].any()
    assert "num_output_tokens" not in answer.tensors
    streamed = ask(url, "ensemble_legacy", text_input=prompt, max_tokens=9, stream=True, random_seed=1, min_length=1)
    assert "".join(texts(streamed)) == " there"


def test_cancelling_a_direct_request_ends_it(triton, url, tokenizer):
    """The engine's own model looks for a cancellation every 100 ms and then stops."""
    ids = tokenizer.encode(steered(text="word ", repeat=1000, delay_ms=20)).ids
    with streaming(url, "tensorrt_llm", input_ids=ids, input_lengths=len(ids), request_output_len=500,
                   streaming=True, end_id=1) as stream:  # fmt: skip
        answer = stream.take()
        assert answer.tensors["output_ids"].shape == (1, 1, 1)
        assert answer.tensors["sequence_length"].tolist() == [[1]]
        stream.cancel()
        event, tokens = ended(triton, stream.id)
    assert event == "cancelled"
    assert tokens < 500


def test_cancelling_an_ensemble_does_not_reach_its_engine(triton, url):
    """The engine inside an ensemble works on to the end after the client has gone."""
    prompt = steered(text="a b c d e f g h i j", delay_ms=30)
    with streaming(url, "ensemble", text_input=prompt, max_tokens=10, stream=True) as stream:
        stream.take()
        stream.cancel()
        assert ended(triton, stream.id) == ("finished", 10)


@pytest.mark.parametrize(
    "orders", [{"text": "word ", "repeat": 1000, "delay_ms": 20}, {"text": "a b c d", "hang_at": 2}]
)
def test_a_stop_request_with_the_same_id_ends_the_engine(triton, url, orders):
    """A stop request for the inner model ends an ensemble's request in good order, even a silent one."""
    with streaming(url, "ensemble", text_input=steered(**orders), max_tokens=1000, stream=True) as stream:
        stream.take()
        (stopped,) = ask(url, "tensorrt_llm", request_id=stream.id, input_ids=[0], input_lengths=0,
                         request_output_len=0, stop=True)  # fmt: skip
        assert stopped.final
        assert not stopped.tensors
        rest = stream.rest()
    assert rest[-1].final
    assert rest[-1].error is None
    assert ended(triton, stream.id)[0] == "stopped"


def test_a_stop_request_for_nobody_is_no_error_but_needs_an_id(url):
    """Stopping an unknown request is answered like any other; without an id it is refused."""
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    (answer,) = ask(url, "tensorrt_llm", request_id="unknown", **stop)
    assert answer.final
    assert answer.error is None
    (answer,) = ask(url, "tensorrt_llm", request_id="", **stop)
    assert answer.error is not None
    assert "A request id must be provided for request cancellation" in answer.error


def test_bls_hides_its_inner_request(triton, url):
    """The engine sees another id than the client's, so that neither a cancellation nor a stop request reaches it."""
    prompt = steered("hidden request", text="a b c d e f", delay_ms=40)
    with streaming(url, "tensorrt_llm_bls_delta", text_input=prompt, max_tokens=6, stream=True) as stream:
        stream.take()
        ask(url, "tensorrt_llm", request_id=stream.id, input_ids=[0], input_lengths=0, request_output_len=0, stop=True)
        stream.cancel()
    assert triton.record.wait_for(id=stream.id, model="tensorrt_llm_bls_delta", event="request")
    preprocessed = triton.record.events(model="preprocessing", event="request")
    assert any("hidden request" in each["inputs"]["QUERY"]["value"][0] for each in preprocessed)
    inner = triton.record.events(model="tensorrt_llm", event="request")[-2:]
    (inner_id,) = {each["id"] for each in inner} - {stream.id}
    assert ended(triton, inner_id) == ("finished", 6)


def test_sequences_of_one_request_are_told_apart_by_index(url, tokenizer):
    """Several sequences come interleaved, each response with its index, and only one final flag at the very end."""
    answers = ask(
        url, "ensemble", text_input=steered(text="one two"), max_tokens=9, stream=True, num_return_sequences=2
    )
    pieces = {0: "", 1: ""}
    for answer in answers:
        pieces[answer.tensors["sequence_index"].item()] += answer.text()
    assert pieces == {0: "one two", 1: "one two"}
    assert [answer.final for answer in answers].count(True) == 1
    assert answers[-1].final
    ids = tokenizer.encode(steered(text="one two")).ids
    answers = ask(
        url, "tensorrt_llm", input_ids=ids, input_lengths=len(ids), request_output_len=9, streaming=True,
        num_return_sequences=2,
    )  # fmt: skip
    indices = [answer.tensors["sequence_index"].item() for answer in answers]
    assert indices.count(0) == indices.count(1) == len(indices) / 2


def test_log_probabilities_cover_all_tokens_so_far(url):
    """Log probabilities come only when asked for, and in a stream for every token since the first."""
    prompt = steered(text="one two three")
    answers = ask(url, "ensemble", text_input=prompt, max_tokens=3, stream=True, return_log_probs=True)
    assert [answer.tensors["output_log_probs"].shape for answer in answers] == [(1, 1, 1), (1, 1, 2), (1, 1, 3)]
    sums = [answer.tensors["cum_log_probs"].item() for answer in answers]
    assert all(later < earlier for earlier, later in pairwise(sums))
    assert np.isclose(sums[-1], answers[-1].tensors["output_log_probs"].sum())
    assert "cum_log_probs" not in ask(url, "ensemble", text_input=prompt, max_tokens=3, stream=True)[0].tensors


def test_a_missing_required_input_can_give_nothing_at_all(url):
    """Triton counts inputs only: with an optional one in place of a required one, an ensemble ends without data."""
    (answer,) = ask(url, "ensemble", text_input="Hi", stream=True)
    assert answer.final
    assert not answer.tensors


def test_min_tokens_and_other_end_ids_keep_the_answer_going(url):
    """The end of sequence is not taken before min_tokens, nor when another end id was given."""
    for inputs in ({"min_tokens": 6}, {"end_id": -1}):
        answers = ask(url, "ensemble", text_input=steered(text="a b"), max_tokens=6, stream=True,
                      return_num_output_tokens=True, **inputs)  # fmt: skip
        assert sum(answer.tensors["num_output_tokens"].item() for answer in answers) == 6


def test_exact_tokens_are_sent_as_they_are(url, tokenizer):
    """A steered sequence of ids reaches the client id by id."""
    wanted = tokenizer.encode("exactly these", add_special_tokens=False).ids
    ids = tokenizer.encode(steered(tokens=wanted)).ids
    answers = ask(
        url, "tensorrt_llm", input_ids=ids, input_lengths=len(ids), request_output_len=50, streaming=True, end_id=1
    )
    assert [token for answer in answers for token in answer.tensors["output_ids"].reshape(-1)] == wanted
    assert answers[-1].tensors["output_ids"].shape == (1, 1, 0)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_many_streams_run_at_once(url, model):
    """Concurrent requests are all answered, each with its own text."""

    def one(number):
        answers = ask(url, model, text_input=steered(text=f"this is {number}", delay_ms=2), max_tokens=20, stream=True)
        pieces = texts(answers)
        return "".join(pieces) if model == "ensemble" else pieces[-1]

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, range(64))) == [f"this is {number}" for number in range(64)]


def test_the_record_holds_what_was_asked(triton, url):
    """The record shows the inputs with type, shape and value, the outputs asked for, and the client's parameters."""
    prompt = steered(text="x")
    with streaming(
        url, "ensemble", text_input=prompt, max_tokens=3, temperature=0.5, outputs=["text_output"]
    ) as stream:
        stream.rest()
    event = engine_request(triton, stream.id)
    assert event["inputs"]["temperature"] == {"dtype": "FP32", "shape": [1], "value": [0.5]}
    assert "output_ids" in event["requested_outputs"]
    preprocessing = engine_request(triton, stream.id, "preprocessing")
    assert preprocessing["inputs"]["QUERY"] == {"dtype": "BYTES", "shape": [1, 1], "value": [prompt]}


def test_steering_survives_chat_templates_and_refuses_unknown_keys(url):
    """Steering is found inside a rendered chat, the last one counts, and a key that is not known is an error."""
    prompt = f"<|im_start|>user\n{steered(text='old')}<|im_end|>\n<|im_start|>user\n{steered(text='new')}<|im_end|>\n"
    assert texts(ask(url, "ensemble", text_input=prompt, max_tokens=5, exclude_input_in_output=True)) == ["new"]
    (answer,) = ask(url, "ensemble", text_input=steered(txt="x"), max_tokens=5)
    assert answer.error is not None
    assert "unknown steering ['txt']" in answer.error
