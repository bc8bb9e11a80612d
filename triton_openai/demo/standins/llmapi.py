"""
``llmapi``: the Python model over TensorRT-LLM's LLM API, with that model's tensors and habits.

Every response has the whole text so far, after the prompt unless that is excluded; numbers and reasons are strings. Up
to 1.2 (before the LoRA inputs), a stream is a single response, because the switch is passed as the wrong argument of
the engine. Later releases never answer a request that fails before it reaches the engine. If ``model.yaml`` says
``multimodal``, a prompt with images is a user's message for the model's own template.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .engine import Options
from .generation import Generation, Step
from .images import load_images
from .inflight import FINAL, InflightModel, InflightRequest, Sequence
from .tensors import array, as_text, scalar, strings
from .trt_outputs import PrefixCache

_PREFIX = "sampling_param_"
_NUMBERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_DEFAULT_MAX_TOKENS = 32
_MAX_NUM_TOKENS = 2048
_FIRST_THAT_STREAMS = "lora_name"
_LORA = ("lora_id", "lora_name", "lora_path")
_SOURCES = (None, "hf", "nemo")
_TURN = "<|im_start|>user\n{images}{text}<|im_end|>\n<|im_start|>assistant\n"
_CANCELLED = "Request cancelled by client"


class Request(InflightRequest):
    """A running request."""

    failed = "Error generating request: "

    def __init__(self, model: TritonPythonModel, request: Any, sender: Any) -> None:
        streaming = bool(_one(request, "streaming", False))
        if streaming and not model.settings.decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
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
        if model.multimodal:
            images = load_images(array(request, "image_url"), "data:image/")
        else:
            images = []
        if images:
            prompt = _TURN.format(images="<image>" * len(images), text=prompt)
        if _one(request, f"{_PREFIX}exclude_input_from_output", False):
            self._echo = ""
        else:
            self._echo = prompt
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
        generation = Generation(
            model.engine.answer(prompt, ids, options),
            end_id=model.vocabulary.eos_id,
            max_tokens=limit,
        )
        sequence = Sequence(generation, ids, model.cache.reuse(ids))
        super().__init__(model, request, sender, [sequence], stream=streaming and model.streams)

    def interrupt(self, event: str) -> None:
        """End a stopped stream with a response, and whatever is cancelled with an error."""
        if event == "cancelled":
            self.model.answer_stop(self.sender)
        elif self.stream:
            self.sender.send(self._response(self.live[0], "cancelled"), flags=FINAL)

    def response(self, sequence: Sequence, step: Step, *, last: bool) -> Any:
        """Return the whole text so far."""
        return self._response(sequence, step.finish)

    def _response(self, sequence: Sequence, finish: str | None) -> Any:
        ids = sequence.generation.ids
        values = {
            "text_output": self._echo + self.model.vocabulary.decode(ids),
            "finish_reason": str(finish),
            "stop_reason": "None",
            "kv_cache_reused_block": str(sequence.reused_blocks),
        }
        if "cumulative_logprob" in self._wanted:
            scores = map(sequence.generation.scores.logprob, itertools.count(), ids)
            # Text, although the config declares a number.
            values["cumulative_logprob"] = str(float(np.sum([*scores])))
        names = ["text_output", *self._wanted]
        if self._requested:
            names = [name for name in names if name in self._requested]
        return pb.InferenceResponse([pb.Tensor(name, strings([values[name]])) for name in names])


class TritonPythonModel(InflightModel):
    """The model of one ``model.yaml``."""

    job = Request

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer and start the batcher."""
        own = settings.load(args)
        self.streams = _FIRST_THAT_STREAMS in own.inputs()
        self.multimodal = "multimodal: true" in (own.folder / "model.yaml").read_text()
        self.cache = PrefixCache()
        self.start(own, own.tokenizer, check_seconds=0.1)

    def refuse(self, request_id: str, sender: Any, error: Exception) -> None:
        """Answer with the error's text, up to 1.2."""
        # Later releases take it for a cancelled request, and never answer.
        if not self.streams:
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))), flags=FINAL)

    def answer_stop(self, sender: Any) -> None:
        """Answer as a cancelled request is answered."""
        sender.send(pb.InferenceResponse(error=pb.TritonError(_CANCELLED, pb.TritonError.CANCELLED)), flags=FINAL)


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
