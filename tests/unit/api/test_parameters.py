"""From a request's fields to what is sampled: defaults, limits, and the table that binds names to a model's inputs."""

from __future__ import annotations

import json
import math
import weakref
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.adapters._common.base import (
    Adapter,
    Capabilities,
    Parameter,
    Rule,
    bind,
    check_range,
    values_of,
)
from triton_openai.api.bodies import ModelRequest, parse_json
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.embeddings import EmbeddingsRequest, RerankRequest
from triton_openai.api.guides import guide_of
from triton_openai.api.parameters import (
    check_unused,
    neutral_values,
    priority,
    prompt_scoring,
    refusing,
    sampling,
    stop_strings,
    token_limit,
    truncation,
)
from triton_openai.config.tree import DefaultParameters, ModelSettings
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.generation import Guide, Sampling
from triton_openai.models.loading import LazyPrompter
from triton_openai.models.served import ServedModel
from triton_openai.prompts.truncation import Truncation
from triton_openai.triton.tensors import INTEGER_RANGES, ModelConfig, TensorSpec

CONFIG = ModelConfig(
    name="m",
    inputs={
        name: TensorSpec(name=name, datatype=datatype, dims=(1,))
        for name, datatype in (("max_tokens", "INT32"), ("random_seed", "UINT64"), ("temperature", "FP32"))
    },
)
TABLE = (
    Parameter(name="max_tokens", inputs=("max_tokens",)),
    Parameter(name="seed", inputs=("seed", "random_seed"), note="a note"),
    Parameter(name="top_p", inputs=("top_p",)),
    Parameter(name="stop", inputs=("stop_words",), otherwise=Rule.SERVICE),
)


class Fake(Adapter):
    """An adapter with a table of its own."""

    name = "fake"

    def __init__(self, *parameters: Parameter) -> None:
        super().__init__(CONFIG, {})
        self.parameters = parameters
        self.capabilities = Capabilities()


NO_DEFAULTS, SETTINGS = DefaultParameters(), ModelSettings()


def sampled(
    fields: dict[str, Any], *parameters: Parameter, defaults: DefaultParameters | None = None, limit: int = 16
) -> Sampling:
    """Return the sampling of a completion request, for a model that takes everything but what *parameters* say."""
    rows = {name: Parameter(name, target=name) for name in Sampling.__struct_fields__}
    rows |= {row.name: row for row in parameters}
    request = parse_json(msgspec.json.encode({"model": "m", "prompt": "Hi", **fields}), CompletionRequest)
    return sampled_by(request, Fake(*rows.values()), defaults or NO_DEFAULTS, limit)


def model_of(adapter: Adapter, settings: ModelSettings = SETTINGS) -> ServedModel:
    """Return a model with *adapter*, without a tokenizer."""
    prompter = LazyPrompter(settings, None)
    return ServedModel(
        name="m", triton_model="m", adapter=adapter, reason="", settings=settings, lazy_prompter=prompter
    )


def sampled_by(
    request: Any, adapter: Adapter, defaults: DefaultParameters = NO_DEFAULTS, default: int = 16
) -> Sampling:
    """Return the sampling of *request* on a model with *adapter*."""
    limit = token_limit(request, model_of(adapter), None, defaults, default)
    return sampling(request, limit=limit, defaults=defaults, adapter=adapter)


def test_a_table_is_bound_to_what_the_model_declares():
    """The first input that is declared is taken, with its type; without one the row says what happens."""
    assert [
        ("max_tokens", Rule.MAPPED, "max_tokens", "INT32", ""),
        ("seed", Rule.MAPPED, "random_seed", "UINT64", "a note"),
        ("top_p", Rule.REFUSED, None, None, ""),
        ("stop", Rule.SERVICE, None, None, ""),
    ] == [(row.name, row.rule, row.target, row.datatype, row.note) for row in bind(TABLE, CONFIG)[: len(TABLE)]]


def test_what_has_no_row_is_refused() -> None:
    """
    A parameter without a row is refused, also where an override replaces it; stop strings are cut out by the
    service.
    """
    rules = {row.name: row.rule for row in bind((), CONFIG)}

    assert Rule.SERVICE is rules.pop("stop")
    assert rules.keys() == {*Sampling.__struct_fields__} - {"max_tokens", "stop"}
    assert {*rules.values()} == {Rule.REFUSED}
    assert [Rule.REFUSED] == [row.rule for row in bind(TABLE, CONFIG, Parameter("seed")) if row.name == "seed"]


