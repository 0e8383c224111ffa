"""Sessions."""

from collections.abc import Iterator

from service.client import calls
from service.client.models import Session, SessionDetail, SessionList
from service.client.paging import one_by_one
from service.client.sync.shares import Shares
from service.client.sync.transport import Transport


class Sessions:
    """`client.sessions`. Every method raises PrereadError; those that take an id NotFound."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.shares = Shares(transport, "sessions")

    def create(self, document_ids: str | list[str], *, title: str = "", instructions: str = "") -> Session:
        """Begin a conversation about one document or several. `instructions`: how answers are wanted; they are read
        with every question. Raises Conflict when one is not ready, Invalid, TooLong."""
        ids = [document_ids] if isinstance(document_ids, str) else list(document_ids)
        return self._transport.send(calls.create_session(ids, title, instructions))

    def list(self, *, shared: bool = False, page_size: int = 100) -> Iterator[Session]:
        """All of yours, newest first, fetched as they are iterated; with `shared` those of others that you may see.
        What was iterated may be deleted meanwhile."""
        return one_by_one(lambda after: self.list_some(limit=page_size, after=after, shared=shared))

    def list_some(self, *, limit: int = 20, after: str | None = None, shared: bool = False) -> SessionList:
        """`limit` of them (at most 100), behind the one with the id `after`."""
        return self._transport.send(calls.list_sessions(limit, after, shared))

    def get(self, session_id: str) -> SessionDetail:
        """One session with its turns."""
        return self._transport.send(calls.get_session(session_id))

    def fork(
        self,
        session_id: str,
        *,
        after_turn: str | None = None,
        title: str | None = None,
        instructions: str | None = None,
    ) -> SessionDetail:
        """A new session with the same turns, through `after_turn` if that is given. Nothing is computed."""
        return self._transport.send(calls.fork_session(session_id, after_turn, title, instructions))

    def delete(self, session_id: str) -> None:
        """Remove it and its turns; a running answer ends."""
        self._transport.send(calls.delete_session(session_id))
