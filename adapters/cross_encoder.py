"""
Cross-encoders, as people deploy them: a query and a document in, one number out that says how well they fit.

There is no standard for their tensor names. Three kinds of interface are known, each with a floating output of one
number per pair: two texts (``query`` and ``passage`` in NVIDIA's reranking NIM); one text input of two elements
(``INPUT_PAIRS [2]``); and the token ids of an exported Hugging Face model (``input_ids``, ``attention_mask``, perhaps
``token_type_ids``), which are made here. Names decide only what shapes leave open: which text is the query, and
whether the number is a score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from triton_openai.adapters._common.base import Adapter, Capabilities
from triton_openai.errors import ConfigurationError, ContextLengthExceeded, UpstreamError
from triton_openai.generation import ScoreJob, ScoreResult, TokenPair
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor, TensorSpec

# In lower case. What a model calls the two texts; plural where one request may hold several documents.
_QUERIES = frozenset({"query", "queries", "question", "text", "text_1", "text1", "text_a", "sentence_1", "sentence1"})
_DOCUMENTS = frozenset(
    {
        *("passage", "passages", "document", "documents", "doc", "docs", "candidate", "candidates"),
        *("text_pair", "text_2", "text2", "text_b", "sentence_2", "sentence2"),
    }
)
# Where a model has several floating outputs, the first of these that it has is the score.
_SCORES = ("score", "scores", "relevance_score", "relevance_scores", "similarity", "logit", "logits")
_FLOATS = ("FP32", "FP16", "FP64")
_INTEGERS = ("INT64", "INT32")
_IDS, _MASK, _SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
# How many pairs go into one request of a model that takes a free number of them.
_FREE_BATCH = 64
# Beside the scores, where a model has them: the place of each in the request, if it has sorted them (as the NIM does),
# and its tokens.
_INDEX, _TOKENS = "index", "token_count"


class _Interface(msgspec.Struct, frozen=True, kw_only=True):
    """
    How pairs are handed over: as ``texts`` (the query's input, the document's), in one ``joint`` input, or as ``ids``.

    ``batch`` is how many of them one request takes. ``many`` is whether a row holds one query and several documents.
    """

    output: str
    batch: int
    texts: tuple[TensorSpec, TensorSpec] | None = None
    joint: TensorSpec | None = None
    ids: tuple[TensorSpec, ...] = ()
    many: bool = False

    @property
    def claim(self) -> str:
        """What the interface is, in words."""
        if self.texts is not None:
            inputs = f"two texts ({self.texts[0].name} and {self.texts[1].name})"
        elif self.joint is not None:
            inputs = f"pairs of texts ({self.joint.name})"
        else:
            inputs = f"token ids ({', '.join(spec.name for spec in self.ids)})"
        return f"{inputs} and a score per pair out ({self.output})"


def _interface(config: ModelConfig, *, any_output: bool) -> _Interface | None:
    """Return how *config* takes pairs; *any_output* is whether its output may have any name."""
    required = [spec for spec in config.inputs.values() if not spec.optional]
    texts = all(spec.datatype == "BYTES" for spec in required)
    output = _score_output(config, any_output=any_output, any_width=texts)
    if output is None:
        return None
    if texts:
        if len(required) == 2:
            return _two_texts(config, required, output)
        if len(required) == 1:
            return _one_joint(config, required[0], output)
        return None
    return _token_ids(config, required, output)


def _score_output(config: ModelConfig, *, any_output: bool, any_width: bool) -> str | None:
    found = {
        spec.name.lower(): spec.name
        for spec in config.outputs.values()
        if spec.datatype in _FLOATS and _is_score(config, spec, any_width=any_width)
    }
    for name in _SCORES:
        if name in found:
            return found[name]
    return next(iter(found.values())) if any_output and len(found) == 1 else None


def _is_score(config: ModelConfig, spec: TensorSpec, *, any_width: bool) -> bool:
    """
    Whether *spec* can be one number per pair: the batch's dimension, if it is written out, and at most a 1.

    Models of texts are often declared with a free width (*any_width*); that of a classifier is its classes.
    """
    rest = spec.dims if config.batching else spec.dims[1:]
    return rest in ((), (1,)) or (any_width and config.batching and rest == (-1,))


def _rows(config: ModelConfig, spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    """Return the dims of one row of *spec*, and how many rows a request takes."""
    if config.batching:
        return spec.dims, config.max_batch_size
    first = spec.dims[0] if spec.dims else 1
    return spec.dims[1:], _FREE_BATCH if first < 0 else first


def _two_texts(config: ModelConfig, required: Sequence[TensorSpec], output: str) -> _Interface | None:
    by_role = {_role(spec): spec for spec in required}
    if by_role.keys() != {"query", "document"}:
        return None
    query, document = by_role["query"], by_role["document"]
    (query_row, _), (document_row, batch) = _rows(config, query), _rows(config, document)
    if config.batching and document_row == (-1,):
        return _Interface(output=output, batch=_FREE_BATCH, texts=(query, document), many=True)
    if not config.batching and document.dims == (-1,) and query.dims in ((1,), ()):
        return _Interface(output=output, batch=_FREE_BATCH, texts=(query, document), many=True)
    if query_row == document_row and document_row in ((), (1,)):
        return _Interface(output=output, batch=batch, texts=(query, document))
    return None


def _role(spec: TensorSpec) -> str:
    name = spec.name.lower()
    return "query" if name in _QUERIES else "document" if name in _DOCUMENTS else name


def _one_joint(config: ModelConfig, spec: TensorSpec, output: str) -> _Interface | None:
    row, batch = _rows(config, spec)
    return _Interface(output=output, batch=batch, joint=spec) if row == (2,) else None


def _token_ids(config: ModelConfig, required: Sequence[TensorSpec], output: str) -> _Interface | None:
    names = {spec.name for spec in required}
    if not ({_IDS, _MASK} <= names <= {_IDS, _MASK, _SEGMENTS}):
        return None
    # One that is optional is given too.
    specs = tuple(config.inputs[name] for name in (_IDS, _MASK, _SEGMENTS) if name in config.inputs)
    if any(spec.datatype not in _INTEGERS or spec.dims != specs[0].dims for spec in specs):
        return None
    row, batch = _rows(config, specs[0])
    return _Interface(output=output, batch=batch, ids=specs) if len(row) == 1 else None


class CrossEncoder(Adapter):
    """Sends as many pairs at a time as the model batches."""

    name = "cross-encoder"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        interface = _interface(config, any_output=True)
        if interface is None:
            raise ConfigurationError(
                f"The model '{config.name}' does not take a query and a document and give one number for them, which "
                "the adapter 'cross-encoder' needs."
            )
        self._interface = interface

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models that take pairs, as texts or as token ids, and whose one number per pair is called a score."""
        interface = _interface(config, any_output=False)
        return None if interface is None else interface.claim

    @property
    def capabilities(self) -> Capabilities:
        """Scores pairs of texts."""
        return Capabilities(score=True, token_pairs=bool(self._interface.ids))

    def encode_scores(self, job: ScoreJob) -> Sequence[InferRequest]:
        """
        Return the pairs in batches.

        Raises :class:`ContextLengthExceeded` for what is longer than the model's fixed length, if it has one.
        """
        return [
            InferRequest(
                model=self.config.name,
                id=f"{job.id}-{number}",
                inputs=tuple(self._inputs(job, places)),
                outputs=tuple(
                    spec.name
                    for spec in self.config.outputs.values()
                    if spec.name == self._interface.output or spec.name.lower() in (_INDEX, _TOKENS)
                ),
                stream=self.config.decoupled,
            )
            for number, places in enumerate(self._batches(job))
        ]

    def decode_scores(self, job: ScoreJob, responses: Sequence[InferResponse]) -> ScoreResult:
        """Return one score per pair."""
        scores: list[float] = []
        tokens: list[int] = []
        names = {name.lower(): name for name in self.config.outputs}
        for places, response in zip(self._batches(job), responses, strict=True):
            found = [float(score) for score in response.numbers(self._interface.output)]
            if len(found) != len(places):
                raise UpstreamError(f"The model sent {len(found)} scores for {len(places)} pairs.")
            if _INDEX in names:
                order = [int(place) for place in response.numbers(names[_INDEX])]
                if sorted(order) != list(range(len(found))):
                    raise UpstreamError("The model sent scores and did not say of which pairs.")
                found = [score for _, score in sorted(zip(order, found, strict=True))]
            scores += found
            if _TOKENS in names:
                tokens += [int(count) for count in response.numbers(names[_TOKENS])]
        counted = len(tokens) == len(job.pairs)
        return ScoreResult(scores=scores, prompt_tokens=sum(tokens) if counted else None)

    def _batches(self, job: ScoreJob) -> Iterator[range]:
        """Yield the places of the pairs that share a request."""
        batch = self._interface.batch
        if self._interface.ids and job.pad_id is None and self._width is None:
            batch = 1
        start = 0
        for _, group in groupby(job.pairs, key=lambda pair: pair[0] if self._interface.many else None):
            end = start + sum(1 for _ in group)
            for first in range(start, end, batch):
                yield range(first, min(first + batch, end))
            start = end

    def _inputs(self, job: ScoreJob, places: range) -> Iterator[Tensor]:
        interface, rows = self._interface, len(places)
        if interface.ids:
            yield from self._id_tensors(job, [job.encoded[place] for place in places])
            return
        pairs = [job.pairs[place] for place in places]
        if interface.joint is not None:
            yield Tensor(interface.joint.name, "BYTES", (rows, 2), [text for pair in pairs for text in pair])
        if interface.texts is None:
            return
        query, document = interface.texts
        documents = [pair[1] for pair in pairs]
        if interface.many:
            yield Tensor(query.name, "BYTES", self.config.wire_shape(query, 1), [pairs[0][0]])
            yield Tensor(document.name, "BYTES", self.config.wire_shape(document, rows), documents)
            return
        row, _ = _rows(self.config, document)
        yield Tensor(query.name, "BYTES", (rows, *row), [pair[0] for pair in pairs])
        yield Tensor(document.name, "BYTES", (rows, *row), documents)

    @property
    def _width(self) -> int | None:
        """The length of every sequence, where the model has a fixed one."""
        width = self._interface.ids[0].dims[-1]
        return width if width > 0 else None

    def _id_tensors(self, job: ScoreJob, encoded: Sequence[TokenPair]) -> Iterator[Tensor]:
        longest = max(len(pair.ids) for pair in encoded)
        width = self._width or longest
        if longest > width:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {width} tokens. However, a query and its document have "
                f"{longest} tokens together."
            )
        if job.pad_id is None and any(len(pair.ids) < width for pair in encoded):
            raise ConfigurationError(
                f"The model '{self.config.name}' takes sequences of {width} tokens, and its tokenizer has no pad token."
            )
        pad = job.pad_id or 0
        for spec in self._interface.ids:
            values: list[int] = []
            for pair in encoded:
                missing = width - len(pair.ids)
                if spec.name == _IDS:
                    values += [*pair.ids, *([pad] * missing)]
                elif spec.name == _MASK:
                    values += [1] * len(pair.ids) + [0] * missing
                else:
                    values += [*pair.segments, *([0] * missing)]
            yield Tensor(spec.name, spec.datatype, (len(encoded), width), values)
