"""The database and its explicit units of work.

SQLite runs in WAL mode with foreign keys on. A writing unit takes the write lock at its start (`BEGIN
IMMEDIATE`), so that two writers wait for each other instead of failing half-way.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from alembic.util import CommandError
from sqlalchemy import event, make_url, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from service.db.repositories import UnitOfWork
from service.errors import ServiceError, StorageFull

BUSY_TIMEOUT_MS = 15_000
_FULL = ("database or disk is full", "disk i/o error")


class Database:
    """Opens units of work. Rows stay readable after it, but for their deferred columns."""

    def __init__(self, url: str) -> None:
        self.url = url
        with opening():
            self.engine = create_engine(url)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[UnitOfWork]:
        """One consistent view; nothing is written."""
        async with AsyncSession(self.engine, expire_on_commit=False, autoflush=False) as session:
            yield UnitOfWork(session)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[UnitOfWork]:
        """Commits at the end of the block, rolls back when it raises. Units of one process take turns in order.

        Raises StorageFull when the disk refused the write, AlreadyExists for a unique key. A unit inside another
        one would wait for itself.
        """
        # SQLite lets waiting writers poll, in no order; many at once would run into its timeout.
        async with self._turn, AsyncSession(self.engine, expire_on_commit=False) as session:
            with _storage_errors():
                await session.connection(execution_options={"preread_write": True})
                yield UnitOfWork(session)
                await session.commit()

    async def ping(self) -> None:
        """Raises when the database does not answer."""
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        await self.engine.dispose()


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if any(sign in str(error.orig).lower() for sign in _FULL):
            raise StorageFull("The disk refused a write to the database: free some space, try again.") from error
        raise


@contextmanager
def opening() -> Iterator[None]:
    """Say in a sentence why a database cannot be opened or migrated; its URL may hold a password and is not shown."""
    try:
        yield
    except (SQLAlchemyError, CommandError, ImportError) as error:
        raise ServiceError(
            f"The database cannot be used: {getattr(error, 'orig', None) or error}. Check PREREAD_DATABASE_URL; put a "
            "backup in the place of a damaged file.",
            code="database_unusable",
        ) from error


def create_engine(url: str) -> AsyncEngine:
    """An async engine; for SQLite with the pragmas above, its file private to the user."""
    if make_url(url).get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True, hide_parameters=True)
    _private_file(make_url(url).database)
    # hide_parameters: an error of the database must not carry a document's text into the log.
    engine = create_async_engine(url, pool_size=4, max_overflow=4, hide_parameters=True)
    event.listen(engine.sync_engine, "connect", _on_connect)
    event.listen(engine.sync_engine, "begin", _on_begin)
    return engine


def _private_file(database: str | None) -> None:
    if database and database != ":memory:":
        Path(database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))


def _on_connect(dbapi_connection: Any, _record: Any) -> None:
    # The driver must not begin transactions by itself: `_on_begin` says which kind.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_begin(connection: Any) -> None:
    write = connection.get_execution_options().get("preread_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
