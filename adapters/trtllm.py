"""
TensorRT-LLM's ``tensorrt_llm`` itself (C++ or Python flavour) and the disaggregated model of the same tensors: token
ids in, token ids out.

Source of the facts: ``all_models/inflight_batcher_llm/tensorrt_llm`` and ``all_models/disaggregated_serving`` of
tensorrtllm_backend 0.5 to 0.19 and of TensorRT-LLM since 0.20.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import msgspec

from triton_openai.adapters._common import trtllm_family as common
from triton_openai.adapters._common.base import ModelMetadata, Parameter, Rule, bind, requires_only
from triton_openai.adapters._common.decoding import Reader
from triton_openai.adapters._common.registry import users_of
from triton_openai.errors import ConfigurationError, InvalidValue, UnsupportedParameter
from triton_openai.generation import Delta, Generation, Logits, Sampling, TokenLogprob, Vocabulary
from triton_openai.triton.tensors import (
    INTEGER_RANGES,
    MAX_OPEN_ANSWER,
    InferRequest,
    InferResponse,
    ModelConfig,
    Tensor,
)

PARAMETERS: tuple[Parameter, ...] = (
    *common.SHARED_PARAMETERS,
    Parameter("bad_words", ("bad_words_list",), note="as token ids", special=True),
    Parameter("logit_bias", ("embedding_bias",), note="one value per token of the vocabulary", special=True),
    Parameter("logprobs", ("return_log_probs",), note="alternatives by return_generation_logits", special=True),
    Parameter("stop", otherwise=Rule.SERVICE),
    Parameter("stop_token_ids", otherwise=Rule.SERVICE),
    Parameter("skip_special_tokens", otherwise=Rule.SERVICE),
)

_SUPPLIED = frozenset({*common.ENGINE_INPUTS, "end_id", "pad_id", "streaming"})
# The C++ flavour refuses a choice of outputs without the first two.
_OUTPUTS = ("output_ids", "sequence_length")
GENERATION = "generation_logits"
_CONTEXT = "context_logits"
# As many alternatives as OpenAI allows: any number could be made from logits.
_MAX_ALTERNATIVES = 20
# Protocol buffers end at 2 GiB, and this process has to hold it.
_MAX_BYTES = 2**30
# Beside the logits, an answer has what it has without them.
_MAX_LOGITS_ANSWER = _MAX_BYTES + MAX_OPEN_ANSWER
_SIZES = {"FP32": 4, "FP16": 2, "BF16": 2}


class Trtllm(common.TrtllmAdapter):
    """Token ids in and out. The engine detects a cancellation itself, so closing the stream stops it."""

    name = "trtllm"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        name = config.parameter("generation_model_name")
        # A disaggregated model hands requests on.
        if name is None:
            self.engine = config
        else:
            self.engine = repository.get(name)
        # Special tokens are added as the preprocessing for this engine does it. The engine itself names a tokenizer for
        # its guides (0.19 and later).
        steps = [step.model for user in users_of(config, repository) for step in user.steps]
        tokenizing = (repository.get(name) for name in (*steps, "preprocessing"))
        metadata = common.tokenizing_metadata(tokenizing) or ModelMetadata(adds_bos=True)
        own = config.parameter("tokenizer_dir")
        self.metadata = msgspec.structs.replace(metadata, tokenizer_dir=metadata.tokenizer_dir or own)
        logprobs = "return_log_probs" in config.inputs and common.LOGPROBS in config.outputs
        self.parameters = bind(PARAMETERS, config, *([] if logprobs else [Parameter("logprobs")]))
        self._alternatives = logprobs and _sends(config, GENERATION)
        self.capabilities = self.capabilities_with(
            usage=True,
            tokens=True,
            top_logprobs=_MAX_ALTERNATIVES if self._alternatives else 0,
            cumulative_logprob=logprobs and common.CUMULATIVE in config.outputs,
            prompt_logprobs=_sends(config, _CONTEXT),
            token_ids=True,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the engine's tensors that require nothing else, and no second prompt for a decoder."""
        claimed = config.inputs.keys() >= common.ENGINE_INPUTS and "output_ids" in config.outputs
        if not claimed or not requires_only(config, _SUPPLIED) or config.parameter("encoder_model_path") is not None:
            return None
        if config.parameter("generation_model_name") is not None:
            kind = "disaggregated, "
        else:
            kind = ""
        return f"{kind}inputs input_ids, input_lengths and request_output_len and output output_ids"

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """
        Return the request. Stop words are never sent: as token ids they would miss where the same text has others, so
        they are looked for in the text, and closing the stream ends the work.

        Raises :class:`UnsupportedParameter` for alternatives to the chosen tokens.
        """
        ids = generation.prompt_ids
        vocabulary = generation.vocabulary
        sampling = generation.sampling
        if ids is None or vocabulary is None:
            raise ConfigurationError(
                f"The model '{self.config.name}' takes token ids: give its tokenizer with --tokenizer."
            )
        if sampling.logprobs and not self._alternatives:
            raise UnsupportedParameter(
                "This model returns the log probabilities of the chosen tokens only, not those of alternatives.",
                param="logprobs",
            )
        inputs = [self.vector("input_ids", ids), self.tensor("input_lengths", len(ids))]
        inputs += self._switches(generation, vocabulary)
        outputs: tuple[str, ...] = _OUTPUTS
        needed_for = None
        if generation.bad_word_ids:
            # Two dimensions are more than the generate extension can say.
            inputs.append(word_list(self.config, "bad_words_list", generation.bad_word_ids))
            needed_for = "bad_words"
        if sampling.logit_bias:
            inputs.append(self.tensor("embedding_bias", *dense_bias(sampling.logit_bias, vocabulary.size)))
        if sampling.logprobs:
            if not self.config.decoupled:
                check_size(self.config, GENERATION, sampling.max_tokens, vocabulary, param="max_tokens")
            inputs.append(self.tensor(f"return_{GENERATION}", True))
            outputs += (GENERATION,)
            # Written out as JSON they would be megabytes for each token.
            needed_for = "logprobs"
        if sampling.logprobs == 0 or generation.cumulative_logprob:
            inputs.append(self.tensor("return_log_probs", True))
            outputs += (common.LOGPROBS, common.CUMULATIVE)
        request = self.generation_request(generation, inputs, outputs)
        if needed_for is not None:
            request = msgspec.structs.replace(request, json_expressible=False, needed_for=needed_for)
        if sampling.logprobs:
            request = msgspec.structs.replace(request, max_answer=_MAX_LOGITS_ANSWER)
        return [request]

    def _switches(self, generation: Generation, vocabulary: Vocabulary) -> list[Tensor]:
        """Return the inputs that are there in every request: where to end, and in what form to answer."""
        if vocabulary.end_ids:
            end_id = vocabulary.end_ids[0]
        else:
            end_id = -1
        values = {
            "end_id": -1 if generation.sampling.ignore_eos else end_id,
            "pad_id": end_id if vocabulary.pad_id is None else vocabulary.pad_id,
        }
        for name, value in values.items():
            spec = self.config.inputs.get(name)
            if value == -1 and spec is not None and spec.datatype.startswith("UINT"):
                # An id that is never generated; 0.5 has unsigned ones.
                values[name] = INTEGER_RANGES[spec.datatype][1]
        # Always explicit: the Python flavour fails where it is absent.
        return self.declared_tensors(**values, streaming=self.config.decoupled, exclude_input_in_output=True)

    def encode_prompt_logits(self, generation: Generation) -> InferRequest:
        """
        Return a request of its own that generates one token and answers at once.

        Not asked in passing: a stream repeats the prompt's logits at every step, and several answers each bring them.
        """
        if generation.vocabulary is not None:
            check_size(self.config, _CONTEXT, len(generation.prompt_ids or ()), generation.vocabulary, param=None)
        plain = Sampling(max_tokens=1, temperature=0)
        (request,) = self.encode(
            msgspec.structs.replace(generation, sampling=plain, guide=None, cumulative_logprob=False, bad_word_ids=())
        )
        inputs = [tensor for tensor in request.inputs if tensor.name != "streaming"]
        inputs += self.declared_tensors(**{"streaming": False, f"return_{_CONTEXT}": True})
        outputs = (*request.outputs, _CONTEXT)
        return msgspec.structs.replace(
            request,
            id=f"{generation.id}-prompt",
            inputs=tuple(inputs),
            outputs=outputs,
            json_expressible=False,
            max_answer=_MAX_LOGITS_ANSWER,
        )

    def decode_prompt_logits(self, response: InferResponse) -> Logits | None:
        """Return the logits of the prompt; the last response of a stream may have none."""
        if response.tensor(_CONTEXT) is None and not response.numbers("output_ids"):
            return None
        return read_logits(response, _CONTEXT, count=1, total=1)

    def decoder(self, generation: Generation) -> TokenDecoder:
        return TokenDecoder(self.config, generation, self.readers(generation))

    def cancel(self, generation: Generation) -> InferRequest | None:
        """Return the engine's stop request for answers that come at once: Triton does not see such a client leave."""
        if self.config.decoupled:
            return None
        return common.stop_request(self.config, generation.id)


