"""An adapter from another distribution: found through its entry point, and used like a built-in one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.adapters._common import registry
from triton_openai.cli.inspect import inspect_models
from triton_openai.config.tree import ModelSettings, Settings, TritonSettings
from triton_openai.errors import ConfigurationError

PACKAGE = Path(__file__).parents[1] / "third_party_adapter"
TENSORS = {
    "inputs": ("prompt BYTES 1", "limit INT32 1"),
    "outputs": ("answer BYTES 1", "last BOOL 1"),
    "backend": "python",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the distribution, metadata and all, where Python looks for installed ones."""
    monkeypatch.syspath_prepend(PACKAGE)
    yield
    sys.modules.pop("counting_adapter", None)


def test_an_adapter_is_found_by_its_entry_point(installed):
    """The distribution is a real one to Python, and its adapter has a name beside the built-in ones."""
    assert "1.0" == distribution("counting-adapter").version
    adapters = registry.Registry().adapters
    assert {*registry.BUILT_IN, "counting"} == adapters.keys()
    assert "counting" == adapters["counting"].name


def test_without_it_the_name_is_unknown():
    """Nothing of it stays when it is not installed."""
    with pytest.raises(ConfigurationError, match="There is no adapter 'counting'"):
        registry.Registry().adapter_named("counting")


async def test_an_adapter_serves_its_models(installed):
    """An adapter of a third party serves its model, in both forms, with counts and the finish reason."""
    async with FakeTriton(config_of("odd", **TENSORS)) as triton:
        triton.responses = [{"answer": "one", "last": False}, {"answer": " two", "last": True}]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            whole = await proxy.post("/v1/completions", {"model": "odd", "prompt": "Hi", "max_tokens": 7})
            streamed = await proxy.post("/v1/completions", {"model": "odd", "prompt": "Hi", "stream": True})
            refused = await proxy.post("/v1/completions", {"model": "odd", "prompt": "Hi", "temperature": 0.5})

    assert 200 == whole.status, whole.body
    assert ("one two", "stop") == (whole.json["choices"][0]["text"], whole.json["choices"][0]["finish_reason"])
    assert {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} == whole.json["usage"]
    assert ["one", " two", ""] == [chunk["choices"][0]["text"] for chunk in streamed.chunks]
    assert (400, "temperature") == (refused.status, refused.error["param"])
    name, body = triton.asked[0]
    assert ("odd", {"id": whole.json["id"], "prompt": "Hi", "limit": 7}) == (name, body)


async def test_an_adapter_comes_before_the_built_in_ones(installed):
    """Whoever installs an adapter means it: a model that a built-in one would take, too, is the third party's."""
    both = config_of(
        "both",
        inputs=("prompt? BYTES 1", "limit? INT32 1", "text_input BYTES 1", "sampling_parameters? BYTES 1"),
        outputs=("answer BYTES 1", "text_output BYTES -1"),
    )
    async with FakeTriton(both, config_of("plain")) as triton:
        reports = await inspect_models(Settings(triton=TritonSettings(url=(triton.url,))))

    # What requires nothing but what vLLM's adapter gives is claimed by that, were the other not there.
    assert {"both": "counting", "plain": "vllm"} == {report.name: report.adapter for report in reports}


async def test_an_adapter_can_be_asked_for_by_name(installed):
    """The settings give it a model that it would not claim."""
    config = config_of("renamed", **{**TENSORS, "outputs": ("reply BYTES 1",)})
    async with FakeTriton(config) as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)), models={"renamed": ModelSettings(adapter="counting")}
        )
        (report,) = await inspect_models(settings)

    assert ("counting", "set in the configuration") == (report.adapter, report.reason)


async def test_mistakes_of_an_adapter_are_its_own(installed):
    """A model that it fails to look at is left to the others, and every other model is served."""
    async with FakeTriton(config_of("confusing"), config_of("odd", **TENSORS)) as triton:
        reports = await inspect_models(Settings(triton=TritonSettings(url=(triton.url,))))

    assert {"confusing": "vllm", "odd": "counting"} == {report.name: report.adapter for report in reports}


def write_distribution(folder: Path, name: str, entry: str) -> None:
    """Write the metadata of a distribution with one entry point."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{entry}\n")


@pytest.mark.parametrize(
    "entry, message",
    [
        ("vllm = counting_adapter:Counting", "The adapter name 'vllm' is taken twice"),
        ("counting = other_adapter:Counting", "The adapter name 'counting' is taken twice"),
        ("broken = no_such_module:Adapter", "The adapter 'broken' (no_such_module:Adapter) cannot be loaded"),
        (
            "broken = counting_adapter:NoSuchClass",
            "The adapter 'broken' (counting_adapter:NoSuchClass) cannot be loaded",
        ),
        ("broken = counting_adapter:Words", "The adapter 'broken' is not a subclass of"),
    ],
)
def test_what_cannot_be_used_says_so(installed, monkeypatch, tmp_path, entry, message):
    """Names that are taken, and things that are no adapters, end the start with a sentence."""
    write_distribution(tmp_path, "another", entry)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigurationError) as caught:
        registry.Registry()

    assert message in caught.value.message
