"""
How much a model thinks: one level for all the names that clients have for it, in the words of each chat template.

Clients write ``reasoning_effort``, Ollama's ``think``, Anthropic's ``thinking`` and the variables of some template.
Templates read ``enable_thinking`` (Qwen, GLM), ``thinking`` (DeepSeek, Kimi, Granite), ``thinking_mode``,
``thinking_effort`` (Kimi K3), ``reasoning_effort`` (gpt-oss, Hunyuan) or ``thinking_budget`` (Seed OSS). Which of them
a template reads, and which values it has, its own text and a few renderings show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import nodes

#: From no thinking to the most, as OpenAI, Anthropic and Kimi name them.
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: Thinking at the level that the template chooses.
ON = "on"
_OFF = "none"
#: Other words of templates and clients, by the level that they mean.
_SYNONYMS = {
    "off": _OFF, "disabled": _OFF, "disable": _OFF, "false": _OFF, "no_think": _OFF, "no-think": _OFF, "nothink": _OFF,
    "chat": _OFF, "non-thinking": _OFF, "non_thinking": _OFF, "nothinking": _OFF, "instruct": _OFF, "no_thinking": _OFF,
    "on": ON, "enabled": ON, "enable": ON, "true": ON, "think": ON, "thinking": ON, "auto": ON, "adaptive": ON,
    "fast": "low", "short": "low", "deep": "high", "maximum": "max",
}  # fmt: skip
#: Variables with a truth value, with a level, with one of two words, and with a number of tokens.
SWITCHES = ("enable_thinking", "thinking")
EFFORTS = ("reasoning_effort", "thinking_effort")
MODES = ("thinking_mode", "reasoning_mode", "think")
BUDGETS = ("thinking_budget",)
#: All names of a number of tokens: of Qwen's service and Seed OSS; vLLM, TensorRT-LLM and Dynamo; llama.cpp; NVIDIA's
#: NIM (two); other gateways; and Anthropic's, within ``thinking``.
BUDGET_NAMES = (
    *BUDGETS, "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget", "max_thinking_tokens",
    "max_reasoning_tokens", "budget_tokens",
)  # fmt: skip
VARIABLES = frozenset({*SWITCHES, *EFFORTS, *MODES, *BUDGETS})
#: The words of a template that prints any word: those that models of this kind were trained on.
_COMMON_WORDS = ("low", "medium", "high")
_GARBAGE = "probed_level"
#: What templates with two modes call them (DeepSeek).
_MODE_WORDS = {_OFF: "chat", "medium": "thinking"}
_WORD = re.compile(r"[a-z_-]+")

#: Renders a question with variables; ``None`` if the template refuses them.
Render = Callable[[Mapping[str, Any]], str | None]


def level_of(value: Any) -> str | None:
    """Return the level that a client's or a template's *value* means; ``None`` if it means none."""
    if value is True:
        return ON
    if value is False:
        return _OFF
    if isinstance(value, Mapping):
        # Anthropic's ``thinking``, which some clients send as a variable.
        return level_of(value.get("type"))
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    if word in LEVELS:
        return word
    return _SYNONYMS.get(word)


class ThinkingControls(msgspec.Struct, frozen=True):
    """The variables by which a chat template controls the thinking."""

    #: Variables with a truth value.
    switches: Sequence[str] = ()
    #: Variables with a word, each with its words by level. ``None`` stands for the template's default, without a word.
    words: Mapping[str, Mapping[str, str | None]] = {}
    #: Those of them without which the model does not think.
    off_by_default: Collection[str] = ()
    #: Variables with a number of tokens.
    budgets: Sequence[str] = ()

    @property
    def exist(self) -> bool:
        """Whether there are controls."""
        return bool(self.switches or self.words or self.budgets)

    def adapted(self, variables: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """
        Return the client's *variables* with all controls set to the level that they, or *effort*, ask for.

        A variable that the template reads stays, with the nearest word that the template has for it. A variable of
        another template counts as the level that it means. Variables win over *effort*, but not a mere "on" over a
        level.
        """
        result = dict(variables)
        level = self._wanted(variables, effort)
        if level is not None:
            for name, value in self._values(level).items():
                result.setdefault(name, value)
        budget = budget_of(variables)
        if budget is not None:
            for name in self.budgets:
                result.setdefault(name, budget)
        for name in self.switches:
            if isinstance(result.get(name), str | Mapping):
                # A word of another template
                result[name] = level_of(result[name]) != _OFF
        for name, words in self.words.items():
            word = _fitting(words, result.get(name))
            if word is not None:
                result[name] = word
        return result

    def _wanted(self, variables: Mapping[str, Any], effort: str | None) -> str | None:
        """Return the level that a client's *variables* and *effort* ask for: a level, "on", or ``None``."""
        levels = [level for name in VARIABLES if (level := level_of(variables.get(name))) is not None]
        if _OFF in levels:
            return _OFF
        exact = [level for level in levels if level != ON]
        if exact:
            return max(exact, key=LEVELS.index)
        level = level_of(effort)
        if levels and level in (None, _OFF):
            return ON
        return level

    def _values(self, level: str) -> dict[str, Any]:
        """Return the variables that make the model think at *level*, or at the nearest level that it has."""
        values: dict[str, Any] = dict.fromkeys(self.switches, level != _OFF)
        if level == _OFF:
            values.update(dict.fromkeys(self.budgets, 0))
        for name, words in self.words.items():
            word = self._word(name, words, level)
            if word is not None:
                values[name] = word
        return values

    def _word(self, name: str, words: Mapping[str, str | None], level: str) -> str | None:
        """Return the word for *level* among *words* of *name*; ``None`` if the variable stays unset."""
        if level == ON and name not in self.off_by_default:
            return None
        if level == _OFF and _OFF not in words and self._can_turn_off:
            return None
        return _nearest(level, words)

    @property
    def _can_turn_off(self) -> bool:
        return bool(self.switches or self.budgets) or any(_OFF in words for words in self.words.values())


