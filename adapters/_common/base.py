"""
The base of all adapters, and the types of their interface.

An adapter is made for each *model* from its Triton config, and describes which jobs and parameters the model takes. A
decoder is made for each *request* and holds the state of its stream. See ``docs/guides/writing-an-adapter.md``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.generation import (
    Delta,
    EngineLoad,
    Generation,
    Logits,
    LoraFormat,
    Sampling,
    TensorMapping,
    TokenLogprob,
)
from triton_openai.jobs import JobType
from triton_openai.triton.tensors import (
    INTEGER_RANGES,
    MAX_OPEN_ANSWER,
    InferRequest,
    InferResponse,
    ModelConfig,
    Tensor,
)

# Sizes of answers that are remembered: by the outputs and the rows of a request.
_MAX_ANSWER_SIZES = 256


class Rule(enum.StrEnum):
    """What happens to a parameter on a model."""

    MAPPED = "mapped"
    """Sent to the backend."""
    SERVICE = "done here"
    """Done by this service, exactly as the backend would."""
    REFUSED = "refused"
    """A request that uses it is refused with 400 and the parameter's name."""


class Parameter(msgspec.Struct, frozen=True):
    """One row of an adapter's table: how a field of :class:`Sampling` reaches the model."""

    #: The field.
    name: str
    #: The inputs, or JSON keys, that can carry it, in order of preference.
    inputs: tuple[str, ...] = ()
    #: What to do when the model declares none of them.
    otherwise: Rule = Rule.REFUSED
    #: What the table in the documentation says of it.
    note: str = ""
    #: The advice in the error for a client whose request is refused.
    why: str = ""
    #: Whether the input has to hold negative numbers.
    signed: bool = False
    #: Whether the adapter converts the value itself, instead of :meth:`Adapter.parameter_tensors`.
    special: bool = False
    #: The one of the inputs that :func:`bind` finds.
    target: str | None = None
    #: That of the target.
    datatype: str | None = None
    #: Values that have their effect although the parameter is refused.
    neutral: tuple[Any, ...] = ()

    @property
    def rule(self) -> Rule:
        """What happens to the parameter on the model."""
        if self.target is None:
            return self.otherwise
        return Rule.MAPPED


def bind(table: Sequence[Parameter], config: ModelConfig, *overrides: Parameter) -> tuple[Parameter, ...]:
    """
    Resolve *table* against the inputs that *config* declares.

    A parameter without a row is refused, except ``stop``: the service cuts stop strings out itself.
    *overrides* stand in place of the rows of the same names.
    """
    bound: dict[str, Parameter] = {}
    for row in table:
        specs = [config.inputs[name] for name in row.inputs if name in config.inputs]
        spec = next(
            (candidate for candidate in specs if not (row.signed and candidate.datatype.startswith("UINT"))), None
        )
        if spec is None:
            target = {}
        else:
            target = {"target": spec.name, "datatype": spec.datatype}
        bound[row.name] = msgspec.structs.replace(row, **target)
    bound |= {row.name: row for row in overrides}
    bound.setdefault("stop", Parameter("stop", otherwise=Rule.SERVICE))
    # Every request has a limit.
    missing = [name for name in Sampling.__struct_fields__ if name not in {*bound, "max_tokens"}]
    return (*bound.values(), *map(Parameter, missing))


def requires_only(config: ModelConfig, names: Collection[str]) -> bool:
    """Return whether every input that the model requires is one of *names*."""
    return all(spec.optional or name in names for name, spec in config.inputs.items())


def values_of(parameter: Parameter, sampling: Sampling) -> Sequence[Any]:
    """
    Return the flat values of *parameter* in a request, empty when it is not used.

    Raises :class:`InvalidRequest` with the parameter's name for a number that the input's dtype cannot hold.
    """
    value = getattr(sampling, parameter.name)
    if value is None or isinstance(value, tuple):
        return value or ()
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
    max_value = _MAX_FLOAT.get(datatype or "")
    # A NaN compares as false.
    if max_value is not None and not abs(value) <= max_value:
        raise InvalidRequest(f"'{name}' is out of range for this model, got {value}.", param=name)


