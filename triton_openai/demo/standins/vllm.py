"""
The ``vllm`` backend over the stand-in's engine: the same tensors, texts and timing of events as the original.

All requests of an instance run in its batcher, as they do in vLLM's own engine loop.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .engine import EngineFailure
from .generation import Generation
from .images import decode_images
from .scripted import engine_for
from .tensors import Recorder, array, as_text, parameters_of, scalar, strings
from .text import IncrementalText, Vocabulary
from .vectors import embedder_for
from .vllm_parameters import Rejected, Sampling, check_request, parse
from .vllm_text import DeltaText

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CHECK_SECONDS = 0.01
_OPTIONAL_OUTPUTS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")

_INPUTS = (
    ("text_input", "TYPE_STRING", [1], False),
    ("stream", "TYPE_BOOL", [1], True),
    ("sampling_parameters", "TYPE_STRING", [1], True),
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
    *((f"return_{name}", "TYPE_BOOL", [1], True) for name in _OPTIONAL_OUTPUTS),
    ("image", "TYPE_STRING", [-1], True),
)
_OUTPUTS = (
    ("text_output", "TYPE_STRING", [-1]),
    ("finish_reason", "TYPE_STRING", [-1]),
    ("cumulative_logprob", "TYPE_FP32", [-1]),
    ("logprobs", "TYPE_STRING", [-1]),
    ("num_input_tokens", "TYPE_UINT32", [1]),
    ("num_output_tokens", "TYPE_UINT32", [-1]),
)


class EngineError(Exception):
    """An error that is not a ``ValueError``: the client gets an empty reason."""


class TritonPythonModel:
    """Checks requests as the original does, and passes them to the batcher."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the tensors that config.pbtxt omits, and make the model decoupled and unbatched."""
        declared = config.as_dict()
        inputs = {tensor["name"] for tensor in declared["input"]}
        outputs = {tensor["name"] for tensor in declared["output"]}
        entries = list(_INPUTS)
        if _release(declared) == "r25.11":
            entries.append(("embedding_request", "TYPE_STRING", [1], True))
        for name, kind, dims, optional in entries:
            if name not in inputs:
                config.add_input({"name": name, "data_type": kind, "dims": dims, "optional": optional})
        for name, kind, dims in _OUTPUTS:
            if name not in outputs:
                config.add_output({"name": name, "data_type": kind, "dims": dims})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the engine's arguments, as the original does from model.json."""
        self.settings = settings.load(args)
        engine = json.loads((self.settings.folder / "model.json").read_text())
        loras = self.settings.folder / "multi_lora.json"
        if engine.get("enable_lora"):
            self._loras = list(json.loads(loras.read_text()))
        else:
            self._loras = None
        self._embeds = engine.get("task") == "embed"
        self._limit = int(engine["max_model_len"])
        self._release = _release(self.settings.config)
        self.vocabulary = Vocabulary(engine["model"])
        self.recorder = Recorder(self.settings.record, self.settings.name)
        self.engine = engine_for(self.settings, self.vocabulary)
        self._embedder = embedder_for(self.settings)
        self._batcher = self.engine.batcher()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; the batcher sends the answers."""
        for request in requests:
            sender = request.get_response_sender()
            self.recorder.request(request)
            values = self._sampling_values(request)
            if not self._lora_accepted(request, sender, values):
                continue
            try:
                if array(request, "embedding_request") is not None:
                    self._embed(request, sender)
                else:
                    job = Request(self, request, sender, self._sampling(values))
                    self._batcher.submit(job, job.generation.delay())
            except EngineError:
                self.fail(sender, request.request_id(), "")
            except Exception as error:  # noqa: BLE001 - the original returns the text of every error
                self.fail(sender, request.request_id(), str(error))

    def finalize(self) -> None:
        """Stop the batcher."""
        self._batcher.close()

    def fail(self, sender: Any, request_id: str, reason: str, tokens: int = 0) -> None:
        """Answer a request with an error."""
        sender.send(pb.InferenceResponse(error=pb.TritonError(f"Error generating stream: {reason}")), flags=_FINAL)
        self.recorder.ended("failed", request_id, tokens)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokenize a prompt; raises `ValueError` if it is too long."""
        ids = self.vocabulary.encode(prompt, add_special_tokens=True)
        if len(ids) > self._limit:
            raise ValueError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {self._limit}."
                " Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
        return ids

    def room(self, prompt_length: int) -> int:
        """Return how many tokens fit after a prompt."""
        return max(1, self._limit - prompt_length)

    def check_generates(self) -> None:
        """Raise `ValueError` if the model was loaded for embeddings."""
        if self._embeds:
            raise ValueError(f"Model {self.settings.name} does not support 'generate' request")

    def _sampling_values(self, request: Any) -> dict[str, Any]:
        # The tensor takes precedence over the request's own parameters. Malformed JSON fails the whole call, and the
        # client gets Triton's traceback.
        text = scalar(request, "sampling_parameters")
        if text is None:
            values = parameters_of(request)
        else:
            values = json.loads(text)
        return dict(values.items())

    def _lora_accepted(self, request: Any, sender: Any, values: dict[str, Any]) -> bool:
        name = values.pop("lora_name", None)
        if name is None:
            return True
        if self._loras is None:
            text = "LoRA feature is not enabled."
        elif name not in self._loras:
            text = f"LoRA {name} is not supported, we currently support {self._loras}"
        else:
            return True
        sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=_FINAL)
        self.recorder.ended("failed", request.request_id(), 0)
        return False

    def _sampling(self, values: dict[str, Any]) -> Sampling:
        try:
            return parse(values, self._release)
        except Rejected as error:
            if self._release == "r24.12":  # which still returns the constructor's own words
                raise ValueError(str(error)) from None
            raise ValueError("'NoneType' object has no attribute 'lora_name'") from None

    def _embed(self, request: Any, sender: Any) -> None:
        if not self._embeds:
            raise ValueError(f"Model {self.settings.name} does not support 'embed' request")
        asked = json.loads(scalar(request, "embedding_request"))
        value = asked["input"]
        dimensions = self._embedder.dimensions
        pooling = asked.get("pooling_params") or {}
        if "dimensions" in pooling:
            dimensions = pooling["dimensions"][0]
        if isinstance(value, str):
            ids = self.prompt_ids(value)
            text = value
        elif value and all(isinstance(token, int) for token in value):
            ids = value
            text = self.vocabulary.decode(value)
        else:
            raise EngineError
        vector = [float(value) for value in self._embedder.embed([text], dimensions)[0]]
        tensors = [pb.Tensor("text_output", strings([json.dumps(vector)]))]
        for name, count in (("num_input_tokens", len(ids)), ("num_output_tokens", 0)):
            if scalar(request, f"return_{name}", False):
                tensors.append(pb.Tensor(name, np.asarray(count, dtype=np.uint32)))
        sender.send(pb.InferenceResponse(_requested(request, tensors)), flags=_FINAL)
        self.recorder.ended("finished", request.request_id(), 0)


