"""
A stand-in for vLLM, with just the interface that the companion model uses, and the shipped model over it.

Its transcriptions are of the speech of :mod:`tones`, and the vector of a token is its id and its place.

It follows the orders in prompts, like the other stand-ins. The model's requests are recorded before the shipped code
sees them, and the stand-in records how each ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .engine import EngineFailure, Options
from .generation import Generation
from .scripted import engine_for
from .tensors import Recorder, as_text
from .text import Vocabulary
from .tones import hear

#: The error with which a test has the engine die.
DEATH = "the engine dies"
_MAX_LOGPROBS = 20
_GUIDES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class _Site:
    """What the stand-in needs to know, and vLLM does not: set before the engine starts."""

    settings: Any = None
    recorder: Any = None


class ValidationError(ValueError):
    """vLLM's error for what it does not take."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class RequestOutputKind:
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    json: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: Any = None

    def __post_init__(self) -> None:
        if self.choice == []:
            raise ValidationError("Choice '[]' cannot be an empty list", "structured_outputs")

    @property
    def guide(self) -> tuple[str, str]:
        kind = next(name for name in _GUIDES if getattr(self, name) is not None)
        value = getattr(self, kind)
        return kind, value if isinstance(value, str) else json.dumps(value)


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: Any = None
    structured_outputs: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
            "repetition_penalty": self.repetition_penalty > 0.0,
            "temperature": self.temperature >= 0.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= -1,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "max_tokens": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens": 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
        }
        for name, holds in rules.items():
            if not holds:
                raise ValidationError(f"{name} is out of range, got {getattr(self, name)}.", name)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > _MAX_LOGPROBS:
                raise ValidationError(f"Requested {name} of {getattr(self, name)}, max allowed: {_MAX_LOGPROBS}", name)


@dataclass
class PoolingParams:
    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class AsyncEngineArgs:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: Any = None
    index: int = 0
    text: str = ""


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    prompt_logprobs: Any = None


