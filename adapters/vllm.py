"""
Triton's vLLM backend.

Source of the facts: ``src/model.py`` of vllm_backend, releases 23.10 to 26.01.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import structlog

from triton_openai.adapters._common.base import (
    Adapter,
    BoundParameter,
    Capabilities,
    Hints,
    ModelFiles,
    Rule,
    check_range,
    named_tokenizer,
    refused,
)
from triton_openai.adapters._common.decoding import TextDecoder
from triton_openai.errors import InvalidRequest, UpstreamError
from triton_openai.generation import Alternative, Delta, EmbeddingJob, EmbeddingResult, Generation, Guide, TokenLogprob
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

_vector = msgspec.json.Decoder(list[float])
_EMBEDDING_OUTPUTS = ("text_output", "num_input_tokens")
_MAX_TOKEN_ID = 2**31 - 1


def embedding_request(adapter: Adapter, job: EmbeddingJob) -> Sequence[InferRequest]:
    """Return one request per input of *job*. Raises :class:`InvalidRequest` for what can be no token id."""
    requests = []
    inputs_of_job: Sequence[Any] = job.inputs
    for index, item in enumerate(inputs_of_job):
        if not isinstance(item, str) and (min(item) < 0 or max(item) > _MAX_TOKEN_ID):
            raise InvalidRequest("'input' holds a number that is no token id.", param="input", code="invalid_value")
        body: dict[str, Any] = {"input": item}
        if job.dimensions is not None:
            # A list of one: the backend takes the first element.
            body["pooling_params"] = {"dimensions": [job.dimensions]}
        inputs = [
            adapter.tensor("text_input", ""),
            adapter.tensor("embedding_request", msgspec.json.encode(body).decode()),
        ]
        if "return_num_input_tokens" in adapter.config.inputs:
            inputs.append(adapter.tensor("return_num_input_tokens", True))
        requests.append(adapter.request(f"{job.id}-{index}", inputs, _EMBEDDING_OUTPUTS))
    return requests


def decode_embedding(responses: Sequence[InferResponse]) -> EmbeddingResult:
    """Return the vectors, and the tokens of all inputs if every answer counted its own."""
    vectors = []
    counts: list[int] = []
    for response in responses:
        texts = response.texts("text_output")
        try:
            vectors.append(array("f", _vector.decode(texts[0])).tobytes())
        except (IndexError, msgspec.MsgspecError, OverflowError) as error:
            raise UpstreamError("The model sent an embedding that cannot be read.", detail=str(error)) from error
        counts += [int(count) for count in response.numbers("num_input_tokens")]
    return EmbeddingResult(vectors=vectors, prompt_tokens=sum(counts) if len(counts) == len(responses) else None)


_REPLACEMENT = "\ufffd"
#: vLLM's ``max_logprobs`` where the engine's arguments do not set it, and as much as OpenAI allows.
MOST = 20


class _Entry(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_Positions: TypeAlias = list[dict[str, _Entry]] | None
_decode: Callable[[str], _Positions] = msgspec.json.Decoder(_Positions).decode


class VllmLogprobs:
    """Reads the log probabilities of one request, which asked for *count* alternatives per token."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, response: InferResponse, delta: Delta) -> tuple[TokenLogprob, ...]:
        """Return one entry per new token. Raises :class:`UpstreamError` for JSON of another shape."""
        texts = response.texts("logprobs")
        if not texts:
            return ()
        try:
            positions = _read(texts[0])
        except (ValueError, RecursionError) as error:
            raise UpstreamError("The model sent log probabilities that cannot be read.", detail=str(error)) from error
        return tuple(self._position(entries) for entries in positions or () if entries)

    def _position(self, entries: dict[str, _Entry]) -> TokenLogprob:
        alternatives = [_alternative(key, entry) for key, entry in entries.items()]
        chosen = alternatives[0]
        rank = next(iter(entries.values())).rank
        # The chosen token comes on top of the most likely ones unless it is one of them: rank says which those are.
        ranked = sorted(
            (entry.rank if entry.rank is not None else index, index) for index, entry in enumerate(entries.values())
        )
        top = tuple(alternatives[index] for _, index in ranked[: self._count])
        return TokenLogprob(
            token=chosen.token, logprob=chosen.logprob, raw=chosen.raw, top=top, id=chosen.id, rank=rank
        )


