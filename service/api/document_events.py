"""A document's progress as events.

An event's id is a position (the stage's rank, then how much of it is done), not a counter: it means the same
after a restart, so a reader goes on from `Last-Event-ID` though no event is ever kept.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from service.api.schemas.documents import DocumentBody, document_body
from service.core import statuses
from service.core.documents import DocumentView

Position = tuple[int, int]
_END: Position = (len(statuses.ORDER), 0)
_ID = re.compile(r"(\d{1,2})-(\d{1,12})")


@dataclass(frozen=True, slots=True)
class DocumentEvent:
    """`progress`, `ready` or `failed` (also for a cancelled document; its `status` and `error` say so)."""

    id: str
    name: str
    data: DocumentBody


def position_after(last_event_id: str | None) -> Position:
    """Where a reader with this `Last-Event-ID` is; an unknown id is at the beginning."""
    match = _ID.fullmatch(last_event_id or "")
    return (int(match[1]), int(match[2])) if match else (-1, 0)


def is_over(position: Position) -> bool:
    """Whether nothing follows."""
    return position >= _END


async def document_events(views: AsyncIterator[DocumentView], position: Position) -> AsyncIterator[DocumentEvent]:
    """Events beyond `position`, through the last one."""
    async for view in views:
        if (here := _position_of(view)) > position:
            position = here
            yield DocumentEvent(f"{here[0]}-{here[1]}", _name_of(view), document_body(view))


def _position_of(view: DocumentView) -> Position:
    if view.status in statuses.TERMINAL:
        return _END
    return statuses.ORDER.index(view.status), view.progress.done


def _name_of(view: DocumentView) -> str:
    if view.status == statuses.READY:
        return "ready"
    return "failed" if view.status in statuses.TERMINAL else "progress"
