"""
Triton's vLLM backend.

Source of the facts: ``src/model.py`` of vllm_backend, releases 23.10 to 26.01.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import structlog

from triton_openai.adapters._common.base import (
    Adapter,
    Capabilities,
    ModelFiles,
    ModelMetadata,
    Parameter,
    check_range,
    requires_only,
    with_engine_arguments,
)
from triton_openai.adapters._common.decoding import (
    CumulativeText,
    Reader,
    TextDecoder,
    checked_vectors,
    cumulative_logprob,
)
from triton_openai.errors import InvalidValue
from triton_openai.generation import Alternative, Delta, Generation, Guide, Sampling, TokenLogprob
from triton_openai.jobs import EmbeddingJob, EmbeddingResult, JobType
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig

_log = structlog.get_logger(__name__)

_KEYS = "sampling_parameters"
# The keys of that JSON, as vLLM's SamplingParams calls them. Unknown keys fail the request, so this is a whitelist.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_tokens", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos"),
    *("min_p", "bad_words", "allowed_token_ids", "skip_special_tokens", "logprobs"),
)
_INTEGERS = {**dict.fromkeys(("max_tokens", "top_k", "min_tokens", "logprobs"), "INT32"), "seed": "INT64"}
PARAMETERS: tuple[Parameter, ...] = (
    *(Parameter(name, target=f"{_KEYS}.{name}", datatype=_INTEGERS.get(name)) for name in _SAMPLING),
    Parameter("length_penalty"),
    Parameter("thinking_token_budget"),
    # JSON makes text of the token ids, which fails the request.
    Parameter("logit_bias", why="Triton's vLLM backend cannot read it"),
)
_TEXT = "text_output"
_FINISH = "finish_reason"
_PROMPT_COUNT = "num_input_tokens"
_TOKEN_COUNT = "num_output_tokens"
_LOGPROBS = "logprobs"
_CUMULATIVE = "cumulative_logprob"
# The outputs that come where their flags ask for them.
_OPTIONAL = (_FINISH, _PROMPT_COUNT, _TOKEN_COUNT, _LOGPROBS, _CUMULATIVE)
_SUPPLIED = frozenset(
    {"text_input", "stream", _KEYS, "exclude_input_in_output", *(f"return_{name}" for name in _OPTIONAL)}
)
# The event loop reads all log probabilities of a whole answer at once: 2 to 4 microseconds for each token that is
# named in them.
_MAX_WHOLE_LOGPROBS = 4096
# The tokens that the engine may generate for nobody, because Triton does not pass on over HTTP that a client has left.
_MAX_WHOLE_OVER_HTTP = 1024
#: What vLLM calls each guide.
GUIDE_FIELDS: Mapping[str, str] = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
#: vLLM's ``max_logprobs`` where the engine's arguments do not set it, and as much as OpenAI allows.
MAX_ALTERNATIVES = 20
_MAX_TOKEN_ID = 2**31 - 1
_SERVER_24_12 = "2.53."
_vector = msgspec.json.Decoder(list[float])
_arguments = msgspec.json.Decoder(dict[str, Any])


class Vllm(Adapter):
    """Text deltas with finish reason and counts; embeddings where the release has ``embedding_request``."""

    name = "vllm"
    advice = (
        "the companion model serves vLLM faster and takes all of its parameters: triton-openai model-repository vllm"
        " --from FOLDER converts the model (docs/guides/vllm.md)"
    )
    # Those of a tokenizer that the config does not name.
    metadata = ModelMetadata(adds_bos=True)

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        # Before 24.03 every response holds the prompt and all text so far, and nothing can be done about it.
        self._repeats = "exclude_input_in_output" not in config.inputs
        self._guide_key = _guide_key(config)
        self._optional = frozenset(
            name for name in _OPTIONAL if f"return_{name}" in config.inputs and name in config.outputs
        )
        self._always = self.declared_tensors(exclude_input_in_output=True)
        self._stream = {value: self.declared_tensors(stream=value) for value in (True, False)}
        self._flags = {name: self.tensor(f"return_{name}", True) for name in self._optional}
        # A flag that the model's own config does not call optional is sent in any case.
        required = [name for name in _OPTIONAL if _is_required(config, f"return_{name}")]
        self._required = {name: self.tensor(f"return_{name}", False) for name in required}
        finish = _FINISH in self._optional
        logprobs = _LOGPROBS in self._optional
        # Before 24.12 only the number of responses says how long an answer is, and why it ended.
        self._can_be_whole = {_FINISH, _TOKEN_COUNT} <= self._optional and "stream" in config.inputs
        self.parameters = tuple(
            Parameter("logprobs") if row.name == "logprobs" and not logprobs else row for row in PARAMETERS
        )
        if "embedding_request" in config.inputs:
            self.jobs = (Generation, EmbeddingJob)
        else:
            self.jobs = (Generation,)
        self.capabilities = Capabilities(
            streaming=config.decoupled,
            stop="shown" if finish else "hidden",
            usage=_TOKEN_COUNT in self._optional,
            finish_reason=finish,
            token_inputs=True,
            guides=frozenset(GUIDE_FIELDS) if self._guide_key is not None else frozenset(),
            top_logprobs=MAX_ALTERNATIVES if logprobs else 0,
            cumulative_logprob=_CUMULATIVE in self._optional,
            token_ids=logprobs,
            lora="name",
            # Declared for every model, also for those that see nothing: their chat templates take no images.
            images=math.inf if "image" in config.inputs else 0,
            # Not of the backend as it is published; some add it.
            audio="audio" in config.inputs,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with vLLM's tensors (also when wrapped in an ensemble), then any model of the backend vLLM."""
        claimed = "text_input" in config.inputs and "text_output" in config.outputs
        if not claimed or not requires_only(config, _SUPPLIED):
            return None
        if _KEYS in config.inputs:
            return "inputs text_input and sampling_parameters and output text_output"
        if config.backend == "vllm":
            return "backend vllm"
        return None

    def metadata_with(self, files: ModelFiles) -> ModelMetadata:
        """Return what ``model.json`` says: that of the model, or of the step that an ensemble is made around."""
        for name in (self.config.name, *(step.model for step in self.config.steps)):
            arguments = read_arguments(files, name, "model.json")
            if arguments is not None:
                # The backend takes the text "true" too.
                loras = str(arguments.get("enable_lora")).lower() == "true"
                lacks = frozenset(_lacking(arguments.get("runner"), arguments.get("task")))
                return msgspec.structs.replace(engine_metadata(self.metadata, arguments, loras=loras), lacks=lacks)
        return self.metadata

    def returns_whole(self, generation: Generation) -> bool:
        """
        Return whether the answer comes in one response, which costs a fraction of a stream for each token.

        It does unless the client wants a stream or limits the time between tokens. Log probabilities come whole only
        if the event loop can read them all at once. Without gRPC the answer may not be long: over HTTP Triton does not
        pass on that a client has left, and the engine works on an answer that nobody reads up to its end.
        """
        if not self.config.decoupled:
            return True
        if not self._can_be_whole or generation.stream or generation.times_tokens:
            return False
        tokens = generation.sampling.max_tokens
        if not generation.over_grpc and tokens > _MAX_WHOLE_OVER_HTTP:
            return False
        if tokens * (1 + (generation.sampling.logprobs or 0)) <= _MAX_WHOLE_LOGPROBS:
            return True
        return not self._reads_logprobs(generation)

    def encode(self, job: Generation | EmbeddingJob, /) -> Sequence[InferRequest]:
        """Return the request of a generation, or those of embeddings."""
        if isinstance(job, EmbeddingJob):
            return self._embeddings(job)
        config = self.config
        whole = self.returns_whole(job)
        outputs = self._outputs(job)
        inputs = [
            self.vector("text_input", (job.prompt,)),
            self.tensor(_KEYS, msgspec.json.encode(self._sampling(job, outputs)).decode()),
            *self._always,
            *self._stream[config.decoupled and not whole],
            # The text comes in any case.
            *map(self._flags.__getitem__, outputs[1:]),
        ]
        if self._required:
            inputs += [flag for name, flag in self._required.items() if name not in outputs]
        if job.images:
            inputs.append(self.tensor("image", *(image.base64 for image in job.images)))
        if job.audio:
            inputs.append(self.tensor("audio", *job.audio))
        # A whole answer costs each transport the same, and over gRPC it can be cancelled.
        return [self.request(job.id, inputs, outputs, prefers_grpc=whole)]

    def _outputs(self, generation: Generation) -> tuple[str, ...]:
        """
        Return the outputs that are needed.

        Each is a further tensor with every token of a stream, which the process of the model makes in one thread. So
        what is known here is not asked for: the length of a prompt that was counted, and that of an answer whose log
        probabilities come.
        """
        optional = self._optional
        outputs = [_TEXT]
        if _FINISH in optional:
            outputs.append(_FINISH)
        if _PROMPT_COUNT in optional and _counted_prompt(generation) is None:
            outputs.append(_PROMPT_COUNT)
        if self._reads_logprobs(generation):
            outputs.append(_LOGPROBS)
        elif _TOKEN_COUNT in optional:
            outputs.append(_TOKEN_COUNT)
        if generation.cumulative_logprob:
            outputs.append(_CUMULATIVE)
        return tuple(outputs)

    def _sampling(self, generation: Generation, outputs: Sequence[str]) -> dict[str, Any]:
        """
        Return the sampling parameters, which go as JSON text. *outputs* are those that are asked for.

        That tensor is always sent: without it the backend takes the request's parameters for sampling parameters.
        Keys that are not asked for are left out, because an explicit null fails the request.
        """
        asked = generation.sampling
        sampling = sampling_fields(asked, self.parameters)
        if self.capabilities.finish_reason and asked.stop_showable:
            # Which of them has ended the answer can be seen nowhere else; it is cut off here.
            sampling["include_stop_str_in_output"] = True
        if _LOGPROBS in outputs or _CUMULATIVE in outputs:
            # The ids come with the log probabilities, and nothing is scored without them.
            sampling.setdefault("logprobs", 0)
        guide = generation.guide
        if guide is not None and self._guide_key is not None:
            # The value is JSON text inside the JSON: an object there fails the request.
            sampling[self._guide_key] = msgspec.json.encode(guide_fields(guide)).decode()
        if generation.lora is not None:
            sampling["lora_name"] = generation.lora.name
        return sampling

    def decoder(self, generation: Generation) -> TextDecoder:
        readers: list[Reader] = []
        if self._reads_logprobs(generation):
            ids = generation.token_ids or bool(generation.sampling.stop_token_ids)
            readers.append(token_logprobs(generation.sampling.logprobs, ids=ids))
        if generation.cumulative_logprob:
            readers.append(cumulative_logprob(_CUMULATIVE))
        stage = None
        if self._repeats:
            stage = CumulativeText(skip=len(generation.prompt))
        finish = prompt_count = None
        if _FINISH in self._optional:
            finish = _FINISH
        if _PROMPT_COUNT in self._optional:
            prompt_count = _PROMPT_COUNT
        return TextDecoder(
            stage,
            prompt_count=prompt_count,
            prompt_tokens=_counted_prompt(generation),
            token_count=_TOKEN_COUNT,
            finish=finish,
            readers=readers,
        )

    def _reads_logprobs(self, generation: Generation) -> bool:
        """Return whether log probabilities are wanted, or the token ids that come with them."""
        if generation.sampling.logprobs is not None or generation.token_ids:
            return True
        # The ids show which of the request's stop tokens has ended the answer.
        return bool(generation.sampling.stop_token_ids) and _LOGPROBS in self._optional

    def _embeddings(self, job: EmbeddingJob) -> Sequence[InferRequest]:
        """Return one request per input: the backend takes one text, or one list of token ids, at a time."""
        if job.dimensions is not None:
            # A larger number fails in the engine, and other requests with it.
            check_range("dimensions", job.dimensions, "INT32")
        requests = []
        items: Sequence[Any] = job.inputs
        for index, item in enumerate(items):
            if not isinstance(item, str) and (min(item) < 0 or max(item) > _MAX_TOKEN_ID):
                raise InvalidValue("'input' holds an invalid token id.", "input")
            body: dict[str, Any] = {"input": item}
            if job.dimensions is not None:
                # A list of one: the backend takes the first element.
                body["pooling_params"] = {"dimensions": [job.dimensions]}
            inputs = [
                self.tensor("text_input", ""),
                self.tensor("embedding_request", msgspec.json.encode(body).decode()),
                *self.declared_tensors(return_num_input_tokens=True),
            ]
            requests.append(self.request(f"{job.id}-{index}", inputs, ("text_output", "num_input_tokens")))
        return requests

    def decode(self, job: EmbeddingJob, responses: Sequence[InferResponse], /) -> EmbeddingResult:
        """Return the vectors, and the tokens of all inputs if every answer counted its own."""
        vectors: list[bytes] = []
        counts: list[int] = []
        for response in responses:
            texts = response.texts("text_output")
            try:
                vectors.append(array("f", _vector.decode(texts[0])).tobytes())
            except (IndexError, msgspec.MsgspecError) as error:
                raise response.invalid("its embedding cannot be read", detail=str(error)) from error
            counts += response.integers("num_input_tokens")
        return EmbeddingResult(
            vectors=checked_vectors(vectors, len(job.inputs), self.config.name),
            prompt_tokens=sum(counts) if len(counts) == len(responses) else None,
        )


