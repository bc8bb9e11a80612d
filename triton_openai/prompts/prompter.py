"""
What makes the prompts of one served model: its tokenizer, its chat template, and where both came from.

The template is the one that the operator names; else the tokenizer's own; else a built-in that the tokenizer's
special tokens call for without doubt. Nothing is guessed beyond that: a model without a template refuses chats with
an error that names the flags, and still completes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.prompts import history, offload
from triton_openai.prompts.generation_config import recommended_sampling
from triton_openai.prompts.messages import PLAIN, Continuation, Message, Rendering, prepare
from triton_openai.prompts.template import ChatTemplate, PromptTemplate
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.tokenizer_files import is_hub_name


class _Family(msgspec.Struct, frozen=True):
    """Tokens that show which format a model was trained on."""

    template: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


#: Only what leaves no doubt. ``[INST]`` as a token exists since Mistral's third format; the later ones, which the
#: built-in template does not write, differ by having ``[SYSTEM_PROMPT]`` or a byte-level vocabulary ("Ġ", Tekken).
_FAMILIES = (
    _Family("llama3", has=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    _Family("chatml", has=("<|im_start|>", "<|im_end|>")),
    _Family("gemma", has=("<start_of_turn>", "<end_of_turn>")),
    _Family("mistral", has=("[INST]", "[/INST]"), lacks=("[SYSTEM_PROMPT]", "Ġ")),
)

#: Every built-in; ``plain`` belongs to no family and is taken by name only.
NAMES = (*(family.template for family in _FAMILIES), "plain")


def read(name: str) -> str:
    """Return the source of the built-in template *name* (one of :data:`NAMES`)."""
    return (files("triton_openai.templates") / f"{name}.jinja").read_text(encoding="utf-8")


def recognise(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the built-in that *tokenizer*'s special tokens call for, with the token that shows it; else None."""
    for family in _FAMILIES:
        if all(tokenizer.token_id(token) is not None for token in family.has) and all(
            tokenizer.token_id(token) is None for token in family.lacks
        ):
            return family.template, family.has[0]
    return None


#: Messages heavier than this are rendered in a thread. A character counts one, and each item (a message is one, each of
#: its fields another) as many as ITEM_WEIGHT: measured with the built-in templates, a message costs 3 to 24 µs, for it
#: is a round of the template's loop, and a character 1 to 3 ns. So what runs on the event loop holds it for about 1 ms.
#: Rendering is Python: the thread shares the interpreter lock, but lets the event loop take its turn every 5 ms.
INLINE_WEIGHT = 100_000
ITEM_WEIGHT = 500

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
    #: Where :attr:`Prompter.recommended` came from; None where nothing is recommended.
    generation_config: str | None = None