_MAX_FLOAT: Mapping[str, float] = {"FP32": 3.4028234e38, "FP16": 65504.0}


class Synthesis(msgspec.Struct, frozen=True, kw_only=True):
    """How a model synthesizes speech for a :class:`SynthesisJob`, in Hz and seconds."""

    #: The rate of its samples; 0 if it returns files, which have a rate of their own.
    rate: int
    #: The longest speech of one request.
    max_seconds: float
    #: Whether that includes the reference recording.
    with_reference: bool = False
    #: By how much the parts of an answer overlap; there, one fades into the other.
    overlap: float = 0.0
    #: The rate of the recordings that it imitates; 0 where it takes none.
    reference_rate: int = 0
    #: Whether it distinguishes recordings only by their text.
    voices_by_transcript: bool = False
    #: The type of its names of voices; ``None`` where it takes no voice, and a recording where it takes those.
    voice_type: type[str] | type[int] | None = None
    #: Whether it has a voice for requests without one.
    has_own_voice: bool = False


class Recognition(msgspec.Struct, frozen=True, kw_only=True):
    """How a recognizer takes speech."""

    #: Samples a second.
    sample_rate: int = 16_000
    #: The longest audio of a job.
    max_seconds: float
    #: The codes of the languages that a job can have; empty if the model takes no language.
    languages: Collection[str] = ()
    #: The language of a job without one.
    language: str | None = None
    #: Whether a job can have a prompt.
    prompt: bool = False
    #: Seconds without a request after which the model forgets audio that it gets while it is spoken, see
    #: :meth:`Adapter.begin_live`; ``None`` for a model that gets audio only when it is complete.
    live_idle: float | None = None
    #: Whether answers have segments with times, so that words can be placed in them.
    segments: bool = False
    #: Whether answers have words with times.
    words: bool = False
    #: Whether answers have tokens with their probabilities.
    logprobs: bool = False
    #: Whether a job can have a temperature.
    temperature: bool = False
    #: The most tokens of an answer; ``None`` where that is not known. A longer answer is cut.
    max_tokens: int | None = None
    #: Whether the model invents text, as Whisper does: for audio without speech, and in loops.
    invents: bool = False
    #: Whether answers are Whisper's token ids, which are read with the model's tokenizer.
    token_ids: bool = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a model can do through its adapter, beside its jobs and the parameters in its table.

    The rest of the service depends on these, never on the name of an adapter or a backend.
    """

    #: Answers come in parts.
    streaming: bool = False
    #: An answer in one response begins with the prompt.
    echoes: bool = False
    #: What the backend does with stop strings: it keeps them out of the text, or leaves them in where
    #: :attr:`Sampling.stop_showable` is, to show which one ended the answer. Where it does neither, this service cuts.
    stop: Literal["hidden", "shown"] | None = None
    #: The backend counts tokens.
    usage: bool = False
    #: The backend says why an answer ended.
    finish_reason: bool = False
    #: The model takes all texts as token ids, and generates in token ids: the text is made here.
    tokens: bool = False
    #: With :attr:`tokens`: special tokens that the model's tokenizer must have. Another tokenizer is not the model's.
    tokenizer_has: Sequence[str] = ()
    #: With :attr:`tokens`: the engine ends an answer by itself, and its tokens have the one that ended it. Log
    #: probabilities come with the tokens, not as logits.
    ends_itself: bool = False
    #: Inputs of a job may be token ids, where the model takes texts too.
    token_inputs: bool = False
    #: The kinds of :class:`Guide` that it follows.
    guides: frozenset[str] = frozenset()
    #: The most alternatives that come with a token's log probability.
    top_logprobs: int = 0
    #: An answer comes with the log probability of the whole.
    cumulative_logprob: bool = False
    #: The prompt's tokens come with their log probabilities, by :meth:`Adapter.encode_prompt_logits`.
    prompt_logprobs: bool = False
    #: Tokens come with their ids.
    token_ids: bool = False
    #: The engine does beam searches.
    beam_search: bool = False
    #: A logit bias is sent as texts, each of which the backend tokenizes with its special tokens.
    bias_words: bool = False
    #: The levels of priority that the engine itself has; 1 comes first.
    priority_levels: int = 0
    #: How a request names a LoRA adapter: by its name, by the path from which the backend reads the weights, or with
    #: the weights in this format.
    lora: LoraFormat | Literal["name", "path"] | None = None
    #: The most images that a prompt can come with; infinite if only the model has a limit.
    images: float = 0
    #: A prompt can come with audio.
    audio: bool = False
    #: A prompt with images is the text of one user message, which the model's own template wraps.
    images_as_turn: bool = False
    #: A classifier returns logits, not probabilities.
    logits: bool = False
    #: The engine can leave out the activation of vectors, classes and scores.
    activation: bool = False
    #: The backend has the labels of a classifier's classes.
    labels: bool = False
    #: The backend uses one seed for all requests that bring none.
    fixed_seed: bool = False
    #: How it synthesizes speech, if it does.
    synthesis: Synthesis | None = None
    #: How it takes speech, if it recognizes speech.
    recognition: Recognition | None = None


#: Reads a file of a Triton model: the model's name and the file's name in its newest version; ``None`` if unreadable.
ModelFiles = Callable[[str, str], bytes | None]


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a model's config and files say beside its tensors.

    ``tokenizer_dir`` is a path on the server's machine; ``tokenizer`` is a folder, or a name on the Hugging Face hub,
    from the model's own files. ``adds_bos`` is whether the backend adds special tokens to a prompt. ``max_model_len``
    is the limit on the tokens of prompt and answer together, ``max_prompt_len`` that on the prompt's. ``loras`` and
    ``images`` are whether the engine takes LoRA adapters and images, ``lacks`` the jobs of its adapter that it does not
    take, as far as the files say; ``max_loras`` is how many adapters it runs at once.
    """

    tokenizer_dir: str | None = None
    tokenizer: str | None = None
    adds_bos: bool = False
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    loras: bool = True
    max_loras: int | None = None
    images: bool = True
    lacks: frozenset[JobType] = frozenset()


