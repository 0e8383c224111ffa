"""The database for a command that needs nothing else of the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.core import datadir
from service.core.adapters import ready_database
from service.db.connect import is_sqlite
from service.db.engine import Database
from service.db.faults import opening
from service.db.migrations import check
from service.errors import Invalid
from service.settings import Settings

_WAIT_S = 5.0
"""Whoever types a command is there to try again; a server is not."""


@asynccontextmanager
async def own_database(settings: Settings) -> AsyncIterator[Database]:
    """Open it, as a server may have it open too. A SQLite one is made and brought up to date, as by every start.

    Raises ServiceError for a database that cannot be used, DatabaseUnavailable.
    """
    datadir.prepare(settings)
    await ready_database(settings.sqlalchemy_url, within_s=_WAIT_S)
    database = Database(settings.sqlalchemy_url)
    try:
        yield database
    finally:
        await database.close()


async def check_database(settings: Settings) -> None:
    """For commands that judge what is stored by the database: one that is not there would say that all is of no use.

    Raises ServiceError for one that is not there or not up to date, DatabaseUnavailable.
    """
    url = settings.sqlalchemy_url
    with opening():
        sqlite = is_sqlite(url)
    file = settings.data_dir / "preread.sqlite3"
    if sqlite and not settings.database_url and not (file.exists() and file.stat().st_size):
        raise Invalid(
            f"There is no database in {settings.data_dir}: set PREREAD_DATA_DIR and PREREAD_DATABASE_URL as for "
            "`preread serve`.",
            code="no_database",
        )
    await check(url)


async def has_keys(settings: Settings) -> bool:
    """Whether an API key was ever made. Raises as `own_database`."""
    async with own_database(settings) as database, database.reading() as uow:
        return await uow.people.is_any_key()
