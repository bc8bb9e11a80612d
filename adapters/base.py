"""
What an adapter is, and the parts that all of them share.

An adapter is made per *model*, from that model's Triton config, and knows what can be asked of it. A decoder is made
per *request* and holds that stream's state. A third party's adapter subclasses :class:`Adapter` and registers under
the entry point group ``triton_openai.adapters`` (see ``docs/adapters.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from triton_openai.adapters.parameters import BoundParameter
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.generation import (
    Delta,
    EmbeddingJob,
    EmbeddingResult,
    Generation,
    Logits,
    LoraFormat,
    ScoreJob,
    ScoreResult,
)
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a model can do through its adapter. The rest of the service asks these, never an adapter's or a backend's name.

    ``streaming`` is whether answers come bit by bit. ``stop`` is whether the backend itself keeps stop strings out of
    the text (where not, this service does). ``echoes`` is whether the answer begins with the prompt. ``usage`` and
    ``finish_reason`` are whether the backend reports them. ``dimensions`` and ``token_inputs`` are about embeddings.
    ``tokens`` is whether it is given token ids and answers in them: the text is made here. ``guides`` are the kinds of
    :class:`Guide` that the answer can be held to; ``lora`` whether a request can name a LoRA adapter, and
    ``lora_format`` how it takes an adapter's weights where they have to be sent. ``images`` is whether a prompt can
    come with images, and ``max_images`` how many of them, where the model's tensors tell.

    ``logprobs`` is whether tokens come with their log probabilities, ``top_logprobs`` with how many alternatives at
    most. ``cumulative_logprob`` is whether an answer's own is told, ``prompt_logprobs`` whether those of the prompt's
    tokens can be had. ``token_ids`` is whether the answer's are told. ``bias_words`` is whether a logit bias goes to
    the backend as texts, each of which it tokenizes with its special tokens. ``score`` is whether it scores pairs of
    texts, and ``token_pairs`` whether it has to be given them as token ids.
    """

    generate: bool = False
    embed: bool = False
    streaming: bool = False
    stop: bool = False
    echoes: bool = False
    usage: bool = False
    finish_reason: bool = False
    dimensions: bool = False
    token_inputs: bool = False
    tokens: bool = False
    guides: frozenset[str] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    cumulative_logprob: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    bias_words: bool = False
    lora: bool = False
    lora_format: LoraFormat | None = None
    images: bool = False
    max_images: int | None = None
    score: bool = False
    token_pairs: bool = False


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What the configs tell about a model beside its tensors. ``tokenizer_dir`` is a path on the server's machine."""

    tokenizer_dir: str | None = None
    adds_bos: bool = False


class Decoder(Protocol):
    """Turns the responses of one request into deltas. Holds that stream's state; not to be shared."""

    def feed(self, response: InferResponse) -> Sequence[Delta]:
        """Return what *response* adds."""
        ...

    def flush(self) -> Sequence[Delta]:
        """Return what was still held back, once the stream has ended."""
        ...


class Adapter:
    """Base of all adapters: refuses everything; an adapter overrides what its backend can do."""

    name: ClassVar[str]

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        """
        Bind the adapter to a model.

        *repository* holds the configs of every ready model by name, for adapters whose model works through others
        (an ensemble and its steps).
        """
        self.config = config

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Return why this adapter claims the model (for a person to read), or ``None`` if it does not."""
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        raise NotImplementedError

    @property
    def hints(self) -> Hints:
        """What else the configs tell."""
        return Hints()

    @property
    def token_level(self) -> ModelConfig | None:
        """The model behind this one that can answer all of its requests in token ids, where there is one."""
        return None

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """What each parameter of a request becomes on this model."""
        return ()

    def encode(self, generation: Generation) -> InferRequest:
        """
        Return the request for one prompt. Raises :class:`InvalidRequest` for values the model's inputs cannot hold.
        """
        raise InvalidRequest(f"The model '{self.config.name}' does not generate text.", param="model")

    def decoder(self, generation: Generation) -> Decoder:
        """Return a fresh decoder for the answers to :meth:`encode`'s request."""
        raise NotImplementedError

    def encode_prompt_logits(self, generation: Generation) -> InferRequest:
        """
        Return a request for the scores of the prompt's tokens, where ``capabilities.prompt_logprobs``.

        Raises :class:`InvalidRequest` without a parameter for a prompt too long for that.
        """
        raise NotImplementedError

    def decode_prompt_logits(self, response: InferResponse) -> Logits | None:
        """Return the scores that *response* to that request brings: row *i* is of the token behind token *i*."""
        raise NotImplementedError

    def cancel(self, generation: Generation) -> InferRequest | None:
        """
        Return a request that tells the engine to stop *generation*, or ``None`` where closing the stream is enough.

        It is sent beside closing the stream, and its answer is ignored.
        """
        return None

    def encode_embeddings(self, job: EmbeddingJob) -> Sequence[InferRequest]:
        """Return the requests that embed *job*'s inputs, together covering them in order."""
        raise InvalidRequest(f"The model '{self.config.name}' does not make embeddings.", param="model")

    def decode_embeddings(self, job: EmbeddingJob, responses: Sequence[InferResponse]) -> EmbeddingResult:
        """Return the vectors of all the responses to :meth:`encode_embeddings`'s requests."""
        raise NotImplementedError

    def encode_scores(self, job: ScoreJob) -> Sequence[InferRequest]:
        """Return the requests that score *job*'s pairs, together covering them in order."""
        raise InvalidRequest(f"The model '{self.config.name}' does not score texts.", param="model")

    def decode_scores(self, job: ScoreJob, responses: Sequence[InferResponse]) -> ScoreResult:
        """Return the scores of all the responses to :meth:`encode_scores`'s requests."""
        raise NotImplementedError

    # Helpers for subclasses.

    def tensor(self, name: str, *values: Any) -> Tensor:
        """
        Return an input with the dtype and rank that the config declares for it, for one request row.

        Raises :class:`ConfigurationError` when it is not declared: an adapter was forced upon a model it does not fit.
        """
        spec = self.config.inputs.get(name)
        if spec is None:
            raise ConfigurationError(
                f"The adapter '{self.name}' needs the input '{name}', which the model '{self.config.name}' lacks."
            )
        return Tensor(name, spec.datatype, self.config.wire_shape(spec, len(values)), values)

    def request(
        self, generation_id: str, inputs: Sequence[Tensor], outputs: Sequence[str], *, cancellable: bool = True
    ) -> InferRequest:
        """Return the request to the adapter's own model, asking for those of *outputs* that it declares."""
        return InferRequest(
            model=self.config.name,
            id=generation_id,
            inputs=tuple(inputs),
            outputs=tuple(name for name in outputs if name in self.config.outputs),
            stream=self.config.decoupled,
            cancellable=cancellable,
            json_expressible=all(
                tensor.datatype not in ("FP16", "BF16") and not isinstance(tensor.values, bytes) for tensor in inputs
            ),
        )
