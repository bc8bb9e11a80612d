"""
Filling in the middle: a prompt and a ``suffix`` become one text, in the form that a model was trained on.

A vocabulary with the tokens of a form does not show that the model was trained on it: families share one vocabulary
between their code models and all others. So the operator chooses the form. The forms are the authors' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer

_PLACEHOLDERS = re.compile(r"\{(?:prefix|suffix)\}")


#: By the name of a model family. CodeLlama's form is missing: its own tokenizer adds the spaces around the texts.
FORMS: Mapping[str, str] = {
    # Qwen2.5-Coder and Qwen3-Coder, CodeGemma, Granite 4
    "qwen": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    # StarCoder, StarCoder2, Granite Code
    "starcoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "santacoder": "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    # DeepSeek-Coder (both) and DeepSeek-V3
    "deepseek": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # noqa: RUF001 - so they are
    "codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}


def fill(form: str, prefix: str, suffix: str) -> str:
    """Return the prompt for the two texts in *form*."""
    texts = {"{prefix}": prefix, "{suffix}": suffix}
    return _PLACEHOLDERS.sub(lambda match: texts[match[0]], form)


def tokens_of(form: str) -> list[str]:
    """Return the special tokens of one of :data:`FORMS`."""
    return [token for token in _PLACEHOLDERS.split(form) if token]


def parse(spec: str) -> str:
    """Return the form that ``fim_template`` names or contains. Raises :class:`ConfigurationError`."""
    form = FORMS.get(spec, spec)
    if sorted(_PLACEHOLDERS.findall(form)) != ["{prefix}", "{suffix}"]:
        raise ConfigurationError(
            f"fim_template has to be one of {', '.join(FORMS)}, or a text with {{prefix}} and {{suffix}} once each."
        )
    return form


def known_fim_form(tokenizer: Tokenizer | None) -> str | None:
    """Return the name of the form whose tokens *tokenizer* has, if there is exactly one."""
    known = [name for name, form in FORMS.items() if tokenizer is not None and all(map(tokenizer.has, tokens_of(form)))]
    if len(known) == 1:
        return known[0]
    return None


def fim_form(spec: str | None, tokenizer: Tokenizer | None) -> str | None:
    """
    Return the form for the setting *spec* and *tokenizer*, or ``None`` without a setting.

    Raises :class:`ConfigurationError` for a setting that the tokenizer does not support.
    """
    if spec is None:
        return None
    form = parse(spec)
    if spec in FORMS and tokenizer is not None:
        lacking = [token for token in tokens_of(form) if not tokenizer.has(token)]
        if lacking:
            raise ConfigurationError(f"The model's tokenizer has no {lacking[0]}, which fim_template {spec} needs.")
    return form
