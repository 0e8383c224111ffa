"""Sessions: conversations over documents, listed, forked and deleted."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from service.core import statuses
from service.core.access import ASK, OWNER, reached_document, usable_session
from service.core.answers import AnswerService
from service.core.audit import record
from service.core.clock import Clock
from service.core.deletion import expired
from service.core.ids import new_id
from service.core.together import Gathering
from service.core.turn_kv import TurnKV
from service.core.uploads import check_title
from service.db.engine import Database
from service.db.models import DocumentRow, SessionDocumentRow, SessionRow, TurnRow
from service.db.repositories import UnitOfWork
from service.engine.protocol import EngineClient, EngineLost
from service.errors import Conflict, Invalid, NotFound

MAX_PAGE = 100
MAX_INSTRUCTIONS_CHARS = 1000


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Part of a list, newest first."""

    sessions: Sequence[SessionRow]
    has_more: bool


class SessionService:
    """Use cases of sessions; what they answer is `AnswerService`'s."""

    def __init__(
        self,
        *,
        database: Database,
        engine: EngineClient,
        answers: AnswerService,
        turn_kv: TurnKV,
        clock: Clock,
        gathering: Gathering,
    ) -> None:
        self._database = database
        self._engine = engine
        self._answers = answers
        self._turn_kv = turn_kv
        self._clock = clock
        self._gathering = gathering

    async def create(
        self,
        owner_id: str,
        document_ids: Sequence[str],
        title: str = "",
        instructions: str = "",
        *,
        origin: str = "",
    ) -> SessionRow:
        """A new session over ready documents, which need not be theirs: they may be asked about. `instructions`: how
        answers are wanted; `origin`: what began it (`SessionRow.origin`).

        Raises Invalid for their number, for one that is named twice and for several without index heads, TooLong for
        several that do not fit together, NotFound, Forbidden, Conflict (``document_not_ready``).
        """
        self._gathering.check(document_ids)
        check_title(title)
        check_instructions(instructions)
        async with self._database.writing() as uow:
            documents = [await self._ready(uow, owner_id, document_id) for document_id in document_ids]
            if len(documents) > 1:
                self._gathering.of(documents)
            row = self._new_row(owner_id, document_ids, title, instructions)
            row.origin = origin
            await uow.sessions.add(row)
            await record(uow, row.created_at, owner_id, "session", row.id, document_ids[0])
        return row

    async def page(
        self, owner_id: str, *, limit: int = 20, after: str | None = None, shared: bool = False
    ) -> SessionPage:
        """Their own, or those of others that are `shared` with them, newest first. Raises Invalid for a bad limit,
        NotFound for a cursor that is no session."""
        if not 1 <= limit <= MAX_PAGE:
            raise Invalid(f"limit is {limit}; it must be from 1 to {MAX_PAGE}.", param="limit")
        async with self._database.reading() as uow:
            now, last = self._clock.now(), None
            if after is not None:
                last, _ = await usable_session(uow, owner_id, after, now)
            rows = await uow.sessions.page(owner_id, limit=limit + 1, after=last, now=now, shared=shared)
        return SessionPage(rows[:limit], len(rows) > limit)

    async def get(self, owner_id: str, session_id: str) -> tuple[SessionRow, Sequence[TurnRow]]:
        """A session, also one that is shared with them, and its turns in order. Raises NotFound."""
        async with self._database.reading() as uow:
            row, _ = await usable_session(uow, owner_id, session_id, self._clock.now())
            return row, await uow.turns.of_session(session_id)

    async def delete(self, owner_id: str, session_id: str) -> None:
        """Remove a session: its running answer is ended, its turns' KV goes unless a fork uses it. Links to it go, and
        what was asked through them.

        Raises NotFound, Forbidden, StorageFull.
        """
        async with self._database.reading() as uow:
            await usable_session(uow, owner_id, session_id, self._clock.now(), need=OWNER)
            links = [share.id for share in await uow.shares.of_session(session_id) if share.subject == share.id]
        await self.remove(owner_id, session_id)
        for link_id in links:
            await self.delete_all(link_id)

    async def delete_all(self, owner_id: str) -> None:
        """Remove every session of an owner, also what they may not see any more."""
        async with self._database.reading() as uow:
            session_ids = await uow.sessions.of_owner(owner_id)
        for session_id in session_ids:
            with suppress(NotFound):  # removed meanwhile
                await self.remove(owner_id, session_id)

    async def remove(self, owner_id: str, session_id: str) -> None:
        """Remove a session of theirs, also one that they may not see any more; links to it go by themselves. Raises
        NotFound."""
        await self._answers.stop(session_id)
        async with self._database.writing() as uow:
            row = await uow.sessions.get(session_id, owner_id)
            document = await uow.documents.get(row.document_id) if row else None
            if row is None or document is None:
                raise NotFound("There is no such session.")
            kv_ids = await uow.turns.unshared_kv(session_id)
            await uow.sessions.remove(row)
            await record(uow, self._clock.now(), owner_id, "session.delete", session_id, row.document_id)
        with suppress(EngineLost):  # a lost engine holds no memory
            await self._engine.release_session(session_id)
        # Where the first document is, whoever asked.
        await self._turn_kv.delete(document.owner_id, kv_ids)

    async def fork(
        self,
        owner_id: str,
        session_id: str,
        *,
        after_turn: str | None = None,
        title: str | None = None,
        instructions: str | None = None,
        origin: str = "",
    ) -> tuple[SessionRow, Sequence[TurnRow]]:
        """A new session of theirs with the same turns, through `after_turn` or the last one that is over; also of a
        session that is shared with them. KV is shared; what is not given is as before.

        Turns that failed, or run still, are not part of it. Raises NotFound, Forbidden, Conflict when `after_turn` is
        such a turn, Invalid for the title or the instructions, StorageFull.
        """
        check_title(title or "")
        check_instructions(instructions or "")
        async with self._database.writing() as uow:
            now = self._clock.now()
            source, _ = await usable_session(uow, owner_id, session_id, now, need=ASK, asking=True)
            kept = await _turns_through(uow, session_id, after_turn)
            row = self._new_row(
                owner_id,
                source.document_ids,
                source.title if title is None else title,
                source.instructions if instructions is None else instructions,
            )
            row.forked_from, row.origin = source.id, origin
            await uow.sessions.add(row)
            await record(uow, now, owner_id, "fork", row.id, source.id)
            turns = [_copy(turn, row.id, ordinal) for ordinal, turn in enumerate(kept, 1)]
            for turn in turns:
                await uow.turns.add(turn)
        return row, turns

    async def _ready(self, uow: UnitOfWork, owner_id: str, document_id: str) -> DocumentRow:
        reached = await reached_document(uow, owner_id, document_id, self._clock.now())
        if reached is None or expired(reached.row, self._clock.now()):
            raise NotFound(f"There is no such document: {document_id[:80]}.", param="document_ids")
        document = reached.require(ASK)
        if document.status != statuses.READY:
            over = document.status in statuses.TERMINAL
            do = "it cannot be asked about, and its `error` says why" if over else "wait until it has been read"
            raise Conflict(
                f"The document {document.id} is {document.status}, not ready: {do}.",
                code="document_not_ready",
                param="document_ids",
            )
        return document

    def _new_row(self, owner_id: str, document_ids: Sequence[str], title: str, instructions: str) -> SessionRow:
        now = self._clock.now()
        return SessionRow(
            id=new_id("ses"),
            owner_id=owner_id,
            document_id=document_ids[0],
            documents=[SessionDocumentRow(ordinal=n, document_id=each) for n, each in enumerate(document_ids)],
            title=title,
            instructions=instructions.strip(),
            created_at=now,
            updated_at=now,
        )