def budget_of(variables: Mapping[str, Any]) -> int | None:
    """Return the number of tokens for the thinking that a client's *variables* name; ``None`` for no limit."""
    named = named_budget(variables)
    if named is None:
        return None
    return named[1]


def named_budget(variables: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return which of a client's *variables* limits the thinking, and the number of tokens; ``None`` for no limit."""
    values = [(name, variables.get(name)) for name in BUDGET_NAMES]
    thinking = variables.get("thinking")
    if isinstance(thinking, Mapping):
        values += [(f"thinking.{name}", thinking.get(name)) for name in BUDGET_NAMES]
    for name, value in values:
        # -1 is no limit.
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return name, value
    return None


def _fitting(words: Mapping[str, str | None], value: Any) -> str | None:
    """Return the one of a template's *words* for a client's *value*; ``None`` if the value stays as it is."""
    level = level_of(value)
    if level is None or value in words.values():
        return None
    return _nearest(level, words)


def _nearest(level: str, words: Mapping[str, str | None]) -> str | None:
    """Return the word of the level that is nearest to *level*; the lower one of two."""
    known = list(words)
    if level != _OFF:
        # Little thinking is not near to none.
        known = [other for other in known if other != _OFF]
    if not known:
        return None
    position = _position(level)
    nearest = min(known, key=lambda other: (abs(_position(other) - position), _position(other)))
    return words[nearest]


def _position(level: str) -> int:
    if level == ON:
        return LEVELS.index("medium")
    return LEVELS.index(level)


def thinking_controls(tree: nodes.Template, variables: Collection[str], render: Render) -> ThinkingControls:
    """Return the controls of a template: its syntax *tree*, the *variables* that it reads, and how it is rendered."""
    switches: list[str] = []
    words: dict[str, Mapping[str, str | None]] = {}
    off_by_default: list[str] = []
    default = render({})
    for name in (*SWITCHES, *EFFORTS, *MODES):
        if name not in variables:
            continue
        literals = set(_literals(tree, name))
        if name in SWITCHES and not literals:
            if render({name: True}) != render({name: False}):
                switches.append(name)
            continue
        known = _words(name, literals, render)
        if known:
            words[name] = known
        if known.get(_OFF) is not None and render({name: known[_OFF]}) == default:
            off_by_default.append(name)
    budgets = [name for name in BUDGETS if name in variables]
    return ThinkingControls(switches=switches, words=words, off_by_default=off_by_default, budgets=budgets)


def _words(name: str, literals: Collection[str], render: Render) -> Mapping[str, str | None]:
    """Return the words that the template has for the variable *name*, by level."""
    words: dict[str, str | None] = {}
    prompts: list[str] = []
    for literal in sorted(literals):
        level = level_of(literal)
        prompt = render({name: literal})
        if level is not None and prompt is not None:
            if level == ON and name in EFFORTS:
                # A level of its own, "auto" for example, but not one that clients ask for
                continue
            if level == ON:
                level = "medium"
            words.setdefault(level, literal)
            prompts.append(prompt)
    other = render({name: _GARBAGE})
    if other is None or other in prompts:
        return words
    if _GARBAGE in other:
        # It prints any word.
        for word in _COMMON_WORDS:
            if render({name: word}) is not None:
                words.setdefault(word, word)
    elif name in MODES and len(words) == 1:
        # It compares with one of two words.
        for level, word in _MODE_WORDS.items():
            words.setdefault(level, word)
    elif words:
        # What it makes of all other words is a level too: the one that it prints, or its default.
        level = _printed_level(other, prompts)
        if level is not None:
            words.setdefault(level, level)
        elif other == render({}):
            words.setdefault("medium", None)
    return words


def _printed_level(prompt: str, others: Sequence[str]) -> str | None:
    """Return the level that *prompt* names and no one of the *others* does."""
    named = set(_WORD.findall(prompt.lower()))
    for other in others:
        named -= set(_WORD.findall(other.lower()))
    levels = [level for level in LEVELS if level in named and level != _OFF]
    if len(levels) == 1:
        return levels[0]
    return None


def _literals(tree: nodes.Template, name: str) -> Iterator[str]:
    """Yield the texts that the template compares the variable *name*, or a copy of it, with."""
    copies = {name}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _reads(assignment.node, copies):
            copies.add(assignment.target.name)
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(_reads(side, copies) for side in sides):
            for side in sides:
                yield from _texts(side)
    for item in tree.find_all(nodes.Getitem):
        if _reads(item.arg, copies) and isinstance(item.node, nodes.Dict):
            for pair in item.node.items:
                yield from _texts(pair.key)


def _reads(node: nodes.Node, names: Collection[str]) -> bool:
    """Return whether *node* is one of *names*, perhaps with a default or a filter."""
    if _is_copy(node, names):
        return True
    if isinstance(node, nodes.CondExpr):
        return _reads(node.expr1, names) or (node.expr2 is not None and _reads(node.expr2, names))
    if isinstance(node, nodes.Or | nodes.And):
        return _reads(node.left, names) or _reads(node.right, names)
    return False


def _is_copy(node: nodes.Node, names: Collection[str]) -> bool:
    while isinstance(node, nodes.Filter | nodes.Call):
        inner = node.node
        if isinstance(inner, nodes.Getattr):
            inner = inner.node
        if inner is None:
            return False
        node = inner
    return isinstance(node, nodes.Name) and node.name in names


def _texts(node: nodes.Node) -> Iterator[str]:
    for constant in _constants(node):
        if isinstance(constant.value, str):
            yield constant.value


def _constants(node: nodes.Node) -> Iterator[nodes.Const]:
    if isinstance(node, nodes.Const):
        yield node
    elif isinstance(node, nodes.List | nodes.Tuple):
        for item in node.items:
            yield from _constants(item)
    elif isinstance(node, nodes.Dict):
        for pair in node.items:
            yield from _constants(pair.key)
