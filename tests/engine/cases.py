"""The requests that are asked of both servers, and the differences that are known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_TEXT = "The quick brown fox jumps over"
_IDS = [0, 75, 323, 800, 395]
_SAID = [{"role": "user", "content": "how are you"}]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}
# Random weights like whitespace inside JSON: penalties make an end of it.
_ENDING: Mapping[str, Any] = {"frequency_penalty": 2, "presence_penalty": 2, "max_tokens": 120}


@dataclass(frozen=True)
class Case:
    """A request; *known* has the reasons of its differences by a pattern of their place."""

    name: str
    path: str
    body: Mapping[str, Any]
    known: Mapping[str, str] = field(default_factory=dict)


_STATUS = "status"
_HALF = "a token that is a part of a character is U+FFFD here, with its bytes, and an empty text there"
_BACKEND = "the backend adds the special tokens to every text, and takes no token ids"
#: Differences that any answer may have.
KNOWN: Mapping[str, str] = {
    r"choices\[\]\.logprobs\.(tokens|text_offset)\[\]": _HALF,
    r"choices\[\]\.logprobs\.top_logprobs\[\]\.(.*\ufffd.*)?": _HALF,
    r"choices\[\]\.logprobs\.content\[\](\.top_logprobs\[\])?\.(bytes|token)": _HALF,
    r"usage\.completion_tokens": "an embedding has no completion: OpenAI's usage has no such field",
}
_ECHOED = {r"choices\[\]\.prompt_token_ids": "vLLM's streams show the prompt's ids with echo, asked for or not"}
_ORDER = {
    r"choices\[\]\.logprobs\.content\[\]\.top_logprobs\[\].*": "vLLM puts the chosen token first, OpenAI the likeliest"
}
_NO_IDS = {_STATUS: _BACKEND}
_CUT = {
    r"choices\[\]\.(text|token_ids\[\]|message\.content|delta\.content)|(choices\[\]\.)?prompt_token_ids\[\]": _BACKEND
}
_NO_TOOLS = {_STATUS: "the model's template shows no tools: vLLM leaves them out of the prompt without a word"}
_LATE = {_STATUS: "vLLM's stream begins before the engine refuses the request"}
_ROLE = {r"choices\[\]\.(message|delta)\.role": "vLLM gives the answer the role of the last message"}


def reason(case: Case, place: str) -> str | None:
    """Return why the answers to *case* differ at *place*, where that is known."""
    known = {**KNOWN, **case.known}
    return next((why for pattern, why in known.items() if re.fullmatch(pattern, place)), None)


def cases() -> Iterator[Case]:
    """Yield all requests; those that generate are asked as a stream too."""
    for case in (*_completions(), *_chats()):
        yield case
        if "bad: nothing" not in case.name and "prompt_logprobs" not in case.body:
            body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
            yield Case(f"{case.name}, streamed", case.path, body, case.known)
    yield from _embeddings()
    yield from _tokens()


def _completion(name: str, known: Mapping[str, str] | None = None, /, **fields: Any) -> Case:
    body = {"model": "tiny", "prompt": _TEXT, "temperature": 0, "max_tokens": 12, **fields}
    return Case(f"completion: {name}", _COMPLETIONS, body, known or {})


def _chat(name: str, known: Mapping[str, str] | None = None, /, **fields: Any) -> Case:
    body = {"model": "tiny", "messages": _SAID, "temperature": 0, "max_tokens": 12, **fields}
    return Case(f"chat: {name}", _CHAT, body, known or {})


def _completions() -> Sequence[Case]:
    return [
        _completion("greedy"),
        _completion("a seed", temperature=1, seed=7),
        _completion("sampling", temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=3),
        _completion("penalties", frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2),
        _completion("several prompts", prompt=[_TEXT, "how are you"]),
        _completion("token ids", prompt=_IDS),
        _completion("token ids echoed", _ECHOED, prompt=_IDS, echo=True),
        _completion("token ids without BOS", _NO_IDS, prompt=_IDS[1:]),
        _completion("echo", _ECHOED, echo=True),
        _completion("log probabilities", logprobs=3),
        _completion("its own log probabilities alone", logprobs=0),
        _completion("token ids returned", return_token_ids=True),
        _completion("a stop string", stop=[" the", "a"], max_tokens=60),
        _completion("a stop string included", stop=["a"], include_stop_str_in_output=True, max_tokens=60),
        _completion("a stop token", stop_token_ids=list(range(300, 1500)), max_tokens=60),
        _completion("an end", max_tokens=600, logprobs=0, temperature=1, seed=5),
        _completion("min_tokens", min_tokens=10, stop=["a"]),
        _completion("ignore_eos", ignore_eos=True, max_tokens=100),
        _completion("special tokens kept", skip_special_tokens=False, max_tokens=200, temperature=1.5, seed=2),
        _completion("bad words", bad_words=["the", "a"]),
        _completion("no special tokens", _NO_IDS, add_special_tokens=False),
        _completion("no special tokens, written out", prompt="<|startoftext|>how are you", add_special_tokens=False),
        _completion("cut", truncate_prompt_tokens=3, return_token_ids=True),
        _completion("cut at its end", truncate_prompt_tokens=3, truncation_side="right", return_token_ids=True),
        _completion(
            "cut at its beginning", _CUT, truncate_prompt_tokens=3, truncation_side="left", return_token_ids=True
        ),
        _completion("a LoRA adapter", model="lora-a"),
        _completion("another LoRA adapter", model="lora-b", logprobs=1),
        _completion("a regular expression", structured_outputs={"regex": "[a-c]{3}[0-9]{2}"}, logprobs=5),
        _completion("a choice", structured_outputs={"choice": ["red", "green"]}, logprobs=2),
        _completion("a grammar", structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
        _completion("a JSON schema", structured_outputs={"json": _SCHEMA}, **_ENDING),
        _completion("bad: a prompt that is too long", prompt=_TEXT * 400),
        _completion("bad: too many tokens", max_tokens=5000),
        _completion("bad: a model that is not there", model="nothing"),
        _completion("bad: a regular expression", _LATE, structured_outputs={"regex": "["}),
        _completion("bad: a token id", _LATE, prompt=[5, 99999]),
        _completion("bad: nothing", {_STATUS: "the backend adds a token to it, which can be continued"}, prompt=""),
        _completion("bad: temperature", temperature=-1),
    ]


def _chats() -> Sequence[Case]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}
    return [
        _chat("greedy"),
        _chat("a conversation", messages=[*_SAID, {"role": "assistant", "content": "well"}, *_SAID]),
        _chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "how"}] * 2}]),
        _chat("two answers", {_STATUS: "greedy answers are all the same, and are given here"}, n=2),
        _chat("max_completion_tokens", max_completion_tokens=5),
        _chat("log probabilities", logprobs=True, top_logprobs=4),
        _chat("its own log probabilities alone", logprobs=True),
        _chat("token ids returned", return_token_ids=True),
        _chat("a stop string", stop="a", max_tokens=60),
        _chat("a stop token", stop_token_ids=list(range(300, 1500)), max_tokens=60),
        _chat("an end", max_tokens=600, temperature=1, seed=5),
        _chat("cut", _CUT, truncate_prompt_tokens=4, return_token_ids=True),
        _chat("cut to the room", truncate_prompt_tokens=-1, return_token_ids=True),
        _chat("no generation prompt", _ROLE, add_generation_prompt=False),
        _chat(
            "a message to continue",
            messages=[*_SAID, {"role": "assistant", "content": "I am"}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        _chat("a LoRA adapter", model="lora-a"),
        _chat("a JSON object", response_format={"type": "json_object"}, **_ENDING),
        _chat("a JSON schema", response_format=schema, **_ENDING),
        _chat(
            "a JSON schema with log probabilities",
            _ORDER,
            response_format=schema,
            logprobs=True,
            top_logprobs=5,
            **_ENDING,
        ),
        _chat("tools that are not used", _NO_TOOLS, tools=[_TOOL]),
        _chat(
            "a tool by name",
            _NO_TOOLS,
            tools=[_TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            **_ENDING,
        ),
        _chat("any tool", _NO_TOOLS, tools=[_TOOL], tool_choice="required", **_ENDING),
        _chat("bad: no messages", messages=[]),
        _chat("bad: a role", {_STATUS: "vLLM takes any role"}, messages=[{"role": "nobody", "content": "x"}]),
        _chat("bad: top_logprobs alone", top_logprobs=3),
    ]


def _embedding(name: str, known: Mapping[str, str] | None = None, **fields: Any) -> Case:
    return Case(f"embedding: {name}", _EMBEDDINGS, {"model": "embed", "input": _TEXT, **fields}, known or {})


def _embeddings() -> Sequence[Case]:
    return [
        _embedding("a text"),
        _embedding("texts", input=[_TEXT, "how are you"]),
        _embedding("token ids", input=_IDS),
        _embedding("lists of token ids", input=[_IDS, _IDS[:2]]),
        _embedding("dimensions", dimensions=16),
        _embedding("cut", truncate_prompt_tokens=3),
        _embedding("cut at its beginning", truncate_prompt_tokens=3, truncation_side="left"),
        _embedding("cut to what there is room for", input=_TEXT * 200, truncate_prompt_tokens=-1),
        _embedding("cut token ids", input=_IDS, truncate_prompt_tokens=2),
        _embedding("not longer than that", truncate_prompt_tokens=100),
        _embedding("bad: too long", input=_TEXT * 200),
        _embedding("bad: too long a cut", truncate_prompt_tokens=1000),
        _embedding("bad: dimensions", dimensions=1000),
        _embedding("bad: empty", input=[]),
    ]


def _tokens() -> Sequence[Case]:
    def tokenize(name: str, **fields: Any) -> Case:
        return Case(f"tokenize: {name}", "/tokenize", {"model": "tiny", **fields})

    return [
        tokenize("a prompt", prompt=_TEXT),
        tokenize("a prompt alone", prompt=_TEXT, add_special_tokens=False),
        tokenize("the vocabulary's strings", prompt="how é 😀", return_token_strs=True),
        tokenize("messages", messages=_SAID, return_token_strs=True),
        tokenize("messages without an answer's beginning", messages=_SAID, add_generation_prompt=False),
        Case("detokenize", "/detokenize", {"model": "tiny", "tokens": _IDS}),
    ]
