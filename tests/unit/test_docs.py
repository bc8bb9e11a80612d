"""The documents say what the code does: generated parts are current, names exist, and examples work."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from docs import generate
from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.documents import DOCUMENTS, ROOT, blocks, read
from tests.engine.page import written
from tests.engine.reasons import REASONS
from tests.proxy_fixture import serving
from triton_openai.access.keys import read_keys
from triton_openai.adapters._common import registry
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings, ModelSettings, Settings, TritonSettings
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.prompts import prompter


def code_of(document: str, language: str) -> list[str]:
    """Return the blocks of *language* in *document*."""
    return [block.code for block in blocks(language, documents=(document,))]


def anchor(heading: str) -> str:
    """Return what a link to *heading* has behind its ``#``."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@every_case("document", generate.PARTS)
def test_generated_parts(document: str) -> None:
    """Generated parts are what `python docs/generate.py` writes."""
    assert generate.renewed(document, read(document)) == read(document)


@every_case("document", DOCUMENTS)
def test_links(document: str) -> None:
    """What is linked to exists, headings included."""
    for target in re.findall(r"\]\(([^)\s]+)\)", read(document)):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.is_file(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), target


def test_differences_from_vllm() -> None:
    """The page is what `make engine` writes of the reasons that it knows, each of which explains something."""
    text = read("docs/reference/vllm-differences.md")
    requests, equal, unknown = map(int, re.findall(r"(\d+)\s(?:requests to|have equal|differ in)", text))
    counts = list(map(int, re.findall(r" \| (\d+) \|$", text, re.MULTILINE)))

    assert written(requests, equal, dict(zip((*REASONS, None), (*counts, unknown), strict=True))) == text
    assert min(counts) > 0


def test_every_adapter_is_listed() -> None:
    """The table of adapters names every one there is, and no other."""
    table = read("docs/explanation/adapters.md").partition("| Adapter |")[2].partition("\n\n")[0]

    assert set(registry.BUILT_IN) == set(re.findall(r"^\| `([\w-]+)` \| ", table, re.MULTILINE))
    assert all(f"`{name}`" in read("docs/guides/chat-templates.md") for name in prompter.NAMES)


