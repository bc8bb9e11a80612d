"""The companion's model file as a module, with a stand-in for Triton's module and without vLLM."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import triton_openai.companion

MODEL = Path(triton_openai.companion.__file__).with_name("model.py")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model file as a module."""
    backend = types.ModuleType("triton_python_backend_utils")
    backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    backend.Tensor = lambda name, values: values[0]  # type: ignore[attr-defined]
    backend.InferenceResponse = lambda tensors: tensors[0]  # type: ignore[attr-defined]
    backend.Logger = types.SimpleNamespace(log_info=lambda text: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    spec = importlib.util.spec_from_file_location("companion_model_under_test", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # A test of one of them sets its own: however slow the machine is, it passes in no other.
    module.PULSE = 600.0
    module.SILENCE = 600.0
    return module
