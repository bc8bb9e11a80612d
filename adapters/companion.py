"""
The companion model: vLLM's own library inside Triton's Python backend, token ids in and out.

Source of the facts: contract 1 in ``triton_openai/companion/model.py``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog

from triton_openai.adapters._common.audio_tensor import wav_file
from triton_openai.adapters._common.base import (
    Adapter,
    Capabilities,
    Decoder,
    ModelFiles,
    ModelMetadata,
    Parameter,
    Recognition,
    Rule,
    check_range,
)
from triton_openai.adapters._common.companion_answers import (
    FLOAT,
    MAX_VECTOR_BYTES,
    DeliveryDecoder,
    Fault,
    Spoken,
    Vector,
    check_tokens,
    raw_numbers,
    rows_of,
    token_logprob,
)
from triton_openai.adapters._common.decoding import checked_vectors
from triton_openai.adapters.vllm import (
    GUIDE_FIELDS,
    MAX_ALTERNATIVES,
    engine_metadata,
    guide_fields,
    read_arguments,
    sampling_fields,
)
from triton_openai.errors import (
    ConfigurationError,
    InvalidAnswer,
    InvalidRequest,
    LoraNotLoaded,
    ModelCrashed,
    Overloaded,
    PromptRefused,
    RequestRefused,
    ServiceError,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import (
    Beams,
    EngineLoad,
    Generation,
    Sampling,
    TokenLogprob,
)
from triton_openai.jobs import (
    ClassificationJob,
    ClassificationResult,
    EmbeddingJob,
    EmbeddingResult,
    JobType,
    ScoreJob,
    ScoreResult,
    TokenClassificationJob,
    TokenEmbeddingJob,
    TokenVectorsResult,
    Transcript,
    TranscriptionJob,
    TranslationJob,
)
from triton_openai.languages import LANGUAGES
from triton_openai.triton.tensors import CarriedResponse, InferRequest, InferResponse, ModelConfig

_log = structlog.get_logger(__name__)

#: The parameter of the model's configuration that names the contract, and the versions that are known.
CONTRACT = "triton_openai_contract"
VERSIONS = ("1",)
#: The parameter that says what the engine is loaded for: ``generate``, ``embed``, ``classify``, ``token_embed``,
#: ``token_classify``, ``transcribe`` (a Whisper, by token ids) or ``transcribe_text`` (any other model that writes down
#: speech); several with commas.
RUNNER = "triton_openai_runner"
#: The levels of priority. An engine whose ``scheduling_policy`` is another one takes them, and does as without.
LEVELS = 10

_REQUEST = "request"
_CARRIER = "carrier"
_MEDIA = "media"
_RESPONSE = "response"
_SUPPLIED = frozenset({_REQUEST, _CARRIER, _MEDIA})
# Fields of Sampling that vLLM's SamplingParams calls the same. Unknown keys fail the request.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_tokens", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos", "min_p", "bad_words", "allowed_token_ids", "logit_bias"),
    "thinking_token_budget",
)
_INTEGERS = {**dict.fromkeys(("max_tokens", "top_k", "min_tokens", "thinking_token_budget"), "INT32"), "seed": "INT64"}
PARAMETERS: tuple[Parameter, ...] = (
    *(Parameter(name, target=f"sampling.{name}", datatype=_INTEGERS.get(name)) for name in _SAMPLING),
    Parameter("logprobs", target="return.logprobs", datatype="INT32"),
    Parameter("stop", otherwise=Rule.SERVICE),
    Parameter("include_stop_str_in_output", otherwise=Rule.SERVICE),
    Parameter("skip_special_tokens", otherwise=Rule.SERVICE),
    Parameter("length_penalty", why="it is one of beam searches: send 'use_beam_search' too"),
)


# A cross-encoder is a classifier with one class.
_JOBS: Mapping[str, Sequence[JobType]] = {
    "embed": (EmbeddingJob,),
    "classify": (ClassificationJob, ScoreJob),
    "token_embed": (TokenEmbeddingJob,),
    "token_classify": (TokenClassificationJob,),
    "transcribe": (TranscriptionJob, TranslationJob),
    "transcribe_text": (TranscriptionJob, TranslationJob),
}
# How every model takes speech: 30 seconds at once. One that does not take a language refuses it.
_SPEECH = Recognition(
    max_seconds=30.0,
    languages=tuple(LANGUAGES),
    prompt=True,
    temperature=True,
    invents=True,
)
# The token by which the tokenizer of a Whisper is recognized.
_START = "<|startoftranscript|>"
# It has room for 448 tokens, the prompt and its text before included.
_WHISPER = msgspec.structs.replace(_SPEECH, segments=True, token_ids=True)
# The most tokens for 30 seconds of speech. A model that repeats itself would go on to the end of its context.
_MAX_SPOKEN = 1024
# The most characters of a prompt for speech. The model tokenizes it in the loop that serves all of its streams.
_MAX_SPOKEN_PROMPT = 16_384
_OTHER_RECOGNIZER = msgspec.structs.replace(_SPEECH, max_tokens=_MAX_SPOKEN)
_vector = msgspec.json.Decoder(Vector)
_load = msgspec.json.Decoder(EngineLoad)
_spoken = msgspec.json.Decoder(Spoken)


class Companion(Adapter):
    """Token ids; the answers of all requests come over one carrier for each process and model."""

    name = "companion"
    metadata = ModelMetadata(adds_bos=True)
    parameters = PARAMETERS

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        runners = [runner.strip() for runner in (config.parameter(RUNNER) or "").split(",")]
        jobs: list[JobType] = []
        for runner in runners:
            jobs += _JOBS.get(runner, (Generation,))
        self.jobs = jobs
        recognition = None
        if "transcribe" in runners:
            self.capabilities = Capabilities(tokens=True, tokenizer_has=(_START,), recognition=_WHISPER)
            return
        if "transcribe_text" in runners:
            recognition = _OTHER_RECOGNIZER
        if runners == ["transcribe_text"]:
            self.capabilities = Capabilities(recognition=recognition)
            return
        self.capabilities = Capabilities(
            streaming=True,
            usage=True,
            finish_reason=True,
            tokens=True,
            ends_itself=True,
            token_inputs=True,
            guides=frozenset(GUIDE_FIELDS),
            top_logprobs=MAX_ALTERNATIVES,
            cumulative_logprob=True,
            prompt_logprobs=True,
            token_ids=True,
            beam_search=True,
            priority_levels=LEVELS,
            lora="name",
            images=math.inf if _MEDIA in config.inputs else 0,
            audio=_MEDIA in config.inputs,
            recognition=recognition,
            activation=True,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models whose configuration names the contract."""
        version = config.parameter(CONTRACT)
        if version is None:
            return None
        if version not in VERSIONS:
            _log.warning("a companion model has another contract", model=config.name, contract=version)
            return None
        return f"parameter {CONTRACT} {version}"

    def metadata_with(self, files: ModelFiles) -> ModelMetadata:
        """Return what ``engine.json`` says."""
        arguments = read_arguments(files, self.config.name, "engine.json")
        if arguments is None:
            return self.metadata
        return engine_metadata(self.metadata, arguments, loras=arguments.get("enable_lora") is True)

    def encode(
        self,
        job: Generation | EmbeddingJob | TokenEmbeddingJob | ClassificationJob | ScoreJob | TranscriptionJob,
        /,
    ) -> Sequence[InferRequest]:
        """Return the request of a generation or a transcription, or one for each input of another job."""
        if isinstance(job, Generation):
            return [self._generation(job, scores_prompt=None)]
        if isinstance(job, TranscriptionJob):
            return [self._transcription(job)]
        if isinstance(job, ScoreJob):
            return [self._pair(job, number) for number in range(len(job.encoded))]
        kind = "embed"
        pooling = _activation(job.activate)
        if isinstance(job, TokenEmbeddingJob):
            kind = job.tasks[0]
            check_tokens(job)
        elif isinstance(job, ClassificationJob):
            kind = "classify"
        elif job.dimensions is not None:
            check_range("dimensions", job.dimensions, "INT32")
            pooling["dimensions"] = job.dimensions
        requests = []
        items: Sequence[Any] = job.inputs
        for index, item in enumerate(items):
            body: dict[str, Any] = {"v": 1, "kind": kind, "pooling": pooling}
            if isinstance(item, str):
                body["prompt"] = item
            else:
                body["ids"] = list(item)
            requests.append(self.request(f"{job.id}-{index}", [self._body(body)], (_RESPONSE,)))
        return requests

    def _pair(self, job: ScoreJob, number: int) -> InferRequest:
        """Return the request for the score of one pair."""
        pair = job.encoded[number]
        pooling = _activation(job.activate)
        if 1 in pair.segments:
            # Where the second text begins, for models that are trained with segments.
            pooling["extra_kwargs"] = {"compressed_token_type_ids": list(pair.segments).index(1)}
        body = {"v": 1, "kind": "classify", "ids": list(pair.ids), "pooling": pooling}
        return self.request(f"{job.id}-{number}", [self._body(body)], (_RESPONSE,))

    def _transcription(self, job: TranscriptionJob) -> InferRequest:
        """Return the request for what is spoken in a window."""
        # Imported here: other models need no NumPy.
        import numpy as np

        file = wav_file(np.frombuffer(job.samples, "<f4"), _SPEECH.sample_rate)
        sampling: dict[str, Any] = {"temperature": job.temperature or 0.0}
        body: dict[str, Any] = {
            "v": 1,
            "kind": "transcribe",
            "sampling": sampling,
            "media": [{"type": "audio", "at": 0, "encoding": "base64"}],
        }
        if self.capabilities.recognition is _WHISPER:
            body["ids"] = list(job.prompt_ids)
            if len(job.prompt_ids) == 1:
                # The answer begins with the language, and nothing else of it is used.
                sampling["max_tokens"] = 1
        else:
            sampling["max_tokens"] = _MAX_SPOKEN
            body.update(_spoken_prompt(job))
        media = self.tensor(_MEDIA, base64.b64encode(file).decode())
        return self.request(job.id, [self._body(body), media], (_RESPONSE,))

    def load_request(self) -> InferRequest:
        """Return the request for the engine's load."""
        return self.request("load", [self._body({"v": 1, "kind": "info"})], (_RESPONSE,))

    def decode_load(self, responses: Sequence[InferResponse]) -> EngineLoad | None:
        """Return the load; ``None`` from an engine that does not measure it, or that has died."""
        for response in responses:
            for text in response.texts(_RESPONSE):
                try:
                    return _load.decode(text)
                except msgspec.MsgspecError:
                    return None
        return None

    def encode_prompt_logits(self, generation: Generation) -> InferRequest:
        """Return a request that generates one token and brings the log probabilities of the prompt's."""
        plain = Sampling(max_tokens=1, temperature=0)
        scored = msgspec.structs.replace(
            generation, id=f"{generation.id}-prompt", sampling=plain, guide=None, cumulative_logprob=False
        )
        return self._generation(scored, scores_prompt=MAX_ALTERNATIVES)

    def decode_prompt_logprobs(self, response: InferResponse, count: int) -> Sequence[TokenLogprob] | None:
        """Return the log probabilities of the prompt's tokens."""
        if not isinstance(response, CarriedResponse) or response.delivery.prompt_logprobs is None:
            return None
        return [token_logprob(scored, count) for scored in response.delivery.prompt_logprobs[1:] if scored is not None]

    def decode(
        self,
        job: EmbeddingJob | TokenEmbeddingJob | ClassificationJob | ScoreJob | TranscriptionJob,
        responses: Sequence[InferResponse],
        /,
    ) -> EmbeddingResult | TokenVectorsResult | ClassificationResult | ScoreResult | Transcript:
        """Return vectors, the values of classes, scores, or what is spoken."""
        if isinstance(job, TranscriptionJob):
            return self._transcript(responses)
        if isinstance(job, TokenEmbeddingJob):
            return self._token_vectors(job, responses)
        vectors: list[bytes] = []
        tokens = 0
        for response in responses:
            for text in response.texts(_RESPONSE):
                vector = self._vector(response, text)
                vectors.append(raw_numbers(response, vector.vector))
                tokens += vector.prompt or 0
        if isinstance(job, ScoreJob):
            checked_vectors(vectors, len(job.pairs), self.config.name)
            return ScoreResult(scores=self._scores(vectors), prompt_tokens=tokens)
        checked_vectors(vectors, len(job.inputs), self.config.name)
        if isinstance(job, EmbeddingJob):
            return EmbeddingResult(vectors=vectors, prompt_tokens=tokens)
        return ClassificationResult(
            values=[memoryview(one).cast("f").tolist() for one in vectors], prompt_tokens=tokens
        )

    def _token_vectors(self, job: TokenEmbeddingJob, responses: Sequence[InferResponse]) -> TokenVectorsResult:
        inputs: list[Sequence[bytes]] = []
        rows: list[bytes] = []
        tokens = 0
        size = 0
        for response in responses:
            for text in response.texts(_RESPONSE):
                vector = self._vector(response, text)
                part = rows_of(response, vector)
                rows += part
                size += sum(map(len, part))
                tokens += vector.prompt or 0
                if not vector.more:
                    inputs.append(rows)
                    rows = []
        if len(inputs) != len(job.inputs) or rows:
            raise InvalidAnswer(f"it has {len(inputs)} answers to {len(job.inputs)} inputs", model=self.config.name)
        if size > MAX_VECTOR_BYTES:
            raise InvalidRequest(
                f"The vectors of the inputs have {size} bytes together, and a request gets at most "
                f"{MAX_VECTOR_BYTES}: send several requests.",
                param="input",
            )
        return TokenVectorsResult(vectors=inputs, prompt_tokens=tokens)

    def _transcript(self, responses: Sequence[InferResponse]) -> Transcript:
        for response in responses:
            for text in response.texts(_RESPONSE):
                try:
                    spoken = _spoken.decode(text)
                except msgspec.MsgspecError as error:
                    raise response.invalid("its transcript cannot be read", detail=str(error)) from error
                if spoken.error is not None:
                    raise self._fault(spoken.error)
                likely = None
                if spoken.ids:
                    likely = spoken.logprob / len(spoken.ids)
                return Transcript(
                    text=spoken.text.strip(),
                    token_ids=spoken.ids,
                    avg_logprob=likely,
                    prompt_tokens=spoken.prompt,
                    complete=spoken.complete,
                )
        raise InvalidAnswer("it has no transcript", model=self.config.name)

    def _scores(self, vectors: Sequence[bytes]) -> Sequence[float]:
        """Return the scores that *vectors* hold. Raises :class:`InvalidRequest` for those of a classifier."""
        classes = len(vectors[0]) // FLOAT
        if classes != 1:
            raise InvalidRequest(
                f"The model '{self.config.name}' does not rank texts: it has {classes} classes.", param="model"
            )
        return [memoryview(one).cast("f")[0] for one in vectors]

    def _vector(self, response: InferResponse, text: str) -> Vector:
        try:
            vector = _vector.decode(text)
        except msgspec.MsgspecError as error:
            raise response.invalid("its vector cannot be read", detail=str(error)) from error
        if vector.error is not None:
            raise self._fault(vector.error)
        return vector

    def _fault(self, fault: Any) -> ServiceError:
        """Return the error for a job that the model refuses, or fails to do, as for a generation over a carrier."""
        try:
            said = msgspec.convert(fault, Fault)
        except msgspec.ValidationError as error:
            return InvalidAnswer("its error cannot be read", model=self.config.name, detail=str(error))
        if said.kind == "engine":
            return UpstreamError(f"The model '{self.config.name}' failed.", detail=said.message)
        if said.kind == "dead":
            return ModelCrashed(said.message)
        if said.kind == "overloaded":
            return Overloaded(said.message)
        if said.kind == "lora":
            return LoraNotLoaded(said.message, param=said.param)
        if said.kind == "unsupported":
            return UnsupportedParameter(said.message, param=said.param)
        return RequestRefused(said.message, param=said.param)

    def _body(self, body: Mapping[str, Any]) -> Any:
        return self.tensor(_REQUEST, msgspec.json.encode(body).decode())

    def _generation(self, generation: Generation, *, scores_prompt: int | None) -> InferRequest:
        ids = generation.prompt_ids
        if ids is None:
            raise ConfigurationError(
                f"The model '{self.config.name}' takes token ids: give its tokenizer with --tokenizer."
            )
        if not generation.prompt:
            # As in vLLM's server: the special token in front of it could be continued.
            raise PromptRefused("The prompt is empty: there is nothing to continue.")
        returns = {}
        count = generation.sampling.logprobs
        if count is None and generation.cumulative_logprob:
            count = 0
        if count is not None:
            returns["logprobs"] = count
        if scores_prompt is not None:
            returns["prompt_logprobs"] = scores_prompt
        body: dict[str, Any] = {
            "v": 1,
            "kind": "generate",
            "ids": ids,
            "sampling": self._sampling(generation),
        }
        if returns:
            body["return"] = returns
        if generation.beams is not None:
            body["beams"] = _beams(generation, generation.beams)
        if generation.priority:
            # Of vLLM's priorities the lowest comes first, and 0 is that of requests that bring none.
            body["priority"] = generation.priority - LEVELS
        if generation.lora is not None:
            body["lora"] = {"name": generation.lora.name, "path": generation.lora.path}
        inputs = []
        media = [("image", image.base64) for image in generation.images]
        media += [("audio", audio) for audio in generation.audio]
        if media:
            body["media"] = [{"type": kind, "at": at, "encoding": "base64"} for at, (kind, _) in enumerate(media)]
            inputs.append(self.tensor(_MEDIA, *(data for _, data in media)))
        request = self.request(generation.id, [self._body(body), *inputs], (_RESPONSE,))
        # A stop string ends the answer behind the token that completes it.
        return msgspec.structs.replace(request, carried=True, token_by_token=bool(generation.sampling.stop))

    def _sampling(self, generation: Generation) -> dict[str, Any]:
        """Return the sampling parameters as vLLM calls them. Raises :class:`InvalidRequest` for what no type holds."""
        sampling = sampling_fields(generation.sampling, [self.parameters_by_name[name] for name in _SAMPLING])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"]}
        if generation.guide is not None:
            sampling["structured_outputs"] = guide_fields(generation.guide)
        return sampling

    def decoder(self, generation: Generation) -> Decoder:
        return DeliveryDecoder(generation)


