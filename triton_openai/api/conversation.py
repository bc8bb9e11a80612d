"""
The middle of the APIs for chats: what a client asks for, whichever API it uses, and what answers it.

Each API reads its body into a :class:`Conversation`, which has the client's names beside the messages and options. So
an error names what the client wrote. :func:`prepare_chat` makes of it a :class:`PreparedChat`: the prompt, the runs,
and parsers of their texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.answer.chat_prompt import media_of, rendered_chat
from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run import Run
from triton_openai.answer.thinking_budget import ThinkingBudget
from triton_openai.api.bodies import MAX_ITEMS, converted, decoded_arguments, report_ignored, report_repaired
from triton_openai.api.media_limits import media_reservation
from triton_openai.api.parameters import Alternatives, GenerationOptions, Limit
from triton_openai.api.service import RequestContext, runs_of, spec_of
from triton_openai.api.tools import ToolPlan
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.media.audio import AudioReference, load, loaded_size, loading_size
from triton_openai.media.images import ImageReference, images_size
from triton_openai.models.served import ServedModel
from triton_openai.parsers.answer_parser import PLAIN, AnswerParser
from triton_openai.parsers.parser_registry import TOOL_PARSERS, Parsers
from triton_openai.parsers.tools.guided import ConstrainedCalls, ForcedCall, GuidedCalls
from triton_openai.parsers.tools.tool_parser import ToolParser
from triton_openai.prompts.messages import AssistantMessage, Message
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.thinking import BUDGET_NAMES, LEVELS, budget_of, level_of, named_budget
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.telemetry.request_record import RENDER

_log = structlog.get_logger(__name__)

# Tools whose names are looked for in a prompt.
_MAX_LOOKED_FOR = 16


class ChatOptions(GenerationOptions, kw_only=True):
    """Options of a chat's answer and of its prompt. Each may be null."""

    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
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
    reasoning: (
        Annotated[
            dict[str, Any],
            Meta(description="The same, as OpenRouter names it: `effort`, `max_tokens`, `enabled`, `exclude`."),
        ]
        | None
    ) = None
    thinking_budget: Annotated[Limit, Meta(description="`thinking_token_budget`, as Qwen names it.")] | None = None
    thinking_budget_tokens: (
        Annotated[Limit, Meta(description="`thinking_token_budget`, as llama.cpp names it.")] | None
    ) = None
    reasoning_budget: (
        Annotated[Limit, Meta(description="`thinking_token_budget`, as NVIDIA's NIM names it.")] | None
    ) = None
    max_thinking_tokens: (
        Annotated[Limit, Meta(description="`thinking_token_budget`, as NVIDIA's NIM names it.")] | None
    ) = None
    max_reasoning_tokens: (
        Annotated[Limit, Meta(description="`thinking_token_budget`, as other gateways name it.")] | None
    ) = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: (
        Annotated[
            bool, Meta(description="Whether the tokenizer's special tokens are added to those of the chat template.")
        ]
        | None
    ) = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None

    @property
    def switches(self) -> Mapping[str, Any]:
        """The options that turn the thinking on or off, or limit it, by their names."""
        switches: dict[str, Any] = {
            "think": self.think,
            "thinking": self.thinking,
            "enable_thinking": self.enable_thinking,
        }
        if self.max_thinking is not None:
            _, switches["thinking_budget"] = self.max_thinking
        if self.reasoning is not None and self.think is None:
            switches["think"] = self.reasoning.get("effort")
            if switches["think"] is None:
                switches["think"] = self.reasoning.get("enabled")
        return {name: value for name, value in switches.items() if value is not None}

    @property
    def hides_reasoning(self) -> bool:
        """Whether the answer is to leave out what the model thought."""
        if self.include_reasoning is False:
            return True
        return self.reasoning is not None and self.reasoning.get("exclude") is True

    @property
    def max_thinking(self) -> tuple[str, int] | None:
        """The name that limits the thinking, and the most tokens of it; ``None`` for no limit."""
        if self.thinking_token_budget is not None and self.thinking_token_budget >= 0:
            return "thinking_token_budget", self.thinking_token_budget
        budget = named_budget({name: getattr(self, name, None) for name in (*BUDGET_NAMES, "thinking")})
        if budget is not None:
            return budget
        if self.reasoning is not None:
            tokens = budget_of({"thinking_budget": self.reasoning.get("max_tokens")})
            if tokens is not None:
                return "reasoning.max_tokens", tokens
        if self.chat_template_kwargs is not None:
            budget = named_budget(self.chat_template_kwargs)
            if budget is not None:
                return f"chat_template_kwargs.{budget[0]}", budget[1]
        return None

    def check_thinking(self) -> None:
        """Raise :class:`InvalidRequest` for a value in ``thinking`` or ``reasoning`` that would have no effect."""
        objects: dict[str, Any] = {}
        if isinstance(self.thinking, dict):
            objects["thinking"] = self.thinking
        if self.reasoning is not None:
            objects["reasoning"] = self.reasoning
        converted(objects, _ThinkingObjects)
        for name, field in (("thinking", "type"), ("reasoning", "effort"), ("reasoning", "enabled")):
            value = objects.get(name, {}).get(field)
            if value is not None and level_of(value) is None:
                path = f"{name}.{field}"
                raise InvalidValue(f"'{path}' must be one of {', '.join(LEVELS)}, enabled or disabled.", path)

    @property
    def alternatives(self) -> tuple[str, int | None]:
        count = None
        if self.logprobs:
            count = self.top_logprobs or 0
        return "top_logprobs", count


