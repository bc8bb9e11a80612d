"""Chat templates: what they may do, what is known about them, and how they fail."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def make(source: str, **options: Any) -> ChatTemplate:
    """Compile *source*."""
    return ChatTemplate(source, name="test", **options)


def test_renders_with_what_hugging_face_gives() -> None:
    """A template sees messages, tools, documents, the generation flag, special tokens and further variables."""
    template = make(
        "{{ bos_token }}{{ messages[0]['content'] }}|{{ tools is none }}|{{ documents is none }}"
        "|{{ add_generation_prompt }}|{{ enable_thinking }}|{{ absent }}",
        special_tokens={"bos_token": "<s>"},
    )

    assert template.render(USER, Rendering(variables={"enable_thinking": False})) == "<s>Hi|True|True|True|False|"
    rich = Rendering(tools=[{}], documents=[{}], add_generation_prompt=False, variables={"bos_token": ""})
    assert template.render(USER, rich) == ("Hi|False|False|False||")


def test_a_variable_cannot_stand_in_for_the_messages() -> None:
    """Further variables do not replace what the template is called for."""
    variables: dict[str, Any] = {"messages": [], "self": 1}

    assert make("{{ messages | length }}").render(USER, Rendering(variables=variables)) == "1"


def test_blocks_are_trimmed() -> None:
    """Block tags leave neither their newline nor their indent."""
    source = "a\n    {% if true %}\nb\n    {% endif %}\nc"

    assert make(source).render(USER) == "a\nb\nc"


def test_loop_controls() -> None:
    """break and continue work."""
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"

    assert make(source + "{{ i }}{% endfor %}").render(USER) == "02"


def test_generation_blocks_render_their_body() -> None:
    """The marks for training data leave no trace, and have a scope of their own."""
    source = "[{% generation %}{% set x = 1 %}{{ messages[0].content }}{{ x }}{% endgeneration %}]{{ x is defined }}"

    assert make(source).render(USER) == "[Hi1]False"


@every_case(
    "expression,expected",
    [
        ("{'a': '<é&\\'>'} | tojson", '{"a": "<é&\'>"}'),
        ("{'b': 1, 'a': [1]} | tojson(sort_keys=true)", '{"a": [1], "b": 1}'),
        ("'é' | tojson(ensure_ascii=true)", '"\\u00e9"'),
        ("{'a': 1, 'b': 2} | tojson(separators=(',', ':'))", '{"a":1,"b":2}'),
        ("{'a': 1} | tojson(indent=2)", '{\n  "a": 1\n}'),
    ],
)
def test_tojson(expression: str, expected: str) -> None:
    """tojson writes what models were trained on: nothing escaped for HTML, json.dumps' own options."""
    assert expected == make(f"{{{{ {expression} }}}}").render(USER)


def test_strftime_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates can write the date."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2024, 7, 26)

    monkeypatch.setattr("triton_openai.prompts.template.datetime", Clock)

    assert make("{{ strftime_now(format='%d %b %Y') }}").render(USER) == "26 Jul 2024"


def test_raise_exception_speaks_to_the_client() -> None:
    """The template's own words reach the client, and blame the messages."""
    with pytest.raises(InvalidRequest) as caught:
        make("{{ raise_exception('Roles must alternate') }}").render(USER)
    assert caught.value.message == "Roles must alternate"
    assert caught.value.param == "messages"
    assert caught.value.status == 400

    with pytest.raises(InvalidRequest, match="does not accept these messages"):
        make("{{ raise_exception('') }}").render(USER)