def _beams(generation: Generation, beams: Beams) -> dict[str, Any]:
    """Return the *beams* of *generation* as the model takes them."""
    sampling = generation.sampling
    ends = set(sampling.stop_token_ids)
    if generation.vocabulary is not None and not sampling.ignore_eos:
        ends.update(generation.vocabulary.end_ids)
    return {**msgspec.structs.asdict(beams), "ends": sorted(ends)}


def _spoken_prompt(job: TranscriptionJob) -> dict[str, str]:
    """Return what the model makes its prompt for *job* of. Raises :class:`InvalidRequest` for a long text."""
    if len(job.prompt or "") > _MAX_SPOKEN_PROMPT:
        raise InvalidRequest(
            f"'prompt' may have {_MAX_SPOKEN_PROMPT} characters at most for this model, this one has "
            f"{len(job.prompt or '')}.",
            param="prompt",
            code="string_above_max_length",
        )
    values = {"task": "transcribe"}
    if isinstance(job, TranslationJob):
        values = {"task": "translate", "to_language": "en"}
    if job.language is not None:
        values["language"] = job.language
    if job.prompt is not None:
        values["prompt"] = job.prompt
    return values


def _activation(activate: bool) -> dict[str, Any]:
    """Return the pooling parameters for whether the model's activation is applied."""
    if activate:
        return {}
    return {"use_activation": False}
