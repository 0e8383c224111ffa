"""Schema migrations, packaged, run without an `alembic.ini`."""

from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from service.db.connect import create_engine, is_sqlite, place_of
from service.db.engine import WRITE_LOCK
from service.db.faults import is_away, opening, unavailable
from service.errors import ServiceError


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


async def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to `revision`; makes an SQLite file that is not there."""
    await _run(url, lambda connection: command.upgrade(_config(connection), revision))


async def downgrade(url: str, revision: str) -> None:
    """Take the database at `url` back to `revision` (`base` is empty)."""
    await _run(url, lambda connection: command.downgrade(_config(connection), revision))


async def check(url: str) -> None:
    """Raises ServiceError when the database is not at the head, DatabaseUnavailable when it does not answer."""
    await _run(url, _require_head)


def _require_head(connection: Connection) -> None:
    head = ScriptDirectory.from_config(_config()).get_current_head()
    found = MigrationContext.configure(connection).get_current_revision()
    if found != head:
        raise ServiceError(
            f"The database is at revision {found or 'none'}, this version needs {head}: run `preread db upgrade`, "
            "after a backup.",
            code="database_not_migrated",
        )


async def _run(url: str, step: Callable[[Connection], None]) -> None:
    with opening():
        engine = create_engine(url, patient=True)
        try:
            async with engine.connect() as connection:
                connection = await connection.execution_options(preread_write=True)
                if not is_sqlite(url):  # SQLite's own lock is taken with the transaction
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})"))
                await connection.run_sync(step)
                await connection.commit()
        except Exception as error:
            if not is_sqlite(url) and (isinstance(error, OSError) or is_away(error)):
                raise unavailable(place_of(url)) from error
            raise
        finally:
            await engine.dispose()
