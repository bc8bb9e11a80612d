"""What the service finds out about a model before anybody asks it: whether it can chat, and what its files tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.scrape import scrape
from tests.unit.prompts.test_template_support import save
from triton_openai.cli.banner import banner_of, render_banner
from triton_openai.config.tree import (
    ApiSettings,
    MetricsSettings,
    ModelDefaults,
    ModelSettings,
    Settings,
    TritonSettings,
)
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Generation
from triton_openai.jobs import EmbeddingJob
from triton_openai.models import loading
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
CHATML = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}


@asynccontextmanager
async def checked(fake: FakeTriton, settings: Settings) -> AsyncIterator[Proxy]:
    """Run the service until it knows of every model whether it can be used."""
    async with serving(settings) as proxy:
        await proxy.ready()
        events = [model.lazy_prompter.checked.wait() for model in proxy.models.served.values()]
        await asyncio.wait_for(asyncio.gather(*events), 120)
        yield proxy


def settings_of(fake: FakeTriton, **fields: Any) -> Settings:
    """Return settings for the fake; *fields* are how its model is used."""
    return Settings(triton=TritonSettings(url=(fake.url,)), models={"m": ModelSettings(**fields)})


@pytest.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    """A Triton with one model of text."""
    async with FakeTriton(config_of("m")) as running:
        running.responses = [{"text_output": "yes"}]
        yield running


def broken_file(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a template that is no Jinja."""
    (tmp_path / "broken.jinja").write_text("{% if %}")
    return {"chat_template": str(tmp_path / "broken.jinja")}


