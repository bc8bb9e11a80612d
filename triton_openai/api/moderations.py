"""
``POST /v1/moderations``: which of OpenAI's categories of harmful content a text falls into.

Source of the wire format: OpenAI's ``moderation`` (openai-openapi 2.3.0). A model's settings say which categories its
labels stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.answer.job_run import activation_of, apply_activation, labels_of
from triton_openai.api.bodies import MAX_ITEMS, ModelRequest, json_reply_of, new_id
from triton_openai.api.service import Service, begin
from triton_openai.config.tree import Category, ModerationSettings
from triton_openai.config.validation import did_you_mean
from triton_openai.errors import ConfigurationError, InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.jobs import ClassificationJob
from triton_openai.models.lookup import MODERATION_DEFAULT
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Reply

_T = TypeVar("_T")
#: All categories, each of which every result has.
CATEGORIES: Sequence[Category] = get_args(Category)
_NAMES = {name.replace("/", "_").replace("-", "_"): name for name in CATEGORIES}
_TEXT: Sequence[Literal["text"]] = ("text",)


class TextInput(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImageInput(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image; not supported."""

    image_url: Any = None


Item: TypeAlias = str | TextInput | ImageInput


class ModerationRequest(ModelRequest, kw_only=True):
    """
    The request. ``input`` is a text, texts, or the parts of one input; no part can be an image.

    Without a ``model``, it is for the only classifier that is set up for it, as it is under OpenAI's names.
    """

    model: str = MODERATION_DEFAULT
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_ITEMS)]


class ByCategory(msgspec.Struct, Generic[_T], frozen=True, rename=_NAMES):
    """A value for each category."""

    harassment: _T
    harassment_threatening: _T
    hate: _T
    hate_threatening: _T
    illicit: _T
    illicit_violent: _T
    self_harm: _T
    self_harm_instructions: _T
    self_harm_intent: _T
    sexual: _T
    sexual_minors: _T
    violence: _T
    violence_graphic: _T


class Categories(ByCategory[bool], frozen=True):
    """Whether a text falls into each category."""


class CategoryScores(ByCategory[float], frozen=True):
    """How probable each category is."""


class CategoryInputTypes(ByCategory[Sequence[Literal["text"]]], frozen=True):
    """The types of input that each category applies to."""


class ModerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One input: ``flagged`` if it falls into any category. Categories that no label stands for apply to nothing."""

    flagged: bool
    categories: Categories
    category_scores: CategoryScores
    category_applied_input_types: CategoryInputTypes


class Moderation(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    model: str
    results: Sequence[ModerationResult]


async def handle(service: Service, call: Call[ModerationRequest]) -> Reply:
    """Find harmful content in texts."""
    context = await begin(service, call)
    model = context.model
    rules = model.settings.moderation
    if not rules.labels:
        raise InvalidRequest(
            f"The model '{model.name}' cannot moderate: its settings do not say which categories its labels stand for "
            "('moderation').",
            param="model",
        )
    job = ClassificationJob(id=new_id("modr"), inputs=_inputs(context.body.input))
    result = await context.result_of(job)
    tokenizer = (await model.prompter()).tokenizer
    activation = activation_of(model, tokenizer)
    classes = _classes(model, rules, labels_of(result, tokenizer), len(result.values[0]))

    def answer() -> Moderation:
        results = [_rated(apply_activation(values, activation), classes, rules) for values in result.values]
        return Moderation(id=job.id, model=context.body.model, results=results)

    return await json_reply_of(answer, cost=10 * offload.ITEM * len(result.values))


def _inputs(value: str | Sequence[Item]) -> Sequence[str]:
    """Return the texts to classify; the parts of an input are one. Raises :class:`InvalidRequest` for images."""
    items: Sequence[Item] = value
    if isinstance(value, str):
        items = [value]
    for index, item in enumerate(items):
        if isinstance(item, ImageInput):
            raise UnsupportedParameter("Images are not supported; only text is.", param=f"input[{index}].image_url")
    texts = [item for item in items if isinstance(item, str)]
    parts = [item.text for item in items if isinstance(item, TextInput)]
    if texts and parts:
        raise InvalidRequest("'input' must hold either texts or parts.", param="input", code="invalid_type")
    inputs = texts or ["\n".join(parts)]
    if not all(inputs):
        raise InvalidValue("'input' must not hold an empty item.", "input")
    return inputs


def _classes(
    model: ServedModel, rules: ModerationSettings, labels: Mapping[int, str], count: int
) -> Sequence[tuple[int, Category]]:
    """
    Return which of the *count* classes stand for a category. One without a label goes by its number.

    Raises :class:`ConfigurationError` for a label in the settings that the model does not have.
    """
    numbers = {labels.get(number, str(number)): number for number in range(count)}
    for label in rules.labels:
        if label not in numbers:
            raise ConfigurationError(
                f"The settings of the model '{model.name}' map the label '{label}', which it does not have."
                f"{did_you_mean(label, numbers)}",
                param="model",
            )
    return [(numbers[label], category) for label, category in rules.labels.items()]


def _rated(
    probabilities: Sequence[float], classes: Sequence[tuple[int, Category]], rules: ModerationSettings
) -> ModerationResult:
    """Return the result for one input. A category with several labels has the score of the likeliest."""
    scores: dict[Category, float] = {}
    for number, category in classes:
        scores[category] = max(scores.get(category, 0.0), probabilities[number])
    flags = dict.fromkeys(CATEGORIES, False)
    types: dict[Category, Sequence[Literal["text"]]] = dict.fromkeys(CATEGORIES, ())
    for category, score in scores.items():
        flags[category] = score >= rules.thresholds.get(category, rules.threshold)
        types[category] = _TEXT
    return ModerationResult(
        flagged=any(flags.values()),
        categories=Categories(*flags.values()),
        category_scores=CategoryScores(*(scores.get(category, 0.0) for category in CATEGORIES)),
        category_applied_input_types=CategoryInputTypes(*types.values()),
    )
