"""
History templates: the Liquid texts with which openai_trtllm makes prompts.

Such a template sees ``items``, the messages, each with an ``identity`` (``System``, ``User``, ``Assistant`` or
``Tool``), its ``content``, and the ``name`` of a system's or user's message, else nil. Unknown variables and filters
are errors, as they are in the Liquid of openai_trtllm. It knows nothing else, so what else a chat may ask for is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter
from triton_openai.prompts.messages import PLAIN, Rendering
from triton_openai.prompts.template_analysis import ToolForm

#: A prompt of more bytes is a template gone wild.
LARGEST_PROMPT = 64 * 1024 * 1024
#: Rounds of all loops of one rendering: a template needs a few for each message.
MOST_ROUNDS = 1_000_000

_IDENTITIES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_NAMED = frozenset({"system", "user"})
_LONGEST_REASON = 1_000
# One of each kind: what a template cannot do with these it can do with no chat.
_SAMPLE = tuple({"role": role, "content": "text", "name": "name"} for role in (*_IDENTITIES, "user"))


class HistoryTemplate:
    """
    A history template, compiled. Immutable; safe in threads.

    *origin* is the setting it comes from, for errors. Raises :class:`ConfigurationError` for a text that is no Liquid,
    or that fails on an ordinary chat, and where the package that reads Liquid is not installed.
    """

    def __init__(self, source: str, *, origin: str, largest_prompt: int = LARGEST_PROMPT) -> None:
        self._name = origin
        self._source = source
        self._render = _compile(source, origin, largest_prompt)
        try:
            self.render(_SAMPLE)
        except InvalidRequest as error:
            raise ConfigurationError(f"The history template given by {origin} fails: {error.message}") from error

    @property
    def name(self) -> str:
        """Where the template comes from, in words."""
        return self._name

    @property
    def source(self) -> str:
        """The template's own text."""
        return self._source

    @property
    def variables(self) -> frozenset[str]:
        """What the template reads of a request beside its messages: nothing."""
        return frozenset()

    @property
    def failure(self) -> None:
        """A template that fails is refused when it is read."""
        return None

    @property
    def wants_parts(self) -> bool:
        """Content is text."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Content is text."""
        return False

    @property
    def image_part(self) -> None:
        """Nothing stands for an image."""

    @property
    def takes_developers(self) -> bool:
        """There are four identities, and a developer is a system."""
        return False

    @property
    def tool_form(self) -> ToolForm:
        """The usual one: calls are refused when they are rendered."""
        return ToolForm()

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """
        Return the prompt for *messages* (plain dicts, see ``messages.prepare``).

        Raises :class:`UnsupportedParameter` for what a history template cannot express, and :class:`InvalidRequest`
        with ``param="messages"`` when it fails or makes a prompt without end.
        """
        for name, given in (
            ("tools", rendering.tools),
            ("documents", rendering.documents),
            ("chat_template_kwargs", rendering.variables),
            ("add_generation_prompt", not rendering.add_generation_prompt),
        ):
            if given:
                raise UnsupportedParameter(f"The model's history template does not take '{name}'.", param=name)
        return self._render([_item(message, index) for index, message in enumerate(messages)])


def load(text: str | None, file: Path | None) -> tuple[HistoryTemplate, str] | None:
    """
    Return the template of ``history_template`` or ``history_template_file`` and where it came from, if either is
    given. Raises :class:`ConfigurationError`.
    """
    if text is not None:
        return HistoryTemplate(text, origin="history_template"), "Liquid (history_template)"
    if file is None:
        return None
    try:
        # Not as lines: what they end with is part of the prompt.
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The file {file} given by history_template_file is not UTF-8.") from error
    except OSError as error:
        raise ConfigurationError(
            f"The file {file} given by history_template_file cannot be read: {error.strerror}."
        ) from error
    return HistoryTemplate(text, origin="history_template_file"), f"Liquid {file} (history_template_file)"


def _item(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if message.get("tool_calls"):
        raise UnsupportedParameter(
            "The model's history template does not take tool calls.", param=f"messages[{index}].tool_calls"
        )
    role = message["role"]
    return {
        "identity": _IDENTITIES[role],
        "content": message["content"],
        "name": message.get("name") if role in _NAMED else None,
    }


def _compile(source: str, origin: str, largest_prompt: int) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    # An extra: who needs no Liquid need not install it.
    try:
        from liquid import Environment, FalsyStrictUndefined, RenderContext
        from liquid.exceptions import LiquidError, OutputStreamLimitError
        from liquid.output import LimitedStringIO
    except ImportError as error:
        raise ConfigurationError(
            f"{origin} needs a package that is not installed: pip install 'triton-openai[liquid]'."
        ) from error

    class Bounded(Environment):
        """Liquid that comes to an end."""

        loop_iteration_limit = MOST_ROUNDS
        local_namespace_limit = largest_prompt

    class Verbatim(RenderContext):
        """Gives buffers that are bounded, and that leave line breaks as they are: the package's own turn them all."""

        def get_buffer(self, buf: TextIO | None = None) -> LimitedStringIO:
            used = buf.size if isinstance(buf, LimitedStringIO) else 0
            return LimitedStringIO(limit=largest_prompt - used, newline="")

    try:
        template = Bounded(undefined=FalsyStrictUndefined).from_string(source)
    except (LiquidError, RecursionError) as error:
        raise ConfigurationError(f"The history template given by {origin} is no Liquid: {_words(error)}.") from error

    def render(items: Sequence[Mapping[str, Any]]) -> str:
        try:
            context = Verbatim(template, globals=template.make_globals({"items": items}))
            buffer = context.get_buffer()
            template.render_with_context(context, buffer)
            return buffer.getvalue()
        except OutputStreamLimitError as error:
            raise InvalidRequest(
                f"The history template makes a prompt of more than {largest_prompt} bytes.", param="messages"
            ) from error
        except Exception as error:
            # A template is a program, and fails in any way that programs fail.
            raise InvalidRequest(
                f"The history template failed on these messages: {_words(error)}."[:_LONGEST_REASON],
                param="messages",
                detail=f"{type(error).__name__}: {error}",
            ) from error

    return render


def _words(error: Exception) -> str:
    """Return what *error* says, without the excerpt of the template that may follow."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
