"""
The Jinja environment that chat templates of Hugging Face models are written for.

What it offers (trimmed blocks, ``break``/``continue``, ``{% generation %}``, a plain ``tojson``,
``raise_exception``, ``strftime_now``) is what ``transformers.utils.chat_template_utils`` gives templates. Templates
come from strangers' repositories, hence the sandbox: no private attributes, no change of what they are given, no way to
ask for absurd amounts of memory in one product, and no loops without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: The most items that ``"text" * n`` or ``[…] * n`` may make, and the largest result of ``**`` in bits.
LARGEST_PRODUCT = 1_000_000


#: The most rounds that all loops of one rendering may make together: some hundred times those of the longest chats.
MOST_STEPS = 1_000_000
# No name that a template could write.
_STEP = "one more step"
_steps: ContextVar[int] = ContextVar("steps", default=0)


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


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with products and powers kept to a sensible size, and loops to a sensible number of rounds."""

    intercepted_binops = frozenset({"*", "**"})

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        # The place that jinja2 has for what is done to a template before it is compiled.
        for loop in source.find_all(nodes.For):
            where: dict[str, Any] = {"lineno": loop.lineno, "environment": self}
            step = nodes.Filter(nodes.Const(True, **where), _STEP, [], [], None, None, **where)
            if loop.test is None:
                loop.body.insert(0, nodes.ExprStmt(step, **where))
            else:
                # An item that is left out is looked at as well.
                loop.test = nodes.And(step, loop.test, **where)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute *left* *operator* *right*. Raises :class:`SecurityError` when the result would be too large."""
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self._check(len(many) * times)
        elif isinstance(left, int) and isinstance(right, int):
            self._check(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _check(size: int) -> None:
        if size > LARGEST_PRODUCT:
            raise SecurityError(f"an expression would make {size} items; at most {LARGEST_PRODUCT} are allowed")


def build_environment(now: Callable[[], datetime] = datetime.now) -> ChatEnvironment:
    """Return a new environment; *now* is the clock behind ``strftime_now`` (local time, as in transformers)."""

    def strftime_now(format: str) -> str:  # templates may pass it by this name
        return now().strftime(format)

    environment = ChatEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters[_STEP] = _step
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


@cache
def shared_environment() -> ChatEnvironment:
    """Return the one environment that all templates share; it is never changed after it was made."""
    return build_environment()


def start_counting() -> None:
    """Begin a rendering: its loops have made no round yet. Renderings in other threads and tasks count on their own."""
    _steps.set(0)


@pass_context
def _step(context: Context, value: bool) -> bool:
    """Count a round of a loop. Raises :class:`SecurityError` for one too many."""
    steps = _steps.get() + 1
    if steps > MOST_STEPS:
        raise SecurityError(f"its loops make more than {MOST_STEPS} rounds")
    _steps.set(steps)
    return value


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
