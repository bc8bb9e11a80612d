"""The limits of an answer's time and tokens: the operator's, the client's, and the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from triton_openai.config.tree import TritonSettings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest
from triton_openai.prompts.tokenizer import Tokenizer

_HEADERS = {"first_token": "x-first-token-timeout", "idle": "x-idle-timeout", "total": "x-request-timeout"}
# The time that remains for a request that has waited until its limit.
_MIN_SECONDS = 0.001


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    Seconds until the first token, between two tokens, and for the whole answer (``None``: no limit). The wait for
    admission counts.

    Clients give theirs in headers.
    """

    first_token: float
    idle: float
    total: float | None
    #: Whether the time of each token counts: the client limits it, or the answer is stored as it comes.
    times_tokens: bool = False

    @classmethod
    def of(cls, settings: TritonSettings, headers: Mapping[str, str], *, stream: bool) -> TimeLimits:
        """Return the limits of a request; a *stream* has another total. Raises :class:`InvalidRequest`."""
        if stream:
            total = settings.stream_timeout
        else:
            total = settings.request_timeout
        limits = cls(first_token=settings.first_token_timeout, idle=settings.idle_timeout, total=total)
        for name, header in _HEADERS.items():
            if header in headers:
                seconds = _seconds(header, headers[header], getattr(limits, name))
                times_tokens = limits.times_tokens or name != "total"
                limits = replace(limits, times_tokens=times_tokens, **{name: seconds})
        return limits

    @property
    def patience(self) -> float:
        """The longest time that a request may wait for admission."""
        if self.total is None:
            return self.first_token
        return min(self.first_token, self.total)

    def after(self, seconds: float) -> TimeLimits:
        """Return the limits that remain after a wait of *seconds*, less than :attr:`patience`."""
        if self.total is None:
            total = None
        else:
            total = max(self.total - seconds, _MIN_SECONDS)
        first_token = max(self.first_token - seconds, _MIN_SECONDS)
        return replace(self, first_token=first_token, total=total)


def _seconds(header: str, value: str, allowed: float | None) -> float:
    """Return the seconds in the *value* of *header*, at most *allowed*. Raises :class:`InvalidRequest`."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"The header '{header}' must be a number of seconds greater than 0.", param=header)
    if seconds > (allowed or math.inf):
        raise InvalidRequest(
            f"The header '{header}' asks for {seconds:g} seconds; this service allows {allowed:g} at most.",
            param=header,
        )
    return seconds


class TokenLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of an answer's tokens, made once for a request."""

    #: The tokens that the answer may have: what the client, the operator or the model's authors say, else a default.
    tokens: int
    #: Whether the answer may have fewer tokens if the context is too short. If not, the request is refused then.
    open: bool = False
    #: Whether no limit was set: ``tokens`` applies only if the length of the context is not known.
    unbounded: bool = False
    #: What the client asked for, and its name for that.
    asked: int | None = None
    param: str = "max_tokens"
    #: The tokens that prompt and answer can have together, where that is known.
    context: int | None = None
    #: The tokens that no prompt can exceed, where that is known.
    longest_prompt: int | None = None

    def room_for_prompt(self) -> int | None:
        """
        Return the most tokens of a prompt, before the answer or before one token of an open answer, if that is known.

        Raises :class:`ContextLengthExceeded` if the answer leaves none.
        """
        if self.context is None:
            return None
        if self.open:
            return self.context - 1
        room = self.context - self.tokens
        if room <= 0:
            asked = f"'{self.param}' asks for {self.tokens} tokens in the completion"
            raise too_many_tokens_error(self.context, asked, param=self.param)
        return room

    def max_tokens_for(self, prompt: int) -> int:
        """
        Return the tokens that the answer to a prompt of *prompt* tokens may have.

        Raises :class:`ContextLengthExceeded` for a prompt, or prompt and answer together, that do not fit.
        """
        if self.longest_prompt is not None and (prompt > self.longest_prompt or prompt == self.context):
            raise too_many_tokens_error(self.longest_prompt, f"your prompt has {prompt} tokens", tokens=prompt)
        if self.context is None:
            return self.tokens
        room = self.context - prompt
        if self.open:
            if self.unbounded:
                return room
            return min(self.tokens, room)
        if self.tokens > room:
            asked = f"{prompt + self.tokens} tokens ({prompt} in the prompt, {self.tokens} in the completion)"
            raise too_many_tokens_error(self.context, f"you requested {asked}")
        return self.tokens

    def effective(self, sent: int, prompt: int | None) -> int:
        """
        Return the number of tokens at which a backend ends an answer.

        *sent* is the limit in the request, *prompt* the tokens of the prompt, as far as they are known.
        """
        if self.context is None or prompt is None:
            return sent
        return min(sent, self.context - prompt)


def too_many_tokens_error(
    limit: int, problem: str, *, tokens: int | None = None, param: str | None = None
) -> ContextLengthExceeded:
    """Return the error, in OpenAI's words, for a request with more than *limit* tokens; *problem* is what has them."""
    message = f"This model's maximum context length is {limit} tokens. However, {problem}."
    return ContextLengthExceeded(message, tokens=tokens, limit=limit, param=param)


def check_size(text: str, tokenizer: Tokenizer, limit: int | None) -> None:
    """
    Raise :class:`ContextLengthExceeded` for a *text* with more bytes than *limit* of the longest tokens have.

    Such a text takes long to tokenize, and cannot fit.
    """
    longest = tokenizer.pieces.longest
    if longest is None or limit is None or len(text) * 4 <= limit * longest:
        return
    size = utf8_size(text)
    if size > limit * longest:
        problem = f"your prompt has {size} bytes, more than that many tokens can hold"
        # There are no fewer tokens.
        raise too_many_tokens_error(limit, problem, tokens=-(-size // longest))


def utf8_size(text: str) -> int:
    """Return the number of bytes of *text*. Lone surrogates count too; they are refused elsewhere."""
    return len(text.encode(errors="surrogatepass"))
