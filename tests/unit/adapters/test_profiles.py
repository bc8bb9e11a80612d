"""
Every I/O profile of the Triton LLM backends: which adapter claims it, and that its requests are ones Triton accepts.

The profiles (``tests/fixtures/io_profiles.json``) hold what the backends' releases declare: ``name[?] TYPE [dims]``.
"""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from triton_openai.adapters._common.base import Adapter, Rule
from triton_openai.adapters._common.registry import Registry, helper_role
from triton_openai.generation import Generation, Sampling, Vocabulary
from triton_openai.jobs import EmbeddingJob
from triton_openai.triton.tensors import EnsembleStep, InferRequest, ModelConfig, TensorSpec

_FILE = Path(__file__).parents[2] / "fixtures" / "io_profiles.json"
_TENSOR = re.compile(r"(?P<name>\w+)(?P<optional>\??) (?P<type>\w+) \[(?P<dims>[-\d,]*)\]( [rg])*")

MAXIMAL = Sampling(
    max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_tokens=2, seed=3, frequency_penalty=0.5,
    presence_penalty=-0.5, repetition_penalty=1.1, stop=("a", "é"), ignore_eos=True, bad_words=("no",),
)  # fmt: skip
GREEDY = Sampling(max_tokens=1, temperature=0)
MINIMAL = Sampling(max_tokens=1)


def spec_of(text: str) -> TensorSpec:
    """Return a tensor from its one-line form."""
    match = _TENSOR.fullmatch(text)
    assert match is not None, text
    datatype = "BYTES" if match["type"] == "STRING" else match["type"]
    dims = tuple(int(dim) for dim in match["dims"].split(",") if dim)
    return TensorSpec(name=match["name"], datatype=datatype, dims=dims, optional=bool(match["optional"]))


@cache
def profiles() -> dict[str, ModelConfig]:
    """Return the config of every profile, its templates filled: eight rows, and decoupled where that can be chosen."""
    configs = {}
    for name, entry in json.loads(_FILE.read_text(encoding="utf-8")).items():
        if name == "_legend":
            continue
        batch = entry["max_batch_size"]
        configs[name] = ModelConfig(
            name=name,
            backend=entry.get("backend", ""),
            platform=entry.get("platform", ""),
            max_batch_size=0 if batch.startswith("0") else int(batch) if batch.isdigit() else 8,
            decoupled=entry.get("decoupled", "") in ("true", "${decoupled_mode}") or "inflight_batcher_llm/ensemble" in name,
            inputs={spec.name: spec for spec in map(spec_of, entry["in"])},
            outputs={spec.name: spec for spec in map(spec_of, entry["out"])},
            parameters=dict.fromkeys(entry.get("parameters", ()), "${hole}"),
            steps=tuple(
                EnsembleStep(model=step["model_name"], input_map=step["input_map"], output_map=step["output_map"])
                for step in entry.get("steps", ())
            ),
        )  # fmt: skip
    return configs


@cache
def registry() -> Registry:
    """Return all adapters."""
    return Registry()


def claimed() -> list[str]:
    """Return the names of the profiles that an adapter of text claims."""
    claims = {name: registry().claim(config) for name, config in profiles().items()}
    return [name for name, claim in claims.items() if claim is not None and claim.adapter.name != "transcriber"]


def neighbours(name: str) -> dict[str, ModelConfig]:
    """Return the models of the same family and release, by the names that they have in a repository."""
    family, _, release = name.rpartition("/")[0], *name.rpartition("@")[1:]
    found = {}
    for other, config in profiles().items():
        if other.startswith(f"{family}/") and other.endswith(f"@{release}"):
            short = other.rpartition("/")[2].partition("@")[0]
            found[short] = msgspec.structs.replace(config, name=short)
    return found


def check(request: InferRequest, config: ModelConfig) -> None:
    """Check a request as Triton's core does."""
    assert config.name == request.model
    names = [tensor.name for tensor in request.inputs]
    assert len(set(names)) == len(names)
    assert set(names) <= config.inputs.keys(), "an input that is not declared"
    assert {spec.name for spec in config.inputs.values() if not spec.optional} <= set(names), "a missing input"
    assert set(request.outputs) <= config.outputs.keys(), "an output that is not declared"
    assert config.decoupled == request.stream
    for tensor in request.inputs:
        spec = config.inputs[tensor.name]
        assert spec.datatype == tensor.datatype
        dims = (-1, *spec.dims) if config.batching else spec.dims
        assert len(dims) == len(tensor.shape), tensor
        assert all(dim in (-1, size) for dim, size in zip(dims, tensor.shape, strict=True)), tensor
        assert math.prod(tensor.shape) == len(tensor.values)
        if config.batching:
            assert 1 == tensor.shape[0]
        tensor.raw()


