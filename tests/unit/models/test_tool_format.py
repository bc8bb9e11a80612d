"""The format of tool calls that an operator describes: in a model's settings, or in a file beside its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.prompts.test_template_support import save
from triton_openai.config.tree import ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.models.loading import LazyPrompter
from triton_openai.parsers.events import ToolCallStart

FORMAT: dict[str, Any] = {"notation": "json", "open": ["<<"], "close": [">>"]}


async def parsers_of(folder: Path, **settings: Any) -> LazyPrompter:
    """Return the prompter of a model whose tokenizer is in *folder*."""
    tokenizer = save(folder, tokenizer_config={"chat_template": "<tool_call>{{ messages[0].content }}"})
    lazy = LazyPrompter(ModelSettings(tokenizer=tokenizer, **settings), None)
    await lazy.get()
    return lazy


async def test_a_format_in_the_settings(tmp_path: Path) -> None:
    """It wins over what the chat template shows; a named parser wins over it."""
    lazy = await parsers_of(tmp_path, tool_format=FORMAT)
    assert lazy.parsers.tools is not None
    (start, *_) = lazy.parsers.tools({"f": {}}).feed('<<{"name": "f", "arguments": {}}>>')
    assert isinstance(start, ToolCallStart)

    named = await parsers_of(tmp_path, tool_format=FORMAT, tool_call_parser="mistral")
    assert "Mistral" == (named.parsers.tools and named.parsers.tools.__name__)
    shown = await parsers_of(tmp_path)
    assert ("hermes", "the chat template has <tool_call>") == (
        shown.parsers.tools and shown.parsers.tools.__name__, shown.parsers.tools_reason,
    )  # fmt: skip


async def test_a_format_beside_the_tokenizer(tmp_path: Path) -> None:
    """A file is read as the settings are, and what is wrong with it is said."""
    (tmp_path / "tool_format.yaml").write_text('notation: json\nopen: ["<<"]\n', encoding="utf-8")
    lazy = await parsers_of(tmp_path)
    assert "tool_format" == lazy.parsers.tools_reason

    (tmp_path / "tool_format.yaml").write_text("notation: morse\nopen: []\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="morse"):
        await parsers_of(tmp_path)
