"""
``POST /v1/chat/completions``: the request, read into a conversation, and the answers, whole and as chunks.

Source of the wire format: OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects (openai-openapi 2.3.0).
``reasoning_content`` is DeepSeek's extension and ``reasoning`` OpenRouter's and vLLM's; both are in wide use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai import offload
from triton_openai.answer.run_group import Collected, answers_cost, collect
from triton_openai.api.bodies import MAX_MESSAGES, Positive, encode, encode_each, new_id, now, report_ignored
from triton_openai.api.chat_tools import Function, FunctionChoice, Tool, ToolChoice, plan_chat_tools
from triton_openai.api.conversation import (
    ChatOptions,
    Conversation,
    PreparedChat,
    argument_texts,
    prepare_chat,
    reasoning_tokens,
)
from triton_openai.api.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    drop_prompt_logprobs,
    prompt_logprobs,
)
from triton_openai.api.parameters import Verbosity, accepting, completing, refusing
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.api.sse import Chunks
from triton_openai.api.stored_chats import Keep, keeper, new_key
from triton_openai.api.tools import NO_TOOLS, ToolPlan, custom_input
from triton_openai.api.usage import UsageObject, usage_of
from triton_openai.errors import ServiceError
from triton_openai.generation import AnswerState, Delta, FinishReason
from triton_openai.operations import Call, Reply, Whole
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.prompts.messages import Message


@completing
@accepting("prediction", "prompt_cache_options", "prompt_cache_retention")
@refusing(
    modalities=["text"], audio=None, web_search_options=None, moderation=None, echo=False,
    best_of=1,
)  # fmt: skip
class ChatRequest(ChatOptions, kw_only=True):
    """The request. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
    max_completion_tokens: Positive | None = None
    verbosity: Verbosity | None = None
    store: bool | None = None
    metadata: Annotated[Any, Meta(description="Up to 16 texts of 512 characters, kept with a completion.")] = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: FunctionChoice = None

    @property
    def limit(self) -> tuple[str, int | None]:
        newer = self.max_completion_tokens
        if newer is None:
            return ("max_tokens", self.max_tokens)
        return ("max_completion_tokens", newer)

    def json_texts(self) -> Iterator[tuple[str, Any]]:
        """Yield the texts that hold JSON, each with its path."""
        # The base is named, as the decorators make another class of this one.
        yield from ChatOptions.json_texts(self)
        yield from argument_texts(self.messages)


