"""
Every parameter on every adapter over every transport: what reached the model, and what reached the client.

What shall happen is read from the adapters' own tables; `tests.conformance.parameter_cases` has the values.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.cases import every_case
from tests.conformance.calls import MODELS, ask, id_of, in_session_loop, inputs_of, prompt_input, steered
from tests.conformance.parameter_cases import CASES, Case
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.adapters._common.base import Adapter, Rule
from triton_openai.adapters._common.registry import BUILT_IN, Registry
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.generation import Generation
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = in_session_loop
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "everything.jinja"
JSON = "sampling_parameters"
#: What a request is about, and how it is answered.
FRAME = {"model", "messages", "prompt", "stream", "stream_options"}
#: Called for every token, so they keep no record.
UNRECORDED = ("postprocessing", "postprocessing_legacy")

#: The others are models of the same adapters with the same inputs.
_VARIANTS = ("ensemble_nonstreaming", "tensorrt_llm_bls_delta")
TABLED = (*(model for model in MODELS if model not in _VARIANTS), "text_model")

Sent = dict[str, Any]


class Service:
    """The service over one transport, with answers that several cases compare with."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self._plain: dict[str, Answer] = {}

    def adapter(self, model: str) -> Adapter:
        """Return what answers for *model*."""
        return self.proxy.models.served[model].adapter

    async def plain(self, model: str, case: Case) -> Answer:
        """Return the answer to the case's request without its parameter."""
        key = json.dumps([model, case.endpoint, case.beside, case.order])
        if key not in self._plain:
            self._plain[key] = await ask(self.proxy, case.endpoint, model, steered(**case.order), **case.beside)
        return self._plain[key]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def service(request: pytest.FixtureRequest, triton: TestTriton) -> AsyncIterator[Service]:
    """The service over each transport in turn, with a chat template that reads everything a request can give it."""
    settings = changed(proxy_settings(triton, request.param), defaults={"chat_template": str(TEMPLATE)})
    async with serving(settings, transport=request.param) as proxy:
        await proxy.ready()
        yield Service(proxy)


@pytest.fixture(scope="module")
def tokenizer(triton: TestTriton) -> Tokenizer:
    """The tokenizer of all models."""
    return Tokenizer.load(str(triton.tokenizer))


