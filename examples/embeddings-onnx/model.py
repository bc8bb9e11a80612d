"""A sentence embedding model: tokenizes texts, runs the ONNX encoder, and returns the mean of its token vectors."""

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

MAX_TOKENS = 256


class TritonPythonModel:
    """Runs on the CPU; Triton gathers the texts of several requests into one call."""

    def initialize(self, args):
        """Load the encoder and the tokenizer from the folder of the model's version."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def execute(self, requests):
        """Answer each request with one vector of length 1 per text."""
        responses = []
        for request in requests:
            texts = pb.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            vectors = self.embed([text.decode() for text in texts])
            responses.append(pb.InferenceResponse([pb.Tensor("embedding", vectors)]))
        return responses

    def embed(self, texts):
        """Return an array of shape [texts, dimensions]."""
        encodings = self.tokenizer.encode_batch(texts)
        columns = {
            "input_ids": np.array([each.ids for each in encodings], np.int64),
            "attention_mask": np.array([each.attention_mask for each in encodings], np.int64),
            "token_type_ids": np.array([each.type_ids for each in encodings], np.int64),
        }
        hidden = self.session.run(None, {name: columns[name] for name in self.inputs})[0]
        mask = columns["attention_mask"][:, :, None]
        means = (hidden * mask).sum(axis=1) / mask.sum(axis=1)
        return (means / np.linalg.norm(means, axis=1, keepdims=True)).astype(np.float32)