class TokenDecoder:
    """Reads the ids of each response: those that are new when it streams, all of them when it does not."""

    def __init__(self, config: ModelConfig, generation: Generation, readers: Sequence[Reader]) -> None:
        vocabulary = generation.vocabulary
        logprobs = generation.sampling.logprobs
        self._prompt_ids = generation.prompt_ids or ()
        # Streams never repeat the prompt.
        self._repeats = "exclude_input_in_output" not in config.inputs and not config.decoupled
        self._padding: Collection[int | None] = ()
        if "sequence_length" not in config.outputs and vocabulary is not None:
            # Without lengths (0.5) the ids are filled up after the end.
            self._padding = {*vocabulary.end_ids[:1], vocabulary.pad_id, -1}
        # From which log probabilities are made: those of the chosen tokens, or the logits of all
        if logprobs is None:
            self._logprobs = None
        elif logprobs:
            self._logprobs = GENERATION
        else:
            self._logprobs = common.LOGPROBS
        self._readers = readers
        # The tokens so far, None before the first response.
        self._count: int | None = None

    def feed(self, response: InferResponse) -> Delta:
        """Return the delta of one response; the last one often has no ids."""
        # An engine may fill up with -1.
        ids = response.integers("output_ids", least=-1)
        if lengths := response.integers("sequence_length"):
            # One beam, so what follows the length is padding.
            ids = ids[: lengths[0]]
        if self._repeats and tuple(ids[: len(self._prompt_ids)]) == self._prompt_ids:
            ids = ids[len(self._prompt_ids) :]
        if self._padding:
            ids = ids[: next((index for index, number in enumerate(ids) if number in self._padding), len(ids))]
        if len(ids) and min(ids) < 0:
            raise response.invalid("the output 'output_ids' has a negative token id")
        delta = Delta(token_ids=ids, tokens=len(ids))
        if self._count is None:
            self._count = 0
            delta.prompt_tokens = len(self._prompt_ids)
        self._count += len(ids)
        if self._logprobs == GENERATION and len(ids):
            delta.logits = read_logits(response, GENERATION, count=len(ids), total=self._count)
        elif self._logprobs == common.LOGPROBS and len(ids):
            values = common.newest_logprobs(response, count=len(ids), total=self._count)
            # Names are added where the tokenizer is.
            delta.logprobs = [TokenLogprob("", value, id=number) for number, value in zip(ids, values, strict=True)]
        for read in self._readers:
            read(response, delta)
        return delta

    def flush(self) -> str:
        """Return nothing: ids are never held back."""
        return ""