class RequestOutputCollector:
    """Keeps the newest output until it is taken."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self._outputs.append(output)

    def get_nowait(self) -> Any:
        if self._outputs:
            return self._outputs.pop(0)
        return None


@dataclass
class _Job:
    """A generation that runs."""

    name: str
    prompt: list[int]
    params: SamplingParams
    generation: Generation
    collector: RequestOutputCollector
    task: Any = None
    sent: int = 0
    scored: bool = False
    images: int = field(default=0)


class AsyncLLM:
    """Generates what the prompts order, one task for each request."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._vocabulary = Vocabulary(arguments["model"])
        self._engine = engine_for(_Site.settings, self._vocabulary)
        self._limit = int(arguments["max_model_len"])
        self._pools = "pooler_config" in arguments
        self._jobs: dict[str, _Job] = {}
        self.errored = False
        model = types.SimpleNamespace(
            model=arguments["model"],
            tokenizer=arguments["model"],
            max_model_len=self._limit,
            runner_type="generate",
            is_multimodal_model=True,
            get_vocab_size=lambda: len(self._vocabulary),
        )
        scheduler = types.SimpleNamespace(max_num_seqs=256, policy="priority")
        self.vllm_config = types.SimpleNamespace(model_config=model, scheduler_config=scheduler)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        return cls(engine_args.arguments)

    async def add_request(
        self, request_id: str, prompt: dict[str, Any], params: Any, lora_request: Any = None, priority: int = 0
    ) -> Any:
        ids = prompt["prompt_token_ids"]
        if len(ids) > self._limit:
            raise ValidationError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {self._limit}."
                " Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
        text = self._vocabulary.decode(ids, skip_special_tokens=False)
        room = min(params.max_tokens, max(1, self._limit - len(ids)))
        images = len(prompt.get("multi_modal_data", {}).get("image", ()))
        answer = self._engine.answer(text, ids, self._options(params, room, images))
        generation = Generation(
            answer,
            end_id=self._vocabulary.eos_id,
            # A steered answer may be longer than the model's context: tests ask for very long ones.
            max_tokens=params.max_tokens if answer.steering.scripted else room,
            stops=lambda made: made[-1] in (params.stop_token_ids or ()) and len(made) > params.min_tokens,
        )
        job = _Job(request_id, ids, params, generation, RequestOutputCollector())
        self._jobs[request_id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job))
        return job.collector

    def _options(self, params: SamplingParams, room: int, images: int) -> Options:
        guide = None
        if params.structured_outputs is not None:
            guide = params.structured_outputs.guide
        return Options(
            seed=params.seed,
            max_tokens=room,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            guide=guide,
            greedy=params.temperature == 0 or params.top_k == 1,
            images=images,
            logprobs=params.logprobs,
            bias=params.logit_bias or {},
        )

    async def _run(self, job: _Job) -> None:
        generation = job.generation
        event = "cancelled"
        try:
            while generation.finish is None:
                await asyncio.sleep(generation.delay())
                step = generation.step()
                if step.empty:
                    continue
                job.collector.put(self._output(job, step))
            event = "finished"
        except EngineFailure as failure:
            event = "failed"
            # As when vLLM's engine process has ended.
            self.errored = str(failure) == DEATH
            job.collector.put(RuntimeError(str(failure)))
        finally:
            generation.close()
            self._jobs.pop(job.name, None)
            _Site.recorder.ended(event, job.name.split("/")[0], len(generation.ids))

    def _output(self, job: _Job, step: Any) -> RequestOutput:
        ids = list(step.ids)
        if step.eos:
            ids.append(self._vocabulary.eos_id)
        reason = None
        if step.finish == "stop" and ids and ids[-1] in (job.params.stop_token_ids or ()):
            reason = ids[-1]
        logprobs = None
        if job.params.logprobs is not None:
            logprobs = [self._scores(job, job.sent + place, token) for place, token in enumerate(ids)]
        scored = None
        if job.params.prompt_logprobs is not None and not job.scored:
            scored = [None, *(self._prompt_scores(job, place) for place in range(1, len(job.prompt)))]
            job.scored = True
        job.sent += len(ids)
        return RequestOutput([CompletionOutput(ids, step.finish, reason, logprobs)], job.prompt, None, scored)

    def _scores(self, job: _Job, place: int, token: int) -> dict[int, Logprob]:
        top = job.generation.scores.top(place, token, job.params.logprobs or 0, len(self._vocabulary))
        return {number: Logprob(logprob, rank) for number, logprob, rank in top}

    def _prompt_scores(self, job: _Job, place: int) -> dict[int, Logprob]:
        count = job.params.prompt_logprobs or 0
        top = job.generation.scores.top(place, job.prompt[place], count, len(self._vocabulary))
        return {number: Logprob(logprob, rank) for number, logprob, rank in top}

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any = None, priority: int = 0
    ) -> Any:
        """Yield the outputs; the companion uses it for transcriptions, and where there is no collector."""
        if "heard" in prompt:
            text = prompt["heard"]
            ids = self._vocabulary.encode(text, add_special_tokens=False)
            # As if its limit had cut the answer.
            finish = "stop"
            if len(ids) > sampling_params.max_tokens:
                finish = "length"
            yield RequestOutput([CompletionOutput(ids, finish, text=text)], [1, 2, 3])
            return
        collector = await self.add_request(request_id, prompt, sampling_params, lora_request, priority)
        for _ in itertools.count():
            output = collector.get_nowait()
            if output is None:
                await asyncio.sleep(0.001)
                continue
            if isinstance(output, Exception):
                raise output
            yield output
            if output.outputs[0].finish_reason is not None:
                return

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str, lora_request: Any = None) -> Any:
        if not self._pools:
            raise ValidationError("This model does not support pooling.")
        ids = prompt["prompt_token_ids"]
        vectors = np.array([[token, place] for place, token in enumerate(ids)], dtype="<f4")
        if pooling_params.use_activation is False:
            vectors = -vectors
        yield types.SimpleNamespace(outputs=types.SimpleNamespace(data=_Vectors(vectors)), prompt_token_ids=ids)

    async def abort(self, request_id: Any) -> None:
        for name in request_id:
            job = self._jobs.get(name)
            if job is not None:
                job.task.cancel()

    def shutdown(self) -> None:
        """End what runs."""


