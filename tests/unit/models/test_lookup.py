"""Which names are served, and what becomes of them when settings change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
import structlog
from msgspec.structs import replace

from tests.cases import every_case
from tests.clock import turns
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.faces import TOKENIZER
from tests.proxy_fixture import serving
from tests.speech import write_whisper_tokenizer
from triton_openai.access.keys import ApiKey
from triton_openai.adapters._common.base import Capabilities, Recognition, Synthesis
from triton_openai.config.tree import ApiSettings, ModelSettings, ModerationSettings, Settings, TritonSettings
from triton_openai.errors import ConfigurationError, ModelNotFound, UpstreamUnavailable
from triton_openai.models.binding import Binder
from triton_openai.models.loading import LazyPrompter
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.triton.catalog import Snapshot


async def test_names_of_lora_adapters() -> None:
    """One that two models have, or that a model has itself, is none of an adapter; with the model's it is."""
    loras = {"m": ModelSettings(loras=("french",)), "n": ModelSettings(loras=("french", "german", "m"))}
    async with FakeTriton(config_of("m"), config_of("n")) as triton:
        for separator, german, others in ((None, "german", set()), ("-", "n-german", {"m-french", "n-french", "n-m"})):
            settings = Settings(
                triton=TritonSettings(url=(triton.url,)), api=ApiSettings(lora_separator=separator), models=loras
            )
            async with serving(settings) as proxy:
                await proxy.ready()
                served = proxy.models.served
            assert {"m", "n", german, *others} == served.keys()
            assert ("n", "german") == (served[german].triton_model, served[german].answers_as)
            assert None is served["m"].lora


async def test_settings_that_take_a_model_away_change_nothing() -> None:
    """Settings that take a model away are refused, and the next look at Triton finds the model as it was."""
    async with FakeTriton(config_of("m")) as triton:
        settings = Settings(triton=TritonSettings(url=(triton.url,)))
        async with serving(settings) as proxy:
            await proxy.ready()
            wrong = replace(settings, models={"m": ModelSettings(adapter="embeddings")})
            with pytest.raises(ConfigurationError, match=r"m: .*'embeddings' needs"):
                await proxy.models.apply_settings(wrong, reload=False)
            triton.models["n"] = {**triton.models["m"], "name": "n"}
            await proxy.models.fleet.reload()
            assert {"m", "n"} == proxy.models.served.keys()
            assert "vllm" == proxy.models.served["m"].adapter.name

            await proxy.models.apply_settings(
                replace(settings, models={"m": ModelSettings(aliases=("a",))}), reload=False
            )
            assert "m" == (await proxy.models.find("a")).triton_model

            patterns = {"m": ModelSettings(aliases=("gpt-*",)), "n": ModelSettings(aliases=("gpt-5*",))}
            await proxy.models.apply_settings(replace(settings, models=patterns), reload=False)
            for name, owner in (("gpt-4", "m"), ("gpt-5.5", "n"), ("m", "m")):
                found = await proxy.models.find(name)
                assert (owner, owner) == (found.triton_model, found.name)
            assert {"m", "n"} == proxy.models.served.keys()
            with pytest.raises(ModelNotFound):
                await proxy.models.find("gp")


