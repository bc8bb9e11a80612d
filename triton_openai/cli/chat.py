"""The command ``chat``: a chat in the terminal with any OpenAI-compatible service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from triton_openai.cli.endpoint import Endpoint, add_options, endpoint_of, pieces_of
from triton_openai.cli.parser import CommandParser, OwnCommand, count, number
from triton_openai.cli.terminal import shows_colours
from triton_openai.config.files import state_folder
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.load.events import Piece, error_of_body

_DIM = "\033[2m"
_RED = "\033[31m"
_PLAIN = "\033[0m"
_CUT_OFF = "The answer is incomplete: it has reached --max-tokens, or the longest answer of the model."
_MAX_HISTORY_LINES = 1000
_HELP = """\
/new            forget the conversation
/retry          ask the last question again
/system [TEXT]  set the system prompt, or remove it
/model [NAME]   ask another model, or show its name
/help           show this
/exit           end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""


def _add_options(parser: CommandParser) -> None:
    """Add the options of ``chat`` to its *parser*."""
    parser.add_argument(
        "message", metavar="MESSAGE", nargs="*", help="Ask this and end. (default: chat, or ask what is piped in)"
    )
    add_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="The system prompt.")
    parser.add_argument("--max-tokens", metavar="COUNT", type=count, help="Longest answer.")
    parser.add_argument("--temperature", metavar="NUMBER", type=number, help="How freely tokens are chosen.")
    parser.add_argument("--no-history", action="store_true", help="Keep no file of what is typed, for the arrow keys.")


def _run(options: Mapping[str, Any]) -> int:
    """Chat as the command line's *options* ask for. Return the exit status."""
    sampling = {name: options[name] for name in ("max_tokens", "temperature") if options[name] is not None}
    endpoint = endpoint_of(options["url"], os.environ)
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal may lack characters of an answer.
        sys.stdout.reconfigure(errors="replace")
    with asyncio.Runner() as runner:
        chat = runner.run(Chat.open(endpoint, options["model"], sampling))
        chat.system = options["system"] or ""
        try:
            if options["message"]:
                runner.run(chat.ask(" ".join(options["message"])))
            elif not sys.stdin.isatty():
                runner.run(chat.ask(_piped()))
            else:
                _converse(runner, chat, keeps_history=not options["no_history"])
        finally:
            runner.run(chat.close())
    return 0