@every_case(
    "source,message",
    [
        ("\n{{ messages[0].nothing.more }}", r"\(line 2 of the template\): 'dict object' has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ none | tojson(indent=messages) }}", "failed on these messages"),
        ("{{ nothing | tojson }}", "Undefined is not JSON serializable"),
        ("{{ messages.append(1) }}", "access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__ }}{{ ''.__class__.mro() }}", "'__class__'"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{% include 'x' %}", "failed on these messages"),
    ],
)
def test_failures_are_400(source: str, message: str) -> None:
    """However a template fails, the client gets a 400 that says what is wrong."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        make(source).render(USER)
    assert caught.value.param == "messages"


def test_modest_products_work() -> None:
    """Templates may multiply and raise to powers within reason."""
    assert make("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 2 ** 3 }}{{ 2.5 * 2 }}{{ 2.0 ** 2 }}").render(USER) == "abab1285.04.0"


def test_long_reasons_are_cut() -> None:
    """A template cannot flood the client."""
    with pytest.raises(InvalidRequest) as caught:
        make("{{ raise_exception('x' * 100000) }}").render(USER)
    assert len(caught.value.message) == 1000


@every_case(
    "source,message",
    [
        ("a\n{% for %}", "The chat template 'test' is wrong in line 2: "),
        ("{{ x | nofilter }}", "is wrong in line 1: No filter named 'nofilter'"),
        ("{% generation %}", "is wrong in line 1"),
        ("{{ " + "(" * 100_000 + " }}", "is nested too deeply"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
    ],
)
def test_templates_that_do_not_compile(source: str, message: str) -> None:
    """A broken template is the operator's mistake, or the client's when it came in a request."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        make(source)
    assert "--chat-template" in caught.value.message

    with pytest.raises(InvalidRequest, match=message) as blamed:
        make(source, param="chat_template")
    assert blamed.value.param == "chat_template"


def test_variables() -> None:
    """The variables that a template reads are known, without its own names and the environment's."""
    template = make(
        "{% set x = 1 %}{% if reasoning_effort is defined %}{{ x }}{% endif %}{{ strftime_now('%d') }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ namespace(a=1).a }}{{ raise_exception }}"
    )

    assert template.variables == {"reasoning_effort", "messages"}


STRING = "string"
PARTS = "parts"
EITHER = "either"
LOOP = "{% for part in message['content'] %}{{ part.text }}{% endfor %}"


@every_case(
    "source,expected",
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", STRING),
        ("{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}", STRING),
        (
            "{% for m in messages %}{{ m.content | trim }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
            STRING,
        ),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}{% endfor %}", STRING),
        ("{{ raise_exception('no') }}", STRING),
        # A name that stands for a message's calls, or else for its content (Mistral's).
        (
            "{% for m in messages %}{% if m.tool_calls is defined %}{% set calls = m.tool_calls %}{% else %}"
            "{% set calls = m.content %}{% endif %}{% for c in calls %}{{ c }}{% endfor %}{% endfor %}",
            STRING,
        ),
        ("{% for message in messages %}" + LOOP + "{% endfor %}", PARTS),
        ("{% set rest = messages[1:] if x else messages %}{% for message in rest %}" + LOOP + "{% endfor %}", PARTS),
        (
            "{% for m in messages %}{% set c = m.get('content') %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
            PARTS,
        ),
        (
            "{% macro f(c) %}{% for p in c %}{{ p['text'] + '' }}{% endfor %}{% endmacro %}"
            "{{ f(messages[0].content) }}",
            PARTS,
        ),
        (
            "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
            + LOOP
            + "{% endif %}{% endfor %}",
            EITHER,
        ),
        (
            "{% macro f(c) %}{% if c is not string %}{% for p in c %}{{ p.text }}{% endfor %}{% else %}{{ c }}"
            "{% endif %}{% endmacro %}{{ f(messages[0].content) }}",
            EITHER,
        ),
        ("{% for message in messages %}{% if message.role is string %}{% endif %}" + LOOP + "{% endfor %}", PARTS),
    ],
)
def test_content_format(source: str, expected: str) -> None:
    """Whether content must be, or may be, a list of parts is found out by rendering both."""
    template = make(source)

    assert (expected == PARTS) is template.wants_parts
    assert (expected != STRING) is template.takes_parts


def test_developers() -> None:
    """A template takes developers if their words come into the prompt; to name the role is not enough."""
    named = "{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{% endif %}{% endfor %}"
    written = "{% for m in messages %}{{ '<dev>' if m.role == 'developer' }}{{ m.content }}{% endfor %}"
    parts = (
        "{% for m in messages %}{{ '<dev>' if m.role == 'developer' }}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )

    assert make(written).takes_developers
    assert make(parts).takes_developers
    assert not make(named).takes_developers
    assert not make("developer {{ messages[0].content }}").takes_developers
    assert not make("{{ 'developer' }}{{ raise_exception('no') }}").takes_developers


def test_loops_do_what_they_did() -> None:
    """Counting changes nothing: conditions, ``else``, ``break``, ``loop`` and recursion work."""
    source = (
        "{% for a in [1, 2, 3, 4] if a > 1 %}{{ loop.index }}{{ a }}{% if a == 3 %}{% break %}{% endif %}{% endfor %}"
        "{% for a in [] %}x{% else %}none{% endfor %}"
        "{% for a in [[1, []], [2, [[3, []]]]] recursive %}{{ a[0] }}{{ loop(a[1]) }}{% endfor %}"
    )
    assert "1223none123" == ChatTemplate(source, name="test").render([])
