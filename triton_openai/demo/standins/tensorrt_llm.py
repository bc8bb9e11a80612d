"""
``tensorrt_llm``: the engine's own model, like its Python model or (as a backend) its C++ backend.

A batcher advances all requests. The declared tensors show the version.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb

from . import settings, trt_outputs
from .engine import Options
from .generation import Generation, Step
from .inflight import FINAL, InflightModel, InflightRequest, Sequence
from .tensors import array, scalar

_MAX_INPUT_LENGTH = 2048
_NUMBERS = {
    "temperature": "temperature",
    "top_p": "runtime_top_p",
    "top_k": "runtime_top_k",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# More alternatives than OpenAI allows.
_ALTERNATIVES = 24


class Refused(Exception):
    """A request that the model refuses."""


class EngineRefused(Exception):
    """A request that the engine refuses; the model passes the text on unchanged."""


class Request(InflightRequest):
    """A running request, of one or several sequences."""

    def __init__(self, model: TritonPythonModel, request: Any, sender: Any) -> None:
        sequences = model.sequences(request)
        stream = bool(scalar(request, "streaming", False))
        super().__init__(model, request, sender, sequences, stream=stream)
        self._writer = trt_outputs.Writer(
            request,
            model.declared,
            stream=stream,
            exclude_input=bool(
                scalar(
                    request,
                    "exclude_input_in_output",
                    model.settings.flag("exclude_input_in_output", default=False),
                )
            ),
            several=len({s.row for s in sequences}) > 1,
            indexed=len({s.index for s in sequences}) > 1,
            vocabulary=len(model.vocabulary),
            end_id=model.vocabulary.eos_id,
        )

    def response(self, sequence: Sequence, step: Step, *, last: bool) -> Any:
        """Return the new ids, or all of them."""
        return self._writer.response(sequence, step.ids, last=last)

    def interrupt(self, event: str) -> None:
        """End with a final response, without an error, as the engine does."""
        self.sender.send(self._writer.response(self.live[0], [], last=True), flags=FINAL)


class TritonPythonModel(InflightModel):
    """The Python model."""

    job = Request
    refusal = "An error occurred when processing the input values for request id {id}, the error was '{text}'"
    no_decoupled = "Streaming is only supported in decoupled mode."
    no_input = "A value is required for input_ids"
    #: Outputs that every request has to ask for.
    required: tuple[str, ...] = ()

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer and start the batcher."""
        own = settings.load(args)
        self.declared = own.outputs()
        self._loras: set[int] = set()
        self._cache = trt_outputs.PrefixCache()
        period = float(own.parameter("cancellation_check_period_ms", "100")) / 1000.0
        self.start(own, own.parameter("tokenizer_dir", own.tokenizer), period)

    def refuse(self, request_id: str, sender: Any, error: Exception) -> None:
        """Answer with the error's text."""
        text = str(error)
        if not isinstance(error, EngineRefused):
            text = self.refusal.format(id=request_id, text=text)
        sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=FINAL)

    def sequences(self, request: Any) -> list[Sequence]:
        """Check *request* as the original does, and return its sequences."""
        input_ids = array(request, "input_ids")
        if input_ids is None:
            raise Refused(self.no_input)
        self._check(request, input_ids)
        lengths = array(request, "input_lengths").reshape(-1)
        count = int(scalar(request, "num_return_sequences", 1))
        sequences = []
        for row in range(input_ids.shape[0]):
            ids = [int(token) for token in input_ids[row][: lengths[row]]]
            if len(ids) > _MAX_INPUT_LENGTH:
                raise EngineRefused(
                    f"Prompt length ({len(ids)}) exceeds maximum input length ({_MAX_INPUT_LENGTH}). Set log level to"
                    " info and check TRTGptModel logs for how maximum input length is set"
                )
            reused = self._cache.reuse(ids)
            sequences += [Sequence(self._generation(request, row, ids, i), ids, reused, row, i) for i in range(count)]
        return sequences

    def _check(self, request: Any, input_ids: Any) -> None:
        streaming = bool(scalar(request, "streaming", False))
        if streaming and not self.settings.decoupled:
            raise Refused(self.no_decoupled)
        if input_ids.shape[0] > 1 and not self.settings.decoupled:
            raise Refused("Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy")
        if int(scalar(request, "request_output_len", 0)) <= 0:
            raise Refused("[TensorRT-LLM][ERROR] Assertion failed: mMaxNewTokens > 0")
        beams = int(scalar(request, "beam_width", 1))
        widest = int(self.settings.parameter("max_beam_width", "1"))
        if beams > widest:
            raise Refused(f"Requested beam width {beams} is larger than max_beam_width {widest}")
        for name in self.required:
            if name not in request.requested_output_names():
                raise Refused(
                    f"Error encountered while populating response: {name} tensor must be present in list of output"
                    " tensors"
                )
        self._check_lora(request)
        kind = scalar(request, "guided_decoding_guide_type")
        if kind is not None and kind not in ("json", "json_schema", "regex", "ebnf_grammar"):
            raise Refused(f"Unsupported guided decoding guide type: {kind}")

    def _check_lora(self, request: Any) -> None:
        """Add the adapter to the cache if the request has its weights, else look it up there."""
        task, weights, config = (array(request, f"lora_{name}") for name in ("task_id", "weights", "config"))
        if task is None and weights is None and config is None:
            return
        if self.settings.engine is not None:
            raise EngineRefused("LoRA is not supported: the engine was built without it")
        if task is None:
            raise EngineRefused("lora_task_id must be set for LoRA inference")
        number = int(task.reshape(-1)[0])
        if weights is None and config is None:
            if number not in self._loras:
                raise EngineRefused(f"LoRA task {number} not found in cache. Please send LoRA weights with request")
            return
        if weights is None or config is None:
            raise EngineRefused("Request for LoRA inference must have both lora_weights and lora_keys")
        if weights.shape[1] != config.shape[1]:
            raise EngineRefused("Expected dim1 lora_weights and lora_keys to have the same size")
        self._loras.add(number)

    def _generation(self, request: Any, row: int, ids: list[int], index: int) -> Generation:
        end_id = scalar(request, "end_id")
        guide = scalar(request, "guided_decoding_guide_type")
        limit = int(array(request, "request_output_len").reshape(-1)[row])
        numbers = {name: scalar(request, tensor) for name, tensor in _NUMBERS.items()}
        options = Options(
            seed=int(scalar(request, "seed", scalar(request, "random_seed", 0))) + index,
            max_tokens=limit,
            min_tokens=int(scalar(request, "min_tokens", scalar(request, "min_length", 0))),
            # Without the tokenizer's end id in the request, the engine does not know where to stop.
            ignore_eos=end_id != self.vocabulary.eos_id,
            guide=(guide, scalar(request, "guided_decoding_guide", "")) if guide else None,
            greedy=_greedy(scalar(request, "runtime_top_k", 0), scalar(request, "runtime_top_p", 0.0)),
            logprobs=_logprobs(request),
            bias=_bias(array(request, "embedding_bias"), row),
            bad_words=[self.vocabulary.decode(word) for word in _words(array(request, "bad_words_list"), row)],
            **{name: value for name, value in numbers.items() if value is not None},
        )
        answer = self.engine.answer(self.vocabulary.decode(ids, skip_special_tokens=False), ids, options)
        if answer.steering.forget_loras:
            self._loras.clear()
        words = _words(array(request, "stop_words_list"), row)
        return Generation(
            answer,
            end_id=end_id,
            max_tokens=limit,
            stops=lambda produced: any(produced[-len(word) :] == word for word in words),
        )


