"""
``POST /tokenize`` and ``POST /detokenize``, in the shapes of vLLM's server.

They work with the model's configured tokenizer, in this process: no request goes to Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.answer.chat_prompt import rendered_chat
from triton_openai.answer.prepare import check_ids, tokenizer_of
from triton_openai.api.bodies import (
    MAX_ITEMS,
    MAX_MESSAGES,
    ModelRequest,
    NotNegative,
    encode,
    json_reply,
    json_reply_of,
)
from triton_openai.api.chat_tools import Tool, plan_chat_tools
from triton_openai.api.conversation import argument_texts
from triton_openai.api.service import Service, begin
from triton_openai.errors import InvalidRequest
from triton_openai.operations import Call, Reply
from triton_openai.prompts.messages import Message

# Tokens that are encoded at once.
_PIECE = 4096


class TokenizeRequest(ModelRequest, kw_only=True):
    """
    Either a ``prompt`` or ``messages``.

    Special tokens are added to a prompt by default, and not to messages, whose template writes its own.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    def json_texts(self) -> Iterable[tuple[str, Any]]:
        """Return the texts that hold JSON, each with its path."""
        return argument_texts(self.messages or ())


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens; ``token_strs`` is how the vocabulary writes them, ``max_model_len`` is null where it is not known."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """Token ids."""

    tokens: list[NotNegative]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Their text, special tokens included."""

    prompt: str


async def tokenize(service: Service, call: Call[TokenizeRequest]) -> Reply:
    """Return the tokens of a prompt, or of messages as the model's template renders them."""
    context = await begin(service, call)
    body = context.body
    model = context.model
    tokenizer = await tokenizer_of(model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt", code="missing_required_parameter")
    # Checked with a prompt too, which does not use them.
    tools = plan_chat_tools(body.tools)
    if body.messages is not None:
        trusted = service.settings.api.trust_request_chat_template
        prompter = await model.prompter()
        text, _ = await rendered_chat(model, prompter, body, body.messages, tools=tools.prompt, trust_template=trusted)
        special = bool(body.add_special_tokens)
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
    tokens = await tokenizer.encode_async(text, special)
    texts = bool(body.return_token_strs)

    def answer() -> TokenizeAnswer:
        pieces = [tokens[start : start + _PIECE] for start in range(0, len(tokens), _PIECE)]
        strings = None
        if texts:
            strings = _joined([tokenizer.vocabulary_string(token) for token in piece] for piece in pieces)
        return TokenizeAnswer(
            count=len(tokens),
            max_model_len=model.settings.max_model_len,
            tokens=_joined(pieces),
            token_strs=strings,
        )

    return await json_reply_of(answer, cost=(offload.BYTE + texts * offload.ITEM) * len(tokens))


def _joined(pieces: Iterable[Sequence[Any]]) -> Any:
    """Return the JSON of one list: to encode millions of values at once would hold the interpreter."""
    return msgspec.Raw(b"[%b]" % b",".join([encode(piece)[1:-1] for piece in pieces]))


async def detokenize(service: Service, call: Call[DetokenizeRequest]) -> Reply:
    """Return the text of tokens."""
    context = await begin(service, call)
    body = context.body
    model = context.model
    tokenizer = await tokenizer_of(model)
    check_ids(body.tokens, tokenizer, "tokens")
    return json_reply(DetokenizeAnswer(prompt=await tokenizer.decode_async(body.tokens, False)))
