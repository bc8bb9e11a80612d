"""
The answers of ``POST /v1/chat/completions``, and an assistant's turn, which the other APIs for chats prepare too.

Source of the wire format: OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects (openai-openapi 2.3.0).
``reasoning_content`` is DeepSeek's extension and ``reasoning`` OpenRouter's and vLLM's; both are in wide use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai import offload
from triton_openai.answer.chat_prompt import media_of, rendered_chat
from triton_openai.answer.fan_out import Collected, collect
from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run import Run
from triton_openai.api.bodies import MAX_ITEMS, MAX_MESSAGES, encode, in_pieces, now, tell_repaired
from triton_openai.api.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    cost_of,
    drop_prompt_logprobs,
    prompt_logprobs,
    rendering_cost,
)
from triton_openai.api.parameters import SamplingRequest, Verbosity, accepting, refusing
from triton_openai.api.service import RequestContext, media_reservation, runs_of, spec_of
from triton_openai.api.sse import Chunks
from triton_openai.api.tools import Function, FunctionChoice, Tool, ToolChoice, ToolPlan, custom_input, plan_tools
from triton_openai.api.usage import UsageObject, usage_of
from triton_openai.errors import InvalidRequest, InvalidValue, ServiceError, UnsupportedParameter
from triton_openai.generation import AnswerState, Delta, FinishReason
from triton_openai.media.audio import AudioReference, load, loaded_size, loading_size
from triton_openai.media.images import ImageReference, images_size
from triton_openai.operations import Reply, Whole
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.parser_registry import TOOL_PARSERS, Parsers
from triton_openai.parsers.tools.guided import ConstrainedCalls, ForcedCall, GuidedCalls
from triton_openai.parsers.tools.tool_parser import ToolParser
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prompter import Prompter
from triton_openai.telemetry.request_record import RENDER

#: Takes a whole answer in JSON.
Keep: TypeAlias = Callable[[bytes], Awaitable[None]]


@accepting("prediction", "prompt_cache_options", "prompt_cache_retention")
@refusing(
    modalities=["text"], audio=None, web_search_options=None, moderation=None, echo=False,
    best_of=1, add_special_tokens=False,
)  # fmt: skip
class ChatRequest(SamplingRequest, kw_only=True):
    """The request. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    think: (
        Annotated[bool | str, Meta(description="Ollama's name for whether, or how much, the model thinks.")] | None
    ) = None
    thinking: (
        Annotated[
            bool | str | dict[str, Any],
            Meta(description="The same, as DeepSeek, Kimi and GLM name it: an object with a `type`."),
        ]
        | None
    ) = None
    enable_thinking: Annotated[bool | str, Meta(description="The same, as Qwen names it.")] | None = None
    verbosity: Verbosity | None = None
    store: bool | None = None
    metadata: Annotated[Any, Meta(description="Up to 16 texts of 512 characters, kept with a completion.")] = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
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

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


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
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The last two fields are vLLM's."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """
    The whole answer, without ``usage`` if the tokens are not known.

    The fields about the prompt are vLLM's, on request. One that was stored has ``metadata``.
    """

    id: str
    object: Literal["chat.completion"] = msgspec.field(name="object", default="chat.completion")
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: UsageObject | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    metadata: Mapping[str, str] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: the name comes first and whole, then the JSON text of the arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    """A piece of a call of a custom tool: first its name, and at its end the whole text."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of one of the calls; what opens a call has its id."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message; nothing in a choice's last chunk."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. ``usage`` is there on request: null but for the last chunk, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class Turn(msgspec.Struct, frozen=True):
    """
    An assistant's turn, ready to be generated. The APIs for chats prepare one each, and render it in their own way.
    """

    spec: GenerationSpec
    plan: ToolPlan
    #: Its answers, not yet started.
    runs: Sequence[Run]
    #: The parser of each answer.
    parsers: Sequence[AnswerParser]


def plan_of(body: ChatRequest) -> ToolPlan:
    """Return how the tools of *body* are used. Raises :class:`InvalidRequest`."""
    return plan_tools(body.tools, body.tool_choice, body.functions, body.function_call, body.parallel_tool_calls)


