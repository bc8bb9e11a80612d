"""
The parameters that chat and plain completions share: their types and ranges, and the sampling that they ask for.

Ranges are those that OpenAI documents (openai-openapi 2.3.0). Extensions in common use have vLLM's names and ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai.adapters._common.base import Adapter, Parameter, Rule, check_range
from triton_openai.answer.limits import TokenLimit
from triton_openai.answer.logits_reader import PromptScoring
from triton_openai.api.bodies import IGNORED_HEADER, ModelRequest, NotNegative, Positive, Share, converted
from triton_openai.api.guides import Choices, ResponseFormat, Schema, StructuredOutputs, Text
from triton_openai.config.tree import DefaultParameters
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.generation import Beams, Sampling
from triton_openai.models.served import ServedModel
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation

_Request = TypeVar("_Request", bound=msgspec.Struct)
_Unread: TypeAlias = msgspec.Raw | UnsetType


def accepting(*names: str) -> Callable[[type[_Request]], type[_Request]]:
    """Give a request fields without influence on the answer: documented or in common use, never decoded."""
    accepted = Annotated[_Unread, Meta(description="Accepted, and without influence on the answer.")]
    return _with_fields([(name, accepted, UNSET) for name in names])


def ignoring(*names: str) -> Callable[[type[_Request]], type[_Request]]:
    """Give a request fields that could have an influence on the answer elsewhere: a header of the answer names them."""
    meta = Meta(description=f"Ignored: the header `{IGNORED_HEADER}` names it.", extra={"ignored": True})
    return _with_fields([(name, Annotated[_Unread, meta], UNSET) for name in names])


def refusing(**neutral: Any) -> Callable[[type[_Request]], type[_Request]]:
    """
    Give a request fields that are not supported: documented or in common use.

    Each takes null, and the value that asks for nothing, or a tuple of such values.
    """
    return _with_fields([(name, Annotated[Any, _unsupported(values)], None) for name, values in neutral.items()])


def _with_fields(fields: Sequence[tuple[str, Any, Any]]) -> Callable[[type[_Request]], type[_Request]]:
    def add(kind: type[_Request]) -> type[_Request]:
        namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        # A field that the request reads itself stays as it is.
        added = [each for each in fields if each[0] not in kind.__struct_fields__]
        made = msgspec.defstruct(kind.__name__, added, bases=(kind,), namespace=namespace, kw_only=True)
        return cast(type[_Request], made)

    return add


def _unsupported(values: Any) -> Meta:
    if isinstance(values, tuple):
        neutral = values
    elif values is not None:
        neutral = (values,)
    else:
        neutral = ()
    description = "Not supported: any other value is refused."
    # `typing` takes equal annotations for the same one, and True equals 1: the types distinguish them.
    extra = {"neutral": neutral, "types": tuple(map(type, neutral))}
    return Meta(extra_json_schema={"enum": [*neutral, None], "description": description}, extra=extra)


def _fields_with(kind: type[msgspec.Struct], mark: str) -> Mapping[str, Any]:
    """Return the fields of *kind* whose types have *mark*, with what it says."""
    return {
        field.encode_name: meta.extra[mark]
        for field in msgspec.structs.fields(kind)
        for meta in get_args(field.type)
        if isinstance(meta, Meta) and meta.extra and mark in meta.extra
    }


@cache
def neutral_values(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Return the fields of *kind* that are not supported, with the values that ask for nothing."""
    return _fields_with(kind, "neutral")


@cache
def ignorable(kind: type[msgspec.Struct]) -> Sequence[str]:
    """Return the fields of *kind* that are ignored."""
    return tuple(_fields_with(kind, "ignored"))


_ASK_FOR_NOTHING = (b"null", b"[]", b"{}")


