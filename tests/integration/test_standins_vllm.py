"""The vLLM and embedding stand-ins behave, on a real Triton, as the real backend does: also where that is awkward."""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tokenizers import Tokenizer

from tests.integration.standin_calls import ask_vllm, generate, steered, streaming, tensor
from tests.standins.repository import build_repository
from triton_openai.demo.make_tokenizer import make_tokenizer
from triton_openai.tritonserver.embedded import EmbeddedTriton

NONE_TYPE = "Error generating stream: 'NoneType' object has no attribute 'lora_name'"


@pytest.fixture(scope="module")
def url(triton):
    return triton.grpc_url


def metadata(triton, model):
    with urllib.request.urlopen(f"{triton.http_url}/v2/models/{model}/config") as answer:
        return json.load(answer)


def texts(answers):
    return [answer.text() for answer in answers]


def one(answers):
    (answer,) = answers
    return answer


def ended(triton, request_id):
    """Wait until a request has ended and return how and after how many tokens."""
    events = triton.record.wait_for(lambda found: any("tokens" in each for each in found), id=request_id)
    return next((each["event"], each["tokens"]) for each in events if "tokens" in each)


def test_the_backend_declares_its_own_tensors(triton):
    """A config that names only the backend is completed to the release's tensors, decoupled and without batches."""
    config = metadata(triton, "vllm_model")
    assert config["backend"] == "vllm"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"]["decoupled"] is True
    assert [each["name"] for each in config["input"] if not each["optional"]] == ["text_input"]
    assert {each["name"]: each["data_type"] for each in config["output"]} == {
        "text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING", "cumulative_logprob": "TYPE_FP32",
        "logprobs": "TYPE_STRING", "num_input_tokens": "TYPE_UINT32", "num_output_tokens": "TYPE_UINT32",
    }  # fmt: skip


def test_a_stream_is_deltas_with_reasons_and_counts(url):
    """Text comes as deltas; the reason is the string "None" until the end; the end of sequence counts as a token."""
    answers = ask_vllm(
        url,
        {"max_tokens": 9},
        text_input=steered(text="one two"),
        stream=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert texts(answers) == ["one", " two", ""]
    assert [answer.text("finish_reason") for answer in answers] == ["None", "None", "stop"]
    assert [answer.tensors["num_output_tokens"].tolist() for answer in answers] == [[1], [1], [1]]
    assert {answer.tensors["num_input_tokens"].shape for answer in answers} == {()}
    assert answers[0].tensors["num_input_tokens"].dtype == np.uint32
    assert [answer.final for answer in answers] == [False, False, True]


def test_without_max_tokens_there_are_sixteen(url):
    """The default length is sixteen tokens, and the reason is then length."""
    answer = one(ask_vllm(url, {}, text_input=steered(text="a ", eos=False), exclude_input_in_output=True,
                          return_finish_reason=True, return_num_output_tokens=True))  # fmt: skip
    assert answer.tensors["num_output_tokens"].tolist() == [16]
    assert answer.text("finish_reason") == "length"


def test_a_split_character_comes_whole_and_late(url):
    """While a character is incomplete the text is empty, though a token is counted; at the length it is dropped."""
    prompt = steered(text="a😀b")
    answers = ask_vllm(url, {"max_tokens": 9}, text_input=prompt, stream=True, return_num_output_tokens=True)
    assert texts(answers) == ["a", "", "", "", "😀", "b", ""]
    assert all(answer.tensors["num_output_tokens"].tolist() == [1] for answer in answers)
    assert "".join(texts(ask_vllm(url, {"max_tokens": 3}, text_input=prompt, stream=True))) == "a"


def test_a_stop_string_is_removed_and_held_back(url):
    """What may become a stop string is held back, so that texts can be empty; the string itself is never sent."""
    prompt = steered(text="a b STOP here c")
    answers = ask_vllm(url, {"max_tokens": 20, "stop": ["STOP here"]}, text_input=prompt, stream=True,
                       return_finish_reason=True, return_num_output_tokens=True)  # fmt: skip
    assert "".join(texts(answers)) == "a b "
    assert texts(answers)[:2] == ["", ""]
    assert answers[0].tensors["num_output_tokens"].tolist() == [1]
    assert answers[-1].text("finish_reason") == "stop"
    kept = ask_vllm(url, {"max_tokens": 20, "stop": "STOP", "include_stop_str_in_output": True},
                    text_input=steered(text="a b STOP here c"), stream=True)  # fmt: skip
    assert "".join(texts(kept)) == "a b STOP"


def test_the_prompt_is_echoed_in_one_piece_or_not_at_all(url):
    """Without a stream the prompt stands first unless excluded; a stream that asks for it is an error."""
    prompt = steered(text="yes")
    assert one(ask_vllm(url, {}, text_input=prompt)).text() == prompt + "yes"
    assert one(ask_vllm(url, {}, text_input=prompt, exclude_input_in_output=True)).text() == "yes"
    refused = one(ask_vllm(url, {}, text_input=prompt, stream=True, exclude_input_in_output=False))
    assert refused.error == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"unknown": 1}, {"best_of": 2}, {"temperature": None}, {"max_tokens": None}, {"seed": None}, {"logprobs": None},
        {"temperature": -1}, {"top_p": 2}, {"max_tokens": 0}, {"structured_outputs": {"json": {}}},
        {"structured_outputs": "{}"}, {"guided_decoding": "{}"},
    ],
)  # fmt: skip
def test_what_the_constructor_refuses_gives_one_text(url, sampling):
    """Unknown keys, nulls and values out of range all give the same error that says nothing."""
    answer = one(ask_vllm(url, sampling, text_input="Hi"))
    assert answer.error == NONE_TYPE
    assert answer.final


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": None},
        {"logit_bias": None},
        {"temperature": "0.5"},
        {"structured_outputs": '{"json": {"type": "object"}}'},
    ],
)
def test_what_the_constructor_takes(url, sampling):
    """Some nulls pass, numbers may be strings, and a guide is a JSON string."""
    assert one(ask_vllm(url, sampling, text_input="Hi")).error is None


