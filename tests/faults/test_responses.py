"""Two services on one store of responses, one of which is killed in the middle of a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from tests.clients.service import serving, steered
from tests.triton_fixture import TestTriton

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"


def test_two_services_and_a_kill(triton: TestTriton, tmp_path: Path) -> None:
    """What one has made is there in the other, for its key alone; what it was making is incomplete, and no more."""
    options = ("--triton-url", triton.http_url, "--tokenizer", str(triton.tokenizer), "--chat-template", str(TEMPLATE))
    store = ("--responses-store", f"sqlite:{tmp_path / 'responses'}", "--api-key", "one:sk-1", "--api-key", "two:sk-2")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with serving(folders[0], *options, *store) as first:
        with serving(folders[1], *options, *store) as second:
            clients = [
                OpenAI(base_url=service.base_url, api_key=key, max_retries=0)
                for service, key in ((first, "sk-1"), (second, "sk-1"), (second, "sk-2"))
            ]
            mine, same, other = clients
            made = same.responses.create(model="vllm_model", input=steered(text="one"))
            assert "one" == mine.responses.retrieve(made.id).output_text
            with pytest.raises(NotFoundError):
                other.responses.retrieve(made.id)
            slow = same.responses.create(
                model="vllm_model", input=steered(text="two", hang_at=1), background=True, previous_response_id=made.id
            )
            assert mine.responses.retrieve(slow.id).status in ("queued", "in_progress")
            assert "cancelled" == mine.responses.cancel(slow.id).status
            stream: Any = same.responses.create(
                model="vllm_model", input=steered(text="x", hang_at=1), previous_response_id=made.id, stream=True
            )
            begun = next(iter(stream)).response
            for client in (same, other):
                client.close()
        left = mine.responses.retrieve(begun.id)
        assert ("incomplete", "interrupted") == (
            left.status,
            left.incomplete_details and left.incomplete_details.reason,
        )
        after = mine.responses.create(model="vllm_model", input=steered(text="on"), previous_response_id=begun.id)
        assert "on" == after.output_text
        mine.close()
        assert [] == first.complaints()