def _sends(config: ModelConfig, logits: str) -> bool:
    return f"return_{logits}" in config.inputs and logits in config.outputs


def check_size(config: ModelConfig, name: str, tokens: int, vocabulary: Vocabulary, *, param: str | None) -> None:
    """Raise :class:`InvalidValue` for more *tokens* than one response should hold the logits *name* of."""
    max_tokens = _MAX_BYTES // (vocabulary.size * _SIZES.get(config.outputs[name].datatype, 4))
    if tokens > max_tokens:
        raise InvalidValue(
            f"The model sends {vocabulary.size} numbers for each token, and for {max_tokens} tokens at once at most;"
            f" this request has {tokens}.",
            param,
        )


def read_logits(response: InferResponse, name: str, *, count: int, total: int) -> Logits:
    """
    Return the logits of the *count* new tokens, of *total* so far.

    Raises :class:`UnsupportedParameter` where there are none, :class:`InvalidAnswer` where they do not fit.
    """
    tensor = response.tensor(name)
    what = name.replace("_", " ")
    if tensor is None or not tensor.data:
        raise UnsupportedParameter(
            f"The model's engine sends no {what}, which this needs: it has to be built with gather_{name}.",
            param="logprobs",
        )
    if tensor.shape:
        width = tensor.shape[-1]
    else:
        width = 0
    rows = math.prod(tensor.shape[:-1])
    if width < 2 or len(tensor.data) != rows * width * _SIZES.get(tensor.datatype, 0):
        raise response.invalid(f"its {what} have another type or shape")
    if rows != count and rows < total:
        raise response.invalid("its logits do not match its tokens")
    if rows == count:
        first = 0
    else:
        first = total - count
    return Logits(data=tensor.data, datatype=tensor.datatype, width=width, first=first)


def word_list(config: ModelConfig, name: str, words: Sequence[Sequence[int]]) -> Tensor:
    """
    Return the input *name* that holds *words*: one row with their ids, one with the offsets of their ends.

    Both rows are as long as the longer one, the first filled up with 0 and the second with -1.
    """
    ids = [number for word in words for number in word]
    ends = list(accumulate(len(word) for word in words))
    width = max(len(ids), len(ends))
    values = [*ids, *[0] * (width - len(ids)), *ends, *[-1] * (width - len(ends))]
    shape = (1, 2, width) if config.batching else (2, width)
    return Tensor(name, config.inputs[name].datatype, shape, values)


def dense_bias(bias: Sequence[tuple[int, float]], size: int) -> list[float]:
    """Return the bias of every id. Raises :class:`InvalidValue` for ids that the vocabulary of *size* lacks."""
    dense = [0.0] * size
    for number, value in bias:
        if not 0 <= number < size:
            raise InvalidValue(f"'logit_bias' names the token {number}, and the model has {size} tokens.", "logit_bias")
        dense[number] = value
    return dense