def test_sampling_parameters_that_are_no_json_give_a_traceback(url):
    """Malformed sampling parameters fail the whole call, with Triton's text and the model's traceback."""
    answer = one(ask_vllm(url, "not json", text_input="Hi"))
    assert answer.error is not None
    assert answer.error.startswith("Failed to process the request(s) for model 'vllm_model")
    assert "JSONDecodeError" in answer.error
    assert ".py(" in answer.error


def test_errors_of_the_engine_carry_its_reason_or_none(url):
    """A ValueError's text is passed on; anything else leaves an empty reason, before or after the first token."""
    long = one(ask_vllm(url, {}, text_input="word " * 2100))
    assert long.error is not None
    assert long.error.startswith("Error generating stream: The decoder prompt (length ")
    assert "is longer than the maximum model length of 2048" in long.error
    wide = one(ask_vllm(url, {"logprobs": 50}, text_input="Hi"))
    assert (
        wide.error == "Error generating stream: Requested sample logprobs of 50, which is greater than max allowed: 20"
    )
    assert one(ask_vllm(url, {"logit_bias": {"5": 1}}, text_input="Hi")).error == "Error generating stream: "
    good, failed = ask_vllm(url, {}, text_input=steered(text="a b", fail_at=1, error="oops"), stream=True)
    assert good.text() == "a"
    assert failed.error == "Error generating stream: oops"
    assert failed.final


def test_a_request_without_a_prompt_passes_triton_and_fails_late(url):
    """With another input in place of text_input the backend itself stumbles."""
    answer = one(ask_vllm(url, {}))
    assert answer.error == "Error generating stream: 'NoneType' object has no attribute 'as_numpy'"


def test_loras_are_accepted_by_name(url):
    """A known name passes, an unknown one is answered with the list, and without the feature nothing passes."""
    assert one(ask_vllm(url, {"lora_name": "alpha"}, text_input="Hi")).error is None
    assert one(ask_vllm(url, {"lora_name": None}, text_input="Hi")).error is None
    unknown = one(ask_vllm(url, {"lora_name": "x"}, text_input="Hi"))
    assert unknown.error == "LoRA x is not supported, we currently support ['alpha', 'beta']"
    off = one(ask_vllm(url, {"lora_name": "x"}, model="vllm_embedding", text_input="Hi"))
    assert off.error == "LoRA feature is not enabled."


