# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Reasoning between two markers at the beginning of the answer: one class for each family that differs in markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from triton_openai.parsers.events import Event
from triton_openai.parsers.grammar import Grammar, TextParser
from triton_openai.parsers.reader import Sink, Step, markers
from triton_openai.parsers.thinking_meter import ThinkingMeter

_ANYTHING = re.compile(r"(?s:.*)")
# In a stream, thinking that the prompt opened waits up to so many characters: a model may skip it and answer at once.
_SHORT_ANSWER = 64


class ReasoningParser(TextParser):
    """
    A text stage of which reasoning and content come out.

    *inside* says whether the prompt itself opened (or closed) the thinking, see :meth:`inside_after`; ``None`` leaves
    it to what the family of models usually does. Base of the classes that the entry-point group
    ``triton_openai.reasoning_parsers`` takes.
    """

    #: What opens a call for the tool parser of the same answer. A call inside of the thinking is a call: from its
    #: opening on, the tool parser reads the text first.
    calls: Sequence[str] = ()
    #: Whether a limit ended the text; known before the flush. ``None``: nobody said so.
    was_cut: bool | None = None
    #: Whether nobody reads the thinking while it comes, so that all of it may wait.
    may_wait = False
    #: Whether text waits, because it is open if it is thinking.
    is_undecided = False
    #: The text from the opening of a call inside of the thinking on, which the tool parser reads first.
    handed_over = ""

    def __init__(self, *, inside: bool | None = None) -> None:
        """Begin an answer; *inside* is what :meth:`inside_after` says of its prompt."""
        self.inside = inside

    def confirm(self) -> list[Event]:
        """Return what waited as thinking: a call has begun in it, or it cannot be anything else."""
        return []

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:  # noqa: ARG003
        """Return whether *prompt* ends with thinking opened (true) or closed (false), or with neither."""
        return None

    @classmethod
    def ending(cls, *, calls: bool) -> str:  # noqa: ARG003
        """
        Return the text that ends the thinking in place of the model; nothing if the thinking cannot be limited.

        *calls* is whether the model may call tools then.
        """
        return ""

    @classmethod
    def meter(cls, prompt: str, calls: Sequence[str]) -> ThinkingMeter:
        """
        Return what finds the thinking in the answer to *prompt*, where :meth:`ending` has a text.

        *calls* are what opens a call, which ends the thinking too.
        """
        raise NotImplementedError


class ReasoningGrammar(Grammar, ReasoningParser):
    """Base of the parsers for reasoning that are grammars."""

    def _read_thinking(self, ends: Sequence[str], sink: Sink, *, also: Sequence[str] = ()) -> Step[str]:
        """
        Give the thinking to *sink*, up to the first of *ends*, and return that; nothing at the end of the text.

        Before a call in the thinking, *also* are ends too. From the call on, the tool parser reads the text first.
        """
        reader = self._reader
        calls = [text for text in self.calls if text not in ends]
        end = yield from reader.until(markers(*ends, *also, *calls), sink)
        if end in calls:
            # What the tool parser leaves comes back, and goes on here.
            self.handed_over = end + reader.take(len(reader.rest()))
            end = yield from reader.until(markers(*ends), sink)
        return end


