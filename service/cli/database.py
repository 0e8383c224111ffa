"""`preread db`."""

import asyncio

import click

from service.cli.output import err, expected_errors


@click.group()
def database() -> None:
    """Bring the database up to date."""


@database.command()
@expected_errors
def upgrade() -> None:
    """Migrate the database to this version. A SQLite one is migrated by every start anyway."""
    from service.cli.config import read_settings
    from service.core import datadir
    from service.db.migrations import upgrade as migrate

    settings = read_settings()
    datadir.prepare(settings)
    asyncio.run(migrate(settings.sqlalchemy_url))
    err.print("The database is up to date.")
