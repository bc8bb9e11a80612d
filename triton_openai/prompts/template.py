"""
A compiled chat template, which renders messages to a prompt, and the probes that find out which messages it takes.

Published templates have different requirements, and do not declare them. Some iterate over a message's content, others
print it. Some read a call's arguments as an object, others as text. Some show calls only if the content is null, others
fail on a null. Mistral's require ids of nine letters and digits; Kimi K2's show only the id of a call. Rendering a
small conversation shows what a template requires.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from traceback import walk_tb
from types import TracebackType
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.prompts.prompt_template import PLAIN, TOOLS_REMEDY, PromptTemplate, Rendering, ToolForm
from triton_openai.prompts.thinking import VARIABLES, thinking_controls
from triton_openai.prompts.tool_schemas import fit_tools, tool_style
from triton_openai.prompts.turn_probes import TurnProbe


class TemplateRefusal(TemplateError):
    """A template called ``raise_exception``: it does not accept the messages, and says why."""


class GenerationBlock(Extension):
    """
    ``{% generation %}…{% endgeneration %}``: marks the model's own words, for training. Renders its body.

    The tag is ``transformers``' AssistantTracker. Its body is a scope, as it is there.
    """

    tags = {"generation"}  # noqa: RUF012 - the type that Extension declares

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body as a scope. Raises jinja2's syntax error where the end tag is missing."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# Attributes of every dict
_DICT = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """Reads fields of messages without the exception for each that jinja2 takes."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute``, or the item where there is no such attribute, as in jinja2."""
        if type(obj) is not dict or attribute in _DICT:
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)