@every_case(
    "fields, expected",
    [
        ({}, []),
        ({"temperature": 0.0}, [0.0]),
        ({"temperature": 1.5}, [1.5]),
    ],
)
def test_values_of_a_parameter(fields, expected):
    """What is not asked for is nothing; zero is a value."""
    bound = Parameter("temperature", target="temperature", datatype="FP32")

    assert expected == list(values_of(bound, Sampling(max_tokens=1, **fields)))


@every_case("datatype", INTEGER_RANGES)
def test_ranges_of_integers(datatype):
    """Both ends fit, and what lies beyond is refused with OpenAI's words for it."""
    low, high = INTEGER_RANGES[datatype]
    check_range("seed", low, datatype)
    check_range("seed", high, datatype)
    for value, code in ((low - 1, "integer_below_min_value"), (high + 1, "integer_above_max_value")):
        with pytest.raises(InvalidRequest) as caught:
            check_range("seed", value, datatype)
        assert ("seed", code) == (caught.value.param, caught.value.code)


@every_case("value", [1e39, -1e39, math.inf, -math.inf, math.nan])
def test_ranges_of_floats(value):
    """What a float32 cannot hold is refused; what it can hold is not."""
    check_range("temperature", 3.4e38, "FP32")
    check_range("temperature", 1e39, None)
    with pytest.raises(InvalidRequest):
        check_range("temperature", value, "FP32")


def test_what_a_client_leaves_out():
    """First comes the client, then the model's defaults, then the service's."""
    defaults = DefaultParameters(max_tokens=5, temperature=0.5, stop="x")

    assert Sampling(max_tokens=16) == sampled({})
    assert Sampling(max_tokens=5, temperature=0.5, stop=("x",)) == sampled({}, defaults=defaults)
    found = sampled({"max_tokens": 7, "temperature": 0, "stop": []}, defaults=defaults)
    assert Sampling(max_tokens=7, temperature=0.0) == found


@every_case(
    "stop, expected",
    [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (("a",), ("a",)), (list("abcd"), tuple("abcd"))],
)
def test_stop_strings(stop, expected):
    """One or several, up to four."""
    assert expected == stop_strings(stop)


@every_case(
    "stop, code",
    [
        ("", "invalid_value"), (["a", ""], "invalid_value"), (list("abcde"), "array_above_max_length"),
        (["a" * 5_000, "b" * 5_001], "string_above_max_length"),
    ],
)  # fmt: skip
def test_stop_strings_that_are_refused(stop, code):
    """Empty ones would match everywhere, and OpenAI takes four."""
    with pytest.raises(InvalidRequest) as caught:
        stop_strings(stop)

    assert ("stop", code) == (caught.value.param, caught.value.code)


def test_neutral_values_keep_their_types():
    """Neutral values of one field are not taken for the equal ones of another: 1 for ``True``, and 0 for ``False``."""
    for kind, name, neutral in ((ChatRequest, "best_of", 1), (RerankRequest, "priority", 0)):
        (found,) = neutral_values(kind)[name]
        assert (type(neutral), neutral) == (type(found), found)


@every_case(
    "name, value, neutral",
    [
        ("top_p", 0.5, 1), ("top_k", 5, -1), ("min_tokens", 1, 0), ("frequency_penalty", 0.5, 0),
        ("presence_penalty", -0.5, 0), ("repetition_penalty", 1.5, 1), ("seed", 1, None),
        ("temperature", 0.5, 1), ("top_k", 5, 0),
    ],
)  # fmt: skip
def test_what_a_model_cannot_honour(name, value, neutral):
    """A parameter without an input is refused by name, unless its value asks for what happens anyway."""
    refused = Parameter(name)
    with pytest.raises(UnsupportedParameter) as caught:
        sampled({name: value}, refused)

    assert (name, "unsupported_parameter") == (caught.value.param, caught.value.code)
    assert Sampling(max_tokens=16) == sampled({name: None}, refused)
    if neutral is not None:
        assert neutral == getattr(sampled({name: neutral}, refused), name)


@every_case("bias, expected", [({}, ()), ({"5": 0}, ()), ({"5": 0.0, "6": -1}, ((6, -1.0),))])
def test_a_bias_of_nothing(bias, expected):
    """A bias of 0 changes nothing: it is never a reason to refuse, and not sent."""
    assert expected == sampled({"logit_bias": bias}).logit_bias
    if not expected:
        assert () == sampled({"logit_bias": bias}, Parameter("logit_bias")).logit_bias


