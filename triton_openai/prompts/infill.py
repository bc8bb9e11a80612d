"""
Filling in the middle: a prompt and a ``suffix`` become one text, in the form that a model was trained on.

That a vocabulary has the tokens of a form does not show that the model was trained on it (families share one
vocabulary between their code models and all others), so nothing is done unless the operator says so. The forms are
those that the models' authors publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer

_PLACES = re.compile(r"\{(prefix|suffix)\}")


class FillForm(msgspec.Struct, frozen=True):
    """How a prompt and its suffix are written. *parts* are the texts around the two."""

    parts: tuple[str, str, str]
    suffix_first: bool = False

    def render(self, prefix: str, suffix: str) -> str:
        """Return the prompt."""
        before, between, after = self.parts
        first, second = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return f"{before}{first}{between}{second}{after}"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that it is made of."""
        return tuple(part for part in self.parts if part)


#: By the name of who has it. CodeLlama's is not here: the blanks around its texts are made by its own tokenizer.
FORMS: Mapping[str, FillForm] = {
    # Qwen2.5-Coder and Qwen3-Coder, CodeGemma, Granite 4
    "qwen": FillForm(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
    # StarCoder, StarCoder2, Granite Code
    "starcoder": FillForm(("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    "santacoder": FillForm(("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),
    # DeepSeek-Coder (both) and DeepSeek-V3
    "deepseek": FillForm(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),  # noqa: RUF001 - so they are
    "codestral": FillForm(("[SUFFIX]", "[PREFIX]", ""), suffix_first=True),
}


def parse(spec: str) -> FillForm:
    """Return the form that ``fim_template`` names or spells out. Raises :class:`ConfigurationError`."""
    if spec in FORMS:
        return FORMS[spec]
    before, *rest = _PLACES.split(spec)
    if sorted(rest[::2]) != ["prefix", "suffix"]:
        raise ConfigurationError(
            f"fim_template has to be one of {', '.join(FORMS)}, or a text with {{prefix}} and {{suffix}} once each."
        )
    return FillForm((before, rest[1], rest[3]), suffix_first=rest[0] == "suffix")


def recognise(tokenizer: Tokenizer) -> str | None:
    """Return the name of the form all of whose tokens *tokenizer* has, if there is one and no other."""
    found = [name for name, form in FORMS.items() if all(map(tokenizer.has, form.tokens))]
    return found[0] if len(found) == 1 else None


def choose(spec: str | None, tokenizer: Tokenizer | None) -> FillForm | None:
    """
    Return the form of a model with this setting and *tokenizer*, or ``None`` without a setting. Raises
    :class:`ConfigurationError` where the setting cannot be followed.
    """
    if spec is None:
        return None
    form = parse(spec)
    lacking = None
    if spec in FORMS and tokenizer is not None:
        lacking = next((token for token in form.tokens if not tokenizer.has(token)), None)
    if lacking is not None:
        raise ConfigurationError(f"The model's tokenizer has no {lacking}, which fim_template {spec} needs.")
    return form
