"""A compiled chat template: what it can do, and messages rendered to a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Protocol

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.prompts.messages import PLAIN, Rendering, TakesImages, Wishes
from triton_openai.prompts.template_analysis import ContentFormat, ToolForm, analyse, probe


class TemplateRefusal(TemplateError):
    """A template called ``raise_exception``: it does not accept the messages, and says why."""


class GenerationBlock(Extension):
    """
    ``{% generation %}…{% endgeneration %}``: marks the model's own words, for training. Renders its body.

    The tag is ``transformers``' AssistantTracker; a scope of its own, because there it is a call block.
    """

    tags = {"generation"}  # noqa: RUF012 - the type that Extension declares

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body as a scope. Raises jinja2's syntax error where the end tag is missing."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def build_environment(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return a new environment; *now* is the clock behind ``strftime_now`` (local time, as in transformers)."""

    def strftime_now(format: str) -> str:  # templates may pass it by this name
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


@cache
def shared_environment() -> ImmutableSandboxedEnvironment:
    """Return the one environment that all templates share; it is never changed after it was made."""
    return build_environment()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models were trained on it: jinja2's own filter would escape ``<``, ``>``, ``&`` and ``'``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


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

    @property
    def failure(self) -> str | None:
        """Why the template fails on every message, ``None`` where it does not."""

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """Return the prompt. Raises :class:`InvalidRequest`."""


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
        except Exception as error:  # noqa: BLE001 - jinja2 computes constants, which fail in any way
            # What the parser takes and Python's compiler does not, such as too many nested blocks.
            _raise_unusable(f"The chat template '{name}' cannot be compiled: {type(error).__name__}", param)
        self._name = name
        self._source = source
        self._special_tokens = MappingProxyType(dict(special_tokens or {}))
        self._variables = frozenset(undeclared) - frozenset(environment.globals)

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
    def failure(self) -> str | None:
        """
        Why the template fails on a plain message, which makes it the operator's mistake.

        ``None`` where it does not, and where it refuses the message in its own words.
        """
        content: Any = [{"type": "text", "text": "Hello"}] if self.wants_parts else "Hello"
        try:
            self.render([{"role": "user", "content": content}])
        except InvalidRequest as error:
            if not isinstance(error.__cause__, TemplateRefusal):
                return (
                    f"The chat template '{self._name}' fails on a plain message: {error.message} Give another with "
                    "--chat-template."
                )
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

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """
        Return the prompt for *messages* (plain dicts, see ``messages.prepare``).

        The rendering's variables may replace special tokens but nothing else. Raises :class:`InvalidRequest` with
        ``param="messages"`` when the template refuses (with its own words) or fails.
        """
        context = {
            **self._special_tokens,
            **rendering.variables,
            "messages": messages,
            "tools": rendering.tools or None,
            "documents": rendering.documents or None,
            "add_generation_prompt": rendering.add_generation_prompt,
        }
        try:
            return self._template.render(context)
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
