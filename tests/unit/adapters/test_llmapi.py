"""The LLM API's model over its releases: what each can do, and what it is never asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from tests.unit.adapters.test_profiles import MINIMAL, check, generation, profiles, registry
from triton_openai.adapters._common.base import Adapter
from triton_openai.adapters.trtllm_llmapi import TrtllmLlmapi
from triton_openai.adapters.vllm import Vllm
from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.errors import ConfigurationError, PromptRefused, UpstreamError
from triton_openai.generation import Lora
from triton_openai.models.lora.lora_files import find_loras
from triton_openai.triton.tensors import TensorSpec

RELEASES = {"P19": "0.19", "P20": "0.20 or 0.21", "P100": "1.0 to 1.2", "P121V": "1.0 to 1.2", "P130": "1.3 or newer"}
LORA = Lora(name="french", number=7, path="/loras/french", ckpt_source="hf")


def adapter(release: str, *, decoupled: bool = True) -> Adapter:
    """Return the adapter of a model as of *release*."""
    config = msgspec.structs.replace(profiles()[f"llmapi/tensorrt_llm@{release}"], decoupled=decoupled)
    claim = registry().claim(config)
    assert claim is not None
    assert claim.reason.endswith(f"TensorRT-LLM {RELEASES[release]}")
    return claim.adapter(config, {})


@every_case("release", RELEASES)
def test_releases(release: str) -> None:
    """Only 1.3 streams, takes LoRA adapters, and may leave a request without an answer; all prefer gRPC."""
    found, newest = adapter(release), release == "P130"

    request = request_of(found, generation(MINIMAL, found))
    streaming = next(tensor for tensor in request.inputs if tensor.name == "streaming")
    assert (newest,) == streaming.values
    flags = {"return_finish_reason", "sampling_param_exclude_input_from_output"} & found.config.inputs.keys()
    assert dict.fromkeys(flags, (True,)) == {
        tensor.name: tensor.values for tensor in request.inputs if tensor.name in flags
    }
    # An answer without its last response is noticed by the finish reason that it lacks.
    with pytest.raises(UpstreamError):
        found.decoder(generation(MINIMAL, found)).flush()
    inputs = {name: spec for name, spec in found.config.inputs.items() if name != "return_finish_reason"}
    without = type(found)(msgspec.structs.replace(found.config, inputs=inputs), {})
    assert "" == without.decoder(generation(MINIMAL, without)).flush()
    assert ("path" if newest else None) == found.capabilities.lora
    assert newest is not found.returns_whole(generation(MINIMAL))
    assert newest is (found.notes == ())
    assert newest is (found.no_answer_cause(generation(MINIMAL)) is not None)
    assert request.prefers_grpc
    assert () == adapter(release, decoupled=False).notes
    with pytest.raises(PromptRefused):
        request_of(found, msgspec.structs.replace(generation(MINIMAL), prompt=""))


def test_a_model_that_requires_more() -> None:
    """A model with another required input is not claimed: nobody would fill it."""
    for kind, name in ((TrtllmLlmapi, "llmapi/tensorrt_llm@P130"), (Vllm, "vllm@r25.11")):
        config = profiles()[name]
        for optional in (True, False):
            extra = TensorSpec(name="extra", datatype="BYTES", dims=(1,), optional=optional)
            more = msgspec.structs.replace(config, inputs={**config.inputs, "extra": extra})
            assert optional is (kind.matches(more) is not None)


def test_a_lora_adapter() -> None:
    """All that names it goes along; one without a path is the operator's mistake."""
    found = adapter("P130")

    request = request_of(found, msgspec.structs.replace(generation(MINIMAL), lora=LORA))

    check(request, found.config)
    assert {"lora_id": 7, "lora_name": "french", "lora_path": "/loras/french", "lora_ckpt_source": "hf"} == {
        tensor.name: tensor.values[0] for tensor in request.inputs if tensor.name.startswith("lora")
    }
    assert "LoRA" in (found.no_answer_cause(msgspec.structs.replace(generation(MINIMAL), lora=LORA)) or "")
    plain = request_of(
        found, msgspec.structs.replace(generation(MINIMAL), lora=msgspec.structs.replace(LORA, ckpt_source=None))
    )
    assert "lora_ckpt_source" not in [tensor.name for tensor in plain.inputs]
    for unnamed in (Lora(name="french"), Lora(name="french", number=7)):
        with pytest.raises(ConfigurationError):
            request_of(found, msgspec.structs.replace(generation(MINIMAL), lora=unnamed))
    inputs = {name: spec for name, spec in found.config.inputs.items() if name != "lora_path"}
    assert not type(found)(msgspec.structs.replace(found.config, inputs=inputs), {}).capabilities.lora


def test_adapters_that_the_model_reads(tmp_path: Path) -> None:
    """A path on Triton's machine is all that is needed; its number stays the same. What is missing is said."""
    entries = (
        LoraSettings(name="french", path="/loras/french"),
        LoraSettings(name="german", path="/loras/german", task_id=3, ckpt_source="nemo"),
        LoraSettings(name="here", path=str(tmp_path)),
        LoraSettings(name="relative", path="loras/dutch"),
        "bare",
    )
    settings = ModelSettings(loras=entries)

    found, problems = find_loras("m", settings, (), "path")

    assert [("french", "/loras/french"), ("german", "/loras/german"), ("here", str(tmp_path))] == [
        (lora.name, lora.path) for lora in found
    ]
    assert (3, "nemo") == (found[1].number, found[1].ckpt_source)
    assert len({lora.number for lora in found}) == len(found)
    assert all(0 < (lora.number or 0) < 2**63 for lora in found)
    assert ["'relative'", "'bare'"] == [problem.split()[3] for problem in problems]
    assert "has to be absolute" in problems[0]
    assert "give its path" in problems[1]
    local, missing = find_loras("m", settings, (), "path", local=True)
    assert ["here"] == [lora.name for lora in local]
    assert "there is no folder '/loras/french'" in missing[0]
    # By a name alone, or with its weights, it is another kind of model.
    for loras in ((LoraSettings(name="x", ckpt_source="hf"),), (LoraSettings(name="x", path="/x"),)):
        assert [] == find_loras("m", ModelSettings(loras=loras), (), "name")[0]


@every_case(
    "text, expected",
    [
        ("model: m\nmax_seq_len: 4096\nmax_num_tokens: 512", {"max_model_len": 4096, "max_prompt_len": 512}),
        ("model: m\nmax_num_tokens: 512\nenable_chunked_prefill: true", {"max_prompt_len": None}),
        ("model: m", {"loras": False, "images": False}),
        ("model: m\nenable_lora: true", {"loras": True, "max_loras": None}),
        ("model: m\nlora_config: {max_lora_rank: 8, max_loras: 2}", {"loras": True, "max_loras": 2}),
        ("model: m\ntriton_config: {multimodal: true}", {"images": True}),
        ("model: m\ntriton_config: {multimodal: false}", {"images": False}),
        ("model: m\ntriton_config: [multimodal]", {"images": False}),
        ("[", {"loras": True, "images": False}),
    ],
)
def test_what_model_yaml_says(text: str, expected: Mapping[str, object]) -> None:
    """Limits, LoRA adapters and images."""
    metadata = adapter("P130").metadata_with(lambda model, file: text.encode() if file == "model.yaml" else None)

    assert expected == {name: getattr(metadata, name) for name in expected}
