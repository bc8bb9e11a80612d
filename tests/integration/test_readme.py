"""What the README tells people to type does what it says, against a real Triton."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.service import Service, serving
from tests.triton_fixture import TestTriton
from triton_openai.cli.inspect import inspect_models, render
from triton_openai.config import Settings, TritonSettings
from triton_openai.demo.repository import build_repository

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "docs/guides/chat-templates.md",
    "docs/reference/settings.md",
    "docs/guides/troubleshooting.md",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: A model on the hub, which stands for the tokenizer of the demo's models here.
HUB_NAME = "meta-llama/Llama-3.1-8B-Instruct"


def blocks(*languages: str) -> list[str]:
    """Return the fenced blocks of these languages."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    return [body for text in texts for language, body in BLOCK.findall(text) if language in languages]


CURL = [block for block in blocks("sh") if block.startswith("curl")]
COMMANDS = [line for block in blocks("sh") if block not in CURL for line in block.splitlines()]


@pytest.fixture(scope="module")
def service(triton: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that the examples ask."""
    folder = tmp_path_factory.mktemp("service")
    with serving(folder, "--triton-url", triton.http_url, "--tokenizer", str(triton.tokenizer)) as running:
        yield running
        assert [] == running.complaints()


def test_every_block_is_of_a_known_kind() -> None:
    """There is no block in the README that no test here looks at."""
    kinds = {language for language, _ in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}

    assert {"sh", "python", "text"} == kinds
    assert 2 == len(CURL)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.split()[1])
def test_python(service: Service, block: str) -> None:
    """An example in Python runs as it stands and prints an answer."""
    code = block.replace("http://localhost:9000", service.address)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100, check=False
    )

    assert (0, "") == (result.returncode, result.stderr)
    assert ("stand-in" in result.stdout) == ("chat" in block)
    if "embeddings" in block:
        assert "64" == result.stdout.split()[-1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("block", CURL)
def test_curl(service: Service, block: str) -> None:
    """An example with curl runs as it stands and prints an answer."""
    command = block.replace("http://localhost:9000", service.address).replace("curl ", "curl -sS --fail -m 60 ", 1)
    result = subprocess.run(["/bin/sh", "-ec", command], capture_output=True, text=True, timeout=100, check=False)

    assert (0, "") == (result.returncode, result.stderr)
    assert ('"relevance_score":' if "/rerank" in block else '"object":"chat.completion"') in result.stdout


async def test_the_sample_of_inspect(triton: TestTriton) -> None:
    """It is what the command prints for the demo's ensemble, but for the folder of the tokenizer."""
    (sample,) = blocks("text")
    reports = await inspect_models(Settings(triton=TritonSettings(url=(triton.http_url,))))
    printed = render([report for report in reports if report.name == "ensemble"])

    assert printed.replace(str(triton.tokenizer), "/models/tokenizer").startswith(sample.rstrip())


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(triton: TestTriton, tmp_path: Path, line: str) -> None:
    """A command in the README is one that works; hosts, folders and hub names stand for those of the reader."""
    program, *arguments = shlex.split(line)
    if program in ("make", "pip"):
        assert line in ("make demo", "pip install .")
        # `make demo` is this in an environment that it has made; what pip makes is tests/integration/test_wheel.py's.
        if program == "make":
            assert "triton-openai demo" in (ROOT / "Makefile").read_text()
            assert "stand-in" in run("demo", "--once", "--port", "0")
        return
    assert "triton-openai" == program
    repository = "/models"
    if repository in arguments:
        repository = str(build_repository(tmp_path / "repository", models=["text_embedding"]).path)
    replaced = {
        "http://triton:8000": triton.http_url,
        "grpc://triton:8001": triton.grpc_url,
        HUB_NAME: str(triton.tokenizer),
        "/models": repository,
    }
    for name, value in replaced.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    command, *options = arguments
    if command == "inspect":
        assert "  adapter  " in run(command, *options)
        return
    assert "serve" == command
    with serving(tmp_path, *options) as running:
        assert 200 == running.status("/health/ready")
        key = options[options.index("--api-key") + 1].partition(":")[2] if "--api-key" in options else None
        listing = running.send("GET", "/v1/models", headers={"api-key": key} if key else {})
        listed = {model["id"] for model in listing.json["data"]}
        assert (401 if key else 200) == running.status("/v1/models")
        if "/models" in line:
            assert {"text_embedding"} == listed
        if "gpt-4o-mini" in line:
            assert "gpt-4o-mini" in listed
        if HUB_NAME in line:
            messages = [{"role": "user", "content": "Hello"}]
            reply = running.post("/v1/chat/completions", {"model": "vllm_model", "messages": messages})
            assert 200 == reply.status
        if "/models" in line:
            running.process.terminate()
            assert 0 == running.process.wait(30)


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_OPENAI_")}
    command = [sys.executable, "-m", "triton_openai", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == result.returncode, result.stderr
    return result.stdout
