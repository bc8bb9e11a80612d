"""The built-in templates write exactly the formats that the model families publish."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.errors import InvalidRequest
from triton_openai.prompts import prompter
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.template import ChatTemplate

TOKENS = {"bos_token": "<bos>", "eos_token": "</s>"}


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    """Return messages of (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in pairs]


QUESTION = turns(("user", " Hi "))
TALK = turns(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"))
ANSWERED = TALK[:3]
DOUBLED = turns(("system", "A"), ("system", "B"), ("user", "1"), ("user", "2"), ("assistant", "3"), ("assistant", "4"))
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": "rain"},
]


def render(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Render *messages* with the built-in *name*."""
    return ChatTemplate(prompter.read_builtin(name), name=name, special_tokens=TOKENS).render(
        messages, Rendering(**options)
    )


def llama3(role: str, content: str | None = None) -> str:
    """Return one turn as Meta documents it: header, two newlines, text, end of turn."""
    head = f"<|start_header_id|>{role}<|end_header_id|>\n\n"
    return head if content is None else f"{head}{content}<|eot_id|>"


def test_llama3() -> None:
    """Llama 3 writes a header for each turn, and trims."""
    assert render("llama3", QUESTION) == "<bos>" + llama3("user", "Hi") + llama3("assistant")
    assert render("llama3", TALK) == (
        "<bos>"
        + llama3("system", "Be kind.")
        + llama3("user", "Hi")
        + llama3("assistant", "Hello!")
        + llama3("user", "Bye")
        + llama3("assistant")
    )
    assert render("llama3", QUESTION, add_generation_prompt=False) == "<bos>" + llama3("user", "Hi")


def test_llama3_tools() -> None:
    """Llama 3 writes calls as 3.1 does, and answers of tools as ipython."""
    assert render("llama3", CALLS, add_generation_prompt=False) == (
        "<bos>"
        + llama3("user", "Weather?")
        + llama3("assistant", '{"name": "get", "parameters": {"city": "Köln"}}')
        + llama3("ipython", "sun")
        + llama3("ipython", "rain")
    )


def test_chatml() -> None:
    """ChatML writes each turn between its marks, untrimmed and without BOS."""
    assert render("chatml", QUESTION) == "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    assert render("chatml", TALK) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render("chatml", QUESTION, add_generation_prompt=False) == "<|im_start|>user\n Hi <|im_end|>\n"
    assert (
        render("chatml", turns(("assistant", "")), add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"
    )


def test_chatml_tools() -> None:
    """ChatML writes calls as Hermes and Qwen do, and answers of tools as one turn of the user."""
    assert render("chatml", CALLS, add_generation_prompt=False) == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    )


def test_mistral() -> None:
    """Mistral's third format: the system goes in front of the last question; answers end with EOS."""
    assert render("mistral", QUESTION) == "<bos>[INST] Hi[/INST]"
    assert render("mistral", TALK) == "<bos>[INST] Hi[/INST] Hello!</s>[INST] Be kind.\n\nBye[/INST]"
    assert render("mistral", ANSWERED) == "<bos>[INST] Be kind.\n\nHi[/INST] Hello!</s>"


def test_mistral_merges_what_does_not_alternate() -> None:
    """Messages of one role in a row are one turn; equal questions are told apart."""
    assert render("mistral", DOUBLED) == "<bos>[INST] A\n\nB\n\n1\n\n2[/INST] 3\n\n4</s>"
    same = turns(("system", "S"), ("user", "q"), ("assistant", "a"), ("user", "q"))
    assert render("mistral", same) == "<bos>[INST] q[/INST] a</s>[INST] S\n\nq[/INST]"


def test_gemma() -> None:
    """Gemma calls the assistant model, and has the system in front of the first question."""
    assert render("gemma", QUESTION) == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert render("gemma", TALK) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    assert render("gemma", ANSWERED, add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
    )


def test_gemma_merges_what_does_not_alternate() -> None:
    """Messages of one role in a row are one turn."""
    assert render("gemma", DOUBLED, add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nA\n\nB\n\n1\n\n2<end_of_turn>\n<start_of_turn>model\n3\n\n4<end_of_turn>\n"
    )


@every_case("name", ["mistral", "gemma"])
@every_case(
    "messages,reason",
    [
        (turns(("assistant", "Hello!"), ("user", "Hi")), "must be the user's"),
        (turns(("system", "S"), ("assistant", "Hello!")), "must be the user's"),
        (turns(("system", "S")), "at least one message of the user"),
        (CALLS[:2], "has no tool calls"),
        (turns(("user", "Hi"), ("tool", "x")), "has no tool calls"),
    ],
)
def test_what_mistral_and_gemma_refuse(name: str, messages: list[dict[str, Any]], reason: str) -> None:
    """Talks that these formats cannot express are refused in words."""
    with pytest.raises(InvalidRequest, match=reason):
        render(name, messages)


def test_plain() -> None:
    """The plain template writes a script, instructions first."""
    assert render("plain", QUESTION) == "User: Hi\nAssistant:"
    assert render("plain", TALK) == "Be kind.\n\nUser: Hi\nAssistant: Hello!\nUser: Bye\nAssistant:"
    assert render("plain", QUESTION, add_generation_prompt=False) == "User: Hi\n"
    with pytest.raises(InvalidRequest, match="has no tool calls"):
        render("plain", CALLS)


@every_case("name", prompter.NAMES)
def test_built_ins_take_strings_and_need_no_special_tokens(name: str) -> None:
    """Every built-in reads strings, and works where no special token is known."""
    template = ChatTemplate(prompter.read_builtin(name), name=name)

    assert not template.takes_parts
    assert not template.tool_form.null_content
    assert "Hi" in template.render(QUESTION)
    assert "tools" not in template.variables