_Thinking = msgspec.defstruct(
    "_Thinking", [("type", str | bool | None, None), *((name, Limit | None, None) for name in BUDGET_NAMES)]
)


class _Reasoning(msgspec.Struct):
    effort: str | bool | None = None
    enabled: str | bool | None = None
    max_tokens: Limit | None = None
    exclude: bool | None = None


class _ThinkingObjects(msgspec.Struct):
    """The types of what is read of ``thinking`` and ``reasoning``. Other services have more fields there."""

    thinking: _Thinking | None = None  # type: ignore[valid-type]
    reasoning: _Reasoning | None = None


#: All options about the thinking but the levels.
_thinking_options = attrgetter(
    "think", "enable_thinking", "thinking", "reasoning", "chat_template_kwargs", "thinking_token_budget",
    "thinking_budget", "thinking_budget_tokens", "reasoning_budget", "max_thinking_tokens", "max_reasoning_tokens",
)  # fmt: skip


class Conversation(msgspec.Struct):
    """Messages to answer, with tools and options."""

    messages: list[Message]
    #: How the client's tools are used. Whoever reads them names them in errors.
    tools: ToolPlan
    options: ChatOptions
    #: The client's names of messages and options.
    origins: Origins = CHAT_ORIGINS

    def keep(self, numbers: Sequence[int]) -> None:
        """Leave out all messages but those with these *numbers*."""
        self.messages = [self.messages[number] for number in numbers]
        origins = [self.origins.message(number) for number in numbers]
        self.origins = replace(self.origins, messages=origins)

    def json_texts(self) -> Iterator[tuple[str, Any]]:
        """Yield the texts that hold JSON, each with the client's path."""
        yield from self.options.json_texts()
        yield from argument_texts(self.messages, self.origins)


def argument_texts(messages: Sequence[Message], origins: Origins = CHAT_ORIGINS) -> Iterator[tuple[str, Any]]:
    """Return the arguments of the calls in *messages* that are decoded, each with the client's path."""
    return decoded_arguments(_arguments(messages, origins))


def _arguments(messages: Sequence[Message], origins: Origins) -> Iterator[tuple[str, Any]]:
    for number, message in enumerate(messages):
        if not isinstance(message, AssistantMessage):
            continue
        origin = origins.message(number)
        if message.function_call is not None:
            yield origin.field("function_call"), message.function_call.arguments
        for index, call in enumerate(message.tool_calls or ()):
            if call.function is not None:
                yield origin.call(index), call.function.arguments


class PreparedChat(msgspec.Struct, frozen=True):
    """A conversation that is ready to be answered. Each API for chats renders the answers in its own way."""

    spec: GenerationSpec
    plan: ToolPlan
    #: Its answers, not yet started.
    runs: Sequence[Run]
    #: The parser of each answer.
    parsers: Sequence[AnswerParser]


async def prompt_of(
    context: RequestContext[Conversation], prompter: Prompter
) -> tuple[str, Sequence[ImageReference], Sequence[AudioReference]]:
    """Return a chat's prompt, made by *prompter*, and its images and audio, not loaded. Raises ServiceError."""
    service = context.service
    model = context.model
    conversation = context.body
    options = conversation.options
    origins = conversation.origins
    pictures, audio = media_of(model, conversation.messages, origins)
    if pictures:
        # Before they are rendered: for each, all of its message's text is searched.
        service.images.check_count(pictures, max_images=model.adapter.capabilities.images)
    repaired: list[str] = []
    switches = None
    values = _thinking_options(options)
    if values.count(None) < len(values):
        options.check_thinking()
        switches = options.switches
    prompt, context.record.chat_template = await rendered_chat(
        model,
        prompter,
        options,
        conversation.messages,
        tools=conversation.tools.prompt,
        images=pictures,
        audio=audio,
        reasoning_effort=options.reasoning_effort,
        switches=switches or None,
        trust_template=service.settings.api.trust_request_chat_template,
        repaired=repaired,
        origins=origins,
    )
    if repaired:
        report_repaired(context.record, repaired)
    if conversation.tools.prompt and not _shows_tools(prompt, conversation.tools.prompt):
        # The template takes tools, but shows none in a conversation like this one.
        report_ignored(context.record, [origins.name("tools")])
        _warn_hidden_tools(model.name, context.record.chat_template)
    tokenizer = prompter.tokenizer
    if tokenizer is not None and tokenizer.adds_bos:
        prompt = _with_special(prompt, tokenizer, model, options)
    return prompt, pictures, audio


