"""
``tensorrt_llm_bls``: the three models of the pipeline, called from a Python model.

It keeps the original's quirks: the inner request has its own id, nothing checks whether the client has disconnected,
data responses have no final flag, errors are whole tracebacks, and one instance serves one request at a time.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .bls_stop_words import StopWords
from .images import load_images
from .tensors import Recorder, array, as_text, scalar, strings

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL

_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
_PASSED_ON = (
    "exclude_input_in_output", "temperature", "repetition_penalty", "min_tokens", "min_length", "presence_penalty",
    "frequency_penalty", "seed", "random_seed", "return_log_probs", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "beam_width", "prompt_embedding_table", "prompt_vocab_size", "lora_task_id", "lora_weights",
    "lora_config", "guided_decoding_guide_type", "guided_decoding_guide", "return_num_input_tokens",
    "return_num_output_tokens",
)  # fmt: skip
# As in the original, num_return_sequences is declared but not read.
_TO_ENGINE = {
    **{name: name for name in _PASSED_ON},
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
_ENGINE_OUTPUTS = (
    "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index", "sequence_index",
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens", "num_output_tokens",
)  # fmt: skip


class LostRequest(Exception):
    """The engine failed after the first data: the original then never sends anything again."""


class TritonPythonModel:
    """Serves one request at a time; responses go out as the engine produces them."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the names of the models that this one calls."""
        self._settings = settings.load(args)
        self._recorder = Recorder(self._settings.record, self._settings.name)
        self._engine = self._settings.parameter("tensorrt_llm_model_name", "tensorrt_llm")
        self._accumulate = self._settings.flag("accumulate_tokens", default=False)
        # The tensors show the release.
        inputs = self._settings.inputs()
        outputs = self._settings.outputs()
        recent = "prompt_table_extra_id" in inputs
        # The originals have fixed names. The demo has both generations.
        if recent:
            self._helpers = ("preprocessing", "postprocessing")
        else:
            self._helpers = ("preprocessing_legacy", "postprocessing_legacy")
        if recent:
            later = set()
        else:
            later = {"DECODER_INPUT_ID", "OUT_PROMPT_TABLE_EXTRA_IDS"}
        self._prepared = {name: inner for name, inner in _FROM_PREPROCESSING.items() if name not in later}
        # Up to 0.12, the temperature is declared but not passed on.
        self._to_engine = {name: inner for name, inner in _TO_ENGINE.items() if recent or name != "temperature"}
        self._outputs = [name for name in _ENGINE_OUTPUTS if name in outputs]
        self._watches_words = "guided_decoding_guide" in inputs
        # Without encoders, the original's preprocessing ignores images.
        self._sees = bool(self._settings.parameter("multimodal_encoders_name", ""))
        self._lost: list[Any] = []

    def execute(self, requests: list[Any]) -> None:
        """Serve the requests one after the other."""
        for request in requests:
            sender = request.get_response_sender()
            self._recorder.request(request)
            try:
                for response in self._responses(request):
                    sender.send(response)
            except LostRequest:
                # The client gets neither an error nor an end. (The original also loses the instance.)
                self._lost.append(sender)
                continue
            except Exception:  # noqa: BLE001 - the original returns the traceback
                sender.send(pb.InferenceResponse(output_tensors=[], error=pb.TritonError(traceback.format_exc())))
            sender.send(flags=_FINAL)

    def finalize(self) -> None:
        """End the open responses, so that the model can be unloaded."""
        for sender in self._lost:
            sender.send(flags=_FINAL)

    def _responses(self, request: Any) -> Iterator[Any]:
        text = array(request, "text_input")
        if text is None:
            raise ValueError("text_input is required")
        limit = array(request, "max_tokens")
        if limit is None or limit.size != 1 or int(limit.reshape(-1)[0]) <= 0:
            raise ValueError("max_tokens must be a single value > 0")
        if self._sees:
            load_images(array(request, "image_url_input"))
        stream = bool(scalar(request, "stream", False))
        words = array(request, "stop_words")
        stop_words = StopWords(
            [as_text(word) for word in words.reshape(-1)] if words is not None and self._watches_words else [],
            stream=stream,
            skip=0 if scalar(request, "exclude_input_in_output", False) else len(as_text(text.reshape(-1)[0])),
        )
        inner_id = str(uuid.uuid4())
        so_far: list[int] = []
        sent = False
        for answer in self._generate(inner_id, self._engine_inputs(request)):
            if answer.has_error():
                if sent:
                    raise LostRequest
                raise pb.TritonModelException(answer.error().message())
            tensors = {tensor.name(): tensor for tensor in answer.output_tensors()}
            if "output_ids" not in tensors or stop_words.seen:
                continue
            sent = True
            yield self._response(tensors, stop_words, so_far)
            if stop_words.seen and stream:
                self._stop(inner_id)

    def _engine_inputs(self, request: Any) -> list[Any]:
        """Run preprocessing and return the engine's inputs."""
        prepared = _called(self._helpers[0], _renamed(request, _PREPROCESSING), list(self._prepared))
        # The engine's scalars have one element per row.
        return [_row(tensor) for tensor in _renamed(request, self._to_engine)] + [
            pb.Tensor(inner, prepared[name]) for name, inner in self._prepared.items() if name in prepared
        ]

    def _generate(self, inner_id: str, inputs: list[Any]) -> Iterator[Any]:
        inner = pb.InferenceRequest(
            model_name=self._engine,
            request_id=inner_id,
            requested_output_names=["output_ids", "sequence_length", *self._outputs],
            inputs=inputs,
        )
        if self._settings.decoupled:
            yield from inner.exec(decoupled=True)
        else:
            yield inner.exec()

    def _response(self, tensors: dict[str, Any], stop_words: StopWords, so_far: list[int]) -> Any:
        ids = tensors["output_ids"].as_numpy()
        lengths = tensors["sequence_length"].as_numpy()
        if self._accumulate and self._settings.decoupled:
            if ids.shape[1] > 1:
                raise ValueError("Accumulation of tokens is only implemented for beam width = 1")
            so_far += [int(token) for token in ids[0, 0, : lengths[0, 0]]]
            ids = np.array(so_far, dtype=np.int32).reshape(1, 1, len(so_far))
            lengths = np.array([[len(so_far)]], dtype=np.int32)
        decoded = _called(
            self._helpers[1], [pb.Tensor("TOKENS_BATCH", ids), pb.Tensor("SEQUENCE_LENGTH", lengths)], ["OUTPUT"]
        )
        texts = [stop_words.feed(as_text(text)) for text in decoded["OUTPUT"].reshape(-1)]
        return pb.InferenceResponse(
            [
                pb.Tensor("text_output", strings(texts)),
                *(tensors[name] for name in self._outputs if name in tensors),
            ]
        )

    def _stop(self, inner_id: str) -> None:
        inner = pb.InferenceRequest(
            model_name=self._engine,
            request_id=inner_id,
            requested_output_names=["output_ids", "sequence_length"],
            inputs=[
                pb.Tensor("input_ids", np.zeros((1, 1), dtype=np.int32)),
                pb.Tensor("input_lengths", np.zeros((1, 1), dtype=np.int32)),
                pb.Tensor("request_output_len", np.zeros((1, 1), dtype=np.int32)),
                pb.Tensor("stop", np.ones((1, 1), dtype=bool)),
            ],
        )
        for _ in inner.exec(decoupled=True):
            pass


def _called(model: str, inputs: list[Any], outputs: list[str]) -> dict[str, Any]:
    answer = pb.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=inputs).exec()
    if answer.has_error():
        raise pb.TritonModelException(answer.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


def _renamed(request: Any, names: dict[str, str]) -> list[Any]:
    """Return the inputs of *request*, under the called model's names."""
    values = ((inner, array(request, name)) for name, inner in names.items())
    return [pb.Tensor(inner, value) for inner, value in values if value is not None]


def _row(tensor: Any) -> Any:
    """Add the inner dimension that the engine declares to a scalar without it."""
    values = tensor.as_numpy()
    if values.ndim == 1:
        return pb.Tensor(tensor.name(), values.reshape(-1, 1))
    return tensor
