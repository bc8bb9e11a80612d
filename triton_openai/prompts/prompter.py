"""
Finds and loads the tokenizer and the chat template of each served model, and makes prompts with them.

The template is the one that the operator names, else the tokenizer's own, else a built-in one that the tokenizer's
special tokens identify without doubt. Nothing else is guessed: a model without a template refuses chats with an error
that names the flags, but serves completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from triton_openai import offload
from triton_openai.config.tree import ModelDefaults, ModelSettings, Settings
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.parsers.parser_registry import DetectionRule, detected
from triton_openai.prompts.continuation import continued
from triton_openai.prompts.history import HistoryTemplate
from triton_openai.prompts.messages import Message, MessageFunctionCall
from triton_openai.prompts.past_calls import PastCalls, repair_cost
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.prompt_template import PLAIN, PromptTemplate, Rendering
from triton_openai.prompts.template import ChatTemplate, check_template
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.tokenizer_files import is_hub_name, locate, may_be_on_hub, recommended_sampling

#: The built-in templates by the tokens that show without doubt that a model was trained on them. ``[INST]`` is a token
#: since Mistral's third format. Later formats, which the built-in template does not write, have ``[SYSTEM_PROMPT]``
#: or a byte-level vocabulary ("Ġ", Tekken).
_FAMILIES = (
    DetectionRule("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    DetectionRule("chatml", ("<|im_start|>", "<|im_end|>")),
    DetectionRule("gemma", ("<start_of_turn>", "<end_of_turn>")),
    DetectionRule("mistral", ("[INST]", "[/INST]"), lacks=("[SYSTEM_PROMPT]", "Ġ")),
)

#: Every built-in; ``plain`` belongs to no family and is taken by name only.
NAMES = (*(family.name for family in _FAMILIES), "plain")


def read_builtin(name: str) -> str:
    """Return the source of the built-in template *name* (one of :data:`NAMES`)."""
    return (files("triton_openai.templates") / f"{name}.jinja").read_text(encoding="utf-8")


#: Variables that a client's ``chat_template_kwargs`` may not replace.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

#: By name ("default", "tool_use", …); a broken one is an error.
Templates: TypeAlias = Mapping[str, PromptTemplate | ConfigurationError]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The origins of a model's tokenizer and template, for ``inspect``. Only for operators: it has paths."""

    tokenizer: str | None
    chat_template: str | None
    #: Why the model cannot chat, or what was found wrong and skipped.
    notes: list[str]
    #: The origin of :attr:`Prompter.recommended`; None without a recommendation.
    generation_config: str | None = None


