"""The versions of questions and answers, and the search over all of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.programs import found, needs

PAGE = Path(__file__).parents[3] / "triton_openai/page"


@needs("Node.js")
def test_versions_of_messages() -> None:
    """A changed question and a regenerated answer keep their former versions, which are searched too."""
    command = [found("Node.js"), str(Path(__file__).with_name("branches.mjs")), str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {
        "regenerated": ["q1", "a1", "q2", "a4 3/3"],
        "first": ["q1", "a1", "q2", "a2 1/3"],
        "edited": ["Other QUESTION 2/2", "b1"],
        "reloaded": ["Other QUESTION 2/2", "b1"],
        "found": [[["Other QUESTION", "Other QUESTION"]], [["Other QUESTION", "a4"]], [], []],
        "back": ["q1 1/2", "a1", "q2", "a2 1/3"],
        "removed": ["q1 1/2", "a1", "q2", "a3 2/2"],
        "removedTwice": ["q1 1/2", "a1", "q2", "a2"],
        "other": ["Other QUESTION 2/2", "b1"],
        "withoutImages": ["Other QUESTION", "q1", "a1", "q2", "a2", "b1"],
        "empty": [],
    } == json.loads(done.stdout)
