"""What stored snapshots are about, for people: the store itself knows ids only."""

from service.db.engine import Database
from service.db.faults import opening
from service.settings import Settings


async def snapshot_titles(settings: Settings) -> dict[str, str]:
    """Titles by the ids of documents and of turns' KV; none where there is no database yet.

    Raises ServiceError for a database that cannot be read, such as one of an older version.
    """
    # Opening a SQLite database makes its file, which a command that lists should not.
    if not settings.database_url and not (settings.data_dir / "preread.sqlite3").exists():
        return {}
    with opening():
        database = Database(settings.sqlalchemy_url)
        try:
            async with database.reading() as uow:
                return await uow.turns.titles() | await uow.documents.titles()
        finally:
            await database.close()