def test_a_parameter_that_an_adapter_does_not_mention():
    """Silence is refusal: nothing is accepted and dropped."""
    request = parse_json(b'{"model": "m", "prompt": "Hi", "seed": 3}', CompletionRequest)
    with pytest.raises(UnsupportedParameter) as caught:
        sampled_by(request, Fake())

    assert "seed" == caught.value.param


def test_the_name_of_what_is_refused():
    """
    The name of what is refused is the client's own; a limit that no client has set is no reason to refuse a
    request.
    """
    no_limit = Parameter("max_tokens")
    small = Parameter("top_k", target="k", datatype="INT32")
    assert 16 == sampled({}, no_limit).max_tokens
    messages = [{"role": "user", "content": "Hi"}]
    for kind, fields, row, param in (
        (CompletionRequest, {"prompt": "Hi", "max_tokens": 5}, no_limit, "max_tokens"),
        (ChatRequest, {"messages": messages, "max_completion_tokens": 5}, no_limit, "max_completion_tokens"),
        (CompletionRequest, {"prompt": "Hi", "top_k": 2**31}, small, "top_k"),
        (
            CompletionRequest,
            {"prompt": "Hi", "logprobs": 1},
            Parameter("logprobs", target="logprobs"),
            "logprobs",
        ),
    ):
        request = parse_json(msgspec.json.encode(fields), kind)
        with pytest.raises(InvalidRequest) as caught:
            sampled_by(request, Fake(row))
        assert param == caught.value.param


def test_priorities():
    """The gateway's comes before the client's, if the queue has that level."""
    request = parse_json(b'{"prompt": "Hi", "priority": 2}', CompletionRequest)

    assert [2, 1, 3, 2] == [priority(request, 3, objective) for objective in (0, 1, 3, 4)]


def test_scores_of_the_prompt():
    """The prompt has as many alternatives as ``prompt_logprobs`` or ``echo`` with ``logprobs`` asks for."""
    model = Fake()
    model.capabilities = Capabilities(prompt_logprobs=True)
    for asked, echo, count in ((None, 3, 3), (2, None, 2), (2, 3, 3), (3, 2, 3)):
        request = parse_json(msgspec.json.encode({"prompt": "Hi", "prompt_logprobs": asked}), CompletionRequest)
        found = prompt_scoring(request, model_of(model), echo_logprobs=echo, timeout=1)
        assert found is not None
        assert count == found.count


@every_case(
    "asked, operators, recommended, expected",
    [
        # (tokens, open, unbounded)
        (7, None, None, (7, False, False)),
        (7, 5, 6, (7, False, False)),
        (0, 5, None, (0, False, False)),
        (None, 5, None, (5, False, False)),
        (None, None, 6, (6, True, False)),
        (None, None, None, (16, True, True)),
    ],
)
def test_who_limits_an_answer(
    asked: int | None, operators: int | None, recommended: int | None, expected: tuple[int, bool, bool]
) -> None:
    """The client comes before the operator, and the operator before the model's authors, who only recommend."""
    settings = ModelSettings(default_parameters=DefaultParameters(max_tokens=operators))
    defaults = DefaultParameters(max_tokens=operators or recommended)
    request = CompletionRequest(model="m", prompt="Hi", max_tokens=asked)
    limit = token_limit(request, model_of(Fake(), settings), None, defaults, 16)

    assert expected == (limit.tokens, limit.open, limit.unbounded)
    assert (asked, "max_tokens") == (limit.asked, limit.param)


def test_a_minimum_above_the_limit():
    """A minimum above the limit contradicts it, also where the limit is the default."""
    for fields in ({"min_tokens": 3, "max_tokens": 2}, {"min_tokens": 17}):
        with pytest.raises(InvalidRequest) as caught:
            sampled(fields)
        assert "min_tokens" == caught.value.param
    assert 2 == sampled({"min_tokens": 2, "max_tokens": 2}).min_tokens


@refusing(beams=1)
class One(ModelRequest):
    """A request with one such field."""


