"""The demo with its language model, for all tests that want answers that mean something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.service import Service, serving
from triton_openai.demo.engine import missing
from triton_openai.demo.weights import find_model
from triton_openai.errors import ConfigurationError


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """
    ``triton-openai demo`` as a process, shared by the whole run: ``ensemble``, ``vllm_model`` and ``text_embedding``.

    Skips where the engine has no wheel or the weights are not installed.
    """
    if problem := missing():
        pytest.skip(f"no language model: {problem}")
    try:
        find_model(None, None)
    except ConfigurationError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("demo")
    # Tests of each adapter set this to "never"; the demo has the default.
    with serving(folder, command="demo", TRITON_OPENAI_PREFER_TOKEN_LEVEL="auto") as running:
        yield running
