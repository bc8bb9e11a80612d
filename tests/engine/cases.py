"""The requests that are asked of both servers: all endpoints that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = "The quick brown fox jumps over"
_IDS = [0, 75, 323, 800, 395]
_SAID = [{"role": "user", "content": "how are you"}]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": _CITY}
_TOOL = {"type": "function", "function": _FUNCTION}
_TIME = {"type": "function", "function": {**_FUNCTION, "name": "time"}}
_STRICT = {"type": "function", "function": {**_FUNCTION, "strict": True}}
_USE = {"name": "weather", "description": "Tell the weather.", "input_schema": _CITY}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
_CALLED = [
    *_SAID,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
_PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAUEBAAAACwAAAAAAQABAAACAkQBADs="
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}
# Random weights like whitespace inside JSON: penalties make an end of it.
_ENDING: Mapping[str, Any] = {"frequency_penalty": 2, "presence_penalty": 2, "max_tokens": 120}


def _saying(text: str) -> Mapping[str, Any]:
    """Return what makes a model with random weights answer *text*."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200}


def _calling(*cities: str) -> Mapping[str, Any]:
    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in cities]
    return {"tools": [_TOOL], **_saying("\n".join(calls))}


@dataclass(frozen=True)
class Case:
    """A request: of a body that is no JSON object, *body* is the bytes; without one it is a GET."""

    name: str
    path: str
    body: Mapping[str, Any] | bytes | None = None


def cases() -> Iterator[Case]:
    """Yield all requests; those that generate, and are not refused, are asked as a stream too."""
    # vLLM adds BOS to the input of a response, whether or not the template has written it.
    tables = (
        ("completion", "/v1/completions", {"model": "tiny", "prompt": _TEXT, "temperature": 0, "max_tokens": 12}),
        ("chat", "/v1/chat/completions", {"model": "tiny", "messages": _SAID, "temperature": 0, "max_tokens": 12}),
        ("response", "/v1/responses", {"model": "tiny", "input": "how are you", "temperature": 0,
                                       "max_output_tokens": 12, "chat_template_kwargs": {"without_bos": True}}),
        ("message", "/v1/messages", {"model": "tiny", "messages": _SAID, "temperature": 0, "max_tokens": 12}),
        ("count_tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": _SAID}),
        ("embedding", "/v1/embeddings", {"model": "embed", "input": _TEXT}),
        ("score", "/v1/score", {"model": "embed", "text_1": "how", "text_2": ["how", _TEXT]}),
        ("rerank", "/v1/rerank", {"model": "embed", "query": "how", "documents": [_TEXT, "how"]}),
        ("tokenize", "/tokenize", {"model": "tiny"}),
        ("detokenize", "/detokenize", {"model": "tiny", "tokens": _IDS}),
    )  # fmt: skip
    for kind, path, base in tables:
        for name, fields in _REQUESTS[kind].items():
            body = {field: value for field, value in {**base, **fields}.items() if value is not _ABSENT}
            yield Case(f"{kind}: {name}", path, body)
            if kind in _STREAMED and not name.startswith("bad: ") and not body.keys() & {"stream", "prompt_logprobs"}:
                options = {"stream_options": {"include_usage": True}} if kind in ("completion", "chat") else {}
                yield Case(f"{kind}: {name}, streamed", path, {**body, "stream": True, **options})
    yield from _OTHERS


