"""The tokenizers and templates of the served models: found when they are needed, and anew when settings change."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import structlog

from triton_openai.config import Settings
from triton_openai.config.tree import ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.choose import Parsers, choose
from triton_openai.prompts.prompter import Prompter

_log = structlog.get_logger(__name__)

#: Longest time in seconds that anybody waits for a tokenizer and a template; loading them goes on all the same.
LOAD_SECONDS = 60.0
_NEEDS_TOKENIZER = "The model takes token ids: give its tokenizer with --tokenizer."


class LazyPrompter:
    """
    Tokenizer and template of a model, resolved on first use and in a thread: tokenizers are read from disk or
    fetched.
    """

    def __init__(self, settings: ModelSettings, hint: str | None, named: str | None = None) -> None:
        """*hint* is the ``tokenizer_dir`` of the model's config, *named* the tokenizer that its files name."""
        self._settings = settings
        self.hint = hint
        self.named = named
        self._task: asyncio.Task[Prompter] | None = None
        self._parsers: tuple[Prompter, Parsers] | None = None
        #: Set when :meth:`check` has ended for the first time.
        self.checked = asyncio.Event()
        #: What :meth:`check` found to stand in the way of chats.
        self.problem: ConfigurationError | None = None

    @property
    def known(self) -> bool:
        """Whether it has been resolved."""
        return (
            self._task is not None and self._task.done() and not self._task.cancelled() and not self._task.exception()
        )

    def fits(self, settings: ModelSettings, hint: str | None, named: str | None = None) -> bool:
        """Return whether it is what a model with *settings*, *hint* and *named* has."""
        return (self.hint, self.named) == (hint, named) and _prompting(self._settings) == _prompting(settings)

    async def get(self) -> Prompter:
        """
        Return it. Raises :class:`ConfigurationError` where what is configured cannot be used; the next call tries
        again.
        """
        task = self._task
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._task = asyncio.create_task(asyncio.to_thread(self._resolve))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                # Shielded: a client that leaves must not take the tokenizer from all others.
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise ConfigurationError(
                f"The model's tokenizer has not been loaded within {LOAD_SECONDS:g} seconds; loading goes on. If the "
                "Hugging Face hub is slow or cannot be reached, give --tokenizer a local folder.",
                retry_after=LOAD_SECONDS,
            ) from error

    @property
    def settled(self) -> bool:
        """Whether another :meth:`check` would find the same."""
        return self.checked.is_set() and self.known and not self._resolved().incomplete

    async def check(self, model: str, *, chats: bool, needs_tokenizer: bool) -> None:
        """
        Load what the *model* needs, and log a warning with the remedy where its requests would fail.

        *chats* is whether the model takes chats, *needs_tokenizer* whether it takes nothing but token ids. What failed
        before is tried again.
        """
        problem: ConfigurationError | None = None
        try:
            if self.known and self._resolved().incomplete:
                await self._resolve_again()
            prompter = await self.get()
            # In a thread: parsers are looked for in all installed packages, and a template is a program.
            await asyncio.to_thread(self._try, prompter, chats, needs_tokenizer)
        except ConfigurationError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - a third party's parser must not end the checks of all models
            _log.exception("tokenizer and template cannot be prepared", model=model)
            problem = ConfigurationError(f"Its tokenizer or template failed: {type(error).__name__}.")
        before, self.problem = self.problem, problem
        self.checked.set()
        if problem is None:
            if before is not None:
                _log.info("model can chat now" if chats else "model can be used now", model=model)
        elif before is None or before.message != problem.message:
            what = "model cannot chat" if chats else "model cannot be used"
            _log.warning(what, model=model, reason=problem.message, detail=problem.detail)

    def _try(self, prompter: Prompter, chats: bool, needs_tokenizer: bool) -> None:
        try:
            self.parsers(prompter)
            if needs_tokenizer and prompter.tokenizer is None:
                raise ConfigurationError(_NEEDS_TOKENIZER)
            if chats:
                prompter.check_chat()
        except ConfigurationError as error:
            # Where a tokenizer was looked for says more than that there is none.
            error.detail = error.detail or "; ".join(prompter.provenance.notes) or None
            raise

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

    def _resolved(self) -> Prompter:
        assert self._task is not None
        return self._task.result()

    async def _resolve_again(self) -> None:
        """Try again to find what is missing; requests go on with what there is."""
        task = asyncio.create_task(asyncio.to_thread(self._resolve))
        await asyncio.wait({task}, timeout=LOAD_SECONDS)
        if task.done() and task.exception() is None:
            self._task = task

    def _resolve(self) -> Prompter:
        return Prompter.resolve(
            tokenizer_source=self._settings.tokenizer,
            template_spec=self._settings.chat_template,
            history_template=self._settings.history_template,
            history_template_file=self._settings.history_template_file,
            hinted_tokenizer_dir=self.hint,
            generation_config=self._settings.generation_config,
            named_tokenizer=self.named,
        )


def _prompting(settings: ModelSettings) -> tuple[object, ...]:
    """Return what of *settings* decides how prompts are made and answers are read."""
    return (
        settings.tokenizer,
        settings.generation_config,
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

    def of(self, name: str, settings: ModelSettings, hint: str | None, named: str | None = None) -> LazyPrompter:
        """Return that of the model *name*: a new one where its *settings*, *hint* or *named* were others before."""
        known = self._known.get(name)
        if known is None or not known.fits(settings, hint, named):
            known = self._known[name] = LazyPrompter(settings, hint, named)
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
            same = old.fits(wanted, old.hint, old.named)
            if same and not (renew and old.known):
                continue
            new = LazyPrompter(wanted, old.hint, old.named)
            try:
                new.parsers(await new.get())
            except ConfigurationError as error:
                if not same:
                    raise ConfigurationError(f"{name}: {error.message}", detail=error.detail) from error
                _log.warning("tokenizer and template stay as they were", model=name, reason=error.message)
            else:
                fresh[name] = new
        return Prompters(fresh)