def generation(sampling: Sampling, adapter: Adapter | None = None) -> Generation:
    """Return a generation with *sampling*, less what the service would have refused for *adapter*'s model."""
    for row in adapter.parameters if adapter is not None else ():
        if row.rule is Rule.REFUSED:
            default = () if isinstance(getattr(sampling, row.name), tuple) else None
            sampling = msgspec.structs.replace(sampling, **{row.name: default})
    return Generation(
        id="id-1",
        prompt="Hi é",
        prompt_ids=(5, 6),
        vocabulary=Vocabulary(size=10, end_ids=(2,), pad_id=1),
        bad_word_ids=((3,), (4, 5)) if sampling.bad_words else (),
        sampling=sampling,
    )


@every_case("name", profiles())
def test_who_claims_it(name):
    """Every model is claimed by the adapter made for it, is somebody's helper, or is not served and says why."""
    config = profiles()[name]
    claim = registry().claim(config)

    expected = json.loads(_FILE.read_text(encoding="utf-8"))[name]["claimed_by"]
    role = helper_role(config, {name: config})
    assert expected == (role or (claim.adapter.name if claim is not None else None))
    assert role is None or claim is None, "a helper is offered"
    assert claim is None or claim.reason


@every_case("decoupled", [True, False])
@every_case("sampling", [MAXIMAL, GREEDY, MINIMAL])
@every_case("name", claimed())
def test_requests_are_ones_that_triton_accepts(name, sampling, decoupled):
    """
    Requests have declared inputs only, with their dtype and rank, all that are required, and declared outputs only.
    """
    config = msgspec.structs.replace(profiles()[name], decoupled=decoupled)
    claim = registry().claim(config)
    assert claim is not None
    for repository in ({}, neighbours(name)):
        adapter = claim.adapter(config, repository)
        check(request_of(adapter, generation(sampling, adapter)), config)
        adapter.decoder(generation(sampling))
        assert Generation in adapter.jobs
        streams = not name.startswith("llmapi/") or "lora_id" in config.inputs
        assert (decoupled and streams) == adapter.capabilities.streaming


@every_case("name", claimed())
def test_every_parameter_that_is_mapped_is_sent(name):
    """What the table calls mapped reaches an input, and what it cannot map it does not send."""
    config = profiles()[name]
    claim = registry().claim(config)
    assert claim is not None
    adapter = claim.adapter(config, {})
    bound = {parameter.name: parameter for parameter in adapter.parameters}
    names = {tensor.name for tensor in request_of(adapter, generation(MAXIMAL, adapter)).inputs}

    assert set(Sampling.__struct_fields__) == set(bound)
    for parameter in bound.values():
        assert (parameter.rule is Rule.MAPPED) == (parameter.target is not None)
        if parameter.target is not None and getattr(MAXIMAL, parameter.name) not in (None, ()):
            assert parameter.target.partition(".")[0] in names
    assert bound["max_tokens"].rule is Rule.MAPPED
    assert bound["stop"].rule in (Rule.MAPPED, Rule.SERVICE)


@every_case(
    "name, expected",
    [
        ("inflight_batcher_llm/ensemble@P05", {"seed": "random_seed", "min_tokens": "min_length", "frequency_penalty": None}),
        ("inflight_batcher_llm/ensemble@P19", {"seed": "random_seed", "min_tokens": "min_length", "frequency_penalty": "frequency_penalty"}),
        ("inflight_batcher_llm/ensemble@P20", {"seed": "seed", "min_tokens": "min_tokens"}),
        ("inflight_batcher_llm/tensorrt_llm_bls@P16", {"seed": "random_seed", "min_tokens": "min_length"}),
        ("inflight_batcher_llm/tensorrt_llm_bls@P100", {"seed": "seed", "stop": "stop_words"}),
        ("vllm@r23.10", {"seed": "sampling_parameters.seed", "max_tokens": "sampling_parameters.max_tokens"}),
    ],
)  # fmt: skip
def test_names_over_the_releases(name, expected):
    """A parameter goes to the input that this release has for it, or is refused."""
    config = profiles()[name]
    claim = registry().claim(config)
    assert claim is not None
    bound = {parameter.name: parameter.target for parameter in claim.adapter(config, {}).parameters}

    assert expected == {parameter: bound[parameter] for parameter in expected}


