"""
The middle: what a request asks for and what comes back, in words of neither OpenAI nor Triton.

``api/`` builds these from OpenAI requests, adapters turn them into tensors and back, ``api/sse.py`` renders the result.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec

#: The log probability of a token that cannot be, as OpenAI and vLLM's server tell it: JSON has no minus infinity.
IMPOSSIBLE = -9999.0


class FinishReason(enum.StrEnum):
    """Why a generation ended. The values are the words of the field; there is no value for "unknown"."""

    STOP = "stop"
    LENGTH = "length"


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the answer has to conform to: *value* is a JSON schema as JSON text, a regular expression, a JSON list of
    strings for ``choice``, a grammar (EBNF), a structural tag as JSON text; empty for ``json``, any JSON object.
    *param* is the request's parameter that asked for it.
    """

    kind: Literal["json", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    value: str = ""
    param: str = "response_format"


class Alternative(msgspec.Struct, frozen=True):
    """A token considered at one position: its text, its log probability, its bytes and its id where they are known."""

    token: str
    logprob: float
    raw: bytes | None = None
    id: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """
    The token chosen at one position, and the most likely ones there (the chosen one not always among them).

    ``logprob`` is ``None`` for the first token of a prompt, which nothing stands before. ``rank`` is its place among
    all tokens, 1 for the likeliest. ``hidden`` is whether it shows in no text, as a special token that is skipped.
    """

    token: str
    logprob: float | None
    raw: bytes | None = None
    top: tuple[Alternative, ...] = ()
    id: int | None = None
    rank: int | None = None
    hidden: bool = False


class Logits(msgspec.Struct, frozen=True, kw_only=True):
    """
    The scores of every token at some positions, as a backend sends them: rows of *width* little-endian floats.

    Log probabilities are made from the rows of ``data`` from number *first* on.
    """

    data: bytes
    datatype: str
    width: int
    first: int = 0


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """
    How to choose tokens. ``None`` means "not asked for": nothing is sent and the backend's own default holds.

    ``max_tokens`` counts new tokens; with 0 the model is not asked for any. ``seed`` is any integer the client chose;
    an adapter checks it against the dtype of its input. ``stop`` strings never appear in the answer, unless
    ``include_stop_str_in_output``. ``logprobs`` is how many alternatives to report beside each chosen token; 0 reports
    the chosen ones alone. ``logit_bias`` holds token ids and what is added to their logits.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    min_p: float | None = None
    length_penalty: float | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def stop_showable(self) -> bool:
        """Whether the first stop string in the text is what ends it: with ``min_tokens`` it may be a later one."""
        return bool(self.stop) and not self.min_tokens


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a backend that is given token ids has to be told about them.

    ``end_ids`` are those that end a text, the usual one first. ``pad_id`` is the one that fills up.
    """

    size: int
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None


class Matrix(msgspec.Struct, frozen=True):
    """Numbers of *shape* (rows, columns) as raw little-endian contents of *datatype*."""

    datatype: str
    shape: tuple[int, int]
    data: bytes


class LoraFormat(msgspec.Struct, frozen=True):
    """The dtype in which a model takes a LoRA adapter's weights, and the width of the table that describes them."""

    weights: str
    config_width: int


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """
    A LoRA adapter to answer with: its *name*, and for engines that know adapters by one, its *number*.

    ``weights``, and ``config`` which says what each of their rows is for, are there on requests that bring them.
    """

    name: str
    number: int | None = None
    weights: Matrix | None = None
    config: Matrix | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """
    One image file, as the client gave it or as it was fetched: nothing is decoded or scaled here.

    ``base64`` is the file in the standard alphabet, padded and in one line, which is the form in which backends take
    it; ``size`` is its length in bytes; ``media_type`` (``image/png``) is what its first bytes say it is. ``digest`` is
    63 bits that tell images apart.
    """

    media_type: str
    base64: str
    size: int
    digest: int

    def __repr__(self) -> str:
        """Return what may stand in a log: images are the client's, and large."""
        return f"Image({self.media_type}, {self.size} bytes)"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """
    One prompt to continue.

    ``id`` is unique among all requests of this process: Triton sees it, logs it, and (for an ensemble) it is the
    handle by which the engine is told to stop. ``prompt_echo`` is the prompt as the model's tokenizer gives it back,
    for backends that repeat it.

    ``prompt_ids``, ``vocabulary`` and ``bad_word_ids`` (``sampling.bad_words`` as token ids) are set for backends that
    are given token ids, the first also where ``token_ids`` are wanted; ``bias_words`` (``sampling.logit_bias`` as
    texts) for those that take a bias of texts.

    ``written`` is the prompt as the client wrote it, where that is not the text that is sent: ``echo`` shows it.

    ``scored`` is whether the log probability of the whole answer is wanted, ``token_ids`` whether its token ids are.

    ``kv_cache_block_size`` is how many tokens a block of the engine's cache holds, where that is known: with it, a
    count of blocks is one of tokens. ``priority`` is the place in the server's queue: 1 comes first, 0 is the server's
    default. ``images`` stand in the order in which the prompt refers to them. ``stream`` is whether the client wants
    the answer bit by bit.
    """

    id: str
    prompt: str
    sampling: Sampling
    stream: bool = False
    prompt_echo: str | None = None
    written: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    vocabulary: Vocabulary | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    bias_words: tuple[tuple[str, float], ...] = ()
    scored: bool = False
    token_ids: bool = False
    guide: Guide | None = None
    lora: Lora | None = None
    kv_cache_block_size: int | None = None
    priority: int = 0
    images: tuple[Image, ...] = ()

    @property
    def shown_prompt(self) -> str:
        """The prompt as ``echo`` shows it."""
        return self.prompt if self.written is None else self.written


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """
    Token counts as the backend or the model's own tokenizer gave them. ``cached_tokens`` are those of the prompt that
    came from the backend's cache, ``None`` where it does not tell.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Delta(msgspec.Struct, gc=False):
    """
    What one step of a stream adds.

    ``tokens`` is the number of new tokens that the backend says this step brought, ``None`` where it does not say;
    a step may bring tokens and no text (a character still incomplete, a stop string still possible).
    ``prompt_tokens``, ``cached_tokens`` (of the prompt, from the backend's cache) and ``finish_reason`` are set on the
    steps on which the backend tells them. ``logprobs`` are those
    of the new tokens, whether or not their text is there already. A backend that answers in token ids sets
    ``token_ids``: the text, and the names of the log probabilities' tokens, are added here. ``logits`` are those that
    log probabilities have to be made from, a row for each of ``token_ids``. ``cumulative_logprob`` is that of the
    answer so far.
    """

    text: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    token_ids: Sequence[int] = ()
    cached_tokens: int | None = None
    logits: Logits | None = None
    cumulative_logprob: float | None = None


class EmbeddingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or token ids, to embed. ``dimensions`` cuts the vectors where the model itself can do that."""

    id: str
    inputs: Sequence[str] | Sequence[Sequence[int]]
    dimensions: int | None = None


class TokenPair(msgspec.Struct, frozen=True):
    """A query and a document as one sequence of a cross-encoder: the ids, and for each which of the two it is of."""

    ids: Sequence[int]
    segments: Sequence[int]


class ScoreJob(msgspec.Struct, frozen=True, kw_only=True):
    """
    Pairs of a query and a document to score.

    ``encoded`` holds the same pairs as token ids for models that take those, and ``pad_id`` what fills up the shorter
    ones; without it no two of them can share a request.
    """

    id: str
    pairs: Sequence[tuple[str, str]]
    encoded: Sequence[TokenPair] = ()
    pad_id: int | None = None


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """One score per pair, in the order of the pairs. ``prompt_tokens`` is ``None`` where the backend does not count."""

    scores: Sequence[float]
    prompt_tokens: int | None = None


class EmbeddingResult(msgspec.Struct, frozen=True, kw_only=True):
    """
    One little-endian float32 vector per input, in the order of the inputs.

    ``prompt_tokens`` is ``None`` where the backend does not count.
    """

    vectors: Sequence[bytes]
    prompt_tokens: int | None = None
