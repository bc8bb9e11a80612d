"""What becomes of tools that a chat template does not take or show; and of a request of instructions alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases import every_case
from tests.conformance.calls import steered
from tests.faces import MODEL, running

TOOL: dict[str, Any] = {"name": "get_weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
#: Each template, and what becomes of tools with it.
TEMPLATES = {
    PLAIN: "refused",
    "{% if tools %}{{ raise_exception('No tools here.') }}{% endif %}" + PLAIN: "refused",
    "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + PLAIN: "ignored",
    "{% if tools %}{{ (tools | length) ~ ' tools' }}{% endif %}" + PLAIN: "ignored",
    "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN: "shown",
}


def body_of(face: str) -> tuple[str, dict[str, Any]]:
    """Return the path of *face* and a request with a tool."""
    said = steered(text="Yes.")
    messages = [{"role": "user", "content": said}]
    if face == "chat":
        tools: list[dict[str, Any]] = [{"type": "function", "function": TOOL}]
        return "/v1/chat/completions", {"messages": messages, "tools": tools}
    if face == "responses":
        return "/v1/responses", {"input": said, "tools": [{"type": "function", **TOOL}], "store": False}
    tools = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
    return "/v1/messages", {"messages": messages, "tools": tools, "max_tokens": 20}


@every_case("template, outcome", TEMPLATES.items())
async def test_tools_are_shown_or_it_is_said(template: str, outcome: str, tmp_path: Path) -> None:
    """A refusal names the remedy, and an answer without the tools has a header that names them."""
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    async with running(chat_template=str(file), tool_call_parser="hermes") as faces:
        for face in ("chat", "responses", "messages"):
            path, body = body_of(face)
            answer = await faces.post(path, {"model": MODEL, **body})
            ignored = answer.headers.get("x-triton-openai-ignored")
            if outcome == "refused":
                assert 400 == answer.status
                assert "--chat-template" in answer.json["error"]["message"]
            else:
                assert 200 == answer.status, answer.body
                assert ("tools" if outcome == "ignored" else None) == ignored


@every_case("name", ["chatml", "mistral", "gemma", "llama3"])
async def test_instructions_without_input(name: str) -> None:
    """An empty list is no missing input where there are instructions."""
    async with running(chat_template=name) as faces:
        body = {"model": MODEL, "instructions": steered(text="Yes."), "store": False}
        answer = await faces.post("/v1/responses", {**body, "input": []})
        assert (200, "Yes.") == (answer.status, answer.json["output"][0]["content"][0]["text"])
        for wrong in (body, {**body, "input": [], "instructions": None}):
            refused = await faces.post("/v1/responses", wrong)
            assert (400, "input") == (refused.status, refused.error["param"])
