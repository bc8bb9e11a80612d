"""
Conversations that become shorter: the model summarizes what was said so far, and goes on from the summary.

Source: OpenAI's ``context_management`` with ``compact_threshold``, and its guide to compaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex

import structlog
from msgspec.structs import replace

from triton_openai.answer.run_group import collect
from triton_openai.api.agents import seal, seals_all
from triton_openai.api.bodies import report_ignored
from triton_openai.api.conversation import ChatOptions, Conversation, PreparedChat, prepare_chat, prompt_of
from triton_openai.api.responses.objects import Item, OutputCompaction
from triton_openai.api.responses.request_reader import ParsedRequest, summary_text
from triton_openai.api.service import RequestContext
from triton_openai.api.tools import NO_TOOLS
from triton_openai.generation import tokens_in
from triton_openai.parsers.events import Content
from triton_openai.prompts.messages import AssistantMessage, DeveloperMessage, SystemMessage, UserMessage

_log = structlog.get_logger(__name__)

#: What the model is asked for.
SUMMARIZE = (
    "Summarize this conversation for somebody who has to go on with it, and who has only the user's messages and your "
    "summary: what the user wants, what was found out, decided and done, the names, paths, numbers and texts that "
    "matter, and what is left to do. Write the summary and nothing else."
)
# Most tokens of a summary, thoughts included; less where the context is small, so that the next turn has room.
_SUMMARY_TOKENS = 2048
# The roles of instructions, which no summary replaces.
_INSTRUCTING = ("system", "developer")
# The part of the context after which a conversation is compacted, where the request names no threshold.
_DEFAULT_SHARE = 0.75


def summary_limit(context_length: int | None) -> int:
    """Return the most tokens of a summary in a context of this length."""
    if context_length is None:
        return _SUMMARY_TOKENS
    return min(_SUMMARY_TOKENS, max(1, context_length // 4))


def after_compaction(items: Sequence[tuple[str, Item]]) -> Sequence[tuple[str, Item]]:
    """Return *items*, each with its path, from the last summary of all before it on, and the instructions before it."""
    for index in range(len(items) - 1, 0, -1):
        _, item = items[index]
        if item.get("type") == "compaction" and seals_all(item.get("encrypted_content")):
            instructions = [(path, before) for path, before in items[:index] if before.get("role") in _INSTRUCTING]
            return [*instructions, *items[index:]]
    return items


async def exceeds_threshold(context: RequestContext[Conversation], request: ParsedRequest) -> bool:
    """Return whether the conversation of *request* has more tokens than its ``context_management`` allows."""
    if request.exceeds_threshold is None:
        threshold = _threshold(context, request)
        request.exceeds_threshold = threshold is not None and await _count(context) > threshold
    return request.exceeds_threshold


async def compact_beyond_threshold(context: RequestContext[Conversation], request: ParsedRequest) -> None:
    """
    Compact the conversation of *request* if it has more tokens than its ``context_management`` allows.

    The answer then goes on from the instructions, a summary and the user's last message. The summary and what it took
    are kept in *request*, also for another attempt. If the model writes no summary, the conversation stays as it is,
    and the header of ignored options names ``context_management``. Raises :class:`ServiceError`.
    """
    if request.summarized or not await exceeds_threshold(context, request):
        return
    conversation = context.body
    limit = summary_limit(context.model.settings.max_model_len)
    options = ChatOptions(model=conversation.options.model, max_tokens=limit)
    if "temperature" in context.model.adapter.supported:
        options.temperature = 0.0
    origins = list(conversation.origins.messages or ())
    origins += origins[-1:]
    asked = Conversation(
        [*conversation.messages, UserMessage(content=SUMMARIZE)],
        NO_TOOLS,
        options,
        replace(conversation.origins, messages=origins),
    )
    prepared = await prepare_chat(context.about(asked), f"cmp_{token_hex(16)}", fitting=True)
    (answer,) = await collect(prepared.runs, timeout=context.limits.total)
    (parser,) = prepared.parsers
    events = [*parser.feed(answer.text), *parser.flush(cut=answer.run.progress.cut)]
    summary = "".join([event.text for event in events if isinstance(event, Content)])
    request.summarized = [answer.run.progress]
    if not summary:
        report_ignored(context.record, ["context_management"])
        _log.warning(
            "a conversation is not compacted: the model wrote no summary", model=context.model.name, tokens=limit
        )
        return
    request.compaction = OutputCompaction(encrypted_content=seal(summary, summarizes_all=True))
    _replace_by(summary, conversation)


async def prepare_without_summary(context: RequestContext[Conversation], answer_id: str) -> PreparedChat:
    """
    Return what would answer the conversation of *context* after a compaction, with a summary that is still empty.

    What is wrong with the request shows before its answer begins. Raises as :func:`prepare_chat`.
    """
    conversation = context.body
    shortened = replace(conversation, messages=list(conversation.messages))
    _replace_by("", shortened)
    return await prepare_chat(context.about(shortened), answer_id, fitting=True)


def _replace_by(summary: str, conversation: Conversation) -> None:
    """Replace what *conversation* has between the instructions and the user's last message by the *summary*."""
    messages = conversation.messages
    kept = [number for number, message in enumerate(messages) if isinstance(message, SystemMessage | DeveloperMessage)]
    users = [number for number, message in enumerate(messages) if isinstance(message, UserMessage)]
    last = conversation.origins.message(len(messages) - 1)
    conversation.keep([*kept, *users[-1:]])
    origins = list(conversation.origins.messages or ())
    conversation.messages.insert(len(kept), AssistantMessage(content=summary_text(summary)))
    origins.insert(len(kept), last)
    conversation.origins = replace(conversation.origins, messages=origins)


def _threshold(context: RequestContext[Conversation], request: ParsedRequest) -> int | None:
    """Return the most tokens of a prompt that is not compacted; ``None`` for any number."""
    edits = request.body.context_management
    if not edits:
        return None
    if edits[0].compact_threshold is not None:
        return edits[0].compact_threshold
    context_length = context.model.settings.max_model_len
    if context_length is None:
        return None
    return int(context_length * _DEFAULT_SHARE)


async def _count(context: RequestContext[Conversation]) -> int:
    """Return the tokens of the prompt; without a tokenizer, an estimate."""
    model = context.model
    prompter = await model.prompter()
    prompt, _, _ = await prompt_of(context, prompter)
    if prompter.tokenizer is None:
        return tokens_in(prompt)
    return await prompter.tokenizer.count_async(prompt, model.adapter.metadata.adds_bos)
