"""
The Jinja environment that chat templates of Hugging Face models are written for.

What it offers (trimmed blocks, ``break``/``continue``, ``{% generation %}``, a plain ``tojson``,
``raise_exception``, ``strftime_now``) is what ``transformers.utils.chat_template_utils`` gives templates. Templates
come from strangers' repositories, hence the sandbox: no private attributes, no change of what they are given, and an
account of their work (:mod:`triton_openai.chat.work`), so that none runs for ever or takes all memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from triton_openai.chat import costs, metering
from triton_openai.chat.work import CHARACTERS_PER_STEP, MOST_STEPS, Work, size

#: The most items that ``"text" * n`` or ``[…] * n`` may make.
LARGEST_PRODUCT = 1_000_000
_LONGEST_DATE_FORMAT = 1_000


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


class MeteredContext(Context):
    """One rendering, with its account."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.work = Work(MOST_STEPS)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # jinja2's word for it
        """Return a context for a block, on the same account."""
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.work = self.work
        return context


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """
    The sandbox, with an account of the work.

    Operators are intercepted also because jinja2 computes those of constants while it compiles.
    """

    context_class = MeteredContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        """Compile *source*; jinja2 offers this method to be overridden."""
        metering.meter(source)
        return super()._generate(source, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """
        Compute *left* *operator* *right*.

        Raises :class:`SecurityError` when the result would be too large, :class:`RunawayTemplate` when it costs more
        than is left.
        """
        if type(left) is str and type(right) is str and operator == "+":
            length = len(left) + len(right)
            if length >= CHARACTERS_PER_STEP:
                costs.work_of(context).charge_text(length)
            return left + right
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self._check(len(many) * times)
        costs.charge_operator(costs.work_of(context), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Call what a template calls. Raises :class:`RunawayTemplate`, and whatever the call raises."""
        costs.charge_call(costs.work_of(__context), __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is int:
            costs.check_number(result.bit_length())
        return result

    @staticmethod
    def _check(size: int) -> None:
        if size > LARGEST_PRODUCT:
            raise SecurityError(f"an expression would make {size} items; at most {LARGEST_PRODUCT} are allowed")


def build_environment(now: Callable[[], datetime] = datetime.now) -> ChatEnvironment:
    """Return a new environment; *now* is the clock behind ``strftime_now`` (local time, as in transformers)."""

    def strftime_now(format: str) -> str:  # templates may pass it by this name
        if len(format) > _LONGEST_DATE_FORMAT:
            raise SecurityError(f"a date's format of more than {_LONGEST_DATE_FORMAT} characters")
        return now().strftime(format)

    environment = ChatEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.filters = {
        **costs.charged_filters(environment.filters),
        metering.ROUND: _round,
        metering.WEIGHED: _weighed,
        metering.SIZED: _sized,
        metering.JOINED: _joined,
    }
    environment.tests = costs.charged_tests(environment.tests)
    # It writes random filler.
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


@cache
def shared_environment() -> ChatEnvironment:
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


@pass_context
def _round(context: Context, value: None, steps: int) -> None:
    """Charge for a round of a loop, or a call of a macro; templates cannot gain by it."""
    costs.work_of(context).charge(steps if steps > 0 else 1)


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    """Return *value* after charging for reading all of it."""
    if type(value) is not str or len(value) >= CHARACTERS_PER_STEP:
        work = costs.work_of(context)
        work.charge_text(work.weigh(value))
    return value


@pass_context
def _sized(context: Context, value: Any) -> Any:
    """Return *value* after charging for a look at each of its items, which is a small part of a step."""
    if isinstance(value, str):
        costs.work_of(context).charge_text(len(value))
    elif not isinstance(value, dict):
        costs.work_of(context).charge(size(value) >> 5)
    return value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    """Return the texts of *values* one after the other: what ``~`` does."""
    work = costs.work_of(context)
    work.charge_text(sum(len(value) if type(value) is str else work.weigh(value) for value in values))
    return markup_join(values) if context.eval_ctx.autoescape else str_join(values)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Return a *value* that is to be written, after charging for its text."""
    if type(value) is not str:
        work = costs.work_of(context)
        work.charge_text(work.weigh(value))
    elif len(value) >= CHARACTERS_PER_STEP:
        costs.work_of(context).charge_text(len(value))
    return value


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))
