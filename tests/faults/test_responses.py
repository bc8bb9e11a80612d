"""Two services on one store of responses: one is killed in the middle of a response, then the disk is full."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, NotFoundError, OpenAI

from tests.clients.service import serving, steered
from tests.faults.surroundings import Own

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"


def test_two_services_and_a_kill(own: Own, tmp_path: Path) -> None:
    """What one has made is there in the other, for its key alone; what it was making is incomplete, and no more."""
    tokenizer = str(own.repository.tokenizer)
    options = ("--triton-url", own.url("http"), "--tokenizer", tokenizer, "--chat-template", str(TEMPLATE))
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
                model="vllm_model",
                input=steered(text="two three", hang_at=1),
                background=True,
                previous_response_id=made.id,
            )
            # What the one makes, the other shows as it comes; and what it cancels keeps what was shown.
            far: Any = mine.responses.retrieve(slow.id, stream=True)
            shown = next(event for event in far if event.type == "response.output_text.delta")
            assert "in_progress" == mine.responses.retrieve(slow.id).status
            cancelled = mine.responses.cancel(slow.id)
            assert ("cancelled", shown.delta) == (cancelled.status, cancelled.output_text)
            assert "response.cancelled" == list(far)[-1].type
            assert cancelled == same.responses.retrieve(slow.id)
            killed = same.responses.create(
                model="vllm_model", input=steered(text="one two", hang_at=1), background=True, stream=True
            )
            word = next(event for event in killed if event.type == "response.output_text.delta")
            far = mine.responses.retrieve(f"resp_{word.item_id[4:36]}", stream=True)
            assert word == next(event for event in far if event.type == "response.output_text.delta")
            stream: Any = same.responses.create(
                model="vllm_model", input=steered(text="x", hang_at=1), previous_response_id=made.id, stream=True
            )
            begun = next(iter(stream)).response
            for client in (same, other):
                client.close()
        end_leases(tmp_path / "responses")
        left = mine.responses.retrieve(begun.id)
        assert ("failed", "server_error") == (left.status, left.error and left.error.code)
        *_, last = far
        assert ("response.failed", word.delta) == (last.type, last.response.output_text)
        assert last.response.error == left.error
        after = mine.responses.create(model="vllm_model", input=steered(text="on"), previous_response_id=begun.id)
        assert "on" == after.output_text
        # A disk that is full: files may not grow any more.
        limits = resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE)
        long = steered("word " * 400, text="full")
        resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (first.log.stat().st_size + 2000, limits[1]))
        full = mine.responses.create(model="vllm_model", input=long)
        assert ("full", "completed", False) == (full.output_text, full.status, getattr(full, "store", None))
        with pytest.raises(InternalServerError, match="The store of responses cannot be used") as refused:
            mine.responses.create(model="vllm_model", input=long, background=True)
        assert (503, "store_unavailable") == (refused.value.status_code, refused.value.code)
        assert "on" == mine.responses.retrieve(after.id).output_text
        resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, limits)
        again = mine.responses.create(model="vllm_model", input=long)
        assert "full" == mine.responses.retrieve(again.id).output_text
        mine.close()
        assert [] == first.complaints()


def end_leases(file: Path) -> None:
    """Let the leases of makers that are dead end, without waiting for it."""
    with contextlib.closing(sqlite3.connect(file, timeout=120)) as tables, tables:
        tables.execute("UPDATE triton_openai_entry SET until = until - 60 WHERE until > ?", (time.time(),))
