"""
What TensorRT-LLM's two text-level models, the ensemble and the BLS, have in common.

Source of the facts: ``all_models/inflight_batcher_llm`` of tensorrtllm_backend 0.5 to 0.19 and of TensorRT-LLM since
0.20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from triton_openai.adapters._common.base import (
    Adapter,
    BoundParameter,
    Capabilities,
    Hints,
    ModelFiles,
    Parameter,
    Rule,
    bind,
    refused,
    values_of,
)
from triton_openai.adapters._common.decoding import PromptEcho, TextDecoder
from triton_openai.adapters._common.trtllm import (
    ENCODERS_NAME,
    RANDOMNESS,
    CachedTokens,
    cache_report,
    guide_tensors,
    guides,
    image_tensors,
    lora_format,
    lora_tensors,
    max_images,
    prompt_limit,
    randomness,
    samples,
    takes_images,
    truthy,
)
from triton_openai.adapters._common.trtllm_outputs import CUMULATIVE, LOGPROBS, TOKEN_BY_TOKEN, StepLogprobs
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferRequest, ModelConfig, Tensor

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(name="max_tokens", inputs=("max_tokens",)),
    Parameter(name="temperature", inputs=("temperature",), note="0 is sent as top_k 1"),
    Parameter(name="top_p", inputs=("top_p",), note="0 is sent as top_k 1"),
    Parameter(name="top_k", inputs=("top_k",), note="-1 (off) is sent as 0"),
    # The names before and after TensorRT-LLM 0.20.
    Parameter(name="min_tokens", inputs=("min_tokens", "min_length")),
    Parameter(name="seed", inputs=("seed", "random_seed")),
    Parameter(name="frequency_penalty", inputs=("frequency_penalty",)),
    Parameter(name="presence_penalty", inputs=("presence_penalty",)),
    Parameter(name="repetition_penalty", inputs=("repetition_penalty",)),
    Parameter(name="length_penalty", inputs=("length_penalty",), note="beam search only"),
    Parameter(name="bad_words", inputs=("bad_words",)),
    Parameter(name="ignore_eos", inputs=("end_id",), note="sent as -1", signed=True),
    Parameter(name="include_stop_str_in_output", otherwise=Rule.PROXY),
    Parameter(name="min_p"),
    Parameter(name="stop_token_ids"),
    Parameter(name="skip_special_tokens"),
    Parameter(
        name="logprobs", inputs=("return_log_probs",), note="of the chosen tokens, where it streams", why=TOKEN_BY_TOKEN
    ),
    Parameter(
        name="logit_bias",
        inputs=("embedding_bias_words",),
        note="as texts, with embedding_bias_weights",
        why=TOKEN_BY_TOKEN,
    ),
    # The backend matches token ids and leaves the match in the text, so its stop words only end the work earlier.
    Parameter(name="stop", inputs=("stop_words",), otherwise=Rule.PROXY, note="matched and removed here"),
)

# Sent by rules of their own, see encode().
_OWN_RULES = (*RANDOMNESS, "ignore_eos", "logprobs", "logit_bias")
# What has its effect without the input: 0 is sent as top_k, and 1 is the default.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"temperature": (0, 1)}
_FLAGS = ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
# Parameters by which a BLS names further models that it calls.
_OTHERS = (ENCODERS_NAME, "tensorrt_llm_draft_model_name")
_WORDS = ("stop_words", "bad_words")
_SUPPLIED = frozenset({"text_input", "stream", *_FLAGS, *_WORDS, *(name for p in PARAMETERS for name in p.inputs)})
_OUTPUTS = ("text_output", "num_input_tokens", "num_output_tokens")


def is_text_model(config: ModelConfig) -> bool:
    """Return whether *config* has the tensors of TensorRT-LLM's text models, and requires none that we cannot give."""
    inputs = config.inputs
    if not {"text_input", "max_tokens"} <= inputs.keys() or "text_output" not in config.outputs:
        return False
    return all(spec.optional or name in _SUPPLIED for name, spec in inputs.items())


