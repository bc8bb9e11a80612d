"""Templates that would run for ever, or take all memory: each is stopped, by a count and not by a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_openai.chat import builtin
from triton_openai.chat.template import ChatTemplate
from triton_openai.errors import InvalidRequest

USER = [{"role": "user", "content": "Hi"}]
LONG = [{"role": "user", "content": "a" * 1_000_000}]
# Doubles the variable `ns.x` as often as is asked.
DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(64) %%}{%% set ns.x = %s %%}{%% endfor %%}"


def render(source: str, messages: Any = USER, **options: Any) -> str:
    """Compile and render *source*."""
    return ChatTemplate(source, name="test", **options).render(messages)


LOOPS = {
    "nested": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "with a body": "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = i %}{% endfor %}{% endfor %}",
    "nothing passes": "{% for i in range(9000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
    "nothing passes, by a variable": "{% for i in range(9000) %}{% for j in range(90000) if j < 0 %}{% endfor %}"
    "{% endfor %}",
    "loop variable": "{% for i in range(90000) %}{% for j in range(90000) %}{% if loop.last %}{% endif %}{% endfor %}"
    "{% endfor %}",
    "recursive": "{% for i in [range(9)] recursive %}{% for j in range(9) %}{{ loop([range(9)]) if false }}{% endfor %}"
    "{{ loop([range(9), range(9), range(9)]) if loop.depth < 40 }}{% endfor %}",
    "breaks": "{% for i in range(90000) %}{% for j in range(90000) %}{% if j == 80000 %}{% break %}{% endif %}"
    "{% endfor %}{% endfor %}",
    "characters": "{% for c in 'a' * 999999 %}{% for d in 'a' * 999999 %}{% endfor %}{% endfor %}",
    "generators": "{% for i in range(9000) %}{% if range(90000) | map('string') | list %}{% endif %}{% endfor %}",
    "attributes": "{% for i in range(9000) %}{% if range(90000) | map(attribute='x') | list %}{% endif %}{% endfor %}",
    "selected": "{% for i in range(9000) %}{% if range(90000) | select | list %}{% endif %}{% endfor %}",
    "selected by a test": "{% for i in range(9000) %}{{ range(90000) | select('==', -1) | first }}{% endfor %}",
    "sums": "{% for i in range(9000) %}{% set x = range(90000) | sum %}{% endfor %}",
    "views": "{% for i in range(99999) %}{% set x = {}.fromkeys(range(99999)) %}{% endfor %}",
    "contained": "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ '' if 'a' in x }}{% endfor %}",
    "sliced": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "arguments": "{% macro f() %}{{ varargs | length }}{% endmacro %}"
    "{% for i in range(99999) %}{% set y = f(*range(99999)) %}{% endfor %}",
    "macros": "{% macro a0() %}{% endmacro %}"
    + "".join(f"{{% macro a{i}() %}}{{{{ a{i - 1}() }}}}{{{{ a{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 40))
    + "{{ a39() }}",
    "blocks": "{% block b0 %}{% endblock %}"
    + "".join(
        f"{{% block b{i} %}}{{{{ self.b{i - 1}() }}}}{{{{ self.b{i - 1}() }}}}{{% endblock %}}" for i in range(1, 40)
    ),
    "rounds are long": "{% for i in range(99999) %}" + "{% set x = [i, i] == [i, i] %}" * 300 + "{% endfor %}",
    "numbers": "{% set ns = namespace(x=3) %}{% for i in range(9999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a cost of less than nothing": "{% for i in range(9000) %}{{ [-9999999] | map('a round', -99999) | list }}"
    "{% for j in range(90000) %}{% endfor %}{% endfor %}",
}

TEXTS = {
    "~": DOUBLE % ("'ab'", "ns.x ~ ns.x"),
    "+": DOUBLE % ("'ab'", "ns.x + ns.x"),
    "lists": DOUBLE % ("[1]", "ns.x + ns.x"),
    "blocks": "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE % ("'ab'", "f(ns.x)"),
    "lists of lists, written": DOUBLE % ("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "tuples of tuples, as keys": DOUBLE % ("(1,)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "lists of lists, compared": "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(64) %}"
    "{% set a.x = [a.x] * 2 %}{% set b.x = [b.x] * 2 %}{% endfor %}{{ a.x == b.x }}",
    "lists of lists, as JSON": DOUBLE % ("[1]", "[ns.x] * 2") + "{{ ns.x | tojson }}",
    "lists of lists, as a key": DOUBLE % ("(1,)", "(ns.x,) * 2") + "{{ {}.get(ns.x, 1) }}",
    "namespaces": DOUBLE % ("1", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a star": "{{ '%*d' % (1000000000, 1) }}",
    "% many times": "{{ ('%(a)s' * 99999) % {'a': 'a' * 99999} }}",
    "precision": "{{ '%.1000000000f' % 1.5 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format, many times": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "format_map": "{{ ('{a}' * 99999).format_map({'a': 'a' * 99999}) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center, called": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "the filter replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "join": "{{ ('a' * 99999).join('b' * 99999) }}",
    "join one text": "{{ ''.join(['b' * 99999] * 99999) }}",
    "the filter join": "{{ ('b' * 99999) | join('a' * 99999) }}",
    "indent": "{{ ('\\n' * 99999) | indent(99999) }}",
    "indented JSON": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "round": "{{ 1.5 | round(1000000000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "sums of lists": "{{ ([[1] * 99] * 99999) | sum(start=[]) | length }}",
    "trim": "{{ ('a' * 999999) | trim('b' * 999999) }}",
    "rfind": "{{ ('a' * 999999).rfind('b' + 'a' * 499999) }}",
    "wordwrap": "{{ ('a' * 999999) | wordwrap(1) }}",
    "striptags": "{{ ('<!---->' * 99999) | striptags }}",
    "dates": "{{ strftime_now('%c' * 99999) }}",
    "numbers, to be divided": "{{ 1 // (1).from_bytes(('a' * 999999).encode(), 'big') }}",
    "hidden numbers": "{{ ('f' * 999999) | int(0, 16) }}",
}


@pytest.mark.parametrize("source", [pytest.param(text, id=name) for name, text in {**LOOPS, **TEXTS}.items()])
def test_runaways_are_stopped(source: str) -> None:
    """Whatever it does, and however little of it is written, it ends in a 400 that blames the messages."""
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert 400 == caught.value.status
    assert "messages" == caught.value.param
    assert len(caught.value.message) < 1100


def test_what_is_said() -> None:
    """The message names the line; a request's own template is blamed itself, and may do less."""
    source = "\n{% for i in range(600) %}{% for j in range(600) %}{% endfor %}{% endfor %}"
    assert "\n" == render(source)
    with pytest.raises(InvalidRequest) as caught:
        render(source, param="chat_template")
    assert "chat_template" == caught.value.param
    assert caught.value.message == (
        "The chat template does more with these messages than it may (line 2 of the template): "
        "the template takes too much work."
    )