def of_config(adapter: Adapter, step_inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what an ensemble's steps got from the client (and not from each other), by the ensemble's own names."""
    found = {}
    for step in adapter.config.steps:
        for name, source in step.input_map.items():
            if source in adapter.config.inputs and name in step_inputs.get(step.model, {}):
                found[source] = step_inputs[step.model][name]
    return found


async def received(triton: TestTriton, tokenizer: Tokenizer, adapter: Adapter, request_id: str) -> Sent:
    """
    Return what the model got, by the names of its config: dtype and values of its inputs, the values of vLLM's JSON,
    and the prompt as text.
    """
    config = adapter.config
    if config.steps:
        models = [step.model for step in config.steps if step.model not in UNRECORDED]
        inputs = of_config(adapter, {model: await inputs_of(triton, model, request_id) for model in models})
    else:
        inputs = dict(await inputs_of(triton, config.name, request_id))
    if adapter.name == "companion":
        return _companion_received(tokenizer, json.loads(inputs["request"]["value"][0]))
    sent: Sent = {name: (tensor["dtype"], tensor["value"]) for name, tensor in inputs.items()}
    if "input_ids" in sent:
        del sent["input_lengths"]
        sent["prompt"] = tokenizer.decode(sent.pop("input_ids")[1], skip_special_tokens=False)
    else:
        sent["prompt"] = sent.pop(prompt_input(inputs))[1][0]
    if JSON in sent:
        keys = json.loads(sent.pop(JSON)[1][0])
        sent |= {f"{JSON}.{name}": value for name, value in keys.items()}
    return sent


def _companion_received(tokenizer: Tokenizer, body: Mapping[str, Any]) -> Sent:
    """Return what the companion model got: the values of its JSON, and the prompt as text."""
    sent: Sent = {"prompt": tokenizer.decode(body["ids"], skip_special_tokens=False)}
    if "priority" in body:
        sent["priority"] = body["priority"]
    for part in ("sampling", "return"):
        sent |= {f"{part}.{name}": value for name, value in body.get(part, {}).items()}
    return sent


def _companion_expected(name: str, wanted: Sent) -> Sent:
    """Return *wanted*, in the words of vLLM's backend where the case has those, in the companion's."""
    expected: Sent = {}
    for target, value in wanted.items():
        if target == "priority" or target.startswith(("sampling.", "return.")):
            expected[target] = value
        elif target == f"{JSON}.logprobs" and name not in ("stop_token_ids", "return_token_ids"):
            expected["return.logprobs"] = value
        elif target == f"{JSON}.structured_outputs":
            expected["sampling.structured_outputs"] = json.loads(value)
        elif target == f"{JSON}.max_tokens":
            expected["sampling.max_tokens"] = value
    return expected


def as_sent(adapter: Adapter, target: str, value: Any) -> Any:
    """Return *value* as `received` gives it: dtype and flat values of an input, or a value of vLLM's JSON."""
    if target.startswith(JSON):
        return value
    datatype = adapter.config.inputs[target].datatype
    values = value if isinstance(value, list) else [value]
    return datatype, array("f", values).tolist() if datatype == "FP32" else values


def expected_of(name: str, case: Case, adapter: Adapter) -> Sent | None:
    """Return what the parameter changes in what the model gets; ``None``: the model refuses it."""
    row = next((row for row in adapter.parameters if row.name == name), None)
    refused = {each.name for each in adapter.parameters if each.rule is Rule.REFUSED}
    if case.refused or not case.can(adapter.capabilities) or not refused.isdisjoint({name, *case.beside}):
        return None
    wanted = dict(case.sent)
    if row is not None and row.rule is Rule.MAPPED:
        assert row.target is not None
        wanted.setdefault(row.target, case.value)
        if row.datatype is not None and not row.target.startswith((JSON, "sampling.", "return.")):
            assert row.datatype == adapter.config.inputs[row.target].datatype
    if adapter.name == "companion":
        return _companion_expected(name, wanted)
    has_json = JSON in adapter.config.inputs
    if name == "logprobs" and adapter.name.startswith("trtllm-"):
        # Only a stream says which text is which token's, so that the model is asked for one.
        wanted["stream"] = True
    return {
        target: as_sent(adapter, target, value)
        for target, value in wanted.items()
        if target not in case.same and (has_json if target.startswith(JSON) else target in adapter.config.inputs)
    }


def text_of_first(case: Case, answer: Answer) -> str:
    """Return the text of the first choice, of a whole answer or a stream."""
    chunks = answer.chunks if answer.body.startswith(b"data:") else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
    if case.endpoint == "completions":
        return "".join(choice["text"] for choice in choices)
    return "".join((choice.get("delta") or choice.get("message") or {}).get("content") or "" for choice in choices)


async def check(service: Service, triton: TestTriton, tokenizer: Tokenizer, model: str, name: str) -> None:
    """Send the parameter to one model, and look at both ends."""
    case = CASES[name]
    fields = {**case.beside, name: case.value}
    expected = expected_of(name, case, service.adapter(model))
    await check_fields(service, triton, tokenizer, model, name, case, fields, expected)


async def check_fields(
    service: Service,
    triton: TestTriton,
    tokenizer: Tokenizer,
    model: str,
    name: str,
    case: Case,
    fields: Mapping[str, Any],
    expected: Sent | None,
) -> None:
    """Send *fields* to one model, and look at both ends."""
    adapter, prompt = service.adapter(model), steered(**case.order)
    answer = await ask(service.proxy, case.endpoint, model, prompt, **fields)
    if adapter.name == case.grpc and service.proxy.transport == "http":
        assert (400, "unsupported_parameter", case.grpc_param or name) == (
            answer.status,
            answer.error["code"],
            answer.error["param"],
        )
        return
    if expected is None:
        assert (400, "unsupported_parameter") == (answer.status, answer.error["code"]), answer.body
        # Where the model has nothing of the kind, what stands beside it is refused first.
        assert answer.error["param"].partition(".")[0] in (name, *case.beside)
        return
    assert 200 == answer.status, answer.body
    plain = await service.plain(model, case)
    several = len(answer.json["choices"]) > 1 or name == "best_of"
    before = await received(triton, tokenizer, adapter, id_of(plain))
    after = await received(triton, tokenizer, adapter, id_of(answer) + ("-0" if several else ""))
    if "seed" not in fields:
        # Drawn for each request, where the engine would take the same one for all.
        for row in adapter.parameters:
            if row.name == "seed" and row.target is not None:
                before.pop(row.target, None)
                after.pop(row.target, None)
    # Log probabilities show how many tokens there are, and which ids the prompt has where they are wanted.
    gone = {*case.gone}
    if "return_logprobs" in after:
        gone |= {"return_num_output_tokens", "return_num_input_tokens"}
    assert before.keys() - after.keys() <= gone
    differences = {target: value for target, value in after.items() if before.get(target) != value}
    if case.prompt is not None:
        assert case.prompt in differences.pop("prompt")
        assert not case.prompt or case.prompt not in before["prompt"]
    assert expected == differences
    if case.harmless:
        assert plain.normalised == answer.normalised
    wanted = case.text.replace("{prompt}", prompt)
    assert wanted == text_of_first(case, answer)
    assert case.shows is None or case.shows(answer.json), answer.body
    if case.streams:
        streamed = await ask(service.proxy, case.endpoint, model, prompt, **fields, stream=True)
        assert wanted == text_of_first(case, streamed)


# One after the other: Triton 2.51 itself may end when several of its gRPC streams are dropped at the same moment.
@every_case("name", [name for name, case in CASES.items() if not case.harmless])
@pytest.mark.parametrize("model", TABLED)
async def test_a_parameter(service: Service, triton: TestTriton, tokenizer: Tokenizer, model: str, name: str) -> None:
    """
    The model sends a parameter, applies, ignores or refuses it, as the table of its adapter says, and nothing
    else.
    """
    await check(service, triton, tokenizer, model, name)


@every_case("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("model", TABLED)
async def test_parameters_without_effect(
    service: Service, triton: TestTriton, tokenizer: Tokenizer, model: str, endpoint: str
) -> None:
    """All of them together change nothing; where they do, each is tried alone, to name those that do."""
    harmless = {name: case for name, case in CASES.items() if case.harmless and case.endpoint == endpoint}
    fields = {name: case.value for name, case in harmless.items()}
    assert all(case.beside.items() <= fields.items() for case in harmless.values())
    together = Case(None, endpoint=next(iter(harmless.values())).endpoint, harmless=True)
    assert not any(expected_of(name, case, service.adapter(model)) for name, case in harmless.items())
    try:
        await check_fields(service, triton, tokenizer, model, "", together, fields, {})
    except AssertionError:
        for name in harmless:
            await check(service, triton, tokenizer, model, name)
        raise


async def test_every_parameter_has_a_case() -> None:
    """A parameter of either endpoint that has no case fails here: add a line to `CASES`."""
    structs = (ChatRequest, CompletionRequest)
    fields = {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}

    assert fields - FRAME == CASES.keys()


async def test_every_adapter_takes_part(service: Service) -> None:
    """Each adapter that generates text has a model, and each row of its table is a parameter of the API."""
    adapters = {adapter.name: adapter for adapter in map(service.adapter, TABLED)}

    known = Registry().adapters
    # What a recognizer generates is written down from audio, with no parameters of a request.
    assert {name for name in BUILT_IN if Generation in known[name].jobs} - {"transcriber"} == adapters.keys()
    assert {row.name for adapter in adapters.values() for row in adapter.parameters} <= CASES.keys()
