"""A model's tokenizer: text to ids and back, and what its files say about special tokens and chat templates."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import tokenizers

from triton_openai import offload
from triton_openai.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from triton_openai.jobs import TokenPair
from triton_openai.prompts.detokenizer import TokenPieces
from triton_openai.prompts.tokenizer_files import TokenizerFiles, locate

#: Texts longer than this are encoded in a thread.
INLINE_CHARACTERS = int((offload.INLINE - offload.ITEM) / offload.CHARACTER)

# How a part of a text is found in which the tokens are those of the whole text. It is so many characters long for each
# token, twice as many as usual, and is cut between words. Behind the cut, some words are left before the tokens count:
# at the start of a text, a tokenizer may add a space, and the next words are the same again.
_CHARACTERS_PER_TOKEN = 8
_SEARCHED = 4096
_NEAR = 256
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])[ \n](?=[^\W\d_])")
_WORDS = 16
# A longer text without words is cut anywhere.
_MAX_WORD = 1_000_000

#: More tokens than any model takes.
MOST_TOKENS = 2 * 1024 * 1024

#: ``transformers`` writes 1e30 for "unset". No model's context comes near this limit.
_MAX_CONTEXT = 10**9


class Tokenizer:
    """
    A fast (``tokenizers``) tokenizer with its special tokens and chat templates. Immutable; safe in threads.

    :meth:`load` creates it. Encoding never truncates or pads, whatever ``tokenizer.json`` says.

    It has more than 20 methods, because what may take long exists twice: at once, and without holding the event loop.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        # Sentence encoders ship with truncation, which would make counts wrong; transformers resets both too.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        #: The number of ids, including added tokens.
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        #: The named special tokens (``bos_token``, ``eos_token``, …) that the tokenizer has.
        self.special_tokens: Mapping[str, str] = _special_tokens(files)
        #: The Jinja sources by name; the usual name is ``default``.
        self.chat_templates = files.chat_templates
        #: The contents of ``generation_config.json``; empty where there is none.
        self.generation_config = files.generation_config
        #: The file that describes the model's format of tool calls, if there is one.
        self.tool_format = files.tool_format
        #: How an encoder's vectors are pooled, where its files say it.
        self.pooling = files.pooling
        #: The labels of a classifier's classes.
        self.labels = _labels(files.model_config.get("id2label"))
        #: What a classifier's logits are for (``multi_label_classification``), where ``config.json`` says so.
        self.problem_type: Any = files.model_config.get("problem_type")
        #: The ids that end a generation: ``eos_token`` first, then those of ``generation_config.json``.
        self.eos_token_ids = self._find_eos(files)
        #: The longest prompt in tokens, if the tokenizer declares it.
        self.model_max_length = _max_length(files.config.get("model_max_length"))
        #: The number of tokens that no prompt can exceed, if the files declare it.
        self.longest_prompt = _longest_prompt(self.model_max_length, files.model_config)
        #: Whether encoding with special tokens puts ``bos_token`` in front, as a backend's preprocessing would.
        self.adds_bos = self._find_adds_bos(files)
        #: The bytes of single tokens, and which of them are special.
        self.pieces = TokenPieces(backend)
        # Where it puts special tokens. To have it put them around tokens, it would need their places, which take long.
        self._runs = {1: _runs(backend, None), 2: _runs(backend, string.printable)}

    @classmethod
    def load(cls, source: str) -> Tokenizer:
        """
        Load the tokenizer *source*: a local folder, a path of a ``tokenizer.json``, or a hub name ("org/name").

        Blocks (disk, maybe network; a large vocabulary takes half a second): call it in a thread. Raises
        :class:`ConfigurationError` if it is missing, unreadable, unreachable, or has only the slow form.
        """
        files = locate(source)
        try:
            backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:
            # The Rust side raises bare Exception for everything that it cannot read.
            raise ConfigurationError(
                f"The tokenizer '{source}' given by --tokenizer has an unreadable tokenizer.json.", detail=str(error)
            ) from error
        return cls(backend, files)

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this *token*, or None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def has(self, token: str) -> bool:
        """Return whether exactly this *token* is in the vocabulary."""
        return self.token_id(token) is not None

    def special_id(self, name: str) -> int | None:
        """Return the id of a named special token (``pad_token``), or None when the tokenizer has none."""
        return self.token_id(self.special_tokens.get(name, ""))

    def strip_bos(self, prompt: str) -> str:
        """Return *prompt* without the ``bos_token`` at its start, for backends that add it themselves."""
        return prompt.removeprefix(self.special_tokens.get("bos_token", ""))

    def vocabulary_string(self, number: int) -> str:
        """Return how the vocabulary writes the id *number* (``Ġhow``); an id that does not exist is written as ""."""
        return self._backend.id_to_token(number) or ""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """
        Return the ids of *text*. Raises :class:`InvalidRequest` for text that is not valid Unicode, and
        :class:`ContextLengthExceeded` for more tokens than any model takes.
        """
        encoding = self._encode(text, add_special_tokens)
        if len(encoding) > MOST_TOKENS:
            # Making a list of millions of numbers holds the interpreter lock.
            raise ContextLengthExceeded(f"The text has {len(encoding)} tokens, more than {MOST_TOKENS}.")
        return encoding.ids

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        with _valid_unicode():
            if len(text) > INLINE_CHARACTERS:
                # Only the batch form releases the interpreter lock, so that the event loop can run.
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def tokens(self, text: str) -> tokenizers.Encoding:
        """
        Return the tokens of *text* and their places in it, without special tokens. Raises as :meth:`encode`.

        To free 100,000 of them holds the interpreter lock for some 15 ms.
        """
        with _valid_unicode():
            return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def cut_roughly(self, text: str, count: int, side: Literal["left", "right"]) -> str:
        """
        Return an end of *text*, or with *side* "right" a start, that has at least *count* tokens of the whole text.

        It is the whole text, if such a part is not found quickly. In a text of millions of characters without words,
        its tokens may differ from those of the whole text.
        """
        size = count * _CHARACTERS_PER_TOKEN + _NEAR
        if len(text) <= size + 2 * _SEARCHED:
            return text
        # Between these places is the cut. The tokens beyond the inner one are the same.
        if side == "left":
            inner = len(text) - size
            outer = inner - _SEARCHED
        else:
            inner = size
            outer = inner + _SEARCHED
        cuts = [match.start() for match in _BETWEEN_WORDS.finditer(text, min(inner, outer), max(inner, outer))]
        if len(cuts) >= _WORDS and side == "left":
            cut = cuts[-_WORDS]
        elif len(cuts) >= _WORDS:
            cut = cuts[_WORDS - 1]
        elif len(text) <= _MAX_WORD:
            return text
        else:
            # No text that somebody wrote: it is cut anywhere.
            cut = outer
        if side == "left":
            sure = text[inner:]
            part = text[cut:]
        else:
            sure = text[:inner]
            part = text[:cut]
        # Near a cut, the tokens may be others than those of the whole text.
        if self.count(sure) - _WORDS >= count:
            return part
        return text

    async def cut_roughly_async(self, text: str, count: int, side: Literal["left", "right"]) -> str:
        """Do :meth:`cut_roughly` without holding the event loop for long. Raises as :meth:`encode_async`."""
        size = min(len(text), count * _CHARACTERS_PER_TOKEN + _NEAR + _SEARCHED)
        if size < len(text):
            cost = offload.CHARACTER * size
        else:
            cost = 0
        return await offload.run(self.cut_roughly, text, count, side, cost=cost, refusable=True)

    def joined(self, *texts: Sequence[int]) -> TokenPair:
        """Return one sequence of the ids of a text, or of a pair of texts, with their special tokens."""
        joined: list[int] = []
        type_ids: list[int] = []
        for number, type_id, special_ids in self._runs[len(texts)]:
            ids: Sequence[int] = special_ids
            if number is not None:
                ids = texts[number]
            joined += ids
            type_ids += [type_id] * len(ids)
        return TokenPair(joined, type_ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of *ids*; unknown ids have none. Raises :class:`InvalidRequest` for invalid numbers."""
        try:
            if len(ids) > INLINE_CHARACTERS:
                return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest("Token ids must be integers from 0 to 4294967295.", detail=str(error)) from error

    def count(self, text: str, add_special_tokens: bool = False) -> int:
        """Return how many tokens *text* has. Raises as :meth:`encode`."""
        return len(self._encode(text, add_special_tokens))

    def count_to(self, text: str, end: int) -> int:
        """Return how many tokens of *text* it takes to have its first *end* characters. Raises as :meth:`encode`."""
        encoding = self.tokens(text)
        last = None
        # A space may belong to no token; then the next token counts.
        for place in range(end - 1, len(text)):
            last = encoding.char_to_token(place)
            if last is not None:
                break
        else:
            return len(encoding)
        # The bytes of a character may be several tokens.
        for count in range(last + 1, len(encoding)):
            characters = encoding.token_to_chars(count)
            if characters is None or characters[0] >= end:
                return count
        return len(encoding)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], limit: int | None = None) -> list[TokenPair]:
        """
        Return each query and document as one sequence, with the special tokens of a pair.

        With *limit*, a longer one is cut at the end of its document. Raises :class:`InvalidRequest` for text that is
        not valid Unicode, and for a query that is longer than *limit*.
        """
        special = len(self.joined([], []).ids)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        with _valid_unicode():
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
        joined: list[TokenPair] = []
        for query, document in pairs:
            room = None
            if limit is not None:
                room = limit - special - len(ids[query])
            if room is not None and room < 0:
                raise ContextLengthExceeded(f"The query alone is longer than {limit} tokens.")
            joined.append(self.joined(ids[query], ids[document][:room]))
        return joined

    async def encode_pairs_async(self, pairs: Sequence[tuple[str, str]], limit: int | None = None) -> list[TokenPair]:
        """Do :meth:`encode_pairs` without holding the event loop for long texts. Raises as :meth:`encode_async` too."""
        if limit is not None:
            pairs = [(query, await self.cut_roughly_async(document, limit, "right")) for query, document in pairs]
        cost = tokenizing_cost(text for pair in pairs for text in pair)
        return await offload.run(self.encode_pairs, pairs, limit, cost=cost, refusable=True)

    async def encode_async(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """
        Do :meth:`encode` without holding the event loop for long texts.

        Raises the same, and :class:`ServiceOverloaded` if too many texts wait.
        """
        return await offload.run(self.encode, text, add_special_tokens, cost=tokenizing_cost((text,)), refusable=True)

    async def decode_async(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Do :meth:`decode` without holding the event loop for many ids. Raises the same."""
        return await offload.run(self.decode, ids, skip_special_tokens, cost=offload.CHARACTER * len(ids))

    async def count_async(
        self, text: str | Sequence[str], add_special_tokens: bool = False, *, refusable: bool = True
    ) -> int:
        """
        Do :meth:`count` for one or several texts without holding the event loop.

        Raises the same; if *refusable*, as before a model has worked, also :class:`ServiceOverloaded`.
        """
        texts = (text,) if isinstance(text, str) else text
        return await offload.run(
            lambda: sum(self.count(text, add_special_tokens) for text in texts),
            cost=tokenizing_cost(texts),
            refusable=refusable,
        )

    def _find_eos(self, files: TokenizerFiles) -> tuple[int, ...]:
        declared = files.generation_config.get("eos_token_id", files.model_config.get("eos_token_id"))
        if not isinstance(declared, list):
            declared = [declared]
        ids: dict[int, None] = {}
        for number in (self.special_id("eos_token"), *declared):
            # JSON's true is not an id.
            if type(number) is int and number >= 0:
                ids[number] = None
        return tuple(ids)

    def _find_adds_bos(self, files: TokenizerFiles) -> bool:
        # For Llama-like classes transformers rebuilds the post-processor from this flag, so it comes first.
        declared = files.config.get("add_bos_token")
        if isinstance(declared, bool):
            return declared
        bos = self.special_tokens.get("bos_token")
        if bos is None:
            return False
        return self.encode("", add_special_tokens=True)[:1] == [self.token_id(bos)]


def _runs(backend: tokenizers.Tokenizer, pair: str | None) -> list[tuple[int | None, int, list[int]]]:
    """Return the runs of tokens that *backend* makes of a text or of two: the number of the text, the type, the ids."""
    # A text in which every tokenizer finds tokens.
    shown = backend.encode(string.printable, pair)
    tokens = zip(shown.sequence_ids, shown.type_ids, shown.ids, strict=True)
    return [(*key, [token for *_, token in run]) for key, run in groupby(tokens, itemgetter(0, 1))]


@contextmanager
def _valid_unicode() -> Iterator[None]:
    """Raise :class:`InvalidRequest` for a lone surrogate, for which the bindings raise a TypeError."""
    try:
        yield
    except (TypeError, UnicodeError) as error:
        raise InvalidRequest("The text is not valid Unicode (it holds a lone surrogate).", detail=str(error)) from error


def _special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """Merge the files' named tokens; a null in ``tokenizer_config.json`` removes a token, as in transformers."""
    named: dict[str, str] = {}
    for mapping in (files.special_tokens_map, files.config):
        extra = mapping.get("extra_special_tokens")
        if not isinstance(extra, dict):
            extra = {}
        for name, value in {**mapping, **extra}.items():
            # An ``AddedToken`` is written as an object.
            if isinstance(value, dict):
                token = value.get("content")
            else:
                token = value
            if name.endswith("_token") and isinstance(token, str):
                named[name] = token
            elif value is None:
                named.pop(name, None)
    return named


def _longest_prompt(told: int | None, model: Mapping[str, Any]) -> int | None:
    """
    Return the larger of the tokenizer's limit, *told*, and the number of positions in the *model*'s config.json.

    A tokenizer often comes from an older model with a shorter context. Scaling multiplies the positions.
    """
    config = model
    text_config = model.get("text_config")
    if isinstance(text_config, dict):
        config = {**model, **text_config}
    positions = _max_length(config.get("max_position_embeddings"))
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = None
    if isinstance(scaling, dict):
        factor = scaling.get("factor")
    if positions is not None and isinstance(factor, int | float) and 1 < factor < _MAX_CONTEXT:
        positions = int(positions * factor)
    return max(filter(None, (told, positions)), default=None)


def _labels(value: Any) -> dict[int, str]:
    """Return what ``id2label`` of config.json says, as far as it has numbers and texts."""
    if not isinstance(value, dict):
        return {}
    return {int(number): label for number, label in value.items() if number.isdecimal() and isinstance(label, str)}


def _max_length(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if 0 < value <= _MAX_CONTEXT:
        return int(value)
    return None


def tokenizing_cost(texts: Iterable[str]) -> float:
    """Return about how many microseconds it takes to tokenize *texts*."""
    return sum(offload.ITEM + offload.CHARACTER * len(text) for text in texts)


async def count_pieces(tokenizer: Tokenizer, pieces: Sequence[str], dropped: int = 0) -> int:
    """
    Return the number of tokens in *pieces*, the texts of an answer's steps.

    The last *dropped* characters do not count, unless they belong to the last token before them.

    Each piece is tokenized alone, because a step is one token or a few. A backend that decodes token by token shows
    each part of a split character as U+FFFD, which counts as one token, not as the three of its UTF-8 bytes.
    """

    def count(piece: str, dropped: int = 0) -> int:
        shown = piece[: len(piece) - dropped]
        parts = shown.count("\ufffd")
        text = piece.replace("\ufffd", "")
        if dropped:
            return parts + tokenizer.count_to(text, len(shown) - parts)
        return parts + tokenizer.count(text)

    def count_all() -> int:
        if not pieces:
            return 0
        return sum(map(count, pieces[:-1])) + count(pieces[-1], dropped)

    return await offload.run(count_all, cost=tokenizing_cost(pieces))
