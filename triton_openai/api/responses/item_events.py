"""The events of output items: how they are called, and the items that stored events add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from triton_openai.api.logprobs import ContentLogprob
from triton_openai.api.responses import objects
from triton_openai.api.sse import event_data


class ItemKind(NamedTuple):
    """The prefix of the ids of items, the names of events with their text, and the field or part with the text."""

    prefix: str
    text: str
    field: str
    part: type[objects.OutputText | objects.ReasoningText | objects.SummaryText] | None = None
    part_event: str = "content_part"
    index_field: str = "content_index"

    def fill(self, item: objects.OpenItem, text: str, logprobs: Sequence[ContentLogprob]) -> None:
        """Set the whole *text* of *item*."""
        if self.part is None:
            setattr(item, self.field, text)
        elif self.part is objects.OutputText:
            setattr(item, self.field, (objects.OutputText(text=text, logprobs=logprobs),))
        else:
            setattr(item, self.field, (self.part(text=text),))


#: By the type of the item.
ITEM_KINDS: Mapping[type[objects.OpenItem], ItemKind] = {
    objects.OutputMessage: ItemKind("msg", "output_text", "content", objects.OutputText),
    objects.OutputReasoning: ItemKind("rs", "reasoning_text", "content", objects.ReasoningText),
    objects.OutputFunctionCall: ItemKind("fc", "function_call_arguments", "arguments"),
    objects.OutputCustomCall: ItemKind("ctc", "custom_tool_call_input", "input"),
}
#: Of reasoning that is given as a summary.
SUMMARY = ItemKind(
    "rs", "reasoning_summary_text", "summary", objects.SummaryText, "reasoning_summary_part", "summary_index"
)
_event = msgspec.json.Decoder(objects.ResponseEvent)


def replayed(events: bytes) -> list[objects.OutputItem]:
    """Return the output in whole *events*; an item whose end they do not have is incomplete."""
    output: list[objects.OutputItem] = []
    deltas: list[objects.ResponseEvent] = []
    for data in event_data(events):
        event = _event.decode(data)
        if event.item and event.output_index is not UNSET:
            output[event.output_index :] = [event.item]
            deltas = []
        elif event.delta:
            deltas.append(event)
    if output and not isinstance(output[-1], objects.OutputCompaction) and output[-1].status == "in_progress":
        item = output[-1]
        item.status = "incomplete"
        summarizes = bool(deltas) and deltas[0].type.startswith(f"response.{SUMMARY.text}.")
        if summarizes:
            kind = SUMMARY
        else:
            kind = ITEM_KINDS[type(item)]
        text = "".join([event.delta or "" for event in deltas])
        logprobs: list[ContentLogprob] = []
        for event in deltas:
            logprobs += event.logprobs or ()
        kind.fill(item, text, logprobs)
    return output