class TrtllmText(Adapter):
    """Base of the ensemble and BLS adapters."""

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self._repository = repository
        logprobs = "return_log_probs" in config.inputs
        # An answer that comes at once does not say which text is which token's.
        steps = logprobs and LOGPROBS in config.outputs and config.decoupled
        biases = {"embedding_bias_words", "embedding_bias_weights"} <= config.inputs.keys()
        missing = {name: TOKEN_BY_TOKEN for name, there in (("logprobs", steps), ("logit_bias", biases)) if not there}
        missing |= self.unread
        self._parameters = tuple(
            refused(row.name, missing[row.name], neutral=_NEUTRAL.get(row.name, ())) if row.name in missing else row
            for row in bind(PARAMETERS, config)
        )
        self._counts = all(
            name in config.inputs and name.removeprefix("return_") in config.outputs for name in _FLAGS[1:]
        )
        self._cache = cache_report(config)
        self._constant = tuple(self.tensor(name, True) for name in _FLAGS if name in config.inputs)
        self._echoes = "exclude_input_in_output" not in config.inputs and self._engine_echoes()
        lora = lora_format(config)
        self._capabilities = Capabilities(
            generate=True,
            streaming=config.decoupled,
            echoes=self._echoes,
            splits_characters=config.decoupled and self.splits_characters,
            usage=self._counts,
            guides=guides(config, self.engine),
            lora=lora is not None,
            lora_format=lora,
            images=takes_images(config),
            max_images=max_images(config),
            logprobs=steps,
            cumulative_logprob=logprobs and CUMULATIVE in config.outputs,
            bias_words=biases,
            samples=samples(self.engine),
            fixed_seed=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._capabilities

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """The bound table."""
        return self._parameters

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return what the engine tells of the longest prompt, too."""
        return msgspec.structs.replace(self.hints, max_prompt_len=prompt_limit(self.engine))

    @property
    def engine(self) -> ModelConfig | None:
        """The config of the ``tensorrt_llm`` model behind this one, if it is known."""
        raise NotImplementedError

    @property
    def token_level(self) -> ModelConfig | None:
        """The engine, unless more takes part: encoders of images, a draft model, a second prompt for a decoder."""
        engine = self.engine
        alone = (
            engine is not None
            and engine.parameter("encoder_model_path") is None
            and not any(self.config.parameter(name) for name in _OTHERS)
            and not any("OUT_PROMPT_EMBEDDING_TABLE" in step.output_map for step in self.config.steps)
        )
        return engine if alone else None

    @property
    def splits_characters(self) -> bool:
        """Whether each response of a stream is decoded alone."""
        return True

    @property
    def unread(self) -> Mapping[str, str]:
        """The parameters whose inputs are there and do not reach the engine, and why."""
        return {}

    def _engine_echoes(self) -> bool:
        engine = self.engine
        return engine is None or not truthy(engine.parameter("exclude_input_in_output"))

    def at_once(self, generation: Generation) -> bool:
        """
        Return whether the answer is asked for whole: its text is then decoded whole, with every character.

        So it is unless the client wants a stream, or log probabilities, which have their tokens' texts in streams only.
        A prompt that would come back with the answer has to be one that can be taken out again; 0.5, whose engine tells
        no lengths, fills its answers up with special tokens.
        """
        if not self.config.decoupled:
            return True
        if generation.stream or generation.sampling.logprobs is not None or "stream" not in self.config.inputs:
            return False
        engine = self.engine
        if engine is not None and "sequence_length" not in engine.outputs:
            return False
        return not self._echoes or (generation.prompt_echo is not None and not self.cumulative())

    def encode(self, generation: Generation) -> InferRequest:
        """Return the request: the prompt, the flags that are always set, and what the client asked for."""
        config = self.config
        inputs: list[Tensor] = [self.tensor("text_input", generation.prompt), *self._constant]
        if "stream" in config.inputs:
            # Always explicit: the Python flavour of the engine fails where it is absent.
            inputs.append(self.tensor("stream", not self.at_once(generation)))
        sampling = generation.sampling
        for parameter in self._parameters:
            values = values_of(parameter, sampling) if parameter.name not in _OWN_RULES else ()
            if values and parameter.target is not None:
                inputs.append(self.tensor(parameter.target, *values))
        random = randomness(self, self._parameters, sampling)
        outputs: tuple[str, ...] = _OUTPUTS
        if sampling.logprobs is not None or generation.scored:
            inputs.append(self.tensor("return_log_probs", True))
            outputs += (LOGPROBS,) if sampling.logprobs is not None else ()
            outputs += (CUMULATIVE,) if generation.scored else ()
            # Without any of the three it decodes greedily and reports no probabilities; this asks for the same.
            if not random and "top_k" in config.inputs:
                random = [self.tensor("top_k", 1)]
        inputs += random
        if generation.bias_words:
            inputs.append(self.tensor("embedding_bias_words", *[word for word, _ in generation.bias_words]))
            inputs.append(self.tensor("embedding_bias_weights", *[weight for _, weight in generation.bias_words]))
        if sampling.ignore_eos:
            # An id that is never generated.
            inputs.append(self.tensor("end_id", -1))
        inputs += guide_tensors(self, generation.guide)
        inputs += lora_tensors(self, generation.lora)
        if self._cache is not None and generation.kv_cache_block_size is not None:
            inputs.append(self.tensor(self._cache.flag, True))
            outputs += (self._cache.output,)
        inputs += image_tensors(self, self.engine, generation.images)
        given = {tensor.name for tensor in inputs}
        # 0.5 requires the word lists; an empty word has no effect.
        inputs += [
            self.tensor(name, "")
            for name in _WORDS
            if name not in given and name in config.inputs and not config.inputs[name].optional
        ]
        # An ensemble's engine is not told of a cancellation, and a BLS model never looks for one.
        return self.request(generation.id, inputs, outputs, cancellable=False)

    def cumulative(self) -> bool:
        """Return whether every response repeats the text from its start."""
        return False

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return a decoder for one request."""
        echo, at_once = None, self.at_once(generation)
        if self._echoes and at_once:
            echo = PromptEcho(*(form for form in (generation.prompt, generation.prompt_echo) if form is not None))
        # Log probabilities name each token by its text, so nothing of that is held back.
        held = self._capabilities.splits_characters and not at_once and generation.sampling.logprobs is None
        return TextDecoder(
            cumulative=self.cumulative() and not at_once,
            splits_characters=held,
            prompt_count="num_input_tokens" if self._counts else None,
            token_count="num_output_tokens" if self._counts else None,
            echo=echo,
            cached_tokens=CachedTokens.of(self._cache, generation),
            logprobs=StepLogprobs() if generation.sampling.logprobs is not None else None,
            cumulative_logprob=CUMULATIVE if generation.scored else None,
        )
