"""The database for a command that needs nothing else of the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.core import datadir
from service.core.adapters import ready_database
from service.db.engine import Database
from service.settings import Settings


@asynccontextmanager
async def own_database(settings: Settings) -> AsyncIterator[Database]:
    """Open it, as a server may have it open too. A SQLite one is made and brought up to date, as by every start.

    Raises ServiceError for a database that cannot be used, DatabaseUnavailable.
    """
    datadir.prepare(settings)
    await ready_database(settings.sqlalchemy_url)
    database = Database(settings.sqlalchemy_url)
    try:
        yield database
    finally:
        await database.close()


async def has_keys(settings: Settings) -> bool:
    """Whether an API key was ever made. Raises as `own_database`."""
    async with own_database(settings) as database, database.reading() as uow:
        return await uow.people.is_any_key()
