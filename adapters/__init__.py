"""
One module for each kind of backend: the listing is the support matrix.

An adapter of another package subclasses :class:`Adapter` and registers under the entry point group
``triton_openai.adapters``; see ``docs/guides/writing-an-adapter.md``. What adapters share is in ``_common``.
"""

from triton_openai.adapters._common.base import (
    Adapter,
    Capabilities,
    ModelMetadata,
    Parameter,
    Rule,
    bind,
    requires_only,
    values_of,
)
from triton_openai.adapters._common.decoding import CumulativeText, PromptEcho, TextDecoder

__all__ = [
    "Adapter",
    "Capabilities",
    "CumulativeText",
    "ModelMetadata",
    "Parameter",
    "PromptEcho",
    "Rule",
    "TextDecoder",
    "bind",
    "requires_only",
    "values_of",
]
