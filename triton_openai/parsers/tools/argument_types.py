"""
Values of arguments in the types of the tool's schema, where a format writes values with a type of its own.

Models write ``"20"`` for a number, ``"[…]"`` for an array, and ``20`` for a string. A client that checks arguments
refuses the call.
"""

from __future__ import annotations

import msgspec

from triton_openai.parsers.tools.json_text import dump, string_value
from triton_openai.parsers.tools.schema import Parameters

_STRING = frozenset({"string"})


class ArgumentTypes:
    """Converts the arguments of one call. Only a value whose text is one of the schema's type is converted."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        #: Whether a value was converted.
        self.has_converted = False

    def fits(self, key: str, first: str) -> bool:
        """Return whether a JSON value of *key* that begins with the character *first* stays as it is."""
        types = self._parameters.types(key)
        if not types:
            return True
        if first == '"':
            return "string" in types
        return types != _STRING or not (first == "-" or first.isdigit())

    def converted(self, key: str, text: str) -> str:
        """Return *text*, the JSON value of *key*, in a type of the schema; *text* itself if it is of none."""
        if not text.startswith('"'):
            self.has_converted = True
            return dump(text)
        written = string_value(text)
        if written is None:
            return text
        converted = self._parameters.value(key, written)
        if converted.startswith('"'):
            return text
        self.has_converted = True
        return converted

    def object(self, text: str) -> str:
        """Return *text*, a JSON object, with each of its members converted."""
        try:
            members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            # Lone surrogates, or deep nesting: no value of a schema's type.
            return text
        changed = False
        texts: dict[str, str] = {}
        for key, raw in members.items():
            value = bytes(raw).decode()
            texts[key] = value
            if not self.fits(key, value[0]):
                texts[key] = self.converted(key, value)
                changed = changed or texts[key] != value
        if not changed:
            return text
        return "{" + ", ".join([f"{dump(key)}: {value}" for key, value in texts.items()]) + "}"
