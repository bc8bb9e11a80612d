"""Renders the events of the items of a response: each begins, gets its text in pieces, and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from triton_openai.api.agents import seal
from triton_openai.api.bodies import encode
from triton_openai.api.logprobs import ContentLogprob
from triton_openai.api.responses import objects
from triton_openai.api.responses.item_events import ITEM_KINDS, SUMMARY
from triton_openai.api.responses.request_reader import ToolName
from triton_openai.api.sse import SERVER_SENT, Framing
from triton_openai.api.tools import custom_input
from triton_openai.parsers.events import Content, Reasoning, ToolCallStart
from triton_openai.parsers.events import Event as ParserEvent
from triton_openai.parsers.tools.json_text import is_object


class ItemRenderer:
    """
    Renders the events of the items of a *response*, one after the other, and adds the items to its output.

    *names* is how the client calls its tools. Reasoning items that are *sealed* have their ``encrypted_content``.
    """

    def __init__(
        self, response: objects.ResponseObject, *, names: Mapping[str, ToolName], sealed: bool, framing: Framing
    ) -> None:
        self._response_id = response.id
        self._output: list[objects.OutputItem] = []
        response.output = self._output
        self._names = names
        self._sealed = sealed
        self._framing = framing
        #: The sequence number of the next event.
        self.next_number = 0
        #: The item that is open.
        self.item: objects.OpenItem | None = None
        self._kinds = ITEM_KINDS
        if response.reasoning.get("summary") is not None:
            self._kinds = {**ITEM_KINDS, objects.OutputReasoning: SUMMARY}
        self._kind = ITEM_KINDS[objects.OutputMessage]
        # The texts of the open item, its log probabilities, and what stands round a piece of text in its events.
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._head = b""
        self._middle = b""
        self._tail = b""

    @property
    def count(self) -> int:
        """The number of items."""
        return len(self._output)

    def add(self, item: objects.OutputItem) -> None:
        """Add an *item* whose events are rendered elsewhere."""
        self._output.append(item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.next_number += 1
        return response_event(kind, self.next_number - 1, self._framing, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        assert self.item is not None
        return self._event(f"response.{kind}", item_id=self.item.id, output_index=len(self._output) - 1, **fields)

    def _part_event(self, what: str, part: objects.OutputText | objects.ReasoningText | objects.SummaryText) -> bytes:
        return self._item_event(f"{self._kind.part_event}.{what}", **{self._kind.index_field: 0}, part=part)

    def parsed(self, events: Sequence[ParserEvent], entries: list[ContentLogprob]) -> bytes:
        """Return the events for those of the parser; the first text carries the log probabilities *entries*."""
        rendered = b""
        for part in events:
            if isinstance(part, Content):
                rendered += self._content(part.text, entries)
                entries = []
            elif isinstance(part, ToolCallStart):
                rendered += self._open_call(part)
            else:
                if isinstance(part, Reasoning):
                    rendered += self.begin(objects.OutputReasoning)
                rendered += self.text(part.text)
        return rendered

    def _open_call(self, start: ToolCallStart) -> bytes:
        """Return the events that begin the call of a tool."""
        tool = self._names.get(start.name, ToolName(start.name))
        kind: type[objects.OutputFunctionCall | objects.OutputCustomCall] = objects.OutputFunctionCall
        if tool.custom:
            kind = objects.OutputCustomCall
        namespace: str | UnsetType = UNSET
        if tool.namespace is not None:
            namespace = tool.namespace
        return self._open(kind, call_id=start.id, name=tool.name, namespace=namespace)

    def _content(self, text: str, entries: list[ContentLogprob]) -> bytes:
        if not text and not entries:
            return b""
        rendered = self.begin(objects.OutputMessage)
        if not entries:
            return rendered + self.text(text)
        self._texts.append(text)
        self._logprobs += entries
        return rendered + self._item_event("output_text.delta", content_index=0, delta=text, logprobs=entries)

    def text(self, text: str) -> bytes:
        """Return the event for more *text* of the open item."""
        self._texts.append(text)
        if not self._head:
            # What a custom tool gets is read when it is whole.
            return b""
        number = self.next_number
        self.next_number = number + 1
        return self._head + b"%d" % number + self._middle + encode(text) + self._tail

    def begin(self, kind: type[objects.OutputMessage | objects.OutputReasoning]) -> bytes:
        """Return the events that begin an item of *kind*, unless one is open."""
        if isinstance(self.item, kind):
            return b""
        return self._open(kind)

    def _open(self, kind: type[objects.OpenItem], **fields: Any) -> bytes:
        """Return the end of the open item, and the events that begin one of *kind*."""
        rendered = self.close("completed")
        names = self._kinds[kind]
        index = len(self._output)
        # The id has that of the response, so that the item can be found by it.
        item = kind(id=f"{names.prefix}_{self._response_id.partition('_')[2]}{index:04x}", **fields)
        self._kind = names
        self.item = item
        self._output.append(item)
        rendered += self._event("response.output_item.added", output_index=index, item=item)
        content = b""
        if names.part is not None:
            rendered += self._part_event("added", names.part())
            content = b'"%b":0,' % names.index_field.encode()
        # All events for pieces of its text are alike.
        delta = f"response.{names.text}.delta"
        # A custom tool's text is sent whole.
        if kind is objects.OutputCustomCall:
            self._head = b""
        else:
            self._head = self._framing.begin(delta) + b'{"type":"%b","sequence_number":' % delta.encode()
        self._middle = b',"item_id":"%b","output_index":%d,%b"delta":' % (item.id.encode(), index, content)
        if kind is objects.OutputMessage:
            self._tail = b',"logprobs":[]}' + self._framing.after
        else:
            self._tail = b"}" + self._framing.after
        return rendered

    def close(self, status: objects.ItemStatus) -> bytes:
        """Return the events that end the open item, if there is one."""
        item = self.item
        kind = self._kind
        rendered = b""
        if item is None:
            return b""
        if isinstance(item, objects.OutputFunctionCall) and not self._texts and status == "completed":
            # Clients read the arguments as JSON.
            rendered = self.text("{}")
        text = "".join(self._texts)
        logprobs = self._logprobs
        if isinstance(item, objects.OutputFunctionCall) and status == "completed" and not is_object(text or "{}"):
            # The model broke it off, and went on with text.
            status = "incomplete"
        self._texts = []
        self._logprobs = []
        item.status = status
        done: dict[str, Any] = {kind.index_field: 0, "text": text}
        if isinstance(item, objects.OutputMessage):
            done["logprobs"] = logprobs
        elif isinstance(item, objects.OutputReasoning):
            if self._sealed:
                item.encrypted_content = seal(text)
            else:
                item.encrypted_content = None
        elif isinstance(item, objects.OutputFunctionCall):
            done = {"name": item.name, "arguments": text}
        else:
            text = custom_input(text)
            done = {"input": text}
            rendered += self._item_event(f"{kind.text}.delta", delta=text)
        kind.fill(item, text, logprobs)
        rendered += self._item_event(f"{kind.text}.done", **done)
        if kind.part is not None:
            rendered += self._part_event("done", getattr(item, kind.field)[0])
        rendered += self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self.item = None
        return rendered


def response_event(kind: str, number: int, framing: Framing = SERVER_SENT, **fields: Any) -> bytes:
    """Return the event of *kind* with the sequence number *number*."""
    return framing.event(kind, encode(objects.ResponseEvent(type=kind, sequence_number=number, **fields)))
