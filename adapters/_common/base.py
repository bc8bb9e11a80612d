"""
What an adapter is, and the parts that all of them share.

An adapter is made per *model*, from that model's Triton config, and knows what can be asked of it. A decoder is made
per *request* and holds that stream's state. A third party's adapter subclasses :class:`Adapter` and registers under
the entry point group ``triton_openai.adapters`` (see ``docs/adapters.md``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.generation import (
    Delta,
    EmbeddingJob,
    EmbeddingResult,
    Generation,
    Logits,
    LoraFormat,
    Sampling,
    ScoreJob,
    ScoreResult,
)
from triton_openai.triton.tensors import INTEGER_RANGES, InferRequest, InferResponse, ModelConfig, Tensor


class Rule(enum.StrEnum):
    """What happens to a parameter on a model."""

    MAPPED = "mapped"
    """Sent to the backend."""
    PROXY = "done here"
    """Done by this service, exactly as the backend would."""
    IGNORED = "ignored"
    """Accepted without effect, because it cannot change the answer."""
    REFUSED = "refused"
    """A request that uses it is refused with 400 and the parameter's name."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """
    One row: the *name* of a :class:`Sampling` field, the inputs (or JSON keys) that can carry it in order of
    preference, and what to do when the model declares none of them. *why* tells a client whose request is refused what
    can be done about it.
    """

    name: str
    inputs: tuple[str, ...] = ()
    otherwise: Rule = Rule.REFUSED
    note: str = ""
    why: str = ""
    # Whether the input has to hold negative numbers.
    signed: bool = False


class BoundParameter(msgspec.Struct, frozen=True, kw_only=True):
    """
    A row bound to a model: its *target* is an input or a key, ``None`` unless the rule is :attr:`Rule.MAPPED`.

    *neutral* are values that have their effect although the parameter is refused.
    """

    name: str
    rule: Rule
    target: str | None = None
    datatype: str | None = None
    note: str = ""
    why: str = ""
    neutral: tuple[Any, ...] = ()


def bind(table: Sequence[Parameter], config: ModelConfig) -> tuple[BoundParameter, ...]:
    """Resolve *table* against the inputs that *config* declares."""
    bound = []
    for parameter in table:
        target = next((name for name in parameter.inputs if _fits(parameter, config, name)), None)
        if target is None:
            bound.append(
                BoundParameter(name=parameter.name, rule=parameter.otherwise, note=parameter.note, why=parameter.why)
            )
        else:
            datatype = config.inputs[target].datatype
            bound.append(
                BoundParameter(
                    name=parameter.name, rule=Rule.MAPPED, target=target, datatype=datatype, note=parameter.note
                )
            )
    return tuple(bound)


def refused(name: str, why: str = "", *, neutral: tuple[Any, ...] = ()) -> BoundParameter:
    """Return the row of a parameter that the model cannot honour, *why*, and the *neutral* values that it can."""
    return BoundParameter(name=name, rule=Rule.REFUSED, why=why, neutral=neutral)


def _fits(parameter: Parameter, config: ModelConfig, name: str) -> bool:
    spec = config.inputs.get(name)
    return spec is not None and not (parameter.signed and spec.datatype.startswith("UINT"))


def values_of(parameter: BoundParameter, sampling: Sampling) -> Sequence[Any]:
    """
    Return the flat values of *parameter* in a request, empty when it is not used.

    Raises :class:`InvalidRequest` with the parameter's name for a number that the input's dtype cannot hold.
    """
    value = getattr(sampling, parameter.name)
    if value is None or value == ():
        return ()
    if isinstance(value, tuple):
        return value
    check_range(parameter.name, value, parameter.datatype)
    return (value,)


def check_range(name: str, value: Any, datatype: str | None) -> None:
    """Raise :class:`InvalidRequest` when *value* does not fit *datatype*: nothing is wrapped or clamped."""
    limits = INTEGER_RANGES.get(datatype or "")
    if limits is not None and not limits[0] <= value <= limits[1]:
        raise InvalidRequest(
            f"'{name}' must be between {limits[0]} and {limits[1]} for this model, got {value}.",
            param=name,
            code="integer_above_max_value" if value > limits[1] else "integer_below_min_value",
        )
    if datatype in ("FP32", "FP16") and (not math.isfinite(value) or abs(value) > _MAX_FLOAT[datatype]):
        raise InvalidRequest(f"'{name}' is out of range for this model, got {value}.", param=name)


_MAX_FLOAT: Mapping[str, float] = {"FP32": 3.4028234e38, "FP16": 65504.0}


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a model can do through its adapter. The rest of the service asks these, never an adapter's or a backend's name.

    ``streaming`` is whether answers come bit by bit. ``stop`` is whether the backend itself keeps stop strings out of
    the text (where not, this service does); ``stop_shown`` is whether it leaves them in all the same where
    :attr:`Sampling.stop_showable` is, so that the one that ended the answer is seen and cut off here. ``echoes`` is
    whether an answer that comes at once begins with the prompt. ``splits_characters`` is whether a stream loses the
    characters that span several tokens. ``usage`` and ``finish_reason`` are whether the backend reports them.
    ``dimensions`` and ``token_inputs`` are about embeddings. ``tokens`` is whether it is given token ids and answers
    in them: the text is made here. ``guides`` are the kinds of :class:`Guide` that the answer can be held to; ``lora``
    whether a request can name a LoRA adapter, and ``lora_format`` how it takes an adapter's weights where they have to
    be sent. ``images`` is whether a prompt can come with images, and ``max_images`` how many of them, where the
    model's tensors tell.

    ``logprobs`` is whether tokens come with their log probabilities, ``top_logprobs`` with how many alternatives at
    most. ``cumulative_logprob`` is whether an answer's own is told, ``prompt_logprobs`` whether those of the prompt's
    tokens can be had. ``token_ids`` is whether the answer's are told. ``bias_words`` is whether a logit bias goes to
    the backend as texts, each of which it tokenizes with its special tokens. ``score`` is whether it scores pairs of
    texts, and ``token_pairs`` whether it has to be given them as token ids.

    ``samples`` is whether a request without temperature, top_p and top_k is sampled with OpenAI's defaults (1, 1 and
    none); where not, the backend decodes in its own way. ``fixed_seed`` is whether the backend takes the same seed for
    every request that brings none.
    """

    generate: bool = False
    embed: bool = False
    streaming: bool = False
    stop: bool = False
    stop_shown: bool = False
    echoes: bool = False
    splits_characters: bool = False
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
    samples: bool = True
    fixed_seed: bool = False


