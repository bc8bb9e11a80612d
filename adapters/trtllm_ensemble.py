"""
TensorRT-LLM's ``ensemble``: preprocessing, tensorrt_llm and postprocessing as one model of text in and text out.

The BLS has the same mapping, see :mod:`triton_openai.adapters.trtllm_bls`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from triton_openai.adapters._common import trtllm_family as common
from triton_openai.adapters._common.base import ModelMetadata, Parameter, Rule, bind, requires_only
from triton_openai.adapters._common.decoding import TextDecoder
from triton_openai.errors import UpstreamError
from triton_openai.generation import Delta, Generation, Image, TokenLogprob
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

# What a client whose request is refused can do.
_TOKEN_BY_TOKEN = "its engine can do it, answered token by token with --prefer-token-level always"
PARAMETERS: tuple[Parameter, ...] = (
    *common.SHARED_PARAMETERS,
    Parameter("bad_words", ("bad_words",)),
    Parameter("logprobs", ("return_log_probs",), note="of the chosen tokens, where it streams", special=True),
    Parameter("logit_bias", ("embedding_bias_words",), note="as texts, with embedding_bias_weights", special=True),
    # The backend matches token ids and leaves the match in the text, so its stop words only end the work earlier.
    Parameter("stop", ("stop_words",), Rule.SERVICE, note="matched and removed here"),
)

# What has its effect without the input: 0 is sent as top_k, and 1 is the default.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"temperature": (0, 1)}
_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
_FLAGS = ("exclude_input_in_output", *_COUNTS)
_WORDS = ("stop_words", "bad_words")
_SUPPLIED = frozenset({"text_input", "stream", *_FLAGS, *_WORDS, *(name for row in PARAMETERS for name in row.inputs)})
_OUTPUTS = ("text_output", "num_input_tokens", "num_output_tokens")
# By which a BLS names its encoders, without which its image inputs lead nowhere; and a draft model.
_ENCODERS = "multimodal_encoders_name"
_DRAFT = "tensorrt_llm_draft_model_name"
# The others take decoded pixels. This one takes addresses too, but those the backend would fetch from anywhere.
_IMAGE = "image_url_input"
_IMAGE_ID = "prompt_table_extra_id"
# The only prefix that is not taken for an address; what the file really is, is found out from the file.
_IMAGE_PREFIX = "data:image/jpeg;base64,"
# An input of each of the three steps that every release has.
_STAGES = ("QUERY", "request_output_len", "TOKENS_BATCH")


class TrtllmText(common.TrtllmAdapter):
    """Base of the ensemble and BLS adapters, which set the engine and these fields before this is initialized."""

    is_ensemble = True
    #: The models that it calls, as far as they are known.
    steps: Sequence[ModelConfig | None] = ()
    #: The parameters whose inputs are there and do not reach the engine, and why.
    unread: Mapping[str, str] = {}
    # Whether each response of a stream is decoded alone.
    splits_characters = True

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self.metadata = common.tokenizing_metadata(self.steps) or ModelMetadata()
        inputs = config.inputs
        outputs = config.outputs
        logprobs = "return_log_probs" in inputs
        # An answer that comes at once does not say which text is which token's.
        steps = logprobs and common.LOGPROBS in outputs and config.decoupled
        biases = {"embedding_bias_words", "embedding_bias_weights"} <= inputs.keys()
        missing = dict(self.unread)
        if not steps:
            missing.setdefault("logprobs", _TOKEN_BY_TOKEN)
        if not biases:
            missing.setdefault("logit_bias", _TOKEN_BY_TOKEN)
        lacking = (Parameter(name, why=why, neutral=_NEUTRAL.get(name, ())) for name, why in missing.items())
        self.parameters = bind(PARAMETERS, config, *lacking)
        self._counts = all(name in inputs and name.removeprefix("return_") in outputs for name in _COUNTS)
        excludes = self.engine is not None and common.truthy(self.engine.parameter("exclude_input_in_output"))
        self.splits_characters = config.decoupled and self.splits_characters
        self.capabilities = self.capabilities_with(
            echoes="exclude_input_in_output" not in inputs and not excludes,
            usage=self._counts,
            images=self._max_images(),
            cumulative_logprob=logprobs and common.CUMULATIVE in outputs,
            bias_words=biases,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with TensorRT-LLM's text tensors that require none that we cannot give, ensembles or others."""
        inputs = config.inputs
        if (config.platform == "ensemble") != cls.is_ensemble or not {"text_input", "max_tokens"} <= inputs.keys():
            return None
        if not requires_only(config, _SUPPLIED) or "text_output" not in config.outputs:
            return None
        if cls.is_ensemble:
            kind = "an ensemble"
        else:
            kind = "not an ensemble,"
        return f"{kind} with inputs text_input and max_tokens and output text_output"

    @property
    def token_level(self) -> ModelConfig | None:
        """The engine, unless more takes part: encoders of images, a draft model, a second prompt for a decoder."""
        engine = self.engine
        alone = (
            engine is not None
            and engine.parameter("encoder_model_path") is None
            and not any(self.config.parameter(name) for name in (_ENCODERS, _DRAFT))
            and not any("OUT_PROMPT_EMBEDDING_TABLE" in step.output_map for step in self.config.steps)
        )
        if alone:
            return engine
        return None

    def _max_images(self) -> float:
        image = self.config.inputs.get(_IMAGE)
        has_encoder = self.config.platform == "ensemble" or self.config.parameter(_ENCODERS) is not None
        if image is None or not has_encoder:
            return 0
        if image.dims == (1,):
            return 1
        return math.inf

    def returns_whole(self, generation: Generation) -> bool:
        """
        Return whether the answer is asked for whole: its text is then decoded whole, with every character.

        So it is unless the client asks for a stream, or for log probabilities, which have their tokens' texts in
        streams only. A prompt that would come back with the answer has to be one that can be taken out again; 0.5,
        whose engine has no output of lengths, fills its answers up with special tokens.
        """
        if not self.config.decoupled:
            return True
        if generation.stream or generation.sampling.logprobs is not None or "stream" not in self.config.inputs:
            return False
        if self.engine is not None and "sequence_length" not in self.engine.outputs:
            return False
        return not self.capabilities.echoes or (generation.prompt_echo is not None and not self.cumulative)

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """Return the request: the prompt, the flags that are always set, and what the client asked for."""
        config = self.config
        sampling = generation.sampling
        flags = dict.fromkeys(_FLAGS, True)
        # Always explicit: the Python flavour of the engine fails where it is absent.
        inputs = [
            self.tensor("text_input", generation.prompt),
            *self.declared_tensors(**flags, stream=not self.returns_whole(generation)),
        ]
        outputs: tuple[str, ...] = _OUTPUTS
        if sampling.logprobs is not None:
            outputs += (common.LOGPROBS,)
        if generation.cumulative_logprob:
            outputs += (common.CUMULATIVE,)
        if outputs != _OUTPUTS:
            inputs.append(self.tensor("return_log_probs", True))
        if generation.bias_words:
            words, weights = zip(*generation.bias_words, strict=True)
            inputs += [self.tensor("embedding_bias_words", *words), self.tensor("embedding_bias_weights", *weights)]
        if sampling.ignore_eos:
            # An id that is never generated.
            inputs.append(self.tensor("end_id", -1))
        inputs += self._image_tensors(generation.images)
        # 0.5 requires the word lists; an empty word has no effect.
        inputs += [
            self.tensor(name, "")
            for name, words in (("stop_words", sampling.stop), ("bad_words", sampling.bad_words))
            if not words and name in config.inputs and not config.inputs[name].optional
        ]
        # An ensemble's engine does not learn of a cancellation, and a BLS model never looks for one.
        return [self.generation_request(generation, inputs, outputs, cancellable=False)]

    def _image_tensors(self, images: Sequence[Image]) -> list[Tensor]:
        """
        Return the inputs for *images*.

        An engine that reuses its KV cache identifies a prompt by its token ids, which are the same for all images.
        Without ids of images, it would answer about the image of another request. (Preprocessing for Qwen2-VL and
        Pixtral fails when it is given one: those cannot be served with reuse, and a refusal is better than another's
        image.)
        """
        if not images:
            return []
        tensors = [self.tensor(_IMAGE, *(_IMAGE_PREFIX + image.base64 for image in images))]
        if self.engine is not None and common.truthy(self.engine.parameter("enable_kv_cache_reuse")):
            digest = 0
            for image in images:
                # One id for the row: the order of the images counts.
                digest = (digest * 31 + image.digest) % 2**63
            tensors += self.declared_tensors(**{_IMAGE_ID: digest})
        return tensors

    def decoder(self, generation: Generation) -> TextDecoder:
        logprobs = generation.sampling.logprobs is not None
        return TextDecoder(
            self.text_stage(generation),
            prompt_count="num_input_tokens" if self._counts else None,
            token_count="num_output_tokens" if self._counts else None,
            readers=[*self.readers(generation), *([StepLogprobs()] if logprobs else [])],
        )