async def prompt_of(
    context: RequestContext[ChatRequest], plan: ToolPlan, prompter: Prompter
) -> tuple[str, Sequence[ImageReference], Sequence[AudioReference]]:
    """Return a chat's prompt, made by *prompter*, and its images and audio, not loaded. Raises ServiceError."""
    service = context.service
    model = context.model
    body = context.body
    pictures, audio = media_of(model, body.messages)
    # Before they are rendered: each is looked for in all of its message's text.
    service.images.check_count(pictures, most=model.adapter.capabilities.images)
    repaired: list[str] = []
    switches: dict[str, Any] | None = None
    if body.think is not None or body.thinking is not None or body.enable_thinking is not None:
        wishes = {"think": body.think, "thinking": body.thinking, "enable_thinking": body.enable_thinking}
        switches = {name: value for name, value in wishes.items() if value is not None}
    prompt, context.record.chat_template = await rendered_chat(
        model,
        prompter,
        body,
        body.messages,
        tools=plan.prompt,
        images=pictures,
        audio=audio,
        reasoning_effort=body.reasoning_effort,
        switches=switches,
        trust_template=service.settings.api.trust_request_chat_template,
        repaired=repaired,
    )
    if repaired:
        tell_repaired(context.record, repaired)
    tokenizer = prompter.tokenizer
    if model.adapter.metadata.adds_bos and tokenizer is not None and tokenizer.adds_bos:
        # Else the prompt would begin with it twice.
        prompt = tokenizer.strip_bos(prompt)
    return prompt, pictures, audio


async def turn_of(context: RequestContext[ChatRequest], answer_id: str, *, fitting: bool = False) -> Turn:
    """
    Return the turn that answers the chat of *context*; *answer_id* is the id of the answer.

    With *fitting*, ``max_tokens`` may ask for more than the model's context has room for. Raises
    :class:`InvalidRequest` and its subclasses, and :class:`ConfigurationError` for a model that cannot chat.
    """
    body = context.body
    record = context.record
    plan = plan_of(body)
    prompter = await context.model.prompter()
    parsers = context.model.lazy_prompter.parsers
    spec = _spec(context, answer_id, plan, prompter, parsers)
    if plan.forced:
        # The schemas are walked, in Python.
        spec = _with(spec, guide=await offload.run(plan.guide, cost=offload.rendering_cost(dict(plan.schemas))))
    if fitting:
        spec = msgspec.structs.replace(spec, limit=msgspec.structs.replace(spec.limit, open=True))
    with record.stage(RENDER):
        prompt, pictures, audio = await prompt_of(context, plan, prompter)
    if pictures or audio:
        spec = await _with_media(context, spec, pictures, audio)
    runs = await runs_of(context, prompter.tokenizer, [prompt], spec)
    answer_parsers = [make_parser(parsers, plan, prompt, streams=bool(body.stream)) for _ in runs]
    record.reasoning_tokens = partial(reasoning_tokens, answer_parsers)
    if plan.active:
        record.tool_calls = partial(call_outcomes, answer_parsers)
    return Turn(spec, plan, runs, answer_parsers)


async def _with_media(
    context: RequestContext[ChatRequest],
    spec: GenerationSpec,
    pictures: Sequence[ImageReference],
    audio: Sequence[AudioReference],
) -> GenerationSpec:
    """Return *spec* with the media, for which memory is reserved until the request ends. Raises ServiceError."""
    service = context.service
    record = context.record
    memory = record.memory = record.memory or media_reservation(service)
    # Of an earlier attempt of the same request, if there was one.
    before = memory.size
    max_seconds = service.settings.audio.max_duration
    await memory.grow(before + service.images.loading_size(pictures) + loading_size(audio, most=max_seconds))
    kept = before
    if pictures:
        with record.stage("load images"):
            images = await service.images.load(pictures)
        kept += images_size(images)
        spec = _with(spec, images=images)
    if audio:
        with record.stage("load audio"):
            files = await load(audio, most=max_seconds)
        kept += loaded_size(files)
        spec = _with(spec, audio=files)
    memory.shrink(kept)
    return spec


async def answer(context: RequestContext[ChatRequest], answer_id: str, keep: Keep | None = None) -> Reply:
    """Answer a chat. The whole answer, in JSON, is given to *keep* first, also that of a stream before its end."""
    service = context.service
    body = context.body
    turn = await turn_of(context, answer_id)
    if keep is None:
        context.forget_messages()
    runs = turn.runs
    setting = service.settings.api.reasoning_field
    fields: Sequence[str] = ("reasoning_content", "reasoning") if setting == "both" else (setting,)
    if body.include_reasoning is False:
        fields = ()
    if body.stream:
        if keep is None:
            chunks = ChatChunks(context, turn, fields)
        else:
            chunks = _KeptChunks(context, turn, fields, keep)
        return await context.stream(runs, chunks)
    answers = await collect(runs, timeout=context.limits.total)
    choices = (chat_choice(body, turn, fields, index, answer) for index, answer in enumerate(answers))
    cost = rendering_cost(answers, offload.BYTE if turn.parsers[0].plain else offload.CHARACTER)
    if body.prompt_logprobs is not None:
        cost += cost_of(len(runs[0].prompt_logprobs), body.prompt_logprobs)
    # Nothing is awaited for most answers.
    whole = partial(_completion, context, turn, choices)
    if cost <= offload.INLINE:
        content = whole()
    else:
        content = await offload.run(whole, cost=cost)
    if keep is not None:
        await keep(content)
    return Whole(content)


