"""
Jobs: what an endpoint asks of a model, in terms of neither its API nor Triton.

The types of jobs that a model takes decide its tasks, its probe, its error messages and its endpoints. An
adapter turns it into requests and their answers into its result. A :class:`~triton_openai.generation.Generation`, whose
answer comes in parts, is one too; the jobs here have their result at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec


class Result(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """Base of the results of jobs."""

    #: Those of the inputs, ``None`` where neither the backend nor a tokenizer counts them.
    prompt_tokens: int | None = None


R = TypeVar("R", bound=Result)


class Job(msgspec.Struct, Generic[R], gc=False, frozen=True, kw_only=True):
    """Base of all jobs; *R* is the type of the result."""

    #: What a model is for that takes such jobs, as ``inspect`` and ``GET /status`` show it.
    tasks: ClassVar[tuple[str, ...]] = ()
    #: What such a model does, and what another one does not, after "It" and "It does not".
    does: ClassVar[tuple[str, str]]
    #: The fields of the least that such a model can be asked, to see whether it answers.
    least: ClassVar[Mapping[str, Any]]
    #: Whether the answer to a request may come in several responses.
    in_parts: ClassVar[bool] = False

    #: Unique among all requests of this process: Triton logs it.
    id: str

    @property
    def extent(self) -> tuple[int, int]:
        """How many inputs there are, and about how many bytes in its requests. It decides where they are made."""
        return 1, 0


# Bytes of a token id in a request.
_ID = 8


class TextJob(Job[R], frozen=True, kw_only=True):
    """Base of the jobs about texts, each by itself."""

    least = {"inputs": ("Hi",)}

    #: Texts, or token ids.
    inputs: Sequence[str] | Sequence[Sequence[int]]
    #: Without it, token ids of different lengths cannot share a request.
    pad_id: int | None = None

    @property
    def extent(self) -> tuple[int, int]:
        return len(self.inputs), sum(len(item) if isinstance(item, str) else _ID * len(item) for item in self.inputs)


class EmbeddingResult(Result, frozen=True, kw_only=True):
    """Vectors."""

    #: One for each input: little-endian float32.
    vectors: Sequence[bytes]


class Pooling(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """How a text goes into an encoder, and how the vectors of its tokens become one."""

    #: The mean of all, the first token's, or the last one's.
    mode: Literal["mean", "cls", "last"] = "mean"
    #: Whether the vector gets the length 1.
    normalize: bool = True
    #: What precedes each text.
    prefix: str = ""


class EmbeddingJob(TextJob[EmbeddingResult], frozen=True, kw_only=True):
    """Texts to embed; from vectors, scores are computed here."""

    tasks = ("embed", "rerank")
    does = ("makes embeddings", "make embeddings")

    #: The length of the vectors, where the model itself can cut them.
    dimensions: int | None = None
    #: For a model that returns a vector for each token.
    pooling: Pooling = Pooling()
    #: Whether the engine applies the model's activation, where it can leave it out: usually the vectors' normalization.
    activate: bool = True


class TokenVectorsResult(Result, frozen=True, kw_only=True):
    """A vector for each token."""

    #: For each input, those of its tokens in their order: little-endian float32.
    vectors: Sequence[Sequence[bytes]]


class TokenEmbeddingJob(TextJob[TokenVectorsResult], frozen=True, kw_only=True):
    """Texts of which each token gets an embedding, as for late interaction (ColBERT)."""

    in_parts = True
    tasks = ("token_embed",)
    does = ("makes embeddings of tokens", "make embeddings of tokens")

    #: Whether the engine applies the model's activation: usually the vectors' normalization.
    activate: bool = True


class TokenClassificationJob(TokenEmbeddingJob, frozen=True, kw_only=True):
    """Texts of which each token is classified, as for names of persons and places."""

    tasks = ("token_classify",)
    does = ("classifies tokens", "classify tokens")


class ClassificationResult(Result, frozen=True, kw_only=True):
    """Classes."""

    #: What the model gives for each class of each input.
    values: Sequence[Sequence[float]]
    #: Those of the classes that the backend has.
    labels: Mapping[int, str] = {}


class ClassificationJob(TextJob[ClassificationResult], frozen=True, kw_only=True):
    """Texts to classify."""

    tasks = ("classify",)
    does = ("classifies texts", "classify texts")

    #: Whether the engine applies the model's activation, where it can leave it out: probabilities, not logits.
    activate: bool = True


class TokenPair(msgspec.Struct, gc=False, frozen=True):
    """A query and a document as one sequence of a cross-encoder."""

    ids: Sequence[int]
    #: For each id, which of the two texts it is of.
    segments: Sequence[int]


class ScoreResult(Result, frozen=True, kw_only=True):
    """Scores."""

    #: One for each pair, in their order.
    scores: Sequence[float]


class ScoreJob(Job[ScoreResult], frozen=True, kw_only=True):
    """Pairs of a query and a document to score."""

    tasks = ("rerank",)
    does = ("ranks texts", "rank texts")
    least = {"pairs": (("Hi", "Hi"),)}

    pairs: Sequence[tuple[str, str]]
    #: Whether logits become probabilities where the operator says that they are logits, or the engine can.
    activate: bool = True
    #: The same pairs as token ids, for models that take those.
    encoded: Sequence[TokenPair] = ()
    #: Without it, sequences of different lengths cannot share a request.
    pad_id: int | None = None

    @property
    def extent(self) -> tuple[int, int]:
        return len(self.pairs), _ID * sum(len(pair.ids) for pair in self.encoded)


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice for speech: one of the model's own, or a recording that it imitates."""

    name: str
    #: What the model calls it.
    known_as: str | int | None = None
    #: The recording: little-endian float32, at the rate that the model takes.
    samples: bytes = b""
    #: What is said in it.
    text: str = ""
    #: Its length.
    seconds: float = 0.0


