"""The stages that process an answer's text, tokens and log probabilities where the backend does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from triton_openai.adapters._common.base import Capabilities, Decoder
from triton_openai.answer.thinking_budget import ThinkingStage
from triton_openai.generation import Alternative, AnswerState, Delta, FinishReason, Generation, TokenLogprob, Vocabulary
from triton_openai.prompts.detokenizer import TokenPieces, detokenizer
from triton_openai.prompts.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TokenNames:
    """
    Adds the names of tokens to log probabilities that have ids. A part of a character shows as U+FFFD, with its bytes.

    *skip_special_tokens* is whether the answer's text omits special tokens.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skipped = pieces.skipped_ids(skip_special_tokens)

    def feed(self, delta: Delta) -> None:
        """Name the tokens of the log probabilities in *delta*."""
        if delta.logprobs:
            delta.logprobs = [self.named(entry) for entry in delta.logprobs]

    def named(self, entry: TokenLogprob) -> TokenLogprob:
        """Return *entry* with its names; unchanged without an id, or if the backend names another token."""
        if entry.id is None:
            return entry
        token, raw = self._name(entry.id, entry.token, entry.raw)
        top = tuple([self._alternative(item) for item in entry.top])
        return msgspec.structs.replace(entry, token=token, raw=raw, top=top, hidden=entry.id in self._skipped)

    def _alternative(self, item: Alternative) -> Alternative:
        if item.id is None:
            return item
        token, raw = self._name(item.id, item.token, item.raw)
        return Alternative(token, item.logprob, raw, item.id)

    def _name(self, number: int, reported: str, reported_raw: bytes | None) -> tuple[str, bytes | None]:
        raw = self._pieces.raw(number)
        if raw is None:
            if reported:
                return (reported, reported_raw)
            return (self._pieces.decode([number], False), None)
        token = raw.decode("utf-8", "replace")
        if reported and not _same(reported, token):
            # The configured tokenizer is not the backend's: the backend names another token.
            return reported, reported_raw
        return token, raw


def _same(reported: str, ours: str) -> bool:
    """Return whether a backend's name, decoded alone, can be that of our token: spaces and parts may differ."""
    if _REPLACEMENT in reported:
        return _REPLACEMENT in ours
    return reported.strip() == ours.strip()


class TokenText:
    """
    Sets the text of deltas from their token ids. Has one stream's state.

    The answer ends before the first end-of-text id of *vocabulary*, or before a stop token id after ``min_tokens``
    tokens. Then ``stopped`` is true, and ``stop_id`` is the stop token id. The id is neither shown nor counted.
    """

    def __init__(self, pieces: TokenPieces, generation: Generation, vocabulary: Vocabulary) -> None:
        sampling = generation.sampling
        skips_special = sampling.skip_special_tokens is not False
        self._names = TokenNames(pieces, skip_special_tokens=skips_special)
        self._text = detokenizer(pieces, context=generation.prompt_ids or (), skip_special_tokens=skips_special)
        self._ends = frozenset[int]()
        if not sampling.ignore_eos:
            self._ends = frozenset(vocabulary.end_ids)
        self._stops = frozenset(sampling.stop_token_ids)
        self._any = self._ends | self._stops
        self._min_tokens = sampling.min_tokens or 0
        self._count = 0
        self.stopped = False
        self.stop_id: int | None = None

    def feed(self, delta: Delta) -> None:
        """Set the text of *delta*, and cut it before the id that ends the answer."""
        if self.stopped:
            delta.token_ids = ()
            delta.logprobs = ()
            delta.tokens = 0
            return
        ids = delta.token_ids
        if not self._any.isdisjoint(ids):
            ids = self._cut(delta)
        self._count += len(ids)
        delta.text = self._text.feed(ids)
        self._names.feed(delta)

    def flush(self) -> str:
        """Return the delayed text."""
        return self._text.flush()

    def _cut(self, delta: Delta) -> Sequence[int]:
        ids = delta.token_ids
        for index, number in enumerate(ids):
            if number in self._ends or (number in self._stops and self._count + index >= self._min_tokens):
                self.stopped = True
                if number in self._ends:
                    self.stop_id = None
                else:
                    self.stop_id = number
                delta.token_ids = ids = ids[:index]
                delta.logprobs = delta.logprobs[:index]
                delta.tokens = index
                break
        return ids


class EngineEndedText(TokenText):
    """
    Sets the text of deltas from their token ids, where the engine ends the answer by itself.

    As in vLLM's server, the token that ended it is counted and has its log probability, but shows in no text.
    """

    def __init__(self, pieces: TokenPieces, generation: Generation, vocabulary: Vocabulary) -> None:
        super().__init__(pieces, generation, vocabulary)
        self._shows_end = bool(generation.sampling.include_stop_str_in_output)

    def feed(self, delta: Delta) -> None:
        """Set the text of *delta*."""
        ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and not self._shows_end:
            ids = ids[:-1]
        delta.text = self._text.feed(ids)
        self._names.feed(delta)