#: Reads a file of a Triton model: the model's name and the file's name in its newest version; ``None`` if unreadable.
ModelFiles = Callable[[str, str], bytes | None]


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a model's config and files tell beside its tensors.

    ``tokenizer_dir`` is a path on the server's machine. ``tokenizer`` is what the model's own files name: a folder, or
    a name on the Hugging Face hub. ``adds_bos`` is whether the backend adds special tokens to a prompt.
    ``max_model_len`` is how many tokens prompt and answer may have together; ``max_prompt_len`` is a number of tokens
    that no prompt can exceed. ``loras`` and ``generates`` are whether the engine takes LoRA adapters, and generates
    text, as far as the files tell.
    """

    tokenizer_dir: str | None = None
    tokenizer: str | None = None
    adds_bos: bool = False
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    loras: bool = True
    generates: bool = True


def named_tokenizer(*, model: Any, revision: Any, tokenizer: Any, tokenizer_revision: Any) -> str | None:
    """
    Return the tokenizer that an engine's arguments name: the model's own unless there is another one.

    Of the hub it is ``NAME@REVISION`` where a revision is given. Values are as people write them in files.
    """
    source, wanted = tokenizer, tokenizer_revision
    if not isinstance(source, str):
        source, wanted = model, tokenizer_revision or revision
    if not isinstance(source, str):
        return None
    return f"{source}@{wanted}" if isinstance(wanted, str) and not Path(source).exists() else source


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

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return :attr:`hints`, completed by what *files* of the repository tell. Blocks; runs in a thread."""
        return self.hints

    @property
    def token_level(self) -> ModelConfig | None:
        """The model behind this one that can answer all of its requests in token ids, where there is one."""
        return None

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """What each parameter of a request becomes on this model."""
        return ()

    def at_once(self, generation: Generation) -> bool:
        """Return whether the whole answer to :meth:`encode`'s request comes in one response."""
        return not self.config.decoupled

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
