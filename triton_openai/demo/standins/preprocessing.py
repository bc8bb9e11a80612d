"""``preprocessing`` of the TensorRT-LLM model repository: text to token ids, and words to the engine's encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, as_text
from .text import Vocabulary


class TritonPythonModel:
    """Tokenizes prompts, stop words and bad words. Sends all declared outputs but the vision outputs."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer."""
        self._settings = settings.load(args)
        self._vocabulary = Vocabulary(self._settings.parameter("tokenizer_dir", self._settings.tokenizer))
        self._add_special_tokens = self._adds_special_tokens()
        self._outputs = self._settings.outputs()
        self._recorder = Recorder(self._settings.record, self._settings.name)

    def _adds_special_tokens(self) -> bool:
        """Read the flag as its release does: off by default up to 0.10, on by default later."""
        value = self._settings.parameter("add_special_tokens", "").lower()
        if "DECODER_QUERY" in self._settings.inputs():
            return value not in ("false", "0", "f", "n", "no")
        return value in ("true", "1", "t", "y", "yes")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own; Triton batches them only for the transport."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        self._recorder.request(request)
        vocabulary = self._vocabulary
        prompts = [as_text(row) for row in array(request, "QUERY").reshape(-1)]
        ids = [vocabulary.encode(prompt, add_special_tokens=self._add_special_tokens) for prompt in prompts]
        rows = len(ids)
        pad = _client_or(request, "PAD_ID", vocabulary.pad_id, rows)
        outputs = {
            "INPUT_ID": _padded(ids, int(pad[0, 0])),
            "REQUEST_INPUT_LEN": np.array([[len(row)] for row in ids], dtype=np.int32),
            "REQUEST_OUTPUT_LEN": array(request, "REQUEST_OUTPUT_LEN"),
            "BAD_WORDS_IDS": self._words(request, "BAD_WORDS_DICT", rows),
            "STOP_WORDS_IDS": self._words(request, "STOP_WORDS_DICT", rows),
            "EMBEDDING_BIAS": self._bias(request, rows),
            "OUT_END_ID": _client_or(request, "END_ID", vocabulary.eos_id, rows),
            "OUT_PAD_ID": pad,
            "DECODER_INPUT_ID": np.full((rows, 1), int(pad[0, 0]), dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((rows, 1), dtype=np.int32),
        }
        extra = array(request, "PROMPT_TABLE_EXTRA_ID")
        if extra is not None:
            width = outputs["INPUT_ID"].shape[1]
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.repeat(extra.reshape(rows, 1), width, axis=1).astype(np.uint64)
        return pb.InferenceResponse(
            [pb.Tensor(name, value) for name, value in outputs.items() if name in self._outputs]
        )

    def _words(self, request: Any, name: str, rows: int) -> Any:
        """
        Encode words as the engine reads them: their ids in one row, the offsets of their ends in the other.

        Words are tokenized alone, so a word with other tokens within a sentence never matches.
        """
        words = array(request, name)
        if words is None:
            return np.zeros((rows, 2, 0), dtype=np.int32)
        encoded = []
        for row in words.reshape(rows, -1):
            ids: list[int] = []
            offsets: list[int] = []
            for word in row:
                tokens = self._vocabulary.encode(as_text(word))
                if tokens:
                    ids += tokens
                    offsets.append(len(ids))
            encoded.append((ids, offsets))
        if encoded:
            length = max(1, *(len(ids) for ids, _ in encoded))
        else:
            length = 0
        result = np.zeros((rows, 2, length), dtype=np.int32)
        result[:, 1, :] = -1
        for index, (ids, offsets) in enumerate(encoded):
            result[index, 0, : len(ids)] = ids
            result[index, 1, : len(offsets)] = offsets
        return result

    def _bias(self, request: Any, rows: int) -> Any:
        words = array(request, "EMBEDDING_BIAS_WORDS")
        weights = array(request, "EMBEDDING_BIAS_WEIGHTS")
        if words is None or weights is None:
            return np.zeros((rows, 0), dtype=np.float32)
        bias = np.zeros((rows, len(self._vocabulary)), dtype=np.float32)
        for row, (texts, values) in enumerate(zip(words.reshape(rows, -1), weights.reshape(rows, -1), strict=True)):
            for text, value in zip(texts, values, strict=True):
                for token in self._vocabulary.encode(as_text(text), add_special_tokens=True):
                    bias[row, token] += value
        return bias


def _client_or(request: Any, name: str, default: int, rows: int) -> Any:
    value = array(request, name)
    if value is None:
        return np.full((rows, 1), default, dtype=np.int32)
    return value.reshape(rows, -1)


def _padded(rows: list[list[int]], pad: int) -> Any:
    result = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int32)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result