@cache
def _environment() -> _Environment:
    """Return the environment that all templates share; it is never modified."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models were trained on it: jinja2's own filter would escape ``<``, ``>``, ``&`` and ``'``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    """Return the local time, as in transformers. Templates may pass *format* by this name."""
    return datetime.now().strftime(format)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


_MAX_REASON = 1_000


def compiled(source: str) -> tuple[Template, frozenset[str]]:
    """
    Return *source* compiled, and the variables that a rendering has to have.

    Nothing is rendered. Raises :class:`ValueError`, which says what is wrong as the end of a sentence.
    """
    environment = _environment()
    try:
        tree = environment.parse(source)
        template: Template = environment.from_string(source)
        variables = frozenset(meta.find_undeclared_variables(tree)) - frozenset(environment.globals)
    except TemplateSyntaxError as error:
        raise ValueError(f"is wrong in line {error.lineno}: {(error.message or '').rstrip('.')}") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:
        # jinja2 computes constants, which fail in any way, and its parser accepts what Python's compiler refuses, such
        # as too many nested blocks.
        raise ValueError(f"cannot be compiled: {type(error).__name__}") from error
    return template, variables


def check_template(source: str, name: str) -> None:
    """Raise :class:`ConfigurationError` if the chat template *source*, called *name*, does not compile."""
    try:
        compiled(source)
    except ValueError as error:
        raise _broken(name, error) from None


def _broken(name: str, problem: ValueError) -> ConfigurationError:
    return ConfigurationError(f"The chat template '{name}' {problem}. Give another with --chat-template.")


class ChatTemplate(PromptTemplate):
    """
    A chat template, compiled. Immutable; safe in threads.

    *source* is Jinja as Hugging Face models ship it, *name* is its origin for errors, and *special_tokens* are
    variables of every rendering. A template that does not compile raises :class:`ConfigurationError`, or
    :class:`InvalidRequest` if *param* names the request's field that it came in. The constructor renders some
    conversations: call it in a thread.
    """

    def __init__(
        self, source: str, *, name: str, special_tokens: Mapping[str, str] | None = None, param: str | None = None
    ) -> None:
        try:
            self._template, self.variables = compiled(source)
        except ValueError as error:
            if param is None:
                raise _broken(name, error) from None
            raise InvalidRequest(f"The chat template '{name}' {error}", param=param) from None
        # Each rendering copies it, which is much faster for a plain dict than for jinja2's own type.
        self._template.globals = {**_environment().globals, **(special_tokens or {})}
        self.name = name
        self.source = source
        self._probe()

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """
        Return the prompt of prepared *messages*. The rendering's variables may replace special tokens, nothing else.

        Raises :class:`InvalidRequest` if the template refuses the messages (in its own words) or fails.
        """
        context = {
            **rendering.variables,
            "messages": messages,
            "tools": rendering.tools or None,
            "documents": rendering.documents or None,
            "add_generation_prompt": rendering.add_generation_prompt,
        }
        try:
            if rendering.tools and self.tool_style != "any":
                context["tools"] = fit_tools(rendering.tools, self.tool_style)
            return self._template.render(context)
        except Exception as error:
            # A template is a program, and may raise any error.
            what = "messages"
            if rendering.tools and self._refuses(rendering.tools):
                what = "tools"
            raise self._refusal(error, what, rendering.origins.name(what)) from error

    def _refuses(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template refuses even a question with *tools*, but not without them."""
        return self._attempt([_QUESTION]) is not None and self._attempt([_QUESTION], tools) is None

    def _refusal(self, error: Exception, what: str, param: str) -> InvalidRequest:
        """Return the error of a request whose *what* the template refused or failed on; the client calls it *param*."""
        remedy = ""
        if what == "tools":
            remedy = f" {TOOLS_REMEDY}"
        if isinstance(error, TemplateRefusal):
            reason = (error.message or "").strip() or f"The chat template does not accept these {what}."
            return InvalidRequest(reason[:_MAX_REASON] + remedy, param=param)
        if isinstance(error, RecursionError):
            return InvalidRequest(f"The {what} are nested too deeply for the chat template.", param=param)
        reason = f"{_line_of(error.__traceback__)}: {str(error) or type(error).__name__}"
        return InvalidRequest(
            f"The chat template failed on these {what}{reason}"[:_MAX_REASON] + remedy,
            param=param,
            detail=f"chat template '{self.name}': {type(error).__name__}: {error}",
        )

    def _with_parts(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return *messages*, with texts as parts if the template takes only parts."""
        if not self.wants_parts:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def _attempt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return the prompt of *messages* with *tools*; ``None`` if they are not accepted."""
        context = {"messages": self._with_parts(messages), "tools": tools or None, "add_generation_prompt": True}
        try:
            if tools:
                context["tools"] = fit_tools(tools, self.tool_style)
            return self._template.render({"documents": None, **context})
        except Exception:  # noqa: BLE001 - a template is a program, and may raise any error
            return None

    def _shows(self, words: str, *messages: Mapping[str, Any]) -> bool:
        return words in (self._attempt(messages) or "")

    def _names(self, word: str) -> bool:
        return f"'{word}'" in self.source or f'"{word}"' in self.source

    def _shows_developers(self) -> bool:
        """
        Return whether the prompt has a developer's message.

        Some templates only name the role, and some lose the message beside tools.
        """
        messages = [{"role": "developer", "content": _VALUE}, _QUESTION]
        if not self._shows(_VALUE, *messages):
            return False
        if "tools" not in self.variables:
            return True
        with_tools = self._attempt(messages, [_TOOL])
        # A template that refuses this tool shows nothing of messages.
        return with_tools is None or _VALUE in with_tools

    def _probe(self) -> None:
        """Find out which messages the template takes."""
        parts = [{"type": "text", "text": _NAME}, {"type": "text", "text": _VALUE}]
        in_parts = self._attempt([{"role": "user", "content": parts}]) or ""
        # A list that is printed as it is has quotes, in Python's notation or as JSON.
        self.takes_parts = _NAME in in_parts and _VALUE in in_parts and not _QUOTED.search(in_parts)
        self.wants_parts = self.takes_parts and not self._shows(_VALUE, {"role": "user", "content": _VALUE})
        for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}):
            if self.takes_parts and self.image_part is None and self._names(str(part["type"])):
                self.image_part = part
        if self.takes_parts and self._names("audio"):
            self.audio_part = {"type": "audio"}
        self.takes_developers = self._names("developer") and self._shows_developers()
        early, late = ({"role": "system", "content": text} for text in (_NAME, _VALUE))
        # Some show only the last system message, and lose the first one.
        self.takes_late_system = all(
            self._shows(_VALUE, first, late, _QUESTION) and self._shows(str(first["content"]), first, late, _QUESTION)
            for first in (_QUESTION, early)
        )
        try:
            self.render(self._with_parts([_QUESTION]))
        except InvalidRequest as error:
            # A template may be right to refuse a message.
            if not isinstance(error.__cause__, TemplateRefusal):
                self.failure = (
                    f"The chat template '{self.name}' fails on a plain message: {error.message} Give another with "
                    "--chat-template."
                )
        form = self._probe_tools()
        call_turn = None
        if form is not None:
            self.tool_form = form
            call_turn = _conversation(form, _SHORT_ID)
        self.turns = TurnProbe(self._attempt, call_turn).rules()
        if "tools" in self.variables:
            self.tool_style = tool_style(lambda tool: self._attempt([_QUESTION], [tool]))
        if self.variables & VARIABLES:
            tree = _environment().parse(self.source)
            self.thinking = thinking_controls(tree, self.variables, self._rendered_question)

    def _rendered_question(self, variables: Mapping[str, Any]) -> str | None:
        """Return the prompt of a question with *variables*; ``None`` if the template refuses them."""
        try:
            return self.render(self._with_parts([_QUESTION]), Rendering(variables=variables))
        except InvalidRequest:
            return None

    def _probe_tools(self) -> ToolForm | None:
        """Return the form in which tool calls are rendered completely; ``None`` if none is."""
        for text_arguments, null_content, needs_names in itertools.product((False, True), repeat=3):
            form = ToolForm(text_arguments=text_arguments, null_content=null_content, needs_names=needs_names)
            rendered = self._attempt(_conversation(form, _SHORT_ID)) or ""
            # Neither in Python's notation nor as JSON within JSON.
            if _VALUE in rendered and f"'{_KEY}'" not in rendered and f'\\"{_KEY}' not in rendered:
                break
        else:
            return None
        with_long_id = _conversation(form, _LONG_ID)
        if self._attempt(with_long_id) is None:
            form = msgspec.structs.replace(form, ids="short")
        elif self._shows(_LONG_ID, *with_long_id[:2]) and not self._shows(_NAME, *with_long_id[:2]):
            form = msgspec.structs.replace(form, ids="named")
        question, call, answer = _conversation(form, _SHORT_ID)
        for field in ("reasoning_content", "thinking", "reasoning"):
            if self._shows(_THOUGHT, question, {**call, field: _THOUGHT}, answer):
                both = {**call, field: _THOUGHT, "content": _THOUGHT}
                alone = self._attempt([question, both, answer]) is None
                return msgspec.structs.replace(form, reasoning=field, reasoning_alone=alone)
        return form