class CppTritonPythonModel(TritonPythonModel):
    """The C++ backend: other texts, and both main outputs must be requested."""

    refusal = "{text}"
    no_decoupled = "Streaming is only supported if model is deployed using decoupled mode."
    no_id = "Trying to stop a request but request ID is not provided"
    no_input = "inputTokens or encoderInputFeatures tensor not provided"
    required = ("output_ids", "sequence_length")


def _greedy(top_k: int, top_p: float) -> bool:
    """Return whether the executor takes the likeliest token: by default it does, at any temperature."""
    return top_k == 1 or (top_k == 0 and top_p == 0)


def _logprobs(request: Any) -> int | None:
    """Return the number of requested alternatives to each token, None without log probabilities."""
    if scalar(request, "return_generation_logits", False):
        return _ALTERNATIVES
    if scalar(request, "return_log_probs", False):
        return 0
    return None


def _bias(values: Any, row: int) -> dict[int, float]:
    if values is None or values.size == 0:
        return {}
    return {int(token): float(values[row][token]) for token in values[row].nonzero()[0]}


def _words(encoded: Any, row: int) -> list[list[int]]:
    """Read the engine's encoding of words: ids in one row, the offsets of their ends in the other."""
    if encoded is None or encoded.size == 0:
        return []
    ids, offsets = encoded[row]
    words = []
    start = 0
    for end in offsets:
        if end < 0:
            break
        words.append([int(i) for i in ids[start:end]])
        start = int(end)
    return [word for word in words if word]
