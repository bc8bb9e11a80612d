"""
What makes the prompts of one served model: its tokenizer, its chat template, and where both came from.

The template is the one that the operator names; else the tokenizer's own; else a built-in that the tokenizer's
special tokens call for without doubt. Nothing is guessed beyond that: a model without a template refuses chats with
an error that names the flags, and still completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from triton_openai.chat import builtin, history
from triton_openai.chat.continuation import Continuation
from triton_openai.chat.images import ImageMarks
from triton_openai.chat.messages import Message
from triton_openai.chat.prepare import prepare
from triton_openai.chat.template import ChatTemplate, PromptTemplate
from triton_openai.chat.tokenizer import Tokenizer
from triton_openai.errors import ConfigurationError, InvalidRequest

#: What a client's ``chat_template_kwargs`` may not replace.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# By name, those that work and those that are broken; and where they came from.
_Templates: TypeAlias = tuple[Mapping[str, PromptTemplate | ConfigurationError], str | None]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's tokenizer and template came from, in words for ``inspect``. For operators: it shows paths."""

    tokenizer: str | None
    chat_template: str | None
    #: Names of the templates that there are ("default", "tool_use", …).
    chat_template_names: list[str]
    #: What stands in the way, or was found wrong and passed over.
    notes: list[str]


