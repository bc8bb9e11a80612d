"""What filters, tests, methods and operators cost, charged before they are carried out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import _PassArg, pass_context

from triton_openai.chat.work import CHARACTERS_PER_STEP, LONGEST_TEXT, Work, size

#: The largest number that a template may make, in bits: what is done with it is then a matter of microseconds.
LARGEST_NUMBER = 16_384

_MOST_INDENT = 16
_MOST_DIGITS = 300
_METHOD_TYPES = (BuiltinMethodType, MethodType)
# A number up to this many is no matter as a width or a count.
_SMALL = 256
_NUMBERS = re.compile(r"\d+")


def work_of(context: Context) -> Work:
    """Return the account of the rendering that *context* belongs to."""
    work: Work = context.work  # type: ignore[attr-defined]
    return work


def _texts(work: Work, values: Iterable[Any]) -> int:
    """Return what *values* have as texts together; a number may be a width, and counts as one."""
    total = 0
    for value in values:
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, int):
            total += abs(value) if abs(value) > _SMALL else 0
        elif value is not None:
            total += work.weigh(value)
    return total


# Formats


def format_cost(work: Work, template: str, arguments: Iterable[Any], mark: str) -> int:
    """
    Return the most characters that *template* can make of *arguments*; *mark* is what begins a place in it.

    Each place may hold all arguments; every number may be a width, and so may an argument where the template has it
    say so (``%*d``, ``{:{}}``).
    """
    values = list(arguments)
    held = sum(work.weigh(value) for value in values)
    widths = sum(min(int(number[:12]), LONGEST_TEXT + 1) for number in _NUMBERS.findall(template))
    if "*" in template or ":" in template:
        widths += template.count(mark) * sum(abs(v) for v in values if isinstance(v, int) and abs(v) > _SMALL)
    return len(template) + template.count(mark) * held + widths


# Methods of texts, lists and what else Python has


def _replace(work: Work, text: Any, old: Any = "", new: Any = "", count: Any = -1) -> int:
    times = text.count(old) if isinstance(old, type(text)) else len(text)
    return len(text) + (min(times, count) if isinstance(count, int) and count >= 0 else times) * size(new)


def _join(work: Work, text: Any, items: Any = ()) -> int:
    return size(text) * size(items) + _texts(work, (items,))


def _times_argument(work: Work, text: Any, *arguments: Any) -> int:
    """Searching from the right, and for any of some characters, compares each with each in the worst case."""
    return len(text) * (1 + sum(size(argument) for argument in arguments)) // 8


def _translate(work: Work, text: Any, table: Any = ()) -> int:
    return len(text) * (1 + _texts(work, (table,)))


def _expandtabs(work: Work, text: Any, width: Any = 8) -> int:
    return len(text) + int(text.count("\t")) * (abs(width) if isinstance(width, int) else 0)


def _format(work: Work, text: Any, *arguments: Any, **named: Any) -> int:
    return format_cost(work, text, [*arguments, *named.values()], "{")


_METHODS: Mapping[str, Callable[..., int]] = {
    "replace": _replace,
    "join": _join,
    "translate": _translate,
    "expandtabs": _expandtabs,
    "format": _format,
    "format_map": _format,
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"), _times_argument),
}
# These look one thing up, or show what is there already.
_CHEAP = frozenset({"get", "items", "keys", "values", "startswith", "endswith"})


def charge_method(work: Work, owner: Any, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Charge for calling the method *name* of *owner*, which is a value of a template. Raises
    :class:`RunawayTemplate`."""
    if name in _CHEAP:
        return
    if isinstance(owner, str | bytes):
        special = _METHODS.get(name)
        if special is not None:
            work.charge_text(special(work, owner, *arguments, **named))
            return
        work.charge_text(len(owner) + _texts(work, arguments) + _texts(work, named.values()))
        return
    # Of lists: comparing items; of anything: numbers that become sizes, as in `to_bytes`.
    own = work.weigh(owner) if isinstance(owner, list | tuple) else size(owner)
    work.charge_text(own + _texts(work, arguments) + _texts(work, named.values()))


