"""
Triton's vLLM backend.

Source of the facts: ``src/model.py`` of vllm_backend, releases 23.10 to 26.01.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from triton_openai.generation import Alternative, Delta, Generation, Guide, TokenLogprob
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
_FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_SUPPLIED = frozenset({"text_input", "stream", _KEYS, *_FLAGS})
_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_CUMULATIVE = "cumulative_logprob"
_GUIDE_FIELDS: Mapping[str, str] = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
# vLLM's ``max_logprobs`` where the engine's arguments do not set it, and as much as OpenAI allows.
_MOST_ALTERNATIVES = 20
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
        self._flags = self.declared_tensors(**dict.fromkeys(_FLAGS, True), stream=config.decoupled)
        finish, counts, logprobs, scores = (
            f"return_{name}" in config.inputs and name in config.outputs
            for name in ("finish_reason", "num_output_tokens", "logprobs", _CUMULATIVE)
        )
        self.parameters = tuple(
            Parameter("logprobs") if row.name == "logprobs" and not logprobs else row for row in PARAMETERS
        )
        self._logprobs = logprobs
        if "embedding_request" in config.inputs:
            self.jobs = (Generation, EmbeddingJob)
        else:
            self.jobs = (Generation,)
        self.capabilities = Capabilities(
            streaming=config.decoupled,
            stop="shown" if finish else "hidden",
            usage=counts,
            finish_reason=finish,
            token_inputs=True,
            guides=frozenset(_GUIDE_FIELDS) if self._guide_key is not None else frozenset(),
            top_logprobs=_MOST_ALTERNATIVES if logprobs else 0,
            cumulative_logprob=scores,
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
            content = files(name, "model.json")
            if content is None:
                continue
            try:
                arguments = _arguments.decode(content)
            except msgspec.MsgspecError as error:
                # The backend would not have loaded the model; whoever edits the file now has not finished.
                _log.warning("model.json cannot be read", model=name, reason=str(error))
                continue
            most = arguments.get("max_loras", 1)
            return msgspec.structs.replace(
                with_engine_arguments(self.metadata, arguments, length="max_model_len"),
                max_loras=most if type(most) is int else None,
                # The backend takes the text "true" too.
                loras=str(arguments.get("enable_lora")).lower() == "true",
                lacks=frozenset(_lacking(arguments.get("runner"), arguments.get("task"))),
            )
        return self.metadata

    def encode(self, job: Generation | EmbeddingJob, /) -> Sequence[InferRequest]:
        """
        Return the request of a generation, whose sampling goes as JSON text, or those of embeddings.

        That tensor is always sent: without it the backend takes the request's parameters for sampling parameters.
        Keys that are not asked for are left out, because an explicit null fails the request.
        """
        if isinstance(job, EmbeddingJob):
            return self._embeddings(job)
        generation = job
        asked = job.sampling
        sampling = {}
        for name, value in asked.given.items():
            if (row := self.parameters_by_name.get(name)) is not None and row.target is not None:
                check_range(name, value, row.datatype)
                sampling[name] = value
        if self.capabilities.finish_reason and asked.stop_showable:
            # Which of them has ended the answer can be seen nowhere else; it is cut off here.
            sampling["include_stop_str_in_output"] = True
        if sampling.get("top_p") == 0:
            # vLLM takes no 0, which means the likeliest token alone.
            del sampling["top_p"]
            sampling["top_k"] = 1
        ids = self._wants_ids(generation)
        if ids or generation.cumulative_logprob:
            # The ids come with the log probabilities, and nothing is scored without them.
            sampling.setdefault("logprobs", 0)
        guide = generation.guide
        if guide is not None and self._guide_key is not None:
            # The value is JSON text inside the JSON: an object there fails the request.
            sampling[self._guide_key] = msgspec.json.encode(_guide_fields(guide)).decode()
        if generation.lora is not None:
            sampling["lora_name"] = generation.lora.name
        inputs = [
            self.tensor("text_input", generation.prompt),
            self.tensor(_KEYS, msgspec.json.encode(sampling).decode()),
            *self._flags,
        ]
        if generation.images:
            inputs.append(self.tensor("image", *(image.base64 for image in generation.images)))
        if generation.audio:
            inputs.append(self.tensor("audio", *generation.audio))
        outputs: tuple[str, ...] = _OUTPUTS
        if asked.logprobs is not None or ids:
            outputs += ("logprobs",)
        if generation.cumulative_logprob:
            outputs += (_CUMULATIVE,)
        if outputs != _OUTPUTS:
            inputs += [self.tensor(f"return_{name}", True) for name in outputs[len(_OUTPUTS) :]]
        return [self.request(generation.id, inputs, outputs)]

    def decoder(self, generation: Generation) -> TextDecoder:
        can = self.capabilities
        count = generation.sampling.logprobs
        ids = self._wants_ids(generation)
        readers: list[Reader] = []
        if count is not None or ids:
            readers.append(token_logprobs(count, ids=ids))
        if generation.cumulative_logprob:
            readers.append(cumulative_logprob(_CUMULATIVE))
        return TextDecoder(
            CumulativeText(skip=len(generation.prompt)) if self._repeats else None,
            prompt_count="num_input_tokens" if can.usage else None,
            token_count="num_output_tokens" if can.usage else None,
            finish="finish_reason" if can.finish_reason else None,
            readers=readers,
        )

    def _wants_ids(self, generation: Generation) -> bool:
        """Return whether token ids are wanted: also to see which of the request's stop tokens has ended the answer."""
        return generation.token_ids or bool(self._logprobs and generation.sampling.stop_token_ids)

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


def _guide_fields(guide: Guide) -> dict[str, Any]:
    value: Any = guide.value
    if guide.kind == "json":
        value = True
    elif guide.kind in ("json_schema", "choice"):
        value = msgspec.Raw(guide.value.encode())
    return {_GUIDE_FIELDS[guide.kind]: value}


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