async def test_a_name_that_no_model_has() -> None:
    """The error suggests a similar name, else lists a few names, and never one that the key may not use."""
    async with (
        FakeTriton(config_of("ensemble"), config_of("vllm_model")) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        for name, allowed, message in (
            ("ensembel", ("*",), "does not exist. Did you mean ensemble?"),
            ("gpt-4o", ("*",), "does not exist. Available: ensemble, vllm_model."),
            ("ensembel", ("vllm*",), "does not exist, or this key may not use it. Available: vllm_model."),
            ("ensembel", ("ens*", "vllm*"), "does not exist. Did you mean ensemble?"),
            ("ensembel", (), "does not exist, or this key may not use it."),
        ):
            with pytest.raises(ModelNotFound) as caught:
                await proxy.models.find(name, ApiKey(name="k", models=allowed))
            assert f"The model '{name}' {message}" == caught.value.message


async def test_a_model_that_is_gone() -> None:
    """
    A model that is gone is none from the next look on, and Triton that was away is looked at first; a new one is
    found.
    """
    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        for old, new in ("mn", "nm"):
            triton.models[new] = {**triton.models.pop(old), "name": new}
            if new == "n":
                proxy.models.fleet.snapshot = Snapshot(error=UpstreamUnavailable("It is away."))
            else:
                await proxy.models.fleet.reload()
            with pytest.raises(ModelNotFound):
                await proxy.models.find(old)
            assert new == (await proxy.models.find(new)).triton_model


@contextmanager
def slow_binding() -> Iterator[tuple[asyncio.Event, threading.Event]]:
    """Yield an event that is set when the first model is being bound, and one that the binding waits for."""
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()
    go_on = threading.Event()
    bind = Binder.bind_with_variants

    def bind_slowly(*arguments: Any, **keywords: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(120)
        return bind(*arguments, **keywords)

    with patch.object(Binder, "bind_with_variants", bind_slowly):
        yield begun, go_on


async def test_a_list_waits_for_the_models_that_triton_has() -> None:
    """A new process lists what its first look at Triton finds; of a Triton that comes later, what is being bound."""
    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        (listed,) = (await proxy.get("/v1/models")).json["data"]
        assert "m" == listed["id"]

        models = proxy.models
        models.served = {}
        with slow_binding() as (begun, go_on):
            binding = asyncio.create_task(models.apply_settings(Settings(), reload=False))
            await begun.wait()
            waiting = asyncio.create_task(models.listed())
            await asyncio.sleep(0)
            assert not waiting.done()
            go_on.set()
            assert ["m"] == list(await waiting)
            await binding


@every_case("name, model", [("omni-moderation-latest", "classifier"), ("m:french", "m")])
async def test_a_name_that_stands_for_what_is_served_waits_for_it(name: str, model: str) -> None:
    """A process that has just started finds the classifier that moderates, and the model of an unlisted adapter."""
    classifier = config_of("classifier", inputs=("text BYTES 1",), outputs=("logits FP32 3",), backend="python")
    labels = ModerationSettings(labels={"1": "hate"})
    settings = Settings(api=ApiSettings(lora_separator=":"), models={"classifier": ModelSettings(moderation=labels)})
    async with FakeTriton(config_of("m"), classifier) as triton:
        settings = replace(settings, triton=TritonSettings(url=(triton.url,)))
        async with serving(settings) as proxy:
            models = proxy.models
            await models.find("m")
            models.served = {}
            with slow_binding() as (begun, go_on):
                binding = asyncio.create_task(models.apply_settings(settings, reload=False))
                await begun.wait()
                finding = asyncio.create_task(models.find(name))
                await turns()
                go_on.set()
                assert model == (await finding).triton_model
                await binding


async def test_a_model_that_differs_between_tritons() -> None:
    """The log tells once how, with the names of both; and again when it differs in another way."""
    async with FakeTriton(config_of("m")) as first, FakeTriton(config_of("m")) as second:
        first.version, second.version = "2.51.0", "2.52.0"
        settings = Settings(triton=TritonSettings(endpoints=(f"a={first.url}", f"b={second.url}")))
        with structlog.testing.capture_logs() as lines:
            async with serving(settings) as proxy:
                await proxy.ready()
                second.loaded = "2"
                for _ in range(2):
                    await proxy.models.fleet.reload()
                model = proxy.models.served["m"]
        told = [line["differences"] for line in lines if line["event"] == "model differs between Tritons"]
        release = "The release of Triton is 2.51.0 at a, 2.52.0 at b."
        assert told == [[release], [release, "Its loaded version is 1 at a, 2 at b."]]

        metadata = replace(model.metadata, max_model_len=2048, tokenizer="/models/other")
        (there,) = model.variants
        assert replace(model, variants=(replace(there, metadata=metadata),)).differences == [
            "Its context length is unknown at a, 2048 at b.",
            "Its tokenizer is unknown at a, other at b.",
            release,
        ]


async def test_an_engine_without_a_tokenizer_that_works() -> None:
    """The model's own adapter answers for it: without a tokenizer, and with one that is another model's."""
    models, prompter = Models(Settings(), Mock()), Mock(tokenizer=None)
    models.fleet.snapshot = Snapshot()
    engine = Mock(jobs=(), capabilities=Capabilities(tokens=True, tokenizer_has=("<|startoftranscript|>",)))
    model = ServedModel(
        name="m", triton_model="m", adapter=engine, reason="", settings=ModelSettings(),
        lazy_prompter=Mock(get=AsyncMock(return_value=prompter)), text_level=(own := Mock(jobs=())),
    )  # fmt: skip
    models.served = {"m": model}

    assert own is (await models.find("m")).adapter
    prompter.tokenizer = Mock(token_id=Mock(return_value=None))
    found = await models.find("m")
    assert own is found.adapter
    assert "another model's: it has no '<|startoftranscript|>'" in found.reason
    prompter.tokenizer = Mock(token_id=Mock(return_value=50_258))
    assert model is await models.find("m")


@every_case("common, answers", [(True, "own"), (False, "engine")])
async def test_a_tokenizer_that_does_not_load(common: bool, answers: str) -> None:
    """The tokenizer of all models breaks no model that does without it; one that is named for a model is reported."""
    models = Models(Settings(), Mock())
    models.fleet.snapshot = Snapshot()
    prompter = Mock(resolved=None, get=AsyncMock(side_effect=ConfigurationError("It cannot be loaded.")))
    adapters = {"engine": Mock(jobs=()), "own": Mock(jobs=())}
    model = ServedModel(
        name="m", triton_model="m", adapter=adapters["engine"], reason="", settings=ModelSettings(),
        lazy_prompter=prompter, text_level=adapters["own"], common_tokenizer=common,
    )  # fmt: skip
    models.served = {"m": model}
    assert adapters[answers] is (await models.find("m")).adapter


@every_case(
    "capabilities, tokenizer, said",
    [
        (Capabilities(tokens=True, tokenizer_has=("<|startoftranscript|>",)), "chat", "--tokenizer whisper=SOURCE"),
        (Capabilities(tokens=True, tokenizer_has=("<|startoftranscript|>",)), "whisper", None),
        (Capabilities(tokens=True), "chat", None),
        (Capabilities(recognition=Recognition(max_seconds=30)), "missing", None),
        (Capabilities(synthesis=Synthesis(rate=24_000, max_seconds=30)), "missing", None),
    ],
)
async def test_checks_of_tokenizers(
    capabilities: Capabilities, tokenizer: str, said: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whisper's engine needs its own tokenizer; what hears or speaks in texts needs none, and none is loaded."""
    folder = tmp_path_factory.mktemp("tokenizers")
    sources = {
        "chat": str(TOKENIZER),
        "whisper": str(write_whisper_tokenizer(folder / "whisper")),
        "missing": str(folder / "missing"),
    }
    prompter = LazyPrompter(ModelSettings(tokenizer=sources[tokenizer]), None)
    failure = await prompter.check("whisper", chats=False, capabilities=capabilities)
    assert (said is None) == (failure is None)
    if failure is not None:
        assert str(said) in failure.reason
