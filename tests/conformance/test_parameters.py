"""
One table of sampling parameters: what a client sends, and with which tensors each model gets it, over both transports.

The tensors are read from the stand-ins' own record: name, dtype, shape and value as Triton handed them over.
"""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import (
    ANSWERS_AT_ONCE,
    BLS,
    ENGINES,
    TRTLLM,
    TRTLLM_AND_VLLM,
    ask,
    id_of,
    in_session_loop,
    inputs_of,
    steered,
)
from tests.proxy_fixture import TRANSPORTS, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import DefaultParameters, ModelDefaults

pytestmark = in_session_loop

PROMPT = steered(text="one two")
# What the LLM API's model has no inputs for.
LACKING = {"tensorrt_llm_llmapi": ("min_tokens", "repetition_penalty")}
# Those that are sent stop strings; for the others they are matched here alone.
STOPPING = tuple(model for model in TRTLLM_AND_VLLM if model not in ("tensorrt_llm", "tensorrt_llm_llmapi"))
# What an engine behind an ensemble calls the inputs; the older one has older names.
_ENGINE_NAMES = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "request_output_len": "max_tokens",
    "random_seed": "seed",
    "min_length": "min_tokens",
}
_SAMPLING = {
    "max_tokens", "temperature", "top_p", "top_k", "seed", "min_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
}  # fmt: skip
# One number per request row; engines that declare a reshape see it without the inner dimension.
_RESHAPED = {"ensemble": {1}, "ensemble_nonstreaming": {1}, "ensemble_legacy": {1}}


# What the TensorRT-LLM models are sent where the request leaves it out: without it they decode greedily.
SAMPLED = {"temperature": ("FP32", 1.0), "top_p": ("FP32", 1.0), "top_k": ("INT32", 0)}
GREEDY: Mapping[str, tuple[str, Any] | None] = {**dict.fromkeys(SAMPLED), "top_k": ("INT32", 1)}


def single(number: float) -> float:
    """Return *number* as a float32 holds it."""
    return array("f", [number])[0]


@dataclass(frozen=True)
class Row:
    """
    *fields* of a request, the tensors of the TensorRT-LLM models (beside :data:`SAMPLED`; ``None`` for those that are
    not sent), and the keys of vLLM's JSON.
    """

    name: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, Any] | None]
    keys: Mapping[str, Any]


ROWS = (
    Row("nothing", {}, {"max_tokens": ("INT32", 512)}, {"max_tokens": 512}),
    Row("nulls", dict.fromkeys(["max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream"]), {"max_tokens": ("INT32", 512)}, {"max_tokens": 512}),
    Row("largest max_tokens", {"max_tokens": 2**31 - 1}, {"max_tokens": ("INT32", 2**31 - 1)}, {"max_tokens": 2**31 - 1}),
    Row("temperature", {"temperature": 0.7}, {"temperature": ("FP32", single(0.7))}, {"temperature": 0.7}),
    Row("whole temperature", {"temperature": 2}, {"temperature": ("FP32", 2.0)}, {"temperature": 2.0}),
    # The executor takes no temperature of 0.
    Row("temperature 0", {"temperature": 0}, GREEDY, {"temperature": 0.0}),
    Row("temperature 0 and top_p", {"temperature": 0, "top_p": 0.5}, GREEDY, {"temperature": 0.0, "top_p": 0.5}),
    Row("temperature and top_p", {"temperature": 0.5, "top_p": 0.1}, {"temperature": ("FP32", 0.5), "top_p": ("FP32", single(0.1))}, {"temperature": 0.5, "top_p": 0.1}),
    Row("temperature and top_k", {"temperature": 0.5, "top_k": 40}, {"temperature": ("FP32", 0.5), "top_k": ("INT32", 40)}, {"temperature": 0.5, "top_k": 40}),
    Row("top_k off", {"top_k": -1}, {"top_k": ("INT32", 0)}, {"top_k": -1}),
    Row("seed 0", {"seed": 0}, {"seed": ("UINT64", 0)}, {"seed": 0}),
    Row("large seed", {"seed": 2**63 - 1}, {"seed": ("UINT64", 2**63 - 1)}, {"seed": 2**63 - 1}),
)  # fmt: skip


# Those that get vLLM's sampling parameters as JSON.
JSON = ("vllm_model", "companion")


