"""The tokenizers and templates of the served models: found when they are needed, and anew when settings change."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import structlog

from triton_openai.chat.parsers import Parsers, choose
from triton_openai.chat.prompts import Prompter
from triton_openai.config import Settings
from triton_openai.config.tree import ModelSettings
from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)


class LazyPrompter:
    """
    Tokenizer and template of a model, resolved on first use and in a thread: tokenizers are read from disk or
    fetched.
    """

    def __init__(self, settings: ModelSettings, hinted_tokenizer_dir: str | None) -> None:
        self._settings = settings
        self.hint = hinted_tokenizer_dir
        self._task: asyncio.Task[Prompter] | None = None
        self._parsers: tuple[Prompter, Parsers] | None = None

    @property
    def known(self) -> bool:
        """Whether it has been resolved."""
        return (
            self._task is not None and self._task.done() and not self._task.cancelled() and not self._task.exception()
        )

    def fits(self, settings: ModelSettings, hint: str | None) -> bool:
        """Return whether it is what a model with *settings* and *hint* has."""
        return self.hint == hint and _prompting(self._settings) == _prompting(settings)

    async def get(self) -> Prompter:
        """
        Return it. Raises :class:`ConfigurationError` where what is configured cannot be used; the next call tries
        again.
        """
        task = self._task
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._task = asyncio.create_task(asyncio.to_thread(self._resolve))
        # Shielded: a client that leaves must not take the tokenizer from all others.
        return await asyncio.shield(task)

    def parsers(self, prompter: Prompter) -> Parsers:
        """
        Return what reads the answers to *prompter*'s prompts. Raises :class:`ConfigurationError` for unknown names.

        Chosen once: finding a parser by name looks through all installed packages.
        """
        if self._parsers is None or self._parsers[0] is not prompter:
            settings = self._settings
            chosen = choose(prompter, tools=settings.tool_call_parser, reasoning=settings.reasoning_parser)
            self._parsers = prompter, chosen
        return self._parsers[1]

    def _resolve(self) -> Prompter:
        return Prompter.resolve(
            tokenizer_source=self._settings.tokenizer,
            template_spec=self._settings.chat_template,
            history_template=self._settings.history_template,
            history_template_file=self._settings.history_template_file,
            hinted_tokenizer_dir=self.hint,
        )


def _prompting(settings: ModelSettings) -> tuple[object, ...]:
    """Return what of *settings* decides how prompts are made and answers are read."""
    return (
        settings.tokenizer,
        settings.chat_template,
        settings.history_template,
        settings.history_template_file,
        settings.tool_call_parser,
        settings.reasoning_parser,
    )


class Prompters:
    """One :class:`LazyPrompter` for each Triton model that is served."""

    def __init__(self, known: Mapping[str, LazyPrompter] | None = None) -> None:
        self._known = dict(known or {})

    def of(self, name: str, settings: ModelSettings, hint: str | None) -> LazyPrompter:
        """Return that of the model *name*: a new one where its *settings* or its config's *hint* were others before."""
        known = self._known.get(name)
        if known is None or not known.fits(settings, hint):
            known = self._known[name] = LazyPrompter(settings, hint)
        return known

    def keep(self, names: Collection[str]) -> None:
        """Forget those of other models than *names*: a model that comes back may have another tokenizer."""
        self._known = {name: known for name, known in self._known.items() if name in names}

    async def renewed(self, settings: Settings, *, renew: bool) -> Prompters:
        """
        Return what is right for *settings*, resolved where it is new.

        When asked to *renew*, what was resolved before and stays is resolved again; where that fails it stays as it
        was. Raises :class:`ConfigurationError` for what *settings* change and cannot be used.
        """
        fresh = dict(self._known)
        for name, old in self._known.items():
            wanted = settings.model(name)
            same = old.fits(wanted, old.hint)
            if same and not (renew and old.known):
                continue
            new = LazyPrompter(wanted, old.hint)
            try:
                new.parsers(await new.get())
            except ConfigurationError as error:
                if not same:
                    raise ConfigurationError(f"{name}: {error.message}", detail=error.detail) from error
                _log.warning("tokenizer and template stay as they were", model=name, reason=error.message)
            else:
                fresh[name] = new
        return Prompters(fresh)
