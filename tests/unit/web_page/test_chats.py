"""The chats that the page keeps in the browser."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.programs import found, needs

MODULE = Path(__file__).parents[3] / "triton_openai/page/chats.js"
_CALL = {"id": "a", "type": "function", "function": {"name": "b", "arguments": "{}"}}
_IMAGE = "data:image/png;base64,AAAA"


def chat(**message: Any) -> Any:
    """Return a chat with one message."""
    return {"id": "1", "messages": [{"role": "assistant", "content": "x", **message}]}


#: What the page can show, and what would make it fail at every start.
RIGHT = (
    chat(),
    chat(role="tool", tool_call_id="a"),
    chat(model="m", audio=["data:audio/wav;base64,AAAA"]),
    chat(images=[_IMAGE], reasoning="why", tool_calls=[_CALL], note="n", error="e"),
    chat(branches={"index": 1, "tails": [chat()["messages"]]}),
    {**chat(), "title": 1, "changed": "x", "draft": None, "settings": None},
)
WRONG = (
    {"id": "1"},
    chat(role="a b"),
    chat(role=""),
    chat(role="system"),
    chat(content=None),
    chat(reasoning={"length": 5}),
    chat(images=5),
    chat(model=["m"]),
    chat(audio="data:audio/wav;base64,AAAA"),
    chat(audio=[_IMAGE]),
    chat(images=["/v1/files"]),
    chat(images=["http://example.com/a.png"]),
    chat(tool_calls="abc"),
    chat(tool_calls=[None]),
    chat(tool_calls=[{"id": "a"}]),
    chat(branches=None),
    chat(branches={"index": 0, "tails": []}),
    chat(branches={"index": 0, "tails": [[]]}),
    chat(branches={"index": 0, "tails": "abc"}),
    chat(branches={"index": 0, "tails": ["abc"]}),
    chat(branches={"index": 0, "tails": [[None]]}),
    chat(branches={"index": 0.5, "tails": [chat()["messages"]]}),
    chat(branches={"index": 2, "tails": [chat()["messages"]]}),
)


@needs("Node.js")
def test_chats_of_files_and_of_other_tabs() -> None:
    """
    Only a chat that can be shown is taken. What another tab keeps is not lost, and a draft stays.

    What is typed is written alone, however long the chats are, and is there after a reload.
    """
    command = [found("Node.js"), str(Path(__file__).with_name("chats.mjs")), str(MODULE)]
    done = subprocess.run(command, input=json.dumps([*RIGHT, *WRONG]), capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    assert [True] * len(RIGHT) + [False] * len(WRONG) == made["taken"]
    assert ["one", "three", "two"] == made["texts"]
    assert (True, True) == (made["changed"], made["same"])
    assert ["draft"] == made["drafts"]
    assert 1_000 > made["typed"].pop("largest")
    drafts = {"afterReload": "Hey", "afterLeaving": "Hey", "afterSending": "", "ofNew": "new"}
    assert {**drafts, "withOthers": True, "left": False} == made["typed"]