def check_unused(request: msgspec.Struct) -> Sequence[str]:
    """
    Return the fields of *request* that ask for something and are ignored.

    Raises :class:`UnsupportedParameter` for the first field that is not supported and not neutral.
    """
    for name, neutral in neutral_values(type(request)).items():
        value = getattr(request, name)
        if value is not None and not is_neutral(value, neutral):
            raise UnsupportedParameter(f"The parameter '{name}' is not supported with this model.", param=name)
    ignored = []
    for name in ignorable(type(request)):
        raw = getattr(request, name)
        if raw is not UNSET and bytes(raw) not in _ASK_FOR_NOTHING:
            ignored.append(name)
    return ignored


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether *value* is absent, or one of the *neutral* values (1.0 is 1, ``True`` is not)."""
    return value is None or any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in neutral)


_MAX_STOPS = 4
# Characters of all stop strings, or of all bad words: each is looked for, or tokenized, by itself.
_LONGEST_WORDS = 10_000

#: The ranges of options that several APIs have.
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Factor: TypeAlias = Annotated[float, Meta(gt=0)]
#: A limit, of which -1 is none.
Limit: TypeAlias = Annotated[int, Meta(ge=-1)]
#: How many alternatives to a token are wanted.
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
_TokenId = Annotated[int, Meta(ge=0, lt=10**9)]
# The values are untyped at first: msgspec takes up to 20 us for a float that is typed, and asks us for one that is not.
_LogitBias = Annotated[
    dict[_TokenId, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``. Obfuscation only pads events; leaving it out changes no answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


#: How long an answer is to be: without influence, as no backend supports it.
Verbosity = Literal["low", "medium", "high"]


class TruncatedRequest(ModelRequest, kw_only=True):
    """Base of the requests whose inputs can be cut."""

    truncate_prompt_tokens: Limit | None = None
    truncation_side: Literal["left", "right"] | None = None


class GenerationOptions(TruncatedRequest, kw_only=True):
    """Options of an answer in text, for every API that generates it. Each may be null, as clients send it."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Limit | None = None
    min_p: Share | None = None
    min_tokens: NotNegative | None = None
    seed: int | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    length_penalty: float | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    thinking_token_budget: Limit | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[_TokenId] | None = None
    skip_special_tokens: bool | None = None
    logit_bias: _LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    priority: NotNegative | None = None
    use_beam_search: bool | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The client's name of the limit of the answer's tokens, and the limit."""
        return "max_tokens", self.max_tokens

    @property
    def alternatives(self) -> tuple[str, int | None]:
        """The client's name of the number of alternatives to each token, and the number; ``None``: no probabilities."""
        raise NotImplementedError

    def json_texts(self) -> Iterator[tuple[str, Any]]:
        """Yield the texts that hold JSON, each with its path."""
        yield "guided_json", self.guided_json
        if self.structured_outputs is not None:
            yield "structured_outputs.json", self.structured_outputs.json


def completing(kind: type[_Request]) -> type[_Request]:
    """Give a request of completions, or chat completions, the fields of both that generate nothing."""
    # Who asks, what for, how it is charged and cached; and names of vLLM's server for how it works.
    accepted = accepting(
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
        "session_id", "stream_interval",
    )  # fmt: skip
    # Names of vLLM's server, for inputs that nothing here reads.
    ignored = ignoring(
        "cache_salt", "detokenize", "ec_transfer_params", "guided_decoding_backend", "guided_whitespace_pattern",
        "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs",
    )  # fmt: skip
    refused = refusing(
        logits_processors=[], logprob_token_ids=[], prompt_embeds=[], structural_tag=None,
        repetition_detection=False, watermarking=False, return_prompt_text=False,
        return_token_offsets=False, return_tokens_as_token_ids=False, spaces_between_special_tokens=True,
    )  # fmt: skip
    return accepted(ignored(refused(kind)))


# Fields that a request and a sampling have in common, with the values that ask for what happens anyway.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,), "seed": (),
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "include_stop_str_in_output": (False,), "ignore_eos": (False,), "skip_special_tokens": (True,),
    "thinking_token_budget": (-1,),
}  # fmt: skip
_plain = attrgetter(*_PLAIN)
_given = lru_cache(128)(DefaultParameters.explicit)
# Every field of a sampling that an adapter has to carry. What its table does not mention is refused: it is not sent.
_NOT_IN_TABLE = {
    name: Parameter(name)
    for name in (*_PLAIN, "stop_token_ids", "bad_words", "allowed_token_ids", "logprobs", "logit_bias")
}


class _Biases(msgspec.Struct):
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]]


def _biases(biases: Mapping[int, Any]) -> tuple[tuple[int, float], ...]:
    """Return the tokens of *biases* with their numbers, without those of 0. Raises :class:`InvalidRequest`."""
    checked = converted({"logit_bias": biases}, _Biases)
    return tuple(sorted((token, bias) for token, bias in checked.logit_bias.items() if bias))


def stop_strings(stop: str | list[str] | tuple[str, ...] | None, param: str = "stop") -> tuple[str, ...]:
    """Return the stop strings; *param* is the client's name. Raises :class:`InvalidRequest` for too many or empty."""
    if isinstance(stop, str):
        stops: tuple[str, ...] = (stop,)
    else:
        stops = tuple(stop or ())
    if len(stops) > _MAX_STOPS:
        raise InvalidRequest(
            f"'{param}' takes at most {_MAX_STOPS} strings, got {len(stops)}.",
            param=param,
            code="array_above_max_length",
        )
    return _checked_words(param, stops)