class Request:
    """A running generation; the batcher calls `advance` once per step."""

    def __init__(self, model: TritonPythonModel, request: Any, sender: Any, sampling: Sampling) -> None:
        prompt = as_text(_text_input(request).reshape(-1)[0])
        self._stream = bool(scalar(request, "stream", False))
        exclude = scalar(request, "exclude_input_in_output")
        if self._stream and exclude is False:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        model.check_generates()
        check_request(sampling)
        self._model = model
        self._sender = sender
        self._request = request
        self._sampling = sampling
        self._input = model.prompt_ids(prompt)
        if self._stream or exclude:
            self._echo = ""
        else:
            self._echo = prompt
        self._wanted = [name for name in _OPTIONAL_OUTPUTS if scalar(request, f"return_{name}", False)]
        room = min(sampling.max_tokens, model.room(len(self._input)))
        images = len(decode_images(array(request, "image")))
        answer = model.engine.answer(prompt, self._input, replace(sampling, max_tokens=room, images=images))
        self._text = DeltaText(
            IncrementalText(model.vocabulary, skip_special_tokens=sampling.skip_special_tokens),
            sampling.stop,
            include_stop=sampling.include_stop,
        )
        self.generation = Generation(
            answer,
            end_id=model.vocabulary.eos_id,
            # A steered answer may be longer than the model's context: tests ask for very long ones.
            max_tokens=sampling.max_tokens if answer.steering.scripted else room,
            stops=self._stops,
        )
        self._pending: list[int] = []
        self._place = 0
        self._outputs = 0
        self._next_check = 0.0

    def advance(self) -> float | None:
        """Take one step of the engine and send its result."""
        if self._sampling.logit_bias:
            return self._failed("")
        try:
            step = self.generation.step()
        except EngineFailure as failure:
            return self._failed(str(failure))
        if step.empty:
            if self._sender.is_cancelled():
                return self._cancelled()
            return 0.0
        if step.eos:
            new = [*step.ids, self._model.vocabulary.eos_id]
        else:
            new = step.ids
        self._pending += new
        self._outputs += 1
        final = step.finish is not None
        if self._stream or final:
            self._sender.send(self._response(step.finish), flags=_FINAL if final else 0)
            self._place += len(self._pending)
            self._pending = []
        if final:
            self._ended("finished")
            return None
        if self._left():
            return self._cancelled()
        return self.generation.delay()

    def _cancelled(self) -> None:
        error = pb.TritonError("Request was cancelled", pb.TritonError.CANCELLED)
        self._sender.send(pb.InferenceResponse(error=error), flags=_FINAL)
        self._ended("cancelled")

    def _left(self) -> bool:
        """Whether the client has disconnected, checked from the second output on, at limited intervals."""
        now = time.monotonic()
        if self._outputs < 2 or now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        return bool(self._sender.is_cancelled())

    def _stops(self, ids: list[int]) -> bool:
        token = ids[-1]
        if token in self._sampling.stop_token_ids and len(ids) > self._sampling.min_tokens:
            return True
        return self._text.feed(token) and len(ids) > self._sampling.min_tokens

    def _response(self, finish: str | None) -> Any:
        text = self._echo + self._text.take(final=finish is not None)
        self._echo = ""
        tensors = [pb.Tensor("text_output", strings([text]))]
        tensors += [pb.Tensor(name, self._extra(name, finish)) for name in self._wanted]
        return pb.InferenceResponse(_requested(self._request, tensors))

    def _extra(self, name: str, finish: str | None) -> Any:
        if name == "finish_reason":
            return strings([str(finish)])
        if name == "num_input_tokens":
            return np.asarray(len(self._input), dtype=np.uint32)
        if name == "num_output_tokens":
            return np.asarray([len(self._pending)], dtype=np.uint32)
        if name == "cumulative_logprob":
            if self._sampling.logprobs is None:
                return np.asarray([np.nan], dtype=np.float32)
            scores = map(self.generation.scores.logprob, itertools.count(), self.generation.ids)
            return np.asarray([sum(scores)], dtype=np.float32)
        return strings([self._logprobs()])

    def _logprobs(self) -> str:
        count = self._sampling.logprobs
        if count is None:
            return "null"
        vocabulary = self._model.vocabulary
        top = self.generation.scores.top
        entries = [
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.token(token_id)}
                for token_id, logprob, rank in top(self._place + offset, token, count, len(vocabulary))
            }
            for offset, token in enumerate(self._pending)
        ]
        return json.dumps(entries)

    def _failed(self, reason: str) -> None:
        self.generation.close()
        self._model.fail(self._sender, self._request.request_id(), reason, len(self.generation.ids))

    def _ended(self, event: str) -> None:
        self.generation.close()
        self._model.recorder.ended(event, self._request.request_id(), len(self.generation.ids))


def _release(config: dict[str, Any]) -> str:
    return str(config.get("parameters", {}).get("BACKEND_RELEASE", {}).get("string_value", "r25.11"))


def _text_input(request: Any) -> Any:
    # Triton accepts a request without it that has another optional input; the error is the original's.
    return pb.get_input_tensor_by_name(request, "text_input").as_numpy()


def _requested(request: Any, tensors: list[Any]) -> list[Any]:
    names = set(request.requested_output_names())
    return [tensor for tensor in tensors if not names or tensor.name() in names]
