"""Raw calls to a Triton, over gRPC and HTTP, for tests that look at the models themselves."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

_TYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": bool, "FP32": np.float32, "UINT64": np.uint64}

# The inputs that are neither text nor an integer.
_DTYPES = {
    "stream": "BOOL",
    "streaming": "BOOL",
    "stop": "BOOL",
    "exclude_input_in_output": "BOOL",
    "temperature": "FP32",
    "top_p": "FP32",
    "seed": "UINT64",
    "random_seed": "UINT64",
    "lora_task_id": "UINT64",
}


@dataclass(frozen=True)
class Answer:
    """One response: its tensors by name, whether it carries the final flag, and its error if it is one."""

    tensors: Mapping[str, Any]
    final: bool
    error: str | None

    def text(self, name: str = "text_output") -> str:
        """Return the one text of an output."""
        (value,) = self.tensors[name].reshape(-1)
        return str(value.decode())


def tensor(name: str, value: Any, *, batched: bool) -> grpcclient.InferInput:
    """Return an input made from a Python value; the type goes by the name."""
    values = value if isinstance(value, list) else [value]
    if name.startswith("return_"):
        kind = "BOOL"
    elif name in _DTYPES:
        kind = _DTYPES[name]
    else:
        kind = "BYTES" if all(isinstance(each, str) for each in values) and values else "INT32"
    encoded = [each.encode() if isinstance(each, str) else each for each in values]
    array = np.array(encoded, dtype=_TYPES[kind]).reshape((1, len(values)) if batched else (len(values),))
    result = grpcclient.InferInput(name, array.shape, kind)
    result.set_data_from_numpy(array)
    return result


class Stream:
    """One ModelStreamInfer call with one request in it."""

    def __init__(self, call: Any, request_id: str) -> None:
        self.id = request_id
        self.answers: queue.Queue[Answer] = queue.Queue()
        self._call = call
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def take(self, timeout: float = 120.0) -> Answer:
        """Return the next response."""
        return self.answers.get(timeout=timeout)

    def rest(self, timeout: float = 120.0) -> list[Answer]:
        """Return all responses up to the one with the final flag."""
        found = [self.take(timeout)]
        while not found[-1].final:
            found.append(self.take(timeout))
        return found

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()
        self._reader.join(120)

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                response = message.infer_response
                flag = response.parameters.get("triton_final_response")
                # An error from before the inference has no flag, and nothing follows it.
                final = flag.bool_param if flag is not None else bool(message.error_message)
                result = grpcclient.InferResult(response)
                tensors = {each.name: result.as_numpy(each.name) for each in response.outputs}
                self.answers.put(Answer(tensors, final, message.error_message or None))


@contextmanager
def streaming(
    url: str,
    model: str,
    *,
    request_id: str | None = None,
    outputs: list[str] | None = None,
    batched: bool = True,
    parameters: Mapping[str, str] | None = None,
    **inputs: Any,
) -> Iterator[Stream]:
    """Send one request over a stream of its own; without an id it gets a random one, with "" none."""
    request = service_pb2.ModelInferRequest(model_name=model, id=uuid.uuid4().hex if request_id is None else request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, text in (parameters or {}).items():
        request.parameters[key].string_param = text
    for name, value in inputs.items():
        made = tensor(name, value, batched=batched)
        request.inputs.append(made._get_tensor())
        request.raw_input_contents.append(made._get_content())
    for name in outputs or ():
        request.outputs.add(name=name)
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = Stream(stub.ModelStreamInfer(iter([request])), request.id)
        yield stream
        stream.cancel()


def ask(url: str, model: str, **inputs: Any) -> list[Answer]:
    """Send one request to a batching model and return all its responses."""
    with streaming(url, model, **inputs) as stream:
        return stream.rest()


def ask_vllm(
    url: str, sampling: dict[str, Any] | str | None = None, *, model: str = "vllm_model", **inputs: Any
) -> list[Answer]:
    """Send one request to a vLLM model and return all its responses."""
    if sampling is not None:
        inputs["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    with streaming(url, model, batched=False, **inputs) as stream:
        return stream.rest()


def generate(url: str, model: str, *, stream: bool = True, **body: Any) -> tuple[int, list[dict[str, Any]]]:
    """Call the generate extension and return the status and the JSON objects of the body."""
    address = f"{url}/v2/models/{model}/generate{'_stream' if stream else ''}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode()), timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return status, [json.loads(line) for line in lines]


def steered(prompt: str = "Hello", **orders: Any) -> str:
    """Return a prompt with steering in it."""
    return f"{prompt} <<steer {json.dumps(orders)}>>"
