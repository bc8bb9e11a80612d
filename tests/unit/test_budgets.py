"""The budget of each room in lines of code: a room grows only with a feature that the changelog names."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: By room: the lines that it began with, and what has changed them since. A feature stands with the name that the
#: changelog gives it. "Above its budget" is what is still to be cut.
BUDGETS: Mapping[str, Mapping[str, int]] = {
    "api": {
        "today": 5559,
        "the fewest turns that make a conversation fit": 97,
        "a chain is read at one moment": 21,
        "a conversation stays at its Triton": 3,
        "what no Triton of one variant answers, one of another does": 11,
        "a load tells the model's state at each Triton": 6,
        "stored chat completions": 167,
        "a response whose parent is deleted while it is made": 3,
        "streams of audio, in two forms": 36,
        "/v1/audio/speech": 209,
        "/v1/audio/transcriptions and /v1/audio/translations": 299,
        "audio_seconds_per_minute": 11,
        "audio in chats": 9,
        "files and batches": 796,
        "spans of lines of batches": 4,
        "batches that several replicas share": 25,
        "while a chat is answered, its messages take no memory": 11,
    },
    "answer": {
        "begin": 1310,
        "jobs run here, and not in the API": 37,
        "several Tritons": 58,
        "an answer that is cut inside a character ends before it": 22,
        "what waits for audio goes to another Triton too": 28,
        "/v1/audio/speech": 191,
        "/v1/audio/transcriptions and /v1/audio/translations": 159,
        "audio in chats": 19,
        "files and batches": 3,
        "streaming recognizers": 27,
    },
    "adapters": {
        "today": 1949,
        "a model that is loaded again leaves no adapter": 2,
        "/v1/audio/speech": 190,
        "/v1/audio/transcriptions and /v1/audio/translations": 242,
        "audio in chats": 4,
        "streaming recognizers": 41,
    },
    "storage": {
        "today": 848,
        "a chain is read at one moment": 6,
        "stored chat completions": 29,
        "files and batches": 421,
        "spans of lines of batches": 1,
        "metrics of batches and files": 10,
        "batches that several replicas share": 58,
        "a response whose parent is deleted while it is made": 13,
        "a cancellation that a driver takes for its own": 2,
    },
    "triton": {
        "begin": 2144,
        "heads, events and errors of Triton that do not end are bounded": 30,
        "failures of vLLM that are not about the request are a 502": 13,
        "a Triton serves the other models where one cannot be loaded": 6,
        "several Tritons": 803,
        "the fewest turns that make a conversation fit": 4,
        "/v1/audio/transcriptions and /v1/audio/translations": 8,
        "several Tritons, mended": 89,
        "answers of hundreds of megabytes are not copied, texts of errors are bounded": 42,
        "server.max_running_requests_per_endpoint": 20,
        "a model is loaded and unloaded where that can be done": 9,
        "a model that differs between Tritons is a warning": 5,
        "streaming recognizers": 8,
    },
    "models": {
        "begin": 1000,
        "draining has a module beside the packages": -129,
        "a model that lets three requests in a row wait in vain is shown": 22,
        "loads and LoRA names as in NVIDIA's frontend, --lora-separator": 36,
        "names in the settings that no model has are shown": 14,
        "loading of tokenizers and templates, from the prompts": 90,
        "several Tritons": 142,
        "/v1/audio/transcriptions and /v1/audio/translations": 10,
        "above its budget": 69,
        "/v1/audio/speech": 141,
        "a model is loaded and unloaded where that can be done": 13,
        "a model that differs between Tritons is a warning": 8,
    },
    "prompts": {
        "begin": 1350,
        "long texts are tokenized in a thread of their own": 32,
        "files of text": 33,
        "a tokenizer or a template that is not there ends the start": 17,
        "custom tools in chat completions": 14,
        "system messages where a template does not take them": 12,
        "loading has moved to the models": -90,
        "/v1/audio/transcriptions and /v1/audio/translations": 53,
        "audio in chats": 31,
    },
    "parsers": {"begin": 1650, "a forced tool call that is cut is a partial call": 20},
    "serving": {
        "begin": 950,
        "everybody whom the kernel has accepted is answered at the end": 31,
        "forms are read part by part": 77,
        "several Tritons": 1,
        "files and batches": 13,
        "server.max_running_requests_per_endpoint": 6,
        "/v1/audio/transcriptions and /v1/audio/translations": 1,
        "garbage is collected at quiet moments": 15,
    },
    "access": {
        "begin": 483,
        "limits in Redis": 94,
        "files and batches": 18,
        "audio_seconds_per_minute": 1,
        "Retry-After counts every limit of a key": 1,
    },
    "telemetry": {
        "begin": 1200,
        "a log that nobody waits for, and triton_openai_log_lines_lost_total": 126,
        "traces at less than half the cost, and a stop without a collector": 235,
        "a metric of whether the store of responses answers": 5,
        "several Tritons": 70,
        "above its budget": 120,
        "/v1/audio/speech": 9,
        "files and batches": 5,
        "metrics of batches and files": 56,
        "spans of lines of batches": 12,
    },
    "config": {
        "begin": 1120,
        "suggestions of names that do not mislead": 22,
        "responses.max_size_per_key, max_conversation_items, max_conversation_size, max_background": 16,
        "--enable-kserve-frontends and its ports": 9,
        "/v1/moderations": 14,
        "several Tritons": 115,
        "/v1/audio/transcriptions and /v1/audio/translations": 22,
        "audio in chats": 6,
        "above its budget": 36,
        "/v1/audio/speech": 9,
        "files and batches": 69,
        "batches that several replicas share": 12,
        "several Tritons, mended": 8,
        "server.max_running_requests_per_endpoint": 4,
        "audio_seconds_per_minute": 1,
    },
    "batches": {
        "begin": 0,
        "the same in fewer lines": -61,
        "files and batches": 917,
        "metrics of batches and files": 45,
        "batches that several replicas share": 220,
        "descriptors of who leaves while a file is opened": 10,
    },
    "media": {
        "begin": 310,
        "files of text": 34,
        "/v1/audio/speech": 210,
        "/v1/audio/transcriptions and /v1/audio/translations": 244,
        "audio in chats": 29,
        "files that promise more than they have": 28,
    },
    "tritonserver": {
        "begin": 450,
        "backoff moved to the tasks": -14,
        "--enable-kserve-frontends and its ports": 30,
        "models that cannot be loaded are named with their reasons": 25,
        "above its budget": 16,
    },
    "cli": {
        "begin": 1150,
        "NVIDIA's command lines, and arguments of vLLM's engine": 57,
        "demo --api-key prints commands with the key": 6,
        "a file that is not there ends the start": 6,
        "demo --speech": 7,
        "several Tritons": 7,
        "above its budget": 24,
    },
    "the rest": {
        "begin": 670,
        "draining, from the models": 129,
        "what a model is for follows from types of jobs": 25,
        "backoff, from tritonserver": 14,
        "work that is too long for the event loop has threads of its own": 58,
        "errors that quote bytes that are no UTF-8": 9,
        "several Tritons": 16,
        "/v1/audio/speech": 30,
        "/v1/audio/transcriptions and /v1/audio/translations": 86,
        "audio in chats": 1,
        "files and batches": 24,
        "metrics of batches and files": 4,
        "batches that several replicas share": 17,
        "several Tritons, mended": 2,
        "server.max_running_requests_per_endpoint": 12,
        "streaming recognizers": 6,
        "a cancellation that a driver takes for its own": 14,
    },
}


def _code(path: Path) -> int:
    """Return the lines of code in a module: no blanks, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in ("", "#")}
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= _lines(node.body[0])
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            # A text has blank lines and such that look like comments.
            lines |= _lines(node)
    return len(lines - docstrings)


def _lines(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or 0) + 1))


def _room(path: Path) -> str:
    top, *inner = path.relative_to(ROOT).parts
    return top if top == "adapters" else inner[0] if len(inner) > 1 else "the rest"


def test_rooms_keep_their_budgets() -> None:
    """No room has more lines of code than its table says: cut, or name the feature that needs them."""
    found: Counter[str] = Counter()
    for folder in ("triton_openai", "adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            # Links, such as that to the adapters, are not followed.
            if not path.is_relative_to(ROOT / "triton_openai" / "demo"):
                found[_room(path)] += _code(path)

    assert {} == {
        room: f"{lines} lines, {lines - budget} too many"
        for room, lines in found.items()
        if lines > (budget := sum(BUDGETS.get(room, {}).values()))
    }
