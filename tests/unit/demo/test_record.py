"""What the stand-ins have written down, read while they write."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from triton_openai.demo.record import Record


def line(id: str, event: str = "request", model: str = "m") -> str:
    return json.dumps({"model": model, "event": event, "id": id}) + "\n"


def test_lines_are_found_as_they_come(tmp_path: Path) -> None:
    """A record has whole lines in their order, by id, model and kind; a file that is not there yet is an empty one."""
    record = Record(tmp_path / "record.jsonl")
    assert [] == record.events()
    with record.path.open("a") as file:
        file.write(line("1") + line("2", model="other") + line("1", "finished")[:9])
        file.flush()
        assert ["1", "2"] == [each["id"] for each in record.events()]
        assert ["2"] == [each["id"] for each in record.events(model="other")]
        file.write(line("1", "finished")[9:])
    assert ["request", "finished"] == [each["event"] for each in record.events(id="1")]
    assert ["1"] == [each["id"] for each in record.events(event="finished")]
    assert [] == record.events(id="1", model="other")


def test_each_line_is_parsed_once(tmp_path: Path) -> None:
    """However often, and from however many threads, the record is looked into."""
    record = Record(tmp_path / "record.jsonl")
    record.path.write_text("".join(line(str(number)) for number in range(1000)))
    with patch("triton_openai.demo.record.json.loads", side_effect=json.loads) as loads:
        threads = [threading.Thread(target=record.events) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1000 == len(record.events())
    assert 1000 == loads.call_count


def test_waiting_for_a_line(tmp_path: Path) -> None:
    """What is waited for is returned; what does not come is an error that shows what there is instead."""
    record = Record(tmp_path / "record.jsonl")
    record.path.write_text(line("1"))
    assert 1 == len(record.wait_for(id="1"))
    with pytest.raises(TimeoutError, match=r"not within 0 s; there is .*'id': '1'"):
        record.wait_for(lambda events: len(events) == 2, 0)