class Delimited(ReasoningGrammar):
    """
    Thinking, its end, and the answer; what follows the end is content whatever it looks like.

    An opening marker counts only as the first of the text, where the prompt did not bring it already. An end that the
    model writes again at once is dropped. White space next to the markers is markup: templates put it there when they
    write a past answer back. Text that ends inside of the thinking is reasoning if the model opened it itself, if a
    limit cut it, or if a call came in it. Otherwise the model has skipped the thinking that its prompt opened, and the
    text is content. Only the end shows that: what goes on as reasoning before then comes again as content.
    """

    #: What opens and what closes the thinking; alternatives, none of which begins another.
    openings: ClassVar[tuple[str, ...]] = ("<think>",)
    closings: ClassVar[tuple[str, ...]] = ("</think>",)
    #: The beginnings of tool calls that the model may write without closing its thinking. They stay in the content.
    implied: ClassVar[tuple[str, ...]] = ()
    #: What holds where the prompt shows nothing: whether the family begins inside of its thinking.
    begins_inside: ClassVar[bool] = False
    #: What some families put around the answer after the thinking; it is dropped.
    frame: ClassVar[tuple[str, str] | None] = None
    #: Markers around the parts of an answer after the thinking; they are dropped.
    dropped: ClassVar[tuple[str, ...]] = ()
    #: The white space that the family's template has before and after what closes a past thinking.
    space_at_end: ClassVar[tuple[str, str]] = ("\n", "\n\n")

    def __init__(self, *, inside: bool | None = None) -> None:
        super().__init__()
        if inside is None:
            self._inside = self.begins_inside
        else:
            self._inside = inside
        # Stream state
        self._space: list[str] = []
        self._has_reasoned = False
        # All text since the beginning of a thinking that the model may have skipped, and its size while it waits
        self._skippable: list[str] | None = None
        self._size = 0
        self._has_call = False

    def confirm(self) -> list[Event]:
        self._has_call = True
        self._release()
        self._skippable = None
        return self._output.take()

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:
        # Only the end is looked at: messages may speak of the markers.
        end = prompt[-200:].rstrip()
        if end.endswith(cls.openings):
            return True
        if end.endswith(cls.closings):
            return False
        return None

    @classmethod
    def meter(cls, prompt: str, calls: Sequence[str]) -> ThinkingMeter:
        inside = cls.inside_after(prompt)
        if inside is None:
            inside = cls.begins_inside
        return ThinkingMeter(cls.openings, (*cls.closings, *cls.implied, *calls), inside=inside)

    @classmethod
    def ending(cls, *, calls: bool) -> str:  # noqa: ARG003
        before, after = cls.space_at_end
        return before + cls.closings[0] + after

    def _text(self) -> Step[None]:
        reader = self._reader
        if (yield from self._opens()):
            implied = [text for text in self.implied if not text.startswith(tuple(self.calls))]
            end = yield from self._read_thinking(self.closings, self._think, also=implied)
            if end:
                self._release()
                self._skippable = None
            elif not self._is_skipped():
                self._release()
            if end in self.implied and end not in self.dropped:
                self._output.content(end)
            elif end:
                yield from self._after_end()
        if self.frame is not None:
            yield from self._framed(*self.frame)
        while self.dropped and (yield from reader.until(markers(*self.dropped), self._output.content)):
            pass
        yield from reader.run(_ANYTHING, self._output.content)

    def _after_end(self) -> Step[None]:
        """Read the white space after the end of the thinking, and ends that the model has written once more."""
        yield from self._reader.space()
        while (yield from self._reader.marker(markers(*self.closings))):
            yield from self._reader.space()

    def _is_skipped(self) -> bool:
        """End text without an end of its thinking; return whether that is content."""
        if self._skippable is None or self.was_cut is not False or self._has_call:
            return False
        self.is_undecided = False
        self._output.content("".join(self._skippable))
        return True

    def _framed(self, opening: str, closing: str) -> Step[None]:
        """Read the answer without its frame. A *closing* that text follows is not the frame's."""
        reader = self._reader
        if (yield from reader.attempt(reader.literal(opening), self._output.content)):
            yield from reader.space()
        while (yield from reader.until(markers(closing), self._output.content)):
            reader.keep(closing)
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.release()
                self._output.trim()
                return
            self._output.content(reader.release())

    def _opens(self) -> Step[bool]:
        """
        Read an opening marker, if one is there. Return whether the thinking has begun.

        An end of a thinking that did not begin is markup too: models without thinking write it at times.
        """
        expected = self.openings
        if self._inside:
            otherwise = self._think
            self._skippable = []
            self.is_undecided = True
        else:
            otherwise = self._output.content
            expected = (*self.openings, *self.closings)
        opening = yield from self._reader.attempt(self._reader.token(*expected), otherwise)
        if opening in self.closings:
            yield from self._after_end()
            return False
        if opening is not None:
            # The model has opened it itself.
            self._skippable = None
            self.is_undecided = False
        return opening is not None or self._inside

    def _think(self, text: str) -> None:
        """Pass on reasoning, as soon as it is long enough not to be a short answer without thinking."""
        if self._skippable is not None:
            self._skippable.append(text)
        if not self.is_undecided:
            self._reason(text)
            return
        self._size += len(text)
        if self._size > _SHORT_ANSWER and not self.may_wait:
            self._release()

    def _release(self) -> None:
        """Pass on as reasoning what waited."""
        if self.is_undecided:
            self.is_undecided = False
            self._reason("".join(self._skippable or ()))

    def _reason(self, text: str) -> None:
        """Pass on reasoning without white space at its beginning and end."""
        visible = text.rstrip()
        tail = text[len(visible) :]
        if visible:
            if not self._has_reasoned:
                self._space.clear()
                visible = visible.lstrip()
                self._has_reasoned = True
            self._output.reasoning("".join(self._space) + visible)
            self._space.clear()
        if tail:
            self._space.append(tail)