async def sampling_of(triton: TestTriton, model: str, request_id: str) -> dict[str, Any]:
    """Return the sampling with which a model was asked, in the words of the table; shapes are checked on the way."""
    if model == "vllm_model":
        inputs = await inputs_of(triton, model, request_id)
        assert {("BYTES", (1,))} == {
            (inputs[name]["dtype"], tuple(inputs[name]["shape"])) for name in ("text_input", "sampling_parameters")
        }
        return dict(json.loads(inputs["sampling_parameters"]["value"][0]))
    if model == "companion":
        inputs = await inputs_of(triton, model, request_id)
        return dict(json.loads(inputs["request"]["value"][0])["sampling"])
    inputs = await inputs_of(triton, model if model in BLS else ENGINES[model], request_id)
    found = {}
    for name, tensor in inputs.items():
        known = _ENGINE_NAMES.get(name, name).removeprefix("sampling_param_")
        if known in _SAMPLING:
            legacy_limit = model == "ensemble_legacy" and known == "max_tokens"
            assert ([1, 1] if model in BLS or legacy_limit else [1]) == tensor["shape"], name
            found[known] = (tensor["dtype"], *tensor["value"])
    return found


def expected_of(row: Row, model: str) -> dict[str, Any]:
    """Return what *model* shall get."""
    if model in JSON:
        return dict(row.keys)
    wanted = {"max_tokens": ("INT32", 512), **SAMPLED, **row.tensors}
    return {name: tensor for name, tensor in wanted.items() if tensor is not None}


