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
    """What the ids of items begin with, how events with their text are called, and the field or part with the text."""

    prefix: str
    text: str
    field: str
    part: type[objects.OutputText | objects.ReasoningText | objects.SummaryText] | None = None
    part_event: str = "content_part"
    numbered: str = "content_index"

    def fill(self, item: objects.OutputItem, text: str, logprobs: Sequence[ContentLogprob]) -> None:
        """Give *item* its whole *text*."""
        if self.part is None:
            setattr(item, self.field, text)
        else:
            if self.part is objects.OutputText:
                more = {"logprobs": logprobs}
            else:
                more = {}
            setattr(item, self.field, (self.part(text=text, **more),))


#: By the type of the item.
ITEM_KINDS: Mapping[type[objects.OutputItem], ItemKind] = {
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
    """Return the output that whole *events* tell of, as far as they go; an item that they do not end is incomplete."""
    output: list[objects.OutputItem] = []
    deltas: list[objects.ResponseEvent] = []
    for data in event_data(events):
        told = _event.decode(data)
        if told.item and told.output_index is not UNSET:
            output[told.output_index :] = [told.item]
            deltas = []
        elif told.delta:
            deltas.append(told)
    if output and output[-1].status == "in_progress":
        item = output[-1]
        item.status = "incomplete"
        summarizes = bool(deltas) and deltas[0].type.startswith(f"response.{SUMMARY.text}.")
        if summarizes:
            kind = SUMMARY
        else:
            kind = ITEM_KINDS[type(item)]
        logprobs = [entry for told in deltas for entry in told.logprobs or ()]
        kind.fill(item, "".join([told.delta or "" for told in deltas]), logprobs)
    return output
