"""The client of the language model: all stand-ins share one process of llama.cpp's server, over a local socket."""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from .batcher import Threads
from .engine import LIMIT, WAITING, Answer, EngineFailure, Options
from .text import Vocabulary

# The server reports tokens that end within a character with the token that completes it, which may exceed the requested
# length.
_SPARE_TOKENS = 4
# Compact, because a small model may write white space without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LlamaEngine:
    """Sends the stand-ins' requests to the server at the socket *path*."""

    def __init__(self, path: str, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary

    def batcher(self) -> Threads:
        """Return a batcher with a thread per request: the server batches, and each thread waits for its tokens."""
        return Threads()

    def answer(self, prompt: str, prompt_ids: Sequence[int], options: Options) -> Answer:
        """Begin an answer. Raises `ValueError` for unsupported options."""
        if options.images:
            raise ValueError("At most 0 image(s) may be provided in one prompt.")
        body = self._body(options)
        if options.min_tokens and "grammar" in body:
            raise ValueError("min_tokens cannot be used together with guided decoding.")
        scores = Measured()
        return Answer(self._tokens(list(prompt_ids), body, options, scores), scores)

    def _body(self, options: Options) -> dict[str, Any]:
        body: dict[str, Any] = {
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            # With the cache, the same request may get another answer.
            "cache_prompt": False,
            "n_predict": options.max_tokens + _SPARE_TOKENS,
            "temperature": 0.0 if options.greedy else options.temperature,
            "top_p": options.top_p or 1.0,
            "top_k": max(options.top_k, 0),
            "min_p": options.min_p,
            "repeat_penalty": options.repetition_penalty or 1.0,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "repeat_last_n": 2048,
            "ignore_eos": options.ignore_eos,
            "logit_bias": [*options.bias.items(), *((token, False) for token in self._banned(options.bad_words))],
        }
        if options.seed is not None:
            body["seed"] = options.seed % 2**32
        if options.logprobs is not None:
            body["n_probs"] = max(options.logprobs, 1)
        if options.guide is not None:
            body["grammar"] = _grammar(*options.guide)
        return body

    def _banned(self, words: Sequence[str]) -> Iterator[int]:
        for word in words:
            # At the start of a text, and within a sentence.
            variants = [self._vocabulary.encode(text) for text in dict.fromkeys((word, f" {word.lstrip()}"))]
            if not any(len(ids) == 1 for ids in variants):
                raise ValueError(f"The bad word {word!r} has several tokens; the demo's engine only bans single ones.")
            yield from (ids[0] for ids in variants if len(ids) == 1)

    def _tokens(self, prompt: list[int], body: dict[str, Any], options: Options, scores: Measured) -> Iterator[int]:
        try:
            if options.min_tokens and not options.ignore_eos:
                first = {**body, "n_predict": options.min_tokens, "ignore_eos": True}
                for token in self._run(prompt, first, scores):
                    if token >= 0:
                        prompt.append(token)
                    if token != LIMIT:
                        yield token
            yield from self._run(prompt, body, scores)
        except (LookupError, ValueError, RuntimeError) as error:
            raise EngineFailure(f"The engine's answer cannot be read: {error!r}") from error

    def _run(self, prompt: list[int], body: dict[str, Any], scores: Measured) -> Iterator[int]:
        """Yield the ids of one completion, `WAITING` in between, and finally the end-of-sequence id or `LIMIT`."""
        vocabulary = self._vocabulary
        waiting = None
        produced: list[int] = []
        for event in self._events({**body, "prompt": prompt}):
            if event is None or "prompt_progress" in event:
                yield WAITING
                continue
            if waiting is not None:
                # A special token may occur within an answer. Several may end it, of which the stand-ins know one.
                yield vocabulary.eos_id if event["stop"] and event["stop_type"] == "eos" else waiting
                waiting = None
            if event["stop"]:
                if event["stop_type"] != "eos":
                    yield LIMIT
                return
            (token,) = event["tokens"]
            if hidden := event["tokens_predicted"] - len(produced) - 1:
                begin = event["content"].encode().removesuffix(vocabulary.token_bytes(token))
                for token_id in self._split(begin, hidden) or []:
                    if "n_probs" in body:
                        scores.add(token_id, self._score([*prompt, *produced], token_id))
                    produced.append(token_id)
                    yield token_id
            produced.append(token)
            if "n_probs" in body:
                scores.add(token, event["completion_probabilities"][0])
            if token in vocabulary.special_ids:
                waiting = token
            else:
                yield token

    def _score(self, prompt: list[int], token: int) -> dict[str, Any]:
        """Return the scores of *token* after *prompt*, as the server reports them."""
        # The server reports nothing for a token that does not complete a character. So this request forces the token
        # and one more.
        body = {
            "prompt": prompt,
            "stream": True,
            "n_predict": 1,
            "n_probs": len(self._vocabulary),
            "logit_bias": [[self._vocabulary.of_bytes(b"!"), 1000.0]],
        }
        result = next(event for event in self._events(body) if event and "completion_probabilities" in event)
        top = result["completion_probabilities"][0]["top_logprobs"]
        return {"id": token, "logprob": next(t["logprob"] for t in top if t["id"] == token), "top_logprobs": top[:20]}

    def _split(self, data: bytes, count: int) -> list[int] | None:
        """Return *count* ids that stand for *data*, the longest tokens first."""
        if count <= 1:
            token = self._vocabulary.of_bytes(data)
            if token is None or not count:
                return None
            return [token]
        for end in range(len(data) - count + 1, 0, -1):
            token = self._vocabulary.of_bytes(data[:end])
            rest = self._split(data[end:], count - 1)
            if token is not None and rest is not None:
                return [token, *rest]
        return None

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Yield the server's events, None for a keepalive. Raises `EngineFailure`."""
        connection = _Connection(self._path)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineFailure(json.loads(response.read())["error"]["message"])
            for line in response:
                if line.startswith(b":"):
                    yield None
                elif line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                elif line.startswith(b"error: {"):
                    raise EngineFailure(json.loads(line[7:])["message"])
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailure(f"The engine does not answer: {error}") from error
        finally:
            # The server notices, and cancels the request.
            connection.close()


class Measured:
    """The scores that came with the tokens, in the order of the tokens."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, dict[str, Any]]] = []

    def add(self, token: int, entry: dict[str, Any]) -> None:
        """Add the server's scores of the next token."""
        self._entries.append((token, entry))

    def logprob(self, position: int, token: int) -> float:
        """Return the log probability of the *token* at *position*."""
        return float(self._entries[position][1]["logprob"])

    def top(self, position: int, token: int, count: int, vocabulary: int) -> list[tuple[int, float, int]]:
        """Return the *token* at *position*, then the *count* likeliest ones, each with log probability and rank."""
        entry = self._entries[position][1]
        ranked = {candidate["id"]: (candidate["id"], candidate["logprob"], rank + 1)
                  for rank, candidate in enumerate(entry["top_logprobs"][:count])}  # fmt: skip
        # A token that is not among the likeliest has an unknown rank; it counts as the next one.
        chosen = ranked.pop(token, (token, entry["logprob"], len(ranked) + 1))
        return [chosen, *ranked.values()]

    def rows(self, first: int, tokens: Sequence[int], vocabulary: int) -> Any:
        """Return rows of scores: the likeliest tokens have their own, all others share the remaining probability."""
        matrix = np.zeros((len(tokens), vocabulary), dtype=np.float32)
        for row, (_, entry) in zip(matrix, self._entries[first : first + len(tokens)], strict=False):
            logprobs = {candidate["id"]: candidate["logprob"] for candidate in (*entry["top_logprobs"], entry)}
            rest = max(1.0 - math.fsum(map(math.exp, logprobs.values())), 1e-9)
            row[:] = math.log(rest / (vocabulary - len(logprobs)))
            row[list(logprobs)] = list(logprobs.values())
        return matrix


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def _closed(schema: Any) -> Any:
    """Return *schema* with objects closed to further properties, as in xgrammar's strict mode."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: part if key in ("enum", "const") else _closed(part) for key, part in schema.items()}
    if "properties" in closed and "patternProperties" not in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _grammar(kind: str, value: str) -> str:
    """Return the engine's grammar for a guide. Raises `ValueError` for an unsupported guide."""
    if kind == "structural_tag":
        raise ValueError("The demo's engine does not support structural tags.")
    try:
        if kind in ("json", "json_schema", "json_object"):
            if value and kind != "json_object":
                schema = _closed(json.loads(value))
            else:
                schema = {"type": "object"}
            if isinstance(schema, dict):
                schema["x-guidance"] = _JSON_STYLE
            text = f"start: %json {json.dumps(schema)}"
        elif kind == "regex":
            text = f"start: /{regex_to_lark(value)}/"
        elif kind == "choice":
            text = f"start: {' | '.join(map(json.dumps, json.loads(value)))}"
        else:
            text = any_to_lark(value).removeprefix("%llguidance {}")
    except Exception as error:
        raise ValueError(f"Grammar error: {error}") from error
    # The server ignores a wrong one silently.
    if problem := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text)):
        raise ValueError(f"Grammar error: {problem}")
    return f"%llguidance {{}}\n{text}"