def check_instructions(instructions: str) -> None:
    """Raises Invalid for ones that are too long."""
    if len(instructions) > MAX_INSTRUCTIONS_CHARS:
        raise Invalid(
            f"instructions has {len(instructions)} characters, at most {MAX_INSTRUCTIONS_CHARS}: they are read again "
            "with every question.",
            param="instructions",
        )


async def _turns_through(uow: UnitOfWork, session_id: str, after_turn: str | None) -> Sequence[TurnRow]:
    turns = await uow.turns.context(session_id)
    if after_turn is None:
        return turns
    for n, turn in enumerate(turns, 1):
        if turn.id == after_turn:
            return turns[:n]
    if await uow.turns.get(session_id, after_turn) is None:
        raise NotFound("There is no such answer in this session.", param="after_turn")
    raise Conflict("That answer failed or is not over: a fork cannot begin after it.", param="after_turn")


_OWN = ("id", "session_id", "ordinal", "lease_owner", "followed")
_COPIED = tuple(column.key for column in TurnRow.__table__.columns if column.key not in _OWN)


def _copy(turn: TurnRow, session_id: str, ordinal: int) -> TurnRow:
    values = {name: getattr(turn, name) for name in _COPIED}
    return TurnRow(id=new_id("ans"), session_id=session_id, ordinal=ordinal, **values)
