"""Server-sent events, as a client reads them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One event with its JSON body."""

    name: str
    id: str
    data: Any


def events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events in a body that arrives in pieces cut anywhere, even within a character. Comments are skipped."""
    name, event_id, data = "message", "", []
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event(name, event_id, json.loads("\n".join(data)))
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "id":
            event_id = value
        elif field == "data":
            data.append(value)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    # Not str.splitlines: it also cuts at characters that JSON text may contain as they are, such as U+2028.
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode()
