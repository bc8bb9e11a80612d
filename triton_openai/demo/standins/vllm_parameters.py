"""vLLM's sampling parameters, as a release of the backend reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .engine import Options

_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# The constructor converts values of these types.
_KINDS: dict[type, tuple[str, ...]] = {
    int: (
        "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
    ),
    float: tuple(name for name in _NUMBERS if name != "top_k"),
    bool: (
        "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ),
}  # fmt: skip
_SIMPLE = {name: kind for kind, names in _KINDS.items() for name in names}
_PASSED = {
    "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "extra_args", "output_kind",
    "output_text_buffer_length", "logits_processors",
}  # fmt: skip
_GUIDES = {"r25.11": ("structured_outputs",), "r25.01": ("guided_decoding",), "r24.12": ()}
_GUIDE_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_LOGPROBS = 20


class Rejected(Exception):
    """The constructor raised; the backend logs the reason and continues without parameters."""


@dataclass(frozen=True)
class Sampling(Options):
    """The parameters that the stand-in uses: the engine's, and those of stopping and of the text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: bool = False


def parse(values: dict[str, Any], release: str) -> Sampling:
    """Return the parameters; raises `Rejected` if the constructor would raise."""
    guides = _GUIDES[release]
    known: dict[str, Any] = {}
    guide = None
    for key, value in values.items():
        if key in _SIMPLE:
            try:
                known[key] = _SIMPLE[key](value)
            except (TypeError, ValueError) as error:
                raise Rejected(str(error)) from error
        elif key in _PASSED:
            known[key] = value
        elif key in guides:
            guide = _guide(value)
        else:
            raise Rejected(f"Unexpected keyword argument '{key}'")
    _check(known)
    stop = known.get("stop")
    return Sampling(
        max_tokens=known.get("max_tokens", 16),
        min_tokens=known.get("min_tokens", 0),
        seed=known.get("seed"),
        greedy=known.get("temperature", 1.0) == 0 or known.get("top_k") == 1,
        ignore_eos=known.get("ignore_eos", False),
        skip_special_tokens=known.get("skip_special_tokens", True),
        include_stop=known.get("include_stop_str_in_output", False),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(known.get("stop_token_ids") or ()),
        logprobs=known.get("logprobs"),
        logit_bias=bool(known.get("logit_bias")),
        guide=guide,
        bad_words=tuple(known.get("bad_words") or ()),
        **{key: known[key] for key in _NUMBERS if key in known},
    )


def check_request(sampling: Sampling) -> None:
    """Raise `ValueError`, with the engine's text, for what the engine refuses."""
    if sampling.logprobs is not None and sampling.logprobs > _MAX_LOGPROBS:
        raise ValueError(
            f"Requested sample logprobs of {sampling.logprobs}, which is greater than max allowed: {_MAX_LOGPROBS}"
        )
    if sampling.guide is not None and sampling.guide[0] == "choice" and json.loads(sampling.guide[1]) == []:
        raise ValueError("Choice '[]' cannot be an empty list")


def _guide(value: Any) -> tuple[str, str]:
    if not isinstance(value, str):
        raise Rejected("the JSON object must be str, bytes or bytearray")
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise Rejected(str(error)) from error
    kinds = [kind for kind in _GUIDE_KINDS if isinstance(fields, dict) and fields.get(kind) is not None]
    if len(kinds) != 1:
        raise Rejected("You must use exactly one kind of structured outputs constraint")
    guide = fields[kinds[0]]
    return kinds[0], guide if isinstance(guide, str) else json.dumps(guide)


def _check(values: dict[str, Any]) -> None:
    """Refuse values that are out of range, as the constructor does."""
    number = values.get
    rules = (
        number("n", 1) >= 1,
        -2.0 <= number("presence_penalty", 0.0) <= 2.0,
        -2.0 <= number("frequency_penalty", 0.0) <= 2.0,
        number("repetition_penalty", 1.0) > 0.0,
        number("temperature", 1.0) >= 0.0,
        0.0 < number("top_p", 1.0) <= 1.0,
        number("top_k", 0) >= -1,
        0.0 <= number("min_p", 0.0) <= 1.0,
        number("max_tokens", 16) >= 1,
        0 <= number("min_tokens", 0) <= number("max_tokens", 16),
        number("logprobs", 0) >= 0,
    )
    if not all(rules):
        raise Rejected("a sampling parameter is out of range")
    stop = number("stop")
    if isinstance(stop, list) and any(not word for word in stop):
        raise Rejected("stop cannot contain an empty string.")