def read_arguments(files: ModelFiles, model: str, file: str) -> Mapping[str, Any] | None:
    """Return the engine's arguments in the JSON *file* of *model*; ``None`` without a file that can be read."""
    content = files(model, file)
    if content is None:
        return None
    try:
        return _arguments.decode(content)
    except msgspec.MsgspecError as error:
        # The model would not have been loaded; whoever edits the file now has not finished.
        _log.warning(f"{file} cannot be read", model=model, reason=str(error))
        return None


def engine_metadata(metadata: ModelMetadata, arguments: Mapping[str, Any], *, loras: bool) -> ModelMetadata:
    """Return *metadata* with what an engine's *arguments* say; *loras* is whether it takes LoRA adapters."""
    max_loras = arguments.get("max_loras", 1)
    if type(max_loras) is not int:
        max_loras = None
    known = with_engine_arguments(metadata, arguments, length="max_model_len")
    return msgspec.structs.replace(known, max_loras=max_loras, loras=loras)


def sampling_fields(sampling: Sampling, rows: Iterable[Parameter]) -> dict[str, Any]:
    """Return the parameters of *rows* with a target, as vLLM calls them. Raises :class:`InvalidRequest`."""
    explicit = sampling.explicit
    fields: dict[str, Any] = {}
    for row in rows:
        if row.target is not None and row.name in explicit:
            check_range(row.name, explicit[row.name], row.datatype)
            fields[row.name] = explicit[row.name]
    if fields.get("top_p") == 0:
        # vLLM takes no 0, which means the likeliest token alone.
        del fields["top_p"]
        fields["top_k"] = 1
    return fields