@every_case(
    "kind, base, known",
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}, {"audio": (), "modalities": (["text"],)}),
        (CompletionRequest, {"prompt": "Hi"}, {"watermarking": (False,)}),
        (One, {}, {"beams": (1,)}),
        (EmbeddingsRequest, {"input": "Hi"}, {"endianness": ("native", "little")}),
        (RerankRequest, {"query": "Hi", "documents": ["a"]}, {"rank_fields": (["text"],), "priority": (0,)}),
    ],
)
def test_refused_parameters(kind, base, known):
    """What is not supported passes with each of its neutral values and with null, and not otherwise."""
    refused = neutral_values(kind)
    assert known.items() <= refused.items()
    for name, neutral in refused.items():
        for value in (None, *neutral):
            check_unused(parse_json(msgspec.json.encode({**base, name: value}), kind))
        for value in ("something", 2, True, {"a": 1}, ["a"], 3.5):
            if any(type(value) is type(item) and value == item for item in neutral):
                continue
            # By its type already, or by the table.
            with pytest.raises(InvalidRequest) as caught:
                check_unused(parse_json(msgspec.json.encode({**base, name: value}), kind))
            assert name == str(caught.value.param).partition("[")[0].partition(".")[0]


EVERY = frozenset({"json", "json_schema", "regex", "choice", "grammar", "structural_tag"})
SCHEMA = {"type": "object"}
TAG = {"type": "structural_tag", "format": {"a": 1}}


def guide_for(supported: frozenset[str] = EVERY, **fields: Any) -> Guide | None:
    """Return the guide that a request with *fields* asks for."""
    body = msgspec.json.encode({"model": "m", "prompt": "p", **fields})
    return guide_of(parse_json(body, CompletionRequest), supported)


@every_case(
    "fields, kind, value",
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"response_format": TAG}, "structural_tag", TAG),
        ({"structured_outputs": {"json_object": True}}, "json", ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": '{"type":  "object"}'}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "5"}}, "regex", 5),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"structural_tag": {"format": 1}}}, "structural_tag", {"format": 1}),
        ({"structured_outputs": {"structural_tag": '{"format": 1}'}}, "structural_tag", {"format": 1}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_grammar": '"root"'}, "grammar", "root"),
    ],
)  # fmt: skip
def test_guides(fields: dict[str, Any], kind: str, value: object) -> None:
    """The backend gets schemas and lists as JSON, and all else as it is."""
    found = guide_for(**fields)

    assert found is not None
    assert kind == found.kind
    assert value == (json.loads(found.value) if found.value else "")
    assert found.param.partition(".")[0] == next(iter(fields))


@every_case(
    "fields, param",
    [
        *(({"structured_outputs": {name: value}}, f"structured_outputs.{name}") for value in (0, 1.5) for name in
          ("choice", "json", "regex", "grammar", "structural_tag", "json_object")),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{}, "x": true'}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_what_is_no_guide(fields: dict[str, Any], param: str) -> None:
    """Zero is not null: it asks for something, wrongly, and must not be passed over. Nor can two be followed."""
    with pytest.raises(InvalidRequest) as caught:
        guide_for(**fields)

    assert param == caught.value.param


@every_case(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None, "json_object": False}}]
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    """Clients send these for what they do not use."""
    assert guide_for(**fields) is None


@every_case("side, kept", [(None, True), ("left", False), ("right", False)])
def test_truncation(side: Any, kept: bool) -> None:
    """A side that the client names is that of the ids as they are, special tokens among them."""
    body = EmbeddingsRequest(model="m", input="x", truncate_prompt_tokens=5, truncation_side=side)

    assert Truncation(tokens=5, side=side or "left", keeps_special=kept) == truncation(body)


def test_a_model_without_guided_decoding() -> None:
    """A model without guided decoding does not pretend to be held to a format."""
    with pytest.raises(UnsupportedParameter, match="it has no guided decoding"):
        guide_for(frozenset(), guided_regex="a")
    with pytest.raises(UnsupportedParameter, match="it supports json, regex") as caught:
        guide_for(frozenset({"json", "regex"}), guided_choice=["a"])
    assert "guided_choice" == caught.value.param


def test_an_adapter_is_freed() -> None:
    """A model that is loaded again has a new adapter; what requests have looked up in the old one does not keep it."""
    adapter = Fake(Parameter("temperature", target="temperature"))
    request = parse_json(b'{"model": "m", "prompt": "Hi", "temperature": 0.5}', CompletionRequest)
    sampled_by(request, adapter, NO_DEFAULTS, 16)
    freed = weakref.ref(adapter)
    del adapter
    assert freed() is None