def failing_file(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a template that compiles, and fails on every message."""
    (tmp_path / "failing.jinja").write_text("{{ messages[0].content + 1 }}")
    return {"chat_template": str(tmp_path / "failing.jinja")}


def broken_own(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a tokenizer whose own template is no Jinja."""
    return {"tokenizer": save(tmp_path, tokenizer_config={"chat_template": "{% if %}"})}


def no_template(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a tokenizer without a template."""
    return {"tokenizer": save(tmp_path)}


def no_tokenizer_error(tmp_path: Path) -> dict[str, str]:
    """Return the setting of a tokenizer that is not there."""
    return {"tokenizer": str(tmp_path / "nowhere")}


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        (broken_file, "--chat-template"),
        (failing_file, "--chat-template"),
        (broken_own, "--chat-template"),
        (no_template, "--chat-template"),
        (no_tokenizer_error, "--tokenizer"),
        (lambda _: {}, "--tokenizer"),
    ],
)
async def test_a_model_that_cannot_chat(fake: FakeTriton, tmp_path: Path, wrong: Any, remedy: str) -> None:
    """The log says why before anybody asks, the banner and a metric show it, and it counts as the operator's error."""
    with structlog.testing.capture_logs() as lines:
        async with checked(fake, settings_of(fake, **wrong(tmp_path))) as proxy:
            warned = [line for line in lines if line["event"] == "model cannot chat"]
            listed = await proxy.get("/v1/models")
            answer = await proxy.post(CHATS, HELLO)
            metrics = (await proxy.get("/metrics")).body.decode()
            banner = await banner_of(Settings(), proxy.client.app, "http://here")

    assert [("m", "warning")] == [(line["model"], line["log_level"]) for line in warned]
    assert remedy in warned[0]["reason"]
    assert ["m"] == [model["id"] for model in listed.json["data"]]
    assert (501, "configuration_error", "server_error") == (answer.status, answer.error["code"], answer.error["type"])
    assert str(tmp_path) not in answer.error["message"]
    assert "false" == answer.headers["x-should-retry"]
    assert [] == fake.asked
    assert 'triton_openai_model_can_chat{model="m"} 0.0' in metrics
    assert 'operation="chat",outcome="failed",status="501"' in metrics
    head, row, _, problem, *_ = render_banner(banner, "console").splitlines()[3:]
    assert ["MODEL", "ADAPTER", "TASKS", "CHAT", "STATE"] == head.split()
    assert ["m", "vllm", "generate", "no", "ready"] == row.split()
    assert problem.startswith("  m cannot chat: ")
    assert remedy in problem


async def test_models_that_cannot_chat_for_the_same_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the banner say it once, with the names of all; a model with a reason of its own has its own line."""
    monkeypatch.setattr("triton_openai.models.lookup._TOGETHER_SECONDS", 120)
    async with FakeTriton(*map(config_of, "abcdef")) as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)), models={"c": ModelSettings(tokenizer=save(tmp_path))}
        )
        with structlog.testing.capture_logs() as lines:
            async with checked(triton, settings) as proxy:
                banner = await banner_of(Settings(), proxy.client.app, "http://here")
    warned = [line for line in lines if line["event"] == "model cannot chat"]
    assert [["a", "b", "d", "e", "f"], "c"] == [line.get("models") or line["model"] for line in warned]
    assert [True, False] == ["--chat-template is not given" in line["detail"] for line in warned]
    problems = [line for line in render_banner(banner, "console").splitlines() if "cannot chat" in line]
    assert ["  a, b, d, e and f", "  c"] == [line.partition(" cannot")[0] for line in problems]


async def test_a_model_that_can_chat(fake: FakeTriton, tmp_path: Path) -> None:
    """Nothing is warned of; what a client's messages do to a template stays the client's."""
    template = CHATML["chat_template"] + "{% if messages | length > 1 %}{{ nothing.at_all }}{% endif %}"
    own = {"tokenizer": save(tmp_path, tokenizer_config={"chat_template": template})}
    with structlog.testing.capture_logs() as lines:
        async with checked(fake, settings_of(fake, **own)) as proxy:
            answer = await proxy.post(CHATS, HELLO)
            failed = await proxy.post(CHATS, {**HELLO, "messages": HELLO["messages"] * 2})
            metrics = (await proxy.get("/metrics")).body.decode()
            banner = await banner_of(Settings(), proxy.client.app, "http://here")

    assert (200, 400) == (answer.status, failed.status)
    assert 'triton_openai_model_can_chat{model="m"} 1.0' in metrics
    assert [] == [line for line in lines if "cannot" in line["event"]]
    assert ["m", "vllm", "generate", "yes", "ready"] == render_banner(banner, "console").splitlines()[4].split()


async def test_completions_of_a_model_that_cannot_chat(fake: FakeTriton) -> None:
    """Without a tokenizer and a template they work all the same."""
    async with checked(fake, settings_of(fake)) as proxy:
        assert 200 == (await proxy.post(COMPLETIONS, {"model": "m", "prompt": "a"})).status


async def test_what_could_not_be_loaded_is_tried_again(
    fake: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask: a file that appears, or a hub that comes back, is enough."""
    monkeypatch.setattr("triton_openai.models.lookup._RECHECK_SECONDS", 0.01)
    folder = tmp_path / "later"
    with structlog.testing.capture_logs() as lines:
        async with checked(fake, settings_of(fake, tokenizer=str(folder))) as proxy:
            model = proxy.models.served["m"]
            assert [False] == [served.can_chat for served in proxy.models.served.values()]
            save(tmp_path / "made", tokenizer_config=CHATML)
            # At once: half of its files are a tokenizer without a template.
            (tmp_path / "made").rename(folder)
            async with asyncio.timeout(120):
                while not model.can_chat:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
    assert ["model cannot chat", "model can chat now"] == [line["event"] for line in lines if " chat" in line["event"]]


async def test_a_tokenizer_that_takes_for_ever(
    fake: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are told to come again, and find it when it is there."""
    monkeypatch.setattr(loading, "LOAD_SECONDS", 0.05)
    folder = save(tmp_path, tokenizer_config=CHATML)
    loop, release = asyncio.get_running_loop(), asyncio.Event()
    load = Tokenizer.load

    def slow(source: str) -> Tokenizer:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return load(source)

    monkeypatch.setattr(Tokenizer, "load", slow)
    async with checked(fake, settings_of(fake, tokenizer=folder)) as proxy:
        early = await proxy.post(CHATS, HELLO)
        release.set()
        monkeypatch.setattr(loading, "LOAD_SECONDS", 120)
        late = await proxy.post(CHATS, HELLO)

    assert (501, 200) == (early.status, late.status)
    assert int(early.headers["Retry-After"]) >= 1
    assert "x-should-retry" not in early.headers


async def test_names_that_no_model_has(fake: FakeTriton) -> None:
    """Settings for them do nothing, which only a warning can show; each is told once."""
    settings = Settings(
        triton=TritonSettings(url=(fake.url,)),
        api=ApiSettings(default_model="n"),
        models={
            "m": ModelSettings(aliases=("chat",)),
            "mm": ModelSettings(tokenizer="/x"),
            "other": ModelSettings(aliases=("alias",)),
            "chat": ModelSettings(tokenizer="/x"),
        },
    )
    with structlog.testing.capture_logs() as lines:
        async with serving(settings) as proxy:
            await proxy.ready()
            fake.waiting["new"] = ""
            await proxy.models.fleet.refresh()

    warned = [line for line in lines if line["event"] == "a name in the settings is no model's"]
    unknown = "The settings are for a model that Triton does not have."
    assert {
        "mm": unknown,
        "other": unknown,
        "chat": "The settings are for an alias: give them to the model 'm'.",
        "n": "The default model is none that Triton has.",
    } == {line["name"]: line["reason"] for line in warned}
    assert 4 == len(warned)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the files of ``m``, as far as the service reads them."""
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    engine = {
        "model": save(tmp_path / "tokenizer", tokenizer_config=CHATML),
        "max_model_len": 64,
        "quantization": "awq",
        "enable_lora": True,
    }
    (folder / "model.json").write_text(json.dumps(engine))
    (folder / "multi_lora.json").write_text('{"french": "/loras/french"}')
    return tmp_path / "models"


async def test_the_files_of_a_model_tell(fake: FakeTriton, repository: Path) -> None:
    """The files of a model tell its tokenizer, its context length and its LoRA adapters without settings."""
    metrics = MetricsSettings(vllm_names=True, triton_url="http://127.0.0.1:1/metrics")
    settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(repository,)), metrics=metrics)
    async with checked(fake, settings) as proxy:
        listed = {model["id"]: model for model in (await proxy.get("/v1/models")).json["data"]}
        found = await scrape(proxy)
        answer = await proxy.post(CHATS, HELLO)
        long = await proxy.post(CHATS, {**HELLO, "max_tokens": 64})
        too_long = await proxy.post(CHATS, {"model": "m", "messages": [{"role": "user", "content": "word " * 99}]})

    # The engine's default.
    assert 0 < found.sum("vllm:lora_requests_info", model_name="m", max_lora="1")
    assert {"m": 64, "french": 64} == {name: model["max_model_len"] for name, model in listed.items()}
    assert 200 == answer.status
    # An answer of open length goes on to the end of the context.
    assert 64 - len("Hello") == json.loads(fake.asked[0][1]["sampling_parameters"])["max_tokens"]
    assert (200, str(64 - len("Hello"))) == (long.status, long.headers["x-max-tokens"])
    assert (400, "context_length_exceeded") == (too_long.status, too_long.error["code"])


@pytest.mark.parametrize(
    "written, expected",
    [
        ({"enable_lora": False}, ["m"]),
        ({"enable_lora": "true"}, ["french", "m"]),
        ({"max_model_len": "32k", "runner": "generate"}, ["m"]),
        ({"runner": "pooling"}, ["m"]),
        ({"model": None, "enable_lora": None}, ["m"]),
    ],
)
async def test_what_else_files_say(
    fake: FakeTriton, repository: Path, written: dict[str, Any], expected: list[str]
) -> None:
    """LoRA is off by default, the task may be given, and values that only the engine understands are left to it."""
    (repository / "m" / "1" / "model.json").write_text(json.dumps(written))
    settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(repository,)))
    async with checked(fake, settings) as proxy:
        listed = (await proxy.get("/v1/models")).json["data"]
        metadata = proxy.models.served["m"].metadata

    runner = written.get("runner")
    assert {"pooling": {Generation}, "generate": {EmbeddingJob}}.get(runner or "", set()) == metadata.lacks
    assert expected == sorted(model["id"] for model in listed)
    assert all("max_model_len" not in model for model in listed)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b""])
