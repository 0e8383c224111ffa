"""Server-sent events, as they come in pieces that are cut anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`data` is its JSON text. A comment, by which a quiet server says that it is there, has the name `comment`."""

    name: str
    id: str
    data: bytes


class Parser:
    """One for each connection: what is cut off at its end is never an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._name, self._id = b"", b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that are complete with these bytes."""
        # Not str.splitlines: it also cuts at characters that JSON text may contain as they are, such as U+2028.
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if (event := self._line(line.removesuffix(b"\r"))) is not None:
                yield event

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not name:
            return ServerEvent("comment", "", value)
        if name == b"event":
            self._name = value
        elif name == b"id":
            self._id = value
        elif name == b"data":
            self._data.append(value)
        return None

    def _end(self) -> ServerEvent | None:
        data, name, id = self._data, self._name, self._id
        self._data, self._name, self._id = [], b"", b""
        return ServerEvent(name.decode() or "message", id.decode(), b"\n".join(data)) if data else None
