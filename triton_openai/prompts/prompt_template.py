"""What a chat template takes, and what a rendering gets beside the messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from triton_openai.config.tree import AUTO, NONE
from triton_openai.errors import UnsupportedParameter
from triton_openai.prompts.media_marks import ImageMarks
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.thinking import ThinkingControls, level_of
from triton_openai.prompts.tool_schemas import ToolStyle
from triton_openai.prompts.turns import ANY_ORDER, TurnRules

#: How an operator makes a template take tools, for the errors of those that do not.
TOOLS_REMEDY = "Leave the tools out, or have the operator give the model a template for tools (--chat-template)."


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat template renders messages: its other inputs, and where the prompt ends."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    #: Whether the prompt ends with the last message's text.
    continue_final_message: bool = False
    #: The client's ``chat_template_kwargs``.
    variables: Mapping[str, Any] = {}
    #: How the prompt marks images; without it, messages with images are refused.
    images: ImageMarks | None = None
    #: The same for audio.
    audio: ImageMarks | None = None
    #: Collects the names of the functions whose past calls had arguments that were no object.
    repaired: list[str] | None = None
    #: The client's names, for errors.
    origins: Origins = CHAT_ORIGINS


#: A chat without tools or options.
PLAIN = Rendering()


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of tool calls that a template expects."""

    text_arguments: bool = False
    null_content: bool = False
    #: ``any`` (unchanged), ``short`` (nine letters and digits), or ``named`` (``functions.<name>:<count>``, if the
    #: template shows the function's name nowhere else).
    ids: Literal["any", "short", "named"] = "any"
    needs_names: bool = False
    #: The field for the thinking before a call, and whether the template takes either that or content, but not both (as
    #: gpt-oss's, whose field is ``thinking``).
    reasoning: str = "reasoning_content"
    reasoning_alone: bool = False


class PromptTemplate(ABC):
    """Renders messages to a prompt, and describes the form of messages that it takes. Immutable; thread-safe."""

    #: The template's origin, for people.
    name: str
    #: The template's own text.
    source: str
    #: The variables that it reads besides the messages.
    variables: frozenset[str] = frozenset()
    #: Why it fails on every message, which is the operator's mistake; ``None`` if it works.
    failure: str | None = None
    #: Whether content must be, and may be, a list of parts.
    wants_parts: bool = False
    takes_parts: bool = False
    #: The part that stands for an image; ``None`` if the template ignores images.
    image_part: Mapping[str, Any] | None = None
    #: The same for audio.
    audio_part: Mapping[str, Any] | None = None
    #: Whether it knows the role ``developer``, and whether system messages may follow other messages.
    takes_developers: bool = False
    takes_late_system: bool = True
    tool_form: ToolForm = ToolForm()
    #: How much tools are changed for it.
    tool_style: ToolStyle = "any"
    #: The orders of turns that it does not take, and what it gets instead.
    turns: TurnRules = ANY_ORDER
    #: The variables by which it controls the thinking.
    thinking: ThinkingControls = ThinkingControls()

    def takes_effort(self, effort: str) -> bool:
        """Return whether the template has a control for *effort*, a level of thinking, or does not think at all."""
        if level_of(effort) is None:
            return "reasoning_effort" in self.variables
        if self.thinking.exist or "reasoning_effort" in self.variables:
            return True
        return level_of(effort) == "none" and "think" not in self.source.lower()

    def thinking_variables(self, variables: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """Return a client's *variables* and its *effort* as the variables of this template."""
        adapted = self.thinking.adapted(variables, effort)
        if effort is not None and level_of(effort) is None:
            # A word that only this template has
            adapted.setdefault("reasoning_effort", effort)
        return adapted

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """Return the prompt of prepared *messages*. Raises :class:`InvalidRequest`."""


def marks(
    template: PromptTemplate, setting: str | None, param: str, kind: Literal["image", "audio"] = "image"
) -> ImageMarks:
    """
    Return how prompts of *template* mark parts of a *kind*. *setting* is the operator's placeholder for it.

    Raises :class:`UnsupportedParameter`, with *param*, if neither has a placeholder.
    """
    if setting not in (None, AUTO):
        if setting == NONE:
            return ImageMarks()
        return ImageMarks(placeholder=setting)
    if kind == "image":
        part = template.image_part
        what = "images"
    else:
        part = template.audio_part
        what = "audio"
    if part is None:
        raise UnsupportedParameter(
            f"The model's chat template takes no {what}. If the model does, its placeholder has to be configured "
            f"({kind}_placeholder).",
            param=param,
        )
    return ImageMarks(part=part)
