"""Speech through clients for Node.js: OpenAI's, and Vercel's AI SDK. `make clients` installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.service import serving
from tests.programs import found
from tests.speech import SENTENCE, speak, wav, write_whisper_tokenizer
from tests.standins.repository import build_repository
from tests.triton_fixture import embedded, shared

#: Where `make clients` puts the packages.
PACKAGES = Path(sys.prefix) / "node" / "node_modules"
# The oldest release that is still supported by those who make Node.js, and by the clients.
_OLDEST = 20
_SETTINGS = "models: {int16_tts: {audio: {sample_rate: 24000}}}"


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_clients_for_node(transport: str, tmp_path: Path) -> None:
    """They transcribe, translate and speak, whole and streamed, and read an error as theirs."""
    node = found("Node.js")
    if not (PACKAGES / "ai").exists():
        pytest.skip("the clients for Node.js are not installed (make clients)")
    release = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(release.lstrip("v").partition(".")[0]) < _OLDEST:
        pytest.skip(f"Node.js is {release.strip()}, and the clients take {_OLDEST} or newer")
    (tmp_path / "speech.wav").write_bytes(wav(speak(SENTENCE)))
    (tmp_path / "settings.yaml").write_text(_SETTINGS)
    tokenizer = write_whisper_tokenizer(tmp_path / "tokenizer")
    models = ["infer_bls", "whisper", "whisper_bls", "int16_tts"]
    server = embedded(build_repository(tmp_path / "repository", models=models))
    with shared(server):
        url = server.http_url if transport == "http" else server.grpc_url
        options = ("--tokenizer", f"whisper={tokenizer}", "--config", str(tmp_path / "settings.yaml"))
        with serving(tmp_path, "--triton-url", url, *options) as service:
            program = Path(__file__).with_name("node") / "speech.cjs"
            run = subprocess.run(
                [node, program, service.base_url, tmp_path / "speech.wav", " ".join(SENTENCE)],
                env={**os.environ, "NODE_PATH": str(PACKAGES)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            assert run.stdout.endswith("PASSED\n"), run.stdout
            assert [] == service.complaints()
