"""An answer with the times and counts that a test wants."""

from __future__ import annotations

from typing import Any

from triton_openai.generation import AnswerState, Generation, Sampling, Usage


class FakeAnswer(AnswerState):
    """An answer with these *fields*; *partial* is the usage of one that was cut off."""

    def __init__(self, *, text: str = "", steps: int = 2, partial: Usage | None = None, **fields: Any) -> None:
        super().__init__(Generation(id="a", prompt="", sampling=Sampling(max_tokens=9)))
        self.pieces, self.steps = [text], steps
        if partial is not None:
            self.prompt_tokens, self.tokens = partial.prompt_tokens, partial.completion_tokens
        for name, value in fields.items():
            setattr(self, name, value)
