"""The commands of the README and of some guides work. test_demo.py runs the examples in Python and with curl."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import proxy_fixture
from tests.clients.service import serving
from tests.documents import ROOT, blocks
from tests.triton_fixture import TestTriton
from triton_openai.cli.arguments import parse
from triton_openai.config.sources import load_settings

FIXTURES = ROOT / "tests/fixtures"
#: A model on the hub, which stands for the tokenizer of the demo's models here.
HUB_NAME = "meta-llama/Llama-3.1-8B-Instruct"


GUIDES = ("README.md", "docs/guides/chat-templates.md", "docs/guides/keys-and-limits.md")
SHELL = [line for block in blocks("sh", documents=GUIDES) for line in block.commands]


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("triton-openai serve")])
async def test_commands(triton: TestTriton, line: str) -> None:
    """A command works; hosts, folders and hub names stand for those of the reader."""
    replaced = {"http://triton:8000": triton.http_url, HUB_NAME: str(triton.tokenizer)}
    arguments = shlex.split(line)[1:]
    for name, value in replaced.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    # In this process, which is a tenth of the work; test_commands.py has the process.
    async with proxy_fixture.serving(load_settings(parse(arguments).settings, {})) as proxy:
        await proxy.ready()
        key = arguments[-1] if "--api-key" in arguments else None
        assert (401 if key else 200) == (await proxy.get("/v1/models")).status
        async with proxy.client.get("/v1/models", headers={"api-key": key} if key else {}) as listing:
            assert "vllm_model" in {model["id"] for model in (await listing.json())["data"]}
        if HUB_NAME in line:
            messages = [{"role": "user", "content": "Hello"}]
            chat = {"model": "vllm_model", "messages": messages}
            assert 200 == (await proxy.post("/v1/chat/completions", chat)).status


def test_inspect(triton: TestTriton) -> None:
    """``inspect`` lists the models of the Triton that is named."""
    (line,) = {line for line in SHELL if "inspect" in line}

    assert "ensemble" in python("-m", *line.replace("-", "_", 1).replace("http://triton:8000", triton.http_url).split())


def test_the_other_commands() -> None:
    """`make demo` is what tests/integration/test_commands.py runs, and what pip makes is test_image.py's."""
    commands = {line for block in blocks("sh", documents=("README.md",)) for line in block.commands}
    others = {line for line in commands if not line.startswith("triton-openai ")}

    assert {"make demo", "pip install ."} == others
    assert "triton-openai demo" in (ROOT / "Makefile").read_text()


def test_the_example_with_onnx(tmp_path: Path, triton: TestTriton) -> None:
    """The script writes a repository that the service starts a Triton on, here with a tiny encoder."""
    source, repository = tmp_path / "source", tmp_path / "repository"
    (source / "onnx").mkdir(parents=True)
    shutil.copy(FIXTURES / "encoder.onnx", source / "onnx/model.onnx")
    shutil.copy(triton.tokenizer / "tokenizer.json", source)
    python("examples/embeddings-onnx/make_repository.py", "--source", str(source), str(repository))

    with serving(tmp_path, "--model-repository", str(repository), "--tokenizer", str(triton.tokenizer)) as running:
        texts = ["Paris is a city.", "Paris is a city.", "The sea"]
        reply = running.post("/v1/embeddings", {"model": "text_embedding", "input": texts})
        first, second, third = (item["embedding"] for item in reply.json["data"])
        running.process.terminate()
        assert 0 == running.process.wait(120)
    assert 8 == len(first)
    assert first == pytest.approx(second)
    assert first != pytest.approx(third)
    assert 1 == pytest.approx(sum(number * number for number in first), abs=1e-5)


def python(*arguments: str) -> str:
    """Run Python in the top folder and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_OPENAI_")}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    return result.stdout