class StopStrings:
    """
    Cuts a text before the first stop string, or after it with *include*.

    The stop string that ends first counts; of several that end at the same place, the longest. So the result does not
    depend on how the text is split. Text that may still become a stop string is delayed. The cost of a piece depends on
    its own length and that of the longest stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Request
        self._include = include
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        # Stream state
        self._held = ""
        self.matched: str | None = None
        #: The characters of the last piece after the stop string.
        self.dropped = 0

    def feed(self, piece: str) -> str:
        """Return the text that can be shown now; empty after a match (see ``matched``)."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        match = self._find(text)
        if match is not None:
            start, self.matched = match
            end = start + len(self.matched)
            self._held = ""
            self.dropped = len(text) - end
            if self._include:
                return text[:end]
            return text[:start]
        keep = self._could_begin(text)
        if keep:
            self._held = text[len(text) - keep :]
        else:
            self._held = ""
        return text[: len(text) - keep]

    def end(self, piece: str) -> str:
        """
        Return the text that can be shown if *piece* is the last one, because the backend has found a stop string.

        If one token completes several stop strings, the backend may find a later one than :meth:`feed`. ``matched`` is
        the first of those with which the text ends.
        """
        text = self._held + piece
        self._held = ""
        self.matched = next((stop for stop in self._stops if text.endswith(stop)), None)
        if self._include or self.matched is None:
            return text
        return text.removesuffix(self.matched)

    def feed_without_match(self, piece: str) -> str:
        """Return the text that can be shown now where no stop string may end in *piece* yet."""
        text = self._held + piece
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the delayed text, which cannot become a stop string any more."""
        delayed = self._held
        self._held = ""
        return delayed

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return where the stop string begins that ends first, and the string."""
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start, stop) < first):
                first = (start + len(stop), start, stop)
        if first is None:
            return None
        return first[1:]

    def _could_begin(self, text: str) -> int:
        """Return the length of the longest suffix of *text* that is a prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            for stop in self._stops:
                if stop.startswith(end):
                    return size
        return 0


class LogprobsStage:
    """
    Delays log probabilities until no stop string can cut their token from the answer. Has one stream's state.

    An incomplete stop string begins less than its own length before the end of the text. So the lengths of the tokens
    (in bytes: tokens split characters) determine which entries to delay, whatever text the backend delays.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Request
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops))
        self._include = include
        # Stream state
        self._held: deque[tuple[TokenLogprob, bytes]] = deque()
        self._size = 0
        # The end of the passed text: a stop string may begin inside a token that stays.
        self._before = b""

    def feed(self, delta: Delta) -> None:
        """Replace the entries of *delta* with delayed ones that no stop string can cut any more."""
        if not delta.logprobs:
            return
        passed = []
        # Without the new entries, which may contain a stop string and text after it.
        while self._held and self._size >= self._longest:
            entry, raw = self._held.popleft()
            self._size -= len(raw)
            self._before = (self._before + raw)[-self._longest :]
            passed.append(entry)
        for entry in delta.logprobs:
            raw = _raw(entry)
            self._held.append((entry, raw))
            self._size += len(raw)
        delta.logprobs = passed

    def end(self) -> list[TokenLogprob]:
        """Return the delayed entries, up to the stop string if there is one: a token shown in part keeps its entry."""
        raw = b"".join([self._before, *[raw for _, raw in self._held]])
        before = len(self._before)
        # Only those that end in this token: with min_tokens, a backend ignores earlier ones.
        found = [(raw.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
        kept = [entry for entry, _ in self._held]
        if matches:
            end, start = min(matches)
            if self._include:
                border = end
            else:
                border = start
            kept = []
            position = before
            for entry, own in self._held:
                if position >= border:
                    break
                kept.append(entry)
                position += len(own)
        self._held.clear()
        self._size = 0
        return kept


def _raw(entry: TokenLogprob) -> bytes:
    if entry.hidden:
        return b""
    if entry.raw is None:
        return entry.token.encode()
    return entry.raw


class StopStage:
    """
    Cuts the answer at a stop string. *backend_stops* is whether the backend finds stop strings and ends the answer.

    As in vLLM, a stop string that ends within the first *min_tokens* tokens does not count. ``cut`` is whether the
    answer ends although the backend continues.
    """

    def __init__(self, stops: StopStrings, progress: AnswerState, *, backend_stops: bool, min_tokens: int = 0) -> None:
        self.stops = stops
        self.cut = False
        self._skipped = min_tokens
        self._progress = progress
        self._backend_stops = backend_stops

    def feed(self, delta: Delta) -> None:
        """Set the text of *delta* to what can be shown."""
        if self._skipped > 0:
            self._skipped -= delta.tokens or 0
            if self._skipped >= 0:
                delta.text = self.stops.feed_without_match(delta.text)
                return
        reported = self._backend_stops and delta.finish_reason is FinishReason.STOP
        if reported:
            delta.text = self.stops.end(delta.text)
        else:
            delta.text = self.stops.feed(delta.text)
        if self.stops.matched is not None:
            self.finalize()
            self.cut = not reported

    def finalize(self) -> None:
        """Record the stop string, if one was found."""
        if self.stops.matched is not None:
            self._progress.finish_reason = FinishReason.STOP
            self._progress.stop_reason = self.stops.matched
            self._progress.dropped = self.stops.dropped


def _in_order(stages: Sequence[Callable[[Delta], None]]) -> Callable[[Delta], None]:
    def feed(delta: Delta) -> None:
        for stage in stages:
            stage(delta)

    return feed


class Pipeline:
    """
    The stages that one answer needs, created at its start. ``feed`` passes a delta through all of them, in order.

    ``may_end`` is whether a stage may end the answer, ``token_ids`` whether the answer shows ids, and ``reads_logits``
    whether log probabilities may have to be computed from logits. *thinking* ends the answer where its thinking has
    spent its budget.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        generation: Generation,
        tokenizer: Tokenizer | None,
        progress: AnswerState,
        thinking: ThinkingStage | None = None,
    ) -> None:
        sampling = generation.sampling
        include = bool(sampling.include_stop_str_in_output)
        self._progress = progress
        self._token_text: TokenText | None = None
        self._thinking = thinking
        self._stop: StopStage | None = None
        self._logprobs: LogprobsStage | None = None
        stages: list[Callable[[Delta], None]] = []
        # The backend answers in token ids.
        if capabilities.tokens and tokenizer is not None and generation.vocabulary is not None:
            if capabilities.ends_itself:
                self._token_text = EngineEndedText(tokenizer.pieces, generation, generation.vocabulary)
            else:
                self._token_text = TokenText(tokenizer.pieces, generation, generation.vocabulary)
            stages.append(self._token_text.feed)
        if thinking is not None:
            stages.append(thinking.feed)
        stages.append(progress.add)
        # The backend does not cut stop strings, or was asked to show them.
        if sampling.stop and (capabilities.stop is None or (capabilities.stop == "shown" and sampling.stop_showable)):
            stops = StopStrings(sampling.stop, include=include)
            min_tokens = 0
            if capabilities.ends_itself:
                min_tokens = sampling.min_tokens or 0
            self._stop = StopStage(stops, progress, backend_stops=capabilities.stop is not None, min_tokens=min_tokens)
            stages.append(self._stop.feed)
        if sampling.logprobs is not None:
            # The backend sends token ids in addition to the text.
            if tokenizer is not None and not capabilities.tokens:
                skips_special = sampling.skip_special_tokens is not False
                stages.append(TokenNames(tokenizer.pieces, skip_special_tokens=skips_special).feed)
            if sampling.stop:
                self._logprobs = LogprobsStage(sampling.stop, include=include)
                stages.append(self._logprobs.feed)
        #: Most answers only have to be counted.
        if len(stages) > 1:
            self.feed = _in_order(stages)
        else:
            self.feed = progress.add
        self.may_end = self._token_text is not None or self._stop is not None or thinking is not None
        self.token_ids = generation.token_ids
        self.reads_logits = capabilities.tokens and not capabilities.ends_itself and sampling.logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether the answer ends here, even if the backend continues."""
        if self._stop is not None and self._stop.cut:
            return True
        if self._thinking is not None and self._thinking.spent:
            return True
        return self._token_text is not None and self._token_text.stopped

    def flush(self, decoder: Decoder, shown: list[Delta]) -> None:
        """Append the delayed text and log probabilities to *shown*, the deltas of the last step."""
        if self._stop is None or not self._stop.cut:
            self._flush_text(decoder, shown)
        entries: Sequence[TokenLogprob] = ()
        if self._logprobs is not None:
            entries = self._logprobs.end()
        if entries and shown:
            shown[-1].logprobs = [*shown[-1].logprobs, *entries]
        elif entries:
            shown.append(Delta(logprobs=entries))

    def _flush_text(self, decoder: Decoder, shown: list[Delta]) -> None:
        if self._token_text is not None and self._token_text.stopped:
            self._progress.finish_reason = FinishReason.STOP
            self._progress.stop_reason = self._token_text.stop_id
        text = ""
        if self._thinking is None or not self._thinking.spent:
            # Of an answer that is ended, a decoder may say that it is not complete.
            text = decoder.flush()
        if text:
            self._progress.add_text(text)
        if self._token_text is not None:
            text += self._token_text.flush()
        if self._stop is not None:
            text = self._stop.stops.feed(text)
            self._stop.finalize()
            text += self._stop.stops.flush()
        if text:
            shown.append(Delta(text))
