"""Errors name what the client wrote, in each API for chats: the same mistake has another name in each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.unit.prompts.test_template_support import save
from triton_openai.config.tree import ModelDefaults, ModelSettings, ResponsesSettings, Settings, TritonSettings

PIXEL = "data:image/png;base64,aGk="
SCHEMA = {"type": "object"}


@asynccontextmanager
async def service(tokenizer: str) -> AsyncIterator[Proxy]:
    """Run a service with a model that says a word."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            defaults=ModelDefaults(chat_template="chatml"),
            models={"m": ModelSettings(max_model_len=64, tokenizer=tokenizer)},
            responses=ResponsesSettings(store="memory"),
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy


def asked(path: str, *said: Any, **fields: Any) -> dict[str, Any]:
    """Return a request to *path* in which user and assistant have *said* this in turn."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(said)]
    if path == "/v1/responses":
        return {"model": "m", "input": turns, "store": False, **fields}
    if path == "/v1/messages":
        return {"model": "m", "messages": turns, "max_tokens": 4, **fields}
    return {"model": "m", "messages": turns, **fields}


CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
STOPS = ["a", "b", "c", "d", "e"]
FORM = {"type": "json_schema", "schema": SCHEMA, "name": "n"}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
INPUT = {"name": "f", "input_schema": SCHEMA}
IMAGE_URL = {"type": "image_url", "image_url": {"url": PIXEL}}
INPUT_IMAGE = {"type": "input_image", "image_url": PIXEL}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}

# By what is wrong: for each API what a request has, and the field that the error names.
MISTAKES: dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any], str]]] = {
    "an image for a model of texts": [
        (CHAT, ("a", "b", [IMAGE_URL]), {}, "messages[2].content[0]"),
        (RESPONSES, ("a", "b", [INPUT_IMAGE]), {"instructions": "i"}, "input[2].content[0]"),
        (MESSAGES, ("a", "b", [IMAGE]), {"system": "s"}, "messages[2]"),
    ],
    "too many stop strings": [
        (CHAT, ("a",), {"stop": STOPS}, "stop"),
        (RESPONSES, ("a",), {"stop": STOPS}, "stop"),
        (MESSAGES, ("a",), {"stop_sequences": STOPS}, "stop_sequences"),
    ],
    "an empty stop string": [(MESSAGES, ("a",), {"stop_sequences": [""]}, "stop_sequences")],
    "a schema for a model without guided decoding": [
        (CHAT, ("a",), {"response_format": {"type": "json_schema", "json_schema": FORM}}, "response_format"),
        (RESPONSES, ("a",), {"text": {"format": FORM}}, "text.format"),
        (MESSAGES, ("a",), {"output_config": {"format": FORM}}, "output_config.format"),
    ],
    "an unknown tool as the choice": [
        (CHAT, ("a",), {"tools": [NESTED], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name"),
        (RESPONSES, ("a",), {"tools": [FLAT], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        (MESSAGES, ("a",), {"tools": [INPUT], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ],
    "a wrong name of a tool": [
        (CHAT, ("a",), {"tools": [NESTED, {"type": "function", "function": {"name": "!"}}]}, "tools[1].function.name"),
        (RESPONSES, ("a",), {"tools": [FLAT, {"type": "function", "name": "!"}]}, "tools[1].name"),
        (MESSAGES, ("a",), {"tools": [INPUT, {**INPUT, "name": "!"}]}, "tools[1].name"),
    ],
    "nothing to continue": [
        (CHAT, ("a", ""), {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        (MESSAGES, ("a", ""), {}, "messages"),
    ],
    "a prompt that is too long": [
        (CHAT, ("a b " * 200,), {}, "messages"),
        (RESPONSES, ("a b " * 200,), {}, "input"),
    ],
    "a part without its text": [
        (CHAT, ([{"type": "text"}],), {}, "messages[0].content[0]"),
        (RESPONSES, ([{"type": "input_text"}],), {}, "input[0].content[0]"),
    ],
    "a file that is elsewhere": [
        (CHAT, ([{"type": "file", "file": {"file_id": "f"}}],), {}, "messages[0].content[0].file.file_id"),
        (RESPONSES, ([{"type": "input_file", "file_id": "f"}],), {}, "input[0].content[0].file_id"),
    ],
    "fewer tokens than the least": [(CHAT, ("a",), {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens")],
}  # fmt: skip


# What other APIs call the same.
FOREIGN: dict[str, tuple[str, ...]] = {
    CHAT: ("input", "max_output_tokens", "text.format", "stop_sequences"),
    RESPONSES: ("messages", "max_completion_tokens", "response_format", "function.name"),
    MESSAGES: ("'stop'", "response_format", "continue_final_message", "function.name", "input["),
}


async def test_mistakes_have_the_clients_names(tmp_path: Path) -> None:
    """The field is that of the request, and so are the names that the sentence quotes."""
    wrong = []
    async with service(save(tmp_path)) as proxy:
        for mistake, cases in MISTAKES.items():
            for path, said, fields, param in cases:
                answer = await proxy.post(path, asked(path, *said, **fields))
                error = answer.json["error"]
                # Anthropic's errors have no field for the parameter: the message names it.
                named = error["message"] if path == MESSAGES else error["param"]
                foreign = [name for name in FOREIGN[path] if name in error["message"]]
                if answer.status != 400 or param not in named or foreign or (path != MESSAGES and param != named):
                    wrong.append((mistake, path, answer.body))

    assert [] == wrong