async def test_a_file_that_cannot_be_read(fake: FakeTriton, repository: Path, content: bytes) -> None:
    """The model is served as if there were none."""
    (repository / "m" / "1" / "model.json").write_bytes(content)
    settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(repository,)))
    async with checked(fake, settings) as proxy:
        assert 200 == (await proxy.post(COMPLETIONS, {"model": "m", "prompt": "a"})).status


async def test_what_is_said_wins_over_files(fake: FakeTriton, repository: Path, tmp_path: Path) -> None:
    """The operator's settings come first."""
    own = ModelDefaults(max_model_len=32, tokenizer=save(tmp_path / "mine"), chat_template="chatml")
    settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(repository,)), defaults=own)
    async with checked(fake, settings) as proxy:
        served = proxy.models.served["m"]
        prompter = await served.prompter()

    assert 32 == served.settings.max_model_len
    assert f"{tmp_path / 'mine'} (--tokenizer)" == prompter.provenance.tokenizer


async def test_a_model_of_the_hub_that_cannot_be_had(
    fake: FakeTriton, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for it by a setting, so completions work; it is tried again, and the warning names it."""
    (repository / "m" / "1" / "model.json").write_text('{"model": "org/name", "revision": "v1"}')
    asked: list[str] = []

    def unreachable(source: str) -> Tokenizer:
        asked.append(source)
        raise ConfigurationError("the hub cannot be reached")

    monkeypatch.setattr("triton_openai.models.lookup._RECHECK_SECONDS", 0.01)
    monkeypatch.setattr(Tokenizer, "load", unreachable)
    settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(repository,)))
    with structlog.testing.capture_logs() as lines:
        async with checked(fake, settings) as proxy:
            completed = await proxy.post(COMPLETIONS, {"model": "m", "prompt": "a"})
            async with asyncio.timeout(120):
                while len(asked) < 3:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)

    assert 200 == completed.status
    assert {"org/name@v1"} == set(asked)
    warned = [line for line in lines if line["event"] == "model cannot chat"]
    assert 1 == len(warned)
    assert "org/name@v1 (named by the model's files) is unusable" in warned[0]["detail"]


async def test_a_prompt_far_beyond_the_context(fake: FakeTriton, tmp_path: Path) -> None:
    """The tokenizer's own limit holds where nothing else is known; the model is not asked."""
    folder = save(tmp_path, tokenizer_config={"model_max_length": 10})
    async with checked(fake, settings_of(fake, tokenizer=folder)) as proxy:
        fits = await proxy.post(COMPLETIONS, {"model": "m", "prompt": "abcdefghij"})
        counted = await proxy.post(COMPLETIONS, {"model": "m", "prompt": "abcdefghijk"})
        asked = len(fake.asked)
        weighed = await proxy.post(COMPLETIONS, {"model": "m", "prompt": "ab" * 10_000})

    assert (200, 400, 400) == (fits.status, counted.status, weighed.status)
    assert 1 == asked == len(fake.asked)
    assert "your prompt has 11 tokens" in counted.error["message"]
    assert "your prompt has 20000 bytes" in weighed.error["message"]
    assert {"context_length_exceeded"} == {counted.error["code"], weighed.error["code"]}


async def test_a_text_to_embed_far_beyond_the_context(tmp_path: Path) -> None:
    """
    A text to embed far beyond the context is refused by its size, however it comes; one that the request lets be
    cut is not.
    """
    embeds = config_of("m", inputs=("text BYTES 1",), outputs=("embedding FP32 4",), backend="python")
    async with FakeTriton(embeds) as fake:
        fake.responses = [{"embedding": [1.0] * 4}]
        own = {"tokenizer": save(tmp_path), "max_model_len": 10}
        async with checked(fake, settings_of(fake, **own)) as proxy:
            body = {"model": "m", "input": ["a", "ab" * 10_000]}
            refused = await proxy.post("/v1/embeddings", body)
            scored = await proxy.post("/v1/score", {"model": "m", "queries": "a", "items": body["input"]})
            asked = len(fake.asked)
            cut = await proxy.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 10})

    assert [(400, "context_length_exceeded")] * 2 == [(one.status, one.error["code"]) for one in (refused, scored)]
    assert ("input", "items") == (refused.error["param"], scored.error["param"])
    assert "your prompt has 20000 bytes" in refused.error["message"]
    assert 0 == asked
    assert 200 == cut.status


