"""
One case for each parameter of the API: a value, what reaches the model, and what reaches the client.

A new parameter needs one line in `CASES`, and a test fails until it has it. What an adapter's table says of it (mapped,
done here, ignored, refused) is not repeated here: `tests.conformance.test_parameter_table` reads the table.
"""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.conformance.calls import LIMITS
from triton_openai.adapters._common.base import Capabilities

WORDS = "one two three"
PROMPT = "{prompt}"


@dataclass(frozen=True)
class Case:
    """
    *value* is what the client sends, together with what stands in *beside*; *order* is what the stand-in is told.

    *sent* maps a model's inputs (keys of vLLM's JSON as ``sampling_parameters.key``) to their flat values, where those
    are not *value* itself or are there in addition; names that a model does not declare count for others. *prompt* is a
    part of the prompt that was not there without the parameter, empty for any other change.

    *text* is the text of the answer (``{prompt}`` stands for the prompt), and *shows* has to hold for the whole answer.
    *can* says whether a model can do it, where no table of parameters does; a model that cannot refuses it. *grpc* is
    the adapter that can say it over gRPC only, blaming *grpc_param* where that is not the parameter itself. *gone* are
    inputs that may be left out with it, and *same* those that are the same without it. Without any effect (*harmless*) the answer is byte for byte the one
    without the parameter.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=lambda: {"text": WORDS})
    sent: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    text: str = WORDS
    shows: Callable[[dict[str, Any]], bool] | None = None
    can: Callable[[Capabilities], bool] = lambda _: True
    endpoint: Literal["chat", "completions"] = "completions"
    streams: bool = True
    grpc: str | None = None
    grpc_param: str | None = None
    gone: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    harmless: bool = False
    refused: bool = False


def guided(kind: str, guide: str, fields: str) -> dict[str, str]:
    """Return a guide as TensorRT-LLM gets it (*kind* and *guide*) and as vLLM does (*fields*)."""
    tensors = {"guided_decoding_guide_type": kind, "sampling_parameters.structured_outputs": fields}
    return {**tensors, "guided_decoding_guide": guide} if guide else tensors


def calls_of(answer: dict[str, Any]) -> list[str]:
    """Return the names of the tools that were called."""
    return [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]]


def can_guide(kind: str) -> Callable[[Capabilities], bool]:
    """Return whether a model can be guided by *kind*."""
    return lambda capabilities: kind in capabilities.guides


HARMLESS: dict[str, Any] = {"harmless": True}
REFUSED: dict[str, Any] = {"refused": True}
CHAT: dict[str, Any] = {"endpoint": "chat"}
SCHEMA = '{"type":"object","properties":{"city":{"type":"string"}}}'
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
ARGUMENTS = '{"city": "Bonn"}'
FORCED: dict[str, Any] = {
    **CHAT,
    "order": {"text": ARGUMENTS},
    "text": "",
    "can": can_guide("json_schema"),
    "sent": guided("json_schema", SCHEMA, f'{{"json":{SCHEMA}}}'),
}
LOGPROBS = {"return_log_probs": True, "return_logprobs": True, "sampling_parameters.logprobs": 0}
# Five is a quotation mark; the word that is empty takes the bias from the token that begins every text.
BIAS = {
    "embedding_bias": [0.0] * 5 + [1.5] + [0.0] * 3066,
    "embedding_bias_words": ['"', ""],
    "embedding_bias_weights": [1.5, -1.5],
}
# The companion model keeps a budget of the thinking itself.
BUDGET = {"sampling.thinking_token_budget": 100}
CONVERSATION = [
    {"role": "user", "content": '<<steer {"text": "one two three"}>>'},
    {"role": "assistant", "content": "So"},
]

CASES: Mapping[str, Case] = {
    # What adapters have in their tables.
    "max_tokens": Case(2, text="one two"),
    "temperature": Case(0.5),
    "top_p": Case(0.3),
    "top_k": Case(5),
    "min_tokens": Case(4, beside={"max_tokens": 9}, order={"text": "one"}, text="oneoneoneone"),
    "seed": Case(7),
    "frequency_penalty": Case(-1.5),
    "presence_penalty": Case(0.3),
    "repetition_penalty": Case(1.2),
    "stop": Case(["two"], sent={"sampling_parameters.include_stop_str_in_output": True}, text="one "),
    "include_stop_str_in_output": Case(True, beside={"stop": ["two"]}, same=("sampling_parameters.include_stop_str_in_output",), text="one two"),
    "stop_token_ids": Case([848], sent={"return_logprobs": True, "sampling_parameters.logprobs": 0}, text="one"),
    "ignore_eos": Case(True, beside={"max_tokens": 5}, order={"text": "one two"}, text="one twoone twoone", sent={"end_id": -1}),
    "min_p": Case(0.1),
    "thinking_token_budget": Case(3),
    "length_penalty": Case(0.5),
    # As token ids (" two" is one, "two" at the start of a text is two of them), then the offsets of their ends.
    "bad_words": Case(["two"], sent={"bad_words_list": [87, 672, 848, 2, 3, -1]}, grpc="trtllm"),
    "skip_special_tokens": Case(False, order={"tokens": [356, 3, 848]}, text="one<|im_start|> two"),
    "logprobs": Case(0, sent=LOGPROBS, shows=lambda answer: WORDS == "".join(answer["choices"][0]["logprobs"]["tokens"]).removesuffix("<|im_end|>")),
    "logit_bias": Case({"5": 1.5}, sent=BIAS),
    # What is done here, or by what a model can do.
    "max_completion_tokens": Case(2, **CHAT, sent=dict.fromkeys((*LIMITS, "sampling_parameters.max_tokens"), 2), text="one two"),
    "n": Case(2, beside={"seed": 7}, shows=lambda answer: [WORDS] * 2 == [choice["text"] for choice in answer["choices"]]),
    "best_of": Case(2, beside={"seed": 7}, sent={"return_log_probs": True, "return_cumulative_logprob": True, "sampling_parameters.logprobs": 0}, can=lambda capabilities: capabilities.cumulative_logprob, streams=False),
    "echo": Case(True, text=PROMPT + WORDS),
    "top_logprobs": Case(1, **CHAT, beside={"logprobs": True}, sent={"return_generation_logits": True, "sampling_parameters.logprobs": 1}, gone=("return_log_probs",),
                         can=lambda capabilities: capabilities.top_logprobs > 0, grpc="trtllm", grpc_param="logprobs",
                         shows=lambda answer: all(1 == len(token["top_logprobs"]) for token in answer["choices"][0]["logprobs"]["content"])),
    "response_format": Case({"type": "json_object"}, sent=guided("json", "", '{"json_object":true}'), can=can_guide("json")),
    "structured_outputs": Case({"regex": "[ab]+"}, sent=guided("regex", "[ab]+", '{"regex":"[ab]+"}'), can=can_guide("regex")),
    "guided_json": Case({"type": "object"}, sent=guided("json_schema", '{"type":"object"}', '{"json":{"type":"object"}}'), can=can_guide("json_schema")),
    "guided_regex": Case("[ab]+", sent=guided("regex", "[ab]+", '{"regex":"[ab]+"}'), can=can_guide("regex")),
    "guided_choice": Case(["a.", "b"], sent=guided("regex", r"(a\.|b)", '{"choice":["a.","b"]}'), can=can_guide("choice")),
    "guided_grammar": Case("root ::= x", sent=guided("ebnf_grammar", "root ::= x", '{"grammar":"root ::= x"}'), can=can_guide("grammar")),
    "tools": Case(TOOLS["tools"], **CHAT, order={"text": CALL}, prompt='"weather"', text="", shows=lambda answer: ["weather"] == calls_of(answer)),
    "tool_choice": Case({"type": "function", "function": {"name": "weather"}}, **FORCED, beside=TOOLS, shows=lambda answer: ["weather"] == calls_of(answer)),
    "parallel_tool_calls": Case(False, **CHAT, beside=TOOLS, order={"text": CALL + CALL}, text="", shows=lambda answer: ["weather"] == calls_of(answer)),
    "functions": Case([FUNCTION], **CHAT, order={"text": CALL}, prompt='"weather"', text="", shows=lambda answer: "weather" == answer["choices"][0]["message"]["function_call"]["name"]),
    "function_call": Case({"name": "weather"}, **FORCED, beside={"functions": [FUNCTION]}, shows=lambda answer: ARGUMENTS == answer["choices"][0]["message"]["function_call"]["arguments"]),
    "reasoning_effort": Case("low", **CHAT, prompt="Think with low effort."),
    "think": Case("low", **CHAT, prompt="Think with low effort."),
    "thinking": Case({"type": "disabled"}, **CHAT, prompt="Think with low effort."),
    "enable_thinking": Case(False, **CHAT, prompt="Think with low effort."),
    "reasoning": Case({"effort": "low"}, **CHAT, prompt="Think with low effort."),
    "thinking_budget": Case(100, **CHAT, sent=BUDGET),
    "thinking_budget_tokens": Case(100, **CHAT, sent=BUDGET),
    "reasoning_budget": Case(100, **CHAT, sent=BUDGET),
    "max_thinking_tokens": Case(100, **CHAT, sent=BUDGET),
    "max_reasoning_tokens": Case(100, **CHAT, sent=BUDGET),
    "add_generation_prompt": Case(False, **CHAT, prompt=""),
    "chat_template_kwargs": Case({"flavour": "brief"}, **CHAT, prompt="Be brief."),
    "documents": Case([{"text": "A document."}], **CHAT, prompt="A document."),
    "truncate_prompt_tokens": Case(100_000, **HARMLESS),
    "truncation_side": Case("right", beside={"truncate_prompt_tokens": 100_000}, **HARMLESS),
    "add_special_tokens": Case(True, **HARMLESS),
    "continue_final_message": Case(True, **CHAT, beside={"messages": CONVERSATION}, prompt=""),
    "prompt_logprobs": Case(1, can=lambda capabilities: capabilities.prompt_logprobs, grpc="trtllm", streams=False, shows=lambda answer: answer["choices"][0]["prompt_logprobs"][0] is None),
    "return_token_ids": Case(True, can=lambda capabilities: capabilities.token_ids, sent={"return_logprobs": True, "sampling_parameters.logprobs": 0}, shows=lambda answer: 3 <= len(answer["choices"][0]["token_ids"])),
    # Accepted, and without effect.
    "user": Case("me", **HARMLESS),
    "metadata": Case({"a": "b"}, **HARMLESS),
    "store": Case(True, **HARMLESS),
    "service_tier": Case("flex", **HARMLESS),
    "safety_identifier": Case("me", **HARMLESS),
    "prompt_cache_key": Case("key", **HARMLESS),
    "cache_salt": Case("salt", **HARMLESS),
    "detokenize": Case(True, **HARMLESS),
    "ec_transfer_params": Case({"a": 1}, **HARMLESS),
    "guided_decoding_backend": Case("xgrammar", **HARMLESS),
    "guided_whitespace_pattern": Case(" ?", **HARMLESS),
    "kv_transfer_params": Case({"a": 1}, **HARMLESS),
    "media_io_kwargs": Case({"image": {}}, **HARMLESS),
    "mm_processor_kwargs": Case({"num_crops": 4}, **HARMLESS),
    "request_id": Case("mine", **HARMLESS),
    "session_id": Case("mine", **HARMLESS),
    "stream_interval": Case(2, **HARMLESS),
    "vllm_xargs": Case({"a": 1}, **HARMLESS),
    "prompt_cache_options": Case({"mode": "x"}, **CHAT, **HARMLESS),
    "prompt_cache_retention": Case("24h", **CHAT, **HARMLESS),
    "prediction": Case({"type": "content", "content": "one"}, **CHAT, **HARMLESS),
    # Would change the answer, and cannot be supported on any model.
    "suffix": Case("end", **REFUSED),
    "logits_processors": Case(["x"], **REFUSED),
    "allowed_token_ids": Case([5, 6]),
    "logprob_token_ids": Case([1], **REFUSED),
    "prompt_embeds": Case("AAAA", **REFUSED),
    "repetition_detection": Case({"max_pattern_size": 4}, **REFUSED),
    "structural_tag": Case("{}", **REFUSED),
    "watermarking": Case(True, **REFUSED),
    "return_prompt_text": Case(True, **REFUSED),
    "return_token_offsets": Case(True, **REFUSED),
    # The stand-in's search finds the first token again and again.
    "use_beam_search": Case(True, beside={"max_tokens": 1}, order={"text": "a"}, text="a", can=lambda capabilities: capabilities.beam_search),
    "spaces_between_special_tokens": Case(False, **REFUSED),
    "return_tokens_as_token_ids": Case(True, **REFUSED),
    "include_reasoning": Case(False, **CHAT, **HARMLESS),
    # Of ten levels, vLLM's last is 0.
    "priority": Case(1, sent={"priority": -9}, can=lambda capabilities: capabilities.priority_levels > 0),
    "modalities": Case(["text", "audio"], **CHAT, **REFUSED),
    "audio": Case({"voice": "x", "format": "wav"}, **CHAT, **REFUSED),
    "verbosity": Case("high", **CHAT, **HARMLESS),
    "web_search_options": Case({}, **CHAT, **REFUSED),
    "moderation": Case({"model": "x"}, **CHAT, **REFUSED),
    "chat_template": Case("{{ messages }}", **CHAT, **REFUSED),
}  # fmt: skip
