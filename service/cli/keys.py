"""`preread keys`: API keys, in the database itself; a server may run meanwhile."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from service.cli.output import err, expected_errors, json_option, print_json

T = TypeVar("T")
_UNITS = {"h": 3600.0, "d": 86400.0}


@click.group()
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command()
@click.option("--user", default="local", help="Whose key it is: a name, made if there is none like it.")
@click.option("--organization", default="local", help="The user's organization, made if there is none like it.")
@click.option("--name", default="", help="What the key is for, shown in the list.")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(["read", "ask", "manage", "metrics"]),
    help="May be given several times; `manage`, the default, includes `ask`, which includes `read`.",
)  # fmt: skip
@click.option("--expires", "ttl", help="After how long it is refused: 12h, 30d. Never if left out.", metavar="TIME")
@json_option
@expected_errors
def create(user: str, organization: str, name: str, scopes: tuple[str, ...], ttl: str | None, as_json: bool) -> None:
    """Make a key and print it, once: only a hash of it is kept.

    From the first key on, the server refuses requests without one. What was made before belongs to the user `local` of
    the organization `local`.
    """
    ttl_s = None if ttl is None else _seconds(ttl)
    made, token = _with_ring(
        lambda ring: ring.create(
            user=user, organization=organization, name=name, scopes=scopes or ("manage",), ttl_s=ttl_s
        )
    )
    if as_json:
        print_json(_row(made) | {"token": token})
        return
    click.echo(token)
    err.print(
        f"A key of {user} ({organization}), for: {', '.join(made.row.scopes)}. It is not shown again. Send it as "
        "Authorization: Bearer KEY.",
        style="dim", markup=False,
    )  # fmt: skip


@keys.command("list")
@json_option
@expected_errors
def list_keys(as_json: bool) -> None:
    """All keys, oldest first, without their secrets."""
    found = _with_ring(lambda ring: ring.all())
    if as_json:
        print_json([_row(key) for key in found])
        return
    for key in found:
        row = _row(key)
        used = f"used {_day(row['last_used_at'])}" if row["last_used_at"] else "not used"
        until = f", until {_day(row['expires_at'])}" if row["expires_at"] else ""
        name = f" {row['name']!r}" if row["name"] else ""
        what = f"{row['id']}{name}: {row['user']} ({row['organization']}), {', '.join(row['scopes'])}"
        click.echo(f"{what}: {row['state']}{until}, {used}")


@keys.command()
@click.argument("key_id")
@json_option
@expected_errors
def revoke(key_id: str, as_json: bool) -> None:
    """Refuse a key from the next request on. KEY_ID is the part before its point."""
    key_id = key_id.partition(".")[0]
    _with_ring(lambda ring: ring.revoke(key_id))
    if as_json:
        print_json({"id": key_id, "state": "revoked"})
    err.print(f"{key_id} is revoked.", markup=False)


@keys.command()
def new() -> None:
    """Print a key for PREREAD_ADMIN_KEY, or for the file that PREREAD_ADMIN_KEY_FILE names. Nothing is stored: a server
    that has it in its settings knows it."""
    from service.core.credentials import KEY, new_secret
    from service.core.ids import new_id

    click.echo(f"{new_id(KEY)}.{new_secret()}")


def _with_ring(step: Callable[[Any], Awaitable[T]]) -> T:
    return asyncio.run(_on_database(step))


async def _on_database(step: Callable[[Any], Awaitable[T]]) -> T:
    from service.cli.config import read_settings
    from service.core.clock import SystemClock
    from service.core.key_ring import KeyRing
    from service.core.own_database import own_database

    async with own_database(read_settings()) as database:
        return await step(KeyRing(database, SystemClock()))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,5})([hd])", text.strip())
    if not match or not int(match[1]):
        raise click.BadParameter("write hours or days, such as 12h or 30d", param_hint="--expires")
    return int(match[1]) * _UNITS[match[2]]


def _row(key: Any) -> dict[str, Any]:
    row = key.row
    return {
        "id": row.id, "name": row.name, "user": key.user, "organization": key.organization, "scopes": row.scopes,
        "origin": row.origin, "state": key.state(time.time()), "created_at": row.created_at,
        "expires_at": row.expires_at, "last_used_at": row.last_used_at,
    }  # fmt: skip


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
