"""Reads an event stream over a real socket."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Event:
    """`id` is "" and `data` None where the stream had none; a comment has the name "comment"."""

    id: str
    name: str
    data: Any


def events_of(response: httpx.Response) -> Iterator[Event]:
    """The events of an open streamed response, as they arrive."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if not line:
            if fields:
                data = json.loads(fields["data"]) if "data" in fields else None
                yield Event(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}
        elif line.startswith(":"):
            yield Event("", "comment", None)
        else:
            name, _, value = line.partition(":")
            fields[name] = fields[name] + "\n" + value.removeprefix(" ") if name in fields else value.removeprefix(" ")


def text_of(events: list[Event]) -> str:
    """The answer as a client sees it grow."""
    return "".join(event.data["text"] for event in events if event.name == "token")


def last_of(events: list[Event], name: str) -> dict[str, Any]:
    """The body of the last event, which must have that name."""
    assert events, "the stream was empty"
    assert events[-1].name == name, events[-1]
    return events[-1].data