def conversation_of(body: ChatRequest) -> Conversation:
    """Return *body* as a conversation, of which it has the options itself. Raises :class:`InvalidRequest`."""
    tools = NO_TOOLS
    if body.tools or body.functions or body.tool_choice is not None:
        tools = plan_chat_tools(
            body.tools, body.tool_choice, body.functions, body.function_call, body.parallel_tool_calls
        )
    return Conversation(body.messages, tools, body)


ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A call of a function."""

    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct, kw_only=True):
    """A custom tool and its text."""

    name: str
    input: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool."""

    id: str
    custom: CustomCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. ``content`` and ``refusal`` are always there: clients do not check for them."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The last two fields are vLLM's."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """
    The whole answer, without ``usage`` if the tokens are not known.

    The fields about the prompt are vLLM's, on request. One that was stored has ``metadata``.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: UsageObject | UnsetType = UNSET
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    metadata: Mapping[str, str] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: the name comes first and whole, then the JSON text of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    """A piece of a call of a custom tool: first its name, and at its end the whole text."""

    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of one of the calls; what opens a call has its id."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message; nothing in a choice's last chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: Sequence[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. ``usage`` is there on request: null but for the last chunk, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


async def create(service: Service, call: Call[ChatRequest]) -> Reply:
    """Create a chat completion. With ``store``, it is stored if it ends without an error."""
    context = await begin(service, call)
    body = context.body
    if body.verbosity in ("low", "high"):
        report_ignored(context.record, ["verbosity"])
    answer_id = new_id("chatcmpl")
    keep = None
    if body.store and service.responses.keeps:
        answer_id = new_key()
        keep = keeper(context, answer_id, model=body.model, metadata=body.metadata, messages=body.messages)
    elif body.store:
        report_ignored(context.record, ["store"])
    asked = context.about(conversation_of(body))
    return await asked.admitted(partial(answer, answer_id=answer_id, keep=keep), param="messages")


async def answer(context: RequestContext[Conversation], answer_id: str, keep: Keep | None = None) -> Reply:
    """Answer a chat. *keep* gets the whole answer first, in JSON, also that of a stream before its end."""
    options = context.body.options
    strict = context.service.settings.api.strict_parameters
    prepared = await prepare_chat(context, answer_id, fitting=not strict)
    if keep is None:
        context.forget_messages()
    runs = prepared.runs
    fields: Sequence[str] = ()
    if not prepared.parsers[0].plain:
        fields = _reasoning_fields(context)
    if options.stream:
        if keep is None:
            chunks = ChatChunks(context, prepared, fields)
        else:
            chunks = _KeptChunks(context, prepared, fields, keep)
        return await context.stream(runs, chunks)
    answers = await collect(runs, timeout=context.limits.total)
    choices = (chat_choice(options, prepared, fields, index, answer) for index, answer in enumerate(answers))
    if prepared.parsers[0].plain:
        cost = answers_cost(answers, offload.BYTE)
    else:
        cost = answers_cost(answers, offload.CHARACTER)
    if options.prompt_logprobs is not None:
        cost += offload.logprobs_cost(len(runs[0].prompt_logprobs), options.prompt_logprobs)
    # Nothing is awaited for most answers.
    whole = partial(_completion, context, prepared, choices)
    if cost <= offload.INLINE:
        content = whole()
    else:
        content = await offload.run(whole, cost=cost)
    if keep is not None:
        await keep(content)
    return Whole(content)


def _reasoning_fields(context: RequestContext[Conversation]) -> Sequence[str]:
    """Return the names of the fields with the reasoning."""
    if context.body.options.hides_reasoning:
        return ()
    setting = context.service.settings.api.reasoning_field
    if setting == "both":
        return ("reasoning_content", "reasoning")
    return (setting,)


def _completion(context: RequestContext[Conversation], prepared: PreparedChat, choices: Iterable[ChatChoice]) -> bytes:
    """Return the whole answer with its *choices*, in JSON."""
    options = context.body.options
    runs = prepared.runs
    # As they are parsed, reasoning is counted.
    shown: Any = encode_each(choices)
    usage = usage_of(runs, n=prepared.spec.n, reasoning_tokens=reasoning_tokens(prepared.parsers))
    scores: Any = UNSET
    if options.prompt_logprobs is not None:
        scores = encode_each(prompt_logprobs(runs[0].prompt_logprobs))
        drop_prompt_logprobs(runs)
    prompt_ids: Sequence[int] | UnsetType = UNSET
    if options.return_token_ids:
        prompt_ids = runs[0].generation.prompt_ids or ()
    completion = ChatCompletion(
        id=prepared.spec.template.id,
        created=now(),
        model=options.model,
        choices=shown,
        usage=usage or UNSET,
        system_fingerprint=context.model.fingerprint,
        prompt_logprobs=scores,
        prompt_token_ids=prompt_ids,
    )
    return encode(completion)


def finish_reason(progress: AnswerState, parser: AnswerParser, plan: ToolPlan) -> ChatFinishReason | None:
    """
    Return why the choice ended, as OpenAI says it.

    It is ``tool_calls`` only for complete calls that the model chose to make. A forced call ends with ``stop``. A call
    whose arguments are not JSON ends with ``length``, whatever cut it, but with ``stop`` if that was a stop string.
    """
    reason = progress.finish_reason
    if reason is not None and parser.cut and not progress.cut:
        return "length"
    if reason is not FinishReason.LENGTH and parser.calls and not parser.cut and plan.mode != "named":
        if plan.legacy:
            return "function_call"
        return "tool_calls"
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return "length"
    return "stop"


def message_of(events: Sequence[Event], plan: ToolPlan, fields: Sequence[str]) -> AnswerMessage:
    """Return the message that *events* make together, with the reasoning in *fields*."""
    texts: list[str] = []
    thoughts: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, Content):
            texts.append(event.text)
        elif isinstance(event, Reasoning):
            thoughts.append(event.text)
        elif isinstance(event, ToolCallStart):
            starts.append(event)
            arguments.append([])
        else:
            arguments[event.index].append(event.text)
    calls = [_call(start, "".join(parts), plan) for start, parts in zip(starts, arguments, strict=True)]
    message = AnswerMessage(role="assistant", content="".join(texts), refusal=None)
    if thoughts:
        for field in fields:
            setattr(message, field, "".join(thoughts))
    if not calls:
        return message
    message.content = message.content or None
    first = calls[0]
    if not plan.legacy:
        message.tool_calls = calls
    elif isinstance(first, ToolCall):
        message.function_call = first.function
    return message


def _call(start: ToolCallStart, arguments: str, plan: ToolPlan) -> ToolCall | CustomToolCall:
    if start.name in plan.custom:
        return CustomToolCall(id=start.id, custom=CustomCall(name=start.name, input=custom_input(arguments)))
    return ToolCall(id=start.id, function=FunctionCall(name=start.name, arguments=arguments))


def chat_choice(
    options: ChatOptions,
    prepared: PreparedChat,
    fields: Sequence[str],
    index: int,
    answer: Collected,
    events: Sequence[Event] | None = None,
) -> ChatChoice:
    """Return a choice of the whole answer, with the reasoning in *fields*. *events* are there if it is parsed."""
    parser = prepared.parsers[index]
    if events is None and parser.plain:
        message = AnswerMessage(role="assistant", content=answer.text, refusal=None)
    else:
        if events is None:
            events = _parsed(answer, parser)
        message = message_of(events, prepared.plan, fields)
    logprobs = None
    if options.logprobs:
        logprobs = ChatLogprobs(encode_each(chat_logprobs(answer.logprobs).content))
    token_ids: Sequence[int] | UnsetType = UNSET
    if options.return_token_ids:
        token_ids = answer.token_ids
    return ChatChoice(
        index=index,
        message=message,
        logprobs=logprobs,
        finish_reason=finish_reason(answer.run.progress, parser, prepared.plan),
        stop_reason=answer.run.progress.stop_reason,
        token_ids=token_ids,
    )


def _parsed(answer: Collected, parser: AnswerParser) -> Sequence[Event]:
    events: list[Event] = []
    for delta in answer.deltas:
        events += parser.feed(delta.text, delta.tokens)
    events += parser.flush(cut=answer.run.progress.cut)
    return events


class ChatChunks(Chunks):
    """The chunks of one stream, with the reasoning in *fields*."""

    def __init__(self, context: RequestContext[Conversation], prepared: PreparedChat, fields: Sequence[str]) -> None:
        options = context.body.options
        super().__init__(
            "chat.completion.chunk",
            prepared.spec,
            prepared.runs,
            model=options.model,
            fingerprint=context.model.fingerprint,
            options=options.stream_options,
            always_usage=context.service.settings.api.always_include_usage,
        )
        self._parsers = prepared.parsers
        # All choices have one prompt.
        if self._ids:
            self._prompt_ids = encode(prepared.runs[0].generation.prompt_ids)
        else:
            self._prompt_ids = b""
        self._plan = prepared.plan
        self._reasoning_fields = fields
        # By choice and index, what the model writes as the argument of a custom tool.
        self._custom: dict[tuple[int, int], list[str]] = {}
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        #: What precedes the text of most chunks; empty for a choice whose chunks need more.
        self._text_heads = [
            self._head + b'{"index":%d,"delta":{"content":' % choice
            if parser.plain and not self._continuous and not self._ids
            else b""
            for choice, parser in enumerate(prepared.parsers)
        ]

    def first(self, choice: int) -> bytes:
        """Return the chunk with the role, and with the prompt's ids where they are wanted."""
        if self._ids:
            tail = b'],"prompt_token_ids":%b%b' % (self._prompt_ids, self._tail[1:])
        else:
            tail = self._tail
        return self._chunk(choice, b'{"role":"assistant","content":"","refusal":null}', b"null", tail)

    def piece(self, choice: int, delta: Delta) -> bytes:
        head = self._text_heads[choice]
        if head and not delta.logprobs:
            return head + encode(delta.text) + self._text_tail
        if self._continuous:
            self._shown[choice] += delta.tokens or 0
        return self._events(choice, self._parsers[choice].feed(delta.text, delta.tokens), delta)

    def last(self, choice: int) -> bytes:
        """Return the text that the parser delayed, and the chunk with the finish reason."""
        parser = self._parsers[choice]
        progress = self._runs[choice].progress
        if parser.plain:
            delayed = b""
        else:
            delayed = self._events(choice, parser.flush(cut=progress.cut), Delta())
        for (of, index), parts in self._custom.items():
            if of == choice:
                call = {"index": index, "custom": {"input": custom_input("".join(parts))}}
                delayed += self._chunk(choice, encode({"tool_calls": [call]}), b"null", self._counted(choice))
        reasons = (encode(finish_reason(progress, parser, self._plan)), encode(progress.stop_reason))
        end = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (choice, *reasons)
        return delayed + self._head + end + self._ended(choice)

    def _usage(self) -> UsageObject | None:
        return usage_of(self._runs, n=self._n, reasoning_tokens=reasoning_tokens(self._parsers))

    def _events(self, choice: int, events: Sequence[Event], delta: Delta) -> bytes:
        """Return a chunk for each of *events*; the first carries the log probabilities and ids that came with it."""
        if not self._reasoning_fields:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._plan.custom:
            events = [event for event in events if not self._delays(choice, event)]
        if delta.logprobs:
            logprobs = encode(chat_logprobs(delta.logprobs))
        else:
            logprobs = b"null"
        if self._ids:
            ids = b',"token_ids":' + encode(list(delta.token_ids))
        else:
            ids = b""
        if not events and (delta.logprobs or (ids and delta.token_ids)):
            return self._chunk(choice, b'{"content":""}', logprobs, self._counted(choice), ids)
        chunks = []
        for event in events:
            chunks.append(self._chunk(choice, encode(self._delta(event)), logprobs, self._counted(choice), ids))
            logprobs = b"null"
            ids = b""
        return b"".join(chunks)

    def _delays(self, choice: int, event: Event) -> bool:
        """Return whether *event* is a part of a custom tool's call: its text is sent as a whole."""
        if isinstance(event, ToolCallStart) and event.name in self._plan.custom:
            self._custom[choice, event.index] = []
        if not isinstance(event, ToolCallArguments) or (choice, event.index) not in self._custom:
            return False
        self._custom[choice, event.index].append(event.text)
        return True

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return dict.fromkeys(self._reasoning_fields, event.text)
        if isinstance(event, ToolCallArguments):
            call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.text}}
        else:
            call = {"index": event.index, "id": event.id, "type": "function"}
            if event.name in self._plan.custom:
                call |= {"type": "custom", "custom": {"name": event.name, "input": ""}}
            else:
                call["function"] = {"name": event.name, "arguments": ""}
        if self._plan.legacy:
            return {"function_call": call["function"]}
        return {"tool_calls": [call]}

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, tail: bytes, ids: bytes = b"") -> bytes:
        body = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (choice, delta, logprobs, ids)
        return self._head + body + tail


