"""
``llmapi``: the Python model over TensorRT-LLM's LLM API, with that model's tensors and habits.

Every response has the whole text so far, after the prompt unless that is excluded; numbers and reasons are strings. Up
to 1.2 (before the LoRA inputs), a stream is a single response, because the switch is passed as the wrong argument of
the engine. Later releases never answer a request that fails before it reaches the engine. If ``model.yaml`` says
``multimodal``, a prompt with images is a user's message for the model's own template.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .engine import EngineFailure, Options, engine_for
from .generation import Generation
from .images import load_images
from .tensors import Recorder, array, as_text, scalar, strings
from .text import Vocabulary
from .trt_outputs import PrefixCache

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_PREFIX = "sampling_param_"
_NUMBERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_DEFAULT_MAX_TOKENS = 32
_MAX_NUM_TOKENS = 2048
_FIRST_THAT_STREAMS = "lora_name"
_LORA = ("lora_id", "lora_name", "lora_path")
_SOURCES = (None, "hf", "nemo")
_TURN = "<|im_start|>user\n{images}{text}<|im_end|>\n<|im_start|>assistant\n"
_CANCELLED = "Request cancelled by client"


class TritonPythonModel:
    """Passes requests to the batcher, and stops them by their id."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer and start the batcher."""
        self.settings = settings.load(args)
        self.vocabulary = Vocabulary(self.settings.tokenizer)
        self.recorder = Recorder(self.settings.record, self.settings.name)
        self.check_seconds = 0.1
        self.streams = _FIRST_THAT_STREAMS in self.settings.inputs()
        self.multimodal = "multimodal: true" in (self.settings.folder / "model.yaml").read_text()
        self.cache = PrefixCache()
        self._running: dict[str, Request] = {}
        self._lock = threading.Lock()
        self.engine = engine_for(self.settings, self.vocabulary)
        self._batcher = self.engine.batcher()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; the batcher sends the answers."""
        for request in requests:
            sender = request.get_response_sender()
            self.recorder.request(request)
            try:
                if scalar(request, "stop", False):
                    self._stop(request.request_id(), sender)
                    continue
                job = Request(self, request, sender)
            except Exception as error:  # noqa: BLE001 - the original returns the text of every error
                if self.streams:
                    # The original takes it for a cancelled request, and never answers.
                    self.recorder.ended("failed", request.request_id(), 0)
                else:
                    self.fail(sender, request.request_id(), str(error))
                continue
            with self._lock:
                if job.id:
                    self._running[job.id] = job
            self._batcher.submit(job, job.first_delay())

    def finalize(self) -> None:
        """Stop the batcher."""
        self._batcher.close()

    def fail(self, sender: Any, request_id: str, text: str, tokens: int = 0) -> None:
        """Answer a request with an error."""
        sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=_FINAL)
        self.recorder.ended("failed", request_id, tokens)

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        with self._lock:
            if self._running.get(request.id) is request:
                del self._running[request.id]

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise ValueError("A request id must be provided for request cancellation")
        with self._lock:
            job = self._running.get(request_id)
        if job is not None:
            job.stopped = True
            self._batcher.hasten(job)
        # The stop request itself gets the answer of a cancelled request.
        sender.send(pb.InferenceResponse(error=pb.TritonError(_CANCELLED, pb.TritonError.CANCELLED)), flags=_FINAL)


class Request:
    """A running request; the batcher calls `advance`."""

    def __init__(self, model: TritonPythonModel, request: Any, sender: Any) -> None:
        self.id: str = request.request_id()
        self.stopped = False
        self._model = model
        self._sender = sender
        streaming = bool(_one(request, "streaming", False))
        if streaming and not model.settings.decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
        self._stream = streaming and model.streams
        text = array(request, "text_input")
        if text.ndim != 1:
            raise ValueError("The LLM API model only supports text_input being a 1D tensor.")
        if array(request, f"{_PREFIX}stop") is not None:
            # The original passes it on as bytes.
            raise ValueError(
                "Error generating request: TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence,"
                " InputSequence]]"
            )
        prompt = as_text(text[0])
        if not prompt:
            raise ValueError("Error generating request: Prompt cannot be empty")
        _check_lora(request)
        images = load_images(array(request, "image_url"), "data:image/") if model.multimodal else []
        if images:
            prompt = _TURN.format(images="<image>" * len(images), text=prompt)
        self._echo = "" if _one(request, f"{_PREFIX}exclude_input_from_output", False) else prompt
        self._wanted = [
            name
            for name in ("finish_reason", "stop_reason", "cumulative_logprob")
            if _one(request, f"return_{name}", False)
        ]
        if _one(request, f"{_PREFIX}return_perf_metrics", False):
            self._wanted.append("kv_cache_reused_block")
        self._requested = set(request.requested_output_names())
        ids = model.vocabulary.encode(prompt, add_special_tokens=True)
        if len(ids) > _MAX_NUM_TOKENS:
            raise ValueError(
                f"Error generating request: The sum of prompt length ({float(len(ids))}), query length (0) should not"
                f" exceed max_num_tokens ({_MAX_NUM_TOKENS})"
            )
        self._reused_blocks = model.cache.reuse(ids)
        limit = int(_one(request, f"{_PREFIX}max_tokens", _DEFAULT_MAX_TOKENS))
        numbers = {name: _one(request, f"{_PREFIX}{name}", None) for name in _NUMBERS}
        options = Options(
            seed=int(_one(request, f"{_PREFIX}seed", 0)),
            greedy=_greedy(request),
            max_tokens=limit,
            images=len(images),
            logprobs=0 if "cumulative_logprob" in self._wanted else None,
            **{name: value for name, value in numbers.items() if value is not None},
        )
        self.generation = Generation(
            model.engine.answer(prompt, ids, options),
            end_id=model.vocabulary.eos_id,
            max_tokens=limit,
            default_delay_ms=model.settings.token_delay_ms,
        )
        self._due = 0.0
        self._next_check = 0.0

    def first_delay(self) -> float:
        """Return the seconds until the first call of `advance`."""
        now = time.monotonic()
        self._due = now + self.generation.delay()
        self._next_check = now + self._model.check_seconds
        return self._pause(now)

    def advance(self) -> float | None:
        """Take one step if it is due, and check for a cancellation."""
        if self.stopped:
            # A request that does not stream gets no answer.
            if self._stream:
                self._sender.send(self._response("cancelled"), flags=_FINAL)
            return self._ended("stopped")
        now = time.monotonic()
        if now >= self._next_check:
            if self._sender.is_cancelled():
                error = pb.TritonError(_CANCELLED, pb.TritonError.CANCELLED)
                self._sender.send(pb.InferenceResponse(error=error), flags=_FINAL)
                return self._ended("cancelled")
            self._next_check = now + self._model.check_seconds
        return self._pause(now) if now < self._due else self._step(now)

    def _pause(self, now: float) -> float:
        return max(0.0, min(self._due, self._next_check) - now)

    def _step(self, now: float) -> float | None:
        if self.generation.hangs:
            self._due = math.inf
            return self._pause(now)
        try:
            step = self.generation.step()
        except EngineFailure as failure:
            self.generation.close()
            self._model.fail(self._sender, self.id, f"Error generating request: {failure}", len(self.generation.ids))
            self._model.forget(self)
            return None
        if step.empty:
            return 0.0
        last = step.finish is not None
        if self._stream or last:
            self._sender.send(self._response(step.finish), flags=_FINAL if last else 0)
        if last:
            return self._ended("finished")
        self._due = max(self._due, now - 1.0) + self.generation.delay()
        return self._pause(time.monotonic())

    def _response(self, finish: str | None) -> Any:
        ids = self.generation.ids
        values = {
            "text_output": self._echo + self._model.vocabulary.decode(ids),
            "finish_reason": str(finish),
            "stop_reason": "None",
            "kv_cache_reused_block": str(self._reused_blocks),
        }
        if "cumulative_logprob" in self._wanted:
            scores = map(self.generation.scores.logprob, itertools.count(), ids)
            # Text, although the config declares a number.
            values["cumulative_logprob"] = str(float(np.sum([*scores])))
        names = ["text_output", *self._wanted]
        if self._requested:
            names = [name for name in names if name in self._requested]
        return pb.InferenceResponse([pb.Tensor(name, strings([values[name]])) for name in names])

    def _ended(self, event: str) -> None:
        self.generation.close()
        self._model.forget(self)
        self._model.recorder.ended(event, self.id, len(self.generation.ids))


def _greedy(request: Any) -> bool:
    """Return whether the LLM API takes the likeliest tokens (its ``params_imply_greedy_decoding``)."""
    temperature, top_p, top_k = (_one(request, f"{_PREFIX}{name}", None) for name in ("temperature", "top_p", "top_k"))
    return (temperature is None and top_p is None and top_k is None) or top_k == 1 or 0 in (top_p, temperature)


def _check_lora(request: Any) -> None:
    number, name, path = (_one(request, key, None) for key in _LORA)
    if len({value is None for value in (number, name, path)}) > 1:
        raise ValueError("lora_id, lora_name and lora_path must be given together.")
    source = _one(request, "lora_ckpt_source", None)
    if number is not None and (not Path(as_text(path)).exists() or (source and as_text(source)) not in _SOURCES):
        raise ValueError(f"lora_path ({path}) does not exist, or lora_ckpt_source ({source}) is unknown.")


def _one(request: Any, name: str, default: Any) -> Any:
    """Return a scalar input as the original reads it."""
    values = array(request, name)
    if values is not None and values.size != 1:
        raise ValueError(f"Expected a scalar tensor for tensor {name}")
    return scalar(request, name, default)
