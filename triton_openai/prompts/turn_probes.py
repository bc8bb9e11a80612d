"""Finds out which orders of turns a chat template takes, by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton_openai.prompts.turns import ANY_ORDER, TurnRules, fit_turns

#: Renders a conversation; ``None`` if the template refuses it.
Render = Callable[[Sequence[Mapping[str, Any]]], str | None]

# Words of the probes, each for one message
_FIRST = "probed_first"
_SECOND = "probed_second"
_THIRD = "probed_third"


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class TurnProbe:
    """Probes one template."""

    def __init__(self, render: Render, call_turn: Sequence[Mapping[str, Any]] | None) -> None:
        """
        Probe the template that *render* renders with. *call_turn* is a question, a call and its result in the form that
        the template takes; ``None`` if it takes no calls.
        """
        self._render = render
        self._call_turn = call_turn

    def rules(self) -> TurnRules:
        """Return the rules of the template."""
        if not self._shows([_user(_FIRST), _assistant(_SECOND), _user(_THIRD)], ANY_ORDER):
            # It may show the last message only, for a backend that writes the rest.
            return ANY_ORDER
        rules: dict[str, bool] = {}
        for name, conversation in _CONVERSATIONS.items():
            self._probe(rules, conversation, [name])
        if self._shows_calls(rules):
            assert self._call_turn is not None, "it is shown"
            self._probe_calls(rules, list(self._call_turn))
            self._probe(rules, _ORPHAN, ["orphans_as_text"])
        else:
            self._probe(rules, _PLAIN_CALL, ["calls_as_text"])
        if not rules:
            return ANY_ORDER
        return TurnRules(**rules)

    def _shows_calls(self, rules: dict[str, bool]) -> bool:
        """Return whether the template shows calls and their results."""
        if self._call_turn is None:
            return False
        question, call, result = self._call_turn
        words = [question, call, {**result, "content": _FIRST}]
        answered = [*words, _assistant(_SECOND), _user(_THIRD)]
        return self._shows(words, TurnRules(**rules)) or self._shows(answered, TurnRules(**rules))

    def _probe_calls(self, rules: dict[str, bool], turn: list[Mapping[str, Any]]) -> None:
        question, call, result = turn
        if not self._is_rendered(turn, TurnRules(**rules)):
            return
        self._probe(rules, [question, call, result, _user(_FIRST)], ["answers_results"])
        for remedy in (["answers_calls"], ["adds_results"], ["adds_results", "answers_results"]):
            if self._probe(rules, [question, call, _user(_FIRST)], remedy):
                break
        self._probe(rules, _parallel_calls(question, call, result), ["splits_calls"])

    def _probe(self, rules: dict[str, bool], conversation: Sequence[Mapping[str, Any]], remedy: Sequence[str]) -> bool:
        """Add *remedy* to *rules* if *conversation* needs it. Return whether the template takes it then."""
        if self._shows(conversation, TurnRules(**rules)):
            return True
        better = {**rules, **dict.fromkeys(remedy, True)}
        if self._shows(conversation, TurnRules(**better)):
            rules.update(better)
            return True
        return False

    def _shows(self, conversation: Sequence[Mapping[str, Any]], rules: TurnRules) -> bool:
        """Return whether the template shows all probed words of *conversation*, in the order of *rules*."""
        prompt = self._fitted(conversation, rules)
        if prompt is None:
            return False
        words = str(conversation)
        return all(word in prompt for word in (_FIRST, _SECOND, _THIRD) if word in words)

    def _is_rendered(self, conversation: Sequence[Mapping[str, Any]], rules: TurnRules) -> bool:
        return self._fitted(conversation, rules) is not None

    def _fitted(self, conversation: Sequence[Mapping[str, Any]], rules: TurnRules) -> str | None:
        return self._render(fit_turns([dict(message) for message in conversation], rules))


#: By the rule that a template needs which does not take it as it is.
_CONVERSATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "system_in_user": [{"role": "system", "content": _SECOND}, _user(_FIRST)],
    "needs_user": [{"role": "system", "content": _FIRST}],
    "user_first": [_assistant(_SECOND), _user(_FIRST)],
    "merges_users": [_user(_FIRST), _user(_SECOND)],
    "merges_assistants": [_user(_FIRST), _assistant(_SECOND), _assistant(_THIRD), _user("?")],
    "fills_assistants": [_user(_FIRST), _assistant(""), _user(_SECOND)],
}


#: A result whose call is not in the conversation.
_ORPHAN: Sequence[Mapping[str, Any]] = (
    _user(_FIRST),
    {"role": "tool", "tool_call_id": "Ab3dE6gH9", "content": _SECOND, "name": "f"},
    _user(_THIRD),
)
#: A call and its result, for a template that has neither.
_PLAIN_CALL: Sequence[Mapping[str, Any]] = (
    _user("Probe."),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "Ab3dE6gH9", "function": {"name": _FIRST, "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "Ab3dE6gH9", "content": _SECOND},
    _user(_THIRD),
)


def _parallel_calls(
    question: Mapping[str, Any], call: Mapping[str, Any], result: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return a turn with two calls and their results."""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, word in enumerate((_FIRST, _SECOND)):
        call_id = f"Ab3dE6gH{number}"
        made = dict(call["tool_calls"][0])
        made["id"] = call_id
        made["function"] = {**made["function"], "name": word}
        calls.append(made)
        answer = {**result, "tool_call_id": call_id, "content": f"Result {number}."}
        if "name" in answer:
            answer["name"] = word
        results.append(answer)
    return [question, {**call, "tool_calls": calls}, *results]