@every_case("name", [name for name in claimed() if name.startswith("inflight_batcher_llm/ensemble")])
def test_stop_requests_are_ones_that_triton_accepts(name):
    """The engine behind an ensemble is told to stop with a request that its own config allows."""
    repository = neighbours(name)
    config = profiles()[name]
    claim = registry().claim(config)
    assert claim is not None
    order = claim.adapter(config, repository).cancel(generation(MINIMAL))

    engine = repository["tensorrt_llm"]
    assert ("stop" in engine.inputs) == (order is not None)
    if order is not None:
        check(order, engine)
        assert "id-1" == order.id
        values = {tensor.name: list(tensor.values) for tensor in order.inputs}
        assert {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]} == values
    # Without the engine's config there is nobody to tell.
    assert None is claim.adapter(config, {}).cancel(generation(MINIMAL))


@every_case("release", ["r23.10", "r23.11", "r24.03", "r24.12", "r25.11"])
def test_vllm_over_the_releases(release):
    """What the backend reports, and whether it embeds, is read from what the release declares."""
    config = profiles()[f"vllm@{release}"]
    claim = registry().claim(config)
    assert claim is not None
    adapter = claim.adapter(config, {})
    capabilities = adapter.capabilities

    assert (release >= "r24.12") == capabilities.usage == capabilities.finish_reason
    assert (release >= "r25.11") == (EmbeddingJob in adapter.jobs)
    for stream in (True, False):
        asked = msgspec.structs.replace(generation(MINIMAL), stream=stream)
        flags = {tensor.name for tensor in request_of(adapter, asked).inputs if tensor.values == (True,)}
        assert ("exclude_input_in_output" in flags) == (release >= "r24.03")
        # Without counts, the number of responses says more than one response.
        assert ("stream" in flags) == (stream or release < "r24.12")
    if EmbeddingJob in adapter.jobs:
        for request in adapter.encode(EmbeddingJob(id="e", inputs=["a", "b"], dimensions=4)):
            check(request, config)


@pytest.mark.parametrize(
    "parameters, built, limit",
    [
        ({}, None, None),
        ({"max_tokens_in_paged_kv_cache": "4096"}, None, 4096),
        ({"max_tokens_in_paged_kv_cache": "4096", "max_attention_window_size": "2048"}, None, None),
        ({"max_tokens_in_paged_kv_cache": "4096", "max_attention_window_size": "${hole}"}, None, 4096),
        ({"max_tokens_in_paged_kv_cache": "${hole}"}, None, None),
        ({"max_tokens_in_paged_kv_cache": "0"}, None, None),
        ({"max_seq_len": "512", "max_input_len": "64"}, None, 512),
        ({}, {"build_config": {"max_seq_len": 512, "max_input_len": 64}}, 512),
        ({}, {"builder_config": {"max_input_len": 64}}, 64),
        ({"max_tokens_in_paged_kv_cache": "128"}, {"build_config": {"max_seq_len": 512}}, 128),
        ({}, {"build_config": []}, None),
        ({}, {"build_config": {"max_seq_len": "long"}}, None),
        ({}, ["build_config"], None),
    ],
)
@pytest.mark.parametrize("profile", ["P09", "P12", "P20"])
def test_the_longest_prompt_of_an_engine(
    tmp_path: Path, profile: str, parameters: dict[str, str], built: object, limit: int | None
) -> None:
    """The longest prompt of an engine is told by the engine's files, if they are here, and by its config's KV cache."""
    if built is not None:
        (tmp_path / "config.json").write_text(json.dumps(built))
    config = profiles()[f"inflight_batcher_llm/tensorrt_llm@{profile}"]
    given = {**config.parameters, "gpt_model_path": str(tmp_path), **parameters}
    repository = {"tensorrt_llm": msgspec.structs.replace(config, name="tensorrt_llm", parameters=given)}
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        found = repository.setdefault(name, profiles()[f"inflight_batcher_llm/{name}@{profile}"])
        claim = Registry().claim(found)
        assert claim is not None
        assert limit == claim.adapter(found, repository).metadata_with(lambda model, file: None).max_prompt_len, name