class Answer:
    """Writes an answer to a stream as it arrives: its thinking dim, then its text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._colours = shows_colours(stream)
        self._thinks = False
        #: What goes into the conversation.
        self.text = ""
        #: Whether a limit of tokens ended it.
        self.cut_off = False
        self._ends_line = True

    def add(self, piece: Piece) -> None:
        """Show *piece*. Thinking goes to terminals only: what is piped on gets the answer itself."""
        if piece.reasoning and self._is_terminal:
            self._begin_thinking()
            self._write(piece.reasoning)
        shown = piece.text + piece.calls
        if shown:
            self._end_thinking()
            self._write(shown)
        self.text += piece.text
        self.cut_off = self.cut_off or piece.cut_off

    def end(self) -> None:
        """End the line, and what is dim."""
        self._end_thinking()
        if not self._ends_line:
            self._write("\n")

    def _begin_thinking(self) -> None:
        if not self._thinks:
            self._thinks = True
            if self._colours:
                self._stream.write(_DIM)

    def _end_thinking(self) -> None:
        if self._thinks:
            self._thinks = False
            if self._colours:
                self._stream.write(_PLAIN)
            self._write("\n\n")

    def _write(self, text: str) -> None:
        if self._is_terminal:
            # A model must not control the terminal.
            text = "".join([c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text])
        self._stream.write(text)
        self._stream.flush()
        self._ends_line = text.endswith("\n")


class Chat:
    """A conversation with a model."""

    def __init__(
        self, endpoint: Endpoint, session: aiohttp.ClientSession, model: str, sampling: Mapping[str, Any]
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        #: The system prompt; empty for none.
        self.system = ""
        #: Questions and answers.
        self.messages: list[dict[str, str]] = []
        #: The last question, also of an answer that failed.
        self.question = ""
        self._session = session
        self._sampling = sampling

    @classmethod
    async def open(cls, endpoint: Endpoint, model: str | None, sampling: Mapping[str, Any]) -> Chat:
        """Return a chat with *model*, or with the first model of the service. Raises :class:`ServiceError`."""
        session = endpoint.session()
        try:
            return cls(endpoint, session, await endpoint.model(session, model), sampling)
        except BaseException:
            await session.close()
            raise

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()

    async def ask(self, question: str) -> None:
        """
        Ask *question*, and write the answer to standard output.

        A part of an answer that was stopped stays in the conversation. Raises :class:`ServiceError`.
        """
        self.question = question
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = Answer(sys.stdout)
        try:
            await self._stream(asked, answer)
        finally:
            answer.end()
            if answer.text:
                self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.cut_off:
            # Not a part of the answer, which may be piped on.
            print(_CUT_OFF, file=sys.stderr)

    async def _stream(self, messages: list[dict[str, str]], answer: Answer) -> None:
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        body = {"model": self.model, "messages": messages, "stream": True, **self._sampling}
        try:
            async with self.endpoint.post(self._session, "chat/completions", body) as response:
                if response.status != 200:
                    raise self.endpoint.refusal_error(response.status, await response.read())
                if response.content_type == "application/json":
                    raise ValueError(f"it is no stream but: {error_of_body(await response.read())}")
                async for piece in pieces_of(response.content):
                    answer.add(piece)
        except ValueError as error:
            raise ServiceError(f"The answer failed: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if answer.text:
                raise ServiceError(f"The answer is cut off: {str(error) or type(error).__name__}.") from error
            raise self.endpoint.unreachable_error(error) from error

    def forget(self) -> None:
        """Begin a new conversation."""
        self.messages = []
        self.question = ""

    def take_back(self) -> str:
        """Return the last question, and remove it and its answer from the conversation."""
        if self.messages and self.messages[-2]["content"] == self.question:
            self.messages = self.messages[:-2]
        return self.question


def _converse(runner: asyncio.Runner, chat: Chat, *, keeps_history: bool) -> None:
    """Ask what the user types, until the end of the input."""
    print(f"{chat.model} at {chat.endpoint.url}. /help lists the commands, Ctrl-D ends.")
    with _line_editing(keeps_history):
        while True:
            try:
                text = _typed()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            if text in ("/exit", "/quit", "/bye"):
                return
            question = _command(chat, text)
            if not question:
                continue
            try:
                stopped = runner.run(_is_stopped(chat.ask(question)))
            except KeyboardInterrupt:
                stopped = True
            except ServiceError as error:
                print(_coloured(error.message, _RED))
                continue
            if stopped:
                print(_coloured("Stopped.", _DIM))


async def _is_stopped(answer: Coroutine[Any, Any, None]) -> bool:
    """
    Write *answer* to its end, or until Ctrl-C, and return whether that has stopped it.

    Python's own handler does not wake an event loop that is about to wait, so Ctrl-C could have no effect.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(answer)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if task.cancelled():
        return True
    task.result()
    return False


def _command(chat: Chat, text: str) -> str:
    """Do what *text* asks for if it is a command; return the question to ask, if any."""
    if not text.startswith("/"):
        return text
    word, _, argument = text.partition(" ")
    argument = argument.strip()
    question = ""
    match word:
        case "/retry":
            question = chat.take_back()
            if not question:
                print("There is no question to ask again.")
        case "/new":
            chat.forget()
            print("A new conversation begins.")
        case "/system" if argument:
            chat.system = argument
            print("The system prompt is set.")
        case "/system":
            chat.system = ""
            print("There is no system prompt now.")
        case "/model":
            chat.model = argument or chat.model
            print(f"The model is {chat.model}.")
        case "/help" | "/?":
            print(_HELP)
        case _ if "/" in word[1:] or word == "/":
            # Such as a path in a question.
            question = text
        case _:
            print(f"There is no command {word}. /help lists them.")
    return question


def _piped() -> str:
    """Return what stands on standard input. Raises :class:`ConfigurationError` if that is nothing."""
    text = sys.stdin.read().strip()
    if not text:
        raise ConfigurationError("Standard input is empty: there is nothing to ask.")
    return text


def _typed() -> str:
    """Return what the user types, without the backslashes that join its lines."""
    lines = []
    prompt = "> "
    while True:
        line = input(prompt)
        if not line.endswith("\\"):
            lines.append(line)
            return "\n".join(lines).strip()
        lines.append(line[:-1])
        prompt = ". "


@contextlib.contextmanager
def _line_editing(keeps_history: bool) -> Iterator[None]:
    """Edit lines with readline where Python has it, and remember them in a file that only the user can read."""
    try:
        import readline  # a Python may be built without it
    except ImportError:
        yield
        return
    file = state_folder() / "chat_history"
    if keeps_history:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
    try:
        yield
    finally:
        if keeps_history:
            with contextlib.suppress(OSError):
                _create_private(file)
                readline.set_history_length(_MAX_HISTORY_LINES)
                readline.write_history_file(file)


def _create_private(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))


def _coloured(text: str, colour: str) -> str:
    if shows_colours(sys.stdout):
        return f"{colour}{text}{_PLAIN}"
    return text


CHAT = OwnCommand("chat", "Chat in the terminal with any OpenAI-compatible service.", _add_options, _run)