def charge_call(work: Work, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Charge for a call. What a macro does is charged in its body."""
    work.charge(1 + (len(arguments) >> 3) + (len(named) >> 3))
    kind = type(function)
    if kind is BuiltinMethodType or kind is MethodType:
        charge_method(work, function.__self__, function.__name__, arguments, named)
    elif kind is FunctionType and isinstance(bound := getattr(function, "__wrapped__", None), _METHOD_TYPES):
        # `str.format`, which the sandbox wraps.
        charge_method(work, bound.__self__, bound.__name__, arguments, named)
    elif kind is type:
        work.charge(sum(size(argument) for argument in arguments))


# Operators


def charge_operator(work: Work, operator: str, left: Any, right: Any) -> None:
    """Charge for *left* *operator* *right*. Raises :class:`SecurityError` for numbers that would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            check_number(left.bit_length() * right)
        elif bits > CHARACTERS_PER_STEP:
            check_number(bits if operator == "*" else bits >> 1)
            work.charge(bits >> 8)
        return
    if operator == "%" and isinstance(left, str | bytes):
        template = left if isinstance(left, str) else left.decode("latin-1")
        values = right if isinstance(right, tuple) else (right,)
        work.charge_text(format_cost(work, template, values, "%"))
        return
    if operator in "+*-":
        characters = size(left) + size(right)
        if operator == "*":
            many, times = (left, right) if isinstance(right, int) else (right, left)
            characters = size(many) * times if isinstance(times, int) else 0
        if characters >= CHARACTERS_PER_STEP:
            work.charge_text(characters)


def check_number(bits: int) -> None:
    """Raise :class:`SecurityError` for a number of so many *bits* that it slows down what is done with it."""
    if bits > LARGEST_NUMBER:
        raise SecurityError(f"an expression would make a number of {bits} bits; at most {LARGEST_NUMBER} are allowed")


# Filters and tests

# They look at one thing.
_FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "last", "length", "random"})
# What they do with each item is a few steps: looking up an attribute, calling a filter or a test.
_STEPS_PER_ITEM = dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), 4)
# They take items one by one. Where a filter compares items or writes them, what is in them counts; some do it again
# and again.
_OF_ITEMS: Mapping[str, int] = {
    **dict.fromkeys(
        ("batch", "list", "map", "reject", "rejectattr", "select", "selectattr", "slice", "sum", "items", "reverse"), 0
    ),
    **dict.fromkeys(("join", "max", "min", "unique"), 1),
    **dict.fromkeys(("dictsort", "groupby", "sort"), 16),
}
_HEAVY_TESTS = frozenset(
    {"in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
     "lower", "upper"}
)  # fmt: skip
#: These write HTML and filler texts, some of them in quadratic time, and no prompt has use for them.
LEFT_OUT = ("urlize", "xmlattr")