def with_engine_arguments(metadata: ModelMetadata, arguments: Mapping[str, Any], *, length: str) -> ModelMetadata:
    """
    Return *metadata* with the tokenizer and the context length that an engine's *arguments* name.

    The tokenizer is the model's own unless there is another one; of the hub it is ``NAME@REVISION`` where a revision is
    given. *length* is the argument for the context length: "auto" and "32k" leave it to the engine, as -1 does.
    """
    source = arguments.get("tokenizer")
    revision = arguments.get("tokenizer_revision")
    if not isinstance(source, str):
        source = arguments.get("model")
        revision = revision or arguments.get("revision")
    if not isinstance(source, str):
        source = None
    elif isinstance(revision, str) and not Path(source).exists():
        source = f"{source}@{revision}"
    limit = arguments.get(length)
    if not (type(limit) is int and limit > 0):
        limit = None
    return msgspec.structs.replace(metadata, tokenizer=source, max_model_len=limit)


class LiveEncoder(Protocol):
    """Makes the requests of one sequence from audio as it comes. Not to be shared."""

    #: The request that ends the sequence early.
    closing: InferRequest

    def feed(self, samples: bytes) -> Sequence[InferRequest]:
        """Return the requests that further *samples* complete: little-endian float32 at the model's rate."""
        ...

    def fill(self) -> Sequence[InferRequest]:
        """Return the next request, completed with silence."""
        ...

    def finish(self) -> InferRequest:
        """Return the last request, with the rest of the audio."""
        ...


class Decoder(Protocol):
    """Turns the responses of one request into deltas. Holds that stream's state; not to be shared."""

    def feed(self, response: InferResponse) -> Delta:
        """Return what *response* adds."""
        ...

    def flush(self) -> str:
        """Return the text that was still held back, once the stream has ended."""
        ...