class Prompter(msgspec.Struct, frozen=True, kw_only=True):
    """Makes the prompts of one served model. Thread-safe. :meth:`resolve` creates it."""

    #: None if unknown: then tokens cannot be counted, but a configured template works.
    tokenizer: Tokenizer | None
    templates: Templates
    provenance: Provenance
    #: The sampling of the model's ``generation_config.json``, under the names of a request.
    recommended: Mapping[str, Any] = {}
    #: Whether the templates came in a request.
    foreign: bool = False
    #: Whether the model's config or files name a tokenizer that could not be loaded: another attempt may help.
    incomplete: bool = False

    @classmethod
    def resolve(cls, settings: ModelSettings, hint: str | None = None, named: str | None = None) -> Prompter:
        """
        Find tokenizer and template. Blocks (disk, maybe network): call it in a thread.

        *hint* is the ``tokenizer_dir`` of Triton's config, used only if it exists on this machine. *named* is the
        folder or the hub name in the model's own files. Both are skipped if unusable. Raises
        :class:`ConfigurationError` if a tokenizer or template that the operator configured is unusable. A missing
        template is an error only in a chat.
        """
        notes: list[str] = []
        tokenizer, tokenizer_origin, incomplete = _find_tokenizer(settings.tokenizer, hint, named, notes)
        templates, template_origin = _find_templates(settings, tokenizer, notes)
        recommended, generation_origin = recommended_sampling(
            settings.generation_config, {} if tokenizer is None else tokenizer.generation_config, notes
        )
        return cls(
            tokenizer=tokenizer,
            templates=templates,
            provenance=Provenance(
                tokenizer=tokenizer_origin,
                chat_template=template_origin,
                notes=notes,
                generation_config=generation_origin,
            ),
            recommended=recommended,
            incomplete=incomplete,
        )

    @property
    def can_chat(self) -> bool:
        """Whether any template works."""
        return any(isinstance(template, PromptTemplate) for template in self.templates.values())

    @property
    def template_variables(self) -> Mapping[str, str]:
        """The special tokens for templates."""
        if self.tokenizer is None:
            return {}
        return self.tokenizer.special_tokens

    @property
    def tools_source(self) -> str:
        """The text of the template for chats with tools, which shows their markup best; empty without one."""
        try:
            return self.template_for(Rendering(tools=[{}])).source
        except ConfigurationError:
            return ""

    def template_for(self, rendering: Rendering = PLAIN) -> PromptTemplate:
        """
        Return the template for *rendering*: ``tool_use`` for tools and ``rag`` for documents if they exist, as in
        ``transformers``, else ``default``. Raises :class:`ConfigurationError`, which names the flags, if there is none.
        """
        for name in (rendering.tools and "tool_use", rendering.documents and "rag", "default"):
            if not name:
                continue
            template = self.templates.get(name)
            if isinstance(template, ConfigurationError):
                # A new exception: one that is raised again collects tracebacks.
                raise ConfigurationError(template.message, detail=template.detail)
            if template is not None:
                return template
        remedy = f"--chat-template (a file, or one of {', '.join(NAMES)})"
        if self.templates:
            why = f"The model's tokenizer has no default chat template (it has {', '.join(sorted(self.templates))})"
        elif self.tokenizer is None:
            why = "The model's tokenizer is not known"
            remedy = f"--tokenizer (a folder, or a name on the Hugging Face hub), or a chat template with {remedy}"
        else:
            why = "The model's tokenizer has no chat template"
        raise ConfigurationError(f"{why}: give one with {remedy}.")

    def render(
        self, messages: Sequence[Message], rendering: Rendering = PLAIN, template: PromptTemplate | None = None
    ) -> str:
        """
        Return the prompt for *messages*; *template* is that of :meth:`template_for`, for who has it already.

        Raises :class:`ConfigurationError` if the model has no usable template, and :class:`InvalidRequest` for messages
        that the template does not accept and for reserved variables.
        """
        for name in rendering.variables:
            if name in RESERVED_VARIABLES:
                raise InvalidRequest(
                    f"'{name}' cannot be set through chat_template_kwargs.", param=f"chat_template_kwargs.{name}"
                )
        template = template or self.template_for(rendering)
        origins = rendering.origins
        past_calls = PastCalls(tools=rendering.tools or (), repaired=rendering.repaired)
        prepared = prepare(messages, template, rendering.images, rendering.audio, past_calls, origins)
        try:
            if rendering.continue_final_message:
                return continued(prepared, lambda marked: template.render(marked, rendering), origins)
            return template.render(prepared, rendering)
        except InvalidRequest as error:
            if self.foreign or error.detail is None or template.failure is None:
                raise
            # It fails on every message, which is the operator's mistake.
            raise ConfigurationError(template.failure, detail=error.detail) from error

    async def render_async(
        self, messages: Sequence[Message], rendering: Rendering = PLAIN, template: PromptTemplate | None = None
    ) -> str:
        """Do :meth:`render`, in a thread for long messages. Raises the same."""
        past_calls: list[MessageFunctionCall] = []
        # The cost of a client's own template is unknown, even for few messages.
        cost = float(offload.LONG)
        if not self.foreign:
            others = filter(None, (rendering.tools, rendering.documents, rendering.variables))
            cost = offload.rendering_cost(messages, *others, collect=MessageFunctionCall, into=past_calls)
        if past_calls and cost <= offload.INLINE:
            cost += repair_cost([call.arguments for call in past_calls])
        if cost <= offload.INLINE:
            # Nothing is awaited for most requests.
            return self.render(messages, rendering, template)
        return await offload.run(self.render, messages, rendering, template, cost=cost)

    def with_template(self, template: ChatTemplate) -> Prompter:
        """Return a copy with *template*, which came in a request, instead of the model's own ones."""
        return msgspec.structs.replace(self, templates={"default": template}, foreign=True)


def may_have_tokenizer(source: str | None, hint: str | None) -> bool:
    """Return whether :meth:`Prompter.resolve` would find a tokenizer, which may turn out to be unusable."""
    known = _given(hint)
    return _given(source) is not None or (known is not None and _exists(known))