class TrtllmEnsemble(TrtllmText):
    """Text deltas, one response per step; cancelled by the engine's own stop request."""

    name = "trtllm-ensemble"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        self.steps = [repository.get(step.model) for step in config.steps]
        # The step that takes stop requests.
        engines = [step for step in self.steps if step is not None and step.inputs.keys() >= common.ENGINE_INPUTS]
        if engines:
            self.engine = engines[0]
        else:
            self.engine = None
        maps = [step.input_map for step in config.steps]
        if any("request_output_len" in mapping and "bad_words_list" not in mapping for mapping in maps):
            # That of 0.5, whose preprocessing encodes them although no model reads them.
            self.unread = {"bad_words": "this ensemble does not hand them to its engine"}
        super().__init__(config, repository)

    @property
    def token_level(self) -> ModelConfig | None:
        """The engine, unless more takes part than the three steps of every release."""
        plain = all(step is not None and any(name in step.inputs for name in _STAGES) for step in self.steps)
        if plain:
            return super().token_level
        return None

    def cancel(self, generation: Generation) -> InferRequest | None:
        """
        Return the engine's stop request.

        Triton does not pass the cancellation of an ensemble to a running step, but it gives every step the ensemble's
        request id, and the engine ends the request whose id comes with ``stop`` set.
        """
        if self.engine is None:
            return None
        return common.stop_request(self.engine, generation.id)