def test_log_probabilities_are_json_for_the_new_tokens(url):
    """Each response lists its own new tokens, the sampled one first; without the parameter the JSON is null."""
    answers = ask_vllm(url, {"max_tokens": 2, "logprobs": 2}, text_input=steered(text="one two"), stream=True,
                       return_logprobs=True, return_cumulative_logprob=True)  # fmt: skip
    for answer, text in zip(answers, ("one", " two"), strict=True):
        (entry,) = json.loads(answer.text("logprobs"))
        assert len(entry) == 2
        first = next(iter(entry.values()))
        assert first["decoded_token"] == text
        assert first["rank"] == 1
    assert answers[1].tensors["cumulative_logprob"].item() < answers[0].tensors["cumulative_logprob"].item()
    bare = one(ask_vllm(url, {}, text_input="Hi", return_logprobs=True, return_cumulative_logprob=True))
    assert bare.text("logprobs") == "null"
    assert math.isnan(bare.tensors["cumulative_logprob"].item())


def test_without_the_tensor_the_request_parameters_count(triton, url):
    """Request parameters become sampling keys when the tensor is absent, and even an HTTP id is then one too many."""
    assert one(ask_vllm(url, None, text_input="Hi", parameters={"max_tokens": "2"})).error is None
    assert one(ask_vllm(url, None, text_input="Hi", parameters={"headers": "x"})).error == NONE_TYPE
    assert one(ask_vllm(url, {}, text_input="Hi", parameters={"headers": "x"})).error is None
    _, body = generate(triton.http_url, "vllm_model", stream=False, text_input="Hi", id="mine")
    assert NONE_TYPE in body[0]["error"]


def test_a_cancelled_stream_is_aborted_at_an_output(triton, url):
    """A client that leaves is noticed when the engine gives its next output, streaming or not."""
    for stream in (True, False):
        prompt = steered(text="word ", repeat=1000, delay_ms=20)
        with streaming(url, "vllm_model", batched=False, text_input=prompt, stream=stream,
                       sampling_parameters='{"max_tokens": 1000}') as call:  # fmt: skip
            triton.record.wait_for(id=call.id, event="request")
            call.cancel()
            event, tokens = ended(triton, call.id)
        assert event == "cancelled"
        assert 2 <= tokens < 1000


def test_over_http_only_a_stream_that_streams_is_cancelled(triton):
    """A dropped connection is noticed when a write fails: never for a request whose model does not stream."""
    address = triton.http_url.removeprefix("http://")
    for stream, event in ((True, "cancelled"), (False, "finished")):
        request_id = f"dropped-{stream}"
        # What is cancelled would go on for long; what is not has to come to its end here.
        words = 1500 if stream else 40
        body = {"text_input": steered(text="word ", repeat=words, delay_ms=10), "stream": stream, "id": request_id,
                "sampling_parameters": json.dumps({"max_tokens": words})}  # fmt: skip
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("POST", "/v2/models/vllm_model/generate_stream", json.dumps(body))
        triton.record.wait_for(id=request_id, event="request")
        connection.close()
        assert ended(triton, request_id)[0] == event


def test_a_silent_engine_is_not_aborted(triton, url):
    """An engine that gives no output does not notice that the client has gone, while others are served."""
    with streaming(url, "vllm_model", batched=False, text_input=steered(text="a b", hang_at=1), stream=True) as call:
        assert call.take().text() == "a"
        call.cancel()
        assert one(ask_vllm(url, {}, text_input=steered(text="x"), exclude_input_in_output=True)).text() == "x"
        assert not [each for each in triton.record.events(id=call.id) if each["event"] != "request"]


def test_many_streams_run_in_one_instance(url):
    """More than sixty streams are served at the same time, each with its own text."""

    def stream(number):
        return "".join(texts(ask_vllm(url, {}, text_input=steered(text=f"this is {number}", delay_ms=5), stream=True)))

    with ThreadPoolExecutor(80) as pool:
        assert list(pool.map(stream, range(80))) == [f"this is {number}" for number in range(80)]