class Speech(Result, frozen=True, kw_only=True):
    """Spoken text, or the next part of it: one channel."""

    #: Little-endian samples of *datatype*, from -1 to 1 where that is a floating one; or a file.
    data: bytes
    datatype: Literal["FP32", "FP16", "FP64", "INT16", "file"] = "FP32"


class SynthesisJob(Job[Speech], frozen=True, kw_only=True):
    """A text to speak. A model that answers in parts has its decoded answers one after the other."""

    tasks = ("speech",)
    does = ("speaks texts", "speak texts")
    least = {"text": "Hi."}

    text: str
    #: ``None`` for that of a model that has one.
    voice: Voice | None = None
    # What follows is ``None`` unless the model takes it.
    speed: float | None = None
    instructions: str | None = None
    language: str | None = None

    @property
    def extent(self) -> tuple[int, int]:
        return 1, len(self.text) + (0 if self.voice is None else len(self.voice.samples))


#: Whisper's ``<|startoftranscript|>`` in all of its vocabularies for several languages.
START_OF_TRANSCRIPT = 50_258


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word that is spoken. Times are in seconds."""

    start: float
    end: float
    text: str


class SpokenToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that a recognizer wrote, and the logarithm of its probability."""

    token: str
    logprob: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what is spoken. Times are in seconds."""

    start: float
    end: float
    text: str
    #: Where the model answers in token ids, those of the text.
    tokens: Sequence[int] = ()
    #: What the text was sampled with, the mean log probability of its tokens, and the probability that it is none of
    #: speech; ``None`` where the model does not return it.
    temperature: float | None = None
    avg_logprob: float | None = None
    no_speech_prob: float | None = None


class Transcript(Result, frozen=True, kw_only=True):
    """What is spoken."""

    text: str
    #: The code of the language, if the model returns it.
    language: str | None = None
    #: Its parts in order, with times from the beginning of the job's audio; empty if the model returns no times.
    segments: Sequence[Segment] = ()
    #: Its words, with times from the beginning of the job's audio; empty if the model returns none.
    words: Sequence[Word] = ()
    #: Its tokens with their probabilities; empty if the model returns none.
    logprobs: Sequence[SpokenToken] = ()
    #: In place of the text, of a model that answers in these: what follows the prompt.
    token_ids: Sequence[int] = ()
    #: Whether the answer says all that is spoken. One of token ids without an end was cut.
    complete: bool = True
    #: As those of a segment, for all of the audio.
    avg_logprob: float | None = None
    no_speech_prob: float | None = None


class TranscriptionJob(Job[Transcript], frozen=True, kw_only=True):
    """Audio that the model takes at once, to be written down in its own language."""

    tasks = ("transcribe",)
    does = ("transcribes audio", "transcribe audio")
    # Half a second of silence.
    least = {"samples": bytes(4 * 8000)}

    #: One channel at the rate that the model takes: little-endian float32.
    samples: bytes
    #: The code of the language; ``None`` if it is not known.
    language: str | None = None
    #: What precedes the audio, or how its words are written; ``None`` unless the model takes it.
    prompt: str | None = None
    #: What the text is sampled with; ``None`` unless the model takes it.
    temperature: float | None = None
    #: The prompt of the decoder, for models that take token ids.
    prompt_ids: Sequence[int] = (START_OF_TRANSCRIPT,)

    @property
    def extent(self) -> tuple[int, int]:
        return 1, len(self.samples)


class TranslationJob(TranscriptionJob, frozen=True, kw_only=True):
    """Audio to be written down in English."""

    tasks = ("translate",)
    does = ("translates speech into English", "translate speech")


#: A type of jobs: what an endpoint names, and an adapter lists.
JobType: TypeAlias = type[Job[Any]]
