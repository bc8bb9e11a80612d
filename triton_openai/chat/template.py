"""A compiled chat template: what it can do, and messages rendered to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Protocol

from jinja2 import Template, TemplateSyntaxError, meta

from triton_openai.chat import offload
from triton_openai.chat.environment import TemplateRefusal, shared_environment, start_counting
from triton_openai.chat.images import TakesImages
from triton_openai.chat.prepare import Wishes
from triton_openai.chat.template_analysis import ContentFormat, analyse
from triton_openai.chat.tool_form import ToolForm, probe
from triton_openai.errors import ConfigurationError, InvalidRequest

#: A prompt longer than this is a template gone wild: no body that the service accepts grows to it.
LARGEST_PROMPT = 64 * 1024 * 1024

#: Messages heavier than this are rendered in a thread. A character counts one, and each item (a message is one, each of
#: its fields another) as many as ITEM_WEIGHT: measured with the built-in templates, a message costs 3 to 24 µs, for it
#: is a round of the template's loop, and a character 1 to 3 ns. So what runs on the event loop holds it for about 1 ms.
#: Rendering is Python: the thread shares the interpreter lock, but lets the event loop take its turn every 5 ms.
INLINE_WEIGHT = 100_000
ITEM_WEIGHT = 500

_LONGEST_REASON = 1_000


class PromptTemplate(Wishes, TakesImages, Protocol):
    """What makes a prompt of messages; :class:`ChatTemplate` is one."""

    @property
    def name(self) -> str:
        """Where the template comes from, in words."""

    @property
    def source(self) -> str:
        """The template's own text."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt. Raises :class:`InvalidRequest`."""

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Do :meth:`render` without holding the event loop."""


class ChatTemplate:
    """
    A chat template, compiled. Immutable; safe in threads.

    *source* is Jinja as Hugging Face models ship it, *name* says where it comes from (shown in errors),
    *special_tokens* are given to every rendering. A template that does not compile is the operator's mistake
    (:class:`ConfigurationError`) unless *param* names the field of a request that it came in
    (:class:`InvalidRequest` with that param).
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        param: str | None = None,
        largest_prompt: int = LARGEST_PROMPT,
    ) -> None:
        environment = shared_environment()
        try:
            tree = environment.parse(source)
            self._template: Template = environment.from_string(source)
            # First: what comes next compiles the tree, and folds lists of constants in it to one.
            self._analysis = analyse(tree)
            undeclared = meta.find_undeclared_variables(tree)
        except TemplateSyntaxError as error:
            _raise_unusable(
                f"The chat template '{name}' is wrong in line {error.lineno}: {(error.message or '').rstrip('.')}",
                param,
            )
        except RecursionError:
            _raise_unusable(f"The chat template '{name}' is nested too deeply", param)
        except (SyntaxError, UnicodeError, ValueError, OverflowError) as error:
            # What the parser takes and Python's compiler does not, such as too many nested blocks.
            _raise_unusable(f"The chat template '{name}' cannot be compiled: {type(error).__name__}", param)
        self._name = name
        self._source = source
        self._special_tokens = MappingProxyType(dict(special_tokens or {}))
        self._variables = frozenset(undeclared) - frozenset(environment.globals)
        self._largest_prompt = largest_prompt

    @property
    def source(self) -> str:
        """The template's own text, by whose markers a model's format of tool calls can be recognised."""
        return self._source

    @property
    def name(self) -> str:
        """Where the template comes from, in words."""
        return self._name

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads: says whether ``tools`` or ``enable_thinking`` do anything."""
        return self._variables

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The tokens that every rendering is given."""
        return self._special_tokens

    @property
    def wants_parts(self) -> bool:
        """Whether content must be a list of parts, because the template would loop over a string's characters."""
        return self._analysis.content_format is ContentFormat.PARTS

    @property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts."""
        return self._analysis.content_format is not ContentFormat.STRING

    @property
    def image_part(self) -> Mapping[str, Any] | None:
        """The part that stands for an image, as ``transformers`` has it; ``None`` where the template knows none."""
        if self.takes_parts:
            for name, part in (("image", {"type": "image"}), ("image_url", {"type": "image_url", "image_url": {}})):
                if name in self._analysis.constants:
                    return part
        return None

    @cached_property
    def tool_form(self) -> ToolForm:
        """How tool calls in messages have to be written; found out by rendering some, once."""
        empty: Any = [{"type": "text", "text": ""}] if self.wants_parts else ""
        return probe(self._attempt, null_first=self._analysis.tests_null_content, empty=empty)

    @cached_property
    def takes_developers(self) -> bool:
        """Whether a message of the role ``developer`` comes into the prompt: some templates name the role only."""
        if "developer" not in self._analysis.constants:
            return False
        words = "Probed instructions."
        messages = [{"role": "developer", "content": words}, {"role": "user", "content": "Probe."}]
        return words in (self._attempt(messages) or "")

    def _attempt(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        if self.wants_parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message["content"], str)
                else message
                for message in messages
            ]
        try:
            return self.render(messages)
        except InvalidRequest:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """
        Return the prompt for *messages* (plain dicts, see ``messages.prepare``).

        *variables* are further ones for the template; they may replace special tokens but nothing else. Raises
        :class:`InvalidRequest` with ``param="messages"`` when the template refuses (with its own words), fails, or
        makes a prompt without end.
        """
        context = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        start_counting()
        try:
            for piece in self._template.generate(context):
                length += len(piece)
                if length > self._largest_prompt:
                    break
                pieces.append(piece)
        except TemplateRefusal as refusal:
            reason = (refusal.message or "").strip() or "The chat template does not accept these messages."
            raise InvalidRequest(reason[:_LONGEST_REASON], param="messages") from refusal
        except RecursionError as error:
            raise InvalidRequest(
                "The messages are nested too deeply for the chat template.", param="messages"
            ) from error
        except Exception as error:
            # A template is a program, and fails in any way that programs fail.
            reason = f"{_line_of(error.__traceback__)}: {str(error) or type(error).__name__}"
            raise InvalidRequest(
                f"The chat template failed on these messages{reason}"[:_LONGEST_REASON],
                param="messages",
                detail=f"chat template '{self._name}': {type(error).__name__}: {error}",
            ) from error
        if length > self._largest_prompt:
            raise InvalidRequest(
                f"The chat template makes a prompt of more than {self._largest_prompt} characters.", param="messages"
            )
        return "".join(pieces)

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Do :meth:`render` without holding the event loop for long messages. Raises the same."""
        given = [list(messages), list(tools or ()), list(documents or ())]
        return await offload.run(
            lambda: self.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                **variables,
            ),
            size=offload.weigh(given, INLINE_WEIGHT, per_item=ITEM_WEIGHT),
            threshold=INLINE_WEIGHT,
        )


def _raise_unusable(message: str, param: str | None) -> NoReturn:
    """Blame whoever gave the template: the client when it came in a *param*, else the operator."""
    if param is None:
        raise ConfigurationError(f"{message}. Give another with --chat-template.")
    raise InvalidRequest(message, param=param)


def _line_of(traceback: TracebackType | None) -> str:
    """Return " (line N of the template)" for the innermost template frame, which jinja2 puts in tracebacks."""
    line: int | None = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" (line {line} of the template)"
