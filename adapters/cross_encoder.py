"""
Cross-encoders, as people deploy them: a query and a document in, one number out that says how well they fit.

There is no standard for their tensor names. Three kinds of mapping are known, each with a floating output of one
number per pair: two texts (``query`` and ``passage`` in NVIDIA's reranking NIM); one text input of two elements
(``INPUT_PAIRS [2]``); and the token ids of an exported Hugging Face model (``input_ids``, ``attention_mask``, perhaps
``token_type_ids``), which are made here. Names decide only what shapes leave open: which text is the query, and
whether the number is a score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from triton_openai.adapters._common.base import Adapter, Capabilities
from triton_openai.adapters._common.tensor_mapping import FLOATS, id_batches, id_inputs, id_tensors
from triton_openai.errors import ConfigurationError
from triton_openai.jobs import ScoreJob, ScoreResult
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
# Documents in a request of a model that takes any number of them for a query.
_FREE_BATCH = 64
# Beside the scores, where a model has them: the place of each in the request, if it has sorted them (as the NIM does),
# and its tokens.
_INDEX = "index"
_TOKENS = "token_count"


class _TensorMapping(msgspec.Struct, frozen=True, kw_only=True):
    """How pairs are handed over."""

    #: What the inputs are:
    #:
    #: - ``texts``: a query for each pair, and a document for each,
    #: - ``documents``: one query, and its documents,
    #: - ``joint``: both texts of a pair in one input,
    #: - ``ids``: those of :func:`id_inputs`.
    kind: Literal["texts", "documents", "joint", "ids"]
    inputs: tuple[TensorSpec, ...]
    output: str
    #: The most pairs in one request.
    batch: int

    @property
    def claim(self) -> str:
        """What the interface is, in words."""
        what = {"joint": "pairs of texts", "ids": "token ids"}.get(self.kind, "two texts")
        names = ", ".join(spec.name for spec in self.inputs)
        return f"{what} ({names}) and a score per pair out ({self.output})"


def _mapping(config: ModelConfig, *, any_output: bool) -> _TensorMapping | None:
    """Return how *config* takes pairs; *any_output* is whether its output may have any name."""
    required = config.required
    texts = all(spec.datatype == "BYTES" for spec in required)
    output = _score_output(config, any_output=any_output, any_width=texts)
    if output is None or not required:
        return None
    if not texts:
        ids = tuple(id_inputs(config).values())
        if ids:
            return _TensorMapping(kind="ids", inputs=ids, output=output, batch=config.batch_size(ids[0]))
        return None
    first = required[0]
    batch = config.batch_size(required[0])
    if len(required) == 1:
        joint = config.row_dims(first) == (2,)
        if joint:
            return _TensorMapping(kind="joint", inputs=(first,), output=output, batch=batch)
        return None
    by_role = {_role(spec): spec for spec in required}
    if len(required) != 2 or by_role.keys() != {"query", "document"}:
        return None
    query = by_role["query"]
    document = by_role["document"]
    inputs = (query, document)
    one_query = config.batching or query.dims in ((1,), ())
    if one_query and (config.row_dims(document) if config.batching else document.dims) == (-1,):
        return _TensorMapping(kind="documents", inputs=inputs, output=output, batch=_FREE_BATCH)
    if config.row_dims(query) == config.row_dims(document) and config.row_dims(document) in ((), (1,)):
        return _TensorMapping(kind="texts", inputs=inputs, output=output, batch=config.batch_size(document))
    return None


def _score_output(config: ModelConfig, *, any_output: bool, any_width: bool) -> str | None:
    """
    Return the output that has one number per pair: the batch's dimension, if it is written out, and at most a 1.

    Models of texts are often declared with a free width (*any_width*); that of a classifier is its classes.
    """
    widths: list[tuple[int, ...]] = [(), (1,), *([(-1,)] if any_width and config.batching else [])]
    outputs = {
        spec.name.lower(): spec.name
        for spec in config.outputs.values()
        if spec.datatype in FLOATS and config.row_dims(spec) in widths
    }
    named = [outputs[name] for name in _SCORES if name in outputs]
    if not named and any_output and len(outputs) == 1:
        named = list(outputs.values())
    if named:
        return named[0]
    return None


def _role(spec: TensorSpec) -> str:
    name = spec.name.lower()
    if name in _QUERIES:
        return "query"
    if name in _DOCUMENTS:
        return "document"
    return name


class CrossEncoder(Adapter):
    """Sends as many pairs at a time as the model batches."""

    name = "cross-encoder"
    jobs = (ScoreJob,)

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        mapping = _mapping(config, any_output=True)
        if mapping is None:
            raise ConfigurationError(
                f"The model '{config.name}' does not take a query and a document and give one number for them, which "
                "the adapter 'cross-encoder' needs."
            )
        self._mapping = mapping
        self._ids = mapping.kind == "ids"
        self.capabilities = Capabilities(tokens=self._ids)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models that take pairs, as texts or as token ids, and whose one number per pair is called a score."""
        mapping = _mapping(config, any_output=False)
        if mapping is None:
            return None
        return mapping.claim

    def encode(self, job: ScoreJob, /) -> Sequence[InferRequest]:
        """
        Return the pairs in batches.

        Raises :class:`ContextLengthExceeded` for what is longer than the model's fixed length, if it has one.
        """
        lower_names = {self._mapping.output.lower(), _INDEX, _TOKENS}
        outputs = [name for name in self.config.outputs if name.lower() in lower_names]
        return [
            self.request(f"{job.id}-{number}", list(self._inputs(job, places)), outputs)
            for number, places in enumerate(self._batches(job))
        ]

    def decode(self, job: ScoreJob, responses: Sequence[InferResponse], /) -> ScoreResult:
        scores: list[float] = []
        tokens: list[int] = []
        names = {name.lower(): name for name in self.config.outputs}
        for places, response in zip(self._batches(job), responses, strict=True):
            part = [float(score) for score in response.numbers(self._mapping.output)]
            if len(part) != len(places):
                detail = f"{len(part)} scores for {len(places)} pairs"
                raise response.invalid("it has more or fewer scores than the request has pairs", detail=detail)
            if _INDEX in names:
                order = response.integers(names[_INDEX])
                if sorted(order) != list(range(len(part))):
                    raise response.invalid("it does not say for which pairs the scores are")
                part = [score for _, score in sorted(zip(order, part, strict=True))]
            scores += part
            if _TOKENS in names:
                tokens += response.integers(names[_TOKENS])
        counted = len(tokens) == len(job.pairs)
        return ScoreResult(scores=scores, prompt_tokens=sum(tokens) if counted else None)

    def _batches(self, job: ScoreJob) -> Iterator[range]:
        """Yield the places of the pairs that share a request."""
        specs = self._mapping.inputs
        if self._ids:
            yield from id_batches(self.config, specs[0], [len(pair.ids) for pair in job.encoded], job.pad_id)
            return
        start = 0
        batch = self._mapping.batch
        for _, group in groupby(job.pairs, key=lambda pair: self._mapping.kind == "documents" and pair[0]):
            end = start + sum(1 for _ in group)
            for first in range(start, end, batch):
                yield range(first, min(first + batch, end))
            start = end

    def _inputs(self, job: ScoreJob, places: range) -> Iterator[Tensor]:
        kind = self._mapping.kind
        specs = self._mapping.inputs
        rows = len(places)
        if kind == "ids":
            by_use = {spec.name: spec for spec in specs}
            yield from id_tensors(self.config, by_use, [job.encoded[index] for index in places], job.pad_id)
            return
        pairs = [job.pairs[index] for index in places]
        if kind == "joint":
            yield Tensor(specs[0].name, "BYTES", (rows, 2), [text for pair in pairs for text in pair])
            return
        for spec, texts in zip(specs, zip(*pairs, strict=True), strict=True):
            if kind == "texts":
                yield Tensor(spec.name, "BYTES", (rows, *self.config.row_dims(spec)), texts)
            else:
                if spec is specs[0]:
                    column = texts[:1]
                else:
                    column = texts
                yield Tensor(spec.name, "BYTES", self.config.wire_shape(spec, len(column)), column)