_STREAMED = {"completion", "chat", "response", "message"}
_ABSENT = object()
#: Fields that completions and chats have.
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "a seed": {"temperature": 1, "seed": 7},
    "a negative seed": {"temperature": 1, "seed": -7},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "top_p 0": {"temperature": 1, "top_p": 0, "seed": 3},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "a stop string": {"stop": [" the", "a"], "max_tokens": 60},
    "a stop string included": {"stop": "a", "include_stop_str_in_output": True, "max_tokens": 60},
    "a stop token": {"stop_token_ids": list(range(300, 1500)), "max_tokens": 60},
    "an end": {"temperature": 1, "seed": 5, "max_tokens": 600},
    "min_tokens": {"min_tokens": 10, "stop": ["a"]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 100},
    "special tokens kept": {"skip_special_tokens": False, "max_tokens": 200, "temperature": 1.5, "seed": 2},
    "special tokens without spaces": {"spaces_between_special_tokens": False},
    "bad words": {"bad_words": ["the", "a"]},
    "token ids returned": {"return_token_ids": True},
    "several greedy answers": {"n": 2},
    "several answers": {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 3},
    "beam search": {"use_beam_search": True, "n": 2},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7, 8]},
    "the prompt's log probabilities": {"prompt_logprobs": 1},
    "a priority": {"priority": 1},
    "a LoRA adapter": {"model": "lora-a"},
    "another LoRA adapter": {"model": "lora-b", "logprobs": 1},
    "an unknown field": {"unknown": 1},
    "fields without effect": {"user": "me", "cache_salt": "salt", "request_id": "mine", "metadata": {"a": "b"}},
    "nulls": dict.fromkeys(("stop", "seed", "top_p", "n", "logit_bias", "user", "stream_options", "response_format")),
    "a JSON object": {"response_format": {"type": "json_object"}, **_ENDING},
    "a JSON schema": {"response_format": _JSON_SCHEMA, **_ENDING},
    "a JSON schema by vLLM's name": {"structured_outputs": {"json": _SCHEMA}, **_ENDING},
    "a JSON schema by an older name": {"guided_json": _SCHEMA, **_ENDING},
    "text as the response format": {"response_format": {"type": "text"}},
    "a regular expression": {"structured_outputs": {"regex": "[a-c]{3}[0-9]{2}"}},
    "a choice": {"structured_outputs": {"choice": ["red", "green"]}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    "usage in each chunk": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "a stream without usage": {"stream": True},
    "bad: temperature": {"temperature": -1},
    "bad: a temperature above 2": {"temperature": 2.5},
    "bad: a temperature as text": {"temperature": "hot"},
    "a number as text": {"temperature": "0"},
    "bad: top_p": {"top_p": 1.5},
    "bad: top_k": {"top_k": -2},
    "bad: min_p": {"min_p": 2},
    "bad: frequency_penalty": {"frequency_penalty": 3},
    "bad: repetition_penalty": {"repetition_penalty": 0},
    "bad: max_tokens": {"max_tokens": -1},
    "bad: max_tokens 0": {"max_tokens": 0},
    "a whole number with a point": {"max_tokens": 4.0},
    "bad: max_tokens as a fraction": {"max_tokens": 4.5},
    "bad: min_tokens": {"min_tokens": 20},
    "bad: n": {"n": 0},
    "bad: too many answers": {"n": 100000},
    "bad: a seed": {"seed": 2**70},
    "bad: stop strings": {"stop": list("abcdefghi")},
    "bad: an empty stop string": {"stop": ""},
    "bad: stop of another type": {"stop": 5},
    "bad: stream options": {"stream_options": {"include_usage": True}},
    "bad: stream of another type": {"stream": "often"},
    "bad: a model that is not there": {"model": "nothing"},
    "bad: too many tokens": {"max_tokens": 5000},
    "bad: a regular expression": {"structured_outputs": {"regex": "["}},
    "bad: two guides": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "bad: an empty guide": {"structured_outputs": {}},
    "bad: a response format": {"response_format": {"type": "yaml"}},
    "bad: logit_bias": {"logit_bias": {"5": 200}},
}

_REQUESTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "completion": {
        **_SAMPLING,
        "several prompts": {"prompt": [_TEXT, "how are you"]},
        "token ids": {"prompt": _IDS},
        "lists of token ids": {"prompt": [_IDS, _IDS[:3]]},
        "token ids echoed": {"prompt": _IDS, "echo": True},
        "token ids without BOS": {"prompt": _IDS[1:]},
        "echo": {"echo": True},
        "echo alone": {"echo": True, "max_tokens": 0},
        "echo with log probabilities": {"echo": True, "logprobs": 1},
        "log probabilities": {"logprobs": 3},
        "log probabilities of a choice": {"structured_outputs": {"choice": ["red", "green"]}, "logprobs": 2},
        "its own log probabilities alone": {"logprobs": 0},
        "more log probabilities than OpenAI's five": {"logprobs": 10},
        "log probabilities by token ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
        "no special tokens": {"add_special_tokens": False},
        "no special tokens, written out": {"prompt": "<|startoftext|>how are you", "add_special_tokens": False},
        "cut": {"truncate_prompt_tokens": 3, "return_token_ids": True},
        "cut at its end": {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True},
        "cut at its beginning": {"truncate_prompt_tokens": 3, "truncation_side": "left", "return_token_ids": True},
        "the best of several": {"best_of": 2, "temperature": 1, "seed": 3},
        "a suffix": {"suffix": "end"},
        "no max_tokens": {"max_tokens": _ABSENT, "temperature": 1, "seed": 5},
        "bad: a prompt that is too long": {"prompt": _TEXT * 400},
        "bad: a token id": {"prompt": [5, 99999]},
        "bad: a negative token id": {"prompt": [5, -3]},
        "bad: an empty prompt": {"prompt": ""},
        "bad: no prompts": {"prompt": []},
        "bad: no prompt": {"prompt": _ABSENT},
        "bad: a prompt of another type": {"prompt": 5},
        "bad: a prompt of two kinds": {"prompt": ["a", 5]},
        "bad: logprobs": {"logprobs": 30},
        "bad: negative logprobs": {"logprobs": -2},
    },
    "chat": {
        **{name: fields for name, fields in _SAMPLING.items() if name != "another LoRA adapter"},
        "a conversation": {"messages": [*_SAID, {"role": "assistant", "content": "well"}, *_SAID]},
        "a system message": {"messages": [{"role": "system", "content": "Be brief."}, *_SAID]},
        "a developer message": {"messages": [{"role": "developer", "content": "Be brief."}, *_SAID]},
        "a name": {"messages": [{**_SAID[0], "name": "Ann"}]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "how"}] * 2}]},
        "no parts": {"messages": [{"role": "user", "content": []}]},
        "an empty message": {"messages": [{"role": "user", "content": ""}]},
        "max_completion_tokens": {"max_completion_tokens": 5},
        "log probabilities": {"logprobs": True, "top_logprobs": 4},
        "its own log probabilities alone": {"logprobs": True},
        "a JSON schema with log probabilities": {"response_format": _JSON_SCHEMA, "logprobs": True, "top_logprobs": 5,
                                                 **_ENDING},
        "cut": {"truncate_prompt_tokens": 4, "return_token_ids": True},
        "cut to the room": {"truncate_prompt_tokens": -1, "return_token_ids": True},
        "no max_tokens": {"max_tokens": _ABSENT, "temperature": 1, "seed": 5},
        "no generation prompt": {"add_generation_prompt": False},
        "a message to continue": {"messages": [*_SAID, {"role": "assistant", "content": "I am"}],
                                  "add_generation_prompt": False, "continue_final_message": True},
        "the last message echoed": {"echo": True},
        "special tokens added": {"add_special_tokens": True},
        "variables for the template": {"chat_template_kwargs": {"unknown": True}, "return_token_ids": True},
        "documents": {"documents": [{"title": "a", "text": "b"}]},
        "an effort": {"reasoning_effort": "low"},
        "no reasoning": {"include_reasoning": False},
        "fields of OpenAI's without effect": {"store": False, "service_tier": "auto", "verbosity": "medium",
                                              "modalities": ["text"], "prompt_cache_key": "k"},
        "tools that are not used": {"tools": [_TOOL]},
        "tools that are forbidden": {"tools": [_TOOL], "tool_choice": "none"},
        "a call": _calling("Rome"),
        "two calls": _calling("Rome", "Oslo"),
        "one call alone": {**_calling("Rome", "Oslo"), "parallel_tool_calls": False},
        "a call after a text": {**_calling("Rome"), **_saying('Well. <tool_call>\n{"name": "weather", "arguments": '
                                                              '{"city": "Rome"}}\n</tool_call>')},
        "a call that is cut": {**_calling("Rome"), "max_tokens": 15},
        "a call of an unknown tool": {**_calling("Rome"), "tools": [_TIME]},
        "no JSON in a call": {"tools": [_TOOL], **_saying("<tool_call>\nRome\n</tool_call>")},
        "a call with token ids": {**_calling("Rome"), "return_token_ids": True},
        "a call with log probabilities": {**_calling("Rome"), "logprobs": True},
        "a tool by name": {"tools": [_TOOL, _TIME], "tool_choice": {"type": "function", "function": {"name": "time"}},
                           **_ENDING},
        "any tool": {"tools": [_TOOL], "tool_choice": "required", **_ENDING},
        "a tool of two": {"tools": [_TOOL, _TIME], "tool_choice": "required", "parallel_tool_calls": False, **_ENDING},
        "any strict tool": {"tools": [_STRICT], "tool_choice": "required", "parallel_tool_calls": False, **_ENDING},
        "a strict tool": {"tools": [_STRICT]},
        "a tool without a description": {"tools": [{"type": "function", "function": {"name": "a",
                                                                                   "parameters": _CITY}}]},
        "what a tool answered": {"messages": _CALLED, "tools": [_TOOL]},
        "what a tool answered, without tools": {"messages": _CALLED},
        "a legacy function": {"functions": [_FUNCTION]},
        "no tools": {"tools": []},
        "bad: no messages": {"messages": []},
        "bad: messages missing": {"messages": _ABSENT},
        "bad: messages of another type": {"messages": "how are you"},
        "bad: a role": {"messages": [{"role": "nobody", "content": "x"}]},
        "bad: a role missing": {"messages": [{"content": "x"}]},
        "bad: content missing": {"messages": [{"role": "user"}]},
        "bad: content of another type": {"messages": [{"role": "user", "content": 5}]},
        "bad: a part of another type": {"messages": [{"role": "user", "content": [{"type": "song", "song": "x"}]}]},
        "bad: an image": {"messages": [{"role": "user", "content": [{"type": "image_url",
                                                                      "image_url": {"url": _PIXEL}}]}]},
        "bad: audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {
            "data": "AAAA", "format": "wav"}}]}]},
        "bad: too many messages' tokens": {"messages": [{"role": "user", "content": _TEXT * 400}]},
        "bad: top_logprobs alone": {"top_logprobs": 3},
        "bad: top_logprobs": {"logprobs": True, "top_logprobs": 30},
        "bad: a template": {"chat_template": "{{ messages }}"},
        "bad: two endings": {"add_generation_prompt": True, "continue_final_message": True},
        "bad: a tool choice without tools": {"tool_choice": "required"},
        "bad: a tool that is not there": {"tools": [_TOOL], "tool_choice": {"type": "function",
                                                                           "function": {"name": "nothing"}}},
        "bad: a tool choice": {"tools": [_TOOL], "tool_choice": "always"},
        "bad: a tool without a function": {"tools": [{"type": "function"}]},
        "bad: a tool's schema": {"tools": [{"type": "function", "function": {"name": "a", "parameters": "b"}}]},
        "bad: a schema missing": {"response_format": {"type": "json_schema"}},
        "bad: a schema": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": "nothing"}}}},
    },
    "response": {
        "a text": {},
        "a template that begins with BOS": {"chat_template_kwargs": _ABSENT},
        "items": {"input": [{"role": "user", "content": "how are you"}]},
        "a conversation": {"input": [*_SAID, {"type": "message", "role": "assistant", "content": "well"}, *_SAID]},
        "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "how"}]}]},
        "instructions": {"instructions": "Be brief."},
        "a LoRA adapter": {"model": "lora-a"},
        "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
        "an end": {"temperature": 1, "seed": 5, "max_output_tokens": 600},
        "log probabilities": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        "a JSON schema": {"text": {"format": {"type": "json_schema", "name": "p", "schema": _SCHEMA}},
                          "max_output_tokens": 120, "frequency_penalty": 2, "presence_penalty": 2},
        "tools that are not used": {"tools": [{"type": "function", **_FUNCTION}]},
        "any tool": {"tools": [{"type": "function", **_FUNCTION, "strict": True}], "tool_choice": "required",
                     "frequency_penalty": 2, "presence_penalty": 2, "max_output_tokens": 120},
        "a tool by name": {"tools": [{"type": "function", **_FUNCTION, "strict": True}], "tool_choice": {
            "type": "function", "name": "weather"}, "frequency_penalty": 2, "presence_penalty": 2,
            "max_output_tokens": 120},
        "what a function answered": {"input": [*_SAID, {"type": "function_call", "call_id": "call_1", "name": "weather",
                                                         "arguments": '{"city": "Rome"}'},
                                               {"type": "function_call_output", "call_id": "call_1",
                                                "output": "sunny"}],
                                     "tools": [{"type": "function", **_FUNCTION}]},
        "echoed fields": {"metadata": {"a": "b"}, "user": "me", "truncation": "disabled", "store": False,
                          "parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s"},
        "stored": {"store": True},
        "an effort": {"reasoning": {"effort": "low"}},
        "bad: nothing": {"input": _ABSENT},
        "bad: an empty list": {"input": []},
        "bad: temperature": {"temperature": 3},
        "bad: a response that is not there": {"previous_response_id": "resp_0"},
        "bad: a model that is not there": {"model": "nothing"},
        "bad: a role": {"input": [{"role": "nobody", "content": "x"}]},
        "bad: an item": {"input": [{"type": "nothing"}]},
        "bad: too long": {"input": _TEXT * 400},
        "bad: max_output_tokens": {"max_output_tokens": 0},
        "bad: in the background, not stored": {"background": True, "store": False},
        "bad: a tool that is not there": {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": {
            "type": "function", "name": "nothing"}},
    },
    "message": {
        "a text": {},
        "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "how"}]}]},
        "a system prompt": {"system": "Be brief."},
        "a LoRA adapter": {"model": "lora-a"},
        "a system prompt in blocks": {"system": [{"type": "text", "text": "Be brief."}]},
        "a conversation": {"messages": [*_SAID, {"role": "assistant", "content": "well"}, *_SAID]},
        "the answer's beginning": {"messages": [*_SAID, {"role": "assistant", "content": "I am"}]},
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 1},
        "an end": {"temperature": 0, "max_tokens": 40, "stop_sequences": ["a"]},
        "tools that are not used": {"tools": [_USE]},
        "any tool": {"tools": [_USE], "tool_choice": {"type": "any"},
                     "max_tokens": 60},
        "a tool by name": {"tools": [_USE],
                           "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60},
        "what a tool answered": {
            "messages": [*_SAID, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]}],
            "tools": [_USE]},
        "metadata": {"metadata": {"user_id": "me"}},
        "a schema": {"output_config": {"format": {"type": "json_schema", "schema": _CITY}}, "max_tokens": 60},
        "more than there is room for": {"max_tokens": 5000, "stop_sequences": ["a"]},
        "bad: no max_tokens": {"max_tokens": _ABSENT},
        "bad: max_tokens": {"max_tokens": 0},
        "bad: no messages": {"messages": []},
        "bad: a role": {"messages": [{"role": "nobody", "content": "x"}]},
        "bad: content": {"messages": [{"role": "user", "content": 5}]},
        "bad: a block": {"messages": [{"role": "user", "content": [{"type": "song"}]}]},
        "bad: temperature": {"temperature": 3},
        "bad: a model that is not there": {"model": "nothing"},
        "bad: too long": {"messages": [{"role": "user", "content": _TEXT * 400}]},
        "bad: an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/gif", "data": _PIXEL.rpartition(",")[2]}}]}]},
        "bad: a tool that is not there": {"tools": [_USE],
                                          "tool_choice": {"type": "tool", "name": "nothing"}},
    },
    "count_tokens": {
        "a text": {},
        "a system prompt and tools": {"system": "Be brief.",
                                      "tools": [_USE]},
        "bad: no messages": {"messages": []},
        "bad: a model that is not there": {"model": "nothing"},
    },
    "embedding": {
        "a text": {},
        "texts": {"input": [_TEXT, "how are you"]},
        "token ids": {"input": _IDS},
        "lists of token ids": {"input": [_IDS, _IDS[:2]]},
        "base64": {"encoding_format": "base64"},
        "dimensions": {"dimensions": 16},
        "cut": {"truncate_prompt_tokens": 3},
        "cut at its beginning": {"truncate_prompt_tokens": 3, "truncation_side": "left"},
        "cut to what there is room for": {"input": _TEXT * 200, "truncate_prompt_tokens": -1},
        "cut token ids": {"input": _IDS, "truncate_prompt_tokens": 2},
        "not longer than that": {"truncate_prompt_tokens": 100},
        "fields without effect": {"user": "me", "priority": 0},
        "a conversation": {"input": _ABSENT, "messages": _SAID},
        "no special tokens": {"add_special_tokens": False},
        "not normalized": {"use_activation": False},
        "half precision": {"encoding_format": "base64", "embed_dtype": "float16"},
        "an empty text": {"input": ""},
        "bad: too long": {"input": _TEXT * 200},
        "bad: too long a cut": {"truncate_prompt_tokens": 1000},
        "bad: dimensions": {"dimensions": 1000},
        "bad: no dimensions": {"dimensions": 0},
        "bad: no inputs": {"input": []},
        "bad: no input": {"input": _ABSENT},
        "bad: input of another type": {"input": {"a": 1}},
        "bad: a token id": {"input": [5, 99999]},
        "bad: encoding_format": {"encoding_format": "hex"},
        "bad: a model that is not there": {"model": "nothing"},
    },
    "score": {
        "one against several": {},
        "pair by pair": {"text_1": ["how", "are"], "text_2": ["you", _TEXT]},
        "queries and documents": {"text_1": _ABSENT, "text_2": _ABSENT, "queries": "how", "documents": [_TEXT]},
        "bad: other numbers of texts": {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
        "bad: one side": {"text_2": _ABSENT},
        "bad: no texts": {"text_2": []},
    },
    "rerank": {
        "two documents": {},
        "the first": {"top_n": 1},
        "objects": {"documents": [{"text": "how"}, {"text": _TEXT}]},
        "bad: no documents": {"documents": []},
        "bad: no query": {"query": _ABSENT},
    },
    "tokenize": {
        "a prompt": {"prompt": _TEXT},
        "a prompt alone": {"prompt": _TEXT, "add_special_tokens": False},
        "an empty prompt": {"prompt": ""},
        "the vocabulary's strings": {"prompt": "how é 😀", "return_token_strs": True},
        "messages": {"messages": _SAID, "return_token_strs": True},
        "messages without an answer's beginning": {"messages": _SAID, "add_generation_prompt": False},
        "messages with tools": {"messages": _CALLED, "tools": [_TOOL]},
        "a message to continue": {"messages": [*_SAID, {"role": "assistant", "content": "I am"}],
                                  "add_generation_prompt": False, "continue_final_message": True},
        "a LoRA adapter": {"model": "lora-a", "prompt": _TEXT},
        "bad: nothing": {},
        "bad: both": {"prompt": "a", "messages": _SAID},
        "bad: a model that is not there": {"model": "nothing", "prompt": "a"},
    },
    "detokenize": {
        "ids": {},
        "no ids": {"tokens": []},
        "bad: an id": {"tokens": [99999]},
        "bad: a negative id": {"tokens": [-1]},
        "bad: no tokens": {"tokens": _ABSENT},
    },
}  # fmt: skip
_CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "how"}], "max_tokens": 3, "temperature": 0'
_OTHERS: Sequence[Case] = [
    Case("models", "/v1/models"),
    Case("health", "/health"),
    Case("bad: no path", "/v1/nothing"),
    Case("bad: a GET", "/v1/chat/completions"),
    Case("bad: no JSON", "/v1/chat/completions", _CHAT),
    Case("bad: a list", "/v1/chat/completions", b"[1]"),
    Case("bad: an empty body", "/v1/chat/completions", b""),
    Case("bad: no UTF-8", "/v1/chat/completions", b'{"model": "\xff"}'),
    Case("a field twice", "/v1/chat/completions", _CHAT + b', "max_tokens": 2}'),
    Case("no model", "/v1/chat/completions", _CHAT.replace(b'"model": "tiny", ', b"") + b"}"),
    Case("bad: NaN", "/v1/chat/completions", _CHAT + b', "top_p": NaN}'),
    Case("half a character", "/v1/chat/completions", _CHAT.replace(b"how", b"\\ud83d") + b"}"),
]
