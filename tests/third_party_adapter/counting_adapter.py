"""
A third party's adapter, as a package of its own would ship it.

It serves models that nobody else knows: a text ``prompt`` in, ``answer`` out. The folder is laid out as an installed
distribution is: this module, and beside it the metadata with the entry point.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.adapters import Adapter, Capabilities, Parameter
from triton_openai.generation import Delta, FinishReason, Generation
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig


class Words:
    """Counts every piece as a token, and knows when it was the last."""

    def feed(self, response: InferResponse) -> Delta:
        """Return what one response adds."""
        texts = response.texts("answer")
        delta = Delta("".join(texts), tokens=len(texts), prompt_tokens=3)
        if list(response.numbers("last")) == [True]:
            delta.finish_reason = FinishReason.STOP
        return delta

    def flush(self) -> str:
        """Return nothing."""
        return ""


class Counting(Adapter):
    """Prompt in, answer out."""

    name = "counting"
    capabilities = Capabilities(streaming=True, usage=True, finish_reason=True)
    # It can be asked for a length, and for nothing else.
    parameters = (
        Parameter("max_tokens", target="limit", datatype="INT32"),
        Parameter("temperature"),
    )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models by their tensors; what it says about a model called "confusing" is a mistake."""
        if config.name == "confusing":
            raise KeyError(config.name)
        return "prompt in, answer out" if "prompt" in config.inputs and "answer" in config.outputs else None

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """Return the request."""
        inputs = [self.tensor("prompt", generation.prompt), self.tensor("limit", generation.sampling.max_tokens)]
        return [self.request(generation.id, inputs, ("answer", "last"))]

    def decoder(self, generation: Generation) -> Words:
        """Return a decoder."""
        return Words()