def charged_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return *filters* so that each charges for its work."""
    charged: dict[str, Callable[..., Any]] = {}
    for name, function in filters.items():
        if name in LEFT_OUT:
            continue
        if name in _FREE_FILTERS:
            charged[name] = function
        elif name in _OF_ITEMS:
            charged[name] = _charged(function, _items_payer(name))
        else:
            charged[name] = _charged(function, _text_payer(name))
    return charged


def charged_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return *tests* so that those which compare or read charge for it."""

    def pay(work: Work, value: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        work.charge(1)
        work.charge_text(_texts(work, (value, *arguments)))
        return value

    return {name: _charged(test, pay) if name in _HEAVY_TESTS else test for name, test in tests.items()}


_Payer = Callable[[Work, Any, Sequence[Any], Mapping[str, Any]], Any]


def _charged(function: Callable[..., Any], pay: _Payer) -> Callable[..., Any]:
    """Return *function* with *pay* before it, which charges, and returns the value to work on."""
    wanted = _PassArg.from_obj(function)

    @pass_context
    def charged(context: Context, value: Any = None, *arguments: Any, **named: Any) -> Any:
        value = pay(work_of(context), value, arguments, named)
        if wanted is None:
            return function(value, *arguments, **named)
        if wanted is _PassArg.context:
            return function(context, value, *arguments, **named)
        first = context.eval_ctx if wanted is _PassArg.eval_context else context.environment
        return function(first, value, *arguments, **named)

    return charged


def _items_payer(name: str) -> _Payer:
    factor = _OF_ITEMS[name]
    steps = _STEPS_PER_ITEM.get(name, 1)

    def pay(work: Work, value: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        given = _texts(work, arguments) + _texts(work, named.values()) if arguments or named else 0
        if name in ("sum", "join") and (arguments or named):
            # Adding lists copies what was added before; a separator comes between all items.
            value = value if isinstance(value, str) else list(_counted(work, value))
            times = sum(size(item) for item in value) if name == "sum" else 1
            work.charge_text(len(value) * (times + given))
        work.charge_text(given)
        if not hasattr(value, "__len__"):
            return _counted(work, value, steps, factor) if hasattr(value, "__iter__") else value
        work.charge(1 + steps * size(value))
        if factor:
            work.charge_text(min(factor * work.weigh(value), LONGEST_TEXT))
        return value

    return pay


def _counted(work: Work, items: Iterable[Any], steps: int = 1, factor: int = 0) -> Iterator[Any]:
    """Yield *items*, each of which is charged for."""
    for item in items:
        work.charge(steps)
        if factor:
            work.charge_text(factor * work.weigh(item))
        yield item


def _text_payer(name: str) -> _Payer:
    special = _TEXT_FILTERS.get(name)

    def pay(work: Work, value: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        work.charge(1)
        if special is None and not arguments and not named and type(value) is str and len(value) < CHARACTERS_PER_STEP:
            return value
        characters = _texts(work, (value, *arguments)) + _texts(work, named.values())
        if special is not None:
            characters += special(work, value, *arguments, **named)
        work.charge_text(characters)
        return value

    return pay


def _indent(work: Work, value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (str(value).count("\n") + 1) * (width if isinstance(width, int) else size(width))


def _tojson(work: Work, value: Any, *arguments: Any, **named: Any) -> int:
    indent = named.get("indent", arguments[1] if len(arguments) > 1 else None)
    width = indent if isinstance(indent, int) else size(indent)
    if width > _MOST_INDENT:
        raise SecurityError(f"an indent of {width}; at most {_MOST_INDENT} are allowed")
    return 0 if not width else width * work.weigh(value) * _depth(value) // CHARACTERS_PER_STEP


def _depth(value: Any) -> int:
    """Return how deep *value* is nested; it has been weighed before, so this ends."""
    deepest = 0
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, Mapping):
            pending.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list | tuple):
            pending.extend((inner, depth + 1) for inner in item)
        deepest = max(deepest, depth)
    return deepest


def _round(work: Work, value: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    if isinstance(precision, int) and abs(precision) > _MOST_DIGITS:
        raise SecurityError(f"rounding to {precision} digits; at most {_MOST_DIGITS} are allowed")
    return 0


def _pprint(work: Work, value: Any, *_: Any, **__: Any) -> int:
    return work.weigh(value) * _depth(value)


def _format_filter(work: Work, value: Any, *arguments: Any, **named: Any) -> int:
    return format_cost(work, str(value), [*arguments, *named.values()], "%")


def _wordwrap(work: Work, value: Any, width: Any = 79, *_: Any, **__: Any) -> int:
    longest = max(map(len, str(value).split()), default=0)
    return size(value) * longest // max(1, width if isinstance(width, int) else 1)


_TEXT_FILTERS: Mapping[str, Callable[..., int]] = {
    "format": _format_filter,
    "indent": _indent,
    "pprint": _pprint,
    "replace": lambda work, value, *arguments, **named: _replace(work, str(value), *arguments, **named),
    "round": _round,
    "striptags": lambda _, value, *__, **___: size(value) * str(value).count("<"),
    "tojson": _tojson,
    "trim": lambda work, value, *arguments, **_: _times_argument(work, str(value), *arguments),
    "wordwrap": _wordwrap,
}
