"""
An assistant's turn that fits the model's context.

With ``truncation: "auto"``, the fewest turns at the beginning of a conversation are left out that make it fit. Before
the request is sent, the tokenizer tells what fits. What the backend refuses nevertheless is sent once more, in the size
that the backend names.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec

from triton_openai import offload
from triton_openai.api import agents, chat
from triton_openai.api.responses.chat_request import Reading
from triton_openai.api.service import RequestContext
from triton_openai.errors import ContextLengthExceeded
from triton_openai.prompts.messages import AssistantMessage, DeveloperMessage, Message, SystemMessage, UserMessage
from triton_openai.prompts.tokenizer import Tokenizer, tokenizing_cost

_T = TypeVar("_T")
# Prompts that are counted where the texts foretell badly what fits, before the rest is halved each time.
_GUESSES = 4
# Characters of a token, at most: for the cost.
_LONG_TOKEN = 8


async def turn_of(context: RequestContext[chat.ChatRequest], reading: Reading, answer_id: str) -> chat.Turn:
    """Return the turn that answers *reading*, of which is left out what ``truncation`` allows. Raises as a chat's."""
    try:
        return await chat.turn_of(context, answer_id, fitting=True)
    except ContextLengthExceeded as error:
        await _shorten(context, reading, error)
        return await chat.turn_of(context, answer_id, fitting=True)


async def answered(
    context: RequestContext[chat.ChatRequest],
    reading: Reading,
    answer_id: str,
    answer: Callable[[chat.Turn], Awaitable[_T]],
    *,
    turn: chat.Turn | None = None,
) -> _T:
    """Return what *answer* returns for *turn*, or a new one; for a shorter one if the backend finds it too long."""
    try:
        return await answer(turn or await turn_of(context, reading, answer_id))
    except ContextLengthExceeded as error:
        await _shorten(context, reading, error)
    return await answer(await chat.turn_of(context, answer_id, fitting=True))


async def _shorten(context: RequestContext[chat.ChatRequest], reading: Reading, error: ContextLengthExceeded) -> None:
    """
    Leave out of *reading*, and of the body of *context*, what has to go for the chat to fit; *error* is why it did not.

    The tokens of each message are counted once, and those of a prompt or two that nearly fit. Without a tokenizer, they
    are estimated by the length of the texts. Raises *error* if nothing may be left out, if its numbers are not known,
    or if nothing fits.
    """
    messages, limit = reading.chat.messages, error.limit
    cuts, essential = _cuts(messages), _essential(messages)
    if reading.body.truncation != "auto" or not cuts or limit is None:
        raise error
    tokenizer = (await context.model.prompter()).tokenizer
    # One token is for the answer.
    limit = min(limit, (context.model.settings.max_model_len or limit + 1) - 1)
    texts = [_text_of(message) for message in messages]
    if tokenizer is not None:
        most = max(limit, error.tokens or 0)
        cost = min(tokenizing_cost(texts), offload.TOKENIZE * _LONG_TOKEN * most)
        sizes = await offload.run(_sizes, tokenizer, texts, essential, most, cost=cost, refusable=True)
    elif error.tokens is not None:
        each = error.tokens / max(1, sum(map(len, texts)))
        sizes = [each * len(text) for text in texts]
    else:
        raise error
    # Of what stays, by the number of the first message: tokens of texts, and messages.
    known, left = _sums(sizes, essential), _sums([1.0] * len(sizes), essential)
    # Tokens beside the texts, for each message: as the last prompt had them.
    beside = max(0.0, ((error.tokens or 0) - known[0]) / left[0]) if known[0] < math.inf else 0.0
    # The first cut that fits is above `low`, and not above `high`.
    guesses, low, high = 0, -1, len(cuts)
    while high - low > 1 and known[cuts[high - 1]] <= limit:
        fitting = (n for n in range(low + 1, high) if known[cuts[n]] + beside * left[cuts[n]] <= limit)
        place = next(fitting, high - 1) if guesses < _GUESSES else (low + high) // 2
        if tokenizer is None:
            high = place
            break
        shorter = msgspec.structs.replace(reading.chat, messages=[messages[n] for n in _left(messages, cuts[place])])
        count = await agents.count_tokens(context.about(shorter))
        beside = max(0.0, (count - known[cuts[place]]) / left[cuts[place]])
        if count > limit:
            low = place
        else:
            # Older ones, whose texts alone are too much beside it.
            texts_left = known[cuts[place]] + limit - count
            low, high = max((n for n in range(low, place) if n < 0 or known[cuts[n]] > texts_left), default=low), place
        guesses += 1
    if high == len(cuts):
        raise error
    reading.keep(_left(messages, cuts[high]))
    context.body = reading.chat


def _essential(messages: Sequence[Message]) -> Collection[int]:
    """Return the numbers of the messages that always stay: instructions, and the last one of the user."""
    users = [number for number, message in enumerate(messages) if isinstance(message, UserMessage)]
    instructions = (SystemMessage, DeveloperMessage)
    return {*users[-1:], *(number for number, message in enumerate(messages) if isinstance(message, instructions))}


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
    content = [message.content] if isinstance(message.content, str) else message.content or ()
    texts = [part if isinstance(part, str) else part.text or "" for part in content]
    if isinstance(message, AssistantMessage):
        texts.append(message.reasoning_content or "")
        for call in message.tool_calls or ():
            if call.function is not None:
                texts += [call.function.name, str(call.function.arguments or "")]
    return "\n".join(filter(None, texts))


def _sizes(tokenizer: Tokenizer, texts: Sequence[str], essential: Collection[int], limit: int) -> Sequence[float]:
    """Return the tokens of each of *texts*; infinitely many for those before what fits, which are not counted."""
    sizes = [math.inf] * len(texts)
    total = 0
    longest = tokenizer.pieces.longest or math.inf
    for number in (*essential, *(n for n in reversed(range(len(texts))) if n not in essential)):
        if total > limit or len(texts[number]) > limit * longest:
            break
        sizes[number] = count = tokenizer.count(texts[number])
        total += count
    return sizes


def _sums(values: Sequence[float], essential: Collection[int]) -> Sequence[float]:
    """Return for each place the sum of the *values* from there on, and of the *essential* ones before."""
    tails = list(accumulate(reversed(values), initial=0.0))[::-1]
    heads = accumulate((value if n in essential else 0.0 for n, value in enumerate(values)), initial=0.0)
    return [tail + head for tail, head in zip(tails, heads, strict=True)]