def test_constants_are_not_computed_while_compiling() -> None:
    """What would be large is not made before anybody asked for it."""
    for source in ("{{ '%1000000000d' % 1 }}", "{{ 'a' | center(1000000000) }}", "{{ 9 ** (9 ** 9) }}"):
        ChatTemplate("{% if false %}" + source + "{% endif %}", name="test")


def test_the_count_is_the_same_every_time() -> None:
    """The largest number of rounds that is served is served always."""

    def served(rounds: int) -> bool:
        try:
            render(
                "{% for i in range(rounds) %}{% for j in range(1000) %}{% endfor %}{% endfor %}".replace(
                    "rounds", str(rounds)
                ),
                param="chat_template",
            )
        except InvalidRequest:
            return False
        return True

    low, high = 1, 2000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if served(middle) else (low, middle)
    assert served(low)
    assert not served(low + 1)


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "mistral", "plain"])
def test_long_chats_are_served(name: str) -> None:
    """Twenty thousand messages, and ten million characters, are no runaway."""
    template = ChatTemplate(builtin.read(name), name=name)
    roles = ("user", "assistant")
    many = [{"role": roles[i % 2], "content": f"Message {i}."} for i in range(19_999)]
    assert "Message 19998." in template.render(many)
    assert len(template.render([{"role": "user", "content": "a" * 10_000_000}])) > 10_000_000


def test_tools_are_served() -> None:
    """A large list of tools, as a template with a macro writes it, is no runaway."""
    source = (Path(__file__).parents[1] / "fixtures" / "tools.jinja").read_text()
    properties = {f"field_{i}": {"type": "string", "description": "words " * 20} for i in range(50)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    prompt = ChatTemplate(source, name="tools").render(USER, tools=[tool] * 200)
    assert json.dumps(tool)[:40] in prompt or "field_49" in prompt


# Expressions from a grammar of what hurts.

_ATOMS = st.sampled_from(
    ["'ab'", "1", "9999", "1.5", "[1, 'a']", "{'a': 1}", "(1, 2)", "messages", "messages[0].content", "range(999)",
     "ns.x", "none", "nothing", "'%d'", "'{}'", "'\\n'", "true"]
)  # fmt: skip

_FILTERS = """
list; join; join('ab'); tojson; tojson(indent=2); string; upper; replace('a', 'bbb'); indent(99);
center(999); sort; unique | list; map('string') | list; batch(2) | list; sum; pprint; int; float;
length; first; last; reverse | list; wordwrap(3); trim; items | list; urlencode; escape; safe; round;
abs; min; max; dictsort; groupby(0); format(1); select('string') | list; default('x'); title;
truncate(5); filesizeformat
"""
_METHODS = """
upper(); split(); split('a'); join(['a', 'b']); replace('a', 'bb'); items(); keys(); get('a');
format(1, 2); count('a'); index('a'); encode(); zfill(99); strip('a'); rsplit('b'); copy();
rfind('ab'); expandtabs(9); bit_length(); translate({97: 'bb'})
"""


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(";")]


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or"]
    return st.one_of(
        st.tuples(inner, st.sampled_from(_listed(_FILTERS))).map(lambda v: f"({v[0]} | {v[1]})"),
        st.tuples(inner, st.sampled_from(_listed(_METHODS))).map(lambda v: f"({v[0]}).{v[1]}"),
        st.tuples(inner, st.sampled_from(operators), inner).map(lambda v: f"({v[0]} {v[1]} {v[2]})"),
        st.tuples(inner, inner).map(lambda v: f"[{v[0]}, {v[1]}]"),
        st.tuples(inner, inner).map(lambda v: f"({v[0]}, {v[1]})"),
        st.tuples(inner, inner).map(lambda v: f"{{{v[0]}: {v[1]}}}"),
        st.tuples(inner, inner).map(lambda v: f"({v[0]})[{v[1]}:]"),
        inner.map(lambda v: f"f({v})"),
        inner.map(lambda v: f"({v} is in messages)"),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.recursive(_ATOMS, _deeper, max_leaves=8), min_size=1, max_size=4))
def test_no_expression_escapes(expressions: list[str]) -> None:
    """Whatever is done to a value again and again ends as a prompt or as a 400."""
    body = "".join(f"{{% set ns.x = {text} %}}" for text in expressions)
    source = (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}"
        "{% for i in range(200) %}" + body + "{% endfor %}{{ ns.x }}"
    )
    try:
        prompt = render(source, param="chat_template")
    except InvalidRequest:
        return
    assert len(prompt) <= 64 * 1024 * 1024