@every_case("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("model", [*TRTLLM_AND_VLLM, "companion"])
async def test_parameters_arrive(proxy, triton, model, row):
    """Parameters reach the model under their names, with their dtypes and ranks, and nothing else does."""
    answer = await ask(proxy, "completions", model, PROMPT, **row.fields)

    assert 200 == answer.status, answer.body
    expected = {"max_tokens": 512, **row.keys} if model in JSON else expected_of(row, model)
    found = await sampling_of(triton, model, id_of(answer))
    if row.fields.get("seed") is None:
        # Drawn for engines that would use the same one every time.
        assert (model not in JSON) == (found.pop("seed", None) is not None)
    assert expected == found


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", [*TRTLLM_AND_VLLM, "companion"])
async def test_both_transports_send_the_same_tensors(proxies, triton, model, streamed):
    """A request with everything in it gives the model the same tensors over HTTP and over gRPC: all of them."""
    everything = {
        "max_tokens": 9, "temperature": 0.3, "top_p": 0.9, "top_k": 5, "seed": 11, "min_tokens": 1, "stop": ["é", "x\n", "\""],
        "frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1, "stream": streamed,
    }  # fmt: skip
    for name in LACKING.get(model, ()):
        del everything[name]
    prompt = steered('Hé 😀 \\ "quoted"\n\ttab', text="one")
    first = "preprocessing_legacy" if model == "ensemble_legacy" else "preprocessing"
    asked_of = [first, ENGINES[model]] if model.startswith("ensemble") else [model]

    seen = []
    for transport in TRANSPORTS:
        answer = await ask(proxies[transport], "completions", model, prompt, **everything)
        assert 200 == answer.status, answer.body
        seen.append([await inputs_of(triton, name, id_of(answer)) for name in asked_of])

    over_http, over_grpc = seen
    assert over_http == over_grpc


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", TRTLLM_AND_VLLM)
async def test_flags_are_always_sent(proxy, triton, model, streamed):
    """Streaming, the prompt's exclusion and the counts are asked for explicitly, where the model declares them."""
    answer = await ask(proxy, "completions", model, PROMPT, max_tokens=2, stream=streamed)

    inputs = await inputs_of(triton, model if model in BLS else ENGINES[model], id_of(answer))
    flags = {name: tensor["value"] for name, tensor in inputs.items() if tensor["dtype"] == "BOOL"}
    stream = "stream" if model in (*BLS, "vllm_model") else "streaming"
    counts = {"return_num_input_tokens": [True], "return_num_output_tokens": [True]}
    flag = streamed and model != "ensemble_nonstreaming" if model in ANSWERS_AT_ONCE else True
    expected = {stream: [flag], "exclude_input_in_output": [True], **counts}
    if model == "ensemble_legacy":
        expected = {stream: [flag]}
    elif model == "tensorrt_llm":
        # Ids are counted here.
        expected = {stream: [True], "exclude_input_in_output": [True]}
    elif model == "tensorrt_llm_llmapi":
        expected = {stream: [True], "sampling_param_exclude_input_from_output": [True], "return_finish_reason": [True]}
    elif model == "vllm_model":
        # What the client wants whole comes whole.
        expected = {
            stream: [streamed],
            "exclude_input_in_output": [True],
            "return_finish_reason": [True],
            **counts,
        }
    assert expected == flags


@every_case("stop", ["x", ["x"], ["x", "yy", "é"]])
@pytest.mark.parametrize("model", STOPPING)
async def test_stop_strings_arrive(proxy, triton, model, stop):
    """Stop strings go to the backend as well, one or several, so that it need not work beyond them."""
    answer = await ask(proxy, "completions", model, PROMPT, max_tokens=2, stop=stop)

    words = [stop] if isinstance(stop, str) else stop
    if model == "vllm_model":
        inputs = await inputs_of(triton, model, id_of(answer))
        assert words == json.loads(inputs["sampling_parameters"]["value"][0])["stop"]
        return
    if model in BLS:
        tensor = (await inputs_of(triton, model, id_of(answer)))["stop_words"]
    else:
        preprocessing = "preprocessing_legacy" if model == "ensemble_legacy" else "preprocessing"
        tensor = (await inputs_of(triton, preprocessing, id_of(answer)))["STOP_WORDS_DICT"]
    assert {"dtype": "BYTES", "shape": [1, len(words)], "value": words} == tensor


@pytest.mark.parametrize("model", [*TRTLLM_AND_VLLM, "companion"])
async def test_max_completion_tokens_wins(proxy, triton, model):
    """In chat the newer name counts, alone or beside the older one."""
    answers = await asyncio.gather(
        ask(proxy, "chat", model, PROMPT, max_completion_tokens=5),
        ask(proxy, "chat", model, PROMPT, max_completion_tokens=5, max_tokens=7),
    )

    for answer in answers:
        sampling = await sampling_of(triton, model, id_of(answer))
        assert sampling["max_tokens"] in (5, ("INT32", 5))


@pytest.mark.parametrize("model", [*TRTLLM_AND_VLLM, "companion"])
async def test_defaults_of_the_settings(triton, model):
    """What a client leaves out comes from the settings; what it sends wins."""
    settings = proxy_settings(triton, "http")
    defaults = DefaultParameters(max_tokens=33, temperature=0.5, top_p=0.5, seed=3, stop=("zz",))
    settings = changed(settings, defaults={"default_parameters": defaults})
    assert isinstance(settings.defaults, ModelDefaults)
    async with serving(settings) as proxy:
        left_out, sent = await asyncio.gather(
            ask(proxy, "completions", model, PROMPT), ask(proxy, "completions", model, PROMPT, seed=4, max_tokens=2)
        )
    if model == "vllm_model":
        # The backend leaves the stop string in, so that the one that ended the answer can be told.
        common = {"temperature": 0.5, "top_p": 0.5, "stop": ["zz"], "include_stop_str_in_output": True}
        expected = {**common, "max_tokens": 33, "seed": 3}, {**common, "max_tokens": 2, "seed": 4}
    elif model == "companion":
        # Stop strings are looked for here.
        common = {"temperature": 0.5, "top_p": 0.5}
        expected = {**common, "max_tokens": 33, "seed": 3}, {**common, "max_tokens": 2, "seed": 4}
    else:
        floats = {**SAMPLED, "temperature": ("FP32", 0.5), "top_p": ("FP32", 0.5)}
        expected = (
            {**floats, "max_tokens": ("INT32", 33), "seed": ("UINT64", 3)},
            {**floats, "max_tokens": ("INT32", 2), "seed": ("UINT64", 4)},
        )
    assert expected[0] == await sampling_of(triton, model, id_of(left_out))
    assert expected[1] == await sampling_of(triton, model, id_of(sent))


@pytest.mark.parametrize("room", [None, 60, 2000])
async def test_what_the_models_authors_recommend(triton, tmp_path, room):
    """
    The values of a model's authors fill in what the client leaves out, as far as the model takes them and has room.
    """
    recommended = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5, "min_p": 0.25, "max_new_tokens": 90}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    settings = changed(
        proxy_settings(triton, "http"), defaults={"generation_config": str(tmp_path), "max_model_len": room}
    )
    async with serving(settings) as proxy:
        for model in ("ensemble", "ensemble_legacy", "tensorrt_llm", "tensorrt_llm_llmapi", *JSON):
            await check_recommended(proxy, triton, model, room)