def test_only_requested_outputs_come(url):
    """An additional output needs both its flag and a place among the requested outputs."""
    answer = one(ask_vllm(url, {}, text_input="Hi", return_finish_reason=True, outputs=["text_output"]))
    assert set(answer.tensors) == {"text_output"}
    assert set(one(ask_vllm(url, {}, text_input="Hi")).tensors) == {"text_output"}


def test_an_older_release_declares_less_and_says_more(tmp_path):
    """The backend as of r24.12 has no embedding input, and names the key that it does not know."""
    repository = build_repository(tmp_path, models=["vllm_model_r24_12"])
    server = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
    server.start()
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/vllm_model_r24_12/config") as answer:
            assert "embedding_request" not in {each["name"] for each in json.load(answer)["input"]}
        answer = one(ask_vllm(server.grpc_url, {"foo": 1}, model="vllm_model_r24_12", text_input="Hi"))
        assert answer.error == "Error generating stream: Unexpected keyword argument 'foo'"
    finally:
        server.stop(timeout=0.1)


def embedding(url, request, **inputs):
    return one(
        ask_vllm(url, None, model="vllm_embedding", text_input="", embedding_request=json.dumps(request), **inputs)
    )


def test_embeddings_come_as_json(url, triton):
    """An embedding request gives a JSON array and counts of rank 0; token ids and dimensions are understood."""
    answer = embedding(url, {"input": "hello"}, return_num_input_tokens=True, return_num_output_tokens=True)
    vector = json.loads(answer.text())
    assert len(vector) == 64
    assert math.isclose(sum(value * value for value in vector), 1.0, rel_tol=1e-5)
    assert answer.tensors["num_input_tokens"].shape == ()
    assert answer.tensors["num_output_tokens"].item() == 0
    ids = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json")).encode("hello").ids
    assert json.loads(embedding(url, {"input": ids}).text()) == vector
    assert len(json.loads(embedding(url, {"input": "hello", "pooling_params": {"dimensions": [8]}}).text())) == 8


def test_embedding_errors(url):
    """Malformed requests give the texts of the original, and each model refuses the other's task."""
    prefix = "Error generating stream: "
    assert embedding(url, {"input": ["a", "b"]}).error == prefix
    assert embedding(url, {"input": []}).error == prefix
    wrong = embedding(url, {"input": "a", "pooling_params": {"dimensions": 8}})
    assert wrong.error == prefix + "'int' object is not subscriptable"
    empty = embedding(url, {"input": "a", "pooling_params": {"dimensions": []}})
    assert empty.error == prefix + "list index out of range"
    text = one(ask_vllm(url, {}, model="vllm_embedding", text_input="Hi"))
    assert text.error == prefix + "Model vllm_embedding does not support 'generate' request"
    other = one(ask_vllm(url, None, text_input="", embedding_request='{"input": "a"}'))
    assert other.error == prefix + "Model vllm_model does not support 'embed' request"


def test_the_plain_embedding_model_takes_batches(url):
    """Texts go in as a batch, one unit row each comes out, and similar texts lie close."""
    values = np.array([["a quiet morning"], ["a quiet mornings"], ["ZXQJ 0987"]], dtype=np.object_)
    given = grpcclient.InferInput("text", values.shape, "BYTES")
    given.set_data_from_numpy(values)
    with grpcclient.InferenceServerClient(url.removeprefix("grpc://")) as client:
        rows = client.infer("text_embedding", [given]).as_numpy("embedding")
        alone = client.infer("text_embedding", [tensor("text", "a quiet morning", batched=True)]).as_numpy("embedding")
    assert rows.shape == (3, 64)
    assert rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert np.allclose(rows[0], alone[0])
    assert rows[0] @ rows[1] > 0.8 > rows[0] @ rows[2]


def test_the_tokenizer_is_made_by_its_script(triton):
    """The tokenizer that is shipped is what the script makes; characters come back whole; BOS is added on demand."""
    made = make_tokenizer()
    shipped = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))
    assert json.loads(made.to_str()) == json.loads(shipped.to_str())
    config = json.loads((triton.tokenizer / "tokenizer_config.json").read_text())
    assert shipped.encode("Hi").tokens[0] == config["bos_token"]
    text = "naïve 😀\n\t<tag> 中"
    assert shipped.decode(shipped.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert config["added_tokens_decoder"][str(shipped.token_to_id(config["eos_token"]))]["special"]