_NAME = "probed_function"
_KEY = "probed_key"
_VALUE = "probed_value"
_THOUGHT = "probed_thought"
_QUOTED = re.compile(rf"""["']{_NAME}["']""")
_SHORT_ID = "Ab3dE6gH9"
_LONG_ID = "call_0123456789abcdef01234567"
_QUESTION = {"role": "user", "content": "Probe."}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Probes.", "parameters": {"type": "object", "properties": {}}},
}


def _conversation(form: ToolForm, call_id: str) -> list[dict[str, Any]]:
    """Return a question, a call in *form*, and the tool's answer."""
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if form.text_arguments else {_KEY: _VALUE}
    call = {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": arguments}}
    answer = {"role": "tool", "content": "Probed.", "tool_call_id": call_id}
    return [
        _QUESTION,
        {"role": "assistant", "content": None if form.null_content else "", "tool_calls": [call]},
        {**answer, "name": _NAME} if form.needs_names else answer,
    ]


def _line_of(traceback: TracebackType | None) -> str:
    """Return " (line N of the template)" for the innermost template frame, which jinja2 puts in tracebacks."""
    lines = [line for frame, line in walk_tb(traceback) if frame.f_code.co_filename == "<template>"]
    if lines:
        return f" (line {lines[-1]} of the template)"
    return ""