#: Special tokens, which stand in no thought: R1's template has no end of the thinking in front of them.
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")


class Think(Delimited):
    """
    Qwen 3, DeepSeek V3.1 and later, GLM 4.5 and later, Nemotron 3, Step, MiMo and many more.

    Qwen 3.5 at times calls a function without closing its thinking.
    """

    implied = ("<tool_call>\n<function=", "<tool_call><function=", *_DEEPSEEK_CALLS)


class DeepSeekR1(Delimited):
    """DeepSeek R1 and what was distilled from it, QwQ: the answer begins inside of the thinking."""

    begins_inside = True
    implied = _DEEPSEEK_CALLS


class KimiK2(Delimited):
    """Kimi K2 Thinking and K2.5, which may go on to their tool calls without closing the thinking."""

    space_at_end = ("", "")
    implied = ("<|tool_calls_section_begin|>",)


class Kimi(Delimited):
    """The first Kimi models that think."""

    space_at_end = ("", "")
    openings = ("◁think▷",)
    closings = ("◁/think▷",)


class MiniMaxM2(Delimited):
    """MiniMax M2: its template opens the thinking; calls may follow at once."""

    begins_inside = True
    implied = ("<minimax:tool_call>",)


class Mistral(Delimited):
    """Magistral and the Ministral models that think."""

    space_at_end = ("", "")
    special_tokens = True
    openings = ("[THINK]",)
    closings = ("[/THINK]",)


class SeedOss(Delimited):
    """ByteDance's Seed OSS."""

    space_at_end = ("", "")
    openings = ("<seed:think>",)
    closings = ("</seed:think>",)


class Granite(Delimited):
    """IBM's Granite 3.2, which says it in words; some quantised copies contract them. Granite 3.3 has tags."""

    openings = ("Here is my thought process:", "Here's my thought process:", "<think>")
    closings = ("Here is my response:", "Here's my response:", "</think>")


class Gemma4(Delimited):
    """Google's Gemma 4."""

    space_at_end = ("", "")
    special_tokens = True
    openings = ("<|channel>thought",)
    closings = ("<channel|>",)
    implied = ("<|tool_call>",)


class Cohere(Delimited):
    """Cohere's Command models that think, with their frame around the answer."""

    space_at_end = ("", "")
    special_tokens = True
    openings = ("<|START_THINKING|>",)
    closings = ("<|END_THINKING|>",)
    implied = ("<|START_ACTION|>",)
    frame = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class Hunyuan(Delimited):
    """Tencent's Hunyuan A13B."""

    frame = ("<answer>", "</answer>")


class Ernie45(Delimited):
    """Baidu's ERNIE 4.5 Thinking, whose template opens the thinking."""

    begins_inside = True
    frame = ("<response>", "</response>")


class KimiK3(Delimited):
    """Kimi K3, whose answer has parts: the thinking, the response, and the calls."""

    space_at_end = ("", "")
    special_tokens = True
    openings = ("<|open|>think<|sep|>",)
    closings = ("<|close|>think<|sep|>",)
    implied = ("<|open|>response<|sep|>", "<|open|>tools<|sep|>")
    dropped = (
        "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>",
    )  # fmt: skip


class MiniMaxM3(Delimited):
    """MiniMax M3."""

    space_at_end = ("", "")
    openings = ("<mm:think>",)
    closings = ("</mm:think>",)


class Apertus(Delimited):
    """Apertus."""

    space_at_end = ("", "")
    special_tokens = True
    openings = ("<|inner_prefix|>",)
    closings = ("<|inner_suffix|>",)


class Apriel(Delimited):
    """ServiceNow's Apriel 1.5 and 1.6: the prompt ends with "Here are my reasoning steps:"."""

    openings = ("Here are my reasoning steps:",)
    closings = ("[BEGIN FINAL RESPONSE]",)
    implied = ("<tool_calls>",)
    begins_inside = True
    dropped = ("[END FINAL RESPONSE]", "<|end|>")


class Hy3OpenSource(Delimited):
    """Tencent's Hy3 with the tags of its open release; without them it is like Qwen 3."""

    special_tokens = True
    openings = ("<think:opensource>",)
    closings = ("</think:opensource>",)
    implied = ("<tool_calls:opensource>",)
    space_at_end = ("", "")
