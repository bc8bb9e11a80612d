"""
An assistant's turn that fits the model's context.

With ``truncation: "auto"``, the oldest turns of a conversation that is too long are left out. The tokens of each
message are counted once, and what the template and the tools add is estimated. If the prompt is still too long, more is
left out, and at last all but the last turn. If the backend refuses a prompt nevertheless, it gets one of the size that
its error names.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence, Set
from enum import Enum, auto
from typing import TypeVar

from triton_openai import offload
from triton_openai.api import conversation as chats
from triton_openai.api.conversation import Conversation, PreparedChat
from triton_openai.api.responses.compaction import compact_beyond_threshold
from triton_openai.api.responses.request_reader import ParsedRequest
from triton_openai.api.service import RequestContext
from triton_openai.errors import ContextLengthExceeded
from triton_openai.prompts.messages import AssistantMessage, DeveloperMessage, Message, SystemMessage, UserMessage
from triton_openai.prompts.tokenizer import Tokenizer, tokenizing_cost

_T = TypeVar("_T")
# Characters of a token, at most: for the cost.
_LONG_TOKEN = 8


class _Estimate(Enum):
    """What a message that is left out is taken to free."""

    #: Its text, and an equal share of what the prompt has beside texts. It is too much if the request has tools.
    AVERAGE = auto()
    #: Its text alone. It is too much if the template leaves out a part of it.
    TEXT = auto()
    #: Nothing is known: all that may be left out is.
    NOTHING = auto()


# In this order. A prompt that is many times too long is not counted, so there may be no average at first.
_ATTEMPTS = (_Estimate.AVERAGE, _Estimate.AVERAGE, _Estimate.TEXT, _Estimate.NOTHING)


async def prepare_fitting(
    context: RequestContext[Conversation], request: ParsedRequest, answer_id: str
) -> PreparedChat:
    """
    Return what answers the conversation of *request*, compacted and shortened as far as the request allows.

    Raises as :func:`prepare_chat`.
    """
    await compact_beyond_threshold(context, request)
    prepared = await _prepare_shortened(context, request, answer_id)
    # The key pays for the summary too.
    context.record.answers = [*context.record.answers, *request.summarized]
    return prepared


async def _prepare_shortened(
    context: RequestContext[Conversation], request: ParsedRequest, answer_id: str
) -> PreparedChat:
    sizes: Sequence[float] | None = None
    for estimate in _ATTEMPTS:
        try:
            return await chats.prepare_chat(context, answer_id, fitting=True)
        except ContextLengthExceeded as error:
            sizes = await _shorten(context, request, error, estimate, sizes)
    return await chats.prepare_chat(context, answer_id, fitting=True)


async def answer_within_context(
    context: RequestContext[Conversation],
    request: ParsedRequest,
    answer_id: str,
    answer: Callable[[PreparedChat], Awaitable[_T]],
    *,
    prepared: PreparedChat | None = None,
) -> _T:
    """Return what *answer* returns for what is *prepared*, or for a shorter prompt if the backend finds it too long."""
    try:
        if prepared is None:
            prepared = await prepare_fitting(context, request, answer_id)
        return await answer(prepared)
    except ContextLengthExceeded as error:
        await _shorten(context, request, error, _Estimate.AVERAGE)
    return await answer(await prepare_fitting(context, request, answer_id))


async def _shorten(
    context: RequestContext[Conversation],
    request: ParsedRequest,
    error: ContextLengthExceeded,
    estimate: _Estimate,
    sizes: Sequence[float] | None = None,
) -> Sequence[float]:
    """
    Leave the oldest messages out of the conversation of *request*, for it to fit.

    *error* says how long the prompt is. *sizes* are the tokens of each message, if they were counted before; those of
    the messages that stay are returned. Raises *error* if nothing may be left out, or if its numbers are not known.
    """
    messages = request.conversation.messages
    limit = error.limit
    cuts = _cuts(messages)
    essential = _essential(messages)
    if request.body.truncation != "auto" or not cuts or limit is None:
        raise error
    # One token is for the answer.
    limit = min(limit, (context.model.settings.max_model_len or limit + 1) - 1)
    if sizes is None:
        sizes = await _sizes(context, messages, error, limit)
    cut = cuts[-1]
    if estimate is not _Estimate.NOTHING:
        # What the tools and the template add to the texts: for each message, or once for all.
        added = max(0.0, (error.tokens or 0) - sum(sizes))
        if estimate is _Estimate.AVERAGE:
            cut = _first_fitting(sizes, cuts, essential, limit, added / len(sizes))
        else:
            cut = _first_fitting(sizes, cuts, essential, limit - added, 0.0)
    left = _left(messages, cut)
    request.conversation.keep(left)
    return [sizes[number] for number in left]


async def _sizes(
    context: RequestContext[Conversation], messages: Sequence[Message], error: ContextLengthExceeded, limit: int
) -> Sequence[float]:
    """
    Return the tokens of the text of each of *messages*.

    Without a tokenizer, they are shares of the tokens that *error* names, by the length of the texts. Raises *error* if
    it names none. Messages that are too old to fit into *limit* are infinitely long.
    """
    texts = [_text_of(message) for message in messages]
    tokenizer = (await context.model.prompter()).tokenizer
    if tokenizer is not None:
        # All are counted where the prompt's length is known.
        max_tokens = max(limit, error.tokens or 0)
        cost = min(tokenizing_cost(texts), offload.CHARACTER * _LONG_TOKEN * max_tokens)
        return await offload.run(_count, tokenizer, texts, _essential(messages), max_tokens, cost=cost, refusable=True)
    if error.tokens is None:
        raise error
    per_character = error.tokens / max(1, sum(map(len, texts)))
    return [per_character * len(text) for text in texts]


def _essential(messages: Sequence[Message]) -> Set[int]:
    """Return the numbers of the messages that always stay: instructions, and the last one of the user."""
    users = [number for number, message in enumerate(messages) if isinstance(message, UserMessage)]
    instructions = [
        number for number, message in enumerate(messages) if isinstance(message, SystemMessage | DeveloperMessage)
    ]
    return {*users[-1:], *instructions}


def _cuts(messages: Sequence[Message]) -> Sequence[int]:
    """
    Return the numbers of the messages that can be the first to stay, except the first of all.

    They are the user's, as templates expect it, and in the last turn, of which the user's message stays, the
    assistant's: a call has its results behind it.
    """
    users = [number for number, message in enumerate(messages) if isinstance(message, UserMessage)]
    if not users:
        return ()
    own = [n for n in range(users[-1], len(messages)) if isinstance(messages[n], AssistantMessage)]
    return [*users[1:], *own[1:]]


def _left(messages: Sequence[Message], cut: int) -> Sequence[int]:
    """Return the numbers of the messages that stay: from the number *cut* on, and the essential ones before."""
    return sorted({*_essential(messages), *range(cut, len(messages))})


def _text_of(message: Message) -> str:
    """Return about what of *message* stands in a prompt."""
    texts: list[str] = []
    if isinstance(message.content, str):
        texts.append(message.content)
    else:
        for part in message.content or ():
            if isinstance(part, str):
                texts.append(part)
            else:
                texts.append(part.text or "")
    if isinstance(message, AssistantMessage):
        texts.append(message.reasoning_content or "")
        for call in message.tool_calls or ():
            if call.function is not None:
                texts += [call.function.name, str(call.function.arguments or "")]
    return "\n".join(filter(None, texts))


def _first_fitting(
    sizes: Sequence[float], cuts: Sequence[int], essential: Set[int], limit: float, around: float
) -> int:
    """
    Return the first of *cuts* that leaves no more than *limit* tokens, or the last one.

    *around* is what each message has beside its size.
    """
    room = limit - sum(sizes[number] + around for number in essential)
    possible = frozenset(cuts)
    cut = cuts[-1]
    for number in reversed(range(len(sizes))):
        if number not in essential:
            room -= sizes[number] + around
        if room < 0:
            break
        if number in possible:
            cut = number
    return cut


def _count(tokenizer: Tokenizer, texts: Sequence[str], essential: Set[int], max_tokens: int) -> Sequence[float]:
    """Return the tokens of each of *texts*, the newest first, until they have more than *max_tokens*."""
    sizes = [math.inf] * len(texts)
    total = 0
    longest = tokenizer.pieces.longest or math.inf
    others = [number for number in reversed(range(len(texts))) if number not in essential]
    for number in (*essential, *others):
        text = texts[number]
        if total > max_tokens or len(text) > max_tokens * longest:
            break
        count = tokenizer.count(text)
        sizes[number] = count
        total += count
    return sizes