LLMAPI = config_of(
    "m",
    inputs=("text_input BYTES 1", "sampling_param_max_tokens? INT32 1", "streaming? BOOL 1"),
    outputs=("text_output BYTES -1",),
    backend="python",
)


@pytest.mark.parametrize(
    "written, tokenizer, length",
    [
        ("model: org/name\nmax_seq_len: 64\ntriton_config: {decoupled: true}", "org/name", 64),
        ("model: org/name\nrevision: v1", "org/name@v1", None),
        ("model: org/name\nrevision: v1\ntokenizer: org/other", "org/other", None),
        ("model: org/name\nrevision: v1\ntokenizer: org/other\ntokenizer_revision: v2", "org/other@v2", None),
        ("max_seq_len: 32k", None, None),
        ("max_seq_len: 0", None, None),
        ("- model", None, None),
        ("model: [", None, None),
        ("model: 2024-13-45", None, None),
        ("[" * 100_000, None, None),
        ("", None, None),
    ],
)
async def test_what_the_file_of_an_llm_api_model_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, tokenizer: str | None, length: int | None
) -> None:
    """The file of an LLM API model tells its tokenizer and its context length; what cannot be read is passed over."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.yaml").write_text(written)
    resolve = Prompter.resolve
    monkeypatch.setattr(Prompter, "resolve", lambda *_: resolve(ModelSettings()))
    async with FakeTriton(LLMAPI) as fake:
        settings = Settings(triton=TritonSettings(url=(fake.url,), repository=(tmp_path,)))
        async with checked(fake, settings) as proxy:
            served = proxy.models.served["m"]

    assert "trtllm-llmapi" == served.adapter.name
    assert (tokenizer, length) == (served.lazy_prompter.named, served.settings.max_model_len)
