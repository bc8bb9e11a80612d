"""Reads Triton requests, and records them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import images

_RECORDED_ELEMENTS = 4096


def array(request: Any, name: str) -> Any | None:
    """Return the input *name* as an array, None if the request lacks it."""
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    return tensor.as_numpy()


def scalar(request: Any, name: str, default: Any = None) -> Any:
    """Return the first element of the input *name* as a Python value, *default* if it is absent or empty."""
    values = array(request, name)
    if values is None or values.size == 0:
        return default
    value = values.reshape(-1)[0]
    if isinstance(value, bytes):
        return as_text(value)
    if hasattr(value, "item"):
        return value.item()
    return value


def as_text(value: Any) -> str:
    """Return one BYTES element as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def strings(values: Any) -> Any:
    """Return a BYTES array of Python strings or of an array of bytes."""
    return np.array([item if isinstance(item, bytes) else item.encode() for item in values], dtype=np.object_)


def parameters_of(request: Any) -> dict[str, Any]:
    """Return the parameters of a request."""
    text = request.parameters()
    if text:
        return json.loads(text)
    return {}


class Recorder:
    """Appends events to the record file, one line and one write per event; does nothing without a file."""

    def __init__(self, path: str | None, model: str) -> None:
        self._model = model
        if path:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        else:
            self._file = -1

    def request(self, request: Any, *, but: Collection[str] = ()) -> None:
        """Record *request*, *but* not the inputs of these names."""
        if self._file < 0:
            return
        inputs = {}
        for tensor in request.inputs():
            if tensor.name() in but:
                continue
            values = tensor.as_numpy()
            flat = values.reshape(-1)[:_RECORDED_ELEMENTS]
            inputs[tensor.name()] = {
                "dtype": _dtype_name(values.dtype),
                "shape": list(values.shape),
                "value": [_recorded(tensor.name(), item) for item in flat],
            }
        trace = request.trace().get_context()
        self._write(
            {
                "model": self._model,
                "event": "request",
                "id": request.request_id(),
                "inputs": inputs,
                "requested_outputs": list(request.requested_output_names()),
                "parameters": parameters_of(request),
                "timeout": request.timeout(),
                "trace": json.loads(trace) if trace else None,
            }
        )

    def ended(self, event: str, request_id: str, tokens: int) -> None:
        """Record how a request ended (finished, cancelled, stopped or failed), after *tokens* tokens."""
        if self._file >= 0:
            self._write({"model": self._model, "event": event, "id": request_id, "tokens": tokens})

    def _write(self, event: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(event) + "\n").encode())


def _recorded(name: str, item: Any) -> Any:
    if not isinstance(item, bytes):
        return item.item()
    if name in images.INPUTS:
        return images.summary(as_text(item))
    return as_text(item)


def _dtype_name(dtype: Any) -> str:
    if dtype.kind in "OS":
        return "BYTES"
    if dtype.kind == "b":
        return "BOOL"
    prefix = {"i": "INT", "u": "UINT", "f": "FP"}[dtype.kind]
    return f"{prefix}{dtype.itemsize * 8}"
