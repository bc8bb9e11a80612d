"""The client's names of what a chat consists of: an error names what the client wrote, in whichever API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class MessageOrigin(msgspec.Struct, frozen=True):
    """Where a message comes from in the client's request. The names of its parts are those of chat completions."""

    #: The client's path of the message.
    path: str

    def content(self, inner: str = "") -> str:
        """Return the path of the content, or of what is at *inner* in it, such as ``[1].image_url``."""
        return f"{self.path}.content{inner}"

    def call(self, index: int, inner: str = "") -> str:
        """Return the path of the tool call number *index*, or of what is at *inner* in it, such as ``.type``."""
        return f"{self.path}.tool_calls[{index}]{inner}"

    def field(self, name: str) -> str:
        """Return the path of another field of the message."""
        return f"{self.path}.{name}"


class Origins(msgspec.Struct, frozen=True):
    """The client's names of options, and the origins of messages. By default they are those of chat completions."""

    #: By the name of the option. The names of other options are the client's, too.
    names: Mapping[str, str] = {}
    messages: Sequence[MessageOrigin] | None = None

    def name(self, option: str) -> str:
        """Return the client's name of *option*."""
        return self.names.get(option, option)

    def message(self, index: int) -> MessageOrigin:
        """Return the origin of the message number *index*."""
        if self.messages is None:
            return MessageOrigin(f"messages[{index}]")
        return self.messages[index]


#: The names of chat completions.
CHAT_ORIGINS = Origins()