def _completion(context: RequestContext[ChatRequest], turn: Turn, choices: Iterable[ChatChoice]) -> bytes:
    """Return the whole answer with its *choices*, in JSON."""
    body = context.body
    runs = turn.runs
    # As they are parsed, reasoning is counted.
    shown: Any = in_pieces(choices)
    usage = usage_of(runs, n=turn.spec.n, reasoning_tokens=reasoning_tokens(turn.parsers))
    scores: Any = None if body.prompt_logprobs is None else in_pieces(prompt_logprobs(runs[0].prompt_logprobs))
    if scores is not None:
        drop_prompt_logprobs(runs)
    completion = ChatCompletion(
        id=turn.spec.template.id,
        created=now(),
        model=body.model,
        choices=shown,
        usage=usage or msgspec.UNSET,
        system_fingerprint=context.model.fingerprint,
        prompt_logprobs=msgspec.UNSET if scores is None else scores,
        prompt_token_ids=(runs[0].generation.prompt_ids or ()) if body.return_token_ids else msgspec.UNSET,
    )
    return encode(completion)


def _spec(
    context: RequestContext[ChatRequest], answer_id: str, plan: ToolPlan, prompter: Prompter, parsers: Parsers
) -> GenerationSpec:
    body = context.body
    model = context.model
    forced = plan.forced
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if forced:
        # The call wins, as in vLLM's server: a format is that of an answer in text.
        context = context.about(msgspec.structs.replace(body, response_format=None))
    spec = spec_of(context, answer_id, prompter, n=body.n or 1, keeps_special=False)
    if forced and "json_schema" not in model.adapter.capabilities.guides:
        raise UnsupportedParameter(
            "The model has no guided decoding, so it cannot be forced to call a tool. Use 'auto'.", param=plan.param
        )
    guide = spec.template.guide
    if forced and guide is not None:
        raise InvalidRequest(f"'{guide.param}' cannot be used together with a forced tool call.", param=plan.param)
    if plan.mode == "auto" and parsers.tools is None:
        raise UnsupportedParameter(
            "How this model writes tool calls is not known: name its format with --tool-call-parser.", param="tools"
        )
    supported = model.adapter.supported
    if (plan.active or parsers.reasoning) and parsers.special_tokens and "skip_special_tokens" in supported:
        spec = _with(spec, sampling=msgspec.structs.replace(spec.template.sampling, skip_special_tokens=False))
    return spec


def _with(spec: GenerationSpec, **fields: Any) -> GenerationSpec:
    """Return *spec* with other *fields* of its generations."""
    return msgspec.structs.replace(spec, template=msgspec.structs.replace(spec.template, **fields))


def make_parser(parsers: Parsers, plan: ToolPlan, prompt: str, *, streams: bool = False) -> AnswerParser:
    """Return the parser of one choice; *streams* is whether a client sees what it finds while it comes."""
    if plan.forced:
        # These calls have ids of the model's family too: its template may take no others.
        if parsers.tools is None:
            new_id = ToolParser.new_id
        else:
            new_id = parsers.tools.new_id
        # The answer is calls and nothing else: no reasoning comes before it.
        forced: ToolParser = GuidedCalls(plan.schemas, new_id=new_id)
        if plan.name is not None:
            forced = ForcedCall(plan.name, plan.schemas, new_id=new_id)
        own = (parsers.tools or TOOL_PARSERS.load("llama3_json"))(plan.schemas)
        forced.may_wait = own.may_wait = not streams
        return AnswerParser(None, ConstrainedCalls(forced, own), parallel=plan.parallel)
    tools = None
    if plan.mode == "auto" and parsers.tools is not None:
        tools = parsers.tools(plan.schemas)
    if tools is not None:
        tools.may_wait = not streams
    kind = parsers.reasoning
    if kind is None:
        reasoning = None
    else:
        reasoning = kind(inside=kind.inside_after(prompt))
    return AnswerParser(reasoning, tools, parallel=plan.parallel, streams=streams)


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


def reasoning_tokens(parsers: Sequence[AnswerParser]) -> int | None:
    """Return the tokens of reasoning in all choices, ``None`` if there were none or they are not known."""
    return sum([parser.reasoning_tokens for parser in parsers]) or None


def call_outcomes(parsers: Sequence[AnswerParser]) -> Sequence[tuple[str, str]]:
    """Return what became of each call in all choices, and what was repaired in it."""
    return [outcome for parser in parsers for outcome in parser.outcomes()]


