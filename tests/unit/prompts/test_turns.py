"""The rules that templates have for the order of turns: all that clients send is rendered, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.cases import every_case
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.template import ChatTemplate

#: How the templates here write messages, with calls and results.
WRITE = (
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | "
    "tojson }}]{% endfor %}"
)
ALL = "{% for m in messages %}" + WRITE + "{% endfor %}"


def refusing(condition: str, before: str = "") -> str:
    """Return a template that refuses a message *m*, after the message *p*, on a *condition*."""
    return (
        f"{before}{{% for m in messages %}}{{% set p = messages[loop.index0 - 1] if loop.index0 else none %}}"
        f"{{% if {condition} %}}{{{{ raise_exception('Refused.') }}}}{{% endif %}}{WRITE}{{% endfor %}}"
    )


#: Each as a published template has it.
HABITS = {
    # Gemma, Mistral
    "users alternate": refusing("p and m.role == 'user' and p.role == 'user'"),
    "assistants alternate": refusing("p and m.role == 'assistant' and p.role == 'assistant' and not p.tool_calls"),
    "roles alternate but for tools": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
        "m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Conversation roles must "
        "alternate.') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}" + WRITE + "{% endfor %}"
    ),
    "no user after a result": refusing("p and m.role == 'user' and p.role == 'tool'"),
    "calls need results": refusing("p and p.tool_calls and m.role != 'tool'"),
    "no system": refusing("m.role == 'system'"),
    "the system is left out": "{% for m in messages if m.role != 'system' %}" + WRITE + "{% endfor %}",
    "an assistant says something": refusing("m.role == 'assistant' and not m.content and not m.tool_calls"),
    # DeepSeek R1
    "the last system wins": (
        "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.s = m.content %}{% endfor %}"
        "<system>{{ ns.s }}{% for m in messages if m.role != 'system' %}" + WRITE + "{% endfor %}"
    ),
    "the system comes first": refusing("p and m.role == 'system'"),
    # Llama 3.1
    "one call a turn": refusing("m.tool_calls and m.tool_calls | length != 1"),
    # GigaChat 3
    "the first call only": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }} "
        "{{ m.tool_calls[0].function.arguments | tojson }}]{% endif %}{% endfor %}"
    ),
    # Llama 2
    "the system is a part of the user": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% else %}{{ ns.s }}{% set ns.s = '' %}" + WRITE + "{% endif %}{% endfor %}"
    ),
    # Gemma, Llama 2: neither calls nor results, and roles that alternate
    "no calls": (
        "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}"
    ),
    # Granite 3.0 as it was converted
    "calls and results are left out": (
        "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    # Gemma 4: results are looked for behind their calls
    "results behind calls": (
        "{% for m in messages if m.role != 'tool' %}" + WRITE + "{% if m.tool_calls %}{% set ns = namespace(go=true) %}"
        "{% for r in messages[messages.index(m) + 1:] %}{% if r.role != 'tool' %}{% set ns.go = false %}{% endif %}"
        "{% if ns.go %}<{{ r.tool_call_id + '' }}>{{ r.content }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "the user begins": refusing(
        "not p and m.role not in ['user', 'system'] or p and p.role == 'system' and m.role != 'user'"
    ),
}


def call(*names: str) -> dict[str, Any]:
    """Return an assistant's turn with calls."""
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"x": "arguments"}'}}
        for name in names
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str) -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"result-{name}"}


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """Return an answer."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    """Return instructions."""
    return {"role": "system", "content": text}


#: What clients send, and the words that a prompt has to have.
CONVERSATIONS: dict[str, Sequence[dict[str, Any]]] = {
    "a question": [user("one")],
    "system": [system("rules"), user("one")],
    "turns": [user("one"), assistant("two"), user("three")],
    "two users": [user("one"), user("two")],
    "two assistants": [user("one"), assistant("two"), assistant("three"), user("four")],
    "late system": [system("rules"), user("one"), assistant("two"), system("more"), user("three")],
    "two systems": [system("rules"), system("more"), user("one")],
    "only a system": [system("rules")],
    "a call": [user("one"), call("f"), result("f")],
    "an answer to a result": [user("one"), call("f"), result("f"), assistant("two"), user("three")],
    "a user after a result": [user("one"), call("f"), result("f"), user("two")],
    "a denied call": [user("one"), call("f"), user("two")],
    "a half-denied call": [user("one"), call("f", "g"), result("f"), user("two")],
    "two calls": [user("one"), call("f", "g"), result("f"), result("g")],
    "two calls, results the other way round": [user("one"), call("f", "g"), result("g"), result("f"), user("two")],
    "calls after calls": [user("one"), call("f"), result("f"), call("g"), result("g"), assistant("two")],
    "an empty answer": [user("one"), assistant(""), user("two")],
    "a result without a call": [user("one"), result("z"), user("two")],
    "a system message before a result": [user("one"), call("f"), system("more"), result("f"), user("two")],
    "a result without an id": [user("one"), call("f"), {"role": "tool", "content": "result-f"}, user("two")],
    "an assistant begins": [assistant("one"), user("two")],
    "parts": [
        user("one"),
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    ],
}
LATER = {"tool", "assistant"}


def words_of(conversation: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the model has to see of a conversation."""
    words: list[str] = []
    for message in conversation:
        content = message["content"]
        if isinstance(content, str):
            words.append(content)
        words += [part["text"] for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        words += [each["function"]["name"] + " {" for each in message.get("tool_calls", ())]
    return words


@every_case("habit", [*HABITS, "none"])
def test_every_conversation_with_every_habit(habit: str) -> None:
    """All words of a conversation reach the model, whatever order its template insists on."""
    template = ChatTemplate(HABITS.get(habit, ALL), name=habit)

    def check(kind: str) -> None:
        conversation = CONVERSATIONS[kind]
        messages = msgspec.convert(conversation, list[Message])
        prompt = template.render(prepare(messages, template))
        lost = [word for word in words_of(conversation) if word not in prompt]
        assert not lost, prompt

    every_case("kind", CONVERSATIONS)(check)()


def test_what_a_template_takes_stays_as_it_is() -> None:
    """A template without rules gets the messages as the client sent them."""
    template = ChatTemplate(ALL, name="all")
    messages = msgspec.convert(CONVERSATIONS["a denied call"], list[Message])
    assert '<user>one<assistant>[f {"x": "arguments"}]<user>two' == template.render(prepare(messages, template))


def test_results_stay_with_their_calls() -> None:
    """Where one call a turn is allowed, each call is followed by its own result."""
    template = ChatTemplate(HABITS["one call a turn"], name="single")
    messages = msgspec.convert(CONVERSATIONS["two calls, results the other way round"], list[Message])
    prompt = template.render(prepare(messages, template))
    order = [prompt.index(word) for word in ("[f ", "result-f", "[g ", "result-g", "two")]
    assert sorted(order) == order


def test_many_messages_are_merged_in_linear_time() -> None:
    """Thousands of messages of one role are joined once."""
    template = ChatTemplate(HABITS["users alternate"], name="alternate")
    messages = msgspec.convert([user("x" * 100)] * 5_000, list[Message])
    (merged,) = prepare(messages, template)
    assert 5_000 * 102 - 2 == len(merged["content"])


def test_a_user_is_added_before_the_answer() -> None:
    """A conversation without a user gets one behind its instructions, so that the last message stays the last."""
    template = ChatTemplate(HABITS["the system is a part of the user"], name="llama")
    messages = msgspec.convert([system("rules"), assistant("one")], list[Message])
    prepared = prepare(messages, template)
    assert ["system", "user", "assistant"] == [message["role"] for message in prepared]