class Prompter:
    """
    Makes the prompts of one served model. Immutable; safe in threads. Made by :meth:`resolve`.

    *tokenizer* is None where none is known; then nothing can be counted, but a named template still works.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        templates: Mapping[str, PromptTemplate | ConfigurationError],
        provenance: Provenance,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = MappingProxyType(dict(templates))
        self._provenance = provenance

    @classmethod
    def resolve(
        cls,
        *,
        tokenizer_source: str | None = None,
        template_spec: str | None = None,
        history_template: str | None = None,
        history_template_file: Path | None = None,
        hinted_tokenizer_dir: str | None = None,
        load: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> Prompter:
        """
        Find tokenizer and template. Blocks (disk, maybe network): call it in a thread.

        *tokenizer_source* is ``--tokenizer``; *template_spec* is ``--chat-template`` (a built-in's name or a file);
        *history_template* and *history_template_file* are the flags of those names, of which one at most is given;
        *hinted_tokenizer_dir* is the ``tokenizer_dir`` of Triton's config, used only where it exists on this machine
        and passed over where it is unusable. Raises :class:`ConfigurationError` when what the operator named cannot
        be used; a missing template is an error only once a chat is asked.
        """
        notes: list[str] = []
        tokenizer, tokenizer_origin = _find_tokenizer(tokenizer_source, hinted_tokenizer_dir, load, notes)
        templates, template_origin = _history(history_template, history_template_file) or _find_templates(
            template_spec, tokenizer, notes
        )
        provenance = Provenance(
            tokenizer=tokenizer_origin,
            chat_template=template_origin,
            chat_template_names=sorted(templates),
            notes=notes,
        )
        return cls(tokenizer=tokenizer, templates=templates, provenance=provenance)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, where one is known."""
        return self._tokenizer

    @property
    def provenance(self) -> Provenance:
        """Where tokenizer and template came from."""
        return self._provenance

    @property
    def can_chat(self) -> bool:
        """Whether there is any template that works."""
        return any(not isinstance(template, ConfigurationError) for template in self._templates.values())

    @property
    def template_variables(self) -> Mapping[str, str]:
        """The special tokens that templates are given."""
        return _special_tokens(self._tokenizer)

    def template_for(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> PromptTemplate:
        """
        Return the template for a chat with or without *tools* and *documents*.

        ``tool_use`` is taken for tools and ``rag`` for documents where the model has them, as ``transformers`` does
        for tools; else ``default``. Raises :class:`ConfigurationError`, naming the flags, where there is none.
        """
        wanted = [name for name, given in (("tool_use", tools), ("rag", documents)) if given]
        for name in (*wanted, "default"):
            template = self._templates.get(name)
            if isinstance(template, ConfigurationError):
                # A new one each time: an exception that is raised again grows its traceback.
                raise ConfigurationError(template.message, detail=template.detail)
            if template is not None:
                return template
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise ConfigurationError(
                f"The model's tokenizer has no default chat template (it has {names}): give one with --chat-template."
            )
        if self._tokenizer is None:
            raise ConfigurationError(
                "No chat template is known for this model: give its tokenizer with --tokenizer, or a template with "
                f"--chat-template (a file, or one of {', '.join(builtin.NAMES)})."
            )
        raise ConfigurationError(
            "The model's tokenizer has no chat template: give one with --chat-template (a file, or one of "
            f"{', '.join(builtin.NAMES)})."
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        images: ImageMarks | None = None,
    ) -> str:
        """
        Return the prompt for *messages*; *variables* are the client's ``chat_template_kwargs``, *images* says how the
        images in them are written (see :func:`images.marks`).

        With *continue_final_message* it ends where the last message's text does. Raises :class:`ConfigurationError`
        where the model has no usable template, :class:`InvalidRequest` for messages that are wrong or that the
        template does not accept, and for reserved *variables*.
        """
        template = self.template_for(tools=tools, documents=documents)
        continuation = Continuation() if continue_final_message else None
        prepared = prepare(messages, template, images)
        prompt = template.render(
            prepared if continuation is None else continuation.mark(prepared),
            **_variables(variables),
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=documents or None,
        )
        return prompt if continuation is None else continuation.cut(prompt)

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        images: ImageMarks | None = None,
    ) -> str:
        """Do :meth:`render` without holding the event loop for long messages. Raises the same."""
        template = self.template_for(tools=tools, documents=documents)
        continuation = Continuation() if continue_final_message else None
        prepared = prepare(messages, template, images)
        prompt = await template.render_async(
            prepared if continuation is None else continuation.mark(prepared),
            **_variables(variables),
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=documents or None,
        )
        return prompt if continuation is None else continuation.cut(prompt)

    def with_template(self, template: ChatTemplate) -> Prompter:
        """Return the same with *template* in place of the model's own ones."""
        return Prompter(tokenizer=self._tokenizer, templates={"default": template}, provenance=self._provenance)

    def starts_with_bos(self, prompt: str) -> bool:
        """Say whether *prompt* begins with the text of ``bos_token``, so that a backend would add a second one."""
        bos = self.template_variables.get("bos_token")
        return bool(bos) and prompt.startswith(bos or "")

    def strip_bos(self, prompt: str) -> str:
        """
        Return *prompt* without the ``bos_token`` that the template wrote.

        For backends whose preprocessing adds it (TensorRT-LLM's with ``add_special_tokens``, vLLM's always).
        """
        return prompt[len(self.template_variables["bos_token"]) :] if self.starts_with_bos(prompt) else prompt


def may_have_tokenizer(source: str | None, hint: str | None) -> bool:
    """Return whether :meth:`Prompter.resolve` would find a tokenizer, unless what is there turns out to be unusable."""
    known = _given(hint)
    return _given(source) is not None or (known is not None and _exists(known))


def _find_tokenizer(
    source: str | None, hint: str | None, load: Callable[[str], Tokenizer], notes: list[str]
) -> tuple[Tokenizer | None, str | None]:
    source = _given(source)
    if source is not None:
        return load(source), f"{source} (--tokenizer)"
    hint = _given(hint)
    if hint is None:
        notes.append("no tokenizer: --tokenizer is not given, and the model's config names none")
        return None, None
    if not _exists(hint):
        notes.append(f"no tokenizer: tokenizer_dir {hint} of the model's config is not on this machine")
        return None, None
    try:
        return load(hint), f"{hint} (tokenizer_dir of the model's config)"
    except ConfigurationError as error:
        # Nobody asked for this one by name, so the service goes on without it.
        notes.append(f"tokenizer_dir {hint} of the model's config is unusable: {error.message}")
        return None, None


def _history(text: str | None, file: Path | None) -> _Templates | None:
    found = history.load(text, file)
    return None if found is None else ({"default": found[0]}, found[1])


def _find_templates(spec: str | None, tokenizer: Tokenizer | None, notes: list[str]) -> _Templates:
    tokens = _special_tokens(tokenizer)
    spec = _given(spec)
    if spec is not None:
        if spec in builtin.NAMES:
            named = ChatTemplate(builtin.read(spec), name=spec, special_tokens=tokens)
            return {"default": named}, f"built-in {spec} (--chat-template)"
        source, name = _read_template(spec)
        return {"default": ChatTemplate(source, name=name, special_tokens=tokens)}, f"{spec} (--chat-template)"
    if tokenizer is None:
        notes.append("no chat template: there is no tokenizer, and --chat-template is not given")
        return {}, None
    if tokenizer.chat_templates:
        own = {name: _compile(source, name, tokens) for name, source in tokenizer.chat_templates.items()}
        notes.extend(broken.message for broken in own.values() if isinstance(broken, ConfigurationError))
        return own, "the tokenizer's own"
    recognised = builtin.recognise(tokenizer)
    if recognised is None:
        notes.append("no chat template: the tokenizer has none, and its special tokens are of no known family")
        return {}, None
    name, token = recognised
    found = ChatTemplate(builtin.read(name), name=name, special_tokens=tokens)
    return {"default": found}, f"built-in {name} (the tokenizer has {token} and no template of its own)"


def _compile(source: str, name: str, tokens: Mapping[str, str]) -> ChatTemplate | ConfigurationError:
    """Compile one of a tokenizer's own templates; a broken one must not take the model's other uses away."""
    try:
        return ChatTemplate(source, name=name, special_tokens=tokens)
    except ConfigurationError as error:
        return error


def _read_template(spec: str) -> tuple[str, str]:
    """Return source and short name of the template file *spec*."""
    path = Path(spec).expanduser()
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The chat template '{spec}' given by --chat-template is not UTF-8.") from error
    except (FileNotFoundError, ValueError) as error:
        raise ConfigurationError(
            f"'{spec}' given by --chat-template is neither a file nor a built-in template ({', '.join(builtin.NAMES)})."
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"The chat template '{spec}' given by --chat-template cannot be read: {error.strerror}."
        ) from error


def _given(value: str | None) -> str | None:
    """Return *value* unless it is empty or an unfilled ``${placeholder}``, as TensorRT-LLM's configs hold them."""
    text = (value or "").strip()
    return None if not text or (text.startswith("${") and text.endswith("}")) else text


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _special_tokens(tokenizer: Tokenizer | None) -> Mapping[str, str]:
    return {} if tokenizer is None else tokenizer.special_tokens


def _variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in variables or ():
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(
                f"'{name}' cannot be set through chat_template_kwargs.", param=f"chat_template_kwargs.{name}"
            )
    return dict(variables or {})