def _with_special(prompt: str, tokenizer: Tokenizer, model: ServedModel, options: ChatOptions) -> str:
    """
    Return the *prompt* of a chat template for a model that may add the special tokens of *tokenizer* by itself.

    Raises :class:`UnsupportedParameter` where they are to be added and the model does not add them.
    """
    adds = model.adapter.metadata.adds_bos
    if options.add_special_tokens:
        if not adds:
            raise UnsupportedParameter(
                "'add_special_tokens' cannot be true: the model takes the prompt as the chat template writes it.",
                param="add_special_tokens",
            )
        return prompt
    if adds:
        # Else the prompt would begin with it twice.
        return tokenizer.strip_bos(prompt)
    return prompt


def _shows_tools(prompt: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether *prompt* has the names of *tools*; of many, the first are looked for."""
    names = [tool["function"]["name"] for tool in tools[:_MAX_LOOKED_FOR]]
    return all(name in prompt for name in names)


@lru_cache(64)
def _warn_hidden_tools(model: str, template: str | None) -> None:
    _log.warning(
        "the chat template does not show the tools of a request: --chat-template gives the model another",
        model=model,
        template=template,
    )


async def prepare_chat(context: RequestContext[Conversation], answer_id: str, *, fitting: bool = False) -> PreparedChat:
    """
    Return what answers the conversation of *context*; *answer_id* is the id of the answer.

    With *fitting*, ``max_tokens`` may ask for more than the model's context has room for. Raises
    :class:`InvalidRequest` and its subclasses, and :class:`ConfigurationError` for a model that cannot chat.
    """
    conversation = context.body
    plan = conversation.tools
    record = context.record
    prompter = context.model.lazy_prompter.resolved
    if prompter is None:
        prompter = await context.model.prompter()
    parsers = context.model.lazy_prompter.parsers
    spec = _spec(context, answer_id, prompter, parsers)
    if plan.forced:
        # The schemas are walked, in Python.
        guide = await offload.run(plan.guide, cost=offload.rendering_cost(dict(plan.schemas)))
        spec = _with(spec, guide=guide)
    if fitting:
        spec = replace(spec, limit=replace(spec.limit, open=True))
    with record.stage(RENDER):
        prompt, pictures, audio = await prompt_of(context, prompter)
    max_thinking = None
    values = _thinking_options(conversation.options)
    if values.count(None) < len(values):
        max_thinking = conversation.options.max_thinking
    if max_thinking is not None and not plan.forced:
        spec = _with_budget(context, spec, parsers, prompter.tokenizer, max_thinking, images=bool(pictures))
    if pictures or audio:
        spec = await _with_media(context, spec, pictures, audio)
    runs = await runs_of(context, prompter.tokenizer, [prompt], spec)
    streams = bool(conversation.options.stream)
    if plan.mode == "none" and parsers.reasoning is None:
        answer_parsers = [PLAIN] * len(runs)
    else:
        answer_parsers = [make_parser(parsers, plan, prompt, streams=streams) for _ in runs]
    record.reasoning_tokens = partial(reasoning_tokens, answer_parsers)
    if plan.mode != "none":
        record.tool_calls = partial(call_outcomes, answer_parsers)
    return PreparedChat(spec, plan, runs, answer_parsers)


def _with_budget(
    context: RequestContext[Conversation],
    spec: GenerationSpec,
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    max_thinking: tuple[str, int],
    *,
    images: bool,
) -> GenerationSpec:
    """
    Return *spec* with a budget for the thinking: the engine keeps it if it can, else this service does. Beam searches
    have none.

    *max_thinking* is the option that limits the thinking, and its tokens.
    Raises :class:`UnsupportedParameter` where neither can and the client named vLLM's parameter. Other names are
    reported as ignored: agents send them to every model.
    """
    name, tokens = max_thinking
    conversation = context.body
    adapter = context.model.adapter
    if spec.template.beams is not None:
        report_ignored(context.record, [conversation.origins.name(name)])
        return spec
    if "thinking_token_budget" in adapter.supported:
        return _with(spec, sampling=replace(spec.template.sampling, thinking_token_budget=tokens))
    can_call = conversation.tools.mode == "auto" and parsers.tools is not None
    ending = ""
    if parsers.reasoning is not None and not (images and adapter.capabilities.images_as_turn):
        ending = parsers.reasoning.ending(calls=can_call)
    if parsers.reasoning is None or not ending:
        if name == "thinking_token_budget":
            raise UnsupportedParameter(
                f"The parameter '{name}' is not supported with this model: where its thinking ends is not known "
                "(--reasoning-parser).",
                param=name,
            )
        report_ignored(context.record, [conversation.origins.name(name)])
        return spec
    calls: Sequence[str] = ()
    if can_call and parsers.tools is not None:
        calls = parsers.tools(conversation.tools.schemas).openings
    ending_ids: tuple[int, ...] = ()
    if tokenizer is not None:
        ending_ids = tuple(tokenizer.encode(ending))
    budget = ThinkingBudget(
        tokens=tokens, meter=partial(parsers.reasoning.meter, calls=calls), ending=ending, ending_ids=ending_ids
    )
    # What comes as a whole cannot be ended on its way.
    spec = _with(spec, times_tokens=True)
    return replace(spec, thinking_budget=budget)


async def _with_media(
    context: RequestContext[Conversation],
    spec: GenerationSpec,
    pictures: Sequence[ImageReference],
    audio: Sequence[AudioReference],
) -> GenerationSpec:
    """Return *spec* with the media, for which memory is reserved until the request ends. Raises ServiceError."""
    service = context.service
    record = context.record
    if record.memory is None:
        record.memory = media_reservation(service)
    memory = record.memory
    # Of an earlier attempt of the same request, if there was one.
    before = memory.size
    max_seconds = service.settings.audio.max_duration
    await memory.grow(before + service.images.loading_size(pictures) + loading_size(audio, max_seconds=max_seconds))
    kept = before
    if pictures:
        with record.stage("load images"):
            images = await service.images.load(pictures)
        kept += images_size(images)
        spec = _with(spec, images=images)
    if audio:
        with record.stage("load audio"):
            files = await load(audio, max_seconds=max_seconds)
        kept += loaded_size(files)
        spec = _with(spec, audio=files)
    memory.shrink(kept)
    return spec


def _spec(
    context: RequestContext[Conversation], answer_id: str, prompter: Prompter, parsers: Parsers
) -> GenerationSpec:
    model = context.model
    conversation = context.body
    plan = conversation.tools
    options = conversation.options
    origins = conversation.origins
    forced = plan.forced
    if options.top_logprobs and not options.logprobs:
        raise InvalidValue("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if options.thinking_token_budget is not None:
        # What becomes of it is decided when the prompt is there.
        options = replace(options, thinking_token_budget=None)
    if forced:
        # The call wins, as in vLLM's server: a format is that of an answer in text.
        options = replace(options, response_format=None)
    spec = spec_of(context, options, answer_id, prompter, n=options.n or 1, keeps_special=False, origins=origins)
    if forced and "json_schema" not in model.adapter.capabilities.guides:
        raise UnsupportedParameter(
            "The model has no guided decoding, so it cannot be forced to call a tool. Use 'auto'.", param=plan.param
        )
    guide = spec.template.guide
    if forced and guide is not None:
        raise InvalidRequest(f"'{guide.param}' cannot be used together with a forced tool call.", param=plan.param)
    if plan.mode == "auto" and parsers.tools is None:
        raise UnsupportedParameter(
            "How this model writes tool calls is not known: name its format with --tool-call-parser.",
            param=origins.name("tools"),
        )
    supported = model.adapter.supported
    if (plan.mode != "none" or parsers.reasoning) and parsers.special_tokens and "skip_special_tokens" in supported:
        spec = _with(spec, sampling=replace(spec.template.sampling, skip_special_tokens=False))
    return spec


def _with(spec: GenerationSpec, **fields: Any) -> GenerationSpec:
    """Return *spec* with other *fields* of its generations."""
    return replace(spec, template=replace(spec.template, **fields))


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


def reasoning_tokens(parsers: Sequence[AnswerParser]) -> int | None:
    """Return the tokens of reasoning in all choices, ``None`` if there were none or they are not known."""
    return sum([parser.reasoning_tokens for parser in parsers]) or None


def call_outcomes(parsers: Sequence[AnswerParser]) -> Sequence[tuple[str, str]]:
    """Return the outcome of each call in all choices, and what was repaired in it."""
    return [outcome for parser in parsers for outcome in parser.outcomes()]