def _is_required(config: ModelConfig, name: str) -> bool:
    spec = config.inputs.get(name)
    return spec is not None and not spec.optional


def _counted_prompt(generation: Generation) -> int | None:
    """Return the tokens of the prompt where they were counted here; the engine alone knows those of images."""
    if generation.images or generation.audio:
        return None
    if generation.prompt_ids is not None:
        return len(generation.prompt_ids)
    return generation.prompt_tokens


def _lacking(runner: Any, task: Any) -> Iterator[JobType]:
    """Yield the jobs that an engine with these arguments does not take."""
    if runner == "pooling" or task not in (None, "auto", "generate"):
        yield Generation
    if "generate" in (runner, task):
        yield EmbeddingJob


def _guide_key(config: ModelConfig) -> str | None:
    """
    Return what the backend's release calls guided decoding, by the inputs that came with it.

    ``structured_outputs`` since 25.11 (which brought ``embedding_request``), ``guided_decoding`` in 25.01 to 25.10.
    24.12, the first with ``return_finish_reason``, has neither; its server's version tells it from 25.01.
    """
    if "embedding_request" in config.inputs:
        return "structured_outputs"
    if config.server_version.startswith(_SERVER_24_12):
        return None
    if "return_finish_reason" in config.inputs:
        return "guided_decoding"
    return None