def _checked_words(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    if any(not word for word in words):
        raise InvalidValue(f"'{name}' must not hold an empty string.", name)
    if sum(map(len, words)) > _LONGEST_WORDS:
        raise InvalidRequest(
            f"'{name}' may have {_LONGEST_WORDS} characters in all.", param=name, code="string_above_max_length"
        )
    return words


def token_limit(
    options: GenerationOptions,
    model: ServedModel,
    tokenizer: Tokenizer | None,
    defaults: DefaultParameters,
    default: int,
) -> TokenLimit:
    """
    Return the limit of the answer's tokens: the client's, else the operator's, else what the authors recommend.

    The last two are in the *defaults*; without them the limit is *default*, or the end of the context.
    """
    param, asked = options.limit
    settings = model.settings
    unlimited = asked is None and settings.default_parameters.max_tokens is None
    if asked is None:
        tokens = defaults.max_tokens or default
    else:
        tokens = asked
    context = settings.max_model_len
    longest_prompt = model.metadata.max_prompt_len
    if context and longest_prompt:
        longest_prompt = min(context, longest_prompt)
    else:
        longest_prompt = context or longest_prompt or None
    if longest_prompt is None and tokenizer is not None:
        longest_prompt = tokenizer.longest_prompt
    return TokenLimit(
        tokens=tokens,
        open=unlimited,
        unbounded=unlimited and defaults.max_tokens is None,
        asked=asked,
        param=param,
        context=context,
        longest_prompt=longest_prompt,
    )


def sampling(
    options: GenerationOptions,
    *,
    limit: TokenLimit,
    defaults: DefaultParameters,
    adapter: Adapter,
    origins: Origins = CHAT_ORIGINS,
) -> Sampling:
    """
    Return the sampling that *options* ask for, completed from the model's *defaults*.

    *origins* has the client's names, for errors. Raises :class:`InvalidRequest`.
    """
    alternatives_param, logprobs = options.alternatives
    configured = _given(defaults)
    stop = options.stop
    if stop is None:
        stop = configured.get("stop")
    values = {}
    if configured:
        values = {name: value for name, value in configured.items() if name in _PLAIN}
    plain = _plain(options)
    if plain.count(None) < len(plain):
        values |= {name: value for name, value in zip(_PLAIN, plain, strict=True) if value is not None}
    if values.get("min_tokens", 0) > limit.tokens:
        raise InvalidValue(
            f"'min_tokens' ({values['min_tokens']}) must not be greater than '{limit.param}' ({limit.tokens}).",
            "min_tokens",
        )
    if stop is not None:
        values["stop"] = stop_strings(stop, origins.name("stop"))
    if options.stop_token_ids:
        values["stop_token_ids"] = tuple(options.stop_token_ids)
    if options.bad_words:
        values["bad_words"] = _checked_words("bad_words", tuple(options.bad_words))
    if options.allowed_token_ids:
        values["allowed_token_ids"] = tuple(options.allowed_token_ids)
    if options.logit_bias:
        values["logit_bias"] = _biases(options.logit_bias)
    result = Sampling(max_tokens=limit.tokens, logprobs=logprobs, **values)
    _check_supported(result, limit, adapter, origins)
    alternatives = adapter.capabilities.top_logprobs
    if (logprobs or 0) > alternatives:
        if alternatives:
            message = f"This model reports at most {alternatives} alternatives to a token."
        else:
            message = "This model reports the log probabilities of the chosen tokens only, not those of alternatives."
        raise UnsupportedParameter(message, param=alternatives_param)
    return result


def _check_supported(sampling: Sampling, limit: TokenLimit, adapter: Adapter, origins: Origins) -> None:
    """Raise :class:`InvalidRequest` for what *adapter* does not send, or cannot send."""
    asked = sampling.explicit
    if limit.asked is None:
        # A limit that the client did not set is no reason to refuse the request.
        del asked["max_tokens"]
    for name, value in asked.items():
        row = adapter.parameters_by_name.get(name) or _NOT_IN_TABLE.get(name)
        if row is None or value in _PLAIN.get(name, ()):
            continue
        if name == "max_tokens":
            param = limit.param
        else:
            param = origins.name(name)
        if row.target is None and row.rule is Rule.REFUSED and value not in row.neutral:
            reason = ""
            if row.why:
                reason = f": {row.why}"
            raise UnsupportedParameter(
                f"The parameter '{param}' is not supported with this model{reason}.", param=param
            )
        # Checked here because the adapter does not have the client's name.
        if isinstance(value, (int, float)):
            check_range(param, value, row.datatype)


def truncation(
    request: TruncatedRequest, *, side: Literal["left", "right"] = "left", keeps_special: bool = True
) -> Truncation | None:
    """
    Return how the prompt is truncated, ``None`` for not at all.

    Without a ``truncation_side`` in the request, tokens are cut on *side*, and special tokens stay if *keeps_special*.
    Raises :class:`InvalidRequest` for a side without a number of tokens, and for 0 tokens.
    """
    if request.truncate_prompt_tokens is None:
        if request.truncation_side is not None:
            raise InvalidValue("'truncation_side' needs 'truncate_prompt_tokens'.", "truncation_side")
        return None
    if request.truncate_prompt_tokens == 0:
        raise InvalidValue(
            "'truncate_prompt_tokens' must be -1 (as many as there is room for) or at least 1.",
            "truncate_prompt_tokens",
        )
    return Truncation(
        tokens=request.truncate_prompt_tokens,
        side=request.truncation_side or side,
        keeps_special=keeps_special and request.truncation_side is None,
    )


def priority(options: GenerationOptions, levels: int, objective: int = 0) -> int:
    """
    Return the request's priority, 0 for the default; the model's queue has *levels* of them.

    The gateway's *objective* comes before what the client asks for, if the queue has that level. Raises
    :class:`UnsupportedParameter` for a queue without priorities, and :class:`InvalidRequest` above *levels*.
    """
    asked = options.priority or 0
    if asked and not levels:
        raise UnsupportedParameter("The model's queue has no priorities.", param="priority")
    if asked > levels:
        raise InvalidValue(
            f"'priority' must be from 0 (the default) or 1 (the first) to {levels} for this model, got {asked}.",
            "priority",
        )
    if 0 < objective <= levels:
        return objective
    return asked


def beams(options: GenerationOptions, adapter: Adapter, *, width: int) -> Beams:
    """Return the beam search, of *width* answers, that *options* ask for. Raises :class:`UnsupportedParameter`."""
    if not adapter.capabilities.beam_search:
        raise UnsupportedParameter("This model's backend does no beam search.", param="use_beam_search")
    if options.length_penalty is None:
        return Beams(width=width)
    return Beams(width=width, length_penalty=options.length_penalty)


# What a beam search has no use for, as in vLLM's server. Stop strings are cut here, whatever the engine does.
_IGNORED_BY_BEAMS = (
    "top_p", "top_k", "min_p", "min_tokens", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "bad_words", "allowed_token_ids", "logit_bias", "thinking_token_budget",
)  # fmt: skip


def ignored_by_beams(options: GenerationOptions) -> Sequence[str]:
    """Return the names of *options* that ask for something which a beam search does not do."""
    names = []
    for name in _IGNORED_BY_BEAMS:
        value = getattr(options, name)
        if value is not None and value not in _PLAIN.get(name, ([], {})):
            names.append(name)
    return names


def check_token_ids(adapter: Adapter) -> None:
    """Raise :class:`UnsupportedParameter` if the backend does not send the ids of its tokens."""
    if not adapter.capabilities.token_ids:
        raise UnsupportedParameter(
            "This model answers in text and does not report token ids; an engine that is asked token by token does"
            " (--prefer-token-level always).",
            param="return_token_ids",
        )


def prompt_scoring(
    options: GenerationOptions, model: ServedModel, *, echo_logprobs: int | None, timeout: float
) -> PromptScoring:
    """
    Return how the log probabilities of a prompt are made, which *options* or *echo_logprobs* ask for.

    Raises :class:`InvalidRequest`.
    """
    count = echo_logprobs or 0
    param = "logprobs"
    if options.prompt_logprobs is not None:
        if options.stream:
            raise InvalidValue("'prompt_logprobs' cannot be used with 'stream'.", "prompt_logprobs")
        count = max(options.prompt_logprobs, count)
        param = "prompt_logprobs"
    if not model.adapter.capabilities.prompt_logprobs:
        message = "This model does not report the log probabilities of the prompt's tokens."
        if param == "logprobs":
            message = f"'echo' cannot be used with 'logprobs': {message}"
        raise UnsupportedParameter(message, param=param)
    if model.lora_delivery is not None:
        raise UnsupportedParameter(
            "Log probabilities of prompts are not available for a LoRA adapter that is sent with its requests.",
            param=param,
        )
    return PromptScoring(count=count, param=param, timeout=timeout)
