"""The differences that are known, each with its reason: by rule, not by request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Why answers differ; the value is the heading in the document."""

    BACKEND = "Limits of Triton's vLLM backend"
    COMPANION = "Limits of the companion model"
    STANDARD = "As OpenAI and Anthropic document it"
    DESIGN = "By design"
    EXTENSION = "Parameters and fields of vLLM's own"
    FAULT = "Faults of vLLM's server"


#: The name of the service in front of the companion model, among those that are compared.
COMPANION = "companion"


@dataclass(frozen=True)
class Reason:
    """
    One reason. It holds for the requests whose name matches *requests*, at the places that match *places* wholly.

    *where* and *why* are for readers.
    """

    kind: Kind
    where: str
    why: str
    requests: str
    places: str = "status"

    def concerns(self, server: str) -> bool:
        """Return whether it can be the reason of what the service named *server* answers."""
        if server == COMPANION:
            return self.kind is not Kind.BACKEND
        return self.kind is not Kind.COMPANION


#: What readers are told of each, and what it holds for (see :class:`Reason`).
_ROWS: Mapping[Kind, Sequence[tuple[str, ...]]] = {
    Kind.BACKEND: [
        ("`add_special_tokens`, token ids, `truncation_side: left`",
         "The backend takes text and adds the special tokens to it. Prompts that would change by that are refused,"
         " and a prompt that is cut at its beginning keeps the special token.",
         "^completion: (token ids without BOS|no special tokens|cut at its beginning)(, streamed)?$|"
         "^chat: cut(, streamed)?$",
         r"status|choices\[\]\.(text|token_ids\[\]|message\.content|delta\.content)|"
         r"(choices\[\]\.)?prompt_token_ids\[\]"),
        ("`logit_bias`, `prompt_logprobs`, `echo` with `logprobs`, `use_beam_search`, `priority`",
         "Refused: the backend does not take them, or does not return what they ask for.",
         "logit_bias|prompt's log|echo with log|beam search|a priority"),
        ("`use_activation` of embeddings", "Refused: the backend does not pass it on.", "^embedding: not normalized"),
        ("an empty prompt",
         "The backend adds the special token to it, which can be continued. vLLM's server refuses it.",
         "^completion: bad: an empty prompt"),
        ("`/v1/responses`: `cached_tokens`", "0: the backend does not count the tokens that come from its cache.",
         "^response: ", r".*input_tokens_details\.cached_tokens"),
        ("`stop_reason` with `min_tokens`", "Null: the backend does not say which stop string has ended the answer.",
         ": min_tokens", r"choices\[\]\.stop_reason"),
    ],
    Kind.STANDARD: [
        ("`usage`: cached tokens",
         "The companion model counts them, as OpenAI and Anthropic document it; the latter's `input_tokens` are without"
         " them. vLLM's server counts them with `--enable-prompt-tokens-details`.", "",
         r".*usage\.(prompt_tokens_details|cache_read_input_tokens)|message.*usage\.input_tokens|usage\.input_tokens"),
        ("`GET /v1/chat/completions`", "The chats that were stored. vLLM's server stores none.", "^bad: a GET"),
        ("errors: `type`, `code`",
         "OpenAI's names. vLLM's `type` is the name of a class or of the status, and its `code` the status.", "",
         r"error\.(type|code)"),
        ("errors: `param`",
         "The field as the request has it, and none in Anthropic's form. vLLM leaves it out, or writes its own "
         "path, such as `body.temperature`.", "", r"error\.param"),
        ("errors of `/v1/messages`", "Anthropic's form. vLLM answers requests of wrong types in OpenAI's.",
         "^(message|count_tokens): bad", "type"),
        ("errors of unknown paths and methods, and of bodies that are not UTF-8",
         "OpenAI's form. vLLM answers with `detail`.", "^(bad|embedding: bad)", "error|detail"),
        ("`top_p: 0`, nulls, other roles, `logit_bias` above 100",
         "As OpenAI's API defines them: 0 is the likeliest token, every optional parameter may be null, and other "
         "roles and values are refused. vLLM refuses the first two and takes the last two.",
         ": (top_p 0|nulls|bad: (a role|logit_bias))"),
        ("`functions`", "Shown to the model. vLLM ignores them.", "legacy function", "choices.*|usage.*"),
        ("`usage` of embeddings and scores", "Without `completion_tokens`.", "^(embedding|score|rerank): ",
         r"usage\.completion_tokens"),
        ("`top_logprobs`", "The likeliest token comes first. vLLM puts the chosen one there.", "log probabilities",
         r".*top_logprobs\[\]\.(token|logprob|bytes(\[\])?)"),
        ("`role` of an answer",
         "`assistant`. vLLM repeats the role of the last message where `add_generation_prompt` is false.",
         "no generation prompt", r"choices\[\]\.(message|delta)\.role"),
        ("`/v1/messages` whose last message is the assistant's", "The answer continues it. vLLM begins a new one.",
         "^message: the answer's beginning", "content.*|.*input_tokens"),
        ("`/v1/responses`: a response that is cut",
         "Its items are `incomplete`, and the last event is `response.incomplete`. vLLM says `completed` of both.",
         "^response: ", r"events\[\]|.*(output\[\]|item)\.status"),
        ("`/v1/responses`: fields of a response",
         "What OpenAI's clients require is always there, with the values that were used or the defaults. vLLM "
         "leaves it out, or has other defaults (`tool_choice: none`, `service_tier: auto`).", "^response: ",
         r"(.*response\.)?(metadata|reasoning|text(\.verbosity)?|top_logprobs|store|service_tier|"
         r"tool_choice|prompt_cache_key|safety_identifier)|.*(part|content\[\])\.logprobs"),
        ("`/v1/responses`: a response that is not there",
         "400 with the code `previous_response_not_found`, which OpenAI's clients handle. vLLM answers 404.",
         "^response: bad: a response that is not there"),
    ],
    Kind.DESIGN: [
        ("`use_beam_search` in streamed completions",
         "Answered: each answer comes at the end of the search. vLLM refuses it.",
         "^completion: beam search, streamed$"),
        ("several greedy answers", "Answered: they are all the same. vLLM refuses them.", "several greedy answers"),
        ("`best_of`, `guided_json`", "Honoured. vLLM's server has removed them, and ignores them.",
         "best of several|older name", "status|choices.*|usage.*"),
        ("numbers as text, such as `\"0\"`", "Refused. vLLM reads them as numbers.", "a number as text"),
        ("`structured_outputs: {}`, `tools: []`",
         "They ask for nothing, and are taken. vLLM refuses them.", "an empty guide|: no tools"),
        ("greater `max_tokens` than the context",
         "The answer gets what there is room for, and the header `x-max-tokens` names it; `api.strict_parameters`"
         " refuses the request, as vLLM does.", "more than there is room for|bad: too many tokens"),
        ("a user's message without `content`, a tokenizer's request with both a prompt and messages, unknown token"
         " ids", "Refused. vLLM takes them.", "bad: (content missing|both|an id$)"),
        ("a request without `model`", "Refused where Triton has several models.", "^no model"),
        ("`reasoning_effort` that the chat template does not take",
         "Refused in chats, and null in a response. vLLM ignores it.", "an effort", "status|.*reasoning.*"),
        ("`tool_choice: none`", "The model does not see the tools. vLLM shows them.", "tools that are forbidden",
         "choices.*|usage.*"),
        ("forced tool calls",
         "The model writes JSON that conforms to the tool's schema. vLLM holds it to the format of the model's own"
         " calls, and to the schema of strict tools only.",
         "(any|a|any strict) tool( by name| of two)?(, streamed)?$",
         r"choices.*|usage.*|content.*|message_.*|events.*|output.*|response\..*"),
        ("the text before a tool call", "Without spaces at its end.", "a call after a text",
         r"choices\[\]\.(message|delta)\.content"),
        ("completions without `max_tokens`", "The rest of the context, as for chats. vLLM's server takes 16.",
         "^completion: no max_tokens", r"choices\[\]\.text|usage.*"),
        ("`message_start` of a stream", "Has the output tokens up to then. vLLM sends 0.", "^message: .*streamed",
         r"message_start\.message\.usage\.output_tokens"),
        ("embeddings of an empty text, rerank with documents as objects",
         "The first is refused, the second taken; vLLM does the opposite.",
         "^embedding: an empty text|^rerank: objects"),
        ("`usage` of scores", "A text that occurs several times is embedded once.", "^(score|rerank): ",
         r"usage\.(prompt|total)_tokens"),
        ("`GET /health`, `GET /v1/models`", "The service says that it is ready. It lists all of Triton's models.",
         "^(health|models)$", "|data"),
    ],
    Kind.EXTENSION: [
        ("`echo` in chats, `return_tokens_as_token_ids`, `spaces_between_special_tokens`", "Refused.",
         "last message echoed|by token ids|without spaces"),
        ("embeddings: `messages`, `add_special_tokens`, `embed_dtype`", "Refused.",
         "^embedding: (a conversation|no special tokens|half precision)"),
        ("`/v1/responses`: `usage`",
         "Without the tokens of each turn and of tools, and of what was written to the cache: the service runs no "
         "tools.", "^response: ",
         r".*usage\.(in|out)put_tokens_details\.(.*_per_turn|tool_output_tokens|cache_write_tokens)"),
        ("`/v1/messages/count_tokens`", "Without `context_management`.", "^count_tokens: ", "context_management"),
    ],
    Kind.FAULT: [
        ("`echo` with `logprobs`", "vLLM sends `prompt_logprobs` too, asked for or not.", "^completion: echo with log",
         r"choices\[\]\.prompt_logprobs"),
        ("log probabilities of half a character",
         "A token that is a part of a character is shown as U+FFFD with its own bytes, as OpenAI documents the bytes."
         " vLLM shows an empty text without bytes, and at the character's last token the whole character.", "",
         r"choices\[\]\.prompt_logprobs\[\]\.\d+\.decoded_token|"
         r"choices\[\]\.logprobs\.((tokens|text_offset)\[\]|top_logprobs\[\]\.(.*\ufffd.*)?)|"
         r"choices\[\]\.logprobs\.content\[\](\.top_logprobs\[\])?\.(bytes|token)"),
        ("streams with `echo`", "vLLM shows the ids of the prompt, asked for or not.", "echo",
         r"choices\[\]\.prompt_token_ids"),
        ("`echo` with `max_tokens: 0`", "vLLM counts a token of an answer that there is not.", "echo alone",
         "usage.*"),
        ("streamed tool calls that are cut or no JSON", "They are shown as text. vLLM's streams lose them.",
         "(a call that is cut|no JSON in a call), streamed", r"choices\[\]\.delta\.content"),
        ("tools without a description",
         "The template gets the tools as the client sends them. vLLM adds `\"description\": null`, which becomes a"
         " part of the prompt.", "a tool without a description", "choices.*|usage.*"),
        ("`/v1/responses` with a template that begins with a special token", "vLLM adds the token a second time.",
         "^response: a template that begins", ".*text|.*delta|.*(input|total)_tokens"),
        ("`/v1/responses`: log probabilities in streams",
         "vLLM leaves out the bytes, and the log probabilities of `response.output_text.done`.",
         "^response: log probabilities, streamed", ".*logprobs.*"),
    ],
}  # fmt: skip
REASONS: Sequence[Reason] = [Reason(kind, *row) for kind, rows in _ROWS.items() for row in rows]


def reason_of(request: str, place: str, server: str) -> Reason | None:
    """Return why *server* answers *request* otherwise at *place*, if that is known: the first reason that holds."""
    for one in REASONS:
        if one.concerns(server) and re.search(one.requests, request) and re.fullmatch(one.places, place):
            return one
    return None
