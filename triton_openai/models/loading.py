"""Loads the tokenizer and the chat template of each served model, and the parsers that read its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import msgspec
import structlog

from triton_openai.adapters._common.base import Capabilities
from triton_openai.config.tree import ModelSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.parser_registry import Parsers, choose
from triton_openai.parsers.tools.format import ToolFormat, read_format, read_format_file
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer

_log = structlog.get_logger(__name__)

#: Longest wait in seconds for a tokenizer and a template; loading continues afterwards.
LOAD_SECONDS = 60.0


class CheckFailure(msgspec.Struct, frozen=True):
    """
    Why requests to a model would fail: the event for the log, the reason with its remedy, and what was searched.
    """

    event: str
    reason: str
    detail: str | None


def warn_of(failures: Mapping[str, CheckFailure]) -> None:
    """Log the *failures* of models by their names; models with the same failure share a line."""
    models: dict[CheckFailure, list[str]] = {}
    for model, failure in failures.items():
        models.setdefault(failure, []).append(model)
    for failure, names in models.items():
        fields: dict[str, Any] = {"model": names[0]} if len(names) == 1 else {"models": names}
        if failure.detail is not None:
            fields["detail"] = failure.detail
        _log.warning(failure.event, **fields, reason=failure.reason)


class LazyPrompter:
    """Prompter and parsers of a model, made on first use and in a thread: tokenizers are read from disk or fetched."""

    def __init__(self, settings: ModelSettings, hint: str | None, named: str | None = None) -> None:
        """*hint* and *named* are those of :meth:`Prompter.resolve`."""
        self._settings = settings
        self.hint = hint
        self.named = named
        #: The settings that determine prompts and parsers.
        self.key = _prompting(settings), hint, named
        #: The prompter, once it is resolved.
        self.resolved: Prompter | None = None
        #: What reads the answers to its prompts: parsers that the operator names, or that the chat template shows.
        self.parsers = Parsers()
        self._task: asyncio.Task[Prompter] | None = None
        #: Set when :meth:`check` has ended for the first time.
        self.checked = asyncio.Event()
        #: The reason why chats fail, found by :meth:`check`.
        self.problem: ConfigurationError | None = None

    async def get(self) -> Prompter:
        """Return the prompter. Raises :class:`ConfigurationError` if it cannot be loaded; the next call tries again."""
        if self.resolved is not None:
            return self.resolved
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._resolve())
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                # Shielded: a client that disconnects must not cancel the load for all others.
                return await asyncio.shield(self._task)
        except TimeoutError as error:
            raise ConfigurationError(
                f"The model's tokenizer has not been loaded within {LOAD_SECONDS:g} seconds; loading goes on. If the "
                "Hugging Face hub is slow or cannot be reached, give --tokenizer a local folder.",
                retry_after=LOAD_SECONDS,
            ) from error

    async def _resolve(self) -> Prompter:
        settings = self._settings
        prompter = await asyncio.to_thread(Prompter.resolve, settings, self.hint, self.named)
        tools = settings.tool_call_parser
        reasoning = settings.reasoning_parser
        self.parsers = await asyncio.to_thread(
            choose,
            prompter.tools_source,
            tools=tools,
            reasoning=reasoning,
            tool_format=await asyncio.to_thread(_tool_format, settings, prompter),
        )
        self.resolved = prompter
        return prompter

    @property
    def check_is_final(self) -> bool:
        """Whether another :meth:`check` would have the same result."""
        return self.checked.is_set() and self.resolved is not None and not self.resolved.incomplete

    async def check(self, model: str, *, chats: bool, capabilities: Capabilities) -> CheckFailure | None:
        """
        Load what the *model* needs, and return why its requests would fail, if that is new.

        *chats* is whether the model takes chats. Failed loads are tried again.
        """
        if needs_no_tokenizer(capabilities):
            self.checked.set()
            return None
        problem: ConfigurationError | None = None
        try:
            if self.resolved is not None and self.resolved.incomplete:
                # Requests still work without it.
                with contextlib.suppress(ConfigurationError, TimeoutError):
                    async with asyncio.timeout(LOAD_SECONDS):
                        await self._resolve()
            prompter = await self.get()
            _check_tokenizer(prompter.tokenizer, capabilities, model)
            if chats and (failure := prompter.template_for().failure) is not None:
                raise ConfigurationError(failure)
        except ConfigurationError as error:
            problem = error
            if self.resolved is not None:
                # The notes say where a tokenizer was searched.
                problem.detail = error.detail or "; ".join(self.resolved.provenance.notes) or None
        except Exception as error:  # noqa: BLE001 - a third party's parser must not end the checks of all models
            _log.exception("tokenizer and template cannot be prepared", model=model)
            problem = ConfigurationError(f"Its tokenizer or template failed: {type(error).__name__}.")
        before = self.problem
        self.problem = problem
        self.checked.set()
        if problem is None:
            if before is not None:
                _log.info("model can chat now" if chats else "model can be used now", model=model)
            return None
        if before is not None and before.message == problem.message:
            return None
        if chats:
            event = "model cannot chat"
        else:
            event = "model cannot be used"
        return CheckFailure(event, problem.message, problem.detail)


def needs_no_tokenizer(capabilities: Capabilities) -> bool:
    """Return whether a model takes or returns speech and texts, for which nothing is tokenized here."""
    speech = capabilities.recognition is not None or capabilities.synthesis is not None
    return speech and not capabilities.tokens


def tokenizer_problem(tokenizer: Tokenizer, capabilities: Capabilities) -> str | None:
    """Return why *tokenizer* is not the one of a model with these *capabilities*, if it is not."""
    for token in capabilities.tokenizer_has:
        if tokenizer.token_id(token) is None:
            return f"its tokenizer is another model's: it has no '{token}'"
    return None


def _check_tokenizer(tokenizer: Tokenizer | None, capabilities: Capabilities, model: str) -> None:
    """Raise :class:`ConfigurationError` if a model that takes only token ids has no *tokenizer* that fits."""
    if not capabilities.tokens:
        return
    if tokenizer is None:
        raise ConfigurationError("The model takes token ids: give its tokenizer with --tokenizer.")
    problem = tokenizer_problem(tokenizer, capabilities)
    if problem is not None:
        raise ConfigurationError(
            f"The model takes token ids, and {problem}. Give its own with --tokenizer {model}=SOURCE."
        )


_prompting = attrgetter(
    *("tokenizer", "generation_config", "chat_template", "history_template", "tool_call_parser", "reasoning_parser"),
    "tool_format",
)


def _tool_format(settings: ModelSettings, prompter: Prompter) -> ToolFormat | None:
    """Return the format of tool calls that the settings, or a file beside the tokenizer, describe. Blocks."""
    if settings.tool_format:
        return read_format(settings.tool_format, "tool_format")
    if prompter.tokenizer is not None and prompter.tokenizer.tool_format is not None:
        return read_format_file(prompter.tokenizer.tool_format)
    return None


class Prompters:
    """One :class:`LazyPrompter` for each Triton model that is served."""

    def __init__(self, known: Mapping[str, LazyPrompter] | None = None) -> None:
        self._known = dict(known or {})

    def of(self, name: str, settings: ModelSettings, hint: str | None, named: str | None = None) -> LazyPrompter:
        """Return that of the model *name*: a new one if its *settings*, *hint* or *named* have changed."""
        known = self._known.get(name)
        new = LazyPrompter(settings, hint, named)
        if known is None or known.key != new.key:
            self._known[name] = new
            return new
        return known

    def keep(self, names: Collection[str]) -> None:
        """Drop the prompters of all models but *names*: a model that comes back may have another tokenizer."""
        self._known = {name: known for name, known in self._known.items() if name in names}

    async def reloaded(self, settings: Settings, *, reload: bool) -> Prompters:
        """
        Return the prompters for *settings*, with new ones resolved.

        With *reload*, unchanged ones are resolved again too; one that then fails is kept as it was. Raises
        :class:`ConfigurationError` if a new one cannot be resolved.
        """
        fresh = dict(self._known)
        for name, old in self._known.items():
            new = LazyPrompter(settings.model(name), old.hint, old.named)
            same = new.key == old.key
            if same and not (reload and old.resolved is not None):
                continue
            try:
                await new.get()
            except ConfigurationError as error:
                if not same:
                    raise ConfigurationError(f"{name}: {error.message}", detail=error.detail) from error
                _log.warning("tokenizer and template stay as they were", model=name, reason=error.message)
            else:
                fresh[name] = new
        return Prompters(fresh)
