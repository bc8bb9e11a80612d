"""One switch for the thinking, by any of its names, in the words of each template."""

from __future__ import annotations

from typing import Any

from tests.cases import every_case
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.template import ChatTemplate
from triton_openai.prompts.thinking import LEVELS

MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}{{ ' ' }}"
QWEN = MESSAGES + "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
DEEPSEEK = (
    MESSAGES + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'on' if thinking else 'off' }}"
)
GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }} "
    + MESSAGES
)
KIMI = (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking_effort is undefined %}{% set thinking_effort = 'max' %}{% endif %}"
    "{% if thinking and thinking_effort not in ['low', 'medium', 'high', 'max'] %}"
    "{{ raise_exception('Unsupported thinking_effort.') }}{% endif %}"
    "{{ thinking_effort if thinking else 'off' }} " + MESSAGES
)
GLM = (
    "{% if reasoning_effort is defined and reasoning_effort == 'high' %}{% set effort = 'High' %}"
    "{% else %}{% set effort = 'Max' %}{% endif %}"
    "{{ 'off' if enable_thinking is defined and not enable_thinking else effort }} " + MESSAGES
)
HUNYUAN = MESSAGES + (
    "{% set effort = reasoning_effort | default('high') | lower %}"
    "{% if effort == 'no_think' %}off{% elif effort == 'low' %}few{% else %}many{% endif %}"
)
MODES = MESSAGES + "{% set mode = thinking_mode or 'thinking' %}{{ 'off' if mode == 'chat' else 'on' }}"
OFF_BY_DEFAULT = (
    "{% set effort = reasoning_effort | default('none', true) %}{% if effort not in ['none', 'high'] %}"
    "{{ raise_exception('Only none and high.') }}{% endif %}{{ effort }} " + MESSAGES
)
SEED = MESSAGES + "{{ 'off' if thinking_budget is defined and thinking_budget == 0 else 'on' }}"
TABLE = "{{ {'off': 'off', 'low': 'few', 'high': 'many'}[reasoning_effort or 'high'] }} " + MESSAGES


def shown(source: str, variables: dict[str, Any], effort: str | None = None) -> str:
    """Return the word of a template that shows how much the model thinks."""
    template = ChatTemplate(source, name="test")
    if effort is not None:
        assert template.takes_effort(effort)
    adapted = template.thinking_variables(variables, effort)
    prompt = template.render([{"role": "user", "content": "?"}], Rendering(variables=adapted))
    (word,) = set(prompt.split()) - {"?"}
    return word


@every_case("name,source,words", [
    # For each of LEVELS
    ("Qwen", QWEN, "off on on on on on on"),
    ("DeepSeek", DEEPSEEK, "off on on on on on on"),
    ("gpt-oss", GPT_OSS, "low low low medium high high high"),
    ("Kimi", KIMI, "off low low medium high high max"),
    ("GLM", GLM, "off High High High High High Max"),
    ("Hunyuan", HUNYUAN, "off few few many many many many"),
    ("modes", MODES, "off on on on on on on"),
    ("off by default", OFF_BY_DEFAULT, "none high high high high high high"),
    ("Seed", SEED, "off on on on on on on"),
    ("table", TABLE, "off few few few many many many"),
])  # fmt: skip
def test_each_level_reaches_each_template(name: str, source: str, words: str) -> None:
    """A level of effort is the nearest one that the template has, in its own word, whatever a client calls it."""
    assert words.split() == [shown(source, {}, level) for level in LEVELS]
    assert words.split() == [shown(source, {"reasoning_effort": level}) for level in LEVELS]
    assert words.split() == [shown(source, {"think": level}) for level in LEVELS]
    assert words.split() == [shown(source, {"thinking_effort": level}) for level in LEVELS]


OFF = (
    {"enable_thinking": False}, {"thinking": False}, {"thinking": {"type": "disabled"}}, {"thinking_mode": "off"},
    {"thinking_mode": "chat"}, {"think": False}, {"reasoning_effort": "none"}, {"enable_thinking": "false"},
)  # fmt: skip
ON = ({"enable_thinking": True}, {"thinking": True}, {"thinking": {"type": "enabled"}}, {"think": True})


@every_case("source,off,on", [
    (QWEN, "off", "on"), (DEEPSEEK, "off", "on"), (KIMI, "off", "max"), (GLM, "off", "Max"), (HUNYUAN, "off", "many"),
    (MODES, "off", "on"), (OFF_BY_DEFAULT, "none", "high"), (GPT_OSS, "low", "medium"), (SEED, "off", "on"),
])  # fmt: skip
def test_each_switch_reaches_each_template(source: str, off: str, on: str) -> None:
    """A switch of any template turns the thinking on and off; on is the template's own default level."""
    for variables in OFF:
        assert off == shown(source, variables), variables
    for variables in ON:
        assert on == shown(source, variables), variables


def test_who_wins() -> None:
    """Variables win over the effort, "off" over "on", and a level over a mere "on"."""
    assert "off" == shown(QWEN, {"enable_thinking": False}, "high")
    assert "on" == shown(QWEN, {"enable_thinking": True}, "none")
    assert "low" == shown(KIMI, {"thinking": True, "enable_thinking": True}, "low")
    assert "low" == shown(KIMI, {"thinking_effort": "low"}, "max")
    assert "off" == shown(GLM, {"enable_thinking": False, "reasoning_effort": "high"})


def test_a_template_without_controls() -> None:
    """It takes no effort, but for a model that never thinks, which is asked not to think."""
    plain = ChatTemplate(MESSAGES, name="test")
    thinks = ChatTemplate(MESSAGES + "<think>", name="test")
    assert [True, False] == [plain.takes_effort("none"), plain.takes_effort("low")]
    assert not thinks.takes_effort("none")
    assert {"enable_thinking": False} == plain.thinking_variables({"enable_thinking": False}, None)


def test_words_of_one_template() -> None:
    """A word that means no level reaches a template that reads it, and no other."""
    template = ChatTemplate(GPT_OSS, name="test")
    assert template.takes_effort("colossal")
    assert {"reasoning_effort": "colossal"} == template.thinking_variables({}, "colossal")
    assert not ChatTemplate(QWEN, name="test").takes_effort("colossal")


def test_budgets() -> None:
    """A budget by any name reaches a template that takes one, unless the thinking is off."""
    template = ChatTemplate(SEED, name="test")
    for variables in (
        {"thinking_budget": 512},
        {"thinking": {"type": "enabled", "budget_tokens": 512}},
        {"thinking_token_budget": 512, "enable_thinking": True},
    ):
        assert 512 == template.thinking_variables(variables, None)["thinking_budget"]
    assert 0 == template.thinking_variables({"enable_thinking": False, "budget_tokens": 512}, None)["thinking_budget"]
    assert "thinking_budget" not in ChatTemplate(QWEN, name="test").thinking_variables({"budget_tokens": 512}, None)