class Adapter:
    """
    Base of all adapters: the defaults of most backends. An adapter overrides what differs.

    It has more methods than other classes, because it is both the interface that the service calls and the helpers that
    adapters build requests with: an author of an adapter reads one class.
    """

    name: ClassVar[str]
    #: The types of the jobs that the model takes, what it is mainly for first.
    jobs: Sequence[JobType] = (Generation,)
    #: What the model can do.
    capabilities: Capabilities = Capabilities()
    #: What each parameter of a request becomes.
    parameters: Sequence[Parameter] = ()
    #: What else the configs say.
    metadata: ModelMetadata = ModelMetadata()
    #: Sentences for the operator, which ``inspect`` shows.
    notes: Sequence[str] = ()
    #: One sentence for the operator on how to serve the model better, in the log and in ``inspect``.
    advice: str = ""
    #: Whether a stream loses the characters that span several tokens; :attr:`token_level` may not.
    splits_characters: bool = False
    #: Whether :attr:`token_level` returns more than the text, such as times.
    token_level_adds_times: bool = False
    #: Whether the backend detects only over gRPC, or there earlier, that a client has disconnected; if only for some
    #: requests, :meth:`request` takes the same argument.
    prefers_grpc: bool = False

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        """
        Bind the adapter to a model.

        *repository* holds the configs of every ready model by name, for adapters whose model works through others
        (an ensemble and its steps).
        """
        self.config = config
        self.repository = repository
        self._answer_sizes: dict[tuple[tuple[str, ...], int], int] = {}
        # Of an input with one value.
        self._shapes = {name: config.wire_shape(spec, 1) for name, spec in config.inputs.items()}

    @cached_property
    def parameters_by_name(self) -> Mapping[str, Parameter]:
        """The rows of the table of :attr:`parameters`."""
        return {row.name: row for row in self.parameters}

    @cached_property
    def supported(self) -> frozenset[str]:
        """The parameters in the table that are not refused."""
        return frozenset(row.name for row in self.parameters if row.rule is not Rule.REFUSED)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Return why this adapter claims the model (for a person to read), or ``None`` if it does not."""
        raise NotImplementedError

    @classmethod
    def described(
        cls, config: ModelConfig, repository: Mapping[str, ModelConfig], mapping: TensorMapping | None
    ) -> Adapter:
        """
        Return the adapter for a model whose tensors the operator may describe (*mapping*).

        Raises :class:`ConfigurationError` if the adapter has fixed names of tensors.
        """
        if mapping is not None:
            raise ConfigurationError(
                f"The settings of the model '{config.name}' describe its tensors, but the adapter '{cls.name}' has "
                "fixed names for them."
            )
        return cls(config, repository)

    def metadata_with(self, files: ModelFiles) -> ModelMetadata:
        """Return :attr:`metadata`, completed by what *files* of the repository say. Blocks; runs in a thread."""
        return self.metadata

    @property
    def default_sampling(self) -> str:
        """What a request without sampling parameters gets, for the operator."""
        return "temperature 1, top_p 1"

    @property
    def token_level(self) -> ModelConfig | None:
        """The model behind this one that can answer all of its requests in token ids, where there is one."""
        return None

    def returns_whole(self, generation: Generation) -> bool:
        """Return whether the whole answer to *generation* comes in one response."""
        return not self.config.decoupled

    def no_answer_cause(self, generation: Generation) -> str | None:
        """Return a sentence with the likely cause if the model sends no answer at all to *generation*."""
        return None

    def encode(self, job: Any, /) -> Sequence[InferRequest]:
        """
        Return the requests that do *job*, one of :attr:`jobs`, together covering its inputs in order.

        A generation has one. Raises :class:`InvalidRequest` for values that no input can hold.
        """
        raise InvalidRequest(f"The model '{self.config.name}' does not {job.does[1]}.", param="model")

    def begin_live(self, job: Any, /) -> LiveEncoder:
        """Return what makes the requests of *job*, whose samples come while they are spoken."""
        raise NotImplementedError

    def decode(self, job: Any, responses: Sequence[InferResponse], /) -> Any:
        """Return the result of *job*, of the type that it names, from the answers to its requests in their order."""
        raise NotImplementedError

    def decoder(self, generation: Generation) -> Decoder:
        """Return a fresh decoder for the answers to the request of a generation."""
        raise NotImplementedError

    def encode_prompt_logits(self, generation: Generation) -> InferRequest:
        """Return a request for the scores of the prompt's tokens. Raises :class:`InvalidRequest` for too many."""
        raise NotImplementedError

    def decode_prompt_logits(self, response: InferResponse) -> Logits | None:
        """Return the scores that *response* to that request brings: row *i* is of the token after token *i*."""
        raise NotImplementedError

    def decode_prompt_logprobs(self, response: InferResponse, count: int) -> Sequence[TokenLogprob] | None:
        """
        Return the scores of the prompt's tokens but the first, with *count* alternatives each.

        For backends that send them in place of logits; ``None`` where *response* has none.
        """
        return None

    def load_request(self) -> InferRequest | None:
        """Return a request for the load of the engine, ``None`` where it does not report it by request."""
        return None

    def decode_load(self, responses: Sequence[InferResponse]) -> EngineLoad | None:
        """Return the load that *responses* to that request bring, ``None`` where the engine does not measure it."""
        raise NotImplementedError

    def cancel(self, generation: Generation) -> InferRequest | None:
        """Return a request that makes the engine stop *generation*, ``None`` where closing the stream is enough."""
        return None

    # Helpers for subclasses.

    def tensor(self, name: str, *values: Any) -> Tensor:
        """
        Return an input with the dtype and rank that the config declares for it.

        Raises :class:`ConfigurationError` when it is not declared: the settings name an adapter that does not fit the
        model.
        """
        return self.vector(name, values)

    def vector(self, name: str, values: Sequence[Any]) -> Tensor:
        """Return the input that :meth:`tensor` returns; *values* are not copied, as they may be a long prompt."""
        spec = self.config.inputs.get(name)
        if spec is None:
            raise ConfigurationError(
                f"The adapter '{self.name}' needs the input '{name}', which the model '{self.config.name}' lacks."
            )
        if len(values) == 1:
            shape = self._shapes[name]
        else:
            shape = self.config.wire_shape(spec, len(values))
        return Tensor(name, spec.datatype, shape, values)

    def declared_tensors(self, **values: Any) -> list[Tensor]:
        """Return the inputs with these *values*, of those that the model declares."""
        return [self.tensor(name, value) for name, value in values.items() if name in self.config.inputs]

    def parameter_tensors(self, sampling: Sampling) -> list[Tensor]:
        """Return the inputs for the parameters that *sampling* has; not those whose row is special."""
        set_parameters = sampling.explicit
        return [
            self.tensor(row.target, *values_of(row, sampling))
            for row in self.parameters
            if row.name in set_parameters and row.target is not None and not row.special
        ]

    def _max_answer(self, outputs: tuple[str, ...], rows: int) -> int:
        """Return how many bytes an answer can have, and remember it."""
        # Without a choice, all come.
        size = self.config.max_answer(outputs or self.config.outputs, rows)
        if len(self._answer_sizes) < _MAX_ANSWER_SIZES:
            self._answer_sizes[outputs, rows] = size
        return size

    def request(
        self,
        generation_id: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[str],
        *,
        cancellable: bool = True,
        classification: int = 0,
        prefers_grpc: bool = False,
    ) -> InferRequest:
        """Return the request to the adapter's own model, asking for those of *outputs* that it declares."""
        config = self.config
        declared = self.config.outputs
        asked = tuple([name for name in outputs if name in declared])
        if inputs and inputs[0].shape:
            rows = inputs[0].shape[0]
        else:
            rows = 1
        max_answer = self._answer_sizes.get((asked, rows)) or self._max_answer(asked, rows)
        if classification:
            # Labels are texts, whatever the output is declared as.
            max_answer = MAX_OPEN_ANSWER
        return InferRequest(
            model=config.name,
            id=generation_id,
            inputs=tuple(inputs),
            outputs=asked,
            max_answer=max_answer,
            stream=config.decoupled,
            cancellable=cancellable,
            classification=classification,
            prefers_grpc=prefers_grpc or self.prefers_grpc,
            json_expressible=not [
                tensor for tensor in inputs if tensor.datatype in ("FP16", "BF16") or type(tensor.values) is bytes
            ],
        )