class _Vectors:
    """Numbers, as a tensor of PyTorch on a GPU has them."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def float(self) -> _Vectors:
        return self

    def cpu(self) -> _Vectors:
        return self

    def numpy(self) -> Any:
        return self._values


class Hearing:
    """A model's class with vLLM's ``SupportsTranscription``: it hears tones, and shows what it was asked for."""

    supports_transcription = True

    @classmethod
    def get_speech_to_text_config(cls, model_config: Any, task_type: str) -> Any:
        return types.SimpleNamespace(sample_rate=16_000, max_audio_clip_s=30)

    @classmethod
    def validate_language(cls, language: str | None) -> str | None:
        if language == "la":
            raise ValueError("Unsupported language: 'la'.  Must be one of ['en', 'de'].")
        return language

    @classmethod
    def get_generation_prompt(cls, stt_params: Any) -> dict[str, Any]:
        words = " ".join(word for _, _, word in hear(stt_params.audio))
        asked = (stt_params.task_type, stt_params.language, stt_params.to_language, stt_params.request_prompt)
        return {"heard": f"language {asked}<text>{words}"}

    @classmethod
    def post_process_output(cls, text: str) -> str:
        asked, _, words = text.partition("<text>")
        if "ask" in asked:
            return asked
        return words


@dataclass
class SpeechToTextParams:
    audio: Any
    stt_config: Any
    model_config: Any
    language: str | None = None
    task_type: str = "transcribe"
    request_prompt: str = ""
    to_language: str | None = None


def _install() -> None:
    """Put the stand-in in vLLM's place."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0", "SamplingParams": SamplingParams, "PoolingParams": PoolingParams},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.config": {},
        "vllm.config.speech_to_text": {"SpeechToTextParams": SpeechToTextParams},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"get_model_cls": lambda config: Hearing},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.sampling_params": {
            "RequestOutputKind": RequestOutputKind,
            "StructuredOutputsParams": StructuredOutputsParams,
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.output_processor": {"RequestOutputCollector": RequestOutputCollector},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module


_install()

from . import shipped_companion as shipped  # noqa: E402 - it imports the stand-in


class _Carrier(shipped.Carrier):
    """A carrier that does not join tokens: the tests say in which steps they come."""

    def _add(self, event: Any) -> None:
        self._waiting[len(self._waiting), event[0]] = event


shipped.Carrier = _Carrier


def _image(file: bytes) -> bytes:
    """Return an image as it is: Triton's Python has no library for them here."""
    if not file.startswith((b"\x89PNG", b"\xff\xd8\xff")) or len(file) < 20:
        raise shipped.Refused(shipped.NO_IMAGE, "messages")
    return file


shipped.READERS = {"image": _image, "audio": bytes}
# Four vectors of the stand-in: so its answers have parts.
shipped.PART = 32


class TritonPythonModel(shipped.TritonPythonModel):
    """The shipped model, whose requests are recorded."""

    def initialize(self, args: dict[str, Any]) -> None:
        _Site.settings = settings.load(args)
        if "transcribe_text" in _Site.settings.parameter("triton_openai_runner", ""):
            shipped.READERS = {"audio": shipped.read_audio}
        _Site.recorder = Recorder(_Site.settings.record, _Site.settings.name)
        super().initialize(args)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            # Not what keeps a carrier going, and cancels.
            text = as_text(pb.get_input_tensor_by_name(request, "request").as_numpy()[0])
            if json.loads(text).get("kind") not in ("carrier", "credit", "cancel"):
                _Site.recorder.request(request, but=("carrier",))
        super().execute(requests)