async def check_recommended(proxy: Proxy, triton: TestTriton, model: str, room: int | None) -> None:
    """Check what *model* gets of what its authors recommend, with and without values of the client's own."""
    left_out, sent = await asyncio.gather(
        ask(proxy, "completions", model, PROMPT),
        ask(proxy, "completions", model, PROMPT, temperature=1.5, top_k=-1, max_tokens=9),
    )
    assert [200, 200] == [left_out.status, sent.status], model
    found, other = [await sampling_of(triton, model, id_of(answer)) for answer in (left_out, sent)]
    limit = 90 if room != 60 else 60 - left_out.json["usage"]["prompt_tokens"]
    if model in JSON:
        keys = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5, "min_p": 0.25}
        assert ({**keys, "max_tokens": limit}, 1.5, -1, 9) == (
            found,
            other["temperature"],
            other["top_k"],
            other["max_tokens"],
        )
        return
    expected: dict[str, Any] = {
        **SAMPLED,
        "temperature": ("FP32", 0.5),
        "top_k": ("INT32", 20),
        "max_tokens": ("INT32", limit),
    }
    if "repetition_penalty" not in LACKING.get(model, ()):
        expected["repetition_penalty"] = ("FP32", 1.5)
    del found["seed"]
    assert expected == found, model
    assert (("FP32", 1.5), ("INT32", 0), ("INT32", 9)) == (other["temperature"], other["top_k"], other["max_tokens"])


async def test_the_default_limit_is_a_setting(triton):
    """The limit of requests without one can be changed for all models."""
    settings = changed(proxy_settings(triton, "http"), api={"default_max_tokens": 21})
    async with serving(settings) as proxy:
        answer = await ask(proxy, "chat", "ensemble", PROMPT)

    assert ("INT32", 21) == (await sampling_of(triton, "ensemble", id_of(answer)))["max_tokens"]


# Values that the inputs of a model cannot hold: nothing is wrapped or clamped.
TOO_LARGE = [
    *((model, "seed", 2**64, "integer_above_max_value") for model in TRTLLM),
    *((model, "seed", -1, "integer_below_min_value") for model in TRTLLM),
    ("vllm_model", "seed", 2**63, "integer_above_max_value"),
    ("vllm_model", "seed", -(2**63) - 1, "integer_below_min_value"),
    *((model, "max_tokens", 2**31, "integer_above_max_value") for model in TRTLLM_AND_VLLM),
    *((model, "top_k", 2**31, "integer_above_max_value") for model in TRTLLM_AND_VLLM),
    *((model, "repetition_penalty", 1e39, "invalid_request") for model in TRTLLM if model not in LACKING),
]


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model, name, value, code", TOO_LARGE)
async def test_values_that_do_not_fit_are_refused(proxy, model, name, value, code, streamed):
    """A number beyond what the model's input holds is a 400 that names the parameter."""
    answer = await ask(proxy, "completions", model, PROMPT, **{name: value}, stream=streamed)

    assert 400 == answer.status
    assert (name, code) == (answer.error["param"], answer.error["code"])


async def test_the_name_that_the_client_used_is_refused(proxy):
    """A limit that does not fit is refused under the name under which it came."""
    answer = await ask(proxy, "chat", "ensemble", PROMPT, max_completion_tokens=2**31)

    assert (400, "max_completion_tokens") == (answer.status, answer.error["param"])


@every_case("value", [2**63, 2**64 - 1])
@pytest.mark.parametrize("model", TRTLLM)
async def test_the_largest_seeds_arrive(proxy, triton, model, value):
    """A seed beyond the signed range is a good UINT64 over both transports."""
    answer = await ask(proxy, "completions", model, PROMPT, seed=value)

    assert 200 == answer.status, answer.body
    assert ("UINT64", value) == (await sampling_of(triton, model, id_of(answer)))["seed"]


@every_case("value", [-1, -(2**63)])
async def test_vllm_takes_negative_seeds(proxy, triton, value):
    """vLLM's seed is signed."""
    answer = await ask(proxy, "completions", "vllm_model", PROMPT, seed=value)

    assert 200 == answer.status, answer.body
    assert value == (await sampling_of(triton, "vllm_model", id_of(answer)))["seed"]


REFUSED = [
    ("completions", "logprobs", 1),
    ("chat", "tools", [{"type": "function", "function": {"name": "f"}}]),
    ("chat", "min_p", 0.1),
    ("chat", "modalities", ["text", "audio"]),
    ("chat", "audio", {"voice": "x", "format": "wav"}),
    ("chat", "reasoning_effort", "low"),
    ("chat", "web_search_options", {}),
    ("completions", "prompt_logprobs", 1),
    ("completions", "suffix", "end"),
    ("completions", "return_token_ids", True),
    ("completions", "stop_token_ids", [1]),
    ("completions", "priority", 1),
    ("chat", "chat_template", "{{ messages }}"),
]