def message_of(events: Sequence[Event], plan: ToolPlan, fields: Sequence[str]) -> AnswerMessage:
    """Return the message that *events* make together, with the reasoning in *fields*."""
    text = "".join([event.text for event in events if isinstance(event, Content)])
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)]) or msgspec.UNSET
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
    calls = [_call(start, "".join(parts), plan) for start, parts in zip(starts, arguments, strict=True)]
    legacy = [call.function for call in calls if plan.legacy and isinstance(call, ToolCall)]
    return AnswerMessage(
        role="assistant",
        content=text if text or not calls else None,
        refusal=None,
        **dict.fromkeys(fields, reasoning),
        tool_calls=calls if calls and not plan.legacy else msgspec.UNSET,
        function_call=legacy[0] if legacy else msgspec.UNSET,
    )


def _call(start: ToolCallStart, arguments: str, plan: ToolPlan) -> ToolCall | CustomToolCall:
    if start.name in plan.custom:
        return CustomToolCall(id=start.id, custom=CustomCall(name=start.name, input=custom_input(arguments)))
    return ToolCall(id=start.id, function=FunctionCall(name=start.name, arguments=arguments))


def chat_choice(
    body: ChatRequest, turn: Turn, fields: Sequence[str], index: int, answer: Collected,
    events: Sequence[Event] | None = None,
) -> ChatChoice:  # fmt: skip
    """Return a choice of the whole answer, with the reasoning in *fields*. *events* are there if it is parsed."""
    parser = turn.parsers[index]
    if events is None and parser.plain:
        message = AnswerMessage(role="assistant", content=answer.text, refusal=None)
    else:
        if events is None:
            events = [event for delta in answer.deltas for event in parser.feed(delta.text, delta.tokens)]
            events += parser.flush(cut=answer.run.progress.cut)
        message = message_of(events, turn.plan, fields)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=ChatLogprobs(in_pieces(chat_logprobs(answer.logprobs).content)) if body.logprobs else None,
        finish_reason=finish_reason(answer.run.progress, parser, turn.plan),
        stop_reason=answer.run.progress.stop_reason,
        token_ids=answer.token_ids if body.return_token_ids else msgspec.UNSET,
    )


class ChatChunks(Chunks):
    """The chunks of one stream, with the reasoning in *fields*."""

    def __init__(self, context: RequestContext[Any], turn: Turn, fields: Sequence[str]) -> None:
        super().__init__(
            "chat.completion.chunk",
            turn.spec,
            turn.runs,
            model=context.body.model,
            fingerprint=context.model.fingerprint,
            options=context.body.stream_options,
            always_usage=context.service.settings.api.always_include_usage,
        )
        self._parsers = turn.parsers
        # All choices have one prompt.
        if self._ids:
            self._prompt_ids = encode(turn.runs[0].generation.prompt_ids)
        else:
            self._prompt_ids = b""
        self._plan = turn.plan
        self._reasoning_fields = fields
        # By choice and index, what the model writes as the argument of a custom tool.
        self._custom: dict[tuple[int, int], list[str]] = {}
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        #: What precedes the text of most chunks; empty for a choice whose chunks need more.
        self._text_heads = [
            self._head + b'{"index":%d,"delta":{"content":' % choice
            if parser.plain and not self._continuous and not self._ids
            else b""
            for choice, parser in enumerate(turn.parsers)
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
            events = [event for event in events if not self._held(choice, event)]
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

    def _held(self, choice: int, event: Event) -> bool:
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
    """The chunks of a stream whose whole answer is given to *keep* before the last one is sent."""

    def __init__(self, context: RequestContext[ChatRequest], turn: Turn, fields: Sequence[str], keep: Keep) -> None:
        super().__init__(context, turn, fields)
        self._context = context
        self._turn = turn
        self._keep = keep
        # Text takes the way of everything else, too.
        self._text_heads = [b""] * len(turn.runs)
        self._found: list[list[Event]] = [[] for _ in turn.runs]
        self._deltas: list[list[Delta]] = [[] for _ in turn.runs]

    def _events(self, choice: int, events: Sequence[Event], delta: Delta) -> bytes:
        self._found[choice] += events
        if delta.logprobs or delta.token_ids:
            self._deltas[choice].append(delta)
        return super()._events(choice, events, delta)

    async def ended(self, error: ServiceError | None) -> bytes:
        if error is None:
            cost = offload.ITEM * sum(map(len, self._found))
            await self._keep(await offload.run(self._whole, cost=cost))
        return await super().ended(error)

    def _whole(self) -> bytes:
        body = self._context.body
        turn = self._turn
        found = zip(map(Collected, turn.runs, self._deltas), self._found, strict=True)
        choices = (chat_choice(body, turn, self._reasoning_fields, index, *each) for index, each in enumerate(found))
        return _completion(self._context, turn, choices)
