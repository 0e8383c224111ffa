"""Schema migrations, packaged, run without an `alembic.ini`."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from service.db.engine import create_engine, opening


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


async def _run(url: str, step) -> None:
    with opening():
        engine = create_engine(url)
        try:
            async with engine.connect() as connection:
                connection = await connection.execution_options(preread_write=True)
                await connection.run_sync(step)
                await connection.commit()
        finally:
            await engine.dispose()