@every_case("endpoint, name, value", REFUSED)
async def test_what_cannot_be_honoured_is_refused(proxies, endpoint, name, value):
    """A parameter that would change the answer is a 400 with its name, never silence."""
    answer = await ask(proxies["http"], endpoint, "ensemble", PROMPT, **{name: value})

    assert 400 == answer.status, answer.body
    assert (name, "unsupported_parameter") == (answer.error["param"], answer.error["code"])


ACCEPTED = [
    ("chat", {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}),
    ("chat", {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "response_format": {"type": "text"}}),
    (
        "chat",
        {"logit_bias": {"5": 0}, "best_of": 1.0, "n": 1.0, "top_logprobs": 0.0, "prompt": None},
    ),
    ("chat", {"parallel_tool_calls": True, "tool_choice": "auto", "prompt_cache_key": "k", "prediction": None}),
    ("chat", {"verbosity": "medium", "modalities": ["text"], "logit_bias": {}, "a_field_of_tomorrow": {"x": [1]}}),
    ("completions", {"n": 1, "best_of": 1, "echo": False, "suffix": "", "user": "me", "logit_bias": {}}),
    ("completions", {"frequency_penalty": None, "logprobs": None, "stop": None, "suffix": None}),
]


@every_case("endpoint, fields", ACCEPTED)
@pytest.mark.parametrize("model", TRTLLM_AND_VLLM)
async def test_harmless_parameters_are_accepted(proxies, triton, model, endpoint, fields):
    """What changes no answer, and what nobody knows, is accepted and reaches no model."""
    answer = await proxies["http"].post(
        "/v1/chat/completions" if endpoint == "chat" else "/v1/completions",
        {
            "model": model,
            "max_tokens": 2,
            **({"messages": [{"role": "user", "content": PROMPT}]} if endpoint == "chat" else {"prompt": PROMPT}),
            **fields,
        },
    )

    assert 200 == answer.status, answer.body
    sampling = await sampling_of(triton, model, id_of(answer))
    sampling.pop("seed", None)
    assert ({"max_tokens": 2} if model == "vllm_model" else {"max_tokens": ("INT32", 2), **SAMPLED}) == sampling


OUT_OF_RANGE = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"), ("max_tokens", True),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("top_p", -0.1), ("top_p", 1.1), ("top_k", -2), ("min_tokens", -1), ("min_tokens", 513),
    ("frequency_penalty", 2.5), ("presence_penalty", -2.5), ("repetition_penalty", 0),
    ("seed", 1.5), ("seed", "x"), ("seed", True), ("stop", ""), ("stop", ["a", ""]), ("stop", list("abcde")), ("stop", [1]), ("stop", 1),
    ("stream", "yes"), ("stream_options", {"include_usage": True}), ("n", 0), ("n", 129),
]  # fmt: skip


@every_case("name, value", OUT_OF_RANGE)
async def test_values_outside_the_documented_ranges_are_refused(proxies, name, value):
    """Ranges and types are those that OpenAI documents; what is outside is a 400 with the parameter's name."""
    answer = await ask(proxies["http"], "completions", "ensemble", PROMPT, **{name: value})

    assert 400 == answer.status, answer.body
    assert name == answer.error["param"].partition("[")[0]


async def test_strict_parameters_refuse_unknown_fields(triton):
    """With the setting on, a field that nobody knows is a 400 with its name."""
    settings = changed(proxy_settings(triton, "http"), api={"strict_parameters": True})
    async with serving(settings) as proxy:
        unknown = await ask(proxy, "chat", "ensemble", PROMPT, max_tokens=2, tempratur=1)
        known = await ask(proxy, "chat", "ensemble", PROMPT, max_tokens=2, temperature=1, user="me")

    assert (400, "tempratur", "unknown_parameter") == (unknown.status, unknown.error["param"], unknown.error["code"])
    assert 200 == known.status


@every_case("temperature, status, top_k", [(0.5, 400, None), (0, 200, [1]), (1, 200, [0])])
async def test_an_old_bls_drops_the_temperature(proxy, triton, temperature, status, top_k):
    """Up to 0.12 it is declared and reaches nobody: only values that can be had without it are taken."""
    answer = await ask(proxy, "completions", "tensorrt_llm_bls_legacy", PROMPT, temperature=temperature)

    assert status == answer.status, answer.body
    if status == 400:
        assert ("temperature", "unsupported_parameter") == (answer.error["param"], answer.error["code"])
        return
    inputs = await inputs_of(triton, "tensorrt_llm_bls_legacy", id_of(answer))
    assert top_k == inputs.get("top_k", {}).get("value")