def guide_fields(guide: Guide) -> dict[str, Any]:
    """Return *guide* as fields of vLLM's guided decoding or structured outputs."""
    value: Any = guide.value
    if guide.kind == "json":
        value = True
    elif guide.kind in ("json_schema", "choice"):
        value = msgspec.Raw(guide.value.encode())
    return {GUIDE_FIELDS[guide.kind]: value}


class _Entry(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_Positions: TypeAlias = list[dict[str, _Entry]] | None
_decode: Callable[[str], _Positions] = msgspec.json.Decoder(_Positions).decode


def token_logprobs(count: int | None, *, ids: bool = False) -> Reader:
    """
    Return a reader of the tokens' log probabilities, each with *count* alternatives, and of their *ids*.

    It raises :class:`InvalidAnswer` for JSON of another shape.
    """

    def read(response: InferResponse, delta: Delta) -> None:
        texts = response.texts("logprobs")
        if not texts:
            return
        try:
            positions = _read(texts[0])
        except (ValueError, RecursionError) as error:
            raise response.invalid("its log probabilities cannot be read", detail=str(error)) from error
        if positions is not None and delta.tokens is None:
            delta.tokens = len(positions)
        entries = [_entry(position, count or 0) for position in positions or () if position]
        if ids:
            delta.token_ids = [entry.id for entry in entries if entry.id is not None]
        if count is not None:
            delta.logprobs = entries

    return read


def _read(text: str) -> _Positions:
    """Return what *text* says. Raises :class:`ValueError`."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        # Python's reader knows -Infinity, msgspec's does not.
        positions: _Positions = msgspec.convert(json.loads(text), _Positions)
        return positions


def _entry(position: dict[str, _Entry], count: int) -> TokenLogprob:
    alternatives = [_alternative(key, entry) for key, entry in position.items()]
    entries = list(position.values())
    chosen = alternatives[0]
    # The chosen token comes on top of the most likely ones unless it is one of them: rank says which those are.
    ranks = [index if entry.rank is None else entry.rank for index, entry in enumerate(entries)]
    top = sorted(range(len(ranks)), key=ranks.__getitem__)[:count]
    return TokenLogprob(
        token=chosen.token,
        logprob=chosen.logprob,
        raw=chosen.raw,
        top=tuple(alternatives[index] for index in top),
        id=chosen.id,
        rank=entries[0].rank,
    )


def _alternative(key: str, entry: _Entry) -> Alternative:
    token = entry.decoded_token or ""
    # A part of a character shows as U+FFFD: its bytes are not known here. Where there is a tokenizer, it has them.
    if "\ufffd" in token:
        raw = None
    else:
        raw = token.encode()
    number = None
    if key.isdecimal():
        number = int(key)
    return Alternative(token=token, logprob=entry.logprob, raw=raw, id=number)
