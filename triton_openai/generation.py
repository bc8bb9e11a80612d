"""
Requests and answers between ``api/`` and the adapters, in terms of neither OpenAI nor Triton.

``api/`` and ``answer/`` make these of requests, adapters turn them into tensors and back, ``api/`` renders the result.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from triton_openai.errors import ServiceError
from triton_openai.jobs import Job

#: The log probability of a token that cannot be, as OpenAI and vLLM's server write it: JSON has no minus infinity.
IMPOSSIBLE = -9999.0


class FinishReason(enum.StrEnum):
    """Why a generation ended. There is no value for "unknown"."""

    STOP = "stop"
    LENGTH = "length"


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer has to conform to."""

    kind: Literal["json", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    #: A JSON schema as JSON text, a regular expression, a JSON list of strings for ``choice``, a grammar (EBNF), a
    #: structural tag as JSON text; empty for ``json``, any JSON object.
    value: str = ""
    #: The request's parameter that asked for it.
    param: str = "response_format"


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """A token considered at one position; bytes and id where they are known."""

    token: str
    logprob: float
    raw: bytes | None = None
    id: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """
    The token chosen at one position, and the most likely ones there (the chosen one not always among them).

    ``logprob`` is ``None`` for the first token of a prompt. ``rank`` is 1 for the likeliest token. ``hidden`` is
    whether the token shows in no text, as a special token that is skipped.
    """

    token: str
    logprob: float | None
    raw: bytes | None = None
    top: tuple[Alternative, ...] = ()
    id: int | None = None
    rank: int | None = None
    hidden: bool = False


class Logits(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of every token at some positions."""

    #: Rows of little-endian floats.
    data: bytes | memoryview
    datatype: str
    #: The floats of a row.
    width: int
    #: The first row that counts.
    first: int = 0


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    How to choose tokens. ``None`` means "not asked for": nothing is sent and the backend's own default holds.

    ``max_tokens`` counts new tokens; with 0 the model is not asked for any. ``stop`` strings never appear in the
    answer, unless ``include_stop_str_in_output``. ``logprobs`` is how many alternatives to report beside each chosen
    token. ``logit_bias`` holds token ids and what is added to their logits. ``thinking_token_budget`` limits the tokens
    of a model's reasoning, -1 for no limit.
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
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def explicit(self) -> dict[str, Any]:
        """The parameters that are set, by name; tuples are lists."""
        parameters: dict[str, Any] = msgspec.to_builtins(self)
        return parameters

    @property
    def stop_showable(self) -> bool:
        """Whether the first stop string in the text is what ends it: with ``min_tokens`` it may be a later one."""
        return bool(self.stop) and not self.min_tokens


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The audio of a model; see :class:`triton_openai.config.tree.AudioSettings`."""

    sample_rate: int | None = None
    max_seconds: float | None = None
    # Of recognizers
    form: Literal["samples", "file", "base64"] | None = None
    pad_seconds: float | None = None
    part_seconds: float | None = None
    languages: Mapping[str, str | int] | Sequence[str] | None = None
    language: str | None = None
    prompt: bool | None = None
    # Of synthesizers
    reference_sample_rate: int | None = None
    overlap_seconds: float | None = None


class TensorMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tensors, where the operator describes them."""

    #: The names of inputs by their use.
    inputs: Mapping[str, str] = {}
    #: Inputs that always have the same value.
    constants: Mapping[str, Any] = {}
    #: The names of outputs by their use.
    outputs: Mapping[str, str] = {}
    #: What a response holds: the new text, all of it so far, or only the last one has it.
    text: Literal["delta", "cumulative", "final"] | None = None
    #: What its config does not say of speech.
    audio: AudioFormat | None = None

    @property
    def describes(self) -> bool:
        """Whether it describes more than audio."""
        return bool(self.inputs or self.constants or self.outputs or self.text)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a model: ``end_ids`` end a text, the usual one first; ``pad_id`` fills up."""

    size: int
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None


class Matrix(msgspec.Struct, frozen=True):
    """Numbers in rows."""

    datatype: str
    #: Rows, columns.
    shape: tuple[int, int]
    #: The raw little-endian contents.
    data: bytes


class LoraFormat(msgspec.Struct, frozen=True):
    """The dtype in which a model takes a LoRA adapter's weights, and the width of the table that describes them."""

    weights: str
    config_width: int


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter to answer with."""

    name: str
    #: For engines that identify adapters by a number.
    number: int | None = None
    #: For backends that read the weights themselves.
    path: str | None = None
    #: ``hf`` or ``nemo``, beside the path.
    ckpt_source: str | None = None
    #: On requests that bring them.
    weights: Matrix | None = None
    #: What each row of the weights is for.
    config: Matrix | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """
    One image file, neither decoded nor scaled.

    ``base64`` is the file in the standard alphabet, padded and in one line, as backends take it; ``size`` its length in
    bytes; ``media_type`` (``image/png``) comes from its first bytes. ``digest`` has 63 bits and distinguishes images.
    """

    media_type: str
    base64: str
    size: int
    digest: int

    def __repr__(self) -> str:
        """Return what may stand in a log: images are the client's, and large."""
        return f"Image({self.media_type}, {self.size} bytes)"


class Beams(msgspec.Struct, frozen=True, kw_only=True):
    """The beam search that an answer is of."""

    #: How many answers the search keeps at each token.
    width: int
    #: The place of this answer among those that it finds, the best first.
    index: int = 0
    #: The name of the search, which the answers to one prompt share.
    search: str = ""
    #: The power of an answer's length by which its log probability is divided: above 0, long answers are favoured.
    length_penalty: float = 1.0


class Generation(Job[Any], frozen=True, kw_only=True):
    """One prompt to continue. Its answer comes in parts: those are decoded one by one."""

    tasks = ("generate",)
    does = ("generates text", "generate text")
    least: ClassVar[Mapping[str, Any]] = {"prompt": "Hi", "sampling": Sampling(max_tokens=1)}

    prompt: str
    sampling: Sampling
    #: Whether the client asks for a stream.
    stream: bool = False
    #: Whether the time of each token counts, which only an answer in parts shows.
    times_tokens: bool = False
    #: Whether it can go over gRPC, where Triton passes a cancellation on in any case.
    over_grpc: bool = False
    #: The prompt as the model's tokenizer gives it back, for backends that repeat it.
    prompt_echo: str | None = None
    #: The prompt as the client wrote it, where another text is sent.
    original_prompt: str | None = None
    #: For backends that take token ids, and for requests with ``token_ids``.
    prompt_ids: tuple[int, ...] | None = None
    #: The number of tokens of the prompt, where it was counted.
    prompt_tokens: int | None = None
    #: For backends that take token ids.
    vocabulary: Vocabulary | None = None
    #: ``sampling.bad_words`` as token ids, for the same backends.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    #: ``sampling.logit_bias`` as texts.
    bias_words: tuple[tuple[str, float], ...] = ()
    #: Whether the request asks for the log probability of the whole answer.
    cumulative_logprob: bool = False
    #: Whether the request asks for the token ids of the answer.
    token_ids: bool = False
    guide: Guide | None = None
    #: The beam search that the answer is of, ``None`` where tokens are sampled.
    beams: Beams | None = None
    lora: Lora | None = None
    #: The number of tokens in a block of the engine's cache, where it is known.
    kv_cache_block_size: int | None = None
    #: The place in the server's queue: 1 comes first, 0 is the server's default.
    priority: int = 0
    #: In the order in which the prompt refers to them.
    images: tuple[Image, ...] = ()
    #: WAV files of 16 kHz in base64, in the same order.
    audio: tuple[str, ...] = ()

    @property
    def shown_prompt(self) -> str:
        """The prompt as ``echo`` shows it."""
        if self.original_prompt is None:
            return self.prompt
        return self.original_prompt


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """
    Token counts of the backend or of the model's own tokenizer.

    ``cached_tokens`` are those of the prompt that came from the backend's cache, ``None`` where it reports none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


def total_usage(usages: Sequence[Usage | None], *, n: int = 1) -> Usage | None:
    """Return the sum of *usages*, ``None`` if one is not known. A prompt counts once for its *n* answers."""
    if len(usages) == 1:
        return usages[0]
    known = [usage for usage in usages if usage is not None]
    if len(known) < len(usages):
        return None
    prompts = known[::n]
    cached = [usage.cached_tokens for usage in prompts if usage.cached_tokens is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in known),
        cached_tokens=sum(cached) if len(cached) == len(prompts) else None,
    )


class Delta(msgspec.Struct, gc=False):
    """
    What one step of a stream adds. What the backend does not report on this step is ``None``.

    ``tokens`` is the number of new tokens, with or without text (a character still incomplete, a stop string still
    possible); ``logprobs`` are theirs. A backend that answers in token ids sets ``token_ids``, and ``logits``, a row
    for each of them, where log probabilities have to be made from these. ``cached_tokens`` are those of the prompt that
    came from the backend's cache. ``cumulative_logprob`` is that of the answer so far.
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


# OpenAI's rule of thumb for English. Other languages and code have two to four.
_BYTES_PER_TOKEN = 4


def tokens_in(text: str) -> int:
    """Return an estimate of the tokens in *text*, for limits only, never for reported counts."""
    return tokens_in_bytes(len(text.encode("utf-8", "surrogatepass")))


def tokens_in_bytes(number: int) -> int:
    """Return an estimate of the tokens in a text with this *number* of UTF-8 bytes."""
    return -(-number // _BYTES_PER_TOKEN)


def tokens_in_pieces(pieces: Sequence[str]) -> int:
    """Return an estimate of the tokens in the *pieces* of an answer: at least one each."""
    return max(len(pieces), tokens_in("".join(pieces)))


class AnswerState:
    """The state of an answer so far: what the backend has sent, and when."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        #: Whether the answer comes in one response, and its client wants it so. It has no first token that can be seen.
        self.whole = False
        # Counts: None once the backend omits one; silent is a last step without text
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.tokens: int | None = 0
        #: 1 for an answer in one piece.
        self.steps = 0
        self.silent = True
        #: The texts of the steps, before stop strings are cut and tool calls are parsed.
        self.pieces: list[str] = []
        #: The characters of the last piece after a stop string: the answer does not have them.
        self.dropped = 0
        self.cumulative_logprob: float | None = None
        # How it ended
        self.finish_reason: FinishReason | None = None
        #: The stop string or stop token that ended the answer, if known.
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None
        self.error: ServiceError | None = None
        #: Whether the service stopped it before its end.
        self.cancelled = False
        # Times: sent to Triton, first token, last step, end
        self.sent: float | None = None
        self.first: float | None = None
        self.now = 0.0
        self.ended: float | None = None
        #: Those of the pieces, in seconds.
        self.arrivals = array("d")

    def add(self, delta: Delta) -> None:
        """Count a step."""
        self.steps += 1
        text = delta.text
        self.silent = not text
        if text:
            self.pieces.append(text)
            self.arrivals.append(self.now)
        if delta.tokens is None:
            self.tokens = None
        elif self.tokens is not None:
            self.tokens += delta.tokens
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            last = None
            if delta.token_ids:
                last = delta.token_ids[-1]
            if delta.finish_reason is FinishReason.STOP and last in self._generation.sampling.stop_token_ids:
                self.stop_reason = last

    def add_text(self, text: str) -> None:
        """Add text that a decoder kept until the end; it is not counted as a step."""
        self.pieces.append(text)
        self.silent = False

    @property
    def text(self) -> str:
        """The backend's text."""
        return "".join(self.pieces)

    @property
    def cut(self) -> bool:
        """Whether the limit of tokens or a stop string ended it, wherever it was."""
        return self.finish_reason is FinishReason.LENGTH or isinstance(self.stop_reason, str)

    @property
    def usage_so_far(self) -> Usage | None:
        """The counts, if the backend sends them with every step."""
        if self.usage is not None or self.tokens is None or self.prompt_tokens is None:
            return self.usage
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.tokens)

    @property
    def usage_estimate(self) -> Usage:
        """An estimate of the counts, from the known ones and from the texts."""
        generation = self._generation
        if self.prompt_tokens is not None:
            prompt = self.prompt_tokens
        elif generation.prompt_ids is not None:
            prompt = len(generation.prompt_ids)
        elif generation.prompt_tokens is not None:
            prompt = generation.prompt_tokens
        else:
            prompt = tokens_in(generation.prompt)
        return Usage(prompt_tokens=prompt, completion_tokens=self.tokens or tokens_in_pieces(self.pieces))


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports of its load."""

    #: Requests that it works on, and those that wait for it.
    running: int
    waiting: int
    #: The share of its KV cache that is in use, from 0 to 1.
    cache_usage: float | None = None
    #: The blocks of the cache, and the tokens in one.
    cache_blocks: int | None = None
    block_size: int | None = None