def _read(text: str) -> _Positions:
    """Return what *text* says. Raises :class:`ValueError`."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        # Python's reader knows -Infinity, msgspec's does not.
        positions: _Positions = msgspec.convert(json.loads(text), _Positions)
        return positions


def _alternative(key: str, entry: _Entry) -> Alternative:
    token = entry.decoded_token or ""
    # A part of a character shows as U+FFFD: its bytes are not known here. Where there is a tokenizer, it has them.
    raw = None if _REPLACEMENT in token else token.encode()
    number = int(key) if key.isdecimal() else None
    return Alternative(token=token, logprob=entry.logprob, raw=raw, id=number)


_log = structlog.get_logger(__name__)

_KEYS = "sampling_parameters"
# What vLLM's SamplingParams calls it, and the integer range it takes. Unknown keys fail the request, so this is a
# whitelist.
_SAMPLING: tuple[tuple[str, str | None], ...] = (
    ("max_tokens", "INT32"),
    ("temperature", None),
    ("top_p", None),
    ("top_k", "INT32"),
    ("min_tokens", "INT32"),
    ("seed", "INT64"),
    ("frequency_penalty", None),
    ("presence_penalty", None),
    ("repetition_penalty", None),
    ("stop", None),
    ("include_stop_str_in_output", None),
    ("stop_token_ids", None),
    ("ignore_eos", None),
    ("min_p", None),
    ("bad_words", None),
    ("skip_special_tokens", None),
    ("logprobs", "INT32"),
)
PARAMETERS: tuple[BoundParameter, ...] = (
    *(
        BoundParameter(name=name, rule=Rule.MAPPED, target=f"{_KEYS}.{name}", datatype=datatype)
        for name, datatype in _SAMPLING
    ),
    refused("length_penalty"),
    # JSON makes text of the token ids, which fails the request.
    refused("logit_bias", "Triton's vLLM backend cannot read it"),
)
_FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_SUPPLIED = frozenset({"text_input", "stream", _KEYS, *_FLAGS})
_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_CUMULATIVE = "cumulative_logprob"
_SERVER_24_12 = "2.53."

_GUIDE_FIELDS: Mapping[str, str] = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


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
    return "guided_decoding" if "return_finish_reason" in config.inputs else None


def _guide_fields(guide: Guide) -> dict[str, Any]:
    name = _GUIDE_FIELDS[guide.kind]
    if guide.kind == "json":
        return {name: True}
    if guide.kind in ("json_schema", "choice"):
        return {name: msgspec.Raw(guide.value.encode())}
    return {name: guide.value}


class _EngineArguments(msgspec.Struct):
    """What counts here of ``model.json``, the arguments of vLLM's engine. Values are as people write them."""

    model: Any = None
    tokenizer: Any = None
    revision: Any = None
    tokenizer_revision: Any = None
    max_model_len: Any = None
    enable_lora: Any = False
    task: Any = None
    runner: Any = None

    def hints(self, known: Hints) -> Hints:
        """Return *known* with what they tell."""
        length = self.max_model_len
        return msgspec.structs.replace(
            known,
            tokenizer=named_tokenizer(
                model=self.model,
                revision=self.revision,
                tokenizer=self.tokenizer,
                tokenizer_revision=self.tokenizer_revision,
            ),
            # "auto" and "32k" leave the number to the engine, as -1 does.
            max_model_len=length if type(length) is int and length > 0 else None,
            # The backend takes the text "true" too.
            loras=str(self.enable_lora).lower() == "true",
            generates=self.runner != "pooling" and self.task in (None, "auto", "generate"),
        )


_engine_arguments = msgspec.json.Decoder(_EngineArguments)