class Prompter:
    """
    Makes the prompts of one served model. Immutable; safe in threads. Made by :meth:`resolve`.

    *tokenizer* is None where none is known; then nothing can be counted, but a named template still works. *foreign* is
    whether the templates came in a request.
    *incomplete* is whether one is named by the model's config or files and could not be loaded: another try may help.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        templates: Mapping[str, PromptTemplate | ConfigurationError],
        provenance: Provenance,
        recommended: Mapping[str, Any] = MappingProxyType({}),
        foreign: bool = False,
        incomplete: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._recommended = recommended
        self._foreign = foreign
        self._templates = MappingProxyType(dict(templates))
        self._provenance = provenance
        self.incomplete = incomplete

    @classmethod
    def resolve(
        cls,
        *,
        tokenizer_source: str | None = None,
        template_spec: str | None = None,
        history_template: str | None = None,
        history_template_file: Path | None = None,
        hinted_tokenizer_dir: str | None = None,
        named_tokenizer: str | None = None,
        generation_config: str | None = None,
        load: Callable[[str], Tokenizer] = Tokenizer.load,
    ) -> Prompter:
        """
        Find tokenizer and template. Blocks (disk, maybe network): call it in a thread.

        *tokenizer_source* is ``--tokenizer``; *template_spec* is ``--chat-template`` (a built-in's name or a file);
        *history_template* and *history_template_file* are the flags of those names, of which one at most is given;
        *hinted_tokenizer_dir* is the ``tokenizer_dir`` of Triton's config, used only where it exists on this machine;
        *named_tokenizer* is the folder or the hub's name that the model's own files give. Both are passed over where
        they are unusable. *generation_config* is ``generation_config``. Raises :class:`ConfigurationError` when what
        the operator named cannot be used; a missing template is an error only once a chat is asked.
        """
        notes: list[str] = []
        tokenizer, tokenizer_origin, incomplete = _find_tokenizer(
            tokenizer_source, hinted_tokenizer_dir, named_tokenizer, load, notes
        )
        templates, template_origin = _history(history_template, history_template_file) or _find_templates(
            template_spec, tokenizer, notes
        )
        recommended, generation_origin = recommended_sampling(generation_config, tokenizer, notes)
        provenance = Provenance(
            tokenizer=tokenizer_origin,
            chat_template=template_origin,
            chat_template_names=sorted(templates),
            notes=notes,
            generation_config=generation_origin,
        )
        return cls(
            tokenizer=tokenizer,
            templates=templates,
            provenance=provenance,
            recommended=recommended,
            incomplete=incomplete,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, where one is known."""
        return self._tokenizer

    @property
    def provenance(self) -> Provenance:
        """Where tokenizer and template came from."""
        return self._provenance

    @property
    def recommended(self) -> Mapping[str, Any]:
        """The sampling that the model's ``generation_config.json`` recommends, under the names of a request."""
        return self._recommended

    @property
    def can_chat(self) -> bool:
        """Whether there is any template that works."""
        return any(not isinstance(template, ConfigurationError) for template in self._templates.values())

    @property
    def template_variables(self) -> Mapping[str, str]:
        """The special tokens that templates are given."""
        return _special_tokens(self._tokenizer)

    def template_for(self, rendering: Rendering = PLAIN) -> PromptTemplate:
        """
        Return the template for *rendering*.

        A model's ``tool_use`` template serves chats with tools and its ``rag`` template those with documents, as in
        ``transformers``; ``default`` serves the rest. Raises :class:`ConfigurationError`, naming the flags, where
        there is none.
        """
        wanted = [name for name, given in (("tool_use", rendering.tools), ("rag", rendering.documents)) if given]
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
                f"--chat-template (a file, or one of {', '.join(NAMES)})."
            )
        raise ConfigurationError(
            "The model's tokenizer has no chat template: give one with --chat-template (a file, or one of "
            f"{', '.join(NAMES)})."
        )

    def check_chat(self) -> None:
        """Raise :class:`ConfigurationError`, naming the flags, unless a plain chat becomes a prompt."""
        failure = self.template_for().failure
        if failure is not None:
            raise ConfigurationError(failure)

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN) -> str:
        """
        Return the prompt for *messages*.

        Raises :class:`ConfigurationError` where the model has no usable template, and :class:`InvalidRequest` for
        wrong messages, for messages that the template does not accept, and for reserved variables.
        """
        for name in rendering.variables:
            if name in RESERVED_VARIABLES:
                raise InvalidRequest(
                    f"'{name}' cannot be set through chat_template_kwargs.", param=f"chat_template_kwargs.{name}"
                )
        template = self.template_for(rendering)
        prepared = prepare(messages, template, rendering.images)
        with contextlib.nullcontext() if self._foreign else _blaming(template):
            if not rendering.continue_final_message:
                return template.render(prepared, rendering)
            continuation = Continuation()
            return continuation.cut(template.render(continuation.mark(prepared), rendering))

    async def render_async(self, messages: Sequence[Message], rendering: Rendering = PLAIN) -> str:
        """Do :meth:`render`, in a thread where there is much to render. Raises the same."""
        given = [list(messages), list(rendering.tools or ()), list(rendering.documents or ()), rendering.variables]
        return await offload.run(
            lambda: self.render(messages, rendering),
            size=offload.weigh(given, INLINE_WEIGHT, per_item=ITEM_WEIGHT),
            # The cost of a client's own template is unknown, even for few messages.
            threshold=-1 if self._foreign else INLINE_WEIGHT,
        )

    def with_template(self, template: ChatTemplate) -> Prompter:
        """Return the same with *template*, which came in a request, in place of the model's own ones."""
        return Prompter(
            tokenizer=self._tokenizer,
            templates={"default": template},
            provenance=self._provenance,
            recommended=self._recommended,
            foreign=True,
        )

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


@contextlib.contextmanager
def _blaming(template: PromptTemplate) -> Iterator[None]:
    """Blame the operator, and not the client, for a *template* that fails on every message."""
    try:
        yield
    except InvalidRequest as error:
        if error.detail is None or template.failure is None:
            raise
        raise ConfigurationError(template.failure, detail=error.detail) from error


def _find_tokenizer(
    source: str | None, hint: str | None, named: str | None, load: Callable[[str], Tokenizer], notes: list[str]
) -> tuple[Tokenizer | None, str | None, bool]:
    """Return the tokenizer, where it comes from, and whether one was named that could not be loaded."""
    source = _given(source)
    if source is not None:
        return load(source), f"{source} (--tokenizer)", False
    failed = False
    places = (_given(hint), "tokenizer_dir of the model's config"), (_given(named), "named by the model's files")
    for found, place in places:
        if found is None:
            continue
        if not _exists(found) and (found != named or not is_hub_name(found)):
            notes.append(f"no tokenizer: {found} ({place}) is not on this machine")
            continue
        try:
            return load(found), f"{found} ({place})", False
        except ConfigurationError as error:
            # Nobody asked the service for this one, so it goes on without.
            notes.append(f"no tokenizer: {found} ({place}) is unusable: {error.message}")
            failed = True
    if not notes:
        notes.append("no tokenizer: --tokenizer is not given, and the model's config names none")
    return None, None, failed


def _history(text: str | None, file: Path | None) -> _Templates | None:
    found = history.load(text, file)
    return None if found is None else ({"default": found[0]}, found[1])


def _find_templates(spec: str | None, tokenizer: Tokenizer | None, notes: list[str]) -> _Templates:
    tokens = _special_tokens(tokenizer)
    spec = _given(spec)
    if spec is not None:
        if spec in NAMES:
            named = ChatTemplate(read(spec), name=spec, special_tokens=tokens)
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
    recognised = recognise(tokenizer)
    if recognised is None:
        notes.append("no chat template: the tokenizer has none, and its special tokens are of no known family")
        return {}, None
    name, token = recognised
    found = ChatTemplate(read(name), name=name, special_tokens=tokens)
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
            f"'{spec}' given by --chat-template is neither a file nor a built-in template ({', '.join(NAMES)})."
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
