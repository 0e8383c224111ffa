"""`preread audit`: who did what."""

import asyncio
import time
from typing import Any

import click

from service.cli.output import expected_errors, json_option, print_json


@click.command()
@click.option("--user", "user_id", help="Only what this user, by id, did.")
@click.option("--about", "target", help="Only what was done to this document, session, answer, share or key.")
@click.option("--days", type=click.FloatRange(min=0), default=7.0, show_default=True, help="How far back.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Most lines.")
@json_option
@expected_errors
def audit(user_id: str | None, target: str | None, days: float, limit: int, as_json: bool) -> None:
    """Who asked, uploaded, changed, shared and deleted what, newest first. Ids only: no text is ever in it.

    Lines are kept for PREREAD_AUDIT_DAYS. A server may run meanwhile.
    """
    rows = asyncio.run(_rows(user_id, target, time.time() - days * 86400, limit))
    if as_json:
        print_json(rows)
        return
    for row in rows:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["at"]))
        other = f" {row['other']}" if row["other"] else ""
        by = f" by {row['key_id']}" if row["key_id"] else ""
        click.echo(f"{at} {row['user_id']} {row['action']} {row['target']}{other}{by}")


async def _rows(user_id: str | None, target: str | None, since: float, limit: int) -> list[dict[str, Any]]:
    from service.cli.config import read_settings
    from service.core.own_database import own_database

    async with own_database(read_settings()) as database, database.reading() as uow:
        found = await uow.records.audited(limit=limit, since=since, user_id=user_id, target=target)
    names = ("at", "user_id", "key_id", "action", "target", "other")
    return [{name: getattr(row, name) for name in names} for row in found]
