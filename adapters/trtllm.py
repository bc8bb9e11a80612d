"""
TensorRT-LLM's ``tensorrt_llm`` itself (C++ or Python flavour) and the disaggregated model of the same tensors: token
ids in, token ids out.

Source of the facts: ``all_models/inflight_batcher_llm/tensorrt_llm`` and ``all_models/disaggregated_serving`` of
tensorrtllm_backend 0.5 to 0.19 and of TensorRT-LLM since 0.20.
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
from triton_openai.adapters._common.registry import users_of
from triton_openai.adapters._common.trtllm import (
    RANDOMNESS,
    CachedTokens,
    adds_special_tokens,
    cache_report,
    guide_tensors,
    guides,
    lora_format,
    lora_tensors,
    prompt_limit,
    randomness,
    samples,
    stop_request,
)
from triton_openai.adapters._common.trtllm_outputs import (
    CONTEXT,
    CUMULATIVE,
    GENERATION,
    LOGPROBS,
    MOST_ALTERNATIVES,
    TokenDecoder,
    available,
    check_size,
    dense_bias,
    read,
    word_list,
)
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.generation import Generation, Logits, Sampling, Vocabulary
from triton_openai.triton.tensors import INTEGER_RANGES, InferRequest, InferResponse, ModelConfig, Tensor

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(name="max_tokens", inputs=("request_output_len",)),
    Parameter(name="temperature", inputs=("temperature",), note="0 is sent as top_k 1"),
    Parameter(name="top_p", inputs=("runtime_top_p",), note="0 is sent as top_k 1"),
    Parameter(name="top_k", inputs=("runtime_top_k",), note="-1 (off) is sent as 0"),
    # The names before and after TensorRT-LLM 0.20.
    Parameter(name="min_tokens", inputs=("min_tokens", "min_length")),
    Parameter(name="seed", inputs=("seed", "random_seed")),
    Parameter(name="frequency_penalty", inputs=("frequency_penalty",)),
    Parameter(name="presence_penalty", inputs=("presence_penalty",)),
    Parameter(name="repetition_penalty", inputs=("repetition_penalty",)),
    Parameter(name="length_penalty", inputs=("len_penalty",), note="beam search only"),
    Parameter(name="bad_words", inputs=("bad_words_list",), note="as token ids"),
    Parameter(name="logit_bias", inputs=("embedding_bias",), note="one value per token of the vocabulary"),
    Parameter(name="ignore_eos", inputs=("end_id",), note="sent as -1", signed=True),
    Parameter(name="logprobs", inputs=("return_log_probs",), note="alternatives by return_generation_logits"),
    Parameter(name="stop", otherwise=Rule.PROXY),
    Parameter(name="stop_token_ids", otherwise=Rule.PROXY),
    Parameter(name="include_stop_str_in_output", otherwise=Rule.PROXY),
    Parameter(name="skip_special_tokens", otherwise=Rule.PROXY),
    Parameter(name="min_p"),
)

# Sent by rules of their own, see encode().
_OWN_RULES = (*RANDOMNESS, "ignore_eos", "bad_words", "logit_bias", "logprobs")
_REQUIRED = frozenset({"input_ids", "input_lengths", "request_output_len"})
_SUPPLIED = frozenset({*_REQUIRED, "end_id", "pad_id", "streaming"})
# The C++ flavour refuses a choice of outputs without the first two.
_OUTPUTS = ("output_ids", "sequence_length")


class Trtllm(Adapter):
    """Token ids; the engine sees a cancellation itself, so closing the stream stops it."""

    name = "trtllm"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self._repository = repository
        self._parameters = tuple(
            refused("logprobs") if parameter.name == "logprobs" and LOGPROBS not in config.outputs else parameter
            for parameter in bind(PARAMETERS, config)
        )
        self._cache = cache_report(config)
        logprobs = any(each.name == "logprobs" and each.rule is Rule.MAPPED for each in self._parameters)
        self._alternatives = logprobs and available(config, GENERATION)
        lora = lora_format(config)
        self._capabilities = Capabilities(
            generate=True,
            streaming=config.decoupled,
            usage=True,
            tokens=True,
            guides=guides(config, self._executor()),
            logprobs=logprobs,
            top_logprobs=MOST_ALTERNATIVES if self._alternatives else 0,
            cumulative_logprob=logprobs and CUMULATIVE in config.outputs,
            prompt_logprobs=available(config, CONTEXT),
            token_ids=True,
            lora=lora is not None,
            lora_format=lora,
            samples=samples(self._executor()),
            fixed_seed=True,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the engine's tensors that require nothing else, and no second prompt for a decoder."""
        inputs = config.inputs
        if config.parameter("encoder_model_path") is not None:
            return None
        if not inputs.keys() >= _REQUIRED or "output_ids" not in config.outputs:
            return None
        if not all(spec.optional or name in _SUPPLIED for name, spec in inputs.items()):
            return None
        kind = "disaggregated, " if config.parameter("generation_model_name") is not None else ""
        return f"{kind}inputs input_ids, input_lengths and request_output_len and output output_ids"

    def _executor(self) -> ModelConfig | None:
        """Return the config of the model that runs the engine: a disaggregated one hands requests on."""
        name = self.config.parameter("generation_model_name")
        return self.config if name is None else self._repository.get(name)

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._capabilities

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """The bound table."""
        return self._parameters

    @property
    def hints(self) -> Hints:
        """
        The tokenizer of the preprocessing that the same repository has for this engine, else the engine's own.

        The engine names one for its guides (0.19 and later). Special tokens are added as preprocessing does it.
        """
        steps = [
            self._repository.get(step.model) for user in users_of(self.config, self._repository) for step in user.steps
        ]
        steps.append(self._repository.get("preprocessing"))
        for step in steps:
            if step is not None and "QUERY" in step.inputs:
                return Hints(
                    tokenizer_dir=step.parameter("tokenizer_dir") or self.config.parameter("tokenizer_dir"),
                    adds_bos=adds_special_tokens(step),
                )
        return Hints(tokenizer_dir=self.config.parameter("tokenizer_dir"), adds_bos=True)

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return what the engine tells of the longest prompt, too."""
        return msgspec.structs.replace(self.hints, max_prompt_len=prompt_limit(self._executor()))

    def encode(self, generation: Generation) -> InferRequest:
        """
        Return the request. Stop words are never sent: as token ids they would miss where the same text has others, so
        they are looked for in the text, and closing the stream ends the work.

        Raises :class:`UnsupportedParameter` for alternatives to the chosen tokens.
        """
        ids, vocabulary = generation.prompt_ids, generation.vocabulary
        if ids is None or vocabulary is None:
            raise ConfigurationError(
                f"The model '{self.config.name}' takes token ids: give its tokenizer with --tokenizer."
            )
        sampling = generation.sampling
        if sampling.logprobs and not self._alternatives:
            raise UnsupportedParameter(
                "This model tells the log probabilities of the chosen tokens only, not those of alternatives.",
                param="logprobs",
            )
        if sampling.logprobs and not self.config.decoupled:
            limit = sampling.max_tokens
            check_size(self.config, GENERATION, tokens=limit, vocabulary=vocabulary.size, param="max_tokens")
        inputs = [self.tensor("input_ids", *ids), self.tensor("input_lengths", len(ids))]
        inputs += self._switches(generation, vocabulary)
        for parameter in self._parameters:
            values = values_of(parameter, sampling) if parameter.name not in _OWN_RULES else ()
            if values and parameter.target is not None:
                inputs.append(self.tensor(parameter.target, *values))
        random = randomness(self, self._parameters, sampling)
        reports = sampling.logprobs is not None or generation.scored
        if not random and reports and "runtime_top_k" in self.config.inputs:
            # Without any of the three it decodes greedily and reports no probabilities; this asks for the same.
            random = [self.tensor("runtime_top_k", 1)]
        inputs += random
        inputs += guide_tensors(self, generation.guide)
        inputs += lora_tensors(self, generation.lora)
        if sampling.logit_bias:
            inputs.append(self.tensor("embedding_bias", *dense_bias(sampling.logit_bias, vocabulary.size)))
        outputs: tuple[str, ...] = _OUTPUTS
        if sampling.logprobs:
            inputs.append(self.tensor(f"return_{GENERATION}", True))
            outputs += (GENERATION,)
        if sampling.logprobs == 0 or generation.scored:
            inputs.append(self.tensor("return_log_probs", True))
            outputs += (LOGPROBS, CUMULATIVE)
        if self._cache is not None and generation.kv_cache_block_size is not None:
            inputs.append(self.tensor(self._cache.flag, True))
            outputs += (self._cache.output,)
        if generation.bad_word_ids:
            inputs.append(word_list(self.config, "bad_words_list", generation.bad_word_ids))
        request = self.request(generation.id, inputs, outputs)
        if sampling.logprobs:
            # Written out as JSON they would be megabytes for each token.
            return msgspec.structs.replace(request, json_expressible=False, needed_for="logprobs")
        # Two dimensions are more than the generate extension can say.
        if not generation.bad_word_ids:
            return request
        return msgspec.structs.replace(request, json_expressible=False, needed_for="bad_words")

    def encode_prompt_logits(self, generation: Generation) -> InferRequest:
        """
        Return a request of its own that generates one token and answers at once.

        Not asked for in passing: a stream repeats the prompt's logits at every step, and several answers to one prompt
        would each bring them.
        """
        vocabulary, config = generation.vocabulary, self.config
        if vocabulary is not None:
            tokens = len(generation.prompt_ids or ())
            check_size(config, CONTEXT, tokens=tokens, vocabulary=vocabulary.size, param=None)
        plain = Sampling(max_tokens=1, temperature=0)
        request = self.encode(
            msgspec.structs.replace(generation, sampling=plain, guide=None, scored=False, bad_word_ids=())
        )
        inputs = [tensor for tensor in request.inputs if tensor.name != "streaming"]
        if "streaming" in config.inputs:
            inputs.append(self.tensor("streaming", False))
        inputs.append(self.tensor(f"return_{CONTEXT}", True))
        outputs = (*request.outputs, CONTEXT)
        return msgspec.structs.replace(
            request, id=f"{generation.id}-prompt", inputs=tuple(inputs), outputs=outputs, json_expressible=False
        )

    def decode_prompt_logits(self, response: InferResponse) -> Logits | None:
        """Return the logits of the prompt; the last response of a stream may have none."""
        if response.tensor(CONTEXT) is None and not response.numbers("output_ids"):
            return None
        return read(response, CONTEXT, count=1, total=1)

    def _switches(self, generation: Generation, vocabulary: Vocabulary) -> list[Tensor]:
        """Return the inputs that are there in every request: where to end, and in what form to answer."""
        config = self.config
        values: dict[str, int | bool] = {}
        end_id = vocabulary.end_ids[0] if vocabulary.end_ids else -1
        values["end_id"] = -1 if generation.sampling.ignore_eos else end_id
        values["pad_id"] = end_id if vocabulary.pad_id is None else vocabulary.pad_id
        # Always explicit: the Python flavour fails where it is absent.
        values["streaming"] = config.decoupled
        values["exclude_input_in_output"] = True
        tensors = []
        for name, value in values.items():
            spec = config.inputs.get(name)
            if spec is not None:
                # An id that is never generated; 0.5 has unsigned ones.
                never = value == -1 and spec.datatype.startswith("UINT")
                tensors.append(self.tensor(name, INTEGER_RANGES[spec.datatype][1] if never else value))
        return tensors

    def decoder(self, generation: Generation) -> TokenDecoder:
        """Return a decoder for one request."""
        config = self.config
        vocabulary = generation.vocabulary
        ends = vocabulary.end_ids if vocabulary is not None else ()
        return TokenDecoder(
            generation.prompt_ids or (),
            # Streams never repeat the prompt.
            repeats="exclude_input_in_output" not in config.inputs and not config.decoupled,
            # Without lengths (0.5) the ids are filled up behind the end.
            padding=frozenset({*ends[:1], vocabulary.pad_id if vocabulary is not None else None, -1})
            if "sequence_length" not in config.outputs
            else frozenset(),
            logprobs=generation.sampling.logprobs is not None,
            alternatives=bool(generation.sampling.logprobs),
            scored=generation.scored,
            cached_tokens=CachedTokens.of(self._cache, generation),
        )

    def cancel(self, generation: Generation) -> InferRequest | None:
        """Return the engine's stop request for answers that come at once: Triton does not see such a client leave."""
        return None if self.config.decoupled else stop_request(self.config, generation.id)
