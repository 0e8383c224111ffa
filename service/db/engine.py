"""The database and its explicit units of work.

SQLite runs in WAL mode with foreign keys on. A writing unit takes the write lock at its start (`BEGIN
IMMEDIATE`), so that two writers wait for each other instead of failing half-way. On PostgreSQL a lock of ours is taken
for the same.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from sqlalchemy import event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.connect import create_engine, is_sqlite, place_of
from service.db.faults import committing, connecting, faults, is_away, opening, unavailable
from service.db.repositories import UnitOfWork
from service.errors import DatabaseUnavailable

WRITE_LOCK = 0x70726561
"""The name of our lock in PostgreSQL. Migrations take it too."""
_PAUSE_S = 0.5
"""A database that could not be reached is left alone for so long: whoever waits in line is not kept waiting."""
LEAVE_S = 3.0
"""The end of a process waits so long for a database to answer."""
_READS: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class Database:
    """Opens units of work. Rows stay readable after it, but for their deferred columns."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = is_sqlite(url)
        with opening():
            self.engine = create_engine(url)
        self._opened: WeakSet[Any] = WeakSet()
        if not self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", self._note)
        self._turn = asyncio.Lock()
        self._left = False
        self._away_until = 0.0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[UnitOfWork]:
        """One consistent view; nothing is written. Raises DatabaseUnavailable."""
        async with self._session({} if self.is_sqlite else _READS, autoflush=False) as session:
            yield UnitOfWork(session)

    @asynccontextmanager
    async def writing(self, *, alone: bool = True) -> AsyncIterator[UnitOfWork]:
        """Commits at the end of the block, rolls back when it raises. Units of one process take turns in order.

        `alone`: no other process writes meanwhile, so that what was read stays true. A unit of a single statement
        needs no such thing. Raises StorageFull when the disk refused the write, AlreadyExists for a unique key,
        DatabaseUnavailable, of which CommitUnknown means that it may have been done all the same. A unit inside another
        one would wait for itself.
        """
        # SQLite lets waiting writers poll, in no order; many at once would run into its timeout.
        async with self._turn, self._session({"preread_write": True}) as session:
            if alone and not self.is_sqlite:
                await session.execute(text(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})"))
            yield UnitOfWork(session)
            with committing(is_elsewhere=not self.is_sqlite):
                await _whole(session.commit())

    async def ping(self) -> None:
        """Raises when the database does not answer."""
        async with self._session({}) as session:
            await session.execute(text("SELECT 1"))

    async def leave(self) -> None:
        """Before the end: a database in another process that does not answer now is not waited for any more. Whoever
        waits for it is told DatabaseUnavailable."""
        if self.is_sqlite:
            return
        answer = asyncio.create_task(self.ping())
        await asyncio.wait({answer}, timeout=LEAVE_S)
        if answer.done() and answer.exception() is None:
            return
        self._left = True
        for connection in list(self._opened):
            connection.terminate()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

    async def close(self) -> None:
        await self.engine.dispose()

    def _note(self, connection: Any, _record: Any) -> None:
        self._opened.add(connection.driver_connection)

    @asynccontextmanager
    async def _session(self, options: dict[str, Any], *, autoflush: bool = True) -> AsyncIterator[AsyncSession]:
        if self._left or time.monotonic() < self._away_until:
            raise unavailable(place_of(self.url))
        async with closing(AsyncSession(self.engine, expire_on_commit=False, autoflush=autoflush)) as session:
            try:
                with connecting():
                    await session.connection(execution_options=options)
                with faults():
                    yield session
            except DatabaseUnavailable as error:
                error.place = place_of(self.url)
                self._away_until = 0.0 if self.is_sqlite else time.monotonic() + _PAUSE_S
                # Not given back to the others: a connection that stood still would make the next one wait too.
                with suppress(SQLAlchemyError, OSError):
                    await session.invalidate()
                raise


@asynccontextmanager
async def closing(session: AsyncSession) -> AsyncIterator[AsyncSession]:
    """Gives a session back at the end. A database that goes away only then takes nothing: all was read, or kept."""
    is_done = False
    try:
        async with session:
            yield session
            is_done = True
    except (SQLAlchemyError, OSError) as error:
        if not is_away(error):
            raise
        with suppress(SQLAlchemyError, OSError):
            await session.invalidate()
        if not is_done:
            raise unavailable() from error


async def _whole(commit: Coroutine[Any, Any, None]) -> None:
    """To its end, also when who waits for it is cancelled: cut off between the commit and the connection's return to
    the pool, all is stored, and the pool would report a broken connection."""
    task = asyncio.create_task(commit)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
    task.result()