def _find_tokenizer(
    source: str | None, hint: str | None, named: str | None, notes: list[str]
) -> tuple[Tokenizer | None, str | None, bool]:
    """Return the tokenizer, its origin, and whether a tokenizer was named that could not be loaded."""
    source = _given(source)
    if source is not None:
        return Tokenizer.load(source), f"{source} (--tokenizer)", False
    failed = False
    sources = ((_given(hint), "tokenizer_dir of the model's config"), (_given(named), "named by the model's files"))
    for folder, origin in sources:
        if folder is None:
            continue
        if not _exists(folder) and (folder != named or not is_hub_name(folder)):
            notes.append(f"no tokenizer: {folder} ({origin}) is not on this machine")
            continue
        try:
            return Tokenizer.load(folder), f"{folder} ({origin})", False
        except ConfigurationError as error:
            # The operator did not configure this one, so the service works without it.
            notes.append(f"no tokenizer: {folder} ({origin}) is unusable: {error.message}")
            failed = True
    if not notes:
        notes.append("no tokenizer: --tokenizer is not given, and the model's config names none")
    return None, None, failed


def _find_templates(
    settings: ModelSettings, tokenizer: Tokenizer | None, notes: list[str]
) -> tuple[Templates, str | None]:
    """Return the templates and their origin."""
    if settings.history_template is not None:
        return {"default": HistoryTemplate(settings.history_template)}, "Liquid (history_template)"
    tokens = {} if tokenizer is None else tokenizer.special_tokens
    spec = _given(settings.chat_template)
    if spec is not None:
        if spec in NAMES:
            source = read_builtin(spec)
            name = spec
            origin = f"built-in {spec}"
        else:
            source, name, origin = _read_template(spec)
        return {"default": ChatTemplate(source, name=name, special_tokens=tokens)}, f"{origin} (--chat-template)"
    if tokenizer is None:
        notes.append("no chat template: there is no tokenizer, and --chat-template is not given")
        return {}, None
    if tokenizer.chat_templates:
        own: dict[str, PromptTemplate | ConfigurationError] = {}
        for name, source in tokenizer.chat_templates.items():
            try:
                own[name] = ChatTemplate(source, name=name, special_tokens=tokens)
            except ConfigurationError as error:
                # A broken template must not prevent the model's other uses.
                own[name] = error
                notes.append(error.message)
        return own, "the tokenizer's own"
    family = detected(_FAMILIES, tokenizer.has)
    if family is None:
        notes.append("no chat template: the tokenizer has none, and its special tokens are of no known family")
        return {}, None
    template = ChatTemplate(read_builtin(family.name), name=family.name, special_tokens=tokens)
    return {
        "default": template
    }, f"built-in {family.name} (the tokenizer has {family.has[0]} and no template of its own)"


def _read_template(spec: str) -> tuple[str, str, str]:
    """Return source, short name and origin of the template file *spec*."""
    try:
        path = Path(spec).expanduser()
        return path.read_text(encoding="utf-8"), path.name, spec
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"'{spec}' given by --chat-template is not a built-in template ({', '.join(NAMES)}), and not a "
            f"readable file: {error}"
        ) from error


def check_files(settings: Settings) -> None:
    """
    Raise :class:`ConfigurationError` if a tokenizer or template that *settings* name as a file cannot be used.

    A tokenizer has to be there, and a template has to compile. Blocks.
    """
    _check_files(settings.defaults)
    for name, model in settings.models.items():
        try:
            _check_files(model)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error.message}", detail=error.detail) from error


def _check_files(model: ModelDefaults) -> None:
    template = _given(model.chat_template)
    tokenizer = _given(model.tokenizer)
    if template is not None and template not in NAMES:
        source, name, _ = _read_template(template)
        check_template(source, name)
    # What the hub has turns out later: it may be unreachable for a while.
    if tokenizer is not None and (_exists(tokenizer) or not may_be_on_hub(tokenizer)):
        locate(tokenizer)
    recommended_sampling(model.generation_config, {}, [])


def _given(value: str | None) -> str | None:
    """Return *value* unless it is empty or an unfilled ``${placeholder}``, as TensorRT-LLM's configs hold them."""
    text = (value or "").strip()
    if not text or (text.startswith("${") and text.endswith("}")):
        return None
    return text


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False