class _KeptChunks(ChatChunks):
    """The chunks of a stream; *keep* gets the whole answer before the last one is sent."""

    def __init__(
        self, context: RequestContext[Conversation], prepared: PreparedChat, fields: Sequence[str], keep: Keep
    ) -> None:
        super().__init__(context, prepared, fields)
        self._context = context
        self._prepared = prepared
        self._keep = keep
        # Text takes the way of everything else, too.
        self._text_heads = [b""] * len(prepared.runs)
        self._parsed_events: list[list[Event]] = [[] for _ in prepared.runs]
        self._deltas: list[list[Delta]] = [[] for _ in prepared.runs]

    def _events(self, choice: int, events: Sequence[Event], delta: Delta) -> bytes:
        self._parsed_events[choice] += events
        if delta.logprobs or delta.token_ids:
            self._deltas[choice].append(delta)
        return super()._events(choice, events, delta)

    async def ended(self, error: ServiceError | None) -> bytes:
        if error is None:
            cost = offload.ITEM * sum(map(len, self._parsed_events))
            await self._keep(await offload.run(self._whole, cost=cost))
        return await super().ended(error)

    def _whole(self) -> bytes:
        options = self._context.body.options
        prepared = self._prepared
        choices = []
        for index, run in enumerate(prepared.runs):
            answer = Collected(run, self._deltas[index])
            choices.append(
                chat_choice(options, prepared, self._reasoning_fields, index, answer, self._parsed_events[index])
            )
        return _completion(self._context, prepared, choices)
