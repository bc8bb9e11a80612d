"""
``tensorrt_llm``: the engine's own model, like its Python model or (as a backend) its C++ backend.

A batcher advances all requests. The declared tensors show the version.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb

from . import settings, trt_outputs
from .engine import EngineFailure, Options, engine_for
from .generation import Generation
from .tensors import Recorder, array, scalar
from .text import Vocabulary

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
_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL

_TEXTS = {
    "python": {
        "stream": "Streaming is only supported in decoupled mode.",
        "id": "A request id must be provided for request cancellation",
        "input": "A value is required for input_ids",
    },
    "cpp": {
        "stream": "Streaming is only supported if model is deployed using decoupled mode.",
        "id": "Trying to stop a request but request ID is not provided",
        "input": "inputTokens or encoderInputFeatures tensor not provided",
    },
}


class Refused(Exception):
    """A request that the model refuses."""


class EngineRefused(Exception):
    """A request that the engine refuses; the model passes the text on unchanged."""


class TritonPythonModel:
    """Passes requests to the batcher, and stops them by their id."""

    flavour = "python"

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer and start the batcher."""
        self.settings = settings.load(args)
        self.vocabulary = Vocabulary(self.settings.parameter("tokenizer_dir", self.settings.tokenizer))
        self.recorder = Recorder(self.settings.record, self.settings.name)
        self.check_seconds = float(self.settings.parameter("cancellation_check_period_ms", "100")) / 1000.0
        self.declared = self.settings.outputs()
        self._texts = _TEXTS[self.flavour]
        self._loras: set[int] = set()
        self._cache = trt_outputs.PrefixCache()
        self._running: dict[str, Request] = {}
        self._lock = threading.Lock()
        self._engine = engine_for(self.settings, self.vocabulary)
        self._batcher = self._engine.batcher()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; the batcher sends the answers."""
        for request in requests:
            sender = request.get_response_sender()
            self.recorder.request(request)
            try:
                self._take(request, sender)
            except EngineRefused as error:
                self._fail(request.request_id(), sender, str(error))
            except Exception as error:  # noqa: BLE001 - the original returns the text of every error
                self._refuse(request.request_id(), sender, str(error))

    def finalize(self) -> None:
        """Stop the batcher."""
        self._batcher.close()

    def _refuse(self, request_id: str, sender: Any, text: str) -> None:
        if self.flavour == "python":
            text = (
                f"An error occurred when processing the input values for request id {request_id},"
                f" the error was '{text}'"
            )
        self._fail(request_id, sender, text)

    def _fail(self, request_id: str, sender: Any, text: str) -> None:
        sender.send(pb.InferenceResponse(error=pb.TritonError(text)), flags=_FINAL)
        self.recorder.ended("failed", request_id, 0)

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        with self._lock:
            if self._running.get(request.id) is request:
                del self._running[request.id]

    def _take(self, request: Any, sender: Any) -> None:
        if scalar(request, "stop", False):
            self._stop(request.request_id(), sender)
            return
        job = Request(self, request, sender)
        with self._lock:
            if job.id:
                self._running[job.id] = job
        self._batcher.submit(job, job.first_delay())

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise Refused(self._texts["id"])
        with self._lock:
            job = self._running.get(request_id)
        if job is not None:
            job.stopped = True
            self._batcher.hasten(job)
        if self.settings.decoupled:
            sender.send(flags=_FINAL)
        else:
            # Such a model must not send the flag alone.
            sender.send(pb.InferenceResponse([]), flags=_FINAL)

    def sequences(self, request: Any) -> list[Sequence]:
        """Check *request* as the original does, and return its sequences."""
        input_ids = array(request, "input_ids")
        if input_ids is None:
            raise Refused(self._texts["input"])
        self._check(request, input_ids)
        lengths = array(request, "input_lengths").reshape(-1)
        wanted = int(scalar(request, "num_return_sequences", 1))
        found = []
        for row in range(input_ids.shape[0]):
            ids = [int(token) for token in input_ids[row][: lengths[row]]]
            if len(ids) > _MAX_INPUT_LENGTH:
                raise EngineRefused(
                    f"Prompt length ({len(ids)}) exceeds maximum input length ({_MAX_INPUT_LENGTH}). Set log level to"
                    " info and check TRTGptModel logs for how maximum input length is set"
                )
            reused = self._cache.reuse(ids)
            found += [Sequence(self._generation(request, row, ids, i), ids, row, i, reused) for i in range(wanted)]
        return found

    def _check(self, request: Any, input_ids: Any) -> None:
        streaming = bool(scalar(request, "streaming", False))
        if streaming and not self.settings.decoupled:
            raise Refused(self._texts["stream"])
        if input_ids.shape[0] > 1 and not self.settings.decoupled:
            raise Refused("Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy")
        if int(scalar(request, "request_output_len", 0)) <= 0:
            raise Refused("[TensorRT-LLM][ERROR] Assertion failed: mMaxNewTokens > 0")
        beams, widest = int(scalar(request, "beam_width", 1)), int(self.settings.parameter("max_beam_width", "1"))
        if beams > widest:
            raise Refused(f"Requested beam width {beams} is larger than max_beam_width {widest}")
        if self.flavour == "cpp":
            requested = set(request.requested_output_names())
            for name in ("output_ids", "sequence_length"):
                if name not in requested:
                    raise Refused(
                        f"Error encountered while populating response: {name} tensor must be present in list of"
                        " output tensors"
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
        answer = self._engine.answer(self.vocabulary.decode(ids, skip_special_tokens=False), ids, options)
        if answer.steering.forget_loras:
            self._loras.clear()
        words = _words(array(request, "stop_words_list"), row)
        return Generation(
            answer,
            end_id=end_id,
            max_tokens=limit,
            default_delay_ms=self.settings.token_delay_ms,
            stops=lambda produced: any(produced[-len(word) :] == word for word in words),
        )


class CppTritonPythonModel(TritonPythonModel):
    """The C++ backend: other texts, and both main outputs must be requested."""

    flavour = "cpp"


@dataclass
class Sequence:
    """One sequence of a request: a row of its batch and an index among those asked for."""

    generation: Generation
    prompt: list[int]
    row: int
    index: int
    reused_blocks: int


class Request:
    """A running request; the batcher calls `advance`."""

    def __init__(self, model: TritonPythonModel, request: Any, sender: Any) -> None:
        self.id: str = request.request_id()
        self.stopped = False
        self._model = model
        self._sender = sender
        self._stream = bool(scalar(request, "streaming", False))
        self._all = model.sequences(request)
        self._live = list(self._all)
        self._turn = 0
        self._writer = trt_outputs.Writer(
            request,
            model.declared,
            stream=self._stream,
            exclude_input=bool(
                scalar(
                    request,
                    "exclude_input_in_output",
                    model.settings.flag("exclude_input_in_output", default=False),
                )
            ),
            several=len({s.row for s in self._all}) > 1,
            indexed=len({s.index for s in self._all}) > 1,
            vocabulary=len(model.vocabulary),
            end_id=model.vocabulary.eos_id,
        )
        self._due = 0.0
        self._next_check = 0.0

    def first_delay(self) -> float:
        """Return the seconds until the first call of `advance`."""
        now = time.monotonic()
        self._due = now + self._live[0].generation.delay()
        self._next_check = now + self._model.check_seconds
        return self._pause(now)

    def advance(self) -> float | None:
        """Take one step of one sequence if it is due, and check for a cancellation."""
        if self.stopped:
            return self._end("stopped")
        now = time.monotonic()
        if now >= self._next_check:
            if self._sender.is_cancelled():
                return self._end("cancelled")
            self._next_check = now + self._model.check_seconds
        return self._pause(now) if now < self._due else self._step(now)

    def _pause(self, now: float) -> float:
        return max(0.0, min(self._due, self._next_check) - now)

    def _step(self, now: float) -> float | None:
        sequence = self._live[self._turn % len(self._live)]
        if sequence.generation.hangs:
            self._due = math.inf
            return self._pause(now)
        try:
            step = sequence.generation.step()
        except EngineFailure as failure:
            self._sender.send(pb.InferenceResponse(error=pb.TritonError(str(failure))), flags=_FINAL)
            return self._ended("failed")
        self._turn += 1
        if step.empty:
            return 0.0
        if step.finish is not None:
            self._live.remove(sequence)
        last = not self._live
        if self._stream or step.finish is not None:
            self._sender.send(self._writer.response(sequence, step.ids, last=last), flags=_FINAL if last else 0)
        if last:
            return self._ended("finished")
        following = self._live[self._turn % len(self._live)]
        # Counts from when it was due, so that a busy machine does not slow down the pace.
        self._due = max(self._due, now - 1.0) + following.generation.delay() / len(self._live)
        return self._pause(time.monotonic())

    def _end(self, event: str) -> None:
        """End early, as the engine does after a stop request: with a final response, without an error."""
        sequence = self._live[0]
        self._sender.send(self._writer.response(sequence, [], last=True), flags=_FINAL)
        self._ended(event)

    def _ended(self, event: str) -> None:
        for sequence in self._all:
            sequence.generation.close()
        self._model.forget(self)
        self._model.recorder.ended(event, self.id, sum(len(s.generation.ids) for s in self._all))


def _greedy(top_k: int, top_p: float) -> bool:
    """Return whether the executor takes the likeliest token: by default it does, at any temperature."""
    return top_k == 1 or (top_k == 0 and top_p == 0)


def _logprobs(request: Any) -> int | None:
    """Return the number of requested alternatives to each token, None without log probabilities."""
    if scalar(request, "return_generation_logits", False):
        return _ALTERNATIVES
    return 0 if scalar(request, "return_log_probs", False) else None


def _bias(values: Any, row: int) -> dict[int, float]:
    if values is None or values.size == 0:
        return {}
    return {int(token): float(values[row][token]) for token in values[row].nonzero()[0]}


def _words(encoded: Any, row: int) -> list[list[int]]:
    """Read the engine's encoding of words: ids in one row, the offsets of their ends in the other."""
    if encoded is None or encoded.size == 0:
        return []
    ids, offsets = encoded[row]
    words, start = [], 0
    for end in offsets:
        if end < 0:
            break
        words.append([int(i) for i in ids[start:end]])
        start = int(end)
    return [word for word in words if word]