class Vllm(Adapter):
    """Text deltas with finish reason and counts; embeddings where the release has ``embedding_request``."""

    name = "vllm"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self._constant = tuple(self.tensor(name, True) for name in _FLAGS if name in config.inputs)
        # Before 24.03 every response holds the prompt and all text so far, and nothing can be done about it.
        self._repeats = "exclude_input_in_output" not in config.inputs
        self._finish = "return_finish_reason" in config.inputs and "finish_reason" in config.outputs
        self._counts = "return_num_output_tokens" in config.inputs and "num_output_tokens" in config.outputs
        self._logprobs = "return_logprobs" in config.inputs and "logprobs" in config.outputs
        self._scores = "return_cumulative_logprob" in config.inputs and _CUMULATIVE in config.outputs
        self._parameters = tuple(
            parameter if parameter.name != "logprobs" or self._logprobs else refused("logprobs")
            for parameter in PARAMETERS
        )
        self._guide_key = _guide_key(config)
        self._capabilities = Capabilities(
            generate=True,
            embed="embedding_request" in config.inputs,
            streaming=config.decoupled,
            stop=True,
            stop_shown=self._finish,
            usage=self._counts,
            finish_reason=self._finish,
            dimensions=True,
            token_inputs=True,
            guides=frozenset(_GUIDE_FIELDS) if self._guide_key is not None else frozenset(),
            logprobs=self._logprobs,
            top_logprobs=MOST if self._logprobs else 0,
            cumulative_logprob=self._scores,
            token_ids=self._logprobs,
            lora=True,
            # Declared for every model, also for those that see nothing: their chat templates take no images.
            images="image" in config.inputs,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """
        Claim models with vLLM's tensors (also when wrapped in an ensemble), then any model of the backend ``vllm``.
        """
        inputs = config.inputs
        if not all(spec.optional or name in _SUPPLIED for name, spec in inputs.items()):
            return None
        if {"text_input", _KEYS} <= inputs.keys() and "text_output" in config.outputs:
            return "inputs text_input and sampling_parameters and output text_output"
        if config.backend == "vllm" and "text_input" in inputs and "text_output" in config.outputs:
            return "backend vllm"
        return None

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._capabilities

    @property
    def hints(self) -> Hints:
        """vLLM adds the special tokens of its tokenizer to every text prompt; the config does not name that."""
        return Hints(adds_bos=True)

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return what ``model.json`` tells: that of the model, or of the step that an ensemble is made around."""
        for name in (self.config.name, *(step.model for step in self.config.steps)):
            content = files(name, "model.json")
            if content is None:
                continue
            try:
                return _engine_arguments.decode(content).hints(self.hints)
            except msgspec.MsgspecError as error:
                # The backend would not have loaded the model; whoever edits the file now has not finished.
                _log.warning("model.json cannot be read", model=name, reason=str(error))
        return self.hints

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """Every key of ``sampling_parameters``."""
        return self._parameters

    def encode(self, generation: Generation) -> InferRequest:
        """
        Return the request; sampling goes as JSON text.

        That tensor is always sent: without it the backend takes the request's parameters for sampling parameters.
        Keys that are not asked for are left out, because an explicit null fails the request.
        """
        sampling: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.target is None:
                continue
            value = getattr(generation.sampling, parameter.name)
            if value is not None and value != ():
                check_range(parameter.name, value, parameter.datatype)
                sampling[parameter.name] = value
        if self._finish and generation.sampling.stop_showable:
            # Which of them has ended the answer can be seen nowhere else; it is cut off here.
            sampling["include_stop_str_in_output"] = True
        if sampling.get("top_p") == 0:
            # vLLM takes no 0, which means the likeliest token alone.
            del sampling["top_p"]
            sampling["top_k"] = 1
        ids = self._wants_ids(generation)
        if ids or generation.scored:
            # The ids are told with the log probabilities, and nothing is scored without them.
            sampling.setdefault("logprobs", 0)
        guide = generation.guide
        if guide is not None and self._guide_key is not None:
            # The value is JSON text inside the JSON: an object there fails the request.
            sampling[self._guide_key] = msgspec.json.encode(_guide_fields(guide)).decode()
        if generation.lora is not None:
            sampling["lora_name"] = generation.lora.name
        inputs: list[Tensor] = [
            self.tensor("text_input", generation.prompt),
            self.tensor(_KEYS, msgspec.json.encode(sampling).decode()),
            *self._constant,
        ]
        if "stream" in self.config.inputs:
            inputs.append(self.tensor("stream", self.config.decoupled))
        if generation.images:
            inputs.append(self.tensor("image", *(image.base64 for image in generation.images)))
        outputs: tuple[str, ...] = _OUTPUTS
        if generation.sampling.logprobs is not None or ids:
            inputs.append(self.tensor("return_logprobs", True))
            outputs += ("logprobs",)
        if generation.scored:
            inputs.append(self.tensor(f"return_{_CUMULATIVE}", True))
            outputs += (_CUMULATIVE,)
        return self.request(generation.id, inputs, outputs)

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return a decoder for one request."""
        count = generation.sampling.logprobs
        ids = self._wants_ids(generation)
        return TextDecoder(
            cumulative=self._repeats,
            skip=len(generation.prompt) if self._repeats else 0,
            prompt_count="num_input_tokens" if self._counts else None,
            token_count="num_output_tokens" if self._counts else None,
            finish="finish_reason" if self._finish else None,
            logprobs=VllmLogprobs(count or 0) if count is not None or ids else None,
            token_ids=ids,
            ids_only=count is None,
            cumulative_logprob=_CUMULATIVE if generation.scored else None,
        )

    def _wants_ids(self, generation: Generation) -> bool:
        """Return whether token ids are wanted: also to see which of the request's stop tokens has ended the answer."""
        return generation.token_ids or bool(self._logprobs and generation.sampling.stop_token_ids)

    def encode_embeddings(self, job: EmbeddingJob) -> Sequence[InferRequest]:
        """Return one request per input: the backend takes one text, or one list of token ids, at a time."""
        if not self._capabilities.embed:
            raise InvalidRequest(f"The model '{self.config.name}' does not make embeddings.", param="model")
        return embedding_request(self, job)

    def decode_embeddings(self, job: EmbeddingJob, responses: Sequence[InferResponse]) -> EmbeddingResult:
        """Return the vectors."""
        return decode_embedding(responses)
