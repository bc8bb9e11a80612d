"""What a reasoning parser is."""

from __future__ import annotations

from triton_openai.parsers.grammar import TextParser


class ReasoningParser(TextParser):
    """
    A text stage of which reasoning and content come out.

    *inside* says whether the prompt itself opened (or closed) the thinking, see :meth:`inside_after`; ``None`` leaves
    it to what the family of models usually does. Base of the classes that the entry-point group
    ``triton_openai.reasoning_parsers`` takes.
    """

    def __init__(self, *, inside: bool | None = None) -> None:
        """Begin an answer; *inside* is what :meth:`inside_after` says of its prompt."""
        self.inside = inside

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:  # noqa: ARG003
        """Return whether *prompt* ends with thinking opened (true) or closed (false), or with neither."""
        return None