class StepLogprobs:
    """Reads the log probabilities of one stream of text, whose steps are tokens."""

    def __init__(self) -> None:
        # How many tokens there were, and whether a list holds only the new ones, without counts.
        self._total = 0
        self._only_new = False
        # Whether bytes of the last token may still be to come.
        self._open = False

    def __call__(self, response: InferResponse, delta: Delta) -> None:
        """Set the entry of *delta*'s token. Raises :class:`UpstreamError` for a step of several."""
        new = self._new(response, delta)
        if not len(new):
            return
        if len(new) > 1:
            raise UpstreamError(
                "The model sent several tokens in one step, whose log probabilities cannot be assigned to its text:"
                f" {_TOKEN_BY_TOKEN}."
            )
        text = delta.text
        whole = bool(text) and not self._open and "\ufffd" not in text
        self._open = not text
        delta.logprobs = (TokenLogprob(text, float(new[0]), raw=text.encode() if whole else None),)

    def _new(self, response: InferResponse, delta: Delta) -> Sequence[float]:
        if delta.tokens is not None:
            self._total += delta.tokens
            if delta.tokens:
                return common.newest_logprobs(response, count=delta.tokens, total=self._total)
            return ()
        values = response.numbers(common.LOGPROBS)
        # A release that does not count tokens: the list grows, or shows that it does not.
        if not self._only_new and len(values) > self._total:
            new = values[self._total :]
            self._total = len(values)
            return new
        # As long as before although there is new text: these are the new token's, and so were those before.
        self._only_new = self._only_new or bool(delta.text)
        if delta.text:
            return values
        return ()