def test_every_target_is_listed() -> None:
    """Contributors find every target of the Makefile, and no other."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE)) - {"help", "clean"}

    assert targets == set(re.findall(r"`make ([\w-]+)`", read("CONTRIBUTING.md"))) - {"help"}


def test_every_parser_is_listed() -> None:
    """The tables of formats name every parser there is, and no other."""
    calls, reasoning = (
        re.findall(r"^\| `(\w+)` \| ", part, re.MULTILINE)
        for part in read("docs/guides/tools-and-reasoning.md").split("| Reasoning |")
    )

    assert list(TOOL_PARSERS.table) == calls
    assert list(REASONING_PARSERS.table) == reasoning
    assert f"[{len(calls)} formats of tool calls, {len(reasoning)} of reasoning]" in read("README.md")
    assert f" {len(calls)} formats of tool calls," in read("docs/guides/migrating.md")


@every_case("document", DOCUMENTS)
def test_yaml(document: str, tmp_path: Path) -> None:
    """A settings file in a document is accepted as it stands."""
    for number, text in enumerate(code_of(document, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert load_settings({"config": str(file)}, {}) != Settings()


def test_the_file_of_api_keys(tmp_path: Path) -> None:
    """The example is accepted as it stands."""
    (text,) = code_of("docs/guides/keys-and-limits.md", "yml")
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    ring = read_keys(AccessSettings(api_keys_file=file))
    assert ring is not None
    assert {"team-a", "team-b"} == {key.name for key in ring.values()}


async def test_the_example_of_an_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The example of an adapter is registered as the document says, claims its models, and serves them."""
    (code,) = code_of("docs/guides/writing-an-adapter.md", "python")
    (metadata,) = code_of("docs/guides/writing-an-adapter.md", "ini")
    (tmp_path / "acme_adapters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    parser = configparser.ConfigParser()
    parser.read_string(metadata)
    name, _, value = parser["options.entry_points"][registry.ENTRY_POINT_GROUP].strip().partition(" = ")
    point = EntryPoint(name, value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "third_party_adapters", lambda path: [point])

    config = config_of(
        "acme",
        inputs=("PROMPT BYTES 1", "LENGTH? INT32 1", "TEMPERATURE? FP32 1"),
        outputs=("COMPLETION BYTES 1",),
        backend="python",
    )
    async with FakeTriton(config) as triton:
        triton.responses = [{"COMPLETION": "one"}, {"COMPLETION": " two"}]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            request: dict[str, Any] = {"model": "acme", "prompt": "Hello"}
            answer = await proxy.post("/v1/completions", {**request, "max_tokens": 7, "temperature": 0.5})
            refused = await proxy.post("/v1/completions", {**request, "top_p": 0.5})

    assert name == registry.Registry().adapters[name].name == "prompt-completion"
    assert "one two" == answer.json["choices"][0]["text"]
    (asked,) = (body for _, body in triton.asked)
    assert {"PROMPT": "Hello", "LENGTH": 7, "TEMPERATURE": 0.5} == {key: asked[key] for key in asked if key != "id"}
    assert (400, "top_p") == (refused.status, refused.error["param"])


async def test_the_example_of_a_tool_parser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    The example of a tool parser is registered as the document says, and reads the calls of a chat, streamed or not.
    """
    (code,) = code_of("docs/guides/writing-a-parser.md", "python")
    (metadata,) = code_of("docs/guides/writing-a-parser.md", "ini")
    (tmp_path / "acme_parsers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    parser = configparser.ConfigParser()
    parser.read_string(metadata)
    name, _, value = parser["options.entry_points"]["triton_openai.tool_parsers"].strip().partition(" = ")
    point = EntryPoint(name, value, "triton_openai.tool_parsers")
    monkeypatch.setattr("triton_openai.parsers.parser_registry.entry_points", lambda group: [point])
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ tools }}")
    settings = Settings(defaults=ModelSettings(chat_template=str(template), tool_call_parser=name))
    call = 'CALL weather {"city": "Rome"}'

    async with FakeTriton(
        config_of(
            "acme",
            inputs=("text_input BYTES 1", "sampling_parameters? BYTES 1", "exclude_input_in_output? BOOL 1"),
            outputs=("text_output BYTES 1",),
        )
    ) as triton:
        triton.responses = [{"text_output": "Well\nCA"}, {"text_output": call[2:]}]
        settings = msgspec.structs.replace(settings, triton=TritonSettings(url=(triton.url,)))
        async with serving(settings) as proxy:
            chat: dict[str, Any] = {
                "model": "acme",
                "messages": [{"role": "user", "content": "Hello"}],
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            }
            answer = await proxy.post("/v1/chat/completions", chat)
            streamed = await proxy.post("/v1/chat/completions", {**chat, "stream": True})

    assert 200 == answer.status, answer.body
    message = answer.json["choices"][0]["message"]
    assert "Well\n" == message["content"]
    assert {"name": "weather", "arguments": '{"city": "Rome"}'} == message["tool_calls"][0]["function"]
    deltas = [choice["delta"] for chunk in streamed.chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [{"name": "weather", "arguments": ""}, {"arguments": '{"city": "Rome"}'}] == calls


async def test_a_model_without_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An adapter whose model has no input for the limit serves those who do not ask for one."""
    (code,) = code_of("docs/guides/writing-an-adapter.md", "python")
    (tmp_path / "acme_unlimited.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("prompt-completion", "acme_unlimited:PromptCompletion", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "third_party_adapters", lambda path: [point])

    async with FakeTriton(config_of("acme", inputs=("PROMPT BYTES 1",), outputs=("COMPLETION BYTES 1",))) as triton:
        triton.responses = [{"COMPLETION": "one"}]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            answer = await proxy.post("/v1/completions", {"model": "acme", "prompt": "Hello"})
            refused = await proxy.post("/v1/completions", {"model": "acme", "prompt": "Hello", "max_tokens": 5})

    assert (200, "one") == (answer.status, answer.json["choices"][0]["text"])
    assert (400, "max_tokens") == (refused.status, refused.error["param"])


def test_make_says_what_it_installs() -> None:
    """Pip is silent for minutes: what comes, and how large it is, is said before."""
    lines = read("Makefile").splitlines()
    installing = [number for number, line in enumerate(lines) if line.startswith("\t@$(INSTALL)")]

    assert len(installing) > 3
    for number in installing:
        assert re.search(r"^\t\$\(call announce,.*,about [\d.]+ [MG]B\)$", lines[number - 1]), lines[number]
